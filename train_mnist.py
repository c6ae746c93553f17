"""Train convolutional networks on MNIST, one model on all devices or one on each.

    python train_mnist.py --mode ensemble     a member a device, probabilities averaged
    python train_mnist.py --mode sync         one model, gradients averaged

The order of this file is the order of the data: recipe, data, training, report.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import pjax_ensemble as pe


class Recipe(NamedTuple):
    """How to train; the defaults were chosen on held-out training images.

    benchmarks/recipe.py measures them.
    """

    epochs: int = 5
    batch_size: int = 128  # examples a step of one model, over all its replicas
    learning_rate: float = 0.1  # the schedule's peak
    momentum: float = 0.9
    schedule: str = "linear"
    max_shift: int = 2  # pixels by which training images move at random


SCHEDULES = {
    "constant": lambda peak, num_steps: peak,
    "linear": pe.linear_schedule,
    "cosine": pe.cosine_schedule,
}


# ---------------------------------------------------------------------------------
# Data: MNIST's four files, from a folder or a mirror
# ---------------------------------------------------------------------------------


class DataError(Exception):
    """A data set that cannot be had; the message says which file and why."""


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
    """Read to the end or to `num_bytes`, in pieces: what was promised is not reserved."""
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
                raise DataError(
                    f"{path}: {header[3]} dimensions; expected {num_dims}"
                )
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

    Raises DataError with every mirror tried and why it failed.
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
        except (OSError, ValueError, DataError, EOFError) as error:
            failures.append(f"{url}: {str(error).replace(str(temporary), 'content')}")
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
    raise DataError("; ".join(failures))


def load_mnist(folder: Path, *, download_missing: bool = True) -> Dataset:
    """Load the four files from `folder`; other images in the same form are welcome.

    Raises DataError for a file that is missing and cannot be downloaded, and for one
    that is damaged.
    """
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
                f"{folder}: {file.name} is missing, and {foreign[0]} is not MNIST's, so "
                "MNIST's cannot take its place"
            )
        if not download_missing:
            raise DataError(f"{folder}: {file.name} is missing")
        download(folder, file)
        path = find_file(folder, file.name)
        contents[file] = read_content(path, file.num_dims)

    arrays = [as_array(contents[file], file.num_dims) for file in MNIST_FILES]
    for part, images, labels in (("train", *arrays[:2]), ("t10k", *arrays[2:])):
        where = f"{folder}: {part}"
        if images.shape[1:] != (28, 28):
            raise DataError(
                f"{where}: images are {images.shape[1]} x {images.shape[2]}; expected "
                "28 x 28"
            )
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} images and {len(labels)} labels")
        if labels.max() > 9:
            raise DataError(
                f"{where}: label {labels.max()} at {labels.argmax()}; expected 0 to 9"
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


def load_data(source: str, folder: Path) -> Dataset:
    """Load what --data names.  Raises DataError."""
    if source == "generated":
        return generated_dataset()
    missing = not all(find_file(folder, file.name) for file in MNIST_FILES)
    try:
        return load_mnist(folder)
    except DataError as error:
        if source == "mnist" or not missing:
            raise
        print(f"notice: training on generated digits, since MNIST is missing: {error}")
        return generated_dataset()


# ---------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------


def shift_images(key: jax.Array, images: jax.Array, max_shift: int) -> jax.Array:
    """Move each image [B, H, W, C] by its own random offset, zeros moving in."""
    pad = [(0, 0), (max_shift, max_shift), (max_shift, max_shift), (0, 0)]
    starts = jax.random.randint(key, (len(images), 2), 0, 2 * max_shift + 1)
    size = images.shape[1:]
    crop = jax.vmap(lambda x, s: jax.lax.dynamic_slice(x, (s[0], s[1], 0), size))
    return crop(jnp.pad(images, pad), starts)


def scale(images: jax.Array) -> jax.Array:
    return images.astype(jnp.float32) / 255


def make_update(mode: str, recipe: Recipe, num_steps: int):
    """Make the optimizer and the update of a mode, for batches of uint8 and int32."""

    def loss_fn(params, model_state, key, images, labels):
        images = scale(shift_images(key, images, recipe.max_shift))
        loss = pe.softmax_cross_entropy(pe.cnn(params, images), labels).mean()
        return loss, model_state

    rate = SCHEDULES[recipe.schedule](recipe.learning_rate, num_steps)
    optimizer = pe.sgd(rate, recipe.momentum)
    make = pe.make_sync_update if mode == "sync" else pe.make_ensemble_update
    return optimizer, make(loss_fn, optimizer, stateful=True)


def init_state(mode: str, optimizer: pe.Optimizer, seed: int, num_devices: int):
    """Make the first state [D, ...]: member i depends on (seed, i) alone."""

    @jax.jit
    def member(i):
        init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
        return pe.train_state(pe.cnn_init(init_key), optimizer, key=key)

    if mode == "sync":
        return pe.replicate(member(0), num_devices)
    members = [member(i) for i in range(num_devices)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)


def batch_rows(
    num_examples: int, batch_size: int, *, seed: int, epoch: int, members: int
) -> Iterator[np.ndarray]:
    """Yield the examples of each step of an epoch, [K, B]: every member's own order.

    The examples that fill no batch, fewer than B, sit this epoch out.
    """
    orders = [
        np.random.default_rng([seed, epoch, member]).permutation(num_examples)
        for member in range(members)
    ]
    for start in range(0, num_examples - batch_size + 1, batch_size):
        yield np.stack([order[start : start + batch_size] for order in orders])


def make_predict(mode: str, num_devices: int, chunk: int = 128):
    """Make predict(params [D, ...], images uint8 [N, ...]) -> probabilities [K, N, C].

    Each image is counted once: the last chunk is filled up, so that one program serves
    them all, and what filled it is cut off.  A device holds `chunk` images at a time.
    """
    sync = mode == "sync"
    probs_fn = jax.pmap(
        lambda params, images: jax.nn.softmax(pe.cnn(params, scale(images))),
        in_axes=(0, 0 if sync else None),
    )
    rows = chunk * num_devices if sync else chunk

    def predict(params, images):
        results = []
        for start in range(0, len(images), rows):
            part = images[start : start + rows]
            count = len(part)
            part = np.pad(part, [(0, rows - count), *[(0, 0)] * (part.ndim - 1)])
            probs = probs_fn(params, pe.split(part, num_devices) if sync else part)
            probs = np.asarray(probs)
            results.append((pe.merge(probs)[None] if sync else probs)[:, :count])
        return np.concatenate(results, axis=1)

    return predict
