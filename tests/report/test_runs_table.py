"""How runs are told apart, and the table of them on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from sample_records import hand_record, random_record

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.events import Kind, Reason
from cotenant.core.gpus import find_gpu
from cotenant.core.record.record import cluster_info
from cotenant.core.record.schema import RunInfo
from cotenant.report.runs import Run, arrange, in_order, load_of, moves_note, run_of
from cotenant.report.table import COLUMNS, best_rows, print_runs


def summary(mean: float, gpu: float = 0.5) -> dict[str, Any]:
    spread = {"mean": mean, "median": mean, "p95": mean, "p99": mean, "p999": mean}
    return {
        "jct_s": spread, "queueing_s": spread, "slowdown": spread, "ftf_rho": spread, "makespan_s": 1e5,
        "utilisation": {"gpu": gpu, "cpu": 0.5, "memory": None}, "fragmentation": None, "preemptions": 3, "moves": 0,
        "jobs_completed": 10,
    }  # fmt: skip


def column(key: str) -> Any:
    return next(c for c in COLUMNS if c.key == key)


def test_best_is_lowest_or_highest_as_the_metric_says() -> None:
    rows = [summary(7200, 0.5), summary(3600, 0.9), summary(3600.4, 0.7)]
    # 3600 and 3600.4 s are shown with the same text, so both are best
    assert best_rows(rows, column("jct_s.mean")) == {1, 2}
    # Of two runs of the same jobs the slower one holds its GPUs for longer, so high use is not better.
    assert best_rows(rows, column("utilisation.gpu")) == set()
    assert best_rows([{**rows[0], "moves": 4}, {**rows[1], "moves": 3}], column("moves")) == {1}
    assert best_rows(rows, column("makespan_s")) == set()
    assert best_rows(rows, column("utilisation.memory")) == set()
    assert best_rows(rows[:1], column("jct_s.mean")) == set()


def test_table_on_a_terminal() -> None:
    console = Console(width=240, record=True, file=io.StringIO(), force_terminal=True)
    print_runs([("fifo [x]", summary(7200)), ("srtf", summary(3600))], title="Two runs", console=console)
    text = console.export_text()
    assert "Two runs" in text
    row = next(line for line in text.splitlines() if "fifo [x]" in line)
    assert "120 min" not in row
    assert "2.00 h" in row
    assert "1.00 h" in next(line for line in text.splitlines() if "srtf" in line)
    assert "memory" not in text


def shown(rows: list[tuple[str, dict[str, Any]]], width: int, **more: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    print_runs(rows, console=console, **more)
    return console.export_text()


LABELS = ("fifo + proportional", "srtf + tune · load 1.5 · split 100,0,0 · seed 3")
MANY = 12  # runs, more than fit side by side


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_number_is_cut_at_any_width(width: int) -> None:
    """6.5 and 4.25 h, 1,234,567 moves: every column that stands is whole, the rest are named below the table."""
    rows = [(label, {**summary(s), "moves": 1_234_567}) for label, s in zip(LABELS, (23400, 15300), strict=True)]
    text = shown(rows * (MANY // 2), width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    head = next(line for line in text.splitlines() if "JCT mean" in line)
    assert "6.50 h" in text
    assert "4.25 h" in text
    words = " ".join(text.split())
    left_out = words.partition(f"left out at {width} columns: ")[2].partition(";")[0].split(", ")
    for c in COLUMNS:
        known = c.key not in ("utilisation.memory", "fragmentation", "energy.total_j")
        assert (f" {c.head}" in head) == (known and c.head not in left_out), c.head
    assert ("1,234,567" in text) == ("moved" in head)
    assert "".join(LABELS[1].split()) in "".join(line[:width].split("  ")[0] for line in text.splitlines()).replace(
        " ", ""
    )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_few_runs_become_columns_where_their_figures_do_not_fit(width: int) -> None:
    rows = [(label, {**summary(s), "moves": 1_234_567}) for label, s in zip(LABELS, (23400, 15300), strict=True)]
    text = shown(rows, width)
    assert "left out" not in text
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "JCT mean 6.50 h 4.25 h" in " ".join(text.split())
    for c in COLUMNS:
        known = c.key not in ("utilisation.memory", "fragmentation", "energy.total_j")
        assert any(line.strip().startswith(f"{c.head} ") for line in text.splitlines()) == known, c.head


def test_the_least_important_columns_go_first() -> None:
    rows = [("fifo + proportional", summary(7200)), ("srtf + tune", summary(3600))] * (MANY // 2)
    text = shown(rows, 80)
    assert "makespan" in text.partition("left out")[0]
    assert "p99.9" in text.partition("left out")[2]
    assert "left out" not in shown(rows, 240)


def test_free_moves_are_said_where_moves_stand() -> None:
    def run(moves: int, **options: Any) -> tuple[RunInfo, dict[str, Any]]:
        return RunInfo("x", options=options), {"moves": moves}

    free = {"restart_cost_s": 0.0, "checkpoint_cost_s": 0.0}
    paid = {**free, "restart_cost_s": 30.0}
    note = moves_note([run(7, **free), run(0, **paid)])
    assert note is not None
    assert "Moving is free here" in note
    assert "--restart-cost" in note
    assert "free in some of these runs" in (moves_note([run(7, **free), run(9, **paid)]) or "")
    for none in ([run(7, **paid)], [run(0, **free)], [run(7)]):
        assert moves_note(none) is None
    rows = [("a", summary(7200)), ("b", summary(3600))] * (MANY // 2)
    assert "Moving is free" in shown(rows, 240, moves_note=note)
    assert "Moving is free" not in shown(rows, 60, moves_note=note)  # without moves there is no note
    assert "Moving is free" in " ".join(shown(rows[:2], 60, moves_note=note).split())


@pytest.mark.parametrize(
    ("options", "trace", "load"),
    [
        ({"load": 0.9}, {}, 0.9),
        ({"load": "0.75"}, {"rate": "8/h"}, 0.75),
        ({"rate": "8/h"}, {}, 8.0),
        ({}, {"load": 1.1}, 1.1),
        ({"load": True}, {}, None),
        ({"load": "high"}, {}, None),
        ({}, {}, None),
    ],
)
def test_load_of(options: dict[str, Any], trace: dict[str, Any], load: float | None) -> None:
    assert load_of(RunInfo("x", options=options, trace=trace)) == load


def test_summary_of_a_real_record_fills_the_table() -> None:
    from cotenant.core.metrics.summary import summarise

    console = Console(width=240, record=True, file=io.StringIO())
    print_runs([("a", summarise(random_record(1, jobs=10)))], console=console)
    assert "10" in console.export_text().split()


def labelled(label: str, trace: str, seed: int = 1, **options: Any) -> Run:
    run = run_of(random_record(1, jobs=3, label=label, options=options))
    run.info.trace["source"], run.info.seed = trace, seed
    return run


def test_what_differs_between_runs_of_one_policy_becomes_facets() -> None:
    runs = arrange([labelled(p, f"synergy:/data/{t}.csv") for t in ("one", "two") for p in ("fifo", "srtf")])
    assert [run.facets for run in runs] == [{"trace": "one.csv"}] * 2 + [{"trace": "two.csv"}] * 2
    assert runs[3].label == "srtf · trace two.csv"


def test_a_label_has_only_what_differs_within_its_policy() -> None:
    runs = [labelled("fifo", f"{t}.csv", lease_s=lease) for t, lease in (("one", 60), ("two", 60), ("three", 9))]
    runs += [labelled("srtf", "one.csv", reserve_after_s=after) for after in (3600, 7200)]
    assert [run.label for run in arrange(runs)] == [
        "fifo · trace one.csv", "fifo · trace two.csv", "fifo · trace three.csv",
        "srtf · reserve after 3600", "srtf · reserve after 7200",
    ]  # fmt: skip


def test_clusters_written_alike_are_told_apart() -> None:
    """8x1 says nothing of the GPU model; what a record says of its cluster does."""
    runs = [labelled("miso", "t.csv"), labelled("miso", "t.csv")]
    for run, gpu in zip(runs, ("A30", "H100-80GB"), strict=True):
        group = NodeGroup(8, 1, find_gpu(gpu), 3, 62 * 10**9)
        run.info.cluster = cluster_info(Cluster((group, NodeGroup(1, 0, find_gpu(gpu), 3, 1)), source="8x1"))
        assert run.info.cluster["node_gpus"] == [1] * 8  # node_gpus has only nodes with GPUs
    facets = [run.facets["cluster"] for run in arrange(runs)]
    assert "A30" in facets[0]
    assert "H100-80GB" in facets[1]


def test_a_trace_drawn_for_each_load_is_no_facet() -> None:
    runs = arrange([labelled("fifo", f"drawn {n} {s}", seed=s, load=n) for n in (0.5, 0.9) for s in (1, 2)])
    assert [run.facets for run in runs][:2] == [{"load": "0.5", "seed": "1"}, {"load": "0.5", "seed": "2"}]


def test_of_many_groups_the_largest_are_shown() -> None:
    """20 tenants; the first 5 have 3 jobs each, the rest 1: the 12 shown hold those 5."""
    tenants = [f"t{i:02}" for i in range(20)] + [f"t{i:02}" for i in range(5)] * 2
    jobs = [{"id": str(i), "arrival_s": 0.0, "gpus": 1.0, "tenant": t} for i, t in enumerate(tenants)]
    record = hand_record(jobs, [(9.0, i, Kind.FINISH, Reason.DONE) for i in range(len(jobs))])
    run = run_of(record)
    shown = [group["group"] for group in run.groups["tenant"]]
    assert len(shown) == 12
    assert set(shown) >= {f"t{i:02}" for i in range(5)}
    assert shown == sorted(shown)
    assert run.group_counts == {"tenant": 20}


def test_runs_of_a_folder_stand_by_policy_and_size_of_conditions() -> None:
    runs = arrange([labelled(p, f"drawn {n}", load=n) for n in (10.0, 2.0, 0.5) for p in ("srtf", "fifo")])
    assert [run.label for run in in_order(runs)] == [
        f"{p} · load {n}" for p in ("fifo", "srtf") for n in ("0.5", "2", "10")
    ]


def test_options_of_different_policies_are_no_facets() -> None:
    runs = arrange([labelled("fifo", "t", lease_s=300.0), labelled("srtf", "t", lease_s=600.0)])
    assert [(run.label, run.facets) for run in runs] == [("fifo", {}), ("srtf", {})]
