"""Try an accelerator: is a trainer right there, in which memory, and how fast?

    python -m pip install '.[bench]'
    python benchmarks/gpu.py          # at most five minutes on a GPU, with compiling
    python benchmarks/gpu.py --tiny   # tiny networks, also on a CPU

The tables are in Markdown.  Trainers have their defaults, and beside them at_once=1,
"in turn".  A cell that fails says why, and the others go on.  The status is 1 if
something is not right.

Right: three members' losses, relative to the CPU's, and bits of member 0.  Memory: MB
that `trainer.lower(...).compile().memory_analysis()` promises for `update`, and the
most that three calls took.  Every one of these rows has processes of its own.

Speed: medians of two rounds, after one that compiles.  By hand is a `jit` of a
`lax.scan` over steps, which gives its state's buffers away; its orders are on the
device before, and a trainer's come from the host.  All have JAX's default precision,
which is TensorFloat-32 on many GPUs, and so has PyTorch, which runs first, if it can be
imported.  Cells that --seconds leave no time for say so.  Where a cache is set
(JAX_COMPILATION_CACHE_DIR), a second run compiles only the programs that changed.
"""

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version

import accelerators
import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import speed
from accelerators import NETWORKS, form

key = jax.random.key
WAYS = {"defaults": {}, "in turn": dict(at_once=1)}
RIGHT, MEMORY = ("cnn", "batchnorm"), ("cnn", "dense", "wide", "transformer")
LOSSES = {  # precision, steps, and what is too much beside the CPU
    "first losses, float32": ("float32", 1, 1e-5),
    "first losses, default precision": ("default", 1, 1e-3),
    "twelve losses, float32": ("float32", 12, 1e-3),
    "twelve losses, default precision": ("default", 12, 0.1),
}
BITS = "bits of two trainers", *(f"bits of K = 1, 2, 3: {way}" for way in WAYS)
SPEEDS = {  # what, network, members, steps; the last ones may find no time left
    "guide's CNN, K = 1": ("epoch", "cnn", 1, 200),
    "guide's CNN, K = 8": ("epoch", "cnn", 8, 200),
    "100 small networks": ("epoch", "small", 100, 360),
    "ResNet-20, K = 4": ("epoch", "resnet", 4, 50),
    "guide's CNN, K = 8, predicting 10,000 images": ("predict_members", "cnn", 8, 0),
    "guide's CNN, K = 1, `update`": ("update", "cnn", 1, 50),
    "guide's CNN, K = 8, `update`": ("update", "cnn", 8, 50),
    "transformer of 29 M, K = 8": ("epoch", "transformer", 8, 10),
    "ResNet-20 in bfloat16, K = 4": ("epoch", "resnet16", 4, 50),
}
SIZES = dict(right=64, memory=8, predict=4000, rounds=2, flags=[])


def shrink():
    """Make networks, data, and numbers of members and steps small."""
    sizes = {"dense": (16,), "wide": (2, 2, 16), "transformer": (8,)}
    for name, network in NETWORKS.items():
        (x, y), (init, logits, *_) = network.data, network
        x = form(64, *sizes.get(name, x.shape[1:]), dtype=x.dtype)
        y = x if name == "transformer" else form(64)
        if "resnet" in name:
            dtype = jnp.bfloat16 if name == "resnet16" else jnp.float32
            init, logits = accelerators.resnet20(dtype, blocks=1, widths=(8,))
        elif name in sizes:
            few = dict(layers=1, words=32) if name == "transformer" else {}
            init = partial(init, width=16, **few)
        own = dict(init=init, logits=logits, batch=8, data=(x, y))
        NETWORKS[name] = network._replace(**own)
    for title, (what, name, members, _) in SPEEDS.items():
        SPEEDS[title] = what, name, min(2, members), 2
    SIZES.update(right=8, memory=2, predict=40, rounds=1, flags=["--tiny"])


def draw(name):
    """Return arrays of the forms of a network's data."""
    rng, classes, (init, logits, *_) = np.random.default_rng(0), 10, NETWORKS[name]
    if init:
        params = jax.eval_shape(init, key(0))
        classes = jax.eval_shape(logits, params, NETWORKS[name].data[0]).shape[-1]

    def array(form):
        if np.issubdtype(form.dtype, np.floating):
            return rng.normal(size=form.shape).astype(form.dtype)
        most = 256 if form.dtype == np.uint8 else classes
        return rng.integers(most, size=form.shape, dtype=form.dtype)

    return tuple(map(array, NETWORKS[name].data))


def make(name, members, **how):
    return accelerators.make(name, members=members, devices=1, **how)


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def attempt(call, *args):
    """Return a cell of a table, or why there is none."""
    try:
        found = call(*args)
        return number(found) if isinstance(found, float) else found
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".replace("|", "/")
        return " ".join(said.split())[:150]


# Tasks, each in a process of its own


def right(name, *precisions):
    """Return losses by precision, and digests of member 0 that may be equal, by row."""
    losses, digests = {}, []
    for precision in precisions:
        with jax.default_matmul_precision(precision):
            losses[precision], last = twelve_steps(name, 3)
    if "default" in precisions:
        digests.append([last, twelve_steps(name, 3)[1]])
    for how in WAYS.values() if digests and name == RIGHT[0] else ():
        digests.append([twelve_steps(name, k, **how)[1] for k in (1, 2, 3)])
    return losses, dict(zip(BITS, digests))


def twelve_steps(name, members, **how):
    """Return the losses [K, 12], and a digest of member 0's and of its state."""
    data, trainer = draw(name), make(name, members, **how)
    rng, shape = np.random.default_rng(0), (3, 12, SIZES["right"])
    order = rng.integers(len(data[0]), size=shape)
    state, losses = trainer.epoch(trainer.init(key(0)), data, order[:members])
    found = losses, trainer.gather(state)._replace(key=())
    parts = [np.asarray(x[0]).tobytes() for x in jax.tree.leaves(found)]
    return losses.tolist(), hashlib.sha256(b"".join(parts)).hexdigest()


def memory(name, way):
    """Return a cell of MB: of a member's state, as promised for an update, at most."""
    device, trainer = jax.devices()[0], make(name, SIZES["memory"], **WAYS[way])
    batch = [x[: NETWORKS[name].batch] for x in draw(name)]
    promised = trainer.lower("update", *batch).compile().memory_analysis()
    before = device.memory_stats()  # None on a CPU
    state = trainer.init(key(0))
    for _ in range(3):
        state, _ = trainer.update(state, *batch)
    jax.block_until_ready(state)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(state[:2])) / trainer.members]
    sizes.append(accelerators.bytes_of(promised))
    if before:
        peak = device.memory_stats()["peak_bytes_in_use"]
        sizes.append(peak - before["bytes_in_use"])
    return ", ".join(number(x / 1e6) for x in sizes)


def apart(task, *args, **env):
    """Return the result of a task in a process of its own."""
    command = shlex.join(["../gpu.py", *SIZES["flags"], "--task", task, *args])
    process = speed.launch(command, stdout=subprocess.PIPE, env=env)
    result = speed.answer(process, f"{task} {args[0]}")["result"]
    speed.finish(process)
    return result


def do_tasks():
    """Do all tasks; return functions that return their results, by their names."""
    with ThreadPoolExecutor(6) as pool:
        start, cpu, found = partial(pool.submit, apart), dict(JAX_PLATFORMS="cpu"), {}
        for name in RIGHT:
            found["cpu", name] = start("right", name, "float32", **cpu)
            found["right", name] = start("right", name, "float32", "default")
        found |= {(x, way): start("memory", x, way) for x in MEMORY for way in WAYS}
    return {name: each.result for name, each in found.items()}


def print_tasks(found):
    """Print what is right, and the memory; return how many cells were not right."""

    def error(precision, steps, limit, name):
        pair = found["right", name]()[0][precision], found["cpu", name]()[0]["float32"]
        here, cpu = np.array(pair)[:, :, :steps]
        worst = abs(here - cpu).max() / abs(cpu).max()
        if not worst < limit:
            raise ValueError(f"wrong by {worst:.1e}")
        return f"{worst:.1e}"

    def bits(title, name):
        digests = {*found["right", name]()[1].get(title, ())}
        return ("", "equal", "differ", "differ")[len(digests)]

    rows = {title: partial(error, *each) for title, each in LOSSES.items()}
    rows |= {title: partial(bits, title) for title in BITS}
    speed.print_head("right", *RIGHT)
    wrong = 0
    for title, call in rows.items():
        cells = [attempt(call, name) for name in RIGHT]
        speed.print_row(title, *cells)
        wrong += sum(": " in cell for cell in cells)  # a reason
    print()
    title = f"{SIZES['memory']} members; MB of a state, promised, and at most"
    speed.print_head(title, *WAYS)
    for name in MEMORY:
        speed.print_row(name, *(attempt(found[name, way]) for way in WAYS))
    return wrong


# Speed


def timed(make, steps=1):
    """Return the median of ms per step of the function that `make` returns."""
    if time.monotonic() > timed.end:
        raise TimeoutError("no time left")
    run, times = make(), []
    for _ in range(1 + SIZES["rounds"]):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) / steps * 1e3


def hand(name, members, function, calls, at_once):
    """Return a function that trains by hand: `calls` are (own, shared)."""
    init, logits, optimizer, *_ = NETWORKS[name]
    step = by_hand.make_step(accelerators.loss_of(logits), optimizer)
    program = by_hand.over_members(function(step), at_once=at_once)
    draw_all = jax.jit(jax.vmap(by_hand.start(init, optimizer)))
    state = draw_all(jax.random.split(key(0), members))
    return partial(speed.Training(state).take, program, calls)


def predict(name, members, x):
    """Return a function that predicts by hand, some thousand images at a time."""
    (init, logits, *_), n = NETWORKS[name], SIZES["predict"]
    params = jax.jit(jax.vmap(init))(jax.random.split(key(0), members))
    forward = jax.jit(lambda p, x: jax.nn.softmax(jax.vmap(logits, (0, None))(p, x)))

    def run():
        parts = [np.asarray(forward(params, x[i : i + n])) for i in range(0, len(x), n)]
        np.concatenate(parts, axis=1)

    return run


def ours(name, members, method, calls, how):
    """Return a function that calls a trainer's method with each of some arguments."""
    trainer = make(name, members, **how)
    state, call = trainer.init(key(0)), getattr(trainer, method)
    if method == "predict_members":
        return partial(call, state, *calls[0])
    if method == "epoch":
        calls = [(trainer.place(data), order) for data, order in calls]
    return partial(speed.Training(state).take, call, calls)


def measure(method, name, members, steps):
    """Return cells of ms per step: by hand and ours, at once and in turn."""
    rng, data, batch = np.random.default_rng(0), draw(name), NETWORKS[name].batch
    rows = rng.integers(len(data[0]), size=(members, steps, batch), dtype=np.int32)
    if method == "predict_members":
        calls, steps = [data[:1]], len(data[0]) / 10_000
        makers = [partial(predict, name, members, data[0]), None]
    else:
        calls = [tuple(x[each] for x in data) for each in rows[0]]
        given, function = [((), call) for call in calls], lambda step: step
        if method == "epoch":
            calls, given = [(data, rows)], [jax.device_put(((rows,), data))]
            function = by_hand.make_scan
        makers = [partial(hand, name, members, function, given, n) for n in (0, 1)]
    makers += [
        partial(ours, name, members, method, calls, how) for how in WAYS.values()
    ]
    if members == 1:
        makers[1::2] = None, None  # there is one turn
    return [attempt(timed, make, steps) if make else "" for make in makers]


def print_speeds():
    limit = str(min(75, timed.end - time.monotonic()))
    command = shlex.join(["gpu_torch.py", limit, *SIZES["flags"]])
    env = {"JAX_PLATFORMS": "cpu"}  # for the data that it draws
    peer = speed.launch(command, stdout=subprocess.PIPE, env=env)

    def answer():
        return attempt(lambda: speed.answer(peer, "PyTorch")["cells"])

    print(f"\nPyTorch: {(release := answer())}\n")
    cases = () if ": " in release else SPEEDS.items()
    peers = {title: answer() for title, case in cases if case[0] == "epoch"}
    names = "by hand", "by hand, in turn", "trainer", "trainer, in turn"
    speed.print_head("ms per step", *names, "PyTorch, loop", "vmap", "CUDA graph")
    for title, case in SPEEDS.items():
        cells, others = attempt(measure, *case), peers.get(title, "")
        cells = [cells, "", "", ""] if isinstance(cells, str) else cells
        others = [others, "", ""] if isinstance(others, str) else others
        speed.print_row(title, *cells, *others)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=270, help="for all tables")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    timed.end = time.monotonic() + args.seconds
    # Several processes share the device; each takes only the memory it needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.tiny:
        shrink()
    if args.task:
        task, *given = args.task
        print(json.dumps({"result": {"right": right, "memory": memory}[task](*given)}))
        return 0
    device, names = jax.devices()[0], ("jax", "jaxlib", "flax", "optax")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    platform = " ".join(device.client.platform_version.split())
    print(f"{device.device_kind}, {platform}, {versions}\n", flush=True)
    wrong = print_tasks(do_tasks())
    print_speeds()
    print(f"\n{args.seconds - (timed.end - time.monotonic()):.0f} seconds in all")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
