"""Values of a simulation's options and profiles that are no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import InputError
from cotenant.profiles.training.elastic import load_elastic
from cotenant.sim.jobs.options import training_config


@pytest.mark.parametrize("name", ["lease", "restart-cost", "solver-limit"])
def test_a_switch_is_not_a_time(name: str) -> None:
    with pytest.raises(InputError, match="true is not a number") as caught:
        training_config({name: True})
    assert caught.value.field == name


@pytest.mark.parametrize("work", ["Infinity", "-1", "true", '"many"'])
def test_an_elastic_profile_needs_finite_work(tmp_path: Path, work: str) -> None:
    path = tmp_path / "elastic.json"
    path.write_text('{"models": {"m": {"rate": {"V100-16GB": {"1": 1.0}}, "work": ' + work + "}}}")
    with pytest.raises(InputError, match="is not a positive number") as caught:
        load_elastic(str(path))
    assert caught.value.field == "models.m.work"
