"""Interrupt whole training runs, again and again, and compare how they end.

    python benchmarks/interrupts.py kill --trials 500
    python benchmarks/interrupts.py stop --trials 20
    python benchmarks/interrupts.py processes --trials 50
    MNIST_DIR=... python benchmarks/interrupts.py cost

kill: runs of train_mnist.py that save every few steps are killed (SIGKILL) at random
moments and resumed until they end.  After each kill every checkpoint has to load, and
the newest to be at most one interval behind the steps that were done; at the end the
last checkpoint has to be that of a run that nobody interrupted, byte for byte.

stop: the same with SIGTERM, which has to end a run with status 143 and no step lost
(or with the signal itself, before the script has come as far as to listen).

processes: runs of two processes, one after another, have to end, and in the same bytes
as one process with as many devices.

cost: what a checkpoint of two CNNs with momentum takes, and what it costs to train an
epoch in pieces of about a second.

All but the last train on a small data set of generated digits, with several runs at
once where asked (--jobs); cost measures, and wants the machine for itself.
"""

import argparse
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist as tm

ROOT = Path(__file__).resolve().parent.parent

STEPS_AN_EPOCH, EPOCHS, INTERVAL = 16, 20, 2
FLAGS = [
    *("--members", "2", "--devices", "2", "--epochs", str(EPOCHS)),
    *("--batch-size", "32", "--network", "batchnorm", "--train-size", "512"),
    *("--save-every", str(INTERVAL / STEPS_AN_EPOCH)),
]
# Runs the script, and leaves in a file how many steps are done.
WORKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import train_mnist as tm
train, steps = tm.train, os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
def counted(*args, **kwargs):
    for now in train(*args, **kwargs):
        os.pwrite(steps, b"%08d" % (now.epoch * 16 + now.step), 0)
        yield now
tm.train = counted
sys.exit(tm.main(sys.argv[3:]))
"""


def write_data(folder: Path) -> None:
    """Write 512 training and 128 test digits in MNIST's form."""
    data = tm.generate_digits(seed=0)
    arrays = (
        data.train_images[:512, ..., 0],
        data.train_labels[:512],
        data.test_images[:128, ..., 0],
        data.test_labels[:128],
    )
    for file, array in zip(tm.MNIST_FILES, arrays):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / file.name).write_bytes(header + array.astype(np.uint8).tobytes())


def start(folder: Path, data: Path, *flags: str) -> subprocess.Popen:
    """Start a run in `folder`, with the compiled programs of earlier ones."""
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


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, the newest first."""
    names = filter(tm.Folder.CHECKPOINT.fullmatch, os.listdir(folder))
    return [folder / name for name in sorted(names, reverse=True)]


def steps_of(path: Path) -> int:
    return int(re.search(r"\d+", path.name)[0])


def last_checkpoint(folder: Path, epochs: int = EPOCHS) -> bytes:
    newest = checkpoints(folder)[0]
    if steps_of(newest) != epochs * STEPS_AN_EPOCH:
        raise RuntimeError(f"{folder} ends with {newest.name}: see its log")
    return newest.read_bytes()


def run_whole(folder: Path, data: Path, epochs: int = EPOCHS) -> tuple[bytes, float]:
    """Run without interruption; return the last checkpoint, and the seconds it takes.

    The second of two runs finds the compiled programs of the first, as those after it.
    """
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        if start(folder, data, "--epochs", str(epochs)).wait():
            raise RuntimeError((folder / "log").read_text())
    return last_checkpoint(folder, epochs), time.monotonic() - began


def like_of(path: Path):
    """Return a tree in the form of a checkpoint that is known to be good."""
    settings = np.load(path)[".settings"]
    recipe = tm.RECIPES["batchnorm"]._replace(epochs=EPOCHS, batch_size=32)
    trainer = tm.make_trainer(recipe, 2, 1, EPOCHS * STEPS_AN_EPOCH)
    state = trainer.gather(trainer.init(tm.jax.random.key(0)))
    return tm.Checkpoint(settings, np.array(0), np.array(0), state)


def interrupt(how: signal.Signals, trials: int, seed: int = 0, jobs: int = 1) -> dict:
    """Send SIGKILL or SIGTERM to runs at random moments, resume; return the counts."""
    interval = INTERVAL if how == signal.SIGKILL else 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = root / "data"
        data.mkdir()
        write_data(data)
        expected, longest = run_whole(root / "whole", data)
        like = like_of(checkpoints(root / "whole")[0])

        def chain(job: int) -> dict:
            rng, number = random.Random(f"{seed} {job}"), 0
            names = "signals", "before", "unloadable", "lost", "ended", "different"
            counts = dict.fromkeys((*names, "refused"), 0)
            folder = root / f"run {job} {number}"
            while counts["signals"] < trials // jobs:
                some = folder.exists() and checkpoints(folder)
                if folder.exists() and not some:
                    shutil.rmtree(folder)  # killed before the first checkpoint
                process = start(folder, data, *["--resume"] * bool(some))
                try:
                    status = process.wait(timeout=rng.uniform(0.5, 0.7 * longest))
                except subprocess.TimeoutExpired:
                    process.send_signal(how)
                    status = process.wait()
                    # -15 is a process that has not come as far as to listen.
                    if status not in ((-9,) if interval else (143, -15)):
                        counts["refused"] += 1
                        print(f"status {status}: {(folder / 'log').read_text()[-500:]}")
                    counts["signals"] += 1
                    found = checkpoints(folder)
                    counts["before"] += not found
                    for path in found:
                        try:
                            pe.load(path, like)
                        except Exception as error:
                            print(f"unloadable: {error}")
                            counts["unloadable"] += 1
                    steps = (folder / "steps").read_text() if found else ""
                    if steps and int(steps) - steps_of(found[0]) > interval:
                        print(f"lost: {found[0].name} of {steps} steps")
                        counts["lost"] += 1
                    continue
                counts["ended"] += 1
                if status:
                    print(f"refused: {(folder / 'log').read_text()[-1000:]}")
                    counts["refused"] += 1
                elif last_checkpoint(folder) != expected:
                    print(f"different: {folder.name}")
                    counts["different"] += 1
                shutil.rmtree(folder)
                number += 1
                folder = root / f"run {job} {number}"
            process = start(folder, data, *["--resume"] * bool(checkpoints(folder)))
            counts["ended"] += 1
            counts["refused"] += process.wait() != 0
            counts["different"] += last_checkpoint(folder) != expected
            return counts

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(chain, range(jobs)))
    return {name: sum(result[name] for result in results) for name in results[0]}


def processes(trials: int, epochs: int = 3, seconds: float = 300) -> dict:
    """Run two processes of one device, again and again; return the counts."""
    counts = {"runs": 0, "hung": 0, "failed": 0, "different": 0}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = root / "data"
        data.mkdir()
        write_data(data)
        expected, _ = run_whole(root / "whole", data, epochs)
        for trial in range(trials):
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            folders = [root / f"{trial}", root / f"{trial} second"]
            flags = ["--epochs", str(epochs), "--devices", "1", "--num-processes", "2"]
            flags += ["--coordinator", f"localhost:{port}", "--process-id"]
            runs = [start(f, data, *flags, str(i)) for i, f in enumerate(folders)]
            counts["runs"] += 1
            try:
                limit = time.monotonic() + seconds
                status = [run.wait(limit - time.monotonic()) for run in runs]
                counts["failed"] += any(status)
                if any(status):
                    print((folders[0] / "log").read_text()[-1000:])
                else:
                    counts["different"] += (
                        last_checkpoint(folders[0], epochs) != expected
                    )
            except subprocess.TimeoutExpired:
                counts["hung"] += 1
                for run in runs:
                    run.send_signal(signal.SIGKILL)
            for folder in folders:
                shutil.rmtree(folder)
    return counts


def cost(rounds: int) -> dict:
    """Time a save, and epochs in pieces against whole ones in one call, in turn."""
    pe.use_cpu_devices(2)
    data = tm.load_data("auto", tm.default_folder())
    images, labels = data.train_images[:16384], data.train_labels[:16384]
    recipe = tm.RECIPES["cnn"]._replace(epochs=2)
    trainer = tm.make_trainer(recipe, 2, 2, 2 * 256)
    placed = trainer.place((images, labels))
    seconds = {"save": [], "pieces": [], "whole": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):
            # The second epoch, by which time the pieces have found their length.
            run = list(tm.train(trainer, recipe, images, labels, seed=0))
            second = [p.seconds for p in run if (p.epoch, p.step) > (1, 0)]
            seconds["pieces"].append(sum(second))
            began = time.perf_counter()
            order = tm.member_orders(len(images), recipe, seed=0, epoch=1, members=2)
            state, losses = trainer.epoch(run[-1].state, placed, order)
            np.asarray(losses)
            seconds["whole"].append(time.perf_counter() - began)
            began = time.perf_counter()
            pe.save(Path(folder) / "checkpoint.npz", trainer.gather(state))
            seconds["save"].append(time.perf_counter() - began)
    save, pieces, whole = (statistics.median(s[1:]) for s in seconds.values())
    epoch = whole * len(data.train_images) / len(images)
    return {
        "save, ms": round(1000 * save, 1),
        "of an epoch of all images, %": round(100 * save / epoch, 2),
        "training in pieces, % slower": round(100 * (pieces / whole - 1), 2),
        "pieces in the last epoch": len(second),
        "rounds": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trial", choices=("kill", "stop", "processes", "cost"))
    parser.add_argument("--trials", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at once (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.trial in ("kill", "stop"):
        how = signal.SIGKILL if args.trial == "kill" else signal.SIGTERM
        counts = interrupt(how, args.trials, args.seed, args.jobs)
    elif args.trial == "processes":
        counts = processes(args.trials)
    else:
        counts = cost(args.trials)
    print(f"{args.trial}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    bad = "unloadable", "lost", "different", "refused", "hung", "failed"
    return any(counts.get(name) for name in bad)


if __name__ == "__main__":
    sys.exit(main())
