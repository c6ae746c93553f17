"""Print the Python of a page as one file, behind the README's, whose names it uses.

python docs/page.py training > mine.py
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def code_of(text: str) -> str:
    """Return the blocks of Python in a page's text, one after another."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))


def main(argv: list[str] | None = None) -> None:
    names = sorted(path.stem for path in HERE.glob("*.md") if path.stem != "README")
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if rest or name not in names:
        sys.exit(f"usage: python docs/page.py NAME > FILE; NAME is {', '.join(names)}")
    text = (HERE / f"{name}.md").read_text("utf-8")
    parts = [code_of(text)]
    if "](../README.md)" in text:
        readme = (HERE.parent / "README.md").read_text("utf-8")
        parts.insert(0, code_of(readme))
    print("\n\n".join(parts), end="")


if __name__ == "__main__":
    main()
