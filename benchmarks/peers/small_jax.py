"""Peer: a hundred small networks (small.py) in plain JAX, one member's training mapped.

A member's training, from its key to its last step, is one function with Optax's Adam,
which mapped_jax.py maps over the members. small_ours.py has the network and the loss.
"""

import jax
import jax.numpy as jnp
import mapped_jax
import optax
import small
from small_ours import init, loss_fn


def main():
    args = small.arguments(__doc__, **mapped_jax.OPTIONS)
    data = jax.tree.map(jnp.asarray, small.load_concrete())
    optimizer = optax.adam(small.LEARNING_RATE)
    train_member = mapped_jax.make_train_member(loss_fn, optimizer)

    def train_from(key, order, x, y):
        params = init(key)
        carry = params, optimizer.init(params)
        (params, _), losses = train_member(carry, order, x, y)
        return params, losses

    train_all = mapped_jax.over_members(train_from, args)
    leading = mapped_jax.leading(args)
    order = small.make_orders(len(data[0]), args.members, args.steps)
    order = order.reshape(*leading, *order.shape[1:])

    def train(seed):
        keys = jax.random.split(jax.random.key(seed), leading)
        _, losses = jax.device_get(train_all((keys, order), data))
        return losses.reshape(args.members, args.steps)

    small.serve(train, args, ["jax", "jaxlib", "optax"], time_compile=True)


if __name__ == "__main__":
    main()
