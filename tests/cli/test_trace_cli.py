"""`cotenant trace`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli import main as cli

NATIVE = "id,arrival_s,gpus,duration_s\n"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `cotenant ARGS`."""
    monkeypatch.setattr(sys, "argv", ["cotenant", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "200")
    code: object = 0
    try:
        cli.main()
    except SystemExit as left:
        code = left.code or 0
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


def test_inspect_json_has_its_keys_and_nothing_else_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("job_id,num_gpu,submit_time,duration\na,1,0,10\nb,0,5,10\nc,4,20,30\nd,1,10,20\n", encoding="utf-8")
    code, out, err = run(capsys, monkeypatch, "trace", "inspect", f"tiresias:{path}", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["kept"] == 3
    assert found["left_out"] == {"with 0 GPUs": 1}
    assert found["span_s"] == 20.0
    assert found["gpus"] == {"1": 2, "4": 1}
    assert found["duration_s"]["mean"] == 20.0
    assert found["duration_s"]["median"] == 20.0
    assert (found["duration_s"]["min"], found["duration_s"]["max"]) == (10.0, 30.0)
    assert found["gpu_hours"] == pytest.approx((10 + 4 * 30 + 20) / 3600)
    assert found["rate_per_h"] == 360.0  # two gaps in 20 s
    assert len(found["remarks"]) == 1


def test_inspect_for_people_names_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("job_id,num_gpu,submit_time,duration\na,1,0,10\nb,0,5,10\n")
    code, out, _ = run(capsys, monkeypatch, "trace", "inspect", f"tiresias:{path}")
    assert code == 0
    assert "1 job kept, 1 row left out" in out
    assert "1 with 0 GPUs" in out


def test_inspect_counts_durations_of_iterations_by_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,gnmt,0,1000,1\n1,no-such-model,5,10,1\n")
    _, out, _ = run(capsys, monkeypatch, "trace", "inspect", f"synergy:{path}", "--json")
    found = json.loads(out)
    assert found["duration_s"]["mean"] == pytest.approx(120.0)  # a gnmt job takes 0.12 s per iteration
    assert found["duration_s"]["unknown"] == 1


def test_convert_keeps_jobs_and_replays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared: Path
) -> None:
    from cotenant.workloads.jobs.registry import read_trace

    source = f"synergy:{shared / 'reference/synergy/multi_1000_4jph.csv'}"
    for name in ("t.csv", "t.parquet"):
        code, out, err = run(capsys, monkeypatch, "trace", "convert", source, "--out", tmp_path / name, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["jobs"] == 1000
        ours, theirs = read_trace(str(tmp_path / name)).jobs, read_trace(source).jobs
        for column in ("id", "arrival_s", "iterations", "gpus", "model"):
            assert getattr(ours, column).tolist() == getattr(theirs, column).tolist()


def test_convert_applies_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out_file = tmp_path / "t.csv", tmp_path / "o.csv"
    source.write_text(NATIVE + "a,0,1,5\nb,7200,2,5\nc,9000,1,5\n")
    options = ["--from", "1h", "--gpu-counts", "as-single", "--rate-scale", "2", "--split", "0,100,0"]
    code, _, _ = run(capsys, monkeypatch, "trace", "convert", source, "--out", out_file, *options)
    assert code == 0
    assert out_file.read_text() == ("id,arrival_s,gpus,duration_s,model\nb,1800,1,5,gnmt\nc,2700,1,5,transformer\n")


def test_generate_names_its_seed_and_is_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["trace", "generate", "--jobs", 300, "--load", "90%", "--cluster", "16x8", "--seed", 7]
    code, out, err = run(capsys, monkeypatch, *args, "--out", tmp_path / "a.csv", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["seed"], found["jobs"], found["split"]) == (7, 300, "20,70,10")
    assert found["offered_load"] == pytest.approx(0.9)
    _, out, _ = run(capsys, monkeypatch, *args, "--out", tmp_path / "b.csv")
    assert "seed: 7" in out
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_generated_trace_like_the_public_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, monkeypatch, "trace", "generate", "--jobs", 10, "--rate", "8/h", "--out", tmp_path / "t.csv")
    rows = (tmp_path / "t.csv").read_text().splitlines()
    assert rows[0] == "id,arrival_s,gpus,duration_s,model"
    assert [row.split(",")[4] for row in rows[1:6]] == ["gnmt", "alexnet", "transformer", "m5", "lstm"]


GOOD = NATIVE + "a,0,1,5\n"
# Name: (content of t.csv, arguments, parts of the message).
BAD: dict[str, tuple[str, list[str], list[str]]] = {
    "missing columns": (
        "id,gpus\na,1\n",
        ["inspect", "native:{t}"],
        ["t.csv, line 1, field arrival_s", "no column 'arrival_s' and no column 'duration_s'"],
    ),
    "negative duration": (NATIVE + "a,0,1,-5\n", ["inspect", "{t}"], ["t.csv, line 2, field duration_s", "'-5'"]),
    "NaN duration": (NATIVE + "a,0,1,nan\n", ["convert", "{t}", "--out", "{o}"], ["line 2, field duration_s", "'nan'"]),
    "zero GPUs": (NATIVE + "a,0,0,5\n", ["convert", "{t}", "--out", "{o}"], ["line 2, field gpus"]),
    "absurd GPUs": (NATIVE + "a,0,1e12,5\n", ["convert", "{t}", "--out", "{o}"], ["line 2, field gpus"]),
    "duplicate id": (GOOD + "a,1,1,5\n", ["convert", "{t}", "--out", "{o}"], ["line 3, field id", "already on line 2"]),
    "empty trace": (NATIVE, ["inspect", "{t}", "--json"], ["t.csv", "the trace is empty"]),
    "absent file": (GOOD, ["inspect", "native:{t}x.csv"], ["t.csvx.csv", "No such file"]),
    "unknown format": (GOOD, ["inspect", "phily:{t}"], ["field trace", "did you mean philly:"]),
    "unwritable output": (GOOD, ["convert", "{t}", "--out", "{o}/absent/x.csv"], ["x.csv", "cannot write"]),
    "unknown ending": (GOOD, ["convert", "{t}", "--out", "{o}.txt"], ["field out", ".csv or .parquet"]),
    "bad window": (GOOD, ["inspect", "{t}", "--from", "soon"], ["--from", "'soon'"]),
    "bad unit": (GOOD, ["inspect", "{t}", "--to", "3parsec"], ["--to", "unknown time unit 'parsec'"]),
    "unknown tenant": (GOOD, ["inspect", "{t}", "--tenant", "x"], ["field tenant", "no tenant 'x'"]),
    "bad split": (GOOD, ["inspect", "{t}", "--split", "1,2"], ["--split", "like 20,70,10"]),
    "bad GPU list": (GOOD, ["inspect", "{t}", "--only-gpus", "1;2"], ["--only-gpus"]),
    "no jobs": (GOOD, ["generate", "--jobs", "0", "--out", "{o}"], ["--jobs"]),
    "bad rate": (GOOD, ["generate", "--jobs", "5", "--rate", "8/fortnight", "--out", "{o}"], ["--rate"]),
    "load without cluster": (GOOD, ["generate", "--jobs", "5", "--load", "0.9", "--out", "{o}"], ["add --cluster"]),
    "bad cluster": (GOOD, ["generate", "--jobs", "5", "--load", "1", "--cluster", "big", "--out", "{o}"], ["'big'"]),
    "unknown GPU": (
        GOOD,
        ["generate", "--jobs", "5", "--load", "1", "--cluster", "2x2", "--gpu", "Z9", "--out", "{o}"],
        ["--gpu", "unknown GPU model 'Z9'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, args, parts = BAD[name]
    trace, out_file = tmp_path / "t.csv", tmp_path / "o.csv"
    trace.write_text(content)
    filled = [arg.format(t=trace, o=out_file) for arg in args]
    code, out, err = run(capsys, monkeypatch, "trace", *filled)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("cotenant: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert sorted(tmp_path.iterdir()) == [trace]


def test_truncated_parquet_through_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "t.parquet"
    run(capsys, monkeypatch, "trace", "generate", "--jobs", 50, "--out", whole)
    whole.write_bytes(whole.read_bytes()[:-10])
    code, out, err = run(capsys, monkeypatch, "trace", "inspect", whole)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "truncated" in err


def test_help_of_the_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys; from cotenant.cli import trace, trace_options;"
        "heavy = {'numpy', 'polars', 'numba', 'scipy', 'pydantic'} & set(sys.modules); sys.exit(', '.join(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_what_generate_prints_is_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--durations", "lognormal:2h:0", "--gpu-mix", "1:1", "--arrivals", "poisson", "--out", tmp_path / "t.csv")
    code, out, _ = run(capsys, monkeypatch, "trace", "generate", "--jobs", 20_000, "--rate", "1600/h", *asked)
    assert code == 0
    for line in ("t.csv: 20,000 jobs", "requested rate: 1,600 jobs/h", "GPU-time: 40,000 GPU-hours"):
        assert line in out
    fewer = ("--max-jobs", 1, "--out", tmp_path / "u.csv")
    code, out, _ = run(capsys, monkeypatch, "trace", "convert", tmp_path / "t.csv", *fewer)
    assert code == 0
    assert "u.csv: 1 job\n" in out
    assert "left out: 19,999 beyond the first 1 job\n" in out


def test_unknown_durations_are_no_gpu_time(call: Any, tmp_path: Path) -> None:
    """Jobs of models that only elastic profiles know, with no durations."""
    file = tmp_path / "t.csv"
    file.write_text("id,arrival_s,gpus,iterations,model\na,0,1,100,ResNet-50 (batch size 64)\n")
    assert json.loads(call("trace", "inspect", f"native:{file}", "--json")[1])["gpu_hours"] is None
    shown = call("trace", "inspect", f"native:{file}")[1]
    assert "0 GPU-hours" not in shown
    assert "elastic policies know them (simulate --policy NAME --profiles gavel)" in shown
    file.write_text("id,arrival_s,gpus,iterations,model\na,0,1,100,nobody\n")
    assert "elastic policies know" not in call("trace", "inspect", f"native:{file}")[1]
