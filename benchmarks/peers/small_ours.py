"""pjax_ensemble itself: a hundred small networks (small.py) as one trainer."""

import jax
import small  # finds the module, as `common` does

import pjax_ensemble as pe


def init(key):
    keys = jax.random.split(key, 2)
    return [pe.dense_init(*each) for each in zip(keys, small.SIZES, small.SIZES[1:])]


def loss_fn(params, x, y):
    mean, spread = pe.dense(params[1], jax.nn.relu(pe.dense(params[0], x))).T
    variance = jax.nn.softplus(spread) + small.LEAST_VARIANCE
    return pe.gaussian_nll(mean, variance, y).mean()


def main():
    args = small.arguments(__doc__, devices=2, at_once=1)
    adam = pe.adam(small.LEARNING_RATE)
    form = {"members": args.members, "at_once": args.at_once}
    trainer = pe.make_trainer(init, loss_fn, adam, **form)
    x, y = small.load_concrete()
    data = trainer.place((x, y))
    order = small.make_orders(len(x), args.members, args.steps)

    def train(seed):
        state, losses = trainer.epoch(trainer.init(jax.random.key(seed)), data, order)
        trainer.gather(state)
        return losses

    small.serve(train, args, ["jax", "jaxlib", "numpy"], time_compile=True)


if __name__ == "__main__":
    main()
