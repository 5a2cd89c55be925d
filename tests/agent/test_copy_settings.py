"""Copy turns as they are configured, and who gets a queue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.abi.copy_page import COPY_QUEUES, CopyRank
from cotenant.abi.tenant_page import SlotFlag
from cotenant.agent.config.copies import parse_copies, with_options
from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.config.schema import parse_config
from cotenant.agent.copies.links import Copies
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.tenants.registry import spec_from_dict, spec_to_dict
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError
from cotenant.devices.base import Gpu
from cotenant.policy.copies import CopySettings

MIB = 1 << 20


def test_settings_of_a_file() -> None:
    found = parse_config({"copies": {"period_bytes": "16MiB", "chunk_bytes": "4MiB"}}, Path("f"))
    assert found.copies == CopySettings(True, 4 * MIB, 16 * MIB)
    assert parse_copies(True).always
    assert not parse_copies(False).always
    assert not parse_config({}, Path("f")).copies.always


@pytest.mark.parametrize(
    "wrong", [{"perid": "8MiB"}, {"chunk_bytes": "1KiB"}, {"chunk": "1MiB"}, {"in_flight": 2}, 3, "on"]
)
def test_wrong_settings_are_refused_with_the_field(wrong: Any) -> None:
    with pytest.raises(InputError) as caught:
        parse_config({"copies": wrong}, Path("agent.yaml"))
    assert "copies" in str(caught.value)
    assert "agent.yaml" in str(caught.value)


def test_options_go_over_the_file_and_switch_turns_on() -> None:
    base = CopySettings(chunk_bytes=4 * MIB)
    assert with_options(base, period=None, chunk=None) is None
    assert with_options(base, period="32MiB", chunk=None) == CopySettings(True, 4 * MIB, 32 * MIB)
    with pytest.raises(InputError, match="period"):
        with_options(base, period="1KiB", chunk=None)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e6, float("nan")])
def test_weights_out_of_range_are_refused(weight: float) -> None:
    with pytest.raises(InputError, match="copy weight"):
        check_spec(TenantSpec("a", copy_weight=weight))


def test_a_tenant_is_not_both() -> None:
    with pytest.raises(InputError, match="cannot be"):
        check_spec(TenantSpec("a", latency_sensitive=True, best_effort=True))


def test_weight_and_class_survive_the_state_file() -> None:
    spec = TenantSpec("a", copy_weight=2.5, latency_sensitive=True)
    assert spec_from_dict(spec_to_dict(spec)) == spec
    assert spec_from_dict(spec_to_dict(TenantSpec("b"))).copy_weight is None


def tenant(name: str, **spec: Any) -> Any:
    return Tenant(TenantSpec(name, **spec), (Gpu("G", "GPU", 1 << 30, 0),), "", 0, Enforcement())


def session(of: Any) -> Any:
    made = SimpleNamespace(tenant=of, slots={0: "G"}, page=SimpleNamespace(slots=[SimpleNamespace(flags=1)]))
    of.sessions.append(made)
    return Hashable(made)


class Hashable(SimpleNamespace):
    """A session is a key."""

    def __init__(self, of: Any) -> None:
        super().__init__(**vars(of))
        self.tenant.sessions[-1] = self

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def test_the_first_with_a_weight_switches_its_gpu_on_and_the_last_off() -> None:
    copies = Copies(CopySettings())
    plain, weighted = tenant("plain"), tenant("weighted", copy_weight=3.0)
    running = session(plain)
    copies.join(plain)
    assert copies.attach(running, "G") is None
    assert running.page.slots[0].flags == 1
    copies.join(weighted)
    assert running.page.slots[0].flags == 1 | SlotFlag.COPIES
    given = copies.attach(running, "G")
    assert given is not None
    assert given[1]["participant"] == 1
    assert copies.attach(running, "G") == given, "asked again, the same"
    row = copies.row(weighted, "G")
    assert row is not None
    assert (row["weight"], row["rank"]) == (3.0, "normal")
    copies.leave(weighted)
    assert running.page.slots[0].flags == 1
    copies.close()


def test_ranks() -> None:
    copies = Copies(CopySettings(always=True))
    for given, rank in (
        (tenant("a"), CopyRank.NORMAL), (tenant("b", best_effort=True), CopyRank.BEST_EFFORT),
        (tenant("c", latency_sensitive=True), CopyRank.AHEAD),
    ):  # fmt: skip
        copies.join(given)
        row = copies.row(given, "G")
        assert row is not None
        assert row["rank"] == rank.name.lower().replace("_", "-")
    copies.close()


def test_a_queue_is_what_its_tenant_is_also_where_nobody_takes_turns_any_more() -> None:
    """The page's row differed from what is true: a process was said to have overwritten it."""
    copies, changing = Copies(CopySettings()), tenant("a", latency_sensitive=True)
    copies.join(changing)
    changing.spec = TenantSpec("a", best_effort=True)
    copies.join(changing)
    assert not copies.is_on("G")
    assert copies.row(changing, "G") is not None
    assert copies.put_right() == []
    copies.close()


def test_more_tenants_than_queues_and_queues_used_again() -> None:
    copies = Copies(CopySettings(always=True))
    tenants = [tenant(f"t{n}") for n in range(COPY_QUEUES + 1)]
    for each in tenants:
        copies.join(each)
    assert copies.row(tenants[-1], "G") is None, "it copies without turns, and is told so"
    assert copies.flag(session(tenants[-1]), "G") == 0
    copies.leave(tenants[0])
    late = tenant("late")
    copies.join(tenants[-1])
    assert copies.row(tenants[-1], "G") is not None
    copies.join(late)
    assert copies.row(late, "G") is None
    copies.close()


def test_a_process_that_goes_leaves_nothing_behind() -> None:
    copies = Copies(CopySettings(always=True))
    one = tenant("one")
    process = session(one)
    copies.join(one)
    given = copies.attach(process, "G")
    assert given is not None
    page = copies._pages["G"]
    link = page.layout.links[0]
    link.slots[1] = given[1]["participant"] << 48 | 77
    link.slots[2] = (given[1]["participant"] + 1) << 48 | 77
    link.queues[given[1]["queue"]].seen_ns = 5
    one.sessions.remove(process)
    copies.drop(process)
    assert list(link.slots)[1:3] == [0, (given[1]["participant"] + 1) << 48 | 77]
    assert link.queues[given[1]["queue"]].seen_ns == 0
    del link
    copies.close()
