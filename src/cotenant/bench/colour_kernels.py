"""Triton kernels that find their data by a table of chunks; imported only where Triton and a GPU are."""

import triton
import triton.language as tl


@triton.jit
def by_table(data, table, out, chunks, repeats, CHUNK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of the chunks that a table names; a program takes every so many of them, `repeats` times over."""
    total = tl.zeros((TILE, CHUNK), tl.float32)
    lane = tl.arange(0, CHUNK)
    row = tl.arange(0, TILE)
    for _again in range(repeats):
        for first in range(tl.program_id(0) * TILE, chunks, tl.num_programs(0) * TILE):
            there = first + row < chunks
            place = tl.load(table + first + row, mask=there, other=0)
            total += tl.load(data + place[:, None].to(tl.int64) * CHUNK + lane[None, :], mask=there[:, None], other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def contiguous(data, out, chunks, CHUNK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same sum over contiguous memory."""
    total = tl.zeros((TILE, CHUNK), tl.float32)
    lane = tl.arange(0, CHUNK)
    row = tl.arange(0, TILE)
    for first in range(tl.program_id(0) * TILE, chunks, tl.num_programs(0) * TILE):
        place = first + row
        there = (place < chunks)[:, None]
        total += tl.load(data + place[:, None].to(tl.int64) * CHUNK + lane[None, :], mask=there, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))
