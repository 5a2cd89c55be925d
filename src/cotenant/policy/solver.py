"""Solves mixed-integer and linear programs. No other module uses the solver HiGHS."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from cotenant.core.extras import needs

with needs("sim"):
    import numpy as np
    from numpy.typing import NDArray


Floats = NDArray[np.float64]
Rows = tuple[NDArray[np.int32], NDArray[np.int32], Floats]


@dataclass(frozen=True)
class Solution:
    """A solution of a linear or mixed-integer program. `x[n]`: the best point found, None if there is none; `status`:
    optimal | feasible | infeasible | unbounded | unknown; `objective`: value of x; `bound`: no solution is better than
    this; `gap`: |bound - objective| / |objective|.
    """

    x: Floats | None
    status: str
    objective: float
    bound: float
    gap: float


def compressed(matrix: Floats) -> Rows:
    """Return a dense matrix row by row without its zeros, as `solve_milp` takes it."""
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return starts.astype(np.int32), columns.astype(np.int32), matrix[rows, columns]


def solve_milp(
    cost: Floats,
    rows: Rows,
    row_lower: Floats,
    row_upper: Floats,
    lower: Floats,
    upper: Floats,
    integer: NDArray[np.bool_],
    *,
    maximise: bool = False,
    time_limit_s: float = 1.0,
    gap: float = 1e-6,
    start: Floats | None = None,
) -> Solution:
    """Optimise cost @ x subject to row_lower <= A x <= row_upper and lower <= x <= upper, with x[integer] whole.

    `rows`: A row by row, compressed: starts[m+1], columns[nnz], values[nnz]. Use np.inf for no bound. `start`: a point
    to begin from. The solver uses one thread and a fixed seed, so the same problem gives the same answer unless the
    time runs out.
    """
    import highspy

    starts, columns, values = rows
    model = _quiet_solver()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("time_limit", float(time_limit_s)),
        ("mip_rel_gap", float(gap)),
    ):
        model.setOptionValue(option, value)
    lp = highspy.HighsLp()
    n, m = len(cost), len(row_lower)
    lp.num_col_, lp.num_row_ = n, m
    lp.col_cost_ = np.asarray(cost, np.float64)
    lp.col_lower_, lp.col_upper_ = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    lp.row_lower_, lp.row_upper_ = np.asarray(row_lower, np.float64), np.asarray(row_upper, np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.asarray(starts, np.int32)
    lp.a_matrix_.index_ = np.asarray(columns, np.int32)
    lp.a_matrix_.value_ = np.asarray(values, np.float64)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[int(i)] for i in integer]
    lp.sense_ = highspy.ObjSense.kMaximize if maximise else highspy.ObjSense.kMinimize
    model.passModel(lp)
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = [float(v) for v in start]
        model.setSolution(point)
    model.run()
    return _read(model, bool(np.any(integer)))


def _quiet_solver() -> Any:
    """Create a solver. Its constructor prints a banner on standard output, to which the program may write a JSON
    object, so the banner is suppressed.
    """
    import highspy

    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        return highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


def _read(model: object, mixed_integer: bool) -> Solution:
    import highspy

    assert isinstance(model, highspy.Highs)
    status = model.getModelStatus()
    info = model.getInfo()
    names = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
        highspy.HighsModelStatus.kUnbounded: "unbounded",
        highspy.HighsModelStatus.kUnboundedOrInfeasible: "infeasible",
    }
    found = info.primal_solution_status == 2  # 2 means that the solver has found a feasible point
    name = names.get(status, "feasible" if found else "unknown")
    if not found:
        return Solution(None, name, np.nan, np.nan, np.inf)
    x = np.array(model.getSolution().col_value)
    objective = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if mixed_integer else objective
    return Solution(x, name, objective, bound, abs(bound - objective) / max(abs(objective), 1e-12))
