"""Choose a learning rate on held-out training images; score ensembles on test images.

    MNIST_DIR=... python benchmarks/recipe.py
    MNIST_DIR=... python benchmarks/recipe.py batch_size=128 max_shift=0,epochs=3
    MNIST_DIR=... python benchmarks/recipe.py quality --workdir runs/quality

Trains each learning rate on each batch order, 16 members at once, by the recipe of
train_mnist.py on MNIST's first 50,000 training images, and scores the last 10,000,
never the test images: a row a rate, mean and standard deviation over its members, and
their ensemble.  At every rate, order j and the weights that it starts from are those of
the script's member j.

  name=value,name ...     further recipes, by what they change, in the names of the
                          script's flags: a trainer and a table each
  --learning-rates R ...  default: the recipe's, divided by 4 and by 2, itself, doubled
  --orders N              default: 4
  --epochs N              default: the recipe's
  --devices D             default: all; on CPU, one a core
  --train-size N          train on the first N images (default: 50000)
  --one-by-one            train the same members one after another too, each on all
                          devices

Seconds are from the starting weights to the probabilities on the 10,000 images: they
include compiling, training and predicting.

quality: score ensembles of 1, 2, 4 ... members, which the script trains by its
defaults, on MNIST's test images, over several seeds.  Member i depends on the seed and
on i alone, so for each seed the report of one run, of the most members, has them all.
A row a size: mean and half the range over the seeds.

  --workdir DIR           of the runs: one that is there is not run again, and one that
                          was stopped goes on
  --sizes N ...           default: 1 2 4
  --seeds N ...           default: 0 1 2
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm

VALIDATION = 10_000  # training images, the last ones
FACTORS = 0.25, 0.5, 1, 2  # of the recipe's learning rate
FIELDS = [name for name in tm.Recipe._fields if name != "learning_rate"]
COLUMNS = (
    "learning rate",
    "a member's accuracy, %",
    "its NLL",
    "accuracy, %",
    "NLL",
    "ECE",
)


class Parser(tm.Parser):
    def format_help(self):
        return __doc__


def prepare(change: str, args) -> tuple[tm.Recipe, tm.Dataset]:
    """Read "name=value,name" as flags of the script.  Raises Failure."""
    members = args.orders * len(args.learning_rates or FACTORS)
    given = {"members": 1 if args.one_by_one else members, "data": "mnist"}
    given |= {name: getattr(args, name) for name in ("epochs", "devices", "train_size")}
    flags = [f"{tm.flag(name)}={value}" for name, value in given.items() if value]
    for name, *value in (part.partition("=") for part in change.split(",") if part):
        if name not in FIELDS:
            expected = f"one of {', '.join(FIELDS)} (rates: --learning-rates)"
            raise tm.Failure(f"{change}: expected {expected}, not {name!r}")
        flags.append(tm.flag(name) + "".join(value))
    try:
        return tm.prepare(tm.parse_arguments(flags))[:2]
    except tm.Failure as failure:
        raise tm.Failure(f"{change}: {failure}" if change else str(failure)) from None


def sweep(recipe, rates, num_orders, data, images, devices=None, at_once=True):
    """Train each rate on each order, all at once or one after another.

    Returns probabilities on `images` [K, N, C], all orders of the first rate first, and
    the seconds.
    """
    rate, number = np.repeat(rates, num_orders), np.tile(range(num_orders), len(rates))
    size, members = len(data.train_images), len(rate)

    def make_trainer(rate):
        num_steps = size // recipe.batch_size * recipe.epochs
        where = len(rate), devices, num_steps, data.form()
        return tm.make_trainer(recipe, *where, hyper={"learning_rate": rate})

    whole = make_trainer(rate)
    start = whole.gather(whole.init(jax.random.key(0)))
    start = start._replace(params=jax.tree.map(lambda x: x[number], start.params))
    found, started = [], time.perf_counter()
    for own in np.split(np.arange(members), 1 if at_once else members):
        trainer = make_trainer(rate[own])
        state = trainer.scatter(jax.tree.map(lambda x, own=own: x[own], start))
        placed = trainer.place((data.train_images, data.train_labels))
        for epoch in range(recipe.epochs):
            which = {"epoch": epoch, "bootstrap": recipe.bootstrap}
            sizes = size, recipe.batch_size
            orders = pe.epoch_order(*sizes, members=num_orders, **which)
            state, _ = trainer.epoch(state, placed, orders[number[own]])
        found.append(trainer.predict_members(state, images))
    return np.concatenate(found), time.perf_counter() - started


def member_losses(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood of each member [K], nan of one not finite."""
    reports = (tm.report_finite(own[None], labels) for own in probs)
    return np.array([tm.mean_loss(report) if report else np.nan for report in reports])


def spread(values, digits: int) -> str:
    more = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{more}"


def cells(probs: np.ndarray, losses: np.ndarray, labels: np.ndarray) -> list[str]:
    """Return a rate's cells of the table: its members' scores, and their ensemble's."""
    if failed := np.isnan(losses).sum():
        return [f"{failed} of {len(losses)} members are not finite", *[""] * 4]
    report = em.ensemble_report(probs, labels)
    accuracy, nll, _, calibration = report["ensemble"].values()
    whole = f"{100 * accuracy:.2f}", f"{nll:.4f}", f"{calibration:.4f}"
    accuracies = [100 * member["accuracy"] for member in report["member"]]
    return [spread(accuracies, 2), spread(losses, 4), *whole]


def run(args) -> None:
    """Print a table a recipe, its best rate, and the seconds.

    Raises Failure.
    """
    pe.use_cpu_devices(args.devices)
    prepared = {change: prepare(change, args) for change in ["", *args.changes]}
    whole = tm.load_mnist(tm.default_folder())
    images, labels = (x[-VALIDATION:] for x in whole[1:3])
    if args.train_size > (most := len(whole.train_images) - VALIDATION):
        has = f"{whole.name} has {most} training images, besides {VALIDATION} to score"
        raise tm.Failure(f"--train-size {args.train_size}: {has}")
    devices = args.devices or jax.local_device_count()
    print(f"{whole.name}, {args.train_size} training images, {devices} devices")
    for change, (recipe, data) in prepared.items():
        rates = args.learning_rates or [f * recipe.learning_rate for f in FACTORS]
        what = recipe, rates, args.orders, data, images, devices
        print(f"\n{change or 'default recipe'}\n")
        speed.print_head(*COLUMNS)
        probs, seconds = sweep(*what)
        losses = member_losses(probs, labels)
        parts = [np.split(x, len(rates)) for x in (probs, losses)]
        for rate, *own in zip(rates, *parts):
            speed.print_row(f"{rate:g}", *cells(*own, labels))
        means = {rate: own.mean() for rate, own in zip(rates, parts[1])}
        finite = [rate for rate in rates if np.isfinite(means[rate])]
        best = min(finite, key=means.get, default=math.nan)
        print(f"\nbest by a member's NLL: {best:g}")
        print(f"{len(probs)} members at once: {seconds:.1f} s", flush=True)
        if args.one_by_one:
            alone, seconds = sweep(*what, at_once=False)
            apart = np.nanmax(np.abs(member_losses(alone, labels) - losses))
            print(f"one after another: {seconds:.1f} s, NLL within {apart:.1g}")


SCORES = {  # of a report: the column, the factor, the digits
    "accuracy": ("accuracy, %", 100, 2),
    "negative_log_likelihood": ("NLL", 1, 4),
    "brier_score": ("Brier", 1, 4),
    "expected_calibration_error": ("ECE", 1, 4),
}


def by_size(folder: Path, members: int, seed: int) -> list[dict]:
    """Return the scores of the first 1, 2 ... members; train them unless done.

    Raises Failure.
    """
    if not (folder / "report.json").exists():
        started = folder.exists() and tm.checkpoints(folder)
        flags = ["--members", members, "--seed", seed, "--workdir", folder]
        flags += ["--resume"] if started else []
        command = [sys.executable, tm.__file__, "--data", "mnist", *flags]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)  # the script has said why
    report = json.loads((folder / "report.json").read_text())
    if (report["members"], report["config"]["seed"]) != (members, seed):
        raise tm.Failure(f"{folder} is of another run; remove it")
    return report["by_size"]


def quality(args) -> None:
    """Print a table of ensembles' scores, a row a size.  Raises Failure."""
    most = max(args.sizes)
    folders = {s: args.workdir / f"members-{most}-seed-{s}" for s in args.seeds}
    runs = [by_size(folder, most, seed) for seed, folder in folders.items()]
    print(f"seeds {args.seeds}")
    speed.print_head("members", *(column for column, _, _ in SCORES.values()))
    for size in args.sizes:
        row = []
        for key, (_, factor, digits) in SCORES.items():
            values = [factor * run[size - 1][key] for run in runs]
            half = (max(values) - min(values)) / 2
            row.append(f"{np.mean(values):.{digits}f} ± {half:.{digits}f}")
        speed.print_row(size, *row)


def parse_arguments(argv: Sequence[str]):
    parser, many = Parser("recipe.py"), tm.at_least(1)
    if argv[:1] == ["quality"]:
        parser.set_defaults(call=quality)
        parser.add_argument("--workdir", type=Path, required=True)
        parser.add_argument("--sizes", type=many, nargs="+", default=[1, 2, 4])
        parser.add_argument(
            "--seeds", type=tm.at_least(0), nargs="+", default=[0, 1, 2]
        )
        return parser.parse_args(argv[1:])
    parser.set_defaults(call=run)
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--learning-rates", type=tm.positive, nargs="+")
    defaults = {"orders": 4, "epochs": None, "devices": None, "train_size": 50_000}
    for name, default in defaults.items():
        parser.add_argument(tm.flag(name), type=many, default=default)
    parser.add_argument("--one-by-one", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, after one line of what is wrong."""
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        args.call(args)
        return 0
    except (tm.Failure, OSError) as error:
        print(f"recipe.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
