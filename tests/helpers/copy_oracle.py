"""The scheduling rule of copies on a link in plain Python. Tests compare it with the compiled rule,
native/shim/copies/copy_rule.h."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.abi.copy_page import COPY_QUEUES, COPY_SLOTS, CopyRank
from cotenant.policy.copies import CopySettings

SCALE = 16
CREDIT_SLICES = 3
WORD = 1 << 64
NO_SLOT = -1


@dataclass
class Queue:
    """The queue of one tenant in one direction. `seen_ns` 0: none of its copies waits; `active_ns`: time at which one
    last requested a chunk."""

    weight_milli: int = 0
    rank: CopyRank = CopyRank.NORMAL
    vruntime: int = 0
    seen_ns: int = 0
    active_ns: int = 0
    bytes: int = 0
    chunks: int = 0


@dataclass
class Slot:
    """A chunk in flight."""

    participant: int
    ahead: bool
    date_us: int


@dataclass
class Link:
    """One direction of a GPU's link, for pinned or for pageable memory. `twin`: the same direction for the other kind
    of memory."""

    settings: CopySettings
    queues: list[Queue] = field(default_factory=lambda: [Queue() for _ in range(COPY_QUEUES)])
    slots: list[Slot | None] = field(default_factory=lambda: [None] * COPY_SLOTS)
    min_vruntime: int = 0
    min_ahead: int = 0
    twin: Link | None = None
    slice_queue: int | None = None
    slice_used: int = 0

    # -- the rule --------------------------------------------------------------------------------------------------

    def waits(self, queue: Queue, now_ns: int) -> bool:
        """Whether a copy of the queue has requested a chunk recently."""
        return bool(queue.weight_milli and queue.seen_ns) and now_ns - queue.seen_ns < self.settings.wait_lapse_ns

    def slice_bytes(self, number: int, now_ns: int) -> int:
        """Bytes that a queue may move without a break while others wait."""
        weights = sum(q.weight_milli for i, q in enumerate(self.queues) if i == number or self.waits(q, now_ns))
        mine = self.queues[number].weight_milli
        return max(self.settings.chunk_bytes, self.settings.period_bytes * mine // weights if weights else 0)

    def next(self, now_ns: int) -> int | None:
        """The queue that may move the next chunk."""
        waiting = [i for i, q in enumerate(self.queues) if self.waits(q, now_ns)]
        if not waiting:
            return None
        ahead = [i for i in waiting if self.queues[i].rank == CopyRank.AHEAD]
        pool = ahead or waiting
        best = pool[0]
        for i in pool[1:]:
            if before(self.queues[i].vruntime, self.queues[best].vruntime):
                best = i
        holder = self.slice_queue
        if holder is None or holder not in pool:
            return best
        size, queue = self.slice_bytes(holder, now_ns), self.queues[holder]
        most = (self.queues[best].vruntime + vtime(size, queue.weight_milli)) % WORD
        return holder if self.slice_used < size and before(queue.vruntime, most) else best

    def clock(self, queue: Queue) -> int:
        """Virtual time of the link, for queues of the same rank."""
        return self.min_ahead if queue.rank == CopyRank.AHEAD else self.min_vruntime

    def is_sole(self, number: int) -> bool:
        """Whether no other tenant has a queue."""
        return not any(q.weight_milli for i, q in enumerate(self.queues) if i != number)

    def piece_bytes(self, number: int, now_ns: int) -> int:
        """Size of the chunks into which a copy that arrives now is split."""
        others = [q for i, q in enumerate(self.queues) if i != number and q.weight_milli]
        copying = self._active(number, now_ns) or (self.twin is not None and self.twin._active(number, now_ns))
        mine_ahead = self.queues[number].rank == CopyRank.AHEAD
        if any(q.rank == CopyRank.AHEAD for q in others) or (copying and not mine_ahead):
            return self.settings.chunk_bytes
        return max(self.settings.alone_bytes, self.settings.chunk_bytes)

    def _active(self, but: int, now_ns: int) -> bool:
        """Whether another queue has copied on this link recently."""
        others = [q for i, q in enumerate(self.queues) if i != but and q.weight_milli]
        return any(q.active_ns and now_ns - q.active_ns < self.settings.slot_lapse_ns for q in others)

    def _ahead(self, now_ns: int) -> int:
        """Number of chunks in flight of queues with precedence (latency-sensitive tenants)."""
        return sum(slot.ahead for slot in self.slots if slot is not None and not self._free(slot, now_ns))

    def free_slot(self, ahead: bool, now_ns: int) -> int | None:
        """A free slot for one more chunk. Queues with precedence ignore the chunks of the others, which may only move
        while no queue with precedence has a chunk in flight."""
        held = [slot for slot in self.slots if not self._free(slot, now_ns)]
        held_ahead, most = self._ahead(now_ns), min(self.settings.in_flight, COPY_SLOTS)
        if held_ahead >= most if ahead else held_ahead or len(held) >= most:
            return None
        if not ahead and self.twin is not None and self.twin._ahead(now_ns):
            return None
        places = range(COPY_SLOTS if ahead else most)
        return next((i for i in places if self._free(self.slots[i], now_ns)), None)

    def _free(self, slot: Slot | None, now_ns: int) -> bool:
        return slot is None or now_ns // 1000 > slot.date_us + self.settings.slot_lapse_ns // 1000

    # -- events ----------------------------------------------------------------------------------------------------

    def ask(self, number: int, participant: int, size: int, now_ns: int) -> int | None:
        """A copy requests to move one chunk of `size` bytes. Returns the slot that it now holds, or None: request
        again. NO_SLOT: the queue belongs to no tenant any more and would never be next, so its copies are not held
        back.
        """
        queue = self.queues[number]
        if not queue.weight_milli:
            return NO_SLOT
        if not self.waits(queue, now_ns):
            credit = vtime(CREDIT_SLICES * self.slice_bytes(number, now_ns), queue.weight_milli)
            clock = self.clock(queue)
            least, most = (clock - credit) % WORD, (clock + credit) % WORD
            if before(queue.vruntime, least):
                queue.vruntime = least
            elif before(most, queue.vruntime):
                queue.vruntime = most
        queue.seen_ns = queue.active_ns = now_ns
        if self.next(now_ns) != number:
            return None
        ahead = queue.rank == CopyRank.AHEAD
        place = self.free_slot(ahead, now_ns)
        if place is None:
            return None
        self.slots[place] = Slot(participant, ahead, now_ns // 1000)
        self._account(number, size, now_ns)
        return place

    def _account(self, number: int, size: int, now_ns: int) -> None:
        queue = self.queues[number]
        if before(self.clock(queue), queue.vruntime):
            if queue.rank == CopyRank.AHEAD:
                self.min_ahead = queue.vruntime
            else:
                self.min_vruntime = queue.vruntime
        goes_on = self.slice_queue == number and self.slice_used < self.slice_bytes(number, now_ns)
        self.slice_used = self.slice_used + size if goes_on else size
        self.slice_queue = number
        self.charge(number, size)
        queue.chunks += 1

    def charge(self, number: int, size: int) -> None:
        """Charge bytes that were moved, whether or not they were granted."""
        queue = self.queues[number]
        queue.vruntime = (queue.vruntime + vtime(size, queue.weight_milli)) % WORD
        queue.bytes += size

    def rescue(self, number: int, now_ns: int) -> None:
        """Make a queue that has waited for two seconds the next of its rank, whatever its vruntime."""
        queue = self.queues[number]
        rivals = [q for q in self.queues if (q.rank == CopyRank.AHEAD) == (queue.rank == CopyRank.AHEAD)]
        least = queue.vruntime
        for rival in rivals:
            if self.waits(rival, now_ns) and before(rival.vruntime, least):
                least = rival.vruntime
        if least != queue.vruntime:
            queue.vruntime = (least - 1) % WORD

    def done(self, place: int) -> None:
        """Release the slot of a chunk that has been moved."""
        if place != NO_SLOT:
            self.slots[place] = None

    def withdraw(self, number: int) -> None:
        """Record that no copy of the queue waits any more."""
        self.queues[number].seen_ns = 0


def vtime(size: int, weight_milli: int) -> int:
    """Virtual run time (vruntime) of `size` bytes at a weight in thousandths."""
    return size * SCALE * 1000 // (weight_milli or 1)


def before(a: int, b: int) -> bool:
    """Whether vruntime a is earlier than b; both are 64-bit words that may wrap."""
    return (a - b) % WORD >= WORD // 2
