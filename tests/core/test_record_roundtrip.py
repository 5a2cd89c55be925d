"""Writing and reading back: the same data, the same bytes, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import hand_record, random_record

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.core.files import check_folder
from cotenant.core.record import writer as writer_module
from cotenant.core.record.reader import find_records, is_record, read_record
from cotenant.core.record.record import jobs_table
from cotenant.core.record.schema import EVENTS, JOBS, ROUNDS, RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.work import Jobs

JOBS_TWO = [{"id": "a", "arrival_s": 0.0, "gpus": 2.0}, {"id": "b", "arrival_s": 5.0, "gpus": 1.0}]
EVENTS_TWO = [
    (0.0, 0, Kind.ARRIVE, Reason.NONE),
    (0.0, 0, Kind.START, Reason.IN_ORDER, 6, 125, 1.0, [(0, 1.0), (1, 1.0)]),
    (5.0, 1, Kind.ARRIVE, Reason.NONE),
    (5.0, 1, Kind.WAIT, Reason.GPUS_FULL),
    (9.0, 0, Kind.FINISH, Reason.DONE),
]
PLACES = st.tuples(st.integers(0, 9), st.floats(0.125, 8, width=32))


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def two_jobs(n: int = 2) -> pl.DataFrame:
    return jobs_table(Jobs.build(n, id=[f"j{i}" for i in range(n)], arrival_s=np.zeros(n), gpus=np.ones(n)))


def test_a_record_reads_back_as_written(tmp_path: Path) -> None:
    record = hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run", label="fifo", seed=7, options={"lease": 300.0})
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == [
        "events.parquet", "jobs.parquet", "rounds.parquet", "run.json",
    ]  # fmt: skip
    again = read_record(tmp_path / "run")
    assert again.info == record.info
    assert (again.info.label, again.info.seed, again.info.options) == ("fifo", 7, {"lease": 300.0})
    assert again.events.time_s.tolist() == [0.0, 0.0, 5.0, 5.0, 9.0]
    assert again.events.job.tolist() == [0, 0, 1, 1, 0]
    assert again.events.kind.tolist() == [0, 1, 0, 7, 6]
    assert again.events.reason.tolist() == [0, 5, 0, 1, 11]
    assert again.events.cpu_milli.tolist() == [0, 6000, 0, 0, 0]
    assert again.events.memory_mb.tolist() == [0, 125000, 0, 0, 0]
    assert again.placements is not None
    assert again.placements.at(1) == [(0, 1.0), (1, 1.0)]
    assert again.placements.gpus_held().tolist() == [0.0, 2.0, 0.0, 0.0, 0.0]
    assert again.job("id").tolist() == ["a", "b"]
    assert again.end_s == 9.0
    assert again.jobs.schema == JOBS
    assert again.rounds.schema == ROUNDS


def test_the_files_have_the_schema_that_is_documented(tmp_path: Path) -> None:
    random_record(1, jobs=10, path=tmp_path / "run")
    for name, schema in (("jobs", JOBS), ("events", EVENTS), ("rounds", ROUNDS)):
        assert dict(pl.read_parquet_schema(tmp_path / "run" / f"{name}.parquet")) == schema


def test_memory_and_disk_hold_the_same(tmp_path: Path) -> None:
    kept, read = random_record(3), random_record(3, path=tmp_path / "run")
    for name in kept.events.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(kept.events, name), getattr(read.events, name))
    assert kept.jobs.equals(read.jobs, null_equal=True)
    assert kept.rounds.equals(read.rounds)
    assert kept.placements is not None
    assert read.placements is not None
    np.testing.assert_array_equal(kept.placements.offset, read.placements.offset)
    np.testing.assert_array_equal(kept.placements.nodes, read.placements.nodes)
    np.testing.assert_array_equal(kept.placements.gpus, read.placements.gpus)


@pytest.mark.parametrize("spill", [1 << 19, 64])
def test_same_input_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: int) -> None:
    monkeypatch.setattr(writer_module, "_SPILL_ROWS", spill)
    for name in ("one", "two"):
        random_record(5, jobs=40, path=tmp_path / name)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_a_jobs_table_may_come_in_pieces(tmp_path: Path) -> None:
    jobs = two_jobs(5)
    pieces = [jobs[:2], jobs[2:3], jobs[3:]]
    for path in (tmp_path / "run", None):
        with RecordWriter(path, RunInfo("x", placements=False), iter(pieces)) as writer:
            pass
        assert writer.close().jobs.equals(jobs)
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == [
        "events.parquet", "jobs.parquet", "rounds.parquet", "run.json",
    ]  # fmt: skip

    def fails() -> Iterator[pl.DataFrame]:
        yield from pieces[:2]
        raise RuntimeError("the second half is not there")

    with pytest.raises(RuntimeError):
        RecordWriter(tmp_path / "failed", RunInfo("x"), fails())
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_the_number_of_threads_does_not_change_the_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from sample_records import random_record\n"
        "from cotenant.core.record import writer\n"
        "writer._SPILL_ROWS = 100\n"
        "random_record(2, jobs=80, path=Path(sys.argv[2]))\n"
    )
    helpers = Path(__file__).parent.parent / "helpers"
    for threads in ("1", "4"):
        env = os.environ | {"POLARS_MAX_THREADS": threads}
        subprocess.run([sys.executable, "-c", code, helpers, tmp_path / threads], check=True, env=env, timeout=60)
    assert digest(tmp_path / "1") == digest(tmp_path / "4")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(0.125, 8, width=32)), max_size=3), max_size=5))
)
def test_chunks_of_any_size_join_to_the_whole(chunks: list[list[list[tuple[int, float]]]]) -> None:
    """Node lists of every event survive, whatever the chunks, and wherever a chunk's offsets start."""
    writer = RecordWriter(None, RunInfo("x"), two_jobs())
    for chunk in chunks:
        n = len(chunk)
        flat = [pair for nodes in chunk for pair in nodes]
        offset = 2 + np.concatenate(([0], np.cumsum([len(nodes) for nodes in chunk]))).astype(int)
        writer.append_events(
            time_s=np.zeros(n), job=np.zeros(n), kind=np.ones(n), reason=np.zeros(n), cpu_milli=np.zeros(n),
            memory_mb=np.zeros(n), speed=np.zeros(n), node_offset=offset,
            node_ids=[77, 77] + [p[0] for p in flat], node_gpus=[0.5, 0.5] + [p[1] for p in flat],
        )  # fmt: skip
    placements = writer.close().placements
    assert placements is not None
    whole = [nodes for chunk in chunks for nodes in chunk]
    assert [placements.at(i) for i in range(len(whole))] == whole
    sums = [sum(g for _, g in nodes) for nodes in whole]
    np.testing.assert_allclose(placements.gpus_held(), sums, atol=1e-5)


def test_buffers_may_be_reused_after_an_append() -> None:
    writer = RecordWriter(None, RunInfo("x", placements=False), two_jobs())
    buffer = np.array([1.0])
    zero = np.zeros(1)
    rest = {"kind": zero, "reason": zero, "cpu_milli": zero, "memory_mb": zero, "speed": zero}
    writer.append_events(time_s=buffer, job=zero, **rest)
    buffer[0] = 2.0
    writer.append_events(time_s=buffer, job=zero, **rest)
    assert writer.close().events.time_s.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("time_s", "job"), [([5.0], [0]), ([11.0, 10.5], [0, 0]), ([np.nan], [0]), ([12.0], [2])])
def test_times_that_run_backwards_and_unknown_jobs_are_refused(time_s: list[float], job: list[int]) -> None:
    writer = RecordWriter(None, RunInfo("x", placements=False), two_jobs())
    zero = np.zeros(len(job))
    rest = {"kind": zero, "reason": zero, "cpu_milli": zero, "memory_mb": zero, "speed": zero}
    writer.append_events(time_s=[10.0], job=[0], **{k: [0] for k in rest})
    with pytest.raises(ValueError):
        writer.append_events(time_s=time_s, job=job, **rest)


def test_without_placements_there_are_none(tmp_path: Path) -> None:
    record = hand_record(JOBS_TWO, EVENTS_TWO, placements=False, path=tmp_path / "run")
    assert record.placements is None
    assert pl.read_parquet(tmp_path / "run" / "events.parquet")["nodes"].null_count() == 5


def test_nothing_appears_before_close_and_nothing_after_an_error(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run"
    with RecordWriter(target, RunInfo("x", placements=False), two_jobs()):
        assert not target.exists()
    assert target.exists()
    target = tmp_path / "deeper" / "run"
    with pytest.raises(RuntimeError), RecordWriter(target, RunInfo("x"), two_jobs()):
        raise RuntimeError
    assert list((tmp_path / "deeper").iterdir()) == []


def test_an_earlier_run_is_replaced_and_kept_on_error(tmp_path: Path) -> None:
    hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run", label="old")
    with pytest.raises(RuntimeError), RecordWriter(tmp_path / "run", RunInfo("new"), two_jobs()):
        raise RuntimeError
    assert read_record(tmp_path / "run").info.label == "old"
    hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run", label="new")
    assert read_record(tmp_path / "run").info.label == "new"
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_a_folder_with_other_things_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="something other than a run"):
        RecordWriter(tmp_path, RunInfo("x"), two_jobs())
    file = tmp_path / "thesis.tex"
    with pytest.raises(InputError, match="not a folder"):
        RecordWriter(file, RunInfo("x"), two_jobs())
    with pytest.raises(InputError, match="cannot write here"):
        RecordWriter(file / "run", RunInfo("x"), two_jobs())
    assert file.read_text() == "years of work"


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait(timeout=60)
    leftover = tmp_path / f".run.part-{killed.pid}"
    leftover.mkdir()
    hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run")
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_an_info_that_is_no_json_leaves_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run", RunInfo("x", options={"f": object()}), two_jobs())
    with pytest.raises(TypeError):
        writer.close()
    assert list(tmp_path.iterdir()) == []


class TestBadFolders:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run")
        return tmp_path / "run"

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such folder") as error:
            read_record(tmp_path / "nowhere")
        assert error.value.file == str(tmp_path / "nowhere")

    def test_a_file(self, run: Path) -> None:
        with pytest.raises(InputError, match="is a file; a run is a folder"):
            read_record(run / "run.json")

    def test_foreign(self, run: Path) -> None:
        (run / "run.json").write_text('{"name": "someone else\'s"}')
        with pytest.raises(InputError, match="not from a run of cotenant"):
            read_record(run)
        (run / "run.json").write_text("{")
        with pytest.raises(InputError, match="not readable as JSON"):
            read_record(run)
        (run / "run.json").unlink()
        with pytest.raises(InputError, match=r"it has no run\.json"):
            read_record(run)

    def test_newer(self, run: Path) -> None:
        info = json.loads((run / "run.json").read_text()) | {"schema_version": 99}
        (run / "run.json").write_text(json.dumps(info))
        with pytest.raises(InputError, match=r"newer cotenant \(record version 99"):
            read_record(run)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"options": []}, "options"),
            ({"cluster": 5}, "cluster"),
            ({"trace": "x"}, "trace"),
            ({"seed": "x"}, "seed"),
            ({"cluster": {"gpus": "x"}}, "cluster.gpus"),
            ({"cluster": {"node_gpus": [None]}}, "cluster.node_gpus"),
        ],
    )
    def test_edited(self, run: Path, change: dict[str, object], field: str) -> None:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        (run / "run.json").write_text(json.dumps(info | change), encoding="utf-8")
        with pytest.raises(InputError) as caught:
            read_record(run)
        assert caught.value.field == field

    @pytest.mark.parametrize("name", ["jobs.parquet", "events.parquet", "rounds.parquet"])
    def test_truncated_or_gone(self, run: Path, name: str) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(InputError, match="not a complete Parquet file") as error:
            read_record(run)
        assert error.value.file == str(run / name)
        (run / name).unlink()
        with pytest.raises(InputError, match="is missing"):
            read_record(run)

    def test_a_column_is_missing_or_of_another_type(self, run: Path) -> None:
        table = pl.read_parquet(run / "events.parquet")
        table.drop("speed").write_parquet(run / "events.parquet")
        with pytest.raises(InputError, match="field speed: column is missing"):
            read_record(run)
        table.with_columns(pl.col("time_s").cast(pl.Int64)).write_parquet(run / "events.parquet")
        with pytest.raises(InputError, match="field time_s: column is Int64, expected Float64"):
            read_record(run)

    def test_events_of_jobs_that_are_not_there(self, run: Path) -> None:
        pl.read_parquet(run / "jobs.parquet").head(1).write_parquet(run / "jobs.parquet")
        with pytest.raises(InputError, match="the record is damaged"):
            read_record(run)


def test_finding_runs(tmp_path: Path) -> None:
    for name in ("sweep/b", "sweep/a", "sweep/.half"):
        hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / name)
    assert find_records(tmp_path / "sweep") == [tmp_path / "sweep/a", tmp_path / "sweep/b"]
    assert find_records(tmp_path / "sweep" / "a") == [tmp_path / "sweep/a"]
    assert is_record(tmp_path / "sweep/a")
    assert not is_record(tmp_path / "sweep")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="contains no run"):
        find_records(tmp_path / "empty")
    with pytest.raises(InputError, match="no such folder"):
        find_records(tmp_path / "nowhere")


def test_a_folder_is_checked_before_work_starts(tmp_path: Path) -> None:
    check_folder(tmp_path / "runs" / "fifo", "run.json")
    hand_record(JOBS_TWO, EVENTS_TWO, path=tmp_path / "run")
    check_folder(tmp_path / "run", "run.json")
    with pytest.raises(InputError, match="something other than a run"):
        check_folder(tmp_path, "run.json")
    with pytest.raises(InputError, match="cannot write here: not a directory"):
        check_folder(tmp_path / "run" / "run.json" / "under", "run.json")
    assert [f.name for f in tmp_path.iterdir()] == ["run"]
