"""`cotenant load` as people call it."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import command
from oip_standin import Reply, standin


def test_one_json_object_and_a_log(tmp_path: Path) -> None:
    log, page = tmp_path / "log.csv", tmp_path / "page.html"
    status = {"services": [{"name": "a", "slo_ms": 5000}]}
    with standin({"a": lambda x: Reply(), "b": lambda x: Reply()}, status) as server:
        done = subprocess.run(
            command(
                "load", "--url", server.url, "--service", "a=100", "--service", "b=2@closed", "--arrivals", "constant",
                "--duration", "1s", "--csv", log, "--html", page, "--json",
            ),
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    content = json.loads(done.stdout)
    row = content["services"]["a"]
    assert (row["sent"], row["ok"], row["slo_ms"], row["slo_attainment"]) == (100, 100, 5000.0, 1.0)
    assert content["services"]["b"]["slo_ms"] is None
    assert content["services"]["b"]["ok"] >= 2  # one of each client; how many more depends on the machine
    assert set(content["lateness_ms"]) == {"p50", "p99", "max"}
    with log.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == content["requests"]
    assert {r["service"] for r in rows} == {"a", "b"}
    assert "Load test" in page.read_text()[:3000]


def test_a_run_without_any_good_answer_fails(tmp_path: Path) -> None:
    """Its result and log are written all the same."""
    log = tmp_path / "log.csv"
    with standin({"a": lambda seen: Reply(status=503)}) as server:
        done = subprocess.run(
            command("load", "--url", server.url, "--service", "a=20", "--duration", "1s", "--csv", log, "--json"),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    content = json.loads(done.stdout)
    sent = content["requests"]
    assert (done.returncode, content["services"]["a"]["dropped"]) == (1, sent)
    assert done.stderr.splitlines()[-1] == f"cotenant: none of the {sent} requests was answered with a result"
    assert len(log.read_text().splitlines()) == sent + 1


@pytest.mark.slow
def test_the_largest_load_is_found() -> None:
    """The server takes 100 requests of `a` in each second and refuses the rest.

    A probe of 1.5 s may lie three quarters of a second in each of two, so up to 133 requests a second pass it.
    """
    taken: dict[int, int] = {}

    def limited(seen: Any) -> Reply:
        second = int(seen.at_s)
        taken[second] = taken.get(second, 0) + 1
        return Reply() if taken[second] <= 100 else Reply(status=429)

    with standin({"a": limited}) as server:
        done = subprocess.run(
            command(
                "load", "--url", server.url, "--service", "a=50", "--arrivals", "constant", "--slo", "3000",
                "--find-max", "--probe", "1.5s", "--duration", "1s", "--tolerance", "25%", "--target", "98%", "--json",
            ),
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    content = json.loads(done.stdout)
    assert 1.5 <= content["factor"] <= 2.7
    assert content["rates_rps"]["a"] == pytest.approx(50 * content["factor"])
    assert [p["held"] for p in content["probes"] if p["factor"] == content["factor"]] == [True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "ftp://x", "--service", "a=1"], "is not an address"),
        (["--url", "http://127.0.0.1:9"], "nothing to send"),
        (["--url", "http://[::1", "--service", "a=1"], "is not an address"),
        (["--openai", "http://[::1:80", "--rate", "1"], "is not an address"),
        (["--url", "http://127.0.0.1:9", "--service", "a"], "needs a rate"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--service", "a=2"], "a is given twice"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--slo", "b=3"], "'b' is none of the services"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--arrivals", "sometimes"], "not an arrival process"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--arrivals", "trace:/nowhere.csv"], "cannot read"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--find-max"], "no service has an SLO"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--format", "xml"], "must be binary or json"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--rate", "x0"], "not a factor"),
        (["--url", "http://127.0.0.1:9\n", "--service", "a=1"], "control characters"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--token", "s3cret-itself"], "the file with the token"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--seed", "-1"], "seed"),
        (["--url", "http://127.0.0.1:9", "--service", "a=1", "--csv", "/nowhere/x.csv"], "cannot write"),
    ],
)
def test_wrong_input_is_one_sentence(call: Any, arguments: list[str], sentence: str) -> None:
    code, out, err = call("load", *arguments)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert "s3cret" not in err
    assert len(err.strip().splitlines()) == 1


def test_nobody_there_is_a_failure_not_wrong_input(call: Any) -> None:
    code, _, err = call("load", "--url", "http://127.0.0.1:9", "--service", "a=1")
    assert code == 1
    assert "cannot reach" in err
