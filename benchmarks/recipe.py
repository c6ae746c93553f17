"""Choose a learning rate on held-out training images, in one trainer.

    MNIST_DIR=... python benchmarks/recipe.py --epochs 3 --one-by-one

One trainer has 16 members: four learning rates on each of four batch orders, by the
recipe of train_mnist.py.  They train on MNIST's first 50,000 training images and are
scored on the last 10,000, never on the test images.  One row per rate has mean and
standard deviation over its members, and their ensemble.  At every rate, the member of
order j has the order and the starting weights of the script's member j.

The seconds include compiling, training and predicting: they count from the starting
weights to the probabilities on the 10,000 images.
"""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
import speed

import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm

VALIDATION = 10_000  # the last training images
FACTORS = 0.25, 0.5, 1, 2  # of the recipe's learning rate
ORDERS = 4
COLUMNS = "a member's accuracy, %", "its NLL", "accuracy, %", "NLL", "ECE"


def sweep(recipe, rates, num_orders, data, images, at_once=True, devices=None):
    """Train each rate on each order, all at once or one after another.

    Returns the probabilities on `images`, [K, N, C], with all orders of the first rate
    first, and the seconds.
    """
    rate, number = np.repeat(rates, num_orders), np.tile(range(num_orders), len(rates))
    members, size, batch = len(rate), len(data.train_images), recipe.batch_size

    def make_trainer(rate):
        num_steps = size // batch * recipe.epochs
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
            order = pe.epoch_order(size, batch, members=num_orders, epoch=epoch)
            state, _ = trainer.epoch(state, placed, order[number[own]])
        found.append(trainer.predict_members(state, images))
    return np.concatenate(found), time.perf_counter() - started


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean and the standard deviation."""
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def cells(probs: np.ndarray, labels: np.ndarray) -> list[str]:
    """Return a rate's cells: scores of its members and of their ensemble."""
    report = em.ensemble_report(probs, labels)
    accuracies, losses, *_ = zip(*(scores.values() for scores in report["member"]))
    accuracy, nll, _, calibration = report["ensemble"].values()
    members = spread([100 * a for a in accuracies], 2), spread(losses, 4)
    return [*members, f"{100 * accuracy:.2f}", f"{nll:.4f}", f"{calibration:.4f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=tm.at_least(1), help="default: the recipe's")
    where = "also train each member by itself, on all devices"
    parser.add_argument("--one-by-one", action="store_true", help=where)
    args, recipe = parser.parse_args(argv), tm.RECIPES["cnn"]
    recipe = recipe._replace(epochs=args.epochs or recipe.epochs)
    pe.use_cpu_devices()
    data = tm.load_mnist(tm.default_folder())
    (rest, images), (labels, held) = (
        np.split(x, [-VALIDATION]) for x in (data.train_images, data.train_labels)
    )
    data = data._replace(train_images=rest, train_labels=labels)
    print(f"{data.name}, {len(rest)} training images, {jax.device_count()} devices\n")
    rates = [factor * recipe.learning_rate for factor in FACTORS]
    probs, seconds = sweep(recipe, rates, ORDERS, data, images)
    speed.print_head("learning rate", *COLUMNS)
    for rate, own in zip(rates, np.split(probs, len(rates))):
        speed.print_row(f"{rate:g}", *cells(own, held))
    print(f"\n{len(probs)} members at once: {seconds:.1f} s", flush=True)
    if args.one_by_one:
        alone, seconds = sweep(recipe, rates, ORDERS, data, images, at_once=False)
        apart = np.abs(alone - probs).max()
        print(f"one after another: {seconds:.1f} s, probabilities within {apart:.1g}")


if __name__ == "__main__":
    with speed.one_line(tm.Failure, OSError, ValueError):
        main()
