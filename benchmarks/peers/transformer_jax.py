"""Peer: the small transformers (transformer.py) in Flax and JAX (mapped_jax.py)."""

import jax
import jax.numpy as jnp
import mapped_jax
import optax
import transformer
from flax import linen
from transformer import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, WIDTH


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):  # [B, LENGTH] -> [B, LENGTH, VOCABULARY]
        draw = linen.initializers.normal(0.02)
        positions = self.param("positions", draw, (1, LENGTH, WIDTH))
        x = linen.Embed(VOCABULARY, WIDTH)(tokens) + positions
        mask = linen.make_causal_mask(tokens)
        for _ in range(LAYERS):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(HEADS)(y, mask=mask)
            y = linen.Dense(HIDDEN)(linen.LayerNorm()(x))
            x = x + linen.Dense(WIDTH)(jax.nn.relu(y))
        return linen.Dense(VOCABULARY)(linen.LayerNorm()(x))


def init(key):
    return Transformer().init(key, jnp.zeros((1, LENGTH), jnp.int32))


def loss_fn(params, tokens, after):
    logits = Transformer().apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, after).mean()


def main():
    args = transformer.arguments(__doc__, **mapped_jax.OPTIONS)
    optimizer = optax.adam(transformer.LEARNING_RATE)
    data = transformer.make_sequences()
    mapped_jax.serve(init, loss_fn, optimizer, data, args, "flax")


if __name__ == "__main__":
    main()
