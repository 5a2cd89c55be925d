"""`cotenant simulate --agent FILE`: the tenants of an agent's file on one GPU, in virtual time."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.fitting import plain_table, print_whole
from cotenant.core.errors import InputError, unknown_name
from cotenant.core.units import format_bytes, format_seconds, parse_memory, parse_seconds, parse_time

if TYPE_CHECKING:
    from cotenant.agent.config.files import AgentConfig, TenantSpec
    from cotenant.sim.shares.engine import Load
    from cotenant.sim.shares.moves import Card

app = typer.Typer(add_completion=False)
MARK = "--agent"
GPU = "0"
ONE_GIB = 1 << 30


def wanted(args: list[str]) -> bool:
    """Whether the arguments of `simulate` name an agent's file."""
    return any(a.partition("=")[0] == MARK for a in args)


@app.command()
def simulate(
    agent: Annotated[str, typer.Option(help="The agent's file: FILE.yaml or gemini:FILE.")],
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=KERNEL[:BUSY/PAUSE], such as train=2ms:30ms/70ms (default: 2ms, always busy). Repeatable."
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="Memory of the GPU. Each tenant holds its `memory`; tenants with `oversubscribe` are swapped when not "
            "all fit (default: all fit)."
        ),
    ] = None,
    duration: Annotated[str, typer.Option(help="Duration in virtual time.")] = "60s",
    mechanism: Annotated[
        str | None, typer.Option(metavar="time|slices", help="Mechanism: time or slices (default: the file's).")
    ] = None,
    discipline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Rule that chooses the next tenant (default: the file's).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Simulate what each tenant of an agent's file gets of one GPU, with the agent's own broker and policy."""
    from cotenant.agent.config.schema import load as read

    seconds = parse_seconds(duration, "--duration")
    if not 0 < seconds <= 86_400:
        raise InputError(f"must be above 0 and at most one day, not {seconds:g} s", field="--duration")
    config = read(agent)
    if mechanism not in (None, "time", "slices"):
        why = ": under mps no tenant waits for another" if mechanism == "mps" else ""
        raise InputError(f"must be time or slices, not {mechanism!r}{why}", field="--mechanism")
    specs, by = _simulated(config, agent, mechanism)
    if by == "slices" and card is not None:
        raise InputError("needs turns, between which the agent swaps memory: add --mechanism time", field="--card")
    if by == "slices" and discipline is not None:
        raise InputError("needs turns: add --mechanism time", field="--discipline")
    if discipline is not None:
        config = _with_discipline(config, discipline)
    loads = _loads(specs, load or [], config)
    if by == "slices":
        answer = sliced(loads, {spec.name: work_kind(spec) for spec in specs}, seconds)
    else:
        answer = outcome(config, loads, _card(specs, card, config), seconds)
    if as_json:
        print(json.dumps(answer))
    elif by == "slices":
        _show_sliced(answer)
    else:
        _show(answer)


def _with_discipline(config: AgentConfig, name: str) -> AgentConfig:
    from cotenant.policy.shares import DISCIPLINES

    if name not in (known := [each.name for each in DISCIPLINES]):
        raise unknown_name("discipline", name, known, "--discipline")
    return dataclasses.replace(config, quota=dataclasses.replace(config.quota, discipline=name))


def work_kind(spec: TenantSpec) -> str:
    """Return the class of a tenant's work: latency-sensitive, best-effort or normal."""
    return "best-effort" if spec.best_effort else "latency-sensitive" if spec.latency_sensitive else "normal"


def sliced(loads: list[Load], classes: dict[str, str], seconds: float) -> dict[str, Any]:
    """Simulate the loads for `seconds` of virtual time under hardware time slices.

    For each tenant: `work_share`, the fraction of the time in which its kernels ran; `least` and `most`, the extremes
    of that fraction over windows of 2 s; and for loads with pauses `wait_ms_p50` and `wait_ms_p99`, how much longer a
    burst took than with the tenant alone.
    """
    from cotenant.policy.shares.slice_settings import SliceSettings
    from cotenant.sim.shares.slices import SliceEngine

    end_ns, window_ns = int(seconds * 1e9), min(int(seconds * 1e9), SliceSettings.window_ns)
    engine = SliceEngine(loads, classes=classes)
    result = engine.run(end_ns)
    rows = []
    for x in loads:
        windows = result.windows(x.name, window_ns)
        waits = sorted((end - came - (x.busy_ns or 0)) / 1e6 for name, came, end in result.bursts if name == x.name)
        rows.append({
            "name": x.name, "request": x.share.request, "limit": x.share.limit,
            "work_share": result.worked_ns(x.name, 0, end_ns) / end_ns, "least": min(windows), "most": max(windows),
            "wait_ms_p50": waits[len(waits) // 2] if waits else None,
            "wait_ms_p99": waits[len(waits) * 99 // 100] if waits else None,
        })  # fmt: skip
    return {
        "mechanism": "slices", "seconds": seconds, "window_s": window_ns / 1e9, "tenants": rows,
        "work_share": sum(row["work_share"] for row in rows), "switches": result.switches, "orders": len(result.orders),
    }  # fmt: skip


def outcome(config: AgentConfig, loads: list[Load], card: Card | None, seconds: float) -> dict[str, Any]:
    """Simulate the loads for `seconds` of virtual time. A tenant runs kernels only in a turn, a time slice that the
    agent grants to one tenant at a time.

    For each tenant: `turn_share` and `work_share` (fractions of the time in which it had the turn, and in which its
    kernels ran), `turns`, `longest_wait_s` (for a turn, including one that did not come), `moves` (how often memory was
    moved between GPU and host so that the tenant's turn could begin) and `moved_bytes` (bytes of these moves, in both
    directions). `moving_share` is the fraction of the time spent on moves. Raises InputError if a tenant does not fit
    on the card.
    """
    from cotenant.sim.shares.engine import TokenEngine
    from cotenant.sim.shares.moves import MovingTokenEngine

    end_ns = int(seconds * 1e9)
    engine = TokenEngine(loads, config.quota) if card is None else MovingTokenEngine(loads, config.quota, card)
    try:
        result = engine.run(end_ns)
    except ValueError as error:
        raise InputError(str(error), field="--card") from None
    moves = engine.moves if isinstance(engine, MovingTokenEngine) else []
    worked = {x.name: engine.worked_ns(x.name) for x in loads}
    rows = []
    for x in loads:
        turns = [t for t in result.turns if t.tenant == x.name]
        its = [m for m in moves if m.tenant == x.name]
        waits_ns = [engine.waits_ns(x.name, GPU), *(t.waited_ns for t in turns)]
        rows.append({
            "name": x.name, "request": x.share.request, "limit": x.share.limit,
            "turn_share": result.held_ns(x.name, 0, end_ns) / end_ns, "work_share": worked[x.name] / end_ns,
            "turns": len(turns), "longest_wait_s": max(waits_ns) / 1e9,
            "moves": len(its), "moved_bytes": sum(m.in_bytes + m.out_bytes for m in its),
        })  # fmt: skip
    moving = engine.moving_ns(0, end_ns) / end_ns if isinstance(engine, MovingTokenEngine) else 0.0
    return {
        "discipline": config.quota.discipline, "seconds": seconds, "tenants": rows,
        "work_share": sum(worked.values()) / end_ns, "moving_share": moving,
    }  # fmt: skip


def _simulated(config: AgentConfig, source: str, given: str | None) -> tuple[list[TenantSpec], str]:
    """Return the file's tenants and the one mechanism that all of them use."""
    from cotenant.agent.mechanisms import registry as mechanisms
    from cotenant.agent.mechanisms.base import Use

    if not config.tenants:
        raise InputError("the file declares no tenants", file=source, field="tenants")
    by = given or config.tenants[0].mechanism
    by = mechanisms.DEFAULT if by == mechanisms.AUTO else by
    for spec in config.tenants:
        if max(spec.gpu_count, len(spec.gpus)) > 1:
            raise InputError(
                f"{spec.name} has several GPUs; only one GPU can be simulated", file=source, field="tenants"
            )
        if (given or spec.mechanism) not in (by, mechanisms.AUTO) or not (
            by == "slices" or mechanisms.find(by, Use.TENANT, field="tenants").capabilities.gated
        ):
            raise InputError(
                f"{spec.name} takes no turns: its mechanism is {spec.mechanism}", file=source, field="tenants"
            )
    requests = sum(spec.request for spec in config.tenants)
    if requests > 1.0 + 1e-9:
        raise InputError(f"the requests of one GPU add up to {requests:.0%}", file=source, field="tenants")
    return list(config.tenants), by


def _loads(specs: list[TenantSpec], given: list[str], config: AgentConfig) -> list[Load]:
    from cotenant.policy.shares import Share
    from cotenant.sim.shares.engine import Load

    said: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, work = text.partition("=")
        if not equals or not name or name not in {spec.name for spec in specs}:
            known = ", ".join(spec.name for spec in specs)
            said_so = f"{text!r} is not NAME=KERNEL[:BUSY/PAUSE] with a tenant of the file: {known}"
            raise InputError(said_so, field="--load")
        if name in said:
            raise InputError(f"{name} has two loads", field="--load")
        kernel, cycle, rest = work.partition(":")
        said[name] = {"kernel_ns": _time_ns(kernel, text)}
        if cycle:
            busy, slash, pause = rest.partition("/")
            said[name]["busy_ns"] = _time_ns(busy, text)
            said[name]["pause_ns"] = _time_ns(pause, text) if slash else 0
    return [
        Load(
            spec.name, Share(spec.request, spec.limit, spec.priority, spec.weight), (GPU,),
            idle_release_ns=config.idle_release_ns, **said.get(spec.name, {}),
        )
        for spec in specs
    ]  # fmt: skip


def _time_ns(text: str, load: str) -> int:
    try:
        seconds = parse_time(text)
    except InputError as error:
        form = f"{load!r} is not NAME=KERNEL[:BUSY/PAUSE], such as train=2ms:30ms/70ms"
        raise InputError(f"{form}: {error.message}" if text else form, field="--load") from None
    if not 1e-6 <= seconds <= 3600:
        raise InputError(f"{text!r} in {load!r} must be between 1 us and 1 h", field="--load")
    return int(seconds * 1e9)


def _card(specs: list[TenantSpec], memory: str | None, config: AgentConfig) -> Card | None:
    """Return the GPU's memory for tenants that can be swapped, and these tenants. The memory of all other tenants is
    subtracted.
    """
    from cotenant.policy.residency import ResidencySettings
    from cotenant.sim.shares.moves import Card

    if memory is None:
        return None
    lacking = [spec.name for spec in specs if spec.memory_bytes is None]
    if lacking:
        raise InputError(f"with --card every tenant of the file needs `memory`; {lacking[0]} has none", field="--card")
    stays = sum(spec.memory_bytes or 0 for spec in specs if spec.oversubscribe == "none")
    room = parse_memory(memory, "--card") - stays
    if room <= 0:
        raise InputError(
            f"tenants that cannot be swapped hold {format_bytes(stays)}, so no memory is left for others: give a "
            "larger card",
            field="--card",
        )
    moving = {spec.name: spec.memory_bytes or 0 for spec in specs if spec.oversubscribe != "none"}
    return Card(room, moving, ResidencySettings(config.most_moving))


def _show_sliced(answer: dict[str, Any]) -> None:
    from rich.console import Console

    window = f"in {answer['window_s']:g} s"
    heads = ["tenant", "request", "limit", "GPU time", f"least {window}", f"most {window}"]
    paused = any(row["wait_ms_p50"] is not None for row in answer["tenants"])
    table = plain_table(None, heads + (["burst delay p50", "delay p99"] if paused else []), left=("tenant",))
    for row in answer["tenants"]:
        cells = [row["name"], *(f"{row[x]:.0%}" for x in ("request", "limit"))]
        cells += [f"{row[x]:.1%}" for x in ("work_share", "least", "most")]
        if paused:
            cells += ["" if row[x] is None else f"{row[x]:.2f} ms" for x in ("wait_ms_p50", "wait_ms_p99")]
        table.add_row(*cells)
    print_whole(table)
    console = Console()
    text = f"slices, {answer['seconds']:g} s in virtual time: GPU busy {answer['work_share']:.1%}"
    console.print(f"{text}, {answer['switches']:,} switches", highlight=False, soft_wrap=True)


def _show(answer: dict[str, Any]) -> None:
    from rich.console import Console

    moved = any(row["moves"] for row in answer["tenants"])
    heads = ["tenant", "request", "limit", "has the turn", "works", "turns", "longest wait"]
    table = plain_table(None, heads + (["moves", "GiB moved"] if moved else []), left=("tenant",))
    for row in answer["tenants"]:
        cells = [row["name"], *(f"{row[x]:.0%}" for x in ("request", "limit"))]
        cells += [f"{row['turn_share']:.1%}", f"{row['work_share']:.1%}", f"{row['turns']:,}"]
        cells.append(format_seconds(row["longest_wait_s"]))
        if moved:
            cells += [f"{row['moves']:,}", f"{row['moved_bytes'] / ONE_GIB:.1f}"]
        table.add_row(*cells)
    print_whole(table)
    console = Console()
    together = f"{answer['discipline']}, {answer['seconds']:g} s in virtual time: GPU busy"
    moving = f", {answer['moving_share']:.1%} of the time spent on moves" if moved else ""
    console.print(f"{together} {answer['work_share']:.1%}{moving}", highlight=False, soft_wrap=True)
    for row in answer["tenants"]:
        if not row["turns"]:
            console.print(
                f"{row['name']} got no turn: the requests of the other tenants leave no time", highlight=False
            )
