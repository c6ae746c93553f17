"""Tell where the seconds of a run of train_mnist.py go, from its start to its exit.

    MNIST_DIR=... python benchmarks/seconds.py
    python benchmarks/seconds.py -- --data generated --epochs 1

Without flags it runs our whole job of speed.py, and then train_mnist.py's default
one. A run is a process of its own in which the functions below are timed; each moment
counts for the innermost of them, so that the parts add up to the whole. What JAX
reports (``jax.monitoring``) of the making of a program, traced and then compiled by
XLA, counts for the part that needs the program, and is shown beside what else that
part does.
"""

import collections
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST_LINE = time.time()

# What is timed: of train_mnist and its `Run`, and of the trainer, which is waited for.
FUNCTIONS = {
    "reading data": "load_data",
    "hashing data": "describe",
    "training": "Run.advance",
    "predicting": "Run.predict",
    "scoring": "report_finite",
    "saving": "Run.save",
    "drawing": "draw_report",
}
METHODS = {"placing data": "place", "init": "init"}
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",
    "/jax/core/compile/backend_compile_duration": "XLA",
}


def run_inside(report: Path, flags: list[str]) -> int:
    """Run train_mnist.py in this process, and write its spans of time to `report`."""
    sys.path.insert(0, str(ROOT))
    import jax

    import train_mnist

    spans = [(FIRST_LINE, time.time(), "imports")]

    def timed(part, function, wait=lambda result: result):
        def call(*args, **kwargs):
            started = time.time()
            try:
                return wait(function(*args, **kwargs))
            finally:
                spans.append((started, time.time(), part))

        return call

    def make_trainer(*args, make=train_mnist.make_trainer):
        trainer = make(*args)
        wait = jax.block_until_ready
        for part, name in METHODS.items():
            vars(trainer)[name] = timed(part, getattr(trainer, name), wait)
        return trainer

    def note(event, seconds, **_):
        if event in EVENTS:
            spans.append((time.time() - seconds, time.time(), EVENTS[event]))

    train_mnist.make_trainer = make_trainer
    for part, name in FUNCTIONS.items():
        owner = train_mnist.Run if name.startswith("Run.") else train_mnist
        name = name.removeprefix("Run.")
        setattr(owner, name, timed(part, getattr(owner, name)))
    jax.monitoring.register_event_duration_secs_listener(note)
    status = train_mnist.main(flags)
    report.write_text(json.dumps([*spans, (FIRST_LINE, time.time(), "rest")]))
    return status


def add_up(spans: list) -> dict:
    """Return {part: {kind: seconds}}; each moment counts for the innermost span.

    A span (start, end, name) is a part's, or of a kind, "tracing" or "XLA", which
    counts for the part around it; what else a part does is of the kind "running".
    """
    found = collections.defaultdict(collections.Counter)
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))  # outer before inner
    cuts = sorted({moment for start, end, _ in spans for moment in (start, end)})
    for start, end in itertools.pairwise(cuts):
        around = [name for a, b, name in spans if a <= start and end <= b]
        part = [name for name in around if name not in EVENTS.values()][-1]
        found[part][around[-1] if around[-1] != part else "running"] += end - start
    return found


def measure(flags: list[str]) -> dict:
    """Run train_mnist.py with flags; return `add_up` of its whole process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "spans.json"
        command = [sys.executable, __file__, "--inside", report, *flags]
        started = time.time()
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        ended = time.time()
        if status:
            raise SystemExit(status)  # train_mnist.py has said why
        spans = json.loads(report.read_text())
    _, last, _ = spans[-1]
    first = min(start for start, _, _ in spans)
    spans += [(started, first, "start of Python"), (last, ended, "exit of Python")]
    return add_up(spans)


def print_table(flags: list[str], found: dict) -> None:
    kinds = ["running", "tracing", "XLA"]
    total = {kind: sum(part[kind] for part in found.values()) for kind in kinds}
    whole = sum(total.values())
    print(f"\ntrain_mnist.py {shlex.join(flags)}\n")
    print(
        f"| part | seconds | share | {' | '.join(kinds)} |\n|---|---|---|---|---|---|"
    )
    for name, part in [*found.items(), ("whole", total)]:
        seconds = sum(part.values())
        cells = [f"{seconds:.2f}", f"{seconds / whole:.1%}"]
        cells += [f"{part[kind]:.2f}" if part[kind] else "" for kind in kinds]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    flags = sys.argv[1:]
    if flags[:1] == ["--inside"]:
        sys.exit(run_inside(Path(flags[1]), flags[2:]))
    from speed import JOBS

    ours = next(iter(JOBS.values())).split()[1:]
    jobs = [flags[flags[0] == "--" :]] if flags else [ours, []]
    for job in jobs:
        print_table(job, measure(job))


if __name__ == "__main__":
    main()
