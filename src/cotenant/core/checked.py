"""Validation of configuration files: pydantic models, quantities with units, and errors as one sentence.

Imported only where a file is validated, so that modules that merely describe settings do not need pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cotenant.core.errors import InputError, nearest
from cotenant.core.units import (
    counted,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_memory,
    parse_memory_or_zero,
    parse_seconds,
    parse_time,
)

M = TypeVar("M", bound=BaseModel)


def parsed(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Return a pydantic validator that replaces a value by `parse(value)`; `parse` is for example `parse_seconds` of
    core/units.py. An InputError of `parse` becomes the validation error."""

    def convert(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:
            raise ValueError(error) from None

    return BeforeValidator(convert)


# JSON schemas of quantities in a configuration file, by which editors check and complete the file
TIME = WithJsonSchema({"type": ["number", "string"], "title": "time", "examples": ["2h", "500ms", "10s"]})
TIME_WITH_UNIT = WithJsonSchema(
    {"type": ["string", "integer"], "maximum": 0, "title": "time", "examples": ["500ms", "10s"]}
)  # the only number without a unit is 0
SIZE = WithJsonSchema({"type": ["integer", "string"], "title": "size", "examples": ["256MiB", "62.5GB", "8GiB"]})
PART = WithJsonSchema({"type": ["number", "string"], "title": "part", "examples": [0.3, "30%"]})

Seconds = Annotated[float, parsed(parse_seconds), TIME]
Nanoseconds = Annotated[int, parsed(lambda value: round(parse_time(value) * 1e9)), TIME_WITH_UNIT]
Bytes = Annotated[int, parsed(parse_bytes), SIZE]
Memory = Annotated[int, parsed(parse_memory), SIZE]
MemoryOrZero = Annotated[int, parsed(parse_memory_or_zero), SIZE]
Fraction = Annotated[float, parsed(parse_fraction), PART]


class Numbers(BaseModel):
    """Base of models with numbers: a switch is not a number."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `yes` and `true` as the value of a number, since pydantic would take them as 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {kind, *get_args(kind)} & {int, float} and bool not in get_args(kind):
            raise PydanticCustomError("number", "{value} is not a number", {"value": str(value).lower()})
        return value


class Strict(Numbers):
    """Base of the models of configuration files. Unknown keys are refused with a list of the known ones. The string
    below a field is its description. `elsewhere` has a hint for each unknown key that stands for known ones."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data if isinstance(data, Mapping) else ():
            if key not in known:
                near = cls.elsewhere.get(str(key)) or nearest(str(key), known)
                hint = f"; {near or 'known: ' + ', '.join(known)}"
                raise PydanticCustomError("unknown", "unknown setting {key}{hint}", {"key": repr(key), "hint": hint})
        return data


def check(model: type[M], data: Any, file: str | Path | None = None) -> M:
    """Validate the data as a model. Raises InputError with the field of the first error."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise complaint(error, file) from None


def complaint(error: ValidationError, file: str | Path | None = None) -> InputError:
    """Return the first validation error as one sentence with its field, such as services[0].slo_ms."""
    first = error.errors()[0]
    where, context = list(first["loc"]), first.get("ctx", {})
    cause = context.get("error")
    if first["type"] == "unknown":
        where.append(str(context["key"]).strip("'"))
        text = first["msg"]
    elif first["type"] == "value_error":
        inner = cause.args[0] if cause is not None and cause.args else first["msg"]
        text = inner.message if isinstance(inner, InputError) else str(inner)
        # an inner error may name a field of its own: the message names the outer field, followed by the inner one
        if isinstance(inner, InputError) and inner.field:
            where[-1:] = [inner.field] if inner.field.split(".")[0] == where[-1:][0] else [*where[-1:], inner.field]
    else:
        text = worded(first)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    return InputError(text, file=file, field=field or None)


def worded(problem: Mapping[str, Any], *, seconds: bool = False) -> str:
    """Return in words what is wrong with a value that pydantic refused. `problem`: an entry of
    ValidationError.errors(). `seconds`: the value is a time."""
    value, limits = problem["input"], problem.get("ctx", {})
    kind, shown = problem["type"], _short(value)
    if kind == "number":
        return str(problem["msg"])
    if kind == "literal_error":
        known = [word.strip("'") for word in limits["expected"].replace(" or ", ", ").split(", ")]
        hint = nearest(value, known) if isinstance(value, str) else ""
        return f"{shown} is not {', '.join(known[:-1])}{' or ' * (len(known) > 1)}{known[-1]}{'; ' * bool(hint)}{hint}"
    for word, name in _LIMITS.items():
        if kind == word:
            limit = limits[name.split()[-1]]
            said = format_seconds(limit) if seconds and limit else f"{limit:,.12g}{' s' * seconds}"
            return f"{shown} {' '.join(name.split()[:-1])} {said}"
    if kind in ("too_short", "string_too_short"):
        entry = "character" if kind == "string_too_short" else "entry"
        least = counted(limits["min_length"], entry, "entries" if entry == "entry" else None)
        return f"{shown} is too short: at least {least} {'is' if limits['min_length'] == 1 else 'are'} needed"
    if kind == "missing":
        return "is missing"
    if kind in _KINDS:
        return f"{shown} is not {_KINDS[kind]}"
    said = problem["msg"].removeprefix("Input ")
    return f"{shown} {said[:1].lower()}{said[1:]}"


# pydantic's type of an error -> words before the limit, and the limit's name in the error's context
_LIMITS = {
    "greater_than": "is not above gt", "greater_than_equal": "is less than ge",
    "less_than": "is not below lt", "less_than_equal": "is over le",
}  # fmt: skip
_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "a set of keys and values"),
    "string_type": "a text", "finite_number": "a finite number",
}  # fmt: skip


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
