"""Leave uncertain examples to a person, and give predictions intervals that hold.

    python abstain.py --plot deciding.png

Five networks classify the README's data.  Five fit a curve, partly without data.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

TRAIN, CALIBRATE, TEST = np.split(np.arange(2200), [200, 700])  # rows of both data sets
RISK = 0.04  # the largest share of errors among the examples kept
BLUE, ORANGE = "#0072b2", "#d55e00"


def network(params, x):  # [N, I] to [N, O]
    for layer in params[:-1]:
        x = jax.nn.relu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


def gaussian(params, x):  # [N, I] to means and variances [N]
    mean, spread = network(params, x).T
    return mean, jax.nn.softplus(spread) + 1e-3


def train(data, sizes, rate, loss, model, **options):  # returns a function of x
    def init(key):
        keys = jax.random.split(key, len(sizes) - 1)
        return [pe.dense_init(*layer) for layer in zip(keys, sizes, sizes[1:])]

    def loss_fn(params, x, y):
        return loss(model(params, x), y).mean()

    adam, options = pe.adam(pe.cosine_schedule(rate, 500)), dict(members=5) | options
    trainer = pe.make_trainer(init, loss_fn, adam, apply_fn=model, **options)
    order = np.random.default_rng(0).integers(len(data[0]), size=(500, 50))
    state, _ = trainer.epoch(trainer.init(jax.random.key(0)), data, order)
    return lambda x: trainer.predict_members(state, x)


def decide(axes=None):  # which examples of four classes to decide
    x = np.random.default_rng(0).normal(size=(2200, 4)).astype(np.float32)
    y, sizes, loss = abs(x).argmax(axis=1), (4, 100, 100, 4), pe.softmax_cross_entropy
    probs = train((x[TRAIN], y[TRAIN]), sizes, 0.03, loss, network)(x)
    each = [*probs[:, None], probs]  # five members, each alone, and their ensemble
    unsure = np.array([em.predictive_entropy(own) for own in each])
    wrong = np.array([own.mean(axis=0).argmax(axis=-1) != y for own in each])
    limit = em.risk_threshold(unsure[5, CALIBRATE], wrong[5, CALIBRATE], risk=RISK)
    kept = TEST[unsure[5, TEST] <= limit]
    found = 100 * len(kept) / len(TEST), 100 * wrong[5, kept].mean()
    print("classes: kept {:.1f}%, wrong among them {:.1f}%".format(*found))
    if axes:
        count, order = np.arange(1, len(TEST) + 1), unsure[:, TEST].argsort(axis=1)
        errors = np.take_along_axis(wrong[:, TEST], order, axis=1).cumsum(axis=1)
        x, y = 100 * count / len(TEST), 100 * errors / count
        axes.plot(x, y[:5].T, color=BLUE, lw=0.8, label=["members", *[None] * 4])
        axes.plot(x, y[5], color=ORANGE, lw=2, label="ensemble")
        axes.plot(*found, "o", color=ORANGE, label=f"threshold, found for {RISK:.0%}")
        line = dict(color="0.4", lw=0.8, ls="--", label=f"{RISK:.0%}, as requested")
        axes.axhline(100 * RISK, **line)
        axes.set(xlabel="kept, surest first (%)", ylabel="errors (%)", xlim=(30, 100))


def predict(axes=None):  # a curve, with intervals
    def ensemble(x):  # its mean and deviation [N]
        means, variances = members(x)
        mean, variance = em.mixture(means, variances)
        return mean, np.sqrt(variance)

    x = np.random.default_rng(0).uniform(-1, 1, size=(2200, 1)).astype(np.float32)
    y = np.sin(6 * x[:, 0]) + np.random.default_rng(1).normal(0, 0.2, size=2200)
    seen, sizes = x[:, 0] < 0.6, (1, 100, 100, 2)
    old, calibrate, new = (rows[seen[rows]] for rows in (TRAIN, CALIBRATE, TEST))
    data, loss = (x[old], y[old]), lambda outputs, y: pe.gaussian_nll(*outputs, y)
    members = train(data, sizes, 0.01, loss, gaussian, output=None)
    mean, deviation = ensemble(x)
    off = abs(y - mean) / deviation
    widths = em.conformal_quantile(off[calibrate], 0.9), 1.645  # of a Gaussian
    for name, rows in ("with data", new), ("without", ~seen):
        held = [(off[rows] <= n).mean() for n in widths]
        print("curve {}: 90% intervals hold {:.0%}, raw {:.0%}".format(name, *held))
    if axes:
        grid = np.linspace(-1, 1, 321, dtype=np.float32)
        mean, deviation = ensemble(grid[:, None])
        for n, name, c in zip(widths, ("calibrated", "raw"), ("#f6cf7d", "#bde0f6")):
            ends = mean - n * deviation, mean + n * deviation
            axes.fill_between(grid, *ends, color=c, lw=0, label=f"90%, {name}")
        axes.plot(grid, members(grid[:, None])[0].T, color=BLUE, lw=0.8)
        axes.plot(grid, mean, color=ORANGE, lw=2)
        axes.scatter(x[old], y[old], s=8, color="0.15", zorder=3, label="training data")
        axes.plot(grid, np.sin(6 * grid), "--", color="0.4", lw=1, label="no noise")
        axes.axvspan(0.6, 1, color="0.93", zorder=0, label="no data")
        axes.set(xlabel="x", ylabel="y", xlim=(-1, 1), ylim=(-3, 4), xticks=[-1, 0, 1])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw both, with matplotlib")
    file = parser.parse_args(argv).plot
    pe.use_cpu_devices()  # before JAX is first used
    if not file:
        return decide(), predict()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for part, axes in zip((decide, predict), figure.subplots(1, 2)):
        part(axes)
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
