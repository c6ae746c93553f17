"""Measure training throughput beside other systems, in one run, in turn.

    python -m pip install '.[bench]'
    MNIST_DIR=... UCI_DIR=... python benchmarks/speed.py --json speed.json

Every system is a process of its own (benchmarks/peers) that warms up and then waits.
Rounds of a fixed number of steps go around the systems of a group; a figure is the
median over the rounds, in member-images trained per second, or member-rows where the
data are rows.  In the last group a round is a whole job, from the start of its process
to its end, in seconds.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

PEERS = Path(__file__).resolve().parent / "peers"
MATMUL = "rate of a float32 matrix product, GFLOP/s"
TRAINING_GFLOP = 0.0274  # of the CNN, an image

# A group's first system is ours; the others are what it is compared with.
GROUPS = {
    "CNN, K = 2, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 2 --steps 120",
        "pjax_ensemble, update with prefetch": "ours.py --members 2 --host --steps 120",
        "the same, predict_members": "ours.py --members 2 --predict --steps 80",
        "Flax ensembling guide": "flax_guide.py",
        "PyTorch, a loop": "torch_loop.py --members 2",
        "Equinox, filter_vmap": "equinox_vmap.py --members 2 --steps 10",
        MATMUL: "matmul.py",
    },
    "CNN, K = 8, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 8 --steps 30",
        "pjax_ensemble, K = 2": "ours.py --members 2 --steps 120",
        "torch.func.vmap": "torch_vmap.py --members 8 --steps 4",
    },
    "batch-norm network, Adam, D = 2, batch 64": {
        "pjax_ensemble, sync": "ours.py --sync --batch 64 --steps 400",
        "two members of 32, apart": "ours.py --apart --batch 32 --steps 400",
        "Keras guide": "keras_guide.py --batch 64 --steps 200",
    },
    "batch-norm network, Adam, D = 2, batch 256": {
        "pjax_ensemble, sync": "ours.py --sync --batch 256 --steps 100",
        "two members of 128, apart": "ours.py --apart --batch 128 --steps 100",
        "Keras guide": "keras_guide.py --batch 256 --steps 50",
    },
    "a hundred small networks, 8-50-2, Adam, init and 360 steps of batch 100; rows": {
        "pjax_ensemble, epoch, D = 2": "small_ours.py",
        "JAX, jit(vmap(scan)), D = 1": "small_jax.py",
        "JAX, pmap(vmap(scan)), D = 2": "small_jax.py --devices 2",
        "JAX, pmap(map(scan)), D = 2": "small_jax.py --devices 2 --map",
        "torch.func.vmap": "small_torch.py",
        "PyTorch, a loop, init and 72 steps": "small_torch.py --loop --steps 72",
    },
}
JOBS_TITLE = "whole job, two epochs with their tests, K = 2, batch 128"
JOBS = {
    "pjax_ensemble, train_mnist.py": (
        "../../train_mnist.py --data mnist --members 2 --devices 2 --epochs 2 "
        "--batch-size 128 --learning-rate 0.1 --schedule constant --max-shift 0"
    ),
    "Flax ensembling guide": "flax_guide.py --whole-job",
}


def launch(command: str, **pipes) -> subprocess.Popen:
    """Start a script of a peer, its errors into a file that `fail` reads."""
    script, *options = command.split()
    path = (PEERS / script).resolve()
    errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as the process does
    process = subprocess.Popen(
        [sys.executable, path, *options], stderr=errors, text=True, **pipes
    )
    process.stderr = errors
    return process


def fail(process: subprocess.Popen, name: str) -> NoReturn:
    """Exit with the status of a process that ended early, and its last words."""
    process.stderr.seek(0)
    lines = process.stderr.read().decode(errors="replace").split("\n")
    words = next(filter(str.strip, reversed(lines)), "it said nothing")
    raise SystemExit(f"{name} ended with status {process.wait()}: {words}")


def start(name: str, command: str) -> tuple[subprocess.Popen, dict]:
    """Start a peer; return it and what it says once it is warm."""
    peer = launch(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return peer, answer(peer, name)


def answer(peer: subprocess.Popen, name: str) -> dict:
    for line in peer.stdout:
        if line.startswith("{"):
            return json.loads(line)
    fail(peer, name)


def finish(process: subprocess.Popen) -> float:
    """Wait for a process to end; return its peak resident memory in GB."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit / 1e9


def measure(systems: dict, rounds: int) -> dict:
    """Run rounds in turn; return rates, peak memory and versions by system."""
    peers = {name: start(name, command) for name, command in systems.items()}
    rates = {name: [] for name in peers}
    for _ in range(rounds):
        for name, (peer, hello) in peers.items():
            with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says so
                peer.stdin.write("round\n")
                peer.stdin.flush()
            said = answer(peer, name)
            steps = said["steps"]
            rates[name].append(steps * hello["images_per_step"] / said["seconds"])
    results = {}
    for name, (peer, hello) in peers.items():
        peer.stdin.close()
        results[name] = {"rates": rates[name], "peak_memory_gb": finish(peer)}
        results[name]["versions"] = hello["versions"]
        if "compile_seconds" in hello:
            results[name]["compile_seconds"] = hello["compile_seconds"]
    return results


def run_job(name: str, command: str) -> tuple[float, float]:
    """Run a command to its end; return its seconds and its peak memory in GB."""
    started = time.perf_counter()
    job = launch(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    memory = finish(job)
    seconds = time.perf_counter() - started
    if job.returncode:
        fail(job, name)
    return seconds, memory


def measure_jobs(jobs: dict, rounds: int) -> dict:
    """Run whole jobs in turn; return seconds and peak memory by system."""
    results = {name: {"seconds": [], "peak_memory_gb": []} for name in jobs}
    for _ in range(rounds):
        for name, command in jobs.items():
            seconds, memory = run_job(name, command)
            results[name]["seconds"].append(seconds)
            results[name]["peak_memory_gb"].append(memory)
    return results


def spread(values: list[float]) -> str:
    """Format median and range as two cells of a table."""
    median = statistics.median(values)
    return f"{median:,.0f} | {min(values):,.0f} to {max(values):,.0f}"


def print_group(title: str, results: dict) -> None:
    print(f"\n{title}\n\n| system | median | lowest to highest | ours is |")
    print("|---|---|---|---|")
    ours = statistics.median(next(iter(results.values()))["rates"])
    for name, result in results.items():
        ratio = ours / statistics.median(result["rates"])
        cell = "" if name == MATMUL else f"{ratio:.2f}x"
        print(f"| {name} | {spread(result['rates'])} | {cell} |")
    print()
    if MATMUL in results:
        share = ours * TRAINING_GFLOP / statistics.median(results[MATMUL]["rates"])
        print(f"ours at {share:.0%} of the matrix product's rate")
    compiling = (
        f"{name} {result['compile_seconds']:.1f} s"
        for name, result in results.items()
        if "compile_seconds" in result
    )
    print("to compile: " + "; ".join(compiling))


def print_jobs(title: str, results: dict) -> None:
    print(f"\n{title}\n\n| system | seconds, median | lowest to highest ", end="")
    print("| peak memory, GB | ours is |\n|---|---|---|---|---|")
    figures = {
        name: (statistics.median(result["seconds"]), max(result["peak_memory_gb"]))
        for name, result in results.items()
    }
    our_seconds, our_memory = next(iter(figures.values()))
    for name, (seconds, memory) in figures.items():
        faster, less = seconds / our_seconds, memory / our_memory
        cell = f"{faster:.2f}x faster, 1/{less:.2f} memory"
        print(f"| {name} | {spread(results[name]['seconds'])} | {memory:.2f} ", end="")
        print(f"| {cell if name != next(iter(figures)) else ''} |")


def check_data(commands: list[str]) -> None:
    """Exit with a line if what the commands read is missing or damaged."""
    sys.path.insert(0, str(PEERS))
    import common
    import small

    of_rows = [command.startswith("small_") for command in commands]
    if any(of_rows):
        small.load_concrete()
    if not all(of_rows):
        common.load_mnist()


def describe_machine() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def write_json(path: Path, **report) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--job-rounds", type=int, default=2, help="of whole jobs")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, one of whole jobs, for a look"
    )
    last = len(GROUPS) + 1
    parser.add_argument(
        "--group",
        type=int,
        nargs="+",
        default=range(1, last + 1),
        help=f"some of the groups 1 to {last}, of which the last are whole jobs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    for number in args.group:
        if not 1 <= number <= last:
            raise SystemExit(f"--group {number}: there are groups 1 to {last}")
    groups = dict(enumerate([*GROUPS.values(), JOBS], 1))
    check_data([each for number in args.group for each in groups[number].values()])
    machine = describe_machine()
    print(f"{machine}, Python {platform.python_version()}")
    results = {}
    for number, (title, systems) in enumerate(GROUPS.items(), 1):
        if number not in args.group:
            continue
        results[title] = measure(systems, 2 if args.quick else args.rounds)
        print_group(title, results[title])
        sys.stdout.flush()
    if last in args.group:
        rounds = 1 if args.quick else args.job_rounds
        results[JOBS_TITLE] = measure_jobs(JOBS, rounds)
        print_jobs(JOBS_TITLE, results[JOBS_TITLE])
    if args.json:
        write_json(args.json, machine=machine, groups=results)


if __name__ == "__main__":
    main()
