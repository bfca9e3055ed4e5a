"""Compares a checkout with its base, its overlay and this repository, and finds edits."""

import dataclasses
from itertools import chain
from pathlib import Path

from . import files, git, patches, payload, taken
from .ancestry import ADDED, Ancestry
from .history import History
from .payload import Source
from .taken import Taken
from .target import Plan
from .worktree import Worktree


Overlay = tuple[str | None, files.Texts]  # its commit here, and its texts


@dataclasses.dataclass
class CheckoutPlan(Plan):
    ancestry: Ancestry
    stock: dict[str, bytes | None]  # the base's texts, without changes of the user's
    fresh: dict[str, bytes]  # with this repository's overlay on them
    overlaid: dict[str, list[bytes]]  # the overlays' texts
    taken: Taken
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

    def is_known(self, rel: str, text: bytes | None) -> bool:
        """Whether it is an overlay's text, or this repository has all its edits."""
        if not text or text in (self.stock[rel], *self.overlaid[rel]):
            return True
        if self.ancestry.history.has_text(rel, text):
            return True
        new, was = self.fresh.get(rel), self.laid.get(rel)
        if not new:
            return False
        if text == self.taken.theirs.get(rel) and self.is_kept(rel, new):
            return True
        return was is not None and has_edits(new, was, text)

    def is_kept(self, rel: str, here: bytes) -> bool:
        """Whether this repository has dealt with the edit that `pull` took last."""
        place, history = self.place(rel), self.ancestry.history
        return self.taken.is_kept(rel, place, here, history)

    def place(self, rel: str) -> str:
        """The file of this repository that has the text, or its hunks."""
        if rel in self.source.whole or not self.stock.get(rel):
            return rel
        return f"{payload.PATCHES}/{patches.series(self.source)[rel].name}"


def survey(tree: Worktree, root: Path, *, of_work_tree: bool) -> CheckoutPlan:
    """Compare HEAD, or the work tree, with its base, its overlay and this repository."""
    source = payload.read(root)
    ancestry = Ancestry(tree, source, History(root, source))
    ours = ancestry.overlay_files("HEAD")
    overlays = _overlays(ancestry, root, source, ours)
    every = [texts for _, texts in overlays]
    rels = list(dict.fromkeys(chain(patches.paths(source), *every, ours)))
    stock = ancestry.stock(rels)
    now = tree.work(rels) if of_work_tree else tree.texts("HEAD", rels)
    fresh, misfits = patches.overlay(source, stock)

    def score(overlay: Overlay) -> int:
        return sum(text == now[r] != stock[r] for r, text in overlay[1].items())

    name, laid = max([(None, {}), *overlays], key=score)
    # A commit in the middle of the stack has an earlier form of a file.
    every += [fresh, *(texts for _, texts in patches.commits(source, stock, fresh))]
    overlaid: dict[str, list[bytes]] = {rel: [] for rel in rels}
    for texts in every:
        for rel, text in texts.items():
            if text is not None:
                overlaid[rel].append(text)
    plan = CheckoutPlan(
        source=source,
        new=fresh,
        misfits=misfits,
        base=dict(stock),
        now=now,
        edited=[],
        laid=laid,
        laid_name=name,
        ancestry=ancestry,
        stock=stock,
        fresh=fresh,
        overlaid=overlaid,
        taken=taken.read(tree),
        owned=dict(now),
    )
    for rel in rels:
        plan.owned[rel], plan.base[rel] = plan.parts(rel, now[rel])
        if not plan.is_known(rel, plan.owned[rel]):
            plan.edited.append(rel)
    if plan.base != stock:
        plan.new, plan.misfits = patches.overlay(source, plan.base)
    return plan


def _overlays(
    ancestry: Ancestry, root: Path, source: Source, ours: files.Texts
) -> list[Overlay]:
    """Each overlay that was applied here or is committed: its name and texts."""
    records = ancestry.records()
    overlays = [(name, _texts_of(ancestry, [c])) for c, name in records.items()]
    # A clone, or a rebased branch: the commits name the overlay.
    commits = ancestry.named(f"{ancestry.base()}..HEAD")
    name = next(iter(commits.values()), None)
    sources = [payload.at(root, name)] if name else []
    if not any(sources) and commits and name not in records.values():
        # Not known here: its commits have its texts.
        texts = _texts_of(ancestry, [*reversed(commits)])
        paths = {*patches.paths(source)}
        texts = {r: t for r, t in texts.items() if r in paths or is_muons(r)}
        overlays.append((name, texts))
    if ours and not any(sources):
        # A squash merge, or commits that were reworded: the texts name it.
        sources = [payload.at(root, c) for c in ancestry.history.closest(ours)]
    for each in filter(None, sources):
        stock = ancestry.stock(patches.paths(each))
        overlays.append((each.name, patches.overlay(each, stock)[0]))
    return overlays


def _texts_of(ancestry: Ancestry, commits: list[str]) -> files.Texts:
    """The texts that these commits brought, oldest first, over the present base."""
    tree = ancestry.tree
    texts: dict[str, bytes | None] = {}
    for commit in commits:
        rels = tree.changed(f"{commit}^", commit)
        was, now = tree.texts(f"{commit}^", rels), tree.texts(commit, rels)
        for rel, stock in ancestry.stock(rels).items():
            old, text = was[rel], now[rel]
            if is_muons(rel):
                texts[rel] = text
            elif rel not in texts:  # later ones may have changes of somebody's
                # So may that commit's base, and the present one may lack them.
                if stock and old and text and stock != old:
                    text = git.merged(stock, old, text)[0]
                texts[rel] = text
    return texts


def has_edits(here: bytes, was: bytes, theirs: bytes) -> bool:
    """Whether ``here`` has all that ``theirs`` changed."""
    return git.merged(here, was, theirs) == (here, True)


def is_muons(rel: str) -> bool:
    named = rel.startswith(payload.TOPS) and "muon" in rel and payload.is_source(rel)
    return named or rel in ADDED
