"""`cotenant fleet up`: check all options, then run the controller in the foreground or background."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.core import logs
from cotenant.core.errors import InputError, WorkError
from cotenant.core.units import counted, parse_memory, parse_seconds

if TYPE_CHECKING:
    from cotenant.fleet.controller.planners import Planner
    from cotenant.fleet.session import FleetOptions

LOG = logging.getLogger(__name__)
LOG_FILE = "controller.log"
PATIENCE_S = 120.0
LEAST_FREE_BYTES = 1 << 20
SILENCE_S = 5.0  # if the controller has printed nothing for this long, the command prints a notice
STANDBY = "another controller leads this fleet; this one takes over when that one ends"


def start(given: dict[str, Any]) -> None:
    """Start a fleet with the options of the command line. Raises InputError or WorkError before anything runs."""
    from cotenant.core.folders import fleet_folder
    from cotenant.fleet.client import FleetClient

    folder = Path(given["folder"] or fleet_folder()).absolute()
    options = options_of(given, folder)
    if options.gpu == "pretend" and given["nodes"] is None and given["cluster"] is given["address"] is None:
        LOG.info("this machine has no GPU; one pretended node takes its place (see --nodes)")
    if given["foreground"]:
        logs.configure(given["log_format"], given["log_level"])
        _serve(options, given["json_"])
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = (folder / LOG_FILE).open("ab")
    except OSError as error:
        raise WorkError(f"{folder}: cannot be used: {(error.strerror or str(error)).lower()}") from None
    with log:
        begins = log.tell()
        words = [word for word in sys.argv[1:] if word != "--json"]
        child = subprocess.Popen(
            [sys.executable, "-m", "cotenant.cli.main", *words, "--foreground", "--json", "--fleet", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    deadline, said = time.monotonic() + PATIENCE_S, False
    while time.monotonic() < deadline:
        if not said and time.monotonic() > deadline - PATIENCE_S + SILENCE_S:
            LOG.info(
                "still starting: Ray takes some seconds, the first start on a machine about a minute (compilation)"
            )
            said = True
        if child.poll() is not None:
            _relay(folder / LOG_FILE, begins, child.returncode)
        if _waits(folder / LOG_FILE, begins):
            print(json.dumps({"standby": child.pid}) if given["json_"] else f"{STANDBY} (pid {child.pid})")
            return
        try:
            with FleetClient(folder, 10.0) as client:
                answer = client.call("status")
            if answer["pid"] == child.pid:
                _say(answer, given["json_"])
                return
        except WorkError:
            pass
        time.sleep(0.05)
    child.terminate()
    raise WorkError(f"the controller was not ready within {PATIENCE_S:g} s; see {folder / LOG_FILE}")


def _waits(log: Path, begins: int) -> bool:
    """Whether the controller that writes this log is still waiting to lead."""
    with log.open("rb") as file:
        file.seek(begins)
        return STANDBY.encode() in file.read()


def _relay(log: Path, begins: int, code: int) -> None:
    """Raise the error of this command after the controller has ended at once: the last line of its log."""
    with log.open("rb") as file:
        file.seek(begins)
        said = file.read().decode(errors="replace").strip().splitlines()
    if not said and shutil.disk_usage(log.parent).free < LEAST_FREE_BYTES:
        raise WorkError(f"{log.parent}: the disk is full")
    text = (said[-1] if said else f"the controller ended with exit code {code}").removeprefix("cotenant: ")
    raise (InputError(text) if code == 2 else WorkError(text))


def _say(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    gpus = sum(node["gpus"] for node in answer["nodes"])
    jobs = answer["jobs"]["queued"] + answer["jobs"]["running"]
    more = f"; {counted(jobs, 'job')} of an earlier run {'continues' if jobs == 1 else 'continue'}" if jobs else ""
    print(
        f"the fleet is up in {answer['folder']}: {counted(len(answer['nodes']), 'node')} with "
        f"{counted(gpus, 'GPU')} ({answer['executor']}), {answer['policy']['label']}{more}"
    )
    print("next: cotenant submit -- CMD..., cotenant queue, cotenant fleet down")


def options_of(given: dict[str, Any], folder: Path) -> FleetOptions:
    """Return the FleetOptions of the command line; InputError names the wrong option."""
    import dataclasses

    from cotenant.cli.agent import read_token
    from cotenant.fleet.controller.elastic import ElasticPlanner
    from cotenant.fleet.controller.profiles import ProfileBook
    from cotenant.fleet.session import FleetOptions, node_specs
    from cotenant.observability.http import parse_address
    from cotenant.policy.elastic.registry import ELASTIC
    from cotenant.policy.jobs.choice import JobPolicy
    from cotenant.profiles.training.tables import load_profiles

    executor = _executor(given)
    if given["http"] is not None:
        parse_address(given["http"], "--http")
    times = {}
    for name, least in (("lease", 0.05), ("keep", 1.0), ("grace", 0.0)):
        times[name] = parse_seconds(given[name], name)
        if times[name] < least:
            raise InputError(f"{given[name]!r} is less than {least:g} s", field=name)
    port = given["port"]
    if port is not None and not 0 <= port < 65536:
        raise InputError(f"must be a port between 0 and 65535, not {port}", field="port")
    nodes, kind = given["nodes"], "pretend"
    if given["agent"]:
        kind = "agent"
    elif nodes is None and given["cluster"] is None:
        kind, nodes = _here() if given["address"] is None else ("machines", None)
    options = FleetOptions(
        folder=folder,
        store=given["store"],
        nodes=1 if nodes is None else nodes,
        gpus_per_node=given["gpus_per_node"],
        cpus_per_node=given["cpus_per_node"],
        memory_per_node=None if given["memory_per_node"] is None
        else parse_memory(given["memory_per_node"], "memory-per-node"),
        gpu=kind,
        gpu_model=given["gpu"],
        agents=tuple(given["agent"] or ()),
        cluster=_cluster(given["cluster"], given["gpu"]),
        executor=executor,
        address=given["address"],
        early=given["early"],
        policy=JobPolicy(given["ordering"], given["allotment"], given["placement"], given["sticky"]),
        profiles=given["profiles"],
        default_profile=given["default_profile"],
        port=port,
        http=given["http"],
        http_token=read_token(given["http_token"], "--http-token"),
        lease_s=times["lease"],
        keep_s=times["keep"],
        grace_s=times["grace"],
    )  # fmt: skip
    if kind != "machines":
        node_specs(options)
    if given["policy"] in ELASTIC:
        planner = ElasticPlanner(given["policy"], given["profiles"], given["default_profile"])
        return dataclasses.replace(options, planner=planner, profiles=None, default_profile=None)
    ProfileBook(load_profiles(given["profiles"]), given["default_profile"])
    if given["policy"] is not None:
        options = dataclasses.replace(options, planner=_partition_planner(given["policy"], options))
    return options


def _partition_planner(name: str, options: FleetOptions) -> Planner:
    """Return the named partition policy, with the mechanism that can enforce slices on this fleet's GPUs."""
    from cotenant.agent.mechanisms import registry as mechanisms
    from cotenant.agent.mechanisms.base import Use
    from cotenant.agent.mechanisms.mig import Mig
    from cotenant.devices.registry import device
    from cotenant.fleet.controller.miso import MisoPlanner
    from cotenant.fleet.nodes import PRETEND
    from cotenant.fleet.session import node_specs
    from cotenant.policy.elastic.registry import ELASTIC

    if name != "miso":
        known = ", ".join(x for x, entry in ELASTIC.items() if not entry.packs)
        raise InputError(f"a fleet has no policy {name!r}; it has miso, {known}", field="policy")
    gpus = [gpu for node in node_specs(options) for gpu in node.gpus]
    if any(gpu.instances for gpu in gpus):  # on a GPU in MIG mode, slices are MIG instances
        return MisoPlanner(mechanism=Mig.name)
    together = all(gpu.kind != PRETEND and device(gpu.kind).mps_control() for gpu in gpus)
    return MisoPlanner(mechanism=mechanisms.choose(Use.JOB, concurrent=together))


def _executor(given: dict[str, Any]) -> str:
    wanted = given["executor"]
    if wanted not in ("auto", "ray", "local"):
        raise InputError(f"must be auto, ray or local, not {wanted!r}", field="executor")
    from importlib.util import find_spec

    there = find_spec("ray") is not None
    if (wanted == "ray" or given["address"] is not None) and not there:
        raise InputError("Ray is not installed; install cotenant[ray], or use --executor local", field="executor")
    if wanted == "local" and given["address"] is not None:
        raise InputError("the local executor joins no cluster: leave out --address", field="address")
    return "ray" if wanted == "ray" or given["address"] is not None or (wanted == "auto" and there) else "local"


def _here() -> tuple[str, int | None]:
    """Return the kind of the fleet's nodes, and how many to pretend: ("real", None) if this machine has GPUs, otherwise
    ("pretend", 1).
    """
    from cotenant.devices.registry import discover

    try:
        discover(["all"])
    except WorkError:
        return "pretend", 1
    return "real", None


def _cluster(text: str | None, gpu: str) -> Any:
    if text is None:
        return None
    from cotenant.cli.trace_options import ClusterOptions

    return ClusterOptions(cluster=text, gpu=gpu).parse()


def _serve(options: FleetOptions, as_json: bool) -> None:
    """Run the fleet's controller until `fleet down` or a signal stops it."""
    import signal

    from cotenant.fleet.session import Fleet

    fleet = Fleet(options, waiting=lambda: LOG.info(STANDBY))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: fleet.controller.stop())
    fleet.start()
    if not as_json:
        _say(fleet.status(), False)
    fleet.join()


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait for a process to end; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        from cotenant.agent.processes import is_zombie

        if is_zombie(pid):
            return True
        time.sleep(0.05)
    return False
