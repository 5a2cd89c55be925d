"""Description of a submitted job, from a job file or from options, and its validation."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.core.errors import InputError
from cotenant.core.units import parse_fraction, parse_memory, parse_seconds
from cotenant.core.yamlfile import read_yaml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SLICE = re.compile(r"^([1-7])g(\.\d+gb)?(\+me)?$")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_GPUS = 4096
MOST_RETRIES = 1000


@dataclass(frozen=True)
class JobSpec:
    """The command of a job and the resources it needs. `gpus`: a number of whole GPUs, or a fraction below 1 of one
    GPU. `slice`: a MIG instance instead of `gpus`, such as 2g. `cpus` (cores) and `memory_bytes`: the most that the
    whole job can use; None: from its profile, else its proportional share, which is the node's CPU and memory per GPU
    times the job's GPUs. `model`: name of a profile; `profile`: a profile file. `duration_s`: run time alone with the
    proportional share; `iterations`: the job's work in training iterations. `processes`: one per `gpu` or one per
    `node` of a gang. `job_dir`: the job's folder; None: a folder inside the fleet's.
    """

    name: str
    command: tuple[str, ...]
    gpus: float = 1.0
    slice: str | None = None
    mechanism: str | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    model: str = ""
    profile: str | None = None
    duration_s: float | None = None
    iterations: float | None = None
    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    retries: int = 0
    grace_s: float | None = None
    processes: str = "gpu"
    job_dir: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data, for the store and the socket."""
        return vars(self) | {"command": list(self.command), "env": dict(self.env)}

    @property
    def shared(self) -> bool:
        """Whether the job needs less than one GPU."""
        return self.slice is not None or self.gpus < 1


def spec_from_dict(data: Mapping[str, Any]) -> JobSpec:
    """A spec from the output of `to_dict`, validated. InputError names the field."""
    known = {f.name for f in dataclasses.fields(JobSpec)}
    for key in data:
        if key not in known:
            raise InputError("is not a field of a job", field=str(key)[:60])
    values = {key: value for key, value in data.items() if value is not None}
    command = values.get("command")
    if isinstance(command, list | tuple):
        values["command"] = tuple(command)
    try:
        spec = JobSpec(**values)
    except TypeError:
        raise InputError("a job needs a name and a command", field="command") from None
    return check_spec(spec)


def check_spec(spec: JobSpec) -> JobSpec:
    """Validate a job's spec and return it. Raises InputError that names the field with an invalid value."""
    if not isinstance(spec.name, str) or not NAME.fullmatch(spec.name):
        raise InputError(
            f"{str(spec.name)[:80]!r} is not a job name: 1 to 63 letters, digits, '.', '_' or '-', the first a letter "
            "or digit",
            field="name",
        )
    _check_command(spec.command)
    _check_gpus(spec)
    for name, most in (("cpus", 1e6), ("duration_s", 1e10), ("iterations", 1e15), ("deadline_s", 1e10)):
        _positive(name, getattr(spec, name), most)
    _positive("memory", spec.memory_bytes, 1e15)
    if spec.grace_s is not None and not (_is_number(spec.grace_s) and 0 <= spec.grace_s <= 86400):
        raise InputError(f"{spec.grace_s!r} is not a time of 0 s to a day", field="grace")
    for name, most_int in (("retries", MOST_RETRIES), ("priority", 10**9)):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > most_int:
            raise InputError(f"{value!r} is not a whole number up to {most_int:,}", field=name)
    if spec.retries < 0:
        raise InputError(f"must be at least 0, not {spec.retries}", field="retries")
    if spec.processes not in ("gpu", "node"):
        raise InputError(f"must be gpu or node, not {spec.processes!r}", field="processes")
    for name in ("model", "profile", "tenant", "workdir", "job_dir"):
        text = getattr(spec, name)
        if text is not None and (not _is_text(text) or len(text) > 4096):
            raise InputError(f"{str(text)[:60]!r} is not a string", field=name)
    _check_environment(spec.env)
    return spec


def _check_command(command: Any) -> None:
    if not isinstance(command, tuple) or not command:
        raise InputError("must be a list of words, such as [python, train.py]", field="command")
    for word in command:
        if not _is_text(word):
            raise InputError(f"{str(word)[:60]!r} is not a string; put numbers in quotes", field="command")
    if not command[0]:
        raise InputError("begins with an empty word, where the program is expected", field="command")
    if sum(len(word.encode()) for word in command) > 100_000:
        raise InputError("is longer than 100,000 bytes; put it into a script", field="command")


def _check_gpus(spec: JobSpec) -> None:
    if not _is_number(spec.gpus) or spec.gpus <= 0:
        raise InputError(f"{spec.gpus!r} is not a number of GPUs; write 1, 2, ... or share: 30%", field="gpus")
    if spec.gpus >= 1 and spec.gpus != int(spec.gpus):
        raise InputError(
            f"must be a whole number of GPUs, or a share of one GPU below 1, not {spec.gpus:g}",
            field="gpus",
        )
    if spec.gpus > MOST_GPUS:
        raise InputError(f"{spec.gpus:g} is over {MOST_GPUS:,}", field="gpus")
    if spec.gpus < 0.01:
        raise InputError(f"{spec.gpus:.2%} of a GPU is less than 1%", field="share")
    if spec.slice is not None and (not isinstance(spec.slice, str) or not SLICE.match(spec.slice)):
        raise InputError(f"{str(spec.slice)[:40]!r} is not a MIG slice such as 2g or 3g.40gb", field="slice")
    if spec.mechanism is not None:
        mechanisms.find(str(spec.mechanism), Use.JOB)


def _check_environment(env: Any) -> None:
    if not isinstance(env, Mapping):
        raise InputError("must be NAME: value pairs", field="env")
    for name, value in env.items():
        if not isinstance(name, str) or not ENVIRONMENT_NAME.fullmatch(name):
            raise InputError(f"{str(name)[:60]!r} is not the name of an environment variable", field="env")
        if not _is_text(value):
            raise InputError(f"{str(value)[:60]!r} is not a string; put it in quotes", field=f"env.{name}")


def _positive(name: str, value: Any, most: float) -> None:
    if value is None:
        return
    if not _is_number(value) or not 0 < value <= most:
        raise InputError(f"must be a number above 0 and at most {most:g}, not {value!r}", field=name.removesuffix("_s"))


def _is_text(value: Any) -> bool:
    """Whether a value can be a word of a command line: a string without NUL and unpaired surrogates."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


KEYS = (
    "name", "command", "gpus", "share", "slice", "mechanism", "cpus", "memory", "model", "profile", "duration",
    "iterations", "priority", "tenant", "deadline", "env", "workdir", "retries", "grace", "processes", "job_dir",
)  # fmt: skip


def read_job_file(path: str | Path) -> JobSpec:
    """A job from a YAML file; InputError names file, line and field. Paths in it are relative to the file."""
    file = Path(path)
    read = read_yaml(file)
    with read.located():
        return job_from_values(read.content or {}, file.resolve().parent)


def job_from_values(data: Mapping[str, Any], folder: Path) -> JobSpec:
    """A job from a mapping in the notation of job files: quantities may have units, and `share` or `slice` may stand in
    place of `gpus`.

    `folder`: base of relative paths, and the working folder of a job that states none.
    """
    if not isinstance(data, Mapping):
        raise InputError("a job file contains settings, one `name: value` per line")
    for key in data:
        if key not in KEYS:
            raise InputError(f"is not a field of a job; known: {', '.join(KEYS)}", field=str(key)[:60])
    ways = [key for key in ("gpus", "share", "slice") if data.get(key) is not None]
    if len(ways) > 1:
        raise InputError(f"give only one of {ways[0]} and {ways[1]}", field=ways[1])
    if data.get("command") is None:
        raise InputError("is missing; write it as a list of words, such as [python, train.py]", field="command")
    command = data["command"]
    if isinstance(command, str):
        raise InputError("is a single string; write it as a list of words, such as [python, train.py]", field="command")
    values: dict[str, Any] = {
        key: data[key]
        for key in ("gpus", "slice", "mechanism", "cpus", "model", "iterations", "priority", "tenant", "retries",
                    "processes")
        if data.get(key) is not None
    }  # fmt: skip
    values["command"] = tuple(command) if isinstance(command, list) else command
    if not isinstance(data.get("name") or "", str):
        raise InputError(f"{str(data['name'])[:60]!r} is not a string; put it in quotes", field="name")
    values["name"] = data.get("name") or _name_of(values["command"])
    if data.get("share") is not None:
        values["gpus"] = parse_fraction(_quantity(data["share"], "share"), "share")
        if values["gpus"] < 0.01:
            raise InputError(f"{data['share']!r} of a GPU is less than 1%", field="share")
    if values.get("slice") is not None and isinstance(values["slice"], str) and SLICE.match(values["slice"]):
        values["gpus"] = math.floor(1000 * int(values["slice"][0]) / 7) / 1000
    if data.get("memory") is not None:
        values["memory_bytes"] = parse_memory(_quantity(data["memory"], "memory"), "memory")
    for key in ("duration", "deadline", "grace"):
        if data.get(key) is not None:
            values[f"{key}_s"] = parse_seconds(_quantity(data[key], key), key)
    values |= _paths(data, folder)
    values["env"] = data.get("env") or {}
    return check_spec(JobSpec(**values))


def _paths(data: Mapping[str, Any], folder: Path) -> dict[str, str]:
    found = {"workdir": str(folder)}
    for key in ("workdir", "profile", "job_dir"):
        value = data.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InputError(f"{value!r} is not a path", field=key)
        found[key] = str((folder / os.path.expanduser(value)).absolute())
    if not Path(found["workdir"]).is_dir():
        raise InputError(f"{found['workdir']} is not a folder", field="workdir")
    return found


def _quantity(value: Any, field_name: str) -> str | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{str(value)[:60]!r} is not a quantity", field=field_name)
    return value


def _name_of(command: Any) -> str:
    """A name for a job without one, derived from its program."""
    words = [os.path.basename(str(word)) for word in command] if isinstance(command, tuple) else []
    scripts = [word for word in words[1:3] if word.endswith((".py", ".sh"))]
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", (scripts or words or ["job"])[0]).strip("-._")
    return text[:40] or "job"
