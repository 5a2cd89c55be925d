"""Fair queueing of copies on a GPU's link: one weighted queue per tenant and direction; parameters and rule.

native/shim/copies/copy_rule.h implements the rule on a shared page. A queue's vruntime grows by bytes over weight, as
in Linux's completely fair scheduler. The next chunk is that of the waiting queue with the least vruntime, queues of
rank AHEAD before all others; the queue that has the slice continues until the slice is used up, or until it is a slice
ahead of the least vruntime. Formulas (B bytes, w weight, P period, C chunk, sums over waiting queues):

    vruntime += 16 B / w        slice = max(C, P w / sum of w)        on waking: |vruntime - clock| <= 3 * 16 slice / w

Pinned and pageable memory have separate links: copies of pageable memory run at the processor's pace, a tenth of the
link's, and would slow down copies of pinned memory. Rank AHEAD has precedence on both.

The clock is the vruntime of the queue that had the last turn, and never decreases; rank AHEAD has its own. A program
that makes one copy after the other is not waiting while its last pieces are on the link, nor until its thread has
returned: meanwhile others use up their slice and the slots. The credit on waking limits what it may catch up with to
three slices; one slice was measured to be too little (0.728 of the link for weight 3 of 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.copy_page import COPY_SLOTS


@dataclass(frozen=True)
class CopySettings:
    """Parameters of the link's queues. Sizes in bytes, times in nanoseconds.

    `always`: copies are scheduled on every GPU; otherwise only where a tenant has a copy weight or rank AHEAD.
    `alone_chunks`: chunks per piece while no other tenant copies and none has rank AHEAD. `wait_lapse_ns`,
    `slot_lapse_ns`: older claims are ignored, so an ended process delays others no longer than that; a tenant without a
    copy for `slot_lapse_ns` counts as not copying.
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
        """Piece size while no other tenant copies."""
        return self.alone_chunks * self.chunk_bytes

    @property
    def slice_bytes(self) -> int:
        """Piece size of copies within the device by a best-effort tenant: 256 MiB with the usual chunk, 0.2 ms."""
        return 32 * self.chunk_bytes
