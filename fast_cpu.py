# Copyright (c) 2026 The pjax_ensemble authors.  SPDX-License-Identifier: MIT
"""Make the convolutions, products and sums of any JAX function fast on CPUs.

`jit(step)` takes the place of `jax.jit(step)`, for a whole training step, gradients
included, of any library: its convolutions, products, sums and maximum pools take forms
that XLA computes fast on a CPU, bfloat16 is rounded faster, and the compiler has
options with which this version of JAX is right.  `fast` does so between `jax.jit` and a
step.  On GPUs, each convolution of a `vmap` over kernels becomes a call of its own;
nothing else changes on other platforms.

    import jax, jax.numpy as jnp
    import fast_cpu as fc

    def loss_fn(kernel, images):
        names = "NHWC", "HWIO", "NHWC"
        y = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=names
        )
        return jnp.square(y).mean()

    def step(kernel, images):
        return kernel - 0.1 * jax.grad(loss_fn)(kernel, images)

    step = fc.jit(step)
    kernel = step(jnp.ones((3, 3, 8, 16)), jnp.ones((32, 28, 28, 8)))

These letters are used everywhere:

    N        images                    I, O      channels in, out
    H, W     height, width             kh, kw    of a kernel

x is images [N, H, W, I], a kernel is [kh, kw, I / groups, O], and `axes` has an `_Axis`
for each of H and W.  There may be one axis, or three and more, in place of these two.
`how` is a `_How`, the other parameters of a convolution.

Contents: Windows, Convolutions, Gradients of kernels, Any convolution, Products and
sums, Options of the compiler, Programs, Functions, Memory.  Each section uses only the
sections above it.  An import touches no device.  The file jax_faults.py, in the
repository, has the faults of XLA and its libraries that comments name: the versions of
JAX that have each one, and a probe.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import inspect
import itertools
import math
import operator
import os
import platform
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

if jax.__version_info__ < (0, 10):
    raise ImportError(
        f"fast_cpu needs JAX 0.10 or newer, this is {jax.__version__}; "
        "python -m pip install -U jax"
    )

__all__ = [
    "compiler_options",
    "rewrite",
    "Program",
    "fast",
    "jit",
    "explain",
    "compare",
    "keep_memory",
]


_config: Any = jax.config  # the types of JAX 0.10 do not name its attributes


def __dir__() -> list[str]:  # for completion: without the imported modules' names
    return __all__ + ["__doc__"]


# ---------------------------------------------------------------------------------
# Windows: where they lie, and copies of their entries
# ---------------------------------------------------------------------------------

# XLA:CPU has a fast routine for convolutions of NHWC images and HWIO kernels, of one or
# two axes; oneDNN, which XLA calls if `compiler_options` say so, has one for three axes
# too.  XLA converts other layouts to these, but not inside a loop, where gradients then
# take some sixty times as long (fault `slow_convolutions_in_loops`).  So each
# convolution of a function is replaced: on a CPU it takes these layouts, with any
# number of axes, and one of the ways below, which `_forward` and, for gradients of
# kernels, `_kernel_gradient` choose.

_CHUNK_BYTES = 2_000_000  # of arrays at work: so much fits a core's cache


class _Axis(NamedTuple):
    """How windows lie along an axis: window h has the entries h stride + i dilation."""

    low: int = 0  # zeros before, after and between the images' entries, as in `lax.pad`
    high: int = 0
    between: int = 0
    stride: int = 1
    dilation: int = 1

    def num_windows(self, length: int, k: int) -> int:
        """Return the number of windows with k entries on images with `length`."""
        last = (length - 1) * (self.between + 1) + self.low + self.high
        return (last - (k - 1) * self.dilation) // self.stride + 1

    def turned(self) -> _Axis:
        """Return the axis as a kernel's gradient has it: with strides for dilation."""
        return self._replace(stride=self.dilation, dilation=self.stride)


class _How(NamedTuple):
    """How a convolution multiplies and adds up, wherever its windows lie."""

    groups: int  # of channels
    precision: Any
    sums: np.dtype  # the type to add up in, and of the result
    onednn: bool  # whether oneDNN computes it


def _pad(x, axes):
    """Put zeros around x [N, H, W, C] and between its entries; negative numbers cut.

    If there are fewer axes than H and W, the last ones stay as they are.
    """
    edges = [(0, 0, 0)] * x.ndim
    for i, axis in enumerate(axes, 1):
        edges[i] = axis.low, axis.high, axis.between
    return lax.pad(x, jnp.zeros((), x.dtype), edges)


def _fit(x, axes, lengths):
    """Pad x, with as many zeros after its entries as make its axes so long."""
    fitted = []
    for axis, n, length in zip(axes, x.shape[1:], lengths):
        last = axis.low + (n - 1) * (axis.between + 1)
        fitted.append(axis._replace(high=length - last - 1))
    return _pad(x, fitted)


def _by_phase(x, strides):
    """Take phases apart: [N, H, W, C] -> [sh sw N, H / sh, W / sw, C].

    Entry i of an axis becomes entry i // s of the phase i % s.  If there are fewer
    strides than H and W, the last axes stay as they are.
    """
    n = len(strides)
    shape = [len(x)]
    for length, s in zip(x.shape[1:], strides):
        shape += [length // s, s]
    rest = list(x.shape[n + 1 :])
    x = x.reshape(shape + rest)
    x = jnp.moveaxis(x, range(2, 2 * n + 1, 2), range(n))
    return x.reshape([-1] + shape[1::2] + rest)


def _moved(x, move):
    """Return move(x), which puts entries elsewhere: bfloat16 as integers.

    LLVM may end the process otherwise (fault `moved_half_types`).  A barrier keeps XLA
    from making one loop of the move and the conversion.
    """
    if x.dtype != jnp.bfloat16:
        return move(x)
    moved = move(lax.bitcast_convert_type(x, np.uint16))
    return lax.bitcast_convert_type(lax.optimization_barrier(moved), x.dtype)


def _divisor(count: int, most: int) -> int:
    """Return the largest divisor of `count` that is not above `most`."""
    return next(n for n in range(min(most, count), 0, -1) if count % n == 0)


def _at_once(count: int, num_bytes: int, least: int = 1) -> int:
    """Return how many of `count`, of so many bytes each, to take at a time.

    As many as fit a chunk, or `least`, if these take no more than 16 chunks; and fewer
    where that does not divide `count`.
    """
    fit = _CHUNK_BYTES // num_bytes
    return _divisor(count, max(fit, min(least, 16 * fit), 1))


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the type to add up in: float32 or wider."""
    return dtype if dtype.kind in "fc" and dtype.itemsize > 2 else np.dtype(np.float32)


def _wider(dtype: np.dtype, of: np.dtype) -> np.dtype:
    """Return the wider one of a result's type and the type to add up `of` in."""
    return max(dtype, _wide(of), key=lambda dtype: dtype.itemsize)


def _views(x, places, size, strides, apart) -> list[jax.Array]:
    """List the views [N, H', W', C] of x, one from each place of a window, row-major.

    All arguments but x [N, H, W, C] have an entry for each axis.  Places are so many
    entries apart.
    """
    views = []
    for place in itertools.product(*map(range, places)):
        first = [i * gap for i, gap in zip(place, apart)]
        last = [i + (m - 1) * s + 1 for i, m, s in zip(first, size, strides)]
        limits = [len(x)] + last + [x.shape[-1]]
        views.append(lax.slice(x, [0] + first + [0], limits, [1] + list(strides) + [1]))
    return views


def _entries(x, axes, window, size) -> list[jax.Array]:
    """List the views of the entries of windows: of the first ones, and so on."""
    strides = [axis.stride for axis in axes]
    return _views(_pad(x, axes), window, size, strides, [a.dilation for a in axes])


# ---------------------------------------------------------------------------------
# Convolutions: one way for each form
# ---------------------------------------------------------------------------------


@functools.cache
def _instructions() -> set[str]:
    """Return the names of the processor's instructions, by Linux.

    There are none where oneDNN's variable leaves it none for bfloat16, which XLA does
    not notice (fault `bfloat16_without_instructions`).
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if most == "AVX" or most.startswith(("SSE", "AVX2")):
        return set()
    try:
        with open("/proc/cpuinfo") as file:
            return {*file.read().split()}
    except OSError:  # another system, whose processor may have AMX
        return {"amx_tile"}


def _has_half() -> bool:
    return bool({"amx_bf16", "avx512_bf16"} & _instructions())


class _Target(NamedTuple):
    """How a program is to be compiled, and computed."""

    onednn: bool  # by oneDNN, from which each product has to be hidden
    half: bool  # with factors of bfloat16 in place of float32, as the caller asks


def _by_half(target, precision, *arrays) -> bool:
    """Return whether factors of a product become bfloat16.

    The outermost call asks for it, by `jax.default_matmul_precision("bfloat16")`; JAX
    then writes the precision DEFAULT.  A layer that names "default" writes the same, so
    a layer asks for nothing.
    """
    default = precision == (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    return target.half and default and all(x.dtype == np.float32 for x in arrays)


def _library(x, kernel, axes, how):
    """Convolve by XLA's routine, or by oneDNN."""
    outs = kernel.shape[-1]
    prepare = _for_onednn if how.onednn else _for_xla
    x, kernel, axes, sums = prepare(x, kernel, axes, how.groups, how.sums)
    space = "".join(map(str, range(len(axes))))
    y = lax.conv_general_dilated(
        x,
        kernel,
        window_strides=[axis.stride for axis in axes],
        padding=[(axis.low, axis.high) for axis in axes],
        rhs_dilation=[axis.dilation for axis in axes],
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        feature_group_count=how.groups,
        precision=how.precision,
        preferred_element_type=sums,
    )
    return y[..., :outs]


def _padded(x, axes):
    """Pad x, and return it with axes that have no padding left."""
    return _pad(x, axes), [axis._replace(low=0, high=0, between=0) for axis in axes]


def _for_xla(x, kernel, axes, groups, sums):
    """Return images, kernel, axes and type of sums as XLA's routine is right and fast.

    Negative padding is cut off before (fault `negative_padding`).  The routine is up to
    three times as fast with more than 16 channels on one side and an even number of
    inputs, so channels of zeros are added (JAX 0.10, 0.12).
    """
    *window, ins, outs = kernel.shape
    if any(min(axis.low, axis.high) < 0 for axis in axes):
        x, axes = _padded(x, axes)
    if math.prod(window) > 1 and groups == 1:
        more_ins = -ins % 4 if ins % 2 and ins > 1 else 0
        more_outs = 0
        if outs <= ins <= 16:
            more_ins = 20 - ins
        elif ins < outs <= 16:
            more_outs = 20 - outs
        no = [(0, 0)] * len(window)
        x = jnp.pad(x, [(0, 0)] + no + [(0, more_ins)])
        kernel = jnp.pad(kernel, no + [(0, more_ins), (0, more_outs)])
    return x, kernel, axes, sums


def _for_onednn(x, kernel, axes, groups, sums):
    """Return images, kernel, axes and type of sums as oneDNN is right.

    - The stride of one window becomes 1 (fault `one_window_with_a_stride`).
    - A barrier hides how a kernel is made (fault `reversed_kernels`).
    - Zeros that windows see alone are made (fault `windows_in_padding_alone`).
    - With AMX, half types with strides become float32 (fault
      `half_types_with_strides`), and so do fewer than 16 channels that oneDNN merges
      with the last axis along which windows have several entries, where these fill its
      blocks of 32 (fault `few_channels_with_wide_windows`).
    - Half types become float32 where there are no instructions for bfloat16, since XLA
      would round the sum of each chunk.
    """
    ins = kernel.shape[-2]
    merged = False
    new = []
    alone = False  # whether a window may lie in padding alone
    for axis, length, k in zip(axes, x.shape[1:], kernel.shape):
        spare = axis._replace(stride=1).num_windows(length, k) - 1
        if spare < axis.stride:  # there is one window
            axis = axis._replace(high=axis.high - spare, stride=1)
        allowed = range((k - 1) * axis.dilation + 1)
        alone = alone or axis.low not in allowed or axis.high not in allowed
        new.append(axis)
        if k > 1:  # the last such axis counts
            merged = ins < 16 and axis.dilation == 1 and k * ins % 32 == 0
    axes = new
    if alone:
        x, axes = _padded(x, axes)
        x = lax.optimization_barrier(x)  # or XLA pads in oneDNN again
    strided = any(axis.stride > 1 for axis in axes)
    doubtful = strided or merged or x.dtype == np.float16
    doubtful = doubtful and "amx_tile" in _instructions()
    if x.dtype.itemsize < 4 and (doubtful or not _has_half()):
        x = x.astype(np.float32)
        kernel = kernel.astype(np.float32)
        sums = _wide(sums)
    return x, lax.optimization_barrier(kernel), axes, sums


_VIEWS = 64  # up to so many are added in one loop; of more, XLA makes several


def _block(window) -> int:
    """Return how many entries of a depthwise window's first axis to take at a time."""
    return _divisor(window[0], max(1, _VIEWS // math.prod(window[1:])))


def _reached(x, axis, num_windows, first, count):
    """Return the entries of padded x that meet `count` entries of windows."""
    span = (num_windows - 1) * axis.stride + (count - 1) * axis.dilation + 1
    return lax.dynamic_slice_in_dim(x, first * axis.dilation, span, 1)


def _depthwise(x, kernel, axes):
    """Convolve each channel with its kernel [kh, kw, C], as a sum of products of views.

    XLA has no fast routine for it.  A loop takes blocks of long windows.
    """
    wide = _wide(x.dtype)
    window = kernel.shape[:-1]
    size = list(map(_Axis.num_windows, axes, x.shape[1:], window))
    block = _block(window)
    if block < window[0]:
        x, axes = _padded(x, axes)

        def add(total, first):
            seen = _reached(x, axes[0], size[0], first, block)
            entries = lax.dynamic_slice_in_dim(kernel, first, block)
            return total + _depthwise(seen, entries, axes), None

        zeros = lax.full_like(x, 0, wide, (len(x), *size, x.shape[-1]))
        return lax.scan(add, zeros, jnp.arange(0, window[0], block))[0]
    shape = [-1] + [1] * (x.ndim - 1) + [kernel.shape[-1]]
    weights = kernel.astype(wide).reshape(shape)
    views = _entries(x, axes, window, size)
    return sum(view.astype(wide) * w for view, w in zip(views, weights))


def _depthwise_gradient(x, g, size, axes):
    """Return the gradient [kh, kw, C] of such a kernel; g are the outputs' gradients.

    The loop is over examples, so that each stays in a core's cache.  Parts of one, such
    as quarters, are added first: sums of all outputs would not fit.
    """
    block = _block(size)
    if block < size[0]:
        x, axes = _padded(x, axes)

        def part(first):
            seen = _reached(x, axes[0], g.shape[1], first, block)
            return _depthwise_gradient(seen, g, [block] + size[1:], axes)

        kernel = lax.map(part, jnp.arange(0, size[0], block))
        return kernel.reshape(*size, -1)
    parts = _divisor(g.shape[1], 4)

    def add(totals, example):
        x, g = (y[None].astype(_wide(y.dtype)) for y in example)
        views = _entries(x, axes, size, g.shape[1:-1])
        pieces = (jnp.split(view * g, parts, 1) for view in views)
        return [sum(each, total) for each, total in zip(pieces, totals)], None

    zeros = [jnp.zeros_like(g[:1, ::parts], _wide(g.dtype))] * math.prod(size)
    totals, _ = lax.scan(add, zeros, (x, g))
    sums = [total.reshape(-1, g.shape[-1]).sum(0) for total in totals]
    return jnp.stack(sums).reshape(*size, g.shape[-1])


class _Phased(NamedTuple):
    """An axis with zeros between its entries, as one without them for each phase."""

    axis: _Axis  # of the convolution without zeros
    step: int  # so many phases there are
    taps: int  # entries of the kernel in each phase
    outputs: int  # of each phase
    kept: slice  # which of all phases' outputs, in their order, are outputs


def _phased(axis, length, k) -> _Phased:
    """Take an axis of images with `length` apart, for a kernel with k entries.

    For example, images a b c with a zero between their entries, and a kernel u v w: the
    windows (a 0 b), (0 b 0) and (b 0 c) have the outputs a u + b w, b v and b u + c w.
    Without zeros, the 2 windows (a b) and (b c), of 2 taps, meet the kernel of each
    phase, (v 0) and (u w).  In turn that makes a v, a u + b w, b v and b u + c w, of
    which the first is dropped and 3 are kept.
    """
    step = axis.between + 1
    if step == 1:
        return _Phased(axis, 1, k, axis.num_windows(length, k), slice(None))
    size = axis._replace(stride=1, dilation=1).num_windows(length, k)
    # So many outputs come before the first, so that the phases begin with it.
    dropped = -(axis.low + 1) % step
    taps = -(-k // step)
    count = -(-(size + dropped) // step)
    low = (axis.low + dropped + 1) // step - 1
    new = _Axis(low, count + taps - 1 - low - length)
    kept = slice(dropped, dropped + size, axis.stride)
    return _Phased(new, step, taps, count, kept)


def _phases(x, kernel, axes, how):
    """Convolve images with zeros between their entries.

    Transposed convolutions are of this kind, and images' gradients of strided ones.
    Where entries are `step` apart, and the last zero before them is the first entry of
    a window, output q step + r is the sum of x[q + i] kernel[i step + step - 1 - r]
    over i.  So the phases r are features of one convolution of x without zeros
    (sub-pixel convolution, Shi et al. 2016).  Along such axes, a dilated kernel gets
    zeros between its entries, and strides leave out outputs.
    """
    *window, ins, outs = kernel.shape
    n = len(axes)
    groups = how.groups
    gaps = [axis.dilation - 1 if axis.between else 0 for axis in axes]
    window = [k + (k - 1) * gap for k, gap in zip(window, gaps)]
    kernel = kernel.reshape(1, *kernel.shape[:n], -1)
    kernel = _fit(kernel, [_Axis(between=gap) for gap in gaps], window)
    phases = list(map(_phased, axes, x.shape[1:], window))
    steps = [phase.step for phase in phases]
    taps = [phase.taps for phase in phases]
    counts = [phase.outputs for phase in phases]

    def by_phase(kernel):
        kernel = _fit(kernel, [_Axis()] * n, map(operator.mul, taps, steps))
        kernel = lax.rev(_by_phase(kernel, steps), [0])
        kernel = kernel.reshape(-1, *taps, ins, groups, outs // groups)
        return jnp.moveaxis(kernel, 0, -2).reshape(*taps, ins, -1)

    def in_order(y):
        y = y.reshape(len(x), *counts, groups, *steps, outs // groups)
        pairs = [(1 + i, 2 + n + i) for i in range(n)]  # an axis of counts, of steps
        y = y.transpose(0, *itertools.chain(*pairs), 1 + n, -1)
        lengths = list(map(operator.mul, counts, steps))
        y = y.reshape([len(x)] + lengths + [outs])
        return y[tuple([slice(None)] + [phase.kept for phase in phases])]

    y = _forward(x, _moved(kernel, by_phase), [phase.axis for phase in phases], how)
    return _moved(y, in_order)


def _windows_of_planes(x, axis, depth, num_windows, groups=1) -> Callable:
    """Return a function (i, count) that makes windows along depth of x [N, D, H, W, I].

    Windows are counted over all examples, num_windows each.  The function makes those
    from i to i + count, all of one example: [count, H, W, depth I].  The planes of a
    window stand side by side as channels; each group's channels stay together.
    """
    stride = axis.stride
    length = (num_windows + (depth - 1) * axis.dilation // stride) * stride
    examples = len(x)
    x = _by_phase(_fit(x, [axis], [length]), [stride])  # [s N, D / s, H, W, I]
    plane = x.shape[2:-1]

    def windows(i, count):
        example, first = divmod(i, num_windows)
        views = []
        for place in range(0, depth * axis.dilation, axis.dilation):
            entry, phase = divmod(place, stride)
            at = [phase * examples + example, first + entry] + [0] * (x.ndim - 2)
            view = lax.dynamic_slice(x, at, (1, count, *x.shape[2:]))
            views.append(view.reshape(count, *plane, groups, -1))
        return jnp.concatenate(views, -1).reshape(count, *plane, -1)

    return windows


def _planes(x, kernel, axes, how):
    """Convolve images of three axes by convolutions of two; of n axes, of n - 1.

    A plane of the output is a convolution of the planes in its window.  A loop takes as
    many planes of an example as fit a core's cache.
    """
    depth, *window, _, outs = kernel.shape
    num_planes = axes[0].num_windows(x.shape[1], depth)
    kernel = jnp.moveaxis(kernel, 0, -3).reshape(*window, -1, outs)
    windows = _windows_of_planes(x, axes[0], depth, num_planes, how.groups)

    def planes(i, count):
        return _forward(windows(i, count), kernel, axes[1:], how)

    made = jax.eval_shape(lambda: planes(0, 1))
    num_bytes = (x[0, 0].size * depth + made.size) * x.dtype.itemsize
    count = _at_once(num_planes, num_bytes)
    y = lax.map(lambda i: planes(i, count), jnp.arange(0, len(x) * num_planes, count))
    return y.reshape(len(x), num_planes, *y.shape[2:])


def _forward(x, kernel, axes, how):
    """Convolve images in the fastest way for their form.

    - Depthwise: a sum of products.
    - With zeros between the images' entries: by phases.
    - Along three axes or more (four with oneDNN): by planes.
    - All others: by XLA's routine, or oneDNN's.
    """
    ins, outs = kernel.shape[-2:]
    if ins == 1 < outs == how.groups:
        return _depthwise(x, kernel[..., 0, :], axes)
    if any(axis.between for axis in axes):
        return _phases(x, kernel, axes, how)
    is_direct = len(axes) <= (3 if how.onednn else 2)
    return (_library if is_direct else _planes)(x, kernel, axes, how)


# ---------------------------------------------------------------------------------
# Gradients of kernels: convolutions whose channels are the examples
# ---------------------------------------------------------------------------------


def _kernel_gradient(x, g, size, axes, how):
    """Return the gradient [kh, kw, I, O] of a kernel of this size.

    g [N, H', W', O] are the gradients of the outputs.  Entry i of a kernel of one axis
    has the sum of x[n, h stride + i dilation, :, None] g[n, h] over n and h.
    """
    ins = x.shape[-1]
    outs = g.shape[-1]
    few = 8 if how.onednn else 16
    narrow = outs <= min(few, ins - 1)
    spread = any(axis.between for axis in axes)
    dilated = any(axis.dilation > 1 for axis in axes)
    strided = any(axis.stride > 1 for axis in axes)
    if (narrow or spread) and not (dilated or strided):
        # x and g change places, in the gradient of another convolution, with more
        # outputs, or with strides in place of zeros between the images' entries.
        turned = [
            _Axis(low=k - 1 - axis.low, stride=axis.between + 1)
            for k, axis in zip(size, axes)
        ]
        y = _kernel_gradient(g, x, size, turned, how)
        return lax.rev(y, range(len(size))).swapaxes(-1, -2)
    if spread or dilated:
        x, g, axes = _undilated(x, g, size, axes)
    axes = [  # without entries that no window reaches
        axis._replace(high=(m - 1) * axis.stride + k - n - axis.low)
        for axis, n, m, k in zip(axes, x.shape[1:], g.shape[1:], size)
    ]
    way = _sum_of_examples if len(size) < 3 else _sum_of_planes
    return way(x, g, size, axes, how)


def _undilated(x, g, size, axes):
    """Return x, g and axes of the same gradient, with neither dilation nor zeros.

    Every d-th output, and every d-th entry of its windows, are an example of their own.
    """
    strides = [axis.stride for axis in axes]
    dilation = [axis.dilation for axis in axes]
    counts = [-(-n // d) for n, d in zip(g.shape[1:], dilation)]
    spans = [(n - 1) * s + k for n, s, k in zip(counts, strides, size)]
    lengths = [
        (d - 1) * s + (n - 1) * d + 1 for n, s, d in zip(spans, strides, dilation)
    ]
    x = _fit(x, axes, lengths)
    g = _fit(g, [_Axis()] * len(size), map(operator.mul, counts, dilation))
    x = jnp.concatenate(_views(x, dilation, spans, dilation, strides))
    g = jnp.concatenate(_views(g, dilation, counts, dilation, [1] * len(size)))
    return x, g, [_Axis(stride=s) for s in strides]


def _add_unseen_half(total, y):
    """Return total + y / 2, which oneDNN does not see.

    XLA would give oneDNN the addition of y itself, which rounds the total to y's type
    (fault `sums_rounded_to_half_types`).  Half of y is exact, and hides the addition.
    """
    return total + y.astype(total.dtype) / 2


def _sum_of_examples(x, g, size, axes, how):
    """Do as `_kernel_gradient`, without dilation, by a convolution of each chunk.

    Its channels are the chunk's examples, its kernel is g, and its one image is x,
    whose last axis and channels are a single axis: [1, H, W I, count].  The entries of
    a window are I apart there, so the outputs are [1, kh, kw I, O].
    """
    ins = x.shape[-1]
    outs = g.shape[-1]
    wide = _wide(x.dtype)
    edges = [_Axis(axis.low, axis.high, dilation=axis.stride) for axis in axes]
    last = edges[-1]
    edges[-1] = _Axis(last.low * ins, last.high * ins, dilation=last.dilation * ins)
    num_bytes = 2 * (x[0].size + g[0].size) * x.dtype.itemsize
    if how.onednn:
        # It is slow with fewer channels than 16, but for large images of float32, which
        # leave the cache.
        small = num_bytes <= 2**21 or x.dtype.itemsize < 4
        count = _divisor(len(x), max(16 if small else 1, _CHUNK_BYTES // num_bytes))
    else:  # XLA's own routine is slow with few, above all if both sides have few
        count = _at_once(len(x), num_bytes, least=32 if outs <= 16 else 8)

    def add(total, first):
        image = jnp.moveaxis(lax.dynamic_slice_in_dim(x, first, count), 0, -1)
        kernel = jnp.moveaxis(lax.dynamic_slice_in_dim(g, first, count), 0, -2)
        if not how.onednn:
            image = image.astype(wide)
            kernel = kernel.astype(wide)
        image = image.reshape(1, *image.shape[:-3], -1, count)
        y = _library(image, kernel, edges, how)[0]
        return _add_unseen_half(total, y), None

    total = lax.full_like(x, 0, wide, (*size[:-1], size[-1] * ins, outs))
    total, _ = lax.scan(add, total, jnp.arange(0, len(x), count))
    return 2 * total.reshape(*size, ins, outs)  # of halves


def _sum_of_planes(x, g, size, axes, how):
    """Do as `_kernel_gradient`, without dilation, along three axes or more.

    For each entry of a window's depth, it is a gradient along the other axes, whose
    examples are the planes of all examples.
    """
    axis, *rest = axes
    span = (g.shape[1] - 1) * axis.stride + 1
    x = _fit(x, [axis], [span + size[0] - 1])

    def at(entry):
        seen = lax.dynamic_slice_in_dim(x, entry, span, 1)
        seen = lax.slice_in_dim(seen, 0, span, axis.stride, 1)
        seen = seen.reshape(-1, *x.shape[2:])
        planes = g.reshape(-1, *g.shape[2:])
        return _kernel_gradient(seen, planes, size[1:], rest, how)

    return lax.map(at, jnp.arange(size[0]))


# ---------------------------------------------------------------------------------
# Any convolution: in one of these ways on CPUs
# ---------------------------------------------------------------------------------


def _axes(padding, lhs_dilation, window_strides, rhs_dilation, **_) -> list[_Axis]:
    """Return the axes along which windows lie, by a convolution's parameters."""
    parts = zip(padding, lhs_dilation, window_strides, rhs_dilation)
    return [_Axis(low, high, n - 1, s, d) for (low, high), n, s, d in parts]


def _is_kernel_gradient(lhs, rhs, size, spec, batch_groups, feature_groups) -> bool:
    """Return whether a convolution is the gradient of a kernel, of this size.

    JAX writes it with the features of lhs, which are examples, before its batch, which
    are channels; or, of a depthwise kernel, with a group for each channel.  Its windows
    are large, and its outputs are few.  A wrong guess costs time, never numbers: both
    ways compute the same sums.
    """
    batch, features = spec.lhs_spec[:2]
    out, _, *window = spec.rhs_spec
    if batch_groups > 1:
        return lhs.shape[batch] == rhs.shape[out] == batch_groups
    entries = math.prod(rhs.shape[i] for i in window)
    few = math.prod(size) < entries
    return features < batch and feature_groups == 1 and few


def _convolve(made, lhs, rhs, *, target, dimension_numbers, precision, **params):
    """Convolve in any form, in the ways above."""
    batch, features, *space = dimension_numbers.lhs_spec
    out, ins, *window = dimension_numbers.rhs_spec
    made_batch, made_features, *made_space = dimension_numbers.out_spec
    size = [made.shape[i] for i in made_space]
    axes = _axes(**params)
    batch_groups = params["batch_group_count"]
    both = batch_groups, params["feature_group_count"]
    is_gradient = _is_kernel_gradient(lhs, rhs, size, dimension_numbers, *both)
    groups = max(both)

    # Under `vmap`, convolutions run one after another, which is faster.
    @jax.custom_batching.sequential_vmap
    def convolve(lhs, rhs):
        x = lhs.transpose(batch, *space, features)
        kernel = rhs.transpose(*window, ins, out)
        sums = made.dtype
        if lhs.dtype == np.float16 or not target.onednn:
            sums = _wider(made.dtype, lhs.dtype)  # oneDNN would add up in float16
        if groups == 1 and _by_half(target, precision, x, kernel):
            x = x.astype(jnp.bfloat16)
            kernel = kernel.astype(jnp.bfloat16)
            sums = x.dtype
        how = _How(groups, precision, sums, target.onednn)
        if is_gradient:
            y = gradient(x.swapaxes(0, -1), jnp.moveaxis(kernel, -2, 0), how)
        else:
            if batch_groups > 1:  # as groups of features they are faster
                x = jnp.moveaxis(x.reshape(groups, -1, *x.shape[1:]), 0, -2)
                x = x.reshape(*x.shape[:-2], -1)
            y = _forward(x, kernel, axes, how)
            y = lax.optimization_barrier(y) if target.onednn else y  # as in `_multiply`
        order = np.argsort([made_batch, *made_space, made_features])
        return y.astype(made.dtype).transpose(order)

    def gradient(x, g, how):  # of the kernel
        turned = [axis.turned() for axis in axes]
        if batch_groups > 1:
            return _depthwise_gradient(x, g, size, turned)[None]
        return jnp.moveaxis(_kernel_gradient(x, g, size, turned, how), -2, 0)

    return convolve(lhs, rhs)


def _one_by_one(convolve):
    """Return a function that, under `vmap` over kernels, convolves with each by itself.

    JAX makes one convolution of groups, for which cuDNN is slow.
    """
    each = jax.custom_batching.custom_vmap(convolve)

    @each.def_vmap
    def apart(count, batched, lhs, rhs):
        if not all(batched):
            axes = [0 if mapped else None for mapped in batched]
            return jax.vmap(convolve, axes)(lhs, rhs), True
        return jnp.stack([each(lhs[i], rhs[i]) for i in range(count)]), True

    return each


class _NoGradients(ValueError):
    def __init__(self):
        super().__init__(
            "fast(f) has no gradients, since its operations are replaced already; wrap "
            "the outermost function: fast(jax.grad(f)) in place of jax.grad(fast(f))"
        )


def _refuse(primals, tangents):
    raise _NoGradients


# ---------------------------------------------------------------------------------
# Products and sums
# ---------------------------------------------------------------------------------


def _in_a_row(axes):
    return len(axes) > 0 and bool((np.diff(axes) == 1).all())


class _Factor(NamedTuple):
    """A factor of a product."""

    x: jax.Array
    contracted: tuple  # the axes that the product sums over
    batch: tuple  # the axes of which each entry has a product of its own

    def joined(self) -> _Factor:
        """Make one axis of the axes that are contracted, which stand in a row."""
        first = self.contracted[0]
        behind = first + len(self.contracted)
        shape = self.x.shape
        joined = math.prod(shape[first:behind])
        x = self.x.reshape(*shape[:first], joined, *shape[behind:])
        less = behind - first - 1
        batch = tuple(i - less if i > first else i for i in self.batch)
        return _Factor(x, (first,), batch)


def _term_by_term(made, x, y):
    """Multiply many small matrices by adding their columns times rows, in one loop.

    For each, oneDNN takes as long as a call of it, and XLA has slow forms too.
    """

    def terms(factor):  # first
        axes = factor.contracted + factor.batch
        return jnp.moveaxis(factor.x, axes, range(len(axes)))

    dtype = _wider(made.dtype, x.x.dtype)
    first = 1 + len(x.batch)
    x = terms(x).astype(dtype)
    y = terms(y).astype(dtype)
    more = range(x.ndim, x.ndim + y.ndim - first)
    y = lax.expand_dims(y, range(first, x.ndim))
    x = lax.expand_dims(x, more)
    return sum(map(operator.mul, x[1:], y[1:]), x[0] * y[0]).astype(made.dtype)


def _multiply(made, x, y, *rest, primitive, target, joined, left, small, **how):
    """Multiply x and y so that XLA moves none of them in memory.

    XLA copies factors to sum over several axes, so these are `joined` to one.  Where a
    transposition puts `left`, the axes of x, behind the axes of y, as in gradients of
    weights, the factors change places; else, `left` is empty.

    XLA gives oneDNN the operations that follow a product too, which a barrier hides
    (faults `activation_in_place_of_a_product` and `sums_rounded_to_half_types`).  Sums
    of float16 become float32 (fault `slow_products_of_float16`), and so does bfloat16
    where the processor has no instructions for it.  Many `small` matrices are
    multiplied in a loop.
    """
    if small or joined:
        numbers = zip(*how["dimension_numbers"])
        factors = [_Factor(z, *axes) for z, axes in zip((x, y), numbers)]
        if small:
            return lax.optimization_barrier(_term_by_term(made, *factors))
        one, other = (factor.joined() for factor in factors)
        if left:
            one, other = other, one
        contracted = one.contracted, other.contracted
        how["dimension_numbers"] = contracted, (one.batch, other.batch)
        x = one.x
        y = other.x
    dtype = None  # to which factors are cast
    if target.onednn and made.dtype == np.float16:
        how["preferred_element_type"] = np.dtype(np.float32)
        how["precision"] = None
    if target.onednn and x.dtype == y.dtype == jnp.bfloat16 and not _has_half():
        dtype = np.float32
        how["preferred_element_type"] = _wide(made.dtype)
    if _by_half(target, how["precision"], x, y, made):
        dtype = how["preferred_element_type"] = jnp.bfloat16
        how["precision"] = None
    if dtype is not None:
        x = x.astype(dtype)
        y = y.astype(dtype)
    product = primitive.bind(x, y, *rest, **how)
    if target.onednn:
        product = lax.optimization_barrier(product)
    return jnp.moveaxis(product, range(-len(left), 0), left).astype(made.dtype)


_LARGE = 2**15  # numbers in all
_FEW = 64  # numbers of one sum
_SMALL = 12  # rows and columns of matrices that are multiplied in a loop


def _add_up(made, x, *, primitive, eighths, **how):
    """Sum over axes, or take the maximum: in float32, and by adding eighths.

    XLA rounds sums of half types, such as gradients of biases, after each addition,
    which takes thirty times as long.  It adds the numbers of a sum one after another,
    and YNNPACK, which adds several at a time, is wrong before JAX 0.12 (faults
    `sums_of_broadcasts`, `sums_of_many_small_products`, `sums_of_rank_7` and
    `sums_of_rank_8`).  There, eighths are added for sums over axes in a row, as long as
    eighths are large: that is fast too, and rounds less.  A barrier lets XLA compute
    all eighths and their sum in one loop.
    """
    y = x.astype(_wide(x.dtype))
    if not eighths:
        return primitive.bind(y, **how).astype(made.dtype)
    first = how["axes"][0]
    behind = first + len(how["axes"])
    y = y.reshape(math.prod(x.shape[:first]), -1, math.prod(x.shape[behind:]))
    combine = lax.max if primitive is lax.reduce_max_p else lax.add
    rest = []  # the numbers that eighths leave over
    while y.size >= _LARGE and y.shape[1] >= _FEW:
        n = y.shape[1] // 8
        *parts, odd = jnp.split(y, [n * i for i in range(1, 9)], 1)
        y = lax.optimization_barrier(functools.reduce(combine, parts))
        rest.append(odd)
    how["axes"] = (1,)
    y = primitive.bind(jnp.concatenate([y] + rest, 1), **how)
    return y.reshape(made.shape).astype(made.dtype)


def _max_pool_gradient(made, g, x, *, padding, **how):
    """Return the gradient of x, images [N, H, W, C] or an array of any axes.

    g [N, H', W', C] is the gradient of the outputs.  Each of its numbers is added where
    its window's first maximum is.  XLA's own way takes more than ten times as long.  As
    there, a number takes the place of an earlier one that is not as large, or is nan,
    and padding takes none.  A barrier keeps XLA from looking for the places again for
    each entry of a window.
    """
    window = how["window_dimensions"]
    strides = how["window_strides"]
    dtype = _wide(x.dtype)

    def views(x):
        x = lax.pad(x, x.dtype.type(-math.inf), [(*ends, 0) for ends in padding])
        found = _views(x[None, ..., None], window, g.shape, strides, [1] * x.ndim)
        return [view[0, ..., 0] for view in found]

    def is_inside(place):  # of each window: axes on which all are have a size of 1
        within = []
        for k, m, s, (low, _), n in zip(place, g.shape, strides, padding, x.shape):
            at = np.arange(m) * s + k - low
            inside = (at >= 0) & (at < n)
            within.append(inside[:1] if inside.all() else inside)
        apart = np.meshgrid(*within, indexing="ij", sparse=True)
        return functools.reduce(operator.and_, apart)

    found, turn = jax.vjp(views, x.astype(dtype))
    best = found[0]
    begun = False  # whether an entry of the window is inside
    place = lax.full_like(best, 0, np.int8)
    for i, at in enumerate(itertools.product(*map(range, window))):
        inside = is_inside(at)
        if i > 0:
            stays = (best >= found[i]) & begun | ~inside
            place = jnp.where(stays, place, i)
            best = jnp.where(stays, best, found[i])
        begun = begun | inside
    place = lax.optimization_barrier(place)
    parts = [jnp.where(place == i, g, 0).astype(dtype) for i in range(len(found))]
    return turn(parts)[0].astype(made.dtype)


# Operations on numbers that have the same place in arrays.
_ELEMENTWISE = """
    abs acos acosh add add_any asin asinh atan atan2 atanh cbrt cos cosh div erf erfc
    exp exp2 expm1 integer_pow log log1p logistic max min mul neg pow rsqrt select_n sin
    sinh sqrt square sub tan tanh
""".split()
_LOGARITHMS = {"acosh", "asinh", "atanh", "log", "log1p", "pow"}


def _round(made, *arrays, primitive, several, **how):
    """Compute an operation on bfloat16 in float32, rounded to even.

    XLA's own rounding takes longer than the operation.  Here, half of the last place
    that is kept is added to the bits, and the rest is cut off.  The sum would overflow
    for a nan whose bits are all ones, which logarithms return: as by XLA, the sign
    alone is kept of a nan.  A barrier keeps XLA from computing a number again for each
    of `several` operations that use it.
    """

    def widen(x):
        bits = lax.bitcast_convert_type(x, np.uint16).astype(np.uint32) << 16
        return lax.bitcast_convert_type(bits, np.float32)

    arrays = [widen(x) if x.dtype == jnp.bfloat16 else x for x in arrays]
    y = primitive.bind(*arrays, **how)
    bits = lax.bitcast_convert_type(y, np.uint32)
    rounded = (bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16
    if primitive.name in _LOGARITHMS:
        rounded = lax.select(y == y, rounded, bits >> 16 & 0x8000 | 0x7FC0)
    y = lax.bitcast_convert_type(rounded.astype(np.uint16), made.dtype)
    return lax.optimization_barrier(y) if several else y


# ---------------------------------------------------------------------------------
# Options of the compiler
# ---------------------------------------------------------------------------------

_ONEDNN = "xla_cpu_experimental_onednn_custom_call"
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_LEFT_OUT = "xla_disable_hlo_passes"
_SINGLE = (
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
)


def _version() -> tuple[int, ...]:
    return tuple(map(int, jaxlib.__version__.split(".")[:2]))  # it may not be JAX's


def compiler_options(backend: str | None = None) -> dict[str, bool | str]:
    """Return the options with which XLA is right and fast in this version of jaxlib.

        options = compiler_options()
        step = jax.jit(fast(step, options), compiler_options=options)

    `backend` is JAX's default one, or "cpu", "gpu", "tpu".  There are options on CPUs:

    - jaxlib 0.10 and 0.11 leave no reductions to YNNPACK, whose sums are wrong there.
    - jaxlib 0.11 and 0.12 on x86-64 convolve and multiply by oneDNN, unless programs
      are kept in JAX's persistent cache (fault `programs_that_cannot_be_kept`).  Two
      passes that come with it are left out (faults `softmax_without_nan` and
      `roundings_that_are_dropped`).

    An option that XLA_FLAGS names is left to XLA_FLAGS, but for the environment's
    FAST_CPU and FAST_CPU_LEAVE, with which there is no oneDNN: see `jit`.
    """
    return _options(backend, {}, onednn=True)


def _flags() -> dict[str, str]:
    """Return the options that XLA_FLAGS names."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return dict(flag.lstrip("-").partition("=")[::2] for flag in flags)


def _has_onednn(options: dict) -> bool:
    """Return whether programs have oneDNN, by these options or by XLA_FLAGS."""
    named = {_ONEDNN: False} | _flags() | options
    return str(named[_ONEDNN]).lower() not in ("false", "0")


def _keeps_programs() -> bool:
    """Return whether JAX keeps programs in its persistent cache, as it is set now."""
    folder = _config.jax_compilation_cache_dir
    return bool(folder and _config.jax_enable_compilation_cache)


def _is_off() -> bool:
    return os.environ.get("FAST_CPU") == "0"


def _switch() -> str:
    """Return the variable of the environment by which operations stay, or ""."""
    leave = "FAST_CPU_LEAVE" if os.environ.get("FAST_CPU_LEAVE") else ""
    return "FAST_CPU=0" if _is_off() else leave


def _obstacle(backend: str | None, asked: dict) -> str:
    """Return the reason why a program has no oneDNN, or "" where it may have it."""
    backend = backend or jax.default_backend()
    machine = platform.machine()
    if backend != "cpu":
        return f"the backend is {backend}"
    if machine.lower() not in ("x86_64", "amd64"):
        return f"the processor is {machine}"
    if _version() not in ((0, 11), (0, 12)):
        return f"it was not tried with jaxlib {jaxlib.__version__}"
    if _switch():
        return f"the environment has {_switch()}"
    if _keeps_programs():
        return "JAX's persistent cache cannot keep programs with it"
    for where, named in ("XLA_FLAGS", _flags()), ("compiler_options", asked):
        if _LEFT_OUT in named:
            return f"{where} names {_LEFT_OUT}"
        if _ONEDNN in named and not _has_onednn(named):
            return f"{where} switches it off"
    return ""


def _options(backend: str | None, asked: dict, onednn: bool) -> dict:
    """Return the options beside those that are asked for, with oneDNN if it may be."""
    version = _version()
    flags = _flags()
    options: dict = {}
    if (backend or jax.default_backend()) != "cpu":
        return options
    if _switch() and _has_onednn({}):  # XLA_FLAGS would give it products that stay
        options = {_ONEDNN: False}
        flags.pop(_ONEDNN)
    if _is_off():
        return options
    if version in ((0, 10), (0, 11)):
        options[_YNNPACK] = _SINGLE
    if onednn and not _obstacle(backend, asked):
        options = {
            _ONEDNN: True,
            _YNNPACK: "" if version == (0, 11) else "LIBRARY_FUSION_TYPE_REDUCE",
            _LEFT_OUT: "onednn-ops-rewriter,simplify-fp-conversions",
        }
    return {name: value for name, value in options.items() if name not in flags}


# ---------------------------------------------------------------------------------
# Programs: their parts are replaced, at any depth
# ---------------------------------------------------------------------------------


def _are_inexact(eqn: Any) -> bool:
    return all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars[:2])


class _Around(NamedTuple):
    """What ways ask about the program around an equation; variables are by their id."""

    uses: collections.Counter  # how many equations take a variable
    orders: dict  # the permutation of all transpositions that follow a variable
    widened: set  # shapes of half types that become wider in the program


def _look_around(eqns: list) -> _Around:
    uses = collections.Counter(v for eqn in eqns for v in {*map(id, eqn.invars)})
    orders: dict = {}
    widened = set()
    for eqn in reversed(eqns):
        if eqn.primitive is lax.transpose_p:  # several in a row are one
            order = eqn.params["permutation"]
            after = orders.get(id(eqn.outvars[0]), range(len(order)))
            orders[id(eqn.invars[0])] = [order[i] for i in after]
        if eqn.primitive is lax.convert_element_type_p and _are_inexact(eqn):
            x = eqn.invars[0].aval
            if _wide(x.dtype) != x.dtype:
                widened.add(x.shape)
    return _Around(uses, orders, widened)


class _Way(NamedTuple):
    """How a CPU computes some operations.  All that is said of a way stands here.

    options(eqn, here, target, around) returns the options of `compute`, or None where
    the way does not fit.  `here` is whether the equation names no sharding of its own.
    """

    compute: Callable  # (made, *arrays, **options, **the equation's parameters)
    options: Callable
    has_products: bool = False  # with oneDNN, none may stay unhidden
    refuses_gradients: bool = True  # as for ways whose derivative is another number
    drops_sharding: bool = False  # `vmap` could not map groups with one
    on_gpu: Callable | None = None  # given the operation, what GPUs compute

    @property
    def name(self) -> str:
        return self.compute.__name__.strip("_")


def _to_convolve(eqn, here, target, around):
    return dict(target=target) if _are_inexact(eqn) else None


def _to_multiply(eqn, here, target, around):
    joined = several = small = False
    left = range(0)
    if here and eqn.primitive is lax.dot_general_p and _are_inexact(eqn):
        x = eqn.invars[0].aval
        made = eqn.outvars[0].aval
        (contracted, other), (batch, _) = eqn.params["dimension_numbers"]
        # XLA lacks some of the others (fault `wide_results_of_half_products`).
        same = x.dtype == made.dtype != np.float16
        joined = same and _in_a_row(contracted) and _in_a_row(other)
        several = joined and len(contracted) > 1
        axes = range(len(batch), x.ndim - len(contracted))
        order = around.orders.get(id(eqn.outvars[0]))
        if joined and order and order[-1] in axes:
            left = axes
        if len(batch) > 0 and len(contracted) == 1 and x.shape[contracted[0]] <= _SMALL:
            small = math.prod(made.shape[len(batch) :]) <= _SMALL**2
    if not (target.onednn or several or small):
        return None
    how = dict(primitive=eqn.primitive, joined=joined, left=left, small=small)
    return how | dict(target=target)


def _to_reduce(eqn, here, target, around):
    if not (here and _are_inexact(eqn)):
        return None
    x = eqn.invars[0].aval
    axes = eqn.params.get("axes", ())  # windows have none
    narrow = eqn.primitive is not lax.reduce_max_p and _wide(x.dtype) != x.dtype
    # In other versions YNNPACK is right and fast, but for numbers made of half types:
    # XLA makes these in the loop that adds eighths, and for YNNPACK in memory.
    slow = x.shape in around.widened or _version() < (0, 12)
    eighths = slow and _in_a_row(axes) and isinstance(x.size, int) and x.size >= _LARGE
    eighths = bool(eighths and math.prod(x.shape[i] for i in axes) >= _FEW)
    how = dict(primitive=eqn.primitive, eighths=eighths)
    return how if narrow or eighths else None


def _to_place(eqn, here, target, around):
    few = math.prod(eqn.params["window_dimensions"]) <= 64
    is_max = eqn.params["select_prim"] is lax.ge_p and _are_inexact(eqn)
    return {} if here and few and is_max else None


def _to_round(eqn, here, target, around):
    several = around.uses[id(eqn.outvars[0])] > 1
    half = eqn.outvars[0].aval.dtype == jnp.bfloat16
    return dict(primitive=eqn.primitive, several=several) if half else None


_CONVOLVE = _Way(
    _convolve, _to_convolve, has_products=True, drops_sharding=True, on_gpu=_one_by_one
)
_MULTIPLY = _Way(_multiply, _to_multiply, has_products=True, refuses_gradients=False)
_SUM = _Way(_add_up, _to_reduce, refuses_gradients=False)
_MAX = _SUM._replace(refuses_gradients=True)  # eighths share a tie's gradient unevenly
_POOL = _Way(_max_pool_gradient, _to_place, refuses_gradients=False)
_ROUND = _Way(_round, _to_round)

# By the name of a primitive: its ways, of which the first that has options is taken.
_WAYS = dict.fromkeys(_ELEMENTWISE, (_ROUND,)) | {
    "conv_general_dilated": (_CONVOLVE, _MULTIPLY),  # the second for integers
    "dot_general": (_MULTIPLY,),
    "ragged_dot_general": (_MULTIPLY,),
    "reduce_sum": (_SUM,),
    "reduce_max": (_MAX,),
    "reduce_window_sum": (_SUM,),
    "select_and_scatter_add": (_POOL,),
}


class _CannotEnter(ValueError):
    """Raised with oneDNN's options for an equation that may hold unhidden products."""

    def __init__(self, part: str):
        self.part = part
        super().__init__(
            f"fast(f, options) cannot hide {part} from oneDNN; compile by "
            "fast_cpu.jit, or without options for fast and for jax.jit"
        )


_STRICT = False  # whether a way that fails raises its error: in tests


_TOLD: set[str] = set()  # primitives of which a warning told


def _warn(text: str) -> None:
    """Warn at the line of the user that is being run."""
    files = [os.path.basename(call.filename) for call in inspect.stack(0)]
    ours = [i for i, x in enumerate(files) if x in ("fast_cpu.py", "pjax_ensemble.py")]
    warnings.warn(text, stacklevel=ours[-1] + 2)


def _is_left(primitive: str) -> bool:
    """Return whether the environment says that a primitive stays."""
    names = os.environ.get("FAST_CPU_LEAVE", "").split(",")
    unknown = {*names} - {*_WAYS, ""}
    if unknown:
        raise ValueError(f"FAST_CPU_LEAVE names {unknown}; expected some of {[*_WAYS]}")
    return _is_off() or primitive in names


_EMPTY = "an array is empty"


class _Choice(NamedTuple):
    """The equation that takes an equation's place, or the reason why it stays."""

    new: Any  # or None
    reason: str


def _choose(eqn: Any, target: _Target, around: _Around) -> _Choice:
    """Choose how to compute an equation of `_WAYS`: the one door to all ways.

    Arrays that are empty or have explicit shardings stay as they are, and so does an
    equation whose way cannot be traced: most ways need sizes that are numbers, not
    symbols.
    """
    name = eqn.primitive.name
    sizes = {n for v in eqn.invars + eqn.outvars for n in v.aval.shape}
    numbers = {n for n in sizes if isinstance(n, int)}
    if 0 in numbers:
        return _Choice(None, _EMPTY)
    if _is_left(name):
        return _Choice(None, f"the environment has {_switch()}")
    if jax.sharding.AxisType.Explicit in _mesh(eqn).axis_types:
        return _Choice(None, "its shardings are explicit")
    params = dict(eqn.params)
    sharding = params.get("out_sharding")
    # Inside of `shard_map`, gradients name a mesh that leaves nothing to place.
    here = sharding is None or sharding.mesh.are_all_axes_manual
    for way in _WAYS[name]:
        try:
            options = way.options(eqn, here, target, around)
            if options is None:
                continue
            if sharding and (here or way.drops_sharding):
                params["out_sharding"] = None
            return _Choice(_call(way, options, params, eqn, target), way.name)
        except Exception as error:
            if sizes != numbers:
                return _Choice(None, "its sizes are symbols")
            if _STRICT:
                raise
            cause = f"'{way.name}' fails with JAX {jax.__version__}: {error!r}"
            if name not in _TOLD:
                _TOLD.add(name)
                _warn(f"fast_cpu leaves {name} to XLA, which may be slow: {cause}")
            return _Choice(None, cause)
    return _Choice(None, "no way is faster")


def _replace(eqn: Any, target: _Target, around: _Around) -> Any:
    """Replace an equation of `_WAYS` by a call, where that is faster and fits.

    With oneDNN every product is replaced, so that a barrier stands behind it.
    """
    new, reason = _choose(eqn, target, around)
    must = target.onednn and _WAYS[eqn.primitive.name][-1].has_products
    if must and new is None and reason != _EMPTY:
        raise _CannotEnter(f"{eqn.primitive} of these arrays ({reason})")
    return new or eqn


def _mesh(eqn: Any) -> Any:
    """Return the mesh of an equation's arrays, which is empty outside of meshes."""
    meshes = [v.aval.sharding.mesh for v in eqn.invars + eqn.outvars]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def _form(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _call(way: _Way, options: dict, params: dict, eqn: Any, target: _Target) -> Any:
    """Return `eqn` with a call of `way` in its place, for the same shape and types."""
    form = _form(eqn.outvars[0].aval)
    how = tuple(options.items()), tuple(params.items())
    call = _shared(eqn.primitive, way, *how, form, target.onednn)
    in_mesh = jax.sharding.use_abstract_mesh(_mesh(eqn))
    # A convolution without precision stays without.
    with jax.disable_jit(False), in_mesh, jax.default_matmul_precision(None):
        program = jax.make_jaxpr(call)(*[v.aval for v in eqn.invars])
    found = _form(program.out_avals[0])
    if found != form:
        raise TypeError(f"{call.__name__} makes {found} in place of {form}")
    inner = program.eqns[0]  # `jit` makes one of it
    return eqn.replace(primitive=inner.primitive, params=inner.params)


_OURS = "fast_cpu."  # begins the name of a call that replaced an equation
_HIDDEN = ".hidden"  # ends it where a barrier stands behind the call


@functools.cache
def _shared(
    primitive: Any, way: _Way, options: tuple, params: tuple, made: Any, onednn: bool
) -> Callable:
    """Return a function that equal operations share, so that JAX traces it once.

    On a CPU it computes the way, elsewhere the operation itself.
    """
    as_it_is = functools.partial(primitive.bind, **dict(params))
    on_cpu = functools.partial(way.compute, made, **dict(options), **dict(params))
    ways: dict = dict(cpu=on_cpu, default=as_it_is)
    if way.on_gpu:
        ways |= dict.fromkeys(("cuda", "rocm"), way.on_gpu(as_it_is))
    compute: Any = functools.partial(lax.platform_dependent, **ways)
    # Products in gradients would not be hidden from oneDNN.
    if way.refuses_gradients or (onednn and way.has_products):
        compute = jax.custom_jvp(compute)
        compute.defjvp(_refuse)

    def call(*arrays):
        y = compute(*arrays)
        if made.weak_type:
            weak = dict(new_dtype=y.dtype, weak_type=True, sharding=None)
            y = lax.convert_element_type_p.bind(y, **weak)
        return y

    call.__name__ = f"{_OURS}{way.name}.{primitive.name}{_HIDDEN if onednn else ''}"
    return jax.jit(call)


# JAX's primitives that are in no public module.  They hold no products, or as programs.
_INTERNAL = """
    accum_grad_in_ref addupdate all_gather_invariant all_gather_reduced broadcast_to
    composite cond create_linear custom_jvp_call_jaxpr custom_vmap_call dce_sink
    debug_callback debug_print dim_as_value dimension_size empty empty_ref ffi_call
    free_ref freeze from_edtype inspect_sharding io_callback iota_2x32_shape
    layout_constraint new_ref pbroadcast philox2x32 philox4x32 pjit platform_index
    psum_invariant pure_callback pvary random_clone random_unwrap random_wrap reciprocal
    reduce_scatter remat2 reshard run_state shape_assertion shard_map threefry4x32 tie
    to_edtype with_memory_space_constraint xla_metadata_call xla_metadata_value
    zeros_like
""".split()


@functools.cache
def _primitives(module: Any) -> set:
    return {x for x in vars(module).values() if isinstance(x, core.Primitive)}


def _is_known(eqn: Any) -> bool:
    """Return whether all products in an equation are in programs among its parameters.

    XLA expands linear algebra of half types, and symmetric products, to products.
    """
    primitive = eqn.primitive
    if primitive in _primitives(lax.linalg):
        half = any(v.aval.dtype.itemsize < 4 for v in eqn.invars)
        return not half and primitive.name != "symmetric_product"
    public = primitive in _primitives(lax) or primitive in _primitives(primitives)
    return public or primitive.name in _INTERNAL


def rewrite(jaxpr: Any, options: dict | None = None) -> Any:
    """Return a program that is fast on CPUs, at any depth; for libraries that trace.

    `jaxpr` is what `jax.make_jaxpr` returns, or a part of that: a jaxpr, an equation, a
    parameter of one.  A part in which nothing is replaced is returned unchanged.
    `options` are as in `fast`, and differentiating the result raises the same error.

    Raises: ValueError with oneDNN's options, if an equation may hold products that
    cannot be replaced: a function of `jax.export`, a primitive that is not JAX's.
    """
    _shared.cache_clear()  # functions are shared within a program alone
    onednn = _has_onednn(options or {})
    asked = _config.jax_default_matmul_precision == "bfloat16"
    target = _Target(onednn, half=onednn and asked and _has_half())
    return _rewrite(jaxpr, target, _look_around([]))


def _rewrite(x: Any, target: _Target, around: _Around) -> Any:
    """Rewrite a jaxpr, an equation of the program around it, or a parameter of one."""
    closed = getattr(core, "ClosedJaxpr", core.Jaxpr)  # from JAX 0.11 on, one class
    if isinstance(x, core.JaxprEqn):
        return _rewrite_equation(x, target, around)
    if isinstance(x, core.Jaxpr):
        new = _rewrite_parts(x, "eqns", target, _look_around(x.eqns))
        # With JAX's flag `jax_custom_jvp3`, a new call may be of JAX's new kind.
        return new if new is x else new.replace(is_high=any(map(_is_high, new.eqns)))
    if isinstance(x, closed):
        return _rewrite_parts(x, "jaxpr", target, around)
    return x


_HIGH = "call_hi_primitive"  # JAX 0.12's new kind


def _is_high(eqn: Any) -> bool:
    return eqn.primitive.is_high(*[v.aval for v in eqn.invars], **eqn.params)


def _rewrite_parts(x: Any, name: str, target: _Target, around: _Around) -> Any:
    """Rewrite all parts of an attribute of x, by this name."""
    parts, treedef = jax.tree.flatten(getattr(x, name))
    new = [_rewrite(part, target, around) for part in parts]
    same = all(map(operator.is_, new, parts))
    return x if same else x.replace(**{name: jax.tree.unflatten(treedef, new)})


def _rewrite_equation(eqn: Any, target: _Target, around: _Around) -> Any:
    name = eqn.primitive.name
    called = str(eqn.params.get("name"))
    if name in _WAYS:
        return _replace(eqn, target, around)
    if called.startswith(_OURS) and (called.endswith(_HIDDEN) or not target.onednn):
        return eqn
    if name == _HIGH:
        return _expand(eqn, target)
    if not _is_known(eqn):  # such as a kernel
        if target.onednn:
            raise _CannotEnter(f"the primitive {name}")
        return eqn
    eqn = _rewrite_parts(eqn, "params", target, around)
    if name == "custom_vmap_call":  # its rule is traced when `vmap` comes
        rule = _rewritten(eqn.params["rule"], {_ONEDNN: target.onednn})
        eqn = eqn.replace(params=eqn.params | dict(rule=rule))
    return eqn


def _expand(eqn: Any, target: _Target) -> Any:
    """Rewrite an equation of JAX 0.12's new kind, which says what it does by others.

    It stays where nothing in these is replaced, so that its own rules stay too.
    """
    (high,) = eqn.params.values()  # a `HiPrim` of `jax.experimental.hijax`
    try:
        program = jax.make_jaxpr(high.expand)(*high.in_avals)
    except Exception as error:
        if target.onednn:
            raise _CannotEnter(f"the primitive {high}") from error
        return eqn
    new = _rewrite(program, target, _look_around([]))
    if new is program:
        return eqn
    call = jax.jit(core.jaxpr_as_fun(new))
    inner = jax.make_jaxpr(call)(*[v.aval for v in eqn.invars]).eqns[0]
    return eqn.replace(primitive=inner.primitive, params=inner.params)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _only_traced(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if _is_traced(x) else None, tree)


def _joining(tree: Any) -> Callable:
    """Return a function that puts other leaves in the place of those that are traced.

    All other leaves are static: they are in its result as they are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    static = [None if _is_traced(x) else x for x in leaves]

    def join(traced):
        new = iter(traced)  # no leaf is None
        return treedef.unflatten(next(new) if x is None else x for x in static)

    return join


def _is_object(x: Any) -> bool:
    """Return whether x is no collection, of which f has a copy under any `jit`."""
    return not isinstance(x, (dict, list, tuple))


def _rewritten(f: Callable, options: dict | None) -> Callable:
    """Return f rewritten, to be traced.

    While JAX traces f, a leaf of its arguments or results that is no tracer is static,
    such as a value that `static_argnums` names.  It is left as it is.
    """

    @functools.wraps(f)
    def run(*args, **kwargs):
        if _config.jax_disable_jit:
            return f(*args, **kwargs)
        join = _joining((args, kwargs))
        joins = []  # of the result

        @functools.wraps(f)
        def traced(*args, **kwargs):
            args, kwargs = join(jax.tree.leaves((args, kwargs)))
            objects = jax.tree.leaves((args, kwargs), is_leaf=_is_object)
            before = jax.tree.leaves(objects)
            result = f(*args, **kwargs)
            known = set(map(id, before + jax.tree.leaves(result)))
            if not known.issuperset(map(id, jax.tree.leaves(objects))):
                raise ValueError(
                    "f changes an argument in place, which fast(f) would lose; return "
                    "the change (in Flax NNX, by nnx.split, nnx.merge and nnx.state)"
                )
            joins.append(_joining(result))
            return _only_traced(result)

        # The arguments are those of f, so that errors of JAX have its names.
        args, kwargs = _only_traced((args, kwargs))
        program = jax.make_jaxpr(traced)(*args, **kwargs)
        run_program = core.jaxpr_as_fun(rewrite(program, options))
        return joins[0](run_program(*jax.tree.leaves((args, kwargs))))

    return run


# ---------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """How the operations of a program are computed; it prints as a table."""

    operations: dict  # the number of those with equal (primitive, result, way)
    no_onednn: str  # the reason why the program has no oneDNN, or ""

    def __str__(self) -> str:
        rows = [("times", "primitive", "result", "way")]
        rows += [(count, *row) for row, count in self.operations.items()]
        lines = ["{:>5}  {:22}  {:26}  {}".format(*row) for row in rows]
        onednn = f"off: {self.no_onednn}" if self.no_onednn else "on"
        return "\n".join([*lines, f"oneDNN is {onednn}"])


def _operations(program: Any, target: _Target) -> Iterator[tuple]:
    """Yield (primitive, result, way) of all operations that ways are for, or may be.

    In place of a way, there is the reason why an operation of `program` stays.
    """
    for eqn in program.eqns:
        name = eqn.primitive.name
        forms = [str(v.aval) for v in eqn.outvars]
        called = str(eqn.params.get("name"))
        if called.startswith(_OURS):
            _, way, replaced, *_ = called.split(".")
            yield replaced, forms[0], way
        elif not _is_known(eqn) and name != _HIGH:
            yield name, ", ".join(forms), "stays: fast cannot enter it"
        elif name in _WAYS and (name not in _ELEMENTWISE or "bfloat16" in forms[0]):
            choice = _choose(eqn, target, _look_around(program.eqns))
            yield name, forms[0], f"stays: {choice.reason}"
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns") and not called.startswith(_OURS):
                yield from _operations(part, target)


class Program:
    """A program with options that fit: with oneDNN, if `fast` can enter all of it.

    `make` is a function of options that returns a result of `jax.jit`.  It is
    called when arguments come; once more, without oneDNN, where that has to be, or when
    JAX's persistent cache has been set.  `asked` are options that it adds.
    """

    def __init__(
        self,
        make: Callable[[dict], Any],
        backend: str | None = None,
        asked: dict | None = None,
    ):
        self._make = make
        self._backend = backend
        self._asked = asked or {}
        self._closed = ""  # the part that `fast` cannot enter, as far as is known
        self._made: dict = {}  # with and without oneDNN

    def _do(self, name: str, /, *args, **kwargs) -> Any:
        onednn = not (self._closed or _keeps_programs())
        if onednn not in self._made:
            options = _options(self._backend, self._asked, onednn)
            self._made[onednn] = self._make(options)
        try:
            return getattr(self._made[onednn], name)(*args, **kwargs)
        except _CannotEnter as error:
            if not onednn:
                raise
            self._closed = f"fast cannot enter {error.part}"
            return self._do(name, *args, **kwargs)

    def __call__(self, *args, **kwargs) -> Any:
        return self._do("__call__", *args, **kwargs)

    lower = functools.partialmethod(_do, "lower")
    trace = functools.partialmethod(_do, "trace")
    eval_shape = functools.partialmethod(_do, "eval_shape")

    def clear_cache(self) -> None:
        self._made.clear()

    def explain(self, *args, **kwargs) -> Explanation:
        """Explain the program of these arguments, which may be forms."""
        program = self.trace(*args, **kwargs).jaxpr
        no_onednn = self._closed or _obstacle(self._backend, self._asked)
        target = _Target(onednn=not no_onednn, half=False)
        operations = collections.Counter(_operations(program, target))
        return Explanation(operations, no_onednn)


def fast(f: Callable, options: dict | None = None) -> Callable:
    """Return f in a form that is fast on CPUs, to be compiled: `jax.jit(fast(f))`.

    f is the outermost function that you compile, such as a training step that takes
    gradients.  It takes and returns any trees, by position or by name.  Leaves that are
    no arrays when JAX traces the result are static, such as flags that `static_argnums`
    names.  `options` are those with which the result is compiled, by
    `compiler_options`: ways differ.

    The result equals f's to rounding.  It works in `scan`, `vmap`, `shard_map` and
    `jax.export`, and with donated arguments.  It raises ValueError if it is
    differentiated where an operation was replaced, and if f changes an argument in
    place and does not return the change: see docs/fast.md for Flax NNX.
    """
    rewritten = _rewritten(f, options)
    compiled = jax.jit(rewritten, inline=True)

    @functools.wraps(f)
    def call(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        arrays = all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)
        return (compiled if arrays else rewritten)(*args, **kwargs)

    return call


class _Jitted(Program):
    """A result of `jit`."""

    def __init__(self, f: Callable, how: dict):
        self._plain = jax.jit(f, **how)  # raises what `jax.jit` does
        functools.update_wrapper(self, self._plain)
        asked = how.get("compiler_options") or {}

        def make(options: dict):
            both = options | asked
            return jax.jit(_rewritten(f, both), **how | dict(compiler_options=both))

        super().__init__(make, asked=asked)
        self._inside: Any = jax.jit(_rewritten(f, asked), **how)

    def __call__(self, *args, **kwargs) -> Any:
        try:
            return self._do("__call__", *args, **kwargs)
        except ValueError as error:
            inside = "can only be passed to top-level" in str(error)  # of a trace
            if not (inside or isinstance(error, _NoGradients)):
                raise
        return self._inside(*args, **kwargs)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._inside.clear_cache()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._plain)


def jit(f: Callable | None = None, /, **how: Any) -> Any:
    """Compile f to be fast on CPUs, by oneDNN where that was tried.

        step = fast_cpu.jit(step, donate_argnums=0)

        @fast_cpu.jit(static_argnames="train")
        def step(params, batch, train): ...

    It is `jax.jit(fast(f, options), compiler_options=options, **how)`, with options for
    JAX's default backend, which is asked for in the first call, and without oneDNN if f
    holds parts that `fast` cannot enter.  Arguments, results and errors are those of
    `jax.jit`; its `compiler_options` win over ours, and may switch oneDNN off.  The
    result has the methods of `jax.jit`'s, and `explain`.  Inside of another `jit`, a
    `scan` or a gradient, it is `fast(f)`, as options are for whole programs: compile
    the outermost function by `fast_cpu.jit`.

    With FAST_CPU=0 in the environment, it is `jax.jit`.  FAST_CPU_LEAVE=exp,reduce_max
    leaves these primitives of JAX as they are.  With either, there is no oneDNN.
    """
    return _Jitted(f, how) if f is not None else functools.partial(jit, **how)


def explain(f: Callable) -> Callable:
    """Return a function of f's arguments that explains how `jit(f)` computes them.

        print(fast_cpu.explain(step)(params, batch))

    It returns an `Explanation`: the operations that were replaced, by which way, those
    that stay, and why; and whether oneDNN is on, or the reason why it is not.  f may be
    a result of `jit`.  Arguments may be forms, `jax.ShapeDtypeStruct`.
    """
    return f.explain if isinstance(f, Program) else jit(f).explain


class Comparison(NamedTuple):
    """Medians of ms per call, and how far the results differ, leaf by leaf."""

    by_jax: float
    by_fast_cpu: float
    differences: Any  # relative to the largest number; of integers, 1.0 for any
    rounding: Any  # relative, of the type


def _difference(x: jax.Array, y: jax.Array) -> float:
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # integers, flags, random keys
        return float((x != y).any())
    a, b = (np.asarray(z).astype(complex) for z in (x, y))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.abs(np.where(same, 0, a) - np.where(same, 0, b)).max(initial=0)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0)
    return float(apart / (largest or 1))


def _rounding(x: jax.Array) -> float:
    return (
        float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.inexact) else 0.0
    )


def compare(f: Callable, rounds: int = 20, **how: Any) -> Callable:
    """Return a function of f's arguments that compares `jit` with `jax.jit`.

        print(fast_cpu.compare(step)(params, batch))

    It calls both in turn, for so many rounds after one that compiles, and returns a
    `Comparison`.  Each call takes the same arguments, so donate none; `how` is as in
    `jit`.
    """
    ways = jax.jit(f, **how), jit(f, **how)

    def compared(*args, **kwargs) -> Comparison:
        times = []
        for _ in range(rounds + 1):
            results = []
            for way in ways:
                begun = time.perf_counter()
                results.append(jax.block_until_ready(way(*args, **kwargs)))
                times.append(1000 * (time.perf_counter() - begun))
        by_jax, by_fast_cpu = np.median(np.reshape(times, (-1, 2))[1:], axis=0)
        differences = jax.tree.map(_difference, *results)
        rounding = jax.tree.map(_rounding, results[0])
        return Comparison(float(by_jax), float(by_fast_cpu), differences, rounding)

    return compared


# ---------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------


def keep_memory(*, wait: bool = True) -> None:
    """Keep the memory that this process has taken, for the next calls.

        fast_cpu.keep_memory()  # before JAX is first used, in a notebook too

    XLA takes a program's temporary arrays as one block at each call.  glibc gives a
    block above 32 MiB back to Linux, which then makes it anew, page by page.  This
    tells glibc to keep such blocks; with other C libraries, it does nothing.  The
    process does not get smaller until it ends, and its peak may grow by what glibc
    cannot join: see docs/fast.md.

    XLA takes the block in a thread of its own, and a heap of glibc's ends at 64 MiB
    but for the main thread's.  With `wait`, JAX runs a program of one device in the
    thread that calls it (no asynchronous dispatch), so larger blocks stay too.  Then a
    call returns when its program has ended.  `wait` brings nothing on several devices,
    and nothing after JAX has started.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    for option, value in (-4, 0), (-1, 2**31 - 1):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(option, value)
    if wait:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        number = _config.jax_num_cpu_devices
        try:  # JAX does not change the number of devices once it has started
            jax.config.update("jax_num_cpu_devices", number + 1)
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError:
            warnings.warn(
                "keep_memory() came after JAX had started, so blocks above 64 MiB may "
                "be made anew at each call; call it before JAX is first used",
                stacklevel=2,
            )
