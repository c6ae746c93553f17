"""Helpers for tests that need NumPy and pytest alone; conftest.py has the others."""

import re

import numpy as np
import pytest
from numpy.testing import assert_allclose


def assert_refuses(call, message):
    """Assert that a call raises ValueError, with a message in one line."""
    said = said_by(ValueError, call)
    assert re.search(message, said) and "\n" not in said


def said_by(kind, call, *args, **options):
    """Return the message of the error that a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **options)
    return str(error.value)


def cases(names, *rows):
    """Run a test once per row; a row holds the arguments that are not fixtures."""
    return pytest.mark.parametrize(names, rows)


def random_probs(seed, *shape):
    return np.random.default_rng(seed).dirichlet(0.3 * np.ones(shape[-1]), shape[:-1])


def assert_close(actual, expected, tolerance=1e-5):
    """Assert that two trees are equal up to rounding.

    Every entry may be off by `tolerance` times the largest absolute entry of its leaf.
    Processors add in different orders, with or without fused multiplication, so a sum
    is off by some float32 epsilons (6e-8) of its largest terms, even where they cancel
    and the sum is small.  A bound relative to each entry would hold only by luck.
    """
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_close(actual[name], expected[name], tolerance)
    elif isinstance(expected, (list, tuple)):
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b, tolerance)
    elif expected is not None:
        actual = np.asarray(actual, np.float64)
        expected = np.asarray(expected, np.float64)
        bound = tolerance * np.abs(expected).max(initial=0)
        assert_allclose(actual, expected, rtol=0, atol=bound)
