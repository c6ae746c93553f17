"""Train with all that a long training needs, and lose nothing to a kill or Ctrl-C.

    python loop.py --plot loop.png

Five networks learn the README's data, with a progress bar, validation, the best weights
of each member, early stopping, and one file after each epoch.  The same command goes on
from the file; once the training has ended, it only scores.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

try:
    from tqdm.auto import tqdm  # draws a progress bar: the extra [progress]
except ImportError:

    def tqdm(epochs, **form):
        return epochs


SETTINGS = {"seed": 0, "epochs": 100, "batch": 50, "rate": 0.003, "patience": 12}
BLUE, ORANGE = "#0072b2", "#d55e00"


def as_json(settings):
    """Return settings as JSON: numbers, strings, paths, lists or arrays of these."""

    def plain(value):  # called for those that JSON lacks
        path = isinstance(value, os.PathLike)
        return os.fspath(value) if path else np.asarray(value).tolist()

    for name, value in settings.items():
        try:
            json.dumps(value, default=plain)
        except (TypeError, ValueError, RecursionError):
            form = "a number, a string, a path, or a list or array of these"
            raise ValueError(f"{name} is {value}; expected {form}") from None
    return json.dumps(settings, default=plain)


def fit(trainer, train_epoch, validate, file, settings):
    """Train until no member has improved for `patience` epochs; return all it kept.

    train_epoch(state, epoch) returns the state and losses [K, steps]; validate(state)
    returns losses [K].  The file holds all that the loop knows, so the same call goes
    on after a kill or Ctrl-C, and ends as if there had been none.  So does a call with
    more `epochs` or `patience`, if nothing else depends on these.
    """
    epochs, patience = settings["epochs"], settings["patience"]
    first = trainer.gather(trainer.init(jax.random.key(settings["seed"])))
    losses = np.full((2, epochs, trainer.members), np.inf)
    kept = dict(epoch=0, waited=0, state=first, best=first, losses=losses[:, :0])
    text = as_json(settings | {"epochs": 0, "patience": 0})  # these two may rise
    kept["settings"] = np.frombuffer(text.encode(), np.uint8)
    if os.path.exists(file):
        found, read = pe.load(file), json.JSONDecoder(parse_constant=str).decode
        new = read(text) | {"epochs": epochs, "patience": patience}  # nan is "NaN"
        old = read(bytes(found.get("['settings']", b"{}")).decode())
        old["epochs"] = max(epochs, int(found.get("['epoch']", 0)))
        old["patience"] = max(patience, int(found.get("['waited']", 0)))
        for n in new | old:
            if (was := old.get(n)) != (now := new.get(n)):
                raise ValueError(f"{file} has {n} {was}, not {now}; name another file")
        own = {name: found[f"['{name}']"] for name in ("losses", "settings")}
        kept = pe.load(file, kept | own)  # refuses leaves of other forms
    begin, state = int(kept["epoch"]), trainer.scatter(kept["state"])
    losses[:, :begin] = kept["losses"]
    training, validation = losses  # [epochs, K] each; infinite where to come
    for epoch in tqdm(range(begin, epochs), total=epochs, initial=begin):
        waited = epoch - int(validation.argmin(axis=0).max())
        if waited > patience:
            break
        state, found = train_epoch(state, epoch)
        scores = np.fmin(validate(state), np.inf)  # nan counts as infinite
        if scores.shape != (trainer.members,):
            raise ValueError(f"validate gave {scores.shape}; expected losses [K]")
        training[epoch], validation[epoch] = found.mean(axis=1), scores
        better = validation.argmin(axis=0) == epoch  # [K]
        kept |= {"epoch": epoch + 1, "losses": losses[:, : epoch + 1]}
        kept["waited"] = max(waited, int(kept["waited"]))
        kept["state"] = trainer.gather(state)
        kept["best"] = pe.choose_members(better, kept["state"], kept["best"])
        pe.save(file, kept)  # whole, or not at all
    return kept


def init(key, sizes=(4, 100, 100, 4)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [pe.dense_init(*layer) for layer in zip(keys, sizes, sizes[1:])]


def network(params, x):  # [N, 4] to logits [N, 4]
    for layer in params[:-1]:
        x = jax.nn.relu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


def loss_fn(params, x, y):
    return pe.softmax_cross_entropy(network(params, x), y).mean()


def draw(file, losses):  # [2, epochs, K]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes, epochs = figure.subplots(), np.arange(1, 1 + losses.shape[1])
    for each, name, color in zip(losses, ("training", "validation"), (BLUE, ORANGE)):
        label = [f"{name}, five members", *[None] * 4]
        axes.plot(epochs, each, color=color, lw=0.9, label=label)
    best = losses[1].argmin(axis=0) + 1, losses[1].min(axis=0)
    axes.plot(*best, "o", color="0.15", zorder=3, label="lowest: weights to keep")
    axes.set(xlabel="epoch", ylabel="NLL (nats)", ylim=(0, 0.7))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the losses, by matplotlib")
    parser.add_argument("--file", default="loop.safetensors", help="to go on from")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used
    x = np.random.default_rng(0).normal(size=(2200, 4)).astype(np.float32)
    y = abs(x).argmax(axis=1)
    train, valid, test = np.split(np.arange(2200), [200, 700])
    adam = pe.adam(SETTINGS["rate"])
    trainer = pe.make_trainer(init, loss_fn, adam, members=5, apply_fn=network)
    data = trainer.place((x[train], y[train]))

    def train_epoch(state, epoch):
        options = {"members": 5, "seed": SETTINGS["seed"], "epoch": epoch}
        order = pe.epoch_order(len(train), SETTINGS["batch"], **options)
        return trainer.epoch(state, data, order)

    def validate(state):  # NLLs [5]
        probs = trainer.predict_members(state, x[valid])  # [5, 500, 4]
        return -np.log(probs[:, np.arange(len(valid)), y[valid]]).mean(axis=1)

    kept = fit(trainer, train_epoch, validate, args.file, SETTINGS)
    probs = trainer.predict_members(trainer.scatter(kept["best"]), x[test])
    report, at = em.ensemble_report(probs, y[test]), kept["losses"][1].argmin(axis=0)
    names = [*(f"member {i}, epoch {n + 1}" for i, n in enumerate(at)), "ensemble"]
    line = "{}: NLL {negative_log_likelihood:.3f}, accuracy {accuracy:.3f}"
    for name, scores in zip(names, [*report["member"], report["ensemble"]]):
        print(line.format(name, **scores))
    if args.plot:
        draw(args.plot, kept["losses"])


if __name__ == "__main__":
    main()
