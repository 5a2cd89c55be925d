"""`cotenant bench budget`: best-effort work beside a floor that is always up, by the part that `overlap` allows."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cotenant.bench.colocation import parse_ls
from cotenant.bench.colocation_budget import Budget, bytes_moved, measure
from cotenant.cli.bench import app
from cotenant.core.errors import InputError

MIB = 1 << 20


def test_a_unit_reads_and_writes_all_of_it() -> None:
    assert bytes_moved("add64") == bytes_moved("copy64") == 128 * MIB
    for load in ("mm4096", "train-resnet50", "add", "profile:x"):
        with pytest.raises(InputError, match="write addN or copyN"):
            bytes_moved(load)


def test_best_effort_work_beside_a_service_has_no_more_than_the_part_of_the_time_that_was_set() -> None:
    """An unmodified program under the shim: a tenth, a third and all of the time, one launch after the other. How much
    of its part it uses depends on the machine; the rule itself is tested in tests/policy/test_colocation_gate.py.
    """
    alone_gb_per_s = 3000.0  # what such a kernel moves while it runs
    said: list[str] = []
    wanted = Budget(parse_ls("resnet50:4:100"), parts=(1.0,), overlap=(0.1, 0.33, 1.0), block_s=0.5)
    found = measure("soft", wanted, progress=said.append)
    assert [row["overlap"] for row in found["rows"]] == [0.1, 0.33, 1.0]
    for row in found["rows"]:
        # the first launch may use time that was saved before the measurement
        assert 0.0 < row["be_gb_per_s"] < 1.1 * row["overlap"] * alone_gb_per_s
    assert found["budget"]["slowdown"] <= 1.05
    assert len(said) == 3


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--be", "mm4096", "--be"),
        ("--sms", "0%,50%", "--sms"),
        ("--overlap", "120%", "--overlap"),
        ("--ls", "vgg:1:1", "--ls"),
        ("--block", "0s", "--block"),
        ("--tolerated", "much", "--tolerated"),
        ("--gpus", "nowhere", "--gpus"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(option: str, value: str, field: str) -> None:
    done = CliRunner().invoke(app, ["budget", option, value])
    assert isinstance(done.exception, InputError)
    assert done.exception.field == field


def test_what_is_printed_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(chosen: dict[str, float]) -> str:
        result = {"gpu": "X", "be": "add64", "tolerated": 1.05, "rows": [], "budget": chosen}
        monkeypatch.setattr("cotenant.bench.colocation_budget.measure", lambda *_, **__: result)
        assert json.loads(CliRunner().invoke(app, ["budget", "--json"]).stdout) == result
        return CliRunner().invoke(app, ["budget"]).stdout

    some = measured({"overlap": 0.67, "slowdown": 1.05, "gb_per_s": 1100.4, "be_sms": 0.25})
    assert "rise by 5%" in some
    assert "{overlap: 67%}" in some
    assert "--limit 25%" in some
    assert "at none of the duty cycles" in measured({"overlap": 0.0, "slowdown": 1.0, "gb_per_s": 0.0, "be_sms": 0.0})
