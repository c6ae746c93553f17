"""Ensembles of small networks for tables of numbers, as scikit-learn's users know them.

    from tabular import EnsembleRegressor  # or EnsembleClassifier

    model = EnsembleRegressor(random_state=0).fit(x, y)  # x [N, F], y [N]
    mean = model.predict(new)  # [n]
    low, high = model.predict_interval(new, coverage=0.9).T  # [n] each

Networks of one hidden layer of 50 units say a mean and a variance, or the probabilities
of classes; those of a fit are the members of one trainer.  For each setting of the
weight decays there are `members` networks that learn all rows, and as many that leave
out one of ten folds, for each of these.  The setting is taken of which the latter say
best what they left out, and the former are the ensemble.  The same errors, of all rows
and each of networks that did not see it, calibrate the intervals (K-fold CV in Barber
et al. 2021, MAPIE's method "base").  These hold if networks of nine tenths of the rows
err as those of all; no more is guaranteed.

`pjax_ensemble.use_cpu_devices()`, before JAX is first used, has a fit use all cores.

The networks have Adam with a cosine schedule, a last layer that starts at 0, and, where
they say means and variances, of targets whose own variance is 1, against ones that run
away,

- a decay of the weights of the variance, and one of all others: a normal prior (MacKay
  1992), apart for the two (Sluijterman et al. 2023).  The recipe is these;
- a floor of the variance, as in Lakshminarayanan et al. 2017, but of 1e-4;
- a loss that weighs a row by the deviation that the network says, so that it learns
  where that is large as well (Seitzer et al. 2022, beta = 0.5).
"""

import functools
import itertools
import sys
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

HIDDEN, WARMUP, FLOOR = 50, 0.05, 1e-4
BATCH, STEPS = 100, 30  # the paper's batch; smaller where an epoch has fewer steps
DECAYS, VARIANCE_DECAYS = (10, 1, 0.1), (300, 30, 3)  # to choose from, plainest first
FOLDS = 10  # of an estimator, to choose by and to calibrate with
INPUTS = dict(dtype=float, ensure_min_samples=2)
NLL = "negative_log_likelihood"


class Split(NamedTuple):
    train: np.ndarray  # rows to train on
    test: np.ndarray  # rows to score


class Data(NamedTuple):
    x: np.ndarray  # [N, F]
    y: np.ndarray  # [N]
    splits: list[Split]


class Model(NamedTuple):
    outputs: int  # of a network; SOFTMAX has as many as there are classes
    loss_fn: Callable  # (params, x, y, h) -> loss
    apply_fn: Callable  # (params, x, h) -> a tuple of what `report` takes
    report: Callable  # of members' outputs and targets
    recipes: tuple  # (decay, variance_decay) to choose from, plainest first


def init(key, num_features, num_outputs):  # which start at 0, whatever the row
    hidden = pe.dense_init(key, num_features, HIDDEN)
    return hidden, pe.Dense(jnp.zeros((HIDDEN, num_outputs)), jnp.zeros(num_outputs))


def network(params, x, h):  # [B, F] -> [B, outputs]
    hidden, last = params
    x = (x - h["x_mean"]) / h["x_scale"]
    return pe.dense(last, jax.nn.relu(pe.dense(hidden, x)))


def gaussian(params, x, h):  # means and variances [B], of normalized targets
    mean, spread = network(params, x, h).T
    return mean, jax.nn.softplus(spread) + FLOOR


def gaussian_loss(params, x, y, h):
    mean, variance = gaussian(params, x, h)
    nll = pe.gaussian_nll(mean, variance, (y - h["y_mean"]) / h["y_scale"])
    loss = jnp.average(nll, weights=jax.lax.stop_gradient(jnp.sqrt(variance)))
    hidden, last = (jnp.sum(layer.weight**2, axis=0) for layer in params)  # a unit each
    return loss + h["decay"] * (hidden.sum() + last[0]) + h["variance_decay"] * last[1]


def gaussian_apply(params, x, h):  # means and variances [B] in the units of the targets
    mean, variance = gaussian(params, x, h)
    return mean * h["y_scale"] + h["y_mean"], variance * h["y_scale"] ** 2


def softmax_loss(params, x, y, h):
    squares = sum(jnp.sum(layer.weight**2) for layer in params)
    loss = pe.softmax_cross_entropy(network(params, x, h), y).mean()
    return loss + h["decay"] * squares


def softmax_apply(params, x, h):  # probabilities [B, C]
    return (jax.nn.softmax(network(params, x, h)),)


def mean_and_scale(z):  # in float64; a column that does not vary has scale 1
    power = np.frexp(np.abs(z).max(axis=0))[1]
    unit = np.ldexp(np.float64(z), -power)  # squares of 1e160 would overflow
    scale = np.where(np.ptp(unit, axis=0) == 0, 1, np.ldexp(unit.std(axis=0), power))
    return np.ldexp(unit.mean(axis=0), power), scale


def standardize(name, z, mean, scale):  # in float64, to float32
    standard = (z - mean) / scale
    if not (near := np.abs(standard) < 1e18).all():  # nan is not near
        where = np.unravel_index(near.argmin(), z.shape)
        found = f"{name}{[*map(int, where)]} is {z[where]}"
        raise ValueError(f"{found}; expected 1e18 deviations from the mean, at most")
    return np.float32(standard)


BOTH = tuple(itertools.product(DECAYS, VARIANCE_DECAYS))
ONE = tuple(itertools.product(DECAYS, (0,)))
GAUSSIAN = Model(2, gaussian_loss, gaussian_apply, em.regression_report, BOTH)
SOFTMAX = Model(0, softmax_loss, softmax_apply, em.ensemble_report, ONE)


def member_hyper(x, y, train, decay, variance_decay) -> dict:
    """Return what one member differs in: its recipe, and its rows' normalization."""
    (x_mean, x_scale), (y_mean, y_scale) = map(mean_and_scale, (x[train], y[train]))
    h = {"x_mean": x_mean[None], "x_scale": x_scale[None]}  # [1, F]
    h |= {"y_mean": y_mean, "y_scale": y_scale}
    h |= {"decay": decay / len(train), "variance_decay": variance_decay / len(train)}
    return jax.tree.map(np.float32, h)


def member_orders(trains: list, epoch: int, seed: int) -> np.ndarray:
    """Draw an epoch's batches of every member, [K, steps, B]: its rows, in its order.

    Where members have different numbers of rows, as many steps as the fewest allow.
    """
    fewest = max(STEPS, min(map(len, trains)))  # fewer rows come several times
    batch = min(BATCH, fewest // STEPS)
    used = fewest - fewest % batch
    draws = [np.random.default_rng([seed, epoch, i]) for i in range(len(trains))]
    rows = [np.resize(draw.permutation(t), used) for draw, t in zip(draws, trains)]
    return np.reshape(rows, (len(trains), -1, batch))


@functools.lru_cache(maxsize=64)  # fits of one form share their programs
def make_trainer(model: Model, inputs: int, num_steps: int, members: int) -> pe.Trainer:
    """Make the trainer of all members.

    What a member differs in is its model state: other data have no other programs.
    """
    peak = num_steps**-0.5  # a walk of random steps comes as far
    return pe.make_trainer(
        lambda key: (init(key, inputs, model.outputs), ()),
        lambda params, h, key, x, y: (model.loss_fn(params, x, y, h), h),
        pe.adam(pe.cosine_schedule(peak, num_steps, warmup=WARMUP)),
        members=members,
        apply_fn=lambda params, h, x: model.apply_fn(params, x, h),
        output=None,
        stateful=True,
        devices=min(members, jax.local_device_count()),
        chunk=1024,
        at_once=25,
    )


def padded(x):  # [N, ...], with zeros to a power of two, so that few programs do
    size = max(256, 2 ** (len(x) - 1).bit_length())
    return np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])


def start(trainer, hyper: list, seed: int) -> pe.TrainState:
    """Return members that differ in `hyper`, a list, an entry a member."""
    state = trainer.gather(trainer.init(jax.random.key(seed)))
    hyper = jax.tree.map(lambda *leaves: np.stack(leaves), *hyper)
    return trainer.scatter(state._replace(model_state=hyper))


def predict(trainer, state, x):  # a list of leaves [K, N, ...]
    return [leaf[:, : len(x)] for leaf in trainer.predict_members(state, padded(x))]


def train(model: Model, data: Data, recipes, members: int, epochs: int, seed: int):
    """Train `members` networks of each of a split's recipes; predict all rows.

    `recipes` is a list for each split, of (decay, variance_decay), all of one length.
    Returns the networks, leaves [K, ...], and a list of what they say, leaves
    [splits, recipes, members, N, ...].
    """
    x, y, splits = data
    pairs = [(rows, each) for (rows, _), own in zip(splits, recipes) for each in own]
    pairs = [pair for pair in pairs for _ in range(members)]
    hyper = [member_hyper(x, y, rows, *recipe) for rows, recipe in pairs]
    trains = [rows for rows, _ in pairs]
    num_steps = epochs * member_orders(trains, 0, seed).shape[1]
    trainer = make_trainer(model, x.shape[1], num_steps, len(pairs))
    state, placed = start(trainer, hyper, seed), trainer.place((padded(x), padded(y)))
    for epoch in range(epochs):
        state, _ = trainer.epoch(state, placed, member_orders(trains, epoch, seed))
    shape, found = (len(splits), -1, members), predict(trainer, state, x)
    networks = trainer.gather(state)._replace(opt_state=(), key=None)
    return networks, [leaf.reshape(*shape, *leaf.shape[1:]) for leaf in found]


def mixture(means, variances) -> tuple:
    """Return an ensemble's mean and deviation: [members, N] -> [N]."""
    means, variances = np.float64(means), np.float64(variances)
    return means.mean(axis=0), np.sqrt(variances.mean(axis=0) + means.var(axis=0))


def fold(splits: list[Split], count: int, seed: int) -> list[list[Split]]:
    """Share out each split's training rows: `count` splits of them, or one a row.

    Each row is tested once.
    """
    draw, folds = np.random.default_rng(seed), []
    for rows, _ in splits:
        parts = np.array_split(draw.permutation(rows), min(count, len(rows)))
        folds.append([Split(np.setdiff1d(rows, part), part) for part in parts])
    return folds


def losses(model: Model, data: Data, found: list) -> np.ndarray:
    """Return the NLL of each split's ensembles on its test rows, [splits, recipes]."""

    def nll(test, *outputs):  # [members, N, ...]; what is not finite is never the best
        outputs = (np.nan_to_num(x[:, test], nan=1e18, posinf=1e18) for x in outputs)
        return model.report(*outputs, data.y[test])["ensemble"][NLL]

    each = zip(data.splits, *found)
    return np.array([[nll(test, *of) for of in zip(*own)] for (_, test), *own in each])


def plainest(losses):  # the first that is equal to the lowest to a hundredth of a nat
    return losses.round(2).argmin(axis=-1)


class Ensemble(BaseEstimator):
    """What the two estimators share."""

    def __init__(self, members=3, epochs=40, random_state=None):
        self.members = members
        self.epochs = epochs
        self.random_state = random_state

    def _fit(self, model, x, y):
        """Train; return the folds, and what their networks say, [folds, members, N]."""
        for name, value in dict(members=self.members, epochs=self.epochs).items():
            if not isinstance(value, Integral) or value is True or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer, 1 or more")
        self.x_mean_, self.x_scale_ = mean_and_scale(x)
        x = standardize("X", x, self.x_mean_, self.x_scale_)
        seed = check_random_state(self.random_state).randint(2**31)
        whole = Split(np.arange(len(x)), np.arange(0))
        (folds,) = fold([whole], FOLDS, seed)
        data = Data(x, y, [*folds, whole])
        recipes = [model.recipes] * len(data.splits)
        networks, found = train(model, data, recipes, self.members, self.epochs, seed)
        held = [leaf[:-1] for leaf in found]
        best = plainest(losses(model, data._replace(splits=folds), held).mean(axis=0))
        self.decays_ = model.recipes[best]
        # Those of all rows are the last, setting by setting.
        kept = np.arange(self.members) + self.members * (best - len(model.recipes))
        self._networks = jax.tree.map(lambda leaf: leaf[kept], networks)
        self._form = model, x.shape[1], 1, self.members
        return folds, [leaf[:, best] for leaf in held]

    def _outputs(self, X):  # of each network, leaves [members, N, ...]
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=float)
        x = standardize("X", x, self.x_mean_, self.x_scale_)
        trainer = make_trainer(*self._form)
        return predict(trainer, trainer.scatter(self._networks), x)


class EnsembleRegressor(RegressorMixin, Ensemble):
    """Predict a number, and an interval that holds it as often as is asked.

    members: how many networks.  epochs: how often they see a row.  After `fit`,
    `decays_` are those chosen, and `scores_` [N] are |y - mean| / deviation of each
    training row, by networks that did not see it.
    """

    def fit(self, X, y):
        """Fit to X [N, F] and y [N], of 2 rows or more."""
        values = np.asarray(y).ravel().tolist()
        if labels := [v for v in values if isinstance(v, bool | str)]:
            raise ValueError(f"y has {labels[0]!r}; use numbers, or EnsembleClassifier")
        X, y = validate_data(self, X, y, y_numeric=True, **INPUTS)
        self.y_mean_, self.y_scale_ = mean_and_scale(y)
        y = standardize("y", y, self.y_mean_, self.y_scale_)
        folds, found = self._fit(GAUSSIAN, X, y)
        self.scores_ = np.empty(len(y))
        for (_, test), *own in zip(folds, *found):
            mean, deviation = mixture(*(leaf[:, test] for leaf in own))
            self.scores_[test] = np.abs(y[test] - mean) / deviation
        return self

    def predict_deviation(self, X):
        """Return the mean and the standard deviation of each row of X [N, F]: [N]."""
        mean, deviation = mixture(*self._outputs(X))
        return mean * self.y_scale_ + self.y_mean_, deviation * self.y_scale_

    def predict(self, X):
        """Return the mean of each row of X [N, F]: [N]."""
        return self.predict_deviation(X)[0]

    def predict_interval(self, X, coverage=0.9):
        """Return the ends, [N, 2], of intervals that hold so much of the targets.

        Mean +- q deviation, q by `conformal_quantile` of `scores_`: infinite where
        these are too few, below coverage / (1 - coverage).
        """
        mean, deviation = self.predict_deviation(X)
        width = em.conformal_quantile(self.scores_, coverage) * deviation
        return np.stack([mean - width, mean + width], axis=1)


class EnsembleClassifier(ClassifierMixin, Ensemble):
    """Predict a class, and the probability of each; see `EnsembleRegressor`."""

    def fit(self, X, y):
        """Fit to X [N, F] and y [N], labels of any type, of 2 rows or more."""
        X, y = validate_data(self, X, y, **INPUTS)
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        self._fit(SOFTMAX._replace(outputs=len(self.classes_)), X, np.int32(y))
        return self

    def predict_proba(self, X):
        """Return the probability of each of `classes_`, [N, C], for X [N, F]."""
        probs = self._outputs(X)[0].mean(axis=0, dtype=float)
        return probs / probs.sum(axis=1, keepdims=True)  # 1 in float32 alone

    def predict(self, X):
        """Return the most probable class of each row of X [N, F]: [N]."""
        most = self.predict_proba(X).argmax(axis=1)
        return self.classes_[most]
