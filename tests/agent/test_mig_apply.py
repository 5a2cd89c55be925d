"""MIG on a GPU, against a stateful stand-in for NVML."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_standin import A100_40, H100_80, RTX_6000, Card, Interrupted, StandIn, _Instance

from cotenant.core.errors import InputError, WorkError
from cotenant.core.mig import Placement, geometry, legal_layouts
from cotenant.core.mig_config import Rule, read_mig_config
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


def with_media(**more: object) -> StandIn:
    """An H100 with one 1g.10gb+me at slot 6."""
    card = Card(name="NVIDIA H100 80GB HBM3", profiles=dict(H100_80), pci=0x233010DE)
    card.instances[1], card.next_id = _Instance(1, 7, 6, [0]), 2
    return StandIn(card, **more)  # type: ignore[arg-type]


def test_an_instance_with_media_extensions_is_listed_replaced_and_removed() -> None:
    standin = with_media()
    with Nvml(standin) as nvml:
        (row,) = mig.export(nvml)["gpus"][0]["instances"]
        assert (row["profile"], row["start"], row["sms"], row["memory_bytes"]) == ("1g.10gb+me", 6, 16, 9984 << 20)
        with pytest.raises(WorkError, match=r"has MIG instances, 1g\.10gb\+me@6; `cotenant mig reset"):
            mig.set_mode(nvml, UUID, False)
        steps = mig.apply(nvml, UUID, "3,2,1", dry_run=True)["steps"]
        assert steps == [
            "destroy 1g.10gb+me@6 (instance 1)",
            "create 3g.40gb@0",
            "create 2g.20gb@4",
            "create 1g.10gb@6",
        ]
        standin.cards[0].processes = {4242: 1}
        with pytest.raises(WorkError, match=r"runs process 4242 on 1g\.10gb\+me@6: stop it first"):
            mig.apply(nvml, UUID, "3,2,1", dry_run=True)
        standin.cards[0].processes = {}
        mig.apply(nvml, UUID, "3,2,1")
        assert placed(standin) == [("MIG 1g.10gb", 6), ("MIG 2g.20gb", 4), ("MIG 3g.40gb", 0)]
        mig.apply(nvml, UUID, "3,2,1g+me")
        assert ("MIG 1g.10gb+me", 6) in placed(standin)
        mig.reset(nvml, UUID)
    assert standin.cards[0].instances == {}


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_a_failed_apply_puts_back_what_was_there(fail_at: int) -> None:
    standin = with_media(fail_at=fail_at)
    with Nvml(standin) as nvml:
        with pytest.raises(WorkError, match=r"; (the previous instances exist again|nothing was changed)") as failed:
            mig.apply(nvml, UUID, "3,2,1")
        assert "\n" not in str(failed.value)
    assert placed(standin) == [("MIG 1g.10gb+me", 6)]


def test_what_cannot_be_put_back_is_named() -> None:
    standin = with_media()

    def refuse(*_: object) -> None:
        standin.fail("UNKNOWN")

    standin.nvmlDeviceCreateGpuInstanceWithPlacement = refuse  # type: ignore[method-assign, assignment]
    with Nvml(standin) as nvml, pytest.raises(WorkError, match=r"the GPU had 1g\.10gb\+me@6, which could not"):
        mig.apply(nvml, UUID, "3,2,1")


def test_a_reset_that_leaves_something_says_so() -> None:
    standin = with_media(fail_at=1)
    with Nvml(standin) as nvml:
        with pytest.raises(WorkError, match=r"GPU 0 still has 1g\.10gb\+me@6: destroying GPU instance 1"):
            mig.reset(nvml, UUID)
        assert mig.reset(nvml, UUID)["steps"] == ["destroy 1g.10gb+me@6 (instance 1)"]


def test_a_profile_that_is_not_known_here_is_listed_and_removed() -> None:
    card = Card(profiles=dict(H100_80) | {20: (90, "MIG 2g.20gb+new", 1, 20096, 32, 2, (0, 2, 4), 2)})
    card.instances[1], card.next_id = _Instance(1, 20, 2, [0]), 2
    with Nvml(StandIn(card)) as nvml:
        assert mig.export(nvml)["gpus"][0]["instances"][0]["profile"] == "2g.20gb+new"
        mig.apply(nvml, UUID, "2g.20gb+new@2,1g@0")
        mig.reset(nvml, UUID)
    assert card.instances == {}


def test_an_instance_of_a_profile_the_driver_does_not_describe_is_listed_and_removed() -> None:
    card = Card(profiles=dict(H100_80) | {40: (99, "", 1, 20096, 32, 2, (0, 2, 4), 2)})
    card.instances[1], card.next_id = _Instance(1, 40, 2, [0]), 2
    with Nvml(StandIn(card)) as nvml:
        assert mig.export(nvml)["gpus"][0]["instances"][0]["profile"] == "profile-99"
        with pytest.raises(WorkError, match="profile-99@2"):
            mig.set_mode(nvml, UUID, False)
        assert mig.reset(nvml, UUID)["steps"] == ["destroy profile-99@2 (instance 1)"]
    assert card.instances == {}


def test_graphics_and_media_of_an_rtx_pro_6000() -> None:
    standin = StandIn(Card(profiles=dict(RTX_6000), pci=0x2BB510DE, slices=4))
    with Nvml(standin) as nvml:
        mig.apply(nvml, UUID, "2g+gfx,1g+me,1g-me")
        assert placed(standin) == [("MIG 1g.24gb+me", 6), ("MIG 1g.24gb-me", 9), ("MIG 2g.48gb+gfx", 0)]
        with pytest.raises(InputError, match="does not exist"):
            mig.apply(nvml, UUID, "2g+me.all,1g")
        catalog, live = geometry("RTX-PRO-6000"), nvml.geometry(nvml.find("0"))
    assert {k: (p.name, p.profile_id, p.starts, p.most, p.engines) for k, p in live.every.items()} == {
        k: (p.name, p.profile_id, p.starts, p.most, p.engines) for k, p in catalog.every.items()
    }


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
            b.name,
            b.profile_id,
            b.compute,
            b.memory_slots,
            b.starts,
            b.sms,
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


def balanced(card: Card, folder: Path) -> tuple[Rule, ...]:
    path = folder / "config.yaml"
    path.write_text(
        "version: v1\nmig-configs:\n  all-balanced:\n"
        f'  - {{device-filter: ["{card.pci:#X}"], devices: all, mig-enabled: true,'
        " mig-devices: {1g.10gb+me: 1, 2g.20gb: 1, 3g.40gb: 1}}\n"
        "  all-disabled:\n  - {devices: [0, 1], mig-enabled: false}\n"
        "  mixed:\n  - {devices: all, mig-enabled: true, mig-devices: {7g.80gb: 1}}\n"
        "  - {devices: [1], mig-enabled: true, mig-devices: {}}\n"
    )
    lists = read_mig_config(path)
    return lists["all-balanced"] if card.pci == 0x233010DE else ()


def test_a_mig_parted_list_is_made_true(tmp_path: Path) -> None:
    standin = with_media()
    other = Card(uuid="GPU-bbbbbbbb-1111-2222-3333-444444444444", profiles=dict(H100_80), pci=0x233010DE, mig=False)
    standin.cards.append(other)
    rules = balanced(standin.cards[0], tmp_path)
    with Nvml(standin) as nvml:
        first, second = mig.apply_rules(nvml, rules, dry_run=True)
        assert first["steps"] == ["create 3g.40gb@0", "create 2g.20gb@4"], "the 1g.10gb+me stays where it is"
        assert second["steps"][0] == "turn MIG on"
        assert standin.changes == []
        mig.apply_rules(nvml, rules)
        want = [("MIG 1g.10gb+me", 6), ("MIG 2g.20gb", 4), ("MIG 3g.40gb", 0)]
        assert placed(standin) == placed(standin, 1) == want
        lists = read_mig_config(tmp_path / "config.yaml")
        mig.apply_rules(nvml, lists["mixed"])
        assert (placed(standin), placed(standin, 1)) == ([("MIG 7g.80gb", 0)], [])
        mig.apply_rules(nvml, lists["all-disabled"], gpu="0")
        assert (standin.cards[0].mig, other.mig) == (False, True)


def test_a_list_is_checked_on_every_gpu_before_one_is_changed(tmp_path: Path) -> None:
    standin = with_media()
    # an A100-40GB, which has no profile 7g.80gb
    standin.cards.append(Card(uuid="GPU-bbbbbbbb-1111-2222-3333-444444444444"))
    balanced(standin.cards[0], tmp_path)
    lists = read_mig_config(tmp_path / "config.yaml")
    with Nvml(standin) as nvml:
        with pytest.raises(InputError, match=r"A100-40GB has no MIG profile '7g\.80gb'"):
            mig.apply_rules(nvml, lists["mixed"][:1])
        standin.cards[1].processes = {77: None}
        with pytest.raises(WorkError, match="process 77"):
            mig.apply_rules(nvml, lists["all-disabled"])
        standin.cards[0].pci = 0x1
        with pytest.raises(InputError, match=r"no rule of the configuration applies to GPU 0 \("):
            mig.apply_rules(nvml, lists["all-balanced"])
    assert standin.changes == []
