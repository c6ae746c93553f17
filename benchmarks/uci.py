"""Table 1 of the deep ensembles paper: regression on the UCI sets, a trainer a set.

    UCI_DIR=... python benchmarks/uci.py --json uci.json

Lakshminarayanan, Pritzel and Blundell 2017, "Simple and scalable predictive uncertainty
estimation using deep ensembles": networks of one hidden layer of 50 units that say a
mean and a variance, 40 epochs in batches of 100 (here of fewer where an epoch would
have less than 30 steps); an ensemble of five for each split of a set into training and
test rows.  Here the networks of all splits of a set, five times 20 there, are the
members of ONE trainer: the model state of each has its own split's normalization, and
`order` its own batches of its own split's training rows.

A set is a folder of DIR with data.txt, a row an example, the last column the target,
and test_rows.txt, a line a split: its test rows, from 0; the others are to train on.

A fifth of a split's training rows is held out to calibrate with.  On the others the
split's recipe is chosen by cross-validation: two networks of each setting and fold, all
in one trainer, predict the fold, and the setting of the best likelihood, in the mean
over the folds, is taken.  With it, networks that learn all training rows are scored as
the paper's were, and networks that leave the fifth out get calibrated intervals (split
conformal prediction).  A split's test rows have no part in any of it.

The networks, their recipe and its choice are those of examples/tabular.py.
"""

import argparse
import collections
import os
import sys
import time
from pathlib import Path
from statistics import NormalDist

import numpy as np
import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))
import tabular
from tabular import GAUSSIAN, Data, Split, fold, mixture, train

import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm

FOLDS, TRIALS = 5, 2  # networks of each setting and fold to choose by
ENOUGH = 1000  # held-out rows to choose by: folds beyond these are left out
COVERAGE, GAUSSIAN_QUANTILE = 0.9, NormalDist().inv_cdf(0.95)  # of the intervals
RMSE, NLL = "root_mean_squared_error", tabular.NLL
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


def score(data: Data, means, variances) -> dict:
    """Score each split's ensemble, [splits, members, N], on its test rows: [splits]."""
    reports = [
        em.regression_report(mean[:, test], variance[:, test], data.y[test])
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
        quantile = em.conformal_quantile(errors[own.test], COVERAGE)
        scores["quantile"].append(quantile)
        scores["calibrated_coverage"].append(np.mean(errors[split.test] <= quantile))
        width = 2 * quantile * deviation[split.test].mean()
        scores["calibrated_width"].append(width)
    return scores


def choose(data: Data, epochs: int, seed: int) -> list:
    """Return the recipe of each split that does best in cross-validation."""
    folds = fold(data.splits, FOLDS, seed)
    count = min(len(folds[0]), -(-ENOUGH // min(len(own[0].test) for own in folds)))
    data = data._replace(splits=[split for own in folds for split in own[:count]])
    recipes = [GAUSSIAN.recipes] * len(data.splits)
    _, found = train(GAUSSIAN, data, recipes, TRIALS, epochs, seed)
    nll = tabular.losses(GAUSSIAN, data, found).reshape(len(folds), count, -1)
    return [GAUSSIAN.recipes[i] for i in tabular.plainest(nll.mean(axis=1))]


def measure(data: Data, members: int, epochs: int, seed: int) -> dict:
    """Return the scores of each split's ensembles, and its recipe: [splits] each."""
    held = [first for first, *_ in fold(data.splits, FOLDS, seed)]
    rest = data._replace(splits=held)
    recipes = choose(rest, epochs, seed)

    def ensembles(some):
        own = [[recipe] for recipe in recipes]
        return (x[:, 0] for x in train(GAUSSIAN, some, own, members, epochs, seed)[1])

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
