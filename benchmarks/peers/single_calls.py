"""Calls of a tiny network, whose work takes less time than the call: ours or by hand.

The network has ten layers of 8 by 8, and one member learns by Adam. A call is an
``update`` on ``--batch`` rows, an ``epoch`` of one such step, or a ``predict`` of so
many rows. It waits for the result, so that a round's rows are its calls.
``--by-hand`` calls a program of ``jax.jit`` that does the same, for all members by
``jax.vmap``: a step with by_hand.py, or the mean of the members' probabilities.
"""

import by_hand
import common
import jax
import numpy as np
import optax
import speed

import pjax_ensemble as pe

CALLS = {"update": {}, "epoch": {}, "predict": {}}


def init(key):
    return pe.mlp_init(key, [8] * 11)


def loss_fn(params, x, y):
    return pe.softmax_cross_entropy(pe.mlp(params, x), y).mean()


@jax.jit
def predict_by_hand(params, x):
    return jax.nn.softmax(jax.vmap(pe.mlp, (0, None))(params, x)).mean(axis=0)


def call_by_hand(what, x, y):
    """Return a function without arguments that makes a call by hand."""
    adam = optax.adam(1e-3)
    draw = jax.jit(jax.vmap(by_hand.start(init, adam)))
    training = speed.Training(draw(jax.random.split(jax.random.key(0), 1)))
    if what == "predict":
        params, _ = training.state
        return lambda: np.asarray(predict_by_hand(params, x))
    step = by_hand.over_members(by_hand.make_step(loss_fn, adam))
    return lambda: training.take(step, [((), (x, y))])


def call_of_ours(what, x, y):
    """Return a function without arguments that calls a trainer's method."""
    adam = pe.adam(1e-3)
    trainer = pe.make_trainer(
        init, loss_fn, adam, members=1, devices=1, apply_fn=pe.mlp
    )
    training = speed.Training(trainer.init(jax.random.key(0)))
    if what == "predict":
        return lambda: trainer.predict(training.state, x)
    args = x, y
    if what == "epoch":
        args = trainer.place((x, y)), np.arange(len(x))[None]
    return lambda: training.take(getattr(trainer, what), [args])


def main():
    args = common.arguments(__doc__, ["by-hand"], CALLS, steps=400, batch=8)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.batch, 8)).astype(np.float32)
    y = rng.integers(8, size=args.batch, dtype=np.int32)
    call = (call_by_hand if args.by_hand else call_of_ours)(args.case, x, y)

    def run(steps):
        for _ in range(steps):
            jax.block_until_ready(call())
        return 0.0

    common.serve(args, run, rows=1)


if __name__ == "__main__":
    main()
