"""Groups of options that a command takes as one object; several commands may share a group, which is declared once.

A group is a table: parameter -> (type, default, help, other arguments of typer.Option if there are any). The option's
name is the parameter's.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

Command = Callable[..., Any]
Options = Mapping[str, tuple[Any, ...]]


def with_options(
    command: Command, groups: Mapping[str | None, Options], into: str, build: Callable[..., Any]
) -> Command:
    """Return the command with parameter `into` replaced by the options, in a signature that typer reads. `groups`:
    heading in the help -> options. `build` gets all options by name and returns the parameter's value.
    """
    hints = typing.get_type_hints(command, localns={"Cluster": Any}, include_extras=True)
    own = [
        parameter.replace(annotation=hints.get(name, Any), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != into
    ]
    added = [
        _parameter(name, heading, *option) for heading, options in groups.items() for name, option in options.items()
    ]

    def decorated(**values: Any) -> Any:
        values[into] = build(**{option.name: values.pop(option.name) for option in added})
        return command(**values)

    decorated.__name__, decorated.__doc__ = command.__name__, command.__doc__
    signature = inspect.Signature([*own, *added])
    decorated.__signature__ = signature  # type: ignore[attr-defined]
    decorated.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return decorated


def _parameter(
    name: str, heading: str | None, kind: Any, default: Any, text: str, more: Mapping[str, Any] | None = None
) -> inspect.Parameter:
    word = name.rstrip("_").replace("_", "-")
    flag = f"--{word}/--no-{word}" if kind == bool | None or (kind is bool and default) else f"--{word}"
    option = typer.Option(flag, help=text, rich_help_panel=heading, **more or {})
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
