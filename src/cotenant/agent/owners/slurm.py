"""A Slurm job's share: asked for in its comment, held by the node's agent from the prolog to the epilog.

`sbatch --comment "cotenant:request=30%,limit=60%,memory=8GiB"`; other words in the comment are left alone. The prolog
runs as root on each node of the job and knows the job and its user from Slurm; the task prolog runs as the user.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.tenants.launcher import program_environment
from cotenant.agent.tenants.registry import spec_to_dict
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import parse_fraction, parse_memory

MARK = "cotenant:"
KEYS = ("request", "limit", "memory", "priority")
FIELD = "--comment"


def spec_of(environment: Mapping[str, str]) -> TenantSpec | None:
    """The share that a job asks for; None for a job that asks for none. InputError: what is wrong with it."""
    words = environment.get("SLURM_JOB_COMMENT", "").split()
    asked = [word.removeprefix(MARK) for word in words if word.startswith(MARK)]
    if not asked:
        return None
    if len(asked) > 1:
        raise InputError(f"{MARK} is there twice", field=FIELD)
    given: dict[str, str] = {}
    for part in asked[0].split(","):
        key, sign, value = part.partition("=")
        if not sign or not value:
            raise InputError(f"{part[:60]!r} is not KEY=VALUE, as in {MARK}request=30%,memory=8GiB", field=FIELD)
        if key not in KEYS or key in given:
            near = difflib.get_close_matches(key, KEYS, 1)
            why = (
                "is there twice"
                if key in given
                else f"is not known; {f'did you mean {near[0]}?' if near else ', '.join(KEYS)}"
            )
            raise InputError(f"{key[:60]!r} {why}", field=FIELD)
        given[key] = value
    try:
        priority = int(given.get("priority", 0))
    except ValueError:
        raise InputError(f"{given['priority'][:40]!r} is not a whole number", field=FIELD) from None
    gpus = tuple(part for part in environment.get("SLURM_JOB_GPUS", "").split(",") if part)
    spec = TenantSpec(
        name=job_name(environment),
        request=parse_fraction(given.get("request", "0"), FIELD),
        limit=parse_fraction(given.get("limit", "100%"), FIELD),
        memory_bytes=parse_memory(given["memory"], FIELD) if "memory" in given else None,
        priority=priority,
        gpus=gpus,
        gpu_count=max(1, len(gpus)),
    )
    return check_spec(spec, field=FIELD)


def job_name(environment: Mapping[str, str]) -> str:
    """Name of a job's tenant."""
    return f"slurm-{_number(environment, 'SLURM_JOB_ID')}"


def start(environment: Mapping[str, str], folder: Path) -> str:
    """The prolog. Says what was done; empty for a job that asks for nothing.

    What is wrong with the request is the user's affair, and must not drain the node: it is kept for the job's tasks,
    which then do not start. WorkError: the agent does not answer.
    """
    uid = _number(environment, "SLURM_JOB_UID")
    try:
        spec = spec_of(environment)
        if spec is None:
            return ""
        with ControlClient(folder) as client:
            place = {"kind": "slurm", "id": str(_number(environment, "SLURM_JOB_ID"))}
            row = client.call("hold", tenant=spec_to_dict(spec), uid=uid, **place)
    except InputError as error:
        with contextlib.suppress(OSError):
            path = _refusal(environment, folder)
            path.write_text(str(error))
            path.chmod(0o644)
        return f"{job_name(environment)} gets no share: {error}"
    return f"{row['name']} has {row['request']:.0%} of {', '.join(row['gpus'])}"


def task_lines(environment: Mapping[str, str], folder: Path) -> list[str]:
    """The task prolog: `export` lines that Slurm takes for the task. InputError: the job was refused its share."""
    if MARK not in environment.get("SLURM_JOB_COMMENT", ""):
        return []
    with contextlib.suppress(OSError):
        raise InputError(_refusal(environment, folder).read_text())
    with ControlClient(folder) as client:
        answer: dict[str, Any] = client.call("register", tenant={"name": job_name(environment), "limit": None})
    wanted = program_environment(answer)
    return [f"export {key}={value}" for key, value in wanted.items() if environment.get(key) != value]


def end(environment: Mapping[str, str], folder: Path) -> None:
    """The epilog. Without an agent there is nothing to free."""
    _refusal(environment, folder).unlink(missing_ok=True)
    try:
        with ControlClient(folder) as client:
            client.call("let_go", kind="slurm", id=str(_number(environment, "SLURM_JOB_ID")))
    except WorkError:
        return


def _refusal(environment: Mapping[str, str], folder: Path) -> Path:
    """Where the prolog leaves word for the tasks."""
    return folder / f"{job_name(environment)}.refused"


def _number(environment: Mapping[str, str], key: str) -> int:
    value = environment.get(key, "")
    if not value.isascii() or not value.isdigit():
        raise WorkError(f"{key} is {value!r:.40}: this is run by Slurm as Prolog, TaskProlog or Epilog")
    return int(value)
