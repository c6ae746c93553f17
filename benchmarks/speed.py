"""Compare training throughput with other systems, in one run, in turn.

    python -m pip install '.[bench]'
    MNIST_DIR=... UCI_DIR=... python benchmarks/speed.py --json speed.json

Every system is its own process (benchmarks/peers), which warms up and then waits.  The
systems of a group take turns at rounds of a fixed number of steps.  Every round draws a
new order, since a system may leave the machine slower for the next one.  A figure is
the median over the rounds, in member-images trained per second, or in member-rows if
the data are rows, or in calls of a tiny network.  In the last group a round is a whole
job, from the start of its process to its end, in seconds.  `gpu.py` is for
accelerators.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# So that the scripts beside this one, which import it, find the modules.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PEERS = Path(__file__).resolve().parent / "peers"
MATMUL = "rate of a float32 matrix product, GFLOP/s"
TRAINING_GFLOP = 0.0274  # of the CNN, per image

JOBS = {
    "pjax_ensemble, train_mnist.py": (
        "../../train_mnist.py --data mnist --members 2 --devices 2 --epochs 2 "
        "--batch-size 128 --learning-rate 0.1 --schedule constant --max-shift 0"
    ),
    "Flax ensembling guide": "flax_guide.py --whole-job",
}

# A group's first system is ours, and is compared with the others.
GROUPS = {
    "CNN, K = 2, batch 128": {
        "pjax_ensemble, epoch": "ours.py cnn --members 2 --steps 120",
        "pjax_ensemble, update": "ours.py cnn --members 2 --host --steps 120",
        "the same, predict_members": "ours.py cnn --members 2 --predict --steps 80",
        "Flax ensembling guide": "flax_guide.py",
        "PyTorch, a loop": "torch_members.py cnn --loop",
        MATMUL: "matmul.py",
    },
    "CNN, K = 8, batch 128": {
        "pjax_ensemble, epoch": "ours.py cnn --members 8 --steps 30",
        "pjax_ensemble, K = 2": "ours.py cnn --members 2 --steps 120",
        "pjax_ensemble, 2 at once": "ours.py cnn --members 8 --at-once 2 --steps 8",
        "pjax_ensemble, 4 at once": "ours.py cnn --members 8 --at-once 4 --steps 8",
        "JAX, jit(vmap(scan)), D = 1": "jax_members.py cnn --steps 4",
        "JAX, pmap(vmap(scan)), D = 2": "jax_members.py cnn --devices 2 --steps 4",
        "torch.func.vmap": "torch_members.py cnn --members 8 --steps 4",
    },
    **{
        f"batch-norm network, Adam, D = 2, batch {n}": {
            "pjax_ensemble, sync": f"ours.py cnn --sync --batch {n} --steps {steps}",
            f"two members of {half}, apart": (
                f"ours.py cnn --apart --batch {half} --steps {steps}"
            ),
            "Keras guide": f"keras_guide.py --batch {n} --steps {steps // 2}",
        }
        for n, half, steps in ((64, 32, 400), (256, 128, 100))
    },
    "a hundred small networks, 8-50-2, Adam, init and 360 steps of batch 100; rows": {
        "pjax_ensemble, D = 2, 10 at once": "ours.py small --at-once 10",
        "pjax_ensemble, 1 at once": "ours.py small",
        "pjax_ensemble, 2 at once": "ours.py small --at-once 2",
        "pjax_ensemble, 5 at once": "ours.py small --at-once 5",
        "pjax_ensemble, 25 at once": "ours.py small --at-once 25",
        "pjax_ensemble, 50 at once": "ours.py small --at-once 50",
        "JAX, jit(vmap(scan)), D = 1": "jax_members.py small",
        "JAX, pmap(vmap(scan)), D = 2": "jax_members.py small --devices 2",
        "JAX, pmap(map(scan)), D = 2": "jax_members.py small --devices 2 --at-once 1",
        "JAX, the same, 10 at once": "jax_members.py small --devices 2 --at-once 10",
        "torch.func.vmap": "torch_members.py small",
        "PyTorch, a loop, 72 steps": "torch_members.py small --loop --steps 72",
    },
    "small transformers, K = 8, batch 32 of 32 tokens; rows": {
        "pjax_ensemble, D = 2, 1 at once": "ours.py transformer",
        "pjax_ensemble, 2 at once": "ours.py transformer --at-once 2",
        "pjax_ensemble, 4 at once": "ours.py transformer --at-once 4",
        "JAX, jit(vmap(scan)), D = 1": "jax_members.py transformer",
        "JAX, pmap(vmap(scan)), D = 2": "jax_members.py transformer --devices 2",
        "torch.func.vmap": "torch_members.py transformer",
    },
    "calls that take a step of a tiny network, K = D = 1; calls": {
        "pjax_ensemble, update": "single_calls.py update",
        "pjax_ensemble, epoch of one step": "single_calls.py epoch",
        "JAX, jit(vmap(step))": "single_calls.py update --by-hand",
    },
    "calls that predict one row of it; calls": {
        "pjax_ensemble, predict": "single_calls.py predict --batch 1",
        "pjax_ensemble, predict of eight": "single_calls.py predict",
        "JAX, jit(vmap)": "single_calls.py predict --batch 1 --by-hand",
    },
    "whole job, two epochs with their tests, K = 2, batch 128": JOBS,
}


def launch(command: str, python=sys.executable, env=(), **pipes) -> subprocess.Popen:
    """Start a peer's script, and send its errors to a file that `fail` reads."""
    script, *options = shlex.split(command)
    path = (PEERS / script).resolve()
    modules = os.pathsep.join(map(str, (PEERS.parent, PEERS.parent.parent)))
    env = {**os.environ, "PYTHONPATH": modules, **dict(env)}
    errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
    command = [python, path, *options]
    process = subprocess.Popen(command, stderr=errors, text=True, env=env, **pipes)
    process.stderr = errors
    return process


def fail(process: subprocess.Popen, name: str) -> NoReturn:
    """Exit with the status and the last words of a process that ended early."""
    process.stderr.seek(0)
    lines = process.stderr.read().decode(errors="replace").split("\n")
    words = next(filter(str.strip, reversed(lines)), "it said nothing")
    raise SystemExit(f"{name} ended with status {process.wait()}: {words}")


def tell(peer: subprocess.Popen, what: str) -> None:
    """Send a peer a line of input."""
    with contextlib.suppress(BrokenPipeError):  # it ended, as `answer` reports
        peer.stdin.write(f"{what}\n")
        peer.stdin.flush()


def answer(peer: subprocess.Popen, name: str) -> dict:
    for line in peer.stdout:
        if line.startswith("{"):
            return json.loads(line)
    fail(peer, name)


def finish(process: subprocess.Popen) -> float:
    """Wait for a process to end; return its peak resident memory in GB."""
    if process.stdin:
        process.stdin.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit / 1e9


def take_turns(systems: dict[str, Callable], rounds: int) -> dict[str, list]:
    """Call each system once per round, in a new order; return what each returned."""
    found = {name: [] for name in systems}
    for number in range(rounds):
        for name in random.Random(number).sample(list(systems), len(systems)):
            found[name].append(systems[name]())
    return found


def measure(
    systems: dict[str, list[str]], rounds: int, whats=("train",), pythons=()
) -> dict[str, dict]:
    """Run rounds in turn; return each system's rates, its hello, and its memory in GB.

    A system is the commands of its processes, in the Python that `pythons` may have for
    it.  A rate is of all its processes at once: rows per second, by kind of round.
    """
    pipes, pythons = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE), dict(pythons)
    peers, results = {}, {}
    for name, commands in systems.items():
        python = pythons.get(name, sys.executable)
        peers[name] = [launch(command, python, **pipes) for command in commands]
        results[name] = {"hello": [answer(peer, name) for peer in peers[name]]}

    def rate(name, what):
        for peer in peers[name]:
            tell(peer, what)
        said = [answer(peer, name) for peer in peers[name]]
        return sum(x["rows"] for x in said) / max(x["seconds"] for x in said)

    for what in whats:
        turns = {name: partial(rate, name, what) for name in peers}
        for name, rates in take_turns(turns, rounds).items():
            results[name][what] = rates
    for name, started in peers.items():
        results[name]["memory"] = sum(map(finish, started))
    return results


@dataclasses.dataclass
class Training:
    """A state that steps move on: step(state, *args) gives the next one, and a loss."""

    state: Any

    def take(self, step: Callable, calls: Iterable) -> tuple[Any, list]:
        """Take a step with each of some arguments; return the state and the losses."""
        losses = []
        for args in calls:
            self.state, loss = step(self.state, *args)
            losses.append(loss)
        return self.state, losses


def run_job(name: str, command: str) -> tuple[float, float]:
    """Run a command to its end; return its seconds and its peak memory in GB."""
    started = time.perf_counter()
    job = launch(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    memory = finish(job)
    seconds = time.perf_counter() - started
    if job.returncode:
        fail(job, name)
    return seconds, memory


def measure_jobs(rounds: int) -> dict:
    """Run whole jobs in turn; return seconds and peak memory per system."""
    jobs = {name: partial(run_job, name, command) for name, command in JOBS.items()}
    return {
        name: dict(zip(("seconds", "peak_memory_gb"), zip(*found)))
        for name, found in take_turns(jobs, rounds).items()
    }


def spread(values: list[float]) -> str:
    """Format median and range as two cells of a table."""
    median = statistics.median(values)
    return f"{median:,.0f} | {min(values):,.0f} to {max(values):,.0f}"


def print_row(*cells) -> None:
    """Print a row of a table in Markdown."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_head(*names: str) -> None:
    """Begin a table with the names of its columns."""
    print_row(*names)
    print(f"|{'---|' * len(names)}", flush=True)


def print_group(results: dict) -> None:
    print_head("system", "median", "lowest to highest", "ours is")
    median = {name: statistics.median(x["train"]) for name, x in results.items()}
    ours, *_ = median.values()
    for name, result in results.items():
        cell = "" if name == MATMUL else f"{ours / median[name]:.2f}x"
        print_row(name, spread(result["train"]), cell)
    print()
    if MATMUL in results:
        share = ours * TRAINING_GFLOP / median[MATMUL]
        print(f"ours at {share:.0%} of the matrix product's rate")
    compiling = {name: x["hello"][0]["train_compile"] for name, x in results.items()}
    print("to compile: " + "; ".join(f"{x} {s:.1f} s" for x, s in compiling.items()))


def print_jobs(results: dict) -> None:
    names = "system", "seconds, median", "lowest to highest", "peak memory, GB"
    print_head(*names, "ours is")
    ours, *_ = results.values()
    for name, result in results.items():
        seconds, our_seconds = (statistics.median(x["seconds"]) for x in (result, ours))
        memory, our_memory = (max(x["peak_memory_gb"]) for x in (result, ours))
        times, part = seconds / our_seconds, memory / our_memory
        cell = "" if result is ours else f"{times:.2f}x faster, 1/{part:.2f} memory"
        print_row(name, spread(result["seconds"]), f"{memory:.2f}", cell)


def check_data(commands: list[str]) -> None:
    """Exit with a line if the data of the commands are missing or damaged.

    Transformers read no files, small networks read the concrete set, and others MNIST.
    """
    sys.path.insert(0, str(PEERS))
    import cases

    words = {"cnn": " cnn|guide", "small": " small"}
    for case, found in words.items():
        if re.search(found, "\n".join(commands)):
            cases.LOAD[case]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="whole jobs: 2 at most")
    every, last = range(1, len(GROUPS) + 1), len(GROUPS)
    text = f"some of the groups 1 to {last}; group {last} has whole jobs"
    parser.add_argument("--group", type=int, nargs="+", default=every, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    for number in args.group:
        if number not in every:
            raise SystemExit(f"--group is {number}; expected groups from 1 to {last}")
    groups = [list(GROUPS.items())[number - 1] for number in sorted(set(args.group))]
    check_data([each for _, systems in groups for each in systems.values()])
    processor = platform.processor() or platform.machine()
    machine = f"{processor}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}")
    results = {}
    for title, systems in groups:
        print(f"\n{title}\n", flush=True)
        if systems is JOBS:
            found = measure_jobs(min(2, args.rounds))
            print_jobs(found)
        else:
            found = measure({x: [y] for x, y in systems.items()}, args.rounds)
            print_group(found)
        results[title] = found
    if args.json:
        installed = {x.name: x.version for x in importlib.metadata.distributions()}
        report = {"machine": machine, "versions": installed, "groups": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
