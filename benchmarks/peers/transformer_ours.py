"""pjax_ensemble itself: the small transformers (transformer.py) as one trainer."""

import common
import jax
import numpy as np
import transformer
from transformer_flax import init, loss_fn

import pjax_ensemble as pe


def main():
    args = transformer.arguments(__doc__, devices=2, at_once=1)
    adam = pe.adam(transformer.LEARNING_RATE)
    form = {"members": args.members, "at_once": args.at_once}
    trainer = pe.make_trainer(init, loss_fn, adam, **form)
    sequences = transformer.make_sequences()
    data = trainer.place(sequences)
    order = common.endless_order(len(sequences[0]), args.batch, args.members)
    state = trainer.init(jax.random.key(0))

    def run(steps):
        nonlocal state
        rows = common.next_steps(order, steps)
        state, losses = trainer.epoch(state, data, rows)
        jax.block_until_ready(state)
        return float(np.mean(losses))

    common.serve(run, args, ["jax", "jaxlib", "flax"], time_compile=True)


if __name__ == "__main__":
    main()
