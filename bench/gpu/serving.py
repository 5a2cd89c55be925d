"""Serving several models on one GPU: profile, plan, live attainment, largest load. Needs one GPU and MPS; writes JSON.

    CUDA_VISIBLE_DEVICES=GPU-... PYTHONPATH=src python bench/gpu/serving.py OUT.json grid,pairs,live

`grid` and `pairs` make the measurements from which serving_profile.py makes a profile and plans; `live` serves those
plans. Without a GPU, the steps run on the CPU with small numbers, to find errors in the script.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

from serving_workers import Clock, OutOfTimeError, Workers  # noqa: E402

SMALL = not os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-")
MODELS = ["resnet50", "vgg16", "mobilenet_v2", "densenet121", "vit_b16", "bert_base", "bert_large"]
PARTITIONS = [1.0, 0.5, 0.2, 0.4, 0.14, 0.3, 0.1, 0.6]
BATCHES = [1, 2, 4, 8, 12, 16, 24, 32]
PAIR_BATCHES = [1, 8, 32]
if SMALL:
    MODELS, PARTITIONS, BATCHES, PAIR_BATCHES = ["mobilenet_v2", "resnet50"], [1.0, 0.5], [1, 2], [1, 2]
CELL_S = 0.10
GRID_S, PAIRS_S = 215.0, 75.0


def grid(report: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the latency of every model, partition and batch size alone on the GPU, and time and memory of loading."""
    clock = Clock(GRID_S)
    found: dict[str, Any] = {"cells": {}, "loads": {}, "partitions": {}, "complete": False}
    with Workers() as workers:
        # while one worker is measured, the next one loads its libraries; it does not use the GPU yet
        ahead = [workers.start(f"p{PARTITIONS[0]:g}", PARTITIONS[0])]
        for i, fraction in enumerate(PARTITIONS):
            if i + 1 < len(PARTITIONS):
                ahead.append(workers.start(f"p{PARTITIONS[i + 1]:g}", PARTITIONS[i + 1]))
            worker = ahead.pop(0)
            worker.ready()
            label = f"{fraction * 100:g}%"
            found["partitions"][label] = worker.ask("touch")
            cells = found["cells"].setdefault(label, {})
            for model in MODELS:
                clock.check(8.0)
                found["loads"].setdefault(model, {})[label] = worker.ask("load", model=model, batches=BATCHES)
                cells[model] = {b: worker.ask("time", model=model, batch=b, seconds=CELL_S) for b in BATCHES}
                worker.ask("drop", model=model)
            worker.close()
            report(found)
    found["complete"] = True
    return found


def pairs(report: Callable[[Any], None]) -> dict[str, Any]:
    """Measure how much each model slows probes of memory bandwidth and L2 cache, and how much models slow each
    other."""
    clock = Clock(PAIRS_S)
    found: dict[str, Any] = {"alone": {}, "probes": {}, "together": [], "complete": False}
    with Workers() as workers:
        left, right = workers.start_all([("left", 0.5), ("right", 0.5)])
        for worker in (left, right):
            worker.ask("touch")
        for kind in ("dram", "l2"):
            found["alone"][kind] = right.ask("probe", kind=kind, seconds=0.4)["rate"]
        for model in MODELS:
            for worker in (left, right):
                worker.begin("load", model=model, batches=PAIR_BATCHES)
            for worker in (left, right):
                worker.answer()
        solo = {
            (m, b): left.ask("time", model=m, batch=b, seconds=0.1)["median_ms"] for m in MODELS for b in PAIR_BATCHES
        }
        found["solo_ms"] = {f"{m}/{b}": ms for (m, b), ms in solo.items()}
        for model, batch in solo:
            clock.check(4.0)
            row = found["probes"].setdefault(f"{model}/{batch}", {})
            for kind in ("dram", "l2"):
                left.begin("time", model=model, batch=batch, seconds=0.35)
                right.begin("probe", kind=kind, seconds=0.25)
                row[kind] = {"probe_rate": right.answer()["rate"], "model_ms": left.answer()["median_ms"]}
            report(found)
        for a, b in pair_list(MODELS, PAIR_BATCHES):
            clock.check(4.0)
            left.begin("time", model=a[0], batch=a[1], seconds=0.4)
            right.begin("time", model=b[0], batch=b[1], seconds=0.4)
            found["together"].append({"left": a, "right": b, "left_ms": left.answer(), "right_ms": right.answer()})
        report(found)
    found["complete"] = True
    return found


def pair_list(models: list[str], batches: list[int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Every pair of models once, with varying batch sizes."""
    out = []
    for i, a in enumerate(models):
        for b in models[i:]:
            n = len(out)
            out.append(((a, batches[-1 - n % 2]), (b, batches[-1 - n // 2 % 2])))
    return out


def live(report: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the plans of serving_plans.json under load; all schemes get the same requests."""
    from serving_live import run_schemes

    return run_schemes(report, SMALL)


STEPS = {"grid": grid, "pairs": pairs, "live": live}


def main(out: str, names: str) -> None:
    target = Path(out)
    results: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}

    def write() -> None:
        target.write_text(json.dumps(results, indent=1))

    for name in names.split(","):
        began = time.monotonic()
        results[name] = entry = {"seconds": 0.0}

        def report(found: Any, entry: dict[str, Any] = entry) -> None:
            entry["result"] = found
            write()

        try:
            entry["result"] = STEPS[name](report)
        except OutOfTimeError as error:
            entry["stopped"] = str(error)
        except Exception:
            entry["error"] = traceback.format_exc()[-3000:]
        entry["seconds"] = round(time.monotonic() - began, 1)
        write()
        print(name, entry["seconds"], entry.get("error", entry.get("stopped", "ok")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "grid,pairs,live")
