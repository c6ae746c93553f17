"""Ensembles of small networks for tables of numbers, as scikit-learn's estimators.

    from ensemble_tables import EnsembleRegressor  # or EnsembleClassifier

    model = EnsembleRegressor(random_state=0).fit(x, y)  # x [N, F], y [N]
    mean = model.predict(new)  # [n]
    low, high = model.predict_interval(new, coverage=0.9).T  # [n] each

A network has two hidden layers of 32 units; it predicts a mean and a variance, or the
probabilities of classes.  All networks of a fit are the members of one trainer.  Each
recipe has `members` networks that learn all rows, and as many for each of five folds,
which learn the other four.  Rows that are equal, or share a group, are in one fold, so
that no network learned a row left out.

For numbers, the fit takes the recipe whose networks give the left-out folds the lowest
interval score, and keeps its networks of all rows: they are the ensemble.  For classes
it keeps all recipes, one of which is nearly linear.  The left-out folds give each
recipe's ensemble a temperature (Guo et al. 2017) and a share of random labels, the
results weights in a mean (stacking: Wolpert 1992), and the mean another temperature,
each by the NLL.

The errors on the left-out folds, one per row, calibrate the deviation: the density of
a target is Student's t about the ensemble's mean, whose degrees of freedom and factor
of the ensemble's deviation give these errors the lowest NLL.  They also calibrate the
intervals (K-fold CV in Barber et al. 2021, MAPIE's method "base").  The intervals reach
their coverage if networks that learn four fifths of the rows err as networks that learn
all of them; nothing stronger is guaranteed.

Call `pjax_ensemble.use_cpu_devices()` before JAX is first used: a fit then uses all
cores.  docs/tables.md has the rest.

A recipe is a decay of the weights, which is a normal prior (MacKay 1992), a second
decay, and a switch of the waves.  The second decay is of the variance's weights
(Sluijterman et al. 2023); for classes it is of a linear model, whose outputs are added
to a network's.  With a strong decay of the network's weights, little but the linear
model is left.  The waves are further inputs: sines and cosines of each input, at up to
eight frequencies (Tancik et al. 2020).  With waves a network learns functions with
steps, as trees do, and without waves it learns smooth ones.

The networks train by Adam with a cosine schedule, and their last layer starts at 0.
Targets are scaled to variance 1.  Three measures keep the variance from running away:

- the decay of its own;
- a floor of the variance, as in Lakshminarayanan et al. 2017, but of 1e-4;
- a loss that weighs each row by its predicted deviation, so that the network also
  learns where the deviation is large (Seitzer et al. 2022, beta = 0.5).
"""

import functools
import math
from collections.abc import Callable
from datetime import date, timedelta
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

import ensemble_metrics as em
import pjax_ensemble as pe

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    remedy = "python -m pip install -U scikit-learn (1.6 or newer)"
    raise ImportError(f"{error}: {remedy}") from error

HIDDEN = 32
WARMUP = 0.05
FLOOR = 1e-4
WAVES = 8  # frequencies of an input
MOST = 64  # frequencies of all inputs together
BATCH = 100  # rows, at most
STEPS = 30  # of an epoch, at least; where it would have fewer, batches are smaller
RECIPES = (10, 10, 0), (1, 100, 0), (1, 100, 1)  # to choose from, plainest first
CLASS_RECIPES = (30, 2, 0), (1, 1, 0), (0.3, 1, 1)  # to weigh, the first is linear
FOLDS = 5  # of an estimator, to choose by and to calibrate with
DOFS = 3, 4, 6, 10, 30, 100  # degrees of freedom of a density, to choose from
FACTORS = np.geomspace(0.1, 10, 61)  # of a deviation
TEMPERATURES = np.geomspace(0.3, 4, 80)  # of a recipe's probabilities, and of the mean
NOISES = 0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2  # shares of labels that are random
INPUTS = dict(dtype=float, ensure_min_samples=2)
TIMES = date, timedelta, np.datetime64, np.timedelta64
NOT_NUMBERS = bool, np.bool_, str, *TIMES


class Split(NamedTuple):
    train: np.ndarray  # rows to train on
    test: np.ndarray  # rows to score


class Data(NamedTuple):
    x: np.ndarray  # [N, F]
    y: np.ndarray  # [N]
    splits: list[Split]


class Networks(NamedTuple):
    """Trained networks, leaves [K, ...]."""

    params: Any
    hyper: dict


class Model(NamedTuple):
    outputs: int  # of a network; for SOFTMAX, the number of classes
    init: Callable  # (key, inputs, outputs) -> params
    loss_fn: Callable  # (params, x, y, weight, h) -> loss
    apply_fn: Callable  # (params, x, h) -> the outputs, a tuple


def frequencies(num_features):  # 1, 2, ...: radians per deviation of an input
    return np.arange(1, 1 + min(WAVES, max(1, MOST // num_features)), dtype=np.float32)


def init(key, num_features, num_outputs):  # the outputs start at 0 for every row
    plain, waves, second = jax.random.split(key, 3)
    num_waves = 2 * num_features * len(frequencies(num_features))
    of_inputs = pe.dense_init(plain, num_features, HIDDEN)
    of_waves = pe.dense_init(waves, num_waves, HIDDEN)
    weight = jnp.concatenate([of_inputs.weight, of_waves.weight])
    first = pe.Dense(weight, of_inputs.bias)
    last = pe.Dense(jnp.zeros((HIDDEN, num_outputs)), jnp.zeros(num_outputs))
    return first, pe.dense_init(second, HIDDEN, HIDDEN), last


def network(params, x, h):  # [B, F] -> [B, outputs]
    x = (x - h["x_mean"]) / h["x_scale"]
    phases = jnp.tensordot(x, frequencies(x.shape[1]), axes=0).reshape(len(x), -1)
    waves = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=1)
    x = jnp.concatenate([x, h["waves"] * waves], axis=1)
    for layer in params[:-1]:
        x = jax.nn.silu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


def squares(params):  # the sum of the squared weights, of each output of the last layer
    of_units = [jnp.sum(layer.weight**2, axis=0) for layer in params]
    hidden = sum(units.sum() for units in of_units[:-1])
    return hidden, of_units[-1]


def gaussian(params, x, h):  # means and variances [B], of normalized targets
    mean, spread = network(params, x, h).T
    return mean, jax.nn.softplus(spread) + FLOOR


def gaussian_loss(params, x, y, weight, h):  # weight [B]: 1, or 0 for padding
    mean, variance = gaussian(params, x, h)
    nll = pe.gaussian_nll(mean, variance, (y - h["y_mean"]) / h["y_scale"])
    weight = weight * jax.lax.stop_gradient(jnp.sqrt(variance))
    loss = (weight * nll).sum() / weight.sum()
    hidden, last = squares(params)
    return loss + h["decay"] * (hidden + last[0]) + h["second_decay"] * last[1]


def gaussian_apply(params, x, h):  # means and variances [B] in the units of the targets
    mean, variance = gaussian(params, x, h)
    return mean * h["y_scale"] + h["y_mean"], variance * h["y_scale"] ** 2


def init_classes(key, num_features, num_outputs):
    skip = pe.Dense(jnp.zeros((num_features, num_outputs)), jnp.zeros(num_outputs))
    return init(key, num_features, num_outputs), skip


def logits(params, x, h):  # of classes, [B, C]: a network's and a linear model's
    layers, skip = params
    return network(layers, x, h) + pe.dense(skip, (x - h["x_mean"]) / h["x_scale"])


def softmax_loss(params, x, y, weight, h):
    nll = pe.softmax_cross_entropy(logits(params, x, h), y)
    loss = (weight * nll).sum() / weight.sum()
    layers, skip = params
    hidden, last = squares(layers)
    _, linear = squares([skip])
    return loss + h["decay"] * (hidden + last.sum()) + h["second_decay"] * linear.sum()


def softmax_apply(params, x, h):  # probabilities [B, C]
    return (jax.nn.softmax(logits(params, x, h)),)


def mean_and_scale(z):  # in float64; a column that does not vary has scale 1
    power = np.frexp(np.abs(z).max(axis=0))[1]
    unit = np.ldexp(np.float64(z), -power)  # squares of 1e160 would overflow
    scale = np.where(np.ptp(unit, axis=0) == 0, 1, np.ldexp(unit.std(axis=0), power))
    # Rounded, the mean of a column that does not vary may differ from its value.
    mean = unit.mean(axis=0).clip(unit.min(axis=0), unit.max(axis=0))
    return np.ldexp(mean, power), scale


def standardize(name, z, mean, scale):  # in float64, to float32
    standard = (z - mean) / scale
    near = np.abs(standard) < 1e18  # nan is not near
    if not near.all():
        where = np.unravel_index(near.argmin(), z.shape)
        raise ValueError(
            f"{name}{list(map(int, where))} is {z[where]}; expected 1e18 deviations "
            "from the mean, at most"
        )
    return np.float32(standard)


def mixture(means, variances) -> tuple:
    """Return an ensemble's mean and deviation: [members, N] -> [N]."""
    mean, variance = em.mixture(means, variances)
    return mean, np.sqrt(variance)


def student_nll(errors, deviation, dof):
    """Return -log density of errors, by Student's t that has this deviation."""
    scale = deviation * math.sqrt(1 - 2 / dof)
    constant = math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2)
    constant += math.log(dof * math.pi) / 2
    tail = (dof + 1) / 2 * np.log1p((errors / scale) ** 2 / dof)
    return constant + np.log(scale) + tail


def calibrate(errors, deviation) -> tuple:
    """Return the lowest mean NLL of errors [N], its degrees of freedom and factor."""
    return min(
        (student_nll(errors, factor * deviation, dof).mean(), dof, factor)
        for dof in DOFS
        for factor in FACTORS
    )


def interval_score(means, variances, y):
    """Return the mean interval score (Gneiting and Raftery 2007, eq. 43), its log.

    A score is the width of an interval, plus 2 / (1 - coverage) times the distance of a
    target that lies beyond.  The logs for coverages of 50 and 90% are averaged.  1e-12
    is added, as targets that do not vary have intervals of width 0.
    """
    mean, deviation = mixture(means, variances)
    errors = np.abs(y - mean)
    logs = []
    for coverage in (0.5, 0.9):
        ends = em.conformal_quantile(errors / deviation, coverage) * deviation
        beyond = np.maximum(errors - ends, 0)
        score = (2 * ends + 2 / (1 - coverage) * beyond).mean()
        logs.append(np.log(score + 1e-12))
    return np.mean(logs)


def ensembles(probs):
    """Return the probabilities of recipes' ensembles: [R, members, N, C] -> [R, N, C].

    Where networks are not finite, classes are equally probable.
    """
    means = probs.mean(axis=1, dtype=float)
    means = np.nan_to_num(means, nan=1 / means.shape[-1])
    return means / means.sum(axis=-1, keepdims=True)  # 1 in float32 alone


def soften(probs, temperature, noise):
    """Temper probabilities [..., C], as if a share `noise` of labels were random."""
    return (1 - noise) * em.temper(probs, temperature) + noise / probs.shape[-1]


def soften_by(probs, y, noises=NOISES):
    """Return the temperature and the noise that give probs [N, C] the lowest NLL."""
    pairs = []
    for temperature in TEMPERATURES:
        of_labels = em.temper(probs, temperature)[np.arange(len(y)), y]
        for noise in noises:
            softened = (1 - noise) * of_labels + noise / probs.shape[1]
            pairs.append((-np.log(softened + 1e-30).mean(), temperature, noise))
    return min(pairs)[1:]


def weigh(probs, y):
    """Return the weights [R] of probabilities [R, N, C] whose mean has a low NLL on y.

    EM finds them.  Each recipe counts one row more than it explains, so none has 0.
    """
    of_labels = probs[:, np.arange(len(y)), y] + 1e-30
    weights = np.full(len(probs), 1 / len(probs))
    for _ in range(100):
        shares = weights[:, None] * of_labels
        shares /= shares.sum(axis=0)
        weights = (shares.sum(axis=1) + 1) / (len(y) + len(probs))
    return weights


GAUSSIAN = Model(2, init, gaussian_loss, gaussian_apply)
SOFTMAX = Model(0, init_classes, softmax_loss, softmax_apply)


def member_hyper(x, y, train, decay, second_decay, waves, num_steps=1) -> dict:
    """Return one member's own settings: its recipe, its rows' normalization."""
    x_mean, x_scale = mean_and_scale(x[train])
    y_mean, y_scale = mean_and_scale(y[train])
    if y_scale < 1e-18:  # its square, and so a variance, would be 0 in float32
        raise ValueError(
            f"y[{np.abs(y).argmax()}] is 1e18 deviations of the others from them; "
            "leave it out, or fit the targets' logarithms"
        )
    h = {
        "x_mean": x_mean[None],  # [1, F]
        "x_scale": x_scale[None],
        "y_mean": y_mean,
        "y_scale": y_scale,
        "decay": decay / len(train),
        "second_decay": second_decay / len(train),
        "waves": waves,
        "num_steps": num_steps,  # of the schedule
    }
    return jax.tree.map(np.float32, h)


def member_orders(trains: list, epoch: int, seed: int) -> np.ndarray:
    """Draw an epoch's batches, [K, steps, B]: each member's own rows, in its own order.

    All members take as many steps as the member with the fewest rows.
    """
    fewest = max(STEPS, min(map(len, trains)))  # fewer rows come several times
    batch = min(BATCH, fewest // STEPS)
    used = fewest - fewest % batch
    draws = [np.random.default_rng([seed, epoch, i]) for i in range(len(trains))]
    rows = [np.resize(draw.permutation(t), used) for draw, t in zip(draws, trains)]
    return np.reshape(rows, (len(trains), -1, batch))


def adam(h) -> pe.Optimizer:
    """Make Adam with a cosine schedule over a member's number of steps."""
    # A walk of random steps comes half as far.
    peak = 0.5 * h["num_steps"] ** -0.5
    return pe.adam(pe.cosine_schedule(peak, h["num_steps"], warmup=WARMUP))


@functools.lru_cache(maxsize=64)  # fits of one form share its programs
def any_trainer(model: Model, inputs: int, members: int) -> pe.Trainer:
    """Make a trainer whose members have the form of `hyper`, and no values of use."""
    x, y = np.zeros((1, inputs)), np.zeros(1)
    hyper = [member_hyper(x, y, [0], 0, 0, 0, 1)] * members
    return pe.make_trainer(
        lambda key, h: model.init(key, inputs, model.outputs),
        model.loss_fn,
        adam,
        members=members,
        apply_fn=model.apply_fn,
        output=None,
        hyper=stacked(hyper),
        devices=min(members, jax.local_device_count()),
        chunk=1024,
        at_once=members,
    )


def make_trainer(model: Model, inputs: int, hyper: dict) -> pe.Trainer:
    """Make the trainer of all members, of their hyper [K, ...]."""
    return any_trainer(model, inputs, len(hyper["decay"])).with_hyper(hyper)


def stacked(hyper: list) -> dict:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *hyper)


def padded(x):  # add at least one row of zeros, up to a power of two: few shapes
    size = max(256, 2 ** len(x).bit_length())
    widths = np.zeros((x.ndim, 2), int)  # before and after, along each axis
    widths[0, 1] = size - len(x)
    return np.pad(x, widths)


def padded_orders(orders, row):  # fill batches with `row`, up to a power of two
    batch = orders.shape[-1]
    size = max(batch, min(BATCH, 2 ** (batch - 1).bit_length()))
    return np.pad(orders, [(0, 0), (0, 0), (0, size - batch)], constant_values=row)


def predict(trainer, state, x):  # the outputs, a list of leaves [K, N, ...]
    return [leaf[:, : len(x)] for leaf in trainer.predict_members(state, padded(x))]


def train(model: Model, data: Data, recipes, members: int, epochs: int, seed: int):
    """Train `members` networks for each recipe of each split; predict all rows.

    `recipes` has a list per split, of decays, variance decays and waves.
    Returns the networks, leaves [K, ...], and a list of their outputs, leaves
    [splits, recipes, members, N, ...].
    """
    x, y, splits = data
    pairs = [
        (split.train, recipe) for split, own in zip(splits, recipes) for recipe in own
    ]
    trains = [rows for rows, _ in pairs for _ in range(members)]
    num_steps = epochs * member_orders(trains, 0, seed).shape[1]
    hyper = []
    for rows, recipe in pairs:
        hyper += [member_hyper(x, y, rows, *recipe, num_steps)] * members
    trainer = make_trainer(model, x.shape[1], stacked(hyper))
    state = trainer.init(jax.random.key(seed))
    weight = np.ones(len(x), np.float32)
    placed = trainer.place(tuple(map(padded, (x, y, weight))))
    for epoch in range(epochs):
        orders = padded_orders(member_orders(trains, epoch, seed), len(x))
        state, _ = trainer.epoch(state, placed, orders)
    outputs = predict(trainer, state, x)
    networks = Networks(trainer.gather(state).params, trainer.hyper)
    shape = (len(splits), -1, members)
    return networks, [leaf.reshape(shape + leaf.shape[1:]) for leaf in outputs]


def link(x, groups=None) -> np.ndarray:
    """Return a number per row of x [N, F], which rows that belong together share.

    These are rows that are equal or share a group, and rows linked by others to both.
    """
    links = np.unique(x, axis=0, return_inverse=True)[1].ravel()
    if groups is not None:
        groups = check_array(groups, dtype=None, ensure_2d=False, input_name="groups")
        if groups.shape != (len(x),):
            raise ValueError(
                f"groups has shape {groups.shape}; expected ({len(x)},), one group per "
                "row of X"
            )
        number = {group: i for i, group in enumerate(groups.tolist(), len(x))}
        ends = links, [number[group] for group in groups.tolist()]
        size = 2 * len(x)  # rows, and at most as many groups
        graph = coo_array((np.ones(len(x)), ends), shape=(size, size))
        links = connected_components(graph, directed=False)[1][links]
    if (links == links[0]).all():
        raise ValueError(
            "all rows of X belong to one group, as equal rows do; expected 2 groups or "
            "more"
        )
    return links


def fold(links: np.ndarray, count: int, seed: int) -> list[Split]:
    """Divide rows into `count` folds, or fewer: linked rows, links [N], into one fold.

    Each fold is a split that tests these rows and trains on the others.
    """
    _, first, links = np.unique(links, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(links))
    place = np.argsort(order)[first[links]]  # linked rows go to the first one's place
    order = np.argsort(place, kind="stable")
    _, starts, sizes = np.unique(place[order], return_index=True, return_counts=True)
    parts = np.array_split(order, min(count, len(order)))
    ends = np.cumsum([len(part) for part in parts])
    middles = np.repeat(starts + (sizes - 1) // 2, sizes)  # fall into the rows' fold
    numbers = np.searchsorted(ends, middles, side="right")
    parts = [order[numbers == i] for i in np.unique(numbers)]
    return [Split(np.setdiff1d(order, part), part) for part in parts]


def left_out(folds: list[Split], leaf: np.ndarray) -> np.ndarray:
    """Return each row's outputs by the networks of the fold that leaves it out.

    [folds, recipes, members, N, ...] -> [recipes, members, N, ...]
    """
    held = np.empty_like(leaf[0])
    for (_, test), own in zip(folds, leaf):
        held[:, :, test] = own[:, :, test]
    return held


def losses(y: np.ndarray, held: list) -> np.ndarray:
    """Return the score of each recipe's ensemble, [recipes]; 1e18 is never the best."""
    means, variances = (np.nan_to_num(leaf, nan=1e18, posinf=1e18) for leaf in held)
    return np.array([interval_score(m, v, y) for m, v in zip(means, variances)])


def plainest(losses):  # the first that equals the lowest to a hundredth
    return int(losses.round(2).argmin())


def check_each(y, refused: tuple, advice: str) -> None:
    """Raise ValueError for a target that is missing, or of a type that is refused."""
    values = np.asarray(y, object)  # as they are, where labels are among numbers
    if getattr(getattr(y, "dtype", None), "kind", None) in ("m", "M"):
        values = np.asarray(y)  # times, which could be plain ints as objects
    for row, v in enumerate(values.ravel() if values.ndim else []):
        if v is None or isinstance(v, refused) or v != v:
            shown = v.item() if isinstance(v, (np.number, np.bool_)) else v
            raise ValueError(f"y[{row}] is {shown!r}; {advice}")


def check_no_times(X) -> None:
    """Raise ValueError for dates and durations, which float would count in ns."""
    try:
        values = np.asarray(X)
    except (TypeError, ValueError):  # scikit-learn says why
        return
    times = np.full(values.shape, values.dtype.kind in "mM")
    if values.dtype == object:
        times.flat = [isinstance(v, TIMES) for v in values.flat]
    if times.any():
        place = tuple(np.argwhere(times)[0].tolist())
        raise ValueError(
            f"X{list(place)} is {values[place]!r}; pass a date or a duration as "
            "numbers, such as the days since a first day, and the month"
        )


def whole(fit):
    """Make a fit that fails or is interrupted leave its estimator as it was."""

    @functools.wraps(fit)
    def fit_or_restore(self, X, y, *, groups=None):
        before = vars(self).copy()
        try:
            return fit(self, X, y, groups=groups)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return fit_or_restore


class Ensemble(BaseEstimator):
    """The part that the two estimators share."""

    def __init__(self, members=3, epochs=100, random_state=None):
        self.members = members
        self.epochs = epochs
        self.random_state = random_state

    def _fit(self, model, recipes, x, y, groups):
        """Train; return each row's outputs, [recipes, members, N, ...], left out."""
        for name, value in dict(members=self.members, epochs=self.epochs).items():
            if not isinstance(value, Integral) or value is True or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer, 1 or more")
        self.x_mean_, self.x_scale_ = mean_and_scale(x)
        x = standardize("X", x, self.x_mean_, self.x_scale_)
        seed = check_random_state(self.random_state).randint(2**31)
        folds = fold(link(x, groups), FOLDS, seed)
        data = Data(x, y, [*folds, Split(np.arange(len(x)), np.arange(0))])
        every = [recipes] * len(data.splits)
        networks, outputs = train(model, data, every, self.members, self.epochs, seed)
        self._form = model, x.shape[1]
        last = len(recipes) * self.members  # are of all rows, recipe by recipe
        self._networks = jax.tree.map(lambda leaf: leaf[-last:], networks)
        return [left_out(folds, leaf) for leaf in outputs]

    def _outputs(self, X):  # of each network, leaves [members, N, ...]
        check_is_fitted(self)
        check_no_times(X)
        x = validate_data(self, X, reset=False, dtype=float)
        x = standardize("X", x, self.x_mean_, self.x_scale_)
        params, hyper = self._networks
        keys = jax.random.split(jax.random.key(0), len(hyper["decay"]))
        model, num_features = self._form
        trainer = make_trainer(model, num_features, hyper)
        # Predicting needs no optimizer, and draws nothing by the keys.
        state = trainer.scatter(pe.TrainState(params, (), (), keys))
        return predict(trainer, state, x)


class EnsembleRegressor(RegressorMixin, Ensemble):
    """Predict a number, and an interval that holds it as often as is asked.

    members: the number of networks.  epochs: how often a network sees a row.  After
    `fit`, `recipe_` has the chosen decays and whether there are waves, `dof_` is the
    density's degrees of freedom, and `scores_` [N] has |y - mean| / deviation of each
    training row, by the networks that did not see it.
    """

    @whole
    def fit(self, X, y, *, groups=None):
        """Fit to X [N, F] and y [N], of 2 rows or more.

        Rows that share one of groups [N], such as a patient's, stay in one fold.
        """
        check_no_times(X)
        check_each(y, NOT_NUMBERS, "use numbers, or EnsembleClassifier")
        X, y = validate_data(self, X, y, y_numeric=True, **INPUTS)
        self.y_mean_, self.y_scale_ = mean_and_scale(y)
        y = standardize("y", y, self.y_mean_, self.y_scale_)
        held = self._fit(GAUSSIAN, RECIPES, X, y, groups)
        best = plainest(losses(y, held))
        self.recipe_ = RECIPES[best]
        kept = self.members * best + np.arange(self.members)
        self._networks = jax.tree.map(lambda leaf: leaf[kept], self._networks)
        means, variances = held
        mean, deviation = mixture(means[best], variances[best])
        _, self.dof_, self.factor_ = calibrate(y - mean, deviation)
        self.scores_ = np.abs(y - mean) / (self.factor_ * deviation)
        return self

    def predict_deviation(self, X):
        """Return the mean and the standard deviation of each row of X [N, F]: [N].

        With few degrees of freedom (`dof_`), such as 3, a deviation says little: rare
        large errors dominate it, and a Gaussian with it is a poor density.  Use
        `log_density` and `predict_interval`.
        """
        means, variances = self._outputs(X)
        mean, deviation = mixture(means, variances)
        scale = self.factor_ * self.y_scale_
        return mean * self.y_scale_ + self.y_mean_, deviation * scale

    def log_density(self, X, y):
        """Return the log density, [N], that each row of X [N, F] gives its y [N].

        It is Student's t with `predict_deviation`'s mean and deviation and `dof_`
        degrees of freedom.
        """
        mean, deviation = self.predict_deviation(X)
        if np.size(y) != len(mean):
            raise ValueError(
                f"y has shape {np.shape(y)}; expected {mean.shape}, one number per row "
                "of X"
            )
        errors = np.reshape(y, mean.shape) - mean
        return -student_nll(errors, deviation, self.dof_)

    def predict(self, X):
        """Return the mean of each row of X [N, F]: [N]."""
        return self.predict_deviation(X)[0]

    def predict_interval(self, X, coverage=0.9):
        """Return the ends, [N, 2], of intervals that hold that fraction of targets.

        They are mean +- q deviation, with q by `conformal_quantile` of `scores_`.  q is
        infinite for fewer than coverage / (1 - coverage) training rows.
        """
        mean, deviation = self.predict_deviation(X)
        width = em.conformal_quantile(self.scores_, coverage) * deviation
        return np.stack([mean - width, mean + width], axis=1)


class EnsembleClassifier(ClassifierMixin, Ensemble):
    """Predict a class, and the probability of each; see `EnsembleRegressor`.

    After `fit`, `weights_`, `temperatures_` and `noises_` have a number per recipe, and
    `temperature_` is that of their weighted mean.
    """

    @whole
    def fit(self, X, y, *, groups=None):
        """Fit to X [N, F], y [N], labels of any type, and groups [N], as above."""
        check_no_times(X)
        check_each(y, (), "give each row a label, or leave the row out")
        X, y = validate_data(self, X, y, **INPUTS)
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        model = SOFTMAX._replace(outputs=len(self.classes_))
        (probs,) = self._fit(model, CLASS_RECIPES, X, np.int32(y), groups)
        probs = ensembles(probs)
        softening = [soften_by(each, y) for each in probs]
        self.temperatures_, self.noises_ = zip(*softening)
        self.weights_ = weigh(self._softened(probs), y)
        self.temperature_, _ = soften_by(self._pooled(probs), y, noises=(0,))
        return self

    def _softened(self, probs):  # [R, N, C]
        return np.stack(list(map(soften, probs, self.temperatures_, self.noises_)))

    def _pooled(self, probs):  # [R, N, C] -> [N, C]
        return np.tensordot(self.weights_, self._softened(probs), 1)

    def predict_proba(self, X):
        """Return the probability of each of `classes_`, [N, C], for X [N, F]."""
        (probs,) = self._outputs(X)
        probs = probs.reshape(len(self.weights_), -1, *probs.shape[1:])
        return em.temper(self._pooled(ensembles(probs)), self.temperature_)

    def predict(self, X):
        """Return the most probable class of each row of X [N, F]: [N]."""
        most = self.predict_proba(X).argmax(axis=1)
        return self.classes_[most]
