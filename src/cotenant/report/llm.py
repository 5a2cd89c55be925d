"""One self-contained HTML page for requests to language models, sent or simulated: distributions of TTFT and TPOT
against SLOs, and in a simulation, which models were on the GPUs.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.core.files import atomic_file
from cotenant.core.metrics.tokens import Target
from cotenant.core.units import counted
from cotenant.policy.residency import Do
from cotenant.report.distributions import Windows, cdf_points, rounded
from cotenant.report.embed import lead, shell
from cotenant.report.serving import sent_late
from cotenant.sim.llm.engine import LlmResult, Switch

if TYPE_CHECKING:
    from cotenant.loadgen.openai import OpenAiResult

MOST_REASONS = 10
PIXELS = 1500  # width of the chart in pixels; bars that would be narrower than one pixel are merged
HEADS = (
    ("requests", "requests"), ("answered", "answered"), ("ttft_ms", "TTFT p50 / p99 ms"),
    ("tpot_ms", "TPOT p50 / p99 ms"), ("slo", "SLO TTFT / TPOT ms"), ("attainment", "in time"),
    ("goodput_rps", "goodput /s"), ("output_tokens_per_s", "tokens /s"),
)  # fmt: skip


def write_page(path: str | Path, result: OpenAiResult | LlmResult) -> None:
    """Write the page about requests to language models. The file is written atomically."""
    with atomic_file(path) as file:
        file.write(build_page(result))


def build_page(result: OpenAiResult | LlmResult) -> str:
    """Return the page about requests to language models as text."""
    content = result.summary()
    simulated = isinstance(result, LlmResult)
    title = "Language models, simulated" if simulated else "Language models under load"
    head = lead(_simulated(content) if simulated else _sent(content))
    parts = {"table": _table(content), "failures": "" if simulated else _failures(content)}
    return shell(title, head, "llm.html", parts, page_data(result), ("llm.js",))


def _sent(content: dict[str, Any]) -> str:
    text = f"{counted(content['trace']['requests'], 'request')} in {content['duration_s']:.1f} s to {content['url']}"
    each = f"{content['in_flight']:,} of each model in flight, " if content["in_flight"] else ""
    text += f" ({each}{content['trace']['source']})"
    late = content["lateness_ms"]
    text += "." if "seed" in content["trace"]["source"] else f", seed {content['seed']}."
    if late["p50"] is not None:
        text += f" {sent_late(late)}"
    return text


def _simulated(content: dict[str, Any]) -> str:
    gpus, models = content["gpus"], len(content["models"])
    busy = ", ".join(f"{gpu['busy']:.0%}" for gpu in gpus)
    requests = counted(content["trace"]["requests"], "request")
    text = f"{requests} in {content['span_s']:,.0f} s ({content['trace']['source']}): {counted(models, 'model')} on "
    text += f"{counted(len(gpus), 'GPU')} of {gpus[0]['memory_bytes'] / 2**30:g} GiB, "
    return text + f"{content['sharing']} shares, busy {busy}, {content['switches']:,} switches."


def _table(content: dict[str, Any]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("model", *(h for _, h in HEADS)))
    rows = []
    for name, row in {**content["models"], "all": content["total"]}.items():
        shown = {**row, "slo": _slo(row)}
        cells = "".join(f"<td>{_cell(key, shown[key])}</td>" for key, _ in HEADS)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _slo(row: dict[str, Any]) -> str | None:
    targets = [row.get(name) for name in ("ttft_target_ms", "tpot_target_ms")]
    return None if targets == [None, None] else " / ".join("-" if t is None else f"{t:.15g}" for t in targets)


def _failures(content: dict[str, Any]) -> str:
    """Return a paragraph with why requests were not answered; empty if all were."""
    ends = sum((Counter(row["ends"]) for row in content["models"].values()), Counter[str]())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in ends.most_common() if kind != "ok")
    if not kinds:
        return ""
    reasons = list(content["failures"].items())
    rows = "".join(f"<li>{count:,}: {html.escape(reason)}</li>" for reason, count in reasons[:MOST_REASONS])
    more = f"<li>and {len(reasons) - MOST_REASONS} other reasons</li>" if len(reasons) > MOST_REASONS else ""
    return f'<p class="how">Requests that were not answered: {kinds}.</p><ul class="how">{rows}{more}</ul>'


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if key == "attainment":
        return f"{value:.2%}"
    if isinstance(value, dict):
        return f"{value['p50']:.1f} / {value['p99']:.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def page_data(result: OpenAiResult | LlmResult) -> dict[str, Any]:
    """Return the data of the page's curves: distributions per model, and attainment in windows of the run; for a
    simulation also which models were on the GPUs.
    """
    times = result.times
    promises = result.targets if isinstance(result, LlmResult) else result.test.promises
    kept = times.kept(promises)
    answered = np.isfinite(times.last_s)
    windows = Windows(times.due_s, max(float(times.due_s.max()), 1e-3))
    models = []
    for index, promise in enumerate(promises):
        mine = times.model == index
        ttft_ms = np.where(answered, times.ttft_ms, np.nan)[mine]
        models.append({
            "name": promise.name,
            "ttft": cdf_points(ttft_ms, int(mine.sum())) | {"promise": promise.ttft_ms},
            "tpot": cdf_points(times.tpot_ms[mine]) | {"promise": promise.tpot_ms},
            "attainment": windows.attainment(mine, kept) if _has_slo(promise) else [None] * windows.count,
        })  # fmt: skip
    return {
        "models": models,
        "windows_s": rounded(windows.middles.tolist()),
        "stays": stays(result.switches, result.end_s) if isinstance(result, LlmResult) else [],
    }


def _has_slo(target: Target) -> bool:
    return target.ttft_ms is not None or target.tpot_ms is not None


def stays(switches: Sequence[Switch], end_s: float) -> list[dict[str, Any]]:
    """Return bars that show when each model was on which GPU, or was being moved (`moving`), in seconds. Bars of one
    model that are less than a pixel apart are merged.
    """
    gap_s, found = end_s / PIXELS, []
    open_bars: dict[tuple[int, bool], dict[str, Any]] = {}

    def bar(model: int, gpu: int, moving: bool, start_s: float, until_s: float) -> None:
        last = open_bars.get((model, moving))
        if last is not None and last["gpu"] == gpu and start_s - last["end"] < gap_s:
            last["end"] = until_s
        elif until_s > start_s:
            last = {"model": model, "gpu": gpu, "moving": moving, "start": start_s, "end": until_s}
            open_bars[model, moving] = last
            found.append(last)

    there: dict[int, float] = {}  # model -> time since which its program has been on the GPU
    for switch in switches:
        begun = there.pop(switch.model, None)
        if begun is not None:
            bar(switch.model, switch.gpu, False, begun, switch.at_s)
        bar(switch.model, switch.gpu, True, switch.at_s, switch.at_s + switch.seconds)
        if switch.do not in (Do.EVICT, Do.STOP):
            there[switch.model] = switch.at_s + switch.seconds
    last_gpu = {switch.model: switch.gpu for switch in switches}
    for model, begun in there.items():
        bar(model, last_gpu[model], False, begun, end_s)
    return [row | {"start": rounded(row["start"], 7), "end": rounded(row["end"], 7)} for row in found]
