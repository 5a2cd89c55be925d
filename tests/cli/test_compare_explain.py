"""cotenant compare and cotenant explain, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_records import random_record

from cotenant.core.metrics.summary import summarise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    for i, (label, boost) in enumerate((("fifo + proportional", 1.0), ("srtf + tune", 3.0))):
        random_record(1, jobs=40, boost=boost, label=label, path=out / f"run-{i}")
    return out


def test_compare_prints_a_table(call: Any, folder: Path) -> None:
    code, out, err = call("compare", folder)
    assert (code, err) == (0, "")
    assert "fifo + proportional" in out
    assert "srtf + tune" in out
    assert "JCT mean" in out


def test_compare_as_json_and_page(call: Any, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    code, out, _ = call("compare", folder / "run-1", folder, "--json", "--html", page, "--title", "My runs")
    answer = json.loads(out)
    # run-1 was named twice, directly and through its folder. It is listed once, as the first one.
    assert code == 0
    assert [run["label"] for run in answer["runs"]] == ["srtf + tune", "fifo + proportional"]
    expected = summarise(random_record(1, jobs=40, boost=1.0))
    assert answer["runs"][1]["jct_s"] == expected["jct_s"]
    assert answer["runs"][1]["utilisation"] == expected["utilisation"]
    assert answer["html"] == str(page)
    assert "<title>My runs</title>" in page.read_text()


def test_explain_in_words_and_as_json(call: Any, folder: Path) -> None:
    code, out, _ = call("explain", folder / "run-0", "job-3")
    assert code == 0
    assert out.startswith("job-3 under fifo + proportional: ")
    assert "  arrived\n" in out
    assert "finished" in out.splitlines()[-1]
    code, out, _ = call("explain", folder / "run-0", "job-3", "--json")
    answer = json.loads(out)
    assert (code, answer["job"]) == (0, "job-3")
    assert answer["jct_s"] == pytest.approx(answer["queueing_s"] + answer["running_s"])


def test_explain_without_a_job_names_some(call: Any, folder: Path) -> None:
    code, out, _ = call("explain", folder / "run-0")
    assert code == 0
    assert "took longest" in out
    code, out, _ = call("explain", folder / "run-0", "--json")
    assert "took longest" in json.loads(out)["notable"][0]["why"]


def test_explain_writes_a_perfetto_trace(call: Any, folder: Path, tmp_path: Path) -> None:
    code, out, _ = call("explain", folder / "run-0", "--perfetto", tmp_path / "t.json")
    assert code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    count = sum(event["ph"] == "X" for event in events)
    assert out == f"{count:,} slices in {tmp_path / 't.json'}; open it at ui.perfetto.dev or chrome://tracing\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("compare", "{out}/nowhere"), "{out}/nowhere: no such folder"),
        (("compare", "{tmp}"), "{tmp}: contains no run (a run is a folder with run.json in it)"),
        (("compare", "{out}", "--html", "{tmp}"), "{tmp}: is a folder; name a file"),
        (
            ("compare", "{out}", "--html", "{tmp}/no/r.html"),
            "{tmp}/no/r.html: cannot write here: no such file or directory",
        ),
        (("compare", "{out}", "--profiles", "{tmp}/p.json"), "{tmp}/p.json: cannot be read: no such file or directory"),
        (("explain", "{out}/nowhere", "job-1"), "{out}/nowhere: no such folder"),
        (
            ("explain", "{out}", "job-1"),
            "{out}: is not a run, but contains some; name one of them, such as {out}/run-0",
        ),
        (
            ("explain", "{out}/run-0", "job-99"),
            "{out}/run-0, field JOB: no job 'job-99' in this run; did you mean job-9, job-39 or job-29?",
        ),
        (
            ("explain", "{out}/run-0", "--perfetto", "{tmp}/no/t.json"),
            "{tmp}/no/t.json: cannot write here: no such file or directory",
        ),
    ],
)
def test_wrong_input_is_one_sentence(
    call: Any, folder: Path, tmp_path: Path, argv: tuple[str, ...], sentence: str
) -> None:
    names = {"out": str(folder), "tmp": str(tmp_path)}
    code, out, err = call(*(arg.format(**names) for arg in argv))
    assert (code, out) == (2, "")
    assert err == f"cotenant: {sentence.format(**names)}\n"
    assert list(tmp_path.iterdir()) == []


def test_runs_of_different_traces_get_a_note(call: Any, folder: Path, tmp_path: Path) -> None:
    random_record(1, jobs=30, label="las + tune", path=tmp_path / "other")
    code, out, _ = call("compare", folder / "run-0", tmp_path / "other")
    assert code == 0
    assert "note: These runs have different" in out
    assert "different" in json.loads(call("compare", folder / "run-0", tmp_path / "other", "--json")[1])["note"]
    assert "note: These runs" not in call("compare", folder)[1]
    assert json.loads(call("compare", folder, "--json")[1])["note"] is None
