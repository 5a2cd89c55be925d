"""Profiles of a program's kernels: duration, SMs and work class of each. Reads files of Orion and of `cotenant profile
kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.abi.floor import WorkClass
from cotenant.core.errors import InputError
from cotenant.core.jsonfile import read_json
from cotenant.core.textfile import read_text

ORION_HEAD = "Name,Profile,Memory_footprint,SM_usage,Duration"
CLASS_NAMES = tuple(kind.name.lower() for kind in WorkClass)
MOST_IN_CYCLE = 2000
_ORION_CLASS = {"-1": WorkClass.UNKNOWN, "0": WorkClass.MEMORY, "1": WorkClass.COMPUTE}


@dataclass(frozen=True)
class KernelWork:
    """A kernel of the sequence (cycle) that a program repeats. `sms`: SMs that the kernel would fill, which may be more
    than the GPU has (several waves).
    """

    name: str
    duration_ns: int
    sms: int
    work_class: int


@dataclass(frozen=True)
class KernelRow:
    """The measured launches of one kernel with one shape. `shape`: grid and block, six numbers; empty: any shape. `sms`
    and `duration_ns` are 0 if unknown.
    """

    name: str
    shape: tuple[int, ...] = ()
    duration_ns: int = 0
    sms: int = 0
    work_class: int = WorkClass.UNKNOWN
    count: int = 1

    @property
    def total_ns(self) -> int:
        """Return the total time of all measured launches of the kernel."""
        return self.duration_ns * self.count


def read_orion(path: Path) -> list[KernelWork]:
    """Read an Orion profile: a CSV file with a row for each kernel, in the order of the launches. Durations are in ns.
    The column Profile is the work class (1 compute, 0 memory, -1 unknown). Names may contain commas."""
    lines = read_text(path).splitlines()
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
            wrong = f"{line[:80]!r} is not a row of name, class, memory, SMs and duration"
            raise InputError(wrong, file=path, line=number) from None
        if kernel.duration_ns <= 0 or kernel.sms <= 0:
            raise InputError(f"{sms} SMs and a duration of {duration}: both must be over 0", file=path, line=number)
        kernels.append(kernel)
    if not kernels:
        raise InputError("the profile has no kernels", file=path)
    return kernels


def read_kernel_rows(path: Path) -> list[KernelRow]:
    """Return the rows of a kernel profile that `cotenant profile kernels` wrote. InputError if the file is not one."""
    if path.exists() and not path.is_file():
        # pipes and devices are refused, because reading them might never end
        raise InputError("not a file", file=path)
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("kernels"), list):
        raise InputError("not what `cotenant profile kernels --out` writes", file=path)
    if not content["kernels"]:
        raise InputError("the profile has no kernels", file=path)
    return [_row(row, number, path) for number, row in enumerate(content["kernels"], 1)]


def _row(row: Any, number: int, path: Path) -> KernelRow:
    wanted = f"kernel {number} needs name, duration_ns, sms and work_class ({', '.join(CLASS_NAMES[1:])})"
    named = isinstance(row, dict) and isinstance(row.get("name"), str)
    if not named or row.get("work_class") not in CLASS_NAMES[1:]:
        raise InputError(wanted, file=path)
    grid, block = row.get("grid", []), row.get("block", [])
    if not isinstance(grid, list) or not isinstance(block, list) or (len(grid), len(block)) not in ((0, 0), (3, 3)):
        raise InputError(f"kernel {number} is wrong: grid and block have three numbers each", file=path)
    numbers = [*grid, *block, row.get("duration_ns"), row.get("sms"), row.get("count", 1)]
    if None in numbers:
        raise InputError(wanted, file=path)
    for value in numbers:
        if type(value) is not int or not 0 < value < 1 << 63:
            raise InputError(f"kernel {number} is wrong: {value!r} is not a whole number above 0", file=path)
    duration_ns, sms, count = numbers[-3:]
    return KernelRow(row["name"], tuple(numbers[:-3]), duration_ns, sms, CLASS_NAMES.index(row["work_class"]), count)


def read_kernels(path: Path) -> list[KernelWork]:
    """Return the kernels of one cycle of a program, from a profile in either format. InputError if the file is neither.
    """
    if path.suffix != ".json":
        return read_orion(path)
    rows = read_kernel_rows(path)
    kernels = [KernelWork(row.name, row.duration_ns, row.sms, row.work_class) for row in rows]
    return _cycle(kernels, [row.count for row in rows])


def _cycle(kernels: Sequence[KernelWork], counts: Sequence[int]) -> list[KernelWork]:
    """Return the kernels of one cycle of a program whose launch counts are known but whose order is not. The number of
    a kernel's launches is its count divided by the smallest count, reduced in proportion if all launches together are
    more than MOST_IN_CYCLE. The launches are evenly mixed.
    """
    per_cycle = [count / max(1, min(counts)) for count in counts]
    scale = min(1.0, MOST_IN_CYCLE / sum(per_cycle))
    repeats = [max(1, round(part * scale)) for part in per_cycle]
    places = sorted(((i + 0.5) / n, k) for k, n in enumerate(repeats) for i in range(n))
    return [kernels[k] for _, k in places]
