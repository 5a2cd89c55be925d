"""Power draw of GPUs, by model and by workload.

Idle and maximum power of a GPU are those of Cloud Carbon Footprint (AwsFootprintEstimationConstants, after Teads'
measurements of AWS instances), if it has the model. Otherwise they are 11.7 % and 102 % of the board power in the
vendor's datasheet, about the same fractions as those of the models in that source.

The activity of a training job is the fraction of the range between idle and maximum power that the job uses. It is
computed from the mean power of five workloads on a V100 without power limit, from Zeus (NSDI 2023,
github.com/ml-energy/zeus at 75a8b93, trace/summary_power_v100.csv).
"""

from __future__ import annotations

MEASURED_W: dict[str, tuple[float, float]] = {
    "K80": (17.5, 153.0),  # half of the measured power of the board, which has two GPUs
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

# Mean power of training a model on the V100 of the measurements, as a fraction of the range from its idle power (35 W)
# to the most that it may draw (250 W).
ACTIVITY: dict[str, float] = {
    "resnet-50": 0.87,  # 222 W
    "resnet50": 0.87,
    "res50": 0.87,
    "imagenet": 0.87,  # activity of ResNet-50 jobs, which Sia's trace calls imagenet
    "bert": 0.89,  # 226 W
    "deepspeech": 0.63,  # 171 W
    "shufflenet": 0.53,  # 149 W
    "ncf": 0.01,  # 38 W
    "recommendation": 0.01,
}
MEAN_ACTIVITY = 0.59  #: mean activity of the five workloads, used for all other models


def watts(gpu: str) -> tuple[float, float] | None:
    """Return the idle and maximum power of a catalog GPU in watts; None if no source has it."""
    if gpu in MEASURED_W:
        return MEASURED_W[gpu]
    board = BOARD_W.get(gpu)
    return None if board is None else (IDLE_PART * board, MOST_PART * board)


def activity(model: str) -> float:
    """Return the activity of a model's jobs: the fraction of the range between idle and maximum power."""
    name = model.lower()
    return next((part for known, part in ACTIVITY.items() if known in name), MEAN_ACTIVITY)
