"""Tests of ensemble_tables.py."""

import builtins
import dataclasses
import datetime
import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import ensemble_metrics as em
import ensemble_tables as et
import pjax_ensemble as pe
from conftest import HERE, assert_close, cases, member, randn, said_by, start_python


def solve(trainer, state, data, order):
    """Replace an estimator's `Trainer.epoch`: solve for the last layers, in no time."""
    x, y, weight = map(np.asarray, data)
    state = trainer.gather(state)
    numbers = y.dtype == np.float32  # whose variance is a constant
    params = state.params if numbers else state.params[0]
    h = trainer.hyper
    last = params[-1]
    identity = pe.Dense(np.eye(et.HIDDEN), np.zeros(et.HIDDEN))
    for i, rows in enumerate(order.reshape(len(order), -1)):
        rows = rows[weight[rows] == 1]
        hidden, own = jax.tree.map(lambda leaf, i=i: leaf[i], (params[:-1], h))
        units = np.asarray(et.network((*hidden, identity), x[rows], own))
        normal = (y[rows] - own["y_mean"]) / own["y_scale"]
        one_hot = 10 * (y[rows, None] == np.arange(last.bias.shape[1])) - 5
        targets = np.c_[normal, 0 * normal - 2] if numbers else one_hot
        squares = units.T @ units + own["decay"] * len(rows) * np.eye(len(units.T))
        last.weight[i] = np.linalg.solve(squares, units.T @ targets)
    return trainer.scatter(state), None


def moved(params, size=1):
    """Add noise to parameters, so that none is 0."""
    return jax.tree.map(lambda p: np.asarray(p) + size * randn(9, *p.shape), params)


@mock.patch.object(et, "FOLDS", 3)  # smaller programs
@mock.patch.object(pe.Trainer, "epoch", solve)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@cases("name", "EnsembleRegressor", "EnsembleClassifier")
def test_estimators_are_as_scikit_learn_checks(name):
    check_estimator(getattr(et, name)(members=1, epochs=1))


def test_estimator_keeps_networks_of_all_rows_and_scores_rows_left_out():
    x = randn(0, 25, 2)
    y = randn(1, 25)
    splits = []

    def train(model, data, recipes, members, *sizes):  # off by 0.1 where seen, else by
        splits.extend(data.splits)  # twice the decay and a bit
        off = np.full((len(splits), 3, members, 25), 0.1)
        for i, split in enumerate(splits):
            for j, (decay, _, waves) in enumerate(recipes[i]):
                off[i, j, :, split.test] = decay / 20 + 0.05 * waves
        networks = {"number": np.arange(off[..., 0].size)}
        return networks, [data.y + off, np.ones(off.shape)]

    with mock.patch.object(et, "train", train):
        model = et.EnsembleRegressor(members=2, random_state=0).fit(x, y)
    assert len(splits) == 6 and len(splits[5].train) == 25
    rows = list(range(25))
    assert sorted(np.concatenate([fold.test for fold in splits[:5]])) == rows
    assert all(sorted(np.concatenate(split)) == rows for split in splits)
    assert model.recipe_ == (1, 100, 0) == et.RECIPES[1]
    assert_close(model.scores_, np.full(25, 0.05) / model.factor_)
    assert model.factor_ == et.FACTORS[0]
    assert_array_equal(model._networks["number"], [2 * (3 * 5 + 1) + i for i in (0, 1)])


def test_folds_keep_together_rows_that_are_equal_or_share_a_group():
    order = np.random.default_rng(0).permutation(23)
    folds = et.fold(np.arange(23), 5, 0)
    for (train, test), part in zip(folds, np.array_split(order, 5), strict=True):
        assert_array_equal(test, part)
        assert_array_equal(train, np.setdiff1d(order, part))
    x = np.arange(10) % 8
    groups = [*"abcdefgh", None, "c"]  # 9 equals 1, and is of 2's group
    links = et.link(x[:, None], np.array(groups, object))
    assert links[0] == links[8] and links[1] == links[9] == links[2]
    assert len(set(links)) == 7
    links = np.repeat(np.arange(10), [90, 80, *[5] * 8])
    tests = [test for _, test in et.fold(links, 5, 0)]
    assert_array_equal(np.sort(np.concatenate(tests)), np.arange(210))
    assert sum(len(set(links[test])) for test in tests) == 10
    assert max(map(len, tests)) < 210 / 5 + 90  # not both of the largest


@mock.patch.object(et, "FOLDS", 3)
@mock.patch.object(pe.Trainer, "epoch", solve)
@cases("routing", False, True)
def test_groups_reach_every_fit_by_the_ways_of_the_page(routing):
    patients = np.arange(24) // 3
    pipe = make_pipeline(StandardScaler(), et.EnsembleRegressor(**SHORT))
    own = {"groups": patients}
    named = own if routing else {"ensembleregressor__groups": patients}
    of_splits = {} if routing else own
    search = GridSearchCV(pipe, {"ensembleregressor__epochs": [1]}, cv=GroupKFold(2))
    watched = mock.patch.object(et, "link", wraps=et.link)
    with sklearn.config_context(enable_metadata_routing=routing), watched as link:
        if routing:
            pipe[-1].set_fit_request(groups=True)
        pipe.fit(X, Y, **named)
        search.fit(X, Y, **of_splits | named)
        cross_validate(pipe, X, Y, params=named, cv=search.cv, **of_splits)
        cross_validate(pipe[-1], X, Y, params=own, cv=search.cv, **of_splits)
    counts = [len(set(call.args[1])) for call in link.call_args_list]
    assert counts == [8, 4, 4, 8, 4, 4, 4, 4]


@mock.patch.object(pe.Trainer, "epoch", solve)
@cases("repeat", lambda rows: np.repeat(rows, 4), lambda rows: np.r_[rows, rows[::2]])
def test_intervals_hold_beside_repeated_rows(repeat):
    x = randn(0, 4000, 4)
    y = x[:, 0] + randn(1, 4000)
    rows = repeat(np.arange(50))
    model = et.EnsembleRegressor(**SHORT).fit(x[rows], y[rows])
    low, high = model.predict_interval(x[50:]).T
    assert ((low < y[50:]) & (y[50:] < high)).mean() > 0.82


@mock.patch.object(et, "FOLDS", 3)
@cases("name", "EnsembleRegressor", "EnsembleClassifier")
def test_fit_that_fails_leaves_the_model_as_it_was(name):
    x = randn(0, 12, 2)
    model = getattr(et, name)(**SHORT)
    with mock.patch.object(pe.Trainer, "epoch", solve):
        model.fit(x, x[:, 0] > 0 if "Class" in name else x[:, 0])
    before = vars(model).copy()
    expected = model.predict(x)
    for error in KeyboardInterrupt, ValueError:
        stop = mock.patch.object(pe.Trainer, "epoch", side_effect=error)
        with stop, pytest.raises(error):
            model.fit(9 * x[:10], ["dog", "cat"] * 5 if "Class" in name else range(10))
        assert vars(model) == before
        assert_array_equal(model.predict(x), expected)


def test_names_a_target_too_far_from_the_others():
    y = 1e-25 * randn(0, 12)
    y[[3, 7]] = -1, 1.5
    rows = np.setdiff1d(np.arange(12), [3, 7])
    hyper = functools.partial(et.member_hyper, randn(1, 12, 2), y)
    said = said_by(ValueError, hyper, rows, 1, 1, 1)
    assert said.startswith("y[7] is 1e18 deviations of the others from them; leave")
    assert hyper(np.arange(12), 1, 1, 1)["y_scale"] == pytest.approx(0.5, rel=0.1)


@jax.numpy_dtype_promotion("strict")
def test_intervals_are_in_the_units_of_the_targets():
    x = 1e8 + np.float64(randn(2, 28, 3))  # float32 would have it in eights
    y = 5e9 + 1e8 * x[:, 0]
    model = et.EnsembleRegressor(members=1, epochs=20, random_state=0).fit(x, y)
    mean, deviation = model.predict_deviation(x)
    ends = model.predict_interval(x, coverage=0.8)
    q = em.conformal_quantile(model.scores_, 0.8)
    assert_close(ends - mean[:, None], np.outer(q * deviation, [-1, 1]))
    _, unit = et.mixture(*model._outputs(x))
    assert_close(deviation, model.factor_ * unit * y.std())
    assert model.factor_ != 1
    nll = et.student_nll(y - mean, deviation, model.dof_)
    assert_close(model.log_density(x, y), -nll)
    assert model.score(x, y) > 0.5
    assert_array_equal(model.predict_interval(x[:1], 0.99), [[-np.inf, np.inf]])


@mock.patch.object(et, "FOLDS", 3)
def test_classifier_learns_labels_of_any_type():
    x = randn(4, 60, 2)
    y = np.array(["no", "yes"])[(x[:, 0] > 0).astype(int)]
    model = et.EnsembleClassifier(members=1, epochs=20, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9
    probs = model.predict_proba(x)
    assert_close(probs.sum(axis=1), np.ones(60), 1e-15)
    assert ((probs[:, 1] > 0.5) == (model.predict(x) == "yes")).all()


X = np.float64(randn(6, 24, 2))
Y = np.float64(randn(7, 24))
SIXTH = np.arange(24) == 5
SHORT = dict(members=1, epochs=1, random_state=0)
COUNTS = itertools.product(("members", "epochs"), (0, -1, 2.0, True, None))
LABELS = [True] * 24, ["1"] * 24, np.array([False, 2.5] * 12, object)


@mock.patch.object(et, "FOLDS", 3)
@mock.patch.object(pe.Trainer, "epoch", solve)
def test_estimators_take_numbers_of_any_scale():
    model = et.EnsembleRegressor(**SHORT)
    ends = model.fit(X, Y).predict_interval(X, 0.5)
    tiny = 2.0**-565  # its square is 0
    huge = 2.0**531  # its square is inf
    least = 2.0**-1074
    for x_scale, y_scale in ((tiny, huge), (huge, tiny)):
        model.fit(X * [x_scale, 1], Y * y_scale)
        found = model.predict_interval(X * [x_scale, 1], 0.5) / y_scale
        assert_array_equal(found, ends)
    still = [np.c_[X[:, 0], np.full(24, value)] for value in (0, 1e300)]
    of_zeros, of_huge = (model.fit(x, Y).predict(x) for x in still)
    assert_array_equal(of_zeros, of_huge)
    far = np.where(np.arange(48).reshape(24, 2) == 7, 1e300, X)
    said = said_by(ValueError, model.fit(X, Y).predict, far)
    assert said.startswith("X[3, 1] is 1e+300; expected 1e18 deviations from the mean")
    with np.errstate(divide="ignore", invalid="ignore"):  # its deviation rounds to 0
        said = said_by(ValueError, model.fit, X, least * SIXTH)
    assert said.startswith("y[0] is 0.0; expected 1e18 deviations")
    said = said_by(ValueError, model.fit(X, Y).log_density, X, Y[:9])
    assert said == "y has shape (9,); expected (24,), one number per row of X"


@cases(
    "options, y, message",
    *(({n: x}, Y, f"{n} is {x!r}; expected an integer, 1 or more") for n, x in COUNTS),
    *(({}, y, f"y[0] is {y[0]!r}; use numbers, or Ens") for y in LABELS),
    *(({}, np.where(SIXTH, bad, Y), f"y[5] is {bad}; use n") for bad in (None, np.nan)),
    ({}, np.arange(24).astype("M8[ns]"), "y[0] is np.datetime64('1970-01-01T00:00:00"),
    ({}, [datetime.date(2026, 1, 1)] * 24, "y[0] is datetime.date(2026, 1, 1); use n"),
)
def test_estimators_name_what_they_cannot_take(options, y, message):
    model = et.EnsembleRegressor(**SHORT | options)
    assert said_by(ValueError, model.fit, X, y).startswith(message)


def test_module_without_scikit_learn_names_it():
    code = "import sys; sys.modules['sklearn.base'] = None; import ensemble_tables"
    run = start_python(code)
    _, errors = run.communicate(timeout=100)
    assert run.returncode and "pip install -U scikit-learn (1.6 or newer)" in errors


DAYS = np.datetime64("2026-01-01") + np.arange(24)


@cases(
    "times, place",
    (DAYS[:, None], "[0, 0] is np.datetime64('2026-01-01')"),
    (np.c_[X, DAYS.astype(object)], "[0, 2] is datetime.date(2026, 1, 1)"),
    ((DAYS - DAYS[0])[:, None], "[0, 0] is np.timedelta64(0,'D')"),
    (
        [
            [1.0, 2.0, datetime.timedelta(i)] if i else [1.0, 2.0, 3.0]
            for i in range(24)
        ],
        "[1, 2] is datetime.timedelta(days=1)",
    ),
)
def test_estimators_refuse_dates_and_durations(times, place):
    said = f"X{place}; pass a date or a duration as numbers, such as the days since a"
    for model in et.EnsembleRegressor(**SHORT), et.EnsembleClassifier(**SHORT):
        assert said_by(ValueError, model.fit, times, Y > 0).startswith(said)
    with mock.patch.object(et, "check_is_fitted"):  # in predictions too
        assert said_by(ValueError, model.predict, times).startswith(said)


REFUSED = (  # in the order of docs/tables.md
    dict(X=csr_array(X), y=Y),
    dict(X=np.where(X[3, 1] == X, np.nan, X), y=Y),
    dict(X=np.array([["a", 1.0]] * 24, object), y=Y),
    dict(X=DAYS[:, None], y=Y),
    dict(X=X, y=Y, sample_weight=Y),
    dict(X=X, y=X),
    dict(X=X, y=[0.5, *["a"] * 23]),
    dict(X=X, y=Y, groups=Y[:9]),
    dict(X=X, y=Y, groups=["a"] * 24),
)


def test_estimators_take_groups_by_name_and_labels_that_are_there():
    for name in "EnsembleRegressor", "EnsembleClassifier":
        model = getattr(et, name)(**SHORT)
        assert "positional argument" in said_by(TypeError, model.fit, X, Y, Y)
    labels = np.where(SIXTH, None, np.where(Y > 0, "a", "b"))
    assert said_by(ValueError, model.fit, X, labels).startswith("y[5] is None; give")


def test_estimators_refuse_inputs_in_the_words_of_their_page():
    page = (HERE / "docs" / "tables.md").read_text("utf-8")
    rows = re.findall(r"`(\w+Error): (.+)` \|\n", page)
    _, far = rows.pop()
    assert len(rows) == len(REFUSED) and far.startswith("X[3, 1] is 1e+300;")
    for (kind, message), inputs in zip(rows, REFUSED):
        fit = functools.partial(et.EnsembleRegressor(**SHORT).fit, **inputs)
        assert said_by(getattr(builtins, kind), fit).startswith(message)


def test_logits_are_a_networks_and_a_linear_models_with_a_decay_each():
    params = moved(et.init_classes(jax.random.key(0), 3, 4))
    layers, skip = params
    x = randn(3, 5, 3)
    y = np.array([0, 1, 2, 3, 3])
    h = et.member_hyper(x, np.arange(5), np.arange(5), 3.0, 7.0, 0)
    logits = (x - x.mean(axis=0)) / x.std(axis=0) @ skip.weight + skip.bias
    logits += et.network(layers, x, h)
    (probs,) = et.softmax_apply(params, x, h)
    assert_close(probs, scipy.special.softmax(logits, axis=1))
    squares = [np.square(layer.weight).sum() for layer in (*layers, skip)]
    expected = -np.log(probs[np.arange(4), y[:4]]).mean()
    expected += (3 * sum(squares[:3]) + 7 * squares[3]) / 5
    assert_close(et.softmax_loss(params, x, y, np.arange(5) < 4, h), expected)


def test_classifier_finds_the_temperature_and_the_recipe_of_labels():
    draw = np.random.default_rng(0)
    model = et.EnsembleClassifier(**SHORT)
    logits = draw.normal(size=(3, 1, 4000, 3))
    labels = (logits[1, 0] / 2 + draw.gumbel(size=(4000, 3))).argmax(axis=1)
    probs = np.repeat(scipy.special.softmax(logits, axis=3), 2, axis=1)
    probs[2] = np.nan  # networks that diverge
    with mock.patch.object(model, "_fit", return_value=[probs]):
        model.fit(np.zeros((4000, 1)), labels)
    assert_allclose(model.temperatures_[1], 2, atol=0.2)
    assert model.weights_[1] > 0.8 and model.weights_.sum() == pytest.approx(1)
    few = np.arange(30)
    ours = np.linspace(0, 1, 999)[1:-1, None]
    p, q = probs[:2, 0, few, labels[:30]]  # one row more for each of the recipes
    nll = -np.log(ours * p + (1 - ours) * q).sum(axis=1, keepdims=True)
    best = ours[(nll - np.log(ours * (1 - ours))).argmin()]
    assert_allclose(et.weigh(probs[:2, 0, :30], labels[:30])[:1], best, atol=0.002)
    pooled = em.temper(probs[1, 0], model.temperatures_[1])
    pooled = (0.8 * pooled + 0.2 / 3) * model.weights_[1]
    assert abs(model.temperature_ - 1) < 0.1  # recipes have theirs already
    model.temperature_ = 0.4
    model.noises_ = (0, 0.2, 0)
    with mock.patch.object(model, "_outputs", return_value=[probs.reshape(6, 4000, 3)]):
        found = model.predict_proba(None)
    pooled += 1 / 3 * (1 - model.weights_[1])
    assert_allclose(found, em.temper(pooled, model.temperature_), atol=0.05)
    labels = (4 * logits[1, 0] + draw.gumbel(size=(4000, 3))).argmax(axis=1)
    random = np.where(draw.random(4000) < 0.15, draw.integers(3, size=4000), labels)
    sharp = scipy.special.softmax(8 * logits[1, 0], axis=1)
    temperature, noise = et.soften_by(sharp, random)
    assert abs(temperature - 2) < 0.4 and 0.1 <= noise <= 0.2
    assert et.soften_by(np.eye(3), [0, 1, 2]) == (et.TEMPERATURES[0], 0)


@mock.patch.multiple(et, BATCH=30, STEPS=2)
def test_networks_are_those_that_train_one_by_one_without_padding():
    x = 5 + 2 * randn(3, 60, 3)
    x[:, 2] = 0.1  # a column that does not vary
    y = np.float32(300 + 40 * (np.sin(x[:, 0]) + 0.2 * randn(4, 60)))
    rows = np.random.default_rng(0).permutation(60)
    own = [(10, 300, 0), (0.1, 3, 1)]
    splits = [et.Split(rows[6:], rows[:6]), et.Split(rows[8:], rows[:8])]
    trains = [split.train for split in splits for _ in range(2)]
    data = et.Data(x, y, splits)
    model = et.GAUSSIAN
    networks, found = et.train(model, data, [[r] for r in own], 2, 3, 0)
    assert et.member_orders([np.arange(30)], 0, 0).shape == (1, 2, 15)
    drawn = [order for i in (0, 1) for order in et.member_orders(trains, i, 0)[:2]]
    assert len({order.tobytes() for order in drawn}) == 4  # of one split
    hyper = [et.member_hyper(x, y, trains[i], *own[i // 2]) for i in range(4)]
    together = et.make_trainer(model, 3, et.stacked(hyper))
    start = together.gather(together.init(jax.random.key(0)))
    # Of 52 rows, 2 batches of 26 in each of 3 epochs.
    schedule = pe.cosine_schedule(0.5 * 6**-0.5, 6, warmup=0.05)
    alone = dataclasses.replace(
        together,
        members=1,
        devices=1,
        optimizer=pe.adam(schedule),
        loss_fn=lambda p, x, y, h: model.loss_fn(p, x, y, 1, h),
        hyper=jax.tree.map(lambda leaf: leaf[:1], together.hyper),
    )
    outputs = []
    for i, rows in enumerate(trains):
        assert_close(hyper[i]["x_mean"][0], x[rows].mean(axis=0))
        assert_close(hyper[i]["x_scale"][0, :2], x[rows, :2].std(axis=0))
        assert hyper[i]["x_scale"][0, 2] == 1
        assert_close(hyper[i]["second_decay"], own[i // 2][1] / len(rows))
        own_hyper = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], together.hyper)
        alone = alone.with_hyper(own_hyper)
        state = alone.scatter(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], start))
        for epoch in range(3):
            order = et.member_orders(trains, epoch, 0)[i]
            assert order.shape == (2, 26) == (2, len(set(order.flat)) // 2)
            assert set(order.flat) <= set(rows)
            state, _ = alone.epoch(state, (x, y), order)
        outputs.append(alone.predict_members(state, x))
        assert_close(member(networks.params, i), member(alone.gather(state).params, 0))
    means, variances = np.concatenate(outputs, axis=1)  # [4, 60] each
    assert_close(found, [z.reshape(2, 1, 2, 60) for z in (means, variances)])
    mean, deviation = et.mixture(means[:2], variances[:2])
    assert_close(mean, means[:2].mean(axis=0))
    assert_close(deviation**2, variances[:2].mean(axis=0) + means[:2].var(axis=0))
    assert means[:2].var(axis=0).min() > 0


def test_fits_of_near_sizes_share_a_program():
    traced = []  # the loss runs in Python when a program is traced, and only then

    def loss_fn(params, x, *args):
        traced.append(x.shape)
        return et.gaussian_loss(params, x, *args)

    model = et.GAUSSIAN._replace(loss_fn=loss_fn)
    for rows, batch, epochs in (100, 3, 2), (150, 4, 1):
        train = np.arange(rows - 10)
        assert et.member_orders([train], 0, 0).shape[-1] == batch
        splits = [et.Split(train, train)]
        data = et.Data(randn(0, rows, 2), randn(1, rows), splits)
        et.train(model, data, [[(1, 3, 1)]], 1, epochs, 0)
        traced.append(rows)
    assert len(et.padded(np.ones(256))) == 512  # a row of padding is always there
    assert traced[-2:] == [100, 150] and set(traced[:-2]) == {(4, 2)}


def test_loss_weighs_rows_by_deviation_and_has_a_decay_for_each_output():
    x = randn(7, 20, 3)
    y = 5 + randn(8, 20)
    h = et.member_hyper(x, y, np.arange(20), 3.0, 7.0, 1)
    params = moved(et.init(jax.random.key(0), 3, 2))
    seen = np.arange(20) < 17  # the rest is padding
    weights = seen * np.sqrt(et.gaussian_apply(params, x, h)[1])  # constants

    def loss(params):
        mean, variance = et.gaussian_apply(params, x, h)
        nll = (jnp.log(2 * np.pi * variance) + (y - mean) ** 2 / variance) / 2
        (first, _), (second, _), (last, _) = params
        squares = sum(jnp.square(w).sum() for w in (first, second, last[:, 0]))
        decay = (3 * squares + 7 * jnp.square(last[:, 1]).sum()) / 20
        return (weights * nll).sum() / weights.sum() - np.log(y.std()) + decay

    found = jax.value_and_grad(et.gaussian_loss)(params, x, y, seen, h)
    assert_close(found, jax.value_and_grad(loss)(params))
    low = pe.Dense(jnp.zeros((32, 2)), jnp.full(2, -1e3))
    _, variance = et.gaussian_apply((*params[:-1], low), x, h)
    assert_close(variance, np.full(20, 1e-4 * y.var()))


def test_waves_are_sines_and_cosines_of_the_inputs_that_a_recipe_has():
    x = 3 + 2 * randn(0, 20, 3)
    y = randn(1, 20)
    params = moved(et.init(jax.random.key(0), 3, 2), 1 / 9)
    normal = np.float64((x - x.mean(axis=0)) / x.std(axis=0))
    phases = [k * column for column in normal.T for k in range(1, 9)]
    for on in (0, 1):
        h = et.member_hyper(x, y, np.arange(20), 1, 1, on)
        waves = np.concatenate([np.sin(phases), np.cos(phases)]).T
        z = np.c_[normal, on * waves]
        for weight, bias in params[:2]:
            z = z @ weight + bias
            z /= 1 + np.exp(-z)
        expected = z @ params[2].weight + params[2].bias
        assert_close(et.network(params, x, h), expected)
    counts = [len(et.frequencies(inputs)) for inputs in (1, 8, 11, 500)]
    assert counts == [8, 8, 5, 1]


def test_score_of_numbers_is_the_interval_score():
    y = randn(0, 50)
    noise = randn(1, 2, 3, 50)
    means = y + 0.3 * noise[0]
    variances = np.exp(noise[1])
    mean, deviation = et.mixture(means, variances)
    totals = np.zeros(2)
    for i, (rank, weight) in enumerate([(26, 4), (46, 20)]):  # of 51 for 50% and 90%
        q = sorted(abs(y - mean) / deviation)[rank - 1]
        for low, high, target in zip(mean - q * deviation, mean + q * deviation, y):
            totals[i] += high - low + weight * max(low - target, 0, target - high)
    expected = np.log(totals / 50).mean()
    assert_close(et.interval_score(means, variances, y), expected)
    still = np.zeros((1, 50))
    assert np.isfinite(et.interval_score(still, still + 1, still[0]))
    # So that the plainest recipe is taken.
    assert et.interval_score(means[:, :8], variances[:, :8], y[:8]) == np.inf


def test_choice_is_the_plainest_of_the_best_that_are_finite():
    y = 10 * np.float64(randn(5, 99))
    scales = np.array([2, 1, 0.5, 0.4999, np.nan])[:, None, None]
    # A recipe's members err alike.
    means = y + np.resize([1, -1, 0.5], 99)[None, None] * scales + np.zeros((5, 2, 99))
    nll = et.losses(y, [means, np.ones(means.shape)])
    assert_close(nll[:3] - nll[2], np.log([4, 2, 1]), 0.02)
    assert 0 < nll[2] - nll[3] < 0.01 and nll[4] > 10
    assert et.plainest(nll) == 2


@cases("dof", *et.DOFS)
def test_density_is_a_students_t_with_the_deviation(dof):
    errors = np.linspace(-9, 9, 7)
    expected = -scipy.stats.t.logpdf(errors, dof, scale=3 / scipy.stats.t.std(dof))
    assert_close(et.student_nll(errors, 3, dof), expected)


def test_calibration_finds_the_density_that_errors_are_from():
    deviation = 1 + np.arange(5000) % 3
    for dof, factor in (3, 2), (100, 0.5):
        unit = scipy.stats.t.ppf((np.arange(5000) + 0.5) / 5000, dof)
        unit = np.random.default_rng(0).permutation(unit) / scipy.stats.t.std(dof)
        errors = factor * deviation * unit
        nll, found, by = et.calibrate(errors, deviation)
        assert found == dof and by == pytest.approx(factor, rel=0.08)
        assert nll == et.student_nll(errors, by * deviation, found).mean()
