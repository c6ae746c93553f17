"""MNIST from its four files, which are downloaded if they are missing, or drawn digits.

    import mnist_data

    data = mnist_data.load_data()  # MNIST, or drawn digits if it cannot be downloaded
    data.train_images  # uint8 [60000, 28, 28, 1]
    data.train_labels  # int32 [60000]

The files may hold another data set in MNIST's form, with images of any size and any
labels.  `train_mnist.py` loads its data from here.  This file needs NumPy and, to write
a downloaded file, `pjax_ensemble.py`.  It contains, in order: MNIST's files, generated
digits, and the choice between the two.
"""

import gzip
import hashlib
import http.client
import os
import urllib.request
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pjax_ensemble as pe

# ---------------------------------------------------------------------------------
# MNIST's four files, from a folder or a mirror
# ---------------------------------------------------------------------------------


class DownloadError(OSError):
    """A file is missing, and no mirror has delivered it."""


class Dataset(NamedTuple):
    name: str
    train_images: np.ndarray  # uint8 [N, H, W, 1]
    train_labels: np.ndarray  # int32 [N], indices into classes
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: np.ndarray  # [C], the labels of the training file, sorted


# SHA-256 of MNIST's files, uncompressed, since mirrors compress them differently.
SHA256SUMS = """
train-images-idx3-ubyte ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
train-labels-idx1-ubyte 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
t10k-images-idx3-ubyte 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
t10k-labels-idx1-ubyte ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
"""
FILES = dict(map(str.split, SHA256SUMS.strip().splitlines()))
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
MAX_DOWNLOAD = 2**26  # bytes, packed and unpacked; MNIST's largest file has 2**25.5
TIMEOUT = 30  # seconds to wait for the next byte


def read_idx(path: Path) -> tuple[np.ndarray, str]:
    """Return an IDX file's array, uint8 [N] or [N, H, W], and its content's SHA-256.

    The header has two zero bytes, the type (8 for unsigned bytes), the number of
    dimensions, and each dimension as a big-endian 32-bit number.  Raises ValueError.
    """
    num_dims = 3 if "images" in path.name else 1
    magic = bytes((0, 0, 8, num_dims))
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        if content[:4] != magic:
            raise ValueError(
                f"the file begins 0x{content[:4].hex()}; expected 0x{magic.hex()}, "
                f"unsigned bytes in {num_dims} dimensions"
            )
        shape = np.frombuffer(content, ">u4", num_dims, offset=4)
        if not shape.all():
            raise ValueError(f"the file holds {shape.tolist()}; expected 1 or more")
        values = np.frombuffer(content, np.uint8, offset=4 + shape.nbytes)
        return values.reshape(shape), hashlib.sha256(content).hexdigest()
    # gzip raises these errors for a file cut short, another format or a wrong checksum;
    # NumPy raises ValueError for fewer or more bytes than the header declares.
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def download(folder: Path, name: str) -> Path:
    """Download one of MNIST's files into `folder`, verified; leave no partial file.

    Returns its path.  Raises DownloadError, which gives each mirror's reason.
    """
    path = folder / f"{name}.gz"
    failures = []
    for mirror in MIRRORS:
        url = f"{mirror}{path.name}"
        print(f"downloading {url}", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                packed = response.read(MAX_DOWNLOAD)
            content = zlib.decompressobj(wbits=31).decompress(packed, MAX_DOWNLOAD)
            if hashlib.sha256(content).hexdigest() != FILES[name]:
                raise ValueError("the content is not MNIST's: its SHA-256 differs")
            folder.mkdir(parents=True, exist_ok=True)
            with pe.replace_file(path) as file:
                file.write(packed)
            return path
        except (OSError, http.client.HTTPException, zlib.error, ValueError) as error:
            failures.append(f"{url}: {error}")
    raise DownloadError(
        f"{folder / name} is missing, and no mirror has delivered it: "
        f"{'; '.join(failures)}"
    )


def check_fit(folder: Path, arrays: list[np.ndarray]) -> None:
    """Raise ValueError if a data set's four files do not fit each other."""
    _, labels_name, test_images_name, test_labels_name = FILES
    images, labels, test_images, test_labels = arrays
    for name, x, y in (
        (labels_name, images, labels),
        (test_labels_name, test_images, test_labels),
    ):
        if len(x) != len(y):
            raise ValueError(f"{folder / name}: {len(y)} labels for {len(x)} images")
    if (labels == labels[0]).all():
        raise ValueError(
            f"{folder / labels_name}: every label is {labels[0]}; expected several"
        )
    strange = np.setdiff1d(test_labels, labels)
    if strange.size:
        raise ValueError(
            f"{folder / test_labels_name}: label {strange[0]} is not in {labels_name}"
        )
    size = " x ".join(map(str, images.shape[1:]))
    test_size = " x ".join(map(str, test_images.shape[1:]))
    if test_size != size:
        raise ValueError(
            f"{folder / test_images_name}: images are {test_size}; training images "
            f"are {size}"
        )


def load_files(folder: Path) -> Dataset:
    """Load the four files from `folder`, and download MNIST's that are missing.

    Raises as `load_data` does.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder")
    places = [folder / f"{name}{end}" for end in (".gz", "") for name in FILES]
    paths = {path.name.removesuffix(".gz"): path for path in places if path.exists()}
    read = {name: read_idx(paths[name]) for name in FILES if name in paths}
    foreign = [name for name, (_, sha) in read.items() if sha != FILES[name]]
    missing = [name for name in FILES if name not in read]
    if missing and foreign:
        raise ValueError(
            f"{folder}: {missing[0]} is missing, and {foreign[0]} is not MNIST's; add "
            "the file of the same data set"
        )
    read |= {name: read_idx(download(folder, name)) for name in missing}
    arrays = [read[name][0] for name in FILES]
    check_fit(folder, arrays)
    images, labels, test_images, test_labels = arrays
    classes = np.unique(labels)
    name = "MNIST"
    if foreign:
        print(f"notice: {folder} holds other data than MNIST: {', '.join(foreign)}")
        name = f"data in MNIST's form from {folder}"
    return Dataset(
        name,
        images[..., None],
        np.searchsorted(classes, labels).astype(np.int32),
        test_images[..., None],
        np.searchsorted(classes, test_labels).astype(np.int32),
        classes.astype(int),
    )


# ---------------------------------------------------------------------------------
# Generated digits, for a machine that has neither MNIST nor a network
# ---------------------------------------------------------------------------------


SIDE = 28  # pixels along each side of an image
CHUNK = 1000  # images drawn together, from one random stream
STEPS = 72  # points along the pen's path

# The ways of writing each digit, with eight knots each.  A pair such as "27" is a knot,
# 2 across and 7 down, that attracts the pen.  A pair written twice makes a corner.
STROKES = {
    0: "50 10 09 39 89 80 50 30; 70 20 08 49 98 80 40 30; 50 20 18 39 79 70 50 30",
    1: "50 50 50 55 59 59 59 59; 23 23 50 50 55 59 59 59; 24 50 50 59 59 29 29 89",
    2: "12 20 80 94 57 19 19 99; 12 30 90 74 19 08 28 99; 11 50 90 75 09 09 59 88",
    3: "10 90 94 44 44 96 79 09; 10 80 80 44 96 99 39 08; 11 60 93 34 34 97 79 07",
    4: "20 15 15 95 61 61 69 69; 60 06 06 96 60 60 69 69; 10 06 65 80 80 74 69 69",
    5: "80 20 20 14 83 99 39 08; 90 20 14 14 94 89 29 08; 80 20 14 74 97 89 29 08",
    6: "70 30 05 19 89 94 34 17; 60 26 19 79 87 64 35 17; 80 30 07 39 99 84 24 08",
    7: "10 10 80 80 55 49 49 49; 10 80 90 90 65 39 39 39; 12 10 80 80 55 39 39 39",
    8: "60 10 14 88 49 17 84 60; 70 20 13 88 29 17 83 70; 50 11 24 89 29 16 73 60",
    9: "82 70 10 15 75 82 81 79; 80 20 15 75 81 89 29 18; 81 30 14 65 81 81 75 69",
}
WAYS = [(label, way.split()) for label in STROKES for way in STROKES[label].split(";")]


def spline(num_knots: int) -> np.ndarray:  # [STEPS, num_knots]
    """Return the weights of knots at each point of the pen's path.

    The path is a uniform cubic B-spline, which weights knots by their distance.
    """
    points = np.linspace(0, num_knots - 1, STEPS)
    far = np.abs(points[:, None] - np.arange(num_knots))
    pull = np.where(far < 1, 4 - 6 * far**2 + 3 * far**3, (2 - far).clip(0) ** 3)
    return np.float32(pull / pull.sum(axis=1, keepdims=True))


def draw_digits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 [CHUNK, SIDE, SIDE, 1] and labels int32 [CHUNK]."""

    def normal(mean, spread, *shape):
        return mean + spread * rng.standard_normal((CHUNK, *shape), np.float32)

    def bell(centers, width):  # [CHUNK, STEPS] -> [CHUNK, STEPS, SIDE]
        far = centers[..., None] - np.arange(SIDE, dtype=np.float32)
        squares = (far / width) ** 2
        return np.exp(-0.5 * squares.clip(max=40))  # clipped: denormals are slow

    labels = np.array([label for label, _ in WAYS], np.int32)
    knots = np.float32([[list(map(int, knot)) for knot in way] for _, way in WAYS])
    num_knots = knots.shape[1]

    way = rng.integers(len(WAYS), size=CHUNK)
    haste = np.exp(normal(-0.7, 0.45, 1, 1))  # most digits are neat, a few scrawled
    moved = knots[way] - 4.5 + haste * normal(0, 1, num_knots, 2)
    across, down = np.moveaxis(spline(num_knots) @ moved, 2, 0)
    x = across * normal(1.6, 0.2, 1)  # from knots to pixels
    y = down * normal(1.9, 0.15, 1)
    x = x - y * normal(0.2, 0.2, 1)  # slant
    turn = normal(0, 0.12, 1)
    turned_x = x * np.cos(turn) - y * np.sin(turn)
    turned_y = x * np.sin(turn) + y * np.cos(turn)
    x = turned_x + normal(SIDE / 2 - 0.5, 1, 1)
    y = turned_y + normal(SIDE / 2 - 0.5, 1, 1)

    # A dab of ink is a bell down times a bell across; a matrix product sums the dabs.
    width = np.exp(normal(-0.2, 0.2, 1, 1))
    speed = np.hypot(np.gradient(x, axis=1), np.gradient(y, axis=1))
    dab = 0.9 * speed[..., None]
    dabs_down = bell(y, width) * dab / width
    ink = dabs_down.swapaxes(1, 2) @ bell(x, width)
    ink = np.tanh(ink**2) * normal(1, 0.1, SIDE, SIDE)  # saturated, on rough paper
    return np.uint8(255 * ink.clip(0, 1))[..., None], labels[way]


def generate_digits(seed: int, num_train=60_000, num_test=10_000) -> Dataset:
    """Draw white digits on black, in MNIST's shapes and types.

    Equal seeds draw equal digits, and a smaller set is the start of a larger one.  No
    label is wrong; hasty writing makes some digits hard.
    """

    def draw(part, count):
        starts = range(0, max(count, 1), CHUNK)
        rngs = [np.random.default_rng([seed, part, start]) for start in starts]
        images, labels = zip(*map(draw_digits, rngs))
        return np.concatenate(images)[:count], np.concatenate(labels)[:count]

    train_images, train_labels = draw(0, num_train)
    test_images, test_labels = draw(1, num_test)
    return Dataset(
        "generated digits",
        train_images,
        train_labels,
        test_images,
        test_labels,
        np.arange(10),
    )


# ---------------------------------------------------------------------------------
# The choice between the two
# ---------------------------------------------------------------------------------


SOURCES = "auto", "mnist", "generated"


def default_folder() -> Path:
    """Return $MNIST_DIR, or the folder pjax_ensemble in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MNIST_DIR") or cache / "pjax_ensemble").absolute()


def load_data(source="auto", folder: str | os.PathLike | None = None) -> Dataset:
    """Load MNIST, another data set in files of MNIST's form, or generated digits.

    - source: "mnist" reads the four files in `folder`, by default `default_folder()`,
      and downloads the files of MNIST that are missing; "generated" draws digits;
      "auto" draws digits where a file cannot be downloaded.

    Raises DownloadError, an OSError, for a file that is missing and cannot be
    downloaded.  Raises ValueError for another source, for a damaged file, and for files
    that do not fit each other.
    """
    if source not in SOURCES:
        raise ValueError(f"source is {source!r}; expected one of {', '.join(SOURCES)}")
    if source != "generated":
        try:
            return load_files(Path(folder or default_folder()))
        except DownloadError as error:
            if source == "mnist":
                raise
            print(
                f"notice: the digits are generated: {error}; name a folder with the "
                "four files by --data-dir or $MNIST_DIR"
            )
    return generate_digits(seed=0)
