"""Time and memory of `ensemble_report` as examples grow, beside NumPy and TorchMetrics.

    python benchmarks/reports.py --rows 1000 10000 50000

Probabilities of five members, float32 [5, N, 1000], are scored by `ensemble_report`; by
NumPy alone, each member and each size in float32, unchecked; and by TorchMetrics in
PyTorch, accuracy and calibration error, with likelihood and Brier score by PyTorch.
The last two leave out the disagreement, and TorchMetrics the entropies.  Each
measurement is a process of its own, in turn; memory is what its peak grows by.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import train_mnist as tm

MEMBERS, BINS = 5, 15


def make(num_rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw probabilities [K, N, C] that favor their labels [N]."""
    draw = np.random.default_rng(0)
    labels = draw.integers(classes, size=num_rows)
    probs = np.empty((MEMBERS, num_rows, classes), np.float32)
    for member in probs:
        draw.standard_normal(out=member, dtype=np.float32)
        member *= 2
        member[np.arange(num_rows), labels] += 3
        np.exp(member, out=member)
        member /= member.sum(axis=-1, keepdims=True)
    return probs, labels


def by_numpy(probs, labels):
    def scores(probs):
        guess, rows = probs.argmax(axis=-1), np.arange(len(labels))
        p_label, confidence = probs[rows, labels], probs[rows, guess]
        brier = np.einsum("nc,nc->n", probs, probs) - 2 * p_label + 1
        bins = np.minimum((BINS * confidence).astype(int), BINS - 1)
        parts = (np.bincount(bins, x, BINS) for x in (confidence, guess == labels))
        gap = np.abs(np.subtract(*parts)).sum() / len(labels)
        return (guess == labels).mean(), -np.log(p_label).mean(), brier.mean(), gap

    def entropy(probs):
        return -np.einsum("nc,nc->n", probs, np.log(probs)).mean()

    total, found = np.zeros_like(probs[0]), []
    for size, member in enumerate(probs, 1):
        total += member
        found += [scores(member), scores(total / np.float32(size)), entropy(member)]
    return *found, entropy(total / np.float32(MEMBERS))


def by_torchmetrics(probs, labels):
    import torch
    from torchmetrics.functional import classification as metrics

    probs, labels = torch.from_numpy(probs), torch.from_numpy(labels)
    classes = probs.shape[-1]

    def scores(probs):
        p_label = probs[torch.arange(len(labels)), labels]
        brier = (probs * probs).sum(dim=-1) - 2 * p_label + 1
        accuracy = metrics.multiclass_accuracy(probs, labels, classes, average="micro")
        gap = metrics.multiclass_calibration_error(probs, labels, classes, n_bins=BINS)
        return accuracy, -p_label.log().mean(), brier.mean(), gap

    sizes = range(1, MEMBERS + 1)
    return [scores(p) for p in probs] + [scores(probs[:k].mean(dim=0)) for k in sizes]


SYSTEMS = {
    "ensemble_report": em.ensemble_report,
    "NumPy": by_numpy,
    "TorchMetrics": by_torchmetrics,
}


def measure(system: str, num_rows: int, classes: int) -> None:
    """Print the seconds and the GiB that scoring takes."""
    data = make(num_rows, classes)
    SYSTEMS[system](*(x[..., :100, :] if x.ndim > 1 else x[:100] for x in data))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    SYSTEMS[system](*data)
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(seconds, grown / 2**20)


def main(argv=None) -> None:
    many = tm.at_least(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=many, default=[1000, 10_000, 50_000])
    parser.add_argument("--classes", type=many, default=1000)
    parser.add_argument("--rounds", type=many, default=3)
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.system:
        return measure(args.system, *args.rows, args.classes)
    speed.print_head("examples", "", "s, median", "GiB", "ensemble_report is")
    for num_rows in args.rows:
        found: dict = {name: [] for name in SYSTEMS}
        for name in args.rounds * [*SYSTEMS]:
            flags = (
                f"--system={name} --rows={num_rows} --classes={args.classes}".split()
            )
            command = [sys.executable, __file__, *flags]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append([float(x) for x in run.stdout.split()])
        ours = statistics.median(seconds for seconds, _ in found["ensemble_report"])
        for name, runs in found.items():
            seconds, grown = map(statistics.median, zip(*runs))
            beside = f"{seconds / ours:.2f}x" if name != "ensemble_report" else ""
            speed.print_row(num_rows, name, f"{seconds:.2f}", f"{grown:.2f}", beside)
    return None


if __name__ == "__main__":
    main()
