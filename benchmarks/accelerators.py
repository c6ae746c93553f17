"""Compile a trainer's programs for absent GPUs and TPUs, and print their sizes.

The compilers are the accelerators' own.  Install each in its own environment:

    python -m pip install 'jax[tpu]'
    python -m pip install jax jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

    python benchmarks/accelerators.py          # all devices of the installed packages
    python benchmarks/accelerators.py h100:8 v5e:2x4 --networks cnn --programs update
    python benchmarks/accelerators.py --quick  # one small update per compiler
    python benchmarks/accelerators.py h100:1 --fit FILE  # how many of your members fit

FILE is Python with the names init, loss, optimizer and batch: what `pe.make_trainer`
takes, and a tuple of the arrays of one batch, or of their shapes and types.  It may
have options, a dict of further arguments.

One row per program has the seconds to compile it and its megabytes per device: for
arguments, for temporary arrays, and in total, the total also in units of one member's
state (its parameters and its optimizer's state).  Then come counts: "endless" loops,
whose length XLA does not know, so that every turn begins with a check; meetings of
devices, and their megabytes, also by kind if there are several: of whole arrays, before
a reduction or after an all-gather, and otherwise of those that a device sends; and
started kernels.  The last two columns are XLA's estimates for TPUs: billions of
operations, and gigabytes accessed.  They count the body of a loop once: one turn over
members, one step of an epoch, one of `large`'s layers.

`predict` has an endless loop over the examples, and `epoch` one over the steps, on GPUs
two: over 32 steps at a time, and over single steps.  Members in turn have such loops
each, and members at once ("all", the default) share them.  Meetings and kernels are
counted per call, with one turn of each endless loop.  For `epoch` they are counted per
step of all members: a turn of the loop over single steps alone.

Nothing runs.  On GPUs, cuBLAS computes products, in 34 MB of its own, since XLA would
have to try kernels on a GPU to choose among them.  The status is 1 if a program that
fits in the memory does not compile, if an `update` has an endless loop, if an `epoch`
on GPUs has more than two with all members at once, or if an `update` of ResNet-20,
K = 4, all at once on one H100, starts more than 850 kernels.
"""

import argparse
import bisect
import collections
import functools
import importlib.util
import math
import os
import re
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import speed  # which finds the modules
from jax.experimental import topologies

import pjax_ensemble as pe
import train_mnist as tm

# XLA's figures for an H100 (SXM, 80 GB).
H100 = """gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: 1.98
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }"""
SETTINGS = {
    # No trials on a GPU; without trials, some of XLA's own kernels do not compile.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    # Otherwise libtpu asks a TPU's machine for these.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
GPUS, TPUS = ["h100:1", "h100:8"], ["v5e:2x4", "v6e:2x4", "v5e:4x4", "v5e:16x16"]
COMPILERS = {"jax_cuda12_plugin": GPUS, "libtpu": TPUS}


def devices_of(name: str) -> list:
    """Return a system's devices, as its compiler describes them."""
    if name in TPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    count = f"1x1x{name.partition(':')[2]}"  # slices, hosts in each, GPUs in each
    how = dict(topology=count, target_config=H100)
    return topologies.get_topology_desc(platform="cuda", **how).devices


# ---------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------


class Network(NamedTuple):
    init: Callable
    logits: Callable
    optimizer: Any
    batch: int  # per member; in sync mode per device
    data: tuple  # forms of inputs and labels, [N, ...]
    per_device: int = 8  # members per device, if there are several
    sync: bool = False  # whether also as one model on all devices
    plans: tuple = ()  # instead of these: members, how many at once, and shards
    frozen: Callable = lambda: None  # forms of the arrays that members share


def form(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [pe.dense_init(k, *each) for k, *each in zip(keys, sizes, sizes[1:])]


def mlp(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(pe.dense(layer, x))
    return pe.dense(params[-1], x)


small_init = functools.partial(mlp_init, sizes=(8, 50, 2))


def cnn(params, images):
    return pe.cnn(params, images.astype(jnp.float32) / 255)


def dense_init(key, width=2048):  # six square layers, 25 million parameters
    return mlp_init(key, [width] * 7)


def dense(params, x):
    return jax.nn.relu(mlp(params, x))


def wide_init(key, width=512):  # only kernels, 9 million parameters
    keys = jax.random.split(key, 4)
    return [pe.conv_init(k, width, width, bias=False) for k in keys]


def wide(params, images):
    for layer in params:
        images = jax.nn.relu(pe.conv(layer, images))
    return images.mean((1, 2))


def resnet20(dtype, **how):
    """Return init and logits of ResNet-20 with group normalization, in Flax."""

    def net():
        import resnet  # with Flax, which the other networks do not need

        return resnet.ResNet(groups=8, dtype=dtype, **how)

    def init(key):
        return net().init(key, jnp.zeros((1, 32, 32, 3)), True)

    return init, lambda params, x: net().apply(params, x.astype(dtype) / 255, True)


def block_init(keys, width):
    sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    return [pe.dense_init(k, *s) for k, s in zip(keys, sizes)]


def block(x, heads, layer, adapter=()):
    (into, out, wide, narrow), norm = layer, jax.nn.standardize
    each = pe.dense(into, norm(x))
    if adapter:
        each += norm(x) @ adapter[0] @ adapter[1]
    each = each.reshape(*x.shape[:2], 3, heads, -1)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(each, 2, 0), is_causal=True)
    x += pe.dense(out, mixed.reshape(x.shape))
    return x + pe.dense(narrow, jax.nn.gelu(pe.dense(wide, norm(x))))


def transformer_init(key, width=512, layers=8, words=8192):  # 29 million parameters
    keys = jax.random.split(key, (layers + 1, 4))
    layers = [block_init(ks, width) for ks in keys[1:]]
    return pe.dense_init(keys[0, 0], words, width).weight, layers


def transformer(params, tokens, heads=8):
    """Map tokens [B, T] to logits of the next ones, [B, T, words]."""
    table, layers = params
    x = table[tokens]
    for layer in layers:
        x = block(x, heads, layer)
    return jax.nn.standardize(x) @ table.T


def large_init(key, width=2048, layers=24, words=32_768):  # 1.3 billion parameters
    keys = jax.random.split(key, (layers + 1, 4))
    table = pe.dense_init(keys[0, 0], words, width).weight
    return table, jax.lax.map(lambda ks: block_init(ks, width), keys[1:])


def large(params, tokens, adapters=(), heads=16):
    """Do as `transformer`, in bfloat16, with stacked layers [layers, ...]."""

    def half(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    @jax.checkpoint
    def layer(x, own):
        return block(x, heads, *half(own)), None

    table, layers = params
    x, _ = jax.lax.scan(layer, half(table[tokens]), (layers, adapters))
    return jax.nn.standardize(x) @ half(table).T


def backbone():  # forms of 6.6 billion parameters
    forms = jax.eval_shape(lambda: large_init(jax.random.key(0), 4096, 32))
    return jax.tree.map(lambda x: form(*x.shape, dtype=jnp.bfloat16), forms)


def adapters_init(key, _, width=4096, layers=32, rank=16):
    """Draw, for each layer, a correction of rank 16 to the kernel of attention."""
    first = jax.random.normal(key, (layers, width, rank)) / width**0.5
    return first, jnp.zeros((layers, rank, 3 * width))


def adapters(params, tokens, backbone):
    return large(backbone, tokens, params, heads=32)


SGD, ADAM = pe.sgd(0.1, momentum=0.9), pe.adam(1e-3)
MNIST = form(60_000, 28, 28, 1, dtype=np.uint8), form(60_000)
PHOTOS = form(4096, 32, 32, 3, dtype=np.uint8), form(4096)
TABLE, TEXT = (form(1000, 8, dtype=np.float32), form(1000)), (form(1000, 256),) * 2
ROWS = form(1000, 2048, dtype=np.float32), form(1000)
MAPS = form(1000, 8, 8, 512, dtype=np.float32), form(1000)
TEXTS, PLANS = (form(1000, 512),) * 2, ((2, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8))
SHARED: dict = dict(plans=((8, 1, 1), (8, 1, 2), (8, 1, 8)), frozen=backbone)
NETWORKS = {
    "small": Network(small_init, mlp, ADAM, 100, TABLE, per_device=100),
    "cnn": Network(pe.cnn_init, cnn, SGD, 128, MNIST),
    "dense": Network(dense_init, dense, ADAM, 64, ROWS),
    "wide": Network(wide_init, wide, SGD, 8, MAPS),
    "resnet": Network(*resnet20(jnp.float32), SGD, 128, PHOTOS, per_device=4),
    "resnet16": Network(*resnet20(jnp.bfloat16), SGD, 128, PHOTOS, per_device=4),
    "batchnorm": Network(None, None, None, 64, MNIST, per_device=0, sync=True),
    "transformer": Network(transformer_init, transformer, ADAM, 8, TEXT, sync=True),
    "large": Network(large_init, large, ADAM, 16, TEXTS, plans=PLANS),
    "adapters": Network(adapters_init, adapters, ADAM, 16, TEXTS, **SHARED),
}


def loss_of(logits: Callable) -> Callable:
    def loss_fn(params, x, y, *more):
        return pe.softmax_cross_entropy(logits(params, x, *more), y).mean()

    return loss_fn


def make(name: str, **how: Any) -> pe.Trainer:
    if name == "batchnorm":  # the script's network
        sizes = {"image_shape": (28, 28, 1), "classes": range(10)}
        own = {"members": how["members"], "at_once": how.get("at_once")}
        settings = tm.RECIPES[name]._replace(**sizes, **own)
        return tm.make_trainer(settings, how["devices"])
    init, logits, optimizer, *_, frozen = NETWORKS[name]
    how |= dict(apply_fn=logits, frozen=frozen())
    return pe.make_trainer(init, loss_of(logits), optimizer, **how)


def layouts(name: str, num_devices: int) -> list[tuple[int, int | None, int]]:
    """Return each trainer's members, how many are computed at once, and its shards.

    None is the trainers' default, all of a device.
    """
    network = NETWORKS[name]
    if network.plans:
        return [plan for plan in network.plans if num_devices % plan[-1] == 0]
    found, most = [(1, 1)] * network.sync, network.per_device
    if most:
        found += [(num_devices, 1), *((most * num_devices, n) for n in (1, None))]
    return [(*x, 1) for x in dict.fromkeys(found)]


# ---------------------------------------------------------------------------------
# Programs, as XLA prints them
# ---------------------------------------------------------------------------------

MEETINGS = r"all-(reduce|gather|to-all)|reduce-scatter|collective-permute"
FREE = (
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|copy-start|.*-done"
)
CALLS = r"(?:body|to_apply|calls|computations?)=(\{[^}]*\}|[^,\s]+)"


def read(text: str) -> tuple[dict[str, list[tuple]], str]:
    """Return operations (name, shape, opcode, rest) per computation, and the entry."""
    computations: dict[str, list[tuple]] = {}
    entry = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            operations = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := re.match(r"  (?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\((.*)", line):
            operations.append(found.groups())
    return computations, entry


def num_bytes(shape: str) -> int:
    """Return the bytes of a shape, or of all parts of a tuple."""
    parts = re.findall(r"(pred|[a-z]+(\d+))\w*\[([\d,]*)\]", shape)
    sizes = [(int(bits or 8), axes.split(",")) for _, bits, axes in parts]
    return sum(b * math.prod(map(int, filter(None, n))) // 8 for b, n in sizes)


def turns(loop: str, condition: list[tuple]) -> int | None:
    """Return how often a loop runs, or None if XLA does not know."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(known[1])
    # On TPUs a loop runs while its counter, from 0, is below a constant.
    ends = {name: rest for name, _, opcode, rest in condition if opcode == "constant"}
    *_, opcode, rest = condition[-1]
    names = re.findall(r"[\w.-]+", rest.partition(")")[0])
    known = [int(ends[name].partition(")")[0]) for name in names if name in ends]
    return known[0] if opcode == "compare" and known else None


def meetings(computations: dict, name: str) -> list[tuple[str, int]]:
    """Return a computation's meetings: each one's kind, and bytes of its whole arrays.

    Whole arrays are those before a reduction and after an all-gather; for other kinds
    they are what a device sends.  Fusions on TPUs hold meetings, or parts of one.
    """
    found: list[tuple[str, int]] = []
    sizes = {label: num_bytes(shape) for label, shape, _, _ in computations[name]}
    starts = any("AsyncCollectiveStart" in rest for *_, rest in computations[name])
    for label, _, opcode, rest in computations[name]:
        kind, size = opcode.removesuffix("-start"), sizes[label]
        if kind == "fusion":
            for each in re.findall(r"calls=%?([\w.-]+)", rest):
                found += meetings(computations, each)
        elif re.fullmatch(MEETINGS, kind) and (starts or "chain_id=" not in rest):
            if kind != "all-reduce":  # a start's shape has what is given, too
                names = re.findall(r"[\w.-]+", rest.partition(")")[0])
                given = sum(sizes.get(x, 0) for x in names)
                size = max(given, size - given * (opcode != kind))
            kind = "reduce-scatter" if "reduce-scatter" in name else kind
            found.append((kind, size))
    return found


def count(computations: dict, name: str, step: bool = False) -> collections.Counter:
    """Count a computation's endless loops, meetings, their bytes, and kernels.

    With `step`, count a turn of its shortest endless loop alone, which is one step of
    an epoch; a loop of known length around it counts as often as it runs.
    """
    total: collections.Counter = collections.Counter()
    endless = []
    for kind, size in () if step else meetings(computations, name):
        total.update({"meetings": 1, "bytes": size, kind: size})
    for _, _, opcode, rest in computations[name]:
        kind, times = opcode.removesuffix("-start"), 1
        inner = re.findall(r"[\w.-]+", " ".join(re.findall(CALLS, rest)))
        if kind == "while":
            condition = re.search(r"condition=%?([\w.-]+)", rest)[1]
            times = turns(rest, computations[condition])
            total["endless"] += times is None
            if step and times is None:
                endless.append(count(computations, *inner))
                continue
        elif kind not in ("call", "conditional", "async"):
            inner = []
            total["kernels"] += not (step or re.fullmatch(FREE, opcode))
        for each in inner:
            for key, value in count(computations, each, step).items():
                total[key] += value * (times or 1)
    total.update(min(endless, key=lambda turn: turn["kernels"], default={}))
    return total


# ---------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------

COLUMNS = "devices | network | program | K | at once | S | seconds | arguments, MB | "
COLUMNS += "temporary | all | in states | endless loops | meetings | MB | kernels | "
COLUMNS += "Gop | GB"
MOST_KERNELS = {("h100:1", "resnet", "update", 4, None, 1): 850}
ROOM = 0.75 * 84_942_979_072  # JAX's share of an H100; a TPU's compiler knows its own


def bytes_of(memory: Any) -> int:
    """Return the bytes that a compiled program needs on a device."""
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new


def is_wrong(row: tuple, num_devices: int, found: dict) -> bool:
    """Return whether a program has too many endless loops or kernels."""
    name, _, program, members, at_once, _ = row
    together = at_once is None or members <= num_devices
    most = {"update": 0}
    if name in GPUS and together:
        most["epoch"] = 2  # over 32 steps at a time, and over single ones
    loops = found["endless"] > most.get(program, math.inf)
    return loops or found["kernels"] > MOST_KERNELS.get(row, math.inf)


def compile_one(row: tuple, devices: list) -> tuple[collections.Counter, list]:
    """Compile a program; return its counts, and its entries for the columns."""
    _, name, program, members, at_once, shards = row
    batch, data = NETWORKS[name].batch, NETWORKS[name].data
    batch *= len(devices) if members == shards == 1 else 1
    given = {"init": (jax.random.key(0),), "predict": data[:1]}
    given["update"] = [form(batch, *x.shape[1:], dtype=x.dtype) for x in data]
    given["epoch"] = data, form(256, batch)
    how = dict(members=members, devices=devices, at_once=at_once, shards=shards)
    trainer = make(name, **how)
    one = sum(np.prod(x.shape[1:]) * 4 for x in jax.tree.leaves(trainer.like()))
    lowered, start = trainer.lower(program, *given[program]), time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    sizes = [memory.argument_size_in_bytes, memory.temp_size_in_bytes]
    sizes.append(bytes_of(memory))
    text, cost = read(compiled.as_text()), compiled.cost_analysis() or {}
    found = count(*text, step=program == "epoch")
    found["endless"] = count(*text)["endless"]
    each = [f"{x} {y / 1e6:.0f}" for x, y in found.items() if re.fullmatch(MEETINGS, x)]
    costs = cost.get("flops"), cost.get("bytes accessed")
    return found, [
        f"{seconds:.0f}",
        *(f"{x / 1e6:.1f}" for x in sizes),
        f"{sizes[-1] / one:.1f}",
        *(found["endless"], found["meetings"]),
        f"{found['bytes'] / 1e6:.2f}" + f" ({', '.join(each)})" * (len(each) > 1),
        found["kernels"],
        *(f"{x / 1e9:.2f}" if x else "-" for x in costs),
    ]


def print_fit(file: str, name: str) -> None:
    """Print how many members of a file's network fit on each device of a system."""
    own, devices = runpy.run_path(file), devices_of(name)

    def too_many(members, at_once):
        how = dict(members=members * len(devices), devices=devices, at_once=at_once)
        how |= own.get("options", {})
        trainer = pe.make_trainer(own["init"], own["loss"], own["optimizer"], **how)
        try:
            compiled = trainer.lower("update", *own["batch"]).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                return True
            raise
        return bytes_of(compiled.memory_analysis()) > ROOM

    counts = range(1, 33)
    turn = bisect.bisect(counts, False, key=lambda n: too_many(n, 1))
    once = bisect.bisect(counts[:turn], False, key=lambda n: too_many(n, n))
    print(f"{name}: of 32 members per device, {turn} fit in turn, {once} at once")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = [x for x in COMPILERS if importlib.util.find_spec(x)]
    known = [name for compiler in there for name in COMPILERS[compiler]]
    parser.add_argument("devices", nargs="*", metavar="NAME", help=f"of {GPUS + TPUS}")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    programs = ["init", "update", "epoch", "predict"]
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--quick", action="store_true", help="one small update each")
    parser.add_argument("--fit", metavar="FILE", help="how many members of FILE's fit")
    args = parser.parse_args()
    if not there or not {*args.devices} <= {*known}:
        parser.error(f"the compilers that are installed know {known or 'no devices'}")
    if args.quick:
        args.networks, args.programs = ["small"], ["update"]
        args.devices = [COMPILERS[compiler][0] for compiler in there]
    os.environ |= SETTINGS | os.environ
    jax.config.update("jax_platforms", "cpu")
    if args.fit:
        sys.path.insert(0, os.path.dirname(args.fit))  # as where Python runs the file
        for name in args.devices or known:
            print_fit(args.fit, name)
        return
    speed.print_head(*COLUMNS.split(" | "))
    failures = 0
    for name in args.devices or known:
        devices = devices_of(name)
        trainers = [(x, *y) for x in args.networks for y in layouts(x, len(devices))]
        for network, members, at_once, shards in trainers:
            for program in args.programs:
                if at_once is None and program in ("init", "predict"):
                    continue
                row = name, network, program, members, at_once, shards
                try:
                    found, cells = compile_one(row, devices)
                    failures += is_wrong(row, len(devices), found)
                except jax.errors.JaxRuntimeError as error:
                    failures += "RESOURCE_EXHAUSTED" not in str(error)
                    cells = [f"does not compile: {str(error).splitlines()[0]}"]
                speed.print_row(*row[:4], at_once or "all", shards, *cells)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
