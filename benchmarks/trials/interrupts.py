"""Interrupt loops of training, again and again, and compare their ends.

    python benchmarks/trials/interrupts.py cell --trials 200
    python benchmarks/trials/interrupts.py fit --trials 60

cell: loops of `update` and `epoch`, as in a notebook's cell, are interrupted (SIGINT)
at random moments and continue from `trainer.latest`, which has to be usable each time.
At the end every step has been taken once, and the bits have to equal the bits of an
uninterrupted loop.  Python may drop an interrupt that comes while it collects garbage
or ends a generator.

fit: processes that call `pe.fit` receive SIGKILL, SIGTERM or SIGINT at random moments,
on one device and on two in turn, and the next process goes on.  The last checkpoint has
to be that of a process that was never stopped, byte by byte.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pjax_ensemble as pe

LOOP_STEPS, LOOP_SECONDS = 200, 0.05


def make_loop(members: int, how: str, read: bool) -> tuple[pe.Trainer, Callable]:
    """Return a trainer on two devices, and train(state, num_steps) -> state.

    `train` takes the steps that a state lacks to `num_steps`, by `update` on batches of
    `prefetch` or by `epoch` in pieces of 4.  With `read` it reads each call's losses.
    """
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 256, 8)).astype(np.float32)
    order = generator.integers(256, size=(LOOP_STEPS, 16))

    def loss_fn(params, x, y):
        return jnp.mean((pe.dense(params, x) - y) ** 2)

    def train(state, num_steps=LOOP_STEPS):
        done = np.asarray(state.opt_state.num_steps).flat[0]
        rows = order[done:num_steps]
        if how == "update":
            call, work = trainer.update, pe.prefetch((x[r], y[r]) for r in rows)
        else:
            pieces = (rows[i : i + 4] for i in range(0, len(rows), 4))
            call, work = trainer.epoch, (((x, y), piece) for piece in pieces)
        for args in work:
            state, losses = call(state, *args)
            if read:
                np.asarray(losses)
        return state

    def init(key):
        return pe.dense_init(key, 8, 8)

    trainer = pe.make_trainer(init, loss_fn, pe.sgd(0.01), members=members, devices=2)
    return trainer, train


def interrupt_loop(trainer: pe.Trainer, train: Callable, counts: dict) -> None:
    """Interrupt a loop at random moments until it ends; add to the counts.

    A SIGINT comes within `LOOP_SECONDS` after the loop began or continued, unless the
    loop ends before.
    """

    def send():
        counts["dropped"] += 1  # until it arrives
        os.kill(os.getpid(), signal.SIGINT)

    def bits(state):
        return [leaf.tobytes() for leaf in jax.tree.leaves(trainer.gather(state)[:3])]

    def begin():  # sets `latest` before a signal comes
        return train(trainer.init(jax.random.key(0)), 4)

    whole, state, ended = bits(train(begin())), begin(), False
    while not ended:
        timer = threading.Timer(random.uniform(0, LOOP_SECONDS), send)
        try:
            timer.start()
            state = train(state)
            timer.cancel()
            timer.join()
            time.sleep(0.01)  # time for a signal to arrive
            ended = True
        except KeyboardInterrupt:
            counts["interrupts"] += 1
            counts["dropped"] -= 1
            state = trainer.latest
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                counts["lost"] += 1
                state = begin()
    counts["loops"] += 1
    counts["different"] += bits(state) != whole


STAGES = itertools.cycle(("returns", "raises"))


def raise_at_second(number: int, frame: object) -> None:
    """Handle interrupts as asyncio does: return at the first, raise at the second.

    The second is sent at once, so that it comes within the same call.
    """
    if next(STAGES) == "raises":
        raise KeyboardInterrupt
    again = random.uniform(0, LOOP_SECONDS / 1000)
    threading.Timer(again, os.kill, (os.getpid(), number)).start()


def cell(trials: int) -> dict:
    """Interrupt loops of all forms, at least `trials` times in total."""
    pe.use_cpu_devices(2)
    names = "loops", "interrupts", "dropped", "lost", "different"
    counts = dict.fromkeys(names, 0)
    handlers = signal.default_int_handler, raise_at_second
    forms = [*itertools.product((1, 4), ("update", "epoch"), (True, False), handlers)]
    # A shell lets its background processes ignore SIGINT.
    old = signal.getsignal(signal.SIGINT)
    for number, (*form, handler) in enumerate(forms, 1):
        signal.signal(signal.SIGINT, handler)
        trainer, train = make_loop(*form)
        while counts["interrupts"] < trials * number / len(forms):
            interrupt_loop(trainer, train, counts)
    signal.signal(signal.SIGINT, old)
    return counts


def fit_once(folder: str, devices: int) -> None:
    """Train four members for some seconds, or what an earlier process left of that."""
    pe.use_cpu_devices(2)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 4096, 64)).astype(np.float32)

    def loss_fn(params, x, y):
        return jnp.mean((pe.mlp(params, x) - y) ** 2)

    trainer = pe.make_trainer(
        lambda key: pe.mlp_init(key, [64, 256, 256, 64]),
        loss_fn,
        pe.adamw(0.001),
        members=4,
        devices=devices,
    )

    def validate(state):
        return np.asarray(trainer.gather(state).params[0].bias).mean(axis=1)

    how = dict(key=jax.random.key(0), epochs=6, batch_size=32, validate=validate)
    pe.fit(trainer, (x, y), folder=folder, save_every=0.3, **how)


def start_fit(folder: Path, devices: int) -> subprocess.Popen:
    code = "import interrupts, sys; interrupts.fit_once(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(folder), str(devices)]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL
    )


def newest(folder: Path) -> bytes:
    return max(folder.glob("checkpoint_*.safetensors")).read_bytes()


def fit(trials: int) -> dict:
    """Stop processes that fit at random moments, at least `trials` times in total."""
    signals = itertools.cycle([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    names = "fits", "stopped", "lost", "different"
    counts = dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        assert start_fit(Path(place, "whole"), 2).wait() == 0
        seconds = time.perf_counter() - started
        whole = newest(Path(place, "whole"))
        while counts["stopped"] < trials:
            folder = Path(place, f"{counts['fits']}")
            for devices in itertools.cycle([1, 2]):
                process = start_fit(folder, devices)
                try:
                    ended = process.wait(random.uniform(0, seconds))
                except subprocess.TimeoutExpired:
                    process.send_signal(next(signals))
                    counts["stopped"] += 1
                    process.wait()
                    continue
                counts["lost"] += ended != 0
                break
            counts["fits"] += 1
            counts["different"] += newest(folder) != whole
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trial", choices=["cell", "fit"])
    parser.add_argument("--trials", type=int, default=20)
    args = parser.parse_args()
    counts = {"cell": cell, "fit": fit}[args.trial](args.trials)
    print(f"{args.trial}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    return bool(counts["lost"] or counts["different"])


if __name__ == "__main__":
    sys.exit(main())
