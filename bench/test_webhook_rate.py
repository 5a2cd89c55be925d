"""Measures reviews per second of the webhook over TLS, in the way the API server calls it: over several connections
that stay open."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path

from pods import pod, review, share
from webhook_process import Webhook, write_pair

CONNECTIONS, SECONDS, TARGET = 4, 5.0, 500


def test_reviews_a_second(tmp_path: Path) -> None:
    found = write_pair(tmp_path)
    webhook = Webhook(tmp_path / "log", f"--cert={tmp_path}/tls.crt", f"--key={tmp_path}/tls.key")
    bodies = [
        review(pod(f"p{number}", annotations=share("30%", limit="60%", memory="8Gi"), containers=[
            {"name": "main", "image": "a", "env": [{"name": f"V{n}", "value": "x" * 40} for n in range(30)]},
            {"name": "side", "image": "b"},
        ]))
        for number in range(8)
    ]  # fmt: skip
    latencies: list[float] = []
    until = time.monotonic() + SECONDS

    def ask(number: int) -> None:
        connection = webhook.connect(found.ca)
        while time.monotonic() < until:
            began = time.perf_counter()
            connection.request("POST", "/mutate", bodies[number % 8], {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            latencies.append(time.perf_counter() - began)
            assert answer.status == 200
            assert json.loads(text)["response"]["allowed"]
        connection.close()

    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(latencies) / (time.monotonic() - began)
    webhook.close()
    latencies.sort()
    p99 = latencies[int(len(latencies) * 0.99)]
    print(f"\n{rate:,.0f} reviews/s of {len(bodies[0]):,} B, {CONNECTIONS} connections:"
          f" median {statistics.median(latencies) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")  # fmt: skip
    assert rate > TARGET
