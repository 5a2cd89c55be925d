"""The compiled loop of the serving simulator: it runs requests in virtual time through the same dispatcher as a server.
A *gpulet* is a part of a GPU on which services run batches in turn; a *seat* is the place of a service on it.

Events are arrivals (an array in time order), gpulets that finish or whose held-back batch is due, and closed-loop
clients. The last two are leaves of a tournament tree, whose root is the next event.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cotenant.policy.compiled import bare, inner
from cotenant.policy.serving.dispatch_kernel import Desk, finish, idle_let, offer, start

PENDING, OK, LATE, DROPPED, FULL = 0, 1, 2, 3, 4

# A request to a service. app: number of the application's request to which it belongs, or -1; client: number of the
# closed-loop client that sent it, or -1.
RECORD = np.dtype(
    [("svc", "i4"), ("app", "i4"), ("client", "i4"), ("let", "i4"), ("batch", "i4"), ("outcome", "i4"),
     ("arrived", "f8"), ("started", "f8"), ("finished", "f8"), ("deadline", "f8")],
    align=True,
)  # fmt: skip
# The role of a service as a stage of an application. app: the application, or -1 for an independent service; budget:
# ms until the deadline, counted from the arrival of the request at the service, or at the application if the service
# is a stage of one; parents: number of stages for which this stage waits; local: its number within the application;
# child, children: the stages that wait for it are the entries child to child + children - 1 of Run.children.
STAGE = np.dtype(
    [("app", "i8"), ("budget", "f8"), ("parents", "i8"), ("local", "i8"), ("child", "i8"), ("children", "i8")],
    align=True,
)  # fmt: skip
# A request to an application. left: number of its stages that have not ended.
INSTANCE = np.dtype(
    [("app", "i8"), ("left", "i8"), ("outcome", "i8"), ("arrived", "f8"), ("finished", "f8")], align=True
)
# Data to compute how long a service's batch takes beside the batches that run at that moment. lat: its latency in ms
# when it runs alone; over: ms to build it; own, press: what it adds to its own slowdown and to that of a neighbour
# (alpha in profiles/serving/latency.py).
COST = np.dtype([("lat", "f8"), ("over", "f8"), ("own", "f8"), ("press", "f8")], align=True)


class Run(NamedTuple):
    """The state of a simulation of a serving plan. Services (the stages of applications are services, too),
    applications, gpulets, seats and closed-loop clients are numbered from 0."""

    D: Desk  # the dispatcher
    tree: np.ndarray  # the tournament tree: its second half has the leaves, first those of gpulets, then of clients
    rec: np.ndarray  # RECORD of each request to a service
    cursor: np.ndarray  # three numbers: rows of `rec` in use, index of the next arrival, rows of `instances` in use
    times: np.ndarray  # time of each arrival in ms
    what: np.ndarray  # for each arrival the service s of the request, or -1 - a for a request to application a
    stage: np.ndarray  # STAGE of each service
    children: np.ndarray  # for each stage in turn, the services that are the next stages (STAGE.child, STAGE.children)
    instances: np.ndarray  # INSTANCE of each request to an application
    joined: np.ndarray  # [instance, STAGE.local]: how many of the stages for which this stage waits have ended
    roots: np.ndarray  # for each application a row of the services that are its first stages, filled up with -1
    stages: np.ndarray  # number of stages of each application
    slo: np.ndarray  # SLO of each application in ms
    client_svc: np.ndarray  # service of each closed-loop client
    mates: np.ndarray  # for each gpulet a row of the other gpulets that slow it down, filled up with -1
    cost: np.ndarray  # [seat, n]: COST of a batch of n requests
    scale: np.ndarray  # for each seat c0 and margin (profiles/serving/latency.py)
    rows: np.ndarray  # scratch space: for each request of one batch, its row number in `rec`
    planned: bool  # whether each batch takes its planned time, regardless of what runs beside it
    end: float  # time in ms from which closed-loop clients send nothing more


@inner
def set_time(tree: np.ndarray, leaf: int, time: float) -> None:
    """Set the time of a leaf of the tournament tree, which is when its next event occurs, and update the minima of its
    ancestors.
    """
    node = leaf + tree.shape[0] // 2
    tree[node] = time
    node >>= 1
    while node >= 1:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            break
        tree[node] = least
        node >>= 1


@bare
def set_leaf(tree: np.ndarray, leaf: int, time: float) -> None:
    """Set the time of a leaf of the tree from outside compiled code; see `set_time`."""
    set_time(tree, leaf, time)


@inner
def next_leaf(tree: np.ndarray) -> int:
    """Return the leaf of the tournament tree with the earliest event; if several have it, the first."""
    node, half = 1, tree.shape[0] // 2
    while node < half:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - half


@inner
def batch_time(R: Run, i: int) -> float:
    """Return how many milliseconds the batch that was just started on gpulet i (a part of a GPU) takes."""
    D = R.D
    k, n = D.lets[i].seat, D.lets[i].n
    if R.planned:
        return D.exec_ms[k, n]
    x, busy = 0.0, False
    for m in range(R.mates.shape[1]):
        j = R.mates[i, m]
        if j >= 0 and D.lets[j].busy == 1:
            x += R.cost[D.lets[j].seat, D.lets[j].n].press
            busy = True
    alpha = max(1.0, R.scale[k, 0] + R.cost[k, n].own + x) if busy else 1.0
    return (R.cost[k, n].lat * alpha + R.cost[k, n].over) * R.scale[k, 1]


@inner
def lose(R: Run, row: int, now: float, outcome: int) -> None:
    """Record a request as dropped: its application's request fails, and its client retries after a pause."""
    R.rec[row].outcome = outcome
    R.rec[row].finished = now
    a = R.rec[row].app
    if a >= 0 and R.instances[a].outcome == PENDING:
        R.instances[a].outcome = DROPPED
        R.instances[a].finished = now
    c = R.rec[row].client
    if c >= 0:
        patience = R.rec[row].deadline - R.rec[row].arrived
        set_time(R.tree, R.D.lets.shape[0] + c, now + (patience if patience < np.inf else 1.0))


@inner
def kick(R: Run, i: int, now: float) -> None:
    """Let gpulet i (a part of a GPU), which is idle, start a batch if requests wait, and record the requests that it
    drops.
    """
    D = R.D
    n = start(D, i, now)
    for x in range(D.ndrops[0]):
        lose(R, D.drops[x].tag, now, DROPPED)
    D.ndrops[0] = 0
    if n > 0:
        set_time(R.tree, i, now + batch_time(R, i))
    else:
        set_time(R.tree, i, D.lets[i].due)


@inner
def arrive(R: Run, s: int, now: float, app: int, client: int, deadline: float) -> None:
    """Let a request of service s arrive. If a gpulet (part of a GPU) that serves s is idle, it starts a batch at once.
    """
    D = R.D
    row = R.cursor[0]
    R.cursor[0] = row + 1
    R.rec[row].svc = s
    R.rec[row].app = app
    R.rec[row].client = client
    R.rec[row].let = -1
    R.rec[row].arrived = now
    R.rec[row].deadline = deadline
    if offer(D, s, now, deadline, row) < 0:
        lose(R, row, now, FULL)
        return
    i = idle_let(D, s)
    if i >= 0:
        kick(R, i, now)


@inner
def arrive_app(R: Run, app: int, now: float) -> None:
    """Let a request to an application arrive: each of its first stages gets a request."""
    a = R.cursor[2]
    R.cursor[2] = a + 1
    R.instances[a].app = app
    R.instances[a].left = R.stages[app]
    R.instances[a].arrived = now
    for x in range(R.roots.shape[1]):
        s = R.roots[app, x]
        if s >= 0:
            arrive(R, s, now, a, -1, now + R.stage[s].budget)


@inner
def advance_app(R: Run, a: int, s: int, now: float) -> None:
    """End stage s of an application's request: start the next stages that are ready, or finish the request."""
    R.instances[a].left -= 1
    if R.instances[a].outcome != PENDING:
        return
    if R.instances[a].left == 0:
        R.instances[a].finished = now
        took = now - R.instances[a].arrived
        R.instances[a].outcome = OK if took <= R.slo[R.instances[a].app] else LATE
        return
    for x in range(R.stage[s].child, R.stage[s].child + R.stage[s].children):
        c = R.children[x]
        R.joined[a, R.stage[c].local] += 1
        if R.joined[a, R.stage[c].local] == R.stage[c].parents:
            arrive(R, c, now, a, -1, R.instances[a].arrived + R.stage[c].budget)


@inner
def complete(R: Run, i: int, now: float) -> None:
    """End the batch of gpulet i (a part of a GPU): record it, continue applications and clients, and start the next
    batch.
    """
    D = R.D
    k, n, first = D.lets[i].seat, D.lets[i].n, D.lets[i].seq
    s = D.seats[k].svc
    mask = D.ring.shape[1] - 1
    finish(D, i)
    # this gpulet is freed first, and starts its next batch, because requests that follow from the ended batch arrive
    # later
    for x in range(n):
        R.rows[x] = D.ring[s, (first + x) & mask].tag
    started = D.lets[i].started
    kick(R, i, now)
    for x in range(n):
        row = R.rows[x]
        R.rec[row].let = i
        R.rec[row].batch = n
        R.rec[row].started = started
        R.rec[row].finished = now
        R.rec[row].outcome = OK if now <= R.rec[row].deadline + 1e-9 else LATE
        if R.rec[row].client >= 0:
            set_time(R.tree, D.lets.shape[0] + R.rec[row].client, now)
        if R.rec[row].app >= 0:
            advance_app(R, R.rec[row].app, s, now)


@bare
def run(R: Run) -> float:
    """Simulate all arrivals, and closed-loop clients until `end`, then continue until no request is left. Returns the
    time of the last event, or -1 if the record is full."""
    now = 0.0
    lets = R.D.lets.shape[0]
    reserve = R.children.shape[0] + R.roots.shape[1] + R.D.exec_ms.shape[1] * (1 + R.children.shape[0])
    while True:
        if R.cursor[0] + reserve > R.rec.shape[0]:
            return -1.0
        x = R.cursor[1]
        arrival = R.times[x] if x < R.times.shape[0] else np.inf
        due = R.tree[1]
        if due == np.inf and arrival == np.inf:
            return now
        if arrival <= due:
            now = arrival
            R.cursor[1] = x + 1
            if R.what[x] >= 0:
                s = R.what[x]
                arrive(R, s, now, -1, -1, now + R.stage[s].budget)
            else:
                arrive_app(R, -1 - R.what[x], now)
            continue
        leaf = next_leaf(R.tree)
        now = due
        if leaf >= lets:
            set_time(R.tree, leaf, np.inf)
            if now < R.end:
                s = R.client_svc[leaf - lets]
                arrive(R, s, now, -1, leaf - lets, now + R.stage[s].budget)
        elif R.D.lets[leaf].busy == 1:
            complete(R, leaf, now)
        else:
            kick(R, leaf, now)
