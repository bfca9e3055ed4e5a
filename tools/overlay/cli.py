"""The commands. The docstring of each is its help."""

import argparse
import inspect
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from . import layer, package, payload, versions
from .checkout import Checkout
from .env import ensure, run_in, run_tool
from .errors import OverlayError, Refused, WrongTarget
from .payload import ROOT


CODES = """\
exit codes: 0 done, or nothing to do; 1 the work failed; 2 wrong usage or target;
3 refused, because a user's work would be lost; 130 Ctrl-C; 143 SIGTERM
"""
ABOUT = f"""\
Distributed training for torch.optim.Muon, as an overlay over PyTorch
{versions.SUPPORTED}: makes an environment with it, tries it, and applies it to
a PyTorch checkout or an installed torch.

start here: python setup_overlay.py verify
examples: docs/install.md, CONTRIBUTING.md
"""
TIME = "ten minutes on two cores"  # of all tests, as the README says, too
# On another interpreter: the optimizer's tests, and why some are skipped.
ELSEWHERE = ["-rs", "test/optim", "test/distributed/optim"]
TEST = "test/distributed/optim/test_muon.py"
# One meaning for each.
OPTIONS = {
    "--torch": {
        "metavar": "VERSION",
        "help": f"{versions.SUPPORTED} (default: {versions.PINNED})",
    },
    "--checkout": {
        "metavar": "DIR",
        "help": "a PyTorch git checkout (default: the current folder)",
    },
    "--python": {"metavar": "EXE", "help": "an interpreter"},
    "--out": {
        "metavar": "DIR",
        "default": "out",
        "type": lambda folder: Path(folder).absolute(),
        "help": "the folder for what is written (default: out)",
    },
    "--mode": {
        "choices": ["source", "wheel"],
        "default": "wheel",
        "help": "how (default: wheel)",
    },
    "--force": {
        "action": "store_true",
        "help": "go on with an untested torch, and without patches that do not fit",
    },
    "--frameworks": {
        "action": "store_true",
        "help": "with the frameworks of docs/frameworks.md",
    },
}


def on_target(args: argparse.Namespace) -> None:
    """The named target, or the current folder."""
    if getattr(args, "python", None):
        target = layer.find(args.python, ROOT, *layer.given_paths())
    else:
        target = Checkout(args.checkout or ".")
    options = {name: getattr(args, name) for name in ("force", "out") if name in args}
    print(getattr(target, args.command)(**options))


def env(args: argparse.Namespace) -> None:
    """Make .venv (another version: .venv-VERSION), or find it, and apply the overlay to it."""
    ensure(ROOT, args.torch)


def verify(args: argparse.Namespace) -> int:
    """Train a small GPT with 4 processes against one.

    Other options go to examples/compare_gpt.py, for instance --steps and --processes.
    """
    python = ensure(ROOT, args.torch)
    words = ["-u", str(ROOT / "examples" / "compare_gpt.py"), *args.extra]
    return run_in(python, words, Path.cwd())


def test(args: argparse.Namespace) -> int:
    """Run the tests with the environment's pytest.

    All other arguments go to pytest. Without any, all tests run, and must cover enough.
    --python: the optimizer's tests on the torch of EXE with the overlay, which changes no file there.
    It needs pytest, expecttest and numpy.
    --frameworks: the tests of examples/frameworks, in an environment of their own.
    """
    extra = args.extra
    if args.python or args.frameworks:
        if not any(word.startswith(("test/", "/")) for word in extra):
            extra = [*(ELSEWHERE if args.python else ["test/frameworks"]), *extra]
    if args.python:
        return run_elsewhere(args.python, ["-m", "pytest", *extra])
    python = ensure(ROOT, args.torch, frameworks=args.frameworks)
    if extra:
        return run_in(python, ["-m", "pytest", *extra], ROOT)
    print(f"running all tests: {TIME}", flush=True)
    return run_in(python, ["-m", "tools.coverage"], ROOT)


def gpu(args: argparse.Namespace) -> int:
    """Test and measure Muon on this machine's GPUs, and write a page: gpu.md and gpu.json.

    It takes up to 15 minutes. Without a GPU, the CPU plays it at small sizes. Other
    options go to tools/bench/gpu, for instance --only with names of stages.
    --python: on the torch of EXE with the overlay, which changes no file there.
    """
    words = ["-m", "tools.bench.gpu", str(args.out), "--overlay", payload.name(ROOT)]
    words += args.extra
    if args.python:
        return run_elsewhere(args.python, words)
    return run_in(ensure(ROOT, None), words, ROOT)


def run_elsewhere(python: str, words: list[str]) -> int:
    """Run a program on an interpreter with the overlay. Its torch stays the same."""
    installed = layer.find(python, ROOT, *layer.given_paths())
    with tempfile.TemporaryDirectory(prefix="distributed-muon-") as name:
        misfits = installed.make(Path(name), live=True)
        for line in versions.warnings(installed.version, misfits, b""):
            print(f"warning: {line}", file=sys.stderr)
        env = layer.plain_environment(name, *layer.given_paths())
        # The links lead into that torch, where Python would write its bytecode.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        return run_in(installed.python, words, ROOT, env)


def rebuild(args: argparse.Namespace) -> None:
    """Make a checkout importable.

    Both modes take the interpreter of --python (default: python on PATH, that of the active environment).
    source: upstream's editable build, into the environment of the interpreter.
    wheel: a folder of links to the checkout's Python files and to the compiled parts of the
    interpreter's torch, which has the same version. No compiler is needed.
    """
    python = layer.find_interpreter(args.python or "python")
    checkout = Checkout(args.checkout or ".")
    if args.mode == "source":
        build = ["pip", "install", "--no-build-isolation", "-v", "-e", "."]
        run_tool(python, build, checkout.root)
        return
    installed = layer.find(python, checkout.root, *layer.given_paths())
    here, there = checkout.version, installed.version or "0.0"
    if versions.release(there) != versions.release(here):
        raise WrongTarget(f"{installed.words} is not of the checkout's version: {here}")
    shutil.rmtree(checkout.importable, ignore_errors=True)
    installed.make(checkout.importable, live=True)
    place = shlex.quote(str(checkout.importable))
    test = shlex.quote(str(checkout.root / TEST))
    python = shlex.quote(str(installed.python))
    print(f"use it:\n  PYTHONPATH={place} {python} {test}")


def wheel(args: argparse.Namespace) -> None:
    """Build a package that changes no torch: `from distributed_muon import Muon`.

    It has the overlay's files under names of its own.
    """
    print(f"pip install {shlex.quote(str(package.write(ROOT, args.out)))}")


# Options of one string exclude each other.
COMMANDS = {
    env: ["--torch"],
    verify: ["--torch"],
    test: ["--torch --python --frameworks"],
    gpu: ["--python", "--out"],
    rebuild: ["--checkout", "--mode", "--python"],
    wheel: ["--out"],
}
# Methods of a target.
ON_TARGETS = {
    Checkout.apply: ["--checkout --python", "--force"],
    Checkout.revert: ["--checkout --python"],
    Checkout.status: ["--checkout --python"],
    Checkout.diff: ["--checkout"],
    Checkout.export: ["--checkout", "--out"],
    Checkout.pull: ["--checkout"],
}


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: a new option could change what they mean.
    how = {
        "epilog": CODES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser("setup_overlay.py", description=ABOUT, **how)
    parser.add_argument("--version", action="store_true", help="name the commit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for do, options in {**COMMANDS, **ON_TARGETS}.items():
        about = inspect.getdoc(do)
        first, *_ = about.splitlines()
        sub = commands.add_parser(do.__name__, help=first, description=about, **how)
        sub.set_defaults(sub=sub, do=do if do in COMMANDS else on_target)
        for alternatives in options:
            group = sub.add_mutually_exclusive_group()
            for option in alternatives.split():
                group.add_argument(option, **OPTIONS[option])
    return parser


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    args, args.extra = parser.parse_known_args(argv)
    if args.version:
        print(f"overlay {payload.name(ROOT)}, for torch {versions.SUPPORTED}")
        parser.exit()
    if args.command is None:
        parser.error("a command is missing")
    for name, value in vars(args).items():
        # An unset variable of a script. As a path, it would be the current folder.
        if isinstance(value, str) and not value.strip():
            args.sub.error(f"argument --{name}: the value is empty")
    if args.extra and args.command not in ("test", "verify", "gpu"):
        args.sub.error(f"unknown arguments: {' '.join(args.extra)}")
    return args


def main(argv: list[str]) -> int:
    # A `timeout` around this command then also ends what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.stdout.reconfigure(errors="backslashreplace")  # a path of another encoding
    try:
        args = _arguments(argv)
        code = args.do(args)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The reader is gone; the flush at exit would raise this again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OverlayError, OSError) as error:  # for instance a full disk
        kept = "\nNothing was touched." if isinstance(error, Refused) else ""
        print(f"error: {error}{kept}", file=sys.stderr)
        return getattr(error, "code", 1)
