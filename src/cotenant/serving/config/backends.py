"""The one list of backends. Modules are imported by the worker that needs them."""

from __future__ import annotations

from typing import NamedTuple

from cotenant.core.errors import InputError

AUTO = "auto"  # the first backend whose file a version's folder has


class BackendRow(NamedTuple):
    """One backend: a module with `open_model(spec, share)`, and which files of a version's folder it runs.

    `pretends`: it only takes time, so it needs neither device nor file. `settings`: a JSON file of the folder, which
    joins the model's configuration."""

    module: str
    files: tuple[str, ...]
    pretends: bool = False
    settings: str | None = None


BACKENDS: dict[str, BackendRow] = {
    "onnx": BackendRow("cotenant.serving.backends.onnx", ("model.onnx",)),
    "torch": BackendRow("cotenant.serving.backends.torch", ("model.pt2", "model.pt")),
    "python": BackendRow("cotenant.serving.backends.python", ("model.py",)),
    "timed": BackendRow("cotenant.serving.backends.timed", ("timed.json",), pretends=True, settings="timed.json"),
}


def names() -> tuple[str, ...]:
    """What may be named."""
    return (AUTO, *BACKENDS)


def check(name: str, field: str = "backend") -> str:
    """The name; InputError where there is no such backend."""
    if name not in names():
        raise InputError(f"{name[:40]!r} is not one of {', '.join(names())}", field=field)
    return name


def files() -> str:
    """All files that some backend runs, for people."""
    return ", ".join(file for row in BACKENDS.values() for file in row.files)


def pretends(name: str) -> bool:
    """Whether a backend only takes time."""
    return name in BACKENDS and BACKENDS[name].pretends
