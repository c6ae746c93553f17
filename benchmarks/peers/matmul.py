"""The rate of a large float32 matrix product in JAX on the CPU, in GFLOP/s."""

import common
import jax
import jax.numpy as jnp

SIDE = 2048


def main():
    args = common.arguments(__doc__)
    a, b = jax.random.normal(jax.random.key(0), (2, SIDE, SIDE))
    product = jax.jit(jnp.matmul)

    def run(steps):
        for _ in range(steps):
            c = product(a, b)
        return float(c[0, 0])

    common.serve(args, run, rows=2 * SIDE**3 / 1e9)


if __name__ == "__main__":
    main()
