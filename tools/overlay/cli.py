"""The commands, their arguments and their help."""

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
from typing import Any, NoReturn

from . import env, errors, files, frameworks, git, payload, rebuild, tests, versions
from .checkout import Checkout, find_checkout
from .errors import OverlayError, WrongTarget
from .repo import ROOT
from .target import Report, words
from .wheel import Wheel, find_wheel


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

FEW = 5

_RAW = argparse.RawDescriptionHelpFormatter


def _version() -> str:
    return (
        f"distributed Muon overlay {payload.name(ROOT) or '(no git)'}, "
        f"for torch {versions.supported_words()}"
    )


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(_version())
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviation, which a new option could change, and names the nearest one."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, formatter_class=_RAW, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(errors.WrongTarget.code, f"error: {message}\n")

    def unknown(self, extra: list[str]) -> NoReturn:
        options = [option for a in self._actions for option in a.option_strings]
        self.error(f"unknown arguments: {' '.join(extra)}{_nearest(extra[0], options)}")


def _nearest(word: str, known: Any) -> str:
    found = difflib.get_close_matches(word.partition("=")[0], known, 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def _given(text: str) -> str:
    if not text.strip():
        # An unset variable of a script; a path would be the current folder.
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("setup_overlay.py", description=ABOUT, epilog=CODES)
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the overlay's commit and exit",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, short: str, what: str, example: str) -> _Parser:
        epilog = f"example:\n{example}\n\n{CODES}"
        sub = commands.add_parser(name, help=short, description=what, epilog=epilog)
        sub.set_defaults(do=globals()[f"_{name}"], sub=sub)
        return sub

    sub = command(
        "env",
        "make the environment, or find it",
        f"Makes .venv next to setup_overlay.py with torch {versions.PINNED} (--torch: another\n"
        "version, in .venv-VERSION) and the packages that the tests import, and applies the\n"
        "overlay to it. A second run finds it and applies changed overlay files again. An\n"
        "interrupted one is made again. pip's own settings hold (PIP_INDEX_URL and the like);\n"
        f"it downloads {env.SIZE}.",
        "  python setup_overlay.py env\n  python setup_overlay.py env --torch 2.15.0",
    )
    _torch_option(sub)
    _dry_run_option(sub)

    sub = command(
        "verify",
        "train a small model with 4 processes against one",
        "Makes or finds the environment, then runs examples/compare_gpt.py in it, which trains\n"
        "a small GPT on real text with 4 processes, FSDP2 and distributed Muon, and on one,\n"
        "and shows losses, differences, bytes sent and seconds. Other options go to it:\n"
        "--steps, --exact-steps, --processes, --out (default: out), --batch, --context,\n"
        "--width, --layers, --heads, --lr, --adamw-lr, --seed.",
        "  python setup_overlay.py verify\n"
        "  python setup_overlay.py verify --steps 40 --out results",
    )
    _torch_option(sub)
    _dry_run_option(sub)

    sub = command(
        "test",
        "run the tests with the environment's pytest",
        "Makes or finds the environment, then runs its pytest. Our own options come first; all\n"
        "other arguments go to pytest, and its exit code is passed on. Without arguments of\n"
        "pytest, all tests run under coverage, and too little coverage is a failure. With\n"
        "--python, the optimizer's tests run on that interpreter's torch, as on a machine with\n"
        "a GPU. With --frameworks, the tests of examples/frameworks run in an environment of\n"
        "their own.",
        "  python setup_overlay.py test\n"
        "  python setup_overlay.py test test/overlay -k revert\n"
        "  python setup_overlay.py test --coverage test/distributed -m stage3\n"
        "  python setup_overlay.py test --torch 2.15.0 -x\n"
        "  python setup_overlay.py test --python ~/venv/bin/python\n"
        "  python setup_overlay.py test --frameworks -k lightning",
    )
    _torch_option(sub)
    sub.add_argument(
        "--python",
        metavar="EXE",
        help="apply the overlay to the torch of EXE for the run alone",
    )
    sub.add_argument(
        "--coverage", action="store_true",
        help="show how much of the optimizer the given tests execute",
    )  # fmt: skip
    sub.add_argument(
        "--frameworks", action="store_true",
        help=f"with {', '.join(frameworks.VERSIONS)}, in {frameworks.FOLDER}",
    )  # fmt: skip
    _dry_run_option(sub)
    sub.add_argument("pytest", nargs="*", help="arguments of pytest")

    sub = command(
        "apply",
        "apply the overlay to a checkout or an installed torch",
        "A PyTorch git checkout gets the whole files and the hunks of patches/; with --commit\n"
        "also a commit for each layer of the overlay. An installed torch gets torch/ only.\n"
        "The command writes all files or none, and never a file with changes of yours.\n"
        "`revert` restores the stock files: from git, or from copies that are verified.",
        "  python setup_overlay.py apply --checkout ~/pytorch --commit\n"
        "  python setup_overlay.py apply --python ~/venv/bin/python",
    )
    _target_options(sub)
    sub.add_argument("--commit", action="store_true", help="commit it in the checkout")
    sub.add_argument(
        "--force", action="store_true", help="go on with a torch that is not supported"
    )
    _dry_run_option(sub)
    _verbose_option(sub)

    sub = command(
        "rebuild",
        "make a checkout importable",
        "source: upstream's editable build (python -m pip install --no-build-isolation\n"
        "-v -e .); USE_* variables are passed on. An existing build is used again if only\n"
        "Python files differ from it.\n"
        "wheel: takes the compiled parts from an installed torch of the same version, so\n"
        "that `import torch` runs the checkout's Python files without a compiler. Libraries\n"
        "are hard links where possible; git status stays clean; `revert` removes them.",
        "  python setup_overlay.py rebuild --checkout ~/pytorch --mode wheel\n"
        "  USE_CUDA=0 python setup_overlay.py rebuild --checkout ~/pytorch --mode source",
    )
    _checkout_option(sub)
    sub.add_argument("--mode", required=True, choices=["source", "wheel"])
    sub.add_argument(
        "--python", type=_given, metavar="EXE",
        help="wheel: the interpreter whose torch is taken (default: the environment's); "
        "source: the one that builds (default: python on PATH)",
    )  # fmt: skip
    sub.add_argument("--copy", action="store_true", help="wheel: copy, do not link")
    sub.add_argument(
        "--pth", action="store_true",
        help="wheel: have EXE import the checkout without PYTHONPATH, too",
    )  # fmt: skip
    sub.add_argument(
        "--no-reuse", action="store_true", help="source: build even if a build would do"
    )
    _dry_run_option(sub)

    sub = command(
        "status",
        "say whether a target has the overlay, and which",
        "Says whether the target (default: the current folder if it is a checkout, else the\n"
        "environment) has the overlay, of which commit, which files differ from this\n"
        "repository's, and where the originals are kept.",
        "  python setup_overlay.py status --checkout ~/pytorch\n"
        "  python setup_overlay.py status --json",
    )
    _target_options(sub)
    sub.add_argument("--json", action="store_true", help="for programs")
    _verbose_option(sub)

    sub = command(
        "diff",
        "show what `apply` would change, as a patch",
        "Shows the patch from the target's files (default: as for `status`) to the overlay's.",
        "  python setup_overlay.py diff --checkout ~/pytorch",
    )
    _target_options(sub)

    sub = command(
        "revert",
        "restore the stock files",
        "Restores what the overlay replaced and removes what it added, also the compiled\n"
        "parts of `rebuild --mode wheel`. Refuses if those files have changes of yours. If\n"
        "the overlay is committed, the work tree has the stock files afterwards; --commit\n"
        "commits that.",
        "  python setup_overlay.py revert --checkout ~/pytorch",
    )
    _target_options(sub)
    sub.add_argument("--commit", action="store_true", help="commit it in the checkout")
    _dry_run_option(sub)
    _verbose_option(sub)

    sub = command(
        "pull",
        "take edits made in a checkout back into this repository",
        "Merges edits of the overlay's files, and new files, into those here; edits of files\n"
        "that upstream owns become hunks in patches/. Refuses if the same lines were edited on\n"
        "both sides. `git diff` here then shows the result.",
        "  python setup_overlay.py pull --checkout ~/pytorch",
    )
    _checkout_option(sub)
    _dry_run_option(sub)

    sub = command(
        "export",
        "write the overlay as a git am series",
        "Writes mails for `git am`. They fit the newest commit of the checkout without the\n"
        "overlay, which the command names, or a pristine tree of the installed torch's version\n"
        "(default: as for `status`).",
        "  python setup_overlay.py export --checkout ~/pytorch --out series\n"
        "  git -C ~/pytorch am $PWD/series/*.patch",
    )
    _target_options(sub)
    sub.add_argument(
        "--out",
        type=_given,
        required=True,
        metavar="DIR",
        help="the folder of the mails",
    )
    _dry_run_option(sub)
    return parser


def _torch_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--torch", type=_given, metavar="VERSION",
        help=f"{versions.supported_words()} (default: {versions.PINNED})",
    )  # fmt: skip


def _verbose_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--verbose", action="store_true", help="name every file")


def _dry_run_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--dry-run", action="store_true", help="say what would be done, write nothing"
    )


def _checkout_option(to: Any) -> None:
    what = "a PyTorch git checkout (default: the current folder, if it is one)"
    to.add_argument("--checkout", type=_given, metavar="DIR", help=what)


def _target_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_mutually_exclusive_group()
    _checkout_option(group)
    group.add_argument(
        "--python", type=_given, metavar="EXE",
        help="an interpreter that has torch, or its environment's folder",
    )  # fmt: skip


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
    if args.python is not None:
        return find_wheel(args.python)
    where = args.checkout or _here()
    if where is not None:
        return find_checkout(where)
    if environment:
        return find_wheel(env.existing_python(ROOT))
    raise WrongTarget("name the target: --checkout DIR or --python EXE")


def _show(rels: list[str], done: str, *, verbose: bool) -> None:
    """A few files are named, more are counted."""
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
    would = "would have " if args.dry_run else ""
    _show(report.written, f"{would}written" if would else "wrote", verbose=args.verbose)
    _show(report.removed, f"{would}removed", verbose=args.verbose)
    if report.parts:
        print(f"removed {report.parts} compiled parts that a wheel had lent")
    if report.commits:
        short = [commit[:12] for commit in report.commits]
        print(f"committed as {' '.join(short)}")
    return changed


def _env(args: argparse.Namespace) -> int:
    env.ensure(ROOT, args.torch, dry_run=args.dry_run)
    return 0


def _run(python: Path, command: list[str], args: argparse.Namespace) -> int:
    if args.dry_run:
        print(f"would run {shlex.join([str(python), *command])}")
        return 0
    return env.run_in(python, command, Path.cwd(), timeout=None)


def _verify(args: argparse.Namespace) -> int:
    python = env.ensure(ROOT, args.torch, dry_run=args.dry_run)
    command = ["-u", str(ROOT / "examples" / "compare_gpt.py"), *args.extra]
    code = _run(python, command, args)
    if not args.dry_run:
        passed = "passed: training with distributed Muon agrees with one process"
        print(
            f"verify {passed if code == 0 else f'failed with exit code {code}'}",
            flush=True,
        )
    return code


def _test(args: argparse.Namespace) -> int:
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


def _apply(args: argparse.Namespace) -> int:
    target = _target(args)
    with target.held():
        if isinstance(target, Checkout):
            report = target.apply(
                ROOT, commit=args.commit, force=args.force, dry_run=args.dry_run
            )
        elif args.commit:
            raise WrongTarget("--commit goes with --checkout")
        else:
            report = target.apply(ROOT, force=args.force, dry_run=args.dry_run)
    changed = _show_report(report, args)
    if changed and not args.dry_run:
        print(f"applied to {target.words}")
    elif not changed and not report.commits:
        print(f"{target.words} has the overlay already; nothing to do")
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    checkout = _checkout(args)
    if args.mode == "source" and (args.copy or args.pth):
        raise WrongTarget("--copy and --pth go with --mode wheel")
    if args.mode == "wheel" and args.no_reuse:
        raise WrongTarget("--no-reuse goes with --mode source")
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


def _status(args: argparse.Namespace) -> int:
    found = _target(args, environment=True).status(ROOT)
    if args.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(words(found, verbose=args.verbose))
    return 0


def _diff(args: argparse.Namespace) -> int:
    plan = _target(args, environment=True).plan(ROOT)
    changes = plan.changes(plan.wanted)
    shown = git.difference({rel: plan.now[rel] for rel in changes}, changes)
    sys.stdout.buffer.write(shown)
    return 0


def _revert(args: argparse.Namespace) -> int:
    target = _target(args)
    if args.commit and isinstance(target, Wheel):
        raise WrongTarget("--commit goes with --checkout")
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


def _pull(args: argparse.Namespace) -> int:
    target = _checkout(args)
    with target.held(), files.held(ROOT):
        taken, missing = target.pull(ROOT, dry_run=args.dry_run)
    _show(taken, "would have taken" if args.dry_run else "took", verbose=True)
    for rel in missing:
        print(f"{rel} is missing there; delete it here, too, if you meant that")
    if taken and not args.dry_run:
        print(f"`git -C {shlex.quote(str(ROOT))} diff` shows the edits")
    elif not taken:
        print(f"nothing to take: {target.words} has no edits of the overlay")
    return 0


def _export(args: argparse.Namespace) -> int:
    target = _target(args, environment=True)
    out = Path(args.out).expanduser().resolve()
    with target.held():
        written, base = target.export(ROOT, out, dry_run=args.dry_run)
    for path in written:
        print(path)
    for line in target.plan(ROOT).lacking:
        print(f"{line}: {target.words} has none")
    print(f"for {base}: git am {shlex.quote(str(out))}/*.patch")
    return 0


def _test_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse ``test`` by hand: argparse would take pytest's options for its own."""
    flags = {"--coverage": False, "--frameworks": False, "--dry-run": False}
    values: dict[str, str | None] = {"--torch": None, "--python": None}
    rest = list(argv)
    while rest and (name := rest[0].partition("=")[0]) in flags | values:
        _, sign, value = rest.pop(0).partition("=")
        if name in flags:
            if sign:
                raise WrongTarget(f"{name} takes no value")
            flags[name] = True
            continue
        value = value if sign else rest.pop(0) if rest else ""
        if not value.strip():
            raise WrongTarget(f"{name} needs a value")
        values[name] = value
    near = _nearest(rest[0], [*flags, *values]) if rest else ""
    if near:
        raise WrongTarget(f"{rest[0]} is no option of pytest{near}")
    found = {
        name[2:].replace("-", "_"): value for name, value in (flags | values).items()
    }
    alone = [n for n in ("--python", "--frameworks") if (flags | values)[n]]
    if alone and (len(alone) > 1 or values["--torch"] or flags["--coverage"]):
        raise WrongTarget(f"{alone[0]} goes without --torch, --coverage and the like")
    return argparse.Namespace(do=_test, pytest=rest, **found)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    # A `timeout` around this command then also ends what it started, and a
    # half-done write is undone.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if argv[:1] == ["test"] and argv[1:2] not in (["-h"], ["--help"]):
            args = _test_arguments(argv[1:])
        else:
            parser = _parser()
            (commands,) = (a for a in parser._actions if a.dest == "command")
            if argv and argv[0] not in commands.choices and not argv[0].startswith("-"):
                near = _nearest(argv[0], commands.choices)
                parser.error(f"no such command: {argv[0]}{near}")
            args, extra = parser.parse_known_args(argv)
            if extra and args.command != "verify":
                args.sub.unknown(extra)
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
        # The reader is gone; the flush at exit would raise this again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.FAILED
    except OSError as error:
        # A full disk, a missing permission: the words are in the error.
        name = f"{error.filename}: " if error.filename else ""
        print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        return errors.FAILED
