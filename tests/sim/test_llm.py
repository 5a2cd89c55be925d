"""Language models in virtual time: by hand, against a plain simulator, and what holds for any trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_oracle import one_model, shared_gpu

from cotenant.core.metrics.tokens import Target, TokenTimes
from cotenant.policy.residency import Do, ModelFacts, MoveRates
from cotenant.profiles.llm.profile import LlmProfile, StepTimes
from cotenant.sim.llm.engine import LlmResult, LlmSetup, SimModel, longest, simulate
from cotenant.sim.llm.gpu import SharedGpu
from cotenant.workloads.llm.trace import TokenTrace, make_trace

GIB = 1 << 30
ROUND = StepTimes(0.010, 0.001, 0.0, 0.020, 0.0, 0.0)  # a prompt takes 10 ms and 1 ms a token, a decode step 20 ms


def model(name: str = "a", times: StepTimes = ROUND, gib: int = 10, weight: float = 1.0, **facts: object) -> SimModel:
    profile = LlmProfile(name, times, kv_tokens=10_000, step_tokens=1000, max_context=5000)
    target = Target(name, ttft_ms=100, tpot_ms=25)
    return SimModel(ModelFacts(name, gib * GIB, **facts), profile, target, weight)  # type: ignore[arg-type]


def trace(names: tuple[str, ...], rows: list[tuple[float, int, int, int]]) -> TokenTrace:
    times, which, prompt, output = zip(*rows, strict=True)
    return make_trace("test", times, which, prompt, output, names, zero_s=0.0)


def run(models: list[SimModel], rows: list[tuple[float, int, int, int]], gib: int = 80, **more: object) -> LlmResult:
    names = tuple(m.facts.name for m in models)
    return simulate(trace(names, rows), LlmSetup(tuple(models), (gib * GIB,), **more))  # type: ignore[arg-type]


def test_one_model_by_hand() -> None:
    found = run([model()], [(0.0, 0, 20, 3), (0.05, 0, 10, 2)])
    # The first prompt takes 10 + 20 = 30 ms, and its decode step lasts until 50 ms. Then comes a step with a decode and
    # the second prompt: 20 + 10 ms, and after it the second request's decode.
    assert found.times.first_s == pytest.approx([0.030, 0.080])
    assert found.times.last_s == pytest.approx([0.080, 0.100])
    assert found.busy_s == pytest.approx((0.100,))
    row = found.summary()["models"]["a"]
    assert row["ttft_ms"]["p50"] == pytest.approx(30)
    assert row["tpot_ms"]["mean"] == pytest.approx((25 + 20) / 2)
    assert row["attainment"] == 1.0
    assert row["output_tokens_per_s"] == pytest.approx(5 / 0.100)


def test_two_models_share_what_each_leaves() -> None:
    both = [(0.0, 0, 20, 1), (0.0, 1, 20, 1), (1.0, 0, 20, 1)]
    pair = [model("a"), model("b")]
    assert run(pair, both).times.first_s == pytest.approx([0.060, 0.060, 1.030])
    fixed = [model("a", weight=0.5), model("b", weight=0.5)]
    assert run(fixed, both, sharing="fixed").times.first_s == pytest.approx([0.060, 0.060, 1.060])
    weighted = [model("a", weight=2), model("b", weight=1)]
    assert run(weighted, both).times.first_s == pytest.approx([0.045, 0.060, 1.030])


def test_best_effort_work_waits_for_latency_sensitive_work() -> None:
    found = run([model("a"), model("b", best_effort=True)], [(0.0, 1, 90, 1), (0.02, 0, 20, 1)])
    assert found.times.first_s == pytest.approx([0.130, 0.050])


def test_a_model_that_is_not_there_comes_back_at_link_speed() -> None:
    pair = [model("a", gib=50), model("b", gib=50)]
    found = run(pair, [(10.0, 0, 20, 1), (20.0, 1, 20, 1), (30.0, 0, 20, 1)])
    rates = MoveRates()
    out, back = rates.seconds(50 * GIB, 0), rates.seconds(0, 50 * GIB)
    assert found.times.first_s[0] == pytest.approx(10.030)
    assert found.times.first_s[1] == pytest.approx(20 + out + 30.0 + 0.030)  # a cold start takes 30 s
    assert [(s.model, s.do) for s in found.switches] == [
        (0, None), (0, Do.EVICT), (1, Do.START), (1, Do.EVICT), (0, Do.BRING)
    ]  # fmt: skip
    assert [row["evictions"] for row in found.summary()["models"].values()] == [1, 1]
    # b was requested as soon as it arrived, so it has no minimum stay. a returns when b has been idle as long as a
    # return takes. b leaves at the same time, which takes longer than one of both moves and less than both.
    both = rates.seconds(50 * GIB, 50 * GIB)
    assert max(out, back) < both < 0.75 * (out + back)
    assert found.times.first_s[2] == pytest.approx(found.times.last_s[1] + back + both + 0.030)
    leaving, returning = found.switches[-2:]
    assert (leaving.at_s, leaving.seconds) == (returning.at_s, returning.seconds)
    assert returning.seconds == pytest.approx(both)
    assert [row["returns"] for row in found.summary()["models"].values()] == [1, 0]
    assert found.summary()["switches"] == 4


def test_moves_of_the_same_size_take_the_same_time_throughout() -> None:
    """Two models of 50 GiB replace each other on a GPU of 80 GiB every 10 s, a hundred times."""
    pair = [model("a", gib=50), model("b", gib=50)]
    found = run(pair, [(60.0 + 10.0 * k, k % 2, 20, 1) for k in range(100)], warm=False)
    exchanges = {round(s.seconds, 6) for s in found.switches if s.do is Do.BRING}
    assert exchanges == {round(MoveRates().seconds(50 * GIB, 50 * GIB), 6)}


def test_requests_over_the_queue_are_refused() -> None:
    small = SimModel(model().facts, model().profile, model().target, max_concurrency=1, max_queue=1)
    found = run([small], [(0.0, 0, 20, 1), (0.001, 0, 20, 1), (0.002, 0, 20, 1)])
    assert found.refused.tolist() == [False, False, True]
    assert found.times.first_s[:2] == pytest.approx([0.030, 0.060])
    assert np.isnan(found.times.first_s[2])
    assert found.summary()["models"]["a"]["attainment"] == pytest.approx(2 / 3)


def test_cached_prompts_need_no_prefill_where_there_is_a_cache() -> None:
    names = ("a",)
    made = make_trace("x", [0.0], [0], [100], [1], names, [80], zero_s=0.0)
    setup = LlmSetup((model(),), (80 * GIB,))
    assert simulate(made, setup).times.first_s == pytest.approx([0.110])
    assert simulate(made, LlmSetup((model(),), (80 * GIB,), prefix_cache=True)).times.first_s == pytest.approx([0.030])


REQUESTS = st.lists(
    st.tuples(st.integers(0, 400).map(lambda x: x / 1000), st.integers(1, 60), st.integers(1, 12)),
    min_size=1, max_size=14,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(REQUESTS, st.integers(75, 200), st.integers(1, 90), st.integers(1, 6), st.sampled_from((0.0, 0.0031)))
def test_every_token_comes_when_a_plain_simulator_says(
    requests: list[tuple[float, int, int]], kv: int, step: int, sequences: int, outside_s: float
) -> None:
    times = StepTimes(0.007, 0.0011, 0.00001, 0.013, 0.0007, 0.00003)
    profile = LlmProfile("a", times, kv, step, sequences, 5000, request_s=outside_s)
    requests = sorted((at, p, o) for at, p, o in requests)
    plain = one_model(profile, [(at + outside_s, p, o) for at, p, o in requests])
    sim = SimModel(ModelFacts("a", GIB), profile, Target("a"))
    made = trace(("a",), [(at, 0, p, o) for at, p, o in requests])
    found = simulate(made.fitting(longest([sim])), LlmSetup((sim,), (80 * GIB,)))
    assert found.times.first_s == pytest.approx([r.tokens_s[0] for r in plain])
    assert found.times.last_s == pytest.approx([r.tokens_s[-1] for r in plain])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=6))
def test_shares_are_those_of_short_turns(raw: list[tuple[int, int, int]]) -> None:
    work = [(at / 10, seconds / 10, float(weight)) for at, seconds, weight in raw]
    gpu, ends, due = SharedGpu(), [0.0] * len(work), sorted(range(len(work)), key=lambda i: work[i][0])
    while due or gpu.running:
        at, key = gpu.next_end()
        if due and work[due[0]][0] < at:
            i = due.pop(0)
            gpu.begin(i, work[i][1], work[i][2], False, work[i][0])
        else:
            gpu.end(key, at)
            ends[key] = at
    plain = shared_gpu(work, 1e-3)
    assert ends == pytest.approx(plain, abs=0.002 * sum(w for _, _, w in work) * 6 + 0.01)
    assert gpu.busy_s == pytest.approx(sum(w[1] for w in work))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3), st.integers(1, 60), st.integers(1, 8)), min_size=1,
             max_size=25),
    st.integers(20, 70), st.sampled_from(["conserving", "fixed"]), st.booleans(),
)  # fmt: skip
def test_every_request_is_answered_after_its_own_work(
    raw: list[tuple[int, int, int, int]], gib: int, sharing: str, warm: bool
) -> None:
    models = [model(n, gib=20, weight=0.5, start_s=5.0, best_effort=n == "d") for n in "abcd"]
    rows = sorted((float(at), m, p, o) for at, m, p, o in raw)
    found = run(models, rows, gib, sharing=sharing, warm=warm)
    assert np.isfinite(found.times.last_s).all()
    alone = 0.010 + 0.001 * found.times.prompt
    assert (found.times.first_s - found.times.due_s >= alone - 1e-9).all()
    assert (found.times.last_s - found.times.first_s >= 0.020 * (found.times.output - 1) - 1e-9).all()
    assert found.busy_s[0] <= found.end_s + 1e-9
    again = run(models, rows, gib, sharing=sharing, warm=warm)
    assert again.summary() == found.summary()


def test_attainment_counts_both_promises_and_what_never_came() -> None:
    times = TokenTimes(
        np.zeros(4, int), np.zeros(4), np.array([0.05, 0.2, 0.05, np.nan]), np.array([0.07, 0.21, 0.5, np.nan]),
        np.full(4, 9), np.array([2, 2, 2, 2]),
    )  # fmt: skip
    row = times.rows([Target("a", 100, 25)], 10.0)["a"]
    assert (row["attainment"], row["goodput_rps"], row["answered"]) == (0.25, 0.1, 3)
    assert times.rows([Target("a")], 10.0)["a"]["attainment"] == 0.75
