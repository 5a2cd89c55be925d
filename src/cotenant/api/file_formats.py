"""JSON Schemas of the files that users write, for editors and for the reference on the documentation site. A schema
does not express relations between settings: errors in these are found only when the file is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cotenant.core.errors import unknown_name

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A kind of file: its description, the command that reads it, and the function that makes its schema."""

    title: str
    command: str
    make: Callable[[], Schema]


def names() -> tuple[str, ...]:
    """Return the names of the kinds of files."""
    return tuple(FORMATS)


def schema(name: str) -> Schema:
    """Return the JSON Schema (2020-12) of a kind of file. For an unknown kind, InputError lists the known ones."""
    if name not in FORMATS:
        raise unknown_name("file", name, FORMATS)
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
    """Return a default of the agent in the notation of its file: 250ms, 256MiB."""
    if name.endswith("_bytes"):
        return f"{value >> 20}MiB"
    ms = value if name.endswith("_ms") else value / 1e6
    return f"{ms / 1000:g}s" if ms >= 1000 else f"{ms:g}ms"


def _services() -> Schema:
    from cotenant.serving.config.server import ServingEntry
    from cotenant.serving.config.services import ServicesFile

    class Whole(ServicesFile, ServingEntry):
        """Schema of a services file: the keys for planning, and those that only a server reads."""

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
    """Return the schema of a sweep file: each option has one value, or a list of values, which makes it an axis of the
    sweep.
    """
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
        "name": (text, "Name of the job; by default derived from its program."),
        "command": ({"type": "array", "items": text, "minItems": 1}, "Program and arguments, as a list of words."),
        "gpus": ({"type": "number", "maximum": MOST_GPUS}, "Whole GPUs, or a fraction of one GPU."),
        "share": (PART.json_schema or {}, "Fraction of one GPU, instead of gpus."),
        "slice": (text, "MIG instance, such as 2g or 3g.40gb, instead of gpus."),
        "mechanism": ({"enum": list(mechanisms.names(Use.JOB))}, "Mechanism that enforces a share."),
        "cpus": ({"type": "number"}, "Cores that the job can use (default: from its profile, or by its GPUs)."),
        "memory": (SIZE.json_schema or {}, "Memory that the job can use (default: as for cpus)."),
        "model": (text, "Name of a model in the fleet's profiles."),
        "profile": (text, "Profile file written by `cotenant profile job`, relative to this file."),
        "duration": (TIME.json_schema or {}, "Run time of the job alone, for orderings that use the remaining time."),
        "iterations": ({"type": "number"}, "Amount of work in training iterations."),
        "priority": ({"type": "integer"}, "A job with a larger value goes first, under orderings by priority."),
        "tenant": (text, "The tenant to which the job belongs."),
        "deadline": (TIME.json_schema or {}, "Time after submission within which the job should end."),
        "env": ({"type": "object", "additionalProperties": text}, "Environment variables."),
        "workdir": (text, "Working folder of the job; by default the folder of this file."),
        "retries": ({"type": "integer", "minimum": 0, "maximum": MOST_RETRIES}, "Largest number of restarts."),
        "grace": (TIME.json_schema or {}, "Time that the job may take to save its state and end."),
        "processes": ({"enum": ["gpu", "node"]}, "Processes of a gang: one for each GPU, or one for each node."),
        "job_dir": (text, "Folder for this job alone (default: one in the fleet's folder)."),
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
