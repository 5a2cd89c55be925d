"""A process on a part of a GPU that loads models, runs batches and measures their times. Orders come over a socket.

    python serving_worker.py FD      (FD: one end of a SOCK_SEQPACKET pair)

Orders: load, time, run, loop, probe, quit. The time of a batch includes all that a server does for it: copy the input
from pinned host memory, launch one CUDA graph, copy the output back, wait once.
"""

from __future__ import annotations

import marshal
import os
import socket
import sys
import time
from typing import Any

import serving_models
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 2


class Loaded:
    """A model with a captured graph for each batch size."""

    def __init__(self, name: str, batches: list[int]) -> None:
        before, began = self._free(), time.perf_counter()
        self.model = serving_models.make(name, DEVICE)
        self.graphs: dict[int, Any] = {}
        self.inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle() if DEVICE == "cuda" else None
        # the largest graph is captured first, so that the smaller ones reuse its memory
        for batch in sorted(batches, reverse=True):
            self._capture(name, batch, pool)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.batches = sorted(batches)
        self.load_s = time.perf_counter() - began
        self.memory_bytes = before - self._free()

    @staticmethod
    def _free() -> int:
        return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0

    def _capture(self, name: str, batch: int, pool: Any) -> None:
        x = serving_models.make_input(name, batch, DEVICE)
        host = serving_models.make_input(name, batch, DEVICE, pinned=DEVICE == "cuda")
        if DEVICE != "cuda":
            self.inputs[batch] = (host, x)
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = self.model(x)
        self.graphs[batch], self.inputs[batch] = graph, (host, x)
        self.outputs[batch] = (torch.empty(y.shape, dtype=y.dtype, pin_memory=True), y)

    def run(self, batch: int) -> float:
        """Compute a batch of at most this size; returns milliseconds."""
        size = next(b for b in self.batches if b >= batch)
        began = time.perf_counter()
        host, x = self.inputs[size]
        x.copy_(host, non_blocking=True)
        if DEVICE == "cuda":
            self.graphs[size].replay()
            out, y = self.outputs[size]
            out.copy_(y, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        else:
            self.model(x)
        return (time.perf_counter() - began) * 1e3


class Probe:
    """A load on one resource that shows how much of it a neighbour uses: `dram` streams far more than the L2 cache
    holds, `l2` reads a buffer that fits into it."""

    def __init__(self, kind: str) -> None:
        count = (256 if kind == "dram" else 8) << 20
        self.source = torch.ones(count, dtype=torch.float16, device=DEVICE)
        self.target = torch.empty_like(self.source)
        self.graph: Any = None
        if DEVICE == "cuda":
            self.target.copy_(self.source)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(1 if kind == "dram" else 20):
                    torch.add(self.source, 1.0, out=self.target)

    def run(self) -> None:
        if self.graph is None:
            torch.add(self.source, 1.0, out=self.target)
        else:
            self.graph.replay()
            torch.cuda.current_stream().synchronize()


class Worker:
    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.models: dict[str, Loaded] = {}
        self.probes: dict[str, Probe] = {}

    def serve(self) -> None:
        self.say({"ready": DEVICE, "pid": os.getpid()})
        while True:
            text = self.socket.recv(1 << 16)
            if not text:
                return
            order = marshal.loads(text)
            if order["do"] == "quit":
                return
            try:
                answer = getattr(self, "do_" + order["do"])(**order.get("with", {}))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:900]}
            self.say(answer)

    def say(self, answer: dict[str, Any]) -> None:
        self.socket.send(marshal.dumps(answer))

    def do_load(self, model: str, batches: list[int]) -> dict[str, Any]:
        self.models[model] = loaded = Loaded(model, batches)
        return {"load_s": loaded.load_s, "memory_bytes": loaded.memory_bytes}

    def do_drop(self, model: str) -> dict[str, Any]:
        del self.models[model]
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        return {}

    def do_touch(self) -> dict[str, Any]:
        """Create the context, so that it does not count as loading time."""
        if DEVICE == "cuda":
            total, free = torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.mem_get_info()
            torch.ones(1 << 20, device=DEVICE).sum().item()
            (torch.rand(64, 64, device=DEVICE).half() @ torch.rand(64, 64, device=DEVICE).half()).sum().item()
            return {
                "name": torch.cuda.get_device_name(0),
                "sms": total,
                "free_before": free[0],
                "free_after": torch.cuda.mem_get_info()[0],
            }
        return {"sms": 0, "free_before": 0, "free_after": 0}

    def do_time(self, model: str, batch: int, seconds: float, least: int = 6) -> dict[str, Any]:
        loaded = self.models[model]
        loaded.run(batch)
        times: list[float] = []
        until = time.perf_counter() + seconds
        while len(times) < least or time.perf_counter() < until:
            times.append(loaded.run(batch))
        times.sort()
        return {"median_ms": times[len(times) // 2], "p95_ms": times[int(len(times) * 0.95)], "runs": len(times)}

    def do_run(self, model: str, batch: int) -> dict[str, Any]:
        return {"ms": self.models[model].run(batch)}

    def do_probe(self, kind: str, seconds: float) -> dict[str, Any]:
        if kind not in self.probes:
            self.probes[kind] = Probe(kind)
        probe, count = self.probes[kind], 0
        probe.run()
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            probe.run()
            count += 1
        return {"rate": count / (time.perf_counter() - began)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    with torch.inference_mode():
        Worker(int(sys.argv[1])).serve()
