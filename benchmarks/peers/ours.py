"""pjax_ensemble itself: the ensembles of cases.py as one trainer, by `epoch`.

The CNN is the script's.  `--sync` trains the network of Keras's guide with Adam, as one
model on all devices, and `--apart` one member of that network on each device.  `--host`
calls `update` for each step, on batches from the host that `prefetch` makes in advance.
`--predict` calls `predict_members` on as many images.  `--at-once N` computes N members
of a device together.
"""

import functools
import itertools

import cases
import common
import jax
import jax_members

import pjax_ensemble as pe
import train_mnist


def make_script_trainer(args):
    keras = args.sync or args.apart
    recipe = train_mnist.RECIPES["batchnorm" if keras else "cnn"]._replace(
        batch_size=args.batch, max_shift=0, schedule="constant", at_once=args.at_once
    )
    if not keras:
        recipe = recipe._replace(learning_rate=0.1)
    given = train_mnist.data_settings(common.load_mnist())
    settings = recipe._replace(members=args.members, **given)
    return train_mnist.make_trainer(settings, args.devices)


def main():
    flags, options = ["sync", "apart", "host", "predict"], dict(members=2, at_once=1)
    args = common.arguments(__doc__, flags, cases.SETTINGS, devices=2, **options)
    args.members = 1 if args.sync else args.members
    host = cases.LOAD[args.case]()
    if args.case == "cnn":
        trainer = make_script_trainer(args)
    else:
        form = {name: getattr(args, name) for name in ("members", "devices", "at_once")}
        adam = pe.adam(cases.RATES[args.case])
        trainer = pe.make_trainer(*jax_members.LOSSES[args.case], adam, **form)
    data, state = trainer.place(host), trainer.init(jax.random.key(0))

    def predict(steps):
        trainer.predict_members(state, host[0][: steps * args.batch])
        return 0.0

    def train(state, rows):
        return trainer.epoch(state, data, rows)

    def train_anew(seed, order):
        state, losses = train(trainer.init(jax.random.key(seed)), order)
        trainer.gather(state)
        return losses

    if args.case == "small":
        cases.serve_anew(train_anew, args)
    elif args.predict:
        common.serve(args, predict)
    elif args.host:
        order = common.endless_order(len(host[0]), args.batch, 1)
        batches = ([array[rows] for array in host] for (rows,) in order)  # for all
        next_ones = functools.partial(itertools.islice, pe.prefetch(batches, size=2))
        common.serve_steps(trainer.update, state, next_ones, args)
    else:
        common.serve_epochs(train, state, len(host[0]), args)


if __name__ == "__main__":
    main()
