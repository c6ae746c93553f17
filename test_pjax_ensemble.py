"""Tests of pjax_ensemble.py, in the order of its sections."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import inspect
import itertools
import math
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax import export
from numpy.testing import assert_allclose, assert_array_equal

import ensemble_metrics as em
import fast_cpu as fc
import pjax_ensemble as pe
import train_mnist as tm
from conftest import HERE, SGD, D, as_bytes, assert_close, cases, dilated

# isort: split
from conftest import free_port, handling, hook, leaves_equal, linux, member, posix

# isort: split
from conftest import randn, run_python, said_by, start_python
from helpers import assert_refuses

# ---------------------------------------------------------------------------------
# Models, data and ways to train that tests share
# ---------------------------------------------------------------------------------


KEY = jax.random.key(0)

cross_entropy = pe.softmax_cross_entropy


class Net(NamedTuple):
    hidden: pe.Dense
    dense: pe.Dense


def net_init(key):
    keys = jax.random.split(key)
    return Net(pe.dense_init(keys[0], 64, 6), pe.dense_init(keys[1], 6, 4))


def net(params, images):  # uint8
    x = images.reshape(len(images), -1).astype(float) / 255
    return pe.dense(params.dense, jax.nn.relu(pe.dense(params.hidden, x)))


def net_loss(params, images, labels):
    return cross_entropy(net(params, images), labels).mean()


def noisy_loss(params, model_state, key, images, labels):
    """Draw noise, so that a wrong key changes the loss; count the steps."""
    scale = 1 + 0.1 * jax.random.normal(key)
    loss = cross_entropy(scale * net(params, images), labels).mean()
    return loss, jax.tree.map(lambda count: count + 1, model_state)


def noting(seen):
    """Make the net and its loss, which note type and shape of the images they see."""

    def apply_fn(params, images):
        seen.append((images.dtype.name, *images.shape))
        return net(params, images)

    def loss_fn(params, images, labels):
        return cross_entropy(apply_fn(params, images), labels).mean()

    return dict(loss_fn=loss_fn, apply_fn=apply_fn)


NUM_IMAGES = 240


@functools.cache
def image_data():
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(NUM_IMAGES, 8, 8, 1), dtype=np.uint8)
    return images, (images.mean(axis=(1, 2, 3)).astype(np.int32)) % 4


def net_batches(count, batch=16):
    rows = np.arange(count * batch).reshape(count, batch) % NUM_IMAGES
    return [[x[step] for x in image_data()] for step in rows]


def keys_of(seed, count, style="new"):
    make = jax.random.key if style == "new" else jax.random.PRNGKey
    return jax.random.split(make(seed), count)


def members_state(keys, init=net_init, optimizer=SGD, **kwargs):
    """Stack the states of members, leaves [K, ...]."""
    states = [pe.train_state(init(key), optimizer, key=key, **kwargs) for key in keys]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def one_net():
    return pe.replicate(pe.train_state(net_init(jax.random.key(0)), SGD))


sync = pe.make_sync_update
ensemble = pe.make_ensemble_update


class Way(NamedTuple):
    """A way to train `members` models on `devices`; the laws below hold for each."""

    kind: str
    members: int
    devices: int


WAYS = [Way("sync", 1, D), Way("ensemble", D, D)]
WAYS += [Way("trainer", 1, 4), Way("trainer", 3, 2)]
every_way = pytest.mark.parametrize("way", WAYS, ids="{0[0]} {0[1]} {0[2]}".format)


def start(way, loss_fn, first, optimizer=SGD, **options):
    """Return a way's state of members [K, ...], and its update on batches [B, ...]."""
    if way.kind == "trainer":
        model = jax.tree.map(lambda x: x[0], (first.params, first.model_state))
        if not options.get("stateful"):
            model, _ = model
        options |= dict(members=way.members, devices=way.devices)
        trainer = pe.make_trainer(lambda key: model, loss_fn, optimizer, **options)
        return trainer.scatter(first), trainer.update
    if way.kind == "sync":
        state = pe.replicate(jax.tree.map(lambda x: x[0], first), way.devices)
        update = sync(loss_fn, optimizer, **options)
        lay = pe.split
    else:
        state = jax.tree.map(lambda x: x.copy(), first)
        update = ensemble(loss_fn, optimizer, **options)
        lay = pe.replicate
    return state, lambda state, *batch: update(state, *lay(batch, way.devices))


def train(way, loss_fn, first, batches, optimizer=SGD, **options):
    """Train members [K, ...] on each batch [B, ...]; return them and metrics [K]."""
    state, update = start(way, loss_fn, first, optimizer, **options)
    metrics = []
    for step, batch in enumerate(batches):
        before = jax.tree.leaves(state)
        state, now = update(state, *batch)
        assert step == 0 or all(x.is_deleted() for x in before)
        metrics.append(now)
    replicas = pe.layout(way.members, way.devices).replicas
    state = state._replace(key=jax.random.key_data(state.key))
    state, metrics = jax.device_get((state, metrics))
    for x in jax.tree.leaves(state if way.kind == "trainer" else (state, metrics)):
        for i in range(len(x)):  # replicas are bit-identical
            assert x[i].tobytes() == x[i - i % replicas].tobytes()
    states = jax.tree.map(lambda x: x[::replicas][: way.members], state)
    return states, jax.tree.map(lambda x: x[: way.members], metrics)


# The laws hold for one member with replicas, for several, and for K > D.
LAYOUTS = [(1, 4), (2, 4), (5, 3)]


@functools.cache  # a trainer takes its compiled programs along
def net_trainer(members, devices=None, loss_fn=net_loss, optimizer=SGD, **options):
    options = {"init_fn": net_init, "apply_fn": net} | options
    return pe.make_trainer(
        loss_fn=loss_fn,
        optimizer=optimizer,
        members=members,
        devices=devices,
        **options,
    )


@functools.cache
def first_members(init_fn, optimizer, stateful, seed):
    trainer = pe.make_trainer(
        init_fn, net_loss, optimizer, members=D, devices=1, stateful=stateful
    )
    return trainer.gather(trainer.init(jax.random.key(seed)))


def begin(trainer, seed=0):
    """Return a trainer and its first state, which trainers with the same init share."""
    if trainer.hyper is not None or trainer.frozen is not None:
        return trainer, trainer.init(jax.random.key(seed))
    first = first_members(trainer.init_fn, trainer.optimizer, trainer.stateful, seed)
    members = jax.tree.map(lambda x: x[: trainer.members], first)
    return trainer, trainer.scatter(members)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Steps:
    """A tree like older Flax's: two of the same form are not equal."""

    steps: jax.Array


# This trainer of the net draws noise, and its model state counts its steps.
NOISY = {
    "init_fn": lambda key: (net_init(key), Steps(jnp.zeros((), jnp.int32))),
    "loss_fn": noisy_loss,
    "optimizer": pe.adam(0.01),
    "stateful": True,
    "apply_fn": lambda params, _, images: net(params, images),
}


def orders(members, batch=24):
    return pe.epoch_order(NUM_IMAGES, batch, members=members)


def uses(trainer):
    """List the trainer's calls that take a state, with their other arguments."""
    images, labels = data = image_data()
    return [
        (trainer.update, images, labels),
        (trainer.epoch, data, orders(1)[0]),
        (trainer.predict, images),
        (trainer.gather,),
    ]


def refuses_state(state, message, *calls):
    """Assert that calls (f, *args) refuse a state by a message, and keep its arrays."""
    for call, *args in calls:
        assert re.search(message, said_by(ValueError, call, state, *args))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def made(members=2, **options):
    return net_trainer.__wrapped__(members, **options)  # not all can be in its cache


# ---------------------------------------------------------------------------------
# The module as a whole
# ---------------------------------------------------------------------------------


def test_import_touches_no_device_sets_nothing_and_prints_nothing():
    code = """
import os, sys, jax
before = dict(jax.config.values)
sys.modules |= {"fcntl": None, "resource": None}  # as on Windows
vars(os).pop("sched_getaffinity", None)
os.cpu_count = lambda: 3
import pjax_ensemble, fast_cpu, ensemble_metrics, train_mnist
assert dict(jax.config.values) == before
pjax_ensemble.use_cpu_devices()  # warns, without effect, once a device is in use
assert jax.device_count() == 3, jax.device_count()
sys.path.append("benchmarks")
import memory, speed
from trials import devices, faults, interrupts
"""
    assert run_python(code) == ""


def test_an_older_jax_is_refused_at_import(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.9.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    said = said_by(ImportError, runpy.run_path, pe.__file__)
    assert said.startswith("pjax_ensemble needs JAX 0.10 or newer, this is 0.9.2; py")


@pytest.mark.once
def test_usage_in_the_docstring_runs_with_the_module_alone(tmp_path):
    file = shutil.copy(HERE / "pjax_ensemble.py", tmp_path)
    code = r"""
import sys
sys.modules |= {"fast_cpu": None, "ensemble_metrics": None}
import pjax_ensemble as pe
print(pe.__file__)
usage = pe.__doc__.partition("    import")[2].partition("`make_sync")[0]
exec("import" + usage.replace("\n    ", "\n"))
print(losses.shape, len({*losses[:, 0].tolist()}))
pe.save("it", trainer.gather(state))
again = trainer.scatter(pe.load("it", trainer.like()))
print(np.array_equal(trainer.predict_members(again, images), probs))
"""
    fast = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="False")  # convolving takes longer
    assert run_python(code, cwd=tmp_path, **fast) == f"{file}\n(5, 4) 5\nTrue\n"


@pytest.mark.once
def test_the_module_takes_fast_cpu_from_beside_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    code = "import sys; sys.modules['fast_cpu'] = None\n"
    code += "from package import pjax_ensemble as pe; print(pe._fast_cpu.fast.__name__)"
    found = []
    for name in "pjax_ensemble.py", "fast_cpu.py":
        shutil.copy(HERE / name, package)
        found.append(run_python(code, PYTHONPATH=str(tmp_path)))
    assert found == ["_by_xla\n", "fast\n"]
    assert pe._fast_cpu is fc


def test_alone_the_module_warns_where_it_convolves_on_a_cpu(monkeypatch, recwarn):
    monkeypatch.setattr(pe._fast_cpu, "fast", pe._by_xla)
    for layer, start in (pe.dense, pe.dense_init), (pe.conv, pe.conv_init):
        update = pe.make_sync_update(lambda p, x, f=layer: f(p, x).mean(), SGD)
        state = pe.train_state(start(KEY, 3, 1), SGD)
        update(pe.replicate(state), np.ones((D, 2, 4, 4, 3)))
    (said,) = recwarn
    assert "on CPUs: put fast_cpu.py" in str(said.message) and said.filename == __file__


@cases("module", pe, fc, em)
def test_public_names_are_in_file_order_and_dir_lists_no_others(module):
    source = inspect.getsource(module)
    starts = "def {}(", "class {}(", "class {}:", "{} = "
    found = [[source.find("\n" + s.format(n)) for s in starts] for n in module.__all__]
    places = list(map(max, found))
    assert min(places) > 0 and places == sorted(places)
    assert {*dir(module)} - {"__version__"} == {*module.__all__, "__doc__"}


ARRAYS = (pe, "images inputs logits"), (fc, ""), (em, "probs labels scores")


@pytest.mark.no_code
@cases("module, arrays", *ARRAYS)
def test_docstrings_give_shapes_and_errors(module, arrays):
    for thing in (getattr(module, name) for name in module.__all__):
        source = inspect.getsource(thing)
        if names := getattr(thing, "_fields", ()):  # shapes stand beside the fields
            lines = map(str.strip, source.splitlines())
            fields = [x for x in lines if x.split(":")[0] in names]
            assert len(fields) == len(names)
            assert all("#" in line for line in fields) or thing is pe.TrainState
            continue
        first = thing.__doc__.splitlines()[0]
        assert first.endswith((".", ":")) and first[0].isupper()
        if "raise ValueError" in source or module is em:
            assert "ValueError" in thing.__doc__
        if any(f"{name}: A" in source for name in arrays.split()):
            assert "[" in thing.__doc__


@pytest.mark.no_code
@cases(
    "function, expected",
    (pe.sgd, {"momentum": 0.9}),
    (pe.batch_norm, {"momentum": 0.99, "eps": 1e-3}),
    (pe.dropout, {"rate": 0.5}),
    (pe.prefetch, {"size": 2}),
)
def test_defaults_equal_those_in_the_docstrings(function, expected):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in expected} == expected


CALLS = """
import jax, numpy as np, optax, pjax_ensemble as pe
make, data, order = pe.make_trainer, (np.ones((4, 4)),), [[0, 1], [2, 3]]
trainer = make(print, print, optax.adam(1e-3), members=2, apply_fn=pe.dense)
make(print, print, lambda h: pe.sgd(h), members=2, hyper=np.ones(2))
state, losses = trainer.epoch(trainer.init(jax.random.key(0)), data, order)
state, losses = trainer.update(state, *data, per_member=True)
print(trainer.predict(trainer.scatter(trainer.gather(state)), data), trainer.layout)
trainer.epoch(state, data)  # wrong
trainer.update(state, order, per_membr=True)  # wrong
trainer.epoch(data, state, order)  # wrong
trainer.place(data, trainer.layout)  # wrong
trainer.chunk = 64  # wrong
make(print, print, pe.sgd(0.1))  # wrong
make(print, print, pe.sgd(0.1), 2)  # wrong
make(print, print, pe.sgd(0.1), member=2)  # wrong
pe.make_sync_update(print, 0.1)  # wrong
"""


@pytest.mark.once
def test_type_checker_finds_wrong_calls_and_no_others(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    skipped = "[mypy-jax.*,numpy.*,optax.*,matplotlib.*]\nfollow_imports = skip"
    ini = f"[mypy]\nignore_missing_imports = True\n{skipped}\n"  # skips for speed
    (tmp_path / "mypy.ini").write_text(ini)
    command = [sys.executable, "-m", "mypy", "--hide-error-context", "calls.py"]
    command += ["--cache-dir", os.devnull]  # writes no cache
    env = os.environ | {"MYPYPATH": str(HERE)}
    said = subprocess.run(
        command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE
    ).stdout
    found = {int(i) for i in re.findall(r"^calls.py:(\d+): error", said, re.MULTILINE)}
    lines = enumerate(CALLS.splitlines(), 1)
    assert found == {i for i, line in lines if line.endswith("# wrong")}, said


# ---------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def conv_library(params, images, stride, padding="SAME"):
    outputs = dilated(images, params.weight, strides=stride, padding=padding)
    return outputs if params.bias is None else outputs + params.bias[None, None, None]


CONVS = (3, 1, "SAME"), ((5, 2), (1, 2), "VALID"), (4, 3, "SAME"), (2, 3, "VALID")


@cases("kernel, stride, padding", *CONVS)
def test_conv_equals_jaxs_and_adds_its_bias(kernel, stride, padding):
    params = pe.Conv(randn(1, *pair(kernel), 3, 4), randn(2, 4))
    images = jnp.asarray(randn(3, 2, 7, 9, 3))
    expected = conv_library(params, images, pair(stride), padding)
    assert_close(pe.conv(params, images, stride=stride, padding=padding), expected)


def weights_like(x):
    return np.ones((3, 3, 3, 2), x.dtype if x.dtype == jnp.bfloat16 else np.float32)


NORM = pe.batch_norm_init(3)
training = functools.partial(pe.batch_norm, *NORM, training=True)
LAYERS = {
    "conv": lambda x: pe.conv(pe.Conv(weights_like(x), None), x),
    "avg_pool": pe.avg_pool,
    "batch_norm": functools.partial(pe.batch_norm, *NORM, training=False),
    "batch_norm, training": training,
    "dropout": lambda x: jax.jit(functools.partial(pe.dropout, KEY, x))(0.3),
}


@pytest.mark.filterwarnings("error")  # JAX warns when it truncates float64
@pytest.mark.parametrize("name", LAYERS)
def test_layer_turns_integers_into_floats_and_keeps_half_precision(name):
    layer = LAYERS[name]
    x = np.arange(96).reshape(2, 4, 4, 3)
    for dtype in ("uint8", "int8", "bool", "float64"):
        expected = layer(np.float32(x.astype(dtype)))
        assert leaves_equal(layer(x.astype(dtype)), expected)
        assert jax.tree.leaves(expected)[0].dtype == np.float32
    assert jax.tree.leaves(layer(jnp.asarray(x, "bfloat16")))[0].dtype == jnp.bfloat16


def test_init_draws_weights_of_hes_variance_and_zero_biases():
    drawn = pe.dense_init(KEY, 400, 100), pe.conv_init(KEY, 16, 64, 5)
    for shape, params in zip([(400, 100), (5, 5, 16, 64)], drawn):
        assert params.weight.shape == shape
        he = np.sqrt(2 / np.prod(shape[:-1]))
        assert_allclose(params.weight.std(), he, rtol=0.02)  # 25,600 draws or more
        assert not params.bias.any() and params.bias.shape == shape[-1:]
    assert pe.conv_init(jax.random.key(0), 1, 2, (2, 3), bias=False).bias is None
    norm, stats = pe.batch_norm_init(1)
    assert (*norm, *stats) == (1, 0, 0, 1)
    with jax.enable_x64(True):
        params = pe.cnn_init(KEY), pe.batch_norm_init(3), pe.dense_init(KEY, 2, 3)
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(float)}
        weight = np.asarray(params[-1].weight)
        assert (weight != weight.astype(np.float32)).any()  # drawn in float64


POOLS = {pe.avg_pool: np.mean, pe.max_pool: np.max}


@pytest.mark.parametrize("pool", POOLS)
@cases("window, stride", (2, None), ((2, 3), (3, 1)), (3, 4))
def test_pool_equals_numpy(pool, window, stride):
    images = randn(0, 2, 7, 9, 3)
    # [B, H', W', I, kh, kw]
    windows = np.lib.stride_tricks.sliding_window_view(images, pair(window), (1, 2))
    down, across = pair(stride or window)
    expected = POOLS[pool](windows[:, ::down, ::across], axis=(-2, -1))
    assert_close(pool(jnp.asarray(images), window, stride=stride), expected)


def test_replica_mean_makes_floats_and_changes_nothing_else_outside_of_a_step():
    numbers = [jnp.arange(3), jnp.ones(2, bool), 1]
    floats = [jnp.asarray(x, float) for x in numbers]
    half = jnp.ones(1, jnp.bfloat16)
    assert leaves_equal(pe.replica_mean([numbers, half]), [floats, half])
    assert jax.pmap(pe.replica_mean)(jnp.arange(4.0)).tolist() == [0, 1, 2, 3]


def norm_init(key):
    norm, stats = pe.batch_norm_init(5)
    return (pe.dense_init(key, 3, 5), norm), stats


def norm_loss(forward):
    def loss_fn(params, stats, key, xs, ys):
        outputs, stats = forward(params, stats, xs)
        return jnp.mean((outputs - ys) ** 2), stats

    return loss_fn


def norm_batch(count):
    # Rows differ between devices, so a part's statistics are not the batch's.
    xs = randn(0, 48, 2, 3) + np.arange(48)[:, None, None]
    return xs[:count], randn(100, 48, 2, 5)[:count]


# JAX's transformations cache a function's trace, and reuse it where axes have equal
# names.
@mock.patch.object(pe, "_near", lambda *_, like: True)  # which a chunk's mean is not
@cases(
    "keep, earlier, members, devices",
    ("jit", "predict", 2, 4),
    ("jit", "training", 1, 2),
    ("checkpoint", "init", 2, 4),
    ("jit", "by hand", 2, 8),
)
def test_only_training_averages_whatever_came_before(keep, earlier, members, devices):
    xs, ys = norm_batch(6 * pe.layout(members, devices).replicas)

    def ends(keep):
        def forward(params, stats, xs):
            dense, norm = params
            return pe.batch_norm(norm, stats, pe.dense(dense, xs), training=True)

        forward = keep(forward)

        def init(key):
            params, stats = norm_init(key)
            if earlier != "training":  # libraries infer shapes in this way
                forward(params, stats, jnp.zeros((6, 2, 3)))
            return params, stats

        trainer = net_trainer(
            members,
            devices,
            init_fn=init,
            loss_fn=norm_loss(forward),
            stateful=True,
            apply_fn=lambda *args: forward(*args)[0],
            chunk=6,
            output=None,
        )
        trainer, state = begin(trainer)
        before = trainer.predict(state, xs) if earlier == "predict" else ()
        # And training on other replicas, each with six examples as here.
        ways = (WAYS[1], Way("trainer", 4, D), WAYS[0]) if earlier == "by hand" else ()
        for way in ways:
            rows = norm_batch(6 * pe.layout(way.members, way.devices).replicas)
            _, stats = pe.batch_norm_init(5)
            keys = keys_of(0, way.members)
            first = members_state(keys, lambda k: norm_init(k)[0], model_state=stats)
            before += (train(way, norm_loss(forward), first, [rows], stateful=True)[1],)
        state, losses = trainer.update(state, xs, ys)
        return before, losses, trainer.predict(state, xs)

    assert_close(ends(getattr(jax, keep)), ends(lambda forward: forward))


@cases("scale", True, False)
@cases("shape", (6, 3), (4, 5, 5, 3))
def test_batch_norm_equals_its_formula_in_training_and_in_evaluation(shape, scale):
    params, stats = pe.batch_norm_init(3, scale=scale)
    assert (params.scale is None) != scale
    params = jax.tree.map(lambda x: x + randn(1, 3), params)
    stats = pe.BatchStats(jnp.asarray(randn(2, 3)), jnp.asarray(randn(3, 3) ** 2))
    gamma = params.scale if scale else 1.0
    x = 2 + 3 * randn(0, *shape)
    axes = tuple(range(len(shape) - 1))

    def formula(x, mean, var, eps):
        return gamma * (x - mean) / jnp.sqrt(var + eps) + params.bias

    trained = functools.partial(
        pe.batch_norm, params, stats, training=True, momentum=0.8, eps=0.01
    )
    found, gradients_of, new = jax.vjp(trained, x, has_aux=True)
    evaluated, kept = pe.batch_norm(params, stats, x, training=False)
    with jax.numpy_rank_promotion("allow"):
        assert_close(evaluated, formula(x, *stats, 1e-3))
        by_batch = jax.vjp(lambda x: formula(x, x.mean(axes), x.var(axes), 0.01), x)
        assert_close(found, by_batch[0])
        dy = randn(4, *shape)
        assert_close(gradients_of(dy), by_batch[1](dy))
    assert leaves_equal(kept, stats)
    assert_close(new.mean, 0.8 * stats.mean + 0.2 * np.mean(x, axes, float))
    assert_close(new.var, 0.8 * stats.var + 0.2 * np.var(x, axes, float))


def test_batch_norm_keeps_half_precision_and_float32_statistics():
    params, stats = pe.batch_norm_init(3)
    x = jnp.asarray(100 + randn(0, 64, 3), jnp.bfloat16)
    outputs, new = pe.batch_norm(params, stats, x, training=True, momentum=0)
    assert outputs.dtype == jnp.bfloat16 and new.var.dtype == jnp.float32
    # An error of 1e-3 in the mean, 1e-5 of its 100, would add only its square.
    assert_close(new.var, np.asarray(x, np.float64).var(axis=0))


def test_dropout_zeroes_a_fraction_and_keeps_the_expectation():
    x = jnp.asarray(1 + randn(0, 200, 100) ** 2)
    kept, other = (np.asarray(pe.dropout(jax.random.key(i), x, 0.3)) for i in range(2))
    zero = kept == 0
    assert abs(zero.mean() - 0.3) < 0.01
    assert_close(kept[~zero], x[~zero] / 0.7)
    assert abs((zero & (other == 0)).mean() - 0.09) < 0.01
    assert_array_equal(pe.dropout(None, x, 0.3), x)
    assert_array_equal(jax.jit(pe.dropout)(jax.random.key(0), x, 0), x)


CONV = pe.Conv(np.ones((3, 3, 2, 3), np.float32), None)
DENSE = pe.Dense(np.ones((3, 1), np.float32), np.zeros(1, np.float32))
ONES = np.ones((1, 5, 5, 2), np.float32)
BATCH_OF_TWO = np.ones((2, 4, 3))

LAYER_MISFITS = {
    "conv of fewer channels": (
        lambda: pe.conv(CONV, ONES[..., :1]),
        r"5, 1\); expected \[..., 2\], as para",
    ),
    "conv with padding in lower case": (
        lambda: pe.conv(CONV, ONES, padding="same"),
        "'same'; expected 'SAME' or",
    ),
    "conv of channels before rows": (
        lambda: pe.conv(CONV, ONES.transpose(0, 3, 1, 2)),
        r"5, 5\); expected \[..., 2\], .* take; channels are last: x.transpose\(0, 2",
    ),
    "conv of one image": (
        lambda: pe.conv(CONV, ONES[0]),
        r"\(5, 5, 2\); expected \[B, H, W, I\]; one image x is given as x\[None\]$",
    ),
    "cnn of bytes": (
        lambda: pe.cnn(pe.cnn_init(KEY), np.zeros((1, 28, 28, 1), np.uint8)),
        r"uint8; expected floats in \[0, 1\]; of bytes take images.astype",
    ),
    "conv of images below its window": (
        lambda: pe.conv(CONV, ONES[:, :2], padding="VALID"),
        "window of 3x3 does not",
    ),
    "avg_pool of images below its window": (
        lambda: pe.avg_pool(ONES, 6),
        r"6x6 does not fit .* \(1, 5, 5, 2\); use a small",
    ),
    "max_pool of images narrower than its window": (
        lambda: pe.max_pool(ONES, (1, 6)),
        "a window of 1x6 does not fit",
    ),
    "max_pool with a window of three axes": (
        lambda: pe.max_pool(ONES, (1, 2, 3)),
        r"window is \(1, 2, 3\)",
    ),
    "dense_init without features": (
        lambda: pe.dense_init(KEY, 0, 2),
        r"weights \[0, 2\] is 0; expected an int >= 1",
    ),
    "dense of fewer features": (
        lambda: pe.dense(DENSE, ONES),
        r"expected \[..., 3\], as .* shape \(3, 1\) take",
    ),
    "batch_norm of fewer channels": (
        lambda: training(ONES),
        r"have shape \(1, 5, 5, 2\); expected \[..., 3\]",
    ),
    "batch_norm of no rows": (
        lambda: training(BATCH_OF_TWO[:, :0]),
        r"\(2, 0, 3\) have no row",
    ),
}


@pytest.mark.parametrize("name", LAYER_MISFITS)
def test_layers_refuse_arguments_that_do_not_fit(name):
    assert_refuses(*LAYER_MISFITS[name])


def out_of_range(*rows):
    """Tabulate calls with values that a function refuses, and its messages, by name.

    A row holds the argument's name, its limit, the function, and the values.  Without a
    limit, the argument is an int of 1 or more.
    """
    table = {}
    for name, limit, call, values in rows:
        function = getattr(call, "func", call).__name__
        expected = f"0 <= {name} < {limit}" if limit else "an int >= 1"
        for value in values:
            said = re.escape(f"{name} is {value!r}; expected {expected}")
            refused = functools.partial(call, **{name: value})
            table[f"{function}, {name}={value!r}"] = refused, said
    return table


LAYER_NUMBERS = out_of_range(
    ("stride", None, functools.partial(pe.conv, CONV, ONES), (1.5, (0, 1))),
    ("stride", None, functools.partial(pe.avg_pool, ONES), [0]),
    ("channels", None, pe.batch_norm_init, (0, 2.0)),
    ("rate", 1, functools.partial(pe.dropout, None, ONES), (1, -0.1, "0.1")),
)


@pytest.mark.parametrize("name", LAYER_NUMBERS)
def test_layers_refuse_numbers_out_of_range(name):
    assert_refuses(*LAYER_NUMBERS[name])


# ---------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------


def two_dense(params, x):
    x = jax.nn.relu(x @ params.dense1.weight + params.dense1.bias[None])
    return x @ params.dense2.weight + params.dense2.bias[None]


def test_mlp_is_dense_layers_with_relu_between():
    key, x = jax.random.key(0), randn(1, 2, 5, 4)
    params = pe.mlp_init(key, [4, 30, 20, 3])
    keys = jax.random.split(key, 3)
    layers = [pe.dense_init(*z) for z in zip(keys, (4, 30, 20), (30, 20, 3))]
    assert leaves_equal(params, layers)
    weights = jax.tree.map(
        lambda w: np.float64(w + randn(w.size, *w.shape) / 9), params
    )
    y = np.float64(x)
    for layer in weights[:-1]:
        y = np.maximum(y @ layer.weight + layer.bias, 0)
    expected = y @ weights[-1].weight + weights[-1].bias
    assert_close(pe.mlp(jax.tree.map(np.float32, weights), x), expected)
    said = said_by(ValueError, pe.mlp_init, key, [4])
    assert said == "sizes are [4]; expected two or more"


FORMS = [
    {},
    {"image_shape": (4, 7, 3), "num_classes": 1},
    {"image_shape": (33, 10, 2), "num_classes": np.int64(26)},
]


@pytest.mark.parametrize("form", FORMS)
def test_cnn_equals_the_guides_network(form):
    params = pe.cnn_init(jax.random.key(0), **form)
    assert form or sum(x.size for x in jax.tree.leaves(params)) == 824_458
    params = jax.tree.map(lambda x: x + randn(x.size, *x.shape) / 99, params)
    images = jnp.asarray(randn(0, 3, *form.get("image_shape", (28, 28, 1))))

    @jax.jit
    def network(params, images):
        x = pe.avg_pool(jax.nn.relu(conv_library(params.conv1, images, (1, 1))))
        x = pe.avg_pool(jax.nn.relu(conv_library(params.conv2, x, (1, 1))))
        return two_dense(params, x.reshape(3, -1))

    logits = jax.jit(pe.cnn)(params, images)
    assert logits.shape == (3, form.get("num_classes", 10))
    assert_close(logits, network(params, images))


BEFORE = {  # entry 7 of each weight from key 7, when MNIST's shape was fixed
    pe.cnn_init: [-0.4311377, 0.0662437, 0.0288984, -0.0946283],
    tm.batch_norm_cnn_init: [-0.4311377, 0.0540877, 0.055056, -0.2676492, -0.0076337],
}


@pytest.mark.parametrize("init", BEFORE)
def test_mnist_networks_draw_the_same_weights_as_before(init):
    leaves = jax.tree.leaves(init(jax.random.key(7)))
    drawn = np.array([leaf.ravel()[7] for leaf in leaves if leaf.ndim > 1])
    assert_close(drawn, np.array(BEFORE[init]))


@cases("shape", (3, 9, 1), (9, 3, 1), (9, 9, 0), (9, 9.0, 1), (28, 28), 28)
def test_cnn_init_refuses_shapes_that_do_not_fit(shape):
    said = said_by(ValueError, pe.cnn_init, KEY, image_shape=shape)
    assert re.search("image_shape is .*; expected .* >= 4", said) and "\n" not in said


CNN_NUMBERS = out_of_range(
    ("num_classes", None, functools.partial(pe.cnn_init, KEY), [0]),
)


@pytest.mark.parametrize("name", CNN_NUMBERS)
def test_cnn_init_refuses_numbers_out_of_range(name):
    assert_refuses(*CNN_NUMBERS[name])


def test_batch_norm_cnn_equals_the_guides_network():
    forms = map(jax.tree.leaves, jax.eval_shape(tm.batch_norm_cnn_init, KEY))
    assert [sum(x.size for x in form) for form in forms] == [49_242, 136]
    form = dict(image_shape=(28, 28, 3), num_classes=4)
    params, stats = tm.batch_norm_cnn_init(KEY, **form)
    images = jnp.asarray(randn(0, 5, 28, 28, 3))
    stats = jax.tree.map(lambda x: x + 0.1 * randn(x.size, x.size) ** 2, stats)

    @functools.partial(jax.jit, static_argnums=0)
    def network(stats_of):
        x = images
        layers = ("SAME", 1, 28, 12), ("VALID", 2, 12, 24), ("SAME", 2, 6, 32)
        for i, (padding, stride, size, channels) in enumerate(layers):
            layer, norm = params[2 * i : 2 * i + 2]
            x = conv_library(layer, x, (stride, stride), padding)
            assert x.shape == (5, size, size, channels)
            used = *stats_of(i, x), norm.bias
            mean, var, bias = (leaf[None, None, None] for leaf in used)
            x = jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3) + bias)
        return two_dense(params, x.mean(axis=(1, 2)))

    forward = tm.batch_norm_cnn
    logits, kept = jax.jit(forward)(params, stats, images)
    assert_close(logits, network(lambda i, x: stats[i]))
    assert logits.shape == (5, 4)
    assert leaves_equal(kept, stats)

    key = jax.random.key(1)
    with mock.patch.object(pe, "dropout", side_effect=lambda key, x, rate: x) as drop:
        logits, new = jax.jit(lambda p: forward(p, stats, images, key))(params)
    assert drop.call_args.args[2] == 0.5
    expected = network(lambda i, x: pe.BatchStats(x.mean((0, 1, 2)), x.var((0, 1, 2))))
    assert_close(logits, expected)
    assert not any(np.allclose(a.mean, b.mean) for a, b in zip(new, stats))
    dropped, _ = jax.jit(forward)(params, stats, images, key)
    assert not np.allclose(dropped, logits, rtol=0.01)


# ---------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------


def test_cross_entropy_equals_numpy_and_is_stable():
    logits = randn(0, 6, 4)
    labels = np.array([0, 1, 2, 3, 0, 1])
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = [-np.log(p[i]) for p, i in zip(probs, labels)]
    assert_close(cross_entropy(logits, labels), np.array(expected))
    further = cross_entropy(logits.reshape(1, 3, 2, 4), labels.reshape(1, 3, 2))
    assert_close(further, np.reshape(expected, (1, 3, 2)))
    far = cross_entropy(np.float32([[1e4, 0], [1e4, 0]]), np.array([0, 1]))
    assert_allclose(far, [0, 1e4], rtol=1e-6, atol=1e-6)  # the first is -log(1)


POWERS = itertools.product((-1, 1), (0, 7, 8, 31, 32), (-1, 0))
EDGE_LABELS = [0, 3] + [sign * 2**n + i for sign, n, i in POWERS]


@cases("dtype", "int8", "uint8", "int32", "uint32", "int64")
def test_cross_entropy_takes_integers_and_is_nan_for_labels_out_of_range(dtype):
    limits = np.iinfo(dtype)
    labels = np.array([i for i in EDGE_LABELS if limits.min <= i <= limits.max], dtype)
    for num_classes in (4, 200, 300):
        logits = np.arange(num_classes, dtype="uint8") // 10
        log_probs = logits - np.log(np.exp(np.float32(logits)).sum())
        inside = [0 <= i < num_classes for i in labels.tolist()]
        expected = np.where(inside, -log_probs[np.where(inside, labels, 0)], np.nan)
        rows = np.tile(logits, (len(labels), 1))
        assert_allclose(cross_entropy(rows, labels), expected, rtol=1e-5)
        if dtype != "int64":  # JAX arrays hold at most 32 bits
            found = cross_entropy(jnp.asarray(rows), jnp.asarray(labels))
            assert_allclose(found, expected, rtol=1e-5)


def test_gaussian_nll_and_its_gradients_equal_the_densitys():
    variance = np.float32(10.0 ** np.arange(-30, 20))
    mean, targets = (np.sqrt(variance) * randn(i, 50) for i in range(2))
    mean[:5] = targets[:5]
    v = np.float64(variance)
    error = np.float64(targets) - mean
    nll = pe.gaussian_nll(mean, variance, targets)
    assert_allclose(nll, (np.log(2 * np.pi * v) + error**2 / v) / 2, atol=1e-5)

    def total(mean, variance):
        return pe.gaussian_nll(mean, variance, targets).sum()

    slope, curve = jax.grad(total, (0, 1))(mean, variance)
    assert_close(slope * np.sqrt(v), -error / np.sqrt(v))
    assert_close(curve * v, (1 - error**2 / v) / 2)


def test_gaussian_nll_takes_integers_and_is_nan_unless_the_variance_is_above_zero():
    mean = jnp.array([3, 5], jnp.uint8)
    nll = pe.gaussian_nll(mean, jnp.ones(2), mean[::-1])
    assert_allclose(nll, [2 + np.log(2 * np.pi) / 2] * 2, rtol=1e-6)
    bad = jnp.array([0, -0.0, -1, np.nan])
    for target in (0, 1):
        assert np.isnan(pe.gaussian_nll(jnp.zeros(4), bad, jnp.full(4, target))).all()


def test_accuracy_counts_labels_with_the_largest_logit():
    logits = jnp.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 4.0]])
    assert pe.accuracy(logits, jnp.array([1, 0, 0, 1])) == 0.5


LOGITS = np.eye(4)[:3]
BELOW = np.zeros((3, 1), int)
THREE = np.ones(3)

LOSS_MISFITS = {
    "cross_entropy of labels with one more axis": (
        lambda: cross_entropy(LOGITS, BELOW),
        r"labels are int64\[3, 1\]; exp",
    ),
    "cross_entropy of labels that are floats": (
        lambda: cross_entropy(LOGITS, LOGITS),
        r"labels are float64\[3, 4\]; .*; of one-hot labels take labels.argmax\(ax",
    ),
    "accuracy of labels that are floats": (
        lambda: pe.accuracy(LOGITS, THREE),
        r"4\[3\]; expected integers \[3\], class",
    ),
    "gaussian_nll of targets with one more axis": (
        lambda: pe.gaussian_nll(THREE, THREE, BELOW),
        r"\(3,\), \(3, 1\)\]; expected",
    ),
}


@pytest.mark.parametrize("name", LOSS_MISFITS)
def test_losses_refuse_arrays_that_do_not_fit(name):
    assert_refuses(*LOSS_MISFITS[name])


# ---------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------


def product(params, x):
    return jnp.mean(params * x)


def test_the_optimizer_of_the_docstring_runs():
    code = re.search(r"\n\n((?: {4}.*\n|\n)+)", inspect.getdoc(pe.Optimizer))[1]
    names = {"jax": jax, "jnp": jnp, "Optimizer": pe.Optimizer}
    exec(inspect.cleandoc(code), names)
    update = sync(product, names["optimizer"])
    state = pe.replicate(pe.train_state(jnp.ones((1, 2)), names["optimizer"]))
    state, _ = update(state, np.ones((D, 1, 1)) * np.float32([3, -2]))
    assert_allclose(state.params, [[[0.99, 1.01]]] * D)
    assert state.opt_state["count"].tolist() == [1] * D


LINEAR = pe.linear_schedule(0.3, 8)
COSINE = pe.cosine_schedule(1, 8.0)


def steps_of(optimizer, apply_updates):
    """Return the parameters after each of eight steps, and the optimizer's state."""
    params = {"w": jnp.asarray(randn(0, 3, 2), float), "b": jnp.zeros(2)}
    state = optimizer.init(params)
    steps = []
    for i in range(8):
        grads = {"w": randn(i, 3, 2), "b": randn(i, 2) * [1, 0]}
        grads = jax.tree.map(lambda g: jnp.asarray(g, float), grads)
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        steps.append(params)
    return steps, state


@cases("x64, tolerance", (False, 1e-5), (True, 1e-14))
@cases(
    "name, rate, options",
    ("sgd", 0.1, dict(momentum=0.0)),
    ("sgd", COSINE, dict(momentum=0.0, nesterov=True)),
    ("sgd", LINEAR, dict(momentum=0.9)),
    ("sgd", 0.1, dict(momentum=0.9, nesterov=True)),
    ("adam", 0.1, {}),
    ("adam", LINEAR, dict(b1=0.5, b2=0.9, eps=0.1)),
    ("adam", COSINE, dict(b1=0, b2=0)),
    ("adamw", 0.1, {}),
    ("adamw", LINEAR, dict(eps=0.1, weight_decay=0.3, mask={"w": False, "b": True})),
    (
        "adamw",
        COSINE,
        dict(b2=0.9, weight_decay=2, mask=lambda params: {"w": 1, "b": 0}),
    ),
)
def test_optimizer_equals_optax_also_in_a_chain(name, rate, options, x64, tolerance):
    ours, theirs = (getattr(module, name)(rate, **options) for module in (pe, optax))
    with jax.enable_x64(x64):
        with jax.numpy_dtype_promotion("strict"):
            steps, state = steps_of(ours, pe.apply_updates)
        expected, _ = steps_of(theirs, optax.apply_updates)
        chains = (optax.chain(optax.clip(0.5), each) for each in (ours, theirs))
        chained = [steps_of(each, optax.apply_updates)[0] for each in chains]
    assert state.num_steps == 8
    assert_close((steps, chained[0]), (expected, chained[1]), tolerance)


NESTEROV = functools.partial(pe.sgd, nesterov=True)
TRACED = [
    (pe.sgd, dict(learning_rate=0.1, momentum=0.9)),
    (NESTEROV, dict(learning_rate=0.03, momentum=0.7)),
    (pe.adam, dict(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-8)),
    (pe.adamw, dict(learning_rate=0.1, b1=0.9, weight_decay=0.3)),
    (lambda **h: pe.adam(pe.linear_schedule(**h)), dict(peak=0.3, num_steps=7)),
    (lambda **h: pe.sgd(pe.cosine_schedule(**h)), dict(peak=1, num_steps=7, warmup=0)),
    (lambda **h: pe.adam(pe.cosine_schedule(0.3, 7, **h)), dict(warmup=0.15)),
]


@pytest.mark.usefixtures("optimized")  # otherwise a loop may round differently
@pytest.mark.parametrize("make, numbers", TRACED)
def test_traced_hyperparameters_take_the_same_steps_as_known_ones(make, numbers):
    @jax.jit
    def traced(h, *args):
        return make(**h).update(*args)

    @jax.jit
    def mapped(*args):
        both = jax.lax.map(lambda h: make(**h).update(*args), two)
        return jax.tree.map(lambda x: x[1], both)

    init, known = make(**numbers)
    two = jax.tree.map(lambda x: jnp.float32([x / 2, x]), numbers)
    updates = jax.jit(known), functools.partial(traced, numbers), mapped
    optimizers = [pe.Optimizer(init, update) for update in updates]
    known, *others = (steps_of(each, pe.apply_updates) for each in optimizers)
    assert all(leaves_equal(found, known) for found in others)


@cases("make", pe.sgd, pe.adam, pe.adamw)
def test_optimizer_keeps_half_precision_and_float32_moments(make):
    optimizer = make(pe.linear_schedule(0.1, 4))
    params = jnp.ones(3, jnp.bfloat16)
    traced = jax.jit(lambda *h: make(*h).update(params, optimizer.init(params), params))
    with jax.numpy_dtype_promotion("strict"):
        known = optimizer.update(params, optimizer.init(params), params)
        assert pe.apply_updates(params, known[0]).dtype == jnp.bfloat16
        # Bfloat16 would round this update to half the spacing of its numbers above 1.
        above_half = jnp.full_like(known[0], 2**-8 + 2**-18)
        assert (pe.apply_updates(params, above_half) == 1 + 2**-7).all()
    for updates, (_, *state) in known, traced(0.1, 0.9):
        assert {x.dtype for x in (updates, *state)} == {jnp.dtype(jnp.float32)}


@cases("dtype", "bfloat16", "float16", "float32")
@cases("optimizer", pe.sgd(0.1, momentum=0.999), pe.adam(0.1))
def test_ten_thousand_steps_in_any_precision_match_float64(optimizer, dtype):
    """The gradient is 2^-13, then 2^-19; float16 cannot represent their squares."""

    @jax.jit
    def last_update(params):
        def step(i, both):
            grads = jnp.where(i < 5000, 2**-13, 2**-19).astype(params.dtype)
            return optimizer.update(grads, both[1], params)

        wide = jnp.promote_types(params.dtype, jnp.float32)
        first = jnp.zeros((), wide), optimizer.init(params)
        return jax.lax.fori_loop(0, 10_000, step, first)[0]

    with jax.enable_x64(True):
        expected = last_update(jnp.ones((), "float64"))
    assert_close(last_update(jnp.ones((), dtype)), expected, 0.02)


SHAPES = {pe.linear_schedule: lambda t: t}
SHAPES[pe.cosine_schedule] = lambda t: np.sin(np.pi * t / 2) ** 2


@cases("x64, tolerance", (False, 2e-6), (True, 1e-14))
@cases("num_steps", 1, 99, 1_000_000)
@cases("warmup", 0, 0.15, 0.5)
@pytest.mark.parametrize("make", SHAPES)
def test_schedule_equals_numpy_at_every_step(make, warmup, num_steps, x64, tolerance):
    steps = np.arange(num_steps)
    fall = (num_steps - steps) / (num_steps + 1) / (1 - warmup)
    rise = (steps + 1) / (num_steps + 1) / warmup if warmup else np.inf
    options = {} if warmup == 0.15 else {"warmup": warmup}  # it is the default
    with jax.enable_x64(x64):
        found = map(make(0.4, num_steps, **options), (steps, num_steps, 5 * num_steps))
        rates, end, later = map(np.asarray, found)
    assert_allclose(rates, 0.4 * SHAPES[make](np.minimum(rise, fall)), rtol=tolerance)
    assert rates.min() > 0 == end == later


linear = functools.partial(pe.linear_schedule, 0.1)
cosine = functools.partial(pe.cosine_schedule, 1, 9)
adam = functools.partial(pe.adam, 0.1)
up_to_7 = functools.partial(pe.linear_schedule, num_steps=7)

OPTIMIZER_NUMBERS = out_of_range(
    ("learning_rate", np.inf, pe.sgd, (-0.1, np.nan, np.inf, "1e-3", None)),
    ("momentum", 1, functools.partial(pe.sgd, 1), (-0.1, 1.0, np.nan, 0.5j)),
    ("learning_rate", np.inf, pe.adam, (-1, np.nan, np.array([0.1, 0.2]))),
    ("b1", 1, adam, [1]),
    ("b2", 1, adam, [-1]),
    ("eps", np.inf, adam, [-1]),
    ("weight_decay", np.inf, functools.partial(pe.adamw, 1), (-1, np.nan)),
    ("num_steps", 2**31, linear, (-1, 2**31)),
    ("warmup", 1, cosine, (1.0, -0.1)),
    ("peak", np.inf, up_to_7, (-0.1, np.inf)),
)


@pytest.mark.parametrize("name", OPTIMIZER_NUMBERS)
def test_optimizers_refuse_numbers_out_of_range(name):
    assert_refuses(*OPTIMIZER_NUMBERS[name])


PARAMETER_MISFITS = {
    "sgd of an integer": (
        lambda: pe.train_state({"w": 3}, SGD),
        r"'\['w'\]' is int32; expected floating",
    ),
    "adam of an integer": (
        lambda: pe.train_state([3], pe.adam(1)),
        "is int32; expected floating point",
    ),
    "adam of a complex number": (
        lambda: pe.train_state([1j], pe.adam(1)),
        r"'\[0\]' is complex64; expected",
    ),
    "sgd of a complex number in a trace": (
        lambda: jax.eval_shape(SGD.init, [1j]),
        r"'\[0\]' is complex64; expected",
    ),
}


@pytest.mark.parametrize("name", PARAMETER_MISFITS)
def test_optimizers_refuse_parameters_that_are_not_real_floats(name):
    assert_refuses(*PARAMETER_MISFITS[name])


# ---------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------


@cases("count, rows, rest", (1, 0, [2]), (2, 3, []), (9, 4, [2, 3]), (None, 2, []))
def test_merge_undoes_split_and_split_keeps_the_order_of_rows(count, rows, rest):
    length = (count or D) * rows
    numbers = np.arange(length * math.prod(rest)).reshape(length, *rest)
    tree = {"a": numbers, "b": [np.full(length, 7, np.uint8)], "c": jnp.zeros(length)}
    parts = pe.split(tree, count)
    assert parts["a"].shape == (count or D, rows, *rest)
    assert isinstance(parts["a"], np.ndarray)  # on the host
    assert isinstance(parts["c"], jax.Array)
    assert_array_equal(parts["a"].reshape(numbers.shape), numbers)
    assert leaves_equal(pe.merge(parts), tree)


@cases("num_devices", 1, 3, D)
def test_replicate_puts_a_copy_on_each_device_and_unreplicate_takes_one(num_devices):
    tree = {"w": randn(0, 2, 3), "half": jnp.ones(2, jnp.bfloat16)}
    tree |= {"count": 3, "key": jax.random.key(7)}
    copies = pe.replicate(tree, num_devices)
    for name, leaf in copies.items():
        assert leaf.shape == (num_devices, *np.shape(tree[name]))
    shards = copies["w"].addressable_shards
    assert [shard.device for shard in shards] == jax.local_devices()[:num_devices]
    for shard in shards:
        assert_array_equal(shard.data[0], tree["w"])
    for each in copies, jax.pmap(lambda tree: tree)(copies):
        with jax.transfer_guard_device_to_device("disallow"):  # touches no other copy
            one = pe.unreplicate(each)
        assert one["w"].devices() == {jax.local_devices()[0]}
        assert leaves_equal(one | {"count": 3}, tree) and one["count"] == 3
        assert all(one[name].dtype == tree[name].dtype for name in ("half", "key"))
    assert pe.unreplicate(np.arange(D)) == 0  # on the host


def test_copies_that_have_arrived_are_held_by_nobody():
    trainer, state = begin(net_trainer(1, 2))
    held = jax.block_until_ready(trainer.place(jnp.ones((64, 3))))
    reference = weakref.ref(held)
    trainer.update(state, *net_batches(1)[0])
    del held
    gc.collect()
    assert reference() is None


# A process that ends while a copy from one device to another waits for numbers that are
# in the making.
ENDING = """
import jax, jax.numpy as jnp, numpy as np, pjax_ensemble as pe

pe.use_cpu_devices(2)
key, x, sgd = jax.random.key(0), np.ones((1000, 1000), np.float32), pe.sgd(0.1)
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: x @ x / 1e3, x))
one = pe.train_state(jnp.ones(()), sgd)

trainer = pe.make_trainer(
    jax.random.normal, lambda w, x: (w * slow(x)).mean(), sgd, members=2
)
update = pe.make_ensemble_update(lambda w, x: (w * x).mean(), sgd)
update(pe.replicate(one), slow(x)[:2])
state, losses = trainer.update(trainer.init(key), x)  # all is compiled
copies = jax.block_until_ready((pe.replicate(one), losses))[0]
"""
UNFINISHED = {
    "losses": "held = trainer.update(state, x)[1]; 1 / 0",
    "data": "trainer.place((slow(x),))",
    "keys": "trainer.place(jax.random.fold_in(key, slow(x)[0, 0].astype(int)))",
    "copies": "pe.replicate(slow(x))",
    "a batch": "update(copies, slow(x)[:2])",
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_process_may_end_while_copies_between_devices_wait(name):
    """With JAX 0.12 it died by SIGSEGV."""
    run = start_python(ENDING + UNFINISHED[name])
    _, errors = run.communicate(timeout=300)
    assert run.returncode == ("1 / 0" in UNFINISHED[name]), errors


def test_use_cpu_devices_warns_when_it_is_called_too_late():
    with pytest.warns(UserWarning, match="9 devices requested, 8 a") as said:
        for count in (9, D, 2):
            pe.use_cpu_devices(count)
    assert len(said) == 1 and said[0].filename == __file__
    assert jax.local_device_count() == D


DEVICE_MISFITS = {
    "split of 130 rows": (
        lambda: pe.split(np.zeros((130, 2))),
        "130 does not split over 8.*multiple of 8",
    ),
    "split of 2 rows": (
        lambda: pe.split(BATCH_OF_TWO),
        "of 2 does not .* a multiple of 8, for example 8",
    ),
    "split of a number": (lambda: pe.split(np.float32(1)), "without axes"),
    "merge of one axis": (
        lambda: pe.merge(np.zeros(8)),
        r"shape \(8,\) is not \[D, n, ...\]",
    ),
    "unreplicate of a number": (
        lambda: pe.unreplicate(jnp.zeros(())),
        r"without axes is not \[D, ...\]",
    ),
    "replicate to 9 of 8 devices": (
        lambda: pe.replicate(np.zeros(3), 9),
        "9 devices requested, 8 available",
    ),
}


@pytest.mark.parametrize("name", DEVICE_MISFITS)
def test_device_functions_refuse_trees_and_numbers_that_do_not_fit(name):
    assert_refuses(*DEVICE_MISFITS[name])


DEVICE_NUMBERS = out_of_range(
    ("num_devices", None, functools.partial(pe.split, BATCH_OF_TWO), (0, -1, 2.0, "2")),
    ("num_devices", None, pe.use_cpu_devices, (0, 2.5, "4", True)),
)


@pytest.mark.parametrize("name", DEVICE_NUMBERS)
def test_device_functions_refuse_numbers_out_of_range(name):
    assert_refuses(*DEVICE_NUMBERS[name])


# ---------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------


def test_members_of_other_shapes_or_names_enter_no_trainer():
    def wider(key):
        return Net(pe.dense_init(key, 64, 7), pe.dense_init(key, 7, 4))

    trainer, first = begin(net_trainer(2, 2))
    other, state = begin(net_trainer(2, 2, init_fn=wider))
    message = r"trainer: leaf '.params.hidden.weight' is.*\[64, 7\]; exp.* 6\]"
    refuses_state(state, message, *uses(trainer))
    assert re.search(message, said_by(ValueError, trainer.scatter, other.gather(state)))

    gathered = trainer.gather(first)
    net = gathered.params
    short = net.dense._replace(bias=np.ones(2))
    for said, changed in (
        ("dense.bias' is []; expected [4], as", {"params": net._replace(dense=short)}),
        ("hidden.weight' is absent; expected [64, 6], as", {"params": net._asdict()}),
        ("model_state[0].weight' is [6, 4]; expected ab", {"model_state": (short,)}),
        ("the state's key: ", {"key": np.zeros((2, 2))}),
    ):
        state = gathered._replace(**changed)
        assert said in said_by(ValueError, trainer.scatter, state)


def test_states_of_other_types_and_optimizers_predict_and_are_not_trained():
    trainer, first = begin(net_trainer(2, 2))
    data = image_data()
    state = trainer.gather(first)
    half = state.params._replace(hidden=jax.tree.map(np.float16, state.params.hidden))
    for other, found in (
        (state._replace(params=half), "hidden.weight' is float16[64, 6]; expected fl"),
        (state._replace(opt_state=()), ".opt_state.num_steps' is absent; expected int"),
    ):
        placed = trainer.scatter(other)
        assert trainer.predict(placed, data[0]).sum().round() == len(data[0])
        refuses_state(placed, re.escape(found), *uses(trainer)[:2])
    shared = first.opt_state._replace(velocity=first.params)
    shared = first._replace(opt_state=shared)
    refuses_state(shared, "share one buffer", *uses(trainer)[:2])
    found = trainer.gather(shared)
    assert leaves_equal(found.opt_state.velocity, state.params)
    state, _ = trainer.update(first, *data)
    named = state._replace(params=(*state.params,))  # with leaves of the latest state
    refuses_state(named, "is absent; expected", *uses(trainer))
    ours = net_trainer.__wrapped__(2, 2, optimizer=optax.adam(0.1))
    # Its state has one part more, without a leaf.
    other = net_trainer.__wrapped__(2, 2, optimizer=optax.adamw(0.1))
    found = said_by(ValueError, other.update, ours.init(KEY), *data)
    named = r"structure .*\(\), None.*; expected .*EmptyState.*, as the"
    assert re.search(named, found) and len(found) < 500


# ---------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------


# The members' hyperparameters; each of the user's functions uses one or more.  The
# spread is the scale of the initial weights.
OWN = "spread", "decay", "rate", "temperature"
Own = NamedTuple("Own", [(name, float) for name in OWN])
HYPER = Own(*np.float32(np.random.default_rng(5).uniform(0.1, 0.9, size=(4, 10))))
FROZEN = randn(3, 32, 32) / 6


class Parts(NamedTuple):
    first: pe.Dense | pe.Conv  # [64, 32] or [3, 3, 1, 32]
    heads: pe.Dense  # [32, 96], queries, keys and values
    last: pe.Dense  # [32, 4]


def taken(tree, which):
    return jax.tree.map(lambda x: x[np.array(which, int)], tree)


@functools.cache
def full_trainer(which, devices, *, attends=False, statistics=False, **options):
    """Make a trainer of some members of HYPER, with every option of a trainer.

    Every function uses the member's own numbers.  Some of the second member's batches
    make its loss nan.  The network has a dense layer, or a convolution and attention, a
    frozen matrix, and dropout or batch statistics.  If `frozen` is None, functions hold
    the matrix.
    """
    norm, stats = pe.batch_norm_init(32)
    closed_over = np.array(FROZEN)

    def attention(x):  # [N, 16, 96]
        queries, keys, values = jnp.split(x, 3, axis=-1)
        return jax.nn.softmax(queries @ keys.swapaxes(1, 2) / 8) @ values

    def forward(params, stats, images, frozen, key=None):
        x = images.astype(jnp.float32) / 255
        if attends:
            x = pe.conv(params.first, x, stride=2).reshape(len(x), 16, 32)
        else:
            x = pe.dense(params.first, x.reshape(len(x), 64))
        x = jax.nn.relu(x)
        if statistics:
            x, stats = pe.batch_norm(norm, stats, x, training=key is not None)
        if attends:
            x = attention(pe.dense(params.heads, x)).mean(axis=1)
        x = x @ frozen
        x = x if statistics else pe.dropout(key, x)
        return pe.dense(params.last, x), stats

    def init(key, h, frozen=closed_over):
        keys = jax.random.split(key, 3)
        conv = pe.conv_init(keys[0], 1, 32, bias=False)
        first = conv if attends else pe.dense_init(keys[0], 64, 32)
        heads = pe.dense_init(keys[1], 32, 96)
        parts = Parts(first, heads, pe.dense_init(keys[2], 32, 4))
        scale = h.spread + frozen.mean()
        params = jax.tree.map(lambda x: scale * x, parts)
        return params, stats if statistics else ()

    def loss_fn(params, stats, key, images, labels, h, frozen=closed_over):
        logits, stats = forward(params, stats, images, frozen, key)
        penalty = h.decay * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        spoiled = (h.rate == HYPER.rate[1]) & (images[:, 0, 0, 0] > 250)
        losses = jnp.where(spoiled, jnp.nan, cross_entropy(logits, labels) + penalty)
        return losses.mean(), (stats, {"penalty": penalty, "label": labels.mean()})

    def apply_fn(params, stats, images, h, frozen=closed_over):
        logits, _ = forward(params, stats, images, frozen)
        return logits / h.temperature

    def optimizer(h):
        return pe.sgd(pe.cosine_schedule(0.1 * h.rate, 20), momentum=h.rate)

    return pe.make_trainer(
        init,
        loss_fn,
        optimizer,
        members=len(which),
        devices=devices,
        apply_fn=apply_fn,
        hyper=taken(HYPER, which),
        stateful=True,
        has_aux=True,
        skip_nonfinite=True,
        **{"frozen": FROZEN, "chunk": 4} | options,
    )


def journey(trainer, put):
    """Return all that a trainer's calls return; `put` changes each call's arguments."""

    def call(method, *given, **options):
        return method(*put(given), **options)

    data = image_data()
    own = [np.stack([x[:10]] * trainer.members) for x in data]
    state = call(trainer.init, KEY)
    assert trainer.latest is None
    there = call(trainer.place, data)
    state, losses = call(trainer.epoch, state, there, orders(1, batch=4)[0])
    state = call(trainer.scatter, call(trainer.gather, state))
    assert trainer.latest is None
    trainer.lower("update", *own, per_member=True)
    state, last = call(trainer.update, state, *own, per_member=True)
    assert trainer.latest is state
    probs = call(trainer.predict_members, state, data[0][:37])
    return losses, last, probs, call(trainer.gather, state)


@functools.cache
def expected_journey():
    trainer = full_trainer((0, 2, 3), 2)
    return trainer, journey(trainer, lambda given: given)


def on_host(tree):
    def read(x):
        return np.asarray(jax.random.key_data(x) if pe._is_key(x) else x)

    return jax.tree.map(read, tree)


def on_arrays(f):
    """Apply f to NumPy's arrays in a tree."""

    def put(tree):
        return jax.tree.map(lambda x: f(x) if isinstance(x, np.ndarray) else x, tree)

    return put


class Labelled(np.lib.mixins.NDArrayOperatorsMixin):
    """An array sliced by labels, as a pandas Series (below 3) with a float index is.

    Its type is its library's own, as PyTorch's are.
    """

    dtype = "torch.float32"

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __array__(self, dtype=None, copy=None):
        return self.x

    def __getitem__(self, rows):
        return Labelled(self.x[:0])


@on_arrays
def foreign(x):  # its byte order is foreign, too
    return Labelled(x.astype(">u2" if x.itemsize == 1 else x.dtype.newbyteorder()))


@on_arrays
def tensor(x):
    return pytest.importorskip("torch").tensor(x)


def aligned(array):
    """Copy an array to an address at which `jax.device_put` shares its memory."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    shared = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    shared[...] = array
    return shared


SPOILED = []  # arrays of the last call, and their copies


def spoiled(tree):
    """Give arrays whose memory JAX could share, and change those of the last call."""
    for array, copied in SPOILED:
        assert_array_equal(array, copied)
        array.fill(0)
    given = on_arrays(aligned)(tree)
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, np.ndarray)]
    SPOILED[:] = [(x, x.copy()) for x in arrays]
    return given


def with_arrays_that_change(trainer):
    frozen, hyper = jax.tree.map(aligned, (trainer.frozen, trainer.hyper))
    changed = dataclasses.replace(trainer, frozen=frozen, hyper=hyper)
    for x in jax.tree.leaves((frozen, hyper)):
        x.fill(np.nan)
    return changed


def explicit_mesh():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)


def replaced(**options):
    return lambda trainer: dataclasses.replace(trainer, **options)


class Case(NamedTuple):
    """How a trainer is made from another, surrounded and given arguments."""

    make: Callable = lambda trainer: trainer
    within: Callable = contextlib.nullcontext
    put: Callable = lambda given: given


SAME = {
    "arrays are on the host": Case(put=on_host),
    "arrays are on other devices": Case(put=lambda tree: net_trainer(3, 3).place(tree)),
    "arrays are big-endian and sliced by labels": Case(put=foreign),
    "arrays are torch's": Case(put=tensor),
    "arrays change after each call": Case(with_arrays_that_change, put=spoiled),
    "it is a copy": Case(lambda trainer: copy.deepcopy(copy.copy(trainer))),
    "it is given devices": Case(replaced(devices=jax.devices()[6:4:-1])),
    "a mesh is set": Case(replaced(), lambda: jax.set_mesh(explicit_mesh())),
    "no transfer is implicit": Case(replaced(), lambda: jax.transfer_guard("disallow")),
}


@pytest.mark.parametrize("what", SAME)
def test_a_trainer_ends_in_the_same_bits_if(what):
    make, within, put = SAME[what]
    trainer, expected = expected_journey()
    with within():
        found = journey(make(trainer), put)
    assert leaves_equal(found, expected)


@cases("what", "a mesh is set", "arrays are big-endian and sliced by labels")
def test_an_update_by_hand_ends_in_the_same_bits_if(what):
    _, within, put = SAME[what]
    batch, on_devices = pe.split(image_data()), one_net()
    state = on_host(on_devices)  # which it takes too
    expected = sync(net_loss, SGD)(on_devices, *batch)
    with within():
        assert leaves_equal(sync(net_loss, SGD)(*put((state, *batch))), expected)


@cases("members", 1, 3)
def test_arrays_whose_types_say_where_they_are_give_the_same_bits(members):
    (batch,) = net_batches(1)
    spec = jax.sharding.PartitionSpec(("x", "y"))
    there = jax.sharding.NamedSharding(explicit_mesh(), spec)
    ends = []
    for arrays in batch, jax.device_put(batch, there):
        trainer, state = begin(net_trainer(members))
        probs = trainer.predict(state, arrays[0])
        ends.append((probs, trainer.update(state, *arrays)[1]))
    assert leaves_equal(*ends)


def test_an_error_of_a_users_function_ends_with_the_users_line():
    def misfitting(params, x):
        return (x @ np.ones((5, 2))).sum()  # the line

    trainer = made(loss_fn=misfitting)
    state = trainer.init(KEY)
    with pytest.raises(ValueError, match="^loss_fn: dot_general requires") as said:
        trainer.update(state, np.ones((4, 3)))
    assert "# the line" in said.value.__notes__[0]
    assert jax.__path__[0] not in said.value.__notes__[0]
    assert said.value.__suppress_context__  # so JAX's traceback is not printed


# ---------------------------------------------------------------------------------
# Member
# ---------------------------------------------------------------------------------


def one_number(num_devices=D, **kwargs):
    return pe.replicate(pe.train_state(jnp.float32(1), SGD, **kwargs), num_devices)


def test_a_batch_is_cut_only_if_its_leaves_are_of_one_length():
    def loss_fn(number, *batch):
        return number + sum(map(jnp.mean, batch))

    for lengths, shapes in (
        ("[(4,), (8,)]", [(2, 8), (2, 4)]),
        ("[(10,), (64,)]", [(2, 64, 3), (2, 10)]),
        ("[(), (64,)]", [(2,), (2, 64)]),
        ("[]", []),
    ):
        batch = list(map(np.ones, shapes))
        for size in "auto", None:
            _, losses = sync(loss_fn, SGD, microbatch=size)(one_number(2), *batch)
            assert losses.tolist() == [1 + len(shapes)] * 2
        update = sync(loss_fn, SGD, microbatch=4)
        said = said_by(ValueError, update, one_number(2), *batch)
        assert f"axes of the batch have lengths {lengths}; expected" in said


def optimizing(updates, **new):
    """Make an optimizer, whose updates and new state may have another form."""
    state = {"n": jnp.int32(0), "m": jnp.int32(0)}
    new = jax.tree.map(jnp.asarray, new)
    return pe.Optimizer(lambda _: state, lambda g, s, _: (updates(g), new or s))


ONE = jnp.float32(1)
PAIR = r"; expected the pair \(loss, "
FORM = r"; expected int32\[\]"
# Flags of the update, its loss_fn's result, and its optimizer.
RETURNED = [
    ("has_aux", ONE, SGD, rf"one result{PAIR}aux\)$"),
    ("stateful", ONE, SGD, rf"one result{PAIR}model_state\)$"),
    ("stateful", [ONE] * 3, SGD, rf"3 results{PAIR}model_state\)$"),
    ("has_aux", (ONE, KEY), SGD, "loss_fn's aux: .*; expected numbers, which are ave"),
    ("has_aux stateful", (ONE, 1), SGD, rf"one result{PAIR}\(model_state, aux\)\)$"),
    ("stateful", (ONE, {"n": 0.5}), SGD, rf"model state .* '\['n'\]' .*2\[\]{FORM}"),
    ("", ONE, optimizing(dict, n=0.5, m=1), rf"state: .*'n'\]' is float32\[\]{FORM}$"),
    ("", ONE, optimizing(lambda g: {"w": np.ones(2)}), r"updated par.*32\[2\]; ex"),
    ("", ONE, optimizing(lambda g: [g["w"]]), "; expected a tree like the parameters$"),
]


@cases("flags, result, optimizer, message", *RETURNED)
def test_results_have_to_keep_their_forms(flags, result, optimizer, message):
    options = dict(optimizer=optimizer, model_state={"n": jnp.int32(0)})
    state = members_state(keys_of(0, D), lambda key: {"w": jnp.ones(1)}, **options)
    flags = dict.fromkeys(flags.split(), True)
    update = ensemble(lambda *_: result, optimizer, **flags)
    refuses_state(state, message, (update, np.ones((D, 2))))


@cases(
    "dtype, slope, devices", ("bfloat16", 1, 1), ("float16", 100, 1), ("bfloat16", 1, 2)
)
def test_sums_and_means_of_half_precision_use_float32(dtype, slope, devices):
    def loss_fn(w, x):
        part = jnp.mean(x).astype(dtype)
        return slope * jnp.mean(w * x.astype(dtype)) + part, {"mean": part}

    way = Way("trainer", 1, devices)
    descend = pe.sgd(1.0)
    first = members_state(keys_of(0, 1), lambda key: jnp.zeros((), dtype), descend)
    # Each microbatch has one value, 1 or the next bfloat16; bfloat16 lacks their mean.
    x = np.float32([1, 1 + 1 / 128]).repeat(2**14)
    ends, ((loss, aux),) = train(
        way, loss_fn, first, [(x,)], descend, has_aux=True, microbatch=16
    )
    assert loss.dtype == aux["mean"].dtype == np.float32 and ends.params.dtype == dtype
    assert loss == aux["mean"] == x.mean()
    assert_close(np.float32(ends.params), [-slope], 0.01)


LINE = {
    "init_fn": lambda key: {"w": jax.random.normal(key, ()), "b": jnp.zeros(())},
    "loss_fn": lambda p, xs, ys: jnp.mean((p["w"] * xs + p["b"] - ys) ** 2),
    "optimizer": pe.adam(0.01),
}


@pytest.mark.skipif(jax.__version_info__[:2] == (0, 10), reason="needs no such loop")
@pytest.mark.usefixtures("optimized")  # otherwise nothing is fused
@cases(
    "options, data",
    (dict(optimizer=optax.nadam(0.01)), image_data()),
    # Without the step's branch, this rounds otherwise on AVX2 (JAX 0.12).
    (LINE, (randn(0, 96), randn(1, 96))),
)
def test_an_optimizer_rounds_alike_for_a_member_alone_and_beside_another(options, data):
    rows = np.random.default_rng(0).integers(len(data[0]), size=(200, 24))
    ends = []
    for members in 1, 2:
        trainer, state = begin(net_trainer(members, 1, **options), seed=5)
        state, losses = trainer.epoch(state, data, rows)
        ends.append(member((losses, trainer.gather(state)[:2]), 0))
    assert leaves_equal(*ends)


@cases("members, devices", *LAYOUTS[1:])
def test_a_stateful_loss_needs_no_type_promotion(members, devices):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        trainer = net_trainer.__wrapped__(members, devices, **NOISY)
        (batch,) = net_batches(1)
        trainer.lower("update", *batch)
        order = np.arange(8)[None]
        state, losses = trainer.epoch(trainer.init(KEY), batch, order)
        ended = trainer.gather(state)
        assert losses.dtype == ended.params.dense.weight.dtype == float
        assert ended.model_state.steps.tolist() == [1] * members


# ---------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------


@every_way
def test_a_program_whose_devices_wait_for_each_other_runs_alone(way, monkeypatch):
    """On a CPU it waits for its arguments and results; other programs do not wait."""

    def watched(program, *args):
        return run(lambda *args: seen.append("run") or program(*args), *args)

    seen = []
    run = pe._run
    monkeypatch.setattr(pe, "_run", watched)
    state, update = start(way, net_loss, members_state(keys_of(0, way.members)))
    hook(monkeypatch, jax, "block_until_ready", lambda x: seen.append("wait"))
    update(state, *net_batches(1)[0])
    meet = pe.layout(way.members, way.devices).replicas > 1
    assert seen == (["wait", "run", "wait"] if meet else ["run"])


@pytest.fixture
def interrupts(monkeypatch):
    """Send SIGINT before and after programs, as often as set; count their ends."""
    run = pe._run
    times = mock.Mock(before=0, after=0, ended=0, fails=False)

    def interrupted(*args):
        for _ in range(times.before):
            signal.raise_signal(signal.SIGINT)
        result = run(*args)
        for _ in range(times.after):
            signal.raise_signal(signal.SIGINT)
        times.ended += 1
        if times.fails:
            raise RuntimeError
        return result

    monkeypatch.setattr(pe, "_run", interrupted)
    with handling(signal.default_int_handler):  # a shell's background job ignores it
        yield times


@cases("kind", "trainer", "by hand")
def test_an_interrupt_loses_no_state(kind, interrupts):
    (batch,) = net_batches(1)
    if kind == "trainer":
        owner, state = begin(net_trainer.__wrapped__(2, 2))
        call = owner.update
    else:
        owner = call = pe.make_sync_update(net_loss, SGD)
        state, batch = one_net(), pe.split(batch)
    assert owner.latest is None
    expected, _ = call(jax.tree.map(jnp.copy, state), *batch)
    assert owner.latest is expected
    ended = interrupts.ended
    interrupts.before = 1
    said_by(KeyboardInterrupt, call, state, *batch)
    # The interrupt came at once, and the state did not change.
    assert owner.latest is expected and interrupts.ended == ended
    interrupts.before = 0
    interrupts.after = 2
    said_by(KeyboardInterrupt, call, state, *batch)
    assert interrupts.ended == ended + 1  # the program ended first
    assert "latest" in said_by(ValueError, call, state, *batch)
    assert leaves_equal(owner.latest.params, expected.params)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.fails = True  # after it took the buffers
    said_by(KeyboardInterrupt, call, owner.latest, *batch)


def test_a_latest_state_of_which_one_leaf_is_gone_is_consumed():
    trainer, state = begin(net_trainer.__wrapped__(2, 2))
    (batch,) = net_batches(1)
    state, _ = trainer.update(state, *batch)
    jax.tree.leaves(state.opt_state)[-1].delete()
    assert "consumed" in said_by(ValueError, trainer.update, state, *batch)
    assert state is trainer.latest


def test_updates_keep_other_interrupt_handlers_and_run_in_threads(interrupts):
    trainer, state = begin(net_trainer.__wrapped__(2, 2))
    (batch,) = net_batches(1)
    received = []
    interrupts.before = 1
    interrupts.after = 2
    end, other = socket.socketpair()
    end.setblocking(False)
    other.setblocking(False)
    with handling(lambda *args: received.append(args)), end, other:
        before = signal.set_wakeup_fd(end.fileno())  # as asyncio does
        try:
            state, _ = trainer.update(state, *batch)
        finally:
            signal.set_wakeup_fd(before)
        assert other.recv(99) == bytes([signal.SIGINT] * 3)  # each counts once
    assert [number for number, _ in received] == [signal.SIGINT] * 3
    assert trainer.latest is state
    # If a handler returns, as asyncio's does, a second SIGINT still waits for the end.
    # If the first handler sets another one, that one stays in place after the update.
    second = mock.Mock(side_effect=KeyboardInterrupt)
    for new in second, signal.default_int_handler:
        with handling(lambda *args, new=new: signal.signal(signal.SIGINT, new)):
            said_by(KeyboardInterrupt, trainer.update, state, *batch)
            assert signal.getsignal(signal.SIGINT) is new
        state = trainer.latest
        assert np.isfinite(np.asarray(state.params.dense.weight)).all()
    interrupts.after = 0
    with handling(lambda *args: signal.signal(signal.SIGINT, second)):
        state, _ = trainer.update(state, *batch)
        assert signal.getsignal(signal.SIGINT) is second
    interrupts.before = 0
    with mock.patch.object(signal, "getsignal", return_value=None):  # one set in C
        state, _ = trainer.update(state, *batch)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # cannot set handlers
        state, _ = pool.submit(trainer.update, state, *batch).result()
    assert trainer.latest is state

    def loss_fn(*args):  # sets a handler while it is traced
        signal.signal(signal.SIGINT, second)
        return net_loss(*args)

    trainer, state = begin(net_trainer.__wrapped__(2, 2, loss_fn))
    trainer.update(state, *batch)
    assert signal.getsignal(signal.SIGINT) is second


@posix
def test_a_forked_process_does_not_wait_for_arrays_of_its_parent():
    never = mock.Mock()
    never.is_deleted.return_value = never.is_ready.return_value = False
    never.block_until_ready = functools.partial(os._exit, 1)
    pe._in_flight(never)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's, of its threads
            child = os.fork()
        if child == 0:
            pe._wait_in_flight()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and never in pe._IN_FLIGHT
    finally:
        pe._IN_FLIGHT.remove(never)


def train_beside_a_program_that_fails():
    fail = mock.Mock(side_effect=RuntimeError("a callback"))

    def failing(*args):
        loss = net_loss(*args)
        jax.debug.callback(fail, jax.lax.stop_gradient(loss))
        return loss

    (batch,) = net_batches(1)
    ends = []
    for fails in False, True:
        trainer, state = begin(net_trainer(1, 2))
        if fails:
            other, bad = begin(net_trainer(1, 2, failing))
            for said in "RuntimeError: a callback", "if it failed, a saved one":
                with pytest.raises((RuntimeError, ValueError), match=said):
                    jax.block_until_ready(other.update(bad, *batch))
        for _ in range(2):
            state, loss = trainer.update(state, *batch)
        ends.append((loss, trainer.gather(state)))
    assert leaves_equal(*ends)
    print("intact")


def test_a_program_that_fails_leaves_other_programs_intact():
    code = f"import {__name__} as tests; tests.train_beside_a_program_that_fails()"
    assert run_python(code) == "intact\n"  # a process of its own, since its end fails


# ---------------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------------


net_and_gradients = jax.jit(jax.value_and_grad(net_loss))

POLYAK = optax.chain(optax.polyak_sgd(max_learning_rate=99), optax.scale(0.02))


def by_name(grads, opt_state, params=None, *, value):  # Optax's take **extra_args
    return POLYAK.update(grads, opt_state, params, value=value)


STEPS = {
    "ours": (NESTEROV(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "Optax's, given the loss": (POLYAK, POLYAK),
    "given the loss by name": (pe.Optimizer(POLYAK.init, by_name), POLYAK),
}


@cases(
    "name, way, microbatch",
    ("ours", WAYS[0], 4),
    ("ours", WAYS[1], None),
    ("ours", WAYS[2], None),
    ("ours", WAYS[3], 2),
    ("Optax's, given the loss", WAYS[0], None),
    ("given the loss by name", WAYS[3], 8),
)
def test_step_equals_one_on_the_whole_batch_and_is_traced_once(way, name, microbatch):
    ours, theirs = STEPS[name]
    theirs = optax.with_extra_args_support(theirs)
    seen = []
    counts = []
    noted = noting(seen)

    def loss_fn(params, images, labels):
        right = pe.accuracy(net(params, images), labels)
        return noted["loss_fn"](params, images, labels), right

    first = members_state(keys_of(0, way.members), optimizer=ours)
    options = dict(has_aux=True, microbatch=microbatch)
    batches = net_batches(3, 64)
    counted = (counts.append(len(seen)) or batch for batch in batches)
    with mock.patch.object(pe, "_check_apart") as look:
        ends, metrics = train(way, loss_fn, first, counted, ours, **options)
    assert look.call_count == 1  # update's own results are not checked again
    assert counts[0] == 0 < counts[1] == counts[2]
    assert leaves_equal(ends.key, jax.random.key_data(first.key))
    rows = 64 // pe.layout(way.members, way.devices).replicas
    assert {count for _, count, *_ in seen} == {microbatch or rows}
    for i in {0, way.members - 1}:
        params = member(first.params, i)
        opt_state = theirs.init(params)
        for batch, found in zip(batches, metrics):
            loss, grads = net_and_gradients(params, *batch)
            right = pe.accuracy(net(params, batch[0]), batch[1])
            assert_close([x[i] for x in found], [loss, right])
            updates, opt_state = theirs.update(grads, opt_state, params, value=loss)
            params = optax.apply_updates(params, updates)
        assert_close(member(ends.params, i), params)


def numbers(keys, **options):
    return members_state(keys, lambda key: jnp.float32(1), **options)


@every_way
def test_each_part_of_a_batch_draws_from_a_key_of_its_member_step_and_number(way):
    def loss_fn(weight, model_state, key, x):
        return weight.sum() * x.mean(), (model_state + 1, jax.random.uniform(key))

    keys = keys_of(0, way.members)
    first = numbers(keys, model_state=jnp.zeros(()))
    batches = [(np.ones((D, 4)),)] * 2
    parts = range(pe.layout(way.members, way.devices).replicas)
    ends, metrics = train(way, loss_fn, first, batches, has_aux=True, stateful=True)
    for _, drawn in metrics:
        keys, used = zip(*map(jax.random.split, keys))
        draws = [[jax.random.fold_in(key, i) for i in parts] for key in used]
        expected = [np.mean(list(map(jax.random.uniform, each))) for each in draws]
        assert_allclose(drawn, expected, rtol=1e-6)
    assert_array_equal(ends.key, list(map(jax.random.key_data, keys)))
    assert ends.model_state.tolist() == [2] * way.members


def test_sync_averages_over_replicas():
    def loss_fn(params, model_state, key, x):
        new = {"mean": x.mean(), "steps": model_state["steps"] + 1, "constant": 0.5}
        new["large"] = model_state["large"]
        aux = {"largest": x.max(), "right": x.max() > 0, "number": 3, "wave": 2j}
        return params * x.mean(), (new, aux)

    descend = pe.sgd(1.0, momentum=0.0)
    x = np.arange(16.0)
    model_state = {"mean": 0.0, "steps": jnp.int32(2**30), "constant": 0.5}
    model_state["large"] = jnp.float16(3e4)  # the replicas' sum would be inf
    first = numbers(keys_of(0, 1), optimizer=descend, model_state=model_state)
    end, ((loss, aux),) = train(
        WAYS[0], loss_fn, first, [(x,)], descend, has_aux=True, stateful=True
    )
    assert_allclose((loss, end.params), ([x.mean()], [1 - x.mean()]))
    expected = {"largest": 8, "right": 1, "number": 3, "wave": 2j}
    assert {name: x.tolist() for name, x in aux.items()} == {
        name: [x] for name, x in expected.items()
    }
    kinds = {name: x.dtype.name for name, x in aux.items()}
    assert kinds == dict.fromkeys(expected, "float32") | {"wave": "complex64"}
    new = {"mean": x.mean(), "steps": 2**30 + 1, "constant": 0.5, "large": 3e4}
    assert jax.tree.map(np.ndarray.item, end.model_state) == new
    kinds = [end.model_state[name].dtype.name for name in ("steps", "large")]
    assert kinds == ["int32", "float16"]


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_a_nonfinite_step_can_be_skipped_and_changes_no_other_member(way):
    def loss_fn(params, model_state, key, images, labels):
        white = (images == 255).all(axis=(1, 2, 3)).any()
        flat = white & (model_state == 0)
        root = jnp.sqrt(jnp.where(flat, 0.0, 1.0) * (params.dense.bias[0] ** 2 + 1))
        loss = net_loss(params, images, labels)
        loss = jnp.where(white & (model_state == 1), jnp.nan, loss)
        # Root makes one entry of the gradient nan, and the loss stays finite.
        return loss + root - jax.lax.stop_gradient(root), model_state + 1

    batches = net_batches(2)
    # One replica gets a white image, which spoils the members with counts 0 and 1.
    batches[0][0][5] = 255
    first = members_state(keys_of(0, way.members))
    first = first._replace(model_state=jnp.arange(way.members))
    run = functools.partial(train, way, loss_fn, first, stateful=True)
    plain, _ = run(batches[:1])
    assert np.isnan(plain.params.dense.bias[0]).tolist() == [True, False, False, False]
    once, (loss,) = run(batches[:1], skip_nonfinite=True)
    assert np.isnan(loss).tolist() == [i < 2 for i in range(way.members)]
    for i in range(way.members):
        kept, expected = (once[:3], first[:3]) if i < 2 else (once, plain)
        assert leaves_equal(member(kept, i), member(expected, i))
        assert not leaves_equal(once.key[i], first.key[i])
    twice, (_, loss) = run(batches, skip_nonfinite=True)
    assert np.isfinite(loss).all()
    assert not leaves_equal(member(twice.params, 0), member(first.params, 0))


def equal_keys():
    keys = keys_of(0, D, "old")
    return numbers(keys.at[5].set(keys[1]))


def sharing():
    state = one_number()
    return state._replace(opt_state=state.opt_state._replace(velocity=state.params))


def integers():
    return pe.replicate(pe.train_state([jnp.int32(3)], optax.sgd(0.1)))


counting = functools.partial(one_number, model_state=jnp.zeros(3))
REFUSED_STEPS = [
    (ensemble, equal_keys, {}, (D, 2), "members 1 and 5 have equal .*random.split"),
    (sync, lambda: numbers(keys_of(0, D)), {}, (D, 2), "0 and 1 have different keys"),
    (sync, one_number, {"microbatch": 4}, (D, 6), "batch of 6 .*divide.* of 4; use a"),
    (sync, counting, {"microbatch": 4}, (D, 8), "model state.* of 8; use microbatch"),
    (sync, one_number, {"stateful": True}, (D, 1), r"train_state\(..., key=key\)"),
    (sync, sharing, {}, (D, 2), r"s '.params' and '.opt_state.velocity' of the sta"),
    (sync, one_number, {}, (D, 0), "the batch is empty; expected one or more"),
    (sync, integers, {"optimizer": optax.sgd(0.1)}, 8, r"'\[0\]' is int32; expect"),
    (sync, one_number, {}, 16, r"axes .* \[\(8,\), \(16,\)\]; expected the number of"),
    (sync, lambda: pe.train_state(jnp.ones(()), SGD), {}, (D, 2), "of the state have"),
]


@pytest.mark.parametrize("make, make_state, options, shape, message", REFUSED_STEPS)
def test_a_refused_update_keeps_its_state(make, make_state, options, shape, message):
    update = make(product, **({"optimizer": SGD} | options))
    refuses_state(make_state(), message, (update, np.ones(shape)))


# ---------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------


@cases(  # several processes use all of their devices
    "members, devices, processes, expected",
    (1, 4, 2, (1, 4, 1, 4)),
    (5, 4, 2, (5, 4, 2, 1)),
    (3, 16, 2, (3, 16, 1, 4)),
    (2, 6, 3, (2, 6, 1, 3)),
)
def test_layout_of_several_processes_equals_the_table(
    members, devices, processes, expected
):
    assert pe.layout(members, devices, processes) == expected


def test_layout_uses_as_many_devices_as_it_can():
    for members, available in itertools.product(range(1, 201), repeat=2):
        _, devices, shared, replicas = pe.layout(members, available)
        assert devices <= available and (shared == 1 or replicas == 1)
        # Only the last device has idle slots.
        assert members <= devices * shared // replicas < members + shared
        if members >= available:
            assert all(m * available < members for m in range(1, shared))
        else:
            assert devices == members * replicas and devices + members > available


def test_states_are_on_the_devices_that_are_given():
    first, last = jax.devices()[:3], jax.devices()[6:3:-1]
    for asked, used in (3, first), (last, last):
        for members in 2, 1:  # on two of the devices; on three as replicas
            trainer, state = begin(net_trainer.__wrapped__(members, asked))
            there = state.params.dense.bias.sharding.mesh.devices.ravel()
            assert there.tolist() == used[: trainer.layout.devices]


def test_placing_data_again_copies_nothing():
    trainer = net_trainer(3, 2)

    def buffers(data):
        shards = [shard.data for x in data for shard in x.addressable_shards]
        return [data.unsafe_buffer_pointer() for data in shards]

    data = trainer.place(image_data())
    assert buffers(trainer.place(data)) == buffers(data)


def test_a_trainer_warns_of_batches_that_leave_replicas_idle():
    trainer, state = begin(net_trainer(1, 8))
    (batch,) = net_batches(1, 12)
    for call, args, numbers in (
        (trainer.update, batch, "of 12 is divided into 4"),
        (trainer.epoch, [batch, np.arange(6)[None]], "of 6 is divided into 2"),
    ):
        message = f"{numbers} parts, not 8, .* as 8, use them"
        with pytest.warns(UserWarning, match=message) as said:
            state, _ = call(state, *args)
        assert [each.filename for each in said] == [__file__]


@cases(
    "field, message",
    ("params", r"\.dense.bias on device {} .* {}; go on from a checkpoint$"),
    ("model_state", r"state.* on device {} .* {}; .*, or, if it depends on the"),
)
def test_gather_names_the_leaf_and_device_of_a_replica_that_differs(field, message):
    trainer, state = begin(net_trainer(2, 4, **NOISY))
    leaves, structure = jax.tree.flatten(getattr(state, field))
    copies = [np.array(shard.data) for shard in leaves[-1].addressable_shards]
    copies[3].reshape(-1).view(np.uint8)[0] ^= 1
    shards = list(map(jax.device_put, copies, jax.devices()))
    leaves[-1] = jax.make_array_from_single_device_arrays(
        leaves[-1].shape, leaves[-1].sharding, shards
    )
    state = state._replace(**{field: jax.tree.unflatten(structure, leaves)})
    message = message.format(*jax.devices()[3:1:-1])
    assert re.search(message, said_by(RuntimeError, trainer.gather, state))


def test_gather_leaves_no_copy_on_the_host():
    init = functools.partial(jax.random.normal, shape=(2**16,))  # 256 KiB per member
    trainer, state = begin(net_trainer(4, 2, init_fn=init))
    tracemalloc.start()
    trainer.gather(state)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**18
    trainer.gather(state).params[:] = 0  # the caller's own
    assert np.asarray(state.params).any()


# ---------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def as_if_on(platform):
    """Have trainers take the ways of a platform on this CPU, always without oneDNN."""
    there = mock.patch.multiple(pe._Places, platform=platform, absent=False)
    with there, mock.patch.object(fc, "_options", lambda *_, **__: {}):
        yield


def test_keys_that_draw_differently_under_vmap_work_only_without_at_once():
    key, other = (jax.random.key(7, impl=name) for name in ("rbg", "unsafe_rbg"))
    one, two = (net_trainer(3, 1, at_once=n, **NOISY) for n in (1, 2))
    state = one.init(key)
    (batch,) = net_batches(1)
    for each in (key, other):
        assert "at_once=2 with keys of" in said_by(ValueError, two.init, each)
    refuses_state(state, "at_once=2 with keys of rbg", *uses(two)[:2])
    ended = one.gather(one.update(state, *batch)[0])
    five = net_trainer(5, 3, **NOISY)
    among_five = five.gather(five.update(five.init(key), *batch)[0])
    assert leaves_equal(ended, jax.tree.map(lambda x: x[:3], among_five))
    with as_if_on("gpu"):  # computes members in turn, too
        gpu = net_trainer.__wrapped__(3, 1, **NOISY)
        assert_close(gpu.gather(gpu.update(gpu.init(key), *batch)[0])[:2], ended[:2])


def test_effects_of_a_rewritten_function_happen_once_per_member_and_step():
    def loss_fn(kernel, images, labels):
        x = images.transpose(0, 3, 1, 2).astype(jnp.float32) / 255
        jax.debug.callback(lambda label: seen.append(int(label)), labels[0])
        x = dilated(x, kernel, axes="NCHW OIHW NCHW")
        return cross_entropy(x.mean(axis=(2, 3)), labels).mean()

    seen = []
    data = image_data()[0], np.arange(NUM_IMAGES) % 4
    init = functools.partial(jax.random.normal, shape=(4, 1, 3, 3))
    trainer, state = begin(net_trainer(3, 1, loss_fn, init_fn=init, at_once=2))
    # Two members are together, one is alone.
    state, _ = trainer.epoch(state, data, np.arange(12).reshape(3, 2, 2))
    jax.block_until_ready(state.params)
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 0, 2, 2, 2]


def program_of(call, *args, **options):
    """Return the program that a call would run, and its arguments."""
    with mock.patch.object(pe, "_run", side_effect=InterruptedError) as run:
        said_by(InterruptedError, call, *args, **options)
    program, _, *given = run.call_args.args
    return program, given


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def mlir_for(program, args, platform):
    """Return a program for a platform as text; a CPU's options are left out."""
    made = export.export(program._make({}), platforms=[platform])
    return made(*shapes_of(args)).mlir_module()


def test_programs_lowered_for_other_platforms_keep_their_convolutions():
    settings = tm.RECIPES["cnn"]._replace(
        image_shape=(8, 8, 1),
        classes=range(4),
        train_size=128,
        members=4,
        at_once=2,
    )
    trainer = tm.make_trainer(settings, 2)
    state = trainer.init(jax.random.key(0))
    (batch,) = net_batches(1, 4)
    # The network has two convolutions; a step adds their three gradients.  On a GPU,
    # each of two members at once has its own, but for a first layer that only predicts.
    for call, args, count, apart in (
        (trainer.update, batch, 5, 10),
        (trainer.predict, batch[:1], 2, 3),
    ):
        program, given = program_of(call, state, *args)
        for name, number in ("cuda", apart), ("tpu", count), ("cpu", count):
            text = mlir_for(program, given, name)
            assert text.count("stablehlo.convolution") == number
            # But on TPUs, two members at once convolve one after another.
            assert ("_group_count = 2" in text) == (name == "tpu")


@every_way
def test_programs_are_given_no_memory_of_the_users(way):
    """A call may return before its program has read its arguments."""
    state, update = start(way, net_loss, members_state(keys_of(0, way.members)))
    users = on_arrays(aligned)((on_host(state), *image_data()))
    _, given = program_of(update, *users)
    memory = [(x.ctypes.data, x.nbytes) for x in jax.tree.leaves(users)]
    for x in jax.tree.leaves(given):
        shards = [shard.data for shard in getattr(x, "addressable_shards", ())]
        places = [shard.unsafe_buffer_pointer() for shard in shards]
        for place in places or [x.ctypes.data]:
            assert not any(0 <= place - at < size for at, size in memory)


@pytest.mark.usefixtures("optimized")  # otherwise no select is removed
def test_a_step_that_is_skipped_takes_a_branch_on_cpus_and_selects_elsewhere():
    with as_if_on("cpu"):
        trainer, state = begin(net_trainer.__wrapped__(1, 1, skip_nonfinite=True))
        program, args = program_of(trainer.update, state, *image_data())
    cuda = mlir_for(program, args, "cuda")
    assert "optimization_barrier" not in cuda
    cpu = program.lower(*args).compile().as_text()
    assert re.search(r"\.select.*64x6xf32", cuda)
    assert not re.search(r"64,6\].* select\(", cpu)


@cases("devices, make", (2, jax.random.PRNGKey), (4, jax.random.key))
def test_a_lowered_program_is_the_one_that_runs(devices, make):
    def loss_fn(params, images, keys):
        return net(params, images).mean() * jax.vmap(jax.random.uniform)(keys).mean()

    trainer = net_trainer.__wrapped__(2, devices, loss_fn, chunk=8)
    images = image_data()[0][:16]
    keys = jax.random.split(make(0), 16)
    data = images, keys
    order = np.arange(16).reshape(2, 8)
    _, state = begin(trainer)
    own = [jnp.stack([x] * 2) for x in data]
    per_member = functools.partial(trainer.update, per_member=True)
    lower = trainer.lower
    for call, args, lowered in (
        (trainer.init, [KEY], lower("init", key=KEY)),
        (trainer.update, [state, *data], lower("update", *shapes_of(data))),
        (trainer.update, [state, *data], lower("update", Labelled(images), keys)),
        (per_member, [state, *own], lower("update", *shapes_of(own), per_member=True)),
        (
            trainer.epoch,
            [state, data, order],
            lower("epoch", order=Labelled(order), data=data),
        ),
        (trainer.predict, [state, images], lower("predict", inputs=shapes_of(images))),
    ):
        program, given = program_of(call, *args)
        assert program.lower(*given).as_text() == lowered.as_text()


@pytest.mark.usefixtures("optimized")
def test_init_compiles_fast_unless_the_environment_says_otherwise(monkeypatch):
    for flags, times in ("", 1), (f"--{pe._LEVEL}=3", 0):
        monkeypatch.setenv("XLA_FLAGS", flags)
        with mock.patch.object(jax, "jit", side_effect=jax.jit) as jit:
            trainer = net_trainer.__wrapped__(2, 2)
            for args in ("init", KEY), ("update", *image_data()):
                trainer.lower(*args)
        assert str(jit.mock_calls).count(f"'{pe._LEVEL}': 1") == times


def test_lower_takes_shapes_alone_and_moves_no_data():
    trainer = net_trainer.__wrapped__(3, 2)
    images = jax.ShapeDtypeStruct((2**30, 8, 8, 1), np.uint8)
    data = images, jax.ShapeDtypeStruct(images.shape[:1], np.int64)
    order = jax.ShapeDtypeStruct((256, 16), np.int32)
    with mock.patch.object(jax, "device_put", side_effect=InterruptedError):
        lowered = trainer.lower("epoch", data, order)
    shapes = [x.shape for x in jax.tree.leaves(lowered.in_avals)]
    assert images.shape in shapes and order.shape in shapes
    assert trainer.latest is None
    vars(trainer._places)["absent"] = True  # as with a topology's devices
    assert "are a topology's; use T" in said_by(ValueError, trainer.init, KEY)
    assert isinstance(trainer.place(np.ones(3)), jax.ShapeDtypeStruct)


def test_a_loop_of_one_turn_is_none_in_a_program():
    (batch,) = net_batches(1)
    counts = []
    for members, microbatch in (1, None), (1, 8), (3, None), (3, 8):
        trainer = net_trainer(members, 1, microbatch=microbatch)
        text = trainer.lower("update", *batch).as_text()
        counts.append(text.count("stablehlo.while"))
    assert counts == [0, 1, 1, 2]


@cases("which, shards", ((0, 2), 2), pytest.param((0, 2, 3), 4, marks=pytest.mark.once))
def test_shards_divide_the_large_leaves_of_a_state_and_of_frozen(which, shards):
    make = functools.partial(full_trainer, which, attends=True, at_once=1)
    trainer, state = begin(make(devices=8, shards=shards))
    whole, start = begin(make(devices=8 // shards))
    assert trainer.layout == whole.layout
    frozen = trainer._programs.frozen
    weights = state.params.heads.weight
    assert [*weights.sharding.spec[1:]] == [None, "shards"]  # the longest axis
    assert frozen.addressable_data(0).size == frozen.size // shards
    assert trainer.place(image_data())[0].is_fully_replicated
    for leaf in jax.tree.leaves(state[:3]):
        size = leaf[0].size
        here = size // shards if size >= 1024 else size
        assert leaf.addressable_data(0)[0].size == here
    moved = trainer._admit(jax.device_put(state, jax.devices()[0]))
    assert moved.params.heads.weight.sharding.is_equivalent_to(weights.sharding, 4)
    steps = [x.lower("update", *image_data()).as_text() for x in (trainer, whole)]
    loops, others = (step.count("stablehlo.while") for step in steps)
    assert loops == others  # XLA for TPUs computes loops twice within one of one turn
    gathered = trainer.gather(state)
    assert_close(gathered[:3], whole.gather(start)[:3])
    for other in trainer, whole:  # from S shards to S, and to one
        placed = other.scatter(gathered)
        assert leaves_equal(other.gather(placed), gathered)
        here = placed.params.heads.weight.addressable_data(0)[0].size
        assert here == 32 * 96 // other.shards


@mock.patch.object(pe, "_WHOLE", 1)
def test_a_loss_may_divide_its_arrays_over_shards_by_itself():
    (batch,) = net_batches(1)
    ends = []
    steps = []
    for devices, shards in (1, 1), (2, 2):

        def loss_fn(params, images, labels, shards=shards):
            hidden = pe.dense(params.hidden, images.reshape(len(images), -1) / 255)
            if shards > 1:  # by features, in place of examples
                spec = jax.sharding.PartitionSpec(None, "shards")
                hidden = jax.lax.with_sharding_constraint(hidden, spec)
            logits = pe.dense(params.dense, jax.nn.relu(hidden))
            return cross_entropy(logits, labels).mean()

        trainer = net_trainer.__wrapped__(
            2, devices, loss_fn, shards=shards, microbatch=4
        )
        trainer, state = begin(trainer)
        steps.append(trainer.lower("update", *batch))
        new, losses = trainer.update(state, *batch)
        assert "was consumed" in said_by(ValueError, trainer.update, state, *batch)
        ends.append((losses, trainer.gather(new)[:2]))
    assert_close(*ends)
    divided = '[{"shards"}, {}, {}, {}]> : tensor<%dx8x8x1xui8>'
    assert divided % 4 in steps[1].as_text()  # a micro-batch
    assert divided % 16 in trainer.lower("predict", batch[0]).as_text()  # a chunk
    whole, half = (step.compile().memory_analysis() for step in steps)
    assert half.argument_size_in_bytes < 0.65 * whole.argument_size_in_bytes


@cases("members, devices", *LAYOUTS[::2])
def test_a_program_is_traced_once_whatever_it_is_given_and_anew(members, devices):
    (batch,) = net_batches(1)
    order = orders(members)
    traces = []
    functions = noting(traces)  # which could read a global that has changed since

    def use(trainer, state, steps, data):
        trainer.predict(state, batch[0][:4])  # more rows would be traced for sizes
        state, _ = trainer.update(state, *batch)
        ended, _ = trainer.epoch(state, data, order[:, :steps])
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        return ended

    for known in 3, 6:
        trainer = net_trainer.__wrapped__(members, devices, **functions)
        data = trainer.place(image_data())
        state = use(trainer, trainer.init(KEY), 10, data)
        assert len(traces) == known
        state = use(trainer, trainer.scatter(trainer.gather(state)), 3, image_data())
        own = pe._device_sharding(trainer.layout.devices, "a name of the user's")
        for there in jax.devices()[0], own:  # the second is equivalent
            state = use(trainer, jax.device_put(state, there), 1, data)
        assert len(traces) == known and {dtype for dtype, *_ in traces} == {"uint8"}


def test_an_epoch_holds_no_more_large_aux_than_it_has_to(monkeypatch):
    monkeypatch.setattr(pe, "_joined", None)  # there is no program for each length

    def loss_fn(params, images, labels):
        return net_loss(params, images, labels), params.dense.bias  # 16 bytes

    data = image_data()
    order = orders(1)[0][:3]
    ends = []
    for most, held in (2**26, 256), (48, 3), (1, 1):
        monkeypatch.setattr(pe, "_AUX_BYTES", most)
        trainer, state = begin(net_trainer.__wrapped__(2, 2, loss_fn, has_aux=True))
        lowered = trainer.lower("epoch", data, order[:1])
        assert {x.shape[1] for x in jax.tree.leaves(lowered.out_info[1])} == {held}
        state, metrics = trainer.epoch(state, data, order)
        ends.append((metrics, trainer.gather(state)))
    assert metrics[1].shape == (2, 3, 4)
    assert all(leaves_equal(ends[0], each) for each in ends[1:])


@pytest.mark.once  # optimized, JAX 0.12 fuses the two forms of loops differently
def test_the_ways_of_a_gpu_have_the_bits_of_a_cpus():
    """States are flat between the members there, and loops have known lengths."""
    images, labels = data = image_data()
    rows = np.arange(70)[:, None] * [1, 2, 3]
    ends = []
    counts = []
    for platform in "cpu", "gpu":
        with as_if_on(platform):
            trainer, state = begin(net_trainer.__wrapped__(3, 1, at_once=1, **NOISY))
            update = trainer.lower("update", images, labels).as_text()
            epoch = trainer.lower("epoch", data, rows).as_text()
            state, losses = trainer.epoch(state, data, rows)
            probs = trainer.predict_members(state, images)
        ended = trainer.gather(state)
        assert ended.model_state.steps.tolist() == [70] * 3
        ends.append((losses, probs, ended))
        counts.append([update.count("lo.reshape"), epoch.count("lo.while")])
    assert leaves_equal(*ends) and (np.diff(counts, axis=0) > 1).all()


@pytest.mark.once
@cases("most, together", (5, 5), (4, 3), (1, 1))
def test_accelerators_compute_as_many_members_at_once_as_fit(most, together):
    traces = []

    def fits(program, args, by_slot, real=pe._fits):
        of_program = [n for (_, n), x in trainer._programs.kept.items() if x is program]
        return real(program, args, by_slot) and max(of_program) <= most

    trainer = net_trainer.__wrapped__(5, 1, noting(traces)["loss_fn"])
    with as_if_on("gpu"), mock.patch.object(pe, "_fits", fits):
        assert "at_once=5" in repr(trainer)
        _, state = begin(trainer)
        found = trainer.update(state, *image_data())
        assert f"at_once={together}" in repr(trainer)
    assert len(traces) == {5: 1, 3: 2, 1: 4}[together]  # of 5, 3, 2 and 1 together
    one, state = begin(net_trainer(5, 1, at_once=together))
    assert_close(found[1], one.update(state, *image_data())[1])


def test_a_program_fits_if_a_fifth_of_every_devices_memory_stays_free():
    program = jax.jit(lambda x: jnp.sort(x) + 1)
    x = np.zeros(1000, np.float32)
    memory = program.lower(x).compile().memory_analysis()
    need = memory.temp_size_in_bytes + memory.output_size_in_bytes

    def fits(*free):
        stats = [n and {"bytes_limit": n + 7, "bytes_in_use": 7} for n in free]
        devices = [mock.Mock(**{"memory_stats.return_value": x}) for x in stats]
        return pe._fits(program, (x,), mock.Mock(addressable_devices=devices))

    assert need >= 4000 and fits(None)  # a CPU does not tell
    blind = mock.Mock()
    blind.lower().compile().memory_analysis.return_value = None
    assert pe._fits(blind, (x,), None)  # nor does every backend
    assert fits(2 * need, 1.25 * need) and not fits(2 * need, 1.24 * need)


def test_more_members_at_once_than_fit_are_named():
    trainer, state = begin(net_trainer(2, 1, at_once=2))
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes")
    with mock.patch.object(pe, "_run", side_effect=full):
        with pytest.raises(RuntimeError, match="^at_once=2: RES.*; use fewer, or None"):
            trainer.predict(state, image_data()[0])
        with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE"):
            net_trainer(2, 1).predict(state, image_data()[0])


@cases("at_once, together", (1, 1), (2, 2), (9, 4))
def test_at_once_is_the_number_of_members_in_one_vmap(at_once, together):
    sizes = {1}  # a call without vmap counts as one
    same = jax.custom_batching.custom_vmap(lambda x: x)
    same.def_vmap(lambda size, is_mapped, x: (sizes.add(size) or x, is_mapped[0]))

    def apply_fn(params, images):
        return same(net(params, images))

    trainer = net_trainer(4, 1, at_once=at_once, apply_fn=apply_fn)
    trainer.lower("predict", image_data()[0][:1])
    assert max(sizes) == together


def test_frozen_arrays_are_in_no_program_and_train_as_constants_do():
    trainer, state = begin(full_trainer((0, 2, 3), 2))
    data = image_data()
    constant = dataclasses.replace(trainer, frozen=None)  # its functions hold it
    assert repr(trainer.like()) == repr(trainer.gather(state))
    start = constant.scatter(trainer.gather(state))
    own = [np.stack([x[:10]] * 3) for x in data]  # as on a journey
    ends = []
    for each, first in (trainer, state), (constant, start):
        ended, metrics = each.update(first, *own, per_member=True)
        ends.append((metrics, each.gather(ended)[:3]))
    assert_close(*ends)
    for lowered in (
        trainer.lower("init", KEY),
        trainer.lower("update", *data),
        trainer.lower("predict", data[0]),
        trainer.lower("epoch", data, orders(1)[0]),
    ):
        assert not re.search("dense<[^>]{999}", lowered.as_text())


@cases("method, at_once", ("update", 3), ("epoch", 1))
def test_members_that_share_a_device_are_in_memory_once(optimized, method, at_once):
    def init(key):
        return jnp.full((3, 128, 128), jax.random.uniform(key))

    def loss_fn(layers, x):
        for layer in layers:
            x = jax.nn.relu(x @ layer)
        return (x**2).mean()

    x = randn(0, 4, 128)
    given = {"update": (x,), "epoch": ((x,), np.arange(4)[None])}[method]

    def memory_of(trainer):
        return trainer.lower(method, *given).compile().memory_analysis()

    make = functools.partial(net_trainer, init_fn=init, at_once=at_once)
    trainer = make(8, 1, loss_fn)
    one = sum(4 * x.size for x in jax.tree.leaves(trainer.like()[:2])) // 8
    few = memory_of(make(at_once, 1, loss_fn))
    all_of_them = memory_of(trainer)
    assert few.alias_size_in_bytes >= at_once * one  # it reuses the state's buffers
    assert all_of_them.alias_size_in_bytes >= 8 * one
    more = all_of_them.temp_size_in_bytes - few.temp_size_in_bytes
    assert more <= 1.01 * at_once * one  # one copy of a group, and a few numbers


@cases("members, devices", *LAYOUTS[1:])
def test_functions_may_call_back_to_the_host(members, devices):
    def twice_there(x):
        double = functools.partial(np.multiply, 2, dtype=x.dtype)
        return jax.pure_callback(double, x, x, vmap_method="expand_dims")

    def run(double):
        trainer = net_trainer(
            members,
            devices,
            lambda w, x: (double(x * 1.0).mean() * w).sum(),
            init_fn=lambda key: double(jax.random.normal(key, (3,))),
            apply_fn=lambda w, x: double(x * w.sum()),
            output=None,
        )
        trainer, state = begin(trainer)
        state, _ = trainer.update(state, np.arange(8))
        return trainer.predict_members(state, np.arange(3)), trainer.gather(state)

    assert leaves_equal(run(twice_there), run(lambda x: 2 * x))


MOVES = {
    "rows": lambda b: jnp.asarray(b).at[1:].set(b[:-1]),
    "slices": lambda b: jax.lax.dynamic_update_slice_in_dim(b, b[:-1], 1, 0),
}


@pytest.mark.usefixtures("optimized")
@cases("move", *MOVES)
def test_arrays_that_move_their_rows_are_right_in_every_program(move):
    b = np.arange(128, dtype=np.float32).reshape(8, 16)
    move = MOVES[move]

    def moved(rows, times=1):
        for _ in range(times):
            rows = np.concatenate([rows[:1], rows[:-1]])
        return rows

    def loss_fn(params, states, key, rows, h):
        return params[0].sum() ** 2, (list(map(move, states)), (move(rows), move(h)))

    def apply_fn(params, states, inputs, h):
        found = jnp.stack(list(map(move, [h, *params, *states])))
        return jnp.broadcast_to(found, (len(inputs), *found.shape))

    def optimizer(h):
        return pe.Optimizer(lambda _: move(h), lambda g, s, _: (g, move(s)))

    # Micro-batches, the last number, take no model state.
    for members, devices, size in (1, 1, None), (3, 2, None), (1, 2, 2):
        count = 0 if size else 1  # of model states
        trainer = net_trainer.__wrapped__(
            members,
            devices,
            loss_fn,
            optimizer,
            init_fn=lambda key, h, n=count: ([move(h)], [move(h)] * n),
            apply_fn=apply_fn,
            hyper=np.stack([b] * members),
            output=None,
            microbatch=size,
            stateful=True,
            has_aux=True,
        )
        state = trainer.init(KEY)
        expected = [moved(b)] + [moved(b, 2)] * (1 + count)
        for found in trainer.predict_members(state, b):
            assert_array_equal(found, [expected] * len(b))
        parts = np.split(b, 8 // size if size else 1)
        rows = np.mean(list(map(moved, parts)), axis=0)
        state, (_, aux) = trainer.update(state, b)
        state, (_, in_epoch) = trainer.epoch(state, (b,), np.arange(8)[None])
        for found, again, one in zip(aux, in_epoch, (rows, moved(b))):
            assert_array_equal(found, [one] * members)
            assert_array_equal(again, [[one]] * members)
        ended = trainer.gather(state)
        for found in [*ended.model_state, ended.opt_state]:
            assert_array_equal(found, [moved(b, 3)] * members)
    for make, keys in (sync, pe.replicate(KEY, 2)), (ensemble, keys_of(0, 2)):
        by_hand = functools.partial(loss_fn, h=b)
        update = make(by_hand, SGD, stateful=True, has_aux=True)
        state = pe.replicate(pe.train_state([b], SGD, model_state=[b]), 2)
        state, (_, aux) = update(state._replace(key=keys), pe.replicate(b, 2))
        assert_array_equal([aux[0], *state.model_state], [[moved(b)] * 2] * 2)


def test_microbatches_are_chosen_by_platform_and_batch(monkeypatch):
    def sizes(rows, **options):
        seen = []
        one = jnp.ones(())

        def loss_fn(params, *rest):
            seen.append(len(rest[-1]))
            loss = jnp.mean(params * rest[-1])
            return (loss, loss) if options.keys() & {"has_aux", "stateful"} else loss

        def init(key):
            return (one, one) if "stateful" in options else one

        trainer = net_trainer.__wrapped__(1, 1, loss_fn, init_fn=init, **options)
        for size in rows:
            trainer.lower("update", np.ones((size, 1)))
        return seen

    auto = {"microbatch": "auto"}
    rows = 128, 100, 66, 45, 34, 32, 31, 1
    assert sizes(rows, **auto) == [32, 25, 22, 45, 17, 32, 31, 1]
    assert sizes([128]) == sizes([128], has_aux=True) == [128]
    assert sizes([128, 64, 60], microbatch=64) == [64, 64, 60]
    assert sizes([64], stateful=True, microbatch=64) == [64]
    assert sizes([128], has_aux=True, **auto) == [32]
    assert sizes([128], stateful=True, **auto) == [128]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sizes([128], **auto) == [32]  # the trainer's devices are CPUs
    with as_if_on("gpu"):
        assert sizes([128], **auto) == [128]
    monkeypatch.undo()
    other = made(devices=[mock.Mock(platform="tpu")], **auto)
    assert other._places.absent and other._programs.member.platform == "tpu"


def test_a_block_of_predictions_is_bounded_by_its_inputs_and_outputs(monkeypatch):
    calls = []
    hook(monkeypatch, pe, "_run", lambda *_: calls.append(1))
    trainer, state = begin(net_trainer(4, 2, chunk=2))
    # A chunk takes 2 x 64 bytes and returns 2 x 4 floats for each of two members.
    for most, expected in ((191, 8), (192 + 191, 8), (2 * 192, 4), (4 * 192, 2)):
        monkeypatch.setattr(pe, "_BLOCK_BYTES", most)
        trainer._predictions.sizes.clear()
        calls.clear()
        trainer.predict_members(state, image_data()[0][:16])
        assert len(calls) == expected + 2 * (most == 191)  # a new form is tried twice


@cases("width, chunk", (1024, 256), (32_768, 32), (2**21, 8))
def test_a_chunks_largest_array_fits_a_cpus_cache(width, chunk):
    @jax.jit
    def apply(params, x):  # the weights' copies do not count, and numbers of x do
        return jax.nn.relu(x @ (2 * params)[:4])[:, :2]

    init = functools.partial(jax.random.normal, shape=(8, width))
    trainer = net_trainer.__wrapped__(1, 1, init_fn=init, apply_fn=apply)
    trainer.lower("predict", np.ones((16, 4), np.float32))
    (sizes,) = trainer._predictions.sizes.values()
    assert sizes.chunk == chunk


def test_accelerators_predict_larger_chunks_of_the_same_outputs():
    trainer, state = begin(net_trainer.__wrapped__(3, 1))
    # 7,200 of 64 bytes each, 48 of outputs.
    images = np.tile(image_data()[0], (30, 1, 1, 1))
    with as_if_on("gpu"), mock.patch.object(pe, "_BLOCK_BYTES", 112 * 512):
        found = trainer.predict_members(state, images)
        few = [trainer.predict_members(state, images[:n]) for n in (20, 40)]
    assert set(trainer._predictions.sizes.values()) == {(512, 4)}
    expected = net_trainer(3, 1).predict_members(state, images)
    assert_close([found, *few], [expected, expected[:, :20], expected[:, :40]])
    with as_if_on("gpu"):
        net_trainer(3, 1, chunk=16).predict(state, images[:100])
    sizes = net_trainer(3, 1, chunk=16)._predictions.sizes
    assert set(sizes.values()) == {(16, 128)}


# ---------------------------------------------------------------------------------
# Predictions
# ---------------------------------------------------------------------------------


def test_probabilities_from_half_precision_logits_are_distributions():
    def apply_fn(params, images):
        return (9 * net(params, images)[:, None]).astype("bfloat16")

    trainer, state = begin(net_trainer(2, 2, apply_fn=apply_fn))
    probs = trainer.predict_members(state, image_data()[0])
    assert em.predictive_entropy(probs).shape == (NUM_IMAGES, 1)


def test_predicting_compiles_few_programs_and_holds_one_chunk_at_a_time():
    shapes = []
    trainer, state = begin(net_trainer(2, 4, **noting(shapes), chunk=5))
    # Each of two replicas pads few rows to a power of two, and cuts more into fives.
    for count in (1, 3, 10, 23):
        assert trainer.predict(state, image_data()[0][:count]).shape == (count, 4)
    assert list(dict.fromkeys(shape[1] for shape in shapes)) == [1, 2, 5]
    traced = len(shapes)
    for count in (2, 4, 9, 11, 31, 40):
        trainer.predict(state, image_data()[0][:count])
    assert len(shapes) == traced


def test_few_rows_are_predicted_without_a_loop():
    images = image_data()[0]
    programs = [net_trainer(1, 1).lower("predict", images[:n]) for n in (3, 240)]
    few, many = ["while" in program.as_text() for program in programs]
    assert many and not few


@cases("members, devices", (1, 4), (2, 4), (3, 2))
def test_a_prediction_does_not_depend_on_the_other_rows(members, devices):
    images = image_data()[0][:235]
    trainer, state = begin(net_trainer(members, devices, chunk=3))
    mean = trainer.predict(state, images)
    each = trainer.predict_members(state, images)
    assert leaves_equal(mean, each.mean(axis=0))
    with mock.patch.object(pe, "_BLOCK_CHUNKS", 2):  # several blocks, one partial
        by_block = net_trainer.__wrapped__(members, devices, chunk=3)
        assert len(list(by_block.predict_blocks(state, images))) > 9
        assert leaves_equal(by_block.predict(state, images), mean)
        assert leaves_equal(by_block.predict_members(state, images), each)
    # A chunk of one may round differently.
    assert_close(trainer.predict_members(state, images[17:18]), each[:, 17:18])
    inputs = {"images": images, "none": np.ones((len(images), 0))}
    without = net_trainer(members, devices, apply_fn=lambda p, x: net(p, x["images"]))
    assert_close(without.predict(state, inputs), mean)


@cases("members, devices", (1, 2), (3, 2))
def test_outputs_that_depend_on_other_examples_are_refused(members, devices):
    images = randn(0, 17, 64)  # more than a chunk for some of the replicas
    _, state = begin(net_trainer(members, devices))

    def predict(count, apply_fn):
        trainer = net_trainer.__wrapped__(
            members, devices, apply_fn=apply_fn, output=None, chunk=8
        )
        for n in (1, 4) if count == 4 else (17,):
            trainer.predict(state, images[:n])

    def recurrent(x):  # [T, N, F], given [N, T, F]
        return jax.lax.scan(lambda y, x: (y + x / 2, y), x[0], x)[1]

    def tiny(x):  # in one small column alone
        return x.at[:, 0].set(1e-9 * x[:, 0] + 1e-9 * x[0, 0])

    def centered(params, x):
        return net(params, x - x.mean(0, keepdims=True))

    def from_last(params, x):
        outputs = net(params, x)
        return outputs - outputs[-1:]

    count = 4 if members == 3 else 17
    for apply_fn in (
        centered,
        lambda p, x: net(p, x - x[:1]),
        lambda p, x: net(p, recurrent(x)),
        lambda p, x: net(p, x[::-1]),
        from_last,
        lambda p, x: tiny(net(p, x)),
        lambda p, x: jnp.cumsum(net(p, x), 0),
    ):
        assert "train=False" in said_by(ValueError, predict, count, apply_fn)

    def rounded(params, x):  # each row of the chunk otherwise
        return centered(params, x) + 1 + 1e-6 * jnp.arange(len(x))[:, None]

    trainer = net_trainer.__wrapped__(members, devices, apply_fn=rounded, output=None)
    trainer.predict(state, np.zeros_like(images))  # a warm-up, whose rows are equal
    assert "train=False" in said_by(ValueError, trainer.predict, state, images)

    def by_width(params, x):  # wide rows depend on each other
        return centered(params, x[:, :64]) if x.shape[1] > 64 else net(params, x)

    trainer = net_trainer.__wrapped__(members, devices, apply_fn=by_width, output=None)
    trainer.predict(state, images)
    wide = np.concatenate([images, images], axis=1)
    assert "train=False" in said_by(ValueError, trainer.predict, state, wide)
    nan = jnp.array([[jnp.nan, jnp.inf, 0, 0]])
    # A draw of its own for each row.
    predict(17, lambda p, x: net(p, x) + jax.random.normal(KEY, (8, 4))[: len(x)] + nan)
    predict(17, lambda p, x: net(p, x) * (1 + 1e-5 * x.mean()))  # as by rounding


def tree_init(key):
    keys = jax.random.split(key)
    return jax.random.normal(keys[0], (9, 4)), jax.random.normal(keys[1], (2, 3))


SMALL_TYPES = ["int4", "uint4", "float8_e4m3fn", "float16", "bfloat16", "bool", "int32"]


def tree_apply(params, inputs):  # tokens [B, 5], position [B, 2], keys [B]
    table, weight = params
    rows = table[inputs["tokens"]]  # [B, 5, 4]
    moved = (inputs["position"] @ weight)[:, 0]
    outputs = {"tokens": rows, "moved": moved, "best": rows.argmax(axis=-1)}
    outputs |= {name: inputs["tokens"].astype(name) for name in SMALL_TYPES}
    outputs["none"] = 1 + inputs["none"]
    outputs["drawn"] = jax.vmap(jax.random.normal)(inputs["keys"])
    return outputs | {"log": jnp.log(jax.nn.relu(rows))}  # some are -inf


def finite(tree):
    return jax.tree.map(lambda x: np.maximum(np.float32(x), -99), tree)


@pytest.mark.filterwarnings("error")  # such as JAX's when it truncates int64
@cases("members, devices", *LAYOUTS[1:])
def test_predictions_are_any_tree_of_any_type_and_have_float32_means(members, devices):
    trainer = net_trainer(
        members,
        devices,
        init_fn=tree_init,
        apply_fn=tree_apply,
        output=None,
        chunk=3,
    )
    trainer, state = begin(trainer)
    params = trainer.gather(state).params
    rng = np.random.default_rng(0)
    for count in (1, 13):
        inputs = {"position": randn(1, count, 2), "keys": keys_of(2, count)}
        inputs["tokens"] = rng.integers(9, size=(count, 5))
        inputs["none"] = np.ones((count, 0))
        found = trainer.predict_members(state, inputs)
        alone = [jax.jit(tree_apply)(member(params, k), inputs) for k in range(members)]
        expected = jax.tree.map(lambda *x: np.stack(x), *alone)
        assert_close(finite(found), finite(expected))
        same = jax.tree.map(lambda x, y: x.dtype == y.dtype, found, expected)
        assert jax.tree.all(same)
        mean = jax.tree.map(lambda x: np.float32(x).mean(axis=0), expected)
        means = trainer.predict(state, inputs)
        assert_close(finite(means), finite(mean))
        assert {x.dtype.name for x in jax.tree.leaves(means)} == {"float32"}


def test_predicting_may_move_rows_of_the_parameters():
    def apply_fn(rows, x):
        moved = rows.at[1:].set(rows[:-1]).at[0].set(9)
        return x[:, None] * moved.reshape(1, -1)

    def init(key):
        return jnp.arange(4.0)[:, None]

    trainer = net_trainer(3, 2, init_fn=init, apply_fn=apply_fn, output=None)
    trainer, state = begin(trainer)
    assert trainer.predict(state, np.ones(1)).tolist() == [[9, 0, 1, 2]]


def predicting(apply_fn, output=jax.nn.softmax, rows=128):
    trainer = net_trainer.__wrapped__(2, apply_fn=apply_fn, output=output)
    inputs = np.ones((rows, 4), np.float32)
    return lambda: trainer.predict(net_trainer(2).init(KEY), inputs)


def test_examples_of_equal_outputs_are_tried_eight_times(monkeypatch):
    seen = []
    hook(monkeypatch, pe._Predictions, "_compute", lambda *_: seen.append(1))
    trainer = pe.make_trainer(
        lambda key: jnp.ones(()),
        net_loss,
        SGD,
        members=1,
        devices=1,
        apply_fn=lambda params, x: params + 0 * x,
    )
    state = trainer.init(KEY)
    for _ in range(9):
        trainer.predict(state, np.ones((4, 2), np.float32))
    assert len(seen) == 8 * 3 + 1


def python_calls(call):
    """Return how many functions of Python a call enters."""
    count = itertools.count()

    def profile(frame, event, arg):
        if event == "call":
            next(count)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return next(count)


def test_warm_calls_enter_few_functions_of_python():
    """Each call counts: with a tiny network, they are most of a step's time."""

    def calls(num_layers):
        trainer = pe.make_trainer(
            functools.partial(pe.mlp_init, sizes=[4] * (num_layers + 1)),
            lambda params, x, y: pe.softmax_cross_entropy(pe.mlp(params, x), y).mean(),
            pe.adam(0.1),
            members=1,
            devices=1,
            apply_fn=pe.mlp,
        )
        batch = randn(0, 8, 4), np.arange(8) % 4
        data = trainer.place(batch)
        loaded = trainer.scatter(trainer.gather(trainer.init(KEY)))
        do = {
            "update": lambda: trainer.update(
                trainer.latest or trainer.init(KEY), *batch
            ),
            "epoch": lambda: trainer.epoch(trainer.latest, data, np.arange(8)[None]),
            "predict": lambda: trainer.predict(trainer.latest, batch[0]),
            "serve": lambda: trainer.predict(loaded, batch[0]),
        }
        for call in do.values():
            for _ in range(pe._TRIES + 1):  # outputs may be equal
                call()
        return {name: python_calls(call) for name, call in do.items()}

    few, many = calls(4), calls(40)
    limits = {"update": 190, "epoch": 265, "predict": 165, "serve": 170}
    for name, most in limits.items():
        assert few[name] <= most, (name, few)
        # Three trees of NamedTuples are made anew: parameters and two moments.
        made = 3 * 36 if name in ("update", "epoch") else 0
        assert many[name] - few[name] <= made + 1, (name, few, many)


def test_a_state_that_was_predicted_with_is_known_but_not_kept():
    trainer, state = begin(net_trainer(2, D))
    images, labels = image_data()
    expected = trainer.predict(state, images)
    assert leaves_equal(trainer.predict(state._replace(), images), expected)
    twins = state.key[np.zeros(len(state.key), int)]
    for message, other in (
        ("have equal keys", state._replace(key=twins)),
        ("leaf .* absent", state._replace(params=())),
    ):
        refuses_state(other, message, (trainer.predict, images))
        assert leaves_equal(trainer.predict(state, images), expected)
    untrained = state._replace(opt_state=())  # which predicting does not ask for
    trainer.predict(untrained, images)
    refuses_state(untrained, "another trainer", (trainer.update, images, labels))
    leaf = weakref.ref(state.params.dense.weight)
    del state, untrained, other
    gc.collect()
    assert leaf() is None


def test_outputs_that_are_probabilities_already_get_a_warning():
    def scaled(params, x):
        return params * x

    xs = np.eye(4, dtype=np.float32)[np.arange(16) % 4]
    said = "look like the softmax of probabilities; apply_fn has to return logits"
    options = dict(members=2, devices=1)
    for name, apply_fn, inputs, warns in (
        ("one-hot", scaled, xs, True),
        ("soft", lambda p, x: jax.nn.softmax(9 * p * x), xs, True),
        ("few", scaled, xs[:3], False),
        ("all equal", scaled, xs[np.zeros(16, int)], False),
        ("logits", lambda p, x: 9 * p * x, xs, False),
        ("nearly uniform", lambda p, x: 0.1 * p * x, xs, False),
        ("of two classes", lambda p, x: (p * x)[:, :2], xs[np.arange(16) % 2], False),
        ("one wide row", lambda p, x: p * x * (1 + 9 * (x[:, :1] > 0)), xs, False),
    ):
        trainer = pe.make_trainer(
            lambda key: jnp.ones(()), net_loss, SGD, apply_fn=apply_fn, **options
        )
        state = trainer.init(KEY)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                trainer.predict(state, inputs)
        messages = [str(each.message) for each in found]
        assert len(messages) == warns and all(said in x for x in messages), name


ALONE = r"outputs have .*\[\(\)\]; expected 8, an entry .* of the chunk"

OUTPUT_MISFITS = {
    "two outputs": (
        predicting(lambda _, x: (x, x)),
        r"\('float32\[8, 4\]', .*\) for .*=None",
    ),
    "a number for the softmax": (
        predicting(lambda _, x: x[:, 0]),
        r"\[8\] for .* x\[None\]; the softmax takes",
    ),
    "one more axis for the softmax": (
        predicting(lambda _, x: x[..., None]),
        r"float32\[8, 4, 1\] for .*; the soft",
    ),
    "a mean of all examples": (predicting(lambda _, x: x.mean(), None), ALONE),
    "the first example alone": (
        predicting(lambda _, x: x[0], rows=9),
        r"32\[4, 4\], filled up to a chunk; one",
    ),
    "an output that takes the mean": (predicting(lambda _, x: x, jnp.mean), ALONE),
}


@pytest.mark.parametrize("name", OUTPUT_MISFITS)
def test_predict_refuses_all_but_one_output_per_example(name):
    assert_refuses(*OUTPUT_MISFITS[name])


# ---------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------


def test_init_makes_member_i_from_the_key_and_i_alone():
    for members, devices in LAYOUTS:
        trainer = net_trainer(members, devices)
        made = trainer.gather(trainer.init(jax.random.key(7)))
        key = jax.random.fold_in(jax.random.key(7), members - 1)
        init_key, key = jax.random.split(key)
        assert made.key[-1] == key
        assert leaves_equal(member(made.params, -1), jax.jit(net_init)(init_key))


def test_an_epoch_takes_the_steps_of_updates_in_order():
    trainer, state = begin(net_trainer(3, 2))
    first = trainer.gather(state)
    data = image_data()
    order = orders(3)[:, :3]
    state, losses = trainer.epoch(state, data, order)
    ended = trainer.gather(state)
    state = trainer.scatter(first)
    for rows, expected in zip(order.swapaxes(0, 1), losses.T):
        state, found = trainer.update(state, *(x[rows] for x in data), per_member=True)
        assert_close(found, expected)
    assert_close(trainer.gather(state)[:2], ended[:2])


def test_an_epoch_takes_losses_that_see_the_parts_of_replicas_alone():
    def loss_fn(params, images, labels):  # compares the images of all replicas
        z = net(params, images.reshape(4, 64))
        others = jax.lax.all_gather(z, "replicas", tiled=True)
        return jnp.square(z @ others.T).mean(), others

    (batch,) = net_batches(1)
    trainer = net_trainer.__wrapped__(1, 2, loss_fn, has_aux=True, microbatch=4)
    trainer, state = begin(trainer)
    state, (_, aux) = trainer.epoch(state, image_data(), orders(1, batch=16)[0, :1])
    assert aux.shape == (1, 1, 8, 4)
    _, (_, aux) = trainer.update(state, *batch)
    assert aux.shape == (1, 8, 4)


class Station(NamedTuple):
    """Where member 1 takes its next steps, and beside whom."""

    others: list  # the other members, which stand before it
    devices: int
    at_once: int
    steps: int  # 1 is by `update`
    own: bool  # whether each member has rows of its own
    shards: int


STATIONS = [
    Station([0, 2], 1, 1, 3, True, 1),
    Station([0, 2, 3, 4], 3, 1, 1, True, 1),
    Station([0, 2, 3, 4], 2, 2, 2, False, 1),  # the third member has a device alone
    Station([], 8, 1, 2, False, 1),  # two replicas per part of the batch
    Station([2], 4, 1, 3, True, 1),  # a part per replica
    Station([0], 8, 1, 2, False, 2),  # replicas, each in shards
    Station([0, 2], 8, 2, 3, True, 4),  # members in shards, two of them at once
]
# Dropout, whose microbatches are the same at all stations; batch statistics; and a
# convolution and attention, in shards.
KINDS = {
    "dropout": {"microbatch": 3},
    "statistics": {"statistics": True},
    "attention, statistics": {"attends": True, "statistics": True, "chunk": 8},
    "attention": {"attends": True, "chunk": 8},
}


def joined(*leaves):  # NumPy compiles nothing
    return (np if isinstance(leaves[0], np.ndarray) else jnp).concatenate(leaves)


@pytest.mark.filterwarnings("ignore:a batch of")
@cases(
    "name, make, stations",
    ("dropout", jax.random.PRNGKey, STATIONS[:5]),
    pytest.param(
        "statistics", jax.random.key, STATIONS[4:1:-1], marks=pytest.mark.once
    ),
    ("attention, statistics", jax.random.key, STATIONS[5:6]),
    pytest.param("attention", jax.random.key, STATIONS[6:], marks=pytest.mark.once),
)
def test_a_member_ends_alike_wherever_it_trains(tmp_path, name, make, stations):
    path = tmp_path / "all"
    key = make(3)
    make_trainer = functools.partial(full_trainer, **KINDS[name])
    # Three of these batches give the second member a nan.
    rows = np.random.default_rng(34).integers(NUM_IMAGES, size=(5, 12, 12))
    alone = make_trainer((1,), 1)
    everyone = make_trainer((0, 1, 2, 3, 4), 1)
    first = everyone.gather(everyone.init(key))
    ended = taken(first, [1])
    state = alone.scatter(ended)
    exact = True
    for station in stations:
        which = (*station.others, 1)
        trainer = make_trainer(
            which, station.devices, at_once=station.at_once, shards=station.shards
        )
        exact &= trainer.layout.replicas == station.at_once == station.shards == 1
        begun = jax.tree.map(joined, taken(first, station.others), ended)
        here = trainer.scatter(begun)
        assert leaves_equal(trainer.gather(here), begun)
        now, rows = np.split(rows, [station.steps], axis=1)
        state, expected = alone.epoch(state, image_data(), now[1])
        now = now[list(which)] if station.own else now[1]
        if station.steps > 1:
            here, found = trainer.epoch(here, image_data(), now)
        else:
            batch = [x[now[..., 0, :]] for x in image_data()]
            here, found = trainer.update(here, *batch, per_member=station.own)
        found = jax.tree.map(lambda x: np.nan_to_num(np.ravel(x[-1])[None]), found)
        assert_close(found, jax.tree.map(np.nan_to_num, expected))
        pe.save(path, trainer.gather(here))
        ended = taken(pe.load(path, trainer.like(key)), [-1])
        assert ended.key.dtype == key.dtype
        as_alone = alone.gather(state)
        assert leaves_equal(ended.key, as_alone.key)
        assert_close(ended[:3], as_alone[:3])
        assert not exact or leaves_equal(ended, as_alone)
    images = image_data()[0][:9]
    probs = trainer.predict_members(here, images)
    assert_close(probs[-1:], alone.predict_members(state, images))
    assert_close(trainer.predict(here, images), probs.mean(axis=0))


def test_a_trainer_warns_once_of_members_that_cannot_differ():
    plain = {
        "init_fn": lambda *_: jnp.ones(3),
        "loss_fn": lambda w, x: (x @ w)[0],
        "optimizer": SGD,
        "members": 2,
    }

    def warned(call, *args, **options):
        trainer = pe.make_trainer(**plain | options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            state, _ = call(trainer, trainer.init(KEY), *args)
            at_first = len(found)
            _, metrics = call(trainer, state, *args)
        assert len(found) == at_first
        assert all(w.filename == __file__ for w in found)
        assert all("the 2 members have equal weights" in str(w.message) for w in found)
        different = {x.tobytes() for x in np.asarray(metrics)}
        assert (len(different) < len(metrics)) == bool(found)
        return len(found)

    update = pe.Trainer.update
    epoch = pe.Trainer.epoch
    order = np.arange(16).reshape(2, 2, 4)
    data = (randn(0, 16, 3),)
    assert warned(update, *data) == 1
    assert warned(functools.partial(update, per_member=True), randn(1, 2, 4, 3)) == 0
    assert warned(epoch, data, order[0]) == warned(epoch, data, order[[0, 0]]) == 1
    assert warned(epoch, data, order) == warned(epoch, data, order, devices=4) == 0
    stateful = {
        "init_fn": lambda key: (jnp.ones(3), jnp.zeros(())),
        "loss_fn": lambda w, n, key, x: ((x @ w)[0] + jax.random.normal(key), n),
        "stateful": True,
    }
    assert warned(update, *data, **stateful) == 0
    assert warned(update, *data, members=1) == 0
    sweep = {"hyper": np.array([False, True]), "loss_fn": lambda w, x, h: h * 1.0}
    assert warned(update, *data, **sweep) == 0


@cases("ours, theirs", ((4, 2), (3, 2)), ((3, 2), (4, 2)), ((1, 4), (4, 4)))
def test_a_state_of_another_trainer_is_refused(ours, theirs):
    _, state = begin(net_trainer(*theirs))
    message = "^a state of another trainer: .* (equal|different) keys"
    refuses_state(state, message, *uses(net_trainer(*ours)))


def keyed_init(key, own):
    return net_init(key)


def keyed_optimizer(own):
    return SGD


def keyed_loss(params, images, labels, own):
    return net_loss(params, images, labels) * jax.random.uniform(own["key"])


def test_a_pickled_trainer_lays_its_hyper_over_the_devices_that_are_there():
    (batch,) = net_batches(1)
    own = {"key": keys_of(5, 2), "unused": np.ones(2)}
    trainer = net_trainer.__wrapped__(
        2,
        loss_fn=keyed_loss,
        init_fn=keyed_init,
        optimizer=keyed_optimizer,
        hyper=own,
        apply_fn=None,
        output=None,
    )
    state = trainer.init(KEY)
    gathered = trainer.gather(state)
    first, second = (member(gathered.params, i) for i in range(2))
    expected = np.array(
        [
            keyed_loss(first, *batch, {"key": own["key"][0]}),
            keyed_loss(second, *batch, {"key": own["key"][1]}),
        ]
    )
    _, losses = trainer.update(state, *batch)
    assert_close(losses, expected)
    packed = pickle.dumps(trainer)
    devices = jax.devices()
    with mock.patch.object(jax, "devices", lambda *platform: devices[:1]):
        loaded = pickle.loads(packed)
        assert loaded.latest is None  # a state is no part of a trainer
        assert trainer.layout.replicas == 4 and loaded.layout == (2, 1, 2, 1)
        _, losses = loaded.update(loaded.scatter(gathered), *batch)
        assert_close(losses, expected)


@cases("devices, shards", (1, 1), (2, 1), (4, 2))
def test_a_trainer_with_other_hyper_runs_the_same_programs(devices, shards):
    seen = []

    def init(key, own, frozen):
        seen.append("init")
        return own["spread"] * jax.random.normal(key, (64, 4))

    def apply_fn(params, images, own, frozen):
        seen.append("apply")
        return images.reshape(len(images), -1) / 255 @ (frozen + params)

    def loss_fn(params, images, labels, *extras):
        return cross_entropy(apply_fn(params, images, *extras), labels).mean()

    def optimizer(own):
        return pe.adamw(own["rate"])

    def results(trainer):
        state = trainer.init(KEY)
        state, losses = trainer.epoch(state, image_data(), orders(3))
        return losses, trainer.predict(state, image_data()[0])

    first, second = (
        {"rate": np.float32([0.1, 0.2, 0.3]) / n, "spread": np.float32([1, 2, 3]) / n}
        for n in (1, 3)
    )
    options = {"members": 3, "devices": devices, "apply_fn": apply_fn, "shards": shards}
    make = functools.partial(pe.make_trainer, init, loss_fn, optimizer, **options)
    frozen = randn(0, 64, 4)
    trainer = make(hyper=first, frozen=frozen)
    results(trainer)
    traced = len(seen)
    other = trainer.with_hyper(second)
    found = results(other)
    assert len(seen) == traced
    assert leaves_equal(found, results(make(hyper=second, frozen=frozen)))
    assert leaves_equal(results(other.with_hyper(first)), results(trainer))
    places = [
        {
            x.data.unsafe_buffer_pointer()
            for x in each._programs.frozen.addressable_shards
        }
        for each in (trainer, other)
    ]
    assert places[0] == places[1]  # nothing of it was copied
    for wrong in {**first, "rate": -first["rate"]}, first["rate"][:2], None:
        with pytest.raises(ValueError):
            trainer.with_hyper(wrong)
    said = said_by(ValueError, net_trainer(3, 2).with_hyper, first)
    assert "give make_trainer a hyper" in said


def test_trainers_and_states_have_one_line_reprs_without_values():
    trainer, state = begin(net_trainer(3, 2))
    shown = f"Trainer(net_init, net_loss, {trainer.layout}, shards=1, at_once=1)"
    assert repr(trainer) == shown
    nameless = dataclasses.replace(trainer, init_fn=functools.partial(net_init))
    assert repr(nameless) == repr(trainer).replace("net_init", "partial")
    with jax.transfer_guard("disallow"):
        shown = repr(state)
    assert shown.startswith("TrainState(params=Net(hidden=Dense(weight=float32[4, 64, ")
    assert shown.endswith("model_state=(), key=key<threefry2x32>[4])")
    trainer.update(state, *net_batches(1)[0])
    assert repr(state) == shown  # though it is consumed
    assert "params=ndarray" not in repr(trainer.gather(trainer.latest))
    assert repr(pe.TrainState(len, 1.0, (), None)).endswith("(), key=None)")


def test_deleting_a_trainer_frees_its_state_and_its_loss():
    loss_fn = functools.partial(net_loss)
    trainer, state = begin(net_trainer.__wrapped__(2, 4, loss_fn))
    gc.disable()
    try:
        held = [weakref.ref(state.params.dense.weight)]  # the epoch consumes it
        state, _ = trainer.epoch(state, image_data(), orders(1)[0])
        trainer.predict(state, image_data()[0])
        held += [weakref.ref(trainer.latest.params.dense.weight), weakref.ref(trainer)]
        held_loss = weakref.ref(loss_fn)
        del trainer, state, loss_fn
        assert [ref() for ref in held] == [None] * 3
        gc.collect()  # JAX's caches refer to a function by cycles
        assert held_loss() is None
    finally:
        gc.enable()


TRAINER_NUMBERS = out_of_range(
    ("members", None, made, (0, 2.0, True)),
    ("devices", None, made, (0, "2")),
    ("chunk", None, made, [0]),
    ("at_once", None, made, (-1, 1.5, True, "2")),
    ("microbatch", None, made, (0, "all")),
    ("shards", None, made, (0, True, 2.0)),
)


@pytest.mark.parametrize("name", TRAINER_NUMBERS)
def test_make_trainer_refuses_numbers_out_of_range(name):
    assert_refuses(*TRAINER_NUMBERS[name])


def making(**options):
    return lambda: made(**options)


def initializing(init_fn=net_init, key=KEY, **options):
    return lambda: made(init_fn=init_fn, **options).init(key)


def own_sizes(key, sizes=(3, 2)):
    return jax.random.normal(key, sizes[:])


def warmed_up(h):
    return optax.sgd(optax.warmup_cosine_decay_schedule(0.0, h["rate"], 20, 200))


TWO_RATES = {"hyper": {"rate": np.ones(2)}}
AS_LAST = "as its last argument"
OF_TWO = r"^devices is 4; 2 processes use all of their 8, and ea"
in_two = mock.patch.object(jax, "process_count", lambda: 2)

OPTION_MISFITS = {
    "9 of 8 devices": (making(devices=9), "9 devices requested, 8 available"),
    "4 of 8 devices in two processes": (in_two(making(devices=4)), OF_TWO),
    "4 given devices in two processes": (
        in_two(making(devices=jax.devices()[:4])),
        OF_TWO,
    ),
    "12 shards on 8 devices": (
        making(shards=12),
        "shards=12 does not divide 8 devices; use a div.*, such as 4",
    ),
    "lower of another method": (
        lambda: made().lower("gather"),
        "is 'gather'; expected 'init', 'update', 'ep",
    ),
    "no devices": (
        making(devices=[]),
        r"devices are \[\]; expected one or more, each once",
    ),
    "one device twice": (
        making(devices=jax.devices()[:1] * 2),
        "devices are .* each once, of one plat",
    ),
    "devices of two platforms": (
        making(devices=[mock.Mock(platform=x) for x in "ab"]),
        "are .*of one platform",
    ),
    "optimizer of hyper without hyper": (
        making(optimizer=lambda h: SGD),
        "optimizer: .*'init'; expected one with init",
    ),
    "init_fn with a slice in place of hyper": (
        initializing(own_sizes, **TWO_RATES),
        f"init_fn takes hyper {AS_LAST}.*slice.*key, hyper",
    ),
    "init_fn without hyper and frozen": (
        initializing(**TWO_RATES, frozen=0),
        "takes hyper and frozen as .*nts: .*but 3 were",
    ),
    "schedule that branches on hyper": (
        initializing(keyed_init, optimizer=warmed_up, **TWO_RATES),
        "traced.*; a schedule th",
    ),
    "init_fn in a list": (
        initializing([net_init]),
        "init_fn is list; expected a function; each architec",
    ),
    "optimizer that takes no hyper": (
        making(hyper=np.ones(2), optimizer=lambda: SGD),
        f"takes hyper {AS_LAST}, ",
    ),
    "optimizer that is a number": (
        making(hyper=np.ones(2), optimizer=3),
        "optimizer: .*'int'.*; expected one with",
    ),
    "hyper of 3 members": (
        making(hyper=np.ones(3)),
        r"\[\(3,\)\]; expected arrays \[K, ...\].* 2 members",
    ),
    "hyper in lists": (
        making(hyper=[0.1, 0.2]),
        r"\[\(\)\]; expected arrays .*; a list holds numbers:",
    ),
    "hyper beyond int32": (
        making(hyper=np.array([1, 2**40 + 5])),
        "hyper: found 1099511627781, beyond int3",
    ),
    "hyper with a rate below 0": (
        making(hyper=np.array([0.1, -1e-4]), optimizer=pe.sgd),
        "rate is -0.0001;",
    ),
}


@pytest.mark.parametrize("name", OPTION_MISFITS)
def test_make_trainer_refuses_options_that_do_not_fit(name):
    assert_refuses(*OPTION_MISFITS[name])


NO_KEYS = {
    "three keys": keys_of(0, 3),
    "three old keys": keys_of(0, 3, "old"),
    "a number as key": 0,
    "three numbers as key": np.zeros(3, "u4"),
}
ONE_KEY = r"^key: .*; expected one random key, such as jax.random.key\(0\)"

MODEL_MISFITS = {
    **{name: (initializing(key=key), ONE_KEY) for name, key in NO_KEYS.items()},
    "a float that is no array": (
        initializing(lambda _: {"act": 1.0}),
        r"returns \w*float\w* at .*act.*array",
    ),
    "no model state": (
        initializing(net_init, stateful=True),
        "init_fn returns Net; with stateful=True",
    ),
    "an integer beyond int32": (
        initializing(lambda _: np.int64(2**40)),
        "init_fn returns: found 1099511627776",
    ),
    "a trace": (
        lambda: jax.eval_shape(made().init, KEY),
        "traced, inside jax.jit .* outside",
    ),
}


@pytest.mark.parametrize("name", MODEL_MISFITS)
def test_init_refuses_bad_keys_and_models_that_are_not_arrays(name):
    assert_refuses(*MODEL_MISFITS[name])


CALLED = r"it is called as loss_fn\(params, batch\[0\]\); stateful=True adds model"


def bare(state):
    return state._replace(key=None)


def test_trainer_refuses_what_does_not_fit_and_keeps_the_state():
    trainer, state = begin(net_trainer(2, D))
    other, others = begin(net_trainer(3, 2))
    three = other.gather(others)
    equal = three._replace(key=three.key[np.array([0, 1, 0])])
    data = image_data()
    ten = [x[:10] for x in data]
    rows = np.zeros((1, 4), int)
    last = np.arange(4)[None] == 3
    blind = net_trainer(2, D, apply_fn=None)
    odd, odds = begin(net_trainer(2, D, optimizer=optax.lbfgs()))
    bent, bents = begin(net_trainer(2, D, loss_fn=lambda p, x, y: p.dense.bias))
    large = np.full(NUM_IMAGES, 2**40)
    own = functools.partial(trainer.update, per_member=True)
    for message, call, *args in [
        ("rows 0 to 240; the data have rows 0 to 239", trainer.epoch, data, 240 * last),
        ("order holds rows -1 to 0; .* 0 to 239", trainer.epoch, data, rows - last),
        ("expected integers, rows of the data", trainer.epoch, data, rows / 2),
        (r"\(2, 0\).* not empty", trainer.epoch, data, np.zeros((2, 0), int)),
        (r"\(4,\); expected .* \[steps, B\], or", trainer.epoch, data, rows[0]),
        (r"\(3, 1, 4\).*with K = 2", trainer.epoch, data, np.stack([rows] * 3)),
        ("^order: .*inhomog.*; expected number", trainer.epoch, data, [[0, 1], [2]]),
        (r"data is ndarray; .*\(data,\) for a s", trainer.epoch, data[0], rows),
        (rf"loss_fn: .*'labels'; {CALLED}", trainer.update, data[0]),
        ("data: found 1099511627776, beyo", trainer.epoch, (data[0], large), rows),
        (r"loss of shapes \[\(4,\)\]; exp", lambda _: bent.update(bents, *data)),
        (".*'value_fn'; .*=loss; docs.*#l-bfgs", lambda _: odd.update(odds, *data)),
        (r"data .*\[\(10,\), \(240,\)\]", trainer.epoch, (data[0], ten[1]), rows),
        ("batch: found 1099511627776, beyond int", trainer.update, data[0], large),
        ("inputs: found 1099511627776, bey", trainer.predict_members, large[:4]),
        ("arguments are traced, inside", jax.jit(trainer.predict), data[0]),
        ("are traced", lambda s: jax.jit(lambda x: trainer.update(s, x, x))(data[1])),
        (r"apply_fn\(params, inputs\) .*\[2, 8, 1\], ", trainer.predict, data[0][0]),
        ("axes of the batch have lengths", trainer.update, data[0][:8], data[1][:4]),
        (r"\[\(8,\)\]; expected this trainer's 4: use", other.update, *data),
        ("takes an apply_fn; give make_trainer one", blind.predict, data[0]),
        (r"inputs .*\[\(0,\)\]; .*, 1 or more", trainer.predict_members, data[0][:0]),
        (r"\(10, 8\)\]; expected .* \[K, B, ...\], with K = 2 and one B", own, *ten),
        (r"\(3,\)\]; expected .* 2 members", lambda _: trainer.scatter(three)),
        ("members 0 and 2 have equal keys", lambda _: other.scatter(equal)),
        (r"no key, .*split\(key, 2\)", lambda s: trainer.predict(bare(s), data[0])),
        ("state is Net; exp", lambda s: trainer.scatter(trainer.gather(s).params)),
    ]:
        refuses_state(state, message, (call, *args))
    if np.dtype(np.longdouble).itemsize > 8:  # it is no other name of float64
        long_doubles = trainer.update, data[0], data[1].astype(np.longdouble)
        refuses_state(state, r"batch: .*; convert it", long_doubles)
    part = state._replace(params=begin(trainer)[1].params)
    trainer.epoch(state, data, rows)  # consumes it
    for call, *args in uses(trainer):
        assert "state is Net; exp" in said_by(ValueError, call, state.params, *args)
        assert "was consumed by an" in said_by(ValueError, call, part, *args)


def test_traced_arguments_are_refused_beside_the_latest_state():
    trainer, state = begin(net_trainer(2, 1))
    images, labels = image_data()
    state, _ = trainer.update(state, images, labels)
    order = np.zeros((1, 4), int)
    for call, x in (
        (lambda x: trainer.update(state, x, labels), images),
        (lambda x: trainer.epoch(state, (x, labels), order), images),
        (lambda x: trainer.epoch(state, (images, labels), x), order),
        (lambda x: trainer.predict(state, x), images),
    ):
        traced = jax.jit(call)
        refuses_state(state, "arguments are traced", (lambda _, f=traced, x=x: f(x),))


def one_process(index, count, local, port, folder):
    """Train as one of `count` processes with `local` devices each; save all results."""
    if count > 1:  # otherwise this runs in pytest's process, which has 8 devices
        jax.config.update("jax_num_cpu_devices", local)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, index)

    def init(key):
        return pe.dense_init(key, 6, 4)

    def loss_fn(params, xs, ys):
        return pe.softmax_cross_entropy(pe.dense(params, xs), ys).mean()

    def noisy_loss(params, model_state, key, xs, ys, rate):
        xs = xs + 0.1 * rate * jax.random.normal(key, xs.shape)
        return loss_fn(params, xs, ys), model_state

    def scaled(params, _, inputs, rate):
        return pe.dense(params, inputs["xs"]), inputs["xs"][:, 0] * rate

    pe._WHOLE = 1
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(48, 6)).astype(np.float32)
    ys = rng.integers(4, size=48)
    found = {}
    on_all = functools.partial(pe.make_trainer, devices=count * local)
    # Replicas, members that each have their own order, and a member in both processes.
    for members, shards in (1, 1), (5, 1), (2, 4):
        trainer = on_all(
            lambda key, _: (init(key), ()),
            noisy_loss,
            pe.sgd,
            members=members,
            apply_fn=scaled,
            output=None,
            hyper=np.linspace(0.1, 0.5, members),
            stateful=True,
            chunk=5,
            shards=shards,
        )
        order = pe.epoch_order(48, 12, members=members if members > 1 else None)
        state = trainer.init(jax.random.key(1))
        state, found[f"{members} losses"] = trainer.epoch(state, (xs, ys), order)
        if members == 1:
            text = trainer.lower("update", xs, ys).as_text()
            found["1 program"] = np.frombuffer(text.encode(), np.uint8)
        assert state.params.weight.is_fully_addressable == (count == 1)
        gathered = trainer.gather(state)
        again = trainer.gather(trainer.scatter(gathered))
        assert jax.tree.all(jax.tree.map(np.array_equal, gathered[:3], again[:3]))
        found[f"{members} params"] = gathered.params.weight
        for name in "predict", "predict_members":
            logits, rates = getattr(trainer, name)(state, {"xs": xs})
            found[f"{members} {name}"] = np.append(logits, rates[..., None], axis=-1)

    optimizer = pe.sgd(0.1)
    plain = on_all(lambda _: init(jax.random.key(0)), loss_fn, optimizer, members=2)
    with pytest.warns(UserWarning, match="equal weights"):
        _, found["losses"] = plain.update(plain.init(jax.random.key(1)), xs, ys)

    # A fit that stops in its second epoch and goes on; process 0 alone has the folder.
    fitting = on_all(init, loss_fn, pe.adam(0.1), members=5)
    how = dict(key=jax.random.key(4), epochs=3, batch_size=12)
    how["folder"] = f"{folder}/fit_{count}" if index == 0 else f"{folder}/none_{index}"
    pe.fit(fitting, (xs, ys), **how, on_segment=lambda segment: segment.step >= 6)
    fitted = pe.fit(fitting, (xs, ys), **how)
    found["5 fit"] = fitting.gather(fitted.state).params.weight
    found["5 fit losses"] = fitted.losses
    if index == 0:
        last = f"{how['folder']}/checkpoint_00000012.safetensors"
        found["5 checkpoint"] = np.fromfile(last, np.uint8)
    assert os.path.exists(how["folder"]) == (index == 0)

    # A state of a trainer whose members have other shards.
    theirs = on_all(init, loss_fn, optimizer, members=4)
    ours = on_all(init, loss_fn, optimizer, members=4, shards=2)
    state, _ = ours.update(theirs.init(jax.random.key(2)), xs, ys)
    found["into two shards"] = ours.gather(state).params.weight

    update = pe.make_sync_update(loss_fn, optimizer)
    one = pe.train_state(init(jax.random.key(0)), optimizer)
    state = pe.replicate(one, local)
    mine = np.split(np.arange(48), count)[index]
    for _ in range(3):
        state, _ = update(state, *pe.split((xs[mine], ys[mine]), local))
    found["sync update"] = np.asarray(pe.unreplicate(state.params).weight)
    keys = jax.random.split(jax.random.key(5), local)  # equal in every process
    state = pe.replicate(one, local)._replace(key=keys)
    refused = pytest.raises(ValueError, match=f"members 0 and {local} have equal keys")
    with refused if count > 1 else contextlib.nullcontext():
        other = pe.make_ensemble_update(loss_fn, optimizer)
        other(state, *pe.replicate((xs, ys), local))
    np.savez(f"{folder}/{count} {index}.npz", **found)
    if count == 1:
        return

    # Processes that differ do not gather; process 1 has another value each time.
    def refuse(what, call, *args, **options):
        said = f"process 1 differs from process 0 in {what}; start all"
        with pytest.raises(ValueError, match=said):
            call(*args, **options)

    ours = on_all(init, loss_fn, optimizer, members=4)
    members = ours.gather(ours.init(jax.random.key(0)))
    other = jax.random.key(index)
    refuse("keys", ours.init, other)
    refuse("keys", ours.scatter, members._replace(key=jax.random.split(other, 4)))
    how = dict(key=jax.random.key(0), epochs=1, batch_size=12)
    changes = {
        "epochs": 1 + index,
        "save_every": 1.0 + index,
        "patience": 1 + index,
        "folder": [folder, None][index],
        "validate": [None, ours.predict][index],
        "settings": {"rate": index},
    }
    for name, value in changes.items():
        refuse(name, pe.fit, ours, (xs, ys), **(how | {name: value}))
    how["folder"] = f"{folder}/of_other_steps"
    with mock.patch.object(pe._Fit, "step", 4 + index):
        refuse("step", pe.fit, ours, (xs, ys), **how)
    ours = on_all(
        lambda key, rate: init(key),
        lambda params, xs, ys, rate: loss_fn(params, xs, ys),
        optimizer,
        members=4,
        hyper=np.full(4, 0.1 + index),
    )
    refuse("hyper", ours.init, jax.random.key(0))
    os.environ["SLURM_STEP_ID"] = str(index)
    refuse("hyper, SLURM_STEP_ID", ours.init, jax.random.key(0))


@linux
def test_two_processes_equal_one_with_as_many_devices(tmp_path):
    code = "import contextlib, functools, os, jax, pytest, numpy as np\n"
    code += "from unittest import mock\n"
    code += f"import pjax_ensemble as pe\n{inspect.getsource(one_process)}"
    port = free_port()
    calls = [f"one_process({i}, 2, 2, {port}, {str(tmp_path)!r})" for i in range(2)]
    runs = [start_python(code + call) for call in calls]
    with mock.patch.object(pe, "_WHOLE", 1):
        one_process(0, 1, 4, port, tmp_path)
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
    one, first, second = map(dict, map(np.load, sorted(tmp_path.glob("*.npz"))))
    assert_array_equal(first.pop("5 checkpoint"), one["5 checkpoint"])
    for name, value in first.items():
        assert_array_equal(value, second[name], err_msg=name)
        exact = name[0] == "5" and name != "5 predict"  # no replicas
        assert_close(value, one[name], 0 if exact else 1e-5)


# ---------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------


@cases("make", jax.random.key, jax.random.PRNGKey)
def test_choose_members_takes_each_member_with_its_key_from_either_state(make):
    trainer = net_trainer(4, 2, **NOISY)
    old, new = (trainer.gather(trainer.init(make(seed))) for seed in (3, 4))
    before = jax.tree.map(np.copy, old._replace(key=None))
    new = jax.tree.map(lambda x: x + 1, new._replace(key=()))._replace(key=new.key)
    better = np.array([False, True, True, False])
    chosen = pe.choose_members(better, new, old)
    for k in range(4):
        assert leaves_equal(member(chosen, k), member(new if better[k] else old, k))
    assert chosen.key.dtype == old.key.dtype
    for leaf in jax.tree.leaves(chosen._replace(key=None)):
        leaf[:] = 0  # does not change the old state
    assert leaves_equal(old._replace(key=None), before)
    trainer.scatter(pe.choose_members([True] * 4, new, old))
    other = new._replace(params=jax.tree.map(lambda x: x[:2], new.params))
    for args, message in (
        (([1, 0, 0, 1], new, old), r"better is int64\[4\]; expected bool\[K\]"),
        (([[True]] * 4, new, old), r"better is bool\[4, 1\]"),
        (([True], new, old), r"states and better have lengths \[\(1,\), \(4,\)\]"),
        ((True, new, old), r"lengths \[\(\), \(4,\)\]"),
        ((better, other, old), r"new: .*'.params.*float32\[2, .*; expected float32\[4"),
    ):
        assert re.search(message, said_by(ValueError, pe.choose_members, *args))


@cases("bootstrap", False, True)
def test_each_member_has_its_own_order_and_with_bootstrap_its_own_resample(bootstrap):
    draw = functools.partial(pe.epoch_order, seed=5, bootstrap=bootstrap)
    first, second = (draw(5000, 50, epoch=epoch, members=3) for epoch in (0, 1))
    assert first.shape == draw(5049, 50, members=3).shape == (3, 100, 50)
    assert first.dtype == np.int32
    assert_array_equal(draw(5000, 50), first[0])
    assert_array_equal(draw(5000, 50, members=1), first[:1])
    assert pe.epoch_order(9, 9, seed=2**32 - 1).shape == (1, 9)
    for a, b in itertools.combinations([*first, *second], 2):
        assert not np.array_equal(a, b)
    images, later = (np.sort(orders.reshape(3, -1)) for orders in (first, second))
    assert_array_equal(images, later)
    few, other = (np.sort(draw(2, 1, members=99, seed=s), axis=1) for s in (5, 6))
    assert_allclose(few.mean(), 1 / 2, atol=0.1)  # both rows are equally likely
    assert np.array_equal(few, other) != bootstrap
    if not bootstrap:
        assert_array_equal(images, [range(5000)] * 3)
        rows = np.random.default_rng([5, 1, 2]).permutation(5000)  # in every release
        assert_array_equal(second[2].ravel(), rows)
        return
    counts = np.array([np.bincount(rows, minlength=5000) for rows in images])
    # Drawn with replacement.
    assert_allclose(np.mean(counts > 0, axis=1), 1 - np.exp(-1), atol=0.02)
    assert np.abs(np.corrcoef(counts) - np.eye(3)).max() < 0.05


BATCH_NUMBERS = out_of_range(
    ("batch_size", None, functools.partial(pe.epoch_order, 9), (0, 2.0)),
    (
        "num_examples",
        None,
        functools.partial(pe.epoch_order, batch_size=1),
        (-1, np.ones(9)),
    ),
    ("members", None, functools.partial(pe.epoch_order, 9, 3), (0, True)),
    ("size", None, functools.partial(pe.prefetch, []), [0]),
)


@pytest.mark.parametrize("name", BATCH_NUMBERS)
def test_epoch_order_and_prefetch_refuse_numbers_out_of_range(name):
    assert_refuses(*BATCH_NUMBERS[name])


ORDER_MISFITS = {
    "batch above the examples": (
        lambda: pe.epoch_order(40, 50),
        "batch_size=50; expected at most num_examples=40",
    ),
    "seed below 0": (lambda: pe.epoch_order(9, 3, seed=-1), "^seed=-1, "),
    "seed between integers": (lambda: pe.epoch_order(9, 3, seed=0.5), "^seed=0.5, "),
    "epoch above 32 bits": (
        lambda: pe.epoch_order(9, 3, epoch=2**32),
        "^seed=0, epoch=4294967296; expected",
    ),
}


@pytest.mark.parametrize("name", ORDER_MISFITS)
def test_epoch_order_refuses_numbers_that_do_not_fit(name):
    assert_refuses(*ORDER_MISFITS[name])


def ten(made, do):
    """Yield 0 to 9; before each, note the thread in `made` and call do(i)."""
    for i in range(10):
        made.append(threading.current_thread())
        do(i)
        yield i


def test_prefetch_works_ahead_by_exactly_its_size_and_yields_everything():
    made = []
    third = threading.Event()
    ahead = pe.prefetch(ten(made, lambda i: i == 2 and third.set()), 2)
    assert not made  # the loop has not begun
    found = [next(ahead)]
    assert third.wait(10)  # it makes 1 and 2 before the loop needs them
    time.sleep(0.05)
    assert len(made) == 3 and threading.main_thread() not in made
    found += ahead
    assert found == list(range(10))
    assert list(pe.prefetch([])) == []


def test_prefetch_ends_its_thread_when_the_loop_is_left():
    made = []
    go_on = threading.Event()
    ahead = pe.prefetch(ten(made, lambda i: i and go_on.wait(10)), 5)
    next(ahead)
    ahead.close()  # while the thread makes the second
    go_on.set()
    made[0].join(10)
    assert not made[0].is_alive() and len(made) <= 2


def test_a_process_ends_with_the_item_that_prefetch_makes_or_if_none_comes():
    code = """
import queue, time, pjax_ensemble as pe
pe._LAST_ITEM = 3
def slow():
    yield 1
    time.sleep(1)  # as in XLA, which would end the process
    yield print("made")
items = queue.Queue()
items.put(1)
for batches in slow(), iter(items.get, None):
    for item in pe.prefetch(batches):
        break
print("left")
"""
    assert run_python(code) == "left\nmade\n"


class NoFile(OSError):
    def __len__(self):  # so the error is false
        return 0


def test_prefetch_raises_its_sources_error_in_order():
    def fail(i):
        if i == 2:
            raise NoFile("no such file")

    ahead = pe.prefetch(ten([], fail), 5)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert "no such file" in said_by(NoFile, next, ahead)


# ---------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------


A = np.ones((2, 3), np.float32)

KINDS_OF_KEYS = "key<threefry2x32>", "key<rbg>"


def assert_same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        y = y.astype(y.dtype.newbyteorder("<")) if isinstance(y, np.ndarray) else y
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and as_bytes(x) == as_bytes(y)
        assert isinstance(x, jax.Array) or x.flags.aligned


LEAVES = {
    "float32": np.float32([[1.5, -0.0], [np.nan, np.inf]]),
    "empty": np.zeros((0, 3), np.int16),
    "empty float8": np.zeros((2, 0), jnp.float8_e5m2),
    "complex64": np.complex64([1 + 2j]),
    "complex128": np.array(1 + 2j),
    "complex128, big-endian": np.array([1 + 2j], ">c16"),
    "float64, big-endian": np.arange(3, dtype=">f8"),
    "number": np.int64(5),
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "column of float8": np.ones((3, 4), jnp.float8_e5m2)[:, 0],
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
}

LEAVES |= {f"native {code}": np.arange(4, dtype=code) for code in "efdbhiqBHIQ"}

LEAVES |= {name: jnp.arange(-8, 8).astype(name) for name in SMALL_TYPES}

EVERYTHING = {
    "__metadata__": (LEAVES, A),
    "a".center(250, "a"): [LEAVES, None],
    "": [],
    "é'\"\n": A,
}


@pytest.mark.parametrize("tree", [EVERYTHING, [], A], ids=["everything", "none", "one"])
def test_a_tree_comes_back_bit_by_bit_and_gives_the_same_file(tmp_path, tree):
    path, again = (tmp_path / name for name in "xy")
    pe.save(path, tree)
    for like in (tree, shapes_of(tree)):
        assert_same_leaves(pe.load(path, like), tree)
    found = pe.load(path)
    leaves = jax.tree.leaves_with_path(tree)
    expected = {jax.tree_util.keystr(place): leaf for place, leaf in leaves}
    assert_same_leaves(found, expected)
    types = safetensors.safe_open(path, "np").metadata()
    assert types.pop("format") == "2"
    digits = types.pop("sha256")
    rest = path.read_bytes().partition(digits.encode())[2]
    assert hashlib.sha256(rest).hexdigest() == digits
    theirs = safetensors.numpy.load_file(path)
    assert theirs.keys() == found.keys() >= types.keys()
    for name, x in theirs.items():
        assert as_bytes(x) == as_bytes(found[name])
        on_host = isinstance(found[name], np.ndarray)  # others are keys
        kinds = [found[name].dtype.name] if on_host else KINDS_OF_KEYS
        assert types.get(name, x.dtype.name) in kinds
    assert path.read_bytes()[0] % 8 == 0  # the header's length, so arrays are aligned
    pe.save(again, pe.load(path, tree))
    assert again.read_bytes() == path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x"


def test_tensors_of_other_libraries_are_taken_and_saved_as_arrays(path):
    tensor = Labelled(A)
    assert pe.split(tensor, 2).shape == (2, 1, 3) and pe.merge(tensor).shape == (6,)
    pe.save(path, [tensor])
    assert_same_leaves(pe.load(path, [tensor]), [A])


K = jax.random.key(1)


@cases(
    "like, message",
    ({"b": A, "k": K}, "leaf '['b']' is absent; expected float32[2, 3]"),
    ({"a": A.T, "k": K}, "leaf '['a']' is float32[2, 3]; expected float32[3, 2]"),
    ({"a": A.astype(int), "k": K}, "'['a']' is float32[2, 3]; expected int64[2"),
    ({"a": A, "k": jax.random.key(1, impl="rbg")}, "2>[]; expected key<rbg>[]"),
    ({"a": A, "k": jax.random.key_data(K)}, "2>[]; expected uint32[2]"),
)
def test_load_names_the_leaf_that_does_not_match(path, like, message):
    pe.save(path, {"a": A, "k": K})
    said = said_by(ValueError, pe.load, path, like)
    assert said.startswith(f"{path}: ") and message in said and "\n" not in said


def test_a_state_saved_without_gather_can_still_be_loaded(path):
    trainer, state = begin(net_trainer(2, 4, **NOISY))
    said = said_by(ValueError, pe.save, path, trainer.like())
    assert said.endswith("weight' is a form, without numbers; expected an array")
    pe.save(path, state)
    said = said_by(ValueError, pe.load, path, trainer.like())
    assert "2>[4]; expected key<threefry2x32>[2]; it was saved without gather" in said
    found = trainer.gather(pe.load(path, state))
    assert leaves_equal(found, trainer.gather(state))
    pe.save(path, found)
    three = net_trainer(3, 3, **NOISY).like()
    raw = trainer.like(jax.random.PRNGKey(0))
    bare = trainer.like()._replace(opt_state=())
    for like, why in (
        (three, "it has 2 members, and this trainer has 3"),
        (raw, "expected uint32[2, 2]; give trainer.like a key of the kind that the f"),
        (bare, "it is of another network or optimizer"),
        (member(found, 0), "a trainer's members have keys [K], and a single model has"),
    ):
        assert f"; {why}" in said_by(ValueError, pe.load, path, like)
    like = {"best": trainer.like()}
    pe.save(path, {"best": found, "epoch": 3})
    assert leaves_equal(pe.load(path, like), found)
    like["best"] = like["best"]._replace(opt_state=())
    assert "expected absent" in said_by(ValueError, pe.load, path, like)


def with_digest(content):
    """Give a file's content the digest that fits."""
    start = content.index(b'sha256":"') + 9
    rest = content[start + 64 :]
    return content[:start] + hashlib.sha256(rest).hexdigest().encode() + rest


def changed(content, old, new):
    """Write something else in a file's header; its length and its digest fit."""
    end = 8 + int.from_bytes(content[:8], "little")
    assert content[8:end].count(old) == 1
    text = content[8:end].replace(old, new)
    return with_digest(len(text).to_bytes(8, "little") + text + content[end:])


FORMATS = Path(__file__).parent / "formats"


@cases("number", 1, 2)
def test_files_of_all_formats_are_read(number, tmp_path):
    folder = FORMATS / str(number)
    pe.save(tmp_path / "new", EVERYTHING)
    assert_same_leaves(
        pe.load(folder / "everything.safetensors", EVERYTHING), EVERYTHING
    )
    assert pe.load(folder / "nothing.safetensors") == {}
    names = pe.load(folder / "everything.safetensors").keys()
    assert names == pe.load(tmp_path / "new").keys()


@cases("like", None, {"a": A})
def test_load_says_whether_a_file_is_damaged_or_foreign(path, like):
    pe.save(path, {"a": A})
    whole = path.read_bytes()
    foreign = safetensors.numpy.save({"['a']": A})
    wrong = "its header is not one that save writes: "
    for content, message in (
        (whole[:-1], "damaged or cut short"),
        (foreign, "has no digest .* whose files safetensors.numpy.load_file reads"),
        (with_digest(whole + b"more"), wrong + "sizes differ"),
        (with_digest(whole[:-1]), wrong + "leaf"),
        (changed(whole, b"[0,24]", b"[4,28]"), wrong + "leaf"),
        (changed(whole, b"[0,24]", b"[0,20]"), wrong + "leaf"),
        (changed(whole, b"[2,3]", b"[2,4]"), wrong + "leaf"),
        (changed(whole, b"[2,3]", b"[-2,-3]"), wrong + "leaf"),
        (changed(whole, b'"F32"', b'"F33"'), "'F33'"),
        (changed(whole, b'"shape"', b'"dtype"'), wrong + "a name comes twice"),
        (changed(whole, b'"2"', b'"2","b":"int4"'), wrong + "sizes differ"),
        (
            changed(whole, b'"2"', b'"3"'),
            "its format is 3, and .* up to 2; take a newer",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
            pe.load(path, like)


class Attached:  # like a PyTorch tensor that requires a gradient
    shape = (NUM_IMAGES,)

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("requires grad")


class Paths(tuple):
    """A tree whose leaves have the paths that it holds."""


def as_paths(paths):
    return [(path, A) for path in paths], None


jax.tree_util.register_pytree_with_keys(Paths, as_paths, lambda *_: None)


@cases(
    "tree, message",
    ("text", "leaf '': found str of <U4; expected numbers"),
    ({"a": object()}, r"leaf '\['a'\]': found object of object; expected numbers"),
    ({"a": np.zeros(2, "M8[s]")}, r"found ndarray of datetime64\[s\]"),
    ({"a": np.rec.array([(1, 2.0)])}, "'a'.*: found recarray of .*; expected numbers"),
    ({"a": np.array(["b"], "T")}, "'a'.*: found ndarray of .*; expected numbers"),
    ({"a": Attached()}, r"leaf '\['a'\]': requires grad; expected numbers"),
    ({"a": np.ma.masked_array([1, 2], [0, 1])}, r"'\['a'\]': found MaskedArray of int"),
    (Paths("aa"), "share a path"),
    (Paths(["__metadata__"]), "share a path"),
    (Paths(["sha256"]), "share a path"),
    (Paths(["format"]), "share a path"),
)
def test_save_refuses_leaves_that_load_could_not_restore(path, tree, message):
    assert re.search(message, said_by(ValueError, pe.save, path, tree))
    assert not list(path.parent.iterdir())
    pe.save(path, A)
    assert re.search(message, said_by(ValueError, pe.load, path, tree))


def test_a_file_is_replaced_when_it_is_whole_and_not_before(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    path.write_bytes(b"old")
    with pe.replace_file("x") as file:
        file.write(b"new")
        assert path.read_bytes() == b"old" and len(list(path.parent.iterdir())) == 2
    with pytest.raises(KeyError), pe.replace_file(path) as file:
        file.write(b"newer")
        raise KeyError
    with pytest.raises(FileNotFoundError, match="'other'"), pe.replace_file(path):
        Path("other").read_bytes()
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


@posix
def test_no_half_file_stays_in_a_folder_that_gets_another_name(path):
    renamed = path.parent.with_name("renamed")
    with pytest.raises(FileNotFoundError), pe.replace_file(path) as file:
        file.write(b"new")
        path.parent.rename(renamed)
    assert not list(renamed.iterdir())


@posix
def test_only_regular_files_are_replaced_and_loaded(path):
    path.symlink_to(path.with_name("other"))
    assert said_by(ValueError, pe.load, path) == f"{path}: not a regular file"
    said = f"{path} is not a regular file; choose another name"
    assert said_by(ValueError, pe.save, path, A) == said and path.is_symlink()


@posix
def test_a_file_is_synced_before_its_rename_and_its_folder_after(path, monkeypatch):
    calls = []

    def note(name, what, *_):
        info = os.stat(what)  # a path or an open file
        calls.append((name, stat.S_ISDIR(info.st_mode) or info.st_size))

    for name in ("fsync", "replace"):
        hook(monkeypatch, os, name, functools.partial(note, name))
    with pe.replace_file(path) as file:
        file.write(b"new")
    assert calls == [("fsync", 3), ("replace", 3), ("fsync", True)]


@posix
@cases("letter, length", ("x", 255), ("é", 127), (b"x", 1))
def test_a_file_may_have_any_name_and_keeps_its_permissions(tmp_path, letter, length):
    path = tmp_path / os.fsdecode(letter * length)
    modes = []
    umask = os.umask(0o027)
    try:
        for mode in (None, 0o600, 0o664):
            if mode:
                path.chmod(mode)
            with pe.replace_file(os.fsencode(path) if letter == b"x" else path):
                (temporary,) = {*tmp_path.iterdir()} - {path}
                assert re.fullmatch(r"\.[xé]{1,60}\.\w{8}\.tmp", temporary.name)
                modes.append(temporary.stat().st_mode & 0o777)  # before it is written
            modes.append(path.stat().st_mode & 0o777)
    finally:
        os.umask(umask)
    assert modes == [0o640, 0o640, 0o600, 0o600, 0o664, 0o664]


# ---------------------------------------------------------------------------------
# Fit
# ---------------------------------------------------------------------------------


EPOCHS = dict(key=jax.random.key(7), epochs=3, batch_size=48)  # 5 steps each


def scores_of(trainer):
    """Return a function that validates: each member's error on the first images."""
    images, labels = image_data()

    def validate(state):
        probs = trainer.predict_members(state, images[:60])
        return np.mean(probs.argmax(axis=-1) != labels[:60], axis=1)

    return validate


def newest(folder, but=()):
    found = folder.glob("checkpoint_????????.safetensors")
    return max(path for path in found if path.name not in but)


def stopping_at(*counts):
    """Return a callback that stops at some of its calls."""
    calls = itertools.count(1)
    return lambda _: next(calls) in counts


@cases("options", {}, NOISY)
def test_fit_equals_a_loop_by_hand(options):
    trainer = net_trainer(3, 2, **options)
    validate = scores_of(trainer)
    seen = []
    fitted = pe.fit(
        trainer, image_data(), **EPOCHS, validate=validate, on_epoch=seen.append
    )
    state = trainer.init(EPOCHS["key"])
    best, lowest, losses = trainer.gather(state), np.full(3, np.inf), []
    for epoch in range(3):
        order = pe.epoch_order(NUM_IMAGES, 48, members=3, seed=7, epoch=epoch)
        state, found = trainer.epoch(state, image_data(), order)
        scores = validate(state)
        best = pe.choose_members(scores < lowest, trainer.gather(state), best)
        lowest = np.minimum(scores, lowest)
        losses.append(found)
        assert_array_equal(fitted.validation[:, epoch], scores)
        assert (
            seen[epoch].losses.shape == seen[epoch].validation.shape == (3, epoch + 1)
        )
    assert leaves_equal(trainer.gather(fitted.state), trainer.gather(state))
    assert leaves_equal(fitted.best, best)
    assert_close(fitted.losses.T, np.mean(losses, axis=2))
    assert_array_equal(fitted.losses, seen[-1].losses)
    plain = pe.fit(trainer, image_data(), **EPOCHS)
    assert plain.best is None and plain.validation.shape == (3, 0)
    assert leaves_equal(trainer.gather(plain.state), trainer.gather(state))


def test_fit_passes_the_aux_of_a_segments_steps():
    def loss_fn(params, images, labels):
        loss = net_loss(params, images, labels)
        return loss, {"twice": 2 * loss}

    segments = []
    trainer = net_trainer(2, 1, loss_fn=loss_fn, has_aux=True)
    fitted = pe.fit(trainer, image_data(), **EPOCHS, on_segment=segments.append)
    losses, twice = (
        np.concatenate(leaves, axis=1)
        for leaves in zip(*((x.losses, x.aux["twice"]) for x in segments[1:]))
    )
    assert losses.shape == (2, 15) and segments[0].aux is None
    assert_close(twice, 2 * losses)
    assert_close(fitted.losses, losses.reshape(2, 3, 5).mean(axis=2))


@cases("validates", False, True)
@cases("options", {}, {"save_every": 0.4, "keep": 2}, {"save_every": 1.5})
def test_fit_ends_in_the_same_bytes_wherever_it_stopped(options, validates, tmp_path):
    trainers = [net_trainer(3, devices, **NOISY) for devices in (2, 1)]

    def fit(number, folder, **callbacks):
        trainer = trainers[number % 2]
        how = {"validate": scores_of(trainer)} if validates else {}
        how |= EPOCHS | options | callbacks
        return pe.fit(trainer, image_data(), folder=folder, **how)

    seen = []

    def see(fitted):
        seen.append(newest(tmp_path / "whole").name)

    whole = fit(0, tmp_path / "whole", on_epoch=see)
    assert seen[-1:] == step_names(15)  # before the last validation too
    for name, last in ("on_segment", 9), ("on_epoch", 3):
        for at in range(1, last + 1):
            folder = tmp_path / f"{name} {at}"
            first = fit(0, folder, **{name: stopping_at(at)})
            assert name == "on_segment" or first.losses.shape == (3, at)
            ended = []
            found = fit(1, folder, on_epoch=ended.append)
            # An epoch after which a callback stopped is validated and told again.
            epochs = [each.losses.shape[1] for each in ended]
            assert name == "on_segment" or epochs == list(range(at, 4))
            assert leaves_equal(found[1:], whole[1:])
            assert newest(folder).name == newest(tmp_path / "whole").name
            assert (
                newest(folder).read_bytes() == newest(tmp_path / "whole").read_bytes()
            )
    again = fit(1, folder, on_segment=lambda segment: segment.losses.size and 1 / 0)
    assert leaves_equal(again[1:], whole[1:])  # no step is taken
    steps = [int(path.stem[-8:]) for path in sorted(folder.iterdir())]
    assert (
        steps
        == {None: [5, 10, 15], 0.4: [14, 15], 1.5: [0, 8, 15]}[
            options.get("save_every")
        ]
    )
    assert leaves_equal(
        pe.load(newest(folder), trainers[0].like()).params,
        whole_params(trainers[0], whole),
    )


def whole_params(trainer, fitted):
    return trainer.gather(fitted.state).params


def test_fit_takes_as_many_steps_at_a_time_as_take_a_second(monkeypatch):
    trainer = net_trainer(2, 1)
    order = np.random.default_rng(0).integers(NUM_IMAGES, size=(600, 2))
    calls = []

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()

    def epoch(trainer, state, data, order, call=pe.Trainer.epoch):
        calls.append(len(order))
        first = 5 if len(calls) == 1 else 0  # compiles
        clock.now += first + len(order) / (3000 if len(calls) < 12 else 100)
        return call(trainer, state, data, order)

    monkeypatch.setattr(pe, "time", clock)
    monkeypatch.setattr(pe.Trainer, "epoch", epoch)
    seen = []
    how = dict(key=KEY, epochs=2, order=lambda epoch: order, on_segment=seen.append)
    pe.fit(trainer, image_data(), **how)
    assert calls[:10] == [1, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert max(calls[13:]) == 100
    assert sum(calls) == seen[-1].step == 1200
    assert [each.losses.shape[1] for each in seen] == [0, *calls]


def diverging(params, images, labels, own):
    return net_loss(params, images, labels) * own


DIVERGING = dict(
    init_fn=lambda key, own: net_init(key),
    loss_fn=diverging,
    apply_fn=lambda params, images, own: net(params, images),
)


def step_names(*steps):
    return [f"checkpoint_{step:08d}.safetensors" for step in steps]


def test_fit_goes_on_without_members_that_are_not_finite(tmp_path):
    hyper = np.float32([1, np.inf, 1])
    trainer = net_trainer.__wrapped__(3, 2, hyper=hyper, **DIVERGING)
    how = EPOCHS | dict(validate=scores_of(trainer), folder=tmp_path)
    with pytest.warns(UserWarning, match="members") as caught:
        fitted = pe.fit(trainer, image_data(), **how)
    texts = [str(each.message) for each in caught]
    assert texts == ["members [1] are not finite after epoch 1"]
    assert np.isfinite(fitted.losses).all(axis=1).tolist() == [True, False, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(fitted.best[0]))
    none = trainer.with_hyper(np.float32([np.inf, np.nan, np.inf]))
    said = said_by(FloatingPointError, pe.fit, none, image_data(), **EPOCHS)
    assert said == "no model is finite after step 1; lower the learning rate"
    how = EPOCHS | dict(folder=tmp_path / "none")
    said = said_by(FloatingPointError, pe.fit, none, image_data(), **how)
    assert said.endswith("learning rate (the checkpoint of step 0 is good)")
    assert sorted(os.listdir(tmp_path / "none")) == step_names(0)


def test_fit_that_skips_steps_keeps_its_last_good_checkpoint(tmp_path):
    hyper = np.float32([np.inf, np.inf])
    options = DIVERGING | dict(hyper=hyper, skip_nonfinite=True)
    trainer = net_trainer.__wrapped__(2, 1, **options)

    def fit(epochs):
        how = EPOCHS | dict(epochs=epochs, folder=tmp_path, keep=1)
        losses = pe.fit(trainer, image_data(), **how).losses
        assert losses.shape == (2, epochs) and not np.isfinite(losses).any()
        return sorted(os.listdir(tmp_path))

    assert fit(3) == step_names(0, 15)
    assert fit(3) == step_names(0, 15)  # of a resumed one, none is known to be good
    assert fit(5) == step_names(0, 15, 20, 25)


def test_fit_stops_after_epochs_without_a_better_member(tmp_path):
    trainer = net_trainer(2, 1)
    scores = np.array([[3, 2, 4, 1, 5, 1, 1, 0], [9, 9, 9, 9, 9, np.nan, 9, 9.0]])

    def fit(patience, epochs=8, folder=tmp_path / "a", given=scores):
        count = itertools.count(len(os.listdir(folder)) and done(folder))
        how = EPOCHS | dict(epochs=epochs, patience=patience, folder=folder, keep=99)
        how["validate"] = lambda state: given[:, next(count)]
        return pe.fit(trainer, image_data(), **how)

    def done(folder):
        return pe.load(newest(folder))[".validation"].shape[1]

    for name in "ab":
        (tmp_path / name).mkdir()
    assert fit(1).losses.shape == (2, 3)  # the third is worse than the second
    assert fit(2).losses.shape == (2, 6)
    whole = fit(2, folder=tmp_path / "b")
    found = fit(2)
    assert_array_equal(found.validation, np.fmin(scores[:, :6], np.inf))
    assert leaves_equal(found[1:], whole[1:])
    assert newest(tmp_path / "a").read_bytes() == newest(tmp_path / "b").read_bytes()
    said = said_by(ValueError, fit, 1)
    assert said.endswith("epochs=8 or patience=1 allow") and "waited 1 for" in said
    assert "has 6 epochs" in said_by(ValueError, fit, 2, epochs=5)
    assert fit(9).losses.shape == (2, 8)
    said = said_by(ValueError, fit, 9, 9, tmp_path / "b", scores[:1])
    assert said == "validate gave (1,); expected losses [K]"


def test_fit_skips_damaged_checkpoints_and_refuses_other_settings(tmp_path):
    trainer = net_trainer(2, 1)
    settings = {"kind": Path("a"), "no": np.nan, "b": np.ones(2), "d": {"y": 1, "x": 2}}

    def fit(folder=tmp_path / "a", **options):
        how = EPOCHS | dict(settings=settings) | options
        return pe.fit(trainer, image_data(), folder=folder, **how)

    whole = fit()
    content = newest(tmp_path / "a").read_bytes()
    later = tmp_path / "a" / "checkpoint_00000020.safetensors"
    later.write_bytes(content)
    newest_one = tmp_path / "a" / "checkpoint_00000015.safetensors"
    newest_one.write_bytes(content[:-1])
    with pytest.warns(UserWarning) as warned:
        found = fit()
    texts = [str(each.message) for each in warned]
    assert texts[0] == f"skipped {later}: holds step 15, not step 20"
    assert texts[1].startswith(f"skipped {newest_one}: damaged or cut short")
    assert leaves_equal(found[1:], whole[1:])
    assert newest_one.read_bytes() == content and later.exists()
    later.unlink()
    for change, said in (
        ({"settings": settings | {"kind": "b"}}, 'has kind "a", not "b"'),
        ({"settings": settings | {"no": 0}}, "has no NaN, not 0"),
        ({"settings": settings | {"more": 1}}, "has more None, not 1"),
        ({"settings": {}}, 'has kind "a", not None'),
        ({"key": jax.random.key(8)}, "has key [0, 7], not [0, 8]"),
        ({"batch_size": 24}, "has steps of an epoch 5, not 10"),
        ({"epochs": 2}, "has 3 epochs"),
        ({"validate": scores_of(trainer)}, "leaf '.best"),
    ):
        message = said_by(ValueError, functools.partial(fit, **change))
        assert f"the checkpoint of step 15 in {tmp_path / 'a'}" in message
        assert said in message and "\n" not in message
    assert newest_one.read_bytes() == content
    fit(settings=settings | {"d": {"x": 2, "y": 1}})  # the same
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped .*has no digest"):
        said = said_by(ValueError, fit)
    assert said == f"none of 3 checkpoints in {tmp_path / 'a'} is valid"


def test_fit_removes_older_checkpoints_once_the_newest_has_its_name(
    tmp_path, monkeypatch
):
    others = ["checkpoint_9.safetensors", "checkpoint_copy.safetensors"]
    later = step_names(99)  # a damaged checkpoint
    for name in others + later:
        (tmp_path / name).write_bytes(b"")
    trainer = net_trainer(2, 1)
    state = trainer.gather(trainer.init(EPOCHS["key"]))
    pe.save(tmp_path / step_names(5)[0], state)
    seen = []
    unlink = os.unlink

    def removing(path, **where):
        if not path.endswith(".tmp"):
            seen.append((os.path.basename(path), newest(tmp_path, but=later).name))
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", removing)
    with pytest.warns(UserWarning, match="skipped .*99"):
        pe.fit(trainer, image_data(), **EPOCHS, folder=tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted(step_names(15) + later + others)
    assert seen == [
        (*step_names(5), *step_names(10)),
        (*step_names(10), *step_names(15)),
    ]


def test_fit_goes_on_from_a_state_that_was_saved_alone(tmp_path):
    trainer = net_trainer(2, 1, **NOISY)
    whole = pe.fit(
        trainer, image_data(), **EPOCHS, folder=tmp_path / "a", save_every=0.4
    )
    for step, lost in (8, 2), (10, 2):  # the last epoch may not have been validated
        folder = tmp_path / str(step)
        how = EPOCHS | dict(folder=folder, save_every=0.2, keep=99)
        pe.fit(trainer, image_data(), **how)
        path = folder / f"checkpoint_{step:08d}.safetensors"
        alone = pe.load(path, trainer.like())
        for each in folder.iterdir():
            each.unlink()
        pe.save(path, alone)
        seen = []
        found = pe.fit(
            trainer, image_data(), **EPOCHS, folder=folder, on_epoch=seen.append
        )
        assert leaves_equal(*map(trainer.gather, (found.state, whole.state)))
        assert len(seen) == 2
        assert np.isnan(found.losses[:, :lost]).all()
        assert_array_equal(found.losses[:, lost:], whole.losses[:, lost:])


FIT_MISFITS = {
    "no batch_size": (
        dict(batch_size=None),
        "batch_size=None, order=None; expected one",
    ),
    "both": (dict(order=print), "batch_size=48, order=<.*; expected one of the two"),
    "epochs": (dict(epochs=-1), "epochs=-1; expected an int, 0 or more"),
    "epochs as a float": (dict(epochs=1.0), "epochs=1.0; expected an int"),
    "patience": (dict(patience=0), "patience=0; expected epochs, 1 or more"),
    "save_every": (dict(save_every=-1), "save_every is -1; expected 0 <= save_every"),
    "keep": (dict(keep=0), "keep.*0; expected"),
    "batch_size": (dict(batch_size=999), "batch_size=999; expected at most num_exampl"),
    "settings": (dict(settings={"a": jax}), "setting 'a' is .*; expected a number, a"),
    "circle": (dict(settings={"a": 1j}), "setting 'a' is 1j; expected a number, a str"),
    "order": (
        dict(batch_size=None, order=lambda epoch: np.zeros((epoch + 1, 2), int)),
        r"order\(1\) has 2 steps, not 1",
    ),
    "rows": (dict(batch_size=None, order=lambda _: np.full((1, 2), 999)), "999"),
}


@pytest.mark.parametrize("name", FIT_MISFITS)
def test_fit_refuses_arguments_that_do_not_fit(name):
    options, message = FIT_MISFITS[name]
    how = EPOCHS | options
    assert_refuses(lambda: pe.fit(net_trainer(2, 1), image_data(), **how), message)


def test_fit_of_no_epoch_returns_the_first_members(tmp_path):
    trainer = net_trainer(2, 1)
    found = pe.fit(trainer, image_data(), **EPOCHS | dict(epochs=0), folder=tmp_path)
    expected = trainer.gather(trainer.init(EPOCHS["key"]))
    assert leaves_equal(trainer.gather(found.state), expected)
    assert found.losses.shape == (2, 0) and len(os.listdir(tmp_path)) == 1


# ---------------------------------------------------------------------------------
# Demo
# ---------------------------------------------------------------------------------


@cases("flags, count", ([], D), (["--devices", "2"], 2))
def test_demo_fits_the_line(monkeypatch, capsys, flags, count):
    monkeypatch.setattr(sys, "argv", ["pjax_ensemble.py", *flags])
    runpy.run_path(pe.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{count} devices:")
    steps = [line.split(", loss: ") for line in lines[1:-2]]
    assert [step for step, _ in steps] == [f"Step {i:3d}" for i in range(0, 1000, 100)]
    assert float(steps[0][1]) > 2 > 0.3 > float(steps[-1][1])
    weight, bias = (float(line.split()[1]) for line in lines[-2:])
    assert abs(weight - 2) < 0.1 and abs(bias + 1) < 0.1


BAD_DEMO_FLAGS = {
    "--devices=3": "a batch of 128 does not split over 3 devices; use a multiple",
    "--devices=0": "num_devices is 0; expected an int >= 1",
    "2": "unrecognized arguments: 2",
}


@pytest.mark.parametrize("flag", BAD_DEMO_FLAGS)
def test_demo_refuses_flags_that_do_not_fit(monkeypatch, capsys, flag):
    monkeypatch.setattr(sys, "argv", ["pjax_ensemble.py", flag])
    said_by(SystemExit, runpy.run_path, pe.__file__, run_name="__main__")
    assert f"error: {BAD_DEMO_FLAGS[flag]}" in capsys.readouterr().err
