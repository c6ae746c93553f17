"""Score ensembles of 1, 2, 4 ... members on MNIST's test images, over several seeds.

    MNIST_DIR=... python benchmarks/quality.py --workdir runs/quality

Member i depends on the seed and on i alone, so for each seed one run of train_mnist.py,
with its defaults and the most members, has in its report the ensembles of the first 1,
2, 4 ...  In --workdir a run that is there is not run again, and one that was stopped
goes on.  A row a size: mean and half the range over the seeds.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parent.parent / "train_mnist.py"
SCORES = {  # of a report: the column, the factor, the digits
    "accuracy": ("accuracy, %", 100, 2),
    "negative_log_likelihood": ("NLL", 1, 4),
    "brier_score": ("Brier", 1, 4),
    "expected_calibration_error": ("ECE", 1, 4),
}


def by_size(folder: Path, members: int, seed: int) -> list[dict]:
    """Return the scores of the first 1, 2 ... members; train them unless done."""
    if not (folder / "report.json").exists():
        resume = ["--resume"] if list(folder.glob("checkpoint_*.safetensors")) else []
        flags = ["--members", members, "--seed", seed, "--workdir", folder, *resume]
        command = [sys.executable, SCRIPT, "--data", "mnist", *flags]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)  # the script has said why
    report = json.loads((folder / "report.json").read_text())
    if (report["members"], report["config"]["seed"]) != (members, seed):
        raise SystemExit(f"quality.py: {folder} is of another run; remove it")
    return report["by_size"]


def cell(values: list[float], digits: int) -> str:
    spread = (max(values) - min(values)) / 2
    return f"{np.mean(values):.{digits}f} ± {spread:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workdir", type=Path, required=True, help="of the runs")
    args = parser.parse_args()
    most = max(args.sizes)
    runs = [
        by_size(args.workdir / f"members-{most}-seed-{seed}", most, seed)
        for seed in args.seeds
    ]
    columns = [name for name, _, _ in SCORES.values()]
    print(f"seeds {args.seeds}")
    print(f"| members | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for size in args.sizes:
        row = [
            cell([factor * run[size - 1][key] for run in runs], digits)
            for key, (_, factor, digits) in SCORES.items()
        ]
        print(f"| {size} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
