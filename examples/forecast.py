"""Forecast a series by an ensemble of recurrent networks, with intervals that hold.

    python forecast.py --plot forecast.png

The series has a daily and a weekly season, and noise that lasts for hours.  Five GRUs
read 24 hours, and predict the mean and variance of each of the next 24.  Other hours
give a width per horizon; its coverage is not guaranteed, since windows overlap.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

PAST, HORIZONS, HIDDEN, STEPS = 24, 24, 32, 700
BLUE, ORANGE = "#0072b2", "#d55e00"


def make_series(hours=4000):
    draw, noise = np.random.default_rng(0), np.zeros(hours)
    for t in range(1, hours):
        noise[t] = 0.85 * noise[t - 1] + draw.normal(0, 0.25)
    day, week = np.sin(np.arange(hours) * 2 * np.pi / np.array([[24], [168]]))
    return np.float32(2 * day + week + noise)


def windows(series):  # inputs [N, PAST] and targets [N, HORIZONS]
    both = np.lib.stride_tricks.sliding_window_view(series, PAST + HORIZONS)
    return both[:, :PAST], both[:, PAST:]


def init(key):
    keys = jax.random.split(key, 3)
    gates = pe.dense_init(keys[0], 1 + HIDDEN, 2 * HIDDEN)
    new = pe.dense_init(keys[1], 1 + HIDDEN, HIDDEN)
    return gates, new, pe.dense_init(keys[2], HIDDEN, 2 * HORIZONS)


def network(params, x):  # [B, PAST] to means and variances [B, HORIZONS]
    gates, new, last = params

    def step(h, x):  # a GRU: states [B, HIDDEN], inputs [B, 1]
        both = jax.nn.sigmoid(pe.dense(gates, jnp.concatenate([x, h], axis=-1)))
        reset, keep = jnp.split(both, 2, axis=-1)
        other = jnp.tanh(pe.dense(new, jnp.concatenate([x, reset * h], axis=-1)))
        return keep * h + (1 - keep) * other, None

    h, _ = jax.lax.scan(step, jnp.zeros((len(x), HIDDEN)), x.T[:, :, None])
    mean, spread = jnp.split(pe.dense(last, h), 2, axis=-1)
    return mean, jax.nn.softplus(spread) + 1e-3


def loss_fn(params, x, y):
    return pe.gaussian_nll(*network(params, x), y).mean()


def draw(file, seen, mean, deviation, future, widths, held):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    hours = np.arange(1, HORIZONS + 1)
    left.plot(np.arange(1 - PAST, 1), seen, color="0.15", label="seen")
    left.plot(hours, future, ".", color="0.15", label="to come")
    ends = mean - widths * deviation, mean + widths * deviation
    left.fill_between(hours, *ends, color="#f6cf7d", lw=0, label="90% intervals")
    left.plot(hours, mean, color=ORANGE, lw=2, label="mean")
    left.set(xlabel="hours from now", ylabel="value", ylim=(-4.5, 7))
    left.legend(frameon=False, loc="upper left", ncols=2)
    for name, each, color in zip(("calibrated", "raw"), held, (ORANGE, BLUE)):
        right.plot(hours, 100 * each, color=color, label=name)
    right.axhline(90, color="0.4", lw=0.8, ls="--", label="90%, as requested")
    right.set(xlabel="horizon (hours)", ylabel="targets held (%)", ylim=(40, 100))
    right.legend(frameon=False, loc="lower left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw it, with matplotlib")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used
    train, calibrate, test = np.split(make_series(), [500, 1500])
    options = dict(members=5, apply_fn=network, output=None)
    adam, data = pe.adam(pe.cosine_schedule(0.01, STEPS)), windows(train)
    trainer = pe.make_trainer(init, loss_fn, adam, **options)
    order = np.random.default_rng(0).integers(len(data[0]), size=(STEPS, 32))
    state, _ = trainer.epoch(trainer.init(jax.random.key(0)), data, order)

    def predict(x):  # the ensemble's mean and deviation [N, HORIZONS]
        means, variances = trainer.predict_members(state, x)
        mean, variance = em.mixture(means, variances)
        return mean, np.sqrt(variance)

    (x, y), (new, targets) = windows(calibrate), windows(test)
    mean, deviation = predict(x)
    scores = (abs(y - mean) / deviation).T  # [HORIZONS, N]
    widths = np.array([*map(em.conformal_quantile, scores)])
    mean, deviation = predict(new)
    off = abs(targets - mean) / deviation
    held = (off <= widths).mean(axis=0), (off <= 1.645).mean(axis=0)  # [HORIZONS] each
    line = "{:2} hours ahead: RMSE {:.2f}, 90% intervals hold {:.0%}, raw {:.0%}"
    rmse = np.sqrt(np.mean((targets - mean) ** 2, axis=0))
    for h in (0, 5, 11, 23):
        print(line.format(h + 1, rmse[h], held[0][h], held[1][h]))
    print(f"all 24: {held[0].mean():.1%}, raw {held[1].mean():.1%}")
    if args.plot:
        draw(args.plot, new[0], mean[0], deviation[0], targets[0], widths, held)


if __name__ == "__main__":
    main()
