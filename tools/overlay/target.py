"""A tree that the overlay is applied to: the plan, the one rule, and the status."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import files, git, payload, stock, versions
from .errors import Refused, WrongTarget
from .payload import sha256, unix


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .patches import Layer
    from .payload import Source

    Texts = Mapping[str, bytes | None]

FOLDER = ".muon_overlay"  # below torch/: programs find stock Muon from torch.__file__


@dataclasses.dataclass
class Plan:
    """The text of each path of the overlay, in each role; None: no file."""

    source: Source
    layers: list[Layer]
    lacking: list[str]  # hunks of files that the target lacks, in words
    misfits: list[str]  # patches that do not fit, in words
    base: dict[str, bytes | None]  # without the overlay; no key: not known
    now: dict[str, bytes | None]
    ours: dict[str, set[str | None]]  # hashes of the texts that an overlay wrote there
    laid: dict[str, str | None]  # hashes of the overlay that is there
    laid_name: str | None = None  # its commit in this repository
    staged: dict[str, bytes | None] = dataclasses.field(default_factory=dict)

    @property
    def new(self) -> dict[str, bytes]:
        return {rel: t for layer in self.layers for rel, t in layer.texts.items()}

    @property
    def wanted(self) -> dict[str, bytes | None]:
        """With this repository's overlay; an older one's other paths are as in the base."""
        return {rel: self.base.get(rel) for rel in self.now} | self.new

    def changes(self, want: Texts) -> dict[str, bytes | None]:
        return {rel: t for rel, t in want.items() if self.now[rel] != t}


@dataclasses.dataclass
class Report:
    written: list[str] = dataclasses.field(default_factory=list)
    removed: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    commits: list[str] = dataclasses.field(default_factory=list)
    parts: int = 0  # compiled parts that were removed
    uncommitted: bool = False  # the branch has the overlay, its revert is not committed


WORDS = {
    "none": "no overlay",
    "current": "the overlay, as in this repository",
    "outdated": "another overlay than this repository; `apply` (or `env`) updates it",
    "newer": "an overlay that came after this repository's commit; update this clone",
    "changed": "the overlay, with files changed or missing since",
    "interrupted": "a part of a command that was cut off; the next command finishes it",
    "reverted": "the overlay in git only: the work tree has it reverted, not committed",
    "upgraded": "the overlay of another torch",
    "gone": "files of the overlay, and no torch any more: `revert` removes them",
    "unknown": "the overlay in git, on a base that is not known",
}


class Target:
    """A tree that has a ``torch`` package.

    A subclass has ``plan``, ``_apply``, ``_revert``, ``interrupted`` (whether a killed
    command left work) and ``way_out`` (how a user keeps or drops edits, in words).
    """

    kind: str
    words: str  # its name in messages
    lock: Path  # the folder that one command at a time may hold

    def __init__(self, root: Path, version: str | None) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version
        self.copies = self.torch_dir / FOLDER / "original"

    def takes(self, rel: str) -> bool:
        """Whether the overlay has this file for the target: tests are for checkouts."""
        return self.kind == "checkout" or rel.startswith("torch/")

    def read(self, rel: str) -> bytes | None:
        path = self.root / rel
        return unix(path.read_bytes()) if path.is_file() else None

    @property
    def sibling(self) -> Path:
        """The file whose mode and owner new files get."""
        path = self.torch_dir / "__init__.py"
        return path if path.is_file() else self.torch_dir

    def copy_of(self, rel: str) -> Path:
        """Where a copy of the stock file lies."""
        return self.copies / rel.removeprefix("torch/")

    def write(self, changes: Texts) -> None:
        """Write all files or none, with the line ends that each has there."""
        places: dict[Path, bytes | None] = {}
        for rel, text in changes.items():
            path = self.root / rel
            if text and path.is_file() and b"\r\n" in path.read_bytes():
                text = text.replace(b"\n", b"\r\n")
            places[path] = text
        files.replace(places, self.sibling, self.root)

    def apply(
        self,
        root: Path,
        *,
        commit: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ) -> Report:
        plan = self.plan(root)
        report = Report(warnings=self._check_apply(plan, root, force))
        report.notes = [f"{note}: {self.words} has none" for note in plan.lacking]
        return self._carry_out(plan, plan.wanted, report, self._apply, commit, dry_run)

    def revert(
        self, root: Path, *, commit: bool = False, dry_run: bool = False
    ) -> Report:
        plan = self.plan(root)
        self._check_edits(plan, root, "the overlay wrote")
        self._check_base(plan)
        return self._carry_out(plan, plan.base, Report(), self._revert, commit, dry_run)

    def _carry_out(
        self,
        plan: Plan,
        want: Texts,
        report: Report,
        do: Callable,
        commit: bool,
        dry_run: bool,
    ) -> Report:
        if commit and self.kind == "wheel":
            raise WrongTarget("--commit goes with --checkout")
        changes = plan.changes(want)
        report.written = [rel for rel, text in changes.items() if text is not None]
        report.removed = [rel for rel, text in changes.items() if text is None]
        if not dry_run:
            do(plan, changes, report, commit)
        return report

    def _check_base(self, plan: Plan) -> None:
        """Raise if a text of the base is not known. git knows all of a checkout's."""

    def _check_edits(self, plan: Plan, root: Path, doing: str) -> None:
        """The one rule: a path whose text is of no known origin is not written.

        Known are the base, every overlay that was applied there, and this repository.
        """
        new = plan.new
        lost: dict[str, set[bytes]] = {}
        for rel, now in plan.now.items():
            for text in (now, plan.staged.get(rel, now)):
                stock_or_new = text in (plan.base.get(rel), new.get(rel))
                if not (stock_or_new or sha256(text) in plan.ours[rel]):
                    lost.setdefault(rel, set()).add(text or b"")
        old = git.known(root, {t for found in lost.values() for t in found if t})
        edited = [rel for rel, found in lost.items() if not found <= old]
        if edited:
            raise Refused(
                f"{self.words} has other changes in files that {doing}:\n"
                + "".join(f"  {rel}\n" for rel in edited)
                + f"{self.way_out(plan, edited)}\nNothing was touched."
            )

    def _check_apply(self, plan: Plan, root: Path, force: bool) -> list[str]:
        """Raise if ``apply`` must not go on; the warnings if it may."""
        self._check_edits(plan, root, "the overlay writes")
        self._check_base(plan)
        if self.version is None:
            raise WrongTarget(f"{self.words}: `revert` removes the overlay")
        warnings, changes = [], plan.changes(plan.wanted)
        if not versions.supported(self.version or ""):
            said = stock.untested(self.words, self.version or "", plan.base)
            if not force:
                raise WrongTarget(
                    f"{said}\n`apply --force` goes on. Nothing was touched."
                )
            warnings += [said, *plan.misfits] if changes else []
        elif plan.misfits:
            raise WrongTarget(f"{plan.misfits[0]}. Nothing was touched.")
        if changes and payload.is_newer(root, plan.source.name, plan.laid_name):
            raise Refused(
                f"{self.words} has the overlay of commit {plan.laid_name}, and this "
                f"repository is at {plan.source.name}, which is older. Update this clone "
                "(git pull), or `revert` first. Nothing was touched."
            )
        for rel in changes.keys() & plan.source.whole.keys():
            now = plan.now[rel]
            if now is not None and now == plan.base[rel] and not stock.known(rel, now):
                warnings.append(
                    f"{rel} there is of no release that this overlay knows. The overlay "
                    "replaces the whole file; `revert` restores it"
                )
        return warnings

    def status(self, root: Path) -> dict[str, Any]:
        plan = self.plan(root)
        new, found = plan.new, {}
        for rel, now in plan.now.items():
            base = plan.base.get(rel)
            if now == new.get(rel, base):
                found[rel] = "current" if now != base else None
            elif now == base and rel in new and rel not in plan.laid:
                found[rel] = "outdated"  # an older overlay did not have it
            elif now in (None, base):
                word = "missing" if now is None else "original"
                found[rel] = word if rel in new else None
            else:
                found[rel] = "outdated" if sha256(now) in plan.ours[rel] else "changed"
        found = {rel: word for rel, word in found.items() if word}
        there = any(plan.now[rel] != plan.base.get(rel) for rel in found)
        busy = files.busy(self.lock)
        state, note = self._state(plan, there)
        if self.interrupted() and not busy:
            state = "interrupted"
        elif state == "":
            kinds = set(found.values())
            if kinds == {"current"}:
                state = "current"
            elif payload.is_newer(root, plan.source.name, plan.laid_name):
                state = "newer"
            else:
                state = "outdated" if kinds <= {"current", "outdated"} else "changed"
        copies = {r: str(p) for r in new if (p := self.copy_of(r)).is_file()}
        return {
            "target": str(self.root),
            "kind": self.kind,
            "torch": self.version,
            "state": state,
            "note": note,
            "busy": busy,
            "overlay": plan.laid_name if there else None,
            "files": {} if state in ("none", "reverted", "gone") else found,
            "originals": copies if there else {},
        }

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        """A state that the files do not tell (empty: they tell it), and a note on it."""
        return "" if there else "none", ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def words(status: Mapping[str, Any], *, verbose: bool = False) -> str:
    """Counts the files that are as in this repository; ``verbose`` names them too."""
    kind, torch = status["kind"], status["torch"] or "uninstalled"
    lines = [f"{kind} {status['target']}", f"torch {torch}"]
    if status["busy"]:
        lines.append("another command works on it at this moment")
    lines.append(f"holds {WORDS[status['state']]}{status['note']}")
    if status["overlay"]:
        lines.append(f"overlay of commit {status['overlay']}")
    for rel, word in sorted(status["files"].items()):
        if verbose or word != "current":
            kept = "  (original kept)" if rel in status["originals"] else ""
            lines.append(f"  {word:9} {rel}{kept}")
    current = list(status["files"].values()).count("current")
    if status["files"] and not verbose:
        lines.append(
            f"{count(current, 'file')} as in this repository, "
            f"{count(len(status['originals']), 'original')} kept (--verbose names them)"
        )
    if status.get("compiled_parts"):
        lines.append(
            f"{count(status['compiled_parts'], 'compiled part')} lent by a wheel"
        )
    return "\n".join(lines)
