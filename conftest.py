"""Shared by all tests: JAX's settings, helpers, other processes, runs of the script.

Helpers that need NumPy and pytest alone are in helpers.py.
"""

import contextlib
import errno
import functools
import inspect
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fast_cpu
import mnist_data as md
import mnist_run as mr
import pjax_ensemble as pe
import tiny
import train_mnist as tm
from helpers import assert_close, cases, random_probs, said_by  # noqa: F401

# ---------------------------------------------------------------------------------
# JAX
# ---------------------------------------------------------------------------------

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling takes most of the suite's time.  So the compiler does not optimize, unless
# the environment sets JAX_DISABLE_MOST_OPTIMIZATIONS=0.  A cache on disk, in pytest's
# folder or in $COMPILED, shares compiled programs between sessions and between pytest's
# workers; COMPILED=none turns it off, and oneDNN on.  XLA in JAX 0.10 still has its
# previous emitters, which compile in half the time; an XLA that does not know their
# flag would abort.
HERE = Path(__file__).parent
COMPILED = os.environ.get("COMPILED") or jax.config.jax_compilation_cache_dir
# ENVIRONMENT, below, has "False" for other processes.
FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") not in ("0", "False")
COMPILING = {"jax_disable_most_optimizations": FAST}
if COMPILED != "none":
    kept = COMPILED or str(HERE / ".pytest_cache" / "d" / "compiled")
    COMPILING["jax_compilation_cache_dir"] = kept
    COMPILING["jax_persistent_cache_min_compile_time_secs"] = 0
for option in COMPILING.items():
    jax.config.update(*option)
if FAST and jax.__version_info__[:2] == (0, 10):
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = " ".join(flags)

jax.devices()  # fixes their number before a test can change it

fast_cpu._STRICT = True

NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs():
    """Clear JAX's caches after every hundredth test.

    The caches keep the programs of deleted models too.  Every program maps memory, and
    a process that exceeds Linux's 65,530 mappings ends in a segmentation fault.
    """
    yield
    if next(NUMBERS) % 100 == 0:
        jax.clear_caches()


@pytest.fixture
def optimized():
    """Compile with optimizations, as users do, for a test of programs or a long one."""
    name = "jax_disable_most_optimizations"
    jax.config.update(name, False)
    yield
    jax.config.update(name, COMPILING[name])


# ---------------------------------------------------------------------------------
# A test runs a line of the project, or is marked
# ---------------------------------------------------------------------------------

# The project's functions that ran during the test, as (file, qualified name, line), and
# ("", "process", 0) if it started a process.
ENTERED: set = set()
FOLDERS = {HERE, HERE / "examples", HERE / "benchmarks"}
FOLDERS |= {HERE / "benchmarks" / name for name in ("peers", "trials")}
TESTS = "test_", "conftest", "helpers", "tiny"  # whose functions do not count


def is_of_project(code):
    path = Path(code.co_filename)
    return path.parent in FOLDERS and not path.name.startswith(TESTS)


def on_start(code, _):
    if is_of_project(code):
        file = Path(code.co_filename).relative_to(HERE)
        ENTERED.add((str(file), code.co_qualname, code.co_firstlineno))
    return sys.monitoring.DISABLE  # until the next test


def on_audit(event, _):
    if event == "subprocess.Popen":
        ENTERED.add(("", "process", 0))


if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring
    TOOL = 4  # which no debugger, profiler or measure of coverage takes
    START = MONITORING.events.PY_START
    MONITORING.use_tool_id(TOOL, "tests")
    MONITORING.register_callback(TOOL, START, on_start)
    sys.addaudithook(on_audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        """Fail a test that passes without the project: it has lost what it compares.

        With the variable ENTERED, a folder, write there what each test entered, for
        benchmarks/trials/mutants.py.
        """
        ENTERED.clear()
        MONITORING.set_events(TOOL, START)
        MONITORING.restart_events()
        started = time.perf_counter()
        try:
            result = yield
        finally:
            MONITORING.set_events(TOOL, 0)
        if folder := os.environ.get("ENTERED"):
            seconds = time.perf_counter() - started
            row = {"test": item.nodeid, "seconds": seconds, "entered": sorted(ENTERED)}
            with open(Path(folder, f"{os.getpid()}.jsonl"), "a") as file:
                print(json.dumps(row), file=file)
        if not ENTERED and not item.get_closest_marker("no_code"):
            pytest.fail("this test runs nothing of the project: see CONTRIBUTING.md")
        return result


# ---------------------------------------------------------------------------------
# Markers and tables of cases
# ---------------------------------------------------------------------------------

# Windows lacks POSIX's links, locks and signals, and words its errors about paths
# differently.  It also lacks Gloo, as does a Mac that cannot resolve its own name.
posix = pytest.mark.skipif(os.name != "posix", reason="not on Windows")
linux = pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone")


# ---------------------------------------------------------------------------------
# Values that tests compute with, and comparisons
# ---------------------------------------------------------------------------------

D = 8
SGD = pe.sgd(0.1, momentum=0.9)


def member(tree, i):
    return jax.tree.map(lambda x: x[i], jax.device_get(tree))


def randn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dilated(x, kernel, axes="NHWC HWIO NHWC", strides=None, padding="SAME", **how):
    """Convolve by XLA, in any form."""
    strides = strides or (1,) * (x.ndim - 2)
    how["dimension_numbers"] = tuple(axes.split())
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, **how)


def as_bytes(leaf):
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def leaves_equal(a, b):
    """Whether two trees hold the same bits (nan equal to nan)."""
    a, b = map(jax.tree.leaves, (a, b))
    return len(a) == len(b) and all(as_bytes(x) == as_bytes(y) for x, y in zip(a, b))


# ---------------------------------------------------------------------------------
# Other processes
# ---------------------------------------------------------------------------------

# Other processes compute as this one does, and share its compiled programs.
NAMES = "PATH", "XLA_FLAGS", "NPROC", "SYSTEMROOT", "USERPROFILE"
ENVIRONMENT = {name: os.environ[name] for name in NAMES if name in os.environ}
ENVIRONMENT |= {name.upper(): str(value) for name, value in COMPILING.items()}


def start_python(code, *args, cwd=HERE, **env):
    """Start code in a fresh interpreter."""
    env = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE), **env}
    options = dict(cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code]
    return subprocess.Popen([*command, *map(str, args)], text=True, **options)


def run_python(*args, **options):
    """Run code in a fresh interpreter and return its output."""
    run = start_python(*args, **options)
    try:
        printed, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    return printed


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------
# Calls that a test sees, and other systems
# ---------------------------------------------------------------------------------


def hook(patch, owner, name, act):
    """Let `act` see the arguments of each call of a function, before the call."""
    call = getattr(owner, name)

    def acting(*args, **options):
        act(*args, **options)
        return call(*args, **options)

    patch.setattr(owner, name, acting)


@contextlib.contextmanager
def handling(handler):
    """Have SIGINT call a handler."""
    old = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


@pytest.fixture
def elsewhere():
    """Remove the calls that other systems lack, and refuse as Windows does.

    Windows refuses to open a folder, and to replace or remove an open file.
    """

    def is_open(path):
        for descriptor in range(256):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return True
        return False

    def refuse(name, num_paths, refused):
        def check(*args, **_):
            for path in filter(refused, args[:num_paths]):
                raise PermissionError(errno.EACCES, "Access is denied", str(path))

        hook(patch, os, name, check)

    with pytest.MonkeyPatch.context() as patch:
        for name in "sched_getaffinity", "O_DIRECTORY", "O_NOFOLLOW":
            patch.delattr(os, name, raising=False)
        patch.setattr(mr, "fcntl", None)
        refuse("open", 1, os.path.isdir)
        refuse("replace", 2, is_open)
        refuse("unlink", 1, is_open)
        yield


# ---------------------------------------------------------------------------------
# The script: data, a network and runs
# ---------------------------------------------------------------------------------


def idx(array, dims=None):
    """Make the bytes of an IDX file; `dims` may contradict the array."""
    array = np.asarray(array, np.uint8)
    dims = dims or array.shape
    return struct.pack(f">I{len(dims)}I", 0x0800 + len(dims), *dims) + array.tobytes()


@functools.cache
def small_files(num_train=40, num_test=20):
    """Make the contents of four valid files, by name."""
    data = md.generate_digits(3, num_train, num_test)
    arrays = [leaf[..., 0] if leaf.ndim == 4 else leaf for leaf in data[1:]]
    return {name: idx(array) for name, array in zip(md.FILES, arrays)}


def write_files(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """Make a data set of 768 training and 200 test images in MNIST's form."""
    return write_files(tmp_path_factory.mktemp("data"), small_files(768, 200))


@pytest.fixture
def tiny_network():
    """Have the script know the network of tiny.py."""
    with tiny.known():
        yield


def words(*flags):
    """Split strings into words, and turn each other value into one word."""
    return [w for f in flags for w in (f.split() if isinstance(f, str) else [str(f)])]


# The run takes two epochs of 8 steps.
RUN = "--members 2 --devices 2 --network tiny --epochs 2 --batch-size 32 "
RUN += "--train-size 256"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, small_folder):
    """Make the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with tiny.known():
        assert tm.main(words(RUN, "--data-dir", small_folder, "--workdir", folder)) == 0
    return folder


@pytest.fixture
def whole_run(finished_run, tiny_network):
    """Return that folder, where the script can load the run."""
    return finished_run


@pytest.fixture
def wrong(capsys):
    """Return a function that runs a failing command and returns its error message."""

    def run(main, *flags, status=2):
        try:
            ended = main(words(*flags))
        except SystemExit as stop:
            ended = stop.code
        out, err = capsys.readouterr()
        name, said = err.split(": error: ", 1)
        assert name == Path(inspect.getfile(main)).name and err.count("\n") == 1
        assert ended == status and "epoch" not in out
        return said

    return run


@pytest.fixture
def drawn():
    """Return a function that returns the figure saved last."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    with mock.patch.object(figure, "savefig", autospec=True, side_effect=save) as saved:
        yield lambda: saved.call_args.args[0]


def lines_of(axes):
    return {line.get_label(): np.transpose(line.get_data()) for line in axes.lines}
