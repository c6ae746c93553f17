"""Compare random convolutions of any form, and their gradients, with sums in float64.

    python benchmarks/convolutions.py [300] [--first 0]

A seed determines each case.  The script compares as many cases as it is told, from the
first seed on, prints the seeds of wrong ones, and fails if there are any.
"""

import argparse
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fast_convolutions as fc

# The largest `error` allowed: float32 rounds every addition, here and in plain JAX.
LIMITS = {"float32": 32, "float16": 1, "bfloat16": 1}


def split(x, axes, whole, parts):
    """Split axes 0 and 1 into `whole` and `parts` groups, and put the groups first."""
    x = x.transpose(axes)
    (m, n), rest = x.shape[:2], x.shape[2:]
    x = x.reshape(whole, m // whole, parts, n // parts, *rest)
    return x.swapaxes(1, 2).reshape(-1, m // whole, n // parts, *rest)


def join(x, axes, whole, parts):
    """Undo `split`."""
    (_, m, n), rest = x.shape[:3], x.shape[3:]
    x = x.reshape(whole, parts, m, n, *rest).swapaxes(1, 2)
    return x.reshape(whole * m, parts * n, *rest).transpose(np.argsort(axes))


def sums(x, kernel, cotangent, how):
    """Return a convolution and its two gradients, summed over the window's entries."""
    x_axes, kernel_axes, y_axes = how["dimension_numbers"]
    images, features = how["batch_group_count"], how["feature_group_count"]
    groups = images * features
    ways = (x_axes, images, features), (kernel_axes, groups, 1), (y_axes, 1, groups)
    x, kernel, g = (split(a, *w) for a, w in zip((x, kernel, cotangent), ways))
    y, dx, dkernel = map(np.zeros_like, (g, x, kernel))
    steps = "window_strides", "rhs_dilation", "padding", "lhs_dilation"
    every = [slice(None)] * 3
    for place in np.ndindex(kernel.shape[3:]):
        ins, outs = [], []
        for i, stride, gap, pads, spread in zip(place, *map(how.get, steps)):
            axis = 3 + len(ins)
            out = np.arange(g.shape[axis])
            at, between = np.divmod(out * stride + i * gap - pads[0], spread)
            inside = (between == 0) & (at >= 0) & (at < x.shape[axis])
            ins.append(at[inside])
            outs.append(out[inside])
        ins, outs = ((*every, *np.ix_(*index)) for index in (ins, outs))
        weight = kernel[(*every, *place)]
        y[outs] += np.einsum("gbi...,goi->gbo...", x[ins], weight)
        dx[ins] += np.einsum("gbo...,goi->gbi...", g[outs], weight)
        space = list(range(4, x.ndim + 1))
        terms = x[ins], [0, 1, 2, *space], g[outs], [0, 1, 3, *space]
        dkernel[(*every, *place)] += np.einsum(*terms, [0, 3, 2])
    return [join(a, *w) for a, w in zip((y, dx, dkernel), (ways[2], *ways[:2]))]


def draw(seed):
    """Return images, kernel and cotangent of a random convolution, and its options."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    def each(*options):
        return tuple(pick(*options) for _ in range(axes))

    axes, dtype = pick(1, 2, 3), pick(*map(jnp.dtype, LIMITS))
    images, features = pick((1, 1), (1, 1), (1, pick(2, 3, 8)), (pick(2, 3), 1))
    more = pick((1,), (1, 1, 2, 3))  # strides and dilations, in half of the cases
    how = dict(
        window_strides=each(*more),
        lhs_dilation=each(*more[:3]),
        rhs_dilation=each(*more[:3]),
        batch_group_count=images,
        feature_group_count=features,
    )
    space, window, pads = each(*range(4, 5 + 12 // axes)), each(1, 2, 2, 3), []
    for size, width, spread, gap in zip(
        space, window, how["lhs_dilation"], how["rhs_dilation"]
    ):
        p = pick(1, 2)
        low, high = pick((0, 0), (2 * p, 0), (0, p), (-p, p), (-p, p), (p, -p), (p, p))
        missing = (width - 1) * gap - (size - 1) * spread - low - high
        pads.append((low, high + max(missing, 0)))
    spec = 0, axes + 1, *range(1, axes + 1)
    last = lax.ConvDimensionNumbers(spec, (axes + 1, axes, *range(axes)), spec)
    first = (tuple(range(axes + 2)),) * 3
    mixed = [tuple(rng.permutation(axes + 2).tolist()) for _ in range(3)]
    form = pick(last, last, *(lax.ConvDimensionNumbers(*x) for x in (first, mixed)))
    how |= dict(padding=tuple(pads), dimension_numbers=form)
    ins, outs, batch = pick(1, 3, 8), pick(1, 4, 8, 16), pick(1, 2, 4)
    if features > 1 and pick(False, True):
        ins = outs = 1  # depthwise
    x_shape = batch * images, ins * features, *space
    shapes = x_shape, (outs * images * features, ins, *window)
    shapes = [np.take(shape, np.argsort(axes)) for shape, axes in zip(shapes, form)]
    args = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    y = jax.eval_shape(lambda *args: lax.conv_general_dilated(*args, **how), *args)
    return (*args, jnp.asarray(rng.normal(size=y.shape), dtype)), how


def error(seed):
    """Return the type, and the worst error in units of the type's epsilon.

    An entry's error is relative to the size that its sum would have if its terms had
    random signs.  The convolution runs twice in a loop, as in a trainer, and the
    program runs twice, since uninitialized memory then holds other numbers.  With every
    other seed, gradients of kernels are computed in small chunks of the batch.
    """
    args, how = draw(seed)

    def convolve(x, kernel, cotangent):
        function = lambda *args: lax.conv_general_dilated(*args, **how)  # noqa: E731
        y, gradients = jax.vjp(function, x, kernel)
        return y, *gradients(cotangent)

    options = fc.compiler_options()
    fast = fc.fast(convolve, options)
    loop = jax.jit(lambda *args: lax.map(lambda args: fast(*args), args))
    exact = [np.asarray(x, np.float64) for x in args]
    expected, squares = sums(*exact, how), sums(*map(np.square, exact), how)
    worst = 0.0
    args = [jnp.stack([x, x]) for x in args]
    with mock.patch.object(fc, "_CHUNK_BYTES", 2_000_000 if seed % 2 else 2_000):
        program = loop.lower(*args).compile(compiler_options=options)
    results = program(*args), program(*args)
    for found in results:
        for twice, x, square in zip(found, expected, squares):
            off = np.abs(np.asarray(twice, np.float64) - x)
            off = np.where(np.isfinite(off), off, np.inf)
            size = np.maximum(np.maximum(np.sqrt(square), np.abs(x)), 1e-3)
            worst = max(worst, (off / size).max(initial=0))
    dtype = args[0].dtype
    return dtype.name, float(worst / jnp.finfo(dtype).eps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args()
    worst, wrong = dict.fromkeys(LIMITS, 0.0), 0
    for seed in range(args.first, args.first + args.count):
        name, off = error(seed)
        worst[name] = max(worst[name], off)
        if not off <= LIMITS[name]:
            wrong += 1
            print(f"seed {seed}, {name}, is {off:.1f} epsilon off: {draw(seed)[1]}")
    units = ", ".join(f"{name} {off:.2f}" for name, off in worst.items())
    print(f"{args.count} convolutions, {wrong} wrong; worst, in epsilon: {units}")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
