"""Steps of the iteration-level batcher, worked out by hand, and what holds for any requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.policy.llm_batching import Batcher, Token
from cotenant.profiles.llm.profile import LlmProfile, Step, StepTimes

TIMES = StepTimes(0.01, 1e-4, 0, 0.01, 1e-3, 0)


def batcher(
    kv: int = 1000, step: int = 100, sequences: int = 8, context: int = 1000, ahead: bool = False
) -> Batcher:
    return Batcher(LlmProfile("m", TIMES, kv, step, sequences, context, schedules_ahead=ahead))


def test_a_prompt_gives_the_first_token_and_each_step_one_more() -> None:
    b = batcher()
    b.add(1, 10, 3)
    assert b.begin() == Step(tokens=10, pairs=55)
    assert b.end() == [Token(1, False)]
    assert b.begin() == Step(sequences=1, context=11)
    assert b.end() == [Token(1, False)]
    assert b.begin() == Step(sequences=1, context=12)
    assert b.end() == [Token(1, True)]
    assert b.begin() is None
    assert (len(b), b.held) == (0, 0)


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    b = batcher(step=100)
    b.add(1, 4, 9)
    b.begin()
    b.end()
    b.add(2, 150, 1)
    assert b.begin() == Step(tokens=99, pairs=99 * 100 // 2, sequences=1, context=5)
    assert b.end() == [Token(1, False)]
    assert b.begin() == Step(tokens=51, pairs=51 * 99 + 51 * 52 // 2, sequences=1, context=6)
    assert b.end() == [Token(1, False), Token(2, True)]


def test_what_does_not_fit_the_cache_waits_in_order() -> None:
    b = batcher(kv=100, step=1000)
    b.add(1, 60, 5)
    b.add(2, 50, 5)
    b.add(3, 10, 5)  # it would fit, but it arrives later
    assert b.begin() == Step(tokens=60, pairs=60 * 61 // 2)
    assert [s.id for s in b.waiting] == [2, 3]


def test_the_last_admitted_gives_its_place_up_and_computes_all_again() -> None:
    b = batcher(kv=21, step=100)
    b.add(1, 10, 5)
    b.add(2, 9, 5)
    assert b.begin() == Step(tokens=19, pairs=55 + 45)
    assert b.end() == [Token(1, False), Token(2, False)]  # the two sequences have 11 and 10 tokens, together 21
    assert b.begin() == Step(sequences=2, context=21)
    b.end()  # they now have 12 and 11 tokens, and 23 are more than fit
    assert b.begin() == Step(sequences=1, context=12)
    assert b.preempted == 1
    assert b.end() == [Token(1, False)]
    b.begin()
    b.end()
    b.begin()
    assert b.end() == [Token(1, True)]
    # 9 tokens of the prompt and 2 that it had produced before it was preempted
    assert b.begin() == Step(tokens=11, pairs=66)
    assert b.end() == [Token(2, False)]


def test_a_client_that_left_during_a_step_gets_nothing_of_it() -> None:
    b = batcher()
    b.add(1, 10, 5)
    b.add(2, 10, 5)
    b.begin()
    b.cancel(1)
    assert b.end() == [Token(2, False)]
    assert b.held == 11
    b.cancel(2)
    assert (b.begin(), b.held) == (None, 0)


def test_a_request_that_arrives_during_a_step_waits_for_a_step_that_is_decided() -> None:
    b = batcher(ahead=True)
    b.add(1, 10, 9)
    assert b.begin() == Step(tokens=10, pairs=55)  # the engine was idle
    b.add(2, 5, 1)
    b.end()
    assert b.begin() == Step(sequences=1, context=11)
    b.add(3, 6, 1)
    b.add(4, 7, 1)
    b.cancel(3)
    b.end()
    assert b.begin() == Step(tokens=5, pairs=15, sequences=1, context=12)
    b.cancel(1)
    assert b.end() == [Token(2, True)]
    assert b.begin() == Step(tokens=7, pairs=28)  # it arrived one step earlier
    assert b.end() == [Token(4, True)]
    assert (b.begin(), len(b), b.held) == (None, 0, 0)


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (990, 11)])
def test_requests_that_can_never_run_are_refused(prompt: int, output: int) -> None:
    with pytest.raises(InputError):
        batcher().add(1, prompt, output)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=12),
       st.integers(52, 90), st.integers(1, 60), st.integers(1, 5), st.booleans())  # fmt: skip
def test_every_request_gets_its_tokens_within_all_limits(
    requests: list[tuple[int, int, int]], kv: int, step: int, sequences: int, ahead: bool
) -> None:
    b = batcher(kv, step, sequences, ahead=ahead)
    due = [(sum(r[2] for r in requests[: i + 1]), i, p, o) for i, (p, o, _) in enumerate(requests)]
    got = dict.fromkeys(range(len(requests)), 0)
    lasts = []
    for tick in range(100_000):
        for _, i, prompt, output in [d for d in due if d[0] == tick]:
            b.add(i, prompt, output)
        work = b.begin()
        if work is None:
            if tick > due[-1][0]:
                break
            continue
        assert b.held <= kv
        assert len(b.running) <= sequences
        assert work.tokens + work.sequences <= max(step, work.sequences)
        assert work.tokens or work.sequences
        for token in b.end():
            got[token.id] += 1
            lasts += [token.id] if token.last else []
    assert got == {i: output for i, (_, output, _) in enumerate(requests)}
    assert sorted(lasts) == sorted(got)
