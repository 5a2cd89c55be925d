"""Train the MPS -> MIG predictor and write the model file that ships with the package.

    pip install jax==0.10.2 optax==0.2.8       # training only; prediction needs numpy alone
    python bench/profiles/train_mps_mig.py --data DATA.npz --out src/cotenant/profiles/data/mps-mig-a100-40gb.npz

DATA.npz: X (n, 3, 7) MPS latencies at 100/50/14 % and Y (n, 3, 7) 7g/4g/3g latencies, every column divided by its own
maximum; labels (n, 7) index into names (33), the workload of each column. Rows that are column permutations of one
another are one mix and are used once. Everything is seeded.

What it learns: a column's workload cannot be read off its own three numbers, because they depend on who ran beside it,
so every column looks at the other six (self-attention without positions: the order of columns cannot matter) and gives
a distribution over the known workloads. The prediction is the median of their MIG latencies under it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, BLOCKS, HEADS = 64, 2, 4
EPOCHS, BATCH, RATE, DECAY, DROPOUT, NOISE = 200, 64, 2.5e-3, 0.05, 0.15, 0.006
CENTRE = np.array([0.77, 0.97, 0.99])


def features(columns):
    """(..., 3) normalised latencies -> (..., 8)."""
    a, b, c = columns[..., 0:1], columns[..., 1:2], columns[..., 2:3]
    return jnp.concatenate([columns, 2 * jnp.log(columns), a / b, b / c], axis=-1)


def init(key, inputs, classes):
    keys = iter(jax.random.split(key, 64))

    def layer(i, o):
        return {"w": jax.random.normal(next(keys), (i, o)) * np.sqrt(1.5 / i), "b": jnp.zeros(o)}

    block = lambda: {  # noqa: E731
        "q": layer(WIDTH, WIDTH),
        "k": layer(WIDTH, WIDTH),
        "v": layer(WIDTH, WIDTH),
        "o": layer(WIDTH, WIDTH),
        "up": layer(WIDTH, 2 * WIDTH),
        "down": layer(2 * WIDTH, WIDTH),
        "g1": jnp.ones(WIDTH),
        "g2": jnp.ones(WIDTH),
    }
    return {
        "in1": layer(inputs, WIDTH),
        "in2": layer(WIDTH, WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "g": jnp.ones(WIDTH),
        "cls": layer(WIDTH, classes),
        "reg": layer(WIDTH, 3),
    }


def linear(p, x):
    return x @ p["w"] + p["b"]


def norm(x, gain):
    return x * gain / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def forward(params, x, key=None):
    """(mixes, 7, features) -> class logits (mixes, 7, classes), direct regression (mixes, 7, 3)."""

    def drop(h, i):
        if key is None:
            return h
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - DROPOUT, h.shape)
        return h * keep / (1 - DROPOUT)

    h = linear(params["in2"], jax.nn.gelu(linear(params["in1"], x)))
    for i, b in enumerate(params["blocks"]):
        z = norm(h, b["g1"])
        m, n, _ = z.shape
        q, k, v = (linear(b[name], z).reshape(m, n, HEADS, -1) for name in "qkv")
        weight = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(WIDTH // HEADS), -1)
        h = h + drop(linear(b["o"], jnp.einsum("bhnm,bmhd->bnhd", weight, v).reshape(m, n, WIDTH)), 2 * i)
        h = h + drop(linear(b["down"], jax.nn.gelu(linear(b["up"], norm(h, b["g2"])))), 2 * i + 1)
    z = norm(h, params["g"])
    return linear(params["cls"], z), linear(params["reg"], z) + CENTRE


def loss(params, x, y, label, weight, key):
    logits, direct = forward(params, x, key)
    cross = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return (weight * (0.15 * cross + 5 * jnp.abs(direct - y).mean(-1))).mean()


def train(columns, targets, labels, weights, seed, classes=33):
    """Train one member of the ensemble; returns its parameters and the input scaling. columns (mixes, 7, 3)."""
    scale = np.asarray(features(columns))
    mean, std = scale.mean((0, 1)), scale.std((0, 1))
    params = init(jax.random.PRNGKey(seed), scale.shape[-1], classes)
    count = len(columns)
    steps = EPOCHS * (count // BATCH)
    rate = optax.warmup_cosine_decay_schedule(0, RATE, steps // 20, steps, RATE / 50)
    optimiser = optax.adamw(rate, weight_decay=DECAY)
    state = optimiser.init(params)

    x_all, y_all = jnp.asarray(columns, jnp.float32), jnp.asarray(targets, jnp.float32)
    label_all, weight_all = jnp.asarray(labels), jnp.asarray(weights)

    def step(carry, rows_and_key):
        params, state = carry
        rows, key = rows_and_key
        x = x_all[rows]
        shake, key = jax.random.split(key)
        x = jnp.clip(x + NOISE * jax.random.normal(shake, x.shape) * (x < 1), 0.01, 1)
        x = (features(x) - mean) / std
        gradient = jax.grad(loss)(params, x, y_all[rows], label_all[rows], weight_all[rows], key)
        updates, state = optimiser.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    # one compiled loop for a whole epoch, because the steps are too short to be dispatched one by one
    def epoch(carry, order, keys):
        return jax.lax.scan(step, carry, (order, keys))[0]

    rng, key, carry = np.random.default_rng(seed), jax.random.PRNGKey(seed + 99), (params, state)
    batches = count // BATCH
    for e in range(EPOCHS):
        order = rng.permutation(count)[: batches * BATCH].reshape(batches, BATCH)
        carry = epoch(carry, jnp.asarray(order), jax.random.split(jax.random.fold_in(key, e), batches))
    params = carry[0]
    return params, mean, std


def posterior(members, columns):
    """Mean class distribution and mean direct regression of an ensemble."""
    distributions, directs = [], []
    run = jax.jit(forward)
    for params, mean, std in members:
        logits, direct = run(params, ((features(columns) - mean) / std).astype(jnp.float32))
        distributions.append(np.asarray(jax.nn.softmax(logits)))
        directs.append(np.asarray(direct))
    return np.mean(distributions, 0), np.mean(directs, 0)


def median(distribution, table):
    """Weighted median per target: (..., classes), (classes, t) -> (..., t). Classes with NaN do not vote."""
    out = np.full((*distribution.shape[:-1], table.shape[1]), np.nan)
    for t in range(table.shape[1]):
        known = np.flatnonzero(~np.isnan(table[:, t]))
        order = known[np.argsort(table[known, t])]
        mass = np.cumsum(distribution[..., order], -1)
        out[..., t] = table[order[(mass >= 0.5 * mass[..., -1:]).argmax(-1)], t]
    return out


def load(path):
    data = np.load(path, allow_pickle=True)
    x, y, labels = data["X"].astype(np.float64), data["Y"].astype(np.float64), data["labels"].astype(int)
    seen, first = {}, []
    for i, sample in enumerate(x):
        key = tuple(sorted(map(tuple, np.round(sample.T, 6))))
        if key not in seen:
            seen[key] = i
            first.append(i)
    x, y, labels = x[first].transpose(0, 2, 1), y[first].transpose(0, 2, 1), labels[first]
    names = [str(n) for n in data["names"]]
    targets = np.array([y[labels == c][0] for c in range(len(names))])
    dummy = int(np.argmin(np.abs(targets - [0.8889, 1.0, 0.8889]).sum(1)))
    return x, y, labels, names, targets, dummy


def folds(count, parts, seed):
    return np.array_split(np.random.default_rng(seed).permutation(count), parts)


def small_slices(names):
    """Speeds on 2g and 1g of the classes from the package's own table (NaN: out of memory or not measured)."""
    from cotenant.profiles.mig.workloads import speeds_of, workloads

    table = np.full((len(names), 2), np.nan)
    big, small = [], []
    for c, name in enumerate(names):
        work = workloads().get(name)
        if work is None:
            continue
        speed = speeds_of(np.array([work.latency_s]))[0]
        table[c] = np.where(speed[3:5] > 0, speed[3:5], np.nan)
        big.append(speed[1:3])
        small.append(table[c])
    return table, np.array(big), np.array(small)


def regression(big, small):
    """Fit a least-squares regression from 4g and 3g speed to 2g and 1g speed; returns it with leave-one-out errors."""
    coefficients, errors = [], []
    for t in range(2):
        ok = ~np.isnan(small[:, t])
        design = np.column_stack([np.ones(ok.sum()), big[ok]])
        value = small[ok, t]
        coefficients.append(np.linalg.lstsq(design, value, rcond=None)[0])
        out = [
            design[i] @ np.linalg.lstsq(np.delete(design, i, 0), np.delete(value, i), rcond=None)[0]
            for i in range(len(value))
        ]
        errors.append(float(np.abs(np.clip(out, 0, big[ok, 1]) - value).mean()))
    return np.array(coefficients), errors


def errors_of(predicted, truth, real):
    gap = np.abs(predicted - truth)[real]
    return {
        "mae": float(gap.mean()),
        "7g": float(gap[:, 0].mean()),
        "4g": float(gap[:, 1].mean()),
        "3g": float(gap[:, 2].mean()),
        "columns": int(real.sum()),
    }


def by_mix(x, y, labels, targets, real, weights, members):
    """Out-of-fold distributions over five folds of mixes."""
    distribution = np.zeros((*labels.shape, len(targets)))
    for f, test in enumerate(folds(len(x), 5, 0)):
        rest = np.setdiff1d(np.arange(len(x)), test)
        models = [train(x[rest], y[rest], labels[rest], weights[rest], 100 * f + m) for m in range(members)]
        distribution[test], _ = posterior(models, x[test])
        report = errors_of(median(distribution[test], targets), y[test], real[test])
        print(f"by mix, fold {f}: {report}", flush=True)
    return distribution


def by_workload(x, y, labels, targets, real, weights, dummy, groups):
    """Errors on workloads that training never had a target for: by the median, and by the direct regression."""
    found = []
    names = np.setdiff1d(np.arange(len(targets)), [dummy])
    for g, held in enumerate(np.array_split(np.random.default_rng(1).permutation(names), groups)):
        hidden = np.isin(labels, held)
        params = [train(x, y, labels, np.where(hidden, 0, weights).astype(np.float32), 900 + g)]
        distribution, direct = posterior(params, x)
        distribution[..., held] = 0
        mask = hidden & real
        found.append((errors_of(median(distribution, targets), y, mask), errors_of(direct, y, mask)))
        print(f"by workload, group {g}: {found[-1]}", flush=True)
    total = sum(m["columns"] for m, _ in found)
    return [sum(pair[i]["mae"] * pair[i]["columns"] for pair in found) / total for i in (0, 1)]


def flatten(params, prefix):
    flat = {}
    for name, value in params.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}/{name}")
        elif isinstance(value, list):
            for i, block in enumerate(value):
                flat |= flatten(block, f"{prefix}/{name}/{i}")
        else:
            flat[f"{prefix}/{name}"] = np.asarray(value, np.float16)
    return flat


def samples_of(predicted, small, labels, real, dummy, classes, each, seed):
    """Out-of-fold predictions per workload and number of jobs, for simulation: (classes, 7, each, 5)."""
    rng = np.random.default_rng(seed)
    table = np.full((classes, 7, each, 5), np.nan)
    jobs = np.repeat(real.sum(1)[:, None], 7, 1)
    rows = np.concatenate([predicted, small], -1)
    for c in range(classes):
        for k in range(1, 8):
            pool = rows[(labels == c) & (jobs == k) & real]
            if c == dummy or not len(pool):
                continue
            table[c, k - 1] = pool[rng.integers(0, len(pool), each)]
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--check-members", type=int, default=3)
    parser.add_argument("--source", default="MISO (SoCC'22), public repository boringlee24/socc22-miso, A100-40GB")
    args = parser.parse_args()
    begin = time.time()
    x, y, labels, names, targets, dummy = load(args.data)
    real = labels != dummy
    weights = (0.2 + 0.8 * real).astype(np.float32)
    print(f"{len(x)} mixes, {int(real.sum())} columns of jobs, {len(names)} workloads", flush=True)
    table, big, small = small_slices(names)
    coefficients, loo = regression(big, small)
    distribution = by_mix(x, y, labels, targets, real, weights, args.check_members)
    predicted, smaller = median(distribution, targets), median(distribution, table)
    mix = errors_of(predicted, y, real)
    small_gap = np.abs(smaller - table[labels])
    by_jobs = {int(k): float(np.abs(predicted - y)[real & (real.sum(1) == k)[:, None]].mean()) for k in range(1, 8)}
    unseen = by_workload(x, y, labels, targets, real, weights, dummy, 4)
    members = [train(x, y, labels, weights, 5000 + m) for m in range(args.members)]
    card = {
        "what": "MPS latencies at 100/50/14 % of seven co-runners -> normalised latency on 7g/4g/3g, speed on 2g/1g",
        "gpu": "A100-40GB",
        "source": args.source,
        "trained_on": {"mixes": len(x), "columns": int(real.sum())},
        "by_mix": mix | {"folds": 5, "members": args.check_members},
        "by_mix_small_slices_speed_mae": {
            "2g": float(np.nanmean(small_gap[real][:, 0])),
            "1g": float(np.nanmean(small_gap[real][:, 1])),
        },
        "by_mix_mae_by_jobs": by_jobs,
        "by_workload": {"mae_median": unseen[0], "mae_regression": unseen[1], "groups": 4, "members": 1},
        "small_slices_regression_loo_speed_mae": {"2g": loo[0], "1g": loo[1]},
        "members": args.members,
        "width": WIDTH,
        "blocks": BLOCKS,
        "heads": HEADS,
        "epochs": EPOCHS,
        "columns_left_out": "dummy columns, whose target is always 0.8889, 1, 0.8889",
        "names": names,
    }
    arrays = {"targets": targets, "small": table, "regression": coefficients, "dummy": np.array(dummy)}
    arrays["samples"] = samples_of(predicted, smaller, labels, real, dummy, len(names), 12, 7).astype(np.float16)
    for m, (params, mean, std) in enumerate(members):
        arrays |= flatten(params, f"m{m}") | {f"m{m}/mean": mean, f"m{m}/std": std}
    np.savez_compressed(Path(args.out), card=np.array(json.dumps(card)), **arrays)
    print(json.dumps(card, indent=1), f"\n{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
