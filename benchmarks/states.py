"""Compare random programs on states with the same programs, one operation at a time.

    python benchmarks/states.py [300] [--first 0] [--places model hyper]

A program shifts, sorts, scatters and scans the leaves of a tree: histories, queues,
rings, masks, counters, random keys.  The tree is a model state, an optimizer's state,
the parameters, `hyper` or `frozen`.  XLA has faults for arrays that a program computes
and not for its arguments, and a trainer's programs compute a member's arrays.

A seed determines each case.  The script compares as many cases as it is told, from the
first seed on, prints the seeds of wrong ones, and fails if there are any.  Cases that
are as wrong in a step by hand under `jax.jit` are XLA's own; it counts these apart.
"""

import argparse
import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pjax_ensemble as pe

PLACES = "model", "optimizer", "params", "hyper", "frozen"


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
    "no new row down": lambda b, x, i: b.at[1:].set(b[:-1]),
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


def draw(seed):
    """Return a tree and a function (tree, number) -> tree, and the names of its steps.

    Leaves "a" and "b" have one form, which may be of numbers, booleans or random keys.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(["f", "f", "f", "i", "b", "key", "raw"])
    axes = rng.choice(3, 2), rng.choice([1, 2, 3], 2)
    shape = (int(rng.choice([3, 4, 6])), *map(int, axes[1][: axes[0][0]]))

    def leaf(kind):
        if kind in ("key", "raw"):
            keys = jax.random.split(jax.random.key(rng.integers(99)), shape[0])
            return keys if kind == "key" else jax.random.key_data(keys)
        numbers = rng.normal(size=shape)
        types = {"f": np.float32, "i": np.int32, "b": bool}
        return jnp.asarray((9 * numbers if kind == "i" else numbers) > 0
                           if kind == "b" else (9 * numbers if kind == "i" else numbers), types[kind])

    tree = {"a": leaf(kind), "b": leaf(kind), "f": leaf("f"), "count": jnp.int32(0)}
    plan = []
    for name in "a", "b", "f":
        names = [*MOVES] + [*SUMS] * (name == "f" or kind in "fi")
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            plan.append((name, str(rng.choice(names)), rng.random() < 0.2))
    last = rng.choice(["", "", "trade", "select"])

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
        tree = jax.tree.map(jnp.asarray, tree)
        for name, step, flat in plan:
            tree[name] = apply(step, flat, tree[name], number, tree["count"])
        if last == "trade":
            tree["a"], tree["b"] = tree["b"], tree["a"]
        if last == "select":
            tree["a"] = jnp.where(tree["count"] % 2 == 0, tree["a"], tree["b"])
        return tree | {"count": tree["count"] + 1}

    return tree, move, [" ".join([n, s, "flat" * f]) for n, s, f in plan] + [str(last)]


def shown(tree):
    """Return a tree's leaves as numbers that float32 holds."""

    def show(x):
        x = jax.random.key_data(x) if pe._is_key(x) else x
        return x >> 9 if x.dtype == jnp.uint32 else x

    return jax.tree.map(show, tree)


def read(tree):
    """Return a number that depends on every float of a tree."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            total += (x.reshape(-1) * jnp.arange(1.0, x.size + 1)).sum() / x.size
    return jnp.tanh(total)


class Case:
    """A random tree in a random place, in functions as users write them."""

    def __init__(self, seed, places=PLACES):
        self.rng = np.random.default_rng([seed, 1])
        self.place = str(self.rng.choice(places))
        self.stateful, self.aux = self.place == "model", self.rng.random() < 0.6
        self.skip = bool(self.rng.random() < 0.3)
        self.tree, self.move, self.steps = draw(seed)
        self.given = self.place in ("hyper", "frozen")
        if self.place == "params":
            self.tree = {k: x for k, x in self.tree.items() if x.dtype == jnp.float32}
            names, move = [*self.tree], self.move
            full = draw(seed)[0]
            self.move = lambda t, x: {k: move(full | t, x)[k] for k in names}
        x = self.rng.normal(size=(2, 8, 3)).astype(np.float32)
        if self.skip and self.rng.random() < 0.5:
            x[1, 3] = np.nan
        self.batches = [(x[i], x[i] @ np.float32([1, -2, 3])) for i in range(2)]
        self.optimizer = pe.sgd(0.1)
        if self.place == "optimizer":
            self.optimizer = pe.Optimizer(lambda params: self.tree, self.optimize)
        if self.place == "hyper":
            self.optimizer = lambda h: pe.sgd(0.1 + 0.05 * read(self.move(h, 1.0)))

    def more(self, i):
        """Return member i's hyper, or the frozen tree, as the last arguments."""
        if self.place == "hyper":  # members differ in it
            return (jax.tree.map(lambda x: x if pe._is_key(x) or x.dtype == bool else x + i, self.tree),)
        return (self.tree,) if self.given else ()

    def init(self, key, *more):
        params = {"w": jax.random.normal(key, (3,)), "tree": {}}
        if self.place == "params":
            params["tree"] = self.tree
        if self.given:
            params["moved"] = read(self.move(more[0], 2.0))
        return (params, self.tree) if self.stateful else params

    def moved(self, params, more):
        tree = more[0] if more else params["tree"]
        return self.move(tree, params["w"].sum()) if tree else tree

    def loss(self, params, *args):
        if self.stateful:
            model_state, _, x, y = args
            new = self.move(model_state, params["w"].sum())
        else:
            x, y, *more = args
            new = self.moved(params, more)
        errors = jnp.square(x @ params["w"] - y).mean()
        loss = errors + (0.1 + params["w"].mean()) * read(new)
        aux = shown(new) if self.aux else {}
        return loss, (new, aux) if self.stateful else aux

    def optimize(self, grads, state, params=None):
        new = self.move(state, grads["w"].sum())
        return jax.tree.map(lambda g: -0.1 * g - 0.01 * read(new), grads), new

    def apply(self, params, *args):
        if self.stateful:
            model_state, inputs = args
            new = self.move(model_state, params["w"].sum())
        else:
            inputs, *more = args
            new = self.moved(params, more)
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
            ok = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in leaves])
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
        step, metrics = jit(self.step), []
        for batch in self.batches:
            state, found = step(state, batch, self.more(i))
            metrics.append(found)
        return state, jax.tree.map(lambda *x: jnp.stack(x), *metrics)

    # All members

    def by_trainer(self, way, members, devices, at_once, microbatch):
        stack = lambda *x: jnp.stack(x)  # noqa: E731
        hyper = jax.tree.map(stack, *(self.more(i)[0] for i in range(members))) if self.given else None
        given = {"hyper": hyper} if self.place == "hyper" else {}
        given |= {"frozen": self.tree} if self.place == "frozen" else {}
        trainer = pe.make_trainer(
            self.init, self.loss, self.optimizer, members=members, devices=devices,
            apply_fn=self.apply, output=None, at_once=at_once, microbatch=microbatch,
            stateful=self.stateful, has_aux=True, skip_nonfinite=self.skip, **given,
        )
        if way == "init":
            return trainer.gather(trainer.init(jax.random.key(7)))
        with jax.disable_jit():
            states = [self.start(i) for i in range(members)]
            state = jax.tree.map(stack, *states)
        state = trainer.scatter(state)
        if way == "predict":
            return trainer.predict_members(state, self.batches[0][0])
        if way == "epoch":
            data = jax.tree.map(lambda *x: np.concatenate(x), *self.batches)
            state, metrics = trainer.epoch(state, data, np.arange(16).reshape(2, 8))
        else:
            found = []
            for batch in self.batches:
                state, metrics = trainer.update(state, *batch)
                found.append(jax.device_get(metrics))
            metrics = jax.tree.map(lambda *x: np.stack(x, axis=1), *found)
        return trainer.gather(state), metrics

    def by_update(self, way, members, devices, at_once, microbatch):
        make = pe.make_sync_update if way == "sync" else pe.make_ensemble_update
        update = make(self.loss, self.optimizer, has_aux=True, stateful=self.stateful,
                      microbatch=microbatch, skip_nonfinite=self.skip)
        with jax.disable_jit():
            states = [self.start(i) for i in range(members)]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
            state = pe.replicate(states[0], devices) if way == "sync" else stacked
        found = []
        for batch in self.batches:
            divide = pe.split if way == "sync" else pe.replicate
            state, metrics = update(state, *divide(batch, devices))
            found.append(metrics)
        return state, jax.tree.map(lambda *x: jnp.stack(x, axis=1), *found)


def differs(found, expected):
    """Return whether trees differ: floats by more than rounding, others at all."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (jax.random.key_data(z) if pe._is_key(z) else z for z in (x, y))
        x, y = np.asarray(x), np.asarray(y)
        size = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=1e-3) if y.dtype.kind != "b" else 0
        off = 1e-4 * size if y.dtype.kind == "f" else 0
        if not np.allclose(np.float64(x), np.float64(y), rtol=0, atol=off, equal_nan=True):
            return True
    return False


def compare(seed, places=PLACES, count=3):
    """Yield ((place, way, layout), verdict, steps) for some ways to run a case."""
    case = Case(seed, places)
    rng = np.random.default_rng([seed, 2])
    ways = ["update", "epoch", "predict", "sync", "ensemble", "init"]
    drop = {"optimizer": ("predict", "init"), "hyper": ("sync", "ensemble"), "frozen": ("sync", "ensemble")}
    ways = [way for way in ways if way not in drop.get(case.place, ("init",))]
    hand = {}
    for way in rng.choice(ways, count, replace=False):
        layouts = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 1, 2), (3, 1, 2), (1, 2, 1), (2, 4, 1)]
        members, devices, at_once = layouts[rng.integers(len(layouts))]
        run = case.by_trainer
        if way in ("sync", "ensemble"):
            members, devices, at_once, run = 1 if way == "sync" else 2, 2, 1, case.by_update
        micro = None if case.stateful or rng.random() < 0.7 else 2
        found = run(str(way), members, devices, at_once, micro)
        kind = str(way) if way in ("predict", "init") else "step"
        verdict = "right"
        for i in range(members):
            if (kind, i) not in hand:
                with jax.disable_jit():
                    hand[kind, i] = case.by_hand(kind, i)
            if differs(jax.tree.map(lambda x: x[i], found), hand[kind, i]):
                own = differs(case.by_hand(kind, i, jax.jit), hand[kind, i])
                verdict = "own" if own else "wrong"
                break
        yield (case.place, str(way), members, devices, at_once, micro), verdict, case.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--places", nargs="+", default=PLACES, choices=PLACES)
    args = parser.parse_args()
    pe.use_cpu_devices(4)
    total = collections.Counter()
    table = collections.Counter()
    for seed in range(args.first, args.first + args.count):
        for how, verdict, steps in compare(seed, args.places):
            total[verdict] += 1
            table[how[0], how[1], verdict] += 1
            if verdict == "wrong":
                print(f"seed {seed}: {how}, {[s for s in steps if s.strip()]}", flush=True)
    for key, n in sorted(table.items()):
        print(*key, n)
    print(f"{dict(total)}")
    raise SystemExit(total["wrong"] > 0)


if __name__ == "__main__":
    main()
