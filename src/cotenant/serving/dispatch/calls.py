"""Requests in the server: a call is one request, divided into units (its items) that join batches."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from cotenant.serving.protocol.items import joined
from cotenant.serving.protocol.oip import InferAnswer, InferRequest
from cotenant.serving.protocol.tensors import Tensor, TensorError


class Outcome(Enum):
    """Outcome of a unit or a call. The values are those in request logs."""

    OK = "ok"
    LATE = "late"
    DROPPED = "dropped"
    FULL = "full"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Kind(Enum):
    """Reasons for not answering a request: (HTTP status, gRPC status code, value of the `cotenant-outcome` header)."""

    WRONG = (400, 3, "wrong")
    UNAUTHENTICATED = (401, 16, "unauthenticated")
    UNKNOWN = (404, 5, "unknown")
    TOO_LARGE = (413, 8, "too-large")
    FULL = (429, 8, "full")
    FAILED = (500, 13, "failed")
    UNAVAILABLE = (503, 14, "unavailable")
    LATE = (503, 14, "late")
    CANCELLED = (503, 1, "cancelled")


class Refusal(Exception):  # noqa: N818 - most refusals are not errors
    """A request that is answered by an error; `retry_s`: time after which a retry makes sense."""

    def __init__(self, kind: Kind, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.retry_s = kind, message, retry_s


Reply = Callable[["InferAnswer | Refusal"], None]
# function that cancels those items of a request that do not run yet; called when the client has disconnected
Withdraw = Callable[[], None]


def nothing() -> None:
    """Does nothing."""


class Unit:
    """One item of a call, which waits in the queue of a service or runs in a batch."""

    __slots__ = ("alone", "arrived_ms", "call", "deadline_ms", "row", "tensors", "tries")

    def __init__(self, call: Call, row: int, tensors: list[Tensor], arrived_ms: float, deadline_ms: float) -> None:
        self.call, self.row, self.tensors = call, row, tensors
        self.arrived_ms, self.deadline_ms = arrived_ms, deadline_ms
        self.tries = 0
        self.alone = False


class Call:
    """One request to a service: collects the answers of its units and replies once."""

    __slots__ = ("answers", "batch", "done", "executed_ms", "left", "queued_ms", "reply", "request", "service",
                 "unstacked", "version")  # fmt: skip

    def __init__(self, request: InferRequest, service: str, version: str, rows: int, reply: Reply) -> None:
        self.request, self.service, self.version, self.reply = request, service, version, reply
        self.left = rows
        self.answers: list[list[Tensor] | None] = [None] * rows
        self.queued_ms = self.executed_ms = 0.0
        self.batch = 0
        self.done = False
        self.unstacked = False  # the model has no batch dimension, so it gets one item at a time

    def answered(self, row: int, tensors: list[Tensor], queued_ms: float, executed_ms: float, batch: int) -> None:
        """Store the outputs of a unit. The last unit completes the call."""
        if self.done:
            return
        self.answers[row] = tensors
        self.queued_ms = max(self.queued_ms, queued_ms)
        self.executed_ms = max(self.executed_ms, executed_ms)
        self.batch = max(self.batch, batch)
        self.left -= 1
        if self.left == 0:
            self.done = True
            self.reply(self._answer())

    def refused(self, refusal: Refusal) -> None:
        """Refuse the call, because one of its units was refused."""
        if not self.done:
            self.done = True
            self.reply(refusal)

    def _answer(self) -> InferAnswer | Refusal:
        try:
            outputs = joined(self.answers) if not self.unstacked else self.answers[0] or []
        except TensorError as error:
            return Refusal(Kind.FAILED, str(error))
        wanted = self.request.outputs
        if wanted is not None:
            outputs = [t for t in outputs if t.name in wanted]
        return InferAnswer(self.service, self.version, outputs, self.queued_ms, self.executed_ms, self.batch)
