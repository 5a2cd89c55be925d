"""Measures the overhead of the gateway, compared with the same model in a bare ASGI app and behind Ray Serve.

pytest -q -s bench/test_gateway_bench.py
"""

from __future__ import annotations

import importlib.util

import pytest

from cotenant.bench.gateway import measure

MOST_US = 150.0  # processor time in us that gateway and dispatch may take for a small request over HTTP
INLINE_SHARE, RAY_TIMES = 0.6, 10.0


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    systems = ["cotenant", "asgi-inline"]
    if importlib.util.find_spec("ray") and importlib.util.find_spec("fastapi"):
        systems.append("ray-serve")
    result = measure(tuple(systems), seconds=3.0, rounds=5, progress=lambda text: print(text, flush=True))
    print(result)
    return result


def test_most_of_what_an_inline_app_serves(found: dict) -> None:  # type: ignore[type-arg]
    assert found["cotenant"]["failed"] == found["asgi-inline"]["failed"] == 0
    assert found["ratio"]["asgi-inline"] >= INLINE_SHARE


def test_processor_time_per_request(found: dict) -> None:  # type: ignore[type-arg]
    cotenant = found["cotenant"]
    assert cotenant["cpu_us_per_request"] < MOST_US
    for form in ("binary", "grpc"):
        assert cotenant[form]["cpu_us_per_request"] < cotenant["cpu_us_per_request"], form


def test_many_times_ray_serve_at_a_lower_p99(found: dict) -> None:  # type: ignore[type-arg]
    if "ray-serve" not in found:
        pytest.skip("ray[serve] is not installed")
    assert found["ratio"]["ray-serve"] >= RAY_TIMES
    assert found["cotenant"]["p99_ms"] < found["ray-serve"]["p99_ms"]
