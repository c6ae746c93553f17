"""Tests of the README, of the pages beside this file, and of the examples."""

import contextlib
import importlib.util
import inspect
import io
import itertools
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import jax
import loop
import numpy as np
import page as pages
import pytest
from numpy.testing import assert_allclose
from trials import devices as machines

import ensemble_metrics as em
import fast_cpu as fc
import mnist_data as md
import mnist_run as mr
import pjax_ensemble as pe
import tiny
import train_mnist as tm
from conftest import ENVIRONMENT, HERE, D, handling, leaves_equal, posix, run_python

# isort: split
from conftest import said_by, start_python

pytestmark = pytest.mark.once  # no version of JAX changes these, or they take long
LIBRARIES = {"tables": "sklearn.datasets", "tokens": "flax", "volumes": "flax"}


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    """Return a function that runs an example: the numbers of each line it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")

    def run(name):
        pytest.importorskip(LIBRARIES.get(name, "jax"))
        with jax.numpy_rank_promotion("allow"):
            main = runpy.run_path(str(HERE / "examples" / f"{name}.py"))["main"]
            main(["--plot", str(tmp_path / "it.png")])
        png = (tmp_path / "it.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) < 100_000
        lines = capsys.readouterr().out.splitlines()
        return [np.float64(re.findall(r"\d+\.?\d*", line)) for line in lines]

    return run


def test_readme_says_of_its_numbers_and_its_picture_what_is_true(readme, run_example):
    said = r"wrong on (\d+)% of all 2,000, and on\n(\d+)% of the (\d+)% that it keeps"
    said += r" of 1,500. The threshold promises at most (\d+)%"
    error, wrong, kept, risk = map(int, re.search(said, README).groups())
    scores = readme["scores"]
    assert error == 100 - round(100 * scores[-1]["accuracy"])
    assert f"risk={risk / 100}" in README
    probs, truth = readme["probs"], readme["y"][200:]
    each = [(em.predictive_entropy(p[None]), p.argmax(axis=-1) != truth) for p in probs]
    each.append((readme["unsure"], readme["wrong"]))
    areas = [em.aurc(unsure[500:], wrong[500:]) for unsure, wrong in each]
    losses = [score["negative_log_likelihood"] for score in scores]
    assert min(areas[:-1]) > areas[-1] and min(losses[:-1]) > losses[-1]
    classes, *found = run_example("abstain")
    assert (HERE / "examples/abstain.py").read_text().count(f"RISK = {risk / 100}") == 1
    assert_allclose(classes, [kept, wrong], atol=0.5)
    assert_allclose([row[1:] for row in found], [[92, 81], [39, 31]], atol=5)


@pytest.mark.usefixtures("optimized")
def test_example_of_forecasts_has_intervals_that_hold_at_each_horizon(run_example):
    *rows, (_, calibrated, raw) = run_example("forecast")
    hours, errors, held, _ = np.transpose([row[[0, 1, -2, -1]] for row in rows])
    assert [*hours] == [1, 6, 12, 24] and errors[0] < errors[1] < errors[2] < 1
    assert_allclose(held, 90, atol=6)
    assert raw < 86 <= calibrated <= 94


def test_example_of_a_sweep_chooses_a_setting_inside_the_grid(run_example):
    _, decays, *rows, (rate, decay, loss) = run_example("sweep")
    rates, losses = np.transpose(rows)[0], np.array(rows)[:, 1:]
    row, column = np.unravel_index(losses.argmin(), losses.shape)
    assert 0 < row < len(rates) - 1 and (rate, decay) == (rates[row], decays[column])
    assert 0 < loss - losses.min() < 0.1


def test_example_of_adapters_learns_more_from_few_examples(run_example):
    adapters, whole, anew = (row[-5:] for row in run_example("adapters"))
    assert (np.diff([adapters, whole, anew]) < 0).all()
    assert (2 * adapters[1:] < anew[1:] + 0.1).all() and adapters[-1] < whole[-1]


@pytest.mark.usefixtures("optimized")
def test_example_of_tables_has_intervals_that_hold(run_example, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("ensemble_tables.FOLDS", 3)  # a third of the networks
    (error, _, r2), *rows = run_example("tables")
    coverage, held, width = np.transpose(rows)
    assert_allclose(held, coverage, atol=8)
    assert error < 60 and 0.3 < r2 < 0.6 and (np.diff(width) > 0).all()


def test_example_of_tokens_has_an_ensemble_better_than_its_members(run_example):
    *members, ensemble = (row[-2] for row in run_example("tokens"))
    assert ensemble < min(members) < 3


def test_example_of_a_loop_keeps_the_best_of_each_member_and_stops_early(run_example):
    *members, (ensemble, _) = run_example("loop")
    numbers, epochs, losses, _ = np.transpose(members)
    assert [*numbers] == [0, 1, 2, 3, 4]
    assert ensemble < np.median(losses) and max(losses) < 0.25
    validation = pe.load(newest("loop"))[".validation"]
    assert [*epochs] == [*validation.argmin(axis=1) + 1]
    assert min(epochs) < max(epochs) == validation.shape[1] - 12 < 88  # of 100 epochs


def newest(folder):
    return max(Path(folder).glob("checkpoint_*.safetensors"))


def run_loop(folder, number=0, name="epoch", count=0, **settings):
    """Run the example's loop; signal this process after the count-th call."""
    owners = {"epoch": pe.Trainer, "predict_members": pe.Trainer, "fsync": os}
    owners["ended"] = pe._Fit
    owner, calls = owners.get(name, pe), itertools.count(1)
    call = getattr(owner, name)

    def stopping(*args, **options):
        result = call(*args, **options)
        if int(count) == next(calls):
            signal.raise_signal(int(number))
        return result

    fast = loop.SETTINGS | {"rate": 0.03, "patience": 3}
    with (
        mock.patch.object(owner, name, stopping),
        mock.patch.object(loop, "SETTINGS", fast | settings),
        jax.numpy_rank_promotion("allow"),
    ):
        loop.main(["--folder", str(folder)])


# A save calls fsync for the file, which then takes its name, and for the folder.
STOPS = "SIGINT epoch 1, SIGINT epoch 3, SIGKILL fsync 5, SIGKILL fsync 2, SIGINT "
STOPS += "_newest 1, SIGKILL epoch 1, SIGINT predict_members 1, SIGINT fsync 1"


@posix
def test_loop_ends_in_the_same_bits_after_it_was_stopped_at_ten_places(
    tmp_path, monkeypatch, capsys
):
    trainers = []

    def make_once(*args, **options):  # as in a notebook
        trainers[:] = trainers or [pe.Trainer(*args, **options)]
        return trainers[0]

    def stop(kind, *place):
        if kind == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                run_loop(stopped, signal.SIGINT, *place)
        else:
            code = "import sys, test_pages; test_pages.run_loop(*sys.argv[1:])"
            run = start_python(code, stopped, signal.SIGKILL, *place, PYTHONPATH=path)
            said, errors = run.communicate(timeout=100)
            assert (said, run.returncode) == ("", -signal.SIGKILL), errors

    monkeypatch.setattr(pe, "make_trainer", make_once)
    path = os.pathsep.join(sys.path)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_loop(whole)
    said = capsys.readouterr().out
    with handling(signal.default_int_handler):
        for place in STOPS.split(", "):
            stop(*place.split())
        best = pe.load(newest(whole))[".validation"].argmin(axis=1).max() + 1
        count = best - pe.load(newest(stopped))[".validation"].shape[1]
        stop("SIGKILL", "ended", count)  # in the last best epoch
        stop("SIGINT", "save", 3)  # in the second epoch without a better one
    assert "ensemble" in said and capsys.readouterr().out == ""
    run_loop(stopped)
    assert capsys.readouterr().out == said
    assert newest(stopped).name == newest(whole).name
    assert newest(stopped).read_bytes() == newest(whole).read_bytes()


def test_loop_needs_no_progress_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "tqdm", None)
    run_loop(tmp_path / "a", epochs=1)
    assert newest(tmp_path / "a").name == "checkpoint_00000004.safetensors"


@pytest.mark.usefixtures("optimized")
def test_example_of_volumes_bounds_the_share_missed_of_kinds_it_knows(run_example):
    *members, ensemble, entropy, mutual, known, unseen = run_example("volumes")
    losses = [row[3] for row in members]
    assert ensemble[2] < min(losses) < 0.15 and min(ensemble[:2]) > 0.8
    assert mutual[2] > 0.8 > entropy[2] and min(*entropy[:2], *mutual[:2]) > 0.75
    assert known[0] < 13 and 2 * known[0] < unseen[0]
    missed = importlib.import_module("volumes").missed
    assert not missed(np.ones((1, 2)), np.zeros((1, 2)), [0, 1]).any()


@pytest.mark.parametrize("name", LIBRARIES)
def test_example_says_which_library_it_lacks(monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    said = said_by(SystemExit, runpy.run_path, str(HERE / "examples" / f"{name}.py"))
    library = "scikit-learn" if name == "tables" else "flax"
    assert said.endswith(f": python -m pip install {library}")


IMPORTS = """
import importlib, importlib.machinery, os, sys

folder = os.path.dirname(os.getcwd())
modules = "pjax_ensemble", "ensemble_metrics", "ensemble_tables"

class Uninstalled:  # finds these modules in folders of the test alone
    def find_spec(name, path=None, target=None):
        if name in modules:
            ours = [x or os.getcwd() for x in sys.path if not x or x.startswith(folder)]
            return importlib.machinery.PathFinder.find_spec(name, ours)

sys.meta_path.insert(0, Uninstalled)
path = sys.path[1:]
for name in sys.argv[1:]:
    sys.path[1:] = path
    for module in modules:
        sys.modules.pop(module, None)
    print(importlib.import_module(name).pe.__file__)
"""


def test_examples_take_modules_beside_or_above_them(tmp_path):
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    shutil.copytree(HERE / "examples", tmp_path / "examples")
    scripts = {path.stem for path in HERE.glob("examples/*.py")}
    for name in "pjax_ensemble.py", "ensemble_metrics.py", "ensemble_tables.py":
        shutil.copy(HERE / name, tmp_path)
    # A folder above is the last: other files there stand in front of no library.
    (tmp_path / "tqdm.py").write_text("raise RuntimeError")
    for folder in tmp_path, tmp_path / "examples":
        options = dict(cwd=tmp_path / "examples", PYTHONPATH="")
        files = run_python(IMPORTS, *scripts, **options).splitlines()
        assert files == [str(folder / "pjax_ensemble.py")] * len(scripts)
        shutil.copy(HERE / "pjax_ensemble.py", tmp_path / "examples")  # for the second


INDEX = HERE / "docs" / "README.md"
PATHS = [HERE / "README.md", HERE / "CONTRIBUTING.md"]
PATHS += sorted({*HERE.glob("docs/*.md")} - {INDEX})
PAGES = {path.stem: path.read_text("utf-8") for path in PATHS}
README, EVERY_PAGE = PAGES["README"], "".join(PAGES.values())
OF_CODE = [name for name in PAGES if "```python" in PAGES[name] and name != "README"]


def run_page(text, names, tolerance=0.1):
    """Run a page's Python; each block's output stands in an unnamed block below it.

    With MOVED=1, fail if another processor's rounding moved figures, with these lines.
    """
    moved, blocks = [], [*machines.blocks(text), ("end", "")]
    for (kind, code), (next_kind, below) in itertools.pairwise(blocks):
        used = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        if kind == "python" and all(map(importlib.util.find_spec, used)):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            both = out.getvalue(), "" if next_kind else below
            moved += [two for two in zip(*map(str.splitlines, both)) if len({*two}) > 1]
            printed, said = (re.split(r"(-?\d+\.?\d*)", text) for text in both)
            assert printed[::2] == said[::2]  # the text; between stand the numbers
            numbers = np.float64(printed[1::2]), np.float64(said[1::2])
            # Figures that move have one digit, which may be rounded the other way.
            assert_allclose(*numbers, atol=tolerance)
    assert not (moved and os.environ.get("MOVED")), "\n".join(map(", not ".join, moved))
    return names


@pytest.fixture(scope="module")
def readme():
    """Return the names of the README's Python, which other pages go on from."""
    with jax.numpy_rank_promotion("allow"):
        return run_page(README, {}, tolerance=0)


@pytest.mark.parametrize("name", OF_CODE)
def test_code_of_every_page_runs_and_prints_what_it_says(
    name, readme, tmp_path, monkeypatch, request
):
    if name in ("dense", "tables", "uncertainty"):  # train longer than they compile
        request.getfixturevalue("optimized")
    monkeypatch.chdir(tmp_path)
    digits = md.generate_digits(0, 640, 64)
    monkeypatch.setattr(tm, "load_data", lambda *_: digits)
    monkeypatch.setitem(tm.NETWORKS, "cnn", tiny.NETWORK)
    for flags in re.findall(r"`python train_mnist\.py (.* runs/small)`", PAGES[name]):
        assert tm.main(flags.split()) == 0
    with jax.numpy_rank_promotion("allow"):
        names = run_page(PAGES[name], dict(readme))
    if name == "coming-from":
        hand, one = names["members"][0].bias, names["params"][0].bias
        assert hand.shape == (D, *one.shape)
        for library in "flax", "equinox":
            pytest.importorskip(library)
        keys = jax.random.split(jax.random.key(0))
        for library in "linen", "nnx", "eqx":  # each draws, and has a new state
            params, old = names[f"init_{library}"](jax.random.key(0))
            rows, loss = (names["x"][:50], names["y"][:50]), names[f"loss_{library}"]
            (one, new), (two, _) = (loss(params, old, key, *rows) for key in keys)
            assert abs(one - two) > 1e-4
            assert not leaves_equal(old, new)
    if name == "dense":
        (flat, by_images), (more_flat, more) = names["missed"], names["over"]
        assert by_images < 0.1 < flat - 0.02 and more < 0.05 < more_flat - 0.1
        names["labels"][0] = 0
        assert not names["shares_missed"]([0], names["grid"]).any()
    if name == "serving":  # an artifact that cannot be written leaves the old one
        content = (tmp_path / "ensemble.jax").read_bytes()
        monkeypatch.delattr(names["export"].Exported, "serialize")
        call = names["write"], "ensemble.jax", names["model"], names["x"]
        said_by(AttributeError, *call, names["slim"].params)
        assert (tmp_path / "ensemble.jax").read_bytes() == content


PACKAGES = {"sklearn": "scikit-learn", "orbax": "orbax-checkpoint"}


@pytest.mark.parametrize("name", sorted(OF_CODE))
def test_first_lines_of_every_page_name_the_packages_of_its_code(name):
    code = "".join(c for kind, c in machines.blocks(PAGES[name]) if kind == "python")
    used = {*re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)}
    used -= {"jax", "jaxlib", "numpy", *sys.stdlib_module_names}
    used -= {path.stem for path in [*HERE.glob("*.py"), *HERE.glob("examples/*.py")]}
    head = PAGES[name].partition("\n## ")[0]
    named = re.findall(r"`python -m pip install ([^`]+)`", head)
    assert [" ".join(sorted(PACKAGES.get(x, x) for x in used))] == (named or [""])


FOREVER = """
data, few = (x[:200], y[:200]), order[:100]
state, losses = trainer.epoch(state, data, few)
print("now", flush=True)
while True:
    state, losses = trainer.epoch(state, data, few)
"""
GO_ON = """
state, losses = trainer.epoch(trainer.latest, data, few)
print(int(state.opt_state.num_steps.min()))
"""


@posix
def test_readme_runs_in_a_notebook_that_is_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    env = {**ENVIRONMENT, "PYTHONPATH": str(HERE), "IPYTHONDIR": str(tmp_path)}
    kernel, client = manager.start_new_kernel(env=env, cwd=tmp_path)

    def run(cell):
        said = []

        def hear(message):
            said.append(message["content"].get("text", ""))
            if said[-1] == "now\n":
                kernel.interrupt_kernel()

        reply = client.execute_interactive(cell, output_hook=hear, timeout=120)
        stopped = "KeyboardInterrupt" if cell is FOREVER else None
        assert reply["content"].get("ename") == stopped, reply["content"]
        return "".join(said)

    cells = [*machines.read_readme()[0], FOREVER, GO_ON]
    try:
        said = dict(zip(cells, map(run, cells)))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert int(said[GO_ON]) in range(700, 10**9, 100)


@pytest.mark.no_code
def test_readme_is_read_to_the_end_and_trains_in_fifteen_lines():
    assert README.count("\n") <= 150 and max(map(len, README.splitlines())) <= 100
    code = README.partition("```python\nrate = ")[2].partition("\n```")[0]
    assert sum(map(bool, code.splitlines())) == 15


@pytest.mark.no_code
def test_promises_name_tests_that_are_there_and_run_code():
    files = [*HERE.glob("test_*.py"), *HERE.glob("*/test_*.py")]
    tests = "".join(file.read_text("utf-8") for file in files)
    named = set(re.findall(r"`(test_\w+)`", EVERY_PAGE))
    assert named and named <= set(re.findall(r"^def (test_\w+)\(", tests, re.M))
    texts = re.findall(r"^@pytest.mark.no_code\n(?:@.*\n)*def (\w+)", tests, re.M)
    assert len(texts) > 5 and named.isdisjoint(texts)


def test_commands_of_every_page_are_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()  # the command with --resume finds it
    settings = tm.RECIPES["cnn"]._replace(members=1, train_size=1)._asdict()
    mr.write_json(tmp_path / "DIR" / "config.json", settings)
    commands = re.findall(r"([\w/]+\.py)( [^`\n|]*)?", EVERY_PAGE)
    assert len(commands) > 30
    for script, flags in commands:
        assert (HERE / script).exists(), script
        if script == "train_mnist.py" and "--help" not in flags:
            assert tm.parse_arguments(flags.split())


GALLERY = HERE / "examples" / "README.md"


@pytest.mark.no_code
def test_gallery_has_every_example_with_its_command_and_its_picture():
    row = r"`python (examples/\w+\.py) --plot (\w+\.png)` \| "
    row += r"!\[.+\]\(\.\./images/(\w+\.png)\) \|\n"
    scripts, drawn, shown = zip(*re.findall(row, GALLERY.read_text("utf-8")))
    here = {f"examples/{path.name}" for path in HERE.glob("examples/*.py")}
    assert {*scripts} == here
    assert drawn == shown
    assert all((HERE / "images" / name).stat().st_size < 100_000 for name in shown)


OTHERS = [GALLERY, HERE / "benchmarks" / "README.md", HERE / "CHANGELOG.md", INDEX]


@pytest.fixture(scope="module")
def parse():
    """Return a function that takes a page apart as GitHub does, into tokens."""
    library = pytest.importorskip("markdown_it")
    return library.MarkdownIt("gfm-like", {"linkify": False}).parse


every_page = pytest.mark.parametrize(
    "page", [*PATHS, *OTHERS], ids=[*PAGES, "gallery", "benchmarks", "changes", "index"]
)


@pytest.mark.no_code
@every_page
def test_every_page_is_drawn_in_the_blocks_that_it_is_written_in(page, parse):
    text, html = page.read_text("utf-8"), ""
    lines = [line.strip() for line in text.splitlines()]
    for token in parse(text):
        if token.type == "table_open":  # a paragraph right below a table is a row
            rows = lines[slice(*token.map)]
            assert [row for row in rows if not row.startswith("|")] == []
        if token.type == "fence":  # one without an end takes the next one's, or none
            assert lines[token.map[1] - 1] == token.markup, token.content
            assert "```" not in token.content, token.content
        for part in token.children or [token]:
            html += part.content * part.type.startswith("html")
            if part.type == "text":  # a mark without its end stays in the text
                assert not re.search(r"\*\*|[`~]|\]\(|^\|", part.content), part.content
    begun, ended = re.findall(r"<(?!br|img)(\w+)", html), re.findall(r"</(\w+)", html)
    assert sorted(begun) == sorted(ended)


def anchors(tokens):
    """Return the names that GitHub gives to the headings of a page."""
    pairs = itertools.pairwise(tokens)
    heads = [inline for head, inline in pairs if head.type == "heading_open"]
    heads = ["".join(part.content for part in head.children) for head in heads]
    return [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.no_code
@every_page
def test_links_of_every_page_lead_somewhere(page, parse):
    for token in parse(page.read_text("utf-8")):
        for part in token.children or ():
            link = part.attrGet("href") or part.attrGet("src") or "http"
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert link.startswith("http") or target.exists(), link
            if anchor and not link.startswith("http"):
                assert anchor in anchors(parse(target.read_text("utf-8"))), link


def test_code_of_a_page_is_a_file(tmp_path, capsys, monkeypatch):
    shown = sorted(re.findall(r"\]\(([\w-]+)\.md\)", INDEX.read_text("utf-8")))
    assert shown == sorted({*PAGES} - {"README", "CONTRIBUTING"})  # each page once
    for name in OF_CODE:
        pages.main([name])
        code = capsys.readouterr().out
        compile(code, name, "exec")
        blocks = [x for kind, x in machines.blocks(PAGES[name]) if kind == "python"]
        assert code.split("\n\n")[-1].strip() == blocks[-1].split("\n\n")[-1].strip()
        from_readme = "](../README.md)" in PAGES[name]
        assert code.count("pe.adam(rate), members=5") >= from_readme
    assert "usage: python docs/page.py" in said_by(SystemExit, pages.main, ["READ"])
    monkeypatch.setattr(sys, "argv", ["page.py"])
    assert "usage: python docs/page.py" in said_by(SystemExit, pages.main)
    pages.main(["several-machines"])
    said = run_python(capsys.readouterr().out, cwd=tmp_path, PYTHONPATH=str(HERE))
    assert "kept 0.77, wrong" in said and (tmp_path / "members.safetensors").exists()


FUNCTIONS = HERE / "docs" / "functions.md"


class Shown(str):
    """A default, shown without quotes."""

    __repr__ = str.__str__


def write_functions():
    """Return the page: its text above the first section, and the modules' names."""

    def shown(parameter):
        default = parameter.default
        if not callable(default) or default is inspect.Parameter.empty:
            return default
        return Shown(getattr(default, "__name__", "...").replace("<lambda>", "..."))

    def row(name, thing):
        called = ""
        if callable(thing):
            call, none = inspect.signature(thing), inspect.Parameter.empty
            names = [p for p in call.parameters.values() if p.name != "self"]
            names = [p.replace(annotation=none, default=shown(p)) for p in names]
            called = call.replace(parameters=names, return_annotation=none)
            if name == "Trainer":  # its arguments are those of make_trainer
                return "| `Trainer` | The type of what `make_trainer` returns. |\n"
        return f"| `{name}{called}` | {thing.__doc__.splitlines()[0]} |\n"

    page, *_ = FUNCTIONS.read_text("utf-8").partition("\n## ")
    starts = r"^# -+\n# ([A-Z][\w ]+)|^(?:class |def )?(\w+)(?:\(|:| = )"
    others = (fc, " (`fast_cpu`)"), (em, " (`ensemble_metrics`)")
    for module, where in (pe, ""), *others:
        source = inspect.getsource(module)
        for section, name in re.findall(starts, source, re.MULTILINE):
            if section:
                head = f"\n## {section}{where}\n\n| name | effect |\n|---|---|\n"
            elif name in module.__all__:
                page, head = page + head + row(name, getattr(module, name)), ""
            if name == "Trainer":
                for name, call in vars(pe.Trainer).items():
                    if name[0] != "_" and isinstance(call, (property, type(row))):
                        page += row(f"trainer.{name}", call)
    return page


@pytest.mark.no_code
def test_page_of_functions_says_what_the_docstrings_say():
    if os.environ.get("WRITE"):
        FUNCTIONS.write_text(write_functions(), "utf-8")
    anew = "write it anew: WRITE=1 python -m pytest -n 0 -k page_of_functions"
    assert write_functions() == FUNCTIONS.read_text("utf-8"), anew
