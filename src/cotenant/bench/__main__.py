"""`python -m cotenant.bench`: shares and overhead with the standard library alone, for bare GPU machines."""

from __future__ import annotations

import argparse
import json
import sys

from cotenant.bench import colocation, copying, overhead, pcie, shares, swap
from cotenant.bench.workload import KINDS
from cotenant.core.errors import InputError, WorkError


def _fractions(text: str, field: str) -> list[float]:
    try:
        return [float(part) / 100.0 for part in text.split(",")]
    except ValueError:
        raise InputError(f"{text!r} is not a list of percentages such as 30,70", field=field) from None


def _run(given: argparse.Namespace) -> dict[str, object]:
    if given.what == "overhead":
        kinds = tuple(given.workloads.split(","))
        return overhead.measure(
            gpus=given.gpus, workloads=kinds, pairs=given.pairs, block_s=given.block_s, processes=given.processes
        )
    if given.what == "pcie":
        weights = pcie.parse_weights(given.weights)
        return pcie.measure(weights, gpus=given.gpus, seconds=given.seconds, direction=given.direction)
    if given.what == "swap":
        return swap.measure(given.size, given.moves, gpus=given.gpus, park=not given.no_park)
    if given.what == "colocation":
        plan = colocation.Plan(
            colocation.parse_ls(given.ls),
            colocation.parse_be(given.be),
            colocation.parse_schemes(given.schemes),
            rounds=given.rounds,
            block_s=given.block_s,
        )
        rows: dict[str, object] = colocation.measure(given.gpus, plan)["schemes"]
        return rows
    requests = _fractions(given.requests, "--requests")
    limits = _fractions(given.limits, "--limits") if given.limits else [1.0] * len(requests)
    return shares.measure(
        requests,
        limits,
        given.seconds,
        gpus=given.gpus,
        quota_ms=given.quota_ms,
        work_in_flight_ms=given.work_in_flight_ms,
    )


def main() -> int:
    """Parse, run, print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m cotenant.bench")
    parser.add_argument("what", choices=("shares", "overhead", "swap", "pcie", "colocation"))
    parser.add_argument("--gpus", default="soft")
    parser.add_argument("--requests", default="30,70", help="percent")
    parser.add_argument("--limits", default="", help="percent")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--quota-ms", type=float, default=100.0)
    parser.add_argument("--work-in-flight-ms", type=float)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--block-s", type=float, default=0.2)
    parser.add_argument("--processes", type=int, default=1, help="pairs of processes per workload")
    parser.add_argument("--workloads", default=",".join(KINDS))
    parser.add_argument("--weights", default="1,3", help="of copies")
    parser.add_argument("--direction", choices=copying.DIRECTIONS, default="h2d", help="of copies")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--no-park", action="store_true")
    parser.add_argument("--ls", default="resnet50:4:100", help="model:batch:rate")
    parser.add_argument("--be", default="mm4096,mm2048,add256")
    parser.add_argument("--schemes", default="all")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    try:
        print(json.dumps(_run(given)))
    except InputError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except WorkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
