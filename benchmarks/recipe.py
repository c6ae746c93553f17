"""Compare training recipes on held-out training images, never on the test set.

    MNIST_DIR=... python benchmarks/recipe.py batch_size=128 max_shift=0,epochs=3
    MNIST_DIR=... python benchmarks/recipe.py --members 8 bootstrap=True

Trains the default recipe and each given change to it on MNIST's first 50,000 training
images, and scores the last 10,000: a row a recipe, mean and half the range over the
seeds.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist

NUM_TRAIN = 50_000


def parse_recipe(text: str) -> train_mnist.Recipe:
    """Read "name=value,name=value" as changes to the default recipe."""
    changes = dict(part.split("=") for part in filter(None, text.split(",")))
    recipe = train_mnist.RECIPES[changes.get("network", "cnn")]
    kinds = {name: type(value) for name, value in recipe._asdict().items()}
    kinds["bootstrap"] = lambda value: value == "True"
    return recipe._replace(**{n: kinds[n](value) for n, value in changes.items()})


def score(recipe: train_mnist.Recipe, data, members: int, devices: int, seed: int):
    """Train once; return accuracy, negative log-likelihood and calibration error."""
    images, labels = data.train_images, data.train_labels
    num_steps = recipe.epochs * (NUM_TRAIN // recipe.batch_size)
    trainer = train_mnist.make_trainer(recipe, members, devices, num_steps)
    state = trainer.init(jax.random.key(seed))
    placed = trainer.place((images[:NUM_TRAIN], labels[:NUM_TRAIN]))
    for epoch in range(recipe.epochs):
        order = train_mnist.member_orders(
            NUM_TRAIN, recipe, seed=seed, epoch=epoch, members=members
        )
        state, _ = trainer.epoch(state, placed, order)
    probs = trainer.predict_members(state, images[NUM_TRAIN:])
    report = pe.ensemble_report(probs, labels[NUM_TRAIN:])
    accuracy, nll, _, calibration = report["ensemble"].values()
    member_accuracy = np.mean([m["accuracy"] for m in report["member"]])
    return 100 * accuracy, 100 * member_accuracy, nll, calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="recipes, as name=value,name=value")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    data = train_mnist.load_mnist(train_mnist.default_folder())
    pe.use_cpu_devices(args.devices)
    print(
        f"{args.members} members on {args.devices} devices, seeds {args.seeds}, "
        f"{data.name}"
    )
    print("| recipe | accuracy, % | a member's, % | NLL | ECE |")
    print("|---|---|---|---|---|")
    for change in ["", *args.changes]:
        recipe = parse_recipe(change)
        scores = np.array(
            [
                score(recipe, data, args.members, args.devices, seed)
                for seed in args.seeds
            ]
        )
        mean, spread = scores.mean(axis=0), scores.max(axis=0) - scores.min(axis=0)
        cells = [f"{mean[i]:.2f} ± {spread[i] / 2:.2f}" for i in (0, 1)]
        cells += [f"{mean[i]:.4f} ± {spread[i] / 2:.4f}" for i in (2, 3)]
        print(f"| {' | '.join([change or 'default', *cells])} |", flush=True)


if __name__ == "__main__":
    main()
