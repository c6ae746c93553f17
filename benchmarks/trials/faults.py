"""Break files, disks and processes on purpose, and count which faults are noticed.

    python benchmarks/trials/faults.py                   every trial, at length
    python benchmarks/trials/faults.py flips lengths     only these
    python benchmarks/trials/faults.py --quick           every trial, in short

The library must refuse damaged or hostile checkpoints by an error that names the file,
and by no other exception.  A `save` that is killed or fails must leave the whole old
tree or the whole new one.  The script prints a line per trial, and exits with status 1
if any trial failed.
"""

import argparse
import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pjax_ensemble as pe

# The outcomes of a trial, in the words of the printed line.
OTHER = "loaded with other values"
FOREIGN = "foreign exceptions"  # or messages without the file or a reason
EQUAL = "loaded with equal values"
REFUSED = "refused"

SECONDS = 2  # of the processor, on which others may compute too: a refusal takes less
SPARE_BYTES = 2_000_000  # for `load`, besides six times the data


# ---------------------------------------------------------------------------------
# Trees, their values, and outcomes of loading them
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
    """Return type, shape and bytes of every leaf; only equal leaves have them equal.

    They are sorted, so that a tree and the dict of its leaves have the same values.
    """
    values = []
    for leaf in jax.tree.leaves(tree):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        values.append((str(leaf.dtype), leaf.shape, array.tobytes()))
    return sorted(values)


def saved(path: Path, tree: Any) -> bytes:
    """Save a tree and return the file's content, after a check that it loads."""
    pe.save(path, tree)
    for like in (tree, None):
        if values_of(pe.load(path, like)) != values_of(tree):
            raise RuntimeError("a sound checkpoint loads with other values")
    return path.read_bytes()


def seal(content: bytes) -> bytes:
    """Replace the digest by the correct one for the content."""
    digest = hashlib.sha256(content[pe._DIGEST.stop :]).hexdigest().encode()
    return content[: pe._DIGEST.start] + digest + content[pe._DIGEST.stop :]


def judge(
    call: Callable, path: Path, refusal: type, accept: Callable, most: int = SPARE_BYTES
) -> tuple[str, Any]:
    """Return the outcome of a call that reads or writes `path`, and a detail.

    `accept` returns the outcome for a value that the call returns.  `most` is the limit
    of bytes that Python and NumPy may hold at a time.
    """
    tracemalloc.start()
    started = time.thread_time()
    try:
        kind, detail = accept(call()), ""
    except refusal as error:
        said = str(error)
        clear = str(path) in said and said.replace(str(path), "").strip(" :'")
        kind, detail = REFUSED if clear else FOREIGN, repr(error)
    except Exception as error:
        kind, detail = FOREIGN, repr(error)
    seconds = time.thread_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if seconds > SECONDS:
        return "slow", f"{seconds:.1f} s"
    if peak > most:
        return "too much memory", f"{peak:,} of {most:,} bytes"
    return kind, detail


def judge_loads(label: str, path: Path, tree: Any) -> Iterator[tuple]:
    """Yield the outcomes of loading `path` as `tree`, and as a dict by its header."""
    values = values_of(tree)
    most = 6 * sum(len(content) for *_, content in values) + SPARE_BYTES

    def accept(found: Any) -> str:
        theirs = values_of(found)
        typed = like is None or [x[:2] for x in theirs] == [x[:2] for x in values]
        return EQUAL if theirs == values else OTHER if typed else "other types"

    for like, form in (tree, ""), (None, ", as a dict"):
        call = partial(pe.load, path, like)
        yield label + form, *judge(call, path, ValueError, accept, most)


def damage(
    folder: Path, make: Callable, size: int = 128, **options: Any
) -> Iterator[tuple]:
    """Load each (label, bytes) that `make` yields from a checkpoint's content.

    The checkpoint has a tree with an array of `size` floats.
    """
    tree, path = make_tree(0, size), folder / "state"
    for label, damaged in make(saved(path, tree), **options):
        path.write_bytes(damaged)
        yield from judge_loads(label, path, tree)


# ---------------------------------------------------------------------------------
# Trials: random damage
# ---------------------------------------------------------------------------------


def flips(content: bytes, step: int = 1) -> Iterator[tuple[str, bytes]]:
    """Flip every `step`-th bit, one at a time."""
    for bit in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(damaged)


def lengths(content: bytes, step: int = 1) -> Iterator[tuple[str, bytes]]:
    """Cut the content to every `step`-th length, and add up to 64 bytes."""
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
        number = number.to_bytes(4, source.choice(("little", "big")))
        copied = data[other : other + size]
        new = source.choice((b"", source.randbytes(size), copied, number))
        data[at : at + source.choice((0, size, len(new)))] = new
    return bytes(data)


def mutations(content: bytes, trials: int = 100_000) -> Iterator[tuple[str, bytes]]:
    header = 8 + int.from_bytes(content[:8], "little")
    for number in range(trials):
        yield f"mutation {number}", mutate(content, header, f"mutation {number}")


def sealed(content: bytes, **trials: int) -> Iterator[tuple[str, bytes]]:
    """Make the digest of mutations correct again, so that other values may load."""
    for label, damaged in mutations(content, **trials):
        yield label, seal(damaged)


# ---------------------------------------------------------------------------------
# Trials: hostile files
# ---------------------------------------------------------------------------------


# False header entries of a leaf, in place of the true ones.  {at}: its first byte.
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
    """Yield files made from a checkpoint, nearly all with a correct digest."""
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


def places(folder: Path) -> Iterator[tuple]:
    """Load links, pipes, devices, huge and empty files; save to irregular ones."""
    tree = make_tree(0)
    saved(folder / "sound", tree)
    (folder / "link").symlink_to("sound")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "huge").touch()
    os.truncate(folder / "huge", 100 * 10**9)
    names = sorted(os.listdir(folder))
    for path in *map(folder.joinpath, names), Path("/dev/zero"), Path("/dev/full"):
        if path.name == "sound" or (path.parent != folder and not path.exists()):
            continue
        signal.alarm(20 * SECONDS)  # ends the process if a pipe hangs
        yield from judge_loads(path.name, path, tree)
        before = path.lstat()
        if path.parent == folder and not stat.S_ISREG(before.st_mode):
            save = partial(pe.save, path, make_tree(1))
            yield path.name, *judge(save, path, ValueError, lambda _: "saved")
        if (path.lstat(), sorted(os.listdir(folder))) != (before, names):
            yield path.name, "changed by save", ""
        signal.alarm(0)
    if values_of(pe.load(folder / "sound", tree)) != values_of(tree):
        yield "the file behind the link", OTHER, ""


# ---------------------------------------------------------------------------------
# Trials: a save that ends at any moment, or is refused
# ---------------------------------------------------------------------------------


SAVED = ("the old tree", "the new tree")


def save_points(folder: Path) -> Iterator[tuple]:
    """Copy the folder at each step of a `save` over an older file; load the copies.

    A copy has what a kill at this moment would leave, since the file has no buffer.
    """
    place, trees = folder / "now", (make_tree(0), make_tree(1))
    events: list[str] = []
    labels: list[str] = []

    def step(event: str, call: Callable, *args: Any, **options: Any) -> Any:
        labels.append(f"before {event} (call {len(events)})")
        shutil.copytree(place, folder / str(len(events)))
        events.append(event)
        return call(*args, **options)

    class File(io.FileIO):  # without a buffer: each write goes to the kernel
        def write(self, content: Any) -> int:
            half = step("write", super().write, content[: len(content) // 2])
            return half + step("rest", super().write, content[half:])

    def which(found: Any) -> str:
        same = [values_of(found) == values_of(tree) for tree in trees]
        return SAVED[same.index(True)] if any(same) else OTHER

    place.mkdir()
    saved(place / "state", trees[0])
    calls = {name: getattr(os, name) for name in ("open", "fsync", "replace")}
    calls = {name: partial(step, name, call) for name, call in calls.items()}
    with (
        mock.patch.object(pe, "open", partial(step, "create", File)),
        mock.patch.multiple(os, **calls),
    ):
        pe.save(place / "state", trees[1])
    step("the end", int)
    order = ["open", "create", "open", *["write", "rest"] * events.count("write")]
    if events != [*order, "fsync", "replace", "fsync", "the end"]:
        yield "the order of a save", OTHER, ", ".join(events)
    for number, label in enumerate(labels):
        path = folder / str(number) / "state"
        load = partial(pe.load, path, trees[0])
        kind, detail = judge(load, path, ValueError, which)
        early = number <= events.index("replace")
        wrong = kind == SAVED[early]
        yield label, OTHER if wrong else kind, detail


def failing(name: str, number: int, passing: int = 0) -> Callable:
    """Return a patch by which a function of `os` passes `passing` times, then fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def patched(folder: Path) -> Any:
        calls = iter([getattr(os, name)] * passing)
        return mock.patch.object(os, name, lambda *a, **o: next(calls, fail)(*a, **o))

    return patched


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Limit every file to this many bytes."""
    import resource  # Windows lacks it

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = "/dev/full"  # behaves as a full disk, on Linux


def full(folder: Path) -> Any:
    def opened(path: str, *_: Any, **__: Any) -> Any:
        Path(path).touch()
        return open(FULL, "wb")

    return mock.patch.object(pe, "open", opened)


class Refusal(NamedTuple):
    number: int  # of the error
    during: Callable = contextlib.nullcontext  # folder -> context in which to save
    name: str = "state"
    late: bool = False  # after the rename, so the tree may be the new one


LARGER = 50_000  # floats in the tree that does not fit on the disk
REFUSALS = {
    "a limit of 0 bytes": Refusal(errno.EFBIG, lambda _: limited(0)),
    "a limit amid the header": Refusal(errno.EFBIG, lambda _: limited(100)),
    "a limit half way": Refusal(errno.EFBIG, lambda _: limited(2 * LARGER)),
    "a limit near the end": Refusal(errno.EFBIG, lambda _: limited(4 * LARGER + 1000)),
    "a sync that fails": Refusal(errno.EIO, failing("fsync", errno.EIO)),
    "a replace that fails": Refusal(errno.EACCES, failing("replace", errno.EACCES)),
    "no folder to open": Refusal(errno.EIO, failing("open", errno.EIO, 1), late=True),
    "no folder to sync": Refusal(errno.EIO, failing("fsync", errno.EIO, 1), late=True),
    "a folder that is missing": Refusal(errno.ENOENT, name="missing/state"),
    "a file for a folder": Refusal(errno.ENOTDIR, name="state/state"),
    "a name too long": Refusal(errno.ENAMETOOLONG, name="n" * 1000),
}
if os.path.exists(FULL):
    REFUSALS["a full disk"] = Refusal(errno.ENOSPC, full)


def disk(folder: Path) -> Iterator[tuple]:
    """Save where the disk refuses: an OSError is raised and the old file stays."""
    old = make_tree(0)
    for case, refusal in REFUSALS.items():
        place = folder / case.replace(" ", "_")
        place.mkdir()
        path, target = place / "state", place / refusal.name
        saved(path, old)
        new = make_tree(1) if refusal.late else make_tree(0, LARGER)
        allowed = [values_of(tree) for tree in (old, new)[: 1 + refusal.late]]
        with refusal.during(place):
            save = partial(pe.save, target, new)
            kind, detail = judge(save, target, OSError, lambda _: "nothing raised")
        if os.listdir(place) != ["state"]:
            kind, detail = "files left", os.listdir(place)
        elif os.strerror(refusal.number) not in detail:
            kind, detail = FOREIGN, f"{detail}, not {os.strerror(refusal.number)}"
        elif values_of(pe.load(path)) not in allowed:
            kind = OTHER
        yield case, kind, detail


# ---------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------


class Trial(NamedTuple):
    outcomes: Callable  # folder -> tuples: label, outcome, detail
    quick: dict  # further arguments of `outcomes`, for few cases
    good: tuple[str, ...] = (REFUSED,)  # the outcomes that pass


FEW = {"trials": 1000}
TRIALS = {
    "flips": Trial(partial(damage, make=flips), {"step": 37}),
    "lengths": Trial(partial(damage, make=lengths), {"step": 11}),
    "mutations": Trial(partial(damage, make=mutations), FEW, (REFUSED, EQUAL)),
    "sealed": Trial(partial(damage, make=sealed), FEW, (REFUSED, EQUAL, OTHER)),
    "hostile": Trial(partial(damage, make=hostile, size=10**6), {}),
}
if os.name == "posix":  # Windows has no pipes in folders, and no such limits
    TRIALS |= {
        "places": Trial(places, {}),
        "save-points": Trial(save_points, {}, SAVED),
        "disk": Trial(disk, {}),
    }


def run(name: str, quick: bool) -> tuple[dict[str, int], list[str]]:
    """Return the count of each outcome of a trial, and a line per bad one."""
    trial, memory = TRIALS[name], "/dev/shm"
    place = memory if os.access(memory, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults.", dir=place) as folder:
        options = trial.quick if quick else {}
        outcomes = list(trial.outcomes(Path(folder), **options))
    counts = dict.fromkeys([*trial.good, OTHER, FOREIGN], 0)
    counts |= collections.Counter(kind for _, kind, _ in outcomes)
    bad = [outcome for outcome in outcomes if outcome[1] not in trial.good]
    return counts, [": ".join(map(str, outcome)) for outcome in bad]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRIALS))
    parser.add_argument("--quick", action="store_true", help="few cases per trial")
    args = parser.parse_args()
    if unknown := set(args.names) - set(TRIALS):
        parser.error(f"there is no trial {unknown.pop()}, only {', '.join(TRIALS)}")
    pe.use_cpu_devices(1)
    failed = 0
    for name in args.names or TRIALS:
        started = time.perf_counter()
        counts, failures = run(name, args.quick)
        parts = ", ".join(f"{n:,} {kind}" for kind, n in counts.items())
        whole, seconds = sum(counts.values()), time.perf_counter() - started
        print(f"{name}, {whole:,}: {parts} ({seconds:.0f} s)", flush=True)
        for failure in failures[:10]:
            print(f"  failed: {failure[:500]}", flush=True)
        failed += len(failures)
    print(f"{failed:,} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
