"""Interrupt whole training runs, again and again, and compare their ends.

    python benchmarks/interrupts.py kill --trials 500
    python benchmarks/interrupts.py stop --trials 20
    python benchmarks/interrupts.py cell --trials 200
    python benchmarks/interrupts.py processes --trials 50

kill: runs of train_mnist.py that save every few steps are killed (SIGKILL) at random
moments and resumed until they end.  After each kill every checkpoint has to load, and
the newest has to be at most one interval behind the finished steps.  At the end the
last checkpoint has to equal the checkpoint of an uninterrupted run, byte for byte.

stop: the same with SIGTERM, which has to end a run with status 143 and lose no step
(or to end it by the signal itself, before the script begins to listen).

cell: loops of `update` and `epoch`, as in a notebook's cell, are interrupted (SIGINT)
at random moments and continue from `trainer.latest`, which has to be usable each time.
At the end every step has been taken once, and the bits have to equal the bits of an
uninterrupted loop.  Python may drop an interrupt that comes while it collects garbage
or ends a generator.

processes: runs of two processes, one after another, have to end, in the same bytes as a
run of one process with as many devices.

kill, stop and processes train on a small data set of generated digits.  kill and stop
take several runs at once by --jobs.
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist as tm

ROOT = Path(__file__).resolve().parent.parent

STEPS_AN_EPOCH, EPOCHS, INTERVAL = 16, 20, 2
LOOP_STEPS, LOOP_SECONDS = 200, 0.05
FLAGS = [
    *("--members", "2", "--devices", "2", "--epochs", str(EPOCHS)),
    *("--batch-size", "32", "--network", "batchnorm", "--train-size", "512"),
    *("--save-every", str(INTERVAL / STEPS_AN_EPOCH)),
]
# Runs the script, and keeps the number of finished steps in a file.
WORKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import train_mnist as tm
save, steps = tm.Run.save, os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
def counted(run, **options):
    os.pwrite(steps, b"%08d" % run.done, 0)
    save(run, **options)
tm.Run.save = counted
sys.exit(tm.main(sys.argv[3:]))
"""


def write_data(folder: Path) -> None:
    """Write 512 training and 128 test digits in MNIST's form."""
    arrays = tm.generate_digits(seed=0)[1:]
    for name, array, count in zip(tm.MNIST_FILES, arrays, (512, 512, 128, 128)):
        array = array[:count].squeeze().astype(np.uint8)
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(header + array.tobytes())


def start(folder: Path, data: Path, *flags: str) -> subprocess.Popen:
    """Start a run in `folder`, with the compiled programs of earlier runs."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", WORKER, str(ROOT), str(folder / "steps"), *FLAGS]
    command += ["--data-dir", str(data), "--workdir", str(folder), *flags]
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(data / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def last_checkpoint(folder: Path, epochs: int = EPOCHS) -> bytes:
    (steps, newest), *_ = tm.checkpoints(folder)
    if steps != epochs * STEPS_AN_EPOCH:
        raise RuntimeError(f"{folder} ends with {newest.name}; see its log")
    return newest.read_bytes()


@contextlib.contextmanager
def prepared(epochs: int = EPOCHS) -> Iterator[tuple[Path, Path, bytes, float]]:
    """Yield a folder, data, and a whole run's last checkpoint and seconds.

    The run is the second of two: like all later runs, it finds the compiled programs of
    the first.
    """
    with tempfile.TemporaryDirectory() as name:
        data, whole = Path(name, "data"), Path(name, "whole")
        data.mkdir()
        write_data(data)
        for _ in range(2):
            shutil.rmtree(whole, ignore_errors=True)
            began = time.monotonic()
            if start(whole, data, "--epochs", str(epochs)).wait():
                raise RuntimeError((whole / "log").read_text())
        seconds = time.monotonic() - began
        yield Path(name), data, last_checkpoint(whole, epochs), seconds


def look(folder: Path, interval: int) -> dict[str, int]:
    """Count the faults in the checkpoints of an interrupted run."""
    found, wrong = tm.checkpoints(folder), []
    for _, path in found:
        try:
            pe.load(path)
        except Exception as error:
            wrong.append(f"unloadable: {error}")
    steps = (folder / "steps").read_text() if found else ""
    lost = bool(steps) and int(steps) - found[0][0] > interval
    if wrong or lost:
        print(f"{found[0][1].name} of {steps} steps", *wrong, sep="\n")
    return {"before": not found, "unloadable": len(wrong), "lost": lost}


def interrupt(how: signal.Signals, trials: int, jobs: int) -> dict:
    """Send SIGKILL or SIGTERM to runs at random moments, resume; return the counts."""
    # -15 is the status of a process that did not yet listen.
    interval, ends = (0, (143, -15)) if how == signal.SIGTERM else (INTERVAL, (-9,))
    names = "signals", "before", "unloadable", "lost", "ended", "different", "refused"
    total = collections.Counter(dict.fromkeys(names, 0))

    def chain(job: int) -> collections.Counter:
        counts, last, folder = collections.Counter(), False, root / f"run {job}"
        while not last:
            last = counts["signals"] >= trials // jobs
            if folder.exists() and not tm.checkpoints(folder):
                shutil.rmtree(folder)  # killed before the first checkpoint
            process = start(folder, data, *["--resume"] * folder.exists())
            try:
                process.wait(None if last else random.uniform(0.5, 0.7 * longest))
            except subprocess.TimeoutExpired:
                process.send_signal(how)
                counts["signals"] += 1
            status = process.wait()
            if status == 0:
                counts["ended"] += 1
                counts["different"] += last_checkpoint(folder) != whole
                shutil.rmtree(folder)
            elif status in ends:
                counts.update(look(folder, interval))
            else:
                counts["refused"] += 1
                print(f"status {status}: {(folder / 'log').read_text()[-1000:]}")
        return counts

    with prepared() as (root, data, whole, longest), ThreadPoolExecutor(jobs) as pool:
        for counts in pool.map(chain, range(jobs)):
            total.update(counts)
    return total


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


def interrupt_loop(trainer: pe.Trainer, train: Callable) -> dict:
    """Interrupt a loop at random moments until it ends; return the counts.

    A SIGINT comes within `LOOP_SECONDS` after the loop began or continued, unless the
    loop ends before.
    """
    sent: list = []

    def send():
        sent.append(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def bits(state):
        return [leaf.tobytes() for leaf in jax.tree.leaves(trainer.gather(state)[:3])]

    def begin():  # sets `latest` before a signal comes
        return train(trainer.init(jax.random.key(0)), 4)

    counts = {"interrupts": 0, "lost": 0}
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
            state = trainer.latest
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                counts["lost"] += 1
                state = begin()
    counts["dropped"] = len(sent) - counts["interrupts"]
    return counts | {"different": bits(state) != whole}


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
    total = collections.Counter(dict.fromkeys(names, 0))
    handlers = signal.default_int_handler, raise_at_second
    forms = [*itertools.product((1, 4), ("update", "epoch"), (True, False), handlers)]
    # A shell lets its background processes ignore SIGINT.
    old = signal.getsignal(signal.SIGINT)
    for number, (*form, handler) in enumerate(forms, 1):
        signal.signal(signal.SIGINT, handler)
        trainer, train = make_loop(*form)
        while total["interrupts"] < trials * number / len(forms):
            total.update(loops=1, **interrupt_loop(trainer, train))
    signal.signal(signal.SIGINT, old)
    return total


def processes(trials: int, epochs: int = 3, seconds: float = 300) -> dict:
    """Run two processes of one device, again and again; return the counts."""
    counts = {"runs": trials, "hung": 0, "failed": 0, "different": 0}
    with prepared(epochs) as (root, data, expected, _):
        for trial in range(trials):
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            folders = [root / f"{trial}", root / f"{trial} second"]
            flags = ["--epochs", str(epochs), "--devices", "1", "--num-processes", "2"]
            flags += ["--coordinator", f"localhost:{port}", "--process-id"]
            runs = [start(f, data, *flags, str(i)) for i, f in enumerate(folders)]
            try:
                limit = time.monotonic() + seconds
                if any([run.wait(limit - time.monotonic()) for run in runs]):
                    counts["failed"] += 1
                    print((folders[0] / "log").read_text()[-1000:])
                elif last_checkpoint(folders[0], epochs) != expected:
                    counts["different"] += 1
            except subprocess.TimeoutExpired:
                counts["hung"] += 1
                for run in runs:
                    run.kill()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = {"cell": cell, "processes": processes}
    parser.add_argument("trial", choices=("kill", "stop", *others))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    args = parser.parse_args()
    if args.trial in ("kill", "stop"):
        how = signal.SIGKILL if args.trial == "kill" else signal.SIGTERM
        counts = interrupt(how, args.trials, args.jobs)
    else:
        counts = others[args.trial](args.trials)
    print(f"{args.trial}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    bad = "unloadable", "lost", "different", "refused", "hung", "failed"
    return any(counts.get(name) for name in bad)


if __name__ == "__main__":
    sys.exit(main())
