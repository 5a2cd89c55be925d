"""`cotenant plan-convert`: convert files of the public gpulet scheduler to a services file, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cotenant.serving.config.planning import Problem

app = typer.Typer(add_completion=False)


@app.command()
def plan_convert(
    source: Annotated[Path, typer.Argument(metavar="FOLDER|SERVICES.yaml", help="Folder or services file to convert.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to; created if absent.")],
    plan: Annotated[str | None, typer.Option(metavar="PLAN.json", help="Write this plan as ModelList.txt.")] = None,
) -> None:
    """Convert a folder with tasks.csv and sim-config.json (and optionally device-config.json and ModelList.txt) to
    services.yaml with profiles and plan.json, or a services file to such a folder.
    """
    from cotenant.core.errors import InputError
    from cotenant.core.files import check_writable, write_text
    from cotenant.serving.config.planning import build_problem
    from cotenant.serving.config.services import read_services

    if source.is_dir():
        if plan is not None:
            raise InputError("the plan of a folder is its ModelList.txt; leave out --plan", field="plan")
        files, note = _ours(source, out)
    else:
        files, note = _public(build_problem(read_services(source)), plan), ""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write here: {(error.strerror or str(error)).lower()}", file=out) from None
    for name in files:
        check_writable(out / name)
    for name, text in files.items():
        write_text(out / name, text)
    print(f"{', '.join(files)} in {out}{note}")


def _ours(folder: Path, out: Path) -> tuple[dict[str, str], str]:
    """Convert files of the public gpulet scheduler to a services file. Returns the files written, and the command that
    plans them as the public scheduler would.
    """
    import yaml

    from cotenant.profiles.serving.latency_files import profile_to_dict
    from cotenant.serving.config.gpulet_files import read_modellist, read_problem
    from cotenant.serving.config.services import gpu_name, parse_services

    device, modellist = folder / "device-config.json", folder / "ModelList.txt"
    given = device if device.exists() else None
    problem, planner = read_problem(folder / "tasks.csv", folder / "sim-config.json", given)
    types = problem.gpus.profiles
    gpus = [gpu_name(p.gpu) for p in types]
    content: dict[str, Any] = {
        "gpus": {"count": len(problem.gpus), "model": gpus[0]},
        "profile": {gpu: f"profile-{gpu}.json" for gpu in gpus},
        "replan": {"headroom": problem.headroom},
        "services": [
            {"name": s.name, "model": s.model, "rate_rps": s.rate_rps, "slo_ms": s.slo_ms} for s in problem.services
        ],
    }
    profiles = zip(gpus, types, strict=True)
    files = {f"profile-{gpu}.json": json.dumps(profile_to_dict(p), indent=1) + "\n" for gpu, p in profiles}
    if len(types) > 1:
        del content["gpus"]
        content["cluster"] = str(out / "cluster.yaml")
        nodes = [{"count": problem.gpus.types.count(i), "gpus": 1, "gpu": gpu} for i, gpu in enumerate(gpus)]
        files["cluster.yaml"] = yaml.safe_dump({"nodes": nodes})
    else:
        # this raises an error if a services file cannot express the content, such as two entries for one model
        parse_services(content, folder / "tasks.csv")
    if modellist.exists():
        files["plan.json"] = json.dumps(read_modellist(modellist, problem).to_dict(), indent=1) + "\n"
    files["services.yaml"] = yaml.safe_dump(content, sort_keys=False)
    return files, f"; plan it with: cotenant plan {out / 'services.yaml'} --no-verify --planner {planner}"


def _public(problem: Problem, plan: str | None) -> dict[str, str]:
    """Convert a services file, and the file `plan` if given, to the public gpulet scheduler's files. sim-config.json
    selects the planner that made this plan, or else the default planner.
    """
    from cotenant.cli.plan import read_plan
    from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER
    from cotenant.serving.config import gpulet_files

    read = None if plan is None else read_plan(plan)
    text: Callable[[Any], str] = lambda data: json.dumps(data, indent=1) + "\n"  # noqa: E731
    files = {
        "tasks.csv": gpulet_files.write_tasks(problem.services),
        "sim-config.json": text(gpulet_files.sim_config(problem, read.planner if read else DEFAULT_PLANNER)),
        "device-config.json": text(gpulet_files.device_config(problem)),
    }
    return files if read is None else files | {"ModelList.txt": gpulet_files.write_modellist(read)}
