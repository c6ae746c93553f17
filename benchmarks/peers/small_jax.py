"""Peer: a hundred small networks (small.py) in plain JAX, one member's training mapped.

As JAX's documents have it: a member's training, from its key to its last step, is one
function, a ``lax.scan`` of Optax's Adam over its order. It is mapped over the members
by ``jit(vmap(...))`` on one device, or with ``--devices D`` by ``pmap(vmap(...))``, an
equal part of the members on each; with ``--map``, by ``lax.map`` in place of ``vmap``.
"""

import common  # noqa: F401, sets the path as for the others
import jax
import jax.numpy as jnp
import optax
import small


def init(key):
    keys = jax.random.split(key, 2)
    draw = jax.nn.initializers.variance_scaling(2.0, "fan_in", "normal")
    return [
        (draw(k, (i, o)), jnp.zeros(o))
        for k, i, o in zip(keys, small.SIZES, small.SIZES[1:])
    ]


def loss_fn(params, x, y):
    (w1, b1), (w2, b2) = params
    mean, spread = (jax.nn.relu(x @ w1 + b1) @ w2 + b2).T
    variance = jax.nn.softplus(spread) + small.LEAST_VARIANCE
    return jnp.mean(jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance) / 2


def make_train_member(x, y):
    optimizer = optax.adam(small.LEARNING_RATE)

    def step(carry, rows):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, x[rows], y[rows])
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    def train_member(key, order):
        params = init(key)
        (params, _), losses = jax.lax.scan(
            step, (params, optimizer.init(params)), order
        )
        return params, losses

    return train_member


def main():
    args = small.arguments(__doc__, ["map"], devices=1)
    jax.config.update("jax_num_cpu_devices", args.devices)
    x, y = small.load_concrete()
    train_member = make_train_member(jnp.asarray(x), jnp.asarray(y))

    def train_part(keys, orders):  # of a device's members, leaves [M, ...]
        if args.map:
            return jax.lax.map(lambda own: train_member(*own), (keys, orders))
        return jax.vmap(train_member)(keys, orders)

    order = small.make_orders(len(x), args.members, args.steps)
    leading = (args.members,)
    train_all = jax.jit(train_part)
    if args.devices > 1:
        leading = args.devices, args.members // args.devices
        train_all = jax.pmap(train_part)
    order = order.reshape(*leading, *order.shape[1:])

    def train(seed):
        keys = jax.random.split(jax.random.key(seed), leading)
        _, losses = jax.device_get(train_all(keys, order))
        return losses.reshape(args.members, args.steps)

    packages = ["jax", "jaxlib", "optax"]
    small.serve(train, args, packages, time_compile=True)


if __name__ == "__main__":
    main()
