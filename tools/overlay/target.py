"""A tree that the overlay is applied to: the plan, the one rule, and the status."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import files, git, payload, stock, versions
from .errors import Refused, WrongTarget
from .payload import sha256, unix


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from .patches import Layer
    from .payload import Source


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

    def changes(self, want: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
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


def report_of(changes: Mapping[str, bytes | None]) -> Report:
    return Report(
        [rel for rel, text in changes.items() if text is not None],
        [rel for rel, text in changes.items() if text is None],
    )


@dataclasses.dataclass
class Status:
    target: str
    kind: str
    torch: str | None
    state: str
    overlay: str | None  # the commit of this repository that is there
    files: dict[str, str]
    originals: dict[str, str]
    note: str = ""
    compiled_parts: int = 0
    busy: bool = False

    def as_json(self) -> dict:
        return dataclasses.asdict(self)


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
    """A tree that has a ``torch`` package."""

    kind: str
    words: str  # its name in messages
    lock: Path  # the folder that one command at a time may hold

    def __init__(self, root: Path, version: str | None) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version
        self.copies = self.torch_dir / FOLDER / "original"

    def plan(self, root: Path) -> Plan:
        raise NotImplementedError

    def way_out(self, plan: Plan, rels: list[str]) -> str:
        """How a user keeps or drops edits of those files, in words."""
        raise NotImplementedError

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

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Write all files or none, with the line ends that each has there."""
        places: dict[Path, bytes | None] = {}
        for rel, text in changes.items():
            path = self.root / rel
            if text and path.is_file() and b"\r\n" in path.read_bytes():
                text = text.replace(b"\n", b"\r\n")
            places[path] = text
        files.replace(places, self.sibling, self.root)

    def check_edits(self, plan: Plan, root: Path, doing: str) -> None:
        """The one rule: a path whose text is of no known origin is not written.

        Known are the base, every overlay that was applied there, and this repository.
        """
        lost: dict[str, list[bytes]] = {}
        for rel, now in plan.now.items():
            for text in (now, plan.staged.get(rel, now)):
                stock_or_new = text in (plan.base.get(rel), plan.new.get(rel))
                if not (stock_or_new or sha256(text) in plan.ours[rel]):
                    lost.setdefault(rel, []).append(text or b"")
        old = git.known(root, {t for found in lost.values() for t in found if t})
        edited = [rel for rel, found in lost.items() if not old.issuperset(found)]
        if edited:
            raise Refused(
                f"{self.words} has other changes in files that {doing}:\n"
                + "".join(f"  {rel}\n" for rel in edited)
                + f"{self.way_out(plan, edited)}\nNothing was touched."
            )

    def check_apply(self, plan: Plan, root: Path, *, force: bool) -> list[str]:
        """Raise if ``apply`` must not go on; the warnings if it may."""
        warnings = []
        changes = plan.changes(plan.wanted)
        if not versions.supported(self.version or ""):
            said = stock.untested(self.words, self.version or "", plan.base)
            if not force:
                raise WrongTarget(
                    f"{said}\n`apply --force` goes on. Nothing was touched."
                )
            warnings += [said, *plan.misfits] if changes else []
        elif plan.misfits:
            raise WrongTarget(f"{plan.misfits[0]}. Nothing was touched.")
        if changes and payload.is_newer(root, plan.laid_name):
            raise Refused(
                f"{self.words} has the overlay of commit {plan.laid_name}, and this "
                f"repository is at {plan.source.name}, which is older. Update this clone "
                "(git pull), or `revert` first. Nothing was touched."
            )
        self.check_edits(plan, root, "the overlay writes")
        for rel in changes.keys() & plan.source.whole.keys():
            now = plan.now[rel]
            if now is not None and now == plan.base[rel] and not stock.known(rel, now):
                warnings.append(
                    f"{rel} there is of no release that this overlay knows. The overlay "
                    "replaces the whole file; `revert` restores it"
                )
        return warnings

    def held_by_another(self) -> bool:
        return files.busy(self.lock)

    def interrupted(self) -> bool:
        raise NotImplementedError

    def status(self, root: Path) -> Status:
        plan = self.plan(root)
        new = plan.new
        found: dict[str, str] = {}
        for rel, now in plan.now.items():
            base = plan.base.get(rel)
            if now == new.get(rel, base):
                word = "current" if now != base else None
            elif now == base and rel not in plan.laid and rel in new:
                word = "outdated"  # an older overlay did not have it
            elif now is None:
                word = "missing" if rel in new else None
            elif now == base:
                word = "original" if rel in new else None
            else:
                word = "outdated" if sha256(now) in plan.ours[rel] else "changed"
            if word:
                found[rel] = word
        there = any(plan.now[rel] != plan.base.get(rel) for rel in found)
        state, note = self._state(plan, root, found, there)
        shown = {} if state in ("none", "reverted", "gone") else found
        copies = {r: str(p) for r in new if (p := self.copy_of(r)).is_file()}
        return Status(
            str(self.root), self.kind, self.version, state,
            plan.laid_name if there else None, shown, copies if there else {}, note,
            busy=self.held_by_another(),
        )  # fmt: skip

    def _state(
        self, plan: Plan, root: Path, found: Mapping[str, str], there: bool
    ) -> tuple[str, str]:
        kinds = set(found.values())
        if self.interrupted():
            return "interrupted", ""
        if not there:
            return "none", ""
        if kinds == {"current"}:
            return "current", ""
        if payload.is_newer(root, plan.laid_name):
            return "newer", ""
        if kinds & {"changed", "missing", "original"}:
            return "changed", ""
        return "outdated", ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def words(status: Status, *, verbose: bool = False) -> str:
    """Counts the files that are as in this repository; ``verbose`` names them too."""
    lines = [f"{status.kind} {status.target}", f"torch {status.torch or 'uninstalled'}"]
    if status.busy:
        lines.append("another command works on it at this moment")
    lines.append(f"holds {WORDS[status.state]}{status.note}")
    if status.overlay:
        lines.append(f"overlay of commit {status.overlay}")
    for rel, word in sorted(status.files.items()):
        if verbose or word != "current":
            kept = "  (original kept)" if rel in status.originals else ""
            lines.append(f"  {word:9} {rel}{kept}")
    current = list(status.files.values()).count("current")
    if status.files and not verbose:
        lines.append(
            f"{count(current, 'file')} as in this repository, "
            f"{count(len(status.originals), 'original')} kept (--verbose names them)"
        )
    if status.compiled_parts:
        lines.append(f"{count(status.compiled_parts, 'compiled part')} lent by a wheel")
    return "\n".join(lines)


def restored(plan: Plan, rels: Iterable[str]) -> dict[str, bytes | None]:
    return plan.changes({rel: plan.base[rel] for rel in rels})
