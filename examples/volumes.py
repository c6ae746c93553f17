"""Segment volumes by 3-D U-Nets of Flax, and bound the share of lesions that is missed.

    python -m pip install flax
    python volumes.py --plot volumes.png

Three members tell bright balls (A) and dark balls (B) from background.  Whole volumes
calibrate the probability from which on a voxel is marked, since voxels of one volume
are not independent.  Some test volumes have a block of stripes, which training had not.
"""

import argparse
import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

try:
    import flax.linen as nn
except ImportError as error:
    sys.exit(f"{error}: python -m pip install flax")

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ensemble_metrics as em
import pjax_ensemble as pe

SHAPE, STEPS, RISK = (20, 20, 10), 150, 0.1
COLORS = {"none": "0.93", "A": "#e69f00", "B": "#0072b2", "unseen": "black"}


def make_volumes(draw, count, more=()):  # [N, H, W, D, 1], and labels [N, H, W, D]
    places = np.moveaxis(np.indices(SHAPE), 0, -1)
    patterns = {1: 1, 2: -1, 3: 1 - 2 * (places[..., 0] // 2 % 2)}
    volumes = draw.normal(size=(count, *SHAPE)).astype(np.float32)
    labels = np.zeros(volumes.shape, int)
    for volume, label in zip(volumes, labels):
        contrast, shown = draw.uniform(0.8, 2), np.zeros(SHAPE)  # one per volume
        for kind in [*draw.integers(1, 3, size=draw.integers(2, 5)), *more]:
            off = abs(places - draw.uniform(3, np.array(SHAPE) - 4))
            far = off.max(axis=-1) if kind == 3 else np.linalg.norm(off, axis=-1)
            inside = far <= draw.uniform(2.5, 4.5)
            label[inside], shown = kind, np.where(inside, patterns[kind], shown)
        volume += contrast * shown
    return volumes[..., None], labels


def lecun_normal(key, shape, dtype, **_):  # Flax's, drawn flat: it compiles faster
    draws = jax.random.truncated_normal(key, -2, 2, (math.prod(shape),), dtype)
    return draws.reshape(shape) / (0.87962566 * math.prod(shape[:-1]) ** 0.5)


class UNet(nn.Module):  # [B, H, W, D, 1] to logits [B, H, W, D, 3]
    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, kernel_init=lecun_normal)
        up = nn.ConvTranspose(8, (2, 2, 2), (2, 2, 2), kernel_init=lecun_normal)
        fine = nn.silu(conv(8, (3, 3, 3))(x))
        coarse = nn.silu(conv(16, (3, 3, 3), strides=2)(fine))
        coarse = nn.silu(conv(16, (3, 3, 3))(coarse))
        both = jnp.concatenate([fine, nn.silu(up(coarse))], axis=-1)
        return conv(3, (1, 1, 1))(nn.silu(conv(8, (3, 3, 3))(both)))


MODEL = UNet()


def init(key):
    return MODEL.init(key, np.zeros((1, *SHAPE, 1), np.float32))


def loss_fn(params, volumes, labels):
    return pe.softmax_cross_entropy(MODEL.apply(params, volumes), labels).mean()


def missed(lesion, labels, thresholds):  # shares of each volume's lesion voxels [N, T]
    each = [np.sort(p[y > 0]) for p, y in zip(lesion, labels)]
    return np.array([np.searchsorted(p, thresholds) / max(1, len(p)) for p in each])


def control_risk(losses, thresholds):  # losses [n, T] rise from 0, at most to 1
    bounds = (losses.sum(axis=0) + 1) / (len(losses) + 1)  # Angelopoulos et al. 2022
    return thresholds[bounds <= RISK].max(initial=0)


def print_scores(probs, labels):  # [K, N, H, W, D, 3] and [N, H, W, D]
    report = em.ensemble_report(probs, labels)
    line = "{}: Dice A {:.3f}, B {:.3f}, NLL {negative_log_likelihood:.4f}, "
    line += "ECE {expected_calibration_error:.4f}"
    rows = [*zip(probs, report["member"]), (probs.mean(axis=0), report["ensemble"])]
    for i, (p, scores) in enumerate(rows):
        name = f"member {i}" if i < len(probs) else "ensemble"
        pairs = [(p.argmax(axis=-1) == kind, labels == kind) for kind in (1, 2)]
        dice = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in pairs]
        print(line.format(name, *dice, **scores))


def draw_slices(file, threshold, rows):  # name -> five slices [H, W]
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    grid = figure.subplots(3, 5, height_ratios=(1, 1, 0.06))
    columns = {
        "volume": ("gray", -4, 4),
        "label": (ListedColormap([*COLORS.values()]), -0.5, 3.5),
        f"P(A or B), marked from {threshold:.2f}": ("cividis", 0, 1),
        "entropy, nats": ("cividis", 0, 1.1),
        "mutual information, nats": ("cividis", 0, 0.4),
    }
    for line, (name, slices) in zip(grid, rows.items()):
        for j, (title, (colors, low, high)) in enumerate(columns.items()):
            image = line[j].imshow(slices[j], cmap=colors, vmin=low, vmax=high)
            line[j].set(xticks=[], yticks=[])
            grid[0, j].set_title(title, fontsize=9)
            figure.colorbar(image, cax=grid[2, j], orientation="horizontal")
        line[0].set_ylabel(name)
        line[2].contour(slices[2], [threshold], colors="white", linewidths=1.5)
    grid[2, 1].set_xticks(range(4), COLORS)
    figure.savefig(file, dpi=90)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw slices, with matplotlib")
    file = parser.parse_args(argv).plot
    pe.use_cpu_devices()  # before JAX is first used

    draw = np.random.default_rng(0)
    train, calibrate, test = (make_volumes(draw, n) for n in (64, 200, 200))
    unseen = make_volumes(draw, 50, more=[3])
    adam = pe.adam(pe.cosine_schedule(0.02, STEPS))
    trainer = pe.make_trainer(init, loss_fn, adam, members=3, apply_fn=MODEL.apply)
    order = draw.integers(64, size=(3, STEPS, 4))
    state, _ = trainer.epoch(trainer.init(jax.random.key(0)), train, order)

    def predict(volumes):  # [3, N, H, W, D, 3], and three maps [N, H, W, D]
        probs = trainer.predict_members(state, volumes)
        unsure = em.predictive_entropy(probs), em.mutual_information(probs)
        return probs, (1 - probs.mean(axis=0)[..., 0], *unsure)  # of A or B

    (_, maps), thresholds = predict(calibrate[0]), np.linspace(0, 1, 1001)
    threshold = control_risk(missed(maps[0], calibrate[1], thresholds), thresholds)
    (probs, known), (_, new) = predict(test[0]), predict(unseen[0])
    print_scores(probs, test[1])
    wrong, striped = probs.mean(axis=0).argmax(axis=-1) != test[1], unseen[1] == 3
    for name, a, b in zip(("entropy", "mutual information"), known[1:], new[1:]):
        largest = [x.max(axis=(1, 2, 3)) for x in (a, b)]
        pairs = (a[~wrong], a[wrong]), (b[~striped], b[striped]), largest
        areas = "wrong voxels {:.2f}, unseen voxels {:.2f}, their volumes {:.2f}"
        print(f"AUROC of {name}:", areas.format(*(em.auroc(*pair) for pair in pairs)))

    rows = {"known kinds": (test, known, 2), "with an unseen kind": (unseen, new, 3)}
    for name, ((volumes, labels), maps, kind) in rows.items():
        lost, marked = missed(maps[0], labels, [threshold]), maps[0] >= threshold
        false = labels[marked] == 0
        print(f"{name}: missed {lost.mean():.1%}, false {false.mean():.1%}")
        counts = [(labels == each).sum(axis=(1, 2)) for each in (1, kind)]  # [2, N, D]
        counts = np.prod(counts, axis=0)  # the slice with much of both is drawn
        n, depth = np.unravel_index(counts.argmax(), counts.shape)
        rows[name] = [x[n, ..., depth] for x in (volumes[..., 0], labels, *maps)]
    if file:
        draw_slices(file, threshold, rows)


if __name__ == "__main__":
    main()
