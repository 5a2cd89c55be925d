"""A model repository as Triton lays it out: NAME/VERSION/model.onnx (or model.pt2, model.pt, timed.json), config.pbtxt.

Versions are folders with a number; the largest is served unless the services file says which. A model folder without
version folders is its own version 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.serving.backends.base import BACKENDS
from cotenant.serving.config.server import ModelEntry

MOST_CONFIG = 1 << 20
_TOKEN = re.compile(
    r"\s*(?:\#[^\n]*\n?\s*)*"
    r"""(?:("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([A-Za-z_][\w.]*)|([-+]?[\d.][\w.+-]*)|([{}\[\]:,;<>]))"""
)


@dataclass(frozen=True)
class Found:
    """A model that can be loaded: by which backend, from which folder, as which version."""

    backend: str
    path: str | None
    version: str
    config: dict[str, Any] = field(default_factory=dict)


def find(entry: ModelEntry) -> Found:
    """What to load for a service; InputError when there is nothing."""
    if entry.path is None or not entry.path.is_dir():
        if entry.backend == "timed":
            return Found("timed", None, str(entry.version or 1))
        where = f"at {entry.path}" if entry.path is not None else "named"
        raise InputError(
            f"no model {where}; a repository has NAME/VERSION/model.onnx or model.pt2 (or give backend: timed)",
            field=f"services.{entry.service}.model",
        )
    config = _config(entry.path)
    version, folder = _version(entry)
    backend = entry.backend
    if backend == "auto":
        backend_found = next(
            (name for name, (_, files) in BACKENDS.items() if any((folder / f).is_file() for f in files)), None
        )
        if backend_found is None:
            every = ", ".join(f for _, files in BACKENDS.values() for f in files)
            raise InputError(f"has none of {every}", file=folder)
        return _with_timed(Found(backend_found, str(folder), version, config))
    files = BACKENDS[backend][1]
    if backend != "timed" and not any((folder / f).is_file() for f in files):
        raise InputError(f"has no {' or '.join(files)}, which backend {backend} runs", file=folder)
    return _with_timed(Found(backend, str(folder), version, config))


def _with_timed(found: Found) -> Found:
    """The file of a timed model joins its configuration."""
    if found.backend != "timed" or found.path is None:
        return found
    path = Path(found.path) / "timed.json"
    if not path.is_file():
        return found
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read: {error}", file=path) from None
    if not isinstance(own, dict):
        raise InputError("is not a JSON object", file=path)
    return Found("timed", found.path, found.version, {**found.config, **own})


def _version(entry: ModelEntry) -> tuple[str, Path]:
    assert entry.path is not None
    numbers = versions(entry.path)
    if not numbers:
        return "1", entry.path
    if entry.version is None:
        return str(max(numbers)), entry.path / str(max(numbers))
    if entry.version not in numbers:
        known = ", ".join(map(str, numbers))
        raise InputError(f"has no version {entry.version}; there are {known}", file=entry.path)
    return str(entry.version), entry.path / str(entry.version)


def versions(path: Path) -> list[int]:
    """Version numbers of a model folder, ascending."""
    try:
        return sorted(int(x.name) for x in path.iterdir() if x.is_dir() and x.name.isascii() and x.name.isdigit())
    except OSError:
        return []


def stamp(path: Path | None) -> tuple[tuple[str, int, int], ...]:
    """What changes when a model's files do: names, times and sizes."""
    if path is None or not path.is_dir():
        return ()
    found = []
    for file in sorted(path.rglob("*"))[:10_000]:
        try:
            status = file.stat()
        except OSError:
            continue
        if file.is_file():
            found.append((str(file.relative_to(path)), status.st_mtime_ns, status.st_size))
    return tuple(found)


# ---- config.pbtxt ----


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.pbtxt"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read: {error}", file=file) from None
    if len(text) > MOST_CONFIG:
        raise InputError("is too large for a configuration", file=file)
    try:
        return parse_text_proto(text)
    except ValueError as error:
        raise InputError(f"not protobuf text: {error}", file=file) from None


def parse_text_proto(text: str) -> dict[str, Any]:
    """Protobuf's text format as plain data: a repeated field is a list, a message a dict, an enum its name."""
    tokens = _tokens(text)
    message, end = _message(tokens, "")
    if end:
        raise ValueError(f"{end!r} closes nothing")
    return message


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            rest = re.sub(r"\s*(#[^\n]*(\n|$)\s*)+", "", text[at:])
            if not rest:
                return
            raise ValueError(f"unexpected {text[at : at + 20].strip()!r}")
        at = match.end()
        kind = ("string", "name", "number", "sign")[(match.lastindex or 1) - 1]
        yield kind, match.group(match.lastindex or 1)


def _message(tokens: Iterator[tuple[str, str]], closing: str) -> tuple[dict[str, Any], str]:
    """Fields until the closing sign; (fields, sign that ended it)."""
    out: dict[str, Any] = {}
    lists: set[str] = set()
    for kind, text in tokens:
        if kind == "sign" and text in ",;":
            continue
        if kind == "sign" and text in "}>":
            if text != closing:
                raise ValueError(f"{text!r} closes nothing")
            return out, text
        if kind != "name":
            raise ValueError(f"a field's name is expected, not {text!r}")
        sign = next(tokens, ("", ""))
        if sign == ("sign", ":"):
            sign = next(tokens, ("", ""))
        value = _value(tokens, sign)
        if isinstance(value, list):
            lists.add(text)
            out[text] = [*out.get(text, []), *value]
        elif text in out:
            out[text] = [*(out[text] if text in lists else [out[text]]), value]
            lists.add(text)
        else:
            out[text] = value
    if closing:
        raise ValueError(f"{closing!r} is missing at the end")
    return out, ""


def _value(tokens: Iterator[tuple[str, str]], token: tuple[str, str]) -> Any:
    kind, text = token
    if kind == "string":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if kind == "name":
        return {"true": True, "false": False}.get(text, text)
    if kind == "number":
        try:
            return int(text, 0)
        except ValueError:
            return float(text)
    if text in ("{", "<"):
        return _message(tokens, "}" if text == "{" else ">")[0]
    if text == "[":
        items: list[Any] = []
        for token in tokens:
            if token == ("sign", "]"):
                return items
            if token != ("sign", ","):
                items.append(_value(tokens, token))
        raise ValueError("']' is missing at the end")
    raise ValueError(f"a value is expected, not {text!r}" if text else "a value is missing at the end")
