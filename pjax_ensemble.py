# Copyright (c) 2026 The pjax_ensemble authors.  SPDX-License-Identifier: MIT
"""Train K models on D devices, whatever K and D are, in one file of plain JAX.

A training step is written once, for one model on one device.  The rest of the module
places copies of it: members are independent models, whose probabilities are averaged;
replicas are copies of one model, which share its batch and average their gradients.

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

`make_sync_update` and `make_ensemble_update` take the same step, in one call per batch,
which you split or replicate by hand.  Another file, `ensemble_metrics.py`, tells how
far to trust the probabilities.  This file needs no other to train.  With a third,
`fast_cpu.py`, beside it, convolutions are several times as fast on CPUs.

These letters are used everywhere:

    K   members of the ensemble        N, B, C  examples, a member's batch, classes
    D   devices in use                 H W I O  height, width, channels in, out
    M   members that share a device    R        replicas: devices with the same member

Images are NHWC, kernels HWIO, labels integers, losses in nats per example.

Contents: Layers, Network, Losses, Optimizers, Devices, States, Arguments, Member,
Calls, Updates, Places, Programs, Predictions, Trainer, Batches, Checkpoints, Demo.
Each section uses only the sections above it.  An import touches no device.  The file
jax_faults.py, in the repository, has the faults of JAX that comments name: the versions
that have each one, and a probe.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import math
import operator
import os
import queue
import re
import signal
import stat
import threading
import time
import traceback
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from numpy.typing import ArrayLike

if jax.__version_info__ < (0, 10):
    raise ImportError(
        f"pjax_ensemble needs JAX 0.10 or newer, this is {jax.__version__}; "
        "python -m pip install -U jax"
    )


def _warn(text: str) -> None:
    """Warn at the line that called this file, however deep in JAX the stack is now."""
    files = [call.filename for call in inspect.stack(0)]  # first ours, last the user's
    warnings.warn(text, stacklevel=len(files) - files[::-1].index(files[0]) + 1)


def _by_xla(f: Callable, options: dict | None = None) -> Callable:
    """Return f as it is, but warn where it convolves on a CPU."""
    traced = jax.jit(f, inline=True)

    def call(*args, **kwargs):
        program = str(traced.trace(*args, **kwargs).jaxpr)
        if "conv_general_dilated" in program and jax.default_backend() == "cpu":
            _warn("convolutions are slow on CPUs: put fast_cpu.py beside pjax_ensemble")
        return traced(*args, **kwargs)

    return call


_beside = ".fast_cpu" if __package__ else "fast_cpu"
try:
    _fast_cpu: Any = importlib.import_module(_beside, __package__)
except ModuleNotFoundError:  # this file alone works too
    _fast_cpu = types.SimpleNamespace(fast=_by_xla, Program=lambda make, _: make(None))

__version__ = "0.1.0"

# fmt: off
__all__ = [
    # Layers, Network
    "Conv", "conv_init", "conv", "Dense", "dense_init", "dense", "avg_pool", "max_pool",
    "replica_mean", "BatchNorm", "BatchStats", "batch_norm_init", "batch_norm",
    "dropout", "mlp_init", "mlp", "CNN", "cnn_init", "cnn",
    # Losses
    "softmax_cross_entropy", "gaussian_nll", "accuracy",
    # Optimizers
    "Optimizer", "apply_updates", "SGDState", "sgd", "AdamState", "adam", "adamw",
    "linear_schedule", "cosine_schedule",
    # Devices
    "use_cpu_devices", "split", "merge", "replicate", "unreplicate",
    # States, Calls, Updates
    "TrainState", "train_state", "gather_processes", "make_sync_update",
    "make_ensemble_update",
    # Places, Trainer, Batches
    "Layout", "layout", "Trainer", "make_trainer", "choose_members", "epoch_order",
    "prefetch",
    # Checkpoints, Fit, Demo
    "replace_file", "save", "load", "Segment", "Fitted", "fit", "main",
]
# fmt: on


def __dir__() -> list[str]:  # for completion: without the imported modules' names
    return [*__all__, "__doc__", "__version__"]


Array = jax.Array
PyTree = Any
Pair = int | Sequence[int]  # a height and a width; one number stands for both
Real = float | Array  # a number, known or traced
Schedule = Callable[[Any], Any]  # step count, from 0 -> learning rate

# Functions that users write, each with its two or four forms.  A trainer with `hyper`,
# `frozen` or both gives them these as last arguments, in this order.
InitFn = Callable[..., PyTree]
#   (key)                                params
#   (key)                                (params, model_state)         stateful
LossFn = Callable[..., Any]
#   (params, *batch)                     loss
#   (params, *batch)                     (loss, aux)                   has_aux
#   (params, model_state, key, *batch)   (loss, model_state)           stateful
#   (params, model_state, key, *batch)   (loss, (model_state, aux))    both
ApplyFn = Callable[..., PyTree]
#   (params, inputs)                     outputs
#   (params, model_state, inputs)        outputs                       stateful


# ---------------------------------------------------------------------------------
# Layers: parameters first, data second, options by keyword
# ---------------------------------------------------------------------------------


class Conv(NamedTuple):
    """Parameters of `conv`."""

    weight: Array  # [kh, kw, I, O]
    bias: Array | None  # [O]


def _he_normal(key: Array, shape: Sequence[int]) -> Array:
    """Draw from N(0, 2 / fan_in), for layers before a relu (He et al. 2015, eq. 10)."""
    shape = [_count(f"an axis of weights {list(shape)}", n) for n in shape]
    # XLA compiles a flat draw in half the time, and its numbers are the same.
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


def _check_windows(images: Array, size: Sequence[int], padding: str = "VALID") -> None:
    """Raise ValueError unless images are [B, H, W, I], and windows fit on them.

    With "SAME", H' = ceil(H / stride), and an odd row of zeros goes to the bottom or
    right.  With "VALID", H' = floor((H - kh) / stride) + 1.
    """
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding is {padding!r}; expected 'SAME' or 'VALID'")
    if images.ndim != 4:
        raise ValueError(
            f"images have shape {images.shape}; expected [B, H, W, I]; one image x is "
            "given as x[None]"
        )
    if padding == "VALID" and any(map(operator.lt, images.shape[1:3], size)):
        raise ValueError(
            f"a window of {size[0]}x{size[1]} does not fit images of shape "
            f"{images.shape}; use a smaller window or 'SAME'"
        )


def _check_features(inputs: Array, weight: Array, axis: int = -2) -> None:
    """Check inputs [..., I] against I, the length of an axis of a layer's weight."""
    features = weight.shape[axis]
    if inputs.shape[-1:] != (features,):
        remedy = ""
        if weight.ndim == 4 and inputs.ndim == 4 and inputs.shape[1] == features:
            remedy = "; channels are last: x.transpose(0, 2, 3, 1)"
        raise ValueError(
            f"inputs have shape {inputs.shape}; expected [..., {features}], as "
            f"parameters of shape {weight.shape} take{remedy}"
        )


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
    """Draw a convolution: weights from N(0, 2 / fan_in), and a bias of zeros, or None.

    Args:
      key: random key of the weights.
      in_channels, out_channels: the numbers I and O.
      kernel_size: height and width of the kernel; one int is both.
      bias: whether the layer has a bias.
    """
    kh, kw = _pair("kernel_size", kernel_size)
    weight = _he_normal(key, (kh, kw, in_channels, out_channels))
    return Conv(weight, jnp.zeros(out_channels) if bias else None)


def conv(
    params: Conv, images: Array, *, stride: Pair = 1, padding: str = "SAME"
) -> Array:
    """Convolve images [B, H, W, I] to [B, H', W', O].

    Kernels may have any size, odd or even.  H' and W' are as in
    `jax.lax.conv_general_dilated`, and like it, this function does not flip the kernel.
    On a CPU, its gradient is slow in a loop of your own, as any convolution's; updates
    and trainers compute it by `fast_cpu.py`.

    Args:
      params: the kernel [kh, kw, I, O], and a bias [O] or None.
      images: [B, H, W, I].
      stride: rows and columns between windows; one int is both.
      padding: "SAME" or "VALID".

    Raises ValueError for images that are not [B, H, W, I], for a number of channels
    other than the kernel's, for a kernel larger than the images with "VALID", and for
    an unknown padding.
    """
    images = jnp.asarray(images)
    weight, bias = params
    _check_features(images, weight)
    strides = _pair("stride", stride)
    _check_windows(images, weight.shape[:2], padding)
    dtype = jnp.promote_types(images.dtype, weight.dtype)
    outputs = lax.conv_general_dilated(
        images.astype(dtype),
        weight.astype(dtype),
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return outputs if bias is None else _add_bias(outputs, bias)


class Dense(NamedTuple):
    """Parameters of `dense`."""

    weight: Array  # [I, O]
    bias: Array  # [O]


def dense_init(key: Array, in_features: int, out_features: int) -> Dense:
    """Draw a dense layer: weights from N(0, 2 / fan_in), bias zero."""
    return Dense(_he_normal(key, (in_features, out_features)), jnp.zeros(out_features))


def dense(params: Dense, inputs: Array) -> Array:
    """Map inputs [..., I] to [..., O].  Raises ValueError for any other I."""
    _check_features(inputs, params.weight)
    return _add_bias(inputs @ params.weight, params.bias)


def _floats(x: Any, dtype: Any = float) -> Array:
    """Convert integers and booleans to `dtype`, JAX's float by default; keep floats."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(dtype)


def _windows(images: Array, window: Any, stride: Any) -> list[Array]:
    """Slice images [B, H, W, I] into kh * kw views, each [B, H', W', I].

    View (i, j), in row-major order, holds pixel (i, j) of every window.  Nothing is
    padded.
    """
    size = _pair("window", window)
    stride = size if stride is None else _pair("stride", stride)
    _check_windows(images, size)
    views = [images]
    for axis, k, s in zip((1, 2), size, stride):
        last = images.shape[axis] - k + 1
        views = [
            lax.slice_in_dim(x, i, last + i, s, axis) for x in views for i in range(k)
        ]
    return views


def avg_pool(images: Array, window: Pair = 2, *, stride: Pair | None = None) -> Array:
    """Average over windows of images [B, H, W, I], without padding: [B, H', W', I].

    `stride` defaults to `window`.  H' = floor((H - window) / stride) + 1: rows and
    columns that do not fill a window are left out.  Integers become floats.  Raises
    ValueError for a window larger than the images.
    """
    views = _windows(_floats(images), window, stride)
    return sum(views[1:], views[0]) / len(views)


def max_pool(images: Array, window: Pair = 2, *, stride: Pair | None = None) -> Array:
    """Take the maximum over windows of images [B, H, W, I]: [B, H', W', I].

    Windows and errors are as in `avg_pool`.  Equal maxima share the gradient.
    """
    return functools.reduce(jnp.maximum, _windows(images, window, stride))


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the type for means: float32, or the numbers' own if that is wider."""
    return dtype if dtype.kind in "fc" and dtype.itemsize > 2 else np.dtype(np.float32)


def _num_bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize if hasattr(x, "dtype") else 0


def _in_training() -> bool:
    """Return whether this is traced for replicas, which are trained together.

    Replicas stand along an axis of this name, which only programs that train have.  JAX
    keeps a trace by the names and sizes of the axes around it, so none is reused where
    others, or no replicas, are averaged.
    """
    try:
        lax.axis_size("replicas")
    except NameError:
        return False
    return True


def _average(tree: PyTree) -> PyTree:
    """Average over replicas, in float32 at least; leaves keep their types.

    Counts and keys have no mean, and all replicas advance them alike.
    """

    def average(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return lax.pmean(x.astype(_wide(x.dtype)), "replicas").astype(x.dtype)

    return jax.tree.map(average, tree) if _in_training() else tree


def replica_mean(tree: PyTree) -> PyTree:
    """Average every leaf over the replicas of the model that is being trained.

    Call it in the `loss_fn` of an update or a trainer, for a statistic of the whole
    batch.  Elsewhere, and for a model on one device, it returns its input.  Integers
    and booleans become JAX's floats in both cases.
    """
    return _average(jax.tree.map(_floats, tree))


class BatchNorm(NamedTuple):
    """Parameters of `batch_norm`; `scale` is None where it is not trained."""

    scale: Array | None  # [C]
    bias: Array  # [C]


class BatchStats(NamedTuple):
    """Running statistics, which belong to a model's state, not to its parameters."""

    mean: Array  # [C]
    var: Array  # [C]


def batch_norm_init(channels: int, *, scale: bool = True) -> tuple:
    """Make (BatchNorm, BatchStats): scale 1 or None, bias 0, mean 0, variance 1."""
    zeros = jnp.zeros(_count("channels", channels))
    ones = jnp.ones(channels)
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

    The output is scale (x - mean) / sqrt(var + eps) + bias (Ioffe and Szegedy 2015).

    Args:
      params: scale [C], or None for 1, and bias [C].
      stats: running mean [C] and variance [C].
      inputs: [..., C].  Integers become floats of the statistics' type.
      training: if true, use the mean and biased variance of the batch over all of its
        replicas, and move the running ones towards them, r = momentum r +
        (1 - momentum) s, as in Keras.  If false, use and return the running ones.
      momentum: the fraction of the running statistics that a step keeps.
      eps: added to the variance.

    Raises ValueError for a number of channels other than the parameters', and in
    training for inputs without a row.
    """
    _check_features(inputs, params.bias, axis=0)
    if training and 0 in inputs.shape[:-1]:
        raise ValueError(f"inputs of shape {inputs.shape} have no row to train on")
    expand = functools.partial(jnp.broadcast_to, shape=inputs.shape)
    inputs = _floats(inputs, stats.mean.dtype)
    x = inputs.astype(stats.mean.dtype)
    mean, var = stats
    if training:
        axes = tuple(range(x.ndim - 1))
        mean = replica_mean(x.mean(axes))
        var = replica_mean(jnp.square(x - expand(mean)).mean(axes))

        def move(running, now):
            return momentum * running + (1 - momentum) * now

        stats = BatchStats(move(stats.mean, mean), move(stats.var, var))
    factor = lax.rsqrt(var + eps) * (1 if params.scale is None else params.scale)
    outputs = (x - expand(mean)) * expand(factor) + expand(params.bias)
    return outputs.astype(inputs.dtype), stats


def _check_range(name: str, value: Real, limit: float) -> None:
    """Raise ValueError unless 0 <= value < limit, or the value is traced."""
    known = not isinstance(value, jax.core.Tracer)
    number = known and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biufV"
    if known and not (number and 0 <= value < limit):
        shown = str(value) if number else repr(value)
        if number and np.asarray(value).dtype.kind == "f":
            shown = repr(float(shown))  # 0.0001, not 9.999999747378752e-05 of float32
        raise ValueError(f"{name} is {shown}; expected 0 <= {name} < {limit}")


def _times(number: Real, x: Array) -> Array:
    """Return number * x in the type of x, whatever the type of the number."""
    return jnp.asarray(number, jnp.result_type(x)) * x


def dropout(key: Array | None, inputs: Array, rate: Real = 0.5) -> Array:
    """Zero a fraction `rate` of inputs [...] at random; scale the rest by 1/(1 - rate).

    This keeps the expectation (Srivastava et al. 2014, section 10).  Integers become
    floats.  With key=None, as in evaluation, the inputs are returned.  Raises
    ValueError for a rate outside [0, 1), unless the rate is traced.
    """
    _check_range("rate", rate, 1)
    if key is None:
        return inputs
    keep = 1 - jnp.asarray(rate, float)
    # The draw is flat, as in `_he_normal`.
    kept = jax.random.bernoulli(key, keep, (inputs.size,)).reshape(inputs.shape)
    return jnp.where(kept, _times(1 / keep, _floats(inputs)), 0)


# ---------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------


def mlp_init(key: Array, sizes: Sequence[int]) -> list[Dense]:
    """Draw the dense layers of a network of sizes [inputs, hidden, ..., outputs].

    Raises ValueError for fewer than two sizes, and for sizes below 1.
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes are {sizes}; expected two or more")
    keys = jax.random.split(key, len(sizes) - 1)
    return [dense_init(*layer) for layer in zip(keys, sizes, sizes[1:])]


def mlp(params: Sequence[Dense], x: Array) -> Array:
    """Map inputs [..., I] to outputs [..., O] by dense layers, with ReLU between them.

    Raises ValueError for inputs of another size than the first layer's.
    """
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(dense(layer, x))
    return dense(last, x)


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

    With the defaults, which fit MNIST, it has 824,458 parameters, as in the guide.
    Raises ValueError for an image_shape that is not three ints, for images smaller than
    4 x 4, and for a num_classes that is not an int of 1 or more.
    """
    sizes = image_shape if np.shape(image_shape) == (3,) else (0, 0, 0)
    if not all(map(_is_int, sizes)) or min(sizes[:2]) < 4 or sizes[2] < 1:
        raise ValueError(
            f"image_shape is {image_shape!r}; expected (H, W, channels), ints, with H "
            "and W >= 4: pad smaller images"
        )
    height, width, channels = sizes
    keys = jax.random.split(key, 4)
    return CNN(
        conv_init(keys[0], channels, 32),
        conv_init(keys[1], 32, 64),
        dense_init(keys[2], height // 4 * (width // 4) * 64, 256),
        dense_init(keys[3], 256, _count("num_classes", num_classes)),
    )


def cnn(params: CNN, images: Array) -> Array:
    """Map images [B, H, W, I], pixels in [0, 1], to logits [B, C].

    Raises ValueError for images of integers, and as `conv` does.
    """
    images = jnp.asarray(images)
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"images are {images.dtype}; expected floats in [0, 1]; of bytes take "
            "images.astype(jnp.float32) / 255"
        )
    x = avg_pool(jax.nn.relu(conv(params.conv1, images)))
    x = avg_pool(jax.nn.relu(conv(params.conv2, x)))
    x = x.reshape(x.shape[0], -1)
    return dense(params.dense2, jax.nn.relu(dense(params.dense1, x)))


# ---------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------


def _check_labels(logits: Any, labels: Any) -> None:
    shape = logits.shape[:-1]
    if labels.shape != shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        one_hot = labels.shape == logits.shape
        remedy = "; of one-hot labels take labels.argmax(axis=-1)" if one_hot else ""
        raise ValueError(
            f"labels are {labels.dtype}{list(labels.shape)}; expected integers "
            f"{list(shape)}, class indices{remedy}"
        )


def softmax_cross_entropy(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] in nats: [..., C] and labels [...] -> [...].

    Logits are [B, C], or have more axes, as tokens [B, T, C] and images [B, H, W, C]
    do.  The loss is nan for a label below 0, or of C or above.  Raises ValueError
    unless labels are integers, one per row of logits.
    """
    _check_labels(logits, labels)
    log_probs = jax.nn.log_softmax(_floats(logits))
    index = labels.astype(int)
    inside = (index >= 0) & (index < logits.shape[-1])
    index = jnp.where(inside, index, logits.shape[-1])[..., None]
    return -jnp.take_along_axis(log_probs, index, axis=-1, mode="fill")[..., 0]


def gaussian_nll(mean: Array, variance: Array, targets: Array) -> Array:
    """Return -log N(target; mean, variance) in nats: three arrays [B] -> [B].

    This is (log(2 pi variance) + (target - mean)^2 / variance) / 2, the loss of a
    network with two outputs (Nix and Weigend 1994; Lakshminarayanan et al. 2017, eq.
    1).  A variance of 0 or below gives nan: keep it positive, as by softplus.  Raises
    ValueError for shapes that differ.
    """
    mean, variance, targets = map(_floats, (mean, variance, targets))
    shapes = [x.shape for x in (mean, variance, targets)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"mean, variance and targets have shapes {shapes}; expected equal ones; "
            "take [..., 0] of an array that ends in 1"
        )
    # Division by the deviation keeps the gradient finite for any variance.
    deviation = jnp.sqrt(variance)
    error = (targets - mean) / deviation
    return jnp.log(deviation) + (math.log(2 * math.pi) + jnp.square(error)) / 2


def accuracy(logits: Array, labels: Array) -> Array:
    """Return the fraction of rows whose largest entry is the label's: a scalar.

    Takes logits or probabilities [B, C] and labels [B].  Raises ValueError as
    `softmax_cross_entropy` does.
    """
    _check_labels(logits, labels)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


# ---------------------------------------------------------------------------------
# Optimizers: of the same form as Optax's, so that each works in place of the other
# ---------------------------------------------------------------------------------


class Optimizer(NamedTuple):
    """A pair of functions, made by `sgd` or `adam`, or written by you.

    `init(params)` returns the optimizer's state, a tree of arrays.  `update(grads,
    opt_state, params)` returns the updates, which are added to the parameters and form
    a tree like them, and the new state, whose leaves keep their shapes and types.  An
    `update` with an argument `value` is given the loss there.  For example, signed
    descent:

        def update(grads, opt_state, params=None):
            steps = jax.tree.map(lambda g: -0.01 * jnp.sign(g), grads)
            return steps, {"count": opt_state["count"] + 1}

        optimizer = Optimizer(lambda params: {"count": jnp.zeros((), int)}, update)

    Updates are added to the parameters and do not replace them.  An `update` that
    returns new parameters makes them grow in every step, without an error.
    """

    init: Callable  # params -> opt_state
    update: Callable  # (grads, opt_state, params=None) -> (updates, opt_state)


class OptimizerLike(Protocol):
    """The type of optimizer arguments: an `Optimizer`, or one of Optax's."""

    @property
    def init(self) -> Callable: ...
    @property
    def update(self) -> Callable: ...


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    """List the leaves of a tree, each after the name of its path."""
    leaves = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _check_params(params: PyTree, kind: Any = jnp.floating) -> None:
    """Raise ValueError for parameters of another kind, by default than real floats."""
    for name, leaf in _named(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, kind):
            raise ValueError(
                f"parameter '{name}' is {dtype}; expected floating point: split "
                "complex ones, keep others in model_state"
            )


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to params in the wider type of the two; round to the type of params.

    Updates smaller than half the spacing of the type are lost: in bfloat16, all below
    1/512 of the parameter, and some below 1/256 of it.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def _zeros(params: PyTree) -> PyTree:
    """Return zero accumulators shaped like params, in float32 at least."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, _wide(jnp.result_type(p))), params)


def _as_schedule(learning_rate: Real | Schedule) -> Schedule:
    """Return a schedule: a number becomes the function that always returns it."""
    if callable(learning_rate):
        return learning_rate
    _check_range("learning_rate", learning_rate, math.inf)
    return lambda count: learning_rate


class SGDState(NamedTuple):
    """The state of `sgd`."""

    num_steps: Array  # [], steps taken
    velocity: PyTree  # like params, in float32 at least


def sgd(
    learning_rate: Real | Schedule, momentum: Real = 0.9, *, nesterov: bool = False
) -> Optimizer:
    """Make stochastic gradient descent with momentum.

    v = mu v + g; w = w - eta v, or with Nesterov's momentum w = w - eta (g + mu v).
    This is the form of PyTorch and Optax, which leaves eta out of v (Sutskever et al.
    2013 fold it in).  `learning_rate` is a number, or a function of the step count,
    which is 0 at the first step.  For parameters of less precision than float32, v and
    the updates are float32: a v of bfloat16 would stop changing once (1 - mu) v is
    below its rounding, as with mu = 0.999.

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
    """The state of `adam`."""

    num_steps: Array  # [], steps taken
    mean: PyTree  # of gradients, like params, in float32 at least
    square: PyTree  # of squared gradients, the same


def adam(
    learning_rate: Real | Schedule, b1: Real = 0.9, b2: Real = 0.999, eps: Real = 1e-8
) -> Optimizer:
    """Make Adam (Kingma and Ba 2015, algorithm 1).

    m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g^2; with t the step, from 1,
    w = w - eta (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + eps).

    For parameters of less precision than float32, m, s and the updates are float32,
    since bfloat16 rounds b2 to 1, and float16 rounds eps to 0.  (Optax's `mu_dtype`
    sets the type of m alone; s has the type of the parameters there.)

    Args:
      learning_rate: eta, a number, or a function of the step count, which is 0 at the
        first step.
      b1, b2: the fractions of m and of s that a step keeps.
      eps: added to the denominator.

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
        # They are arrays so that 1 - b1 rounds alike for known and traced numbers.
        beta1, beta2, t = (jnp.asarray(x, float) for x in (b1, b2, num_steps + 1))

        def average(beta, old, new):
            return _times(beta, old) + _times(1 - beta, new)

        grads = jax.tree.map(lambda m, g: jnp.asarray(g, m.dtype), mean, grads)
        mean = jax.tree.map(lambda m, g: average(beta1, m, g), mean, grads)
        square = jax.tree.map(lambda s, g: average(beta2, s, g * g), square, grads)
        rate = schedule(num_steps) / (1 - beta1**t)
        root = jnp.sqrt(1 - beta2**t)

        def step(m, s):
            denominator = jnp.sqrt(s) / root.astype(s.dtype) + jnp.asarray(eps, s.dtype)
            return _times(-rate, m) / denominator

        return jax.tree.map(step, mean, square), AdamState(num_steps + 1, mean, square)

    return Optimizer(init, update)


def adamw(
    learning_rate: Real | Schedule,
    b1: Real = 0.9,
    b2: Real = 0.999,
    eps: Real = 1e-8,
    weight_decay: Real = 1e-4,
    mask: PyTree | Callable = True,
) -> Optimizer:
    """Make Adam with decoupled weight decay (Loshchilov and Hutter 2019), as Optax's.

    A step of `adam` also subtracts eta weight_decay w, with w before the step.  Moments
    see the gradient alone, so the decay does not depend on its size.

    `mask` says which leaves decay: a tree of booleans like params, or like its upper
    levels, or a function of params that returns one.  For all but biases and scales:

        adamw(0.001, mask=lambda params: jax.tree.map(lambda w: w.ndim > 1, params))

    Raises ValueError as `adam` does, and for a weight_decay that is negative or not
    finite, unless it is traced.
    """
    schedule = _as_schedule(learning_rate)
    _check_range("weight_decay", weight_decay, math.inf)
    init, step = adam(schedule, b1, b2, eps)

    def update(grads, opt_state, params):
        # Arrays, so that the product rounds alike for known and traced numbers.
        rate = jnp.asarray(schedule(opt_state.num_steps), float)
        share = rate * jnp.asarray(weight_decay, float)

        def decay(u, w):
            return u - _times(share, jnp.asarray(w, u.dtype))

        def choose(decays, updates, params):
            return jax.tree.map(decay, updates, params) if decays else updates

        updates, opt_state = step(grads, opt_state)
        decays = mask(params) if callable(mask) else mask
        return jax.tree.map(choose, decays, updates, params), opt_state

    return Optimizer(init, update)


def _schedule(peak: Real, num_steps: Real, warmup: Real, shape: Callable) -> Schedule:
    """Return peak * shape(t): t rises 0 -> 1 in the warmup, then falls 1 -> 0."""
    _check_range("peak", peak, math.inf)
    _check_range("num_steps", num_steps, 2**31)
    _check_range("warmup", warmup, 1)

    def schedule(step):
        # Steps take the inner ones of num_steps + 2 points, so that the first and the
        # last step have a rate above 0.  Integers count them from either end, so that
        # none rounds to 0.
        with jax.numpy_dtype_promotion("standard"):  # for integers with floats
            step = jnp.asarray(step, jnp.result_type(step, jnp.int32))
            points = jnp.asarray(num_steps, float) + 1
            start = jnp.asarray(warmup, float)
            rise = (step + 1) / (points * start)
            fall = (num_steps - step) / (points * (1 - start))
            return peak * shape(jnp.clip(jnp.minimum(rise, fall), 0))

    return schedule


def linear_schedule(peak: Real, num_steps: Real, *, warmup: Real = 0.15) -> Schedule:
    """Make a learning rate that rises linearly to `peak` and falls linearly to 0.

    It rises for the fraction `warmup` of `num_steps` (Howard and Ruder 2018, slanted
    triangular; Goyal et al. 2017 for the warmup), and stays 0 after the last step.

    Raises ValueError for a peak that is negative or not finite, a num_steps outside
    [0, 2^31) and a warmup outside [0, 1), unless they are traced.
    """
    return _schedule(peak, num_steps, warmup, lambda t: t)


def cosine_schedule(peak: Real, num_steps: Real, *, warmup: Real = 0.15) -> Schedule:
    """Make a learning rate that rises and falls as `linear_schedule`, in half cosines.

    It is peak (1 - cos(pi t)) / 2, where t rises from 0 to 1 and falls again
    (Loshchilov and Hutter 2017, without restarts).  Raises ValueError as
    `linear_schedule` does.
    """
    # (1 - cos(x)) / 2 = sin(x / 2)^2, which stays above 0 where cos(x) rounds to 1.
    return _schedule(peak, num_steps, warmup, lambda t: jnp.sin(jnp.pi / 2 * t) ** 2)


# ---------------------------------------------------------------------------------
# Devices: trees to and from a leading device axis
# ---------------------------------------------------------------------------------


def use_cpu_devices(num_devices: int | None = None, *, keep_memory=True) -> None:
    """Divide the CPU into virtual devices, by default one per core.

    Call it before JAX first touches a device.  Later calls change nothing, and warn if
    there are fewer devices.  It has no effect on other platforms, but that the process
    keeps memory that it has taken, unless `keep_memory` is False: see
    `fast_cpu.keep_memory`, which is called with `wait=False`.  Raises ValueError for a
    number that is not an int of 1 or more.
    """
    if keep_memory and hasattr(_fast_cpu, "keep_memory"):
        _fast_cpu.keep_memory(wait=False)
    if num_devices is None:
        affinity = getattr(os, "sched_getaffinity", None)
        num_devices = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", _count("num_devices", num_devices))
    except RuntimeError:  # JAX already runs, and its devices stay
        if jax.default_backend() == "cpu" and (lack := _lack(num_devices)):
            _warn(lack)


def _lack(asked: int) -> str:
    """Return an error's text if there are fewer local devices than asked, else ""."""
    there = jax.local_device_count()
    if there >= asked:
        return ""
    return (
        f"{asked} devices requested, {there} available (on CPU, "
        f"use_cpu_devices({asked}) before JAX runs, in a new process, makes more)"
    )


def _num_devices(number: int | None) -> int:
    return jax.local_device_count() if number is None else _count("num_devices", number)


def _split_axis(x, axis, d):
    """Reshape [..., N, ...] to [..., d, N / d, ...], or raise ValueError."""
    if np.ndim(x) < 1:
        raise ValueError("a leaf without axes cannot be split; replicate it instead")
    x = x if hasattr(x, "reshape") else np.asarray(x)
    n = x.shape[axis]
    if n % d:
        raise ValueError(
            f"a batch of {n} does not split over {d} devices; use a multiple of {d}, "
            f"for example {n - n % d or d}"
        )
    return x.reshape(*x.shape[:axis], d, n // d, *x.shape[axis + 1 :])


def split(tree: PyTree, num_devices: int | None = None) -> PyTree:
    """Reshape every leaf [N, ...] to [D, N / D, ...]; D defaults to the local devices.

    Rows keep their order; none is dropped or repeated.  NumPy arrays stay on the host.
    Raises ValueError if D does not divide N, and for leaves without an axis.
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


def _sharding(mesh: jax.sharding.Mesh, *spec: str | tuple | None) -> Any:
    """Return a sharding: array axes over the mesh's, or, without spec, copies."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _device_sharding(num_devices: int, axis: str = "devices") -> Any:
    """Return a sharding of a leading axis [D, ...] over the first D local devices."""
    if lack := _lack(num_devices):
        raise ValueError(lack)
    devices = np.array(jax.local_devices()[:num_devices])
    return _sharding(jax.sharding.Mesh(devices, (axis,)), axis)


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf, or a leaf's form, is a typed random key."""
    ours = isinstance(leaf, (Array, jax.ShapeDtypeStruct))
    return ours and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# Arrays that may wait for a copy from one device to another, the oldest first.  The end
# of the process waits for them (fault `copies_at_the_end`).
_IN_FLIGHT: collections.deque[Array] = collections.deque()
_IN_FLIGHT_LOCK = threading.Lock()


@atexit.register
def _wait_in_flight() -> None:
    for x in list(_IN_FLIGHT):
        with contextlib.suppress(RuntimeError):  # of a program that failed
            jax.block_until_ready(x)


if hasattr(os, "register_at_fork"):  # a child has none of the threads that copy
    os.register_at_fork(after_in_child=_IN_FLIGHT.clear)


def _is_done(x: Any) -> bool:
    return x.is_deleted() or x.is_ready()


def _forget_done() -> None:
    """Hold no array that has arrived; each call of a program looks for these."""
    with _IN_FLIGHT_LOCK:
        while _IN_FLIGHT and _is_done(_IN_FLIGHT[0]):
            _IN_FLIGHT.popleft()


def _in_flight(x: Array) -> Array:
    """Return an array on devices, for which the end of the process waits."""
    _forget_done()
    numbers = jax.random.key_data(x) if _is_key(x) else x
    if not _is_done(numbers):
        _IN_FLIGHT.append(numbers)
    return x


def _device_put(x: Any, where: Any) -> Array:
    """Put an array on devices, from the host or from other devices."""
    y = jax.device_put(x, where)
    return _in_flight(y) if isinstance(x, Array) else y


def _from_host(x: np.ndarray, where: Any) -> Array:
    """Put an array of NumPy on devices: faster than `jax.device_put`, and explicit."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(x.shape, where, x.__getitem__)


def replicate(tree: PyTree, num_devices: int | None = None) -> PyTree:
    """Copy every leaf [...] to [D, ...], one copy on each of the first D devices.

    D defaults to the number of local devices.  The copies are new buffers: consuming
    them leaves `tree` as it was.  Raises ValueError if there are fewer devices.
    """
    sharding = _device_sharding(_num_devices(num_devices))

    def copy(x):
        x = jnp.asarray(x)[None]  # a computed buffer, which nothing else holds
        shards = [_device_put(x, d) for d in sharding.mesh.devices]
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
# States: what a state is, and whether it fits
# ---------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """The arrays that training changes; leading axes hold several models."""

    params: PyTree
    opt_state: PyTree
    model_state: PyTree  # arrays that are not trained, such as running statistics
    key: Array | None  # the member's random key; every stateful step returns a new one

    def __repr__(self) -> str:  # forms alone: the numbers may be deleted
        forms = [f"{name}={_described(x)}" for name, x in zip(self._fields, self)]
        return f"TrainState({', '.join(forms)})".replace("'", "")


def _kind(leaf: Any) -> str:
    """Name the type of a leaf, or of a leaf's form."""
    if _is_key(leaf):
        with jax.transfer_guard("allow"):  # an array tells, and its type alone does not
            return f"key<{jax.random.key_impl(jnp.empty((), leaf.dtype))}>"
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return getattr(dtype, "name", dtype)


def _described(tree: PyTree, first: int = 0, typed: bool = True) -> PyTree:
    """Name the type, and the shape from the first axis on, of every leaf."""

    def name(x):
        return f"{_kind(x) if typed else ''}{list(np.shape(x)[first:])}"

    return jax.tree.map(name, tree)


def _like(leaf: Any, *axes: int) -> jax.ShapeDtypeStruct:
    """Return the form of a leaf with other axes in place of its first one."""
    return jax.ShapeDtypeStruct((*axes, *leaf.shape[1:]), leaf.dtype)


def _on_data(function: Callable, leaf: Any) -> Any:
    """Apply a function of an array to a leaf, or to the data of a typed random key."""
    if not _is_key(leaf):
        return function(leaf)
    data = function(jax.random.key_data(leaf))
    data = data if isinstance(data, Array) else jax.device_put(data)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def _check_leaves(what: Any, theirs: dict, ours: dict, remedy: str = "") -> None:
    """Raise ValueError for the first leaf whose form is another, or that is absent."""
    for name in ours | theirs:
        form = theirs.get(name, "absent")
        like = ours.get(name, "absent")
        if form != like:
            raise ValueError(
                f"{what}: leaf '{name}' is {form}; expected {like}{remedy}"
            )


def _form(tree: PyTree, first: int = 0, typed: bool = True) -> tuple:
    """Return what `_described` names, and the structure: to compare, and faster."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [np.shape(x)[first:] for x in leaves]
    dtypes = [getattr(x, "dtype", None) for x in leaves if typed]
    return structure, *shapes, *dtypes


def _check_form(what, tree, like, remedy="", first=0, typed=True) -> None:
    """Raise ValueError unless two trees have one structure, and leaves of one form."""
    structure, *found = _form(tree, first, typed)
    expected, *wanted = _form(like, first, typed)
    if structure == expected and found == wanted:
        return  # without names, which take longer
    theirs = dict(_named(_described(tree, first, typed)))
    ours = dict(_named(_described(like, first, typed)))
    _check_leaves(what, theirs, ours, remedy)
    if structure != expected:
        # They differ without a leaf, as in an empty part of an optimizer's state.
        pairs = zip(str(structure), str(expected))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), 60)
        part = slice(max(0, at - 60), at + 60)
        raise ValueError(
            f"{what} has the structure ...{str(structure)[part]}...; expected "
            f"...{str(expected)[part]}...{remedy}"
        )


def train_state(
    params: PyTree,
    optimizer: OptimizerLike,
    *,
    model_state: PyTree = (),
    key: Array | None = None,
) -> TrainState:
    """Make the state of one model.

    For sync mode, `replicate` it.  For ensemble mode, stack D of them with different
    keys, or `jax.pmap` a function of the key that makes one.

    Args:
      params: a tree of arrays.
      optimizer: makes the optimizer's state.
      model_state: a tree of arrays that are not trained, for `stateful=True`.
      key: a random key, from `jax.random.key` or the older `PRNGKey`; only losses with
        `stateful=True` need it.
    """
    return TrainState(params, optimizer.init(params), model_state, key)


# ---------------------------------------------------------------------------------
# Arguments: what is foreign, made one form once
# ---------------------------------------------------------------------------------


# Errors of functions that are given other arguments than they expect.
_MISFITS = TypeError, ValueError, AttributeError, LookupError, NotImplementedError


def _user_call(what: str, advice: str, function: Callable, *args) -> Any:
    """Call a user's function; name it in a ValueError if it refuses the arguments.

    A note says where, by the lines that are neither JAX's nor this file's.
    """
    try:
        return function(*args)
    except _MISFITS as error:
        text = " ".join(str(error).split())  # JAX's may have several lines
        misfit = ValueError(f"{what}: {text}; {advice}")
        others = os.path.join(os.path.dirname(jax.__file__), ""), __file__
        lines = [
            line
            for line in traceback.extract_tb(error.__traceback__)
            if not line.filename.startswith(others)
        ]
        misfit.add_note("".join(traceback.format_list(lines)).rstrip())
        raise misfit from None


_ANY = "arrays of one length, 1 or more; reshape longer ones to [N, m, ...]"


def _check_axes(what, tree, *lengths, expected=_ANY):
    """Raise ValueError unless the first axes of all leaves have the same lengths.

    There are as many of these axes as `lengths`, by default one.  A length of None is
    any but 0.
    """
    leaves = jax.tree.leaves(tree)
    lengths = lengths or (None,)
    axes = {tuple(np.shape(x)[: len(lengths)]) for x in leaves}
    first = min(axes, default=())
    fits = all(n in (None, m) for n, m in zip(lengths, first))
    if len(axes) != 1 or len(first) != len(lengths) or not fits or 0 in first:
        if any(map(np.isscalar, leaves)):
            expected += "; a list holds numbers: numpy.array(...) of it is one leaf"
        raise ValueError(
            f"the first axes of the {what} have lengths {sorted(axes)}; expected "
            f"{expected}"
        )


_TRACED = (
    "arguments are traced, inside jax.jit or jax.grad; call it outside, and give "
    "loss_fn or apply_fn to jax.jit or jax.grad"
)


def _check_outside(tree: PyTree) -> None:
    """Raise ValueError for arguments that JAX traces."""
    # A list here takes no call per leaf, as a generator does.
    if any([isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)]):
        raise ValueError(_TRACED)


def _array(what: str, x: Any) -> Any:
    """Return a leaf as an array of JAX or NumPy; raise ValueError if it has none.

    An array whose type says how a mesh divides it, and so cannot be cut, is copied to
    the host.
    """
    if isinstance(x, jax.core.Tracer):
        raise ValueError(_TRACED)
    if isinstance(x, (Array, jax.ShapeDtypeStruct)):
        mesh = getattr(x.sharding, "mesh", None)
        explicit = jax.sharding.AxisType.Explicit
        divided = mesh is not None and explicit in mesh.axis_types
        return _on_data(np.asarray, x) if divided else x
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last
        raise ValueError(f"{what}: {error}; expected numbers of NumPy's") from error
    dtype = array.dtype
    masked = isinstance(x, np.ma.MaskedArray)
    if masked or dtype.kind in "OSTUMm" or issubclass(dtype.type, np.void):
        raise ValueError(
            f"{what}: found {type(x).__name__} of {dtype}; expected numbers, none "
            "masked"
        )
    return array


def _arrays(what: str, tree: PyTree) -> PyTree:
    """Return a tree of arrays [N, ...]; raise ValueError where it is none."""
    _check_axes(what, tree)
    return jax.tree.map(functools.partial(_array, what), tree)


# JAX has these types whatever its settings are, so they need no further check.
_COMMON = {np.dtype(name) for name in ("bool", "float32", "int32", "uint8")}


def _numbers(what: str, x: Any) -> Any:
    """Return a leaf as an array of JAX, or as one of NumPy with a type that JAX has.

    A leaf's form, `jax.ShapeDtypeStruct`, is returned as it is.

    Raises ValueError for other types, and for integers that JAX's type cannot hold.
    """
    x = _array(what, x)
    if not isinstance(x, np.ndarray) or x.dtype in _COMMON:
        return x
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    advice = "convert it, as by x.astype(numpy.float32)"
    dtype = _user_call(what, advice, jnp.result_type, np.empty(0, x.dtype))
    held = x.astype(dtype, copy=False)
    if held is not x and dtype.kind in "iu" and (held != x).any():
        raise ValueError(
            f"{what}: found {x[held != x][0]}, beyond {dtype}, JAX's type for "
            f"{x.dtype}; use smaller numbers, or set jax_enable_x64"
        )
    return held


def _private(what: str, tree: PyTree) -> PyTree:
    """Copy NumPy's arrays, whose memory `jax.device_put` may share on a CPU."""

    def own(x):
        x = _numbers(what, x)
        return np.array(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(own, tree)


# ---------------------------------------------------------------------------------
# Member: what one model does on one device, written once
# ---------------------------------------------------------------------------------


def _scan(f: Callable, carry: PyTree, xs: PyTree) -> tuple:
    """Do as `lax.scan` does, without a loop of one turn.

    Such a loop is slower on CPUs (fault `slow_loops_of_one_turn`).  Over shards, XLA
    for TPUs computes other loops within it twice.
    """
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.scan(f, carry, xs)
    carry, y = f(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: jnp.expand_dims(y, 0), y)


def _over_shards(rows: PyTree, shards: int) -> PyTree:
    """Divide examples, leaves [B, ...], over a model's S devices, where S divides B."""
    if shards == 1 or len(jax.tree.leaves(rows)[0]) % shards:
        return rows
    spec = jax.sharding.PartitionSpec("shards")
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), rows)


def _by_itself(ok: Array | None, f: Callable, old: PyTree, *args: PyTree) -> PyTree:
    """Return f(old, *args), or `old` where `ok` is false; on a CPU, compile f apart.

    An `ok` of None is always true.

    On CPU, XLA cannot see that this branch is always taken, so it compiles f by itself;
    otherwise bits would depend on fusion, and so on K (fault
    `rounding_by_surroundings`).  In a loop of one turn, XLA would move parts out of it,
    and use one thread.  On an accelerator XLA sees it, and removes the branch, as it
    would be slow there: each array is selected in its place.
    """
    hide = lax.optimization_barrier
    taken, kept = lax.platform_dependent(
        True if ok is None else ok,
        cpu=lambda ok: (hide(ok), True),
        default=lambda ok: (True, ok),
    )
    new = lax.cond(taken, f, lambda old, *_: old, old, *args)
    if ok is None:
        return new
    return jax.tree.map(lambda x, y: jnp.where(kept, x, y), new, old)


# On these platforms, XLA would keep all members' kernels twice, in cuDNN's order and in
# JAX's, so states are flat between the members (on a TPU, flattening would copy them).
# And the host waits before each turn of a loop whose length the program does not hold,
# so most steps are taken in loops of _TURNS.
_GPU, _TURNS = ("gpu",), 32


def _scan_first(f, carry, xs, count, platform) -> tuple:
    """Scan the first `count` of xs; results for the others are 0.

    `count` is traced, so one program serves every count up to the length of xs.
    """

    def at(i):
        return jax.tree.map(lambda x: x[i], xs)

    def advance(i, carry_and_ys):
        carry, ys = carry_and_ys
        carry, y = run(carry, at(i))
        return carry, jax.tree.map(lambda ys, y: ys.at[i].set(y), ys, y)

    run = jax.jit(f, inline=True)  # f is traced once for all uses
    _, shapes = run.eval_shape(carry, at(0))
    length = len(jax.tree.leaves(xs)[0])
    ys = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), shapes)
    done = 0
    if platform in _GPU and length >= _TURNS:

        def several(i, carry_and_ys):
            def turn(j, carry_and_ys):
                return advance(i * _TURNS + j, carry_and_ys)

            return lax.fori_loop(0, _TURNS, turn, carry_and_ys)

        carry, ys = lax.fori_loop(0, count // _TURNS, several, (carry, ys))
        done = count // _TURNS * _TURNS
    return lax.fori_loop(done, count, advance, (carry, ys))


def _check_model(model: Any, stateful: bool) -> None:
    """Raise ValueError unless init_fn returned a tree of arrays."""
    if stateful and (type(model) is not tuple or len(model) != 2):
        raise ValueError(
            f"init_fn returns {type(model).__name__}; with stateful=True, expected the "
            "tuple (params, model_state)"
        )
    for name, leaf in _named(model):
        if isinstance(leaf, (np.ndarray, np.generic)):
            _numbers("leaves that init_fn returns", leaf)
        elif not isinstance(leaf, Array):
            raise ValueError(
                f"init_fn returns {type(leaf).__name__} at '{name}'; expected arrays: "
                "split off others (nnx.split)"
            )


def _two(value: Any, expected: str) -> Any:
    """Return a pair that loss_fn returns, or raise ValueError."""
    several = isinstance(value, (tuple, list))
    if several and len(value) == 2:
        return value
    count = f"{len(value)} results" if several else "one result"
    raise ValueError(f"loss_fn returns {count}; expected the pair {expected}")


def _takes_value(update: Callable) -> bool:
    """Return whether an optimizer's update takes the loss, as an argument `value`."""
    parameters = inspect.signature(update).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def _hidden(tree: PyTree) -> PyTree:
    """Return a tree whose operations XLA:CPU does not see beside a user's.

    XLA:CPU is wrong where a function moves the rows of a state, and a reshape comes
    before or behind (fault `moved_rows`).  What users' functions are given and return
    is hidden, so that only their own operations meet, as under `jax.jit`.
    """
    # Each leaf has a barrier of its own: none then waits for the others.
    hide = functools.partial(jax.tree.map, lax.optimization_barrier)
    return lax.platform_dependent(tree, cpu=hide, default=lambda tree: tree)


def _present(*trees: PyTree) -> tuple:
    """Return the trees that are not None."""
    return tuple(x for x in trees if x is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """What one member does on one device; an update or a trainer maps it over all.

    `first`, `step`, `steps` and `outputs` take the member's state, and their other
    arguments by name.  Among these are its hyper and the frozen tree, each None if
    there is none; users' functions take those that are not None last, as `extras`.  No
    field is an array, which programs would hold.
    """

    loss_fn: LossFn
    optimizer: Any  # with hyper also a function of it
    has_aux: bool
    stateful: bool
    microbatch: int | str | None
    skip_nonfinite: bool
    # The others are a trainer's.
    init_fn: Any = None
    apply_fn: Any = None
    output: Callable | None = None
    shards: int = 1
    platform: str | None = None  # None is JAX's default, asked for in the first call
    last: tuple = ()  # names of the extras

    def __post_init__(self) -> None:
        if self.microbatch not in (None, "auto"):
            _count("microbatch", self.microbatch)

    def call(self, name: str, names: tuple, args: tuple, note: str = "") -> Any:
        """Call a user's function of arguments with these names, and of the extras."""
        advice = f"it is called as {name}({', '.join(names + self.last)}){note}"
        what = name
        if self.last:
            last = "last argument" if len(self.last) == 1 else "last arguments"
            what = f"{name} takes {' and '.join(self.last)} as its {last}"
        return _user_call(what, advice, getattr(self, name), *args)

    def optimizer_of(self, hyper: PyTree = None) -> OptimizerLike:
        """Return the member's optimizer.  Raises ValueError if it is none."""
        optimizer = self.optimizer
        function = callable(optimizer) and not hasattr(optimizer, "update")
        if function and hyper is not None:
            advice = (
                "it takes hyper as its last argument, traced numbers; a schedule that "
                "compares them takes a peak of 1, and hyper's as a factor"
            )
            optimizer = _user_call("optimizer", advice, optimizer, hyper)
        advice = "expected one with init and update, such as sgd(0.1)"
        parts = operator.attrgetter("init", "update")
        _user_call("optimizer", advice, parts, optimizer)
        return optimizer

    def loss(self, params, model_state, key, batch, extras):
        """Bring the four forms of a `LossFn` into one: (loss, (model_state, aux))."""
        names = tuple(f"batch[{i}]" for i in range(len(batch)))
        if self.stateful:
            names = ("params", "model_state", "key", *names)
            args = (params, model_state, key, *batch, *extras)
            value = self.call("loss_fn", names, args)
        else:
            note = "; stateful=True adds model_state and key"
            args = (params, *batch, *extras)
            value = self.call("loss_fn", ("params", *names), args, note)
        expected = "(loss, aux)"
        if self.stateful:
            expected = "(loss, model_state)"
            if self.has_aux:
                expected = "(loss, (model_state, aux))"
        rest = ()
        if self.stateful or self.has_aux:
            value, rest = _two(value, expected)
        shapes = [jnp.shape(x) for x in jax.tree.leaves(value)]
        if shapes != [()]:
            raise ValueError(
                f"loss_fn returns a loss of shapes {shapes}; expected one number, the "
                "mean over examples; use has_aux=True for more"
            )
        aux = rest
        if self.stateful:
            model_state, aux = _two(rest, expected) if self.has_aux else (rest, ())
        advice = "expected numbers, which are averaged; the model state may hold keys"
        aux = _user_call("loss_fn's aux", advice, jax.tree.map, _floats, aux)
        return value, (model_state, aux)

    def num_parts(self, batch: PyTree, model_state: PyTree) -> int:
        """Return the number of micro-batches in a device's batch [B, ...].

        The size "auto" is for a CPU's cache, and divides only leaves of one length.
        """
        lengths = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
        if (0,) in lengths:
            raise ValueError("the batch is empty; expected one or more examples")
        size: Any = self.microbatch
        if size == "auto":
            on_cpu = (self.platform or jax.default_backend()) == "cpu"
            if not on_cpu or len(lengths) != 1 or jax.tree.leaves(model_state):
                return 1
        if size is None:
            return 1
        _check_axes("batch", batch)
        rows = len(jax.tree.leaves(batch)[0])
        if size == "auto":
            size = max((n for n in range(16, 33) if rows % n == 0), default=rows)
        if rows <= size:
            return 1
        if rows % size:
            raise ValueError(
                f"a device's batch of {rows} does not divide into micro-batches of "
                f"{size}; use a divisor of {rows}"
            )
        if jax.tree.leaves(model_state):
            raise ValueError(
                f"microbatch={size} would compute the model state from parts of "
                f"{rows}; use microbatch=None"
            )
        return rows // size

    def gradients(self, state, key, batch, part, extras):
        """Return gradients, loss, aux and model state: means over micro-batches."""
        params = state.params
        model_state = state.model_state
        count = self.num_parts(batch, model_state)
        loss_and_grads = jax.value_and_grad(self.loss, has_aux=True)

        def add(total, numbered_rows):
            # Each part of the batch, on any replica, draws its own numbers.
            i, rows = numbered_rows
            number = part * count + i
            rows_key = jax.random.fold_in(key, number) if self.stateful else None
            rows = _over_shards(rows, self.shards)
            args = _hidden((params, model_state, rows_key, rows, extras))
            result, grads = _hidden(loss_and_grads(*args))
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            return total, result

        rows = jax.tree.map(lambda x: x[None], batch)
        rows = split(batch, count) if count > 1 else rows
        parts = jnp.arange(count, dtype=jnp.int32), rows
        total, (loss, (model_state, aux)) = _scan(add, _zeros(params), parts)
        loss, aux = jax.tree.map(lambda x: x.mean(0, _wide(x.dtype)), (loss, aux))
        model_state = jax.tree.map(lambda x: x[0], model_state)  # of one part
        grads = jax.tree.map(lambda g: g / count, total)
        _check_form("the model state of loss_fn", model_state, state.model_state)
        return grads, loss, aux, model_state

    def optimize(self, old, ok, loss, grads, model_state, hyper):
        """Return params, opt_state and model_state after a step, or `old`."""
        optimizer = self.optimizer_of(hyper)
        update = optimizer.update
        if _takes_value(update):
            update = functools.partial(update, value=loss)
        advice = (
            "it is given gradients, its own state, parameters and value=loss; "
            "docs/coming-from.md#l-bfgs shows how to give it more"
        )

        def take_step(old, grads, model_state):
            params, opt_state, _ = old
            updates, new_state = _user_call(
                "the optimizer's update", advice, update, grads, opt_state, params
            )
            _check_form("the optimizer's new state", new_state, opt_state)
            new_params = _user_call(
                "the optimizer's updates",
                "expected a tree like the parameters",
                apply_updates,
                params,
                updates,
            )
            _check_form("the updated parameters", new_params, params)
            return new_params, new_state, model_state

        return _by_itself(ok, take_step, old, grads, model_state)

    def step(self, state, batch, hyper=None, frozen=None, part=0):
        """Take a step: (state, metrics).  A replica's part of the batch has a number.

        This is the training step, written once.
        """
        _check_params(state.params, jnp.inexact)
        if self.stateful and state.key is None:
            raise ValueError("stateful=True needs a key: train_state(..., key=key)")
        key, used = jax.random.split(state.key) if self.stateful else (state.key, None)
        extras = _present(hyper, frozen)
        grads, loss, aux, model_state = _average(
            self.gradients(state, used, batch, part, extras)
        )
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        ok = None
        if self.skip_nonfinite:  # replicas have equal averages, and skip together
            finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((loss, grads))]
            ok = jnp.stack(finite).all()
            loss = jnp.where(ok, loss, jnp.nan)
        params, opt_state, model_state = self.optimize(
            state[:3], ok, loss, grads, model_state, _hidden(hyper)
        )
        state = TrainState(params, opt_state, model_state, key)
        return state, (loss, aux) if self.has_aux else loss

    def first(self, _, number, key, hyper=None, frozen=None):
        """Return the first state of the member with this number."""
        init_key, key = jax.random.split(jax.random.fold_in(key, number))
        args = _hidden((init_key, *_present(hyper, frozen)))
        model = self.call("init_fn", ("key",), args)
        _check_model(model, self.stateful)
        model = _hidden(model)
        params, model_state = model if self.stateful else (model, ())
        optimizer = self.optimizer_of(_hidden(hyper))
        return train_state(params, optimizer, model_state=model_state, key=key)

    def steps(self, state, order, data, num_steps, hyper=None, frozen=None, part=0):
        """Take steps, each on the rows of data that a row of order names."""

        def train_on(state, rows):
            batch = jax.tree.map(lambda x: x[rows], data)
            return self.step(state, batch, hyper, frozen, part)

        return _scan_first(train_on, state, order, num_steps, self.platform)

    def outputs(self, model, chunks, count, hyper=None, frozen=None, part=0):
        """Return what the member predicts for the first `count` chunks."""

        def turn(carry, inputs):
            inputs = _over_shards(inputs, self.shards)
            return carry, self.outputs_of(model, inputs, hyper, frozen)

        if len(jax.tree.leaves(chunks)[0]) == 1:  # a loop takes few rows longer
            _, outputs = _scan(turn, (), chunks)
        else:
            _, outputs = _scan_first(turn, (), chunks, count, self.platform)
        return outputs

    def outputs_of(self, model, inputs, hyper, frozen):
        """Return what the member predicts for a chunk."""
        note = (
            f" for inputs {_described(inputs)}, filled up to a chunk; one example x is "
            "given as x[None]"
        )
        names = ("params", "model_state")[: len(model)]
        args = _hidden((*model, inputs, *_present(hyper, frozen)))
        outputs = self.call("apply_fn", (*names, "inputs"), args, note)
        if self.output is jax.nn.softmax:
            logits = isinstance(outputs, Array) and outputs.ndim > 1
            if not (logits and outputs.shape[-1] > 1):
                raise ValueError(
                    f"apply_fn returns {_described(outputs)}{note}; the softmax takes "
                    "logits [B, ..., C]; for others, output=None or a function of them"
                )
            outputs = outputs.astype(_wide(outputs.dtype))
        outputs = outputs if self.output is None else self.output(outputs)
        chunk = len(jax.tree.leaves(inputs)[0])
        expected = f"{chunk}, an entry per example of the chunk, in every leaf"
        _check_axes("outputs", outputs, chunk, expected=expected)
        return _hidden(outputs)


# ---------------------------------------------------------------------------------
# Calls: how a program is called, and the one door for states
# ---------------------------------------------------------------------------------


_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def _apart(f: Callable, *args) -> Any:
    """Return f(*args), apart from a mesh of `jax.set_mesh`: programs have their own."""
    with jax.set_mesh(_NO_MESH):
        return f(*args)


def _run(program: Callable, alone: bool, *args) -> Any:
    """Call a mapped program; `alone`, wait for its arguments before and results after.

    XLA:CPU serves all virtual devices with one pool of threads.  If programs whose
    devices wait for each other pile up in it, the last device may get no thread, and
    the process aborts (fault `programs_that_wait_for_each_other`): a CPU has to run one
    of these programs at a time.
    """
    wait = jax.block_until_ready if alone else lambda x: x
    _forget_done()
    # Arguments are on the devices already, or on the host on purpose.
    with jax.transfer_guard_host_to_device("allow"):
        return wait(_apart(program, *wait(args)))


def _gather_devices(x: Array | np.ndarray) -> np.ndarray:
    """Bring [D, ...] to the host from the devices of this and all other processes."""
    with jax.transfer_guard_device_to_host("allow"):  # faster than `jax.device_get`
        if jax.process_count() == 1:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def gather_processes(x: Any) -> np.ndarray:
    """Stack the arguments of all processes: [P, ...], the same in each of them.

    Every process has to call it, with the same shape and a dtype that JAX has.
    """
    return _gather_devices(np.array(x)[None])


def _check_alike(**values: Any) -> None:
    """Raise ValueError unless all processes have the same values, of any kind.

    Processes that differ would wait for each other, or mix their members; so may two
    steps of a Slurm job, for which JAX takes one port.
    """
    values["SLURM_STEP_ID"] = os.environ.get("SLURM_STEP_ID")
    ours = [zlib.crc32(repr(value).encode()) for value in values.values()]
    digests = gather_processes(np.array(ours, np.uint32))  # [P, n]
    for process, same in enumerate(digests == digests[0]):
        if not same.all():
            names = ", ".join(itertools.compress(values, ~same))
            raise ValueError(
                f"process {process} differs from process 0 in {names}; start all "
                "processes together, with the same arguments"
            )


def _is_consumed(state: PyTree) -> bool:
    return any(
        [isinstance(x, Array) and x.is_deleted() for x in jax.tree.leaves(state)]
    )


class _Guard:
    """A context in which SIGINT waits while a state is consumed.

    1. In the context, the guard stands in front of the user's handler of SIGINT.
    2. Until the state's buffers are taken, nothing can be lost, and compiling may take
       long: an interrupt goes on to the user's handler at once.
    3. From then on interrupts wait until the context ends, when the result has a name.
    4. Then the handler that the user has set last is set again, and the waiting
       interrupts go on to it, also if the program failed.

    Handlers are called, since a signal that is raised again would count twice where
    `signal.set_wakeup_fd` counts signals, as in asyncio.
    """

    def __init__(self, state: PyTree):
        self.state = state
        self.users: Any = signal.getsignal(signal.SIGINT)  # the user's handler
        self.waiting: list[tuple] = []  # arguments of handlers
        # Only the main thread is interrupted, and only there can handlers be set.
        here = threading.main_thread() is threading.current_thread()
        self.guarded = here and callable(self.users)

    def __enter__(self) -> None:
        if self.guarded:
            signal.signal(signal.SIGINT, self)

    def __call__(self, *interrupt: Any) -> None:
        if _is_consumed(self.state):
            self.waiting.append(interrupt)
        else:
            self.users(*interrupt)
            last = signal.signal(signal.SIGINT, self)
            if last is not self:  # the handler has set another
                self.users = last

    def __exit__(self, *error: Any) -> None:
        if self.guarded:
            last = signal.signal(signal.SIGINT, self.users)
            if last is not self:  # the user's, set during the call
                signal.signal(signal.SIGINT, last)
        for interrupt in self.waiting:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                handler(*interrupt)
            else:  # a default, which the user has set during the call
                signal.raise_signal(signal.SIGINT)


def _run_consuming(owner: Any, program: Callable, state: PyTree, *rest) -> tuple:
    """Call program(state, *rest) -> (state, metrics), which reuses state's buffers.

    The new state is the owner's `latest` before an interrupt goes on: see `_Guard`.
    """
    with _Guard(state):
        result = program(state, *rest)
        object.__setattr__(owner, "latest", result[0])  # a trainer is frozen
    return result


def _key_data(keys: Any) -> Array:
    advice = "expected random keys, such as jax.random.split(key, K)"
    data = _user_call("the state's key", advice, jax.random.key_data, keys)
    _check_outside(data)  # inside `jax.jit`, it is traced even if the state is not
    return data


def _check_keys(key_data: Any, members: Sequence[int] | np.ndarray) -> None:
    """Raise ValueError unless keys [n] are equal exactly where members [n] are."""
    rows = [row.tobytes() for row in jax.device_get(key_data)]
    first: dict = {}  # a member's or a key's first index
    for i, (member, row) in enumerate(zip(members, rows)):
        j = first.setdefault(member, i)
        if rows[j] != row:
            raise ValueError(
                f"replicas {j} and {i} have different keys; they would drift apart: "
                "make them by replicate(train_state(...))"
            )
        j = first.setdefault(row, i)
        if members[j] != member:
            raise ValueError(
                f"members {j} and {i} have equal keys, so they would draw the same "
                f"numbers; use jax.random.split(key, {len(rows)})"
            )


def _check_state(state: Any) -> None:
    """Raise ValueError unless it is a state, and is given outside of `jax.jit`."""
    _check_outside(state)
    # Fields are compared, since a reloaded module has another class.
    if getattr(state, "_fields", ()) != TrainState._fields:
        raise ValueError(
            f"the state is {type(state).__name__}; expected a TrainState, as returned "
            "by init, or by load with like"
        )


def _check_apart(state: PyTree) -> None:
    """Raise ValueError where two leaves of a state on devices share a buffer."""
    first: dict[int, str] = {}
    for name, x in _named(state):
        buffer = id(x)
        if x.size and not _is_key(x):
            buffer = x.addressable_data(0).unsafe_buffer_pointer()
        other = first.setdefault(buffer, name)
        if other is not name:
            raise ValueError(
                f"leaves '{other}' and '{name}' of the state share one buffer, which "
                "cannot be reused for both; copy one with jax.numpy.copy"
            )


class _Seen(NamedTuple):
    """The mark of a state that was let in, which keeps none of its arrays alive."""

    references: list  # to its leaves, weak ones
    structure: Any  # of its tree


def _let_in(owner: Any, state: Any, fit: Callable, trains=True) -> Any:
    """Let a state in: the one door for states, of updates and of trainers.

    The owner's latest needs few checks, and so does the state that was let in last
    without being trained, `owner._seen`.  For any other, fit(state) raises ValueError
    if it does not fit, and returns it on its devices.  Where a state is to be trained,
    no two leaves may share a buffer.
    """
    leaves, structure = jax.tree.flatten(state)

    def holds(others, its_structure):
        return structure == its_structure and all(map(operator.is_, leaves, others))

    known = state is owner.latest or holds(*jax.tree.flatten(owner.latest))
    if not (known or trains) and owner._seen:
        alive = [reference() for reference in owner._seen.references]
        known = holds(alive, owner._seen.structure)
    if state is None or not known:
        _check_state(state)
    if _is_consumed(leaves):
        raise ValueError(
            "the state was consumed by an earlier call; go on with the one that it "
            "returned, trainer.latest; if it failed, a saved one"
        )
    if known:
        return state
    fitting = fit(state)
    if trains:
        _check_apart(fitting)
    elif fitting is state:  # its arrays are in their places, where nothing changes them
        seen = _Seen(list(map(weakref.ref, leaves)), structure)
        object.__setattr__(owner, "_seen", seen)
    return fitting


# ---------------------------------------------------------------------------------
# Updates: the step of a member, and two ways to place its copies
# ---------------------------------------------------------------------------------


def _make_update(axis: str, member: _Member) -> Callable:
    """Map a member's step over the devices, with this name of their axis."""
    member.optimizer_of()  # raises if it is none
    alike = "the number of devices in all of them: replicate or split them"
    meet = axis == "replicas"

    def on_device(state, *batch):
        return member.step(state, batch, part=lax.axis_index(axis) if meet else 0)

    def make(options):
        # `jax.pmap` takes no options, so `jax.jit` does.  Of several processes, inside
        # of `jax.jit` each would map over its own devices alone.
        whole = jax.process_count() == 1
        fast = _fast_cpu.fast(on_device, options if whole else None)
        pmapped = jax.pmap(fast, axis_name=axis, donate_argnums=0)
        if whole:
            return jax.jit(pmapped, donate_argnums=0, compiler_options=options)
        return pmapped

    mapped = _fast_cpu.Program(make, None)

    def fit(state):
        _check_axes("state", state, expected=alike)
        if state.key is not None:
            keys = _gather_devices(_key_data(state.key))
            _check_keys(keys, np.zeros(len(keys)) if meet else range(len(keys)))
        sharding = _device_sharding(np.shape(jax.tree.leaves(state)[0])[0], axis)
        put = functools.partial(_device_put, where=sharding)
        return jax.tree.map(put, _private("state", state))

    def update(state, *batch):
        """Take a step: (state, metrics).  `state` is consumed."""
        state = _let_in(update, state, fit)
        _check_axes("state and the batch", (state, batch), expected=alike)
        alone = meet and jax.default_backend() == "cpu"
        program = functools.partial(_run, mapped, alone)
        batch = _private("batch", batch)
        state, metrics = _run_consuming(update, program, state, *batch)
        # Metrics wait for copies of the batch.
        return state, jax.tree.map(_in_flight, metrics)

    object.__setattr__(update, "latest", None)
    return update


def make_sync_update(
    loss_fn: LossFn,
    optimizer: OptimizerLike,
    *,
    has_aux: bool = False,
    stateful: bool = False,
    microbatch: int | str | None = None,
    skip_nonfinite: bool = False,
) -> Callable:
    """Make update(state, *batch) -> (state, metrics) for one model on D devices.

    Every leaf has a leading device axis: `state` from `replicate`, and each leaf of the
    batch [D, B / D, ...] from `split`.  Gradients, loss and aux are averaged over the
    replicas.  So a step equals one on the whole batch, to rounding, and the replicas
    stay bit-identical.  `metrics` is the loss [D], or (loss, aux), in D equal copies.
    All means and sums are taken in float32 at least, and so are loss and aux returned.

    Args:
      loss_fn: loss_fn(params, *batch) returns the mean loss of its part of the batch, a
        scalar.
      optimizer: `sgd`, `adam`, one of Optax's, or your `Optimizer`.
      has_aux: whether loss_fn returns (loss, aux).  Aux is a tree of means over the
        batch too: integers and booleans become floats, and values per example would be
        averaged over different examples.
      stateful: whether loss_fn(params, model_state, key, *batch) returns (loss,
        model_state), or (loss, (model_state, aux)).  Floating-point leaves of the model
        state are averaged over the replicas.  Other leaves, such as counts of steps,
        are not averaged, and must not depend on the batch, of which each replica sees a
        part.  Every part of the batch and every step has its own key, so a loss that
        draws (dropout) takes another step if the batch is divided otherwise: on other
        D, unless `microbatch` is set.
      microbatch: how many examples a device works on at a time; None is all.  The
        device averages loss, aux and gradients over its micro-batches, which takes less
        memory, and less time on a CPU, where the work stays in cache.  For a loss that
        is a mean over its examples the step is the same, to rounding.  For others, such
        as a sum, a contrast between examples or a mean over some of them, it is another
        step.  "auto" takes, on a CPU and without a model state, the largest size from
        16 to 32 that divides a device's batch.  With `stateful`, every micro-batch has
        its own key, whichever device it is on: draws do not depend on D if one size
        divides B / D for every D.
      skip_nonfinite: whether a step whose loss or averaged gradient is not finite
        changes only the key, in all replicas alike, and returns a loss of nan.

    Where JAX runs in several processes (`jax.distributed`), each calls `update` with
    the shards of its own devices, D of them; averages are taken over all processes.

    `state` is consumed: its buffers are reused for the result, which is also
    `update.latest`, so that Ctrl-C does not lose it.  NumPy's batches are copied.

    Raises ValueError if `optimizer` is not an optimizer.  Before it consumes anything,
    `update` raises ValueError for leading axes that differ, an empty batch, a state
    that was consumed or has one buffer in two leaves, replicas with unequal keys,
    micro-batches that do not divide the batch or meet a model state, a model state
    returned in another form, and a loss_fn or optimizer that takes other arguments than
    it is given.
    """
    member = _Member(loss_fn, optimizer, has_aux, stateful, microbatch, skip_nonfinite)
    return _make_update("replicas", member)


def make_ensemble_update(
    loss_fn: LossFn,
    optimizer: OptimizerLike,
    *,
    has_aux: bool = False,
    stateful: bool = False,
    microbatch: int | str | None = None,
    skip_nonfinite: bool = False,
) -> Callable:
    """Make update(state, *batch) -> (state, metrics) for D members, one per device.

    Nothing crosses devices.  Each leaf of `state` [D, ...] holds D independent models,
    and each leaf of the batch [D, B, ...] a batch for each of them; `replicate` a batch
    to show the same one to all.  `metrics` [D] are the members' own.  A nan in one
    member leaves the bits of the others as they are.

    Args:
      loss_fn, optimizer, has_aux, stateful, microbatch: as in `make_sync_update`.
      skip_nonfinite: whether a member skips a step whose loss or gradient is not
        finite; each member skips on its own.

    `state` is consumed: its buffers are reused for the result.

    Raises ValueError as `make_sync_update` does; its `update` refuses members with
    equal keys instead of replicas with unequal ones.
    """
    member = _Member(loss_fn, optimizer, has_aux, stateful, microbatch, skip_nonfinite)
    return _make_update("members", member)


# ---------------------------------------------------------------------------------
# Places: where the arrays of all members are
# ---------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The places of members and replicas: see `layout`."""

    members: int  # K
    devices: int  # D, in use; with S shards, D groups of S devices
    members_per_device: int  # M, above 1 only where R = 1
    replicas: int  # R, above 1 only where M = 1


def layout(members: int, num_devices: int, num_processes: int = 1) -> Layout:
    """Lay K members over devices: members share a device, or devices share a member.

    If K >= num_devices, M = ceil(K / num_devices) members share a device, and only as
    many devices are used as K members need.  Otherwise R = floor(num_devices / K)
    devices hold replicas of one member.  One member on all devices is sync mode.

    A program of several processes needs all of their devices.  Then R is the largest
    divisor of num_devices that is at most num_devices / K, and devices that are left
    over repeat the last member.

    Raises ValueError unless all are ints >= 1.
    """
    members = _count("members", members)
    num_devices = _count("devices", num_devices)
    shared = -(-members // num_devices)
    replicas = max(num_devices // members, 1)
    if _count("num_processes", num_processes) > 1:
        fitting = (r for r in range(1, replicas + 1) if num_devices % r == 0)
        return Layout(members, num_devices, shared, max(fitting))
    return Layout(members, -(-members // shared) * replicas, shared, replicas)


@functools.partial(jax.jit, static_argnums=1)
def _joined(copies: list, lengths: tuple) -> Array:
    """Join copies [M, ...], and cut the first axes."""
    return jnp.concatenate(copies)[tuple(map(slice, lengths))]


_WHOLE = 1024  # a leaf of fewer numbers is not divided over shards


@dataclasses.dataclass(frozen=True, eq=False)
class _Places:
    """Where a trainer's arrays are: by slot, or everywhere.

    A slot is a place for one member on one device.  There are D * M slots, device after
    device.  Replicas of a member have neighboring slots; slots that are left over, on
    the last devices, repeat the last member.  Arrays by slot are [D * M, ...]; of an
    array that is everywhere, each device has a copy.  Where there are several
    processes, each has the parts of both that are on its own devices.

    With S shards, S neighboring devices take the place of one.  They divide the leaves
    of states and of the frozen tree among them, and hold copies of other arrays.

        to_slots    members [K, ...]       -> by slot, each in the slots of its replicas
        from_slots  arrays by slot         -> members [K, ...], their first replicas
        deal        a batch                -> its parts by slot, or whole everywhere
        put         a tree                 -> on the devices, with a given sharding
    """

    layout: Layout
    devices: Sequence  # D * S, of all processes, there or in a topology's description
    shards: int  # S

    @functools.cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """The member and the replica in each slot [D * M]."""
        members, devices, shared, replicas = self.layout
        slot = np.arange(devices * shared)
        return np.minimum(slot // replicas, members - 1), slot % replicas

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @functools.cached_property
    def absent(self) -> bool:
        """Whether the devices are a description, for which one can only compile."""
        with contextlib.suppress(RuntimeError):  # for a platform that is not there
            return self.devices[0] not in jax.devices(self.platform)
        return True

    def shardings(self, train: bool) -> tuple:
        """Return the shardings of a program's arrays: by slot, and everywhere.

        Only programs that train have an axis of replicas: see `_average`.
        """
        axes = {"replicas": self.layout.replicas if train else 1, "shards": self.shards}
        axes = {"members": -1} | {name: n for name, n in axes.items() if n > 1}
        devices = np.reshape(self.devices, list(axes.values()))
        mesh = jax.sharding.Mesh(devices, list(axes))
        by_slot = tuple(name for name in axes if name != "shards")
        return _sharding(mesh, by_slot), _sharding(mesh)

    @functools.cached_property
    def by_slot(self) -> Any:
        """The sharding of arrays by slot, whose axis is named as in training."""
        return self.shardings(train=True)[0]

    @functools.cached_property
    def everywhere(self) -> Any:
        return self.shardings(train=True)[1]

    def divide(self, x: Any, sharding: Any) -> Any:
        """Return the sharding of a leaf that the devices of a slot divide.

        It adds to `sharding` the longest axis, behind those of its spec, that S
        divides.  Small leaves, and leaves without such an axis, are whole on each.
        """
        spec = sharding.spec
        shape = np.shape(x)
        axes = [i for i in range(len(spec), len(shape)) if shape[i] % self.shards == 0]
        if self.shards == 1 or not axes or math.prod(shape[len(spec) :]) < _WHOLE:
            return sharding
        between = max(axes, key=lambda i: shape[i]) - len(spec)
        return _sharding(sharding.mesh, *spec, *[None] * between, "shards")

    def put(
        self, tree: PyTree, sharding: Any, divide: bool = False, given: bool = False
    ) -> PyTree:
        """Put a tree, the same in every process, on the devices.

        With `divide`, the devices of a slot divide its leaves.  For absent devices, and
        for a form, return the form there.  No other function moves a trainer's arrays
        to devices.  But arguments `given` to a program that are NumPy's stay where they
        are in a single process without shards: the program puts them itself, which
        takes less time.  It may share their memory, so they are copies of a user's.
        """
        stay = given and jax.process_count() == 1 and self.shards == 1

        def put(x):
            if stay and not isinstance(x, Array):
                return x
            where = self.divide(x, sharding) if divide else sharding
            if isinstance(x, Array) and x.committed and x.sharding == where:
                return x  # it is there already
            if self.absent or isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            if isinstance(x, Array) and jax.process_count() == 1:
                return _device_put(x, where)
            return _on_data(functools.partial(put_part, where), x)

        def put_part(where, x):  # of an array that is not there yet
            if isinstance(x, Array) and not x.is_fully_addressable:
                return jax.device_put(x, where)
            return _from_host(np.asarray(x), where)

        return jax.tree.map(put, tree)

    def to_slots(self, what: str, tree: PyTree) -> PyTree:
        """Lay members [K, ...] into their slots, [D * M, ...]."""
        member, _ = self.slots

        def lay(x):  # one leaf at a time is on the host
            slots = _on_data(lambda x: np.asarray(_numbers(what, x))[member], x)
            return jax.block_until_ready(self.put(slots, self.by_slot, divide=True))

        return jax.tree.map(lay, tree)

    def deal(self, name: str, batch: PyTree, axis: int, each: bool = False) -> tuple:
        """Give each slot its part of a batch, and the part's number: of_slot, of_all.

        They are dicts, as `_over_members` takes them.  The B examples of each leaf are
        on the given axis; with `each`, each member has its batch, on the first axis:

            each    R         a leaf, with its axis at 0     becomes
            no      1         [B, ...]                       the same, in of_all
            no      above 1   [B, ...]                       [D, B / P, ...] by slot
            yes     1         [K, B, ...]                    [D * M, B, ...] by slot
            yes     above 1   [K, B, ...]                    [D, B / P, ...] by slot

        There are P = gcd(B, R) parts.  If P < R, R / P replicas have the same part, and
        the mean over replicas is still the mean over the batch; this warns of it.
        """
        member, replica = self.slots
        replicas = self.layout.replicas
        if replicas == 1 and not each:
            return {}, {name: batch}
        size = jax.tree.leaves(batch)[0].shape[axis]
        parts = math.gcd(size, replicas)
        if parts < replicas:
            whole = size - size % replicas or replicas
            _warn(
                f"a batch of {size} is divided into {parts} parts, not {replicas}, so "
                f"some replicas idle; multiples of {replicas}, such as {whole}, use "
                "them all"
            )
        part = np.int32(replica % parts)

        def cut(x):
            x = _split_axis(x, axis, parts)
            if each:
                return np.moveaxis(x, axis, 1)[member, part]  # [K, P, ..., B / P, ...]
            return np.moveaxis(x, axis, 0)[part]  # [P, ..., B / P, ...]

        if len(member) > self.layout.members:  # otherwise each slot has its member's
            batch = jax.tree.map(cut, batch)
        return {name: batch, "part": part}, {}

    def from_slots(self, tree: PyTree, *steps: int) -> PyTree:
        """Take each member's first replica out of the slots: [D * M, ...] to [K, ...].

        With `steps`, the second axis is cut to that length, on a CPU without a program
        for each.  The result is on the first device, or on the host where a slot is in
        another process.
        """
        lengths = (self.layout.members, *steps)
        cut = tuple(map(slice, lengths))
        replicas = self.layout.replicas

        def take(x):
            if isinstance(x, Array) and not x.is_fully_addressable:
                x = _gather_devices(x)
            if isinstance(x, np.ndarray):  # copied, since JAX's own is read-only
                return np.array(x[::replicas][cut])
            copies = [s.data for s in x.addressable_shards[:: replicas * self.shards]]
            if len(copies) == 1 and copies[0].shape[: len(lengths)] == lengths:
                return copies[0]  # at once, which short steps notice
            if steps and self.on_cpu:
                parts = np.concatenate(list(map(_gather_devices, copies)))
                return _from_host(parts[cut], copies[0].sharding)
            (device,) = copies[0].devices()  # given a sharding, it takes longer
            copies = jax.device_put(copies, device)
            return _in_flight(_apart(_joined, copies, lengths))

        return jax.tree.map(take, tree)

    def gather(self, name: str, x: Array) -> np.ndarray:
        """Bring members [K, ...] to the host; raise RuntimeError if replicas differ."""
        # Once NumPy has read it, an array on several devices keeps its host copy.
        # So a second array of the same buffers is read, and goes with its copy.
        shards = [shard.data for shard in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
        devices = self.devices[:: self.shards]
        copies = _gather_devices(x)  # [D * M, ...]
        for i, copy in enumerate(copies):
            first = i - i % self.layout.replicas
            if i > first and copy.tobytes() != copies[first].tobytes():
                text = (
                    f"replicas differ: {name} on device {devices[i]} is not as on "
                    f"{devices[first]}; go on from a checkpoint"
                )
                if name.startswith(".model_state") and copy.dtype.kind in "biu":
                    text += ", or, if it depends on the batch, make it a float"
                raise RuntimeError(text)
        return self.from_slots(copies)


def _lay_out(members: int, devices: Any, shards: int) -> _Places:
    """Lay members over devices: at most so many, or these, or all."""
    processes = jax.process_count()
    if devices is None:
        devices = jax.devices()
    elif np.ndim(devices) == 0:
        lack = _lack(_count("devices", devices) // processes)
        if lack:
            raise ValueError(lack)
        devices = jax.devices()[:devices]
    elif len({x.platform for x in devices}) != 1 or len(set(devices)) < len(devices):
        raise ValueError(
            f"devices are {list(devices)}; expected one or more, each once, of one "
            "platform"
        )
    counts = collections.Counter(x.process_index for x in jax.devices())
    alike = len(set(counts.values())) == 1
    if processes > 1 and not (alike and list(devices) == jax.devices()):
        raise ValueError(
            f"devices is {len(devices)}; {processes} processes use all of their "
            f"{jax.device_count()}, and each has as many"
        )
    if len(devices) % _count("shards", shards):
        raise ValueError(
            f"{shards=} does not divide {len(devices)} devices; use a divisor, such as "
            f"{math.gcd(shards, len(devices))}"
        )
    used = layout(members, len(devices) // shards, processes)
    return _Places(used, devices[: used.devices * shards], shards)


# ---------------------------------------------------------------------------------
# Programs: a member's functions, mapped over all members
# ---------------------------------------------------------------------------------


def _is_rbg(key: Any) -> bool:
    """Return whether draws from a key, or a key's form, change under `vmap`."""
    kind = _kind(key) if _is_key(key) else jax.config.values["jax_default_prng_impl"]
    return key is not None and "rbg" in kind


def _check_draws(key: Any, at_once: int | None) -> None:
    """Raise ValueError for keys whose draws change if members are together."""
    if at_once and at_once > 1 and _is_rbg(key):
        raise ValueError(
            f"at_once={at_once} with keys of {jax.random.key_impl(key)}, whose draws "
            "change under vmap; use threefry2x32, or at_once=1"
        )


def _over_devices(f: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Map f over the devices of a mesh, over whose shards XLA divides it."""
    return jax.shard_map(
        f,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - {"shards"},
        check_vma=False,
    )


def _fits(program: Any, args: tuple, by_slot: Any) -> bool:
    """Return whether a program leaves a fifth of the memory that its devices have free.

    Convolutions take some beside it, of which it does not tell.  The call that follows
    does not compile it again.  `by_slot` is the sharding of states.
    """
    memory = _apart(program.lower, *args).compile().memory_analysis()
    if memory is None:  # the backend does not tell
        return True
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes
    needed -= memory.alias_size_in_bytes
    stats = [device.memory_stats() for device in by_slot.addressable_devices]
    free = [x["bytes_limit"] - x["bytes_in_use"] for x in stats if x]
    fits = needed <= 0.8 * min(free, default=math.inf)
    return bool(gather_processes(fits).all())


def _over_slots(f, states, of_slot, places, train, at_once) -> tuple:
    """Map f(state, of_slot) over M slots, whose leaves are [M, ...]: (states, results).

    Each step cuts out up to `at_once` slots, for which f returns (state, results).
    With `train`, the new states are written in the place of the old.  This takes the
    memory of M states and the work of one f, while `lax.map` writes M new states beside
    the old.
    """
    slots = places.layout.members_per_device
    together = min(at_once, slots)
    whole = slots - slots % together
    flat = places.platform in _GPU and together < slots and places.shards == 1

    def advance(now, start, count=together):  # of the states, which may be flat
        # A vmap of one member may have other bits than the member.
        single = count == 1

        def cut(x, like):
            x = lax.dynamic_slice_in_dim(x, start, count)
            return x.reshape(like.shape[1:] if single else (count, *like.shape[1:]))

        def put(x, new):
            new = new.reshape(count, *x.shape[1:])
            return lax.dynamic_update_slice_in_dim(x, new, start, 0)

        state = jax.tree.map(cut, now, states)
        own = jax.tree.map(cut, of_slot, of_slot)
        new, results = f(state, own) if single else jax.vmap(f)(state, own)
        if single:
            results = jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)
        if train:
            now = jax.tree.map(put, now, new)
        return now, results

    now = jax.tree.map(lambda x: x.reshape(slots, -1), states) if flat else states
    now, results = _scan(advance, now, jnp.arange(0, whole, together))
    results = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), results)
    if whole < slots:
        now, last = advance(now, whole, slots - whole)
        results = jax.tree.map(lambda *x: jnp.concatenate(x), results, last)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), now, states), results


_LEVEL = "xla_backend_optimization_level"


def _compiling_fast(options: dict | None) -> dict | None:
    """Return options with which XLA compiles fast, unless the user has chosen."""
    chosen = jax.config.values["jax_disable_most_optimizations"]
    if chosen or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return options
    return {_LEVEL: 1, **(options or {})}


# The way of a call, from `Trainer.update` to the loss, with the axes of a leaf of the
# state at each step:
#
#     Trainer.update      [D * M, ...]   checks the arguments, and says the work
#     _Programs.run       [D * M, ...]   finds or makes the program, and calls it
#     _over_members       [D * M, ...]   the program: `jit` of all that follows
#     _over_devices       [M, ...]       of a device, by `shard_map`
#     _over_slots         [n, ...]       n = at_once of these in turn, by a loop
#     fast, jax.vmap      [...]          one member of those n
#     _Member.step        [...]          its step, as in the two pmapped updates
#     _Member.gradients   [...]          on a part of its batch in turn, by a loop
#     _Member.loss        [...]          the user's loss_fn, in one form


def _over_members(f, places, at_once, train, once) -> Callable:
    """Map f(state, **of_slot, **of_all), of one member on one device, over all slots.

    The result is a program of state, of_slot and of_all; the last two are dicts of f's
    arguments.  Leaves of state and of_slot are by slot, and so are the leaves that f
    returns; of_all is everywhere.  With `train`, f returns (state, results), the
    state's buffers are reused, and replicas wait for each other.  On a CPU, a program
    that runs `once` compiles fast.

    This maps as `jax.pmap` does, but the program is freed with the function returned,
    which JAX keeps for good (fault `programs_of_pmap_are_kept`).
    """
    by_slot, everywhere = places.shardings(train)
    inputs = by_slot, by_slot, everywhere
    in_specs = tuple(x.spec for x in inputs)
    shardings: dict = {"in_shardings": inputs, "out_shardings": by_slot}
    if places.shards > 1:  # XLA divides a slot's work as its arrays are
        shardings = {}

    def divided(mapped, *args):
        returned = mapped(*args)
        tree = returned[0] if train else returned  # the state, if there is one
        where = jax.tree.map(lambda x: places.divide(x, by_slot), tree)
        where = (where, by_slot) if train else where
        return lax.with_sharding_constraint(returned, where)

    def make(options):
        if once and places.on_cpu:
            options = _compiling_fast(options)
        fast = _fast_cpu.fast(f, options)  # on CPUs, whatever f takes gradients of

        def on_device(state, of_slot, of_all):
            def on_slot(state, of_slot):
                returned = fast(state, **of_slot, **of_all)
                return returned if train else ((), returned)

            states, results = _over_slots(
                on_slot, state, of_slot, places, train, at_once
            )
            return (states, results) if train else results

        program = _over_devices(on_device, by_slot.mesh, in_specs, by_slot.spec)
        if places.shards > 1:
            program = functools.partial(divided, program)
        donated = (0,) if train else ()
        return jax.jit(
            program, donate_argnums=donated, compiler_options=options, **shardings
        )

    return _fast_cpu.Program(make, places.platform)


class _Work(NamedTuple):
    """A call to be made: a function of one member, for all members.

    It is called as f(state, **of_slot, **of_all), with the member's hyper and the
    frozen tree beside these.  If it trains, it returns (state, results).
    """

    f: Callable  # a method of `_Member`
    state: PyTree  # by slot
    of_slot: dict  # more arguments, by slot
    of_all: dict  # and everywhere
    trains: bool = False  # then the state's buffers are reused, and replicas meet
    once: bool = False  # then members take turns on any device, and it compiles fast
    num_rows: int = 0  # of a block of predictions


# Orders of up to so many steps share a program, which holds the aux of all of them:
# fewer steps, where these would take more bytes.
_STEPS, _AUX_BYTES = 256, 2**26


@dataclasses.dataclass(eq=False)
class _Programs:
    """A member's functions, compiled for its places; it makes, keeps and runs them."""

    member: _Member
    places: _Places
    hyper: PyTree  # by slot, or None
    frozen: PyTree  # everywhere, or None
    at_once: int | None  # members of a device at once; None is as many as fit
    kept: dict = dataclasses.field(default_factory=dict)  # programs by (f, together)
    fitting: dict = dataclasses.field(default_factory=dict)  # by (f, its arguments)

    @property
    def most(self) -> int:
        """How many members of a device are together if they fit."""
        shared = self.places.layout.members_per_device
        return min(self.at_once or (1 if self.places.on_cpu else shared), shared)

    @property
    def together(self) -> int:
        """How many are together, as far as is known: of the program made last."""
        return next(reversed(self.fitting.values()), self.most)

    def _mapped(self, work: _Work, together: int) -> Callable:
        key = work.f, together
        if key not in self.kept:
            self.kept[key] = _over_members(
                work.f, self.places, together, train=work.trains, once=work.once
            )
        return self.kept[key]

    def _fitting(self, work: _Work, args: tuple) -> int:
        """Return how many of a device's members the program computes together.

        By default it is one on a CPU, in `init`, and for keys whose draws would change;
        elsewhere all, or as many as fit.
        """
        count = self.most
        if self.at_once or count == 1:
            return count
        if work.once or _is_rbg(getattr(work.state, "key", None)):
            return 1
        if self.places.absent:
            return count
        known = work.f, _form((work.of_slot, work.of_all))
        if known not in self.fitting:
            where = self.places.by_slot
            while count > 1 and not _fits(self._mapped(work, count), args, where):
                count = -(-count // 2)
            self.fitting[known] = count
        return self.fitting[known]

    def _program(self, work: _Work) -> tuple[Any, tuple]:
        """Return the program of some work, and its arguments."""
        of_slot = {"hyper": self.hyper} | work.of_slot
        of_all = {"frozen": self.frozen} | work.of_all
        args = work.state, of_slot, of_all
        return self._mapped(work, self._fitting(work, args)), args

    def run(self, owner: Any, work: _Work) -> Any:
        """Do the work.  If it trains, it consumes its state: see `_run_consuming`."""
        places = self.places
        if places.absent:
            raise ValueError("the devices are a topology's; use Trainer.lower")
        of_slot = places.put(work.of_slot, places.by_slot, given=True)
        of_all = places.put(work.of_all, places.everywhere, given=True)
        program, args = self._program(work._replace(of_slot=of_slot, of_all=of_all))
        meet = places.shards > 1 or (work.trains and places.layout.replicas > 1)
        call = functools.partial(_run, program, meet and places.on_cpu)
        try:
            return _run_consuming(owner, call, *args) if work.trains else call(*args)
        except jax.errors.JaxRuntimeError as error:
            if not self.at_once or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise RuntimeError(
                f"at_once={self.at_once}: {error}; use fewer, or None for as many as "
                "fit"
            ) from error

    @functools.cached_property
    def _loss(self) -> Any:  # which is traced once per form of its arguments
        mesh = self.places.by_slot.mesh
        all_alike = jax.sharding.PartitionSpec()
        return jax.jit(_over_devices(self.member.loss, mesh, all_alike, all_alike))

    def shared_steps(self, state: TrainState, data: tuple, size: int) -> int:
        """Return up to how many steps of `size` examples share a program of `epoch`.

        The program has the room for the aux of all of them.
        """
        if not self.member.has_aux:
            return _STEPS
        params, _, model_state, key = jax.tree.map(_like, state)  # of a member
        # The loss sees the rows of a micro-batch of a replica's part.
        part = size // math.gcd(size, self.places.layout.replicas)
        batch = jax.tree.map(lambda x: _like(_numbers("data", x), part), data)
        rows = part // self.member.num_parts(batch, model_state)
        batch = jax.tree.map(lambda x: _like(x, rows), batch)
        extras = _present(jax.tree.map(_like, self.hyper), self.frozen)
        _, (_, aux) = _apart(
            self._loss.eval_shape, params, model_state, key, batch, extras
        )
        num_bytes = sum(map(_num_bytes, jax.tree.leaves(aux)))
        return max(1, min(_STEPS, _AUX_BYTES // max(1, num_bytes)))

    def without_running(self, do: str, work: _Work) -> Any:
        """Lower or explain the program of some work, whose arguments may be forms."""
        # Keys have forms too.
        of_slot, of_all = jax.eval_shape(lambda *x: x, work.of_slot, work.of_all)
        program, args = self._program(work._replace(of_slot=of_slot, of_all=of_all))
        return _apart(getattr(program, do), *args)

    def result_form(self, work: _Work) -> PyTree:
        """Return the form of the result; nothing is computed."""
        program, args = self._program(work)
        return _apart(program.eval_shape, *args)


# ---------------------------------------------------------------------------------
# Predictions: inputs to blocks and back, and whether examples are independent
# ---------------------------------------------------------------------------------


def _near(x: np.ndarray, y: np.ndarray, like: np.ndarray) -> bool:
    """Return whether arrays are equal, or floats that differ by rounding alone.

    Rounding is relative to the largest number in the same column of `like`, [..., C].
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return np.array_equal(x, y)
    rounding = float(jnp.finfo(x.dtype).eps) ** 0.5
    x, y, like = (z.astype(_wide(z.dtype)) for z in (x, y, like))
    size = np.where(np.isfinite(like), np.abs(like), 0)
    size = size.max(axis=tuple(range(max(2, size.ndim - 1))), initial=0)
    return np.allclose(x, y, rtol=0, atol=rounding * size, equal_nan=True)


def _avals(part: Any) -> Iterator:
    """Yield the forms of all arrays that a part of a program makes, at any depth."""
    for eqn in getattr(part, "eqns", ()):
        yield from (v.aval for v in eqn.outvars)
        for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            yield from _avals(x)


class _Sizes(NamedTuple):
    """How examples are divided: a block is computed in one call of a program."""

    chunk: int  # examples that a device takes at a time
    chunks: int  # that each replica takes in a block, one after another


class _Block(NamedTuple):
    """A block of predictions that is being computed."""

    num_rows: int  # n
    outputs: PyTree  # leaves [D * M, chunks, chunk, ...]


# A chunk has from so many examples to so many, on a CPU and elsewhere.
_CHUNKS = {True: (8, 256), False: (32, 4096)}
# A block has at most _BLOCK_CHUNKS chunks, whose inputs and outputs take about
# _BLOCK_BYTES on a CPU, where the largest array of a chunk takes no more.  Elsewhere,
# inputs and outputs of a chunk may take so many, and a block four times.
_BLOCK_CHUNKS, _BLOCK_BYTES = 128, 2**22


_TRIES = 8  # of the independence of examples, where their outputs are equal


def _of_probabilities(softmaxes: np.ndarray) -> bool:
    """Return whether logits of softmaxes [K, n, ..., C] look like probabilities.

    A softmax tells its logits but for a constant, which is chosen so that they sum to
    1.  They are taken for probabilities if none is below 0, and half of the rows have
    one above 0.8; two classes, or few rows, may be so by chance.
    """
    num_classes = softmaxes.shape[-1]
    logs = np.log(np.maximum(softmaxes, 1e-30))
    logits = logs + (1 - logs.sum(axis=-1, keepdims=True)) / num_classes
    largest = logits.max(axis=-1)
    enough = num_classes > 2 and largest.size >= 8
    return enough and logits.min() > -1e-3 and np.median(largest) > 0.8


@dataclasses.dataclass(eq=False)
class _Predictions:
    """Predicting: from inputs to blocks of chunks, and back to the members' outputs."""

    programs: _Programs
    chunk: int | None  # examples that a device takes at a time; None is by size
    # By the form of the inputs: the sizes of blocks, and how often it was tried whether
    # an example changes another.
    sizes: dict[Any, _Sizes] = dataclasses.field(default_factory=dict)
    tries: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def works(self, model: tuple, inputs: PyTree) -> Iterator[_Work]:
        """Yield the work of each block of the inputs, which are arrays [N, ...].

        The model is by slot.  A block has the same number of chunks for each replica,
        dealt out in turn.
        """
        num_rows = len(jax.tree.leaves(inputs)[0])
        places = self.programs.places
        replicas = places.layout.replicas
        sizes = self._sizes(model, inputs, -(-num_rows // replicas))
        turn = replicas * sizes.chunk
        size = turn * sizes.chunks

        def block(start):  # leaves [chunks, R * chunk, ...]
            def cut(x):
                x = np.array(_numbers("inputs", x[start : start + size]))
                if len(x) < size:
                    x = np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))
                return x.reshape(sizes.chunks, turn, *x.shape[1:])

            return jax.tree.map(functools.partial(_on_data, cut), inputs)

        outputs = self.programs.member.outputs
        for start in range(0, num_rows, size):
            n = min(size, num_rows - start)
            of_slot, of_all = places.deal("chunks", block(start), axis=1)
            of_all = {"count": np.int32(-(-n // turn))} | of_all
            yield _Work(outputs, model, of_slot, of_all, num_rows=n)

    def _sizes(self, model, inputs, num_rows) -> _Sizes:
        """Return how to divide inputs, of which each replica has so many rows.

        Few rows fill one chunk of a power of two; all larger numbers share a program.
        """
        few = _Sizes(2 ** math.ceil(math.log2(num_rows)), 1)
        if few.chunk < (self.chunk or _CHUNKS[self.programs.places.on_cpu][0]):
            return few
        form = _form(inputs, first=1)
        if form not in self.sizes:
            self.sizes[form] = self._largest_sizes(model, inputs)
        return few if few.chunk < self.sizes[form].chunk else self.sizes[form]

    def _largest_sizes(self, model, inputs) -> _Sizes:
        """Return how to divide many inputs.

        It depends on their form, not on the number, so one program serves all numbers.
        """
        places = self.programs.places
        least, most = _CHUNKS[places.on_cpu]
        if self.chunk:
            least = most = self.chunk
        model, hyper = jax.tree.map(_like, (model, self.programs.hyper))  # of a member
        frozen = self.programs.frozen
        outputs = jax.make_jaxpr(self.programs.member.outputs_of, return_shape=True)

        def trace(n):  # returns the bytes of inputs and outputs, and of all arrays
            rows = jax.tree.map(lambda x: _like(_numbers("inputs", x[:1]), n), inputs)
            program, made = _apart(outputs, model, rows, hyper, frozen)
            ends = jax.tree.leaves((rows, [made] * places.layout.members_per_device))
            num_bytes = sum(map(_num_bytes, ends)) or 1
            return num_bytes, list(map(_num_bytes, _avals(program)))

        size, arrays = trace(least)
        largest = size
        if places.on_cpu and most > least:  # of the arrays that grow with examples
            _, twice = trace(2 * least)
            largest = max(map(operator.sub, twice, arrays), default=0)
        chunk = least
        while 2 * chunk <= most and 2 * largest * chunk <= _BLOCK_BYTES * least:
            chunk *= 2
        num_bytes = _BLOCK_BYTES if places.on_cpu else 4 * _BLOCK_BYTES
        chunks = num_bytes * least // (size * chunk)
        return _Sizes(chunk, max(1, min(_BLOCK_CHUNKS, chunks)))

    def blocks(self, model: tuple, inputs: PyTree) -> Iterator:
        """Yield the members' outputs for the inputs, a block at a time, [K, n, ...]."""
        inputs = _arrays("inputs", inputs)
        computing: list = []
        for work in self.works(model, inputs):
            computing.append(self._compute(work))
            if len(computing) > 1:  # the devices are a block ahead
                yield self._members(computing.pop(0))
            elif work.num_rows > 1:
                self._check_independence(model, inputs, computing[0])
        yield self._members(computing.pop())

    def _compute(self, work: _Work) -> _Block:
        return _Block(work.num_rows, self.programs.run(None, work))

    def _members(self, block: _Block) -> PyTree:
        """Bring a block's outputs to the host, by member: leaves [K, n, ...]."""
        members, _, _, replicas = self.programs.places.layout

        def bring(x):
            x = _gather_devices(x)
            slots, chunks, chunk, *rest = x.shape
            groups = slots // replicas  # members, and slots that repeat the last one
            x = x.reshape(groups, replicas, chunks, chunk, *rest).swapaxes(1, 2)
            x = x.reshape(groups, chunks * replicas * chunk, *rest)
            return x[:members, : block.num_rows]

        return jax.tree.map(bring, block.outputs)

    def _check_independence(self, model, inputs, block):
        """Raise ValueError if the outputs of an example depend on other examples.

        The first and the last example of a chunk are tried, each among copies of
        itself, until a chunk of such a form has outputs that differ by more than
        rounding, or for `_TRIES` calls.
        """
        form = _form(inputs, first=1)
        if self.tries[form] == _TRIES:
            return
        chunk = jax.tree.leaves(block.outputs)[0].shape[2]
        count = min(self.programs.places.layout.replicas * chunk, block.num_rows)
        outputs = self._members(block)

        def copies(i):
            def repeat(x):
                return np.repeat(np.asarray(x[i : i + 1]), count, axis=0)

            return jax.tree.map(functools.partial(_on_data, repeat), inputs)

        for i, name in (0, "first"), (count - 1, "last"):
            (work,) = self.works(model, copies(i))
            again = self._members(self._compute(work))
            for x, y in zip(jax.tree.leaves(outputs), jax.tree.leaves(again)):
                if not _near(x[:, i], y[:, i], like=x):
                    raise ValueError(
                        f"apply_fn's output for the {name} example changes with "
                        "others; inputs are [N, ...], x[None] for one x; use no batch "
                        "statistics: train=False"
                    )
        self.tries[form] += 1
        for x in jax.tree.leaves(outputs):
            x = x[:, :count]
            if not _near(x, np.broadcast_to(x[:, :1], x.shape), like=x):
                self.tries[form] = _TRIES
        softmax = self.programs.member.output is jax.nn.softmax
        if softmax and self.tries[form] == _TRIES and _of_probabilities(outputs):
            _warn(
                "predictions look like the softmax of probabilities; apply_fn has to "
                "return logits, or give make_trainer output=None"
            )


# ---------------------------------------------------------------------------------
# Trainer: any number of members on any number of devices
# ---------------------------------------------------------------------------------


def _checked_order(order: Any, members: int, num_rows: int) -> np.ndarray:
    """Check an order [steps, B] or [K, steps, B] of rows; return it as int32."""
    order = np.asarray(_array("order", order))
    fits = order.ndim == 2 or (order.ndim == 3 and len(order) == members)
    if not (fits and order.size and order.dtype.kind in "iu"):
        raise ValueError(
            f"order has shape {order.shape}; expected integers, rows of the data, "
            f"[steps, B], or [K, steps, B] with K = {members}, and not empty"
        )
    # On a device, a row outside the data would be clamped without an error.
    if not 0 <= order.min() <= order.max() < num_rows:
        raise ValueError(
            f"order holds rows {order.min()} to {order.max()}; the data have rows 0 to "
            f"{num_rows - 1}"
        )
    return order.astype(np.int32, copy=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
    """Train K members on D devices, whatever K and D are: see `layout`.

    Args:
      init_fn: init_fn(key) returns the parameters, a tree of arrays, or with `stateful`
        (params, model_state).
      loss_fn: the mean loss of a batch, a scalar, in the form that two flags choose:
          loss_fn(params, *batch)                    loss
          loss_fn(params, *batch)                    (loss, aux), has_aux
          loss_fn(params, model_state, key, *batch)  (loss, model_state), stateful
          loss_fn(params, model_state, key, *batch)  (loss, (model_state, aux)), both
        `hyper` and `frozen`, where they are given, are its last arguments, in this
        order.  Aux is a tree of means over the batch; the model state is not trained,
        and `key` is the step's own.
      optimizer, has_aux, stateful, microbatch, skip_nonfinite: as in
        `make_sync_update`; the step is the same.
      members: the number of models, K.  Each has to fit on one device, or on `shards`.
      devices: the largest number of devices to use, by default all, or the devices
        themselves, a sequence of one platform.  If there are more devices than members,
        each sees a part of its member's batch, and losses are averaged.  For a loss
        that is not a mean over its examples, use at most as many devices as members.
      apply_fn: apply_fn(params, inputs) returns the outputs to predict; with `stateful`
        it takes (params, model_state, inputs).  Inputs and outputs are any trees of
        arrays [B, ...], and an example's output must not depend on other examples.  A
        device takes `chunk` examples at a time, or a power of two if there are fewer;
        rows of zeros fill the last chunk.
      output: a function of apply_fn's outputs: softmax for logits [B, ..., C], or None
        to return them unchanged.
      hyper: a tree of arrays [K, ...] in which members differ, besides their keys.
        Functions then take the member's own, leaves [...], as their last argument:
        init_fn(key, h), loss_fn(params, *batch, h), apply_fn(params, inputs, h).  An
        optimizer that is a function, optimizer(h), returns the member's own.
      frozen: a tree of arrays that all members share and none trains, such as the
        weights of a pretrained network, with one copy per device.  init_fn, loss_fn and
        apply_fn then take it as their last argument, after the member's `hyper`.
      shards: how many neighboring devices hold one member together, S.  A group of S
        devices then takes the place of a device.  It divides each leaf of the state and
        of `frozen` along the longest axis that S divides (leaves of less than 1,024
        numbers are copied), and each batch along its examples, where S divides them.
        Results are those of one device, to rounding.  A function may divide its arrays
        otherwise, by `jax.lax.with_sharding_constraint` over the axis "shards".
      chunk: how many examples a device predicts at a time.  None is 8 to 256 on a CPU,
        as many as keep apply_fn's largest array within 4 MiB, and elsewhere 32 to
        4,096, as many as keep inputs and outputs within these.
      at_once: how many of the members that share a device are computed together, by
        `vmap`; a number above M means all.  None is one on a CPU, in `init` and for
        keys of "rbg", and elsewhere all, or as many as fit in the device's memory.
        Batches, activations, gradients and the states at work take the memory of so
        many members.  Results are those of one member after another, to rounding.

    `latest` is the state that the last `update` or `epoch` returned, or None before the
    first after `init` or `scatter`.  If Ctrl-C arrives before you assign the result,
    find it there.

    The trainer copies the arrays that it is given, so later changes to them have no
    effect.  It shares JAX's own arrays, which cannot change, if they are on its devices
    already: give `frozen` and `place` a copy (`jnp.copy`) of an array that its owner
    will donate or delete.  Otherwise the next call raises JAX's RuntimeError, and the
    state stays.

    Where JAX runs in several processes (`jax.distributed`), every process calls the
    same methods with the same arguments, of which its devices take their part.  Every
    process has the same results, except that each holds its own part of the states:
    `numpy.asarray` of a state's leaf raises JAX's error there, and `gather` returns it.

    Raises ValueError for members, devices, shards, chunk or at_once that are not ints
    of 1 or more, for more devices than there are, for shards that do not divide them,
    and for a `hyper` or an optimizer that does not fit.  Before they consume anything,
    all methods raise ValueError for a state of another trainer, a state that was
    consumed or has one buffer in two leaves, integers that JAX's type cannot hold, and
    the errors that each method names.
    """

    init_fn: InitFn = dataclasses.field(kw_only=False)
    loss_fn: LossFn = dataclasses.field(kw_only=False)
    optimizer: OptimizerLike | Callable = dataclasses.field(kw_only=False)
    members: int  # K
    apply_fn: ApplyFn | None = None  # for predicting
    output: Callable | None = jax.nn.softmax  # of apply_fn's outputs
    hyper: PyTree = None  # leaves [K, ...], in which members differ
    devices: int | Sequence | None = None  # at most this many, or these; None is all
    has_aux: bool = False  # the loss is (loss, aux)
    stateful: bool = False  # the loss takes a model state and a key, and returns one
    microbatch: int | str | None = None  # examples per device at a time; None is all
    skip_nonfinite: bool = False  # a step that is not finite changes nothing
    chunk: int | None = None  # examples that a device predicts at a time
    at_once: int | None = None  # members of a device that are computed together
    frozen: PyTree = None  # arrays that members share and none trains
    shards: int = 1  # devices that hold one member together
    latest: TrainState | None = dataclasses.field(init=False, default=None)
    _seen: _Seen | None = dataclasses.field(init=False, default=None)
    _places: _Places = dataclasses.field(init=False)
    _programs: _Programs = dataclasses.field(init=False)
    _predictions: _Predictions = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        _count("chunk", 1 if self.chunk is None else self.chunk)
        _count("at_once", 1 if self.at_once is None else self.at_once)
        if not callable(self.init_fn):
            raise ValueError(
                f"init_fn is {type(self.init_fn).__name__}; expected a function; each "
                "architecture takes a trainer of its own"
            )
        places = _lay_out(self.members, self.devices, self.shards)
        member = _Member(
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            has_aux=self.has_aux,
            stateful=self.stateful,
            microbatch=self.microbatch,
            skip_nonfinite=self.skip_nonfinite,
            init_fn=self.init_fn,
            apply_fn=self.apply_fn,
            output=self.output,
            shards=self.shards,
            platform=places.platform,
            last=tuple(x for x in ("hyper", "frozen") if getattr(self, x) is not None),
        )
        if self.hyper is not None:
            expected = f"arrays [K, ...], an entry for each of {self.members} members"
            _check_axes("hyper", self.hyper, self.members, expected=expected)
        hyper = places.to_slots("hyper", self.hyper)
        on_host = jax.tree.map(functools.partial(_on_data, np.asarray), self.hyper)
        for i in range(1 if on_host is None else self.members):
            own = jax.tree.map(operator.itemgetter(i), on_host)
            member.optimizer_of(own)  # raises if there is none
        frozen = _private("frozen", self.frozen)
        frozen = places.put(frozen, places.everywhere, divide=True)
        programs = _Programs(member, places, hyper, frozen, self.at_once)
        # The trainer is frozen.
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_programs", programs)
        object.__setattr__(self, "_predictions", _Predictions(programs, self.chunk))

    def __repr__(self) -> str:  # on one line, without arrays and addresses
        functions = self.init_fn, self.loss_fn
        names = [getattr(f, "__name__", type(f).__name__) for f in functions]
        options = f"shards={self.shards}, at_once={self._programs.together}"
        return f"Trainer({', '.join(names)}, {self.layout}, {options})"

    def __reduce__(self) -> tuple:  # a copy is made anew, where it is
        fields = (x.name for x in dataclasses.fields(self) if x.init)
        options = {name: getattr(self, name) for name in fields}
        return functools.partial(type(self), **options), ()

    @property
    def layout(self) -> Layout:
        """K, D, M and R in force, for the devices that JAX has: see `layout`."""
        return self._places.layout

    @functools.cached_property
    def _state_form(self) -> TrainState:
        """The form of the state that init makes, leaves [D * M, ...]."""
        with jax.transfer_guard("allow"):
            return self._programs.result_form(self._work_of_init(jax.random.key(0)))

    def _check_members(self, state, members, expected, trains=False):
        """Raise ValueError unless these members are as init makes them.

        Types and the optimizer's state matter where the members are to be trained.
        """
        what = "a state of another trainer"
        _check_axes("state", state, len(members), expected=expected)
        if state.key is None:
            raise ValueError(
                "the state has no key, which tells members from replicas; keep it, or "
                "scatter: members [K, ...] take jax.random.split(key, "
                f"{self.members})"
            )
        _check_draws(state.key, self.at_once)
        keys = _gather_devices(_key_data(state.key))
        _user_call(what, expected, _check_keys, keys, members)
        ignored: dict = {"key": None}
        if not trains:
            ignored["opt_state"] = ()
        state = state._replace(**ignored)
        like = self._state_form._replace(**ignored)
        remedy = ", as the trainer's init returns it"
        _check_form(what, state, like, remedy, first=1, typed=trains)

    def _fit(self, state, trains):
        """Check a state, and return it in its slots: see `_let_in`."""
        places = self._places
        members, _ = places.slots
        expected = f"this trainer's {len(members)}: use init, or gather and scatter"

        def there(x):  # as init and scatter put it
            now = getattr(x, "sharding", None)
            asked = places.divide(x, places.by_slot)
            alike = getattr(now, "mesh", None) == asked.mesh  # otherwise traces differ
            return alike and now.is_equivalent_to(asked, x.ndim)

        moves = not all(map(there, jax.tree.leaves(state)))
        state = _private("state", state) if moves else state
        self._check_members(state, members, expected, trains)
        return places.put(state, places.by_slot, divide=True) if moves else state

    def _admit(self, state, trains=False):
        fit = functools.partial(self._fit, trains=trains)
        return _let_in(self, state, fit, trains)

    # `_work_of_init`, `_work_of_update` and so on check a method's arguments and return
    # its work, which `_programs` runs, or lowers.

    # Making and moving the members

    def init(self, key: Array) -> TrainState:
        """Make the members: member i from fold_in(key, i).

        Member i depends on this key and its `hyper` alone.  On CPU it ends in the same
        bits for every K and D with K >= D.  It agrees to rounding if it has replicas or
        is computed together with others (`at_once`), and between one device and several
        if XLA compiles the network otherwise for several, as for attention.  A loss
        that draws takes other steps on replicas, unless one size of `microbatch`
        divides their parts of the batch: see `make_sync_update`.

        Leaves of the state are [D * M, ...], by slot; `gather` returns them by member.

        Raises ValueError unless key is one random key, for "rbg" keys with at_once
        above 1, and for an init_fn that returns leaves other than arrays.
        """
        work = self._work_of_init(key)
        self._check_processes(key)
        object.__setattr__(self, "latest", None)  # the trainer is frozen
        return self._programs.run(self, work)

    def _check_processes(self, key: Any) -> None:
        """Raise ValueError unless all processes make, or put, the same members."""
        if jax.process_count() == 1:
            return
        leaves = jax.tree.leaves(self.hyper)
        leaves = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        _check_alike(
            members=self.members,
            hyper=[np.asarray(x).tolist() for x in leaves],
            keys=_key_data(key).tolist(),
        )

    def _work_of_init(self, key):
        _check_outside(key)
        advice = "expected one random key, such as jax.random.key(0), for all members"
        _user_call("key", advice, jax.random.split, key)
        _check_draws(key, self.at_once)
        member, _ = self._places.slots
        first = self._programs.member.first
        return _Work(first, None, {"number": member}, {"key": key}, once=True)

    def gather(self, state: TrainState) -> TrainState:
        """Bring each member to the host, leaves [K, ...]; compare its replicas.

        Typed random keys stay JAX arrays.  Raises RuntimeError if a member's replicas
        are not bit-identical.
        """

        def bring(path, leaf):
            name = jax.tree_util.keystr(path)
            return _on_data(functools.partial(self._places.gather, name), leaf)

        return jax.tree.map_with_path(bring, self._admit(state))

    def like(self, key: Array | None = None) -> TrainState:
        """Return the form of a gathered state, leaves [K, ...], for `load`.

        Leaves are `jax.ShapeDtypeStruct`; nothing is computed.  The state's key has the
        kind of `key`, by default the kind of `jax.random.key(0)`.
        """
        form = self._state_form
        if key is not None:
            form = self._programs.result_form(self._work_of_init(key))
        return jax.tree.map(lambda x: _like(x, self.members), form)

    def scatter(self, gathered: TrainState) -> TrainState:
        """Put members, leaves [K, ...], on the devices: the inverse of `gather`.

        They may come from a trainer with as many members on other devices.  Raises
        ValueError for another number of members, for keys that are missing or equal,
        and for parameters or a model state of other paths or shapes than `init_fn`
        returns.
        """
        _check_state(gathered)
        members = range(self.members)
        expected = f"the trainer's {self.members} members"
        self._check_members(gathered, members, expected)
        self._check_processes(gathered.key)
        object.__setattr__(self, "latest", None)
        return self._places.to_slots("members' state", gathered)

    def with_hyper(self, hyper: PyTree) -> Trainer:
        """Return a trainer with another `hyper`, which runs this one's programs.

        Nothing is compiled anew where arrays [K, ...] have the paths, shapes and types
        of this trainer's, and nothing of `frozen` is copied.  Raises ValueError if this
        trainer has no `hyper`, and for one that does not fit.
        """
        if self.hyper is None or hyper is None:
            raise ValueError(
                "the functions of a trainer without hyper take none; give make_trainer "
                "a hyper"
            )
        frozen = self._programs.frozen
        other = dataclasses.replace(self, hyper=hyper, frozen=frozen)
        programs = dataclasses.replace(self._programs, hyper=other._programs.hyper)
        predictions = dataclasses.replace(self._predictions, programs=programs)
        object.__setattr__(other, "_programs", programs)  # the trainer is frozen
        object.__setattr__(other, "_predictions", predictions)
        return other

    def lower(self, method: str, *args: PyTree, **options: Any) -> jax.stages.Lowered:
        """Lower the program of init, update, epoch or predict; run and place nothing.

        It takes the method's arguments without the state: arrays [B, ...], or their
        forms, `jax.ShapeDtypeStruct`.  The program is for the trainer's devices, which
        may be a topology that nobody has to own (`jax.experimental.topologies`).
        `lower(...).compile().memory_analysis()` says how many bytes the program takes
        on each device.

        Raises ValueError as the method does, and for another method.
        """
        work = self._work_of_forms(method, args, options)
        return self._programs.without_running("lower", work)

    def explain(self, method: str, *args: PyTree, **options: Any) -> Any:
        """Explain how a CPU computes the program, as `fast_cpu.explain` does.

        It takes the arguments of `lower`, and raises ValueError as `lower` does, and
        without fast_cpu.py.
        """
        if not hasattr(_fast_cpu, "explain"):
            raise ValueError("explain needs fast_cpu.py beside pjax_ensemble.py")
        work = self._work_of_forms(method, args, options)
        return self._programs.without_running("explain", work)

    def _work_of_forms(self, method, args, options):
        if method not in ("init", "update", "epoch", "predict"):
            raise ValueError(
                f"method is {method!r}; expected 'init', 'update', 'epoch' or 'predict'"
            )

        def zeros(x):  # in the memory of one number, whatever the shape
            if isinstance(x, bool):  # per_member
                return x
            x = _numbers(method, x)
            if _is_key(x):
                return jnp.empty(x.shape, x.dtype)
            return np.broadcast_to(np.zeros((), jnp.result_type(x)), np.shape(x))

        if method != "init":
            args, options = jax.tree.map(zeros, (args, options))
            places = self._places
            state = places.put(self._state_form, places.by_slot, divide=True)
            args = (state, *args)
        return getattr(self, f"_work_of_{method}")(*args, **options)

    # Training

    def update(
        self, state: TrainState, *batch: PyTree, per_member: bool = False
    ) -> tuple[TrainState, PyTree]:
        """Take a step of every member on one batch, leaves [B, ...]; return the losses.

        B is a member's batch, which its replicas share.  With `per_member`, leaves are
        [K, B, ...], a batch for each member.  The result is (state, metrics), where
        metrics are the losses [K], or (losses, aux).  `state` is consumed: its buffers
        are reused.

        R replicas take parts of B / P examples, P = gcd(B, R).  If P < R, some replicas
        take the same part, which changes no result and takes longer.  Warns of that,
        and at the first step if members cannot differ: with equal weights, on the same
        batches, without a key.  A nan in the batch, or a label outside 0..C-1, gives no
        warning: the member's loss is nan from there on (docs/training.md has causes).

        Raises ValueError for a batch that is empty or does not divide into
        micro-batches.
        """
        state = self._admit(state, trains=True)
        work = self._work_of_update(state, *batch, per_member=per_member)
        self._warn_if_equal(state, differ=per_member)
        state, metrics = self._programs.run(self, work)
        return state, self._places.from_slots(metrics)

    def _work_of_update(self, state, *batch, per_member=False):
        if per_member:
            expected = f"arrays [K, B, ...], with K = {self.members} and one B"
            _check_axes("batch", batch, self.members, None, expected=expected)
        else:
            _check_axes("batch", batch)
        batch = _private("batch", batch)
        of_slot, of_all = self._places.deal(
            "batch", batch, axis=int(per_member), each=per_member
        )
        step = self._programs.member.step
        return _Work(step, state, of_slot, of_all, trains=True)

    def epoch(
        self, state: TrainState, data: tuple | list, order: ArrayLike
    ) -> tuple[TrainState, PyTree]:
        """Take a step for each row of order, int [steps, B], on those rows of data.

        One call takes all steps.  Members may have their own order, [K, steps, B].
        `data` is a tuple of loss_fn's arguments after the parameters, trees of arrays
        [N, ...].  loss_fn sees their dtype: it can scale bytes, which take a quarter of
        the memory of floats.  The result is (state, metrics), with leaves [K, steps].

        Orders of up to 256 steps share one compiled program, or of fewer if their aux
        would take more than 64 MiB.  An epoch in pieces ends in the same bits as in one
        call, answers Ctrl-C after each piece, and agrees with `update` to rounding.  As
        in `update`, `state` is consumed, replicas take parts of the batch, and warnings
        are given.

        Raises ValueError for an order that is empty or has rows outside the data, and
        for data of several lengths.
        """
        state = self._admit(state, trains=True)
        work = self._work_of_epoch(state, data, order, self.place)
        order = np.asarray(order)
        self._warn_if_equal(state, order.ndim == 3 and (order != order[:1]).any())
        state, metrics = self._programs.run(self, work)
        return state, self._places.from_slots(metrics, order.shape[-2])

    def _work_of_epoch(self, state, data, order, place=lambda data: data):
        if not isinstance(data, (tuple, list)):
            raise ValueError(
                f"data is {type(data).__name__}; expected a tuple of loss_fn's "
                "arguments: (data,) for a single tree"
            )
        _check_axes("data", data)
        num_rows = np.shape(jax.tree.leaves(data)[0])[0]
        order = _checked_order(order, self.members, num_rows)
        data = place(tuple(data))  # before the call, as a trace depends on it
        *members, num_steps, size = order.shape
        shared = self._programs.shared_steps(state, data, size)
        half = -(-shared // 2)  # longer orders are multiples of it
        more = max(shared - num_steps, -num_steps % half)
        padded = np.zeros((*members, num_steps + more, size), np.int32)
        padded[..., :num_steps, :] = order
        of_slot, of_all = self._places.deal(
            "order", padded, axis=order.ndim - 1, each=order.ndim == 3
        )
        of_all = {"data": data, "num_steps": np.int32(num_steps)} | of_all
        steps = self._programs.member.steps
        return _Work(steps, state, of_slot, of_all, trains=True)

    def place(self, data: PyTree) -> PyTree:
        """Copy all of data, a tree of arrays [N, ...], to every device in use.

        Call it once, so that `epoch` need not copy in each call: data that are there
        already stay.  Each device has its own copy, virtual ones too: 100 MiB take 800
        MiB on eight.
        """
        return self._places.put(_private("data", data), self._places.everywhere)

    def _warn_if_equal(self, state, differ):
        differ = differ or self.members == 1 or self.hyper is not None or self.stateful
        if differ or self.latest is not None:  # warn at the first step alone
            return

        def equal(leaf):
            return len({x.tobytes() for x in _gather_devices(leaf)}) == 1

        if all(map(equal, jax.tree.leaves(state.params))):
            _warn(
                f"the {self.members} members have equal weights, see the same batches "
                "and use no random key, so they stay equal; have init_fn draw from its "
                "key, or give each its own batches"
            )

    # Predicting

    def predict(self, state: TrainState, inputs: PyTree) -> PyTree:
        """Return the mean over members of output(apply_fn(...)), leaves [N, ...].

        inputs are apply_fn's, leaves [N, ...].  Means are taken in float32 at least, on
        the host, and are nan where a member's output is.  Besides the result, the host
        holds two blocks of all members' outputs, each of some thousand examples or a
        few MiB, but at least one chunk per replica: lower `chunk` if outputs are large.

        Raises ValueError for inputs without an example, for outputs without an entry
        per example, for outputs that the softmax cannot take as logits, and, at a
        program's first call, for outputs of an example that depend on other examples.
        """

        def mean(x):  # in less time than `x.mean`, which one example notices
            return x.sum(axis=0, dtype=_wide(x.dtype)) / self.members

        with np.errstate(invalid="ignore", over="ignore"):
            means = [jax.tree.map(mean, x) for x in self.predict_blocks(state, inputs)]
        return jax.tree.map(lambda *x: np.concatenate(x), *means)

    def predict_members(self, state: TrainState, inputs: PyTree) -> PyTree:
        """Return each member's output(apply_fn(...)), leaves [K, N, ...].

        Inputs and errors are those of `predict`.
        """
        blocks = self.predict_blocks(state, inputs)
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *blocks)

    def predict_blocks(self, state: TrainState, inputs: PyTree) -> Iterator[PyTree]:
        """Yield what `predict_members` returns, a block of examples at a time.

        Leaves are [K, n, ...].  The host holds two blocks, and never all outputs.  The
        devices are a block ahead of the loop, so the state may be consumed only after
        the last block.  Inputs and errors are those of `predict`.
        """
        state = self._admit(state)
        return self._predictions.blocks(self._model(state), inputs)

    def _work_of_predict(self, state, inputs):
        inputs = _arrays("inputs", inputs)
        return next(self._predictions.works(self._model(state), inputs))

    def _model(self, state):
        """Return the parts of a state that apply_fn takes."""
        if self.apply_fn is None:
            raise ValueError("predicting takes an apply_fn; give make_trainer one")
        return (state.params, state.model_state)[: 1 + self.stateful]


del Trainer.output  # a default; help() would explain JAX's softmax for the attribute
make_trainer = Trainer


# ---------------------------------------------------------------------------------
# Batches: which examples a step sees, and making them in advance
# ---------------------------------------------------------------------------------


def choose_members(better: ArrayLike, new: TrainState, old: TrainState) -> TrainState:
    """Take members of `new` where `better` [K] is true, and of `old` elsewhere.

    Both are states from `Trainer.gather`, leaves [K, ...]: for example, the state after
    the last epoch, and each member's state at its lowest validation loss.  Keys are
    taken too.  Raises ValueError for a `better` that is not K booleans, and for states
    of different forms.
    """
    better = np.asarray(better)
    _check_form("new", new, old)
    _check_axes("states and better", (new, better))
    if better.dtype != bool or better.ndim > 1:
        raise ValueError(f"better is {_described(better)}; expected bool[K], one each")

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

    An epoch goes through every example once, except examples left over that do not fill
    a batch.

    Args:
      num_examples: N, the number of examples.
      batch_size: B, at most N.
      members: K, for an order of each member, which depends on seed, epoch and the
        member's number alone.  None gives the order of member 0.
      seed: an int >= 0, another one for other orders and resamples.
      epoch: the number of the epoch, an int >= 0, for another order in each.
      bootstrap: whether to draw N examples with replacement, for each member once, and
        go through these in every epoch.

    Returns int32 [steps, B], or with `members` [K, steps, B].

    Raises ValueError for a batch_size above num_examples, and for numbers that are not
    ints or are out of range.
    """
    if not all(_is_int(n) and 0 <= n < 2**32 for n in (seed, epoch)):
        raise ValueError(f"{seed=}, {epoch=}; expected ints, 0 <= each < 2**32")
    if _count("batch_size", batch_size) > _count("num_examples", num_examples):
        raise ValueError(f"{batch_size=}; expected at most {num_examples=}")
    steps = num_examples // batch_size
    orders = []
    for member in range(1 if members is None else _count("members", members)):
        rows = np.random.default_rng([seed, epoch, member]).permutation(num_examples)
        if bootstrap:
            drawn = np.random.default_rng([seed, 0, member, 1])
            rows = drawn.integers(num_examples, size=num_examples)[rows]
        orders.append(rows[: steps * batch_size].astype(np.int32))
    order = np.reshape(orders, (-1, steps, batch_size))
    return order[0] if members is None else order


_LAST_ITEM = 5  # seconds that the end of Python waits for an item in the making


def prefetch(batches: Iterable, size: int = 2) -> Iterator:
    """Yield the items of `batches`, of which a thread makes up to `size` in advance.

    The devices then work while the host reads or makes the next batches:

        for batch in prefetch(batches):
            state, losses = trainer.update(state, *batch)

    Order and values stay, if each item is a new one: an array that `batches` fills
    again changes under the loop.  An error that `batches` raises, the loop raises in
    its place.  After the loop is left, the thread ends with the item that it is making,
    and items made in advance are lost: go on with a new iterator.  JAX's contexts, such
    as `jax.enable_x64`, do not reach the thread.  Raises ValueError for a size that is
    not an int of 1 or more.
    """
    _count("size", size)
    items = iter(batches)

    def ahead():
        room: Any = threading.Semaphore(size)
        ready: Any = queue.SimpleQueue()
        left = threading.Event()  # by the loop

        def make():
            try:
                while room.acquire() and not left.is_set():
                    ready.put((next(items), None))
            except BaseException as error:  # the loop's, or its end
                ready.put((None, error))
            atexit.unregister(leave)
            atexit.unregister(thread.join)

        def leave():
            left.set()
            room.release()

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        # Python ends a daemon wherever it is, which within XLA aborts the process.  But
        # a daemon need not end by itself: it may wait for an item that never comes.
        atexit.register(thread.join, _LAST_ITEM)
        atexit.register(leave)  # is called before
        try:
            while True:
                item, error = ready.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:  # it may be false
                    raise error
                room.release()
                yield item
        finally:
            leave()

    return ahead()


# ---------------------------------------------------------------------------------
# Checkpoints: a tree in one safetensors file, whole and verified or not at all
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def replace_file(path: str | os.PathLike) -> Iterator[Any]:
    """Open a file for writing bytes, which takes its name once it is whole and synced.

        with replace_file(path) as file:
            file.write(content)

    The content is written to a temporary file in the same folder and synced to the
    disk; then the name is replaced, and the folder synced.  A crash at any moment
    leaves the old file or the new one, perhaps beside a temporary `.NAME.*.tmp`, with
    the name's first 60 letters.  The new file has the permissions of the old one.

    Raises ValueError if `path` is not a regular file, such as a link or a device, and
    OSError, with `path` and the reason, if the disk refuses.  The old file is then as
    it was (unless only the folder could not be synced), and no temporary one is left.
    """
    path = os.fsdecode(path)
    old = os.lstat(path).st_mode if os.path.lexists(path) else None
    if old and not stat.S_ISREG(old):
        raise ValueError(f"{path} is not a regular file; choose another name")
    folder, name = os.path.split(path)
    # 60 letters of at most four bytes keep the name within the limit for names.
    temporary = os.path.join(folder, f".{name[:60]}.{os.urandom(4).hex()}.tmp")
    opener = functools.partial(os.open, mode=stat.S_IMODE(old or 0o666))
    here = None  # the folder, also if it gets another name; Windows does not open it
    try:
        if hasattr(os, "O_DIRECTORY"):
            here = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        with open(temporary, "x+b", opener=opener) as file:
            if old:  # the process may have masked a part of its mode
                os.chmod(temporary, stat.S_IMODE(old))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if here is not None:
            os.fsync(here)
    except OSError as error:
        if error.filename not in (None, temporary, path, folder or "."):
            raise  # of another file, in the caller's block
        raise OSError(error.errno, error.strerror or str(error), path) from error
    finally:
        with contextlib.suppress(OSError):  # it exists only if something failed
            if here is None:
                os.unlink(temporary)
            else:
                os.unlink(os.path.basename(temporary), dir_fd=here)
        if here is not None:
            os.close(here)


# The safetensors format's names of NumPy's types, except float8, which the format's
# reader for NumPy does not know.
_CODES = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"}
_CODES |= {f"float{n}": f"F{n}" for n in (16, 32, 64)}
_CODES |= {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)}
_CODES |= {f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)}
_FORMAT = 2  # of the files that `save` writes; `load` reads all up to it
_START = b'{"__metadata__":{"sha256":"'  # begins every header; 64 digits follow
_DIGEST = slice(8 + len(_START), 8 + len(_START) + 64)  # their place in the file
# Errors of JSON, NumPy and JAX for headers that `save` does not write.
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, each with a shape and a dtype."""
    leaves = {name: _array(f"leaf '{name}'", leaf) for name, leaf in _named(tree)}
    own = {"__metadata__", "sha256", "format"}
    if len(own | leaves.keys()) < len(own) + len(jax.tree.leaves(tree)):
        raise ValueError("two leaves of the tree, or one and the header, share a path")
    return leaves


def _storable(name: str, leaf: Any) -> np.ndarray:
    """Return a leaf as it is stored: keys as their data, exotic types as bytes."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"leaf '{name}' is a form, without numbers; expected an array")
    leaf = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    leaf = np.asarray(leaf, leaf.dtype.newbyteorder("<"), order="C")
    return leaf if leaf.dtype.name in _CODES else leaf[..., None].view(np.uint8)


def _restored(leaf: np.ndarray, kind: str | None) -> Any:
    """Undo `_storable`; the kind is None for types that are stored as they are."""
    if kind is not None and kind.startswith("key<"):
        return jax.random.wrap_key_data(jnp.asarray(leaf), impl=kind[4:-1])
    if kind is not None:
        leaf = leaf.view(kind).reshape(leaf.shape[:-1])
    return np.require(leaf, requirements="A")


def _head(arrays: dict[str, np.ndarray], kinds: dict[str, str], digest: str) -> bytes:
    """Return the bytes that precede the arrays."""
    types = {name: kind for name, kind in kinds.items() if kind not in _CODES}
    metadata = {"sha256": digest, "format": str(_FORMAT), **types}
    header: dict = {"__metadata__": metadata}
    end = 0
    for name, x in arrays.items():
        begin = end
        end += x.nbytes
        code = _CODES[x.dtype.name]
        header[name] = {"dtype": code, "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save(path: str | os.PathLike, tree: PyTree) -> None:
    """Write a tree of arrays to one file, whole or not at all: see `replace_file`.

    The file is in the safetensors format (https://github.com/huggingface/safetensors):
    8 bytes hold the length of the header, then comes the header, JSON with the path,
    type, shape and place of each leaf, and then the arrays.
    `safetensors.numpy.load_file` and its counterparts for other frameworks read it
    (bfloat16 in NumPy once JAX is imported).

    Types that the format or its reader for NumPy lacks (complex128, float8, int4) are
    stored as bytes, uint8 [..., bytes per number], and typed random keys as their data.
    The header's `__metadata__` has their types by path, `sha256`, the digest of all
    bytes after its own 64 digits, and `format`, the number of this form of files, 2.
    Files of format 1 have no number.

    Raises ValueError for leaves that are masked, or are not numbers, booleans or random
    keys, and for a path that is not a regular file; OSError as `replace_file` does.
    """
    leaves = _by_path(tree)
    kinds = {name: _kind(leaf) for name, leaf in leaves.items()}
    arrays = {name: _storable(name, leaf) for name, leaf in leaves.items()}
    parts = [x.reshape(-1).view(np.uint8).data for x in arrays.values()]
    digest = hashlib.sha256(_head(arrays, kinds, bytes(32).hex())[_DIGEST.stop :])
    for part in parts:
        digest.update(part)
    with replace_file(path) as file:
        file.writelines([_head(arrays, kinds, digest.hexdigest()), *parts])


def _bytes_of(path: str | os.PathLike) -> np.ndarray:
    """Read a file that begins as those of `save` do."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        if file.read(_DIGEST.start)[8:] != _START:
            raise ValueError(
                "has no digest of save's: damaged, or written by another program, "
                "whose files safetensors.numpy.load_file reads"
            )
    return np.fromfile(path, np.uint8)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("its header is not one that save writes: a name comes twice")
    return dict(pairs)


def _unpack(content: np.ndarray) -> dict[str, Any]:
    """Verify a file's bytes, and return its leaves by path, in the same memory.

    Raises ValueError if the digest does not match the content, and other errors for a
    header that `save` does not write.
    """
    digest = hashlib.sha256(content[_DIGEST.stop :].data).hexdigest()
    if content[_DIGEST].tobytes() != digest.encode():
        raise ValueError("damaged or cut short: its digest does not match its content")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes(), object_pairs_hook=_once)
    kinds = header.pop("__metadata__")
    del kinds["sha256"]
    number = int(kinds.pop("format", 1))
    if number > _FORMAT:
        raise ValueError(
            f"its format is {number}, and pjax_ensemble {__version__} reads formats up "
            f"to {_FORMAT}; take a newer version"
        )
    types = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()}
    leaves = {}
    end = 0
    for name, entry in header.items():
        dtype = types[entry["dtype"]]
        shape = entry["shape"]
        places = [end, end + math.prod(shape) * dtype.itemsize]
        inside = start + places[1] <= len(content) and min(shape, default=0) >= 0
        if entry["data_offsets"] != places or not inside:
            raise ValueError(f"its header is not one that save writes: leaf '{name}'")
        data = content[start:][slice(*places)]
        leaves[name] = _restored(data.view(dtype).reshape(shape), kinds.pop(name, None))
        end = places[1]
    if kinds or start + end != len(content):
        raise ValueError("its header is not one that save writes: sizes differ")
    return leaves


def _why_other(theirs: Any, like: Any) -> str:
    """Say why a state differs from a trainer's, by its keys and by their form."""
    if _kind(theirs) != _kind(like):
        return "; give trainer.like a key of the kind that the file has"
    if theirs.shape == like.shape:
        return "; it is of another network or optimizer"
    if not (theirs.shape and like.shape):
        return "; a trainer's members have keys [K], and a single model has one"
    numbers = np.asarray(_key_data(theirs))
    if len(np.unique(numbers, axis=0)) < len(numbers):  # of replicas
        return "; it was saved without gather: see help(load)"
    return f"; it has {len(theirs)} members, and this trainer has {len(like)}"


def _as_like(where: Any, leaves: dict[str, Any], like: PyTree) -> PyTree:
    """Return leaves by path as a tree like `like`, a part of their tree: see `load`."""
    names: tuple = ("",)
    if isinstance(like, dict):
        names = tuple(f"[{key!r}]" for key in like)
    elif isinstance(like, TrainState | _Record):
        names = tuple(f".{field}" for field in like._fields)
    leaves = {name: x for name, x in leaves.items() if name.startswith(names)}
    ours = _by_path(like)
    remedy = "; load(path), without like, returns the file's leaves"
    if isinstance(like, TrainState) and ".key" in leaves and ".key" in ours:
        remedy = _why_other(leaves[".key"], like.key)
    _check_leaves(where, _described(leaves), _described(ours), remedy)
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in ours])


def load(path: str | os.PathLike, like: PyTree = None) -> PyTree:
    """Read a file of `save`: as a tree like `like`, or as a dict of leaves by path.

    `like` is a tree of the same structure; the paths, shapes and types of its leaves
    matter, not their values.  If it is a dict or a `TrainState`, the file may have more
    keys or fields, which are left out.  The digest is verified before anything is
    returned.  Files of earlier versions are read.
    Leaves are NumPy arrays, which share the memory that the file is read into; typed
    random keys are JAX arrays.

    Raises ValueError, with the path and the fault, for content that is damaged, cut
    short or foreign, for leaves that differ from those in `like`, and for a path that
    is not a regular file (a link is not); OSError if it cannot be read.

    Save a trainer's state as `gather` returns it, and load it with like=trainer.like(),
    or like=trainer.like(key) if it was made from another kind of key than
    jax.random.key(0).  A state that was saved without `gather` is not lost: load it
    with like=trainer.init(key), by a trainer on as many devices, and gather it.
    """
    try:
        leaves = _unpack(_bytes_of(path))
    except _WRONG as error:
        raise ValueError(f"{path}: {error}") from error
    return leaves if like is None else _as_like(path, leaves, like)


# ---------------------------------------------------------------------------------
# Fit: a loop over epochs, which goes on where it stopped
# ---------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Steps that `fit` has taken in one call of `Trainer.epoch`, of about a second."""

    step: int  # steps so far, with those of earlier calls of `fit`
    losses: np.ndarray  # [K, n]
    aux: PyTree  # leaves [K, n, ...], or None
    seconds: float  # of the call


class Fitted(NamedTuple):
    """The result of `fit`, or how far it is."""

    state: TrainState  # on the devices; the next step consumes it
    best: TrainState | None  # each member at its lowest validation loss, from `gather`
    losses: np.ndarray  # [K, epochs], means over an epoch's steps
    validation: np.ndarray  # [K, epochs], or [K, 0] without `validate`


class _Record(NamedTuple):
    """The content of a checkpoint: a state from `gather`, and how it came to be.

    `load` reads the first four fields as it reads a state alone.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: PyTree
    best: PyTree  # this and the next two are a `Fitted`'s
    losses: PyTree
    validation: PyTree
    begun: PyTree  # [K, n], losses of the steps of the epoch that has begun
    step: PyTree  # int64 []
    settings: PyTree  # bytes of JSON


def _as_json(settings: dict) -> np.ndarray:
    """Return settings as JSON, each as a text of its own, so that nan equals nan."""

    def plain(value):  # is called for those that JSON lacks
        is_path = isinstance(value, os.PathLike)
        return os.fspath(value) if is_path else np.asarray(value).tolist()

    texts = {}
    for name, value in settings.items():
        try:
            texts[name] = json.dumps(value, default=plain, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                f"setting {name!r} is {value}; expected a number, a string, a path, or "
                "a list, dict or array of these"
            ) from None
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


def _checkpoints(folder: str | os.PathLike) -> list[tuple[int, str]]:
    """Return the step and the path of each checkpoint in a folder, newest first."""
    form = re.compile(r"checkpoint_(\d{8,})\.safetensors")
    matches = filter(None, map(form.fullmatch, os.listdir(folder)))
    found = [(int(match[1]), os.path.join(folder, match[0])) for match in matches]
    return sorted(found, reverse=True)


def _newest(folder: str | os.PathLike) -> tuple[int, np.ndarray]:
    """Return the step and the bytes of the newest valid checkpoint, if there is one."""
    os.makedirs(folder, exist_ok=True)
    found = _checkpoints(folder)
    for step, path in found:
        try:
            content = _bytes_of(path)
            held = _unpack(content).get(".step", step)
            if held != step:
                raise ValueError(f"holds step {held}, not step {step}")
            return step, content
        except (OSError, *_WRONG) as error:
            _warn(f"skipped {path}: {error}")
    if found:
        raise ValueError(f"none of {len(found)} checkpoints in {folder} is valid")
    return 0, np.empty(0, np.uint8)


def _of_first_process(content: np.ndarray) -> np.ndarray:
    """Return the bytes that process 0 passes, in every process."""
    size = gather_processes(np.array(divmod(len(content), 2**30), np.int32))[0]
    length = int(size[0]) * 2**30 + int(size[1])
    return gather_processes(np.resize(content, length))[0]


@dataclasses.dataclass(eq=False)
class _Fit:
    """How far a call of `fit` is, and its checkpoints."""

    trainer: Trainer
    steps: int  # of an epoch
    epochs: int
    validate: Callable | None
    patience: float
    folder: Any  # a path, or None
    save_steps: int  # between checkpoints
    keep: int
    settings: np.ndarray
    finite: bool = True  # whether some member's last loss was
    good: int = -1  # the step of the last checkpoint after such a loss
    size: int = 1  # of the next segment

    def begin(self, key: Array) -> None:
        """Go on from the newest checkpoint, or make new members."""
        none = np.empty((self.trainer.members, 0), np.float32)
        self.begun = none  # losses of the steps of the epoch that has begun
        if self.folder is not None and self.restore(key):
            return
        state = self.trainer.init(key)
        best = self.trainer.gather(state) if self.validate else None
        self.at = Fitted(state, best, none, none.astype(float))
        self.save(due=True)

    @property
    def step(self) -> int:
        return self.at.losses.shape[1] * self.steps + self.begun.shape[1]

    def restore(self, key: Array) -> bool:
        """Go on from the checkpoint that process 0 finds, if it finds one."""
        first = jax.process_index() == 0
        step, content = _newest(self.folder) if first else (0, np.empty(0, np.uint8))
        content = _of_first_process(content)
        if not content.size:
            return False
        step = int(gather_processes(np.int32(step))[0])
        # A state alone says nothing of its losses; its last epoch may lack validation.
        ended = max(0, step - 1) // self.steps
        unknown = np.full((self.trainer.members, step), np.nan, np.float32)
        default = {
            "losses": unknown[:, :ended],
            "validation": unknown[:, :0].astype(float),
            "begun": unknown[:, ended * self.steps :],
            "step": np.int64(step),
            "settings": self.settings,
        }
        leaves = {f".{name}": x for name, x in default.items()} | _unpack(content)
        own = {name: leaves[f".{name}"] for name in default}
        where = f"the checkpoint of step {step} in {self.folder}"
        old, new = (json.loads(x.tobytes()) for x in (own["settings"], self.settings))
        for name in new | old:
            was, now = old.get(name), new.get(name)
            if was != now:
                raise ValueError(f"{where} has {name} {was}, not {now}")
        like = self.trainer.like(key)
        best = like if self.validate else None
        record = _as_like(where, leaves, _Record(*like, best, **own))
        state = self.trainer.scatter(TrainState(*record[:4]))
        self.at = Fitted(state, *record[4:7])
        self.begun = record.begun
        if self.trainer.skip_nonfinite:
            self.finite = bool(np.isfinite(self.begun[:, -1:]).any())
        else:
            self.good = step
        count = self.at.losses.shape[1]
        waited = max(map(self.waited, range(count)), default=0)
        if count > self.epochs or waited >= self.patience:
            raise ValueError(
                f"{where} has {count} epochs, and waited {waited} for a better one: "
                f"more than epochs={self.epochs} or patience={self.patience} allow"
            )
        return True

    def save(self, due: bool) -> None:
        """Save if it is due.  Raises FloatingPointError if no member is finite.

        Steps that are skipped may leave weights that are finite and useless, so a good
        checkpoint is one after a finite loss, and the last good one stays.
        """
        step = self.step
        if self.folder is None or not (due or step % self.save_steps == 0):
            return
        _check_alike(step=step)
        state = self.trainer.gather(self.at.state)
        leaves = [
            x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        finite = [np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in leaves]
        if not np.all(finite, axis=0).any():  # in every leaf, for some member
            raise self.not_finite()
        if self.finite:
            self.good = step
        if jax.process_index():
            return
        progress = *self.at[1:], self.begun, np.int64(step), self.settings
        name = f"checkpoint_{step:08d}.safetensors"
        save(os.path.join(self.folder, name), _Record(*state, *progress))
        # Checkpoints of later steps do not count, and stay: they are damaged.
        older = [found for found in _checkpoints(self.folder) if found[0] <= step]
        for number, path in older[self.keep :]:
            if -1 < self.good != number:
                with contextlib.suppress(PermissionError):  # on Windows, if it is read
                    os.unlink(path)

    def not_finite(self) -> FloatingPointError:
        text = f"no model is finite after step {self.step}; lower the learning rate"
        if self.good >= 0:
            text += f" (the checkpoint of step {self.good} is good)"
        return FloatingPointError(text)

    def take(self, data: tuple | list, order: np.ndarray) -> Segment:
        """Take the next steps of an epoch, as many as may take a second."""
        begun = self.begun.shape[1]
        count = min(self.size, self.save_steps - self.step % self.save_steps)
        order = order[..., begun : begun + count, :]
        started = time.perf_counter()
        state, metrics = self.trainer.epoch(self.at.state, data, order)
        losses, aux = metrics if self.trainer.has_aux else (metrics, None)
        self.at = self.at._replace(state=state)
        self.begun = np.concatenate([self.begun, losses], axis=1)
        self.finite = bool(np.isfinite(losses[:, -1]).any())
        seconds = time.perf_counter() - started
        slowest = float(gather_processes(np.float32(seconds)).max())
        self.size = max(1, min(2 * self.size, int(count / slowest), _STEPS))
        return Segment(self.step, losses, aux, seconds)

    def ended(self) -> Fitted:
        """Validate, and return the result with the epoch whose steps are all taken."""
        state, best, losses, validation = self.at
        old: Any = best
        losses = np.column_stack([losses, self.begun.mean(axis=1)])
        failed = ~np.isfinite(self.begun[:, -1]) & (not self.trainer.skip_nonfinite)
        new = np.flatnonzero(failed & np.isfinite(losses[:, -2:-1]).all(axis=1))
        if len(new):
            epoch = losses.shape[1]
            _warn(f"members {new.tolist()} are not finite after epoch {epoch}")
        if self.validate is not None:
            scores = np.asarray(self.validate(state))
            if scores.shape != failed.shape:
                raise ValueError(f"validate gave {scores.shape}; expected losses [K]")
            scores = np.where(failed | np.isnan(scores), np.inf, scores)
            better = scores < validation.min(axis=1, initial=np.inf)
            if better.any():
                best = choose_members(better, self.trainer.gather(state), old)
            validation = np.column_stack([validation, scores])
        return Fitted(state, best, losses, validation)

    def waited(self, epochs: int) -> int:
        """Return in how many epochs no member had improved, after so many of all."""
        losses = self.at.validation[:, :epochs]
        return epochs - 1 - int(losses.argmin(axis=1).max()) if losses.size else 0


def fit(
    trainer: Trainer,
    data: tuple | list,
    *,
    key: Array,
    epochs: int,
    batch_size: int | None = None,
    order: Callable | None = None,
    validate: Callable | None = None,
    patience: float = math.inf,
    folder: str | os.PathLike | None = None,
    save_every: float = 1.0,
    keep: int = 3,
    settings: dict | None = None,
    on_segment: Callable = lambda segment: False,
    on_epoch: Callable = lambda fitted: False,
) -> Fitted:
    """Train for epochs: validate, stop early, save, go on where a call has stopped.

    The same call goes on from the newest checkpoint in `folder`, on any devices.  After
    a crash, a kill or Ctrl-C at any moment it ends in the bytes of one that was never
    stopped.  `epochs` and `patience` may be larger than in the earlier call.

    Args:
      trainer: of the members, which `Trainer.init` makes from `key`.
      data: a tuple of loss_fn's arguments after the parameters, leaves [N, ...].
      key: one random key.  Its last word is the seed of the orders.
      epochs: the number of epochs, 0 or more.
      batch_size: the examples of a step, in the order of `epoch_order`, a member's own.
      order: in place of batch_size, order(epoch) returns the rows of each step, int
        [steps, B] or [K, steps, B], with as many steps in each epoch.
      validate: validate(state) returns losses [K], lower is better, after each epoch.
        nan, and the loss of a member that is not finite, count as infinite.
      patience: training stops after so many epochs in which no member improved.
      folder: where checkpoints are, `checkpoint_{step}.safetensors`; it is made if
        missing.  `load(path, trainer.like())` reads the state in one.
      save_every: the epochs between checkpoints, whole or fractional.
      keep: how many checkpoints to keep, the newest ones.
      settings: what the results depend on, by name: numbers, texts, paths, lists, dicts
        or arrays.  A call of other settings raises ValueError.  Data and functions are
        not compared.
      on_segment: on_segment(segment) is called with a `Segment` after some steps, about
        once in a second, and before the first ones, with those that the epoch has.
      on_epoch: on_epoch(fitted) is called with a `Fitted` after each epoch.  After a
        crash, it may be called again for the same epoch.

    Training saves and stops where a callback returns true; an error of one ends it at
    once.  If JAX runs in several processes, each makes the same call, and callbacks
    agree; process 0 alone needs the folder.

    Members whose losses are not finite get a warning, and the others go on.  Raises
    FloatingPointError if no member is left, OSError if a checkpoint cannot be written,
    and ValueError for arguments that do not fit, and for a folder of other settings.
    """
    if (batch_size is None) == (order is None):
        raise ValueError(f"{batch_size=}, {order=}; expected one of the two")
    if not (_is_int(epochs) and epochs >= 0):
        raise ValueError(f"{epochs=}; expected an int, 0 or more")
    _count("keep", keep)
    if not patience >= 1:
        raise ValueError(f"{patience=}; expected epochs, 1 or more")
    _check_range("save_every", save_every, math.inf)
    num_rows = len(jax.tree.leaves(data)[0])
    words = np.ravel(_key_data(key)).tolist()

    def draw(epoch):
        if order is not None:
            rows = order(epoch)
        else:
            options = {"members": trainer.members, "seed": words[-1], "epoch": epoch}
            rows = epoch_order(num_rows, batch_size, **options)
        return _checked_order(rows, trainer.members, num_rows)

    steps = draw(0).shape[-2]
    own = {"key": words, "examples": num_rows, "steps of an epoch": steps}
    run = _Fit(
        trainer=trainer,
        steps=steps,
        epochs=epochs,
        validate=validate,
        patience=patience,
        folder=folder,
        save_steps=max(1, round(save_every * steps)),
        keep=keep,
        settings=_as_json(own | (settings or {})),
    )
    _check_alike(
        settings=run.settings.tobytes(),
        epochs=epochs,
        save_every=run.save_steps,
        folder=folder is None,
        validate=validate is None,
        patience=patience,
    )
    run.begin(key)
    data = trainer.place(data)
    stop = on_segment(Segment(run.step, run.begun, None, 0.0))
    for epoch in range(run.at.losses.shape[1], epochs):
        if run.waited(epoch) >= patience:
            break
        rows = draw(epoch)
        if rows.shape[-2] != steps:
            raise ValueError(f"order({epoch}) has {rows.shape[-2]} steps, not {steps}")
        while not stop and run.begun.shape[1] < steps:
            segment = run.take(data, rows)
            run.save(due=segment.step == epochs * steps)
            stop = on_segment(segment)
            if not (run.finite or trainer.skip_nonfinite):
                raise run.not_finite()
        if stop:
            break
        fitted = run.ended()
        if on_epoch(fitted):  # a later call validates again
            run.save(due=True)
            return fitted
        run.at = fitted
        run.begun = run.begun[:, :0]
    run.save(due=True)
    return run.at


# ---------------------------------------------------------------------------------
# Demo: python pjax_ensemble.py [--devices D]
# ---------------------------------------------------------------------------------


class Params(NamedTuple):
    weight: Array  # []
    bias: Array  # []


def main(num_devices: int | None = None) -> None:
    """Fit y = 2 x - 1 + noise in sync mode on D devices: JAX's pmap tutorial.

    By default D is the largest number that divides 128 and the number of devices.
    Raises ValueError for a D that does not divide 128, or exceeds the devices.
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
    state = replicate(train_state(params, optimizer), d)
    batch = split((xs, ys), d)
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
    parser.add_argument("--devices", type=int, metavar="D", help="a divisor of 128")
    try:
        main(parser.parse_args().devices)
    except ValueError as error:
        parser.error(str(error))
