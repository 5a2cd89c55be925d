"""Ridge on 12 features of a column and its neighbours, by mix and by workload: a baseline for train_mps_mig.py.

    python bench/profiles/baseline_ridge.py --data DATA.npz

The same five folds of mixes and four groups of workloads as in train_mps_mig.py.
"""

from __future__ import annotations

import argparse

import numpy as np
from train_mps_mig import folds, load


def features(columns):
    """(mixes, 7, 3) -> (mixes, 7, 12): own latencies and ratios, mean and deviation of the six others, one."""
    others = (columns.sum(1, keepdims=True) - columns) / 6
    squares = ((columns**2).sum(1, keepdims=True) - columns**2) / 6
    spread = np.sqrt(np.maximum(squares - others**2, 0))
    ratios = [columns[..., :1] / columns[..., 1:2], columns[..., 1:2] / columns[..., 2:3]]
    return np.concatenate([columns, *ratios, others, spread, np.ones((*columns.shape[:-1], 1))], -1)


def error(x, y, train, test):
    """Mean absolute error on the test columns."""
    weight = np.linalg.solve(x[train].T @ x[train] + 1e-3 * np.eye(x.shape[-1]), x[train].T @ y[train])
    return np.abs(np.clip(x[test] @ weight, 0, 1) - y[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    columns, y, labels, _, _, dummy = load(parser.parse_args().data)
    x, real = features(columns), labels != dummy
    mix = np.repeat(np.arange(len(x))[:, None], 7, 1)
    by_mix = np.concatenate([error(x, y, real & ~np.isin(mix, t), real & np.isin(mix, t)) for t in folds(len(x), 5, 0)])
    print(f"by mix: {by_mix.mean():.4f} {by_mix.mean(0).round(4)}")
    workloads = np.setdiff1d(np.arange(labels.max() + 1), [dummy])
    groups = np.array_split(np.random.default_rng(1).permutation(workloads), 4)
    held = np.concatenate([error(x, y, real & ~np.isin(labels, g), real & np.isin(labels, g)) for g in groups])
    print(f"by workload: {held.mean():.4f} {held.mean(0).round(4)}")


if __name__ == "__main__":
    main()
