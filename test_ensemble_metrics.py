"""Tests of ensemble_metrics.py, in the order of its sections."""

import contextlib
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ensemble_metrics as em
from helpers import assert_close, assert_refuses, cases, random_probs, said_by

regression = em.regression_report


@pytest.fixture(params=[2**16, 10])
def block_sizes(request, monkeypatch):
    """Take all rows of probabilities in one block, and one or two per block."""
    monkeypatch.setattr(em, "_BLOCK_SIZE", request.param)


# ---------------------------------------------------------------------------------
# The module as a whole
# ---------------------------------------------------------------------------------


def test_usage_in_the_docstring_runs_without_jax():
    code = r"""
import sys
sys.modules |= {"jax": None, "ml_dtypes": None, "pjax_ensemble": None}
import ensemble_metrics as em
lines = em.__doc__.splitlines()
exec("\n".join(line[4:] for line in lines if line.startswith("    ")))
print(f"{decided.mean():.0%}, of which {wrong[1000:][decided].mean():.0%} are wrong")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout and f"threshold  # {run.stdout}" in em.__doc__, run.stderr


# ---------------------------------------------------------------------------------
# Probabilities
# ---------------------------------------------------------------------------------


def of_types(floats, integers, make=np.asarray):
    """Return a function that makes arrays of these types; booleans stay."""
    types = {"f": floats, "i": integers, "b": bool}
    return lambda x: make(x.astype(types[x.dtype.kind]))


def tensor(x):
    return pytest.importorskip("torch").tensor(x)


def jax_array(x):
    return pytest.importorskip("jax.numpy").asarray(x)


def of_bfloat16(make):
    def convert(x):
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16  # comes with JAX
        return of_types(bfloat16, "uint8", make)(x)

    return convert


@cases(
    "form",
    np.ndarray.tolist,
    of_types("float16", "uint8"),
    of_types("float32", "int8"),
    of_types("longdouble", "uint64"),
    of_types(">f8", ">i4"),
    of_bfloat16(np.asarray),
    of_bfloat16(jax_array),
    of_types("float32", "int16", tensor),
)
def test_metrics_of_numbers_of_any_type_are_of_float64(form):
    for metric, arrays in METRICS:
        result = metric(*map(form, arrays.values()))
        assert_close(result, metric(*arrays.values()), 1e-6)
    first = np.rint(256 * random_probs(0, 3, 200, 2)[..., 0]) / 256  # bfloat16 has it
    probs = np.stack([first, 1 - first], axis=-1)
    labels = np.arange(200) % 2
    report = em.ensemble_report(form(probs), form(labels))
    expected = em.ensemble_report(probs, labels)
    for name in ("predictive_entropy", "mutual_information"):  # logs of float32
        assert_close(report.pop(name), expected.pop(name), 1e-6)
    assert_close(report, expected, 1e-12)
    assert em.mutual_information([form(probs[0])] * 3).max() < 1e-7


def test_metric_takes_the_memory_of_a_block():
    draw = np.random.default_rng(0)
    probs = draw.dirichlet(np.ones(50), (4, 20_000)).astype(np.float32)  # 15 MiB
    labels = np.where(draw.random(20_000) < 0.1, probs[0].argmax(axis=-1), 0)
    assert len(list(em._blocks(probs, 4))) < 100  # large enough for NumPy to be fast
    for result, metric, *args in (  # MiB of the result, besides a few blocks
        (0, em.ensemble_report, probs, labels),
        (0.6, em.mutual_information, probs),
        (7.6, em.temper, probs[0], 2),
        (0, em.fit_temperature, probs[0], labels),
        (0, em.reliability, probs[0], labels),
        (0.8, regression, probs[..., 0], probs[..., 0], labels),
        (24, em.fold_sets, probs[0, :, 0], labels % 4, 1 - probs),  # counts, of 64 bits
        (0.3, em.fold_interval, probs[..., 0], *probs[:2, :2000, 0], labels[:2000] % 4),
    ):
        tracemalloc.start()
        metric(*args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < (result + 4) * 2**20, metric


HALVES = np.full((1, 2, 2), 0.5)
TWO = np.ones((1, 2))
THREE = np.ones(3)
RIGHT = THREE > 1  # no prediction is wrong
SURE = np.array([[0.75, 0.25]] * 3)
FAR = np.full((2, 40_000, 2), 0.5)
FAR[1, -1] = 1  # the last of many
AXES = np.ones((3, 2, 4))  # members and examples in the wrong order
ONE_HOT = np.eye(4)[:3]
LABELS = np.array([0, 0, 1])
SQUARE = np.ones((2, 2))


def reliability(probs, labels):
    return np.nan_to_num(em.reliability(probs, labels))


METRICS = [  # with the arrays that they take, by the names in the messages
    (em.predictive_entropy, {"probabilities": HALVES}),
    (em.mutual_information, {"probabilities": HALVES}),
    (reliability, {"probabilities": SURE, "labels": LABELS}),
    (em.ensemble_report, {"probabilities": SURE[None], "labels": LABELS}),
    (regression, {"means": TWO, "variances": TWO, "targets": TWO[0]}),
    (em.auroc, {"scores_in": THREE, "scores_out": THREE}),
    (em.fpr95, {"scores_in": THREE, "scores_out": THREE}),
    (em.aurc, {"uncertainty": THREE, "wrong": RIGHT}),
    (em.conformal_quantile, {"scores": THREE}),
    (em.fold_sets, {"scores": THREE, "folds": LABELS, "values": SQUARE}),
    (lambda x: em.fold_interval(x, THREE, THREE, LABELS), {"predictions": SQUARE}),
    (em.risk_threshold, {"uncertainty": THREE, "wrong": RIGHT}),
    (lambda probs: em.temper(probs, 2), {"probabilities": HALVES}),
    (em.fit_temperature, {"probabilities": SURE, "labels": LABELS}),
]

LABELS_ARE = r"labels are \w+\[.+\]; expected integers \[3\], 0 to 1"
WRONG_SCORES = [
    (lambda x: x[None], r"e shape \(1, 3\); expected \[n\]; from .* one column, \[:, "),
    (lambda x: x[None, None], r"e shape \(1, 1, 3\); expected \[n\]; pass .*\.ravel\("),
    (lambda x: x * [1, np.nan, 1], "have 1 nan; expected none"),
    (lambda _: np.array([1, 2, 2**53 + 1]), r"integers of 2\*\*53 or more, which fl"),
]
NONE_OF_TWO = [
    *WRONG_SCORES,
    (lambda x: x[:0], r"there are \d scores_in and \d scores_out; expected one or"),
]
WRONG = {  # changes to these arrays, and the errors that they raise
    "probabilities": [
        (lambda p: 8 * p, r"\[0.*\] begin with \d.* add up to 8.0; .*; pass softmax"),
        (lambda p: p * np.nan, "begin with nan and add up to nan"),
        (lambda p: p + np.array([1, -1]), r"begin with 1\.\d+ and add up to 1.0"),
        (lambda p: p[..., :0], r"shape \(.*, 0\); expected \["),
        (lambda p: p[..., 0, 0].sum(), r"shape \(\); expected \["),
        (lambda p: [[1], [1, 0]], "an array: setting an .*; pass rows of one length; "),
    ],
    "labels": [
        (lambda y: y - 1, r"labels lie in -1\.\.0; expected 0 to 1"),
        (lambda y: y + 1, r"labels lie in 1\.\.2; expected 0 to 1"),
        (np.float64, LABELS_ARE),
        (np.diag, LABELS_ARE),
        (lambda y: y[1:], LABELS_ARE),
    ],
    "folds": [
        (lambda k: k * 0, r"values \[2, \d\] are of 2 members, folds of 1; expec"),
    ],
    "values": [
        (lambda x: x[:1], r"folds lie in 0\.\.1; expected 0 to 0"),
        (lambda x: x[0, 0], r"folds are int64\[3\]; expected integers \[\]"),
    ],
    "predictions": [
        (lambda x: x * np.inf, r"expected finite numbers \[K, N\], \[n\] and \[n\]"),
    ],
    "means": [
        (lambda x: x * np.inf, r"s\[0, 0\] is inf, its variance 1.0, its target 1.0"),
        (lambda x: x[..., None], r"means have shape \(1, 2, 1\), .*; drop a last axis"),
    ],
    "variances": [
        (lambda x: x * 0, "variance 0.0, its t"),
        (lambda x: -x, "variance -1.0, its t"),
        (lambda x: x * np.inf, "variance inf, its t"),
        (lambda x: x * [1, np.nan], r"means\[0, 1\] is 1.0, its variance nan"),
        (lambda x: x[:, :1], r"variances \(1, 1\) and targets \(2,\); expected \[K"),
    ],
    "targets": [
        (lambda x: x * np.nan, "target nan; expected finite numbers"),
        (lambda x: x[0], r"targets \(\); .*\[K, N, ...\], .* and \[N, ...\]"),
    ],
    "wrong": [
        (lambda x: x + 0, r"wrong is int64\[3\]; expected bool\[3\], one per example"),
        (lambda x: x[:1], r"wrong is bool\[1\]; expected bool\[3\]"),
    ],
    "scores": WRONG_SCORES,
    "uncertainty": WRONG_SCORES,
    "scores_in": NONE_OF_TWO,
    "scores_out": NONE_OF_TWO,
}


@cases("metric, arrays", *METRICS)
def test_metric_names_the_array_that_is_wrong(metric, arrays):
    def said_of(name, bad):
        return said_by(ValueError, metric, *(arrays | {name: bad}).values())

    metric(*arrays.values())
    for name, x in arrays.items():
        for change, message in WRONG[name]:
            said = said_of(name, change(x))
            assert re.search(message, said) and "\n" not in said
        masked = np.ma.masked_array(x, np.arange(x.size).reshape(x.shape) == 1)
        message = f"{name} are masked; expected unmasked real numbers"
        assert said_of(name, masked) == message
        if x.ndim > 1:
            assert said_of(name, list(masked)) == message
        for dtype in ("c16", "U5", "O", "f4,f4"):
            message = f"{name} are {np.dtype(dtype)}; expected unmasked real numbers"
            assert said_of(name, x.astype(dtype)) == message


def test_tensors_of_pytorch_without_an_array_are_named_with_the_remedy():
    probs = tensor(SURE)
    message = (
        "probabilities cannot become.*; for a PyTorch tensor pass "
        r"x\.detach\(\)\.cpu\(\).*float.*"
    )
    for bad in (probs.requires_grad_(), list(probs), probs.detach().bfloat16()):
        said = said_by(ValueError, em.temper, bad, 2)
        assert re.fullmatch(message, said)


PROBABILITY_MISFITS = {
    "predictive_entropy of one model": (
        lambda: em.predictive_entropy(SURE),
        r"\(3, 2\); expected .* p as p\[None\]",
    ),
    "ensemble_report of one model": (
        lambda: em.ensemble_report(SURE, LABELS),
        r"\(3, 2\); .*, as by predict_members",
    ),
    "ensemble_report of labels with one more axis": (
        lambda: em.ensemble_report(HALVES, [[0, 1]]),
        r"\(1, 2, 2\); expected \[K, N, C",
    ),
    "ensemble_report of no members": (
        lambda: em.ensemble_report(HALVES[:0], [0]),
        r"\(0, 2, 2\); expected \[K, N, C\]",
    ),
    "ensemble_report of no examples": (
        lambda: em.ensemble_report(HALVES[:, :0], LABELS[:0]),
        "none may be empty",
    ),
    "temper of sums above 1": (
        lambda: em.temper(SURE * 1.0011, 2),
        r"s\[0\] begin with 0.75\d* .* to 1.0011",
    ),
    "temper of sums below 1": (
        lambda: em.temper(SURE * 0.9989, 2),
        r"s\[0\] begin with 0.74\d* .* to 0.9989",
    ),
    "temper of a sum of 2 in the last row": (
        lambda: em.temper(FAR, 2),
        r"s\[1, 39999\] begin with 1.0 and add up to 2.0",
    ),
    "mutual_information of a sum of 2 in the last row": (
        lambda: em.mutual_information(FAR),
        r"s\[1, 39999\] begin with 1.0 and add up",
    ),
    "temper of one probability": (
        lambda: em.temper(THREE / 2, 2),
        r"s\[\] begin .* to 1.5; .*; for the p of one",
    ),
    "temper of one column": (
        lambda: em.temper(TWO[:, :1], 2),
        r"\(1, 1\); .* np.stack\(\[1 - p, p\], axis",
    ),
    "fit_temperature of one column": (
        lambda: em.fit_temperature(THREE / 2, LABELS),
        r"\(3,\); .* np.stack\(\[1 - p",
    ),
}


@pytest.mark.parametrize("name", PROBABILITY_MISFITS)
def test_probabilities_that_do_not_fit_are_named(name):
    assert_refuses(*PROBABILITY_MISFITS[name])


# ---------------------------------------------------------------------------------
# Uncertainty
# ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("block_sizes")
def test_uncertainty_equals_loops_of_entropies():
    probs = random_probs(0, 3, 50, 4, 5)
    probs[:, :5] = probs[0, :5]  # on these the members agree

    def entropy(p):
        return -sum(x * np.log(x) for x in p if x > 0)

    total = np.apply_along_axis(entropy, -1, probs.mean(axis=0))
    own = np.apply_along_axis(entropy, -1, probs).mean(axis=0)
    assert_allclose(em.predictive_entropy(probs), total, atol=1e-12)
    mutual = em.mutual_information(probs)
    assert_allclose(mutual, total - own, atol=1e-12)
    assert mutual.min() >= 0 and mutual[:5].max() < 1e-12 < mutual[5:].min()


# ---------------------------------------------------------------------------------
# Reports
# ---------------------------------------------------------------------------------


def bins_by_loops(probs, labels):
    """Put (confidence, whether it is right) of each example into one of 15 bins."""
    bins = [[] for _ in range(15)]
    for p, label in zip(probs, labels):
        confidence = max(p)
        guess = list(p).index(confidence)
        bins[min(int(confidence * 15), 14)].append((confidence, guess == label))
    return bins


def scores_by_loops(probs, labels):
    """Compute the four scores by their definitions."""
    nll = -sum(np.log(p[label]) for p, label in zip(probs, labels))
    brier = np.sum((probs - np.eye(4)[labels]) ** 2)
    sums = [np.sum(b, axis=0) for b in bins_by_loops(probs, labels) if b]
    hits = sum(right for _, right in sums)
    ece = sum(abs(right - confidence) for confidence, right in sums)
    return [x / len(probs) for x in (hits, nll, brier, ece)]


# 12/15 opens a bin, and 1 belongs to the last.
EDGES = [0.8, 0.2, 0, 0], [0.84, 0.16, 0, 0], [0.79, 0.21, 0, 0], [0, 0, 1, 0]


@pytest.mark.usefixtures("block_sizes")
def test_reliability_counts_and_averages_each_bin():
    probs = random_probs(0, 300, 4)
    probs[:4] = EDGES
    labels = np.arange(300) % 4
    bins = bins_by_loops(probs, labels)
    diagram = em.reliability(probs, labels)
    assert diagram[0].tolist() == [len(b) for b in bins] and 0 in diagram[0]
    means = [np.mean(b, axis=0) if b else (np.nan, np.nan) for b in bins]
    assert_allclose(diagram[1:].T, means)
    of_rows = em.reliability(probs.reshape(3, 100, 4), labels.reshape(3, 100))
    assert_array_equal(of_rows, diagram)


@pytest.mark.usefixtures("block_sizes")
def test_report_equals_loops_for_members_ensemble_and_sizes():
    probs = random_probs(0, 3, 200, 4)
    probs[:, 4:8] = EDGES
    labels = np.arange(200) % 4
    labels[4:8] = 0, 1, 0, 2
    report = em.ensemble_report(probs, labels)
    sizes = [probs[:k].mean(axis=0) for k in (1, 2, 3)]
    assert report["ensemble"] == report["by_size"][-1]
    all_scores = report["member"] + report["by_size"]
    for scores, p in zip(all_scores, np.concatenate([probs, sizes]), strict=True):
        assert_allclose(list(scores.values()), scores_by_loops(p, labels))
    pairs = itertools.combinations(probs.argmax(axis=2), 2)
    assert_allclose(report["disagreement"], np.mean([a != b for a, b in pairs]))
    for metric in (em.predictive_entropy, em.mutual_information):
        assert_allclose(report[metric.__name__], metric(probs).mean())
    tokens = probs.reshape(3, 50, 4, 4)
    assert em.ensemble_report(tokens, labels.reshape(50, 4)) == report


def test_report_of_certain_members_is_finite():
    right = [[1.0, 0]]
    wrong = [[0, 1.0]]
    report = em.ensemble_report([right, wrong], [0])
    json.dumps(report, allow_nan=False)
    assert_allclose(report["member"][1]["negative_log_likelihood"], 87.3, atol=0.1)


# Two members, eight examples, three classes, and the scores of the members and of their
# mean by scikit-learn 1.9.1 (accuracy_score, log_loss, brier_score_loss) and
# TorchMetrics 1.9.0 on torch 2.13 (MulticlassCalibrationError, 15 bins, in float32).
# fmt: off
FIXED_PROBS = np.array([
    71, 19, 10,  25, 55, 20,  5, 15, 80,  43, 41, 16,
    30, 28, 42,  91, 5, 4,  12, 62, 26,  35, 17, 48,
    58, 32, 10,  45, 35, 20,  11, 9, 80,  22, 68, 10,
    36, 34, 30,  97, 2, 1,  8, 30, 62,  15, 23, 62,
]).reshape(2, 8, 3) / 100
# fmt: on
FIXED_LABELS = np.array([0, 1, 2, 1, 2, 0, 2, 0])
FIXED_SCORES = [
    (0.625, 0.6767219999927051, 0.4005, 0.2849999666213989),
    (0.625, 0.7266178912132587, 0.414, 0.2524999976158142),
    (0.75, 0.6697409073096285, 0.38958125, 0.18000000715255737),
]


def test_report_agrees_with_scikit_learn_and_torchmetrics():
    report = em.ensemble_report(FIXED_PROBS, FIXED_LABELS)
    for scores, expected in zip([*report["member"], report["ensemble"]], FIXED_SCORES):
        assert_allclose(list(scores.values())[:3], expected[:3], rtol=1e-12)
        assert_allclose(scores["expected_calibration_error"], expected[3], rtol=1e-6)


def gaussian_scores_by_loops(mean, variance, targets):
    normals = map(statistics.NormalDist, mean, np.sqrt(variance))
    pairs = list(zip(normals, targets))
    inside = np.array([abs(2 * normal.cdf(y) - 1) for normal, y in pairs])
    return {
        "root_mean_squared_error": math.dist(mean, targets) / math.sqrt(len(mean)),
        "negative_log_likelihood": -np.mean([np.log(n.pdf(y)) for n, y in pairs]),
        "coverage": {f"{p}%": np.mean(inside <= p / 100) for p in (50, 90, 95)},
    }


@cases("members, offset, shape", (1, 0, (60,)), (3, 2**20, (60,)), (3, 0, (5, 4, 3)))
def test_regression_report_equals_loops_for_members_and_sizes(members, offset, shape):
    draw = np.random.default_rng(0)
    # Multiples of 1 / 1024, so that adding the offset rounds nothing off.
    drawn = draw.integers(-4000, 4000, (1 + members, *shape)) / 1024
    targets = drawn[0]
    means = drawn[1:]
    variances = draw.uniform(0.1, 3, means.shape)
    report = regression(means + offset, variances, targets + offset)
    assert report["ensemble"] == report["by_size"][-1]
    sizes = range(1, members + 1)
    mean = [means[:k].mean(axis=0) for k in sizes]
    variance = [variances[:k].mean(axis=0) + means[:k].var(axis=0) for k in sizes]
    all_scores = report["member"] + report["by_size"]
    all_means = np.concatenate([means, mean]).reshape(-1, 60)
    all_variances = np.concatenate([variances, variance]).reshape(-1, 60)
    for scores, m, v in zip(all_scores, all_means, all_variances, strict=True):
        assert_close(scores, gaussian_scores_by_loops(m, v, targets.ravel()), 1e-7)
    parts = report["mean_of_variances"], report["variance_of_means"]
    assert_allclose(parts, [variances.mean(), means.var(axis=0).mean()])
    assert_allclose(report["predictive_variance"], sum(parts))
    json.dumps(report, allow_nan=False)
    edge = [statistics.NormalDist().inv_cdf(0.75)]  # intervals are closed
    assert regression([[0]], [[1]], edge)["ensemble"]["coverage"]["50%"] == 1


@cases("shape", (1, 7), (3, 7), (4, 2, 3, 5), (2,))
def test_mixture_has_the_mean_and_the_variance_of_its_draws(shape):
    draw = np.random.default_rng(0)
    means = draw.normal(size=shape).astype(np.float32)
    variances = draw.uniform(0.1, 2, size=shape).astype(np.float32)
    # A draw of a member has the mean m and the mean square v + m^2.
    mean = sum(m.astype(float) for m in means) / len(means)
    squares = sum(v + m.astype(float) ** 2 for m, v in zip(means, variances))
    found = em.mixture(means, variances)
    assert_allclose(found, [mean, squares / len(means) - mean**2], rtol=1e-12)
    assert found[0].dtype == np.float64


def test_report_as_text_has_the_scores_of_members_ensemble_and_sizes():
    probs = random_probs(0, 3, 50, 4)
    labels = np.arange(50) % 4
    report = em.ensemble_report(probs, labels)
    lines = em.format_report(report | {"member": [*report["member"][:2], None]})
    first, second, last = (part.splitlines() for part in lines.split("\n\n"))
    head = "            accuracy       NLL     Brier       ECE"
    assert first[0] == second[1] == head
    assert second[0] == "ensemble by size, finite members only"
    assert first[3] == "member 2      failed: not finite"
    rows = [*first[1:3], first[4], *second[2:]]
    models = [*report["member"][:2], report["ensemble"], *report["by_size"]]
    names = ["member 0", "member 1", "ensemble", "first 1", "first 2", "first 3"]
    for row, scores, name in zip(rows, models, names, strict=True):
        assert len(row) == 50 and row.startswith(name)
        share, *numbers = row.removeprefix(name).split()
        assert share == f"{100 * scores['accuracy']:.2f}%"
        assert numbers == [f"{x:.4f}" for x in list(scores.values())[1:]]
    assert last == [
        f"disagreement {100 * report['disagreement']:.2f}% of pairs, predictive "
        f"entropy {report['predictive_entropy']:.4f} nats, of which mutual information "
        f"{report['mutual_information']:.4f}"
    ]
    one = em.format_report(em.ensemble_report(probs[:1], labels)).splitlines()
    assert one[0] == head and one[1].startswith("model  ") and len(one) == 2


def test_report_of_a_regression_as_text_has_errors_and_coverage():
    draw = np.random.default_rng(0)
    means, variances = draw.normal(size=(2, 40)), draw.uniform(0.5, 2, size=(2, 40))
    report = regression(means, variances, draw.normal(size=40))
    text = em.format_report(report).splitlines()
    assert text[0].split() == "in 50% in 90% in 95% RMSE NLL".split()
    scores = report["ensemble"]
    shares = [f"{100 * x:.2f}%" for x in scores["coverage"].values()]
    numbers = scores["root_mean_squared_error"], scores["negative_log_likelihood"]
    assert text[3].split() == ["ensemble", *shares, *(f"{x:.4f}" for x in numbers)]
    assert text[-1] == (
        f"predictive variance {report['predictive_variance']:.4g}, of which variance "
        f"of the means {report['variance_of_means']:.4g}"
    )


ZEROS = np.zeros((2, 2))
NONE = np.ones((1, 0))
COLUMN = np.ones((2, 3, 1))

REGRESSION_MISFITS = {
    "variance of 0": (
        lambda: regression(ZEROS, np.tri(2).T, ZEROS[0]),
        r"s\[1, 0\] is 0.0, .*ce 0.0",
    ),
    "variance of 0 of a later axis": (
        lambda: regression([ZEROS], [np.tri(2)], ZEROS),
        r"means\[0, 0, 1\] is 0.0, its",
    ),
    "no examples": (
        lambda: regression(NONE, NONE, []),
        "expected .*, none of them empty",
    ),
    "means without members": (
        lambda: regression(THREE, THREE, 1),
        r"shape \(3,\), .* expected \[K, N, ...\], ",
    ),
    "mixture of other variances": (
        lambda: em.mixture(ZEROS, ZEROS[0]),
        r"shape \(2, 2\), variances \(2,\); expected both \[K, N, ...\], with a member",
    ),
    "text of no report": (
        lambda: em.format_report({"accuracy": 1}),
        r"report is \{'accuracy': 1\}; expected the result of ensemble_report",
    ),
    "mixture of no member": (lambda: em.mixture([], []), "with a member at least"),
    "mixture of a number": (lambda: em.mixture(1, 1), "with a member at least"),
    "mixture of nan": (
        lambda: em.mixture([[0, np.nan]], np.ones((1, 2))),
        r"means\[0, 1\] is nan, its variance 1.0; expected finite",
    ),
    "mixture of a variance of 0": (
        lambda: em.mixture(ZEROS, np.tri(2).T),
        r"means\[1, 0\] is 0.0, its variance 0.0",
    ),
    "means with a last axis of 1": (
        lambda: regression(COLUMN, COLUMN, THREE),
        r"\(3,\); .*a last axis of 1 by \[\.",
    ),
}


@pytest.mark.parametrize("name", REGRESSION_MISFITS)
def test_means_and_variances_that_do_not_fit_are_named(name):
    assert_refuses(*REGRESSION_MISFITS[name])


def test_auroc_counts_pairs_and_agrees_with_scikit_learn():
    inside = [0.1, 0.4, 0.35, 0.8, 0.35, 0.2]
    outside = [0.9, 0.4, 0.55, 0.35, 0.7]
    # roc_auc_score of scikit-learn 1.9.1; BinaryAUROC of TorchMetrics 1.9.0 to 1e-7
    assert_allclose(em.auroc(inside, outside), 0.7833333333333333, rtol=1e-12)
    rng = np.random.default_rng(0)
    inside = rng.integers(9, size=40)
    outside = rng.integers(3, 12, size=31)
    pairs = itertools.product(inside, outside)
    expected = np.mean([(b > a) + 0.5 * (b == a) for a, b in pairs])
    assert_allclose(em.auroc(inside, outside), expected)
    assert em.auroc([0, 1], [2, np.inf]) == 1 and em.auroc([2], [1]) == 0


def test_fpr95_is_the_lowest_rate_of_a_threshold_that_detects_95_percent():
    rng = np.random.default_rng(0)
    for count in (1, 7, 19, 20, 21, 40, 60):
        inside = rng.integers(40, size=50)
        outside = rng.integers(10, 50, size=count)
        good = (t for t in range(51) if 100 * (outside >= t).sum() >= 95 * count)
        assert em.fpr95(inside, outside) == min((inside >= t).mean() for t in good)
    assert em.fpr95([0, 1], [2, np.inf]) == 0 and em.fpr95([2], [1]) == 1


def test_aurc_is_the_mean_error_of_the_surest_examples_over_orders_of_equal_ones():
    scores = np.array([2, 0, 1, 1, 3, 1])
    wrong = np.array([1, 0, 1, 0, 0, 0], bool)
    areas = []
    for order in map(list, itertools.permutations(range(6))):
        if (np.diff(scores[order]) >= 0).all():
            areas.append(np.mean([wrong[order[:k]].mean() for k in range(1, 7)]))
    assert len(areas) == 6
    assert_allclose(em.aurc(scores, wrong), np.mean(areas), rtol=1e-12)
    assert em.aurc([1, 2], [False, False]) == 0 and em.aurc([5], [True]) == 1


# ---------------------------------------------------------------------------------
# Decisions
# ---------------------------------------------------------------------------------


ERRORS = [0.3, 1.2, 0.7, 2.1, 0.4, 0.9, 0.1, 1.6, 0.8, 0.2]


@cases(
    "scores, coverage, expected",
    # SplitConformalRegressor of MAPIE 1.6.0 returns these three.
    (ERRORS, 0.5, 0.8),
    (ERRORS, 0.8, 1.6),
    (ERRORS, 0.9, 2.1),
    (range(1, 100), 0.55, 55),  # 100 * 0.55 is 55.00000000000001
    (range(1, 100), 1 - 0.9, 10),  # 9.999999999999998
    (range(9), np.float32(0.9), 8),
    (range(99_999), np.float16(0.5), 49_999),  # float16 ends at 65,504
    (range(8), 0.9, np.inf),  # 90% of nine scores takes the ninth
    ([np.inf, 1], 0.5, np.inf),
    ([3, 1], 0, 1),
)
def test_conformal_quantile_is_a_score_by_its_rank(scores, coverage, expected):
    assert_allclose(em.conformal_quantile(scores, coverage), expected)


@pytest.mark.parametrize("n", [20, 500])
def test_conformal_quantile_holds_for_new_scores_as_often_as_the_theory_says(n):
    draw = np.random.default_rng(n)
    # The quantile of uniform scores is the fraction of new scores that it bounds.
    held = [em.conformal_quantile(draw.uniform(size=n)) for _ in range(2000)]
    expected = math.ceil((n + 1) * 0.9) / (n + 1)
    error = np.std(held) / math.sqrt(2000)
    assert abs(np.mean(held) - expected) < 3 * error < 0.006


@cases("n, members", (8, 4), (9, 3), (50, 5), (40, 40), (301, 10))
def test_fold_intervals_and_sets_equal_sorted_sums(n, members):
    draw = np.random.default_rng(n)
    folds = np.arange(n) % members
    draw.shuffle(folds)
    targets = draw.normal(size=n)
    targets[: n // 2] = 0  # so that some errors are equal
    errors = draw.normal(size=n).round(1)
    errors[0] = 1e18  # its member has diverged
    new = draw.normal(size=(members, 30)).round(1)
    new[:, 0] = 1e17
    new[0, 1] = -1e17
    new[-1, 2] = 1e300
    values = new.reshape(members, 10, 3)
    sizes = np.abs(targets - (targets + errors))[:, None]
    for coverage in (0, 0.3, 0.9, 0.95):
        rank = max(1, math.ceil(round((n + 1) * coverage, 9)))
        sums = np.sort([sizes - new[folds], sizes + new[folds]], axis=1)
        sums = np.append(sums, np.full((2, 1, 30), np.inf), axis=1)
        low, high = em.fold_interval(new, targets + errors, targets, folds, coverage)
        assert_array_equal((-low, high), sums[:, rank - 1])
        counts = (errors[:, None, None] < values[folds]).sum(axis=0)
        sets = em.fold_sets(errors, folds, values, coverage)
        assert_array_equal(sets, counts < rank)
        # One member, of whose rows none trained it, has a calibration set.
        alone = em.fold_sets(errors, 0 * folds, new[:1], coverage)
        assert_array_equal(alone, new[0] <= em.conformal_quantile(errors, coverage))


def test_fold_intervals_and_sets_hold_as_often_as_the_coverage_asks():
    draw = np.random.default_rng(0)
    folds = np.arange(30) % 5
    held = []
    for _ in range(200):  # members predict the mean of their targets
        y, new = np.split(draw.normal(size=50), [30])
        means = np.array([y[folds != k].mean() for k in range(5)])
        low, high = em.fold_interval(np.c_[means], means[folds], y, folds)
        sets = em.fold_sets(y - means[folds], folds, new - means[:, None])
        held.append(((low <= new) & (new <= high), sets))
    assert_allclose(np.mean(held, axis=(0, 2)), 0.9, atol=0.02)


def threshold_by_scipy(uncertainty, wrong, risk, confidence):
    """Test one count of kept examples after another, by SciPy's binomial."""
    binom = pytest.importorskip("scipy.stats").binom
    values = np.unique(uncertainty)
    kept = uncertainty <= values[:, None]
    counts = kept.sum(axis=1)
    errors = (kept & wrong).sum(axis=1)
    fewest = np.log(1 - confidence) / np.log1p(-risk)
    tested = counts >= max(fewest, min(2 * fewest, len(wrong) / 2))
    failed = tested & (binom.cdf(errors, counts, risk) > 1 - confidence)
    passed = tested & (np.cumsum(failed) == 0)
    return values[passed].max(initial=-np.inf)


@cases("risk, share", (0.1, 0.02), (0.01, 0.05), (0.4, 0.3), (0.4, 0.9))
def test_probabilities_of_few_errors_are_binomial(risk, share):
    binom = pytest.importorskip("scipy.stats").binom
    errors = np.cumsum(np.random.default_rng(0).uniform(size=3000) < share)
    kept = np.arange(1, 3001)
    expected = binom.cdf(errors, kept, risk)
    found = em._at_most(errors, kept, risk, exact_near=1e-9)
    assert_allclose(found, expected, rtol=0, atol=1e-9)
    small = expected < 1e-7
    assert small.any() == (share < risk)
    assert_allclose(found[small], expected[small], rtol=1e-9)


@cases("n", 0, 40, 400, 2000)
def test_risk_threshold_equals_binomial_tests_in_sequence(n):
    draw = np.random.default_rng(n)
    thresholds = set()
    for power, decimals, risk, confidence in itertools.product(
        (0.5, 3), (2, 9), (0.01, 0.1, 0.4), (0.5, 0.95)
    ):
        uncertainty = draw.uniform(size=n).round(decimals)
        wrong = draw.uniform(size=n) < uncertainty**power / 2
        expected = threshold_by_scipy(uncertainty, wrong, risk, confidence)
        none = pytest.warns(UserWarning, match=f"no threshold has a risk of {risk} ")
        with none if expected == -math.inf else contextlib.nullcontext():
            threshold = em.risk_threshold(
                uncertainty, wrong, risk=risk, confidence=confidence
            )
        assert threshold == expected
        thresholds.add(threshold)
    assert n < 400 or len(thresholds) > 4
    # 29 examples could pass; the first test is of 40, half of the 80.
    assert em.risk_threshold(np.arange(80), np.arange(80) >= 40, risk=0.1) == 39
    # An error among 597, half of these, is few enough; among a third it is not.
    assert em.risk_threshold(np.arange(1193), np.arange(1193) < 1) == 1192


def test_risk_threshold_says_what_it_lacks():
    numbers = np.arange(400.0)
    for n, wrong, said in (
        (20, 0, "kept: it takes 299 examples, none wrong, and there are 20; calibrate"),
        (400, 5, "kept: 5 of the surest 299 examples are wrong; calibrate with more"),
    ):
        with pytest.warns(UserWarning, match=said):
            em.risk_threshold(numbers[:n], numbers[:n] < wrong)


@pytest.mark.filterwarnings("ignore:no threshold")
@cases("distance", 1e-3, 1e-9, 1e-12, 1e-15)
def test_risk_threshold_is_exact_for_a_confidence_near_one(distance):
    confidence = 1 - distance
    none_wrong = np.zeros(5000, bool)
    assert em.risk_threshold(np.zeros(5000), none_wrong, confidence=confidence) == 0
    draw = np.random.default_rng(0)
    n = 2000
    few = 0  # 16^n P(at most this many errors)
    for errors in range(130):
        few += math.comb(n, errors) * 15 ** (n - errors)
        passes = Fraction(few, 16**n) <= 1 - Fraction(confidence)
        wrong = draw.permutation(n) < errors
        threshold = em.risk_threshold(
            np.ones(n), wrong, risk=1 / 16, confidence=confidence
        )
        assert (threshold == 1) == passes, errors


def test_kept_examples_exceed_the_risk_no_more_often_than_promised():
    # An example of uncertainty u is wrong with probability u^6 / 2, so a fraction of
    # t^6 / 14 of the examples up to t is wrong: 1% where t^6 = 0.14.
    could = 0.14 ** (1 / 6)
    draw = np.random.default_rng(0)
    thresholds = []
    for _ in range(1000):
        uncertainty = draw.uniform(size=2000)
        wrong = draw.uniform(size=2000) < uncertainty**6 / 2
        thresholds.append(em.risk_threshold(uncertainty, wrong))
    above = np.mean(np.array(thresholds) > could)
    assert 0 < above < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert np.mean(np.maximum(thresholds, 0)) > 0.85 * could


@pytest.mark.usefixtures("block_sizes")
def test_temper_takes_powers_of_probabilities():
    probs = random_probs(0, 3, 20, 4)
    powers = probs ** (1 / 0.7)
    expected = powers / powers.sum(axis=-1, keepdims=True)
    assert_allclose(em.temper(probs, 0.7), expected, rtol=1e-12)
    assert_allclose(em.temper(probs, 1), probs, rtol=1e-12)
    tempered = em.temper([[0, 1], [0.5, 0.5]], 2)  # 0 counts as float32's smallest
    assert_allclose(tempered, [[1.08e-19, 1], [0.5, 0.5]], rtol=0.01)
    assert em.temper([[0.3, 0.7]], 1e-30).tolist() == [[0, 1]]
    for off in (0.9991, 1.0009):  # a sum may be off 1 by less than 1e-3
        assert_allclose(em.temper(off * probs, 1), probs, rtol=1e-12)


@pytest.mark.usefixtures("block_sizes")
def test_temperature_equals_netcal_and_minimizes_the_likelihood_loss():
    # From TemperatureScaling of netcal 1.4.0, which returns 1 / temperature
    inverses = [1.7999928, 1.2852887, 2.1739141]
    for probs, inverse in zip([*FIXED_PROBS, FIXED_PROBS.mean(axis=0)], inverses):
        assert_allclose(1 / em.fit_temperature(probs, FIXED_LABELS), inverse, rtol=2e-5)
    optimize = pytest.importorskip("scipy.optimize")
    special = pytest.importorskip("scipy.special")
    probs = (random_probs(1, 300, 5) + 1e-3) / 1.005
    rows = np.arange(300)
    labels = np.where(rows % 2, probs.argmax(axis=1), rows % 5)
    best = em.fit_temperature(probs, labels)

    def slope(inverse, logs):  # derivative of the loss by 1 / temperature
        powers = special.softmax(inverse * logs, axis=1)
        return np.sum(powers * logs, axis=1).mean() - logs[rows, labels].mean()

    for temperature in (0.0036, 0.1, 10, 64):  # p = 0 counts: less than 64
        tempered = em.temper(probs, best / temperature)
        logs = np.log(np.maximum(tempered, np.finfo(np.float32).tiny))
        root = optimize.brentq(slope, 0, 1e3, logs, xtol=1e-15, rtol=1e-14)
        assert_allclose(em.fit_temperature(tempered, labels) * root, 1, rtol=1e-8)


@pytest.mark.usefixtures("block_sizes")
def test_bias_takes_back_weights_of_classes_where_a_loss_had_some():
    draw = np.random.default_rng(0)
    weights = np.array([0.5, 30, 0.5])
    truth = em.temper(random_probs(2, 4000, 3), 0.5, [1, -2, 1])
    labels = (draw.random((4000, 1)) > truth.cumsum(axis=1)).sum(axis=1)
    weighted = truth * weights / (truth @ weights)[:, None]
    assert_allclose(em.temper(weighted, 1, -np.log(weights)), truth, rtol=1e-12)
    for probs, least, most in (weighted, 0.2, 1), (truth, -0.05, 0):  # held-out gains
        some = probs[:400]
        of_some = labels[:400]
        temperature, bias = em.fit_temperature(some, of_some, bias=True)
        off = em.temper(some, temperature, bias) - np.eye(3)[of_some]
        # The NLL's slope, by each number, is 0.
        slopes = [(off * np.log(some)).sum(), *off.sum(axis=0)]
        assert_allclose([*slopes, bias.sum()], 0, atol=1e-6)
        alone = em.temper(probs[400:], em.fit_temperature(some, of_some))
        with_bias = em.temper(probs[400:], temperature, bias)
        scores = em.ensemble_report([alone, with_bias], labels[400:])["member"]
        first, second = (score["negative_log_likelihood"] for score in scores)
        assert least < first - second < most


IN = "cannot fit a temperature to {} examples; expected labels more .*; check".format
MEANINGLESS = {
    "coverage of 90": (
        lambda: em.conformal_quantile(THREE, 90),
        "is 90; expected 0 <= coverage < 1$",
    ),
    "coverage of None": (
        lambda: em.conformal_quantile(THREE, None),
        "coverage is None; expected 0 <=",
    ),
    "values that are nan": (
        lambda: em.fold_sets(THREE, [0, 1, 0], np.where(np.eye(2), np.nan, 1)),
        "values have 2 nan; expected none",
    ),
    "coverage in a list": (
        lambda: em.conformal_quantile(THREE, [0.9]),
        r"is \[0.9\]; expected 0 <= cover",
    ),
    "risk of 0": (
        lambda: em.risk_threshold(THREE, RIGHT, risk=0),
        "risk is 0; expected 1e-09 <= r",
    ),
    "confidence of 1": (
        lambda: em.risk_threshold(THREE, RIGHT, confidence=1),
        "confidence is 1; expecte",
    ),
    "temperature that is complex": (
        lambda: em.temper(SURE, np.complex64(1)),
        r"temperature is .*1\+0j.*; expected 1",
    ),
    "aurc of nothing": (
        lambda: em.aurc([], []),
        "uncertainty is empty; expected one or more examples",
    ),
    "uncertainty of -inf": (
        lambda: em.risk_threshold([1, -np.inf, 2], RIGHT),
        r"y\[1\] is -inf, the thr",
    ),
    "members after examples in probabilities": (
        lambda: em.ensemble_report(AXES / 4, [0, 1, 2]),
        "^member_.* of 3 .* first",
    ),
    "members after examples in means": (
        lambda: regression(AXES, AXES, THREE),
        r"^means .* as by numpy",
    ),
    "temperature of 0": (
        lambda: em.temper(ONE_HOT, 0),
        "temperature is 0; expected 1e-30 <= temperature",
    ),
    "temperature of inf": (
        lambda: em.temper(ONE_HOT, np.inf),
        "is inf; expected 1e-30 <= temperature < inf",
    ),
    "labels that are all right": (lambda: em.fit_temperature(SURE, [0, 0, 0]), IN(3)),
    "labels that are mostly wrong": (
        lambda: em.fit_temperature(SURE, [0, 1, 1]),
        IN(3),
    ),
    "labels of which half are wrong": (
        lambda: em.fit_temperature(SURE[:2], [0, 1]),
        IN(2),
    ),
    "label of one of two equal classes": (
        lambda: em.fit_temperature(TWO / 2, [0]),
        IN(1),
    ),
    "labels of no examples": (lambda: em.fit_temperature(SURE[:0], LABELS[:0]), IN(0)),
    "labels that lack a class": (
        lambda: em.fit_temperature(ONE_HOT, LABELS, bias=True),
        "and one of each class",
    ),
    "bias of fewer classes": (
        lambda: em.temper(ONE_HOT, 1, [1, 2]),
        r"bias is \[1. 2.\]; expected 4 finite",
    ),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_number_or_label_without_a_meaning_is_refused(name):
    assert_refuses(*MEANINGLESS[name])
