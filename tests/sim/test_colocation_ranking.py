"""The order of the schemes in virtual time is the card's, wherever the card tells them apart.

golden/colocation_card.json: medians of docs/benchmarks/colocation.md. A newer measurement replaces it as it is: only
the order is compared, of schemes that differ by more than the card's own noise.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.bench.colocation_virtual import measure
from cotenant.policy.colocation import SCHEMES

CARD = json.loads((Path(__file__).parent.parent / "golden" / "colocation_card.json").read_text())
# differences that the comparison must notice: a quarter of a latency, 6 % of the work
TOLD_APART = {"ls_p50_over_alone": 0.25, "be_over_left": 0.06}


@pytest.fixture(scope="module")
def virtual() -> dict[str, Any]:
    return measure(CARD["ls"], list(CARD["rows"]), list(SCHEMES), 0.6)


def apart(kind: str, low: float, high: float) -> bool:
    """Whether the card tells two figures apart."""
    return high > low * (1 + TOLD_APART[kind]) if kind == "ls_p50_over_alone" else high > low + TOLD_APART[kind]


@pytest.mark.parametrize("figure", list(TOLD_APART))
@pytest.mark.parametrize("load", list(CARD["rows"]))
def test_the_order_is_the_cards(virtual: dict[str, Any], load: str, figure: str) -> None:
    card = {scheme: row[figure] for scheme, row in CARD["rows"][load].items()}
    here = {scheme: virtual[scheme][load][figure] for scheme in card}
    pairs = [(a, b) for a, b in itertools.permutations(card, 2) if apart(figure, card[a], card[b])]
    assert len(pairs) >= 3, "the card has to tell some schemes apart, or this compares nothing"
    wrong = [(a, b) for a, b in pairs if not here[a] < here[b]]
    assert not wrong, {scheme: (card[scheme], round(here[scheme], 3)) for scheme in card}


def test_the_winner_is_the_same(virtual: dict[str, Any]) -> None:
    """Only a gate keeps LS within a quarter of alone beside short kernels; of the gates tidal leaves BE most."""
    for load in ("mm4096", "add256"):
        for rows in (CARD["rows"][load], {scheme: virtual[scheme][load] for scheme in virtual}):
            gates = {s for s, row in rows.items() if row["ls_p50_over_alone"] < 1.25}
            assert gates == {"temporal", "orion", "tidal"}
            assert max(gates, key=lambda s: rows[s]["be_over_left"]) == "tidal"
