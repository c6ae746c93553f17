"""Show the time of a training step on one core, by kinds of operations.

    python -m pip install '.[bench]'
    python benchmarks/steps.py [NAME ...] [--steps 3]

One member of each network of `networks.py` trains on one device, bound to one core, and
JAX's profiler reports every operation.  The kinds are

- convolutions: XLA's or oneDNN's, with the scales and sums that are computed in it;
- products: matrix products;
- around them: copies, shifts and sums in place of a convolution;
- the rest: normalization, activations, the optimizer.

MFLOP are counted before anything is replaced, and "at best" is their time at the rate
of a product of matrices of side 2048.  XLA counts the body of a loop once, so MFLOP are
too few where layers scan, as the LSTM does.
"""

import argparse
import glob
import gzip
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import networks
import numpy as np
from speed import PEERS, print_head, print_row

import pjax_ensemble as pe

KINDS = "convolutions", "products", "around them", "the rest"


def kind(path: str) -> str:
    """Name the kind of an operation by its path in JAX's program."""
    name = path.rsplit("/", 1)[-1]
    if name in ("conv_general_dilated", "convolution"):
        return "convolutions"
    if name in ("dot_general", "matmul"):
        return "products"
    return "around them" if "branch_0_fun" in path else "the rest"


def seconds(run) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def product_rate() -> float:
    """Return the GFLOP/s of a large product, the best of five."""
    product, x = jax.jit(jnp.matmul), jnp.ones((2048, 2048))
    return 2 * 2048**3 / min(seconds(lambda: product(x, x)) for _ in range(6)) / 1e9


def profile(name: str, steps: int) -> tuple[float, float, dict[str, float]]:
    """Return MFLOP, milliseconds, and milliseconds of each kind, per example."""
    sys.path.insert(0, str(PEERS))
    import networks_jax

    init, loss_fn, _, data = networks_jax.make(name)
    how = dict(members=1, devices=1, stateful=True)
    trainer = pe.make_trainer(init, loss_fn, pe.sgd(0.01), **how)
    placed = trainer.place(data)
    state, batch = trainer.init(jax.random.key(0)), networks.SHAPES[name].batch
    order = np.arange(steps * batch).reshape(steps, batch) % len(data[0])
    text = trainer.lower("epoch", data, order).compile().as_text()
    paths = dict(re.findall(r'^\s*(?:ROOT )?%?(\S+) = .*op_name="([^"]*)"', text, re.M))

    def epoch():
        nonlocal state
        state, losses = trainer.epoch(state, placed, order)
        return state, losses

    least = min(seconds(epoch) for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds(epoch)
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        operation = event.get("args", {}).get("hlo_op", "while")
        if not re.match("while|call|conditional", operation):  # their parts are counted
            path = paths.get(operation, operation.replace("__onednn$", "/"))
            found[kind(path)] += event["dur"]
    scale = 1e3 * least / steps / batch / sum(found.values())  # the profiler slows it
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    model = jax.eval_shape(init, jax.random.key(0))
    args = jax.tree.map(lambda x: x[:batch], data)
    costs = gradient.lower(*model, None, *args).cost_analysis()
    return (
        costs["flops"] / batch / 1e6,
        1e3 * least / steps / batch,
        {key: value * scale for key, value in found.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="the beginnings of networks' names")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    if hasattr(os, "sched_setaffinity"):  # on Linux
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rate = product_rate()
    print_head("ms per example", "MFLOP", "at best", "a step", *KINDS)
    for name in networks.SHAPES:
        if not args.names or name.startswith(tuple(args.names)):
            mflop, took, parts = profile(name, args.steps)
            cells = mflop / rate, took, *parts.values()
            print_row(name, f"{mflop:.0f}", *(f"{x:.2f}" for x in cells))
    print(f"\nrate of a product of side 2048 on one core: {rate:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
