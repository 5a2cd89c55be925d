"""The registry of backends. Workers import only the modules that they need."""

from __future__ import annotations

from typing import NamedTuple

from cotenant.core.errors import InputError

FILE_FIELD = "default_model_filename"  # the field of config.pbtxt that names the model's file
AUTO = "auto"  # stands for the first backend for which the folder of the model's version has a file


class BackendRow(NamedTuple):
    """One backend: a module with `open_model(spec, share)`, and the names of the model files that it can run.
    `pretends`: the backend only sleeps, so it needs neither device nor file. `settings`: a JSON file in the version's
    folder that extends the model's configuration.
    """

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


# Triton's names of backends (config.pbtxt, `backend` or `platform`), and the backend here that runs their models
TRITON = {
    "onnxruntime": "onnx", "onnxruntime_onnx": "onnx", "pytorch": "torch", "pytorch_libtorch": "torch",
    "python": "python",
}  # fmt: skip


def names() -> tuple[str, ...]:
    """All names of backends."""
    return (AUTO, *BACKENDS)


def check(name: str, field: str = "backend") -> str:
    """Check the name of a backend; InputError if unknown."""
    if name not in names():
        raise InputError(f"{name[:40]!r} is not one of {', '.join(names())}", field=field)
    return name


def files() -> str:
    """Return the names of all model files that backends can run, separated by commas."""
    return ", ".join(file for row in BACKENDS.values() for file in row.files)


def pretends(name: str) -> bool:
    """Return whether a backend only sleeps instead of running models."""
    return name in BACKENDS and BACKENDS[name].pretends
