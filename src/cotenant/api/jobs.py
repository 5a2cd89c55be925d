"""Training jobs on a cluster: traces, simulations, and runs side by side."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.api.arguments import check_fields, checked
from cotenant.api.tables import html_table, text_table
from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError
from cotenant.core.metrics.registry import SPREAD_METRICS, lookup
from cotenant.core.metrics.summary import Analysis
from cotenant.core.record.reader import read_record as read
from cotenant.core.record.record import Record
from cotenant.core.work import Trace
from cotenant.profiles.training.tables import load_profiles
from cotenant.report.page import build_page, pick_baseline, write_page
from cotenant.report.runs import Run, arrange, run_of
from cotenant.report.table import cell_texts, known_columns
from cotenant.sim.jobs.options import training_config
from cotenant.sim.jobs.training import simulate as simulate_training
from cotenant.workloads.clusters.forms import parse_cluster
from cotenant.workloads.jobs.generate import Workload, generate
from cotenant.workloads.jobs.select import load_trace
from cotenant.workloads.trace_options import TraceOptions

if TYPE_CHECKING:
    import polars as pl

MOST_SIDE_BY_SIDE = 3  # at most this many runs are displayed as columns of text
FRAME_HEIGHT = 720  # height of a report inside a notebook, in pixels


@dataclass(frozen=True)
class SimulatedRun:
    """One run of a policy on a trace, with its record, its figures and its jobs. A notebook shows a row of figures."""

    record: Record

    @cached_property
    def _analysis(self) -> Analysis:
        return Analysis(self.record)

    @property
    def label(self) -> str:
        """Return the run's label; by default the policy's name."""
        return self.record.info.label

    @property
    def summary(self) -> dict[str, Any]:
        """Return every metric of docs/metrics.md. Dots in a key are levels: jct_s.mean is summary["jct_s"]["mean"].
        A value is None if the run does not have it.
        """
        return self._analysis.summary

    @cached_property
    def jobs(self) -> pl.DataFrame:
        """Return a table with one row per job, in the order of the trace: the trace's columns and the job's metrics
        (seconds, joules), NaN where a job has no value.
        """
        import polars as pl

        metrics = {key: self._analysis.values(key) for key in SPREAD_METRICS}
        return self.record.jobs.with_columns([pl.Series(key, values) for key, values in metrics.items()])

    def _repr_html_(self) -> str:
        return compare(self)._repr_html_()

    def __repr__(self) -> str:
        return repr(compare(self))


class Comparison:
    """Several runs to compare. A notebook shows a table; `report()` adds every chart."""

    def __init__(self, runs: list[Run], baseline: str | None, title: str) -> None:
        self._runs, self._baseline, self._title = runs, baseline, title

    @cached_property
    def table(self) -> pl.DataFrame:
        """Return a table with one row per run: `run`, and each metric by its key (docs/metrics.md gives units)."""
        import polars as pl

        keys = [column.key for column in known_columns([run.summary for run in self._runs])]
        rows = [{"run": run.label} | {key: lookup(run.summary, key) for key in keys} for run in self._runs]
        return pl.DataFrame(rows, infer_schema_length=None)

    @checked
    def report(self, height: int = FRAME_HEIGHT) -> Report:
        """Return the page with tables and charts. A notebook shows it in a frame that is `height` pixels high."""
        return Report(build_page(self._runs, self._title, self._baseline), height)

    @checked
    def write_page(self, path: str | Path) -> None:
        """Write the page with tables and charts to a file; the page needs no network. InputError if it cannot be
        written.
        """
        write_page(path, self._runs, self._title, self._baseline)

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        summaries = [run.summary for run in self._runs]
        columns = known_columns(summaries)
        cells = [cell_texts(summaries, column) for column in columns]
        rows = [[run.label, *(texts[i] for texts in cells)] for i, run in enumerate(self._runs)]
        return ["run", *(column.head for column in columns)], rows

    def _repr_html_(self) -> str:
        return html_table(*self._texts())

    def __repr__(self) -> str:
        """Return the comparison as text: one row per run. If there are few runs, it has one row per figure and a column
        per run, which fits into a terminal.
        """
        heads, rows = self._texts()
        if len(rows) <= MOST_SIDE_BY_SIDE:
            heads, *rows = map(list, zip(heads, *rows, strict=True))
        return text_table(heads, rows)


@dataclass(frozen=True)
class Report:
    """A report page, which a notebook shows in a frame."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        inside = html.escape(self.page, quote=True)
        return f'<iframe srcdoc="{inside}" style="width:100%;height:{self.height}px;border:0"></iframe>'

    def __repr__(self) -> str:
        return f"a report page of {len(self.page):,} characters; a notebook shows it, write_page writes it"


@checked
def draw_trace(
    jobs: int = 1000, *, cluster: str | Cluster = "16x8", load: float = 1.0, seed: int = 1, **like: Any
) -> Trace:
    """Return a random trace of `jobs` jobs that offer `load` times the capacity of `cluster`.

    Other arguments are fields of `workloads.jobs.generate.Workload`: `like="philly"`, `durations="two-part"`,
    `gpu_mix="1:70,8:30"`. The same arguments give the same trace. InputError names the field.
    """
    check_fields(like, Workload)
    profiles = load_profiles()
    gpus = _cluster(cluster).total_gpus
    try:
        workload = Workload(jobs=jobs, load=load, cluster_gpus=gpus, seed=seed, **like)
    except TypeError:
        known = {"like", "arrivals", "durations", "gpu_mix", "split", "split_mode", "rate_per_s"}
        wrong = next((name for name in like if name not in known), "load")
        raise InputError(f"is not an option; there are {', '.join(sorted(known))}", field=wrong) from None
    return generate(workload, profiles.classes, profiles.iteration_s).trace


@checked
def simulate(
    trace: str | Trace,
    *,
    cluster: str | Cluster = "16x8",
    select: TraceOptions | None = None,
    out: str | Path | None = None,
    label: str | None = None,
    **policy: Any,
) -> SimulatedRun:
    """Simulate a trace on a cluster.

    `trace`: FORMAT:PATH as on the command line (docs/traces.md), or the result of `draw_trace`. `select`: options that
    select jobs of a trace that is read from a file. `out`: folder for the record; None keeps it in memory. `policy`:
    options of `cotenant simulate` by their names: `ordering="las"`, `allotment="tune"`, `lease="300s"`,
    `restart_cost="30s"`. `cluster`: nodes x GPUs, or any other form of `--cluster`; by default 16 nodes with 8 GPUs.
    InputError names what is wrong.
    """
    if select is not None:
        check_fields(vars(select), TraceOptions)
    config = training_config(policy)
    profiles = load_profiles(config.profiles)
    if isinstance(trace, str):
        given = select or TraceOptions()
        trace = load_trace(trace, given, classes=profiles.classes, iteration_s=profiles.iteration_s)
    elif select is not None:
        raise InputError("is for a trace that is read from a file", field="select")
    folder = None if out is None else Path(out)
    record, _ = simulate_training(trace, _cluster(cluster), config, profiles=profiles, out=folder, label=label)
    return SimulatedRun(record)


@checked
def read_record(folder: str | Path) -> SimulatedRun:
    """Read a run that was written by `simulate`, by `cotenant sweep` or by the training runtime (`cotenant fleet`).
    Raises InputError if the folder contains no run.
    """
    return SimulatedRun(read(folder))


@checked
def compare(*runs: SimulatedRun, baseline: str | None = None, title: str = "Runs side by side") -> Comparison:
    """Compare runs. `baseline`: label of the run with which the report compares the others job by job."""
    if not runs:
        raise InputError("give at least one run", field="runs")
    for run in runs:
        if not isinstance(run, SimulatedRun):
            raise InputError(f"{run!r} is no run: give what simulate or read_record returned", field="runs")
    families = {model.name: model.family for model in load_profiles().models.values()}
    arranged = arrange([run_of(run.record, families) for run in runs])
    pick_baseline(arranged, baseline)
    return Comparison(arranged, baseline, title)


def _cluster(given: str | Cluster) -> Cluster:
    return parse_cluster(given) if isinstance(given, str) else given
