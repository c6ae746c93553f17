"""Tests of the README, of the pages beside this file, and of the examples."""

import contextlib
import functools
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
from unittest import mock

import devices as machines
import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ensemble_metrics as em
import fast_convolutions as fc
import pjax_ensemble as pe
import train_mnist as tm
from conftest import ENVIRONMENT, HERE, D, posix, run_python, said_by, start_python

LIBRARIES = {"tables": "sklearn", "tokens": "flax", "volumes": "flax"}  # asked for


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


@pytest.mark.once
def test_example_of_abstaining_finds_the_numbers_of_the_pages(run_example):
    classes, *found = run_example("abstain")
    page = (HERE / "docs" / "deciding.md").read_text("utf-8")
    decided = re.search(
        r"^risk 0\.05, 500 .*: kept (.*), wrong (.*)", page, re.MULTILINE
    )
    assert_allclose(classes, 100 * np.float64(decided.groups()), atol=2)
    raw = re.findall(r"^(?:seen|beyond): .* held (.*)", page, re.MULTILINE)
    calibrated = re.findall(r"^0\.9: mean .* held (.*) (.*)", page, re.MULTILINE)
    expected = np.transpose([*calibrated, raw]).astype(float)
    assert_allclose([row[1:] for row in found], 100 * expected, atol=5)


@pytest.mark.once
@pytest.mark.usefixtures("optimized")
def test_example_of_forecasts_has_intervals_that_hold_at_each_horizon(run_example):
    *rows, (_, calibrated, raw) = run_example("forecast")
    hours, errors, held, _ = np.transpose([row[[0, 1, -2, -1]] for row in rows])
    assert [*hours] == [1, 6, 12, 24] and errors[0] < errors[1] < errors[2] < 1
    assert_allclose(held, 90, atol=6)
    assert_allclose(calibrated, 90, atol=4)
    assert raw < 86


@pytest.mark.once
def test_example_of_a_sweep_chooses_a_setting_inside_the_grid(run_example):
    _, decays, *rows, (rate, decay, loss) = run_example("sweep")
    rates, losses = np.transpose(rows)[0], np.array(rows)[:, 1:]
    row, column = np.unravel_index(losses.argmin(), losses.shape)
    assert 0 < row < len(rates) - 1 and (rate, decay) == (rates[row], decays[column])
    assert 0 < loss - losses.min() < 0.1


@pytest.mark.once
def test_example_of_adapters_learns_more_from_few_examples(run_example):
    adapters, whole, anew = (row[-5:] for row in run_example("adapters"))
    assert (np.diff([adapters, whole, anew]) < 0).all()
    assert (2 * adapters[1:] < anew[1:] + 0.1).all() and adapters[-1] < whole[-1]


@pytest.mark.once
def test_example_of_tables_has_intervals_that_hold(run_example, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("tabular.FOLDS", 3)  # a third of the networks
    (error, _, r2), *rows = run_example("tables")
    coverage, held, width = np.transpose(rows)
    assert_allclose(held, coverage, atol=8)
    assert error < 60 and 0.3 < r2 < 0.6 and (np.diff(width) > 0).all()


@pytest.mark.once
def test_example_of_tokens_has_an_ensemble_better_than_its_members(run_example):
    *members, ensemble = (row[-2] for row in run_example("tokens"))
    assert ensemble < min(members) < 3


@pytest.mark.once
def test_example_of_a_loop_keeps_the_best_of_each_member_and_stops_early(run_example):
    *members, (ensemble, _) = run_example("loop")
    numbers, epochs, losses, _ = np.transpose(members)
    assert [*numbers] == [0, 1, 2, 3, 4]
    assert ensemble < np.median(losses) and max(losses) < 0.25
    kept = pe.load("loop.safetensors")
    assert [*epochs] == [*kept["['losses']"][1].argmin(axis=0) + 1]
    assert min(epochs) < max(epochs) == kept["['epoch']"] - 12 < 88  # of 100 epochs


def run_loop(file, number=0, name="epoch", count=0, when="before", **settings):
    """Run the example's loop; signal this process before or after the count-th call."""
    owners = {"epoch": pe.Trainer, "predict_members": pe.Trainer, "fsync": os}
    owner, calls = owners.get(name, pe), itertools.count(1)
    call = getattr(owner, name)

    def stopping(*args, **options):
        here = int(count) == next(calls)
        if here and when == "before":
            signal.raise_signal(int(number))
        result = call(*args, **options)
        if here and when == "after":
            signal.raise_signal(int(number))
        return result

    loop = importlib.import_module("loop")
    fast = loop.SETTINGS | {"rate": 0.03, "patience": 3}
    with (
        mock.patch.object(owner, name, stopping),
        mock.patch.object(loop, "SETTINGS", fast | settings),
        jax.numpy_rank_promotion("allow"),
    ):
        loop.main(["--file", str(file)])


STOPS = [  # a save calls fsync for the file, which then takes its name, and the folder
    ("SIGINT", "epoch", 1, "after"),
    ("SIGINT", "epoch", 3, "after"),
    ("SIGKILL", "fsync", 3, "before"),
    ("SIGKILL", "fsync", 2, "before"),
    ("SIGINT", "load", 1, "after"),
    ("SIGKILL", "epoch", 1, "after"),
    ("SIGINT", "predict_members", 1, "after"),
    ("SIGINT", "fsync", 1, "before"),
]


@posix
@pytest.mark.once
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
    folders = HERE, HERE / "benchmarks", HERE / "docs", HERE / "examples"
    path = os.pathsep.join(map(str, folders))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_loop(whole)
    said = capsys.readouterr().out
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for place in STOPS:
            stop(*place)
        best = pe.load(whole)["['losses']"][1].argmin(axis=0).max() + 1
        count = best - pe.load(stopped)["['epoch']"]
        stop("SIGKILL", "choose_members", count, "after")  # in the last best epoch
        stop("SIGINT", "save", 3, "after")  # in the second epoch without a better one
    finally:
        signal.signal(signal.SIGINT, old)
    assert "ensemble" in said and capsys.readouterr().out == ""
    run_loop(stopped)
    assert capsys.readouterr().out == said
    assert stopped.read_bytes() == whole.read_bytes()


@pytest.mark.once
def test_loop_refuses_other_settings_and_goes_on_for_more_epochs(tmp_path):
    file, run = tmp_path / "kept", functools.partial(run_loop, kind="a", epochs=2)
    run(file)
    content = file.read_bytes()
    for name, was, now in ("seed", 0, 1), ("kind", "a", "b"), ("epochs", 2, 1):
        said = said_by(ValueError, functools.partial(run, file, **{name: now}))
        assert said == f"{file} has {name} {was}, not {now}; name another"
    assert file.read_bytes() == content
    for path in file, tmp_path / "whole":
        run(path, epochs=3)
    assert file.read_bytes() == path.read_bytes() != content


def test_loop_refuses_one_loss_for_all_members(tmp_path):
    loop, trained = importlib.import_module("loop"), (None, np.ones((5, 1)))
    calls = mock.Mock(members=5), lambda *_: trained, lambda _: 0.5
    said = said_by(ValueError, loop.fit, *calls, tmp_path / "none", loop.SETTINGS)
    assert said == "validate gave (); expected losses [K]"


def test_loop_needs_no_progress_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = runpy.run_path(str(HERE / "examples" / "loop.py"))["tqdm"]
    assert [*bar(range(2, 4), total=4, initial=2)] == [2, 3]


def test_page_of_long_trainings_has_the_loop_of_the_example():
    fit = inspect.getsource(importlib.import_module("loop").fit)
    assert f"\n\n\n{fit}```" in PAGES["training"]


@pytest.mark.once
@pytest.mark.usefixtures("optimized")
def test_example_of_volumes_bounds_the_share_missed_of_kinds_it_knows(run_example):
    *members, ensemble, entropy, mutual, known, unseen = run_example("volumes")
    losses = [row[3] for row in members]
    assert ensemble[2] < min(losses) < 0.15 and min(ensemble[:2]) > 0.8
    assert mutual[2] > 0.8 > entropy[2] and min(*entropy[:2], *mutual[:2]) > 0.75
    assert known[0] < 13 and 2 * known[0] < unseen[0]
    missed = importlib.import_module("volumes").missed
    assert not missed(np.ones((1, 2)), np.zeros((1, 2)), [0, 1]).any()


IMPORTS = """
import importlib, sys

path = sys.path[1:]
for name in sys.argv[1:]:
    sys.path[1:] = path
    for module in "pjax_ensemble", "ensemble_metrics", "tabular":
        sys.modules.pop(module, None)
    print(importlib.import_module(name).pe.__file__)
sys.modules |= {"flax": None, "sklearn.datasets": None}
for name in "tables", "tokens", "volumes":
    del sys.modules[name]
    try:
        importlib.import_module(name)
    except SystemExit as error:
        print(error)
"""


@pytest.mark.once
def test_examples_take_modules_beside_or_above_them_and_say_what_they_lack(
    tmp_path,
):
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    shutil.copytree(HERE / "examples", tmp_path / "examples")
    scripts = [path.stem for path in HERE.glob("examples/*.py")]
    for name in "pjax_ensemble.py", "ensemble_metrics.py":
        shutil.copy(HERE / name, tmp_path)
    for folder in tmp_path, tmp_path / "examples":
        options = dict(cwd=tmp_path / "examples", PYTHONPATH="")
        printed = run_python(IMPORTS, *scripts, **options)
        *files, table, tokens, volumes = printed.splitlines()
        assert files == [str(folder / "pjax_ensemble.py")] * len(scripts)
        assert table.endswith(": python -m pip install scikit-learn")
        for said in tokens, volumes:
            assert said.endswith(": python -m pip install flax")
        shutil.copy(HERE / "pjax_ensemble.py", tmp_path / "examples")  # for the second


PATHS = [HERE / "README.md", HERE / "CONTRIBUTING.md", *sorted(HERE.glob("docs/*.md"))]
PAGES = {path.stem: path.read_text("utf-8") for path in PATHS}
README, EVERY_PAGE = PAGES["README"], "".join(PAGES.values())
OF_CODE = [name for name in PAGES if "```python" in PAGES[name] and name != "README"]


def run_page(text, names, tolerance=0.1):
    """Run a page's Python; each block's output stands in an unnamed block below it."""
    blocks = [*machines.blocks(text), ("end", "")]
    for (kind, code), (next_kind, below) in itertools.pairwise(blocks):
        used = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        if kind == "python" and all(map(importlib.util.find_spec, used)):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            both = out.getvalue(), "" if next_kind else below
            printed, said = (re.split(r"(-?\d+\.?\d*)", text) for text in both)
            assert printed[::2] == said[::2]  # the text; between stand the numbers
            numbers = np.float64(printed[1::2]), np.float64(said[1::2])
            # As JAX 0.10 rounds; with others a coverage without data is off by 0.06.
            assert_allclose(*numbers, atol=tolerance)
    return names


@pytest.fixture(scope="module")
def readme():
    """Return the names of the README's Python, which other pages go on from."""
    with jax.numpy_rank_promotion("allow"):
        return run_page(README, {}, tolerance=0)


@pytest.mark.once
@pytest.mark.parametrize("name", OF_CODE)
def test_code_of_every_page_runs_and_prints_what_it_says(
    name, readme, tmp_path, monkeypatch, request
):
    if name in ("tables", "uncertainty"):  # whose training takes longer than compiling
        request.getfixturevalue("optimized")
    monkeypatch.chdir(tmp_path)
    few = tm.generate_digits(0, 640, 64)
    monkeypatch.setattr(tm, "load_data", lambda *where: few)
    monkeypatch.setitem(tm.NETWORKS, "cnn", tm.NETWORKS["tiny"])
    for flags in re.findall(r"`python train_mnist\.py (.* runs/small)`", PAGES[name]):
        assert tm.main(flags.split()) == 0
    with jax.numpy_rank_promotion("allow"):
        names = run_page(PAGES[name], dict(readme))
    if name == "coming-from":
        hand, one = names["members"][0].bias, names["params"][0].bias
        assert hand.shape == (D, *one.shape)
    if name == "dense":
        (flat, by_images), (more_flat, more) = names["missed"], names["over"]
        assert by_images < 0.1 < flat - 0.02 and more < 0.05 < more_flat - 0.1
        names["labels"][0] = 0
        assert not names["shares_missed"]([0], names["grid"]).any()


FOREVER = """
data, few = (x[:200], y[:200]), order[:100]
state, losses = trainer.epoch(state, data, few)
print("now", flush=True)
while True:
    state, losses = trainer.epoch(state, data, few)
"""
GO_ON = """
state, losses = trainer.epoch(trainer.latest, data, few)
int(state.opt_state.num_steps.min())
"""


@posix
@pytest.mark.once
def test_readme_runs_in_a_notebook_that_is_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    env = {**ENVIRONMENT, "PYTHONPATH": str(HERE), "IPYTHONDIR": str(tmp_path)}
    kernel, client = manager.start_new_kernel(env=env, cwd=tmp_path)

    def run(cell):
        said = []

        def hear(message):
            content = message["content"]
            shown = content.get("data", {}).get("text/plain")
            said.append(content.get("text", shown) or "")
            if said[-1] == "now\n":
                kernel.interrupt_kernel()

        reply = client.execute_interactive(cell, output_hook=hear, timeout=120)
        stopped = "KeyboardInterrupt" if cell is FOREVER else None
        assert reply["content"].get("ename") == stopped, reply["content"]
        return "".join(said)

    cells, _ = machines.read_readme()
    cells += FOREVER, GO_ON, "trainer", "state"
    try:
        said = dict(zip(cells, map(run, cells)))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert int(said[GO_ON]) in range(700, 10**9, 100)
    assert all(said[n].count("\n") == 0 for n in ("trainer", "state"))
    assert said["trainer"].startswith("Trainer(init, loss_fn, Layout(members=5")


def test_readme_is_read_to_the_end_and_trains_in_fifteen_lines():
    assert README.count("\n") <= 150
    assert max(map(len, README.splitlines())) <= 100
    _, block = README.split("```python\nrate = ", 1)
    assert sum(map(bool, block.partition("\n```")[0].splitlines())) == 15


def test_promises_name_tests_that_are_there():
    files = [*HERE.glob("test_*.py"), *HERE.glob("*/test_*.py")]
    tests = "".join(file.read_text("utf-8") for file in files)
    named = re.findall(r"`(test_\w+)`", EVERY_PAGE)
    assert named and [name for name in named if f"def {name}(" not in tests] == []


def test_commands_of_every_page_are_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()  # the command with --resume finds it
    (tmp_path / "DIR" / "config.json").write_text("{}")
    commands = re.findall(r"([\w/]+\.py)( [^`\n|]*)?", EVERY_PAGE)
    assert len(commands) > 30
    for script, flags in commands:
        assert (HERE / script).exists(), script
        if script == "train_mnist.py" and "--help" not in flags:
            assert tm.parse_arguments(flags.split())


GALLERY = HERE / "examples" / "README.md"


def test_gallery_has_every_example_with_its_command_and_its_picture():
    rows = re.findall(
        r"`python (examples/\w+\.py) --plot (\w+\.png)` \| "
        r"!\[.+\]\(\.\./images/(\w+\.png)\) \|\n",
        GALLERY.read_text("utf-8"),
    )
    scripts, drawn, shown = zip(*rows)
    here = {f"examples/{path.name}" for path in HERE.glob("examples/*.py")}
    assert {*scripts} == here - {"examples/tabular.py"}
    assert drawn == shown
    assert all((HERE / "images" / name).stat().st_size < 100_000 for name in shown)


@pytest.mark.parametrize("page", [*PATHS, GALLERY], ids=[*PAGES, "gallery"])
def test_links_of_every_page_lead_somewhere(page):
    links = re.compile(r"\]\((?!http)([^)#]*)#?([^)]*)")
    for path, anchor in links.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            text = re.sub(r"[^\w\n# -]", "", target.read_text("utf-8")).lower()
            assert f"#-{anchor}\n" in text.replace(" ", "-"), anchor


FUNCTIONS = HERE / "docs" / "functions.md"


def write_functions():
    """Return the page: its text above the first section, and the modules' names."""

    def row(name, thing):
        called = ""
        if callable(thing):
            call, none = inspect.signature(thing), inspect.Parameter.empty
            names = [p for p in call.parameters.values() if p.name != "self"]
            names = [p.replace(annotation=none, default=none) for p in names]
            called = call.replace(parameters=names, return_annotation=none)
        return f"| `{name}{called}` | {thing.__doc__.splitlines()[0]} |\n"

    page, *_ = FUNCTIONS.read_text("utf-8").partition("\n## ")
    starts = r"^# -+\n# ([A-Z][\w ]+)|^(?:class |def )?(\w+)(?:\(|:| = )"
    others = (fc, " (`fast_convolutions`)"), (em, " (`ensemble_metrics`)")
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


def test_page_of_functions_says_what_the_docstrings_say():
    write = "import test_pages as t; t.FUNCTIONS.write_text(t.write_functions())"
    anew = f"write it anew: PYTHONPATH=.:benchmarks:docs python -c '{write}'"
    assert write_functions() == FUNCTIONS.read_text("utf-8"), anew
