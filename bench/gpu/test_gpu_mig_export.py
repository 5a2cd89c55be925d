"""Properties of MIG on a real GPU that can be read without switching MIG on or off."""

from __future__ import annotations

import pytest

from cotenant.devices import mig
from cotenant.devices.nvml import Nvml


@pytest.mark.gpu
def test_export_reads_every_gpu() -> None:
    with Nvml() as nvml:
        table = mig.export(nvml)
    assert table["gpus"]
    for row in table["gpus"]:
        assert row["uuid"].startswith("GPU-")
        assert row["mig"] in (True, False, None)
        assert row["instances"] == [] or row["mig"] is True
