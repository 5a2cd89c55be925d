"""Applications: requests that pass through a graph of services.

A stage starts when all its predecessors are done. Each of its inputs is taken from the first of these that exists: the
output that `inputs` in the services file names, a predecessor's output of the same name, the request's input of the
same name. The answer contains the outputs of the last stages, named STAGE.OUTPUT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cotenant.core.serving import Application
from cotenant.policy.serving.packing.applications import Stage
from cotenant.serving.dispatch.admission import Admission
from cotenant.serving.dispatch.calls import Kind, Outcome, Refusal, Reply, Withdraw
from cotenant.serving.protocol.oip import InferAnswer, InferRequest
from cotenant.serving.protocol.tensors import ModelInfo, Tensor, TensorSpec

# stage of the application -> name of its input -> the input's source: "INPUT" (the request) or "STAGE.OUTPUT"
Wiring = Mapping[str, Mapping[str, str]]


@dataclass
class _Graph:
    """An application: its stages by their names within the application, and for each stage the predecessors and
    successors.
    """

    app: Application
    stages: dict[str, Stage]
    parents: dict[str, list[str]]
    leaves: list[str]
    wiring: Wiring


@dataclass
class _Run:
    """A request to an application, while it passes through the graph of stages."""

    graph: _Graph
    request: InferRequest
    reply: Reply
    arrived_ms: float
    left: int
    waits: dict[str, int]
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    withdraws: dict[str, Withdraw] = field(default_factory=dict)  # stage -> function that cancels its items
    done: bool = False

    def withdraw(self) -> None:
        """Called when the client of a run has disconnected. Withdraws all stages that have been started; the first
        refusal by one of them ends the run.
        """
        for withdraw in list(self.withdraws.values()):
            withdraw()


class Applications:
    """All applications of a server."""

    def __init__(
        self,
        admission: Admission,
        applications: Sequence[tuple[Application, Sequence[Stage]]],
        wiring: Mapping[str, Wiring] | None = None,
    ) -> None:
        self.admission = admission
        self._graphs: dict[str, _Graph] = {}
        self._whose: dict[str, str] = {}
        for app, stages in applications:
            self._whose |= {stage.service.name: app.name for stage in stages}
            short = {stage.service.name.split(":", 1)[1]: stage for stage in stages}
            parents = {name: app.parents(name) for name in short}
            leaves = [name for name in short if not app.graph.get(name)]
            self._graphs[app.name] = _Graph(app, short, parents, leaves, (wiring or {}).get(app.name, {}))

    def first_stage(self, name: str) -> str:
        """The service of the first stage of an application."""
        graph = self._graphs[name]
        return graph.stages[graph.app.order()[0]].service.name

    def application_of(self, service: str) -> str | None:
        """The application of which a service is a stage; None if the service is no stage."""
        return self._whose.get(service)

    @property
    def names(self) -> Mapping[str, object]:
        """All applications of the server by name."""
        return self._graphs

    def begin(self, request: InferRequest, reply: Reply) -> Withdraw:
        """Run a request. `reply` gets the answer with the outputs of all last stages, or the first refusal by a
        stage."""
        graph = self._graphs[request.model]
        if request.version not in ("", "1"):
            raise Refusal(Kind.UNKNOWN, f"application {request.model!r} has no versions")
        infos = {name: self.admission.ready(stage.service.name).info for name, stage in graph.stages.items()}
        known = [spec.name for spec in _outputs(graph, infos)]
        unknown = next((x for x in request.outputs or () if x not in known), None)
        if unknown is not None:
            raise Refusal(Kind.WRONG, f"there is no output {unknown[:200]!r}; the outputs are {', '.join(known)}")
        needed = {spec.name for spec in _inputs(graph, infos)}
        given = {tensor.name for tensor in request.inputs}
        if given != needed:
            raise Refusal(Kind.WRONG, f"the inputs must be {', '.join(sorted(needed))}, not {', '.join(sorted(given))}")
        waits = {name: len(parents) for name, parents in graph.parents.items()}
        run = _Run(graph, request, reply, self.admission.pool.now_ms(), len(graph.stages), waits)
        self.admission.stats.services[request.model].received += 1
        for name, count in waits.items():
            if count == 0:
                self._stage(run, name)
        return run.withdraw

    def _stage(self, run: _Run, name: str) -> None:
        if run.done:
            return
        stage = run.graph.stages[name]
        elapsed = self.admission.pool.now_ms() - run.arrived_ms
        try:
            loaded = self.admission.ready(stage.service.name)
            inputs = []
            for spec in loaded.info.inputs:
                found = _source(run.graph, name, spec.name, run.outputs, run.request)
                inputs.append(Tensor(spec.name, found.datatype, found.shape, found.data))
            own = InferRequest(stage.service.name, inputs)
            due = stage.deadline_ms - elapsed
            if run.request.timeout_ms is not None:
                due = min(due, run.request.timeout_ms - elapsed)
            run.withdraws[name] = self.admission.submit(own, lambda answer: self._answered(run, name, answer), due)
        except Refusal as refusal:
            self._end(run, Refusal(refusal.kind, f"stage {name}: {refusal.message}", refusal.retry_s))

    def _answered(self, run: _Run, name: str, answer: InferAnswer | Refusal) -> None:
        if run.done:
            return
        if isinstance(answer, Refusal):
            self._end(run, Refusal(answer.kind, f"stage {name}: {answer.message}", answer.retry_s))
            return
        run.outputs[name] = {tensor.name: tensor for tensor in answer.outputs}
        run.left -= 1
        if run.left == 0:
            self._end(run, None)
            return
        for child in run.graph.app.graph.get(name, ()):
            run.waits[child] -= 1
            if run.waits[child] == 0:
                self._stage(run, child)

    def _end(self, run: _Run, refusal: Refusal | None) -> None:
        if run.done:
            return
        run.done = True
        app = run.graph.app
        took = self.admission.pool.now_ms() - run.arrived_ms
        outcome = _outcome(refusal, took, run.request.timeout_ms or app.slo_ms)
        self.admission.stats.unit(app.name, run.arrived_ms, 0.0, 0, "", took, outcome, took)
        requests = self.admission.stats.services[app.name].requests
        if refusal is not None:
            requests.times["fail"].add(took)
            run.reply(refusal)
            return
        requests.batch(1, (0.0, took, 0.0))
        requests.answered(took, 0.0, (0.0, took, 0.0))
        wanted = run.request.outputs
        outputs = [
            Tensor(f"{leaf}.{t.name}", t.datatype, t.shape, t.data)
            for leaf in run.graph.leaves for t in run.outputs[leaf].values()
            if wanted is None or f"{leaf}.{t.name}" in wanted
        ]  # fmt: skip
        run.reply(InferAnswer(app.name, "1", outputs, 0.0, took, 1))

    def info(self, name: str) -> ModelInfo:
        """Inputs and outputs of an application, described like those of a model. Raises Refusal if a stage is not
        ready."""
        graph = self._graphs[name]
        infos = {short: self.admission.ready(stage.service.name).info for short, stage in graph.stages.items()}
        return ModelInfo(_inputs(graph, infos), _outputs(graph, infos), True, "cotenant_application")


def _outcome(refusal: Refusal | None, took_ms: float, slo_ms: float) -> Outcome:
    if refusal is None:
        return Outcome.OK if took_ms <= slo_ms + 1e-9 else Outcome.LATE
    known = {Kind.LATE: Outcome.DROPPED, Kind.FULL: Outcome.FULL, Kind.UNAVAILABLE: Outcome.DROPPED,
             Kind.CANCELLED: Outcome.CANCELLED}  # fmt: skip
    return known.get(refusal.kind, Outcome.FAILED)


def _inputs(graph: _Graph, infos: Mapping[str, ModelInfo]) -> tuple[TensorSpec, ...]:
    """Inputs that the request must supply."""
    needed: dict[str, TensorSpec] = {}
    for stage, info in infos.items():
        for spec in info.inputs:
            source = graph.wiring.get(stage, {}).get(spec.name, "")
            outputs = {output.name for parent in graph.parents[stage] for output in infos[parent].outputs}
            if "." in source or (not source and spec.name in outputs):
                continue
            name = source or spec.name
            needed.setdefault(name, TensorSpec(name, spec.datatype, spec.shape))
    return tuple(needed.values())


def _outputs(graph: _Graph, infos: Mapping[str, ModelInfo]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{leaf}.{spec.name}", spec.datatype, spec.shape)
        for leaf in graph.leaves for spec in infos[leaf].outputs
    )  # fmt: skip


def _source(
    graph: _Graph, stage: str, name: str, outputs: Mapping[str, Mapping[str, Tensor]], request: InferRequest
) -> Tensor:
    source = graph.wiring.get(stage, {}).get(name, "")
    if "." in source:
        parent, _, output = source.rpartition(".")
        found = outputs.get(parent, {}).get(output)
    elif source:
        found = next((t for t in request.inputs if t.name == source), None)
    else:
        found = next((outputs[p][name] for p in graph.parents[stage] if name in outputs.get(p, {})), None)
        if found is None:
            found = next((t for t in request.inputs if t.name == name), None)
    if found is None:
        raise Refusal(Kind.WRONG, f"no tensor matches input {name!r} of stage {stage}")
    return found
