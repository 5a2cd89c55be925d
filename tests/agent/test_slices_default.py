"""Which mechanism a tenant has that names none: the hardware's slices on a card whose driver takes them, else turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.tenants.registry import Registry
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu
from cotenant.devices.channel_groups import ChannelControls
from cotenant.devices.nvidia import Nvidia

CARD = Gpu("GPU-1", "a card", 80 << 30, 0)
SOFT = Gpu("GPU-2", "software", 8 << 30, 1, "soft")


@pytest.fixture
def takes_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvidia, "channel_controls", lambda self: ChannelControls("580.159.04"))


def chosen(tmp_path: Path, *specs: TenantSpec, gpu: Gpu = CARD, slices_first: bool = True) -> list[str]:
    registry = Registry((gpu,), mechanisms.make(tmp_path, Use.TENANT), slices_first=slices_first)
    return [registry.admit(spec, 0).spec.mechanism for spec in specs]


def test_a_card_whose_driver_takes_them_has_slices(tmp_path: Path, takes_slices: None) -> None:
    assert chosen(tmp_path, TenantSpec("a", 0.3), TenantSpec("b", 0.5)) == ["slices", "slices"]
    assert chosen(tmp_path, TenantSpec("a", 0.3, mechanism="time")) == ["time"]


def test_the_software_gpu_has_turns(tmp_path: Path) -> None:
    assert chosen(tmp_path, TenantSpec("a"), gpu=SOFT) == ["time"]
    assert chosen(tmp_path, TenantSpec("a", mechanism="slices"), gpu=SOFT) == ["slices"]


def test_what_needs_turns_has_turns(tmp_path: Path, takes_slices: None) -> None:
    assert chosen(tmp_path, TenantSpec("a", memory_bytes=1 << 30, oversubscribe="park")) == ["time"]
    assert chosen(tmp_path, TenantSpec("a"), slices_first=False) == ["time"]
    beside_turns = [TenantSpec("a", mechanism="time"), TenantSpec("b")]
    assert chosen(tmp_path, *beside_turns) == ["time", "time"]


def test_a_driver_that_is_not_known_means_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvidia, "channel_controls", lambda self: ChannelControls("535.54.03"))
    assert chosen(tmp_path, TenantSpec("a")) == ["time"]
    with pytest.raises(WorkError, match="550 to 595"):
        chosen(tmp_path, TenantSpec("a", mechanism="slices"))


def test_a_card_that_was_refused_means_turns(tmp_path: Path, takes_slices: None) -> None:
    registry = Registry((CARD,), mechanisms.make(tmp_path, Use.TENANT))
    first = registry.admit(TenantSpec("a", 0.3), 0)
    assert registry.refuse_slices(CARD.uuid, "it answers otherwise") == [first]
    assert first.spec.mechanism == "time"
    assert registry.admit(TenantSpec("b"), 0).spec.mechanism == "time"
