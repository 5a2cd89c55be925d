"""The OpenAPI description, fuzzed by schemathesis against a running server: no crash, no undocumented answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from serve_setup import deployment, plan
from server_thread import Running, running

from cotenant.serving.protocol.openapi import document

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    services = deployment([{"name": "a", "slo_ms": 60_000}], tmp_path_factory.mktemp("openapi"))
    with running(services, plan=plan({"a": 8})) as found:
        yield found


def test_every_answer_is_one_that_the_description_has(server: Running) -> None:
    """Every operation, a dozen requests each: as described and not, with the model that exists and without."""
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_dict(document())
    failed: list[str] = []
    checked = 0
    for operation in schema.get_all_operations():
        made = operation.ok()
        strategy = made.as_strategy() | made.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @settings(
            max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(case=strategy)
        def probe(case: object) -> None:
            nonlocal checked
            if zlib.crc32(str(case).encode(errors="replace")) % 2 and getattr(case, "path_parameters", None):
                case.path_parameters["model"] = "a"  # type: ignore[attr-defined]
            response = case.call(base_url=server.http_url)  # type: ignore[attr-defined]
            checked += 1
            assert response.status_code != 500, response.text[:300]
            case.validate_response(response, checks=CHECKS)  # type: ignore[attr-defined]

        try:
            probe()
        except Exception as error:  # all failures are collected, so that one run names all of them
            failed.append(f"{made.method} {made.path}: {error}")
    assert not failed, "\n".join(failed)
    assert checked > 150
    assert server.status()["worker_deaths"] == 0
