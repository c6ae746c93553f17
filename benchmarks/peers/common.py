"""Functions that all peers share: read options and MNIST, and run rounds on request.

A peer is a process that warms up, stays, and runs one round of steps for each line that
it reads, so that rounds of several systems can be timed in turn.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

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
    start = time.perf_counter()
    loss = run(steps)
    return {"seconds": time.perf_counter() - start, "steps": steps, "loss": loss}


def serve(run, args, per_step=None):
    """Run a round for each line of input, and print its seconds and mean loss.

    `run(steps)` returns the mean loss once every result is ready.  A step takes
    `per_step` images, or by default a batch per member.  Two rounds are not counted:
    the first compiles, and `compile_seconds` is by how much it is longer.
    """
    first = timed(run, args.steps)
    hello = {"warm_up_loss": first["loss"]}
    hello["images_per_step"] = per_step or args.members * args.batch
    hello["compile_seconds"] = first["seconds"] - timed(run, args.steps)["seconds"]
    say(hello)
    for _ in sys.stdin:
        say(timed(run, args.steps))


def serve_epochs(train, state, num_rows, args):
    """Serve rounds; one call of `train(state, rows)` takes all steps of a round in JAX.

    The call returns the state in which the next round begins, and losses.
    """
    order = endless_order(num_rows, args.batch, args.members)

    def run(steps):
        nonlocal state
        state, losses = train(state, next_steps(order, steps))
        jax.block_until_ready(state)
        return float(np.mean(losses))

    serve(run, args)


def serve_steps(step, state, batches, args, wait=None, **options):
    """Serve rounds of calls `step(state, *batch)` of JAX, which return state and loss.

    The loop waits for every `wait`-th call.  `serve` has the other options.
    """

    def run(steps):
        nonlocal state
        losses = []
        for batch in itertools.islice(batches, steps):
            state, loss = step(state, *batch)
            losses.append(loss)
            if wait and len(losses) % wait == 0:
                loss.block_until_ready()
        jax.block_until_ready(state)
        return float(np.mean(jax.device_get(losses)))

    serve(run, args, **options)
