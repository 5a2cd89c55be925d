"""What `cotenant top --url` and the live page show of language models."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cotenant.cli.top_models import screen
from cotenant.policy.residency import ModelFacts, ModelRow, Place
from cotenant.policy.residency.model_rows import AWAY
from cotenant.serving.gateway.pages import Decisions
from cotenant.serving.llm.live import exposition, rows, status
from cotenant.serving.llm.model import Model
from cotenant.serving.llm.plain_host import GpuRoom
from cotenant.serving.llm.stats import percentile_ms

MIB = 1 << 20


def dispatch(*places: Place) -> Any:
    models = {}
    for place in places:
        entry: Any = SimpleNamespace(
            name=place.name, memory=256 * MIB, ttft_ms=100.0, tpot_ms=10.0, class_="latency-sensitive", priority=0,
            keep=0,
        )
        row = ModelRow(ModelFacts(place.name, 256 * MIB))
        row.place, row.gpu = place, -1 if place is Place.COLD else 0
        models[place.name] = Model(entry, row)
    return SimpleNamespace(models=models, tickets=set())


@pytest.mark.parametrize("place", list(Place))
def test_a_model_has_memory_of_the_gpu_that_it_is_on(place: Place) -> None:
    room, here = GpuRoom(3, "GPU-3", 512 * MIB, "H100"), place not in AWAY
    shown = status(dispatch(Place.RESIDENT, place), [room], 0.0)
    assert [row["gpu"] for row in shown["models"]] == ([3] if place is Place.RESIDENT else [3, 3 if here else None])
    (gpu,) = shown["gpus"]
    assert gpu["used_bytes"] == sum(row["gpu_memory_bytes"] for row in shown["models"])
    assert all(row["memory_bytes"] == 256 * MIB for row in shown["models"])

    async def collect() -> list[Any]:
        return [row async for row in rows(dispatch(Place.RESIDENT, place), [room], "", Decisions(), "")]

    page = asyncio.run(collect())
    ((key, card),) = [(key, fields) for section, key, fields in page if section == "gpus"]
    on_it = [fields["memory_bytes"] for section, _, fields in page if section == "models" and fields["gpu"] == key]
    assert (card["model"], card["memory_used_bytes"], card["granted"]) == ("H100", sum(on_it), False)


def test_top_says_which_answers_its_times_are_of() -> None:
    console = Console(width=200, record=True)
    console.print(screen(status(dispatch(Place.RESIDENT, Place.EVICTED), [GpuRoom(0, "", 512 * MIB)], 0.0), "http://x"))
    text = console.export_text()
    assert "streamed answers" in text
    assert "256.0 MiB" in next(line for line in text.splitlines() if line.startswith("RESIDENT"))
    assert "MiB" not in next(line for line in text.splitlines() if line.startswith("EVICTED"))


def test_top_and_page_count_the_same_failures_and_take_them_for_late() -> None:
    room = [GpuRoom(0, "", 512 * MIB)]
    models = dispatch(Place.RESIDENT)
    stats = models.models[Place.RESIDENT.name].stats
    stats.finished("ok", (0.05, None), None)
    for outcome in ("full", "full", "unavailable", "error", "cancelled", "client_error"):
        stats.finished(outcome, None, None)
    stats.finished("failed", (0.05, 0.01), None)  # a stream that broke off in time
    (row,) = status(models, room, 0.0)["models"]
    assert (row["failed"], row["attainment"]) == (5, pytest.approx(1 / 6))

    async def collect() -> list[Any]:
        return [fields async for section, _, fields in rows(models, room, "", Decisions(), "") if section == "models"]

    (shown,) = asyncio.run(collect())
    assert (shown["failed"], shown["attainment"]) == (5, row["attainment"])
    console = Console(width=200, record=True)
    console.print(screen(status(models, room, 0.0), "http://x"))
    assert re.search("RESIDENT.* 16.7% .* 5 ", console.export_text())


def test_percentiles_are_interpolated() -> None:
    values = [0.004, 0.001, 0.003, 0.002]
    assert percentile_ms(values, 0.5) == 2.5
    assert percentile_ms(values, 0.99) == pytest.approx(np.percentile(values, 99) * 1e3, abs=1e-3)
    assert (percentile_ms([0.25], 0.99), percentile_ms([], 0.5)) == (250.0, None)


def test_an_answer_as_a_whole_has_a_time_and_no_first_token() -> None:
    room = [GpuRoom(0, "", 512 * MIB)]
    models = dispatch(Place.RESIDENT)
    stats = models.models[Place.RESIDENT.name].stats
    for _ in range(3):
        stats.finished("ok", None, 0.25)
    stats.finished("failed", None, 9.0)
    (row,) = status(models, room, 0.0)["models"]
    assert (row["ttft_ms"], row["attainment"], row["answer_ms"], row["answer_p99_ms"]) == (None, 0.0, 250.0, 250.0)
    console = Console(width=200, record=True)
    console.print(screen(status(models, room, 0.0), "http://x"))
    assert re.search("whole ms.*\n.*RESIDENT.* - / - .* 250 / 250 ", console.export_text())
    text = exposition(models, 0)
    assert 'cotenant_model_answer_seconds_sum{model="RESIDENT"} 0.75\n' in text
    assert 'cotenant_model_first_token_seconds_count{model="RESIDENT"} 0\n' in text
    stats.finished("ok", (0.1, None), None)
    (row,) = status(models, room, 0.0)["models"]
    assert (row["ttft_ms"], row["answer_ms"]) == (100.0, 250.0), "a stream counts as a stream only"
