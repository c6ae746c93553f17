"""Measure how the cost grows with members K and devices D, on CPUs.

    MNIST_DIR=... python benchmarks/cost.py --json cost.json --plot cost.png

Trains the CNN in batches of 128 in every layout of K members on D devices, and predicts
with it; K = 1 is sync mode.  Both are processes of their own (peers/ours.py); rounds of
as many member-images go around all of them, as in speed.py.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import sys
from pathlib import Path

import speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe

BATCH = 128
COLORS = "#0072b2", "#d55e00", "#009e73"


def make_layouts(members: list[int], devices: list[int]) -> list[tuple[int, int]]:
    """Return every (K, D) whose replicas can share a batch."""
    pairs = [(k, d) for k in members for d in devices]
    return [(k, d) for k, d in pairs if BATCH % pe.layout(k, d).replicas == 0]


def measure(layouts: list[tuple[int, int]], rounds: int) -> list[dict]:
    """Run rounds of every layout in turn; return a row each."""
    commands = {
        (k, d, flag): f"ours.py --members {k} --devices {d} --batch {BATCH} "
        f"--steps {max(4, 96 // k)} {flag}"
        for k, d in layouts
        for flag in ("", "--predict")
    }
    found, rows = speed.measure(commands, rounds), []
    for k, d in layouts:
        spread, result = pe.layout(k, d), found[k, d, ""]
        places = {
            "members": k,
            "devices": d,
            "members_per_device": spread.members_per_device,
            "replicas": spread.replicas,
        }
        predicted = found[k, d, "--predict"]["rates"]
        rows.append({**places, **result, "predicted": predicted})
    return rows


def print_rows(rows: list[dict]) -> None:
    print("| K | D | members a device | replicas | trained a second ", end="")
    print("| lowest to highest | peak memory, GB | predicted a second | is |")
    print(f"|{'---|' * 9}")
    for row in rows:
        print("| {members} | {devices} | {members_per_device} ".format(**row), end="")
        print("| {replicas} | ".format(**row) + speed.spread(row["rates"]), end="")
        predicted, trained = (statistics.median(row[x]) for x in ("predicted", "rates"))
        print(f" | {row['peak_memory_gb']:.2f} | {predicted:,.0f} ", end="")
        print(f"| {predicted / trained:.2f}x |")


def plot(rows: list[dict], path: Path) -> None:
    """Draw throughput and peak memory over K, a line for each D."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    ticks = sorted({row["members"] for row in rows})
    for number, d in enumerate(sorted({row["devices"] for row in rows})):
        line = [row for row in rows if row["devices"] == d]
        style = {
            "color": COLORS[number % 3],
            "marker": "os^"[number % 3],
            "label": f"{d} device" + "s" * (d > 1),
        }
        members = [row["members"] for row in line]
        rates = [statistics.median(row["rates"]) for row in line]
        memory = [row["peak_memory_gb"] for row in line]
        panels[0].plot(members, rates, **style)
        panels[1].plot(members, memory, **style)
    titles = "Member-images trained a second", "Peak resident memory, GB"
    for panel, title in zip(panels, titles):
        panel.set_title(title)
        panel.set_xlabel("members K")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(k) for k in ticks])
        panel.minorticks_off()
        panel.set_ylim(0, 1.1 * max(max(line.get_ydata()) for line in panel.lines))
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=sorted({1, min(2, cores), cores}),
        help="default: 1, 2 and one a core",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds, for a look")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    args = parser.parse_args()
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: python -m pip install '.[plot]'")
    machine = speed.describe_machine()
    print(f"{machine}, Python {platform.python_version()}\n", flush=True)
    layouts = make_layouts(args.members, args.devices)
    rows = measure(layouts, 2 if args.quick else args.rounds)
    print_rows(rows)
    if args.json:
        speed.write_json(args.json, machine=machine, layouts=rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
