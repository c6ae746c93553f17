"""Tests of the scripts beside this file; what takes long has a short form here."""

import concurrent.futures
import functools
import json
import os
import re
import sys
from unittest import mock

import devices as machines
import faults
import interrupts as interruptions
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import recipe as recipes
import reports
import speed
import tables
import tabular
import uci
import uncertainty
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.utils.estimator_checks import check_estimator

import ensemble_metrics as em
import pjax_ensemble as pe
import train_mnist as tm
from conftest import (
    ENVIRONMENT,
    IMAGES,
    D,
    assert_close,
    cases,
    leaves_equal,
    lines_of,
    linux,
    member,
    posix,
    randn,
    random_probs,
    said_by,
    small_files,
    words,
    write_files,
)


@posix
def test_interrupted_loops_go_on_from_the_latest_state():
    """The trial of benchmarks/interrupts.py, in its short form."""
    counts = interruptions.cell(trials=8)
    assert counts["interrupts"] >= 8 and not counts["lost"] + counts["different"]


def test_trainers_that_are_dropped_leave_nothing_alive():
    *_, last = programs.run(trainers=3, every=3)
    assert (last.trainers, last.states, last.functions) == (3, 0, 0)
    first = last._replace(maps=500, memory=300)
    assert programs.complaint(first, first._replace(maps=550, memory=450)) is None
    for left in {"maps": 551}, {"memory": 451}, {"states": 1}, {"functions": 1}:
        assert programs.complaint(first, first._replace(**left)), left


"""Tests of the scripts beside this file; what takes long has a short form here."""


def test_report_is_timed_beside_others_that_give_its_scores(monkeypatch, capsys):
    probs, labels = reports.make(200, 10)
    report = em.ensemble_report(probs, labels)
    *found, entropy = reports.by_numpy(probs, labels)
    for each, scores in (
        (found[::3], report["member"]),
        (found[1::3], report["by_size"]),
    ):
        assert_allclose(each, [[*x.values()] for x in scores], rtol=1e-4)
    assert_allclose(entropy, report["predictive_entropy"], rtol=1e-4)
    parts = entropy - report["mutual_information"]
    assert_allclose(np.mean(found[2::3]), parts, rtol=1e-4)
    monkeypatch.delitem(reports.SYSTEMS, "TorchMetrics")
    reports.main(["--rows", "300", "--classes", "7", "--rounds", "1"])
    names = [row.split(" | ")[1] for row in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["ensemble_report", "NumPy"]


def test_torchmetrics_gives_the_scores_of_the_report():
    pytest.importorskip("torchmetrics")
    probs, labels = reports.make(200, 10)
    report = em.ensemble_report(probs, labels)
    expected = [[*x.values()] for x in report["member"] + report["by_size"]]
    assert_allclose(reports.by_torchmetrics(probs, labels), expected, rtol=1e-4)


@pytest.fixture
def linear(monkeypatch):
    """Put a linear model in the place of the CNN."""
    model = tm.Network(
        lambda key, **form: (jax.random.normal(key, (784, 10)) / 28, ()),
        lambda w, _, images, key=None: (images.reshape(len(images), 784) @ w, ()),
    )
    monkeypatch.setitem(tm.NETWORKS, "cnn", model)


def test_sweep_trains_each_rate_on_each_order_as_the_script_does(linear):
    data, rates = tm.generate_digits(0, 160, 40), (0.1, 0.02)
    recipe = tm.RECIPES["cnn"]._replace(batch_size=32, epochs=2)
    what = recipe, rates, 2, data, data.test_images, 1
    probs, alone = (recipes.sweep(*what, at_once)[0] for at_once in (True, False))
    assert leaves_equal(probs, alone)
    # Members 2 and 3 start from the weights, and train on the orders, of 0 and 1.
    recipe = recipe._replace(learning_rate=rates[1])
    trainer = tm.make_trainer(recipe, 4, 1, 10, data.form())
    start = trainer.gather(trainer.init(jax.random.key(0)))
    state = trainer.scatter(start._replace(params=start.params[[0, 1, 0, 1]]))
    for epoch in range(2):
        order = pe.epoch_order(160, recipe.batch_size, members=2, epoch=epoch)
        state, _ = trainer.epoch(state, data[1:3], order[[0, 1, 0, 1]])
    assert_close(probs[2:], trainer.predict_members(state, data.test_images)[2:])


def test_sweep_prints_a_rate_a_row_and_the_best(small_folder, monkeypatch, capsys):
    probs, calls = random_probs(0, 6, 200, 10), []
    probs[1, 7] = np.nan

    def sweep(*what, at_once=True):
        calls.append(what)
        return (probs, 1.25) if at_once else (probs[[0, 1, 4, 5, 2, 3]], 3.5)

    monkeypatch.setenv("MNIST_DIR", str(small_folder))
    flags = "batch_size=32,bootstrap --train-size 256 --orders 2 --one-by-one"
    flags += " --epochs 3 --learning-rates .1 .2 .3"
    with mock.patch.multiple(recipes, sweep=sweep, VALIDATION=200):
        assert recipes.main(words(flags)) == 0
    out, err = capsys.readouterr()
    images, labels = tm.load_mnist(small_folder)[1:3]
    default = tm.RECIPES["cnn"]._replace(epochs=3)
    others = default._replace(batch_size=32, bootstrap=True)
    for recipe, call in zip((default, default, others, others), calls):
        assert call[:3] == (recipe, [0.1, 0.2, 0.3], 2)
        assert_array_equal(call[3].train_images, images[:256])
        assert_array_equal(call[4], images[-200:])
    rows, losses = ["| 0.1 | 1 of 2 members are not finite |  |  |  |  |"], []
    for rate, own in ((0.2, probs[2:4]), (0.3, probs[4:])):
        report = em.ensemble_report(own, labels[-200:])
        (a, x, *_), (b, y, *_) = (scores.values() for scores in report["member"])
        row = f"{rate} | {50 * (a + b):.2f} ± {100 * abs(a - b) / 2**0.5:.2f} | "
        row += f"{(x + y) / 2:.4f} ± {abs(x - y) / 2**0.5:.4f} | "
        accuracy, nll, _, ece = report["ensemble"].values()
        rows.append(f"| {row}{100 * accuracy:.2f} | {nll:.4f} | {ece:.4f} |")
        losses.append([x, y])
    best = (0.2, 0.3)[np.argmin(np.mean(losses, axis=1))]
    apart = np.abs(np.subtract(*losses)).max()
    end = f"\n\nbest by a member's NLL: {best}\n6 members at once: 1.2 s\n"
    end += f"one after another: 3.5 s, NLL within {apart:.1g}\n"
    assert out.count("\n".join(rows) + end) == 2 and not err


def says_in_a_line(main, always, *rows):
    """Make a test of flags with which a command ends: rows of (flags, what it says)."""

    @cases("flags, message", *rows)
    def test(whole_run, small_folder, monkeypatch, linear, wrong, flags, message):
        monkeypatch.setenv("MNIST_DIR", str(small_folder))
        monkeypatch.setattr(recipes, "VALIDATION", 200)
        where = str(whole_run)
        said = wrong(main, always, flags.replace("DIR", where))
        assert re.match(message.replace("DIR", re.escape(where)), said)

    return test


test_sweep_says_in_a_line_what_is_wrong = says_in_a_line(
    recipes.main,
    "--train-size 256",
    ("max_shift=3,size=9", "max_shift=3,size=9: expected one of network, .*'size'"),
    ("learning_rate=1", r"learning_rate=1: .* \(rates: --learning-rates\), not"),
    ("max_shift", "max_shift: argument --max-shift: expected one argument"),
    ("epochs=x", "epochs=x: argument --epochs: expected a whole number .*'x'"),
    ("batch_size=300", "batch_size=300: .* more than the 256 training images"),
    ("--learning-rates .1 0", ".*--learning-rates: expected .* above 0, .* not '0'"),
    ("--learning-rates nan", ".*--learning-rates: expected .* above 0, .* not 'nan'"),
    ("--orders 0", ".*--orders: expected a whole number from 1 to .*, not '0'"),
    ("--devices 9", f"--devices 9: there are {D} CPU devices"),
    ("--train-size 569", ".*569: .* has 568 training images, besides 200 to score"),
    ("--one-by-one --devices 7", ".*batch-size 64: does not split over the 7 dev"),
)


def test_sweep_names_a_file_that_is_damaged(tmp_path, monkeypatch, wrong):
    write_files(tmp_path, {**small_files(), IMAGES: b"damaged"})
    monkeypatch.setenv("MNIST_DIR", str(tmp_path))
    said = wrong(recipes.main)
    assert said.startswith(f"{tmp_path / 'train-images-idx3-ubyte'}: header 0x64")


def test_quality_is_the_mean_over_seeds_of_their_reports(
    tmp_path, whole_run, capsys, wrong
):
    report = json.loads((whole_run / "report.json").read_text())
    for seed in (0, 1):
        report["config"]["seed"] = seed
        report["by_size"][1]["accuracy"] = 0.5 + 0.25 * seed
        folder = tmp_path / f"members-2-seed-{seed}"
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(report))
    flags = words("quality --sizes 1 2 --workdir", tmp_path, "--seeds")
    assert recipes.main([*flags, "0", "1"]) == 0
    nll = report["by_size"][1]["negative_log_likelihood"]
    assert f"| 2 | 62.50 ± 12.50 | {nll:.4f} ± 0.0000 |" in capsys.readouterr().out
    other = folder.rename(tmp_path / "members-2-seed-2")
    assert wrong(recipes.main, *flags, "2") == f"{other} is of another run; remove it\n"


def test_shifts_turn_to_the_left_and_move_around_the_edge():
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)
    for quarters in range(3):
        turned = uncertainty.turn(images, 90 * quarters)
        assert_array_equal(turned, np.rot90(images, quarters, axes=(1, 2)))
    third = uncertainty.turn(np.full((1, 28, 28, 1), 200, np.uint8), 30)[0, ..., 0]
    assert third.dtype == np.uint8 and third[13, 13] == 200 and third[0, 0] == 0
    moved = uncertainty.move(images, 4)
    assert_array_equal(moved[:, :, 4:], images[:, :, :-4])
    assert_array_equal(moved[:, :, :4], images[:, :, -4:])
    amounts = [list(amounts) for _, amounts in uncertainty.SHIFTS.values()]
    assert amounts == [[*range(0, 181, 15)], [*range(0, 15, 2)]]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, small_folder):
    """Return the folder of a run of one model, of no epochs."""
    folder = tmp_path_factory.mktemp("untrained")
    flags = words("--mode sync --network tiny --epochs 0 --workdir", folder)
    assert tm.main([*flags, "--data-dir", str(small_folder)]) == 0
    return folder


def test_shift_prints_and_draws_the_scores_of_runs(
    tmp_path, capsys, whole_run, untrained, small_folder, drawn
):
    """benchmarks/uncertainty.py shift in its short form."""
    runs = words("shift", whole_run, "--long", untrained)
    files = words("--json", tmp_path / "json", "--plot", tmp_path / "shift.png")
    assert uncertainty.main(runs + files) == 0
    rows = json.loads((tmp_path / "json").read_text())["shifts"]
    assert [row[1] for row in rows] == [*range(0, 181, 15), *range(0, 15, 2)]
    assert [rows[i][0] for i in (12, 13)] == ["turned, degrees", "moved, pixels"]
    data, found = tm.load_mnist(small_folder), rows[12][2]
    for folder, names in (whole_run, [*found][:2]), (untrained, [uncertainty.LONG]):
        probs = tm.load_run(folder).predict_members(data.test_images[:, ::-1, ::-1])
        scores = uncertainty.score(probs, data.test_labels)
        assert_close([found[name] for name in names], [*scores.values()], 1e-9)
    assert [*found] == ["a member", "ensemble of 2", uncertainty.LONG]
    out = capsys.readouterr().out
    shown = [[100 * scores["accuracy"] for scores in own] for own in found.values()]
    members, (whole,), (alone,) = shown
    cells = f"{np.mean(members):.2f} ({min(members):.2f} to {max(members):.2f})"
    assert f"| turned, degrees 180 | {cells} | {whole:.2f} | {alone:.2f} |\n" in out

    def brier(found, name):
        return min(scores["brier_score"] for scores in found[name])

    shifted = [found for _, amount, found in rows if amount]
    ahead = sum(brier(f, "ensemble of 2") < brier(f, "a member") for f in shifted)
    said = f"is ahead of its best member at {ahead} of 19 shifts; one, trained longer"
    assert f"Brier score: ensemble of 2 {said}" in out
    assert (tmp_path / "shift.png").read_bytes().startswith(b"\x89PNG")
    turned = lines_of(drawn().axes[0])["ensemble of 2"]
    expected = [100 * f["ensemble of 2"][0]["accuracy"] for _, _, f in rows[:13]]
    assert_close(turned[:, 1], expected)


def test_labels_are_those_that_the_ensemble_is_least_sure_of(linear):
    data = tm.generate_digits(0, 300, 100)
    recipe = tm.RECIPES["cnn"]._replace(batch_size=32, max_shift=0)
    sizes = {"seeds": 2, "rounds": 3, "steps": 10}
    together, alone = (tm.make_trainer(recipe, n, 1, 10, data.form()) for n in (4, 1))
    strategy = uncertainty.STRATEGIES["mutual information"]
    errors, labeled = uncertainty.learn(together, data, strategy, **sizes)
    assert errors.shape == (3, 2) and labeled.shape == (2, 60)
    assert set(labeled[0][:20]) != set(labeled[1][:20])
    pool, labels = data[1:3]
    for seed, rows in enumerate(labeled):
        assert sorted(labels[rows[:20]]) == sorted([*range(10)] * 2)
        for number in range(3):
            known, probs = rows[: 20 * (number + 1)], []
            start = together.gather(together.init(jax.random.key(number)))
            for i in range(2):
                state = member(start, slice(2 * seed + i, 2 * seed + i + 1))
                draw = np.random.default_rng([1, number, seed, i])
                order = uncertainty.batches(draw, known, 10)
                assert order.shape == (10, 32)
                passes = order.flat[: 2 * len(known)].reshape(2, -1)
                assert_array_equal(np.sort(passes), np.sort([known, known]))
                assert not np.array_equal(*passes)
                state, _ = alone.epoch(alone.scatter(state), (pool, labels), order)
                images = np.concatenate([data.test_images, pool])
                probs.append(alone.predict_members(state, images)[0])
            test, rest = np.split(np.stack(probs), [100], axis=1)
            wrong = test.mean(axis=0).argmax(axis=-1) != data.test_labels
            assert errors[number, seed] == wrong.mean()
            unsure = em.mutual_information(rest)
            unsure[known] = -1
            best = np.argsort(-unsure, kind="stable")[:20]
            assert_array_equal(rows[len(known) :][:20], best[: 60 - len(known)])


def test_label_prints_and_draws_errors_by_strategy(tmp_path, capsys, drawn, linear):
    """benchmarks/uncertainty.py label in its short form."""
    flags = words("label --quick --json", tmp_path / "json")
    assert uncertainty.main([*flags, "--plot", str(tmp_path / "label.png")]) == 0
    found, out = json.loads((tmp_path / "json").read_text()), capsys.readouterr().out
    assert found.pop("labels") == [20, 40, 60] and [*found] == [*uncertainty.STRATEGIES]
    (axes,) = drawn().axes
    for name, errors in found.items():
        assert_close(lines_of(axes)[name][:, 1], 100 * np.mean(errors, axis=1))
    rows = zip(*(100 * np.array(errors) for errors in found.values()))
    for labels, row in zip((20, 40, 60), rows):
        cells = (f"{e.mean():.2f} ({e.min():.2f} to {e.max():.2f})" for e in row)
        assert f"| {' | '.join([str(labels), *cells])} |\n" in out
    assert len({errors[0][0] for errors in found.values()}) == 1  # the same start


def test_labels_are_scored_on_what_is_asked_for(small_folder, monkeypatch, capsys):
    seen = []

    def learn(trainer, data, strategy, **sizes):
        seen.append((trainer.layout.members, data, sizes))
        return np.zeros((sizes["rounds"], sizes["seeds"])), None

    monkeypatch.setenv("MNIST_DIR", str(small_folder))
    whole, flags = tm.load_mnist(small_folder), "--rounds 2 --seeds 4 --members 3"
    scored = {"--validate": whole.train_images[-200:], "": whole.test_images}
    for validate, last in scored.items():
        with mock.patch.multiple(uncertainty, learn=learn, POOL=300, VALIDATION=200):
            assert uncertainty.main(words("label", flags, validate)) == 0
        members, data, sizes = seen.pop()
        assert (members, sizes) == (12, {"seeds": 4, "rounds": 2, "steps": 240})
        assert_array_equal(data.test_images, last)
        assert_array_equal(data.train_images, whole.train_images[:300])
        out = capsys.readouterr().out
        assert f"200 {'validation' if validate else 'test'} images" in out


def test_labels_needed_are_the_first_that_reach_the_target():
    labels = np.array([20, 40, 60])
    errors = np.array([[0.3, 0.2], [0.05, 0.07], [0.04, 0.02]])
    needed = [uncertainty.needed(labels, e) for e in (*errors.T, errors.mean(axis=1))]
    assert needed == ["40", "60", "60"]
    assert uncertainty.needed(labels, errors.T[0] + 1) == "more than 60"


# Of the two that are equal one is wrong, and of the next two.
DOUBT, WRONG = np.array([1.0, 2, 2, 3, 4, 4, 5]), np.array([0, 0, 1, 0, 0, 1, 0])


@cases("order", range(7), [2, 6, 1, 5, 4, 0, 3])
def test_risk_over_coverage_is_the_mean_over_orders_of_equal_scores(order):
    risk = uncertainty.risk_coverage(DOUBT[[*order]], WRONG[[*order]])
    assert_close(risk, [0, 0.5 / 2, 1 / 3, 1 / 4, 1.5 / 5, 2 / 6, 2 / 7])


@cases(
    "target, kept", (0.01, 1), (0.24, 1), (1 / 4, 3), (0.28, 3), (2 / 7, 5), (0.3, 5)
)
def test_thresholds_keep_the_most_images_that_have_the_error(target, kept):
    with mock.patch.object(uncertainty, "ALLOWED", target):
        assert uncertainty.thresholds(DOUBT, WRONG)[0] == kept
        assert uncertainty.thresholds(DOUBT, WRONG < 2)[0] == -np.inf


@cases(
    "count, errors, kept",  # of 0 errors it takes 2,995 images, of 1 4,742, of 2 6,294
    (2994, [], 0),
    (2995, [], 2995),
    (6000, [2999], 0),
    (6000, [4740], 4740),
    (6000, [4741], 6000),
    (6000, [4741, 5000], 5000),
)
def test_bound_takes_errors_that_are_improbable_above_the_target(count, errors, kept):
    wrong = np.isin(np.arange(count), errors)
    found = uncertainty.thresholds(np.arange(1.0 * count), wrong)[1]
    assert found == (kept - 1 if kept else -np.inf)


def probs_and_labels(*shape):
    """Draw probabilities [..., N, C], and labels [N] that have those of the mean."""
    probs, draw = random_probs(0, *shape), np.random.default_rng(1)
    means = probs.reshape(-1, *shape[-2:]).mean(axis=0)
    return probs, np.array([draw.choice(len(p), p=p) for p in means])


def test_decisions_are_those_of_loops():
    probs, labels = probs_and_labels(300, 10)
    known, theirs = probs[:200], labels[:200]  # of the new ones too: bounds are met
    both = np.concatenate([known, probs]), np.concatenate([theirs, labels])
    doubt, wrong = 1 - probs.max(axis=-1), probs.argmax(axis=-1) != labels
    with mock.patch.object(uncertainty, "ALLOWED", 0.5):
        found = uncertainty.judge(*both, 200)
        bounds = uncertainty.thresholds(doubt[:200], wrong[:200])
        bounds = *bounds, uncertainty.thresholds(doubt, wrong)[0]
    order = np.argsort(doubt)
    risks = [100 * np.mean(wrong[order[:n]]) for n in range(1, 301)]
    temperature = em.fit_temperature(known, theirs)
    tempered = probs ** (1 / temperature)
    tempered /= tempered.sum(axis=-1, keepdims=True)
    expected = {
        "error, %": risks[-1],
        "area under risk-coverage, %": np.mean(risks),
        "NLL, nats": -np.mean([np.log(p[c]) for p, c in zip(probs, labels)]),
        "temperature": temperature,
        "NLL with it, nats": -np.mean([np.log(p[c]) for p, c in zip(tempered, labels)]),
    }
    for how, bound in zip(("", " by the bound", " in hindsight"), bounds):
        own = [w for d, w in zip(doubt, wrong) if d <= bound]
        assert 0 < len(own) < 300
        expected[f"kept{how}, %"] = len(own) / 3
        expected[f"their error{how}, %"] = 100 * np.mean(own)
    # The 199th smallest of 200 at 99%; there is none at 99.9%.
    far = sorted(1 - p[c] for p, c in zip(known, theirs))
    for share, bound in ("99.0%", far[198]), ("99.9%", 1):
        sets = [np.flatnonzero(1 - p <= bound) for p in probs]
        expected[f"classes, {share} sets"] = np.mean([len(own) for own in sets])
        held = [c in own for own, c in zip(sets, labels)]
        expected[f"coverage, {share} sets, %"] = 100 * np.mean(held)
    assert_close(found.pop(uncertainty.RISK)[::10], risks[269::3])
    assert [*found] == [*expected]
    assert_close(found, expected)


def test_decide_prints_and_draws_what_images_that_were_left_out_say(
    tmp_path, capsys, whole_run, small_folder, drawn
):
    """benchmarks/uncertainty.py decide in its short form."""
    files = words("--json", tmp_path / "json", "--plot", tmp_path / "decide.png")
    assert uncertainty.main(words("decide", whole_run) + files) == 0
    rows, out = (
        json.loads((tmp_path / "json").read_text())["turned"],
        capsys.readouterr().out,
    )
    assert [degrees for degrees, _ in rows] == [0, 15, 30, 45]
    data, run = tm.load_mnist(small_folder), tm.load_run(whole_run)
    labels = np.concatenate([data.train_labels[256:], data.test_labels])
    images = data.train_images[256:], uncertainty.turn(data.test_images, 30)
    probs = np.concatenate([*map(run.predict_members, images)], axis=1)
    judge = functools.partial(uncertainty.judge, known=512)
    found = uncertainty.score(probs, labels, judge)
    assert_close(rows[2][1], found, 1e-9)
    *members, whole = [scores["kept, %"] for own in found.values() for scores in own]
    cells = f"{np.mean(members):.4g} ({min(members):.4g} to {max(members):.4g})"
    assert f"| 30 degrees | kept, % | {cells} | {whole:.4g} |\n" in out
    assert (tmp_path / "decide.png").read_bytes().startswith(b"\x89PNG")
    for axes, title in zip(
        drawn().axes[1:], ("their error, %", "coverage, 99.0% sets, %")
    ):
        shown = [line.get_ydata() for line in axes.lines]
        expected = [f["ensemble of 2"][0][title] for _, f in rows]
        assert any(np.array_equal(y, expected) for y in shown)


def test_decide_names_the_best_member_and_takes_any_number(tmp_path, capsys):
    names = uncertainty.KEPT, uncertainty.KEPT_ERROR
    members = [dict(zip(names, own)) for own in ((98, 0.2), (97, 0.1), (96, 0))]
    uncertainty.print_decisions([(0, {"a member": members})])
    said = "member 1 is the best: kept 97.00%, error 0.100%"
    assert said in capsys.readouterr().out
    for k, others in (1, ""), (3, " ensemble of 2 | ensemble of 3 |"):
        probs, labels = probs_and_labels(k, 200, 10)
        judge = functools.partial(uncertainty.judge, known=100)
        rows = [(n, uncertainty.score(probs, labels, judge)) for n in uncertainty.TURNS]
        uncertainty.print_decisions(rows)
        assert f"| turned |  | a member |{others}\n" in capsys.readouterr().out
        uncertainty.draw_decisions(rows).savefig(tmp_path / "png")


def test_decide_refuses_a_run_that_left_nothing_out(untrained, wrong):
    said = wrong(uncertainty.main, "decide", untrained)
    left = "trained on all 768 training images, none is left to calibrate on"
    assert said == f"{untrained}: {left}; train one with --train-size 640\n"


test_uncertainty_says_in_one_line_what_is_wrong = says_in_a_line(
    uncertainty.main,
    "",
    ("", "the following arguments are required: command"),
    ("turn", "argument command: invalid choice: 'turn'"),
    ("shift DIR/none", "DIR/none holds no finished run"),
    ("decide DIR/none", "DIR/none holds no finished run"),
    ("shift DIR --long DIR", "--long DIR: holds 2 models; expected one"),
    ("shift DIR --plot DIR/no/x", "--plot DIR/no/x: there is no folder DIR/no"),
    ("label --seeds 0", "argument --seeds: expected a whole number from 1 to"),
    ("label --members 1", "argument --members: expected a whole number from 2 to"),
    ("label --rounds 40", "--rounds 40: take 800 labels; the pool has 768"),
    ("label --validate", "--validate: 768 training images; pool and validation ta"),
    ("label --quick --learning-rate 1e38", "a member is not finite after round 1; "),
)


@pytest.mark.parametrize("k, sizes", [(1, []), (2, [2]), (7, [2, 4, 7])])
def test_shift_scores_members_and_ensembles_as_the_report_does(capsys, k, sizes):
    probs, labels = random_probs(0, k, 50, 10), np.arange(50) % 10
    found, report = uncertainty.score(probs, labels), em.ensemble_report(probs, labels)

    def with_entropy(scores, own):
        return scores | {"predictive_entropy": em.predictive_entropy(own).mean()}

    expected = {"a member": list(map(with_entropy, report["member"], probs[:, None]))}
    for size in sizes:
        scores = with_entropy(report["by_size"][size - 1], probs[:size])
        expected[f"ensemble of {size}"] = [scores]
    assert found == expected
    uncertainty.print_shifts([("turned", i, found) for i in (0, 15)])
    ahead = f"ensemble of {k} is ahead of its best member at "
    assert capsys.readouterr().out.count(ahead) == 2 * (k > 1)


@cases("command", "shift", "decide")
def test_runs_of_other_data_are_refused(whole_run, small_folder, wrong, command):
    data = tm.load_mnist(small_folder)
    images = data.train_images.copy()
    images[255] += 1  # the last that it trained on
    changed = data._replace(train_images=images)
    digits = tm.generate_digits(0, 9, 9)
    for other, name in (digits, "dataset"), (changed, "dataset_sha256"):
        with mock.patch.object(tm, "load_data", return_value=other):
            said = wrong(uncertainty.main, command, whole_run)
        assert said.startswith(f"{whole_run}: {name} is ")


@mock.patch.object(tabular, "FOLDS", 3)  # smaller programs
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@cases("name", "EnsembleRegressor", "EnsembleClassifier")
def test_tabular_estimators_are_as_scikit_learn_checks(name):
    check_estimator(getattr(tabular, name)(members=1, epochs=2))


def test_tabular_estimator_keeps_networks_of_all_rows_and_scores_rows_left_out():
    x, y, splits = randn(0, 25, 2), randn(1, 25), []

    def train(model, data, recipes, members, *sizes):  # off by 0.1 where seen, else by
        splits.extend(data.splits)  # twice the decay and a bit
        off = np.full((len(splits), 9, members, 25), 0.1)
        for i, split in enumerate(splits):
            for j, (decay, other) in enumerate(recipes[i]):
                off[i, j, :, split.test] = 2 * decay + (0 if other == 30 else 0.5)
        networks = {"number": np.arange(off[..., 0].size)}
        return networks, [data.y + off, np.ones(off.shape)]

    with mock.patch.object(tabular, "train", train):
        model = tabular.EnsembleRegressor(members=2, random_state=0).fit(x, y)
    *folds, whole = splits
    assert len(folds) == 10 and len(whole.train) == 25
    assert sorted(np.concatenate([fold.test for fold in folds])) == [*range(25)]
    assert all(sorted([*each.train, *each.test]) == [*range(25)] for each in folds)
    assert model.decays_ == (0.1, 30) == tabular.GAUSSIAN.recipes[7]
    assert_close(model.scores_, np.full(25, 0.2))
    assert_array_equal(
        model._networks["number"], [2 * (9 * 10 + 7) + i for i in (0, 1)]
    )


def test_tabular_intervals_are_in_the_units_of_the_targets():
    x = 1e8 + np.float64(randn(2, 28, 3))  # float32 would have it in eights
    y = 5e9 + 1e8 * x[:, 0]
    model = tabular.EnsembleRegressor(members=1, epochs=20, random_state=0).fit(x, y)
    mean, deviation = model.predict_deviation(x)
    ends = model.predict_interval(x, coverage=0.8)
    q = em.conformal_quantile(model.scores_, 0.8)
    assert_close(ends - mean[:, None], np.outer(q * deviation, [-1, 1]))
    assert model.score(x, y) > 0.5
    assert_array_equal(model.predict_interval(x[:1], 0.99), [[-np.inf, np.inf]])


def test_tabular_cross_entropy_has_a_decay_of_all_weights():
    params, x = tabular.init(jax.random.key(0), 3, 4), randn(3, 5, 3)
    params = jax.tree.map(lambda p: p + randn(9, *p.shape), params)
    h = tabular.member_hyper(x, np.arange(5), np.arange(5), 3.0, 0)
    (probs,) = tabular.softmax_apply(params, x, h)
    y, squares = np.array([0, 1, 2, 3, 3]), [np.square(p.weight).sum() for p in params]
    expected = -np.log(probs[np.arange(5), y]).mean() + 3 / 5 * np.sum(squares)
    assert_close(tabular.softmax_loss(params, x, y, h), expected)


@pytest.fixture
def uci_folder(tmp_path):
    """A folder of one set in the form of benchmarks/uci.py: splits of two sizes."""
    (tmp_path / "made-up").mkdir()
    x, noise = randn(3, 60, 3), randn(4, 60)
    x[:, 2] = 0.1  # a column that does not vary
    table = np.c_[5 + 2 * x, 300 + 40 * (np.sin(x[:, 0]) + 0.2 * noise)]
    np.savetxt(tmp_path / "made-up" / "data.txt", table)
    rows = np.random.default_rng(0).permutation(60)
    lines = [" ".join(map(str, test)) for test in (rows[:6], rows[6:14])]
    (tmp_path / "made-up" / "test_rows.txt").write_text("\n".join(lines))
    return tmp_path


@mock.patch.multiple(tabular, BATCH=20, STEPS=2)
def test_uci_scores_are_those_of_networks_trained_one_by_one(uci_folder):
    """benchmarks/uci.py in its short form."""
    file, own, choose = uci_folder / "uci.json", [(10, 300), (0.1, 3)], uci.choose

    def chosen(*args):
        assert choose(*args) == [(1, 30)] * 2
        return own

    one = tabular.GAUSSIAN._replace(recipes=((1, 30),))
    with mock.patch.multiple(uci, choose=chosen, GAUSSIAN=one):
        uci.main(words("--members 2 --epochs 3 --data", uci_folder, "--json", file))
    found = json.loads(file.read_text())["results"]["made-up"]
    x, y, splits = uci.read_set(uci_folder / "made-up")
    trains = [split.train for split in splits for _ in range(2)]
    num_steps = 3 * 2  # 52 rows: two batches of 20
    assert tabular.member_orders([np.arange(30)], 0, 0).shape == (1, 2, 15)
    assert found["recipes"] == [list(recipe) for recipe in own]
    hyper = [tabular.member_hyper(x, y, trains[i], *own[i // 2]) for i in range(4)]
    make = functools.partial(tabular.make_trainer, tabular.GAUSSIAN, 3, num_steps)
    together = make(4)
    start, ends = together.gather(tabular.start(together, hyper, 0)), []
    drawn = [order for i in (0, 1) for order in tabular.member_orders(trains, i, 0)[:2]]
    assert len({order.tobytes() for order in drawn}) == 4  # of one split
    for i, rows in enumerate(trains):
        assert_close(hyper[i]["x_mean"][0], x[rows].mean(axis=0))
        assert_close(hyper[i]["x_scale"][0], [*x[rows, :2].std(axis=0), 1])
        assert_close(hyper[i]["variance_decay"], own[i // 2][1] / len(rows))
        alone = make(1)
        state = alone.scatter(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], start))
        for epoch in range(3):
            order = tabular.member_orders(trains, epoch, 0)[i]
            assert order.shape == (2, 20) == (2, len(set(order.flat)) // 2)
            assert set(order.flat) <= set(rows)
            state, _ = alone.epoch(state, (x, y), order)
        ends.append(alone.predict_members(state, x))
    means, variances = np.concatenate(ends, axis=1)  # [4, 60] each
    for i, (_, test) in enumerate(splits):
        mine, target = (slice(2 * i, 2 * i + 2), test), y[test]
        report = em.regression_report(means[mine], variances[mine], target)
        spread = variances[mine].mean(axis=0) + means[mine].var(axis=0)
        for name in (uci.RMSE, uci.NLL):
            assert_close(found[name][i], report["ensemble"][name])
        assert found["coverage"][i] == report["ensemble"]["coverage"]["90%"]
        assert_close(found["width"][i], 2 * 1.644854 * np.sqrt(spread).mean())
        assert_close(found["variance_of_means"][i], report["variance_of_means"])
        assert found["variance_of_means"][i] > 0


def test_uci_loss_weighs_rows_by_their_deviation_and_has_a_decay_for_each_output():
    x, y, key = randn(7, 20, 3), 5 + randn(8, 20), jax.random.key(0)
    h = tabular.member_hyper(x, y, np.arange(20), 3.0, 7.0)
    params = tabular.init(key, 3, 2)
    params = jax.tree.map(lambda p: p + randn(9, *p.shape), params)
    mean, variance = map(np.float64, tabular.gaussian_apply(params, x, h))
    weights = np.sqrt(variance)
    nll = (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance) / 2
    expected = (weights * nll).sum() / weights.sum() - np.log(y.std())
    (first, _), (last, _) = params
    squares = np.square(first).sum() + np.square(last[:, 0]).sum()
    expected += (3 * squares + 7 * np.square(last[:, 1]).sum()) / 20
    assert_close(tabular.gaussian_loss(params, x, y, h), expected)
    low = params[1]._replace(bias=jnp.full(2, -1e3), weight=jnp.zeros((50, 2)))
    _, variance = tabular.gaussian_apply((params[0], low), x, h)
    assert_close(variance, np.full(20, 1e-4 * y.var()))


def test_uci_looks_at_no_test_row(uci_folder):
    x, y, splits = uci.read_set(uci_folder / "made-up")
    (rows, test), nonsense, seen, found = splits[0], y.copy(), [], []
    nonsense[test] = 1e6

    def train(_, data, recipes, members, *sizes):  # the target of the nearest, or two
        seen.append(data.splits)
        squares = np.square(data.x[:, None] - data.x).sum(axis=2)
        means = []
        for own, each in zip(data.splits, recipes):
            nearest = own.train[squares[:, own.train].argsort(axis=1)[:, :2]]
            one, other = data.y[nearest].T
            means.append([one if d < 10 else (one + other) / 2 for d, _ in each])
        means = np.stack([means] * members, axis=2)
        return None, [means, np.full(means.shape, y.var())]

    for targets in (y, nonsense):
        with mock.patch.object(uci, "train", train):
            data = uci.Data(x, targets, splits[:1])
            found.append(uci.measure(data, members=1, epochs=1, seed=0))
    alike = "recipes", "quantile", "width", "calibrated_width"
    assert [found[0][key] for key in alike] == [found[1][key] for key in alike]
    assert found[0][uci.RMSE] != found[1][uci.RMSE]
    assert np.isfinite(found[0]["quantile"])  # as of the 11 rows held out
    folds, whole, [(rest, held)] = seen[:3]
    assert whole == splits[:1]
    assert_array_equal(np.sort([*rest, *held]), rows)
    assert_array_equal(np.sort(np.concatenate([fold.test for fold in folds])), rest)
    for fold in folds:  # each row that does not calibrate is tested once
        assert_array_equal(np.sort([*fold.train, *fold.test]), rest)


def test_uci_choice_is_best_over_the_folds_and_of_equals_the_plainest():
    rows, y, settings = np.arange(100), randn(5, 100).astype(np.float64), []
    # An error a setting: of the first split, fold 1, of its others, of the second.
    errors = [(1.7, 1, 1), (0.5, 2, 1), (1.5, 1, 0.5), (1.5, 1, 0.4999), (1, 1, np.nan)]

    def train(model, data, recipes, members, *sizes):
        settings.extend(recipes[0])
        first, others, second = np.transpose(errors)[..., None, None]
        means = np.stack([first, *[others] * 4, *[second] * 5]) + y
        return None, [np.broadcast_to(means, (10, 5, 2, 100)), np.ones((10, 5, 2, 100))]

    data = uci.Data(None, y, [uci.Split(rows, rows)] * 2)
    five = tabular.GAUSSIAN._replace(recipes=tuple((i, 0) for i in range(5)))
    with mock.patch.multiple(uci, train=train, GAUSSIAN=five):
        assert uci.choose(data, 40, 0) == [settings[4], settings[2]]


@pytest.mark.parametrize("factor, coverage", [(0.5, 0.589), (2, 0.999)])
def test_uci_calibrates_wrong_variances(factor, coverage):
    """Of four fifths of what is calibrated, 90% is held by chance 87% to 93%."""
    rows, noise = np.arange(4000).reshape(2, -1), np.exp(randn(6, 4000))
    y = noise * np.random.default_rng(0).normal(size=4000)
    means, variances = np.zeros((1, 2, 4000)), (factor * noise) ** 2
    data, held = uci.Data(None, y, [uci.Split([], rows[0])]), [uci.Split([], rows[1])]
    arrays = means, np.broadcast_to(variances, means.shape)
    raw, found = uci.score(data, *arrays), uci.calibrate(data, held, *arrays)
    assert abs(raw["coverage"][0] - coverage) < 0.03
    assert abs(found["calibrated_coverage"][0] - 0.9) < 0.03
    ratio = found["quantile"][0] / 1.644854
    assert abs(ratio * factor - 1) < 0.06
    assert_close(found["calibrated_width"][0], raw["width"][0] * ratio)


REFUSED_BY_UCI = [
    ("data.txt", "", "", "data.txt is empty; expected a row an example"),
    ("data.txt", "1 2\n3 x", "", "could not convert string 'x'"),
    ("data.txt", "1 2\n3", "", "columns changed from 2 to 1"),
    ("data.txt", "1 2\n3 nan", "", "row 1 holds nan; expected below 1e18"),
    ("data.txt", "1 2\n3 1e39", "", "row 1 holds inf; expected below 1e18"),
    ("data.txt", "1\n2", "", "one column; expected features and a target"),
    ("test_rows.txt", "", "", "test_rows.txt is empty; expected a line"),
    ("test_rows.txt", "1 60", "", "2 rows and leaves 59 of 60; expected each"),
    ("test_rows.txt", "1\n2 2", "", "split 1 tests 2 rows and leaves 59 of 60"),
    ("test_rows.txt", "1\n\n2", "", "split 1 tests 0 rows and leaves 60 of 60"),
    ("test_rows.txt", "1 2.5", "", "invalid literal for int"),
    ("test_rows.txt", " ".join(map(str, range(16))), "", "leaves 44 of 60; expected"),
    ("x", "", "--sets boston", "no set boston in DIR; there are made-up"),
    ("x", "", "--data DIR/made-up", "DIR/made-up holds no folder with data.txt"),
    ("x", "", "--members 0", "--members: expected a whole number from 1"),
    ("x", "", "--seed -1", "--seed: expected a whole number from 0"),
    ("x", "", "--json DIR/no/x", "--json DIR/no/x: there is no folder DIR/no"),
]


@pytest.mark.parametrize("file, content, flags, message", REFUSED_BY_UCI)
def test_uci_names_what_is_wrong(uci_folder, wrong, file, content, flags, message):
    (uci_folder / "made-up" / file).write_text(content)
    said = wrong(uci.main, f"--data DIR {flags}".replace("DIR", str(uci_folder)))
    assert message.replace("DIR", uci_folder.as_posix()) in said.replace(os.sep, "/")


def test_tables_score_each_split_on_its_test_rows(capsys):
    x, y, rows = np.arange(8.0)[:, None], np.arange(8.0), np.arange(8)

    def predict(model, train, new):  # 2 below or above, and wide enough from 6 on
        assert model == "m" and not {*train[0].flat} & {*new.flat}
        (new,) = new.T
        mean, wide = new + np.where(new < 5, -2, 2), 3 * (new > 5)
        return mean, np.stack([mean - 1 - wide, mean + 1], axis=1)

    splits = [uci.Split(rows[2:], rows[:2]), uci.Split(rows[:4], rows[4:])]
    found = tables.measure(predict, "m", uci.Data(x, y, splits))
    assert_array_equal(found[:, :3], [[2, 0, 2], [2, 0.5, 3.5]])


@posix
def test_speed_says_in_a_line_why_it_stops(tmp_path, monkeypatch):
    said = functools.partial(said_by, SystemExit)

    def refused(group):
        monkeypatch.setattr(sys, "argv", ["speed.py", "--group", group])
        return said(speed.main)

    data = tmp_path / "concrete" / "data.txt"
    data.parent.mkdir()
    data.write_text("1 2 3")
    monkeypatch.setenv("UCI_DIR", str(tmp_path))
    monkeypatch.setenv("MNIST_DIR", str(tmp_path / "none"))
    with monkeypatch.context() as patch:  # before anything starts
        patch.setattr(speed.subprocess, "Popen", None)
        assert refused("10") == "--group 10: there are groups 1 to 9"
        assert refused("5").startswith(f"{data}: cannot reshape array of size 3 into")
        assert refused("7").startswith(f"MNIST_DIR is {tmp_path / 'none'}, no folder;")
        monkeypatch.delenv("UCI_DIR")
        assert refused("5").startswith("UCI_DIR is not set; set it to the folder")
    peer = "a peer", "../speed.py --nope"  # of whose words the last line tells
    for stopped in said(speed.measure, dict([peer]), 1), said(speed.run_job, *peer):
        words = "speed.py: error: unrecognized arguments: --nope"
        assert stopped == f"a peer ended with status 2: {words}"


@pytest.mark.parametrize("name", faults.TRIALS)
def test_damage_is_refused_and_nothing_is_lost(name):
    """The trials of benchmarks/faults.py, in their short form."""
    counts, failures = faults.run(name, quick=True)
    assert sum(counts.values()) and not failures, failures


@linux
def test_readme_starts_alike_on_any_number_of_cores(tmp_path, monkeypatch):
    """benchmarks/devices.py in its short form: the README's first example."""
    code, said = machines.read_readme()
    short = [block.replace("(500, 50)", "(5, 50)") for block in code[:2]]
    assert short != code[:2]
    for variable in ENVIRONMENT.items():
        monkeypatch.setenv(*variable)

    def start(cores):
        folder = tmp_path / str(cores)
        folder.mkdir()
        return machines.first_steps(cores, folder, short)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        (_, one), *others = pool.map(start, [1, 3, 16])
    for printed, weights in others:
        assert printed.count("accuracy") == 6
        assert machines.difference(weights, one) < 1e-5
    for told, count in (said, 0), (said + 0.025, 13), (said + 0.2, 14), (said[1:], 1):
        assert len(machines.complaints(told, said)) == count
