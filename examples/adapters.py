"""Adapt one trained network to a new task by an ensemble of low-rank adapters.

    python adapters.py --plot adapters.png

A backbone learns from 5,000 examples which of eight numbers is farthest from 0.  Eight
members then learn from few examples, each from its own resample, which is farthest
from 0.5.  An adapter (LoRA, Hu et al. 2021) adds a product of rank 2 to each matrix of
the backbone, which all members share: `frozen`.  Beside them train whole networks.
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

MEMBERS, RANK, STEPS, SIZES = 8, 2, 200, (25, 50, 100, 200, 400)


def draw_data(seed, count, center):  # inputs [N, 8] and labels [N]
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return x, abs(x - center).argmax(axis=1)


def init(key):
    return pe.mlp_init(key, [8, 64, 64, 8])


def loss_fn(params, x, y):
    return pe.softmax_cross_entropy(pe.mlp(params, x), y).mean()


def init_adapters(key, backbone):  # products of rank RANK that are 0 at first
    adapters = []
    for layer, k in zip(backbone, jax.random.split(key, len(backbone))):
        rows, columns = layer.weight.shape
        down = jax.random.normal(k, (rows, RANK)) / RANK
        adapters.append((down, jnp.zeros((RANK, columns))))
    return adapters


def adapted(params, backbone):
    layers = zip(backbone, params)
    return [pe.Dense(w + down @ up, bias) for (w, bias), (down, up) in layers]


def train(trainer, data, count):  # each member on its resample of the first `count`
    draw = np.random.default_rng(1)
    rows = draw.integers(count, size=(MEMBERS, count))
    picks = draw.integers(count, size=(MEMBERS, STEPS * 25))
    order = np.take_along_axis(rows, picks, axis=1).reshape(-1, STEPS, 25)
    return trainer.epoch(trainer.init(jax.random.key(1)), data, order)[0]


def draw(file, found):  # NLLs [sizes] by name
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, losses), color in zip(found.items(), ("#d55e00", "#0072b2", "0.4")):
        axes.plot(range(len(SIZES)), losses, "o-", color=color, label=name)
    axes.set(xlabel="examples of the new task", ylabel="test NLL (nats)", ylim=(0, 3))
    axes.set_xticks(range(len(SIZES)), SIZES)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw it, with matplotlib")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used

    adam = pe.adam(pe.cosine_schedule(0.01, 1000))
    one = pe.make_trainer(init, loss_fn, adam, members=1, devices=1)
    order = np.random.default_rng(0).integers(5000, size=(1000, 100))
    state, _ = one.epoch(one.init(jax.random.key(0)), draw_data(0, 5000, 0), order)
    backbone = jax.tree.map(lambda leaf: leaf[0], one.gather(state).params)

    options = dict(optimizer=pe.adam(pe.cosine_schedule(0.01, STEPS)), members=MEMBERS)
    whole = dict(loss_fn=loss_fn, apply_fn=pe.mlp, **options)
    trainers = {
        "adapters of rank 2": pe.make_trainer(
            init_adapters,
            lambda params, x, y, frozen: loss_fn(adapted(params, frozen), x, y),
            apply_fn=lambda params, x, frozen: pe.mlp(adapted(params, frozen), x),
            frozen=backbone,
            **options,
        ),
        "whole, from the backbone": pe.make_trainer(lambda key: backbone, **whole),
        "whole, anew": pe.make_trainer(init, **whole),
    }
    data, (new, labels), found = draw_data(1, 400, 0.5), draw_data(2, 5000, 0.5), {}
    for name, trainer in trainers.items():
        found[name] = []
        for count in SIZES:
            probs = trainer.predict_members(train(trainer, data, count), new)
            score = em.ensemble_report(probs, labels)["ensemble"]
            found[name].append(score["negative_log_likelihood"])
        print(f"{name}: NLL", *(f"{nll:.2f}" for nll in found[name]))
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    main()
