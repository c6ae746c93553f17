"""Predict a table's numbers with intervals, in a scikit-learn pipeline.

    python -m pip install scikit-learn
    python tables.py --plot tables.png

scikit-learn's diabetes data: ten numbers per patient, and the disease's progress after
a year.  `ensemble_tables` has the estimator.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

try:
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PowerTransformer
except ImportError as error:
    sys.exit(f"{error}: python -m pip install scikit-learn")

sys.path.append(str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
from ensemble_tables import EnsembleRegressor


def draw(file, y, mean, ends, held):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    order = np.argsort(mean)
    y, mean, (low, high), rank = y[order], mean[order], ends[order].T, np.arange(len(y))
    inside = (low <= y) & (y <= high)
    left.vlines(rank, low, high, color="#f6cf7d", lw=2, label="90% intervals")
    left.plot(rank, mean, color="#d55e00", lw=2, label="mean")
    left.plot(rank[inside], y[inside], ".", color="0.15", label="target, inside")
    left.plot(rank[~inside], y[~inside], "x", color="#0072b2", label="target, outside")
    left.set(
        xlabel="patients held out, by predicted mean", ylabel="progress of disease"
    )
    left.set_ylim(top=500)
    left.legend(frameon=False, loc="upper left", ncols=2)
    percent = 100 * np.array([*held.items()]).T
    right.plot([40, 100], [40, 100], "--", color="0.4", lw=0.8)
    right.plot(*percent, "o-", color="#d55e00")
    right.set(xlabel="coverage requested (%)", ylabel="targets held (%)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw it, with matplotlib")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used

    x, y = load_diabetes(return_X_y=True, scaled=False)
    x, new, y, targets = train_test_split(x, y, test_size=0.3, random_state=0)
    pipe = make_pipeline(PowerTransformer(), EnsembleRegressor(random_state=0))
    pipe.fit(x, y)

    model, features = pipe[-1], pipe[:-1].transform(new)
    mean, held = pipe.predict(new), {}
    error = np.sqrt(np.mean((targets - mean) ** 2))
    print(f"RMSE {error:.1f}; R2 {pipe.score(new, targets):.2f}")
    for coverage in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        low, high = model.predict_interval(features, coverage).T
        held[coverage] = np.mean((low <= targets) & (targets <= high))
        width = np.mean(high - low)
        print(f"{coverage:.0%} intervals: hold {held[coverage]:.0%}, width {width:.0f}")
    if args.plot:
        draw(args.plot, targets, mean, model.predict_interval(features), held)


if __name__ == "__main__":
    main()
