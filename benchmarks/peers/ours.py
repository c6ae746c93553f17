"""pjax_ensemble itself: K members on D devices, rounds of `epoch` or of `update`.

The ensembling guide's CNN with SGD, a batch and an order for each member; with
`--sync`, the Keras guide's network with Adam, one model on all devices, and with
`--apart` a member of that on each.  `--host` calls `update` for each step, on batches
from the host that `prefetch` makes ahead; `--predict` calls `predict_members` on as
many images.  `--at-once N` computes so many members of a device together.
"""

import itertools

import common
import jax
import numpy as np

import pjax_ensemble as pe
import train_mnist


def endless_order(num_images, batch_size, members):
    for epoch in itertools.count():
        order = pe.epoch_order(num_images, batch_size, members=members, epoch=epoch)
        yield from order.swapaxes(0, 1)  # [K, B] a step


def host_batches(arrays, order):
    for rows in order:
        yield tuple(array[rows[0]] for array in arrays)  # one batch for all members


def main():
    flags = ["sync", "apart", "host", "predict"]
    args = common.arguments(__doc__, flags, members=2, devices=2, at_once=1)
    keras = args.sync or args.apart
    network = "batchnorm" if keras else "cnn"
    recipe = train_mnist.RECIPES[network]._replace(
        batch_size=args.batch, max_shift=0, schedule="constant", at_once=args.at_once
    )
    if not keras:
        recipe = recipe._replace(learning_rate=0.1)
    if args.sync:
        args.members = 1
    mnist = common.load_mnist()
    trainer = train_mnist.make_trainer(
        recipe, args.members, args.devices, 1, mnist.form()
    )
    host = mnist.train_images, mnist.train_labels
    data = trainer.place(host)
    order = endless_order(len(host[0]), args.batch, args.members)
    state = trainer.init(jax.random.key(0))

    def run(steps):
        nonlocal state
        if args.predict:
            trainer.predict_members(state, host[0][: steps * args.batch])
            return 0.0
        if args.host:
            losses = []
            batches = host_batches(host, itertools.islice(order, steps))
            for batch in pe.prefetch(batches, size=2):
                state, loss = trainer.update(state, *batch)
                losses.append(loss)
        else:
            rows = common.next_steps(order, steps)
            state, losses = trainer.epoch(state, data, rows)
        jax.block_until_ready(state)
        return float(np.mean(jax.device_get(losses)))

    common.serve(run, args, ["jax", "jaxlib", "numpy"], time_compile=True)


if __name__ == "__main__":
    main()
