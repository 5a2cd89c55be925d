"""Registration with a kubelet that restarts: by the news of its socket, whatever else hangs."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from held_agent import uuid_of
from kube_node import Node
from kubelet_standin import AdmissionError, Kubelet
from pods import pod, share
from waiting import wait_for

from cotenant.kube.inventory import Inventory
from cotenant.kube.plugin.folderwatch import FolderWatch
from cotenant.kube.plugin.registrar import Registrar
from cotenant.kube.plugin.state import PluginState
from cotenant.kube.units import NodeGpu

SHARE = "cotenant.dev/share"
NEVER_S = 3600.0


def after(act: Callable[[], object]) -> None:
    threading.Timer(0.05, act).start()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, which pytest's own folders are not once there are a hundred of them."""
    with tempfile.TemporaryDirectory(prefix="cotk-") as made:
        yield Path(made)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[FolderWatch]:
    found = FolderWatch(tmp_path)
    yield found
    found.close()


def test_a_socket_wakes_and_a_checkpoint_does_not(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "kubelet_internal_checkpoint").write_text("{}")
    assert not watch.wait(0.0)
    after((tmp_path / "kubelet.sock").touch)
    assert watch.wait(NEVER_S)
    after((tmp_path / "kubelet.sock").unlink)
    assert watch.wait(NEVER_S)
    after(watch.wake)
    assert watch.wait(NEVER_S)


def test_a_folder_that_is_made_again_is_watched_again(tmp_path: Path) -> None:
    folder = tmp_path / "device-plugins"
    watch = FolderWatch(folder)
    assert not watch.wait(0.0), "it is looked for"
    folder.mkdir()
    assert not watch.wait(0.0)
    folder.rmdir()
    assert watch.wait(NEVER_S), "it has gone"
    folder.mkdir()
    assert not watch.wait(0.0)
    after((folder / "kubelet.sock").touch)
    assert watch.wait(NEVER_S)
    watch.close()


def test_without_inotify_it_is_a_short_poll(tmp_path: Path) -> None:
    with mock.patch("cotenant.kube.plugin.folderwatch.ctypes.CDLL") as libc:
        libc.return_value.inotify_init1.return_value = -1
        watch = FolderWatch(tmp_path)
    assert not watch.wait(NEVER_S), "it looks again by itself"
    watch.close()


def test_a_kubelet_that_restarts_has_the_units_by_the_news_of_its_socket(folder: Path) -> None:
    """The registrar would look by itself in an hour."""
    kubelet, state = Kubelet(folder), PluginState(Inventory())
    state.inventory.set([NodeGpu(uuid_of(0), 0, 8 << 30)])
    registrar = Registrar(kubelet.plugins, state, by_claims=False, every_s=NEVER_S)
    registrar.start()
    try:
        wait_for(lambda: kubelet.healthy(SHARE))
        for _ in range(2):
            before = kubelet.registered.count(SHARE)
            kubelet.restart()
            wait_for(lambda: kubelet.registered.count(SHARE) > before and kubelet.healthy(SHARE))  # noqa: B023
    finally:
        registrar.stop()
        kubelet.stop()


def test_a_folder_that_is_emptied_while_the_plugin_starts_to_listen(folder: Path) -> None:
    """A kubelet that starts removes the plugin's socket between its bind and its chmod: registration is tried again."""
    kubelet, state = Kubelet(folder), PluginState(Inventory())
    state.inventory.set([NodeGpu(uuid_of(0), 0, 8 << 30)])
    registrar = Registrar(kubelet.plugins, state, by_claims=False, every_s=NEVER_S)
    emptied: list[Path] = []
    real = os.chmod

    def chmod(path: Path, mode: int) -> None:
        if not emptied:
            emptied.append(path)
            path.unlink()
        real(path, mode)

    with mock.patch("cotenant.kube.plugin.resource.os.chmod", chmod):
        registrar.start()
        try:
            wait_for(lambda: kubelet.healthy(SHARE))
        finally:
            registrar.stop()
            kubelet.stop()
    assert emptied


def test_a_place_that_cannot_be_listened_at_is_tried_again(folder: Path) -> None:
    """Something else is where the socket should be; without the thread no pod would come any more."""
    kubelet, state = Kubelet(folder), PluginState(Inventory())
    state.inventory.set([NodeGpu(uuid_of(0), 0, 8 << 30)])
    other = kubelet.plugins / "cotenant-share.sock"
    other.mkdir()
    registrar = Registrar(kubelet.plugins, state, by_claims=False, every_s=NEVER_S)
    registrar.start()
    try:
        wait_for(lambda: registrar.fault)
        other.rmdir()
        wait_for(lambda: kubelet.healthy(SHARE))
    finally:
        registrar.stop()
        kubelet.stop()


def test_registration_waits_neither_for_agent_nor_api_server(node: Node) -> None:
    """An init container that has ended is what a kubelet asks for again: it finds the units, though the agent hangs."""
    thing = node.schedule(pod("train", annotations=share("20%", containers="*"), initContainers=[{"name": "fetch"}]))
    node.agent.kill()
    node.kubelet.stop()
    # before it listens, since the plugin may register at any time afterwards
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        node.kubelet.readmit(thing)
    before = node.kubelet.registered.count(SHARE)
    node.kubelet.start()
    wait_for(lambda: node.kubelet.registered.count(SHARE) > before)
