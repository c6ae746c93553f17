"""Compare networks that people bring, trained by us, by PyTorch and by `jit`, in turn.

    python -m pip install '.[bench]'
    python benchmarks/networks.py [--networks NAME ...] [--rounds 5]
                                  [--torch PYTHON] [--one] [--dtype TYPE]
                                  [--first-calls] [--keep]

Two members train on two cores: ours on two virtual devices, by hand in a `jit` of a
step, member after member, as it is and through `fast_cpu.fast`, and in PyTorch
in one process of two threads or in two processes of one thread each, in PyTorch's
default layout and in channels_last.  The column `sync` has the rates of one model on
both devices; its peer is PyTorch's process of two threads.  Images and labels are
random, since speed does not depend on them.

Each system is a process that waits (peers/networks_jax.py, peers/networks_torch.py).
The systems of a network take turns, in a new order each round, first at training, then
at predicting; a figure is the median of rows per second of all members together.  With
--torch, PyTorch runs in another Python, since the newest JAX may need a newer one.

With --one, like is compared with like: one member on one device of two threads, by
`epoch` and by `update`, by hand, and in PyTorch's process of two threads.  With --dtype
bfloat16, weights and inputs become this type in the loss, and PyTorch has `autocast`;
with --dtype on-request, float32 networks have `jax.default_matmul_precision`, and
`torch.set_float32_matmul_precision`.  With --first-calls, the table has the seconds of
the first calls of one member, which compile.  With --keep, JAX has called
`fast_cpu.keep_memory()`, and PyTorch has the same settings by environment variables.
"""

import argparse
import os
import statistics
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import speed

MEMBERS = 2
SEPARABLE = (64, 1), (128, 2), (128, 1), (256, 1)  # widths and strides
SIGNALS = 32, 48, 64, 96, 128  # widths
VOLUMES = 16, 32, 64
CAUSAL = 1, 2, 4, 8, 16  # dilations
TRANSFORMERS = {  # layers, width, heads, words
    "transformer, 256 wide": (4, 256, 8, 1000),
    "transformer, 128 wide": (2, 128, 4, 256),
}
DENSE = 512, 2048, 2048, 2048, 10  # widths
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


class Shape(NamedTuple):
    inputs: tuple
    batch: int = 128
    labels: tuple = ()  # of an example
    classes: int = 10
    rows: int = 512

    @property
    def spatial(self) -> bool:  # so that PyTorch has a layout `channels_last`
        return len(self.inputs) >= 3 or len(self.labels) >= 2


IMAGES, DIGITS = Shape((32, 32, 3)), Shape((28, 28, 1))
SHAPES = {
    "CNN, our layers": DIGITS,
    "CNN, Flax": DIGITS,
    "batch-norm CNN, our layers": DIGITS,
    "batch-norm CNN, Flax": DIGITS,
    "ResNet-20, our layers": IMAGES,
    "ResNet-20, Flax": IMAGES,
    "ResNet-20, Equinox": IMAGES,
    "WRN-16-2": IMAGES._replace(batch=64),
    "depthwise separable": IMAGES,
    "ConvNeXt": IMAGES._replace(batch=64),
    "U-Net": Shape((32, 32, 3), 64, (32, 32), 2),
    "3-D U-Net": Shape((32, 32, 32, 1), 4, (32, 32, 32), 3, 64),
    "decoder": Shape((64,), 64, (32, 32), 8),
    "signals": Shape((1024, 4)),
    "causal": Shape((512, 4), 32, (512,)),
    "LSTM": Shape((64, 16)),
    "transformer": Shape((32,), 32, (32,), 64),
    "transformer, 256 wide": Shape((128,), 8, (128,), 1000),
    "transformer, 128 wide": Shape((64,), 16, (64,), 256),
    "MLP": Shape((512,), 256),
    "MLP, batch of 32": Shape((512,), 32),
}


def draw(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs, or tokens for a transformer, and labels."""
    rng, shape = np.random.default_rng(0), SHAPES[name]
    x = rng.normal(size=(shape.rows, *shape.inputs)).astype(np.float32)
    if name.startswith("transformer"):
        x = rng.integers(shape.classes, size=x.shape).astype(np.int32)
    y = rng.integers(shape.classes, size=(shape.rows, *shape.labels))
    return x, y.astype(np.int32)


# Of the peers
CASES = {name: {"batch": shape.batch} for name, shape in SHAPES.items()}


def systems(name: str, one: bool = False) -> dict[str, list[str]]:
    """Return the commands of each system's processes."""
    jax, torch = f"networks_jax.py '{name}'", f"networks_torch.py '{name}'"
    if one:
        jax, torch = f"{jax} --one", f"{torch} --one"
    found = {
        "ours": [jax],
        "other": [f"{jax} {'--update' if one else '--sync'}"],
        "by hand": [f"{jax} --by-hand"],
        "by hand, fast": [f"{jax} --by-hand --fast"],
    }
    for layout in ["", ", last"] if SHAPES[name].spatial else [""]:
        command = f"{torch} {'--channels-last' * bool(layout)}"
        found[f"torch{layout}, 1 x 2"] = [command]
        if not one:
            found[f"torch{layout}, 2 x 1"] = [f"{command} --alone"] * 2
    return found


def measure(
    name: str, rounds: int, options: str = "", torch=sys.executable, one: bool = False
) -> dict:
    """Return the rates of each system, its hello, and its peak memory in GB."""
    commands = systems(name, one).items()
    given = {system: [f"{x} {options}" for x in each] for system, each in commands}
    pythons = {system: torch for system in given if "torch" in system}
    return speed.measure(given, rounds, ("train", "predict"), pythons)


def print_network(name: str, results: dict, what: str) -> None:
    """Print a row: ours, by hand, PyTorch's two layouts, ratios to them, and memory."""
    median = {x: statistics.median(found[what]) for x, found in results.items()}
    memory = {x: found["memory"] for x, found in results.items()}
    names = "ours", "by hand", "by hand, fast", "other"
    ours, hand, fast, other = map(median.pop, names)
    peaks = *(memory.pop(x) for x in names[:3]), min(memory.values())
    layouts = {"default": {}, "last": {}}
    for system, value in median.items():
        layouts["last" if "last" in system else "default"][system[-5:]] = value
    cells = []
    for found in layouts.values():
        best = max(found, key=found.get, default=None)
        cells.append(f"{found[best]:,.0f} ({best})" if best else "")
    best, alone = max(median.values()), max(v for k, v in median.items() if "1 x" in k)
    rates = (f"{x:,.0f}" for x in (ours, hand, fast))
    ratios = fast / hand, ours / hand, ours / fast, ours / best
    cells += [f"{x:.2f}" for x in ratios] + [f"{other:,.0f}", f"{other / alone:.2f}"]
    speed.print_row(name, *rates, *cells, "; ".join(f"{x:.2f}" for x in peaks))


def print_first_calls(name: str, options: str) -> None:
    """Print the seconds of first calls, each system's in a process of its own."""
    for system, (command,) in systems(name, one=True).items():
        if "torch" in system or system == "other":
            continue
        command = f"{command} {options} --first-calls"
        peer = speed.launch(command, stdout=subprocess.PIPE)
        seconds = speed.answer(peer, system).values()
        speed.finish(peer)
        speed.print_row(name, system, *(f"{x:.2f}" for x in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "on-request"))
    parser.add_argument("--first-calls", action="store_true")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    os.environ.update(KEPT if args.keep else {})
    for beginning in args.networks:
        if not any(name.startswith(beginning) for name in SHAPES):
            raise SystemExit(f"no network is {beginning!r}; there are {[*SHAPES]}")
    results, chosen = {}, [x for x in SHAPES if x.startswith(tuple(args.networks))]
    options = "" if args.dtype in (None, "float32") else f"--{args.dtype}"
    if args.first_calls:
        heads = "init", "update", "epoch", "predict"
        speed.print_head("first calls, seconds", "", *heads)
        for name in chosen:
            print_first_calls(name, options)
        return
    for name in chosen:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        results[name] = measure(name, args.rounds, options, args.torch, args.one)
    for what in "train", "predict":
        head = "ours", "by hand", "by hand, fast", "PyTorch, default", "channels_last"
        ratios = "fast / by hand", "ours / by hand", "ours / fast", "ours / PyTorch"
        other = "update" if args.one else "sync"
        last = other, f"{other} / PyTorch", "peak GB: ours; by hand; fast; PyTorch"
        speed.print_head(what, *head, *ratios, *last)
        for name, found in results.items():
            print_network(name, found, what)
        print()
    found = speed.measure({speed.MATMUL: ["matmul.py"]}, 3)[speed.MATMUL]["train"]
    print(f"{speed.MATMUL}: {statistics.median(found):.0f}")


if __name__ == "__main__":
    main()
