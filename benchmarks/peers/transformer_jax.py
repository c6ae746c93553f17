"""Peer: the small transformers (transformer.py) in plain JAX (mapped_jax.py)."""

import mapped_jax
import optax
import transformer
from transformer_flax import init, loss_fn


def main():
    args = transformer.arguments(__doc__, **mapped_jax.OPTIONS)
    optimizer = optax.adam(transformer.LEARNING_RATE)
    data = transformer.make_sequences()
    mapped_jax.serve(init, loss_fn, optimizer, data, args, "flax")


if __name__ == "__main__":
    main()
