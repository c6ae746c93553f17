"""A network for runs of the script that test something other than the network.

It has batch statistics and dropout, and compiles fast.
"""

import contextlib
import math
from unittest import mock

import jax

import pjax_ensemble as pe
import train_mnist as tm


def init(key, *, image_shape, num_classes):
    keys = jax.random.split(key)
    norm, stats = pe.batch_norm_init(8)
    first = pe.dense_init(keys[0], math.prod(image_shape), 8)
    return (first, norm, pe.dense_init(keys[1], 8, num_classes)), stats


def logits(params, stats, images, key=None):
    x = pe.dense(params[0], images.reshape(len(images), -1))
    x, stats = pe.batch_norm(params[1], stats, x, training=key is not None)
    return pe.dense(params[2], pe.dropout(key, jax.nn.relu(x), 0.2)), stats


NETWORK = tm.Network(init, logits)
RECIPE = tm.RECIPES["batchnorm"]._replace(network="tiny")


@contextlib.contextmanager
def known():
    """Have the script know the network, as `--network tiny`."""
    networks = mock.patch.dict(tm.NETWORKS, tiny=NETWORK)
    with networks, mock.patch.dict(tm.RECIPES, tiny=RECIPE):
        yield
