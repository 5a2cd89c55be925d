"""Checks the types of a call's arguments, so that an error names the wrong argument."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from cotenant.core.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
WORDS: dict[Any, str] = {
    str: "a text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call with an argument whose type is not the annotated one raises InputError with the argument's
    name. Annotations of other forms (`*runs`, `Any`, `ArrayLike`) are not checked.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = get_type_hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind = signature.parameters[name].kind
            if kind == inspect.Parameter.VAR_KEYWORD:
                for option, item in value.items():
                    check(option, item, hints.get(name, Any))
            elif kind != inspect.Parameter.VAR_POSITIONAL:
                check(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


def check_fields(values: dict[str, Any], owner: type) -> None:
    """Raise InputError for a value whose type is not that of the field of this name in the class `owner`."""
    hints = get_type_hints(owner)
    for name, value in values.items():
        check(name, value, hints.get(name, Any))


def check(name: str, value: Any, hint: Any) -> None:
    """Raise InputError, which names the argument, unless the value has the type that the annotation `hint` states."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not any(_fits(value, choice) for choice in choices):
        shown = " or ".join(_word(choice) for choice in choices)
        raise InputError(f"must be {shown}, not {repr(value)[:80]} ({type(value).__name__})", field=name)


def _fits(value: Any, choice: Any) -> bool:
    if choice is Any:
        return True
    if choice in (int, float):  # numbers of NumPy are numbers, but a switch is none
        kind = numbers.Integral if choice is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if get_origin(choice) in (Sequence, tuple):
        items = isinstance(value, Sequence) and not isinstance(value, str)
        return items and all(_fits(item, get_args(choice)[0]) for item in value)
    return not isinstance(choice, type) or isinstance(value, choice)


def _word(choice: Any) -> str:
    if get_origin(choice) in (Sequence, tuple):
        return "a list of texts" if get_args(choice)[0] is str else "a list of whole numbers"
    return WORDS.get(choice) or f"a {choice.__name__}"
