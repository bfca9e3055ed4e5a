"""The command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .cells import notebook_of


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.notebook",
        description="Write the notebook of a script in cells beside it.",
    )
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if one is stale"
    )
    options = parser.parse_args(arguments)
    stale = 0
    for script in options.scripts:
        target = script.with_suffix(".ipynb")
        try:
            text = notebook_of(script.read_text(encoding="utf-8"))
        except OSError as error:
            print(f"{script}: {error}", file=sys.stderr)
            return 2
        there = target.read_text(encoding="utf-8") if target.exists() else None
        if there == text:
            print(f"{target}: up to date")
        elif options.check:
            print(f"{target}: stale; run python -m tools.notebook {script}")
            stale += 1
        else:
            target.write_text(text, encoding="utf-8", newline="\n")
            print(f"{target}: written")
    return 1 if stale else 0
