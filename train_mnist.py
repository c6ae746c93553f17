"""Train convolutional networks on MNIST: an ensemble of any size, or one model.

    python train_mnist.py --mode ensemble     train members, average their probabilities
    python train_mnist.py --members 8         train eight members, on any devices
    python train_mnist.py --mode sync         train one model, average its gradients

models and devices:
  --mode {ensemble,sync}  ensemble: train independent members and average their
                          probabilities; sync: train one model, divide each batch over
                          the devices and average the gradients (default: ensemble)
  --members K             number of members of the ensemble; members can share a device,
                          and devices can share a member (default: one per device, but
                          at least two on a CPU and five on an accelerator)
  --devices D             number of devices that each process uses; on a CPU, the number
                          of virtual devices (default: all devices, or fewer where the
                          batch does not split over a member's replicas; on a CPU, one
                          device per core)
  --at-once N             number of members on a device that are computed together
                          (default: 1 on a CPU, where more are slower; on an
                          accelerator all, or as many as fit in its memory)

training:
  --network {cnn,batchnorm}
                          cnn: the network of Flax's ensembling guide; batchnorm: the
                          network of Keras's guide to distributed training with JAX,
                          with batch normalization and dropout (default: cnn)
  --optimizer {sgd,adam}  sgd: stochastic gradient descent with momentum; adam: Adam
                          (default: sgd, or adam with batchnorm)
  --epochs N              number of passes over the training images, fixed when a run
                          starts; 0 reports the initial models
                          (default: 5, or 2 with batchnorm)
  --batch-size B          number of examples per step of one model, over all its
                          replicas (default: 64)
  --learning-rate RATE    learning rate of the optimizer, or the peak of the schedule
                          (default: 0.15 with sgd, 0.001 with adam)
  --momentum SHARE        share of the velocity that a step of sgd keeps (default: 0.9)
  --schedule {constant,linear,cosine}
                          learning rate over the run; constant: the same at every step;
                          linear or cosine: it rises over the first 15% of the steps and
                          then falls to 0, in straight lines or in half cosines
                          (default: linear, or constant with batchnorm)
  --max-shift PIXELS      largest random shift of a training image along each axis, in
                          pixels (default: 2 for images of side 28, in proportion for
                          other sizes, or 0 with batchnorm)
  --bootstrap             train each member on its own resample of the training images:
                          as many images, drawn with replacement (default: every member
                          trains on all images, in its own order)
  --skip-nonfinite        skip each step whose loss or gradient is not finite, on all
                          replicas together (default: no step is skipped; the run stops
                          at its last good checkpoint when no member is finite)
  --seed S                seed of the random numbers; member i depends on S and i alone
                          (default: 0)

data:
  --data {auto,mnist,generated}
                          mnist: MNIST from --data-dir, downloaded if missing;
                          generated: digits that mnist_data.py draws; auto: MNIST,
                          or generated digits if MNIST cannot be downloaded
                          (default: auto)
  --data-dir DIR          folder of MNIST's four files, gzipped or plain, or of another
                          data set in files of the same format and names
                          (default: $MNIST_DIR if it is set, otherwise pjax_ensemble in
                          the user's cache folder)
  --train-size N          number of training images to use, the first ones
                          (default: all)

output:
  --workdir DIR           folder for metrics.jsonl, report.json and the checkpoints
                          (default: nothing is written)
  --plot                  draw report.png in --workdir; needs matplotlib (default: off)
  --save-every EPOCHS     number of epochs between checkpoints, whole or fractional
                          (default: 1.0)
  --keep N                number of checkpoints to keep, the newest ones (default: 3)
  --resume                continue the run in --workdir from its newest valid
                          checkpoint, on any devices; the run's other flags are read
                          from the folder, and flags that determine its results cannot
                          change (default: start a new run)

several processes, all started with the same flags except --process-id; only process 0
prints the results and writes files:
  --coordinator HOST:PORT
                          address of process 0 and a free port there, where the
                          processes meet (default: none, for a single process)
  --num-processes P       number of processes (default: 1)
  --process-id I          number of this process, from 0 to P - 1 (default: 0)
  --distributed           let JAX find the processes, under Slurm or on TPUs, in place
                          of the three flags above (default: off)
  --connect-timeout SECONDS
                          number of seconds to wait for the other processes
                          (default: 60)
"""

# `make_trainer` puts a network, a loss and an optimizer together, and `Run.train` calls
# `pe.fit`.  Begin to read there, or at `train_and_report`, near the end, which calls
# the parts in their order.  The file holds settings, networks, trainer and run, and the
# run's needs: report, picture, folder, processes, command line.  The data come from
# `mnist_data.py`.

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
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
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    # Until there is something to save, Ctrl-C ends the process at once, also while JAX
    # loads or compiles.  A parent's request to ignore it is kept.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import ensemble_metrics as em
import pjax_ensemble as pe
from mnist_data import SIDE, SOURCES, Dataset, default_folder, load_data

try:
    import fcntl
except ImportError:  # on Windows, where a run's folder is not locked
    fcntl = None


# ---------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------


class Settings(NamedTuple):
    """All that determines a run's results, on any devices; config.json holds it.

    The defaults are the cnn's recipe.  A recipe lacks the members, which devices
    determine, and the last four, which the data determine.
    """

    mode: str = "ensemble"
    members: int = 0
    network: str = "cnn"
    optimizer: str = "sgd"
    epochs: int = 5
    batch_size: int = 64  # examples per step of one model, over all its replicas
    learning_rate: float = 0.15  # the schedule's peak
    momentum: float = 0.9  # for sgd
    schedule: str = "linear"
    max_shift: int = 2  # largest shift in pixels; in `RECIPES`, for images of side 28
    bootstrap: bool = False  # each member trains on its own resample
    skip_nonfinite: bool = False  # skip steps whose loss or gradient is not finite
    at_once: int | None = None  # members of a device together; None is the trainer's
    seed: int = 0
    train_size: int = 0
    dataset_sha256: str = ""
    image_shape: Sequence[int] = ()  # (H, W, C)
    classes: Sequence[int] = ()

    @property
    def epoch_steps(self) -> int:
        """Return the number of steps per epoch, whose batches are all full."""
        return self.train_size // self.batch_size


# The cnn's recipe was chosen on held-out training images: see docs/mnist.md.
# The batchnorm recipe is the one in Keras's guide.
GUIDE = {
    "network": "batchnorm",
    "optimizer": "adam",
    "epochs": 2,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "max_shift": 0,
}
RECIPES = {"cnn": Settings(), "batchnorm": Settings(**GUIDE)}
LEARNING_RATES = {recipe.optimizer: recipe.learning_rate for recipe in RECIPES.values()}

SCHEDULES = {
    "constant": lambda peak, num_steps: peak,
    "linear": pe.linear_schedule,
    "cosine": pe.cosine_schedule,
}


# ---------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------


class BatchNormCNN(NamedTuple):
    conv1: pe.Conv  # [3, 3, I, 12], without bias
    norm1: pe.BatchNorm  # [12]; all three are without scale
    conv2: pe.Conv  # [6, 6, 12, 24], without bias
    norm2: pe.BatchNorm  # [24]
    conv3: pe.Conv  # [6, 6, 24, 32]
    norm3: pe.BatchNorm  # [32]
    dense1: pe.Dense  # [32, 256]
    dense2: pe.Dense  # [256, C]


def batch_norm_cnn_init(key, *, image_shape=(28, 28, 1), num_classes=10) -> tuple:
    """Draw initial weights of the network of Keras's distributed-JAX guide.

    With the defaults it has 49,242 parameters.  H and W must be at least 6, and do not
    change that number.  Returns (params, stats), with one `BatchStats` in stats per
    normalization.
    """
    keys = jax.random.split(key, 5)
    norm1, stats1 = pe.batch_norm_init(12, scale=False)
    norm2, stats2 = pe.batch_norm_init(24, scale=False)
    norm3, stats3 = pe.batch_norm_init(32, scale=False)
    params = BatchNormCNN(
        conv1=pe.conv_init(keys[0], image_shape[-1], 12, 3, bias=False),
        norm1=norm1,
        conv2=pe.conv_init(keys[1], 12, 24, 6, bias=False),
        norm2=norm2,
        conv3=pe.conv_init(keys[2], 24, 32, 6),
        norm3=norm3,
        dense1=pe.dense_init(keys[3], 32, 256),
        dense2=pe.dense_init(keys[4], 256, num_classes),
    )
    return params, (stats1, stats2, stats3)


def batch_norm_cnn(
    params: BatchNormCNN, stats: tuple, images: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, tuple]:
    """Map images [B, H, W, I], pixels in [0, 1], to logits [B, C] and new stats.

    With a key, as in training, it uses the batch's statistics and dropout.  Without a
    key, as in evaluation, it uses the running statistics and no dropout.
    """

    def norm_relu(norm, stats, x):
        x, stats = pe.batch_norm(norm, stats, x, training=key is not None)
        return jax.nn.relu(x), stats

    x = pe.conv(params.conv1, images)
    x, stats1 = norm_relu(params.norm1, stats[0], x)
    x = pe.conv(params.conv2, x, stride=2, padding="VALID")
    x, stats2 = norm_relu(params.norm2, stats[1], x)
    x = pe.conv(params.conv3, x, stride=2)
    x, stats3 = norm_relu(params.norm3, stats[2], x)
    x = jax.nn.relu(pe.dense(params.dense1, x.mean(axis=(1, 2))))
    x = pe.dropout(key, x, 0.5)
    return pe.dense(params.dense2, x), (stats1, stats2, stats3)


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
# Trainer
# ---------------------------------------------------------------------------------


def shift_images(key: jax.Array, images: jax.Array, max_shift: int) -> jax.Array:
    """Move each image [B, H, W, C] by its own random offset, padded with zeros."""
    if max_shift == 0:
        return images
    pad = [(0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)]
    starts = jax.random.randint(key, (len(images), 2), 0, 2 * max_shift + 1)

    def crop(image, start):
        return jax.lax.dynamic_slice(image, (start[0], start[1], 0), images.shape[1:])

    return jax.vmap(crop)(jnp.pad(images, pad), starts)


def scale(images: jax.Array) -> jax.Array:
    return images.astype(jnp.float32) / 255


def make_trainer(settings: Settings, devices: int | None = None) -> pe.Trainer:
    """Make a trainer for a run's data: uint8 images, int32 labels."""
    network = NETWORKS[settings.network]

    def init_fn(key):
        return network.init(
            key,
            image_shape=settings.image_shape,
            num_classes=len(settings.classes),
        )

    def loss_fn(params, model_state, key, images, labels):
        shift_key, key = jax.random.split(key)
        images = scale(shift_images(shift_key, images, settings.max_shift))
        logits, model_state = network.logits(params, model_state, images, key)
        return pe.softmax_cross_entropy(logits, labels).mean(), model_state

    def apply_fn(params, model_state, images):
        return network.logits(params, model_state, scale(images))[0]

    num_steps = settings.epochs * settings.epoch_steps
    rate = SCHEDULES[settings.schedule](settings.learning_rate, num_steps)
    if settings.optimizer == "adam":
        optimizer = pe.adam(rate)
    else:
        optimizer = pe.sgd(rate, settings.momentum)
    return pe.make_trainer(
        init_fn,
        loss_fn,
        optimizer,
        apply_fn=apply_fn,
        members=settings.members,
        devices=devices,
        at_once=settings.at_once,
        microbatch="auto",
        stateful=True,
        skip_nonfinite=settings.skip_nonfinite,
    )


# ---------------------------------------------------------------------------------
# Run: what it prints and writes while it trains
# ---------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """A report on images, and the probabilities that it is computed from."""

    report: dict  # of the members that are finite; the others are None in its `member`
    probs: np.ndarray  # [K, N, C], of all members


class Measured:
    """Losses and times of the steps that this process has taken of an epoch."""

    def __init__(self, members: int):
        self.began = time.perf_counter()
        self.losses = np.empty((members, 0))  # [K, n]
        self.seconds = 0.0  # of training
        self.pace = []  # each segment's seconds per step


class Run:
    """A run: what it prints and writes while `pe.fit` trains its members.

    Only process 0 of several processes has the folder.
    """

    def __init__(self, args, settings, data, trainer, folder: Path | None = None):
        """Start a run, or continue the run in the folder.  Raises Failure."""
        check_same_run(settings)
        self.args = args
        self.settings = settings
        self.data = data
        self.trainer = trainer
        self.folder = folder
        self.signals = Signals()
        self.bars = contextlib.ExitStack()  # the progress bar of an epoch
        self.advance_bar = None
        self.segments = 0  # calls of `trainer.epoch` by this process
        self.done = -1  # steps so far; -1 before `pe.fit` has found it out
        self.good = -1  # steps at the last good checkpoint
        self.measured = Measured(settings.members)  # in the epoch so far
        self.evaluation = None  # the last one
        self.metrics = []  # one dict per epoch
        self.failed = set()  # members that are no longer finite
        if folder and args.resume:
            there, _ = read_config(folder)
            check_same(f"--resume from {folder}", settings, there)
            if not checkpoints(folder):
                raise Failure(f"--resume: there is no checkpoint in {folder}")
        if folder:
            flags = {
                "data": args.data,
                "save_every": args.save_every,
                "dataset": data.name,
                "data_dir": str(args.data_dir),
            }
            write_json(folder / "config.json", settings._asdict() | flags, indent=2)

    def train(self) -> Evaluation:
        """Train to the last epoch; save, evaluate and record after each epoch.

        Returns the last epoch's evaluation.  Raises Failure.
        """
        settings = self.settings
        data = self.data

        def order(epoch):
            return pe.epoch_order(
                settings.train_size,
                settings.batch_size,
                members=settings.members,
                seed=settings.seed,
                epoch=epoch,
                bootstrap=settings.bootstrap,
            )

        wrong = (ValueError,) if self.args.resume else ()
        with named("--resume", *wrong), self.bars:
            try:
                fitted = pe.fit(
                    self.trainer,
                    (data.train_images, data.train_labels),
                    key=jax.random.key(settings.seed),
                    epochs=settings.epochs,
                    order=order,
                    folder=self.args.workdir,
                    save_every=self.args.save_every,
                    keep=self.args.keep,
                    on_segment=self.note,
                    on_epoch=self.end_epoch,
                )
            except FloatingPointError as error:
                text = str(error).replace("the learning rate", "--learning-rate")
                raise Failure(text, status=3) from error
        if self.look():
            raise self.stopped()
        evaluation = self.evaluation or self.evaluate(fitted.state)
        if evaluation is None:
            raise self.stopped()
        return evaluation

    def begin(self, step: int) -> None:
        """Note at which step `pe.fit` begins or goes on."""
        settings = self.settings
        self.done = step
        self.good = -1 if self.args.resume and settings.skip_nonfinite else step
        if self.args.resume and self.folder:
            path = self.folder / f"checkpoint_{step:08d}.safetensors"
            print(f"resumed from {path}", flush=True)
            self.metrics = read_metrics(self.folder, step // settings.epoch_steps)
        if self.folder:
            write_json(self.folder / "metrics.jsonl", *self.metrics)
        if step < settings.epochs * settings.epoch_steps:
            print("JAX compiles the training steps, for some seconds", flush=True)

    def note(self, segment: pe.Segment) -> bool:
        """Note the losses and the time of some steps; return whether to stop."""
        if self.done < 0:
            self.begin(segment.step)
            return False
        settings = self.settings
        measured = self.measured
        steps = settings.epoch_steps
        count = segment.losses.shape[1]
        before, self.done = self.done, segment.step
        measured.losses = np.concatenate([measured.losses, segment.losses], axis=1)
        measured.seconds += segment.seconds
        measured.pace.append(segment.seconds / count)
        self.segments += 1
        if self.segments == 3:  # the first one compiles
            epoch_seconds = measured.pace[-1] * steps
            print(f"training takes about {epoch_seconds:.0f} s an epoch", flush=True)
        images = settings.members * settings.batch_size  # of a step
        if self.advance_bar is None:
            what = f"epoch {before // steps + 1} of {settings.epochs}"
            bar = progress_bar(what, images * steps, images * (before % steps))
            self.advance_bar = self.bars.enter_context(bar)
        self.advance_bar(images * count)
        saved = self.done % max(1, round(self.args.save_every * steps)) == 0
        if self.args.workdir and saved and np.isfinite(segment.losses[:, -1]).any():
            self.good = self.done
        self.signals.listen()  # not earlier: while JAX compiles, nothing can be lost
        return self.look()

    def look(self) -> bool:
        """Return whether a process has received a signal."""
        return bool(self.signals.agree())

    def stopped(self) -> Failure:
        number = self.signals.agree()  # no process leaves before process 0 has saved
        text = "nothing is saved without --workdir; run it again"
        if self.args.workdir:
            text = f"the run is saved in {self.args.workdir}; --resume continues it"
        return Failure(f"{signal.Signals(number).name}: {text}", 128 + number)

    def diverged(self) -> Failure:
        text = f"no model is finite after step {self.done}; lower --learning-rate"
        if self.args.workdir and self.good >= 0:
            text += f" (the checkpoint of step {self.good} is good)"
        return Failure(text, status=3)

    def end_epoch(self, fitted: pe.Fitted) -> bool:
        """Evaluate after an epoch; return whether to stop."""
        self.bars.close()
        self.advance_bar = None
        self.evaluation = self.evaluate(fitted.state)
        self.measured = Measured(self.settings.members)
        return self.evaluation is None

    def evaluate(self, state: pe.TrainState) -> Evaluation | None:
        """Evaluate on the test images and on half as many training images.

        Returns the evaluation on the test images, or None if a signal has come.
        """
        data = self.data
        half = (len(data.test_images) + 1) // 2
        started = time.perf_counter()
        test = self.score(state, data.test_images, data.test_labels)
        seconds = time.perf_counter() - started
        train = self.score(state, data.train_images[:half], data.train_labels[:half])
        if test is None or train is None:
            return None
        epoch = self.done // self.settings.epoch_steps
        self.name_failed(test.report["member"], epoch)
        if epoch > max((m["epoch"] for m in self.metrics), default=0):  # not recorded
            self.record(epoch, train.report, test.report, seconds)
        return test

    def score(self, state, images: np.ndarray, labels: np.ndarray) -> Evaluation | None:
        """Predict images, and report on the members whose probabilities are finite.

        Returns None if a signal comes between blocks of images.  Raises Failure if no
        member is finite.
        """
        blocks = []
        members = self.settings.members
        with progress_bar("predicting", members * len(images)) as advance_bar:
            for block in self.trainer.predict_blocks(state, images):
                blocks.append(block)
                advance_bar(members * block.shape[1])
                if self.look():
                    return None
        probs = np.concatenate(blocks, axis=1)
        finite = np.isfinite(probs).all(axis=(1, 2))
        if not finite.any():
            raise self.diverged()
        report = em.ensemble_report(probs[finite], labels)
        scores = iter(report["member"])
        report["member"] = [next(scores) if ok else None for ok in finite]
        return Evaluation(report, probs)

    def name_failed(self, members: list, epoch: int) -> None:
        """Print each member that has failed, once, and the number of skipped steps.

        A member without scores has failed.  The losses are those that this process has
        seen: all of the epoch's, unless the run was resumed in the middle of it.
        """
        counts = np.sum(~np.isfinite(self.measured.losses), axis=1)
        for i, count in enumerate(counts):
            if members[i] is None and i not in self.failed:
                self.failed.add(i)
                text = f"notice: member {i} is not finite after epoch {epoch}"
                if count:
                    text += f"; its loss was not finite in {count} of the steps"
                print(text)
            elif self.settings.skip_nonfinite and count:
                print(
                    f"notice: member {i} skipped {count} steps of epoch {epoch} that "
                    "were not finite"
                )

    def record(self, epoch: int, train: dict, test: dict, test_seconds: float) -> None:
        """Write the epoch's metrics, and print its line."""
        nll = "negative_log_likelihood"

        def mean_loss(report):
            return float(np.mean([m[nll] for m in report["member"] if m]))

        settings = self.settings
        seconds = self.measured.seconds
        num_images = self.measured.losses.size * settings.batch_size
        metrics = {
            "epoch": epoch,
            "train_loss": mean_loss(train),
            "train_accuracy": train["ensemble"]["accuracy"],
            "test_loss": mean_loss(test),
            "test_accuracy": test["ensemble"]["accuracy"],
            "ensemble_test_loss": test["ensemble"][nll],
            "member_test_loss": [m and m[nll] for m in test["member"]],
            "member_test_accuracy": [m and m["accuracy"] for m in test["member"]],
            "train_seconds": seconds,
            "test_seconds": test_seconds,
            "member_images_per_second": num_images / seconds if seconds else None,
        }
        self.metrics.append(metrics)
        took = time.perf_counter() - self.measured.began
        left = None
        if self.measured.pace:
            # The median excludes a slow first segment, which JAX compiles.
            training = settings.epoch_steps * np.median(self.measured.pace)
            left = (settings.epochs - epoch) * (training + took - seconds)
        print_epoch(metrics, took, left)
        if self.folder:
            write_json(self.folder / "metrics.jsonl", *self.metrics)


@contextlib.contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable]:
    """Draw a loop's progress, on a terminal if tqdm is installed.

    Yields a function that advances the bar by a count of images.  An image counts once
    per member that trains on it or predicts it.
    """
    terminal = all(f is not None and f.isatty() for f in (sys.stdout, sys.stderr))
    if not (terminal and importlib.util.find_spec("tqdm")):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(
        desc=what,
        total=total,
        initial=done,
        leave=False,
        unit=" images",
        unit_scale=True,
        dynamic_ncols=True,
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Print warnings as lines of the script, but those of members, which it names."""

    def show(message, *place):
        print(f"train_mnist.py: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.filterwarnings("ignore", "members .* are not finite", UserWarning)
        warnings.showwarning = show
        yield


class Failure(Exception):
    """The end of a run: a message of one line, and an exit status."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def named(cause: Any, *errors: type, status: int = 2) -> Iterator[None]:
    """Turn these errors of a block into a Failure that names their cause."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, KeyError):
            reason += " is missing"
        raise Failure(f"{cause}: {reason}", status) from error


# ---------------------------------------------------------------------------------
# Report: the lines and tables that a run prints
# ---------------------------------------------------------------------------------


VERSIONS = {module.__name__: module.__version__ for module in (pe, jax, jaxlib, np)}
VERSIONS["python"] = sys.version.split()[0]

# The settings that a run's first line names.
RECIPE = (
    "network",
    "optimizer",
    "epochs",
    "batch_size",
    "learning_rate",
    "momentum",
    "schedule",
    "max_shift",
    "bootstrap",
    "skip_nonfinite",
    "at_once",
    "seed",
)


def describe(settings: Settings, data: Dataset, layout, full: pe.Layout) -> str:
    """Return a line about a run: its data, models, devices, recipe and versions.

    `full` is its layout if it used all devices that it may use.
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
    recipe = {name: getattr(settings, name) for name in RECIPE} | VERSIONS
    if settings.optimizer != "sgd":
        del recipe["momentum"]
    shown = [
        f"{name} {value}"
        for name, value in recipe.items()
        if value is not None and value is not False
    ]
    return f"{line}; {', '.join(shown)}"


def announce(settings: Settings, data: Dataset, layout, asked: int | None) -> None:
    """Print a line about the run, and notices about its devices and its steps.

    The notices name devices that stay idle, and steps that are too few.
    """
    wanted = asked or jax.device_count()
    full = pe.layout(layout.members, wanted, jax.process_count())
    print(describe(settings, data, layout, full), flush=True)
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


# ---------------------------------------------------------------------------------
# Folder of a run: metrics, report, checkpoints
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run's folder, and lock it for this process.  Raises Failure, OSError.

    The system releases the lock when the process ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    lock = os.open(folder / ".lock", flags, 0o644)
    with os.fdopen(lock, "r+", errors="replace") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(
                f"--workdir {folder} is in use by process {file.read(100).strip()}; "
                "wait for it, or choose another folder"
            ) from None
        file.truncate(0)
        print(os.getpid(), "on", socket.gethostname(), file=file, flush=True)
        yield


def clear(folder: Path, resume: bool) -> None:
    """Remove half-written files of a dead process; refuse earlier results."""
    half = re.compile(r"\.(checkpoint_\d+|config|metrics|report)\.\w+\.\w+\.tmp")
    for name in filter(half.fullmatch, os.listdir(folder)):
        os.unlink(folder / name)
    results = [folder / "report.json", folder / "metrics.jsonl"]
    found = [path for path in results if path.exists() and path.stat().st_size]
    found += [checkpoint.path for checkpoint in checkpoints(folder)]
    if found and not resume:
        raise Failure(
            f"--workdir {folder} holds {found[0].name} of an earlier run; continue "
            "that run (--resume), choose another folder, or remove it"
        )


def write_json(path: Path, *values: dict, indent: int | None = None) -> None:
    """Write a file of JSON, one value after another."""
    texts = [json.dumps(x, indent=indent, allow_nan=False) + "\n" for x in values]
    with pe.replace_file(path) as file:
        file.write("".join(texts).encode())


@contextlib.contextmanager
def read_json(path: Path) -> Iterator[dict]:
    """Yield a JSON file's object; errors in the block become a Failure naming it."""
    with named(path, OSError, ValueError, TypeError, KeyError, RecursionError, Failure):
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("the file does not hold a JSON object, {...}")
        yield found


def read_flag(name: str, value: Any) -> Any:
    """Return a flag's value in config.json, checked as on the command line."""
    kind = FLAGS[name]
    text = str(value)
    with named(f"argument {flag(name)}", ValueError, argparse.ArgumentTypeError):
        if kind is bool:
            if isinstance(value, bool):
                return value
            raise ValueError(f"expected true or false, not {text!r}")
        if callable(kind):
            return kind(text)
        if text in kind:
            return text
        raise ValueError(
            f"invalid choice: {text!r} (choose from {', '.join(map(repr, kind))})"
        )


def read_config(folder: Path) -> tuple[Settings, dict]:
    """Return the settings and the values of the flags that config.json has.

    The values are checked as flags are.  Raises Failure.
    """
    with read_json(folder / "config.json") as config:
        flags = {
            name: read_flag(name, config[name])
            for name in FLAGS
            if config.get(name) is not None
        }
        values = {name: flags.get(name, config[name]) for name in Settings._fields}
        return Settings(**values), flags


class Checkpoint(NamedTuple):
    step: int
    path: Path


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the files named as checkpoints, newest first."""
    name = re.compile(r"checkpoint_(\d{8,18})\.safetensors")
    matches = map(name.fullmatch, os.listdir(folder))
    found = [Checkpoint(int(m[1]), folder / m[0]) for m in matches if m]
    return sorted(found, reverse=True)


def load_members(path: Path, step: int, like, settings: Settings) -> pe.TrainState:
    """Load the checkpoint of a step.  Raises ValueError, OSError.

    The members' optimizers have counted exactly `step` steps, or fewer if the run
    skips steps, which they do not count.
    """
    state = pe.load(path, like)
    counted = state.opt_state.num_steps  # [K]
    if counted.max() > step or (counted.min() < step and not settings.skip_nonfinite):
        raise ValueError(f"{path}: holds step {counted.max()}, not step {step}")
    return state


def read_metrics(folder: Path, epochs: int) -> list[dict]:
    """Return the lines of epochs up to `epochs`; warn of each damaged line."""
    path = folder / "metrics.jsonl"
    metrics = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            if found["epoch"] <= epochs:
                metrics.append(found)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            print(
                f"train_mnist.py: warning: {path}, line {number}: {error}",
                file=sys.stderr,
            )
    return metrics


class Trained(NamedTuple):
    """The models of a finished run, which predict from images uint8 [N, H, W(, 1)]."""

    trainer: pe.Trainer
    state: pe.TrainState
    classes: np.ndarray  # [C], so that classes[probs.argmax(axis=-1)] are labels
    config: dict  # the settings in config.json

    def predict(self, images: Any) -> np.ndarray:
        """Return the ensemble's probabilities [N, C]."""
        return self.trainer.predict(self.state, self._pixels(images))

    def predict_members(self, images: Any) -> np.ndarray:
        """Return each member's probabilities [K, N, C]."""
        return self.trainer.predict_members(self.state, self._pixels(images))

    def _pixels(self, images: Any) -> np.ndarray:
        images = np.asarray(images)
        height, width, channels = self.config["image_shape"]
        shapes = [(height, width), (height, width, channels)]
        if images.dtype != np.uint8 or images.shape[1:] not in shapes:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; expected uint8 "
                f"[N, {height}, {width}], pixels from 0 to 255 (x in [0, 1] is "
                "np.uint8(np.rint(255 * x)), one image is images[None])"
            )
        return images.reshape(-1, height, width, channels)


def load_run(workdir: str | os.PathLike, devices: int | None = None) -> Trained:
    """Load the models of a finished run from its folder, which it does not change.

    `devices` is the largest number of devices to use, by default all.  Members that the
    run's report excludes, since they are not finite, are left out.

    Raises ValueError for a folder without a run, for a run that is not finished or
    whose newest checkpoint is damaged, and for more devices than there are.  Predicting
    raises ValueError for images that are not bytes, or of another size than the
    training images.
    """
    folder = Path(workdir)
    try:
        settings, _ = read_config(folder)
        like = make_trainer(settings, 1).like()
        num_steps = settings.epochs * settings.epoch_steps
        newest = max(checkpoints(folder), default=Checkpoint(None, folder))
        if newest.step != num_steps:
            raise ValueError(
                f"its newest checkpoint is step {newest.step} of {num_steps}"
            )
        with read_json(folder / "report.json") as report:
            scored = [isinstance(scores, dict) for scores in report["member"]]
            if len(scored) != settings.members or not any(scored):
                raise ValueError(
                    f"holds scores of {sum(scored)} of {len(scored)} members; "
                    f"config.json has {settings.members} members"
                )
        state = load_members(newest.path, num_steps, like, settings)
    except (OSError, ValueError, TypeError, Failure) as error:
        raise ValueError(
            f"{folder} holds no finished run: {error}; continue a run by: python "
            f"train_mnist.py --resume --workdir {folder}"
        ) from error
    trainer = make_trainer(settings._replace(members=sum(scored)), devices)
    state = trainer.scatter(jax.tree.map(lambda x: x[np.array(scored)], state))
    return Trained(trainer, state, np.array(settings.classes), settings._asdict())


# ---------------------------------------------------------------------------------
# Processes, and the signals that they receive
# ---------------------------------------------------------------------------------


class Signals:
    """SIGTERM and SIGINT, as requests that training and evaluation look for.

    They are requests between `listen` and `close`.  Otherwise, while there is nothing
    to save, they end the process at once.  A second SIGINT always does.  A signal that
    the process was started to ignore is ignored throughout.
    """

    def __init__(self):
        self.received = 0  # the number of the last signal
        self.replaced = {}  # handlers, while it listens

    def listen(self) -> None:
        if self.replaced or threading.current_thread() is not threading.main_thread():
            return
        for number in signal.SIGINT, signal.SIGTERM:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.replaced[number] = signal.signal(number, self.note)

    def note(self, number: int, frame: Any) -> None:
        self.received = number
        if signal.SIGINT in self.replaced:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def close(self) -> None:
        while self.replaced:
            signal.signal(*self.replaced.popitem())

    def agree(self) -> int:
        """Return the signal that any process has received, or 0."""
        return int(pe.gather_processes(np.int32(self.received)).max())


def connect(args: argparse.Namespace) -> None:
    """Join the run's processes, if there are several.  Raises Failure."""
    if not (args.distributed or args.coordinator):
        return
    where = f"--coordinator {args.coordinator}" if args.coordinator else "--distributed"

    def give_up():  # JAX would abort with a trace of C++
        text = (
            f"train_mnist.py: error: {where}: the processes did not meet within "
            f"{args.connect_timeout} seconds; start each with its own id and the same "
            "number of processes\n"
        )
        os.write(2, text.encode())
        os._exit(1)

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(args.connect_timeout, give_up)
    handler = signal.getsignal(signal.SIGTERM)
    with named(where, OSError, ValueError, RuntimeError, status=1):
        timer.start()
        try:
            if args.process_id == 0:  # at a busy port JAX would end without a message
                port = int(args.coordinator.rpartition(":")[2])
                socket.create_server(("", port)).close()
            jax.distributed.initialize(
                args.coordinator,
                args.num_processes,
                args.process_id,
                initialization_timeout=args.connect_timeout + 60,
                heartbeat_timeout_seconds=30,
            )
        finally:
            timer.cancel()
    signal.signal(signal.SIGTERM, handler)  # JAX has set its own
    count = jax.process_count()
    if args.num_processes not in (None, count):
        raise Failure(
            f"--num-processes {args.num_processes}: the process at {args.coordinator} "
            f"expects {count}"
        )


def share(tree: Any) -> Any:
    """Return process 0's tree of arrays, of at most 32 bits, in every process."""
    return jax.tree.map(lambda x: pe.gather_processes(x)[0], tree)


OTHER_RUN = (
    "a run keeps its settings, also its epochs: leave out the flags that differ, or "
    "start a new run in another --workdir"
)


def check_same(who: str, ours: Settings, theirs: Settings, remedy=OTHER_RUN) -> None:
    """Raise Failure for the first of our settings that differs in another run."""
    for name, value, other in zip(Settings._fields, ours, theirs):
        if value != other:
            raise Failure(f"{who}: {name} is {value} here, {other} there; {remedy}")


def check_same_run(settings: Settings) -> None:
    """Raise Failure in a process whose settings differ from process 0's."""
    text = json.dumps(settings).ljust(8192).encode()  # one length in all processes
    first = Settings(*json.loads(share(np.frombuffer(text, np.uint8)).tobytes()))
    who = f"--process-id {jax.process_index()}"
    check_same(who, settings, first, "start it with the flags of process 0")


# ---------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------


MOST = 2**31 - 1  # the largest number that JAX counts to


def checked(kind: Callable, expected: str, holds: Callable) -> Callable:
    """Make a type for argparse: values of `kind` for which `holds` is true."""

    def read(text: str):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")

    return read


def integer(low: int, high: int = MOST) -> Callable:
    return checked(int, f"an integer from {low} to {high}", lambda n: low <= n <= high)


def is_address(text: str) -> bool:
    match = re.fullmatch(r".+:([0-9]{1,5})", text)
    return bool(match) and 0 < int(match[1]) < 65536


address = checked(str, "HOST:PORT, with a port from 1 to 65535", is_address)
nonnegative = checked(float, "a finite number from 0 on", lambda x: 0 <= x < math.inf)
positive = checked(float, "a number above 0, at most 1e38", lambda x: 0 < x <= 1e38)
below_one = checked(float, "a number from 0 on, below 1", lambda x: 0 <= x < 1)

at_least_zero = integer(0)
at_least_one = integer(1)

# The type or the choices of each flag's value; a bool flag takes no value.
FLAGS = {
    "mode": ("ensemble", "sync"),
    "members": at_least_one,
    "devices": integer(1, 1024),
    "at_once": at_least_one,
    "network": NETWORKS,
    "optimizer": LEARNING_RATES,
    "epochs": at_least_zero,
    "batch_size": at_least_one,
    "learning_rate": nonnegative,
    "momentum": below_one,
    "schedule": SCHEDULES,
    "max_shift": at_least_zero,
    "bootstrap": bool,
    "skip_nonfinite": bool,
    "seed": integer(0, 2**32 - 1),
    "data": SOURCES,
    "data_dir": lambda text: Path(text).absolute(),
    "train_size": at_least_one,
    "workdir": Path,
    "plot": bool,
    "save_every": positive,
    "keep": at_least_one,
    "resume": bool,
    "coordinator": address,
    "num_processes": integer(1, 2**16),
    "process_id": at_least_zero,
    "distributed": bool,
    "connect_timeout": integer(1, 24 * 60 * 60),
}
# The other defaults are in `Settings`, `parse_arguments` and `prepare`, or None.
DEFAULTS = {"data": "auto", "save_every": 1.0, "keep": 3, "connect_timeout": 60}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Failure(message)

    def format_help(self):
        return __doc__


def given_flags(argv: Sequence[str] | None) -> dict:
    """Return the values of the given flags, by name.  Raises Failure."""
    parser = Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, kind in FLAGS.items():
        if kind is bool:
            parser.add_argument(flag(name), action="store_true")
        elif callable(kind):
            parser.add_argument(flag(name), type=kind)
        else:
            parser.add_argument(flag(name), choices=tuple(kind))
    return vars(parser.parse_args(argv))


def resumed_flags(given: dict) -> dict:
    """Return the flags of the run to resume.

    Raises Failure if a given flag would change a setting of that run.
    """
    folder = given["workdir"]
    # Only process 0 of several processes must have it.
    others = given.get("process_id") or "distributed" in given
    if others and not (folder / "config.json").exists():
        return {}
    settings, flags = read_config(folder)
    changes = {name: x for name, x in given.items() if name in Settings._fields}
    check_same(f"--resume from {folder}", settings._replace(**changes), settings)
    return flags


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; take other flags from a resumed run, or the defaults.

    A flag without a value is None.  Raises Failure for a value out of range, and for
    flags that exclude each other.
    """
    given = given_flags(argv)
    for name in ("plot", "save_every", "keep", "resume"):
        if name in given and "workdir" not in given:
            raise Failure(f"{flag(name)} needs --workdir, the folder of the run")
    kept = resumed_flags(given) if "resume" in given else {}
    defaults = dict.fromkeys(FLAGS) | DEFAULTS | {"data_dir": default_folder()}
    args = argparse.Namespace(**(defaults | kept | given))
    if args.mode == "sync" and args.members not in (None, 1):
        raise Failure(f"--members {args.members}: --mode sync trains one model")
    optimizer = args.optimizer or RECIPES[args.network or "cnn"].optimizer
    if "momentum" in given and optimizer == "adam":
        raise Failure("--momentum: --optimizer adam has no momentum; leave it out")
    if "data_dir" in given and args.data == "generated":
        raise Failure("--data-dir: --data generated reads no files; leave it out")
    missing = [args.coordinator, args.num_processes, args.process_id].count(None)
    if missing in (1, 2) or (args.distributed and missing == 0):
        raise Failure(
            "--coordinator, --num-processes and --process-id: give all three, or "
            "--distributed alone"
        )
    if args.coordinator and args.process_id >= args.num_processes:
        raise Failure(
            f"--process-id {args.process_id}: expected 0 to {args.num_processes - 1}"
        )
    return args


def data_settings(data: Dataset) -> dict:
    """Return the settings that the data determine, as JSON holds them."""
    arrays = data.train_images, data.train_labels, data.test_images, data.test_labels
    return {
        "dataset_sha256": hashlib.sha256(b"".join(arrays)).hexdigest(),
        "image_shape": list(data.train_images.shape[1:]),
        "classes": data.classes.tolist(),
    }


def settle(args: argparse.Namespace, data: Dataset) -> Settings:
    """Return the recipe, changed by the flags, with defaults that depend on the data.

    It still lacks the members and `data_settings`.  Raises Failure for flags that do
    not fit the data.
    """
    given = {
        name: value
        for name, value in vars(args).items()
        if name in Settings._fields and value is not None
    }
    recipe = RECIPES[given.get("network", "cnn")]
    num_images = len(data.train_images)
    side = min(data.train_images.shape[1:3])
    derived = {
        "learning_rate": LEARNING_RATES[given.get("optimizer", recipe.optimizer)],
        "max_shift": round(recipe.max_shift * side / SIDE),
        "train_size": num_images,
    }
    settings = recipe._replace(**(derived | given))
    size = settings.train_size
    most_epochs = MOST // (settings.epoch_steps or 1)
    limits = {
        "train_size": (num_images, f"{data.name} has {num_images} training images"),
        "batch_size": (size, f"there are {size} training images"),
        "epochs": (most_epochs, f"JAX can count {most_epochs} such epochs"),
        "max_shift": (side, f"an image side has {side} pixels"),
    }
    for name, (most, why) in limits.items():
        value = getattr(settings, name)
        if value > most:
            raise Failure(f"{flag(name)} {value}: {why}")
    return settings


def prepare(args: argparse.Namespace) -> tuple[Settings, Dataset, pe.Trainer]:
    """Load the data, settle all settings, and make the trainer.

    Raises Failure for flags that do not fit the data or the devices.
    """
    with named("--data-dir", ValueError):
        data = load_data(args.data, args.data_dir)
    settings = settle(args, data)
    size = settings.train_size
    images = data.train_images[:size]
    data = data._replace(train_images=images, train_labels=data.train_labels[:size])
    layout = lay_out(settings, args.devices)
    settings = settings._replace(members=layout.members, **data_settings(data))
    trainer = make_trainer(settings, layout.devices)
    with named(f"--network {settings.network}", ValueError):  # too small images
        params, model_state = jax.eval_shape(trainer.init_fn, jax.random.key(0))
        jax.eval_shape(trainer.apply_fn, params, model_state, images[:1])
    return settings, data, trainer


def lay_out(settings: Settings, asked: int | None) -> pe.Layout:
    """Lay the models over the devices, by default as many as there are.

    Raises Failure for flags that do not fit the devices.
    """
    processes = jax.process_count()
    here = jax.local_device_count()
    kind = jax.default_backend().upper()
    devices = asked or here
    if devices > here or (processes > 1 and devices < here):
        text = f"--devices {asked}: there are {here} {kind} devices"
        if processes > 1:
            text += ", and each of several processes uses all of its own"
        raise Failure(text)
    if processes > 1:
        devices = jax.device_count()
    fewest = 2 if kind == "CPU" else 5  # members of an ensemble by default
    members = settings.members or max(devices, fewest)
    if settings.mode == "sync":
        members = 1
    replicas = pe.layout(members, devices, processes).replicas
    batch = settings.batch_size
    if processes == 1 and not asked:  # the most replicas that divide the batch
        replicas = max(n for n in range(1, replicas + 1) if batch % n == 0)
        devices = min(devices, members * replicas)
    if batch % replicas:
        text = (
            f"--batch-size {batch}: a batch of this size does not split over a model's "
            f"{replicas} devices; use a multiple of {replicas}, for example "
            f"{max(batch // replicas, 1) * replicas}"
        )
        if processes == 1:
            text += ", or leave out --devices"
        raise Failure(text)
    return pe.layout(members, devices, processes)


def train_and_report(args: argparse.Namespace) -> None:
    """Join the processes, take the folder, train, report.  Raises Failure."""
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise Failure("--plot needs matplotlib: python -m pip install matplotlib")
    pe.use_cpu_devices(args.devices)
    connect(args)
    with contextlib.ExitStack() as stack:
        folder = None
        if jax.process_index():  # every process has the results; only process 0 prints
            stack.enter_context(contextlib.redirect_stdout(None))
        else:
            folder = args.workdir
        if folder:
            stack.enter_context(locked(folder))
            clear(folder, args.resume)
        settings, data, trainer = prepare(args)
        announce(settings, data, trainer.layout, args.devices)
        run = Run(args, settings, data, trainer, folder)
        with contextlib.closing(run.signals), warnings_in_lines():
            evaluation = run.train()
        report = {
            "dataset": data.name,
            "test_examples": len(data.test_images),
            "members": settings.members,
            "failed": sorted(run.failed),
            **evaluation.report,
            "config": settings._asdict() | trainer.layout._asdict(),
            "versions": VERSIONS,
        }
        print_report(report)
        if folder:
            write_json(folder / "report.json", report, indent=2)
            if args.plot:
                draw_report(
                    folder / "report.png", run.metrics, report, evaluation.probs, data
                )


def explain(error: Exception, several: bool) -> Failure:
    """Return the Failure that an error of the system, or of JAX, means.

    Raises other errors, which are faults of this program.
    """
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        text = (
            "out of memory; try fewer --members on more --devices, or a smaller "
            f"--batch-size: {text}"
        )
    elif type(error) is not RuntimeError:  # it is one of JAX's
        if not several:
            raise error
        text = f"lost contact with another process: {text}"
    return Failure(text, status=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, after one line on any error."""
    several = False
    try:
        args = parse_arguments(argv)
        several = bool(args.coordinator or args.distributed)
        train_and_report(args)
        return 0
    except Failure as error:
        failure = error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        failure = Failure(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError, ValueError) as error:
        failure = explain(error, several)
    status = failure.status
    text = f"error: {failure}" if status < 128 else str(failure)
    print(f"train_mnist.py: {text}", file=sys.stderr, flush=True)
    if several and status < 128:
        os._exit(status)  # JAX would wait for processes that wait for this one
    return status


if __name__ == "__main__":
    if sys.stdout:  # a path that the encoding lacks must not end the run
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
