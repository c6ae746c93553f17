"""Compare training and predicting with Flax's and Equinox's convolutions with `jit`.

    python benchmarks/convolutions.py [NAME ...] [--rounds 5] [--steps 4]
    python benchmarks/convolutions.py --check [300] [--first 0]

Four members run on two virtual CPU devices.  A round takes the given number of steps in
`epoch` and, one member after another, in a `jit` written by hand.  Then it predicts 512
images in `predict_members`, in a `jit` of one member after another, and in `jit(vmap)`.
One row per network has medians: steps of all members per second, images per second, and
our speed over the speed by hand.

With --check, the script compares random convolutions and their gradients with sums in
float64, from the first seed on, prints the seeds of wrong ones, and fails if there are
any.
"""

import argparse
import itertools
import statistics
import time

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from speed import print_head, print_row
from sums import check

import pjax_ensemble as pe

MEMBERS, BATCH, IMAGES, SHAPE = 4, 32, 512, (16, 16, 3)


class Linen(nn.Module):
    axes: int = 2  # of images
    groups: int = 1  # of the second layer; if several or scanned, the first strides
    scanned: int = 0  # further layers in a scan, each rematerialized

    @nn.compact
    def __call__(self, x):
        window, few = (3,) * self.axes, self.groups > 1 or self.scanned > 0
        x = x if self.axes == 2 else x.reshape(len(x), -1, x.shape[-1])
        x = nn.relu(nn.Conv(32, window, strides=1 + few)(x))
        x = nn.relu(nn.Conv(64, window, feature_group_count=self.groups)(x))
        if self.scanned:
            layer = nn.remat(nn.Conv, prevent_cse=False)(64, window)
            axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
            scan = nn.scan(lambda layer, x, _: (nn.relu(layer(x)), None), **axes)
            x, _ = scan(layer, x, jnp.zeros(self.scanned))
        return nn.Dense(10)(x.mean(axis=range(1, x.ndim - 1)))


def linen(**options):
    net = Linen(**options)

    def init(key):
        return net.init(key, jnp.zeros((1, *SHAPE))), ()

    return init, lambda params, state, images: (net.apply(params, images), state)


class Block(nnx.Module):
    def __init__(self, ins, outs, stride, rngs):
        how = dict(use_bias=False, rngs=rngs)
        self.conv1 = nnx.Conv(ins, outs, (3, 3), stride, **how)
        self.conv2 = nnx.Conv(outs, outs, (3, 3), **how)
        self.skip = nnx.Conv(ins, outs, (1, 1), stride, **how)
        self.norm1, self.norm2 = (nnx.BatchNorm(outs, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + self.skip(x))


def resnet():
    def make(key):
        rngs, widths = nnx.Rngs(key), [(3, 16, 1), (16, 32, 2), (32, 64, 2)]
        blocks = [Block(*width, rngs) for width in widths]
        end = [lambda x: x.mean(axis=(1, 2)), nnx.Linear(64, 10, rngs=rngs)]
        return nnx.split(nnx.Sequential(*blocks, *end), nnx.Param, ...)

    graph = make(0)[0]

    def apply(params, state, images):
        model = nnx.merge(graph, params, state, copy=True)
        return model(images), nnx.state(model, nnx.Not(nnx.Param))

    return lambda key: make(key)[1:], apply


def equinox():
    def make(key):
        keys, relu = jax.random.split(key, 3), eqx.nn.Lambda(jax.nn.relu)
        layers = [eqx.nn.Conv2d(3, 32, 3, padding=1, key=keys[0]), relu]
        layers += [eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]), relu]
        layers += [eqx.nn.AdaptiveAvgPool2d(1), eqx.nn.Lambda(jnp.ravel)]
        net = eqx.nn.Sequential([*layers, eqx.nn.Linear(64, 10, key=keys[2])])
        return eqx.partition(net, eqx.is_array)

    rest = make(jax.random.key(0))[1]

    def apply(params, state, images):
        net = eqx.combine(params, rest)
        return jax.vmap(net)(images.transpose(0, 3, 1, 2)), state

    return lambda key: (make(key)[0], ()), apply


# init(key) -> (params, state), and apply(params, state, images) -> (logits, state).
NETWORKS = {
    "Flax Linen": linen,
    "one axis": lambda: linen(axes=1),
    "strides and groups": lambda: linen(groups=4),
    "scanned, rematerialized": lambda: linen(scanned=2),
    "Flax NNX ResNet": resnet,
    "Equinox, NCHW": equinox,
}


def compare(make, rounds: int, steps: int) -> list[list[float]]:
    """Return seconds of training, ours and by hand, and of predicting in three ways."""
    (init, apply), rng = make(), np.random.default_rng(0)
    images = rng.normal(size=(IMAGES, *SHAPE)).astype(np.float32)
    labels, optimizer = rng.integers(10, size=IMAGES), optax.sgd(0.01, momentum=0.9)
    order = np.arange(steps * BATCH).reshape(steps, BATCH) % IMAGES

    def loss_fn(params, state, _, images, labels):
        logits, state = apply(params, state, images)
        return pe.softmax_cross_entropy(logits, labels).mean(), state

    def logits(params, state, images):
        return apply(params, state, images)[0]

    @jax.jit
    def step(params, opt_state, state, *batch):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (_, state), grads = gradient(params, state, None, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state

    options = dict(members=MEMBERS, apply_fn=logits, stateful=True)
    trainer = pe.make_trainer(init, loss_fn, optimizer, **options)
    state = trainer.init(jax.random.key(0))
    start, data = trainer.gather(state), trainer.place((images, labels))
    each = [jax.tree.map(lambda x, i=i: x[i], start[:3]) for i in range(MEMBERS)]
    model = jax.device_put((start.params, start.model_state))
    alone = jax.jit(lambda *args: jax.nn.softmax(logits(*args)))
    together = jax.jit(jax.vmap(alone, in_axes=(0, 0, None)))
    times, now = [[], [], [], [], []], time.perf_counter
    for _ in range(rounds + 1):
        clock = [now()]
        state, _ = trainer.epoch(state, data, order)
        jax.block_until_ready(state.params)
        clock.append(now())
        for rows in order:
            each = [step(*one, images[rows], labels[rows]) for one in each]
        jax.block_until_ready(each)
        clock.append(now())
        trainer.predict_members(state, images)
        clock.append(now())
        jax.block_until_ready([alone(one[0], one[2], images) for one in each])
        clock.append(now())
        np.asarray(together(*model, images))
        clock.append(now())
        for taken, (begin, end) in zip(times, itertools.pairwise(clock)):
            taken.append(end - begin)
    return [taken[1:] for taken in times]  # the first round compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="the beginnings of networks' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", type=int, nargs="?", const=300, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args()
    if args.check:
        raise SystemExit(bool(check(args.check, args.first)))
    pe.use_cpu_devices(2)
    trained = "steps", "by hand", "ours is"
    print_head("network", *trained, "images", "by hand", "by vmap", "ours is")
    for name, make in NETWORKS.items():
        if not args.names or name.startswith(tuple(args.names)):
            times = map(statistics.median, compare(make, args.rounds, args.steps))
            ours, hand, *predicted = times
            rates = [f"{args.steps / x:.1f}" for x in (ours, hand)]
            images = [f"{IMAGES / x:,.0f}" for x in predicted]
            beside = min(predicted[1:]) / predicted[0]
            print_row(name, *rates, f"{hand / ours:.2f}x", *images, f"{beside:.2f}x")


if __name__ == "__main__":
    main()
