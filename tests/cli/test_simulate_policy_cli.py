"""cotenant simulate --policy, as a user calls it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HEADER = (
    "order,job,model,arrival_s,duration_s,num_iters,launch_s,lat_7g.40gb,lat_4g.20gb,lat_3g.20gb,lat_2g.10gb,lat_1g.5gb"
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"{i},{i},m,{i * 10},0,{100 + i},5,1.0,1.4,1.6,2.5," for i in range(12)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return f"miso:{path}"


@pytest.mark.parametrize("policy", ["whole", "static", "mps", "miso", "miso-perfect", "oracle"])
def test_every_policy_gives_the_result_keys(call: Any, trace: str, policy: str, tmp_path: Path) -> None:
    more = ("--layout", "3,2,2") if policy == "static" else ()
    out = tmp_path / "jct.csv"
    argv = ("simulate", "--trace", trace, "--cluster", "2x1", "--gpu", "A100-40GB", "--policy", policy, *more)
    code, text, err = call(*argv, "--json", "--jct-csv", out)
    assert (code, err) == (0, "")
    answer = json.loads(text)
    assert answer["jobs_completed"] == 12
    for key in ("jct_s", "queueing_s", "slowdown", "ftf_rho"):
        assert set(answer[key]) == {"mean", "median", "p95", "p99", "p999"}
    assert set(answer["utilisation"]) == {"gpu", "cpu", "memory"}
    for key in ("makespan_s", "rounds", "engine_s", "seed", "reconfigurations", "profilings", "restarts"):
        assert key in answer
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["job"] for r in rows] == [str(i) for i in range(12)]
    assert sum(float(r["jct_s"]) for r in rows) / 12 == pytest.approx(answer["jct_s"]["mean"])
    again = json.loads(call(*argv, "--json")[1])
    assert {k: v for k, v in again.items() if k != "engine_s"} == {k: v for k, v in answer.items() if k != "engine_s"}


def test_no_overheads_is_never_slower_for_whole_gpus(call: Any, trace: str) -> None:
    argv = ("simulate", "--trace", trace, "--cluster", "12x1", "--policy", "whole", "--json")
    paid, free = (json.loads(call(*argv, *more)[1])["jct_s"]["mean"] for more in ((), ("--no-overheads",)))
    assert paid - free == pytest.approx(5.0)  # each job pays for one launch, and no job waits
    assert free == pytest.approx(sum(100 + i for i in range(12)) / 12)


def test_search_for_the_best_static_layout(call: Any, trace: str) -> None:
    argv = ("simulate", "--trace", trace, "--cluster", "2x1", "--policy", "static")
    best = json.loads(call(*argv, "--layout", "best", "--json")[1])
    for layout in ("3,3", "3,2,2", "2,2,2,1", "4,3", "7"):
        other = json.loads(call(*argv, "--layout", layout, "--json")[1])
        assert best["jct_s"]["mean"] <= other["jct_s"]["mean"] + 1e-9, layout


@pytest.mark.parametrize(
    ("policy", "titles"),
    [
        ("oracle", ["simulating oracle"]),
        ("static", ["searching static layouts", "simulating static"]),
    ],
)
def test_long_runs_say_how_far_they_are(
    call: Any, trace: str, policy: str, titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def listen(what: str, total: int) -> Iterator[Any]:
        assert total == 12
        yield lambda done, of: told.setdefault(what, []).append((done, of))

    monkeypatch.setattr("cotenant.cli.progress.jobs_progress", listen)
    layout = ("--layout", "best") if policy == "static" else ()
    code, _, _ = call("simulate", "--trace", trace, "--cluster", "2x1", "--policy", policy, *layout, "--json")
    assert code == 0
    assert list(told) == titles
    for steps in told.values():
        assert steps == sorted(steps)
        assert steps[-1][0] <= steps[-1][1]
    assert told[f"simulating {policy}"] == [(i, 12) for i in range(1, 13)]
    if policy == "static":
        assert {of % 12 for _, of in told["searching static layouts"]} == {0}


def test_a_record_is_written_and_told(call: Any, trace: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = call("simulate", "--trace", trace, "--cluster", "2x1", "--policy", "oracle", "--out", run)
    assert code == 0, err
    assert "oracle" in out
    code, out, _ = call("explain", run, "11")
    assert code == 0
    assert "under oracle" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--policy", "fifo"), "unknown policy 'fifo'"),
        (("--policy", "static"), "needs --layout"),
        (("--policy", "static", "--layout", "4,4"), "does not exist on A100-40GB"),
        (("--policy", "static", "--layout", "1,1,1,1,1,1,1"), "may run on no slice"),
        (("--policy", "miso", "--layout", "3,3"), "--layout is for policy static"),
        (("--policy", "miso", "--gpu", "V100"), "has no MIG"),
        (("--policy", "miso", "--ordering", "las"), "--ordering is for job policies"),
        (("--policy", "miso", "--placement", "consolidate"), "unknown placement"),
        (("--policy", "miso", "--objective", "fun"), "unknown objective"),
        (("--policy", "miso", "--disturb", "none"), "unknown disturb"),
        (("--policy", "miso", "--horizon", "soon"), "soon"),
        (("--policy", "miso", "--horizon", "0s"), "--horizon: must be above 0"),
        (("--layout", "3,3"), "needs a --policy"),
    ],
)
def test_refusals_in_one_sentence(call: Any, trace: str, argv: tuple[str, ...], message: str) -> None:
    code, out, err = call("simulate", "--trace", trace, "--cluster", "2x1", *argv, "--json")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_model_without_a_mig_profile_is_refused_or_given_one(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text("id,arrival_s,gpus,duration_s,model\na,0,1,100,my_net\nb,5,2,100,gnn_train128\n")
    code, _, err = call("simulate", "--trace", path, "--cluster", "1x2", "--policy", "oracle", "--json")
    assert code == 2
    assert "no MIG profile for model 'my_net'" in err
    argv = ("simulate", "--trace", path, "--cluster", "1x2", "--policy", "oracle", "--json")
    code, out, _ = call(*argv, "--default-profile", "gnn_train128")
    assert code == 0
    assert json.loads(out)["jobs_completed"] == 2
    code, _, err = call("simulate", "--trace", path, "--cluster", "1x1", "--policy", "oracle", "--default-profile",
                        "gnn_train128", "--json")  # fmt: skip
    assert code == 2
    assert "needs 2 GPUs; the cluster has 1" in err


def test_a_generated_trace_like_miso_runs(call: Any, tmp_path: Path) -> None:
    argv = ("trace", "generate", "--like", "miso", "--jobs", 30, "--gap", "100s", "--seed", 1)
    code, text, _ = call(*argv)
    assert code == 0
    path = tmp_path / "g.csv"
    path.write_text(text)
    arrivals = [float(row["arrival_s"]) for row in csv.DictReader(text.splitlines())]
    gaps = [b - a for a, b in zip([0.0, *arrivals], arrivals, strict=False)]
    # gaps of poisson-gap are Poisson-distributed and so nearly constant: 50 s for the first third, then 100 s
    assert all(25 <= g <= 80 for g in gaps[:10])
    assert all(65 <= g <= 140 for g in gaps[10:])
    assert call(*argv, "--json")[0] == 2
    answers = {}
    for policy in ("whole", "oracle"):
        code, out, _ = call("simulate", "--trace", f"miso:{path}", "--cluster", "4x1", "--policy", policy, "--json")
        assert code == 0
        answers[policy] = json.loads(out)["jct_s"]["mean"]
    assert answers["oracle"] < answers["whole"]
