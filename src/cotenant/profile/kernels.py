"""Profiles of kernels: what each of a program's kernels takes, fills and needs most. Orion's files and ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cotenant.model.errors import InputError

ORION_HEAD = "Name,Profile,Memory_footprint,SM_usage,Duration"
CLASS_NAMES = ("none", "unknown", "memory", "compute")
UNKNOWN, MEMORY, COMPUTE = 1, 2, 3
MOST_IN_CYCLE = 2000
_ORION_CLASS = {"-1": UNKNOWN, "0": MEMORY, "1": COMPUTE}


@dataclass(frozen=True)
class KernelWork:
    """One kernel of a program's cycle. `sms`: SMs it would fill (more than there are: several waves)."""

    name: str
    duration_ns: int
    sms: int
    work_class: int


def read_orion(path: Path) -> list[KernelWork]:
    """An Orion profile: CSV in issue order, ns, class 1 compute, 0 memory, -1 unknown. Names hold commas."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}", file=path) from None
    if not lines or lines[0].strip() != ORION_HEAD:
        raise InputError(f"an Orion profile begins with {ORION_HEAD}", file=path, line=1)
    kernels = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        parts = line.rsplit(",", 4)
        try:
            name, kind, _memory, sms, duration = parts
            kernel = KernelWork(name, round(float(duration)), round(float(sms)), _ORION_CLASS[kind.strip()])
        except (ValueError, KeyError):
            raise InputError("not a row of name, class, memory, SMs and duration", file=path, line=number) from None
        if kernel.duration_ns <= 0 or kernel.sms <= 0:
            raise InputError("SMs and duration must be over 0", file=path, line=number)
        kernels.append(kernel)
    if not kernels:
        raise InputError("the profile has no kernels", file=path)
    return kernels


def write_kernels(path: Path, kernels: Sequence[KernelWork], about: dict[str, object]) -> None:
    """Our own form: JSON, `kernels` in issue order with names of classes."""
    from cotenant.record.files import atomic_file

    rows = [asdict(k) | {"work_class": CLASS_NAMES[k.work_class]} for k in kernels]
    with atomic_file(path) as file:
        file.write(json.dumps(about | {"kernels": rows}, indent=1))


def read_kernels(path: Path) -> list[KernelWork]:
    """A profile of kernels in either form."""
    if path.suffix != ".json":
        return read_orion(path)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
    except (ValueError, KeyError, TypeError):
        raise InputError('not a profile of kernels: {"kernels": [...]} is one', file=path) from None
    kernels, counts = [], []
    for number, r in enumerate(rows if isinstance(rows, list) else [], 1):
        try:
            work_class = CLASS_NAMES.index(r["work_class"])
            kernels.append(KernelWork(str(r["name"]), int(r["duration_ns"]), int(r["sms"]), work_class))
            counts.append(int(r.get("count", 1)))
        except (ValueError, KeyError, TypeError):
            wanted = f"name, duration_ns, sms and work_class ({', '.join(CLASS_NAMES[1:])})"
            raise InputError(f"kernel {number} needs {wanted}", file=path) from None
    if not kernels or any(k.duration_ns <= 0 or k.sms <= 0 for k in kernels):
        raise InputError("a profile needs kernels with SMs and durations over 0", file=path)
    return _cycle(kernels, counts)


def _cycle(kernels: Sequence[KernelWork], counts: Sequence[int]) -> list[KernelWork]:
    """One cycle of a program of which only is known how often it launched each kernel: evenly mixed, each as often as
    the rarest goes into it, at most MOST_IN_CYCLE altogether."""
    per_cycle = [count / max(1, min(counts)) for count in counts]
    scale = min(1.0, MOST_IN_CYCLE / sum(per_cycle))
    repeats = [max(1, round(part * scale)) for part in per_cycle]
    places = sorted(((i + 0.5) / n, k) for k, n in enumerate(repeats) for i in range(n))
    return [kernels[k] for _, k in places]
