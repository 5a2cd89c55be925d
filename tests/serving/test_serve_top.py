"""`cotenant top --url` on a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve_setup import deployment, infer, plan
from server_thread import running


def test_top_shows_services_and_gpulets(tmp_path: Path, call: Any) -> None:
    (tmp_path / "tokens").write_text("# of the first team\nsecret-token\nanother-token\n")
    services = deployment(
        [{"name": "a", "slo_ms": 60_000}, {"name": "b", "slo_ms": 60_000}], tmp_path,
        listen={"tokens": str(tmp_path / "tokens")},
    )  # fmt: skip
    with running(services, plan=plan({"a": 4})) as server:
        assert infer(server.http_url, "a", headers={"authorization": "Bearer secret-token"})[0] == 200
        token = ("--token", tmp_path / "tokens")
        code, out, _ = call("top", "--url", server.http_url, "--once", *token)
        assert code == 0
        row = next(line.split() for line in out.splitlines() if line.startswith("a "))
        assert row[5:10] == ["60,000", "100.00%", "0", "0", "0"] or row[5:7] == ["60000", "100.00%"]
        assert "a (4)" in out
        assert "b: the plan has no place for the service" in out
        code, out, _ = call("top", "--url", server.http_url, "--json", *token)
        assert json.loads(out)["services"][0]["outcomes"]["ok"] == 1
        code, _, err = call("top", "--url", server.http_url, "--once")
        assert (code, "requires a token: give --token FILE" in err) == (1, True)
        test = ("load", "--url", server.http_url, "--service", "a=20", "--duration", "0.5s", "--json")
        code, out, _ = call(*test, *token)
        assert (code, json.loads(out)["services"]["a"]["failed"]) == (0, 0)
        code, _, err = call(*test)
        assert (code, "requires a valid token" in err) == (2, True)
        code, _, err = call("top", "--url", server.http_url, "--once", "--token", tmp_path / "empty")
        assert (code, "the file with the token cannot be read" in err) == (2, True)
        url = server.http_url
    code, _, err = call("top", "--url", url, "--once")
    assert code == 1
    assert "cannot connect to" in err
    assert call("top", "--url", "ftp://x", "--once")[0] == 2
