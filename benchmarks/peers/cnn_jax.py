"""Peer: members of our CNN in plain JAX, one member's training mapped (mapped_jax.py).

Network, loss and settings are as in ours.py, also the optimizer: ``optax.sgd`` with
learning rate 0.1 and momentum 0.9. But a step takes its whole batch, without
micro-batches.
"""

import common
import mapped_jax
import optax

import pjax_ensemble as pe
import train_mnist


def loss_fn(params, images, labels):
    logits = pe.cnn(params, train_mnist.scale(images))
    return pe.softmax_cross_entropy(logits, labels).mean()


def main():
    args = common.arguments(__doc__, members=8, **mapped_jax.OPTIONS)
    mnist = common.load_mnist()
    data = mnist.train_images, mnist.train_labels
    mapped_jax.serve(pe.cnn_init, loss_fn, optax.sgd(0.1, 0.9), data, args)


if __name__ == "__main__":
    main()
