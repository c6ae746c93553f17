"""Tests of fast_cpu.py."""

import collections
import ctypes
import dataclasses
import functools
import gc
import importlib
import inspect
import math
import os
import platform
import re
import runpy
import types
from unittest import mock

import convolutions
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

import fast_cpu as fc
import pjax_ensemble as pe
from conftest import SGD, assert_close, cases, dilated, randn, run_python, said_by
from helpers import assert_refuses

# ---------------------------------------------------------------------------------
# Convolutions of other libraries, random arrays and comparisons
# ---------------------------------------------------------------------------------

NDHWC = dict(axes="NDHWC DHWIO NDHWC")
# Convolutions of other libraries: shapes of images and kernel, and the parameters.
CONVOLUTIONS = {
    "NHWC": ((2, 6, 5, 3), (3, 3, 3, 4), {}),
    "any": ((3, 5, 2, 6), (4, 3, 3, 2), dict(axes="CWNH OHIW WCHN")),
    "summed": (
        (3, 5, 2, 6),
        (4, 5, 3, 4),
        dict(axes="CWNH OHIW WCHN", padding="VALID"),
    ),
    "one axis": ((2, 7, 3), (3, 3, 4), dict(axes="NWC WIO NWC", strides=(2,))),
    "three axes": ((2, 4, 3, 5, 2), (2, 3, 2, 2, 3), NDHWC),
    "three axes, strides and groups": (
        (2, 4, 7, 5, 3),
        (4, 2, 3, 2, 2),
        dict(axes="NCDHW OIDHW NCDHW", strides=(2, 1, 3), feature_group_count=2),
    ),
    "three axes, transposed": (
        (2, 3, 2, 4, 3),
        (2, 3, 4, 3, 2),
        dict(padding=[(1, 0), (2, 1), (0, 3)], lhs_dilation=(2, 1, 3), **NDHWC),
    ),
    "four axes": (
        (2, 3, 2, 3, 4, 2),
        (2, 2, 1, 2, 2, 3),
        dict(axes="NABHWC ABHWIO NABHWC", rhs_dilation=(1, 1, 1, 2)),
    ),
    "depthwise": (
        (2, 7, 6, 3),
        (3, 2, 1, 3),
        dict(strides=(2, 1), rhs_dilation=(1, 2), feature_group_count=3),
    ),
    "depthwise wide": (
        (1, 9, 5, 2),
        (65, 1, 1, 2),
        dict(padding=[(30, 40), (0, 0)], feature_group_count=2),
    ),
    "batch groups": ((4, 6, 5, 2), (3, 3, 2, 6), dict(batch_group_count=2)),
    "dilated": (
        (2, 6, 5, 3),
        (3, 3, 3, 4),
        dict(padding=[(2, 2), (1, 3)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
}


def random_arrays(*shapes):
    """Return an array for each shape, of the seeds 0, 1, and so on."""
    return [randn(seed, *shape) for seed, shape in enumerate(shapes)]


X, KERNEL = random_arrays((4, 6, 5, 3), (3, 3, 3, 4))

SQUARE = randn(0, 256, 256), randn(1, 256, 256) / 16


def nchw(x, kernel):
    return jnp.tanh(dilated(x, kernel, axes="NCHW OIHW NCHW"))


def loss_fn(kernel, images, power=2):
    return jnp.abs(dilated(images, kernel) ** power).mean()


GRADS = jax.value_and_grad(loss_fn)


def sum_of_sines(y):
    return jnp.sin(y).sum()


def loss_of(f, reduce=sum_of_sines):
    """Return a loss: f's result of two arrays, reduced to a number."""
    return lambda a, b: reduce(f(a, b))


def twice(arrays):
    """Stack each array and its double, for `vmap`."""
    return [jnp.stack([x, 2 * x]) for x in arrays]


def alone_and_mapped(f):
    """Return a function that calls f by itself and under vmap."""
    return lambda *args: (f(*args), jax.vmap(f)(*twice(args)))


def assert_same_results(f, g, args, tolerance=1e-5):
    """Assert that two functions return the same, up to rounding."""
    assert_close(f(*args), g(*args), tolerance)


VERSION = tuple(map(int, jaxlib.__version__.split(".")[:2]))
TRIED = VERSION in ((0, 11), (0, 12))
by_onednn = pytest.mark.skipif(not TRIED, reason="this jaxlib has none, or none tried")


@pytest.fixture
def no_cache():
    """Turn JAX's persistent cache off, which turns oneDNN on."""
    folder = jax.config.jax_compilation_cache_dir
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # otherwise JAX goes on to keep programs
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


# ---------------------------------------------------------------------------------
# The module as a whole
# ---------------------------------------------------------------------------------


def test_an_older_jax_is_refused_in_one_line_with_both_versions(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.9.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    said = said_by(ImportError, runpy.run_path, fc.__file__)
    assert said.startswith("fast_cpu needs JAX 0.10 or newer, this is 0.9.2; ")
    assert "\n" not in said


# ---------------------------------------------------------------------------------
# Convolutions
# ---------------------------------------------------------------------------------


@cases("seed", 3, 25)  # by planes and by phases; by XLA's routine
def test_nan_reaches_all_sums_that_it_is_in(seed):
    arrays, how = convolutions.draw(seed)

    def convolve(x, kernel, g):
        f = functools.partial(jax.lax.conv_general_dilated, **how)
        y, gradients = jax.vjp(f, x, kernel)
        return [y, gradients(g)]

    fast = jax.jit(fc.fast(convolve))
    num_reached = 0
    for i, array in enumerate(arrays):
        bad = list(arrays)
        bad[i] = array.at[tuple(n // 2 for n in array.shape)].set(jnp.nan)
        x, kernel, g = (np.asarray(each, np.float64) for each in bad)
        found = jax.tree.leaves(fast(*bad))
        for y, sums in zip(found, convolutions.sums(x, kernel, g, how), strict=True):
            reached = np.isnan(sums)
            assert np.isnan(y)[reached].all()
            num_reached += reached.sum()
    assert num_reached


LONG = {  # images, kernels of depthwise convolutions, and their parameters
    "one axis": ((2, 300, 3), (128, 1, 3), dict(padding="SAME")),
    "a prime": ((2, 90, 3), (67, 1, 3), dict(padding=[(66, 0)])),
    "strides": ((2, 300, 3), (66, 1, 3), dict(window_strides=(3,))),
    "dilation": ((2, 300, 3), (70, 1, 3), dict(rhs_dilation=(3,))),
    "zeros between": (
        (2, 90, 3),
        (70, 1, 3),
        dict(lhs_dilation=(2,), padding=[(3, 4)]),
    ),
    "negative padding": ((2, 300, 3), (70, 1, 3), dict(padding=[(-3, 5)])),
    "two axes": ((2, 20, 21, 3), (9, 10, 1, 3), dict(window_strides=(1, 2))),
    "a wide second": ((2, 5, 90, 3), (3, 70, 1, 3), dict(rhs_dilation=(2, 1))),
}


@pytest.mark.parametrize("name", LONG)
def test_long_depthwise_windows_are_taken_in_blocks(name):
    x_shape, kernel_shape, params = LONG[name]
    x, kernel = random_arrays(x_shape, kernel_shape)
    letters = "HW"[: x.ndim - 2]
    how = dict(window_strides=(1,) * len(letters), padding="VALID") | params
    how |= dict(feature_group_count=3)
    how |= dict(dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"))

    def results(x, kernel):
        convolve = functools.partial(jax.lax.conv_general_dilated, **how)
        y, pull_back = jax.vjp(convolve, x, kernel)
        return y, pull_back(jnp.sin(y))

    fast = fc.jit(results)
    assert_same_results(fast, jax.jit(results), (x, kernel))
    assert not find_forms(fast.lower(x, kernel).as_text())


# ---------------------------------------------------------------------------------
# Gradients of kernels
# ---------------------------------------------------------------------------------


def test_volumes_are_convolved_a_few_planes_at_a_time():
    x = jax.ShapeDtypeStruct((1, 64, 32, 32, 32), np.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 32, 16), np.float32)
    convolve = functools.partial(dilated, **NDHWC)
    gradient = jax.grad(loss_of(convolve, jnp.var), 1)
    for function, most in (convolve, 2), (gradient, 4):  # all planes: 4 and 13
        compiled = jax.jit(fc.fast(function)).lower(x, kernel).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < most * 4 * x.size


# ---------------------------------------------------------------------------------
# Any convolution
# ---------------------------------------------------------------------------------

# Seeds 21 to 38 err if XLA (JAX 0.10) gets a negative padding; 129 to 415 are
# depthwise, in float16 and bfloat16; 395 errs if oneDNN strides one window.
SEEDS = list(range(8)) + [21, 23, 34, 38, 129, 360, 395, 415]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_convolutions_and_gradients_are_sums_in_float64(seed):
    """This is a short form of benchmarks/convolutions.py."""
    name, error = convolutions.error(seed)
    assert error <= convolutions.LIMITS[name]


@cases("name", "summed", "depthwise")
def test_convolutions_of_integers_are_exact(name):
    x_shape, kernel_shape, how = CONVOLUTIONS[name]
    x = 2**24 + np.arange(np.prod(x_shape), dtype=np.int32).reshape(x_shape)
    kernel = np.ones(kernel_shape, np.int32)
    convolve = functools.partial(dilated, **how)
    assert_array_equal(jax.jit(fc.fast(convolve))(x, kernel), convolve(x, kernel))


@cases("x, kernel", ((0, 6, 5, 3), (3, 3, 3, 4)), ((2, 6, 5, 0), (3, 3, 0, 4)))
def test_a_convolution_without_numbers_has_gradients_without_numbers(x, kernel):
    gradient = fc.fast(jax.grad(loss_of(dilated, jnp.sum), (0, 1)))
    found = jax.jit(gradient)(jnp.zeros(x), jnp.ones(kernel))
    assert [y.shape for y in found] == [x, kernel] and not found[1].any()


@by_onednn
@pytest.mark.parametrize("seed", range(20))
def test_random_convolutions_of_bfloat16_are_right_by_onednn(seed, no_cache):
    """On a processor with AMX, this runs what the lowered programs below only show."""
    _, error = convolutions.error(seed, "bfloat16")
    assert error <= convolutions.LIMITS["bfloat16"]


# ---------------------------------------------------------------------------------
# Products and sums
# ---------------------------------------------------------------------------------

# Products, and the factors' shapes.
PRODUCTS = {
    "bti,io->bto": ((2, 3, 4), (4, 5)),
    "bti,oi->bto": ((2, 3, 4), (5, 4)),
    "bti,ihd->bthd": ((2, 3, 4), (4, 2, 3)),  # attention
    "bthd,hdo->bto": ((2, 4, 2, 3), (2, 3, 5)),
    "bthd,bshd->bhts": ((2, 3, 2, 4), (2, 5, 2, 4)),
    "kbti,kio->kbto": ((2, 3, 2, 4), (2, 4, 5)),
    "kbi,kio->kbo": ((2, 13, 4), (2, 4, 12)),  # not small
    "nij,jkn->kni": ((5, 3, 4), (4, 2, 5)),
    "ni,ni->n": ((5, 3), (5, 3)),
    "abc,cb->a": ((2, 3, 4), (4, 3)),  # not in a row
    "abcd,bce->aed": ((2, 3, 4, 5), (3, 4, 2)),
    "abk,abk->k": ((2, 3, 4), (2, 3, 4)),
}
UNDER = {
    "gradients": lambda f: jax.grad(loss_of(f), (0, 1)),
    "checkpoint": lambda f: UNDER["gradients"](jax.checkpoint(f)),
    "vmap": lambda f: lambda a, b: jax.vmap(UNDER["gradients"](f))(*twice([a, b])),
    "Hessian": lambda f: jax.hessian(loss_of(f), (0, 1)),
}


@cases("onednn", False, True)
@pytest.mark.parametrize("spec", PRODUCTS)
def test_products_and_their_gradients_are_right(spec, onednn):
    args = random_arrays(*PRODUCTS[spec])
    functions = [way(functools.partial(jnp.einsum, spec)) for way in UNDER.values()]

    def plain(a, b):
        halves = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)
        wide = jnp.einsum(spec, *halves, preferred_element_type=jnp.float32)
        return [f(a, b) for f in functions], wide

    options = {fc._ONEDNN: onednn}  # the same forms, with barriers
    fast = fc.fast(plain, options)
    found = jax.jit(fast)(*args)
    assert_close(found, jax.jit(plain)(*args))
    mapped = jax.jit(jax.vmap(fast))(*twice(args))
    assert_close(jax.tree.map(lambda x: x[0], mapped), found)
    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in args]
        f = functions[0]
        assert_same_results(jax.jit(fc.fast(f, options)), jax.jit(f), args, 1e-14)


@cases("dtype", jnp.bfloat16, jnp.float16)
def test_sums_of_half_types_are_rounded_once(dtype):
    """XLA rounds after each addition: a gradient of a bias would be 13,568."""
    x = jnp.ones((3, 4096, 5), dtype)
    step = fc.jit(jax.grad(lambda b: (x + b[None, None]).sum(dtype=jnp.float32)))
    assert (step(jnp.zeros(5, dtype)) == 3 * 4096).all()
    how = dict(window_dimensions=(1, 640, 1), window_strides=(1, 1, 1), padding="VALID")
    pool = fc.jit(lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, **how))
    assert (pool(x) == 640).all()


@jax.custom_vjp
def gated(x, y):
    return x * y + x


gated.defvjp(
    lambda x, y: (gated(x, y), (x, y)),
    lambda given, g: (g * given[1] + g, g * given[0]),
)


HALF = jnp.bfloat16
ARITHMETIC = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, gated]
ARITHMETIC += [
    lambda x, y: jnp.where(x > y, x, y * HALF(0.5)),
    lambda x, y: (x + y) - x,
    lambda x, y: jnp.square(x) - abs(y),
    lambda x, y: x / HALF(3),
]
CURVES = [jnp.power, lambda x, y: jnp.exp(-abs(x)), lambda x, y: jnp.log(x)]
CURVES += [lambda x, y: x**3, lambda x, y: jax.lax.rsqrt(x * x - y * y)]
CURVES += [lambda x, y: jax.nn.sigmoid(x) / y, lambda x, y: jnp.tanh(x) - jnp.sqrt(y)]


def operations(seed, ways):
    """Return a random program of bfloat16, with its gradients."""
    rng = np.random.default_rng(seed)
    steps = [
        (rng.integers(len(ways)), rng.random(2)) for _ in range(rng.integers(3, 9))
    ]
    names = [f"y{i}" for i in range(len(steps))]
    saved = [x for x in names if rng.random() < 0.5]
    form = rng.integers(3)

    def apply(x, y):
        values = [x, y]
        for name, (way, shares) in zip(names, steps):
            a, b = (values[int(share * len(values))] for share in shares)
            values.append(checkpoint_name(ways[way](a, b), name))
        return values[2:]

    def scan(x, y):
        def step(x, _):
            return x + apply(x, y)[-1] * HALF(0.1), x

        return jax.lax.scan(step, x, None, length=3)

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    program = [apply, scan, jax.checkpoint(apply, policy=policy)][form]

    def both(x, y):
        made, turn = jax.vjp(program, x, y)
        return made, turn(jax.tree.map(jnp.cos, made))

    return both


def kinds_of(y):
    """Return nan where there is nan, the signs of infinities, and 0 elsewhere."""
    y = np.float32(y)
    return np.sign(y) * np.isinf(y) + np.where(y == y, 0, np.nan)


@pytest.mark.parametrize("ways", [ARITHMETIC, ARITHMETIC + CURVES])
def test_programs_of_bfloat16_have_the_numbers_of_their_operations(ways):
    """The reference has each operation compiled by itself, where it is rounded once.

    A whole program by `jax.jit` does not round each: without optimization, on a
    processor with instructions for bfloat16, and in gradients of `scan`.  Sums,
    products and comparisons have the same bits, others the same nan and infinities.
    """
    x, y = (jnp.asarray(array, HALF) for array in random_arrays((64,), (64,)))
    programs = [operations(seed, ways) for seed in range(6)]

    def run_all(x, y):
        return [f(x, y) for f in programs]

    found = fc.jit(run_all)(x, y)
    with jax.disable_jit():
        right = run_all(x, y)
    numbers = np.float32 if ways is ARITHMETIC else kinds_of
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right)):
        assert_array_equal(numbers(a), numbers(b))


# ---------------------------------------------------------------------------------
# Options of the compiler
# ---------------------------------------------------------------------------------

SINGLE = {
    fc._YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}
PASSES = "onednn-ops-rewriter,simplify-fp-conversions"
ONEDNN = {fc._ONEDNN: True, fc._YNNPACK: "", fc._LEFT_OUT: PASSES}
REDUCE = ONEDNN | {fc._YNNPACK: "LIBRARY_FUSION_TYPE_REDUCE"}


@cases(
    "version, by_onednn, without",
    ("0.10.2", SINGLE, SINGLE),
    ("0.11.2", ONEDNN, SINGLE),
    ("0.12.0.1", REDUCE, {}),
    ("0.13.0", {}, {}),
)
def test_options_are_those_that_are_right_in_a_version(
    version, by_onednn, without, no_cache, monkeypatch
):
    monkeypatch.setattr(jaxlib, "__version__", version)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert fc.compiler_options("cpu") == fc.compiler_options() == by_onednn
    assert fc.compiler_options("gpu") == fc.compiler_options("tpu") == {}
    for flag, found in (fc._ONEDNN, without), (fc._YNNPACK, by_onednn):  # the flag wins
        monkeypatch.setenv("XLA_FLAGS", f"--{flag}=false")
        rest = {name: value for name, value in found.items() if name != flag}
        assert fc.compiler_options() == rest
    monkeypatch.setenv("XLA_FLAGS", f"--{fc._LEFT_OUT}=cse")  # lacks what oneDNN needs
    assert fc.compiler_options() == without
    for name, value in ("FAST_CPU", "0"), ("FAST_CPU_LEAVE", "max"):
        for flags, off in ("", {}), (f"--{fc._ONEDNN}=true", {fc._ONEDNN: False}):
            monkeypatch.setenv("XLA_FLAGS", flags)
            with mock.patch.dict(os.environ, {name: value}):
                rest = {} if name == "FAST_CPU" else without
                assert fc.compiler_options() == rest | off
    monkeypatch.delenv("XLA_FLAGS")
    with mock.patch.object(platform, "machine", lambda: "arm64"):
        assert fc.compiler_options() == without
    jax.config.update("jax_compilation_cache_dir", "a folder")
    assert fc.compiler_options() == without
    jax.config.update("jax_enable_compilation_cache", False)
    assert fc.compiler_options() == by_onednn


def test_this_version_knows_its_options(no_cache):
    x = jnp.ones((64, 64))
    for options in fc.compiler_options(), SINGLE:
        found = jax.jit(jnp.matmul, compiler_options=options)(x, x)
        assert (found == 64).all()


def matrix_times_rows(x):
    return jax.vmap(lambda row: jnp.square(jnp.eye(3) @ row).sum())(x)


# The faults of sums in jax_faults.py, as functions of arrays.
MANY_ROWS = np.zeros((32769, 3), np.float32)
MANY_ROWS[:, 1] = np.arange(32769) % 1000
OF_RANK_7 = randn(0, 3, 1, 2, 2, 8, 8, 8), randn(1, 3, 1, 2, 2, 8, 8, 8)
OUTER = np.ones((10, 4, 6), np.float32), np.ones((10, 4, 6, 5, 5, 5, 5, 5), np.float32)


def outer(x, y):
    return jnp.log((x[..., None, None, None, None, None] * y).sum(2))


# The functions, and their arguments.
REDUCTIONS = {
    "broadcast": (
        lambda x: jnp.broadcast_to(x, (2, 1024, 1024)).sum(),
        (np.ones((1024, 1), np.float32),),
    ),
    "rows": (matrix_times_rows, (MANY_ROWS,)),
    "rank of 7": (lambda x, y: (x * y).sum(3), OF_RANK_7),
    "rank of 8": (outer, OUTER),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_right_in_steps_and_trainers(name, optimized):
    f, args = REDUCTIONS[name]
    with jax.disable_jit():
        expected = np.asarray(f(*args))
    fast = fc.jit(f)
    for _ in range(20):
        assert_close(fast(*args), expected)

    def loss_fn(params, args):
        return params, f(*args)

    trainer = pe.make_trainer(
        jax.random.normal, loss_fn, SGD, members=2, devices=1, has_aux=True
    )
    state = trainer.init(jax.random.key(0))
    for _ in range(10):
        state, (_, aux) = trainer.update(state, args)
        assert_close(aux, np.stack([expected, expected]))
    for make in pe.make_sync_update, pe.make_ensemble_update:
        update = make(loss_fn, SGD, has_aux=True)
        state = pe.replicate(pe.train_state(np.float32(1), SGD), 2)
        for _ in range(5):
            state, (_, aux) = update(state, pe.replicate(args, 2))
            assert_close(aux, np.stack([expected, expected]))


# With options, XLA gives oneDNN what follows a product too: without barriers 32, in
# float32, and 83, in bfloat16, err.
@by_onednn
@cases("seed", 32, 83)
def test_programs_with_onednn_are_those_without(seed, no_cache, optimized):
    """This is a short form of benchmarks/convolutions.py --programs."""
    assert fc.compiler_options()
    with jax.numpy_rank_promotion("allow"):
        assert not convolutions.is_wrong(*convolutions.difference(seed))


def rounding(p, u):  # of an addition, as compensated optimizers take it
    new = p + u
    return u - (new - p), u - (2 * jnp.maximum(p + u, 0) - 2 * p) / 2


def high_part(x):  # of as many digits as half of bfloat16 (Dekker 1971)
    y = x * 17
    return y - (y - x)


def overflow(x):
    return jax.nn.softmax(x.at[:, 1].set(jnp.inf))


def quantized(x, w):
    y = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), **FLOAT) / 100
    return y, jax.nn.gelu(y)


def quantized_images(x, kernel):
    names = ("NHWC", "HWIO", "NHWC")
    how = dict(dimension_numbers=names, **FLOAT)
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **how) / 1000
    return y, jax.nn.silu(y)


FLOAT = dict(preferred_element_type=jnp.float32)
INTEGERS = (np.arange(256**2) % 181 - 90).astype(np.int8)
HALVES = jnp.ones(8, jnp.bfloat16), jnp.full(8, 2.0**-12, jnp.bfloat16)
IMAGES = INTEGERS[:4608].reshape(8, 12, 12, 4), INTEGERS[:288].reshape(3, 3, 4, 8)
# oneDNN's option alone makes them wrong: functions, and their arguments.
CHANGED = {
    "rounding": (rounding, HALVES),
    "high part": (high_part, [jnp.arange(100, 200).astype(jnp.bfloat16)]),
    "softmax": (overflow, [randn(0, 8, 3)]),
    "integers": (quantized, [SQUARE[0], INTEGERS.reshape(256, 256)]),
    "images": (quantized_images, IMAGES),
}


@by_onednn
@pytest.mark.parametrize("name", CHANGED)
def test_onednn_changes_nothing_but_products(name, no_cache, optimized):
    f, args = CHANGED[name]
    right = jax.jit(f)(*args)
    assert_close(fc.jit(f)(*args), right)
    options = ONEDNN | {fc._LEFT_OUT: ""}
    wrong = jax.jit(f, compiler_options=options)(*args)
    with pytest.raises(AssertionError):
        assert_close(wrong, right)
    trainer = pe.make_trainer(
        lambda key, _: jax.random.normal(key),
        lambda params, _, args: (params, f(*args)),
        SGD,
        members=1,
        devices=1,
        has_aux=True,
        frozen=args,
    )
    _, (_, aux) = trainer.update(trainer.init(jax.random.key(0)), np.ones(1))
    assert_close(jax.tree.map(lambda x: x[0], aux), right)


# ---------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------

# Tests of what is replaced, and tests of any section that read the text of a program,
# count traces or use a private name.


def text_for(platform, program, args):
    """Return a program as it is lowered for a platform."""
    made = export.export(jax.jit(program), platforms=[platform])(*args)
    return made.mlir_module()


def find_forms(text):
    """Return the layouts of a program's convolutions."""
    return re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text)


def are_canonical(forms):
    last = re.compile(r"\[b, [\d, ]*f\]x\[[\d, ]*i, o\]->\[b, [\d, ]*f\]")
    return forms and all(map(last.fullmatch, forms))


@cases("name", "NHWC", "summed", "one axis", "depthwise", "dilated", "three axes")
def test_a_wrong_guess_whether_it_is_a_gradient_of_a_kernel_changes_no_number(name):
    """JAX's order of axes is all that tells, and another JAX may write another."""
    x_shape, kernel_shape, how = CONVOLUTIONS[name]
    args = random_arrays(x_shape, kernel_shape)
    step = jax.value_and_grad(loss_of(functools.partial(dilated, **how)), (0, 1))
    expected = step(*args)
    real = fc._is_kernel_gradient
    texts = set()

    for answer in None, False, True:

        def guess(lhs, rhs, size, spec, *groups, answer=answer):
            # With groups, both ways are there for gradients of depthwise kernels alone.
            known = real(lhs, rhs, size, spec, *groups)
            free = known or groups == (1, 1)
            return answer if free and answer is not None else known

        with mock.patch.object(fc, "_is_kernel_gradient", guess):
            lowered = jax.jit(fc.fast(step)).lower(*args)
        assert_close(lowered.compile()(*args), expected)
        texts.add(lowered.as_text())
    assert len(texts) == (2 if name == "depthwise" else 3)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_is_canonical_on_cpus_and_unchanged_elsewhere(name):
    x_shape, kernel_shape, how = CONVOLUTIONS[name]
    x, kernel = random_arrays(x_shape, kernel_shape)
    convolve = functools.partial(dilated, **how)
    plain = jax.value_and_grad(loss_of(convolve), (0, 1))
    fast = fc.fast(plain)
    lowered = jax.jit(alone_and_mapped(fast)).lower(x, kernel)
    forms = find_forms(lowered.as_text())
    if name.startswith("depthwise"):
        assert not forms
    else:
        assert are_canonical(forms)
    right = jax.jit(alone_and_mapped(plain))
    assert_same_results(lowered.compile(), right, (x, kernel))
    on_gpu = find_forms(text_for("cuda", fast, (x, kernel)))
    assert on_gpu == find_forms(text_for("cuda", plain, (x, kernel)))
    trainer = pe.make_trainer(
        lambda key: kernel,
        lambda kernel, x: convolve(x, kernel).var(),
        SGD,
        members=2,
        devices=1,
        at_once=2,
    )
    trainer.lower("update", x)  # JAX itself could not map groups over members


with_jvp = jax.custom_jvp(nchw)
with_jvp.defjvp(lambda given, tangents: jax.jvp(nchw, given, tangents))
with_vjp = jax.custom_vjp(nchw)
with_vjp.defvjp(
    lambda x, kernel: (nchw(x, kernel), (x, kernel)),
    lambda given, g: jax.vjp(nchw, *given)[1](g),
)


def scanned_constant(x, kernel, layer=nchw):
    return jax.lax.scan(lambda x, _: (layer(x, kernel), ()), x, length=2)[0]


def chosen(x, kernel):
    return jax.lax.cond(x.sum() > 0, nchw, lambda x, k: x * k.sum(), x, kernel)


# Each entry puts a convolution inside one of JAX's transformations.
NESTINGS = {
    "scan of a constant": scanned_constant,
    "cond": chosen,
    "jit of checkpoint": jax.jit(
        functools.partial(scanned_constant, layer=jax.checkpoint(nchw))
    ),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "grad": lambda x, k: jax.grad(lambda x: nchw(x, k).sum())(x),
    "vmap": lambda x, k: jax.vmap(nchw)(*twice([x, k])).sum(0),
    "Hessian product": lambda x, k: jax.jvp(
        jax.grad(lambda x: nchw(x, k).sum()), (x,), (jnp.cos(x),)
    )[1],
    "gradients per example": lambda x, k: jax.vmap(
        jax.grad(lambda k, x: nchw(x[None], k).sum()), (None, 0)
    )(k, x),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_convolutions_are_canonical_inside_transformations(name):
    function = NESTINGS[name]
    x, kernel = random_arrays((2, 3, 5, 4), (3, 3, 3, 2))

    def plain(x, kernel):
        gradients = jax.grad(loss_of(function, jnp.sum), (0, 1))
        return function(x, kernel), gradients(x, kernel)

    lowered = jax.jit(fc.fast(plain)).lower(x, kernel)
    assert are_canonical(find_forms(lowered.as_text()))
    assert_same_results(lowered.compile(), jax.jit(plain), (x, kernel))


def test_programs_with_nothing_to_rewrite_stay_as_they_are():
    x_shape, kernel_shape, how = CONVOLUTIONS["any"]
    convolve = functools.partial(dilated, **how)
    integers = np.ones(x_shape, np.int32), np.ones(kernel_shape, np.int32)
    dense = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).sum())
    replaced = fc.fast(dilated)
    for f, args in (
        (convolve, integers),
        (jax.jit(dense), random_arrays((3, 4), (99, 3))),
        (replaced, random_arrays((1, 5, 5, 2), (3, 3, 2, 3))),
    ):
        program = jax.make_jaxpr(f)(*args)
        assert fc.rewrite(program) is program


@cases("name", "three axes, transposed", "three axes", "transposed")
def test_convolutions_of_a_step_have_two_axes_and_no_zeros_between_entries(name):
    how = dict(padding=[(2, 1), (1, 1)], lhs_dilation=(2, 3))
    table = CONVOLUTIONS | {"transposed": ((64, 5, 6, 3), (4, 3, 3, 2), how)}
    x_shape, kernel_shape, how = table[name]
    loss = loss_of(functools.partial(dilated, **how), jnp.var)
    fast = fc.fast(jax.value_and_grad(loss, (0, 1)))
    text = text_for("cpu", fast, random_arrays(x_shape, kernel_shape))
    assert not re.search(r"interior = \[[^]]*[1-9]", text)
    found = re.findall(r"stablehlo.convolution\(.*", text)
    assert len(found) <= 3
    for text in found:
        assert "lhs_dilate" not in text or "lhs_dilate = [1, 1]" in text
        assert len(re.findall(r"tensor<[\dx]*f32>", text)[0].split("x")) == 5


def test_a_kernels_gradient_is_a_sum_over_chunks_of_the_batch():
    x, kernel = random_arrays((60, 32, 32, 16), (3, 3, 16, 16))  # 32 fit, 30 divide 60
    plain = jax.grad(loss_of(dilated, jnp.var), 1)
    lowered = jax.jit(fc.fast(plain)).lower(x, kernel)
    kernels = re.findall(r"convolution.*, tensor<(\S+)xf32>\) ", lowered.as_text())
    assert "32x32x60x16" not in kernels
    fast = lowered.compile()
    assert_same_results(fast, jax.jit(plain), (x, kernel))
    patches = x.nbytes * 9
    assert fast.memory_analysis().temp_size_in_bytes < patches / 2


def group_counts(platform, f, args):
    """Return the numbers of groups of a program's convolutions on a platform."""
    return re.findall(r"_group_count = (\d+)", text_for(platform, f, args))


@cases("name", "cuda", "rocm")
def test_on_gpus_each_members_convolution_is_a_call_of_its_own(name):
    kernels, images = twice([KERNEL, X])
    grads = jax.grad(loss_fn, (0, 1))
    plain = group_counts(name, jax.vmap(grads), (kernels, images))
    apart = group_counts(name, jax.vmap(fc.fast(grads)), (kernels, images))
    assert len(plain) == 2 * 3 and len(apart) == 2 * 2 * 3
    assert set(plain) == {"1", "2"} and set(apart) == {"1"}
    one_kernel = jax.vmap(fc.fast(dilated), (0, None))
    shared = group_counts(name, one_kernel, (images, KERNEL))
    assert shared == ["1", "1"]  # one call where the kernel is the same


def compiled(f, args):
    return fc.jit(f).lower(*args).compile()


def run_compiled(f, args):
    return compiled(f, args)(*args)


@by_onednn
@cases(
    "space, output",  # of whole images
    ("W", "f32[8,6,32]"),
    ("HW", "f32[8,6,6,32]"),
    ("DHW", "f32[8,6,6,6,32]"),
)
def test_options_bring_onednn_for_convolutions_and_their_gradients(
    space, output, no_cache
):
    sixes = (6,) * len(space)
    threes = (3,) * len(space)
    x, kernel = random_arrays((8, *sixes, 16), (*threes, 16, 32))
    convolve = functools.partial(dilated, axes=f"N{space}C {space}IO N{space}C")
    plain = jax.grad(loss_of(convolve), (0, 1))
    found = compiled(plain, (x, kernel))
    made = re.findall(r"= \((\w+\[.*?\]).*__onednn.conv", found.as_text())
    assert output in made and len(made) >= 3
    assert_same_results(found, jax.jit(plain), (x, kernel))


LEAST = os.environ.get("ONEDNN_MAX_CPU_ISA", "").startswith("AVX2")
by_half = pytest.mark.skipif(LEAST, reason="oneDNN is told to have no bfloat16")


def instruction_set(instructions):
    """Compile as for a processor with a set of instructions."""
    return mock.patch.object(fc, "_instructions", lambda: instructions)


AMX = instruction_set({"amx_tile", "amx_bf16"})

FACTORS = r"stablehlo\.(dot_general|convolution)\b.* : \(tensor<[^>]*x(\w+)>"


def types_of_factors(f, args):
    """Return the types of a program's products and convolutions, by their names."""
    options = fc.compiler_options()
    text = jax.jit(fc.fast(f, options)).lower(*args).as_text()
    return set(re.findall(FACTORS, text))


@by_onednn
@by_half
@cases(
    "dtype, strides, made",
    (jnp.bfloat16, 1, "bf16"),
    (jnp.bfloat16, 2, "f32"),
    (jnp.float16, 1, "f32"),
    (jnp.float16, 2, "f32"),
)
def test_with_amx_half_types_are_convolved_in_them_where_onednn_is_right(
    dtype, strides, made, no_cache
):
    given = [jnp.asarray(x, dtype) for x in random_arrays((3, 3, 8, 1), (4, 16, 16, 8))]

    def convolve(kernel, x):
        return dilated(x, kernel, strides=(strides, strides))

    # The kernel has one output, whose gradients were garbage; strides are dilation.
    gradient = jax.grad(lambda k, x: jnp.square(convolve(k, x)).sum(dtype=float))
    exact = gradient(*(x.astype(float) for x in given))
    assert_close(run_compiled(gradient, given), exact, 0.02)
    with AMX:
        assert types_of_factors(convolve, given) == {("convolution", made)}
        assert_close(run_compiled(convolve, given), convolve(*given), 0.02)


def of_kernel(x, kernel):
    """Return the gradient of a kernel."""

    def loss(kernel):
        return dilated(x, kernel).astype(np.float32).sum()

    return jax.grad(loss)(kernel)


# Convolutions of few channels, which oneDNN merges with windows or, for gradients of
# kernels, with images: the function, shapes of images and kernel, and the type.
FEW = {
    "a gradient, images 16 wide": (of_kernel, (8, 16, 16, 1), (3, 3, 1, 8), "f32"),
    "a gradient, one output": (of_kernel, (4, 16, 16, 8), (3, 3, 8, 1), "f32"),
    "a gradient, 16 examples": (of_kernel, (32, 16, 16, 1), (3, 3, 1, 8), "bf16"),
    "windows 8 wide": (dilated, (2, 8, 32, 8), (1, 8, 8, 16), "f32"),
    "windows 12 high": (dilated, (1, 22, 16, 8), (12, 1, 8, 8), "f32"),
    "windows 16 wide": (dilated, (2, 8, 32, 4), (1, 16, 4, 16), "f32"),
    "windows 16 wide, 3 deep": (
        functools.partial(dilated, **NDHWC),
        (1, 4, 8, 32, 4),
        (3, 1, 16, 4, 8),
        "f32",
    ),
    "signals": (
        functools.partial(dilated, axes="NWC WIO NWC"),
        (2, 32, 8),
        (8, 8, 16),
        "f32",
    ),
    "windows 7 wide": (dilated, (2, 8, 32, 8), (1, 7, 8, 16), "bf16"),
    "windows 8 high, 3 wide": (dilated, (2, 16, 16, 8), (8, 3, 8, 16), "bf16"),
    "16 channels": (dilated, (2, 8, 32, 16), (1, 8, 16, 16), "bf16"),
    "dilation": (
        functools.partial(dilated, rhs_dilation=(1, 2)),
        (2, 8, 32, 8),
        (1, 8, 8, 16),
        "bf16",
    ),
}


@by_onednn
@by_half
@pytest.mark.parametrize("name", FEW)
def test_with_amx_few_channels_with_wide_windows_are_float32(name, no_cache):
    """oneDNN (JAX 0.12) is wrong there, by as much as the largest number."""
    f, x_shape, kernel_shape, made = FEW[name]
    wide = random_arrays(x_shape, kernel_shape)
    given = [jnp.asarray(x, jnp.bfloat16) for x in wide]
    exact = f(*(x.astype(np.float32) for x in given))
    with AMX:
        assert types_of_factors(f, given) == {("convolution", made)}
        assert_close(run_compiled(f, given), exact, 0.02)


def layers(kernel, w, x, precision=None):
    """Return a loss of two layers, and its gradients."""

    def loss_fn(kernel, w):
        y = jnp.tanh(dilated(x, kernel, precision=precision))
        return jnp.square(jnp.dot(y, w, precision=precision)).mean()

    return jax.value_and_grad(loss_fn, (0, 1))(kernel, w)


def layers_inside(kernel, w, x):
    """Ask for bfloat16 inside of the function that is compiled."""
    with jax.default_matmul_precision("bfloat16"):
        return layers(kernel, w, x)


@by_onednn
@by_half
def test_factors_are_bfloat16_where_the_outermost_call_asks_for_it(no_cache):
    """Without a request, no bit changes, and none where bfloat16 gains nothing."""
    x, kernel, w = random_arrays((8, 8, 8, 16), (3, 3, 16, 16), (16, 24))
    exact = layers(kernel, w, x)
    in_half = {("dot_general", "bf16"), ("convolution", "bf16")}
    in_single = {("dot_general", "f32"), ("convolution", "f32")}

    def run(f, instruction, expected, tolerance):
        with instruction_set({instruction}):
            types = types_of_factors(f, (kernel, w, x))
            found = run_compiled(f, (kernel, w, x))
        assert types == expected
        assert_close(found, exact, tolerance)
        return found

    single = run(layers, "avx2", in_single, 1e-5)

    def assert_same_bits(f, instruction="amx_bf16"):
        found = run(f, instruction, in_single, 1e-5)
        jax.tree.map(assert_array_equal, single, found)

    assert_same_bits(layers)
    # A layer's own precision asks for nothing, nor does a call inside.
    for name in "default", "fastest", "bfloat16":
        assert_same_bits(functools.partial(layers, precision=name))
    assert_same_bits(layers_inside)
    with jax.default_matmul_precision("default"):
        assert_same_bits(layers)
    with jax.default_matmul_precision("bfloat16"):
        assert_same_bits(layers, "avx2")
        assert_same_bits(functools.partial(layers, precision="highest"))
        for instruction in "amx_bf16", "avx512_bf16":
            run(layers, instruction, in_half, 0.05)
        trainer = pe.make_trainer(
            lambda key: (kernel, w),
            lambda params, x: layers(params[0], params[1], x)[0],
            SGD,
            members=1,
        )
        with instruction_set({"amx_bf16"}):
            text = trainer.lower("update", x).as_text()
            assert set(re.findall(FACTORS, text)) == in_half


@by_onednn
@by_half
def test_integers_and_depthwise_kernels_stay_where_bfloat16_is_asked_for(no_cache):
    """Products of ragged groups, which get factors of bfloat16, are right."""
    x, kernel, w = random_arrays((8, 8, 8, 16), (3, 3, 16, 16), (16, 24))
    left = w.T[:16]
    whole = jnp.arange(256).reshape(16, 16)  # which bfloat16 has not
    exact = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    groups = functools.partial(dilated, feature_group_count=16)

    def ragged(x, w):
        return jax.lax.ragged_dot(x, w[None], jnp.array([16]))

    with instruction_set({"amx_bf16"}), jax.default_matmul_precision("bfloat16"):
        assert_close(run_compiled(ragged, (left, w)), left @ w, 0.02)
        found = run_compiled(exact, (whole, whole))
        assert_array_equal(found, np.asarray(whole) @ np.asarray(whole))
        # Depthwise ones are faster without a cast.
        assert not types_of_factors(groups, (x, kernel[:, :, :1]))


@by_onednn
def test_windows_of_bfloat16_may_lie_in_padding_alone(no_cache):
    """With many of them, oneDNN (JAX 0.12) ends the process now and then."""
    x = jnp.ones((1, 2, 48, 9), jnp.bfloat16)
    kernel = jnp.ones((2, 1, 9, 32), jnp.bfloat16)
    step = fc.jit(functools.partial(dilated, padding=[(0, 0), (0, 48)]))
    assert "pad = [[0, 0], [0, 0]]" in step.lower(x, kernel).as_text()
    assert_array_equal(step(x, kernel)[0, 0, :, 0], np.repeat([18, 0], 48))


def test_sums_of_half_types_stay_float32(no_cache):
    """oneDNN does an addition that follows, and would round the sum to bfloat16."""
    x = jnp.ones((300, 8, 8, 16), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 16, 16), jnp.bfloat16)

    def made(x, kernel):
        y = dilated(x, kernel)
        return y.astype(jnp.float32) + 0.125, y

    def whole(kernel, x):  # sums of up to 300 chunks
        y, gradients = jax.vjp(functools.partial(made, x), kernel)
        (dkernel,) = gradients(jax.tree.map(jnp.ones_like, y))
        return y[0], dkernel

    with mock.patch.object(fc, "_CHUNK_BYTES", 2_000):
        y, gradient = run_compiled(whole, (kernel, x))
    assert y[0, 4, 4, 0] == 9 * 16 + 0.125
    expected = jnp.asarray(2 * 300 * np.outer((7, 8, 7), (7, 8, 7)), gradient.dtype)
    assert (gradient == expected[..., None, None]).all()


@cases("f, x", (jnp.matmul, np.ones((256, 256))), (dilated, np.ones((3, 3, 256, 256))))
def test_with_onednn_sums_of_float16_are_float32(f, x):
    """oneDNN has only a reference for others; XLA may, but need not, avoid it."""
    x = jnp.asarray(x, jnp.float16)
    text = jax.jit(fc.fast(f, {fc._ONEDNN: True})).lower(x, x).as_text()
    made = re.findall(r"(?:dot_general |convolution\().*->.*x(\w+)>", text)
    assert made == ["f32"]


def dots(text):
    """Return the contracted axes of a program's products, and the result's type."""
    found = r"contracting_dims = (\[.*?\] x \[.*?\]).*-> tensor<(\S+)xf32>"
    return re.findall(found, text)


def test_gradients_of_weights_sum_over_one_axis_and_are_not_transposed():
    x, w = random_arrays((8, 16, 4), (4, 5))
    gradient = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    # As PyTorch keeps weights, [O, I], the gradient is not transposed.
    other = fc.fast(jax.grad(lambda w, x: jnp.tanh(x @ w.T).sum()))
    fast = fc.fast(gradient)
    axes = "[0] x [0]"
    assert dots(text_for("cpu", fast, (w, x)))[-1] == (axes, "4x5")
    assert dots(text_for("cpu", other, (w.T, x)))[-1] == (axes, "5x4")
    for name in "cpu", "cuda", "tpu":
        plain = dots(text_for(name, gradient, (w, x)))
        found = dots(text_for(name, fast, (w, x)))
        assert plain[-1] == ("[0, 1] x [0, 1]", "5x4")
        assert (found == plain) == (name != "cpu")


def affine(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None, None])


def affine_loss(params, x):
    return jnp.square(affine(params, x)).mean()


AFFINE = {"w": randn(1, 4, 5), "b": randn(2, 5)}
INPUTS = randn(0, 32, 512, 4)
STEPS_OF_TRAINERS = {
    "K = D = 1": dict(members=1, devices=1),
    "K = D = 2": dict(members=2, devices=2),
    "K = 1 on D = 2": dict(members=1, devices=2),
    "at once": dict(members=2, devices=1, at_once=2),
    "shards": dict(members=1, devices=2, shards=2),
    "sync": pe.make_sync_update,
    "ensemble": pe.make_ensemble_update,
}


def lowered_steps(how):
    """Yield the programs of a trainer, or of an update by hand, as text."""
    if isinstance(how, dict):
        how = how | dict(apply_fn=lambda params, x: affine(params, x).mean(1))
        trainer = pe.make_trainer(lambda key: AFFINE, affine_loss, SGD, **how)
        order = np.zeros((2, len(INPUTS)), np.int32)
        for call in (
            ("update", INPUTS),
            ("epoch", (INPUTS,), order),
            ("predict", INPUTS),
        ):
            yield trainer.lower(*call).as_text()
    else:
        state = pe.replicate(pe.train_state(AFFINE, SGD), 2)
        stop = mock.patch.object(pe, "_run", side_effect=InterruptedError)
        with stop as run, pytest.raises(InterruptedError):
            how(affine_loss, SGD)(state, pe.split(INPUTS, 2))
        program, _, *given = run.call_args.args
        yield program.lower(*given).as_text()


@pytest.mark.parametrize("name", STEPS_OF_TRAINERS)
def test_trainers_products_and_sums_are_fast(name, monkeypatch):
    """The programs are those that run: in `shard_map`, gradients name a mesh.

    Shards keep their shardings, and XLA divides their products.
    """
    monkeypatch.setattr(fc, "_version", lambda: (0, 10))  # whose sums are of eighths
    for text in lowered_steps(STEPS_OF_TRAINERS[name]):
        made = dots(text)
        assert made
        if name != "shards":
            assert not [shape for _, shape in made if shape.endswith("5x4")]
            large = r"stablehlo.reduce\(.*\) : \(tensor<([\dx]+)xf32>"
            for shape in re.findall(large, text):
                assert math.prod(map(int, shape.split("x"))) < fc._LARGE


@cases("axes", None, (0,), (1,), (2,), (0, 1), (1, 2), (0, 2))
@cases("reduce", jnp.sum, jnp.max)
def test_sums_of_eighths_are_the_sums(reduce, axes, monkeypatch):
    monkeypatch.setattr(fc, "_version", lambda: (0, 11))  # from 0.12 on, none are made
    x = randn(0, 67, 129, 65)
    fast = jax.jit(fc.fast(functools.partial(reduce, axis=axes)))
    in_a_row = axes != (0, 2)
    eighths = fast.lower(x).as_text().count("stablehlo.slice") >= 8
    assert eighths == in_a_row
    exact = getattr(np, reduce.__name__)(x.astype(np.float64), axis=axes)
    error = np.abs(np.float64(fast(x)) - exact).max()
    bound = 2e-6 * np.sqrt(x.size / exact.size) if reduce is jnp.sum else 0
    assert error <= bound
    half = jnp.asarray(x, jnp.bfloat16)
    assert_close(fast(half), reduce(half, axis=axes), 0.01)
    assert fast(half).dtype == half.dtype
    bad = x.copy()
    bad[3, 5, 7] = np.nan
    assert_array_equal(np.isnan(fast(bad)), np.isnan(reduce(bad, axis=axes)))
    assert "stablehlo.slice" not in text_for("cuda", fast, (x,))
    if in_a_row and reduce is jnp.max:  # whose ties would share gradients otherwise
        said = said_by(ValueError, jax.grad(lambda x: fast(x).sum()), x)
        assert "fast(jax.grad(f)) in place of jax.grad(fast(f))" in said


@cases("dtype", bool, np.int8, jnp.bfloat16)
def test_eighths_are_for_sums_near_half_types(dtype, monkeypatch):
    monkeypatch.setattr(fc, "_version", lambda: (0, 12))  # others need none there
    x = jnp.ones((2048, 16))
    fast = jax.jit(fc.fast(lambda x, near: (x * near.astype(x.dtype)).sum(0)))
    eighths = "stablehlo.slice" in fast.lower(x, x.astype(dtype)).as_text()
    assert eighths == (dtype == jnp.bfloat16)


def test_sums_of_casts_are_of_eighths_and_others_are_as_the_version_needs():
    """YNNPACK would first copy half types to float32."""
    for dtype in jnp.bfloat16, jnp.float32:
        x = jnp.ones((512, 256), dtype)
        fast = jax.jit(fc.fast(lambda x: x.sum(0, dtype=jnp.float32)))
        text = fast.lower(x).as_text()
        eighths = text.count("stablehlo.slice") >= 8
        assert eighths == (dtype == jnp.bfloat16 or VERSION < (0, 12))


POOLED_WINDOWS = {  # window, strides, padding of an array of four axes
    "halves": ((1, 2, 2, 1), (1, 2, 2, 1), [(0, 0)] * 4),
    "overlaps": ((1, 3, 3, 1), (1, 2, 1, 1), [(0, 0), (1, 1), (2, 1), (0, 0)]),
    "gaps": ((1, 2, 1, 2), (1, 3, 2, 3), [(0, 0), (1, 0), (0, 0), (0, 1)]),
}


@pytest.mark.parametrize("name", POOLED_WINDOWS)
def test_max_pools_gradients_are_where_the_first_maximum_is(name):
    x = np.random.default_rng(0).integers(0, 4, (2, 7, 6, 5)).astype(float)
    x[0, :4, :4] = -np.inf
    x[1, [3, 6], [3, 5], 2] = np.nan
    x[0, 1::2, 1:3] = -1e30
    window, strides, padding = POOLED_WINDOWS[name]

    def pool(x):
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, strides, padding)

    g = randn(1, *jax.eval_shape(pool, x).shape)
    expected = np.zeros(x.shape)
    lows = [low for low, _ in padding]
    for place in np.ndindex(g.shape):
        best = None
        for entry in np.ndindex(window):
            at = tuple(np.multiply(place, strides) + entry - lows)
            inside = all(0 <= i < n for i, n in zip(at, x.shape))
            if inside and (best is None or not x[best] >= x[at]):
                best = at
        expected[best] += g[place]
    step = fc.jit(lambda x, g: jax.vjp(pool, x)[1](g)[0])
    for dtype, tolerance in (np.float32, 1e-6), (jnp.bfloat16, 0.01):
        least = np.where(x == -1e30, float(jnp.finfo(dtype).min), x)
        least = least.astype(dtype)
        cotangent = g.astype(dtype)
        assert_close(step(least, cotangent), expected, tolerance)
    text = step.lower(least, cotangent).compile().as_text()
    assert " scatter(" not in text and "-scatter(" not in text


# The functions that have arguments besides two arrays, or are in no public module.
OTHERS = {
    "integer_pow": lambda x, y: [jax.lax.integer_pow(x, n) for n in (-3, -1, 2, 3, 5)],
    "select_n": lambda x, y: jax.lax.select_n(x == x, y, x),
    "add_any": lambda x, y: jax.grad(lambda x: x * x)(x[0]),
}
BINARY = {"add", "atan2", "div", "max", "min", "mul", "pow", "sub"}


def elementwise(name, x, y):
    f = OTHERS.get(name) or getattr(jax.lax, name)
    if name in BINARY or name in OTHERS:
        return f(x, y)
    return f(x)


def all_elementwise(form, x, y):
    """Apply a form of each operation, and return the results by name."""
    return {
        name: form(functools.partial(elementwise, name), x, y)
        for name in fc._ELEMENTWISE
    }


def alone(f, x, y):
    return f(x, y)


def in_company(f, x, y):
    return jax.tree.map(lambda z: (z, -z, z + z), f(x * 1, y))


def scanned(f, x, y):
    return jax.lax.map(lambda pair: f(*pair), (x[None], y[None]))


def test_operations_on_bfloat16_are_rounded_alone_and_in_company(optimized):
    """Each result is float32's, to the nearest number of bfloat16, for all numbers."""
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(jnp.bfloat16)
    x = x[~((abs(x) > 0) & (abs(x) < 2.0**-126))]  # processors may take these for 0
    y = np.random.default_rng(0).permutation(x)
    plainly = functools.partial(all_elementwise, alone)
    wide = jax.jit(plainly)(np.float32(x), np.float32(y))
    with np.errstate(all="ignore"):
        right = jax.tree.map(lambda z: np.asarray(z).astype(jnp.bfloat16), wide)
        three = jax.tree.map(lambda z: (z, -z, z + z), right)

    numbers = (x == x) & (y == y)

    def same_number(a, b):
        assert_array_equal(np.float32(a), np.float32(b))
        # The sign of a nan that numbers make is known, and where `top_k` puts it.
        assert_array_equal(np.signbit(a) & numbers, np.signbit(b) & numbers)

    def assert_same(form, expected):
        found = fc.jit(functools.partial(all_elementwise, form))(x, y)
        jax.tree.map(same_number, found, expected)

    assert_same(alone, right)
    assert_same(in_company, three)
    assert_same(scanned, jax.tree.map(lambda z: z[None], right))
    assert "bitcast_convert" not in text_for("cuda", fc.fast(plainly), (x, y))


def test_equal_operations_are_traced_once():
    def f(x, y):
        for _ in range(5):
            x = jnp.tanh(x * y)
        return x

    x = jnp.ones((4, 4), jnp.bfloat16)
    text = jax.jit(fc.fast(f)).lower(x, x).as_text()
    assert text.count("call @fast_cpu.round") == 10
    assert text.count("func.func private @fast_cpu.round") == 2


@cases("value, hidden", ("=true", True), ("=false", False), ("", True))
def test_products_are_hidden_where_a_flag_switches_onednn_on(
    value, hidden, monkeypatch
):
    """Otherwise oneDNN would put the SiLU of a product in the product's place."""
    monkeypatch.setenv("XLA_FLAGS", f"--{fc._ONEDNN}{value}")
    text = jax.jit(fc.fast(jnp.matmul)).lower(*SQUARE).as_text()
    assert (".hidden" in text) == hidden


@by_onednn
def test_programs_have_the_options_of_the_cache_as_it_is_now(no_cache, tmp_path):
    """JAX's persistent cache cannot keep programs with oneDNN, and would warn of it."""
    x, w = SQUARE
    step = fc.jit(jnp.matmul)
    trainer = pe.make_trainer(
        lambda key: x, lambda w, x: (x @ w).mean(), SGD, members=1
    )
    for folder in None, str(tmp_path), None:
        jax.config.update("jax_compilation_cache_dir", folder)
        for lowered in step.lower(x, w), trainer.lower("update", w):
            assert (".hidden" in lowered.as_text()) == (folder is None)


def and_silu(multiply):
    """Return a function that returns a product, and an activation of it."""

    def f(x, w):
        y = multiply(x, w)
        return y, jax.nn.silu(y)

    return f


with_silu = and_silu(jnp.matmul)

PLACES_OF_PRODUCTS = {
    "alone": jnp.matmul,
    "vmap": lambda x, w: jax.vmap(jnp.matmul, (0, None))(x[None], w)[0],
    "scan": lambda x, w: jax.lax.scan(lambda y, _: (y @ w, 0), x, None, 1)[0],
    # This one is for a platform, by its author.
    "branch": lambda x, w: jax.lax.platform_dependent(x, w, default=jnp.matmul),
    "checkpoint": jax.checkpoint(jnp.matmul),
    "ragged": lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.array([256])),
}


@by_onednn
@pytest.mark.parametrize("name", PLACES_OF_PRODUCTS)
def test_activations_are_right_wherever_products_are(name, no_cache, optimized):
    """XLA puts silu(y) in the place of y for its other users too."""
    x, w = SQUARE
    y = np.float64(x) @ w
    found = fc.jit(and_silu(PLACES_OF_PRODUCTS[name]))(x, w)
    assert_close(found, (y, y / (1 + np.exp(-y))))


def _multiply(x, w):  # a user's function, named as one of `fast_cpu`
    return with_silu(x, w)


@by_onednn
def test_products_are_hidden_in_programs_of_all_kinds(no_cache, optimized):
    def solve(f, b):
        return jax.lax.custom_linear_solve(f, b, lambda f, b: f(f(b)))

    kinds = {
        "composite": jax.lax.composite(with_silu, "own.name"),
        "solve": lambda x, w: with_silu(solve(lambda y: y @ w, x), w),
        "while": lambda x, w: jax.lax.while_loop(
            lambda y: y[0].sum() < -9, lambda y: with_silu(y[0], w), with_silu(x, w)
        ),
        "reused": lambda x, w: jax.jit(fc.fast(with_silu))(x, w),  # without options
        "name": lambda x, w: jax.jit(_multiply)(x, w),
    }
    for f in kinds.values():
        assert_same_results(fc.jit(f), jax.jit(f), SQUARE)


def exported_call(f):
    def call(x, y):
        return export.export(jax.jit(f), platforms=["cpu"])(x, y).call(x, y)

    return call


own = core.Primitive("own")
own.multiple_results = True
own.def_abstract_eval(lambda x, w: [x, x])
mlir.register_lowering(own, mlir.lower_fun(with_silu, multiple_results=True))
BFLOAT16 = [
    jnp.asarray(np.tril(x[:64, :64]) + np.eye(64), jnp.bfloat16) for x in SQUARE
]
# Functions whose products `fast` does not see.
OPAQUE = {
    "export": exported_call(with_silu),
    "primitive": lambda x, w: own.bind(x, w),
    "sparse": and_silu(lambda x, w: sparse.BCOO.fromdense(x, nse=9) @ w),
    "symmetric": lambda x, w: jax.lax.linalg.symmetric_product(x, w),
    "solver": lambda x, w: jax.lax.linalg.triangular_solve(*BFLOAT16, left_side=True),
}


@by_onednn
@pytest.mark.parametrize("name", OPAQUE)
def test_where_a_part_cannot_be_entered_there_is_no_onednn(name, no_cache, optimized):
    x, w = SQUARE

    def f(x, w):
        return OPAQUE[name](x, w), x @ w

    fast = fc.jit(f)
    for _ in range(2):
        assert_same_results(fast, jax.jit(f), SQUARE, 1e-3)
    assert "__onednn" not in fast.lower(x, w).compile().as_text()
    said = said_by(ValueError, fc.fast(f, fc.compiler_options()), x, w)
    assert re.match(r"fast\(f, options\) cannot hide .* compile by fast_cpu.jit", said)
    trainer = pe.make_trainer(
        jax.random.normal,
        lambda params, x, w: (params, jax.tree.leaves(f(x, w))[1]),
        SGD,
        members=1,
        devices=1,
        has_aux=True,
    )
    assert "__onednn" not in trainer.lower("update", x, w).compile().as_text()


def with_rule(x, w):
    """Return a product and its SiLU, by a rule of its own under `vmap`."""
    both = jax.custom_batching.custom_vmap(with_silu)

    @both.def_vmap
    def rule(size, batched, x, w):
        x, w = (z if b else jnp.stack([z] * size) for z, b in zip((x, w), batched))
        return jax.vmap(with_silu)(x, w), (True, True)

    return both(x, w)


RULES = {
    "inside": lambda: fc.jit(jax.vmap(with_rule, (0, None))),
    "around": lambda: jax.jit(
        jax.vmap(fc.fast(with_rule, OPTIONS), (0, None)), compiler_options=OPTIONS
    ),
    "sequential": lambda: fc.jit(
        jax.vmap(jax.custom_batching.sequential_vmap(with_silu), (0, None))
    ),
    "none": lambda: fc.jit(lambda x, w: [y[None] for y in with_rule(x[0], w)]),
}
OPTIONS = {}


@by_onednn
@pytest.mark.parametrize("name", RULES)
def test_products_are_hidden_in_rules_that_vmap_traces(name, no_cache, optimized):
    OPTIONS.update(fc.compiler_options())
    x, w = SQUARE
    y = np.float64(x) @ w
    program = RULES[name]()
    assert_close(program(x[None], w), (y[None], (y / (1 + np.exp(-y)))[None]))
    assert "__onednn" in program.lower(x[None], w).compile().as_text()


@by_onednn
def test_a_trainers_members_at_once_have_the_rules_of_their_layers(no_cache, optimized):
    x, w = SQUARE
    trainer = pe.make_trainer(
        lambda key: w,
        lambda w, x: jnp.square(x @ w).mean(),
        SGD,
        members=2,
        devices=1,
        at_once=2,
        apply_fn=lambda w, x: with_rule(x, w),
        output=None,
    )
    state = trainer.init(jax.random.key(0))
    product, _ = trainer.predict_members(state, x)
    assert_close(product, np.stack([np.float64(x) @ w] * 2))


@by_onednn
def test_products_are_hidden_in_the_two_updates(no_cache, optimized):
    x, w = SQUARE

    def loss_fn(params, x):
        return params.mean(), with_silu(x, jax.lax.stop_gradient(params))

    for make in pe.make_sync_update, pe.make_ensemble_update:
        state = pe.replicate(pe.train_state(w, SGD), 2)
        update = make(loss_fn, SGD, has_aux=True)
        _, (_, (product, _)) = update(state, pe.replicate(x, 2))
        assert_close(product, np.stack([np.float64(x) @ w] * 2))


HIGH = {
    "searchsorted": lambda y: jnp.searchsorted(jnp.linspace(0, 1, 9), y[0]),
    "interp": lambda y: jnp.interp(y[0], jnp.linspace(0, 1, 9), jnp.arange(9.0)),
    "nonzero": lambda y: jnp.nonzero(y[0] > 0, size=9)[0],
    "unique": lambda y: jnp.unique(jnp.round(y[0]), size=9),
    "ldexp": lambda y: jnp.ldexp(y[0], 2),
    "choice": lambda y: jax.random.choice(jax.random.key(0), 9, p=jnp.ones(9) / 9),
    "in a loop": lambda y: jax.lax.map(lambda y: jnp.searchsorted(y, 0.5), y),
    "mapped": jax.vmap(lambda y: jnp.searchsorted(y, 0.5)),
}


@by_onednn
@pytest.mark.parametrize("name", HIGH)
def test_high_primitives_are_entered(name, no_cache):
    def f(x, w):
        return x @ w, HIGH[name](x)

    fast = fc.jit(f)
    assert_same_results(fast, jax.jit(f), SQUARE)
    assert "__onednn" in fast.lower(*SQUARE).compile().as_text()


def silu_with_rules(kind):
    """Return a product and its SiLU, with derivatives of one's own."""
    if kind == "jvp":
        both = jax.custom_jvp(with_silu)
        both.defjvp(lambda primals, tangents: jax.jvp(with_silu, primals, tangents))
    else:
        both = jax.custom_vjp(with_silu)
        both.defvjp(lambda x, w: jax.vjp(with_silu, x, w), lambda turn, g: turn(g))
    return lambda x, w: sum(both(x, w)).sum()


def scanned_layers(x, w):
    layer = jax.checkpoint(silu_with_rules("vjp"))

    def step(y, _):
        y = jax.lax.cond(y.sum() > 0, lambda: jnp.tanh(y), lambda: y @ w)
        return y, layer(y, w)

    return jax.lax.scan(step, x, length=2)[1].sum()


SWITCHES = {
    "jax_remat3": lambda x, w: jax.checkpoint(lambda *z: sum(with_silu(*z)).sum())(
        x, w
    ),
    "jax_custom_jvp3": silu_with_rules("jvp"),
    "jax_custom_vjp3": silu_with_rules("vjp"),
    "all": scanned_layers,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_new_kinds_of_checkpoints_and_rules_are_entered(name, no_cache, optimized):
    f = jax.value_and_grad(SWITCHES[name], (0, 1))
    expected = jax.jit(f)(*SQUARE)
    names = [n for n in SWITCHES if name in (n, "all") and hasattr(jax.config, n)]
    for switch in names:
        jax.config.update(switch, True)
    try:
        fast = fc.jit(f)
        assert_close(fast(*SQUARE), expected, 1e-3)
        text = fast.lower(*SQUARE).compile().as_text()
        assert ("__onednn" in text) == bool(fc.compiler_options().get(fc._ONEDNN))
    finally:
        for switch in names:
            jax.config.update(switch, False)


# Primitives that hold programs: `rewrite` enters the first; others mean no oneDNN.
# fmt: off
ENTERED = {
    "composite", "cond", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call",
    "custom_vmap_call", "eval_jaxpr", "jit", "reduce", "reduce_window", "remat2",
    "run_state", "scan", "scatter", "shard_map", "while", "xla_metadata_call",
}
NOT_ENTERED = {
    "cudnn_fusion", "custom_partitioning", "linear_call", "mpmd_map", "pallas_call",
    "program_order", "remat_opt", "run_scoped",
}
# fmt: on


@by_onednn
def test_primitives_that_hold_programs_are_entered_or_mean_no_onednn():
    modules = "experimental.pallas experimental.custom_partitioning scipy.linalg export"
    for name in modules.split():
        importlib.import_module(f"jax.{name}")
    found = [x for x in gc.get_objects() if isinstance(x, core.Primitive)]
    for primitive in found:
        if "[" in primitive.name or primitive is own:  # a trace's, and this file's
            continue
        members = list(vars(primitive).values()) + list(vars(type(primitive)).values())
        functions = filter(inspect.isfunction, map(inspect.unwrap, members))
        text = "".join(map(inspect.getsource, functions))
        if "jaxpr" in text or type(primitive) is not core.Primitive:
            assert primitive.name in ENTERED | NOT_ENTERED, "enter it, or keep it apart"
            eqn = mock.Mock(primitive=primitive, invars=[])
            assert fc._is_known(eqn) == (primitive.name in ENTERED)


TYPES = [jnp.float32, HALF] * 3 + [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]
TYPES += [np.int8, np.int32, np.complex64]


# The functions below take `pick`, which draws one of its arguments.  The order of its
# calls decides which cases are tested.


def drawn_convolution(pick, kind, sizes, step, wide):
    batch, height, width = sizes
    axes = pick("NHWC HWIO NHWC", "NCHW OIHW NCHW", "CWNH OHIW WCHN")
    if kind == "volume":
        axes = "NDHWC DHWIO NDHWC"
    groups = pick(1, 2)
    k = pick(1, 2, 3)
    x_axes, kernel_axes, _ = axes.split()
    x = dict(N=batch, D=2, H=height, W=width, C=2 * groups)
    kernel = dict(D=2, H=k, W=k, I=2, O=4)
    num_axes = len(x_axes) - 2
    f = functools.partial(
        dilated,
        axes=axes,
        strides=(step,) * num_axes,
        lhs_dilation=(pick(1, 1, 2),) * num_axes,
        padding="VALID",
        feature_group_count=groups,
        preferred_element_type=wide,
    )
    return f, [map(x.get, x_axes), map(kernel.get, kernel_axes)]


def drawn_product(pick, sizes, wide):
    a, b, c, d = sizes
    products = [
        ("ab,bc->ac", ((a, b), (b, c))),
        ("abc,abd->cd", ((a, b, c), (a, b, d))),
        ("abc,acd->abd", ((a, b, c), (a, c, d))),
        ("a,b->ab", ((a,), (b,))),
    ]
    spec, shapes = pick(*products)
    how = dict(preferred_element_type=wide)
    if pick(False, False, True):
        groups = np.array([2, 5])
        f = functools.partial(jax.lax.ragged_dot, group_sizes=groups, **how)
        return f, [(7, 3), (2, 3, 64)]
    return functools.partial(jnp.einsum, spec, **how), shapes


UNARY = [
    jnp.tanh,
    jnp.square,
    lambda x: x**3,
    lambda x: x - 1,
    jax.nn.sigmoid,
    jnp.abs,
    lambda x: 2 / x,
    lambda x: jnp.where(x > 0, x, 2),
    jnp.sqrt,
]


def drawn_chain(pick):
    first = pick(*UNARY)
    then = pick(*UNARY)
    return lambda x: then(first(x))


def drawn_sum(pick, kind, step, width):
    """Return a sum or a maximum, over axes or windows, or a maximum pool's gradient."""
    axes = pick(0, (0, 1), (1, 2))
    pool = functools.partial(
        jax.lax.reduce_window,
        window_dimensions=(2, 1, width),
        window_strides=(step, 1, 1),
        padding=pick("SAME", "VALID"),
    )

    def total(x):
        return pool(x, jnp.zeros((), x.dtype), jax.lax.add)

    def most(x):
        return pool(x, -jnp.inf, jax.lax.max).sum(dtype=np.float32)

    if kind == "pool":
        return jax.grad(most)
    whole = functools.partial(jnp.sum, axis=axes)
    return pick(total, whole, functools.partial(jnp.max, axis=axes))


def drawn_operation(seed):
    """Return a random operation that may be replaced, and the forms of its arrays."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    (symbol,) = export.symbolic_shape("n")
    a, b, c, d = (pick(0, 1, 2, 3, 7, 64, symbol) for _ in "abcd")
    dtype = pick(*TYPES)
    step = pick(1, 2)
    wide = pick(None, np.float32)
    width = pick(1, 2, 3)
    weak = np.dtype(dtype).itemsize >= 4 and pick(True, False)
    kind = pick(
        "image", "image", "volume", "product", "product", "sum", "pool", "chain"
    )
    if kind in ("image", "volume"):
        f, shapes = drawn_convolution(pick, kind, (a, b, c), step, wide)
    elif kind == "product":
        f, shapes = drawn_product(pick, (a, b, c, d), wide)
    elif kind == "chain":
        f = drawn_chain(pick)
        shapes = [(a, b)]
    else:
        f = drawn_sum(pick, kind, step, width)
        shapes = [(a, b, 64)]
    arrays = [jax.ShapeDtypeStruct(n, dtype, weak_type=weak) for n in shapes]
    inexact = kind not in ("sum", "pool") and jnp.issubdtype(dtype, jnp.inexact)
    if inexact and pick(False, True):
        return gradients_of(f), arrays
    return f, arrays


def gradients_of(f):
    """Return a function that returns the gradients of all f's arguments."""

    def gradients(*args):
        _, turn = jax.vjp(f, *args)
        return turn(jnp.ones_like(f(*args)))

    return gradients


def forms(f, arrays):
    """Return the forms of a function's results, or None if it takes no such arrays."""
    try:
        made = jax.tree.leaves(jax.eval_shape(f, *arrays))
        sizes = [n for x in arrays for n in x.shape]
        if all(isinstance(n, int) for n in sizes):
            jax.jit(f).lower(*arrays)
        else:
            export.export(jax.jit(f))(*arrays)
    except (TypeError, ValueError, NotImplementedError, jax.errors.JAXTypeError):
        return None
    return [(x.shape, x.dtype, x.weak_type) for x in made]


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_forms_are_those_without_fast(first):
    """No way fails, since the tests let none: arrays are empty, sizes are symbols."""
    taken = 0
    for seed in range(first, first + 100):
        f, arrays = drawn_operation(seed)
        expected = forms(f, arrays)
        if expected:
            taken += 1
            assert forms(fc.fast(f), arrays) == expected, seed
    assert taken > 70


@pytest.mark.skipif(VERSION != (0, 10), reason="others lower it with a GPU alone")
def test_kernels_of_pallas_stay_as_they_are():
    pallas = pytest.importorskip("jax.experimental.pallas")
    triton = importlib.import_module("jax.experimental.pallas.triton")
    params = triton.CompilerParams(num_warps=4)
    x = jnp.ones((128, 128), jnp.bfloat16)

    def kernel(x, y):
        y[...] = jnp.tanh(x[...] * x[...]) * jnp.exp(x[...])

    f = pallas.pallas_call(kernel, out_shape=x, compiler_params=params)
    plain = jax.make_jaxpr(f)(x)
    assert fc.rewrite(plain) is plain
    assert "platform_index" not in str(jax.make_jaxpr(fc.fast(f))(x))
    jax.jit(fc.fast(f)).trace(x).lower(lowering_platforms=("cuda",))


@cases("kind", "Auto", "Explicit")
def test_functions_under_a_mesh_are_those_without_fast(kind, no_cache):
    kinds = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((4,), ("s",), axis_types=kinds)
    x, kernel, rows = random_arrays((16, 9, 9, 4), (3, 3, 4, 8), (256, 200))
    weights = randn(3, 8, 25, 4)

    def gradient(of, stride):
        def loss(x, kernel):
            return jnp.square(dilated(x, kernel, strides=(stride, stride))).mean()

        return jax.grad(loss, of)

    def mapped(f, out):
        how = dict(in_specs=(P("s"), P()), out_specs=out, check_vma=False)
        return jax.shard_map(f, **how)

    def product(x, w):
        return jnp.einsum("bij,ijo->bo", x.reshape(-1, 8, 25), w)

    def total(x, w):
        return jax.lax.psum(x.sum(0), "s")

    def put(x, spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        images = put(x, P("s")), jnp.asarray(kernel)
        by_rows = put(rows, P("s"))
        by_columns = put(rows, P(None, "s"))
        for f, args in (
            (gradient(1, 1), images),
            (gradient(0, 2), images),
            (mapped(total, P()), (by_rows, weights)),
            (mapped(product, P("s")), (by_rows, weights)),
            (lambda x: jax.nn.logsumexp(x, 1), (by_columns,)),
        ):
            assert_same_results(fc.jit(f), jax.jit(f), args)


@cases("dtype", jnp.bfloat16, jnp.float16)
def test_strict_promotion_of_types_is_kept(dtype, no_cache):
    args = jnp.asarray(X, dtype), jnp.asarray(KERNEL, dtype)

    def f(x, kernel):
        return dilated(x, kernel).sum((1, 2))

    for instructions in set(), {"amx_tile"}:
        strict = jax.numpy_dtype_promotion("strict")
        with strict, instruction_set(instructions):
            assert_same_results(fc.jit(f), jax.jit(f), args, 0.01)


PLAIN = GRADS(KERNEL, X)


def is_fast(lowered):
    """Whether no kernel's gradient is in XLA's form."""
    form = "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]"
    return form not in find_forms(lowered.as_text())


def test_a_fast_step_compiles_once_and_takes_arguments_by_name():
    traced = []

    def step(kernel, batch, *, power):
        traced.append(power)
        loss, grads = GRADS(kernel, batch["x"], power)
        return {"loss": loss, "new": kernel - 0.1 * grads}

    fast = fc.fast(functools.partial(step, power=2))
    assert fast.__wrapped__.func is step
    for x in X, X + 1:  # by itself, it is compiled too
        loss, grads = GRADS(KERNEL, x)
        found = fast(KERNEL, batch={"x": x})
        assert_close(found, {"loss": loss, "new": KERNEL - 0.1 * grads})
    assert traced == [2]

    def array(kernel, batch):
        return fast(kernel, batch)["new"]

    given = jnp.asarray(KERNEL)
    lowered = jax.jit(array, donate_argnums=0).lower(given, {"x": X})
    assert is_fast(lowered)
    plain = jax.jit(GRADS).lower(KERNEL, X)
    assert not is_fast(plain)
    assert_close(lowered.compile()(given, {"x": X}), KERNEL - 0.1 * PLAIN[1])
    assert given.is_deleted()


def on_two_devices(f):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def mean(kernel, x):
        return jax.lax.pmean(f(kernel, x), "d")

    return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())


def scanning(f):
    return lambda k, x: jax.lax.scan(lambda k, x: (k - f(k, x)[1], ()), k, x[:, None])


TRANSFORMED = {
    "vmap": lambda f: lambda k, x: jax.vmap(f, (None, 0))(k, x[:, None]),
    "scan": scanning,
    "checkpoint": jax.checkpoint,
    "shard_map": on_two_devices,
    "export": exported_call,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_fast_step_works_in_other_transformations(name):
    transformed = TRANSFORMED[name]
    lowered = jax.jit(transformed(fc.fast(GRADS))).lower(KERNEL, X)
    assert is_fast(lowered)
    assert_same_results(lowered.compile(), jax.jit(transformed(GRADS)), (KERNEL, X))


def test_jit_is_fast_and_has_the_methods_of_jit(no_cache):
    traced = []

    def step(kernel, images, power):
        """A step."""
        traced.append(power)
        return jax.grad(loss_fn)(kernel, images, power), power

    with mock.patch.object(jax, "default_backend", side_effect=AssertionError):
        fast = fc.jit(step, static_argnames="power")  # asks for no backend yet
    plain = jax.jit(step, static_argnames="power")
    assert repr(fast) == repr(plain) and inspect.unwrap(fast) is step
    assert fast.__doc__ == "A step." and is_fast(fast.lower(KERNEL, X, power=3))
    for _ in range(2):
        assert_close(fast(KERNEL, X, power=3), plain(KERNEL, X, power=3))
    assert fast.eval_shape(KERNEL, X, power=3) == plain.eval_shape(KERNEL, X, power=3)
    assert fast.trace(KERNEL, X, power=3).out_info == fast.eval_shape(
        KERNEL, X, power=3
    )
    assert len(traced) == 2  # by each of them once
    fast.clear_cache()
    fast(KERNEL, X, power=3)
    assert len(traced) == 3

    def around(kernel):  # another function each time, which JAX traces anew
        return jax.jit(lambda k: fast(k, X, power=3))(kernel)

    around(KERNEL)
    around(KERNEL)
    assert len(traced) == 4
    fast.clear_cache()
    around(KERNEL)
    assert len(traced) == 6  # with options, which are refused there, and without


def test_jit_is_lowered_for_forms():
    form = jax.ShapeDtypeStruct(X.shape, X.dtype)
    key = jax.random.key(0)
    keys = jax.ShapeDtypeStruct((), key.dtype)

    def step(x, kernel=KERNEL, key=None, name="a"):
        noise = 0 if key is None else jax.random.normal(key)
        return dilated(x, kernel) + noise

    for given, how, arrays, named in (
        ((form,), {}, (X,), {}),
        ((), dict(x=form), (), dict(x=X)),
        ((form, KERNEL), dict(key=keys), (X, KERNEL), dict(key=key)),
    ):
        right = step(*arrays, **named)
        for options in {}, dict(donate_argnums=0), dict(static_argnames="name"):
            fast = fc.jit(step, **options)
            program = fast.lower(*given, **how)
            assert is_fast(program)
            made = jax.eval_shape(fast, *given, **how)
            assert (made.shape, made.dtype) == (right.shape, right.dtype)
            args, kwargs = jax.tree.map(jnp.copy, (arrays, named))
            assert_close(program.compile()(*args, **kwargs), right)


# ---------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------


@cases(
    "function, shapes",
    (nchw, ((2, 3, 5, 4), (3, 3, 3, 2))),
    (jnp.matmul, ((2, 3, 4), (4, 5))),
)
def test_functions_are_the_same_with_jit_disabled(function, shapes):
    x, y = random_arrays(*shapes)
    plain = jax.value_and_grad(loss_of(function), (0, 1))
    with jax.disable_jit():
        found = alone_and_mapped(fc.fast(plain))(x, y)
    assert_close(found, alone_and_mapped(plain)(x, y))


@cases(
    "differentiate",
    lambda f: jax.jit(jax.grad(lambda k: f(X, k).sum())),
    lambda f: jax.grad(lambda k: jax.vmap(f, (0, None))(X[:, None], k).sum()),
    lambda f: jax.grad(lambda k: fc.fast(lambda x: dilated(x, k))(X).sum()),
    lambda f: lambda k: jax.jvp(lambda k: f(X, k), (k,), (k,)),
    lambda f: jax.grad(lambda k: jax.checkpoint(f)(X, k).sum()),
)
def test_whoever_differentiates_fast_cpu_is_told_to_wrap_more(differentiate):
    said = said_by(ValueError, differentiate(fc.fast(dilated)), KERNEL)
    assert "wrap the outermost function: fast(jax.grad(f))" in said


@by_onednn
def test_with_onednn_products_are_not_differentiated_later(no_cache):
    """They would not be hidden, and an activation could take their place."""
    fast = fc.fast(jnp.matmul, fc.compiler_options())
    said = said_by(ValueError, jax.grad(lambda w: fast(SQUARE[0], w).sum()), SQUARE[1])
    assert "wrap the outermost function: fast(jax.grad(f))" in said


def test_what_no_convolution_depends_on_has_gradients():
    def scaled(scale):
        return (scale * fc.fast(dilated)(X, KERNEL) + fc.fast(jnp.square)(scale)).sum()

    y = dilated(X, KERNEL)
    assert_close(jax.grad(scaled)(3.0), y.sum() + 6 * y.size)


def test_a_function_that_changes_an_object_in_place_is_refused():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        kernel: jax.Array

    def step(model, batch):
        batch = batch[0] if isinstance(batch, tuple) else batch
        batch["x"] = 2 * batch["x"]  # f has its own dict, in plain `jit` too
        grads = jax.grad(loss_fn)(model.kernel, batch["x"])
        if in_place:
            model.kernel = model.kernel - grads
        return model.kernel - grads

    in_place = True
    said = said_by(ValueError, jax.jit(fc.fast(step)), Model(KERNEL), {"x": X})
    assert "f changes an argument in place" in said and "nnx.split" in said
    returned = jax.jit(fc.fast(lambda model, batch: (step(model, batch), model.kernel)))
    grads = GRADS(KERNEL, 2 * X)[1]
    found = returned(Model(KERNEL), {"x": X})
    assert_close(found, (KERNEL - 2 * grads, KERNEL - grads))
    in_place = False
    Rows = collections.namedtuple("Rows", "rows")
    dicts = [
        {"x": X},
        collections.OrderedDict(x=X),
        collections.defaultdict(int, x=X),
    ]
    for batch in dicts + [Rows({"x": X})]:
        found = jax.jit(fc.fast(step))(Model(KERNEL), batch)
        assert_close(found, KERNEL - grads)
    assert all(batch["x"] is X for batch in dicts)


def power(x, n):
    for _ in range(n):
        x = x @ x
    return x


def branch(x, rate):
    return 2 * x if isinstance(rate, float) and rate == 0.5 else x


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x

    def __call__(self, x):
        return self.apply(x)


@dataclasses.dataclass(unsafe_hash=True)
class ByContents(Scale):
    factor: float


def with_rest(x, *, flag=False, of=None):
    return {"x": x, "n": 3, "flag": flag, "of": of, "none": None, "rate": 0.5}


STATIC = {  # functions, their arguments, and the arguments of `jit`
    "number": (power, (SQUARE[0], 3), dict(static_argnums=1)),
    "number by name": (power, (SQUARE[0], 3), dict(static_argnames="n")),
    "rate": (branch, (X, 0.5), dict(static_argnums=1)),
    "no array at all": (lambda n: jnp.eye(n), (3,), dict(static_argnums=0)),
    "NumPy's number": (
        lambda x, n: x * np.eye(n),
        (X[0, 0, 0, 0], np.int64(2)),
        dict(static_argnums=1),
    ),
    "object": (Scale.apply, (Scale(2.0), X), dict(static_argnums=0)),
    "function": (lambda f, x: f(x), (jnp.tanh, X), dict(static_argnums=0)),
    "string": (
        lambda x, kind: x if kind == "a" else -x,
        (X, "b"),
        dict(static_argnums=1),
    ),
    "results": (with_rest, (X,), {}),
    "partial": (functools.partial(with_rest, flag=True), (X,), {}),
    "an object that is called": (Scale(3.0), (X,), {}),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_arguments_are_values_in_jit_and_in_fast(name):
    f, args, how = STATIC[name]
    right = jax.jit(f, **how)(*args)
    for found in fc.jit(f, **how)(*args), jax.jit(fc.fast(f), **how)(*args):
        assert jax.tree.structure(found) == jax.tree.structure(right)
        assert_close(found, right)


def test_a_static_object_that_changed_is_traced_anew_as_by_jax():
    steps = [jit(Scale.apply, static_argnums=0) for jit in (jax.jit, fc.jit)]
    scale = ByContents(2.0)
    for factor in 2.0, 3.0, 2.0:  # JAX 0.10 ignores the change
        scale.factor = factor
        right, found = (step(scale, X) for step in steps)
        assert_array_equal(found, right)
        assert VERSION == (0, 10) or found[0, 0, 0, 0] == factor * X[0, 0, 0, 0]


def test_jit_stands_above_functions_and_methods():
    @fc.jit(static_argnames="flag")
    def step(x, flag=True):
        return 2 * x if flag else x

    class Model(Scale):
        apply = fc.jit(Scale.apply, static_argnums=0)

        @functools.partial(fc.jit, static_argnames="self")
        def named(self, x):
            return self.factor * x

    assert_array_equal(step(X), 2 * X)
    assert_array_equal(step(X, flag=False), X)
    assert_array_equal(Model(3.0).apply(X), 3 * X)
    assert_array_equal(Model(3.0).named(X), 3 * X)


REFUSED = {  # arguments of `jit`, and of the function that it returns
    "string": (lambda x: x, {}, ("a",)),
    "function": (lambda f, x: f(x), {}, (jnp.tanh, X)),
    "string in a tree": (lambda x: x, {}, ({"w": [X, "a"]},)),
    "result": (lambda x: {"a": x, "b": "text"}, {}, (X,)),
    "no hash": (lambda x, n: x, dict(static_argnums=1), (X, [1])),
    "no function": (3, {}, ()),
    "no such argument": (lambda x: x, dict(static_argnames="y"), (X,)),
    "too many": (lambda x: x, {}, (X, X)),
    "unknown option": (lambda x: x, dict(static=1), (X,)),
    "branch": (branch, {}, (X, np.ones(2))),
    "if": (lambda x: x if x.sum() > 0 else -x, {}, (X,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jit_refuses_is_refused_with_the_error_of_jax(name):
    f, how, args = REFUSED[name]
    said = []
    for jit in jax.jit, fc.jit:
        try:
            jit(f, **how)(*args)
        except Exception as error:
            said.append((type(error), re.sub(" at 0x[0-9a-f]*", "", str(error))))
        else:
            said.append(None)
    assert said[0] == said[1]


def test_disable_jit_calls_the_function():
    kinds = []

    def loss(x):
        kinds.append(type(x))  # JAX's, of a gradient
        return (x @ x).sum()

    def step(x):
        y = x @ x
        return -y if float(y.sum()) > 0 else y  # a number, not a tracer

    with jax.disable_jit():
        for f in fc.jit(step), fc.fast(step), jax.jit(fc.fast(step)):
            assert_array_equal(f(SQUARE[0]), step(SQUARE[0]))
        for f in loss, fc.jit(loss), fc.fast(loss):
            jax.grad(f)(SQUARE[0])
    assert len(kinds) == 3 and len(set(kinds)) == 1


def test_static_leaves_of_a_filtered_jit_stay_as_they_are():
    equinox = pytest.importorskip("equinox")
    net = equinox.nn.MLP(4, 2, 8, 2, activation=jnp.tanh, key=jax.random.key(0))

    def step(net, x, flag):
        grads = equinox.filter_grad(lambda net: jax.vmap(net)(x).sum())(net)
        assert flag == "on" and net.activation is jnp.tanh
        return equinox.apply_updates(net, grads), flag

    x = randn(0, 8, 4)
    new, flag = equinox.filter_jit(fc.fast(step))(net, x, "on")
    right, _ = equinox.filter_jit(step)(net, x, "on")
    assert flag == "on" and new.activation is jnp.tanh
    arrays = [
        jax.tree.leaves(equinox.filter(x, equinox.is_array)) for x in (new, right)
    ]
    assert_close(*arrays)


@by_onednn
def test_the_users_options_win_and_switch_onednn_off(no_cache):
    def text(**how):
        return fc.jit(jnp.matmul, **how).lower(*SQUARE).compile().as_text()

    level = {"xla_backend_optimization_level": 0}
    assert "__onednn" in text() and "__onednn" in text(compiler_options=level)
    assert "__onednn" not in text(compiler_options={fc._ONEDNN: False})
    assert "__onednn" not in text(compiler_options={fc._LEFT_OUT: "cse"})
    program = fc.jit(jnp.sum, compiler_options={fc._YNNPACK: ""})
    assert "ynn" not in program.lower(SQUARE[0]).compile().as_text()
    asked = fc.jit(jnp.matmul, compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        asked(*SQUARE)
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        jax.jit(fc.jit(jnp.matmul, compiler_options=level))(*SQUARE)


def mixed(x, w):
    half = jnp.tanh(w.astype(jnp.bfloat16))
    return (
        x @ w,
        half,
        jnp.searchsorted(w[0], x[0]),
        jnp.zeros((0, 3)) @ jnp.ones((3, 4)),
    )


def ways_of(explanation):
    return {row[0]: row[2] for row in explanation.operations}


@by_onednn
def test_explain_tells_what_is_replaced_and_what_keeps_onednn_off(
    no_cache, monkeypatch
):
    found = fc.explain(mixed)(*SQUARE)
    assert found.no_onednn == "" and str(found).endswith("\noneDNN is on")
    assert found.operations["dot_general", "float32[256,256]", "multiply"] == 1
    assert found.operations["tanh", "bfloat16[256,256]", "round"] == 1
    assert ways_of(found)["dot_general"] == "stays: an array is empty"
    assert fc.explain(fc.jit(mixed))(*SQUARE) == found
    closed = fc.explain(lambda x, w: (own.bind(x, w), x @ w))(*SQUARE)
    assert closed.no_onednn == "fast cannot enter the primitive own"
    assert ways_of(closed)["own"] == "stays: fast cannot enter it"
    off = {fc._ONEDNN: False}
    asked = fc.jit(mixed, compiler_options=off)
    for explain in asked.explain, fc.explain(asked):
        assert explain(*SQUARE).no_onednn == "compiler_options switches it off"
    assert "call_hi_primitive" not in ways_of(found)
    for name, value, said in (
        ("XLA_FLAGS", f"--{fc._ONEDNN}=false", "XLA_FLAGS switches it off"),
        ("XLA_FLAGS", f"--{fc._LEFT_OUT}=cse", f"XLA_FLAGS names {fc._LEFT_OUT}"),
        ("FAST_CPU", "0", "the environment has FAST_CPU=0"),
        ("FAST_CPU_LEAVE", "tanh", "the environment has FAST_CPU_LEAVE"),
    ):
        with mock.patch.dict(os.environ, {name: value}):
            assert fc.explain(mixed)(*SQUARE).no_onednn == said
    with mock.patch.object(platform, "machine", lambda: "arm64"):
        assert fc.explain(mixed)(*SQUARE).no_onednn == "the processor is arm64"
    jax.config.update("jax_compilation_cache_dir", "a folder")
    assert "persistent cache" in fc.explain(mixed)(*SQUARE).no_onednn


def test_trainers_explain_what_they_run():
    w, x = SQUARE
    trainer = pe.make_trainer(
        lambda key: w, lambda w, x: jnp.square(x @ w).mean(), SGD, members=2, devices=2
    )
    found = trainer.explain("update", x)
    assert {row[0] for row in found.operations} >= {"dot_general", "reduce_sum"}
    assert_refuses(lambda: trainer.explain("fit", x), "^method is 'fit'; expected")
    with mock.patch.object(pe, "_fast_cpu", types.SimpleNamespace()):
        assert_refuses(
            lambda: trainer.explain("update", x), "explain needs fast_cpu.py"
        )


def test_compare_tells_times_and_differences():
    def f(x, key):
        nan = jnp.where(x > 0, x, jnp.nan)
        n = jnp.arange(3) + is_fast_now
        return {
            "x": x + 0.25 * is_fast_now,
            "n": n,
            "key": key,
            "nan": nan,
            "none": None,
        }

    is_fast_now = False
    key = jax.random.key(0)
    x = jnp.array([-1.0, 2, 1])
    same = fc.compare(f, rounds=3)(x, key)
    assert same.by_jax > 0 < same.by_fast_cpu
    assert set(jax.tree.leaves(same.differences)) == {0.0}
    assert same.rounding["x"] == np.finfo(np.float32).eps and same.rounding["n"] == 0
    rewritten = fc._rewritten

    def other(f, options):
        def run(*args):
            nonlocal is_fast_now
            is_fast_now = True
            result = rewritten(f, options)(*args)
            is_fast_now = False
            return result

        return run

    with mock.patch.object(fc, "_rewritten", other):
        apart = fc.compare(f, rounds=3)(x, key)
    assert apart.differences == {"x": 0.125, "n": 1.0, "key": 0, "nan": 0, "none": None}


def test_the_environment_leaves_operations(monkeypatch):
    args = jnp.ones((4, 4), jnp.bfloat16), 1

    def f(x, n):
        return jnp.tanh(jnp.exp(x)) * n

    def names():
        return set(
            re.findall(r"fast_cpu\.\w+\.(\w+)", fc.jit(f).lower(*args).as_text())
        )

    assert names() == {"tanh", "exp", "mul"}
    monkeypatch.setenv("FAST_CPU_LEAVE", "exp,mul")
    assert names() == {"tanh"}
    monkeypatch.setenv("FAST_CPU_LEAVE", "exp,tangent")
    with pytest.raises(ValueError, match="FAST_CPU_LEAVE names {'tangent'}; expected"):
        names()
    monkeypatch.setenv("FAST_CPU_LEAVE", "")
    monkeypatch.setenv("FAST_CPU", "0")
    assert names() == set()
    assert_array_equal(fc.jit(f)(*args), jax.jit(f)(*args))


@by_onednn
def test_left_products_are_not_given_to_onednn_by_a_flag(
    monkeypatch, no_cache, optimized
):
    """They are not hidden, so oneDNN would put an activation in their place."""
    monkeypatch.setenv("XLA_FLAGS", f"--{fc._ONEDNN}=true")
    monkeypatch.setenv("FAST_CPU_LEAVE", "dot_general")
    assert "__onednn" not in fc.jit(with_silu).lower(*SQUARE).compile().as_text()
    with pytest.raises(ValueError, match="FAST_CPU_LEAVE.* from oneDNN"):
        fc.fast(with_silu)(*SQUARE)


def test_a_way_that_fails_is_told_once_at_the_line_of_the_user(monkeypatch):
    def fails(*_, **__):
        raise KeyError("no such parameter")

    broken = fc._ROUND._replace(compute=fails)
    monkeypatch.setattr(fc, "_STRICT", False)
    monkeypatch.setitem(fc._WAYS, "tanh", (broken,))
    x = jnp.ones(4, jnp.bfloat16)
    trainer = pe.make_trainer(
        lambda key: x,
        lambda w, x: jnp.tanh(w + x.sum()).mean(),
        SGD,
        members=2,
        devices=2,
    )
    for call in lambda: fc.jit(jnp.tanh)(x), lambda: trainer.lower("update", x[None]):
        fc._TOLD.clear()
        with pytest.warns(UserWarning) as warned:
            call()
            call()
        (told,) = [
            str(w.message) for w in warned if "fast_cpu leaves" in str(w.message)
        ]
        assert told.startswith(
            "fast_cpu leaves tanh to XLA, which may be slow: 'fails'"
        )
        assert told.endswith(f"JAX {jax.__version__}: KeyError('no such parameter')")
        assert warned[0].filename == __file__
    assert "KeyError" in ways_of(fc.explain(jnp.tanh)(x))["tanh"]
    assert_array_equal(fc.jit(jnp.tanh)(x), jax.jit(jnp.tanh)(x))


INSIDE = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), ()), x, length=2)[0],
    "jit": lambda f: jax.jit(lambda x: f(x)),
    "a constant": lambda f: jax.jit(lambda x: x + f(SQUARE[0])),
    "itself": lambda f: fc.jit(lambda x: f(x)),
    "gradient": lambda f: jax.grad(lambda x: jnp.square(f(x)).sum()),
}


@pytest.mark.parametrize("name", INSIDE)
def test_jit_inside_of_a_trace_is_fast_without_options(name, no_cache):
    def step(x):
        return jnp.tanh(x @ SQUARE[1])

    around = INSIDE[name]
    assert_same_results(around(fc.jit(step)), around(jax.jit(step)), SQUARE[:1])


# ---------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------

PAGES = """
import resource, sys
import jax, jax.numpy as jnp
import fast_cpu

if sys.argv[1] == "kept":
    fast_cpu.keep_memory()
hide = jax.lax.optimization_barrier
f = lambda x: (hide(jnp.outer(x, x)) * hide(jnp.outer(x + 1, x))).sum()
step, x = fast_cpu.jit(f), jnp.ones(5100)
assert step.lower(x).compile().memory_analysis().temp_size_in_bytes > 100e6
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")
def test_calls_make_no_pages_where_memory_is_kept():
    kept, given_back = (
        [int(pages) for pages in run_python(PAGES, name).split()]
        for name in ("kept", "given back")
    )
    # On a busy machine, many calls cannot have the last one's block, and make another.
    assert min(kept[3:]) < 100 < 10_000 < min(given_back[3:])


def test_memory_is_kept_by_glibc_and_where_it_is_asked_for(monkeypatch):
    library = mock.Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    for name, count in ("", 0), ("glibc", 2):
        monkeypatch.setattr(platform, "libc_ver", lambda name=name: (name, ""))
        pe.use_cpu_devices(keep_memory=False)
        assert library.mallopt.call_count == 0
        pe.use_cpu_devices()
        assert library.mallopt.call_count == count


def test_memory_that_is_kept_too_late_is_a_warning():
    code = "import warnings, fast_cpu, jax; warnings.simplefilter('error'); "
    code += "number = jax.config.jax_num_cpu_devices; fast_cpu.keep_memory(); "
    code += "assert jax.config.jax_num_cpu_devices == number; jax.devices(); "
    code += "fast_cpu.keep_memory(wait=False)\ntry: fast_cpu.keep_memory()\n"
    code += "except UserWarning as error: print(error)"
    late = "keep_memory() came after JAX had started"
    assert run_python(code).startswith(late) or platform.libc_ver()[0] != "glibc"
