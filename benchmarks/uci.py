"""Table 1 of the deep ensembles paper: regression on the UCI sets, a trainer a set.

    UCI_DIR=... python benchmarks/uci.py --json uci.json

Lakshminarayanan, Pritzel and Blundell 2017, "Simple and scalable predictive uncertainty
estimation using deep ensembles": networks of one hidden layer of 50 units that say a
mean and a variance, 40 epochs in batches of 100; an ensemble of five for each split of
a set into training and test rows.  Here the networks of all splits of a set, five times
20 there, are the members of ONE trainer: `hyper` gives each its own split's
normalization, and `order` its own batches of its own split's training rows.

A set is a folder of DIR with data.txt, a row an example, the last column the target,
and test_rows.txt, a line a split: its test rows, from 0; the others are to train on.

Each split has its own recipe, a rate and a decay, chosen on a tenth of its training
rows that is held out: another trainer has two networks of each setting and split, which
learn the other rows, and the setting of the best likelihood is taken.  A split's test
rows have no part in it, nor had they in what is fixed: Adam with a cosine schedule, a
last layer that starts at 0, and a decay of the weights that let the variance vary.
"""

import argparse
import collections
import itertools
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe

HIDDEN, BATCH, WARMUP = 50, 100, 0.05
RATES, DECAYS = (0.5, 1, 2), (0, 300, 1000)  # to choose from
TRIALS = 2  # networks of each to choose by
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
        if len(train) + len(test) != len(table) or len(train) < 2 or not test:
            raise ValueError(
                f"test_rows.txt: split {number} tests {len(test)} rows and leaves "
                f"{len(train)} of {len(table)}; expected each once, from 0 to "
                f"{len(table) - 1}, and two or more left to train on"
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
    return mean, jax.nn.softplus(spread) + 1e-6


def loss_fn(params, x, y, h):
    y = (y - h["y_mean"]) / h["y_scale"]
    squares = jnp.sum(params[1].weight[:, 1] ** 2)  # what lets the variance vary
    return pe.gaussian_nll(*gaussian(params, x, h), y).mean() + h["decay"] * squares


def apply_fn(params, x, h):  # means and variances [B] in the units of the targets
    mean, variance = gaussian(params, x, h)
    return mean * h["y_scale"] + h["y_mean"], variance * h["y_scale"] ** 2


def member_hyper(x, y, train, rate, decay) -> dict:
    """Return what one member differs in: its recipe, and its rows' normalization."""

    def mean_and_scale(z):  # a column that does not vary has scale 1
        scale = np.where(np.ptp(z, axis=0) == 0, 1, z.std(axis=0, dtype=float))
        return z.mean(axis=0, dtype=float), scale

    (x_mean, x_scale), (y_mean, y_scale) = map(mean_and_scale, (x[train], y[train]))
    h = {"x_mean": x_mean[None], "x_scale": x_scale[None], "rate": rate}  # [1, F]
    h |= {"y_mean": y_mean, "y_scale": y_scale, "decay": decay / len(train)}
    return jax.tree.map(np.float32, h)


def member_orders(trains: list, epoch: int, seed: int) -> np.ndarray:
    """Draw an epoch's batches of every member, [K, steps, B]: its rows, in its order.

    Where members have different numbers of rows, as many steps as the fewest allow.
    """
    fewest = min(map(len, trains))
    batch = min(BATCH, fewest)
    used = fewest - fewest % batch
    draws = [np.random.default_rng([seed, epoch, i]) for i in range(len(trains))]
    rows = [draw.permutation(train)[:used] for draw, train in zip(draws, trains)]
    return np.reshape(rows, (len(trains), -1, batch))


def make_trainer(hyper, num_steps: int, devices: int | None = None) -> pe.Trainer:
    """Make the trainer of all members; `hyper` is a list, an entry a member."""

    def optimizer(h):
        peak = h["rate"] / num_steps**0.5  # a walk of random steps comes as far
        return pe.adam(pe.cosine_schedule(peak, num_steps, warmup=WARMUP))

    options = dict(apply_fn=apply_fn, output=None, chunk=1024)  # outputs as they are
    options["devices"] = min(len(hyper), devices or jax.local_device_count())
    options["hyper"] = jax.tree.map(lambda *leaves: np.stack(leaves), *hyper)
    return pe.make_trainer(init, loss_fn, optimizer, members=len(hyper), **options)


def train(data: Data, recipes, members: int, epochs: int, seed: int, devices=None):
    """Train `members` networks of each of a split's recipes; predict all rows.

    `recipes` is a list for each split, of (rate, decay), all of one length.  Returns
    means and variances, [splits, recipes, members, N] each.
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


def score(data: Data, means, variances) -> dict:
    """Score each split's ensemble, [splits, members, N], on its test rows: [splits]."""
    reports = [
        pe.regression_report(mean[:, test], variance[:, test], data.y[test])
        for mean, variance, (_, test) in zip(means, variances, data.splits)
    ]
    ensembles = [report["ensemble"] for report in reports]
    scores = {name: [each[name] for each in ensembles] for name in (RMSE, NLL)}
    scores["coverage"] = [each["coverage"]["90%"] for each in ensembles]
    return scores | {name: [report[name] for report in reports] for name in PARTS}


def hold_out(data: Data, seed: int) -> Data:
    """Put a tenth of each split's training rows in the place of its test rows."""
    draw, splits = np.random.default_rng(seed), []
    for split in data.splits:
        rows = draw.permutation(split.train)
        tenth = max(1, len(rows) // 10)
        splits.append(Split(rows[tenth:], rows[:tenth]))
    return data._replace(splits=splits)


def choose(data: Data, epochs: int, seed: int) -> list:
    """Return the recipe, (rate, decay), that does best on what each split holds out."""
    held, settings = hold_out(data, seed), list(itertools.product(RATES, DECAYS))
    found = train(held, [settings] * len(held.splits), TRIALS, epochs, seed)
    found = [np.nan_to_num(x, nan=1e18, posinf=1e18) for x in found]  # never the best
    nll = [score(held, *(x[:, i] for x in found))[NLL] for i in range(len(settings))]
    return [settings[best] for best in np.argmin(nll, axis=0)]


def print_table(sets: dict, args: argparse.Namespace) -> dict:
    """Train and score each set, and print its row; return the scores by set."""
    print("| set | RMSE | paper | NLL | paper | 90% intervals hold ", end="")
    print("| variance: noise + disagreement | rate, decay (splits) | s |")
    print(f"|{'---|' * 9}")
    results = {}
    for name, (data, seconds) in sets.items():
        started = time.perf_counter()
        recipes = choose(data, args.epochs, args.seed)
        own, sizes = [[recipe] for recipe in recipes], (args.epochs, args.seed)
        found = train(data, own, args.members, *sizes)
        scores = score(data, *(x[:, 0] for x in found))
        seconds += time.perf_counter() - started
        known = [PAPER[key] for key in PAPER if name.lower().startswith(key)]
        print(f"| {name}", end="")
        for key, paper in zip((RMSE, NLL), *known or [("", "")]):
            cell = f"{np.mean(scores[key]):.3f} ± {np.std(scores[key]):.3f}"
            print(f" | {cell} | {paper}", end="")
        inside, noise, disagreement = (np.mean(scores[k]) for k in ("coverage", *PARTS))
        ((rate, decay), count), *_ = collections.Counter(recipes).most_common()
        print(f" | {inside:.1%} | {noise:.3g} + {disagreement:.3g} ", end="")
        print(f"| {rate:g}, {decay:g} ({count}) | {seconds:.1f} |", flush=True)
        results[name] = scores | {"recipes": recipes, "seconds": seconds}
    total = sum(scores["seconds"] for scores in results.values())
    networks = args.members * sum(len(data.splits) for data, _ in sets.values())
    print(f"\n{total:.1f} s, {networks} networks")
    return results


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def main(argv=None) -> None:
    parser = Parser("uci.py", description=__doc__.splitlines()[0])
    folder = os.environ.get("UCI_DIR")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", default=folder, help="$UCI_DIR"
    )
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="default: all of DIR")
    parser.add_argument("--members", type=positive, default=5, help="of each split")
    parser.add_argument("--epochs", type=positive, default=40)
    parser.add_argument("--devices", type=positive, help="default: one a core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed} is below 0")
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
