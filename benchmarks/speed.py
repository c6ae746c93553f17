"""Compare training throughput with other systems, in one run, in turn.

    python -m pip install '.[bench]'
    MNIST_DIR=... UCI_DIR=... python benchmarks/speed.py --json speed.json

Every system is its own process (benchmarks/peers), which warms up and then waits.  The
systems of a group take turns at rounds of a fixed number of steps.  Every round draws a
new order, since a system may leave the machine slower for the next one.  A figure is
the median over the rounds, in member-images trained per second, or in member-rows if
the data are rows.  In one group a round is a whole job, from the start of its process
to its end, in seconds.  The last group, for an accelerator, runs only if it is named:

    MNIST_DIR=... python benchmarks/speed.py --group 8 --platform cuda
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

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
        "pjax_ensemble, epoch": "ours.py --members 2 --steps 120",
        "pjax_ensemble, update with prefetch": "ours.py --members 2 --host --steps 120",
        "the same, predict_members": "ours.py --members 2 --predict --steps 80",
        "Flax ensembling guide": "flax_guide.py",
        "PyTorch, a loop": "torch_cnn.py --loop",
        "Equinox, filter_vmap": "equinox_vmap.py --members 2 --steps 10",
        MATMUL: "matmul.py",
    },
    "CNN, K = 8, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 8 --steps 30",
        "pjax_ensemble, K = 2": "ours.py --members 2 --steps 120",
        "pjax_ensemble, 2 at once": "ours.py --members 8 --at-once 2 --steps 8",
        "pjax_ensemble, 4 at once": "ours.py --members 8 --at-once 4 --steps 8",
        "JAX, jit(vmap(scan)), D = 1": "cnn_jax.py --steps 4",
        "JAX, pmap(vmap(scan)), D = 2": "cnn_jax.py --devices 2 --steps 4",
        "torch.func.vmap": "torch_cnn.py --members 8 --steps 4",
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
        "pjax_ensemble, D = 2, 10 at once": "small_ours.py --at-once 10",
        "pjax_ensemble, 1 at once": "small_ours.py",
        "pjax_ensemble, 2 at once": "small_ours.py --at-once 2",
        "pjax_ensemble, 5 at once": "small_ours.py --at-once 5",
        "pjax_ensemble, 25 at once": "small_ours.py --at-once 25",
        "pjax_ensemble, 50 at once": "small_ours.py --at-once 50",
        "JAX, jit(vmap(scan)), D = 1": "small_jax.py",
        "JAX, pmap(vmap(scan)), D = 2": "small_jax.py --devices 2",
        "JAX, pmap(map(scan)), D = 2": "small_jax.py --devices 2 --at-once 1",
        "JAX, the same, 10 at once": "small_jax.py --devices 2 --at-once 10",
        "torch.func.vmap": "small_torch.py",
        "PyTorch, a loop, init and 72 steps": "small_torch.py --loop --steps 72",
        **{
            f"pjax_ensemble, K = 1000, {n} at once, init and 36 steps": (
                f"small_ours.py --members 1000 --at-once {n} --steps 36"
            )
            for n in (1, 10, 50, 500)
        },
    },
    "small transformers, K = 8, batch 32 of 32 tokens; rows": {
        "pjax_ensemble, D = 2, 1 at once": "transformer_ours.py",
        "pjax_ensemble, 2 at once": "transformer_ours.py --at-once 2",
        "pjax_ensemble, 4 at once": "transformer_ours.py --at-once 4",
        "JAX, jit(vmap(scan)), D = 1": "transformer_jax.py",
        "JAX, pmap(vmap(scan)), D = 2": "transformer_jax.py --devices 2",
        "torch.func.vmap": "transformer_torch.py",
    },
    "whole job, two epochs with their tests, K = 2, batch 128": JOBS,
    "CNN on one device, batch 128": {
        f"pjax_ensemble, K = {members}, {n} at once": (
            f"ours.py --devices 1 --members {members} --at-once {n} --steps 256"
        )
        for members in (8, 32)
        for n in (1, 2, 4, 8)
    },
}


def launch(command: str, python: str = sys.executable, **pipes) -> subprocess.Popen:
    """Start a peer's script, and send its errors to a file that `fail` reads."""
    script, *options = shlex.split(command)
    path = (PEERS / script).resolve()
    errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
    command = [python, path, *options]
    process = subprocess.Popen(command, stderr=errors, text=True, **pipes)
    process.stderr = errors
    return process


def fail(process: subprocess.Popen, name: str) -> NoReturn:
    """Exit with the status and the last words of a process that ended early."""
    process.stderr.seek(0)
    lines = process.stderr.read().decode(errors="replace").split("\n")
    words = next(filter(str.strip, reversed(lines)), "it said nothing")
    raise SystemExit(f"{name} ended with status {process.wait()}: {words}")


def start(name: str, command: str) -> tuple[subprocess.Popen, dict]:
    """Start a peer; return it and its message after warming up."""
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
    """Run rounds in turn; return rates, peak memory and versions per system."""
    peers = {name: start(name, command) for name, command in systems.items()}
    rates = {name: [] for name in peers}
    for number in range(rounds):
        turns = random.Random(number).sample(list(peers.items()), len(peers))
        for name, (peer, hello) in turns:
            with contextlib.suppress(BrokenPipeError):  # it ended, as `answer` reports
                peer.stdin.write("round\n")
                peer.stdin.flush()
            said = answer(peer, name)
            steps = said["steps"]
            rates[name].append(steps * hello["images_per_step"] / said["seconds"])
    results = {}
    for name, (peer, hello) in peers.items():
        peer.stdin.close()
        memory = finish(peer)
        results[name] = {"rates": rates[name], "peak_memory_gb": memory, **hello}
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


def measure_jobs(rounds: int) -> dict:
    """Run whole jobs in turn; return seconds and peak memory per system."""
    results = {name: {"seconds": [], "peak_memory_gb": []} for name in JOBS}
    for _ in range(rounds):
        for name, command in JOBS.items():
            seconds, memory = run_job(name, command)
            results[name]["seconds"].append(seconds)
            results[name]["peak_memory_gb"].append(memory)
    return results


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
    ours = statistics.median(next(iter(results.values()))["rates"])
    for name, result in results.items():
        ratio = ours / statistics.median(result["rates"])
        cell = "" if name == MATMUL else f"{ratio:.2f}x"
        print_row(name, spread(result["rates"]), cell)
    print()
    if MATMUL in results:
        share = ours * TRAINING_GFLOP / statistics.median(results[MATMUL]["rates"])
        print(f"ours at {share:.0%} of the matrix product's rate")
    devices = {result["device"] for result in results.values() if "device" in result}
    print("JAX on: " + ", ".join(devices))
    compiling = (
        f"{name} {result['compile_seconds']:.1f} s"
        for name, result in results.items()
        if "compile_seconds" in result
    )
    print("to compile: " + "; ".join(compiling))


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
    import common
    import small

    if any(command.startswith("small_") for command in commands):
        small.load_concrete()
    if not all(command.startswith(("small_", "transformer_")) for command in commands):
        common.load_mnist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="whole jobs: 2 at most")
    last = len(GROUPS)
    parser.add_argument(
        "--group",
        type=int,
        nargs="+",
        default=range(1, last),
        help=f"some of the groups 1 to {last}; group 7 has whole jobs; group {last} is "
        f"for an accelerator (default: all but group {last})",
    )
    parser.add_argument(
        "--platform", help="JAX's platform: cpu, cuda, ... (default: JAX's choice)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    for number in args.group:
        if not 1 <= number <= last:
            raise SystemExit(f"--group is {number}; expected groups from 1 to {last}")
    groups = [list(GROUPS.items())[number - 1] for number in sorted(set(args.group))]
    check_data([each for _, systems in groups for each in systems.values()])
    if args.platform:
        os.environ["JAX_PLATFORMS"] = args.platform
    # The systems of a group share an accelerator; each takes only the memory it needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
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
            found = measure(systems, args.rounds)
            print_group(found)
        results[title] = found
    if args.json:
        report = {"machine": machine, "groups": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
