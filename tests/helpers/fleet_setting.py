"""A controller with simulated nodes in virtual time that is killed and restarted, and a randomised test with all
faults."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_fleet import FakeExecutor, Killed, World

from cotenant.core.events import Kind
from cotenant.fleet.controller.controller import Controller, ControllerOptions
from cotenant.fleet.controller.planners import JobPlanner, Planner
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import pretend_nodes
from cotenant.policy.jobs.choice import JobPolicy

NODES = pretend_nodes(2, 2, "A100-40GB", 40 << 30, 6.0, 125 * 10**9)
PROFILES = ProfileBook()


class Setting:
    """A simulated World, and one controller after the other that uses it."""

    def __init__(
        self, folder: Path, *, seed: int = 0, policy: JobPolicy | None = None, lease_s: float = 2.0,
        keep_s: float = 6.0, early: bool = True, kill: float = 0.0, lag: float = 0.0, nodes: Any = NODES,
        parks: bool = False, planner: Callable[[], Planner] | None = None,
    ) -> None:  # fmt: skip
        """`planner` creates the planner of each controller, in place of that of the policy."""
        self.folder = folder
        self.world = World(nodes, seed)
        self.executor = FakeExecutor(self.world, kill=kill, lag=lag)
        self.policy = policy or JobPolicy(sticky=True)
        self.planner = planner or (lambda: JobPlanner(self.policy, PROFILES))
        self.kill, self.parks = 0.0, parks
        self.offset_ns = 0  # offset of the clock of the controller's machine
        self.settings = {"lease_s": lease_s, "keep_s": keep_s, "early": early, "grace_s": 1.0}
        self.restarts = -1
        self.boot()
        self.controller.begin()
        self.kill = kill

    def boot(self) -> None:
        """Start a controller with the present store and nodes."""
        clock = lambda: self.world.now_ns + self.offset_ns  # noqa: E731
        options = ControllerOptions(self.folder, **self.settings, monotonic_ns=clock)  # type: ignore[arg-type]
        self.controller = Controller(options, self.executor, self.planner())
        self.controller.store.rows("PRAGMA synchronous=OFF")
        if self.parks:
            self.controller.can_park = lambda node: True  # type: ignore[method-assign]
        commit = self.controller.store.commit

        def fragile() -> None:
            if self.world.random.random() < self.kill:
                raise Killed("before a commit")
            commit()
            if self.world.random.random() < self.kill:
                raise Killed("after a commit")

        self.controller.store.commit = fragile  # type: ignore[method-assign]
        self.restarts += 1

    def kill_controller(self) -> None:
        """Simulate a kill -9: uncommitted changes are lost and the lock is free; nothing else changes."""
        self.controller.store.close()
        self.controller.lock.release()

    def move(self, offset_s: float) -> None:
        """The machine of the controller dies. The next controller has the store, and a clock that began at another
        time."""
        self.kill_controller()
        with sqlite3.connect(self.folder / "fleet.db") as store:
            store.execute("UPDATE meta SET value='another machine' WHERE key='boot'")
        self.offset_ns = round(offset_s * 1e9)
        kill, self.kill = self.kill, 0.0
        self.boot()
        self.controller.begin()
        self.kill = kill

    def run(self, seconds: float, step_s: float = 0.1) -> None:
        """Simulate that many seconds, and restart the controller whenever it was killed."""
        end_ns = self.world.now_ns + round(seconds * 1e9)
        while self.world.now_ns < end_ns:
            try:
                self.controller.step()
            except Killed:
                self.kill_controller()
                self.world.advance(self.world.random.choice((0.1, 1.0)))
                while True:
                    try:
                        self.boot()
                        break
                    except Killed:
                        continue
            self.world.advance(step_s)

    def submit(self, *specs: JobSpec, arrivals: list[float] | None = None) -> list[str]:
        return self.controller.submit(list(specs), arrivals)

    def events(self, job: str) -> list[Kind]:
        rows = self.controller.store.rows(
            "SELECT kind FROM events JOIN jobs ON jobs.row = events.job WHERE id=? ORDER BY number", (job,)
        )
        return [Kind(row[0]) for row in rows]

    def state(self, job: str) -> str:
        return str(self.controller.store.rows("SELECT state FROM jobs WHERE id=?", (job,))[0][0])


def work(name: str, seconds: float, code: int = 0, *, attached: bool = True, **more: Any) -> JobSpec:
    """A job that works for `seconds`."""
    env = {"ATTACHED": "1"} if attached else {}
    return JobSpec(name, ("work", str(seconds), str(code)), env=env | more.pop("env", {}), duration_s=seconds, **more)


FAULTS = ("cut", "cut", "mute", "runner", "disk", "store", "move", "heal", "heal")


def drill(folder: Path, seed: int) -> None:
    """Run eight jobs on three nodes with six to ten faults: controllers killed at any step, nodes cut off or silent,
    orders that arrive when the situation has changed, full disks, runners killed, controllers on another machine."""
    draw = random.Random(5000 + seed)
    setting = Setting(
        folder, seed=seed, nodes=pretend_nodes(3, 2, "A100-40GB", 40 << 30, 6.0, 125 * 10**9),
        policy=JobPolicy(draw.choice(("fifo", "srtf", "las")), draw.choice(("tune", "proportional")), sticky=True),
        kill=draw.choice((0.0, 0.005, 0.02)), lag=draw.choice((0.0, 0.05, 0.5)), keep_s=draw.choice((4.0, 10.0)),
        early=draw.random() < 0.7, parks=draw.random() < 0.3,
    )  # fmt: skip
    world = setting.world
    setting.executor.soon, world.stuck = draw.choice((0.02, 0.3)), 0.2
    for node in world.offsets_ns:
        world.offsets_ns[node] = draw.choice((-900, -60, 0, 420, 1800)) * 10**9
    kill, setting.kill = setting.kill, 0.0
    submitted = setting.submit(
        *(work(f"j{i}", draw.choice((1.0, 3.0, 8.0)), gpus=float(draw.choice((1, 1, 2, 4))),
               attached=draw.random() < 0.7) for i in range(8))
    )  # fmt: skip
    setting.kill = setting.executor.kill = kill
    for _ in range(draw.randint(6, 10)):
        setting.run(draw.choice((0.3, 1.0, 3.0, 9.0)))
        _fault(setting, draw)
    _heal(setting)
    setting.kill = setting.executor.kill = setting.executor.lag = 0.0
    setting.run(110, step_s=0.2)
    assert {job: setting.state(job) for job in submitted} == dict.fromkeys(submitted, "finished")
    assert not world.running()
    assert set(world.finished) == set(submitted)
    for job in submitted:
        kinds = setting.events(job)
        assert (kinds[0], kinds[-1], kinds.count(Kind.FINISH)) == (Kind.ARRIVE, Kind.FINISH, 1)
        times = setting.controller.store.rows(
            "SELECT time_s FROM events JOIN jobs ON jobs.row = events.job WHERE id=? ORDER BY number", (job,)
        )
        assert times == sorted(times)
    setting.kill_controller()


def _heal(setting: Setting) -> None:
    world = setting.world
    world.unreachable, world.mute, world.full = set(), set(), set()
    setting.controller.store.rows(f"PRAGMA max_page_count={1 << 30}")


def _fault(setting: Setting, draw: random.Random) -> None:
    kind, world = draw.choice(FAULTS), setting.world
    node = draw.choice(sorted(world.attempts))
    if kind == "cut":
        world.unreachable.add(node)
    elif kind == "mute":
        world.mute.add(node)
    elif kind == "runner" and world.running():
        where, attempt = draw.choice(world.running())
        world.kill_runner(where, attempt.order["attempt"])
    elif kind == "disk":
        world.full.add(node)
    elif kind == "store":
        setting.controller.store.rows("PRAGMA max_page_count=1")
    elif kind == "move":
        setting.move(draw.choice((-3600.0, 0.0, 86400.0)))
    elif kind == "heal":
        _heal(setting)
