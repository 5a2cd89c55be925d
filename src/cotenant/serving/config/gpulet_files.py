"""Reading and writing of the public gpulet scheduler's files.

- Task CSV: the number of tasks, then a line `id,rate,SLO ms,` for each task.
- sim-config.json: `GPUs` [{Type, Num}] has the number of GPUs of each type, `Avail_Parts` the partition sizes in % that
  plans may use, and `Latency Ratio` a factor on profiled latencies. `Part` (GPUs are partitioned), `Interference` (it
  is taken into account) and `Self Tuning` are 0 or 1 and select the planner. `Max Model` is only written.
- device-config.json: device_specs [{type, mem_mb, latency_prof_file, ...}]. Paths are relative to the file.
- ModelList.txt: a plan, with a line `gpu,partition %,dedup,model,batch,duty ms` for each model of a gpulet. `dedup`
  distinguishes gpulets of equal size on one GPU, and `duty ms` is the gpulet's cycle, in which each of its models runs
  one batch. The model `reserved` stands for an empty partition, and the word EMPTY for an empty plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.jsonfile import read_json
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.core.textfile import cell_number, read_text
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import ServingProfile
from cotenant.profiles.serving.latency_files import load_profile, read_gpulet_dir
from cotenant.serving.config.planning import Problem

MODEL_IDS = (
    *(f"lenet{i}" for i in range(1, 7)), "googlenet", "resnet50", "ssd-mobilenetv1", "vgg16", "mnasnet1_0",
    "mobilenet_v2", "densenet161", "bert",
)  # fmt: skip
TWINS = 2  # largest number of gpulets into which the public scheduler cuts a GPU
_PLANNERS = {(1, 0): "gpulet", (1, 1): "gpulet-interference"}


def _json(path: Path) -> Mapping[str, Any]:
    data = read_json(path)
    if not isinstance(data, Mapping):
        raise InputError("is not a JSON object", file=path)
    return data


def read_tasks(path: str | Path) -> list[Service]:
    """The task CSV as services; ids are the public scheduler's model numbers or model names."""
    where = Path(path)
    lines = [(n, x.strip()) for n, x in enumerate(read_text(where).splitlines(), start=1) if x.strip()]
    if not lines:
        raise InputError("is empty; the first line is the number of tasks", file=where)
    line, first = lines[0]
    head = first.strip(", ")
    if not head.isdigit():
        raise InputError(f"{first!r} is not the number of tasks", file=where, line=line)
    if int(head) != len(lines) - 1:
        raise InputError(f"announces {head} tasks but has {len(lines) - 1}", file=where, line=line)
    out = []
    for line, text in lines[1:]:
        cells = [c.strip() for c in text.split(",")]
        if len(cells) < 3:
            raise InputError(f"{text!r} is not a task; write id,rate,SLO", file=where, line=line)
        name = cells[0]
        if name.isdigit():
            if int(name) >= len(MODEL_IDS):
                raise InputError(f"model id {name} is not 0 to {len(MODEL_IDS) - 1}", file=where, line=line, field="id")
            name = MODEL_IDS[int(name)]
        rate, slo = (cell_number(c, where, line, f, above=0) for c, f in ((cells[1], "rate"), (cells[2], "SLO")))
        out.append(Service(name, name, rate, slo))
    return out


def write_tasks(services: Sequence[Service]) -> str:
    """The text of a task CSV with these services."""
    ids = {model: str(i) for i, model in enumerate(MODEL_IDS)}
    rows = [f"{ids.get(s.model, s.model)},{s.rate_rps:g},{s.slo_ms:g}," for s in services]
    return "\n".join([str(len(rows)), *rows]) + "\n"


def _profile(spec: Mapping[str, Any], folder: Path, file: Path) -> ServingProfile:
    """Return the profile that a device spec names; if that file does not exist or none is named, the built-in profile
    of the spec's GPU type.
    """
    gpu = str(spec.get("type", ""))
    named = spec.get("latency_prof_file")
    table = folder / str(named) if named else None
    if table is not None and table.exists():
        found = read_gpulet_dir(table.parent, gpu)
    else:
        found = load_profile({"2080ti": "RTX2080Ti"}.get(gpu.lower(), gpu))
    memory = spec.get("mem_mb")
    if memory is None:
        return replace(found, gpu=gpu)
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < 1e9:
        raise InputError(
            f"{memory!r} is not a memory size; write a number of MB, such as 11000", file=file, field="mem_mb"
        )
    return replace(found, gpu=gpu, memory_bytes=round(memory * 1e6))


def read_problem(tasks: str | Path, sim_config: str | Path, device_config: str | Path | None) -> tuple[Problem, str]:
    """The planning problem of a set of files, and the planner that the configuration selects."""
    services = read_tasks(tasks)
    where = Path(sim_config)
    config = _json(where)
    devices: Mapping[str, Any] = {}
    folder = where.parent
    if device_config is not None:
        specs = _json(Path(device_config)).get("device_specs", [])
        devices = {str(d.get("type")): d for d in specs if isinstance(d, Mapping)}
        folder = Path(device_config).parent
    groups = config.get("GPUs")
    if not isinstance(groups, list) or not groups:
        raise InputError("needs a list of {Type, Num}", file=where, field="GPUs")
    profiles, types = [], []
    for i, group in enumerate(groups):
        try:
            kind, count = str(group["Type"]), int(group["Num"])
        except (KeyError, TypeError, ValueError):
            raise InputError("needs Type and Num", file=where, field=f"GPUs[{i}]") from None
        if devices and kind not in devices:
            raise InputError(f"GPU type {kind!r} is not in the device config", file=where, field=f"GPUs[{i}].Type")
        profile = _profile(devices.get(kind, {"type": kind}), folder, Path(device_config or where))
        profiles.append(_configured(profile, config, where))
        types += [i] * count
    found = Gpus(tuple(profiles), tuple(types))
    return Problem(found, tuple(services), {p.gpu: p for p in profiles}, (), 1.0), _planner(config)


def _configured(profile: ServingProfile, config: Mapping[str, Any], file: Path) -> ServingProfile:
    ratio = config.get("Latency Ratio", profile.margin)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio <= 100:
        raise InputError(f"{ratio!r} is not a factor of at least 1", file=file, field="Latency Ratio")
    wanted = config.get("Avail_Parts")
    chosen = profile.partitions
    if wanted is not None:
        sizes = {float(x) for x in wanted}
        chosen = tuple(p for p in profile.partitions if p.percent in sizes)
        missing = sizes - {p.percent for p in chosen}
        if missing:
            raise InputError(f"partitions {sorted(missing)} are not in the profile", file=file, field="Avail_Parts")
    return replace(profile, margin=float(ratio), partitions=chosen, max_gpulets=TWINS)


def _planner(config: Mapping[str, Any]) -> str:
    if config.get("Self Tuning"):
        return "greedy"
    return _PLANNERS.get((int(bool(config.get("Part", 1))), int(bool(config.get("Interference", 1)))), "temporal")


def sim_config(problem: Problem, planner: str) -> dict[str, Any]:
    """Write a problem as the content of sim-config.json."""
    counts = [problem.gpus.types.count(t) for t in range(len(problem.gpus.profiles))]
    first = problem.gpus.profiles[0]
    return {
        "GPUs": [{"Type": p.gpu, "Num": n} for p, n in zip(problem.gpus.profiles, counts, strict=True)],
        "Max Model": 3,
        "Part": int(planner != "temporal"),
        "Latency Ratio": first.margin,
        "Interference": int(planner in ("gpulet-interference", "exact")),
        "Incremental": 0,
        "Self Tuning": int(planner == "greedy"),
        "Avail_Parts": sorted((p.percent for p in first.partitions), reverse=True),
    }


def device_config(problem: Problem) -> dict[str, Any]:
    """Write a problem's GPU types as the content of device-config.json, with the usual file names."""
    return {
        "device_specs": [
            {
                "type": p.gpu,
                "mem_mb": p.memory_bytes / 1e6,
                "latency_prof_file": "latency.csv",
                "interference_const_file": "interference-constants.csv",
                "interference_util_file": "utilisation.csv",
            }
            for p in problem.gpus.profiles
        ]
    }


def write_modellist(plan: ServingPlan) -> str:
    """Write a plan as the content of ModelList.txt. `dedup` distinguishes two gpulets of equal size on one GPU. If a
    GPU has only one gpulet, a row `reserved` stands for the rest of the GPU.
    """
    rows: list[str] = []
    by_gpu: dict[int, list[Gpulet]] = {}
    for let in plan.gpulets:
        by_gpu.setdefault(let.gpu, []).append(let)
    for gpu, lets in sorted(by_gpu.items()):
        seen: dict[float, int] = {}
        for let in lets:
            dedup = seen.get(let.percent, 0)
            seen[let.percent] = dedup + 1
            rows += [f"{gpu},{let.percent:g},{dedup},{s.model},{s.batch},{let.duty_ms:.6f}" for s in let.seats]
        rest = 100 - sum(let.percent for let in lets)
        if rest > 0 and len(lets) < TWINS:
            rows.append(f"{gpu},{rest:g},{seen.get(rest, 0)},reserved,0,0")
    return "\n".join(rows or ["EMPTY"]) + "\n"


def read_modellist(path: str | Path, problem: Problem) -> ServingPlan:
    """Read ModelList.txt as a plan for a problem's services. A service is found by the name of its model."""
    where = Path(path)
    by_model = {s.model: s for s in problem.services}
    lets: dict[tuple[int, float, int], tuple[float, list[Seat]]] = {}
    for line, text in enumerate(read_text(where).splitlines(), start=1):
        cells = [c.strip() for c in text.split(",")]
        if not text.strip() or text.strip() == "EMPTY":
            continue
        if len(cells) < 6:
            raise InputError(
                "a row is too short; it must be gpu,partition,dedup,model,batch,duty", file=where, line=line
            )
        if cells[3] == "reserved":
            continue
        if cells[3] not in by_model:
            raise InputError(f"model {cells[3]} is not among the tasks", file=where, line=line, field="model")
        try:
            key = int(cells[0]), float(cells[1]), int(cells[2])
            batch, duty = int(cells[4]), float(cells[5])
        except ValueError:
            raise InputError("contains a number that is invalid", file=where, line=line) from None
        if batch < 1 or not math.isfinite(duty) or duty <= 0:
            raise InputError("batch and duty must be positive", file=where, line=line)
        service = by_model[cells[3]]
        lets.setdefault(key, (duty, []))[1].append(Seat(service.name, service.model, batch, 1000 * batch / duty))
    gpulets = []
    slots: dict[int, int] = {}
    for (gpu, percent, _), (duty, seats) in lets.items():
        if not 0 <= gpu < len(problem.gpus):
            raise InputError(f"GPU {gpu} is not among the {len(problem.gpus)} GPUs", file=where)
        label = next((p.label for p in problem.gpus.profile_of(gpu).partitions if p.percent == percent), None)
        if label is None:
            raise InputError(f"partition {percent:g} % is not profiled", file=where)
        slot = slots[gpu] = slots.get(gpu, -1) + 1
        gpulets.append(Gpulet(gpu, problem.gpus.profile_of(gpu).gpu, label, percent, slot, duty, tuple(seats)))
    rates = {s.name: s.rate_rps for s in problem.services}
    return ServingPlan("modellist", len(problem.gpus), tuple(gpulets), rates_rps=rates)
