"""Peer: a network of `networks.py` in PyTorch, a loop over the members.

With --alone, one member in a thread of its own, for two such processes at once, and
with --one, one member in two threads.  With --channels-last, images and kernels have
PyTorch's layout of this name.  With --bfloat16, networks run under `autocast`, and with
--on-request products of float32 alone may take this type.
"""

import common
import networks
import torch
import torch.nn.functional as F
from cases import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, WIDTH
from torch import nn


def conv_norm(
    ins, outs, window=3, stride=1, groups=1, conv=nn.Conv2d, norm=nn.BatchNorm2d
):
    how = dict(stride=stride, padding=window // 2, groups=groups, bias=False)
    return nn.Sequential(conv(ins, outs, window, **how), norm(outs), nn.ReLU())


class Block(nn.Module):
    def __init__(self, ins, outs, stride, norm):
        super().__init__()
        self.first = conv_norm(ins, outs, 3, stride, norm=norm)
        self.second = conv_norm(outs, outs, norm=norm)[:2]
        self.stride, self.more = stride, outs - ins

    def forward(self, x):
        y = self.second(self.first(x))
        x = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + (F.pad(x, (0, 0, 0, 0, 0, self.more)) if self.more else x))


class Head(nn.Module):
    """Average over the image or the signal, and map to ten classes."""

    def __init__(self, ins, norm=None):
        super().__init__()
        self.norm, self.last = norm or nn.Identity(), nn.Linear(ins, 10)

    def forward(self, x):
        return self.last(self.norm(x.flatten(2).mean(2)))


def resnet(norm=nn.BatchNorm2d):
    blocks, width = [], 16
    for i, outs in enumerate((16, 32, 64)):
        for j in range(3):
            blocks.append(Block(width, outs, 2 if i and not j else 1, norm))
            width = outs
    return nn.Sequential(conv_norm(3, 16, norm=norm), *blocks, Head(64))


class WideBlock(nn.Module):
    def __init__(self, ins, outs, stride):
        super().__init__()
        how = dict(padding=1, bias=False)
        self.before, self.between = nn.BatchNorm2d(ins), nn.BatchNorm2d(outs)
        self.first = nn.Conv2d(ins, outs, 3, stride, **how)
        self.second = nn.Conv2d(outs, outs, 3, **how)
        wider = ins < outs
        self.shortcut = nn.Conv2d(ins, outs, 1, stride, bias=False) if wider else None

    def forward(self, x):
        y = F.relu(self.before(x))
        shortcut = self.shortcut(y) if self.shortcut else x
        return shortcut + self.second(F.relu(self.between(self.first(y))))


def wide_resnet():
    blocks, ins = [], 16
    for width, stride in (32, 1), (64, 2), (128, 2):
        blocks += [WideBlock(ins, width, stride), WideBlock(width, width, 1)]
        ins = width
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return nn.Sequential(first, *blocks, nn.BatchNorm2d(ins), nn.ReLU(), Head(ins))


def separable():
    layers, ins = [conv_norm(3, 32, 3, 2)], 32
    for width, stride in networks.SEPARABLE:
        layers += [conv_norm(ins, ins, 3, stride, ins), conv_norm(ins, width, 1)]
        ins = width
    return nn.Sequential(*layers, Head(ins))


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        layers = nn.Linear(64, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 64)
        self.inner = nn.Sequential(nn.LayerNorm(64, eps=1e-6), *layers)

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        return x + self.inner(y).permute(0, 3, 1, 2)


def convnext():
    blocks = [Next() for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 64, 2, 2), *blocks, Head(64, nn.LayerNorm(64)))


class UNet(nn.Module):
    def __init__(self, twice, ins, stride, up, last, shrink):
        super().__init__()
        small, wide, most = networks.VOLUMES
        self.down = nn.ModuleList([twice(ins, small), twice(small, wide, stride)])
        self.middle = twice(wide, most, stride)
        self.ups = nn.ModuleList([up(most, wide, 2, 2), up(wide, small, 2, 2)])
        self.after = nn.ModuleList([twice(most, wide), twice(wide, small)])
        self.last, self.shrink = last, shrink

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(layer(x))
            x = self.shrink(kept[-1])
        x = self.middle(x)
        for up, layer in zip(self.ups, self.after):
            x = layer(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


def unet():
    def twice(ins, outs, stride=1):
        return nn.Sequential(conv_norm(ins, outs, 3, stride), conv_norm(outs, outs))

    last, shrink = nn.Conv2d(16, 2, 1), nn.MaxPool2d(2)
    return UNet(twice, 3, 1, nn.ConvTranspose2d, last, shrink)


def volume_net():  # strides shrink
    def once(ins, outs, stride):
        norm = nn.InstanceNorm3d(outs, affine=True)
        return [nn.Conv3d(ins, outs, 3, stride, 1), norm, nn.LeakyReLU()]

    def twice(ins, outs, stride=1):
        return nn.Sequential(*once(ins, outs, stride), *once(outs, outs, 1))

    return UNet(twice, 1, 2, nn.ConvTranspose3d, nn.Conv3d(16, 3, 1), nn.Identity())


def decoder():
    layers, ins = [nn.Linear(64, 4 * 4 * 128), nn.Unflatten(1, (128, 4, 4))], 128
    for width in 64, 32, 8:
        layers += [nn.BatchNorm2d(ins), nn.ReLU()]
        layers.append(nn.ConvTranspose2d(ins, width, 4, 2, 1))
        ins = width
    return nn.Sequential(*layers)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 64, 1), nn.Conv1d(64, 10, 1)
        pairs = [
            [nn.Conv1d(64, 64, 3, dilation=d) for _ in "ab"] for d in networks.CAUSAL
        ]
        self.pairs = nn.ModuleList(map(nn.ModuleList, pairs))

    def forward(self, x):
        x = self.first(x)
        for dilation, pair in zip(networks.CAUSAL, self.pairs):
            y = x
            for conv in pair:
                y = F.relu(conv(F.pad(y, (2 * dilation, 0))))
            x = F.relu(x + y)
        return self.last(x)


def cnn():
    layers, ins = [], 1
    for width in 32, 64:
        layers += [nn.Conv2d(ins, width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
        ins = width
    dense = nn.Linear(7 * 7 * 64, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers, nn.Flatten(), *dense)


class Bias(nn.Module):
    """Add a bias, as batch normalization does that has no scale."""

    def __init__(self, outs):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outs))

    def forward(self, x):
        return x + self.bias[:, None, None]


def batch_norm_cnn():
    layers, ins = [], 1
    for width, *how in (12, 3, 1, 1), (24, 6, 2), (32, 6, 2, 2):
        layers.append(nn.Conv2d(ins, width, *how, bias=width == 32))
        layers += [nn.BatchNorm2d(width, affine=False), Bias(width), nn.ReLU()]
        ins = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def signals():
    layers, ins = [], 4
    for width in networks.SIGNALS:
        how = dict(conv=nn.Conv1d, norm=nn.BatchNorm1d)
        layers.append(conv_norm(ins, width, 7, 2, **how))
        ins = width
    return nn.Sequential(*layers, Head(ins))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.LSTM(16, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.last(self.cell(x)[0][:, -1])


def small():
    """Make a small network, with weights drawn as by JAX (He et al. 2015)."""
    layers = nn.Linear(8, 50), nn.Linear(50, 2)
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


class Attention(nn.Module):
    """Causal attention; if not fused, as products that `torch.func.vmap` can map."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x):
        batch, length, width = x.shape
        x = self.inputs(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = x.permute(2, 0, 3, 1, 4)  # each [B, heads, length, ...]
        if self.fused:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.outputs(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width, *how):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, *how))
        wide = HIDDEN // WIDTH * width
        hidden = nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), *hidden)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.hidden(x)


class Transformer(nn.Module):
    def __init__(
        self,
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        words=VOCABULARY,
        length=LENGTH,
        fused=False,
    ):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layers = [Layer(width, heads, fused) for _ in range(layers)]
        last = nn.LayerNorm(width), nn.Linear(width, words)
        self.layers = nn.Sequential(*layers, *last)

    def forward(self, tokens):
        return self.layers(self.embed(tokens) + self.positions)


def mlp():
    layers = []
    for ins, outs in zip(networks.DENSE, networks.DENSE[1:]):
        layers += [nn.Linear(ins, outs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "CNN": cnn,
    "batch-norm CNN": batch_norm_cnn,
    "ResNet-20": resnet,
    "WRN-16-2": wide_resnet,
    "depthwise separable": separable,
    "ConvNeXt": convnext,
    "U-Net": unet,
    "3-D U-Net": volume_net,
    "decoder": decoder,
    "signals": signals,
    "causal": Causal,
    "LSTM": LSTM,
    "transformer": Transformer,
    "MLP": mlp,
}


def network(name):
    """Return what makes a network of `networks.py`."""
    if name in networks.TRANSFORMERS:
        sizes, (length,) = networks.TRANSFORMERS[name], networks.SHAPES[name].inputs
        return lambda: Transformer(*sizes, length, fused=True)
    return NETWORKS[name.split(",")[0]]


def channels_first(name, x):
    """Return images, volumes or signals in the order of PyTorch's convolutions."""
    moved = x.ndim >= 4 or name in ("signals", "causal")
    return x.movedim(-1, 1).contiguous() if moved else x


def loss_of(name, made, labels):
    tokens = name.startswith("transformer")
    return F.cross_entropy(made.movedim(-1, 1) if tokens else made, labels)


def main():
    flags = "alone", "one", "channels-last", "bfloat16", "on-request"
    args = common.arguments(__doc__, flags, networks.CASES, steps=2, seconds=1.0)
    name, members = args.case, 1 if args.alone or args.one else networks.MEMBERS
    if args.on_request:
        torch.set_float32_matmul_precision("medium")
    cast = torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16)
    torch.set_num_threads(1 if args.alone else 2)
    torch.manual_seed(0)
    x, y = map(torch.tensor, networks.draw(name))
    x, y = channels_first(name, x), y.long()
    models = [network(name)() for _ in range(members)]
    if args.channels_last:
        volumes = x.ndim == 5
        last = torch.channels_last_3d if volumes else torch.channels_last
        models = [model.to(memory_format=last) for model in models]
        x = x.contiguous(memory_format=last) if x.ndim >= 4 else x
    optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in models]
    order = common.endless_order(len(x), args.batch, 1)

    def train(steps):
        losses = []
        for rows in common.next_steps(order, steps)[0]:
            for model, optimizer in zip(models, optimizers):
                model.train()
                optimizer.zero_grad(set_to_none=True)
                with cast:
                    loss = loss_of(name, model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def predict(steps):
        made = 0.0
        with torch.inference_mode(), cast:
            for rows in common.next_steps(order, steps)[0]:
                for model in models:
                    made += model.eval()(x[rows]).mean().item()
        return made

    common.serve(args, train, predict, rows=members * args.batch)


if __name__ == "__main__":
    main()
