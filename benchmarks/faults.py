"""Break files, disks and processes on purpose, and count what is noticed.

    python benchmarks/faults.py                   every trial, at length
    python benchmarks/faults.py flips lengths     these alone
    python benchmarks/faults.py --quick           all of them, for a look

Damaged or hostile checkpoints and IDX files must be refused by an error that names the
file, and nothing else; a `save` that is killed or fails must leave the old tree or the
new one, whole.  Prints a line for each trial; exits with 1 if any of them failed.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist

# What may come of a trial, in the words of the printed line.
OTHER = "loaded with other values"
FOREIGN = "foreign exceptions"  # or such as do not name the file and a reason
SLOW = "slow"
LARGE = "too much memory"
EQUAL = "loaded with equal values"
REFUSED = "refused"

SECONDS = 2  # that a refusal may take
SPARE_BYTES = 4_000_000  # that `load` may take beside twice the data


class Result(NamedTuple):
    title: str
    counts: dict[str, int]  # how often each outcome came
    failures: list[str]  # a line for each trial that failed


class Trial(NamedTuple):
    function: Callable  # returns a Result
    long: dict  # its arguments
    quick: dict


def summarize(title: str, outcomes: Iterable[tuple], *good: str) -> Result:
    """Count outcomes (which trial, what came of it, detail).

    `{n}` in the title is the number of trials.
    """
    outcomes = list(outcomes)
    counts = dict.fromkeys([*good, OTHER, FOREIGN], 0)
    counts |= collections.Counter(kind for _, kind, _ in outcomes)
    bad = [outcome for outcome in outcomes if outcome[1] not in good]
    failures = [": ".join(map(str, outcome)) for outcome in bad]
    return Result(title.format(n=f"{len(outcomes):,}"), counts, failures)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for the time of a trial, in memory where there is such a disk."""
    memory = "/dev/shm"
    place = memory if os.access(memory, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults.", dir=place) as folder:
        yield Path(folder)


# ---------------------------------------------------------------------------------
# Trees, what is in them, and what comes of loading them
# ---------------------------------------------------------------------------------


def make_tree(seed: int, size: int = 128) -> pe.TrainState:
    """Make a small state with leaves of every kind, and one of `size` floats."""
    generator = np.random.default_rng(seed)
    params = {
        "conv": generator.normal(size=(3, 3, 1, 8)).astype(np.float32),
        "bias": generator.normal(size=6).astype(jnp.bfloat16),
        "scale": generator.normal(size=6).astype(jnp.float8_e4m3fn),
        "dense": generator.normal(size=size).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    opt_state = {
        "count": np.asarray(seed, np.int32),
        "order": generator.integers(0, 100, size=40, dtype=np.int32),
    }
    return pe.TrainState(params, opt_state, (), jax.random.key(seed))


def values_of(tree: Any) -> list[tuple]:
    """Return type, shape and bytes of every leaf: equal for equal leaves alone.

    They are sorted, so that a tree has those of the dict of its leaves.
    """
    values = []
    for leaf in jax.tree.leaves(tree):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        values.append((str(leaf.dtype), leaf.shape, array.tobytes()))
    return sorted(values)


def saved(tree: Any) -> bytes:
    """Return a checkpoint's content, which loads as it is: else no trial says much."""
    with scratch() as folder:
        path = folder / "state"
        pe.save(path, tree)
        for like in (tree, None):
            if values_of(pe.load(path, like)) != values_of(tree):
                raise RuntimeError("a sound checkpoint loads with other values")
        return path.read_bytes()


def seal(content: bytes) -> bytes:
    """Put the digest that the content asks for in its place."""
    digest = hashlib.sha256(content[pe._DIGEST.stop :]).hexdigest().encode()
    return content[: pe._DIGEST.start] + digest + content[pe._DIGEST.stop :]


def judge(
    call: Callable, path: Path, refusal: type, accept: Callable
) -> tuple[str, Any]:
    """Return what came of a call that reads or writes `path`, and the detail.

    `accept` says what comes of a value that the call returns.
    """
    started = time.perf_counter()
    try:
        value = call()
    except refusal as error:
        said = str(error)
        clear = str(path) in said and said.replace(str(path), "").strip(" :'")
        kind, detail = REFUSED if clear else FOREIGN, repr(error)
    except Exception as error:
        kind, detail = FOREIGN, repr(error)
    else:
        kind, detail = accept(value), ""
    seconds = time.perf_counter() - started
    return (SLOW, f"{seconds:.1f} s") if seconds > SECONDS else (kind, detail)


def judge_loads(
    label: str, path: Path, tree: Any, *, measure: bool = False
) -> Iterator[tuple]:
    """Yield what comes of loading `path` as `tree`, and as what it says it is.

    With `measure`, twice the tree's memory may be taken.
    """
    values = values_of(tree)
    most = 2 * sum(len(content) for *_, content in values) + SPARE_BYTES

    def accept(found: Any) -> str:
        theirs = values_of(found)
        typed = like is None or [x[:2] for x in theirs] == [x[:2] for x in values]
        return EQUAL if theirs == values else OTHER if typed else "other types"

    for like, form in (tree, ""), (None, ", as a dict"):
        call = partial(pe.load, path, like)
        outcome = judge(call, path, ValueError, accept)
        if measure and (peak := peak_memory(call)) > most:
            outcome = LARGE, f"{peak:,} bytes, more than {most:,}"
        yield label + form, *outcome


def peak_memory(call: Callable) -> int:
    """Return the most bytes that Python and NumPy hold at a time during the call."""
    tracemalloc.start()
    try:
        with contextlib.suppress(Exception):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def damage(
    make: Callable, *good: str, size: int = 128, measure: bool = False, **options: Any
) -> Result:
    """Load what `make` yields (label, bytes) of a checkpoint's content.

    `good` may come of it besides a refusal; the tree has an array of `size` floats.
    """
    tree = make_tree(0, size)
    content = saved(tree)

    def outcomes(path: Path) -> Iterator[tuple]:
        for label, damaged in make(content, **options):
            path.write_bytes(damaged)
            yield from judge_loads(label, path, tree, measure=measure)

    with scratch() as folder:
        title = f"{make.__name__}: {{n}} loads, from {len(content):,} bytes"
        return summarize(title, outcomes(folder / "state"), REFUSED, *good)


# ---------------------------------------------------------------------------------
# Trials: damage by chance
# ---------------------------------------------------------------------------------


def flips(content: bytes, step: int = 1) -> Iterator[tuple[str, bytes]]:
    """Flip every bit, or every `step`-th."""
    for bit in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(damaged)


def lengths(content: bytes, step: int = 1) -> Iterator[tuple[str, bytes]]:
    """Cut at every `step`-th length, and add up to 64 bytes."""
    for length in range(0, len(content), step):
        yield f"{length} bytes", content[:length]
    for length in range(1, 65):
        for tail in (bytes(length), content[-length:]):
            yield f"{length} more bytes", content + tail
            yield f"{length} more bytes, sealed", seal(content + tail)


EXTREMES = (0, 1, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


def mutate(content: bytes, header: int, name: str) -> bytes:
    """Return the content with one to three random changes that `name` determines.

    Half of them are in its first `header` bytes.
    """
    source, data = random.Random(name), bytearray(content)
    for _ in range(source.randint(1, 3)):
        at, other = source.randrange(len(data) + 1), source.randrange(len(data) + 1)
        if source.random() < 0.5:
            at = source.randrange(header)
        size = source.choice((1, 2, 4, 16, 46, 64, 1000))
        number = source.choice((*EXTREMES, len(data)))
        there, here = data[other : other + size], data[at : at + size]
        change = source.randrange(5)
        if change == 0:  # other bytes in place of these, or more, or fewer
            data[at : at + source.choice((0, size))] = source.randbytes(size)
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = there
        elif change == 3:
            data[at : at + size], data[other : other + size] = there, here
        else:
            data[at : at + 4] = struct.pack(source.choice("<>") + "I", number)
    return bytes(data)


def mutations(content: bytes, trials: int) -> Iterator[tuple[str, bytes]]:
    header = 8 + int.from_bytes(content[:8], "little")
    for number in range(trials):
        yield f"mutation {number}", mutate(content, header, f"mutation {number}")


def sealed_mutations(content: bytes, trials: int) -> Iterator[tuple[str, bytes]]:
    """Make the digest right again: other values are then as good."""
    for label, damaged in mutations(content, trials):
        yield label, seal(damaged)


def idx_mutations(trials: int, packed: bool = False) -> Result:
    """Mutate an IDX file, gzipped or not: `read_content` returns, or says why not."""
    images = np.random.default_rng(0).integers(0, 4, (20, 28, 28), np.uint8) * 60
    content = struct.pack(">4I", 0x803, *images.shape) + images.tobytes()
    stored = gzip.compress(content, mtime=0) if packed else content

    def accept(read: bytes) -> str:
        promised = math.prod(struct.unpack_from(">3I", read, 4))
        return "read" if len(read) == 16 + promised else OTHER

    def outcomes(path: Path) -> Iterator[tuple]:
        read = partial(train_mnist.read_content, path, 3)
        path.write_bytes(stored)
        yield "sound", "read" if read() == content else OTHER, ""
        for number in range(trials):
            path.write_bytes(mutate(stored, 20, f"{path.name} {number}"))
            yield number, *judge(read, path, train_mnist.DataError, accept)

    with scratch() as folder:
        path = folder / ("images.gz" if packed else "images")
        title = f"mutations of an IDX file{', gzipped' * packed}: {{n}}"
        return summarize(title, outcomes(path), REFUSED, "read")


# ---------------------------------------------------------------------------------
# Trials: files made to do harm
# ---------------------------------------------------------------------------------


# What a header says of a leaf, put in place of what is true.  {at}: where it begins.
LIES = {
    "dtype": ('"F64"', '"BOOL"', '"F8_E4M3"', '"object"', "null", "[]", "{}"),
    "shape": (
        *("[1152921504606846976]", "[-1]", "[-1,-1]", "[0,4611686018427387904]"),
        *("[1e400]", "[1.0]", "[true]", '["1"]', "[null]", "[[1]]", "7", "{}", "null"),
        "[288230376151711744],"
        '"data_offsets":[{at},1152921504606846976],"shape":[288230376151711744]',
    ),
    "data_offsets": ("[0,0]", "[{at},0]", "[-4,{at}]", "[0,1e400]", "[]", "null"),
}


def hostile(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield files made of a checkpoint's content, nearly all with a right digest."""
    end = 8 + int.from_bytes(content[:8], "little")
    text, data = content[8:end].rstrip(), content[end:]

    def put(text: bytes, length: int | None = None) -> bytes:
        text += b" " * (-len(text) % 8)
        length = len(text) if length is None else length
        return seal(length.to_bytes(8, "little") + text + data)

    for length in 0, 1, end - 16, end, len(content), 2**63, 2**64 - 1:
        yield f"a header of {length} bytes", put(text, length)
    name, entry = re.search(rb'("[^"]*dense[^"]*":)({.*?})', text).groups()
    true = json.loads(entry)
    for field, lies in LIES.items():
        old = json.dumps({field: true[field]}, separators=(",", ":"))[1:-1]
        for lie in lies:
            lie = f'"{field}":' + lie.replace("{at}", str(true["data_offsets"][0]))
            changed = entry.replace(old.encode(), lie.encode())
            yield lie, put(text.replace(entry, changed))
    for kind in b'"object"', b'"key<rbg>"', b'"key<x>"', b'"bool"', b'"x"', b"1", b"[]":
        typed = b'"sha256":"%s",%s%s' % (content[pe._DIGEST], name, kind)
        yield f"really {kind!r}", put(text.replace(typed[:75], typed, 1))
    untrue = text.replace(b'"},', b'","no leaf":"int4"},', 1)
    yield "a type of no leaf", put(untrue)
    for new in b"\xff\xfe\xfd\xfc\xfb", bytes(5), b"dens\n":
        yield f"a name with {new!r}", put(text.replace(b"dense", new))
    more = text[:-1] + b"," + name + entry
    yield "a leaf twice", put(more + b"}")
    yield "a leaf more", put(more.replace(b"dense", b"other") + b"}")
    yield "a leaf less", put(text.replace(name + entry + b",", b""))
    yield "another order", put(more.replace(name + entry + b",", b"", 1) + b"}")
    yield "spaces", put(text.replace(b":[", b": ["))
    for value in b"[" * 5000, b'{"a":' * 5000, b"[" + b"[]," * 20_000, b"9" * 5000:
        yield f"a leaf {value[:20]!r}", put(text[:-1] + b',"a":' + value + b"}")
    yield "no JSON", put(text[:100] + bytes(1000))
    for length in end, end + len(data) // 2, pe._DIGEST.stop:
        yield f"{length} bytes", seal(content[:length])
    yield "bytes after the data", seal(content + bytes(8))
    yield "a digest of zeros", content.replace(content[pe._DIGEST], b"0" * 64)
    yield "zeros", bytes(len(content))
    plain = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}  '
    yield "of another program", len(plain).to_bytes(8, "little") + plain


def make_places(folder: Path, content: bytes) -> list[Path]:
    """Make what is something other than a checkpoint of normal size."""
    (folder / "sound").write_bytes(content)
    (folder / "link").symlink_to("sound")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "empty").write_bytes(b"")
    with open(folder / "huge", "wb") as file:
        file.truncate(100 * 10**9)
    places = [path for path in folder.iterdir() if path.name != "sound"]
    return [*places, *filter(Path.exists, (Path("/dev/zero"), Path("/dev/full")))]


def places() -> Result:
    """Load what is no file of normal size, and save to what is no regular file."""
    tree = make_tree(0)

    def outcomes(folder: Path) -> Iterator[tuple]:
        for path in make_places(folder, saved(tree)):
            signal.alarm(20 * SECONDS)  # ends the process where a pipe hangs
            yield from judge_loads(path.name, path, tree, measure=True)
            before = path.lstat(), sorted(os.listdir(folder))
            if path.parent == folder and not stat.S_ISREG(before[0].st_mode):
                save = partial(pe.save, path, make_tree(1))
                yield path.name, *judge(save, path, ValueError, lambda _: "saved")
            if (path.lstat(), sorted(os.listdir(folder))) != before:
                yield path.name, "changed by save", ""
            signal.alarm(0)
        if values_of(pe.load(folder / "sound", tree)) != values_of(tree):
            yield "the file behind the link", OTHER, ""

    with scratch() as folder:
        return summarize("links, pipes and the like: {n}", outcomes(folder), REFUSED)


# ---------------------------------------------------------------------------------
# Trials: a save that is killed or refused
# ---------------------------------------------------------------------------------


def run_child(call: str, prefix: Iterable[str] = ()) -> subprocess.CompletedProcess:
    """Run a call of this file's functions in a new interpreter."""
    command = [*prefix, sys.executable, "-c", f"import faults; {call}"]
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    env["JAX_PLATFORMS"] = "cpu"
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def save_watched(path: str, seed: int, stop: tuple | None = None) -> None:
    """Save a tree and print the system calls that it took, in order.

    A child process: at `stop`, the number of a call and "before" it or "amid" (a write
    that gets half way), it kills itself.
    """
    events = []

    def step(event: str, call: Callable, *args: Any, **options: Any) -> Any:
        if stop == (len(events), "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        events.append(event)
        return call(*args, **options)

    class File(io.FileIO):  # without a buffer: what is written is the kernel's
        def write(self, content: Any) -> int:
            if stop == (len(events), "amid"):
                super().write(memoryview(content)[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return step("write", super().write, content)

    tree = make_tree(seed)
    pe.open = partial(step, "create", File)
    for name in ("open", "fsync", "replace"):
        setattr(os, name, partial(step, name, getattr(os, name)))
    pe.save(path, tree)
    step("end", print, json.dumps(events))


def save_points(writes: int | None = None) -> Result:
    """Kill `save` at its every step, where there is an older file of that name.

    `writes` limits at how many of the writes; the first and the last are among them.
    """
    old, new = make_tree(0), make_tree(1)
    good = ("the old tree", "the new tree")

    def kill(folder: Path, events: list[str], point: tuple[int, str]) -> tuple:
        number, moment = point
        label = f"{moment} {events[number]} (call {number} of {len(events)})"
        path = folder / f"{number}.{moment}" / "state"
        path.parent.mkdir()
        pe.save(path, old)
        child = run_child(f"faults.save_watched({str(path)!r}, 1, {point})")
        if child.returncode != -signal.SIGKILL:
            return label, FOREIGN, f"status {child.returncode} {child.stderr[-300:]}"
        try:
            values = values_of(pe.load(path, old))
            pe.save(path, new)  # whatever was left does not stand in the way
            again = values_of(pe.load(path, new))
        except Exception as error:
            return label, FOREIGN, repr(error)
        replaced = number > events.index("replace")
        expected = values_of(new if replaced else old)
        sound = values == expected and again == values_of(new)
        return label, good[replaced] if sound else OTHER, ""

    def outcomes(folder: Path) -> Iterator[tuple]:
        child = run_child(f"faults.save_watched({str(folder / 'state')!r}, 0)")
        events = [*json.loads(child.stdout), "end"]
        at = [i for i, event in enumerate(events) if event == "write"]
        order = ["create", *["write"] * len(at), "fsync", "replace", "open", "fsync"]
        if events != [*order, "end"]:
            yield "the order of a save", OTHER, ", ".join(events)
        points = [(i, "before") for i in range(len(events)) if i not in at]
        if writes is not None:
            at = [at[i * (len(at) - 1) // (writes - 1)] for i in range(writes)]
        points += [(i, moment) for i in at for moment in ("before", "amid")]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from pool.map(partial(kill, folder, events), points)

    with scratch() as folder:
        return summarize("killed while saving: {n} times", outcomes(folder), *good)


def failing(name: str, number: int, passing: int = 0) -> Callable:
    """Let a function of `os` do nothing so many times, then fail."""
    effects = [None] * passing + [OSError(number, os.strerror(number))]
    return lambda folder: mock.patch.object(os, name, side_effect=effects)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be made in the folder, not even by root."""
    user = os.geteuid()
    folder.chmod(0o555)
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


class Refusal(NamedTuple):
    number: int  # of the error
    during: Callable = contextlib.nullcontext  # folder -> context in which to save
    name: str = "state"
    late: bool = False  # the name is replaced already: the tree may be the new one


LARGER = 50_000  # floats of the tree that is saved where it does not fit
FULL_DISK = "a full disk"  # the one that needs a disk of its own
REFUSALS = {
    "a limit of 0 bytes": Refusal(errno.EFBIG, lambda _: limited(0)),
    "a limit amid the header": Refusal(errno.EFBIG, lambda _: limited(100)),
    "a limit half way": Refusal(errno.EFBIG, lambda _: limited(2 * LARGER)),
    "a limit near the end": Refusal(errno.EFBIG, lambda _: limited(4 * LARGER + 1000)),
    FULL_DISK: Refusal(errno.ENOSPC),
    "a sync that fails": Refusal(errno.EIO, failing("fsync", errno.EIO)),
    "a replace that fails": Refusal(errno.EACCES, failing("replace", errno.EACCES)),
    "no folder to open": Refusal(errno.EIO, failing("open", errno.EIO), late=True),
    "no folder to sync": Refusal(errno.EIO, failing("fsync", errno.EIO, 1), late=True),
    "a folder that is missing": Refusal(errno.ENOENT, name="missing/state"),
    "a file for a folder": Refusal(errno.ENOTDIR, name="state/state"),
    "a name too long": Refusal(errno.ENAMETOOLONG, name="n" * 1000),
    "a read-only folder": Refusal(errno.EACCES, read_only),
}


def save_refused(case: str, folder: Path) -> str:
    """Save where it cannot succeed; return what is wrong with it, if anything."""
    refusal, old = REFUSALS[case], make_tree(0)
    new = make_tree(1) if refusal.late else make_tree(0, LARGER)
    path, target = folder / "state", folder / refusal.name
    pe.save(path, old)
    files = sorted(os.listdir(folder))
    with refusal.during(folder):
        save = partial(pe.save, target, new)
        kind, detail = judge(save, target, OSError, lambda _: "nothing raised")
    if kind != REFUSED or os.strerror(refusal.number) not in detail:
        return f"{kind} {detail}, not {os.strerror(refusal.number)}"
    if sorted(os.listdir(folder)) != files:
        return f"left {sorted(os.listdir(folder))}"
    allowed = [values_of(old), *[values_of(new)] * refusal.late]
    return "" if values_of(pe.load(path, old)) in allowed else OTHER


def save_to_full_disk(folder: Path) -> str | None:
    """Do so on a disk of 64 KB, mounted for one process; None where that cannot be."""
    mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    users = [] if os.geteuid() == 0 else ["--map-root-user"]
    prefix = ["unshare", "--mount", *users, "sh", "-c", mount, str(folder)]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    call = f"print(faults.save_refused(faults.FULL_DISK, faults.Path({str(folder)!r})))"
    child = run_child(call, prefix)
    return child.stdout.strip() or child.stderr


def disk() -> Result:
    """Save where the disk refuses: OSError says so, and the old file is as it was."""
    good, skipped = "refused, a whole tree left", "skipped (no disk can be mounted)"

    def outcomes(folder: Path) -> Iterator[tuple]:
        for case in REFUSALS:
            place = folder / case.replace(" ", "_")
            place.mkdir()
            full = case == FULL_DISK
            wrong = save_to_full_disk(place) if full else save_refused(case, place)
            kind = skipped if wrong is None else FOREIGN if wrong else good
            yield case, kind, wrong

    with scratch() as folder:
        folder.chmod(0o755)
        title = "saving to a disk that refuses: {n} ways"
        return summarize(title, outcomes(folder), good, skipped)


# ---------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------


MANY, FEW = {"trials": 100_000}, {"trials": 1000}
TRIALS = {
    "flips": [Trial(partial(damage, flips), {}, {"step": 37})],
    "lengths": [Trial(partial(damage, lengths), {}, {"step": 11})],
    "fuzz": [
        Trial(idx_mutations, MANY, FEW),
        Trial(partial(idx_mutations, packed=True), MANY, FEW),
        Trial(partial(damage, mutations, EQUAL), MANY, FEW),
        Trial(partial(damage, sealed_mutations, EQUAL, OTHER), MANY, FEW),
    ],
    "hostile": [
        Trial(partial(damage, hostile, measure=True), {"size": 10**6}, {"size": 10**5}),
        Trial(places, {}, {}),
    ],
    "save-points": [Trial(save_points, {}, {"writes": 2})],
    "disk": [Trial(disk, {}, {})],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRIALS))
    parser.add_argument("--quick", action="store_true", help="few of each, for a look")
    args = parser.parse_args()
    if unknown := set(args.names) - set(TRIALS):
        parser.error(f"no trial {unknown.pop()}; there are {', '.join(TRIALS)}")
    pe.use_cpu_devices(1)
    failed = 0
    for trial in itertools.chain.from_iterable(map(TRIALS.get, args.names or TRIALS)):
        started = time.perf_counter()
        result = trial.function(**(trial.quick if args.quick else trial.long))
        counts = ", ".join(f"{n:,} {kind}" for kind, n in result.counts.items())
        seconds = time.perf_counter() - started
        print(f"{result.title}: {counts} ({seconds:.0f} s)", flush=True)
        for failure in result.failures[:10]:
            print(f"  failed: {failure[:500]}", flush=True)
        failed += len(result.failures)
    print(f"{failed:,} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
