"""Quantities: what Kubernetes writes is read exactly, anything else is one sentence."""

from __future__ import annotations

from fractions import Fraction

import pytest

from cotenant.core.errors import InputError
from cotenant.kube.quantity import parse_memory, parse_quantity, parse_share


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), (30, 30), ("8Gi", 8 << 30), ("1e3", 1000), ("1E3", 1000), ("2E", 2 * 10**18), ("500m", Fraction(1, 2)),
     (".5", Fraction(1, 2)), ("5.", 5), ("+3k", 3000), ("-1", -1), ("1e-2", Fraction(1, 100)),
     ("0.1Ki", Fraction(512, 5))],
)  # fmt: skip
def test_a_quantity_is_exact(text: object, value: object) -> None:
    assert parse_quantity(text, "x") == value


@pytest.mark.parametrize(
    "text",
    ["", "8 Gi", " 8", "8GI", "8K", "eight", "1e", "0x8", "1_000", "\u0668Gi", "8Gi\n", None, True, 1.5, [], "1e999"],
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(InputError, match="is not a quantity; write it like 30 or 8Gi"):
        parse_quantity(text, "x")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8Gi", 8 << 30), ("500M", 500_000_000), ("8GiB", 8 << 30), ("500MB", 500_000_000), ("1e9", 10**9),
     ("1.5Gi", 3 << 29)],
)  # fmt: skip
def test_memory_is_in_bytes(text: str, value: int) -> None:
    assert parse_memory(text, "x") == value


@pytest.mark.parametrize(
    "text", ["0", "-1Gi", "8m", "0.3", "1e30", "8Gb", "8gib", "8GiBB", "GiB", "", "8 GiB", "1.0000001Ki"]
)
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not (an amount of memory|a whole number of bytes)"):
        parse_memory(text, "x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2000", "'2000' has no unit; write 2000Mi"), ("8", "'8' has no unit; write 8Gi"),
        ("8589934592", "has no unit; write 8192Mi"), ("+8589934592", "has no unit; write 8192Mi"),
        ("8589934592.0", "has no unit; write 8192Mi"), ("2000m", "is less than 1 MiB; m is a thousandth, write 2000Mi"),
        ("8k", "'8k' is less than 1 MiB; write it like 8Gi or 500M"), ("1023Ki", "is less than 1 MiB"),
    ],
)  # fmt: skip
def test_memory_whose_unit_can_only_be_guessed_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_memory(text, "x")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("30%", 0.3), ("0.3", 0.3), ("100%", 1.0), ("1", 1.0), ("12.5%", 0.125), ("0%", 0.0), (".5", 0.5)],
)
def test_a_share_is_a_fraction(text: str, value: float) -> None:
    assert parse_share(text, "x") == value


@pytest.mark.parametrize(
    "text", ["", "30 %", "thirty", "-5%", "+5%", "30%%", "1e-1", "nan", "inf", "\u0663\u0660%", "30%\n", None, 30]
)
def test_what_is_no_share_is_refused(text: object) -> None:
    with pytest.raises(InputError, match=r"is not a share of a GPU; write it like 30% or 0.3"):
        parse_share(text, "x")


def test_over_the_whole_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"'101%' is over 100% of a GPU$"):
        parse_share("101%", "x")
    with pytest.raises(InputError, match=r"'30' is over 100% of a GPU: a plain number is a fraction, write 30% or 0.3"):
        parse_share("30", "x")
