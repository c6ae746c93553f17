"""Compare ensemble_tables.py with a forest and boosting under MAPIE.

    python -m pip install '.[bench]'
    UCI_DIR=... python benchmarks/tables.py
    UCI_DIR=... python benchmarks/tables.py --classify
    UCI_DIR=... python benchmarks/tables.py --folds

The data are three of scikit-learn's sets, in five folds twice, and the sets in UCI_DIR,
on their first splits.  A set there is a folder with two files.  data.txt has one row
per example, with the target in the last column.  test_rows.txt has one line per split,
the numbers of its test rows, from 0; the other rows train.

Scikit-learn's estimators have their defaults.  MAPIE gives them cross-conformal
intervals (CV+, Barber et al. 2021) with its five folds.  NLL is of the density that a
system predicts; a forest and boosting have none.  The seconds are the time to fit and
predict a split; the ensemble compiles in the first split of a set.

With --classify the sets have classes, are divided into five folds, and a logistic
regression of standardized inputs is a fourth system; no intervals are needed, and so no
MAPIE.  A set of UCI_DIR has its targets as classes.

With --folds twenty networks are the members of one trainer.  In the first row four
networks leave out each of five folds, and their mean is a member of `fold_interval`; in
the second the intervals lie around the mean of all, as wide as `conformal_quantile`
says for the left-out rows; in the third all networks leave out the same fold, for
`conformal_quantile`.  The last row has forests of the five folds under MAPIE, whose
intervals `fold_interval` has to equal.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

import accelerators
import jax
import numpy as np
import speed
from sklearn import datasets, ensemble
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, RepeatedKFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe
from ensemble_tables import Data, EnsembleClassifier, EnsembleRegressor, Split

NLL = "negative_log_likelihood"
DRAWN = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(1000, noise=1, random_state=0),
    "friedman2": lambda: datasets.make_friedman2(1000, noise=1, random_state=0),
}

CLASSES = {
    "breast-cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "clusters": lambda: datasets.make_classification(
        3000, 20, n_informative=8, n_classes=4, flip_y=0.05, random_state=0
    ),
    "hastie": lambda: datasets.make_hastie_10_2(4000, random_state=0),
}


def under_mapie(model, train, test):
    from mapie.regression import CrossConformalRegressor

    conformal = CrossConformalRegressor(model, confidence_level=0.9, random_state=0)
    means, ends = conformal.fit_conformalize(*train).predict_interval(test[0])
    return means, ends[:, :, 0], np.nan


def ours(model, train, test):
    model.fit(*train)
    ends = model.predict_interval(test[0])
    return model.predict(test[0]), ends, -model.log_density(*test).mean()


SYSTEMS = {
    "ensemble": (ours, EnsembleRegressor(random_state=0)),
    "forest": (under_mapie, ensemble.RandomForestRegressor(random_state=0, n_jobs=-1)),
    "boosting": (under_mapie, ensemble.HistGradientBoostingRegressor(random_state=0)),
}
CLASSIFIERS = {
    "ensemble": EnsembleClassifier(random_state=0),
    "logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    "forest": ensemble.RandomForestClassifier(random_state=0, n_jobs=-1),
    "boosting": ensemble.HistGradientBoostingClassifier(random_state=0),
}


def read(name: str, folder: Path) -> Data:
    if name in DRAWN:
        x, y = DRAWN[name]()
        return Data(x, y, list(RepeatedKFold(n_repeats=2, random_state=0).split(x)))
    table = np.loadtxt(folder / name / "data.txt", np.float32)
    lines = (folder / name / "test_rows.txt").read_text().splitlines()
    tests, rows = [np.array(line.split(), int) for line in lines], np.arange(len(table))
    splits = [Split(np.delete(rows, test), test) for test in tests]
    return Data(table[:, :-1], table[:, -1], splits)


def measure(predict, model, data: Data, count: int | None = None) -> np.ndarray:
    """Return RMSE, NLL, coverage, width and seconds of each split, [splits, 5]."""
    scores = []
    for split in data.splits[:count]:
        train, (x, y) = ((data.x[rows], data.y[rows]) for rows in split)
        started = time.perf_counter()
        means, ends, nll = predict(model, train, (x, y))
        seconds, (low, high) = time.perf_counter() - started, ends.T
        rmse, inside = np.sqrt(np.mean((means - y) ** 2)), (low <= y) & (y <= high)
        scores.append((rmse, nll, inside.mean(), (high - low).mean(), seconds))
    return np.array(scores)


def read_classes(name: str, folder: Path) -> Data:
    x, y = CLASSES[name]() if name in CLASSES else read(name, folder)[:2]
    y = np.unique(y, return_inverse=True)[1]
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return Data(x, y, [*folds.split(x, y)])


def measure_classes(model, data: Data, count: int | None = None) -> tuple[dict, list]:
    """Return the scores of all test rows together, and each split's seconds."""
    probs, seconds = [], []
    for train, test in data.splits[:count]:
        started = time.perf_counter()
        model.fit(data.x[train], data.y[train])
        probs.append(model.predict_proba(data.x[test]))
        seconds.append(time.perf_counter() - started)
    tests = np.concatenate([test for _, test in data.splits[:count]])
    report = em.ensemble_report(np.concatenate(probs)[None], data.y[tests])
    return report["ensemble"], seconds


FOLDS, EACH, STEPS, BATCH = 5, 4, 3000, 50  # four networks leave out each fold


def network(params, x):  # [B, F] -> [B]
    return accelerators.mlp(params, x)[:, 0]


@functools.cache
def make_networks(inputs: int) -> pe.Trainer:
    return pe.make_trainer(
        lambda key: accelerators.mlp_init(key, (inputs, 64, 64, 1)),
        lambda params, x, y: ((network(params, x) - y) ** 2).mean(),
        pe.adam(pe.cosine_schedule(0.003, STEPS)),
        members=FOLDS * EACH,
        apply_fn=network,
        output=None,
        at_once=FOLDS * EACH,
    )


def train_networks(data: Data, learned: list) -> np.ndarray:
    """Return predictions [FOLDS, N], means of EACH networks that learned these rows."""
    seen = np.unique(np.concatenate(learned))
    arrays = data.x[seen], data.y[seen]
    (mean, scale), (center, unit) = ((z.mean(axis=0), z.std(axis=0)) for z in arrays)
    x, y = np.float32((data.x - mean) / scale), np.float32((data.y - center) / unit)
    draw, trainer = np.random.default_rng(0), make_networks(x.shape[1])
    orders = [draw.choice(rows, (EACH, STEPS, BATCH)) for rows in learned]
    state, _ = trainer.epoch(
        trainer.init(jax.random.key(0)), (x, y), np.concatenate(orders)
    )
    found = np.float64(trainer.predict_members(state, x)) * unit + center
    return found.reshape(FOLDS, EACH, -1).mean(axis=1)


def fold_ends(data: Data, train: np.ndarray, test: np.ndarray) -> dict:
    """Return the ends of 90% intervals of the test rows, by each of four ways."""
    from mapie.regression import CrossConformalRegressor

    folds = np.random.default_rng(0).permutation(len(train)) % FOLDS
    learned, y = [train[folds != k] for k in range(FOLDS)], data.y[train]
    found = train_networks(data, learned)
    ours = em.fold_interval(found[:, test], found[folds, train], y, folds)
    center = found[:, test].mean(axis=0)
    width = em.conformal_quantile(np.abs(y - found[folds, train]))
    means = train_networks(data, learned[:1] * FOLDS).mean(axis=0)
    bound = em.conformal_quantile(np.abs(data.y - means)[train[folds == 0]])
    forest = ensemble.RandomForestRegressor(random_state=0)
    how = dict(confidence_level=0.9, method="plus", cv=PredefinedSplit(folds))
    conformal = CrossConformalRegressor(forest, **how)
    conformal.fit_conformalize(data.x[train], y)
    theirs = conformal.predict_interval(data.x[test])[1][:, :, 0].T
    forests = [clone(forest).fit(data.x[rows], data.y[rows]) for rows in learned]
    found = np.stack([each.predict(data.x) for each in forests])
    same = em.fold_interval(found[:, test], found[folds, train], y, folds)
    np.testing.assert_allclose(same, theirs, rtol=1e-9)
    return {
        "networks, `fold_interval`": ours,
        "networks, around their mean": (center - width, center + width),
        "networks, one fold held out": (means[test] - bound, means[test] + bound),
        "forests, MAPIE": theirs,
    }


def compare_folds(args, folder: Path) -> None:
    speed.print_head("set", "system", "in 90% intervals", "width")
    for name in args.sets or ["concrete", "energy"]:
        data, scores = read(name, folder), {}
        for train, test in data.splits[: args.splits]:
            for system, (low, high) in fold_ends(data, train, test).items():
                inside = (low <= data.y[test]) & (data.y[test] <= high)
                score = inside.mean(), (high - low).mean()
                scores.setdefault(system, []).append(score)
        for system, of_splits in scores.items():
            inside, width = np.mean(of_splits, axis=0)
            speed.print_row(name, system, f"{inside:.1%}", f"{width:.3g}")


def compare_numbers(args, folder: Path) -> None:
    there = sorted(path.parent.name for path in folder.glob("*/test_rows.txt"))
    columns = "set", "system", "RMSE", "NLL", "in 90% intervals", "width"
    speed.print_head(*columns, "s, first split", "s, last split")
    for name in args.sets or [*DRAWN, *there]:
        data = read(name, folder)
        for system in args.systems or SYSTEMS:
            found = measure(*SYSTEMS[system], data, args.splits)
            rmse, nll, inside, width, _ = found.mean(axis=0)
            density = "-" if np.isnan(nll) else f"{nll:.3g}"
            cells = f"{rmse:.3g}", density, f"{inside:.1%}", f"{width:.3g}"
            seconds = (f"{s:.1f}" for s in found[[0, -1], -1])
            speed.print_row(name, system, *cells, *seconds)


def compare_classes(args, folder: Path) -> None:
    columns = "set", "system", "log loss", "accuracy", "ECE"
    speed.print_head(*columns, "s, first split", "s, last split")
    for name in args.sets or [*CLASSES, "wine-quality-red"]:
        data = read_classes(name, folder)
        for system in args.systems or CLASSIFIERS:
            found, seconds = measure_classes(CLASSIFIERS[system], data, args.splits)
            loss, ece = (found[key] for key in (NLL, "expected_calibration_error"))
            cells = f"{loss:.3g}", f"{found['accuracy']:.1%}", f"{ece:.3f}"
            cells += f"{seconds[0]:.1f}", f"{seconds[-1]:.1f}"
            speed.print_row(name, system, *cells)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--systems", nargs="+", choices=CLASSIFIERS, help="or all")
    parser.add_argument("--splits", type=int, default=10, help="how many per set")
    parser.add_argument("--classify", action="store_true", help="classes, not numbers")
    parser.add_argument("--folds", action="store_true", help="leave folds out")
    args, folder = parser.parse_args(argv), Path(os.environ.get("UCI_DIR", "."))
    pe.use_cpu_devices()
    compare = compare_classes if args.classify else compare_numbers
    (compare_folds if args.folds else compare)(args, folder)


if __name__ == "__main__":
    main()
