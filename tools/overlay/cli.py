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
from typing import TYPE_CHECKING, Any, NoReturn

from . import env, errors, files, frameworks, git, payload, rebuild, tests, versions
from .checkout import Checkout, find_checkout
from .errors import OverlayError, WrongTarget
from .repo import ROOT
from .target import Report, words
from .wheel import Wheel, find_wheel


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
{versions.supported_words()}: makes an environment with it, tries it, and applies it to
a PyTorch checkout or an installed torch.

start here:
  python setup_overlay.py verify                     train with it, see that it holds
  python setup_overlay.py test                       run all tests
  python setup_overlay.py apply --checkout ~/pytorch put it into a PyTorch work tree
"""

FEW = 5  # more files than these are counted, not named

# One meaning for each; a value names its placeholder, a flag has none.
OPTIONS = {
    "--torch": (
        "VERSION",
        f"{versions.supported_words()} (default: {versions.PINNED})",
    ),
    "--checkout": ("DIR", "a PyTorch git checkout (default: the current folder)"),
    "--python": ("EXE", "an interpreter, or its environment's folder"),
    "--out": ("DIR", "the folder of the mails"),
    "--mode": ("MODE", "source or wheel"),
    "--commit": (None, "commit it in the checkout"),
    "--force": (None, "go on with a torch that is not supported"),
    "--copy": (None, "wheel: copy libraries, do not link them"),
    "--pth": (None, "wheel: have EXE import the checkout without PYTHONPATH"),
    "--no-reuse": (None, "source: build even if an existing build would do"),
    "--coverage": (None, "show how much of the optimizer the given tests execute"),
    "--frameworks": (None, f"with {', '.join(frameworks.VERSIONS)}"),
    "--json": (None, "for programs"),
    "--verbose": (None, "name every file"),
    "--dry-run": (None, "say what would be done, write nothing"),
}
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[str, ...]]] = {}


def command(*options: str) -> Callable:
    def add(do: Callable[[argparse.Namespace], int]) -> Callable:
        COMMANDS[do.__name__.strip("_")] = do, options
        return do

    return add


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviation, which a new option could change, and names the nearest one."""

    def __init__(self, *args: Any, **more: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, formatter_class=raw, allow_abbrev=False, **more)

    def unknown(self, extra: list[str]) -> NoReturn:
        options = [option for a in self._actions for option in a.option_strings]
        self.error(f"unknown arguments: {' '.join(extra)}{_nearest(extra[0], options)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word.partition("=")[0], list(known), 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def _given(text: str) -> str:
    """An unset variable of a script is empty; as a path, that is the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("setup_overlay.py", description=ABOUT, epilog=CODES)
    parser.add_argument(
        "--version", action="store_true", help="print the overlay's commit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (do, options) in COMMANDS.items():
        lines = [line.removeprefix("    ") for line in (do.__doc__ or "").splitlines()]
        sub = commands.add_parser(
            name, help=lines[0].rstrip("."), description="\n".join(lines), epilog=CODES
        )
        sub.set_defaults(do=do, sub=sub)
        for option in options:
            metavar, text = OPTIONS[option]
            if metavar is None:
                sub.add_argument(option, action="store_true", help=text)
            else:
                needed = option in ("--out", "--mode")
                sub.add_argument(
                    option, metavar=metavar, help=text, type=_given, required=needed
                )
    return parser


def _here() -> str | None:
    """The current folder, if it is a PyTorch checkout."""
    marks = (".git", "version.txt", "torch/optim/_muon.py")
    return "." if all(Path(mark).exists() for mark in marks) else None


def _checkout(args: argparse.Namespace) -> Checkout:
    where = args.checkout or _here()
    if where is None:
        raise WrongTarget("name the checkout: --checkout DIR")
    return find_checkout(where)


def _target(args: argparse.Namespace, *, environment: bool = False) -> Checkout | Wheel:
    if args.python and args.checkout:
        raise WrongTarget("one target at a time: --checkout DIR or --python EXE")
    if args.python:
        return find_wheel(args.python)
    if args.checkout or _here():
        return _checkout(args)
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


def _show_report(report: Report, args: argparse.Namespace) -> bool:
    """Whether any file changed."""
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    changed = bool(report.written or report.removed)
    for line in report.notes if changed or args.verbose else ():
        print(line)
    wrote, removed = ("wrote", "removed")
    if args.dry_run:
        wrote, removed = ("would write", "would remove")
    _show(report.written, wrote, verbose=args.verbose)
    _show(report.removed, removed, verbose=args.verbose)
    if report.parts:
        print(f"removed {report.parts} compiled parts that a wheel had lent")
    if report.commits:
        print("committed as", *(commit[:12] for commit in report.commits))
    return changed


def _run(python: Path, words: list[str], args: argparse.Namespace) -> int:
    if args.dry_run:
        print(f"would run {shlex.join([str(python), *words])}")
        return 0
    return env.run_in(python, words, Path.cwd(), timeout=None)


@command("--torch", "--dry-run")
def _env(args: argparse.Namespace) -> int:
    """Make the environment, or find it.

    Makes .venv next to setup_overlay.py with torch (another version: .venv-VERSION) and
    the packages that the tests import, and applies the overlay to it. A second run finds
    it and applies changed overlay files again; an interrupted one is made again. pip's
    own settings hold (PIP_INDEX_URL and the like).

    example:
      python setup_overlay.py env --torch 2.15.0
    """
    env.ensure(ROOT, args.torch, dry_run=args.dry_run)
    return 0


@command("--torch", "--dry-run")
def _verify(args: argparse.Namespace) -> int:
    """Train a small model with 4 processes against one.

    Makes or finds the environment, then runs examples/compare_gpt.py in it, which trains
    a small GPT on real text with 4 processes, FSDP2 and distributed Muon, and on one, and
    shows losses, differences, bytes sent and seconds. Other options go to it: --steps,
    --exact-steps, --processes, --out (default: out), --batch, --context, --width,
    --layers, --heads, --lr, --adamw-lr, --seed.

    example:
      python setup_overlay.py verify --steps 40 --out results
    """
    python = env.ensure(ROOT, args.torch, dry_run=args.dry_run)
    script = str(ROOT / "examples" / "compare_gpt.py")
    code = _run(python, ["-u", script, *args.extra], args)
    passed = "passed: training with distributed Muon agrees with one process"
    if not args.dry_run:
        print(
            f"verify {f'failed with exit code {code}' if code else passed}", flush=True
        )
    return code


@command("--torch", "--python", "--coverage", "--frameworks", "--dry-run")
def _test(args: argparse.Namespace) -> int:
    """Run the tests with the environment's pytest.

    Our own options come first; all other arguments go to pytest, and its exit code is
    passed on. Without arguments of pytest, all tests run under coverage, and too little
    coverage is a failure. --python: the optimizer's tests run on the torch of EXE, as on
    a machine with a GPU, with the overlay for the run alone. --frameworks: the tests of
    examples/frameworks run in an environment of their own.

    example:
      python setup_overlay.py test
      python setup_overlay.py test --torch 2.15.0 test/overlay -k revert
      python setup_overlay.py test --python ~/venv/bin/python
    """
    if args.dry_run:
        where = args.python or env.ensure(ROOT, args.torch, dry_run=True)
        return _run(Path(where), ["-m", "pytest", *args.pytest], args)
    if args.frameworks:
        return frameworks.test(ROOT, args.pytest)
    if args.python is not None:
        return tests.run_with(args.python, args.pytest, ROOT)
    python = env.ensure(ROOT, args.torch)
    measure = args.coverage or not args.pytest
    return tests.run(python, args.pytest, ROOT, measure=measure)


@command("--checkout", "--python", "--commit", "--force", "--dry-run", "--verbose")
def _apply(args: argparse.Namespace) -> int:
    """Apply the overlay to a checkout or an installed torch.

    A PyTorch git checkout gets the whole files and the hunks of patches/; with --commit
    also a commit for each layer of the overlay. An installed torch gets torch/ only. The
    command writes all files or none, and never a file with changes of yours. `revert`
    restores the stock files.

    example:
      python setup_overlay.py apply --checkout ~/pytorch --commit
      python setup_overlay.py apply --python ~/venv/bin/python
    """
    target = _target(args)
    with target.held():
        report = target.apply(
            ROOT, commit=args.commit, force=args.force, dry_run=args.dry_run
        )
    changed = _show_report(report, args)
    if changed and not args.dry_run:
        print(f"applied to {target.words}")
    elif not changed and not report.commits:
        print(f"{target.words} has the overlay already; nothing to do")
    return 0


@command(
    "--checkout", "--mode", "--python", "--copy", "--pth", "--no-reuse", "--dry-run"
)
def _rebuild(args: argparse.Namespace) -> int:
    """Make a checkout importable.

    source: upstream's editable build (python -m pip install --no-build-isolation -v -e .)
    by --python (default: python on PATH); USE_* variables are passed on. An existing
    build is used again if only Python files differ from it.
    wheel: takes the compiled parts from the torch of --python (default: the
    environment's) of the same version, so that `import torch` runs the checkout's Python
    files without a compiler. Libraries are hard links; `revert` removes them.

    example:
      python setup_overlay.py rebuild --checkout ~/pytorch --mode wheel
      USE_CUDA=0 python setup_overlay.py rebuild --checkout ~/pytorch --mode source
    """
    checkout = _checkout(args)
    foreign = {
        "source": ["--copy"] * args.copy + ["--pth"] * args.pth,
        "wheel": ["--no-reuse"] * args.no_reuse,
    }
    if args.mode not in foreign:
        raise WrongTarget("--mode is source or wheel")
    if foreign[args.mode]:
        raise WrongTarget(f"{foreign[args.mode][0]} goes with the other --mode")
    if args.dry_run:
        print(f"would rebuild {checkout.words} in mode {args.mode}")
        return 0
    with checkout.held():
        if args.mode == "source":
            rebuild.from_source(checkout.tree, args.python, reuse=not args.no_reuse)
            return 0
        wheel = find_wheel(args.python or env.existing_python(ROOT))
        with wheel.held():
            rebuild.from_wheel(checkout, wheel, copy=args.copy, pth=args.pth)
    return 0


@command("--checkout", "--python", "--json", "--verbose")
def _status(args: argparse.Namespace) -> int:
    """Say whether a target has the overlay, and which.

    Says of which commit the overlay is, which files differ from this repository's, and
    where the originals are kept. (Default: the environment, in no checkout.)

    example:
      python setup_overlay.py status --checkout ~/pytorch
    """
    found = _target(args, environment=True).status(ROOT)
    print(
        json.dumps(found, indent=1) if args.json else words(found, verbose=args.verbose)
    )
    return 0


@command("--checkout", "--python")
def _diff(args: argparse.Namespace) -> int:
    """Show what `apply` would change, as a patch.

    example:
      python setup_overlay.py diff --checkout ~/pytorch
    """
    plan = _target(args, environment=True).plan(ROOT)
    changes = plan.changes(plan.wanted)
    shown = git.difference({rel: plan.now[rel] for rel in changes}, changes)
    sys.stdout.buffer.write(shown)
    return 0


@command("--checkout", "--python", "--commit", "--dry-run", "--verbose")
def _revert(args: argparse.Namespace) -> int:
    """Restore the stock files.

    Restores what the overlay replaced and removes what it added, also the compiled parts
    of `rebuild --mode wheel`. Refuses if those files have changes of yours. If the overlay
    is committed, the work tree has the stock files afterwards; --commit commits that.

    example:
      python setup_overlay.py revert --checkout ~/pytorch
    """
    target = _target(args)
    with target.held():
        report = target.revert(ROOT, commit=args.commit, dry_run=args.dry_run)
    changed = _show_report(report, args)
    if report.uncommitted:
        where = shlex.quote(str(target.root))
        print(
            "the overlay is committed; its revert is in the work tree and not committed.\n"
            f"To commit it: setup_overlay.py revert --checkout {where} --commit"
        )
    elif not (changed or report.commits or report.parts):
        print(f"nothing to revert: {target.words} has no overlay")
    if changed and not args.dry_run:
        print(f"reverted {target.words}")
    return 0


@command("--checkout", "--dry-run")
def _pull(args: argparse.Namespace) -> int:
    """Take edits made in a checkout back into this repository.

    Merges edits of the overlay's files, and new files, into those here; edits of files
    that upstream owns become hunks in patches/. Refuses if the same lines were edited on
    both sides. `git diff` here then shows the result.

    example:
      python setup_overlay.py pull --checkout ~/pytorch
    """
    target = _checkout(args)
    with target.held(), files.held(ROOT):
        taken, missing = target.pull(ROOT, dry_run=args.dry_run)
    _show(taken, "would take" if args.dry_run else "took", verbose=True)
    for rel in missing:
        print(f"{rel} is missing there; delete it here, too, if you meant that")
    if taken and not args.dry_run:
        print(f"`git -C {shlex.quote(str(ROOT))} diff` shows the edits")
    elif not taken:
        print(f"nothing to take: {target.words} has no edits of the overlay")
    return 0


@command("--checkout", "--python", "--out", "--dry-run")
def _export(args: argparse.Namespace) -> int:
    """Write the overlay as a git am series.

    The mails fit the newest commit of the checkout without the overlay, which the command
    names, or a pristine tree of the torch of --python (default: the environment's).

    example:
      python setup_overlay.py export --checkout ~/pytorch --out series
      git -C ~/pytorch am $PWD/series/*.patch
    """
    target = _target(args, environment=True)
    out = Path(args.out).expanduser().resolve()
    with target.held():
        written, base = target.export(ROOT, out, dry_run=args.dry_run)
        notes = target.plan(ROOT).lacking
    print(*written, *notes, sep="\n")
    print(f"for {base}: git am {shlex.quote(str(out))}/*.patch")
    return 0


def _test_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse ``test`` by hand: argparse would take pytest's options for its own."""
    known = COMMANDS["test"][1]
    found: dict[str, Any] = {
        name: None if OPTIONS[name][0] else False for name in known
    }
    rest = list(argv)
    while rest and (name := rest[0].partition("=")[0]) in found:
        _, sign, value = rest.pop(0).partition("=")
        if OPTIONS[name][0] is None:
            if sign:
                raise WrongTarget(f"{name} takes no value")
            found[name] = True
            continue
        found[name] = value if sign else rest.pop(0) if rest else ""
        if not found[name].strip():
            raise WrongTarget(f"{name} needs a value")
    near = _nearest(rest[0], known) if rest else ""
    if near:
        raise WrongTarget(f"{rest[0]} is no option of pytest{near}")
    alone = [name for name in ("--python", "--frameworks") if found[name]]
    if alone and (len(alone) > 1 or found["--torch"] or found["--coverage"]):
        raise WrongTarget(f"{alone[0]} goes without --torch, --coverage and the like")
    named = {name[2:].replace("-", "_"): value for name, value in found.items()}
    return argparse.Namespace(do=_test, pytest=rest, **named)


def _arguments(argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["test"] and argv[1:2] not in (["-h"], ["--help"]):
        return _test_arguments(argv[1:])
    parser = _parser()
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        parser.error(f"no such command: {argv[0]}{_nearest(argv[0], COMMANDS)}")
    args, extra = parser.parse_known_args(argv)
    if args.version:
        supported = f"for torch {versions.supported_words()}"
        print(
            f"distributed Muon overlay {payload.name(ROOT) or '(no git)'}, {supported}"
        )
        parser.exit()
    if args.command is None:
        parser.error("a command is missing")
    if extra and args.command != "verify":
        args.sub.unknown(extra)
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
        code = args.do(args)
        sys.stdout.flush()
        return code
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
