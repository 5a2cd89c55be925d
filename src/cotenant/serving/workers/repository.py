"""A model repository with Triton's layout: NAME/VERSION/FILE (a file that a backend can run, such as model.onnx), and
config.pbtxt. Versions are folders with a number; the largest is served unless the services file names another. A model
folder without version folders is itself version 1."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.serving.config.backends import AUTO, BACKENDS, FILE_FIELD, TRITON, BackendRow, files, pretends
from cotenant.serving.config.server import ModelEntry

MOST_CONFIG = 1 << 20


@dataclass(frozen=True)
class Found:
    """A model that can be loaded, with its backend, folder and version."""

    backend: str
    path: str | None
    version: str
    config: dict[str, Any] = field(default_factory=dict)


def find(entry: ModelEntry, config: dict[str, Any] | None = None) -> Found:
    """Return the model to load for a service. Raises InputError if there is none. `config` replaces the repository's
    configuration.
    """
    if entry.path is None or not entry.path.is_dir():
        if pretends(entry.backend):
            return Found(entry.backend, None, str(entry.version or 1), config or {})
        where = f"at {entry.path}" if entry.path is not None else "named"
        raise InputError(
            f"no model {where}; give the folder NAME of a repository NAME/VERSION/FILE, FILE being one of {files()},"
            " or backend: timed",
            field=f"services.{entry.service}.model",
        )
    source: dict[str, Any] = {"field": "config"} if config is not None else {"file": entry.path / "config.pbtxt"}
    config = _config(entry.path) if config is None else config
    if config.get("max_batch_size", 0) < 0:
        raise InputError(f"max_batch_size is {config['max_batch_size']}, but must be at least 0", **source)
    version, folder = _version(entry, config, source)
    backend, meant = entry.backend, "" if pretends(entry.backend) else _meant(config, source)
    if backend == AUTO:
        fitting = (name for name, row in BACKENDS.items() if any((folder / f).is_file() for f in _files(row, config)))
        backend_found = next((name for name in fitting if meant in ("", name)), None)
        if backend_found is None:
            named = config.get(FILE_FIELD)
            wanted = ", ".join(BACKENDS[meant].files) if meant else files()
            raise InputError(f"has no file {named}" if named else f"has none of {wanted}", file=folder)
        return _with_settings(Found(backend_found, str(folder), version, config))
    row = BACKENDS[backend]
    if not row.pretends:
        if meant not in ("", backend):
            raise InputError(f"is for backend {meant}; services.yaml has backend: {backend}", **source)
        if not any((folder / f).is_file() for f in _files(row, config)):
            raise InputError(f"has no {' or '.join(_files(row, config))}, which backend {backend} runs", file=folder)
    return _with_settings(Found(backend, str(folder), version, config))


def _meant(config: Mapping[str, Any], source: dict[str, Any]) -> str:
    """Name of the backend that runs the models of the configuration's backend or platform; empty if it has neither."""
    for key in ("backend", "platform"):
        if named := config.get(key):
            if named not in TRITON and named not in TRITON.values():
                raise InputError(f"{key} {named!r} is not one that runs here ({', '.join(TRITON)})", **source)
            return str(TRITON.get(named, named))
    return ""


def _files(row: BackendRow, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the files of which a backend needs one: its own, or the one that the configuration names."""
    named = config.get(FILE_FIELD)
    if not named:
        return row.files
    known = {Path(file).suffix for file in row.files}
    return (named,) if Path(named).suffix in known and Path(named).name == named else ()


def _with_settings(found: Found) -> Found:
    """Extend the model's configuration by its settings file, if the backend defines such a file and the folder of the
    model's version has it.
    """
    settings = BACKENDS[found.backend].settings
    if settings is None or found.path is None:
        return found
    path = Path(found.path) / settings
    if not path.is_file():
        return found
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read: {error}", file=path) from None
    if not isinstance(own, dict):
        raise InputError("is not a JSON object", file=path)
    return Found(found.backend, found.path, found.version, {**found.config, **own})


def _version(entry: ModelEntry, config: Mapping[str, Any], source: dict[str, Any]) -> tuple[str, Path]:
    assert entry.path is not None
    numbers = versions(entry.path)
    if not numbers:
        return "1", entry.path
    named = config.get("version_policy", {}).get("specific", {}).get("versions")
    if entry.version is None and named:
        known, numbers = ", ".join(map(str, numbers)), [number for number in numbers if number in named]
        if not numbers:
            wanted = ", ".join(map(str, named))
            raise InputError(f"version_policy names the versions {wanted}; there are {known}", **source)
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
    """Names, modification times and sizes of a model's files. They change if the model was changed."""
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
        text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read: {error}", file=file) from None
    if len(text) > MOST_CONFIG:
        raise InputError(
            f"is longer than {MOST_CONFIG:,} characters, the most that a configuration may have", file=file
        )
    return read_config(text, file)


# fields of Triton's configurations for kinds of models that do not run here -> what to do
NOT_HERE = {
    "ensemble_scheduling": "write an ensemble as an application in services.yaml",
    "sequence_batching": "models that keep state between requests are not supported",
    "model_operations": "libraries of operators are not loaded",
    "cc_model_filenames": "only the file of default_model_filename is loaded",
}


def read_config(text: str, file: Path) -> dict[str, Any]:
    """Parse a configuration in protobuf's text format. InputError names unknown fields and their places."""
    if not text.strip():
        return {}
    from google.protobuf import text_format

    from cotenant.core.protobuf import plain
    from cotenant.serving.protocol.messages import classes

    message = classes()["ModelConfig"]()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        said = re.sub(r"^\d+:\d+ : ", "", str(error)).rstrip(".")
        hint = next((f": {why}" for field, why in NOT_HERE.items() if f'no field named "{field}"' in said), "")
        raise InputError(f"{said[:1].lower()}{said[1:]}{hint}", file=file, line=error.GetLine()) from None
    return plain(message)


# The fields of config.pbtxt that are used. The other fields are decided by the plan, or belong to kinds of models that
# are not supported.
APPLIED = frozenset({"name", "platform", "backend", "max_batch_size", "input", "output", "parameters"})


def config_override(text: str, model: str) -> dict[str, Any]:
    """Parse a JSON configuration of a load request. InputError for fields that would have no effect."""
    from google.protobuf import json_format

    from cotenant.core.protobuf import plain
    from cotenant.serving.protocol.messages import classes

    message = classes()["ModelConfig"]()
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise InputError("is no model configuration: needs a JSON object", field="config")
        json_format.ParseDict(content, message)
    except (ValueError, RecursionError, json_format.ParseError) as error:
        raise InputError(f"is no model configuration: {' '.join(str(error).split())[:300]}", field="config") from None
    config = plain(message)
    ignored = sorted(config.keys() - APPLIED)
    if ignored:
        known = ", ".join(sorted(APPLIED))
        raise InputError(
            f"has the field {ignored[0]}, which has no effect here: leave it out; known: {known}",
            field="config",
        )
    if config.get("name", model) != model:
        raise InputError(f"is for {config['name']!r}, not for {model!r}", field="config")
    return config
