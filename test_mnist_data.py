"""Tests of mnist_data.py, in the order of its sections."""

import functools
import gzip
import hashlib
import http.client
import io
import os
import tracemalloc
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mnist_data as md
from conftest import cases, idx, leaves_equal, said_by, small_files, write_files

pytestmark = pytest.mark.once  # CI runs the script itself on other versions of JAX
IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = md.FILES
load_mnist = functools.partial(md.load_data, "mnist")


# ---------------------------------------------------------------------------------
# MNIST's four files
# ---------------------------------------------------------------------------------


GOOD = idx(np.ones((40, 28, 28)))
PACKED = gzip.compress(idx(np.ones(40)), mtime=0)
BAD_FILES = [  # a file, its content, and the message about it
    (IMAGES, b"\0\0\r\3" + GOOD[4:], "begins 0x00000d03; expected 0x00000803, unsi"),
    (IMAGES, idx(np.ones(40)), "begins 0x00000801; expected 0x00000803, unsigned"),
    (IMAGES, b"", "the file begins 0x; expected 0x00000803"),
    (IMAGES, GOOD[:15], "buffer is smaller than requested size"),
    (IMAGES, GOOD + b"\0", "cannot reshape array of size 31361 into shape (40,28,28)"),
    (IMAGES, idx(np.ones((0, 28, 28))), "holds [0, 28, 28]; expected 1 or more"),
    (IMAGES, idx([], dims=(2**32 - 1,) * 3), "size 0 into shape (4294967295,429496729"),
    (LABELS, idx(np.ones(39)), "39 labels for 40 images"),
    (LABELS, idx(np.ones(40)), "every label is 1; expected several"),
    (TEST_IMAGES, idx(np.ones((20, 7, 8))), "7 x 8; training images are 28 x 28"),
    (TEST_LABELS, idx(np.ones(9)), "9 labels for 20 images"),
    (TEST_LABELS, idx([1] * 19 + [77]), "label 77 is not in train-labels-idx1"),
]
BAD_FILES += [(f"{name}.gz", gzip.compress(x), said) for name, x, said in BAD_FILES]
BAD_FILES += [
    (f"{LABELS}.gz", PACKED[:-8], "ended before the end-of-stream"),
    (f"{LABELS}.gz", PACKED[:-8] + bytes(4) + PACKED[-4:], "CRC check failed"),
    (f"{LABELS}.gz", b"\0" + PACKED, "Not a gzipped file"),
    (f"{LABELS}.gz", PACKED[:10] + b"\7" + PACKED[11:], "while decompressing data"),
    (f"{LABELS}.gz", PACKED + gzip.compress(b"x"), "size 41 into shape (40,)"),
]


@pytest.mark.parametrize("case", BAD_FILES, ids=lambda case: f"{case[0]}: {case[2]}")
def test_bad_file_is_named(tmp_path, case):
    name, content, message = case
    plain = name.removesuffix(".gz")
    contents = dict(small_files())
    del contents[plain]
    contents[name] = content
    said = said_by(ValueError, load_mnist, write_files(tmp_path, contents))
    assert message in said and "\n" not in said
    assert said.startswith(f"{tmp_path}") and plain in said


@pytest.fixture
def mirrors(monkeypatch):
    """Replace the network; return its answers (bytes or errors) and the requests."""
    answers = {}
    asked = []
    files = {}
    for name, content in small_files().items():
        files[name] = hashlib.sha256(content).hexdigest()
        for mirror in md.MIRRORS:
            answers[f"{mirror}{name}.gz"] = gzip.compress(content)
    monkeypatch.setattr(md, "FILES", files)
    monkeypatch.setattr(md, "MAX_DOWNLOAD", 2**20)

    def urlopen(url, timeout):
        assert timeout == md.TIMEOUT
        asked.append(url)
        if isinstance(answers[url], Exception):
            raise answers[url]
        return io.BytesIO(answers[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return answers, asked


def test_missing_file_is_not_taken_from_another_data_set(tmp_path, mirrors):
    _, asked = mirrors
    said = said_by(ValueError, load_mnist, write_files(tmp_path, {IMAGES: GOOD}))
    assert f"{LABELS} is missing, and {IMAGES} is not" in said and not asked


OTHER = [
    urllib.error.URLError("no route"),
    TimeoutError("timed out"),
    http.client.IncompleteRead(b""),
    b"",
    b"<html>",
    PACKED,  # a sound file of other content
    gzip.compress(bytes(2**24), 1, mtime=0),  # more than is unpacked
    bytes(2**24),  # more than is read
]


@pytest.mark.parametrize("answer", OTHER, ids=lambda answer: repr(answer)[:40])
def test_missing_files_are_fetched_once(tmp_path, capsys, mirrors, elsewhere, answer):
    answers, asked = mirrors
    first, second = (f"{mirror}{LABELS}.gz" for mirror in md.MIRRORS)
    answers[first] = answer
    folder = tmp_path / "a" / "b"
    tracemalloc.start()
    data = load_mnist(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.name == "MNIST" and peak < 4e6
    assert leaves_equal(data[1:], md.generate_digits(3, 40, 20)[1:])
    assert {path.stem for path in folder.iterdir()} == set(small_files())
    assert len(asked) == 5 and asked[asked.index(first) + 1] == second
    assert capsys.readouterr().out == "".join(f"downloading {url}\n" for url in asked)
    assert leaves_equal(load_mnist(str(folder))[1:], data[1:]) and len(asked) == 5


@pytest.mark.skipif(not os.environ.get("MNIST_DIR"), reason="MNIST_DIR is not set")
def test_mnists_own_files_are_recognized(capsys, monkeypatch):
    monkeypatch.setattr(md, "download", None)
    data = load_mnist(os.environ["MNIST_DIR"])
    assert data.name == "MNIST" and capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------
# Generated digits
# ---------------------------------------------------------------------------------


def test_generated_digits_have_mnists_form_and_depend_on_the_seed():
    data = md.generate_digits(0, 2500, 1200)
    shapes = [(2500, 28, 28, 1), (2500,), (1200, 28, 28, 1), (1200,)]
    assert [leaf.shape for leaf in data[1:5]] == shapes
    assert data.train_images.dtype == np.uint8 and data.test_labels.dtype == np.int32
    assert np.bincount(data.train_labels, minlength=10).min() > 180
    assert (data.train_images.max(axis=(1, 2, 3)) > 128).all()
    ink = data.train_images[..., 0].mean(axis=0)
    ink = ink / ink.sum()
    at = np.arange(28) - 13.5
    height = np.sqrt(ink.sum(axis=1) @ at**2)
    width = np.sqrt(ink.sum(axis=0) @ at**2)
    slant = at @ ink @ at
    ones = data.train_images[data.train_labels == 1]
    spread = ones[:, 7:21, 7:21].std(axis=0).mean()  # among the drawings of a digit
    sizes = [height, width, slant, spread]
    assert_allclose(sizes, [5.887, 4.255, -7.48, 69.2], rtol=0.01)
    fewer = md.generate_digits(0, 700, 10)
    other = md.generate_digits(1, 700, 10)
    assert_array_equal(fewer.train_images, data.train_images[:700])
    assert_array_equal(fewer.test_labels, data.test_labels[:10])
    assert (other.train_images != fewer.train_images).any(axis=(1, 2, 3)).all()
    assert not np.array_equal(data.train_labels[:1200], data.test_labels)


# ---------------------------------------------------------------------------------
# The choice between the two
# ---------------------------------------------------------------------------------


def test_auto_falls_back_where_mnist_fails(tmp_path, mirrors, capsys, monkeypatch):
    answers, _ = mirrors
    answers.update(dict.fromkeys(answers, urllib.error.URLError("no route to host")))
    first, second = (f"{mirror}{IMAGES}.gz" for mirror in md.MIRRORS)
    answers[second] = gzip.compress(b"something else entirely")
    monkeypatch.setattr(md, "generate_digits", lambda seed: f"digits {seed}")
    assert md.load_data("auto", tmp_path) == "digits 0"
    message = said_by(md.DownloadError, load_mnist, tmp_path)
    assert f"notice: the digits are generated: {message}" in capsys.readouterr().out
    assert message.startswith(f"{tmp_path / IMAGES} is missing, and no mirror has")
    assert f"{first}: <urlopen error no route to host>" in message
    assert f"{second}: the content is not MNIST's: its SHA-256 differs" in message
    assert not list(tmp_path.iterdir())
    write_files(tmp_path, {IMAGES: b"damaged"})
    assert "begins 0x64616d61" in said_by(ValueError, md.load_data, "auto", tmp_path)
    assert md.load_data("generated", tmp_path) == "digits 0"
    said = said_by(ValueError, md.load_data, "other")
    assert said == "source is 'other'; expected one of auto, mnist, generated"


@cases(
    "cache, mnist, expected",
    ("", "", "/me/.cache/pjax_ensemble"),
    ("/cache", "", "/cache/pjax_ensemble"),
    ("/cache", "digits", "digits"),
)
def test_default_folder_follows_the_environment(monkeypatch, cache, mnist, expected):
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("MNIST_DIR", mnist)
    monkeypatch.setattr(md, "load_files", lambda folder: folder)
    assert md.load_data() == Path(expected).absolute()
