"""The overlay on a PyTorch git checkout. git is the record, and writes."""

import dataclasses
import re
import shlex
from itertools import chain
from pathlib import Path

from . import files, git, parts, patches, payload, worktree
from .errors import Refused, WrongTarget
from .target import Plan, Report, Target
from .worktree import Worktree


UPDATE = "optim: update distributed Muon\n\nThe files are those of a newer overlay."
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as before the overlay.'
MARKER = b"<<<<<<< this repository\n"
Overlay = tuple[str | None, files.Texts]  # its commit here, and its texts


@dataclasses.dataclass
class CheckoutPlan(Plan):
    stock: dict[str, bytes | None]  # the base's texts, without changes of the user's
    fresh: dict[str, bytes]  # with this repository's overlay on them
    overlaid: dict[str, list[bytes]]  # the overlays' texts
    owned: dict[str, bytes | None]  # the overlay's part of ``now``

    def parts(self, rel: str, text: bytes | None) -> tuple[bytes | None, bytes | None]:
        """The overlay's part of a text: a whole file, or its hunks. And the other part.

        A hunk that touches one of the overlay's is an edit of that.
        """
        stock, overlays = self.stock[rel], self.overlaid[rel]
        if rel in self.source.whole or stock is None:
            return text, stock
        if text is None or text in (stock, *overlays):
            return text, None if text is None else stock
        if not overlays:
            return stock, text
        clean = (each for each in overlays if git.merged(text, each, stock)[1])
        # Without the overlay: where a hunk touches one of its own, stock's lines stay.
        bare, _ = git.merged(text, next(clean, overlays[0]), stock, "--theirs")
        return git.merged(text, bare, stock)[0], bare


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
        tree, source = self.tree, payload.read(root)
        overlays = self._overlays(root, source)
        every = [texts for _, texts in overlays]
        rels = list(dict.fromkeys(chain(patches.paths(source), *every)))
        stock, now, staged = tree.stock(rels), tree.work(rels), tree.texts("", rels)
        fresh, misfits = patches.overlay(source, stock)

        def score(overlay: Overlay) -> int:
            return sum(t == now[r] != stock[r] for r, t in overlay[1].items())

        name, laid = max([(None, {}), *overlays], key=score)
        # A commit in the middle of the stack has an earlier form of a file.
        every += [fresh, *(of for _, of in patches.commits(source, stock, fresh))]
        overlaid = {
            r: [t for of in every if (t := of.get(r)) is not None] for r in rels
        }
        plan = CheckoutPlan(
            source, fresh, misfits, dict(stock), now, [], [], laid, name, staged,
            stock, fresh, overlaid, dict(now),
        )  # fmt: skip

        def is_known(rel: str, text: bytes | None) -> bool:
            """Whether it is an overlay's text, or this repository has all its edits."""
            was, new = laid.get(rel), fresh.get(rel)
            if not text or text in (stock[rel], *overlaid[rel]):
                return True
            return bool(was and new) and git.merged(new, was, text) == (new, True)

        for rel in rels:
            plan.owned[rel], plan.base[rel] = plan.parts(rel, now[rel])
            also, rest = plan.parts(rel, staged[rel])
            if rest != plan.base[rel]:
                plan.mixed.append(rel)
                if also == plan.owned[rel]:  # of the overlay, the index has the same
                    staged[rel] = now[rel]
            if not (is_known(rel, plan.owned[rel]) and is_known(rel, also)):
                plan.edited.append(rel)
        plan.new, bad = patches.overlay(source, plan.base)
        bad = [rel for rel in bad if plan.base[rel] != stock[rel]]
        plan.edited += [rel for rel in bad if rel not in plan.edited]
        return plan

    def _overlays(self, root: Path, source: payload.Source) -> list[Overlay]:
        """Each overlay that was applied here or is committed: its name and texts."""
        tree, base, records = self.tree, self.tree.base(), self.tree.records()
        overlays = [(name, self._texts_of([c])) for c, name in records.items()]
        # A clone, or a rebased branch: the commits name the overlay.
        ours = tree.named(f"{base}..HEAD")
        name = next(iter(ours.values()), None)
        if at := payload.at(root, name) if name else None:
            stock = tree.stock(patches.paths(at))
            overlays.append((name, patches.overlay(at, stock)[0]))
        elif all(tree.base(commit) != base for commit in records):
            # Not known here: its commits have its texts.
            texts, paths = self._texts_of([*reversed(ours)]), {*patches.paths(source)}
            texts = {r: t for r, t in texts.items() if r in paths or _is_muons(r)}
            overlays.append((name, texts))
        return overlays

    def _texts_of(self, commits: list[str]) -> files.Texts:
        """The texts that these commits brought, oldest first, over the present base."""
        texts: dict[str, bytes | None] = {}
        for commit in commits:
            rels = self.tree.changed(f"{commit}^", commit)
            was, now = (self.tree.texts(c, rels) for c in (f"{commit}^", commit))
            for rel, stock in self.tree.stock(rels).items():
                old, text = was[rel], now[rel]
                if _is_muons(rel):
                    texts[rel] = text
                elif rel not in texts:  # later ones may have changes of somebody's
                    # So may that commit's base, and the present one may lack them.
                    if stock and old and text and stock != old:
                        text = git.merged(stock, old, text)[0]
                    texts[rel] = text
        return texts

    def way_out(self, plan: Plan, rels: list[str]) -> str:
        where, ways, pull = f"git -C {self.tree.quoted}", [], self.command("pull")
        if any(rel in plan.laid and rel not in plan.mixed for rel in rels):
            ways = [f"`pull` takes edits of the overlay into this repository:{pull}"]
        head, staged = self.tree.texts("HEAD", rels), self.tree.texts("", rels)
        new = [r for r in rels if plan.now[r] and not staged[r]]
        here = [r for r in rels if not plan.now[r] == staged[r] == head[r]]
        if here:
            ways.append("`git stash` keeps them:")
            ways += [f"  {where} add -f -- {shlex.join(new)}"] * bool(new)
            ways.append(f"  {where} stash push -- {shlex.join(here)}")
        if not ways:
            ways.append(f"They are committed:\n  {where} log -p -- {shlex.join(rels)}")
        return "\n".join(ways)

    def _at_head(self, plan: CheckoutPlan, *, with_overlay: bool) -> files.Texts:
        """The changes that a commit on the branch would make."""
        head = self.tree.texts("HEAD", list(plan.now))
        want = {rel: plan.parts(rel, text)[1] for rel, text in head.items()}
        if with_overlay:
            want |= patches.overlay(plan.source, want)[0]
        return {rel: text for rel, text in want.items() if text != head[rel]}

    def _apply(self, plan: CheckoutPlan, report: Report, commit: bool) -> None:
        tree, source, base = self.tree, plan.source, self.tree.base()
        head = ""
        if commit and (differs := self._at_head(plan, with_overlay=True)):
            commits = [(UPDATE, differs)]
            if tree.resolve("HEAD") == base:
                texts = {rel: text for rel, text in differs.items() if text is not None}
                commits = [*patches.commits(source, plan.stock, texts)]
            head = tree.build("HEAD", commits, source.name)
        if report.changes or head:
            texts = {r: t for r, t in plan.fresh.items() if t != plan.stock[r]}
            overlay = [(patches.SUBJECT, texts)]
            laid = tree.build(base, overlay, source.name, record=True)
            self._lay(plan, report, laid, head)

    def _revert(self, plan: CheckoutPlan, report: Report, commit: bool) -> None:
        differs = self._at_head(plan, with_overlay=False)
        head = ""
        if commit and differs:
            head = self.tree.build("HEAD", [(REVERT, differs)], "none")
        self._lay(plan, report, self.tree.base(), head)
        report.warnings += [
            f"changes of {rel} in {other[:12]} conflict with yours. Only yours are there"
            for rel, other in self.tree.conflicts.items()
        ]
        if differs and not commit:
            report.words.append(
                "the overlay is committed; its revert is in the work tree and not committed.\n"
                f"To commit it:{self.command('revert', '--commit')}"
            )
        if count := parts.remove(self.tree):
            report.words.append(f"removed {count} compiled parts that a wheel had lent")

    def _lay(self, plan: CheckoutPlan, report: Report, laid: str, head: str) -> None:
        if head:
            new = ("rev-list", "--reverse", "--abbrev-commit", f"HEAD..{head}")
            report.words.append(f"committed as {' '.join(self.tree.ask(*new).split())}")
        if report.changes or head:
            self.tree.lay(report.changes, plan.now, laid, head)
        elif self.tree.resolve(worktree.LAID):
            self.tree.record(laid)

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        if self.tree.begun():
            return (
                "changed",
                ". A command was cut off; the next `apply` or `revert` ends it",
            )
        if there or self.tree.base() == self.tree.resolve("HEAD"):
            return super()._state(plan, there)
        return "reverted", f". This commits that:{self.command('revert', '--commit')}"

    def pull(
        self, root: Path, *, dry: bool = False
    ) -> tuple[list[str], dict[str, str], list[str]]:
        """Merge edits of the overlay into this repository.

        Returns the files changed, those with conflicts (each with the checkout's file),
        and those missing there.
        """
        tree, plan = self.tree, self.plan(root)
        laid, whole = plan.laid, plan.source.whole
        if not laid:
            return [], {}, []
        edits = {rel: plan.owned[rel] for rel in plan.edited}
        there = {r: t for r, t in [*edits.items(), *self._added(plan).items()] if t}
        before = tree.resolve(worktree.PULLED)
        pulled = tree.texts(before, list(there)) if before else {}
        changes: dict[str, bytes] = {}
        both: dict[str, str] = {}
        for rel, theirs in there.items():
            if rel in plan.misfits:
                raise WrongTarget(plan.misfits[rel])
            stock = plan.stock.get(rel)
            if theirs in (stock, *plan.overlaid.get(rel, ())):
                continue  # an edit that is staged alone
            here = plan.fresh.get(rel, stock) or b""
            was = laid.get(rel, stock) or b""
            last = pulled.get(rel)
            if last and git.merged(here, was, last) == (here, True):
                was = last  # still here: an edit of the same lines may follow
            text, clean = git.merged(here, was, theirs)
            if clean and text == here:
                continue
            place = rel
            if stock and rel not in whole:
                place, text = _patch_to(plan, rel, text)
            both |= {} if clean else {place: rel}
            if MARKER not in here:  # of an earlier conflict
                changes[place] = text
        if changes and not dry:
            written = {root / rel: text for rel, text in changes.items()}
            files.write(written, root / payload.PATCHES / "series", root)
            texts = [("pulled", {**laid, **there})]
            made = tree.build(tree.base(), texts, None, record=True)
            tree.update_refs(f"update {worktree.PULLED} {made}\n")
        missing = [r for r, t in laid.items() if t and r in whole and not plan.now[r]]
        return sorted(changes), both, missing

    def dropping(self, rels: list[str]) -> str:
        """How to have the overlay's text again in the checkout."""
        ours = self.tree.named(*self.tree.laid()[:1], f"{self.tree.base()}..HEAD")
        laid, named = next(iter(ours)), shlex.join(rels)
        return (
            "Resolve them here. This drops the checkout's own text then:\n"
            f"  git -C {self.tree.quoted} restore --source={laid} --staged --worktree -- {named}"
        )

    def _added(self, plan: CheckoutPlan) -> files.Texts:
        """Files of Muon that the checkout has, and neither its base nor the overlay."""
        kinds = ("--cached", "--others", "--exclude-standard")
        rels = git.lines(self.root, "ls-files", "-z", *kinds, "--", *payload.ROOTS)
        new = [r for r in dict.fromkeys(rels) if _is_muons(r) and r not in plan.now]
        stock = self.tree.stock(new)
        return self.tree.work([rel for rel in new if stock[rel] is None])

    def export(
        self, root: Path, out: Path, *, stack: bool = False, dry: bool = False
    ) -> tuple[list[Path], str, list[str]]:
        """Write the ``git am`` series; the files, the base, and edits that it lacks."""
        plan, base = self.plan(root), self.tree.base()
        stock = self.tree.texts(base, list(plan.now))
        texts, misfits = patches.overlay(plan.source, stock)
        if misfits:
            raise WrongTarget(next(iter(misfits.values())))
        if any(out.glob("*.patch")):  # `git am out/*` would take them, too
            raise Refused(f"{out} has mails already: name another folder")
        if dry:
            return [], base, plan.edited
        commits = patches.commits(plan.source, stock, texts, stack=stack)
        tip = self.tree.build(base, commits, plan.source.name)
        out.mkdir(parents=True, exist_ok=True)
        with git.scratch() as scratch:  # away from every setting of the user
            git.git(scratch, "init", "-q", "--bare", env=git.ALONE)
            self.tree.borrow(scratch / "objects")
            command = ("format-patch", "--no-renames", "--full-index", "--binary")
            more = ("--signature=overlay", "-o", str(out), f"{base}..{tip}")
            mails = git.text(scratch, *command, *more, env=git.ALONE, check=True)
        return [Path(mail) for mail in mails.splitlines()], base, plan.edited


def _patch_to(plan: CheckoutPlan, rel: str, text: bytes) -> tuple[str, bytes]:
    """The patch of that file that leads to ``text``, and its place."""
    before = plan.stock[rel] or b""
    # As little context as leads to one place: other versions differ around it.
    for context in range(1, 10):
        made = git.difference({rel: before}, {rel: text}, "--text", f"-U{context}")
        hunks = made[made.index(b"--- a/") :]
        bodies = re.split(rb"(?m)^@@ .*\n", hunks)[1:]
        replaced = [b"".join(re.findall(rb"(?m)^[ -](.*\n)", body)) for body in bodies]
        if all(before.count(old) == 1 for old in replaced):
            break
    name = patches.series(plan.source)[rel].name
    return f"{payload.PATCHES}/{name}", re.sub(rb"(?m)^(@@ [^@]*@@).*$", rb"\1", hunks)


def _is_muons(rel: str) -> bool:
    tops = tuple(f"{top}/" for top in payload.ROOTS)
    named = rel.startswith(tops) and "muon" in rel and payload.is_source(rel)
    return named or rel in worktree.ADDED
