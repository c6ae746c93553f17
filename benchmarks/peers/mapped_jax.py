"""Shared by the peers in plain JAX: a member's training, mapped over the members.

This follows JAX's documentation: a member's steps are one function, a ``lax.scan`` of
an Optax optimizer over the member's order. ``jit(vmap(...))`` maps it over the members
on one device. With ``--devices D``, ``pmap(vmap(...))`` puts an equal part of the
members on each device. With ``--at-once 1``, ``lax.map`` replaces ``vmap``, and with
``--at-once N``, ``lax.map`` has ``batch_size=N``.
"""

import common
import jax
import jax.numpy as jnp
import optax

OPTIONS = {"devices": 1, "at_once": 0}  # 0 means all


def make_train_member(loss_fn, optimizer):
    """Return a function of a member's (params, opt_state), its order and the data."""

    def train_member(carry, order, x, y):
        def step(carry, rows):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, x[rows], y[rows])
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(step, carry, order)

    return train_member


def leading(args):
    """Return the members' axes: [K], or [D, K / D]."""
    if args.devices == 1:
        return (args.members,)
    return args.devices, args.members // args.devices


def over_members(function, args):
    """Map a function of one member over the members; return a function (own, shared).

    `own` has the arguments with the members' axes, `shared` the arguments that all
    members share.
    """
    batch_size = args.at_once if args.at_once > 1 else None

    def on_device(own, shared):  # own [M, ...]
        def of_member(own):
            return function(*own, *shared)

        if args.at_once == 0:
            return jax.vmap(of_member)(own)
        return jax.lax.map(of_member, own, batch_size=batch_size)

    if args.devices == 1:
        return jax.jit(on_device)
    return jax.pmap(on_device, in_axes=(0, None))


def serve(init, loss_fn, optimizer, data, args, *packages):
    """Serve rounds of steps; each round starts from the states of the last one."""

    def init_member(key):
        params = init(key)
        return params, optimizer.init(params)

    keys = jax.random.split(jax.random.key(0), leading(args))
    state = over_members(init_member, args)((keys,), ())
    train = over_members(make_train_member(loss_fn, optimizer), args)
    data = jax.tree.map(jnp.asarray, data)

    def train_all(state, rows):
        return train((state, rows.reshape(*leading(args), *rows.shape[1:])), data)

    packages = ["jax", "jaxlib", "optax", *packages]
    common.serve_epochs(train_all, state, len(data[0]), args, packages)
