"""Tests of pjax_ensemble.py and train_mnist.py, in the order of their sections."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import errno
import functools
import gc
import gzip
import hashlib
import http.client
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pydoc
import re
import runpy
import shutil
import signal
import socket
import stat
import statistics
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import urllib.error
import urllib.request
import warnings
import weakref
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# What takes the time is compiling.  So it does not optimize, unless the environment has
# JAX_DISABLE_MOST_OPTIMIZATIONS=0; and many tests compile the same programs, which are
# kept from one session, and one of pytest's workers, to the next, in pytest's folder or
# in $COMPILED.  (JAX 0.5.0 crashes when it runs what it has kept.)  XLA in JAX 0.10 can
# still compile as it did before, in half the time; a version that knows no such flag
# would abort.
HERE = Path(__file__).parent
COMPILED = os.environ.get("COMPILED") or jax.config.jax_compilation_cache_dir
FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "0"
COMPILING = {"jax_disable_most_optimizations": FAST}
if jax.__version_info__ >= (0, 8):
    kept = COMPILED or str(HERE / ".pytest_cache" / "d" / "compiled")
    COMPILING["jax_compilation_cache_dir"] = kept
    COMPILING["jax_persistent_cache_min_compile_time_secs"] = 0
for option in COMPILING.items():
    jax.config.update(*option)
if FAST and jax.__version_info__[:2] == (0, 10):
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = " ".join(flags)

import devices as machines
import interrupts as interruptions
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from numpy.testing import assert_allclose, assert_array_equal

import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm

D = 8
jax.devices()  # now, before a test could ask for another number
SGD = pe.sgd(0.1, momentum=0.9)
MNIST_DIR = os.environ.get("MNIST_DIR")
# For other processes too, that are to compute as this one does.
NAMES = "PATH", "XLA_FLAGS", "NPROC", "SYSTEMROOT", "USERPROFILE"
ENVIRONMENT = {name: os.environ[name] for name in NAMES if name in os.environ}
ENVIRONMENT |= {name.upper(): str(value) for name, value in COMPILING.items()}
# What other systems lack: Windows links, locks and signals, and it says other things of
# paths; Windows, and macOS where its name is not that of a host, Gloo.
posix = pytest.mark.skipif(os.name != "posix", reason="not on Windows")
linux = pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone")


def as_bytes(leaf):
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def leaves_equal(a, b):
    """Whether two trees hold the same bits (nan equal to nan)."""
    a, b = map(jax.tree.leaves, (a, b))
    return len(a) == len(b) and all(as_bytes(x) == as_bytes(y) for x, y in zip(a, b))


def assert_close(actual, expected, tolerance=1e-5):
    """Assert that two trees are equal to rounding, in proportion to the leaf's largest.

    Processors add in different orders, with or without fused multiplication: a sum is
    off by some float32 epsilons (6e-8) of its largest terms, however little is left of
    it where terms cancel.  So the bound of every entry is `tolerance` times the largest
    of its leaf; one in proportion to each entry would hold by luck.
    """

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0))

    jax.tree.map(check, actual, expected)


def refuses(*rows):
    """Make a test of calls that raise ValueError: rows of (call, what it says)."""

    @pytest.mark.parametrize("call, message", rows)
    def test(call, message):
        said = said_by(ValueError, call)
        assert re.search(message, said) and "\n" not in said

    return test


def out_of_range(name, below, call, *values):
    """Make rows for `refuses` of values that no number may have that a call takes."""
    expected = f"0 <= {name} < {below}" if below else "an int >= 1"
    said = [re.escape(f"{name} is {value!r}; expected {expected}") for value in values]
    return [(functools.partial(call, v), each) for v, each in zip(values, said)]


def said_by(kind, call, *args):
    """Return the words of the error that a call raises."""
    with pytest.raises(kind) as error:
        call(*args)
    return str(error.value)


def cases(names, *rows):
    """Run a test once for each row of what it takes besides fixtures."""
    return pytest.mark.parametrize(names, rows)


def member(tree, i):
    return jax.tree.map(lambda x: x[i], jax.device_get(tree))


# A context in which JAX's default types are of 64 bits, or not.
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


def randn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs():
    """Let JAX forget its programs now and then.

    It keeps those of models that are gone, too, each with maps of memory, of which
    Linux gives a process 65,530: one more, and it ends in a segmentation fault.
    """
    yield
    if next(NUMBERS) % 100 == 0:
        jax.clear_caches()


@pytest.fixture
def optimized():
    """Compile as users do, where a test is of what XLA makes of a program."""
    name = "jax_disable_most_optimizations"
    jax.config.update(name, False)
    yield
    jax.config.update(name, COMPILING[name])


@pytest.fixture
def elsewhere():
    """Take away what other systems lack, and refuse what Windows refuses.

    Which is to open a folder, and to replace or remove a file that is open.
    """

    def is_open(path):
        for descriptor in range(256):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return True
        return False

    def refuse(name, num_paths, refused):
        call = getattr(os, name)

        def checked(*args, **options):
            for path in filter(refused, args[:num_paths]):
                raise PermissionError(errno.EACCES, "Access is denied", str(path))
            return call(*args, **options)

        patch.setattr(os, name, checked)

    with pytest.MonkeyPatch.context() as patch:
        for name in "sched_getaffinity", "O_DIRECTORY", "O_NOFOLLOW":
            patch.delattr(os, name, raising=False)
        patch.setattr(tm, "fcntl", None)
        refuse("open", 1, os.path.isdir)
        refuse("replace", 2, is_open)
        refuse("unlink", 1, is_open)
        yield


def test_eight_virtual_devices_are_there():
    assert jax.local_device_count() == D


# ---------------------------------------------------------------------------------
# The module as a whole
# ---------------------------------------------------------------------------------


def start_python(code, *args, cwd=HERE, **env):
    """Start code in a fresh interpreter."""
    env = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE), **env}
    options = dict(cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code]
    return subprocess.Popen([*command, *map(str, args)], text=True, **options)


def run_python(*args, **options):
    """Run code in a fresh interpreter, and return what it printed."""
    run = start_python(*args, **options)
    try:
        printed, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    return printed


def test_import_touches_no_device_sets_nothing_and_prints_nothing():
    code = """
import jax
before = dict(jax.config.values)
import pjax_ensemble, train_mnist
assert dict(jax.config.values) == before
jax.config.update("jax_num_cpu_devices", 3)  # without effect once a device is in use
assert jax.device_count() == 3, jax.device_count()
"""
    assert run_python(code) == ""


@pytest.mark.once
def test_modules_are_imported_and_count_cores_where_less_is_there():
    code = """
import os, sys, jax
sys.modules |= {"fcntl": None, "resource": None}
vars(os).pop("sched_getaffinity", None)
os.cpu_count = lambda: 3
sys.path.append("benchmarks")
import train_mnist, devices, faults, interrupts, programs, recipe, speed, uci
import uncertainty
train_mnist.pe.use_cpu_devices()
print(jax.device_count())
"""
    assert run_python(code) == "3\n"


def test_module_works_alone_beside_a_script(tmp_path):
    shutil.copy(HERE / "pjax_ensemble.py", tmp_path)
    code = "import pjax_ensemble as pe; print(pe.__file__); pe.main(2)"
    printed = run_python(code, cwd=tmp_path)
    assert str(tmp_path) in printed and "Step 900" in printed


@pytest.mark.once
def test_example_runs_below_the_module_and_says_what_holds(tmp_path):
    pytest.importorskip("flax")  # of one of its uses
    (tmp_path / "examples").mkdir()
    for name in ("pjax_ensemble.py", "examples/any_model.py"):
        shutil.copy(HERE / name, tmp_path / name)
    code = (
        "import any_model as it; it.main(['--plot', 'it.png']); print(it.pe.__file__)"
    )
    printed = run_python(code, cwd=tmp_path / "examples", PYTHONPATH="")
    assert printed.endswith(str(tmp_path / "pjax_ensemble.py") + "\n")
    png = (tmp_path / "examples" / "it.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) < 100_000

    def numbers(start, stop="\n"):
        text = printed.partition(start)[2].partition(stop)[0]
        return np.float64(re.findall(r"-?\d+\.?\d*", text))

    parts, others = ("Regression", "Beyond the data"), ["Classes", "Own batches"]
    others += ["Tokens"] * ("Tokens: left out" not in printed)  # without Flax
    for use in (*parts, *others):
        ensemble, *members = numbers(use)
        assert ensemble < np.mean(members), use
    # The same networks, on the same data, as on two of the pages.
    page = (HERE / "docs" / "deciding.md").read_text("utf-8")
    raw = re.findall(r"^(?:seen|beyond): .* held (.*)", page, re.MULTILINE)
    calibrated = re.findall(r"^0\.9: mean .* held (.*) (.*)", page, re.MULTILINE)
    held = [numbers(part, "members differ")[-2:] for part in parts]
    assert_allclose(np.transpose(held), 100 * np.float64([raw, *calibrated]), atol=5)
    _, readme = machines.read_readme()
    assert_allclose(numbers("  kept ", "wrong"), 100 * readme[12:], atol=2)
    seen, beyond = (float(x) for x in re.findall(r"differ by (.*)", printed))
    assert beyond > 3 * seen
    table = numbers("weight decay\n", "  chosen")[2:].reshape(8, 3)
    losses = table[:, 1:].min(axis=1)
    assert 0 < losses.argmin() < 7
    chosen, *_ = numbers("chosen: ")
    assert chosen == table[losses.argmin(), 0]
    whole, _, nothing = numbers("  model")
    assert whole > nothing


def test_usage_in_the_docstring_runs():
    lines = pe.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    import"))
    stop = next(i for i, line in enumerate(lines) if line.startswith("One call"))
    names = {}
    exec("\n".join(line[4:] for line in lines[start:stop]), names)
    assert names["losses"].shape == (5, 4)
    assert len(set(np.asarray(names["losses"])[:, 0].tolist())) == 5
    assert len(names["report"]["member"]) == 5


PAGES = [HERE / "README.md", HERE / "CONTRIBUTING.md", *sorted(HERE.glob("docs/*.md"))]
README, *DOCS = (page.read_text("utf-8") for page in PAGES)


def run_page(text, names, capsys):
    """Run a page's Python; what a block prints stands in one below it, unnamed."""
    blocks = [*machines.blocks(text), ("end", "")]
    for (kind, code), (next_kind, below) in itertools.pairwise(blocks):
        used = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        if kind == "python" and all(map(importlib.util.find_spec, used)):
            exec(code, names)
            both = capsys.readouterr().out, "" if next_kind else below
            printed, said = (re.split(r"(-?\d+\.?\d*)", text) for text in both)
            assert printed[::2] == said[::2]  # the text; between stand the numbers
            numbers = np.float64(printed[1::2]), np.float64(said[1::2])
            # As JAX 0.10 rounds; with others a coverage without data is off by 0.06.
            assert_allclose(*numbers, atol=0.1)
    return names


@pytest.mark.once
def test_code_of_every_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = tm.generate_digits(0, 640, 64)
    monkeypatch.setattr(tm, "load_data", lambda *where: few)
    monkeypatch.setitem(tm.NETWORKS, "cnn", tm.NETWORKS["tiny"])
    (flags,) = re.findall(r"`python train_mnist\.py (.* runs/small)`", "".join(DOCS))
    assert tm.main(flags.split()) == 0
    capsys.readouterr()
    with jax.numpy_rank_promotion("allow"):
        names = run_page(README, {}, capsys)
        pages = [run_page(text, dict(names), capsys) for text in DOCS]
    (hand,) = (page for page in pages if "num_devices" in page)
    assert hand["members"][0].bias.shape == (D, *hand["params"][0].bias.shape)
    nll, report = "negative_log_likelihood", names["report"]
    assert all(report["ensemble"][nll] < each[nll] for each in report["member"])
    assert names["wrong"][500:][names["kept"]].mean() < 0.05


FOREVER = """
state, losses = trainer.epoch(state, (x[:200], y[:200]), order)
print("now", flush=True)
while True:
    state, losses = trainer.epoch(state, (x[:200], y[:200]), order)
"""
GO_ON = """
state, losses = trainer.epoch(trainer.latest, (x[:200], y[:200]), order)
int(state.opt_state.num_steps.min())
"""


@posix
@pytest.mark.once
def test_readme_runs_in_a_notebook_that_is_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    env = {**ENVIRONMENT, "PYTHONPATH": str(HERE), "IPYTHONDIR": str(tmp_path)}
    kernel, client = manager.start_new_kernel(env=env, cwd=tmp_path)

    def run(cell):
        said = []

        def hear(message):
            content = message["content"]
            shown = content.get("data", {}).get("text/plain")
            said.append(content.get("text", shown) or "")
            if said[-1] == "now\n":
                kernel.interrupt_kernel()

        reply = client.execute_interactive(cell, output_hook=hear, timeout=120)
        stopped, expected = reply["content"].get("ename"), [None, "KeyboardInterrupt"]
        assert stopped == expected[cell is FOREVER], reply["content"]
        return "".join(said)

    cells = [code for kind, code in machines.blocks(README) if kind == "python"]
    trained = next(i for i, code in enumerate(cells, 1) if "trainer.epoch" in code)
    cells[trained:trained] = FOREVER, GO_ON, "trainer", "state"
    try:
        said = dict(zip(cells, map(run, cells)))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    num_steps = int(said[GO_ON])
    assert num_steps >= 1500 and num_steps % 500 == 0
    assert all(said[n].count("\n") == 0 for n in ("trainer", "state"))
    assert said["trainer"].startswith("Trainer(init, loss_fn, Layout(members=5")


def test_readme_is_read_to_the_end_and_trains_in_sixteen_lines():
    assert README.count("\n") <= 150
    _, block = README.split("```python\nrate = ", 1)
    assert sum(map(bool, block.partition("\n```")[0].splitlines())) == 16


def test_promises_name_tests_that_are_there():
    tests, pages = Path(__file__).read_text("utf-8"), "".join(DOCS)
    named = re.findall(r"`(test_\w+)`", pages)
    assert named and [name for name in named if f"def {name}(" not in tests] == []


def test_commands_of_every_page_are_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()  # what the command with --resume finds
    (tmp_path / "DIR" / "config.json").write_text("{}")
    commands = re.findall(r"([\w/]+\.py)( [^`\n|]*)?", "".join([README, *DOCS]))
    assert len(commands) > 30
    for script, flags in commands:
        assert (HERE / script).exists(), script
        if script == "train_mnist.py" and "--help" not in flags:
            assert tm.parse_arguments(flags.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_every_page_lead_somewhere(page):
    links = re.compile(r"\]\((?!http)([^)#]*)#?([^)]*)")
    for path, anchor in links.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            text = re.sub(r"[^\w\n# -]", "", target.read_text("utf-8")).lower()
            assert f"#-{anchor}\n" in text.replace(" ", "-"), anchor


def test_completion_offers_the_public_names():
    assert {*dir(pe)} == {*pe.__all__, "__doc__", "__version__"}


METHODS = "init update epoch place predict predict_members gather scatter like layout"
METHODS = METHODS.split()


@pytest.mark.once
def test_an_editor_completes_the_public_names_of_module_and_trainer():
    jedi, trainer = pytest.importorskip("jedi"), net_trainer(2, 2)
    fields = {field.name for field in dataclasses.fields(trainer)}
    public = {"pe": (pe, {*pe.__all__}), "it": (trainer, {*METHODS, *fields})}
    for name, (thing, expected) in public.items():
        found = jedi.Interpreter(f"{name}.", [{name: thing}]).complete()
        assert {c.name for c in found if c.name[0] != "_"} == expected


FUNCTIONS = HERE / "docs" / "functions.md"


def write_functions():
    """Return the page: what stands above its first section, and the module's names."""

    def row(name, thing):
        called = ""
        if callable(thing):
            call, none = inspect.signature(thing), inspect.Parameter.empty
            names = [p for p in call.parameters.values() if p.name != "self"]
            names = [p.replace(annotation=none, default=none) for p in names]
            called = call.replace(parameters=names, return_annotation=none)
        return f"| `{name}{called}` | {thing.__doc__.splitlines()[0]} |\n"

    page, *_ = FUNCTIONS.read_text("utf-8").partition("\n## ")
    starts = r"^# -+\n# ([A-Z][\w ]+)|^(?:class |def )?(\w+)(?:\(|:| = )"
    both = [(pe, x) for x in re.findall(starts, inspect.getsource(pe), re.MULTILINE)]
    both += [(em, x) for x in re.findall(starts, inspect.getsource(em), re.MULTILINE)]
    for module, (section, name) in both:
        if section:
            page += f"\n## {section}\n\n| name | what it does |\n|---|---|\n"
        elif name in module.__all__:
            page += row(name, getattr(module, name))
        if name == "Trainer":
            methods = vars(pe.Trainer).items()
            page += "".join(row(f"trainer.{n}", f) for n, f in methods if n in METHODS)
    return page


def test_page_of_functions_says_what_the_docstrings_say():
    write = (
        "import test_pjax_ensemble as t; t.FUNCTIONS.write_text(t.write_functions())"
    )
    anew = f"write it anew: PYTHONPATH=benchmarks python -c '{write}'"
    assert write_functions() == FUNCTIONS.read_text("utf-8"), anew


def test_all_names_stand_in_the_order_of_the_file():
    source = inspect.getsource(pe)
    starts = "def {}(", "class {}(", "class {}:", "{} = "
    found = [[source.find("\n" + s.format(n)) for s in starts] for n in pe.__all__]
    places = list(map(max, found))
    assert min(places) > 0 and places == sorted(places)


@pytest.mark.parametrize("name", pe.__all__)
def test_docstring_gives_shapes_and_errors(name):
    thing = getattr(pe, name)
    if hasattr(thing, "_fields"):  # shapes stand beside the fields
        lines = inspect.getsource(thing).splitlines()
        fields = [line for line in lines if line.split(":")[0].strip() in thing._fields]
        assert len(fields) == len(thing._fields)
        assert all("#" in line for line in fields) or name == "TrainState"
        return
    first = thing.__doc__.splitlines()[0]
    assert first.endswith((".", ":")) and first[0].isupper()
    source = inspect.getsource(thing)
    if "raise ValueError" in source:
        assert "ValueError" in thing.__doc__
    if any(f"{arg}: Array" in source for arg in ("images", "inputs", "logits")):
        assert "[" in thing.__doc__


# ---------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------


def windows_of(images, size, stride):
    """Return numpy's windows [B, H', W', I, kh, kw] of images, without padding."""
    view = np.lib.stride_tricks.sliding_window_view(images, size, axis=(1, 2))
    return view[:, :: stride[0], :: stride[1]]


def conv_by_windows(images, weight, stride, padding):
    """Convolve in numpy, from the definition of "SAME" and "VALID"."""
    kernel, pads = weight.shape[:2], [0, 0]
    if padding == "SAME":
        axes = zip(images.shape[1:3], kernel, stride)
        pads = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in axes]
    padded = np.pad(images, [(0, 0), *[(p // 2, p - p // 2) for p in pads], (0, 0)])
    return np.einsum("bhwikl,klio->bhwo", windows_of(padded, kernel, stride), weight)


CONVS = [
    # batch, height, width, in, out, kernel, stride
    (1, 5, 7, 1, 1, 1, 1),
    (2, 6, 5, 3, 4, 2, 1),
    (2, 7, 7, 2, 3, 3, 1),
    (3, 8, 6, 2, 3, 3, 2),
    (1, 9, 8, 1, 2, 4, 3),
    (2, 7, 9, 3, 2, (5, 2), (1, 2)),
    (1, 6, 6, 4, 1, 6, 2),
    (2, 5, 5, 2, 2, 2, 3),
    (2, 6, 6, 1, 8, 3, 1),
    (1, 5, 6, 2, 2, 5, 4),
]


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def conv_case(batch, height, width, channels, features, kernel, stride):
    params = pe.conv_init(jax.random.key(1), channels, features, kernel)
    params = params._replace(bias=jnp.asarray(randn(2, features)))
    return params, jnp.asarray(randn(3, batch, height, width, channels)), pair(stride)


PADDINGS = "SAME", "VALID"


def conv_library(params, images, stride, padding="SAME"):
    outputs = pe._conv_library(images, params.weight, stride=stride, padding=padding)
    return outputs if params.bias is None else outputs + params.bias[None, None, None]


def with_gradients(f):
    """Return f(params, x) and both gradients of the sum of its sines."""
    grads = jax.grad(lambda p, x: jnp.sin(f(p, x)).sum(), argnums=(0, 1))
    return jax.jit(lambda p, x: (f(p, x), grads(p, x)))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("case", CONVS, ids=str)
def test_conv_equals_numpy_and_the_library_with_its_gradients(case, padding):
    params, images, strides = conv_case(*case)
    ours = functools.partial(pe.conv, stride=case[-1], padding=padding)
    theirs = functools.partial(conv_library, stride=strides, padding=padding)
    results, expected = (with_gradients(f)(params, images) for f in (ours, theirs))
    assert_close(results, expected)
    arrays = map(np.asarray, (images, params.weight))
    outputs = conv_by_windows(*arrays, strides, padding) + np.asarray(params.bias)
    assert_close(results[0], outputs)


AROUND = {
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x)[1]),
    "vmap": lambda f: jax.jit(jax.vmap(f)),
    "pmap": jax.pmap,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("case", [CONVS[3], CONVS[8]], ids=str)
def test_conv_and_its_gradients_inside(case, around):
    params, images, stride = conv_case(*case)
    ours = with_gradients(functools.partial(pe.conv, stride=stride))
    theirs = with_gradients(lambda p, x: conv_library(p, x, stride))
    inside = AROUND[around](functools.partial(ours, params))
    expected = [theirs(params, x) for x in (images, 2 * images)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_close(inside(jnp.stack([images, 2 * images])), expected)


@pytest.mark.parametrize("chunk_bytes", [1, 2000])
@pytest.mark.parametrize("padding", PADDINGS)
def test_conv_in_chunks_of_the_batch(padding, chunk_bytes, monkeypatch):
    monkeypatch.setattr(pe, "_FEW_BYTES", 0)
    monkeypatch.setattr(pe, "_CHUNK_BYTES", chunk_bytes)
    params, images, stride = conv_case(5, *CONVS[3][1:])
    args = params, images

    def results(f):
        forward = jax.jvp(lambda p, x: jnp.sin(f(p, x)).sum(), args, args)
        return forward, with_gradients(f)(*args)

    ours = functools.partial(pe.conv, stride=stride, padding=padding)
    theirs = functools.partial(conv_library, stride=stride, padding=padding)
    assert_close(results(ours), results(theirs))
    assert "scan" in str(jax.make_jaxpr(ours)(*args))


@pytest.mark.usefixtures("optimized")
def test_conv_forms_few_patches_at_a_time():
    conv = pe.conv_init(jax.random.key(0), 32, 64)
    images = jax.ShapeDtypeStruct((512, 14, 14, 32), np.float32)
    program = jax.jit(pe.conv).lower(conv, images).compile()
    outputs = 512 * 14 * 14 * 64 * 4  # kept besides, with one copy
    used = program.memory_analysis().temp_size_in_bytes
    assert used < 2 * pe._CHUNK_BYTES + 2 * outputs


@pytest.mark.usefixtures("optimized")
def test_conv_is_a_matrix_product_on_cpu():
    params, images, stride = conv_case(*CONVS[2])
    library = functools.partial(conv_library, stride=stride)
    for conv, has in (pe.conv, False), (library, True):
        program = with_gradients(conv).lower(params, images).compile().as_text()
        assert (" convolution(" in program) == has


@pytest.mark.filterwarnings("error")  # of float64, which JAX's arrays do not hold
def test_conv_promotes_integers_and_keeps_half_precision():
    params = pe.conv_init(jax.random.key(0), 1, 2)
    assert pe.conv(params, jnp.ones((1, 4, 4, 1), jnp.uint8)).dtype == jnp.float32
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert pe.conv(half, jnp.ones((1, 4, 4, 1), jnp.bfloat16)).dtype == jnp.bfloat16
    assert pe.conv(params, np.ones((1, 4, 4, 1))).dtype == jnp.float32


def test_init_has_zero_bias_and_the_variance_of_he():
    for params, shape in [
        (pe.conv_init(jax.random.key(0), 16, 64, 5), (5, 5, 16, 64)),
        (pe.dense_init(jax.random.key(0), 400, 100), (400, 100)),
    ]:
        assert params.weight.shape == shape
        he = np.sqrt(2 / np.prod(shape[:-1]))
        assert_allclose(params.weight.std(), he, rtol=0.02)  # of 25,600 draws or more
        assert not params.bias.any() and params.bias.shape == shape[-1:]
    assert pe.conv_init(jax.random.key(0), 1, 2, (2, 3), bias=False).bias is None


def test_dense_equals_numpy():
    weight, bias, inputs = randn(0, 3, 4), randn(1, 4), randn(2, 2, 5, 3)
    params = pe.Dense(jnp.asarray(weight), jnp.asarray(bias))
    assert_close(pe.dense(params, inputs), inputs @ weight + bias)


POOLS, WINDOWS = {pe.avg_pool: np.mean, pe.max_pool: np.max}, [(2, None), (3, 2)]
WINDOWS += [((2, 3), (3, 1)), (3, 4)]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("window, stride", WINDOWS)
def test_pool_equals_numpy(pool, window, stride):
    images = randn(0, 2, 7, 9, 3)
    windows = windows_of(images, pair(window), pair(stride or window))
    expected = POOLS[pool](windows, axis=(-2, -1))
    assert_close(pool(jnp.asarray(images), window, stride=stride), expected)


NUMBERS_OF = {"uint8": 200, "int8": -100, "bool": 1, "bfloat16": 3}


@pytest.mark.parametrize("dtype", NUMBERS_OF)
def test_avg_pool_averages_integers_as_floats(dtype):
    mean = pe.avg_pool(jnp.full((1, 2, 2, 1), NUMBERS_OF[dtype], dtype))
    assert mean == NUMBERS_OF[dtype]
    assert mean.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")


def test_max_pool_sends_the_gradient_to_the_largest():
    images = jnp.asarray(randn(0, 1, 4, 4, 1))
    grads = jax.grad(lambda x: pe.max_pool(x).sum())(images)
    assert grads.sum() == 4
    largest = np.sort(pe.max_pool(images).ravel())
    assert_array_equal(np.sort(images[grads == 1]), largest)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 5, 3)])
def test_batch_norm_equals_numpy_in_training_and_in_evaluation(shape, scale):
    params, stats = pe.batch_norm_init(3, scale=scale)
    assert (params.scale is None) != scale
    params = jax.tree.map(lambda x: x + randn(1, 3), params)
    stats = pe.BatchStats(jnp.asarray(randn(2, 3)), jnp.asarray(randn(3, 3) ** 2))
    x = (2 + 3 * randn(0, *shape)).astype(np.float64)
    gamma = np.asarray(params.scale) if scale else 1.0

    def normalized(mean, var, eps):
        return gamma * (x - mean) / np.sqrt(var + eps) + np.asarray(params.bias)

    outputs, kept = pe.batch_norm(params, stats, jnp.float32(x), training=False)
    assert_close(outputs, normalized(*map(np.asarray, stats), 1e-3))
    assert leaves_equal(kept, stats)

    rows = x.reshape(-1, 3)
    mean, var = rows.mean(axis=0), rows.var(axis=0)
    options = dict(training=True, momentum=0.8, eps=0.01)
    outputs, new = pe.batch_norm(params, stats, jnp.float32(x), **options)
    assert_close(outputs, normalized(mean, var, 0.01))
    expected = 0.8 * stats.mean + 0.2 * mean, 0.8 * stats.var + 0.2 * var
    assert_close(new, pe.BatchStats(*expected))

    # The gradient in closed form (Ioffe and Szegedy 2015, section 3).
    dy = randn(4, *shape)

    def loss(x):
        return jnp.sum(dy * pe.batch_norm(params, stats, x, **options)[0])

    normal = (rows - mean) / np.sqrt(var + 0.01)
    d = gamma * dy.reshape(-1, 3)
    d = d - d.mean(axis=0) - normal * (d * normal).mean(axis=0)
    expected = (d / np.sqrt(var + 0.01)).reshape(shape)
    assert_close(jax.grad(loss)(jnp.float32(x)), expected)


def test_batch_norm_keeps_half_precision_and_float32_statistics():
    params, stats = pe.batch_norm_init(3)
    x = jnp.asarray(100 + randn(0, 64, 3), jnp.bfloat16)
    outputs, new = pe.batch_norm(params, stats, x, training=True, momentum=0)
    assert outputs.dtype == jnp.bfloat16 and new.var.dtype == jnp.float32
    # A mean that is off by 1e-5 of 100 adds the square of that.
    assert_close(new.var, np.asarray(x, np.float64).var(axis=0))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_integers_gives_floats(training):
    norm = pe.batch_norm_init(3)
    x = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    xs = (jnp.asarray(x, dtype) for dtype in ("uint8", "float32"))
    found, expected = (pe.batch_norm(*norm, x, training=training) for x in xs)
    assert leaves_equal(found, expected)


def test_dropout_zeroes_a_fraction_and_keeps_the_expectation():
    x = jnp.asarray(1 + randn(0, 200, 100) ** 2)
    kept, other = (np.asarray(pe.dropout(jax.random.key(i), x, 0.3)) for i in range(2))
    zero = kept == 0
    assert abs(zero.mean() - 0.3) < 0.01
    assert_close(kept[~zero], x[~zero] / 0.7)
    assert abs((zero & (other == 0)).mean() - 0.09) < 0.01
    assert_array_equal(pe.dropout(None, x, 0.3), x)
    assert_array_equal(pe.dropout(jax.random.key(0), x, 0), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_dropout_takes_a_traced_rate(dtype):
    key, x = jax.random.key(0), jnp.asarray(9 * abs(randn(0, 20, 10)), dtype)
    traced = jax.jit(lambda rate: pe.dropout(key, x, rate))
    assert traced(0.3).dtype == ("float32" if dtype == "uint8" else dtype)
    for known in (pe.dropout(key, x, 0.3), jax.jit(lambda: pe.dropout(key, x, 0.3))()):
        assert leaves_equal(traced(0.3), known)
    assert_array_equal(traced(0), x)


CONV = pe.Conv(np.ones((3, 3, 2, 3), np.float32), None)
DENSE = pe.Dense(np.ones((3, 1), np.float32), np.zeros(1, np.float32))
ONES, ROWS = np.ones((1, 5, 5, 2), np.float32), np.ones((2, 4, 3))
NORM = pe.BatchNorm(None, np.zeros(3)), pe.BatchStats(np.zeros(3), np.ones(3))
normalize = functools.partial(pe.batch_norm, *NORM, training=True)
KEY = jax.random.key(0)

test_layer_names_what_does_not_fit = refuses(
    (lambda: pe.conv(CONV, ONES[..., :1]), r"5, 1\); expected \[..., 2\], as para"),
    (lambda: pe.conv(CONV, ONES, padding="same"), "'same'; expected 'SAME' or"),
    (lambda: pe.conv(CONV, ONES[0]), r"\(5, 5, 2\); expected \[B, H, W, I\]"),
    *out_of_range("stride", None, lambda n: pe.conv(CONV, ONES, stride=n), 0, 1.5),
    (lambda: pe.conv(CONV, ONES[:, :2], padding="VALID"), "window of 3x3 does not"),
    (lambda: pe.avg_pool(ONES, 6), r"6x6 does not fit .* \(1, 5, 5, 2\); use a small"),
    (lambda: pe.max_pool(ONES, (1, 2, 3)), r"window is \(1, 2, 3\)"),
    *out_of_range("stride", None, lambda n: pe.avg_pool(ONES, stride=n), 0),
    (lambda: pe.dense_init(KEY, 0, 2), r"weights \[0, 2\] is 0; expected an int >= 1"),
    (lambda: pe.conv_init(KEY, 2, -1), r"weights \[3, 3, 2, -1\] is -1; expected an"),
    *out_of_range("channels", None, pe.batch_norm_init, 0, 2.0),
    (lambda: pe.dense(DENSE, ONES), r"expected \[..., 3\], as .* shape \(3, 1\) take"),
    (lambda: normalize(ONES), r"have shape \(1, 5, 5, 2\); expected \[..., 3\]"),
    (lambda: normalize(ROWS[:0]), r"\(0, 4, 3\) have no row"),
    (lambda: normalize(ROWS[:, :0]), r"\(2, 0, 3\) have no row"),
    *out_of_range("rate", 1, lambda x: pe.dropout(None, ONES, x), 1, -0.1, "0.1"),
)


# ---------------------------------------------------------------------------------
# Network
# ---------------------------------------------------------------------------------


def two_dense(params, x):
    x = jax.nn.relu(x @ params.dense1.weight + params.dense1.bias[None])
    return x @ params.dense2.weight + params.dense2.bias[None]


FORMS = {}, {"image_shape": (4, 7, 3), "num_classes": 1}
FORMS += ({"image_shape": (33, 10, 2), "num_classes": np.int64(26)},)


@pytest.mark.parametrize("form", FORMS)
def test_cnn_is_the_guides_network(form):
    params = pe.cnn_init(jax.random.key(0), **form)
    assert form or sum(x.size for x in jax.tree.leaves(params)) == 824_458
    images = jnp.asarray(randn(0, 3, *form.get("image_shape", (28, 28, 1))))

    def pool(x):
        ones = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, ones, ones, "VALID") / 4

    @jax.jit
    def network(params, images):
        x = pool(jax.nn.relu(conv_library(params.conv1, images, (1, 1))))
        x = pool(jax.nn.relu(conv_library(params.conv2, x, (1, 1))))
        return two_dense(params, x.reshape(3, -1))

    logits = jax.jit(pe.cnn)(params, images)
    assert logits.shape == (3, form.get("num_classes", 10))
    assert_close(logits, network(params, images))


@pytest.mark.parametrize("name", ["cnn", "batchnorm"])
def test_networks_of_the_script_take_images_of_any_form(name):
    init, logits = tm.NETWORKS[name]

    def network(key, images):
        model = init(key, image_shape=images.shape[1:], num_classes=4)
        return logits(*model, images)[0]

    made = jax.eval_shape(network, jax.random.key(0), jnp.ones((2, 6, 11, 3)))
    assert made.shape == (2, 4)


BEFORE = {  # a number of each weight, of the key 7, as when MNIST's form was fixed
    pe.cnn_init: [-0.4311377, 0.0662437, 0.0288984, -0.0946283],
    tm.batch_norm_cnn_init: [-0.4311377, 0.0540877, 0.055056, -0.2676492, -0.0076337],
}


@pytest.mark.parametrize("init", BEFORE)
def test_networks_of_mnist_are_drawn_as_before(init):
    leaves = jax.tree.leaves(init(jax.random.key(7)))
    drawn = np.array([leaf.ravel()[7] for leaf in leaves if leaf.ndim > 1])
    assert_close(drawn, np.array(BEFORE[init]))


def drawing(**form):
    return lambda: pe.cnn_init(jax.random.key(0), **form)


UNFIT = (3, 9, 1), (9, 3, 1), (9, 9, 0), (9, 9.0, 1), (28, 28), 28
SAID_OF_UNFIT = "image_shape is .*; expected .* >= 4"

test_network_refuses = refuses(
    *((drawing(image_shape=shape), SAID_OF_UNFIT) for shape in UNFIT),
    (drawing(num_classes=0), "num_classes is 0; expected an int >= 1"),
)


def test_batch_norm_cnn_is_the_guides_network():
    params, stats = tm.batch_norm_cnn_init(jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 49_242
    assert sum(x.size for x in jax.tree.leaves(stats)) == 136
    images = jnp.asarray(randn(0, 5, 28, 28, 1))
    stats = jax.tree.map(lambda x: x + 0.1 * randn(x.size, x.size) ** 2, stats)

    def norm_relu(x, norm, used):
        mean, var, bias = (leaf[None, None, None] for leaf in (*used, norm.bias))
        return jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3) + bias)

    @functools.partial(jax.jit, static_argnums=0)
    def network(stats_of):
        p = params
        x = conv_library(p.conv1, images, (1, 1))
        x = norm_relu(x, p.norm1, stats_of(0, x))
        x = conv_library(p.conv2, x, (2, 2), "VALID")
        assert x.shape == (5, 12, 12, 24)
        x = norm_relu(x, p.norm2, stats_of(1, x))
        x = conv_library(p.conv3, x, (2, 2))
        assert x.shape == (5, 6, 6, 32)
        return two_dense(p, norm_relu(x, p.norm3, stats_of(2, x)).mean(axis=(1, 2)))

    forward = tm.batch_norm_cnn
    logits, kept = jax.jit(forward)(params, stats, images)
    assert_close(logits, network(lambda i, x: stats[i]))
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
# Losses and metrics
# ---------------------------------------------------------------------------------


cross_entropy, regression = pe.softmax_cross_entropy, em.regression_report


def test_cross_entropy_equals_numpy_and_is_stable():
    logits, labels = randn(0, 6, 4), np.array([0, 1, 2, 3, 0, 1])
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = [-np.log(p[i]) for p, i in zip(probs, labels)]
    assert_close(cross_entropy(logits, labels), np.array(expected))
    far = cross_entropy(np.float32([[1e4, 0], [1e4, 0]]), np.array([0, 1]))
    assert_allclose(far, [0, 1e4], rtol=1e-6, atol=1e-6)  # the first, of log(1)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool"])
def test_cross_entropy_of_integers_is_that_of_floats(dtype):
    logits, labels = np.array([[0, 3, 1], [1, 0, 0]], dtype), np.array([1, 2])
    expected = cross_entropy(np.float32(logits), labels)
    for each in logits, jnp.asarray(logits):
        assert_array_equal(cross_entropy(each, labels), expected)


POWERS = itertools.product((-1, 1), (0, 7, 8, 31, 32), (-1, 0))
EDGES = [0, 3, *[sign * 2**n + i for sign, n, i in POWERS]]


@pytest.mark.parametrize("num_classes", [4, 200, 300])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64])
def test_cross_entropy_of_a_label_out_of_range_is_nan(dtype, num_classes):
    labels = [i for i in EDGES if np.iinfo(dtype).min <= i <= np.iinfo(dtype).max]
    logits = np.arange(num_classes, dtype=np.float32) / 100
    losses = np.log(np.exp(logits).sum()) - logits
    expected = [losses[i] if 0 <= i < num_classes else np.nan for i in labels]
    rows, labels = np.tile(logits, (len(labels), 1)), np.array(labels, dtype)
    assert_allclose(cross_entropy(rows, labels), expected, rtol=1e-5)
    if dtype is not np.int64:  # which JAX's arrays do not hold
        assert_allclose(cross_entropy(rows, jnp.asarray(labels)), expected, rtol=1e-5)


def test_gaussian_nll_and_its_gradients_are_those_of_the_density():
    variance = np.float32(10.0 ** np.arange(-30, 20))
    mean, targets = (np.sqrt(variance) * randn(i, 50) for i in range(2))
    mean[:5] = targets[:5]
    v, error = np.float64(variance), np.float64(targets) - mean
    nll = pe.gaussian_nll(mean, variance, targets)
    assert_allclose(nll, (np.log(2 * np.pi * v) + error**2 / v) / 2, atol=1e-5)

    def total(mean, variance):
        return pe.gaussian_nll(mean, variance, targets).sum()

    slope, curve = jax.grad(total, (0, 1))(mean, variance)
    assert_close(slope * np.sqrt(v), -error / np.sqrt(v))
    assert_close(curve * v, (1 - error**2 / v) / 2)


def test_gaussian_nll_takes_integers_and_is_nan_unless_the_variance_is_above_zero():
    mean, targets = jnp.array([3, 5], jnp.uint8), jnp.array([5, 3], jnp.uint8)
    nll = pe.gaussian_nll(mean, jnp.ones(2), targets)
    assert_allclose(nll, [2 + np.log(2 * np.pi) / 2] * 2, rtol=1e-6)
    bad = jnp.array([0, -0.0, -1, np.nan])
    for target in (0, 1):
        assert np.isnan(pe.gaussian_nll(jnp.zeros(4), bad, jnp.full(4, target))).all()


def test_accuracy_counts_the_largest():
    logits = jnp.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 4.0]])
    assert pe.accuracy(logits, jnp.array([1, 0, 0, 1])) == 0.5


def random_probs(seed, *shape):
    return np.random.default_rng(seed).dirichlet(0.3 * np.ones(shape[-1]), shape[:-1])


def bins_by_loops(probs, labels):
    """Put (confidence, whether it is right) of each example into one of 15 bins."""
    bins = [[] for _ in range(15)]
    for p, label in zip(probs, labels):
        confidence, guess = max(p), list(p).index(max(p))
        bins[min(int(confidence * 15), 14)].append((confidence, guess == label))
    return bins


def scores_by_loops(probs, labels):
    """Compute the four scores one example at a time."""
    pairs = list(zip(probs, labels))
    nll = -sum(np.log(p[label]) for p, label in pairs)
    brier = sum((x - (c == label)) ** 2 for p, label in pairs for c, x in enumerate(p))
    sums = [np.sum(b, axis=0) for b in bins_by_loops(probs, labels) if b]
    hits = sum(right for _, right in sums)
    ece = sum(abs(right - confidence) for confidence, right in sums)
    return [x / len(probs) for x in (hits, nll, brier, ece)]


@cases("block_size", 2**16, 100, 1)  # 4,369 rows, 6, and a row at a time
def test_report_equals_loops_for_members_ensemble_and_sizes(monkeypatch, block_size):
    monkeypatch.setattr(em, "_BLOCK_SIZE", block_size)
    probs, labels = random_probs(0, 3, 200, 5), np.arange(200) % 5
    probs[:, :20] = probs[0, :20]  # in which the members agree
    report = em.ensemble_report(probs, labels)
    sizes = [probs[:k].mean(axis=0) for k in (1, 2, 3)]
    assert report["ensemble"] == report["by_size"][-1]
    all_scores, all_probs = report["member"] + report["by_size"], [*probs, *sizes]
    for scores, expected in zip(all_scores, all_probs, strict=True):
        assert_allclose(list(scores.values()), scores_by_loops(expected, labels))
    guesses = probs.argmax(axis=2)
    pairs = [(0, 1), (0, 2), (1, 2)]
    disagreement = np.mean([guesses[i] != guesses[j] for i, j in pairs])
    assert_allclose(report["disagreement"], disagreement)

    def entropy(p):
        return np.array([-sum(x * np.log(x) for x in row if x > 0) for row in p])

    total = entropy(probs.mean(axis=0))
    expected = total, total - np.mean([entropy(p) for p in probs], axis=0)
    found = em.predictive_entropy(probs), em.mutual_information(probs)
    assert_allclose(found, expected, atol=1e-12)
    assert found[1].min() >= 0 and found[1][:20].max() < 1e-12 < found[1][20:].min()
    means = report["predictive_entropy"], report["mutual_information"]
    assert_allclose(means, np.mean(found, axis=1))
    json.dumps(report, allow_nan=False)
    tokens = probs.reshape(3, 50, 4, 5), labels.reshape(50, 4)
    assert em.ensemble_report(*tokens) == report
    assert_array_equal(em.mutual_information(tokens[0]).ravel(), found[1])


@cases(
    "call",
    lambda probs, labels: em.predictive_entropy(probs),
    lambda probs, labels: em.temper(probs, 2),
    lambda probs, labels: em.fit_temperature(probs[0], labels),
    lambda probs, labels: em.reliability(probs[1], labels),
)
def test_size_of_blocks_does_not_change_what_is_said(monkeypatch, call):
    args = random_probs(0, 3, 200, 5), np.arange(200) % 5
    whole = call(*args)
    monkeypatch.setattr(em, "_BLOCK_SIZE", 100)
    assert_allclose(call(*args), whole, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_report_of_less_precise_probabilities_is_of_float64(dtype):
    first = np.rint(256 * random_probs(0, 3, 200, 2)[..., 0]) / 256  # bfloat16 has it
    probs = np.asarray(jnp.asarray(np.stack([first, 1 - first], axis=-1), dtype))
    both = probs, np.float64(probs)
    report, expected = (em.ensemble_report(x, np.arange(200) % 2) for x in both)
    float32_logs = "predictive_entropy", "mutual_information"
    for name, scores in expected.items():
        tolerance = 1e-6 if name in float32_logs else 1e-12
        close = functools.partial(assert_allclose, rtol=tolerance)
        jax.tree.map(close, report[name], scores)
    assert em.mutual_information(np.stack([probs[0]] * 3)).max() < 1e-7


@cases(
    "call, result",  # besides which, MiB, it takes the memory of a few blocks
    (lambda probs, labels: em.ensemble_report(probs, labels), 0),
    (lambda probs, labels: em.mutual_information(probs), 0.6),
    (lambda probs, labels: em.temper(probs[0], 2), 7.6),
    (lambda probs, labels: em.fit_temperature(probs[0], labels), 0),
    (lambda probs, labels: em.reliability(probs[0], labels), 0),
    (lambda probs, labels: regression(*2 * [probs[..., 0]], labels), 0.8),
)
def test_memory_of_a_report_is_that_of_a_block(call, result):
    draw, shape = np.random.default_rng(0), (4, 20_000, 50)
    probs = draw.dirichlet(np.ones(50), shape[:2]).astype(np.float32)  # 15 MiB
    labels = np.where(draw.random(20_000) < 0.1, probs[0].argmax(axis=-1), 0)
    tracemalloc.start()
    call(probs, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (result + 4) * 2**20
    assert len([*em._blocks(probs, 4)]) < 100  # large enough for NumPy to be fast


def test_report_of_certain_members_is_finite():
    certain = np.eye(3)[[0, 1, 2, 0]]
    report = em.ensemble_report([certain, certain[::-1]], np.array([0, 1, 2, 1]))
    json.dumps(report, allow_nan=False)
    right, wrong = np.array([[1.0, 0]]), np.array([[0, 1.0]])
    report = em.ensemble_report([right, wrong], np.array([0]))
    assert [m["expected_calibration_error"] for m in report["member"]] == [0, 1]
    assert [m["brier_score"] for m in report["member"]] == [0, 2]
    assert_allclose(report["member"][1]["negative_log_likelihood"], 87.3, atol=0.1)
    assert report["disagreement"] == 1
    assert_allclose(report["mutual_information"], np.log(2))
    assert em.ensemble_report([right], np.array([0]))["disagreement"] == 0


# Two members, eight examples, three classes, and what scikit-learn 1.9.1
# (accuracy_score, log_loss, brier_score_loss) and TorchMetrics 1.9.0 on torch 2.13
# (MulticlassCalibrationError, 15 bins, in float32) say of them and of their mean.
# fmt: off
FIXED_PROBS = np.array([
    71, 19, 10,  25, 55, 20,  5, 15, 80,  43, 41, 16,
    30, 28, 42,  91, 5, 4,  12, 62, 26,  35, 17, 48,
    58, 32, 10,  45, 35, 20,  11, 9, 80,  22, 68, 10,
    36, 34, 30,  97, 2, 1,  8, 30, 62,  15, 23, 62,
]).reshape(2, 8, 3) / 100
# fmt: on
FIXED_LABELS = np.array([0, 1, 2, 1, 2, 0, 2, 0])
FIXED_SCORES = [
    (0.625, 0.6767219999927051, 0.4005, 0.2849999666213989),
    (0.625, 0.7266178912132587, 0.414, 0.2524999976158142),
    (0.75, 0.6697409073096285, 0.38958125, 0.18000000715255737),
]


def test_report_agrees_with_scikit_learn_and_torchmetrics():
    report = em.ensemble_report(FIXED_PROBS, FIXED_LABELS)
    for scores, expected in zip([*report["member"], report["ensemble"]], FIXED_SCORES):
        assert_allclose(list(scores.values())[:3], expected[:3], rtol=1e-12)
        assert_allclose(scores["expected_calibration_error"], expected[3], rtol=1e-6)


def gaussian_scores_by_loops(mean, variance, targets):
    normals = [statistics.NormalDist(*each) for each in zip(mean, np.sqrt(variance))]
    pairs = list(zip(normals, targets))
    inside = np.array([abs(2 * normal.cdf(y) - 1) for normal, y in pairs])
    return {
        "root_mean_squared_error": math.dist(mean, targets) / math.sqrt(len(mean)),
        "negative_log_likelihood": -np.mean([np.log(n.pdf(y)) for n, y in pairs]),
        "coverage": {f"{p}%": np.mean(inside <= p / 100) for p in (50, 90, 95)},
    }


@cases("members, offset", (1, 0), (3, 0), (3, 2**20))
def test_regression_report_equals_loops_for_members_and_sizes(members, offset):
    # Multiples of 1 / 1024, so that adding the offset rounds nothing off.
    *means, targets = np.round(1024 * np.float64(randn(0, members + 1, 60))) / 1024
    means, variances = np.array(means), np.float64(np.abs(randn(1, members, 60)) + 0.1)
    report = regression(means + offset, jnp.asarray(variances), targets + offset)
    totals = (np.cumsum(x, axis=0) for x in (means, variances + means**2))
    mean, square = (total / np.c_[1 : members + 1] for total in totals)
    sizes = zip(mean, square - mean**2)
    assert report["ensemble"] == report["by_size"][-1]
    all_scores = report["member"] + report["by_size"]
    for scores, each in zip(all_scores, [*zip(means, variances), *sizes], strict=True):
        jax.tree.map(assert_allclose, scores, gaussian_scores_by_loops(*each, targets))
    parts = report["mean_of_variances"], report["variance_of_means"]
    assert_allclose(parts, [variances.mean(), means.var(axis=0).mean()])
    assert_allclose(report["predictive_variance"], sum(parts))
    json.dumps(report, allow_nan=False)


def test_auroc_counts_pairs_and_agrees_with_scikit_learn():
    inside, outside = [0.1, 0.4, 0.35, 0.8, 0.35, 0.2], [0.9, 0.4, 0.55, 0.35, 0.7]
    # roc_auc_score of scikit-learn 1.9.1; BinaryAUROC of TorchMetrics 1.9.0 to 1e-7
    assert_allclose(em.auroc(inside, outside), 0.7833333333333333, rtol=1e-12)
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(9, size=40), rng.integers(3, 12, size=31)
    pairs = list(itertools.product(inside, outside))
    expected = np.mean([(b > a) + 0.5 * (b == a) for a, b in pairs])
    assert_allclose(em.auroc(inside, outside), expected)
    assert em.auroc([0, 1], [2, np.inf]) == 1 and em.auroc([2], [1]) == 0


EDGES_OF_BINS = [
    ((0.8, 0.85), (True, False), 0.325),  # 12/15 opens the bin of 0.85
    ((0.8, 0.79), (True, False), 0.495),  # and does not close the one before
    ((1.0, 0.95), (False, True), 0.475),  # the last bin is closed
]


@pytest.mark.parametrize("confidences, correct, error", EDGES_OF_BINS)
def test_calibration_bins_hold_their_lower_edge(confidences, correct, error):
    probs = np.array([[c, 1 - c] for c in confidences])
    scores = em.ensemble_report([probs], np.where(correct, 0, 1))["ensemble"]
    assert_allclose(scores["expected_calibration_error"], error)


def test_reliability_counts_and_averages_each_bin():
    probs, labels = random_probs(0, 300, 4), np.arange(300) % 4
    probs[0] = [0, 0, 1, 0]
    bins = bins_by_loops(probs, labels)
    counts, *means = em.reliability(probs, labels)
    assert counts.tolist() == [len(b) for b in bins] and 0 in counts
    expected = [np.mean(b, axis=0) if b else (np.nan, np.nan) for b in bins]
    assert_allclose(np.transpose(means), expected)
    rows = em.reliability(probs.reshape(3, 100, 4), labels.reshape(3, 100))
    assert_array_equal(rows, [counts, *means])


ERRORS = [0.3, 1.2, 0.7, 2.1, 0.4, 0.9, 0.1, 1.6, 0.8, 0.2]


@cases(
    "scores, coverage, expected",
    # What SplitConformalRegressor of MAPIE 1.6.0 says of them
    (ERRORS, 0.5, 0.8),
    (ERRORS, 0.8, 1.6),
    (ERRORS, 0.9, 2.1),
    (range(1, 100), 0.9, 90),
    (range(1, 100), 0.55, 55),  # 100 * 0.55 is 55.00000000000001
    (range(1, 100), 1 - 0.9, 10),  # 9.999999999999998
    (range(9), np.float32(0.9), 8),
    (range(8), 0.9, np.inf),  # of nine, one is to be let through
    ([], 0.9, np.inf),
    ([np.inf, 1], 0.5, np.inf),
    ([3, 1], 0, 1),
)
def test_conformal_quantile_is_a_score_by_its_rank(scores, coverage, expected):
    assert_allclose(em.conformal_quantile(scores, coverage), expected)


@pytest.mark.parametrize("n", [20, 100, 500])
def test_conformal_quantile_holds_for_new_scores_as_often_as_the_theory_says(n):
    draw = np.random.default_rng(n)
    # What holds of new scores that are uniform, as those of any continuous rank are
    held = [em.conformal_quantile(draw.uniform(size=n)) for _ in range(2000)]
    error = np.std(held) / math.sqrt(len(held))
    expected = math.ceil((n + 1) * 9 / 10) / (n + 1)
    assert abs(np.mean(held) - expected) < 3 * error < 0.006


def threshold_by_scipy(uncertainty, wrong, risk, confidence):
    """Test one number after another of those kept, by SciPy's binomial."""
    binom = pytest.importorskip("scipy.stats").binom
    fewest = np.log(1 - confidence) / np.log1p(-risk)
    threshold = -np.inf
    for value in np.unique(uncertainty):
        kept = uncertainty <= value
        if kept.sum() >= max(fewest, min(2 * fewest, len(kept) / 2)):
            if binom.cdf(wrong[kept].sum(), kept.sum(), risk) > 1 - confidence:
                break
            threshold = value
    return threshold


@cases("n", 0, 40, 400, 2000)
def test_risk_threshold_is_that_of_binomial_tests_in_sequence(n):
    draw, found = np.random.default_rng(n), set()
    for power, decimals, risk, confidence in itertools.product(
        (0.5, 3), (2, 9), (0.01, 0.1, 0.4), (0.5, 0.95)
    ):
        uncertainty = draw.uniform(size=n).round(decimals)
        wrong = draw.uniform(size=n) < uncertainty**power / 2
        options = dict(risk=risk, confidence=confidence)
        threshold = em.risk_threshold(uncertainty, wrong, **options)
        assert threshold == threshold_by_scipy(uncertainty, wrong, **options)
        found.add(threshold)
    assert n < 400 or len(found) > 4
    # Half of 80 are no fewer than it takes, 28: so many is the first number tested.
    assert em.risk_threshold(np.arange(80), np.arange(80) >= 40, risk=0.1) == 39


def test_what_is_kept_errs_more_than_the_risk_as_seldom_as_it_says():
    # An example of uncertainty u is wrong with probability u^6 / 2, so that of those up
    # to t a fraction of t^6 / 14 is: 1% where t^6 = 0.14.
    draw, could = np.random.default_rng(0), 0.14 ** (1 / 6)
    thresholds = []
    for _ in range(1000):
        uncertainty = draw.uniform(size=2000)
        wrong = draw.uniform(size=2000) < uncertainty**6 / 2
        thresholds.append(em.risk_threshold(uncertainty, wrong))
    above = np.mean(np.array(thresholds) > could)
    assert 0 < above < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert np.mean(np.maximum(thresholds, 0)) > 0.85 * could


def test_temper_takes_powers_of_probabilities():
    probs = random_probs(0, 3, 20, 4)
    powers = probs ** (1 / 0.7)
    expected = powers / powers.sum(axis=-1, keepdims=True)
    assert_allclose(em.temper(probs, 0.7), expected, rtol=1e-12)
    assert_allclose(em.temper(probs, 1), probs, rtol=1e-12)
    tempered = em.temper([[0, 1], [0.5, 0.5]], 2)  # 0 counts as float32's smallest
    assert_allclose(tempered, [[1.08e-19, 1], [0.5, 0.5]], rtol=0.01)
    assert em.temper([[0.3, 0.7]], 1e-30).tolist() == [[0, 1]]


def test_temperature_is_that_of_others_and_of_the_smallest_likelihood_loss():
    # Of TemperatureScaling, netcal 1.4.0, and it gives 1 / temperature
    theirs, mean = [1.7999928, 1.2852887], FIXED_PROBS.mean(axis=0)
    for probs, inverse in zip([*FIXED_PROBS, mean], [*theirs, 2.1739141]):
        assert_allclose(1 / em.fit_temperature(probs, FIXED_LABELS), inverse, rtol=2e-5)
    # For alike rows, that by which the probability is the frequency: log odds divided
    found = em.fit_temperature([[0.8, 0.2]] * 4, [0, 1, 0, 0])
    assert_allclose(found, np.log(4) / np.log(3), rtol=1e-8)
    optimize = pytest.importorskip("scipy.optimize")
    probs, rows = random_probs(1, 300, 5), np.arange(300)
    labels = np.where(rows % 2, probs.argmax(axis=1), rows % 5)

    def loss(log_temperature):
        tempered = em.temper(probs, np.exp(log_temperature))
        return em.ensemble_report([tempered], labels)["ensemble"][
            "negative_log_likelihood"
        ]

    best = optimize.minimize_scalar(loss, (0, 3), tol=1e-10).x
    assert_allclose(em.fit_temperature(probs, labels), np.exp(best), rtol=1e-6)


def test_temperature_of_perfect_probabilities_is_one():
    draw = np.random.default_rng(0)
    probs = random_probs(0, 20_000, 6)
    labels = (draw.random((len(probs), 1)) > probs.cumsum(axis=1)).sum(axis=1)
    logs = np.log(np.maximum(probs, 1e-38))
    mean = (probs * logs).sum(axis=1)
    # Fisher's information of 1 / temperature: the variance of log p under p
    information = ((probs * logs**2).sum(axis=1) - mean**2).sum()
    inverse, error = 1 / em.fit_temperature(probs, labels), information**-0.5
    assert abs(inverse - 1) < 3 * error < 0.05
    for temperature in (0.3, 4):
        changed = em.fit_temperature(em.temper(probs, temperature), labels)
        assert_allclose(changed * temperature, 1 / inverse, rtol=1e-3)


TWO, ZEROS = np.ones((1, 2)), np.zeros((2, 2))
ONE_HOT, COLUMN, HALVES = np.eye(4)[:3], np.zeros((3, 1), int), np.full((1, 2, 2), 0.5)
THREE, PLANES = np.ones(3), np.ones((3, 4, 1))
MANY, FAR = np.full((2, 40_000, 2), 0.5), np.ones((2, 40_000, 1))
FAR[1, -1] = 2
SURE, NONE_WRONG = np.array([[0.75, 0.25]] * 3), (THREE, THREE > 1)

METRICS = [  # and what they call the arrays that they take, each in its place
    (em.predictive_entropy, {"probabilities": HALVES}),
    (em.mutual_information, {"probabilities": HALVES}),
    (em.reliability, {"probabilities": HALVES[0], "labels": np.arange(2)}),
    (em.ensemble_report, {"probabilities": HALVES, "labels": np.arange(2)}),
    (regression, {"means": TWO, "variances": TWO, "targets": TWO[0]}),
    (em.auroc, {"scores_in": THREE, "scores_out": THREE}),
    (em.conformal_quantile, {"scores": THREE}),
    (em.risk_threshold, dict(zip(("uncertainty", "wrong"), NONE_WRONG))),
    (lambda probs: em.temper(probs, 2), {"probabilities": HALVES}),
    (em.fit_temperature, {"probabilities": SURE, "labels": np.array([0, 0, 1])}),
]


@pytest.mark.parametrize("metric, arrays", METRICS)
def test_metric_takes_all_of_an_array_or_none(metric, arrays):
    metric(*arrays.values())
    for name, x in arrays.items():
        masked = np.ma.masked_array(x, np.arange(x.size).reshape(x.shape) == 1)
        for bad in (masked, x + 0j, [*masked]) if x.ndim > 1 else (masked, x + 0j):
            said = said_by(ValueError, metric, *(arrays | {name: bad}).values())
            assert said == f"{name} are masked or complex; expected real numbers alone"


test_metric_names_what_does_not_fit = refuses(
    (lambda: cross_entropy(ONE_HOT, COLUMN), r"labels are int64\[3, 1\]; exp"),
    (lambda: cross_entropy(ONE_HOT, ONE_HOT), r"labels are float64\[3, 4\]"),
    (lambda: pe.accuracy(ONE_HOT, COLUMN), r"labels are int64\[3, 1\]"),
    (lambda: pe.accuracy(ONE_HOT, THREE), r"4\[3\]; expected integers \[3\], class"),
    (lambda: em.reliability(ONE_HOT, COLUMN), r"labels are int64\[3, 1\]"),
    (lambda: em.predictive_entropy(8 * HALVES), r"\[0, 0\] begin with 4.0 and add up"),
    (lambda: em.mutual_information(8 * HALVES), "add up to 8.0; pass softmax"),
    (lambda: em.reliability(8 * ONE_HOT, [0] * 3), "add up to 8.0; pass softmax"),
    (lambda: em.reliability(ONE_HOT, [0, 1, 4]), "in 0..4; the classes are 0..3"),
    (lambda: em.ensemble_report(ONE_HOT, [0]), r"shape \(3, 4\); expected \[K, N, C\]"),
    (lambda: em.ensemble_report(HALVES, [0]), r"int64\[1\]; expected integers \[2\]"),
    (lambda: em.ensemble_report(HALVES[:, :0], np.arange(0)), "none may be empty"),
    (lambda: em.ensemble_report(HALVES[:0], [0]), r"\(0, 2, 2\); expected \[K, N, C\]"),
    (
        lambda: em.predictive_entropy(SURE),
        r"shape \(3, 2\); expected \[K, N, C\], each",
    ),
    (
        lambda: em.mutual_information(SURE),
        r"shape \(3, 2\); expected \[K, N, C\], each",
    ),
    (lambda: em.temper(0.5, 2), r"shape \(\); expected \[..., C\]"),
    (lambda: em.reliability(SURE[:, :0], [0] * 3), r"\(3, 0\); expected \[..., C\]"),
    (
        lambda: em.temper(MANY * FAR, 2),
        r"s\[1, 39999\] begin with 1.0 and add up to 2.0",
    ),
    (
        lambda: em.mutual_information(MANY * FAR),
        r"s\[1, 39999\] begin with 1.0 and add",
    ),
    (lambda: em.ensemble_report(HALVES, [0, 2]), "in 0..2; the classes are 0..1"),
    (lambda: em.ensemble_report(HALVES, [0, -1]), "labels lie in -1..0"),
    (lambda: em.ensemble_report(HALVES, [0.0, 1.0]), "labels are float64"),
    (lambda: em.ensemble_report(HALVES + 0.1, [0, 1]), r"probabilities\[0, 0\] begin"),
    (lambda: em.ensemble_report(HALVES * [[1], [np.nan]], [0, 1]), r"\[0, 1\] begin"),
    (lambda: em.ensemble_report([[[1.5, -0.5]]], [0]), "pass softmax"),
    (lambda: em.ensemble_report(np.ones((1, 1, 99)), [0]), "add up to 99.0; pass"),
    (lambda: pe.gaussian_nll(THREE, THREE, COLUMN), r"\(3,\), \(3, 1\)\]; expected"),
    (lambda: pe.gaussian_nll(THREE, COLUMN, THREE), r"\(3, 1\), \(3,\)\]; expected"),
    (lambda: regression(PLANES, PLANES, ONE_HOT), r"\(3, 4\); .*take \[..., 0\]"),
    (lambda: regression(PLANES, ONE_HOT, ONE_HOT), r"\(3, 4, 1\), variances \(3, 4\)"),
    (lambda: regression(np.ones(2), np.ones(2), 1), r"targets \(\); expected"),
    (lambda: regression(HALVES[0], ONE_HOT, [1, 1]), r"variances \(3, 4\)"),
    (lambda: regression(*2 * [HALVES[0]], [1] * 3), r"targets \(3,\); exp"),
    (lambda: regression(*2 * [np.ones((1, 0))], []), "none of them empty"),
    (lambda: regression([[0, np.inf]], TWO, [0, 0]), "0, example 1: mean inf"),
    (lambda: regression([[0, 0]], TWO * np.nan, [0, 0]), "0: .*variance nan"),
    (lambda: regression([[0, 0]], TWO * np.inf, [0, 0]), "variance inf"),
    (lambda: regression(ZEROS, [[1, 1], [1, 0]], [0, 0]), "1, example 1: .*ce 0"),
    (lambda: regression([[0, 0]], -TWO, [0, 0]), "variance -1.0, target"),
    (lambda: regression([[0, 0]], TWO, [0, np.nan]), "example 1: .*target nan"),
    (lambda: em.auroc([], [1.0]), "0 scores_in and 1 scores_out; expected one or more"),
    (lambda: em.auroc([1.0], [[1.0]]), r"scores_out have shape \(1, 1\)"),
    (lambda: em.auroc([1.0], [1, np.nan]), r"scores_out have shape \(2,\) and 1 nan"),
    (lambda: em.conformal_quantile(TWO), r"scores have shape \(1, 2\) and 0 nan"),
    (lambda: em.conformal_quantile([1, np.nan]), r"shape \(2,\) and 1 nan; expected"),
    (
        lambda: em.conformal_quantile(THREE, 90),
        "coverage is 90; expected 0 <= coverage < 1$",
    ),
    (lambda: em.conformal_quantile(THREE, None), "coverage is None; expected 0 <="),
    (lambda: em.risk_threshold(TWO, TWO > 1), r"uncertainty have shape \(1, 2\) and"),
    (
        lambda: em.risk_threshold(THREE, [0, 0, 1]),
        r"int64\[3\]; expected bool\[3\], as",
    ),
    (lambda: em.risk_threshold(THREE, [True]), r"wrong is bool\[1\]; expected bool\[3"),
    (lambda: em.risk_threshold(*NONE_WRONG, risk=0), "risk is 0; expected 1e-09 <= ri"),
    (lambda: em.risk_threshold(*NONE_WRONG, confidence=1), "confidence is 1; expected"),
    (lambda: em.temper(8 * ONE_HOT, 2), "add up to 8.0; pass softmax"),
    (lambda: em.temper(ONE_HOT, 0), "temperature is 0; expected 1e-30 <= temperature"),
    (lambda: em.temper(ONE_HOT, np.inf), "is inf; expected 1e-30 <= temperature < inf"),
    (lambda: em.fit_temperature(SURE, [0, 1]), r"int64\[2\]; expected integers \[3\]"),
    (lambda: em.fit_temperature(SURE, [0, 1, 2]), "in 0..2; the classes are 0..1"),
    (lambda: em.fit_temperature(SURE, [0, 0, 0]), "for 3 examples, of which 0 have"),
    (lambda: em.fit_temperature(SURE, [0, 1, 1]), "for 3 examples, of which 2 have"),
    (
        lambda: em.fit_temperature(np.tile(SURE[:1], (10**6, 1)), np.ones(10**6, int)),
        "of which 1000000 have",
    ),
    (lambda: em.fit_temperature(TWO / 2, [0]), "for 1 examples, of which 0 have"),
    (lambda: em.fit_temperature(SURE[:0], np.arange(0)), "for 0 examples"),
)


# ---------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------


RATES = {"constant": 0.1, "linear": pe.linear_schedule(0.3, 8)}
RATES["cosine"] = pe.cosine_schedule(1, 8.0)
OPTIONS = [
    *[("sgd", dict(momentum=m, nesterov=n)) for m in (0.0, 0.9) for n in (False, True)],
    ("adam", {}),
    ("adam", dict(b1=0.5, b2=0.9, eps=0.1)),
    ("adam", dict(b1=0, b2=0)),
]


def steps_of(optimizer, apply_updates):
    """Return the parameters after each of eight steps, and the optimizer's state."""
    params, steps = {"w": jnp.asarray(randn(0, 3, 2), float), "b": jnp.zeros(2)}, []
    state = optimizer.init(params)
    for i in range(8):
        grads = {"w": randn(i, 3, 2), "b": randn(i, 2) * [1, 0]}
        grads = jax.tree.map(lambda g: jnp.asarray(g, float), grads)
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        steps.append(params)
    return steps, state


@pytest.mark.parametrize("x64, tolerance", [(False, 1e-5), (True, 1e-14)])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_optimizer_equals_optax_step_by_step(name, options, rate, x64, tolerance):
    make, like = getattr(pe, name), getattr(optax, name)
    with enable_x64(x64):
        with jax.numpy_dtype_promotion("strict"):
            steps, state = steps_of(make(RATES[rate], **options), pe.apply_updates)
        expected, _ = steps_of(like(RATES[rate], **options), optax.apply_updates)
    assert state.num_steps == 8
    assert_close(steps, expected, tolerance)


NESTEROV = functools.partial(pe.sgd, nesterov=True)
TRACED = [
    (pe.sgd, dict(learning_rate=0.1, momentum=0.9)),
    (NESTEROV, dict(learning_rate=0.03, momentum=0.7)),
    (pe.adam, dict(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-8)),
    (lambda **h: pe.adam(pe.linear_schedule(**h)), dict(peak=0.3, num_steps=7)),
    (lambda **h: pe.sgd(pe.cosine_schedule(**h)), dict(peak=1, num_steps=7, warmup=0)),
    (lambda **h: pe.adam(pe.cosine_schedule(0.3, 7, **h)), dict(warmup=0.15)),
]


@pytest.mark.usefixtures("optimized")  # else a loop may round by itself
@pytest.mark.parametrize("make, numbers", TRACED)
def test_traced_numbers_make_the_steps_of_known_ones(make, numbers):
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


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_our_optimizer_drops_into_an_optax_step(name):
    options = dict(momentum=0.9) if name == "sgd" else {}

    def clipped(module):
        clip = optax.clip_by_global_norm(0.5)
        init, update = optax.chain(clip, getattr(module, name)(0.1, **options))
        steps = optax.GradientTransformation(init, jax.jit(update))
        return steps_of(steps, optax.apply_updates)[0]

    assert_close(clipped(pe), clipped(optax))


def test_defaults_are_those_that_the_docstrings_name():
    defaults = {"momentum": 0.9}, {"momentum": 0.99, "eps": 1e-3}, {"rate": 0.5}
    functions = pe.sgd, pe.batch_norm, pe.dropout, pe.prefetch
    for f, expected in zip(functions, (*defaults, {"size": 2}), strict=True):
        parameters = inspect.signature(f).parameters
        assert {name: parameters[name].default for name in expected} == expected


@pytest.mark.parametrize("make", [pe.sgd, pe.adam])
def test_optimizer_keeps_half_precision_and_float32_moments(make):
    optimizer, params = make(pe.linear_schedule(0.1, 4)), jnp.ones(3, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        updates, (_, *state) = optimizer.update(params, optimizer.init(params))
        assert pe.apply_updates(params, updates).dtype == jnp.bfloat16
    assert {x.dtype for x in (updates, *state)} == {jnp.dtype(jnp.float32)}
    traced = jax.jit(lambda *h: make(*h).update(params, optimizer.init(params)))
    updates, (_, *state) = traced(0.1, 0.9)
    assert {x.dtype for x in (updates, *state)} == {jnp.dtype(jnp.float32)}


def adam_of(mean, square, n):
    corrected = mean / (1 - 0.9**n), square / (1 - 0.999**n)
    return -0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@cases(
    "optimizer, update_of",  # of sums of b^i g, and of b^i g^2, and of the steps
    (pe.sgd(0.1, momentum=0.999), lambda first, _, n: -0.1 * first(0.999)),
    (
        pe.adam(0.1),
        lambda first, second, n: adam_of(0.1 * first(0.9), 0.001 * second(0.999), n),
    ),
)
def test_ten_thousand_steps_of_any_precision_are_those_of_the_formula(
    optimizer, update_of, dtype
):
    """Of a gradient of 1 in the first half, and of 1/64 in the second."""
    n, later = 5000, 1 / 64

    @jax.jit
    def last_update(params):
        def step(i, both):
            grads = jnp.where(i < n, 1, later).astype(dtype)
            return optimizer.update(grads, both[1], params)

        first = jnp.zeros_like(params, jnp.float32), optimizer.init(params)
        return jax.lax.fori_loop(0, 2 * n, step, first)[0]

    def sums(power):
        def of(b):
            return (1 - b**n) / (1 - b) * (b**n + later**power)

        return of

    expected = update_of(sums(1), sums(2), 2 * n)
    assert_close(last_update(jnp.ones((), dtype)), expected, 0.02)


SHAPES = {pe.linear_schedule: lambda t: t}
SHAPES[pe.cosine_schedule] = lambda t: np.sin(np.pi * t / 2) ** 2


@pytest.mark.parametrize("x64, tolerance", [(False, 2e-6), (True, 1e-14)])
@pytest.mark.parametrize("num_steps", [1, 99, 1_000_000])
@pytest.mark.parametrize("warmup", [0, 0.15, 0.5])
@pytest.mark.parametrize("make", SHAPES)
def test_schedule_equals_numpy_at_every_step(make, warmup, num_steps, x64, tolerance):
    steps = np.arange(num_steps)
    fall = (num_steps - steps) / (num_steps + 1) / (1 - warmup)
    rise = (steps + 1) / (num_steps + 1) / warmup if warmup else np.inf
    with enable_x64(x64):
        schedule = make(0.4, num_steps, warmup=warmup)
        found = map(schedule, (steps, num_steps, 5 * num_steps))
        rates, end, later = map(np.asarray, found)
    assert_allclose(rates, 0.4 * SHAPES[make](np.minimum(rise, fall)), rtol=tolerance)
    assert rates.min() > 0 == end == later


test_optimizer_names_what_does_not_fit = refuses(
    *out_of_range("learning_rate", np.inf, pe.sgd, -0.1, np.nan, np.inf, "1e-3", None),
    *out_of_range("momentum", 1, lambda x: pe.sgd(1, x), -0.1, 1.0, np.nan),
    *out_of_range("learning_rate", np.inf, pe.adam, -1, np.nan, np.array([0.1, 0.2])),
    *out_of_range("b1", 1, lambda x: pe.adam(0.1, b1=x), 1),
    *out_of_range("b2", 1, lambda x: pe.adam(0.1, b2=x), -1),
    *out_of_range("eps", np.inf, lambda x: pe.adam(0.1, eps=x), -1),
    *out_of_range("num_steps", 2**31, lambda x: pe.linear_schedule(0.1, x), -1, 2**31),
    *out_of_range("warmup", 1, lambda x: pe.cosine_schedule(0.1, 9, warmup=x), 1.0),
    *out_of_range("warmup", 1, lambda x: pe.linear_schedule(0.1, 9, warmup=x), -0.1),
    *out_of_range("peak", np.inf, lambda x: pe.linear_schedule(x, 9), -0.1),
    *out_of_range("peak", np.inf, lambda x: pe.cosine_schedule(x, 9), np.inf),
    (lambda: pe.train_state({"w": 3}, SGD), r"'\['w'\]' is int32; expected floating"),
    (lambda: pe.train_state([3], pe.adam(1)), "is int32; expected floating point"),
    (lambda: pe.train_state([1j], pe.adam(1)), r"'\[0\]' is complex64; expected"),
    (lambda: jax.eval_shape(SGD.init, [1j]), r"'\[0\]' is complex64; expected"),
)


# ---------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=2))
@settings(max_examples=50, deadline=None)
def test_merge_undoes_split_and_rows_keep_their_order(num_devices, rows, rest):
    shape = (num_devices * rows, *rest)
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    tree = {"a": numbers, "b": [np.full(shape[0], 7, np.uint8)]}
    parts = pe.split(tree, num_devices)
    assert parts["a"].shape == (num_devices, rows, *rest)
    assert_array_equal(parts["a"].reshape(shape), numbers)
    assert leaves_equal(pe.merge(parts), tree)


def test_split_defaults_to_the_local_devices_and_stays_on_the_host():
    parts = pe.split((np.zeros((16, 3)), jnp.zeros(24)))
    assert parts[0].shape == (D, 2, 3) and isinstance(parts[0], np.ndarray)
    assert parts[1].shape == (D, 3) and isinstance(parts[1], jax.Array)


@pytest.mark.parametrize("num_devices", [1, 3, D])
def test_replicate_puts_a_copy_on_each_device(num_devices):
    half, key = jnp.ones(2, jnp.bfloat16), jax.random.key(7)
    tree = {"w": randn(0, 2, 3), "half": half, "count": 3, "key": key}
    copies = pe.replicate(tree, num_devices)
    for name, leaf in copies.items():
        assert leaf.shape == (num_devices, *np.shape(tree[name]))
    shards = copies["w"].addressable_shards
    assert [shard.device for shard in shards] == jax.local_devices()[:num_devices]
    for shard in shards:
        assert_array_equal(shard.data[0], tree["w"])
    one = pe.unreplicate(copies)
    assert leaves_equal(one | {"count": 3}, tree) and one["count"] == 3
    assert one["half"].dtype == half.dtype and one["key"].dtype == key.dtype


def test_unreplicate_leaves_the_other_copies_alone():
    outputs = jax.pmap(lambda x: x + 1)(np.arange(D, dtype=np.float32))
    one = pe.unreplicate({"x": outputs, "host": np.arange(D)})
    assert one["x"].devices() == {jax.local_devices()[0]}
    assert one["x"].shape == () and (one["x"], one["host"]) == (1, 0)
    with jax.transfer_guard_device_to_device("disallow"):
        pe.unreplicate(outputs)


LATE = jax.__version_info__ < (0, 6)  # which does not say that it has begun


@pytest.mark.skipif(LATE, reason="JAX 0.5.0 does not notice")
def test_devices_that_are_asked_for_too_late_are_warned_of():
    with pytest.warns(UserWarning, match="9 devices are asked for; there a") as said:
        for count in (9, D, 2):
            pe.use_cpu_devices(count)
    assert len(said) == 1 and said[0].filename == __file__
    assert jax.local_device_count() == D


test_tree_or_number_of_devices_is_refused = refuses(
    (lambda: pe.split(np.zeros((130, 2))), "130 does not split over 8.*multiple of 8"),
    (lambda: pe.split(np.float32(1)), "without axes"),
    *out_of_range("num_devices", None, lambda n: pe.split(ROWS, n), 0, -1, 2.0, "2"),
    *out_of_range("num_devices", None, pe.use_cpu_devices, 0, 2.5, "4", True),
    (lambda: pe.merge(np.zeros(8)), r"shape \(8,\) is not \[D, n, ...\]"),
    (lambda: pe.unreplicate(jnp.zeros(())), r"without axes is not \[D, ...\]"),
    (lambda: pe.replicate(np.zeros(3), 9), "9 devices are asked for; there are 8"),
)


# ---------------------------------------------------------------------------------
# Updates, and what a trainer's update has in common with them
# ---------------------------------------------------------------------------------


class Net(NamedTuple):
    hidden: pe.Dense
    dense: pe.Dense


def net_init(key):
    keys = jax.random.split(key)
    return Net(pe.dense_init(keys[0], 64, 6), pe.dense_init(keys[1], 6, 4))


def net(params, images):  # uint8
    x = images.reshape(len(images), -1).astype(jnp.float32) / 255
    return pe.dense(params.dense, jax.nn.relu(pe.dense(params.hidden, x)))


def net_loss(params, images, labels):
    return cross_entropy(net(params, images), labels).mean()


def noisy_loss(params, model_state, key, images, labels):
    """Draw noise, so that a key out of place would show; count the steps."""
    scale = 1 + 0.1 * jax.random.normal(key)
    loss = cross_entropy(scale * net(params, images), labels).mean()
    return loss, jax.tree.map(lambda count: count + 1, model_state)


net_and_gradients = jax.jit(jax.value_and_grad(net_loss))
NUM_IMAGES = 240


@functools.cache
def image_data():
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(NUM_IMAGES, 8, 8, 1), dtype=np.uint8)
    return images, (images.mean(axis=(1, 2, 3)).astype(np.int32)) % 4


def net_batches(count, batch=16):
    rows = np.arange(count * batch).reshape(count, batch) % NUM_IMAGES
    return [[x[step] for x in image_data()] for step in rows]


def members_state(keys, init=net_init, optimizer=SGD, **kwargs):
    """Stack the states of members, leaves [K, ...]."""
    states = [pe.train_state(init(key), optimizer, key=key, **kwargs) for key in keys]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def keys_of(seed, count, style="new"):
    make = jax.random.key if style == "new" else jax.random.PRNGKey
    return jax.random.split(make(seed), count)


def one_net():
    return pe.replicate(pe.train_state(net_init(jax.random.key(0)), SGD))


class Way(NamedTuple):
    """A way to train `members` models on `devices`: every law below holds for all."""

    kind: str
    members: int
    devices: int


WAYS = [Way("sync", 1, D), Way("ensemble", D, D)]
WAYS += [Way("trainer", 1, 4), Way("trainer", 3, 2)]
every_way = pytest.mark.parametrize("way", WAYS, ids="{0[0]} {0[1]} {0[2]}".format)


def start(way, loss_fn, first, optimizer=SGD, **options):
    """Return the state of members [K, ...], and its update on batches [B, ...]."""
    if way.kind == "trainer":
        options |= dict(members=way.members, devices=way.devices)
        trainer = pe.make_trainer(net_init, loss_fn, optimizer, **options)
        return trainer.scatter(first), trainer.update
    if way.kind == "sync":
        state = pe.replicate(jax.tree.map(lambda x: x[0], first), way.devices)
        make, lay = pe.make_sync_update, pe.split
    else:
        state = jax.tree.map(lambda x: x.copy(), first)
        make, lay = pe.make_ensemble_update, pe.replicate
    update = make(loss_fn, optimizer, **options)
    return state, lambda state, *batch: update(state, *lay(batch, way.devices))


def train(way, loss_fn, first, batches, optimizer=SGD, **options):
    """Train members [K, ...] on each batch [B, ...]; return them, and metrics [K]."""
    state, update = start(way, loss_fn, first, optimizer, **options)
    metrics = []
    for step, batch in enumerate(batches):
        before = jax.tree.leaves(state)
        state, now = update(state, *batch)
        assert step == 0 or all(x.is_deleted() for x in before)
        metrics.append(now)
    spread = pe.layout(way.members, way.devices)
    state = state._replace(key=jax.random.key_data(state.key))
    ends = [jax.device_get(state), jax.device_get(metrics)]
    for x in jax.tree.leaves(ends[0] if way.kind == "trainer" else ends):
        for i in range(len(x)):  # replicas are bit-identical
            assert x[i].tobytes() == x[i - i % spread.replicas].tobytes()
    states = jax.tree.map(lambda x: x[:: spread.replicas][: way.members], ends[0])
    return states, jax.tree.map(lambda x: x[: way.members], ends[1])


POLYAK = optax.chain(optax.polyak_sgd(max_learning_rate=99), optax.scale(0.02))


def by_name(grads, opt_state, params=None, *, value):  # where Optax takes any names
    return POLYAK.update(grads, opt_state, params, value=value)


STEPS = {
    "ours": (NESTEROV(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "of Optax, given the loss": (POLYAK, POLYAK),
    "given the loss by its name": (pe.Optimizer(POLYAK.init, by_name), POLYAK),
}


@every_way
@pytest.mark.parametrize("name", STEPS)
def test_step_equals_one_on_the_whole_batch(way, name):
    ours, theirs = STEPS[name]
    theirs = optax.with_extra_args_support(theirs)
    first = members_state(keys_of(0, way.members), optimizer=ours)
    batches = net_batches(3)
    ends, losses = train(way, net_loss, first, batches, ours)
    for i in {0, way.members - 1}:
        params = member(first.params, i)
        opt_state = theirs.init(params)
        for batch, found in zip(batches, losses):
            loss, grads = net_and_gradients(params, *batch)
            updates, opt_state = theirs.update(grads, opt_state, params, value=loss)
            params = optax.apply_updates(params, updates)
            assert_close(found[i], loss)
        assert_close(member(ends.params, i), params)


@every_way
@pytest.mark.parametrize("options", [{}, dict(microbatch=4)], ids=str)
def test_step_traces_its_loss_once_and_reuses_its_state(way, options):
    traces, counts = [], []

    def counted(*args):
        traces.append(1)
        return net_loss(*args)

    def batches():
        for batch in net_batches(4):
            counts.append(len(traces))
            yield batch

    first = members_state(keys_of(0, way.members))
    with mock.patch.object(pe, "_check_apart") as look:
        train(way, counted, first, batches(), **options)
    assert counts[0] == 0 < counts[1] == counts[2] == counts[3]
    assert look.call_count == 1  # a state that it returned is known


@pytest.mark.parametrize("what", ["key", "nan"])
@pytest.mark.parametrize("way", WAYS[1::2], ids=str)
def test_members_never_touch_each_other(way, what):
    first = members_state(keys_of(0, way.members), model_state=jnp.zeros(()))
    changed = first._replace(key=first.key.at[2].set(jax.random.key(99)))
    if what == "nan":
        bad = jax.tree.map(lambda x: x.at[2].set(np.nan), first.params)
        changed = first._replace(params=bad)
    run = functools.partial(train, way, noisy_loss, stateful=True)
    ends = [run(state, net_batches(3)) for state in (first, changed)]
    for i in range(way.members):
        (one, losses), (other, others) = ends
        assert leaves_equal(member(one, i), member(other, i)) == (i != 2)
        assert leaves_equal([x[i] for x in losses], [x[i] for x in others]) == (i != 2)
    assert np.isnan(others[-1][2]) == (what == "nan")


def test_members_equal_those_trained_alone_on_their_own_batches():
    update = pe.make_ensemble_update(net_loss, SGD)
    keys, batches = keys_of(0, D), [pe.split(x) for x in net_batches(3, 16 * D)]

    def ends_of(which):
        state, losses = members_state(keys[which]), []
        for batch in batches:
            state, loss = update(state, *(x[which] for x in batch))
            losses.append(loss)
        return state[:2], losses

    together = ends_of(slice(None))
    for i in (0, 3, 7):
        assert leaves_equal(member(ends_of(slice(i, i + 1)), 0), member(together, i))


@every_way
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_update_takes_every_form_of_loss(way, stateful, has_aux):
    def loss_fn(params, *rest):
        loss = jnp.sum(params * rest[-1].mean())
        aux = {"loss": loss, "pair": jnp.ones(2), "right": rest[-1].sum() > 0, "n": 3}
        if stateful:
            return loss, (rest[0] + 1, aux) if has_aux else rest[0] + 1
        return (loss, aux) if has_aux else loss

    batch, optimizer = [np.ones((D, 4), np.float32)], pe.sgd(0.5, momentum=0.0)
    keys, zero = keys_of(0, way.members), jnp.zeros(())
    first = members_state(keys, lambda _: jnp.ones(3), optimizer, model_state=zero)
    before = np.asarray(jax.random.key_data(first.key))
    options = dict(has_aux=has_aux, stateful=stateful)
    end, (metrics,) = train(way, loss_fn, first, [batch], optimizer, **options)
    loss, aux = metrics if has_aux else (metrics, None)
    assert_allclose(loss, np.full(way.members, 3))
    if has_aux:
        assert_array_equal(aux["loss"], loss)
        assert aux["pair"].shape == (way.members, 2)
        assert aux["right"].dtype == aux["n"].dtype == np.float32
        assert (aux["right"] == 1).all() and (aux["n"] == 3).all()
    assert_allclose(end.params, np.full((way.members, 3), 0.5))
    assert_array_equal(end.model_state, np.full(way.members, float(stateful)))
    assert (end.key != before).any(axis=1).all() == stateful


def test_sync_averages_over_replicas_that_draw_different_numbers():
    def loss_fn(params, model_state, key, x):
        new = {"mean": x.mean(), "steps": model_state["steps"] + 1, "constant": 0.5}
        mine = jax.lax.axis_index("devices")
        draws = jnp.zeros(D).at[mine].set(jax.random.uniform(key))
        return params * x.mean(), (new, {"largest": x.max(), "draws": draws})

    optimizer, x = pe.sgd(1.0, momentum=0.0), np.arange(16.0).reshape(D, 2)
    model_state = {"mean": 0.0, "steps": jnp.int32(2**30), "constant": 0.5}
    options = dict(model_state=model_state, key=jax.random.key(0))
    state = pe.train_state(jnp.float32(2), optimizer, **options)
    update = pe.make_sync_update(loss_fn, optimizer, has_aux=True, stateful=True)
    state, (loss, aux) = update(pe.replicate(state), x)
    assert_allclose(loss, np.full(D, 2 * x.mean()))
    assert_allclose(aux["largest"], np.full(D, np.arange(1, 16, 2).mean()))
    assert_allclose(state.params, np.full(D, 2 - x.mean()))
    assert_allclose(state.model_state["mean"], np.full(D, x.mean()))
    assert_array_equal(state.model_state["steps"], np.full(D, 2**30 + 1))
    assert state.model_state["steps"].dtype == np.int32
    _, (_, later) = update(state, x)
    draws = np.concatenate([each["draws"][0] for each in (aux, later)])
    assert len(set(draws.tolist())) == 2 * D  # on every replica, in every step


@every_way
def test_microbatches_make_the_step_of_the_whole_batch(way):
    sizes = []

    def loss_fn(params, images, labels):
        sizes.append(len(images))
        loss = net_loss(params, images, labels)
        return loss, pe.accuracy(net(params, images), labels)

    rows, results = 128 // pe.layout(way.members, way.devices).replicas, []
    for microbatch in (None, 4, 256):
        sizes.clear()
        first, batches = members_state(keys_of(0, way.members)), net_batches(3, 128)
        options = dict(has_aux=True, microbatch=microbatch)
        results.append(train(way, loss_fn, first, batches, **options))
        assert set(sizes) == {min(microbatch or rows, rows)}
    for other in results[1:]:
        assert_close(results[0], other)


HALVES_ON = [("bfloat16", 1, 1), ("float16", 100, 1), ("bfloat16", 1, 2)]


@cases("dtype, slope, devices", *HALVES_ON)
def test_sums_and_means_of_half_precision_are_of_float32(dtype, slope, devices):
    def loss_fn(w, x):
        part = jnp.mean(x).astype(dtype)
        return slope * jnp.mean(w * x.astype(dtype)) + part, {"mean": part}

    way, descend = Way("trainer", 1, devices), pe.sgd(1.0)
    first = members_state(keys_of(0, 1), lambda key: jnp.zeros((), dtype), descend)
    # Of 1 and the next number of bfloat16, whose mean it has not, in parts of either.
    x = np.float32([1, 1 + 1 / 128]).repeat(2**14)
    options = dict(has_aux=True, microbatch=16)
    ends, ((loss, aux),) = train(way, loss_fn, first, [(x,)], descend, **options)
    assert loss.dtype == aux["mean"].dtype == np.float32 and ends.params.dtype == dtype
    assert loss == aux["mean"] == x.mean()
    assert_close(np.float32(ends.params), [-slope], 0.01)


@pytest.mark.parametrize("optimizer", [pe.adam(0.03), pe.sgd(0.001, momentum=0.998)])
def test_a_network_of_bfloat16_learns_as_one_of_float32(optimizer):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2048, 8)).astype(np.float32), rng.normal(size=(8, 4))
    labels = (x @ weight + rng.gumbel(size=(2048, 4))).argmax(axis=1)
    order = rng.integers(2048, size=(250, 32))

    def loss_fn(params, x, labels):
        hidden = jax.nn.relu(pe.dense(params.hidden, x))
        return cross_entropy(pe.dense(params.dense, hidden), labels).mean()

    def losses_of(dtype):
        def init(key):
            keys = jax.random.split(key)
            net = Net(pe.dense_init(keys[0], 8, 16), pe.dense_init(keys[1], 16, 4))
            return jax.tree.map(lambda x: x.astype(dtype), net)

        trainer = pe.make_trainer(init, loss_fn, optimizer, members=2, devices=1)
        state, _ = trainer.epoch(trainer.init(KEY), (x, labels), order)
        params = jax.tree.map(np.float32, trainer.gather(state).params)
        return [loss_fn(member(params, k), x, labels) for k in range(2)]

    assert_close(losses_of("bfloat16"), losses_of("float32"), 0.05)


def test_parts_draw_alike_wherever_they_stand():
    ends, options = [], dict(stateful=True, microbatch=4)
    for devices in (1, 2, 4):  # 4, 2 and 1 parts of 4 on a device
        way, first = Way("sync", 1, devices), members_state(keys_of(0, 1))
        ends.append(train(way, noisy_loss, first, net_batches(3), **options))
    assert_close(ends[1], ends[0])
    assert_close(ends[2], ends[0])


def aligned(array):
    """Copy an array to where `jax.device_put` would share its memory."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    shared = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    shared[:] = array
    return shared


def placed(x):
    return net_trainer(1, 2).place(x)


def losses_of_an_epoch(x):
    trainer, state = begin(net_trainer(1, 2))
    return trainer.epoch(state, (x, image_data()[1]), orders(1)[0])[1]


def losses_by_hand(x):
    return sync(net_loss, SGD)(one_net(), *pe.split((x, image_data()[1])))[1]


@pytest.mark.parametrize("use", [placed, losses_of_an_epoch, losses_by_hand])
def test_an_array_that_is_changed_afterwards_changes_nothing(use):
    x = aligned(image_data()[0])
    found, expected = use(x), use(image_data()[0])
    again = use(x)
    x[:] = 0
    assert leaves_equal(found, expected) and leaves_equal(again, expected)


@every_way
def test_a_step_that_is_not_finite_can_be_skipped(way):
    def loss_fn(params, model_state, key, images, labels):
        bad = (images == 255).all(axis=(1, 2, 3)).any() & (model_state == 0)
        root = jnp.sqrt(jnp.where(bad, 0.0, 1.0) * (params.dense.bias[0] ** 2 + 1))
        loss = net_loss(params, images, labels)  # finite; one entry of a gradient not
        return loss + root - jax.lax.stop_gradient(root), model_state + 1

    batches = net_batches(2)
    # A white image, on one replica; a member with another count does not mind.
    batches[0][0][5] = 255
    first = members_state(keys_of(0, way.members))
    first = first._replace(model_state=jnp.arange(way.members))
    run = functools.partial(train, way, loss_fn, first, stateful=True)
    plain, _ = run(batches[:1])
    assert np.isnan(plain.params.dense.bias[0]).tolist() == [True, False, False, False]
    once, (loss,) = run(batches[:1], skip_nonfinite=True)
    assert np.isnan(loss).tolist() == [i == 0 for i in range(way.members)]
    assert leaves_equal(member(once[:3], 0), member(first[:3], 0))
    assert not leaves_equal(once.key[0], first.key[0])
    for i in range(1, way.members):
        assert leaves_equal(member(once, i), member(plain, i))
    twice, (_, loss) = run(batches, skip_nonfinite=True)
    assert np.isfinite(loss).all()
    assert not leaves_equal(member(twice.params, 0), member(first.params, 0))


@every_way
def test_step_refuses_what_would_end_the_process_or_be_wrong(way):
    first, (batch,) = members_state(keys_of(0, way.members)), net_batches(1)
    state, update = start(way, net_loss, first)
    for _ in range(2):
        used, (state, _) = state, update(state, *batch)
    shared = state.opt_state._replace(velocity=state.params)
    names = "'.params.hidden.weight' and '.opt_state.velocity.hidden.weight'"
    for message, bad, rows in (
        ("consumed by an earlier update or epoch; go on with the one", used, batch),
        ("consumed by an", state._replace(opt_state=used.opt_state), batch),
        (f"{names} of the state are one", state._replace(opt_state=shared), batch),
        ("batch is empty; expected one or more", state, [x[:0] for x in batch]),
    ):
        assert re.search(message, said_by(ValueError, update, bad, *rows))
    update(state, *batch)  # nothing was lost


def test_steps_of_replicas_never_pile_up():
    def loss_fn(params, x):  # some tens of milliseconds
        return jnp.sum(jax.lax.fori_loop(0, 60, lambda _, y: y @ x * params, x))

    optimizer = pe.sgd(1e-9)
    update = pe.make_sync_update(loss_fn, optimizer)
    state = pe.replicate(pe.train_state(jnp.float32(1), optimizer))
    losses = []
    for _ in range(4):
        state, loss = update(state, np.full((D, 200, 200), 1e-3, np.float32))
        losses.append(loss)
        assert all(loss.is_ready() for loss in losses[:-1])


def test_host_parameters_survive_a_donated_update():
    params = {"w": np.ones((64, 64), np.float32)}
    state = pe.replicate(pe.train_state(params, SGD))
    update = pe.make_sync_update(lambda p: jnp.sum(p["w"]), SGD)
    for _ in range(3):
        state, _ = update(state)
    assert_array_equal(params["w"], np.ones((64, 64)))
    assert np.asarray(state.params["w"]).max() < 1


def product(params, x):
    return jnp.mean(params * x)


def numbers(keys):
    return members_state(keys, lambda key: jnp.float32(1))


def equal_keys(style):
    keys = keys_of(0, D, style)
    return numbers(keys.at[5].set(keys[1]))


def one_number(num_devices=D, **kwargs):
    return pe.replicate(pe.train_state(jnp.float32(1), SGD, **kwargs), num_devices)


sync, ensemble = pe.make_sync_update, pe.make_ensemble_update
counting = functools.partial(one_number, model_state=jnp.zeros(3))
REFUSED_STEPS = [
    (ensemble, lambda: equal_keys("new"), {}, (D, 2), "members 1 and 5 .*equal.*split"),
    (ensemble, lambda: equal_keys("old"), {}, (D, 2), "members 1 and 5 .*equal.*split"),
    (sync, lambda: numbers(keys_of(0, D)), {}, (D, 2), "0 and 1 have different keys"),
    (sync, one_number, dict(microbatch=4), (D, 6), "batch of 6 .*divide.* of 4; use a"),
    (sync, counting, dict(microbatch=4), (D, 8), "model state.* of 8; use microbatch"),
    (sync, one_number, dict(microbatch=0), (D, 8), "microbatch is 0; expected an int"),
    (sync, one_number, dict(stateful=True), (D, 1), r"train_state\(..., key=key\)"),
    (sync, one_number, dict(microbatch="all"), (D, 8), "'all'; expected an int"),
    (sync, one_number, {}, 16, r"axes .* \[\(8,\), \(16,\)\]; expected the number of"),
    (sync, lambda: one_number(2), {}, (D, 2), r"axes .* \[\(2,\), \(8,\)\]; expected"),
    (sync, lambda: one_number().params, {}, (D, 2), "state is ArrayImpl; expected a"),
    (sync, lambda: pe.train_state(jnp.ones(()), SGD), {}, (D, 2), "of the state have"),
]


@pytest.mark.parametrize("make, make_state, options, shape, message", REFUSED_STEPS)
def test_update_refuses_and_does_not_consume(make, make_state, options, shape, message):
    state = make_state()
    with pytest.raises(ValueError, match=message):
        make(product, SGD, **options)(state, np.ones(shape))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def norm_init(key):
    norm, stats = pe.batch_norm_init(5)
    return (pe.dense_init(key, 3, 5), norm), stats


def norm_forward(params, stats, xs):
    return pe.batch_norm(params[1], stats, pe.dense(params[0], xs), training=True)


def norm_loss(forward):
    def loss_fn(params, stats, key, xs, ys):
        outputs, stats = forward(params, stats, xs)
        return jnp.mean((outputs - ys) ** 2), stats

    return loss_fn


def norm_batch(step):
    # Rows that differ from device to device: statistics of a part are not the batch's.
    xs = randn(step, 48, 2, 3) + np.arange(48)[:, None, None]
    return xs, randn(100 + step, 48, 2, 5)


@pytest.mark.parametrize("kind", ["sync", "trainer"])
def test_replicas_normalize_by_the_statistics_of_the_global_batch(kind):
    ends, key = [], jax.random.key(0)
    batches = [norm_batch(step) for step in range(5)]
    for devices in (1, D):
        way, stats = Way(kind, 1, devices), norm_init(key)[1]
        first = members_state([key], lambda key: norm_init(key)[0], model_state=stats)
        ends.append(train(way, norm_loss(norm_forward), first, batches, stateful=True))
    # A bias before a normalization is nothing but rounding.
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), *ends)


def test_replica_mean_changes_nothing_outside_of_a_step():
    tree = {"a": jnp.arange(3.0)}
    assert leaves_equal(pe.replica_mean(tree), tree)
    assert jax.pmap(pe.replica_mean)(jnp.arange(4.0)).tolist() == [0, 1, 2, 3]


def test_replica_mean_gives_floats_on_any_number_of_replicas():
    types = []

    def loss(w, x):
        half = x.astype(jnp.bfloat16).sum()
        means = pe.replica_mean(((x > 3).sum(), x.max() > 3, 1, half))
        types.append([mean.dtype.name for mean in means])
        return w * means[0]

    make = functools.partial(pe.make_trainer, jax.random.normal, loss, SGD, members=1)
    for trainer, state in (begin(make(devices=n)) for n in (1, 2)):
        trainer.update(state, jnp.arange(8.0))
    loss(1, jnp.arange(8.0))
    assert {*map(tuple, types)} == {("float32", "float32", "float32", "bfloat16")}


def scanned(forward):
    def layer(model, xs):
        outputs, stats = forward(*model, xs)
        return (model[0], stats), outputs

    def through(params, stats, xs):
        (_, stats), outputs = jax.lax.scan(layer, (params, stats), xs[None])
        return outputs[0], stats

    return through


# What keeps what it has traced of a function: JAX takes it again where axes are named
# alike.
KEEPING = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scan": scanned}


def test_what_jax_has_traced_is_not_taken_for_other_replicas():
    forward = jax.jit(norm_forward)  # one function, kept by JAX between the trainers

    key, (params, stats) = jax.random.key(0), norm_init(jax.random.key(0))
    forward(params, stats, norm_batch(0)[0][:6])
    ways = [Way("ensemble", D, D), *(Way("trainer", n, D) for n in (1, 2, D))]
    for way in [*ways, Way("sync", 1, D)]:  # six examples on each device
        batch = [x[: 6 * pe.layout(*way[1:]).replicas] for x in norm_batch(0)]
        keys = jax.random.split(key, way.members)
        first = members_state(keys, lambda key: norm_init(key)[0], model_state=stats)
        losses = [norm_loss(f) for f in (forward, norm_forward)]
        assert_close(*[train(way, f, first, [batch], stateful=True)[1] for f in losses])


KEPT = [
    *(("jit", earlier, 1, 2) for earlier in ("init", "predict", "training")),
    *(("jit", earlier, 2, 4) for earlier in ("init", "predict", "training")),
    *((keep, "init", 1, 2) for keep in ("checkpoint", "scan")),
    *((keep, "training", 2, 4) for keep in ("checkpoint", "scan")),
    *((keep, "by hand", 1, 2) for keep in KEEPING),
]


@cases("keep, earlier, members, devices", *KEPT)
def test_only_training_averages_over_replicas_whatever_was_traced_before(
    keep, earlier, members, devices
):
    xs, ys = (x[:12] for x in norm_batch(0))

    def ends(keep):
        def forward(params, stats, xs):
            return norm_forward(params, stats, xs)

        forward = keep(forward)

        def init(key):
            params, stats = norm_init(key)
            if earlier != "training":  # as others do, by a look at an example
                forward(params, stats, jnp.zeros((6, 2, 3)))
            return params, stats

        def apply_fn(params, stats, xs):
            return forward(params, stats, xs)[0]

        options = dict(members=members, devices=devices, apply_fn=apply_fn, chunk=6)
        options |= dict(stateful=True, output=None)
        trainer = pe.make_trainer(init, norm_loss(forward), SGD, **options)
        state = trainer.init(jax.random.key(0))
        before = trainer.predict(state, xs) if earlier == "predict" else ()
        if earlier == "by hand":
            params, stats = norm_init(KEY)
            first = pe.train_state(params, SGD, model_state=stats, key=KEY)
            update = sync(norm_loss(forward), SGD, stateful=True)
            before = update(pe.replicate(first, devices), *pe.split((xs, ys), devices))[
                1
            ]
        state, losses = trainer.update(state, xs, ys)
        return before, losses, trainer.predict(state, xs)

    assert_close(ends(KEEPING[keep]), ends(lambda forward: forward))


# ---------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------


SPREADS = [
    ((1, 8), (1, 8, 1, 8)),
    ((3, 8), (3, 6, 1, 2)),
    ((5, 8), (5, 5, 1, 1)),
    ((10, 8), (10, 5, 2, 1)),
    # Several processes use all of their devices.
    ((1, 4, 2), (1, 4, 1, 4)),
    ((4, 4, 2), (4, 4, 1, 1)),
    ((5, 4, 2), (5, 4, 2, 1)),
    ((3, 8, 4), (3, 8, 1, 2)),
    ((3, 16, 2), (3, 16, 1, 4)),
    ((2, 6, 3), (2, 6, 1, 3)),
]


@pytest.mark.parametrize("arguments, expected", SPREADS)
def test_layout_is_that_of_the_table(arguments, expected):
    assert pe.layout(*arguments) == expected


@given(st.integers(1, 200), st.integers(1, 200))
def test_layout_uses_its_devices(members, available):
    _, devices, shared, replicas = pe.layout(members, available)
    assert devices <= available and (shared == 1 or replicas == 1)
    slots = devices * shared // replicas
    assert members <= slots < members + shared  # none but the last device has idle ones
    if members >= available:
        assert all(m * available < members for m in range(1, shared))
    else:
        assert devices == members * replicas and devices + members > available


# One member with replicas, several, and more members than devices: the laws hold there.
LAYOUTS = [(1, 4), (2, 4), (5, 3)]
every_layout = pytest.mark.parametrize("members, devices", LAYOUTS)


@functools.cache  # as a trainer's programs go with it
def net_trainer(members, devices=None, loss_fn=net_loss, optimizer=SGD, **options):
    options = dict(apply_fn=net, devices=devices, members=members) | options
    return pe.make_trainer(net_init, loss_fn, optimizer, **options)


def begin(trainer, seed=0):
    return trainer, trainer.init(jax.random.key(seed))


@functools.cache
def noisy_trainer(members, devices, **more):
    """Make a trainer of the net with a count of its steps as model state."""

    def init(key):
        return net_init(key), jnp.zeros((), jnp.int32)

    options = dict(members=members, devices=devices, stateful=True) | more
    return pe.make_trainer(init, noisy_loss, pe.adam(0.01), **options)


def uses(trainer):
    """List the calls that take a state of a trainer, with what they take besides."""
    data = image_data()
    update, epoch = (trainer.update, *data), (trainer.epoch, data, orders(1)[0])
    return [update, epoch, (trainer.predict, data[0]), (trainer.gather,)]


def assert_same(trainer, found, alone):
    """Assert that a member is as alone: to the bit, unless replicas share its batch."""
    if trainer.layout.replicas == 1:
        assert leaves_equal(found, alone)
    else:
        assert_close(found, alone)


def orders(members, epoch=0, batch=24):
    rngs = [np.random.default_rng([epoch, i]) for i in range(members)]
    return np.stack([rng.permutation(NUM_IMAGES).reshape(-1, batch) for rng in rngs])


@functools.cache
def ten_members():
    trainer = net_trainer(10, 1)
    return trainer.gather(trainer.init(jax.random.key(7)))


CALLS = """
import jax, numpy as np, optax, pjax_ensemble as pe
make, data, order = pe.make_trainer, (np.ones((4, 4)),), [[0, 1], [2, 3]]
trainer = make(print, print, optax.adam(1e-3), members=2, apply_fn=pe.dense)
make(print, print, lambda h: pe.sgd(h), members=2, hyper=np.ones(2))
state, losses = trainer.epoch(trainer.init(jax.random.key(0)), data, order)
state, losses = trainer.update(state, *data, per_member=True)
print(trainer.predict(trainer.scatter(trainer.gather(state)), data), trainer.layout)
trainer.epoch(data, state)  # wrong
trainer.epoch(state, data)  # wrong
trainer.update(state, order, per_membr=True)  # wrong
trainer.predict()  # wrong
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
    ini = f"[mypy]\nignore_missing_imports = True\n{skipped}\n"  # for speed
    (tmp_path / "mypy.ini").write_text(ini)
    options = "--hide-error-context", "--cache-dir", os.devnull  # no file to fail at
    command = [sys.executable, "-m", "mypy", *options, "calls.py"]
    env = {**os.environ, "MYPYPATH": str(HERE)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = subprocess.run(command, cwd=tmp_path, env=env, **pipes).stdout
    found = {int(i) for i in re.findall(r"^calls.py:(\d+): error", said, re.MULTILINE)}
    lines = enumerate(CALLS.splitlines(), 1)
    assert found == {i for i, line in lines if line.endswith("# wrong")}, said


def test_help_of_every_method_says_what_it_takes():
    trainer = net_trainer(2, 2)
    methods = {n: f for n, f in inspect.getmembers(trainer, callable) if n[0] != "_"}
    given = {field.name for field in dataclasses.fields(trainer)}
    for name, method in methods.items():
        if name in given:
            continue
        parameters = inspect.signature(method).parameters.values()
        assert all(p.annotation is not p.empty for p in parameters), name
        assert not any(p.name.startswith("_") for p in parameters), name
        assert "[" in method.__doc__, name
        assert type(method).__name__ == "method", name
    assert {"init", "update", "epoch", "place", "predict", "gather"} < {*methods}
    with pytest.raises(dataclasses.FrozenInstanceError):  # it would be ignored
        trainer.chunk = 64
    page = pydoc.render_doc(pe.make_trainer, renderer=pydoc.plaintext)
    assert "output: 'Callable | None' = <" in page
    assert not re.search(r"KW_ONLY|^ \|  _[a-z]|Softmax function", page, re.MULTILINE)


def test_members_of_another_kind_of_key_are_the_same_on_every_layout():
    ends = {}
    for members, devices in ((3, 1), (5, 3)):
        trainer = noisy_trainer(members, devices)
        state = trainer.init(jax.random.key(7, impl="unsafe_rbg"))
        state, _ = trainer.update(state, *net_batches(1)[0])
        gathered = trainer.gather(state)
        for i in range(members):
            one = member(gathered._replace(key=None), i)
            assert leaves_equal(one, ends.setdefault(i, one))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_draw_otherwise_together_are_refused(impl):
    one, key = noisy_trainer(3, 1), jax.random.key(7, impl=impl)
    state, batch = one.init(key), net_batches(1)[0]
    two = noisy_trainer.__wrapped__(3, 1, at_once=2)
    with mock.patch.object(pe, "_run") as run:
        said = [said_by(ValueError, two.init, key)]
        said += [said_by(ValueError, f, state, *args) for f, *args in uses(two)[:2]]
    assert all(f"at_once=2 with keys of {impl}" in each for each in said)
    assert not run.called
    one.update(state, *batch)  # nothing was lost


def test_init_makes_member_i_of_the_key_and_i_alone():
    for members, devices in LAYOUTS:
        trainer = net_trainer(members, devices)
        gathered = trainer.gather(trainer.init(jax.random.key(7)))
        first = jax.tree.map(lambda x, n=members: x[:n], ten_members().params)
        assert leaves_equal(gathered.params, first)
    init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(7), 3))
    assert ten_members().key[3] == key
    assert leaves_equal(member(ten_members().params, 3), jax.jit(net_init)(init_key))


def cnn_loss(params, images, labels):
    logits = pe.cnn(params, images.astype(jnp.float32) / 255)
    return cross_entropy(logits, labels).mean()


def test_members_of_the_cnn_are_the_same_on_every_layout():
    images = np.random.default_rng(0).integers(256, size=(64, 28, 28, 1), dtype="u1")
    data, order = (images, np.arange(64) % 10), orders(3, batch=120) % 64
    ends = {}
    for members, devices in ((1, 1), (3, 2), (2, 4)):
        options = dict(members=members, devices=devices, microbatch=8)
        trainer = pe.make_trainer(pe.cnn_init, cnn_loss, pe.sgd(0.05), **options)
        state = trainer.init(jax.random.key(0))
        state, _ = trainer.epoch(state, data, order[:members, :, :32])
        gathered = trainer.gather(state)
        for i in range(members):
            params = member(gathered.params, i)
            assert_same(trainer, params, ends.setdefault(i, params))


def test_both_forms_of_conv_train_the_cnn_alike_also_together():
    def choose(form, *args, **forms):
        return forms[form](*args)

    init = functools.partial(pe.cnn_init, image_shape=(8, 8, 1), num_classes=4)
    options, ends, first = dict(members=2, devices=1), [], None
    for at_once, form in ((1, "cpu"), (2, "cpu"), (2, "default")):
        made = pe.make_trainer(init, cnn_loss, SGD, at_once=at_once, **options)
        first = first or made.gather(made.init(jax.random.key(0)))
        with mock.patch.object(jax.lax, "platform_dependent") as chosen:
            chosen.side_effect = functools.partial(choose, form)
            state, losses = made.update(made.scatter(first), *net_batches(1, 4)[0])
        assert chosen.called
        ends.append((losses, made.gather(state).opt_state))  # the gradients
        assert_close(ends[-1], ends[0])


def dilated(x, kernel, axes="NHWC HWIO NHWC", strides=None, padding="SAME", **how):
    strides = strides or (1,) * (x.ndim - 2)
    how["dimension_numbers"] = tuple(axes.split())
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, **how)


# Others' convolutions: shapes of images and kernel, and how.
FORMS = {
    "NHWC": ((2, 6, 5, 3), (3, 3, 3, 4), {}),
    "NCHW": ((2, 3, 6, 5), (4, 3, 3, 2), dict(axes="NCHW OIHW NCHW")),
    "any": ((3, 5, 2, 6), (4, 3, 3, 2), dict(axes="CWNH OHIW WCHN")),
    "one axis": ((2, 7, 3), (3, 3, 4), dict(axes="NWC WIO NWC", strides=(2,))),
    "three axes": ((2, 4, 3, 5, 2), (2, 3, 2, 2, 3), dict(axes="NDHWC DHWIO NDHWC")),
    "groups": ((2, 6, 5, 4), (3, 3, 2, 6), dict(strides=(2, 1), feature_group_count=2)),
    "groups NCHW": (
        *((2, 4, 6, 5), (4, 1, 3, 2)),
        dict(axes="NCHW OIHW NCHW", feature_group_count=4),
    ),
    "batch groups": ((4, 6, 5, 2), (3, 3, 2, 6), dict(batch_group_count=2)),
    "dilated": (
        *((2, 6, 5, 3), (3, 3, 3, 4)),
        dict(padding=[(2, 2), (1, 3)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
    "transposed": ((2, 3, 4, 3), (3, 3, 3, 4), None),
}


def forms_in(program, platform, *args):
    """Return the forms of a program's convolutions, as they are lowered."""
    made = export.export(jax.jit(program), platforms=[platform])(*args)
    return find_forms(made.mlir_module())


def find_forms(text):
    return re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text)


def are_canonical(forms):
    last = re.compile(r"\[b, [\d, ]*f\]x\[[\d, ]*i, o\]->\[b, [\d, ]*f\]")
    assert forms
    # JAX 0.5 writes all platforms' branches.
    return jax.__version_info__ < (0, 10) or all(map(last.fullmatch, forms))


@pytest.mark.parametrize("name", FORMS)
def test_any_convolution_is_canonical_on_cpu_and_as_it_was_elsewhere(name):
    x_shape, kernel_shape, how = FORMS[name]
    convolve = functools.partial(dilated, **how or {})
    if how is None:
        convolve = functools.partial(
            jax.lax.conv_transpose, strides=(2, 2), padding="SAME"
        )
    args = randn(0, *x_shape), randn(1, *kernel_shape)
    plain = jax.value_and_grad(lambda *args: jnp.sin(convolve(*args)).sum(), (0, 1))
    fast = pe._fast_in_loops(plain)
    one, other = (
        jax.jit(lambda *a, f=f: (f(*a), jax.vmap(f)(*twice(a)))) for f in (plain, fast)
    )
    assert_close(other(*args), one(*args))
    for f, inputs in (fast, args), (jax.vmap(fast), twice(args)):
        assert are_canonical(forms_in(f, "cpu", *inputs))
    assert {*forms_in(plain, "cuda", *args)} <= {
        *(found := forms_in(fast, "cuda", *args))
    }
    if jax.__version_info__ >= (0, 10):
        assert found == forms_in(plain, "cuda", *args)


def twice(args):
    return [jnp.stack([x, 2 * x]) for x in args]


def nchw(x, kernel):
    return jnp.tanh(dilated(x, kernel, axes="NCHW OIHW NCHW"))


@jax.custom_jvp
def with_jvp(x, kernel):
    return nchw(x, kernel)


with_jvp.defjvp(lambda given, tangents: jax.jvp(nchw, given, tangents))


@jax.custom_vjp
def with_vjp(x, kernel):
    return nchw(x, kernel)


with_vjp.defvjp(
    lambda *args: (nchw(*args), args),
    lambda args, grads: jax.vjp(nchw, *args)[1](grads),
)


def scanned(x, kernel, layer=nchw):
    return jax.lax.scan(lambda x, kernel: (layer(x, kernel), ()), x, kernel[None])[0]


def scanned_constant(x, kernel, layer=nchw):
    return jax.lax.scan(lambda x, _: (layer(x, kernel), ()), x, length=2)[0]


def repeated(x, kernel):
    count = 2 + jnp.int32(x.sum() > 99)  # not known
    return jax.lax.fori_loop(0, count, lambda _, x: nchw(x, kernel), x)


def chosen(x, kernel):
    return jax.lax.cond(x.sum() > 0, nchw, lambda x, k: x * k.sum(), x, kernel)


def solved(x, kernel):
    def solve(matvec, b):
        return matvec(b) + nchw(b, kernel)

    matvec = functools.partial(nchw, kernel=kernel)
    return jax.lax.custom_linear_solve(matvec, x, solve, symmetric=True)


# What a convolution can stand in.
NESTINGS = {
    "jit": jax.jit(nchw),
    "scan": scanned,
    "scan of a constant": scanned_constant,
    "while": repeated,
    "cond": chosen,
    "checkpoint": jax.checkpoint(nchw),
    "jit of scan of checkpoint": jax.jit(
        functools.partial(scanned_constant, layer=jax.checkpoint(nchw))
    ),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "grad": lambda x, k: jax.grad(lambda x: nchw(x, k).sum())(x),
    "vmap": lambda x, k: jax.vmap(nchw)(*twice((x, k))).sum(0),
    "linear solve": solved,
}
NO_GRADIENT = "while", "linear solve"  # of an unknown number, of no linear function


@pytest.mark.parametrize("name", NESTINGS)
def test_convolutions_are_canonical_wherever_they_stand(name):
    function, args = NESTINGS[name], (randn(0, 2, 3, 5, 4), randn(1, 3, 3, 3, 2))
    programs = [function]
    if name not in NO_GRADIENT:
        programs += [jax.value_and_grad(lambda *args: function(*args).sum(), (0, 1))]
    for plain in programs:
        fast = pe._fast_in_loops(plain)
        assert_close(jax.jit(fast)(*args), jax.jit(plain)(*args))
        assert are_canonical(forms_in(fast, "cpu", *args))


def test_programs_without_others_convolutions_are_not_touched():
    images, labels = (x[:4] for x in image_data())
    params = jax.eval_shape(
        lambda key: pe.cnn_init(key, image_shape=(8, 8, 1)), jax.random.key(0)
    )
    programs = [jax.make_jaxpr(pe.cnn)(params, images.astype(np.float32))]
    programs += [jax.make_jaxpr(dilated)(*map(np.ones, FORMS["NHWC"][:2]))]
    grads = jax.value_and_grad(net_loss)
    programs += [jax.make_jaxpr(grads)(net_init(jax.random.key(0)), images, labels)]
    if jax.__version_info__ >= (0, 10):  # 0.5 does not say what is for which platform
        programs += [jax.make_jaxpr(jax.grad(cnn_loss))(params, images, labels)]
    for program in programs:
        assert pe._rewrite(program) is program


def test_functions_are_traced_anew_in_every_program():
    traced = []

    def apply(params, images):  # may depend on what has changed since
        traced.append(1)
        return net(params, images)

    counts = []
    for _ in range(2):
        options = dict(members=2, devices=1, apply_fn=apply)
        trainer, state = begin(pe.make_trainer(net_init, net_loss, SGD, **options))
        trainer.predict(state, image_data()[0][:4])
        counts.append(len(traced))
    assert counts[1] == 2 * counts[0] > 0


class Counted(NamedTuple):
    steps: jax.Array
    key: jax.Array  # a typed one


STEPS_SEEN = []  # where a step was traced, and where it was taken


def counting_loss(params, counted, key, images, labels, rate):
    STEPS_SEEN.append("traced")
    x = images.transpose(0, 3, 1, 2).astype(jnp.float32) / 255
    x = x + 0.1 * rate * jax.random.normal(counted.key, x.shape[2:])[None, None]
    x = jax.lax.scan(
        jax.checkpoint(lambda x, k: (nchw(x, k), ())), x, params["kernels"]
    )[0]
    x = x - pe.replica_mean(x.mean(axis=0))[None]
    logits = jax.jit(nchw)(x, params["head"]).mean(axis=(2, 3))
    jax.debug.callback(lambda steps: STEPS_SEEN.append(int(steps)), counted.steps)
    return cross_entropy(logits, labels).mean(), Counted(
        counted.steps + 1, jax.random.fold_in(counted.key, 0)
    )


def counting_init(key, *_):
    params = {
        "kernels": 0.3 * jax.random.normal(key, (2, 1, 1, 3, 3)),
        "head": jax.random.normal(key, (4, 1, 3, 3)),
    }
    return params, Counted(jnp.int32(0), key)


def counting_apply(params, counted, images, rate):
    x = rate * images.transpose(0, 3, 1, 2).astype(jnp.float32) / 255
    for kernel in params["kernels"]:
        x = nchw(x, kernel)
    return nchw(x, params["head"]).mean(axis=(2, 3))


COUNTING = [(1, 2, 1), (3, 2, 1), (3, 2, 2), "sync", "ensemble"]


@pytest.mark.parametrize("way", COUNTING, ids=str)
def test_training_with_others_convolutions_changes_nothing_but_their_form(way):
    """Effects, typed keys, averages, hyper and the number of traces with them."""
    run, ends = pe._run, []

    def lower_and_run(program, meet, *args):
        forms.append(find_forms(program.lower(*args).as_text()))
        return run(program, meet, *args)

    for rewrite in pe._rewrite, lambda x: x:
        forms = []
        STEPS_SEEN.clear()
        with mock.patch.multiple(pe, _rewrite=rewrite, _run=lower_and_run):
            ends.append(counting_run(way))
        jax.effects_barrier()
        ends[-1]["calls"] = sorted(map(str, STEPS_SEEN))
        forms = [x for x in forms if x]
        assert len(forms) == (2 if isinstance(way, str) else 3)
        assert rewrite is not pe._rewrite or all(map(are_canonical, forms))
    for name in "keys", "calls":
        found, expected = (end.pop(name) for end in ends)
        assert leaves_equal(found, expected) if name == "keys" else found == expected
    assert_close(*ends, 1e-4)


def counting_run(way):
    images, labels = (x[:8] for x in image_data())
    if isinstance(way, str):
        make = pe.make_sync_update if way == "sync" else pe.make_ensemble_update
        loss_fn = functools.partial(counting_loss, rate=1)
        update = make(
            lambda *args: loss_fn(*args), SGD, stateful=True, skip_nonfinite=True
        )
        params, counted = counting_init(jax.random.key(0))
        state = pe.train_state(params, SGD, model_state=counted, key=jax.random.key(1))
        state = pe.replicate(state, 2)
        if way == "ensemble":
            state = state._replace(key=jax.random.split(jax.random.key(1)))
        losses = []
        for _ in range(2):
            state, loss = update(state, *pe.split((images, labels), 2))
            losses.append(loss)
        keys = state.key, state.model_state.key
        return {"params": state.params, "losses": losses, "keys": keys}
    members, devices, at_once = way
    trainer = pe.make_trainer(
        *(counting_init, counting_loss, lambda rate: pe.sgd(0.1 * rate)),
        **dict(members=members, devices=devices, at_once=at_once, stateful=True),
        **dict(hyper=np.linspace(0.5, 1, members), apply_fn=counting_apply, chunk=4),
        skip_nonfinite=True,
    )
    state, losses = trainer.update(trainer.init(jax.random.key(0)), images, labels)
    state, more = trainer.epoch(state, (images, labels), np.arange(8).reshape(2, 4))
    ends = trainer.gather(state)
    probs = trainer.predict_members(state, images)
    assert_array_equal(ends.model_state.steps, np.full(members, 3))
    keys = ends.key, ends.model_state.key
    ends = {"params": ends.params, "losses": (losses, more)}
    return ends | {"probs": probs, "keys": keys}


# How many convolutions a network's step and its predictions have: two and their three
# gradients, three and their five.
CONVOLUTIONS = [("cnn", 5, 2), ("batchnorm", 8, 3)]


@pytest.mark.parametrize("network, step, predicted", CONVOLUTIONS)
def test_programs_lowered_for_other_platforms_convolve(network, step, predicted):
    def lower(program, _, *args):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        for name in expected:
            text = export.export(program, platforms=[name])(*shapes).mlir_module()
            found[name] = text.count("stablehlo.convolution")
            assert name == "cpu" or "_group_count = 2" in text  # of two members at once
        raise InterruptedError  # it need not run

    form = {"image_shape": (8, 8, 1), "classes": range(4)}
    recipe = tm.RECIPES[network]._replace(at_once=2)
    made = tm.make_trainer(recipe, 4, 2, 10, form)
    state, (images, labels) = made.init(jax.random.key(0)), net_batches(1, 4)[0]
    calls = [(made.update, step, images, labels), (made.predict, predicted, images)]
    calls += [(made.epoch, step, (images, labels), np.arange(4)[None])]
    for call, count, *args in calls:
        found, expected = {}, {"cuda": count, "tpu": count}
        if jax.__version_info__ < (0, 10):  # it writes what is for CPUs too
            both = 2 * count - predicted if count == step else count
            expected = dict.fromkeys(expected, both)
        elif count == predicted:
            expected["cpu"] = 0
        with mock.patch.object(pe, "_run", lower), pytest.raises(InterruptedError):
            call(state, *args)
        assert found == expected


@every_layout
def test_epoch_is_an_update_for_each_row_of_the_order(members, devices):
    trainer, order = noisy_trainer(members, devices), orders(1)[0]
    key, data = jax.random.key(1), trainer.place(image_data())
    state, losses = trainer.epoch(trainer.init(key), data, order)
    assert losses.shape == (members, len(order))
    slow = trainer.init(key)
    for i, rows in enumerate(order):
        slow, loss = trainer.update(slow, *(x[rows] for x in image_data()))
        assert loss.shape == (members,)
        assert_close(loss, losses[:, i])
    a, b = trainer.gather(state), trainer.gather(slow)
    assert_array_equal(a.model_state, np.full(members, len(order)))
    assert_close(a.params, b.params)
    assert leaves_equal(a.key, b.key)
    # An order for each member, all equal, is the order for all.
    each = np.stack([order] * members)
    state, again = trainer.epoch(trainer.init(key), image_data(), each)
    assert leaves_equal(trainer.gather(state).params, a.params)
    assert leaves_equal(again, losses)
    each[1:] = order[::-1]  # the first member's is as it was, the others' are not
    _, again = trainer.epoch(trainer.init(key), image_data(), each)
    same = [leaves_equal(*both) for both in zip(again, losses)]
    assert same == [i == 0 for i in range(members)]


@every_layout
def test_an_epoch_in_pieces_ends_in_the_same_bits(members, devices):
    trainer, order = noisy_trainer(members, devices), orders(members)
    ends = []
    for cuts in ([], [1, 3], [5]):
        state, losses = trainer.init(jax.random.key(1)), []
        for part in np.split(order, cuts, axis=1):
            state, loss = trainer.epoch(state, image_data(), part)
            assert loss.shape == part.shape[:2]
            losses.append(loss)
        ends.append((trainer.gather(state), np.concatenate(losses, axis=1)))
    assert leaves_equal(ends[0], ends[1]) and leaves_equal(ends[0], ends[2])


def test_epochs_share_a_program_reuse_the_state_and_leave_the_data_where_they_are():
    traces = []

    def counted(params, images, labels):
        traces.append(images.dtype)
        return net_loss(params, images, labels)

    trainer = net_trainer(3, 2, loss_fn=counted)
    state, data = trainer.init(jax.random.key(0)), trainer.place(image_data())
    for x, y in zip(data, trainer.place(data)):
        pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
        again = [s.data.unsafe_buffer_pointer() for s in y.addressable_shards]
        assert pointers == again
    order = orders(3)
    state, _ = trainer.epoch(state, data, order)
    count, before = len(traces), jax.tree.leaves(state)
    for size in (1, 3, 10):
        state, _ = trainer.epoch(state, data, order[:, :size])
    trainer.epoch(state, image_data(), order)
    assert len(traces) == count > 0 and set(traces) == {np.dtype("uint8")}
    assert all(x.is_deleted() for x in before)


def test_probabilities_of_half_precision_are_distributions():
    def half(*args):  # logits [B, 2, 2]
        return (9 * net(*args)).astype(jnp.bfloat16).reshape(-1, 2, 2)

    trainer, state = begin(net_trainer(2, 2, apply_fn=half))
    probs = trainer.predict_members(state, image_data()[0])
    assert em.predictive_entropy(probs).shape == (NUM_IMAGES, 2)


SMALL_TYPES = ["int4", "uint4", "float8_e4m3fn", "float16", "bfloat16", "bool", "int32"]


@pytest.mark.parametrize("name", SMALL_TYPES)
def test_means_of_any_type_are_of_float32(name):
    options = dict(apply_fn=lambda params, x: x.astype(name), output=None)
    (trainer, state), x = begin(net_trainer(2, **options)), np.array([0, 1, 3])
    assert trainer.predict_members(state, x).dtype == np.dtype(name)
    found = trainer.predict(state, x)
    assert found.dtype == np.float32
    assert found.tolist() == ([0, 1, 1] if name == "bool" else [0, 1, 3])


def test_a_member_that_is_not_finite_leaves_the_others_predictions():
    (trainer, state), images = begin(net_trainer(5, 3, chunk=7)), image_data()[0]
    gathered = trainer.gather(state)
    probs = trainer.predict_members(state, images)
    gathered.params.dense.weight[1] = np.nan
    state = trainer.scatter(gathered)
    spoiled = trainer.predict_members(state, images)
    assert np.isnan(spoiled[1]).all() and np.isnan(trainer.predict(state, images)).all()
    others = [0, 2, 3, 4]
    assert leaves_equal(spoiled[others], probs[others])


@every_layout
def test_a_state_is_the_same_to_a_program_wherever_it_comes_from(members, devices):
    traces = []

    def counted(*args):
        traces.append(1)
        return net(*args)

    def loss_fn(params, images, labels):
        return cross_entropy(counted(params, images), labels).mean()

    options = dict(loss_fn=loss_fn, apply_fn=counted)
    trainer = net_trainer.__wrapped__(members, devices, **options)
    batch = net_batches(1)[0]

    def use(state):
        trainer.predict(state, batch[0])
        state, _ = trainer.update(state, *batch)
        return trainer.epoch(state, batch, np.arange(16)[None])[0]

    state = use(trainer.init(KEY))
    known = len(traces)
    state, _ = trainer.update(use(state), *batch)
    use(trainer.scatter(trainer.gather(use(state))))
    assert len(traces) == known > 0


def test_predicting_compiles_few_programs_and_holds_one_chunk_at_a_time():
    shapes = []

    def apply_fn(params, images):
        shapes.append(images.shape)
        return net(params, images)

    trainer, state = begin(net_trainer(2, 4, apply_fn=apply_fn, chunk=5))
    # On two replicas: of few rows a power of two each, else chunks of five.
    for count in (1, 3, 10, 23):
        assert trainer.predict(state, image_data()[0][:count]).shape == (count, 4)
    assert [*dict.fromkeys(len_of for len_of, *_ in shapes)] == [1, 2, 5]
    traced = len(shapes)
    for count in (2, 4, 9, 11, 31, 40):
        trainer.predict(state, image_data()[0][:count])
    assert len(shapes) == traced


@pytest.mark.parametrize("members, devices", [(1, 4), (2, 4), (3, 2)])
def test_predictions_do_not_depend_on_the_rows_that_go_with_them(members, devices):
    images = image_data()[0][:235]
    trainer, state = begin(net_trainer(members, devices, chunk=3))
    whole = trainer.predict(state, images), trainer.predict_members(state, images)
    alone = trainer.predict_members(state, images[17:18])
    with mock.patch.object(pe, "_BLOCK_CHUNKS", 2):  # several, the last not full
        blocks = trainer.predict(state, images), trainer.predict_members(state, images)
    assert leaves_equal(whole, blocks)
    assert_close(alone, whole[1][:, 17:18])  # a chunk of one may round otherwise
    inputs = {"images": images, "none": np.ones((len(images), 0))}
    without = net_trainer(members, devices, apply_fn=lambda p, x: net(p, x["images"]))
    assert_close(without.predict(state, inputs), whole[0])


def test_a_block_of_predictions_is_bounded_by_what_goes_in_and_out(monkeypatch):
    calls, run = [], pe._run
    monkeypatch.setattr(pe, "_run", lambda *args: calls.append(1) or run(*args))
    trainer, state = begin(net_trainer(4, 2, chunk=2))
    # In go 2 x 64 bytes a chunk, out come 2 x 4 floats of each of two members.
    for most, expected in ((191, 8), (192 + 191, 8), (2 * 192, 4), (4 * 192, 2)):
        monkeypatch.setattr(pe, "_BLOCK_BYTES", most)
        calls.clear()
        trainer.predict_members(state, image_data()[0][:16])
        assert len(calls) == expected


def tree_init(key):
    keys = jax.random.split(key)
    return jax.random.normal(keys[0], (9, 4)), jax.random.normal(keys[1], (2, 3))


def tree_apply(params, inputs):  # tokens [B, 5], position [B, 2], keys [B]: any tree
    table, weight = params
    rows = table[inputs["tokens"]]  # [B, 5, 4]
    moved = (inputs["position"] @ weight)[:, 0]
    outputs = {"tokens": rows, "moved": moved, "best": rows.argmax(axis=-1)}
    outputs["half"] = rows.astype(jnp.bfloat16)
    outputs["none"] = 1 + inputs["none"]
    outputs["drawn"] = jax.vmap(jax.random.normal)(inputs["keys"])
    return outputs | {"log": jnp.log(jax.nn.relu(rows))}  # some -inf


@pytest.mark.filterwarnings("error")  # as of integers of 64 bits
@every_layout
def test_predictions_are_any_tree_of_any_tree(members, devices):
    options = dict(members=members, devices=devices, apply_fn=tree_apply, output=None)
    made = pe.make_trainer(tree_init, net_loss, SGD, chunk=3, **options)
    trainer, state = begin(made)
    params, rng = trainer.gather(state).params, np.random.default_rng(0)
    for count in (1, 12, 13):
        inputs = {"position": randn(1, count, 2), "keys": keys_of(2, count)}
        inputs["tokens"] = rng.integers(9, size=(count, 5))
        inputs["none"] = np.ones((count, 0))
        found = trainer.predict_members(state, inputs)
        alone = [jax.jit(tree_apply)(member(params, k), inputs) for k in range(members)]
        expected = jax.tree.map(lambda *x: np.stack(x), *alone)
        finite = functools.partial(jax.tree.map, lambda x: np.maximum(x, -99))
        assert_close(finite(found), finite(expected))
        same = jax.tree.map(lambda x, y: x.dtype == y.dtype, found, expected)
        assert jax.tree.all(same)
        mean = jax.tree.map(lambda x: np.float32(x).mean(axis=0), expected)
        assert_close(finite(trainer.predict(state, inputs)), finite(mean))


SOFTMAX, ALONE = jax.nn.softmax, r"outputs have .*\[\(\)\]; expected 32, one"
REFUSED_OUTPUTS = [
    (lambda p, x: (x * p, x), SOFTMAX, r"\(\(32, 4\), \(32, 4\)\); .* output=None"),
    (lambda p, x: x[:, 0] * p, SOFTMAX, r"shapes \(32,\); the softmax takes logits"),
    (lambda p, x: x[:, :1] * p, SOFTMAX, r"shapes \(32, 1\); the softmax"),
    (lambda p, x: (x * p).mean(), None, ALONE),
    (lambda p, x: x * p, jnp.mean, ALONE),
]


@pytest.mark.parametrize("apply_fn, output, message", REFUSED_OUTPUTS)
def test_outputs_must_be_one_of_each_example(apply_fn, output, message):
    options = dict(members=2, apply_fn=apply_fn, output=output)
    trainer = pe.make_trainer(lambda key: jnp.ones(()), net_loss, SGD, **options)
    state = trainer.init(jax.random.key(0))
    for predict in (trainer.predict, trainer.predict_members):
        said = said_by(ValueError, predict, state, np.ones((128, 4), np.float32))
        assert re.search(message, said)


LOSSES = {
    "sum": lambda logits, y: cross_entropy(logits, y).sum(),
    "InfoNCE": lambda z, y: cross_entropy(z @ z.T, jnp.arange(len(y))).mean(),
    "unmasked": lambda logits, y: cross_entropy(logits, y).mean(where=y > 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_default_is_the_loss_of_the_whole_batch(name):
    def loss_fn(params, images, labels):
        return LOSSES[name](net(params, images), labels)

    trainer, state = begin(net_trainer(2, 2, loss_fn=loss_fn))
    params, batch = trainer.gather(state).params, net_batches(1, 128)[0]
    _, losses = trainer.update(state, *batch)
    assert_close(losses, [loss_fn(member(params, k), *batch) for k in range(2)])


def test_few_leaves_are_not_taken_for_as_many_arguments():
    x, y = randn(0, 2, 6)  # a state of two leaves and a batch of two
    init = functools.partial(jax.random.normal, shape=())

    def loss_fn(w, x, y):
        return jnp.mean((w * x - y) ** 2)

    options = dict(apply_fn=jnp.multiply, output=None, members=1, devices=2)
    trainer, state = begin(pe.make_trainer(init, loss_fn, optax.sgd(0.1), **options))
    w = trainer.gather(state).params[0]
    assert_close(trainer.predict(state, x), w * x)
    assert_close(trainer.update(state, x, y)[1], [np.mean((w * x - y) ** 2)])


def own_batches(members, count=3, batch=24):
    rows = [order[:count] for order in orders(members, 0, batch)]
    return [[x[step] for x in image_data()] for step in np.stack(rows, axis=1)]


@pytest.mark.parametrize("per_member", [False, True])
def test_batch_may_come_from_any_devices(per_member):
    trainer, placed = net_trainer(5, 3), net_trainer(3, 3).place
    batch = own_batches(5)[0] if per_member else net_batches(1)[0]
    ends = []
    for put in (list, lambda x: jax.device_put(x, jax.devices()[7]), placed):
        _, state = begin(trainer)
        ends.append(trainer.update(state, *put(batch), per_member=per_member))
    assert leaves_equal(ends[0], ends[1]) and leaves_equal(ends[0], ends[2])


class Own(NamedTuple):
    """What members differ in, in the tests: each function of the user's uses some."""

    spread: float  # of the weights
    decay: float
    rate: float
    temperature: float


HYPER = Own(*np.float32(np.random.default_rng(5).uniform(0.1, 0.9, size=(4, 10))))


@functools.cache
def full_trainer(
    which,
    devices,
    at_once=1,
    *,
    statistics=False,
    adam=False,
    dtype="float32",
    **options,
):
    """Make a trainer of some members of HYPER, with all that a trainer takes.

    Every function takes the member's own; the second member is spoiled now and then.
    The network has dropout, or statistics of the batch.
    """
    norm, stats = pe.batch_norm_init(6)

    def forward(params, stats, images, key=None):
        x = images.reshape(len(images), -1) / 255
        x = jax.nn.relu(pe.dense(params.hidden, x))
        if statistics:
            x, stats = pe.batch_norm(norm, stats, x, training=key is not None)
        else:
            x = pe.dropout(key, x)
        return pe.dense(params.dense, x), stats

    def init(key, h):
        params = jax.tree.map(lambda x: (h.spread * x).astype(dtype), net_init(key))
        return params, stats if statistics else ()

    def loss_fn(params, stats, key, images, labels, h):
        logits, stats = forward(params, stats, images, key)
        penalty = h.decay * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        spoiled = (h.rate == HYPER.rate[1]) & (images[:, 0, 0, 0] > 250)
        losses = jnp.where(spoiled, jnp.nan, cross_entropy(logits, labels) + penalty)
        return losses.mean(), (stats, {"penalty": penalty, "label": labels.mean()})

    def apply_fn(params, stats, inputs, h):
        logits, _ = forward(params, stats, inputs["images"])
        return logits / h.temperature * inputs["scale"][:, None]

    def optimizer(h):
        if adam:
            return optax.adamw(0.1 * h.rate, weight_decay=h.decay)
        return pe.sgd(pe.cosine_schedule(h.rate, 20), momentum=h.rate)

    options |= dict(hyper=jax.tree.map(lambda x: x[[*which]], HYPER), devices=devices)
    options |= dict(members=len(which), at_once=at_once, apply_fn=apply_fn, chunk=4)
    options |= dict(stateful=True, has_aux=True, skip_nonfinite=True)
    return pe.make_trainer(init, loss_fn, optimizer, **options)


# Where and beside whom member 1 takes steps: others, devices, how many at once; how
# many steps, 1 by `update`, and whether on rows of each member's own.
PLACES = [
    ((0, 2), 1, 1, 3, True),
    ((0, 2), 1, 1, 1, False),
    ((0, 2, 3, 4), 3, 1, 2, False),
    ((0, 2, 3, 4), 3, 1, 1, True),
    ((0, 2, 3), 2, 2, 3, True),
    ((), 8, 1, 2, False),  # replicas, two of each part
    ((2,), 4, 1, 3, True),  # of a part each
    ((2,), 4, 1, 1, False),
]
# Dropout, in parts that are the same on all of these, and statistics of the batch; in a
# few places another optimizer and another type.
KINDS = [
    (dict(microbatch=3), PLACES),
    (dict(statistics=True), PLACES),
    (dict(microbatch=3, adam=True, dtype="bfloat16"), [*PLACES[:2], PLACES[-1]]),
]
PIECES = [
    st.tuples(st.just(kind), st.lists(st.sampled_from(places), min_size=2, max_size=5))
    for kind, places in KINDS
]


def taken(tree, which):
    return jax.tree.map(lambda x: x[np.array(which, int)], tree)


@pytest.mark.filterwarnings("ignore:a batch of")
@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(st.one_of(PIECES))
def test_a_member_ends_alike_wherever_and_beside_whomever_its_steps_are_taken(
    tmp_path_factory, history
):
    kind, pieces = history
    path, (*_, counts, _) = tmp_path_factory.mktemp("law") / "all", zip(*pieces)
    shape, old = (5, sum(counts), 12), jax.random.PRNGKey(3)
    rows = np.random.default_rng(sum(counts)).integers(NUM_IMAGES, size=shape)
    alone, everyone = (full_trainer(which, 1, **kind) for which in ((1,), (*range(5),)))
    first = everyone.gather(everyone.init(old))
    ended, found, start, exact = taken(first, [1]), [], 0, True
    state, expected = alone.epoch(alone.scatter(ended), image_data(), rows[1])
    for others, devices, at_once, count, own in pieces:
        trainer = full_trainer((*others, 1), devices, at_once, **kind)
        exact &= trainer.layout.replicas == at_once == 1
        here = jax.tree.map(lambda *x: np.concatenate(x), taken(first, others), ended)
        here = trainer.scatter(here)
        now = rows[[*others, 1] if own else 1, start : start + count]
        if count > 1:
            here, metrics = trainer.epoch(here, image_data(), now)
        else:
            batch = [x[now[..., 0, :]] for x in image_data()]
            here, metrics = trainer.update(here, *batch, per_member=own)
        found.append(jax.tree.map(lambda x: np.ravel(x[-1]), metrics))
        pe.save(path, trainer.gather(here))
        ended, start = taken(pe.load(path, trainer.like(old)), [-1]), start + count
    found = jax.tree.map(lambda *x: np.concatenate(x)[None], *found)
    close = functools.partial(assert_close, tolerance=0.05 if "dtype" in kind else 1e-5)
    close(*(jax.tree.map(np.nan_to_num, x) for x in (found, expected)))
    close(ended, alone.gather(state))
    assert not exact or leaves_equal(ended, alone.gather(state))
    inputs = {"images": image_data()[0][:9], "scale": randn(0, 9)}
    probs = trainer.predict_members(here, inputs)
    close(probs[-1:], alone.predict_members(state, inputs))
    assert_close(trainer.predict(here, inputs), probs.mean(axis=0))


def test_a_batch_in_fewer_parts_than_replicas_is_warned_of():
    (trainer, state), (batch,) = begin(net_trainer(1, 8)), net_batches(1, 12)
    message = "a batch of 12 is divided into 4 parts, not 8, .* such as 8, use them all"
    with pytest.warns(UserWarning, match=message) as said:
        state, _ = trainer.update(state, *batch)
        trainer.epoch(state, batch, np.arange(12)[None])
    assert [each.filename for each in said] == [__file__] * 2


def test_at_once_changes_no_bit_of_members_that_share_no_device():
    ends = []
    for made in (noisy_trainer(2, 4, at_once=n) for n in (1, 2)):
        state = made.init(jax.random.key(1))
        state, losses = made.epoch(state, image_data(), orders(1)[0])
        ends.append((made.gather(state), losses))
    assert leaves_equal(*ends)


@cases("at_once, together", (1, 1), (2, 2), (9, 4))
def test_at_once_is_how_many_members_are_mapped_together(at_once, together):
    sizes = {1}  # what stays where no vmap is

    @jax.custom_batching.custom_vmap
    def same(x):
        return x

    @same.def_vmap
    def count(size, is_mapped, x):
        sizes.add(size)
        return x, is_mapped[0]

    options = dict(at_once=at_once, apply_fn=lambda p, x: same(net(p, x)))
    trainer, state = begin(net_trainer(4, 1, **options))
    trainer.predict(state, image_data()[0][:1])
    assert max(sizes) == together


def test_a_sweep_trains_as_plain_numbers_do():
    def losses(optimizer, **hyper):
        functions = lambda key, *h: net_init(key), lambda *args: net_loss(*args[:3])
        made = pe.make_trainer(*functions, optimizer, members=2, devices=2, **hyper)
        return made.epoch(begin(made)[1], image_data(), orders(1)[0])[1]

    hyper = {"learning_rate": np.array([0.1, 0.2]), "momentum": np.array([0.9, 0.0])}
    found = losses(lambda h: NESTEROV(**h), hyper=hyper)
    for k in range(2):
        plain = NESTEROV(**{name: x.tolist()[k] for name, x in hyper.items()})
        assert_close(found[k], losses(plain)[k])


@cases("members, devices, at_once", (3, 2, 1), (4, 2, 2), (2, 4, 1))
def test_what_is_frozen_is_shared_by_all_and_trained_by_none(members, devices, at_once):
    frozen = jax.tree.map(np.asarray, net_init(jax.random.key(9)).hidden)
    closed_over = jax.tree.map(jnp.asarray, frozen)

    def full(params, backbone):
        return Net(backbone, params)

    def make(*given, **more):
        def backbone(rest):
            return rest[-1] if more else closed_over

        def loss_fn(params, images, labels, h, *rest):
            return net_loss(full(params, backbone(rest)), images, labels) + 0 * h

        def init(key, h, *rest):
            return jax.tree.map(
                jnp.add, pe.dense_init(key, 6, 4), Dense4(backbone(rest))
            )

        options = dict(members=members, devices=devices, at_once=at_once, **more)
        options |= dict(hyper=np.float32(np.linspace(0.1, 0.4, members)))
        options["apply_fn"] = lambda p, x, h, *rest: net(full(p, backbone(rest)), x)
        return pe.make_trainer(init, loss_fn, pe.sgd, **options)

    def Dense4(backbone):
        return pe.Dense(backbone.weight[:6, :4], backbone.bias[:4])

    ends = []
    for made in (make(frozen=frozen), make()):
        trainer, state = begin(made)
        state, losses = trainer.epoch(state, image_data(), orders(1)[0])
        state, loss = trainer.update(state, *net_batches(1)[0])
        probs = trainer.predict_members(state, image_data()[0][:9])
        ends.append((losses, loss, probs, trainer.gather(state)[:3]))
    assert_close(*ends)


def test_what_is_frozen_is_copied_and_in_no_program():
    def lower(program, _, *args):
        texts.append(program.lower(*args).as_text())
        return run(program, _, *args)

    def loss_fn(w, x, frozen):
        return jnp.mean((x @ frozen @ w) ** 2)

    texts, run, frozen = [], pe._run, aligned(randn(0, 400, 4))
    options = dict(members=2, devices=2, frozen=frozen, output=None)
    with mock.patch.object(pe, "_run", lower):
        trainer = pe.make_trainer(
            lambda key, frozen: jax.random.normal(key, (4, 4)) + frozen[:4],
            loss_fn,
            SGD,
            apply_fn=lambda w, x, frozen: x @ frozen @ w,
            **options,
        )
        x = randn(1, 8, 400)
        expected = x @ frozen
        frozen[:] = np.nan
        state, losses = trainer.update(trainer.init(KEY), x)
        weights = trainer.gather(state).params
        state, _ = trainer.epoch(state, (x,), np.arange(8).reshape(2, 4))
        found = trainer.predict_members(trainer.scatter(trainer.gather(state)), x)
    assert np.isfinite(losses).all() and np.isfinite(weights).all()
    for one, w in zip(found, trainer.gather(state).params):
        assert_close(one, expected @ w)
    assert len(texts) == 4 and max(map(len, texts)) < 100_000
    assert not any(re.search(r"dense<[^>]{1000}", text) for text in texts)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_chosen_members_are_those_of_either_state_with_their_keys(make):
    trainer = noisy_trainer(4, 2)
    state = trainer.init(make(3))
    old = trainer.gather(state)
    before = jax.tree.map(np.copy, old._replace(key=None))
    new = trainer.gather(trainer.update(state, *net_batches(1)[0])[0])
    better = np.array([False, True, True, False])
    chosen = pe.choose_members(better, new, old)
    for k in range(4):
        assert leaves_equal(member(chosen, k), member(new if better[k] else old, k))
    assert chosen.key.dtype == old.key.dtype
    for leaf in jax.tree.leaves(chosen._replace(key=None)):
        leaf[:] = 0  # the chosen ones' alone
    assert leaves_equal(old._replace(key=None), before)
    trainer.scatter(pe.choose_members([True] * 4, new, old))
    other = new._replace(params=jax.tree.map(lambda x: x[:2], new.params))
    for args, message in (
        (([1, 0, 0, 1], new, old), r"better is int64\[4\]; expected bool\[K\]"),
        (([[True]] * 4, new, old), r"better is bool\[4, 1\]"),
        (([True], new, old), r"states and better have lengths \[\(1,\), \(4,\)\]"),
        ((True, new, old), r"lengths \[\(\), \(4,\)\]"),
        ((better, other, old), "^new is TrainState.* expected one form$"),
    ):
        assert re.search(message, said_by(ValueError, pe.choose_members, *args))


def test_form_of_what_is_gathered_is_known_before():
    for make in (jax.random.key, jax.random.PRNGKey):
        for trainer in (noisy_trainer(3, 2), full_trainer((0, 1), 4)):
            gathered = trainer.gather(trainer.init(make(0)))
            form = (
                trainer.like(make(5)) if make is jax.random.PRNGKey else trainer.like()
            )
            assert jax.tree.structure(form) == jax.tree.structure(gathered)
            for one, other in zip(jax.tree.leaves(form), jax.tree.leaves(gathered)):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert isinstance(one, jax.ShapeDtypeStruct)


def test_an_ensemble_is_exported_for_batches_of_any_size():
    init = functools.partial(pe.cnn_init, image_shape=(8, 8, 1), num_classes=4)
    options = dict(members=2, devices=1, apply_fn=pe.cnn)
    trainer, state = begin(pe.make_trainer(init, cnn_loss, SGD, **options))
    params, images = trainer.gather(state).params, randn(0, 5, 8, 8, 1)

    def mean_probs(images):
        logits = jax.vmap(pe.cnn, (0, None))(params, images)
        return jax.nn.softmax(logits).mean(axis=0)

    (n,) = export.symbolic_shape("n")
    form = jax.ShapeDtypeStruct((n, 8, 8, 1), jnp.float32)
    platforms = ["cpu", "cuda", "tpu"]
    exported = export.export(jax.jit(mean_probs), platforms=platforms)(form)
    for count in (1, 5):
        found = exported.call(images[:count])
        assert_close(found, trainer.predict(state, images[:count]))


def heads_init(pretrained):
    def init(key, new_head):
        head = pe.dense_init(key, 6, 4)
        keep = functools.partial(jnp.where, new_head)
        return pretrained._replace(dense=jax.tree.map(keep, head, pretrained.dense))

    return init


@pytest.mark.parametrize("devices", [2, 6])
def test_members_start_from_given_weights_some_with_new_heads(devices):
    trained = net_init(jax.random.key(9))  # on a device
    options = dict(members=3, devices=devices, hyper=np.array([False, True, True]))
    functions = lambda p, x, y, h: net_loss(p, x, y), lambda h: SGD
    trainer, state = begin(pe.make_trainer(heads_init(trained), *functions, **options))
    found = trainer.gather(state).params
    assert all(leaves_equal(member(found.hidden, k), trained.hidden) for k in range(3))
    heads = [member(found.dense.weight, k) for k in range(3)]
    assert leaves_equal(heads[0], trained.dense.weight)
    assert len({head.tobytes() for head in heads}) == 3
    state, _ = trainer.update(state, *net_batches(1)[0])
    trainer.update(trainer.scatter(trainer.gather(state)), *net_batches(1)[0])
    assert np.isfinite(trained.hidden.weight).all()  # not consumed


def test_members_that_cannot_differ_are_warned_of_once():
    batch, order = net_batches(1)[0], orders(2)
    twice = np.stack([order[0]] * 2)

    def warned(call, *args, init=lambda *_: net_init(jax.random.key(0)), **options):
        options = dict(loss_fn=net_loss, optimizer=SGD, members=2) | options
        trainer = pe.make_trainer(init, **options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call(trainer, trainer.init(jax.random.key(0)), *args)
            at_first = len(found)
            metrics = call(trainer, trainer.init(jax.random.key(0)), *args)[1]
        assert len(found) == at_first
        assert all(w.filename == __file__ for w in found)
        assert all("the 2 members have equal weights" in str(w.message) for w in found)
        different = {x.tobytes() for x in np.asarray(metrics)}
        assert (len(different) < len(metrics)) == bool(found)
        return len(found)

    update, epoch, data = pe.Trainer.update, pe.Trainer.epoch, image_data()
    own = functools.partial(update, per_member=True)
    assert warned(update, *batch) == 1
    assert warned(own, *own_batches(2)[0]) == 0
    assert warned(epoch, data, order[0]) == warned(epoch, data, twice) == 1
    assert warned(epoch, data, order) == warned(epoch, data, order, devices=4) == 0
    stateful = dict(loss_fn=noisy_loss, stateful=True)
    stateful["init"] = lambda key: (net_init(jax.random.key(0)), jnp.zeros(()))
    assert warned(update, *batch, **stateful) == 0
    assert warned(update, *batch, members=1) == 0
    sweep = dict(hyper=np.float32([1, 2]), optimizer=pe.sgd)
    sweep["loss_fn"] = lambda params, images, labels, rate: rate
    assert warned(update, *batch, **sweep) == 0


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_members_move_to_any_devices(make):
    def advance(trainer, state, step):
        state, _ = trainer.epoch(state, image_data(), orders(4, step))
        return trainer.update(state, *net_batches(1)[0])[0]

    key, moves = make(3), (1, 4, 3) if make is jax.random.key else (1,)
    stay = noisy_trainer(4, 2)
    state = stay.init(key)
    gathered = stay.gather(state)
    for step, devices in enumerate(moves):
        state, now = advance(stay, state, step), noisy_trainer(4, devices)
        gathered = now.gather(advance(now, now.scatter(gathered), step))
        arrays = jax.tree.leaves(gathered._replace(key=None))
        assert all(isinstance(x, np.ndarray) and len(x) == 4 for x in arrays)
    assert gathered.key.dtype == key.dtype
    assert leaves_equal(gathered, stay.gather(state))
    eight = noisy_trainer(4, 8)  # two replicas each
    assert leaves_equal(eight.gather(eight.scatter(gathered)), gathered)


@cases("ours, theirs", ((4, 2), (3, 2)), ((3, 2), (4, 2)), ((1, 4), (4, 4)))
def test_a_state_of_another_trainer_is_refused(ours, theirs):
    other, state = begin(net_trainer(*theirs))
    message = "^a state of another trainer: .* equal keys|.* different keys"
    for call, *args in uses(net_trainer(*ours)):
        assert re.match(message, said_by(ValueError, call, state, *args))
    other.update(state, *net_batches(1)[0])  # nothing was lost


LAYOUTS = [(1, 1), (1, 4), (2, 8), (3, 2)]


@cases("members, devices", *LAYOUTS)
def test_a_step_is_traced_once_for_states_from_anywhere(members, devices):
    traces, batch = [], net_batches(1)[0]

    def loss(*args):
        traces.append(1)
        return net_loss(*args)

    trainer, state = begin(net_trainer(members, devices, loss))
    for _ in range(2):
        state, _ = trainer.update(state, *batch)
    state, _ = trainer.update(trainer.scatter(trainer.gather(state)), *batch)
    elsewhere = jax.device_put(jax.device_get(state._replace(key=None)))
    trainer.update(elsewhere._replace(key=state.key), *batch)
    assert len(traces) == 1


@cases("members, devices", *LAYOUTS)
def test_functions_may_call_back(members, devices):
    def host(x):
        return jax.pure_callback(
            lambda x: 2 * np.asarray(x), x, x, vmap_method="expand_dims"
        )

    def run(double):
        trainer = pe.make_trainer(
            lambda key: double(jax.random.normal(key, (3,))),
            lambda w, x: (double(x * 1.0).mean() * w).sum(),
            SGD,
            members=members,
            devices=devices,
            apply_fn=lambda w, x: double(x * w.sum()),
            output=None,
        )
        state, _ = trainer.update(trainer.init(KEY), np.arange(8))
        return trainer.predict_members(state, np.arange(3)), trainer.gather(state)

    assert leaves_equal(run(host), run(lambda x: 2 * x))


def test_a_state_that_lies_elsewhere_is_placed():
    trainer, state = begin(net_trainer(3, 2))
    batch, inputs = net_batches(1)[0], image_data()[0][:40]
    host = jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
    averaged = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), host)
    one = jax.device_put(averaged, jax.devices()[1])
    expected = trainer.predict(state, inputs)
    after = trainer.gather(trainer.update(state, *batch)[0])
    for other in (host, averaged, one):
        assert leaves_equal(trainer.predict(other, inputs), expected)
        assert leaves_equal(trainer.gather(other).params, trainer.gather(host).params)
        ended, _ = trainer.epoch(other, batch, np.arange(16)[None])
        assert leaves_equal(trainer.gather(ended)[:3], after[:3])
    assert np.isfinite(host.params.dense.weight).all()
    sync(net_loss, SGD)(jax.tree.map(np.asarray, one_net()), *pe.split(batch))


def test_torch_tensors_are_taken_as_data():
    torch = pytest.importorskip("torch")
    ends = []
    for data in image_data(), [torch.tensor(x) for x in image_data()]:
        trainer, state = begin(net_trainer(2, 2))
        probs = trainer.predict(state, data[0])
        state, losses = trainer.epoch(state, data, orders(1)[0])
        ends.append((probs, losses, trainer.update(state, *data)))
    assert leaves_equal(*ends)


@pytest.fixture
def interrupts(monkeypatch):
    """Send SIGINT so often before and after programs that are made now; count these."""
    run, times = pe._run, types.SimpleNamespace(before=0, after=0, ended=0)

    def interrupted(*args):
        for _ in range(times.before):
            signal.raise_signal(signal.SIGINT)
        result = run(*args)
        for _ in range(times.after):
            signal.raise_signal(signal.SIGINT)
        times.ended += 1
        return result

    monkeypatch.setattr(pe, "_run", interrupted)
    # A suite that runs in the background of a shell ignores it.
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield times
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("kind", ["trainer", "by hand"])
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
    ended, interrupts.before = interrupts.ended, 1
    said_by(KeyboardInterrupt, call, state, *batch)
    # At once, and the state is as it was.
    assert owner.latest is expected and interrupts.ended == ended
    interrupts.before, interrupts.after = 0, 2
    said_by(KeyboardInterrupt, call, state, *batch)
    assert interrupts.ended == ended + 1  # and not before its end
    assert "latest" in said_by(ValueError, call, state, *batch)
    assert leaves_equal(owner.latest.params, expected.params)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_of_interrupts_and_other_threads_go_on(interrupts):
    trainer, state = begin(net_trainer.__wrapped__(2, 2))
    (batch,), received, interrupts.before, interrupts.after = net_batches(1), [], 1, 1
    old = signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        state, _ = trainer.update(state, *batch)
    finally:
        signal.signal(signal.SIGINT, old)
    assert len(received) == 2 and trainer.latest is state
    # A first interrupt that returns, as asyncio's does, leaves a second one guarded,
    # also where it sets another handler for that: afterwards this one is in place.
    for sets in (False, True):

        def first(*args, sets=sets):
            received.append(args)
            signal.signal(signal.SIGINT, signal.default_int_handler if sets else second)

        def second(*args):
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGINT, first)
        try:
            said_by(KeyboardInterrupt, trainer.update, state, *batch)
            assert signal.getsignal(signal.SIGINT) is (
                signal.default_int_handler if sets else second
            )
        finally:
            signal.signal(signal.SIGINT, old)
        state = trainer.latest
        assert np.isfinite(np.asarray(state.params.dense.weight)).all()
    interrupts.before = interrupts.after = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:  # where no handler can be set
        state, _ = pool.submit(trainer.update, state, *batch).result()
    assert trainer.latest is state

    def loss_fn(*args):  # sets one while it is traced
        signal.signal(signal.SIGINT, second)
        return net_loss(*args)

    trainer, state = begin(net_trainer.__wrapped__(2, 2, loss_fn))
    old = signal.getsignal(signal.SIGINT)
    try:
        trainer.update(state, *batch)
        assert signal.getsignal(signal.SIGINT) is second
    finally:
        signal.signal(signal.SIGINT, old)


FAILING = """
import jax, numpy as np, pjax_ensemble as pe
jax.config.update("jax_num_cpu_devices", 2)

def loss_fn(w, x):
    return (w * x).mean()

def fail(_):
    raise RuntimeError("a callback")

def failing_loss(w, x):
    loss = loss_fn(w, x)
    jax.debug.callback(fail, jax.lax.stop_gradient(loss))
    return loss

def trainer_of(loss_fn):
    init = lambda key: jax.random.normal(key, (3,))
    trainer = pe.make_trainer(init, loss_fn, pe.sgd(0.1), members=1)
    return trainer, trainer.init(jax.random.key(0))

x, losses = np.ones((2, 3), np.float32), []
for fails in (False, True):
    other, state = trainer_of(loss_fn)
    if fails:
        trainer, bad = trainer_of(failing_loss)
        for said in ("RuntimeError: a callback", "failed, with what was saved"):
            try:
                jax.block_until_ready(trainer.update(bad, x))
            except Exception as error:
                print(said in str(error))
    for _ in range(2):
        state, loss = other.update(state, x)
        losses.append(loss.item())
assert losses[:2] == losses[2:], losses
"""


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.5 itself fails")
def test_a_program_that_fails_takes_no_other_along():
    assert run_python(FAILING) == "True\nTrue\n"


@pytest.mark.parametrize("members", [1, 2])
def test_a_nan_is_found_by_jax_also_where_it_is_given(members):
    (trainer, state), (batch,) = begin(net_trainer(members, 2)), net_batches(1)
    params = jax.tree.map(np.array, state.params)
    params.dense.bias[0] = np.nan
    spoiled = state._replace(params=params)
    with jax.debug_nans(True):
        found = said_by(FloatingPointError, trainer.predict, spoiled, batch[0])
        found += said_by(FloatingPointError, trainer.update, spoiled, *batch)
        if jax.__version_info__ >= (0, 8):  # which goes round in circles by itself
            assert found.count("params.dense.bias") + found.count("0].dense.bias") == 2
        trainer.update(state, *batch)  # nothing was lost


def test_an_init_fn_without_end_is_a_recursion_error():
    def init(key):
        return init(key)

    with pytest.raises(RecursionError):
        begin(pe.make_trainer(init, net_loss, SGD, members=1))


@every_layout
def test_a_trainer_moves_what_it_is_given_where_jax_moves_nothing(members, devices):
    trainer = noisy_trainer(members, devices, apply_fn=lambda p, _, x: net(p, x))
    images, labels = net_batches(1)[0]
    with jax.transfer_guard("disallow"):
        state = trainer.init(KEY)
        state, _ = trainer.update(state, images, labels)
        state, _ = trainer.epoch(state, (images, labels), np.arange(16)[None])
        trainer.predict(state, images)
        trainer.scatter(trainer.gather(state))
        plain = net_trainer.__wrapped__(members, devices)
        plain.update(plain.init(KEY), images, labels)  # which compares members


@every_layout
def test_a_stateful_loss_takes_no_promotion(members, devices):
    with enable_x64(True), jax.numpy_dtype_promotion("strict"):

        def init(key):
            return jax.random.normal(key, (3,)), jnp.zeros((), int)

        def loss_fn(w, count, key, x):
            noise = jax.random.normal(key)
            return jnp.square(x @ w).mean() + noise * w.sum(), count + 1

        options = dict(members=members, devices=devices, stateful=True)
        trainer, state = begin(pe.make_trainer(init, loss_fn, pe.adam(0.1), **options))
        state, losses = trainer.update(state, np.ones((8, 3)))
        state, _ = trainer.epoch(state, (np.ones((8, 3)),), np.arange(8)[None])
        ended = trainer.gather(state)
        assert losses.dtype == ended.params.dtype == float
        assert ended.model_state.tolist() == [2] * members


def test_a_copy_of_a_trainer_goes_on_by_itself():
    (trainer, state), (batch,) = begin(net_trainer.__wrapped__(2, 2)), net_batches(1)
    state, expected = trainer.update(state, *batch)
    inputs, first = batch[0], trainer.gather(state)
    probs = trainer.predict(state, inputs)
    for copied in (copy.copy(trainer), copy.deepcopy(trainer)):
        assert leaves_equal(copied.predict(copied.latest, inputs), probs)
    del trainer
    assert copied.layout == (2, 2, 1, 1)
    assert leaves_equal(copied.predict(copied.scatter(first), inputs), probs)
    other = [x[:6] for x in batch]  # another program
    assert copied.update(copied.latest, *other)[1].shape == expected.shape


def test_a_trainer_and_its_state_show_what_they_are_on_a_line_without_numbers():
    trainer, state = begin(net_trainer(3, 2))
    stands = "members=3, devices=2, members_per_device=2, replicas=1"
    assert repr(trainer) == f"Trainer(net_init, net_loss, Layout({stands}))"
    nameless = dataclasses.replace(trainer, init_fn=functools.partial(net_init))
    assert repr(nameless) == repr(trainer).replace("net_init", "partial")
    shown = repr(state)
    assert shown.startswith("TrainState(params=Net(hidden=Dense(weight=float32[4, 64, ")
    assert shown.endswith("model_state=(), key=key<fry>[4])")
    trainer.update(state, *net_batches(1)[0])
    assert repr(state) == shown  # consumed
    assert "params=ndarray" not in repr(trainer.gather(trainer.latest))
    assert repr(pe.TrainState(len, 1.0, (), None)).endswith("(), key=None)")


def test_a_trainer_that_is_gone_takes_its_state_along():
    trainer, state = begin(net_trainer.__wrapped__(2, 4))
    gc.disable()
    try:
        held = [weakref.ref(state.params.dense.weight)]  # consumed
        state, _ = trainer.epoch(state, image_data(), orders(1)[0])
        trainer.predict(state, image_data()[0])
        held += [weakref.ref(trainer.latest.params.dense.weight), weakref.ref(trainer)]
        del trainer, state
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def test_gather_names_the_leaf_and_device_of_a_replica_that_differs():
    trainer, state = begin(net_trainer(2, 4))
    bias = state.params.dense.bias
    copies = [np.array(shard.data) for shard in bias.addressable_shards]
    copies[3].reshape(-1).view(np.uint8)[0] ^= 1
    shards = list(map(jax.device_put, copies, jax.devices()))
    bias = jax.make_array_from_single_device_arrays(bias.shape, bias.sharding, shards)
    dense = state.params.dense._replace(bias=bias)
    state = state._replace(params=state.params._replace(dense=dense))
    there, here = jax.devices()[3], jax.devices()[2]
    message = rf"\.dense\.bias on device {there} .* {here}; go on from a checkpoint$"
    assert re.search(message, said_by(RuntimeError, trainer.gather, state))


def test_gather_says_what_may_differ_between_replicas_of_a_model_state():
    def counting(params, seen, key, images, labels):
        return net_loss(params, images, labels), seen + labels.sum()

    def init(key):
        return net_init(key), jnp.int32(0)

    made = pe.make_trainer(init, counting, SGD, members=2, devices=4, stateful=True)
    state, _ = made.update(begin(made)[1], *net_batches(1)[0])
    said = said_by(RuntimeError, made.gather, state)
    assert re.search(r"\.model_state on .*, or, if it depends on the batch, make", said)


@jax.tree_util.register_pytree_node_class
class Steps:
    """A tree like older Flax's, which is not equal to another of the same form."""

    def __init__(self, steps):
        self.steps = steps

    def tree_flatten(self):
        return (self.steps,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_model_state_may_be_any_tree():
    def loss_fn(params, done, key, *batch):
        return net_loss(params, *batch), Steps(done.steps + 1)

    def init(key):
        return net_init(key), Steps(jnp.zeros(()))

    trainer, state = begin(
        pe.make_trainer(init, loss_fn, SGD, members=2, stateful=True)
    )
    state, _ = trainer.update(state, *net_batches(1)[0])
    assert trainer.gather(state).model_state.steps.tolist() == [1, 1]


def test_a_model_state_keeps_its_form():
    def init(key):
        return net_init(key), {"count": jnp.int32(0)}

    def loss_fn(params, model_state, key, *batch):
        return net_loss(params, *batch), {"count": 0.5}

    made = pe.make_trainer(init, loss_fn, SGD, members=2, stateful=True)
    message = r"model state of .*float32\[\].* of one of .*int32\[\].*; return it in"
    for call, *args in uses(made)[:2]:
        assert re.search(message, said_by(ValueError, call, begin(made)[1], *args))


def test_microbatches_are_chosen_by_platform_and_batch(monkeypatch):
    def sizes(*rows, **options):
        seen, one = [], jnp.ones(())
        made = (one, one) if "stateful" in options else one

        def loss_fn(params, *rest):
            seen.append(len(rest[-1]))
            loss = jnp.mean(params * rest[-1])
            return (loss, loss) if options.keys() & {"has_aux", "stateful"} else loss

        make = functools.partial(pe.make_trainer, members=1, devices=1, **options)
        trainer, state = begin(make(lambda _: made, loss_fn, SGD))
        for size in rows:
            state, _ = trainer.update(state, np.ones((size, 1)))
        return seen

    rows, auto = (128, 100, 66, 45, 34, 32, 31, 1), dict(microbatch="auto")
    assert sizes(*rows, **auto) == [32, 25, 22, 45, 17, 32, 31, 1]
    assert sizes(128) == sizes(128, has_aux=True) == [128]
    assert sizes(128, has_aux=True, **auto) == [32]
    assert sizes(128, stateful=True, **auto) == [128]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sizes(128, **auto) == [128]


NO_COUNTS = 0, -1, 1.5, True, "all"


def making(**options):
    # Of what no cache holds.
    return lambda: net_trainer.__wrapped__(**(dict(members=2) | options))


test_trainer_is_not_made_of = refuses(
    *out_of_range("members", None, lambda n: making(members=n)(), 0, 2.0, True),
    *out_of_range("devices", None, lambda n: making(devices=n)(), 0, "2"),
    *out_of_range("chunk", None, lambda n: making(chunk=n)(), 0),
    *out_of_range("at_once", None, lambda n: making(at_once=n)(), *NO_COUNTS),
    *out_of_range("microbatch", None, lambda n: making(microbatch=n)(), 0, "all"),
    (making(devices=9), "9 devices are asked for; there are 8"),
    (making(optimizer=lambda h: SGD), "optimizer is function; expected one with init"),
    (making(hyper=np.ones(2)), "optimizer: .*; with hyper, expected a function"),
    (making(hyper=np.ones(3)), r"\[\(3,\)\]; expected arrays \[K, ...\].* 2 members"),
    (making(hyper=np.array(["a", "b"])), "hyper hold a ndarray of <U1; expected num"),
    (making(hyper=[0.1, 0.2]), r"\[\(\)\]; expected arrays .*; a list holds numbers:"),
    (making(hyper=np.array([1, 2**40 + 5])), "hyper hold 1099511627781, beyond int32"),
    (making(hyper=np.array([0.1, -1]), optimizer=pe.sgd), "learning_rate is .*-1.0"),
)


def initializing(init_fn=net_init, key=KEY, **options):
    made = functools.partial(pe.make_trainer, init_fn, net_loss, SGD, members=2)
    return lambda: made(**options).init(key)


NO_KEYS = keys_of(0, 3), keys_of(0, 3, "old"), 0, np.zeros(3, "u4")
ONE_KEY = r"^key: .*; expected one random key, such as jax.random.key\(0\)"

test_init_refuses_keys_and_what_is_no_array_or_model_with_its_state = refuses(
    *((initializing(key=key), ONE_KEY) for key in NO_KEYS),
    (initializing(lambda _: {"act": 1.0}), r"returns \w*float\w* at .*act.*array"),
    (initializing(lambda _: {"act": len}), r"returns builtin\w* at .*act.*array"),
    (initializing(lambda _: {"act": "relu"}), r"returns str at .*act.*array"),
    (initializing(net_init, stateful=True), "init_fn returns Net; with stateful=True"),
    (initializing(lambda _: np.int64(2**40)), "init_fn returns hold 1099511627776, be"),
)


def test_trainer_refuses_what_does_not_fit_and_keeps_the_state():
    trainer, state = begin(net_trainer(2, D))
    other, others = begin(net_trainer(3, 2))
    three, data, rows = other.gather(others), image_data(), np.zeros((1, 4), int)
    equal = three._replace(key=three.key[np.array([0, 1, 0])])
    last = np.arange(4)[None] == 3
    ten, blind = [x[:10] for x in data], net_trainer(2, D, apply_fn=None)
    odd, odds = begin(net_trainer(2, D, optimizer=optax.lbfgs()))
    large = np.full(NUM_IMAGES, 2**40)
    own = functools.partial(trainer.update, per_member=True)
    for message, call, *args in [
        ("rows 0 to 240; the data have rows 0 to 239", trainer.epoch, data, 240 * last),
        ("order holds rows -1 to 0; .* 0 to 239", trainer.epoch, data, rows - last),
        ("expected integers, rows of the data", trainer.epoch, data, rows / 2),
        (r"\(2, 0\).* not empty", trainer.epoch, data, np.zeros((2, 0), int)),
        (r"\(4,\); expected .* \[steps, B\], or", trainer.epoch, data, rows[0]),
        (r"\(3, 1, 4\).*with K = 2", trainer.epoch, data, np.stack([rows] * 3)),
        ("^order: .*inhomog.*; expected arrays", trainer.epoch, data, [[0, 1], [2]]),
        ("data is ndarray; expected a tuple of", trainer.epoch, data[0], rows),
        ("loss_fn: .*'labels'; it is given 1 of the", trainer.epoch, data[:1], rows),
        ("loss_fn: .*'labels'; it is given 1 of the", trainer.update, data[0]),
        ("data hold 1099511627776, beyond", trainer.epoch, (data[0], large), rows),
        ("update: .*'value_fn'; it is .*=loss", lambda _: odd.update(odds, *data)),
        (r"data .*\[\(10,\), \(240,\)\]", trainer.epoch, (data[0], ten[1]), rows),
        ("batch hold 1099511627776, beyond int32", trainer.update, *data[:1], large),
        ("inputs hold a MaskedArray of", trainer.predict, np.ma.array(data[0])),
        (r"apply_fn: .*\(2, 8, 1\), where one", trainer.predict, data[0][0]),
        ("axes of the batch have lengths", trainer.update, data[0][:8], data[1][:4]),
        (r"\[\(8,\)\]; expected this trainer's 4: use", other.update, *data),
        ("expected this trainer's", other.predict, data[0]),
        ("expected this trainer's", other.gather),
        ("takes an apply_fn; give make_trainer one", blind.predict, data[0]),
        ("hold no example", trainer.predict_members, data[0][:0]),
        (r"\(10, 8\)\]; expected arrays \[K, B, ...\], with K = 2", own, *ten),
        (r"\[\(2, 8\), \(2, 9\)\]; .* one B", own, *(np.ones((2, n)) for n in (8, 9))),
        (r"\[\(2,\)\]; expected arrays \[K, B", own, np.ones(2)),
        (r"\[\(3, 8\)\]; expected arrays \[K, B", own, np.ones((3, 8))),
        ("first axes of the batch", own),
        (r"\(3,\)\]; expected .* 2 members", lambda _: trainer.scatter(three)),
        ("members 0 and 2 have equal keys", lambda _: other.scatter(equal)),
        ("state is tuple; expected a Tr", lambda s: trainer.epoch(data, s, rows)),
        ("state is Net; exp", lambda s: trainer.scatter(trainer.gather(s).params)),
    ]:
        assert re.search(message, said_by(ValueError, call, state, *args))
    trainer.epoch(state, data, rows)  # nothing was lost
    for call, *args in uses(trainer):
        assert "state is Net; exp" in said_by(ValueError, call, state.params, *args)
        assert "was consumed by an" in said_by(ValueError, call, state, *args)


PROCESS = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np
index, count, local, port, folder = *map(int, sys.argv[1:5]), sys.argv[5]
jax.config.update("jax_num_cpu_devices", local)
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index)
import pjax_ensemble as pe

def init(key):
    keys = jax.random.split(key)
    return pe.dense_init(keys[0], 6, 8), pe.dense_init(keys[1], 8, 4)

def net(params, xs):
    return pe.dense(params[1], jax.nn.relu(pe.dense(params[0], xs)))

def stateful_loss(params, model_state, key, xs, ys, rate):
    xs = xs + 0.1 * rate * jax.random.normal(key, xs.shape)
    return pe.softmax_cross_entropy(net(params, xs), ys).mean(), model_state

def scaled(params, _, inputs, rate):
    return net(params, inputs["xs"]), inputs["xs"][:, 0] * rate

rng = np.random.default_rng(0)
xs, ys = rng.normal(size=(48, 6)).astype(np.float32), rng.integers(4, size=48)
found = {}
own = [np.stack([x[k : k + 12] for k in range(5)]) for x in (xs, ys)]
for members in (1, 5):
    trainer = pe.make_trainer(lambda key, rate: (init(key), ()), stateful_loss, pe.sgd,
        members=members, stateful=True, chunk=5, apply_fn=scaled, output=None,
        hyper=np.linspace(0.1, 0.5, members))
    state = trainer.init(jax.random.key(1))
    state, losses = trainer.epoch(state, (xs, ys), rng.permutation(48).reshape(4, 12))
    batch = own if members > 1 else (xs[:12], ys[:12])
    state, loss = trainer.update(state, *batch, per_member=members > 1)
    gathered = trainer.gather(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, gathered._replace(key=0),
        trainer.gather(trainer.scatter(gathered))._replace(key=0)))
    found[f"{members} params"] = np.concatenate(
        [x.reshape(members, -1) for x in jax.tree.leaves(gathered.params)], axis=1)
    found[f"{members} losses"] = np.c_[losses, loss]
    for name in "predict", "predict_members":
        logits, rates = getattr(trainer, name)(state, {"xs": xs})
        found[f"{members} {name}"] = np.append(logits, rates[..., None], axis=-1)

def plain_loss(params, xs, ys):
    return pe.softmax_cross_entropy(net(params, xs), ys).mean()

optimizer, same = pe.sgd(0.1), jax.random.key(0)
plain = pe.make_trainer(lambda key: init(same), plain_loss, optimizer, members=2)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    state, found["losses"] = plain.update(plain.init(jax.random.key(1)), xs, ys)
assert any("equal weights" in str(each.message) for each in told)
_, found["own losses"] = plain.update(state, *(x[:2] for x in own), per_member=True)

update = pe.make_sync_update(plain_loss, optimizer)
state = pe.replicate(pe.train_state(init(same), optimizer))
mine = np.split(np.arange(48), count)[index]
for _ in range(3):
    state, loss = update(state, *pe.split((xs[mine], ys[mine])))
found["sync update"] = np.asarray(pe.unreplicate(state.params)[0].weight)
keys = jax.random.split(jax.random.key(5), local)  # the same in every process
state = jax.tree.map(lambda *x: jnp.stack(x),
    *[pe.train_state(init(k), optimizer, key=k) for k in keys])
update = pe.make_ensemble_update(plain_loss, optimizer)
try:
    update(state, *pe.replicate((xs, ys)))
    found["equal keys"] = np.array(0)
except ValueError as error:
    assert f"members 0 and {local} have equal keys" in str(error), error
    found["equal keys"] = np.array(1)
np.savez(f"{folder}/{count} {index}.npz", **found)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@linux
def test_two_processes_end_as_one_with_as_many_devices(tmp_path):
    port = free_port()
    runs = [start_python(PROCESS, i, 2, 2, port, tmp_path) for i in range(2)]
    runs.append(start_python(PROCESS, 0, 1, 4, port, tmp_path))
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
    ends = [np.load(tmp_path / f"{name}.npz") for name in ("2 0", "2 1", "1 0")]
    first, second, one = map(dict, ends)
    assert first.pop("equal keys") and not one.pop("equal keys")
    for name, value in first.items():
        assert_array_equal(value, second[name], err_msg=name)
        if name[0] == "5" and name != "5 predict":  # no replicas
            assert_array_equal(value, one[name], err_msg=name)
        else:
            assert_close(value, one[name])


@pytest.mark.parametrize("bootstrap", [False, True])
def test_each_member_has_an_order_and_with_bootstrap_a_resample_of_its_own(bootstrap):
    draw = functools.partial(pe.epoch_order, seed=5, bootstrap=bootstrap)
    first, second = (draw(5000, 50, epoch=epoch, members=3) for epoch in (0, 1))
    assert first.shape == draw(5049, 50, members=3).shape == (3, 100, 50)
    assert first.dtype == np.int32
    assert_array_equal(draw(5000, 50), first[0])
    assert_array_equal(pe.epoch_order(99, 9), pe.epoch_order(99, 9, seed=0, epoch=0))
    assert_array_equal(draw(5000, 50, members=1), first[:1])
    for a, b in itertools.combinations([*first, *second], 2):
        assert not np.array_equal(a, b)
    images, later = (np.sort(orders.reshape(3, -1)) for orders in (first, second))
    assert_array_equal(images, later)
    few, other = (np.sort(draw(2, 1, members=99, seed=s), axis=1) for s in (5, 6))
    assert_allclose(few.mean(), 1 / 2, atol=0.1)  # either of two is drawn as often
    assert np.array_equal(few, other) != bootstrap
    if not bootstrap:
        assert_array_equal(images, [range(5000)] * 3)
        rows = np.random.default_rng([5, 1, 2]).permutation(5000)  # in all versions
        assert_array_equal(second[2].ravel(), rows)
        return
    counts = np.array([np.bincount(rows, minlength=5000) for rows in images])
    seen = np.mean(counts > 0, axis=1)
    assert_allclose(seen, 1 - np.exp(-1), atol=0.02)  # with replacement
    assert np.abs(np.corrcoef(counts) - np.eye(3)).max() < 0.05


test_order_or_size_is_refused = refuses(
    (lambda: pe.epoch_order(40, 50), "batch_size=50; expected at most num_examples=40"),
    *out_of_range("batch_size", None, lambda v: pe.epoch_order(9, v), 0, 2.0),
    *out_of_range("num_examples", None, lambda v: pe.epoch_order(v, 1), -1, np.ones(9)),
    *out_of_range("members", None, lambda v: pe.epoch_order(9, 3, members=v), 0, True),
    (lambda: pe.epoch_order(9, 3, seed=-1), "^seed=-1, epoch=0; expected ints, 0 <= e"),
    (lambda: pe.epoch_order(9, 3, seed=0.5), "^seed=0.5, epoch=0; expected ints"),
    (lambda: pe.epoch_order(9, 3, epoch=2**32), "epoch=4294967296; expected ints"),
    *out_of_range("size", None, lambda v: pe.prefetch([], v), 0),
)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_prefetch_keeps_order_and_values(size):
    batches = [(randn(i, 3), np.full(2, i)) for i in range(4)]
    for got, made in zip(pe.prefetch(iter(batches), size), batches, strict=True):
        assert got is made
    assert list(pe.prefetch([], size)) == []


def ten(made, do):
    """Yield ten numbers; note the thread that makes each, and do what is asked."""
    for i in range(10):
        made.append(threading.current_thread())
        do(i)
        yield i


def test_prefetch_works_ahead_by_its_size_and_no_more():
    made, third = [], threading.Event()
    ahead = pe.prefetch(ten(made, lambda i: i == 2 and third.set()), 2)
    assert not made  # before the loop begins
    assert next(ahead) == 0
    assert third.wait(10)  # 1 and 2 are made before they are asked for
    time.sleep(0.05)
    assert len(made) == 3 and threading.main_thread() not in made


def test_prefetch_ends_its_thread_when_the_loop_is_left():
    made, go_on = [], threading.Event()
    ahead = pe.prefetch(ten(made, lambda i: i and go_on.wait(10)), 5)
    assert next(ahead) == 0
    ahead.close()  # while the second is being made
    go_on.set()
    made[0].join(10)
    assert not made[0].is_alive() and len(made) <= 2


def test_prefetch_raises_what_its_source_raises_in_its_place():
    def fail(i):
        if i == 2:
            raise OSError("no such file")

    ahead = pe.prefetch(ten([], fail), 5)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert "no such file" in said_by(OSError, next, ahead)


# ---------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------

LEAVES = {
    "float32": np.float32([[1.5, -0.0], [np.nan, np.inf]]),
    "bfloat16": jnp.asarray([1.5, -2, np.nan], jnp.bfloat16),
    "float8": jnp.asarray([0.5, 2], jnp.float8_e4m3fn),
    "int4": jnp.asarray([-8, 7], jnp.int4),
    "empty": np.zeros((0, 3), np.int16),
    "empty float8": np.zeros((2, 0), jnp.float8_e5m2),
    "bool": np.array([True, False]),
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


def assert_same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        y = y.astype(y.dtype.newbyteorder("<")) if isinstance(y, np.ndarray) else y
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and as_bytes(x) == as_bytes(y)
        assert isinstance(x, jax.Array) or x.flags.aligned


@pytest.mark.parametrize("name", LEAVES)
def test_load_returns_the_bits_that_were_saved(tmp_path, name):
    path, leaf, one = tmp_path / "x", LEAVES[name], np.float32(1)
    tree = {"__metadata__": (leaf, one), "a" * 250: [leaf, None]}
    pe.save(path, tree)
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    for like in (tree, forms):
        assert_same_leaves(pe.load(path, like), tree)
    paths = "['__metadata__'][0]", "['__metadata__'][1]", f"['{'a' * 250}'][0]"
    assert_same_leaves(pe.load(path), dict(zip(paths, (leaf, one, leaf))))


def deeper(tree):
    return st.lists(tree, max_size=3) | st.dictionaries(st.text(), tree)


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.sampled_from([*LEAVES.values()]), deeper))
def test_any_tree_of_arrays_comes_back_and_gives_the_same_file(tmp_path_factory, tree):
    path, again = (tmp_path_factory.mktemp("tree") / name for name in "xy")
    pe.save(path, tree)
    assert_same_leaves(pe.load(path, tree), tree)
    found = pe.load(path)
    assert_same_leaves([*found.values()], jax.tree.leaves(tree))
    assert safetensors.numpy.load_file(path).keys() == found.keys()
    pe.save(again, pe.load(path, tree))
    assert again.read_bytes() == path.read_bytes()


class Tensor:
    """An array of another library, with types of its own, as PyTorch's."""

    dtype, shape = "torch.float32", (2, 3)

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, np.float32)


def test_tensors_of_others_are_saved_as_arrays(tmp_path):
    pe.save(tmp_path / "x", [Tensor()])
    assert_same_leaves(pe.load(tmp_path / "x", [Tensor()]), [np.asarray(Tensor())])


def test_safetensors_reads_a_checkpoint(tmp_path):
    sizes = {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
    native = [f"{kind}{n}" for kind, bits in sizes.items() for n in bits]
    native += "bool", "bfloat16", "complex64"
    leaves = {name: np.arange(4).astype(name) for name in native}
    leaves["empty"] = LEAVES["empty"]
    pe.save(
        path := tmp_path / "x", leaves | {n: LEAVES[n] for n in ("complex128", "key")}
    )
    found = safetensors.numpy.load_file(path)
    for name, leaf in leaves.items():
        assert_same_leaves(found[f"['{name}']"], leaf)
    assert found["['complex128']"].tobytes() == as_bytes(LEAVES["complex128"])
    assert_array_equal(found["['key']"], jax.random.key_data(LEAVES["key"]))
    with safetensors.safe_open(path, "np") as file:
        types = file.metadata()
    digits = types.pop("sha256")
    assert types == {"['complex128']": "complex128", "['key']": "key<threefry2x32>"}
    rest = path.read_bytes().partition(digits.encode())[2]
    assert hashlib.sha256(rest).hexdigest() == digits


A, K = np.ones((2, 3), np.float32), jax.random.key(1)


@cases(
    "like, message",
    ({"b": A, "k": K}, "leaf '['b']' is not there; expected float32 [2, 3]"),
    ({"a": A.T, "k": K}, "leaf '['a']' is float32 [2, 3]; expected float32 [3, 2]"),
    ({"a": A.astype(int), "k": K}, "'['a']' is float32 [2, 3]; expected int64 [2"),
    ({"a": A, "k": jax.random.key(1, impl="rbg")}, "2> []; expected key<rbg> []"),
    ({"a": A, "k": jax.random.key_data(K)}, "2> []; expected uint32 [2]"),
    ((), "leaf '['a']' is float32 [2, 3]; expected not there"),
)
def test_load_names_the_leaf_that_is_another(tmp_path, like, message):
    path = tmp_path / "x"
    pe.save(path, {"a": A, "k": K})
    said = said_by(ValueError, pe.load, path, like)
    assert said.startswith(f"{path}: ") and message in said and "\n" not in said


@pytest.mark.parametrize("like", [None, {"a": A}])
def test_load_says_what_is_wrong_with_a_file(tmp_path, like):
    path = tmp_path / "x"
    pe.save(path, {"a": A})
    cut, foreign = path.read_bytes()[:-1], safetensors.numpy.save({"['a']": A})
    others = "has no digest .* whose files safetensors.numpy.load_file reads"
    for content, message in (cut, "damaged or cut short"), (foreign, others):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
            pe.load(path, like)


class Paths(tuple):
    """A tree whose leaves have these paths."""


jax.tree_util.register_pytree_with_keys(
    Paths, lambda paths: ([(path, A) for path in paths], None), lambda *_: None
)


@cases(
    "tree, message",
    ("text", "leaf '' is <U4; expected numbers, booleans or random keys"),
    ({"a": object()}, r"leaf '\['a'\]' is object; expected numbers"),
    ({"a": np.zeros(2, "M8[s]")}, r"is datetime64\[s\]"),
    ({"a": np.zeros(2, "f4,f4")}, "is .*; expected numbers"),
    ({"a": np.ma.masked_array([1, 2], [0, 1])}, r"'\['a'\]' is a masked array; expect"),
    *((Paths(p), "share a path") for p in ("aa", ["__metadata__"], ["sha256"])),
)
def test_save_refuses_what_it_could_not_bring_back(tmp_path, tree, message):
    path = tmp_path / "x"
    assert re.search(message, said_by(ValueError, pe.save, path, tree))
    assert not list(tmp_path.iterdir())
    pe.save(path, A)
    assert re.search(message, said_by(ValueError, pe.load, path, tree))


def test_a_file_is_replaced_when_it_is_whole_and_not_before(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pe.replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(KeyError), pe.replace_file(path) as file:
        file.write(b"newer")
        raise KeyError
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@posix
def test_a_file_is_synced_before_it_has_its_name_and_the_folder_after(
    tmp_path, monkeypatch
):
    calls = []

    def watched(call, what, *args):
        info = os.stat(what)  # of a path or an open file
        calls.append((call.__name__, stat.S_ISDIR(info.st_mode) or info.st_size))
        return call(what, *args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, functools.partial(watched, getattr(os, name)))
    with pe.replace_file(tmp_path / "x") as file:
        file.write(b"new")
    assert calls == [("fsync", 3), ("replace", 3), ("fsync", True)]


@posix
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, b"x"])
def test_a_file_may_have_any_name_and_keeps_its_permissions(tmp_path, name):
    path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), os.fsencode(name))))
    modes, umask = [], os.umask(0o027)
    try:
        for mode in (None, 0o600, 0o664):
            if mode:
                path.chmod(mode)
            with pe.replace_file(os.fsencode(path) if name == b"x" else path):
                (temporary,) = {*tmp_path.iterdir()} - {path}
                assert re.fullmatch(r"\.[xé]{1,60}\.\w{8}\.tmp", temporary.name)
                modes.append(temporary.stat().st_mode & 0o777)  # while it is empty
            modes.append(path.stat().st_mode & 0o777)
    finally:
        os.umask(umask)
    assert modes == [0o640, 0o640, 0o600, 0o600, 0o664, 0o664]


# ---------------------------------------------------------------------------------
# Demo
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("args, count", [([], D), ([2], 2)])
def test_demo_fits_the_line(capsys, args, count):
    pe.main(*args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{count} devices:")
    steps = [line.split(", loss: ") for line in lines[1:-2]]
    assert [step for step, _ in steps] == [f"Step {i:3d}" for i in range(0, 1000, 100)]
    assert float(steps[0][1]) > 2 > 0.3 > float(steps[-1][1])
    weight, bias = (float(line.split()[1]) for line in lines[-2:])
    assert abs(weight - 2) < 0.1 and abs(bias + 1) < 0.1


test_demo_refuses = refuses(
    (
        lambda: pe.main(3),
        "a batch of 128 does not split over 3 devices; use a multiple",
    ),
    (lambda: pe.main(0), "num_devices is 0; expected an int >= 1"),
)


@cases(
    "flags, said",
    (["--devices", "3"], "error: a batch of 128 does not split over 3 devices"),
    (["--devices=0"], "error: num_devices is 0; expected"),
    (["2"], "error: unrecognized arguments: 2"),
    ([], "8 devices: "),
    (["--devices", "2"], "2 devices: "),
)
def test_demo_takes_its_devices_and_no_other_argument(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(sys, "argv", ["pjax_ensemble.py", *flags])
    ended = pytest.raises(SystemExit) if "error" in said else contextlib.nullcontext()
    with ended:
        runpy.run_path(pe.__file__, run_name="__main__")
    assert said in "".join(capsys.readouterr())


# ---------------------------------------------------------------------------------
# train_mnist.py: a data set and a network for short runs
# ---------------------------------------------------------------------------------


# A network with statistics and random numbers that compiles in no time, for runs in
# which others matter.
TINY = """
import math, sys
import jax
import pjax_ensemble as pe
import train_mnist as tm

def init(key, *, image_shape, num_classes):
    keys, pixels = jax.random.split(key), math.prod(image_shape)
    norm, stats = pe.batch_norm_init(8)
    last = pe.dense_init(keys[1], 8, num_classes)
    return (pe.dense_init(keys[0], pixels, 8), norm, last), stats

def logits(params, stats, images, key=None):
    x = pe.dense(params[0], images.reshape(len(images), -1))
    x, stats = pe.batch_norm(params[1], stats, x, training=key is not None)
    return pe.dense(params[2], pe.dropout(key, jax.nn.relu(x), 0.2)), stats

tm.NETWORKS["tiny"] = tm.Network(init, logits)
tm.RECIPES["tiny"] = tm.RECIPES["batchnorm"]._replace(network="tiny")
"""
SCRIPT = f"{TINY}sys.exit(tm.main(sys.argv[1:]))"
exec(TINY, {})


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """Make a data set of 768 training and 200 test images in MNIST's form."""
    return write_files(tmp_path_factory.mktemp("data"), small_files(768, 200))


def words(*flags):
    """Split what is a string, and take anything else as a word."""
    return [w for f in flags for w in (f.split() if isinstance(f, str) else [str(f)])]


@pytest.fixture
def script(capsys, small_folder):
    """Return a function that runs the script on them: status, output, errors."""

    def run(*flags):
        return tm.main(words("--data-dir", small_folder, *flags)), *capsys.readouterr()

    return run


@pytest.fixture
def wrong(capsys):
    """Return a function that runs a command that fails: the one line that it says."""

    def run(main, *flags, status=2):
        try:
            ended = main(words(*flags))
        except SystemExit as stop:
            ended = stop.code
        out, err = capsys.readouterr()
        name, said = err.split(": error: ", 1)
        assert name == Path(inspect.getfile(main)).name and err.count("\n") == 1
        assert ended == status and "epoch" not in out
        assert not out or name != "uci.py"  # which trains nothing to be refused
        return said

    return run


def metrics_of(folder):
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def idx(array, dims=None):
    """Make the bytes of an IDX file, with a header that may lie."""
    array = np.asarray(array, np.uint8)
    dims = dims or array.shape
    return struct.pack(f">I{len(dims)}I", 0x0800 + len(dims), *dims) + array.tobytes()


@functools.cache
def small_files(num_train=40, num_test=20):
    """Make the contents of four sound files, by name."""
    data = tm.generate_digits(3, num_train, num_test)
    arrays = [leaf[..., 0] if leaf.ndim == 4 else leaf for leaf in data[1:]]
    return {name: idx(array) for name, array in zip(tm.MNIST_FILES, arrays)}


def write_files(folder, contents, *, packed=False):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        content = gzip.compress(content, 1) if packed else content
        (folder / (f"{name}.gz" if packed else name)).write_bytes(content)
    return folder


# Two epochs of 8 steps.
RUN = "--members 2 --devices 2 --network tiny --epochs 2 --batch-size 32"
RUN += " --train-size 256"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, small_folder):
    """Return the folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert tm.main(words(RUN, "--data-dir", small_folder, "--workdir", folder)) == 0
    return folder


def test_run_is_the_one_by_hand(script, small_folder, tmp_path):
    flags = "--optimizer sgd --learning-rate 0.1 --momentum 0.5 --schedule linear"
    more = "--bootstrap --seed 3 --max-shift 1 --workdir"
    assert script(RUN, flags, more, tmp_path)[0] == 0
    _, *data = tm.load_mnist(small_folder)

    def loss_fn(params, stats, key, images, labels):
        shift_key, key = jax.random.split(key)
        images = tm.shift_images(shift_key, images, 1).astype(jnp.float32) / 255
        logits, stats = tm.NETWORKS["tiny"].logits(params, stats, images, key)
        return pe.softmax_cross_entropy(logits, labels).mean(), stats

    def init(key):
        return tm.NETWORKS["tiny"].init(key, image_shape=(28, 28, 1), num_classes=10)

    optimizer = pe.sgd(pe.linear_schedule(0.1, 16), momentum=0.5)
    options = dict(members=2, devices=2, stateful=True)
    trainer, state = begin(pe.make_trainer(init, loss_fn, optimizer, **options), 3)
    for epoch in range(2):
        which = dict(members=2, seed=3, epoch=epoch, bootstrap=True)
        order = pe.epoch_order(256, 32, **which)
        state, _ = trainer.epoch(state, data[:2], order)
    found = pe.load(tmp_path / names_of(16)[0], trainer.like())
    assert leaves_equal(found, trainer.gather(state))


def test_settings_of_a_run_name_all_of_its_data():
    args = tm.parse_arguments([])
    data = tm.generate_digits(0, 40, 20)
    settings = [tm.describe(args, data)]
    for i in range(1, 5):
        parts = [x.copy() for x in data[1:5]]
        parts[i - 1].flat[7] += 1
        settings.append(tm.describe(args, tm.Dataset("x", *parts, data[5])))
    assert len({each["dataset_sha256"] for each in settings}) == 5


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint_*"))


def names_of(*steps):
    return [f"checkpoint_{step:08d}.safetensors" for step in steps]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def results(folder):
    """Return what a run ends with: checkpoint, metrics but for times, report."""
    lines = metrics_of(folder)
    metrics = [{k: v for k, v in m.items() if "second" not in k} for m in lines]
    return (folder / names_of(16)[0]).read_bytes(), metrics, report_of(folder)


@pytest.fixture
def run_in(script):
    """Return a function that trains in a folder: status, output, errors."""
    return lambda folder, *flags: script(RUN, "--workdir", folder, *flags)


# ---------------------------------------------------------------------------------
# train_mnist.py: training
# ---------------------------------------------------------------------------------


def test_shift_moves_each_image_whole_by_its_own_offset():
    images = np.zeros((64, 9, 9, 1), np.uint8)
    images[:, 4, 4] = 7
    moved = np.asarray(tm.shift_images(jax.random.key(0), jnp.asarray(images), 2))
    assert moved.shape == images.shape and moved.dtype == np.uint8
    assert_array_equal(moved.sum(axis=(1, 2, 3)), np.full(64, 7))
    places = {tuple(p) for p in np.argwhere(moved[..., 0])[:, 1:] - 4}
    assert all(max(map(abs, place)) <= 2 for place in places)
    assert {p for p, _ in places} == {p for _, p in places} == {-2, -1, 0, 1, 2}
    assert len(places) > 15  # of 25: down and across are drawn apart


def test_trainer_learns_from_bytes_through_a_batch_in_parts(monkeypatch):
    sizes, data = set(), tm.generate_digits(0, 256, 40)

    def logits(weight, _, images, key=None):
        sizes.add(len(images))
        return images.reshape(len(images), -1) @ weight, ()

    network = tm.Network(lambda key, **form: (jnp.zeros((784, 10)), ()), logits)
    monkeypatch.setitem(tm.NETWORKS, "cnn", network)
    trainer = tm.make_trainer(tm.RECIPES["cnn"], 1, 1, 32, data.form())
    order = np.resize(np.arange(256), (1, 32, 64))  # eight times
    state = trainer.init(jax.random.key(0))
    state, losses = trainer.epoch(state, trainer.place(data[1:3]), order)
    assert losses[0, -8:].mean() < 1.5 and sizes == {32}
    expected = data.test_images.reshape(40, 784) / 255 @ trainer.gather(state).params[0]
    probs = trainer.predict_members(state, data.test_images)
    assert_allclose(probs[0], jax.nn.softmax(expected), atol=1e-4)


# ---------------------------------------------------------------------------------
# train_mnist.py: the run
# ---------------------------------------------------------------------------------


def sorted_images(size, labels, count):
    """Draw images [N, H, W] of noise, brighter the later their label is in `labels`."""
    rows = np.resize(labels, count).astype(np.uint8)
    order = np.searchsorted(labels, rows)[:, None, None]
    noise = np.random.default_rng(count).random((count, *size))
    return np.uint8(255 * noise * (order + 1) / len(labels)), rows


def write_set(folder, size, labels, counts=(64, 30)):
    arrays = [x for count in counts for x in sorted_images(size, labels, count)]
    return write_files(folder, dict(zip(tm.MNIST_FILES, map(idx, arrays)))), arrays


@pytest.mark.once
@cases("size, labels", ((32, 32), [*range(1, 27)]), ((12, 40), [5, 9, 200]))
def test_any_set_of_images_is_trained_as_it_is(
    tmp_path, capsys, drawn, monkeypatch, size, labels
):
    folder, (_, _, images, true) = write_set(tmp_path / "data", size, labels)
    monkeypatch.chdir(tmp_path)
    flags = "--network tiny --members 3 --devices 1 --epochs 1 --batch-size 16 --plot"
    assert tm.main(words(flags, "--data-dir data --workdir .")) == 0
    height, width = size
    said = f"64 training and 30 test images of {height} x {width}, {len(labels)} classe"
    assert said in capsys.readouterr().out
    run, report = tm.load_run(tmp_path, 1), report_of(tmp_path)
    form = {"classes": labels, "image_shape": [height, width, 1]}
    assert run.config.items() >= form.items() <= report["config"].items()
    probs = run.predict_members(images)
    found = run.classes[probs.mean(axis=0).argmax(axis=-1)]
    assert np.mean(found == true) == report["ensemble"]["accuracy"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    unsure = np.argsort(-em.predictive_entropy(probs))[:12]
    shown = drawn().subfigs[1].axes
    assert [axes.get_title() for axes in shown] == [f"label {true[i]}" for i in unsure]
    votes = [int(v.split(": ")[0]) for v in shown[0].get_xlabel().split("  ")]
    assert set(votes) == set(run.classes[probs[:, unsure[0]].argmax(axis=-1)])
    assert tm.main(words("--resume --devices 1 --workdir .")) == 0
    folder.rename("moved")
    assert tm.main(words("--resume --devices 1 --workdir . --data-dir moved")) == 0


@cases("mode, members, network", ("ensemble", 3, "tiny"), ("sync", 1, "cnn"))
def test_script_learns_and_reports(tmp_path, script, mode, members, network):
    folder = tmp_path / "a" / "b"
    flags = f"--mode {mode} --members {members} --network {network} --devices 2"
    flags += " --epochs 3 --batch-size 32 --learning-rate 0.03 --workdir"
    status, out, _ = script(flags, folder)
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("epoch:")]
    report, metrics = report_of(folder), metrics_of(folder)
    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    for line, m in zip(lines, metrics, strict=True):
        said = f"epoch: {m['epoch']:2d}"
        for part in "train", "test":
            loss, accuracy = m[f"{part}_loss"], 100 * m[f"{part}_accuracy"]
            said += f", {part}_loss: {loss:.4f}, {part}_accuracy: {accuracy:.2f}"
        assert line == said
        assert m["train_seconds"] > 0 < m["test_seconds"]
        rate = members * 768 / m["train_seconds"]
        assert_allclose(m["member_images_per_second"], rate)
    assert metrics[-1]["test_accuracy"] > 0.6 > 0.2 + metrics[0]["test_loss"] / 10
    assert report["dataset"].startswith("data in MNIST's form")
    assert report["test_examples"] == 200 and report["members"] == members
    assert report["config"]["batch_size"] == 32 and report["config"]["devices"] == 2
    assert report["versions"]["jax"] == jax.__version__
    _, *tables = (table.splitlines() for table in out.split("\n\n"))
    names = [*[f"member {i}" for i in range(members)], "ensemble"]
    names = ["model"] if mode == "sync" else names
    assert [row[:10].strip() for row in tables[0][2:]] == names
    assert f"{100 * report['ensemble']['accuracy']:.2f}%" in tables[0][-1]
    if mode == "ensemble":
        sizes = [f"{100 * each['accuracy']:.2f}%" for each in report["by_size"]]
        shown = [row.split()[:3] for row in tables[1][2:]]
        assert shown == [["first", f"{i}", size] for i, size in enumerate(sizes, 1)]


def test_member_that_fails_is_named_and_left_out(tmp_path, script, monkeypatch):
    train = tm.Run.train

    def spoil(run):
        gathered = run.trainer.gather(run.state)
        gathered.params[2].bias[1] = np.nan
        run.state = run.trainer.scatter(gathered)
        return train(run)

    monkeypatch.setattr(tm.Run, "train", spoil)
    flags = "--members 3 --devices 2 --epochs 2 --network tiny --workdir"
    status, out, _ = script(flags, tmp_path)
    assert status == 0
    notice = "member 1 is not finite after epoch 1, nor was its loss in 12 steps of it"
    assert out.count("notice: member") == 1 and notice in out
    assert out.index(notice) < out.index("epoch:  1,")
    rows = {row[:8]: row for row in out.splitlines()}
    assert "failed" in rows["member 1"] and "%" in rows["member 2"]
    assert "%" in rows["first 2 "] and "first 3 " not in rows
    report = report_of(tmp_path)
    assert report["failed"] == [1] and report["members"] == 3
    assert report["member"][1] is None and len(report["by_size"]) == 2
    assert report["ensemble"] == report["by_size"][1]
    run = tm.load_run(tmp_path, 1)  # without it
    assert run.predict_members(np.ones((5, 28, 28), np.uint8)).shape == (2, 5, 10)
    assert np.isfinite(run.predict(np.ones((5, 28, 28), np.uint8))).all()


# After a step it is the state alone that is not finite, and the loss after the next;
# without a checkpoint, it is the evaluation that sees it.
SEEN_AFTER = {"--workdir": 8, "--save-every .125 --workdir": 1, "--skip-nonfinite": 8}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("flags, step", SEEN_AFTER.items())
def test_diverged_run_keeps_what_is_good(tmp_path, script, flags, step):
    saved = "--workdir" in flags
    status, _, err = script(RUN, "--learning-rate 1e39", flags, *[tmp_path] * saved)
    why = f"no model is finite after step {step}; lower --learning-rate"
    why += " (the checkpoint of step 0 is good)" * saved
    assert status == 3 and err == f"train_mnist.py: error: {why}\n"
    assert checkpoints(tmp_path) == names_of(0) * saved
    assert not (tmp_path / "report.json").exists()


def test_segments_are_short_and_end_at_saves(tmp_path, run_in, whole_run, monkeypatch):
    advance, lengths = tm.Run.advance, []

    def advancing(run, order):
        lengths.append(order.shape[1])
        advance(run, order)

    monkeypatch.setattr(tm.Run, "advance", advancing)
    for steps, expected in (4, "3321331"), (2, "21212121211"):
        monkeypatch.setattr(tm, "SEGMENT_IMAGES", steps * 32)
        folder = tmp_path / expected
        assert run_in(folder, "--save-every .375")[0] == 0  # every 3 steps
        assert lengths == [*map(int, expected)]
        assert results(folder) == results(whole_run)
        lengths.clear()


@cases("count, expected", (30, [8, 8, 8, 6]), (34, [8, 8, 8, 10]), (3, [3]))
def test_parts_of_predictions_are_short_but_no_shorter_than_a_chunk(count, expected):
    sizes = []

    def predict_members(_, part):
        sizes.append(len(part))
        return np.zeros((6, len(part), 2))

    # Of 24 images for a device: 8 of each of its three members, two chunks.
    trainer = types.SimpleNamespace(layout=pe.Layout(6, 2, 3, 1), chunk=4)
    trainer.predict_members = predict_members
    run = types.SimpleNamespace(trainer=trainer, segment_images=24, state=None)
    run.look = lambda: None
    assert tm.Run.predict(run, np.zeros((count, 1))).shape == (6, count, 2)
    assert sizes == expected


def stop_at(monkeypatch, step, how=signal.SIGTERM, looks=1):
    """Let a run of segments of one step receive a signal after one of the steps.

    That is before it looks for one the so many-th time, as it does after the step and
    then in the evaluation.
    """
    look, left = tm.Run.look, itertools.count(1 - looks)

    def looking(run):
        if run.done == step and next(left) == 0:
            signal.raise_signal(how)
        return look(run)

    monkeypatch.setattr(tm.Run, "look", looking)
    monkeypatch.setattr(tm, "SEGMENT_IMAGES", 1)


@cases(
    "steps, how, looks, devices",
    ((3, 7, 9), signal.SIGTERM, 1, 2),
    ((8,), signal.SIGINT, 1, 2),
    ((8,), signal.SIGTERM, 3, 2),  # in the evaluation
    ((6, 12), signal.SIGTERM, 1, 1),
)
def test_resumed_run_ends_in_the_bits_of_one_that_was_never_stopped(
    tmp_path, script, whole_run, monkeypatch, steps, how, looks, devices
):
    flags = f"{RUN} --save-every .375"  # every 3 steps
    for step in steps:
        stop_at(monkeypatch, step, how, looks)
        status, out, err = script(flags, "--workdir", tmp_path)
        monkeypatch.undo()
        assert status == 128 + how and err.count("\n") == 1
        assert f"{how.name}: what is done is in {tmp_path}" in err
        assert checkpoints(tmp_path)[-1] == names_of(step)[0]
        assert ("epoch:" in out) == (step > 8)
        flags = "--resume --devices 2"  # all others are those of the run
    flags = f"--resume --devices {devices} --workdir"
    status, out, _ = script(flags, tmp_path)
    assert status == 0 and f"resumed from {tmp_path / names_of(step)[0]}" in out
    *numbers, report = results(tmp_path)
    *expected, whole = results(whole_run)
    assert numbers == expected
    whole["config"] |= pe.layout(2, devices)._asdict()
    assert report == whole


def test_run_stops_goes_on_and_is_loaded_where_less_is_there(
    tmp_path, elsewhere, script, whole_run, monkeypatch
):
    stop_at(monkeypatch, 6)
    assert script(RUN, "--workdir", tmp_path)[0] == 143
    monkeypatch.undo()
    first, last = names_of(0, 16)
    with open(tmp_path / first):  # is then not removed, and the run goes on
        assert script("--resume --devices 2 --keep 1 --workdir", tmp_path)[0] == 0
    assert checkpoints(tmp_path) == [first, last]
    assert results(tmp_path) == results(whole_run)
    probs = tm.load_run(tmp_path).predict(np.zeros((3, 28, 28), np.uint8))
    assert_allclose(probs.sum(axis=1), 1, atol=1e-6)


def test_one_model_that_is_not_finite_stops(tmp_path, run_in, monkeypatch):
    def shift(key, images, max_shift):
        bad = jax.random.bernoulli(key, 0.2)  # a fifth of the training batches
        return jnp.where(bad, jnp.nan, images.astype(jnp.float32))

    monkeypatch.setattr(tm, "shift_images", shift)
    sync = "--members 1 --mode sync"
    for flags in "--save-every .125", "--save-every .125 --resume":
        status, _, err = run_in(tmp_path / "a", sync, flags)
        assert status == 3 and err.count("\n") == 1
        assert "no model is finite after" in err
        newest = checkpoints(tmp_path / "a")[-1]
        assert f"the checkpoint of step {int(newest[11:19])} is good" in err
    status, out, _ = run_in(tmp_path / "b", sync, "--skip-nonfinite")
    assert status == 0 and "notice: member 0 skipped" in out
    report = report_of(tmp_path / "b")
    assert report["failed"] == [] and report["config"]["skip_nonfinite"]


# ---------------------------------------------------------------------------------
# train_mnist.py: progress, report, picture
# ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, call, out=Terminal, err=Terminal):
    """Return what a call prints: output, errors."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out := out())
        patch.setattr(sys, "stderr", err := err())
        call()
    return out.getvalue(), err.getvalue()


def test_progress_is_drawn_on_a_terminal(tmp_path, small_folder, monkeypatch):
    tqdm, counts = pytest.importorskip("tqdm").tqdm, []
    update = tqdm.update
    monkeypatch.setattr(tqdm, "update", lambda *x: [counts.append(x[1]), update(*x)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = words("--network tiny --devices 2 --epochs 1 --data-dir", small_folder)
    out, err = printed(monkeypatch, lambda: tm.main(flags))
    assert "epoch 1 of 1:   0%" in err and "predicting:   0%" in err
    assert "/1.54k [" in err and "images/s" in err  # 768, by each of two members
    assert sum(counts) == 1536 + 2 * (200 + 100)  # and tested, and on half as many
    assert err.endswith("\r")  # the bar is wiped off
    assert out.splitlines()[2].startswith("epoch:  1,")
    assert not list(tmp_path.iterdir())  # nothing is written without a workdir


def test_progress_is_drawn_nowhere_else(monkeypatch):
    def bar():
        with tm.progress_bar("predicting", 3) as advance:
            advance(1)

    assert printed(monkeypatch, bar, io.StringIO) == ("", "")
    assert printed(monkeypatch, bar, Terminal, io.StringIO) == ("", "")
    monkeypatch.setattr(tm.importlib.util, "find_spec", lambda name: None)
    assert printed(monkeypatch, bar) == ("", "")


@pytest.fixture
def drawn():
    """Return a function that returns the figure that was saved last."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    with mock.patch.object(figure, "savefig", autospec=True, side_effect=save) as saved:
        yield lambda: saved.call_args.args[0]


def lines_of(axes):
    return {line.get_label(): np.transpose(line.get_data()) for line in axes.lines}


PLOTTED_LOSSES = "train_loss", "ensemble_test_loss", "member_test_loss"
PLOTTED_ACCURACIES = "train_accuracy", "test_accuracy", "member_test_accuracy"


def test_picture_shows_what_is_in_the_report(tmp_path, whole_run, small_folder, drawn):
    report, metrics = report_of(whole_run), metrics_of(whole_run)
    data = tm.load_mnist(small_folder)
    probs = tm.load_run(whole_run, 2).predict_members(data.test_images)
    tm.draw_report(tmp_path / "report.png", metrics, report, probs, data)
    curves, images = drawn().subfigs
    (*_, diagram), (*_, histogram) = panels = np.reshape(curves.axes, (2, 3))
    for (epochs, sizes, _), key, factor, *names in [
        (panels[0], "negative_log_likelihood", 1, *PLOTTED_LOSSES),
        (panels[1], "accuracy", 100, *PLOTTED_ACCURACIES),
    ]:
        numbers = [factor * np.array([m[name] for m in metrics]) for name in names]
        train, test, members = numbers
        lines = lines_of(epochs)
        assert len(lines) == 4  # two members, the ensemble, training
        assert_allclose(lines["ensemble"], np.transpose([[1, 2], test]))
        assert_allclose(lines["on training images"], np.transpose([[1, 2], train]))
        assert_allclose([x.get_ydata() for x in epochs.lines[:2]], members.T)
        assert test[1] == factor * report["ensemble"][key]
        assert_array_equal(members[1], [factor * m[key] for m in report["member"]])
        shown = [[k, factor * m[key]] for k, m in enumerate(report["by_size"], 1)]
        assert_allclose(sizes.lines[1].get_xydata(), shown)
    assert set(lines_of(diagram)) == {"members", "ensemble", "calibrated"}
    assert all(len(axes.get_xlabel()) > 4 and axes.get_ylabel() for axes in curves.axes)
    assert histogram.get_yscale() == "log"
    for axes in images.axes:
        votes = [int(vote.split(": ")[1]) for vote in axes.get_xlabel().split("  ")]
        assert sum(votes) == 2 and axes.get_title().startswith("label ")


def draw(folder, probs, metrics):
    """Draw a report of probabilities [K, 30, 10]; return the data that it is of."""
    data = tm.generate_digits(0, 0, 30)._replace(test_labels=np.arange(30) % 10)
    report = tm.report_finite(probs, data.test_labels)
    tm.draw_report(folder / "report.png", metrics, report, probs, data)
    return data


def test_picture_leaves_out_members_that_failed(tmp_path, drawn):
    probs = random_probs(0, 4, 30, 10)
    probs[2] = np.nan
    data = draw(tmp_path, probs, [])
    curves, images = drawn().subfigs
    assert "an ensemble of 3" in drawn().get_suptitle()
    whole = probs[[0, 1, 3]].mean(axis=0)
    counts, confidence, hits = em.reliability(whole, data.test_labels)
    points = lines_of(curves.axes[2])["ensemble"]
    assert_allclose(points, 100 * np.stack([confidence, hits], 1)[counts > 0])
    unsure = np.argsort(np.sum(whole * np.log(whole), axis=-1))[:12]
    titles = [axes.get_title() for axes in images.axes]
    assert titles == [f"label {data.test_labels[i]}" for i in unsure]
    image = images.axes[0].get_images()[0].get_array()
    assert_array_equal(image, data.test_images[unsure[0], ..., 0])


def test_picture_of_one_model(tmp_path, drawn):
    metrics = dict.fromkeys(PLOTTED_LOSSES + PLOTTED_ACCURACIES, 0.5) | {"epoch": 1}
    draw(tmp_path, random_probs(0, 1, 30, 10), [metrics])
    curves, images = drawn().subfigs
    assert len(curves.axes) == 6 and images.axes[0].get_xlabel().endswith(": 1")
    over_epochs = curves.axes[0]
    low, high = over_epochs.get_xlim()
    assert [x for x in over_epochs.get_xticks() if low <= x <= high] == [1]
    assert {x.get_marker() for x in over_epochs.lines} == {*"xso"}  # a point shows


# ---------------------------------------------------------------------------------
# train_mnist.py: data
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_other_data_in_the_same_form_is_loaded_with_a_notice(tmp_path, capsys, packed):
    expected = tm.generate_digits(3, 40, 20)
    data = tm.load_mnist(write_files(tmp_path, small_files(), packed=packed))
    for leaf, want in zip(data[1:], expected[1:]):
        assert leaf.dtype == want.dtype
        assert_array_equal(leaf, want)
    assert "MNIST's form" in data.name
    notice = capsys.readouterr().out
    assert notice.count("\n") == 1 and "holds other data than MNIST" in notice


IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = tm.MNIST_FILES
GOOD = idx(np.ones((40, 28, 28)))
PACKED = gzip.compress(idx(np.ones(40)), mtime=0)
BAD_FILES = [  # a file, what it holds, and what is said of it
    (IMAGES, b"PK\3\4" + GOOD[4:], "header 0x504b0304000000280000001c0000001c; expect"),
    (IMAGES, b"\0\0\r\3" + GOOD[4:], "0x00000803: unsigned bytes in 3 dimensions"),
    (IMAGES, idx(np.ones(40)), "header 0x0000080100000028"),
    (IMAGES, b"", "header 0x; expected 16 bytes, at first 0x00000803"),
    (IMAGES, GOOD[:15], "00001c000000; expected 16 bytes, at first 0x00000803"),
    (IMAGES, GOOD[:-5], "holds 31355 of the 31360 bytes"),
    (IMAGES, GOOD + b"\0", "more than the 31360 bytes"),
    (IMAGES, idx(np.ones((0, 28, 28))), "declares [0, 28, 28], 0 bytes; expected 1 to"),
    (IMAGES, idx([], dims=(2**32 - 1,) * 3), "; expected 1 to 2147483648"),
    (LABELS, idx(np.ones(39)), "39 labels for 40 images"),
    (LABELS, idx(np.ones(40)), "all labels are 1; expected two or more"),
    (TEST_IMAGES, idx(np.ones((20, 7, 8))), "are 7 x 8; those to train on are 28 x 28"),
    (TEST_LABELS, idx(np.ones(9)), "9 labels for 20 images"),
    (TEST_LABELS, idx([1] * 19 + [77]), "label 77 is none of the 10 classes of"),
]
BAD_FILES += [(f"{name}.gz", gzip.compress(x), said) for name, x, said in BAD_FILES]
BAD_FILES += [
    (f"{LABELS}.gz", PACKED[:-8], "ended before the end-of-stream"),
    (f"{LABELS}.gz", PACKED[:-8] + bytes(4) + PACKED[-4:], "CRC check failed"),
    (f"{LABELS}.gz", b"\0" + PACKED, "Not a gzipped file"),
    (f"{LABELS}.gz", b"", "header 0x; expected 8 bytes, at first 0x00000801"),
    (f"{LABELS}.gz", PACKED[:10] + b"\7" + PACKED[11:], "while decompressing data"),
    (f"{LABELS}.gz", PACKED + gzip.compress(b"x"), "more than the 40 bytes"),
]


@pytest.mark.parametrize("case", BAD_FILES, ids=lambda case: f"{case[0]}: {case[2]}")
def test_bad_file_is_named(tmp_path, case):
    name, content, message = case
    contents = dict(small_files())
    del contents[plain := name.removesuffix(".gz")]
    with pytest.raises(tm.Failure, match=re.escape(message)) as error:
        tm.load_mnist(write_files(tmp_path, {**contents, name: content}))
    said = str(error.value)
    assert said.startswith(str(tmp_path)) and plain in said and "\n" not in said


BOMB = gzip.compress(idx(np.zeros(2**26), (40, 28, 28)), 1, mtime=0)
PROMISE = gzip.compress(idx([], (2**21, 28, 28)), mtime=0)


@cases(
    "content, message",
    (BOMB, "more than the 31360 bytes"),
    (PROMISE, "holds 0 of the 1644167168 bytes"),
    (b"", "content is not MNIST's"),  # of what is downloaded
)
def test_what_is_promised_takes_no_memory(tmp_path, monkeypatch, content, message):
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(content)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(BOMB))
    monkeypatch.setattr(tm, "MAX_DOWNLOAD", 2**20)
    tracemalloc.start()
    with pytest.raises(tm.Failure, match=message):
        tm.read_idx(path) if content else tm.download(tmp_path, IMAGES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6


class Answer(io.BytesIO):
    def read(self, size):
        assert size == tm.MAX_DOWNLOAD  # bytes that are read, no more
        return super().read(size)


@pytest.fixture
def mirrors(monkeypatch):
    """Stand in for the network: addresses and what they give, bytes or an error."""
    answers, asked, files = {}, [], {}
    for name, content in small_files().items():
        files[name] = hashlib.sha256(content).hexdigest()
        for mirror in tm.MIRRORS:
            answers[f"{mirror}{name}.gz"] = gzip.compress(content)
    monkeypatch.setattr(tm, "MNIST_FILES", files)

    def urlopen(url, timeout):
        assert timeout == tm.TIMEOUT
        asked.append(url)
        if isinstance(answers[url], Exception):
            raise answers[url]
        return Answer(answers[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return answers, asked


def test_missing_file_is_not_taken_from_another_data_set(tmp_path, mirrors):
    with pytest.raises(tm.Failure, match=f"{LABELS} is missing, and {IMAGES} is not"):
        tm.load_mnist(write_files(tmp_path, {IMAGES: GOOD}))
    assert not mirrors[1]


def test_missing_files_are_downloaded_once_and_verified(tmp_path, mirrors, elsewhere):
    _, asked = mirrors
    folder = tmp_path / "a" / "b"
    data = tm.load_mnist(folder)
    assert data.name == "MNIST" and len(data.train_images) == 40
    assert {path.stem for path in folder.glob("*.gz")} == set(small_files())
    assert len(asked) == 4 and all(url.startswith(tm.MIRRORS[0]) for url in asked)
    assert leaves_equal(tm.load_mnist(folder)[1:], data[1:]) and len(asked) == 4


OTHER = [urllib.error.URLError("no route"), TimeoutError("timed out"), b"", b"<html>"]
OTHER += [http.client.IncompleteRead(b""), PACKED]  # sound, but other content


@pytest.mark.parametrize("answer", OTHER, ids=repr)
def test_failed_mirror_is_followed_by_the_next(tmp_path, mirrors, answer):
    answers, asked = mirrors
    first, second = (f"{mirror}{LABELS}.gz" for mirror in tm.MIRRORS)
    answers[first] = answer
    assert tm.load_mnist(tmp_path).name == "MNIST"
    assert asked[asked.index(first) + 1] == second
    assert len(list(tmp_path.iterdir())) == 4


def test_auto_falls_back_and_mnist_says_why(tmp_path, mirrors, capsys, monkeypatch):
    answers, _ = mirrors
    answers.update(dict.fromkeys(answers, urllib.error.URLError("no route to host")))
    first, second = (f"{mirror}{IMAGES}.gz" for mirror in tm.MIRRORS)
    answers[second] = gzip.compress(b"something else entirely")
    monkeypatch.setattr(tm, "generate_digits", lambda seed: f"digits {seed}")
    assert tm.load_data("auto", tmp_path) == "digits 0"
    message = said_by(tm.Failure, tm.load_data, "mnist", tmp_path)
    assert f"notice: training on generated digits: {message}" in capsys.readouterr().out
    assert message.startswith(f"{tmp_path / IMAGES} is missing, and no mirror gives it")
    assert f"{first}: <urlopen error no route to host>" in message
    assert f"{second}: content is not MNIST's (its SHA-256 differs)" in message
    assert not list(tmp_path.iterdir())
    write_files(tmp_path, {IMAGES: b"damaged"})
    assert "expected 16" in said_by(tm.Failure, tm.load_data, "auto", tmp_path)


@pytest.mark.skipif(not MNIST_DIR, reason="MNIST_DIR is not set")
def test_mnist_itself_is_recognized(capsys, monkeypatch):
    monkeypatch.setattr(tm, "download", None)
    data = tm.load_mnist(Path(MNIST_DIR))
    assert data.name == "MNIST" and capsys.readouterr().out == ""
    form = {"image_shape": [28, 28, 1], "classes": [*range(10)]}
    assert data.form() == form == tm.generate_digits(0, 1, 1).form()
    shapes = [(60_000, 28, 28, 1), (60_000,), (10_000, 28, 28, 1), (10_000,)]
    assert [leaf.shape for leaf in data[1:5]] == shapes
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


def test_generated_digits_have_mnists_form_and_depend_on_the_seed():
    data = tm.generate_digits(0, 2500, 1200)
    shapes = [(2500, 28, 28, 1), (2500,), (1200, 28, 28, 1), (1200,)]
    assert [leaf.shape for leaf in data[1:5]] == shapes
    assert data.train_images.dtype == np.uint8 and data.test_labels.dtype == np.int32
    assert np.bincount(data.train_labels, minlength=10).min() > 180
    assert 0.05 < data.train_images.mean() / 255 < 0.25
    assert (data.train_images.max(axis=(1, 2, 3)) > 128).all()
    fewer, other = tm.generate_digits(0, 700, 10), tm.generate_digits(1, 700, 10)
    assert_array_equal(fewer.train_images, data.train_images[:700])
    assert_array_equal(fewer.test_labels, data.test_labels[:10])
    assert (other.train_images != fewer.train_images).any(axis=(1, 2, 3)).all()
    assert not np.array_equal(data.train_labels[:1200], data.test_labels)


# ---------------------------------------------------------------------------------
# train_mnist.py: the folder of a run
# ---------------------------------------------------------------------------------


def test_finished_run_predicts_what_it_reported_and_recorded(whole_run, small_folder):
    def files():
        paths = whole_run.glob("*")
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    data, before, report = tm.load_mnist(small_folder), files(), report_of(whole_run)
    for devices in 2, 1, None:
        run = tm.load_run(str(whole_run), devices)
        assert run.trainer.layout == pe.layout(2, devices or D)
        probs = run.predict_members(data.test_images)
        if devices == 2:  # as it trained
            expected = probs
            found = em.ensemble_report(probs, data.test_labels)
            assert found == {name: report[name] for name in found}
            half = run.predict_members(data.train_images[:100]), data.train_labels[:100]
        assert_close(probs, expected)
        assert_close(run.predict(data.test_images[..., 0]), expected.mean(axis=0))
    gathered = run.trainer.gather(run.state)
    model = member((gathered.params, gathered.model_state), 1)
    logits, _ = tm.NETWORKS["tiny"].logits(*model, np.float32(data.test_images / 255))
    assert_close(expected[1], jax.nn.softmax(logits))
    last = metrics_of(whole_run)[-1]
    for part, scored in ("test", found), ("train", em.ensemble_report(*half)):
        assert last[f"{part}_accuracy"] == scored["ensemble"]["accuracy"]
        losses = [scores["negative_log_likelihood"] for scores in scored["member"]]
        assert_allclose(last[f"{part}_loss"], np.mean(losses))
    assert run.classes.tolist() == [*range(10)] and run.config["batch_size"] == 32
    assert files() == before
    x = data.test_images
    for images in x / 255, x[:, 1:], x[0, ..., 0], x.astype(int):
        said = f"images are {images.dtype} {list(images.shape)}; expected uint8 [N, 28"
        assert said in said_by(ValueError, run.predict, images)
    with pytest.raises(ValueError, match="9 devices are asked for; there are 8"):
        tm.load_run(whole_run, 9)


LAST = "checkpoint_00000016.safetensors"
UNFINISHED = [  # what is not there of a run, or what it holds instead; what is said
    ("", None, "run/config.json: No such file or directory; "),
    ("config.json", None, "run/config.json: No such file or directory; "),
    ("report.json", None, "run/report.json: No such file or directory; "),
    (LAST, None, "it is at step 8 of 16"),
    ("checkpoint_*", None, "it is at step None of 16"),
    (LAST, "x", "has no digest of save's"),
    (LAST, *names_of(0), f"{LAST}: holds step 0, not step 16"),
    ("config.json", "{", "Expecting property name"),
    ("config.json", "[]", "config.json: expected an object"),
    ("config.json", "{}", "config.json: 'network' is missing"),
    ("config.json", '{OLD, "members": 3}', "has scores of 2 of 2 members; config.json"),
    ("config.json", '{OLD, "batch_size": 0}', "config.json: argument --batch-size: "),
    ("config.json", '{OLD, "network": "x"}', "--network: invalid choice: 'x'"),
    ("report.json", "{}", "report.json: 'member' is missing"),
    ("report.json", "[" * 10**5, "report.json: maximum recursion depth exceeded"),
    ("report.json", '{"member": 5}', "report.json: 'int' object is not iterable"),
    ("report.json", '{"member": [{}]}', "scores of 1 of 1 members; config.json has 2"),
    ("report.json", '{"member": [null, 5]}', "scores of 0 of 2 members; config.json"),
]


@pytest.mark.parametrize("name, content, message", UNFINISHED)
def test_unfinished_run_is_not_loaded(tmp_path, whole_run, name, content, message):
    folder = tmp_path / "run"
    if name:
        shutil.copytree(whole_run, folder)
        old = (folder / "config.json").read_text().strip().strip("{}")
        for path in folder.glob(name):
            path.unlink()
    if content and (whole_run / content[:99]).exists():
        shutil.copy(whole_run / content, folder / name)
    elif content:
        (folder / name).write_text(content.replace("OLD", old))
    said, where = said_by(ValueError, tm.load_run, folder), f"--workdir {folder}"
    assert said.startswith(f"{folder} holds no finished run: ")
    assert message in said and "\n" not in said
    assert said.endswith(f"; to go on with one: python train_mnist.py --resume {where}")


@cases(
    "content, epochs",
    ('{"epoch": 1}\n{"epoch": 2}\n{"epo', 2),
    ('{"epoch": 1}\n{"epoch": 3}', 1),
    ('{"epoch": 1}\n{"epo', 1),
    ("5", 0),
    ("[]", 0),
    ("{}", 0),
    ("[" * 10**5, 0),
)
def test_metrics_are_kept_up_to_a_line_that_is_damaged(
    tmp_path, capsys, content, epochs
):
    (tmp_path / "metrics.jsonl").write_text(content)
    found = tm.read_metrics(tmp_path, 2)
    assert found == [{"epoch": n} for n in range(1, epochs + 1)]
    err = capsys.readouterr().err
    assert err.count(f"warning: {tmp_path / 'metrics.jsonl'}: ") == (epochs < 2)


def test_checkpoint_of_a_run_that_skips_steps_is_no_earlier_than_it_counts(tmp_path):
    path = tmp_path / "checkpoint"
    state = pe.TrainState((), pe.SGDState(np.int32([5, 3]), ()), (), None)
    pe.save(path, state)
    plain = tm.RECIPES["cnn"]
    skipping = plain._replace(skip_nonfinite=True)
    assert leaves_equal(tm.load_members(path, 5, state, skipping), state)
    for step, recipe in ((4, skipping), (5, plain), (3, plain)):
        with pytest.raises(ValueError, match=f"holds step 5, not step {step}"):
            tm.load_members(path, step, state, recipe)


@posix
def test_newest_valid_checkpoint_wins(tmp_path, run_in, whole_run):
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    first, middle, last = names_of(0, 8, 16)
    assert checkpoints(folder) == [first, middle, last]
    content = (folder / last).read_bytes()
    (folder / last).write_bytes(content[:-9] + b"x" + content[-8:])
    (folder / names_of(15)[0]).symlink_to(folder / middle)
    shutil.copy(folder / middle, folder / names_of(12)[0])
    (folder / "checkpoint_9.safetensors").write_text("of somebody else")
    first_line, _ = (folder / "metrics.jsonl").read_text().splitlines()
    later = '\n{"epoch": 2, "trai'  # than the checkpoint; damaged
    (folder / "metrics.jsonl").write_text(first_line + later)
    leftovers = [folder / f".{name}.1a2b3c4d.tmp" for name in (first, "report.png")]
    for path in leftovers:
        path.write_text("half a file")
    status, out, err = run_in(folder, "--resume --keep 1")
    assert status == 0 and f"resumed from {folder / middle}" in out
    assert err.count("warning: skipped") == 3 and "damaged" in err
    assert f"{names_of(12)[0]}: holds step 8, not step 12" in err
    assert f"{names_of(15)[0]}: not a regular file" in err
    assert results(folder) == results(whole_run)
    assert checkpoints(folder) == [last, "checkpoint_9.safetensors"]
    assert not any(path.exists() for path in leftovers)
    config = json.loads((folder / "config.json").read_text())
    assert config == json.loads((whole_run / "config.json").read_text())
    assert config["seed"] == 0 and config["data"] == "auto"
    assert Path(config["data_dir"]).is_absolute() and config["save_every"] == 1


CHOOSE = "; leave out what differs from %s, or choose another --workdir"
CHANGES = {
    "--seed 1": ("seed", 1, 0),
    "--epochs 3": ("epochs", 3, 2),
    "--max-shift 1": ("max_shift", 1, 0),
    "--skip-nonfinite": ("skip_nonfinite", True, False),
}


def test_run_that_cannot_be_resumed_is_an_error(tmp_path, run_in, whole_run):
    def refused(*flags):
        before = contents(folder)
        status, _, err = run_in(folder, "--resume", *flags)
        assert status == 2 and before == contents(folder)
        return err.splitlines()[-1]

    folder = tmp_path / "new"
    folder.mkdir()
    assert f"error: {folder / 'config.json'}: No such file" in refused()
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    path = folder / "config.json"
    config = path.read_text()
    path.write_text(config.replace('sha256": "', 'sha256": "0'))
    said = refused()
    assert "--resume: dataset_sha256 is " in said and said.endswith(CHOOSE % path)
    path.write_text(config)
    for flags in CHANGES:
        name, now, was = CHANGES[flags]
        said = f"--resume: {name} is {now} here, {was} there{CHOOSE % path}"
        assert refused(flags).endswith(said)
    for name in checkpoints(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    assert "holds no valid checkpoint, of 3" in refused()


@posix
def test_folder_is_one_runs(tmp_path, run_in):
    with tm.locked(tmp_path):
        status, out, err = run_in(tmp_path)
    assert status == 2 and f"in use by process {os.getpid()} on" in err and not out
    (tmp_path / "report.json").write_text("{}")
    status, out, err = run_in(tmp_path)
    assert status == 2 and "holds report.json of an earlier run" in err and not out
    assert contents(tmp_path) == {"report.json": b"{}"}
    with tm.locked(tmp_path):  # which the refused run holds no longer
        pass


@pytest.mark.parametrize("name", ["config.json", *names_of(8)])
def test_disk_that_refuses_a_file_ends_a_run(tmp_path, run_in, monkeypatch, name):
    replace_file = pe.replace_file

    def full(path):
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return replace_file(path)

    monkeypatch.setattr(pe, "replace_file", full)
    status, _, err = run_in(tmp_path)
    assert status == 2 and err.count("\n") == 1
    assert f"error: {tmp_path / name}: No space left on device" in err
    monkeypatch.undo()
    started = name != "config.json"
    assert checkpoints(tmp_path) == names_of(0)[:started]
    status, out, _ = run_in(tmp_path, "--resume" * started)
    assert status == 0 and ("resumed from" in out) == started


def save_steps(folder, keep, *steps):
    for step in steps:
        tm.save_checkpoint(folder, np.array(step), step, keep)


def test_checkpoints_are_whole_at_any_point_of_a_save(tmp_path, monkeypatch):
    """Which are what a kill would leave."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    for path in whole, folder:
        path.mkdir()
    save_steps(whole, 4, 10, 20, 30, 40)
    others = [*names_of(99), "checkpoint_copy.safetensors"]
    for name in others:  # damaged, or the run would go on from it; somebody else's
        (folder / name).write_bytes(b"")
    save_steps(folder, 2, 10, 20, 30)
    points = []

    def watched(call, *args, **kwargs):
        points.append(contents(folder))
        result = call(*args, **kwargs)
        points.append(contents(folder))
        return result

    for name in ("open", "write", "fsync", "replace", "unlink"):
        call = functools.partial(watched, getattr(os, name))
        monkeypatch.setattr(os, name, call)
    save_steps(folder, 2, 40)
    # Two are kept; the oldest goes when the newest has its name.
    saved, empty = contents(whole), dict.fromkeys(others, b"")
    stages = names_of(20, 30), names_of(20, 30, 40), names_of(30, 40)
    expected = [{name: saved[name] for name in names} | empty for names in stages]
    assert [found for found, _ in itertools.groupby(points)] == expected


# ---------------------------------------------------------------------------------
# train_mnist.py: signals and processes
# ---------------------------------------------------------------------------------


@pytest.fixture
def start_run(small_folder, tmp_path):
    """Yield a function that starts a process of a run in a folder, on one device."""
    flags = f"{RUN} --devices 1 --data-dir", small_folder, "--workdir", tmp_path
    # As many threads as here: a product's bits depend on it.
    env = {"NPROC": str(D), **ENVIRONMENT}
    runs = []

    def start(*more, code=SCRIPT, **slurm):
        runs.append(start_python(code, *words(*flags, *more), **env, **slurm))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


STUCK = f"""{TINY}
def save(run, whenever=False):
    print("stopping" if run.signals.received else "training", flush=True)
    tm.time.sleep(600 if run.signals.received else run.done == 0)

tm.Run.save = save
sys.exit(tm.main(sys.argv[1:]))"""


@pytest.mark.once
@posix
@cases(
    "signals",
    {"training": signal.SIGTERM},  # while JAX compiles: nothing is to be saved
    {"epoch:  1": signal.SIGTERM, "stopping": signal.SIGINT},
)
def test_signal_before_training_or_a_second_one_ends_at_once(start_run, signals):
    run = start_run("--epochs 20000", code=STUCK)
    for text, number in signals.items():
        next(line for line in run.stdout if line.startswith(text))
        run.send_signal(number)
    run.communicate(timeout=5)
    assert run.returncode == -number


@posix
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time"
    (tmp_path / "jax.py").write_text(f"{code}; time.sleep(9)")
    command = [sys.executable, HERE / "train_mnist.py"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def process_flags(port, index, count=2, timeout=20):
    flags = f"--coordinator localhost:{port} --num-processes {count}"
    return f"{flags} --process-id {index} --connect-timeout {timeout}"


@linux
def test_processes_of_a_run_end_as_one(tmp_path, start_run, whole_run):
    # What Slurm would set; JAX makes a port of the job's number.
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    ids = [{"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in "01"]
    runs = [start_run("--distributed", **slurm, **each) for each in ids]
    outs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert "of 2 processes" in outs[0][0] and "epoch" not in outs[1][0]
    assert results(tmp_path)[0] == results(whole_run)[0]


@pytest.mark.once
@linux
def test_processes_stop_together_and_notice_one_that_dies(tmp_path, start_run):
    for how, resume, expected in [
        (signal.SIGTERM, "", [143, 143]),
        (signal.SIGKILL, "--resume", [1, -9]),
    ]:
        flags, port = f"--epochs 20000 {resume}", free_port()
        runs = [start_run(flags, process_flags(port, i)) for i in range(2)]
        next(line for line in runs[0].stdout if line.startswith("epoch:"))
        runs[1].send_signal(how)
        outs = [run.communicate(timeout=60) for run in runs]
        assert [run.returncode for run in runs] == expected, outs
    assert "lost contact with another process" in outs[0][1]
    with tm.locked(tmp_path):  # which the dead hold no longer
        pass
    assert pe.load(tmp_path / checkpoints(tmp_path)[-1])


def test_no_process_leaves_before_the_first_has_saved():
    run = mock.Mock(args=types.SimpleNamespace(workdir=None))
    run.signals.agree.return_value = signal.SIGTERM
    said_by(tm.Failure, tm.Run.look, run)
    calls = [name for name, *_ in run.method_calls]
    assert calls == ["signals.agree", "save", "signals.agree"]


@pytest.mark.once
@linux
def test_processes_that_do_not_fit_together_end_with_an_error(start_run):
    port, alone = free_port(), free_port()
    with socket.create_server(("", 0)) as taken:
        _, busy = taken.getsockname()
        ports = (alone, 0, 2, 4), (busy, 0), (port, 1, 3), (port, 0)
        runs = [start_run(process_flags(*flags)) for flags in ports]
        outs = [run.communicate(timeout=60)[1] for run in runs[:3]]
    assert all(run.returncode for run in runs[:3])
    runs[3].kill()  # which would notice, too, after half a minute
    runs[3].communicate()
    assert "the processes did not meet within 4 seconds" in outs[0]
    assert "Address already in use" in outs[1]
    assert "--num-processes 3: the process at" in outs[2]


def test_process_with_other_settings_than_the_first_names_them(monkeypatch):
    theirs = np.frombuffer(b'{"seed": 0, "epochs": 5}', np.uint8)
    monkeypatch.setattr(tm, "share", lambda mine: theirs)
    tm.check_same_run({"seed": 0, "epochs": 5})
    with pytest.raises(tm.Failure, match="epochs is 6 here, 5 there; give it the fla"):
        tm.check_same_run({"seed": 0, "epochs": 6})


# ---------------------------------------------------------------------------------
# train_mnist.py: command line
# ---------------------------------------------------------------------------------


EXPECTED = {
    "a whole number from 0 to 2147483647": "--epochs -1|--process-id -1|--max-shift -1|"
    "--epochs 2147483648",
    "a whole number from 1 to 2147483647": "--members 0|--members 1.5|--batch-size 0|"
    "--keep 0|--train-size 0|--at-once 2147483648",
    "a whole number from 1 to 65536": "--num-processes 0|--num-processes 65537",
    "a whole number from 1 to 86400": "--connect-timeout 0|--connect-timeout 86401",
    "a whole number from 1 to 1024": "--devices 0|--devices two|--devices 1025",
    "a whole number from 0 to 4294967295": "--seed -1|--seed 4294967296",
    "a finite number, 0 or more": "--learning-rate -0.1|--learning-rate nan|"
    "--learning-rate inf",
    "a number above 0, at most 1e38": "--save-every 0|--save-every 1.1e38|"
    "--save-every nan",
    "a number, 0 or more, below 1": "--momentum 1|--momentum -0.1",
    "HOST:PORT, with a port from 1 to 65535": "--coordinator a|--coordinator a:65536",
}
EXPECTED = {f"expected {value}, not": cases for value, cases in EXPECTED.items()}
CHOICES = "--mode both|--network mlp|--optimizer rmsprop|--schedule step"
BAD_FLAGS = [
    (flags, f"argument {flag}: {said} {value!r}")
    for said, cases in {**EXPECTED, "invalid choice:": CHOICES}.items()
    for flags in cases.split("|")
    for flag, value in [flags.split()]
]
SYNC = "--mode sync"
SPLIT = ": does not split over the %d devices of a model; use a multiple of %d, for "
SPLIT += "example %d, or leave out --devices"
ADDRESS = "--coordinator here:1 --num-processes 2"
BAD_FLAGS += [
    ("--learning-rat 1", "unrecognized arguments: --learning-rat 1"),
    ("--plot", "--plot: needs --workdir, the folder that takes report.png"),
    ("--resume", "--resume: needs --workdir, the folder of the run to go on with"),
    ("--resume --workdir no", "no/config.json: No such file or directory"),
    (f"{SYNC} --members 2", "--members 2: --mode sync trains one model"),
    ("--process-id 0", "--coordinator, --num-processes and --process-id belong toget"),
    ("--distributed --process-id 0", "--coordinator, --num-processes and --process-"),
    (f"{ADDRESS} --process-id 2", "--process-id 2: expected 0 to 1"),
    ("--devices 9", "--devices 9: there are 8 CPU devices"),
    ("--batch-size 769", "--batch-size 769: more than the 768 training images"),
    ("--batch-size 1 --epochs 2796203", "--epochs 2796203: at most 2796202 with"),
    ("--max-shift 29", "--max-shift 29: more than the 28 pixels of an image's side"),
    ("--devices 8 --members 2 --batch-size 30", f"--batch-size 30{SPLIT % (4, 4, 28)}"),
    (f"{SYNC} --devices 8 --batch-size 4", f"--batch-size 4{SPLIT % (8, 8, 8)}"),
    (f"{SYNC} --devices 8 --batch-size 100", f"--batch-size 100{SPLIT % (8, 8, 96)}"),
    ("--train-size 769", "--train-size 769: data in MNIST's form"),
    ("--data mnist --data-dir FILE", "--data-dir FILE: not a folder"),
    ("--show-batch", "--show-batch needs rich: python -m pip install rich"),
    ("--workdir FILES --plot", "--plot needs matplotlib: python -m pip install matplo"),
]


BAD_FLAGS = [pytest.param(*row, id=row[0]) for row in BAD_FLAGS]
BLOCKED = ("FILE/runs", "Not a directory"), ("FILE", "File exists")
BAD_FLAGS += [
    pytest.param(f"--workdir {path}", f"{path}: {said}", marks=posix)
    for path, said in BLOCKED
]


@pytest.mark.parametrize("flags, message", BAD_FLAGS)
def test_bad_flag_gives_one_line(tmp_path, small_folder, wrong, flags, message):
    file = tmp_path / "file"
    file.write_text("in the way")
    flags, message = (text.replace("FILE", str(file)) for text in (flags, message))
    with mock.patch.object(tm.importlib.util, "find_spec", return_value=None):
        said = wrong(tm.main, "--data-dir", small_folder, "--epochs 1", flags)
    assert said.startswith(message)


def test_flags_that_are_not_given_follow_the_network_and_the_optimizer():
    def recipe(*flags):
        args = tm.parse_arguments(list(flags))
        return tm.Recipe(**{name: getattr(args, name) for name in tm.Recipe._fields})

    for name in "cnn", "batchnorm":  # of the images, which are not read yet
        default = tm.RECIPES[name]._replace(max_shift=None)
        assert recipe("--network", name) == default
    assert recipe().network == "cnn"
    assert recipe("--optimizer", "adam").learning_rate == 0.001
    other = recipe("--network", "batchnorm", "--optimizer", "sgd", "--bootstrap")
    assert (other.learning_rate, other.bootstrap, other.epochs) == (0.15, True, 2)
    assert recipe("--learning-rate", "0", "--max-shift", "0")[4:8:3] == (0, 0)


def test_help_shows_every_flag_with_its_choices_and_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        tm.main(["--help"])
    assert stop.value.code == 0
    _, *texts = re.split(r"^  --", capsys.readouterr().out, flags=re.MULTILINE)
    texts = {text.split()[0].replace("-", "_"): text for text in texts}
    assert list(texts) == list(tm.FLAGS)
    shown = {name: str(default or "") for name, (_, default) in tm.FLAGS.items()}
    for name in words("optimizer epochs batch_size momentum schedule max_shift"):
        both = [str(getattr(tm.RECIPES[n], name)) for n in ("cnn", "batchnorm")]
        shown[name] = "; batchnorm: ".join(dict.fromkeys(both)) + ")"
    share = "2 for a side of 28, of other sizes the same share;"
    shown["max_shift"] = shown["max_shift"].replace("2;", share)
    rates = [f"{name}: {rate}" for name, rate in tm.LEARNING_RATES.items()]
    shown["learning_rate"] = "; ".join(rates) + ")"
    for name, text in texts.items():
        assert f"(default: {shown[name]}" in " ".join(text.split())
        if not callable(kind := tm.FLAGS[name][0]):
            assert f"{{{','.join(x for x in kind if x != 'tiny')}}}" in text


def test_largest_and_smallest_numbers_are_taken():
    ends = {"devices": (1, 1024), "seed": (0, 2**32 - 1), "connect_timeout": (1, 86400)}
    ends |= dict.fromkeys(("epochs", "max_shift"), (0, 2**31 - 1))
    ends["num_processes"] = 1, 2**16
    counts = "members", "at_once", "batch_size", "train_size", "keep"
    ends |= dict.fromkeys(counts, (1, 2**31 - 1))
    ends |= {
        "save_every": (1e-9, 1e38),
        "momentum": (0, 0.999),
        "process_id": (0,),
    }
    ends |= {"learning_rate": (0, 1e39)}
    for name, values in ends.items():
        for value in values:
            assert tm.given_flags([f"{tm.flag(name)}={value}"]) == {name: value}


CONFIG = tm.RECIPES["batchnorm"]._replace(epochs=7, bootstrap=True)._asdict()
CONFIG |= {"mode": "ensemble", "members": 3, "seed": 5, "train_size": 256}
EXTRA = {"data": "mnist", "data_dir": "/digits", "save_every": 0.5, "dataset": "MNIST"}


def resume(folder, flags, config=None):
    (folder / "config.json").write_text(config or json.dumps(CONFIG | EXTRA))
    args = tm.parse_arguments(["--resume", "--workdir", str(folder), *flags.split()])
    return vars(args)


def test_resumed_run_has_the_flags_of_its_config(tmp_path):
    digits, here = (Path(path).absolute() for path in ("/digits", "/here"))
    kept = {**CONFIG, "data": "mnist", "data_dir": digits, "save_every": 0.5}
    assert resume(tmp_path, "").items() >= kept.items()
    place = {"devices": 2, "save_every": 2, "keep": 1, "data_dir": here}
    flags = "--devices 2 --save-every 2 --keep 1 --data-dir /here --epochs 7"
    assert resume(tmp_path, flags).items() >= (kept | place).items()
    elsewhere = f"--resume --workdir {tmp_path / 'none'} --epochs 7 --network batchnorm"
    others = " --coordinator localhost:1 --num-processes 2 --process-id 1"
    assert tm.parse_arguments(words(elsewhere, others)).epochs == 7


DAMAGED = {
    "{": "Expecting property name",
    "5": "expected an object",
    '{"epochs": "many"}': "argument --epochs: expected a whole number from 0 to 214",
    '{"batch_size": 0}': "argument --batch-size: expected a whole number from 1 to 214",
    '{"seed": [1]}': r"argument --seed: expected a whole number from 0 to 4294967295, ",
    '{"skip_nonfinite": 2}': "argument --skip-nonfinite: ignored explicit argument '2'",
    '{"members": true}': "argument --members: expected one argument",
}


@pytest.mark.parametrize("config", DAMAGED)
def test_config_that_is_damaged_is_named(tmp_path, config):
    message = f"{re.escape(str(tmp_path))}/config.json: {DAMAGED[config]}"
    assert re.match(message, said_by(tm.Failure, resume, tmp_path, "--seed 3", config))


FULL = MemoryError("no"), RuntimeError("RESOURCE_EXHAUSTED: no\n  at a line")


@pytest.mark.parametrize("error", FULL)
def test_out_of_memory_is_one_line(wrong, error):
    with mock.patch.object(tm, "load_data", side_effect=error):
        said = wrong(tm.main, status=1)
    assert said.startswith("out of memory; try fewer --members")


ANNOUNCED = {  # what is said of the models, a step's images, and devices in use
    "--members 5 --devices 2": ("ensemble of 5 on 2 of 8 CPU devices (3 a de", 384, 2),
    "--devices 1": ("an ensemble of 2 on 1 of 8 CPU devices (2 a device);", 128, 1),
    "--members 2 --devices 2": ("an ensemble of 2 on 2 of 8 CPU devices;", 128, 2),
    "--members 2": ("2 on 8 of 8 CPU devices (4 replicas a model);", 128, 8),
    "--mode sync --batch-size 60": (
        "one model on 6 of 8 CPU devices (6 replicas a model) (a batch of 60 does not "
        "split over 8);",
        60,
        6,
    ),
}


@pytest.mark.parametrize("models", ANNOUNCED)
def test_run_without_epochs_reports_its_models(tmp_path, script, small_folder, models):
    pytest.importorskip("rich")
    flags = f"--epochs 0 --bootstrap --seed 7 --network tiny {models} --show-batch"
    status, out, _ = script(flags, "--workdir", tmp_path)
    notice, line, shown, *_ = out.splitlines()
    assert status == 0 and notice.startswith("notice: ")
    assert line.startswith(f"data in MNIST's form from {small_folder}, 768 train")
    said, images, devices = ANNOUNCED[models]
    assert " 200 test images of 28 x 28, 10 classes: " in line and said in line
    assert "; network tiny, opt" in line
    assert "learning_rate 0.001, momentum 0.9, schedule constant, max_shift 0" in line
    assert "bootstrap True, at_once 1, seed 7" in line
    assert f", pjax_ensemble {pe.__version__}, jax" in line
    assert shown.startswith(f"a step's images [{images}, 784], member after member")
    assert all((f"CPU {i}" in out) == (i < devices) for i in range(D))
    assert "epoch:" not in out and metrics_of(tmp_path) == []
    assert report_of(tmp_path)["ensemble"]["negative_log_likelihood"] > 1.5


@cases(
    "there, flags, expected",
    (10, "--mode sync", (1, 8, 1, 8)),
    (12, "--mode sync --batch-size 128", (1, 8, 1, 8)),
    (8, "--mode sync --batch-size 7", (1, 7, 1, 7)),
    (6, "--mode sync --batch-size 49", (1, 1, 1, 1)),
    (6, "--members 2", (2, 4, 1, 2)),
    (24, "--members 8", (8, 16, 1, 2)),
    (4, "--members 9 --batch-size 7", (9, 3, 3, 1)),
    (12, "--mode sync --devices 4", (1, 4, 1, 4)),
    (2, "--batch-size 1 --epochs 2796202", (2, 2, 1, 1)),  # as many steps as JAX counts
)
def test_model_has_as_many_replicas_as_divide_its_batch(
    small_folder, monkeypatch, there, flags, expected
):
    monkeypatch.setattr(jax, "local_device_count", lambda: there)
    args = tm.parse_arguments(words(flags, "--data-dir", small_folder))
    assert tm.prepare(args)[2] == expected and args.members == expected[0]


@cases(
    "there, platform, flags, expected",
    (1, "cpu", "", 2),
    (2, "cpu", "", 2),
    (3, "cpu", "", 3),
    (1, "gpu", "", 5),
    (8, "tpu", "", 8),
    (1, "gpu", "--members 1", 1),
    (1, "gpu", "--mode sync", 1),
)
def test_ensemble_has_a_member_a_device_and_is_one(
    monkeypatch, there, platform, flags, expected
):
    monkeypatch.setattr(jax, "local_device_count", lambda: there)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    args = tm.parse_arguments(words(flags))
    args.batch_size = 64
    assert tm.lay_out(args).members == args.members == expected


@cases(
    "size, flags, expected",
    ((28, 28), "", 2),
    ((8, 8), "", 1),
    ((12, 40), "", 1),
    ((56, 64), "", 4),
    ((8, 8), "--max-shift 2", 2),
    ((8, 8), "--network batchnorm", 0),
)
def test_shift_is_in_proportion_to_the_images(tmp_path, size, flags, expected):
    folder, _ = write_set(tmp_path, size, [0, 1])
    args = tm.parse_arguments(words(flags, "--data-dir", folder))
    recipe, data, _ = tm.prepare(args)
    assert recipe.max_shift == tm.describe(args, data)["max_shift"] == expected


@pytest.mark.parametrize("network, size", [("cnn", (3, 30)), ("batchnorm", (30, 5))])
def test_images_too_small_for_the_network_are_refused(tmp_path, wrong, network, size):
    folder, _ = write_set(tmp_path, size, [0, 1])
    said = wrong(tm.main, f"--network {network} --data-dir", folder)
    sizes = "image_shape is [3, 30, 1]; expected", "a window of 6x6 does not fit images"
    assert said.startswith(f"--network {network}: {sizes[network == 'batchnorm']}")


def test_path_that_the_output_cannot_show_ends_no_run(tmp_path):
    folder = write_files(tmp_path / "\N{GREEK CAPITAL LETTER OMEGA}", small_files())
    command = [sys.executable, HERE / "train_mnist.py", "--batch-size", "99"]
    env = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "cp1252"}
    run = subprocess.run([*command, "--data-dir", folder], env=env, capture_output=True)
    assert run.returncode == 2 and b"99: more than the 40 training" in run.stderr
    assert b"\\u03a9 holds other data than MNIST" in run.stdout


# ---------------------------------------------------------------------------------
# What takes longer in benchmarks/: interrupts, and programs that are dropped
# ---------------------------------------------------------------------------------


@posix
def test_interrupted_loops_go_on_from_the_latest_state():
    """The trial of benchmarks/interrupts.py, in its short form."""
    counts = interruptions.cell(trials=8)
    assert counts["interrupts"] >= 8 and not counts["lost"] + counts["different"]


def test_trainers_that_are_dropped_leave_nothing_alive():
    *_, last = programs.run(trainers=3, every=3)
    assert (last.trainers, last.states, last.functions) == (3, 0, 0)
    first = last._replace(maps=500, memory=300)
    assert programs.complaint(first, first._replace(maps=550, memory=450)) is None
    for left in {"maps": 551}, {"memory": 451}, {"states": 1}, {"functions": 1}:
        assert programs.complaint(first, first._replace(**left)), left
