"""Tests of ensemble_metrics.py, in the order of its sections."""

import functools
import itertools
import json
import math
import statistics
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ensemble_metrics as em
from conftest import cases, randn, random_probs, refuses, said_by

regression = em.regression_report


def bins_by_loops(probs, labels):
    """Put (confidence, whether it is right) of each example into one of 15 bins."""
    bins = [[] for _ in range(15)]
    for p, label in zip(probs, labels):
        confidence, guess = max(p), list(p).index(max(p))
        bins[min(int(confidence * 15), 14)].append((confidence, guess == label))
    return bins


def scores_by_loops(probs, labels):
    """Compute the four scores one example at a time."""
    pairs = list(zip(probs, labels))
    nll = -sum(np.log(p[label]) for p, label in pairs)
    brier = sum((x - (c == label)) ** 2 for p, label in pairs for c, x in enumerate(p))
    sums = [np.sum(b, axis=0) for b in bins_by_loops(probs, labels) if b]
    hits = sum(right for _, right in sums)
    ece = sum(abs(right - confidence) for confidence, right in sums)
    return [x / len(probs) for x in (hits, nll, brier, ece)]


@cases("block_size", 2**16, 100, 1)  # 4,369 rows, 6, and a row at a time
def test_report_equals_loops_for_members_ensemble_and_sizes(monkeypatch, block_size):
    monkeypatch.setattr(em, "_BLOCK_SIZE", block_size)
    probs, labels = random_probs(0, 3, 200, 5), np.arange(200) % 5
    probs[:, :20] = probs[0, :20]  # in which the members agree
    report = em.ensemble_report(probs, labels)
    sizes = [probs[:k].mean(axis=0) for k in (1, 2, 3)]
    assert report["ensemble"] == report["by_size"][-1]
    all_scores, all_probs = report["member"] + report["by_size"], [*probs, *sizes]
    for scores, expected in zip(all_scores, all_probs, strict=True):
        assert_allclose(list(scores.values()), scores_by_loops(expected, labels))
    guesses = probs.argmax(axis=2)
    pairs = [(0, 1), (0, 2), (1, 2)]
    disagreement = np.mean([guesses[i] != guesses[j] for i, j in pairs])
    assert_allclose(report["disagreement"], disagreement)

    def entropy(p):
        return np.array([-sum(x * np.log(x) for x in row if x > 0) for row in p])

    total = entropy(probs.mean(axis=0))
    expected = total, total - np.mean([entropy(p) for p in probs], axis=0)
    found = em.predictive_entropy(probs), em.mutual_information(probs)
    assert_allclose(found, expected, atol=1e-12)
    assert found[1].min() >= 0 and found[1][:20].max() < 1e-12 < found[1][20:].min()
    means = report["predictive_entropy"], report["mutual_information"]
    assert_allclose(means, np.mean(found, axis=1))
    json.dumps(report, allow_nan=False)
    tokens = probs.reshape(3, 50, 4, 5), labels.reshape(50, 4)
    assert em.ensemble_report(*tokens) == report
    assert_array_equal(em.mutual_information(tokens[0]).ravel(), found[1])


@cases(
    "call",
    lambda probs, labels: em.predictive_entropy(probs),
    lambda probs, labels: em.temper(probs, 2),
    lambda probs, labels: em.fit_temperature(probs[0], labels),
    lambda probs, labels: em.reliability(probs[1], labels),
)
def test_size_of_blocks_does_not_change_what_is_said(monkeypatch, call):
    args = random_probs(0, 3, 200, 5), np.arange(200) % 5
    whole = call(*args)
    monkeypatch.setattr(em, "_BLOCK_SIZE", 100)
    assert_allclose(call(*args), whole, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_report_of_less_precise_probabilities_is_of_float64(dtype):
    first = np.rint(256 * random_probs(0, 3, 200, 2)[..., 0]) / 256  # bfloat16 has it
    probs = np.asarray(jnp.asarray(np.stack([first, 1 - first], axis=-1), dtype))
    both = probs, np.float64(probs)
    report, expected = (em.ensemble_report(x, np.arange(200) % 2) for x in both)
    float32_logs = "predictive_entropy", "mutual_information"
    for name, scores in expected.items():
        tolerance = 1e-6 if name in float32_logs else 1e-12
        close = functools.partial(assert_allclose, rtol=tolerance)
        jax.tree.map(close, report[name], scores)
    assert em.mutual_information(np.stack([probs[0]] * 3)).max() < 1e-7


@cases(
    "call, result",  # besides which, MiB, it takes the memory of a few blocks
    (lambda probs, labels: em.ensemble_report(probs, labels), 0),
    (lambda probs, labels: em.mutual_information(probs), 0.6),
    (lambda probs, labels: em.temper(probs[0], 2), 7.6),
    (lambda probs, labels: em.fit_temperature(probs[0], labels), 0),
    (lambda probs, labels: em.reliability(probs[0], labels), 0),
    (lambda probs, labels: regression(*2 * [probs[..., 0]], labels), 0.8),
)
def test_memory_of_a_report_is_that_of_a_block(call, result):
    draw, shape = np.random.default_rng(0), (4, 20_000, 50)
    probs = draw.dirichlet(np.ones(50), shape[:2]).astype(np.float32)  # 15 MiB
    labels = np.where(draw.random(20_000) < 0.1, probs[0].argmax(axis=-1), 0)
    tracemalloc.start()
    call(probs, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (result + 4) * 2**20
    assert len([*em._blocks(probs, 4)]) < 100  # large enough for NumPy to be fast


def test_report_of_certain_members_is_finite():
    certain = np.eye(3)[[0, 1, 2, 0]]
    report = em.ensemble_report([certain, certain[::-1]], np.array([0, 1, 2, 1]))
    json.dumps(report, allow_nan=False)
    right, wrong = np.array([[1.0, 0]]), np.array([[0, 1.0]])
    report = em.ensemble_report([right, wrong], np.array([0]))
    assert [m["expected_calibration_error"] for m in report["member"]] == [0, 1]
    assert [m["brier_score"] for m in report["member"]] == [0, 2]
    assert_allclose(report["member"][1]["negative_log_likelihood"], 87.3, atol=0.1)
    assert report["disagreement"] == 1
    assert_allclose(report["mutual_information"], np.log(2))
    assert em.ensemble_report([right], np.array([0]))["disagreement"] == 0


# Two members, eight examples, three classes, and what scikit-learn 1.9.1
# (accuracy_score, log_loss, brier_score_loss) and TorchMetrics 1.9.0 on torch 2.13
# (MulticlassCalibrationError, 15 bins, in float32) say of them and of their mean.
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
    normals = [statistics.NormalDist(*each) for each in zip(mean, np.sqrt(variance))]
    pairs = list(zip(normals, targets))
    inside = np.array([abs(2 * normal.cdf(y) - 1) for normal, y in pairs])
    return {
        "root_mean_squared_error": math.dist(mean, targets) / math.sqrt(len(mean)),
        "negative_log_likelihood": -np.mean([np.log(n.pdf(y)) for n, y in pairs]),
        "coverage": {f"{p}%": np.mean(inside <= p / 100) for p in (50, 90, 95)},
    }


@cases("members, offset", (1, 0), (3, 0), (3, 2**20))
def test_regression_report_equals_loops_for_members_and_sizes(members, offset):
    # Multiples of 1 / 1024, so that adding the offset rounds nothing off.
    *means, targets = np.round(1024 * np.float64(randn(0, members + 1, 60))) / 1024
    means, variances = np.array(means), np.float64(np.abs(randn(1, members, 60)) + 0.1)
    report = regression(means + offset, jnp.asarray(variances), targets + offset)
    totals = (np.cumsum(x, axis=0) for x in (means, variances + means**2))
    mean, square = (total / np.c_[1 : members + 1] for total in totals)
    sizes = zip(mean, square - mean**2)
    assert report["ensemble"] == report["by_size"][-1]
    all_scores = report["member"] + report["by_size"]
    for scores, each in zip(all_scores, [*zip(means, variances), *sizes], strict=True):
        jax.tree.map(assert_allclose, scores, gaussian_scores_by_loops(*each, targets))
    parts = report["mean_of_variances"], report["variance_of_means"]
    assert_allclose(parts, [variances.mean(), means.var(axis=0).mean()])
    assert_allclose(report["predictive_variance"], sum(parts))
    json.dumps(report, allow_nan=False)


def test_auroc_counts_pairs_and_agrees_with_scikit_learn():
    inside, outside = [0.1, 0.4, 0.35, 0.8, 0.35, 0.2], [0.9, 0.4, 0.55, 0.35, 0.7]
    # roc_auc_score of scikit-learn 1.9.1; BinaryAUROC of TorchMetrics 1.9.0 to 1e-7
    assert_allclose(em.auroc(inside, outside), 0.7833333333333333, rtol=1e-12)
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(9, size=40), rng.integers(3, 12, size=31)
    pairs = list(itertools.product(inside, outside))
    expected = np.mean([(b > a) + 0.5 * (b == a) for a, b in pairs])
    assert_allclose(em.auroc(inside, outside), expected)
    assert em.auroc([0, 1], [2, np.inf]) == 1 and em.auroc([2], [1]) == 0


EDGES_OF_BINS = [
    ((0.8, 0.85), (True, False), 0.325),  # 12/15 opens the bin of 0.85
    ((0.8, 0.79), (True, False), 0.495),  # and does not close the one before
    ((1.0, 0.95), (False, True), 0.475),  # the last bin is closed
]


@pytest.mark.parametrize("confidences, correct, error", EDGES_OF_BINS)
def test_calibration_bins_hold_their_lower_edge(confidences, correct, error):
    probs = np.array([[c, 1 - c] for c in confidences])
    scores = em.ensemble_report([probs], np.where(correct, 0, 1))["ensemble"]
    assert_allclose(scores["expected_calibration_error"], error)


def test_reliability_counts_and_averages_each_bin():
    probs, labels = random_probs(0, 300, 4), np.arange(300) % 4
    probs[0] = [0, 0, 1, 0]
    bins = bins_by_loops(probs, labels)
    counts, *means = em.reliability(probs, labels)
    assert counts.tolist() == [len(b) for b in bins] and 0 in counts
    expected = [np.mean(b, axis=0) if b else (np.nan, np.nan) for b in bins]
    assert_allclose(np.transpose(means), expected)
    rows = em.reliability(probs.reshape(3, 100, 4), labels.reshape(3, 100))
    assert_array_equal(rows, [counts, *means])


ERRORS = [0.3, 1.2, 0.7, 2.1, 0.4, 0.9, 0.1, 1.6, 0.8, 0.2]


@cases(
    "scores, coverage, expected",
    # What SplitConformalRegressor of MAPIE 1.6.0 says of them
    (ERRORS, 0.5, 0.8),
    (ERRORS, 0.8, 1.6),
    (ERRORS, 0.9, 2.1),
    (range(1, 100), 0.9, 90),
    (range(1, 100), 0.55, 55),  # 100 * 0.55 is 55.00000000000001
    (range(1, 100), 1 - 0.9, 10),  # 9.999999999999998
    (range(9), np.float32(0.9), 8),
    (range(8), 0.9, np.inf),  # of nine, one is to be let through
    ([], 0.9, np.inf),
    ([np.inf, 1], 0.5, np.inf),
    ([3, 1], 0, 1),
)
def test_conformal_quantile_is_a_score_by_its_rank(scores, coverage, expected):
    assert_allclose(em.conformal_quantile(scores, coverage), expected)


@pytest.mark.parametrize("n", [20, 100, 500])
def test_conformal_quantile_holds_for_new_scores_as_often_as_the_theory_says(n):
    draw = np.random.default_rng(n)
    # What holds of new scores that are uniform, as those of any continuous rank are
    held = [em.conformal_quantile(draw.uniform(size=n)) for _ in range(2000)]
    error = np.std(held) / math.sqrt(len(held))
    expected = math.ceil((n + 1) * 9 / 10) / (n + 1)
    assert abs(np.mean(held) - expected) < 3 * error < 0.006


def threshold_by_scipy(uncertainty, wrong, risk, confidence):
    """Test one number after another of those kept, by SciPy's binomial."""
    binom = pytest.importorskip("scipy.stats").binom
    fewest = np.log(1 - confidence) / np.log1p(-risk)
    threshold = -np.inf
    for value in np.unique(uncertainty):
        kept = uncertainty <= value
        if kept.sum() >= max(fewest, min(2 * fewest, len(kept) / 2)):
            if binom.cdf(wrong[kept].sum(), kept.sum(), risk) > 1 - confidence:
                break
            threshold = value
    return threshold


@cases("n", 0, 40, 400, 2000)
def test_risk_threshold_is_that_of_binomial_tests_in_sequence(n):
    draw, found = np.random.default_rng(n), set()
    for power, decimals, risk, confidence in itertools.product(
        (0.5, 3), (2, 9), (0.01, 0.1, 0.4), (0.5, 0.95)
    ):
        uncertainty = draw.uniform(size=n).round(decimals)
        wrong = draw.uniform(size=n) < uncertainty**power / 2
        options = dict(risk=risk, confidence=confidence)
        threshold = em.risk_threshold(uncertainty, wrong, **options)
        assert threshold == threshold_by_scipy(uncertainty, wrong, **options)
        found.add(threshold)
    assert n < 400 or len(found) > 4
    # Half of 80 are no fewer than it takes, 28: so many is the first number tested.
    assert em.risk_threshold(np.arange(80), np.arange(80) >= 40, risk=0.1) == 39


def test_what_is_kept_errs_more_than_the_risk_as_seldom_as_it_says():
    # An example of uncertainty u is wrong with probability u^6 / 2, so that of those up
    # to t a fraction of t^6 / 14 is: 1% where t^6 = 0.14.
    draw, could = np.random.default_rng(0), 0.14 ** (1 / 6)
    thresholds = []
    for _ in range(1000):
        uncertainty = draw.uniform(size=2000)
        wrong = draw.uniform(size=2000) < uncertainty**6 / 2
        thresholds.append(em.risk_threshold(uncertainty, wrong))
    above = np.mean(np.array(thresholds) > could)
    assert 0 < above < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert np.mean(np.maximum(thresholds, 0)) > 0.85 * could


def test_temper_takes_powers_of_probabilities():
    probs = random_probs(0, 3, 20, 4)
    powers = probs ** (1 / 0.7)
    expected = powers / powers.sum(axis=-1, keepdims=True)
    assert_allclose(em.temper(probs, 0.7), expected, rtol=1e-12)
    assert_allclose(em.temper(probs, 1), probs, rtol=1e-12)
    tempered = em.temper([[0, 1], [0.5, 0.5]], 2)  # 0 counts as float32's smallest
    assert_allclose(tempered, [[1.08e-19, 1], [0.5, 0.5]], rtol=0.01)
    assert em.temper([[0.3, 0.7]], 1e-30).tolist() == [[0, 1]]


def test_temperature_is_that_of_others_and_of_the_smallest_likelihood_loss():
    # Of TemperatureScaling, netcal 1.4.0, and it gives 1 / temperature
    theirs, mean = [1.7999928, 1.2852887], FIXED_PROBS.mean(axis=0)
    for probs, inverse in zip([*FIXED_PROBS, mean], [*theirs, 2.1739141]):
        assert_allclose(1 / em.fit_temperature(probs, FIXED_LABELS), inverse, rtol=2e-5)
    # For alike rows, that by which the probability is the frequency: log odds divided
    found = em.fit_temperature([[0.8, 0.2]] * 4, [0, 1, 0, 0])
    assert_allclose(found, np.log(4) / np.log(3), rtol=1e-8)
    optimize = pytest.importorskip("scipy.optimize")
    probs, rows = random_probs(1, 300, 5), np.arange(300)
    labels = np.where(rows % 2, probs.argmax(axis=1), rows % 5)

    def loss(log_temperature):
        tempered = em.temper(probs, np.exp(log_temperature))
        return em.ensemble_report([tempered], labels)["ensemble"][
            "negative_log_likelihood"
        ]

    best = optimize.minimize_scalar(loss, (0, 3), tol=1e-10).x
    assert_allclose(em.fit_temperature(probs, labels), np.exp(best), rtol=1e-6)


def test_temperature_of_perfect_probabilities_is_one():
    draw = np.random.default_rng(0)
    probs = random_probs(0, 20_000, 6)
    labels = (draw.random((len(probs), 1)) > probs.cumsum(axis=1)).sum(axis=1)
    logs = np.log(np.maximum(probs, 1e-38))
    mean = (probs * logs).sum(axis=1)
    # Fisher's information of 1 / temperature: the variance of log p under p
    information = ((probs * logs**2).sum(axis=1) - mean**2).sum()
    inverse, error = 1 / em.fit_temperature(probs, labels), information**-0.5
    assert abs(inverse - 1) < 3 * error < 0.05
    for temperature in (0.3, 4):
        changed = em.fit_temperature(em.temper(probs, temperature), labels)
        assert_allclose(changed * temperature, 1 / inverse, rtol=1e-3)


TWO, ZEROS = np.ones((1, 2)), np.zeros((2, 2))
ONE_HOT, COLUMN, HALVES = np.eye(4)[:3], np.zeros((3, 1), int), np.full((1, 2, 2), 0.5)
THREE, PLANES = np.ones(3), np.ones((3, 4, 1))
MANY, FAR = np.full((2, 40_000, 2), 0.5), np.ones((2, 40_000, 1))
FAR[1, -1] = 2
SURE, NONE_WRONG = np.array([[0.75, 0.25]] * 3), (THREE, THREE > 1)

METRICS = [  # and what they call the arrays that they take, each in its place
    (em.predictive_entropy, {"probabilities": HALVES}),
    (em.mutual_information, {"probabilities": HALVES}),
    (em.reliability, {"probabilities": HALVES[0], "labels": np.arange(2)}),
    (em.ensemble_report, {"probabilities": HALVES, "labels": np.arange(2)}),
    (regression, {"means": TWO, "variances": TWO, "targets": TWO[0]}),
    (em.auroc, {"scores_in": THREE, "scores_out": THREE}),
    (em.conformal_quantile, {"scores": THREE}),
    (em.risk_threshold, dict(zip(("uncertainty", "wrong"), NONE_WRONG))),
    (lambda probs: em.temper(probs, 2), {"probabilities": HALVES}),
    (em.fit_temperature, {"probabilities": SURE, "labels": np.array([0, 0, 1])}),
]


@pytest.mark.parametrize("metric, arrays", METRICS)
def test_metric_takes_all_of_an_array_or_none(metric, arrays):
    metric(*arrays.values())
    for name, x in arrays.items():
        masked = np.ma.masked_array(x, np.arange(x.size).reshape(x.shape) == 1)
        for bad in (masked, x + 0j, [*masked]) if x.ndim > 1 else (masked, x + 0j):
            said = said_by(ValueError, metric, *(arrays | {name: bad}).values())
            assert said == f"{name} are masked or complex; expected real numbers alone"


test_metric_names_what_does_not_fit = refuses(
    (lambda: em.reliability(ONE_HOT, COLUMN), r"labels are int64\[3, 1\]"),
    (lambda: em.predictive_entropy(8 * HALVES), r"\[0, 0\] begin with 4.0 and add up"),
    (lambda: em.mutual_information(8 * HALVES), "add up to 8.0; pass softmax"),
    (lambda: em.reliability(8 * ONE_HOT, [0] * 3), "add up to 8.0; pass softmax"),
    (lambda: em.reliability(ONE_HOT, [0, 1, 4]), "in 0..4; the classes are 0..3"),
    (lambda: em.ensemble_report(ONE_HOT, [0]), r"shape \(3, 4\); expected \[K, N, C\]"),
    (lambda: em.ensemble_report(HALVES, [0]), r"int64\[1\]; expected integers \[2\]"),
    (lambda: em.ensemble_report(HALVES[:, :0], np.arange(0)), "none may be empty"),
    (lambda: em.ensemble_report(HALVES[:0], [0]), r"\(0, 2, 2\); expected \[K, N, C\]"),
    (
        lambda: em.predictive_entropy(SURE),
        r"shape \(3, 2\); expected \[K, N, C\], each",
    ),
    (
        lambda: em.mutual_information(SURE),
        r"shape \(3, 2\); expected \[K, N, C\], each",
    ),
    (lambda: em.temper(0.5, 2), r"shape \(\); expected \[..., C\]"),
    (lambda: em.reliability(SURE[:, :0], [0] * 3), r"\(3, 0\); expected \[..., C\]"),
    (
        lambda: em.temper(MANY * FAR, 2),
        r"s\[1, 39999\] begin with 1.0 and add up to 2.0",
    ),
    (
        lambda: em.mutual_information(MANY * FAR),
        r"s\[1, 39999\] begin with 1.0 and add",
    ),
    (lambda: em.ensemble_report(HALVES, [0, 2]), "in 0..2; the classes are 0..1"),
    (lambda: em.ensemble_report(HALVES, [0, -1]), "labels lie in -1..0"),
    (lambda: em.ensemble_report(HALVES, [0.0, 1.0]), "labels are float64"),
    (lambda: em.ensemble_report(HALVES + 0.1, [0, 1]), r"probabilities\[0, 0\] begin"),
    (lambda: em.ensemble_report(HALVES * [[1], [np.nan]], [0, 1]), r"\[0, 1\] begin"),
    (lambda: em.ensemble_report([[[1.5, -0.5]]], [0]), "pass softmax"),
    (lambda: em.ensemble_report(np.ones((1, 1, 99)), [0]), "add up to 99.0; pass"),
    (lambda: regression(PLANES, PLANES, ONE_HOT), r"\(3, 4\); .*take \[..., 0\]"),
    (lambda: regression(PLANES, ONE_HOT, ONE_HOT), r"\(3, 4, 1\), variances \(3, 4\)"),
    (lambda: regression(np.ones(2), np.ones(2), 1), r"targets \(\); expected"),
    (lambda: regression(HALVES[0], ONE_HOT, [1, 1]), r"variances \(3, 4\)"),
    (lambda: regression(*2 * [HALVES[0]], [1] * 3), r"targets \(3,\); exp"),
    (lambda: regression(*2 * [np.ones((1, 0))], []), "none of them empty"),
    (lambda: regression([[0, np.inf]], TWO, [0, 0]), "0, example 1: mean inf"),
    (lambda: regression([[0, 0]], TWO * np.nan, [0, 0]), "0: .*variance nan"),
    (lambda: regression([[0, 0]], TWO * np.inf, [0, 0]), "variance inf"),
    (lambda: regression(ZEROS, [[1, 1], [1, 0]], [0, 0]), "1, example 1: .*ce 0"),
    (lambda: regression([[0, 0]], -TWO, [0, 0]), "variance -1.0, target"),
    (lambda: regression([[0, 0]], TWO, [0, np.nan]), "example 1: .*target nan"),
    (lambda: em.auroc([], [1.0]), "0 scores_in and 1 scores_out; expected one or more"),
    (lambda: em.auroc([1.0], [[1.0]]), r"scores_out have shape \(1, 1\)"),
    (lambda: em.auroc([1.0], [1, np.nan]), r"scores_out have shape \(2,\) and 1 nan"),
    (lambda: em.conformal_quantile(TWO), r"scores have shape \(1, 2\) and 0 nan"),
    (lambda: em.conformal_quantile([1, np.nan]), r"shape \(2,\) and 1 nan; expected"),
    (
        lambda: em.conformal_quantile(THREE, 90),
        "coverage is 90; expected 0 <= coverage < 1$",
    ),
    (lambda: em.conformal_quantile(THREE, None), "coverage is None; expected 0 <="),
    (lambda: em.risk_threshold(TWO, TWO > 1), r"uncertainty have shape \(1, 2\) and"),
    (
        lambda: em.risk_threshold(THREE, [0, 0, 1]),
        r"int64\[3\]; expected bool\[3\], as",
    ),
    (lambda: em.risk_threshold(THREE, [True]), r"wrong is bool\[1\]; expected bool\[3"),
    (lambda: em.risk_threshold(*NONE_WRONG, risk=0), "risk is 0; expected 1e-09 <= ri"),
    (lambda: em.risk_threshold(*NONE_WRONG, confidence=1), "confidence is 1; expected"),
    (lambda: em.temper(8 * ONE_HOT, 2), "add up to 8.0; pass softmax"),
    (lambda: em.temper(ONE_HOT, 0), "temperature is 0; expected 1e-30 <= temperature"),
    (lambda: em.temper(ONE_HOT, np.inf), "is inf; expected 1e-30 <= temperature < inf"),
    (lambda: em.fit_temperature(SURE, [0, 1]), r"int64\[2\]; expected integers \[3\]"),
    (lambda: em.fit_temperature(SURE, [0, 1, 2]), "in 0..2; the classes are 0..1"),
    (lambda: em.fit_temperature(SURE, [0, 0, 0]), "for 3 examples, of which 0 have"),
    (lambda: em.fit_temperature(SURE, [0, 1, 1]), "for 3 examples, of which 2 have"),
    (
        lambda: em.fit_temperature(np.tile(SURE[:1], (10**6, 1)), np.ones(10**6, int)),
        "of which 1000000 have",
    ),
    (lambda: em.fit_temperature(TWO / 2, [0]), "for 1 examples, of which 0 have"),
    (lambda: em.fit_temperature(SURE[:0], np.arange(0)), "for 0 examples"),
)
