"""Profiles of language models: the formula, the fit and its residuals, files, estimates, and a measurement."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from timed_llm import running

from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.partial import Partial
from cotenant.loadgen import llm_profiling
from cotenant.loadgen.llm_profiling import Cell, Profiling, Samples, _delayed, limits, measure
from cotenant.loadgen.target import parse_target
from cotenant.policy.llm_batching import Batcher
from cotenant.profiles.llm import files
from cotenant.profiles.llm.files import add_row, find_profile, read_profiles
from cotenant.profiles.llm.fit import Point, fit
from cotenant.profiles.llm.profile import LlmProfile, Step, StepTimes, pairs_of, parse_size, roofline
from cotenant.timed_llm.engine import Clock

TRUE = StepTimes(0.004, 20e-6, 1e-9, 0.006, 50e-6, 40e-9)


def prefill_s(times: StepTimes, prompt: int) -> float:
    """One prompt in a step."""
    return times.seconds(Step(tokens=prompt, pairs=pairs_of(prompt)))


def decode_s(times: StepTimes, batch: int, context: int) -> float:
    """A token each for so many requests with so much context."""
    return times.seconds(Step(sequences=batch, context=batch * context))


def points(noise: float, seed: int = 1) -> list[Point]:
    rng = random.Random(seed)
    steps = [Step(tokens=n, pairs=pairs_of(n)) for n in (16, 64, 256, 1024, 4096, 8192)]
    steps += [Step(sequences=b, context=b * c) for b in (1, 4, 16, 32) for c in (64, 1024, 4096)]
    return [Point(s, tuple(TRUE.seconds(s) * rng.lognormvariate(0, noise) for _ in range(7))) for s in steps]


def test_a_step_is_the_sum_of_its_parts_and_reads_the_weights_once() -> None:
    assert pairs_of(3) == 6  # the first token attends to itself, the second to two tokens, the third to three
    assert pairs_of(2, before=10) == 23
    times = StepTimes(0.010, 0.001, 0.0001, 0.020, 0.002, 0.0001)
    assert times.seconds(Step(tokens=3, pairs=6)) == pytest.approx(0.010 + 0.003 + 0.0006)
    assert decode_s(times, 2, 30) == pytest.approx(0.020 + 0.004 + 0.006)
    assert times.seconds(Step(3, 6, 2, 60)) == pytest.approx(0.020 + 0.0036 + 0.010)
    assert prefill_s(times.scaled(2), 3) == pytest.approx(0.0272)
    launched = replace(times, prefill_least=0.015)
    assert (prefill_s(launched, 3), decode_s(launched, 1, 0)) == (0.015, pytest.approx(0.022))
    assert launched.seconds(Step(3, 6, 2, 60)) == pytest.approx(0.0336)
    assert prefill_s(launched.on(0.5, 0.5), 3) == pytest.approx(0.0272)
    assert launched.on(2.0, 2.0).prefill_least == 0.015


def test_a_fit_finds_what_made_the_points() -> None:
    exact = fit(points(0.0))
    assert list(vars(exact.times).values()) == pytest.approx(list(vars(TRUE).values()), rel=1e-6)
    assert exact.worst < 1e-9
    noisy = fit(points(0.05))
    assert prefill_s(noisy.times, 2048) == pytest.approx(prefill_s(TRUE, 2048), rel=0.05)
    assert decode_s(noisy.times, 8, 2048) == pytest.approx(decode_s(TRUE, 8, 2048), rel=0.05)
    rows = noisy.measured()["points"]
    held = [r["ms_ci95"][0] <= TRUE.seconds(p.step) * 1e3 <= r["ms_ci95"][1] for r, p in zip(rows, noisy.points)]  # noqa: B905
    assert sum(held) >= len(held) - 3
    assert all(r["ms_ci95"][0] <= r["ms"] <= r["ms_ci95"][1] for r in rows)


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_short_prompts_of_one_length_in_time_have_a_least_time(noise: float) -> None:
    """As in a vLLM without graphs of prefill steps, whose host launches the kernels of short prompts for longer than
    they run."""
    true, rng = replace(TRUE, prefill_least=0.017), random.Random(2)
    lengths = (16, 64, 256, 512, 1024, 2048)
    besides = [Step(n, pairs_of(n), 1, 40) for n in lengths]
    singles = [Step(n, pairs_of(n)) for n in lengths]
    decodes = [p for p in points(noise) if not p.step.tokens]
    prefills = [
        Point(step, tuple(true.seconds(step) * rng.lognormvariate(0, noise) + outside_s for _ in range(15)))
        for steps, outside_s in ((besides, 0.0), (singles, 0.01))
        for step in steps
    ]
    found = fit([*decodes, *prefills])
    assert found.times.prefill_least == pytest.approx(0.017, rel=0.03)
    for step in besides:
        assert found.times.seconds(step) == pytest.approx(true.seconds(step), rel=0.05)
    assert found.request_s == pytest.approx(0.01, abs=0.002)
    assert fit(points(noise)).times.prefill_least == 0.0  # of an engine without it


def test_no_coefficient_is_below_zero_and_what_does_not_fit_is_seen() -> None:
    falling = [Point(Step(tokens=n, pairs=pairs_of(n)), (t,)) for n, t in ((10, 0.03), (100, 0.02), (1000, 0.01))]
    steady = [Point(Step(sequences=b, context=b), (0.01,)) for b in (1, 2, 4)]
    found = fit([*falling, *steady])
    assert min(vars(found.times).values()) == 0
    assert found.worst > 0.3
    assert decode_s(found.times, 4, 1) == pytest.approx(0.01)
    with pytest.raises(InputError, match="needs 3 points of prefill and 3 of decode"):
        fit([*falling, *steady[:2]])


def test_files_keep_their_other_rows_and_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "llm.json"
    one = LlmProfile("a", replace(TRUE, prefill_least=0.01), 1000, 512, 16, 900, 3 << 30, "H100", 0.002, True)
    add_row(path, one, {"rounds": 5})
    add_row(path, LlmProfile("b", TRUE))
    found = read_profiles(path)
    assert list(found) == ["a", "b"]
    assert list(vars(found["a"].times).values()) == pytest.approx(list(vars(one.times).values()))
    assert (found["a"].request_s, found["a"].schedules_ahead, found["b"].schedules_ahead) == (0.002, True, False)
    assert (found["a"].kv_tokens, found["a"].max_sequences, found["a"].weights_bytes) == (1000, 16, 3 << 30)
    assert json.loads(path.read_text())["models"]["a"]["measured"] == {"rounds": 5}
    assert find_profile(str(path), "b") == found["b"]
    with pytest.raises(InputError, match="has no model 'c'; it has a, b"):
        find_profile(str(path), "c")
    path.write_text('{"format": "cotenant-llm-profile-1", "models": {"a": {"prefill_ms": {"base": -1}}}}')
    with pytest.raises(InputError, match=r"llm\.json, field models\.a"):
        read_profiles(path)


def test_a_profile_that_comes_with_the_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHIPPED", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serving-h200.json").write_text("{}")
    assert files.shipped_profiles() == []
    add_row(tmp_path / "llm-qwen3-4b-h200.json", LlmProfile("qwen3-4b", TRUE), {"worst_residual": 0.1})
    assert files.shipped_profiles() == ["qwen3-4b-h200"]
    assert find_profile("qwen3-4b-h200", "chat").name == "qwen3-4b"
    assert list(read_profiles("qwen3-4b-h200")) == ["qwen3-4b"]
    assert files.residual_of("qwen3-4b-h200", "chat") == 0.1
    with pytest.raises(InputError, match=r"qwen3-8b-h200.* shipped profiles: qwen3-4b-h200"):
        find_profile("qwen3-8b-h200", "chat")
    add_row(tmp_path / "qwen3-4b-h200", LlmProfile("own", TRUE))
    assert find_profile("qwen3-4b-h200", "chat").name == "own", "a file of that name comes first"


def test_a_size_is_an_estimate_from_a_card_s_peaks() -> None:
    assert (parse_size("8b"), parse_size("0.5B"), parse_size("x.json"), parse_size("b")) == (8e9, 5e8, None, None)
    found = roofline("m", 8e9)
    assert found.times.decode_base == pytest.approx(16e9 / (0.8 * 3.35e12))
    assert found.times.per_token == pytest.approx(16e9 / (0.6 * 989e12))
    assert found.weights_bytes == 16_000_000_000
    assert roofline("m", 8e9, 40 << 30).kv_tokens < found.kv_tokens
    with pytest.raises(InputError, match=r"needs more than 80\.0 GiB"):
        roofline("m", 70e9)
    with pytest.raises(InputError, match=r"needs more than 256\.0 MiB"):
        roofline("m", 8e9, 256 << 20)


def test_step_times_are_estimated_for_another_gpu() -> None:
    """From an H100 (3,350 GB/s, 989 TFLOP/s) to an A100-40GB (1,555 GB/s, 312 TFLOP/s)."""
    own = LlmProfile("m", TRUE, gpu="NVIDIA H100 80GB HBM3", request_s=0.003)
    found = own.on(find_gpu("A100-40GB"))
    memory, arithmetic = 3350 / 1555, 989 / 312
    assert list(vars(found.times).values()) == pytest.approx([
        TRUE.prefill_base * memory, TRUE.per_token * arithmetic, TRUE.per_pair * arithmetic,
        TRUE.decode_base * memory, TRUE.per_sequence, TRUE.per_context * memory, 0.0,
    ])  # fmt: skip
    assert (found.request_s, found.kv_tokens) == (own.request_s, own.kv_tokens)
    assert found.gpu == "A100-40GB, estimated from times on NVIDIA H100 80GB HBM3"
    assert found.on(find_gpu("A100")) == found
    assert own.on(find_gpu("H100")) == own
    size = roofline("m", 8e9, 40 << 30)
    there = size.on(find_gpu("A100"))
    assert there.times.decode_base == pytest.approx(16e9 / (0.8 * 1.555e12))
    assert there.times.per_token == pytest.approx(16e9 / (0.6 * 312e12))
    assert there.gpu == "A100-40GB, estimated"
    for name in ("", "my GPU"):
        unknown = LlmProfile("m", TRUE, gpu=name)
        assert unknown.on(find_gpu("A100")) == unknown


def test_cells_are_within_the_engine_s_limits() -> None:
    cells = Profiling(parse_target("h:1"), "m", most_tokens=600, kv_tokens=1000).cells()
    assert [c.prompt for c in cells if not c.decode and not c.beside] == [16, 64, 256, 512]
    assert [c.prompt for c in cells if c.beside] == [16, 64, 256, 512]
    assert {(c.prompt, c.batch) for c in cells if c.decode} == {(64, 1), (64, 2), (64, 4), (64, 8)}
    assert Cell(64, 8, True) in cells


@pytest.mark.parametrize(("spread", "each_s"), [(0.0, 0.1), (0.2, 0.1), (0.2, 1.0)])
def test_points_are_measured_until_they_are_known_within_a_bound_on_time(
    monkeypatch: pytest.MonkeyPatch, spread: float, each_s: float
) -> None:
    """An engine whose prefills vary and take `each_s` to measure, and whose decodes do not vary."""
    now_s, rng = [0.0], random.Random(3)
    asked: list[Cell] = []

    def once(run: Any, cell: Cell) -> list[tuple[Step, float]]:
        now_s[0] += each_s
        asked.append(cell)
        run.number += 1
        if cell.decode:
            return [(Step(sequences=cell.batch, context=cell.batch * cell.prompt), 0.005)]
        if cell.beside:
            return [(Step(cell.prompt, pairs_of(cell.prompt), 1, 20), 0.03)]
        return [(Step(tokens=cell.prompt, pairs=pairs_of(cell.prompt)), 0.04 * rng.lognormvariate(0, spread))]

    monkeypatch.setattr(llm_profiling._Run, "once", once)
    monkeypatch.setattr(llm_profiling, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    work = Profiling(parse_target("h:1"), "m", 2560, 80_000, rounds=3)
    found = measure(work)
    assert not any(cell.beside for cell in asked[: len(work.cells()) - 6])  # they come last in the first round
    assert {len(p.seconds) for p in found.points if p.step.sequences} == {3}
    prefill = [p for p in found.points if not p.step.sequences]
    bound_s = min(len(work.cells()) * 3 * each_s, llm_profiling.AGAIN_S)
    again_s = (len(asked) - len(work.cells()) * 4) * each_s
    assert again_s <= bound_s + each_s + 1e-6
    if spread == 0.0:
        assert {len(p.seconds) for p in prefill} == {3}
    else:
        assert all(p.width <= llm_profiling.NARROW for p in prefill) or again_s >= bound_s - 1e-6
        assert sum(len(p.seconds) for p in prefill) > 3 * len(prefill)


@pytest.mark.parametrize("at", [1, 24, 25, 26, 60, 96])
def test_an_interrupted_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Each measurement yields another time, and one cell is measured in vain, so that it shows which ones count."""
    number = 0
    stop: int | None = at
    work = Profiling(parse_target("h:1"), "m", 2560, 80_000, rounds=3)

    def once(run: Any, cell: Cell) -> list[tuple[Step, float]]:
        nonlocal number
        number += 1
        if number == stop:
            raise KeyboardInterrupt
        run.number += 1
        seconds = 0.01 + number * 1e-6
        if cell.beside:
            assert {llm_profiling.SHORT, llm_profiling.LONE, Cell(cell.prompt, 1, False)} <= run._last_s.keys()
            return [] if cell.prompt == 64 else [(Step(cell.prompt, pairs_of(cell.prompt), 1, 20), seconds)] * 2
        run._last_s[cell] = seconds
        if cell.decode:
            return [(Step(sequences=cell.batch, context=cell.batch * cell.prompt), seconds)]
        return [(Step(tokens=cell.prompt, pairs=pairs_of(cell.prompt)), seconds)]

    monkeypatch.setattr(llm_profiling._Run, "once", once)
    cells = work.cells()
    assert len(cells) == 24
    with pytest.raises(KeyboardInterrupt):
        measure(work, samples=Samples(work, Partial(tmp_path / "llm.json", "settings")))
    assert not (tmp_path / "llm.json").exists()
    partial = Partial(tmp_path / "llm.json", "settings")
    begun = Samples(work, partial)
    before = {cell: list(own) for cell, own in begun.made.items()}
    assert begun.kept == max(0, at - 1 - len(cells))
    stop, told = None, list[tuple[int, int]]()
    found = measure(work, lambda *x: told.append(x), begun)
    assert all(begun.made[cell][: len(own)] == own for cell, own in before.items())
    assert {len(own) for own in begun.made.values()} == {3}
    assert told[-1] == (begun.total, begun.total)
    # what is left is measured once to warm up, and nothing else
    left = [cell for cell in cells if len(before[cell]) < 3]
    assert number == at + len(left) + sum(3 - len(before[cell]) for cell in left)
    assert {(bool(p.step.tokens and p.step.sequences), len(p.seconds)) for p in found.points} == {(True, 6), (False, 3)}
    assert len(found.points) == len(cells) - 1
    assert Samples(work, Partial(tmp_path / "llm.json", "settings")).made == begun.made
    assert Samples(work, Partial(tmp_path / "llm.json", "others")).kept == 0


def test_what_a_request_spends_outside_of_steps_is_no_part_of_a_step() -> None:
    times = StepTimes(0.010, 20e-6, 1e-9, 0.006, 50e-6, 40e-9)
    lengths = (16, 64, 256, 1024, 4096)
    singles = [Point(Step(n, pairs_of(n)), (0.020 + prefill_s(times, n),)) for n in lengths]
    besides = [Point(step, (times.seconds(step),)) for n in lengths if (step := Step(n, pairs_of(n), 1, 40))]
    decodes = [p for p in points(0.0) if not p.step.tokens]
    found = fit([*singles, *decodes, *besides])
    assert found.times.prefill_base == pytest.approx(0.010)
    assert found.times.per_token == pytest.approx(20e-6)
    assert found.request_s == pytest.approx(0.020)
    assert found.worst < 1e-6
    without = fit([*singles, *decodes])
    assert (without.times.prefill_base, without.request_s) == (pytest.approx(0.030), 0.0)


@pytest.mark.parametrize("order", [-1e-4, 1e-4])
@pytest.mark.parametrize("steps", [(0.040,), (0.030, 0.025)])  # the prompt in one step, or in two chunks
def test_a_prompt_delays_the_tokens_of_a_request_that_decodes(steps: tuple[float, ...], order: float) -> None:
    gaps = [0.004] * 6 + list(steps) + [0.004] * 5
    stamps = np.cumsum(gaps)
    answered = stamps[5 + len(steps)]
    # sent in a decode step and answered a moment before or after the other request's token
    delay = _delayed(stamps, stamps[5] - 0.001, answered + order)
    assert delay == pytest.approx(sum(steps) - 0.004 * (len(steps) - 1))
    assert _delayed(stamps, stamps[0] - 0.001, answered) is None  # no token before
    assert _delayed(stamps[: 6 + len(steps) - 1], stamps[5] - 0.001, answered) is None  # none after


class VirtualRun(llm_profiling._Run):
    """Measures an engine in virtual time, whose requests spend no time outside of steps."""

    def __init__(self, work: Profiling, profile: LlmProfile, each: int = 1) -> None:
        super().__init__(work)
        self._each = each  # tokens of each event after the first
        self._profile = profile
        self.most_at_once = 0

    def _send(self, times_s: list[float], prompts: list[int], outputs: list[int]) -> Any:
        engine, now_s = Batcher(self._profile), 0.0
        stamps: dict[int, list[float]] = {n: [] for n in range(len(times_s))}
        due = list(range(len(times_s)))
        while due or len(engine):
            while due and times_s[due[0]] <= now_s:
                engine.add(due[0], prompts[due[0]], outputs[due[0]])
                due.pop(0)
            step = engine.begin()
            if step is None:
                now_s = times_s[due[0]]
                continue
            self.most_at_once = max(self.most_at_once, len(engine))
            now_s += self._profile.times.seconds(step)
            for token in engine.end():
                stamps[token.id].append(now_s)
        first_s, last_s = (np.array([row[at] for row in stamps.values()]) for at in (0, -1))
        times = SimpleNamespace(
            prompt=np.array(prompts), output=np.array(outputs), first_s=first_s, last_s=last_s
        )  # fmt: skip
        stamps = {n: [*row[:1], *row[1:][self._each - 1 :: self._each]] for n, row in stamps.items()}
        sent = SimpleNamespace(times=times, sent_s=np.array(times_s))
        return sent, SimpleNamespace(stamps={n: array("d", row) for n, row in stamps.items()})


@pytest.mark.parametrize(("kv_tokens", "count"), [(80_000, 4), (400, 4), (318, 1), (300, 0)])
def test_prompts_beside_a_decoding_request_measure_their_steps(kv_tokens: int, count: int) -> None:
    """As many prompts as the engine has space for, one after the other. Their steps are exact in virtual time, except
    that a decode step gets longer with its context.
    """
    times = StepTimes(0.030, 6e-6, 1e-9, 0.004, 50e-6, 40e-9)
    profile = LlmProfile("m", times, kv_tokens, max_context=2560)
    run = VirtualRun(Profiling(parse_target("h:1"), "m", 2560, kv_tokens), profile)
    for cell in (llm_profiling.SHORT, llm_profiling.LONE, Cell(256, 1, False)):
        assert len(run.once(cell)) == 1
    found = run.once(Cell(256, 1, False, beside=True))
    assert len(found) == count
    assert run.most_at_once <= 2
    contexts = [step.context for step, _ in found]
    assert contexts == sorted(set(contexts))
    for step, seconds in found:
        assert seconds == pytest.approx(times.seconds(step), rel=1e-3)


def test_events_of_several_tokens_measure_decode_per_token_and_no_prompts_beside_it() -> None:
    times = StepTimes(0.030, 6e-6, 1e-9, 0.004, 50e-6, 0.0)
    run = VirtualRun(Profiling(parse_target("h:1"), "m", 2560), LlmProfile("m", times, max_context=2560), each=4)
    ((step, seconds),) = run.once(Cell(64, 2, True))
    assert run.tokens_each == pytest.approx(31 / 7)
    assert seconds == pytest.approx(times.seconds(step), rel=0.15)
    for cell in (llm_profiling.SHORT, llm_profiling.LONE, Cell(256, 1, False)):
        run.once(cell)
    assert run.once(Cell(256, 1, False, beside=True)) == []


def test_a_bad_fit_is_said_in_a_sentence() -> None:
    good = points(0.0)
    assert fit(good).warning() is None
    strange = Point(Step(tokens=256, pairs=pairs_of(256)), (0.030, 0.030, 0.030))
    bad = fit([p for p in good if p.step.tokens != 256] + [strange])
    text = bad.warning()
    assert text is not None
    residual = max(bad.residuals, key=abs)
    took, predicted = "a prefill of 256 tokens took 30.0 ms (95 % interval 0% wide)", 30 * (1 + residual)
    assert text.startswith(f"the fit is bad: {took} and is predicted as {predicted:.1f} ms, ")


@pytest.mark.slow
def test_a_running_engine_is_measured_through_its_api() -> None:
    """Bounds are as wide as a busy machine needs."""
    times = StepTimes(0.005, 20e-6, 0.0, 0.005, 0.5e-3, 0.0)
    with running(LlmProfile("m", times, max_context=600), Clock()) as port:
        target = parse_target(f"http://127.0.0.1:{port}/v1")
        assert limits(target, "m") == 600
        found = measure(Profiling(target, "m", 600, 400, rounds=2))
    assert decode_s(found.times, 2, 100) == pytest.approx(decode_s(times, 2, 100), rel=0.8)
    assert prefill_s(found.times, 512) >= 0.9 * prefill_s(times, 512)
    # beside each of the three shorter prompts there is space for a request that decodes
    assert len(found.points) == 7 + 3
    assert 0 <= found.request_s < 0.1
