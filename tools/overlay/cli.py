"""The commands, their arguments and their help."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from . import apply, env, errors, export, frameworks, lock, pull, rebuild, revert
from . import status, tests, versions
from .errors import OverlayError, WrongTarget
from .repo import ROOT
from .target import Target, Wheel, find_checkout, find_wheel


CODES = """\
exit codes:
  0  done (also: nothing had to be done)
  1  the work failed: a test, a build, an installation, a write
  2  wrong usage, or a target that is not what it must be
  3  refused, because something that is not ours would be lost
  130  interrupted by Ctrl-C
  143  ended by SIGTERM
"""

ABOUT = f"""\
Distributed training for torch.optim.Muon, as an overlay over PyTorch
{versions.supported_words()}: makes an environment with it, tries it, and lays it over
a PyTorch checkout or an installed torch.

start here:
  python setup_overlay.py verify                     train with it, see that it holds
  python setup_overlay.py test                       run all tests
  python setup_overlay.py apply --checkout ~/pytorch put it into a PyTorch work tree
"""

FEW = 5

_RAW = argparse.RawDescriptionHelpFormatter


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "setup_overlay.py", description=ABOUT, epilog=CODES, formatter_class=_RAW
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str, short: str, what: str, example: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=short,
            description=what,
            epilog=f"example:\n{example}\n\n{CODES}",
            formatter_class=_RAW,
            **more,
        )
        sub.set_defaults(do=globals()[f"_{name}"], wrong=sub.error)
        return sub

    sub = command(
        "env",
        "make the environment, or find it",
        "Makes .venv beside setup_overlay.py with torch "
        f"{versions.PINNED} (--torch: another\nversion, in .venv-VERSION) and what the "
        "tests import, and lays the overlay over it.\nA second run finds it; changed "
        "overlay files are applied again; one that was\ninterrupted is made again. pip "
        "takes its own settings (PIP_INDEX_URL and the like).",
        "  python setup_overlay.py env\n  python setup_overlay.py env --torch 2.15.0",
    )
    _torch_option(sub)

    sub = command(
        "verify",
        "train a small model with 4 processes against one",
        "Makes sure of the environment, then runs examples/compare_gpt.py in it: that trains\n"
        "a small GPT on real text with 4 processes, FSDP2 and distributed Muon, and on one,\n"
        "and shows losses, differences, bytes sent and seconds. Other options go to it:\n"
        "--steps, --exact-steps, --processes, --out (default: out), --batch, --context,\n"
        "--width, --layers, --heads, --lr, --adamw-lr, --seed.",
        "  python setup_overlay.py verify\n"
        "  python setup_overlay.py verify --steps 40 --out results",
        # What is left over goes on, so an abbreviation could be one of either side's.
        allow_abbrev=False,
    )
    _torch_option(sub)

    sub = command(
        "test",
        "run the tests with the environment's pytest",
        "Makes sure of the environment, then runs its pytest. Everything after `test` (and\n"
        "after our own options, which come first) goes to pytest as it is; its exit code is\n"
        "passed on. Without arguments of pytest all tests run, under coverage: too little of\n"
        "it is a failure, too. With --python the tests of the optimizer run on that\n"
        "interpreter's torch, as on a machine with a GPU. After --frameworks the recipes of\n"
        "examples/frameworks are tested, in an environment of their own.",
        "  python setup_overlay.py test\n"
        "  python setup_overlay.py test test/overlay -k revert\n"
        "  python setup_overlay.py test --coverage test/distributed -m stage3\n"
        "  python setup_overlay.py test --torch 2.15.0 -x\n"
        "  python setup_overlay.py test --python ~/venv/bin/python\n"
        "  python setup_overlay.py test --frameworks -k lightning",
    )
    _torch_option(sub)
    sub.add_argument(
        "--python", metavar="EXE",
        help="test the torch of EXE, to which the overlay is applied for the run alone",
    )  # fmt: skip
    sub.add_argument(
        "--coverage", action="store_true",
        help="show how much of the optimizer the given tests execute",
    )  # fmt: skip
    sub.add_argument(
        "--frameworks", action="store_true",
        help=f"with {', '.join(frameworks.VERSIONS)}, in {frameworks.FOLDER}",
    )  # fmt: skip
    sub.add_argument("pytest", nargs="*", help="arguments of pytest")

    sub = command(
        "apply",
        "lay the overlay over a checkout or an installed torch",
        "Onto a PyTorch git checkout: puts in the hunks of patches/ with git and the whole\n"
        "files as they are. Onto an installed torch: its torch/ only, the tests stay here.\n"
        "All or nothing, and never over somebody's changes. What stood there comes back by\n"
        "`revert`: from git, or from the copies in an installed torch's .muon_overlay. With\n"
        "--force it goes on where the version is not supported, upstream's main for one.",
        "  python setup_overlay.py apply --checkout ~/pytorch --commit\n"
        "  python setup_overlay.py apply --python ~/venv/bin/python",
    )
    _target_options(sub, required=True)
    sub.add_argument("--commit", action="store_true", help="commit it in the checkout")
    sub.add_argument(
        "--force", action="store_true", help="go on with a torch that is not supported"
    )
    _verbose_option(sub)

    sub = command(
        "rebuild",
        "make a checkout importable",
        "source: upstream's editable build (python -m pip install --no-build-isolation\n"
        "-v -e .); USE_* variables are passed on. An existing build is used again if only\n"
        "Python files differ from it.\n"
        "wheel: takes the compiled parts from an installed torch of the same version, so\n"
        "that `import torch` runs the checkout's Python files without a compiler. Hard\n"
        "links where possible; git status stays clean; `revert` takes them out.",
        "  python setup_overlay.py rebuild --checkout ~/pytorch --mode wheel\n"
        "  USE_CUDA=0 python setup_overlay.py rebuild --checkout ~/pytorch --mode source",
    )
    sub.add_argument("--checkout", required=True, metavar="DIR", help="the checkout")
    sub.add_argument("--mode", required=True, choices=["source", "wheel"])
    sub.add_argument(
        "--python", metavar="EXE",
        help="wheel: whose torch is taken (default: the environment's); source: who "
        "builds (default: python on PATH)",
    )  # fmt: skip
    sub.add_argument("--copy", action="store_true", help="wheel: copy, do not link")
    sub.add_argument(
        "--pth", action="store_true",
        help="wheel: make EXE import the checkout without PYTHONPATH, too",
    )  # fmt: skip
    sub.add_argument("--force", action="store_true", help="source: build in any case")

    sub = command(
        "status",
        "say what a target holds of the overlay",
        "Says whether the target (default: the environment) holds the overlay, which files\n"
        "differ from this repository's, and where the originals are kept.",
        "  python setup_overlay.py status --checkout ~/pytorch\n"
        "  python setup_overlay.py status --json",
    )
    _target_options(sub, required=False)
    sub.add_argument("--json", action="store_true", help="for programs")
    _verbose_option(sub)

    sub = command(
        "revert",
        "put back what was there before",
        "Restores what the overlay replaced and removes what it added, the compiled parts\n"
        "of `rebuild --mode wheel` too. Refuses if somebody changed those files since, or if\n"
        "what is kept came with another version. Where the overlay is committed, the undoing\n"
        "is left in the work tree; --commit commits it.",
        "  python setup_overlay.py revert --checkout ~/pytorch",
    )
    _target_options(sub, required=False)
    sub.add_argument(
        "--commit", action="store_true", help="commit the undoing in the checkout"
    )
    _verbose_option(sub)

    sub = command(
        "pull",
        "take edits made in a checkout back into this repository",
        "Files of the overlay that were edited or added in the checkout replace those here,\n"
        "and edits of files that upstream owns become hunks in patches/. Refuses where both\n"
        "sides were edited. `git diff` here then shows what came.",
        "  python setup_overlay.py pull --checkout ~/pytorch",
    )
    sub.add_argument("--checkout", required=True, metavar="DIR", help="the checkout")

    sub = command(
        "export",
        "write the overlay as a git am series",
        "Writes mails for `git am`, onto the newest commit of the checkout that does not have\n"
        "the overlay, which it names, or onto a pristine tree of the installed torch's version\n"
        "(default: the environment's).",
        "  python setup_overlay.py export --out series\n"
        "  git -C ~/pytorch am $PWD/series/*.patch",
    )
    _target_options(sub, required=False)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to")
    return parser


def _torch_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--torch", metavar="VERSION",
        help=f"{versions.supported_words()} (default: {versions.PINNED})",
    )  # fmt: skip


def _verbose_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--verbose", action="store_true", help="name every file")


def _target_options(sub: argparse.ArgumentParser, *, required: bool) -> None:
    group = sub.add_mutually_exclusive_group(required=required)
    group.add_argument("--checkout", metavar="DIR", help="a PyTorch git checkout")
    group.add_argument(
        "--python", metavar="EXE",
        help="an interpreter that has torch, or its environment's folder",
    )  # fmt: skip


def _target(args: argparse.Namespace) -> Target:
    if args.checkout is not None:
        return find_checkout(args.checkout)
    return find_wheel(_python(args))


def _python(args: argparse.Namespace) -> str | Path:
    return env.existing_python(ROOT) if args.python is None else args.python


def _show(rels: list[str], done: str, *, verbose: bool) -> None:
    """A few files are named, more are counted."""
    if verbose or len(rels) <= FEW:
        for rel in rels:
            print(f"{done} {rel}")
        return
    folders = Counter(rel.split("/")[0] for rel in rels)
    where = ", ".join(f"{number} in {name}/" for name, number in folders.items())
    print(f"{done} {len(rels)} files: {where}")


def _env(args: argparse.Namespace) -> int:
    env.ensure(ROOT, args.torch)
    return 0


def _verify(args: argparse.Namespace) -> int:
    python = env.ensure(ROOT, args.torch)
    command = ["-u", str(ROOT / "examples" / "compare_gpt.py"), *args.extra]
    return env.run_in(python, command, Path.cwd(), timeout=None)


def _test(args: argparse.Namespace) -> int:
    if args.python is not None:
        if args.torch or args.coverage:
            raise WrongTarget("--python goes without --torch and --coverage")
        return tests.run_with(args.python, args.pytest, ROOT)
    python = env.ensure(ROOT, args.torch)
    measure = args.coverage or not args.pytest
    return tests.run(python, args.pytest, ROOT, measure=measure)


def _test_frameworks(args: argparse.Namespace) -> int:
    return frameworks.test(ROOT, args.pytest)


def _apply(args: argparse.Namespace) -> int:
    if args.commit and not args.checkout:
        raise WrongTarget("--commit goes with --checkout")
    target = _target(args)
    with target.held():
        report = apply.apply(target, ROOT, commit=args.commit, force=args.force)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if report.changed or report.removed or args.verbose:
        for line in report.skipped:
            print(line)
    _show(report.changed, "wrote", verbose=args.verbose)
    _show(report.removed, "took back", verbose=args.verbose)
    if report.commit:
        print(f"committed as {report.commit[:12]}")
    elif not report.changed and not report.removed:
        print(f"{target.words} has the overlay already; nothing to do")
    if report.changed or report.removed:
        print(f"applied to {target.words}")
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    target = find_checkout(args.checkout)
    if args.mode == "source" and (args.copy or args.pth):
        raise WrongTarget("--copy and --pth go with --mode wheel")
    if args.mode == "wheel" and args.force:
        raise WrongTarget("--force goes with --mode source")
    with target.held():
        if args.mode == "source":
            rebuild.from_source(target, args.python, force=args.force)
            return 0
        wheel = find_wheel(_python(args))
        with wheel.held():
            rebuild.from_wheel(target, wheel, copy=args.copy, pth=args.pth)
    return 0


def _status(args: argparse.Namespace) -> int:
    found = status.status(_target(args), ROOT)
    if args.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(status.words(found, verbose=args.verbose))
    return 0


def _revert(args: argparse.Namespace) -> int:
    if args.commit and not args.checkout:
        raise WrongTarget("--commit goes with --checkout")
    target = _target(args)
    with target.held():
        report = revert.revert(target, commit=args.commit)
    if report is None:
        print(f"nothing to revert: {target.words} has no overlay")
        return 0
    _show(report.restored, "restored", verbose=args.verbose)
    _show(report.removed, "removed", verbose=args.verbose)
    if isinstance(target, Wheel):
        _show(report.left, f"left as torch {target.version} has it:", verbose=True)
    if report.parts:
        print(f"removed {report.parts} compiled parts that a wheel had lent")
    if report.stays:
        print(report.stays)
        return 0
    if report.commit:
        print(f"committed as {report.commit[:12]}")
    elif report.committed_before:
        where = shlex.quote(str(target.root))
        print(
            "the overlay is committed; its undoing is in the work tree and not committed.\n"
            f"To commit it: setup_overlay.py revert --checkout {where} --commit\n"
            "Without these changes in the work tree git can do both:\n"
            f"  git -C {where} revert {' '.join(report.committed_before)}"
        )
    print(f"reverted {target.words}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    target = find_checkout(args.checkout)
    with target.held(), lock.held(ROOT):
        report = pull.pull(target, ROOT)
    _show(report.taken, "took", verbose=True)
    for rel in report.missing:
        print(f"{rel} is not there any more; delete it here, too, if that is meant")
    if report.taken:
        print(f"`git -C {shlex.quote(str(ROOT))} diff` shows what came")
    else:
        print(f"nothing to take: {target.words} has no edits of the overlay")
    return 0


def _export(args: argparse.Namespace) -> int:
    target = _target(args)
    with target.held():
        report = export.export(target, ROOT, args.out.expanduser().resolve())
    for path in report.written:
        print(path)
    for line in report.skipped:
        print(line)
    out = shlex.quote(str(args.out.expanduser()))
    print(f"for {report.base}: git am {out}/*.patch")
    return 0


def _test_arguments(argv: list[str]) -> argparse.Namespace:
    """``test`` by hand: argparse would take pytest's options for its own."""
    if argv[:1] == ["--frameworks"]:
        return argparse.Namespace(do=_test_frameworks, pytest=argv[1:])
    found: dict[str, Any] = {"--torch": None, "--python": None, "--coverage": False}
    rest = list(argv)
    while rest and rest[0].partition("=")[0] in found:
        name, sign, value = rest.pop(0).partition("=")
        if name == "--coverage":
            if sign:
                raise WrongTarget("--coverage takes no value")
            found[name] = True
        elif sign or rest:
            found[name] = value if sign else rest.pop(0)
        else:
            raise WrongTarget(f"{name} needs a value")
    named = {name.removeprefix("--"): value for name, value in found.items()}
    return argparse.Namespace(do=_test, pytest=rest, **named)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    # So that a `timeout` around this command ends what it started, and a
    # half-done write is put back.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if argv[:1] == ["test"] and argv[1:2] not in (["-h"], ["--help"]):
            args = _test_arguments(argv[1:])
        else:
            parser = _parser()
            args, extra = parser.parse_known_args(argv)
            if extra and args.command != "verify":
                args.wrong(f"unknown arguments: {' '.join(extra)}")
            args.extra = extra
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
        # Nobody reads on; the flush at the end would say so again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.FAILED
    except OSError as error:
        # A full disk, a missing permission: the words are in the error.
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        return errors.FAILED
