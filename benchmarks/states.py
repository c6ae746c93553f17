"""Compare random programs on states with the same programs, one operation at a time.

    python benchmarks/states.py [300] [--first 0]

A program shifts, sorts, scatters and scans the leaves of a tree: histories, queues,
rings, masks, counters, random keys.  The tree is a model state, an optimizer's state,
`hyper`, `frozen`, or a part of the parameters or of the batch.  XLA has faults for
arrays that a program computes and not for its arguments, and a trainer's programs
compute a member's arrays.

A seed determines each case.  The script compares as many cases as it is told, from the
first seed on, prints the seeds of wrong ones, and fails if there are any.  Cases that
are as wrong in a step by hand under `jax.jit` are XLA's own; it counts these apart.
"""

import argparse
import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pjax_ensemble as pe

PLACES = "model", "optimizer", "params", "hyper", "frozen", "batch"


def rows(b, *places):
    return b[jnp.array(places)]


def down(b, x, i):
    return b.at[1:].set(b[:-1]).at[0].set(x)


def up(b, x, i):
    return b.at[:-1].set(b[1:]).at[-1].set(x)


def twice(b):
    return b.at[jnp.array([0, 1, 0])]


def slide(b, source, target):
    part = lax.dynamic_slice_in_dim(b, source, len(b) - 1)
    return lax.dynamic_update_slice_in_dim(b, part, target, 0)


def write(b, x, i):
    return lax.dynamic_update_slice_in_dim(b, jnp.stack([x, x]), i, 0)


# Operations on rows b [n, ...] of any type, given a new row x and a count i.
MOVES = {
    "down": down,
    "up": up,
    "shift": lambda b, x, i: b.at[1:].set(b[:-1]),
    "push": lambda b, x, i: jnp.concatenate([x[None], b[:-1]]),
    "roll": lambda b, x, i: jnp.concatenate([b[-1:], b[:-1]]),
    "reverse": lambda b, x, i: b[::-1],
    "ring": lambda b, x, i: b.at[i % len(b)].set(x),
    "queue": lambda b, x, i: write(b, x, i % len(b)),
    "write at the end": lambda b, x, i: write(b, x, i + 99),
    "slide down": lambda b, x, i: slide(b, i * 0, i + 99),
    "slide up": lambda b, x, i: slide(b, i + 99, 0),
    "swap": lambda b, x, i: b.at[jnp.array([0, -1])].set(rows(b, -1, 0)),
    "set equal": lambda b, x, i: twice(b).set(rows(b, -1, 0, -1)),
    "fall": lambda b, x, i: lax.fori_loop(
        1, len(b), lambda j, b: b.at[len(b) - j].set(b[len(b) - j - 1]), b
    ),
    "cond": lambda b, x, i: lax.cond(i % 2 == 0, down, up, b, x, i),
}
# The same for numbers alone.
SUMS = {
    "sort": lambda b, x, i: jnp.sort(b, axis=0),
    "cumsum": lambda b, x, i: jnp.cumsum(b, axis=0, dtype=b.dtype),
    "cummax": lambda b, x, i: lax.cummax(b),
    "add": lambda b, x, i: twice(b).add(rows(b, 1, -1, 0)),
    "max": lambda b, x, i: twice(b).max(rows(b, 1, -1, 0)),
    "scan": lambda b, x, i: lax.scan(lambda c, row: (row - c, c), x, b)[1],
}


def draw(seed, place):
    """Return a tree and a function (tree, number) -> tree, and the names of its steps.

    Leaves "a" and "b" have one form, which may be of numbers, booleans or random keys.
    """
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(["f", "f", "f", "i", "b", "key", "raw"]))
    if place == "params":
        kind = "f"
    length = 8 if place == "batch" else int(rng.choice([3, 4, 6]))
    shape = length, *rng.choice([1, 2, 3, 16], rng.integers(3)).tolist()

    def leaf(kind):
        if kind in ("key", "raw"):
            keys = jax.random.split(jax.random.key(rng.integers(99)), shape[0])
            return keys if kind == "key" else jax.random.key_data(keys)
        numbers = rng.integers(-9, 10, shape)
        numbers = rng.normal(size=shape) if kind == "f" else numbers
        return jnp.asarray(numbers, {"f": "float32", "i": "int32", "b": "bool"}[kind])

    tree = {"a": leaf(kind), "b": leaf(kind), "f": leaf("f")}
    if place not in ("params", "batch"):
        tree["count"] = jnp.int32(0)
    plan = {}
    for name in "a", "b", "f":
        names = [*MOVES] + [*SUMS] * (name == "f" or kind in ("f", "i"))
        more = ["down", "shift", "slide down"]  # the likeliest to be wrong
        step, flat = str(rng.choice(names + 6 * more)), bool(rng.random() < 0.2)
        if rng.random() < 0.8:
            plan[name] = step, flat
    trade = bool(rng.random() < 0.3)

    def apply(name, flat, b, number, i):
        typed = jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
        if typed or b.dtype == jnp.uint32:
            x = jax.random.fold_in(b[0], i)
        else:
            x = number if b.dtype == jnp.float32 else i * 7 + 3
            x = jnp.full(b.shape[1:], x % 2 if b.dtype == bool else x, b.dtype)
        f = (MOVES | SUMS)[name]
        if flat and not typed:
            return f(b.reshape(-1), x.reshape(-1)[0], i).reshape(b.shape)
        return f(b, x, i)

    def move(tree, number):
        new = dict(jax.tree.map(jnp.asarray, tree))
        i = new.get("count", 0) + jnp.int32(1)
        for name, step in plan.items():
            new[name] = apply(*step, new[name], number, i)
        if trade:
            new["a"], new["b"] = new["b"], new["a"]
        return new | ({"count": i} if "count" in new else {})

    return tree, move, f"{plan}, {trade=}, {kind}{[*shape]}"


def data(x):
    """Return an array, or the data of a typed random key."""
    typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed else x


def shown(tree):
    """Return a tree's leaves as numbers that float32 holds."""

    numbers = jax.tree.map(data, tree)
    return jax.tree.map(lambda x: x >> 9 if x.dtype == jnp.uint32 else x, numbers)


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def take(update, state, batches, axis=0):
    """Update a state by each batch; stack the metrics along an axis."""
    found = []
    for batch in batches:
        state, metrics = update(state, *batch)
        found.append(jax.device_get(metrics))
    return state, jax.tree.map(lambda *x: np.stack(x, axis), *found)


def read(tree):
    """Return a number that depends on every float of a tree."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            total += (x.reshape(-1) * jnp.arange(1.0, x.size + 1)).sum() / x.size
    return jnp.tanh(total)


class Case:
    """A random tree in a random place, in functions as users write them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng([seed, 1])
        self.place = str(self.rng.choice(PLACES))
        self.stateful, self.aux = self.place == "model", self.rng.random() < 0.6
        self.skip = bool(self.rng.random() < 0.3)
        self.tree, self.move, self.steps = draw(seed, self.place)
        self.given = self.place in ("hyper", "frozen")
        x = self.rng.normal(size=(2, 8, 3)).astype(np.float32)
        if self.skip and self.rng.random() < 0.5:
            x[1, 3] = np.nan
        own = (self.tree,) if self.place == "batch" else ()
        self.batches = [(x, x @ np.float32([1, -2, 3]), *own) for x in x]
        self.optimizer = pe.sgd(0.1)
        if self.place == "optimizer":
            self.optimizer = pe.Optimizer(lambda params: self.tree, self.optimize)
        if self.place == "hyper":
            self.optimizer = lambda h: pe.sgd(0.1 + 0.05 * read(self.move(h, 1.0)))
        self.options = dict(has_aux=True, stateful=self.stateful)
        self.options["skip_nonfinite"] = self.skip

    def more(self, i):
        """Return member i's hyper, or the frozen tree, as the last arguments."""
        if self.place == "hyper":  # members differ in it
            return ({**self.tree, "f": self.tree["f"] + i},)
        return (self.tree,) if self.given else ()

    def init(self, key, *more):
        params = {"w": jax.random.normal(key, (3,)), "tree": {}}
        if self.place == "params":
            params["tree"] = self.tree
        if self.given:
            params["moved"] = read(self.move(more[0], 2.0))
        return (params, self.tree) if self.stateful else params

    def divide(self, params, args, count):
        """Return the `count` arguments that are data, and the tree, moved."""
        if self.stateful:
            tree, data = args[0], args[-count:]
        else:
            data, more = args[:count], args[count:]  # of the batch, hyper or frozen
            tree = more[0] if more else params["tree"]
        return data, self.move(tree, params["w"].sum()) if tree else tree

    def loss(self, params, *args):
        (x, y), new = self.divide(params, args, 2)
        errors = jnp.square(x @ params["w"] - y).mean()
        loss = errors + (0.1 + params["w"].mean()) * read(new)
        aux = shown(new) if self.aux else {}
        return loss, (new, aux) if self.stateful else aux

    def optimize(self, grads, state, params=None):
        new = self.move(state, grads["w"].sum())
        return jax.tree.map(lambda g: -0.1 * g - 0.01 * read(new), grads), new

    def apply(self, params, *args):
        (inputs,), new = self.divide(params, args, 1)
        n = len(inputs)
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), shown(new))
        return inputs @ params["w"] + read(new), each

    # One member by hand

    def optimizer_of(self, more):
        return self.optimizer(*more) if self.place == "hyper" else self.optimizer

    def start(self, i):
        init_key, key = jax.random.split(jax.random.fold_in(jax.random.key(7), i))
        more = self.more(i)
        made = self.init(init_key, *more)
        params, model_state = made if self.stateful else (made, ())
        optimizer = self.optimizer_of(more)
        return pe.train_state(params, optimizer, model_state=model_state, key=key)

    def step(self, state, batch, more):
        params, opt_state, model_state, key = state
        model = (model_state, None) if self.stateful else ()
        value = jax.value_and_grad(self.loss, has_aux=True)
        (loss, aux), grads = value(params, *model, *batch, *more)
        new_model_state, aux = aux if self.stateful else (model_state, aux)
        updates, opt_state = self.optimizer_of(more).update(grads, opt_state, params)
        new = pe.apply_updates(params, updates), opt_state, new_model_state
        if self.skip:
            leaves = jax.tree.leaves((loss, grads))
            ok = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
            new = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, state[:3])
            loss = jnp.where(ok, loss, jnp.nan)
        key = jax.random.split(key)[0] if self.stateful else key
        return pe.TrainState(*new, key), (loss, aux)

    def by_hand(self, way, i, jit=lambda f: f):
        """Return member i's result, from one operation after another or one program."""
        if way == "init":
            return jit(lambda: self.start(i))()
        with jax.disable_jit():
            state = self.start(i)
        if way == "predict":
            model = (state.params, state.model_state)[: 1 + self.stateful]
            return jit(self.apply)(*model, self.batches[0][0], *self.more(i))
        step = jit(self.step)
        update = lambda state, *batch: step(state, batch, self.more(i))  # noqa: E731
        return take(update, state, self.batches)

    # All members

    def first(self, members):
        with jax.disable_jit():
            return stack([self.start(i) for i in range(members)])

    def by_trainer(self, way, members, **how):
        if self.place == "hyper":
            how["hyper"] = stack([self.more(i)[0] for i in range(members)])
        if self.place == "frozen":
            how["frozen"] = self.tree
        how |= self.options | dict(apply_fn=self.apply, output=None)
        functions = self.init, self.loss, self.optimizer
        trainer = pe.make_trainer(*functions, members=members, **how)
        if way == "init":
            return trainer.gather(trainer.init(jax.random.key(7)))
        state = trainer.scatter(self.first(members))
        if way == "predict":
            return trainer.predict_members(state, self.batches[0][0])
        if way == "epoch":
            data = jax.tree.map(lambda *x: jnp.concatenate(x), *self.batches)
            state, metrics = trainer.epoch(state, data, np.arange(16).reshape(2, 8))
        else:
            state, metrics = take(trainer.update, state, self.batches, axis=1)
        return trainer.gather(state), metrics

    def by_update(self, way, members, devices, at_once, microbatch):
        sync, state = way == "sync", self.first(members)
        make = pe.make_sync_update if sync else pe.make_ensemble_update
        update = make(self.loss, self.optimizer, microbatch=microbatch, **self.options)
        if sync:
            state = pe.replicate(jax.tree.map(lambda x: x[0], state), devices)
        divide = pe.split if sync else pe.replicate
        batches = (divide(batch, devices) for batch in self.batches)
        return take(update, state, batches, axis=1)


def differs(found, expected):
    """Return whether trees differ: floats by more than rounding, others at all."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(data(x)), np.asarray(data(y))
        exact, (x, y) = y.dtype.kind != "f", map(np.float64, (x, y))
        off = 0 if exact else 1e-4 * np.abs(np.nan_to_num(y)).max(initial=1e-3)
        if not np.allclose(x, y, rtol=0, atol=off, equal_nan=True):
            return True
    return False


# Members, devices, and members at once.
LAYOUTS = (1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 1, 2), (3, 1, 2), (1, 2, 1), (2, 4, 1)
BOTH = "update", "epoch"
WAYS = dict.fromkeys(("model", "params"), (*BOTH, "predict", "sync", "ensemble"))
WAYS |= dict.fromkeys(("optimizer", "batch"), (*BOTH, "sync", "ensemble"))
WAYS |= dict.fromkeys(("hyper", "frozen"), (*BOTH, "predict", "init"))


def compare(seed, count=2):
    """Yield how a case ran, "right", "wrong" or "XLA's own", and its steps."""
    case, rng, hand = Case(seed), np.random.default_rng([seed, 2]), {}
    for way in rng.choice(WAYS[case.place], count, replace=False).tolist():
        members, devices, at_once = LAYOUTS[rng.integers(len(LAYOUTS))]
        micro, run = rng.choice([0, 0, 2]), case.by_trainer
        if way in ("sync", "ensemble"):
            run, at_once, devices = case.by_update, 1, 2
            members = 1 if way == "sync" else 2
        if case.place == "batch":  # a part of it has other rows
            micro, devices = 0, 1 if way == "sync" else min(devices, members)
        micro = None if case.stateful or micro == 0 else int(micro)
        how = dict(members=members, devices=devices, at_once=at_once, microbatch=micro)
        found = run(way, **how)
        kind, verdict = way if way in ("predict", "init") else "step", "right"
        for i in range(members):
            if (kind, i) not in hand:
                with jax.disable_jit():
                    hand[kind, i] = case.by_hand(kind, i)
            if differs(jax.tree.map(lambda x, i=i: x[i], found), hand[kind, i]):
                own = differs(case.by_hand(kind, i, jax.jit), hand[kind, i])
                verdict = "XLA's own" if own else "wrong"
                break
        yield (case.place, way, how), verdict, case.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args()
    pe.use_cpu_devices(4)
    table: dict = collections.defaultdict(collections.Counter)
    for seed in range(args.first, args.first + args.count):
        for (place, way, how), verdict, steps in compare(seed):
            table[place, way][verdict] += 1
            if verdict != "right":
                print(f"seed {seed}, {verdict}: {place} by {way}, {how}, {steps}")
    for key, counts in sorted(table.items()):
        print(*key, dict(counts))
    total = sum(table.values(), collections.Counter())
    print(f"{args.count} programs, {total.total()} runs: {dict(total)}")
    raise SystemExit(total["wrong"] > 0)


if __name__ == "__main__":
    main()
