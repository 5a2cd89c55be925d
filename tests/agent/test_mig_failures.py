"""MIG on machines with other GPUs beside, on divided instances, and after a step that the driver refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import H100_80, Card, StandIn, _Instance

import cotenant.cli.mig as command
from cotenant.cli.main import main
from cotenant.core.errors import WorkError
from cotenant.core.mig_config import Rule, read_mig_config
from cotenant.devices import mig
from cotenant.devices.nvml import Nvml

# the shape of mig-parted's lists for a DGX Station, which has a display GPU without MIG
STATION = """
version: v1
mig-configs:
  big:
  - {device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {"3g.40gb": 2}}
  - {device-filter: "0x1FB010DE", devices: all, mig-enabled: false, mig-devices: {}}
  none:
  - {devices: all, mig-enabled: false}
  every:
  - {devices: all, mig-enabled: true, mig-devices: {}}
"""


def h100(number: int = 0, **more: Any) -> Card:
    uuid = f"GPU-aaaaaaa{number}-1111-2222-3333-444444444444"
    return Card(name="NVIDIA H100 80GB HBM3", profiles=dict(H100_80), pci=0x233010DE, uuid=uuid, **more)


def divided() -> Card:
    """An H100 with a 3g.40gb at slot 0 that is divided into three compute instances."""
    return h100(instances={1: _Instance(1, 2, 0, [0, 1, 2])}, next_id=2)


def rules(folder: Path, name: str) -> tuple[Rule, ...]:
    path = folder / "config.yaml"
    path.write_text(STATION)
    return read_mig_config(path)[name]


def test_a_gpu_without_mig_has_nothing_to_turn_off(tmp_path: Path) -> None:
    display = Card(name="NVIDIA DGX Display", uuid="GPU-d0000000-0", has_mig=False, mig=False, pci=0x1FB010DE)
    standin = StandIn(h100(mig=False), display)
    with Nvml(standin) as nvml:
        for dry_run in (True, False):
            first, second = mig.apply_rules(nvml, rules(tmp_path, "big"), dry_run=dry_run)
            assert first["steps"][0] == "turn MIG on"
            assert second["steps"] == []
        assert len(standin.cards[0].instances) == 2
        mig.apply_rules(nvml, rules(tmp_path, "none"))
        assert not standin.cards[0].mig
        with pytest.raises(WorkError, match="MIG mode of GPU 1 is not supported"):
            mig.apply_rules(nvml, rules(tmp_path, "every"))
    assert not standin.cards[0].mig, "nothing is changed where a rule asks a GPU for the MIG that it does not have"


@pytest.mark.parametrize("fail_at", range(2, 6))
def test_a_list_that_fails_turns_mig_off_again(tmp_path: Path, fail_at: int) -> None:
    standin = StandIn(h100(mig=False), fail_at=fail_at)
    with Nvml(standin) as nvml, pytest.raises(WorkError, match=r"MIG on GPU 0 is off again$"):
        mig.apply_rules(nvml, rules(tmp_path, "big"))
    assert (standin.cards[0].mig, standin.cards[0].instances) == (False, {})


def test_a_list_that_fails_names_the_gpus_that_it_has_changed(tmp_path: Path) -> None:
    standin = StandIn(h100(0), h100(1), fail_at=6)
    with Nvml(standin) as nvml, pytest.raises(WorkError, match=r"; the rules have already been applied to GPU 0$"):
        mig.apply_rules(nvml, rules(tmp_path, "big"))
    assert [len(card.instances) for card in standin.cards] == [2, 0]


def test_every_uuid_of_a_divided_instance_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = divided()
    card.instances[5] = _Instance(5, 1, 4, [])
    monkeypatch.setattr(command, "_nvml", lambda: Nvml(StandIn(card)))
    monkeypatch.setattr(sys, "argv", ["cotenant", "mig", "export"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["3g.40gb@0"] * 3 + ["2g.20gb@4"]
    assert len({line.split()[1] for line in lines[:3]}) == 3
    assert "None" not in lines[3]
    assert "no compute instance" in lines[3]


def test_a_divided_instance_that_no_step_has_reached_stays_divided() -> None:
    card = divided()
    with Nvml(StandIn(card, root=False)) as nvml, pytest.raises(WorkError, match=r"needs root.*; nothing was changed$"):
        mig.apply(nvml, "0", "3,3")
    assert card.instances[1].compute == [0, 1, 2]


def test_a_division_that_is_lost_is_named() -> None:
    card = divided()
    with Nvml(StandIn(card, fail_at=7)) as nvml:
        steps = mig.apply(nvml, "0", "4,3", dry_run=True)["steps"]
        assert steps[0] == "destroy 3g.40gb@0 (instance 1 with 3 compute instances)"
        with pytest.raises(WorkError, match=r"3g\.40gb@0 had several compute instances and has one now"):
            mig.apply(nvml, "0", "4,3")


def test_a_message_names_no_option_that_the_command_does_not_have() -> None:
    card = divided()
    card.processes = {77: 1}
    with Nvml(StandIn(card)) as nvml:
        with pytest.raises(WorkError, match=r"runs process 77 on 3g\.40gb@0: stop it first$"):
            mig.reset(nvml, "0")
        with pytest.raises(WorkError, match="; --beside-running changes only"):
            mig.apply(nvml, "0", "4,3")


def test_an_instance_that_cannot_be_created_again_is_named() -> None:
    """The driver does not describe its profile."""
    card = h100(instances={1: _Instance(1, 40, 2, [0])}, next_id=2)
    card.profiles[40] = (99, "", 1, 20096, 32, 2, (0, 2, 4), 2)
    with Nvml(StandIn(card, fail_at=4)) as nvml, pytest.raises(WorkError, match="had profile-99@2, which could"):
        mig.apply(nvml, "0", "3,2,1")
