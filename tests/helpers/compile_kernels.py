"""Compiles the functions of planning and serving into the cache, since otherwise each pytest worker would compile them.
`sim.jobs.sweep.compile_once` does the same for the training simulator.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from command import cotenant

SERVICES = """\
gpus: {count: 1, model: 2080Ti}
services:
  - {name: a, model: resnet50, slo_ms: 108, rate_rps: 60}
"""


def main() -> None:
    """Plan one service and simulate it for a second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "services.yaml"
        file.write_text(SERVICES)
        done = cotenant("simulate", file, "--duration", "1s", "--no-verify")
        assert done.code == 0, done.err


if __name__ == "__main__":
    main()
