"""Train convolutional networks on MNIST: an ensemble of any size, or one model.

    python train_mnist.py --mode ensemble     a member a device, probabilities averaged
    python train_mnist.py --members 8         so many members, on whatever devices
    python train_mnist.py --mode sync         one model, gradients averaged

The order of this file is the order of the data: recipe, data, training, report.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import http.client
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import pjax_ensemble as pe


class Recipe(NamedTuple):
    """What to train, and how."""

    network: str
    optimizer: str
    epochs: int
    batch_size: int  # examples a step of one model, over all its replicas
    learning_rate: float  # the schedule's peak
    momentum: float  # of sgd
    schedule: str
    max_shift: int  # pixels by which training images move at random
    bootstrap: bool  # each member trains on a resample of its own


# Of the cnn, chosen on held-out training images, as benchmarks/recipe.py measures; of
# the other network, those of the guide that it comes from.
RECIPES = {
    "cnn": Recipe("cnn", "sgd", 5, 64, 0.15, 0.9, "linear", 2, False),
    "batchnorm": Recipe("batchnorm", "adam", 2, 64, 1e-3, 0.9, "constant", 0, False),
}
LEARNING_RATES = {recipe.optimizer: recipe.learning_rate for recipe in RECIPES.values()}

SCHEDULES = {
    "constant": lambda peak, num_steps: peak,
    "linear": pe.linear_schedule,
    "cosine": pe.cosine_schedule,
}


class Network(NamedTuple):
    init: Callable  # key -> (params, model_state)
    logits: Callable  # (params, model_state, images, key=None) -> (logits, model_state)


NETWORKS = {
    "cnn": Network(
        lambda key: (pe.cnn_init(key), ()),
        lambda params, _, images, key=None: (pe.cnn(params, images), ()),
    ),
    "batchnorm": Network(pe.batch_norm_cnn_init, pe.batch_norm_cnn),
}


# ---------------------------------------------------------------------------------
# Data: MNIST's four files, from a folder or a mirror
# ---------------------------------------------------------------------------------


class DataError(Exception):
    """A data set that cannot be had; the message says which file and why."""


class DownloadError(DataError):
    """A file that is missing, and that no mirror gives."""


class Dataset(NamedTuple):
    name: str
    train_images: np.ndarray  # uint8 [N, 28, 28, 1]
    train_labels: np.ndarray  # int32 [N]
    test_images: np.ndarray
    test_labels: np.ndarray


class IdxFile(NamedTuple):
    name: str
    num_dims: int
    num_bytes: int  # of MNIST's own file, uncompressed
    sha256: str  # of the same, since mirrors differ in their gzip wrapping


MNIST_FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        3,
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        1,
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        3,
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        1,
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
MAX_BYTES = 2**31  # the largest content that is read
TIMEOUT = 30  # seconds without a byte, and ten times that for a whole file


def read_at_most(file, num_bytes: int) -> bytes:
    """Read to the end or to `num_bytes`, in pieces: a mere promise takes no memory."""
    pieces, left = [], num_bytes
    while left and (piece := file.read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def read_content(path: Path, num_dims: int) -> bytes:
    """Return an IDX file's uncompressed bytes, header included, once they are sound.

    The header is two zero bytes, the type (8, unsigned bytes), the number of
    dimensions, and each dimension as a big-endian 32-bit number.  No more is read than
    it promises, plus one byte.  Raises DataError.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    header_bytes = 4 + 4 * num_dims
    try:
        with opener(path, "rb") as file:
            header = read_at_most(file, header_bytes)
            if len(header) < 4:
                raise DataError(
                    f"{path}: {len(header)} bytes; expected an IDX header of "
                    f"{header_bytes}"
                )
            if header[:2] != b"\0\0":
                raise DataError(
                    f"{path}: magic number 0x{header[:4].hex()}; expected "
                    f"0x000008{num_dims:02x}, an IDX file"
                )
            if header[2] != 8:
                raise DataError(
                    f"{path}: element type 0x{header[2]:02x}; expected 0x08, unsigned "
                    "bytes"
                )
            if header[3] != num_dims:
                raise DataError(f"{path}: {header[3]} dimensions; expected {num_dims}")
            if len(header) < header_bytes:
                raise DataError(
                    f"{path}: truncated: {len(header)} bytes of a header of "
                    f"{header_bytes}"
                )
            shape = np.frombuffer(header, ">u4", offset=4).tolist()
            size = math.prod(shape)
            if size > MAX_BYTES:
                raise DataError(
                    f"{path}: declares {shape}, {size} bytes; at most {MAX_BYTES} are "
                    "read"
                )
            if size == 0:
                raise DataError(f"{path}: declares {shape}, no examples")
            body = read_at_most(file, size + 1)
    except (OSError, EOFError, zlib.error) as error:
        # gzip's own errors: cut short, a wrong checksum, not gzip at all
        reason = error.strerror if getattr(error, "strerror", None) else error
        raise DataError(f"{path}: {reason}") from error
    if len(body) < size:
        raise DataError(f"{path}: truncated: {len(body)} bytes of {size} for {shape}")
    if len(body) > size:
        raise DataError(f"{path}: more than the {size} bytes that {shape} takes")
    return header + body


def as_array(content: bytes, num_dims: int) -> np.ndarray:
    """View an IDX file's content as uint8 [N] or [N, H, W]."""
    shape = np.frombuffer(content, ">u4", count=num_dims, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def find_file(folder: Path, name: str) -> Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.exists()), None)


class HttpsRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl.startswith("https://"):
            raise urllib.error.URLError(f"redirected to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, max_bytes: int) -> bytes:
    """Return what `url` holds.  Raises OSError, ValueError or TimeoutError."""
    if not url.startswith("https://"):
        raise ValueError("not an https address")
    deadline = time.monotonic() + 10 * TIMEOUT
    opener = urllib.request.build_opener(HttpsRedirects)
    with opener.open(url, timeout=TIMEOUT) as response:
        pieces = []
        while piece := response.read1(1 << 20):
            pieces.append(piece)
            if sum(map(len, pieces)) > max_bytes:
                raise ValueError(f"more than the {max_bytes} bytes expected")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {10 * TIMEOUT} seconds")
    return b"".join(pieces)


def download(folder: Path, file: IdxFile) -> None:
    """Put one of MNIST's files into `folder`, whole and verified or not at all.

    Raises DownloadError with every mirror tried and why it failed.
    """
    failures = []
    for mirror in MIRRORS:
        url = f"{mirror}{file.name}.gz"
        print(f"downloading {url}", flush=True)
        temporary = None
        try:
            packed = fetch(url, max_bytes=2 * file.num_bytes)
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(suffix=".gz", dir=folder)
            with open(handle, "wb") as stream:
                stream.write(packed)
                stream.flush()
                os.fsync(stream.fileno())
            content = read_content(Path(temporary), file.num_dims)
            if hashlib.sha256(content).hexdigest() != file.sha256:
                raise DataError("content is not MNIST's (its SHA-256 differs)")
            os.chmod(temporary, 0o644)
            os.replace(temporary, folder / f"{file.name}.gz")
            return
        except (OSError, http.client.HTTPException, ValueError, DataError) as error:
            failures.append(f"{url}: {str(error).replace(str(temporary), 'content')}")
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
    raise DownloadError(
        f"{folder / file.name} is missing, and no mirror gives it: "
        + "; ".join(failures)
    )


def load_mnist(folder: Path) -> Dataset:
    """Load the four files from `folder`; other images in the same form are welcome.

    Raises DataError for a file that is missing and cannot be downloaded, and for one
    that is damaged.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: not a folder")
    contents = {
        file: read_content(path, file.num_dims)
        for file in MNIST_FILES
        if (path := find_file(folder, file.name))
    }
    foreign = [
        file.name
        for file, content in contents.items()
        if hashlib.sha256(content).hexdigest() != file.sha256
    ]
    for file in MNIST_FILES:
        if file in contents:
            continue
        if foreign:
            raise DataError(
                f"{folder}: {file.name} is missing, and {foreign[0]} is not MNIST's, "
                "so MNIST's cannot take its place"
            )
        download(folder, file)
        path = find_file(folder, file.name)
        contents[file] = read_content(path, file.num_dims)

    arrays = [as_array(contents[file], file.num_dims) for file in MNIST_FILES]
    for i in (0, 2):
        images, labels = arrays[i : i + 2]
        images_name, labels_name = (file.name for file in MNIST_FILES[i : i + 2])
        if images.shape[1:] != (28, 28):
            height, width = images.shape[1:]
            raise DataError(
                f"{folder}/{images_name}: images are {height} x {width}; expected "
                "28 x 28"
            )
        if len(images) != len(labels):
            raise DataError(
                f"{folder}/{labels_name}: {len(labels)} labels for {len(images)} images"
            )
        if labels.max() > 9:
            raise DataError(
                f"{folder}/{labels_name}: label {labels.max()} at {labels.argmax()}; "
                "expected 0 to 9"
            )
    if foreign:
        print(f"notice: {folder} holds other data than MNIST ({', '.join(foreign)})")
    train_images, train_labels, test_images, test_labels = arrays
    return Dataset(
        f"data in MNIST's form from {folder}" if foreign else "MNIST",
        train_images[..., None],
        train_labels.astype(np.int32),
        test_images[..., None],
        test_labels.astype(np.int32),
    )


# ---------------------------------------------------------------------------------
# Data: generated digits, for a machine without MNIST and without a network
# ---------------------------------------------------------------------------------


SIDE = 28  # pixels along each side of an image
CHUNK = 1000  # images drawn at once, from a random stream of their own
STEPS = 72  # equal steps in which the pen writes a digit
KNOTS = 12  # most control points that a way of writing may have

# Ways of writing each digit.  A pair such as "27" is a control point, 2 across, 7 down,
# that attracts the pen; a pair written twice makes a corner; a comma lifts the pen.
STROKES = {
    0: ("50 10 19 89 80 50", "70 20 08 49 98 80 30", "50 20 29 79 70 40"),
    1: ("50 55 59", "23 50 50 59", "23 50 50 59, 29 59 89"),
    2: ("12 20 90 84 19 19 99", "12 20 90 74 29 08 16 59 98", "11 40 90 75 09 09 88"),
    3: (
        "11 40 90 84 44 44 95 99 39 08",
        "10 80 80 44 44 94 99 29 08",
        "11 50 90 85 34 95 99 39 07",
    ),
    4: ("20 15 15 95, 70 65 69", "60 06 06 96, 60 65 69", "10 06 65 74, 80 75 69"),
    5: (
        "80 20 20 14 14 83 99 39 08",
        "20 14 14 83 99 39 08, 20 90",
        "80 20 14 94 99 39 08",
    ),
    6: ("70 30 05 19 89 94 34 17", "60 16 29 89 85 45 17", "81 40 08 39 99 84 24 08"),
    7: ("10 80 80 55 49", "10 80 80 55 39, 25 75", "12 10 80 90 55 39"),
    8: (
        "60 10 13 86 89 19 16 83 80 50",
        "50 20 24 74 70 50, 54 14 19 89 84 54",
        "81 40 11 33 86 89 19 16 63 81",
    ),
    9: (
        "82 80 10 15 75 82 82 79",
        "80 20 15 75 81 85 79 29 18",
        "81 30 14 65 81 81 69",
    ),
}


class Plan(NamedTuple):
    """Ways W of writing digits, as the pen's pull to knots that may move."""

    label: np.ndarray  # uint8 [W]
    knots: np.ndarray  # [W, KNOTS, 2], control points around the center
    pen: np.ndarray  # [W, STEPS, KNOTS]; the pen visits pen @ knots
    step: np.ndarray  # [W], length of a step of the pen


def smooth(curve: np.ndarray) -> np.ndarray:
    """Round a polyline [n, d] by cutting its corners, four times (Chaikin 1974)."""
    for _ in range(4):
        a, b = curve[:-1], curve[1:]
        cuts = np.stack([0.75 * a + 0.25 * b, 0.25 * a + 0.75 * b], axis=1)
        curve = np.concatenate([curve[:1], *cuts, curve[-1:]])
    return curve


def plan_way(label: int, way: str) -> Plan:
    """Plan one way of writing: leaves as in `Plan`, without W."""
    strokes = [stroke.split() for stroke in way.split(",")]
    points = np.array([(int(x), int(y)) for stroke in strokes for x, y in stroke])
    knots = np.pad(points - 4.5, ((0, KNOTS - len(points)), (0, 0)))
    lifts = np.cumsum([len(stroke) for stroke in strokes])[:-1]
    paths = [smooth(own) for own in np.split(np.eye(len(points), KNOTS), lifts)]
    moves = [np.diff(path @ knots, axis=0, prepend=path[:1] @ knots) for path in paths]
    travel = np.cumsum(np.linalg.norm(np.concatenate(moves), axis=1))
    steps = np.linspace(0, travel[-1], STEPS)
    pen = [np.interp(steps, travel, pull) for pull in np.concatenate(paths).T]
    return Plan(np.uint8(label), knots, np.stack(pen, axis=1), steps[1])


def draw_digits(rng: np.random.Generator, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 [CHUNK, SIDE, SIDE] and labels uint8 [CHUNK]."""

    def normal(mean, spread, *shape):
        return mean + spread * rng.standard_normal((CHUNK, *shape), np.float32)

    def bell(at):  # [CHUNK, STEPS] -> [CHUNK, STEPS, SIDE]
        squares = ((at[..., None] - np.arange(SIDE, dtype=np.float32)) / width) ** 2
        return np.exp(-0.5 * squares.clip(max=40))  # clipped: denormals are slow

    way = rng.integers(len(plan.label), size=CHUNK)
    haste = np.exp(normal(-0.7, 0.45, 1, 1))  # most write neatly, a few scrawl
    knots = plan.knots[way] + haste * normal(0, 1, KNOTS, 2)
    x, y = np.moveaxis(plan.pen[way] @ knots, 2, 0)
    x, y = x * normal(1.6, 0.2, 1), y * normal(1.9, 0.15, 1)  # from knots to pixels
    x = x - y * normal(0.2, 0.2, 1)  # slant
    turn = normal(0, 0.12, 1)
    x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    x, y = x + normal(SIDE / 2 - 0.5, 1, 1), y + normal(SIDE / 2 - 0.5, 1, 1)
    width = np.exp(normal(-0.2, 0.2, 1, 1))

    # A dab of ink is one bell down times one across; a matrix product sums the dabs.
    dab = 1.5 * plan.step[way][:, None, None] / width
    ink = bell(y).swapaxes(1, 2) @ bell(x) * dab
    ink = np.tanh(ink**2) * normal(1, 0.1, SIDE, SIDE)  # saturated, on rough paper
    return np.uint8(255 * ink.clip(0, 1)), plan.label[way]


def generate_digits(
    seed: int, num_train: int = 60_000, num_test: int = 10_000
) -> Dataset:
    """Draw white digits on black, MNIST's stand-in in shapes and types.

    Equal seeds draw equal digits, and fewer are the first of more.  No label is wrong;
    what makes some digits hard is how hastily they are written.
    """
    ways = [plan_way(label, way) for label in STROKES for way in STROKES[label]]
    plan = Plan(*map(np.stack, zip(*ways)))
    plan = Plan(plan.label, *(part.astype(np.float32) for part in plan[1:]))
    arrays = []
    for part, count in enumerate((num_train, num_test)):
        chunks = [
            draw_digits(np.random.default_rng([seed, part, start]), plan)
            for start in range(0, max(count, 1), CHUNK)
        ]
        images, labels = (np.concatenate(pieces)[:count] for pieces in zip(*chunks))
        arrays += [images[..., None], labels.astype(np.int32)]
    return Dataset("generated digits", *arrays)


def load_data(source: str, folder: Path) -> Dataset:
    """Load what --data names.  Raises DataError."""
    if source == "generated":
        return generate_digits(seed=0)
    try:
        return load_mnist(folder)
    except DownloadError as error:
        if source == "mnist":
            raise
        print(f"notice: training on generated digits: {error}")
        return generate_digits(seed=0)


# ---------------------------------------------------------------------------------
# Training
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


def make_trainer(
    recipe: Recipe, members: int, num_devices: int, num_steps: int
) -> pe.Trainer:
    """Make a trainer for data (uint8 images, int32 labels) and a run of num_steps."""
    network = NETWORKS[recipe.network]

    def loss_fn(params, model_state, key, images, labels):
        shift_key, key = jax.random.split(key)
        images = scale(shift_images(shift_key, images, recipe.max_shift))
        logits, model_state = network.logits(params, model_state, images, key)
        return pe.softmax_cross_entropy(logits, labels).mean(), model_state

    rate = SCHEDULES[recipe.schedule](recipe.learning_rate, num_steps)
    optimizer = (
        pe.adam(rate) if recipe.optimizer == "adam" else pe.sgd(rate, recipe.momentum)
    )
    return pe.make_trainer(
        network.init,
        loss_fn,
        optimizer,
        members=members,
        devices=num_devices,
        apply_fn=lambda params, state, x: network.logits(params, state, scale(x))[0],
        stateful=True,
    )


def member_orders(
    num_examples: int, recipe: Recipe, *, seed: int, epoch: int, members: int
) -> np.ndarray:
    """Draw the examples of each step of an epoch, [K, steps, B].

    Every member goes through the examples in an order of its own, or, with bootstrap,
    through as many that it drew with replacement before the first epoch.  What fills no
    batch, fewer than B, sits the epoch out.
    """
    steps = num_examples // recipe.batch_size
    orders = []
    for member in range(members):
        rows = np.random.default_rng([seed, epoch, member]).permutation(num_examples)
        if recipe.bootstrap:
            own = np.random.default_rng([seed, 0, member, 1])
            rows = own.integers(num_examples, size=num_examples)[rows]
        rows = rows[: steps * recipe.batch_size]
        orders.append(rows.reshape(steps, recipe.batch_size))
    return np.stack(orders)


class Epoch(NamedTuple):
    """What an epoch ends with."""

    state: pe.TrainState
    losses: np.ndarray  # [K, steps], in training
    seconds: float


def train(
    trainer: pe.Trainer, recipe: Recipe, images, labels, *, seed: int
) -> Iterator[Epoch]:
    """Yield the initial state, with no losses, and each epoch's.

    A state that was yielded is consumed when the next is asked for.
    """
    members = trainer.layout.members
    state = trainer.init(jax.random.key(seed))
    data = trainer.place((images, labels))
    yield Epoch(state, np.empty((members, 0)), 0.0)
    for epoch in range(recipe.epochs):
        started = time.perf_counter()
        order = member_orders(
            len(images), recipe, seed=seed, epoch=epoch, members=members
        )
        state, losses = trainer.epoch(state, data, order)
        losses = np.asarray(losses)
        yield Epoch(state, losses, time.perf_counter() - started)


# ---------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------


def report_finite(member_probs: np.ndarray, labels: np.ndarray) -> dict | None:
    """Make `pe.ensemble_report` of the members whose probabilities are finite.

    The others stand in `member` as None.  None when no member is finite.
    """
    finite = np.isfinite(member_probs).all(axis=(1, 2))
    if not finite.any():
        return None
    report = pe.ensemble_report(member_probs[finite], labels)
    scores = iter(report["member"])
    report["member"] = [next(scores) if ok else None for ok in finite]
    return report


def mean_loss(report: dict) -> float:
    """Average the negative log-likelihood over the members, in nats."""
    return float(np.mean([m["negative_log_likelihood"] for m in report["member"] if m]))


def print_epoch(metrics: dict) -> None:
    """Print the guide's line: losses in nats, accuracies in percent."""
    print(
        f"epoch: {metrics['epoch']:2d}, train_loss: {metrics['train_loss']:.4f}, "
        f"train_accuracy: {100 * metrics['train_accuracy']:.2f}, "
        f"test_loss: {metrics['test_loss']:.4f}, "
        f"test_accuracy: {100 * metrics['test_accuracy']:.2f}",
        flush=True,
    )


def print_failed(failed: set, epoch: int, losses: np.ndarray, members: list) -> None:
    """Name each member that has failed, once, and put it into `failed`."""
    for i, scores in enumerate(members):
        if scores is None and i not in failed:
            bad = np.flatnonzero(~np.isfinite(losses[i]))
            since = f": its loss was not at step {bad[0] + 1} of it" if len(bad) else ""
            print(f"notice: member {i} is not finite after epoch {epoch}{since}")
            failed.add(i)


def print_table(title: str, rows: Sequence[tuple[str, dict | None]]) -> None:
    print(f"\n{title}\n{'':10}{'accuracy':>10}{'NLL':>10}{'Brier':>10}{'ECE':>10}")
    for name, scores in rows:
        if scores is None:
            print(f"{name:10}{'failed: not finite':>22}")
            continue
        accuracy, *others = scores.values()
        print(
            f"{name:10}{100 * accuracy:9.2f}%" + "".join(f"{s:10.4f}" for s in others)
        )


def write_json(path: Path, value: dict) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def versions() -> dict:
    return {
        "pjax_ensemble": pe.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# ---------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------


class Failure(Exception):
    """A run that ends here: a message for one line, and an exit status."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Failure(message)


def default_folder() -> Path:
    """Return $MNIST_DIR, or a folder of our own in the user's cache folder."""
    if os.environ.get("MNIST_DIR"):
        return Path(os.environ["MNIST_DIR"])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pjax_ensemble"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.  Raises Failure for what lies out of range."""
    cnn, batchnorm = RECIPES["cnn"], RECIPES["batchnorm"]

    def default(name: str) -> str:
        value, other = getattr(cnn, name), getattr(batchnorm, name)
        more = "" if other == value else f"; batchnorm: {other}"
        return f"(default: {value}{more})"

    parser = Parser(
        prog="train_mnist.py",
        description="Train convolutional networks on MNIST: an ensemble of any size, "
        "or one model on all devices.",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("models and devices")
    where.add_argument(
        "--mode",
        choices=("ensemble", "sync"),
        default="ensemble",
        help="ensemble: independent members, probabilities averaged; sync: one model, "
        "each batch divided over the devices, gradients averaged (default: "
        "%(default)s)",
    )
    where.add_argument(
        "--members",
        type=int,
        metavar="K",
        help="members of the ensemble; they share devices, or devices share one, as "
        "it takes (default: one a device)",
    )
    where.add_argument(
        "--devices",
        type=int,
        metavar="D",
        help="devices to use; on CPU, that many virtual devices (default: all; on "
        "CPU, one a core)",
    )
    where.add_argument(
        "--show-batch",
        action="store_true",
        help="draw how the batch of a step lies on the devices (needs rich)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--network",
        choices=tuple(NETWORKS),
        default="cnn",
        help="cnn: of Flax's ensembling guide; batchnorm: of Keras's guide to "
        "distributed training with JAX, with batch normalization and dropout "
        "(default: %(default)s)",
    )
    training.add_argument(
        "--optimizer",
        choices=tuple(LEARNING_RATES),
        help=f"stochastic gradient descent with momentum, or Adam "
        f"{default('optimizer')}",
    )
    training.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="passes over the training images; 0 reports the initial models "
        f"{default('epochs')}",
    )
    training.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help=f"examples a step of one model, all its replicas together "
        f"{default('batch_size')}",
    )
    rates = "; ".join(f"{name}: {rate}" for name, rate in LEARNING_RATES.items())
    training.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help=f"of the optimizer; the schedule's peak (default: {rates})",
    )
    training.add_argument(
        "--momentum",
        type=float,
        metavar="SHARE",
        help=f"share of the velocity that a step of sgd keeps {default('momentum')}",
    )
    training.add_argument(
        "--schedule",
        choices=tuple(SCHEDULES),
        help="learning rate over the run: constant, or rising over its first 15%% and "
        "falling to 0, in straight lines or half cosines "
        f"{default('schedule')}",
    )
    training.add_argument(
        "--max-shift",
        type=int,
        metavar="PIXELS",
        help="move each training image at random by up to so many pixels "
        f"{default('max_shift')}",
    )
    training.add_argument(
        "--bootstrap",
        action="store_true",
        help="train each member on as many images as there are, drawn with replacement "
        "from them for it alone (default: each on all, in an order of its own)",
    )
    training.add_argument(
        "--seed",
        type=int,
        metavar="S",
        default=0,
        help="member i depends on seed and i alone (default: %(default)s)",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        choices=("auto", "mnist", "generated"),
        default="auto",
        help="mnist: from --data-dir, downloaded there if missing; generated: digits "
        "that this script draws; auto: mnist, or generated if it cannot be had "
        "(default: %(default)s)",
    )
    data.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="MNIST's four files, gzipped or plain (default: $MNIST_DIR, else "
        "pjax_ensemble in the user's cache folder)",
    )
    data.add_argument(
        "--train-size",
        type=int,
        metavar="N",
        help="train on the first N images (default: all)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="write metrics.jsonl and report.json there (default: write nothing)",
    )
    args = parser.parse_args(argv)
    args.data_dir = args.data_dir or default_folder()
    recipe = RECIPES[args.network]
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATES[args.optimizer or recipe.optimizer]
    for name, value in recipe._asdict().items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    def check(flag: str, ok: bool, expected: str) -> None:
        if not ok:
            value = getattr(args, flag.strip("-").replace("-", "_"))
            raise Failure(f"{flag} {value}: expected {expected}")

    check("--devices", args.devices is None or 1 <= args.devices <= 1024, "1 to 1024")
    check("--members", args.members is None or args.members >= 1, "1 or more")
    if args.mode == "sync" and args.members not in (None, 1):
        raise Failure(f"--members {args.members}: --mode sync trains one model")
    check("--epochs", args.epochs >= 0, "0 or more")
    check("--batch-size", args.batch_size >= 1, "1 or more")
    check("--learning-rate", 0 <= args.learning_rate < math.inf, "0 or more, finite")
    check("--momentum", 0 <= args.momentum < 1, "0 or more, below 1")
    check("--max-shift", 0 <= args.max_shift <= 28, "0 to 28")
    check("--seed", 0 <= args.seed < 2**32, "0 to 4294967295")
    check("--train-size", args.train_size is None or args.train_size >= 1, "1 or more")
    return args


def open_workdir(folder: Path):
    """Make the folder and open its metrics.jsonl, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "metrics.jsonl"):
            if (folder / name).exists() and (folder / name).stat().st_size:
                raise Failure(
                    f"--workdir {folder}: holds {name} of an earlier run; choose "
                    "another folder, or remove it"
                )
        with tempfile.TemporaryFile(dir=folder):  # report.json will need a new file
            return open(folder / "metrics.jsonl", "w")
    except OSError as error:
        raise Failure(f"--workdir {folder}: {error.strerror or error}") from error


def prepare(args: argparse.Namespace) -> tuple[Dataset, pe.Layout]:
    """Load the data and start the devices.  Raises Failure where flags do not fit."""
    if args.show_batch and not importlib.util.find_spec("rich"):
        raise Failure("--show-batch needs rich: python -m pip install '.[plot]'")
    try:
        data = load_data(args.data, args.data_dir)
    except DataError as error:
        raise Failure(f"--data-dir: {error}") from error
    size = args.train_size or len(data.train_images)
    if size > len(data.train_images):
        raise Failure(
            f"--train-size {size}: {data.name} has {len(data.train_images)} training "
            "images"
        )
    if args.batch_size > size:
        raise Failure(
            f"--batch-size {args.batch_size}: more than the {size} training images"
        )
    data = data._replace(
        train_images=data.train_images[:size], train_labels=data.train_labels[:size]
    )
    pe.use_cpu_devices(args.devices)
    available = jax.local_device_count()
    num_devices = args.devices or available
    if num_devices > available:
        raise Failure(
            f"--devices {num_devices}: there are {available} "
            f"{jax.default_backend().upper()} devices"
        )
    members = 1 if args.mode == "sync" else args.members or num_devices
    layout = pe.layout(members, num_devices)
    if args.batch_size % layout.replicas:
        below = args.batch_size - args.batch_size % layout.replicas
        raise Failure(
            f"--batch-size {args.batch_size}: does not split over the "
            f"{layout.replicas} devices of a model; use a multiple of "
            f"{layout.replicas}, for example {below or layout.replicas}"
        )
    return data, layout


def announce(args: argparse.Namespace, recipe: Recipe, data: Dataset, layout) -> None:
    """Say in two lines what is about to run."""
    members, devices, shared, replicas = layout
    models = "1 model" if args.mode == "sync" else f"{members} members"
    place = f", {shared} a device" if shared > 1 else ""
    if replicas > 1:
        place = f", {replicas} replicas" + (" of each" if members > 1 else "")
    print(
        f"{args.mode}: {models} on {devices} {jax.default_backend().upper()} devices"
        f"{place}; {data.name}, {len(data.train_images)} training and "
        f"{len(data.test_images)} test images, seed {args.seed}, jax {jax.__version__}"
    )
    settings = (f"{name} {value}" for name, value in recipe._asdict().items())
    print(", ".join(settings), flush=True)


def show_batch(layout: pe.Layout, batch_size: int) -> None:
    """Draw which rows of a step's images lie on which device, as Keras's guide does."""
    rows = layout.members_per_device * layout.devices * batch_size // layout.replicas
    mesh = jax.sharding.Mesh(jax.local_devices()[: layout.devices], ("devices",))
    spec = jax.sharding.PartitionSpec("devices")
    images = jax.device_put(
        np.zeros((rows, 28 * 28), np.uint8), jax.sharding.NamedSharding(mesh, spec)
    )
    print(f"a step's images [{rows}, 784], member after member, on the devices:")
    jax.debug.visualize_array_sharding(images)


def evaluate(predict, state, data: Dataset, epoch: int) -> tuple[dict, dict, float]:
    """Report on the test images, and on as many training images, measured alike.

    Returns both reports and the seconds that the test images took.  Raises Failure,
    status 3, when no model is finite.
    """
    started = time.perf_counter()
    probs = predict(state, data.test_images)
    seconds = time.perf_counter() - started
    test = report_finite(probs, data.test_labels)
    sample = slice(len(data.test_images))
    probs = predict(state, data.train_images[sample])
    train = report_finite(probs, data.train_labels[sample])
    if test is None or train is None:
        raise Failure(
            f"no model is finite after epoch {epoch}; lower --learning-rate", status=3
        )
    return test, train, seconds


def print_report(args: argparse.Namespace, data: Dataset, report: dict) -> None:
    """Print the final tables: members and ensemble, or the one model; then by size."""
    members = report["member"]
    rows = [(f"member {i}", scores) for i, scores in enumerate(members)]
    if args.mode == "sync":
        rows = [("model", members[0])]
    else:
        rows.append(("ensemble", report["ensemble"]))
    print_table(f"{data.name}, {len(data.test_images)} test images", rows)
    if len(members) == 1:
        return
    sizes = [(f"first {n}", scores) for n, scores in enumerate(report["by_size"], 1)]
    print_table("ensemble by size, of the members that are finite", sizes)
    print(
        f"\ndisagreement {100 * report['disagreement']:.2f}% of pairs, predictive "
        f"entropy {report['predictive_entropy']:.4f} nats, of which mutual information "
        f"{report['mutual_information']:.4f}"
    )


def run(args: argparse.Namespace) -> dict:
    """Train and report; return what report.json holds.  Raises Failure."""
    metrics_file = open_workdir(args.workdir) if args.workdir else None
    data, layout = prepare(args)
    num_train = len(data.train_images)
    recipe = Recipe(**{name: getattr(args, name) for name in Recipe._fields})
    announce(args, recipe, data, layout)
    if args.show_batch:
        show_batch(layout, recipe.batch_size)
    num_steps = num_train // recipe.batch_size
    trainer = make_trainer(
        recipe, layout.members, layout.devices, recipe.epochs * num_steps
    )
    epochs = train(
        trainer, recipe, data.train_images, data.train_labels, seed=args.seed
    )
    failed = set()
    for epoch, (state, losses, train_seconds) in enumerate(epochs):
        if epoch == 0 and recipe.epochs > 0:
            continue  # the initial models are of interest only when none is trained
        report, train_report, test_seconds = evaluate(
            trainer.predict_members, state, data, epoch
        )
        members = report["member"]
        print_failed(failed, epoch, losses, members)
        if epoch == 0:
            break
        metrics = {
            "epoch": epoch,
            "train_loss": mean_loss(train_report),
            "train_accuracy": train_report["ensemble"]["accuracy"],
            "test_loss": mean_loss(report),
            "test_accuracy": report["ensemble"]["accuracy"],
            "member_test_accuracy": [m and m["accuracy"] for m in members],
            "train_seconds": train_seconds,
            "test_seconds": test_seconds,
            "member_images_per_second": len(members)
            * num_steps
            * recipe.batch_size
            / train_seconds,
        }
        print_epoch(metrics)
        if metrics_file:
            print(json.dumps(metrics, allow_nan=False), file=metrics_file, flush=True)

    print_report(args, data, report)
    report = {
        "dataset": data.name,
        "test_examples": len(data.test_images),
        "members": layout.members,
        "failed": sorted(failed),
        **report,
        "config": {
            "mode": args.mode,
            **layout._asdict(),
            **recipe._asdict(),
            "seed": args.seed,
            "train_size": num_train,
        },
        "versions": versions(),
    }
    if metrics_file:
        metrics_file.close()
        write_json(args.workdir / "report.json", report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, after one line of what is wrong."""
    try:
        run(parse_arguments(argv))
    except Failure as failure:
        print(f"train_mnist.py: error: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("train_mnist.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
