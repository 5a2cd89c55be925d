"""Counts and memory as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.gpus import find_gpu
from cotenant.core.units import (
    counted,
    format_memory,
    parse_bytes,
    parse_fraction,
    parse_memory,
    parse_memory_or_zero,
    parse_rate_per_s,
    parse_seconds,
)
from cotenant.workloads.jobs.generate import MAX_LOAD, Workload, generate


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (2**40, "1 TiB"), (3 * 2**39, "1,536 GiB"), (786_432 * 2**20, "768 GiB"), (500 * 10**9, "500 GB"),
        (62_500_000_000, "62.5 GB"), (10**12, "1 TB"), (1_500 * 10**9, "1.5 TB"), (10**18, "1000 PB"),
        (10**6, "0.001 GB"), (2**29, "0.5369 GB"),
    ],
)  # fmt: skip
def test_memory_keeps_the_units_it_was_given_in(n: int, text: str) -> None:
    assert format_memory(n) == text


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("8Gi", 8 << 30), ("500 MB", 500_000_000), ("1MiB", 1 << 20)]
)
def test_a_memory_limit_is_in_bytes(text: str, size: int) -> None:
    assert parse_memory(text, "memory") == size


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2000", "memory: '2000' has no unit; write 2000MiB"),
        (2000, "'2000' has no unit; write 2000MiB"),
        ("8", "'8' has no unit; write 8GiB"),
        ("1.5", "'1.5' has no unit; write 1.5GiB"),
        ("0", "memory must be over 0"),
        ("0GiB", "memory must be over 0"),
        ("8KB", "'8KB' is less than 1 MiB"),
        ("2000m", "unknown memory unit 'm'"), ("8G", "'8G' can mean two sizes; write 8GiB or 8GB"),
        ("1.5g", "'1.5g' can mean two sizes; write 1.5GiB or 1.5GB"),
        ("-1GiB", "negative"),
    ],
)
def test_a_memory_limit_whose_unit_can_only_be_guessed_is_refused(text: str | int, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_memory(text, "memory")
    assert sentence in str(refused.value)


def test_room_may_be_none_at_all_but_not_guessed() -> None:
    assert [parse_memory_or_zero(text, "swap") for text in ("0", 0, "0GiB", "1GiB")] == [0, 0, 0, 1 << 30]
    with pytest.raises(InputError, match="'200' has no unit; write 200GiB"):
        parse_memory_or_zero("200", "swap")


def test_counts() -> None:
    assert counted(1, "row") == "1 row"
    assert counted(0, "row") == "0 rows"
    assert counted(119_176, "GPU-hour") == "119,176 GPU-hours"
    assert (counted(1, "row is", "rows are"), counted(2, "row is", "rows are")) == ("1 row is", "2 rows are")


def test_a_cluster_describes_itself() -> None:
    gpu = find_gpu("H100-80GB")
    cluster = Cluster((NodeGroup(1_600, 8, gpu, 96, 2**40), NodeGroup(1, 1, gpu, 1, 62_500_000_000)))
    assert cluster.describe() == "1,600 x 8 H100-80GB, 96 CPUs, 1 TiB; 1 x 1 H100-80GB, 1 CPU, 62.5 GB"


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_memory, "1e300GiB"), (parse_bytes, "1e308 TB"), (parse_seconds, "1e305w"), (parse_rate_per_s, "1e305/us")],
)
def test_what_no_number_can_hold_is_one_sentence(parse: Any, text: str) -> None:
    with pytest.raises(InputError, match="is not a finite number"):
        parse(text, "field")


@pytest.mark.parametrize(("text", "meant"), [("30", "30% or 0.3"), ("90", "90% or 0.9"), ("250", "30% or 0.3")])
def test_a_percentage_without_its_sign_is_answered_with_both_forms(text: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"write {meant}"):
        parse_fraction(text, "--request")


def test_an_offered_load_may_be_over_100_percent_but_no_percentage_without_its_sign() -> None:
    assert parse_fraction("150%", "load", most=MAX_LOAD) == 1.5
    with pytest.raises(InputError, match=r"over 1000%.*write 90% or 0\.9"):
        parse_fraction("90", "load", most=MAX_LOAD)
    with pytest.raises(InputError, match="a load of 90 is not above 0 and at most 10"):
        generate(Workload(10, load=90, cluster_gpus=8), {"image": ("a",), "language": ("b",), "speech": ("c",)})
