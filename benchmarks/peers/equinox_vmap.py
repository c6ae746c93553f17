"""Peer: an Equinox ensemble, ``eqx.filter_vmap`` over the models of K members.

The script follows Equinox's documentation: a mapped constructor makes the models, a
model takes one image (channels first) and is mapped over its batch, and one
``eqx.filter_jit`` step maps gradient and ``optax.sgd`` (learning rate 0.1, momentum
0.9) over the members on one device. It uses float32 and host batches, with a separate
random order for each member.
"""

import common
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 32, 3, padding="SAME", key=keys[0]),
            jax.nn.relu,
            eqx.nn.AvgPool2d(2, stride=2),
            eqx.nn.Conv2d(32, 64, 3, padding="SAME", key=keys[1]),
            jax.nn.relu,
            eqx.nn.AvgPool2d(2, stride=2),
            jnp.ravel,
            eqx.nn.Linear(7 * 7 * 64, 256, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(256, 10, key=keys[3]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(optimizer):
    @eqx.filter_jit
    @eqx.filter_vmap
    def step(state, images, labels):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), loss

    return step


def main():
    args = common.arguments(__doc__, members=2)
    mnist = common.load_mnist()
    images = mnist.train_images.reshape(-1, 1, 28, 28).astype(np.float32) / 255
    optimizer = optax.sgd(0.1, 0.9)
    models = eqx.filter_vmap(CNN)(jax.random.split(jax.random.key(0), args.members))
    params = eqx.filter(models, eqx.is_inexact_array)
    opt_state = eqx.filter_vmap(optimizer.init)(params)
    step = make_step(optimizer)
    order = common.endless_order(len(images), args.batch, args.members)
    batches = ((images[rows], mnist.train_labels[rows]) for rows in order)  # [K, B]
    packages = ["jax", "equinox", "optax"]
    common.serve_steps(step, (models, opt_state), batches, args, packages)


if __name__ == "__main__":
    main()
