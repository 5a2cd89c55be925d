"""MIG slices for jobs of the fleet, against the stand-in for NVML and a stand-in for the MPS control program."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from miso_world import World
from nvml_standin import Card, StandIn

from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Placement, parse_placement
from cotenant.devices.nvml import Nvml
from cotenant.fleet.noderuntime.mig_slices import MigSlices, ensure_instance

UUID = Card().uuid
CONTROL = """#!/bin/sh
# answers as nvidia-cuda-mps-control does, and keeps a diary
if [ "$1" = "-d" ]; then echo "start $CUDA_VISIBLE_DEVICES" >> "$DIARY"; touch "$CUDA_MPS_PIPE_DIRECTORY/up"; exit 0; fi
read order
[ -e "$CUDA_MPS_PIPE_DIRECTORY/up" ] || exit 1
case "$order" in quit*) echo quit >> "$DIARY"; rm "$CUDA_MPS_PIPE_DIRECTORY/up";; esac
"""


def placed(standin: StandIn) -> list[tuple[str, int]]:
    gpu = standin.cards[0]
    return sorted((gpu.profiles[i.index][1], i.start) for i in gpu.instances.values() if i.compute == [0])


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    control = tmp_path / "mps-control"
    control.write_text(CONTROL)
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    file = tmp_path / "diary"
    file.touch()
    monkeypatch.setenv("DIARY", str(file))
    return file


def slices(standin: StandIn, diary: Path) -> MigSlices:
    return MigSlices(diary.parent / "node", lambda: Nvml(standin), str(diary.parent / "mps-control"))


def test_instances_come_as_jobs_do_and_those_in_the_way_go() -> None:
    """The whole GPU, then 4g and 3g, then 2g and 2g where the 4g was; what fits beside stays."""
    standin = StandIn()
    with Nvml(standin) as nvml:
        whole = ensure_instance(nvml, UUID, Placement(0, "7g"))
        assert placed(standin) == [("MIG 7g.40gb", 0)]
        four = ensure_instance(nvml, UUID, Placement(0, "4g"))
        three = ensure_instance(nvml, UUID, Placement(4, "3g"))
        assert placed(standin) == [("MIG 3g.20gb", 4), ("MIG 4g.20gb", 0)]
        assert len({whole, four, three}) == 3
        ensure_instance(nvml, UUID, Placement(2, "2g"))
        assert placed(standin) == [("MIG 2g.10gb", 2), ("MIG 3g.20gb", 4)]
        assert ensure_instance(nvml, UUID, Placement(4, "3g")) == three  # the instance existed already


def test_an_instance_in_use_is_not_taken_away() -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        ensure_instance(nvml, UUID, Placement(0, "4g"))
        ensure_instance(nvml, UUID, Placement(4, "3g"))
        by_start = {i.start: i.id for i in standin.cards[0].instances.values()}
        standin.cards[0].processes = {4711: by_start[0]}
        with pytest.raises(WorkError, match="4711"):
            ensure_instance(nvml, UUID, Placement(0, "2g"))
        ensure_instance(nvml, UUID, Placement(6, "1g"))  # in a place that no running job uses
        assert placed(standin) == [("MIG 1g.5gb", 6), ("MIG 4g.20gb", 0)]


def test_mig_off_and_nonsense_are_said() -> None:
    with Nvml(StandIn(Card(mig=False))) as nvml, pytest.raises(WorkError, match="is off"):
        ensure_instance(nvml, UUID, Placement(0, "7g"))
    for text in ("3g", "@4", "3g@x", ""):
        with pytest.raises(InputError, match="such as 3g@4"):
            parse_placement(text)


def test_jobs_that_are_measured_share_the_whole_instance_under_mps(diary: Path) -> None:
    standin = StandIn()
    here = slices(standin, diary)
    shares = [{"uuid": UUID, "slice": "7g@0", "limit": limit} for limit in (0.5, 0.14)]
    first, second = (here.environment(f"job-{i}.0", share) for i, share in enumerate(shares))
    assert first["CUDA_MPS_PIPE_DIRECTORY"] == second["CUDA_MPS_PIPE_DIRECTORY"]
    assert [e["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for e in (first, second)] == ["50", "14"]
    started = diary.read_text().split()
    assert started[0] == "start"
    assert started[1].startswith("MIG-")
    here.leave("job-0.0")
    assert "quit" not in diary.read_text()
    again = slices(standin, diary)  # another process takes over while job-1 runs
    again.leave("job-1.0")
    assert diary.read_text().split()[-1] == "quit"
    again.leave("job-1.0")  # a second time does nothing
    alone = again.environment("job-2.0", {"uuid": UUID, "slice": "3g@4", "limit": None})
    assert alone["CUDA_VISIBLE_DEVICES"].startswith("MIG-")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in alone
    assert placed(standin) == [("MIG 3g.20gb", 4)]


def test_the_planner_names_slices_where_mig_is_on() -> None:
    world = World(mechanism="mig")
    world.submit("a", "flat")
    world.tick()
    share = world.plan.assign["a"].places[0].gpus[0]
    assert (share.mechanism, share.slice, share.limit, share.fraction) == ("mig", "7g@0", None, 1.0)
    world.submit("b", "steep")
    world.tick()
    share = world.plan.assign["b"].places[0].gpus[0]
    assert (share.mechanism, share.slice, share.limit) == ("mig", "7g@0", 1.0)
    world.until_sliced()
    share = world.plan.assign["b"].places[0].gpus[0]
    assert (share.mechanism, share.slice, share.limit) == ("mig", "4g@0", None)
