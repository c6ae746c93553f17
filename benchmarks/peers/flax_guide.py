"""Peer: Flax's guide "Ensembling on multiple devices", as a reader would run it.

There is one linen CNN per device under ``jax.pmap``. Every step takes one batch,
replicated to all members, through a pmapped gradient call and then a pmapped update of
a ``TrainState``. The guide, and the MNIST example that it builds on, have the settings:
SGD at 0.1 with momentum 0.9, images as one float32 JAX array on the first device, and
an order from ``jax.random.permutation`` per epoch. ``--whole-job`` trains two epochs,
each with the guide's test pass, which also computes gradients, over all 10,000 test
images at once.
"""

import functools
import itertools

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, linen
from flax.training.train_state import TrainState


class CNN(linen.Module):
    @linen.compact
    def __call__(self, x):
        for features in (32, 64):
            x = linen.relu(linen.Conv(features, kernel_size=(3, 3))(x))
            x = linen.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = linen.relu(linen.Dense(256)(x))
        return linen.Dense(10)(x)


@functools.partial(jax.pmap, static_broadcasted_argnums=(1, 2))
def create_train_state(key, learning_rate, momentum):
    cnn = CNN()
    params = cnn.init(key, jnp.ones([1, 28, 28, 1]))["params"]
    tx = optax.sgd(learning_rate, momentum)
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)


@functools.partial(jax.pmap, axis_name="ensemble")
def apply_model(state, images, labels):
    def loss_fn(params):
        logits = CNN().apply({"params": params}, images)
        targets = jax.nn.one_hot(labels, 10)
        return optax.softmax_cross_entropy(logits, targets).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss = jax.lax.pmean(loss, axis_name="ensemble")
    probs = jax.lax.pmean(jax.nn.softmax(logits), axis_name="ensemble")
    return grads, loss, jnp.mean(jnp.argmax(probs, -1) == labels)


@jax.pmap
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


def epoch_order(key, num_images, batch):
    perms = jax.random.permutation(key, num_images)
    return perms[: num_images // batch * batch].reshape(-1, batch)


def endless_order(key, num_images, batch):
    while True:
        key, epoch_key = jax.random.split(key)
        yield from epoch_order(epoch_key, num_images, batch)


def train(state, data, order):
    losses, accuracies = [], []
    for perm in order:
        images = jax_utils.replicate(data["image"][perm, ...])
        labels = jax_utils.replicate(data["label"][perm, ...])
        grads, loss, accuracy = apply_model(state, images, labels)
        state = update_model(state, grads)
        losses.append(jax_utils.unreplicate(loss))
        accuracies.append(jax_utils.unreplicate(accuracy))
    return state, np.mean(losses), np.mean(accuracies)


def get_datasets():
    mnist = common.load_mnist()
    _, *train_ds, test_images, test_labels, _ = mnist
    return [
        {"image": jnp.float32(images) / 255, "label": labels}
        for images, labels in (train_ds, (test_images, test_labels))
    ]


def run_whole_job(state, key, train_ds, test_ds, batch):
    test_ds = jax_utils.replicate(test_ds)
    for epoch in (1, 2):
        key, epoch_key = jax.random.split(key)
        order = epoch_order(epoch_key, len(train_ds["image"]), batch)
        state, loss, accuracy = train(state, train_ds, order)
        tested = apply_model(state, test_ds["image"], test_ds["label"])
        _, test_loss, test_accuracy = jax_utils.unreplicate(tested)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}; ", end="")
        print(f"test loss {test_loss:.4f}, accuracy {test_accuracy:.2%}", flush=True)


def main():
    args = common.arguments(__doc__, ["whole-job"], members=2)
    jax.config.update("jax_num_cpu_devices", args.members)
    train_ds, test_ds = get_datasets()
    key, init_key = jax.random.split(jax.random.key(0))
    state = create_train_state(jax.random.split(init_key, args.members), 0.1, 0.9)
    if args.whole_job:
        run_whole_job(state, key, train_ds, test_ds, args.batch)
        return

    num_images = len(train_ds["image"])
    for _ in epoch_order(key, num_images, args.batch):
        pass  # iterating compiles every shape by which an order is cut into rows
    order = endless_order(key, num_images, args.batch)

    def run(steps):
        nonlocal state
        state, loss, _ = train(state, train_ds, itertools.islice(order, steps))
        jax.block_until_ready(state)
        return float(loss)

    common.serve(args, run)


if __name__ == "__main__":
    main()
