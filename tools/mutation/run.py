"""Tries the faults one after another, and says which test noticed each."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.overlay.payload import ROOT

from .fault import CannotTry, copied, Fault
from .faults import FAULTS


# The tests of one fault, and one test without a fault, hang if they take longer.
SECONDS = 300
WHERE = "import torch.optim._muon_engine.engine as engine; print(engine.__file__)"


def main(argv: list[str], faults: Sequence[Fault] = FAULTS, root: Path = ROOT) -> int:
    """Returns 0; 1 if no test noticed a fault; 2 if a fault cannot be tried."""
    parser = argparse.ArgumentParser("python -m tools.mutation", description=__doc__)
    add = parser.add_argument
    add("chosen", nargs="*", metavar="FAULT", help="its number, or words of its name")
    add("--list", action="store_true", help="list the faults")
    add("--no-baseline", action="store_true", help="do not first run without a fault")
    args = parser.parse_args(argv)
    optim, survivors = root / "torch" / "optim", []
    try:
        chosen = choose(faults, args.chosen)
        if args.list:
            for number, fault in chosen:
                print(f"{number:3} {fault.name} ({fault.file})")
            return 0
        for _, fault in chosen:
            fault.edit((optim / fault.file).read_text())
        # Sorted, so that the processes of a test class start once.
        tests = sorted({test for _, fault in chosen for test in fault.tests})
        with copied(optim) as folder:
            check_redirect(root, folder)
            failed = "" if args.no_baseline else run_tests(root, folder, tests)
        if failed:
            raise CannotTry(f"the tests do not pass without a fault: {failed}")
        for number, fault in chosen:
            began = time.monotonic()
            with copied(optim, fault) as folder:
                notice = run_tests(root, folder, fault.tests)
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{number:3} {fault.name:70} | {notice or 'NOTHING'} | {seconds}")
            sys.stdout.flush()
            survivors += [] if notice else [fault.name]
    except CannotTry as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} faults noticed")
    for name in survivors:
        print(f"not noticed: {name}")
    return 1 if survivors else 0


def choose(faults: Sequence[Fault], wanted: Sequence[str]) -> list[tuple[int, Fault]]:
    """The numbered faults that ``wanted`` names; all of them if it is empty."""
    numbered = list(enumerate(faults, 1))
    found = {}
    for word in wanted:
        meant = [n for n, f in numbered if word == str(n)] or [
            n for n, f in numbered if not word.isdigit() and word in f.name
        ]
        if not meant:
            raise CannotTry(f"there is no fault {word!r}; --list names them")
        found |= dict.fromkeys(meant)
    return [(n, f) for n, f in numbered if n in found or not wanted]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def check_redirect(root: Path, folder: Path) -> None:
    """Raises CannotTry unless the tests of ``root`` import the modules of ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=root,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    if Path(done.stdout.strip()) != folder / "optim/_muon_engine/engine.py":
        raise CannotTry(
            f"tests would not import Muon from the copy {folder} but from {done.stdout}{done.stderr}"
        )


def run_tests(root: Path, folder: Path, tests: Sequence[str]) -> str:
    """Which of the ``tests`` over the copy in ``folder`` failed first, or "a hang"; "" if all passed.

    Raises:
        CannotTry: pytest ended before it ran a test.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=short"]
    with tempfile.TemporaryFile("w+") as printed:
        # The workers that tests start end with their session.
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=root,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(SECONDS * len(tests))
        except subprocess.TimeoutExpired:
            return "a hang"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read()
    failed = re.search(r"^FAILED (\S*/)?(\S+?)::(\S+::)?(\S+)", output, re.MULTILINE)
    if code not in (0, 1) or (code == 1 and failed is None):
        raise CannotTry(f"pytest ended with {code}:\n{output[-3000:]}")
    return f"{failed[2]}: {failed[4]}" if failed else ""
