"""Table 1 of the deep ensembles paper: regression on the UCI sets, a trainer a set.

    UCI_DIR=... python benchmarks/uci.py --json uci.json

Lakshminarayanan, Pritzel and Blundell 2017, "Simple and scalable predictive uncertainty
estimation using deep ensembles": networks of one hidden layer of 50 units that say a
mean and a variance, 40 epochs in batches of 100 (here of fewer where an epoch would
have less than 30 steps); an ensemble of five for each split of a set into training and
test rows.  Here the networks of all splits of a set, five times 20 there, are the
members of ONE trainer: `hyper` gives each its own split's normalization, and `order`
its own batches of its own split's training rows.

A set is a folder of DIR with data.txt, a row an example, the last column the target,
and test_rows.txt, a line a split: its test rows, from 0; the others are to train on.

A fifth of a split's training rows is held out to calibrate with.  On the others the
split's recipe is chosen by cross-validation: two networks of each setting and fold, all
in one trainer, predict the fold, and the setting of the best likelihood, in the mean
over the folds, is taken.  With it, networks that learn all training rows are scored as
the paper's were, and networks that leave the fifth out get calibrated intervals (split
conformal prediction).  A split's test rows have no part in any of it.

All have Adam with a cosine schedule, a last layer that starts at 0, and, against means
and variances that run away, of targets whose own variance is 1,

- a decay of the weights of the variance, and one of all others: a normal prior (MacKay
  1992), apart for the two (Sluijterman et al. 2023).  The recipe is these;
- a floor of the variance, as the paper has, but of 1e-4;
- a loss that weighs a row by the deviation that the network says, so that it learns
  where that is large as well (Seitzer et al. 2022, beta = 0.5).
"""

import argparse
import collections
import itertools
import os
import sys
import time
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist as tm

HIDDEN, WARMUP, FLOOR = 50, 0.05, 1e-4
BATCH, STEPS = 100, 30  # the paper's batch; smaller where an epoch has fewer steps
DECAYS, VARIANCE_DECAYS = (10, 1, 0.1), (300, 30, 3)  # to choose from, plainest first
FOLDS, TRIALS = 5, 2  # networks of each setting and fold to choose by
ENOUGH = 1000  # held-out rows to choose by: folds beyond these are left out
COVERAGE, GAUSSIAN_QUANTILE = 0.9, NormalDist().inv_cdf(0.95)  # of the intervals
RMSE, NLL = "root_mean_squared_error", "negative_log_likelihood"
PARTS = "mean_of_variances", "variance_of_means"
PAPER = {  # RMSE and NLL of its deep ensembles, by how a folder's name begins
    "boston": ("3.28 ± 1.00", "2.41 ± 0.25"),
    "concrete": ("6.03 ± 0.58", "3.06 ± 0.18"),
    "energy": ("2.09 ± 0.29", "1.38 ± 0.22"),
    "kin8nm": ("0.09 ± 0.00", "-1.20 ± 0.02"),
    "naval": ("0.00 ± 0.00", "-5.63 ± 0.05"),
    "power": ("4.11 ± 0.17", "2.79 ± 0.04"),
    "protein": ("4.71 ± 0.06", "2.83 ± 0.02"),
    "wine": ("0.64 ± 0.04", "0.94 ± 0.12"),
    "yacht": ("1.58 ± 0.48", "1.18 ± 0.21"),
    "year": ("8.89 ± NA", "3.35 ± NA"),
}


class Split(NamedTuple):
    train: np.ndarray  # rows to train on
    test: np.ndarray  # rows to score


class Data(NamedTuple):
    x: np.ndarray  # [N, F]
    y: np.ndarray  # [N]
    splits: list[Split]


def read_set(folder: Path) -> Data:
    """Read a set.  Raises ValueError for a damaged file, and OSError."""
    text = (folder / "data.txt").read_text()
    if not text.split():
        raise ValueError("data.txt is empty; expected a row an example")
    table = np.loadtxt(text.splitlines(), np.float32, comments=None, ndmin=2)
    if table.shape[1] < 2:
        raise ValueError("data.txt has one column; expected features and a target")
    wrong = np.argwhere(~(np.abs(table) < 1e18))  # also where it is nan
    if len(wrong):
        row, column = wrong[0]
        value = table[row, column]
        raise ValueError(f"data.txt: row {row} holds {value}; expected below 1e18")
    rows, splits = set(range(len(table))), []
    for number, line in enumerate((folder / "test_rows.txt").read_text().splitlines()):
        test = [int(word) for word in line.split()]
        train = sorted(rows.difference(test))
        if len(train) + len(test) != len(table) or len(train) < 45 or not test:
            raise ValueError(
                f"test_rows.txt: split {number} tests {len(test)} rows and leaves "
                f"{len(train)} of {len(table)}; expected each once, from 0 to "
                f"{len(table) - 1}, and 45 or more left to train and calibrate on"
            )
        splits.append(Split(np.array(train), np.array(test)))
    if not splits:
        raise ValueError("test_rows.txt is empty; expected a line of rows a split")
    return Data(table[:, :-1], table[:, -1], splits)


def init(key, h):  # the first prediction: each split's mean, variance log(2) of 1
    hidden = pe.dense_init(key, h["x_mean"].shape[-1], HIDDEN)
    return hidden, pe.Dense(jnp.zeros((HIDDEN, 2)), jnp.zeros(2))


def gaussian(params, x, h):  # [B, F] -> means and variances [B], of normalized targets
    hidden, last = params
    x = (x - h["x_mean"]) / h["x_scale"]
    mean, spread = pe.dense(last, jax.nn.relu(pe.dense(hidden, x))).T
    return mean, jax.nn.softplus(spread) + FLOOR


def loss_fn(params, x, y, h):
    mean, variance = gaussian(params, x, h)
    nll = pe.gaussian_nll(mean, variance, (y - h["y_mean"]) / h["y_scale"])
    loss = jnp.average(nll, weights=jax.lax.stop_gradient(jnp.sqrt(variance)))
    hidden, last = (jnp.sum(layer.weight**2, axis=0) for layer in params)  # a unit each
    return loss + h["decay"] * (hidden.sum() + last[0]) + h["variance_decay"] * last[1]


def apply_fn(params, x, h):  # means and variances [B] in the units of the targets
    mean, variance = gaussian(params, x, h)
    return mean * h["y_scale"] + h["y_mean"], variance * h["y_scale"] ** 2


def member_hyper(x, y, train, decay, variance_decay) -> dict:
    """Return what one member differs in: its recipe, and its rows' normalization."""

    def mean_and_scale(z):  # a column that does not vary has scale 1
        scale = np.where(np.ptp(z, axis=0) == 0, 1, z.std(axis=0, dtype=float))
        return z.mean(axis=0, dtype=float), scale

    (x_mean, x_scale), (y_mean, y_scale) = map(mean_and_scale, (x[train], y[train]))
    h = {"x_mean": x_mean[None], "x_scale": x_scale[None]}  # [1, F]
    h |= {"y_mean": y_mean, "y_scale": y_scale}
    h |= {"decay": decay / len(train), "variance_decay": variance_decay / len(train)}
    return jax.tree.map(np.float32, h)


def member_orders(trains: list, epoch: int, seed: int) -> np.ndarray:
    """Draw an epoch's batches of every member, [K, steps, B]: its rows, in its order.

    Where members have different numbers of rows, as many steps as the fewest allow.
    """
    fewest = min(map(len, trains))
    batch = max(1, min(BATCH, fewest // STEPS))
    used = fewest - fewest % batch
    draws = [np.random.default_rng([seed, epoch, i]) for i in range(len(trains))]
    rows = [draw.permutation(train)[:used] for draw, train in zip(draws, trains)]
    return np.reshape(rows, (len(trains), -1, batch))


def make_trainer(hyper, num_steps: int, devices: int | None = None) -> pe.Trainer:
    """Make the trainer of all members; `hyper` is a list, an entry a member."""

    def optimizer(h):
        peak = num_steps**-0.5  # a walk of random steps comes as far
        return pe.adam(pe.cosine_schedule(peak, num_steps, warmup=WARMUP))

    options = dict(apply_fn=apply_fn, output=None, chunk=1024, at_once=25)
    options["devices"] = min(len(hyper), devices or jax.local_device_count())
    options["hyper"] = jax.tree.map(lambda *leaves: np.stack(leaves), *hyper)
    return pe.make_trainer(init, loss_fn, optimizer, members=len(hyper), **options)


def train(data: Data, recipes, members: int, epochs: int, seed: int, devices=None):
    """Train `members` networks of each of a split's recipes; predict all rows.

    `recipes` is a list for each split, of (decay, variance_decay), all of one length.
    Returns means and variances, [splits, recipes, members, N] each.
    """
    x, y, splits = data
    each = [
        (split.train, recipe)
        for split, own in zip(splits, recipes)
        for recipe in own
        for _ in range(members)
    ]
    hyper = [member_hyper(x, y, rows, *recipe) for rows, recipe in each]
    trains = [rows for rows, _ in each]
    num_steps = epochs * member_orders(trains, 0, seed).shape[1]
    trainer = make_trainer(hyper, num_steps, devices)
    state, placed = trainer.init(jax.random.key(seed)), trainer.place((x, y))
    for epoch in range(epochs):
        order = member_orders(trains, epoch, seed)
        state, _ = trainer.epoch(state, placed, order)
    shape = len(splits), len(recipes[0]), members, len(y)
    return [found.reshape(shape) for found in trainer.predict_members(state, x)]


def mixture(means, variances) -> tuple:
    """Return an ensemble's mean and deviation: [members, N] -> [N]."""
    means, variances = np.float64(means), np.float64(variances)
    return means.mean(axis=0), np.sqrt(variances.mean(axis=0) + means.var(axis=0))


def score(data: Data, means, variances) -> dict:
    """Score each split's ensemble, [splits, members, N], on its test rows: [splits]."""
    reports = [
        pe.regression_report(mean[:, test], variance[:, test], data.y[test])
        for mean, variance, (_, test) in zip(means, variances, data.splits)
    ]
    ensembles = [report["ensemble"] for report in reports]
    scores = {name: [each[name] for each in ensembles] for name in (RMSE, NLL)}
    scores["coverage"] = [each["coverage"]["90%"] for each in ensembles]
    deviations = [mixture(*found)[1] for found in zip(means, variances)]
    widths = [x[test].mean() for x, (_, test) in zip(deviations, data.splits)]
    scores["width"] = [2 * GAUSSIAN_QUANTILE * width for width in widths]
    return scores | {name: [report[name] for report in reports] for name in PARTS}


def calibrate(data: Data, held: list[Split], means, variances) -> dict:
    """Widen or narrow each split's intervals by the rows that it holds out: [splits].

    mean +- q deviation, where q is of the scores |y - mean| / deviation of `held`'s
    test rows, has a new row's target with a probability of 90% or more.
    """
    scores = {"quantile": [], "calibrated_coverage": [], "calibrated_width": []}
    for split, own, *found in zip(data.splits, held, means, variances):
        mean, deviation = mixture(*found)
        errors = np.abs(data.y - mean) / deviation
        quantile = pe.conformal_quantile(errors[own.test], COVERAGE)
        scores["quantile"].append(quantile)
        scores["calibrated_coverage"].append(np.mean(errors[split.test] <= quantile))
        width = 2 * quantile * deviation[split.test].mean()
        scores["calibrated_width"].append(width)
    return scores


def fold(splits: list[Split], seed: int) -> list[list[Split]]:
    """Share out each split's training rows: FOLDS splits of them, a part to test each.

    A row is tested once.
    """
    draw, folds = np.random.default_rng(seed), []
    for rows, _ in splits:
        parts = np.array_split(draw.permutation(rows), FOLDS)
        folds.append([Split(np.setdiff1d(rows, part), part) for part in parts])
    return folds


def choose(data: Data, epochs: int, seed: int) -> list:
    """Return the recipe of each split that does best in cross-validation."""
    folds = fold(data.splits, seed)
    count = min(FOLDS, -(-ENOUGH // min(len(own[0].test) for own in folds)))
    data = data._replace(splits=[split for own in folds for split in own[:count]])
    settings = list(itertools.product(DECAYS, VARIANCE_DECAYS))
    found = train(data, [settings] * len(data.splits), TRIALS, epochs, seed)
    found = [np.nan_to_num(x, nan=1e18, posinf=1e18) for x in found]  # never the best
    nll = [score(data, *(x[:, i] for x in found))[NLL] for i in range(len(settings))]
    nll = np.reshape(nll, (len(settings), -1, count)).mean(axis=2)
    # Of those that are equal to a hundredth of a nat, the plainest.
    return [settings[best] for best in nll.round(2).argmin(axis=0)]


def measure(data: Data, members: int, epochs: int, seed: int) -> dict:
    """Return the scores of each split's ensembles, and its recipe: [splits] each."""
    held = [first for first, *_ in fold(data.splits, seed)]
    rest = data._replace(splits=held)
    recipes = choose(rest, epochs, seed)

    def ensembles(some):
        own = [[recipe] for recipe in recipes]
        return (x[:, 0] for x in train(some, own, members, epochs, seed))

    scores = score(data, *ensembles(data)) | calibrate(data, held, *ensembles(rest))
    return scores | {"recipes": recipes}


def print_table(sets: dict, args: argparse.Namespace) -> dict:
    """Train and score each set, and print its row; return the scores by set."""
    columns = "set", "RMSE", "paper", "NLL", "paper", "in 90% intervals, width"
    columns += "calibrated", "variance: noise + disagreement", "decays (splits)", "s"
    speed.print_head(*columns)
    results = {}
    for name, (data, seconds) in sets.items():
        started = time.perf_counter()
        scores = measure(data, args.members, args.epochs, args.seed)
        scores["seconds"] = seconds + time.perf_counter() - started
        known = [PAPER[key] for key in PAPER if name.lower().startswith(key)]
        cells = []
        for key, paper in zip((RMSE, NLL), *known or [("", "")]):
            cells += [f"{np.mean(scores[key]):.3f} ± {np.std(scores[key]):.3f}", paper]
        for which in "", "calibrated_":
            keys = which + "coverage", which + "width"
            inside, width = (np.mean(scores[key]) for key in keys)
            cells.append(f"{inside:.1%}, {width:.3g}")
        noise, disagreement = (np.mean(scores[key]) for key in PARTS)
        (recipe, count), *_ = collections.Counter(scores["recipes"]).most_common()
        decays = ", ".join(f"{decay:g}" for decay in recipe)
        cells += [f"{noise:.3g} + {disagreement:.3g}", f"{decays} ({count})"]
        speed.print_row(name, *cells, f"{scores['seconds']:.1f}")
        results[name] = scores
    total = sum(scores["seconds"] for scores in results.values())
    networks = args.members * sum(len(data.splits) for data, _ in sets.values())
    print(f"\n{total:.1f} s, {networks} networks")
    return results


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv=None) -> None:
    parser, many = Parser("uci.py", description=__doc__.splitlines()[0]), tm.at_least(1)
    where = {"type": Path, "default": os.environ.get("UCI_DIR")}
    parser.add_argument("--data", metavar="DIR", help="default: $UCI_DIR", **where)
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="default: all of DIR")
    parser.add_argument("--members", type=many, default=5, help="of each split")
    parser.add_argument("--epochs", type=many, default=40)
    parser.add_argument("--devices", type=many, help="default: one a core")
    parser.add_argument("--seed", type=tm.at_least(0), default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.data is None:
        parser.error("where are the sets? give --data DIR, or set UCI_DIR")
    there = sorted(path.parent.name for path in args.data.glob("*/test_rows.txt"))
    there = [name for name in there if (args.data / name / "data.txt").exists()]
    if not there:
        parser.error(f"{args.data} holds no folder with data.txt and test_rows.txt")
    sets = {}
    for name in args.sets or there:
        if name not in there:
            parser.error(f"no set {name} in {args.data}; there are {', '.join(there)}")
        started = time.perf_counter()
        try:
            data = read_set(args.data / name)
        except (OSError, ValueError) as error:
            parser.error(f"{args.data / name}: {error}")
        sets[name] = data, time.perf_counter() - started
    pe.use_cpu_devices(args.devices)
    try:
        results = print_table(sets, args)
    except ValueError as error:  # of regression_report: networks that diverged
        parser.error(str(error))
    if args.json:
        config = {key: getattr(args, key) for key in ("members", "epochs", "seed")}
        speed.write_json(args.json, config=config, results=results)


if __name__ == "__main__":
    main()
