"""Train with all that a long training needs, and lose nothing to a kill or Ctrl-C.

    python loop.py --plot loop.png

Five networks learn the README's data, with a progress bar, validation, the best weights
of each member, early stopping, and a checkpoint after each epoch.  The same command
goes on from the checkpoint; once the training has ended, it only scores.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

try:
    from tqdm.auto import tqdm  # draws a progress bar: the extra [progress]
except ImportError:
    tqdm = None

SETTINGS = {"seed": 0, "epochs": 100, "batch": 50, "rate": 0.003, "patience": 12}
BLUE, ORANGE = "#0072b2", "#d55e00"


def init(key):
    return pe.mlp_init(key, [4, 100, 100, 4])


def loss_fn(params, x, y):
    return pe.softmax_cross_entropy(pe.mlp(params, x), y).mean()


def draw(file, fitted):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    losses = {"training": fitted.losses, "validation": fitted.validation}
    for (name, each), color in zip(losses.items(), (BLUE, ORANGE)):
        epochs = np.arange(1, 1 + each.shape[1])
        label = [f"{name}, five members", *[None] * 4]
        axes.plot(epochs, each.T, color=color, lw=0.9, label=label)
    best = fitted.validation.argmin(axis=1) + 1, fitted.validation.min(axis=1)
    axes.plot(*best, "o", color="0.15", zorder=3, label="lowest: weights to keep")
    axes.set(xlabel="epoch", ylabel="NLL (nats)", ylim=(0, 0.7))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the losses, by matplotlib")
    parser.add_argument("--folder", default="loop", help="to go on from")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used
    x = np.random.default_rng(0).normal(size=(2200, 4)).astype(np.float32)
    y = abs(x).argmax(axis=1)
    train, valid, test = np.split(np.arange(2200), [200, 700])
    adam = pe.adam(SETTINGS["rate"])
    trainer = pe.make_trainer(init, loss_fn, adam, members=5, apply_fn=pe.mlp)
    bar = tqdm(total=SETTINGS["epochs"], unit=" epochs") if tqdm else None

    def validate(state):  # NLLs [5]
        probs = trainer.predict_members(state, x[valid])  # [5, 500, 4]
        return -np.log(probs[:, np.arange(len(valid)), y[valid]]).mean(axis=1)

    def show(fitted):
        if bar:
            bar.update(fitted.losses.shape[1] - bar.n)

    fitted = pe.fit(
        trainer,
        (x[train], y[train]),
        key=jax.random.key(SETTINGS["seed"]),
        epochs=SETTINGS["epochs"],
        batch_size=SETTINGS["batch"],
        validate=validate,
        patience=SETTINGS["patience"],
        folder=args.folder,
        settings={"rate": SETTINGS["rate"]},
        on_epoch=show,
    )
    if bar:
        bar.close()
    probs = trainer.predict_members(trainer.scatter(fitted.best), x[test])
    report = em.ensemble_report(probs, y[test])
    epochs = fitted.validation.argmin(axis=1) + 1
    names = [*(f"member {i}, epoch {n}" for i, n in enumerate(epochs)), "ensemble"]
    line = "{}: NLL {negative_log_likelihood:.3f}, accuracy {accuracy:.3f}"
    for name, scores in zip(names, [*report["member"], report["ensemble"]]):
        print(line.format(name, **scores))
    if args.plot:
        draw(args.plot, fitted)


if __name__ == "__main__":
    main()
