"""A tree that the overlay is applied to: the plan, the one rule, and the status."""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import files, payload, versions
from .errors import Refused, WrongTarget


FOLDER = ".muon_overlay"  # below torch/: programs find stock Muon from torch.__file__


@dataclasses.dataclass
class Plan:
    """The text of each path of the overlay, in each role; None: no file."""

    source: payload.Source
    new: dict[str, bytes]  # with the overlay
    misfits: dict[str, str]  # why the patch of a path does not fit
    base: dict[str, bytes | None]  # without the overlay; no key: not known
    now: dict[str, bytes | None]
    edited: list[str]  # paths whose text has no known origin
    laid: files.Texts  # texts of the overlay that is there
    laid_name: str | None  # its commit in this repository

    @property
    def wanted(self) -> dict[str, bytes | None]:
        """With this repository's overlay; an older one's other paths are as in the base."""
        return {rel: self.base.get(rel) for rel in self.now} | self.new

    def changes(self, want: files.Texts) -> dict[str, bytes | None]:
        return {rel: text for rel, text in want.items() if text != self.now[rel]}


@dataclasses.dataclass
class Report:
    changes: files.Texts
    written: list[str]
    removed: list[str]
    warnings: list[str] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)  # what else was done


WORDS = {
    "none": "no overlay",
    "current": "the overlay, as in this repository",
    "outdated": "another overlay than this repository; `apply` (or `env`) updates it",
    "newer": "an overlay that came after this repository's commit; update this clone",
    "changed": "the overlay, with files changed or missing since",
    "uncommitted": "the overlay in the work tree only; `apply` commits it",
    "imported": "what its first commit has: nothing says what was there before",
    "upgraded": "the overlay of another torch",
    "gone": "files of the overlay, and no torch any more: `revert` removes them",
}


class Target:
    """A tree that has a ``torch`` package.

    A subclass has ``plan``, ``_apply``, ``_revert``, ``_finish`` (a killed command's work)
    and ``_check_edits`` (which refuses to lose a user's edits).
    """

    kind: str
    words: str  # its name in messages
    note = ""  # what a user may not expect of it
    instead = ""  # for a user who may not write there
    lock: Path  # the folder that one command at a time may hold
    option: tuple[str, str]  # how a command names it

    def __init__(self, root: Path, version: str | None) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version

    def command(self, name: str, *more: str) -> str:
        """A line that runs as printed."""
        return f"\n  {payload.COMMAND} {shlex.join([name, *self.option, *more])}"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work on it alone, after the work of a killed command is finished."""
        with files.held(self.lock):
            if self._finish():
                print("an earlier command was cut off half way")
            yield

    def apply(
        self,
        root: Path,
        *,
        force: bool = False,
        dry: bool = False,
    ) -> Report:
        plan = self.plan(root)
        payload.refuse_markers(plan.source)
        report = self._report(plan, plan.wanted)
        self._check_access(report.changes)
        report.warnings = self._check_apply(plan, root, report.changes, force)
        if not dry:
            self._apply(plan, report)
        return report

    def revert(self, root: Path, *, dry: bool = False) -> Report:
        plan = self.plan(root)
        report = self._report(plan, plan.base)
        if not dry:
            self._check_access(report.changes)
            self._revert(plan, report)
        return report

    def _report(self, plan: Plan, want: files.Texts) -> Report:
        changes = plan.changes(want)
        self._check_edits(plan, changes)
        removed = [rel for rel, text in changes.items() if text is None]
        written = [rel for rel in changes if rel not in removed]
        return Report(changes, written, removed)

    def _check_access(self, changes: files.Texts) -> None:
        for folder in {(self.root / rel).parent for rel in changes}:
            if folder.is_dir() and not os.access(folder, os.W_OK):
                text = f"{self.words}: this user may not write {folder}"
                raise WrongTarget(f"{text}{self.instead}")

    def _check_apply(
        self, plan: Plan, root: Path, changes: files.Texts, force: bool
    ) -> list[str]:
        """Raise if ``apply`` must not go on, unless ``force``; the warnings if it may."""
        version, source = self.version, plan.source
        if version is None:
            gone = f"{self.words}. This removes the overlay:"
            raise WrongTarget(gone + self.command("revert"))
        problems = list(plan.misfits.values())
        if not versions.supported(version):
            problems.insert(0, versions.untested(self.words, version, plan.base))
        anyway = self.command("apply", "--force")
        if problems and changes and not force:
            words = "\nThis goes on" + ", without that patch" * bool(plan.misfits)
            raise WrongTarget("\n".join(problems) + f"{words}:{anyway}")
        warnings = [*[self.note] * bool(self.note), *problems, *self._unknown(plan)]
        if not changes:
            return warnings
        if payload.is_newer(root, source.name, plan.laid_name):
            raise Refused(
                f"{self.words} has the overlay {plan.laid_name}. This repository is at "
                f"{source.name}, which is older. Update it, or revert first:"
                + self.command("revert")
            )
        own = [
            f"  {rel}\n"
            for rel in sorted(changes.keys() & source.whole.keys())
            if plan.now[rel] == plan.base[rel] is not None and rel not in versions.STOCK
        ]
        if own and not force:
            raise Refused(
                f"{self.words} has files of its own where the overlay adds some:\n"
                f"{''.join(own)}This replaces them, and `revert` restores them:{anyway}"
            )
        return warnings

    def _unknown(self, plan: Plan) -> list[str]:
        """Warnings about files that the overlay replaces with all their changes."""
        return [
            f"{rel} there is of no release that this overlay knows. The overlay replaces "
            "the whole file: make changes of it in this repository, too. `revert` restores it"
            for rel in sorted(plan.source.whole)
            if (text := plan.base.get(rel)) is not None
            and rel in plan.new
            and not versions.stock(rel, text)
        ]

    def status(self, root: Path) -> dict[str, Any]:
        plan = self._seen(root)
        by_path = {rel: word for rel in plan.now if (word := self._word(plan, rel))}
        differs = [r for r in by_path if plan.now[r] not in (None, plan.base.get(r))]
        # A user's own edits and files are no overlay.
        there = any(rel not in plan.edited for rel in differs)
        state, note = self._state(plan, there)
        others = {*by_path.values()} - {"current", "misfit"}
        if not (state or others):
            state = "current"
        elif not state and payload.is_newer(root, plan.source.name, plan.laid_name):
            state = "newer"
        elif not state:
            state = "outdated" if others == {"outdated"} else "changed"
        return {
            "target": str(self.root), "kind": self.kind, "torch": self.version,
            "state": state, "note": note,
            "overlay": plan.laid_name if there else None,
            "files": {} if state in ("none", "imported", "gone") else by_path,
            "warnings": self._unknown(plan) if there else [],
        }  # fmt: skip

    def _seen(self, root: Path) -> Plan:
        """The plan for what a user sees."""
        return self.plan(root)

    def _word(self, plan: Plan, rel: str) -> str:
        now, base, new = plan.now[rel], plan.base.get(rel), plan.new.get(rel)
        if rel in plan.misfits and now == base:
            return "misfit"  # its patch was left out
        if now == (base if new is None else new):
            return "current" if now != base else ""
        if now in (None, base):
            # An older overlay did not have it.
            word = "missing" if rel in plan.laid else "outdated"
            return word if new is not None else ""
        return "changed" if rel in plan.edited else "outdated"

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        """A state that the files do not tell (empty: they tell it), and a note on it."""
        return "" if there else "none", ""


def words(status: Mapping[str, Any]) -> str:
    lines = [f"{status['kind']} {status['target']}"]
    lines.append(f"torch {status['torch'] or 'uninstalled'}")
    lines.append(f"holds {WORDS[status['state']]}{status['note']}")
    if status["overlay"]:
        lines.append(f"overlay of commit {status['overlay']}")
    by_path = status["files"]
    lines += [
        f"  {by_path[r]:9} {r}" for r in sorted(by_path) if by_path[r] != "current"
    ]
    if current := list(by_path.values()).count("current"):
        lines.append(f"files as in this repository: {current}")
    lines += [f"warning: {warning}" for warning in status["warnings"]]
    return "\n".join(lines)
