"""Who moves the next chunk over a GPU's link: weighted fair queues, one per tenant and direction.

native/shim/copies/copy_rule.h carries the rule out on a shared page; here are its parameters. A queue's vruntime
grows by bytes over weight, as in Linux's completely fair scheduler. The next chunk is the waiting queue's with the
least vruntime, queues of rank AHEAD before all others; the queue whose slice it is goes on until the slice is used
up, or it is a slice before the one with the least. Formulas (B bytes, w weight, P period, C chunk, sums over the
queues that wait):

    vruntime += 16 B / w        slice = max(C, P w / sum of w)        on waking: |vruntime - clock| <= 3 * 16 slice / w

Pinned and pageable memory have links of their own: copies of pageable memory share the processor's pace, which is a
tenth of the link's, and those who could fill the link would stand still for them. Who goes ahead goes ahead of both.

The clock is the vruntime of the queue that had the last turn, and never goes back; those who go ahead have one of their
own. A program that makes one copy after the other does not wait while its last pieces are on the link, nor until its
thread has come back: meanwhile others use up the slice they have, and the places in flight. What it may then catch up
with is the credit on waking, three slices; one slice was measured to be too little (0.728 of the link for weight 3 of
4).
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.copy_page import COPY_SLOTS


@dataclass(frozen=True)
class CopySettings:
    """Parameters of the link's queues. Sizes in bytes, times in nanoseconds.

    `always`: copies take turns on every GPU; else only where a tenant has a copy weight or goes ahead.
    `alone_chunks`: of one piece while nobody else copies and no tenant of the GPU goes ahead. `wait_lapse_ns`,
    `slot_lapse_ns`: claims older than that count for nothing, so a process that has gone holds nobody up for longer;
    who has not copied for `slot_lapse_ns` is one who does not copy.
    """

    always: bool = False
    chunk_bytes: int = 8 << 20
    period_bytes: int = 64 << 20
    in_flight: int = 2
    wait_lapse_ns: int = 20_000_000
    slot_lapse_ns: int = 200_000_000
    alone_chunks: int = 8

    def __post_init__(self) -> None:
        if not 4096 <= self.chunk_bytes <= 1 << 32:
            raise ValueError(f"a chunk of {self.chunk_bytes} bytes: write 4 KiB to 4 GiB")
        if not 4096 <= self.period_bytes <= 1 << 40:
            raise ValueError(f"a period of {self.period_bytes} bytes: write 4 KiB to 1 TiB")
        if not 1 <= self.in_flight <= COPY_SLOTS:
            raise ValueError(f"{self.in_flight} chunks in flight: write 1 to {COPY_SLOTS}")

    @property
    def alone_bytes(self) -> int:
        """Piece of a copy while nobody else copies."""
        return self.alone_chunks * self.chunk_bytes

    @property
    def slice_bytes(self) -> int:
        """Piece of a copy on the device by a best-effort tenant: 256 MiB with the usual chunk, 0.2 ms."""
        return 32 * self.chunk_bytes
