"""Measure how many copies of its members' states a trainer holds at once.

    python benchmarks/memory.py                       # eight members on one device
    python benchmarks/memory.py --devices 2 --at-once 4
    python benchmarks/memory.py --keep                # memory that was taken is kept

One row per call has the most memory that the process held during the call, on devices
and host together (a CPU is both).  The unit is the state of one member: its parameters
and its momentum.  K members need at least K states.  The results of `gather` and `load`
count too, and so do the arguments of `save` and `scatter`.

Memory is the peak of the resident set since the call began, minus the resident set
before `init`; only Linux reports it.
"""

import argparse
import functools
import os
import re
import sys
import tempfile
from pathlib import Path

import accelerators
import jax
import numpy as np

import pjax_ensemble as pe


def make(args: argparse.Namespace) -> pe.Trainer:
    """Make a trainer of networks of six square layers."""

    def loss_fn(params, x):
        return (accelerators.dense(params, x) ** 2).mean()

    options = dict(members=args.members, devices=args.devices, at_once=args.at_once)
    options |= dict(apply_fn=accelerators.dense, output=None)
    init = functools.partial(accelerators.dense_init, width=args.width)
    return pe.make_trainer(init, loss_fn, pe.sgd(1e-4), **options)


def status(name: str) -> int:
    """Return an entry of Linux's status of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])


def peak(call, *args):
    """Return a call's result, and the peak of resident memory during it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    result = jax.block_until_ready(call(*args))
    return result, status("VmHWM")


def peaks(args: argparse.Namespace) -> None:
    """Print a row per call."""
    x = np.ones((64, args.width), np.float32)
    order = np.tile(np.arange(8), (4, 1))
    trainer = make(args)
    jax.block_until_ready(jax.numpy.ones(8) + 1)  # JAX has started
    one = sum(np.prod(x.shape[1:]) * 4 for x in jax.tree.leaves(trainer.like().params))
    before = status("VmRSS")

    def row(name, call, *given):
        result, most = peak(call, *given)
        print(f"| {name} | {(most - before) / (2 * one):.1f} |", flush=True)
        return result

    print(f"| {trainer.layout} | states |\n|---|---|")
    state = row("init", trainer.init, jax.random.key(0))
    for name in "update, compiled", "update":
        state, _ = row(name, trainer.update, state, x[:8])
    for name in "epoch, compiled", "epoch":
        state, _ = row(name, trainer.epoch, state, (x,), order)
    row("predict_members, 64 rows", trainer.predict_members, state, x)
    gathered = row("gather", trainer.gather, state)
    del state
    object.__setattr__(trainer, "latest", None)  # the states on the devices are gone
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        row("save, of a gathered state", pe.save, file, gathered)
        del gathered
        loaded = row("load", pe.load, file, trainer.like())
    state = row("scatter, of a loaded state", trainer.scatter, loaded)
    del loaded
    row("update, of a scattered state", trainer.update, state, x[:8])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=8, metavar="K")
    parser.add_argument("--devices", type=int, default=1, metavar="D")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    parser.add_argument("--width", type=int, default=1500, help="of the six layers")
    parser.add_argument("--keep", action="store_true", help="as a process does")
    args = parser.parse_args()
    # So that freed memory returns to the system at once.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and not args.keep:
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    pe.use_cpu_devices(args.devices, keep_memory=args.keep)
    peaks(args)


if __name__ == "__main__":
    main()
