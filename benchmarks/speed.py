"""Measure training throughput beside other systems, in one run, in turn.

    python -m pip install '.[bench]'
    MNIST_DIR=... python benchmarks/speed.py --json speed.json

Every system is a process of its own (benchmarks/peers) that warms up and then waits.
Rounds of a fixed number of steps go around the systems of a group; a figure is the
median over the rounds, in member-images trained per second.  In the last group a round
is a whole job, from the start of its process to its end, in seconds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
MATMUL = "rate of a float32 matrix product, GFLOP/s"
TRAINING_GFLOP = 0.0274  # of the CNN, an image

# A group's first system is ours; the others are what it is compared with.
GROUPS = {
    "CNN, K = 2, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 2 --steps 120",
        "pjax_ensemble, update with prefetch": "ours.py --members 2 --host --steps 120",
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
        "Keras guide": "keras_guide.py --batch 64 --steps 200",
    },
    "batch-norm network, Adam, D = 2, batch 256": {
        "pjax_ensemble, sync": "ours.py --sync --batch 256 --steps 100",
        "Keras guide": "keras_guide.py --batch 256 --steps 50",
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


def start(command: str) -> tuple[subprocess.Popen, dict]:
    """Start a peer; return it and what it says once it is warm."""
    script, *options = command.split()
    peer = subprocess.Popen(
        [sys.executable, PEERS / script, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return peer, answer(peer, script)


def answer(peer: subprocess.Popen, name: str) -> dict:
    for line in peer.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{name} ended with status {peer.wait()}")


def finish(process: subprocess.Popen) -> float:
    """Wait for a process to end; return its peak resident memory in GB."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit / 1e9


def measure(systems: dict, rounds: int) -> dict:
    """Run rounds in turn; return rates, peak memory and versions by system."""
    peers = {name: start(command) for name, command in systems.items()}
    rates = {name: [] for name in peers}
    for _ in range(rounds):
        for name, (peer, hello) in peers.items():
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
    script, *options = command.split()
    started = time.perf_counter()
    job = subprocess.Popen(
        [sys.executable, (PEERS / script).resolve(), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    memory = finish(job)
    seconds = time.perf_counter() - started
    if job.returncode:
        raise SystemExit(f"{name} ended with status {job.returncode}")
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
    parser.add_argument("--group", type=int, nargs="+", help="groups, from 1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine = describe_machine()
    print(f"{machine}, Python {platform.python_version()}")
    results = {}
    for number, (title, systems) in enumerate(GROUPS.items(), 1):
        if args.group and number not in args.group:
            continue
        results[title] = measure(systems, 2 if args.quick else args.rounds)
        print_group(title, results[title])
        sys.stdout.flush()
    if not args.group or len(GROUPS) + 1 in args.group:
        rounds = 1 if args.quick else args.job_rounds
        results[JOBS_TITLE] = measure_jobs(JOBS, rounds)
        print_jobs(JOBS_TITLE, results[JOBS_TITLE])
    if args.json:
        write_json(args.json, machine=machine, groups=results)


if __name__ == "__main__":
    main()
