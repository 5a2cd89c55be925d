"""Pods and jobs: which one a process belongs to, and that it gets that one's share and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import saved
from fake_shim import FakeShim
from held_agent import HeldAgent, pod_cgroup, uuid_of
from waiting import wait_for

from cotenant.abi.protocol import MemoryFamily, MessageType, Status
from cotenant.agent.gate.client import join_floor
from cotenant.agent.tenants.places import Place, container_token, place_in, place_of
from cotenant.core.errors import InputError, WorkError

UID = "0c5a3f6e-6f2c-4c58-9d0f-3a8b1f0f7a11"
OTHER = "9e107d9d-372b-4a2b-8c4e-0f1a2b3c4d5e"
ID = "ab" * 32
TRAIN = {"name": "team/train/main", "request": 0.3, "limit": 0.6, "memory_bytes": 2 << 30, "gpus": [uuid_of(0)]}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldAgent]:
    folder = Path(tempfile.mkdtemp(prefix="cot-", dir=None if len(str(tmp_path)) > 60 else tmp_path))
    agent = HeldAgent(folder)
    yield agent
    agent.close()


def hold(agent: HeldAgent, tenant: dict[str, Any] = TRAIN, uid: str = UID, container: str = "main", **more: Any) -> Any:
    return agent.call("hold", kind="pod", id=uid, container=container, tenant=tenant, **more)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (pod_cgroup(UID, ID), Place("pod", UID, ID)),
        (f"0::/kubepods/burstable/pod{UID}/{ID}\n", Place("pod", UID, ID)),
        (f"0::/kubepods/pod{UID}/{ID}\n", Place("pod", UID, ID)),
        (f"12:pids:/kubepods/besteffort/pod{UID}/{ID}\n11:cpu:/x\n", Place("pod", UID, ID)),
        # as an agent in a container with its own cgroup namespace sees the path
        (f"0::/../../kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/crio-{ID}.scope\n",
         Place("pod", UID, ID)),
        # kind, with a cgroup that the container made below its own
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice"
         f"/cri-containerd-{ID}.scope/init.scope\n", Place("pod", UID, ID)),
        # the UID of a static pod is a hash
        (f"0::/kubepods/burstable/pod{'0f' * 16}/{ID}\n", Place("pod", "0f" * 16, ID)),
        # names that a container gives to groups below its own cgroup do not make it another pod
        (f"0::/kubepods/burstable/pod{UID}/{ID}/pod{OTHER}/{'cd' * 32}\n", Place("pod", UID, ID)),
        (f"0::/kubepods/burstable/pod{UID}\n", Place("pod", UID)),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n", Place("slurm", "4711")),
        ("0::/system.slice/n1_slurmstepd.scope/job_4711/step_batch\n", Place("slurm", "4711")),
        ("7:freezer:/slurm/uid_1000/job_4711/step_0\n", Place("slurm", "4711")),
        ("7:freezer:/slurm_n1/uid_1000/job_4711/step_0\n", Place("slurm", "4711")),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/podman/pod1234/x\n", None),
        (f"0::/user.slice/my-pod{UID}x/{ID}\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_cgroup_names_a_pod_or_a_job(text: str, place: Place | None) -> None:
    assert place_in(text) == place


def test_the_kernel_says_it_of_a_real_process(tmp_path: Path) -> None:
    base = Path("/sys/fs/cgroup/pids" if Path("/sys/fs/cgroup/pids").is_dir() else "/sys/fs/cgroup")
    top = base / f"kubepods-test-{os.getpid()}"
    folder = top / "kubepods" / f"pod{UID}" / ID
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("cgroups cannot be made here")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        try:
            (folder / "cgroup.procs").write_text(str(child.pid))
        except OSError:
            pytest.skip("processes cannot be moved between cgroups here")
        assert place_of(child.pid) == Place("pod", UID, ID)
        assert place_of(os.getpid()) is None
    finally:
        child.kill()
        child.wait()
        for path in (folder, folder.parent, folder.parent.parent, top):
            for _ in range(50):
                try:
                    path.rmdir()
                    break
                except OSError:
                    time.sleep(0.02)
    assert place_of(child.pid) is None


def test_a_token_fits_hello_and_says_which_container() -> None:
    assert container_token("main") == "container:main"
    long = [container_token("a" * 62 + end) for end in "bc"]
    assert all(len(token) <= 63 for token in long)
    assert long[0] != long[1]


def test_a_process_gets_the_share_of_its_pod(held: HeldAgent) -> None:
    hold(held)
    held.put(pod_cgroup(UID, ID))
    shim = FakeShim(held.tenants)
    assert shim.answer["type"] == MessageType.HELLO_REPLY
    assert shim.answer["tenant"].rstrip(b"\0") == b"team/train/main"
    assert held.held()["team/train/main"]["processes"] == 1


def test_no_token_makes_it_another_tenant(held: HeldAgent) -> None:
    hold(held)
    large = held.call("register", tenant={"name": "large", "limit": 1.0})
    held.put(pod_cgroup(UID, ID))
    assert FakeShim(held.tenants, large["token"]).answer["tenant"].rstrip(b"\0") == b"team/train/main"


def test_containers_of_a_pod_have_their_own_shares(held: HeldAgent) -> None:
    hold(held)
    hold(held, TRAIN | {"name": "team/train/aux", "request": 0.1}, container="aux")
    held.put(pod_cgroup(UID, ID))
    assert FakeShim(held.tenants, "container:aux").answer["tenant"].rstrip(b"\0") == b"team/train/aux"
    assert FakeShim(held.tenants, "container:main").answer["tenant"].rstrip(b"\0") == b"team/train/main"
    lost = FakeShim(held.tenants)
    assert lost.answer["status"] == Status.UNKNOWN_TENANT
    assert "shares for main, aux" in lost.answer["text"]
    hold(held, container_id=ID)  # the runtime's id of the container is known now, so the environment is not needed
    assert FakeShim(held.tenants).answer["tenant"].rstrip(b"\0") == b"team/train/main"


def test_a_process_that_is_early_waits_for_the_news_of_its_pod(held: HeldAgent) -> None:
    held.call("expect", kind="pod")
    held.put(pod_cgroup(UID, ID))
    began = time.monotonic()
    threading.Timer(0.5, hold, (held,)).start()
    shim = FakeShim(held.tenants, "container:main")
    assert time.monotonic() - began > 0.3
    assert shim.answer["tenant"].rstrip(b"\0") == b"team/train/main"


@pytest.mark.timed
def test_a_pod_without_a_share_is_refused_in_time(held: HeldAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    held.call("expect", kind="pod")
    held.put(pod_cgroup(OTHER, ID))
    began = time.monotonic()
    shim = FakeShim(held.tenants)
    assert 7 < time.monotonic() - began < 9.5, "under the 10 s that a shim waits for an answer"
    assert shim.answer["status"] == Status.UNKNOWN_TENANT
    assert OTHER in shim.answer["text"]
    assert "no share" in shim.answer["text"]


def test_let_go_frees_the_share_at_once(held: HeldAgent) -> None:
    hold(held, TRAIN | {"request": 0.9, "limit": 1.0})
    with pytest.raises(InputError, match="has 10% left to promise"):
        hold(held, TRAIN | {"name": "team/next/main", "request": 0.5}, uid=OTHER)
    held.put(pod_cgroup(UID, ID))
    shim = FakeShim(held.tenants)
    held.call("let_go", kind="pod", id=UID)
    hold(held, TRAIN | {"name": "team/next/main", "request": 1.0, "limit": 1.0}, uid=OTHER)
    rows = {t["name"]: t for t in held.call("list")["tenants"]}
    assert rows["team/train/main"]["request"] == 0.0, "a process that is left has no claim"
    shim.close()
    assert wait_gone(held, "team/train/main")


def test_let_go_after_a_restart_keeps_a_tenant_whose_process_has_not_returned(held: HeldAgent) -> None:
    """Its memory would else be counted as free, and it would be refused when it returns."""
    hold(held)
    held.put(pod_cgroup(UID, ID))
    shim = FakeShim(held.tenants)
    name, folder = TRAIN["name"], held.folder
    wait_for(lambda: saved(folder, name).get("connected"), what="the process is written down")
    token = saved(folder, name)["token"]
    held.process.kill()
    held.process.wait()
    held.start()
    held.call("let_go", kind="pod", id=UID)
    assert {t["name"]: t["request"] for t in held.call("list")["tenants"]} == {name: 0.0}
    shim.close()
    back = FakeShim(held.tenants, token)
    back.send(MessageType.MEMORY_STATE, {"family": MemoryFamily.HOST, "bytes": 0})
    back.close()
    assert wait_gone(held, name)


def wait_gone(agent: HeldAgent, name: str) -> bool:
    wait_for(lambda: name not in {t["name"] for t in agent.call("list")["tenants"]})
    return True


def test_holding_twice_is_once_and_a_change_holds(held: HeldAgent) -> None:
    hold(held)
    assert hold(held)["request"] == 0.3
    assert hold(held, TRAIN | {"limit": 0.8})["limit"] == 0.8
    assert len(held.held()) == 1
    with pytest.raises(InputError, match="already exists and does not belong to this pod"):
        hold(held, uid=OTHER)
    with pytest.raises(InputError, match="no GPU 'GPU-none'"):
        hold(held, TRAIN | {"name": "x", "gpus": ["GPU-none"]}, uid=OTHER)


def test_held_tenants_outlive_the_agent(held: HeldAgent) -> None:
    hold(held, container_id=ID)
    held.kill()
    held.start()
    row = held.held()["team/train/main"]
    assert (row["id"], row["container"], row["container_id"]) == (UID, "main", ID)
    assert (row["request"], row["limit"], row["memory_bytes"], row["gpus"]) == (0.3, 0.6, 2 << 30, [uuid_of(0)])
    held.put(pod_cgroup(UID, ID))
    assert FakeShim(held.tenants).answer["type"] == MessageType.HELLO_REPLY


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"kind": "vm", "id": UID}, "unknown kind of owner 'vm'"),
        ({"kind": "pod", "id": ""}, "a pod needs an id"),
        ({"kind": "pod", "id": 7}, "a pod needs an id"),
        ({"kind": "pod", "id": UID, "uid": -1}, "-1 is not a numeric user id"),
    ],
)
def test_wrong_orders_are_one_sentence(held: HeldAgent, order: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        held.call("hold", tenant=TRAIN, **order)


def test_root_of_a_container_cannot_hold_others_off_a_gpu(held: HeldAgent) -> None:
    hold(held)
    gpu = uuid_of(0)
    join_floor(held.tenants, gpu).close()  # a worker started by this machine's administrator may join
    held.put(pod_cgroup(UID, ID))
    with pytest.raises(WorkError, match="did not let this process join the LS gate"):
        join_floor(held.tenants, gpu)


def test_the_control_socket_is_not_where_tenants_look(held: HeldAgent) -> None:
    assert sorted(path.name for path in held.tenants.iterdir()) == ["agent.sock", "floor.sock"]
    assert (held.tenants / "agent.sock").stat().st_mode & 0o777 == 0o666
    assert (held.folder / "control.sock").stat().st_mode & 0o777 == 0o600
