"""The overlay on a PyTorch git checkout. git is the record."""

import re
import shutil
from pathlib import Path

from . import files, git, parts, patches, payload, worktree
from .errors import Refused, WrongTarget
from .payload import sha256
from .target import Plan, Report, Target
from .worktree import Worktree


UPDATE = "optim: update distributed Muon\n\nThe files are those of a newer overlay."
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as before the overlay.'
PULLED = "Edits of the overlay that `pull` took"


class Checkout(Target):
    kind = "checkout"

    def __init__(self, where: str | Path) -> None:
        self.tree = tree = Worktree(where)
        version = (tree.root / "version.txt").read_text().strip()
        super().__init__(tree.root, version)
        self.words = f"PyTorch {version} checkout {tree.root}"
        # Linked work trees share it, and with it info/exclude.
        self.lock = tree.common

    def _finish(self) -> bool:
        """The next command knows the files that a killed one wrote: both are in the refs."""
        self.tree.refuse_if_busy()
        self.tree.forget_scrap()
        tree, following = self.tree, self.tree.resolve(worktree.NEXT)
        if not following:
            return False
        base = tree.base()
        rels = list({rel: 0 for commit in tree.laid() for rel in tree.overlay(commit)})
        if base == tree.base(following):  # not on another branch
            at_base, head, staged = (tree.texts(c, rels) for c in (base, "HEAD", ""))
            want = at_base | tree.overlay(following)
            # Staged for a commit that was not made.
            tree.stage({r: head[r] for r in rels if head[r] != staged[r] == want[r]})
        for rel in rels:
            files.scratch(self.root / rel).unlink(missing_ok=True)
            files.tidy(self.root / rel, self.root)
        tree.set_laid(following)
        return True

    def plan(self, root: Path) -> Plan:
        tree = self.tree
        base, source = tree.base(), payload.read(root)
        overlays = self._overlays(root, base, source)
        applied = [rel for _, texts in overlays for rel in texts]
        rels = list(dict.fromkeys([*patches.paths(source), *applied]))
        at_base = tree.texts(base, rels)
        now = {rel: self.read(rel) for rel in rels}

        def score(found: tuple[str | None, files.Texts]) -> int:
            return sum(t == now[r] != at_base[r] for r, t in found[1].items())

        laid = max([(None, {}), *overlays], key=score)
        new = patches.overlay(source, at_base, self.takes)
        ours = {r: {sha256(o[r]) for _, o in overlays if r in o} for r in rels}
        staged = tree.texts("", rels)
        return Plan(source, *new, at_base, now, ours, laid[1], laid[0], staged)

    def _overlays(
        self, root: Path, base: str, source: payload.Source
    ) -> list[tuple[str | None, dict[str, bytes | None]]]:
        """Each overlay that was applied: its name and its texts."""
        tree = self.tree
        laid = [(c, texts) for c in tree.laid() if (texts := tree.overlay(c))]
        found = [(tree.trailer(commit), texts) for commit, texts in laid]
        head = tree.resolve("HEAD")
        if base == head:
            return found
        # A clone, or a rebased branch: the commits name the overlay.
        asked = ("log", "-1", "--format=%H", f"--grep=^{worktree.TRAILER}: ")
        commit = tree.ask(*asked, f"{base}..{head}")
        name = tree.trailer(commit) if commit else None
        named = payload.at(root, name) if name else None
        if named:
            at_base = tree.texts(base, patches.paths(named))
            texts = patches.overlay(named, at_base, self.takes)[0]
            found.append((name, {**texts}))
        elif all(tree.base(commit) != base for commit, _ in laid):
            # Not known here: its first commit has its texts.
            commit = commit or tree.adding(head)
            ours = set(patches.paths(source))
            rels = [r for r in tree.changed(base, commit) if r in ours or _is_muons(r)]
            found.append((name, tree.texts(commit, rels)))
        return found

    def way_out(self, plan: Plan, rels: list[str]) -> str:
        where = self.tree.quoted
        if any(rel in plan.laid for rel in rels):
            return (
                "They may be edits of the overlay. `pull` takes these into this repository:\n"
                f"  setup_overlay.py pull --checkout {where}"
            )
        return f"Commit or undo these changes; `git -C {where} status` shows them."

    def _apply(self, plan: Plan, report: Report, commit: bool) -> None:
        tree, source = self.tree, plan.source
        if report.changes or commit:
            commits = patches.commits(source, plan.new)
            tip = tree.build(tree.base(), commits, source.name)
            self._lay(plan, report, plan.wanted, tip, UPDATE if commit else "")
            tree.set_laid(tip)
        # Tests compare with stock Muon, which programs find from torch.__file__.
        stock = {r: t for r in source.whole if (t := plan.base[r]) is not None}
        kept = {self.copy_of(r): t for r, t in stock.items() if r.startswith("torch/")}
        self.keep({self.copies.parent / ".gitignore": b"*\n"} | kept)

    def _revert(self, plan: Plan, report: Report, commit: bool) -> None:
        tree, base = self.tree, self.tree.base()
        if tree.resolve("HEAD") == base:
            self._stage(plan, plan.base)
        differs = self._lay(plan, report, plan.base, base, REVERT if commit else "")
        shutil.rmtree(self.copies.parent, ignore_errors=True)
        report.uncommitted = differs and not commit
        if report.changes or commit or tree.resolve(worktree.LAID) not in ("", base):
            tree.set_laid(base)
        report.parts = parts.remove(tree)

    def _lay(
        self, plan: Plan, report: Report, want: files.Texts, following: str, words: str
    ) -> bool:
        """Write the files, and commit them with those words (empty: no commit).

        Returns whether the branch had other texts.
        """
        tree, head = self.tree, self.tree.resolve("HEAD")
        on_base = head == tree.base()
        if report.changes or words:
            tree.set_next(following)
        try:
            self.write(report.changes)
        except BaseException:  # the files are as before
            tree.forget_next()
            raise
        at_head = tree.texts("HEAD", list(want))
        differs = {rel: text for rel, text in want.items() if text != at_head[rel]}
        if words and differs:
            name = tree.trailer(following)
            new = following if on_base else tree.build(head, [(words, differs)], name)
            # The index first: a kill between leaves a staged overlay.
            self._stage(plan, want)
            git.git(self.root, "update-ref", "-m", "muon overlay", "HEAD", new, head)
            report.commits = tree.ask("rev-list", "--reverse", f"{head}..{new}").split()
        return bool(differs)

    def _stage(self, plan: Plan, want: files.Texts) -> None:
        self.tree.stage({r: t for r, t in want.items() if plan.staged[r] != t})

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        if there or self.tree.base() == self.tree.resolve("HEAD"):
            return super()._state(plan, there)
        way = f": `revert --checkout {self.tree.quoted} --commit` commits that"
        return "reverted", way

    def pull(self, root: Path, *, dry: bool = False) -> tuple[list[str], list[str]]:
        """Merge edits of the overlay into this repository; the files changed, and missing."""
        tree, plan = self.tree, self.plan(root)
        laid, here, new = plan.laid, plan.source.whole, plan.new
        if not laid:
            return [], []
        edited = {rel: text for rel, text in plan.now.items() if text is not None}
        edited |= {r: t for r in self._added(plan) if (t := self.read(r)) is not None}
        changes: dict[str, bytes] = {}
        both = []
        for rel, there in edited.items():
            base = plan.base.get(rel)
            mine, was = new.get(rel, base), laid.get(rel, base)
            if plan.knows(rel, there):
                continue
            text = there if mine == was else git.merged(mine or b"", was or b"", there)
            if text is None:
                both.append(rel)
            elif text != mine and (rel in here or base is None):
                changes[rel] = text
            elif text != mine:
                name, hunks = self._hunks(plan, rel, text)
                changes[f"{payload.PATCHES}/{name}"] = hunks
        if both:
            named = "".join(f"  {rel}\n" for rel in both)
            raise Refused(
                f"edited on both sides, in the same lines; make them equal:\n{named}"
            )
        gone = [r for r, t in laid.items() if plan.now[r] is None and t and r in here]
        if dry:
            return sorted(changes), gone
        for rel, text in changes.items():
            files.write(root / rel, text, root / payload.PATCHES / "series")
        # The next `apply` knows the edits by this commit, and so does the next `pull`.
        taken = {**laid} | {r: t for r, t in edited.items() if t != plan.base.get(r)}
        for texts in (laid, taken) if taken != laid else ():
            tree.set_laid(tree.build(tree.base(), [(PULLED, texts)], plan.laid_name))
        return sorted(changes), gone

    def _added(self, plan: Plan) -> list[str]:
        """Files of Muon that the checkout has, and neither its base nor the overlay."""
        kinds = ("--cached", "--others", "--exclude-standard")
        found = git.lines(self.root, "ls-files", "-z", *kinds, "--", *payload.ROOTS)
        new = [r for r in dict.fromkeys(found) if _is_muons(r) and r not in plan.now]
        base = self.tree.texts(self.tree.base(), new)
        return [rel for rel in new if base[rel] is None]

    def _hunks(self, plan: Plan, rel: str, text: bytes) -> tuple[str, bytes]:
        """The patch of that file, with the hunks that lead to ``text``."""
        before = plan.base[rel] or b""
        # As little context as leads to one place: other versions differ around it.
        for context in range(1, 10):
            made = git.difference({rel: before}, {rel: text}, "--text", f"-U{context}")
            hunks = made[made.index(b"--- a/") :]
            if all(before.count(old) == 1 for old in _replaced(hunks)):
                break
        name = patches.series(plan.source)[rel].name
        return name, re.sub(rb"(?m)^(@@ [^@]*@@).*$", rb"\1", hunks)

    def export(
        self, root: Path, out: Path, *, stack: bool = False, dry: bool = False
    ) -> tuple[list[Path], str, list[str]]:
        """Write the ``git am`` series; the files, the base, and edits that it lacks."""
        plan, base = self.plan(root), self.tree.base()
        if plan.misfits:
            raise WrongTarget(plan.misfits[0])
        edited = [rel for rel in plan.now if self._word(plan, rel) == "changed"]
        if dry:
            return [], base, edited
        commits = patches.commits(plan.source, plan.new, stack=stack)
        tip = self.tree.build(base, commits, plan.source.name)
        return worktree.write_series(self.tree, base, tip, out), base, edited


def _replaced(hunks: bytes) -> list[bytes]:
    """The text that each hunk replaces."""
    bodies = re.split(rb"(?m)^@@ .*\n", hunks)[1:]
    return [b"".join(re.findall(rb"(?m)^[ -](.*\n)", body)) for body in bodies]


def _is_muons(rel: str) -> bool:
    tops = tuple(f"{top}/" for top in payload.ROOTS)
    return rel.startswith(tops) and "muon" in rel and payload.is_source(rel)
