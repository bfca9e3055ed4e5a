"""Tries faults in the engine one after another, and says which test noticed each."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from cosmic_ray.work_db import use_db, WorkDB
from cosmic_ray.work_item import WorkItem, WorkResult

from tools.overlay.errors import WrongTarget
from tools.overlay.payload import ROOT

from .draw import drawn
from .faults import copied, Fault, listed
from .record import record, Record


# A test hangs after these seconds: several times what the slowest takes on a busy machine.
LIMIT = 150
PYTEST = "-m pytest -xq -rfE -pno:cacheprovider -ofaulthandler_exit_on_timeout=true"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.mutation", description=__doc__)
    add = result.add_argument
    add("chosen", nargs="*", metavar="FAULT", help="only those with this text")
    add("--record", action="store_true", help="first: note what the tests execute")
    add("--seed", type=int, default=0, help="which faults are drawn")
    add("--count", type=int, default=100, help="how many")
    add("--listed", action="store_true", help="those of listed.txt instead")
    add("--resume", action="store_true", help="keep what the last run found out")
    return result


def main(argv: list[str], root: Path = ROOT) -> int:
    """Returns 0; 1 if no test noticed a fault; 2 if a fault cannot be tried."""
    args = parser().parse_args(argv)
    if args.record:
        return record(root / "build" / "mutation")
    try:
        notices = try_faults(args, root)
    except WrongTarget as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    survivors = [f"survived: {name}" for name in notices if not notices[name]]
    noticed = len(notices) - len(survivors)
    print(f"\n{noticed} of {len(notices)} faults noticed", *survivors, sep="\n")
    return 1 if survivors else 0


def try_faults(args: argparse.Namespace, root: Path) -> dict[str, str]:
    """The test that noticed each fault, by the name of the fault; "" if none did."""
    place, optim = root / "build" / "mutation", root / "torch" / "optim"
    faults: Iterable[Fault]
    if args.listed:
        faults, run = listed(optim), "listed"
    else:
        faults, run = drawn(optim, args.seed, args.count), str(args.seed)
    executed = Record(place)
    notices: dict[str, str] = {}
    sound: set[str] = set()
    with use_db(place / f"{run}.sqlite") as database:
        if not args.resume:
            database.clear()
        before = dict(database.results)
        for fault in faults:
            name = f"{fault.file}:{fault.first}: {fault.name}"
            if args.chosen and not any(word in name for word in args.chosen):
                continue
            tests = executed.tests(fault, optim)
            began = time.monotonic()
            if name in before:
                notices[name] = before[name].output
            else:
                notices[name] = first_notice(root, fault, tests, sound)
                _store(database, name, notices[name])
            seconds = time.monotonic() - began
            effort = f"{seconds:.0f} s, {len(tests)} tests"
            print(f"{name} | {notices[name] or 'SURVIVED'} | {effort}", flush=True)
    return notices


def _store(database: WorkDB, name: str, notice: str) -> None:
    outcome = "killed" if notice else "survived"
    database.add_work_item(WorkItem(name, ()))
    database.set_result(name, WorkResult("normal", notice, outcome))


def first_notice(root: Path, fault: Fault, tests: list[str], sound: set[str]) -> str:
    """What of the tests notices the fault and passes without it."""
    while notice := run_tests(root, fault, tests):
        if "::" not in notice or notice in sound or not run_tests(root, None, [notice]):
            sound.add(notice)
            return notice
        print(f"{notice} fails without a fault, too", flush=True)
        tests.remove(notice)
    return ""


def run_tests(root: Path, fault: Fault | None, tests: Sequence[str]) -> str:
    """The test that failed first over a copy of the optimizer; "" if all passed."""
    if not tests:
        return ""
    timeout = f"-ofaulthandler_timeout={LIMIT}"
    words = [sys.executable, *PYTEST.split(), timeout, *tests]
    with copied(root / "torch/optim", fault) as copy, TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            words,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(copy)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT * (1 + len(tests)))
        except subprocess.TimeoutExpired:
            return "a hang"
        finally:
            # With the workers that the tests started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+)|^Timeout \(", output, re.MULTILINE)
    # 4: no such test, or none that can be imported; 5: no test at all.
    if failed is None and code in (4, 5):
        raise WrongTarget(f"pytest ended with {code}:\n{output[-3000:]}")
    if failed is not None:
        return _test_in(failed[1], tests) if failed[1] else "a hang"
    return f"pytest ended with {code}" if code else ""


def _test_in(line: str, tests: Sequence[str]) -> str:
    """The test that a ``line`` begins with, before its error. Names may have spaces."""
    begun = [test for test in tests if line.startswith(test)]
    # A file that cannot be imported is no test, and has a colon after it.
    return max(begun, key=len, default=line.split()[0].removesuffix(":"))


if __name__ == "__main__":
    # As an exception, which ends the tests of the current fault, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
