"""Five uses of pjax_ensemble, each a function of a few lines beside its model.

    decisions    the ensembles of the README and of docs/deciding.md: which examples to
                 leave to a person, and intervals that hold as often as they say
    tokens       a model of another library, Flax: trees in, logits of tokens out
    sweep        eight learning rates by two weight decays, in one run
    fine_tuning  members that start from a trained model, from a part of it, or new
    own_batches  batches of each member's own, from a generator

`python any_model.py` runs them, in seconds; `--plot FILE` draws the first, with
matplotlib.  It takes pjax_ensemble.py and ensemble_metrics.py from beside it, from the
folder above, or installed.
"""

import argparse
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

NLL = "negative_log_likelihood"


def mlp_init(key, sizes):  # the parameters: any tree of arrays
    keys = jax.random.split(key, len(sizes) - 1)
    return [pe.dense_init(*layer) for layer in zip(keys, sizes, sizes[1:])]


def mlp(params, x, hyper=None):  # [N, I] to [N, O]
    for layer in params[:-1]:
        x = jax.nn.relu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


def mlp_loss(params, x, y, hyper=None):
    return pe.softmax_cross_entropy(mlp(params, x), y).mean()


def draw_rows(num_rows, *shape):
    return np.random.default_rng(0).integers(num_rows, size=shape)


# ---------------------------------------------------------------------------------
# Decisions: ensembles of logits and of two outputs that are none
# ---------------------------------------------------------------------------------

EDGE = 0.6  # the curve has no training data beyond
OLD, CALIBRATION, NEW = slice(200), slice(200, 700), slice(700, None)


def readme_data():  # four numbers each [2200, 4], and which is the largest in size
    x = np.random.default_rng(0).normal(size=(2200, 4)).astype(np.float32)
    return x, abs(x).argmax(axis=1)


def curve_data():  # places [2200, 1], and a curve with noise there
    t = np.random.default_rng(0).uniform(-1, 1, size=(2200, 1)).astype(np.float32)
    noise = np.random.default_rng(1).normal(0, 0.2, size=len(t))
    return t, np.sin(6 * t[:, 0]) + noise


def classification(x, y):  # probabilities [5, 2200, 4]
    trainer = pe.make_trainer(
        lambda key: mlp_init(key, (4, 100, 100, 4)),
        mlp_loss,
        pe.adam(pe.cosine_schedule(0.03, 500)),
        members=5,
        apply_fn=mlp,
    )
    state = trainer.init(jax.random.key(0))
    state, _ = trainer.epoch(state, (x[OLD], y[OLD]), draw_rows(200, 500, 50))
    return trainer.predict_members(state, x)


def risk(unsure, wrong):  # the error among the surest 1, 2, ...
    return wrong[np.argsort(unsure)].cumsum() / np.arange(1, len(wrong) + 1)


def gaussian(params, x):  # means and variances [N]
    mean, spread = mlp(params, x).T
    return mean, jax.nn.softplus(spread) + 1e-3


def gaussian_loss(params, x, y):
    return pe.gaussian_nll(*gaussian(params, x), y).mean()


def regression(data, points):  # means and variances [5, N]
    trainer = pe.make_trainer(
        lambda key: mlp_init(key, (1, 100, 100, 2)),
        gaussian_loss,
        pe.adam(pe.cosine_schedule(0.01, 500)),
        members=5,
        apply_fn=gaussian,
        output=None,  # as it is, without a softmax
    )
    state = trainer.init(jax.random.key(0))
    state, _ = trainer.epoch(state, data, draw_rows(len(data[0]), 500, 50))
    return trainer.predict_members(state, points)


def mean_and_deviation(means, variances):  # of the ensemble
    return means.mean(axis=0), np.sqrt(variances.mean(axis=0) + means.var(axis=0))


def draw(file, unsure, wrong, threshold, data, grid, means, variances, q):
    """Draw errors of what is kept, [6, N], the ensemble's last, and the curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    kept = np.arange(1, len(wrong[0]) + 1) / len(wrong[0])
    for i, each in enumerate(zip(unsure, wrong)):
        style = [dict(color="#0072b2", lw=0.8), dict(color="#d55e00", lw=2)][i == 5]
        label = {0: "members", 5: "ensemble"}.get(i)
        left.plot(100 * kept, 100 * risk(*each), **style, label=label)
    inside = unsure[-1] <= threshold
    at = 100 * inside.mean(), 100 * wrong[-1][inside].mean()
    left.plot(*at, "o", color="#d55e00", label="threshold, found for 5%")
    left.axhline(5, color="0.4", lw=0.8, ls="--", label="what was asked for")
    left.set(xlabel="kept, surest first (%)", ylabel="wrong among them (%)")
    left.set(xlim=(30, 100), ylim=(0, 12))

    mean, deviation = mean_and_deviation(means, variances)
    z = 1.645  # 90% of a Gaussian lie within
    for width, color, name in (
        (q, "#f6cf7d", f"calibrated: {q:.2f} deviations"),
        (z, "#bde0f6", f"90% intervals: {z:.2f} deviations"),
    ):
        band = mean - width * deviation, mean + width * deviation
        right.fill_between(grid, *band, color=color, lw=0, label=name)
    right.plot(grid, means.T, color="#0072b2", lw=0.8)
    right.plot(grid, mean, color="#d55e00", lw=2)
    right.scatter(*data, s=8, color="0.15", zorder=3, label="training data")
    right.plot(grid, np.sin(6 * grid), "--", color="0.4", lw=1, label="without noise")
    right.set(xlabel="t", ylabel="curve", xlim=(-1, 1), ylim=(-3, 4))
    right.set_xticks(np.linspace(-1, 1, 5))
    right.axvspan(EDGE, 1, color="0.95", zorder=0)
    right.annotate("no data", ((1 + EDGE) / 2, 1.5), ha="center")
    for axes in (left, right):
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


# ---------------------------------------------------------------------------------
# Tokens: a dict of arrays in, logits [N, T, V] out, by a model of Flax
# ---------------------------------------------------------------------------------


def padded_lines(lines, length=48):  # characters [N, T], and which of them are text
    lines = [line[:length].ljust(length, "\0").encode("ascii") for line in lines]
    codes = [np.frombuffer(line, np.uint8) for line in lines]
    tokens = np.stack(codes).astype(np.int32)
    return {"tokens": tokens, "mask": tokens > 0}


def language_model():
    import flax.linen as nn

    class NextCharacter(nn.Module):  # from the last six, at every place of a line
        @nn.compact
        def __call__(self, inputs):
            now = nn.Embed(128, 16)(inputs["tokens"])  # [N, T, 16]
            past = [jnp.pad(now, ((0, 0), (i, 0), (0, 0))) for i in range(6)]
            seen = jnp.concatenate([x[:, : now.shape[1]] for x in past], axis=-1)
            return nn.Dense(128)(nn.tanh(nn.Dense(64)(seen)))  # [N, T, 128]

    model = NextCharacter()

    def loss_fn(params, inputs):
        logits, mask = model.apply(params, inputs)[:, :-1], inputs["mask"][:, 1:]
        losses = pe.softmax_cross_entropy(logits, inputs["tokens"][:, 1:])
        # The mean over text; where devices share a member, over that of all of them.
        return (losses * mask).sum() / pe.replica_mean(mask.sum())

    return model, loss_fn


def tokens(train, test):
    model, loss_fn = language_model()
    trainer = pe.make_trainer(
        lambda key: model.init(key, padded_lines([" "])),
        loss_fn,
        pe.adam(0.01),
        members=3,
        apply_fn=model.apply,
    )
    state = trainer.init(jax.random.key(0))
    order = draw_rows(len(train["tokens"]), 3, 100, 16)
    state, _ = trainer.epoch(state, (train,), order)
    probs = trainer.predict_members(state, test)[:, :, :-1]  # [3, N, T - 1, 128]
    mask = test["mask"][:, 1:]
    return em.ensemble_report(probs[:, mask], test["tokens"][:, 1:][mask])


# ---------------------------------------------------------------------------------
# A sweep: members that differ in what `hyper` says
# ---------------------------------------------------------------------------------


def wave(seed, count, slope=2.0):  # points [N, 2], and the side of a wave: some wrong
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(count, 2)).astype(np.float32)
    side = np.sin(6 * x[:, 0]) > slope * x[:, 1]
    return x, (side ^ (rng.uniform(size=count) < 0.1)).astype(np.int32)


def decayed_loss(params, x, y, hyper):
    squares = sum(jnp.sum(layer.weight**2) for layer in params)
    return mlp_loss(params, x, y) + hyper["decay"] / 2 * squares


def sweep(hyper, data, valid):  # hyper's leaves [K]
    start = mlp_init(jax.random.key(0), (2, 100, 2))  # the same for all members
    trainer = pe.make_trainer(
        lambda key, h: start,
        decayed_loss,
        lambda h: pe.adam(h["rate"]),
        members=len(hyper["rate"]),
        apply_fn=mlp,
        hyper=hyper,
    )
    state = trainer.init(jax.random.key(0))
    order = draw_rows(len(data[0]), 300, 50)  # one for all members
    state, _ = trainer.epoch(state, data, order)
    report = em.ensemble_report(trainer.predict_members(state, valid[0]), valid[1])
    return report["member"], trainer.gather(state).params


# ---------------------------------------------------------------------------------
# Fine-tuning: members from one trained tree, as much of it as `hyper` says
# ---------------------------------------------------------------------------------


def begin(key, kept, trained):  # the first layers are the trained ones, the rest new
    layers = zip(trained, mlp_init(key, (2, 100, 2)))
    return [
        pe.Dense(*(jnp.where(i < kept, *pair) for pair in zip(*layer)))
        for i, layer in enumerate(layers)
    ]


def fine_tuning(trained, kept, data, test):  # kept [K]: how many layers of the trained
    trainer = pe.make_trainer(
        lambda key, h: begin(key, h, trained),
        mlp_loss,
        lambda h: pe.adam(0.01),
        members=len(kept),
        apply_fn=mlp,
        hyper=kept,
    )
    state = trainer.init(jax.random.key(0))
    order = draw_rows(len(data[0]), len(kept), 100, 25)
    state, _ = trainer.epoch(state, data, order)
    return em.ensemble_report(trainer.predict_members(state, test[0]), test[1])


# ---------------------------------------------------------------------------------
# Batches from a generator, each member's own
# ---------------------------------------------------------------------------------


def bootstrap(x, y, members, steps):  # from its own resample: [K, B, 2], [K, B]
    rng = np.random.default_rng(0)
    resamples = rng.integers(len(x), size=(members, len(x)))
    for _ in range(steps):
        rows = rng.permuted(resamples, axis=1)[:, :50]
        yield x[rows], y[rows]


def own_batches(data, test):
    trainer = pe.make_trainer(
        lambda key: mlp_init(key, (2, 100, 2)),
        mlp_loss,
        pe.adam(0.02),
        members=5,
        apply_fn=mlp,
    )
    state = trainer.init(jax.random.key(0))
    for batch in pe.prefetch(bootstrap(*data, members=5, steps=300)):
        state, _ = trainer.update(state, *batch, per_member=True)
    return em.ensemble_report(trainer.predict_members(state, test[0]), test[1])


# ---------------------------------------------------------------------------------
# What it prints
# ---------------------------------------------------------------------------------


def show(name, report):
    members = " ".join(f"{scores[NLL]:.3f}" for scores in report["member"])
    print(f"{name}: NLL {report['ensemble'][NLL]:.3f}, of the members {members}")


def show_decisions(file=None):
    x, y = readme_data()
    probs = classification(x, y)
    show("Classes", em.ensemble_report(probs[:, 200:], y[200:]))
    stages = [*probs[:, None], probs]  # of the members, each alone, and of all
    unsure = np.array([em.predictive_entropy(each) for each in stages])
    wrong = np.array([each.mean(axis=0).argmax(axis=-1) != y for each in stages])
    calibrate = unsure[-1, CALIBRATION], wrong[-1, CALIBRATION]
    threshold = em.risk_threshold(*calibrate, risk=0.05)
    kept = unsure[-1, NEW] <= threshold
    print(f"  kept {kept.mean():.0%}, of which {wrong[-1, NEW][kept].mean():.1%} wrong")

    (t, curve), grid = curve_data(), np.linspace(-1, 1, 321, dtype=np.float32)
    rows, seen = np.arange(2200), t[:, 0] < EDGE
    train, calibrate, test = (
        part[seen[part]] for part in (rows[OLD], rows[CALIBRATION], rows[NEW])
    )
    found = regression((t[train], curve[train]), np.concatenate([t, grid[:, None]]))
    means, variances = (each[:, :2200] for each in found)
    mean, deviation = mean_and_deviation(means, variances)
    off = abs(curve - mean) / deviation
    q = em.conformal_quantile(off[calibrate])
    for name, part in ("Regression", test), ("Beyond the data", rows[~seen]):
        report = em.regression_report(means[:, part], variances[:, part], curve[part])
        show(name, report)
        held = report["ensemble"]["coverage"]["90%"], (off[part] <= q).mean()
        print("  90% intervals hold {:.0%}, calibrated ones {:.0%}".format(*held))
        print(f"  members differ by {means[:, part].std(axis=0).mean():.3f}")
    if file:
        lines = (each[:, 2200:] for each in found)
        new_points = unsure[:, NEW], wrong[:, NEW], threshold
        draw(file, *new_points, (t[train, 0], curve[train]), grid, *lines, q)


def show_tokens():
    try:
        import flax.linen  # noqa: F401
    except ImportError as error:
        return print(f"Tokens: left out: {error}")
    lines = inspect.getsource(pe).splitlines()  # its own module is what it reads
    show("Tokens", tokens(padded_lines(lines[::16]), padded_lines(lines[1::16])))


def show_sweep():
    rates, decays = [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3], [0, 0.003]
    rate, decay = (x.ravel() for x in np.meshgrid(rates, decays, indexing="ij"))
    valid, test = wave(1, 500), wave(2, 2000)
    scores, params = sweep({"rate": rate, "decay": decay}, wave(0, 200), valid)
    losses = np.array([each[NLL] for each in scores])
    print("Sweep: NLL on validation data, by learning rate and weight decay")
    print("         ", *(f"{each:8g}" for each in decays))
    for each, row in zip(rates, losses.reshape(len(rates), -1)):
        print(f"  {each:7g}", *(f"{loss:8.3f}" for loss in row))
    best = losses.argmin()
    params = jax.tree.map(lambda x: x[best], params)
    print(f"  chosen: {rate[best]:g} and {decay[best]:g}", end="; ")
    print(f"NLL on test data {mlp_loss(params, *test):.3f}")
    return params


def show_fine_tuning(trained):
    data, test = wave(3, 50, slope=1.0), wave(4, 2000, slope=1.0)  # another wave
    kept = np.repeat([2, 1, 0], 3)
    scores = fine_tuning(trained, kept, data, test)["member"]
    means = np.reshape([each["accuracy"] for each in scores], (3, 3)).mean(axis=1)
    print("Fine-tuning on 50 points: accuracy of members that begin with the trained")
    print("  model {:.3f}, its first layer {:.3f}, nothing {:.3f}".format(*means))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Show five uses of pjax_ensemble.")
    parser.add_argument("--plot", metavar="FILE", help="draw the decisions")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used
    show_decisions(args.plot)
    show_tokens()
    show_fine_tuning(show_sweep())
    show("Own batches", own_batches(wave(0, 200), wave(2, 2000)))


if __name__ == "__main__":
    main()
