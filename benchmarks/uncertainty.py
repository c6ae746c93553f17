"""Measure the use of an ensemble's uncertainty: under shift, to label, to decide.

    export MNIST_DIR=...
    python train_mnist.py --members 8 --workdir runs/8
    python train_mnist.py --mode sync --epochs 40 --workdir runs/long
    python benchmarks/uncertainty.py shift runs/8 --long runs/long --plot shift.png
    python benchmarks/uncertainty.py label --plot label.png
    python train_mnist.py --members 8 --train-size 50000 --workdir runs/decide
    python benchmarks/uncertainty.py decide runs/decide --plot decide.png

shift RUN --long RUN: score networks on test images that are turned, and moved around
the edge (Ovadia et al. 2019, "Can you trust your model's uncertainty?").  The networks
are a run's members, ensembles of the first 2, 4, 8 ... and all of them, and a run of
one network that trained for as long as the members together.

label: in each round label the 20 images of a pool of which an ensemble is least sure,
and train it anew (Gal, Islam and Ghahramani 2017, "Deep Bayesian active learning with
image data").  The pool is the first 10,000 training images; the ensembles of all seeds
are one trainer.

decide RUN: calibrate on the training images that a run left out, and score the results
on the test images as they are, and turned, for members and ensembles.  The results are
a threshold (the probability above which images are kept, for an error of at most 0.1%),
a temperature, and sets of classes that hold 99 and 99.9% of the labels.

Each command prints its tables and, with `--plot FILE`, draws them with matplotlib.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import scipy.ndimage
import speed

import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm

# ---------------------------------------------------------------------------------
# shift: the same networks on images that they were not trained for
# ---------------------------------------------------------------------------------

NLL, BRIER, ENTROPY = "negative_log_likelihood", "brier_score", "predictive_entropy"
SCORES = {  # the title, the factor, the form
    "accuracy": ("accuracy, %", 100, ".2f"),
    NLL: ("NLL, nats", 1, ".4f"),
    BRIER: ("Brier score", 1, ".4f"),
    "expected_calibration_error": ("calibration error", 1, ".4f"),
    ENTROPY: ("predictive entropy, nats", 1, ".4f"),
}
LONG = "one, trained longer"


def turn(images: np.ndarray, degrees: int) -> np.ndarray:
    """Turn images [N, H, W, C] to the left about their centers; zeros move in."""
    options = {"axes": (2, 1), "reshape": False, "order": 1}
    return scipy.ndimage.rotate(images, degrees, **options)


def move(images: np.ndarray, pixels: int) -> np.ndarray:
    """Move images [N, H, W, C] to the right; columns that leave enter on the left."""
    return np.roll(images, pixels, axis=2)


SHIFTS = {  # each with its unit and amounts; amount 0 is the images as they are
    turn: ("turned, degrees", range(0, 181, 15)),
    move: ("moved, pixels", range(0, 15, 2)),
}


def report(probs: np.ndarray, labels: np.ndarray) -> dict:
    """Score probabilities [N, C]."""
    found = em.ensemble_report(probs[None], labels)
    return {**found["ensemble"], ENTROPY: found[ENTROPY]}


def score(probs: np.ndarray, labels: np.ndarray, of: Callable = report) -> dict:
    """Score members [K, N, C] and their ensembles: by name, the scores of each."""
    probs, last = np.float64(probs), len(probs)
    found = {"a member": [of(p, labels) for p in probs]}
    for size in (n for n in range(2, last + 1) if n & (n - 1) == 0 or n == last):
        found[f"ensemble of {size}"] = [of(probs[:size].mean(axis=0), labels)]
    return found


def score_shifts(run: tm.Trained, long: tm.Trained, data: tm.Dataset) -> list:
    """Return (unit, amount, scores by name) for every shift of the test images."""
    rows = []
    for change, (unit, amounts) in SHIFTS.items():
        for amount in amounts:
            images = change(data.test_images, amount)
            found = score(run.predict_members(images), data.test_labels)
            alone = score(long.predict_members(images), data.test_labels)
            rows.append((unit, amount, {**found, LONG: alone["a member"]}))
    return rows


def spread(values: Sequence[float], form: str) -> str:
    """Write the mean and, for several values, the range."""
    mean, low, high = (f"{f(values):{form}}" for f in (np.mean, min, max))
    return mean + f" ({low} to {high})" * (len(values) > 1)


def print_shifts(rows: list) -> None:
    """Print a table per score, and at how many shifts the whole ensemble is ahead."""
    names, shifted = list(rows[0][-1]), [found for _, amount, found in rows if amount]
    for key, (title, factor, form) in SCORES.items():
        print()
        speed.print_head(title, *names)
        for unit, amount, found in rows:
            each = ([factor * x[key] for x in own] for own in found.values())
            speed.print_row(f"{unit} {amount}", *(spread(own, form) for own in each))
    *others, whole, long = names
    for key in NLL, BRIER:
        print()
        for name in (*others, long):
            best = [[min(x[key] for x in f[n]) for n in (whole, name)] for f in shifted]
            count = sum(mine < theirs for mine, theirs in best)
            whom = name.replace("a member", "its best member")
            ahead = f"ahead of {whom} at {count} of {len(best)} shifts"
            print(f"{SCORES[key][0]}: {whole} is {ahead}")


def draw_range(axes, x, y: np.ndarray, name: str | None, style: dict) -> None:
    """Draw the mean of `y` [n, count] over `x` [n], under a name, and its range."""
    tm.draw_curve(axes, x, y.mean(axis=1), name, style)
    band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
    axes.fill_between(x, y.min(axis=1), y.max(axis=1), **band)


def styles_of(names: Sequence[str]) -> dict[str, dict]:
    """Return line styles by name: a member's, and ensembles', stronger with size."""
    first, *sizes = names
    styles = {first: tm.MEMBER}
    for number, name in enumerate(sizes, 1):
        marker = "s" if name == sizes[-1] else ""
        styles[name] = {**tm.ENSEMBLE, "alpha": number / len(sizes), "marker": marker}
    return styles


def draw_shifts(rows: list):
    """Draw all scores but Brier's, which looks like the likelihood, over the shifts."""
    from matplotlib.figure import Figure

    *names, long = rows[0][-1]
    styles = {**styles_of(names), long: {**tm.DASHED, "marker": "x", "markersize": 4}}
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    for axes, key in zip(figure.subplots(2, 2).flat, [k for k in SCORES if k != BRIER]):
        title, factor, _ = SCORES[key]
        start, ticks, units = 0, [], []
        for unit, amounts in SHIFTS.values():
            x = start + np.arange(len(amounts))
            mine = [found for its_unit, _, found in rows if its_unit == unit]
            for name, style in styles.items():
                y = factor * np.array([[own[key] for own in f[name]] for f in mine])
                label = name if start == 0 else None
                draw_range(axes, x, y, label, style)
            ticks += zip(x[::2], amounts[::2])
            units.append(unit)
            start = x[-1] + 2
        axes.set_xticks(*zip(*ticks))
        axes.set(xlabel="        ".join(units), title=title)
    lines = axes.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=5, frameon=False)
    return figure


# ---------------------------------------------------------------------------------
# label: an ensemble that asks for the labels of the images it is least sure of
# ---------------------------------------------------------------------------------

A_CLASS, A_ROUND = 2, 20  # labels per class at the start, and per round
POOL, SEEDS, MEMBERS = 10_000, 3, 5  # images, ensembles, members per ensemble
ROUNDS, STEPS, BATCH = 20, 240, 32
RECIPE = tm.RECIPES["cnn"]._replace(learning_rate=0.2, batch_size=BATCH, max_shift=2)
STRATEGIES = {  # members' [K, N, C] -> scores [N]; the highest are labeled
    "mutual information": lambda probs, draw: em.mutual_information(probs),
    "predictive entropy": lambda probs, draw: em.predictive_entropy(probs),
    "at random": lambda probs, draw: draw.random(probs.shape[1]),
}
TARGET = 0.05  # the error to reach
LINES = [tm.ENSEMBLE, {**tm.MEMBER, "linewidth": 2}, {**tm.DASHED, "marker": "x"}]


def first_rows(draw: np.random.Generator, labels: np.ndarray) -> list[int]:
    """Draw the rows of two images per class."""
    rows = draw.permutation(len(labels))
    own = [rows[labels[rows] == label][:A_CLASS] for label in np.unique(labels)]
    return np.concatenate(own).tolist()


def batches(draw: np.random.Generator, rows: list[int], steps: int) -> np.ndarray:
    """Draw batches [steps, B]: all rows in one order, then all in another."""
    count = steps * BATCH
    passes = [draw.permutation(rows) for _ in range(-(-count // len(rows)))]
    return np.concatenate(passes)[:count].reshape(steps, BATCH)


def learn(trainer: pe.Trainer, data: tm.Dataset, strategy: Callable) -> tuple:
    """Alternate: train anew, and label the images that `strategy` scores highest.

    The trainer's members are one ensemble per seed, each with labels of its own.
    Returns the errors on the test images [ROUNDS, SEEDS], and the rows of the training
    images in the order in which they were labeled [SEEDS, labels].
    """
    pool, labels = data.train_images, data.train_labels
    placed = trainer.place((pool, labels))
    images = np.concatenate([data.test_images, pool])  # to predict
    members = trainer.layout.members // SEEDS  # per ensemble
    draws = [np.random.default_rng([0, seed]) for seed in range(SEEDS)]
    labeled = [first_rows(draw, labels) for draw in draws]
    errors, rest = [], ()
    for number in range(ROUNDS):
        for rows, probs, draw in zip(labeled, rest, draws):  # none at first
            scores = strategy(probs, draw)
            scores[rows] = -np.inf  # these have labels
            rows += np.argsort(-scores, kind="stable")[:A_ROUND].tolist()
        order = [
            batches(np.random.default_rng([1, number, seed, i]), rows, STEPS)
            for seed, rows in enumerate(labeled)
            for i in range(members)
        ]
        state = trainer.init(jax.random.key(number))
        state, _ = trainer.epoch(state, placed, np.stack(order))
        probs = trainer.predict_members(state, images)
        probs = probs.reshape(SEEDS, members, *probs.shape[1:])
        test, rest = np.split(probs, [len(data.test_images)], axis=2)
        errors.append((test.mean(1).argmax(-1) != data.test_labels).mean(-1))
    return np.stack(errors), np.array(labeled)


def needed(labels: np.ndarray, errors: np.ndarray) -> str:
    """Return the number of labels at which errors [rounds] first meet the target."""
    enough = labels[errors <= TARGET]
    return str(enough[0]) if len(enough) else f"more than {labels[-1]}"


def print_errors(labels: np.ndarray, found: dict) -> None:
    """Print errors [rounds, seeds] by strategy, and the labels that 5% takes."""
    speed.print_head("labels", *found)
    for count, *own in zip(labels, *found.values()):
        speed.print_row(count, *(spread(100 * errors, ".2f") for errors in own))
    print(f"\nlabels for an error of {TARGET:.0%}:")
    for name, errors in found.items():
        mean, *each = (needed(labels, own) for own in (errors.mean(1), *errors.T))
        print(f"{name}: {mean} by the mean of seeds ({', '.join(each)})")


def draw_errors(labels: np.ndarray, found: dict):
    """Draw errors [rounds, seeds] over labels: mean and range of seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    low, high = (100 * end([*found.values()]) for end in (np.min, np.max))
    for (name, errors), style in zip(found.items(), LINES):
        draw_range(axes, labels, 100 * errors, name, style)
    axes.axhline(100 * TARGET, **tm.DASHED)
    axes.set(xlabel="labels", ylabel="error on test images, %", yscale="log")
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50], ticks)
    axes.minorticks_off()
    axes.set_ylim(max(0.8 * low, 0.1), 1.2 * high + 0.1)
    axes.legend(frameon=False)
    return figure


# ---------------------------------------------------------------------------------
# decide: which images to answer, and which classes to name
# ---------------------------------------------------------------------------------

ALLOWED, SURE = 0.001, 0.95  # the error among kept images, the bound's confidence
COVERAGES = 0.99, 0.999  # of the sets
TURNS = range(0, 46, 15)
KEPT, KEPT_ERROR = "kept, %", "their error, %"
RISK = "error of the surest 90% to 100%"  # for the picture alone


def count_errors(scores: np.ndarray, wrong: np.ndarray) -> tuple:
    """Return the distinct scores [n], and the images and the errors up to each."""
    values, group = np.unique(scores, return_inverse=True)
    return values, *(np.cumsum(np.bincount(group, w)) for w in (None, wrong))


def risk_coverage(scores: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return the error among the 1, 2 ... N images of the lowest scores [N].

    Its mean is the area under the risk-coverage curve (Geifman, Uziel and El-Yaniv
    2019, "Bias-reduced uncertainty estimation").  Where scores are
    equal, the error is the mean over all orders.
    """
    _, kept, errors = count_errors(scores, wrong)
    counts = np.arange(1, len(scores) + 1)
    return np.interp(counts, [0, *kept], [0, *errors]) / counts


def thresholds(scores: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """Return two scores up to which to keep images, for an error of at most ALLOWED.

    The first keeps the most images with that error here.  The second
    has at most that error on other images like these, with probability SURE.
    """
    values, kept, errors = count_errors(scores, wrong)
    here = values[errors / kept <= ALLOWED].max(initial=-np.inf)
    options = dict(risk=ALLOWED, confidence=SURE)
    return here, em.risk_threshold(scores, wrong.astype(bool), **options)


def judge(probs: np.ndarray, labels: np.ndarray, known: int) -> dict:
    """Calibrate on the first `known` of images [N], and score decisions on the others.

    Images are kept in the order of 1 - the largest of their probabilities [N, C].  This
    is the probability of an error, if the probabilities are right: then no other order
    has fewer errors (Chow 1970).
    """
    old, new = slice(known), slice(known, None)
    doubt, wrong = 1 - probs.max(axis=-1), probs.argmax(axis=-1) != labels
    far = 1 - probs[np.arange(len(labels)), labels]
    temperature = em.fit_temperature(probs[old], labels[old])
    tempered = em.temper(probs[new], temperature)
    risk = risk_coverage(doubt[new], wrong[new])
    found = {
        "error, %": 100 * risk[-1],
        "area under risk-coverage, %": 100 * risk.mean(),
        "NLL, nats": report(probs[new], labels[new])[NLL],
        "temperature": temperature,
        "NLL with it, nats": report(tempered, labels[new])[NLL],
    }
    bounds = *thresholds(doubt[old], wrong[old]), thresholds(doubt[new], wrong[new])[0]
    for how, threshold in zip(("", " by the bound", " in hindsight"), bounds):
        kept = doubt[new] <= threshold
        found[f"kept{how}, %"] = 100 * kept.mean()
        errors = wrong[new][kept].sum()
        found[f"their error{how}, %"] = 100 * errors / max(1, kept.sum())
    for coverage in COVERAGES:
        bound = em.conformal_quantile(far[old], coverage)
        classes = (1 - probs[new] <= bound).sum(axis=-1)
        found[f"classes, {coverage:.1%} sets"] = classes.mean()
        found[f"coverage, {coverage:.1%} sets, %"] = 100 * (far[new] <= bound).mean()
    shown = np.rint(np.linspace(0.9, 1, 101) * len(risk)).astype(int)
    found[RISK] = 100 * risk[shown - 1]
    return {name: np.asarray(value).tolist() for name, value in found.items()}


def print_decisions(rows: list) -> None:
    """Print a table of (degrees, scores by name), and the best member."""
    members = rows[0][-1]["a member"]
    speed.print_head("turned", "", *rows[0][-1])
    for degrees, found in rows:
        for title in (title for title in members[0] if title != RISK):
            each = (spread([x[title] for x in own], ".4g") for own in found.values())
            speed.print_row(f"{degrees} degrees", title, *each)
    ranks = [(x[KEPT_ERROR] <= 100 * ALLOWED, x[KEPT]) for x in members]
    best = ranks.index(max(ranks))
    kept, error = members[best][KEPT], members[best][KEPT_ERROR]
    print(f"\nmember {best} is the best: kept {kept:.2f}%, error {error:.3f}%")


def draw_decisions(rows: list):
    """Draw risk-coverage curves and, over turns, errors of the kept and coverage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    risk, kept, sets = figure.subplots(1, 3)
    panels = {f"coverage, {coverage:.1%} sets, %": sets for coverage in COVERAGES}
    for name, style in styles_of([*rows[0][-1]]).items():
        errors = np.transpose([own[RISK] for own in rows[0][-1][name]])
        x = np.linspace(90, 100, len(errors))
        draw_range(risk, x, errors, name, {**style, "marker": ""})
        for title, axes in {KEPT_ERROR: kept, **panels}.items():
            y = np.array([[own[title] for own in found[name]] for _, found in rows])
            draw_range(axes, TURNS, y, None, style)
    risk.set(xlabel="test images kept, %", title="error of the surest, %")
    kept.set(xlabel="turned, degrees", title="error of the kept, %", xticks=TURNS)
    sets.set(xlabel="turned, degrees", title="coverage of sets, %", xticks=TURNS)
    for axes in (risk, kept):
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_yticks(ticks := [0, 0.01, 0.1, 1, 10], ticks)
        axes.set_ylim(bottom=0)
    for axes, at in (risk, ALLOWED), (kept, ALLOWED), *((sets, c) for c in COVERAGES):
        axes.axhline(100 * at, label="asked for", **tm.DASHED)
    asked = ", ".join(f"{coverage:.1%}" for coverage in COVERAGES)
    sets.annotate(asked, (TURNS[-1], 100), ha="right", va="bottom")
    sets.set_ylim(top=105)
    lines = risk.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=5, frameon=False)
    return figure


# ---------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------


def load(folder: Path) -> tuple[tm.Trained, tm.Dataset]:
    """Load a run and its data.  Raises Failure, ValueError."""
    run = tm.load_run(folder)
    return run, tm.load_data(run.config["data"], Path(run.config["data_dir"]))


def shift(args) -> Callable:
    """Print scores of runs on shifted images; return the function that draws them.

    Raises Failure, ValueError.
    """
    (run, data), long = load(args.run), tm.load_run(args.long)
    print(f"{data.name}, {len(data.test_images)} test images")
    rows = score_shifts(run, long, data)
    print_shifts(rows)
    return functools.partial(draw_shifts, rows)


def label(args) -> Callable:
    """Print errors over labels, by strategy; return as `shift` does.

    Raises Failure.
    """
    data = tm.load_mnist(tm.default_folder())
    pool = data.train_images[:POOL], data.train_labels[:POOL]
    data = data._replace(train_images=pool[0], train_labels=pool[1])
    trainer = tm.make_trainer(RECIPE, SEEDS * MEMBERS, None, STEPS, data.form())
    print(f"{data.name}, {len(data.test_images)} test images: errors, %", flush=True)
    found = {}
    for name, strategy in STRATEGIES.items():
        found[name], labeled = learn(trainer, data, strategy)
    labels = labeled.shape[1] - A_ROUND * np.arange(ROUNDS)[::-1]  # of each round
    print_errors(labels, found)
    return functools.partial(draw_errors, labels, found)


def decide(args) -> Callable:
    """Print scores of a run's decisions; return as `shift` does.

    Raises Failure, ValueError.
    """
    run, data = load(args.run)
    size, count = run.config["train_size"], len(data.train_images)
    if size == count:
        left = f"trained on all {count} training images, none is left to calibrate on"
        remedy = f"train one with --train-size {count * 5 // 6}"
        raise tm.Failure(f"{args.run}: {left}; {remedy}")
    calibrated = f"calibrated on {count - size} training images that training left out"
    print(f"{data.name}, {len(data.test_images)} test images, {calibrated}")
    known = run.predict_members(data.train_images[size:])
    labels = np.concatenate([data.train_labels[size:], data.test_labels])
    judged, rows = functools.partial(judge, known=count - size), []
    for degrees in TURNS:
        new = run.predict_members(turn(data.test_images, degrees))
        probs = np.concatenate([known, new], axis=1)
        rows.append((degrees, score(probs, labels, judged)))
    print_decisions(rows)
    return functools.partial(draw_decisions, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.  Raises Failure, OSError, ValueError."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for call in (shift, label, decide):
        each = commands.add_parser(call.__name__)
        each.set_defaults(call=call)
        each.add_argument("--plot", type=Path, metavar="FILE")
        if call is not label:
            each.add_argument("run", type=Path)
    commands.choices["shift"].add_argument("--long", type=Path, required=True)
    args, started = parser.parse_args(argv), time.perf_counter()
    if args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: python -m pip install '.[plot]'")
    pe.use_cpu_devices()
    draw = args.call(args)
    if args.plot:
        draw().savefig(args.plot, format="png", dpi=110)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    with speed.one_line(tm.Failure, OSError, ValueError):
        main()
