"""pjax_ensemble itself: the small transformers (transformer.py) as one trainer."""

import common
import jax
import transformer
from transformer_jax import init, loss_fn

import pjax_ensemble as pe


def main():
    args = transformer.arguments(__doc__, devices=2, at_once=1)
    adam = pe.adam(transformer.LEARNING_RATE)
    form = {"members": args.members, "at_once": args.at_once}
    trainer = pe.make_trainer(init, loss_fn, adam, **form)
    sequences = transformer.make_sequences()
    data = trainer.place(sequences)
    state = trainer.init(jax.random.key(0))

    def train(state, rows):
        return trainer.epoch(state, data, rows)

    packages = ["jax", "jaxlib", "flax"]
    common.serve_epochs(train, state, len(sequences[0]), args, packages)


if __name__ == "__main__":
    main()
