"""`cotenant simulate`, `policies` and `demo`, as a user runs them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command import Result, cotenant, cotenant_process

from cotenant.policy.jobs.allotment import ALLOTMENTS
from cotenant.policy.jobs.ordering import ORDERINGS
from cotenant.policy.jobs.placement import PLACEMENTS

SPREAD = {"mean", "median", "p95", "p99", "p999"}
# other tools call exactly this form
TEXT = (
    "--cluster 16x8 --cpus-per-node 24 --memory-per-node 500GB --ordering fifo --allotment tune --placement first-fit "
    "--speeds two-speed --lease 300s --finish lease-end --json"
)
FORM = TEXT.split()
ORDERINGS_NAMED = "fifo srtf srsf las las-queues gittins ftf ftf-public drf tetris sjf"

# There are 2 GPUs, so the third job waits. The speed is proportional, so a job takes its duration. Leases are 100 s. a
# runs from 0 to 250 and b from 0 to 1000. c arrives at 10, starts at the first round in which a's GPU is free, which is
# at 300, and ends at 400.
BY_HAND = """id,arrival_s,gpus,duration_s,model
a,0,1,250,res50
b,0,1,1000,res50
"c, the third",10,1,100,res50
"""
SMALL = ("--cluster", "1x2", "--allotment", "proportional", "--lease", "100s")


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    path = tmp_path / "by-hand.csv"
    path.write_text(BY_HAND)
    return path


def test_a_trace_without_its_option_is_answered_with_the_command(by_hand: Path, replay: Path, tmp_path: Path) -> None:
    philly = tmp_path / "philly.csv"
    philly.write_text("timestamp,duration,num_gpus\n0,10,1\n")
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,1,1,1,T4\n")
    for given, named in (
        (by_hand, by_hand), (replay, f"synergy:{replay}"), (philly, f"philly:{philly}"),
        (f"helios:{by_hand}", f"helios:{by_hand}"),
    ):  # fmt: skip
        for more in ((), ("--cluster", "4x8", "--ordering", "las")):
            result = cotenant("simulate", given, *more)
            assert (result.code, result.err) == (2, f"cotenant: {given} is a job trace; write --trace {named}\n")
    assert "needs gpus and services" in cotenant("simulate", nodes).err  # a list of nodes is no trace
    assert "nowhere.csv" in cotenant("simulate", "nowhere.csv").err


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    """A replay file of the public simulator: headerless id, model, arrival_s, iterations, gpus."""
    path = tmp_path / "T.csv"
    rows = ["0,res50,0.0,40000,1", "1,alexnet,600.0,90000,2", "2,lstm,700.0,50000,8", "3,res50,700.0,1000,1"]
    path.write_text("\n".join(rows) + "\n")
    return path


def ok(result: Result) -> dict[str, object]:
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert isinstance(answer, dict)
    return answer


def test_the_documented_form_gives_the_documented_keys_and_file(replay: Path, tmp_path: Path) -> None:
    jct = tmp_path / "OUT.csv"
    answer = ok(cotenant("simulate", "--trace", f"synergy:{replay}", *FORM, "--jct-csv", jct))
    for key in ("jct_s", "queueing_s", "slowdown", "ftf_rho"):
        assert set(answer[key]) == SPREAD  # type: ignore[call-overload]
    assert set(answer["utilisation"]) == {"gpu", "cpu", "memory"}  # type: ignore[call-overload]
    assert {"jobs_completed", "makespan_s", "rounds", "engine_s", "seed"} <= set(answer)
    assert answer["jobs_completed"] == 4
    rows = list(csv.reader(jct.open()))
    assert rows[0] == ["job", "jct_s"]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2", "3"]
    times = [float(row[1]) for row in rows[1:]]
    assert answer["jct_s"]["mean"] == pytest.approx(sum(times) / 4)  # type: ignore[index]
    # If jobs complete only at the end of a lease, a job that arrived at a multiple of the lease takes a multiple of it.
    assert times[0] % 300 == 0
    assert times[1] % 300 == 0


def test_json_is_all_there_is_on_standard_output(replay: Path, tmp_path: Path) -> None:
    files = ("--jct-csv", tmp_path / "j.csv", "--html", tmp_path / "r.html", "--out", tmp_path / "run")
    result = cotenant_process("simulate", "--trace", f"synergy:{replay}", *FORM, *files)
    assert result.code == 0
    assert result.out.count("\n") == 1
    assert "Traceback" not in result.err
    json.loads(result.out)
    assert {path.name for path in tmp_path.iterdir()} == {"T.csv", "j.csv", "r.html", "run"}


def test_a_run_worked_out_by_hand(by_hand: Path, tmp_path: Path) -> None:
    jct = tmp_path / "jct.csv"
    answer = ok(cotenant("simulate", "--trace", f"native:{by_hand}", *SMALL, "--json", "--jct-csv", jct))
    assert jct.read_text() == 'job,jct_s\na,250\nb,1000\n"c, the third",390\n'
    assert answer["jobs_completed"] == 3
    assert answer["makespan_s"] == 1000.0
    assert answer["jct_s"]["mean"] == pytest.approx((250 + 1000 + 390) / 3)  # type: ignore[index]
    assert answer["queueing_s"]["mean"] == pytest.approx(290 / 3)  # type: ignore[index]
    assert answer["utilisation"]["gpu"] == pytest.approx((250 + 1000 + 100) / 2000)  # type: ignore[index]


def test_completion_at_the_end_of_the_lease_holds_the_gpu_until_then(by_hand: Path, tmp_path: Path) -> None:
    jct = tmp_path / "jct.csv"
    ok(cotenant("simulate", "--trace", by_hand, *SMALL, "--finish", "lease-end", "--json", "--jct-csv", jct))
    assert jct.read_text() == 'job,jct_s\na,300\nb,1000\n"c, the third",390\n'


def test_measured_jobs_alone_make_the_figures(by_hand: Path, tmp_path: Path) -> None:
    jct = tmp_path / "jct.csv"
    result = cotenant("simulate", "--trace", by_hand, *SMALL, "--measure", "1-3", "--json", "--jct-csv", jct)
    answer = ok(result)
    assert answer["jct_s"]["mean"] == pytest.approx((1000 + 390) / 2)  # type: ignore[index]
    assert answer["jobs_completed"] == 3
    assert jct.read_text().count("\n") == 4  # the file still contains every job


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    assert cotenant("trace", "generate", "--jobs", 60, "--rate", "60/h", "--seed", 3, "--out", trace).code == 0
    options = ("--cluster", "2x8", "--ordering", "las", "--arrivals", "poisson", "--durations", "two-part-short")
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for out, seed in ((first, 7), (again, 7), (other, 8)):
        ok(cotenant("simulate", "--trace", trace, *options, "--seed", seed, "--out", out, "--json"))
    assert set(folder_bytes(first)) == {"run.json", "jobs.parquet", "events.parquet", "rounds.parquet"}
    assert folder_bytes(first) == folder_bytes(again)
    assert folder_bytes(first)["events.parquet"] != folder_bytes(other)["events.parquet"]


def test_a_recorded_trace_replays_to_the_same_results_byte_for_byte(tmp_path: Path) -> None:
    drawn, recorded, once_more = (tmp_path / name for name in ("drawn.csv", "recorded.parquet", "again.csv"))
    assert cotenant("trace", "generate", "--jobs", 80, "--load", "1.1", "--cluster", "2x8", "--out", drawn).code == 0
    assert cotenant("trace", "convert", drawn, "--out", recorded).code == 0
    assert cotenant("trace", "convert", f"native:{recorded}", "--out", once_more).code == 0
    assert once_more.read_bytes() == drawn.read_bytes()
    results = []
    for trace in (drawn, recorded, once_more):
        jct, out = tmp_path / f"{trace.stem}.jct", tmp_path / f"{trace.stem}.run"
        ok(cotenant("simulate", "--trace", trace, "--cluster", "2x8", "--ordering", "srtf", "--json",
                    "--jct-csv", jct, "--out", out))  # fmt: skip
        files = folder_bytes(out)
        files.pop("run.json")  # this file names the trace file
        results.append((jct.read_bytes(), files))
    assert results[0] == results[1] == results[2]


def test_policies_are_those_of_the_code() -> None:
    answer = ok(cotenant("policies", "--json"))
    for kind, names in (("ordering", ORDERINGS), ("allotment", ALLOTMENTS), ("placement", PLACEMENTS)):
        assert list(answer[kind]) == list(names)  # type: ignore[call-overload]
    assert set(ORDERINGS_NAMED.split()) <= set(answer["ordering"])  # type: ignore[call-overload]
    shown = cotenant("policies")
    assert shown.code == 0
    assert all(name in shown.out for kind in answer.values() for name in kind)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.slow
def test_the_demo_shows_six_policies_and_writes_a_page(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = cotenant("demo", "--out", out, "--seed", 2)
    assert result.code == 0
    assert "seed 2" in result.out
    page = (out / "report.html").read_text()
    for policy in ("fifo + proportional", "fifo + tune", "srtf + proportional", "srtf + tune", "las + tune"):
        assert policy in result.out
        assert policy in page
    assert "http://" not in page.split("<body", 1)[0]
    assert len([path for path in out.iterdir() if path.is_dir()]) == 6
    events = (out / "las-tune" / "events.parquet").read_bytes()
    assert cotenant("demo", "--out", out, "--seed", 2).code == 0  # once more, into the same folder
    assert (out / "las-tune" / "events.parquet").read_bytes() == events


def test_slowdown_with_a_trace_of_another_gpu(tmp_path: Path) -> None:
    """One job alone is as slow as its reference node, whichever GPU its duration was measured on."""
    (tmp_path / "t.csv").write_text("id,arrival_s,gpus,duration_s,model\na,0,1,3600,res50\n")
    where = ("--trace", f"native:{tmp_path / 't.csv'}", "--cluster", "1x8", "--gpu", "T4")
    result = cotenant("simulate", *where, "--trace-gpu", "A100-40GB", "--allotment", "proportional", "--json")
    answer = json.loads(result.out)
    assert answer["jct_s"]["mean"] > 3600
    assert answer["slowdown"]["mean"] == pytest.approx(1.0)
    assert answer["ftf_rho"]["mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--queues", "1h"), "--queues: has no effect under ordering fifo; it is for --ordering las-queues"),
        (("--gittins-sample", "t.csv"), "--gittins-sample: has no effect under ordering fifo; it is for --ordering"),
        (("--solver-limit", "2s"), "--solver-limit: has no effect under allotment tune; it is for --allotment optimal"),
    ],
)
def test_an_option_without_effect_is_refused(option: tuple[str, str], said: str) -> None:
    result = cotenant("simulate", "--trace", "native:t.csv", *option)
    assert result.code == 2
    assert said in result.err
