"""Tests of fast_cpu.py."""

import collections
import ctypes
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import math
import os
import platform
import re
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
from numpy.testing import assert_array_equal

import fast_cpu as fc
import pjax_ensemble as pe
from conftest import SGD, assert_close, cases, dilated, randn, run_python, said_by

OLD = jax.__version_info__ < (0, 10)  # lowers the branches of all platforms
new = pytest.mark.skipif(OLD, reason="0.5 keeps all branches")

VALID, NDHWC = dict(padding="VALID"), dict(axes="NDHWC DHWIO NDHWC")
# Convolutions of other libraries: shapes of images and kernel, and the parameters.
CONVOLUTIONS = {
    "NHWC": ((2, 6, 5, 3), (3, 3, 3, 4), {}),
    "any": ((3, 5, 2, 6), (4, 3, 3, 2), dict(axes="CWNH OHIW WCHN")),
    "summed": ((3, 5, 2, 6), (4, 5, 3, 4), dict(axes="CWNH OHIW WCHN", **VALID)),
    "one axis": ((2, 7, 3), (3, 3, 4), dict(axes="NWC WIO NWC", strides=(2,))),
    "three axes": ((2, 4, 3, 5, 2), (2, 3, 2, 2, 3), NDHWC),
    "three axes, strides and groups": (
        *((2, 4, 7, 5, 3), (4, 2, 3, 2, 2)),
        dict(axes="NCDHW OIDHW NCDHW", strides=(2, 1, 3), feature_group_count=2),
    ),
    "three axes, transposed": (
        *((2, 3, 2, 4, 3), (2, 3, 4, 3, 2)),
        dict(padding=[(1, 0), (2, 1), (0, 3)], lhs_dilation=(2, 1, 3), **NDHWC),
    ),
    "four axes": (
        *((2, 3, 2, 3, 4, 2), (2, 2, 1, 2, 2, 3)),
        dict(axes="NABHWC ABHWIO NABHWC", rhs_dilation=(1, 1, 1, 2)),
    ),
    "depthwise": (
        *((2, 7, 6, 3), (3, 2, 1, 3)),
        dict(strides=(2, 1), rhs_dilation=(1, 2), feature_group_count=3),
    ),
    "wide": (
        *((1, 9, 5, 2), (65, 1, 1, 2)),
        dict(padding=[(30, 40), (0, 0)], feature_group_count=2),
    ),
    "batch groups": ((4, 6, 5, 2), (3, 3, 2, 6), dict(batch_group_count=2)),
    "dilated": (
        *((2, 6, 5, 3), (3, 3, 3, 4)),
        dict(padding=[(2, 2), (1, 3)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
}


def text_for(platform, program, *args):
    """Return a program as it is lowered for a platform."""
    made = export.export(jax.jit(program), platforms=[platform])(*args)
    return made.mlir_module()


def find_forms(text):
    """Return the layouts of a program's convolutions."""
    return re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text)


def are_canonical(forms):
    last = re.compile(r"\[b, [\d, ]*f\]x\[[\d, ]*i, o\]->\[b, [\d, ]*f\]")
    assert forms
    return OLD or all(map(last.fullmatch, forms))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_is_canonical_on_cpus_and_unchanged_elsewhere(name):
    x_shape, kernel_shape, how = CONVOLUTIONS[name]
    convolve = functools.partial(dilated, **how)
    args = randn(0, *x_shape), randn(1, *kernel_shape)
    plain = jax.value_and_grad(lambda *args: jnp.sin(convolve(*args)).sum(), (0, 1))
    fast = fc.fast(plain)

    def both(f):  # calls it alone and under vmap
        return lambda *args: (f(*args), jax.vmap(f)(*twice(args)))

    found = jax.jit(both(fast)).lower(*args)
    forms = find_forms(found.as_text())
    if not name.startswith("depthwise"):
        assert are_canonical(forms)
    else:
        assert OLD or not forms
    assert_close(found.compile()(*args), jax.jit(both(plain))(*args))
    texts = (text_for("cuda", f, *args) for f in (plain, fast))
    expected, found = map(find_forms, texts)
    assert {*expected} <= {*found} and (OLD or found == expected)
    functions = lambda key: args[1], lambda kernel, x: convolve(x, kernel).var(), SGD
    trainer = pe.make_trainer(*functions, members=2, devices=1, at_once=2)
    trainer.lower("update", args[0])  # JAX itself could not map groups over members


# Seeds 21 to 38 err if XLA (JAX 0.5, 0.10) gets a negative padding; 129 to 415 are
# depthwise, in float16 and bfloat16; 395 errs if oneDNN strides one window.
@cases("seed", *range(8), 21, 23, 34, 38, 129, 360, 395, 415)
def test_random_convolutions_and_gradients_are_sums_in_float64(seed):
    """This is a short form of benchmarks/convolutions.py."""
    name, error = convolutions.error(seed)
    assert error <= convolutions.LIMITS[name]


@cases("seed", 3, 25)  # by planes and by phases; by XLA's routine
def test_nan_reaches_all_sums_that_it_is_in(seed):
    args, how = convolutions.draw(seed)

    def convolve(x, kernel, g):
        f = functools.partial(jax.lax.conv_general_dilated, **how)
        y, gradients = jax.vjp(f, x, kernel)
        return y, *gradients(g)

    fast, reached = jax.jit(fc.fast(convolve)), 0
    for i, x in enumerate(args):
        x = x.at[tuple(n // 2 for n in x.shape)].set(jnp.nan)
        bad = *args[:i], x, *args[i + 1 :]
        expected = convolutions.sums(*(np.asarray(x, np.float64) for x in bad), how)
        hit = [np.isnan(x) for x in expected]
        assert all(np.isnan(x)[y].all() for x, y in zip(fast(*bad), hit))
        reached += sum(x.sum() for x in hit)
    assert reached


@cases("name", "summed", "depthwise")
def test_convolutions_of_integers_are_exact(name):
    x_shape, kernel_shape, how = CONVOLUTIONS[name]
    x = 2**24 + np.arange(np.prod(x_shape), dtype=np.int32).reshape(x_shape)
    convolve = functools.partial(dilated, **how)
    args = x, np.ones(kernel_shape, np.int32)
    assert_array_equal(jax.jit(fc.fast(convolve))(*args), convolve(*args))


@cases("x, kernel", ((0, 6, 5, 3), (3, 3, 3, 4)), ((2, 6, 5, 0), (3, 3, 0, 4)))
def test_a_convolution_without_numbers_has_gradients_without_numbers(x, kernel):
    gradient = fc.fast(jax.grad(lambda *args: dilated(*args).sum(), (0, 1)))
    found = jax.jit(gradient)(jnp.zeros(x), jnp.ones(kernel))
    assert [y.shape for y in found] == [x, kernel] and not found[1].any()


def test_a_kernels_gradient_is_a_sum_over_chunks_of_the_batch():
    args = randn(0, 60, 32, 32, 16), randn(1, 3, 3, 16, 16)  # 32 fit, 30 divide 60
    plain = jax.grad(lambda x, kernel: dilated(x, kernel).var(), 1)
    fast = jax.jit(fc.fast(plain)).lower(*args)
    kernels = re.findall(r"convolution.*, tensor<(\S+)xf32>\) ", fast.as_text())
    assert OLD or "32x32x60x16" not in kernels
    fast = fast.compile()
    assert_close(fast(*args), jax.jit(plain)(*args))
    patches = args[0].nbytes * 9
    assert fast.memory_analysis().temp_size_in_bytes < patches / 2


def twice(args):
    return [jnp.stack([x, 2 * x]) for x in args]


def nchw(x, kernel):
    return jnp.tanh(dilated(x, kernel, axes="NCHW OIHW NCHW"))


with_jvp, with_vjp = jax.custom_jvp(nchw), jax.custom_vjp(nchw)
with_jvp.defjvp(lambda given, tangents: jax.jvp(nchw, given, tangents))
with_vjp.defvjp(lambda *args: (nchw(*args), args), lambda x, g: jax.vjp(nchw, *x)[1](g))


def scanned_constant(x, kernel, layer=nchw):
    return jax.lax.scan(lambda x, _: (layer(x, kernel), ()), x, length=2)[0]


def chosen(x, kernel):
    return jax.lax.cond(x.sum() > 0, nchw, lambda x, k: x * k.sum(), x, kernel)


# Each entry puts a convolution inside one of JAX's transformations.
NESTINGS = {
    "scan of a constant": scanned_constant,
    "cond": chosen,
    "jit of checkpoint": jax.jit(lambda *x: scanned_constant(*x, jax.checkpoint(nchw))),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "grad": lambda x, k: jax.grad(lambda x: nchw(x, k).sum())(x),
    "vmap": lambda x, k: jax.vmap(nchw)(*twice((x, k))).sum(0),
    "Hessian product": lambda x, k: jax.jvp(
        jax.grad(lambda x: nchw(x, k).sum()), (x,), (jnp.cos(x),)
    )[1],
    "gradients per example": lambda x, k: jax.vmap(
        jax.grad(lambda k, x: nchw(x[None], k).sum()), (None, 0)
    )(k, x),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_convolutions_are_canonical_inside_transformations(name):
    function, args = NESTINGS[name], (randn(0, 2, 3, 5, 4), randn(1, 3, 3, 3, 2))

    def plain(*args):
        grads = jax.grad(lambda *args: function(*args).sum(), (0, 1))
        return function(*args), grads(*args)

    fast = jax.jit(fc.fast(plain)).lower(*args)
    assert are_canonical(find_forms(fast.as_text()))
    assert_close(fast.compile()(*args), jax.jit(plain)(*args))


@cases(
    "function, args",
    (nchw, (randn(0, 2, 3, 5, 4), randn(1, 3, 3, 3, 2))),
    (jnp.matmul, (randn(0, 2, 3, 4), randn(1, 4, 5))),
)
def test_functions_are_the_same_with_jit_disabled(function, args):
    plain = jax.value_and_grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1))
    fast = fc.fast(plain)
    with jax.disable_jit():
        found = fast(*args), jax.vmap(fast)(*twice(args))
    assert_close(found, (plain(*args), jax.vmap(plain)(*twice(args))))


def test_programs_with_nothing_to_rewrite_stay_as_they_are():
    numbers = (np.ones(shape, np.int32) for shape in CONVOLUTIONS["any"][:2])
    integers = functools.partial(dilated, axes="CWNH OHIW WCHN")
    programs = [jax.make_jaxpr(integers)(*numbers)]
    dense = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).sum())
    programs += [jax.make_jaxpr(jax.jit(dense))(randn(0, 3, 4), randn(1, 99, 3))]
    fast = fc.fast(dilated)  # whose convolutions are replaced already
    programs += [jax.make_jaxpr(fast)(randn(0, 1, 5, 5, 2), randn(1, 3, 3, 2, 3))]
    for program in programs:
        assert fc.rewrite(program) is program


@new
@cases("name", "three axes, transposed", "three axes", "transposed")
def test_convolutions_of_a_step_have_two_axes_and_no_zeros_between_entries(name):
    x, kernel = (64, 5, 6, 3), (4, 3, 3, 2)
    how = dict(padding=[(2, 1), (1, 1)], lhs_dilation=(2, 3))
    x, kernel, how = CONVOLUTIONS.get(name, (x, kernel, how))
    both = jax.value_and_grad(lambda *args: dilated(*args, **how).var(), (0, 1))
    text = text_for("cpu", fc.fast(both), randn(0, *x), randn(1, *kernel))
    assert not re.search(r"interior = \[[^]]*[1-9]", text)
    found = re.findall(r"stablehlo.convolution\(.*", text)
    assert len(found) <= 3
    for text in found:
        assert "lhs_dilate" not in text or "lhs_dilate = [1, 1]" in text
        assert len(re.findall(r"tensor<[\dx]*f32>", text)[0].split("x")) == 5


def test_volumes_are_convolved_a_few_planes_at_a_time():
    x = jax.ShapeDtypeStruct((1, 64, 32, 32, 32), np.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 32, 16), np.float32)
    convolve = functools.partial(dilated, axes="NDHWC DHWIO NDHWC")
    gradient = jax.grad(lambda *args: convolve(*args).var(), 1)
    for function, most in (convolve, 2), (gradient, 4):  # all planes: 4 and 13
        compiled = jax.jit(fc.fast(function)).lower(x, kernel).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < most * 4 * x.size


# ---------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------

X, KERNEL = randn(0, 4, 6, 5, 3), randn(1, 3, 3, 3, 4)


def loss_fn(kernel, images, power=2):
    return jnp.abs(dilated(images, kernel) ** power).mean()


GRADS = jax.value_and_grad(loss_fn)
PLAIN = GRADS(KERNEL, X)


def is_fast(lowered):
    """Whether no kernel's gradient is in XLA's form; JAX 0.5 keeps all branches."""
    form = "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]"
    return OLD or form not in find_forms(lowered.as_text())


def test_a_step_compiles_once_and_takes_arguments_by_name_and_static_ones():
    traced = []

    def step(kernel, batch, *, power, flag, activation, name=None):
        traced.append(name)
        assert flag is True and activation is jnp.tanh
        loss, grads = GRADS(kernel, batch["x"], power)
        return {"loss": loss, "new": kernel - 0.1 * grads, "of": activation, "a": name}

    fast = fc.fast(functools.partial(step, power=2))
    assert fast.__wrapped__.func is step
    how = dict(batch={"x": X}, flag=True, activation=jnp.tanh)
    for x in X, X + 1:  # by itself, it is compiled too
        found = fast(KERNEL, **how | dict(name="a", batch={"x": x}))
        loss, grads = GRADS(KERNEL, x)
        expected = {"loss": loss, "new": KERNEL - 0.1 * grads}
        assert (found.pop("of"), found.pop("a")) == (jnp.tanh, "a")
        assert_close(found, expected)
    assert traced == ["a"]

    def array(kernel, batch):
        return fast(kernel, batch, flag=True, activation=jnp.tanh)["new"]

    given = jnp.asarray(KERNEL)
    lowered = jax.jit(array, donate_argnums=0).lower(given, {"x": X})
    assert is_fast(lowered)
    plain = jax.jit(GRADS).lower(KERNEL, X)
    assert OLD or not is_fast(plain)
    assert_close(lowered.compile()(given, {"x": X}), KERNEL - 0.1 * PLAIN[1])
    assert given.is_deleted()


def on_two_devices(f):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    whole, parts = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("d")
    how = dict(mesh=mesh, in_specs=(whole, parts), out_specs=whole)
    mean = lambda *args: jax.lax.pmean(f(*args), "d")  # noqa: E731
    if hasattr(jax, "shard_map"):  # checks types
        return jax.shard_map(mean, **how)
    return jax.experimental.shard_map.shard_map(mean, check_rep=False, **how)


def scanning(f):
    return lambda k, x: jax.lax.scan(lambda k, x: (k - f(k, x)[1], ()), k, x[:, None])


WAYS = {
    "vmap": lambda f: lambda k, x: jax.vmap(f, (None, 0))(k, x[:, None]),
    "scan": scanning,
    "checkpoint": jax.checkpoint,
    "shard_map": on_two_devices,
    "export": lambda f: (
        lambda *args: export.export(jax.jit(f), platforms=["cpu"])(*args).call(*args)
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_fast_step_works_in_other_transformations(name):
    fast, plain = (jax.jit(WAYS[name](f)) for f in (fc.fast(GRADS), GRADS))
    lowered = fast.lower(KERNEL, X)
    assert is_fast(lowered)
    assert_close(lowered.compile()(KERNEL, X), plain(KERNEL, X))


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


def test_what_no_convolution_depends_on_has_gradients():
    def scaled(scale):
        return (scale * fc.fast(dilated)(X, KERNEL) + fc.fast(jnp.square)(scale)).sum()

    y = dilated(X, KERNEL)
    assert_close(jax.grad(scaled)(3.0), y.sum() + 6 * y.size)


def test_a_function_that_changes_an_object_in_place_is_refused():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, kernel):
            self.kernel = kernel

        def tree_flatten(self):
            return (self.kernel,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

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
    returned = jax.jit(fc.fast(lambda *args: (step(*args), args[0].kernel)))
    grads = GRADS(KERNEL, 2 * X)[1]
    found = returned(Model(KERNEL), {"x": X})
    assert_close(found, (KERNEL - 2 * grads, KERNEL - grads))
    in_place = False
    Rows = collections.namedtuple("Rows", "rows")
    filled = {"x": X}, collections.OrderedDict(x=X), collections.defaultdict(int, x=X)
    for batch in *filled, Rows({"x": X}):
        found = jax.jit(fc.fast(step))(Model(KERNEL), batch)
        assert_close(found, KERNEL - grads)
    assert all(batch["x"] is X for batch in filled)


VERSION = tuple(map(int, jaxlib.__version__.split(".")[:2]))
TRIED = VERSION in ((0, 11), (0, 12))
by_onednn = pytest.mark.skipif(not TRIED, reason="this jaxlib has none, or none tried")
LEAST = os.environ.get("ONEDNN_MAX_CPU_ISA", "").startswith("AVX2")
by_half = pytest.mark.skipif(LEAST, reason="oneDNN is told to have no bfloat16")


def compiled(f, *args):
    return fc.jit(f).lower(*args).compile()


@pytest.fixture
def no_cache():
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    kept = [getattr(jax.config, name) for name in names]
    jax.config.update(names[0], None)
    compilation_cache.reset_cache()  # otherwise JAX goes on to keep programs
    yield
    for option in zip(names, kept):
        jax.config.update(*option)
    compilation_cache.reset_cache()


SINGLE = {
    fc._YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}
PASSES = "onednn-ops-rewriter,simplify-fp-conversions"
ONEDNN = {fc._ONEDNN: True, fc._YNNPACK: "", fc._LEFT_OUT: PASSES}
REDUCE = ONEDNN | {fc._YNNPACK: "LIBRARY_FUSION_TYPE_REDUCE"}


@cases(
    "version, by_onednn, without",
    *(("0.5.0", {}, {}), ("0.9.2", {}, {}), ("0.10.2", SINGLE, SINGLE)),
    *(("0.11.2", ONEDNN, SINGLE), ("0.12.0.1", REDUCE, {}), ("0.13.0", {}, {})),
)
def test_options_are_those_that_are_right_in_a_version(
    version, by_onednn, without, no_cache, monkeypatch
):
    monkeypatch.setattr(jaxlib, "__version__", version)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert fc.compiler_options("cpu") == fc.compiler_options() == by_onednn
    assert fc.compiler_options("gpu") == fc.compiler_options("tpu") == {}
    for flag in fc._ONEDNN, fc._YNNPACK:  # which then wins
        monkeypatch.setenv("XLA_FLAGS", f"--{flag}=false")
        rest = {name: value for name, value in by_onednn.items() if name != flag}
        assert fc.compiler_options() == rest
    monkeypatch.setenv("XLA_FLAGS", f"--{fc._LEFT_OUT}=cse")  # lacks what oneDNN needs
    assert fc.compiler_options() == without
    monkeypatch.delenv("XLA_FLAGS")
    with mock.patch.object(platform, "machine", lambda: "arm64"):
        assert fc.compiler_options() == without
    jax.config.update("jax_compilation_cache_dir", "a folder")
    assert fc.compiler_options() == without
    jax.config.update("jax_enable_compilation_cache", False)
    assert fc.compiler_options() == by_onednn


@cases("value, hidden", ("=true", True), ("=false", False), ("", True))
def test_products_are_hidden_where_a_flag_switches_onednn_on(
    value, hidden, monkeypatch
):
    """Otherwise oneDNN would put the SiLU of a product in the product's place."""
    monkeypatch.setenv("XLA_FLAGS", f"--{fc._ONEDNN}{value}")
    text = jax.jit(fc.fast(jnp.matmul)).lower(*SQUARE).as_text()
    assert (".hidden" in text) == hidden


def test_this_version_knows_its_options(no_cache):
    x = jnp.ones((64, 64))
    for options in fc.compiler_options(), SINGLE if VERSION >= (0, 10) else {}:
        found = jax.jit(jnp.matmul, compiler_options=options)(x, x)
        assert (found == 64).all()


@by_onednn
def test_programs_have_the_options_of_the_cache_as_it_is_now(no_cache, tmp_path):
    """JAX's persistent cache cannot keep programs with oneDNN, and would warn of it."""
    step = fc.jit(jnp.matmul)
    trainer = pe.make_trainer(
        lambda key: SQUARE[0], lambda w, x: (x @ w).mean(), SGD, members=1
    )
    for folder in None, str(tmp_path), None:
        jax.config.update("jax_compilation_cache_dir", folder)
        lowered = step.lower(*SQUARE), trainer.lower("update", SQUARE[1])
        hidden = [".hidden" in each.as_text() for each in lowered]
        assert hidden == [folder is None] * 2


def matrix_times_rows(x):
    return jax.vmap(lambda row: jnp.square(jnp.eye(3) @ row).sum())(x)


# Faults of YNNPACK's reductions in jaxlib 0.10 and 0.11: a race, whose result changes
# from call to call; wrong rows; a crash for high ranks.
ROWS = np.zeros((32769, 3), np.float32)
ROWS[:, 1] = np.arange(32769) % 1000
PAIR = randn(0, 3, 1, 2, 2, 8, 8, 8), randn(1, 3, 1, 2, 2, 8, 8, 8)
OUTER = np.ones((10, 4, 6), np.float32), np.ones((10, 4, 6, *[5] * 5), np.float32)
FAULTS = {
    "broadcast": (
        lambda x: jnp.broadcast_to(x, (2, 1024, 1024)).sum(),
        (np.ones((1024, 1), np.float32),),
    ),
    "rows": (matrix_times_rows, (ROWS,)),
    "rank of 7": (lambda x, y: (x * y).sum(3), PAIR),
    "rank of 8": (lambda x, y: jnp.log((x[(..., *[None] * 5)] * y).sum(2)), OUTER),
}


@pytest.mark.parametrize("name", FAULTS)
def test_reductions_are_right_in_steps_and_trainers(name, optimized):
    f, args = FAULTS[name]
    with jax.disable_jit():
        expected = np.asarray(f(*args))
    fast = fc.jit(f)
    assert_close([fast(*args) for _ in range(20)], [expected] * 20)
    loss = lambda params, args: (params, f(*args))  # noqa: E731
    how = dict(members=2, devices=1, has_aux=True)
    trainer = pe.make_trainer(jax.random.normal, loss, SGD, **how)
    state = trainer.init(jax.random.key(0))
    for _ in range(10):
        state, (_, aux) = trainer.update(state, args)
        assert_close(aux, np.stack([expected] * 2))


@by_onednn
@cases("axes", 1, 2, 3)
def test_options_bring_onednn_for_convolutions_and_their_gradients(axes, no_cache):
    x, kernel = randn(0, 8, *[6] * axes, 16), randn(1, *[3] * axes, 16, 32)
    names = ["N{}C", "{}IO", "N{}C"]
    names = " ".join(each.format("DHW"[-axes:]) for each in names)

    def loss(kernel, x):
        return jnp.sin(dilated(x, kernel, axes=names)).sum()

    plain = jax.grad(loss, (0, 1))
    found = compiled(plain, kernel, x)
    made = re.findall(r"= \((\w+\[.*?\]).*__onednn.conv", found.as_text())
    assert f"f32[8,{'6,' * axes}32]" in made and len(made) >= 3  # of whole images
    assert_close(found(kernel, x), jax.jit(plain)(kernel, x))


def on(*instructions):
    """Compile as for a processor with these instructions."""
    return mock.patch.object(fc, "_instructions", lambda: {*instructions})


AMX = on("amx_tile", "amx_bf16")


def of_kernel(x, kernel, **how):
    """Return the gradient of a kernel."""
    loss = lambda kernel: dilated(x, kernel, **how).astype(np.float32).sum()  # noqa: E731
    return jax.grad(loss)(kernel)


FACTORS = r"stablehlo\.(dot_general|convolution)\b.* : \(tensor<[^>]*x(\w+)>"


def types_of_factors(f, *args):
    """Return the types of a program's products and convolutions, by their names."""
    options = fc.compiler_options()
    text = jax.jit(fc.fast(f, options)).lower(*args).as_text()
    return {*re.findall(FACTORS, text)}


@by_onednn
@by_half
@cases(
    "dtype, strides, made",
    *((jnp.bfloat16, 1, "bf16"), (jnp.bfloat16, 2, "f32")),
    *((jnp.float16, 1, "f32"), (jnp.float16, 2, "f32")),
)
def test_with_amx_half_types_are_convolved_in_them_where_onednn_is_right(
    dtype, strides, made, no_cache
):
    given = randn(0, 3, 3, 8, 1), randn(1, 4, 16, 16, 8)
    given = [jnp.asarray(x, dtype) for x in given]
    f = lambda kernel, x: dilated(x, kernel, strides=(strides, strides))  # noqa: E731

    def gradient(
        kernel, x
    ):  # with one output, which were garbage; strides are dilation
        return jax.grad(lambda k: jnp.square(f(k, x)).sum(dtype=float))(kernel)

    exact = gradient(*(x.astype(float) for x in given))
    assert_close(compiled(gradient, *given)(*given), exact, 0.02)
    with AMX:
        assert types_of_factors(f, *given) == {("convolution", made)}
        assert_close(compiled(f, *given)(*given), f(*given), 0.02)


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
        *((1, 4, 8, 32, 4), (3, 1, 16, 4, 8), "f32"),
    ),
    "signals": (
        functools.partial(dilated, axes="NWC WIO NWC"),
        *((2, 32, 8), (8, 8, 16), "f32"),
    ),
    "windows 7 wide": (dilated, (2, 8, 32, 8), (1, 7, 8, 16), "bf16"),
    "windows 8 high, 3 wide": (dilated, (2, 16, 16, 8), (8, 3, 8, 16), "bf16"),
    "16 channels": (dilated, (2, 8, 32, 16), (1, 8, 16, 16), "bf16"),
    "dilation": (
        functools.partial(dilated, rhs_dilation=(1, 2)),
        *((2, 8, 32, 8), (1, 8, 8, 16), "bf16"),
    ),
}


@by_onednn
@by_half
@pytest.mark.parametrize("name", FEW)
def test_with_amx_few_channels_with_wide_windows_are_float32(name, no_cache):
    """oneDNN (JAX 0.12) is wrong there, by as much as the largest number."""
    f, x, kernel, made = FEW[name]
    given = [jnp.asarray(randn(i, *n), jnp.bfloat16) for i, n in enumerate((x, kernel))]
    exact = f(*(x.astype(np.float32) for x in given))
    with AMX:
        assert types_of_factors(f, *given) == {("convolution", made)}
        assert_close(compiled(f, *given)(*given), exact, 0.02)


def asked_for(f, precision="bfloat16"):
    def inside(*args):
        with jax.default_matmul_precision(precision):
            return f(*args)

    return inside


@by_onednn
@by_half
def test_factors_are_bfloat16_where_the_outermost_call_asks_for_it(no_cache):
    """Without a request, no bit changes, and none where bfloat16 gains nothing."""
    x, kernel, w = randn(0, 8, 8, 8, 16), randn(1, 3, 3, 16, 16), randn(2, 16, 24)

    def step(precision, *args):
        def loss_fn(kernel, w, x):
            y = jnp.tanh(dilated(x, kernel, precision=precision))
            return jnp.square(jnp.dot(y, w, precision=precision)).mean()

        return jax.value_and_grad(loss_fn, (0, 1))(*args)

    plain, args = functools.partial(step, None), (kernel, w, x)
    exact = plain(*args)

    def compare(f, made, *instructions):
        with on(*instructions):
            types, found = types_of_factors(f, *args), compiled(f, *args)(*args)
        assert types == {("dot_general", made), ("convolution", made)}
        assert_close(found, exact, 0.05 if made == "bf16" else 1e-5)
        return found

    single = compare(plain, "f32", "avx2")
    same = functools.partial(jax.tree.map, assert_array_equal, single)
    same(compare(plain, "f32", "amx_bf16"))
    # A layer's own precision asks for nothing, nor does a call inside.
    for name in "default", "fastest", "bfloat16":
        same(compare(functools.partial(step, name), "f32", "amx_bf16"))
    same(compare(asked_for(plain), "f32", "amx_bf16"))
    with jax.default_matmul_precision("default"):
        same(compare(plain, "f32", "amx_bf16"))
    with jax.default_matmul_precision("bfloat16"):
        same(compare(plain, "f32", "avx2"))
        same(compare(functools.partial(step, "highest"), "f32", "amx_bf16"))
        for processor in "amx_bf16", "avx512_bf16":
            compare(plain, "bf16", processor)
        trainer = pe.make_trainer(
            lambda key: args[:2], lambda p, x: step(None, *p, x)[0], SGD, members=1
        )
        with on("amx_bf16"):
            text = trainer.lower("update", x).as_text()
            assert {*re.findall(FACTORS, text)} == {
                ("dot_general", "bf16"),
                ("convolution", "bf16"),
            }
    ragged = lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.array([16]))  # noqa: E731
    exact = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    whole = jnp.arange(256).reshape(16, 16)  # which bfloat16 has not
    groups = functools.partial(dilated, feature_group_count=16)
    with on("amx_bf16"), jax.default_matmul_precision("bfloat16"):
        found = compiled(ragged, w.T[:16], w)(w.T[:16], w)
        assert_close(found, w.T[:16] @ w, 0.02)
        found = compiled(exact, whole, whole)(whole, whole)
        assert_array_equal(found, np.asarray(whole) @ np.asarray(whole))
        # Depthwise ones are faster without a cast.
        assert not types_of_factors(groups, x, kernel[:, :, :1])


@by_onednn
@cases("seed", *range(20))
def test_random_convolutions_of_bfloat16_are_right_by_onednn(seed, no_cache):
    """On a processor with AMX, this runs what the lowered programs above only show."""
    _, error = convolutions.error(seed, "bfloat16")
    assert error <= convolutions.LIMITS["bfloat16"]


@by_onednn
def test_windows_of_bfloat16_may_lie_in_padding_alone(no_cache):
    """With many of them, oneDNN (JAX 0.12) ends the process now and then."""
    x, kernel = jnp.ones((1, 2, 48, 9), jnp.bfloat16), jnp.ones((2, 1, 9, 32))
    step = fc.jit(functools.partial(dilated, padding=[(0, 0), (0, 48)]))
    args = x, kernel.astype(x.dtype)
    assert "pad = [[0, 0], [0, 0]]" in step.lower(*args).as_text()
    assert_array_equal(step(*args)[0, 0, :, 0], np.repeat([18, 0], 48))


def test_sums_of_half_types_stay_float32(no_cache):
    """oneDNN does an addition that follows, and would round the sum to bfloat16."""
    x = jnp.ones((300, 8, 8, 16), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 16, 16), jnp.bfloat16)

    def made(x, kernel):
        y = dilated(x, kernel)
        return y.astype(jnp.float32) + 0.125, y

    def whole(kernel, x):  # sums of up to 300 chunks
        y, gradient = jax.vjp(functools.partial(made, x), kernel)
        return y[0], *gradient(jax.tree.map(jnp.ones_like, y))

    with mock.patch.object(fc, "_CHUNK_BYTES", 2_000):
        y, gradient = compiled(whole, kernel, x)(kernel, x)
    assert y[0, 4, 4, 0] == 9 * 16 + 0.125
    expected = jnp.asarray(2 * 300 * np.outer((7, 8, 7), (7, 8, 7)), gradient.dtype)
    assert (gradient == expected[..., None, None]).all()


@cases("dtype", jnp.bfloat16, jnp.float16)
def test_sums_of_half_types_are_rounded_once(dtype):
    """XLA rounds after each addition: a gradient of a bias would be 13,568."""
    x = jnp.ones((3, 4096, 5), dtype)
    step = fc.jit(jax.grad(lambda b: (x + b[None, None]).sum(dtype=jnp.float32)))
    assert (step(jnp.zeros(5, dtype)) == 3 * 4096).all()
    how = dict(window_dimensions=(1, 640, 1), window_strides=(1, 1, 1), padding="VALID")
    pool = fc.jit(lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, **how))
    assert (pool(x) == 640).all()


# The functions that have arguments besides two arrays, or are in no public module.
OTHERS = {
    "integer_pow": lambda x, y: [jax.lax.integer_pow(x, n) for n in (-3, -1, 2, 3, 5)],
    "select_n": lambda x, y: jax.lax.select_n(x == x, y, x),
    "add_any": lambda x, y: jax.grad(lambda x: x * x)(x[0]),
}
BINARY = {"add", "atan2", "div", "max", "min", "mul", "pow", "sub"}


def elementwise(name, x, y):
    arrays = (x, y) if name in BINARY | {*OTHERS} else (x,)
    return (OTHERS.get(name) or getattr(jax.lax, name))(*arrays)


def test_operations_on_bfloat16_are_rounded_alone_and_in_company(optimized):
    """Each result is float32's, to the nearest number of bfloat16, for all numbers."""
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(jnp.bfloat16)
    x = x[~((abs(x) > 0) & (abs(x) < 2.0**-126))]  # processors may take these for 0
    given = x, np.random.default_rng(0).permutation(x)
    alone = {name: functools.partial(elementwise, name) for name in fc._ELEMENTWISE}
    several = lambda f, x, y: jax.tree.map(lambda z: (z, -z, z + z), f(x * 1, y))  # noqa: E731
    scanned = lambda f, x, y: jax.lax.map(lambda pair: f(*pair), (x[None], y[None]))  # noqa: E731

    def all_of(form, *given):
        return {name: form(f, *given) for name, f in alone.items()}

    plainly = functools.partial(all_of, lambda f, *given: f(*given))
    wide = jax.jit(plainly)(*(np.float32(x) for x in given))
    with np.errstate(all="ignore"):
        right = jax.tree.map(lambda y: np.asarray(y).astype(jnp.bfloat16), wide)
        twice = jax.tree.map(lambda y: (y, -y, y + y), right)

    numbers = (given[0] == given[0]) & (given[1] == given[1])

    def same_number(a, b):
        assert_array_equal(np.float32(a), np.float32(b))
        # The sign of a nan that numbers make is known, and where `top_k` puts it.
        assert_array_equal(np.signbit(a) & numbers, np.signbit(b) & numbers)

    same = functools.partial(jax.tree.map, same_number)
    same(fc.jit(plainly)(*given), right)
    same(fc.jit(functools.partial(all_of, several))(*given), twice)
    again = fc.jit(functools.partial(all_of, scanned))(*given)
    same(jax.tree.map(lambda y: y[0], again), right)
    on_gpu = jax.export.export(jax.jit(fc.fast(plainly)), platforms=["cuda"])(*given)
    assert OLD or "bitcast_convert" not in on_gpu.mlir_module()


@jax.custom_vjp
def gated(x, y):
    return x * y + x


gated.defvjp(lambda *args: (gated(*args), args), lambda x, g: (g * x[1] + g, g * x[0]))
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
    saved, form = [x for x in names if rng.random() < 0.5], rng.integers(3)

    def apply(*values):
        for name, (way, which) in zip(names, steps):
            x, y = (values[int(share * len(values))] for share in which)
            values = *values, checkpoint_name(ways[way](x, y), name)
        return values[2:]

    def scan(x, y):
        step = lambda x, _: (x + apply(x, y)[-1] * HALF(0.1), x)  # noqa: E731
        return jax.lax.scan(step, x, None, length=3)

    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    program = [apply, scan, jax.checkpoint(apply, policy=policy)][form]

    def both(*given):
        made, turn = jax.vjp(program, *given)
        return made, turn(jax.tree.map(jnp.cos, made))

    return both


@pytest.mark.parametrize("ways", [ARITHMETIC, ARITHMETIC + CURVES])
def test_programs_of_bfloat16_have_the_numbers_of_their_operations(ways):
    """The reference has each operation compiled by itself, where it is rounded once.

    A whole program by `jax.jit` does not round each: without optimization, on a
    processor with instructions for bfloat16, and in gradients of `scan`.  Sums,
    products and comparisons have the same bits, others the same nan and infinities.
    """
    given = [jnp.asarray(randn(i, 64), HALF) for i in (0, 1)]
    programs = [operations(seed, ways) for seed in range(6)]
    all_of = lambda *given: [f(*given) for f in programs]  # noqa: E731
    found = fc.jit(all_of)(*given)
    with jax.disable_jit():
        right = all_of(*given)

    def kind(y):
        return np.sign(y) * np.isinf(y) + np.where(y == y, 0, np.nan)

    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right)):
        x, y = np.float32(x), np.float32(y)
        same = (x, y) if ways is ARITHMETIC else (kind(x), kind(y))
        assert_array_equal(*same)


TYPES = [jnp.float32, HALF] * 3 + [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]
TYPES += [np.int8, np.int32, np.complex64]


def drawn(seed):
    """Return a random operation that may be replaced, and the forms of its arrays."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    (symbol,) = export.symbolic_shape("n")
    a, b, c, d = (pick(0, 1, 2, 3, 7, 64, symbol) for _ in "abcd")
    dtype, step, wide, axes = (
        pick(*TYPES),
        pick(1, 2),
        pick(None, np.float32),
        pick(1, 2, 3),
    )
    weak = np.dtype(dtype).itemsize >= 4 and pick(True, False)
    array = lambda *n: jax.ShapeDtypeStruct(n, dtype, weak_type=weak)  # noqa: E731
    kind = pick(
        "image", "image", "volume", "product", "product", "sum", "pool", "chain"
    )
    how = dict(preferred_element_type=wide)
    if kind in ("image", "volume"):
        axes = pick("NHWC HWIO NHWC", "NCHW OIHW NCHW", "CWNH OHIW WCHN")
        axes = axes if kind == "image" else "NDHWC DHWIO NDHWC"
        groups, names, k = pick(1, 2), axes.split(), pick(1, 2, 3)
        sizes = dict(N=a, D=2, H=b, W=c, C=2 * groups), dict(D=2, H=k, W=k, I=2, O=4)
        arrays = [array(*map(n.get, of)) for n, of in zip(sizes, names)]
        spread = (pick(1, 1, 2),) * (len(names[0]) - 2)
        how |= dict(lhs_dilation=spread, padding="VALID", feature_group_count=groups)
        f = functools.partial(dilated, axes=axes, strides=(step,) * len(spread), **how)
    elif kind == "product":
        specs = {"ab,bc->ac": ((a, b), (b, c)), "abc,abd->cd": ((a, b, c), (a, b, d))}
        specs |= {"abc,acd->abd": ((a, b, c), (a, c, d)), "a,b->ab": ((a,), (b,))}
        spec, shapes = pick(*specs.items())
        f, arrays = (
            functools.partial(jnp.einsum, spec, **how),
            [array(*n) for n in shapes],
        )
        ragged = functools.partial(
            jax.lax.ragged_dot, group_sizes=np.array([2, 5]), **how
        )
        if pick(False, False, True):
            f, arrays = ragged, [array(7, 3), array(2, 3, 64)]
    elif kind == "chain":
        ways = jnp.tanh, jnp.square, lambda x: x**3, lambda x: x - 1, jax.nn.sigmoid
        ways += jnp.abs, lambda x: 2 / x, lambda x: jnp.where(x > 0, x, 2), jnp.sqrt
        first, then = pick(*ways), pick(*ways)
        f, arrays = lambda x: then(first(x)), [array(a, b)]
    else:
        window, over = (2, 1, axes), pick(0, (0, 1), (1, 2))
        how = dict(window_strides=(step, 1, 1), padding=pick("SAME", "VALID"))
        pool = functools.partial(jax.lax.reduce_window, window_dimensions=window, **how)
        total = lambda x: pool(x, jnp.zeros((), x.dtype), jax.lax.add)  # noqa: E731
        most = lambda x: pool(x, -jnp.inf, jax.lax.max).sum(dtype=np.float32)  # noqa: E731
        sums = total, *(functools.partial(g, axis=over) for g in (jnp.sum, jnp.max))
        f, arrays = jax.grad(most) if kind == "pool" else pick(*sums), [array(a, b, 64)]
    inexact = kind not in ("sum", "pool") and jnp.issubdtype(dtype, jnp.inexact)
    gradients = lambda *x: jax.vjp(f, *x)[1](jnp.ones_like(f(*x)))  # noqa: E731
    return gradients if inexact and pick(False, True) else f, arrays


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


@cases("first", *range(0, 500, 100))
def test_forms_are_those_without_fast(first):
    """No way fails, since the tests let none: arrays are empty, sizes are symbols."""
    taken = 0
    for seed in range(first, first + 100):
        f, arrays = drawn(seed)
        if expected := forms(f, arrays):
            assert forms(fc.fast(f), arrays) == expected, seed
            taken += 1
    assert taken > 70


POOLS = {  # window, strides, padding of an array of four axes
    "halves": ((1, 2, 2, 1), (1, 2, 2, 1), [(0, 0)] * 4),
    "overlaps": ((1, 3, 3, 1), (1, 2, 1, 1), [(0, 0), (1, 1), (2, 1), (0, 0)]),
    "gaps": ((1, 2, 1, 2), (1, 3, 2, 3), [(0, 0), (1, 0), (0, 0), (0, 1)]),
}


@pytest.mark.parametrize("name", POOLS)
def test_max_pools_gradients_are_where_the_first_maximum_is(name):
    x = np.random.default_rng(0).integers(0, 4, (2, 7, 6, 5)).astype(float)
    x[0, :4, :4], x[1, [3, 6], [3, 5], 2], x[0, 1::2, 1:3] = -np.inf, np.nan, -1e30
    window, strides, padding = POOLS[name]
    pool = lambda x: jax.lax.reduce_window(  # noqa: E731
        x, -np.inf, jax.lax.max, *POOLS[name]
    )
    g = randn(1, *jax.eval_shape(pool, x).shape)
    expected, lows = np.zeros(x.shape), [low for low, _ in padding]
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
        given = least.astype(dtype), g.astype(dtype)
        assert_close(step(*given), expected, tolerance)
    assert "scatter" not in step.lower(*given).compile().as_text()


@new
def test_sums_of_casts_are_of_eighths_and_others_are_as_the_version_needs():
    """YNNPACK would first copy half types to float32."""
    for dtype in jnp.bfloat16, jnp.float32:
        x = jnp.ones((512, 256), dtype)
        text = (
            jax.jit(fc.fast(lambda x: x.sum(0, dtype=jnp.float32))).lower(x).as_text()
        )
        eighths = text.count("stablehlo.slice") >= 8
        assert eighths == (dtype == jnp.bfloat16 or VERSION < (0, 12))


# With options, XLA gives oneDNN what follows a product too: without barriers 32, in
# float32, and 83, in bfloat16, err.
@by_onednn
@cases("seed", 32, 83)
def test_programs_with_onednn_are_those_without(seed, no_cache, optimized):
    """This is a short form of benchmarks/convolutions.py --programs."""
    assert fc.compiler_options()
    with jax.numpy_rank_promotion("allow"):
        assert not convolutions.is_wrong(*convolutions.difference(seed))


@new
@cases("f, x", (jnp.matmul, np.ones((256, 256))), (dilated, np.ones((3, 3, 256, 256))))
def test_with_onednn_sums_of_float16_are_float32(f, x):
    """oneDNN has only a reference for others; XLA may, but need not, avoid it."""
    x = jnp.asarray(x, jnp.float16)
    text = jax.jit(fc.fast(f, {fc._ONEDNN: True})).lower(x, x).as_text()
    made = re.findall(r"(?:dot_general |convolution\().*->.*x(\w+)>", text)
    assert made == ["f32"]


@by_onednn
def test_activations_are_right_wherever_products_are(no_cache, optimized):
    """XLA puts silu(y) in the place of y for its other users too."""
    x, w = randn(0, 256, 256), randn(1, 256, 256) / 16
    places = {  # the third is for a platform, by its author
        "vmap": lambda x, w: jax.vmap(jnp.matmul, (0, None))(x[None], w)[0],
        "scan": lambda x, w: jax.lax.scan(lambda y, _: (y @ w, 0), x, None, 1)[0],
        "branch": lambda x, w: jax.lax.platform_dependent(x, w, default=jnp.matmul),
        "checkpoint": jax.checkpoint(jnp.matmul),
        "ragged": lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.array([256])),
    }
    for multiply in jnp.matmul, *places.values():
        found = fc.jit(lambda *args, f=multiply: (y := f(*args), jax.nn.silu(y)))(x, w)
        y = np.float64(x) @ w
        assert_close(found, (y, y / (1 + np.exp(-y))))


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


FLOAT, INTEGERS = dict(preferred_element_type=jnp.float32), np.arange(256**2) % 181 - 90
WEIGHTS, PIXELS = INTEGERS.reshape(256, 256).astype(np.int8), INTEGERS.astype(np.int8)
HALVES = jnp.ones(8, jnp.bfloat16), jnp.full(8, 2.0**-12, jnp.bfloat16)
# oneDNN's option alone makes them wrong.
CHANGED = {
    "rounding": (rounding, *HALVES),
    "high part": (high_part, jnp.arange(100, 200).astype(jnp.bfloat16)),
    "softmax": (overflow, randn(0, 8, 3)),
    "integers": (quantized, randn(0, 256, 256), WEIGHTS),
    "images": (
        quantized_images,
        PIXELS[:4608].reshape(8, 12, 12, 4),
        PIXELS[:288].reshape(3, 3, 4, 8),
    ),
}


@by_onednn
@pytest.mark.parametrize("name", CHANGED)
def test_onednn_changes_nothing_but_products(name, no_cache, optimized):
    f, *args = CHANGED[name]
    right = jax.jit(f)(*args)
    assert_close(fc.jit(f)(*args), right)
    options = ONEDNN | {fc._LEFT_OUT: ""}
    wrong = jax.jit(f, compiler_options=options)(*args)
    with pytest.raises(AssertionError):
        assert_close(wrong, right)

    init, loss = lambda key, _: jax.random.normal(key), lambda p, _, args: (p, f(*args))
    how = dict(members=1, devices=1, has_aux=True, frozen=args)
    trainer = pe.make_trainer(init, loss, SGD, **how)
    _, (_, aux) = trainer.update(trainer.init(jax.random.key(0)), np.ones(1))
    assert_close(jax.tree.map(lambda x: x[0], aux), right)


def remat3(x, w):
    jax.config.update("jax_remat3", True)
    try:
        return jax.jit(jax.checkpoint(with_silu))(x, w)
    finally:
        jax.config.update("jax_remat3", False)


def with_silu(x, w):
    return (y := x @ w), jax.nn.silu(y)


own = core.Primitive("own")
own.multiple_results = True
own.def_abstract_eval(lambda x, w: [x, x])
mlir.register_lowering(own, mlir.lower_fun(with_silu, multiple_results=True))
SQUARE = randn(0, 256, 256), randn(1, 256, 256) / 16
# Functions whose products `fast` does not see.
OPAQUE = {
    "export": lambda x, w: export.export(jax.jit(with_silu))(*SQUARE).call(x, w),
    "primitive": lambda x, w: own.bind(x, w),
    "remat3": remat3,
    "sparse": lambda x, w: [(y := sparse.BCOO.fromdense(x, nse=9) @ w), jax.nn.silu(y)],
    "symmetric": lambda x, w: jax.lax.linalg.symmetric_product(x, w),
    "solver": lambda x, w: jax.lax.linalg.triangular_solve(*BFLOAT16, left_side=True),
}
BFLOAT16 = [
    jnp.asarray(np.tril(x[:64, :64]) + np.eye(64), jnp.bfloat16) for x in SQUARE
]


@by_onednn
@pytest.mark.parametrize("name", OPAQUE)
def test_where_a_part_cannot_be_entered_there_is_no_onednn(name, no_cache, optimized):
    if name == "remat3" and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this version has no such flag")
    f = lambda x, w: (OPAQUE[name](x, w), x @ w)  # noqa: E731
    fast, options = fc.jit(f), fc.compiler_options()
    for _ in range(2):
        assert_close(fast(*SQUARE), jax.jit(f)(*SQUARE), 1e-3)
    assert "__onednn" not in fast.lower(*SQUARE).compile().as_text()
    said = said_by(ValueError, fc.fast(f, options), *SQUARE)
    assert re.match(r"fast\(f, options\) cannot hide .* compile by fast_cpu.jit", said)
    loss = lambda params, x, w: (params, jax.tree.leaves(f(x, w))[1])  # noqa: E731
    how = dict(members=1, devices=1, has_aux=True)
    trainer = pe.make_trainer(jax.random.normal, loss, SGD, **how)
    assert "__onednn" not in trainer.lower("update", *SQUARE).compile().as_text()


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
    for primitive in (x for x in found if "[" not in x.name):  # of all, not of a trace
        functions = [*vars(primitive).values(), *vars(type(primitive)).values()]
        functions = filter(inspect.isfunction, map(inspect.unwrap, functions))
        text = (
            "".join(map(inspect.getsource, functions)) if primitive is not own else ""
        )
        if "jaxpr" in text or type(primitive) is not core.Primitive:
            assert primitive.name in ENTERED | NOT_ENTERED, "enter it, or keep it apart"
            eqn = mock.Mock(primitive=primitive, invars=[])
            assert fc._is_known(eqn) == (primitive.name in ENTERED)


@by_onednn
def test_products_are_hidden_in_programs_of_all_kinds(no_cache, optimized):
    solve = lambda f, b: jax.lax.custom_linear_solve(f, b, lambda f, b: f(f(b)))  # noqa: E731
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
        assert_close(fc.jit(f)(*SQUARE), jax.jit(f)(*SQUARE), 1e-5)


def _multiply(x, w):  # a user's function, named as one of `fast_cpu`
    return with_silu(x, w)


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
    "gradients": lambda f: jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1)),
    "checkpoint": lambda f: UNDER["gradients"](jax.checkpoint(f)),
    "vmap": lambda f: lambda *args: jax.vmap(UNDER["gradients"](f))(*twice(args)),
    "Hessian": lambda f: jax.hessian(lambda *args: jnp.sin(f(*args)).sum(), (0, 1)),
}


@cases("onednn", False, *[True] * (not OLD))
@pytest.mark.parametrize("spec", PRODUCTS)
def test_products_and_their_gradients_are_right(spec, onednn):
    args = [randn(i, *shape) for i, shape in enumerate(PRODUCTS[spec])]
    functions = [way(functools.partial(jnp.einsum, spec)) for way in UNDER.values()]

    def plain(*args):
        halves = (jnp.asarray(x, jnp.bfloat16) for x in args)
        wide = jnp.einsum(spec, *halves, preferred_element_type=jnp.float32)
        return [f(*args) for f in functions], wide

    fast = fc.fast(plain, {fc._ONEDNN: onednn})  # the same forms, with barriers
    found = jax.jit(fast)(*args)
    assert_close(found, jax.jit(plain)(*args))
    mapped = jax.jit(jax.vmap(fast))(*twice(args))
    assert_close(jax.tree.map(lambda x: x[0], mapped), found)
    x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with x64(True):
        args = [x.astype(np.float64) for x in args]
        f = functions[0]
        found = jax.jit(fc.fast(f, {fc._ONEDNN: onednn}))(*args)
        assert_close(found, jax.jit(f)(*args), 1e-14)


def dots(text):
    """Return the contracted axes of a program's products, and the result's type."""
    found = r"contracting_dims = (\[.*?\] x \[.*?\]).*-> tensor<(\S+)xf32>"
    return re.findall(found, text)


@new
def test_gradients_of_weights_sum_over_one_axis_and_are_not_transposed():
    x, w = randn(0, 8, 16, 4), randn(1, 4, 5)
    gradient = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    # As PyTorch keeps weights, [O, I], the gradient is not transposed.
    other = fc.fast(jax.grad(lambda w, x: jnp.tanh(x @ w.T).sum()))
    fast, axes = fc.fast(gradient), "[0] x [0]"
    assert dots(text_for("cpu", fast, w, x))[-1] == (axes, "4x5")
    assert dots(text_for("cpu", other, w.T, x))[-1] == (axes, "5x4")
    for name in "cpu", "cuda", "tpu":
        plain, found = (dots(text_for(name, f, w, x)) for f in (gradient, fast))
        assert plain[-1] == ("[0, 1] x [0, 1]", "5x4")
        assert (found == plain) == (name != "cpu")


def affine(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None, None])


def affine_loss(params, x):
    return jnp.square(affine(params, x)).mean()


AFFINE = {"w": randn(1, 4, 5), "b": randn(2, 5)}
ROWS = randn(0, 32, 512, 4)
LAYOUTS = {
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
        how = how | dict(apply_fn=lambda *args: affine(*args).mean(1))
        trainer = pe.make_trainer(lambda key: AFFINE, affine_loss, SGD, **how)
        order = np.zeros((2, len(ROWS)), np.int32)
        for call in ("update", ROWS), ("epoch", (ROWS,), order), ("predict", ROWS):
            yield trainer.lower(*call).as_text()
    else:
        state = pe.replicate(pe.train_state(AFFINE, SGD), 2)
        stop = mock.patch.object(pe, "_run", side_effect=InterruptedError)
        with stop as run, pytest.raises(InterruptedError):
            how(affine_loss, SGD)(state, pe.split(ROWS, 2))
        program, _, *given = run.call_args.args
        yield program.lower(*given).as_text()


@new
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainers_products_and_sums_are_fast(layout, monkeypatch):
    """The programs are those that run: in `shard_map`, gradients name a mesh.

    Shards keep their shardings, and XLA divides their products.
    """
    monkeypatch.setattr(fc, "_version", lambda: (0, 10))  # whose sums are of eighths
    how, automatic = LAYOUTS[layout], layout == "shards"
    if automatic and not hasattr(jax, "set_mesh"):
        pytest.skip("shards take JAX 0.8 and newer")
    for text in lowered_steps(how):
        left = [made for _, made in dots(text) if made.endswith("5x4")]
        large = r"stablehlo.reduce\(.*\) : \(tensor<((?:\d+x)+)f32>"
        sizes = [eval(f"{x}1".replace("x", "*")) for x in re.findall(large, text)]
        assert dots(text) and bool(left) <= automatic
        assert automatic or max(sizes, default=0) < fc._LARGE


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
    assert error <= 2e-6 * np.sqrt(x.size / exact.size) * (reduce is jnp.sum)
    half = jnp.asarray(x, jnp.bfloat16)
    assert_close(fast(half), reduce(half, axis=axes), 0.01)
    assert fast(half).dtype == half.dtype
    bad = x.copy()
    bad[3, 5, 7] = np.nan
    assert_array_equal(np.isnan(fast(bad)), np.isnan(reduce(bad, axis=axes)))
    assert OLD or "stablehlo.slice" not in text_for("cuda", fast, x)
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


def test_equal_operations_are_traced_once():
    def f(x, y):
        for _ in range(5):
            x = jnp.tanh(x * y)
        return x

    x = jnp.ones((4, 4), jnp.bfloat16)
    text = jax.jit(fc.fast(f)).lower(x, x).as_text()
    assert text.count("call @fast_cpu._round") == 10
    assert text.count("func.func private @fast_cpu._round") == 2


def test_jit_is_fast_and_takes_the_arguments_of_jit():
    def step(kernel, images, power):
        """A step."""
        return jax.grad(loss_fn)(kernel, images, power), power

    with mock.patch.object(jax, "default_backend", side_effect=AssertionError):
        fast = fc.jit(step, static_argnames="power")  # asks for no backend yet
    assert fast.__doc__ == "A step." and is_fast(fast.lower(KERNEL, X, power=3))
    gradient, power = fast(KERNEL, X, power=3)
    assert power == 3
    assert_close(gradient, jax.grad(loss_fn)(KERNEL, X, 3))


Color = enum.Enum("Color", "RED")
Numbers = dataclasses.make_dataclass("Numbers", ["n"], frozen=True)
Mutable = dataclasses.make_dataclass("Mutable", ["n"])
like_array = type("Like", (), {"__array__": lambda self: X, "__eq__": dict.__eq__})
for_jax = type("ForJax", (), {"__jax_array__": lambda self: X})


@cases("f", *(jax.nn.relu, jnp.abs, np.abs, abs, functools.partial(jnp.power, 2.0)))
@cases("value", True, "a", None, Color.RED, Numbers(2), np.float32, np.dtype(int), math)
def test_jit_takes_functions_and_values(f, value):
    def step(x, f, *, value):
        assert value is given["value"] or value == given["value"]
        return f(2.0) + x, value

    given = dict(f=f, value=value)
    found, made = fc.jit(step)(X, **given)
    assert_close(found, f(2.0) + X)
    assert made == value


@cases("x", *(kind() for kind in (object, like_array, for_jax)), Mutable(2))
def test_objects_that_may_change_and_are_no_values_are_refused(x):
    calls = lambda f: f(X, {"w": x}), lambda f: f(X, w=x)
    wheres = "args[1]['w']", "kwargs['w']"
    for jit in fc.jit, fc.fast:
        for call, where in zip(calls, wheres):
            said = said_by(ValueError, call, jit(lambda x, y=0, w=0: x))
            assert said.startswith(f"{where} is a {type(x).__name__}, neither an array")
        said = said_by(ValueError, jit(lambda _: {"a": x}), X)
        assert said.startswith("result['a'] is a ") and said.count("\n") == 0


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor


class Shared:  # its objects have the class's factor
    apply = Scale.apply


def shared(factor):
    Shared.factor = factor
    return Shared()


class Computed(Scale):
    @property
    def offset(self):
        return 1.0


class Slotted:
    __slots__ = ("factor",)
    apply = Scale.apply


class Around:  # an object that wraps a function
    def __init__(self, function, factor):
        functools.update_wrapper(self, function)
        self.factor = factor

    def __call__(self, x):
        return self.__wrapped__(x=x) * self.factor


def slotted(factor):
    made = Slotted()
    made.factor = factor
    return made


class Nested(Scale):
    def apply(self, x):
        return self.factor.apply(x=x)


def scaled(factor, x):
    return x * factor


HOLDERS = {
    "method": lambda scale: scale.apply,
    "partial of a method": lambda scale: functools.partial(scale.apply),
    "partial of an object": lambda scale: functools.partial(Scale.apply, scale),
    "by name": lambda scale: functools.partial(scaled, factor=scale.factor),
    "method of an object in an object": lambda scale: Nested(scale).apply,
    "method of a class with values": lambda scale: shared(scale.factor).apply,
    "wrapper": lambda scale: Around(scale.apply, 1.0),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_functions_are_compared_by_what_they_hold(name):
    traces = []

    def step(f, x):
        traces.append(f)
        return f(x=x)

    fast, scale = fc.jit(step), Scale(2.0)
    for factor in 2.0, 2.0, 5.0, 2, 2.0:  # an integer makes other types
        scale.factor = factor
        function = HOLDERS[name](scale)
        assert_close(fast(function, X), factor * X)
    assert len(traces) == 3


MAY_CHANGE = {
    "partial of an array": functools.partial(scaled, np.ones(1)),
    "partial of a JAX array": functools.partial(scaled, jnp.ones(1)),
    "partial of a list": functools.partial(scaled, ([2.0],)),
    "partial of a dict": functools.partial(scaled, factor={"a": 2.0}),
    "partial of a partial": functools.partial(functools.partial(scaled, {2.0})),
    "method": Scale([2.0]).apply,
    "method of an object that holds an array": Nested(Scale(np.ones(1))).apply,
    "method of an object with properties": Computed(2.0).apply,
    "method of slots": slotted(2.0).apply,
    "method of a dict": {"a": 2.0}.get,
    "method of a generator": np.random.default_rng(0).normal,
    "wrapper": Around(abs, [2.0]),
    "what jit returns": jax.jit(Scale(np.ones(1)).apply),
}


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_functions_that_hold_what_may_change_are_refused(name):
    said = said_by(ValueError, fc.jit(lambda f, x: x), MAY_CHANGE[name], X)
    assert said.startswith(f"args[0] is a {type(MAY_CHANGE[name]).__name__}, neither")


def test_what_was_lowered_takes_and_returns_what_the_function_does():
    def step(x, negative, *, name):
        return {"y": -x if negative else x, "negative": negative, "name": name}

    lowered = fc.jit(step).lower(X, True, name="net")
    assert "func.func public @main" in lowered.as_text()
    program = lowered.compile()
    found = program(X, True, name="net")
    assert_array_equal(found.pop("y"), -X)
    assert found == {"negative": True, "name": "net"}
    assert program.memory_analysis().output_size_in_bytes == X.nbytes
    with pytest.raises(TypeError, match="value=True.* given .*value=False"):
        program(X, False, name="net")


def test_jit_is_lowered_for_forms():
    form, key = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.random.key(0)
    keys = jax.ShapeDtypeStruct((), key.dtype)

    def step(x, kernel=KERNEL, key=None, name="a"):
        return dilated(x, kernel) + (0 if key is None else jax.random.normal(key))

    for given, how, arrays, named in (
        ((form,), {}, (X,), {}),
        ((), dict(x=form), (), dict(x=X)),
        ((form, KERNEL), dict(key=keys), (X, KERNEL), dict(key=key)),
    ):
        for options in {}, dict(donate_argnums=0), dict(static_argnames="name"):
            fast = fc.jit(step, **options)
            program = fast.lower(*given, **how)
            assert is_fast(program)
            made = jax.eval_shape(fast, *given, **how)
            right = step(*arrays, **named)
            assert (made.shape, made.dtype) == (right.shape, right.dtype)
            copies = jax.tree.map(jnp.copy, (arrays, named))
            assert_close(program.compile()(*copies[0], **copies[1]), right)


@pytest.mark.skipif(VERSION != (0, 10), reason="others lower it with a GPU alone")
def test_kernels_of_pallas_stay_as_they_are():
    pallas = pytest.importorskip("jax.experimental.pallas")
    triton = importlib.import_module("jax.experimental.pallas.triton")
    params = triton.CompilerParams(num_warps=4)
    x = jnp.ones((128, 128), jnp.bfloat16)

    def kernel(x, y):
        y[...] = jnp.tanh(x[...] * x[...]) * jnp.exp(x[...])

    f = pallas.pallas_call(kernel, out_shape=x, compiler_params=params)
    plain, fast = (jax.make_jaxpr(f)(x) for f in (f, fc.fast(f)))
    assert fc.rewrite(plain) is plain
    assert "platform_index" not in str(fast)
    jax.jit(fc.fast(f)).trace(x).lower(lowering_platforms=("cuda",))


INSIDE = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), ()), x, length=2)[0],
    "jit": lambda f: jax.jit(lambda x: f(x)),
    "a constant": lambda f: jax.jit(lambda x: x + f(SQUARE[0])),
    "itself": lambda f: fc.jit(lambda x: f(x)),
    "gradient": lambda f: jax.grad(lambda x: jnp.square(f(x)).sum()),
}


@pytest.mark.parametrize("name", INSIDE)
def test_jit_inside_of_a_trace_is_fast_without_options(name, no_cache):
    step = lambda x: jnp.tanh(x @ SQUARE[1])  # noqa: E731
    found, right = (INSIDE[name](jit(step))(SQUARE[0]) for jit in (fc.jit, jax.jit))
    assert_close(found, right)


@cases("dtype", jnp.bfloat16, jnp.float16)
def test_strict_promotion_of_types_is_kept(dtype, no_cache):
    args = [jnp.asarray(x, dtype) for x in (X, KERNEL)]
    f = lambda x, kernel: dilated(x, kernel).sum((1, 2))  # noqa: E731
    for has_amx in False, True:
        strict = jax.numpy_dtype_promotion("strict")
        with strict, on(*["amx_tile"] * has_amx):
            assert_close(fc.jit(f)(*args), jax.jit(f)(*args), 0.01)


set_mesh = pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="JAX 0.7 and newer")


@set_mesh
@cases("kind", "Auto", "Explicit")
def test_functions_under_a_mesh_are_those_without_fast(kind, no_cache):
    kinds = (jax.sharding.AxisType[kind],)
    mesh, P = jax.make_mesh((4,), ("s",), axis_types=kinds), jax.sharding.PartitionSpec
    x, kernel, rows = randn(0, 16, 9, 9, 4), randn(1, 3, 3, 4, 8), randn(2, 256, 200)

    def gradient(of, stride):
        strides = (stride, stride)
        loss = lambda *args: jnp.square(dilated(*args, strides=strides)).mean()  # noqa: E731
        return jax.grad(loss, of)

    def mapped(f, out):
        how = dict(in_specs=(P("s"), P()), out_specs=out, check_vma=False)
        return jax.shard_map(f, **how)

    product = lambda x, w: jnp.einsum("bij,ijo->bo", x.reshape(-1, 8, 25), w)  # noqa: E731
    total = lambda x, w: jax.lax.psum(x.sum(0), "s")  # noqa: E731
    weights = randn(3, 8, 25, 4)
    with jax.set_mesh(mesh):
        by_rows, by_columns = (
            jax.sharding.NamedSharding(mesh, spec) for spec in (P("s"), P(None, "s"))
        )
        x, kernel = jax.device_put(x, by_rows), jnp.asarray(kernel)
        for f, *args in (
            (gradient(1, 1), x, kernel),
            (gradient(0, 2), x, kernel),
            (mapped(total, P()), jax.device_put(rows, by_rows), weights),
            (mapped(product, P("s")), jax.device_put(rows, by_rows), weights),
            (lambda x: jax.nn.logsumexp(x, 1), jax.device_put(rows, by_columns)),
        ):
            assert_close(fc.jit(f)(*args), jax.jit(f)(*args))


@new
@cases("name", "cuda", "rocm")
def test_on_gpus_each_members_convolution_is_a_call_of_its_own(name):
    both, grads = twice((KERNEL, X)), jax.grad(loss_fn, (0, 1))

    def groups(f, axes, *args):
        text = text_for(name, jax.vmap(f, axes), *args)
        return re.findall(r"_group_count = (\d+)", text)

    plain, apart = (groups(f, (0, 0), *both) for f in (grads, fc.fast(grads)))
    assert len(plain) == 2 * 3 and len(apart) == 2 * 2 * 3
    assert {*plain} == {"1", "2"} and {*apart} == {"1"}
    shared = groups(fc.fast(dilated), (0, None), both[1], KERNEL)
    assert shared == ["1", "1"]  # one call where the kernel is the same


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
for _ in range(8):
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
    # Now and then, a call cannot have the last one's block, and makes another.
    assert np.median(kept[3:]) < 100 < 10_000 < np.median(given_back[3:])


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
