"""Compare training recipes on held-out training images, never on the test set.

    MNIST_DIR=... python benchmarks/recipe.py batch_size=128 max_shift=0,epochs=3

Trains the default recipe and each given change to it on MNIST's first 50,000 training
images, and scores the last 10,000: a row a recipe, mean and half the range over the
seeds.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist

NUM_TRAIN = 50_000


def parse_recipe(text: str) -> train_mnist.Recipe:
    """Read "name=value,name=value" as changes to the default recipe."""
    recipe = train_mnist.Recipe()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        recipe = recipe._replace(**{name: type(getattr(recipe, name))(value)})
    return recipe


def score(mode: str, recipe: train_mnist.Recipe, data, devices: int, seed: int):
    """Train once; return accuracy, negative log-likelihood and calibration error."""
    epochs = train_mnist.train(
        mode,
        recipe,
        data.train_images[:NUM_TRAIN],
        data.train_labels[:NUM_TRAIN],
        num_devices=devices,
        seed=seed,
    )
    predict = train_mnist.make_predict(mode, devices)
    for params, _ in epochs:  # the last one's probabilities
        last = params
    probs = predict(last, data.train_images[NUM_TRAIN:])
    report = pe.ensemble_report(probs, data.train_labels[NUM_TRAIN:])
    members = [m["accuracy"] for m in report["member"]]
    accuracy, nll, _, calibration = report["ensemble"].values()
    return 100 * accuracy, 100 * np.mean(members), nll, calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="recipes, as name=value,name=value")
    parser.add_argument("--mode", choices=("ensemble", "sync"), default="ensemble")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    data = train_mnist.load_mnist(train_mnist.default_folder())
    pe.use_cpu_devices(args.devices)
    print(f"{args.mode}, {args.devices} devices, seeds {args.seeds}, {data.name}")
    print("| recipe | accuracy, % | a member's, % | NLL | ECE |")
    print("|---|---|---|---|---|")
    for change in ["", *args.changes]:
        recipe = parse_recipe(change)
        scores = np.array(
            [score(args.mode, recipe, data, args.devices, s) for s in args.seeds]
        )
        mean, spread = scores.mean(axis=0), scores.max(axis=0) - scores.min(axis=0)
        cells = [f"{mean[i]:.2f} ± {spread[i] / 2:.2f}" for i in (0, 1)]
        cells += [f"{mean[i]:.4f} ± {spread[i] / 2:.4f}" for i in (2, 3)]
        print(f"| {' | '.join([change or 'default', *cells])} |", flush=True)


if __name__ == "__main__":
    main()
