"""cotenant mig and cotenant predict, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvml_standin import Card, StandIn

from cotenant.cli import mig as mig_cli
from cotenant.devices.nvml import Nvml


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The machine's one GPU."""
    gpu = Card()
    monkeypatch.setattr(mig_cli, "_nvml", lambda: Nvml(StandIn(gpu)))
    return gpu


def jobs_file(folder: Path, rows: Any) -> Path:
    path = folder / "jobs.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


SPEED = {"7g": 1.0, "4g": 0.7, "3g": 0.6, "2g": 0.4, "1g": 0.2}


def test_layouts(call: Any) -> None:
    code, out, _ = call("mig", "layouts", "--gpu", "A100-40GB", "--json")
    answer = json.loads(out)
    assert code == 0
    assert (len(answer["placed"]), len(answer["multisets"])) == (19, 14)
    assert "3,2,2" in answer["multisets"]
    assert "2g.10gb@0,2g.10gb@2,3g.20gb@4" in answer["placed"]
    answer = json.loads(call("mig", "layouts", "--gpu", "a100-40gb", "--double-memory", "--json")[1])
    assert (len(answer["placed"]), len(answer["multisets"])) == (78, 38)
    answer = json.loads(call("mig", "layouts", "--gpu", "A30", "--running", "2g.12gb@0", "--json")[1])
    assert answer["placed"] == ["2g.12gb@0,2g.12gb@2", "2g.12gb@0,1g.6gb@2,1g.6gb@3"]
    code, out, _ = call("mig", "layouts", "--gpu", "A30")
    assert code == 0
    assert "5 placed layouts, 4 multisets" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["2,1,1", "2g.12gb@0,1g.6gb@2,1g.6gb@3"] in rows  # one row for each layout, and no frame
    assert all(line == line.rstrip() for line in out.splitlines())


def test_plan(call: Any, tmp_path: Path) -> None:
    jobs = jobs_file(tmp_path, [{"name": "a", "speed": SPEED}, {"name": "b", "speed": SPEED | {"4g": 0.95}}])
    code, out, _ = call("mig", "plan", "--gpu", "H100-80GB", "--jobs", jobs, "--objective", "throughput", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["layout"] == "4g.40gb@0,3g.40gb@4"
    assert answer["assignment"] == {"a": "3g.40gb@4", "b": "4g.40gb@0"}
    assert answer["objective"] == pytest.approx(1.55)
    assert 0 < answer["decision_us"] < 1e5
    answer = json.loads(call("mig", "plan", "--jobs", jobs, "--objective", "slowdown", "--json")[1])
    assert answer["objective"] == pytest.approx((1 / 0.6 + 1 / 0.95) / 2)
    code, out, _ = call("mig", "plan", "--jobs", jobs)
    assert code == 0
    assert "b: 4g.20gb@0" in out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{", "not JSON"),
        ({"name": "a"}, "must be a list"),
        ([{"speed": SPEED}], "jobs[0]: a job needs a name"),
        ([{"name": "a", "speed": {"7g": "fast"}}], "speed on 7g is 'fast'"),
        ([{"name": "a", "speed": {"7g": -1}}], "speed on 7g is -1"),
        ([{"name": "a", "speed": {"7g": 1, "3gg": 0.5}}], "'3gg', which is not a MIG profile"),
        ([{"name": "a", "speed": SPEED, "qos_floor": 1.5}], "qos_floor is 1.5"),
        ([{"name": "a", "speed": SPEED, "min_slice": "5g"}], "min_slice is '5g'"),
        ([{"name": "a", "speed": SPEED, "min_slice": 3}], "min_slice is 3"),
        ([{"name": "a", "speed": {"7g": 1, "7g.40gb": 0.5}}], "same slice of A100-40GB"),
        ('[{"name": "a", "speed": {"7g": NaN}}]', "speed on 7g is nan"),
        ([{"name": "a", "speed": {"7g": 1e-320}}], "speed on 7g is 1e-320"),
        ("[" * 100_000, "nested too deeply"),
        ([{"name": "a", "speed": SPEED, "memory_bytes": "4GiB"}], "memory_bytes"),
        ([{"name": "a", "speed": SPEED, "prio": 1}], "unknown field 'prio'"),
        ([{"name": "a", "speed": {"7g": 1.0}}] * 2, "named 'a'"),
        ([{"name": "a", "speed": {"7g": 0}}], "'a' fits no slice"),
        ([{"name": "a", "speed": {"7g": 1}}, {"name": "b", "speed": {"7g": 1}}], "holds these 2 jobs"),
        ([], "no jobs"),
    ],
)
def test_plan_refuses_in_one_sentence(call: Any, tmp_path: Path, rows: Any, message: str) -> None:
    code, out, err = call("mig", "plan", "--jobs", jobs_file(tmp_path, rows), "--json")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_other_refusals(call: Any, tmp_path: Path) -> None:
    jobs = jobs_file(tmp_path, [{"name": "a", "speed": SPEED}])
    assert call("mig", "plan", "--jobs", jobs, "--objective", "best")[0] == 2
    code, _, err = call("mig", "layouts", "--gpu", "T4")
    assert code == 2
    assert "T4 has no MIG" in err
    assert call("mig", "plan", "--jobs", tmp_path / "none.json")[0] == 2


def test_apply_export_reset_on_the_stand_in(call: Any, card: Card) -> None:
    code, out, _ = call("mig", "apply", "4,3", "--gpu", card.uuid, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == ["create 4g.20gb@0", "create 3g.20gb@4"]
    assert card.instances == {}
    code, out, err = call("mig", "apply", "4,3", "--gpu", card.uuid, "--json")
    assert code == 0
    assert [i["profile"] for i in json.loads(out)["instances"]] == ["4g.20gb", "3g.20gb"]
    assert "creating 4g.20gb@0" in err
    code, out, _ = call("mig", "export", "--json")
    table = json.loads(out)["gpus"][0]
    assert table["uuid"] == card.uuid
    assert [i["start"] for i in table["instances"]] == [0, 4]
    code, _, err = call("mig", "disable", "--gpu", "0")
    assert code == 1
    assert "cotenant mig reset" in err
    assert call("mig", "reset", "--gpu", "0")[0] == 0
    code, out, _ = call("mig", "disable", "--gpu", "0")
    assert (code, out) == (0, "MIG is off\n")
    code, out, _ = call("mig", "enable", "--gpu", "0", "--json")
    assert json.loads(out)["mig"] is True


def test_apply_refuses_a_layout_and_a_busy_gpu(call: Any, card: Card) -> None:
    code, out, err = call("mig", "apply", "4,4", "--gpu", card.uuid)
    assert (code, out) == (2, "")
    assert "does not exist" in err
    card.processes = {77: None}
    code, _, err = call("mig", "apply", "4,3", "--gpu", card.uuid)
    assert code == 1
    assert "process 77" in err
    code, _, err = call("mig", "apply", "4,3", "--gpu", "GPU-none")
    assert code == 2
    assert "is not on this machine" in err


def test_predict(call: Any, tmp_path: Path) -> None:
    mps = np.random.default_rng(0).uniform(0.3, 1.0, (4, 3, 7))
    mig = np.tile(np.array([0.8889, 1.0, 0.8889])[None, :, None], (4, 1, 7))
    mig[0, :, 0] = [0.6, 0.95, 1.0]
    np.savez(tmp_path / "both.npz", X=mps, Y=mig)
    np.savez(tmp_path / "only.npz", X=mps)
    code, out, _ = call("predict", "--input", tmp_path / "both.npz", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["n_columns"] == 1  # the other 27 columns are dummies
    assert set(answer["mae_by_slice"]) == {"7g", "4g", "3g"}
    assert answer["mae"] == pytest.approx(np.mean(list(answer["mae_by_slice"].values())))
    code, out, _ = call("predict", "--input", tmp_path / "only.npz", "--out", tmp_path / "p.npz", "--json")
    assert json.loads(out)["n_columns"] == 28
    with np.load(tmp_path / "p.npz") as written:
        assert written["P"].shape == (4, 3, 7)
        assert written["S"].shape == (4, 7, 5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"Z": np.ones(3)}, "no array X"),
        ({"X": np.ones((4, 7, 3))}, "must be (n, 3, 7)"),
        ({"X": np.full((1, 3, 7), np.nan)}, "X[0, 0, 0] is nan"),
        ({"X": np.zeros((1, 3, 7))}, "must be above 0"),
        ({"X": np.ones((2, 3, 7)), "Y": np.ones((1, 3, 7))}, "both need the same number of mixes"),
        ({"X": np.ones((1, 3, 7)), "Y": np.ones((1, 7, 3))}, "slices 7g/4g/3g"),
        ({"X": np.ones((1, 3, 7)), "Y": -np.ones((1, 3, 7))}, "Y[0, 0, 0] is -1.0"),
        ({"X": np.ones((1, 3, 7)), "Y": np.full((1, 3, 7), "a")}, "Y holds <U1, not numbers"),
        ({"X": np.ones((1, 3, 7)) + 1j}, "X holds complex128, not numbers"),
        ({"X": np.ones((1, 3, 7)), "Y": np.tile([[0.8889], [1], [0.8889]], (1, 1, 7))}, "dummy"),
    ],
)
def test_predict_refuses_in_one_sentence(call: Any, tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "f.npz", **arrays)
    code, out, err = call("predict", "--input", tmp_path / "f.npz", "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_predict_takes_targets_in_seconds(call: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    mps, mig = rng.uniform(0.3, 1.0, (2, 3, 7)), rng.uniform(0.3, 1.0, (2, 3, 7))
    np.savez(tmp_path / "seconds.npz", X=mps, Y=mig * 0.02)
    np.savez(tmp_path / "over.npz", X=mps, Y=mig / mig.max(1, keepdims=True))
    files = (tmp_path / "seconds.npz", tmp_path / "over.npz")
    seconds, over = (json.loads(call("predict", "--input", f, "--json")[1]) for f in files)
    assert seconds["mae"] == pytest.approx(over["mae"])


def test_predict_refuses_what_is_no_file_of_its_kind(call: Any, tmp_path: Path) -> None:
    (tmp_path / "f.npz").write_text("hello")
    np.save(tmp_path / "plain.npy", np.ones((1, 3, 7)))
    np.savez(tmp_path / "x.npz", X=np.ones((1, 3, 7)))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "torn.npz").write_bytes(whole[:200] + bytes(40) + whole[240:])
    for name in ("f.npz", "plain.npy", "half.npz", "torn.npz", "none.npz"):
        for option in ("--input", "--model"):
            other = [] if option == "--input" else ["--input", tmp_path / "x.npz"]
            code, out, err = call("predict", option, tmp_path / name, *other)
            assert (code, out, err.count("\n")) == (2, "", 1), (name, option)
            assert "pickle" not in err
    code, _, err = call("predict", "--input", tmp_path / "x.npz", "--model", tmp_path / "x.npz")
    assert code == 2
    assert "no MPS -> MIG model file" in err


def test_simulate_against_other_policies(call: Any, tmp_path: Path) -> None:
    """Two jobs that arrive together on one GPU: 100 s and 100 s of work one after the other, or side by side."""
    trace = tmp_path / "t.csv"
    header = "id,arrival_s,num_iters,launch_s,lat_7g.40gb,lat_4g.20gb,lat_3g.20gb"
    trace.write_text(f"{header}\na,0,100,0,1,1.25,1.25\nb,0,100,0,1,1.25,1.25\n")
    argv = ("simulate", "--trace", f"miso:{trace}", "--cluster", "1x1", "--policy", "oracle", "--no-overheads")
    code, out, _ = call(*argv, "--against", "whole,static,oracle", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["jct_s"]["mean"] == pytest.approx(125.0)  # both jobs on half of the GPU, 1.25 s an iteration
    # the policy is not compared with itself
    assert [name.split()[0] for name in answer["against"]] == ["whole", "static"]
    static = next(value for name, value in answer["against"].items() if name.startswith("static"))
    assert static["jct_mean_s"] == pytest.approx(125.0)  # one half for each job
    assert answer["against"]["whole"]["jct_mean_s"] == pytest.approx(150.0)  # the jobs take 100 and 200 s
    assert answer["against"]["whole"]["ratio"] == pytest.approx(125 / 150)
    code, out, _ = call(*argv, "--against", "whole")
    assert code == 0
    assert "mean JCT is 0.833 times that of whole" in out
    for wrong in (("--against", "whole,best"), ("--against", "static", "--layout", "3,3")):
        code, out, err = call(*argv, *wrong, "--out", tmp_path / "run")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert not (tmp_path / "run").exists()


def test_a_mig_parted_configuration_is_checked_and_applied(call: Any, card: Card, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nmig-configs:\n  halves:\n  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}\n"
        "  tiny:\n  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb+me: 1}}\n"
    )
    code, out, _ = call("mig", "check", config)
    assert (code, out) == (0, "halves: A100-40GB\ntiny: A100-40GB\n")
    code, out, _ = call("mig", "apply", "halves", "--config", config, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["gpus"][0]["steps"] == ["create 3g.20gb@0", "create 3g.20gb@4"]
    code, out, _ = call("mig", "apply", "halves", "--config", config)
    assert code == 0
    assert sorted(i.start for i in card.instances.values()) == [0, 4]
    code, _, err = call("mig", "apply", "quarters", "--config", config)
    assert code == 2
    assert "has no list 'quarters'; its lists are halves, tiny" in err
    code, _, err = call("mig", "apply", "3,3")
    assert (code, err.count("\n")) == (2, 1)
    config.write_text(config.read_text().replace("3g.20gb: 2", "3g.20gb: 3"))
    code, out, err = call("mig", "check", config, "--json")
    assert code == 2
    assert json.loads(out)["rules"][0]["problem"] == "no GPU model of the catalog supports it"
    assert "1 of 2 rules cannot be applied" in err
