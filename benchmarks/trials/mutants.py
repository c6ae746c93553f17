"""Change one expression of a module at a time, and see whether a test notices.

    mkdir /tmp/entered
    ENTERED=/tmp/entered python -m pytest
    python benchmarks/trials/mutants.py /tmp/entered 150 [--seed 0] [--processes 1]
                                        [--modules fast_cpu.py] [--seconds 120]

The first run writes which functions of the project each test enters.  The script then
draws mutants by the seed: a function of the modules, each as likely as another, and in
it an expression, in which a sign, a bound, an axis or a comparison is turned, or a term
is dropped.  Each mutant meets the tests that enter its function, in the order of their
time, in a copy of the project, until one fails.  The tests of one mutant take so many
seconds at most, by the time of the first run.

The script prints a line per mutant, with the change and the test that failed, and the
diff of each mutant that lives.  Such a mutant lacks a test, or it changes no result: a
size of a chunk, a text.  A test that starts a process runs what nobody sees, so a
function that is entered there alone has no tests here, and its mutants say so.

Python 3.12 or newer writes what tests enter.
"""

import argparse
import ast
import collections
import copy
import difflib
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODULES = "pjax_ensemble.py", "fast_cpu.py", "ensemble_metrics.py"

# Each operator, and those that take its place.
TURNED = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


class Mutant(NamedTuple):
    """A change of a module."""

    module: str
    function: str  # its qualified name
    line: int
    before: str  # the expression
    after: str

    def source(self) -> str:
        """Return the module's text with the change."""
        lines = (ROOT / self.module).read_text().splitlines(keepends=True)
        rest = "".join(lines[self.line - 1 :])
        changed = rest.replace(self.before, f"({self.after})", 1)
        return "".join(lines[: self.line - 1]) + changed


def turned(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that take an expression's place."""

    def replaced(**fields):
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    match node:
        case ast.Compare(ops=[op], comparators=[_]):
            for other in TURNED[type(op)]:
                yield replaced(ops=[other()])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in TURNED:
            for other in TURNED[type(op)]:
                yield replaced(op=other())
            yield left
            yield right
        case ast.BoolOp(op=op, values=values):
            yield replaced(op=TURNED[type(op)][0]())
            yield replaced(values=values[1:]) if values[2:] else values[1]
            yield replaced(values=values[:-1]) if values[2:] else values[0]
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield replaced(body=orelse, orelse=body)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a function, but of functions in it, types and texts."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            inner = isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.JoinedStr))
            if isinstance(child, ast.AST) and not inner:
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module by their qualified names, at any depth."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
            inner = f"{prefix}{child.name}.<locals>."
        elif isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        yield from functions(child, inner)


def mutants(module: str) -> dict[str, list[Mutant]]:
    """Return all mutants of a module, by function."""
    text = (ROOT / module).read_text()
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    found = collections.defaultdict(list)
    for name, function in functions(ast.parse(text)):
        for node in expressions(function):
            part = lines[node.lineno - 1 : node.end_lineno]
            part[-1] = part[-1][: node.end_col_offset]
            before = part[0][node.col_offset :] + b"".join(part[1:])
            # `Mutant.source` changes the first such text on the line.
            if lines[node.lineno - 1].find(before.split(b"\n")[0]) != node.col_offset:
                continue
            for new in turned(node):
                change = node.lineno, before.decode(), ast.unparse(new)
                found[name].append(Mutant(module, name, *change))
    return found


def draw(modules: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw so many mutants, or one of each expression if there are fewer."""
    rng = random.Random(seed)
    left = [each for module in modules for each in mutants(module).values()]
    drawn: list[Mutant] = []
    while len(drawn) < count and left:
        several = rng.choice(left)
        mutant = rng.choice(several)
        drawn.append(mutant)
        several[:] = [other for other in several if other[:4] != mutant[:4]]
        if not several:
            left.remove(several)
    return drawn


class Run(NamedTuple):
    """What a test ran."""

    test: str
    seconds: float
    entered: frozenset  # of (file, qualified name)


@functools.cache
def runs(folder: str) -> list[Run]:
    """Return the tests of the first run, the fastest first."""
    rows = []
    for path in Path(folder).glob("*.jsonl"):
        rows += map(json.loads, path.read_text().splitlines())
    found = []
    for row in rows:
        entered = frozenset((file, name) for file, name, _ in row["entered"])
        found.append(Run(row["test"], row["seconds"], entered))
    return sorted(found, key=lambda run: run.seconds)


def tests_of(mutant: Mutant, folder: str, seconds: float) -> tuple[list[str], int]:
    """Return tests that enter a mutant's function, and how many the time leaves out."""
    place = mutant.module, mutant.function
    entering = [run for run in runs(folder) if place in run.entered]
    chosen = []
    for run in entering:
        seconds -= run.seconds
        if seconds > 0 or not chosen:
            chosen.append(run.test)
    return chosen, len(entering) - len(chosen)


def meet(mutant: Mutant, tests: list[str], copy: Path, seconds: float) -> str:
    """Return the first test that fails with a mutant, or "" if it lives."""
    original = (ROOT / mutant.module).read_text()
    (copy / mutant.module).write_text(mutant.source())
    command = [sys.executable, "-m", "pytest", "-xq", "-n0", "-pno:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=5 * seconds + 60,
        )
    except subprocess.TimeoutExpired:
        return "the time"
    finally:
        (copy / mutant.module).write_text(original)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return failed[1] if failed else "" if run.returncode == 0 else "the import"


def diff(mutant: Mutant) -> str:
    texts = (ROOT / mutant.module).read_text(), mutant.source()
    lines = [text.splitlines() for text in texts]
    name = f"{mutant.module}:{mutant.line}"
    return "\n".join(list(difflib.unified_diff(*lines, name, lineterm="", n=2))[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entered", help="the folder that the first run filled")
    parser.add_argument("count", type=int, nargs="?", default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=120, help="of a mutant's tests"
    )
    parser.add_argument("--modules", nargs="+", default=MODULES, choices=MODULES)
    args = parser.parse_args()

    def try_one(mutant):
        tests, left_out = tests_of(mutant, args.entered, args.seconds)
        where = f"{mutant.module}:{mutant.line} {mutant.function}"
        change = f"{where}: {mutant.before} -> {mutant.after}"
        if not tests:
            return None, f"no test enters {change}\n{diff(mutant)}"
        copy = copies.pop()
        try:
            failed = meet(mutant, tests, copy, args.seconds)
        finally:
            copies.append(copy)
        if failed:
            return True, f"killed by {failed}: {change}"
        more = f", {left_out} left out" if left_out else ""
        return False, f"LIVES after {len(tests)} tests{more}: {change}\n{diff(mutant)}"

    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, str(i), ROOT.name) for i in range(args.processes)]
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache", "runs")
        for path in copies:
            shutil.copytree(ROOT, path, ignore=ignored)
        verdicts: collections.Counter = collections.Counter()
        with ThreadPoolExecutor(args.processes) as pool:
            drawn = draw(args.modules, args.count, args.seed)
            for verdict, said in pool.map(try_one, drawn):
                verdicts[verdict] += 1
                print(said, flush=True)
    killed, lives, without = (verdicts[x] for x in (True, False, None))
    print(f"{killed} killed, {lives} live, {without} that no test enters")
    return lives + without > 0


if __name__ == "__main__":
    raise SystemExit(main())
