"""A best-effort program that sets its own time slice to 100 ms ten times a second, while it multiplies matrices.

It finds its channel group as any program can: the driver answers for handles of its own clients. Protocol: prints
`ready`, then runs until its input ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from cotenant.core.errors import WorkError
from cotenant.devices.channel_groups import SOFTWARE, ChannelControls, ChannelGroup
from cotenant.devices.nvidia import RELEASE

CLIENTS = range(0xC1D00000, 0xC1D01000)
GROUP = 0x5C000015  # libcuda's first compute group, on an H100 with release 580


def own_group(controls: ChannelControls, group: int) -> tuple[int, ChannelGroup]:
    """A file of the driver and the compute group made on it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path not in ("/dev/nvidiactl", os.environ.get("COTENANT_SOFTGPU_STATE")):
            continue
        for client in CLIENTS:
            found = ChannelGroup(client, 0, 0, group, ())
            try:
                controls.slice_us(int(name), found)
            except WorkError:
                continue
            return int(name), found
    raise WorkError("no channel group of this process was found")


def main() -> None:
    """Set up, say so, run."""
    soft = "COTENANT_SOFTGPU_STATE" in os.environ
    if soft:
        from cotenant.bench.driver import Driver
        from cotenant.softgpu.controls import SoftIoctl

        cuda = Driver()
        controls = ChannelControls(SOFTWARE, SoftIoctl())
        groups = [0x5C000000 | number << 4 for number in range(16)]
    else:
        import torch

        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        controls = ChannelControls(RELEASE.read_text().strip())
        groups = [GROUP]
    fd, group = own_group(controls, groups[0]) if not soft else (-1, ChannelGroup(0, 0, 0, 0, ()))

    def offend() -> None:
        while fd >= 0:
            controls.set_slice(fd, group, 100_000)
            time.sleep(0.1)

    threading.Thread(target=offend, daemon=True).start()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print("ready hostile", flush=True)
    while True:
        if soft:
            cuda.launch(1_600_000)
            cuda.synchronise()
        else:
            for _ in range(8):
                torch.mm(a, a)
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
