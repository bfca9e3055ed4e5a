"""The command line."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.overlay import apply, revert, status
from tools.overlay.errors import INTERRUPTED, OverlayError, Refused
from tools.overlay.repo import ROOT
from tools.overlay.target import find_wheel

from . import machine, summary


DEFAULT = ["test/optim", "test/distributed/optim"]
HOUR = 3600


def main(argv: list[str]) -> int:
    """Returns pytest's exit code, 2 where the tests could not be started, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu")
    parser.add_argument(
        "--python", default=sys.executable, help="whose torch (default: this one)"
    )
    parser.add_argument(
        "--without-gpu", action="store_true", help="go on where there is none"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write it there, too"
    )
    parser.epilog = f"Everything else goes to pytest (default: {' '.join(DEFAULT)})."
    args, args.pytest = parser.parse_known_args(argv)
    try:
        found = machine.look(args.python)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"error: {args.python} has no torch: {error}", file=sys.stderr)
        return 2
    print(found.words(), flush=True)
    if not found.gpus and not args.without_gpu:
        print(
            "error: no GPU here; the CPU's tests: setup_overlay.py test",
            file=sys.stderr,
        )
        return 2
    if found.missing:
        names = " ".join(found.missing)
        print(f"error: first {args.python} -m pip install {names}", file=sys.stderr)
        return 2
    # So that the overlay is taken off again, however this ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _with_overlay(args, found)
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _with_overlay(args: argparse.Namespace, found: machine.Machine) -> int:
    target = find_wheel(args.python)
    with target.held():
        before = status.status(target, ROOT).state
        if before not in ("none", "current"):
            raise Refused(
                f"{target.words} has an overlay that is {before}; bring it up to date with "
                "`setup_overlay.py apply`, or `revert` it"
            )
        apply.apply(target, ROOT)
    try:
        code, result = _run(args)
    finally:
        if before == "none":
            with target.held():
                revert.revert(target, commit=False)
    words = f"{found.words()}\n\n{summary.text(result)}"
    print(f"\n{words}")
    if args.report:
        args.report.write_text(words + "\n")
    return code


def _run(args: argparse.Namespace) -> tuple[int, summary.Summary]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [args.python, "-m", "pytest", "-q", f"--junitxml={report}"]
        command += args.pytest or DEFAULT
        env = {**os.environ, "MUON_TEST_SHARE_GPU": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=env) as process:
            try:
                code = process.wait(HOUR)
            except BaseException:
                process.terminate()
                raise
        return code, summary.read(report)
