"""What a run of `train_mnist.py` prints and draws."""

from __future__ import annotations

import collections
import inspect
import math
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib
import numpy as np

import ensemble_metrics as em
import pjax_ensemble as pe
from mnist_data import Dataset

# ---------------------------------------------------------------------------------
# Lines and tables
# ---------------------------------------------------------------------------------


VERSIONS = {module.__name__: module.__version__ for module in (pe, jax, jaxlib, np)}
VERSIONS["python"] = sys.version.split()[0]


def describe(settings, recipe: dict, data: Dataset, layout, full: pe.Layout) -> str:
    """Return a line about a run: its data, models, devices, recipe and versions.

    `recipe` has the settings to name; `full` is the run's layout if it used all devices
    that it may use.
    """
    height, width, _ = settings.image_shape
    processes = jax.process_count()
    models = (
        "one model" if settings.mode == "sync" else f"an ensemble of {layout.members}"
    )
    line = (
        f"{data.name}, {settings.train_size} training and {len(data.test_images)} test "
        f"images of {height} x {width}, {len(data.classes)} classes: {models} on "
        f"{layout.devices} of {jax.device_count()} {jax.default_backend().upper()} "
        "devices"
    )
    if processes > 1:
        line += f" of {processes} processes"
    if layout.members_per_device > 1:
        line += f" ({layout.members_per_device} per device)"
    if layout.replicas > 1:
        line += f" ({layout.replicas} replicas per model)"
    if layout.replicas < full.replicas:
        line += (
            f" (a batch of {settings.batch_size} does not split over {full.replicas})"
        )
    shown = [
        f"{name} {value}"
        for name, value in (recipe | VERSIONS).items()
        if value is not None and value is not False
    ]
    return f"{line}; {', '.join(shown)}"


def announce(settings, recipe: dict, data: Dataset, layout, asked: int | None) -> None:
    """Print a line about the run, and notices about its devices and its steps.

    The notices name devices that stay idle, and steps that are too few.
    """
    wanted = asked or jax.device_count()
    full = pe.layout(layout.members, wanted, jax.process_count())
    print(describe(settings, recipe, data, layout, full), flush=True)
    if layout.devices == full.devices < wanted:
        print(
            f"notice: {layout.members} members use {layout.devices} of {wanted} "
            "devices: more would be no faster; --members "
            f"{wanted * layout.members_per_device} would use all"
        )
    steps = settings.epochs * settings.epoch_steps
    momentum = inspect.signature(pe.batch_norm).parameters["momentum"].default
    enough = math.ceil(math.log(0.05, momentum))  # 5% of the initial values remain
    if settings.network == "batchnorm" and 0 < steps < enough:
        print(
            f"notice: after {steps} steps, running statistics are "
            f"{momentum**steps:.0%} their initial values; take {enough} steps or more"
        )


def print_epoch(metrics: dict, took, left) -> None:
    """Print an epoch's line, as in Flax's guide: losses in nats, accuracies in percent.

    It adds two times: the epoch's seconds in this process, and an estimate of the
    seconds left.
    """
    line = (
        f"epoch: {metrics['epoch']:2d}, "
        f"train_loss: {metrics['train_loss']:.4f}, "
        f"train_accuracy: {100 * metrics['train_accuracy']:.2f}, "
        f"test_loss: {metrics['test_loss']:.4f}, "
        f"test_accuracy: {100 * metrics['test_accuracy']:.2f}, {took:.0f} s"
    )
    if left is not None:
        line += f", {left:.0f} s left"
    print(line, flush=True)


def print_report(report: dict) -> None:
    """Print the final tables: members and ensemble, or one model; then sizes."""
    print(f"\n{report['dataset']}, {report['test_examples']} test images")
    print(em.format_report(report))


# ---------------------------------------------------------------------------------
# Picture: report.png
# ---------------------------------------------------------------------------------


# These are Okabe and Ito's colors, which can be told apart without red and green.  The
# lines also differ in width and marker.
ENSEMBLE = {"color": "#d55e00", "linewidth": 2, "marker": "s", "markersize": 5}
MEMBER = {"color": "#56b4e9", "linewidth": 1, "marker": "o", "markersize": 3}
DASHED = {"color": "0.3", "linewidth": 1, "linestyle": "--"}


class Score(NamedTuple):
    """A score that is drawn over epochs and over sizes."""

    label: str
    factor: int
    key: str  # its name in a report's scores
    metric: str  # its name in a line of the metrics, after train_ and member_test_
    ensemble: str  # the ensemble's name in that line


SCORES = (
    Score("NLL, nats", 1, "negative_log_likelihood", "loss", "ensemble_test_loss"),
    Score("accuracy, %", 100, "accuracy", "accuracy", "test_accuracy"),
)


def draw_curve(axes, x, y, name: str | None, style: dict) -> None:
    """Draw `y` over `x`: one curve [n], or one per member [n, K], under one name."""
    axes.plot(x, y, **style)[0].set_label(name)


def draw_score(over_epochs, over_size, score: Score, metrics, report: dict) -> None:
    """Draw a score over epochs and over the ensemble's size."""
    epochs = [m["epoch"] for m in metrics]

    def draw_column(name, column, style):
        values = score.factor * np.float64([m[column] for m in metrics])
        draw_curve(over_epochs, epochs, values, name, style)

    training = DASHED | {"marker": "x"}
    draw_column("members", f"member_test_{score.metric}", MEMBER)
    draw_column("on training images", f"train_{score.metric}", training)
    draw_column("ensemble", score.ensemble, ENSEMBLE)
    members = [scores[score.key] for scores in report["member"] if scores]
    over_size.axhline(score.factor * np.mean(members), label="a member, mean", **DASHED)
    sizes = [score.factor * scores[score.key] for scores in report["by_size"]]
    draw_curve(over_size, range(1, len(sizes) + 1), sizes, None, ENSEMBLE)
    over_epochs.set_xlabel("epoch")
    over_size.set_xlabel("members in the ensemble")
    for axes in over_epochs, over_size:
        axes.set_ylabel(score.label)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def draw_reliability(diagram, histogram, probs: np.ndarray, labels) -> None:
    """Draw each bin's accuracy over its confidence, and the examples per bin."""
    members = probs.reshape(-1, probs.shape[-1])
    curves = [("members", members, MEMBER), ("ensemble", probs.mean(axis=0), ENSEMBLE)]
    for name, p, style in curves:
        bins = np.stack(em.reliability(p, np.resize(labels, len(p))))
        counts = bins[0]
        histogram.stairs(
            100 * counts / len(p),
            edges=np.linspace(0, 100, len(counts) + 1),
            color=style["color"],
            linewidth=2,
        )
        n, confidence, accuracy = bins[:, counts > 0]
        x = 100 * confidence
        if style is ENSEMBLE:  # plus and minus a standard error (Wilson 1927)
            middle = n * accuracy + 1 / 2
            error = np.sqrt(n * accuracy * (1 - accuracy) + 1 / 4)
            low = 100 * (middle - error) / (n + 1)
            high = 100 * (middle + error) / (n + 1)
            diagram.vlines(x, low, high, color=style["color"], linewidth=1)
        draw_curve(diagram, x, 100 * accuracy, name, style)
    draw_curve(diagram, [0, 100], [0, 100], "calibrated", DASHED)
    diagram.set(xlabel="confidence, %", ylabel="accuracy, %")
    histogram.set(xlabel="confidence, %", ylabel="test images, %", yscale="log")


def draw_images(figure, probs: np.ndarray, data: Dataset) -> None:
    """Draw the images with the highest predictive entropy, and the members' votes."""
    unsure = np.argsort(-em.predictive_entropy(probs))[:12]
    figure.suptitle(
        "test images of the highest predictive entropy; below, members' votes, "
        "as class: count"
    )
    for axes, i in zip(figure.subplots(2, 6).flat, unsure):
        axes.imshow(data.test_images[i, ..., 0], cmap="gray_r")
        votes = collections.Counter(data.classes[probs[:, i].argmax(axis=-1)].tolist())
        said = [f"{label}: {count}" for label, count in votes.most_common(4)]
        axes.set_title(f"label {data.classes[data.test_labels[i]]}", fontsize="medium")
        axes.set_xlabel("  ".join(said), fontsize="small")
        axes.set(xticks=[], yticks=[])


def draw_report(path: Path, metrics, report: dict, probs, data: Dataset) -> None:
    """Draw the lines of metrics and the report; `probs` [K, N, C] are the test images'.

    It needs matplotlib, which the [plot] extra installs.
    """
    from matplotlib.figure import Figure

    probs = probs[np.isfinite(probs).all(axis=(1, 2))]
    figure = Figure(figsize=(9, 9.5), layout="constrained")
    figure.suptitle(
        f"{data.name}, {len(data.test_images)} test images: an ensemble of {len(probs)}"
    )
    curves, images = figure.subfigures(2, 1, height_ratios=(5, 3))
    axes = curves.subplots(2, 3)
    for row, score in zip(axes, SCORES):
        draw_score(row[0], row[1], score, metrics, report)
    draw_reliability(axes[0, 2], axes[1, 2], probs, data.test_labels)
    titles = "over epochs", "over ensemble size", "reliability"
    for panel, name in zip(axes[0], titles):
        panel.set_title(name)
        panel.legend(frameon=False)
    draw_images(images, probs, data)
    with pe.replace_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
