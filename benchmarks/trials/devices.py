"""Run the README and the script as on 1, 2, 3, ... cores.

    python benchmarks/trials/devices.py
    python benchmarks/trials/devices.py 3 16

The runs are `COMMANDS`, on a few generated digits, and the README's Python, all blocks
in order as they stand.  Each runs in its own process, which is told of that many cores
and divides its CPU into as many virtual devices.  Each has to end with status 0, and
the README's Python has to print the README's numbers; otherwise the status is 1, after
lines that give the reasons.

The table has one row per machine: the layout of the README's five members; NLL and
accuracy of their ensemble; the lowest and highest NLL of a member; the share of
examples kept, and the wrong share among them; and the largest difference of a weight,
after `STEPS` steps, from the weight on the first machine, relative to the largest
weight of its array.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from speed import print_head, print_row

import mnist_data
import pjax_ensemble as pe

ROOT = Path(__file__).resolve().parents[2]
CORES = 1, 2, 3, 5, 6, 8, 10, 12, 16, 24, 64
COMMANDS = [
    "--members 2 --workdir runs/small",
    "--members 8",
    "--members 3 --network batchnorm",
    "--mode ensemble",
    "--mode sync",
]
# The numbers that the README prints, in order; the sixth NLL is the ensemble's.
PRINTED = ["NLL"] * 6 + ["accuracy", "kept", "wrong"]
STEPS = 5
CHILD = """
import os, runpy, sys
cores = set(range(int(sys.argv[1])))
os.sched_getaffinity, os.cpu_count = lambda pid: cores, lambda: len(cores)
sys.path.insert(0, sys.argv[2])
del sys.argv[:3]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The README's trainer again, for so few steps that rounding errors stay small.
FIRST_STEPS = f"""
first = trainer.init(jax.random.key(0))
first, _ = trainer.epoch(first, (x[:200], y[:200]), order[:{STEPS}])
pe.save("first.safetensors", trainer.gather(first).params)
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language of each block of a page, or "", and the block's code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def read_readme() -> tuple[list[str], np.ndarray]:
    """Return the README's blocks of Python, and the numbers it shows as printed."""
    page = blocks((ROOT / "README.md").read_text("utf-8"))
    code = [lines for language, lines in page if language == "python"]
    return code, numbers("".join(lines for language, lines in page if not language))


def numbers(text: str) -> np.ndarray:
    return np.float64(re.findall(r"-?\d+\.\d+", text))


def run(cores: int, folder: Path, script: Path, *flags: str) -> str:
    """Run a script in `folder`, as on that many cores, and return its output."""
    command = [sys.executable, "-c", CHILD, str(cores), str(ROOT), str(script), *flags]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)
    if done.returncode:
        lines = done.stderr.splitlines() or ["nothing"]
        what = " ".join([script.name, *flags])
        status = done.returncode
        raise RuntimeError(f"{what} ended with status {status}, after {lines[-1]}")
    return done.stdout


def first_steps(cores: int, folder: Path, code: list[str]) -> tuple[str, dict]:
    """Run blocks of the README; return their output, and the weights by name."""
    (folder / "readme.py").write_text("\n".join([*code, FIRST_STEPS]), "utf-8")
    printed = run(cores, folder, folder / "readme.py")
    return printed, pe.load(folder / "first.safetensors")


def difference(weights: dict, others: dict) -> float:
    """Return the largest difference, relative to the largest number of its array."""
    pairs = [(weights[name], others[name]) for name in others]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def complaints(printed: np.ndarray, said: np.ndarray) -> list[str]:
    """Name the printed numbers that differ from the numbers in the README."""
    if not len(printed) == len(said) == len(PRINTED):
        return [f"the README's code prints {len(printed)} numbers, not {len(said)}"]
    return [
        f"{name} is {a}; the README says {b}"
        for name, a, b in zip(PRINTED, printed, said)
        if a != b
    ]


def seeded(code: str, seed: int) -> str:
    """Return code with another seed for its keys and its generators."""
    return re.sub(r"(key|default_rng)\(0\)", rf"\1({seed})", code)


def run_seeded(code: str, seed: int) -> str:
    """Run code with that seed in a process of its own, and return its output."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "seeded.py"
        script.write_text(seeded(code, seed), "utf-8")
        return run(os.cpu_count() or 1, Path(name), script)


def write_data(folder: Path) -> None:
    """Write 512 training and 128 test digits in MNIST's form."""
    arrays = mnist_data.generate_digits(seed=0)[1:]
    for name, array, count in zip(mnist_data.FILES, arrays, (512, 512, 128, 128)):
        array = array[:count].squeeze().astype(np.uint8)
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(header + array.tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cores", type=int, nargs="*", default=CORES, metavar="N")
    args = parser.parse_args()
    (code, said), reference, wrong = read_readme(), {}, []
    columns = "cores", "devices x members", "replicas", "NLL", "a member's", "accuracy"
    print_head(*columns, "kept, wrong", f"difference after {STEPS} steps")
    for cores in args.cores:
        try:
            with tempfile.TemporaryDirectory() as name:
                folder, few = Path(name), ("--epochs", "1", "--data-dir", name)
                write_data(folder)
                for flags in COMMANDS:
                    run(cores, folder, ROOT / "train_mnist.py", *flags.split(), *few)
                printed, weights = first_steps(cores, folder, code)
        except RuntimeError as error:
            wrong.append(f"{cores} cores: {error}")
            continue
        found, reference = numbers(printed), reference or weights
        wrong += [f"{cores} cores: {each}" for each in complaints(found, said)]
        _, devices, shared, replicas = pe.layout(5, cores)
        cells = [cores, f"{devices} x {shared}", replicas, found[5]]
        cells += [f"{found[:5].min()} to {found[:5].max()}"]
        cells += ["{:.2f} | {:.2f}, {:.2f}".format(*found[6:])]
        cells += [f"{difference(weights, reference):.0e}"]
        print_row(*cells)
    print("", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
