"""Protocol-independent handling of a request: its target, admission, its items, its answer."""

from __future__ import annotations

from cotenant.serving.dispatch.admission import Admission
from cotenant.serving.dispatch.apps import Applications
from cotenant.serving.dispatch.calls import Kind, Refusal, Reply, Withdraw, nothing
from cotenant.serving.protocol.classification import classified
from cotenant.serving.protocol.oip import InferAnswer, InferRequest
from cotenant.serving.protocol.tensors import TensorError


class Gateway:
    """Validates requests and queues them. `limit`: largest number of requests in the server, over all services."""

    def __init__(self, admission: Admission, applications: Applications, limit: int = 10_000) -> None:
        self.admission, self.applications, self.limit = admission, applications, limit
        self.draining = False
        self.open = 0

    def infer(self, request: InferRequest, reply: Reply) -> Withdraw:
        """Serve a request: `reply` gets the answer or refusal once, now or later. Returns a function to call if the
        client disconnects.
        """
        self.open += 1

        def counted(answer: InferAnswer | Refusal) -> None:
            self.open -= 1
            if request.classes and isinstance(answer, InferAnswer):
                answer = self._classified(request, answer)
            reply(answer)

        try:
            if self.draining:
                raise Refusal(Kind.UNAVAILABLE, "the server is shutting down", 1.0)
            self._room(request)
            if request.model in self.applications.names:
                return self.applications.begin(request, counted)
            return self.admission.submit(request, counted)
        except Refusal as refusal:
            counted(refusal)
            return nothing

    def wrong(self, model: str, version: str, why: str) -> Refusal:
        """Return the refusal of a request that cannot be decoded because of `why`. If the server does not have the
        model, the refusal says that instead.
        """
        if model not in self.applications.names:
            try:
                self.admission.ready(model, version)
            except Refusal as refusal:
                if refusal.kind is Kind.UNKNOWN:
                    return refusal
        return Refusal(Kind.WRONG, why)

    def _classified(self, request: InferRequest, answer: InferAnswer) -> InferAnswer | Refusal:
        """Return the answer. If the client requested classes for an output, the output has these classes instead of its
        tensor. Returns a Refusal if an output cannot have classes.
        """
        loaded = self.admission.pool.loaded.get(request.model)
        labels = {} if loaded is None else loaded.info.labels
        batchable = loaded is None or loaded.info.batchable
        try:
            answer.outputs = [
                classified(x, count, labels.get(x.name, ()), batchable) if (count := request.classes.get(x.name)) else x
                for x in answer.outputs
            ]
        except TensorError as error:
            return Refusal(Kind.WRONG, str(error))
        return answer

    def _room(self, request: InferRequest) -> None:
        """Refuse requests beyond the server's limit. Requests of lower priority are refused earlier."""
        service = self.admission.pool.service.get(request.model)
        priority = request.priority or (service.priority if service is not None else 0)
        most = self.limit
        if self.open > (most if priority > 0 else most * 9 // 10 if priority == 0 else most // 2):
            self.admission.full(request.model)
            raise Refusal(Kind.FULL, f"the server already has {self.open} open requests; try again later", 0.5)
