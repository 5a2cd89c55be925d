"""What GPUs draw, by model and by what runs on them.

Idle and most: Cloud Carbon Footprint (AwsFootprintEstimationConstants, after Teads' measurements of AWS instances) for
the models it has; for the others the same parts of the board's power in the vendor's datasheet, 11.7 % and 102 %.
What part of the way between them a training job uses: mean power of five workloads on a V100 without a lower limit, of
Zeus (NSDI 2023, github.com/ml-energy/zeus at 75a8b93, trace/summary_power_v100.csv).
"""

from __future__ import annotations

MEASURED_W: dict[str, tuple[float, float]] = {
    "K80": (17.5, 153.0),  # half of the board, which holds two
    "P4": (9.0, 76.5),
    "P100": (36.0, 306.0),
    "V100-16GB": (35.0, 306.0),
    "V100-32GB": (35.0, 306.0),
    "T4": (8.0, 71.0),
    "A10": (18.0, 153.0),
    "A100-40GB": (46.0, 407.0),
}
BOARD_W: dict[str, float] = {
    "P40": 250, "A30": 165, "A40": 300, "A100-80GB": 400, "A5000": 230, "A6000": 300, "L4": 72, "L40S": 350,
    "RTX2080Ti": 250, "RTX3090": 350, "RTX4090": 450, "RTX5090": 575, "H100-PCIe": 350, "H100-80GB": 700,
    "H100-96GB": 700, "H100-NVL": 400, "H200": 700, "H20": 400, "B200": 1000,
}  # fmt: skip
IDLE_PART, MOST_PART = 0.117, 1.02

# mean watts of a V100 (35 idle, 250 its limit there) as the part of the way from idle to the limit
ACTIVITY: dict[str, float] = {
    "resnet-50": 0.87,  # 222 W
    "resnet50": 0.87,
    "res50": 0.87,
    "imagenet": 0.87,  # Sia's name for ResNet-50
    "bert": 0.89,  # 226 W
    "deepspeech": 0.63,  # 171 W
    "shufflenet": 0.53,  # 149 W
    "ncf": 0.01,  # 38 W
    "recommendation": 0.01,
}
MEAN_ACTIVITY = 0.59  #: of the five, for every other model


def watts(gpu: str) -> tuple[float, float] | None:
    """Idle and most watts of a GPU of the catalog; None where no source has it."""
    if gpu in MEASURED_W:
        return MEASURED_W[gpu]
    board = BOARD_W.get(gpu)
    return None if board is None else (IDLE_PART * board, MOST_PART * board)


def activity(model: str) -> float:
    """The part of the way from idle to most that a job of this model draws, by its name."""
    name = model.lower()
    return next((part for known, part in ACTIVITY.items() if known in name), MEAN_ACTIVITY)
