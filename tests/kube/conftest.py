"""Nodes for the device plugin."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_node import Node

# for the stand-in of the shim that is written in Python
sys.path.insert(0, str(Path(__file__).parent.parent / "agent"))


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Makes nodes in short folders; ends them."""
    made: list[Node] = []

    def make(**options: Any) -> Node:
        made.append(Node(Path(tempfile.mkdtemp(prefix="cotk-")), **options))
        return made[-1]

    yield make
    for node in made:
        node.close()
        shutil.rmtree(node.folder, ignore_errors=True)


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A node with two GPUs of 8 GiB whose plugin is registered."""
    found = make_node()
    found.start_plugin()
    found.ready()
    return found
