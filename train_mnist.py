"""Train convolutional networks on MNIST: an ensemble of any size, or one model.

    python train_mnist.py --mode ensemble     members apart, probabilities averaged
    python train_mnist.py --members 8         so many members, on whatever devices
    python train_mnist.py --mode sync         one model, gradients averaged

models and devices:
  --mode {ensemble,sync}  ensemble: independent members, probabilities averaged; sync:
                          one model, each batch divided over the devices, gradients
                          averaged (default: ensemble)
  --members K             members of the ensemble; they share devices, or devices share
                          one, as it takes (default: one a device, and at least two on a
                          CPU, five on an accelerator)
  --devices D             devices to use, of each process; on CPU, that many virtual
                          devices (default: all, but for replicas that would not divide
                          the batch; on CPU, one a core)
  --at-once N             compute together N of the members that share a device: for a
                          GPU; slower on a CPU (default: 1)
  --show-batch            draw how the batch of a step lies on the devices, with rich
                          (default: off)

training:
  --network {cnn,batchnorm}
                          cnn: of Flax's ensembling guide; batchnorm: of Keras's guide
                          to distributed training with JAX, with batch normalization
                          and dropout (default: cnn)
  --optimizer {sgd,adam}  stochastic gradient descent with momentum, or Adam
                          (default: sgd; batchnorm: adam)
  --epochs N              passes over the training images; 0 reports the initial models
                          (default: 5; batchnorm: 2)
  --batch-size B          examples a step of one model, all its replicas together
                          (default: 64)
  --learning-rate RATE    of the optimizer; the schedule's peak
                          (default: sgd: 0.15; adam: 0.001)
  --momentum SHARE        share of the velocity that a step of sgd keeps (default: 0.9)
  --schedule {constant,linear,cosine}
                          learning rate over the run: constant, or rising over its first
                          15% and falling to 0, in straight lines or half cosines
                          (default: linear; batchnorm: constant)
  --max-shift PIXELS      move each training image at random by up to so many pixels
                          (default: 2 for a side of 28, of other sizes the same share;
                          batchnorm: 0)
  --bootstrap             train each member on as many images as there are, drawn with
                          replacement from them for it alone (default: each on all, in
                          an order of its own)
  --skip-nonfinite        leave out a step whose loss or gradient is not finite, on all
                          replicas together (default: one model stops with the last
                          checkpoint, members go on)
  --seed S                member i depends on seed and i alone (default: 0)

data:
  --data {auto,mnist,generated}
                          mnist: from --data-dir, downloaded there if missing;
                          generated: digits that this script draws; auto: mnist, or
                          generated if it cannot be had (default: auto)
  --data-dir DIR          MNIST's four files, gzipped or plain, or others of any size
                          and labels under their names (default: $MNIST_DIR, else
                          pjax_ensemble in the user's cache folder)
  --train-size N          train on the first N images (default: all)

output:
  --workdir DIR           write metrics.jsonl, report.json and checkpoints there
                          (default: write nothing)
  --plot                  draw report.png in --workdir, with matplotlib (default: off)
  --save-every EPOCHS     epochs between checkpoints, or a part of one (default: 1.0)
  --keep N                checkpoints to keep, the newest (default: 3)
  --resume                go on from the newest valid checkpoint in --workdir, on any
                          devices; what trains, and on what data, is as it was, and
                          need not be given (default: a new run)

several processes, each started with the same flags but for its id; the first writes:
  --coordinator HOST:PORT
                          a free port on the machine of process 0, where the processes
                          meet (default: one process, alone)
  --num-processes P       how many there are (default: 1)
  --process-id I          which one this is, from 0 (default: 0)
  --distributed           in place of these three: let JAX find the processes, under
                          Slurm or on TPUs (default: off)
  --connect-timeout SECONDS
                          how long to wait for the other processes (default: 60)
"""

# The order of this file: recipe and networks; the trainer; the run, which is the loop;
# then what the run needs: report, picture, data, its folder, signals and processes, and
# the command line.

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import hashlib
import http.client
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # Ctrl-C before anything is at stake: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import ensemble_metrics as em
import pjax_ensemble as pe

try:
    import fcntl
except ImportError:  # Windows, where a run's folder is not locked
    fcntl = None


# ---------------------------------------------------------------------------------
# Recipe and networks
# ---------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """What to train, and how."""

    network: str
    optimizer: str
    epochs: int
    batch_size: int  # examples a step of one model, over all its replicas
    learning_rate: float  # the schedule's peak
    momentum: float  # of sgd
    schedule: str
    max_shift: int  # pixels by which training images move; in `RECIPES`, of 28
    bootstrap: bool = False  # each member trains on a resample of its own
    skip_nonfinite: bool = False  # a step whose gradient is not finite changes nothing
    at_once: int = 1  # members of a device that are computed together


# Of the cnn, chosen on held-out training images, as benchmarks/recipe.py measures; of
# the other network, those of the guide that it comes from.
RECIPES = {
    "cnn": Recipe("cnn", "sgd", 5, 64, 0.15, 0.9, "linear", 2),
    "batchnorm": Recipe("batchnorm", "adam", 2, 64, 1e-3, 0.9, "constant", 0),
}
LEARNING_RATES = {recipe.optimizer: recipe.learning_rate for recipe in RECIPES.values()}

SCHEDULES = {
    "constant": lambda peak, num_steps: peak,
    "linear": pe.linear_schedule,
    "cosine": pe.cosine_schedule,
}


class BatchNormCNN(NamedTuple):
    conv1: pe.Conv  # [3, 3, I, 12], without bias
    norm1: pe.BatchNorm  # [12], without scale, as the others
    conv2: pe.Conv  # [6, 6, 12, 24], without bias
    norm2: pe.BatchNorm  # [24]
    conv3: pe.Conv  # [6, 6, 24, 32]
    norm3: pe.BatchNorm  # [32]
    dense1: pe.Dense  # [32, 256]
    dense2: pe.Dense  # [256, C]


def batch_norm_cnn_init(
    key: jax.Array, *, image_shape: Sequence[int] = (28, 28, 1), num_classes: int = 10
) -> tuple[BatchNormCNN, tuple]:
    """Draw the network of Keras's distributed-JAX guide, as `pe.cnn_init` does.

    With the defaults it has 49,242 parameters; H and W are 6 or more, and do not change
    it.  Returns (params, stats), stats a `BatchStats` a normalization.
    """
    *_, channels = image_shape
    keys = jax.random.split(key, 5)
    norms, stats = zip(*(pe.batch_norm_init(c, scale=False) for c in (12, 24, 32)))
    conv1 = pe.conv_init(keys[0], channels, 12, 3, bias=False)
    conv2 = pe.conv_init(keys[1], 12, 24, 6, bias=False)
    conv3 = pe.conv_init(keys[2], 24, 32, 6)
    dense = pe.dense_init(keys[3], 32, 256), pe.dense_init(keys[4], 256, num_classes)
    params = BatchNormCNN(conv1, norms[0], conv2, norms[1], conv3, norms[2], *dense)
    return params, stats


def batch_norm_cnn(
    params: BatchNormCNN, stats: tuple, images: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, tuple]:
    """Map images [B, H, W, I], pixels in [0, 1], to logits [B, C] and new stats.

    With a key, as in training: the batch's statistics, and dropout.  Without, as in
    evaluation: the running statistics, and none.
    """
    new_stats: list[pe.BatchStats] = []

    def norm_relu(norm, x):
        x, new = pe.batch_norm(norm, stats[len(new_stats)], x, training=key is not None)
        new_stats.append(new)
        return jax.nn.relu(x)

    x = norm_relu(params.norm1, pe.conv(params.conv1, images))
    x = norm_relu(params.norm2, pe.conv(params.conv2, x, stride=2, padding="VALID"))
    x = norm_relu(params.norm3, pe.conv(params.conv3, x, stride=2))
    x = jax.nn.relu(pe.dense(params.dense1, x.mean(axis=(1, 2))))
    return pe.dense(params.dense2, pe.dropout(key, x, 0.5)), tuple(new_stats)


class Network(NamedTuple):
    init: Callable  # (key, *, image_shape, num_classes) -> (params, model_state)
    logits: Callable  # (params, model_state, images, key=None) -> (logits, model_state)


NETWORKS = {
    "cnn": Network(
        lambda key, **form: (pe.cnn_init(key, **form), ()),
        lambda params, _, images, key=None: (pe.cnn(params, images), ()),
    ),
    "batchnorm": Network(batch_norm_cnn_init, batch_norm_cnn),
}


# ---------------------------------------------------------------------------------
# Training: the trainer, and what it trains on
# ---------------------------------------------------------------------------------


def shift_images(key: jax.Array, images: jax.Array, max_shift: int) -> jax.Array:
    """Move each image [B, H, W, C] by its own random offset, zeros moving in."""
    if max_shift == 0:
        return images
    pad = [(0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)]
    starts = jax.random.randint(key, (len(images), 2), 0, 2 * max_shift + 1)
    size = images.shape[1:]
    crop = jax.vmap(lambda x, s: jax.lax.dynamic_slice(x, (s[0], s[1], 0), size))
    return crop(jnp.pad(images, pad), starts)


def scale(images: jax.Array) -> jax.Array:
    return images.astype(jnp.float32) / 255


def init_of(recipe: Recipe, form: dict) -> Callable:
    """Return the network's init, of a key alone, for the form of a data set."""
    sizes = {"image_shape": form["image_shape"], "num_classes": len(form["classes"])}
    return lambda key, *_: NETWORKS[recipe.network].init(key, **sizes)


def make_trainer(
    recipe: Recipe,
    members: int,
    devices: int | None,
    num_steps: int,
    form: dict,
    hyper: dict | None = None,
) -> pe.Trainer:
    """Make a trainer for data (uint8 images, int32 labels) and a run of num_steps.

    `hyper` has numbers of the optimizer in which members differ, by their names in the
    recipe, each [K].
    """
    network = NETWORKS[recipe.network]

    def loss_fn(params, model_state, key, images, labels, *_):
        shift_key, key = jax.random.split(key)
        images = scale(shift_images(shift_key, images, recipe.max_shift))
        logits, model_state = network.logits(params, model_state, images, key)
        return pe.softmax_cross_entropy(logits, labels).mean(), model_state

    def apply_fn(params, model_state, images, *_):
        return network.logits(params, model_state, scale(images))[0]

    def optimizer(own):
        its = recipe._replace(**own)
        rate = SCHEDULES[its.schedule](its.learning_rate, num_steps)
        return pe.adam(rate) if its.optimizer == "adam" else pe.sgd(rate, its.momentum)

    functions = init_of(recipe, form), loss_fn, optimizer if hyper else optimizer({})
    where = {"members": members, "devices": devices, "at_once": recipe.at_once}
    fixed = {"stateful": True, "microbatch": "auto"}
    own = {"hyper": hyper, "skip_nonfinite": recipe.skip_nonfinite}
    return pe.make_trainer(*functions, apply_fn=apply_fn, **where, **fixed, **own)


# ---------------------------------------------------------------------------------
# The run: the loop, and what it saves and records
# ---------------------------------------------------------------------------------


# What a CPU device trains on or predicts in a call, about a second's work of a core:
# signals wait for it.  Accelerators are many times as fast.
SEGMENT_IMAGES = 4096


class Run:
    """A run: its members, how far they are, and what is known of them.

    Only the first of several processes has the folder.
    """

    def __init__(self, args, recipe, data, layout, folder: Path | None = None):
        """Begin a run, or go on with that of the folder.  Raises Failure."""
        self.args, self.recipe, self.data, self.folder = args, recipe, data, folder
        self.settings = describe(args, data)
        check_same_run(self.settings)
        self.num_steps = len(data.train_images) // recipe.batch_size  # an epoch
        self.save_steps = max(1, round(args.save_every * self.num_steps))
        cpu = jax.default_backend() == "cpu"
        self.segment_images = SEGMENT_IMAGES if cpu else 64 * SEGMENT_IMAGES
        a_step = layout.members_per_device * recipe.batch_size // layout.replicas
        self.segment_steps = min(max(1, self.segment_images // a_step), 256)
        total = recipe.epochs * self.num_steps
        self.trainer = make_trainer(recipe, *layout[:2], total, data.form())
        self.images = self.trainer.place((data.train_images, data.train_labels))
        self.signals = Signals()
        self.state = self.trainer.init(jax.random.key(args.seed))
        self.done, self.saved = 0, -1  # steps so far, and at the last save
        self.metrics: list[dict] = []  # a line an epoch
        self.failed: set[int] = set()  # members that are not finite
        if args.resume:
            self.restore()
        if folder:
            where = {"dataset": data.name, "data_dir": str(args.data_dir)}
            more = {"data": args.data, "save_every": args.save_every, **where}
            write_json(folder / "config.json", {**self.settings, **more}, indent=2)
            write_json(folder / "metrics.jsonl", *self.metrics)

    def train(self) -> tuple[dict, np.ndarray]:
        """Train to the last epoch; save, evaluate and record.

        Returns what `evaluate` does, of the last epoch.  Raises Failure.
        """
        epochs, members = self.recipe.epochs, self.trainer.layout.members
        self.save()
        # A resumed epoch may have all its steps, and only its evaluation left.
        resumed = max(0, self.done - 1) // self.num_steps
        for epoch in range(resumed, max(1, epochs)):
            self.losses = np.empty((members, 0))  # of this epoch's steps here, [K, n]
            self.seconds = 0.0  # that they took
            if self.done < min(epoch + 1, epochs) * self.num_steps:
                self.train_epoch(epoch)
            self.save(whenever=epoch + 1 >= epochs)
            found = self.evaluate()
        return found

    def train_epoch(self, epoch: int) -> None:
        """Take the steps of an epoch that are left, in segments, and save."""
        size, step = len(self.data.train_images), self.done - epoch * self.num_steps
        which = {n: self.settings[n] for n in ("members", "seed", "bootstrap")}
        order = pe.epoch_order(size, self.recipe.batch_size, epoch=epoch, **which)
        what, left = f"epoch {epoch + 1} of {self.recipe.epochs}", order[:, step:]
        with progress_bar(what, order.size, order.size - left.size) as advance:
            while left.size:
                until_saved = self.save_steps - self.done % self.save_steps
                count = min(self.segment_steps, until_saved)
                segment, left = np.split(left, [count], axis=1)
                self.advance(segment)
                self.save()
                advance(segment.size)

    def advance(self, order: np.ndarray) -> None:
        """Take the steps [K, n, B] of a segment, and look for signals."""
        started = time.perf_counter()
        self.state, losses = self.trainer.epoch(self.state, self.images, order)
        self.losses = np.concatenate([self.losses, losses], axis=1)
        self.seconds += time.perf_counter() - started
        self.done += order.shape[1]
        if not (np.isfinite(losses[:, -1]).any() or self.recipe.skip_nonfinite):
            raise self.diverged()
        self.signals.listen()  # until now, while JAX compiled, nothing was to be lost
        self.look()

    def look(self) -> None:
        """If a process has received a signal, save, and raise Failure."""
        if not (number := self.signals.agree()):
            return
        self.save(whenever=True)
        self.signals.agree()  # nobody leaves before the first process has saved
        text = f"what is done is in {self.args.workdir}; --resume goes on with it"
        text = text if self.args.workdir else "nothing is saved without --workdir"
        raise Failure(f"{signal.Signals(number).name}: {text}", status=128 + number)

    def save(self, whenever: bool = False) -> None:
        """Save, if it is due or `whenever`.  Raises Failure for a state of no use."""
        due = whenever or self.done % self.save_steps == 0
        if not (self.args.workdir and due) or self.done == self.saved:
            return
        state = self.trainer.gather(self.state)
        if not any_finite(state):
            raise self.diverged()
        if self.folder:
            save_checkpoint(self.folder, state, self.done, self.args.keep)
        self.saved = self.done

    def restore(self) -> None:
        """Go on from the newest valid checkpoint of the first process."""
        done, state = 0, self.trainer.gather(self.state)
        if self.folder:
            config = json.loads((self.folder / "config.json").read_text())
            check_same(f"--resume from {self.folder}", self.settings, config)
            done, state = load_checkpoint(self.folder, state, self.recipe)
            self.metrics = read_metrics(self.folder, done // self.num_steps)
        key = np.asarray(jax.random.key_data(state.key))
        done, key, state = share((np.int32(done), key, state._replace(key=None)))
        self.done = self.saved = int(done)
        state = state._replace(key=jax.random.wrap_key_data(key))
        self.state = self.trainer.scatter(state)

    def diverged(self) -> Failure:
        text = f"no model is finite after step {self.done}; lower --learning-rate"
        good = f" (the checkpoint of step {self.saved} is good)" * (self.saved >= 0)
        return Failure(text + good, status=3)

    def evaluate(self) -> tuple[dict, np.ndarray]:
        """Evaluate on the test images, and on half as many training images, alike.

        Returns the report on the test images, and the members' probabilities [K, N, C].
        """
        data, started = self.data, time.perf_counter()
        probs = self.predict(data.test_images)
        seconds = time.perf_counter() - started
        test = report_finite(probs, data.test_labels)
        half = slice((len(data.test_images) + 1) // 2)
        train_probs = self.predict(data.train_images[half])
        train = report_finite(train_probs, data.train_labels[half])
        if test is None or train is None:
            raise self.diverged()
        epoch = self.done // self.num_steps
        self.name_failed(test["member"], epoch)
        if epoch > len(self.metrics):  # it was not before this process began
            self.record(epoch, train, test, seconds)
        return test, probs

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Predict [K, N, C] part by part; look for signals between."""
        members, _, a_device, replicas = self.trainer.layout
        chunk = self.trainer.chunk
        turn = chunk * replicas
        rows = max(1, self.segment_images // chunk // a_device) * turn
        # Each with a turn of rows or more: fewer would round as a smaller chunk does.
        cuts, parts = range(rows, len(images) - turn + 1, rows), []
        with progress_bar("predicting", members * len(images)) as advance:
            for part in np.split(images, cuts):
                parts.append(self.trainer.predict_members(self.state, part))
                self.look()
                advance(members * len(part))
        return np.concatenate(parts, axis=1)

    def name_failed(self, members: list, epoch: int) -> None:
        """Name each member that has failed, once, by its scores, and what was skipped.

        The losses are of the epoch's last steps: all, unless it was resumed within.
        """
        for i, n in enumerate(np.sum(~np.isfinite(self.losses), axis=1)):
            if members[i] is None and i not in self.failed:
                self.failed.add(i)
                loss = f", nor was its loss in {n} steps of it" if n else ""
                print(f"notice: member {i} is not finite after epoch {epoch}{loss}")
            elif self.recipe.skip_nonfinite and n:
                steps = f"{n} steps of epoch {epoch}"
                print(f"notice: member {i} skipped {steps}: not finite")

    def record(self, epoch: int, train: dict, test: dict, test_seconds: float) -> None:
        """Print the guide's line, in nats and percent, and write the metrics."""
        nll = "negative_log_likelihood"
        num_images = self.losses.size * self.recipe.batch_size
        metrics: dict = {"epoch": epoch}
        said = f"epoch: {epoch:2d}"
        for part, report in (("train", train), ("test", test)):
            loss, accuracy = mean_loss(report), report["ensemble"]["accuracy"]
            metrics |= {f"{part}_loss": loss, f"{part}_accuracy": accuracy}
            said += f", {part}_loss: {loss:.4f}, {part}_accuracy: {100 * accuracy:.2f}"
        metrics |= {
            "ensemble_test_loss": test["ensemble"][nll],
            "member_test_loss": [m and m[nll] for m in test["member"]],
            "member_test_accuracy": [m and m["accuracy"] for m in test["member"]],
            "train_seconds": self.seconds,
            "test_seconds": test_seconds,
            "member_images_per_second": num_images / (self.seconds or math.inf) or None,
        }
        print(said, flush=True)
        self.metrics.append(metrics)
        if self.folder:
            write_json(self.folder / "metrics.jsonl", *self.metrics)


@contextlib.contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable]:
    """Draw how far a loop is, on a terminal where tqdm is; yield what advances it.

    Counts are images, once for each member that trains on them or predicts them.
    """
    terminal = all(f is not None and f.isatty() for f in (sys.stdout, sys.stderr))
    if not (terminal and importlib.util.find_spec("tqdm")):
        yield lambda count: None
        return
    from tqdm import tqdm

    form = {"unit": " images", "unit_scale": True, "dynamic_ncols": True}
    with tqdm(desc=what, total=total, initial=done, leave=False, **form) as bar:
        yield bar.update


def any_finite(state: pe.TrainState) -> bool:
    """Whether a member of the state [K, ...] has no number that is not finite."""
    leaves = jax.tree.leaves(state._replace(key=None))
    finite = [np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in leaves]
    return bool(np.all(finite, axis=0).any())


def describe(args, data: Dataset) -> dict:
    """Return what determines the numbers of a run, whatever devices it has."""
    content, (_, *arrays, _) = hashlib.sha256(), data
    for array in arrays:
        content.update(np.ascontiguousarray(array))
    settings = {name: getattr(args, name) for name in NUMBERS}
    return {**settings, "dataset_sha256": content.hexdigest(), **data.form()}


class Failure(Exception):
    """A run that ends here: a message for one line, and an exit status."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


# ---------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------


def report_finite(member_probs: np.ndarray, labels: np.ndarray) -> dict | None:
    """Make `em.ensemble_report` of the members whose probabilities are finite.

    The others stand in `member` as None.  None when no member is finite.
    """
    finite = np.isfinite(member_probs).all(axis=(1, 2))
    if not finite.any():
        return None
    report = em.ensemble_report(member_probs[finite], labels)
    scores = iter(report["member"])
    return report | {"member": [next(scores) if ok else None for ok in finite]}


def mean_loss(report: dict) -> float:
    """Average the negative log-likelihood over the members, in nats."""
    return float(np.mean([m["negative_log_likelihood"] for m in report["member"] if m]))


def print_table(title: str, rows: Sequence[tuple[str, dict | None]]) -> None:
    print(f"\n{title}\n{'':10}{'accuracy':>10}{'NLL':>10}{'Brier':>10}{'ECE':>10}")
    for name, scores in rows:
        row = f"{'failed: not finite':>22}"
        if scores:
            accuracy, *others = scores.values()
            row = f"{100 * accuracy:9.2f}%" + "".join(f"{s:10.4f}" for s in others)
        print(f"{name:10}{row}")


def print_report(mode: str, report: dict) -> None:
    """Print the final tables: members and ensemble, or the one model; then by size."""
    rows = [(f"member {i}", scores) for i, scores in enumerate(report["member"])]
    rows.append(("ensemble", report["ensemble"]))
    rows = [("model", report["ensemble"])] if mode == "sync" else rows
    print_table(f"{report['dataset']}, {report['test_examples']} test images", rows)
    if report["members"] == 1:
        return
    sizes = [(f"first {n}", scores) for n, scores in enumerate(report["by_size"], 1)]
    print_table("ensemble by size, of the members that are finite", sizes)
    entropy = f"predictive entropy {report['predictive_entropy']:.4f} nats"
    shared = f"of which mutual information {report['mutual_information']:.4f}"
    print(f"\ndisagreement {report['disagreement']:.2%} of pairs, {entropy}, {shared}")


VERSIONS = {module.__name__: module.__version__ for module in (pe, jax, jaxlib, np)}
VERSIONS["python"] = sys.version.split()[0]


# ---------------------------------------------------------------------------------
# Picture: report.png
# ---------------------------------------------------------------------------------


# Colors of Okabe and Ito, which do not need red and green to be told apart; the lines
# differ in width and marker too.
ENSEMBLE: dict = {"color": "#d55e00", "linewidth": 2, "marker": "s", "markersize": 5}
MEMBER: dict = {"color": "#56b4e9", "linewidth": 1, "marker": "o", "markersize": 3}
DASHED: dict = {"color": "0.3", "linewidth": 1, "linestyle": "--"}


# What is drawn over epochs and sizes: its label, a factor, its name in the scores of a
# report, and in a line of the metrics after train_ and member_test_, and the ensemble's
# name there.
SCORES = (
    ("NLL, nats", 1, "negative_log_likelihood", "loss", "ensemble_test_loss"),
    ("accuracy, %", 100, "accuracy", "accuracy", "test_accuracy"),
)


def draw_curve(axes, x, y, name: str | None, style: dict) -> None:
    """Draw `y` [n], or a curve a member [n, K], over `x`, under one name."""
    axes.plot(x, y, **style)[0].set_label(name)


def draw_score(panels, score: tuple, metrics: Sequence[dict], report: dict) -> None:
    """Draw a score over epochs and over the ensemble's size."""
    (over_epochs, over_size), (label, factor, key, metric, ensemble) = panels, score
    curves = [("members", f"member_test_{metric}", MEMBER)]
    curves += [("on training images", f"train_{metric}", {**DASHED, "marker": "x"})]
    for name, column, style in [*curves, ("ensemble", ensemble, ENSEMBLE)]:
        values = factor * np.float64([m[column] for m in metrics])
        draw_curve(over_epochs, [m["epoch"] for m in metrics], values, name, style)
    members = [scores[key] for scores in report["member"] if scores]
    sizes = [factor * scores[key] for scores in report["by_size"]]
    over_size.axhline(factor * np.mean(members), label="a member, mean", **DASHED)
    draw_curve(over_size, range(1, len(sizes) + 1), sizes, None, ENSEMBLE)
    for axes, name in zip(panels, ("epoch", "members in the ensemble")):
        axes.set(xlabel=name, ylabel=label)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def draw_reliability(diagram, histogram, probs: np.ndarray, labels) -> None:
    """Draw accuracy over confidence, bin by bin, and how many examples each has."""
    members = "members", MEMBER, probs.reshape(-1, probs.shape[-1])
    for name, style, p in members, ("ensemble", ENSEMBLE, probs.mean(axis=0)):
        counts, confidence, accuracy = em.reliability(p, np.resize(labels, len(p)))
        edges = np.linspace(0, 100, len(counts) + 1)
        shares = 100 * counts / len(p)
        histogram.stairs(shares, edges, color=style["color"], linewidth=2)
        n, x, a = (v[counts > 0] for v in (counts, 100 * confidence, accuracy))
        if style is ENSEMBLE:  # plus and minus a standard error (Wilson 1927)
            error = np.sqrt(n * a * (1 - a) + 1 / 4)
            ends = [100 * (n * a + 1 / 2 + e) / (n + 1) for e in (-error, error)]
            diagram.vlines(x, *ends, color=style["color"], linewidth=1)
        draw_curve(diagram, x, 100 * a, name, style)
    draw_curve(diagram, [0, 100], [0, 100], "calibrated", DASHED)
    diagram.set(xlabel="confidence, %", ylabel="accuracy, %")
    histogram.set(xlabel="confidence, %", ylabel="test images, %", yscale="log")


def draw_images(figure, probs: np.ndarray, data: Dataset) -> None:
    """Draw the images that the ensemble is least sure of, with the members' votes."""
    unsure = np.argsort(-em.predictive_entropy(probs))[:12]
    below = "members' votes, as class: count"
    figure.suptitle(f"test images of the highest predictive entropy; below, {below}")
    for axes, i in zip(figure.subplots(2, 6).flat, unsure):
        axes.imshow(data.test_images[i, ..., 0], cmap="gray_r")
        votes = collections.Counter(data.classes[probs[:, i].argmax(axis=-1)].tolist())
        said = [f"{label}: {count}" for label, count in votes.most_common(4)]
        axes.set_title(f"label {data.classes[data.test_labels[i]]}", fontsize="medium")
        axes.set_xlabel("  ".join(said), fontsize="small")
        axes.set(xticks=[], yticks=[])


def draw_report(
    path: Path, metrics: Sequence[dict], report: dict, probs: np.ndarray, data: Dataset
) -> None:
    """Draw what training and report say; `probs` [K, N, C] are of the test images.

    Needs matplotlib, the [plot] extra.
    """
    from matplotlib.figure import Figure

    probs = probs[np.isfinite(probs).all(axis=(1, 2))]
    figure = Figure(figsize=(9, 9.5), layout="constrained")
    what = f"{len(data.test_images)} test images: an ensemble of {len(probs)}"
    figure.suptitle(f"{data.name}, {what}")
    curves, images = figure.subfigures(2, 1, height_ratios=(5, 3))
    axes = curves.subplots(2, 3)
    for row, score in zip(axes, SCORES):
        draw_score(row[:2], score, metrics, report)
    draw_reliability(*axes[:, 2], probs, data.test_labels)
    titles = "over epochs", "over ensemble size", "reliability"
    for panel, name in zip(axes[0], titles):
        panel.set_title(name)
        panel.legend(frameon=False)
    draw_images(images, probs, data)
    with pe.replace_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


# ---------------------------------------------------------------------------------
# Data: MNIST's four files, from a folder or a mirror
# ---------------------------------------------------------------------------------


class DownloadError(Failure):
    """A file that is missing, and that no mirror gives."""


class Dataset(NamedTuple):
    name: str
    train_images: np.ndarray  # uint8 [N, H, W, 1]
    train_labels: np.ndarray  # int32 [N], indices into classes
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: np.ndarray  # [C], the labels of the training file, sorted

    def form(self) -> dict:
        """Return what else a run depends on, as JSON has it."""
        shape = list(self.train_images.shape[1:])
        return {"image_shape": shape, "classes": self.classes.tolist()}


# SHA-256 of MNIST's own files, uncompressed: mirrors differ in their gzip wrapping.
SHA256SUMS = """
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5 train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7 t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2 t10k-labels-idx1-ubyte
"""
MNIST_FILES = {name: digest for digest, name in re.findall(r"(\S+) (\S+)", SHA256SUMS)}
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
MAX_BYTES = 2**31  # the largest content that is read
MAX_DOWNLOAD = 2**26  # bytes, as they come and unpacked; MNIST's largest has 2**25.5
TIMEOUT = 30  # seconds without a byte


def read_idx(path: Path) -> tuple[np.ndarray, str]:
    """Return an IDX file's array, uint8 [N] or [N, H, W], and its content's SHA-256.

    The header is two zero bytes, the type (8, unsigned bytes), how many dimensions
    there are, and each of them as a big-endian 32-bit number.  No more is read than it
    promises, plus one byte.  Raises Failure.
    """
    num_dims = 3 if "images" in path.name else 1
    magic, length = bytes((0, 0, 8, num_dims)), 4 + 4 * num_dims
    packed = path.suffix == ".gz"
    try:
        with (gzip.open if packed else open)(path, "rb") as file:
            head = file.read(length)
            if not head.startswith(magic) or len(head) < length:
                form = f"0x{magic.hex()}: unsigned bytes in {num_dims} dimensions"
                found = f"header 0x{head.hex()}"
                raise ValueError(f"{found}; expected {length} bytes, at first {form}")
            shape = np.frombuffer(head, ">u4", offset=4).tolist()
            size = math.prod(shape)
            if not 0 < size <= MAX_BYTES:
                declared = f"declares {shape}, {size} bytes"
                raise ValueError(f"{declared}; expected 1 to {MAX_BYTES}")
            # What a header merely promises takes no memory: gzip packs 1032 to 1.
            most = path.stat().st_size * (1032 if packed else 1)
            body = file.read(min(size, most) + 1)
        if len(body) != size:
            amount = "more than" if len(body) > size else f"{len(body)} of"
            raise ValueError(f"holds {amount} the {size} bytes that {shape} takes")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        # gzip's among them: cut short, a wrong checksum, not gzip at all
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"{path}: {reason}") from error
    digest = hashlib.sha256(head + body).hexdigest()
    return np.frombuffer(body, np.uint8).reshape(shape), digest


def download(folder: Path, name: str) -> Path:
    """Put one of MNIST's files into `folder`, whole and verified or not at all.

    Returns its path.  Raises DownloadError with every mirror tried and why it failed.
    """
    path, failures = folder / f"{name}.gz", []
    for mirror in MIRRORS:
        url = f"{mirror}{path.name}"
        print(f"downloading {url}", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                packed = response.read(MAX_DOWNLOAD)
            content = zlib.decompressobj(wbits=31).decompress(packed, MAX_DOWNLOAD)
            if hashlib.sha256(content).hexdigest() != MNIST_FILES[name]:
                raise ValueError("content is not MNIST's (its SHA-256 differs)")
            folder.mkdir(parents=True, exist_ok=True)
            with pe.replace_file(path) as file:
                file.write(packed)
            return path
        except (OSError, http.client.HTTPException, zlib.error, ValueError) as error:
            failures.append(f"{url}: {error}")
    missing = f"{folder / name} is missing, and no mirror gives it"
    raise DownloadError(f"{missing}: {'; '.join(failures)}")


def misfit(arrays: Sequence[np.ndarray]) -> str | None:
    """Say which of a data set's four files does not fit the others, and why."""
    _, train_file, image_file, test_file = MNIST_FILES
    images, labels, test_images, test_labels = arrays
    classes, strange = np.unique(labels), np.setdiff1d(test_labels, labels)
    for file, x, y in zip((train_file, test_file), arrays[::2], arrays[1::2]):
        if len(x) != len(y):
            return f"{file}: {len(y)} labels for {len(x)} images"
    if len(classes) == 1:
        return f"{train_file}: all labels are {classes[0]}; expected two or more"
    if strange.size:
        known = f"{len(classes)} classes of {train_file}"
        return f"{test_file}: label {strange[0]} is none of the {known}"
    size, other = (" x ".join(map(str, x.shape[1:])) for x in (images, test_images))
    if other != size:
        return f"{image_file}: images are {other}; those to train on are {size}"
    return None


def load_mnist(folder: Path) -> Dataset:
    """Load the four files from `folder`; others of any size and labels are welcome.

    Raises Failure for a file that is missing and cannot be downloaded, for one that
    is damaged, and for files that do not belong together.
    """
    if folder.exists() and not folder.is_dir():
        raise Failure(f"--data-dir {folder}: not a folder")
    found, foreign = {}, []
    both = {name: (folder / name, folder / f"{name}.gz") for name in MNIST_FILES}
    paths = {name: next(filter(Path.exists, two), None) for name, two in both.items()}
    for name in sorted(paths, key=lambda name: not paths[name]):  # missing ones last
        if foreign and not paths[name]:
            other = f"{name} is missing, and {foreign[0]} is not MNIST's"
            raise Failure(f"{folder}: {other}, so MNIST's cannot take its place")
        found[name], digest = read_idx(paths[name] or download(folder, name))
        if digest != MNIST_FILES[name]:
            foreign.append(name)
    arrays = [found[name] for name in MNIST_FILES]
    if wrong := misfit(arrays):
        raise Failure(f"{folder}: {wrong}")
    name, classes, parts = "MNIST", np.unique(arrays[1]), []
    for images, labels in (arrays[:2], arrays[2:]):
        parts += [images[..., None], np.searchsorted(classes, labels).astype(np.int32)]
    if foreign:
        print(f"notice: {folder} holds other data than MNIST ({', '.join(foreign)})")
        name = f"data in MNIST's form from {folder}"
    return Dataset(name, *parts, classes.astype(int))


# ---------------------------------------------------------------------------------
# Data: generated digits, for a machine without MNIST and without a network
# ---------------------------------------------------------------------------------


SIDE = 28  # pixels along each side of an image
CHUNK = 1000  # images drawn at once, from a random stream of their own
STEPS = 72  # in which the pen writes a digit

# Ways of writing each digit, of eight knots each.  A pair such as "27" is a knot, 2
# across, 7 down, that attracts the pen; a pair written twice makes a corner.
STROKES = {
    0: "50 10 09 39 89 80 50 30; 70 20 08 49 98 80 40 30; 50 20 18 39 79 70 50 30",
    1: "50 50 50 55 59 59 59 59; 23 23 50 50 55 59 59 59; 24 50 50 59 59 29 29 89",
    2: "12 20 80 94 57 19 19 99; 12 30 90 74 19 08 28 99; 11 50 90 75 09 09 59 88",
    3: "10 90 94 44 44 96 79 09; 10 80 80 44 96 99 39 08; 11 60 93 34 34 97 79 07",
    4: "20 15 15 95 61 61 69 69; 60 06 06 96 60 60 69 69; 10 06 65 80 80 74 69 69",
    5: "80 20 20 14 83 99 39 08; 90 20 14 14 94 89 29 08; 80 20 14 74 97 89 29 08",
    6: "70 30 05 19 89 94 34 17; 60 26 19 79 87 64 35 17; 80 30 07 39 99 84 24 08",
    7: "10 10 80 80 55 49 49 49; 10 80 90 90 65 39 39 39; 12 10 80 80 55 39 39 39",
    8: "60 10 14 88 49 17 84 60; 70 20 13 88 29 17 83 70; 50 11 24 89 29 16 73 60",
    9: "82 70 10 15 75 82 81 79; 80 20 15 75 81 89 29 18; 81 30 14 65 81 81 75 69",
}
WAYS = [(label, way.split()) for label in STROKES for way in STROKES[label].split(";")]


def draw_digits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 [CHUNK, SIDE, SIDE, 1] and labels int32 [CHUNK]."""

    def normal(mean, spread, *shape):
        return mean + spread * rng.standard_normal((CHUNK, *shape), np.float32)

    def bell(at):  # [CHUNK, STEPS] -> [CHUNK, STEPS, SIDE]
        squares = ((at[..., None] - np.arange(SIDE, dtype=np.float32)) / width) ** 2
        return np.exp(-0.5 * squares.clip(max=40))  # clipped: denormals are slow

    labels = np.array([label for label, _ in WAYS], np.int32)
    knots = np.float32([[[*map(int, knot)] for knot in way] for _, way in WAYS])
    num_knots = knots.shape[1]
    # The pen follows a uniform cubic B-spline: its weights for knots so far from it.
    far = np.abs(np.linspace(0, num_knots - 1, STEPS)[:, None] - np.arange(num_knots))
    pull = np.where(far < 1, 4 - 6 * far**2 + 3 * far**3, (2 - far).clip(0) ** 3)
    pull = np.float32(pull / pull.sum(axis=1, keepdims=True))  # [STEPS, num_knots]

    way = rng.integers(len(WAYS), size=CHUNK)
    haste = np.exp(normal(-0.7, 0.45, 1, 1))  # most write neatly, a few scrawl
    moved = knots[way] - 4.5 + haste * normal(0, 1, num_knots, 2)
    x, y = np.moveaxis(pull @ moved, 2, 0)
    x, y = x * normal(1.6, 0.2, 1), y * normal(1.9, 0.15, 1)  # from knots to pixels
    x = x - y * normal(0.2, 0.2, 1)  # slant
    turn = normal(0, 0.12, 1)
    x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    x, y = x + normal(SIDE / 2 - 0.5, 1, 1), y + normal(SIDE / 2 - 0.5, 1, 1)

    # A dab of ink is one bell down times one across; a matrix product sums the dabs.
    width = np.exp(normal(-0.2, 0.2, 1, 1))
    dab = 0.9 * np.hypot(np.gradient(x, axis=1), np.gradient(y, axis=1))[..., None]
    ink = (bell(y) * dab / width).swapaxes(1, 2) @ bell(x)
    ink = np.tanh(ink**2) * normal(1, 0.1, SIDE, SIDE)  # saturated, on rough paper
    return np.uint8(255 * ink.clip(0, 1))[..., None], labels[way]


def generate_digits(
    seed: int, num_train: int = 60_000, num_test: int = 10_000
) -> Dataset:
    """Draw white digits on black, MNIST's stand-in in shapes and types.

    Equal seeds draw equal digits, and fewer are the first of more.  No label is wrong;
    what makes some digits hard is how hastily they are written.
    """
    arrays = []
    for part, count in enumerate((num_train, num_test)):
        starts = range(0, max(count, 1), CHUNK)
        drawn = [draw_digits(np.random.default_rng([seed, part, n])) for n in starts]
        arrays += [np.concatenate(chunks)[:count] for chunks in zip(*drawn)]
    return Dataset("generated digits", *arrays, np.arange(10))


def load_data(source: str, folder: Path) -> Dataset:
    """Load what --data names.  Raises Failure."""
    if source != "generated":
        try:
            return load_mnist(folder)
        except DownloadError as error:
            if source == "mnist":
                raise
            print(f"notice: training on generated digits: {error}")
    return generate_digits(seed=0)


# ---------------------------------------------------------------------------------
# The folder of a run: metrics, report, checkpoints
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made, for this process.  Raises Failure, OSError.

    The lock is the system's, and ends with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    lock = os.open(folder / ".lock", flags, 0o644)
    with os.fdopen(lock, "r+", errors="replace") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            used = f"--workdir {folder}: in use by process {file.read(100).strip()}"
            raise Failure(f"{used}; wait for it, or choose another folder") from None
        file.truncate(0)
        print(os.getpid(), "on", socket.gethostname(), file=file, flush=True)
        yield


def clear(folder: Path, resume: bool) -> None:
    """Remove what a dead process left half written; refuse earlier results."""
    half = re.compile(r"\.(checkpoint_\d+|config|metrics|report)\.\w+\.\w+\.tmp")
    for name in filter(half.fullmatch, os.listdir(folder)):
        os.unlink(folder / name)
    results = [folder / "report.json", folder / "metrics.jsonl"]
    found = [path for path in results if path.exists() and path.stat().st_size]
    found += [path for _, path in checkpoints(folder)]
    if found and not resume:
        earlier = f"holds {found[0].name} of an earlier run"
        choice = "go on with it (--resume), choose another folder, or remove it"
        raise Failure(f"--workdir {folder}: {earlier}; {choice}")


def write_json(path: Path, *values: dict, indent: int | None = None) -> None:
    """Write a file of JSON, a value after the other."""
    texts = [json.dumps(x, indent=indent, allow_nan=False) + "\n" for x in values]
    with pe.replace_file(path) as file:
        file.write("".join(texts).encode())


@contextlib.contextmanager
def read_json(path: Path) -> Iterator[dict]:
    """Yield what a file of JSON holds; Failure for what it does not names the file."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("expected an object, {...}")
        yield found
    except KeyError as error:
        raise Failure(f"{path}: {error} is missing") from error
    except (OSError, ValueError, TypeError, RecursionError, Failure) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"{path}: {reason}") from error


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and paths of what is named as a checkpoint, newest first."""
    name = re.compile(r"checkpoint_(\d{8,18})\.safetensors")
    matches = map(name.fullmatch, os.listdir(folder))
    return sorted([(int(m[1]), folder / m[0]) for m in matches if m], reverse=True)


def save_checkpoint(folder: Path, state: pe.TrainState, done: int, keep: int) -> None:
    """Save the members after `done` steps; remove what is older than the newest.

    Checkpoints of later steps, which were skipped as damaged, do not count.
    """
    pe.save(folder / f"checkpoint_{done:08d}.safetensors", state)
    older = [path for step, path in checkpoints(folder) if step <= done]
    for path in older[keep:]:
        with contextlib.suppress(PermissionError):  # Windows: it is being read
            os.unlink(path)


def load_members(path: Path, step: int, like: Any, recipe: Recipe) -> pe.TrainState:
    """Load the checkpoint of a step.  Raises ValueError, OSError.

    It is of the step that its members' optimizers have counted, or of a later one if
    the recipe leaves out steps, which they do not count.
    """
    state = pe.load(path, like)
    counted = state.opt_state.num_steps  # [K]
    if counted.max() > step or (counted.min() < step and not recipe.skip_nonfinite):
        raise ValueError(f"{path}: holds step {counted.max()}, not step {step}")
    return state


def load_checkpoint(folder: Path, like: Any, recipe: Recipe) -> tuple:
    """Return the steps and the members of the newest valid checkpoint.

    Raises Failure when there is none.
    """
    found = checkpoints(folder)
    for done, path in found:
        try:
            state = load_members(path, done, like, recipe)
            print(f"resumed from {path}", flush=True)
            return done, state
        except (OSError, ValueError) as error:
            print(f"train_mnist.py: warning: skipped {error}", file=sys.stderr)
    raise Failure(f"--resume: {folder} holds no valid checkpoint, of {len(found)}")


def read_metrics(folder: Path, epochs: int) -> list[dict]:
    """Return the lines of the epochs that are complete, up to one that is damaged."""
    path, metrics = folder / "metrics.jsonl", []
    try:
        for line in path.read_text().splitlines()[:epochs]:
            found = json.loads(line)
            if found["epoch"] != len(metrics) + 1:
                raise ValueError(f"epoch {found['epoch']} after {len(metrics)}")
            metrics.append(found)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        print(f"train_mnist.py: warning: {path}: {error}", file=sys.stderr)
    return metrics


class Trained(NamedTuple):
    """What a finished run left, to predict with: images are uint8 [N, H, W(, 1)]."""

    trainer: pe.Trainer
    state: pe.TrainState
    classes: np.ndarray  # [C], so that classes[probs.argmax(axis=-1)] are labels
    config: dict  # of config.json

    def predict(self, images: Any) -> np.ndarray:
        """Return the ensemble's probabilities [N, C]."""
        return self.trainer.predict(self.state, self._pixels(images))

    def predict_members(self, images: Any) -> np.ndarray:
        """Return each member's probabilities [K, N, C]."""
        return self.trainer.predict_members(self.state, self._pixels(images))

    def _pixels(self, images: Any) -> np.ndarray:
        images, shape = np.asarray(images), tuple(self.config["image_shape"])
        if images.dtype != np.uint8 or images.shape[1:] not in (shape, shape[:2]):
            raise ValueError(
                f"images are {images.dtype} {[*images.shape]}; expected uint8 [N, "
                f"{shape[0]}, {shape[1]}], pixels from 0 to 255: resize others, and of "
                "floats from 0 to 1 take np.uint8(np.rint(255 * images))"
            )
        return images.reshape(-1, *shape)


def load_run(workdir: str | os.PathLike, devices: int | None = None) -> Trained:
    """Load the models of a finished run from its folder, which stays as it is.

    `devices` is how many to use at most, by default all.  Members that the run's report
    excludes, since they are not finite, are left out.

    Raises ValueError for a folder of no run, for a run that is not finished or whose
    newest checkpoint is damaged, and for more devices than there are.  So does
    predicting, for images that are not bytes, or of another size than those it trained
    on.
    """
    folder = Path(workdir)
    try:
        with read_json(folder / "config.json") as config:
            flags = kept_flags(config)
            recipe = Recipe(**{n: flags.get(n, config[n]) for n in Recipe._fields})
            members, size = flags["members"], flags["train_size"]
            num_steps = recipe.epochs * (size // recipe.batch_size)
            trainer = make_trainer(recipe, members, 1, num_steps, config)
            state = trainer.gather(trainer.init(jax.random.key(0)))
        done, path = max(checkpoints(folder), default=(None, folder))
        if done != num_steps:
            raise ValueError(f"it is at step {done} of {num_steps}")
        with read_json(folder / "report.json") as report:
            scored = [isinstance(scores, dict) for scores in report["member"]]
            if len(scored) != members or not any(scored):
                has = f"has scores of {sum(scored)} of {len(scored)} members"
                raise ValueError(f"{has}; config.json has {members}")
        state = load_members(path, done, state, recipe)
    except (OSError, ValueError, Failure) as error:
        hint = f"to go on with one: python train_mnist.py --resume --workdir {folder}"
        raise ValueError(f"{folder} holds no finished run: {error}; {hint}") from error
    trainer = make_trainer(recipe, sum(scored), devices, num_steps, config)
    state = trainer.scatter(jax.tree.map(lambda x: x[np.array(scored)], state))
    return Trained(trainer, state, np.array(config["classes"]), config)


# ---------------------------------------------------------------------------------
# Signals and processes
# ---------------------------------------------------------------------------------


class Signals:
    """SIGTERM and SIGINT, as a request that training and evaluation look for.

    So they are from `listen` to `close`.  Else, while nothing is to be saved, they end
    the process at once, as a second SIGINT always does.
    """

    def __init__(self):
        self.received = 0  # the first of them
        self.handlers = {}  # those before ours

    def listen(self) -> None:
        if not self.handlers and threading.current_thread() is threading.main_thread():
            numbers = signal.SIGINT, signal.SIGTERM
            self.handlers = {n: signal.signal(n, self.note) for n in numbers}

    def note(self, number: int, frame: Any) -> None:
        self.received = self.received or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def close(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def agree(self) -> int:
        """Return the signal of any process, or 0."""
        return int(pe.gather_processes(np.int32(self.received)).max())


def connect(args: argparse.Namespace) -> None:
    """Join the processes of the run, if it has several.  Raises Failure."""
    if not (args.distributed or args.coordinator):
        return
    where = f"--coordinator {args.coordinator}" if args.coordinator else "--distributed"

    def give_up():  # JAX would abort, with a trace of C++
        late = f"the processes did not meet within {args.connect_timeout} seconds"
        hint = "is each started, with its own id and the same number of processes?"
        os.write(2, f"train_mnist.py: error: {where}: {late}; {hint}\n".encode())
        os._exit(1)

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    processes = args.coordinator, args.num_processes, args.process_id
    options = {"initialization_timeout": args.connect_timeout + 60}
    known = inspect.signature(jax.distributed.initialize).parameters
    if "heartbeat_timeout_seconds" in known:  # newer JAX: how long a process may hang
        options["heartbeat_timeout_seconds"] = 30
    timer = threading.Timer(args.connect_timeout, give_up)
    timer.start()
    try:
        if args.process_id == 0:  # a busy port: JAX would end without a word
            port = int(args.coordinator.rpartition(":")[2])
            socket.create_server(("", port)).close()
        jax.distributed.initialize(*processes, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise Failure(f"{where}: {reason}", status=1) from error
    finally:
        timer.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX has taken it for itself
    count, there = jax.process_count(), f"the process at {args.coordinator}"
    if args.num_processes not in (None, count):
        raise Failure(f"--num-processes {args.num_processes}: {there} counts {count}")


def share(tree: Any) -> Any:
    """Give every process the first one's tree of arrays, of 32 bits or fewer."""
    return jax.tree.map(lambda x: pe.gather_processes(x)[0], tree)


OTHER_RUN = "leave out the flags that differ, or choose another --workdir"


def check_same(who: str, ours: dict, theirs: dict, remedy: str = OTHER_RUN) -> None:
    """Raise Failure for the first of our settings that another run lacks."""
    for name, value in ours.items():
        if value != (other := theirs.get(name)):
            raise Failure(f"{who}: {name} is {value} here, {other} there; {remedy}")


def check_same_run(settings: dict) -> None:
    """Raise Failure in a process that trains with other settings than the first."""
    text = json.dumps(settings).ljust(8192).encode()  # of one length everywhere
    first = json.loads(share(np.frombuffer(text, np.uint8)).tobytes())
    who = f"--process-id {jax.process_index()}"
    check_same(who, settings, first, "give it the flags of the first")


# ---------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------


MOST = 2**31 - 1  # what JAX counts to


def checked(kind: Callable, expected: str, holds: Callable) -> Callable:
    """Make a type for argparse: a value of `kind` that `holds`."""

    def read(text: str):
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")

    return read


def between(low: int, high: int) -> Callable:
    expected = f"a whole number from {low} to {high}"
    return checked(int, expected, lambda n: low <= n <= high)


def at_least(low: int) -> Callable:
    return between(low, MOST)


def is_address(text: str) -> bool:
    match = re.fullmatch(r".+:([0-9]{1,5})", text)
    return bool(match) and 0 < int(match[1]) < 65536


address = checked(str, "HOST:PORT, with a port from 1 to 65535", is_address)
nonnegative = checked(float, "a finite number, 0 or more", lambda x: 0 <= x < math.inf)
positive = checked(float, "a number above 0, at most 1e38", lambda x: 0 < x <= 1e38)
below_one = checked(float, "a number, 0 or more, below 1", lambda x: 0 <= x < 1)

# What each flag takes (bool: nothing) and its default.  Where that is None, the recipe
# has it, or the run finds it.
FLAGS = {
    "mode": (("ensemble", "sync"), "ensemble"),
    "members": (at_least(1), None),
    "devices": (between(1, 1024), None),
    "at_once": (at_least(1), None),
    "show_batch": (bool, False),
    "network": (NETWORKS, "cnn"),
    "optimizer": (LEARNING_RATES, None),
    "epochs": (at_least(0), None),
    "batch_size": (at_least(1), None),
    "learning_rate": (nonnegative, None),
    "momentum": (below_one, None),
    "schedule": (SCHEDULES, None),
    "max_shift": (at_least(0), None),
    "bootstrap": (bool, None),
    "skip_nonfinite": (bool, None),
    "seed": (between(0, 2**32 - 1), 0),
    "data": (("auto", "mnist", "generated"), "auto"),
    "data_dir": (Path, None),
    "train_size": (at_least(1), None),
    "workdir": (Path, None),
    "plot": (bool, False),
    "save_every": (positive, 1.0),
    "keep": (at_least(1), 3),
    "resume": (bool, False),
    "coordinator": (address, None),
    "num_processes": (between(1, 2**16), None),
    "process_id": (at_least(0), None),
    "distributed": (bool, False),
    "connect_timeout": (between(1, 24 * 60 * 60), 60),
}
DEFAULTS = {name: default for name, (_, default) in FLAGS.items()}
# What determines a run's numbers, and what else --resume takes from its config.json.
NUMBERS = ("mode", "members", *Recipe._fields, "seed", "train_size")
KEPT = (*NUMBERS, "data", "data_dir", "save_every")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Failure(message)

    def format_help(self):
        return __doc__


def given_flags(argv: Sequence[str] | None) -> dict:
    """Return the values of the flags that are given, by name.  Raises Failure."""
    parser = Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, (kind, _) in FLAGS.items():
        takes = {"type": kind} if callable(kind) else {"choices": tuple(kind)}
        takes = {"action": "store_true"} if kind is bool else takes
        parser.add_argument(flag(name), **takes)
    return vars(parser.parse_args(argv))


def kept_flags(config: dict) -> dict:
    """Return the values of the flags in a run's config.json.  Raises Failure."""
    kept = {name: config[name] for name in KEPT if name in config}
    argv = [flag(name) for name, value in kept.items() if value is True]
    argv += [f"{flag(n)}={x}" for n, x in kept.items() if not isinstance(x, bool)]
    return given_flags(argv)


def default_folder() -> Path:
    """Return $MNIST_DIR, or a folder of our own in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MNIST_DIR") or cache / "pjax_ensemble")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: what is given, else the resumed run's, else defaults.

    Raises Failure for what lies out of range or does not go together.
    """
    given = own = given_flags(argv)
    for name in ("plot", "save_every", "keep", "resume"):
        if name in own and "workdir" not in own:
            raise Failure(f"{flag(name)}: needs --workdir, the folder of the run")
    if "resume" in own:
        path = own["workdir"] / "config.json"
        # Only the first of several processes has to have it.
        if path.exists() or not (own.get("process_id") or "distributed" in own):
            with read_json(path) as config:
                given = kept_flags(config) | own
            changes = {name: own[name] for name in NUMBERS if name in own}
            check_same(f"--resume from {path.parent}", changes, config)
    recipe = RECIPES[given.get("network", DEFAULTS["network"])]
    optimizer = given.get("optimizer", recipe.optimizer)
    # Of what is not given, the pixels are those of the images, which are not read yet.
    recipe = recipe._replace(learning_rate=LEARNING_RATES[optimizer], max_shift=None)
    args = argparse.Namespace(**(DEFAULTS | recipe._asdict() | given))
    args.data_dir = (args.data_dir or default_folder()).absolute()
    if args.mode == "sync" and args.members not in (None, 1):
        raise Failure(f"--members {args.members}: --mode sync trains one model")
    if "momentum" in own and args.optimizer == "adam":
        raise Failure("--momentum: --optimizer adam has none; leave it out")
    if "data_dir" in own and args.data == "generated":
        raise Failure("--data-dir: --data generated reads no files; leave it out")
    _, count, number = three = args.coordinator, args.num_processes, args.process_id
    if three.count(None) not in ((3,) if args.distributed else (0, 3)):
        names = "--coordinator, --num-processes and --process-id"
        raise Failure(f"{names} belong together, or --distributed stands alone")
    if args.coordinator and number >= count:
        raise Failure(f"--process-id {number}: expected 0 to {count - 1}")
    return args


def check(args: argparse.Namespace, name: str, ok: bool, message: str) -> None:
    """Raise Failure for a flag whose value does not fit."""
    if not ok:
        raise Failure(f"{flag(name)} {getattr(args, name)}: {message}")


def lay_out(args: argparse.Namespace) -> pe.Layout:
    """Lay the models over the devices; put into `args` how many there are.

    Raises Failure where flags do not fit.
    """
    processes, here = jax.process_count(), jax.local_device_count()
    devices, kind = args.devices or here, jax.default_backend().upper()
    check(args, "devices", devices <= here, f"there are {here} {kind} devices")
    each = f"several processes use all of their {here} {kind} devices each"
    check(args, "devices", processes == 1 or devices == here, each)
    devices = devices if processes == 1 else jax.device_count()
    few = 2 if kind == "CPU" else 5  # of which an ensemble has at least so many
    args.members = 1 if args.mode == "sync" else args.members or max(devices, few)
    n = pe.layout(args.members, devices, processes).replicas
    if processes == 1 and not args.devices:  # as many replicas as divide the batch
        n = max(r for r in range(1, n + 1) if args.batch_size % r == 0)
        devices = min(devices, args.members * n)
    other = f"use a multiple of {n}, for example {args.batch_size // n * n or n}"
    other += ", or leave out --devices" * (processes == 1)
    split = f"does not split over the {n} devices of a model; {other}"
    check(args, "batch_size", args.batch_size % n == 0, split)
    return pe.layout(args.members, devices, processes)


def prepare(args: argparse.Namespace) -> tuple[Recipe, Dataset, pe.Layout]:
    """Load the data, lay out the models; put into `args` what the data decide.

    Raises Failure where flags do not fit.
    """
    for name, tool in (("show_batch", "rich"), ("plot", "matplotlib")):
        if getattr(args, name) and not importlib.util.find_spec(tool):
            raise Failure(f"{flag(name)} needs {tool}: python -m pip install {tool}")
    data = load_data(args.data, args.data_dir)
    images, labels = data.train_images, data.train_labels
    args.train_size = size = args.train_size or len(images)
    has = f"{data.name} has {len(images)} training images"
    check(args, "train_size", size <= len(images), has)
    few = f"more than the {size} training images"
    check(args, "batch_size", args.batch_size <= size, few)
    most = MOST // (size // args.batch_size)
    check(args, "epochs", args.epochs <= most, f"at most {most} with such batches")
    data = data._replace(train_images=images[:size], train_labels=labels[:size])
    side = min(images.shape[1:3])
    if args.max_shift is None:
        args.max_shift = round(RECIPES[args.network].max_shift * side / SIDE)
    far = f"more than the {side} pixels of an image's side"
    check(args, "max_shift", args.max_shift <= side, far)
    recipe = Recipe(**{name: getattr(args, name) for name in Recipe._fields})
    try:  # images may be too small for the network
        models = jax.eval_shape(init_of(recipe, data.form()), jax.random.key(0))
        jax.eval_shape(NETWORKS[recipe.network].logits, *models, scale(images[:1]))
    except ValueError as error:
        raise Failure(f"--network {recipe.network}: {error}") from error
    return recipe, data, lay_out(args)


def announce(args: argparse.Namespace, recipe: Recipe, data: Dataset, layout) -> None:
    """Say in a line what is about to run: data, models, devices, recipe, versions.

    Another line names devices that stay idle, and the remedy.
    """
    size = " x ".join(map(str, data.train_images.shape[1:3]))
    members, devices, shared, replicas = layout
    there, processes = jax.device_count(), jax.process_count()
    models = "one model" if args.mode == "sync" else f"an ensemble of {members}"
    where = f"{devices} of {there} {jax.default_backend().upper()} devices"
    where += f" of {processes} processes" * (processes > 1)
    where += f" ({shared} a device)" * (shared > 1)
    where += f" ({replicas} replicas a model)" * (replicas > 1)
    wanted = args.devices or there
    full = pe.layout(members, wanted, processes)
    split = f" (a batch of {recipe.batch_size} does not split over {full.replicas})"
    where += split * (full.replicas > replicas)
    how = {**recipe._asdict(), "seed": args.seed, **VERSIONS}
    said = ", ".join(f"{n} {value}" for n, value in how.items() if value is not False)
    counts = f"{len(data.train_images)} training and {len(data.test_images)} test"
    what = f"{data.name}, {counts} images of {size}, {len(data.classes)} classes"
    print(f"{what}: {models} on {where}; {said}", flush=True)
    if devices == full.devices < wanted:
        more = f"more would be no faster; --members {wanted * shared} would take all"
        print(f"notice: {members} members take {devices} of {wanted} devices: {more}")


def show_batch(layout: pe.Layout, batch_size: int, pixels: int) -> None:
    """Draw which rows of a step's images lie on which device, as Keras's guide does."""
    rows = layout.members_per_device * layout.devices * batch_size // layout.replicas
    mesh = jax.sharding.Mesh(jax.devices()[: layout.devices], ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    print(f"a step's images [{rows}, {pixels}], member after member, on the devices:")
    jax.debug.visualize_sharding((rows, pixels), sharding)


def train_and_report(args: argparse.Namespace) -> None:
    """Join the processes, take the folder, train, report.  Raises Failure."""
    pe.use_cpu_devices(args.devices)
    connect(args)
    with contextlib.ExitStack() as stack:
        folder = None
        if jax.process_index():  # all compute what is printed: one of them is enough
            stack.enter_context(contextlib.redirect_stdout(None))
        elif folder := args.workdir:
            stack.enter_context(locked(folder))
            clear(folder, args.resume)
        recipe, data, layout = prepare(args)
        announce(args, recipe, data, layout)
        if args.show_batch:
            show_batch(layout, recipe.batch_size, data.train_images[0].size)
        run = Run(args, recipe, data, layout, folder)
        with contextlib.closing(run.signals):
            scores, probs = run.train()
        report = {
            "dataset": data.name,
            "test_examples": len(data.test_images),
            "members": layout.members,
            "failed": sorted(run.failed),
            **scores,
            "config": {**run.settings, **layout._asdict()},
            "versions": VERSIONS,
        }
        print_report(args.mode, report)
        if folder:
            write_json(folder / "report.json", report, indent=2)
        if folder and args.plot:
            draw_report(folder / "report.png", run.metrics, report, probs, data)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, after one line of what is wrong."""
    several = False
    try:
        args = parse_arguments(argv)
        several = bool(args.coordinator or args.distributed)
        train_and_report(args)
        return 0
    except Failure as failure:
        text, status = str(failure), failure.status
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        text, status = f"{where}{error.strerror or error}", 2
    except (MemoryError, RuntimeError, ValueError) as error:
        reason, status = str(error).partition("\n")[0], 1
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
            less = "fewer --members on more --devices, or a smaller --batch-size"
            text = f"out of memory; try {less}: {reason}"
        elif type(error) is RuntimeError:  # JAX's own errors are of other types
            text = reason
        elif several:
            text = f"lost contact with another process: {reason}"
        else:
            raise
    text = f"error: {text}" if status < 128 else text
    print(f"train_mnist.py: {text}", file=sys.stderr, flush=True)
    if several and status < 128:
        os._exit(status)  # JAX would wait for the others, which wait for this one
    return status


if __name__ == "__main__":
    if sys.stdout:  # a path that its encoding lacks is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
