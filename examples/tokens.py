"""Train a language model of Flax, and see which characters it expects.

    python -m pip install flax
    python tokens.py --plot tokens.png

Three members read every 16th line of pjax_ensemble.py.  Inputs are a dict of arrays,
tokens and a mask of the text [N, T]; outputs are the logits of every token [N, T, V].
"""

import argparse
import inspect
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

LENGTH, SEEN, STEPS = 48, 6, 100


def as_inputs(lines):  # characters [N, T], 0 where a line has ended; and the mask
    lines = [line[:LENGTH].ljust(LENGTH, "\0").encode("ascii") for line in lines]
    tokens = np.stack([np.frombuffer(line, np.uint8) for line in lines])
    return {"tokens": tokens.astype(np.int32), "mask": tokens > 0}


class NextCharacter(nn.Module):  # from the last six, everywhere in a line
    @nn.compact
    def __call__(self, inputs):
        now = nn.Embed(128, 16)(inputs["tokens"])  # [N, T, 16]
        past = [jnp.pad(now, ((0, 0), (i, 0), (0, 0))) for i in range(SEEN)]
        seen = jnp.concatenate([x[:, : now.shape[1]] for x in past], axis=-1)
        return nn.Dense(128)(nn.tanh(nn.Dense(64)(seen)))  # [N, T, 128]


MODEL = NextCharacter()


def loss_fn(params, inputs):
    logits, mask = MODEL.apply(params, inputs)[:, :-1], inputs["mask"][:, 1:]
    losses = pe.softmax_cross_entropy(logits, inputs["tokens"][:, 1:])
    # The mean over the text; where devices share a member, over the text of them all.
    return (losses * mask).sum() / pe.replica_mean(mask.sum())


def draw(file, lines, entropy):  # entropy [N, T - 1], of the characters from the second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    shown = np.full((len(lines), LENGTH), np.nan)
    for i, line in enumerate(lines):
        shown[i, 1 : len(line)] = entropy[i, : len(line) - 1]
        for j, character in enumerate(line):
            axes.text(j, i, character, ha="center", va="center", family="monospace")
    image = axes.imshow(shown, cmap="YlOrBr", vmin=0, vmax=5, aspect="auto", alpha=0.8)
    figure.colorbar(image, label="entropy before the character (nats)")
    axes.set(xlabel="place in the line (characters)", yticks=[])
    axes.spines[:].set_visible(False)
    figure.savefig(file, dpi=80)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw it, with matplotlib")
    args = parser.parse_args(argv)
    pe.use_cpu_devices()  # before JAX is first used

    lines = inspect.getsource(pe).splitlines()
    train, test = as_inputs(lines[::16]), as_inputs(lines[1::16])
    trainer = pe.make_trainer(
        lambda key: MODEL.init(key, as_inputs([" "])),
        loss_fn,
        pe.adam(0.01),
        members=3,
        apply_fn=MODEL.apply,
    )
    state = trainer.init(jax.random.key(0))
    order = np.random.default_rng(0).integers(len(train["mask"]), size=(3, STEPS, 16))
    state, _ = trainer.epoch(state, (train,), order)
    probs = trainer.predict_members(state, test)[:, :, :-1]  # [3, N, T - 1, 128]
    mask, tokens = test["mask"][:, 1:], test["tokens"][:, 1:]
    report = em.ensemble_report(probs[:, mask], tokens[mask])
    line = "{}: NLL {negative_log_likelihood:.3f} nats, accuracy {accuracy:.2f}"
    for i, scores in enumerate(report["member"]):
        print(line.format(f"member {i}", **scores))
    print(line.format("ensemble", **report["ensemble"]))
    if args.plot:
        rows = [i for i, line in enumerate(lines[1::16]) if len(line) >= LENGTH - 8][
            :10
        ]
        entropy = em.predictive_entropy(probs.reshape(3, -1, 128)).reshape(mask.shape)
        draw(args.plot, [lines[1::16][i][:LENGTH] for i in rows], entropy[rows])


if __name__ == "__main__":
    main()
