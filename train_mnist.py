"""Train convolutional networks on MNIST: an ensemble of any size, or one model.

    python train_mnist.py --mode ensemble     train members, average their probabilities
    python train_mnist.py --members 8         train eight members, on any devices
    python train_mnist.py --mode sync         train one model, average its gradients

This file has the flags and settings, the networks, the trainer and the command line, in
the order in which they are used.  `mnist_data.py` has the data, `mnist_run.py` what a
run needs beside (folder, resume, signals, processes), `mnist_report.py` what it prints
and draws.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    # Until there is something to save, Ctrl-C ends the process at once, also while JAX
    # loads or compiles.  A parent's request to ignore it is kept.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import numpy as np

import pjax_ensemble as pe
from mnist_data import SIDE, SOURCES, Dataset, default_folder, load_data
from mnist_report import VERSIONS, announce, draw_report, print_report
from mnist_run import (
    MOST,
    Checkpoint,
    Failure,
    Flag,
    Run,
    address,
    at_least_one,
    at_least_zero,
    below_one,
    check_known,
    check_same,
    check_same_processes,
    checkpoints,
    clear,
    connect,
    explain,
    flag,
    given_flags,
    integer,
    load_members,
    locked,
    named,
    nonnegative,
    of_processes,
    positive,
    read_json,
    warnings_in_lines,
    write_json,
)

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


class Descent(NamedTuple):
    make: Callable  # (learning rate, **options) -> optimizer
    rate: float  # by default
    options: Sequence[str] = ()  # the flags that it takes


OPTIMIZERS = {
    "sgd": Descent(pe.sgd, 0.15, ["momentum"]),
    "adam": Descent(pe.adam, 0.001),
    "adamw": Descent(pe.adamw, 0.001, ["weight_decay"]),
}
SCHEDULES = {
    "constant": lambda peak, num_steps: peak,
    "linear": pe.linear_schedule,
    "cosine": pe.cosine_schedule,
}


# ---------------------------------------------------------------------------------
# Flags and settings
# ---------------------------------------------------------------------------------


SECTIONS = {
    "models and devices": [
        Flag(
            "mode",
            ("ensemble", "sync"),
            "ensemble: train independent members and average their "
            "probabilities; sync: train one model, divide each batch over the "
            "devices and average the gradients",
            default="ensemble",
            setting=True,
        ),
        Flag(
            "members",
            at_least_one,
            "number of members of the ensemble; members can share a device, and "
            "devices can share a member (default: one per device, but at least "
            "two on a CPU and five on an accelerator)",
            value="K",
            setting=True,
        ),
        Flag(
            "devices",
            integer(1, 1024),
            "number of devices that each process uses; on a CPU, the number of "
            "virtual devices (default: all devices, or fewer where the batch "
            "does not split over a member's replicas; on a CPU, one device per "
            "core)",
            value="D",
            local=True,
        ),
        Flag(
            "at_once",
            at_least_one,
            "number of members on a device that are computed together (default: "
            "1 on a CPU, where more are slower; on an accelerator all, or as "
            "many as fit in its memory)",
            value="N",
            setting=True,
        ),
    ],
    "training": [
        Flag(
            "network",
            NETWORKS,
            "cnn: the network of Flax's ensembling guide; batchnorm: the "
            "network of Keras's guide to distributed training with JAX, with "
            "batch normalization and dropout",
            default="cnn",
            setting=True,
        ),
        Flag(
            "optimizer",
            OPTIMIZERS,
            "sgd: stochastic gradient descent with momentum; adam: Adam; adamw: "
            "Adam with decoupled weight decay (default: sgd, or adam with "
            "batchnorm)",
            setting=True,
        ),
        Flag(
            "epochs",
            at_least_zero,
            "number of passes over the training images, fixed when a run "
            "starts; 0 reports the initial models (default: 5, or 2 with "
            "batchnorm)",
            value="N",
            setting=True,
        ),
        Flag(
            "batch_size",
            at_least_one,
            "number of examples per step of one model, over all its replicas",
            default=64,
            value="B",
            setting=True,
        ),
        Flag(
            "learning_rate",
            nonnegative,
            "learning rate of the optimizer, or the peak of the schedule "
            "(default: 0.15 with sgd, 0.001 with adam and adamw)",
            value="RATE",
            setting=True,
        ),
        Flag(
            "momentum",
            below_one,
            "share of the velocity that a step of sgd keeps",
            default=0.9,
            value="SHARE",
            setting=True,
        ),
        Flag(
            "weight_decay",
            nonnegative,
            "share of the weights that a step of adamw subtracts, times the "
            "learning rate",
            default=0.0001,
            value="SHARE",
            setting=True,
            added=True,
        ),
        Flag(
            "schedule",
            SCHEDULES,
            "learning rate over the run; constant: the same at every step; "
            "linear or cosine: it rises over the first 15% of the steps and "
            "then falls to 0, in straight lines or in half cosines (default: "
            "linear, or constant with batchnorm)",
            setting=True,
        ),
        Flag(
            "max_shift",
            at_least_zero,
            "largest random shift of a training image along each axis, in "
            "pixels (default: 2 for images of side 28, in proportion for other "
            "sizes, or 0 with batchnorm)",
            value="PIXELS",
            setting=True,
        ),
        Flag(
            "bootstrap",
            bool,
            "train each member on its own resample of the training images: as "
            "many images, drawn with replacement (default: every member trains "
            "on all images, in its own order)",
            default=False,
            setting=True,
        ),
        Flag(
            "skip_nonfinite",
            bool,
            "skip each step whose loss or gradient is not finite, on all "
            "replicas together (default: no step is skipped; the run stops at "
            "its last good checkpoint when no member is finite)",
            default=False,
            setting=True,
        ),
        Flag(
            "seed",
            integer(0, 2**32 - 1),
            "seed of the random numbers; member i depends on S and i alone",
            default=0,
            value="S",
            setting=True,
        ),
    ],
    "data": [
        Flag(
            "data",
            SOURCES,
            "mnist: MNIST from --data-dir, downloaded if missing; generated: "
            "digits that mnist_data.py draws; auto: MNIST, or generated digits "
            "if MNIST cannot be downloaded",
            default="auto",
        ),
        Flag(
            "data_dir",
            lambda text: Path(text).absolute(),
            "folder of MNIST's four files, gzipped or plain, or of another data "
            "set in files of the same format and names (default: $MNIST_DIR if "
            "it is set, otherwise pjax_ensemble in the user's cache folder)",
            value="DIR",
            local=True,
        ),
        Flag(
            "train_size",
            at_least_one,
            "number of training images to use, the first ones (default: all)",
            value="N",
            setting=True,
        ),
    ],
    "output": [
        Flag(
            "workdir",
            Path,
            "folder for metrics.jsonl, report.json and the checkpoints "
            "(default: nothing is written)",
            value="DIR",
            local=True,
        ),
        Flag(
            "plot",
            bool,
            "draw report.png in --workdir; needs matplotlib (default: off)",
            default=False,
        ),
        Flag(
            "save_every",
            positive,
            "number of epochs between checkpoints, whole or fractional",
            default=1.0,
            value="EPOCHS",
        ),
        Flag(
            "keep",
            at_least_one,
            "number of checkpoints to keep, the newest ones",
            default=3,
            value="N",
        ),
        Flag(
            "resume",
            ("auto",),
            "continue the run in --workdir from its newest valid checkpoint, on "
            "any devices; the run's other flags are read from the folder, and "
            "flags that determine its results cannot change; auto: start the run "
            "where the folder has no checkpoint yet (default: start a new run)",
            default=False,
            alone=True,
        ),
    ],
    "several processes, all started with the same flags except --process-id; only\n"
    "process 0 prints the results and writes files": [
        Flag(
            "coordinator",
            address,
            "address of process 0 and a free port there, where the processes "
            "meet (default: none, for a single process)",
            value="HOST:PORT",
            local=True,
        ),
        Flag(
            "num_processes",
            integer(1, 2**16),
            "number of processes (default: 1)",
            value="P",
            local=True,
        ),
        Flag(
            "process_id",
            at_least_zero,
            "number of this process, from 0 to P - 1 (default: 0)",
            value="I",
            local=True,
        ),
        Flag(
            "distributed",
            bool,
            "let JAX find the processes, under Slurm, Open MPI or on TPUs, in "
            "place of the three flags above (default: off)",
            default=False,
            local=True,
        ),
        Flag(
            "connect_timeout",
            integer(1, 24 * 60 * 60),
            "number of seconds to wait for the other processes",
            default=60,
            value="SECONDS",
            local=True,
        ),
    ],
}
FLAGS = {each.name: each for flags in SECTIONS.values() for each in flags}


def help_text() -> str:
    parts = [__doc__.partition("\nThis file")[0]]
    for title, flags in SECTIONS.items():
        parts.append("\n".join([f"{title}:", *(each.text() for each in flags)]) + "\n")
    return "\n".join(parts)


SETTINGS = {name: each.default for name, each in FLAGS.items() if each.setting}
OF_DATA = {"dataset_sha256": "", "image_shape": (), "classes": ()}  # (H, W, C) and [C]
SETTINGS |= OF_DATA


_Settings = collections.namedtuple("_Settings", SETTINGS, defaults=SETTINGS.values())


class Settings(_Settings):
    """All that determines a run's results, on any devices; config.json holds it.

    A recipe lacks the members, which devices determine, and what the data determine.
    """

    @property
    def epoch_steps(self) -> int:
        """Return the number of steps per epoch, whose batches are all full."""
        return self.train_size // self.batch_size


# The cnn's recipe was chosen on held-out training images: see docs/mnist.md.
# The batchnorm recipe is the one in Keras's guide.
RECIPES = {
    "cnn": Settings(
        optimizer="sgd", epochs=5, learning_rate=0.15, schedule="linear", max_shift=2
    ),
    "batchnorm": Settings(
        network="batchnorm",
        optimizer="adam",
        epochs=2,
        learning_rate=0.001,
        schedule="constant",
        max_shift=0,
    ),
}


def recipe_of(settings: Settings) -> dict:
    """Return the settings that a run's first line names."""
    others = {"mode", "members", "train_size", *OF_DATA}
    for name, descent in OPTIMIZERS.items():
        if name != settings.optimizer:
            others |= {*descent.options}
    return {name: x for name, x in settings._asdict().items() if name not in others}


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
    make, _, options = OPTIMIZERS[settings.optimizer]
    optimizer = make(rate, **{name: getattr(settings, name) for name in options})
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
# Command line: from flags to a trained run
# ---------------------------------------------------------------------------------


def read_config(folder: Path) -> tuple[Settings, dict]:
    """Return the settings and the values of the flags that config.json has.

    The values are checked as flags are.  A setting that was added later has the value
    that older runs had.  Raises Failure.
    """
    path = folder / "config.json"
    with read_json(path) as config:
        older = {name: x.default for name, x in FLAGS.items() if x.added}
        config = older | config
        flags = {
            name: each.read(config[name])
            for name, each in FLAGS.items()
            if config.get(name) is not None
        }
        values = {name: flags.get(name, config[name]) for name in Settings._fields}
    check_known(path, config, {*FLAGS, *values, "dataset"})
    return Settings(**values), flags


def resumed_flags(given: dict) -> dict | None:
    """Return the flags of the run to resume, or None if there is none to resume.

    Raises Failure if a given flag would change a setting of that run.
    """
    folder = given["workdir"]
    started = (folder / "config.json").exists()
    if given["resume"] == "auto" and not (started and checkpoints(folder)):
        return None
    # Only process 0 of several processes must have it.
    others = given.get("process_id") or "distributed" in given
    if others and not started:
        return {}
    settings, flags = read_config(folder)
    changes = {name: x for name, x in given.items() if name in Settings._fields}
    changed = settings._replace(**changes)
    check_same(f"--resume from {folder}", changed._asdict(), settings._asdict())
    return flags


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; take other flags from a resumed run, or the defaults.

    A flag without a value is None; `given` has the flags of the command line alone.
    Raises Failure for a value out of range, and for flags that exclude each other.
    """
    given = given_flags(argv, FLAGS.values(), help_text())
    for name in ("plot", "save_every", "keep", "resume"):
        if name in given and "workdir" not in given:
            raise Failure(f"{flag(name)} needs --workdir, the folder of the run")
    kept = resumed_flags(given) if "resume" in given else None
    defaults = {name: None if x.setting else x.default for name, x in FLAGS.items()}
    defaults["data_dir"] = default_folder()
    flags = defaults | (kept or {}) | given | {"resume": kept is not None}
    args = argparse.Namespace(**flags, given=given)
    if args.mode == "sync" and args.members not in (None, 1):
        raise Failure(f"--members {args.members}: --mode sync trains one model")
    optimizer = args.optimizer or RECIPES[args.network or "cnn"].optimizer
    for other in OPTIMIZERS.values():
        for name in other.options:
            if name in given and name not in OPTIMIZERS[optimizer].options:
                raise Failure(
                    f"{flag(name)}: --optimizer {optimizer} has no {name}; leave it out"
                )
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


def with_flags_of_process_0(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with process 0's in place of all but `local` ones.

    Raises Failure if a process was given another value of such a flag.
    """
    names = [name for name, each in FLAGS.items() if not each.local]
    flags = {name: getattr(args, name) for name in names}
    given = {name: args.given[name] for name in names if name in args.given}
    given["workdir"] = args.workdir is not None
    all_given = of_processes(given)
    first = of_processes({**flags, "data_dir": str(args.data_dir)})[0]
    check_same_processes(all_given, first | all_given[0])
    data_dir = args.data_dir
    if args.resume and "data_dir" not in args.given:
        data_dir = Path(first["data_dir"])
    return argparse.Namespace(**(vars(args) | first | {"data_dir": data_dir}))


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
        "learning_rate": OPTIMIZERS[given.get("optimizer", recipe.optimizer)].rate,
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


def train_and_report(args: argparse.Namespace) -> None:
    """Join the processes, take the folder, train, report.  Raises Failure."""
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise Failure("--plot needs matplotlib: python -m pip install matplotlib")
    pe.use_cpu_devices(args.devices)
    connect(args)
    args = with_flags_of_process_0(args)
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
        announce(settings, recipe_of(settings), data, trainer.layout, args.devices)
        if folder and args.resume:
            there, _ = read_config(folder)
            was = there._asdict()
            check_same(f"--resume from {folder}", settings._asdict(), was)
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


# ---------------------------------------------------------------------------------
# A finished run, to predict with
# ---------------------------------------------------------------------------------


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


if __name__ == "__main__":
    if sys.stdout:  # a path that the encoding lacks must not end the run
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
