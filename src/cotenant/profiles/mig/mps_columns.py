"""Converts latencies of jobs that ran under MPS into the columns that the MPS -> MIG predictor reads."""

from __future__ import annotations

import numpy as np

LEVELS = (1.0, 0.5, 0.14)  # active-thread percentages of MPS at which the predictor was trained
WIDTH = 7  # number of jobs on the GPU that the predictor expects; a dummy stands for each one that is missing

# Latencies of a dummy process at the three percentages when k real jobs run at the same time, divided by the dummy's
# largest latency; means over the 10,955 mixes of the public MISO measurements (Li et al., SoCC'22). They are used
# instead of dummies, which are not run here.
_DUMMY = {
    1: (0.997, 0.797, 0.789),
    2: (1.000, 0.630, 0.550),
    3: (1.000, 0.634, 0.474),
    4: (1.000, 0.623, 0.371),
    5: (0.999, 0.639, 0.313),
    6: (1.000, 0.655, 0.264),
}


def predictor_input(latencies_s: np.ndarray) -> np.ndarray:
    """Extend an array (3, k), seconds per step of k jobs (1 to 7) at LEVELS, to (3, 7). Columns without a job get the
    latencies of a dummy."""
    levels, jobs = latencies_s.shape
    if levels != len(LEVELS) or not 1 <= jobs <= WIDTH:
        raise ValueError(
            f"latencies must have the shape ({len(LEVELS)}, 1 to {WIDTH}): MPS percentages by jobs, not "
            f"{latencies_s.shape}"
        )
    if jobs == WIDTH:
        return latencies_s
    dummy = np.array(_DUMMY[jobs])[:, None]
    return np.concatenate([latencies_s, np.repeat(dummy, WIDTH - jobs, axis=1)], axis=1)
