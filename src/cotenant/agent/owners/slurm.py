"""The share of a Slurm job: a user requests it in the job's comment, and the agent holds it from prolog to epilog.

`sbatch --comment "cotenant:request=30%,limit=60%,memory=8GiB"`; other words of the comment are ignored. The prolog runs
as root on each node of the job and can read the comment; the task prolog runs as the user and cannot. So the prolog
writes a file `slurm-N.job` into the agent's folder: empty if the job's share is held, otherwise with the reason why it
is not. The epilog releases only shares of jobs with such a file. So the prolog writes the file before it requests the
share, at first with the reason that the prolog has not finished. Jobs that request nothing have no file; for them the
scripts in deploy/slurm do nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.owners.slurm_ended import job_file
from cotenant.agent.tenants.launcher import environment_changes
from cotenant.agent.tenants.registry import spec_to_dict
from cotenant.core.errors import InputError, WorkError, nearest
from cotenant.core.strength import Strength, strength_named
from cotenant.core.units import parse_fraction, parse_memory

MARK = "cotenant:"
KEYS = ("request", "limit", "memory", "enforce-memory", "priority")
FIELD = "--comment"
# a word that is at least this similar to `cotenant` or to a key, such as cotennat or requets, is taken for a
# misspelling of it
LIKE = 0.75
UNFINISHED = "the prolog of this job has not finished: no share is held for it"


def spec_of(environment: Mapping[str, str]) -> TenantSpec | None:
    """The share that a job requests; None if it requests none. Raises InputError if the request is invalid."""
    words = environment.get("SLURM_JOB_COMMENT", "").split()
    for word in words:
        _refuse_near_miss(word)
    asked = [word.removeprefix(MARK) for word in words if word.startswith(MARK)]
    if not asked:
        return None
    if len(asked) > 1:
        raise InputError(f"{MARK} is given twice", field=FIELD)
    _refuse_spaces(words, MARK + asked[0])
    given: dict[str, str] = {}
    for part in asked[0].split(","):
        key, sign, value = part.partition("=")
        if not sign or not value:
            raise InputError(f"{part[:60]!r} is not KEY=VALUE, as in {MARK}request=30%,memory=8GiB", field=FIELD)
        if key not in KEYS or key in given:
            known = nearest(key, KEYS) or "known are " + ", ".join(KEYS)
            why = "is given twice" if key in given else f"is unknown; {known}"
            raise InputError(f"{key[:60]!r} {why}", field=FIELD)
        given[key] = value
    try:
        priority = int(given.get("priority", 0))
    except ValueError:
        raise InputError(f"priority {given['priority'][:40]!r} is not a whole number", field=FIELD) from None
    gpus = tuple(part for part in environment.get("SLURM_JOB_GPUS", "").split(",") if part)
    spec = TenantSpec(
        name=job_name(environment),
        request=parse_fraction(given.get("request", "0"), FIELD),
        limit=parse_fraction(given.get("limit", "100%"), FIELD),
        memory_bytes=parse_memory(given["memory"], FIELD) if "memory" in given else None,
        enforce_memory=strength_named(given["enforce-memory"], field=FIELD)
        if "enforce-memory" in given
        else Strength.NOTHING,
        priority=priority,
        gpus=gpus,
        gpu_count=max(1, len(gpus)),
    )
    return check_spec(spec, field=FIELD)


def _refuse_near_miss(word: str) -> None:
    """Raise InputError for a word that resembles a request. If it were ignored, the job would run without a limit.

    Such a word is `cotenant`, or contains `cotenant:` or `cotenant=` but not as a part of a path or of an image's name,
    or contains `cotenant` and after it KEY=VALUE. In the last case `cotenant` and the key may be misspelt, as in
    `cotennat:requets=30%`.
    """
    if word.startswith(MARK):
        return
    own = re.search(r"(?i)^cotenant$|(?<![\w/.-])cotenant[:=]", word) is not None
    keys = [match for match in re.finditer(r"[^\W_]+(?==)", word) if _like(match.group(), *KEYS)]
    if keys and not own:
        pieces = re.findall(r"[^\W_]+", word[: keys[-1].start()])
        own = any(_like(piece, MARK[:-1]) for piece in [*pieces, *(a + b for a, b in pairwise(pieces))])
    if own:
        raise InputError(f"{word[:60]!r} does not begin with {MARK}, as in {MARK}request=30%,memory=8GiB", field=FIELD)


def _refuse_spaces(words: list[str], mark: str) -> None:
    """Raise InputError if a request seems to continue after a space: ignoring that part would leave out limits."""
    cut = mark == MARK or mark.endswith(",")
    if cut or any(word.startswith(",") or word.partition("=")[0] in KEYS for word in words):
        raise InputError(
            f"{mark[:60]!r} ends at a space: write the whole request without one, as in {MARK}request=30%,memory=8GiB",
            field=FIELD,
        )


def _like(word: str, *known: str) -> bool:
    return bool(difflib.get_close_matches(word.lower(), known, 1, LIKE))


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of the tenant that has a Slurm job's share."""
    return f"slurm-{_number(environment, 'SLURM_JOB_ID')}"


def start(environment: Mapping[str, str], folder: Path) -> str:
    """Do the prolog's work: request the job's share. Returns in words what was done, empty for a job that requests
    nothing. Idempotent.

    An invalid request must not make Slurm drain the node. So the error is written into the job's file, and the job's
    tasks do not start. Raises WorkError if the agent does not answer or the folder cannot be written.
    """
    uid = _number(environment, "SLURM_JOB_UID")
    path, refused, said = job_file(folder, job_name(environment)), "", ""
    try:
        spec = spec_of(environment)
        if spec is None:
            path.unlink(missing_ok=True)
            return ""
        _leave_word(path, UNFINISHED)
        with ControlClient(folder) as client:
            row = client.call("hold", tenant=spec_to_dict(spec), uid=uid, **_place(environment))
            said = f"{row['name']} has {row['request']:.0%} of {', '.join(row['gpus'])}"
    except InputError as error:
        refused = str(_as_written(error))
        said = f"{job_name(environment)} gets no share: {refused}"
        # the share of the job's earlier run may still be held if Slurm has requeued the job
        _let_go(environment, folder)
    _leave_word(path, refused)
    return said


def _as_written(error: InputError) -> InputError:
    """Return the agent's error as it concerns the job's comment. The agent's error names an option of `cotenant run`,
    such as `--request`, which the user did not write; the returned error names `--comment request=`, or no field if the
    comment has no such key.
    """
    if error.field is None or error.field == FIELD:
        return error
    key = error.field.removeprefix("--")
    return InputError(error.message, field=f"{FIELD} {key}=" if key in KEYS else None)


def _leave_word(path: Path, text: str) -> None:
    """Replace the file that tells a job's tasks whether the job has its share. It is replaced in one step, because a
    file that is still empty would mean that the share is held.
    """
    part = path.with_suffix(".part")
    try:
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise WorkError(f"{path.parent} cannot be written: {error.strerror}") from None


def task_lines(environment: Mapping[str, str], folder: Path) -> list[str]:
    """Do the task prolog's work: returns `export` lines, which Slurm applies to the task's environment.

    Raises InputError if the job has no share although it requested one, WorkError if the agent does not answer.
    """
    try:
        refused = job_file(folder, job_name(environment)).read_text()
    except FileNotFoundError:
        return []
    if refused:
        raise InputError(refused)
    with ControlClient(folder) as client:
        name = job_name(environment)
        if not client.call("owned", **_place(environment))["names"]:
            raise InputError(f"the share of {name} is no longer held: the agent has lost or released it")
        answer: dict[str, Any] = client.call("register", tenant={"name": name, "limit": None})
    return [f"export {key}={value}" for key, value in environment_changes(answer).items()]


def end(environment: Mapping[str, str], folder: Path) -> None:
    """Do the epilog's work: release the job's share. If no agent answers, the agent started next finds that the job has
    ended.
    """
    _let_go(environment, folder)
    job_file(folder, job_name(environment)).unlink(missing_ok=True)


def _let_go(environment: Mapping[str, str], folder: Path) -> None:
    with contextlib.suppress(WorkError), ControlClient(folder) as client:
        client.call("let_go", **_place(environment))


def _place(environment: Mapping[str, str]) -> dict[str, str]:
    return {"kind": "slurm", "id": str(_number(environment, "SLURM_JOB_ID"))}


def _number(environment: Mapping[str, str], key: str) -> int:
    value = environment.get(key, "")
    if not value.isascii() or not value.isdigit():
        raise WorkError(f"{key} is {value!r:.40}: this command must be run by Slurm as Prolog, TaskProlog or Epilog")
    return int(value)
