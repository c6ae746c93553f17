"""pjax_ensemble itself: K members on D devices, rounds of `epoch` or of `update`.

The default is the ensembling guide's CNN with SGD and a separate order per member.
`--sync` trains the Keras guide's network with Adam, as one model on all devices, and
`--apart` trains one member of that network on each device.  `--host` calls `update` for
each step, on batches from the host that `prefetch` makes in advance.  `--predict` calls
`predict_members` on as many images.  `--at-once N` computes N members of a device
together.
"""

import common
import jax

import pjax_ensemble as pe
import train_mnist

PACKAGES = "jax", "jaxlib", "numpy"


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
    layout = args.members, args.devices
    trainer = train_mnist.make_trainer(recipe, *layout, 1, mnist.form())
    host = mnist.train_images, mnist.train_labels
    data, state = trainer.place(host), trainer.init(jax.random.key(0))

    def predict(steps):
        trainer.predict_members(state, host[0][: steps * args.batch])
        return 0.0

    def train(state, rows):
        return trainer.epoch(state, data, rows)

    if args.predict:
        common.serve(predict, args, PACKAGES, time_compile=True)
    elif args.host:
        order = common.endless_order(len(host[0]), args.batch, 1)
        batches = ([array[rows] for array in host] for (rows,) in order)  # for all
        what = trainer.update, state, pe.prefetch(batches, size=2)
        common.serve_steps(*what, args, PACKAGES, time_compile=True)
    else:
        common.serve_epochs(train, state, len(host[0]), args, PACKAGES)


if __name__ == "__main__":
    main()
