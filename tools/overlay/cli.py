"""The commands. The docstring of each is its help."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import env, layer, package, payload, versions
from .checkout import Checkout, opened
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
TIME = "fifteen minutes on two cores"  # of all tests, as the README says, too
# On another interpreter: the optimizer's tests, why some are skipped, and what they import.
ELSEWHERE = ["-rs", "test/optim", "test/distributed/optim"]
NEEDS = ["pytest", "expecttest", "numpy"]
TEST = "test/distributed/optim/test_muon.py"


def _value(metavar: str, words: str, default: str | None = None) -> dict[str, Any]:
    return {"metavar": metavar, "help": words, "default": default}


def _flag(words: str) -> dict[str, Any]:
    return {"action": "store_true", "help": words}


# One meaning for each.
OPTIONS = {
    "--torch": _value("VERSION", f"{versions.SUPPORTED} (default: {versions.PINNED})"),
    "--checkout": _value("DIR", "a PyTorch git checkout (default: the current folder)"),
    "--python": _value("EXE", "an interpreter"),
    "--out": _value(
        "DIR", "the folder for what is written (default: out)", default="out"
    ),
    "--mode": {"choices": ["source", "wheel"], "required": True, "help": "how"},
    "--force": _flag(
        "go on with an untested torch, and without patches that do not fit"
    ),
    "--coverage": _flag("show how much of the optimizer the given tests execute"),
    "--frameworks": _flag("with the frameworks of docs/frameworks.md"),
}
COMMANDS: dict[str, tuple[Callable, tuple[str, ...]]] = {}


def command(*options: str) -> Callable:
    def add(do: Callable) -> None:
        COMMANDS[do.__name__.strip("_")] = do, options

    return add


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "setup_overlay.py", description=ABOUT, epilog=CODES, formatter_class=raw
    )
    parser.add_argument("--version", action="store_true", help="name the commit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (do, options) in COMMANDS.items():
        lines = [line.removeprefix("    ") for line in (do.__doc__ or "").splitlines()]
        # No abbreviations: a new option could change what they mean.
        sub = commands.add_parser(
            name, help=lines[0].rstrip("."), description="\n".join(lines), epilog=CODES,
            formatter_class=raw, allow_abbrev=False,
        )  # fmt: skip
        sub.set_defaults(sub=sub)
        for option in options:
            sub.add_argument(option, **OPTIONS[option])
    return parser


@contextlib.contextmanager
def _target(
    args: argparse.Namespace, *, writes: bool = False
) -> Iterator[Checkout | layer.Installed]:
    """The named target, or the current folder. Commands that only read may take the environment."""
    python, where = getattr(args, "python", None), args.checkout
    if python and where:
        raise WrongTarget("one target at a time: --checkout DIR or --python EXE")
    marks = (".git", "version.txt", "torch/__init__.py")
    if python:
        yield layer.find(python, ROOT)
    elif where or all(Path(mark).exists() for mark in marks):
        with opened(where or ".", ROOT, writes=writes) as checkout:
            yield checkout
    elif writes or "python" not in args:
        raise WrongTarget("name the target: --checkout DIR or --python EXE")
    else:
        yield layer.find(env.existing_python(ROOT), ROOT, with_path=False)


@command("--torch")
def _env(args: argparse.Namespace) -> None:
    """Make .venv (another version: .venv-VERSION), or find it, and apply the overlay to it."""
    env.ensure(ROOT, args.torch)


@command("--torch")
def _verify(args: argparse.Namespace) -> int:
    """Train a small GPT with 4 processes against one.

    Other options go to examples/compare_gpt.py, for instance --steps and --processes.
    """
    python = env.ensure(ROOT, args.torch)
    words = ["-u", str(ROOT / "examples" / "compare_gpt.py"), *args.extra]
    code = env.run_in(python, words, Path.cwd())
    passed = "passed: training with distributed Muon agrees with one process"
    print(f"verify {f'failed with exit code {code}' if code else passed}")
    return code


@command("--torch", "--python", "--coverage", "--frameworks")
def _test(args: argparse.Namespace) -> int:
    """Run the tests with the environment's pytest.

    All other arguments go to pytest. Without any, all tests run, and must cover enough.
    --python: the optimizer's tests on the torch of EXE with the overlay, which changes no file there.
    --frameworks: the tests of examples/frameworks, in an environment of their own.
    """
    alone, extra = args.python or args.frameworks, args.extra
    if alone and (args.torch or args.coverage or (args.python and args.frameworks)):
        raise WrongTarget("--python and --frameworks go without other options of ours")
    if alone and not any(word.startswith(("test/", "/")) for word in extra):
        extra = [*(ELSEWHERE if args.python else ["test/frameworks"]), *extra]
    if args.python:
        return _run_elsewhere(args.python, ["-m", "pytest", *extra])
    python = env.ensure(ROOT, args.torch, frameworks=args.frameworks)
    if not extra:
        print(f"running all tests: {TIME}", flush=True)
    is_measured = args.coverage or not extra
    module = "tools.coverage" if is_measured else "pytest"
    return env.run_in(python, ["-m", module, *extra], ROOT)


@command("--python", "--out")
def _gpu(args: argparse.Namespace) -> int:
    """Test and measure Muon on this machine's GPUs, and write a page: gpu.md and gpu.json.

    It takes up to 15 minutes. Without a GPU, the CPU plays it at small sizes. Other
    options go to tools/bench/gpu, for instance --only with names of stages.
    --python: on the torch of EXE with the overlay, which changes no file there.
    """
    name = payload.name(ROOT) or "(no git)"
    words = ["-m", "tools.bench.gpu", str(args.out), "--overlay", name, *args.extra]
    if args.python:
        return _run_elsewhere(args.python, words)
    return env.run_in(env.ensure(ROOT, None), words, ROOT)


def _run_elsewhere(python: str, words: list[str]) -> int:
    installed = layer.find(python, ROOT)
    code = f"from importlib.util import find_spec\nprint(*[n for n in {NEEDS} if not find_spec(n)], '')"
    missing = layer.ask_python(installed.python, code).strip()
    if "pytest" in words and missing:
        first = f"{installed.quoted} -m pip install {missing}"
        raise WrongTarget(f"{python} lacks packages:\n  {first}")
    with installed.temporary() as variables:
        return env.run_in(installed.python, words, ROOT, variables)


@command("--checkout", "--python", "--force")
def _apply(args: argparse.Namespace) -> None:
    """Apply the overlay to a checkout or an installed torch.

    A checkout gets commits, as from `git am`. An installed torch gets a folder next to it, which
    Python finds first. Neither loses changes of yours.
    """
    with _target(args, writes=True) as target:
        print(target.apply(force=args.force))


@command("--checkout", "--python")
def _revert(args: argparse.Namespace) -> None:
    """Take the overlay out again.

    In a checkout, this is a commit. Also removes the links of `rebuild --mode wheel`.
    """
    with _target(args, writes=True) as target:
        print(target.revert())


@command("--checkout", "--python")
def _status(args: argparse.Namespace) -> None:
    """Say which overlay a target (default: the environment) has, and what differs."""
    with _target(args) as target:
        print(target.status())


@command("--checkout")
def _diff(args: argparse.Namespace) -> None:
    """Show what `apply` would change in a checkout, as a patch."""
    with _target(args) as target:
        sys.stdout.buffer.write(target.diff())


@command("--checkout", "--force", "--out")
def _export(args: argparse.Namespace) -> None:
    """Write the overlay as mails for `git am`, one for each of its commits."""
    with _target(args) as target:
        print(target.export(args.out, force=args.force))


@command("--checkout")
def _pull(args: argparse.Namespace) -> None:
    """Merge edits of the overlay that were made in a checkout into this repository.

    Committed edits and others. git merges them, and leaves the commit to you.
    """
    with _target(args) as target:
        print(target.pull())


@command("--checkout", "--mode", "--python")
def _rebuild(args: argparse.Namespace) -> None:
    """Make a checkout importable.

    Both modes take the interpreter of --python (default: python on PATH, that of the active environment).
    source: upstream's editable build, into the environment of the interpreter.
    wheel: links to the compiled parts of its torch, which has the checkout's version; no compiler is
    needed, and `revert` removes the links.
    """
    python = layer.find_interpreter(args.python or "python")
    with opened(args.checkout or ".", ROOT) as checkout:
        if args.mode == "source":
            checkout.give_back()
            build = ["pip", "install", "--no-build-isolation", "-v", "-e", "."]
            env.run_tool(python, build, checkout.root)
            return
        installed = layer.find(python, ROOT)
        here, there = checkout.version, installed.version or "0.0"
        if versions.release(there) != versions.release(here):
            raise WrongTarget(
                f"{installed.words} is not of the checkout's version: {here}"
            )
        checkout.borrow(installed.torch)
        code = f"import sys; sys.path.insert(0, {str(checkout.root)!r})\n"
        code += "import torch.optim; print(torch.__file__)"
        print(f"import torch gives {layer.ask_python(python, code)}\nuse it:")
        test = f" {TEST}" * (checkout.root / TEST).is_file()
        words = f"PYTHONPATH={checkout.quoted} {shlex.quote(str(python))}{test}"
        print(f"  cd {checkout.quoted} && {words}")


@command("--out")
def _wheel(args: argparse.Namespace) -> None:
    """Build a package that changes no torch: `from distributed_muon import Muon`.

    It has the overlay's files under names of its own.
    """
    print(f"pip install {shlex.quote(str(package.write(ROOT, args.out)))}")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    args, extra = parser.parse_known_args(argv)
    if args.version:
        name = payload.name(ROOT) or "(no git)"
        print(f"distributed Muon overlay {name}, for torch {versions.SUPPORTED}")
        parser.exit()
    if args.command is None:
        parser.error("a command is missing")
    for name, value in vars(args).items():
        # An unset variable of a script. As a path, it would be the current folder.
        if isinstance(value, str) and not value.strip():
            args.sub.error(f"argument --{name}: the value is empty")
    if extra and args.command not in ("test", "verify", "gpu"):
        args.sub.error(f"unknown arguments: {' '.join(extra)}")
    args.extra = extra
    if "out" in args:
        args.out = Path(args.out).expanduser().resolve()
    return args


def main(argv: list[str]) -> int:
    # A `timeout` around this command then also ends what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.stdout.reconfigure(errors="backslashreplace")  # a path of another encoding
    try:
        args = _arguments(argv)
        code = COMMANDS[args.command][0](args)
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
