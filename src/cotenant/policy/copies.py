"""Fair queueing of copies on a GPU's link to the host: each tenant has a weighted queue in each direction. This module
has the parameters.

native/shim/copies/copy_rule.h implements the rule on a page that the tenants share. A queue's vruntime (virtual
runtime) grows by the copied bytes divided by the weight, as in Linux's completely fair scheduler. The next chunk is
that of the waiting queue with the least vruntime; queues of rank AHEAD come before all others. A queue may copy several
chunks in a row, its slice. It loses the rest of the slice when its vruntime exceeds the least one by more than the
whole slice would add. When an idle queue starts to wait, its vruntime is changed, if necessary, so that it differs from
the link's *clock* by no more than three slices would add. The clock is the vruntime of the queue that copied last, and
never decreases; rank AHEAD has a clock of its own.

Formulas, with B the bytes copied, w the queue's weight, C the bytes of a chunk, P the period (the bytes that all
waiting queues copy together in one round of slices), and the sum over the waiting queues. The factor 16 is arbitrary:
vruntimes are integers, and it makes rounding errors small.

    after a copy:           vruntime += 16 B / w
    slice of a queue:       slice = max(C, P w / sum of w)
    when it starts to wait: |vruntime - clock| <= 3 * 16 slice / w

Pinned and pageable memory have separate links: copies of pageable memory run at the speed of the processor, a tenth of
the link's, and would slow down copies of pinned memory. Rank AHEAD has precedence on both.

A program that makes one copy after the other requests nothing between two copies, and other tenants use the link in
that time. The program may make up for this later, but by no more than the three slices by which a vruntime may differ
from the clock. One slice was measured to be too little: a tenant of weight 3 of 4 got 0.728 of the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.abi.copy_page import COPY_SLOTS


@dataclass(frozen=True)
class CopySettings:
    """Parameters of the link's queues. Sizes are in bytes, times in nanoseconds.

    `always`: copies are scheduled on every GPU; otherwise only on GPUs where a tenant has a copy weight or rank AHEAD.
    `in_flight`: how many chunks of one rank may be in flight on a link; each claims one of the link's slots.
    `alone_chunks`: number of chunks in a piece of a copy while no other tenant copies and none has rank AHEAD.

    A process that has ended delays others only for a limited time: `wait_lapse_ns` after its last request, a queue no
    longer counts as waiting; `slot_lapse_ns` after a chunk claimed a slot, the slot counts as free. A tenant without a
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
            raise ValueError(f"chunk_bytes must be 4 KiB to 4 GiB, not {self.chunk_bytes} bytes")
        if not 4096 <= self.period_bytes <= 1 << 40:
            raise ValueError(
                "period_bytes, which all waiting tenants copy together in one round, must be 4 KiB to 1 TiB, "
                f"not {self.period_bytes} bytes"
            )
        if not 1 <= self.in_flight <= COPY_SLOTS:
            raise ValueError(f"chunks in flight must be 1 to {COPY_SLOTS}, not {self.in_flight}")

    @property
    def alone_bytes(self) -> int:
        """Return the size in bytes of a piece of a copy while no other tenant copies."""
        return self.alone_chunks * self.chunk_bytes

    @property
    def slice_bytes(self) -> int:
        """Return the size in bytes of the pieces into which copies within the device are split for a best-effort
        tenant. With chunks of the usual size, a piece has 256 MiB, and its copy takes 0.2 ms.
        """
        return 32 * self.chunk_bytes
