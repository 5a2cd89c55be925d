"""`cotenant plan fit-interference`: fit the interference model of a profile to measured pairs of models that share a
GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace

from cotenant.core.errors import InputError
from cotenant.core.files import write_text
from cotenant.core.units import counted
from cotenant.profiles.serving.interference_fit import fit_interference, read_pairs
from cotenant.profiles.serving.latency_files import profile_to_dict, read_profile


def fit(pairs: str | None, profile: str | None, out: str | None, as_json: bool) -> None:
    """Fit the interference model to measured pairs, print its errors, and write the profile with the new coefficients
    to `out`, if given.
    """
    from pathlib import Path

    if pairs is None:
        raise InputError("give --pairs PAIRS.csv", field="pairs")
    if (profile is None) != (out is None):
        raise InputError("--profile (the profile to change) and --out (where to write it) must be given together")
    found = fit_interference(read_pairs(pairs))
    if profile is not None and out is not None:
        changed = replace(read_profile(Path(profile)), interference=found.model)
        write_text(out, json.dumps(profile_to_dict(changed), indent=1) + "\n")
    content = {
        "pairs": found.pairs,
        "interference": vars(found.model),
        "relative_error": {"p90": found.error_p90, "p95": found.error_p95},
    }
    if as_json:
        print(json.dumps(content))
        return
    for name, value in vars(found.model).items():
        print(f"{name:12} {value: .6f}")
    errors = f"at most {found.error_p90:.2%} for 90 % of the pairs, {found.error_p95:.2%} for 95 %"
    print(f"{counted(found.pairs, 'pair')}; error of the slowdown: {errors}")
