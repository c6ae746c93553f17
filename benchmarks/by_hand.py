"""Training by hand, as one writes it in JAX and Optax: a step, its scan, its members.

This follows JAX's documentation: a member's steps are one function, a `lax.scan` of an
Optax optimizer over the member's order, and `jit(vmap(...))` maps it over the members.
Each program gives its state's buffers away.
"""

import jax
import optax
from jax import lax


def make_step(loss_fn, optimizer):
    """Return step((params, opt_state), *batch), which returns the new pair and loss."""

    def step(carry, *batch, frozen=()):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch, *frozen)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def make_scan(step):
    """Return scan(carry, order, *data), which takes a step for each row of order."""

    def scan(carry, order, *data, **options):
        def body(carry, rows):
            return step(carry, *(x[rows] for x in data), **options)

        return lax.scan(body, carry, order)

    return scan


def start(init, optimizer):
    """Return a function of a key that draws what a step takes: (params, opt_state)."""

    def first(key):
        params = init(key)
        return params, optimizer.init(params)

    return first


def over_members(function, devices=1, at_once=0):
    """Map function(state, *own, *shared) over the members: a program of these three.

    The first two have the members' axes, [K], or [D, K / D] with D devices.  All
    members of a device are mapped by `vmap`, or `at_once` of them, in turn, by
    `lax.map`.
    """

    def on_device(state, own, shared):
        def of_member(given):
            state, own = given
            return function(state, *own, *shared)

        if at_once == 0:
            return jax.vmap(of_member)((state, own))
        size = at_once if at_once > 1 else None
        return lax.map(of_member, (state, own), batch_size=size)

    if devices == 1:
        return jax.jit(on_device, donate_argnums=0)
    return jax.pmap(on_device, in_axes=(0, 0, None), donate_argnums=0)
