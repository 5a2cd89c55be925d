"""Groups of options that several commands share, declared once."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

Command = Callable[..., Any]


def with_options(
    command: Command, options: dict[str, tuple[Any, Any]], into: str, build: Callable[..., Any]
) -> Command:
    """The command with parameter `into` replaced by the options, in a signature that typer reads."""
    hints = typing.get_type_hints(command, localns={"Cluster": Any}, include_extras=True)
    own = [
        parameter.replace(annotation=hints.get(name, Any), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != into
    ]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]

    def decorated(**values: Any) -> Any:
        values[into] = build(**{name: values.pop(name) for name in options})
        return command(**values)

    decorated.__name__, decorated.__doc__ = command.__name__, command.__doc__
    signature = inspect.Signature([*own, *added])
    decorated.__signature__ = signature  # type: ignore[attr-defined]
    decorated.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return decorated
