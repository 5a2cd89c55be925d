"""`cotenant simulate --agent`: what an agent's file gives, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import cotenant

TENANTS = """
quota: 100ms
min_quota: 20ms
tenants:
  - {name: a, request: 30%, memory: 60GiB, oversubscribe: swap}
  - {name: b, request: 50%, memory: 60GiB, oversubscribe: swap}
  - {name: c, limit: 10%, memory: 4GiB}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(TENANTS)
    return str(path)


def simulate(*args: str) -> dict[str, dict[str, float]]:
    done = cotenant("simulate", *args, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    return {"": answer, **{row["name"]: row for row in answer["tenants"]}}


def test_requests_are_got_and_limits_hold(file: str) -> None:
    rows = simulate("--agent", file)
    # All three tenants always have work. a and b request 30 and 50 %, and c may have 10 %. The rest goes to a and b.
    assert rows["a"]["work_share"] >= 0.30
    assert rows["b"]["work_share"] >= 0.50
    assert rows["c"]["work_share"] <= 0.10 + 0.02
    assert rows[""]["work_share"] == pytest.approx(1.0, abs=0.01)
    assert rows[""]["moving_share"] == 0


def test_a_tenant_that_pauses_gets_what_it_can_use(file: str) -> None:
    """10 ms of work and 90 ms of pause are a tenth of the GPU at most, and not more for a promise of a half."""
    rows = simulate("--agent", file, "--load", "b=1ms:10ms/90ms")
    assert 0.02 < rows["b"]["work_share"] <= 0.10
    assert rows["a"]["work_share"] > 0.7


def test_moves_take_their_part_of_the_time(file: str) -> None:
    """76 GiB for two tenants of 60 (c keeps its 4): each switch moves 44 GiB off and 44 or 60 back."""
    rows = simulate("--agent", file, "--card", "80GiB", "--duration", "10min")
    assert rows["a"]["moves"] >= 2
    assert rows["c"]["moves"] == 0
    assert 0 < rows[""]["moving_share"] <= 0.05  # the default of most_moving
    assert rows[""]["work_share"] >= 0.9
    everything_fits = simulate("--agent", file, "--card", "140GiB")
    assert everything_fits["a"]["moves"] == 1  # the memory of a is moved in once


def test_who_gets_no_turn_has_waited_all_the_time(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("tenants: [{name: a, request: 40%}, {name: b, request: 60%}, {name: c}]")
    rows = simulate("--agent", str(path), "--duration", "30s")
    assert rows["c"]["turns"] == 0
    assert rows["c"]["longest_wait_s"] == pytest.approx(30, abs=0.01)
    assert "c got no turn" in cotenant("simulate", "--agent", str(path), "--duration", "30s").out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--load", "d=2ms"], "with a tenant of the file: a, b, c"),
        (["--load", "a=2ms:"], "NAME=KERNEL[:BUSY/PAUSE]"),
        (["--load", "a=-2ms"], "--load"),
        (["--load", "a=2ms", "--load", "a=3ms"], "a has two loads"),
        (["--card", "50GiB"], "does not fit on the GPU"),
        (["--card", "3GiB"], "cannot be swapped hold 4.0 GiB"),
        (["--duration", "0s"], "--duration"),
        (["--load", "a=2"], "'2' has no unit; write 2ms or 2s"),
        (["--load", "a=2ms/8ms"], "'a=2ms/8ms' is not NAME=KERNEL[:BUSY/PAUSE]"),
        (["--mechanism", "mps"], "--mechanism: must be time or slices, not 'mps': under mps no tenant waits"),
        (["--discipline", "fair"], "--discipline: unknown discipline 'fair'"),
        (["--discipline", "temporal", "--mechanism", "slices"], "--discipline: needs turns: add --mechanism time"),
        (["--trace", "jobs.csv"], "--agent: cannot be given together with --trace"),
        (["--card", "--json"], "--card: its value is missing: --json follows, which is an option"),
        (["--duration", "2000h"], "at most one day"),
    ],
)
def test_what_is_wrong_is_one_sentence(file: str, args: list[str], said: str) -> None:
    done = cotenant("simulate", "--agent", file, *args)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_help_in_place_of_the_file_is_a_missing_value() -> None:
    done = cotenant("simulate", "--agent", "--help")
    assert done.code == 2
    assert "--agent: its value is missing: --help follows" in done.err


def test_another_discipline_than_the_files(file: str) -> None:
    """Under `temporal` tenants take turns of one length, whatever they requested; c keeps its limit."""
    rows = simulate("--agent", file, "--discipline", "temporal")
    assert rows["a"]["turn_share"] == pytest.approx(rows["b"]["turn_share"], abs=0.01)
    assert "temporal, 60 s" in cotenant("simulate", "--agent", file, "--discipline", "temporal").out


def test_delays_are_columns_only_where_a_tenant_pauses(file: str) -> None:
    sliced = ("simulate", "--agent", file, "--mechanism", "slices", "--duration", "2s")
    assert "delay" not in cotenant(*sliced).out
    assert "delay" in cotenant(*sliced, "--load", "b=1ms:4ms/16ms").out


def test_files_that_no_gpu_can_run(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    for text, said in (
        ("quota: 100ms", "declares no tenants"),
        ("tenants: [{name: a, mechanism: mps}]", "takes no turns"),
        ("tenants: [{name: a, gpus: [0, 1]}]", "several GPUs"),
        ("tenants: [{name: a, gpus: 2}]", "is not a list of GPUs"),
        ("tenants: [{name: a, best_effort: 'no'}]", "is not true or false"),
        ("tenants: [{name: a, request: 60%}, {name: b, request: 50%}]", "110%"),
    ):
        path.write_text(text)
        done = cotenant("simulate", "--agent", path)
        assert done.code == 2
        assert said in done.err


def test_slices_of_the_hardware_in_place_of_turns(file: str) -> None:
    """c has no request and a limit of 10 %; b works 4 ms and pauses 16, so it cannot use its half."""
    rows = simulate("--agent", file, "--mechanism", "slices", "--load", "b=1ms:4ms/16ms", "--duration", "20s")
    assert rows["c"]["work_share"] <= 0.11
    assert 0.1 < rows["b"]["work_share"] <= 0.2
    assert rows["a"]["work_share"] >= 0.65
    assert rows["b"]["wait_ms_p50"] >= 0.22
    refused = cotenant("simulate", "--agent", file, "--mechanism", "slices", "--card", "80GiB")
    assert refused.code == 2
    assert "--mechanism time" in refused.err
