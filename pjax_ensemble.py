# Copyright (c) 2026 The pjax_ensemble authors.  SPDX-License-Identifier: MIT
"""Train K models on D devices, whatever K and D are, in one file of plain JAX.

A training step is written once, for one model on one device.  All else is where its
copies stand: members, independent models whose probabilities are averaged, or replicas,
copies of one model that share its batch and average gradients.

    import jax, jax.numpy as jnp, numpy as np, pjax_ensemble as pe

    def network(params, images):
        return pe.cnn(params, images.astype(jnp.float32) / 255)

    def loss_fn(params, images, labels):
        return pe.softmax_cross_entropy(network(params, images), labels).mean()

    images, labels = np.ones((64, 28, 28, 1), np.uint8), np.arange(64) % 10
    trainer = pe.make_trainer(
        pe.cnn_init, loss_fn, pe.sgd(0.01), members=5, apply_fn=network
    )
    state = trainer.init(jax.random.key(0))
    order = pe.epoch_order(64, 16)  # [4, 16]
    state, losses = trainer.epoch(state, (images, labels), order)  # losses [5, 4]
    probs = trainer.predict_members(state, images)  # [5, 64, 10]

One call a step, on batches that are split or replicated by hand, is what
`make_sync_update` and `make_ensemble_update` do, with the same step.  Another file,
`ensemble_metrics.py`, tells how far to trust the probabilities; this one trains alone.

Legend, used everywhere.  A replica is an identical copy, a member a model of its own.

    K   members of the ensemble        N, B, C  examples, a member's batch, classes
    D   devices in use                 H W I O  height, width, channels in, out
    M   members that share a device    R        replicas: devices with the same member

Images are NHWC, kernels HWIO, labels integers, losses in nats per example.

Contents: Layers, Network, Losses, Optimizers, Devices, Updates, Trainer,
Checkpoints, Demo.  A section uses only what stands above it.  Importing it touches no
device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import operator
import os
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.extend import core
from numpy.typing import ArrayLike

__version__ = "0.1.0"

# fmt: off
__all__ = [
    # Layers, Network
    "Conv", "conv_init", "conv", "Dense", "dense_init", "dense", "avg_pool", "max_pool",
    "replica_mean", "BatchNorm", "BatchStats", "batch_norm_init", "batch_norm",
    "dropout", "CNN", "cnn_init", "cnn",
    # Losses
    "softmax_cross_entropy", "gaussian_nll", "accuracy",
    # Optimizers
    "Optimizer", "apply_updates", "SGDState", "sgd", "AdamState", "adam",
    "linear_schedule", "cosine_schedule",
    # Devices
    "use_cpu_devices", "split", "merge", "replicate", "unreplicate",
    # Updates
    "TrainState", "train_state", "gather_processes", "make_sync_update",
    "make_ensemble_update",
    # Trainer
    "Layout", "layout", "Trainer", "make_trainer", "choose_members", "epoch_order",
    "prefetch",
    # Checkpoints, Demo
    "replace_file", "save", "load", "main",
]
# fmt: on


def __dir__() -> list[str]:  # what completion offers: no other module's names
    return [*__all__, "__doc__", "__version__"]


Array = jax.Array
PyTree = Any
Pair = int | Sequence[int]  # of heights and widths; one number is both
Real = float | Array  # a number, known or traced
Schedule = Callable[[Any], Any]  # step count, from 0 -> learning rate


# ---------------------------------------------------------------------------------
# Layers: parameters first, data second, options by keyword
# ---------------------------------------------------------------------------------


class Conv(NamedTuple):
    """Parameters of `conv`."""

    weight: Array  # [kh, kw, I, O]
    bias: Array | None  # [O]


def _he_normal(key: Array, shape: Sequence[int]) -> Array:
    """Draw from N(0, 2 / fan_in), for layers before a relu (He et al. 2015, eq. 10)."""
    shape = [_count(f"an axis of weights {[*shape]}", n) for n in shape]
    # Drawn flat, the numbers are the same, and XLA compiles them in half the time.
    numbers = jax.random.normal(key, (math.prod(shape),)).reshape(shape)
    return numbers * math.sqrt(2 / math.prod(shape[:-1]))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    """Return an int of 1 or more, or raise ValueError."""
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an int >= 1")
    return int(value)


def _pair(name: str, value: Pair) -> tuple[int, int]:
    """Read an int as (int, int), for heights and widths."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(map(_is_int, pair)) or min(pair) < 1:
        raise ValueError(f"{name} is {value!r}; expected an int >= 1, or two of them")
    return pair


def _output_size(images, size, stride, padding):
    """Return the (H', W') of windows on images [B, H, W, I], and zeros (above, left).

    Sizes are those of `jax.lax.conv_general_dilated`: with "SAME", H' = ceil(H /
    stride) and an odd row of zeros goes to the bottom or right; with "VALID",
    H' = floor((H - kh) / stride) + 1.
    """
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding is {padding!r}; expected 'SAME' or 'VALID'")
    if images.ndim != 4:
        raise ValueError(f"images have shape {images.shape}; expected [B, H, W, I]")
    pads = lax.padtype_to_pads(images.shape[1:3], size, stride, padding)
    axes = zip(images.shape[1:3], pads, size, stride)
    rows, columns = ((n + sum(pad) - k) // s + 1 for n, pad, k, s in axes)
    if min(rows, columns) < 1:
        found = f"images of shape {images.shape}; use a smaller window or 'SAME'"
        raise ValueError(f"a window of {size[0]}x{size[1]} does not fit {found}")
    return (rows, columns), (pads[0][0], pads[1][0])


def _shifted(x: Array, axis: int, count: int, length: int, stride: int = 1) -> list:
    """Slice `count` views of `length` steps along an axis, from 0, 1, 2 ... on."""
    span = (length - 1) * stride + 1
    return [lax.slice_in_dim(x, i, i + span, stride, axis) for i in range(count)]


def _check_features(inputs: Array, weight: Array, axis: int = -2) -> None:
    """Check inputs [..., I] against the axis of a layer's parameters that has I."""
    features = weight.shape[axis]
    if inputs.shape[-1:] != (features,):
        expected = f"[..., {features}], as parameters of shape {weight.shape} take"
        raise ValueError(f"inputs have shape {inputs.shape}; expected {expected}")


def _add_bias(outputs: Array, bias: Array) -> Array:
    """Add [O] to [..., O], also where jax_numpy_rank_promotion is "raise"."""
    return outputs + jnp.broadcast_to(bias, outputs.shape)


def conv_init(
    key: Array,
    in_channels: int,
    out_channels: int,
    kernel_size: Pair = 3,
    *,
    bias: bool = True,
) -> Conv:
    """Draw a convolution: weights from N(0, 2 / fan_in), bias zero, or None without."""
    kh, kw = _pair("kernel_size", kernel_size)
    weight = _he_normal(key, (kh, kw, in_channels, out_channels))
    return Conv(weight, jnp.zeros(out_channels) if bias else None)


# A convolution on CPU forms its patches and their products all at once where these are
# few, else for chunks of the batch that stay in a core's cache.  Bytes.
_FEW_BYTES, _CHUNK_BYTES = 6_000_000, 2_000_000


def _conv_patches(images, weight, *, stride, padding):
    """Convolve by a product of patches and kernel, and sums of shifted products.

    images [B, H, W, I], weight [kh, kw, I, O] -> [B, H', W', O].

    The kernel's rows are cut into `blocks` of `group` rows.  A patch holds `group` rows
    of a window, and its product with every block is formed at once; an output sums one
    product each of `blocks` patches that stand below each other.  One block is the
    usual product of whole windows.  Groups of as many rows as the stride copy a row no
    more than once for each column of the kernel: better, unless channels are few.
    """
    size, (channels, features) = weight.shape[:2], weight.shape[2:]
    (rows, columns), (above, left) = _output_size(images, size, stride, padding)
    (kh, _), (sh, sw), (height, width) = size, stride, images.shape[1:3]
    bands = -(-size[1] // sw)  # of sw columns each
    block_rows = -(-kh // sh)
    # Numbers to write for a position of the output, by whole windows and by groups.
    by_windows = kh * bands * sw * channels + features
    by_groups = sh * bands * sw * channels + block_rows * features
    if by_windows <= by_groups:
        group, blocks, patch_rows, skipped = kh, 1, rows, 0
    else:  # rows of zeros above and below need no patches
        group, blocks, (skipped, above) = sh, block_rows, divmod(above, sh)
        patch_rows = min(-(-(height + above) // sh), rows - 1 + blocks)
    below = (patch_rows - 1) * sh + group - height - above
    right = (columns - 1 + bands) * sw - width - left

    missing = [(0, blocks * group - kh), (0, bands * sw - size[1]), (0, 0), (0, 0)]
    kernel = jnp.pad(weight, missing)
    kernel = kernel.reshape(blocks, group, bands, sw * channels, features)
    kernel = kernel.transpose(2, 1, 3, 0, 4).reshape(-1, blocks * features)
    zero, no = jnp.zeros((), images.dtype), (0, 0, 0)

    def convolve(x):
        x = lax.pad(x, zero, [no, (above, below, 0), (left, right, 0), no])
        x = x.reshape(*x.shape[:2], x.shape[2] // sw, sw * channels)
        x = jnp.concatenate(_shifted(x, 1, group, patch_rows, sh), axis=-1)
        x = jnp.concatenate(_shifted(x, 2, bands, columns), axis=-1)
        products = x.reshape(-1, x.shape[-1]) @ kernel  # flat: XLA's fast gradients
        products = products.reshape(*x.shape[:3], blocks * features)
        outputs = []
        for i, product in enumerate(jnp.split(products, blocks, axis=-1)):
            edge = skipped - i, rows - patch_rows - skipped + i, 0  # negative: cut off
            outputs.append(lax.pad(product, zero, [no, edge, no, no]))
        return sum(outputs[1:], outputs[0])

    each = patch_rows * columns * min(by_windows, by_groups) * images.dtype.itemsize
    # Exported for any batch, its size is no number.
    if not _is_int(images.shape[0]) or (num_bytes := len(images) * each) <= _FEW_BYTES:
        return convolve(images)
    chunks = min(-(-num_bytes // _CHUNK_BYTES), len(images))
    chunk = -(-len(images) // chunks)
    x = jnp.pad(images, [(0, -len(images) % chunk), (0, 0), (0, 0), (0, 0)])
    x = x.reshape(-1, chunk, *images.shape[1:])
    # Patches are formed again for the gradient: cheaper than to keep them.
    outputs = lax.map(jax.checkpoint(convolve, prevent_cse=False), x)
    return outputs.reshape(-1, rows, columns, features)[: len(images)]


def _conv_library(x, weight, *, stride, padding):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weight, stride, padding, dimension_numbers=dims)


def conv(
    params: Conv, images: Array, *, stride: Pair = 1, padding: str = "SAME"
) -> Array:
    """Convolve images [B, H, W, I] to [B, H', W', O].

    Kernels of any size, odd or even; H' and W' as in `jax.lax.conv_general_dilated`
    (which, like this function, does not flip the kernel).  On CPU it is a product of
    patches and kernel, since XLA's convolution inside a loop is some fifty times
    slower there (jax issue 12868); elsewhere it is XLA's convolution.

    Raises ValueError for images that are not [B, H, W, I], another number of channels
    than the kernel's, a kernel larger than the images with "VALID", or an unknown
    padding.
    """
    images, (weight, bias) = jnp.asarray(images), params
    _check_features(images, weight)
    dtype = jnp.promote_types(images.dtype, weight.dtype)
    arrays = images.astype(dtype), weight.astype(dtype)
    how = dict(stride=_pair("stride", stride), padding=padding)
    cpu, default = (functools.partial(f, **how) for f in (_conv_patches, _conv_library))
    outputs = lax.platform_dependent(*arrays, cpu=cpu, default=default)
    return outputs if bias is None else _add_bias(outputs, bias)


class Dense(NamedTuple):
    """Parameters of `dense`."""

    weight: Array  # [I, O]
    bias: Array  # [O]


def dense_init(key: Array, in_features: int, out_features: int) -> Dense:
    """Draw a dense layer: weights from N(0, 2 / fan_in), bias zero."""
    return Dense(_he_normal(key, (in_features, out_features)), jnp.zeros(out_features))


def dense(params: Dense, inputs: Array) -> Array:
    """Map inputs [..., I] to [..., O].  Raises ValueError for another I."""
    _check_features(inputs, params.weight)
    return _add_bias(inputs @ params.weight, params.bias)


def _floats(x: Any, dtype: Any = float) -> Array:
    """Return integers and booleans in `dtype`, by default JAX's; floats as they are."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(dtype)


def _windows(images: Array, window: Any, stride: Any) -> list[Array]:
    """Slice images [B, H, W, I] into kh * kw views, each [B, H', W', I].

    View (i, j), in row-major order, holds pixel (i, j) of every window, without
    padding.
    """
    size = _pair("window", window)
    stride = size if stride is None else _pair("stride", stride)
    (rows, columns), _ = _output_size(images, size, stride, "VALID")
    bands = _shifted(images, 1, size[0], rows, stride[0])
    across = size[1], columns, stride[1]
    return [view for band in bands for view in _shifted(band, 2, *across)]


def avg_pool(images: Array, window: Pair = 2, *, stride: Pair | None = None) -> Array:
    """Average over windows of images [B, H, W, I], without padding: [B, H', W', I].

    `stride` defaults to `window`; H' = floor((H - window) / stride) + 1, so rows and
    columns that fill no window are left out.  Integers give floats.  Raises ValueError
    for a window larger than the images.
    """
    views = _windows(_floats(images), window, stride)
    return sum(views[1:], views[0]) / len(views)


def max_pool(images: Array, window: Pair = 2, *, stride: Pair | None = None) -> Array:
    """Take the maximum over windows of images [B, H, W, I]: [B, H', W', I].

    Windows and errors as in `avg_pool`.  Equal maxima share the gradient.
    """
    return functools.reduce(jnp.maximum, _windows(images, window, stride))


def _alone(tree: PyTree) -> PyTree:
    """Average over the replicas of a model that has none."""
    return tree


# A training step puts here what averages over its model's replicas.
_replica_mean = contextvars.ContextVar("replica_mean", default=_alone)


def replica_mean(tree: PyTree) -> PyTree:
    """Average every leaf over the replicas of the model that is being trained.

    For the `loss_fn` of an update or a trainer, where a statistic is to be that of the
    whole batch.  Anywhere else, and for a model on one device, values stay.  Integers
    and booleans give JAX's floats everywhere.
    """
    return _replica_mean.get()(jax.tree.map(_floats, tree))


class BatchNorm(NamedTuple):
    """Parameters of `batch_norm`; without scale, it is None."""

    scale: Array | None  # [C]
    bias: Array  # [C]


class BatchStats(NamedTuple):
    """Running statistics, part of a model's state and not of its parameters."""

    mean: Array  # [C]
    var: Array  # [C]


def batch_norm_init(channels: int, *, scale: bool = True) -> tuple:
    """Make (BatchNorm, BatchStats): scale 1, or None without; bias 0; mean 0, var 1."""
    channels = _count("channels", channels)
    zeros, ones = jnp.zeros(channels), jnp.ones(channels)
    return BatchNorm(ones if scale else None, zeros), BatchStats(zeros, ones)


def batch_norm(
    params: BatchNorm,
    stats: BatchStats,
    inputs: Array,
    *,
    training: bool,
    momentum: float = 0.99,
    eps: float = 1e-3,
) -> tuple[Array, BatchStats]:
    """Normalize each channel of inputs [..., C]; return outputs [..., C] and stats.

    scale (x - mean) / sqrt(var + eps) + bias (Ioffe and Szegedy 2015).  In training,
    mean and (biased) variance are those of the batch over all its replicas, and the
    running ones move towards them, r = momentum r + (1 - momentum) s, as in Keras;
    else the running ones are used and returned as they are.

    Integers give floats of the statistics' type.  Raises ValueError for another number
    of channels than the parameters', and in training for inputs without a row.
    """
    _check_features(inputs, params.bias, axis=0)
    if training and 0 in inputs.shape[:-1]:
        raise ValueError(f"inputs of shape {inputs.shape} have no row to train on")
    expand = functools.partial(jnp.broadcast_to, shape=inputs.shape)
    inputs = _floats(inputs, stats.mean.dtype)
    x, used = inputs.astype(stats.mean.dtype), stats
    if training:
        axes = tuple(range(x.ndim - 1))
        mean = replica_mean(x.mean(axes))
        used = BatchStats(mean, replica_mean(jnp.square(x - expand(mean)).mean(axes)))
        moved = (momentum * old + (1 - momentum) * new for old, new in zip(stats, used))
        stats = BatchStats(*moved)
    factor = lax.rsqrt(used.var + eps) * (1 if params.scale is None else params.scale)
    outputs = (x - expand(used.mean)) * expand(factor) + expand(params.bias)
    return outputs.astype(inputs.dtype), stats


def _check_range(name: str, value: Real, limit: float) -> None:
    """Raise ValueError unless 0 <= value < limit; a traced value is not known yet."""
    known = not isinstance(value, jax.core.Tracer)
    number = np.ndim(value) == 0 and not isinstance(value, str | None)
    if known and not (number and 0 <= value < limit):
        shown = value if number else repr(value)
        raise ValueError(f"{name} is {shown}; expected 0 <= {name} < {limit}")


def _times(number: Real, x: Array) -> Array:
    """Return number * x in the type of x, whatever the number's."""
    return jnp.asarray(number, jnp.result_type(x)) * x


def dropout(key: Array | None, inputs: Array, rate: Real = 0.5) -> Array:
    """Zero a fraction `rate` of inputs [...] at random; scale the rest by 1/(1 - rate).

    The expectation stays (Srivastava et al. 2014, section 10).  Integers give floats.
    Without a key, as in evaluation, returns inputs.  Raises ValueError for a rate
    outside [0, 1), unless it is traced.
    """
    _check_range("rate", rate, 1)
    if key is None:
        return inputs
    keep = 1 - jnp.asarray(rate, float)
    # Flat, as in `_he_normal`.
    kept = jax.random.bernoulli(key, keep, (inputs.size,)).reshape(inputs.shape)
    return jnp.where(kept, _times(1 / keep, _floats(inputs)), 0)


# ---------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------


class CNN(NamedTuple):
    """Parameters of `cnn`, two convolutions and two dense layers."""

    conv1: Conv  # [3, 3, I, 32]
    conv2: Conv  # [3, 3, 32, 64]
    dense1: Dense  # [H // 4 * (W // 4) * 64, 256]
    dense2: Dense  # [256, C]


def cnn_init(
    key: Array, *, image_shape: Sequence[int] = (28, 28, 1), num_classes: int = 10
) -> CNN:
    """Draw the network of Flax's ensembling guide, for images (H, W, I) in C classes.

    With the defaults, MNIST's, it has 824,458 parameters, as there.  Raises ValueError
    for another image_shape than three ints, images below 4 x 4, and for num_classes
    below 1 or not whole.
    """
    sizes = image_shape if np.shape(image_shape) == (3,) else (0, 0, 0)
    if not all(map(_is_int, sizes)) or min(sizes[:2]) < 4 or sizes[2] < 1:
        expected = "(H, W, channels), ints, with H and W >= 4: pad smaller images"
        raise ValueError(f"image_shape is {image_shape!r}; expected {expected}")
    height, width, channels = sizes
    keys = jax.random.split(key, 4)
    return CNN(
        conv_init(keys[0], channels, 32),
        conv_init(keys[1], 32, 64),
        dense_init(keys[2], height // 4 * (width // 4) * 64, 256),
        dense_init(keys[3], 256, _count("num_classes", num_classes)),
    )


def cnn(params: CNN, images: Array) -> Array:
    """Map images [B, H, W, I], pixels in [0, 1], to logits [B, C]."""
    x = avg_pool(jax.nn.relu(conv(params.conv1, images)))
    x = avg_pool(jax.nn.relu(conv(params.conv2, x)))
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(dense(params.dense1, x))
    return dense(params.dense2, x)


# ---------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------


def _check_labels(logits: Any, labels: Any) -> None:
    shape = logits.shape[:-1]
    if labels.shape != shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        found, expected = f"{labels.dtype}{[*labels.shape]}", f"integers {[*shape]}"
        raise ValueError(f"labels are {found}; expected {expected}, class indices")


def softmax_cross_entropy(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] in nats: logits [B, C], labels [B] -> [B].

    A label outside 0..C-1 gives nan.  Raises ValueError for labels that are not
    integers or not one per row of logits.
    """
    _check_labels(logits, labels)
    log_probs, index = jax.nn.log_softmax(_floats(logits)), labels.astype(int)
    inside = (index >= 0) & (index < logits.shape[-1])
    index = jnp.where(inside, index, logits.shape[-1])[..., None]
    return -jnp.take_along_axis(log_probs, index, axis=-1, mode="fill")[..., 0]


def gaussian_nll(mean: Array, variance: Array, targets: Array) -> Array:
    """Return -log N(target; mean, variance) in nats: three times [B] -> [B].

    (log(2 pi variance) + (target - mean)^2 / variance) / 2, the loss of a network with
    two outputs (Nix and Weigend 1994; Lakshminarayanan et al. 2017, eq. 1).  A variance
    that is not above 0 gives nan: make it so, as with softplus.  Raises ValueError for
    shapes that differ.
    """
    mean, variance, targets = map(_floats, (mean, variance, targets))
    shapes = [x.shape for x in (mean, variance, targets)]
    if len(set(shapes)) > 1:
        remedy = "expected the same; take [..., 0] of what ends in 1"
        raise ValueError(f"mean, variance and targets have shapes {shapes}; {remedy}")
    # By the deviation, whose square is finite in the gradient for any variance.
    deviation = jnp.sqrt(variance)
    error = (targets - mean) / deviation
    return jnp.log(deviation) + (math.log(2 * math.pi) + jnp.square(error)) / 2


def accuracy(logits: Array, labels: Array) -> Array:
    """Return the fraction of rows whose largest entry is the label's: a scalar.

    logits (or probabilities) [B, C], labels [B]; errors as `softmax_cross_entropy`.
    """
    _check_labels(logits, labels)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


# ---------------------------------------------------------------------------------
# Optimizers: Optax's GradientTransformation in shape, so either's drop into the other
# ---------------------------------------------------------------------------------


class Optimizer(NamedTuple):
    """A pair of functions, as `sgd` and `adam` make it, or as you write it.

    `init(params)` returns the optimizer's state, a tree of arrays.  `update(grads,
    opt_state, params)` returns what is to be added to the parameters, a tree like
    these, and the new state, whose leaves keep their shapes and types.  An `update`
    that takes `value` is given the loss by that name.  Signed descent, for example:

        def update(grads, opt_state, params=None):
            steps = jax.tree.map(lambda g: -0.01 * jnp.sign(g), grads)
            return steps, {"count": opt_state["count"] + 1}

        optimizer = Optimizer(lambda params: {"count": jnp.zeros((), int)}, update)

    Updates are added to the parameters and do not replace them: an `update` that
    returns new parameters makes them grow at every step, without an error.
    """

    init: Callable  # params -> opt_state
    update: Callable  # (grads, opt_state, params=None) -> (updates, opt_state)


class OptimizerLike(Protocol):
    """What is taken for an `Optimizer`: one of those, or of Optax's."""

    @property
    def init(self) -> Callable: ...
    @property
    def update(self) -> Callable: ...


def _check_params(params: PyTree) -> None:
    """Raise ValueError for parameters that are not real floating-point numbers."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name, dtype = jax.tree_util.keystr(path), jnp.result_type(leaf)
            raise ValueError(
                f"parameter '{name}' is {dtype}; expected floating point: make of a "
                "complex one two, and keep what is not trained in model_state"
            )


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to params, leaf by leaf, in the wider type; round to that of params.

    What is below half the distance from a parameter to the next number of its type is
    lost: in bfloat16 an update of less than 1/512 of it, and of 1/256 of some.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the type of means of numbers: float32, or a wider one that they have."""
    return dtype if dtype.kind in "fc" and dtype.itemsize > 2 else np.dtype(np.float32)


def _zeros(params: PyTree) -> PyTree:
    """Return zeros to add up what is like params, in float32 at least."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, _wide(jnp.result_type(p))), params)


def _as_schedule(learning_rate: Real | Schedule) -> Schedule:
    """Read a number as the function of the step count that always returns it."""
    if callable(learning_rate):
        return learning_rate
    _check_range("learning_rate", learning_rate, math.inf)
    return lambda count: learning_rate


class SGDState(NamedTuple):
    """What `sgd` keeps from step to step."""

    num_steps: Array  # [], that are done
    velocity: PyTree  # like params, in float32 at least


def sgd(
    learning_rate: Real | Schedule, momentum: Real = 0.9, *, nesterov: bool = False
) -> Optimizer:
    """Make stochastic gradient descent with momentum.

    v = mu v + g; w = w - eta v, or with Nesterov's w = w - eta (g + mu v): the form of
    PyTorch and Optax, which leaves eta out of v (Sutskever et al. 2013 fold it in).
    `learning_rate` is a number or a function of the step count, 0 at the first step.
    For parameters of less precision than float32, v and the updates are float32: a v of
    bfloat16 would stop where (1 - mu) v is below its rounding, as with mu = 0.999.

    Raises ValueError for a negative or non-finite learning rate and for a momentum
    outside [0, 1), unless they are traced, and for parameters that are not real
    floating-point numbers.
    """
    schedule = _as_schedule(learning_rate)
    _check_range("momentum", momentum, 1)

    def init(params):
        _check_params(params)
        return SGDState(jnp.zeros((), jnp.int32), _zeros(params))

    def update(grads, opt_state, params=None):
        num_steps, velocity = opt_state
        grads = jax.tree.map(lambda v, g: jnp.asarray(g, v.dtype), velocity, grads)
        add = functools.partial(jax.tree.map, lambda v, g: _times(momentum, v) + g)
        velocity = add(velocity, grads)
        steps = add(velocity, grads) if nesterov else velocity
        updates = jax.tree.map(functools.partial(_times, -schedule(num_steps)), steps)
        return updates, SGDState(num_steps + 1, velocity)

    return Optimizer(init, update)


class AdamState(NamedTuple):
    """What `adam` keeps from step to step."""

    num_steps: Array  # [], that are done
    mean: PyTree  # like params, in float32 at least, of gradients
    square: PyTree  # the same, of their squares


def adam(
    learning_rate: Real | Schedule, b1: Real = 0.9, b2: Real = 0.999, eps: Real = 1e-8
) -> Optimizer:
    """Make Adam (Kingma and Ba 2015, algorithm 1).

    m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g^2; with t the step, from 1,
    w = w - eta (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + eps).
    `learning_rate` is a number or a function of the step count, 0 at the first step.
    For parameters of less precision than float32, m, s and the updates are float32, as
    bfloat16 rounds b2 to 1, and float16 eps to 0.  (Optax's `mu_dtype` is of m alone; s
    has the type of the parameters there.)

    Raises ValueError for a learning rate or eps that is negative or not finite, and for
    b1 or b2 outside [0, 1), unless they are traced, and for parameters that are not
    real floating-point numbers.
    """
    schedule = _as_schedule(learning_rate)
    _check_range("b1", b1, 1)
    _check_range("b2", b2, 1)
    _check_range("eps", eps, math.inf)

    def init(params):
        _check_params(params)
        return AdamState(jnp.zeros((), jnp.int32), _zeros(params), _zeros(params))

    def update(grads, opt_state, params=None):
        num_steps, mean, square = opt_state
        # As arrays, so that 1 - b1 rounds alike for numbers known and traced.
        beta1, beta2, t = (jnp.asarray(x, float) for x in (b1, b2, num_steps + 1))

        def average(beta, old, new):
            return _times(beta, old) + _times(1 - beta, new)

        grads = jax.tree.map(lambda m, g: jnp.asarray(g, m.dtype), mean, grads)
        mean = jax.tree.map(lambda m, g: average(beta1, m, g), mean, grads)
        square = jax.tree.map(lambda s, g: average(beta2, s, g * g), square, grads)
        rate, root = schedule(num_steps) / (1 - beta1**t), jnp.sqrt(1 - beta2**t)

        def step(m, s):
            denominator = jnp.sqrt(s) / root.astype(s.dtype) + jnp.asarray(eps, s.dtype)
            return _times(-rate, m) / denominator

        updates = jax.tree.map(step, mean, square)
        return updates, AdamState(num_steps + 1, mean, square)

    return Optimizer(init, update)


def _schedule(peak: Real, num_steps: Real, warmup: Real, shape: Callable) -> Schedule:
    """Return peak shape(t): t is 0 -> 1 over the warmup, then 1 -> 0 to the end."""
    _check_range("peak", peak, math.inf)
    _check_range("num_steps", num_steps, 2**31)
    _check_range("warmup", warmup, 1)

    def schedule(step):
        # Of the num_steps + 2 points from 0 to 1, the steps take the inner ones: the
        # first and the last step have a rate above 0.  Counted from either end, in
        # integers, so that none rounds to 0.
        with jax.numpy_dtype_promotion("standard"):  # of integers and floats together
            step = jnp.asarray(step, jnp.result_type(step, jnp.int32))
            points = jnp.asarray(num_steps, float) + 1
            start = jnp.asarray(warmup, float)
            rise = (step + 1) / (points * start)
            fall = (num_steps - step) / (points * (1 - start))
            return peak * shape(jnp.clip(jnp.minimum(rise, fall), 0))

    return schedule


def linear_schedule(peak: Real, num_steps: Real, *, warmup: Real = 0.15) -> Schedule:
    """Make a learning rate that rises linearly to `peak` and falls linearly to 0.

    It rises over the fraction `warmup` of `num_steps` (Howard and Ruder 2018, slanted
    triangular; Goyal et al. 2017 for the warmup), and stays 0 after the last step.

    Raises ValueError for a peak that is negative or not finite, a num_steps outside
    [0, 2^31) and a warmup outside [0, 1), unless they are traced.
    """
    return _schedule(peak, num_steps, warmup, lambda t: t)


def cosine_schedule(peak: Real, num_steps: Real, *, warmup: Real = 0.15) -> Schedule:
    """Make a learning rate that rises and falls as `linear_schedule`, in half cosines.

    peak (1 - cos(pi t)) / 2, with t rising 0 to 1, then falling (Loshchilov and Hutter
    2017, without restarts).  Raises ValueError as `linear_schedule` does.
    """
    # (1 - cos(x)) / 2 = sin(x / 2)^2, which is above 0 where cos(x) rounds to 1.
    return _schedule(peak, num_steps, warmup, lambda t: jnp.sin(jnp.pi / 2 * t) ** 2)


# ---------------------------------------------------------------------------------
# Devices: trees to and from a leading device axis
# ---------------------------------------------------------------------------------


def use_cpu_devices(num_devices: int | None = None) -> None:
    """Divide the CPU into virtual devices, one a core by default.

    Call it before JAX first touches a device; later it leaves things as they are, with
    a warning where these are fewer (with JAX 0.5.0, without).  Has no effect on other
    platforms.  Raises ValueError for a number below 1 or not whole.
    """
    if num_devices is None:
        affinity = getattr(os, "sched_getaffinity", None)
        num_devices = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", _count("num_devices", num_devices))
    except RuntimeError:  # JAX runs, with the devices that it has
        if jax.default_backend() == "cpu" and (lack := _lack(num_devices)):
            warnings.warn(lack, stacklevel=2)


def _lack(asked: int) -> str:
    """Say what there is and what to do where local devices are fewer; else nothing."""
    there = jax.local_device_count()
    more = f"use_cpu_devices({asked}) before JAX runs, in a new process, makes more"
    text = f"{asked} devices are asked for; there are {there} (on CPU, {more})"
    return text if there < asked else ""


def _num_devices(number: int | None) -> int:
    return jax.local_device_count() if number is None else _count("num_devices", number)


def _split_axis(x, axis, d):
    """Reshape [..., N, ...] to [..., d, N / d, ...], or raise ValueError."""
    if np.ndim(x) < 1:
        raise ValueError("a leaf without axes cannot be split; replicate it instead")
    x = x if hasattr(x, "reshape") else np.asarray(x)
    n = x.shape[axis]
    if n % d:
        remedy = f"use a multiple of {d}, for example {n - n % d or d}"
        raise ValueError(f"a batch of {n} does not split over {d} devices; {remedy}")
    return x.reshape(*x.shape[:axis], d, n // d, *x.shape[axis + 1 :])


def split(tree: PyTree, num_devices: int | None = None) -> PyTree:
    """Reshape every leaf [N, ...] to [D, N / D, ...]; D defaults to the local devices.

    Rows keep their order; none is dropped or repeated.  NumPy arrays stay on the host.
    Raises ValueError when D does not divide N, and for leaves without an axis.
    """
    d = _num_devices(num_devices)
    return jax.tree.map(lambda x: _split_axis(x, 0, d), tree)


def merge(tree: PyTree) -> PyTree:
    """Reshape every leaf [D, n, ...] to [D * n, ...]: the inverse of `split`.

    Raises ValueError for leaves with fewer than two axes.
    """

    def reshape(x):
        if np.ndim(x) < 2:
            raise ValueError(f"a leaf of shape {np.shape(x)} is not [D, n, ...]")
        x = x if hasattr(x, "reshape") else np.asarray(x)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(reshape, tree)


def _sharding(devices: Sequence, axis: str, *spec: str) -> Any:
    """Lay arrays over devices: their first axis, or without spec the whole on each."""
    mesh = jax.sharding.Mesh(np.array(devices), (axis,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _device_sharding(num_devices: int, axis: str = "devices") -> Any:
    """Lay a leading axis [D, ...] over the first D local devices."""
    if lack := _lack(num_devices):
        raise ValueError(lack)
    return _sharding(jax.local_devices()[:num_devices], axis, axis)


def replicate(tree: PyTree, num_devices: int | None = None) -> PyTree:
    """Copy every leaf [...] to [D, ...], one copy on each of the first D devices.

    D defaults to the number of local devices.  The copies are new buffers: consuming
    them leaves `tree` as it was.  Raises ValueError when there are fewer devices.
    """
    sharding = _device_sharding(_num_devices(num_devices))

    def copy(x):
        x = jnp.asarray(x)[None]  # computed, so a buffer that nobody else holds
        shards = [jax.device_put(x, d) for d in sharding.mesh.devices]
        shape = len(shards), *x.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return jax.tree.map(copy, tree)


def unreplicate(tree: PyTree) -> PyTree:
    """Take the first of the D copies of every leaf [D, ...]; the others do not move.

    Raises ValueError for leaves without an axis.
    """

    def first(x):
        if np.ndim(x) < 1:
            raise ValueError("a leaf without axes is not [D, ...]; it is one copy")
        copy = x.addressable_shards[0].data if isinstance(x, jax.Array) else x
        return copy if copy.ndim < x.ndim else copy[0]

    return jax.tree.map(first, tree)


# ---------------------------------------------------------------------------------
# Updates: one step, for one model on one device, and the two places of its copies
# ---------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """What training changes: of one model, or with leading axes of several."""

    params: PyTree
    opt_state: PyTree
    model_state: PyTree  # what a model keeps besides parameters: running statistics
    key: Array | None  # random key of the member, a new one after every stateful step

    def __repr__(self) -> str:  # without a look at the numbers, which may be gone
        forms = [f"{name}={_form(x)}" for name, x in zip(self._fields, self)]
        return f"TrainState({', '.join(forms)})".replace("'", "")


def _form(tree: PyTree) -> PyTree:
    """Name type and shape of every leaf."""

    def name(x):
        return f"{getattr(x, 'dtype', type(x).__name__)}{[*np.shape(x)]}"

    return jax.tree.map(name, tree)


def _check_form(what: str, made: PyTree, given: PyTree) -> None:
    """Raise ValueError unless two trees have the same structure, shapes and types."""
    made, given = _form(made), _form(given)
    found: Any = jax.tree.structure(made)
    if found != (like := jax.tree.structure(given)):
        raise ValueError(f"{what} has the structure {found}; expected {like}")
    for (path, x), old in zip(jax.tree.leaves_with_path(made), jax.tree.leaves(given)):
        if x != old:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"{what} has the leaf '{name}' {x}; expected {old}")


def train_state(
    params: PyTree,
    optimizer: OptimizerLike,
    *,
    model_state: PyTree = (),
    key: Array | None = None,
) -> TrainState:
    """Make the state of one model.

    `replicate` it for sync mode; stack D of them, of different keys, for ensemble mode
    (or `jax.pmap` a function of the key that makes one).  `key` is an old-style
    `PRNGKey` or a new-style `key`; only losses with `stateful=True` need it.
    """
    return TrainState(params, optimizer.init(params), model_state, key)


def _call(what: str, given: str, function: Callable, *args) -> Any:
    """Call what the user gave, or raise ValueError where it takes other arguments."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}; {given}") from error


def _full_loss(loss_fn, more, has_aux, stateful) -> Callable:
    """Give every loss one form; it takes `more` last.

    (params, model_state, key, *batch) -> (loss, (model_state, aux)), with floats in aux
    """

    def loss(params, model_state, key, *batch):
        model = (params, model_state, key) if stateful else (params,)
        given = f"it is given {len(batch)} of the batch or data"
        result = _call("loss_fn", given, loss_fn, *model, *batch, *more)
        value, rest = result if has_aux or stateful else (result, ())
        shapes = [jnp.shape(x) for x in jax.tree.leaves(value)]
        if shapes != [()]:
            raise ValueError(
                f"loss_fn returns a loss of shapes {shapes}; expected one number, the "
                "mean over examples, and what else there is with has_aux=True"
            )
        if not stateful:
            rest = model_state, rest
        elif not has_aux:
            rest = rest, ()
        new_model_state, aux = rest
        aux = jax.tree.map(lambda x: _floats(jnp.asarray(x)), aux)
        return value, (new_model_state, aux)

    return loss


def _num_parts(batch: PyTree, model_state: PyTree, microbatch: int | str | None) -> int:
    """Return in how many micro-batches a device's batch [B, ...] is worked through."""
    if any(np.shape(x)[:1] == (0,) for x in jax.tree.leaves(batch)):
        raise ValueError("the batch is empty; expected one or more examples")
    rows = jax.tree.leaves(batch)[0].shape[0] if microbatch else 0
    if isinstance(microbatch, str):  # "auto"
        at_once = jax.default_backend() != "cpu" or jax.tree.leaves(model_state)
        sizes = () if at_once else range(16, 33)  # whose work stays in a core's cache
        microbatch = max((n for n in sizes if rows % n == 0), default=None)
    if not microbatch or rows <= microbatch:
        return 1
    if rows % microbatch:
        raise ValueError(
            f"a device's batch of {rows} does not divide into micro-batches of "
            f"{microbatch}; use a divisor of {rows}"
        )
    if jax.tree.leaves(model_state):
        raise ValueError(
            f"microbatch={microbatch} would take the model state, such as batch "
            f"statistics, from parts of a batch of {rows}; use microbatch=None"
        )
    return rows // microbatch


# XLA:CPU has a fast routine for convolutions of NHWC images and HWIO kernels.  It
# brings others into that form, but not in a loop, where gradients took some sixty times
# as long (jax issue 12868).  So that is done here, before XLA sees them.  The routine
# reads memory that nobody wrote (JAX 0.5, 0.10) where an axis is padded by (-p, +p), as
# gradients of causal convolutions are: a negative padding is cut before.


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    """Return the form NHWC, HWIO -> NHWC, for any number of axes."""
    last, *space = ndim - 1, *range(1, ndim - 1)
    images, kernel = (0, last, *space), (last, last - 1, *range(ndim - 2))
    return lax.ConvDimensionNumbers(images, kernel, images)


def _has_negative_padding(how: dict) -> bool:
    return any(pad < 0 for pads in how["padding"] for pad in pads)


def _convolve(lhs, rhs, *, dimension_numbers, **how):
    """Do a convolution of any form; on CPU by one of NHWC, between transposes."""
    (batch, features, *space), (out, ins, *window), (b, f, *s) = dimension_numbers
    # Gradients name a sharding, with which groups could not be mapped by `vmap`.
    how |= dict.fromkeys({"out_sharding"} & how.keys())

    def convolve(lhs, rhs, **own):
        return lax.conv_general_dilated_p.bind(lhs, rhs, **how | own)

    def on_cpu(lhs, rhs):
        lhs = lhs.transpose(batch, *space, features)
        rhs = rhs.transpose(*window, ins, out)
        own, groups = {}, how["batch_group_count"]
        if _has_negative_padding(how):
            pads = [(*p, d - 1) for p, d in zip(how["padding"], how["lhs_dilation"])]
            no, zero = (0, 0, 0), jnp.zeros((), lhs.dtype)
            lhs = lax.pad(lhs, zero, [no, *pads, no])
            own = dict(padding=((0, 0),) * len(s), lhs_dilation=(1,) * len(s))
        if groups > 1:  # of the batch: the same groups of features are faster
            lhs = jnp.moveaxis(lhs.reshape(groups, -1, *lhs.shape[1:]), 0, -2)
            lhs = lhs.reshape(*lhs.shape[:-2], groups * lhs.shape[-1])
            own |= dict(batch_group_count=1, feature_group_count=groups)
        outputs = convolve(lhs, rhs, dimension_numbers=_channels_last(lhs.ndim), **own)
        return outputs.transpose(np.argsort((b, *s, f)))

    as_it_is = functools.partial(convolve, dimension_numbers=dimension_numbers)
    return lax.platform_dependent(lhs, rhs, cpu=on_cpu, default=as_it_is)


def _rewrite(x: Any) -> Any:
    """Put `_convolve` for each convolution in a program of JAX's, at any depth.

    x is a program, a step of one, or a leaf of a step's parameters, which may be a
    program too.  What there is nothing to change in is returned as it is.
    """
    if isinstance(x, core.Jaxpr):
        eqns = [*map(_rewrite, x.eqns)]
        same = all(map(operator.is_, eqns, x.eqns))
        return x if same else x.replace(eqns=eqns)
    if isinstance(x, core.ClosedJaxpr):  # before JAX 0.12, where it is the same class
        jaxpr = _rewrite(x.jaxpr)
        return x if jaxpr is x.jaxpr else x.replace(jaxpr=jaxpr)
    if not isinstance(x, core.JaxprEqn):
        return x
    if x.primitive is lax.conv_general_dilated_p:
        form = x.params["dimension_numbers"]
        canonical = form == _channels_last(len(form.lhs_spec))
        if canonical and not _has_negative_padding(x.params):
            return x
        program = jax.jit(functools.partial(_convolve, **x.params))
        with jax.disable_jit(False):  # inlined, it would be no step
            call = jax.make_jaxpr(program)(*(v.aval for v in x.invars)).eqns[0]
        return x.replace(primitive=call.primitive, params=call.params)
    if x.params.get("branches_platforms"):  # chosen by whoever wrote it, as in `conv`
        return x
    leaves, treedef = jax.tree.flatten(x.params)
    new = [*map(_rewrite, leaves)]
    same = all(map(operator.is_, new, leaves))
    return x if same else x.replace(params=jax.tree.unflatten(treedef, new))


def _fast_in_loops(f: Callable) -> Callable:
    """Return f with fast convolutions, gradients' too; not to be differentiated again.

    f is traced once, and its program, convolutions apart, is the one that is evaluated.
    """

    def evaluate(*args):
        # Of a function that is new, as JAX keeps what it has traced by the function.
        program, made = jax.make_jaxpr(lambda *args: f(*args), return_shape=True)(*args)
        outputs = core.jaxpr_as_fun(_rewrite(program))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(made), outputs)

    return evaluate


def _average(tree: PyTree, axis: str, groups: list | None = None) -> PyTree:
    """Average over replicas in float32 at least; leaves keep their types."""
    wide = jax.tree.map(lambda x: x.astype(_wide(x.dtype)), tree)
    means = lax.pmean(wide, axis, axis_index_groups=groups)
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, tree)


def _make_step(average, part, loss_fn, optimizer, more, *options) -> Callable:
    """Make the training step: (state, *batch) -> (state, metrics).

    average(tree) is over the model's replicas.  One of these sees a part of the batch,
    and part() is its number, from 0.  `more` is what the loss takes last.  The options
    are those of `make_sync_update`, in their order.
    """
    has_aux, stateful, microbatch, skip_nonfinite = options
    loss_fn = _full_loss(loss_fn, more, has_aux, stateful)
    loss_and_grads = _fast_in_loops(jax.value_and_grad(loss_fn, has_aux=True))
    if microbatch not in (None, "auto"):
        _count("microbatch", microbatch)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}; expected one with init and "
            "update, such as sgd(0.1)"
        )
    parameters = inspect.signature(optimizer.update).parameters.values()
    takes_value = any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)

    def step(state, *batch):
        params, opt_state, model_state, key = state
        num_parts = _num_parts(batch, model_state, microbatch)
        if stateful:
            if key is None:
                raise ValueError(
                    "stateful=True takes a random key; make the state with "
                    "train_state(..., key=key)"
                )
            key, loss_key = jax.random.split(key)

        def add(total, numbered_rows):
            # Each part of the batch, here or on another replica, draws its own numbers.
            i, rows = numbered_rows
            rows_key = None
            if stateful:
                rows_key = jax.random.fold_in(loss_key, part() * num_parts + i)
            result, grads = loss_and_grads(params, model_state, rows_key, *rows)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            return total, result

        def mean(x):  # over the parts
            x = x.astype(_wide(x.dtype))
            return x.mean(axis=0) if num_parts > 1 else x[0]

        def cut(x):
            return split(x, num_parts) if num_parts > 1 else x[None]

        parts = jnp.arange(num_parts, dtype=jnp.int32), jax.tree.map(cut, batch)
        context = contextvars.copy_context()  # for what is traced in it alone
        context.run(_replica_mean.set, average)
        total, results = context.run(lax.scan, add, _zeros(params), parts)
        loss, (new_model_state, aux) = results
        loss, aux = jax.tree.map(mean, (loss, aux))
        new_model_state = jax.tree.map(lambda x: x[0], new_model_state)  # of one part
        grads = jax.tree.map(lambda g: g / num_parts, total)
        grads, loss, aux = average((grads, loss, aux))
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        _check_form("the model state of loss_fn", new_model_state, model_state)
        new_model_state = jax.tree.map(
            # Counts and keys have no mean; replicas advance them alike.
            lambda x: average(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
            new_model_state,
        )
        more = {"value": loss} if takes_value else {}

        def optimize(_, both):
            params, opt_state = both
            updates, new = optimizer.update(grads, opt_state, params, **more)
            _check_form("the optimizer's new state", new, opt_state)
            return apply_updates(params, updates), new

        # On a CPU, XLA cannot see that this loop runs once, so it compiles the body by
        # itself: otherwise bits would depend on fusion, and so on K.  An accelerator
        # sees it, and has no loop whose end the host would have to ask for.
        hide = lax.optimization_barrier
        once = lax.platform_dependent(1, cpu=hide, default=lambda x: x)
        given = "it is given gradients, state, parameters and, by name, value=loss"
        loop = lax.fori_loop, 0, once, optimize, state[:2]
        new = *_call("the optimizer's update", given, *loop), new_model_state
        if skip_nonfinite:  # replicas see the same averages, so they skip together
            finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((loss, grads))]
            ok, old = jnp.stack(finite).all(), (params, opt_state, model_state)
            new = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
            loss = jnp.where(ok, loss, jnp.nan)
        state = TrainState(*new, key)
        return state, (loss, aux) if has_aux else loss

    return step


_ANY = "one or more arrays, all of one length, 1 or more"


def _check_axes(what, tree, *lengths, expected=_ANY):
    """Raise ValueError unless the first axes of all leaves are the same.

    They are as many as `lengths`, by default one, and as long, where that is not None,
    and none is of length 0.
    """
    leaves, lengths = jax.tree.leaves(tree), lengths or (None,)
    axes = {tuple(np.shape(x)[: len(lengths)]) for x in leaves}
    first = min(axes, default=())
    fits = all(n in (None, m) for n, m in zip(lengths, first))
    if len(axes) != 1 or len(first) != len(lengths) or not fits or 0 in first:
        numbers = "; a list holds numbers: numpy.array(...) of it is one leaf"
        raise ValueError(
            f"the first axes of the {what} have lengths {sorted(axes)}; expected "
            f"{expected}{numbers if any(map(np.isscalar, leaves)) else ''}"
        )


def _array(what: str, x: Any) -> Any:
    """Return a leaf as JAX's array or as NumPy's; raise ValueError where it is none."""
    if isinstance(x, (Array, jax.ShapeDtypeStruct)):
        return x
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # a gradient is the last
        raise ValueError(f"{what}: {error}; expected numbers of NumPy's") from error
    masked, kind = isinstance(x, np.ma.MaskedArray), array.dtype
    if masked or kind.kind in "OSUMm" or kind.type is np.void:
        found = f"{type(x).__name__} of {kind}"
        raise ValueError(f"{what}: found {found}; expected numbers, none masked")
    return array


def _numbers(what: str, x: Any) -> Any:
    """Return a leaf as JAX's array, or as NumPy's of a type that JAX has.

    Raises ValueError for an array of other types, and where JAX's type changes it.
    """
    x = _array(what, x)
    if isinstance(x, Array):
        return x
    given = x.astype(x.dtype.newbyteorder("="), copy=False)
    remedy, kind = "convert it, as by x.astype(numpy.float32)", np.empty(0, given.dtype)
    held = given.astype(_call(what, remedy, jnp.result_type, kind), copy=False)
    if held is not given and held.dtype.kind in "iu" and (held != given).any():
        raise ValueError(
            f"{what}: found {given[held != given][0]}, beyond {held.dtype}, JAX's "
            f"type for {given.dtype}; use smaller numbers, or set jax_enable_x64"
        )
    return held


def _private(what: str, tree: PyTree) -> PyTree:
    """Copy what is not JAX's: `jax.device_put` may share an array's memory on a CPU."""
    return jax.tree.map(
        lambda x: x if isinstance(x, Array) else np.array(_numbers(what, x)), tree
    )


def _check_keys(key_data: Any, members: Sequence[int] | np.ndarray) -> None:
    """Raise ValueError unless keys [n] are equal where members [n] are, and only so."""
    rows = [row.tobytes() for row in jax.device_get(key_data)]
    first: dict = {}  # that is of a member, or has a key
    for i, (member, row) in enumerate(zip(members, rows)):
        if rows[j := first.setdefault(member, i)] != row:
            raise ValueError(
                f"replicas {j} and {i} have different keys, so they would drift apart; "
                "make them with replicate(train_state(...))"
            )
        if members[j := first.setdefault(row, i)] != member:
            raise ValueError(
                f"members {j} and {i} have equal keys, so they would draw alike; use "
                f"jax.random.split(key, {len(rows)})"
            )


def _no_mesh() -> Any:
    """Hide the mesh that a caller has set by `jax.set_mesh`: programs here have theirs.

    JAX before 0.7 cannot set one.
    """
    none = jax.sharding.Mesh(np.empty((), object), ())
    return jax.set_mesh(none) if hasattr(jax, "set_mesh") else contextlib.nullcontext()


def _run(program: Callable, alone: bool, *args) -> Any:
    """Call a mapped program, alone where its devices are a CPU's and wait for others.

    XLA:CPU serves all virtual devices with one pool of threads.  If programs that wait
    pile up in it, no thread may be left for the last device to arrive, and the process
    aborts: so a CPU runs one of them at a time, from its arguments to its results.
    """
    wait = jax.block_until_ready if alone else lambda x: x
    # Its arguments lie on the devices already, or on purpose on the host.
    with _no_mesh(), jax.transfer_guard_host_to_device("allow"):
        return wait(program(*wait(args)))


def _gather_devices(x: Array | np.ndarray) -> np.ndarray:
    """Bring [D, ...] to the host from the devices of this and all other processes."""
    with jax.transfer_guard_device_to_host("allow"):  # faster than `jax.device_get`
        x = np.asarray(x)
    if jax.process_count() == 1:
        return x
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def gather_processes(x: Any) -> np.ndarray:
    """Stack what each process calls this with: [P, ...], the same in all of them.

    Every process has to call it, with the same shape and a dtype that JAX has.
    """
    return _gather_devices(np.asarray(x)[None])


def _is_key(leaf: Any) -> bool:
    """Whether a leaf, or what stands for it, is a typed random key."""
    ours = isinstance(leaf, (Array, jax.ShapeDtypeStruct))
    return ours and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_consumed(state: PyTree) -> bool:
    leaves = jax.tree.leaves(state)
    return any(isinstance(x, Array) and x.is_deleted() for x in leaves)


def _check_state(state: Any) -> None:
    """Raise ValueError unless it is a state, outside of `jax.jit`."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state))
    # By its fields, since a reloaded module has another class.
    if traced or getattr(state, "_fields", ()) != TrainState._fields:
        found = "traced, so inside of jax.jit" if traced else type(state).__name__
        expected = "a TrainState, as init returns it, or load with like"
        raise ValueError(f"the state is {found}; expected {expected}")


def _check_apart(state: PyTree) -> None:
    """Raise ValueError where two leaves of a state on devices share a buffer."""
    names: dict[Any, str] = {}
    for path, x in jax.tree.leaves_with_path(state):
        name, buffer = jax.tree_util.keystr(path), id(x)
        if x.size and not _is_key(x):
            buffer = x.addressable_data(0).unsafe_buffer_pointer()
        if buffer in names:
            raise ValueError(
                f"leaves '{names[buffer]}' and '{name}' of the state are one buffer, "
                "which cannot be reused for both; copy one with jax.numpy.copy"
            )
        names[buffer] = name


def _admit(owner: Any, state: Any, place: Callable, consume: bool = True) -> TrainState:
    """Let a state in, by the one door to a program: return it on the devices.

    What the owner's last step returned is known.  Any other is placed by place(state),
    which raises for one that is not the owner's, and where it will be consumed, no two
    of its leaves may be one buffer.
    """
    _check_state(state)
    if _is_consumed(state):
        raise ValueError(
            "the state was consumed by an earlier update or epoch; go on with the one "
            "that it returned, state, metrics = update(state, ...), which a trainer "
            "keeps as trainer.latest, or where that call failed, with what was saved"
        )
    leaves, latest = jax.tree.leaves(state), jax.tree.leaves(owner.latest)
    if len(leaves) == len(latest) and all(map(operator.is_, leaves, latest)):
        return state
    state = place(state)
    if consume:
        _check_apart(state)
    return state


def _consume(owner: Any, program: Callable, state: PyTree, *rest) -> tuple:
    """Call program(state, *rest) -> (state, metrics), which reuses state's buffers."""
    # 1. During the call `guard` stands before what handles SIGINT.
    # 2. Until the buffers are taken nothing is lost, and compiling may take long: an
    #    interrupt goes on at once, and where its handler returns, guard is back.
    # 3. From then on interrupts wait, until what was made is the owner's latest.
    # 4. The handler is back, the one that was set last, and those that waited go on.
    handler: Any = signal.getsignal(signal.SIGINT)
    waiting = 0

    def guard(*interrupt):
        nonlocal handler, waiting
        if _is_consumed(state):
            waiting += 1
        else:
            itself = signal.signal(signal.SIGINT, handler)  # by no name: no cycle
            signal.raise_signal(signal.SIGINT)
            handler = signal.signal(signal.SIGINT, itself)

    # Only the main thread is interrupted, and only there can handlers be set.
    main = threading.main_thread() is threading.current_thread()
    guarded = main and callable(handler)
    try:
        if guarded:
            signal.signal(signal.SIGINT, guard)
        result = program(state, *rest)
        object.__setattr__(owner, "latest", result[0])  # frozen for all others
    finally:
        if guarded and (last := signal.signal(signal.SIGINT, handler)) is not guard:
            signal.signal(signal.SIGINT, last)
    for _ in range(waiting):
        signal.raise_signal(signal.SIGINT)
    return result


def _make_update(replicas: bool, *args) -> Callable:
    """Map the step over the devices; check and place the states that come from afar."""
    axis = "devices" if replicas else "members"
    average = functools.partial(_average, axis=axis) if replicas else _alone
    step = _make_step(average, lambda: lax.axis_index(axis) if replicas else 0, *args)
    pmapped = jax.pmap(step, axis_name=axis, donate_argnums=0)

    def place(state):
        _check_axes("state", state)
        if state.key is not None:
            keys = _gather_devices(jax.random.key_data(state.key))
            _check_keys(keys, np.zeros(len(keys)) if replicas else range(len(keys)))
        num_devices = np.shape(jax.tree.leaves(state)[0])[0]
        sharding = _device_sharding(num_devices, axis)
        return jax.device_put(_private("state", state), sharding)

    def update(state, *batch):
        """Take a step: (state, metrics).  `state` is consumed."""
        state = _admit(update, state, place)
        expected = "the number of devices in all of them: replicate or split them"
        _check_axes("state and the batch", (state, batch), expected=expected)
        alone = replicas and jax.default_backend() == "cpu"
        program = functools.partial(_run, pmapped, alone)
        return _consume(update, program, state, *_private("batch", batch))

    vars(update)["latest"] = None
    return update


def make_sync_update(
    loss_fn: Callable,
    optimizer: OptimizerLike,
    *,
    has_aux: bool = False,
    stateful: bool = False,
    microbatch: int | str | None = None,
    skip_nonfinite: bool = False,
) -> Callable:
    """Make update(state, *batch) -> (state, metrics) for one model on D devices.

    Every leaf has a leading device axis: `state` from `replicate`, each batch leaf
    [D, B / D, ...] from `split`.  `loss_fn(params, *batch)` returns the mean loss of
    its part, a scalar, or `(loss, aux)` with `has_aux`; gradients, loss and aux are
    averaged over the replicas, so the step equals one on the whole batch, to rounding,
    and the replicas stay bit-identical.  `metrics` is the loss [D] or `(loss, aux)`,
    D equal copies.  Aux is a tree of means over the batch too: integers and booleans
    become floats, and what is of each example would be averaged over different ones.
    All means and sums are taken in float32 at least, and so are loss and aux returned.

    With `stateful`, `loss_fn(params, model_state, key, *batch)` returns
    `(loss, model_state)`, or `(loss, (model_state, aux))`; floating-point leaves of the
    model state are averaged too.  Other leaves, such as counts of steps, are not: they
    must not depend on the batch, of which each replica sees a part.  The key is another
    for every part of the batch and every step, so a loss that draws (dropout) takes
    another step where the batch is in other parts: with D, unless `microbatch` is set.

    With `microbatch`, a device works through its batch that many examples at a time and
    averages loss, aux and gradients: in less memory, and faster on CPU, where the work
    then stays in cache.  For a loss that is a mean over its examples it is the same
    step, to rounding; for others, such as a sum, a contrast between examples or a mean
    over some of them, it is another.  "auto" takes on CPU the largest size from 16 to
    32 that divides a device's batch, where there is no model state.  With `stateful`,
    the key is another for every micro-batch, and the same on whichever device it
    stands: with one size that divides B / D for every D, draws do not depend on D.

    An `optimizer` whose update takes `value`, as some of Optax's do, is given the loss.

    With `skip_nonfinite`, a step whose loss or averaged gradient is not finite changes
    nothing but the key, in all replicas alike, and its loss is nan.

    Where JAX runs in several processes (`jax.distributed`), each calls `update` with
    what lies on its own devices, D of them; averages are taken over all processes.

    `state` is consumed: its buffers are reused for the result, which is `update.latest`
    too, where Ctrl-C does not lose it.  A batch of NumPy arrays is copied.

    Raises ValueError for what is no optimizer.  So does `update`, before anything is
    consumed, for other leading axes, an empty batch, a state that was consumed or has
    one buffer in two leaves, replicas of unequal keys, micro-batches that do not divide
    the batch or meet a model state, a model state that is returned in another form, and
    a loss_fn or an optimizer that takes other arguments than it is given.
    """
    options = loss_fn, optimizer, (), has_aux, stateful, microbatch, skip_nonfinite
    return _make_update(True, *options)


def make_ensemble_update(
    loss_fn: Callable,
    optimizer: OptimizerLike,
    *,
    has_aux: bool = False,
    stateful: bool = False,
    microbatch: int | str | None = None,
    skip_nonfinite: bool = False,
) -> Callable:
    """Make update(state, *batch) -> (state, metrics) for D members, one a device.

    As `make_sync_update`, but nothing crosses devices: each leaf of `state` [D, ...]
    holds D independent models, each leaf of the batch [D, B, ...] a batch for each
    (`replicate` a batch to show all members the same), and `metrics` [D] are their own.
    Whatever one member meets, nan included, leaves the others' bits as they are; with
    `skip_nonfinite`, a member skips its step alone.

    `state` is consumed: its buffers are reused for the result.

    Raises ValueError as `make_sync_update` does, and `update` for members of equal keys
    where that refuses replicas of unequal ones.
    """
    options = loss_fn, optimizer, (), has_aux, stateful, microbatch, skip_nonfinite
    return _make_update(False, *options)


# ---------------------------------------------------------------------------------
# Trainer: any number of members on any number of devices
# ---------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where members and replicas stand: see `layout`."""

    members: int  # K
    devices: int  # D, those in use
    members_per_device: int  # M, above 1 only where R = 1
    replicas: int  # R, above 1 only where M = 1


def layout(members: int, num_devices: int, num_processes: int = 1) -> Layout:
    """Lay K members over devices: which share a device, or which devices share one.

    With K >= num_devices, M = ceil(K / num_devices) members share a device, and no more
    devices are used than M on each need; else R = floor(num_devices / K) devices hold
    replicas of one member.  One member on all devices is sync mode.

    Several processes need all of their devices in a program: then R is the largest
    divisor of num_devices that is not above num_devices / K, and what is left over
    repeats the last member.

    Raises ValueError unless all are ints >= 1.
    """
    members, num_devices = _count("members", members), _count("devices", num_devices)
    replicas, shared = max(num_devices // members, 1), -(-members // num_devices)
    if _count("num_processes", num_processes) > 1:
        fitting = (r for r in range(1, replicas + 1) if num_devices % r == 0)
        return Layout(members, num_devices, shared, max(fitting))
    return Layout(members, -(-members // shared) * replicas, shared, replicas)


def _axis(layout: Layout, train: bool) -> str:
    """Name the devices' axis in a program after what `replica_mean` averages there.

    JAX keeps what it has traced of a function by the names and sizes of the axes around
    it, so that one which averages over R replicas is not taken for one that averages
    over others, or over none, as in every program that does not train.
    """
    if layout.replicas == 1 or not train:
        return "members"
    return "devices" if layout.members == 1 else f"replicas by {layout.replicas}"


@functools.cache
def _slots(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return the member and the replica in each slot [D * M], device after device.

    Of several processes, those on the devices of this one.  Slots that are left over,
    on the last devices, repeat the last member.
    """
    members, devices, shared, replicas = layout
    slots = np.arange(devices * shared).reshape(jax.process_count(), -1)
    slot = slots[jax.process_index()]
    return np.minimum(slot // replicas, members - 1), slot % replicas


def _check_draws(key: Any, at_once: int) -> None:
    """Raise ValueError for keys whose draws are others where members are together."""
    if at_once > 1 and key is not None and "rbg" in str(jax.random.key_impl(key)):
        raise ValueError(
            f"at_once={at_once} with keys of {jax.random.key_impl(key)}, whose draws "
            "are others under vmap; use threefry2x32, JAX's default, or at_once=1"
        )


if hasattr(jax, "shard_map"):
    _shard_map = functools.partial(jax.shard_map, check_vma=False)
else:  # JAX 0.5
    from jax.experimental.shard_map import shard_map

    _shard_map = functools.partial(shard_map, check_rep=False)


def _in_place(f: Callable, states: PyTree, of_slot: PyTree, together: int) -> tuple:
    """Do `lax.map` of f(state, of_slot) -> (state, metrics), its states in place.

    Leaves of both arguments are [M, ...].  Each state is cut out, `together` of them at
    a time, and its successor is written back in its place: M states and the work of one
    f take all the memory, where `lax.map` writes M new states beside the old ones.
    """

    def advance(states, start, count=together):
        def cut(x):
            return lax.dynamic_slice_in_dim(x, start, count)

        def put(x, new):
            return lax.dynamic_update_slice_in_dim(x, new, start, 0)

        # One alone, not by a vmap of one, whose bits are others.
        batch_size = None if together == 1 else count
        own = jax.tree.map(cut, (states, of_slot))
        new, metrics = lax.map(lambda x: f(*x), own, batch_size=batch_size)
        return jax.tree.map(put, states, new), metrics

    count = len(jax.tree.leaves(states)[0])
    whole = count - count % together
    states, metrics = lax.scan(advance, states, jnp.arange(0, whole, together))
    metrics = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), metrics)
    if whole < count:
        states, last = advance(states, whole, count - whole)
        metrics = jax.tree.map(lambda *x: jnp.concatenate(x), metrics, last)
    return states, metrics


# On a GPU, XLA would keep the kernels of all members in cuDNN's order beside JAX's.
# States are flat between the members there.  On a TPU, to make them flat is a copy.
_FLAT_ON = ("gpu",)


def _over_members(
    f: Callable, devices: Sequence, layout: Layout, train: bool, at_once: int
) -> Callable:
    """Map f(state, **of_slot, **of_all), of one member on one device, over all slots.

    The result is a function of the state, of of_slot and of of_all, the arguments by
    name.  Leaves of the first two are [D * M, ...], an entry per slot, and so are the
    leaves that f returns; of_all is the same everywhere.  To `train`, the state's
    buffers are reused, and replicas wait for each other.

    As `jax.pmap` does, but the program goes when it is let go: JAX (0.10, 0.12) keeps a
    program of `pmap` for good, with all that f holds.
    """
    together = min(at_once, layout.members_per_device)
    devices, axis = devices[: layout.devices], _axis(layout, train)
    by_slot, everywhere = _sharding(devices, axis, axis), _sharding(devices, axis)
    given = by_slot, by_slot, everywhere
    flat = devices[0].platform in _FLAT_ON and together < layout.members_per_device

    def on_device(state, of_slot, of_all):
        leaves, treedef = jax.tree.flatten(state)

        def fold(state, *slots):
            if not flat:
                return state
            return [x.reshape(*slots, -1) for x in jax.tree.leaves(state)]

        def unfold(state, *slots):
            if not flat:
                return state
            pairs = zip(state, leaves)
            return treedef.unflatten(x.reshape(*slots, *y.shape[1:]) for x, y in pairs)

        def in_slot(state, of_slot):
            made = f(unfold(state), **of_slot, **of_all)
            return (fold(made[0]), made[1]) if train else made

        slots = layout.members_per_device
        xs = fold(state, slots), of_slot
        if train:
            new, metrics = _in_place(in_slot, *xs, together)
            return unfold(new, slots), metrics
        batch_size = None if together == 1 else together
        return lax.map(lambda x: in_slot(*x), xs, batch_size=batch_size)

    specs = dict(in_specs=tuple(x.spec for x in given), out_specs=by_slot.spec)
    program = jax.jit(
        _shard_map(on_device, mesh=by_slot.mesh, **specs),
        in_shardings=given,
        out_shardings=by_slot,
        donate_argnums=(0,) if train else (),
    )

    def convert(to, place, tree):  # by their data: JAX 0.5 does not take typed keys
        to = functools.partial(to, global_mesh=place.mesh, pspecs=place.spec)
        return jax.tree.map(functools.partial(_on_data, to), tree)

    def run(*args):  # of several processes, each has its own part of the arrays
        to_all = multihost_utils.host_local_array_to_global_array
        to_own = multihost_utils.global_array_to_host_local_array
        args = map(functools.partial(convert, to_all), given, args)
        return convert(to_own, by_slot, program(*args))

    call = program if jax.process_count() == 1 else run
    meet = train and layout.replicas > 1
    return functools.partial(_run, call, meet and devices[0].platform == "cpu")


def _on_data(function: Callable, leaf: Array) -> Array:
    """Apply a function of an array; to a typed random key, as to the numbers in it."""
    if not _is_key(leaf):
        return function(leaf)
    data = function(jax.random.key_data(leaf))
    data = data if isinstance(data, Array) else jax.device_put(data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


@functools.partial(jax.jit, static_argnums=1)
def _join(copies, members):
    """Join members that stand together, each copy [M, ...]: [K, ...]."""
    return jnp.concatenate(copies)[:members]


def _take(tree: PyTree, layout: Layout) -> PyTree:
    """Take members [K, ...] out of their slots [D * M, ...], of each its first replica.

    They come from where they are to the first device, or to the host from several
    processes.
    """

    def take(x):
        if jax.process_count() > 1 and isinstance(x, jax.Array):
            x = _gather_devices(x)
        if isinstance(x, np.ndarray):  # a copy, as JAX's own is read-only
            return np.array(x[:: layout.replicas][: layout.members])
        copies = [shard.data for shard in x.addressable_shards[:: layout.replicas]]
        copies = jax.device_put(copies, *copies[0].devices())
        with _no_mesh():
            return _join(copies, layout.members)

    return jax.tree.map(take, tree)


_STEPS = 256  # orders are padded to a multiple, so that most share one program


def _padded(order: Any, members: int, num_rows: int) -> tuple[np.ndarray, int]:
    """Check an order [steps, B] or [K, steps, B]; return it as int32, and its steps.

    Steps of zeros are added, up to a multiple of `_STEPS`.
    """
    order = np.asarray(_numbers("order", order))
    fits = order.ndim == 2 or (order.ndim == 3 and len(order) == members)
    if not (fits and order.size and order.dtype.kind in "iu"):
        raise ValueError(
            f"order has shape {order.shape}; expected integers, rows of the data, "
            f"[steps, B], or [K, steps, B] with K = {members}, and not empty"
        )
    # On a device, a row outside the data would be clamped without a word.
    if not 0 <= order.min() <= order.max() < num_rows:
        raise ValueError(
            f"order holds rows {order.min()} to {order.max()}; the data have rows 0 to "
            f"{num_rows - 1}"
        )
    num_steps, axes = order.shape[-2], [(0, 0)] * order.ndim
    axes[-2] = 0, -num_steps % _STEPS
    return np.pad(order.astype(np.int32, copy=False), axes), num_steps


def _scan_first(f: Callable, carry: PyTree, xs: PyTree, count: Array) -> tuple:
    """Scan the first `count` of xs, a traced number; what it returns for others is 0.

    Thus one program serves all numbers up to the length of xs.
    """

    def at(i):
        return jax.tree.map(lambda x: x[i], xs)

    def advance(i, both):
        carry, ys = both
        carry, y = f(carry, at(i))
        return carry, jax.tree.map(lambda ys, y: ys.at[i].set(y), ys, y)

    _, shapes = jax.eval_shape(f, carry, at(0))
    length = len(jax.tree.leaves(xs)[0])
    ys = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), shapes)
    return lax.fori_loop(0, count, advance, (carry, ys))


def _check_made(made: PyTree, stateful: bool) -> None:
    """Raise ValueError for what init_fn returns, if it is no tree of arrays."""
    if stateful and (type(made) is not tuple or len(made) != 2):
        raise ValueError(
            f"init_fn returns {type(made).__name__}; with stateful=True, expected the "
            "tuple (params, model_state)"
        )
    for path, leaf in jax.tree.leaves_with_path(made):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            raise ValueError(
                f"init_fn returns {type(leaf).__name__} at "
                f"'{jax.tree_util.keystr(path)}'; expected a tree of arrays: keep "
                "apart what is none (equinox.partition, flax.nnx.split)"
            )
        _numbers("leaves that init_fn returns", leaf)


# A device predicts at most so many chunks per call of a program, and so many that their
# inputs and outputs take about so many bytes.
_BLOCK_CHUNKS, _BLOCK_BYTES = 128, 2**22


class _Member(NamedTuple):
    """A member's work on one device, which a trainer maps over all of its members.

    The fields are the trainer's.  Each function takes the member's state, its hyper and
    the frozen tree, each of these two in a tuple, which is empty where there is none,
    and its other arguments by name.
    """

    layout: Layout
    init_fn: Callable
    loss_fn: Callable
    optimizer: OptimizerLike | Callable
    apply_fn: Callable | None
    output: Callable | None
    has_aux: bool
    stateful: bool
    microbatch: int | str | None
    skip_nonfinite: bool

    def make_optimizer(self, *hyper):
        form = "with hyper, expected a function, such as lambda h: sgd(h)"
        make = self.optimizer
        return _call("optimizer", form, make, *hyper) if hyper else make

    def make_step(self, parts, hyper, frozen):
        """Make the step of a member's replica, on a batch that is in so many parts."""
        axis, replicas = _axis(self.layout, train=True), self.layout.replicas
        average = _alone
        if replicas > 1:
            groups = np.arange(self.layout.devices).reshape(-1, replicas).tolist()
            average = functools.partial(_average, axis=axis, groups=groups)
        options = self.has_aux, self.stateful, self.microbatch, self.skip_nonfinite
        optimizer = self.make_optimizer(*hyper)
        args = self.loss_fn, optimizer, (*hyper, *frozen), *options
        return _make_step(average, lambda: lax.axis_index(axis) % parts, *args)

    def init(self, _, hyper, frozen, number, key):
        init_key, key = jax.random.split(jax.random.fold_in(key, number))
        made = self.init_fn(init_key, *hyper, *frozen)
        _check_made(made, self.stateful)
        params, model_state = made if self.stateful else (made, ())
        optimizer = self.make_optimizer(*hyper)
        return train_state(params, optimizer, model_state=model_state, key=key)

    def update(self, state, hyper, frozen, batch, parts=1):
        return self.make_step(parts, hyper, frozen)(state, *batch)

    def epoch(self, state, hyper, frozen, order, data, num_steps, parts=1):
        step = self.make_step(parts, hyper, frozen)

        def train_on(state, rows):
            return step(state, *jax.tree.map(lambda x: x[rows], data))

        return _scan_first(train_on, state, order, num_steps)

    def predict(self, model, hyper, frozen, chunks, count):
        predict = functools.partial(self.predict_chunk, model, (*hyper, *frozen))
        return _scan_first(predict, (), chunks, count)[1]

    def predict_chunk(self, model, more, carry, inputs):
        given = f"of inputs {_form(inputs)}, where one example x is x[None]"
        apply = _fast_in_loops(self.apply_fn)
        outputs = _call("apply_fn", given, apply, *model, inputs, *more)
        if self.output is jax.nn.softmax:
            logits = isinstance(outputs, Array) and outputs.ndim > 1
            if not (logits and outputs.shape[-1] > 1):
                raise ValueError(
                    f"apply_fn returns {_form(outputs)} {given}; the softmax takes "
                    "logits [B, ..., C]: make the trainer with output=None, or with a "
                    "function of the outputs"
                )
            outputs = outputs.astype(_wide(outputs.dtype))
        outputs = outputs if self.output is None else self.output(outputs)
        chunk = jax.tree.leaves(inputs)[0].shape[0]
        expected = f"{chunk}, one of each example, in all of them"
        _check_axes("outputs", outputs, chunk, expected=expected)
        return carry, outputs

    def chunk_of_all(self, model, hyper, frozen, inputs):
        """Return a chunk of inputs and the outputs of the members on one device."""
        model, hyper = jax.tree.map(lambda x: x[0], (model, hyper))
        _, outputs = self.predict_chunk(model, (*hyper, *frozen), (), inputs)
        return inputs, [outputs] * self.layout.members_per_device


class _Lowered(ValueError):
    """Raised in place of a call, with the lowered program, where no device is there."""

    def __str__(self):
        return "the devices are a topology's; use Trainer.lower, and compile"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
    """Train K members on D devices, whatever K and D are: see `layout`.

    What it takes:

    init_fn(key) -> params
        A tree of arrays, or with `stateful` (params, model_state).
    loss_fn, optimizer, has_aux, stateful, microbatch, skip_nonfinite
        Those of `make_sync_update`, and so is the step.
    members, devices
        How many models, each of which has to fit on one device, and on how many devices
        at most, by default all, or on which: a sequence of devices of one platform.
        Where there are more devices than members, each sees a part of its member's
        batch, and losses are averaged: for a loss that is no mean over its examples,
        pass as many devices as members, or fewer.
    apply_fn(params, inputs) -> outputs, with `stateful` (params, model_state, inputs)
        For predicting: any tree of arrays [B, ...] to any such tree, each example by
        itself: `chunk` at a time on a device, or of fewer a power of two, some of them
        zeros that fill the last chunk.  `output` is a function of what it returns:
        softmax for logits [B, ..., C], or None to leave it as it is.
    hyper
        A tree of arrays [K, ...], what members differ in besides their key.  With it,
        the functions take the member's own, leaves [...], as their last argument:
        `init_fn(key, h)`, `loss_fn(params, *batch, h)`, `apply_fn(params, inputs, h)`;
        and `optimizer(h)` returns the member's optimizer.
    frozen
        A tree of arrays that all members share and none trains, such as the weights of
        a pretrained network: one copy a device.  With it, `init_fn`, `loss_fn` and
        `apply_fn` take it as their last argument, after the member's `hyper`.
    at_once
        How many of the members that share a device are computed together, by `vmap`;
        more than there are means all.  A device that one member does not fill, a GPU
        often, is faster so; batches, activations, gradients and the states at work then
        take memory for so many members, not one.  Results agree, to rounding, with
        those of one member after another.

    `latest` is the state that the last `update` or `epoch` returned, or None: what they
    consumed is lost, but not what they made of it, if Ctrl-C comes before it has a
    name.  The trainer copies the arrays that it is given, so that to change them later
    changes nothing.  JAX's own arrays, which cannot change, it shares where they lie on
    its devices already: give `frozen` and `place` a copy (`jnp.copy`) of an array that
    its owner will donate or delete.  Else the next call raises JAX's RuntimeError, and
    the state stays.

    Where JAX runs in several processes (`jax.distributed`), every process calls the
    same methods with the same arguments, of which its devices take their part, and has
    the same results; only states are each process's own.

    Raises ValueError for members, devices, chunk or at_once below 1 or not whole, more
    devices than there are, and for a `hyper` or an optimizer that does not fit.  So do
    the methods, before anything is consumed, for states of another trainer and those
    that were consumed or have one buffer in two leaves, for integers beyond JAX's type,
    and for what each of them names.
    """

    init_fn: Callable = dataclasses.field(kw_only=False)  # key -> params, or with state
    loss_fn: Callable = dataclasses.field(kw_only=False)  # (params, *batch) -> loss
    optimizer: OptimizerLike | Callable = dataclasses.field(kw_only=False)
    members: int  # K
    apply_fn: Callable | None = None  # (params, inputs) -> outputs
    output: Callable | None = jax.nn.softmax  # of outputs
    hyper: PyTree = None  # leaves [K, ...]
    devices: int | Sequence | None = None  # at most so many, or these; None is all
    has_aux: bool = False  # the loss is (loss, aux)
    stateful: bool = False  # the loss takes a model state and a key, and returns one
    microbatch: int | str | None = None  # examples that a device works on at a time
    skip_nonfinite: bool = False  # a step that is not finite changes nothing
    chunk: int = 32  # examples that a device predicts at a time
    at_once: int = 1  # members of a device that are computed together
    frozen: PyTree = None  # what all share and none trains
    latest: TrainState | None = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        _count("chunk", self.chunk)
        _count("at_once", self.at_once)
        own = jax.tree.map(np.asarray, (self.hyper,) if self._hyper else ())
        for i in range(self.layout.members if own else 1):  # raises for what cannot be
            hyper = jax.tree.map(operator.itemgetter(i), own)
            self._member.make_step(1, hyper, self._frozen)

    def __repr__(self) -> str:  # on a line, without numbers and addresses
        made_of = self.init_fn, self.loss_fn
        names = [getattr(f, "__name__", type(f).__name__) for f in made_of]
        return f"Trainer({', '.join(names)}, {self.layout})"

    def __getstate__(self) -> dict:  # a copy makes programs of its own
        own = "_programs", "_devices", "_by_slot"
        return {name: x for name, x in vars(self).items() if name not in own}

    @functools.cached_property
    def _devices(self) -> Sequence:
        """The devices to use at most, of all processes."""
        given: Any = self.devices
        if np.ndim(given) == 0:
            lack = given and _lack(_count("devices", given) // jax.process_count())
            if lack:
                raise ValueError(lack)
            return jax.devices()[:given]
        if len({x.platform for x in given}) != 1 or len({*given}) < len(given):
            expected = "one or more, each once, of one platform"
            raise ValueError(f"devices are {[*given]}; expected {expected}")
        return [*given]

    @functools.cached_property
    def _abstract(self) -> bool:
        """Whether the devices are a description, for which one only compiles."""
        with contextlib.suppress(RuntimeError):  # of a platform that is not there
            return self._devices[0] not in jax.devices(self._devices[0].platform)
        return True

    @functools.cached_property
    def layout(self) -> Layout:
        """K, D, M and R in force, of the devices that JAX has: see `layout`."""
        processes, devices = jax.process_count(), self._devices
        alike = jax.device_count() == processes * jax.local_device_count()
        if processes > 1 and not (alike and devices == jax.devices()):
            found = f"devices is {len(devices)}; {processes} processes use all of their"
            raise ValueError(f"{found} {jax.device_count()}, and each as many")
        return layout(self.members, len(devices), processes)

    @functools.cached_property
    def _by_slot(self) -> Any:
        """Lay slots [D * M, ...] over the devices in use, of this process, to train."""
        several, axis = jax.process_count() > 1, _axis(self.layout, train=True)
        used = self._devices[: self.layout.devices]
        return _sharding(jax.local_devices() if several else used, axis, axis)

    def _put(self, tree: PyTree, sharding: Any) -> PyTree:
        """Put a tree on the devices, or name its form there."""
        if not self._abstract:
            return jax.device_put(tree, sharding)
        form = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        return jax.tree.map(lambda x: form(x.shape, x.dtype), tree)

    def _lay(self, what: str, tree: PyTree) -> PyTree:
        """Lay members [K, ...] into their slots, [D * M, ...]."""
        member, _ = _slots(self.layout)

        def lay(x):
            slots = self._put(np.asarray(_numbers(what, x))[member], self._by_slot)
            return jax.block_until_ready(slots)  # leaf by leaf: one on the host at once

        return jax.tree.map(functools.partial(_on_data, lay), tree)

    @functools.cached_property
    def _member(self) -> _Member:
        member = _Member(*(getattr(self, name) for name in _Member._fields))
        # Micro-batches are for a CPU's cache.
        other = self.microbatch == "auto" and self._devices[0].platform != "cpu"
        return member._replace(microbatch=None) if other else member

    @functools.cached_property
    def _hyper(self) -> tuple:
        """The members' hyper, in their slots; empty where they have none."""
        if self.hyper is None:
            return ()
        expected = f"arrays [K, ...], an entry for each of the {self.members} members"
        _check_axes("hyper", self.hyper, self.members, expected=expected)
        return (self._lay("hyper", self.hyper),)

    @functools.cached_property
    def _frozen(self) -> tuple:
        """What is frozen, on every device; empty where nothing is."""
        return () if self.frozen is None else (self._place("frozen", self.frozen),)

    @functools.cached_property
    def _programs(self) -> dict:
        """What is compiled, by the name of the function that it maps."""
        return {}

    def _map(self, f, state, of_slot, of_all, train=False):
        """Call f(state, hyper, frozen, **of_slot, **of_all), of one member, for all.

        What the arguments are stands at `_over_members`; hyper is one more of a slot,
        and frozen one of all.
        """
        if f.__name__ not in self._programs:
            how = self._devices, self.layout, train, self.at_once
            self._programs[f.__name__] = _over_members(f, *how)
        of_slot = {"hyper": self._hyper, **of_slot}
        args = state, of_slot, {"frozen": self._frozen, **of_all}
        program = self._programs[f.__name__]
        if self._abstract:
            raise _Lowered(program.args[0].lower(*args))
        return _consume(self, program, *args) if train else program(*args)

    def _place_state(self, state):
        """Put a state from elsewhere into the slots, once it is seen to be of these."""
        members, _ = _slots(self.layout)
        expected = f"this trainer's {len(members)}: use init, or gather and scatter"
        _check_axes("state", state, len(members), expected=expected)
        if state.key is not None:
            _check_draws(state.key, self.at_once)
            both = jax.random.key_data(state.key), members
            _call("a state of another trainer", expected, _check_keys, *both)
        leaves = jax.tree.leaves(state)
        if all(getattr(x, "sharding", 0) == self._by_slot for x in leaves):
            return state  # as init and scatter put it
        return self._put(_private("state", state), self._by_slot)

    # Making and moving the members

    def init(self, key: Array) -> TrainState:
        """Make the members: member i from fold_in(key, i).

        It depends on that and its `hyper` alone: on CPU it ends in the same bits for
        every number of members and devices with K >= D, and agrees to rounding where it
        has replicas or `at_once` is above 1, and between one device and several where
        XLA compiles a network otherwise for these, such as attention.  A loss that
        draws takes other steps on replicas, unless `microbatch` divides their parts of
        the batch into parts of one size: see `make_sync_update`.

        Leaves of the state are [D * M, ...], by slot, and by member in `gather`.

        Raises ValueError for what is not one random key, for keys of "rbg" with at_once
        above 1, and for an init_fn that returns other leaves than arrays.
        """
        expected = "expected one random key, such as jax.random.key(0), for all members"
        _call("key", expected, jax.random.split, key)
        _check_draws(key, self.at_once)
        member, _ = _slots(self.layout)
        of_all = self.place({"key": key})
        return self._map(self._member.init, None, {"number": member}, of_all)

    def gather(self, state: TrainState) -> TrainState:
        """Bring each member to the host, leaves [K, ...]; compare its replicas.

        Typed random keys stay JAX arrays.  Raises RuntimeError if a member's replicas
        are not bit-identical.
        """

        def gather(path, x):
            # An array on several devices keeps its copy on the host, once NumPy has
            # read it; a second array of the same buffers takes that copy along.
            shards = [shard.data for shard in x.addressable_shards]
            x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
            copies = _gather_devices(x)  # [D * M, ...]
            for i, own in enumerate(copies):
                first = i - i % self.layout.replicas
                if i > first and own.tobytes() != copies[first].tobytes():
                    name, remedy = jax.tree_util.keystr(path), "go on from a checkpoint"
                    if name.startswith(".model_state") and own.dtype.kind in "biu":
                        remedy += ", or, if it depends on the batch, make it a float"
                    raise RuntimeError(
                        f"replicas differ: {name} on device {self._devices[i]} is not "
                        f"what it is on {self._devices[first]}; {remedy}"
                    )
            return _take(copies, self.layout)

        return jax.tree.map_with_path(
            lambda path, x: _on_data(functools.partial(gather, path), x),
            _admit(self, state, self._place_state, consume=False),
        )

    def like(self, key: Array | None = None) -> TrainState:
        """Return the form of what `gather` returns, [K, ...], as `load` takes it.

        Leaves are `jax.ShapeDtypeStruct`; nothing is computed.  The state's key is
        `key`'s kind, by default that of `jax.random.key`.
        """

        def first(hyper, frozen, key):
            hyper = jax.tree.map(lambda x: x[0], hyper)
            return self._member.init(None, hyper, frozen, 0, key)

        def stack(x):
            return jax.ShapeDtypeStruct((self.members, *x.shape), x.dtype)

        key = jax.random.key(0) if key is None else key
        one = jax.eval_shape(first, self._hyper, self._frozen, key)
        return jax.tree.map(stack, one)

    def scatter(self, gathered: TrainState) -> TrainState:
        """Put members, leaves [K, ...], on the devices: the inverse of `gather`.

        They may come from a trainer of as many members on other devices.  Raises
        ValueError for another number of them, or equal keys.
        """
        _check_state(gathered)
        expected = f"the trainer's {self.members} members"
        _check_axes("members' state", gathered, self.members, expected=expected)
        if gathered.key is not None:
            _check_keys(jax.random.key_data(gathered.key), range(self.members))
        return self._lay("members' state", gathered)

    def lower(self, method: str, *args: PyTree, **options: Any) -> jax.stages.Lowered:
        """Lower the program of init, update, epoch or predict; run and place nothing.

        It takes the arguments of the method without the state, arrays [B, ...] or forms
        of arrays, `jax.ShapeDtypeStruct`.  The program is for the trainer's devices,
        and these may be a topology's, which nobody has to own
        (`jax.experimental.topologies`).  `lower(...).compile().memory_analysis()` says
        how many bytes the program takes on each.

        Raises ValueError as the method does, for another method, and where JAX runs in
        several processes.
        """
        if method not in ("init", "update", "epoch", "predict"):
            raise ValueError(f"method is {method!r}; it has no program to lower")
        if (count := jax.process_count()) > 1:
            raise ValueError(f"there are {count} processes; lower in one of its own")

        def zeros(x):  # in the memory of one, whatever the shape
            return np.broadcast_to(np.zeros((), jnp.result_type(x)), np.shape(x))

        twin = copy.copy(self)
        vars(twin)["_abstract"] = True
        if method != "init":
            slots, form = len(_slots(self.layout)[0]), jax.ShapeDtypeStruct
            one = self.like()
            state = jax.tree.map(lambda x: form((slots, *x.shape[1:]), x.dtype), one)
            vars(twin)["latest"] = state  # as if it were a step's result
            args = state, *jax.tree.map(zeros, args)
        try:
            return getattr(twin, method)(*args, **options)
        except _Lowered as stopped:
            return stopped.args[0]

    # Training

    def update(
        self, state: TrainState, *batch: PyTree, per_member: bool = False
    ) -> tuple[TrainState, PyTree]:
        """Take a step of every member on one batch, leaves [B, ...]; return the losses.

        B is a member's batch, all its replicas together.  With `per_member`, leaves
        [K, B, ...], of each on its own.  The result is (state, metrics): the losses
        [K], or (losses, aux).  `state` is consumed: its buffers are reused.

        R replicas take parts of B / P examples, P = gcd(B, R).  Where P < R, some take
        the same part, which changes no result and takes longer.  Warns of that, and at
        the first step of members that stay equal: of equal weights, on the same
        batches, without a key.  There is no warning of a nan in the batch, or of a
        label outside of 0..C-1: the member's loss is nan from there on.

        Raises ValueError for a batch that is empty or does not divide into
        micro-batches.
        """
        state = _admit(self, state, self._place_state)
        if per_member:
            expected = f"arrays [K, B, ...], with K = {self.members} and one B"
            _check_axes("batch", batch, self.members, None, expected=expected)
        else:
            _check_axes("batch", batch)
            self._warn_if_equal(state)
        given = self._deal({"batch": batch}, int(per_member), per_member)
        state, metrics = self._map(self._member.update, state, *given, train=True)
        return state, _take(metrics, self.layout)

    def _deal(self, batch: dict, axis: int, own: bool) -> tuple[dict, dict]:
        """Give each slot its part of a batch: (of_slot, of_all), as `_map` takes them.

        The leaves' examples, B of them, stand on the given axis; with `own`, members K
        stand on the first.  There are P = gcd(B, R) parts: where that is fewer than
        replicas, R / P of these have the same part, and the mean over replicas is still
        the mean over the batch.
        """
        (member, replica), replicas = _slots(self.layout), self.layout.replicas
        size = jax.tree.leaves(batch)[0].shape[axis]
        parts = math.gcd(size, replicas)
        if parts < replicas:
            whole = size - size % replicas or replicas
            warnings.warn(
                f"a batch of {size} is divided into {parts} parts, not {replicas}, "
                f"so some of a member's replicas do the same work; multiples of "
                f"{replicas}, such as {whole}, use them all",
                stacklevel=3,
            )

        def cut(x):  # to [P, ..., B / P, ...], or [K, P, ..., B / P, ...]
            x = _split_axis(_numbers("batch", x), axis, parts)
            return np.moveaxis(x, axis, int(own))

        cuts, part = jax.tree.map(cut, batch), replica % parts
        if replicas == 1 and not own:
            return {}, self.place(jax.tree.map(lambda x: x[0], cuts))
        at = (member, part) if own else part
        dealt = jax.tree.map(lambda x: x[at], cuts)
        dealt = self._put(dealt, self._by_slot)
        return dealt, {"parts": np.int32(parts)} if replicas > 1 else {}

    def epoch(
        self, state: TrainState, data: tuple | list, order: ArrayLike
    ) -> tuple[TrainState, PyTree]:
        """Take a step for each row of order, int [steps, B], on those rows of data.

        All in one call.  Members may have their own order, [K, steps, B].  `data` is a
        tuple of what `loss_fn` takes, trees of arrays [N, ...], which it sees in their
        dtype: bytes take a quarter of the memory of floats, and are scaled in it.  The
        result is (state, metrics), with leaves [K, steps].  Orders of up to 256 steps
        share one compiled program.  An epoch in pieces ends in the same bits as in one
        call, answers Ctrl-C after each, and agrees with `update` to rounding.  `state`
        is consumed, replicas take parts of the batch, and warnings are given, as by
        `update`.

        Raises ValueError for an order that is empty or has rows outside the data, and
        for data of several lengths.
        """
        state = _admit(self, state, self._place_state)
        if not isinstance(data, (tuple, list)):
            found = f"data is {type(data).__name__}"
            raise ValueError(f"{found}; expected a tuple of loss_fn's arguments")
        _check_axes("data", data)
        num_rows = np.shape(jax.tree.leaves(data)[0])[0]
        rows, num_steps = _padded(order, self.members, num_rows)
        self._warn_if_equal(state, rows)
        given, of_all = self._deal({"order": rows}, rows.ndim - 1, rows.ndim == 3)
        of_all |= {"data": self.place(tuple(data)), "num_steps": np.int32(num_steps)}
        state, metrics = self._map(self._member.epoch, state, given, of_all, train=True)

        def cut(x):  # by indices, they would be moved to the device
            return lax.slice_in_dim(x, 0, num_steps, axis=1)

        with _no_mesh():
            return state, jax.tree.map(cut, _take(metrics, self.layout))

    def place(self, data: PyTree) -> PyTree:
        """Copy data, a tree of arrays [N, ...], to every device in use, all of it.

        Once, and not again in every call of `epoch`: what is there already stays.  Each
        device has a copy of its own, virtual ones too: 100 MiB are 800 on eight.
        """
        return self._place("data", data)

    def _place(self, what, tree):
        mesh = self._by_slot.mesh
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return self._put(tree if self._abstract else _private(what, tree), everywhere)

    def _warn_if_equal(self, state, order=()):
        known = self.members == 1 or self.hyper is not None or self.stateful
        orders = order if np.ndim(order) == 3 else ()  # each member's own
        differ = known or any((x != orders[0]).any() for x in orders)
        if differ or self.latest is not None:  # it is said once, if at all
            return

        def equal(leaf):
            members = jax.device_get(_take(leaf, self.layout))
            return len({x.tobytes() for x in members}) == 1

        if all(map(equal, jax.tree.leaves(state.params))):
            warnings.warn(
                f"the {self.members} members have equal weights, see the same batches "
                "and use no random key, so they stay equal; have init_fn draw from its "
                "key, or give each its own order or batches",
                stacklevel=3,
            )

    # Predicting

    def predict(self, state: TrainState, inputs: PyTree) -> PyTree:
        """Return the mean over members of output(apply_fn(...)), leaves [N, ...].

        inputs are what `apply_fn` takes, leaves [N, ...].  Leaf by leaf, in float32 at
        least, on the host; nan where a member's is.  Besides the result, it holds two
        blocks of all members' outputs, of some thousand examples or a few MiB each, and
        at least a chunk per replica: lower `chunk` where outputs are larger.

        Raises ValueError for inputs without an example, and for outputs that are not
        one of each example or no logits for the softmax.
        """

        def mean(x):
            return x.mean(axis=0, dtype=_wide(x.dtype))

        with np.errstate(invalid="ignore", over="ignore"):
            means = [jax.tree.map(mean, block) for block in self._blocks(state, inputs)]
        return jax.tree.map(lambda *x: np.concatenate(x), *means)

    def predict_members(self, state: TrainState, inputs: PyTree) -> PyTree:
        """Return each member's output(apply_fn(...)), leaves [K, N, ...].

        Inputs and errors are those of `predict`.
        """
        blocks = self._blocks(state, inputs)
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *blocks)

    def _blocks(self, state, inputs):
        """Yield what members say of a block of the inputs at a time, [K, n, ...].

        A block is so many chunks for each replica, dealt out in turn.
        """
        if self.apply_fn is None:
            raise ValueError("predicting takes an apply_fn; give make_trainer one")
        _check_axes("inputs", inputs)
        inputs = jax.tree.map(functools.partial(_array, "inputs"), inputs)
        num_rows = len(jax.tree.leaves(inputs)[0])
        state = _admit(self, state, self._place_state, consume=False)
        model = (state.params, state.model_state)[: 1 + self.stateful]
        replicas, (_, replica) = self.layout.replicas, _slots(self.layout)
        # A few rows fill one chunk of a power of two; others share a program.
        chunk, chunks = 2 ** math.ceil(math.log2(-(-num_rows // replicas))), 1
        if chunk >= self.chunk:
            chunk, chunks = self.chunk, self._block_chunks(model, inputs)
        turn, size = replicas * chunk, replicas * chunk * chunks

        def deal(x):  # [n, ...] -> [D * M, chunks, chunk, ...], or of all, no D * M
            x = np.asarray(_numbers("inputs", x))
            if len(x) < size:
                x = np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])
            x = x.reshape(chunks, replicas, chunk, *x.shape[1:]).swapaxes(0, 1)
            return x[replica] if replicas > 1 else x[0]

        def join(n, x):  # [D * M, chunks, chunk, ...] -> [K, n, ...]
            x = _gather_devices(x)
            x = x.reshape(len(x) // replicas, replicas, *x.shape[1:]).swapaxes(1, 2)
            return x.reshape(len(x), size, *x.shape[4:])[: self.members, :n]

        def dispatch(start):
            n = min(size, num_rows - start)
            rows = jax.tree.map(lambda x: _on_data(deal, x[start : start + n]), inputs)
            of_all = {"count": np.int32(-(-n // turn))}
            of_slot = {} if replicas == 1 else {"chunks": rows}
            of_all |= {} if of_slot else {"chunks": rows}
            outputs = self._map(self._member.predict, model, of_slot, of_all)
            return functools.partial(join, n), outputs

        computing = [dispatch(0)]
        for start in range(size, num_rows, size):
            computing.append(dispatch(start))  # the devices are a block ahead
            yield jax.tree.map(*computing.pop(0))
        yield jax.tree.map(*computing.pop())

    def _block_chunks(self, model, inputs) -> int:
        """Return how many chunks a block has for each replica, for bounded memory.

        It is the same for any number of rows: one program serves them all.
        """
        if "forms" not in self._programs:  # JAX keeps its traces by this function
            self._programs["forms"] = jax.jit(self._member.chunk_of_all).eval_shape

        def form(x):
            row = _numbers("inputs", x[:1])
            return jax.ShapeDtypeStruct((self.chunk, *row.shape[1:]), row.dtype)

        chunk = jax.tree.map(form, inputs)
        both = self._programs["forms"](model, self._hyper, self._frozen, chunk)
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(both))
        return max(1, min(_BLOCK_CHUNKS, _BLOCK_BYTES // max(1, num_bytes)))


del Trainer.output  # a default; as an attribute help() would explain JAX's softmax
make_trainer = Trainer  # the name to make one by


def choose_members(better: ArrayLike, new: TrainState, old: TrainState) -> TrainState:
    """Take the members of `new` where `better` [K] is true, else those of `old`.

    Both are states as `Trainer.gather` returns them, leaves [K, ...], such as those of
    the last epoch and, of each member, of its lowest validation loss before.  Keys go
    along.  Raises ValueError for a `better` that is not K booleans, and for states of
    different forms.
    """
    better = np.asarray(better)
    _check_form("new", new, old)
    _check_axes("states and better", (new, better))
    if better.dtype != bool or better.ndim > 1:
        found = f"{better.dtype}{[*better.shape]}"
        raise ValueError(f"better is {found}; expected bool[K], one of each member")

    def choose(new, old):
        stack = jnp.stack if isinstance(new, Array) else np.stack
        return stack([old, new])[better.astype(int), np.arange(len(better))]

    return jax.tree.map(choose, new, old)


def epoch_order(
    num_examples: int,
    batch_size: int,
    *,
    members: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    bootstrap: bool = False,
) -> np.ndarray:
    """Draw the examples of each step of an epoch, an order for `Trainer.epoch`.

    An epoch goes through every example once.  With `bootstrap` it goes through as many
    that are drawn from them with replacement, the same in every epoch.  What fills no
    batch, fewer than `batch_size`, sits the epoch out.

    Returns int32 [steps, B], or with `members` [K, steps, B]: order and resample are
    each member's own, and depend on seed, epoch and its number alone.  Without, they
    are those of member 0.

    Raises ValueError for batches of more than all examples, and for numbers that are
    not whole or out of range.
    """
    if not all(_is_int(n) and 0 <= n < 2**32 for n in (seed, epoch)):
        raise ValueError(f"{seed=}, {epoch=}; expected ints, 0 <= each < 2**32")
    if _count("batch_size", batch_size) > _count("num_examples", num_examples):
        raise ValueError(f"{batch_size=}; expected at most {num_examples=}")
    steps, orders = num_examples // batch_size, []
    for member in range(1 if members is None else _count("members", members)):
        rows = np.random.default_rng([seed, epoch, member]).permutation(num_examples)
        if bootstrap:
            own = np.random.default_rng([seed, 0, member, 1])
            rows = own.integers(num_examples, size=num_examples)[rows]
        orders.append(rows[: steps * batch_size].astype(np.int32))
    order = np.reshape(orders, (-1, steps, batch_size))
    return order[0] if members is None else order


def prefetch(batches: Iterable, size: int = 2) -> Iterator:
    """Yield the items of `batches`, made up to `size` ahead by a thread.

    For host batches that are read or made while the devices work on those before:

        for batch in prefetch(batches):
            state, losses = trainer.update(state, *batch)

    Order and values stay, where each item is a new one: arrays that are filled again
    after they were yielded change under the loop.  What `batches` raises, the loop
    raises in its place.  When the loop is left, the thread ends after the item that it
    is making, and what it took ahead is lost: go on with a new iterator.  JAX's
    contexts, such as `jax.enable_x64`, do not reach the thread.  Raises ValueError for
    a size below 1 or not whole.
    """
    _count("size", size)
    items, end = iter(batches), object()

    def ahead():
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        try:
            made = collections.deque(pool.submit(next, items, end) for _ in range(size))
            while (item := made.popleft().result()) is not end:
                made.append(pool.submit(next, items, end))
                yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return ahead()


# ---------------------------------------------------------------------------------
# Checkpoints: a tree in one safetensors file, whole and verified or not at all
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def replace_file(path: str | os.PathLike) -> Iterator[Any]:
    """Open a file for writing bytes that takes its name when it is whole and synced.

        with replace_file(path) as file:
            file.write(content)

    The order is that of a journal: a temporary file in the same folder, its content
    synced to the disk, the name replaced, the folder synced.  A crash at any moment
    leaves the old file or the new one, perhaps beside a temporary `.NAME.*.tmp`, with
    the name's first 60 letters.  The new file has the permissions of the old one.

    Raises ValueError where `path` is something other than a regular file, such as a
    link or a device, and OSError with `path` and the reason for what the disk refuses;
    an old file is then as it was (unless it was the folder that could not be synced),
    and no temporary one is left.
    """
    path = os.fsdecode(path)
    old = os.lstat(path).st_mode if os.path.lexists(path) else None
    if old and not stat.S_ISREG(old):
        raise ValueError(f"{path} is not a regular file; choose another name")
    folder, name = os.path.split(path)
    # Of 60 letters, four bytes each at most, so that it is no longer than names may be.
    temporary = os.path.join(folder, f".{name[:60]}.{os.urandom(4).hex()}.tmp")
    opener = functools.partial(os.open, mode=stat.S_IMODE(old or 0o666))
    try:
        with open(temporary, "x+b", opener=opener) as file:
            if old:  # of whose mode the process may have masked a part
                os.chmod(temporary, stat.S_IMODE(old))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if hasattr(os, "O_DIRECTORY"):  # where folders can be opened and synced
            handle = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error
    finally:
        with contextlib.suppress(OSError):  # it is there where something failed
            os.unlink(temporary)


# The safetensors format's names of NumPy's types, but for float8's: its reader for
# NumPy knows none of these.
_CODES = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"}
_CODES |= {f"float{n}": f"F{n}" for n in (16, 32, 64)}
_CODES |= {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)}
_CODES |= {f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)}
_START = b'{"__metadata__":{"sha256":"'  # of every header; then come 64 digits
_DIGEST = slice(8 + len(_START), 8 + len(_START) + 64)  # where these are in a file
# What JSON, NumPy and JAX raise for headers that `save` does not write.
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, each with a shape and a dtype."""
    paths, _ = jax.tree.flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    if len({"__metadata__", "sha256", *leaves}) < len(paths) + 2:
        raise ValueError("two leaves of the tree, or one and the header, share a path")
    return {name: _array(f"leaf '{name}'", leaf) for name, leaf in leaves.items()}


def _kind(leaf: Any) -> str:
    """Name the type of a leaf, or of what `jax.eval_shape` says of it."""
    if _is_key(leaf):
        return f"key<{jax.random.key_impl(jnp.empty((), leaf.dtype))}>"
    return leaf.dtype.name


def _storable(leaf: Any) -> np.ndarray:
    """Return a leaf as the format has it: keys as their data, exotic types as bytes."""
    leaf = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    leaf = np.asarray(leaf, leaf.dtype.newbyteorder("<"), order="C")
    return leaf if leaf.dtype.name in _CODES else leaf[..., None].view(np.uint8)


def _restored(leaf: np.ndarray, kind: str) -> Any:
    """Undo `_storable`."""
    if kind.startswith("key<"):
        return jax.random.wrap_key_data(jnp.asarray(leaf), impl=kind[4:-1])
    leaf = leaf if kind in _CODES else leaf.view(kind).reshape(leaf.shape[:-1])
    return np.require(leaf, requirements="A")


def _head(arrays: dict[str, np.ndarray], kinds: dict[str, str], digest: str) -> bytes:
    """Return all that stands before the arrays."""
    types = {name: kind for name, kind in kinds.items() if kind not in _CODES}
    header: dict = {"__metadata__": {"sha256": digest, **types}}
    end = 0
    for name, x in arrays.items():
        code, begin, end = _CODES[x.dtype.name], end, end + x.nbytes
        header[name] = {"dtype": code, "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save(path: str | os.PathLike, tree: PyTree) -> None:
    """Write a tree of arrays to one file, whole or not at all: see `replace_file`.

    The file is in the safetensors format (https://github.com/huggingface/safetensors):
    8 bytes with the length of a header, the header, JSON with each leaf's path in the
    tree, type, shape and place, and the arrays.  `safetensors.numpy.load_file` and its
    like for other frameworks read it (bfloat16 in NumPy once JAX is imported).

    Types that the format or its reader for NumPy lacks (complex128, float8, int4) are
    stored as bytes, uint8 [..., bytes of a number], typed random keys as their data,
    both with the type beside the path in the header's `__metadata__`.  There `sha256`
    is that of all that follows its own 64 digits.

    Raises ValueError for leaves that are neither numbers, booleans nor random keys, or
    masked, and for a path that is no regular file; OSError as `replace_file` does.
    """
    leaves = _by_path(tree)
    kinds = {name: _kind(leaf) for name, leaf in leaves.items()}
    arrays = {name: _storable(leaf) for name, leaf in leaves.items()}
    parts = [x.reshape(-1).view(np.uint8).data for x in arrays.values()]
    digest = hashlib.sha256(_head(arrays, kinds, "0" * 64)[_DIGEST.stop :])
    for part in parts:
        digest.update(part)
    with replace_file(path) as file:
        file.writelines([_head(arrays, kinds, digest.hexdigest()), *parts])


def _unpack(file: Any) -> dict[str, Any]:
    """Return the leaves in a file by path, once it is sound.

    Raises ValueError for a digest that is not that of the content, and other errors for
    a header that `save` does not write.
    """
    if file.read(_DIGEST.start)[8:] != _START:
        other = "another program, whose files safetensors.numpy.load_file reads"
        raise ValueError(f"has no digest of save's: damaged, or written by {other}")
    file.seek(0)
    content = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
    file.readinto(content.data)
    digest = hashlib.sha256(content[_DIGEST.stop :].data).hexdigest()
    if content[_DIGEST].tobytes() != digest.encode():
        raise ValueError("damaged or cut short: its digest is not that of its content")
    end = 8 + int.from_bytes(content[:8].tobytes(), "little")
    head = content[:end].tobytes()
    header, names = json.loads(head[8:]), dict(zip(_CODES.values(), _CODES))
    types, arrays = header.pop("__metadata__"), {}
    for name, entry in header.items():
        dtype = np.dtype(names[entry["dtype"]]).newbyteorder("<")
        begin, end = end, end + math.prod(entry["shape"]) * dtype.itemsize
        arrays[name] = content[begin:end].view(dtype).reshape(entry["shape"])
    kinds = {name: types.get(name, x.dtype.name) for name, x in arrays.items()}
    if end != len(content) or head != _head(arrays, kinds, digest):
        raise ValueError("its header is not one that save writes")
    return {name: _restored(x, kinds[name]) for name, x in arrays.items()}


def _forms(leaves: dict[str, Any]) -> dict[str, str]:
    """Say of what type and shape leaves are."""
    return {name: f"{_kind(x)} {[*x.shape]}" for name, x in leaves.items()}


def load(path: str | os.PathLike, like: PyTree = None) -> PyTree:
    """Read what `save` wrote: the tree, with `like`, or a dict of leaves by path.

    Of `like`, a tree of the same structure, the paths, shapes and types of the leaves
    matter, not their values.  The digest has to be that of the content before anything
    is returned.  Leaves are NumPy arrays, which share the memory that the file is read
    into, and JAX arrays of typed random keys.

    Raises ValueError, with the file and what is wrong, for content that is damaged, cut
    short or foreign, for leaves that are not those of `like`, and for what is not a
    regular file, links included; OSError if it cannot be read.

    A trainer's state is saved as `gather` returns it, and loaded with like=
    trainer.like().  A state that was saved without `gather` is not lost: load it with
    like=trainer.init(key), by a trainer on as many devices, and gather it.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{path}: not a regular file")
    try:
        with open(path, "rb") as file:
            leaves = _unpack(file)
    except _WRONG as error:
        raise ValueError(f"{path}: {error}") from error
    if like is None:
        return leaves
    ours, theirs = _forms(_by_path(like)), _forms(leaves)
    state = isinstance(like, TrainState)
    end = "; gather a state before it is saved: see help(load)" if state else ""
    for name in [*ours, *theirs]:
        form, other = (x.get(name, "not there") for x in (theirs, ours))
        if form != other:
            raise ValueError(f"{path}: leaf '{name}' is {form}; expected {other}{end}")
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in ours])


# ---------------------------------------------------------------------------------
# Demo: python pjax_ensemble.py [--devices D]
# ---------------------------------------------------------------------------------


class Params(NamedTuple):
    weight: Array  # []
    bias: Array  # []


def main(num_devices: int | None = None) -> None:
    """Fit y = 2 x - 1 + noise in sync mode on D devices: JAX's pmap tutorial.

    By default on as many of them all as 128 points split over.  Raises ValueError for
    others, and for more than there are.
    """
    use_cpu_devices(num_devices)
    d = num_devices or math.gcd(128, jax.local_device_count())

    xs, noise = np.random.default_rng(0).normal(size=(2, 128, 1)).astype(np.float32)
    ys = 2 * xs - 1 + 0.5 * noise

    def loss_fn(params, xs, ys):
        return jnp.mean((params.weight * xs + params.bias - ys) ** 2)

    optimizer = sgd(0.005, momentum=0.9)
    update = make_sync_update(loss_fn, optimizer)
    params = Params(*jax.random.normal(jax.random.key(0), (2,)))
    state, batch = replicate(train_state(params, optimizer), d), split((xs, ys), d)
    print(f"{d} devices: {[str(device) for device in jax.local_devices()[:d]]}")
    for step in range(1000):
        state, loss = update(state, *batch)
        if step % 100 == 0:
            print(f"Step {step:3d}, loss: {float(unreplicate(loss)):.3f}")
    weight, bias = map(float, unreplicate(state.params))
    print(f"weight: {weight: .3f}   (true:  2.000)")
    print(f"bias:   {bias: .3f}   (true: -1.000)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--devices", type=int, metavar="D", help="that divide 128")
    try:
        main(parser.parse_args().devices)
    except ValueError as error:
        parser.error(str(error))
