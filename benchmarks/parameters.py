"""Compare steps whose time goes to their parameters with steps by hand.

    python -m pip install '.[bench]'
    python benchmarks/parameters.py [--cases NAME ...] [--rounds 5]

One member on one device takes steps by `epoch` and by `update`, beside a `lax.scan` and
a `jit` by hand that give their buffers away, and these by `fast_cpu.jit`; then four
members on two devices by `epoch`, beside four scans.  Optimizers are Optax's.  All take
turns, in a new order each round; a figure is the median of ms per step, of one member
or of all four.
"""

import argparse
import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import accelerators
import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import speed
from accelerators import loss_of

import fast_cpu as fc
import pjax_ensemble as pe

STEPS = 10  # of a round
SIZES = 784, 2048, 2048, 2048, 10
RANK = 8
WORDS, WIDTH = 20_000, 128
TOKENS, MODEL, HEADS, LENGTH = 8_000, 256, 4, 64


def normal(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


mlp = partial(accelerators.mlp_init, sizes=SIZES)
mlp_loss = loss_of(accelerators.mlp)


def adapters(key, frozen):  # of rank 8, for each layer of the backbone
    pairs = zip(jax.random.split(key, len(SIZES)), SIZES, SIZES[1:])
    return [(normal(k, a, RANK), jnp.zeros((RANK, b))) for k, a, b in pairs]


@loss_of
def adapters_loss(params, x, frozen):
    for (weight, bias), (down, up) in zip(frozen, params):
        z = x @ weight + bias + (x @ down) @ up
        x = jax.nn.relu(z)
    return z


def embedding(key):
    words, last = jax.random.split(key)
    return normal(words, WORDS, WIDTH), normal(last, WIDTH, 10)


@loss_of
def embedding_loss(params, x):
    return params[0][x].mean(axis=1) @ params[1]


def language(key):
    keys = jax.random.split(key, (3, 4))
    blocks = [accelerators.block_init(each, MODEL) for each in keys[1:]]
    words, out, *_ = keys[0]
    return normal(words, TOKENS, MODEL), blocks, normal(out, MODEL, TOKENS)


@loss_of
def language_loss(params, x):
    words, blocks, out = params
    x = words[x]
    for block in blocks:
        x = accelerators.block(x, HEADS, block)
    return jax.nn.standardize(x) @ out


def differences(key):
    return jax.random.normal(key, (128,) * 3)


def differences_loss(params, x):
    pairs = (jnp.roll(params, 1, axis) - params for axis in range(3))
    return sum(jnp.sum(pair**2) for pair in pairs) + x.mean()


def leaves(count, key):
    return [jax.random.normal(each, (1, 4)) for each in jax.random.split(key, count)]


def leaves_loss(params, x):
    return sum(jnp.mean((x * leaf) ** 2) for leaf in params)


def images(rng):
    return rng.normal(size=(320, 784)).astype(np.float32), np.arange(320) % 10


def bags(rng):
    return rng.integers(WORDS, size=(2560, 16)), np.arange(2560) % 10


def texts(rng):
    return tuple(rng.integers(TOKENS, size=(2, 40, LENGTH)))


def zeros(_):
    return (np.zeros((40, 1), np.float32),)


def ones(_):
    return (np.ones((80, 4), np.float32),)


ADAM, MOMENTUM = optax.adam(1e-3), optax.sgd(1e-2, momentum=0.9)
SGD = optax.sgd(1e-4)
# The parameters, the loss, the optimizer, the data and the batch.
CASES = {
    "MLP of 9.5 M, Adam": (mlp, mlp_loss, ADAM, images, 32),
    "MLP of 9.5 M, momentum": (mlp, mlp_loss, MOMENTUM, images, 32),
    "embedding of 2.6 M, Adam": (embedding, embedding_loss, ADAM, bags, 256),
    "embedding of 2.6 M, momentum": (embedding, embedding_loss, MOMENTUM, bags, 256),
    "language model of 5.7 M, Adam": (language, language_loss, ADAM, texts, 4),
    "adapters of a frozen MLP, Adam": (adapters, adapters_loss, ADAM, images, 32),
    "differences of 2 M, SGD": (differences, differences_loss, SGD, zeros, 4),
    **{
        f"{n} leaves of 4, SGD": (partial(leaves, n), leaves_loss, SGD, ones, 8)
        for n in (8, 200)
    },
}


def timed(run) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - begin) / STEPS * 1e3


def runs(name: str) -> dict:
    """Return functions that each take a round of steps, by name."""
    init, loss_fn, optimizer, draw, size = CASES[name]
    frozen = [mlp(jax.random.key(1))] * (init is adapters)
    data = jax.tree.map(jnp.asarray, draw(np.random.default_rng(0)))
    order = np.arange(STEPS * size).reshape(STEPS, size)
    batch = tuple(x[:size] for x in data)

    def ours(method, members=1):
        form = dict(members=members, devices=-(-members // 2))
        form["frozen"] = frozen[0] if frozen else None
        trainer = pe.make_trainer(init, loss_fn, optimizer, **form)
        state, calls = trainer.init(jax.random.key(0)), [batch] * STEPS
        if method == "epoch":
            calls = [(trainer.place(data), order)]
        take = speed.Training(state).take
        return partial(take, getattr(trainer, method), calls)

    def hand(function, *args, calls=1, members=1, jit=jax.jit):
        program = jit(function, donate_argnums=0)
        params = init(jax.random.key(0), *frozen)
        start = params, optimizer.init(params)

        def on(device):
            own, shared, given = jax.device_put((start, frozen, args), device)
            step = partial(program, frozen=shared)
            take = speed.Training(jax.tree.map(jnp.copy, own)).take
            return partial(take, step, [given] * calls)

        groups = [[on(jax.devices()[0])]]
        if members > 1:
            groups = [[on(device) for _ in "ab"] for device in jax.devices()[:2]]
        threads = ThreadPoolExecutor(2)
        return lambda: [*threads.map(lambda runs: [run() for run in runs], groups)]

    step = by_hand.make_step(loss_fn, optimizer)
    scan = by_hand.make_scan(step)
    return {
        "epoch": ours("epoch"),
        "scan": hand(scan, order, *data),
        "scan, fast": hand(scan, order, *data, jit=fc.jit),
        "update": ours("update"),
        "jit": hand(step, *batch, calls=STEPS),
        "jit, fast": hand(step, *batch, calls=STEPS, jit=fc.jit),
        "four, epoch": ours("epoch", 4),
        "four scans": hand(scan, order, *data, members=4),
    }


def measure(name: str, rounds: int) -> dict:
    """Return the median ms per step of each system, in turn."""
    systems = {what: partial(timed, run) for what, run in runs(name).items()}
    found = speed.take_turns(systems, rounds + 1)  # the first compiles
    return {what: statistics.median(times[1:]) for what, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pe.use_cpu_devices(2)
    print(f"JAX {jax.__version__}, ms per step")
    groups = ("epoch", "scan", "scan, fast"), ("update", "jit", "jit, fast")
    groups += (("four, epoch", "four scans"),)
    heads = ((*each, *(f"{each[0]} / {x}" for x in each[1:])) for each in groups)
    speed.print_head("case", *itertools.chain(*heads))
    for name in CASES:
        if name.startswith(tuple(args.cases)):
            ms, cells = measure(name, args.rounds), []
            for group in groups:
                ours, *hand = (ms[x] for x in group)
                cells += [ours, *hand, *(ours / x for x in hand)]
            speed.print_row(name, *(f"{x:.2f}" for x in cells))


if __name__ == "__main__":
    main()
