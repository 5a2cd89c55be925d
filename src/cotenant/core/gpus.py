"""The GPU catalog: the properties of each model.

Figures are from the vendors' datasheets, except bandwidth and TFLOPS of the models from H100-96GB to RTX-PRO-6000,
which are estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.errors import InputError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    `sms`: enabled streaming multiprocessors; `memory_bytes`: nominal device memory; `bandwidth_gbps`: device memory
    bandwidth in GB/s; `fp16_tflops`: dense half-precision rate of its fastest unit; `mig`: name of its MIG geometry
    table, None without MIG.
    """

    name: str
    sms: int
    memory_bytes: int
    bandwidth_gbps: float
    fp16_tflops: float
    mig: str | None = None

    @property
    def relative_speed(self) -> float:
        """Return the estimated training speed relative to an A100-40GB, for profiles without a measured figure.

        Geometric mean of the ratios of memory bandwidth and dense half-precision rate, since either can limit a
        training step.
        """
        base = CATALOG["A100-40GB"]
        return math.sqrt(self.bandwidth_gbps / base.bandwidth_gbps * self.fp16_tflops / base.fp16_tflops)


def _gpu(name: str, sms: int, gib: int, gbps: float, tflops: float, mig: str | None = None) -> Gpu:
    return Gpu(name, sms, gib * GIB, gbps, tflops, mig)


CATALOG: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("K80", 13, 12, 240, 4.1),
        _gpu("P4", 20, 8, 192, 5.5),
        _gpu("P40", 30, 24, 346, 11.8),
        _gpu("P100", 56, 16, 732, 18.7),
        _gpu("V100-16GB", 80, 16, 900, 125),
        _gpu("V100-32GB", 80, 32, 900, 125),
        _gpu("T4", 40, 16, 320, 65),
        _gpu("A10", 72, 24, 600, 125),
        _gpu("A30", 56, 24, 933, 165, "A30"),
        _gpu("A40", 84, 48, 696, 149.7),
        _gpu("A100-40GB", 108, 40, 1555, 312, "A100-40GB"),
        _gpu("A100-80GB", 108, 80, 2039, 312, "A100-80GB"),
        _gpu("A5000", 64, 24, 768, 111.1),
        _gpu("A6000", 84, 48, 768, 154.8),
        _gpu("L4", 58, 24, 300, 121),
        _gpu("L40S", 142, 48, 864, 362),
        _gpu("RTX2080Ti", 68, 11, 616, 107.6),
        _gpu("RTX3090", 82, 24, 936, 71),
        _gpu("RTX4090", 128, 24, 1008, 165.2),
        _gpu("RTX5090", 170, 32, 1792, 209.5),
        _gpu("H100-PCIe", 114, 80, 2039, 756, "H100-PCIe"),
        _gpu("H100-80GB", 132, 80, 3350, 989, "H100-80GB"),
        _gpu("H100-NVL", 132, 94, 3938, 835, "H100-NVL"),
        _gpu("H200", 132, 141, 4800, 989, "H200"),
        _gpu("GH200", 132, 96, 4000, 989, "GH200"),
        _gpu("B200", 148, 180, 8000, 2250, "B200"),
        _gpu("H100-96GB", 132, 96, 3350, 989, "H100-96GB"),
        _gpu("H20", 78, 96, 4000, 148, "H20"),
        _gpu("GH200-144GB", 132, 144, 4900, 989, "GH200-144GB"),
        _gpu("GB200", 148, 186, 8000, 2500, "GB200"),
        _gpu("B300", 148, 269, 8000, 2250, "B300"),
        _gpu("GB300", 148, 278, 8000, 2500, "GB300"),
        _gpu("RTX-PRO-6000", 188, 96, 1597, 500, "RTX-PRO-6000"),
    )
}

# other spellings of the models, as in traces, cluster files and names from the driver
ALIASES: dict[str, str] = {
    "V100": "V100-16GB", "V100M16": "V100-16GB", "V100M32": "V100-32GB",
    "A100": "A100-40GB", "A100-SXM4-40GB": "A100-40GB", "A100-SXM4-80GB": "A100-80GB",
    "H100": "H100-80GB", "H100-SXM": "H100-80GB", "H100 80GB HBM3": "H100-80GB", "H100-80GB-HBM3": "H100-80GB",
    "H100 PCIE": "H100-PCIe", "H100-PCIE": "H100-PCIe", "H100 NVL": "H100-NVL",
    "RTX 2080 Ti": "RTX2080Ti", "2080TI": "RTX2080Ti",
    "GH200 144G HBM3E": "GH200-144GB", "RTX PRO 6000": "RTX-PRO-6000",
    "RTX PRO 6000 BLACKWELL SERVER EDITION": "RTX-PRO-6000",
    "RTX 3090": "RTX3090", "RTX 4090": "RTX4090", "RTX 5090": "RTX5090", "RTX A5000": "A5000", "RTX A6000": "A6000",
    # The openb trace does not say which GPU models its names stand for. GPUs of similar size are used for them, so that
    # the trace can be simulated.
    "G2": "A10", "G3": "A100-80GB",
    # Two names in Alibaba's trace of 2026 also do not say which GPU models they stand for. For each, a model is used
    # that the trace does not contain otherwise.
    "GPU-series-1": "L40S", "GPU-series-2": "H20",
    # export variants of GPUs: the same chip and memory, with less bandwidth between GPUs
    "A800-SXM4-80GB": "A100-80GB", "H800": "H100-80GB",
}  # fmt: skip


def find_gpu(name: str, field: str | None = None) -> Gpu:
    """Return the catalog entry of a model name or alias. Raises InputError with the nearest known names."""
    plain = name.strip().removeprefix("NVIDIA ").removeprefix("Tesla ")
    for key in (plain, ALIASES.get(plain, ""), ALIASES.get(plain.upper(), "")):
        if key in CATALOG:
            return CATALOG[key]
    for known in CATALOG:
        if known.upper() == plain.upper():
            return CATALOG[known]
    import difflib

    near = difflib.get_close_matches(plain, list(CATALOG), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(CATALOG)}"
    raise InputError(f"unknown GPU model {name!r}; {hint}", field=field)
