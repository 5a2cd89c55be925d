"""An experiment: a best-effort program whose launches wait on the device (stream memory wait) instead of on the host.

    python -m device_hold BACKEND FILE        the protocol of cotenant.bench.be_loads, and `cost KIND SECONDS`

The first 32 bits of FILE are 1 while latency-sensitive work is active. Before each launch, the stream waits until they
are 0. `cost` prints the launches per second with nothing, an event, or a wait between two launches.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotenant.bench import be_loads
from cotenant.devices.nvidia import DRIVER

EQUAL, DEVICE_MAP = 1, 2
P = ctypes.c_void_p


class Hold:
    """The 32-bit word on which streams wait, at its address on the device."""

    def __init__(self, call: Callable[..., None], path: str) -> None:
        self._call = call
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        call("cuMemHostRegister_v2", P(at), ctypes.c_size_t(4096), DEVICE_MAP)
        self._device = P()
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(self._device), P(at), 0)

    def wait(self, stream: int | None = None) -> None:
        """Make the stream wait until the word is 0."""
        self._call("cuStreamWaitValue32_v2", P(stream), self._device, ctypes.c_uint32(0), EQUAL)


Calls = dict[str, Callable[[], None]]


def torch_call() -> Callable[..., None]:
    """A function that makes driver calls in a process that uses torch."""
    import torch

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL(DRIVER)

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    return call


def cost(load: be_loads.Load, hold: Hold, events: Calls, seconds: float) -> dict[str, list[float]]:
    """Measure launches per second with nothing, an event or a wait between two launches. By the load's own marks, four
    launches are in flight."""
    between: Calls = {"nothing": lambda: None, **events, "wait": hold.wait}
    found: dict[str, list[float]] = {name: [] for name in between}
    plain = load.launch
    for _ in range(5):
        for name, extra in between.items():

            def launch(extra: Callable[[], None] = extra) -> None:
                extra()
                plain()

            load.launch = launch
            block = load.run(seconds)
            found[name].append(block["count"] / (block["end_ns"] - block["begin_ns"]) * 1e9)
    load.launch = plain
    return found


def main() -> None:
    backend, path = sys.argv[1:3]
    if backend == "torch":
        import torch

        hold = Hold(torch_call(), path)
        timed, plain = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        events: Calls = {
            "timing event": lambda: timed.record(),
            "event": lambda: plain.record(),
        }
        make: Callable[[str], be_loads.Load] = be_loads.torch_load
    else:
        from cotenant.bench.driver import Driver

        cuda = Driver()
        hold = Hold(cuda.call, path)
        first, second = cuda.event(timing=True), cuda.event()
        events = {"timing event": lambda: cuda.record(first), "event": lambda: cuda.record(second)}

        def make(kind: str) -> be_loads.Load:
            return be_loads.driver_load(kind, cuda)

    print("ready device_hold", flush=True)
    load: be_loads.Load | None = None
    for line in sys.stdin:
        words = line.split()
        if words[0] in ("load", "cost"):
            load = None
            load = make(words[1])
            plain_launch = load.launch
            one_ms = be_loads.calibrated(load, single=False)
            if words[0] == "cost":
                print(json.dumps(cost(load, hold, events, float(words[2]))), flush=True)
                continue

            def launch(plain_launch: Callable[[], None] = plain_launch) -> None:
                hold.wait()
                plain_launch()

            load.launch = launch
            print(json.dumps({"kind": words[1], "unit_ms": one_ms}), flush=True)
        elif words[0] == "run" and load is not None:
            print(json.dumps(load.run(float(words[1]))), flush=True)
        elif words[0] == "times" and load is not None:
            print(json.dumps(be_loads.launch_times(load, float(words[1]))), flush=True)


if __name__ == "__main__":
    main()
