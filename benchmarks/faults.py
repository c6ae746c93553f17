"""Break files, disks and processes on purpose, and count what is noticed.

    python benchmarks/faults.py                   every trial, at length
    python benchmarks/faults.py flips fuzz        these alone
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
import functools
import gzip
import io
import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist

# What may come of a trial, in the words of the printed line.
OTHER = "loaded with other values"
FOREIGN = "foreign exceptions"
VAGUE = "refused without the file's name and a reason"
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


def summarize(
    title: str,
    outcomes: Iterable[tuple[str, str, Any]],
    good: tuple[str, ...] = (REFUSED,),
    never: tuple[str, ...] = (OTHER, FOREIGN),
) -> Result:
    """Count outcomes (which trial, what came of it, detail); `never` are always said.

    `{n}` in the title is the number of trials.
    """
    counts = dict.fromkeys([*never, *good], 0)
    failures = []
    number = 0
    for label, kind, detail in outcomes:
        number += 1
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in good:
            failures.append(f"{label}: {kind}: {detail}")
    return Result(title.format(n=f"{number:,}"), counts, failures)


def print_result(result: Result, seconds: float, most: int = 10) -> None:
    counts = [f"{n:,} {kind}" for kind, n in result.counts.items()]
    print(f"{result.title}: {', '.join(counts)} ({seconds:.0f} s)", flush=True)
    for failure in result.failures[:most]:
        print(f"  failed: {failure[:500]}")
    if len(result.failures) > most:
        print(f"  and {len(result.failures) - most:,} more failed", flush=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for the time of a trial, in memory where there is such a disk."""
    memory = "/dev/shm"
    place = memory if os.access(memory, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults.", dir=place) as folder:
        yield Path(folder)


# ---------------------------------------------------------------------------------
# Trees and what is in them
# ---------------------------------------------------------------------------------


def make_tree(seed: int, size: int = 128) -> pe.TrainState:
    """Make a small state with leaves of every kind, and one of `size` floats."""
    generator = np.random.default_rng(seed)
    params = {
        "conv": generator.normal(size=(3, 3, 1, 8)).astype(np.float32),
        "bias": generator.normal(size=6).astype(jnp.bfloat16),
        "dense": generator.normal(size=size).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    opt_state = {
        "count": np.asarray(seed, np.int32),
        "velocity": generator.normal(size=(3, 3, 1, 8)).astype(np.float32),
        "order": generator.integers(0, 100, size=40, dtype=np.int32),
    }
    return pe.TrainState(params, opt_state, (), jax.random.key(seed))


def types_of(tree: Any) -> list[tuple]:
    return [(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(tree)]


def values_of(tree: Any) -> list[tuple]:
    """Return the type, shape and bytes of every leaf: equal for equal trees alone."""
    values = []
    for leaf in jax.tree.leaves(tree):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        values.append((str(leaf.dtype), leaf.shape, array.tobytes()))
    return values


def most_memory(like: Any) -> int:
    """Return the bytes that `load` may take at its peak."""
    return 2 * sum(len(content) for *_, content in values_of(like)) + SPARE_BYTES


def saved(tree: Any) -> bytes:
    """Return a checkpoint's content, which loads as it is: else no trial says much."""
    with scratch() as folder:
        path = folder / "state.npz"
        pe.save(path, tree)
        if values_of(pe.load(path, tree)) != values_of(tree):
            raise RuntimeError("a sound checkpoint loads with other values")
        return path.read_bytes()


def seal(content: bytes) -> bytes:
    """Put the digest that the content asks for in place of the one at its end."""
    body = content[: -pe._DIGEST_BYTES]
    return body + pe._digest(io.BytesIO(body + bytes(pe._DIGEST_BYTES)))[0]


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
        kind, detail = REFUSED if clear else VAGUE, repr(error)
    except Exception as error:
        kind, detail = FOREIGN, repr(error)
    else:
        kind, detail = accept(value), ""
    seconds = time.perf_counter() - started
    return (SLOW, f"{seconds:.1f} s") if seconds > SECONDS else (kind, detail)


def judge_load(
    path: Path, like: Any, values: list, *, in_memory: int | None = None
) -> tuple[str, Any]:
    """Load and compare values; with `in_memory`, also within so many bytes."""

    def accept(tree: Any) -> str:
        return EQUAL if values_of(tree) == values else OTHER

    call = functools.partial(pe.load, path, like)
    outcome = judge(call, path, ValueError, accept)
    if in_memory is not None and outcome[0] != SLOW:
        peak = peak_memory(call)
        if peak > in_memory:
            return LARGE, f"{peak:,} bytes, more than {in_memory:,}"
    return outcome


def peak_memory(call: Callable) -> int:
    """Return the most bytes that Python and NumPy hold at a time during the call."""
    tracemalloc.start()
    try:
        with contextlib.suppress(Exception):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------
# Trials: damage by chance
# ---------------------------------------------------------------------------------


def flips(step: int = 1) -> Result:
    """Flip every bit, or every `step`-th, of a checkpoint: each must be refused."""
    like = make_tree(0)
    content, values = saved(like), values_of(like)

    def outcomes(path: Path) -> Iterator[tuple]:
        for bit in range(0, 8 * len(content), step):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            yield f"bit {bit}", *judge_load(path, like, values)

    with scratch() as folder:
        title = f"bit flips: {{n}} of a file of {len(content):,} bytes"
        return summarize(title, outcomes(folder / "flipped.npz"))


def truncations(step: int = 1, extra: int = 64) -> Result:
    """Cut a checkpoint at every `step`-th length, and add up to `extra` bytes."""
    like = make_tree(0)
    content, values = saved(like), values_of(like)

    def outcomes(path: Path) -> Iterator[tuple]:
        for length in range(0, len(content), step):
            path.write_bytes(content[:length])
            yield f"{length} bytes", *judge_load(path, like, values)
        for length in range(1, extra + 1):
            for tail in (bytes(length), content[-length:]):
                path.write_bytes(content + tail)
                yield f"{length} more bytes", *judge_load(path, like, values)

    with scratch() as folder:
        title = f"cut or longer: {{n}} lengths of a file of {len(content):,} bytes"
        return summarize(title, outcomes(folder / "cut.npz"))


EXTREMES = (0, 1, 2, 0xFF, 0xFFFE, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


def mutate(content: bytes, headers: range | list[int], name: str) -> bytes:
    """Return the content with one to three random changes that `name` determines.

    Half of them are at offsets out of `headers`.
    """
    source = random.Random(name)
    data = bytearray(content)
    for _ in range(source.randint(1, 3)):
        at, other = source.randrange(len(data) + 1), source.randrange(len(data) + 1)
        if source.random() < 0.5:
            at = min(source.choice(headers), len(data))
        size = source.choice((1, 2, 4, 16, 46, 64, 1000))
        change = source.randrange(7)
        if change == 0:
            data[at : at + 1] = source.randbytes(1)
        elif change == 1:
            data[at:at] = source.randbytes(size)
        elif change == 2 and size < len(data):
            del data[at : at + size]
        elif change == 3:
            data[at:at] = data[other : other + size]
        elif change == 4:
            first, second = data[at : at + size], data[other : other + size]
            data[at : at + size], data[other : other + size] = second, first
        else:
            form = source.choice(("<H", "<I", ">I"))
            number = source.choice((*EXTREMES, len(data)))
            number %= 256 ** struct.calcsize(form)
            data[at : at + struct.calcsize(form)] = struct.pack(form, number)
    return bytes(data)


def fuzz_idx(trials: int, seed: int = 0, packed: bool = False) -> Result:
    """Mutate an IDX file, gzipped or not: `read_content` returns, or says why not."""
    images = np.random.default_rng(0).integers(0, 4, (20, 28, 28), np.uint8) * 60
    header = struct.pack(">4I", 0x803, *images.shape)
    content = header + images.tobytes()
    name, headers = "images", range(len(header))
    if packed:
        content, name = gzip.compress(content, mtime=0), "images.gz"
        headers = [*range(20), *range(len(content) - 9, len(content))]

    def accept(read: bytes) -> str:
        try:
            train_mnist.as_array(read, 3)
        except ValueError:
            return OTHER
        return "read"

    def outcomes(path: Path) -> Iterator[tuple]:
        read = functools.partial(train_mnist.read_content, path, 3)
        path.write_bytes(content)
        if read() != header + images.tobytes():
            raise RuntimeError("a sound IDX file is read with another content")
        for number in range(trials):
            label = f"{name} {seed} {number}"
            path.write_bytes(mutate(content, headers, label))
            yield label, *judge(read, path, train_mnist.DataError, accept)

    with scratch() as folder:
        return summarize(
            f"IDX, {'gzipped' if packed else 'plain'}: {{n}} mutations",
            outcomes(folder / name),
            good=("read", REFUSED),
        )


def header_offsets(content: bytes) -> list[int]:
    """Return the offsets of all that is not data in a checkpoint, but its digest."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        offsets = list(range(archive.start_dir, len(content) - pe._DIGEST_BYTES))
        for info in archive.infolist():
            size = 30 + len(info.filename) + 128  # the headers of the zip and the .npy
            offsets += range(info.header_offset, info.header_offset + size)
    return offsets


def fuzz_checkpoint(trials: int, seed: int = 0) -> Result:
    """Mutate a checkpoint: it must be refused, or be as it was."""
    like = make_tree(0)
    content, values = saved(like), values_of(like)
    headers = header_offsets(content)

    def outcomes(path: Path) -> Iterator[tuple]:
        for number in range(trials):
            label = f"checkpoint {seed} {number}"
            path.write_bytes(mutate(content, headers, label))
            yield label, *judge_load(path, like, values)

    with scratch() as folder:
        return summarize(
            "checkpoints: {n} mutations",
            outcomes(folder / "mutated.npz"),
            good=(EQUAL, REFUSED),
        )


def fuzz_sealed(trials: int, seed: int = 0, sample: int = 49) -> Result:
    """Mutate a checkpoint and make its digest right: shapes and types must be so too.

    In every other trial it is one member that is mutated, and the archive is right.
    Every `sample`-th is loaded again to measure its memory.
    """
    like = make_tree(0)
    content, headers = saved(like), header_offsets(saved(like))
    members = members_of(content)
    types, most = types_of(like), most_memory(like)
    other, sound = "loaded with other types", "loaded with the right types"

    def accept(tree: Any) -> str:
        return sound if types_of(tree) == types else other

    def outcomes(path: Path) -> Iterator[tuple]:
        load = functools.partial(pe.load, path, like)
        for number in range(trials):
            label = f"sealed {seed} {number}"
            if number % 2:
                name = [*members][number // 2 % len(members)]
                member = mutate(members[name], range(128), label)
                damaged = pack({**members, name: member}.items())
            else:
                body = mutate(content[: -pe._DIGEST_BYTES], headers, label)
                damaged = seal(body + bytes(pe._DIGEST_BYTES))
            path.write_bytes(damaged)
            outcome = judge(load, path, ValueError, accept)
            if number % sample == 0 and (peak := peak_memory(load)) > most:
                outcome = LARGE, f"{peak:,} bytes, more than {most:,}"
            yield label, *outcome

    with scratch() as folder:
        return summarize(
            "checkpoints with a right digest: {n} mutations",
            outcomes(folder / "sealed.npz"),
            good=(sound, REFUSED),
            never=(other, FOREIGN, LARGE),
        )


# ---------------------------------------------------------------------------------
# Trials: files made to do harm
# ---------------------------------------------------------------------------------


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(members: Iterable[tuple[str, bytes]], method: int = zipfile.ZIP_STORED):
    """Return an archive of the members, with a right digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w") as stream:
                stream.write(content)
        archive.comment = bytes(pe._DIGEST_BYTES)
    return seal(buffer.getvalue())


def npy(descr: str, shape: str, content: bytes, order: bool = False) -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + content


class Field(NamedTuple):
    """A number in the records of a zip archive."""

    local: int | None  # its offset in a member's own header
    central: int  # its offset in the member's record in the central directory
    form: str


FLAGS = Field(6, 8, "<H")
METHOD = Field(8, 10, "<H")
CRC = Field(14, 16, "<I")
PACKED_SIZE = Field(18, 20, "<I")
SIZE = Field(22, 24, "<I")
NAME_SIZE = Field(26, 28, "<H")
EXTRA_SIZE = Field(28, 30, "<H")
OFFSET = Field(None, 42, "<I")


def set_field(content: bytes, field: Field, value: int) -> bytes:
    """Write a number into both headers of the archive's first member."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        start = archive.start_dir
    data = bytearray(content)
    if field.local is not None:
        struct.pack_into(field.form, data, field.local, value)
    struct.pack_into(field.form, data, start + field.central, value)
    return seal(bytes(data))


def reverse_directory(content: bytes) -> bytes:
    """Turn the order of the central directory's records around."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        start, infos = archive.start_dir, archive.infolist()
    sizes = [46 + len(info.filename) for info in infos]
    ends = np.cumsum(sizes) + start
    records = [content[end - size : end] for end, size in zip(ends, sizes)]
    return seal(content[:start] + b"".join(records[::-1]) + content[ends[-1] :])


def many_members(num_bytes: int) -> bytes:
    """Return a file of so many bytes, all of them records of a central directory."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("a", b"")
        archive.comment = bytes(pe._DIGEST_BYTES)
    content = buffer.getvalue()
    start, size = archive.start_dir, 47
    head, record = content[:start], content[start : start + size]
    tail = bytearray(content[start + size :])
    count = (num_bytes - len(head) - len(tail)) // size
    struct.pack_into("<2H2I", tail, 8, 1, 1, count * size, start)
    return seal(head + count * record + bytes(tail))


def hostile_archives(like: Any) -> Iterator[tuple[str, bytes]]:
    """Yield archives with a right digest that are not what `save` writes for `like`."""
    content = saved(like)
    members = members_of(content)
    name, array = next((n, c) for n, c in members.items() if "dense" in n)
    first = next(iter(members))
    shape = f"({(len(array) - 128) // 4},)"

    def replaced(new: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
        return pack({**members, name: new}.items(), method)

    pickle = b"cposix\nsystem\n(S'touch /tmp/pjax_ensemble_was_here'\ntR."
    yield "an object array", replaced(npy("|O", shape, pickle))
    yield "a pickle alone", replaced(pickle)
    yield "a giant shape", replaced(npy("<f4", f"({2**60},)", array[128:]))
    yield "a negative shape", replaced(npy("<f4", "(-1,)", array[128:]))
    yield "deep brackets", replaced(npy("<f4", "(" * 5000, array[128:]))
    yield "another type", replaced(npy("<i4", shape, array[128:]))
    yield "another byte order", replaced(npy(">f4", shape, array[128:]))
    yield "another order", replaced(npy("<f4", shape, array[128:], order=True))
    huge = b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1)
    yield "a giant .npy header", replaced(huge + array[12:])
    yield "an empty member", replaced(b"")
    yield "a longer member", replaced(array + b"more")
    yield "a shorter member", replaced(array[:-4])
    bomb = array[:128] + bytes(20 * len(array))
    yield "a bomb, deflated", replaced(bomb, zipfile.ZIP_DEFLATED)
    zeros = array[:128] + bytes(len(array) - 128)
    yield "the right size, deflated", replaced(zeros, zipfile.ZIP_DEFLATED)
    yield "the right size, in bzip2", replaced(zeros, zipfile.ZIP_BZIP2)
    yield "the right size, in LZMA", replaced(zeros, zipfile.ZIP_LZMA)
    for size in (0, 1):
        yield f"packed size {size}", set_field(content, PACKED_SIZE, size)
    for size in (0, 1, 2**31, 2**32 - 2):
        yield f"size {size}", set_field(content, SIZE, size)
        both = set_field(set_field(content, SIZE, size), PACKED_SIZE, size)
        yield f"both sizes {size}", both
    yield "an unknown method", set_field(content, METHOD, 77)
    yield "a giant name", set_field(content, NAME_SIZE, 0xFFFF)
    yield "a giant extra field", set_field(content, EXTRA_SIZE, 0xFFFF)
    second = list(members)[1]
    yield "an extra member", pack([*members.items(), ("extra.npy", members[first])])
    twin = "x" * len(first)
    twice = pack([*members.items(), (twin, members[first])])
    yield "a member twice", seal(twice.replace(twin.encode(), first.encode()))
    lacking = [item for item in members.items() if item[0] != second]
    yield "a missing member", pack(lacking)
    yield "no members", pack([])
    up = [(f"../{n}" if n == first else n, c) for n, c in members.items()]
    yield "a member above the folder", pack(up)
    yield "members in another order", pack(reversed(members.items()))
    yield "members swapped", pack(zip([second, first], list(members.values())))
    yield "nothing but a directory", many_members(len(content))
    yield "bytes before the archive", seal(b"before" + content)
    yield "two archives", seal(content + content)
    yield "a digest alone", seal(bytes(pe._DIGEST_BYTES))
    yield "zeros and a digest", seal(bytes(len(content)))


def harmless_archives(like: Any) -> Iterator[tuple[str, bytes]]:
    """Yield archives whose directory says other things: `load` has no use for it."""
    content = saved(like)
    members = members_of(content)
    yield "the directory in another order", reverse_directory(content)
    yield "the same, packed again", pack(members.items())
    yield "a wrong checksum", set_field(content, CRC, 12345)
    yield "a size in the extra record", set_field(content, SIZE, 2**32 - 1)
    for flag, bit in ("encrypted", 1), ("patched", 0x20), ("strongly encrypted", 0x40):
        yield f"a member that is {flag}", set_field(content, FLAGS, bit)
    for offset in (1, len(content), 2**32 - 2, 2**32 - 1):
        yield f"a member at {offset}", set_field(content, OFFSET, offset)
    yield "bytes after the archive", seal(content + bytes(pe._DIGEST_BYTES))
    yield "bytes after, few", seal(content + b"few")


def other_places(folder: Path, content: bytes) -> Iterator[tuple[str, Path]]:
    """Yield names that stand for something other than a checkpoint of normal size."""
    (folder / "sound.npz").write_bytes(content)
    (folder / "link.npz").symlink_to("sound.npz")
    yield "a link", folder / "link.npz"
    (folder / "dangling.npz").symlink_to("nowhere.npz")
    yield "a link to nothing", folder / "dangling.npz"
    (folder / "loop.npz").symlink_to("loop.npz")
    yield "a link to itself", folder / "loop.npz"
    os.mkfifo(folder / "fifo.npz")
    yield "a pipe", folder / "fifo.npz"
    (folder / "folder.npz").mkdir()
    yield "a folder", folder / "folder.npz"
    (folder / "empty.npz").write_bytes(b"")
    yield "an empty file", folder / "empty.npz"


def huge_places(folder: Path) -> Iterator[tuple[str, Path]]:
    with open(folder / "huge.npz", "wb") as file:
        file.truncate(100 * 10**9)
    yield "100 GB", folder / "huge.npz"
    for name in ("zero", "full"):
        if os.path.exists(f"/dev/{name}"):
            yield f"/dev/{name}", Path(f"/dev/{name}")


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt what hangs, by an exception, where that is possible."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("interrupted")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def hostile(size: int = 1_000_000) -> Result:
    """Load files made by hand to do harm, for a tree with an array of `size` floats.

    All are to be refused, in little time and memory, but for a few that hold the very
    tree in another form.
    """
    like = make_tree(0, size)
    values, most = values_of(like), most_memory(like)
    harmless = "harmless and loaded"

    def load(label: str, path: Path) -> tuple:
        with deadline(10 * SECONDS):
            return label, *judge_load(path, like, values, in_memory=most)

    def save(label: str, path: Path, folder: Path) -> tuple:
        def state() -> tuple:
            link = os.readlink(path) if path.is_symlink() else ""
            return os.lstat(path).st_ino, link, sorted(os.listdir(folder))

        before = state()
        call = functools.partial(pe.save, path, make_tree(1))
        with deadline(10 * SECONDS):
            outcome = judge(call, path, ValueError, lambda _: "saved")
        if state() != before:
            outcome = "changed by save", path.name
        return f"save to {label}", *outcome

    def outcomes(folder: Path) -> Iterator[tuple]:
        path = folder / "hostile.npz"
        for label, content in hostile_archives(like):
            path.write_bytes(content)
            yield load(label, path)
        for label, content in harmless_archives(like):
            path.write_bytes(content)
            label, kind, detail = load(label, path)
            yield label, harmless if kind == EQUAL else kind, detail
        path.unlink()
        for label, path in other_places(folder, saved(like)):
            yield load(label, path)
            if not path.is_file() or path.is_symlink():
                yield save(label, path, folder)
        for label, path in huge_places(folder):
            yield load(label, path)
        label, kind, detail = load("the file behind the link", folder / "sound.npz")
        yield label, harmless if kind == EQUAL else kind, detail

    with scratch() as folder:
        return summarize(
            "hostile files, pipes, links and the like: {n}",
            outcomes(folder),
            good=(harmless, REFUSED),
            never=(EQUAL, OTHER, FOREIGN, SLOW, LARGE),
        )


# ---------------------------------------------------------------------------------
# Trials: a save that is killed or refused
# ---------------------------------------------------------------------------------


def run_child(function: Callable, *args: Any, prefix: Iterable[str] = ()):
    """Run one of this file's functions in a fresh interpreter."""
    name = function.__name__
    code = f"import json, sys, faults; faults.{name}(*json.loads(sys.argv[1]))"
    here = str(Path(__file__).resolve().parent)
    return subprocess.run(
        [*prefix, sys.executable, "-c", code, json.dumps(args)],
        env={**os.environ, "PYTHONPATH": here, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def in_parallel(call: Callable, *columns: Iterable) -> list:
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        return list(pool.map(call, *columns))


def save_watched(path: str, seed: int, stop: list | None = None) -> None:
    """Save a tree and print the system calls that it took, in order.

    A child process: at `stop`, the number of a call and "before", "amid" (a write that
    gets half way) or "after", it kills itself.
    """
    events = []
    tree = make_tree(seed)

    def step(event: str, call: Callable, *args: Any, **options: Any) -> Any:
        here = len(events)
        events.append(event)
        if stop == [here, "before"]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **options)
        if stop == [here, "after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    class File(io.FileIO):  # without a buffer: what is written is the kernel's
        def write(self, content: Any) -> int:
            if stop == [len(events), "amid"]:
                view = memoryview(content)
                super().write(view[: len(view) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return step("write", super().write, content)

    def sync(real: Callable, handle: int) -> None:
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        step("sync folder" if folder else "sync", real, handle)

    pe.open = functools.partial(step, "create", File)
    os.fsync = functools.partial(sync, os.fsync)
    for name in ("open", "replace", "unlink"):
        setattr(os, name, functools.partial(step, name, getattr(os, name)))
    pe.save(path, tree)
    print(json.dumps(events))


def in_order(events: list[str]) -> bool:
    """Say whether content is synced before the name is replaced, the folder after."""
    needed = ("create", "write", "sync", "replace", "sync folder")
    if any(events.count(name) < 1 for name in needed) or events.count("replace") > 1:
        return False
    last = {name: number for number, name in enumerate(events)}
    places = [last[name] for name in needed]
    return places == sorted(places)


def choose_points(events: list[str], writes: int | None) -> list[tuple[int, str]]:
    """Choose where to kill: around every call, of the writes only so many if given."""
    numbers = [number for number, name in enumerate(events) if name == "write"]
    if writes is not None:
        spread = np.linspace(0, len(numbers) - 1, writes).round().astype(int)
        numbers = [numbers[i] for i in sorted(set(spread.tolist()))]
    points = []
    for number, name in enumerate(events):
        if name != "write":
            points += [(number, "before"), (number, "after")]
        elif number in numbers:
            points += [(number, "before"), (number, "amid"), (number, "after")]
    return points


def save_points(writes: int | None = None) -> Result:
    """Kill `save` at its every step, where there is an older file of that name.

    `writes` limits at how many of the writes; the first and the last are among them.
    """
    old, new = make_tree(0), make_tree(1)
    good = ("the old tree", "the new tree")
    wrong, alive, order = "the wrong tree", "not killed", "synced out of order"

    def kill(folder: Path, events: list[str], point: tuple[int, str]) -> tuple:
        number, moment = point
        label = f"{moment} {events[number]} (call {number} of {len(events)})"
        place = folder / f"{number}.{moment}"
        place.mkdir()
        path = place / "state.npz"
        pe.save(path, old)
        child = run_child(save_watched, str(path), 1, point)
        if child.returncode != -signal.SIGKILL:
            return label, alive, f"status {child.returncode} {child.stderr[-300:]}"
        replace = events.index("replace") if "replace" in events else len(events)
        replaced = number > replace or (number == replace and moment == "after")
        try:
            values = values_of(pe.load(path, old))
            pe.save(path, new)  # whatever was left does not stand in the way
            again = values_of(pe.load(path, new))
        except Exception as error:
            return label, FOREIGN, repr(error)
        if again != values_of(new):
            return label, OTHER, "after another save"
        for expected, tree, kind in (False, old, good[0]), (True, new, good[1]):
            if values == values_of(tree):
                return label, kind if replaced == expected else wrong, kind
        return label, OTHER, "neither tree"

    def outcomes(folder: Path) -> Iterator[tuple]:
        child = run_child(save_watched, str(folder / "state.npz"), 0)
        if child.returncode:
            yield "a save that is not killed", FOREIGN, child.stderr[-500:]
            return
        events = json.loads(child.stdout)
        if not in_order(events):
            yield "a save that is not killed", order, ", ".join(events)
        points = choose_points(events, writes)
        yield from in_parallel(functools.partial(kill, folder, events), points)

    with scratch() as folder:
        return summarize(
            "killed while saving: {n} times",
            outcomes(folder),
            good=good,
            never=(OTHER, FOREIGN, wrong, alive, order),
        )


@contextlib.contextmanager
def failing(name: str, number: int, skip: int = 0) -> Iterator[None]:
    """Let a function of `os` fail, after `skip` calls that go through."""
    real, calls = getattr(os, name), iter(range(skip))

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls, None) is not None:
            return real(*args, **options)
        raise OSError(number, os.strerror(number))

    setattr(os, name, fail)
    try:
        yield
    finally:
        setattr(os, name, real)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be made in the folder, not even by root."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


class Refusal(NamedTuple):
    number: int  # of the error
    during: Callable  # folder -> context in which to save
    name: str = "state.npz"
    late: bool = False  # the name is replaced already: the tree may be the new one


LARGER = 50_000  # floats of the tree that is saved where it does not fit
NUM_BYTES = 4 * LARGER  # a little less than its file takes

REFUSALS = {
    "a limit of 0 bytes": Refusal(errno.EFBIG, lambda _: limited(0)),
    "a limit amid a header": Refusal(errno.EFBIG, lambda _: limited(100)),
    "a limit half way": Refusal(errno.EFBIG, lambda _: limited(NUM_BYTES // 2)),
    "a limit near the end": Refusal(errno.EFBIG, lambda _: limited(NUM_BYTES + 2000)),
    "a full disk": Refusal(errno.ENOSPC, lambda _: contextlib.nullcontext()),
    "a sync that fails": Refusal(errno.EIO, lambda _: failing("fsync", errno.EIO)),
    "a replace that fails": Refusal(
        errno.EACCES, lambda _: failing("replace", errno.EACCES)
    ),
    "a folder that cannot be opened": Refusal(
        errno.EACCES, lambda _: failing("open", errno.EACCES), late=True
    ),
    "a folder's sync that fails": Refusal(
        errno.EIO, lambda _: failing("fsync", errno.EIO, skip=1), late=True
    ),
    "a folder that is missing": Refusal(
        errno.ENOENT, lambda _: contextlib.nullcontext(), name="missing/state.npz"
    ),
    "a file for a folder": Refusal(
        errno.ENOTDIR, lambda _: contextlib.nullcontext(), name="state.npz/state.npz"
    ),
    "a name too long": Refusal(
        errno.ENAMETOOLONG, lambda _: contextlib.nullcontext(), name="n" * 1000
    ),
    "a read-only folder": Refusal(errno.EACCES, read_only),
}
FULL_DISK = "a full disk"  # the one that needs a disk of its own


def save_refused(case: str, folder: str) -> None:
    """Save where it cannot succeed, as a child process; print what is wrong with it."""
    refusal, wrong = REFUSALS[case], []
    path, old, new = Path(folder, "state.npz"), make_tree(0), make_tree(0, LARGER)
    if refusal.late:
        new = make_tree(1)
    os.chmod(folder, 0o755)
    pe.save(path, old)
    target, files = Path(folder, refusal.name), sorted(os.listdir(folder))
    with refusal.during(Path(folder)):
        try:
            pe.save(target, new)
            wrong.append("nothing raised")
        except OSError as error:
            words = str(target), os.strerror(refusal.number)
            if not all(word in str(error) for word in words):
                wrong.append(f"raised {error!r}, not that {' '.join(words)}")
        except Exception as error:
            wrong.append(f"raised {error!r}")
    if sorted(os.listdir(folder)) != files:
        wrong.append(f"left {sorted(os.listdir(folder))}")
    try:
        values = values_of(pe.load(path, old))
        allowed = [old, new] if refusal.late else [old]
        if values not in map(values_of, allowed):
            wrong.append("other values in the old file")
    except Exception as error:
        wrong.append(f"the old file: {error!r}")
    print(json.dumps(wrong))


def own_disk(folder: Path) -> list[str] | None:
    """Return a prefix of a command that makes `folder` a disk of 64 KB.

    It is mounted for that command alone.  None where that cannot be.
    """
    mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    users = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", "--mount", *users, "sh", "-c", mount, str(folder)]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return command


def disk(cases: Iterable[str] = tuple(REFUSALS)) -> Result:
    """Save where the disk refuses: OSError says so, and the old file is as it was."""
    good = "refused, the old file as it was"
    whole = "refused late, one of both trees whole"
    skipped = "skipped (no disk can be mounted)"

    def refuse(folder: Path, case: str) -> tuple:
        place = folder / case.replace(" ", "_")
        place.mkdir()
        prefix = own_disk(place) if case == FULL_DISK else []
        if prefix is None:
            return case, skipped, ""
        child = run_child(save_refused, case, str(place), prefix=prefix)
        if child.returncode:
            return case, FOREIGN, child.stderr[-500:]
        wrong = json.loads(child.stdout)
        if wrong:
            return case, "wrong", "; ".join(wrong)
        if child.stderr:
            return case, "noisy", child.stderr[-500:]
        return case, whole if REFUSALS[case].late else good, ""

    with scratch() as folder:
        folder.chmod(0o755)
        return summarize(
            "saving to a disk that refuses: {n} ways",
            in_parallel(functools.partial(refuse, folder), cases),
            good=(good, whole, skipped),
            never=(FOREIGN, "wrong"),
        )


# ---------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------


FUZZ_LONG, FUZZ_QUICK = {"trials": 100_000}, {"trials": 1000}
TRIALS = {
    "flips": [Trial(flips, {}, {"step": 37})],
    "truncations": [Trial(truncations, {}, {"step": 11})],
    "fuzz": [
        Trial(fuzz_idx, FUZZ_LONG, FUZZ_QUICK),
        Trial(functools.partial(fuzz_idx, packed=True), FUZZ_LONG, FUZZ_QUICK),
        Trial(fuzz_checkpoint, FUZZ_LONG, FUZZ_QUICK),
        Trial(fuzz_sealed, FUZZ_LONG, FUZZ_QUICK),
    ],
    "hostile": [Trial(hostile, {}, {"size": 400_000})],
    "save-points": [Trial(save_points, {}, {"writes": 2})],
    "disk": [Trial(disk, {}, {})],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"trials to run, of {', '.join(TRIALS)} (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer of each, for a look"
    )
    parser.add_argument("--seed", type=int, default=0, help="of fuzz (default: 0)")
    parser.add_argument(
        "--mutations", type=int, metavar="N", help="of each kind of fuzz"
    )
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in TRIALS]
    if unknown:
        parser.error(f"no trial is called {unknown[0]}; there are {', '.join(TRIALS)}")
    pe.use_cpu_devices(1)
    failed = collections.Counter()
    for name in args.names or TRIALS:
        for trial in TRIALS[name]:
            sizes = dict(trial.quick if args.quick else trial.long)
            if name == "fuzz":
                sizes["seed"] = args.seed
                sizes["trials"] = args.mutations or sizes["trials"]
            started = time.perf_counter()
            result = trial.function(**sizes)
            print_result(result, time.perf_counter() - started)
            failed[name] += len(result.failures)
    failed = +failed
    if failed:
        print("failed:", ", ".join(f"{n:,} of {name}" for name, n in failed.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
