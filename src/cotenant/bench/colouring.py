"""What keeping two kernels to different memory channels would buy, measured: a Triton kernel that finds its data by a
table of small chunks, so that a tensor can lie in some channels only.

The chunks of an allocation are labelled by the probe's means (bench/channels.py): half of the slices of the L2 cache
are colour 0, the rest colour 1. Then a memory-bound kernel on a few SMs (the latency-sensitive one) runs beside another
that streams on the others, with both spread over all channels, and each in a colour of its own; the footprints are the
same. What the table itself costs is measured against the same sum over contiguous memory.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from cotenant.bench.channels import PAGE, SOURCE, THREADS, VISIBLE, Slices, interleave
from cotenant.bench.driver import Driver
from cotenant.bench.kernels import Kernels, upload, words

LISTENERS = 8
LABEL_BATCH = 1 << 17
LISTEN_ROUNDS = 12
LS_PROGRAMS = 32
REPEATS = 40
BE_PASSES = 20
IN_FLIGHT = 32 << 10  # bytes that one program reads at once


def half_of_the_slices(slices: Slices, step: int, until_s: float) -> tuple[list[int], list[int], list[int], list[int]]:
    """Two crowds, one line per group in each, and lines of known colour to calibrate with."""
    groups, _ = slices.groups(range(0, PAGE, step), until_s)
    groups = [group for group in groups if len(group) > 3]
    near, far = groups[0::2], groups[1::2]
    crowd = [group[0] for group in near]
    return crowd, [group[0] for group in far], [g[1] for g in near], [g[1] for g in far]


def label_times(slices: Slices, crowd: Sequence[int], lines: Sequence[int]) -> list[int]:
    """Clocks of an addition to each line while the other SMs add to the crowd: more where that keeps its slice busy."""
    cuda = slices.cuda
    crowd_at = upload(cuda, words(list(crowd)))
    found: list[int] = []
    for at in range(0, len(lines), LABEL_BATCH):
        part = lines[at : at + LABEL_BATCH]
        lines_at = upload(cuda, words(list(part)))
        clocks, ended = upload(cuda, (ctypes.c_uint32 * len(part))()), upload(cuda, words([0]))
        slices.kernels.launch(
            "listen", slices.sms, THREADS * 2, slices.base, crowd_at, ctypes.c_uint32(len(crowd)), lines_at,
            ctypes.c_uint32(len(part)), ctypes.c_uint32(LISTENERS), ctypes.c_uint32(LISTEN_ROUNDS), clocks, ended,
        )  # fmt: skip
        result = (ctypes.c_uint32 * len(part))()
        cuda.call("cuMemcpyDtoH_v2", result, clocks, ctypes.c_size_t(4 * len(part)))
        for place in (lines_at, clocks, ended):
            cuda.call("cuMemFree_v2", place)
        found += result
    cuda.call("cuMemFree_v2", crowd_at)
    return found


def true_colours(slices: Slices, crowds: tuple[Sequence[int], Sequence[int]], lines: Sequence[int]) -> list[int | None]:
    """Colour of each line by testing it against a line of every slice, one by one; None where none answers."""
    both = [*crowds[0], *crowds[1]]
    times = slices.times([(line, other) for line in lines for other in both])
    found: list[int | None] = []
    for n in range(len(lines)):
        row = times[n * len(both) : (n + 1) * len(both)]
        slowest = max(range(len(both)), key=row.__getitem__)
        found.append((0 if slowest < len(crowds[0]) else 1) if row[slowest] > slices.threshold else None)
    return found


def label(slices: Slices, step: int, size: int, until_s: float) -> tuple[list[int], dict[str, float]]:
    """Colour (0 or 1) of each chunk of `step` bytes by two tests, one per crowd; and how far that can be believed."""
    near, far, known_near, known_far = half_of_the_slices(slices, step, until_s)
    base = {
        "near": (label_times(slices, near, known_near), label_times(slices, near, known_far)),
        "far": (label_times(slices, far, known_far), label_times(slices, far, known_near)),
    }
    apart = {name: statistics.median(inside) / statistics.median(out) for name, (inside, out) in base.items()}
    scale = statistics.median(base["near"][1]) / statistics.median(base["far"][1])
    lines = list(range(0, size, step))
    in_near, in_far = label_times(slices, near, lines), label_times(slices, far, lines)
    colours = [0 if a > b * scale else 1 for a, b in zip(in_near, in_far, strict=True)]
    sample = random.Random(7).sample(range(len(lines)), 120)
    true = true_colours(slices, (near, far), [lines[n] for n in sample])
    judged = [(colours[n], colour) for n, colour in zip(sample, true, strict=True) if colour is not None]
    return colours, {
        "crowd_separation_near": apart["near"],
        "crowd_separation_far": apart["far"],
        "checked_lines": len(judged),
        "checked_lines_right": statistics.mean(mine == colour for mine, colour in judged),
        "part_of_colour_0": 1 - statistics.mean(colours),
        "slices": len(near) + len(far),
    }


class Pair:
    """The two kernels on two streams, over one allocation."""

    def __init__(self, torch: Any, data: Any, step: int, sms: int) -> None:
        from cotenant.bench import colour_kernels

        self.torch, self.data, self.chunk = torch, data, step // 4
        self.kernels = colour_kernels
        self.be_programs = max(1, sms - LS_PROGRAMS)
        self.streams = {"be": torch.cuda.Stream(), "ls": torch.cuda.Stream(priority=-1)}
        self.out = torch.zeros(4096, device="cuda")
        self.shape = {"CHUNK": self.chunk, "TILE": max(1, IN_FLIGHT // step), "num_warps": 8}

    def table(self, chunks: Sequence[int], seed: int) -> Any:
        """The chunks in a random order, on the device."""
        order = list(chunks)
        random.Random(seed).shuffle(order)
        return self.torch.tensor(order, dtype=self.torch.int32, device="cuda")

    def run(self, who: str, table: Any, programs: int, repeats: int = 1) -> None:
        """Queue passes over a table."""
        with self.torch.cuda.stream(self.streams[who]):
            self.kernels.by_table[(programs,)](self.data, table, self.out, len(table), repeats, **self.shape)

    def direct(self, chunks: int, programs: int) -> None:
        """Queue one pass over contiguous memory."""
        with self.torch.cuda.stream(self.streams["ls"]):
            self.kernels.contiguous[(programs,)](self.data, self.out, chunks, **self.shape)

    def timed(self, who: str, work: Any) -> tuple[Any, Any]:
        """Two events around some work of a stream."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self.streams[who])
        work()
        last.record(self.streams[who])
        return first, last

    def ls_ms(self, work: Any, be_table: Any | None) -> dict[str, float]:
        """Median milliseconds of the LS kernel, alone or beside one BE kernel that outlasts it; BE's time per pass."""
        taken, passes = [], []
        for _ in range(REPEATS):
            be = None
            if be_table is not None:
                be = self.timed("be", lambda: self.run("be", be_table, self.be_programs, BE_PASSES))
                time.sleep(0.0002)
            first, last = self.timed("ls", work)
            self.torch.cuda.synchronize()
            if be is None or last.elapsed_time(be[1]) > 0:
                taken.append(first.elapsed_time(last))
            if be is not None:
                passes.append(be[0].elapsed_time(be[1]) / BE_PASSES)
        found = {"ls_ms": statistics.median(taken), "measured": float(len(taken))}
        return found | ({"be_ms_per_pass": statistics.median(passes)} if passes else {})


def compare(pair: Pair, colours: Sequence[int], ls_chunks: int) -> dict[str, Any]:
    """LS beside BE: both everywhere, each in its colour, LS in a colour and BE everywhere; the table's own cost."""
    zero = [n for n, colour in enumerate(colours) if colour == 0]
    one = [n for n, colour in enumerate(colours) if colour == 1]
    draw = random.Random(5)
    mixed = draw.sample(range(len(colours)), min(len(colours), 2 * min(len(zero), len(one))))
    be_chunks = min(len(zero), len(one))
    ls_chunks = min(ls_chunks, be_chunks)
    tables = {
        "ls everywhere": pair.table(mixed[:ls_chunks], 1),
        "be everywhere": pair.table(mixed[-be_chunks:], 2),
        "ls coloured": pair.table(zero[:ls_chunks], 3),
        "be coloured": pair.table(one[:be_chunks], 4),
    }
    found: dict[str, Any] = {"ls_bytes": ls_chunks * pair.chunk * 4, "be_bytes": be_chunks * pair.chunk * 4}

    def ls(kind: str) -> Any:
        return lambda: pair.run("ls", tables[f"ls {kind}"], LS_PROGRAMS)

    for name, kind, be in (
        ("everywhere alone", "everywhere", None),
        ("coloured alone", "coloured", None),
        ("both everywhere", "everywhere", "be everywhere"),
        ("each in its colour", "coloured", "be coloured"),
        ("ls coloured, be everywhere", "coloured", "be everywhere"),
        ("both everywhere again", "everywhere", "be everywhere"),
        ("each in its colour again", "coloured", "be coloured"),
    ):
        found[name] = pair.ls_ms(ls(kind), tables[be] if be else None)
    found["contiguous alone"] = pair.ls_ms(lambda: pair.direct(ls_chunks, LS_PROGRAMS), None)
    sorted_table = pair.torch.arange(ls_chunks, dtype=pair.torch.int32, device="cuda")
    by_table = pair.ls_ms(lambda: pair.run("ls", sorted_table, LS_PROGRAMS), None)
    found["contiguous by table alone"] = by_table
    found["table_over_contiguous"] = by_table["ls_ms"] / found["contiguous alone"]["ls_ms"]
    for name, alone in (("both everywhere", "everywhere alone"), ("each in its colour", "coloured alone")):
        found[f"{name}: ls over alone"] = found[name]["ls_ms"] / found[alone]["ls_ms"]
    found["coloured alone over everywhere alone"] = (
        found["coloured alone"]["ls_ms"] / found["everywhere alone"]["ls_ms"]
    )
    return found


def measure(seconds: float = 60.0, size: int = 256 << 20, ls_bytes: int = 64 << 20) -> dict[str, Any]:
    """Label an allocation of `size` bytes and compare. `visible` false: no slices were seen, nothing to colour."""
    import torch

    until_s = time.monotonic() + seconds / 3
    data = torch.zeros((size + PAGE) // 4, device="cuda")
    skip = -data.data_ptr() % PAGE // 4
    data = data[skip : skip + size // 4]
    cuda = Driver()
    slices = Slices(cuda, Kernels(cuda, SOURCE), ctypes.c_void_p(data.data_ptr()))
    found: dict[str, Any] = {"gpu": cuda.name, "threads": THREADS, **slices.calibrate()}
    found["visible"] = slices.separation > VISIBLE
    if not found["visible"]:
        return found
    step = max(256, interleave(slices))
    found["chunk_bytes"] = step
    colours, sure = label(slices, step, size, until_s)
    found |= {"labels": sure, "label_s": time.monotonic() - until_s + seconds / 3}
    data.zero_()
    torch.cuda.synchronize()
    return found | compare(Pair(torch, data, step, slices.sms), colours, ls_bytes // step)
