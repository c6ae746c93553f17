"""Try eight learning rates by two weight decays in one run.

    python sweep.py --plot sweep.png

Each of the 16 settings is one member: `hyper` holds its rate and its decay.  All start
from the same weights and see the same batches, so that only the setting differs.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

RATES, DECAYS = [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3], [0, 0.003]


def draw_data(seed, count):  # points [N, 2]; the side of a wave, for a tenth wrong
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(count, 2)).astype(np.float32)
    side = np.sin(6 * x[:, 0]) > 2 * x[:, 1]
    return x, (side ^ (rng.uniform(size=count) < 0.1)).astype(np.int32)


def init(key, hyper):
    first, second = jax.random.split(jax.random.key(0))  # the same for all members
    return pe.dense_init(first, 2, 100), pe.dense_init(second, 100, 2)


def network(params, x, hyper):  # logits [N, 2]
    hidden, last = params
    return pe.dense(last, jax.nn.relu(pe.dense(hidden, x)))


def loss_fn(params, x, y, hyper):
    squares = sum(jnp.sum(layer.weight**2) for layer in params)
    loss = pe.softmax_cross_entropy(network(params, x, hyper), y).mean()
    return loss + hyper["decay"] / 2 * squares


def draw(file, losses):  # [rates, decays]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for decay, column, color in zip(DECAYS, losses.T, ("#0072b2", "#d55e00")):
        axes.semilogx(RATES, column, "o-", color=color, label=f"weight decay {decay:g}")
    rate, decay = np.unravel_index(losses.argmin(), losses.shape)
    best = RATES[rate], losses[rate, decay]
    axes.plot(*best, "o", ms=13, mfc="none", color="0.15", label="chosen")
    axes.set(xlabel="learning rate", ylabel="validation NLL (nats)", ylim=(0.4, 0.85))
    axes.legend(frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=100)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the losses, by matplotlib")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used

    data, valid, test = draw_data(0, 200), draw_data(1, 500), draw_data(2, 2000)
    rate, decay = (x.ravel() for x in np.meshgrid(RATES, DECAYS, indexing="ij"))
    trainer = pe.make_trainer(
        init,
        loss_fn,
        lambda hyper: pe.adam(hyper["rate"]),
        members=16,
        apply_fn=network,
        hyper={"rate": rate, "decay": decay},  # leaves [16]
    )
    order = np.random.default_rng(0).integers(200, size=(300, 50))  # 300 batches of 50
    state, _ = trainer.epoch(trainer.init(jax.random.key(0)), data, order)

    def score(x, y):  # NLLs [16]
        report = em.ensemble_report(trainer.predict_members(state, x), y)
        return np.array([own["negative_log_likelihood"] for own in report["member"]])

    losses = score(*valid).reshape(8, 2)
    print("NLL on validation data, by learning rate and weight decay")
    print("       ", *(f"{each:8g}" for each in DECAYS))
    for each, row in zip(RATES, losses):
        print(f"{each:7g}", *(f"{loss:8.3f}" for loss in row))
    best = losses.argmin()
    chosen = f"chosen: rate {rate[best]:g}, decay {decay[best]:g}"
    print(f"{chosen}; NLL on test data {score(*test)[best]:.3f}")
    if args.plot:
        draw(args.plot, losses)


if __name__ == "__main__":
    main()
