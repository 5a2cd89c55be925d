"""What structure a GPU shows inside a 2 MiB page, without a driver patch: which lines share a slice of the L2 cache.

A slice belongs to one memory channel and carries out a fixed number of reductions per clock. Adding from all SMs to two
lines at once takes twice as long when both lie in one slice. From that come, within one page:

interleave   the length of stretches that stay in one slice
groups       the lines of the page by slice
linear       whether "same slice" depends on the exclusive-or of two offsets alone, as in a hash without carries
other pages  whether other pages have the same groups at the same offsets

A method that sees nothing says so: `separation` is the time of a pair in one slice over that of a pair in two.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.bench.driver import Driver
from cotenant.bench.kernels import Kernels, upload, words
from cotenant.core.errors import WorkError

SOURCE = Path(__file__).with_name("channels.cu")
PAGE = 2 << 20
LINE = 128
ROUNDS = 24
THREADS = 256
VISIBLE = 1.25  # a separation below that is noise
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
BATCH = 4096


class Slices:
    """Tests of lines in one allocation. Offsets are bytes from its begin."""

    def __init__(self, cuda: Driver, kernels: Kernels, base: ctypes.c_void_p) -> None:
        self.cuda, self.kernels, self.base = cuda, kernels, base
        count = ctypes.c_int()
        cuda.call("cuDeviceGetAttribute", ctypes.byref(count), SM_COUNT, 0)
        self.sms = count.value
        self.threshold = 0.0
        self.separation = 0.0
        self.tests = 0

    def times(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Clocks of each pair's test."""
        found: list[int] = []
        for at in range(0, len(pairs), BATCH):
            part = pairs[at : at + BATCH]
            offsets = upload(self.cuda, words([offset for pair in part for offset in pair]))
            found += self.run(
                len(part), lambda n, clocks, o=offsets: ("pair", self.base, o, n, ctypes.c_uint32(ROUNDS), clocks)
            )
            self.cuda.call("cuMemFree_v2", offsets)
        return found

    def run(self, count: int, test: Any) -> list[int]:
        """Clocks of `count` tests; `test(n, clocks)` gives a kernel's name and arguments."""
        self.tests += count
        clocks = upload(self.cuda, words([0] * count))
        for n in range(count):
            name, *arguments = test(ctypes.c_uint32(n), clocks)
            self.kernels.launch(name, self.sms, THREADS, *arguments)
        result = words([0] * count)
        self.cuda.call("cuMemcpyDtoH_v2", result, clocks, ctypes.c_size_t(8 * count))
        self.cuda.call("cuMemFree_v2", clocks)
        return list(result)

    def calibrate(self, seed: int = 1) -> dict[str, float]:
        """Set the threshold between one slice and two: a line with itself against random pairs of lines."""
        draw = random.Random(seed)
        lines = [draw.randrange(PAGE // LINE) * LINE for _ in range(200)]
        self.times([(line, line) for line in lines[:20]])  # clocks of the card come up
        same = self.times([(line, line) for line in lines])
        other = self.times(list(zip(lines, lines[1:] + lines[:1], strict=True)))
        one, two = statistics.median(same), statistics.median(other)
        self.separation = one / two
        self.threshold = (one * two) ** 0.5
        spread = statistics.quantiles(other, n=20)
        return {"one_slice_clocks": one, "two_slices_clocks": two, "separation": self.separation,
                "two_slices_p5": spread[0], "two_slices_p95": spread[-1]}  # fmt: skip

    def with_reference(self, reference: int, offsets: Sequence[int]) -> list[bool]:
        """Which of these lines share the reference's slice; what looks so is tested three times."""
        first = self.times([(reference, offset) for offset in offsets])
        found = [clocks > self.threshold for clocks in first]
        doubtful = [n for n, yes in enumerate(found) if yes]
        again = self.times([(reference, offsets[n]) for n in doubtful for _ in range(2)])
        for place, n in enumerate(doubtful):
            found[n] = min(again[2 * place : 2 * place + 2]) > self.threshold
        return found

    def groups(self, offsets: Sequence[int], until_s: float) -> tuple[list[list[int]], int]:
        """Lines by slice: the first left is the reference, those with it leave. Also how many were left at the end."""
        left = list(offsets)
        found: list[list[int]] = []
        while left and time.monotonic() < until_s:
            reference, *rest = left
            same = self.with_reference(reference, rest)
            found.append([reference, *(offset for offset, yes in zip(rest, same, strict=True) if yes)])
            left = [offset for offset, yes in zip(rest, same, strict=True) if not yes]
        return found, len(left)


def interleave(slices: Slices) -> int:
    """Bytes that stay in one slice: the least run of 128-byte lines with the same answer, over several references."""
    runs: list[int] = []
    for reference in (0, 777 * LINE, 5001 * LINE):
        begin = reference // 16384 * 16384
        # the 16 KiB around the reference, line by line
        offsets = [begin + n * LINE for n in range(128)]
        same = slices.with_reference(reference, offsets)
        place = (reference - begin) // LINE
        low = high = place
        while low > 0 and same[low - 1]:
            low -= 1
        while high < 127 and same[high + 1]:
            high += 1
        runs.append(high - low + 1)
    least = min(runs)
    return LINE * (1 << (least.bit_length() - 1))


def is_linear(groups: list[list[int]], step: int, checks: int = 4000, seed: int = 2) -> float:
    """Part of cases in which a group moved by the exclusive-or of two of its members lies in one group again.

    1.0 for a hash that is linear over bits; about 1 / groups for one that is not.
    """
    label = {offset // step: number for number, group in enumerate(groups) for offset in group}
    draw = random.Random(seed)
    big = [group for group in groups if len(group) > 1]
    good = total = 0
    for _ in range(checks if big else 0):
        a, b = draw.sample(draw.choice(big), 2)
        c = draw.choice(draw.choice(groups))
        moved = (c // step) ^ (a // step) ^ (b // step)
        if moved in label:
            total += 1
            good += label[moved] == label[c // step]
    return good / total if total else float("nan")


def other_pages(slices: Slices, groups: list[list[int]], pages: Sequence[int]) -> dict[str, float]:
    """Part of the pairs in one group here that share a slice in other pages; and of pairs in two groups here."""
    draw = random.Random(3)
    big = [group for group in groups if len(group) > 1]
    found: dict[str, float] = {}
    if len(big) < 2:
        return found
    inside = [tuple(draw.sample(draw.choice(big), 2)) for _ in range(300)]
    across = [tuple(draw.choice(group) for group in draw.sample(big, 2)) for _ in range(300)]
    for name, pairs in (("same_here", inside), ("apart_here", across)):
        tested = [(a + page * PAGE, b + page * PAGE) for page in pages for a, b in pairs]
        found[f"{name}_share_a_slice_there"] = statistics.mean(t > slices.threshold for t in slices.times(tested))
    between = [(a, a + page * PAGE) for page in pages for a, _ in inside]
    found["same_offset_shares_a_slice"] = statistics.mean(t > slices.threshold for t in slices.times(between))
    return found


def latencies(cuda: Driver, kernels: Kernels, base: ctypes.c_void_p) -> dict[str, float]:
    """Clocks of a read from L2 by one SM, over the lines of the page: near and far slices."""
    lines = PAGE // 1024
    clocks = upload(cuda, (ctypes.c_uint32 * (lines + 1))())
    assert clocks.value is not None
    sm = ctypes.c_void_p(clocks.value + 4 * lines)
    kernels.launch("latency", 1, 1, base, ctypes.c_uint32(lines), ctypes.c_uint32(1024), clocks, sm)
    result = (ctypes.c_uint32 * (lines + 1))()
    cuda.call("cuMemcpyDtoH_v2", result, clocks, ctypes.c_size_t(4 * (lines + 1)))
    values = sorted(result[:lines])
    parts = {name: values[int(part * (lines - 1))] for name, part in (("min", 0.0), ("p5", 0.05), ("p50", 0.5))}
    return {**parts, "p95": values[int(0.95 * (lines - 1))], "max": values[-1], "sm": result[lines]}


def start(size: int) -> tuple[Driver, Kernels, ctypes.c_void_p]:
    """This process's GPU, the kernels, and zeroed memory that begins on a page."""
    cuda = Driver(os.environ.get("COTENANT_BENCH_LIBRARY", "libcuda.so.1"))
    if "Software" in cuda.name:
        raise WorkError("the software GPU has no memory channels: the probe needs a real one")
    base = ctypes.c_void_p()
    cuda.call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(size + PAGE))
    assert base.value is not None
    base = ctypes.c_void_p((base.value + PAGE - 1) // PAGE * PAGE)
    cuda.call("cuMemsetD8_v2", base, 0, ctypes.c_size_t(size))
    cuda.synchronise()
    return cuda, Kernels(cuda, SOURCE), base


def probe(seconds: float = 60.0, pages: int = 16) -> dict[str, Any]:
    """Probe this process's GPU for at most about that long. Keys as in the module's text, and what was seen."""
    until_s = time.monotonic() + seconds
    cuda, kernels, base = start(pages * PAGE)
    found: dict[str, Any] = {"gpu": cuda.name, "page_bytes": PAGE, "read_clocks": latencies(cuda, kernels, base)}
    slices = Slices(cuda, kernels, base)
    found |= slices.calibrate()
    found["visible"] = slices.separation > VISIBLE
    if not found["visible"]:
        return found
    step = interleave(slices)
    offsets = range(0, PAGE, step)
    groups, left = slices.groups(offsets, until_s - seconds / 4)
    sizes = sorted((len(group) for group in groups), reverse=True)
    found |= {
        "interleave_bytes": step,
        "lines": len(offsets),
        "lines_not_placed": left,
        "groups": len(groups),
        "group_sizes": {"most": sizes[0], "median": statistics.median(sizes), "least": sizes[-1]},
        "groups_of_one": sum(size == 1 for size in sizes),
        "linear": is_linear(groups, step),
        "linear_by_chance": 1 / len(groups),
        "other_pages": other_pages(slices, groups, range(1, pages, 4)),
        "smallest_span_of_all_groups_bytes": span_of_all(groups),
        "tests": slices.tests,
    }
    return found


def span_of_all(groups: list[list[int]]) -> int:
    """The least power of two of bytes from the page's begin that touches every group: no colour in larger pages."""
    need = max(min(group) for group in groups) + 1
    return 1 << (need - 1).bit_length()
