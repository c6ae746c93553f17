"""Five uses of pjax_ensemble, each a function of a few lines beside its model.

    regression   five networks that say how sure they are, of a curve with a gap
    tokens       a model of another library, Flax: trees in, logits of tokens out
    sweep        eight learning rates by two weight decays, in one run
    fine_tuning  members that start from a trained model, from a part of it, or new
    own_batches  batches of each member's own, from a generator

`python any_model.py` runs them, in seconds; `--plot FILE` draws the first, with
matplotlib.  It takes pjax_ensemble.py from beside it, or installed.
"""

import argparse
import importlib.util
import inspect

import jax
import jax.numpy as jnp
import numpy as np

import pjax_ensemble as pe

NLL = "negative_log_likelihood"


def mlp_init(key, sizes):  # the parameters: any tree of arrays
    noise = jax.random.normal(key, (len(sizes) - 1, max(sizes) + 1, max(sizes)))
    pairs = zip(noise, sizes, sizes[1:])  # one draw of it compiles faster than many
    return [pe.Dense(x[:i, :o] / i**0.5, x[-1, :o]) for x, i, o in pairs]


def mlp(params, x, hyper=None):  # [N, I] to [N, O]
    for layer in params[:-1]:
        x = jax.nn.relu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


def draw_rows(num_rows, *shape):
    return np.random.default_rng(0).integers(num_rows, size=shape)


# ---------------------------------------------------------------------------------
# Regression: two outputs that are no logits, a mean and a variance
# ---------------------------------------------------------------------------------

GAP = -0.8, 0.8


def curve(seed, count, gap=()):  # x [N, 1] and y [N], the noisier the larger x
    rng = np.random.default_rng(seed)
    x = rng.uniform(-3, 3, size=count)
    if gap:
        x = x[(x < gap[0]) | (x > gap[1])]
    y = np.sin(2 * x) + 0.3 * x + rng.normal(size=len(x)) * (0.2 + 0.05 * x)
    return x[:, None].astype(np.float32), y.astype(np.float32)


def gaussian(params, x):  # means and variances [N]
    mean, spread = mlp(params, x).T
    return mean, jax.nn.softplus(spread) + 1e-3


def gaussian_loss(params, x, y):
    return pe.gaussian_nll(*gaussian(params, x), y).mean()


def regression(data, test, grid):
    trainer = pe.make_trainer(
        lambda key: mlp_init(key, (1, 50, 50, 2)),
        gaussian_loss,
        pe.adam(pe.cosine_schedule(0.01, 400)),
        members=5,
        apply_fn=gaussian,
        output=None,  # as it is, without a softmax
    )
    state = trainer.init(jax.random.key(0))
    order = draw_rows(len(data[0]), 5, 400, 40)  # each member's own
    state, _ = trainer.epoch(state, data, order)
    report = pe.regression_report(*trainer.predict_members(state, test[0]), test[1])
    return report, trainer.predict_members(state, grid)


def draw(file, data, grid, means, variances):
    """Draw members, mean and two standard deviations, in their two parts."""
    from matplotlib.figure import Figure

    mean, noise = means.mean(axis=0), variances.mean(axis=0)
    inner, outer = 2 * np.sqrt(noise), 2 * np.sqrt(noise + means.var(axis=0))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for low, high, color, name in (
        (-inner, inner, "#bde0f6", "two standard deviations: noise"),
        (inner, outer, "#f6cf7d", "and disagreement of members"),
        (-outer, -inner, "#f6cf7d", None),
    ):
        axes.fill_between(grid, mean + low, mean + high, color=color, label=name, lw=0)
    lines = axes.plot(grid, means.T, color="#0072b2", linewidth=0.8)
    lines[0].set_label("members")
    axes.plot(grid, mean, color="#d55e00", linewidth=2.5, label="ensemble")
    axes.scatter(*data, s=12, color="0.15", zorder=3, label="training data")
    axes.set(xlabel="x", ylabel="y", xlim=(grid[0], grid[-1]), ylim=(-2.4, 3))
    axes.legend(frameon=False, loc="upper left", ncols=3)
    axes.axvspan(*GAP, color="0.95", zorder=0)
    axes.annotate("no data", (sum(GAP) / 2, -2.25), ha="center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


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
    return pe.ensemble_report(probs[:, mask], test["tokens"][:, 1:][mask])


# ---------------------------------------------------------------------------------
# A sweep: members that differ in what `hyper` says
# ---------------------------------------------------------------------------------


def wave(seed, count, slope=2.0):  # points [N, 2], and the side of a wave: some wrong
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(count, 2)).astype(np.float32)
    side = np.sin(6 * x[:, 0]) > slope * x[:, 1]
    return x, (side ^ (rng.uniform(size=count) < 0.1)).astype(np.int32)


def wave_loss(params, x, y, hyper=None):
    return pe.softmax_cross_entropy(mlp(params, x), y).mean()


def decayed_loss(params, x, y, hyper):
    squares = sum(jnp.sum(layer.weight**2) for layer in params)
    return wave_loss(params, x, y) + hyper["decay"] / 2 * squares


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
    report = pe.ensemble_report(trainer.predict_members(state, valid[0]), valid[1])
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
        wave_loss,
        lambda h: pe.adam(0.01),
        members=len(kept),
        apply_fn=mlp,
        hyper=kept,
    )
    state = trainer.init(jax.random.key(0))
    order = draw_rows(len(data[0]), len(kept), 100, 25)
    state, _ = trainer.epoch(state, data, order)
    return pe.ensemble_report(trainer.predict_members(state, test[0]), test[1])


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
        wave_loss,
        pe.adam(0.02),
        members=5,
        apply_fn=mlp,
    )
    state = trainer.init(jax.random.key(0))
    for batch in pe.prefetch(bootstrap(*data, members=5, steps=300)):
        state, _ = trainer.update(state, *batch, per_member=True)
    return pe.ensemble_report(trainer.predict_members(state, test[0]), test[1])


# ---------------------------------------------------------------------------------
# What it prints
# ---------------------------------------------------------------------------------


def show(name, report):
    members = " ".join(f"{scores[NLL]:.3f}" for scores in report["member"])
    print(f"{name}: NLL {report['ensemble'][NLL]:.3f}, of the members {members}")


def show_regression(file=None):
    data, grid = curve(1, 150, GAP), np.linspace(-4, 4, 321, dtype=np.float32)
    report, (means, variances) = regression(data, curve(2, 500), grid[:, None])
    show("Regression", report)
    covered, deviation = report["ensemble"]["coverage"]["95%"], means.std(axis=0)
    print(f"  95% intervals hold {covered:.0%} of the test data, gap included")
    gap, seen = (grid > GAP[0]) & (grid < GAP[1]), abs(grid) < 3
    inside, beside = deviation[gap].mean(), deviation[~gap & seen].mean()
    print(f"  members differ by {inside:.3f} in the gap, by {beside:.3f} beside it")
    if file:
        draw(file, data, grid, means, variances)


def show_tokens():
    if importlib.util.find_spec("flax") is None:
        return print("Tokens: left out, since flax is not installed")
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
    print(f"NLL on test data {wave_loss(params, *test):.3f}")
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
    parser.add_argument("--plot", metavar="FILE", help="draw the regression")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used
    show_regression(args.plot)
    show_tokens()
    show_fine_tuning(show_sweep())
    show("Own batches", own_batches(wave(0, 200), wave(2, 2000)))


if __name__ == "__main__":
    main()
