"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.overlay.repo import ROOT

from .check import accept, against_documents, holes
from .page import page
from .tags import read_tree


PAGE = ROOT / "docs" / "requirements.md"


def main(argv: list[str]) -> int:
    """Returns 0, or 1 where something is missing, unknown or out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.requirements", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--documents", type=Path, metavar="DIR", help="compare with the documents, too"
    )
    parser.add_argument(
        "--accept",
        action="store_true",
        help="the documents' blocks have been read anew",
    )
    args = parser.parse_args(argv)
    if args.accept and not args.documents:
        parser.error("--accept goes with --documents")
    shown, tests = read_tree(ROOT)
    problems = holes(shown, tests)
    text = page(shown, tests)
    if args.documents:
        try:
            if args.accept:
                accept(args.documents)
            problems += against_documents(args.documents)
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        problems.append(f"{PAGE.name} is out of date: python -m tools.requirements")
    for problem in problems:
        print(problem)
    return 1 if problems else 0
