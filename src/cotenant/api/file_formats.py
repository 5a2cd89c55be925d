"""The files that a user writes, each with its JSON Schema: for editors, and for the reference of the site.

A schema says less than the reader of a file: relations between settings are found only when the file is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cotenant.core.errors import InputError

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A kind of file: its description, the command that reads it, and the function that makes its schema."""

    title: str
    command: str
    make: Callable[[], Schema]


def names() -> tuple[str, ...]:
    """The kinds of files."""
    return tuple(FORMATS)


def schema(name: str) -> Schema:
    """JSON Schema (2020-12) of a kind of file. InputError names the kinds."""
    if name not in FORMATS:
        raise InputError(f"unknown file {name!r}; known: {', '.join(FORMATS)}")
    form = FORMATS[name]
    made = form.make()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": form.title}
    return head | {key: value for key, value in made.items() if key not in ("title", "description")}


def _agent() -> Schema:
    from cotenant.agent.config.files import AgentConfig
    from cotenant.agent.config.schema import AgentFile
    from cotenant.policy.shares import QuotaSettings

    made = AgentFile.model_json_schema()
    for owner in (AgentConfig(), QuotaSettings()):
        for field in dataclasses.fields(owner):
            info = AgentFile.model_fields.get(field.name)
            value = getattr(owner, field.name)
            if info is not None and info.alias and isinstance(value, int):
                made["properties"][info.alias]["default"] = _written(field.name, value)
    made["properties"]["most_moving"]["default"] = f"{AgentConfig().most_moving:.0%}"
    return made


def _written(name: str, value: int) -> str:
    """A default of the agent in the notation of its file: 250ms, 256MiB."""
    if name.endswith("_bytes"):
        return f"{value >> 20}MiB"
    ms = value if name.endswith("_ms") else value / 1e6
    return f"{ms / 1000:g}s" if ms >= 1000 else f"{ms:g}ms"


def _services() -> Schema:
    from cotenant.serving.config.server import ServingEntry
    from cotenant.serving.config.services import ServicesFile

    class Whole(ServicesFile, ServingEntry):
        """The keys for planning, and those that only a server reads."""

    return Whole.model_json_schema() | {"additionalProperties": False}


def _models() -> Schema:
    from cotenant.serving.config.models import ModelsFile

    return ModelsFile.model_json_schema()


def _cluster() -> Schema:
    from cotenant.workloads.clusters.node_groups import ClusterFile

    return ClusterFile.model_json_schema()


def _experiment() -> Schema:
    from cotenant.loadgen.experiment import ExperimentFile

    return ExperimentFile.model_json_schema()


def _sweep() -> Schema:
    """Every option with a value, or a list of values: an axis."""
    from cotenant.policy.jobs.allotment import ALLOTMENTS
    from cotenant.policy.jobs.ordering import ORDERINGS
    from cotenant.policy.jobs.placement import PLACEMENTS
    from cotenant.sim.jobs.options import TrainingConfig
    from cotenant.sim.jobs.sweep_file import KNOWN

    config = TrainingConfig.model_json_schema()["properties"]
    chosen: dict[str, Any] = {"ordering": ORDERINGS, "allotment": ALLOTMENTS, "placement": PLACEMENTS}
    properties: Schema = {"title": {"type": "string", "description": "Title of the report page."}}
    for name in sorted(KNOWN - {"title"}):
        values = config.get(name, {}).get("enum")
        if name in chosen:
            values = sorted(chosen[name])
        one: Schema = {"enum": values} if values else {"type": ["string", "number", "boolean"]}
        many = {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}
        described = f"As --{name.replace('_', '-')} of `cotenant simulate` or `cotenant trace generate`."
        properties[name] = {"anyOf": [one, many], "description": described}
        default = config.get(name, {}).get("default")
        if default not in (None, math.inf):
            properties[name]["default"] = default
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _job() -> Schema:
    from cotenant.agent.mechanisms import registry as mechanisms
    from cotenant.agent.mechanisms.base import Use
    from cotenant.core.checked import PART, SIZE, TIME
    from cotenant.fleet.jobs import KEYS, MOST_GPUS, MOST_RETRIES

    text: Schema = {"type": "string"}
    kinds: dict[str, tuple[Schema, str]] = {
        "name": (text, "Its name; by default its program."),
        "command": ({"type": "array", "items": text, "minItems": 1}, "The program and its arguments, a word each."),
        "gpus": ({"type": "number", "maximum": MOST_GPUS}, "Whole GPUs, or a part of one; or share, or slice."),
        "share": (PART.json_schema or {}, "A part of one GPU."),
        "slice": (text, "A MIG instance, such as 2g or 3g.40gb."),
        "mechanism": ({"enum": list(mechanisms.names(Use.JOB))}, "How a share is enforced."),
        "cpus": ({"type": "number"}, "CPU cores at best; by default by its profile, else in proportion to its GPUs."),
        "memory": (SIZE.json_schema or {}, "Memory at best, likewise."),
        "model": (text, "A model of the fleet's profiles."),
        "profile": (text, "File of `cotenant profile job`, relative to this one."),
        "duration": (TIME.json_schema or {}, "Run time alone, for orderings that ask how much is left."),
        "iterations": ({"type": "number"}, "The same as an amount of work."),
        "priority": ({"type": "integer"}, "The larger goes first, under orderings by priority."),
        "tenant": (text, "The tenant to which the job belongs."),
        "deadline": (TIME.json_schema or {}, "Time from its submission within which it should end."),
        "env": ({"type": "object", "additionalProperties": text}, "Environment variables."),
        "workdir": (text, "Its working folder; by default this file's."),
        "retries": ({"type": "integer", "minimum": 0, "maximum": MOST_RETRIES}, "Starts after a failure of its own."),
        "grace": (TIME.json_schema or {}, "How long it may take to save its state and leave; by default the fleet's."),
        "processes": ({"enum": ["gpu", "node"]}, "One process for each GPU of a gang, or for each node."),
        "job_dir": (text, "Its folder, which no other open job may have; by default one in the fleet's folder."),
    }  # fmt: skip
    properties = {key: kinds[key][0] | {"description": kinds[key][1]} for key in KEYS}
    return {"type": "object", "properties": properties, "required": ["command"], "additionalProperties": False}


FORMATS = {
    "agent": FileFormat("Settings and tenants of a node's agent", "cotenant agent --config FILE", _agent),
    "services": FileFormat("Services to plan and serve", "cotenant plan FILE, cotenant serve FILE", _services),
    "models": FileFormat("Language models to serve", "cotenant serve FILE", _models),
    "cluster": FileFormat("A cluster of unequal nodes", "cotenant simulate --cluster FILE", _cluster),
    "sweep": FileFormat("A sweep over options of simulations", "cotenant sweep FILE", _sweep),
    "job": FileFormat("A training job for the fleet", "cotenant submit FILE", _job),
    "experiment": FileFormat("A server and the load for it", "cotenant experiment FILE", _experiment),
}
