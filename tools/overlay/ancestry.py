"""The history of a checkout: which commits have the overlay, and what was there before."""

import functools
import re

from . import git, patches, payload
from .errors import WorkFailed
from .history import History
from .payload import Source
from .worktree import REPLACED, TRAILER, Worktree


# Each commit of this tool has it; that of a revert says "none". A merge that squashes
# them indents their messages.
_TRAILER = rf"^ *{TRAILER}: "
_NEWEST = ("log", "-1", "--first-parent", "-m", "--no-renames", "--format=%H")


class Ancestry:
    """Knows the overlay by its texts: those of this repository, and of this tool's commits."""

    def __init__(self, tree: Worktree, source: Source, history: History) -> None:
        self.tree = tree
        self._source = source
        self.history = history
        # The overlay is in the first commit of all, for instance in an import.
        self.starts_with_overlay = False
        # Files whose changes by a merged branch are unclear, and that branch.
        self.conflicts: dict[str, str] = {}
        self._read = functools.cache(self._read_history)

    def base(self, commit: str = "HEAD") -> str:
        """The newest commit in that history without the overlay."""
        base, _ = self._read(self.tree.resolve(f"{commit}^{{commit}}"))
        return base

    def overlay_files(self, commit: str) -> dict[str, bytes]:
        """The overlay's whole files there. If all are edited, with the texts of before."""
        names = ("ls-tree", "-r", "-z", "--name-only", commit, "--", *payload.ROOTS)
        paths = git.lines(self.tree.root, *names)
        paths = [p for p in paths if self.history.has_path(p) or payload.is_muons(p)]
        texts = self.tree.texts(commit, paths)
        known = {p: t for p, t in texts.items() if t and self.history.has_text(p, t)}
        return known or self._added_files(commit, paths)

    def _added_files(self, commit: str, paths: list[str]) -> dict[str, bytes]:
        """The files that the overlay added, this repository's or another one."""
        tree, files_there = self.tree, {}
        for path in paths:
            if path == REPLACED or not payload.is_muons(path):
                continue
            added = (*_NEWEST, "--diff-filter=A", commit, "--", path)
            first = tree.ask(*added, check=True)
            text = tree.texts(first, [path])[path]
            if self.history.has_text(path, text) or self._is_named(first):
                files_there[path] = text or b""
        return files_there

    def named(self, *which: str) -> dict[str, str | None]:
        """The commits among these that bring an overlay, newest first, with its name."""
        asked = ("log", "--format=%x01%H%n%B", "-E", f"--grep={_TRAILER}", *which)
        log = self.tree.ask(*asked, check=True)
        names: dict[str, str | None] = {}
        for entry in log.split("\1")[1:]:
            commit, _, message = entry.partition("\n")
            name = re.findall(rf"(?m){_TRAILER}(\S+)", message)[-1]
            if name != "none":
                names[commit] = None if name == "unknown" else name
        return names

    def stock(self, paths: list[str]) -> dict[str, bytes | None]:
        """The texts without the overlay: of the base, with what other branches brought."""
        tree = self.tree
        base, others = self._read(tree.resolve("HEAD"))
        texts = tree.texts(base, paths)
        for merge, other in others:
            if tree.is_ancestor(other, base):
                continue
            was = tree.texts(tree.ask("merge-base", f"{merge}^1", other), paths)
            for path, theirs in tree.texts(other, paths).items():
                ours, old = texts[path], was[path]
                if theirs and not (ours or old):
                    texts[path] = theirs
                elif ours and old and theirs and theirs not in (old, ours):
                    text, clean = git.merged(ours, old, theirs)
                    texts[path] = text if clean else ours
                    if not clean:
                        self.conflicts[path] = other
        return texts

    def _read_history(self, tip: str) -> tuple[str, list[tuple[str, str]]]:
        """The base, and (merge, branch) of other branches without the overlay."""
        tree = self.tree
        base, others = self._before(tip), []
        merges = ("rev-list", "--first-parent", "--merges", "--reverse")
        for merge in tree.ask(*merges, f"{base}..{tip}").split():
            for other in tree.ask("rev-parse", f"{merge}^@").split()[1:]:
                # Upstream that was merged since, or what a topic's overlay is on. The
                # base never moves backward.
                other = self.base(other)
                base = other if tree.is_ancestor(base, other) else base
                others.append((merge, other))
        return base, others

    def _before(self, tip: str) -> str:
        """The parent of the first commit of the overlay on this branch, or ``tip``.

        The first commit of all, for instance an import, is its own base.
        """
        commit, bringing = tip, ""
        while bringing := self._brings(commit, bringing):
            commit = self.tree.resolve(f"{bringing}^")
            if not commit:
                self.tree.refuse_if_shallow()
                self.starts_with_overlay = True
                return bringing
        return commit

    def _brings(self, commit: str, above: str) -> str:
        """The newest commit, from there on, that brings a part of the overlay; or empty.

        ``above`` is the one before it; empty for the tip.
        """
        if ours := self.overlay_files(commit):
            return self.tree.ask(*_NEWEST, commit, "--", min(ours), check=True)
        # The first commit has hunks only. Upstream may have taken that one.
        is_ours = self.named("--no-walk", commit) or (
            above and not self._is_named(above) and self._has_hunks_only(commit)
        )
        return commit if is_ours else ""

    def _is_named(self, commit: str) -> bool:
        """Whether it is a commit of this tool, or merges one."""
        before = self.tree.resolve(f"{commit}^")
        return bool(self.named(commit, *[f"^{before}"] * bool(before)))

    def _has_hunks_only(self, commit: str) -> bool:
        """Whether that commit did nothing but apply patches of the overlay."""
        tree, by_path = self.tree, patches.series(self._source)
        if not tree.resolve(f"{commit}^"):
            return False
        paths = tree.changed(f"{commit}^", commit)
        if not paths or not by_path.keys() >= {*paths}:
            return False
        before = tree.texts(f"{commit}^", paths)
        return all(
            _is_patched(by_path[path], path, before[path], after)
            for path, after in tree.texts(commit, paths).items()
        )


def _is_patched(
    patch: patches.Patch, path: str, before: bytes | None, after: bytes | None
) -> bool:
    try:
        return before is not None and patch.applied(path, before) == after != before
    except WorkFailed:
        return False
