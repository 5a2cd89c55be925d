"""Admission: no GPU's time or memory is promised twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.memory.parked import Parked, ParkedTable
from cotenant.agent.tenants.registry import Registry, spec_from_dict
from cotenant.agent.tenants.tenant import Tenant
from cotenant.core.errors import InputError
from cotenant.devices.base import Gpu

GIB = 1 << 30


class Node:
    """Two GPUs of 8 GiB."""

    def __init__(self, folder: Path) -> None:
        gpus = [Gpu(f"GPU-{index}", "Test GPU", 8 * GIB, index, kind="soft") for index in range(2)]
        self.parked = ParkedTable()
        self.registry = Registry(gpus, mechanisms.make(folder, Use.TENANT), parked=self.parked)

    def admit(self, name: str, **share: Any) -> Tenant:
        return self.registry.admit(TenantSpec(name, **share), 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_promises_are_made_once(node: Node) -> None:
    first = node.admit("a", request=0.7, memory_bytes=6 * GIB)
    second = node.admit("b", request=0.7)
    assert [tenant.gpus[0].uuid for tenant in (first, second)] == ["GPU-0", "GPU-1"], "the emptier GPU"
    for words, share in (
        (r"30% left to promise; c asks for 40%", {"request": 0.4}),
        (r"2\.00 GiB of memory left", {"memory_bytes": 3 * GIB, "gpus": ("0",)}),
        ("whole cannot share it", {"mechanism": "whole"}),
        ("has no GPU '7'", {"gpus": ("7",)}),
    ):
        with pytest.raises(InputError, match=words):
            node.admit("c", **share)
    assert list(node.registry.tenants) == ["a", "b"]
    node.registry.remove(first)
    assert node.admit("c", request=0.4, memory_bytes=3 * GIB, gpus=("0",)).gpus[0].uuid == "GPU-0"


@pytest.mark.parametrize(
    ("key", "value"),
    [("request", float("nan")), ("request", -1), ("limit", 0), ("limit", float("inf")), ("weight", -1),
     ("memory_bytes", 2**70), ("memory_bytes", -1), ("gpu_count", 99), ("request", "much"), ("name", "x" * 64)],
)  # fmt: skip
def test_numbers_that_promise_nothing_are_refused(node: Node, key: str, value: object) -> None:
    with pytest.raises(InputError):
        node.registry.admit(spec_from_dict({"name": "n", key: value}), 0)
    assert not node.registry.tenants


def test_a_parked_tenants_promise_is_free_until_it_comes_back(node: Node) -> None:
    away = node.admit("a", request=0.7, gpus=("0",))
    node.parked.rows["a"] = Parked("a", "swap", ("GPU-0",), GIB, by_order=True)
    other = node.admit("b", request=0.7, gpus=("0",))
    with pytest.raises(InputError, match="30% left"):
        node.registry.check_fits(away.spec, away.gpus)
    node.registry.remove(other)
    node.registry.check_fits(away.spec, away.gpus)
