"""Measure where a training step's time goes: each layer by itself, on one core.

    python benchmarks/layers.py     (on Linux; elsewhere nothing binds it to one core)

For the ensembling guide's network and the Keras guide's: the value and the gradients of
each layer, for 32 images, which are a device's micro-batch of the first, and its part
of a batch of 64 for the second; and those of the whole network.  Rounds go around all
of them in turn.  A row has the median in microseconds an image, and for a layer with
weights the rate of its products: two operations a weight and position, forward, for the
weight's gradient and, but for the images, for the input's.
"""

import os
import statistics
import sys
import time
from pathlib import Path

if hasattr(os, "sched_setaffinity"):  # Linux; before JAX counts the cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist as tm

BATCH, ROUNDS = 32, 100


def draw(*shape):
    return jax.random.normal(jax.random.key(0), (BATCH, *shape))


def relu_pool(x):
    return pe.avg_pool(jax.nn.relu(x))


def head(layers, x):
    first, last = layers
    return pe.dense(last, jax.nn.relu(pe.dense(first, x)))


def norm_relu(norm, stats, x):
    return jax.nn.relu(pe.batch_norm(norm, stats, x, training=True)[0])


def cnn_parts():
    """Return {name: (function, arguments to differentiate, others, operations)}."""
    params, images = pe.cnn_init(jax.random.key(0)), draw(28, 28, 1)
    dense = params.dense1, params.dense2
    products = 2 * 196 * 9 * 32 * 64, 2 * (3136 * 256 + 256 * 10)
    return {
        "convolution 1": (pe.conv, [params.conv1], [images], 2 * 2 * 784 * 9 * 32),
        "relu, pooling 1": (relu_pool, [draw(28, 28, 32)], [], 0),
        "convolution 2": (
            pe.conv,
            [params.conv2, draw(14, 14, 32)],
            [],
            products[0] * 3,
        ),
        "relu, pooling 2": (relu_pool, [draw(14, 14, 64)], [], 0),
        "dense layers": (head, [dense, draw(3136)], [], products[1] * 3),
        "whole network": (pe.cnn, [params], [images], 0),
    }


def batch_norm_parts():
    params, stats = tm.batch_norm_cnn_init(jax.random.key(0))
    images, dense = draw(28, 28, 1), (params.dense1, params.dense2)

    def second(layer, x):
        return pe.conv(layer, x, stride=2, padding="VALID")

    def third(layer, x):
        return pe.conv(layer, x, stride=2)

    def network(params):
        return tm.batch_norm_cnn(params, stats, images, jax.random.key(1))[0]

    def norm(i, *shape):
        def function(layer, x):
            return norm_relu(layer, stats[i - 1], x)

        return function, [params[2 * i - 1], draw(*shape)], [], 0

    x1, x2 = draw(28, 28, 12), draw(12, 12, 24)
    return {
        "convolution 1": (pe.conv, [params.conv1], [images], 2 * 2 * 784 * 9 * 12),
        "normalization, relu 1": norm(1, 28, 28, 12),
        "convolution 2": (second, [params.conv2, x1], [], 6 * 144 * 36 * 12 * 24),
        "normalization, relu 2": norm(2, 12, 12, 24),
        "convolution 3": (third, [params.conv3, x2], [], 6 * 36 * 36 * 24 * 32),
        "normalization, relu 3": norm(3, 6, 6, 32),
        "dense layers": (head, [dense, draw(32)], [], 6 * (32 * 256 + 256 * 10)),
        "whole network": (network, [params], [], 0),
    }


def compiled(function, wanted, others):
    """Return a call of the value and its gradients by what is wanted."""

    @jax.jit
    def both(wanted, others):
        value, pull_back = jax.vjp(lambda *x: function(*x, *others), *wanted)
        return value, pull_back(value)

    return lambda: jax.block_until_ready(both(wanted, others))


def main() -> None:
    for title, parts in {
        "the ensembling guide's CNN": cnn_parts(),
        "the Keras guide's batch-norm network": batch_norm_parts(),
    }.items():
        calls = {name: compiled(*part[:3]) for name, part in parts.items()}
        seconds = {name: [] for name in calls}
        for _ in range(ROUNDS + 1):  # the first compiles
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        print(
            f"\n{title}\n\n| part | µs an image | share | GFLOP/s |\n|---|---|---|---|"
        )
        took = {n: statistics.median(x[1:]) / BATCH * 1e6 for n, x in seconds.items()}
        for name, (*_, operations) in parts.items():
            rate = f"{operations / took[name] / 1e3:.0f}" if operations else ""
            share = took[name] / took["whole network"]
            print(f"| {name} | {took[name]:.1f} | {share:.0%} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
