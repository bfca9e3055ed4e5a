"""The commands. The docstring of each is its help."""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import env, files, git, package, parts, payload, tests, versions
from .checkout import Checkout
from .errors import OverlayError, Refused, WrongTarget
from .payload import ROOT
from .target import words
from .wheel import find_interpreter, find_wheel, Wheel


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
TEST = "test/distributed/optim/test_muon.py"
FEW = 5  # more files than these are counted, not named


def _value(metavar: str, words: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": words} | more


def _flag(words: str) -> dict[str, Any]:
    return {"action": "store_true", "help": words}


OUT = "the folder for what is written (default: out)"
# One meaning for each.
OPTIONS = {
    "--torch": _value("VERSION", f"{versions.SUPPORTED} (default: {versions.PINNED})"),
    "--checkout": _value("DIR", "a PyTorch git checkout (default: the current folder)"),
    "--python": _value("EXE", "an interpreter"),
    "--out": _value("DIR", OUT, default="out"),
    "--mode": {"choices": ["source", "wheel"], "required": True, "help": "how"},
    "--stack": _flag("a mail for each commit of patches/stack.toml, not one for all"),
    "--commit": _flag("nothing: a checkout always gets commits"),
    "--force": _flag(
        "go on with a torch that is not supported, without patches that do not fit"
    ),
    "--coverage": _flag("show how much of the optimizer the given tests execute"),
    "--frameworks": _flag("with the frameworks of docs/frameworks.md"),
    "--dry-run": _flag("say what would be done, write nothing"),
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


def _target(args: argparse.Namespace, *, environment: bool = False) -> Checkout | Wheel:
    """The one that is named, the current folder, or the environment's torch."""
    python, where = args.python, args.checkout
    if python and where:
        raise WrongTarget("one target at a time: --checkout DIR or --python EXE")
    if python:
        return find_wheel(python)
    marks = (".git", "version.txt", "torch/__init__.py")
    if where or all(Path(mark).exists() for mark in marks):
        return Checkout(where or ".")
    if environment:
        return find_wheel(env.existing_python(ROOT), with_path=False)
    raise WrongTarget("name the target: --checkout DIR or --python EXE")


def _show(rels: list[str], done: str) -> None:
    if len(rels) > FEW:
        folders = Counter(rel.split("/")[0] for rel in rels)
        where = ", ".join(f"{number} in {name}/" for name, number in folders.items())
        rels = [f"{len(rels)} files: {where}"]
    for rel in rels:
        print(done, rel)


@command("--torch", "--dry-run")
def _env(args: argparse.Namespace) -> None:
    """Make .venv (another version: .venv-VERSION), or find it, and apply the overlay to it."""
    env.ensure(ROOT, args.torch, dry=args.dry_run)


def _start(args: argparse.Namespace, words: list[str], where: Path = ROOT) -> int:
    """Have the interpreter of --python run these words, or the environment's."""
    given = vars(args)
    elsewhere, frameworks = given.get("python"), given.get("frameworks", False)
    options = {"frameworks": frameworks, "dry": args.dry_run}
    python = elsewhere or env.ensure(ROOT, given.get("torch"), **options)
    if args.dry_run:
        print(f"would run {shlex.join([str(python), *words])}")
        return 0
    if elsewhere:
        return tests.run_elsewhere(elsewhere, words, ROOT)
    if given.get("coverage"):
        return tests.run_measured(python, args.extra, ROOT)
    return env.run_in(python, words, where)


@command("--torch", "--dry-run")
def _verify(args: argparse.Namespace) -> int:
    """Train a small GPT with 4 processes against one.

    Other options go to examples/compare_gpt.py, for instance --steps and --processes.
    """
    words = ["-u", str(ROOT / "examples" / "compare_gpt.py"), *args.extra]
    code = _start(args, words, Path.cwd())
    passed = "passed: training with distributed Muon agrees with one process"
    if not args.dry_run:
        print(f"verify {f'failed with exit code {code}' if code else passed}")
    return code


@command("--torch", "--python", "--coverage", "--frameworks", "--dry-run")
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
        folders = tests.ELSEWHERE if args.python else ["test/frameworks"]
        extra = [*folders, *extra]
    args.coverage |= not extra
    return _start(args, ["-m", "pytest", *extra])


@command("--python", "--out", "--dry-run")
def _gpu(args: argparse.Namespace) -> int:
    """Test and measure Muon on this machine's GPUs, and write a page: gpu.md and gpu.json.

    It takes up to 15 minutes. Without a GPU, the CPU plays it at small sizes. Other
    options go to tools/bench/gpu, for instance --only with names of stages.
    --python: on the torch of EXE with the overlay, which changes no file there.
    """
    name = ["--overlay", payload.name(ROOT) or "(no git)"]
    return _start(args, ["-m", "tools.bench.gpu", str(args.out), *name, *args.extra])


@command("--checkout", "--python", "--commit", "--force", "--dry-run")
def _apply(args: argparse.Namespace) -> None:
    """Apply the overlay to a checkout or an installed torch.

    A checkout gets commits, as from `git am`. Writes all files or none, and never a file with
    changes of yours.
    """
    _change(args, "applied to", "has the overlay already", force=args.force)


@command("--checkout", "--python", "--commit", "--dry-run")
def _revert(args: argparse.Namespace) -> None:
    """Restore the stock files.

    In a checkout, this is a commit. Also removes the compiled parts of `rebuild --mode wheel`.
    """
    _change(args, "reverted", "has no overlay")


def _change(args: argparse.Namespace, done: str, nothing: str, **more: bool) -> None:
    target = _target(args)
    with target.held():
        do = getattr(target, args.command)
        report = do(ROOT, dry=args.dry_run, **more)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    verbs = ("would write", "would remove") if args.dry_run else ("wrote", "removed")
    for verb, rels in zip(verbs, (report.written, report.removed)):
        _show(rels, verb)
    for line in report.words:
        print(line)
    if not (report.changes or report.words):
        print(f"{target.words} {nothing}; nothing to do")
    elif report.changes and not args.dry_run:
        print(f"{done} {target.words}")


@command("--checkout", "--mode", "--python", "--dry-run")
def _rebuild(args: argparse.Namespace) -> None:
    """Make a checkout importable.

    Both modes take the interpreter of --python (default: python on PATH, that of the active environment).
    source: upstream's editable build, into the environment of the interpreter.
    wheel: the compiled parts of its torch, which has the checkout's version; no compiler is needed, and
    `revert` removes them.
    """
    checkout = Checkout(args.checkout or ".")
    tree = checkout.tree
    if not args.python and not shutil.which("python"):
        raise WrongTarget(
            "no python on PATH: activate an environment, or pass --python EXE"
        )
    python = find_interpreter(args.python or "python")
    if args.mode == "source":
        build = ["pip", "install", "--no-build-isolation", "-v", "-e", "."]
        if args.dry_run:
            if parts.are_lent(tree):
                print("would remove the compiled parts of another torch")
            command = shlex.join([str(python), "-m", *build])
            print(f"would run cd {tree.quoted} && {command}")
            return
        with checkout.held():
            parts.remove(tree)
            env.run_tool(python, build, tree.root)
        return
    wheel = find_wheel(python)
    here, there = map(str, (checkout.version, wheel.version))
    if versions.release(there) != versions.release(here):
        raise WrongTarget(f"{wheel.words} is not of the same version: {here}")
    if args.dry_run:
        print(f"would take the compiled parts of {wheel.words} into {checkout.words}")
        return
    with checkout.held():
        with wheel.held():
            print(f"import torch gives {parts.lend(tree, wheel)}\nuse it:")
        test = f" {TEST}" * (tree.root / TEST).is_file()
        python = shlex.quote(str(wheel.python))
        print(f"  cd {tree.quoted} && PYTHONPATH={tree.quoted} {python}{test}")


@command("--checkout", "--python")
def _status(args: argparse.Namespace) -> None:
    """Say which overlay a target (default: the environment) has, and what differs."""
    print(words(_target(args, environment=True).status(ROOT)))


@command("--checkout", "--python")
def _diff(args: argparse.Namespace) -> None:
    """Show what `apply` would change, as a patch."""
    plan = _target(args, environment=True).plan(ROOT)
    for misfit in plan.misfits.values():
        print(f"warning: {misfit}", file=sys.stderr)
    changes = plan.changes(plan.wanted)
    now = {rel: plan.now[rel] for rel in changes}
    sys.stdout.buffer.write(git.difference(now, changes))


@command("--checkout", "--dry-run")
def _pull(args: argparse.Namespace) -> int:
    """Merge edits made in a checkout into the files and patches of this repository.

    Lines that both sides edited get conflict markers.
    """
    target = Checkout(args.checkout or ".")
    with target.held(), files.held(ROOT):
        taken, both, missing = target.pull(ROOT, dry=args.dry_run)
    for rel in taken:
        print("would take" if args.dry_run else "took", rel)
        if rel.startswith(payload.PATCHES):
            print(f"  it fits torch {target.version}; `env --torch` tries others")
    for rel in missing:
        print(f"{rel} is missing there; delete it here, too, if you meant that")
    if both:
        print("conflicts, with markers in this repository:", *both, sep="\n  ")
        print(target.dropping())
    elif not taken:
        print(f"nothing to take: {target.words} has no other edits of the overlay")
    return bool(both)


@command("--checkout", "--out", "--stack", "--force", "--dry-run")
def _export(args: argparse.Namespace) -> None:
    """Write the overlay as a git am series for the newest commit without the overlay."""
    target, out = Checkout(args.checkout or "."), args.out
    with target.held():
        options = {"stack": args.stack, "force": args.force, "dry": args.dry_run}
        mails, base, lacks = target.export(ROOT, out, **options)
    for each in lacks:
        print(f"warning: {each}", file=sys.stderr)
    print(*mails, sep="\n")
    print(f"for {target.words} at {base}: git am {shlex.quote(str(out))}/*.patch")


@command("--out", "--dry-run")
def _wheel(args: argparse.Namespace) -> None:
    """Build a package that changes no file of torch: `from distributed_muon import Muon`.

    It has the overlay's files under names of its own.
    """
    place = package.write(ROOT, args.out, dry=args.dry_run)
    words = "would write" if args.dry_run else "pip install"
    print(f"{words} {shlex.quote(str(place))}")


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
    # A `timeout` around this command then also ends what it started, and a
    # half-done write is undone.
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
