"""Where the time of best-effort training goes that its host holds back: one step, each suspect by itself."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER

from cotenant.bench.colocation import Plan, ls_block, native_block, pair_block, parse_ls, parse_schemes
from cotenant.bench.colocation_rig import Program, Rig
from cotenant.node.config import TenantSpec

Found = dict[str, Any]
KINDS = ("train-resnet50", "train-transformer")
PARTS = ("no MPS", "MPS", "tenant", "no gate", "gate", "gate 400 us", "free MPS", "free gate")
ROUNDS = 4
ALONE_S = 0.4  # of which native_block does not count the first 0.15 s
BESIDE_S = 0.8


def cast(rig: Rig) -> dict[str, Program]:
    """The same program in each way; the last two launch from whichever cores they land on."""
    arguments = ["cotenant.bench.be_loads", rig.bench.backend]
    made = {
        "no MPS": rig.plain("plain", arguments),
        "MPS": rig.be_native("mps"),
        "tenant": rig.tenant(TenantSpec("tenant", mechanism=rig.mechanism), arguments),
        "gate": rig.be("be", below=True),
    }
    with unpinned(rig):
        made |= {"free MPS": rig.be_native("free-mps"), "free gate": rig.be("free-be", below=True)}
    return made


@contextmanager
def unpinned(rig: Rig) -> Iterator[None]:
    """What is started meanwhile launches from any core but that one."""
    core, rig.core = rig.core, {}
    try:
        yield
    finally:
        rig.core = core


def part(rig: Rig, made: dict[str, Program], name: str) -> float:
    """Units per second of one block alone; the floor is down all the time."""
    program = "gate" if name in ("no gate", "gate 400 us") else name
    rig.scheme("mps-plus" if name == "no gate" else "tidal", **({"interval_ns": 400_000} if "400" in name else {}))
    return native_block(made[program], ALONE_S - 0.15)


def waited_s(rig: Rig) -> float:
    return float(rig.tenants()["be"].get("gate_wait_s", 0.0))


def be_parts(found: Found) -> None:
    """Rates over `MPS` of the same round, medians and ranges.

    no MPS: what the native side is worth when it is no client of MPS.  tenant: the shim.  no gate: a best-effort launch
    without its rule.  gate: the same with the rule, which never holds it back but by the bound (gate 400 us: less so).
    free: the same on unpinned cores, and so how much of the spread is theirs.  beside: with LS, against the time that
    it leaves; what `gate` has and this lacks is lost when the floor falls.  wait: part of the time at the gate.
    """
    with Rig(GPU, together=TOGETHER, pinned=True) as rig:
        ls, made = rig.ls(), cast(rig)
        for program in (ls, *made.values()):
            program.wait_ready()
        rig.join(ls)
        for kind in KINDS:
            rig.scheme("mps-plus")
            for program in made.values():  # one by one: each times the algorithms that it may use
                program.ask(f"load {kind}", 60)
            found[kind] = one_kind(rig, ls, made)


def one_kind(rig: Rig, ls: Program, made: dict[str, Program]) -> dict[str, Any]:
    """Rounds of all parts, another one first each time."""
    plan = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=BESIDE_S)
    over: dict[str, list[float]] = {name: [] for name in (*PARTS, "beside", "beside stretch 8", "wait", "wait beside")}
    native: list[float] = []
    for number in range(ROUNDS):
        turn = number % len(PARTS)
        rates, waits = {}, {}
        for name in (*PARTS[turn:], *PARTS[:turn]):
            before, began = waited_s(rig), time.monotonic()
            rates[name] = part(rig, made, name)
            waits[name] = (waited_s(rig) - before) / (time.monotonic() - began)
        native.append(rates["MPS"])
        for name in PARTS:
            over[name].append(rates[name] / rates["MPS"])
        over["wait"].append(waits["gate"])
        alone = ls_block(ls, plan, number, raises=False)
        for name, stretch in (("beside", 4.0), ("beside stretch 8", 8.0)):
            rig.scheme("tidal", stretch=stretch)
            before, began = waited_s(rig), time.monotonic()
            _, rate = pair_block(ls, made["gate"], plan, number)
            over[name].append(rate / rates["MPS"] / (1 - alone["active_s"] / BESIDE_S))
            if name == "beside":
                over["wait beside"].append((waited_s(rig) - before) / (time.monotonic() - began))
    return {
        name: {"median": statistics.median(values), "range": [min(values), max(values)]}
        for name, values in (over | {"MPS, units a second": native}).items()
    }


HOST_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {"be_parts": (be_parts, 150)}
