"""Faults of JAX, XLA and its libraries on CPUs, each with a probe of plain JAX.

    python jax_faults.py            # tries all with this JAX, and prints a table
    python jax_faults.py NAME ...   # tries some

The project has a guard against each fault, or its pages warn of it.  An entry of
`FAULTS` names the public report, the versions of jaxlib that are known to have the
fault, and the guard, which comments name by the entry.  Its probe shows the fault
without the guard.  So a guard may go when the oldest JAX that the project supports is
newer than all known versions, and the probe of none since shows the fault.

Exit status 1 says that a known fault does not show in its version, or that a version
that was tried has a fault that is not known there: then a probe or an entry is wrong.
Faults that are rare, and versions that nobody has tried, are no error.  docs/limits.md
has the table: WRITE=1 python -m pytest -n 0 -k faults_in_the_page.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

TRIED = "0.10.2", "0.11.0", "0.11.2", "0.12.0.1"  # versions of jaxlib


class Fault(NamedTuple):
    """A fault, and what tells whether a JAX has it."""

    says: str  # in a sentence
    report: str  # a public one, or ""
    known: tuple[str, ...]  # the versions of TRIED that have it
    guard: str  # the place in the code that avoids it, or `PAGE`
    probe: Callable[[], bool]  # returns whether it shows, or ends the process
    needs: str  # instructions of the processor, as Linux names them
    rare: bool  # whether it may stay away, as a race, or on some processors


FAULTS: dict[str, Fault] = {}


def fault(
    known: str, guard: str, report: str = "", needs: str = "", rare: bool = False
) -> Callable:
    """Enter a probe into FAULTS; its docstring says what the fault is."""

    def enter(probe):
        names = tuple(known.split())
        says = probe.__doc__
        FAULTS[probe.__name__] = Fault(says, report, names, guard, probe, needs, rare)
        return probe

    return enter


ALL = " ".join(TRIED)
PAGE = "docs/limits.md"  # in place of a guard: the page warns of the fault
NAMES = ("NHWC", "HWIO", "NHWC")
_ONEDNN = "xla_cpu_experimental_onednn_custom_call"
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_LEFT_OUT = "xla_disable_hlo_passes"


def by_onednn(f: Callable, left_out: str = "") -> Any:
    """Compile by oneDNN, without barriers, and without some passes of the compiler."""
    options = {_ONEDNN: True, _YNNPACK: "", _LEFT_OUT: left_out}
    return jax.jit(f, compiler_options=options)


def randn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def is_far(x: Any, y: Any, limit: float = 1e-3) -> bool:
    """Return whether arrays differ by more than a part of the largest number."""
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    return not np.allclose(x, y, rtol=0, atol=limit * np.abs(y).max(), equal_nan=True)


def convolve(x: Any, kernel: Any, padding: Any = "SAME", stride: int = 1) -> jax.Array:
    strides = (stride, stride)
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=NAMES
    )


# ---------------------------------------------------------------------------------
# XLA and YNNPACK: numbers
# ---------------------------------------------------------------------------------


@fault(
    "0.10.2 0.11.0 0.11.2",
    "fast_cpu.compiler_options, _add_up",
    report="xla 49085",
    rare=True,
)
def sums_of_broadcasts():
    """Sums of broadcasts differ from call to call."""
    f = jax.jit(lambda x: jnp.broadcast_to(x, (2, 1024, 1024)).sum())
    return {float(f(np.ones((1024, 1), np.float32))) for _ in range(300)} != {2.0**21}


@fault("0.10.2", "fast_cpu.compiler_options", report="jax 39103")
def sums_of_many_small_products():
    """A small matrix times each of more than 32,768 rows, then a sum, is wrong."""
    rows = np.zeros((32769, 3), np.float32)
    rows[:, 1] = np.arange(32769) % 1000
    f = jax.jit(jax.vmap(lambda row: jnp.square(jnp.eye(3) @ row).sum()))
    return is_far(f(rows), np.square(rows[:, 1]))


@fault("0.10.2", "fast_cpu.compiler_options", report="jax 40412")
def sums_of_rank_7():
    """A sum of a product of rank 7 ends the process."""
    x = randn(3, 1, 2, 2, 8, 8, 8)
    return is_far(jax.jit(lambda x, y: (x * y).sum(3))(x, x), np.square(x).sum(3))


@fault("0.10.2 0.11.0", "fast_cpu.compiler_options", report="jax 39257")
def sums_of_rank_8():
    """A sum of a product of rank 8 ends the process."""
    x = np.ones((10, 4, 6, 1, 1, 1, 1, 1), np.float32)
    y = np.ones((10, 4, 6, 9, 9, 9, 9, 9), np.float32)
    return is_far(jax.jit(lambda x, y: jnp.log((x * y).sum(2)))(x, y), np.log(6))


@fault(ALL, "pjax_ensemble._hidden", report="xla 49176")
def moved_rows():
    """Rows that a program moves in a computed array are wrong where a reshape follows.

    An example is `y.at[1:].set(y[:-1])`.
    """

    def shift(x):
        y = x * 2
        return y.at[1:].set(y[:-1]).reshape(1, 8, 16)

    x = randn(8, 16)
    return is_far(jax.jit(shift)(x)[0, 1:], 2 * x[:-1])


@fault("0.10.2 0.11.0 0.11.2", PAGE, report="xla 49121")
def slices_of_slices():
    """A slice of a slice that starts beyond the end is another slice."""
    f = jax.jit(lambda x, s, i: lax.dynamic_slice(jnp.roll(x, s), (i,), (4,)))
    return is_far(f(np.arange(9.0), np.int32(3), np.int32(20)), [2, 3, 4, 5])


@fault("0.10.2 0.11.0", PAGE, report="jax 29537")
def exp_of_nan():
    """The function exp(x * nan), with nan a constant, is not nan."""
    f = jax.jit(lambda x: jnp.exp(x * jnp.nan))
    return not np.isnan(f(randn(64))).all()


@fault("0.10.2 0.11.0 0.11.2", "fast_cpu._for_xla")
def negative_padding():
    """Convolutions with a padding of (-p, p) along an axis read foreign memory.

    Gradients of causal convolutions are such.
    """
    x = randn(8, 16, 16, 3)
    kernel = randn(3, 3, 3, 4)
    cut = np.pad(x[:, 2:], [(0, 0), (0, 2), (0, 0), (0, 0)])
    shifted = jax.jit(lambda x, kernel: convolve(x, kernel, [(-2, 2), (0, 0)]))
    expected = jax.jit(lambda x, kernel: convolve(x, kernel, "VALID"))(cut, kernel)
    return is_far(shifted(x, kernel), expected)


@fault(ALL, "fast_cpu._to_multiply", rare=True)
def wide_results_of_half_products():
    """Products of half types with wider results are an error in some forms."""
    x = jnp.ones((2, 12, 5), jnp.bfloat16)
    y = jnp.ones((12, 2), jnp.bfloat16)
    how = dict(preferred_element_type=jnp.float32)
    multiply = jax.jit(
        lambda x, y: lax.dot_general(y, x, (((0,), (1,)), ((), ())), **how)
    )
    try:
        return float(multiply(x, y)[0, 0, 0]) != 12
    except jax.errors.JaxRuntimeError:
        return True


@fault(ALL, "pjax_ensemble._by_itself", rare=True)
def rounding_by_surroundings():
    """The rounding of an optimizer's step depends on the operations around it."""

    def step(state):
        m, v, p, g = state
        g = jnp.tanh(p * g) * 2 + g
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        return m, v, p - 0.01 * (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8)

    state = list(abs(np.random.default_rng(0).normal(size=(4, 64, 33))))
    state = [np.float32(x) for x in state]
    alone = jax.jit(step)(state)
    for members in 1, 2:
        several = [np.stack([x] * members) for x in state]
        beside = jax.jit(lambda state: lax.map(step, state))(several)
        if any((x != y[0]).any() for x, y in zip(alone, beside)):
            return True
    return False


def _seconds(f: Callable, *args: Any) -> float:
    """Return how long a call of a compiled function takes: the least of several."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(7):
        started = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - started)
    return min(times)


@fault(ALL, "fast_cpu._kernel_gradient", report="jax 12868")
def slow_convolutions_in_loops():
    """Gradients of convolutions are right in a loop, and several times as slow."""
    x = randn(32, 28, 28, 8)
    kernel = randn(3, 3, 8, 16)
    gradient = jax.grad(lambda kernel, x: jnp.square(convolve(x, kernel)).sum())

    def in_a_loop(kernel, x):
        def turn(kernel, _):
            return kernel - 1e-9 * gradient(kernel, x), None

        return lax.scan(turn, kernel, None, 2)[0]

    once = _seconds(jax.jit(gradient), kernel, x)
    return _seconds(jax.jit(in_a_loop), kernel, x) > 2 * 1.5 * once


@fault(ALL, "pjax_ensemble._scan", rare=True)
def slow_loops_of_one_turn():
    """A step in a loop of one turn is right, and slower than the step."""
    x = randn(32, 512)
    weights = randn(512, 1024), randn(1024, 512)

    def loss_fn(weights, x):
        return jnp.square(jax.nn.relu(x @ weights[0]) @ weights[1]).mean()

    def step(weights, x):
        grads = jax.grad(loss_fn)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-9 * g, weights, grads), None

    def in_a_loop(weights, x):
        return lax.scan(step, weights, x[None])

    alone = _seconds(jax.jit(step), weights, x)
    return _seconds(jax.jit(in_a_loop), weights, x) > 1.15 * alone


# ---------------------------------------------------------------------------------
# oneDNN, for programs that are compiled with its option
# ---------------------------------------------------------------------------------

SINCE_11 = "0.11.0 0.11.2 0.12.0.1"


@fault(SINCE_11, "fast_cpu._multiply, _convolve: a barrier")
def activation_in_place_of_a_product():
    """The SiLU or GELU of a product is in the product's place for its other users."""

    def f(x, w):
        y = x @ w
        return y, jax.nn.silu(y)

    x = randn(256, 256)
    return is_far(by_onednn(f)(x, x)[0], x @ x)


@fault(
    SINCE_11,
    "fast_cpu._add_unseen_half",
    needs="avx512_bf16",
    rare=True,
)
def sums_rounded_to_half_types():
    """A sum of a product of half types and another number is rounded to their type."""
    x = jnp.ones((8, 8, 8, 16), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 16, 16), jnp.bfloat16)

    def f(x, kernel):
        return convolve(x, kernel).astype(jnp.float32) + 0.125

    return float(by_onednn(f)(x, kernel)[0, 4, 4, 0]) != 144.125


@fault(SINCE_11, "fast_cpu.compiler_options: onednn-ops-rewriter")
def softmax_without_nan():
    """The softmax of an infinity has zeros beside the nan."""
    x = randn(8, 3)
    x[:, 1] = np.inf
    found = by_onednn(jax.nn.softmax, "simplify-fp-conversions")(x)
    return not np.isnan(found).all()


@fault(SINCE_11, "fast_cpu.compiler_options: simplify-fp-conversions")
def roundings_that_are_dropped():
    """The difference (p + u) - p is u for a small u in bfloat16, and not 0."""
    p = jnp.ones(8, jnp.bfloat16)
    u = jnp.full(8, 2.0**-12, jnp.bfloat16)
    found = by_onednn(lambda p, u: (p + u) - p, "onednn-ops-rewriter")(p, u)
    return bool((found != 0).any())


@fault(SINCE_11, "fast_cpu.compiler_options: no oneDNN")
def programs_that_cannot_be_kept():
    """JAX's persistent cache cannot keep programs with oneDNN."""
    from jax.experimental.compilation_cache import compilation_cache

    x = randn(256, 256)
    by_onednn(lambda x: x @ x)(x)  # works without the cache
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "jax_compilation_cache_dir": folder,
            "jax_enable_compilation_cache": True,
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_raise_persistent_cache_errors": True,
        }
        before = {name: jax.config.values[name] for name in settings}
        for setting in settings.items():
            jax.config.update(*setting)
        compilation_cache.reset_cache()
        try:
            by_onednn(jnp.matmul)(x, x)
        except Exception:  # whichever it is
            return True
        finally:
            for setting in before.items():
                jax.config.update(*setting)
            compilation_cache.reset_cache()
    return False


@fault("0.12.0.1", "fast_cpu._for_onednn", needs="amx_tile", rare=True)
def few_channels_with_wide_windows():
    """Convolutions of bfloat16 are wrong for few channels with wide windows.

    Fewer than 16 channels, times the last axis along which windows have several
    entries, are a multiple of 32.
    """
    x = jnp.asarray(randn(2, 8, 32, 8), jnp.bfloat16)
    kernel = jnp.asarray(randn(1, 8, 8, 16), jnp.bfloat16)
    exact = convolve(*(z.astype(jnp.float32) for z in (x, kernel)))
    return is_far(by_onednn(convolve)(x, kernel), exact, 0.05)


@fault("0.12.0.1", "fast_cpu._for_onednn", needs="amx_tile", rare=True)
def half_types_with_strides():
    """Convolutions of bfloat16 with strides are wrong now and then."""
    for channels in 3, 16, 17, 32, 48:
        x = jnp.asarray(randn(9, 24, 24, channels), jnp.bfloat16)
        kernel = jnp.asarray(randn(3, 3, channels, 16), jnp.bfloat16)
        exact = convolve(*(z.astype(jnp.float32) for z in (x, kernel)), stride=2)
        strided = by_onednn(lambda x, kernel: convolve(x, kernel, stride=2))
        if any(is_far(strided(x, kernel), exact, 0.05) for _ in range(10)):
            return True
    return False


@fault("0.12.0.1", "fast_cpu._for_onednn", needs="avx512f", rare=True)
def one_window_with_a_stride():
    """One window over one channel with a stride above 1 reads foreign memory."""
    for height, channels in (3, 8), (4, 16), (5, 4):
        x = randn(8, height, 16, 1)
        kernel = randn(height, 3, 1, channels)

        def strided(x, kernel):
            how = dict(dimension_numbers=NAMES)
            return lax.conv_general_dilated(x, kernel, (2, 1), "VALID", **how)

        expected = jax.jit(strided)(x, kernel)
        if any(is_far(by_onednn(strided)(x, kernel), expected) for _ in range(20)):
            return True
    return False


@fault("0.12.0.1", "fast_cpu._for_onednn", needs="avx512_bf16", rare=True)
def reversed_kernels():
    """XLA fails for convolutions of half types by kernels that it reverses itself."""
    x = jnp.ones((8, 16, 16, 16), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 16, 16), jnp.bfloat16)
    turned = by_onednn(lambda x, kernel: convolve(x, lax.rev(kernel, (0, 1))))
    try:
        return float(turned(x, kernel)[0, 8, 8, 0]) != 144
    except jax.errors.JaxRuntimeError:
        return True


@fault("0.12.0.1", "fast_cpu._multiply, _convolve: sums", needs="avx512f", rare=True)
def slow_products_of_float16():
    """Products of float16 are right, and tens of times as slow as float32's."""
    x = jnp.ones((256, 256))
    half = x.astype(jnp.float16)
    multiply = by_onednn(jnp.matmul)
    return _seconds(multiply, half, half) > 20 * _seconds(multiply, x, x)


@fault("0.12.0.1", "fast_cpu._for_onednn", needs="avx512_bf16", rare=True)
def windows_in_padding_alone():
    """Many windows of bfloat16 that see padding alone end the process."""
    x = jnp.ones((1, 2, 48, 9), jnp.bfloat16)
    kernel = jnp.ones((2, 1, 9, 32), jnp.bfloat16)
    padded = by_onednn(lambda x, kernel: convolve(x, kernel, [(0, 0), (0, 48)]))
    found = [padded(x, kernel)[0, 0, :, 0] for _ in range(30)]
    return any(is_far(y, np.repeat([18, 0], 48)) for y in found)


@fault("0.12.0.1", "fast_cpu._instructions", needs="avx512_bf16", rare=True)
def bfloat16_without_instructions():
    """The process ends where ONEDNN_MAX_CPU_ISA leaves none for bfloat16."""
    code = (
        "import jax_faults, jax.numpy as jnp\n"
        "x = jnp.ones((256, 256), jnp.bfloat16)\n"
        "jax_faults.by_onednn(jnp.matmul)(x, x).block_until_ready()"
    )
    return _status(code, ONEDNN_MAX_CPU_ISA="AVX2") != 0


@fault("0.12.0.1", "fast_cpu._moved", needs="avx512_bf16", rare=True)
def moved_half_types():
    """Many loops that store bfloat16 in another order end the process, by LLVM."""
    x = jnp.ones((16, 4, 4, 8, 16), jnp.bfloat16)

    def move(x):
        for _ in range(60):
            y = x.transpose(1, 0, 3, 2, 4).reshape(64, 8, 4, 16).transpose(2, 1, 0, 3)
            x = (y + 1).reshape(x.shape)
        return x

    return is_far(jax.jit(move)(x), np.full(x.shape, 61))


# ---------------------------------------------------------------------------------
# JAX: processes and programs
# ---------------------------------------------------------------------------------


def _status(code: str, **env: str) -> int:
    """Return the exit status of Python with this code."""
    folder = os.path.dirname(os.path.abspath(__file__))
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
    )
    return run.returncode


@fault("0.12.0.1", "pjax_ensemble._IN_FLIGHT")
def copies_at_the_end():
    """Copies from one CPU device to another still in flight end an ending process."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "a, b = jax.devices()\n"
        "slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, x: x @ x, x))\n"
        "x = jax.device_put(jnp.zeros((1500, 1500)), b)\n"
        "y = jax.device_put(slow(x), a)"
    )
    return _status(code) != 0


@fault("0.10.2 0.11.0 0.11.2", "pjax_ensemble._run: alone", rare=True)
def programs_that_wait_for_each_other():
    """Several programs whose devices meet get no thread, and end the process."""
    ending = threading.Timer(15, os._exit, [3])  # XLA itself waits for a minute
    ending.start()
    meet = jax.pmap(lambda x: lax.psum(jnp.tanh(x @ x), "i"), axis_name="i")
    x = np.ones((jax.device_count(), 100, 100), np.float32)
    made = [meet(x) for _ in range(300)]
    jax.block_until_ready([meet(y) for y in made])
    ending.cancel()
    return False


@fault(ALL, "pjax_ensemble._over_members")
def programs_of_pmap_are_kept():
    """Programs of `jax.pmap` are kept until the process ends, with all they hold."""

    def is_kept(mapped):
        f = mapped(lambda x: x + 1)
        f(np.ones((2, 3)))
        reference = weakref.ref(f.__wrapped__)
        del f
        gc.collect()
        return reference() is not None

    return is_kept(jax.pmap) and not is_kept(jax.jit)


# ---------------------------------------------------------------------------------
# Trying them
# ---------------------------------------------------------------------------------

SHOWS, ENDS, ABSENT = "shows", "ends the process", "does not show"


def _processor() -> set[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return set(file.read().split())
    return set()


def _try_here(names: list[str]) -> None:
    """Print a line before and after each probe."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names:
        print("tries", name, flush=True)
        try:
            found = SHOWS if FAULTS[name].probe() else ABSENT
        except Exception as error:  # such as of an option that this XLA does not know
            found = f"cannot be tried: {type(error).__name__}"
        print("found", found, flush=True)


def try_all(names: list[str]) -> dict[str, str]:
    """Return by name how each probe ended.

    They run in another process one after another, and in a new one after each that ends
    it.
    """
    processor = _processor()
    found = {}
    rest = []
    for name in names:
        needs = FAULTS[name].needs
        if needs and needs not in processor:
            found[name] = f"needs {needs}"
        else:
            rest.append(name)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    while rest:
        run = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--here", *rest],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        name = None
        for line in run.stdout.splitlines():
            word, _, rest_of_line = line.partition(" ")
            if word == "tries":
                name = rest_of_line
                found[name] = ENDS
            elif word == "found":
                found[name] = rest_of_line
        if name is None:
            raise RuntimeError(f"JAX does not start: status {run.returncode}")
        rest = rest[rest.index(name) + 1 :]
    return {name: found[name] for name in names}


def _release(version: str) -> tuple[int, ...]:
    """Return a version's numbers, without what a pre-release adds."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def verdict(name: str, found: str, version: str) -> tuple[bool, str]:
    """Return whether a result is as it should be in a version, and what it means."""
    fault = FAULTS[name]
    shows = found in (SHOWS, ENDS)
    tried = version in TRIED
    known = version in fault.known
    if tried and known and not (shows or found.startswith("needs") or fault.rare):
        return False, "should show: is the probe wrong?"
    if tried and not known and shows:
        return fault.rare, "is not known here: enter the version"
    if _release(version) > _release(TRIED[-1]) and found == ABSENT:
        guard = "the warning" if fault.guard == PAGE else fault.guard
        return True, f"is mended: {guard} may go once {version} is the oldest JAX"
    return True, ""


def table() -> str:
    """Return the page's table of all faults."""
    rows = ["| fault | with jaxlib | report | guard |", "|---|---|---|---|"]
    for name, fault in FAULTS.items():
        says = " ".join(fault.says.split())
        known = "all" if fault.known == TRIED else ", ".join(fault.known)
        if fault.needs:
            known += f", on processors with {fault.needs}"
        guard = "none" if fault.guard == PAGE else f"`{fault.guard}`"
        rows.append(f"| `{name}`: {says} | {known} | {fault.report} | {guard} |")
    return "\n".join(rows) + "\n"


def main(names: list[str]) -> int:
    version = jaxlib.__version__
    print(f"| jaxlib {version} | known with | here | |\n|---|---|---|---|")
    right = True
    for name, found in try_all(names or list(FAULTS)).items():
        fits, words = verdict(name, found, version)
        right = right and fits
        print(f"| {name} | {', '.join(FAULTS[name].known)} | {found} | {words} |")
    return 0 if right else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        _try_here(sys.argv[2:])
    else:
        raise SystemExit(main(sys.argv[1:]))
