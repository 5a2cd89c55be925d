"""Where the shipped tables of profiles come from: each is in the table of the documentation, and holds what its public
source does."""

from __future__ import annotations

import ast
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

DATA = resources.files("cotenant.profiles").joinpath("data")
PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"
GAVEL = {"V100-16GB": "v100", "P100": "p100", "K80": "k80"}


def test_every_shipped_table_is_listed_with_its_card_driver_date_and_command() -> None:
    section = PAGE.read_text().partition("## Where the shipped tables come from")[2]
    rows = {cells[1].strip().strip("`"): cells[2:-1] for line in section.splitlines()
            if line.startswith("| `") and (cells := line.split("|"))}  # fmt: skip
    assert set(rows) == {file.name for file in DATA.iterdir()}
    assert all(len(cells) == 4 and all(cell.strip() for cell in cells) for cells in rows.values())


@pytest.fixture(scope="module")
def public(shared: Path) -> Any:
    file = shared / "data/profiles/gavel/simulation_throughputs.json"
    if not file.exists():
        pytest.skip(f"no {file.name}")
    return json.loads(file.read_text())


def close(value: float) -> Any:
    return pytest.approx(value, rel=6e-4)  # the shipped table has four digits


def test_gavel_s_speeds_are_those_of_its_public_table(public: Any) -> None:
    shipped = json.loads(DATA.joinpath("elastic-gavel.json").read_text())
    for gpu, worker in GAVEL.items():
        for key, row in public[worker].items():
            model, count = ast.literal_eval(key)
            mine = shipped["models"].get(model, {}).get("rate", {}).get(gpu, {})
            if row["null"] > 0 and str(count) in mine:
                assert mine[str(count)] == close(row["null"])
        together = shipped["beside"][gpu]
        for i, a in enumerate(together["models"]):
            for k, b in enumerate(together["models"]):
                row = public[worker][str((a, 1))]
                pair = row.get(str((b, 1)), [0.0, 0.0])
                expected = min(1.0, pair[0] / row["null"]) if row["null"] else 0.0
                assert together["fraction"][i][k] == pytest.approx(expected, abs=6e-4), (gpu, a, b)
    measured = {ast.literal_eval(key)[0] for key, row in public["v100"].items() if row["null"] > 0}
    assert measured == set(shipped["models"])


def test_gavel_s_gangs_apart_are_those_of_its_public_table(public: Any) -> None:
    shipped = json.loads(DATA.joinpath("elastic-gavel.json").read_text())
    seen = 0
    for model, found in shipped["models"].items():
        for gpu, rates in found.get("apart", {}).items():
            for count, rate in rates.items():
                assert rate == close(public[f"{GAVEL[gpu]}_unconsolidated"][str((model, int(count)))]["null"])
                seen += 1
    assert seen > 100
