"""mps by protocol 3 against a stand-in for the daemon: namespaces, partitions, weights, and what its failures do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import wait_for
from mps_program import WHOLE_GPU, Program

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.mechanisms.base import WorkerShare
from cotenant.agent.mechanisms.mps import Mps
from cotenant.agent.mechanisms.mps_control import Abilities, Control, abilities
from cotenant.agent.mechanisms.mps_names import short_name
from cotenant.agent.mechanisms.mps_namespaces import mib_of
from cotenant.agent.mechanisms.proof import Place, Sms
from cotenant.core.errors import WorkError
from cotenant.devices.base import Gpu
from cotenant.softgpu import mps as mps_standin

GPUS = tuple(Gpu(f"GPU-11111111-2222-3333-4444-{digit * 12}", "RTX PRO 6000", 96 << 30, int(digit)) for digit in "01")
ONE, TWO = GPUS
GIB = 1 << 30


class Node:
    """A command of a release, and the mechanisms of agents that use it one after the other."""

    def __init__(self, folder: Path, release: int, sms: int) -> None:
        os.environ["MPS_STANDIN_RELEASE"] = str(release)
        os.environ["MPS_STANDIN_GPUS"] = ",".join(f"{gpu.uuid}={sms}" for gpu in GPUS)
        self.folder = folder
        self.command = str(mps_standin.install(folder))
        self.pipe = folder / "mps" / "pipe"
        self.mps = self.agent()

    def agent(self, gpus: tuple[Gpu, ...] = GPUS) -> Mps:
        self.mps = Mps(self.folder, gpus, self.command)
        return self.mps

    def order(self, *words: str) -> str:
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_PROTOCOL_VERSION": "3"}
        done = subprocess.run([self.command, *words], env=environment, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else f"refused: {done.stderr}"

    def spaces(self) -> dict[str, list[str]]:
        """Memory, percentage and priority of each namespace."""
        rows = [line.split(",") for line in self.order("namespace", "list", "--format=csv,noheader").splitlines()]
        return {f"{row[1]}/{row[0]}": row[3:6] for row in rows}

    def runs(self) -> bool:
        return (self.pipe / "control").exists()


@pytest.fixture
def node(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    for variable in ("MPS_STANDIN_RELEASE", "MPS_STANDIN_GPUS"):
        monkeypatch.setenv(variable, "")
    made: list[Node] = []

    def make(release: int = 615, sms: int = 188) -> Node:
        made.append(Node(short_folder, release, sms))
        return made[-1]

    yield make
    for one in made:
        one.mps.close()
        one.order("--quit")


@pytest.mark.parametrize(
    ("text", "mib"),
    [("unlimited", None), ("2048M", 2048), ("2G", 2048), ("2.00 GiB", 2048), ("2147483648", 2048), ("2097152K", 2048)],
)
def test_sizes_are_read_in_every_unit(text: str, mib: int | None) -> None:
    assert mib_of(text) == mib
    with pytest.raises(ValueError, match="is not a size"):
        mib_of(text + "?")


def test_what_a_command_can_do_is_read_from_its_help(node: Callable[..., Node]) -> None:
    assert abilities("/no/such/mps") == Abilities(0)
    assert abilities(node(595).command) == Abilities(2)
    assert abilities(node(615).command) == Abilities(3, multiuser=True)
    assert abilities(node(620).command) == Abilities(3, multiuser=True, shareable=True, weights=True)


def test_a_namespace_per_tenant_with_a_ceiling_that_it_cannot_raise(node: Callable[..., Node]) -> None:
    here = node()
    half = here.mps.grant(TenantSpec("half", limit=0.5, memory_bytes=10 * GIB), (ONE,)).environment
    quarter = here.mps.grant(TenantSpec("team/quarter-A", limit=0.25, priority=-1), (ONE, TWO)).environment
    space = short_name("team/quarter-A")
    assert here.spaces() == {
        "agent/default": ["256M", "1.00", "0"],
        "agent/half": ["10240M", "50.00", "0"],
        f"agent/{space}": ["unlimited", "25.00", "1"],
    }
    assert half["CUDA_VISIBLE_DEVICES"] == ONE.uuid
    assert quarter["CUDA_VISIBLE_DEVICES"] == f"{ONE.uuid},{TWO.uuid}", "several GPUs per tenant"
    hostile = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
    # half of 188 SMs, as measured elsewhere
    assert [Program(half | hostile).sms, Program(half).memory] == [94, 10 * GIB]
    assert Program(quarter | hostile).sms == 46
    outside = Program(half | {"CUDA_MPS_PIPE_DIRECTORY": str(here.pipe / "agent")})
    assert (outside.sms, outside.memory) == (2, 256 << 20), "the default namespace is no way out"
    here.mps.revoke("half", (ONE,))
    wait_for(lambda: "agent/half" not in here.spaces(), 60)
    assert Program(half).answer == WHOLE_GPU
    here.mps.revoke("team/quarter-A", (ONE, TWO))
    wait_for(lambda: not here.runs(), 60, "the daemon goes with its last tenant")


def test_names_fit_a_socket_and_stay_apart() -> None:
    assert short_name("night_train2") == "night_train2"
    assert {len(short_name(name)) for name in ("default", "agent", "a" * 17, "Team/A", "team/A")} == {14, 12, 16, 13}
    assert short_name("Team/A") != short_name("team/A")
    assert short_name("team/A") == short_name("team/A")
    for name in ("control", "uid_1000"):  # names of the daemon's sockets and of its own servers
        assert short_name(name) != name


def test_a_name_made_to_meet_another_tenants_namespace_gets_one_of_its_own(node: Callable[..., Node]) -> None:
    here = node()
    victim = here.mps.grant(TenantSpec("Payroll-service", limit=0.5), (ONE,)).environment
    sly = TenantSpec(short_name("Payroll-service"), limit=0.25)
    hostile = here.mps.grant(sly, (ONE,)).environment
    assert (Program(victim).sms, Program(hostile).sms) == (94, 46)
    assert here.mps.grant(sly, (ONE,)).environment == hostile, "a change keeps the place"
    here.mps.revoke(sly.name, (ONE,))
    wait_for(lambda: len(here.spaces()) == 2, 60)
    assert Program(victim).sms == 94


def test_what_was_prepared_for_another_share_is_not_granted(node: Callable[..., Node]) -> None:
    here = node()
    here.mps.grant(TenantSpec("a", limit=0.5), (ONE,))
    here.mps.prepare(TenantSpec("a", limit=0.25), (ONE,))
    here.mps.grant(TenantSpec("a", limit=0.75), (ONE,))
    assert here.spaces()["agent/a"][1] == "75.00"


def test_a_request_is_sms_of_its_own_read_back_in_chunks(node: Callable[..., Node]) -> None:
    here = node()  # 188 SMs are 23 chunks of 8 (and 4 SMs that no chunk has)
    given = here.mps.grant(TenantSpec("a", request=0.3, limit=1.0), (ONE,))
    assert given.sms == {ONE.uuid: Sms(reserved=56, at_most=56)}, "30 % of 23 chunks are 7"
    assert given.remarks == ()
    program = Program(given.environment, ONE.uuid)
    assert program.sms == 56
    wait_for(lambda: ONE.uuid in here.order("client", "list"), 60)
    late = here.mps.grant(TenantSpec("b", request=0.3, limit=0.5), (ONE,))
    assert late.sms == {ONE.uuid: Sms(reserved=0, at_most=95)}
    assert late.remarks[0].startswith("the tenant's request of 30% is not enforced, no SMs are reserved:")
    assert "the device has active clients; MPS reserves SMs only on a GPU without programs" in late.remarks[0]
    other = here.mps.grant(TenantSpec("c", request=0.25), (TWO,))
    assert other.sms == {TWO.uuid: Sms(48, 48)}
    program.close()
    for name in ("a", "b", "c"):
        here.mps.revoke(name, (ONE,))
    wait_for(lambda: not here.runs(), 60)


def test_a_changed_share_is_set_at_once_and_says_what_waits_for_the_next_process(node: Callable[..., Node]) -> None:
    here = node()
    spec = TenantSpec("a", limit=0.5, memory_bytes=GIB)
    before = Program(here.mps.grant(spec, (ONE,)).environment)
    larger = TenantSpec("a", limit=0.75, memory_bytes=2 * GIB)
    here.mps.grant(larger, (ONE,))
    assert here.spaces()["agent/a"] == ["2048M", "75.00", "0"]
    assert here.mps.resize(larger, (ONE,)) == "memory at once, the SM percentage for processes started from now on"
    assert (before.sms, Program(here.mps.grant(larger, (ONE,)).environment).sms) == (94, 140)


def test_release_620_lends_sms_and_weighs_servers(node: Callable[..., Node]) -> None:
    here = node(620)
    given = here.mps.grant(TenantSpec("a", request=0.3, limit=0.6), (ONE,))
    assert given.sms == {ONE.uuid: Sms(reserved=56, at_most=114)}
    assert Program(given.environment, ONE.uuid).sms == 104, "what it may borrow: 13 chunks"
    heavy = here.mps.grant(TenantSpec("heavy", weight=3.0), (TWO,))
    assert heavy.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(here.pipe / "heavy" / "tenant")
    calls = (here.pipe / "calls").read_text()
    assert "server set heavy --timeslice-pct=75\n" in calls
    assert "server set agent --timeslice-pct=25\n" in calls
    lighter = TenantSpec("heavy", weight=1.0)
    here.mps.grant(lighter, (TWO,))
    assert here.mps.resize(lighter, (TWO,)).startswith("memory and weight at once, the SM percentage for processes")
    assert "server set heavy --timeslice-pct=50\n" in (here.pipe / "calls").read_text()


def test_reserved_sms_of_an_ended_tenant_are_free_once_the_gpu_has_no_programs(node: Callable[..., Node]) -> None:
    """The daemon refuses to delete a partition while the GPU has clients, also if they are of other tenants."""
    here = node()

    def reserved() -> int:
        return here.order("sm-partition", "list", "--format=csv,noheader").count("created")

    again = [here.mps.grant(TenantSpec(name, request=0.3), (ONE,)) for name in ("ended", "again")][1]
    beside = Program(here.mps.grant(TenantSpec("beside"), (ONE,)).environment, ONE.uuid)
    wait_for(lambda: ONE.uuid in here.order("client", "list"), 60)
    for name in ("ended", "again"):
        here.mps.revoke(name, (ONE,))
    wait_for(lambda: set(here.spaces()) == {"agent/default", "agent/beside"}, 60)
    here.mps.look()
    assert reserved() == 2
    assert here.mps.grant(TenantSpec("again", request=0.3), (ONE,)).sms == again.sms, "it gets its SMs back"
    beside.close()
    wait_for(lambda: ONE.uuid not in here.order("client", "list"), 60)
    here.mps.look()
    assert reserved() == 1


@pytest.mark.parametrize(("release", "why"), [(615, "weights from driver 620 on"), (620, "when the tenant starts")])
def test_a_weight_without_effect_is_said(node: Callable[..., Node], release: int, why: str) -> None:
    here = node(release)
    assert here.mps.grant(TenantSpec("a"), (ONE,)).remarks == ()
    (remark,) = here.mps.grant(TenantSpec("a", weight=2.0), (ONE,)).remarks
    assert remark.startswith("the tenant's weight of 2 has no effect: ")
    assert why in remark


def test_a_server_is_made_while_programs_run(node: Callable[..., Node]) -> None:
    """The stand-in's new server held the connection of the command, which then never ended."""
    here = node(620)
    given = here.mps.grant(TenantSpec("a"), (ONE,)).environment
    programs = [Program(given, ONE.uuid) for _ in range(3)]
    heavy = here.mps.grant(TenantSpec("heavy", weight=3.0), (ONE,)).environment
    assert [program.sms for program in (*programs, Program(heavy, ONE.uuid))] == [188] * 4


def test_a_new_agent_keeps_what_its_tenants_have_and_removes_the_rest(node: Callable[..., Node]) -> None:
    here = node()
    kept = here.mps.grant(TenantSpec("kept", request=0.25, limit=0.5), (ONE,))
    gone = here.mps.grant(TenantSpec("gone", request=0.25), (TWO,))
    program, left = Program(kept.environment, ONE.uuid), Program(gone.environment)
    here.agent()  # start a new agent; the first one was killed
    again = here.mps.grant(TenantSpec("kept", request=0.25, limit=0.5), (ONE,))
    here.mps.taken_over()
    here.mps.taken_over()
    assert again == kept
    assert set(here.spaces()) == {"agent/default", "agent/kept"}
    assert here.order("sm-partition", "list", "--format=csv,noheader").count("created") == 1
    assert left.hear() == "error 810"
    assert (here.pipe / "calls").read_text().count("start") == 1, "one daemon"
    program.close()
    here.agent().taken_over()
    assert not here.runs(), "no tenant: nothing stays"


def test_a_server_that_vanishes_after_its_creation_is_no_start(node: Callable[..., Node]) -> None:
    """Else its programs would run past MPS, with the whole GPU and no error."""
    here = node()
    unknown = Gpu("GPU-99999999-2222-3333-4444-555555555555", "?", GIB, 9)
    with pytest.raises(WorkError, match="ended at once; the driver may not know these"):
        here.agent((unknown,)).grant(TenantSpec("a"), (unknown,))
    wait_for(lambda: not here.runs(), 60)


def test_workers_on_several_gpus_share_a_server_that_was_given_none(node: Callable[..., Node]) -> None:
    here = node()
    made = here.agent(())
    for worker, gpu in (("w0", ONE), ("w1", TWO)):
        environment = made.worker_environment(WorkerShare(worker, limit=0.5), gpu)
        program = Program(environment, gpu.uuid)
        assert (environment["CUDA_VISIBLE_DEVICES"], program.sms) == (gpu.uuid, 94)
    made.worker_gone("w0")
    wait_for(lambda: set(here.spaces()) == {"agent/default", "agent/w1"}, 60)


def test_a_list_with_other_columns_is_a_sentence(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    here = node()
    here.mps.grant(TenantSpec("a"), (ONE,))
    monkeypatch.setattr(Control, "rows", lambda *_: [["7", "agent"]])
    with pytest.raises(WorkError, match="the control daemon's list cannot be parsed"):
        here.mps.look()


def test_limits_that_others_change_are_set_again_and_named(node: Callable[..., Node]) -> None:
    here = node()
    a, b = (here.mps.grant(TenantSpec(name, limit=0.5, memory_bytes=GIB), (ONE,)) for name in "ab")
    look = here.mps.look()
    assert look is not None
    assert (look.places, look.put_right) == ({"a": Place("agent", "a"), "b": Place("agent", "b")}, {})
    here.order("namespace", "set", "a", "--server=agent", "--active-thread-percentage=100")
    here.order("namespace", "delete", "b", "--server=agent", "--force")
    look = here.mps.look()
    assert look is not None
    assert look.put_right == {
        "a": "the tenant's namespace a of server agent had 100.00 % of the SMs and 1024M of memory: it was restored",
        "b": "the tenant's namespace b of server agent was gone: it was restored",
    }
    assert (Program(a.environment).sms, Program(b.environment).sms) == (94, 94)
    server = here.mps.server(ONE.uuid)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: "agent" not in here.order("server", "list", "--format=csv,noheader"), 60)
    assert Program(a.environment).answer == WHOLE_GPU
    for what in ("server", "daemon"):
        look = here.mps.look()
        assert look is not None
        assert set(look.put_right) == {"a", "b"}
        assert Program(a.environment).sms == 94, f"a {what} that died is made again"
        here.order("--quit")


def test_an_older_daemon_that_serves_a_tenant_is_kept(node: Callable[..., Node]) -> None:
    here = node(595)
    first = here.mps.grant(TenantSpec("a"), (ONE,))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in first.environment
    here = node(615)
    assert here.mps.grant(TenantSpec("a"), (ONE,)) == first
    assert str(here.pipe) in here.mps.grant(TenantSpec("b"), (TWO,)).environment["CUDA_MPS_PIPE_DIRECTORY"]


def test_the_standin_fails_as_the_manual_says(node: Callable[..., Node]) -> None:
    here = node()
    given = here.mps.grant(TenantSpec("a", limit=0.5, memory_bytes=GIB), (ONE,)).environment
    unseen = Program(given | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M,GPU-unseen=1G"})
    assert unseen.memory == 0, "one entry for a GPU that it does not see drops every limit"
    assert Program(given | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M"}).memory == 512 << 20
    assert Program(given | {"CUDA_MPS_PIPE_DIRECTORY": str(here.pipe)}).sms == 188, "the main door has no limits"
    assert Program(given | {"CUDA_MPS_PIPE_DIRECTORY": str(here.pipe / "typo")}).answer == WHOLE_GPU
    assert "active clients" in here.order("namespace", "delete", "a", "--server=agent")
    assert "already exists" in here.order("namespace", "create", "a", "--server=agent")
    assert "unknown option '--shareable'" in here.order(
        "sm-partition", "create", "p", "--server=agent", f"--device={TWO.uuid}", "--chunks=1", "--shareable=true"
    )
    here.order("standin", "fault", "agent")
    assert Program(given).answer == "error 807"
    here.order("client", "terminate", str(os.getpid()))
    assert unseen.hear() == "error 810"
