# Copyright (c) 2026 The pjax_ensemble authors.  SPDX-License-Identifier: MIT
"""Judge the probabilities of any library.  This file needs NumPy alone.

Copy it beside scikit-learn, PyTorch or JAX.  It reports how accurate and calibrated an
ensemble is, and finds thresholds by which to decide.

    import numpy as np, ensemble_metrics as em

    draw = np.random.default_rng(0)
    labels = draw.integers(4, size=2000)
    logits = 5 * np.eye(4)[labels] + 2 * draw.normal(size=(2000, 4))
    powers = np.exp(logits + draw.normal(size=(5, 2000, 4)))  # members differ
    probs = powers / powers.sum(axis=-1, keepdims=True)  # [K, N, C], of any library
    report = em.ensemble_report(probs, labels)  # members, ensemble, every size
    unsure = em.predictive_entropy(probs)  # [N]
    wrong = probs.mean(axis=0).argmax(axis=-1) != labels
    threshold = em.risk_threshold(unsure[:1000], wrong[:1000], risk=0.05)
    decided = unsure[1000:] <= threshold  # 79%, of which 3% are wrong

Letters: K members, N examples, C classes.  Labels are integers; entropies and losses
are in nats.  An argument may be a list, or an array of NumPy, JAX or PyTorch
(`x.detach().cpu()`), of any real type.  Everything is computed on the host, a block of
examples at a time, in float64.

Contents: Probabilities, Uncertainty, Reports, Decisions.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

# fmt: off
__all__ = [
    "predictive_entropy", "mutual_information", "reliability", "ensemble_report",
    "mixture", "regression_report", "format_report", "auroc", "fpr95", "aurc",
    "conformal_quantile", "fold_sets", "fold_interval", "risk_threshold", "temper",
    "fit_temperature",
]
# fmt: on


def __dir__() -> list[str]:  # completion offers these, and no other module's names
    return [*__all__, "__doc__"]


def _check_range(name: str, value: Any, limit: float, low: float = 0) -> None:
    """Raise ValueError unless low <= value < limit."""
    is_text = isinstance(value, str | None)
    is_number = np.ndim(value) == 0 and not is_text and not np.iscomplexobj(value)
    if not (is_number and low <= value < limit):
        shown = value if is_number else repr(value)
        raise ValueError(f"{name} is {shown}; expected {low} <= {name} < {limit}")


# ---------------------------------------------------------------------------------
# Probabilities: checks, and blocks of rows
# ---------------------------------------------------------------------------------


def _real(name: str, x: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return real numbers as an array on the host, or raise ValueError."""
    try:
        x = np.ma.asarray(x)
    except (RuntimeError, TypeError, ValueError) as error:  # a tensor, a ragged list
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot become an array: {reason}; pass rows of one length; for a "
            "PyTorch tensor pass x.detach().cpu(), for bfloat16 x.float()"
        ) from error
    if not np.can_cast(x.dtype, np.float64, "same_kind"):
        raise ValueError(f"{name} are {x.dtype}; expected unmasked real numbers")
    if np.ma.is_masked(x):
        raise ValueError(f"{name} are masked; expected unmasked real numbers")
    return np.asarray(x, dtype)


_BLOCK_SIZE = 2**16  # probabilities per block: 512 KiB
_OF_TWO = "for the p of one of two classes pass np.stack([1 - p, p], axis=-1)"


def _probabilities(probs: Any, of_members: bool = False, labels=0) -> np.ndarray:
    """Return probabilities [..., C], or members' [K, ..., C], in their own type.

    Raises ValueError for other axes, such as members' [..., C] for labels [...], and
    for one class alone; `_blocks` checks the numbers.
    """
    probs = _real("probabilities", probs, None)
    if of_members:
        form = "[K, N, C], as by predict_members; pass one model's p as p[None]"
        lacks_axis = probs.ndim < 3 or np.shape(labels) == probs.shape[:-1]
        lacks_members = probs.shape[:1] == (0,)
    else:
        form = "[..., C]"
        lacks_axis = probs.shape in ((), np.shape(labels))
        lacks_members = False
    if lacks_axis or lacks_members or probs.shape[-1] < 2:
        raise ValueError(
            f"probabilities have shape {probs.shape}; expected {form}; {_OF_TWO}"
        )
    return probs


def _blocks(probs: np.ndarray, members: int = 1) -> Iterator:
    """Yield a few rows of probabilities at a time: a slice, and [K, n, C] in float64.

    Rows run over all leading axes; for K members, over those between K and C.
    Raises ValueError for numbers that are not probabilities.
    """
    flat = probs.reshape(members, -1, probs.shape[-1])
    size = max(1, _BLOCK_SIZE // (members * probs.shape[-1]))
    for start in range(0, max(1, flat.shape[1]), size):
        rows = slice(start, start + size)
        block = np.asarray(flat[:, rows], np.float64)
        sums = block.sum(axis=-1)
        # Negated, so that nan counts as wrong too.
        wrong = ~((np.abs(sums - 1) < 1e-3) & (block.min(axis=-1) >= 0))
        if wrong.any():
            k, n = np.argwhere(wrong)[0]
            i = np.unravel_index(k * flat.shape[1] + start + n, probs.shape[:-1])
            advice = "pass softmax(logits), computed in float32" if i else _OF_TWO
            raise ValueError(
                f"probabilities{list(map(int, i))} begin with {block[k, n, 0]} and add "
                f"up to {sums[k, n]}; expected numbers >= 0 whose sum is 1; {advice}"
            )
        yield rows, block


def _check_order(what: str, members: np.ndarray, examples: Any) -> None:
    """Raise ValueError if members are given after the examples, [N, K, ...]."""
    if members.ndim < 2 or np.ndim(examples) == 0:
        return
    first, second = members.shape[:2]
    count = len(examples)
    if first == count and second != count:
        raise ValueError(
            f"{what} are [{first}, {second}, ...] of {first} examples; "
            f"expected members first, [K, N, ...], as by numpy.swapaxes({what}, 0, 1)"
        )


def _indices(x: Any, shape: tuple, name: str = "labels") -> np.ndarray:
    """Flatten indices [...] into the last axis of [..., C], or raise ValueError."""
    x = _real(name, x, None)
    rows = shape[:-1]
    last = shape[-1] - 1
    if x.shape != rows or x.dtype.kind not in "iu":
        raise ValueError(
            f"{name} are {x.dtype}{list(x.shape)}; expected integers {list(rows)}, "
            f"0 to {last}"
        )
    if x.size and not 0 <= x.min() <= x.max() <= last:
        raise ValueError(f"{name} lie in {x.min()}..{x.max()}; expected 0 to {last}")
    return x.ravel()


def _log(probs: np.ndarray) -> np.ndarray:
    """Return log p, finite: p = 0 counts as 1.2e-38, float32's smallest."""
    return np.log(np.maximum(probs, np.finfo(np.float32).tiny))


# ---------------------------------------------------------------------------------
# Uncertainty: one number per example
# ---------------------------------------------------------------------------------


def _entropy(probs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return -sum_c p_c log p_c in nats, with 0 log 0 = 0: [..., C] -> [...].

    Logarithms are in float32, or in `dtype`, the probabilities' own type, if wider.
    """
    logs = _log(probs.astype(np.promote_types(dtype, np.float32)))
    return -np.einsum("...c,...c->...", probs, logs)


def _entropies(probs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the total entropy and its disagreement part: [K, n, C] -> [2, n]."""
    total = _entropy(probs.mean(axis=0), dtype)
    own = _entropy(probs, dtype).mean(axis=0)
    # Entropy is concave, so the difference is >= 0 up to rounding.
    return np.stack([total, np.maximum(total - own, 0)])


def _uncertainty(member_probs: Any) -> np.ndarray:
    """Apply `_entropies` to all rows: [K, ..., C] -> [2, ...]."""
    probs = _probabilities(member_probs, of_members=True)
    blocks = _blocks(probs, len(probs))
    entropies = [_entropies(block, probs.dtype) for _, block in blocks]
    return np.concatenate(entropies, axis=1).reshape(2, *probs.shape[1:-1])


def predictive_entropy(member_probs: Any) -> np.ndarray:
    """Return H(mean_k p_k) in nats, the total uncertainty: [K, N, C] -> [N].

    The entropy is high where members are uncertain individually or disagree.  Further
    axes between K and C stay.  Raises ValueError for probabilities that
    `ensemble_report` refuses, and for [N, C]: pass one model's p as p[None].
    """
    return _uncertainty(member_probs)[0]


def mutual_information(member_probs: Any) -> np.ndarray:
    """Return H(mean_k p_k) - mean_k H(p_k) in nats: [K, N, C] -> [N].

    The result is the part of the predictive entropy that comes from disagreement
    between members (Depeweg et al. 2018, eq. 3): it measures epistemic uncertainty, and
    is 0 where members are equal.  Raises ValueError as `predictive_entropy` does.
    """
    return _uncertainty(member_probs)[1]


# ---------------------------------------------------------------------------------
# Reports: members, ensemble, and every size
# ---------------------------------------------------------------------------------


_NUM_BINS = 15  # as in Guo et al. 2017


class _Sums(NamedTuple):
    """Sums over the examples of each bin; `reliability` defines the bins."""

    examples: np.ndarray  # [..., 15], as all others
    confidence: np.ndarray  # the largest probability
    right: np.ndarray  # whose most probable class is the label
    nll: np.ndarray  # -log p_label
    brier: np.ndarray


def _sums(probs: np.ndarray, labels: np.ndarray) -> _Sums:
    """Add up the terms of scores, by bins: [S, n, C] and [n] -> [S, 15] each."""
    confidence = probs.max(axis=-1)
    edges = np.linspace(0, 1, _NUM_BINS + 1)[1:-1]
    bins = np.searchsorted(edges, confidence, side="right")
    bins += _NUM_BINS * np.arange(len(probs))[:, None]

    def by_bins(terms):  # [S, n] -> [S, 15]
        sums = np.bincount(bins.ravel(), terms.ravel(), _NUM_BINS * len(probs))
        return sums.reshape(len(probs), _NUM_BINS)

    p_label = probs[:, np.arange(len(labels)), labels]
    squares = np.einsum("snc,snc->sn", probs, probs)
    return _Sums(
        examples=by_bins(np.ones(bins.shape)),
        confidence=by_bins(confidence),
        right=by_bins(probs.argmax(axis=-1) == labels),
        nll=by_bins(-_log(p_label)),
        # sum_c (p_c - y_c)^2 = sum_c p_c^2 - 2 p_label + 1
        brier=by_bins(squares - 2 * p_label + 1),
    )


def reliability(probs: Any, labels: Any) -> np.ndarray:
    """Return a reliability diagram's counts, confidences and accuracies [3, 15].

    probs are [..., C], labels [...].  The largest probability of an example puts it
    into one of 15 bins [l, u) of equal width; the last bin is closed.  A column has a
    bin's count, its confidence (the mean of that probability) and its accuracy, the
    fraction of examples whose most probable class is the label (Guo et al. 2017,
    section 2).  An empty bin's confidence and accuracy are nan.

    Raises ValueError for probabilities and labels that `ensemble_report` refuses.
    """
    probs = _probabilities(probs, labels=labels)
    labels = _indices(labels, probs.shape)
    of_blocks = [_sums(block, labels[rows]) for rows, block in _blocks(probs)]
    sums = _Sums(*np.sum(of_blocks, axis=0)[:, 0])
    with np.errstate(invalid="ignore"):
        confidences = sums.confidence / sums.examples
        accuracies = sums.right / sums.examples
    return np.stack([sums.examples, confidences, accuracies])


def _scores(sums: _Sums) -> dict:
    """Turn the sums [15] of a model into scores; `ensemble_report` has the formulas."""
    count = sums.examples.sum()
    gaps = np.abs(sums.right - sums.confidence)
    return {
        "accuracy": float(sums.right.sum() / count),
        "negative_log_likelihood": float(sums.nll.sum() / count),
        "brier_score": float(sums.brier.sum() / count),
        "expected_calibration_error": float(gaps.sum() / count),
    }


def ensemble_report(member_probs: Any, labels: Any) -> dict:
    """Report an ensemble's accuracy, calibration and disagreement: a dict of numbers.

    member_probs [K, N, C] are the members' probabilities, labels [N] class indices.
    The ensemble's probabilities are the members' mean (Lakshminarayanan et al. 2017,
    section 2.4).  The report is computed on the host, a block of examples at a time, in
    float64; entropies take logarithms in float32 unless the probabilities are wider.
    The keys, whose values are means over examples:

    `ensemble`, `member` [K], `by_size` [K] (the first 1..K members), each with
      accuracy                    fraction whose most probable class is the label
      negative_log_likelihood     -log p_label, nats; p = 0 counts as 1.2e-38, so that
                                  the result is finite
      brier_score                 sum_c (p_c - [c = label])^2, in [0, 2] (Brier 1950)
      expected_calibration_error  sum_b n_b / N |accuracy_b - confidence_b| over 15
                                  bins of the largest probability: see `reliability`
                                  (Guo et al. 2017, eq. 3)
    `disagreement`                fraction of examples on which two members predict
                                  different classes, mean over pairs; 0 for K = 1
    `predictive_entropy`          mean of the function with that name, nats
    `mutual_information`          the part of it that is disagreement, nats

    All axes between K and C index examples, as in tokens [K, N, T, C] with labels
    [N, T].

    Raises ValueError for other shapes, labels outside 0..C-1, no examples, entries that
    are masked or not real, and probabilities that are negative or not finite, or whose
    sum is off 1 by 1e-3 or more.
    """
    probs = _probabilities(member_probs, True, labels)
    _check_order("member_probs", probs, labels)
    labels = _indices(labels, probs.shape[1:])
    members = len(probs)
    classes = probs.shape[-1]
    if not labels.size:
        raise ValueError(f"probabilities have shape {probs.shape}; none may be empty")
    sums = np.zeros((len(_Sums._fields), 2 * members, _NUM_BINS))
    entropies = np.zeros(2)
    alike = 0  # ordered pairs of members that predict the same class
    for rows, block in _blocks(probs, members):
        firsts = itertools.accumulate(block)  # numpy.cumsum takes ten times as long
        means = (first / size for size, first in enumerate(firsts, 1))
        sums += np.array(_sums(np.stack([*block, *means]), labels[rows]))
        entropies += _entropies(block, probs.dtype).sum(axis=1)
        guesses = block.argmax(axis=-1) + classes * np.arange(block.shape[1])  # [K, n]
        votes = np.bincount(guesses.ravel())  # per class of each example
        alike += int((votes * (votes - 1)).sum())
    scores = [_scores(_Sums(*model)) for model in sums.swapaxes(0, 1)]
    pairs = labels.size * members * (members - 1)
    entropy, mutual_information = entropies / labels.size
    return {
        "ensemble": scores[-1],
        "member": scores[:members],
        "by_size": scores[members:],
        "disagreement": float(1 - alike / pairs) if pairs else 0.0,
        "predictive_entropy": float(entropy),
        "mutual_information": float(mutual_information),
    }


def mixture(means: Any, variances: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of an ensemble of Gaussians, float64 [N, ...].

    means and variances [K, N, ...] are the members'.  The members are mixed in equal
    parts: the mean is the mean of the means, and the variance the mean of the variances
    plus the variance of the means (Lakshminarayanan et al. 2017, section 2.4).

    Raises ValueError for shapes that differ, no member, entries that are masked, not
    real or not finite, and a variance that is not above 0.
    """
    means = _real("means", means)
    variances = _real("variances", variances)
    if means.shape != variances.shape or means.shape[:1] in ((), (0,)):
        raise ValueError(
            f"means have shape {means.shape}, variances {variances.shape}; expected "
            "both [K, N, ...], with a member at least"
        )
    good = np.isfinite(means) & np.isfinite(variances) & (variances > 0)
    if not good.all():
        i = tuple(map(int, np.unravel_index(good.argmin(), good.shape)))
        raise ValueError(
            f"means{[*i]} is {means[i]}, its variance {variances[i]}; expected finite "
            "numbers, and a variance above 0"
        )
    return means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0)


def _gaussian_scores(mean, variance, targets) -> dict:
    """Score Gaussians by targets of their shape, as `regression_report` defines it."""
    errors = targets - mean
    deviation = np.sqrt(variance)
    far = np.abs(errors) / deviation
    bounds = {p: statistics.NormalDist().inv_cdf(0.5 + p / 200) for p in (50, 90, 95)}
    nll = np.log(deviation) + (math.log(2 * math.pi) + far**2) / 2
    return {
        "root_mean_squared_error": float(np.sqrt((errors**2).mean())),
        "negative_log_likelihood": float(nll.mean()),
        "coverage": {f"{p}%": float((far <= z).mean()) for p, z in bounds.items()},
    }


def regression_report(means: Any, variances: Any, targets: Any) -> dict:
    """Report the accuracy, calibration and disagreement of an ensemble of Gaussians.

    means and variances [K, N] are the members', targets [N].  Further axes index
    examples too, as in a forecast of H horizons, [K, N, H] with targets [N, H]; for a
    report on one horizon pass [..., h] of all three.  The ensemble's mean and variance
    are the mixture's: the mean of the means, and the mean of the variances plus the
    variance of the means (Lakshminarayanan et al. 2017, section 2.4).  The report, a
    dict of numbers, is computed on the host in float64.  The keys, whose values are
    means over examples, in units of the targets:

    `ensemble`, `member` [K], `by_size` [K] (the first 1..K members), each with
      root_mean_squared_error     sqrt of the mean of (target - mean)^2
      negative_log_likelihood     -log N(target; mean, variance), nats
      coverage                    fraction of targets in the Gaussian's central
                                  interval, for each of "50%", "90%" and "95%"
    `predictive_variance`         the sum of the next two; all three in squared units
    `mean_of_variances`           the noise that the members expect
    `variance_of_means`           the members' disagreement; 0 for K = 1

    Raises ValueError for other shapes, no examples, entries that are masked, not real
    or not finite, and a variance that is not above 0.
    """
    means = _real("means", means, None)
    variances = _real("variances", variances, None)
    targets = _real("targets", targets)
    _check_order("means", means, targets)
    alike = means.shape == variances.shape and means.shape[1:] == targets.shape
    if means.ndim < 2 or not alike or 0 in means.shape:
        raise ValueError(
            f"means have shape {means.shape}, variances {variances.shape} and targets "
            f"{targets.shape}; expected [K, N, ...], [K, N, ...] and [N, ...], none of "
            "them empty; drop a last axis of 1 by [..., 0]"
        )
    member = []
    by_size = []
    mean = np.zeros(targets.shape)
    noise = np.zeros(targets.shape)  # sum of the variances
    squares = np.zeros(targets.shape)  # sum of the squared deviations from the mean
    for k in range(len(means)):
        own = np.asarray(means[k], np.float64)
        variance = np.asarray(variances[k], np.float64)
        finite = np.isfinite(own) & np.isfinite(variance) & np.isfinite(targets)
        good = finite & (variance > 0)
        if not good.all():
            i = np.unravel_index(good.argmin(), good.shape)
            raise ValueError(
                f"means{[k, *map(int, i)]} is {own[i]}, its variance {variance[i]}, "
                f"its target {targets[i]}; expected finite numbers, and a variance "
                "above 0"
            )
        member.append(_gaussian_scores(own, variance, targets))
        # Go from k members to k + 1: update the mean, and the sum of the squared
        # deviations from it (Welford 1962).
        off = own - mean
        noise = noise + variance
        mean = mean + off / (k + 1)
        squares = squares + off * (own - mean)
        mixture = (noise + squares) / (k + 1)
        by_size.append(_gaussian_scores(mean, mixture, targets))
    return {
        "ensemble": by_size[-1],
        "member": member,
        "by_size": by_size,
        "predictive_variance": float(mixture.mean()),
        "mean_of_variances": float(noise.mean() / len(means)),
        "variance_of_means": float(squares.mean() / len(means)),
    }


_TITLES = {
    "root_mean_squared_error": "RMSE",
    "negative_log_likelihood": "NLL",
    "brier_score": "Brier",
    "expected_calibration_error": "ECE",
}


def _cells(scores: dict) -> dict[str, str]:
    """Return a model's scores as text, by the titles of their columns."""
    shares = {f"in {p}": share for p, share in scores.get("coverage", {}).items()}
    if "accuracy" in scores:
        shares["accuracy"] = scores["accuracy"]
    cells = {title: f"{share:.2%}" for title, share in shares.items()}
    present = [key for key in _TITLES if key in scores]
    return cells | {_TITLES[key]: f"{scores[key]:.4f}" for key in present}


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:10}" + "".join(f"{cell:>10}" for cell in cells)


def _row(name: str, scores: dict | None) -> str:
    if scores is None:
        return f"{name:10}{'failed: not finite':>22}"
    return _line(name, _cells(scores).values())


def format_report(report: dict) -> str:
    """Return a report as tables in plain text, of some lines.

    `report` is the result of `ensemble_report` or of `regression_report`.  The first
    table has the scores of each member and of the ensemble, or of the one model.  For
    several members, the second has those of the first 1..K members, and a line of the
    members' disagreement follows.  A member whose scores are None has failed.  Accuracy
    and coverage are in percent.

    Raises ValueError for a dict that is no report.
    """
    if not isinstance(report, dict) or not {"ensemble", "member"} <= report.keys():
        raise ValueError(
            f"report is {report!r:.60}; expected the result of ensemble_report or of "
            "regression_report"
        )
    ensemble = report["ensemble"]
    members = report["member"]
    head = _line("", _cells(ensemble))
    if len(members) < 2:
        return "\n".join([head, _row("model", ensemble)])
    rows = [_row(f"member {i}", scores) for i, scores in enumerate(members)]
    sizes = [_row(f"first {n}", each) for n, each in enumerate(report["by_size"], 1)]
    if "accuracy" in ensemble:
        last = (
            f"disagreement {report['disagreement']:.2%} of pairs, predictive entropy "
            f"{report['predictive_entropy']:.4f} nats, of which mutual information "
            f"{report['mutual_information']:.4f}"
        )
    else:
        last = (
            f"predictive variance {report['predictive_variance']:.4g}, of which "
            f"variance of the means {report['variance_of_means']:.4g}"
        )
    by_size = ["", "ensemble by size, finite members only", head, *sizes]
    return "\n".join([head, *rows, _row("ensemble", ensemble), *by_size, "", last])


def _one_axis(name: str, scores: Any) -> np.ndarray:
    """Return scores [n] in float64, or raise ValueError."""
    given = _real(name, scores, None)
    scores = _real(name, given)
    if given.dtype.kind in "iu" and (np.abs(scores) >= 2**53).any():
        raise ValueError(
            f"{name} have integers of 2**53 or more, which float64 merges; subtract a "
            "constant, or pass their ranks"
        )
    if scores.ndim > 2:
        raise ValueError(
            f"{name} have shape {scores.shape}; expected [n]; pass maps as x.ravel(); "
            "for a bound or a threshold that holds, one number per map, since its "
            "pixels are not independent"
        )
    if scores.ndim != 1:
        raise ValueError(
            f"{name} have shape {scores.shape}; expected [n]; from [n, H] take one "
            "column, [:, h]"
        )
    if np.isnan(scores).any():
        raise ValueError(f"{name} have {np.isnan(scores).sum()} nan; expected none")
    return scores


def _sorted_scores(scores_in: Any, scores_out: Any) -> tuple:
    """Return two sets of scores in float64, sorted, or raise ValueError."""
    inside = np.sort(_one_axis("scores_in", scores_in))
    outside = np.sort(_one_axis("scores_out", scores_out))
    if not inside.size or not outside.size:
        raise ValueError(
            f"there are {inside.size} scores_in and {outside.size} scores_out; "
            "expected one or more of each"
        )
    return inside, outside


def _check_wrong(wrong: Any, scores: np.ndarray) -> np.ndarray:
    """Return booleans [n] like the scores, or raise ValueError."""
    wrong = _real("wrong", wrong, None)
    if wrong.dtype != bool or wrong.shape != scores.shape:
        raise ValueError(
            f"wrong is {wrong.dtype}{list(wrong.shape)}; expected "
            f"bool{list(scores.shape)}, one per example, after the uncertainty"
        )
    return wrong


def auroc(scores_in: Any, scores_out: Any) -> float:
    """Return the area under the ROC curve of a score that detects outliers.

    scores_in [N] are an uncertainty, such as `predictive_entropy` or
    `mutual_information`, of examples like the training data; scores_out [N'] are the
    same uncertainty of outliers, and should be higher.  The area is P(out > in) +
    P(out = in) / 2 for a random pair, the Mann-Whitney statistic (Hanley and McNeil
    1982): 0.5 is chance, 1 a perfect detector.

    Raises ValueError for scores that are empty, not of one axis, masked, not real, or
    nan.
    """
    inside, outside = _sorted_scores(scores_in, scores_out)
    below = np.searchsorted(inside, outside, side="left")
    up_to = np.searchsorted(inside, outside, side="right")
    return float((below + up_to).mean() / (2 * len(inside)))


def fpr95(scores_in: Any, scores_out: Any) -> float:
    """Return the false positive rate of a score that detects 95% of the outliers.

    The arguments are as in `auroc`.  The rate is the fraction of scores_in at or above
    the largest threshold that 95% of scores_out or more are at or above (Hendrycks et
    al. 2019, "Deep anomaly detection with outlier exposure", section 4.1, where
    outliers are the positives, too): 0 is a perfect detector.

    Raises ValueError as `auroc` does.
    """
    inside, outside = _sorted_scores(scores_in, scores_out)
    return float((inside >= outside[len(outside) * 5 // 100]).mean())


def aurc(uncertainty: Any, wrong: Any) -> float:
    """Return the area under the risk-coverage curve of an uncertainty, lower is better.

    uncertainty [n] and wrong [n], booleans, are as in `risk_threshold`.  The area is
    the mean over k = 1 to n of the error rate among the k surest examples (Geifman et
    al. 2019, "Bias-reduced uncertainty estimation").  Examples of equal uncertainty
    count as if each were as wrong as their mean.

    Raises ValueError for uncertainty that is not [n] with n >= 1, masked, not real, or
    nan, and for wrong that is not n booleans.
    """
    scores = _one_axis("uncertainty", uncertainty)
    if not scores.size:
        raise ValueError("uncertainty is empty; expected one or more examples")
    wrong = _check_wrong(wrong, scores)
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    rates = np.repeat(np.bincount(group, wrong) / sizes, sizes)
    return float((np.cumsum(rates) / np.arange(1, len(rates) + 1)).mean())


# ---------------------------------------------------------------------------------
# Decisions: bounds, thresholds and temperatures from a calibration set
# ---------------------------------------------------------------------------------


def _rank(scores: np.ndarray, coverage: Any) -> int:
    """Return ceil((n + 1) coverage), or 1 if that is 0, for scores [n]."""
    _check_range("coverage", coverage, 1)
    # A Python float, as the product could exceed a type of 16 bits.  Rounded, as 100 *
    # 0.55 is above 55 in floating point.
    return max(1, math.ceil(round((len(scores) + 1) * float(coverage), 9)))


def conformal_quantile(scores: Any, coverage: float = 0.9) -> float:
    """Return a bound that at least a fraction `coverage` of new scores meets.

    scores [n] measure the error on a calibration set: labeled examples, held out of
    training.  The bound q is the ceil((n + 1) coverage)-th smallest score.  The score
    of one more such example is at most q with a probability of at least `coverage`, and
    of at most `coverage` + 1 / (n + 1) where no scores are equal (split conformal
    prediction: Vovk et al. 2005; Lei et al. 2018, theorem 2.2).  The bound is infinite
    where n is below coverage / (1 - coverage).

    With the score 1 - p_label, the classes with 1 - p <= q are a set that holds the
    label; with the score |target - mean| / deviation, mean +- q deviation holds the
    target.  With several outputs, the quantile of scores[:, h] bounds output h, and the
    quantile of scores.max(axis=1) all outputs at once.  The probability is over draws
    of all the examples: it says nothing about a single example, nor about examples
    unlike these.

    Raises ValueError for scores that are not [n], masked, not real, or nan, and for a
    coverage outside [0, 1).
    """
    scores = np.sort(_one_axis("scores", scores))
    rank = _rank(scores, coverage)
    return float(scores[rank - 1]) if rank <= len(scores) else math.inf


def _fold_indices(folds: Any, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return folds [n] for rows [n] and values [K, ...], or raise ValueError."""
    folds = _indices(folds, (len(rows), *values.shape[:1]), "folds")
    used = len(np.unique(folds))
    if used < max(1, len(values)):
        raise ValueError(
            f"values {list(values.shape)} are of {len(values)} members, folds of "
            f"{used}; expected [K, ...] and 0 to K - 1"
        )
    return folds


def fold_sets(scores: Any, folds: Any, values: Any, coverage=0.9) -> np.ndarray:
    """Return which values a new score may have, by K members that left out a fold each.

    Each of n rows calibrates the member that left it out and trains the others, so no
    row is held out of all.  The result has values' shape without K: True where fewer
    than ceil((n + 1) coverage) of the rows have a score below the value by the same
    member (CV+ for classes of Romano, Sesia and Candes 2020, "Classification with valid
    and adaptive coverage"; cross-conformal prediction of Vovk 2015).

    With the score 1 - p_label and the values 1 - p, a set of classes holds the label.
    With a = 1 - coverage it does so with a probability of at least 1 - 2 a - sqrt(2 /
    n) for folds of equal size, and of about 1 - a as a rule.  The probability is over
    draws of all the examples, as in `conformal_quantile`, which has one member.

    Args:
      scores: Numbers [n], of each row by the member that left it out.
      folds: Integers [n], which member that is: 0 to K - 1, each at least once.
      values: Numbers [K, ...], such as [K, N, C], of each member for new examples.
      coverage: The fraction of sets that hold the label, in [0, 1).

    Raises ValueError for scores that `conformal_quantile` refuses, values that are
    masked, nan or not real, folds that do not fit, and a coverage outside [0, 1).
    """
    scores = _one_axis("scores", scores)
    values = _real("values", values, None)
    if np.isnan(values).any():
        raise ValueError(f"values have {np.isnan(values).sum()} nan; expected none")
    folds = _fold_indices(folds, scores, values)
    of_folds = (np.sort(scores[folds == k]) for k in range(len(values)))
    below = sum(map(np.searchsorted, of_folds, values))
    return np.less(below, _rank(scores, coverage))


def fold_interval(
    predictions: Any, out_of_fold: Any, targets: Any, folds: Any, coverage: float = 0.9
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends [N] of intervals, by K members that left out a fold each.

    With an error e of each of n rows, and the new prediction m of the member that left
    the row out, the upper end is the r-th smallest of the n sums m + e, and the lower
    end the r-th largest of m - e, where r = ceil((n + 1) coverage) (K-fold CV+ of
    Barber et al. 2021, "Predictive inference with the jackknife+").  Both are exact,
    whatever the sizes of the errors: each is one of these sums in float64, or infinite
    where n is below coverage / (1 - coverage).  An interval holds its target with the
    probabilities of `fold_sets` (their theorem 4).

    Args:
      predictions: Numbers [K, N], of each member for each new example.
      out_of_fold: Numbers [n], of the member that left out the row, for each row.
      targets: Numbers [n], of the rows.
      folds: Integers [n], which member left out the row, as in `fold_sets`.
      coverage: The fraction of targets to hold, in [0, 1).

    Raises ValueError for arrays of other shapes, entries that are masked, not real or
    not finite, folds that do not fit, and a coverage outside [0, 1).
    """
    centers = _real("predictions", predictions)
    targets = _real("targets", targets)
    given = _real("out_of_fold", out_of_fold)
    finite = all(np.isfinite(x).all() for x in (centers, given, targets))
    fit = centers.ndim == 2 and given.ndim == 1 and given.shape == targets.shape
    if not (fit and finite):
        raise ValueError(
            f"predictions have shape {centers.shape}, out_of_fold {given.shape} and "
            f"targets {targets.shape}; expected finite numbers [K, N], [n] and [n]"
        )
    # Row n + 1 is the new example itself, whose error may be of any size.
    folds = np.append(_fold_indices(folds, targets, centers), 0)
    errors = np.append(np.abs(targets - given), math.inf)
    place = _rank(targets, coverage) - 1
    lower = np.empty(centers.shape[1])
    upper = np.empty(centers.shape[1])
    for example, new in enumerate(centers.T):  # all at once would take [n, N] sums
        means = new[folds]
        # The r-th largest of m - e is minus the r-th smallest of e - m.
        lower[example] = -np.partition(errors - means, place)[place]
        upper[example] = np.partition(errors + means, place)[place]
    return lower, upper


def _at_most(
    errors: np.ndarray, kept: np.ndarray, risk: float, exact_near: float
) -> np.ndarray:
    """Return P(at most errors[i] of kept[i] examples are wrong), each by `risk`.

    Errors [n] are among the first 1, ..., n examples, which are `kept` [n].  The
    probability falls with every right example that is added and rises with every wrong
    one, in proportion to P(exactly this many errors).  Where that sum rounds too
    coarsely, near a number, P(exactly j errors) is added up for j = errors, errors - 1,
    ..., 0.
    """
    wrong = np.diff(errors, prepend=0) > 0
    right = kept - errors
    log_factorials = np.cumsum(np.log(np.append(1, kept)))
    log_choices = log_factorials[kept] - log_factorials[errors] - log_factorials[right]
    log_exactly = log_choices + errors * math.log(risk) + right * math.log1p(-risk)
    exactly = np.exp(log_exactly)
    steps = exactly * right / kept * np.where(wrong, 1, risk / (risk - 1))
    at_most = 1 + np.cumsum(steps)
    unclear = np.flatnonzero(np.abs(at_most - exact_near) < 1e-6)
    j = errors[unclear]
    n = kept[unclear]
    term = exactly[unclear]
    total = term
    while (term > 1e-17 * total).any():
        term = term * j / (n - j + 1) * ((1 - risk) / risk)
        total = total + term
        j = np.maximum(j - 1, 0)
    at_most[unclear] = total
    return at_most


def risk_threshold(
    uncertainty: Any, wrong: Any, *, risk: float = 0.01, confidence: float = 0.95
) -> float:
    """Return the largest uncertainty to decide at, so that few decisions are wrong.

    An example is decided, or kept, where its uncertainty is at most the threshold.
    Among new examples that are kept, at most a fraction `risk` is wrong, with
    probability `confidence` over draws of the calibration set, if risk grows with
    uncertainty (Geifman and El-Yaniv 2017).

    Args:
      uncertainty: Numbers [n] for a calibration set: labeled examples like the new
        ones, held out of training.
      wrong: Booleans [n]: whether the prediction for each of these examples is wrong.
      risk: The largest fraction of wrong decisions, in (0, 1).
      confidence: The probability that this fraction holds, in (0, 1).

    Returns:
      The threshold, or minus infinity, which keeps no example, where none has this
      property; a UserWarning then says why.  The smallest calibration set with a
      threshold has n examples, none of them wrong, where (1 - risk)^n <= 1 -
      confidence: 299 with the defaults.

    Examples are kept from the surest on, as long as so few errors among them would have
    at most the probability 1 - confidence if their risk were higher (Clopper and
    Pearson 1934).  Counts of kept examples are tested in order, from twice the smallest
    count that could pass, or from n / 2 if that is fewer: n alone fixes the sequence,
    so the first failure ends it (Angelopoulos et al. 2021, "Learn then test").

    Raises ValueError for uncertainty that is not [n], masked, not real, nan, or minus
    infinity, for wrong that is not n booleans, and for a risk or a confidence outside
    (0, 1).
    """
    scores = _one_axis("uncertainty", uncertainty)
    if scores.min(initial=math.inf) == -math.inf:
        raise ValueError(
            f"uncertainty[{scores.argmin()}] is -inf, the threshold that keeps no "
            "example; expected larger numbers"
        )
    wrong = _check_wrong(wrong, scores)
    _check_range("risk", risk, 1, low=1e-9)
    _check_range("confidence", confidence, 1, low=1e-9)
    order = np.argsort(scores)
    scores = scores[order]
    wrong = wrong[order]
    errors = np.cumsum(wrong)  # among the kept
    kept = np.arange(1, len(order) + 1)
    so_few = _at_most(errors, kept, risk, exact_near=1 - confidence)
    fewest = math.log(1 - confidence) / math.log1p(-risk)
    start = max(fewest, min(2 * fewest, len(order) / 2))
    is_last = np.searchsorted(scores, scores, side="right") == kept  # of equal scores
    tested = is_last & (kept >= start)
    improbable = np.logical_and.accumulate(so_few[tested] <= 1 - confidence)
    threshold = float(scores[tested][improbable].max(initial=-math.inf))
    if threshold == -math.inf:
        if tested.any():
            first = int(tested.argmax())
            why = f"{errors[first]} of the surest {first + 1} examples are wrong"
        else:
            needed = math.ceil(fewest)
            why = f"it takes {needed} examples, none wrong, and there are {len(order)}"
        warnings.warn(
            f"no threshold has a risk of {risk} with confidence {confidence}, so none "
            f"is kept: {why}; calibrate with more examples, or ask for a larger risk",
            stacklevel=2,
        )
    return threshold


def temper(probs: Any, temperature: float, bias: Any = 0) -> np.ndarray:
    """Return probabilities p^(1 / temperature), normalized: [..., C] -> [..., C].

    A temperature above 1 makes them less sure, below 1 surer; the order of the classes
    stays.  softmax(logits) becomes softmax(logits / temperature) (Guo et al. 2017,
    section 4.2); p = 0 counts as in `ensemble_report`.  A bias [C] is added to these
    logits, as in their vector scaling, and may change the order: -log(w) takes back
    weights w [C] that a loss gave to the classes.  The result is float64, on the host.

    Raises ValueError for probabilities that `ensemble_report` refuses, for a
    temperature that is not above 0 or not finite, and for a bias of other numbers.
    """
    _check_range("temperature", temperature, math.inf, low=1e-30)
    probs = _probabilities(probs)
    bias = _real("bias", bias)
    if bias.shape not in ((), probs.shape[-1:]) or not np.isfinite(bias).all():
        raise ValueError(f"bias is {bias}; expected {probs.shape[-1]} finite numbers")
    tempered = np.empty(probs.shape)
    flat = tempered.reshape(-1, probs.shape[-1])
    for rows, (block,) in _blocks(probs):
        flat[rows] = _softmax(_log(block) / temperature + bias)
    return tempered


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Return exp(logits), normalized over the last axis: [..., C] -> [..., C]."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class _Loss(NamedTuple):
    """An NLL, and its derivatives by P numbers."""

    nll: float
    gradient: np.ndarray  # [P]
    hessian: np.ndarray  # [P, P]


def _tempered_nll(probs: np.ndarray, labels: np.ndarray, scales: np.ndarray) -> _Loss:
    """Return the NLL of labels [n] for probs [n, C] that are tempered.

    scales[0] is 1 / temperature; scales[1:] has a bias for each class, or nothing.
    """
    size = len(scales)
    gradient = np.zeros(size)
    hessian = np.zeros((size, size))
    logs = _log(probs)
    right = labels[:, None] == np.arange(probs.shape[-1])
    bias = scales[1:] if size > 1 else 0
    powers = _softmax(scales[0] * logs + bias)
    off = powers - right
    rise = powers * (logs - np.sum(powers * logs, axis=-1, keepdims=True))
    gradient[0] = (off * logs).sum()
    hessian[0, 0] = (rise * logs).sum()
    if size > 1:
        gradient[1:] = off.sum(axis=0)
        cross = rise.sum(axis=0)
        hessian[0, 1:] = cross
        hessian[1:, 0] = cross
        diagonal = np.diag(powers.sum(axis=0))
        # 1 keeps the sum of the biases, which does not matter, at 0.
        hessian[1:, 1:] = 1 + diagonal - powers.T @ powers
    return _Loss(-_log(powers[right]).sum(), gradient, hessian)


def fit_temperature(probs: Any, labels: Any, *, bias: bool = False) -> Any:
    """Return the temperature by which `temper` gives the smallest NLL on these labels.

    probs [n, C] and labels [n], or with more axes, describe a calibration set: labeled
    examples, held out of training.  For an ensemble pass the members' mean, which is
    less sure than the members (Rahaman and Thiery 2021).  A temperature far from 1
    helps from a few hundred examples on (Guo et al. 2017 take 5,000).

    With bias=True, return (temperature, bias [C]) for `temper`; the biases add up to 0.
    The mean probability of each class is then its frequency among these labels, also
    after a loss with weights for classes.

    The NLL is convex in 1 / temperature and the bias: Newton's method, with steps that
    are halved where the NLL grows, finds the minimum to nine digits.

    Raises ValueError for probabilities and labels that `ensemble_report` refuses, and
    where no temperature is best: if every label is a most probable class, a lower one
    is always better; if labels are no more probable than other classes, a higher one.
    No bias is best for a class without a label.
    """
    probs = _probabilities(probs, labels=labels)
    labels = _indices(labels, probs.shape)
    size = 1 + probs.shape[-1] if bias else 1
    scales = np.zeros(size)
    step = np.zeros(size)
    lowest = math.inf
    for _ in range(50):
        nll = 0.0
        gradient = np.zeros(size)
        hessian = np.zeros((size, size))
        for rows, (block,) in _blocks(probs):
            of_block = _tempered_nll(block, labels[rows], scales + step)
            nll += of_block.nll
            gradient += of_block.gradient
            hessian += of_block.hessian
        if nll > lowest + 1e-12 * labels.size:
            step = step / 2
        else:
            scales = scales + step
            lowest = nll
            step = -np.linalg.pinv(hessian) @ gradient
        converged = np.abs(step).max() <= 1e-10 * np.abs(scales).max()
        if converged and scales[0] > 1e-9:
            temperature = float(1 / scales[0])
            return (temperature, scales[1:]) if bias else temperature
    for_bias = ", and one of each class for a bias" if bias else ""
    raise ValueError(
        f"cannot fit a temperature to {labels.size} examples; expected labels more "
        f"probable than chance, some of them not the most probable{for_bias}; check "
        "the order of the classes, or use more examples"
    )
