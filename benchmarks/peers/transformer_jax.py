"""Peer: the small transformers (transformer.py) in plain JAX (mapped_jax.py)."""

import common  # noqa: F401, sets the path as for the others
import jax
import mapped_jax
import optax
import transformer
from transformer_flax import init, loss_fn


def main():
    args = transformer.arguments(__doc__, **mapped_jax.OPTIONS)
    jax.config.update("jax_num_cpu_devices", args.devices)
    optimizer = optax.adam(transformer.LEARNING_RATE)
    data = transformer.make_sequences()
    packages = ["jax", "jaxlib", "flax", "optax"]
    mapped_jax.serve(init, loss_fn, optimizer, data, args, packages)


if __name__ == "__main__":
    main()
