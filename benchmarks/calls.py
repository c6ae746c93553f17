"""Measure a call of `fast_cpu.jit` beside one of `jax.jit`, in us of the host's time.

    python benchmarks/calls.py [--rounds 60]

A call of a tiny program has 2, 50 or 300 arrays.  Each round makes 30 calls of both, in
turn; the rows have medians of the rounds.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import fast_cpu

CALLS = 30  # of a round


def plus_one(*arrays):
    return [x + 1 for x in arrays]


def times_of(num_arrays: int, rounds: int) -> np.ndarray:
    """Return us per call by `jax.jit` and by `fast_cpu.jit`."""
    arrays = [jnp.ones(3)] * num_arrays
    ways = jax.jit(plus_one), fast_cpu.jit(plus_one)
    times = []
    for _ in range(rounds + 1):  # the first one compiles
        for way in ways:
            begun = time.perf_counter()
            for _ in range(CALLS):
                made = way(*arrays)
            times.append(1e6 * (time.perf_counter() - begun) / CALLS)
            jax.block_until_ready(made)
    return np.median(np.reshape(times, (-1, 2))[1:], axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    print("arrays  jax.jit  fast_cpu.jit")
    for num_arrays in 2, 50, 300:
        by_jax, by_fast_cpu = times_of(num_arrays, args.rounds)
        print(f"{num_arrays:6}  {by_jax:7.1f}  {by_fast_cpu:12.1f}", flush=True)


if __name__ == "__main__":
    main()
