"""The command line."""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple, TYPE_CHECKING

from tools.overlay.repo import ROOT

from .fault import CannotTry, Fault
from .faults import FAULTS
from .trial import check_redirect, copied, run_tests, SECONDS


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Result(NamedTuple):
    fault: Fault
    # The test that noticed; "" where none did.
    notice: str
    seconds: float


def main(argv: list[str], faults: Sequence[Fault] = FAULTS, root: Path = ROOT) -> int:
    """Returns 0, 1 where a fault was not noticed, or 2 where it could not be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation", description=__doc__
    )
    parser.add_argument(
        "chosen", nargs="*", metavar="FAULT", help="its number, or words of its name"
    )
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="do not run the tests without a fault first",
    )
    args = parser.parse_args(argv)
    try:
        chosen = choose(faults, args.chosen)
        if args.list:
            for number, fault in chosen:
                print(f"{number:3} {fault.name} ({fault.file})")
            return 0
        check_texts(chosen, root)
        check_baseline(chosen, root, run=not args.no_baseline)
        results = [try_one(number, fault, root) for number, fault in chosen]
    except CannotTry as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    survivors = [result.fault.name for result in results if not result.notice]
    print(f"\n{len(results) - len(survivors)} of {len(results)} faults noticed")
    for name in survivors:
        print(f"not noticed: {name}")
    return 1 if survivors else 0


def choose(faults: Sequence[Fault], wanted: Sequence[str]) -> list[tuple[int, Fault]]:
    """The faults, numbered, that ``wanted`` names; all of them where it is empty."""
    numbered = list(enumerate(faults, 1))
    found = []
    for word in wanted:
        meant = [
            (number, fault)
            for number, fault in numbered
            if word == str(number) or (not word.isdigit() and word in fault.name)
        ]
        if not meant:
            raise CannotTry(f"there is no fault {word!r}; --list names them")
        found += [one for one in meant if one not in found]
    return sorted(found) if wanted else numbered


def check_texts(chosen: Sequence[tuple[int, Fault]], root: Path) -> None:
    """Finds faults whose place is gone before the first test is run."""
    for _, fault in chosen:
        fault.edit((optim(root) / fault.file).read_text())


def check_baseline(
    chosen: Sequence[tuple[int, Fault]], root: Path, *, run: bool
) -> None:
    """Raises CannotTry unless tests import the copy, and pass where it has no fault."""
    # Sorted, so that the processes of a test class are started once.
    tests = sorted({test for _, fault in chosen for test in fault.tests})
    with copied(optim(root)) as folder:
        check_redirect(folder, root)
        if not run:
            return
        seconds = SECONDS * len(tests)
        outcome = run_tests(root, folder, tests, first=False, seconds=seconds)
    if outcome.code != 0:
        named = ", ".join(outcome.failed) or outcome.output[-3000:]
        named = named if outcome.code is not None else f"they hang: {named}"
        raise CannotTry(f"tests do not even pass without a fault: {named}")
    print(f"the tests pass without a fault, {outcome.seconds:.0f} s", flush=True)


def try_one(number: int, fault: Fault, root: Path) -> Result:
    with copied(optim(root), fault) as folder:
        outcome = run_tests(root, folder, fault.tests, first=True)
    result = Result(fault, outcome.notice if outcome.noticed else "", outcome.seconds)
    notice = result.notice or "NOTHING"
    print(f"{number:3} {fault.name:70} | {notice} | {result.seconds:.0f} s", flush=True)
    return result


def optim(root: Path) -> Path:
    return root / "torch" / "optim"
