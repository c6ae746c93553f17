"""Functions that all peers share: read options and MNIST, and run rounds on request.

A peer is a process that warms up, stays, and runs one round of steps for each line that
it reads, so that rounds of several systems can be timed in turn.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import speed

import mnist_data


def arguments(doc, flags=(), cases=None, **numbers):
    """Parse the options `--steps`, `--batch`, the other given numbers, and flags.

    `--devices`, if it is among them, divides the CPU.  `cases`, if given, are the first
    argument's choices, each with numbers of its own.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if cases:
        parser.add_argument("case", choices=cases)
    for name, default in {"steps": 50, "batch": 128, **numbers}.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(default), default=default)
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    if cases:
        parser.set_defaults(**cases[parser.parse_known_args()[0].case])
    args = parser.parse_args()
    if "devices" in numbers:
        jax.config.update("jax_num_cpu_devices", args.devices)
    return args


def folder(variable):
    """Return the folder that an environment variable names; exit if it names none."""
    path = os.environ.get(variable)
    if not path or not os.path.isdir(path):
        found = f"is {path}, not a folder" if path else "is not set"
        raise SystemExit(f"{variable} {found}; set it to the folder of the data")
    return Path(path)


def load_mnist():
    try:
        return mnist_data.load_data("mnist", folder("MNIST_DIR"))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def endless_order(num_rows, batch, members):
    """Yield rows per step, [members, batch], in a random order for each member."""
    rng = np.random.default_rng(0)
    steps = num_rows // batch
    while True:
        orders = np.stack([rng.permutation(num_rows) for _ in range(members)])
        orders = orders[:, : steps * batch].reshape(members, steps, batch)
        yield from orders.swapaxes(0, 1)


def next_steps(order, steps):
    """Return the rows of the next steps, [members, steps, batch]."""
    return np.stack(list(itertools.islice(order, steps)), axis=1)


def say(message):
    """Print a message to the process that asks for rounds."""
    print(json.dumps(message), flush=True)


def timed(run, steps):
    """Return the seconds of run(steps), and the number that it returns."""
    start = time.perf_counter()
    loss = run(steps)
    return time.perf_counter() - start, loss


def serve(args, train, predict=None, rows=None):
    """Run a round for each line of input, which names one; print rows and seconds.

    `train(steps)` returns the mean loss, and `predict(steps)` a number, once every
    result is ready.  A step takes so many rows, by default a batch per member; a round
    takes `args.steps`, or as many as take `args.seconds`.  Two calls of each are not
    counted: the first compiles, and the hello has by how much it is longer.
    """
    runs, steps, hello = {"train": train}, {}, {}
    runs |= {"predict": predict} if predict else {}
    for what, run in runs.items():
        (first, hello[what]), (second, _) = (timed(run, args.steps) for _ in "ab")
        hello[f"{what}_compile"], steps[what] = first - second, args.steps
        if "seconds" in args:
            steps[what] = max(2, math.ceil(args.steps * args.seconds / second))
    say(hello)
    for line in sys.stdin:
        what = line.strip()
        seconds, _ = timed(runs[what], steps[what])
        taken = steps[what] * (rows or args.members * args.batch)
        say({"rows": taken, "seconds": seconds})


def serve_steps(step, state, calls, args, **options):
    """Serve rounds of calls step(state, *call) of JAX, which return state and losses.

    `calls(steps)` yields the arguments of a round's calls.  `serve` has the options.
    """
    training = speed.Training(state)

    def run(steps):
        _, losses = jax.block_until_ready(training.take(step, calls(steps)))
        return float(np.mean(jax.device_get(losses)))

    serve(args, run, **options)


def serve_epochs(train, state, num_rows, args):
    """Serve rounds of one call train(state, rows) each, which takes all their steps."""
    order = endless_order(num_rows, args.batch, args.members)
    serve_steps(train, state, lambda steps: [(next_steps(order, steps),)], args)
