"""The public predictor's network, rebuilt from its description, on a split by mix: a baseline for train_mps_mig.py.

    python bench/profiles/baseline_unet.py --data DATA.npz [--epochs 50]

Zero-padded 4x8 image, two encoder stages (two 2x2 convolutions, batch normalisation, ReLU; 32 and 64 filters; 2x2 max
pooling), two 2x2 convolutions of 256, two decoder stages (2x2 transposed convolution of stride 2, skip, batch
normalisation, ReLU, two convolutions), a linear 1x1 output; Adam 0.05718, batches of 53, mean absolute error, 50
epochs, rate x 0.2 after 10 epochs without gain on the validation set. Five column permutations of every mix, as in its
data.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_mps_mig import errors_of, folds, load

DIMS = ("NHWC", "HWIO", "NHWC")


def init(key):
    keys = iter(jax.random.split(key, 40))

    def conv(i, o, size=2):
        fan = size * size * i
        return {"w": jax.random.normal(next(keys), (size, size, i, o)) * np.sqrt(1 / fan), "b": jnp.zeros(o)}

    def norm(n):
        return {"g": jnp.ones(n), "b": jnp.zeros(n)}

    return {
        "e1": [conv(1, 32), conv(32, 32)],
        "n1": [norm(32), norm(32)],
        "e2": [conv(32, 64), conv(64, 64)],
        "n2": [norm(64), norm(64)],
        "c": [conv(64, 256), conv(256, 256)],
        "t2": conv(256, 64),
        "m2": norm(128),
        "d2": [conv(128, 64), conv(64, 64)],
        "t1": conv(64, 32),
        "m1": norm(64),
        "d1": [conv(64, 32), conv(32, 32)],
        "out": conv(32, 1, 1),
    }


def forward(p, x, stats, training):
    """(n, 4, 8, 1) -> (n, 4, 8, 1), and the running statistics of the normalisations."""
    seen = []

    def conv(q, h):
        return jax.lax.conv_general_dilated(h, q["w"], (1, 1), "SAME", dimension_numbers=DIMS) + q["b"]

    def norm(q, h):
        i = len(seen)
        mean, var = (h.mean((0, 1, 2)), h.var((0, 1, 2))) if training else stats[i]
        seen.append((mean, var))
        return jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-3) * q["g"] + q["b"])

    def up(q, h):
        return jax.lax.conv_transpose(h, q["w"], (2, 2), "SAME", dimension_numbers=DIMS) + q["b"]

    def pool(h):
        return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    a = x
    for q, n in zip(p["e1"], p["n1"], strict=True):
        a = norm(n, conv(q, a))
    b = pool(a)
    for q, n in zip(p["e2"], p["n2"], strict=True):
        b = norm(n, conv(q, b))
    h = pool(b)
    for q in p["c"]:
        h = conv(q, h)
    for t, m, d, skip in (("t2", "m2", "d2", b), ("t1", "m1", "d1", a)):
        h = norm(p[m], jnp.concatenate([up(p[t], h), skip], -1))
        for q in p[d]:
            h = conv(q, h)
    return conv(p["out"], h), seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--rate", type=float, default=0.05718)
    args = parser.parse_args()
    x, y, labels, _, _, dummy = load(args.data)
    real = labels != dummy
    test = folds(len(x), 5, 0)[0]
    rest = np.setdiff1d(np.arange(len(x)), test)
    rng = np.random.default_rng(0)

    def image(columns):
        return np.pad(columns.transpose(0, 2, 1)[..., None], ((0, 0), (0, 1), (0, 1), (0, 0))).astype(np.float32)

    orders = [rng.permuted(np.tile(np.arange(7), (len(rest), 1)), axis=1) for _ in range(5)]
    xs = np.concatenate([image(np.take_along_axis(x[rest], o[..., None], 1)) for o in orders])
    ys = np.concatenate([image(np.take_along_axis(y[rest], o[..., None], 1)) for o in orders])
    xt, yt = image(x[test]), y[test]
    params = init(jax.random.PRNGKey(0))
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=args.rate)
    state = adam.init(params)

    def loss(p, a, b):
        out, seen = forward(p, a, None, True)
        return jnp.abs(out - b)[:, :3, :7].mean(), seen

    @jax.jit
    def step(p, state, a, b, stats):
        (_, seen), gradient = jax.value_and_grad(loss, has_aux=True)(p, a, b)
        updates, state = adam.update(gradient, state, p)
        stats = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, stats, seen)
        return optax.apply_updates(p, updates), state, stats

    stats = jax.tree.map(lambda s: s, forward(params, jnp.asarray(xs[:53]), None, True)[1])
    run = jax.jit(lambda p, a, s: forward(p, a, s, False)[0])
    best, since = np.inf, 0
    for epoch in range(args.epochs):
        order = rng.permutation(len(xs))
        for start in range(0, len(xs) - 52, 53):
            rows = order[start : start + 53]
            params, state, stats = step(params, state, xs[rows], ys[rows], stats)
        out = np.asarray(run(params, xt, stats))[:, :3, :7, 0].transpose(0, 2, 1)
        everything = float(np.abs(out - yt).mean())
        found = errors_of(out, yt, real[test])
        best, since = (everything, 0) if everything < best else (best, since + 1)
        if since >= 10:
            state.hyperparams["learning_rate"] = state.hyperparams["learning_rate"] * 0.2
            since = 0
        print(f"epoch {epoch + 1}: all columns {everything:.4f}, columns of jobs {found['mae']:.4f}", flush=True)


if __name__ == "__main__":
    main()
