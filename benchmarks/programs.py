"""Test whether deleted trainers leave anything behind in their process.

    JAX_PLATFORMS=cpu python benchmarks/programs.py

Trainers of five members on four virtual devices are made one after another in one
process, used by every method that compiles a program, and deleted.  After every
`--every` trainers a row counts the rest: the memory maps of the process, of which Linux
allows 65,530, and its resident memory (both only on Linux); and how many of the
trainers' states, and of the objects that their losses hold, are still alive.  If any is
alive, or if from the first row to the last the maps grow by more than `MORE_MAPS` or
the memory by more than the share `MORE_MEMORY`, the status is 1, after a line with the
reason.
"""

import argparse
import gc
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import speed

import pjax_ensemble as pe

MEMBERS, DEVICES = 5, 4
MORE_MAPS, MORE_MEMORY = 50, 0.5  # a number, and a share of the first row's
PROC = Path("/proc/self/maps")  # on Linux


class Row(NamedTuple):
    """The process after some trainers; nan where only Linux reports a number."""

    trainers: int
    maps: float
    memory: float  # resident, MB
    states: int  # of deleted trainers, still alive
    functions: int


class Held:
    """An object that a loss function holds, in place of a user's data or model."""

    weight = 0.5


def use_trainer(seed: int) -> tuple[weakref.ref, weakref.ref]:
    """Make and use a trainer; return weak references to its state and `Held`."""
    held = Held()
    x = np.random.default_rng(seed).normal(size=(64, 3)).astype(np.float32)
    y = x.sum(axis=1)

    def loss_fn(params, x, y):
        return held.weight * jnp.mean((pe.dense(params, x)[:, 0] - y) ** 2)

    def init(key):
        return pe.dense_init(key, 3, 1)

    form = dict(members=MEMBERS, devices=DEVICES, apply_fn=pe.dense, output=None)
    trainer = pe.make_trainer(init, loss_fn, pe.sgd(0.1), **form)
    state = trainer.init(jax.random.key(seed))
    state, _ = trainer.update(state, x, y)
    state, _ = trainer.epoch(state, (x, y), np.arange(64).reshape(4, 16))
    trainer.predict(state, x)
    trainer.predict_members(state, x)
    return weakref.ref(jax.tree.leaves(state)[0]), weakref.ref(held)


def run(trainers: int, every: int) -> Iterator[Row]:
    """Use this many trainers, and yield a row after every `every` of them."""
    references = []
    for number in range(1, trainers + 1):
        references.append(use_trainer(number))
        if number % every == 0:
            gc.collect()
            alive = [[each() is not None for each in kind] for kind in zip(*references)]
            yield Row(number, *measure_process(), *map(sum, alive))


def measure_process() -> tuple[float, float]:
    """Return how many memory maps this process has, and its resident memory in MB."""
    if not PROC.exists():
        return math.nan, math.nan
    pages = int(PROC.with_name("statm").read_text().split()[1])
    return len(PROC.read_text().splitlines()), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def complaint(first: Row, last: Row) -> str | None:
    """Return a sentence about the growth between two rows, or None if there is none."""
    if last.states or last.functions:
        return f"{last.states} states and {last.functions} functions are still alive"
    if last.maps - first.maps > MORE_MAPS:
        return f"there are {last.maps - first.maps} more memory maps than at first"
    if last.memory > (1 + MORE_MEMORY) * first.memory:
        return f"there are {last.memory - first.memory:.0f} MB more than at first"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", type=int, default=400)
    parser.add_argument("--every", type=int, default=50)
    args = parser.parse_args()
    if not 1 <= args.every <= args.trainers:
        found = f"--every is {args.every}"
        parser.error(f"{found}; expected 1 <= --every <= --trainers, {args.trainers}")
    pe.use_cpu_devices(DEVICES)
    names = "trainers", "maps", "resident, MB", "states alive", "functions alive"
    speed.print_head(*names)
    rows = []
    for row in run(args.trainers, args.every):
        rows.append(row)
        speed.print_row(*("-" if math.isnan(x) else f"{x:.0f}" for x in row))
    first, last = rows[0], rows[-1]
    grown = last.memory / first.memory - 1
    print(f"\nresident memory: {grown:+.1%} from the first row to the last")
    if said := complaint(first, last):
        raise SystemExit(said)


if __name__ == "__main__":
    main()
