"""The compiled core of the dispatcher, which chooses the next batch of each gpulet (a part of a GPU on which services
take turns). No clock, no input or output; the caller passes times in ms.

Requests of a service wait in one queue, first come, first served. An idle gpulet takes a batch from the next of its
services, in a fixed cyclic order, that has requests; so every such service gets one batch in each cycle. A request that
can no longer be answered in time is dropped when it is at the head of the queue. Under overload (more requests wait
than fit into a batch) the head is dropped in favour of a full batch; otherwise the batch is reduced until the head is
in time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cotenant.policy.compiled import bare

# A seat is the place of a service on a gpulet. batch: planned size of its batches, which is also the largest; hold: a
# smaller batch is held back until this many ms after its first request arrived.
SEAT = np.dtype([("svc", "i8"), ("let", "i8"), ("batch", "i8"), ("hold", "f8")], align=True)
# A gpulet, a part of a GPU on which services take turns. It has `count` seats (places of services), from number
# `first` on; the fields from turn to n say what runs on it; due: time at which a batch that was held back must be
# checked again.
LET = np.dtype(
    [("first", "i8"), ("count", "i8"), ("gpu", "i8"), ("turn", "i8"), ("busy", "i8"), ("seat", "i8"), ("n", "i8"),
     ("seq", "i8"), ("started", "f8"), ("due", "f8")],
    align=True,
)  # fmt: skip
# The queue of a service. Its requests have the numbers from head to tail - 1, which are never reused; most: largest
# number of requests in it; first, count: where `Desk.seats_of` has the service's seats.
QUEUE = np.dtype([("head", "i8"), ("tail", "i8"), ("most", "i8"), ("first", "i8"), ("count", "i8")], align=True)
WAIT = np.dtype([("arrived", "f8"), ("deadline", "f8"), ("tag", "i8")], align=True)
DROP = np.dtype([("svc", "i8"), ("seq", "i8"), ("tag", "i8")], align=True)


class Desk(NamedTuple):
    """The state of a dispatcher. S is the number of services, B the size of the largest batch.

    - seats: the places of services on gpulets
    - lets: the gpulets (parts of GPUs)
    - queues (S): the queue of each service
    - ring (S, size): the waiting requests of each service; size is a power of two
    - seats_of: numbers of seats, ordered by service. A service has `count` of them, from index `first` on (fields of
      its queue), the fastest seat first.
    - exec_ms (seats, B+1): planned time of a batch of each size on each seat
    - drops: the requests dropped since `ndrops[0]` was last set to 0; ndrops[0] is their number
    """

    seats: np.ndarray
    lets: np.ndarray
    queues: np.ndarray
    ring: np.ndarray
    seats_of: np.ndarray
    exec_ms: np.ndarray
    drops: np.ndarray
    ndrops: np.ndarray


@bare
def offer(D: Desk, s: int, now: float, deadline: float, tag: int) -> int:
    """Enter a request into the queue of service s. Returns its number, or -1 if the queue is full. If `tag` is below 0,
    the number is the tag."""
    tail = D.queues[s].tail
    if tail - D.queues[s].head >= D.queues[s].most:
        return -1
    slot = tail & (D.ring.shape[1] - 1)
    D.ring[s, slot].arrived = now
    D.ring[s, slot].deadline = deadline
    D.ring[s, slot].tag = tag if tag >= 0 else tail
    D.queues[s].tail = tail + 1
    return tail


@bare
def drop_head(D: Desk, s: int) -> None:
    """Remove the first request of a queue, and record it as dropped."""
    head = D.queues[s].head
    i = D.ndrops[0]
    D.drops[i].svc = s
    D.drops[i].seq = head
    D.drops[i].tag = D.ring[s, head & (D.ring.shape[1] - 1)].tag
    D.ndrops[0] = i + 1
    D.queues[s].head = head + 1


@bare
def withdraw(D: Desk, s: int, tag: int) -> int:
    """Remove the request with this tag from a queue. Returns 1, or 0 if the request does not wait. The requests before
    it move by one slot, which changes their numbers in the ring but not their tags.
    """
    mask = D.ring.shape[1] - 1
    head = D.queues[s].head
    for at in range(head, D.queues[s].tail):
        if D.ring[s, at & mask].tag == tag:
            for k in range(at, head, -1):
                D.ring[s, k & mask] = D.ring[s, (k - 1) & mask]
            D.queues[s].head = head + 1
            return 1
    return 0


@bare
def expire(D: Desk, s: int, now: float) -> None:
    """Drop the requests at the head of a queue whose deadline has passed."""
    mask = D.ring.shape[1] - 1
    while D.queues[s].tail > D.queues[s].head and D.ring[s, D.queues[s].head & mask].deadline < now:
        drop_head(D, s)


@bare
def batch_now(D: Desk, k: int, now: float) -> int:
    """Return the size of the batch that seat k (a service's place on a gpulet) should run now, after dropping requests
    that cannot be in time; 0: none waits.
    """
    s = D.seats[k].svc
    mask = D.ring.shape[1] - 1
    most = D.seats[k].batch
    while D.queues[s].tail > D.queues[s].head:
        waiting = D.queues[s].tail - D.queues[s].head
        n = min(waiting, most)
        deadline = D.ring[s, D.queues[s].head & mask].deadline
        if now + D.exec_ms[k, n] <= deadline:
            return n
        if waiting <= most:
            while n > 1 and now + D.exec_ms[k, n] > deadline:
                n -= 1
            if now + D.exec_ms[k, n] <= deadline:
                return n
        drop_head(D, s)
    return 0


@bare
def start(D: Desk, i: int, now: float) -> int:
    """Let gpulet i (a part of a GPU), which is idle, take its next batch. Returns the size of the batch; 0: none starts
    (`due` is when to check again).
    """
    count = D.lets[i].count
    D.lets[i].due = np.inf
    for step in range(1, count + 1):
        at = (D.lets[i].turn + step) % count
        k = D.lets[i].first + at
        s = D.seats[k].svc
        if D.queues[s].tail == D.queues[s].head:
            continue
        if D.seats[k].hold > 0.0 and D.queues[s].tail - D.queues[s].head < D.seats[k].batch:
            due = D.ring[s, D.queues[s].head & (D.ring.shape[1] - 1)].arrived + D.seats[k].hold
            if now < due:
                D.lets[i].due = min(D.lets[i].due, due)
                continue
        n = batch_now(D, k, now)
        if n > 0:
            D.lets[i].turn = at
            D.lets[i].busy = 1
            D.lets[i].seat = k
            D.lets[i].n = n
            D.lets[i].seq = D.queues[s].head
            D.lets[i].started = now
            D.queues[s].head += n
            return n
    return 0


@bare
def idle_let(D: Desk, s: int) -> int:
    """Return the fastest idle gpulet (part of a GPU) that serves service s; -1: all are busy."""
    for x in range(D.queues[s].first, D.queues[s].first + D.queues[s].count):
        i = D.seats[D.seats_of[x]].let
        if D.lets[i].busy == 0:
            return i
    return -1


@bare
def finish(D: Desk, i: int) -> None:
    """Record that gpulet i (a part of a GPU) has finished its batch."""
    D.lets[i].busy = 0
