"""The commands. The docstring of each is its help."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn, TYPE_CHECKING

from . import env, errors, files, frameworks, git, parts, payload, tests, versions
from .checkout import Checkout, find_checkout
from .errors import OverlayError, WrongTarget
from .repo import ROOT
from .target import words
from .wheel import find_wheel, Wheel


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


CODES = """\
exit codes:
  0  done (also: there was nothing to do)
  1  the work failed: a test, a build, an installation, a write
  2  wrong usage, or a wrong target
  3  refused, because a user's work would be lost
  130  interrupted by Ctrl-C
  143  ended by SIGTERM
"""
ABOUT = f"""\
Distributed training for torch.optim.Muon, as an overlay over PyTorch
{versions.SUPPORTED}: makes an environment with it, tries it, and applies it to
a PyTorch checkout or an installed torch.

start here: python setup_overlay.py verify
"""
FEW = 5  # more files than these are counted, not named
# One meaning for each; a value names its placeholder, a flag has none.
OPTIONS = {
    "--torch": ("VERSION", f"{versions.SUPPORTED} (default: {versions.PINNED})"),
    "--checkout": ("DIR", "a PyTorch git checkout (default: the current folder)"),
    "--python": ("EXE", "an interpreter, or its environment's folder"),
    "--out": ("DIR", "the folder of the mails"),
    "--mode": ("MODE", "source or wheel"),
    "--stack": (None, "a mail for each layer, not one for all"),
    "--commit": (None, "commit it in the checkout"),
    "--force": (None, "go on with a torch that is not supported"),
    "--coverage": (None, "show how much of the optimizer the given tests execute"),
    "--frameworks": (None, f"with {', '.join(frameworks.VERSIONS)}"),
    "--json": (None, "for programs"),
    "--verbose": (None, "name every file"),
    "--dry-run": (None, "say what would be done, write nothing"),
}
COMMANDS: dict[
    str, tuple[Callable[[argparse.Namespace], int | None], tuple[str, ...]]
] = {}


def command(*options: str) -> Callable:
    def add(do: Callable[[argparse.Namespace], int | None]) -> Callable:
        COMMANDS[do.__name__.strip("_")] = do, options
        return do

    return add


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word.partition("=")[0], list(known), 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def _given(text: str) -> str:
    """An unset variable of a script is empty; as a path, that is the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "setup_overlay.py", description=ABOUT, epilog=CODES, formatter_class=raw
    )
    parser.add_argument(
        "--version", action="store_true", help="name the overlay's commit"
    )
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
            metavar, text = OPTIONS[option]
            if metavar is None:
                sub.add_argument(option, action="store_true", help=text)
            else:
                needed = option in ("--out", "--mode")
                more = {"metavar": metavar, "help": text, "required": needed}
                sub.add_argument(option, type=_given, **more)
    return parser


def _target(args: argparse.Namespace, *, environment: bool = False) -> Checkout | Wheel:
    """The one that is named, the current folder, or the environment's torch."""
    python, where = args.python, args.checkout
    if python and where:
        raise WrongTarget("one target at a time: --checkout DIR or --python EXE")
    if python:
        return find_wheel(python)
    marks = (".git", "version.txt", "torch/optim/_muon.py")
    if where or all(Path(mark).exists() for mark in marks):
        return find_checkout(where or ".")
    if environment:
        return find_wheel(env.existing_python(ROOT))
    raise WrongTarget("name the target: --checkout DIR or --python EXE")


def _show(rels: list[str], done: str, *, verbose: bool) -> None:
    if verbose or len(rels) <= FEW:
        for rel in rels:
            print(f"{done} {rel}")
        return
    folders = Counter(rel.split("/")[0] for rel in rels)
    where = ", ".join(f"{number} in {name}/" for name, number in folders.items())
    print(f"{done} {len(rels)} files: {where}")


def _run(python: Path, words: list[str], args: argparse.Namespace) -> int:
    if args.dry_run:
        print(f"would run {shlex.join([str(python), *words])}")
        return 0
    return env.run_in(python, words, Path.cwd())


@command("--torch", "--dry-run")
def _env(args: argparse.Namespace) -> None:
    """Make the environment, or find it.

    Makes .venv (another version: .venv-VERSION) with torch and the packages that the tests
    import, and applies the overlay to it. A second run applies changed files again.

    example:
      python setup_overlay.py env --torch 2.15.0
    """
    env.ensure(ROOT, args.torch, dry=args.dry_run)


@command("--torch", "--dry-run")
def _verify(args: argparse.Namespace) -> int:
    """Train a small model with 4 processes against one.

    Runs examples/compare_gpt.py in the environment: a small GPT on real text, FSDP2 and
    distributed Muon. Other options go to it, for instance --steps, --processes and --out.

    example:
      python setup_overlay.py verify --steps 40 --out results
    """
    python = env.ensure(ROOT, args.torch, dry=args.dry_run)
    script = str(ROOT / "examples" / "compare_gpt.py")
    code = _run(python, ["-u", script, *args.extra], args)
    passed = "passed: training with distributed Muon agrees with one process"
    if not args.dry_run:
        print(f"verify {f'failed with exit code {code}' if code else passed}")
    return code


@command("--torch", "--python", "--coverage", "--frameworks", "--dry-run")
def _test(args: argparse.Namespace) -> int:
    """Run the tests with the environment's pytest.

    All other arguments go to pytest. Without any, all tests run, and must cover enough.
    --python: the optimizer's tests on the torch of EXE, with the overlay for the run alone.
    --frameworks: the tests of examples/frameworks, in an environment of their own.

    example:
      python setup_overlay.py test --torch 2.15.0 test/overlay -k revert
      python setup_overlay.py test --python ~/venv/bin/python
    """
    alone = args.python or args.frameworks
    if alone and (args.torch or args.coverage or (args.python and args.frameworks)):
        raise WrongTarget("--python and --frameworks go without other options of ours")
    if args.dry_run:
        where = args.python or env.ensure(ROOT, args.torch, dry=True)
        return _run(Path(where), ["-m", "pytest", *args.extra], args)
    if args.frameworks:
        return frameworks.test(ROOT, args.extra)
    if args.python:
        return tests.run_with(args.python, args.extra, ROOT)
    python = env.ensure(ROOT, args.torch)
    measure = args.coverage or not args.extra
    return tests.run(python, args.extra, ROOT, measure=measure)


@command("--checkout", "--python", "--commit", "--force", "--dry-run", "--verbose")
def _apply(args: argparse.Namespace) -> None:
    """Apply the overlay to a checkout or an installed torch.

    Writes all files or none, and never a file with changes of yours. --commit also commits
    them, layer by layer.

    example:
      python setup_overlay.py apply --checkout ~/pytorch --commit
      python setup_overlay.py apply --python ~/venv/bin/python
    """
    _change(args, {"force": args.force}, "applied to", "has the overlay already")


@command("--checkout", "--python", "--commit", "--dry-run", "--verbose")
def _revert(args: argparse.Namespace) -> None:
    """Restore the stock files.

    Also removes the compiled parts of `rebuild --mode wheel`. Refuses if the files have
    changes of yours. If the overlay is committed, --commit commits its revert.

    example:
      python setup_overlay.py revert --checkout ~/pytorch
    """
    _change(args, {}, "reverted", "has no overlay")


def _change(args: argparse.Namespace, more: dict, done: str, nothing: str) -> None:
    target = _target(args)
    if args.commit and isinstance(target, Wheel):
        raise WrongTarget("--commit goes with --checkout")
    with target.held():
        do = getattr(target, args.command)
        report = do(ROOT, commit=args.commit, dry=args.dry_run, **more)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in report.notes if report.changes else ():
        print(line)
    wrote, removed = "wrote", "removed"
    if args.dry_run:
        wrote, removed = "would write", "would remove"
    _show(report.written, wrote, verbose=args.verbose)
    _show(report.removed, removed, verbose=args.verbose)
    if report.parts:
        print(f"removed {report.parts} compiled parts that a wheel had lent")
    if report.commits:
        print("committed as", *(commit[:12] for commit in report.commits))
    if report.uncommitted:
        print(
            "the overlay is committed; its revert is in the work tree and not committed.\n"
            f"To commit it: setup_overlay.py revert --checkout {target.root} --commit"
        )
    elif not (report.changes or report.commits or report.parts):
        print(f"{target.words} {nothing}; nothing to do")
    if report.changes and not args.dry_run:
        print(f"{done} {target.words}")


@command("--checkout", "--mode", "--python", "--dry-run")
def _rebuild(args: argparse.Namespace) -> None:
    """Make a checkout importable.

    source: upstream's editable build by --python (default: python on PATH).
    wheel: links to the compiled parts of the torch of --python (default: the
    environment's) of the same version; no compiler is needed, and `revert` removes them.

    example:
      python setup_overlay.py rebuild --checkout ~/pytorch --mode wheel
      USE_CUDA=0 python setup_overlay.py rebuild --checkout ~/pytorch --mode source
    """
    if args.mode not in ("source", "wheel"):
        raise WrongTarget("--mode is source or wheel")
    checkout = find_checkout(args.checkout or ".")
    if args.dry_run:
        print(f"would rebuild {checkout.words} in mode {args.mode}")
        return
    with checkout.held():
        if args.mode == "source":
            parts.from_source(checkout.tree, args.python)
            return
        wheel = find_wheel(args.python or env.existing_python(ROOT))
        with wheel.held():
            parts.from_wheel(checkout.tree, wheel)


@command("--checkout", "--python", "--json", "--verbose")
def _status(args: argparse.Namespace) -> None:
    """Say whether a target has the overlay, and which.

    Names its commit, the files that differ, and where the stock files are kept. (Default:
    the environment, in no checkout.)

    example:
      python setup_overlay.py status --checkout ~/pytorch
    """
    found = _target(args, environment=True).status(ROOT)
    as_json = json.dumps(found, indent=1)
    print(as_json if args.json else words(found, verbose=args.verbose))


@command("--checkout", "--python")
def _diff(args: argparse.Namespace) -> None:
    """Show what `apply` would change, as a patch.

    example:
      python setup_overlay.py diff --checkout ~/pytorch
    """
    plan = _target(args, environment=True).plan(ROOT)
    changes = plan.changes(plan.wanted)
    shown = git.difference({rel: plan.now[rel] for rel in changes}, changes)
    sys.stdout.buffer.write(shown)


@command("--checkout", "--dry-run")
def _pull(args: argparse.Namespace) -> None:
    """Take edits made in a checkout back into this repository.

    Merges them into the files and patches here. Refuses if the same lines were edited on
    both sides.

    example:
      python setup_overlay.py pull --checkout ~/pytorch
    """
    target = find_checkout(args.checkout or ".")
    with target.held(), files.held(ROOT):
        taken, missing = target.pull(ROOT, dry=args.dry_run)
    _show(taken, "would take" if args.dry_run else "took", verbose=True)
    for rel in missing:
        print(f"{rel} is missing there; delete it here, too, if you meant that")
    if not taken:
        print(f"nothing to take: {target.words} has no edits of the overlay")


@command("--checkout", "--out", "--stack", "--dry-run")
def _export(args: argparse.Namespace) -> None:
    """Write the overlay as a git am series.

    It fits the newest commit without the overlay, which the command names. --stack: in the
    order of patches/stack.toml, for a reviewer.

    example:
      python setup_overlay.py export --checkout ~/pytorch --out series --stack
      git -C ~/pytorch am $PWD/series/*.patch
    """
    target = find_checkout(args.checkout or ".")
    out = Path(args.out).expanduser().resolve()
    with target.held():
        mails, base = target.export(ROOT, out, stack=args.stack, dry=args.dry_run)
    print(*mails, sep="\n")
    print(f"for {target.words} at {base}: git am {shlex.quote(str(out))}/*.patch")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        parser.error(f"no such command: {argv[0]}{_nearest(argv[0], COMMANDS)}")
    args, extra = parser.parse_known_args(argv)
    if args.version:
        name = payload.name(ROOT) or "(no git)"
        print(f"distributed Muon overlay {name}, for torch {versions.SUPPORTED}")
        parser.exit()
    if args.command is None:
        parser.error("a command is missing")
    near = _nearest(extra[0], COMMANDS[args.command][1]) if extra else ""
    if near or (extra and args.command not in ("test", "verify")):
        args.sub.error(f"unknown arguments: {' '.join(extra)}{near}")
    args.extra = extra
    return args


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    # A `timeout` around this command then also ends what it started, and a
    # half-done write is undone.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        args = _arguments(argv)
        code = COMMANDS[args.command][0](args)
        sys.stdout.flush()
        return code or 0
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        # The reader is gone; the flush at exit would raise this again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.FAILED
    except OSError as error:
        # A full disk, a missing permission: the words are in the error.
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        return errors.FAILED
