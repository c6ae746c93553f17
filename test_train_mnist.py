"""Tests of train_mnist.py, in the order of its sections."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ensemble_metrics as em
import mnist_data as md
import mnist_run as mr
import pjax_ensemble as pe
import train_mnist as tm
from conftest import ENVIRONMENT, HERE, RUN, D, assert_close, cases, free_port

# isort: split
from conftest import hook, idx, leaves_equal, lines_of, linux, member, posix, said_by

# isort: split
from conftest import small_files, start_python, words, write_files

pytestmark = pytest.mark.once  # CI runs the script itself on other versions of JAX


# ---------------------------------------------------------------------------------
# A data set and a network for short runs
# ---------------------------------------------------------------------------------


SCRIPT = """
import sys
import tiny
import train_mnist as tm

with tiny.known():
    sys.exit(tm.main(sys.argv[1:]))
"""


@pytest.fixture
def script(capsys, small_folder, tiny_network):
    """Return a function that runs the script on small data: status, output, errors."""

    def run(*flags):
        status = tm.main(words("--data-dir", small_folder, *flags))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def metrics_of(folder):
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint_*"))


def name_of(step):
    return f"checkpoint_{step:08d}.safetensors"


def names_of(*steps):
    return list(map(name_of, steps))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


class Results(NamedTuple):
    checkpoint: bytes  # the last one
    metrics: list  # without the times
    report: dict


def results(folder):
    metrics = metrics_of(folder)
    for line in metrics:
        for name in "train_seconds", "test_seconds", "member_images_per_second":
            del line[name]
    return Results((folder / name_of(16)).read_bytes(), metrics, report_of(folder))


# ---------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------


def test_shift_moves_each_image_whole_by_its_own_offset():
    images = np.zeros((64, 9, 9, 1), np.uint8)
    images[:, 4, 4] = 7
    moved = np.asarray(tm.shift_images(jax.random.key(0), jnp.asarray(images), 2))
    assert moved.shape == images.shape and moved.dtype == np.uint8
    assert_array_equal(moved.sum(axis=(1, 2, 3)), np.full(64, 7))
    places = {tuple(p) for p in np.argwhere(moved[..., 0])[:, 1:] - 4}
    assert all(max(map(abs, place)) <= 2 for place in places)
    assert {p for p, _ in places} == {p for _, p in places} == {-2, -1, 0, 1, 2}
    assert len(places) > 15  # of 25, so down and across are drawn separately


# ---------------------------------------------------------------------------------
# Run, its report and its picture
# ---------------------------------------------------------------------------------


def write_set(folder, images, labels):
    """Write a data set: images [N, H, W] and labels, for training and for testing."""
    arrays = [x for part in zip(images, labels) for x in part]
    return write_files(folder, dict(zip(md.FILES, map(idx, arrays))))


def percent(scores):
    return f"{100 * scores['accuracy']:.2f}%"


def check_printed(out, members, metrics, report):
    """Check the lines of the epochs and the final tables."""
    lines = [line for line in out.splitlines() if line.startswith("epoch:")]
    for line, m in zip(lines, metrics, strict=True):
        said = f"epoch: {m['epoch']:2d}"
        for part in "train", "test":
            said += f", {part}_loss: {m[f'{part}_loss']:.4f}"
            said += f", {part}_accuracy: {100 * m[f'{part}_accuracy']:.2f}"
        assert re.fullmatch(rf"{re.escape(said)}, \d+ s, \d+ s left", line)
    tables = [table.splitlines() for table in out.split("\n\n")]
    assert len(tables) == (4 if members > 1 else 2)
    names = ["model"]
    if members > 1:
        names = [f"member {i}" for i in range(members)] + ["ensemble"]
        sizes = zip(tables[2][2:], report["by_size"], strict=True)
        for i, (row, scores) in enumerate(sizes, 1):
            assert row.split()[:3] == ["first", f"{i}", percent(scores)]
    assert [row[:10].strip() for row in tables[1][2:]] == names
    assert percent(report["ensemble"]) in tables[1][-1]


def check_curves(axes, metrics, report):
    """Check the panels in the upper part of the picture."""
    nll, nll_by_size, diagram, accuracy, accuracy_by_size, histogram = axes
    numbers = [m["epoch"] for m in metrics]
    for epochs, sizes, key, factor, name, whole in [
        (nll, nll_by_size, "negative_log_likelihood", 1, "loss", "ensemble_test_loss"),
        (accuracy, accuracy_by_size, "accuracy", 100, "accuracy", "test_accuracy"),
    ]:
        columns = f"member_test_{name}", f"train_{name}", whole
        scores = [np.hstack([m[column] for column in columns]) for m in metrics]
        lines = np.array([x.get_xydata() for x in epochs.lines])
        assert_allclose(lines[..., 1], factor * np.transpose(scores))
        assert (lines[..., 0] == numbers).all()
        assert list(lines_of(epochs))[-2:] == ["on training images", "ensemble"]
        shown = [[k, factor * m[key]] for k, m in enumerate(report["by_size"], 1)]
        assert_allclose(sizes.lines[1].get_xydata(), shown)
    low, high = nll.get_xlim()
    assert {x for x in nll.get_xticks() if low <= x <= high} == set(numbers)
    assert {x.get_marker() for x in nll.lines} == set("xso")  # a single point shows
    assert set(lines_of(diagram)) == {"members", "ensemble", "calibrated"}
    assert_array_equal(lines_of(diagram)["calibrated"], [[0, 0], [100, 100]])
    assert all(len(each.get_xlabel()) > 4 and each.get_ylabel() for each in axes)
    assert histogram.get_yscale() == "log"
    edges = [bars.get_data().edges for bars in histogram.patches]
    assert_allclose(edges, [np.linspace(0, 100, 16)] * 2)


def check_images(axes, images, labels, probs, classes):
    """Check the picture's images, their labels and the members' votes."""
    unsure = np.argsort(-em.predictive_entropy(probs))[:12]
    for each, i in zip(axes, unsure, strict=True):
        assert each.get_title() == f"label {labels[i]}"
        assert_array_equal(each.get_images()[0].get_array(), images[i])
        votes = []
        for vote in each.get_xlabel().split("  "):
            label, count = vote.split(": ")
            votes += [int(label)] * int(count)
        assert sorted(votes) == sorted(classes[probs[:, i].argmax(axis=-1)])


def train_by_hand(network, members, epochs, optimizer, images, labels):
    """Return the members' last state, from loops without the script's `Run`."""

    def loss_fn(params, stats, key, images, labels):
        shift_key, key = jax.random.split(key)
        images = tm.shift_images(shift_key, images, 1).astype(jnp.float32) / 255
        logits, stats = network.logits(params, stats, images, key)
        return pe.softmax_cross_entropy(logits, labels).mean(), stats

    def init(key):
        return network.init(key, image_shape=images.shape[1:], num_classes=10)

    trainer = pe.make_trainer(
        init,
        loss_fn,
        optimizer,
        members=members,
        devices=2,
        stateful=True,
        microbatch="auto",
    )
    state = trainer.init(jax.random.key(3))
    for epoch in range(epochs):
        order = pe.epoch_order(
            len(images), 16, members=members, epoch=epoch, seed=3, bootstrap=True
        )
        state, _ = trainer.epoch(state, (images, labels), order)
    return trainer.gather(state)


@cases(
    "members, network, epochs, optimizer",
    (3, "tiny", 3, pe.adam(0.03)),
    (
        1,
        "cnn --mode sync --momentum 0.5",
        1,
        pe.sgd(pe.linear_schedule(0.03, 48), momentum=0.5),
    ),
)
def test_run_learns_oblong_images_in_the_bits_of_training_by_hand(
    tmp_path, script, drawn, members, network, epochs, optimizer
):
    data = md.generate_digits(3, 768, 200)
    images = [x[:, ::2, ::3, 0] for x in (data.train_images, data.test_images)]
    labels = [28 * x + 3 for x in (data.train_labels, data.test_labels)]
    folder = write_set(tmp_path / "data", images, labels)
    runs = tmp_path / "a" / "b"
    flags = (
        f"--members {members} --network {network} --epochs {epochs} --devices 2 "
        "--batch-size 16 --learning-rate 0.03 --max-shift 1 --bootstrap --seed 3"
    )
    status, out, err = script(flags, "--plot --data-dir", folder, "--workdir", runs)
    assert (status, err) == (0, "")
    trained = train_by_hand(
        tm.NETWORKS[network.split()[0]],
        members,
        epochs,
        optimizer,
        images[0][..., None],
        data.train_labels,
    )
    assert leaves_equal(pe.load(runs / name_of(48 * epochs), trained), trained)
    report = report_of(runs)
    metrics = metrics_of(runs)
    assert "768 training and 200 test images of 14 x 10, 10 classes" in out
    assert [m["epoch"] for m in metrics] == list(range(1, epochs + 1))
    for m in metrics:
        assert m["train_seconds"] > 0 < m["test_seconds"]
        assert_allclose(
            m["member_images_per_second"], members * 768 / m["train_seconds"]
        )
    assert metrics[-1]["test_accuracy"] > 0.5 > 0.2 + metrics[0]["test_loss"] / 10
    assert report["dataset"].startswith("data in MNIST's form")
    assert report["test_examples"] == 200 and report["members"] == members
    assert report["config"]["batch_size"] == 16 and report["config"]["devices"] == 2
    assert report["versions"]["jax"] == jax.__version__
    run = tm.load_run(runs, 2)
    form = {"classes": list(range(3, 256, 28)), "image_shape": [14, 10, 1]}
    assert run.config.items() >= form.items() <= report["config"].items()
    probs = run.predict_members(images[1])
    found = run.classes[probs.mean(axis=0).argmax(axis=-1)]
    assert np.mean(found == labels[1]) == report["ensemble"]["accuracy"]
    check_printed(out, members, metrics, report)
    assert (runs / "report.png").read_bytes().startswith(b"\x89PNG")
    upper, lower = drawn().subfigs
    check_curves(upper.axes, metrics, report)
    check_images(lower.axes, images[1], labels[1], probs, run.classes)


def test_failed_member_is_left_out(tmp_path, script, small_folder, drawn, monkeypatch):
    def spoiled(trainer, key, init=pe.Trainer.init):
        gathered = trainer.gather(init(trainer, key))
        gathered.params[2].bias[1] = np.nan
        return trainer.scatter(gathered)

    monkeypatch.setattr(pe.Trainer, "init", spoiled)
    flags = "--members 3 --devices 2 --epochs 2 --network tiny --plot --workdir"
    status, out, _ = script(flags, tmp_path)
    assert status == 0
    notice = "member 1 is not finite after epoch 1; its loss was not finite in 12 of "
    assert out.count("notice: member") == 1 and notice in out
    assert out.index(notice) < out.index("epoch:  1,")
    rows = {row[:8]: row for row in out.splitlines()}
    assert "failed" in rows["member 1"] and "%" in rows["member 2"]
    assert "%" in rows["first 2 "] and "first 3 " not in rows
    report = report_of(tmp_path)
    assert report["failed"] == [1] and report["members"] == 3
    assert report["member"][1] is None and len(report["by_size"]) == 2
    assert report["ensemble"] == report["by_size"][1]
    data = md.load_data("mnist", small_folder)
    probs = tm.load_run(tmp_path, 2).predict_members(data.test_images)  # of two members
    assert probs.shape == (2, 200, 10) and np.isfinite(probs).all()
    assert "an ensemble of 2" in drawn().get_suptitle()
    diagram = drawn().subfigs[0].axes[2]
    for name, p in ("members", np.concatenate(probs)), ("ensemble", probs.mean(axis=0)):
        bins = np.stack(em.reliability(p, np.resize(data.test_labels, len(p))))
        n, confidence, accuracy = bins[:, bins[0] > 0]
        shown = lines_of(diagram)[name]
        assert_allclose(shown, 100 * np.transpose([confidence, accuracy]))
    # A bar ends at the shares p that are one standard error from the accuracy found.
    bars = np.array(diagram.collections[0].get_segments())
    p = bars[..., 1].T / 100
    assert_allclose((p - accuracy) ** 2, p * (1 - p) / n, atol=1e-12)


# After step 1 only the state is not finite, and the loss from step 2 on.  A save checks
# the state.  Without saves, as in the second case, only the evaluation finds it.  The
# third skips steps, so its state stays finite.
@pytest.mark.filterwarnings("ignore:overflow")
@cases(
    "flags, step, kept",
    ("1e39 --workdir DIR --save-every .125", 1, [0]),
    ("1e39 --skip-nonfinite", 8, []),
    ("1e36 --workdir DIR --skip-nonfinite --save-every .25 --keep 2", 8, [0, 6, 8]),
)
def test_diverged_run_keeps_a_good_checkpoint(tmp_path, script, flags, step, kept):
    flags = f"{RUN} --learning-rate {flags}".replace("DIR", str(tmp_path))
    status, _, err = script(flags)
    said = f"no model is finite after step {step}; lower --learning-rate"
    if kept:
        said += " (the checkpoint of step 0 is good)"
    assert status == 3 and err == f"train_mnist.py: error: {said}\n"
    assert checkpoints(tmp_path) == names_of(*kept)
    assert not (tmp_path / "report.json").exists()
    if len(kept) > 1:  # a resumed run knows no good one
        (tmp_path / name_of(0)).unlink()
        status, _, err = script(flags, "--resume")
        assert status == 3 and "good" not in err
        assert checkpoints(tmp_path) == names_of(6, 8)


def stop_at(monkeypatch, step, how=signal.SIGTERM, looks=1):
    """Send a signal to a run, whose segments then have one step, after a given step.

    The run looks for signals after the step, and then after each part of an evaluation.
    The signal comes just before the given number of these looks.
    """
    left = itertools.count(1 - looks)

    def stop(run):
        if run.done == step and next(left) == 0:
            signal.raise_signal(how)

    hook(monkeypatch, mr.Run, "look", stop)
    monkeypatch.setattr(pe, "time", clock_of(100))


def clock_of(seconds):
    """Make a clock by which each segment takes so many seconds."""
    ticks = itertools.count()
    return mock.Mock(perf_counter=lambda: seconds * next(ticks))


STOPPING = signal.SIGTERM, signal.SIGINT
STOPS = [  # step, looks, signal
    (3, 1, signal.SIGTERM),
    (7, 1, signal.SIGINT),
    (8, 3, signal.SIGTERM),  # during the epoch's evaluation
    (11, 1, signal.SIGINT),
]


def test_resumed_run_ends_in_the_bits_of_one_that_was_never_stopped(
    tmp_path, elsewhere, script, whole_run, monkeypatch
):
    flags = f"{RUN} --save-every .375 --keep 9"  # saves every 3 steps
    for step, looks, how in STOPS:
        stop_at(monkeypatch, step, how, looks)
        status, out, err = script(flags, "--workdir", tmp_path)
        monkeypatch.undo()
        assert status == 128 + how and err.count("\n") == 1
        said = f"train_mnist.py: {how.name}: the run is saved in {tmp_path}; --resume"
        assert err.startswith(said)
        assert checkpoints(tmp_path)[-1] == name_of(step)
        assert ("epoch:" in out) == (step > 8)
        flags = "--resume --devices 2 --keep 9"  # the others are the run's
    bars = []
    lengths = []
    hook(monkeypatch, mr, "progress_bar", lambda *given: bars.append(given))
    hook(monkeypatch, mr.Run, "note", lambda _, x: lengths.append(x.losses.shape[1]))
    monkeypatch.setattr(pe, "time", clock_of(0.5))  # two steps in a second
    with open(tmp_path / name_of(0)):  # an open file stays, and the run continues
        status, out, _ = script("--resume --devices 1 --keep 1 --workdir", tmp_path)
    assert status == 0 and f"resumed from {tmp_path / name_of(11)}" in out
    assert bars[0] == ("epoch 2 of 2", 512, 192)  # images, and those before
    assert lengths == [3, 1, 2, 1, 1]  # step 9 to 11, and on; saves after 12 and 15
    assert checkpoints(tmp_path) == names_of(0, 16)
    expected = results(whole_run)
    expected.report["config"] |= pe.layout(2, 1)._asdict()
    assert results(tmp_path) == expected


def set_terminal(monkeypatch, out=True, err=True):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err)


def test_progress_bar_is_drawn_on_a_terminal(tmp_path, script, monkeypatch):
    tqdm = pytest.importorskip("tqdm").tqdm
    counts = []
    hook(monkeypatch, tqdm, "update", lambda bar, count: counts.append(count))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    set_terminal(monkeypatch)
    _, out, err = script("--network tiny --devices 2 --epochs 1")
    assert "epoch 1 of 1:   0%" in err and "predicting:   0%" in err
    assert "/1.54k [" in err and "images/s" in err  # 768 images, two members
    assert sum(counts) == 1536 + 2 * (200 + 100)  # predicted: 200 and 100 images
    assert err.endswith("\r")  # the bar is erased
    compiles, takes, epoch = out.splitlines()[2:5]
    assert compiles == "JAX compiles the training steps, for some seconds"
    assert takes == "training takes about 0 s an epoch"
    assert epoch.startswith("epoch:  1,")
    assert not list(tmp_path.iterdir())  # nothing is written without a workdir


def test_epoch_line_has_the_time_left_after_a_resume_too(tmp_path, script, monkeypatch):
    clock = mock.Mock(now=0, perf_counter=lambda: clock.now)

    def slow(name, seconds):
        def wait(*args):
            clock.now += seconds(args[-1]) + clock.compiling
            clock.compiling = 0

        hook(patch, pe.Trainer, name, wait)

    flags = f"{RUN} --epochs 3"
    times = []
    for step, looks in (2, 1), (24, 3), (0, 1):  # the second in the last evaluation
        with monkeypatch.context() as patch:
            stop_at(patch, step, looks=looks)
            patch.setattr(mr, "time", clock)
            patch.setattr(pe, "time", clock)
            slow("epoch", lambda order: 3 * order.shape[1])
            slow("predict_blocks", lambda images: 0.05 * len(images))
            clock.compiling = 60
            _, out, _ = script(flags, "--workdir", tmp_path)
        times += re.findall(r"accuracy: [\d.]+, (\d+ s.*)", out)
        flags = "--resume --devices 2"
    assert times == ["93 s, 78 s left", "39 s, 39 s left", "75 s"]
    assert [m["train_seconds"] for m in metrics_of(tmp_path)] == [78, 24, 0]


@cases("out, err, found", (False, True, True), (True, False, True), (True, True, None))
def test_progress_bar_is_drawn_nowhere_else(capsys, monkeypatch, out, err, found):
    set_terminal(monkeypatch, out, err)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with mr.progress_bar("predicting", 3) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


@mock.patch.object(tm, "Run", side_effect=mr.Failure("stopped"))
def test_a_notice_says_that_running_statistics_need_more_steps(run, script):
    for flags, share in ("--epochs 1", 38), ("--epochs 3", 6), ("--epochs 4", 0):
        _, out, _ = script("--network batchnorm --batch-size 8", flags)
        said = f"running statistics are {share}% their initial values; take 299"
        assert (said in out) == ("notice: after" in out) == (share > 0)
    assert "notice: after" not in script("--epochs 1")[1]


SPARED = "(6 replicas per model) (a batch of 60 does not split over 8)"
IDLE = "notice: 4 members use 2 of 3 devices: more would be no faster; --members 6 w"


@cases(
    "models, count, rest",  # flags; two texts about devices
    ("--members 4 --devices 3", "an ensemble of 4 on 2", "(2 per device)"),
    ("--members 2", "an ensemble of 2 on 8", "(4 replicas per model)"),
    ("--mode sync --batch-size 60", "one model on 6", SPARED),
)
def test_zero_epochs_report_the_initial_models(
    tmp_path, script, small_folder, models, count, rest
):
    flags = f"--epochs 0 --bootstrap --seed 7 --network tiny {models} --workdir"
    status, out, _ = script(flags, tmp_path)
    notice, line = out.splitlines()[:2]
    assert status == 0 and (IDLE in out) == ("faster" in out) == ("3" in models)
    assert "compiles" not in out
    assert notice.startswith(f"notice: {small_folder} holds other data than MNIST: t")
    assert line.startswith(f"data in MNIST's form from {small_folder}, 768 train")
    said = f"10 classes: {count} of 8 CPU devices {rest}; network tiny, optimizer"
    assert f" 200 test images of 28 x 28, {said}" in line
    assert "learning_rate 0.001, schedule constant, max_shift 0" in line
    assert "bootstrap True, seed 7" in line
    assert f", pjax_ensemble {pe.__version__}, jax" in line
    assert "epoch:" not in out and metrics_of(tmp_path) == []
    assert report_of(tmp_path)["ensemble"]["negative_log_likelihood"] > 1.5


# ---------------------------------------------------------------------------------
# Folder of a run
# ---------------------------------------------------------------------------------


def test_loaded_run_predicts_as_reported_and_recorded(whole_run, small_folder):
    data = md.load_data("mnist", small_folder)
    x = data.test_images
    before = contents(whole_run)
    report = report_of(whole_run)
    metrics = metrics_of(whole_run)[-1]
    others = {"config.json", "metrics.jsonl", "report.json"}
    assert set(before) == {*names_of(0, 8, 16), *others}
    run = tm.load_run(whole_run, 2)  # devices, as in training
    expected = run.predict_members(x)
    test = em.ensemble_report(expected, data.test_labels)
    assert test == {name: report[name] for name in test}
    train_probs = run.predict_members(data.train_images[:100])
    train = em.ensemble_report(train_probs, data.train_labels[:100])
    for part, scored in ("test", test), ("train", train):
        assert metrics[f"{part}_accuracy"] == scored["ensemble"]["accuracy"]
        losses = [scores["negative_log_likelihood"] for scores in scored["member"]]
        assert_allclose(metrics[f"{part}_loss"], np.mean(losses))
    for devices in 2, 1, None:
        run = tm.load_run(str(whole_run), devices)
        assert run.trainer.layout == pe.layout(2, devices or D)
        assert run.trainer.microbatch == "auto"
        assert_close(run.predict_members(x), expected)
        assert_close(run.predict(x[..., 0]), expected.mean(axis=0))
    second = member(run.trainer.gather(run.state)._replace(key=None), 1)
    network = tm.NETWORKS["tiny"]
    logits, _ = network.logits(second.params, second.model_state, np.float32(x / 255))
    assert_close(expected[1], jax.nn.softmax(logits))
    assert run.classes.tolist() == list(range(10)) and run.config["batch_size"] == 32
    assert contents(whole_run) == before
    for images in x / 255, x[:, 1:], x[0, ..., 0], x.astype(int):
        said = f"images are {images.dtype} {list(images.shape)}; expected uint8 [N, 28"
        assert said in said_by(ValueError, run.predict, images)


LAST = name_of(16)
DEEP = "[" * 10**5  # JSON that Python cannot read
DAMAGED = [  # a file of the run, its content or None to remove it, the message
    ("report.json", None, "report.json: No such file or directory; "),
    (LAST, None, "its newest checkpoint is step 8 of 16"),
    ("checkpoint_*", None, "its newest checkpoint is step None of 16"),
    (LAST, "x", "has no digest of save's"),
    (LAST, name_of(0), f"{LAST}: holds step 0, not step 16"),
    ("report.json", "{}", "report.json: 'member' is missing"),
    ("report.json", DEEP, "report.json: maximum recursion depth exceeded"),
    ("report.json", '{"member": 5}', "report.json: 'int' object is not iterable"),
    ("report.json", '{"member": [{}]}', "scores of 1 of 1 members; config.json has 2"),
    ("report.json", '{"member": [null, 5]}', "scores of 0 of 2 members; config.json"),
]
CONFIGS = {
    None: "No such file or directory",
    "{}": "'mode' is missing",
    "{": "Expecting property name",
    "5": "the file does not hold a JSON object",
    '{"network": "x"}': "argument --network: invalid choice: 'x'",
    '{"batch_size": 0}': "argument --batch-size: expected an integer from 1 to 214748",
    '{"seed": [1]}': "argument --seed: expected an integer from 0 to 4294967295, not",
    '{"skip_nonfinite": 2}': "argument --skip-nonfinite: expected true or false, not",
    '{"members": true}': "argument --members: expected an integer from 1 to 214748",
}
DAMAGED += [("config.json", x, f"config.json: {said}") for x, said in CONFIGS.items()]


@pytest.mark.parametrize("name, content, message", DAMAGED)
def test_damaged_run_is_not_loaded(tmp_path, whole_run, name, content, message):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    for path in folder.glob(name):
        path.unlink()
    if content and (whole_run / content[:99]).exists():
        shutil.copy(whole_run / content, folder / name)
    elif content:
        (folder / name).write_text(content)
    flags = f"--resume --workdir {folder}"
    said = said_by(ValueError, tm.load_run, folder)
    assert said.startswith(f"{folder} holds no finished run: ")
    assert message in said and "\n" not in said
    assert said.endswith(f"; continue a run by: python train_mnist.py {flags}")
    if name == "config.json":
        said = said_by(mr.Failure, tm.parse_arguments, words(flags, "--seed 3"))
        assert said.startswith(f"{folder}{os.sep}{message}")


@cases(
    "content, epochs, damaged",  # of metrics.jsonl; epochs read; lines that are not
    ('{"epoch": 1}\n{"epo\n5\n{}\n{"epoch": 4}\n{"epoch": 5}', [1, 4], 3),
    (f'{DEEP}\n{{"epoch": "2"}}\n\xff{{"epoch": 3}}\n{{"epoch": 4}}', [4], 3),
    (None, [], 0),
)
def test_damaged_line_costs_itself_alone(tmp_path, capsys, content, epochs, damaged):
    path = tmp_path / "metrics.jsonl"
    if content:
        path.write_bytes(content.encode("latin-1"))
    assert mr.read_metrics(tmp_path, 4) == [{"epoch": n} for n in epochs]
    assert capsys.readouterr().err.count(f"warning: {path}, line ") == damaged


def test_checkpoint_may_count_fewer_steps_only_if_the_run_skips_steps(tmp_path):
    path = tmp_path / "checkpoint"
    plain = tm.RECIPES["cnn"]
    state = pe.TrainState((), pe.SGDState(np.int32([5, 3]), ()), (), None)
    pe.save(path, state)
    skipping = plain._replace(skip_nonfinite=True)
    assert leaves_equal(mr.load_members(path, 5, state, skipping), state)
    for step, recipe, held in (4, skipping, 5), (5, plain, 3), (3, plain, 5):
        with pytest.raises(ValueError, match=f"holds step {held}, not step {step}"):
            mr.load_members(path, step, state, recipe)


def test_one_command_starts_a_run_and_goes_on(tmp_path, script, monkeypatch):
    flags = RUN, "--resume auto --workdir", tmp_path
    stop_at(monkeypatch, 9)
    status, out, _ = script(*flags)
    assert status == 143 and "resumed" not in out
    status, out, _ = script(*flags)
    assert status == 0 and f"resumed from {tmp_path / name_of(9)}" in out
    ended = results(tmp_path)
    status, out, _ = script(*flags)
    assert status == 0 and f"resumed from {tmp_path / name_of(16)}" in out
    assert results(tmp_path) == ended
    status, _, err = script(*flags, "--seed 5")
    assert status == 2 and "seed is 5 here, 0 there" in err


@posix
def test_run_resumes_from_its_newest_valid_checkpoint(tmp_path, script, whole_run):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    middle = folder / name_of(8)
    last = folder / name_of(16)
    content = last.read_bytes()
    last.write_bytes(content[:-9] + b"x" + content[-8:])
    (folder / name_of(15)).symlink_to(middle)
    shutil.copy(middle, folder / name_of(12))
    (folder / "checkpoint_9.safetensors").write_text("another program's")
    metrics = folder / "metrics.jsonl"
    first_line, _ = metrics.read_text().splitlines()
    later = '\n{"epoch": 2}\n{"epoch": 3, "trai'  # lines later than the checkpoint
    metrics.write_text(first_line + later)
    leftovers = [
        folder / f".{name}.1a2b3c4d.tmp" for name in (name_of(0), "report.png")
    ]
    write_files(folder, dict.fromkeys(leftovers, b"half a file"))
    status, out, err = script(RUN, "--resume --keep 1 --workdir", folder)
    assert status == 0 and f"resumed from {middle}" in out
    assert err.count("warning: skipped") == 3 and "damaged" in err
    assert f"{name_of(12)}: holds step 8, not step 12" in err
    assert f"{name_of(15)}: not a regular file" in err
    assert results(folder) == results(whole_run)
    assert checkpoints(folder) == [last.name, "checkpoint_9.safetensors"]
    assert not any(path.exists() for path in leftovers)
    assert contents(folder)["config.json"] == contents(whole_run)["config.json"]


FORMAT_1 = Path(tm.__file__).parent / "formats" / "1"


def test_runs_of_format_1_are_resumed_and_loaded(tmp_path, script):
    nll = "negative_log_likelihood"
    expected = results(FORMAT_1 / "finished")
    scores = [expected.report["ensemble"][nll], expected.metrics[1]["test_loss"]]
    data = md.load_data("mnist", FORMAT_1 / "data")
    for name, step in ("stopped", 12), ("finished", 16):
        folder = shutil.copytree(FORMAT_1 / name, tmp_path / name)
        flags = "--resume --devices 2 --keep 9 --data-dir", FORMAT_1 / "data"
        status, out, err = script(*flags, "--workdir", folder)
        assert (status, err) == (0, "")
        assert f"resumed from {folder / name_of(step)}" in out
        found = results(folder)
        assert [line["epoch"] for line in found.metrics] == [1, 2]
        last = [found.report["ensemble"][nll], found.metrics[1]["test_loss"]]
        assert_allclose(last, scores, rtol=1e-4)
    for path in folder, FORMAT_1 / "finished":
        probs = tm.load_run(path, 1).predict_members(data.test_images)
        report = em.ensemble_report(probs, data.test_labels)
        assert_allclose(report["ensemble"][nll], scores[0], rtol=1e-4)


def test_fields_of_later_versions_are_named(tmp_path, script):
    folder = shutil.copytree(FORMAT_1 / "stopped", tmp_path / "run")
    flags = "--resume --devices 2 --data-dir", FORMAT_1 / "data", "--workdir", folder
    for name in "metrics.jsonl", "config.json":
        path = folder / name
        content = path.read_text()
        path.write_text(content.replace("{", '{"more": 1, ', 1))
        status, _, err = script(*flags)
        said = f"{path} has 'more', which pjax_ensemble {pe.__version__} does not know"
        assert status == 2 and said in err and err.count("\n") == 1
        path.write_text(content)
    assert checkpoints(folder) == names_of(8, 12)
    assert "weight_decay" not in (FORMAT_1 / "stopped" / "config.json").read_text()
    assert tm.read_config(FORMAT_1 / "stopped")[0].weight_decay == 1e-4


CHANGES = (
    ("--epochs 3", "epochs is 3 here, 2 there"),
    ("--skip-nonfinite", "skip_nonfinite is True here, False there"),
    ("--members 1 --mode sync", "mode is sync here, ensemble there"),
)


@cases("flags, said", *CHANGES)
def test_resume_refuses_other_settings(whole_run, flags, said):
    flags = words("--resume --workdir", whole_run, flags)
    expected = f"--resume from {whole_run}: {said}; {mr.OTHER_RUN}"
    assert said_by(mr.Failure, tm.parse_arguments, flags) == expected


def test_resume_refuses_other_data_and_damaged_checkpoints(tmp_path, script, whole_run):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    path = folder / "config.json"
    config = path.read_text()
    other = f"--resume from {folder}: dataset_sha256 is "
    damaged = f"--resume: none of 3 checkpoints in {folder} is valid"
    for said, sha256 in (other, 'sha256": "0'), (damaged, 'sha256": "'):
        path.write_text(config.replace('sha256": "', sha256))
        before = contents(folder)
        status, _, err = script("--resume --workdir", folder)
        assert status == 2 and f"error: {said}" in err and before == contents(folder)
        for checkpoint in folder.glob("checkpoint_*"):
            checkpoint.write_bytes(checkpoint.read_bytes()[:1000])


@posix
def test_folder_belongs_to_one_run(tmp_path, script):
    with mr.locked(tmp_path):
        status, out, err = script(RUN, "--workdir", tmp_path)
    assert status == 2 and f"in use by process {os.getpid()} on" in err and not out
    for name in "metrics.jsonl", "report.json":
        (tmp_path / name).write_text("{}")
        status, out, err = script(RUN, "--workdir", tmp_path)
        assert status == 2 and f"holds {name} of an earlier run" in err and not out
    assert list(contents(tmp_path).values()) == [b"{}"] * 2
    with mr.locked(tmp_path):  # the refused run no longer holds the lock
        pass


# ---------------------------------------------------------------------------------
# Processes, and the signals that they receive
# ---------------------------------------------------------------------------------


@pytest.fixture
def start_run(small_folder, tmp_path):
    """Yield a function that starts a process of a run in a folder, on one device."""
    flags = f"{RUN} --devices 1 --data-dir", small_folder, "--workdir", tmp_path
    # As many threads as in this process, since a product's bits depend on the number.
    env = {"NPROC": str(D), **ENVIRONMENT}
    runs = []

    def start(*more, code=SCRIPT, **slurm):
        runs.append(start_python(code, *words(*flags, *more), **env, **slurm))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def handlers():
    return list(map(signal.getsignal, STOPPING))


def test_an_early_or_second_signal_ends_at_once(tmp_path, script, monkeypatch):
    runs = []

    def watch(*_, **options):
        seen.append((runs[0].signals.received, handlers()))

    seen = []
    at_rest = handlers()
    assert at_rest[0] == signal.SIG_DFL  # SIG_DFL ends the process
    write_files(tmp_path, {"config.json": b"{}", "metrics.jsonl": b""})  # no results
    hook(monkeypatch, mr.Run, "train", runs.append)
    hook(monkeypatch, pe._Fit, "save", watch)
    stop_at(monkeypatch, 1)
    script(RUN, "--workdir", tmp_path)
    assert seen[0] == (0, at_rest)  # while JAX compiles, there is nothing to save
    received, stopping = seen[-1]
    assert received == signal.SIGTERM and stopping[1] == signal.SIG_DFL
    assert handlers() == at_rest


def run_importing(folder, code, *shell):
    """Run the script, in which `import jax` runs the code."""
    (folder / "jax.py").write_text(code)
    command = [*shell, sys.executable, tm.__file__]
    env = {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=env, capture_output=True, timeout=20)


@posix
def test_ctrl_c_before_the_first_save_ends_at_once(tmp_path):
    busy = "import hashlib, os, threading as t; x = os.kill, (os.getpid(), 2); "
    # Nothing in Python runs in the main thread, as while JAX compiles.
    busy += "t.Timer(0.1, *x).start(); hashlib.pbkdf2_hmac('md5', b'', b'', 2**30)"
    done = run_importing(tmp_path, busy)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@posix
def test_signals_that_a_parent_has_ignored_stay_ignored(tmp_path, script, monkeypatch):
    """POSIX shells start `command &` in a script so."""
    stops = (
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); "
        "raise SystemExit(7)"  # comes here only if the signal is ignored
    )
    done = run_importing(tmp_path, stops, "sh", "-c", 'trap "" INT; exec "$0" "$1"')
    assert done.returncode == 7
    kept = [signal.signal(number, signal.SIG_IGN) for number in STOPPING]
    try:
        stop_at(monkeypatch, 1)
        assert script(RUN)[0] == 0
        assert handlers() == [signal.SIG_IGN] * 2
    finally:
        for number, handler in zip(STOPPING, kept):
            signal.signal(number, handler)


def process_flags(port, index, count=2, timeout=20):
    flags = f"--coordinator localhost:{port} --num-processes {count}"
    return f"{flags} --process-id {index} --connect-timeout {timeout}"


def outputs_of(runs, statuses):
    """Wait for processes, check how they ended, and return their outputs and errors."""
    outs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == statuses, outs
    return outs


@linux
def test_two_processes_end_in_the_bits_of_one(tmp_path, start_run, whole_run):
    # Slurm would set these variables; JAX derives a port from the job's number.
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    ids = [{"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in "01"]
    runs = [start_run("--distributed", **slurm, **each) for each in ids]
    (out, _), (other, _) = outputs_of(runs, [0, 0])
    assert "of 2 processes" in out and "epoch" not in other
    assert results(tmp_path).checkpoint == results(whole_run).checkpoint


# The second process receives SIGTERM, and is killed when both processes have saved.
DYING = f"""
import jax
import mnist_run as mr
import pjax_ensemble as pe
look, save = mr.Run.look, pe._Fit.save
received = []

def looking(run):
    if jax.process_index() == 1 and run.done == 8:
        mr.signal.raise_signal(mr.signal.SIGTERM)
        received.append(run)
    return look(run)

def saving(fit, due):
    save(fit, due)
    if received:
        mr.signal.raise_signal(mr.signal.SIGKILL)

mr.Run.look, pe._Fit.save = looking, saving
{SCRIPT}"""


@linux
def test_processes_stop_together_and_notice_one_that_dies(
    tmp_path, start_run, whole_run
):
    port = free_port()
    flags = [f"--save-every 9 {process_flags(port, i)}" for i in range(2)]
    runs = [start_run(each, code=DYING) for each in flags]
    (_, err), _ = outputs_of(runs, [1, -signal.SIGKILL])
    assert "lost contact with another process" in err
    with mr.locked(tmp_path):  # the dead processes no longer hold the lock
        pass
    assert checkpoints(tmp_path) == names_of(0, 8)
    assert pe.load(tmp_path / name_of(8))
    # The same command goes on, where process 0 alone has the folder.
    port = free_port()
    flags = [f"--save-every 9 --resume auto {process_flags(port, i)}" for i in (0, 1)]
    runs = [start_run(flags[0]), start_run(flags[1], "--workdir", tmp_path / "none")]
    (out, _), _ = outputs_of(runs, [0, 0])
    assert f"resumed from {tmp_path / name_of(8)}" in out
    assert results(tmp_path).checkpoint == results(whole_run).checkpoint
    assert not (tmp_path / "none").exists()


@linux
def test_processes_that_do_not_fit_together_end_with_an_error(start_run, monkeypatch):
    port = free_port()
    alone = start_run(process_flags(free_port(), 0, timeout=1))
    third = start_run(process_flags(port, 1, count=3))
    start_run(process_flags(port, 0))
    monkeypatch.setattr(jax.config, "update", lambda *option: None)
    with socket.create_server(("", 0)) as taken:
        args = words(process_flags(taken.getsockname()[1], 0))
        with pytest.raises(mr.Failure) as busy:
            mr.connect(tm.parse_arguments(args))
    said = r"--coordinator localhost:\d+: Address already in use"
    assert re.match(said, str(busy.value)) and busy.value.status == 1
    port = free_port()
    unlike = [start_run(f"--devices {i + 1} {process_flags(port, i)}") for i in (0, 1)]
    port = free_port()
    flags = "", "--save-every 0.5"
    others = [start_run(f"{flags[i]} {process_flags(port, i)}") for i in (0, 1)]
    for _, err in outputs_of(unlike, [2, 2]):
        assert err.endswith(
            "the processes have [1, 2] devices; give each as many, by --devices\n"
        )
    said = "process 1: save_every is 0.5 here, 1.0 there; start it with the flags of pr"
    for _, err in outputs_of(others, [2, 2]):
        assert said in err
    (_, late), (_, refused) = outputs_of([alone, third], [1, 2])
    assert "the processes did not meet within 1 seconds" in late
    assert "--num-processes 3: the process at" in refused


LOST = "lost contact with another process: "
FULL = (
    "out of memory; try fewer --members on more --devices, or a smaller --batch-size: "
)


@cases(
    "error, status, text",
    (jax.errors.JaxRuntimeError("gone\nat a line"), 1, f"{LOST}gone"),
    (ValueError("UNKNOWN: Gloo"), 1, f"{LOST}UNKNOWN: Gloo"),
    (ValueError("devices is 3"), 1, "devices is 3"),
    (MemoryError("no"), 1, f"{FULL}no"),
    (RuntimeError("RESOURCE_EXHAUSTED\nat a line"), 1, f"{FULL}RESOURCE_EXHAUSTED"),
    (RuntimeError("no room"), 1, "no room"),
    (mr.Failure("not finite", 3), 3, "not finite"),
)
def test_failing_process_waits_for_no_other(wrong, monkeypatch, error, status, text):
    monkeypatch.setattr(tm, "train_and_report", mock.Mock(side_effect=error))
    left = mock.Mock()
    monkeypatch.setattr(os, "_exit", left)
    for flags, times in (f"{ADDRESS} --process-id 1", 1), ("--distributed", 2):
        assert wrong(tm.main, flags, status=status) == f"{text}\n"
        assert left.mock_calls == [mock.call(status)] * times
    tm.train_and_report.side_effect = mr.Failure("a signal", 143)  # to all processes
    assert tm.main(words("--distributed")) == 143 and left.call_count == 2


@cases(
    "theirs, said",  # flags and settings of process 0, and process 1's error
    ({"save_every": 2.0}, "save_every is 1.0 here, 2.0 there"),
    ({"workdir": False}, "workdir is True here, False there"),
    ({"seed": 7, "keep": 4}, None),  # flags that process 1 was not given
    ({"dataset_sha256": "0"}, "dataset_sha256 is .+ here, 0 there"),
)
def test_process_takes_flags_of_process_0_and_names_others(
    tmp_path, script, monkeypatch, theirs, said
):
    def of_processes(ours):
        changes = {name: x for name, x in theirs.items() if name in ours}
        return [ours | changes, ours]

    monkeypatch.setattr(tm, "of_processes", of_processes)
    monkeypatch.setattr(mr, "of_processes", of_processes)
    status, _, err = script(RUN, "--save-every 1 --epochs 0 --workdir", tmp_path)
    if said is None:
        config = json.loads((tmp_path / "config.json").read_text())
        assert status == 0 and theirs.items() <= (config | {"keep": 4}).items()
    else:
        assert status == 2 and re.search(f"process 1: {said}; start it with", err)
        assert err.endswith("; start it with the flags of process 0\n")


@cases(
    "own, host, environ, said",
    ("127.0.1.1", "localhost", {}, None),
    ("127.0.1.1", "192.0.2.1", {}, "this machine's name, .+, is 127.0.1.1, where no "),
    ("10.0.0.1", "192.0.2.1", {}, None),
    (None, "localhost", {}, "this machine's name, .+, has no address, see /etc/hosts"),
    ("127.0.1.1", "nowhere.invalid", {}, "nowhere.invalid has no address here, see /"),
    (
        "127.0.1.1",
        None,
        {"SLURM_STEP_NUM_NODES": "2"},
        ", is 127.0.1.1, where no other",
    ),
    (
        "127.0.1.1",
        None,
        {"SLURM_STEP_NUM_NODES": "1"},
        "JAX finds no launcher here; st",
    ),
    (
        "127.0.0.1",
        None,
        {"OMPI_COMM_WORLD_SIZE": "2"},
        ", is 127.0.0.1, where no other",
    ),
    (
        "127.0.0.1",
        None,
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "JAX finds no launcher here; start by srun or mpirun, or give --coordinator, -",
    ),
)
def test_addresses_are_checked_before_processes_meet(
    monkeypatch, own, host, environ, said
):
    def address_of(name):
        if own is None:
            raise socket.gaierror(-2, "Name or service not known")
        return own

    initialize = mock.Mock()
    if host is None:  # as JAX does where it finds no cluster
        initialize.side_effect = ValueError("coordinator_address should be defined.")
    monkeypatch.setattr(socket, "gethostbyname", address_of)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", mock.Mock())
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    flags = "--distributed"
    if host:
        flags = f"--coordinator {host}:1 --num-processes 2 --process-id 1"
    monkeypatch.setattr(jax, "process_count", lambda: 2 if host else 1)
    monkeypatch.setattr(jax, "devices", lambda: [])
    monkeypatch.setattr(pe, "gather_processes", lambda x: x[None])
    args = tm.parse_arguments(words(flags))
    if said is None:
        mr.connect(args)
        assert initialize.call_count == 1
    else:
        assert re.search(said, said_by(mr.Failure, mr.connect, args))
        assert initialize.call_count == ("launcher" in said)


@cases("environ, port", ({"JAX_COORDINATOR_PORT": "7"}, "7"), ({}, None))
def test_steps_of_one_slurm_job_have_ports_of_their_own(monkeypatch, environ, port):
    ports = set()
    monkeypatch.setattr(jax.config, "update", mock.Mock())
    monkeypatch.setattr(jax.distributed, "initialize", mock.Mock(side_effect=OSError))
    for job, step in itertools.product("12", "01"):
        slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} | environ
        with mock.patch.dict(os.environ, slurm):
            args = tm.parse_arguments(["--distributed"])
            said_by(mr.Failure, mr.connect, args)
            ports.add(os.environ["JAX_COORDINATOR_PORT"])
    assert ports == {port} if port else len(ports) == 4
    assert all(61440 <= int(x) < 65536 for x in ports - {port})


@cases("name", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
def test_tasks_that_each_train_everything_say_so(monkeypatch, capsys, name):
    for count, said in ("1", ""), ("3", f"notice: {name} is 3: each of these tasks tr"):
        monkeypatch.setenv(name, count)
        mr.connect(tm.parse_arguments([]))
        out = capsys.readouterr().out
        assert out.startswith(said) and bool(out) == bool(said)


# ---------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------


def whole(names, a, b):
    return names, (a, b), (a - 1, 1.5, "two", b + 1), f"an integer from {a} to {b}"


PORT = "HOST:PORT, with a port from 1 to 65535"
BOUNDS = [  # flags, values that they take, values that they refuse, the message
    whole("epochs max_shift process_id", 0, 2**31 - 1),
    whole("members at_once batch_size train_size keep", 1, 2**31 - 1),
    whole("num_processes", 1, 2**16),
    whole("connect_timeout", 1, 24 * 60 * 60),
    whole("devices", 1, 1024),
    whole("seed", 0, 2**32 - 1),
    ("learning_rate", (0, 1e39), (-0.1, "nan", "inf"), "a finite number from 0 on"),
    ("save_every", (1e-9, 1e38), (0, 1.1e38, "nan"), "a number above 0, at most 1e38"),
    ("momentum", (0, 0.999), (1, -0.1), "a number from 0 on, below 1"),
    ("coordinator", ("a:1", "a:65535"), ("a", "a:0", "a:65536"), PORT),
]


@pytest.mark.parametrize("names, taken, refused, expected", BOUNDS)
def test_flag_takes_the_values_within_its_bounds(names, taken, refused, expected):
    def given(argv):
        return mr.given_flags(argv, tm.FLAGS.values(), "")

    for flag in map(mr.flag, names.split()):
        for value in taken:
            assert list(given([f"{flag}={value}"]).values()) == [value]
        for value in refused:
            said = said_by(mr.Failure, given, [f"{flag}={value}"])
            assert said == f"argument {flag}: expected {expected}, not '{value}'"


CHOICES = "mode", "network", "optimizer", "schedule", "data"
HOMELESS = "--plot", "--resume", "--save-every 2", "--keep 2"
SPLIT = (
    "--batch-size %d: a batch of this size does not split over a model's %d devices; "
    "use a multiple of %d, for example %d, or leave out --devices"
)
ADDRESS = "--coordinator here:1 --num-processes 2"
BAD_FLAGS = [
    ("--learning-rat 1", "unrecognized arguments: --learning-rat 1"),
    ("--network batchnorm --momentum 0", "--momentum: --optimizer adam has no "),
    ("--optimizer adamw --momentum 0", "--momentum: --optimizer adamw has no momentum"),
    ("--weight-decay 1", "--weight-decay: --optimizer sgd has no weight_decay; leave"),
    ("--data generated --network tiny", "--data-dir: --data generated reads no files;"),
    ("--mode sync --members 2", "--members 2: --mode sync trains one model"),
    ("--process-id 0", "--coordinator, --num-processes and --process-id: give all"),
    ("--distributed --process-id 0", "--coordinator, --num-processes and --process-"),
    (f"{ADDRESS} --process-id 0 --distributed", "--coordinator, --num-processes and "),
    (f"{ADDRESS} --process-id 2", "--process-id 2: expected 0 to 1"),
    ("--devices 9", "--devices 9: there are 8 CPU devices"),
    ("--batch-size 769", "--batch-size 769: there are 768 training images"),
    ("--batch-size 255 --epochs 715827883", "--epochs 715827883: JAX can count 7158"),
    ("--max-shift 29", "--max-shift 29: an image side has 28 pixels"),
    ("--devices 8 --members 2 --batch-size 30", SPLIT % (30, 4, 4, 28)),
    ("--mode sync --devices 8 --batch-size 4", SPLIT % (4, 8, 8, 8)),
    ("--train-size 769", "--train-size 769: data in MNIST's form"),
    ("--data mnist --data-dir FILE", "--data-dir: FILE: not a folder"),
    ("--workdir FILES --plot", "--plot needs matplotlib: python -m pip install matplo"),
    ("--data-dir TINY", "--network cnn: image_shape is [3, 5, 1]; expected"),
    ("--data-dir TINY --network batchnorm", "--network batchnorm: a window of 6x6 "),
    pytest.param("--workdir FILE", "FILE: File exists", marks=posix),
    pytest.param("--workdir FILE/runs", "FILE/runs: Not a directory", marks=posix),
]
BAD_FLAGS += [
    (f"--{name} x", f"argument --{name}: invalid choice: 'x'") for name in CHOICES
]
BAD_FLAGS += [
    (x, f"{x.split()[0]} needs --workdir, the folder of the run") for x in HOMELESS
]


def write_black(folder, size):
    """Write a data set of 64 black images, in two classes."""
    write_set(folder, [np.zeros((64, *size))] * 2, [np.arange(64) % 2] * 2)


@pytest.mark.usefixtures("tiny_network")
@pytest.mark.parametrize("flags, message", BAD_FLAGS)
def test_bad_flag_is_refused_in_one_line(tmp_path, small_folder, wrong, flags, message):
    file = tmp_path / "file"
    tiny = tmp_path / "tiny"
    file.write_text("in the way")
    write_black(tiny, (3, 5))
    flags = flags.replace("FILE", str(file)).replace("TINY", str(tiny))
    message = message.replace("FILE", str(file))
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        said = wrong(tm.main, "--data-dir", small_folder, "--epochs 1", flags)
    assert said.startswith(message)


def test_settings_depend_on_the_data_and_not_on_their_name():
    data = md.generate_digits(0, 40, 20)
    settings = [tm.data_settings(data), tm.data_settings(data._replace(name="other"))]
    assert settings[0] == settings[1]
    for array in data[1:5]:
        array.flat[7] += 1
        settings.append(tm.data_settings(data))
    assert len(set(map(json.dumps, settings))) == 5


GUIDE = {"network": "batchnorm", "optimizer": "adam", "epochs": 2}
GUIDE |= {"learning_rate": 1e-3, "schedule": "constant", "max_shift": 0}
BY_SGD = {"optimizer": "sgd", "learning_rate": 0.15}
USUAL = (28, 28)


@cases(
    "size, flags, expected",
    (USUAL, "", {}),
    (USUAL, "--network batchnorm", GUIDE),
    (USUAL, "--optimizer adam", {"optimizer": "adam", "learning_rate": 0.001}),
    (
        USUAL,
        "--optimizer adamw --weight-decay 0.1",
        {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.1},
    ),
    (USUAL, "--learning-rate 0 --max-shift 0", {"learning_rate": 0, "max_shift": 0}),
    (USUAL, "--bootstrap", {"bootstrap": True}),
    (USUAL, "--network batchnorm --optimizer sgd", GUIDE | BY_SGD),
    ((12, 40), "", {"max_shift": 1}),
    ((128, 140), "", {"max_shift": 9}),  # more pixels than images
    ((8, 8), "--max-shift 8 --batch-size 48", {"max_shift": 8, "batch_size": 48}),
    (USUAL, "--train-size 63 --batch-size 63", {"train_size": 63, "batch_size": 63}),
)
def test_settings_follow_network_optimizer_and_data(tmp_path, size, flags, expected):
    write_black(tmp_path, size)
    args = tm.parse_arguments(words(flags, "--members 2 --data-dir", tmp_path))
    settings, data, trainer = tm.prepare(args)
    expected = {"members": 2, "train_size": 64, **tm.data_settings(data), **expected}
    assert settings == tm.RECIPES["cnn"]._replace(**expected)
    assert data.train_images.shape == (settings.train_size, *size, 1)
    assert len(data.train_labels) == settings.train_size
    assert trainer.layout == tm.lay_out(settings, None)


def test_help_shows_every_flag_with_its_choices_and_its_default(capsys):
    assert said_by(SystemExit, tm.main, ["--help"]) == "0"
    parts = re.split(r"^  --", capsys.readouterr().out, flags=re.MULTILINE)
    texts = {text.split()[0].replace("-", "_"): text for text in parts[1:]}
    assert texts.keys() == tm.FLAGS.keys()
    plain = {n: x.default for n, x in tm.FLAGS.items() if x.default is not False}
    shown = {name: "" if x is None else f"{x})" for name, x in plain.items()}
    shown |= dict.fromkeys(tm.FLAGS.keys() - plain, "")
    for name in words("optimizer epochs schedule max_shift"):
        cnn = getattr(tm.RECIPES["cnn"], name)
        batchnorm = getattr(tm.RECIPES["batchnorm"], name)
        shown[name] = f"{cnn})"
        if cnn != batchnorm:
            shown[name] = f"{cnn}, or {batchnorm} with batchnorm)"
    scaled = "2 for images of side 28, in proportion for other sizes,"
    shown["max_shift"] = shown["max_shift"].replace("2,", scaled)
    rates = [optimizer.rate for optimizer in tm.OPTIMIZERS.values()]
    shown["learning_rate"] = "{} with sgd, {} with adam and adamw)".format(*rates)
    assert rates[1:] == [0.001, 0.001]
    for name, text in texts.items():
        assert f"(default: {shown[name]}" in " ".join(text.split())
        kind = tm.FLAGS[name].kind
        if not callable(kind):
            choices = {"resume": "[auto]"}.get(name, f"{{{','.join(kind)}}}")
            assert choices in text


def test_resumed_run_takes_its_flags_from_its_config(tmp_path, whole_run):
    def resume(*flags, **changes):
        mr.write_json(tmp_path / "config.json", config | changes)
        return vars(tm.parse_arguments(words("--resume --workdir", tmp_path, *flags)))

    config = json.loads((whole_run / "config.json").read_text())
    assert config["data"] == "auto" and Path(config["data_dir"]).is_absolute()
    assert config["seed"] == 0 and config["save_every"] == 1
    kept = {n: x for n, x in config.items() if n in tm.FLAGS and x is not False}
    kept |= {"bootstrap": True, "at_once": 1, "data": "mnist", "save_every": 0.5}
    kept |= {"learning_rate": 0.1, "max_shift": 3, "data_dir": str(tmp_path)}
    expected = kept | {"data_dir": tmp_path}
    assert resume(**kept).items() >= expected.items()
    expected |= {"devices": 2, "save_every": 2, "keep": 1, "data_dir": HERE}
    flags = "--devices 2 --save-every 2 --keep 1 --epochs 2 --data-dir", HERE
    other = " --coordinator localhost:1 --num-processes 2 --process-id 1"
    assert resume(*flags, other, **kept).items() >= expected.items()
    resume(seed="3")
    assert tm.read_config(tmp_path)[0].seed == 3
    elsewhere = f"--resume --workdir {tmp_path / 'none'} --epochs 7 --network batchnorm"
    assert tm.parse_arguments(words(elsewhere, other)).epochs == 7


@cases(
    "there, platform, asked, settings, expected",
    (1, "cpu", None, {}, (2, 1, 2, 1)),
    (3, "cpu", None, {}, (3, 3, 1, 1)),
    (1, "gpu", None, {}, (5, 1, 5, 1)),
    (10, "cpu", None, {"mode": "sync"}, (1, 8, 1, 8)),  # the replicas divide the batch
    (24, "cpu", None, {"members": 8}, (8, 16, 1, 2)),
    (4, "cpu", None, {"members": 9, "batch_size": 7}, (9, 3, 3, 1)),
    (12, "cpu", 4, {"mode": "sync"}, (1, 4, 1, 4)),
)
def test_members_and_replicas_follow_the_devices_and_the_batch(
    monkeypatch, there, platform, asked, settings, expected
):
    monkeypatch.setattr(jax, "local_device_count", lambda: there)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert tm.lay_out(tm.Settings(**settings), asked) == expected


def test_path_that_the_output_cannot_encode_does_not_end_the_run(tmp_path):
    folder = write_files(tmp_path / "\N{GREEK CAPITAL LETTER OMEGA}", small_files())
    flags = words("--mode sync --batch-size 40 --devices 33 --data-dir", folder)
    command = [sys.executable, tm.__file__, *flags]  # more devices than cores
    env = {**ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "cp1252"}
    run = subprocess.run(command, env=env, capture_output=True)
    assert run.returncode == 2 and b"40: a batch of this size does not" in run.stderr
    assert b"\\u03a9 holds other data than MNIST" in run.stdout
