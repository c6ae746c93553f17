"""Peer: a network of `networks.py` in JAX, as one trainer or, with --by-hand, in `jit`.

Two members are on two devices, or with --sync one model, and with --one one member is
on one device.  A trainer takes steps by `epoch`, or with --update by `update`.  By
hand, on one device, each member takes its step in turn, on batches from the host; with
--fast, through `fast`.  With --bfloat16, weights and inputs become this type in the
loss, and with --on-request products alone, by JAX's option.  With --first-calls, the
peer prints how long the first calls take, and ends.
"""

import contextlib
import os
import time
from unittest import mock

import by_hand
import common
import equinox as eqx
import flax.linen as nn
import flax_guide
import jax
import jax.numpy as jnp
import jax_members
import networks
import numpy as np
import optax
import resnet
import speed

import fast_cpu as fc
import pjax_ensemble as pe
import train_mnist

MOMENTUM = 0.9  # of running statistics, as in PyTorch, where it is called 0.1


def active(x, training, **how):
    return nn.relu(nn.BatchNorm(not training, momentum=MOMENTUM, **how)(x))


class ConvNorm(nn.Module):
    width: int
    window: tuple = (3, 3)
    stride: int = 1
    groups: int = 1

    @nn.compact
    def __call__(self, x, training):
        how = dict(feature_group_count=self.groups, use_bias=False)
        x = nn.Conv(self.width, self.window, self.stride, **how)(x)
        return active(x, training)


class WideBlock(nn.Module):
    """A block with activation first (Zagoruyko and Komodakis 2016)."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, training):
        def conv(x, size=3, stride=1):
            return nn.Conv(self.width, (size, size), stride, use_bias=False)(x)

        y = active(x, training)
        wider = x.shape[-1] < self.width
        shortcut = conv(y, 1, self.stride) if wider else x
        return shortcut + conv(active(conv(y, stride=self.stride), training))


class WideResNet(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        for width, stride in (32, 1), (64, 2), (128, 2):
            x = WideBlock(width, stride)(x, training)
            x = WideBlock(width, 1)(x, training)
        x = active(x, training)
        return nn.Dense(10)(x.mean((1, 2)))


class Separable(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = ConvNorm(32, stride=2)(x, training)
        for width, stride in networks.SEPARABLE:
            ins = x.shape[-1]
            x = ConvNorm(ins, stride=stride, groups=ins)(x, training)
            x = ConvNorm(width, (1, 1))(x, training)
        return nn.Dense(10)(x.mean((1, 2)))


class ConvNeXt(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        x = nn.Conv(64, (2, 2), 2)(x)
        for _ in range(4):
            y = nn.LayerNorm()(nn.Conv(64, (7, 7), feature_group_count=64)(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(y)))
        return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        def twice(x, width):
            return ConvNorm(width)(ConvNorm(width)(x, training), training)

        kept = []
        for width in 16, 32:
            kept.append(twice(x, width))
            x = nn.max_pool(kept[-1], (2, 2), (2, 2))
        x = twice(x, 64)
        for width in 32, 16:
            x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
            x = twice(jnp.concatenate([x, kept.pop()], -1), width)
        return nn.Conv(2, (1, 1))(x)


class VolumeNet(nn.Module):
    """A small nnU-Net (Isensee et al. 2021)."""

    @nn.compact
    def __call__(self, x, training):
        def twice(x, width, stride=1):
            for each in stride, 1:
                x = nn.Conv(width, (3, 3, 3), each)(x)
                x = nn.leaky_relu(nn.InstanceNorm()(x))
            return x

        kept = []
        for i, width in enumerate(networks.VOLUMES):
            kept.append(twice(x if i == 0 else kept[-1], width, 1 + (i > 0)))
        x = kept.pop()
        for width in networks.VOLUMES[-2::-1]:
            x = nn.ConvTranspose(width, (2, 2, 2), (2, 2, 2))(x)
            x = twice(jnp.concatenate([x, kept.pop()], -1), width)
        return nn.Conv(3, (1, 1, 1))(x)


class Decoder(nn.Module):
    """A DCGAN's generator (Radford et al. 2016) of categories of brightness."""

    @nn.compact
    def __call__(self, x, training):
        x = nn.Dense(4 * 4 * 128)(x).reshape(-1, 4, 4, 128)
        for width in 64, 32, 8:
            x = active(x, training)
            x = nn.ConvTranspose(width, (4, 4), (2, 2))(x)
        return x


class Causal(nn.Module):
    """A temporal convolutional network (Bai et al. 2018), without dropout."""

    @nn.compact
    def __call__(self, x, training):
        x = nn.Conv(64, (1,))(x)
        for dilation in networks.CAUSAL:
            y, how = x, dict(padding="CAUSAL", kernel_dilation=dilation)
            for _ in range(2):
                y = nn.relu(nn.Conv(64, (3,), **how)(y))
            x = nn.relu(x + y)
        return nn.Dense(10)(x)


class FlaxBatchNormCNN(nn.Module):
    """The network of Keras's guide, without dropout."""

    @nn.compact
    def __call__(self, x, training):
        layers = (12, 3, 1, "SAME"), (24, 6, 2, "VALID"), (32, 6, 2, "SAME")
        for i, (width, window, stride, padding) in enumerate(layers):
            how = dict(padding=padding, use_bias=i == 2)
            x = nn.Conv(width, (window, window), stride, **how)(x)
            x = active(x, training, use_scale=False)
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.mean((1, 2)))))


class Signals(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        for width in networks.SIGNALS:
            x = ConvNorm(width, (7,), 2)(x, training)
        return nn.Dense(10)(x.mean(1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(128))(x)[:, -1])


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        for width in networks.DENSE[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(networks.DENSE[-1])(x)


class Plain(nn.Module):
    """A network that is the same in training."""

    net: nn.Module

    @nn.compact
    def __call__(self, x, training):
        return self.net(x)


def plan():
    """List the convolutions of ResNet-20: (channels in, channels out, stride)."""
    layers, width = [(3, 16, 1)], 16
    for i, wide in enumerate(resnet.WIDTHS):
        for j in range(3):
            layers += [(width, wide, 2 if i and not j else 1), (wide, wide, 1)]
            width = wide
    return layers


def residual(conv, x, shrink):
    """Run ResNet-20; conv(x) is its next convolution and normalization."""
    x = jax.nn.relu(conv(x))
    for ins, outs, stride in plan()[1::2]:
        y = conv(jax.nn.relu(conv(x)))
        x = jax.nn.relu(y + shrink(x, stride, (0, outs - ins)))
    return x


def our_resnet(example):
    def init(key):
        *keys, last = jax.random.split(key, len(plan()) + 1)
        sizes = [(key, ins, outs) for key, (ins, outs, _) in zip(keys, plan())]
        convs = [pe.conv_init(*each, bias=False) for each in sizes]
        norms, stats = zip(*(pe.batch_norm_init(outs) for _, _, outs in sizes))
        return (convs, norms, pe.dense_init(last, 64, 10)), stats

    def apply(params, stats, x, training):
        *layers, last = params
        layers, moved = zip(*layers, stats, plan()), []

        def conv(x):
            kernel, norm, seen, (_, _, stride) = next(layers)
            x, how = pe.conv(kernel, x, stride=stride), dict(momentum=MOMENTUM)
            x, seen = pe.batch_norm(norm, seen, x, training=training, **how)
            moved.append(seen)
            return x

        def shrink(x, stride, more):
            return jnp.pad(x[:, ::stride, ::stride], [*[(0, 0)] * 3, more])

        return pe.dense(last, residual(conv, x, shrink).mean((1, 2))), tuple(moved)

    return init, apply


class EquinoxNet(eqx.Module):
    convs: list
    norms: list
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, len(plan()) + 1)
        self.convs = [
            eqx.nn.Conv2d(ins, outs, 3, stride, 1, use_bias=False, key=key)
            for key, (ins, outs, stride) in zip(keys, plan())
        ]
        how = dict(axis_name="batch", momentum=MOMENTUM, mode="batch")
        self.norms = [eqx.nn.BatchNorm(outs, **how) for _, outs, _ in plan()]
        self.last = eqx.nn.Linear(64, 10, key=keys[-1])

    def __call__(self, x, state):
        layers = zip(self.convs, self.norms)

        def conv(x):
            nonlocal state
            kernel, norm = next(layers)
            x, state = norm(kernel(x), state)
            return x

        def shrink(x, stride, more):
            return jnp.pad(x[:, ::stride, ::stride], [more, (0, 0), (0, 0)])

        x = residual(conv, x, shrink)
        return self.last(x.mean((1, 2))), state


def equinox(example):
    make = eqx.nn.make_with_state(EquinoxNet)
    net, state = make(jax.random.key(0))
    rest = eqx.partition(net, eqx.is_inexact_array)[1]
    form = jax.tree.structure(state)

    def init(key):
        net, state = make(key)
        return eqx.filter(net, eqx.is_inexact_array), jax.tree.leaves(state)

    def apply(params, state, x, training):
        net = eqx.nn.inference_mode(eqx.combine(params, rest), not training)
        state = jax.tree.unflatten(form, state)
        mapped = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = mapped(x.transpose(0, 3, 1, 2), state)
        return logits, jax.tree.leaves(state)

    return init, apply


def our_cnn(example):
    def init(key):
        return pe.cnn_init(key), ()

    return init, lambda params, _, x, training: (pe.cnn(params, x), ())


def our_batch_norm_cnn(example):
    def apply(params, stats, x, training):
        key = training or None
        with mock.patch.object(pe, "dropout", lambda key, x, rate: x):
            return train_mnist.batch_norm_cnn(params, stats, x, key)

    return train_mnist.batch_norm_cnn_init, apply


# A network of Flax, or a function of an example of its inputs, [1, ...].
NETWORKS = {
    "CNN, our layers": our_cnn,
    "CNN, Flax": Plain(flax_guide.CNN()),
    "batch-norm CNN, our layers": our_batch_norm_cnn,
    "batch-norm CNN, Flax": FlaxBatchNormCNN(),
    "ResNet-20, our layers": our_resnet,
    "ResNet-20, Flax": resnet.ResNet(),
    "ResNet-20, Equinox": equinox,
    "WRN-16-2": WideResNet(),
    "depthwise separable": Separable(),
    "ConvNeXt": ConvNeXt(),
    "U-Net": UNet(),
    "3-D U-Net": VolumeNet(),
    "decoder": Decoder(),
    "signals": Signals(),
    "causal": Causal(),
    "LSTM": LSTM(),
    "transformer": Plain(jax_members.Transformer()),
    **{
        name: Plain(jax_members.Transformer(*sizes))
        for name, sizes in networks.TRANSFORMERS.items()
    },
    "MLP": MLP(),
    "MLP, batch of 32": MLP(),
}


def make(name, dtype=jnp.float32):
    """Return init(key), loss_fn, apply_fn and arrays of a network of `networks.py`."""
    x, y = networks.draw(name)
    net, example = NETWORKS[name], jnp.asarray(x[:1])
    linen = isinstance(net, nn.Module)
    init, run = resnet.functions(net, example) if linen else net(example)

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def apply(params, state, x, training):
        logits, state = run(jax.tree.map(cast, params), state, cast(x), training)
        return logits.astype(jnp.float32), state

    def loss_fn(params, state, key, x, y):
        logits, state = apply(params, state, x, True)
        return pe.softmax_cross_entropy(logits, y).mean(), state

    return init, loss_fn, lambda *args: apply(*args, False)[0], (x, y)


def first_calls(**calls):
    """Print the seconds that each call takes, which returns arrays."""
    found = {}
    for name, call in calls.items():
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found[name] = time.perf_counter() - begin
    common.say(found)


def batches(data, order):
    """Yield batches of the data: those of each row of an order, [steps, batch]."""
    return ([x[rows] for x in data] for rows in order)


def type_of(args):
    return jnp.bfloat16 if args.bfloat16 else jnp.float32


def serve_trainer(args, members, devices):
    init, loss_fn, apply_fn, data = make(args.case, type_of(args))
    how = dict(members=members, apply_fn=apply_fn, stateful=True, devices=devices)
    trainer = pe.make_trainer(init, loss_fn, pe.sgd(0.01), **how)
    placed, training = trainer.place(data), speed.Training(None)
    order = common.endless_order(len(data[0]), args.batch, 1)

    def begin():
        training.state = trainer.init(jax.random.key(0))
        return training.state

    def take(method, steps):
        rows = common.next_steps(order, steps)[0]
        calls = [(placed, rows)] if method == "epoch" else batches(data, rows)
        return jax.block_until_ready(training.take(getattr(trainer, method), calls))

    def train(steps):
        _, losses = take("update" if args.update else "epoch", steps)
        return float(np.mean(jax.device_get(losses)))

    def predict(steps):
        rows = np.arange(steps * args.batch) % len(data[0])
        return float(trainer.predict_members(training.state, data[0][rows]).mean())

    if args.first_calls:
        each = dict(update=lambda: take("update", 1), epoch=lambda: take("epoch", 2))
        return first_calls(init=begin, **each, predict=lambda: predict(1))
    begin()
    return common.serve(args, train, predict, rows=members * args.batch)


def serve_by_hand(args, members):
    init, loss_fn, apply_fn, data = make(args.case, type_of(args))
    optimizer = optax.sgd(0.01, momentum=0.9)

    def compiled(f):
        return fc.jit(f) if args.fast else jax.jit(f)

    @compiled
    def begin(key):
        params, state = init(key)
        return params, optimizer.init(params), state

    def one_step(model, *batch):
        params, opt_state, state = model
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = gradient(params, state, None, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, state), loss

    step, scan = compiled(one_step), compiled(by_hand.make_scan(one_step))

    @compiled
    def forward(params, state, x):
        return jax.nn.softmax(apply_fn(params, state, x))

    training = speed.Training([*jax.random.split(jax.random.key(0), members)])
    order = common.endless_order(len(data[0]), args.batch, 1)

    def begin_all():
        training.state = [*map(begin, training.state)]
        return training.state

    def each_step(models, *batch):
        return zip(*(step(model, *batch) for model in models))

    def train(steps):
        calls = batches(data, common.next_steps(order, steps)[0])
        _, losses = jax.block_until_ready(training.take(each_step, calls))
        return float(np.mean(jax.device_get(losses)))

    def predict(steps):
        made = [
            np.asarray(forward(params, state, x))
            for x, _ in batches(data, common.next_steps(order, steps)[0])
            for params, _, state in training.state
        ]
        return float(np.mean(made))

    if args.first_calls:
        rows = common.next_steps(order, 2)[0]

        def epoch():
            return scan(training.state[0], rows, *data)

        each = dict(update=lambda: train(1), epoch=epoch)
        return first_calls(init=begin_all, **each, predict=lambda: predict(1))
    begin_all()
    return common.serve(args, train, predict, rows=members * args.batch)


def main():
    flags = "sync", "one", "update", "by-hand", "fast", "bfloat16", "on-request"
    flags += ("first-calls",)
    args = common.arguments(__doc__, flags, networks.CASES, steps=2, seconds=1.0)
    if networks.KEPT.items() <= os.environ.items():
        fc.keep_memory()
    members = 1 if args.sync or args.one else networks.MEMBERS
    precision = jax.default_matmul_precision("bfloat16")
    with precision if args.on_request else contextlib.nullcontext():
        if args.by_hand:
            return serve_by_hand(args, members)
        devices = 1 if args.one else 2
        pe.use_cpu_devices(devices, keep_memory=False)
        return serve_trainer(args, members, devices)


if __name__ == "__main__":
    main()
