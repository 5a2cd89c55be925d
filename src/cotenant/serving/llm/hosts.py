"""The host that runs the models' programs as tenants of this node's agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc.client import ControlClient
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.agent.mechanisms.registry import AUTO
from cotenant.agent.mechanisms.slices import Slices
from cotenant.agent.mechanisms.time import Time
from cotenant.agent.tenants.host_memory import available_bytes, total_bytes
from cotenant.agent.tenants.launcher import program_environment
from cotenant.agent.tenants.registry import spec_to_dict
from cotenant.core.background import in_daemon_thread
from cotenant.core.errors import InputError, LostServerError, NothingToDoError, TakenNameError, WorkError
from cotenant.core.folders import agent_folder
from cotenant.core.temporary import temporary_folder
from cotenant.core.units import format_bytes
from cotenant.devices.registry import discover
from cotenant.serving.config.models import ModelEntry, ModelGpusEntry
from cotenant.serving.llm.keeper import Keeper, kill_group
from cotenant.serving.llm.plain_host import GpuRoom, last_line, spawn

LOG = logging.getLogger(__name__)

AGENT_WITHIN_S = 300.0  # long, because in a source checkout an agent first compiles the native libraries
AGENT_BACK_S = 30.0  # how long a command to an agent that has ended waits for the agent's restart
PARK_WITHIN_S = 10.0
# the number of software GPUs is stored in their state file, which outlives the processes that use it
NEW_STATE = "; COTENANT_SOFTGPU_STATE=FILE with a new file makes as many software GPUs as an agent of `serve` needs"
NAME_FREE_S = 10.0  # how long the name of a tenant that has ended may still be in use


class AgentHost:
    """A Host whose programs are tenants of an agent, which must run in `folder`. If `folder` is None, it is the agent
    in this user's folder; if none runs there, the host starts its own agent in a temporary folder, restarts it if it
    ends, and stops it in `close`.
    """

    def __init__(
        self, wanted: ModelGpusEntry, models: tuple[ModelEntry, ...], folder: Path | None, keeper: Keeper,
        host_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`host_bytes`: host memory for evicted models; None: as much as the agent allows."""
        self._wanted, self._models, self._keeper = wanted, models, keeper
        self._host_bytes, self._budget_bytes = host_bytes, 0
        self.moves = wanted.mechanism in (AUTO, Time.name, Slices.name)
        self._given = folder
        self.agent = folder or agent_folder()
        self._own: asyncio.subprocess.Process | None = None
        self._closing = contextlib.ExitStack()
        self._watch: asyncio.Task[None] | None = None
        self.gpus: list[GpuRoom] = []
        self._all_fit = False

    # ---- the agent ----

    async def start(self) -> None:
        try:
            status = await self._in_thread(lambda: self._call_once("status"))
        except WorkError:
            if self._given is not None:
                raise
            await self._start_own()
            status = await self._in_thread(lambda: self._call_once("status"))
        else:
            await self._check_names()
        if self._host_bytes is not None and (most := status["swap_memory"]["budget_bytes"]) < self._host_bytes:
            budget, wanted = format_bytes(most), format_bytes(self._host_bytes)
            LOG.warning("the agent has --swap-memory %s, so host_memory: %s cannot all be used", budget, wanted)
        found, count = status["gpus"], self._wanted.count
        whose = "the agent has"
        if names := self._visible():
            whose = "CUDA_VISIBLE_DEVICES leaves"
            found = [g for name in names for g in found if name in (g["uuid"], str(g["index"]))]
        if len(found) < count:
            more = NEW_STATE if self._wanted.model == "soft" else ""
            raise InputError(
                f"{whose} {len(found)} GPU{'s' * (len(found) != 1)}, not {count}{more}", field="gpus.count"
            )  # fmt: skip
        limit = self._wanted.memory
        rooms = [GpuRoom(int(g["index"]), g["uuid"], int(g["memory_bytes"]), g["name"]) for g in found[:count]]
        self.gpus = [replace(g, memory_bytes=min(limit or g.memory_bytes, g.memory_bytes)) for g in rooms]
        self._all_fit = count == 1 and sum(m.memory for m in self._models) <= self.gpus[0].memory_bytes
        large = [m.name for m in self._models if m.memory > (self._host_bytes or m.memory)]
        if large and self.moves and not self._all_fit:
            most = format_bytes(self._host_bytes or 0)
            LOG.warning("host_memory: %s is less than the memory of %s: stopped, never evicted", most, ", ".join(large))

    async def _check_names(self) -> None:
        """Raise InputError if a program at the agent has the name of a model, as the models of another server have. The
        name of a program that has just ended becomes free soon.
        """
        numbers = {model.name: number for number, model in enumerate(self._models)}
        deadline = time.monotonic() + NAME_FREE_S
        while True:
            rows = (await self._in_thread(lambda: self._call_once("list")))["tenants"] if numbers else []
            taken = next((row for row in rows if row["name"] in numbers and _is_in_use(row)), None)
            if taken is None:
                return
            if time.monotonic() > deadline:
                raise InputError(_taken(taken["name"], self.agent), field=f"models[{numbers[taken['name']]}].name")
            await asyncio.sleep(0.1)

    def _own_budget(self) -> int:
        """Host memory for the agent that the server starts. Raises InputError if the machine has less than wanted."""
        total, wanted = total_bytes(), self._host_bytes or 0
        if total and wanted > total:
            text = f"{format_bytes(wanted)} is more than the {format_bytes(total)} of this machine"
            raise InputError(text, field="host_memory")
        # The agent reserves the memory of all running programs, also of those on the GPU. So a small `host_memory`,
        # which limits only the evicted ones, must not lower what the agent may reserve.
        default = available_bytes() // 2
        return max(wanted, min(default, total) if total else default)

    async def _start_own(self) -> None:
        # determined once, because a restarted agent would count the memory of its tenants' programs as used
        self._budget_bytes = self._own_budget()
        self.agent = self._closing.enter_context(temporary_folder("agent", self._end_left_behind))
        await self._run_own()
        self._watch = asyncio.get_running_loop().create_task(self._keep_own())

    def _visible(self) -> list[str]:
        """Return the UUIDs and indices in CUDA_VISIBLE_DEVICES, in its order. Empty: all GPUs may be used."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        if text is None or self._wanted.model == "soft":
            return []
        if found := [name.strip() for name in text.split(",") if name.strip()]:
            return found
        raise InputError("CUDA_VISIBLE_DEVICES is empty, so no GPU may be used", field="gpus")

    def _own_gpus(self) -> list[str]:  # as in the option --gpus of the server's own agent
        return ["soft"] if self._wanted.model == "soft" else self._visible() or ["all"]

    def _end_left_behind(self, folder: Path) -> None:
        """End the MPS daemons of the agent of an earlier server that was killed."""
        with contextlib.suppress(InputError, WorkError):
            mechanisms.end_left_behind(folder, Use.TENANT, discover(self._own_gpus()))

    async def _run_own(self) -> None:
        gpus = ",".join(self._own_gpus())
        command = [sys.executable, "-m", "cotenant.agent", "--dir", str(self.agent), "--gpus", gpus]
        command += ["--swap-memory", f"{self._budget_bytes}B"]
        log = self.agent / "agent.log"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self._wanted.model == "soft":
            environment.setdefault("COTENANT_SOFTGPU_COUNT", str(self._wanted.count))
        self._own = await spawn(command, log, environment)
        self._keeper.begin(self._own.pid)
        deadline = time.monotonic() + AGENT_WITHIN_S
        while True:
            with contextlib.suppress(WorkError):
                await self._in_thread(lambda: self._call_once("status"))
                return
            if self._own.returncode is not None:
                self._keeper.ended(self._own.pid)
                said = last_line(log).replace("--gpus soft starts", "gpus: {model: soft} starts") or "it ended"
                raise WorkError(f"no agent could be started: {said}")
            if time.monotonic() > deadline:
                raise WorkError("the started agent does not answer")
            await asyncio.sleep(0.05)

    async def _keep_own(self) -> None:
        """Restart an agent that ends, in the same folder: the new agent takes over the old one's tenants."""
        while True:
            assert self._own is not None
            await self._own.wait()
            self._keeper.ended(self._own.pid)
            LOG.warning("the agent has ended: restarting it")
            while True:
                try:
                    await self._run_own()
                    break
                except (InputError, WorkError) as error:
                    LOG.error("%s; trying again in 5 s", error)
                    await asyncio.sleep(5.0)

    # ---- programs ----

    async def spawn(self, model: ModelEntry, gpu: int, command: list[str], log: Path) -> asyncio.subprocess.Process:
        effort, swaps = model.class_ == "best-effort", self.moves and not self._all_fit
        spec = TenantSpec(
            model.name, model.request, memory_bytes=model.memory, priority=model.priority,
            gpus=(self.gpus[gpu].uuid,), best_effort=effort, latency_sensitive=not effort,
            oversubscribe="swap" if swaps else "none",
            mechanism=await self._swapping(gpu) if swaps else self._wanted.mechanism,
        )  # fmt: skip
        client, answer = await self._in_thread(lambda: self._register(spec))
        try:
            environment = await self._in_thread(lambda: program_environment(answer))
            process = await spawn(command, log, environment)
            # before the agent is called: if the server is killed during the call, the keeper kills the program
            self._keeper.begin(process.pid)
            try:
                # if the process has already ended, the agent need not know of its start
                with contextlib.suppress(WorkError):
                    await self._in_thread(lambda: client.call("started", name=model.name, pid=process.pid))
            except BaseException:
                self._keeper.ended(process.pid)
                raise
            return process
        finally:
            client.close()

    async def _swapping(self, gpu: int) -> str:
        """Return the mechanism of models that do not all fit. The server decides which of them is evicted, so `auto`
        means time slices where they are available, while the agent would let such tenants take turns. An agent of an
        earlier version does not report what is available.
        """
        if self._wanted.mechanism != AUTO:
            return self._wanted.mechanism
        rows = (await self._in_thread(lambda: self._call_once("status")))["gpus"]
        return next((str(row.get("auto", AUTO)) for row in rows if row["uuid"] == self.gpus[gpu].uuid), AUTO)

    def _register(self, spec: TenantSpec) -> tuple[ControlClient, dict[str, Any]]:
        """Register the tenant, once the previous one of that name has ended."""
        deadline = time.monotonic() + NAME_FREE_S
        while True:
            client = self._connected()
            try:
                return client, client.call("register", tenant=spec_to_dict(spec), join=False, timeout_s=None)
            except (TakenNameError, WorkError) as error:
                client.close()
                if time.monotonic() > deadline and isinstance(error, TakenNameError):
                    raise WorkError(_taken(spec.name, self.agent)) from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            except InputError:
                client.close()
                raise

    async def evict(self, name: str) -> None:
        await self._order("park", name=name, timeout_s=PARK_WITHIN_S)

    async def bring(self, name: str) -> None:
        await self._order("resume", name=name, timeout_s=AGENT_BACK_S)

    async def exchange(self, name: str, leave: Sequence[str]) -> dict[str, float]:
        answer = await self._order("resume", name=name, instead_of=list(leave), timeout_s=AGENT_BACK_S)
        return {row["name"]: float(row["seconds"]) for row in answer.get("parked", [])}

    async def released(self, name: str) -> None:
        """See Host. The agent learns of the end of a program a little later; waits at most NAME_FREE_S."""
        deadline = time.monotonic() + NAME_FREE_S
        with contextlib.suppress(WorkError):
            while time.monotonic() < deadline:
                status = await self._in_thread(lambda: self._call_once("status"))
                if name not in status["swap_memory"]["promised_bytes"]:
                    return
                await asyncio.sleep(0.02)

    async def _order(self, op: str, **values: Any) -> dict[str, Any]:
        """Send the agent an idempotent command. Send it again if the agent has ended before its answer arrived. Returns
        the answer, which is empty if the command was carried out before its answer was lost.
        """

        def give() -> dict[str, Any]:
            deadline = time.monotonic() + AGENT_BACK_S
            again = False
            while True:
                try:
                    with self._connected() as client:
                        client.within(300.0)
                        return client.call(op, **values)
                except NothingToDoError:
                    if not again:
                        raise
                    return {}
                except LostServerError:
                    if time.monotonic() > deadline:
                        raise
                    again = True

        found: dict[str, Any] = await self._in_thread(give)
        return found

    def _connected(self) -> ControlClient:
        """Connect to the agent. Waits for an agent that restarts."""
        deadline = time.monotonic() + AGENT_BACK_S
        while True:
            try:
                return ControlClient(self.agent)
            except WorkError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _call_once(self, op: str) -> dict[str, Any]:
        with ControlClient(self.agent, timeout_s=10.0) as client:
            return client.call(op)

    async def _in_thread(self, work: Any) -> Any:
        return await in_daemon_thread(work)  # an agent that does not answer must not hold up the end of this process

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._own is not None and self._own.returncode is None:
            kill_group(self._own.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._own.wait(), 10.0)
            except TimeoutError:
                LOG.warning("the agent did not end: killing it")
            self._keeper.ended(self._own.pid)
        self._closing.close()


def _is_in_use(row: dict[str, Any]) -> bool:
    """Whether a tenant, as a row of the agent's list, has a program or waits for one that is being started."""
    lasting = row["declared"] or row["holder"]
    return not lasting or row["root_pid"] is not None or bool(row["pids"]) or row["state"] == "starting"


def _taken(name: str, agent: Path) -> str:
    return f"a program of another server or launcher is the tenant {name} of the agent in {agent}: rename the model"
