"""Models by split."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.workloads.jobs.split import assign_models, parse_split

CLASSES = {
    "image": ("alexnet", "res18", "res50", "mobilenet", "shufflenet"),
    "language": ("gnmt", "transformer", "lstm"),
    "speech": ("m5", "deepspeech"),
}
FAMILY = {model: name for name, models in CLASSES.items() for model in models}


def test_first_jobs_by_hand() -> None:
    # For 20,70,10 the largest share comes first (language). Then image lacks 20 %, then language 70-50, then speech 10,
    # and so on.
    models = assign_models(8, "20,70,10", CLASSES).tolist()
    assert models == ["gnmt", "alexnet", "transformer", "m5", "lstm", "gnmt", "res18", "transformer"]


def test_a_class_without_a_share_gets_no_job() -> None:
    assert set(assign_models(50, "0,100,0", CLASSES).tolist()) == set(CLASSES["language"])
    assert {FAMILY[model] for model in assign_models(50, "50,0,50", CLASSES)} == {"image", "speech"}


def test_equal_shares_take_turns_from_the_first_class() -> None:
    models = assign_models(7, "33,33,33", CLASSES).tolist()
    assert models == ["alexnet", "gnmt", "m5", "res18", "transformer", "deepspeech", "res50"]


@pytest.mark.parametrize("name", ["single_1000_8jph", "multi_1000_4jph", "static_1000_single", "tiny_60_8jph"])
def test_the_public_simulators_sequence(shared: Path, name: str) -> None:
    with (shared / f"reference/synergy/{name}.csv").open(newline="") as file:
        expected = [row[1].strip() for row in csv.reader(file)]
    assert assign_models(len(expected), "20,70,10", CLASSES).tolist() == expected


def slow_overall(n: int, shares: list[int]) -> list[int]:
    """The rule as written: the class with the largest target less share so far, in exact arithmetic."""
    from fractions import Fraction

    counts, picks = [0] * len(shares), []
    for k in range(n):
        parts = [Fraction(c, k) if k else Fraction(0) for c in counts]
        # a class with share 0 gets no job, not even when all lack equally much
        lacks = [Fraction(s, sum(shares)) - part if s else -1 for s, part in zip(shares, parts, strict=True)]
        pick = lacks.index(max(lacks))
        picks.append(pick)
        counts[pick] += 1
    return picks


@settings(max_examples=60, deadline=None)
@given(shares=st.tuples(*[st.integers(0, 60)] * 3).filter(any), n=st.integers(0, 400))
def test_overall_is_the_rule_as_written_however_long(shares: tuple[int, int, int], n: int) -> None:
    models = assign_models(n, ",".join(map(str, shares)), CLASSES)
    names = list(CLASSES)
    assert [names.index(FAMILY[model]) for model in models] == slow_overall(n, list(shares))
    for family, members in CLASSES.items():  # the models of a class are used in turn
        of_family = [model for model in models if FAMILY[model] == family]
        assert of_family == [members[k % len(members)] for k in range(len(of_family))]


def test_random_mode_follows_shares_and_seed() -> None:
    drawn = assign_models(20_000, "50,0,50", CLASSES, mode="random", seed=3)
    assert drawn.tolist() == assign_models(20_000, "50,0,50", CLASSES, mode="random", seed=3).tolist()
    assert drawn.tolist() != assign_models(20_000, "50,0,50", CLASSES, mode="random", seed=4).tolist()
    families = Counter(FAMILY[model] for model in drawn)
    assert set(families) == {"image", "speech"}
    assert abs(families["image"] / 20_000 - 0.5) < 4 * 0.5 / 20_000**0.5  # four standard deviations


@pytest.mark.parametrize("text", ["", "20,70", "20,70,x", "-1,50,51", "0,0,0", "20,70,10,5", "nan,1,1", "inf,1,1"])
def test_bad_splits(text: str) -> None:
    with pytest.raises(InputError, match="is not a split"):
        parse_split(text)


def test_split_needs_models_of_every_class_it_names() -> None:
    with pytest.raises(InputError, match="no speech models"):
        assign_models(3, "20,70,10", {"image": ("a",), "language": ("b",)})
    assert assign_models(3, "20,80,0", {"image": ("a",), "language": ("b",)}).tolist() == ["b", "a", "b"]
    with pytest.raises(InputError, match="unknown split mode"):
        assign_models(3, "20,70,10", CLASSES, mode="fair")
