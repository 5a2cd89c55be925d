"""The store: what is durable, what a full disk leaves, who may hold it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fleet_setting import Setting, work

from cotenant.core.errors import WorkError
from cotenant.core.events import Kind
from cotenant.fleet.controller.job_table import JobTable
from cotenant.fleet.controller.recording import record_of
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import MigInstance, NodeGpu, NodeSpec
from cotenant.fleet.state import FINISHED, Assignment, Attempt, GpuShare, Place
from cotenant.fleet.store.database import StoreError
from cotenant.fleet.store.jobs import FleetLock, Store, keep_store_url, store_url

SPEC = JobSpec("job", ("true",), env={"A": "b"})
HELD = Assignment((Place("node-0", (GpuShare("g"),), 3.0, 10**9),), 1, 1.5)


def test_what_was_flushed_is_there_after_a_kill(tmp_path: Path) -> None:
    table = JobTable(Store(tmp_path))
    first, second = table.add([(SPEC, 1.0), (SPEC, 2.0)])
    assert (first.id, second.id) == ("job", "job-2")
    first.attempt, first.n = Attempt(0, HELD, created_s=3.0, port=7, off=True), 1
    table.touch(first)
    table.tell(3.0, first, Kind.START, 5, HELD)
    table.flush()
    second.n = 9  # this change is not flushed
    table.touch(second)
    again = JobTable(Store(tmp_path))
    assert again.jobs["job"].attempt == first.attempt
    assert again.jobs["job"].spec == SPEC
    assert again.jobs["job-2"].n == 0
    assert JobTable(Store(tmp_path)).add([(SPEC, 0.5)])[0].row == 2
    assert list(JobTable(Store(tmp_path)).jobs) == ["job-3", "job", "job-2"]  # in order of arrival


def test_jobs_that_are_over_are_counted_and_gone_from_memory(tmp_path: Path) -> None:
    table = JobTable(Store(tmp_path))
    (job,) = table.add([(SPEC, 0.0)])
    table.over_with(job, FINISHED, 4.0)
    table.flush()
    assert table.jobs == {}
    assert table.over == {"finished": 1, "failed": 0, "cancelled": 0}
    assert JobTable(Store(tmp_path)).over["finished"] == 1


def test_a_full_disk_undoes_the_whole_transition(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table = JobTable(store)
    (job,) = table.add([(SPEC, 0.0)])
    pages = int(store.rows("PRAGMA page_count")[0][0])
    store.rows(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(StoreError, match="full"):
        table.add([(SPEC, 0.0)] * 5000)
    assert list(table.jobs) == ["job"]
    table.jobs["job"].n = 3
    table.touch(table.jobs["job"])
    table.orders["node-0"].append({"do": "start"})
    for _ in range(3000):
        table.tell(1.0, job, Kind.WAIT, 1)
    with pytest.raises(StoreError, match="full"):
        table.flush()
    assert table.jobs["job"].n == 0  # the value that is in the store
    assert not table.orders  # an order that was not stored must not be carried out
    store.rows(f"PRAGMA max_page_count={1 << 20}")
    assert len(table.add([(SPEC, 0.0)] * 5000)) == 5000


def test_the_folder_has_one_controller(tmp_path: Path) -> None:
    lock = FleetLock(tmp_path)
    with pytest.raises(WorkError, match=r"a controller \(pid \d+\) already runs in"):
        FleetLock(tmp_path)
    lock.release()
    FleetLock(tmp_path).release()


def test_a_store_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.set_meta("version", "99")
    store.commit()
    store.close()
    with pytest.raises(WorkError, match="has version 99 of the store, and this release reads 1"):
        Store(tmp_path)


def test_a_damaged_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fleet.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(WorkError, match="cannot be opened"):
        Store(tmp_path)


def test_a_folder_without_a_fleet_has_no_record(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="is not the folder of a fleet"):
        record_of(tmp_path)
    Store(tmp_path).close()
    with pytest.raises(WorkError, match="had no nodes yet"):
        record_of(tmp_path)


def test_a_record_counts_gpus_that_are_divided_by_mig(tmp_path: Path) -> None:
    """No GPU of the second node is whole, and none of the fleet where that node is alone."""
    instances = (MigInstance("MIG-a", "2g.20gb"), MigInstance("MIG-b", "3g.40gb"))
    divided = NodeSpec("mig-1", 14.0, 10**11, (NodeGpu("GPU-m", "H100-80GB", 80 << 30, "nvidia", instances),))
    plain = NodeSpec("zz-2", 14.0, 10**11, (NodeGpu("GPU-p", "H100-80GB", 80 << 30),))
    for name, nodes in (("alone", (divided,)), ("beside", (divided, plain))):
        setting = Setting(tmp_path / name, nodes=nodes)
        setting.submit(work("a", 3.0, slice="2g", gpus=0.285), work("b", 3.0, slice="3g", gpus=0.428))
        setting.run(8.0)
        run = {"policy": {"label": "x"}, "nodes": [node.to_dict() for node in nodes]}
        setting.controller.store.set_meta("run", json.dumps(run))
        setting.controller.store.commit()
        record = record_of(tmp_path / name)
        assert record.info.cluster["node_gpus"] == [1] * len(nodes)
        placed = record.placements
        assert placed is not None
        assert set(placed.nodes.tolist()) == {0}, "both ran on the first node"
        assert sorted(set(placed.gpus.round(2).tolist())) == pytest.approx([0.29, 0.43], abs=0.01)
        assert record.events.kind.tolist().count(Kind.FINISH) == 2
        setting.kill_controller()


def test_the_name_of_a_store_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that is killed meanwhile leaves the old one: with none, another database would be the store."""
    keep_store_url(tmp_path, "postgresql://fleet:one@db/fleet")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_store_url(tmp_path, "postgresql://fleet:two@db/fleet")
    assert store_url(tmp_path) == "postgresql://fleet:one@db/fleet"
    (tmp_path / "store").write_text("")
    with pytest.raises(WorkError, match="is empty"):
        store_url(tmp_path)
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    with pytest.raises(WorkError, match="store: cannot be written"):
        keep_store_url(tmp_path, "postgresql://one/fleet")
    assert [path.name for path in tmp_path.iterdir() if path.name != ".store." + str(os.getpid())] == ["store"]
