"""The overlay on a PyTorch git checkout. git is the record."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from typing import TYPE_CHECKING, Any

from . import files, git, parts, patches, payload, worktree
from .errors import Refused, WorkFailed, WrongTarget
from .payload import sha256
from .target import Plan, Report, Target


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .target import Texts

    from .worktree import Worktree


UPDATE = "optim: update distributed Muon\n\nThe files are those of a newer overlay."
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as before the overlay.'
PULLED = "Edits of the overlay that `pull` took"


class Checkout(Target):
    kind = "checkout"

    def __init__(self, tree: Worktree) -> None:
        version = (tree.root / "version.txt").read_text().strip()
        super().__init__(tree.root, version)
        self.tree = tree
        self.words = f"PyTorch {version} checkout {tree.root}"
        # Linked work trees share it, and with it info/exclude.
        self.lock = tree.common

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work on it alone, after the work of a killed command is finished."""
        with files.held(self.lock):
            self.tree.refuse_if_busy()
            self.tree.forget_scrap()
            if self._finish() | parts.recover(self.tree):
                print("an earlier command was cut off half way: finished")
            yield

    def interrupted(self) -> bool:
        return bool(self.tree.resolve(worktree.NEXT))

    def _finish(self) -> bool:
        """Bring the files to the next overlay, if a killed command was about to."""
        tree, following = self.tree, self.tree.resolve(worktree.NEXT)
        if not following:
            return False
        base = tree.base()
        laid = [tree.overlay(commit) for commit in tree.laid()]
        rels = list(dict.fromkeys(rel for texts in laid for rel in texts))
        for rel in rels:
            files.scratch(self.root / rel).unlink(missing_ok=True)
        if base == tree.base(following):  # not on another branch
            at_base, head, staged = (tree.texts(c, rels) for c in (base, "HEAD", ""))
            want = at_base | tree.overlay(following)
            changes = {}
            for rel, text in want.items():
                now = self.read(rel)
                if now != text and now in [
                    at_base[rel],
                    *(o[rel] for o in laid if rel in o),
                ]:
                    changes[rel] = text
            self.write(changes)
            # Staged for a commit that was not made.
            tree.stage({r: head[r] for r in rels if head[r] != staged[r] == want[r]})
        for rel in rels:
            files.tidy(self.root / rel, self.root)
        tree.set_laid(following)
        return True

    def plan(self, root: Path) -> Plan:
        tree = self.tree
        base, source = tree.base(), payload.read(root)
        overlays = self._overlays(root, base, source)
        applied = [rel for _, texts in overlays for rel in texts]
        rels = list(dict.fromkeys([*self._paths(source), *applied]))
        at_base = tree.texts(base, rels)
        layers, lacking, misfits = patches.layers(
            source, self.version or "", at_base, self.takes
        )
        plan = Plan(
            source, layers, lacking, misfits, at_base,
            now={rel: self.read(rel) for rel in rels},
            ours={rel: {sha256(o[rel]) for _, o in overlays if rel in o} for rel in rels},
            laid={},
            staged=tree.texts("", rels),
        )  # fmt: skip
        self._laid_text: dict[str, bytes | None] = {}
        best = 0
        for name, texts in overlays:
            score = sum(t == plan.now[r] != at_base[r] for r, t in texts.items())
            if score > best:
                best, self._laid_text, plan.laid_name = score, texts, name
        plan.laid = {rel: sha256(text) for rel, text in self._laid_text.items()}
        return plan

    def _paths(self, source: payload.Source) -> list[str]:
        series = patches.series(source.patches, self.version or "")
        return list(
            dict.fromkeys([*source.whole, *(r for p in series for r in p.paths)])
        )

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
            rels = self._paths(named)
            layers = patches.layers(
                named, self.version or "", tree.texts(base, rels), self.takes
            )
            found.append(
                (name, {r: t for layer in layers[0] for r, t in layer.texts.items()})
            )
        elif all(tree.base(commit) != base for commit, _ in laid):
            # Not known here: its first commit has its texts.
            commit = commit or tree.adding(head)
            ours = set(self._paths(source))
            rels = [
                r for r in tree.changed(base, commit) if r in ours or self._is_muons(r)
            ]
            found.append((name, tree.texts(commit, rels)))
        return found

    @staticmethod
    def _is_muons(rel: str) -> bool:
        tops = tuple(f"{top}/" for top in payload.ROOTS)
        return rel.startswith(tops) and "muon" in rel and payload.is_source(rel)

    def way_out(self, plan: Plan, rels: list[str]) -> str:
        where = shlex.quote(str(self.root))
        if any(rel in plan.laid for rel in rels):
            return (
                "They may be edits of the overlay. `pull` takes these into this repository:\n"
                f"  setup_overlay.py pull --checkout {where}\n"
                f"`git -C {where} diff` and `git -C {where} log -p` show them."
            )
        return (
            f"Commit or undo these changes first; `git -C {where} status` shows them."
        )

    def _build(self, plan: Plan, base: str) -> str:
        """The overlay as commits on the base: the newest of them."""
        subjects = [layer.message.partition("\n")[0] for layer in plan.layers]
        new = {rel: text for rel, text in plan.new.items() if text != plan.base[rel]}
        for commit in self.tree.laid():
            if self.tree.overlay(commit) == new and self.tree.base(commit) == base:
                made = self.tree.ask(
                    "log", "--reverse", "--format=%s", f"{base}..{commit}"
                )
                if made.splitlines() == subjects:
                    return commit
        for layer in plan.layers:
            base = self.tree.commit(base, layer.texts, layer.message, plan.source.name)
        return base

    def _apply(self, plan: Plan, changes: Texts, report: Report, commit: bool) -> None:
        tree = self.tree
        head, base = tree.resolve("HEAD"), tree.base()
        tip = self._build(plan, base)
        self._lay(changes, tip, commit)
        self._keep_copies(plan)
        differs = self._differs(plan.wanted)
        if commit and differs:
            name = plan.source.name
            new = tip if head == base else tree.commit(head, differs, UPDATE, name)
            report.commits = self._commit(new, plan, plan.wanted)
        tree.set_laid(tip)

    def _lay(self, changes: Texts, following: str, commit: bool) -> None:
        """Write the files; after a kill, the next command finishes that."""
        if changes or commit:
            self.tree.set_next(following)
        try:
            self.write(changes)
        except BaseException:  # the files are as before
            self.tree.forget_next()
            raise

    def _differs(self, want: Texts) -> dict[str, bytes | None]:
        """The texts that the branch does not have."""
        head = self.tree.texts("HEAD", list(want))
        return {rel: text for rel, text in want.items() if text != head[rel]}

    def _commit(self, commit: str, plan: Plan, want: Texts) -> list[str]:
        """Move the branch. The index first: a kill between leaves a staged overlay."""
        head = self.tree.resolve("HEAD")
        self.tree.stage({r: t for r, t in want.items() if plan.staged[r] != t})
        self.tree.move_head(commit, head)
        return self.tree.ask("rev-list", "--reverse", f"{head}..{commit}").split()

    def _keep_copies(self, plan: Plan) -> None:
        """Tests compare with stock Muon, which programs find from torch.__file__."""
        ignore = self.copies.parent / ".gitignore"
        wanted = {ignore: b"*\n"}
        for rel in plan.source.whole:
            text = plan.base[rel]
            if text is not None and rel.startswith("torch/"):
                wanted[self.copy_of(rel)] = text
        for path, text in wanted.items():
            if not path.is_file() or path.read_bytes() != text:
                files.write(path, text, self.sibling)

    def _revert(self, plan: Plan, changes: Texts, report: Report, commit: bool) -> None:
        tree = self.tree
        head, base = tree.resolve("HEAD"), tree.base()
        self._lay(changes, base, commit)
        shutil.rmtree(self.copies.parent, ignore_errors=True)
        differs = self._differs(plan.base)
        if commit and differs:
            new = tree.commit(head, differs, REVERT, plan.source.name)
            report.commits = self._commit(new, plan, plan.base)
        elif head == base:
            tree.stage({r: t for r, t in plan.base.items() if plan.staged[r] != t})
        report.uncommitted = bool(differs) and not commit
        if changes or commit or tree.resolve(worktree.LAID) not in ("", base):
            tree.set_laid(base)
        report.parts = parts.remove(tree)

    def status(self, root: Path) -> dict[str, Any]:
        try:
            found = super().status(root)
        except WrongTarget as error:  # a history that is cut off
            found = dict.fromkeys(("busy", "overlay")) | {
                "target": str(self.root), "kind": self.kind, "torch": self.version,
                "state": "unknown", "note": f"\n{error}", "files": {}, "originals": {},
            }  # fmt: skip
        lent = parts.load(self.tree) or {"files": ()}
        return found | {"compiled_parts": len(lent["files"])}

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        if there or self.tree.base() == self.tree.resolve("HEAD"):
            return super()._state(plan, there)
        where = shlex.quote(str(self.root))
        return "reverted", f": `revert --checkout {where} --commit` commits that"

    def pull(self, root: Path, *, dry_run: bool = False) -> tuple[list[str], list[str]]:
        """Merge edits of the overlay into this repository; the files changed, and missing."""
        tree, plan = self.tree, self.plan(root)
        laid, here = self._laid_text, plan.source.whole
        if not laid:
            return [], []
        edited = {rel: plan.now[rel] for rel in plan.now if plan.now[rel] is not None}
        edited |= {rel: self.read(rel) for rel in self._added(plan)}
        changes: dict[str, bytes] = {}
        both, new = [], plan.new
        for rel, there in edited.items():
            base = plan.base.get(rel)
            mine, was = new.get(rel, base), laid.get(rel, base)
            if there is None or there in (mine, was, base):
                continue
            if rel not in laid and git.known(root, [there]):
                continue  # of an overlay before this one
            text = there if mine == was else git.merged(mine or b"", was or b"", there)
            if text is None:
                both.append(rel)
            elif text == mine:
                continue
            elif rel in here or base is None:
                changes[rel] = text
            else:
                name, patch = self._hunks(plan, rel, text)
                changes[f"{payload.PATCHES}/{name}"] = patch
        if both:
            raise Refused(
                "edited in the same lines here and there since `apply`:\n"
                + "".join(f"  {rel}\n" for rel in both)
                + f"Compare each, for instance\n  git diff --no-index {root / both[0]} "
                f"{self.root / both[0]}\nand write the same lines in both. "
                "Nothing was touched."
            )
        gone = [r for r, t in laid.items() if plan.now[r] is None and t and r in here]
        if dry_run:
            return sorted(changes), gone
        for rel, text in changes.items():
            files.write(root / rel, text, root / "setup_overlay.py")
        # The next `apply` knows the edits by this commit, and so does the next `pull`.
        taken = laid | {r: t for r, t in edited.items() if t != plan.base.get(r)}
        if taken != laid:
            tree.set_laid(tree.commit(tree.base(), taken, PULLED, plan.laid_name))
        return sorted(changes), gone

    def _added(self, plan: Plan) -> list[str]:
        """Files of Muon that the checkout has, and neither its base nor the overlay."""
        kinds = ("--cached", "--others", "--exclude-standard")
        found = git.lines(self.root, "ls-files", "-z", *kinds, "--", *payload.ROOTS)
        new = [
            r for r in dict.fromkeys(found) if self._is_muons(r) and r not in plan.now
        ]
        base = self.tree.texts(self.tree.base(), new)
        return [rel for rel in new if base[rel] is None]

    def _hunks(self, plan: Plan, rel: str, text: bytes) -> tuple[str, bytes]:
        """The patch of that file, with the hunks that lead to ``text``."""
        series = patches.series(plan.source.patches, self.version or "")
        found = [patch for patch in series if rel in patch.paths]
        if len(found) != 1 or len(found[0].paths) > 1:
            raise WorkFailed(
                f"{rel} was edited in {self.words}, and more than one patch or file goes "
                "with it: edit patches/ by hand. Nothing was touched."
            )
        base = plan.base[rel] or b""
        # As little context as leads to one place: other versions differ around it.
        for context in (1, 2, 3):
            made = git.difference({rel: base}, {rel: text}, "--text", f"-U{context}")
            hunks = re.sub(
                rb"(?m)^(@@ [^@]*@@).*$", rb"\1", made[made.index(b"--- a/") :]
            )
            if all(base.count(old) == 1 for old in _before(hunks)):
                break
        patch = found[0]
        return patch.name, patch.text.removesuffix(patch.hunks) + hunks

    def export(
        self, root: Path, out: Path, *, dry_run: bool = False
    ) -> tuple[list[Path], str]:
        """Write the ``git am`` series; the files, and the base in words."""
        plan, base = self.plan(root), self.tree.base()
        if plan.misfits:
            raise WrongTarget(plan.misfits[0])
        if dry_run:
            return [], f"{self.words} at {base}"
        tip = self._build(plan, base)
        written = worktree.write_series(self.tree, base, tip, out)
        return written, f"{self.words} at {base}"


def _before(hunks: bytes) -> list[bytes]:
    parts = re.split(rb"^@@ .*\n", hunks, flags=re.MULTILINE)[1:]
    return [
        b"".join(ln[1:] for ln in p.splitlines(keepends=True) if ln[:1] in b" -")
        for p in parts
    ]


def find_checkout(where: str | Path) -> Checkout:
    return Checkout(worktree.find(where))
