"""Programs that the GPU scripts start, under an agent or natively; CUDA_VISIBLE_DEVICES=soft: on the software GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

from cotenant.devices.registry import device_named  # noqa: E402
from cotenant.native.environment import tenant_environment  # noqa: E402


def is_soft() -> bool:
    """Whether the software GPU is requested; programs must not take `soft` for the name of a device."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "soft":
        return False
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["COTENANT_SOFTGPU_STATE"] = str(Path(tempfile.mkdtemp(prefix="cotenant-")) / "gpu-script")
    return True


SOFT = is_soft()
DEVICE = device_named("soft" if SOFT else "all")
DRIVER = DEVICE.driver()


class Run:
    """One program under an agent (or natively, without one)."""

    def __init__(self, command: list[str], socket: Path | None, **extra: str) -> None:
        environment = dict(os.environ, **extra)
        if socket is not None:
            environment |= tenant_environment(socket, "token", DRIVER, nvml=DEVICE.tenant_nvml())
        else:
            environment["COTENANT_BENCH_LIBRARY"] = str(DRIVER)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, timeout: float) -> dict[str, Any]:
        """The program's last line of JSON, with its exit code; it is killed after `timeout` seconds."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            err = "TIMEOUT " + err
        lines = [line for line in out.splitlines() if line.startswith("{")]
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {"ok": False}
        result |= {"rc": self.process.returncode, "seconds": round(time.monotonic() - self.began, 1)}
        if self.process.returncode != 0 or "cotenant" in err:
            result["stderr"] = err[-1200:]
        return result
