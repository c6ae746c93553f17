"""What a run of `train_mnist.py` needs beside its training.

It has the command line's flags, records, a folder that belongs to one run, signals, and
several processes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ensemble_metrics as em
import pjax_ensemble as pe
from mnist_report import print_epoch

try:
    import fcntl
except ImportError:  # on Windows, where a run's folder is not locked
    fcntl = None


# ---------------------------------------------------------------------------------
# Errors and warnings: one line each
# ---------------------------------------------------------------------------------


class Failure(Exception):
    """The end of a run: a message of one line, and an exit status."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def named(cause: Any, *errors: type, status: int = 2) -> Iterator[None]:
    """Turn these errors of a block into a Failure that names their cause."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, KeyError):
            reason += " is missing"
        raise Failure(f"{cause}: {reason}", status) from error


@contextlib.contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Print warnings as lines of the script, but those of members, which it names."""

    def show(message, *place):
        print(f"train_mnist.py: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.filterwarnings("ignore", "members .* are not finite", UserWarning)
        warnings.showwarning = show
        yield


def explain(error: Exception, several: bool) -> Failure:
    """Return the Failure that an error of the system, or of JAX, means.

    Raises other errors, which are faults of this program.
    """
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        text = (
            "out of memory; try fewer --members on more --devices, or a smaller "
            f"--batch-size: {text}"
        )
    elif type(error) is not RuntimeError and not several:
        raise error
    elif isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: ", text):
        # XLA's errors begin with a code, of whatever class they are.
        text = f"lost contact with another process: {text}"
    return Failure(text, status=1)


# ---------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------


MOST = 2**31 - 1  # the largest number that JAX counts to


def checked(kind: Callable, expected: str, holds: Callable) -> Callable:
    """Make a type for argparse: values of `kind` for which `holds` is true."""

    def read(text: str):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")

    return read


def integer(low: int, high: int = MOST) -> Callable:
    return checked(int, f"an integer from {low} to {high}", lambda n: low <= n <= high)


def is_address(text: str) -> bool:
    match = re.fullmatch(r".+:([0-9]{1,5})", text)
    return bool(match) and 0 < int(match[1]) < 65536


address = checked(str, "HOST:PORT, with a port from 1 to 65535", is_address)
nonnegative = checked(float, "a finite number from 0 on", lambda x: 0 <= x < math.inf)
positive = checked(float, "a number above 0, at most 1e38", lambda x: 0 < x <= 1e38)
below_one = checked(float, "a number from 0 on, below 1", lambda x: 0 <= x < 1)

at_least_zero = integer(0)
at_least_one = integer(1)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Parser(argparse.ArgumentParser):
    def __init__(self, help: str, **options: Any):
        super().__init__(**options)
        self.help = help

    def error(self, message):
        raise Failure(message)

    def format_help(self):
        return self.help


class Flag(NamedTuple):
    """A flag of the command line."""

    name: str
    kind: Any  # the type of its value, or the choices; a bool flag takes no value
    says: str  # its help, with the default if that is no plain value
    default: Any = None
    value: str = ""  # as the help shows it
    alone: bool = False  # it may stand without a value, and is then True
    setting: bool = False  # the results depend on it
    local: bool = False  # each of several processes has its own
    added: bool = False  # later than config.json: runs without it had the default

    def text(self) -> str:
        """Return the flag's help."""
        shown = self.value
        if not callable(self.kind):
            shown = f"{{{','.join(self.kind)}}}"
        if self.alone:
            shown = f"[{','.join(self.kind)}]"
        start = f"  {flag(self.name)} {shown}".rstrip()
        says = self.says
        if "(default: " not in says:
            says += f" (default: {self.default})"
        says = says.replace("(default: ", "(default:\N{NO-BREAK SPACE}")
        lines = textwrap.wrap(says, 62, break_on_hyphens=False)
        if len(start) > 24:
            lines.insert(0, "")
        lines[0] = f"{start:26}{lines[0]}".rstrip()
        text = "\n".join([lines[0], *(f"{'':26}{line}" for line in lines[1:])])
        return text.replace("\N{NO-BREAK SPACE}", " ")

    def read(self, value: Any) -> Any:
        """Return the flag's value in config.json, checked as on the command line."""
        text = str(value)
        errors = ValueError, argparse.ArgumentTypeError
        with named(f"argument {flag(self.name)}", *errors):
            if self.kind is bool:
                if isinstance(value, bool):
                    return value
                raise ValueError(f"expected true or false, not {text!r}")
            if callable(self.kind):
                return self.kind(text)
            if text in self.kind:
                return text
            choices = ", ".join(map(repr, self.kind))
            raise ValueError(f"invalid choice: {text!r} (choose from {choices})")


def given_flags(argv: Sequence[str] | None, flags: Iterable[Flag], help: str) -> dict:
    """Return the values of the given flags, by name.  Raises Failure."""
    parser = Parser(help, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for each in flags:
        if each.kind is bool:
            parser.add_argument(flag(each.name), action="store_true")
        elif each.alone:
            options = {"choices": each.kind, "const": True, "nargs": "?"}
            parser.add_argument(flag(each.name), **options)
        elif callable(each.kind):
            parser.add_argument(flag(each.name), type=each.kind)
        else:
            parser.add_argument(flag(each.name), choices=tuple(each.kind))
    return vars(parser.parse_args(argv))


# ---------------------------------------------------------------------------------
# Run: what it prints and writes while it trains
# ---------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """A report on images, and the probabilities that it is computed from."""

    report: dict  # of the members that are finite; the others are None in its `member`
    probs: np.ndarray  # [K, N, C], of all members


class Measured:
    """Losses and times of the steps that this process has taken of an epoch."""

    def __init__(self, members: int):
        self.began = time.perf_counter()
        self.losses = np.empty((members, 0))  # [K, n]
        self.seconds = 0.0  # of training
        self.pace = []  # each segment's seconds per step


class Run:
    """A run: what it prints and writes while `pe.fit` trains its members.

    Only process 0 of several processes has the folder.
    """

    def __init__(self, args, settings, data, trainer, folder: Path | None = None):
        """Start a run, or continue the run in the folder.  Raises Failure."""
        everyone = of_processes(settings._asdict())
        check_same_processes(everyone, everyone[0])
        self.args = args
        self.settings = settings
        self.data = data
        self.trainer = trainer
        self.folder = folder
        self.signals = Signals()
        self.bars = contextlib.ExitStack()  # the progress bar of an epoch
        self.advance_bar = None
        self.segments = 0  # calls of `trainer.epoch` by this process
        self.done = -1  # steps so far; -1 before `pe.fit` has found it out
        self.good = -1  # steps at the last good checkpoint
        self.measured = Measured(settings.members)  # in the epoch so far
        self.evaluation = None  # the last one
        self.metrics = []  # one dict per epoch
        self.failed = set()  # members that are no longer finite
        if folder and args.resume and not checkpoints(folder):
            raise Failure(f"--resume: there is no checkpoint in {folder}")
        if folder:
            flags = {
                "data": args.data,
                "save_every": args.save_every,
                "dataset": data.name,
                "data_dir": str(args.data_dir),
            }
            write_json(folder / "config.json", settings._asdict() | flags, indent=2)

    def train(self) -> Evaluation:
        """Train to the last epoch; save, evaluate and record after each epoch.

        Returns the last epoch's evaluation.  Raises Failure.
        """
        settings = self.settings
        data = self.data

        def order(epoch):
            return pe.epoch_order(
                settings.train_size,
                settings.batch_size,
                members=settings.members,
                seed=settings.seed,
                epoch=epoch,
                bootstrap=settings.bootstrap,
            )

        wrong = (ValueError,) if self.args.resume else ()
        with named("--resume", *wrong), self.bars:
            try:
                fitted = pe.fit(
                    self.trainer,
                    (data.train_images, data.train_labels),
                    key=jax.random.key(settings.seed),
                    epochs=settings.epochs,
                    order=order,
                    folder=self.args.workdir,
                    save_every=self.args.save_every,
                    keep=self.args.keep,
                    on_segment=self.note,
                    on_epoch=self.end_epoch,
                )
            except FloatingPointError as error:
                text = str(error).replace("the learning rate", "--learning-rate")
                raise Failure(text, status=3) from error
        if self.look():
            raise self.stopped()
        evaluation = self.evaluation or self.evaluate(fitted.state)
        if evaluation is None:
            raise self.stopped()
        return evaluation

    def begin(self, step: int) -> None:
        """Note at which step `pe.fit` begins or goes on."""
        settings = self.settings
        self.done = step
        self.good = -1 if self.args.resume and settings.skip_nonfinite else step
        if self.args.resume and self.folder:
            path = self.folder / f"checkpoint_{step:08d}.safetensors"
            print(f"resumed from {path}", flush=True)
            self.metrics = read_metrics(self.folder, step // settings.epoch_steps)
        if self.folder:
            write_json(self.folder / "metrics.jsonl", *self.metrics)
        if step < settings.epochs * settings.epoch_steps:
            print("JAX compiles the training steps, for some seconds", flush=True)

    def note(self, segment: pe.Segment) -> bool:
        """Note the losses and the time of some steps; return whether to stop."""
        if self.done < 0:
            self.begin(segment.step)
            return False
        settings = self.settings
        measured = self.measured
        steps = settings.epoch_steps
        count = segment.losses.shape[1]
        before, self.done = self.done, segment.step
        measured.losses = np.concatenate([measured.losses, segment.losses], axis=1)
        measured.seconds += segment.seconds
        measured.pace.append(segment.seconds / count)
        self.segments += 1
        if self.segments == 5:  # the first one compiles, and the next ones are short
            epoch_seconds = measured.pace[-1] * steps
            print(f"training takes about {epoch_seconds:.0f} s an epoch", flush=True)
        images = settings.members * settings.batch_size  # of a step
        if self.advance_bar is None:
            what = f"epoch {before // steps + 1} of {settings.epochs}"
            bar = progress_bar(what, images * steps, images * (before % steps))
            self.advance_bar = self.bars.enter_context(bar)
        self.advance_bar(images * count)
        saved = self.done % max(1, round(self.args.save_every * steps)) == 0
        if self.args.workdir and saved and np.isfinite(segment.losses[:, -1]).any():
            self.good = self.done
        self.signals.listen()  # not earlier: while JAX compiles, nothing can be lost
        return self.look()

    def look(self) -> bool:
        """Return whether a process has received a signal."""
        return bool(self.signals.agree())

    def stopped(self) -> Failure:
        number = self.signals.agree()  # no process leaves before process 0 has saved
        text = "nothing is saved without --workdir; run it again"
        if self.args.workdir:
            text = f"the run is saved in {self.args.workdir}; --resume continues it"
        return Failure(f"{signal.Signals(number).name}: {text}", 128 + number)

    def diverged(self) -> Failure:
        text = f"no model is finite after step {self.done}; lower --learning-rate"
        if self.args.workdir and self.good >= 0:
            text += f" (the checkpoint of step {self.good} is good)"
        return Failure(text, status=3)

    def end_epoch(self, fitted: pe.Fitted) -> bool:
        """Evaluate after an epoch; return whether to stop."""
        self.bars.close()
        self.advance_bar = None
        self.evaluation = self.evaluate(fitted.state)
        self.measured = Measured(self.settings.members)
        return self.evaluation is None

    def evaluate(self, state: pe.TrainState) -> Evaluation | None:
        """Evaluate on the test images and on half as many training images.

        Returns the evaluation on the test images, or None if a signal has come.
        """
        data = self.data
        half = (len(data.test_images) + 1) // 2
        started = time.perf_counter()
        test = self.score(state, data.test_images, data.test_labels)
        seconds = time.perf_counter() - started
        train = self.score(state, data.train_images[:half], data.train_labels[:half])
        if test is None or train is None:
            return None
        epoch = self.done // self.settings.epoch_steps
        self.name_failed(test.report["member"], epoch)
        if epoch > max((m["epoch"] for m in self.metrics), default=0):  # not recorded
            self.record(epoch, train.report, test.report, seconds)
        return test

    def score(self, state, images: np.ndarray, labels: np.ndarray) -> Evaluation | None:
        """Predict images, and report on the members whose probabilities are finite.

        Returns None if a signal comes between blocks of images.  Raises Failure if no
        member is finite.
        """
        blocks = []
        members = self.settings.members
        with progress_bar("predicting", members * len(images)) as advance_bar:
            for block in self.trainer.predict_blocks(state, images):
                blocks.append(block)
                advance_bar(members * block.shape[1])
                if self.look():
                    return None
        probs = np.concatenate(blocks, axis=1)
        finite = np.isfinite(probs).all(axis=(1, 2))
        if not finite.any():
            raise self.diverged()
        report = em.ensemble_report(probs[finite], labels)
        scores = iter(report["member"])
        report["member"] = [next(scores) if ok else None for ok in finite]
        return Evaluation(report, probs)

    def name_failed(self, members: list, epoch: int) -> None:
        """Print each member that has failed, once, and the number of skipped steps.

        A member without scores has failed.  The losses are those that this process has
        seen: all of the epoch's, unless the run was resumed in the middle of it.
        """
        counts = np.sum(~np.isfinite(self.measured.losses), axis=1)
        for i, count in enumerate(counts):
            if members[i] is None and i not in self.failed:
                self.failed.add(i)
                text = f"notice: member {i} is not finite after epoch {epoch}"
                if count:
                    text += f"; its loss was not finite in {count} of the steps"
                print(text)
            elif self.settings.skip_nonfinite and count:
                print(
                    f"notice: member {i} skipped {count} steps of epoch {epoch} that "
                    "were not finite"
                )

    def record(self, epoch: int, train: dict, test: dict, test_seconds: float) -> None:
        """Write the epoch's metrics, and print its line."""
        nll = "negative_log_likelihood"

        def mean_loss(report):
            return float(np.mean([m[nll] for m in report["member"] if m]))

        settings = self.settings
        seconds = self.measured.seconds
        num_images = self.measured.losses.size * settings.batch_size
        metrics = {
            "epoch": epoch,
            "train_loss": mean_loss(train),
            "train_accuracy": train["ensemble"]["accuracy"],
            "test_loss": mean_loss(test),
            "test_accuracy": test["ensemble"]["accuracy"],
            "ensemble_test_loss": test["ensemble"][nll],
            "member_test_loss": [m and m[nll] for m in test["member"]],
            "member_test_accuracy": [m and m["accuracy"] for m in test["member"]],
            "train_seconds": seconds,
            "test_seconds": test_seconds,
            "member_images_per_second": num_images / seconds if seconds else None,
        }
        self.metrics.append(metrics)
        took = time.perf_counter() - self.measured.began
        left = None
        if self.measured.pace:
            # The median excludes a slow first segment, which JAX compiles.
            training = settings.epoch_steps * np.median(self.measured.pace)
            left = (settings.epochs - epoch) * (training + took - seconds)
        print_epoch(metrics, took, left)
        if self.folder:
            write_json(self.folder / "metrics.jsonl", *self.metrics)


@contextlib.contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable]:
    """Draw a loop's progress, on a terminal if tqdm is installed.

    Yields a function that advances the bar by a count of images.  An image counts once
    per member that trains on it or predicts it.
    """
    terminal = all(f is not None and f.isatty() for f in (sys.stdout, sys.stderr))
    if not (terminal and importlib.util.find_spec("tqdm")):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(
        desc=what,
        total=total,
        initial=done,
        leave=False,
        unit=" images",
        unit_scale=True,
        dynamic_ncols=True,
    ) as bar:
        yield bar.update


# ---------------------------------------------------------------------------------
# Folder of a run: metrics, report, checkpoints
# ---------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run's folder, and lock it for this process.  Raises Failure, OSError.

    The system releases the lock when the process ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    lock = os.open(folder / ".lock", flags, 0o644)
    with os.fdopen(lock, "r+", errors="replace") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(
                f"--workdir {folder} is in use by process {file.read(100).strip()}; "
                "wait for it, or choose another folder"
            ) from None
        file.truncate(0)
        print(os.getpid(), "on", socket.gethostname(), file=file, flush=True)
        yield


def clear(folder: Path, resume: bool) -> None:
    """Remove half-written files of a dead process; refuse earlier results."""
    half = re.compile(r"\.(checkpoint_\d+|config|metrics|report)\.\w+\.\w+\.tmp")
    for name in filter(half.fullmatch, os.listdir(folder)):
        os.unlink(folder / name)
    results = [folder / "report.json", folder / "metrics.jsonl"]
    found = [path for path in results if path.exists() and path.stat().st_size]
    found += [checkpoint.path for checkpoint in checkpoints(folder)]
    if found and not resume:
        raise Failure(
            f"--workdir {folder} holds {found[0].name} of an earlier run; continue "
            "that run (--resume), choose another folder, or remove it"
        )


def write_json(path: Path, *values: dict, indent: int | None = None) -> None:
    """Write a file of JSON, one value after another."""
    texts = [json.dumps(x, indent=indent, allow_nan=False) + "\n" for x in values]
    with pe.replace_file(path) as file:
        file.write("".join(texts).encode())


@contextlib.contextmanager
def read_json(path: Path) -> Iterator[dict]:
    """Yield a JSON file's object; errors in the block become a Failure naming it."""
    with named(path, OSError, ValueError, TypeError, KeyError, RecursionError, Failure):
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("the file does not hold a JSON object, {...}")
        yield found


class Checkpoint(NamedTuple):
    step: int
    path: Path


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the files named as checkpoints, newest first."""
    name = re.compile(r"checkpoint_(\d{8,18})\.safetensors")
    matches = map(name.fullmatch, os.listdir(folder))
    found = [Checkpoint(int(m[1]), folder / m[0]) for m in matches if m]
    return sorted(found, reverse=True)


def load_members(path: Path, step: int, like, settings: Any) -> pe.TrainState:
    """Load the checkpoint of a step.  Raises ValueError, OSError.

    The members' optimizers have counted exactly `step` steps, or fewer if the run
    skips steps, which they do not count.
    """
    state = pe.load(path, like)
    counted = state.opt_state.num_steps  # [K]
    wrong = counted > step if settings.skip_nonfinite else counted != step
    if wrong.any():
        raise ValueError(f"{path}: holds step {counted[wrong][0]}, not step {step}")
    return state


# The fields of a line of metrics.jsonl.  A field that is added has a value for lines
# without it, in `read_metrics`.
METRICS = {
    "epoch",
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "ensemble_test_loss",
    "member_test_loss",
    "member_test_accuracy",
    "train_seconds",
    "test_seconds",
    "member_images_per_second",
}


def check_known(path: Path, found: dict, known: Collection[str]) -> None:
    """Raise Failure for a field of a file that this version does not know."""
    for name in found:
        if name not in known:
            raise Failure(
                f"{path} has {name!r}, which pjax_ensemble {pe.__version__} does not "
                "know; take the version that wrote it, or a newer one"
            )


def read_metrics(folder: Path, epochs: int) -> list[dict]:
    """Return the lines of epochs up to `epochs`; warn of each damaged line.

    Raises Failure for a line with a field that this version does not know.
    """
    path = folder / "metrics.jsonl"
    metrics = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            check_known(path, found, METRICS)
            if found["epoch"] <= epochs:
                metrics.append(found)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            print(
                f"train_mnist.py: warning: {path}, line {number}: {error}",
                file=sys.stderr,
            )
    return metrics


# ---------------------------------------------------------------------------------
# Processes, and the signals that they receive
# ---------------------------------------------------------------------------------


class Signals:
    """SIGTERM and SIGINT, as requests that training and evaluation look for.

    They are requests between `listen` and `close`.  Otherwise, while there is nothing
    to save, they end the process at once.  A second SIGINT always does.  A signal that
    the process was started to ignore is ignored throughout.
    """

    def __init__(self):
        self.received = 0  # the number of the last signal
        self.replaced = {}  # handlers, while it listens

    def listen(self) -> None:
        if self.replaced or threading.current_thread() is not threading.main_thread():
            return
        for number in signal.SIGINT, signal.SIGTERM:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.replaced[number] = signal.signal(number, self.note)

    def note(self, number: int, frame: Any) -> None:
        self.received = number
        if signal.SIGINT in self.replaced:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def close(self) -> None:
        while self.replaced:
            signal.signal(*self.replaced.popitem())

    def agree(self) -> int:
        """Return the signal that any process has received, or 0."""
        return int(pe.gather_processes(np.int32(self.received)).max())


def notice_of_tasks() -> None:
    """Print a notice where a launcher has started several separate runs."""
    for name in "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE":
        count = os.environ.get(name, "1")
        if count != "1":
            print(
                f"notice: {name} is {count}: each of these tasks trains all members by "
                "itself; --distributed makes them one run"
            )


def is_elsewhere(host: str) -> bool:
    """Return whether a host is another machine, or raise Failure if it is unknown."""
    with named(f"{host} has no address here, see /etc/hosts", OSError):
        family, kind, *_, address = socket.getaddrinfo(host, 0)[0]
    try:
        with socket.socket(family, kind) as own:
            own.bind(address)
    except OSError:
        return True
    return False


def check_own_name(machines: bool) -> None:
    """Raise Failure if this machine has no address, or none for other machines.

    Gloo, by which CPUs exchange arrays, tells them the address of the machine's name.
    """
    name = socket.gethostname()
    with named(f"this machine's name, {name}, has no address, see /etc/hosts", OSError):
        own = socket.gethostbyname(name)
    if machines and own.startswith("127."):
        raise Failure(
            f"this machine's name, {name}, is {own}, where no other machine finds it; "
            "give it its address in the network, in /etc/hosts"
        )


class Meeting(NamedTuple):
    """Where and how the processes of a run meet."""

    where: str  # as errors name it
    port: str | None  # of process 0, if it is known
    first: bool  # whether this is process 0, if it is known
    machines: bool  # whether it is known that there are several


def meeting(args: argparse.Namespace) -> Meeting:
    """Return where processes meet, by the flags or by a launcher's variables.

    Raises Failure for a coordinator without an address.
    """
    if args.coordinator:
        host, _, port = args.coordinator.rpartition(":")
        where = f"--coordinator {args.coordinator}"
        machines = is_elsewhere(host.strip("[]"))
        return Meeting(where, port, args.process_id == 0, machines)
    environ = os.environ
    if "SLURM_STEP_ID" in environ:
        # JAX takes the port from the job's number alone; the job's steps would meet.
        step = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
        port = 61440 + zlib.crc32(step.encode()) % 4096
        environ.setdefault("JAX_COORDINATOR_PORT", str(port))
    counts = [environ.get(f"OMPI_COMM_WORLD_{x}") for x in ("SIZE", "LOCAL_SIZE")]
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    return Meeting(
        where="--distributed",
        port=environ.get("JAX_COORDINATOR_PORT"),
        first=environ.get("SLURM_PROCID") == "0",
        machines=nodes != "1" or counts[0] != counts[1],
    )


def connect(args: argparse.Namespace) -> None:
    """Join the run's processes, if there are several.  Raises Failure."""
    if not (args.distributed or args.coordinator):
        notice_of_tasks()
        return
    where, port, first, machines = meeting(args)
    check_own_name(machines)

    def give_up():  # JAX would abort with a trace of C++
        text = (
            f"train_mnist.py: error: {where}: the processes did not meet within "
            f"{args.connect_timeout} seconds; start each with its own id and the same "
            "number of processes\n"
        )
        os.write(2, text.encode())
        os._exit(1)

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(args.connect_timeout, give_up)
    handler = signal.getsignal(signal.SIGTERM)
    with named(where, OSError, ValueError, RuntimeError, status=1):
        timer.start()
        try:
            if first and port:  # at a busy port JAX would end without a message
                socket.create_server(("", int(port))).close()
            jax.distributed.initialize(
                args.coordinator,
                args.num_processes,
                args.process_id,
                initialization_timeout=args.connect_timeout + 60,
                heartbeat_timeout_seconds=30,
            )
        except ValueError as error:
            if args.coordinator:
                raise
            raise ValueError(
                "JAX finds no launcher here; start by srun or mpirun, or give "
                f"--coordinator, --num-processes and --process-id ({error})"
            ) from error
        finally:
            timer.cancel()
    signal.signal(signal.SIGTERM, handler)  # JAX has set its own
    count = jax.process_count()
    if args.num_processes not in (None, count):
        raise Failure(
            f"--num-processes {args.num_processes}: the process at {args.coordinator} "
            f"expects {count}"
        )
    devices = collections.Counter(device.process_index for device in jax.devices())
    if len(set(devices.values())) > 1:
        raise Failure(
            f"the processes have {[devices[i] for i in range(count)]} devices; give "
            "each as many, by --devices"
        )
    cause = f"{where}: the processes have met, but cannot exchange arrays"
    with named(cause, RuntimeError, ValueError, status=1):
        pe.gather_processes(np.int32(0))


def of_processes(value: Any) -> list:
    """Return all processes' values, of JSON, in every process."""
    text = json.dumps(value).ljust(8192).encode()  # one length in all processes
    texts = pe.gather_processes(np.frombuffer(text, np.uint8))
    return [json.loads(text.tobytes()) for text in texts]


OTHER_RUN = (
    "a run keeps its settings, also its epochs: leave out the flags that differ, or "
    "start a new run in another --workdir"
)


def check_same(who: str, ours: dict, theirs: dict, remedy=OTHER_RUN) -> None:
    """Raise Failure for the first of our values that differs in another run."""
    for name, value in ours.items():
        if value != theirs[name]:
            text = f"{name} is {value} here, {theirs[name]} there"
            raise Failure(f"{who}: {text}; {remedy}")


def check_same_processes(everyone: list[dict], first: dict) -> None:
    """Raise Failure, in all of them, for the first that differs from process 0."""
    for process, ours in enumerate(everyone):
        remedy = "start it with the flags of process 0"
        check_same(f"process {process}", ours, first, remedy)
