"""Results of a load test: a row per request, and the same figures as the simulator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotenant.core.metrics.serving import OUTCOMES, request_metrics
from cotenant.loadgen.loop import LATE, OK, Loop
from cotenant.loadgen.schedule import LoadService

ROW = np.dtype(
    [("svc", "i4"), ("scheduled", "f8"), ("sent", "f8"), ("finished", "f8"), ("inference", "f8"), ("outcome", "u1")]
)
OUTCOME_NAMES = ("failed", *OUTCOMES[1:])
COLUMNS = ("service", "scheduled_s", "sent_s", "finished_s", "inference_ms", "total_ms", "outcome")


@dataclass(frozen=True)
class LoadResult:
    """The result of one load test. `rows`: one ROW per request, in the order of their scheduled times. Times in a row
    are seconds from the start, except for `inference`, which is in ms; -1 stands for events that did not happen.
    `wrong`: number of answers that belonged to another request; `stray`: number of answers to no open request."""

    services: tuple[LoadService, ...]
    rows: np.ndarray
    duration_s: float
    seed: int
    url: str = ""
    wrong: int = 0
    stray: int = 0
    connections: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def latency_ms(self) -> np.ndarray:
        """Return (n,) milliseconds from a request's scheduled time to its answer."""
        latency: np.ndarray = (self.rows["finished"] - self.rows["scheduled"]) * 1000.0
        return latency

    def summary(self) -> dict[str, Any]:
        """Return the figures of each service and of all together, with the keys that the simulator's results have, and
        how late requests were sent."""
        rows, latency = self.rows, self.latency_ms
        services = {}
        for s, service in enumerate(self.services):
            mine = rows["svc"] == s
            services[service.name] = {
                **request_metrics(latency[mine], rows["outcome"][mine]),
                "slo_ms": service.slo_ms,
                "sent_rps": float(mine.sum() / self.duration_s),
                "answered_rps": float(
                    ((rows["outcome"][mine] == OK) | (rows["outcome"][mine] == LATE)).sum() / self.span_s
                ),
            }
        return {
            "url": self.url,
            "seed": self.seed,
            "duration_s": self.duration_s,
            "requests": len(rows),
            "services": services,
            "total": {**request_metrics(latency, rows["outcome"]), "rps": self.answered_rps},
            "lateness_ms": self.lateness(),
            "wrong_answers": self.wrong,
            "stray_answers": self.stray,
            "connections": self.connections,
            "failures": dict(self.reasons),
        }

    @property
    def span_s(self) -> float:
        """Return the seconds from the start to the last answer, at least the duration of the run."""
        return max(self.duration_s, float(self.rows["finished"].max()) if len(self.rows) else 0.0)

    @property
    def answered_rps(self) -> float:
        """Return the answered requests per second over the whole run."""
        answered = (self.rows["outcome"] == OK) | (self.rows["outcome"] == LATE)
        return float(answered.sum() / self.span_s)

    @property
    def attainment(self) -> float:
        """Return the lowest SLO attainment of any service; 1 if nothing was sent."""
        found = [row["slo_attainment"] for row in self.summary()["services"].values()]
        return min((x for x in found if x is not None), default=1.0)

    @property
    def fault(self) -> str | None:
        """Return a sentence if answers were wrong or nothing was answered, so that the figures cannot be used; else
        None.
        """
        if self.wrong:
            return f"{self.wrong:,} answers belonged to another request or model; they count as failed"
        if len(self.rows) and not np.isin(self.rows["outcome"], (OK, LATE)).any():
            return f"none of the {len(self.rows):,} requests was answered with a result"
        return None

    def lateness(self) -> dict[str, float | None]:
        """Return how late requests were sent, in ms: the part of the latencies that the load generator itself caused.
        """
        sent = self.rows["sent"] >= 0
        late = (self.rows["sent"][sent] - self.rows["scheduled"][sent]) * 1000.0
        if not len(late):
            return {"p50": None, "p99": None, "max": None}
        p50, p99 = np.percentile(late, (50, 99))
        return {"p50": float(p50), "p99": float(p99), "max": float(late.max())}

    def warnings(self) -> list[str]:
        """Return warnings about the figures: the generator was late, or answers were wrong."""
        found = list(self.remarks)
        late = self.lateness()["p99"]
        slos = [s.slo_ms for s in self.services if s.slo_ms is not None]
        limit = max(1.0, 0.05 * min(slos)) if slos else 5.0
        if late is not None and late > limit:
            found.append(
                f"1 % of the requests were sent {late:.1f} ms or more after their scheduled time, because this machine "
                "or the limit of connections was the bottleneck; the latencies include this delay"
            )
        if self.stray:
            found.append(f"{self.stray:,} answers belong to no open request")
        for reason, count in sorted(self.reasons.items(), key=lambda x: -x[1])[:3]:
            found.append(f"{count:,} failed: {reason}")
        return found

    def csv(self) -> str:
        """Return the client's log as CSV with the columns COLUMNS. Cells of events that did not happen are empty."""
        import polars as pl

        rows = self.rows
        names = np.array([s.name for s in self.services], dtype=object)
        ended = rows["finished"] >= 0
        frame = pl.DataFrame(
            {
                "service": names[rows["svc"]].astype(str) if len(rows) else [],
                "scheduled_s": rows["scheduled"].round(6),
                "sent_s": np.where(rows["sent"] >= 0, rows["sent"], np.nan).round(6),
                "finished_s": np.where(ended, rows["finished"], np.nan).round(6),
                "inference_ms": np.where(rows["inference"] >= 0, rows["inference"], np.nan),
                "total_ms": np.where(ended, self.latency_ms, np.nan).round(4),
                "outcome": np.array(OUTCOME_NAMES)[rows["outcome"]],
            }
        )
        return frame.fill_nan(None).write_csv()


def rows_of(loop: Loop, services: Sequence[LoadService]) -> np.ndarray:
    """Return the requests of a finished loop, as an array of ROW. The outcome of an answer that exceeds its service's
    SLO is LATE."""
    records = loop.records
    rows = np.zeros(len(records.svc), ROW)
    rows["svc"] = records.svc
    for name in ("scheduled", "sent", "finished", "inference"):
        rows[name] = getattr(records, name)
    rows["outcome"] = np.frombuffer(bytes(records.outcome) + bytes(len(rows) - len(records.outcome)), np.uint8)
    unsent = np.arange(len(rows))  # requests that were not due yet when a run was stopped are left out
    return mark_late(rows[(unsent < loop.next) | (unsent >= loop.open_count)], services)


def mark_late(rows: np.ndarray, services: Sequence[LoadService]) -> np.ndarray:
    """Mark answers that exceed their service's SLO as late."""
    slo = np.array([np.inf if s.slo_ms is None else s.slo_ms for s in services])
    answered = (rows["outcome"] == OK) | (rows["outcome"] == LATE)
    late = (rows["finished"] - rows["scheduled"]) * 1000.0 > slo[rows["svc"]]
    rows["outcome"] = np.where(answered, np.where(late, LATE, OK), rows["outcome"])
    return rows


def merge(results: Sequence[LoadResult]) -> LoadResult:
    """Merge the results of several sending processes, which divide one schedule of requests."""
    first = results[0]
    rows = np.concatenate([r.rows for r in results])
    reasons: dict[str, int] = {}
    for r in results:
        for reason, count in r.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return LoadResult(
        first.services, rows[np.argsort(rows["scheduled"], kind="stable")], first.duration_s, first.seed, first.url,
        sum(r.wrong for r in results), sum(r.stray for r in results), sum(r.connections for r in results), reasons,
        first.remarks,
    )  # fmt: skip
