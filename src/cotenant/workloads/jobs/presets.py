"""Presets of `cotenant trace generate --like`: distributions of arrivals, durations, GPU counts, models and tenants.

Sources:
- synergy: the workload constants of the public Synergy simulator (Mohan et al., OSDI'22).
- miso: durations and the mix of 100 jobs of the public MISO controller (Li et al., SoCC'22).
- fleet-smoke: designed for real runs of pretended jobs on four nodes with two GPUs and six cores each. Jobs take 20 to
  120 s. Some models gain from more cores and others do not, so that both fit on such a node together.
- gavel, sia: models of the elastic profiles of that name, equally often, which were measured on 1, 2, 4 and 8 GPUs of
  every GPU model; the other values are those of synergy.
- philly: quantiles and shares of the Philly job list (Jeon et al., ATC'19; Microsoft, CC-BY-4.0), 72,590 jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.core.work import Floats


@dataclass(frozen=True)
class Preset:
    """Defaults for options of `trace generate` that the user leaves out. Durations are either the text of an option, or
    two tables of quantiles: for jobs on at most 1 GPU, and for larger ones.
    """

    arrivals: str
    rate_per_s: float
    gpu_mix: str
    durations: str = ""
    quantiles: tuple[tuple[float, ...], ...] = ()
    probabilities: tuple[float, ...] = ()
    models: Mapping[str, float] = field(default_factory=dict)  #: weights of models; empty: the split chooses models
    tenants: Mapping[str, float] = field(default_factory=dict)
    #: cores and GB per GPU that a job of a model can use at most; for a model that is not in it, the model's profile
    #: applies
    asks_per_gpu: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def draw_durations(self, rng: np.random.Generator, gpus: Floats) -> Floats:
        """Draw durations in seconds from the tables of quantiles, with log-linear interpolation."""
        u = rng.random(len(gpus))
        single, many = (np.exp(np.interp(u, self.probabilities, np.log(table))) for table in self.quantiles)
        chosen: Floats = np.where(gpus <= 1, single, many)
        return chosen


_MISO_S = (120, 120, 120, 120, 120, 131, 148, 167, 186, 211, 244, 289, 355, 449, 584, 758, 1049, 1538, 2186, 3363, 6082)
_PHILLY_P = (
    0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95,
    0.965, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 0.9999, 1,
)  # fmt: skip
_PHILLY_ONE_S = (
    1,
    51,
    61,
    67,
    72,
    87,
    163,
    266,
    465,
    651,
    957,
    1420,
    1790,
    2160,
    2560,
    2840,
    4010,
    5500,
    8720,
    11100,
    18400,
    30200,
    65500,
    89100,
    126000,
    174000,
    261000,
    431000,
    915000,
    1570000,
    2660000,
    3260000,
)
_PHILLY_MANY_S = (
    2,
    12,
    15,
    17,
    20,
    22,
    28,
    56,
    110,
    185,
    447,
    962,
    3420,
    9100,
    15700,
    31300,
    68700,
    104000,
    177000,
    190000,
    223000,
    262000,
    361000,
    454000,
    530000,
    635000,
    868000,
    1400000,
    2060000,
    2580000,
    2710000,
    2750000,
)
# The gaps between arrivals in the Philly trace are drawn from several exponential distributions (phases). Of each
# phase: its share of the gaps [%], the mean gap [s], and the mean number of successive gaps in that phase (a run; 1 if
# left out). Three phases were fitted by maximum likelihood. The fourth, for hours without arrivals, gives the gaps the
# mean (126.37 s) and the CV (14.09) of the trace; the run lengths reproduce the variation of the trace between minutes
# and between hours.
_PHILLY_GAPS = "hyperexp:23.93,4,50;46.27,10.58,50;29.74,312,50;0.0492,56400"

_GAVEL = [
    *(f"ResNet-18 (batch size {n})" for n in (16, 32, 64, 128, 256)),
    *(f"ResNet-50 (batch size {n})" for n in (16, 32, 64)),
    *(f"Transformer (batch size {n})" for n in (16, 32, 64, 128, 256)),
    *(f"LM (batch size {n})" for n in (5, 10, 20, 40, 80)),
]
_SIA = ["bert", "cifar10", "ncf", "imagenet", "deepspeech2", "yolov3"]
_SYNERGY = Preset("poisson-seconds", 8 / 3600, "1:70,2:10,4:15,8:5", durations="two-part")

PRESETS: dict[str, Preset] = {
    "synergy": _SYNERGY,
    "gavel": replace(_SYNERGY, models=dict.fromkeys(_GAVEL, 1)),
    "sia": replace(_SYNERGY, models=dict.fromkeys(_SIA, 1)),
    "miso": Preset(
        "poisson-gap",
        1 / 60,
        "1:100",
        quantiles=(_MISO_S, _MISO_S),
        probabilities=tuple(k / 20 for k in range(21)),
        models={
            "transformer_train32": 12, "gnn_train128": 9, "transformer_train128": 9, "embedding_train64": 7,
            "embedding_train128": 7, "gnn_train512": 6, "resnet_train128": 6, "gnn_train256": 6,
            "embedding_train256": 6, "mobilenet_train64": 5, "resnet_train256": 5, "resnet_train64": 4,
            "mobilenet_train128": 3, "resnet_train512": 3, "mobilenet_train256": 3, "transformer_train64": 3,
            "embedding_train512": 2, "transformer_train16": 2, "mobilenet_train512": 2,
        },
    ),
    "philly": Preset(
        _PHILLY_GAPS,
        28.49 / 3600,
        "1:68589,2:1706,4:1203,8:993,12:7,16:34,24:4,32:54",
        quantiles=(_PHILLY_ONE_S, _PHILLY_MANY_S),
        probabilities=_PHILLY_P,
        tenants={
            "6214e9": 41226, "11cb48": 16091, "6c71a0": 9953, "103959": 1934, "0e4a51": 1435, "ed69ec": 1137,
            "2869ce": 422, "e13805": 374, "23dbec": 8, "51b7ef": 4, "925e2b": 3, "795a4c": 3,
        },
    ),
    "fleet-smoke": Preset(
        "poisson-gap",
        0.25,
        "1:80,2:20",
        quantiles=((20, 120), (20, 120)),
        probabilities=(0, 1),
        models={"alexnet": 20, "res18": 20, "mobilenet": 10, "transformer": 25, "gnmt": 25},
        asks_per_gpu={
            "alexnet": (5, 62.5), "res18": (5, 62.5), "mobilenet": (5, 62.5), "transformer": (1, 20), "gnmt": (1, 20),
        },
    ),
}  # fmt: skip
