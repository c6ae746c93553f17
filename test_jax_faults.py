"""Tests of jax_faults.py: faults show where they are known, and guards name them."""

import os
import platform
import re
import subprocess
import sys
import warnings
from unittest import mock

import jaxlib
import pytest

import jax_faults as faults
from conftest import HERE, cases

ON_THIS = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.mark.skipif(not ON_THIS, reason="the faults are known for Linux on x86-64")
def test_each_fault_shows_in_the_versions_that_are_known_to_have_it():
    """Warn of faults that a newer JAX has mended: their guards may go one day."""
    wrong = {}
    for name, found in faults.try_all(list(faults.FAULTS)).items():
        fits, words = faults.verdict(name, found, jaxlib.__version__)
        if not fits:
            wrong[name] = f"{found}: {words}"
        elif words:
            warnings.warn(f"{name} {words}", stacklevel=1)
    assert wrong == {}


@cases(
    "name, found, version, fits, words",
    ("moved_rows", faults.SHOWS, "0.12.0.1", True, ""),
    ("moved_rows", faults.ABSENT, "0.12.0.1", False, "should show"),
    ("moved_rows", "needs amx_tile", "0.12.0.1", True, ""),
    ("moved_rows", "cannot be tried: TypeError", "0.12.0.1", False, "should show"),
    ("moved_rows", "cannot be tried: TypeError", "0.13.0", True, ""),
    ("moved_rows", faults.ABSENT, "0.12.1", True, "_hidden may go once 0.12.1 is"),
    ("moved_rows", faults.ABSENT, "0.13.0rc1", True, "_hidden may go once 0.13.0rc1"),
    ("slices_of_slices", faults.ABSENT, "0.13.0", True, "the warning may go once"),
    ("moved_rows", faults.SHOWS, "0.13.0", True, ""),
    ("moved_rows", faults.ABSENT, "0.10.1", True, ""),
    ("sums_of_rank_7", faults.ENDS, "0.10.2", True, ""),
    ("sums_of_rank_7", faults.ENDS, "0.12.0.1", False, "is not known here"),
    ("sums_of_rank_7", faults.ENDS, "0.11.1", True, ""),
    ("sums_of_broadcasts", faults.ABSENT, "0.10.2", True, ""),  # a race
    ("sums_of_broadcasts", faults.SHOWS, "0.12.0.1", True, "is not known here"),
)
def test_a_verdict_tells_wrong_entries_from_mended_faults(
    name, found, version, fits, words
):
    verdict = faults.verdict(name, found, version)
    assert verdict[0] == fits
    assert words in verdict[1] and bool(words) == bool(verdict[1])


def test_probes_go_on_in_another_process_after_one_that_ends_it():
    names = ["sums_of_rank_7", "moved_rows", "exp_of_nan", "copies_at_the_end"]
    said = "tries sums_of_rank_7\n", "tries moved_rows\nfound shows\ntries exp_of_nan\n"
    last = "tries copies_at_the_end\nfound does not show\n"
    runs = [mock.Mock(stdout=x) for x in (*said, last)]
    with mock.patch.object(subprocess, "run", side_effect=runs) as run:
        found = faults.try_all(names)
    assert list(found.items()) == [
        ("sums_of_rank_7", faults.ENDS),
        ("moved_rows", faults.SHOWS),
        ("exp_of_nan", faults.ENDS),
        ("copies_at_the_end", faults.ABSENT),
    ]
    assert [call.args[0][3:] for call in run.mock_calls] == [
        names,
        names[1:],
        names[3:],
    ]


TEXTS = {
    name: (HERE / f"{name}.py").read_text("utf-8")
    for name in ("pjax_ensemble", "fast_cpu")
}
LIMITS = HERE / "docs" / "limits.md"


@pytest.mark.no_code
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_guard_is_in_the_code_and_names_its_fault(name):
    guard = faults.FAULTS[name].guard
    if guard == faults.PAGE:
        return
    module, _, place = guard.partition(".")
    function = re.match(r"\w+", place)[0]
    assert re.search(rf"^(class|def) {function}\b|^{function}\b", TEXTS[module], re.M)
    assert f"`{name}`" in TEXTS[module]


@pytest.mark.no_code
def test_faults_that_the_code_names_are_entries():
    for text in TEXTS.values():
        for named in re.findall(r"\bfaults?\s+((?:`\w+`[,\s#]*(?:and\s+)?)+)", text):
            for name in re.findall(r"`(\w+)`", named):
                assert name in faults.FAULTS


def test_faults_in_the_page_are_those_of_the_table():
    text = LIMITS.read_text("utf-8")
    head = faults.table().partition("\n")[0]
    before, _, old = text.partition(head)
    rest = old[old.index("\n\n") + 1 :]
    if os.environ.get("WRITE"):
        LIMITS.write_text(before + faults.table() + rest, "utf-8")
    anew = "write it anew: WRITE=1 python -m pytest -n 0 -k faults_in_the_page"
    assert LIMITS.read_text("utf-8") == before + faults.table() + rest, anew
