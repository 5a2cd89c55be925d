"""The controller's rows of the live page, its metrics, and the HTTP server for the page and the metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from cotenant.core.errors import WorkError
from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller import answers
from cotenant.fleet.state import ENDED, PARKED, STARTING, STOPPING, UP
from cotenant.observability import metrics as names
from cotenant.observability.exposition import Exposition
from cotenant.observability.feed import Feed, Row
from cotenant.observability.http import LiveServer, parse_address

T = TypeVar("T")
MOST_JOBS = 500  # largest number of jobs on the live page: first the running ones, then those that have waited longest
MOST_DECISIONS = 40
START_WITHIN_S = 10.0
WORDS = {
    Kind.ARRIVE: "arrived",
    Kind.START: "started",
    Kind.RESUME: "goes on",
    Kind.MOVE: "moved",
    Kind.RESIZE: "resized",
    Kind.PREEMPT: "preempted",
    Kind.FINISH: "finished",
    Kind.WAIT: "waits",
    Kind.PROFILE: "is measured",
    Kind.REPARTITION: "waits for a new layout of its GPU",
    Kind.REJECT: "cannot run",
}
WAITS = {
    Reason.GPUS_FULL: "earlier jobs hold all GPUs",
    Reason.GANG_TOO_LARGE_NOW: "fewer GPUs are free than the job needs together",
    Reason.NO_CPU_OR_MEMORY: "GPUs are free, but no node with free GPUs has the CPU and memory that the job needs",
    Reason.NO_GPU_OF_MODEL: "no GPU of a model that the job accepts is free",
    Reason.RESERVED: "free GPUs are reserved for a job that has waited longer",
    Reason.OUTRANKED: "earlier jobs took the job's GPUs",
    Reason.BELOW_FLOOR: "no free slice satisfies its QoS minimum",
    Reason.FAILED: "the job's processes failed; the job is restarted",
    Reason.LOST: "the job's node, or the process that ran the job there, was lost",
}


def short(reason: Reason) -> str:
    """Return a reason for waiting in the words that `cotenant queue` prints."""
    return reason.name.lower().replace("_", " ")


SENTENCES = {short(reason): text for reason, text in WAITS.items()}


class Call(Protocol):
    """Type of a function that runs another function in the controller's thread and returns its result."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class LivePort:
    """Serves the live page and the metrics in a thread of its own; the controller's data is only accessed in the
    controller's thread.
    """

    def __init__(self, fleet: answers.Fleet, call: Call, address: str, token: str | None = None) -> None:
        """`call` runs a function in the controller's thread."""
        host, port = parse_address(address, "--http")
        self._fleet, self._call = fleet, call
        self._loop = asyncio.new_event_loop()
        self._feed = Feed(lambda: _stream(fleet, call))
        self._server = LiveServer(host, port, self._feed, self._metrics, token)
        self._thread = threading.Thread(target=self._run, name="fleet live page", daemon=True)
        self._ready = threading.Event()
        self._error: WorkError | None = None
        self._thread.start()
        if not self._ready.wait(START_WITHIN_S):
            raise WorkError("the live page did not start")
        if self._error is not None:
            raise self._error
        self.url = self._server.url

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.start())
        except WorkError as error:
            self._error = error
            self._ready.set()
            return
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._server.close())
        self._loop.close()

    async def _metrics(self) -> str:
        return await asyncio.to_thread(lambda: self._call(lambda: exposition(self._fleet)))

    def close(self) -> None:
        """Stop serving."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_WITHIN_S)


async def _stream(fleet: answers.Fleet, call: Call) -> AsyncIterator[Row]:
    for row in await asyncio.to_thread(lambda: call(lambda: rows(fleet))):
        yield row


def rows(fleet: answers.Fleet) -> list[Row]:
    """Rows of the live page: the nodes' GPUs and their jobs, the queue (why each job waits or failed), and the latest
    events.
    """
    status = answers.status(fleet)
    note = "; ".join(status["faults"])
    found: list[Row] = [
        ("sources", "fleet", {"name": "fleet", "kind": "fleet", "address": status["folder"], "ok": True, "note": note})
    ]
    for name, node in sorted(fleet.known.items()):
        for index, gpu in enumerate(node.gpus):
            gone = "" if name in fleet.nodes else " (not reached)"
            row = {"node": name + gone, "index": index, "model": gpu.model, "memory_bytes": gpu.memory_bytes}
            found.append(("gpus", gpu.uuid, row))
    for job in fleet.table.running():
        assert job.attempt is not None
        for place in job.attempt.assignment.places:
            for share in place.gpus:
                found.append(("shares", f"{job.id} {share.instance or share.uuid}", _share(job, share)))
    jobs = answers.queue(fleet)
    found += [("jobs", row["id"], _job(row)) for row in jobs[:MOST_JOBS]]
    if len(jobs) > MOST_JOBS:
        text = f"{len(jobs) - MOST_JOBS:,} more jobs wait; cotenant queue lists them"
        found.append(("warnings", "more", {"source": "fleet", "about": "queue", "text": text}))
    return found + _decisions(fleet)


def _share(job: Any, share: Any) -> dict[str, Any]:
    return {
        "gpu": share.uuid,
        "tenant": job.id,  # ids are unique, whereas several jobs may have the same name
        "kind": "job",
        "mechanism": f"mig {share.slice}" if share.slice else share.mechanism,
        "granted": share.fraction,
        "limit": share.fraction if share.limit is None else share.limit,
        "got": None,  # the job's measured share of the GPU is known only to the node's agent
        "state": job.attempt.phase,
    }


def _job(row: dict[str, Any]) -> dict[str, Any]:
    places = ", ".join(f"{place['node']}: {place['gpus']:g}" for place in row["nodes"])
    state = "waiting" if row["state"] == "queued" else row["state"]
    return {
        "name": row["name"],
        "state": state,
        "reason": SENTENCES.get(row["why"]) or row["error"] or row["why"],
        "gpus": row["slice"] or f"{row['gpus']:g}",
        "place": places,
        "progress": None if row["done"] is None else round(row["done"], 3),
        "waited_s": round(row["waited_s"]),
        "ran_s": round(row["ran_s"]),
    }


def _decisions(fleet: answers.Fleet) -> list[Row]:
    began_unix_s = time.time() - fleet.clock.now_s()
    events = fleet.store.rows(
        "SELECT e.number, e.time_s, e.kind, e.reason, e.places, j.id, j.spec FROM events e JOIN jobs j ON j.row = e.job"
        " ORDER BY e.number DESC LIMIT ?",
        (MOST_DECISIONS,),
    )
    found: list[Row] = []
    for number, time_s, kind, reason, places, id_, spec in events:
        name = json.loads(spec).get("name") or id_
        where = sorted({str(place[0] if isinstance(place, list) else place) for place in json.loads(places or "[]")})
        why = short(Reason(reason))
        text = f"{name} {WORDS.get(Kind(kind), Kind(kind).name.lower())}"
        text += f" on {', '.join(where)}" if where and Kind(kind) not in (Kind.PREEMPT, Kind.FINISH) else ""
        if Kind(kind) is Kind.WAIT and Reason(reason) in WAITS:
            text += f": {WAITS[Reason(reason)]}"
        elif Reason(reason) is not Reason.NONE:
            text += f" ({why})"
        fields = {"time_s": round(began_unix_s + time_s, 1), "source": "fleet", "text": text}
        found.append(("decisions", str(number), fields))
    return found


def exposition(fleet: answers.Fleet) -> str:
    """The controller's metrics as text; called in its thread."""
    status, table = answers.status(fleet), fleet.table
    now_s = fleet.clock.now_s()
    out = Exposition()
    out.declare(names.FLEET)
    states = Counter({"waiting": 0, **dict.fromkeys((STARTING, UP, STOPPING, PARKED, ENDED), 0)})
    states.update("waiting" if job.attempt is None else job.attempt.phase for job in table.jobs.values())
    for state, count in sorted(states.items()):
        out.add(names.FLEET_JOBS, count, state=state)
    for state, count in sorted(table.over.items()):
        out.add(names.FLEET_ENDED, count, state=state)
    for node in status["nodes"]:
        out.add(names.FLEET_GPUS, node["gpus"], node=node["name"])
        out.add(names.FLEET_HELD, node["gpus_held"], node=node["name"])
        out.add(names.FLEET_REACHABLE, int(node["reachable"]), node=node["name"])
    waits = [now_s - job.arrival_s - job.attained_s for job in table.jobs.values() if job.attempt is None]
    out.add(names.FLEET_LONGEST_WAIT, max([0.0, *waits]))
    out.histogram(names.FLEET_WAIT, fleet.counts.waits)
    out.add(names.FLEET_ROUNDS, status["rounds"])
    out.histogram(names.FLEET_DECISION, fleet.counts.decisions)
    out.add(names.FLEET_FAULTS, len(status["faults"]))
    out.add(names.FLEET_MEMORY, status["memory_bytes"])
    return out.text()
