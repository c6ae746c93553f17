"""Tests of the scripts beside this file; long trials have short forms here."""

import argparse
import concurrent.futures
import functools
import importlib.util
import io
import itertools
import json
import math
import re
import sys
from unittest import mock

import accelerators
import calls
import cheaper
import cifar10
import convolutions
import gpu
import jax
import memory
import networks
import numpy as np
import parameters
import pytest
import resnet
import speed
import states
import tables
from numpy.testing import assert_array_equal
from trials import devices, faults, interrupts, mutants

import pjax_ensemble as pe
from conftest import ENVIRONMENT, HERE, cases, linux, posix, said_by

# isort: split
from conftest import small_files, write_files


@linux
def test_memory_has_a_row_for_each_call(capsys):
    memory.peaks(argparse.Namespace(members=2, devices=1, at_once=1, width=8))
    rows = capsys.readouterr().out.splitlines()
    calls = [re.match(r"\| (\w+)[\w, ]* \| -?[\d.]+ \|$", row)[1] for row in rows[2:]]
    names = "init update update epoch epoch predict_members gather save load scatter"
    assert calls == [*names.split(), "update"]
    array, most = memory.peak(np.ones, 2**24)  # 128 MiB
    assert array.nbytes <= most


# Three loops: of eight turns, as the compiler for GPUs prints it; of three, as the
# compiler for TPUs does; and of unknown length.
HLO = (HERE / "benchmarks" / "loops.hlo").read_text("utf-8")


def test_compiled_programs_are_counted_turn_by_turn():
    found, turns = accelerators.count(*accelerators.read(HLO)), 8 + 3 + 1
    sizes = {"all-reduce": 28 * turns, "all-gather": 2 * 32, "reduce-scatter": 64}
    expected = dict(endless=1, meetings=turns + 3, bytes=sum(sizes.values())) | sizes
    # Per turn a meeting and a fusion; kernels in the branches; the custom call.
    assert found == expected | dict(kernels=2 * turns + 5 + 1)
    # The optimizer is in a branch, so no loop has a hidden length, on a CPU either.
    devices, row = jax.devices()[:2], ("cpu:2", "small", "update", 4, None, 1)
    found, cells = accelerators.compile_one(row, devices)
    assert not found["endless"] + found["meetings"] and found["kernels"] > 10
    assert float(cells[4]) > 2
    # Replicas average the gradients, 552 numbers, and the loss.
    found, _ = accelerators.compile_one((*row[:3], 1, 1, 1), devices)
    assert found["meetings"] and found["bytes"] == 553 * 4


def test_members_fit_that_the_memory_holds(tmp_path, monkeypatch, capsys):
    own = "from accelerators import form, loss_of, mlp, pe, small_init as init; "
    own += "batch = form(9, 8, dtype='f4'), form(9); optimizer = pe.adam(1); "
    (file := tmp_path / "own.py").write_text(own + "loss = loss_of(mlp)")
    monkeypatch.setattr(accelerators, "devices_of", lambda name: jax.devices()[:2])
    monkeypatch.setattr(accelerators, "ROOM", 10 * 3 * 4 * 552)  # ten states under Adam
    accelerators.print_fit(str(file), "cpu:2")
    turn, once = map(int, re.findall(r"(\d+) (?:fit|at)", capsys.readouterr().out))
    assert 2 < once < turn < 10


# Three members, each by two loops of unknown length: over 32 steps, over single steps.
EPOCH = (HERE / "benchmarks" / "epoch.hlo").read_text("utf-8")


def test_an_epochs_kernels_and_meetings_are_those_of_a_single_step():
    program = accelerators.read(HLO.replace("ENTRY ", "") + EPOCH)
    found = accelerators.count(*program, step=True)
    assert (found["kernels"], found["meetings"], found["bytes"]) == (3 * 2, 3, 3 * 28)
    assert accelerators.count(*program)["endless"] == 3 * 2


@cases(
    "row, endless, kernels, wrong",
    (("h100:1", "resnet", "update", 4, None, 1), 0, 850, False),
    (("h100:1", "resnet", "update", 4, None, 1), 0, 851, True),
    (("v5e:2x4", "cnn", "update", 64, 1, 1), 1, 9, True),
    (("h100:8", "cnn", "epoch", 64, None, 1), 2, 999, False),
    (("h100:8", "cnn", "epoch", 8, 1, 1), 3, 9, True),
    (("h100:8", "cnn", "epoch", 64, 1, 1), 16, 9, False),
    (("v5e:2x4", "cnn", "epoch", 64, None, 1), 3, 9, False),
)
def test_too_many_loops_or_kernels_are_wrong(row, endless, kernels, wrong):
    found = {"endless": endless, "kernels": kernels}
    assert accelerators.is_wrong(row, 8 if ":8" in row[0] else 1, found) is wrong


@pytest.mark.once
def test_gpu_tables_have_every_row_and_say_what_is_wrong(monkeypatch, capsys):
    for name in "NETWORKS", "SPEEDS", "SIZES", "LOSSES":
        monkeypatch.setattr(gpu, name, dict(getattr(gpu, name)))
    monkeypatch.setattr(accelerators, "NETWORKS", gpu.NETWORKS)
    gpu.shrink()
    few = [x for x in gpu.SPEEDS if re.search("K = 1$|small|predict|8, `", x)]
    rows = {x: (gpu.SPEEDS[x][0], "small", *gpu.SPEEDS[x][2:]) for x in few}
    few = dict(RIGHT=("small",), MEMORY=("dense",), SPEEDS=rows)  # sooner compiled
    few["apart"] = lambda task, *args, **_: getattr(gpu, task)(*args)  # in this process
    for name, value in few.items():
        monkeypatch.setattr(gpu, name, value)
    found = gpu.do_tasks()
    monkeypatch.setattr(gpu, "do_tasks", lambda: found)
    answers = {"cells": "2"}, {"cells": ["5", "6", "7"]}, SystemExit("it ended")
    answer = mock.Mock(side_effect=answers)
    with mock.patch.multiple(speed, launch=mock.Mock(), answer=answer):
        assert gpu.main([]) == 0
    said = capsys.readouterr().out
    gpu.LOSSES["twelve losses, float32"] = "float32", 12, 0.0
    assert gpu.print_tasks(found) == 1
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", said, re.MULTILINE))
    names = [*gpu.LOSSES, *gpu.BITS, *gpu.MEMORY, *gpu.SPEEDS]
    assert [name for name in rows if name in names] == names
    assert {rows[title] for title in gpu.LOSSES} == {"0.0e+00"}
    assert {rows[title] for title in gpu.BITS} == {"equal"} and "Error" not in said
    assert "| ValueError: wrong by 0.0e+00 |" in capsys.readouterr().out


@posix
def test_interrupted_loops_go_on_from_the_latest_state():
    """This is the short form of the trial in trials/interrupts.py."""
    counts = interrupts.cell(trials=8)
    assert counts["interrupts"] >= 8 and not counts["lost"] + counts["different"]


def test_tables_train_networks_on_the_rows_of_each_fold(monkeypatch):
    monkeypatch.setattr(tables, "STEPS", 200)
    x, halves = np.linspace(-1, 1, 40), np.split(np.arange(40), 2)
    data = tables.Data(x[:, None], np.abs(x), [])
    found = tables.train_networks(data, [halves[k % 2] for k in range(5)])
    errors = np.abs(found - data.y).reshape(5, 2, 20).mean(axis=2)  # of each half
    assert (errors.argmin(axis=1) == [0, 1, 0, 1, 0]).all()
    assert errors.min(axis=1).max() < 0.1


def test_tables_score_each_split_on_its_test_rows(tmp_path):
    folder = write_files(tmp_path / "made-up", {"test_rows.txt": b"0 1\n4 5 6 7\n"})
    x, rows = np.arange(8.0), np.arange(8)
    np.savetxt(folder / "data.txt", np.c_[x, x])

    def predict(model, train, test):  # 2 below or above, and wide enough from 6 on
        assert model == "m" and {*train[0].flat} ^ {*test[0].flat} == {*rows}
        assert_array_equal(test[0][:, 0], test[1])
        new = test[1]
        mean, wide = new + np.where(new < 5, -2, 2), 3 * (new > 5)
        return mean, np.stack([mean - 1 - wide, mean + 1], axis=1), new[0]

    found = tables.measure(predict, "m", tables.read("made-up", tmp_path))
    assert_array_equal(found[:, :4], [[2, 0, 0, 2], [2, 4, 0.5, 3.5]])
    classes = tables.read_classes("wine", tmp_path)
    found, seconds = tables.measure_classes(tables.CLASSIFIERS["logistic"], classes)
    assert found["accuracy"] > 0.9 and len(seconds) == 5


@posix
def test_speed_says_in_a_line_why_it_stops(tmp_path, monkeypatch):
    said = functools.partial(said_by, SystemExit)

    def refused(group):
        monkeypatch.setattr(sys, "argv", ["speed.py", "--group", group])
        return said(speed.main)

    data = write_files(tmp_path / "concrete", {"data.txt": b"1 2 3"}) / "data.txt"
    monkeypatch.setenv("UCI_DIR", str(tmp_path))
    monkeypatch.setenv("MNIST_DIR", str(tmp_path / "none"))
    with monkeypatch.context() as patch:  # before anything starts
        patch.setattr(speed.subprocess, "Popen", None)
        assert refused("11") == "--group is 11; expected groups from 1 to 9"
        assert refused("5").startswith(f"{data}: cannot reshape array of size 3 into")
        assert refused("9").startswith(f"MNIST_DIR is {tmp_path}/none, not a folder;")
        monkeypatch.delenv("UCI_DIR")
        assert refused("5").startswith("UCI_DIR is not set; set it to the folder")
    peer = "a peer", "../speed.py --nope"  # whose last line is quoted
    name, command = peer
    measured = said(speed.measure, {name: [command]}, 1)
    for stopped in measured, said(speed.run_job, *peer):
        words = "speed.py: error: unrecognized arguments: --nope"
        assert stopped == f"a peer ended with status 2: {words}"


PARAMETERS = {
    "CNN": 824_458,  # the guides' numbers
    "batch-norm CNN": 49_242,
    "ResNet-20": 269_722,  # 0.27 million (He et al. 2016, table 6)
    "WRN-16-2": 691_674,  # 0.7 million (Zagoruyko and Komodakis 2016)
}


@pytest.mark.once
@pytest.mark.parametrize("name", networks.SHAPES)
def test_networks_of_all_systems_have_the_same_parameters(name, monkeypatch):
    monkeypatch.syspath_prepend(HERE / "benchmarks" / "peers")
    import networks_jax

    init, loss_fn, apply_fn, (x, y) = networks_jax.make(name)
    params, state = jax.eval_shape(init, jax.random.key(0))
    num_params = sum(p.size for p in jax.tree.leaves(params))
    assert num_params == PARAMETERS.get(name.split(",")[0], num_params)
    shape = networks.SHAPES[name]
    logits = jax.eval_shape(apply_fn, params, state, x[:3])
    assert logits.shape == (3, *shape.labels, shape.classes)
    _, moved = jax.eval_shape(loss_fn, params, state, None, x[:3], y[:3])
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    if importlib.util.find_spec("torch"):
        import networks_torch

        model = networks_torch.network(name)()
        more = 4 * 128 if name == "LSTM" else 0  # a second bias
        assert sum(p.numel() for p in model.parameters()) == num_params + more


@pytest.mark.once
def test_calls_of_a_tiny_network_are_counted_and_take_steps(monkeypatch, capsys):
    monkeypatch.syspath_prepend(HERE / "benchmarks" / "peers")
    import single_calls

    batch = np.eye(8, dtype=np.float32), np.arange(8)
    for what, make in (
        ("update", single_calls.call_of_ours),
        ("epoch", single_calls.call_of_ours),
        ("update", single_calls.call_by_hand),
    ):
        call = make(what, *batch)
        losses = [float(np.sum(call()[1][0])) for _ in range(40)]
        assert losses[-1] < losses[0] < 9, (what, make)
    for make in single_calls.call_of_ours, single_calls.call_by_hand:
        assert make("predict", *batch)().sum(axis=-1) == pytest.approx(np.ones(8))
    monkeypatch.setattr(sys, "argv", ["single_calls.py", "epoch", "--steps", "3"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("train\n"))
    single_calls.main()
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["rows"] == 3


@pytest.mark.once
@mock.patch.dict("os.environ", ENVIRONMENT)  # programs compile as this process's
def test_networks_take_turns_and_rates_are_of_all_members(monkeypatch, capsys):
    every = networks.systems("LSTM", one=True)
    chosen = {name: every[name] for name in ("other", "by hand, fast")}
    assert len(every) == 5 and len(networks.systems("U-Net")) == 8
    monkeypatch.setattr(networks, "systems", lambda name, one: chosen)
    found = networks.measure("LSTM", 1, "--seconds 0.01 --batch 8 --bfloat16", one=True)
    for name, system in found.items():
        assert len(system["train"]) == len(system["predict"]) == 1, name
        assert 0.1 < system["memory"] < 9
        for hello in system["hello"]:
            assert hello["train"] == pytest.approx(math.log(10), rel=0.1)
    names = "ours", "other", "by hand", "by hand, fast", "torch, 1 x 2", "torch, 2 x 1"
    rates = [4.0, 1, 2], [3], [5], [10], [2], [4]
    given = {x: dict(train=y, memory=y[0]) for x, y in zip(names, rates)}
    networks.print_network("a", given, "train")
    row = "| a | 2 | 5 | 10 | 4 (2 x 1) |  | 2.00 | 0.40 | 0.20 | 0.50 | 3 | 1.50 "
    row += "| 4.00; 5.00; 10.00; 2.00 |"
    assert capsys.readouterr().out.strip() == row
    networks.print_first_calls("LSTM", "--batch 8")
    row = r"\| LSTM \| by hand, fast( \| \d+\.\d\d){4} \|"
    assert re.fullmatch(row, capsys.readouterr().out.strip())
    monkeypatch.setattr(sys, "argv", ["networks.py", "--networks", "WRN", "VGG"])
    assert said_by(SystemExit, networks.main).startswith("no network is 'VGG'; there")


@pytest.mark.once
@mock.patch.multiple(cifar10, CALIBRATE=20, SHIFTED=20)
def test_cifar10_is_trained_once_and_scored(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    sizes = {"data_batch_1": 256, "data_batch_2": 128, "test_batch": 60}
    for name, rows in sizes.items():
        labels = rng.integers(10, size=(rows, 1))  # images are brighter by label
        pixels = rng.integers(60, size=(rows, 3072)) + 18 * labels
        records = np.concatenate([labels, pixels], axis=1).astype(np.uint8)
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    digits = write_files(tmp_path / "digits", small_files())
    monkeypatch.setenv("MNIST_DIR", str(digits))
    net = resnet.ResNet(0, (4,))  # a convolution and a layer

    files = [f"--json={tmp_path / 'report'}", f"--plot={tmp_path / 'report.png'}"]
    cifar10.main([f"--data-dir={tmp_path}", "--epochs=1", *files], net)
    report = json.loads((tmp_path / "report").read_text())
    out = capsys.readouterr().out
    assert out.count("epoch ") == 1 + 4 and "| 4 snapshots |" in out
    assert {*report["as they are"]} == {*report["digits"]} and len(report) == 23
    assert (tmp_path / "report.png").stat().st_size > 10_000
    for scores in [*report.values()][:-1]:
        assert np.isfinite([[*x.values()] for x in scores.values()]).all()

    cifar10.main([f"--data-dir={tmp_path}", "--epochs=1", "--alone", *files], net)
    alone = json.loads((tmp_path / "report").read_text())["as they are"]
    assert [*alone.items()] == [*report["as they are"].items()][:2]


@pytest.mark.parametrize("name", faults.TRIALS)
def test_damage_is_refused_and_nothing_is_lost(name):
    """These are the short forms of the trials in trials/faults.py."""
    counts, failures = faults.run(name, quick=True)
    assert sum(counts.values()) and not failures, failures


def test_table_of_cheaper_ways_has_the_ways_that_the_page_prints():
    page = cheaper.PAGE.read_text("utf-8")
    printed = re.findall(cheaper.LINE, page, re.MULTILINE)
    row = r"^\| (.+) \| ([\d,]+) \| .+ ± .+ \| .+ ± .+ \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert {way[:2] for way in printed} == {*rows} - {("SWAG, last weights", "500")}
    assert len(printed) > 9 and all(text in page for text in cheaper.MORE)
    seeded = devices.seeded("key(0), default_rng(0), key(1)", 7)
    assert seeded == "key(7), default_rng(7), key(1)"


@linux
@mock.patch.dict("os.environ", ENVIRONMENT)
def test_readme_starts_alike_on_any_number_of_cores(tmp_path):
    """This is the short form of trials/devices.py: the README's first example."""
    code, said = devices.read_readme()
    short = [block.replace("(500, 50)", "(5, 50)") for block in code[:2]]
    assert short != code[:2]
    short.append("print(jax.device_count())")

    def start(cores):
        folder = tmp_path / str(cores)
        folder.mkdir()
        return devices.first_steps(cores, folder, short)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        (few, one), (many, other) = pool.map(start, [3, 16])
    for printed, cores in (few, 3), (many, 16):
        assert printed.startswith("NLL") and printed.split()[-1] == str(cores)
    assert devices.difference(other, one) < 1e-5
    assert devices.difference({"a": np.ones(2)}, {"a": np.array([3.0, 4])}) == 0.75
    for told, count in (said, 0), (said + 0.01, 9), (said[1:], 1):
        assert len(devices.complaints(told, said)) == count


def test_a_case_that_ends_its_process_ends_no_other(tmp_path, monkeypatch, capsys):
    script = """import os, sys
for seed in range(int(sys.argv[3]), int(sys.argv[1]) + int(sys.argv[3])):
    print('{"seed": %d, "verdict": "right"}' % seed if seed != 2 else os.abort())
    sys.stdout.flush()
"""
    (tmp_path / "convolutions.py").write_text(script)
    monkeypatch.setattr(speed, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(sys, "argv", ["convolutions.py", "7", "--processes", "2"])
    assert said_by(SystemExit, convolutions.main) == "True"
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 2 is ended: the process ended with status -6: ")
    assert last == "7 cases; wrong none; ended [2]; refused none; largest error 0"
    args = argparse.Namespace(isa="AVX512_BF16", rates=False)
    isa = convolutions.environment(args)
    assert "=AVX512_BF16" in isa["XLA_FLAGS"]
    assert isa["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    args = argparse.Namespace(programs=False, rates=False, dtype="bfloat16")
    assert convolutions.compare(3, args)["verdict"] == "right"
    args = argparse.Namespace(
        programs=False, rates=False, dtype="int8"
    )  # which has no normal draws
    assert convolutions.compare(3, args)["verdict"] == "refused"
    monkeypatch.setattr(convolutions, "error", lambda *_: ("bfloat16", math.nan))
    assert convolutions.compare(3, args)["verdict"] == "wrong"


def test_layers_that_take_longer_than_by_jit_are_told(monkeypatch):
    args = argparse.Namespace(programs=False, rates=True, isa="")
    assert convolutions.environment(args) == {}
    x, kernel, how = convolutions.draw_layer(3)
    assert x.shape[-1] == kernel.shape[-2] * how["feature_group_count"]
    assert min(convolutions.rates(3, rounds=1)) > 0
    for times, verdict in ((1.1, 1.19, 9.0), "right"), ((1.0, 1.21, 1.0), "wrong"):
        monkeypatch.setattr(convolutions, "rates", lambda _, times=times: times)
        assert convolutions.compare(3, args)["verdict"] == verdict
    assert convolutions.form_of(3, args).startswith(str(x.shape))


def test_calls_of_both_jits_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calls.py", "--rounds", "1"])
    calls.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "arrays  jax.jit  fast_cpu.jit"
    assert [row.split()[0] for row in rows] == ["2", "50", "300"]
    assert all(float(x) > 0 for row in rows for x in row.split()[1:])


MODULE = """
class Box:
    def area(self, width, height=1):
        \"\"\"Return 2 * 3.\"\"\"
        def half(x: int = 4) -> int:
            return x / 2
        if width < 0 and not height:
            raise ValueError(f"{width + 1}")
        return width * height, half(1)

def unseen():
    return -1
"""
TEST = """
import box

def test_area():
    assert box.Box().area(2, 3)[0] == 6

def test_half():
    assert box.Box().area(1)[1] == 0.5
"""


def test_mutants_meet_the_tests_that_enter_their_function(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "box.py").write_text(MODULE)
    (tmp_path / "test_box.py").write_text(TEST)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    found = mutants.mutants("box.py")
    changes = {
        name: {(mutant.before, mutant.after) for mutant in each}
        for name, each in found.items()
    }
    area = {("width < 0", "width <= 0"), ("not height", "height"), ("0", "1")}
    assert area < changes["Box.area"]
    assert ("x / 2", "x") in changes["Box.area.<locals>.half"]
    texts = {text for each in changes.values() for text, _ in each}
    assert not texts & {"int", "x: int", "width + 1", "2 * 3"}
    for mutant in itertools.chain(*found.values()):
        compile(mutant.source(), "box.py", "exec")
        assert mutant.source() != MODULE

    (tmp_path / "entered").mkdir()
    enters = [["box.py", "Box.area", 3]], [["box.py", "Box.area.<locals>.half", 5]]
    rows = [
        {"test": f"test_box.py::test_{name}", "seconds": seconds, "entered": entered}
        for name, seconds, entered in zip(("area", "half"), (1, 2), enters)
    ]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "entered" / "1.jsonl").write_text(lines)
    monkeypatch.setattr(mutants, "MODULES", ["box.py"])
    argv = ["mutants.py", str(tmp_path / "entered"), "5", "--seed", "22"]
    monkeypatch.setattr(sys, "argv", argv)
    assert mutants.main() == 1  # some live, and no test enters the others
    said = capsys.readouterr().out
    for start in (
        "killed by test_box.py::test_area: box.py:9 Box.area: width * height -> ",
        "LIVES after 1 tests: box.py:7 Box.area: ",
        "no test enters box.py:12 unseen: ",
    ):
        assert f"\n{start}" in f"\n{said}"
    assert "\n-    return -1\n+    return " in said
    assert re.search("[1-3] killed, [1-3] live, [1-3] that no test enters\n$", said)


def test_parameters_take_steps_by_trainers_and_by_hand():
    for name, run in parameters.runs("8 leaves of 4, SGD").items():
        first, last = (jax.device_get(run()) for _ in range(2))
        pairs = [*zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)]
        assert any(np.any(x != y) for x, y in pairs), name


@pytest.mark.usefixtures("optimized")
def test_random_programs_on_states_are_right_one_operation_at_a_time():
    for seed in 0, 1, 3, 121, 138:  # each was wrong once
        assert "wrong" not in {verdict for _, verdict, _ in states.compare(seed)}
    with mock.patch.object(pe, "_hidden", lambda tree: tree):  # as it was
        assert "wrong" in {verdict for _, verdict, _ in states.compare(0)}
