"""Makes a serving profile from the measurements of bench/gpu/serving.py (grid, pairs).

    python bench/profiles/serving_profile.py RAW OUT NAME DATE DRIVER

A model's figures l2 and dram come from measurements beside a probe of the L2 cache and one of the memory. They state
how much of the probe's speed the model takes, divided by the fraction of the GPU that the model has. The interference
model is fitted to measured pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cotenant.profiles.serving.interference_fit import Fit, Pair, fit_interference
from cotenant.profiles.serving.latency_files import parse_profile

HALF = 0.5  # the fraction of the GPU that each model of a pair had
MARGIN, HAND_OVER_MS = 1.05, 0.15


def utilisations(pairs: dict[str, Any]) -> dict[str, dict[str, dict[int, float]]]:
    """model -> l2, dram -> batch -> 0..1."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for key, row in pairs["probes"].items():
        model, batch = key.split("/")
        for kind in ("l2", "dram"):
            taken = max(0.0, 1.0 - row[kind]["probe_rate"] / pairs["alone"][kind]) / HALF
            found.setdefault(model, {"l2": {}, "dram": {}})[kind][int(batch)] = round(min(1.0, taken), 4)
    return found


def fitted(pairs: dict[str, Any], utils: dict[str, dict[str, dict[int, float]]]) -> Fit:
    """The linear model of slowdowns, from both sides of every pair."""
    rows = []
    for pair in pairs["together"]:
        sides = {s: (pair[s][0], pair[s][1], pair[f"{s}_ms"]["median_ms"]) for s in ("left", "right")}
        for one, other in (("left", "right"), ("right", "left")):
            (m, b, ms), (n, c, _) = sides[one], sides[other]
            u, v = utils[m], utils[n]
            slowdown = ms / pairs["solo_ms"][f"{m}/{b}"]
            rows.append(Pair(u["l2"][b], u["dram"][b], HALF, v["l2"][c], v["dram"][c], HALF, slowdown))
    return fit_interference(rows)


def main(raw: str, out: str, name: str, date: str, driver: str) -> None:
    content = json.loads(Path(raw).read_text())
    grid, pairs = content["grid"]["result"], content["pairs"]["result"]
    utils = utilisations(pairs)
    fit = fitted(pairs, utils)
    labels = sorted(grid["cells"], key=lambda x: float(x[:-1]))
    first = grid["partitions"]["100%"]
    models = {}
    for model in grid["cells"]["100%"]:
        latency = {
            label: {b: round(x["median_ms"], 4) for b, x in grid["cells"][label][model].items()} for label in labels
        }
        memory = max(x["memory_bytes"] for x in grid["loads"][model].values())
        handed = {"1": HAND_OVER_MS, "32": HAND_OVER_MS}
        models[model] = {
            "memory_mb": round(memory / 1e6), "latency_ms": latency, "overhead_ms": handed, **utils[model]
        }  # fmt: skip
    total_mb = round(max(p["free_before"] for p in grid["partitions"].values()) / 1e6)
    profile = {
        "gpu": name,
        "source": f"measured on one {name} under MPS ({driver}) on {date} by bench/gpu/serving.py OUT.json grid,pairs:"
        " fp16, one CUDA graph per batch size, input from pinned memory and output back included; torchvision-like"
        f" models and transformers (128 tokens) of random weights. Interference fitted to {fit.pairs} measured"
        f" slowdowns of pairs on halves: error at most {fit.error_p90:.1%} for 90 % and {fit.error_p95:.1%} for 95 % of"
        " them. Overhead: hand-over to a process",
        "memory_mb": total_mb,
        "usable": 0.9,
        "per_gpulet_mb": round((first["free_before"] - first["free_after"]) / 1e6) + 500,
        "max_gpulets": 7,
        "margin": MARGIN,
        "partitions": {label: float(label[:-1]) / 100 for label in labels},
        "interference": {k: round(v, 5) for k, v in vars(fit.model).items()},
        "models": models,
    }
    parse_profile(profile, out)
    Path(out).write_text(json.dumps(profile, indent=1) + "\n")
    print(profile["source"], profile["interference"], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:6])
