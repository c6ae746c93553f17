"""Peer: Keras's guide "Multi-GPU distributed training with JAX", on D CPU devices.

One model is trained data-parallel: its variables are replicated over a mesh,
``jax.device_put`` splits each batch over the mesh, and a jitted step calls
``model.stateless_call`` and ``optimizer.stateless_apply``. The network is the guide's
own small convolutional one with batch normalization and dropout, under Adam at 0.001
with batches of 64. Three things differ from the guide. Batches are slices of the
float32 NumPy images, without tf.data. The call passes ``training=True``; the guide
omits it, so its batch normalization and dropout behave as in inference. And the loop
waits for every eighth step.
"""

import functools
import itertools
import os

os.environ["KERAS_BACKEND"] = "jax"

import common
import jax
import keras
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers


def get_model():
    convolutions = (
        layers.Conv2D(12, 3, padding="same", use_bias=False),
        layers.Conv2D(24, 6, strides=2, use_bias=False),
        layers.Conv2D(32, 6, strides=2, padding="same"),
    )
    inputs = keras.Input(shape=(28, 28, 1))
    x = layers.Rescaling(1 / 255)(inputs)
    for convolution in convolutions:
        x = layers.BatchNormalization(scale=False, center=True)(convolution(x))
        x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(256, activation="relu")(x)
    x = layers.Dropout(0.5)(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def make_step(model, optimizer):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute_loss(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return loss_fn(y, logits), non_trainable

    @jax.jit
    def train_step(state, x, y):
        trainable, non_trainable, opt_vars = state
        grad_fn = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, non_trainable), grads = grad_fn(trainable, non_trainable, x, y)
        trainable, opt_vars = optimizer.stateless_apply(opt_vars, grads, trainable)
        return (trainable, non_trainable, opt_vars), loss

    return train_step


def endless_batches(images, labels, batch):
    while True:  # in the files' order: the guide does not shuffle
        for start in range(0, len(images) - batch + 1, batch):
            yield images[start : start + batch], labels[start : start + batch]


def main():
    args = common.arguments(__doc__, batch=64, devices=2)
    keras.utils.set_random_seed(0)
    mnist = common.load_mnist()
    images, labels = mnist.train_images.astype(np.float32), mnist.train_labels
    model = get_model()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    train_step = make_step(model, optimizer)

    mesh = Mesh(mesh_utils.create_device_mesh((args.devices,)), ("batch",))
    data_sharding = NamedSharding(mesh, PartitionSpec("batch"))
    kinds = model.trainable_variables, model.non_trainable_variables
    state = tuple([v.value for v in kind] for kind in (*kinds, optimizer.variables))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))

    count = itertools.count(1)

    def step(state, x, y):
        state, loss = train_step(state, jax.device_put(x, data_sharding), y)
        if next(count) % 8 == 0:  # XLA:CPU aborts if too many steps pile up
            loss.block_until_ready()
        return state, loss

    batches = endless_batches(images, labels, args.batch)
    next_ones = functools.partial(itertools.islice, batches)
    common.serve_steps(step, state, next_ones, args, rows=args.batch)


if __name__ == "__main__":
    main()
