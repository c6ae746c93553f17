"""Compile a trainer's programs for GPUs and TPUs that are not there; say what they are.

The compilers are the accelerators' own, each in an environment of its own:

    python -m pip install 'jax[tpu]'
    python -m pip install jax jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

    python benchmarks/accelerators.py            # on all devices of what is installed
    python benchmarks/accelerators.py h100:8 v5e:2x4 --networks cnn --programs update
    python benchmarks/accelerators.py --quick    # one small update per compiler

A row per program: the seconds to compile it; megabytes per device, of its arguments,
temporary ones, and all at once, these also in states of one member (parameters and
optimizer's state).  Then, per call of `update`, or per step of `epoch`: loops whose end
the compiler does not know, at which a host or a core has to look whether they go on
(one for `epoch`, of its steps); meetings of devices and the megabytes that a device
gives to them; kernels started.  Last, on TPUs, XLA's estimate of a billion operations
and of gigabytes accessed, where the body of a loop counts once: one turn of the
members' loop, one step of an epoch.

Nothing runs.  GPU kernels are chosen without the autotuning that a GPU would do.
"""

import argparse
import collections
import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
# Where libtpu would look for a TPU and its other hosts.
os.environ |= dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pjax_ensemble as pe
import train_mnist as tm

# What XLA knows of an H100 (SXM, 80 GB).
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
COMPILERS = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}
DEVICES = {"h100:1": "cuda", "h100:8": "cuda"}
DEVICES |= dict.fromkeys(["v5e:2x4", "v6e:2x4", "v5e:16x16"], "tpu")


def devices_of(name: str) -> list:
    """Return the devices of a system, described, not there."""
    if DEVICES[name] == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    count = f"1x1x{name.partition(':')[2]}"  # slices, hosts, GPUs of each
    given = dict(topology=count, target_config=H100)
    return topologies.get_topology_desc(platform="cuda", **given).devices


# Networks: of each, an init, logits, an optimizer, a member's batch, and the data's form


class Network(NamedTuple):
    init: object
    logits: object
    optimizer: object
    batch: int
    inputs: jax.ShapeDtypeStruct  # of all examples
    labels: tuple = ()  # the axes of an example's labels
    most: int = 8  # members per device


def form(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def small_init(key):
    first, last = jax.random.split(key)
    return pe.dense_init(first, 8, 50), pe.dense_init(last, 50, 2)


def small(params, x):
    return pe.dense(params[1], jax.nn.relu(pe.dense(params[0], x)))


WIDTH, HEADS, LAYERS, TOKENS = 512, 8, 8, 8192  # 29 million parameters


def transformer_init(key):
    def dense(i, j, *sizes):
        return pe.dense_init(jax.random.fold_in(key, 10 * i + j), *sizes)

    sizes = (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    layers = [[dense(i, j, *s) for j, s in enumerate(sizes)] for i in range(LAYERS)]
    return dense(LAYERS, 0, TOKENS, WIDTH).weight, layers


def transformer(params, tokens):
    """Map tokens [B, T] to logits of the next ones, [B, T, tokens]."""

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
            x.var(-1, keepdims=True) + 1e-6
        )

    table, layers = params
    x = table[tokens]
    for into, out, wide, narrow in layers:
        heads = pe.dense(into, norm(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x += pe.dense(out, mixed.reshape(x.shape))
        x += pe.dense(narrow, jax.nn.gelu(pe.dense(wide, norm(x))))
    return norm(x) @ table.T


def cnn(params, images):
    return pe.cnn(params, images.astype(jnp.float32) / 255)


IMAGES = form(np.uint8, 60_000, 28, 28, 1)
SGD, ADAM = pe.sgd(0.1, momentum=0.9), pe.adam(1e-3)
NETWORKS = {
    "small": Network(small_init, small, ADAM, 100, form(np.float32, 1000, 8), (), 100),
    "cnn": Network(pe.cnn_init, cnn, SGD, 128, IMAGES),
    "batchnorm": Network(None, None, None, 64, IMAGES),
    "transformer": Network(
        transformer_init, transformer, ADAM, 8, form(np.int32, 1000, 256), (256,)
    ),
}


def make(name: str, devices: list, members: int, at_once: int) -> pe.Trainer:
    if name == "batchnorm":  # the script's
        sizes = {"image_shape": (28, 28, 1), "classes": range(10)}
        return tm.make_trainer(tm.RECIPES[name], members, devices, 1, sizes)
    init, logits, optimizer, *_ = NETWORKS[name]

    def loss_fn(params, x, y):
        return pe.softmax_cross_entropy(logits(params, x), y).mean()

    how = dict(members=members, devices=devices, at_once=at_once, apply_fn=logits)
    return pe.make_trainer(init, loss_fn, optimizer, **how)


# Programs, as the compiler prints them

FREE = "parameter constant tuple get-tuple-element bitcast after-all copy-start "
FREE = {*(FREE + "partition-id opt-barrier").split()}
MEETINGS = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
MEETINGS |= {"collective-permute"}
BITS = {"pred": 8}  # others have them in their names


class Operation(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str


def read(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Return the computations of a program by name, and the name of the entry."""
    computations: dict[str, list[Operation]] = {}
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            operations = computations[head[2]] = []
            entry = head[2] if head[1] else ""
        elif found := re.match(r"  (?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\((.*)", line):
            operations.append(Operation(*found.groups()))
    return computations, entry


def num_bytes(shape: str) -> int:
    """Return the bytes of a shape, of all parts of a tuple."""
    total = 0
    for kind, axes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = BITS.get(kind) or int(re.search(r"\d+", kind)[0])
        total += int(np.prod([int(n) for n in axes.split(",") if n])) * bits // 8
    return total


def turns(loop: Operation, condition: list[Operation]) -> int | None:
    """Return how often a loop runs, or None where the compiler does not know it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    # On TPUs: while its counter, from 0, is below a constant.
    ends = {x.name: x.rest for x in condition if x.opcode == "constant"}
    names = re.findall(r"%([\w.-]+)", condition[-1].rest.partition(")")[0])
    given = [int(ends[name].partition(")")[0]) for name in names if name in ends]
    return given[0] if condition[-1].opcode == "compare" and given else None


def count(computations: dict, name: str) -> collections.Counter:
    """Count endless loops, meetings, their bytes, and kernels of a computation."""
    total: collections.Counter = collections.Counter()
    for operation in computations[name]:
        opcode, rest = operation.opcode.removesuffix("-start"), operation.rest
        inner = re.findall(r"(?:body|to_apply|calls|computations?)=\{?([^}\s]+)", rest)
        inner = [x.strip("%,") for names in inner for x in names.split(",") if x]
        times: int | None = 1
        if opcode == "while":
            condition = re.search(r"condition=%?([\w.-]+)", rest)[1]
            times = turns(operation, computations[condition])
            total["endless"] += times is None
        elif opcode not in ("call", "conditional", "async"):
            inner = []
            meets = opcode in MEETINGS
            total["meetings"] += meets
            total["bytes"] += num_bytes(operation.shape) if meets else 0
            total["kernels"] += not (operation.opcode in FREE or opcode[-5:] == "-done")
        for each in inner:
            for key, value in count(computations, each).items():
                total[key] += value * (times or 1)
    return total


# Rows


def row(name: str, devices: list, program: str, members: int, at_once: int) -> list:
    """Compile a program, and return the cells of its row."""
    *_, batch, inputs, labels, _ = NETWORKS[name]
    batch = batch * (len(devices) if members == 1 else 1)
    given = {"init": (jax.random.key(0),), "predict": (inputs,)}
    data = inputs, form(np.int32, inputs.shape[0], *labels)
    given["update"] = [form(x.dtype, batch, *x.shape[1:]) for x in data]
    given["epoch"] = data, form(np.int32, 256, batch)
    trainer = make(name, devices, members, at_once)
    one = sum(int(np.prod(x.shape[1:])) * 4 for x in jax.tree.leaves(trainer.like()))
    lowered = trainer.lower(program, *given[program])
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    most = arguments + temporary + new
    text = compiled.as_text()
    if folder := os.environ.get("DUMP"):
        where = f"{name}-{len(devices)}-{program}-{members}-{at_once}.txt"
        (Path(folder) / where).write_text(text)
    found = count(*read(text))
    cost = compiled.cost_analysis() or {}
    sizes = [f"{x / 1e6:.1f}" for x in (arguments, temporary, most)]
    cells = [f"{seconds:.0f}", *sizes, f"{most / one:.1f}", found["endless"]]
    cells += [found["meetings"], f"{found['bytes'] / 1e6:.2f}", found["kernels"]]
    costs = cost.get("flops"), cost.get("bytes accessed")
    return [*cells, *(f"{x / 1e9:.2f}" if x else "-" for x in costs)]


def layouts(name: str, num_devices: int) -> list[tuple[int, int]]:
    """Return members, and how many at once, for a network on so many devices."""
    most = NETWORKS[name].most
    sync, several = (1, 1), [(num_devices, 1), (most * num_devices, 1)]
    several += [(most * num_devices, most)]
    sync_too = {"batchnorm": [sync], "transformer": [sync, *several]}
    return [*dict.fromkeys(sync_too.get(name, several))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = {k for k, package in COMPILERS.items() if importlib.util.find_spec(package)}
    installed = [name for name, kind in DEVICES.items() if kind in there]
    parser.add_argument("devices", nargs="*", metavar="NAME", help=", ".join(DEVICES))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    programs = ["init", "update", "epoch", "predict"]
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--quick", action="store_true", help="one small update of each")
    args = parser.parse_args()
    if not there or not {*args.devices} <= {*installed}:
        parser.error(f"there are compilers for {installed} of {[*DEVICES]}")
    columns = "devices | network | program | K | at once | s | arguments, MB | temporary"
    columns += " | all | in states | endless loops | meetings | MB | kernels | Gop | GB"
    print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}", flush=True)
    for name in args.devices or installed:
        devices = devices_of(name)
        if args.quick:
            args.networks, args.programs = ["small"], ["update"]
        for network in args.networks:
            for members, at_once in layouts(network, len(devices)):
                for program in args.programs:
                    if at_once > 1 and program != "update":
                        continue
                    try:
                        cells = row(network, devices, program, members, at_once)
                    except jax.errors.JaxRuntimeError as error:
                        cells = [f"does not compile: {error}".splitlines()[0]]
                    cells = [name, network, program, members, at_once, *cells]
                    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
