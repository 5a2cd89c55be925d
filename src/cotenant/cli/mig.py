"""`cotenant mig`: plan MIG layouts and apply them to this machine's GPUs."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from cotenant.core.mig import Geometry
    from cotenant.devices.nvml import Nvml

# range of a job's speed on a slice relative to its speed on the whole GPU; values outside it are probably mistyped
LEAST_SPEED, MOST_SPEED = 1e-6, 1e6

app = typer.Typer(no_args_is_help=True, help="MIG layouts: list, plan, and apply to this machine's GPUs.")

Model = Annotated[str, typer.Option("--gpu", help="GPU model of the catalog, such as A100-40GB or H100-80GB.")]
Here = Annotated[str, typer.Option("--gpu", help="UUID or index of a GPU of this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the steps without changing anything.")]
Double = Annotated[
    bool | None,
    typer.Option(
        "--double-memory/--no-double-memory",
        help="With or without the double-memory 1g profile (default: with it if the GPU model has it, but without it "
        "on an A100-40GB, which has it only from driver R525 on).",
    ),
]


def _nvml() -> Nvml:
    from cotenant.devices.nvml import Nvml

    return Nvml()


@app.command()
def layouts(
    gpu: Model = "A100-40GB",
    running: Annotated[
        str, typer.Option("--running", help="Only layouts that keep these instances: 3g.20gb@4,2g.10gb@0.")
    ] = "",
    double_memory: Double = None,
    as_json: Json = False,
) -> None:
    """List the layouts of a GPU model: every placement to which no instance can be added, and their multisets of
    profiles.
    """
    from cotenant.core.mig import geometry, maximal_layouts, multiset, parse_layout, reachable

    geo = geometry(gpu, double_memory=double_memory)
    found = reachable(geo, parse_layout(geo, running)) if running else maximal_layouts(geo)
    kinds = dict.fromkeys(multiset(geo, layout) for layout in found)
    content: dict[str, Any] = {
        "gpu": geo.gpu,
        "profiles": [
            {
                "kind": p.kind,
                "profile": p.name,
                "id": p.profile_id,
                "compute": p.compute,
                "memory_bytes": p.memory_bytes,
                "sms": p.sms,
                "starts": list(p.starts),
            }
            for p in geo.every.values()
        ],
        "placed": [geo.format(layout) for layout in found],
        "multisets": [_short(k) for k in kinds],
    }
    if as_json:
        print(json.dumps(content))
        return
    from cotenant.cli.fitting import plain_table, print_whole

    heads = ("multiset", "placed (profile@start)")
    table = plain_table(f"{geo.gpu}: {len(found)} placed layouts, {len(kinds)} multisets", heads, left=heads)
    for key in kinds:
        for layout in found:
            if multiset(geo, layout) == key:
                table.add_row(_short(key), geo.format(layout))
    print_whole(table)
    if geo.variants:
        variants = ", ".join(p.name for p in geo.variants.values())
        print(f"not in the table: variants with other media engines or graphics: {variants}")


def _short(kinds: tuple[str, ...]) -> str:
    """Return a layout in the notation of --layout: 3,2,2, with 1+ for the double-memory 1g."""
    return ",".join(kind.replace("g", "") for kind in kinds)


def _read_jobs(path: str, geo: Geometry) -> list[Any]:
    """Read the jobs to place on MIG instances from a JSON file. InputError names the wrong field."""
    from cotenant.core.jsonfile import read_json
    from cotenant.policy.mig.optimizer import PartitionJob

    rows = read_json(path)
    if not isinstance(rows, list):
        raise InputError('must be a list of jobs: [{"name": "a", "speed": {"7g": 1.0, "3g": 0.6}}]', file=path)
    jobs = []
    for i, row in enumerate(rows):
        where = f"jobs[{i}]"
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not isinstance(row.get("speed"), dict):
            raise InputError("a job needs a name (text) and a speed (slice -> number)", file=path, field=where)
        unknown = set(row) - {"name", "speed", "min_slice", "qos_floor", "memory_bytes"}
        if unknown:
            raise InputError(f"unknown field {sorted(unknown)[0]!r}", file=path, field=where)
        wrong = _wrong_speed(row["speed"], geo)
        if wrong:
            raise InputError(wrong, file=path, field=where)
        floor = row.get("qos_floor") or 0.0
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
            raise InputError(f"qos_floor is {floor!r}, not a number between 0 and 1", file=path, field=where)
        memory = row.get("memory_bytes") or 0
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise InputError(f"memory_bytes is {memory!r}, not a whole number of bytes", file=path, field=where)
        least = row.get("min_slice")
        if least is not None and (not isinstance(least, str) or _kind(geo, least) is None):
            offered = ", ".join(geo.kinds)
            raise InputError(f"min_slice is {least!r}; {geo.gpu} has {offered}", file=path, field=where)
        jobs.append(PartitionJob(row["name"], row["speed"], least, float(floor), memory))
    return jobs


def _kind(geo: Geometry, name: str) -> str | None:
    from cotenant.core.mig import kind_of

    try:
        return kind_of(geo, name)
    except InputError:
        return None


def _wrong_speed(speeds: dict[str, Any], geo: Geometry) -> str | None:
    """Return what is wrong with a job's speeds: an unknown slice, two names for one slice, or an impossible number.
    None if nothing is wrong.
    """
    from cotenant.core.mig import every_name

    seen: dict[str, str] = {}
    for name, value in speeds.items():
        if name.strip().lower().removeprefix("mig ") not in every_name():
            return f"speed is given for {name!r}, which is not a MIG profile"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN fails both comparisons, so a speed that is NaN is refused as well
        if not number or not (value == 0 or LEAST_SPEED <= value <= MOST_SPEED):
            return (
                f"speed on {name} is {value!r}; it must be 0 (does not fit) or between {LEAST_SPEED:g} and "
                f"{MOST_SPEED:g}"
            )
        kind = _kind(geo, name)
        if kind is not None and seen.setdefault(kind, name) != name:
            return f"speed is given for {seen[kind]!r} and {name!r}, which are the same slice of {geo.gpu}"
    return None


@app.command()
def plan(
    jobs: Annotated[
        str, typer.Option("--jobs", help="JSON list of jobs with name, speed by slice, min_slice and qos_floor.")
    ],
    gpu: Model = "A100-40GB",
    objective: Annotated[
        str,
        typer.Option("--objective", help="throughput (largest sum of speeds) or slowdown (smallest mean of 1/speed)."),
    ] = "throughput",
    double_memory: Double = None,
    as_json: Json = False,
) -> None:
    """Find the optimal layout of one GPU for a set of jobs and assign its slices, by exact search."""
    from statistics import median

    import numpy as np

    from cotenant.core.mig import geometry
    from cotenant.policy.mig.optimizer import OBJECTIVES, best_partition, plan_jobs, speed_row

    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, OBJECTIVES, "objective")
    geo = geometry(gpu, double_memory=double_memory)
    todo = _read_jobs(jobs, geo)
    best = plan_jobs(geo, todo, objective)  # type: ignore[arg-type]
    rows = np.array([speed_row(geo, job) for job in todo])
    times_s = []
    for _ in range(9):  # these calls are timed; plan_jobs above has already compiled the function if necessary
        begin = time.perf_counter()
        best_partition(geo, rows, objective)  # type: ignore[arg-type]
        times_s.append(time.perf_counter() - begin)
    took_us = median(times_s) * 1e6
    content = {
        "gpu": geo.gpu,
        "layout": geo.format(best.layout),
        "assignment": {job.name: geo.name(place) for job, place in zip(todo, best.placements, strict=True)},
        "objective": best.objective,
        "objective_name": objective,
        "decision_us": took_us,
    }
    if as_json:
        print(json.dumps(content))
        return
    print(f"{geo.gpu}: {content['layout']}")
    for name, place in zip((job.name for job in todo), map(geo.name, best.placements), strict=True):
        print(f"  {name}: {place}")
    what = "sum of speeds" if objective == "throughput" else "mean slowdown"
    print(f"{what} {best.objective:.4f}, decided in {took_us:.0f} us")


@app.command()
def apply(
    layout: Annotated[
        str, typer.Argument(help="Layout 3,2,2 or 3g.40gb@0,2g.20gb@4; with --config, the name of one of its lists.")
    ],
    gpu: Annotated[str | None, typer.Option("--gpu", help="UUID or index of a GPU of this machine.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="mig-parted configuration file; applies to all GPUs that it selects unless --gpu is given."
        ),
    ] = None,
    dry_run: DryRun = False,
    beside_running: Annotated[
        bool, typer.Option("--beside-running", help="Allow running processes if all of them keep their instances.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Apply a layout to a GPU of this machine: only instances that differ are destroyed and created. Needs root."""
    from cotenant.core.mig_config import named_rules, read_mig_config
    from cotenant.devices.mig import apply as apply_layout
    from cotenant.devices.mig import apply_rules

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if config is None and gpu is None:
        raise InputError("give the UUID or index of the GPU", field="--gpu")
    rules = None if config is None else named_rules(read_mig_config(config), layout, config)
    with _nvml() as nvml:
        if rules is None:
            done = apply_layout(nvml, str(gpu), layout, dry_run=dry_run, beside_running=beside_running, say=say)
            _show_steps(done, as_json)
            return
        rows = apply_rules(nvml, rules, gpu, dry_run=dry_run, beside_running=beside_running, say=say)
    if as_json:
        print(json.dumps({"gpus": rows}))
        return
    for row in rows:
        print(f"{row['gpu']} ({row['name']})")
        _show_steps(row, False)


@app.command()
def check(
    config: Annotated[str, typer.Argument(help="mig-parted configuration file.")],
    as_json: Json = False,
) -> None:
    """Check, for each rule of a mig-parted configuration, which catalog models support it. Exits with 2 if a rule fits
    none.
    """
    from cotenant.core.mig_config import read_mig_config
    from cotenant.core.mig_tables import PCI_MODELS

    rows: list[dict[str, Any]] = []
    for name, rules in read_mig_config(config).items():
        for rule in rules:
            fit, why = rule.models()
            unknown = [f"{i:#010x}" for i in rule.pci_ids or () if i >> 16 not in PCI_MODELS]
            rows.append({"list": name, "instances": rule.profiles, "models": fit, "problem": why, "unknown": unknown})
    if as_json:
        print(json.dumps({"rules": rows}))
    else:
        for row in rows:
            also = [f"not checked: {', '.join(row['unknown'])}"] if row["unknown"] else []
            print(f"{row['list']}: {'; '.join([row['problem'] or ', '.join(row['models']) or 'any', *also])}")
    wrong = [row for row in rows if row["problem"]]
    if wrong:
        raise InputError(
            f"{len(wrong)} of {len(rows)} rules cannot be applied; the first: {wrong[0]['problem']}", file=config,
            field=wrong[0]["list"],
        )  # fmt: skip


@app.command()
def reset(gpu: Here, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Destroy all MIG instances of a GPU; MIG mode stays on."""
    from cotenant.devices.mig import reset as reset_gpu

    with _nvml() as nvml:
        _show_steps(reset_gpu(nvml, gpu, dry_run=dry_run), as_json)


def _show_steps(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(done))
        return
    word = "would " if done["dry_run"] else ""
    for step in done["steps"] or ["nothing to do"]:
        print(f"{word}{step}" if done["steps"] else step)
    for row in done.get("instances", []):
        _show_instance(row, "")


def _show_instance(row: dict[str, Any], before: str) -> None:
    """Print one line for each UUID of a MIG instance."""
    for uuid in row["uuids"] or ["has no compute instance, so that no program can use it"]:
        print(f"{before}{row['profile']}@{row['start']}  {uuid}")


@app.command()
def export(
    gpu: Annotated[str | None, typer.Option("--gpu", help="UUID or index (default: all GPUs).")] = None,
    as_json: Json = False,
) -> None:
    """List this machine's MIG instances with their UUIDs for CUDA_VISIBLE_DEVICES."""
    from cotenant.devices.mig import export as export_table

    with _nvml() as nvml:
        content = export_table(nvml, gpu)
    if as_json:
        print(json.dumps(content))
        return
    for row in content["gpus"]:
        state = {True: "on", False: "off", None: "not supported"}[row["mig"]]
        print(f"{row['index']}  {row['uuid']}  {row['name']}  MIG {state}")
        for instance in row["instances"]:
            _show_instance(instance, "   ")


@app.command()
def enable(gpu: Here, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Enable MIG mode on an unused GPU. Needs root; says if the GPU must be reset afterwards."""
    _mode(gpu, True, dry_run, as_json)


@app.command()
def disable(gpu: Here, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Disable MIG mode on a GPU without instances and processes."""
    _mode(gpu, False, dry_run, as_json)


def _mode(gpu: str, on: bool, dry_run: bool, as_json: bool) -> None:
    from cotenant.devices.mig import set_mode

    with _nvml() as nvml:
        done = set_mode(nvml, gpu, on, dry_run=dry_run)
    if as_json:
        print(json.dumps(done))
        return
    word = "on" if on else "off"
    if not done["changed"]:
        print(f"MIG is already {word}")
    elif dry_run:
        print(f"would turn MIG {word}")
    elif done["reset_needed"]:
        print(f"MIG will be {word} after a GPU reset: nvidia-smi --gpu-reset -i {done['gpu']}")
    else:
        print(f"MIG is {word}")
