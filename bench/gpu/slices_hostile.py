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
GROUPS = range(0x5C000000, 0x5C000200)  # the range in which libcuda numbers its objects, in releases 550 to 595
NO_CLIENT = "0x23"


def own_groups(controls: ChannelControls) -> list[tuple[int, ChannelGroup]]:
    """Files of the driver, and the channel groups created through them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        for client in CLIENTS if path == "/dev/nvidiactl" else ():
            for handle in GROUPS:
                group = ChannelGroup(client, 0, 0, handle, ())
                try:
                    controls.slice_us(int(name), group)
                except WorkError as error:
                    if NO_CLIENT in str(error):
                        break
                    continue
                found.append((int(name), group))
    if not found:
        raise WorkError("no channel group of this process was found")
    return found


def main() -> None:
    """Set up, print `ready`, and run."""
    soft = "COTENANT_SOFTGPU_STATE" in os.environ
    if soft:
        from cotenant.bench.driver import Driver
        from cotenant.softgpu.controls import SoftIoctl

        cuda = Driver()
        controls = ChannelControls(SOFTWARE, SoftIoctl())
    else:
        import torch

        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        controls = ChannelControls(RELEASE.read_text().strip())
    groups = [] if soft else own_groups(controls)

    def offend() -> None:
        while groups:
            for fd, group in groups:
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
