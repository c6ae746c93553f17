"""Compare ways to an ensemble at their cost: the code of docs/cheaper.md, by seeds.

    python benchmarks/cheaper.py --seeds 10

The README's Python and the page's run as they stand, for each seed in a process of its
own, with the seeds 0, 1, ... of data, weights and batches.  The table has one row per
way: the steps of one network that it costs, and, on the 2,000 test examples, the mean
and the standard deviation over the seeds of its accuracy and its NLL.
"""

import argparse
import re

import numpy as np
from speed import print_head, print_row
from trials.devices import ROOT, blocks, read_readme, run_seeded

PAGE = ROOT / "docs" / "cheaper.md"
LINE = r"^(.+), ([\d,]+) steps: (?:accuracy ([\d.]+), )?NLL ([\d.]+)$"
# The page prints what holds on any processor, and leaves out one way.
LAST = 'score("SWAG, last weights", 500, swing.predict_members(swung, x[200:]))\n'
MORE = {
    '"NLL {negative_log_likelihood:.1f}"': (
        '"accuracy {accuracy:.4f}, NLL {negative_log_likelihood:.4f}"'
    ),
    'score("SWAG, 20': f'{LAST}score("SWAG, 20',
}


def try_seed(seed: int) -> list[tuple[str, str, float, float]]:
    """Run the code with a seed; return each way, its steps, its accuracy and NLL."""
    code, _ = read_readme()
    code += [lines for kind, lines in blocks(PAGE.read_text("utf-8")) if kind]
    for printed, more in MORE.items():
        code = [lines.replace(printed, more) for lines in code]
    found = re.findall(LINE, run_seeded("\n".join(code), seed), re.MULTILINE)
    return [(way, steps, float(a), float(nll)) for way, steps, a, nll in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    tried = [try_seed(seed) for seed in range(parser.parse_args().seeds)]
    print_head("way", "steps", "accuracy", "NLL")
    for rows in zip(*tried):
        scores = np.array([row[2:] for row in rows])
        (accuracy, nll), (spread, wide) = scores.mean(axis=0), scores.std(axis=0)
        cells = f"{accuracy:.3f} ± {spread:.3f}", f"{nll:.2f} ± {wide:.2f}"
        print_row(*rows[0][:2], *cells)


if __name__ == "__main__":
    main()
