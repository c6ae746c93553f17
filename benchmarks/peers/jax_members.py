"""Peer: the ensembles of cases.py in plain JAX, one member's training mapped.

by_hand.py has the programs. With ``--devices D``, ``pmap(vmap(...))`` puts an equal
part of the members on each device. With ``--at-once 1``, ``lax.map`` replaces ``vmap``,
and with ``--at-once N``, ``lax.map`` has ``batch_size=N``. A step takes its whole
batch, without micro-batches.
"""

import accelerators
import by_hand
import cases
import common
import jax
import jax.numpy as jnp
import optax
from cases import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, WIDTH
from flax import linen

import pjax_ensemble as pe


def small_loss(params, x, y):
    mean, spread = accelerators.mlp(params, x).T
    return pe.gaussian_nll(mean, jax.nn.softplus(spread) + 1e-6, y).mean()


class Transformer(linen.Module):
    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    words: int = VOCABULARY

    @linen.compact
    def __call__(self, tokens):  # [B, length] -> [B, length, words]
        draw = linen.initializers.normal(0.02)
        shape = 1, tokens.shape[1], self.width
        positions = self.param("positions", draw, shape)
        x = linen.Embed(self.words, self.width)(tokens) + positions
        mask = linen.make_causal_mask(tokens)
        for _ in range(self.layers):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(self.heads)(y, mask=mask)
            y = linen.Dense(HIDDEN // WIDTH * self.width)(linen.LayerNorm()(x))
            x = x + linen.Dense(self.width)(jax.nn.relu(y))
        return linen.Dense(self.words)(linen.LayerNorm()(x))


def transformer_init(key):
    return Transformer().init(key, jnp.zeros((1, LENGTH), jnp.int32))


LOSSES = {  # the parameters and the loss
    "cnn": (pe.cnn_init, accelerators.loss_of(accelerators.cnn)),
    "small": (accelerators.small_init, small_loss),
    "transformer": (transformer_init, accelerators.loss_of(Transformer().apply)),
}


def main():
    options = dict(members=8, devices=1, at_once=0)
    args = common.arguments(__doc__, cases=cases.SETTINGS, **options)
    init, loss_fn = LOSSES[args.case]
    sgd = args.case == "cnn"
    optimizer = optax.sgd(0.1, 0.9) if sgd else optax.adam(cases.RATES[args.case])
    first = by_hand.start(init, optimizer)
    scan = by_hand.make_scan(by_hand.make_step(loss_fn, optimizer))
    data = jax.tree.map(jnp.asarray, cases.LOAD[args.case]())
    how = args.devices, args.at_once
    sizes = [args.devices] * (args.devices > 1)
    sizes.append(args.members // args.devices)

    def train_anew(_, key, order, *data):
        (params, _), losses = scan(first(key), order, *data)
        return params, losses

    def keys(seed):
        return jax.random.split(jax.random.key(seed), sizes)

    def divide(order):
        return order.reshape(*sizes, *order.shape[1:])

    if args.case == "small":
        train = by_hand.over_members(train_anew, *how)

        def train_all(seed, order):
            _, losses = jax.device_get(train((), (keys(seed), divide(order)), data))
            return losses.reshape(order.shape[:2])

        cases.serve_anew(train_all, args)
    else:
        draw = by_hand.over_members(lambda _, key: first(key), *how)
        train = by_hand.over_members(scan, *how)
        state = draw((), (keys(0),), ())

        def go_on(state, order):
            return train(state, (divide(order),), data)

        common.serve_epochs(go_on, state, len(data[0]), args)


if __name__ == "__main__":
    main()
