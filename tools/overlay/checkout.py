"""The overlay on a PyTorch git checkout. It comes and goes in commits, as with `git am`."""

import os
import re
import shlex
from pathlib import Path

from . import files, git, parts, patches, payload, taken
from .errors import Refused, WrongTarget
from .survey import CheckoutPlan, survey
from .taken import Taken
from .target import Report, Target
from .worktree import Worktree


UPDATE = "optim: update distributed Muon\n\nThe files are those of a newer overlay."
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as before the overlay.'


class Checkout(Target):
    kind = "checkout"

    def __init__(self, where: str | Path) -> None:
        self.tree = tree = Worktree(where)
        version = (tree.root / "version.txt").read_text(errors="replace").strip()
        super().__init__(tree.root, version)
        self.words = f"PyTorch {version} checkout {tree.root}"
        # Linked work trees share it.
        self.lock, self.option = tree.common, ("--checkout", str(tree.root))

    def _finish(self) -> bool:
        self.tree.refuse_if_busy()
        self.tree.forget_scrap()
        return self.tree.settle()

    def plan(self, root: Path) -> CheckoutPlan:
        """Of HEAD: what is not committed is never written."""
        return survey(self.tree, root, of_work_tree=False)

    def _seen(self, root: Path) -> CheckoutPlan:
        return survey(self.tree, root, of_work_tree=True)

    # Apply and revert: a commit on HEAD, and then git's own step to it.

    def _check_edits(self, plan: CheckoutPlan, want: files.Texts) -> None:
        """The one rule: what the user has not committed is not written."""
        rels = [*want]
        if hidden := self.tree.hidden(rels):
            self._refuse_hidden(hidden)
        work, staged = self.tree.work(rels), self.tree.texts("", rels)
        unsaved = []
        for rel, text in want.items():
            if {work[rel], staged[rel]} - {plan.now[rel], text}:
                unsaved.append(rel)
        if not unsaved:
            return
        ways = []
        owned = {rel: plan.parts(rel, work[rel])[0] for rel in unsaved}
        if plan.laid and not all(plan.is_known(*each) for each in owned.items()):
            ways.append("`pull` takes edits of the overlay into this repository:")
            ways.append(self.command("pull").strip("\n"))
        ways.append(f"Commit them, or {self._stash(unsaved)}")
        raise Refused(
            f"{self.words} has changes in files of the overlay that are not committed:\n"
            + "".join(f"  {rel}\n" for rel in unsaved)
            + "\n".join(ways)
        )

    def _stash(self, rels: list[str]) -> str:
        """The lines that put files away."""
        where, staged = f"git -C {self.tree.quoted}", self.tree.texts("", rels)
        lines = "`git stash` keeps them:"
        new = [r for r in rels if not staged[r] and os.path.lexists(self.root / r)]
        if new:
            lines += f"\n  {where} add -f -- {shlex.join(new)}"
        return lines + f"\n  {where} stash push -- {shlex.join(rels)}"

    def _refuse_hidden(self, hidden: dict[str, str]) -> None:
        by_flag: dict[str, list[str]] = {}
        words = f"flags of git's index hide these files of {self.words}:"
        for rel, flag in hidden.items():
            by_flag.setdefault(flag, []).append(rel)
            words += f"\n  {rel}"
        words += "\nThis shows them to git again:"
        for flag, rels in by_flag.items():
            command = f"update-index --no-{flag} -- {shlex.join(rels)}"
            words += f"\n  git -C {self.tree.quoted} {command}"
        raise Refused(words)

    def _check_apply(
        self, plan: CheckoutPlan, root: Path, changes: files.Texts, force: bool
    ) -> list[str]:
        warnings = super()._check_apply(plan, root, changes, force)
        edited = [rel for rel in plan.edited if rel in changes]
        # The work tree may have an edit of HEAD's text, and this repository, too.
        work = self.tree.work(edited)
        if edited := [rel for rel in edited if work[rel] != changes[rel]]:
            raise Refused(
                f"{self.words} has edits of the overlay that this repository lacks:\n"
                + "".join(f"  {rel}\n" for rel in edited)
                + "`pull` takes them into this repository:"
                + self.command("pull")
                + f"\nThese drop them. They stay in the history:{self._dropping()}"
            )
        return warnings

    def _apply(self, plan: CheckoutPlan, report: Report) -> None:
        tree, source, base = self.tree, plan.source, plan.ancestry.base()
        if not report.changes:
            return
        commits = [(UPDATE, report.changes)]
        if tree.resolve("HEAD") == base:
            texts = {r: t for r, t in report.changes.items() if t is not None}
            commits = [*patches.commits(source, plan.stock, texts)]
        head = tree.build("HEAD", commits, source.name or "unknown")
        self._move(report, head, plan)

    def _dropping(self) -> str:
        """How to have this repository's text instead of a committed edit."""
        return self.command("revert") + self.command("apply")

    def revert(self, root: Path, *, dry: bool = False) -> Report:
        report = super().revert(root, dry=dry)
        if not report.changes:
            self._refuse_uncommitted(root)
        return report

    def _refuse_uncommitted(self, root: Path) -> None:
        status = self.status(root)
        if status["state"] == "uncommitted":
            words = f"the overlay of {self.words} is not committed. `apply` commits it"
            raise Refused(f"{words}, and {self._stash([*status['files']])}")

    def _revert(self, plan: CheckoutPlan, report: Report) -> None:
        if report.changes:
            head = self.tree.build("HEAD", [(REVERT, report.changes)], "none")
            self._move(report, head, plan)
        report.warnings += [
            f"changes of {rel} in {other[:12]} conflict with yours. Only yours are there"
            for rel, other in plan.ancestry.conflicts.items()
        ]
        if edited := [rel for rel in plan.edited if rel in report.changes]:
            report.warnings.append(
                f"this repository lacks edits of {', '.join(edited)}. They stay in the history:"
                f"\n  git -C {self.tree.quoted} log -p -- {shlex.join(edited)}"
            )
        if count := parts.remove(self.tree):
            report.words.append(f"removed {count} compiled parts that a wheel had lent")

    def _move(self, report: Report, head: str, plan: CheckoutPlan) -> None:
        was = self.tree.resolve("HEAD")
        work = self.tree.work([*report.changes])
        self.tree.move(head, was, report.changes, work)
        new = ("rev-list", "--reverse", "--abbrev-commit", f"{was}..{head}")
        report.words.append(f"committed as {' '.join(self.tree.ask(*new).split())}")

    def _state(self, plan: CheckoutPlan, there: bool) -> tuple[str, str]:
        if self.tree.begun():
            return (
                "changed",
                ". A command was cut off; the next `apply` or `revert` ends it",
            )
        if plan.ancestry.starts_with_overlay and not there:
            return "imported", ""
        is_committed = plan.ancestry.base() != self.tree.resolve("HEAD")
        if there and not is_committed:
            return "uncommitted", f":{self.command('apply')}"
        if is_committed and not there:
            return "changed", ""
        return super()._state(plan, there)

    # Pull and export: the way of edits back, and the series.

    def pull(
        self, root: Path, *, dry: bool = False
    ) -> tuple[list[str], dict[str, str], list[str]]:
        """Merge edits of the overlay into this repository.

        Returns the files changed, those with conflicts (each with the checkout's file),
        and those missing there.
        """
        plan = self._seen(root)
        if not plan.laid:
            self._refuse_uncommitted(root)
            return [], {}, []
        edits = {rel: plan.owned[rel] for rel in plan.edited}
        _, misfits = patches.overlay(plan.source, plan.stock)
        changes: dict[str, bytes] = {}
        conflicts: dict[str, str] = {}
        record = dict(plan.taken)
        for rel, theirs in (edits | self._added(plan)).items():
            if not theirs:
                continue
            if rel in misfits:
                raise WrongTarget(misfits[rel])
            place, here = plan.place(rel), plan.here(rel)
            if payload.has_markers(here):  # of an earlier conflict
                conflicts[place] = rel
                continue
            text, clean = git.merged(here, plan.merge_base(rel), theirs)
            if clean and text == here:
                continue
            changes[place] = text if place == rel else _patch_to(plan, rel, text)
            record[rel] = Taken(plan.was(rel), theirs, here, changes[place], not clean)
            if not clean:
                conflicts[place] = rel
        if changes and not dry:
            # The record counts only when this repository has what it says was written.
            taken.write(self.tree, record)
            written = {root / place: text for place, text in changes.items()}
            files.write(written, root / payload.PATCHES / "series", root)
        missing = []
        for rel, text in plan.laid.items():
            if text and not plan.now[rel] and rel in plan.source.whole:
                missing.append(rel)
        return sorted(changes), conflicts, missing

    def dropping(self) -> str:
        return (
            "Resolve and commit them here, and `apply` replaces the checkout's text.\n"
            "To keep this repository's text as it was, commit the checkout's, and then:"
            + self._dropping()
        )

    def _added(self, plan: CheckoutPlan) -> files.Texts:
        """Files of Muon that the checkout has, and neither its base nor the overlay."""
        kinds = ("--cached", "--others", "--exclude-standard")
        rels = git.lines(self.root, "ls-files", "-z", *kinds, "--", *payload.ROOTS)
        new = [
            r for r in dict.fromkeys(rels) if payload.is_muons(r) and r not in plan.now
        ]
        stock = plan.ancestry.stock(new)
        return self.tree.work([rel for rel in new if stock[rel] is None])

    def export(
        self,
        root: Path,
        out: Path,
        *,
        stack: bool = False,
        force: bool = False,
        dry: bool = False,
    ) -> tuple[list[Path], str, list[str]]:
        """Write the ``git am`` series; the files, the base, and what it lacks."""
        plan = self._seen(root)
        payload.refuse_markers(plan.source)
        base, tree = plan.ancestry.base(), self.tree
        stock = tree.texts(base, list(plan.now))
        texts, misfits = patches.overlay(plan.source, stock)
        lacks = list(misfits.values())
        if misfits and not force:
            command = self.command("export", "--force", "--out", str(out))
            raise WrongTarget("\n".join([*lacks, f"This leaves it out:{command}"]))
        if plan.edited:
            few = ", ".join(sorted(plan.edited)[:3])
            words = f"the series lacks edits of this checkout ({few}). First:"
            lacks.append(words + self.command("pull"))
        texts = {rel: text for rel, text in texts.items() if text != stock[rel]}
        if not texts:
            raise WrongTarget(
                f"{self.words} has the overlay at {base}: no mail is needed"
            )
        if any(out.glob("*.patch")):  # `git am out/*` would take them, too
            raise Refused(f"{out} has mails already: name another folder")
        if dry:
            return [], base, lacks
        commits = patches.commits(plan.source, stock, texts, stack=stack)
        out.mkdir(parents=True, exist_ok=True)
        # Away from every setting of the user, and from a repository that may only be read.
        with tree.scratch_objects() as env, git.scratch() as scratch:
            tip = tree.build(base, commits, None, env=env)
            kind = f"--object-format={git.object_format(base)}"
            git.git(scratch, "init", "-q", "--bare", kind, env=git.ALONE)
            command = ("format-patch", "--no-renames", "--full-index", "--binary")
            more = ("--signature=overlay", "-o", str(out), f"{base}..{tip}")
            alone = git.ALONE | env
            mails = git.text(scratch, *command, *more, env=alone, check=True)
        return [Path(mail) for mail in mails.splitlines()], base, lacks


def _patch_to(plan: CheckoutPlan, rel: str, text: bytes) -> bytes:
    """The patch of that file that leads to ``text``."""
    before = plan.stock[rel] or b""
    # As little context as leads to one place: other versions differ around it.
    for context in range(1, 10):
        made = git.difference({rel: before}, {rel: text}, "--text", f"-U{context}")
        hunks = made[made.index(b"--- a/") :]
        bodies = re.split(rb"(?m)^@@ .*\n", hunks)[1:]
        replaced = [b"".join(re.findall(rb"(?m)^[ -](.*\n)", body)) for body in bodies]
        if all(before.count(old) == 1 for old in replaced):
            break
    return re.sub(rb"(?m)^(@@ [^@]*@@).*$", rb"\1", hunks)
