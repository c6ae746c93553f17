"""Compare an ensemble of ResNet-20 on CIFAR-10 with one network, at equal cost.

    python -m pip install '.[bench,plot]'
    CIFAR10_DIR=... MNIST_DIR=... python benchmarks/cifar10.py [--epochs 4]
        [--seed 0] [--alone] [--json FILE] [--plot FILE]

CIFAR10_DIR is a folder with files of CIFAR-10's binary version, data_batch_*.bin and
test_batch.bin.  With E epochs, four members are trained for E epochs each; beside them
one longer network for 4 E epochs, and one whose rate falls to zero every E epochs and
rises again, of which four snapshots are kept (Huang et al. 2017).  The first 2,000 test
images find thresholds.  All others are scored, and 2,000 of these under noise, blur,
contrast and brightness (Hendrycks and Dietterich 2019).  Digits of MNIST, in color, are
told apart from them.  With --alone, only the four members are trained and scored.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import resnet
from speed import print_head, print_row

import ensemble_metrics as em
import mnist_data
import pjax_ensemble as pe

MEMBERS, BATCH, RATE, DECAY, RISK = 4, 128, 0.1, 5e-4, 0.05
CALIBRATE = SHIFTED = 2000  # test images that find thresholds, and that are changed
RECORD = 1 + 3 * 32 * 32  # bytes: a label, and an image of three channels
SHOWN = "a member", "4 members", "longer", "4 snapshots"
ARCHIVE = "cifar-10-binary.tar.gz, https://www.cs.toronto.edu/~kriz/cifar.html"


# Data


class Images(NamedTuple):
    images: np.ndarray  # uint8 [N, 32, 32, 3]
    labels: np.ndarray  # int32 [N]


def read(paths: list[Path]) -> Images:
    """Read files of the binary version, or exit with a line."""
    try:
        parts = [np.fromfile(path, np.uint8) for path in paths]
    except OSError as error:
        raise SystemExit(f"{error}; the archive is {ARCHIVE}") from error
    for path, part in zip(paths, parts):
        if not part.size or part.size % RECORD or part[::RECORD].max() > 9:
            found = f"{part.size} bytes, not records of {RECORD} with labels 0-9"
            raise SystemExit(f"{path}: {found}; the archive is {ARCHIVE}")
    rows = np.concatenate(parts).reshape(-1, RECORD)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images), rows[:, 0].astype(np.int32))


def colored(digits: np.ndarray, seed: int = 0) -> np.ndarray:
    """Draw digits [N, 28, 28, 1], each in one color on another: [N, 32, 32, 3]."""
    colors = np.random.default_rng(seed).uniform(size=(2, len(digits), 1, 1, 3))
    ink = np.pad(digits / 255, [(0, 0), (2, 2), (2, 2), (0, 0)])
    return as_bytes(ink * colors[0] + (1 - ink) * colors[1])


# Shifts, of images in [0, 1], with a number for each of five strengths


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.round(np.clip(x, 0, 1) * 255).astype(np.uint8)


def noise(x, deviation):
    return x + np.random.default_rng(0).normal(scale=deviation, size=x.shape)


def blur(x, deviation):
    """Average with a Gaussian's weights, to four deviations; edges are repeated."""
    radius = int(4 * deviation + 0.5)
    weights = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * deviation**2))
    for axis in 1, 2:
        pads = [(radius, radius) if i == axis else (0, 0) for i in range(x.ndim)]
        length, x = x.shape[axis], np.pad(x, pads, mode="edge")
        views = [x.take(range(i, i + length), axis) for i in range(2 * radius + 1)]
        x = sum(w * view for w, view in zip(weights / weights.sum(), views))
    return x


def contrast(x, factor):
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * factor + mean


def brightness(x, more):
    """Add to a color's value in HSV, its largest channel."""
    value = x.max(axis=-1, keepdims=True)
    color = np.divide(x, value, out=np.ones_like(x), where=value > 0)
    return color * np.minimum(value + more, 1)


SHIFTS = {
    noise: (0.04, 0.06, 0.08, 0.09, 0.10),
    blur: (0.4, 0.6, 0.7, 0.8, 1.0),
    contrast: (0.75, 0.5, 0.4, 0.3, 0.15),
    brightness: (0.05, 0.1, 0.15, 0.2, 0.3),
}


# Training


def augment(key, x):
    """Flip half of the images, and move each by up to four pixels."""
    flip_key, move_key = jax.random.split(key)
    flips = jax.random.bernoulli(flip_key, shape=(len(x), 1, 1, 1))
    at = jax.random.randint(move_key, (len(x), 2), 0, 9)
    x = jnp.where(flips, x[:, :, ::-1], x)
    padded = jnp.pad(x, [(0, 0), (4, 4), (4, 4), (0, 0)])

    def cut(image, at):
        return jax.lax.dynamic_slice(image, (*at, 0), x.shape[1:])

    return jax.vmap(cut)(padded, at)


def make_trainer(net, periods):
    """Make a trainer of a member for each period, after which its rate rises again."""

    init, apply = resnet.functions(net, jnp.zeros((1, 32, 32, 3)))

    def pixels(images):
        return (images.astype(jnp.float32) / 255 - 0.5) / 0.25

    def loss_fn(params, stats, key, images, labels, period):
        x = augment(key, pixels(images))
        logits, stats = apply(params, stats, x, True)
        squares = [jnp.square(x).sum() for x in jax.tree.leaves(params) if x.ndim > 1]
        loss = pe.softmax_cross_entropy(logits, labels).mean()
        return loss + DECAY / 2 * sum(squares), stats

    def optimizer(period):
        def rate(step):
            return RATE * (1 + jnp.cos(jnp.pi * (step % period) / period)) / 2

        return pe.sgd(rate, nesterov=True)

    def apply_fn(params, stats, images, period):
        return apply(params, stats, pixels(images), False)[0]

    functions = (lambda key, period: init(key)), loss_fn, optimizer
    how = dict(members=len(periods), stateful=True, hyper=np.array(periods))
    return pe.make_trainer(*functions, apply_fn=apply_fn, **how)


def fit(trainer, data, seed, epochs, then=lambda fitted: None):
    """Train each member in its own order; print the losses of each epoch."""
    began = [time.perf_counter()]

    def show(fitted):
        loss = fitted.losses[:, -1].round(3).tolist()
        began.append(time.perf_counter())
        seconds = began[-1] - began[-2]
        number = fitted.losses.shape[1]
        print(f"epoch {number}: losses {loss}, {seconds:.0f} s", flush=True)
        then(fitted)

    key = jax.random.key(seed)
    how = dict(key=key, epochs=epochs, batch_size=BATCH, on_epoch=show)
    return pe.fit(trainer, data, **how).state


def train(net, data, epochs, seed, alone):
    """Train all, or the members alone; return a function of images that predicts.

    It returns each system, a list of models to average scores over.  A model is the
    probabilities of its networks, [K, N, 10].
    """
    period = epochs * (len(data.labels) // BATCH)
    trainer = make_trainer(net, [period] * MEMBERS)
    seeds = 2 * seed, 2 * seed + 1
    members = fit(trainer, data, seeds[0], epochs)

    def predict_alone(images):
        four = trainer.predict_members(members, images)
        return {"a member": [*four[:, None]], "4 members": [four]}

    if alone:
        return predict_alone
    longer, kept = make_trainer(net, [MEMBERS * period, period]), []

    def keep(fitted):  # the end of a cycle
        if fitted.losses.shape[1] % epochs == 0:
            kept.append(jax.tree.map(lambda x: x[1], longer.gather(fitted.state)))

    end = fit(longer, data, seeds[1], MEMBERS * epochs, keep)
    snapshots = trainer.scatter(jax.tree.map(lambda *x: jnp.stack(x), *kept))

    def predict(images):
        long, last = longer.predict_members(end, images)[:, None]
        return predict_alone(images) | {
            "longer": [long],
            "last snapshot": [last],
            "4 snapshots": [trainer.predict_members(snapshots, images)],
        }

    return predict


# Scores


def thresholds(systems, labels):
    """Return the entropy of each model up to which at most RISK is wrong."""

    def threshold(probs):
        wrong = probs.mean(axis=0).argmax(axis=-1) != labels
        return em.risk_threshold(em.predictive_entropy(probs), wrong, risk=RISK)

    return {name: [*map(threshold, models)] for name, models in systems.items()}


def score(probs, labels, threshold):
    """Return the scores of a model, the share that a threshold keeps, and its error."""
    scores = em.ensemble_report(probs, labels)["ensemble"]
    kept = em.predictive_entropy(probs) <= threshold
    wrong = probs.mean(axis=0).argmax(axis=-1) != labels
    share = wrong[kept].sum() / max(kept.sum(), 1)
    return scores | {"kept": kept.mean(), "wrong": share}


def score_all(systems, labels, found):
    """Return each system's scores, means over its models."""
    result = {}
    for name, models in systems.items():
        each = [score(*x) for x in zip(models, [labels] * len(models), found[name])]
        result[name] = {key: float(np.mean([x[key] for x in each])) for key in each[0]}
    return result


def tell_apart(inside, outside):
    """Return the AUROC by which scores of uncertainty tell other images apart."""

    def areas(uncertainty, name):
        both = zip(inside[name], outside[name])
        return [em.auroc(*map(uncertainty, pair)) for pair in both]

    result = {}
    for name, models in inside.items():
        result[name] = {"entropy": float(np.mean(areas(em.predictive_entropy, name)))}
        if len(models[0]) > 1:
            result[name]["mutual information"] = areas(em.mutual_information, name)[0]
    return result


def evaluate(predict, test, digits):
    first, rest = slice(CALIBRATE), slice(CALIBRATE, None)
    systems = predict(test.images)

    def part(rows):
        return {name: [x[:, rows] for x in models] for name, models in systems.items()}

    found = thresholds(part(first), test.labels[first])
    report = {"as they are": score_all(part(rest), test.labels[rest], found)}
    rows = slice(CALIBRATE, CALIBRATE + SHIFTED)
    images, labels = test.images[rows] / 255, test.labels[rows]
    report["unchanged"] = score_all(part(rows), labels, found)
    for shift, strengths in SHIFTS.items():
        for i, strength in enumerate(strengths):
            changed = predict(as_bytes(shift(images, strength)))
            key = f"{shift.__name__} {i + 1}"
            report[key] = score_all(changed, labels, found)
    return report | {"digits": tell_apart(part(rest), predict(digits))}


# Reports


def print_tables(report):
    form = "{accuracy:.1%} | {negative_log_likelihood:.3f} | {brier_score:.3f} | "
    form += "{expected_calibration_error:.3f} | {kept:.1%} | {wrong:.1%}"
    print_head("system", "accuracy", "NLL", "Brier", "ECE", "kept", "wrong")
    for name, scores in report["as they are"].items():
        print_row(name, form.format(**scores))
    forms = {"accuracy": "{accuracy:.1%}", "NLL": "{negative_log_likelihood:.2f}"}
    shown = [name for name in SHOWN if name in report["as they are"]]
    for title, form in {**forms, "kept: wrong": "{kept:.0%}: {wrong:.1%}"}.items():
        print()
        print_head(title, *shown)
        for shift, scores in report.items():
            if shift != "digits" and shift[-1] in "135d":
                print_row(shift, *(form.format(**scores[name]) for name in shown))
    print()
    print_head("AUROC, digits in color", "entropy", "mutual information")
    for name, values in report["digits"].items():
        cells = [f"{x:.3f}" for x in values.values()]
        print_row(name, *cells, *[""] * (2 - len(cells)))


def plot(report, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    grid = figure.subplots(2, len(SHIFTS), sharex=True, sharey="row")
    keys = {"accuracy": "accuracy", "negative_log_likelihood": "NLL, nats"}
    for row, (key, label) in zip(grid, keys.items()):
        row[0].set_ylabel(label)
        for axes, shift in zip(row, SHIFTS):
            places = "unchanged", *(f"{shift.__name__} {i}" for i in range(1, 6))
            for name, style in zip(SHOWN, ("C7:", "C0-", "C1--", "C2-.")):
                if name not in report["unchanged"]:
                    continue
                axes.plot([report[at][name][key] for at in places], style, label=name)
            axes.grid(alpha=0.3)
    for axes, shift in zip(grid[0], SHIFTS):
        axes.set_title(shift.__name__)
    for axes in grid[1]:
        axes.set_xlabel("strength")
    grid[1][0].legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None, net: resnet.ResNet | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("CIFAR10_DIR"))
    parser.add_argument("--epochs", type=int, default=4, help="E, of a member")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="the four members only")
    for name in "--json", "--plot":
        parser.add_argument(name, type=Path)
    args = parser.parse_args(argv)
    if not args.data_dir:
        raise SystemExit(f"set CIFAR10_DIR to a folder of files from {ARCHIVE}")
    net = net or resnet.ResNet()
    pe.use_cpu_devices()
    folder = Path(args.data_dir)
    test = read([folder / "test_batch.bin"])
    parts = sorted(folder.glob("data_batch_*.bin")) or [folder / "data_batch_1.bin"]
    training = read(parts)
    digits = mnist_data.load_data("mnist").test_images
    predict = train(net, training, args.epochs, args.seed, args.alone)
    report = evaluate(predict, test, colored(digits[:CALIBRATE]))
    print_tables(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    sys.exit(main())
