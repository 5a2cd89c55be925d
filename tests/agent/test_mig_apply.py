"""MIG on a GPU, against a stateful stand-in for NVML."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_standin import A100_40, H100_80, Card, Interrupted, StandIn

from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Placement, geometry, legal_layouts
from cotenant.devices import mig
from cotenant.devices.nvml import Nvml

UUID = Card().uuid


def placed(standin: StandIn, card: int = 0) -> list[tuple[str, int]]:
    """What exists and is usable, by the stand-in's own books."""
    gpu = standin.cards[card]
    return sorted((gpu.profiles[i.index][1], i.start) for i in gpu.instances.values() if i.compute == [0])


def test_apply_creates_what_the_layout_names() -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        done = mig.apply(nvml, UUID, "3,2,2")
    assert placed(standin) == [("MIG 2g.10gb", 0), ("MIG 2g.10gb", 2), ("MIG 3g.20gb", 4)]
    assert [(r["profile"], r["start"]) for r in done["instances"]] == [("2g.10gb", 0), ("2g.10gb", 2), ("3g.20gb", 4)]
    uuids = [r["uuid"] for r in done["instances"]]
    assert all(u.startswith("MIG-") for u in uuids)
    assert len(set(uuids)) == 3


def test_apply_on_h100_uses_the_double_memory_1g() -> None:
    standin = StandIn(Card(name="NVIDIA H100 80GB HBM3", profiles=dict(H100_80)))
    with Nvml(standin) as nvml:
        mig.apply(nvml, "0", "1+,1+,3")
    assert placed(standin) == [("MIG 1g.20gb", 0), ("MIG 1g.20gb", 2), ("MIG 3g.40gb", 4)]


def test_apply_again_changes_nothing_and_a_new_layout_keeps_what_it_shares() -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        mig.apply(nvml, UUID, "3g.20gb@4,2g.10gb@0,2g.10gb@2")
        before = len(standin.changes)
        assert mig.apply(nvml, UUID, "3,2,2")["steps"] == []
        assert len(standin.changes) == before
        kept = [i.id for i in standin.cards[0].instances.values() if i.start == 4]
        mig.apply(nvml, UUID, "4g.20gb@0,3g.20gb@4")
    assert [i.id for i in standin.cards[0].instances.values() if i.start == 4] == kept


def test_dry_run_says_the_steps_and_changes_nothing() -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        mig.apply(nvml, UUID, "7")
        before = list(standin.changes)
        done = mig.apply(nvml, UUID, "4,3", dry_run=True)
    assert done["steps"] == ["destroy 7g.40gb@0 (instance 1)", "create 4g.20gb@0", "create 3g.20gb@4"]
    assert standin.changes == before


@pytest.mark.parametrize("layout", ["4,2,1", "3,3", "1,1,1,1,1,1,1", "2,1,3"])
@pytest.mark.parametrize("die_at", range(1, 14))
def test_an_interrupted_apply_is_repaired_by_the_next(layout: str, die_at: int) -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        mig.apply(nvml, UUID, "3,2,2")
        standin.changes, standin.die_at = [], die_at
        with contextlib.suppress(Interrupted):
            mig.apply(nvml, UUID, layout)
        standin.die_at = None
        done = mig.apply(nvml, UUID, layout)
        geo = nvml.geometry(nvml.find(UUID))
    want = sorted((f"MIG {geo.profiles[p.kind].name}", p.start) for p in mig.parse_layout(geo, layout))
    assert placed(standin) == want
    assert len(done["instances"]) == len(want)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_can_follow_any_other_through_any_interruption(data: st.DataObject) -> None:
    geo = geometry("H100-80GB")
    layouts = [layout for layout in legal_layouts(geo) if layout]
    standin = StandIn(Card(profiles=dict(H100_80)))
    with Nvml(standin) as nvml:
        for _ in range(data.draw(st.integers(1, 4))):
            layout = data.draw(st.sampled_from(layouts))
            standin.changes, standin.die_at = [], data.draw(st.one_of(st.none(), st.integers(1, 10)))
            with contextlib.suppress(Interrupted):
                mig.apply(nvml, UUID, geo.format(layout))
        standin.die_at = None
        mig.apply(nvml, UUID, geo.format(layout))
        found = nvml.instances(nvml.find(UUID), nvml.geometry(nvml.find(UUID)))
    assert tuple(sorted(g.placement for g in found)) == layout
    assert all(g.compute_ids == (0,) and g.uuid for g in found)


def test_refuses_while_processes_run_unless_they_keep_their_instances() -> None:
    standin = StandIn()
    with Nvml(standin) as nvml:
        mig.apply(nvml, UUID, "3g.20gb@0,3g.20gb@4")
        by_start = {i.start: i.id for i in standin.cards[0].instances.values()}
        standin.cards[0].processes = {4242: by_start[4]}
        with pytest.raises(WorkError, match="process 4242"):
            mig.apply(nvml, UUID, "4g.20gb@0,3g.20gb@4")
        mig.apply(nvml, UUID, "4g.20gb@0,3g.20gb@4", beside_running=True)
        with pytest.raises(WorkError, match="process 4242"):
            mig.apply(nvml, UUID, "7", beside_running=True)
        with pytest.raises(WorkError, match="process 4242"):
            mig.reset(nvml, UUID)
        standin.cards[0].processes = {}
        assert len(mig.reset(nvml, UUID)["steps"]) == 2
    assert standin.cards[0].instances == {}


def test_mode_on_and_off() -> None:
    standin = StandIn(Card(mig=False))
    with Nvml(standin) as nvml:
        with pytest.raises(WorkError, match="cotenant mig enable"):
            mig.apply(nvml, UUID, "3,3")
        assert mig.set_mode(nvml, UUID, True)["changed"] is True
        mig.apply(nvml, UUID, "3,3")
        with pytest.raises(WorkError, match="cotenant mig reset"):
            mig.set_mode(nvml, UUID, False)
        mig.reset(nvml, UUID)
        assert mig.set_mode(nvml, UUID, False, dry_run=True)["changed"] is True
        assert standin.cards[0].mig is True
        mig.set_mode(nvml, UUID, False)
    assert standin.cards[0].mig is False


def test_mode_that_waits_for_a_reset_is_said() -> None:
    standin = StandIn(Card(mig=False, reset_needed=True))
    with Nvml(standin) as nvml:
        assert mig.set_mode(nvml, UUID, True)["reset_needed"] is True
        with pytest.raises(WorkError, match="waits for a GPU reset"):
            mig.apply(nvml, UUID, "3,3")


def test_a_mode_that_waits_for_a_reset_can_be_taken_back() -> None:
    for mig_on in (False, True):
        card = Card(mig=mig_on, reset_needed=True)
        with Nvml(StandIn(card)) as nvml:
            assert mig.set_mode(nvml, UUID, not mig_on)["reset_needed"] is True
            assert card.pending is not mig_on
            back = mig.set_mode(nvml, UUID, mig_on)
            assert (back["changed"], back["reset_needed"]) == (True, False)
            assert (card.mig, card.pending) == (mig_on, mig_on)
            again = mig.set_mode(nvml, UUID, mig_on, dry_run=True)
            assert (again["changed"], again["dry_run"]) == (False, True)


def test_failures_of_nvml_become_one_sentence() -> None:
    with Nvml(StandIn(root=False)) as nvml, pytest.raises(WorkError, match=r"creating 7g.40gb@0 on GPU 0 needs root"):
        mig.apply(nvml, UUID, "7")
    with Nvml(StandIn(Card(has_mig=False))) as nvml, pytest.raises(WorkError, match="not supported"):
        mig.apply(nvml, UUID, "7")
    with Nvml(StandIn()) as nvml:
        device = nvml.find("0")
        geo = nvml.geometry(device)
        nvml.create(device, geo.profiles["4g"], 0)
        with pytest.raises(WorkError, match="not enough free slices"):
            nvml.create(device, geo.profiles["2g"], 2)
        with pytest.raises(InputError, match="GPU-aaaaaaaa"):
            nvml.find("GPU-ffff")


def test_clients_of_an_mps_server_count_as_users() -> None:
    with Nvml(StandIn(Card(mps_clients=[99]))) as nvml, pytest.raises(WorkError, match="process 99"):
        mig.apply(nvml, UUID, "3,3")


def test_an_old_driver_still_gives_geometry_and_names() -> None:
    standin = StandIn(old_driver=True)
    with Nvml(standin) as nvml:
        geo = nvml.geometry(nvml.find("0"))
        mig.apply(nvml, "0", "4,3")
    assert placed(standin) == [("MIG 3g.20gb", 4), ("MIG 4g.20gb", 0)]
    assert geo.profiles["3g"].name == "3g.20gb"
    assert geo.profiles["1g"].name == "1g.5gb"
    assert geo.profiles["7g"].name == "7g.40gb"


@pytest.mark.parametrize(("model", "dump"), [("A100-40GB", A100_40), ("H100-80GB", H100_80)])
def test_geometry_from_the_driver_is_that_of_the_catalog(model: str, dump: dict) -> None:
    catalog = geometry(model, double_memory=True)
    with Nvml(StandIn(Card(profiles=dict(dump)))) as nvml:
        live = nvml.geometry(nvml.find("0"))
    assert live.kinds == catalog.kinds
    for kind in live.kinds:
        a, b = live.profiles[kind], catalog.profiles[kind]
        assert (a.name, a.profile_id, a.compute, a.memory_slots, a.starts, a.sms) == (
            b.name, b.profile_id, b.compute, b.memory_slots, b.starts, b.sms
        )
        assert abs(a.memory_bytes - b.memory_bytes) < 2**28


def test_export_lists_every_gpu() -> None:
    plain = Card(name="Tesla T4", uuid="GPU-bbbbbbbb-1111-2222-3333-444444444444", has_mig=False)
    standin = StandIn(Card(), plain)
    with Nvml(standin) as nvml:
        mig.apply(nvml, "0", "4,3")
        table = mig.export(nvml)
    assert [(g["name"], g["mig"]) for g in table["gpus"]] == [("NVIDIA A100-SXM4-40GB", True), ("Tesla T4", None)]
    assert [i["profile"] for i in table["gpus"][0]["instances"]] == ["4g.20gb", "3g.20gb"]
    assert table["gpus"][0]["instances"][0]["sms"] == 56


def test_difference_creates_large_instances_first() -> None:
    change = mig.difference((Placement(0, "2g"), Placement(2, "1g"), Placement(4, "3g")), [])
    assert [p.kind for p in change.create] == ["3g", "2g", "1g"]
