"""Measure training throughput beside other systems, in one run, in turn.

    python -m pip install '.[bench]'
    MNIST_DIR=... python benchmarks/speed.py --json speed.json

Every system is a process of its own (benchmarks/peers) that warms up and then waits.
Rounds of a fixed number of steps go around the systems of a group; a figure is the
median over the rounds, in member-images trained per second.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
MATMUL = "rate of a float32 matrix product, GFLOP/s"

# A group's first system is ours; the others are what it is compared with.
GROUPS = {
    "CNN, K = 2, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 2",
        "pjax_ensemble, update": "ours.py --members 2 --host",
        "Flax ensembling guide": "flax_guide.py",
        "PyTorch, a loop": "torch_loop.py --members 2",
        "Equinox, filter_vmap": "equinox_vmap.py --members 2 --steps 10",
        MATMUL: "matmul.py",
    },
    "CNN, K = 8, batch 128": {
        "pjax_ensemble, epoch": "ours.py --members 8 --steps 12",
        "pjax_ensemble, K = 2": "ours.py --members 2",
        "torch.func.vmap": "torch_vmap.py --members 8 --steps 2",
    },
    "batch-norm network, Adam, D = 2, batch 64": {
        "pjax_ensemble, sync": "ours.py --sync --batch 64 --steps 200",
        "Keras guide": "keras_guide.py --batch 64 --steps 200",
    },
    "batch-norm network, Adam, D = 2, batch 256": {
        "pjax_ensemble, sync": "ours.py --sync --batch 256 --steps 50",
        "Keras guide": "keras_guide.py --batch 256 --steps 50",
    },
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


def measure(systems: dict, rounds: int) -> dict:
    """Run rounds in turn; return figures, most first, and versions by system."""
    peers = {name: start(command) for name, command in systems.items()}
    rates = {name: [] for name in peers}
    for _ in range(rounds):
        for name, (peer, hello) in peers.items():
            peer.stdin.write("round\n")
            peer.stdin.flush()
            said = answer(peer, name)
            steps = said["steps"]
            rates[name].append(steps * hello["images_per_step"] / said["seconds"])
    for peer, _ in peers.values():
        peer.stdin.close()
        peer.wait()
    return {
        name: {"rates": rates[name], "versions": peers[name][1]["versions"]}
        for name in peers
    }


def print_group(title: str, results: dict) -> None:
    print(f"\n{title}\n\n| system | median | lowest to highest | ours is |")
    print("|---|---|---|---|")
    ours = statistics.median(next(iter(results.values()))["rates"])
    for name, result in results.items():
        median = statistics.median(result["rates"])
        low, high = min(result["rates"]), max(result["rates"])
        ratio = "" if name == MATMUL else f"{ours / median:.2f}x"
        print(f"| {name} | {median:,.0f} | {low:,.0f} to {high:,.0f} | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds, for a look")
    parser.add_argument("--group", type=int, nargs="+", help="groups, from 1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}")
    results = {}
    for number, (title, systems) in enumerate(GROUPS.items(), 1):
        if args.group and number not in args.group:
            continue
        results[title] = measure(systems, 2 if args.quick else args.rounds)
        print_group(title, results[title])
        sys.stdout.flush()
    if args.json:
        report = {"machine": machine, "groups": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
