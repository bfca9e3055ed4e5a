"""Compares a checkout with its base, its overlay and this repository, and finds edits."""

import dataclasses
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from . import files, git, patches, payload, taken
from .ancestry import Ancestry
from .history import History
from .payload import Source
from .taken import Taken
from .target import Plan
from .worktree import Worktree


class Overlay(NamedTuple):
    name: str | None  # its commit here
    texts: files.Texts
    # Those of each commit of its series. A file has earlier forms before the last one.
    commits: list[files.Texts]


@dataclasses.dataclass
class CheckoutPlan(Plan):
    ancestry: Ancestry
    stock: dict[str, bytes | None]  # the base's texts, without changes of the user's
    fresh: dict[str, bytes]  # with this repository's overlay on them
    overlaid: dict[str, list[bytes]]  # the overlays' texts
    taken: dict[str, Taken]
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
        if rel not in self.fresh:
            return False
        if rel in self.taken and text == self.taken[rel].theirs and self.is_kept(rel):
            return True
        return rel in self.laid and has_edits(self.here(rel), self.was(rel), text)

    def here(self, rel: str) -> bytes:
        """The text with this repository's overlay."""
        return self.fresh.get(rel, self.stock.get(rel)) or b""

    def was(self, rel: str) -> bytes:
        """The text with the overlay that is there."""
        return self.laid.get(rel, self.stock.get(rel)) or b""

    def merge_base(self, rel: str) -> bytes:
        """The text from which `pull` counts edits on both sides."""
        here, was, last = self.here(rel), self.was(rel), self.taken.get(rel)
        if last and last.was == was:
            # A later edit of the same lines may follow the one that was taken.
            if self.is_kept(rel) or has_edits(here, was, last.theirs):
                return last.theirs
        return was

    def is_kept(self, rel: str) -> bool:
        """Whether this repository has dealt with the edit that `pull` took last.

        It may have changed these lines since.
        """
        last, here = self.taken[rel], self.here(rel)
        if payload.has_markers(here):
            return False
        if last.is_conflict:
            return here != last.here  # it was resolved
        return self.ancestry.history.has_text(self.place(rel), last.written)

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
    every: list[files.Texts] = []
    for overlay in overlays:
        every += [overlay.texts, *overlay.commits]
    rels = list(dict.fromkeys(chain(patches.paths(source), *every, ours)))
    stock = ancestry.stock(rels)
    now = tree.work(rels) if of_work_tree else tree.texts("HEAD", rels)
    fresh, misfits = patches.overlay(source, stock)

    def score(overlay: Overlay) -> int:
        return sum(text == now[r] != stock[r] for r, text in overlay.texts.items())

    found = max([Overlay(None, {}, []), *overlays], key=score)
    # Files that only the work tree lacks were removed there.
    name, laid = found.name, _state_of(found, stock, tree.texts("HEAD", rels))
    every += [fresh, *_commits_of(source, stock, fresh)]
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
    """The overlays that HEAD may have: their names and texts."""
    overlays: list[Overlay] = []
    commits = ancestry.named(f"{ancestry.base()}..HEAD")
    name = next(iter(commits.values()), None)
    sources = [payload.at(root, name)] if name else []
    if commits and not any(sources):
        # Not known here: its commits have its texts.
        texts = _texts_of(ancestry, [*reversed(commits)])
        paths = {*patches.paths(source)}
        texts = {r: t for r, t in texts.items() if r in paths or payload.is_muons(r)}
        overlays.append(Overlay(name, texts, []))
    if ours and not any(sources):
        # A squash merge, or commits that were reworded: the texts name it.
        sources = [payload.at(root, c) for c in ancestry.history.closest(ours)]
    for each in filter(None, sources):
        stock = ancestry.stock(patches.paths(each))
        texts, _ = patches.overlay(each, stock)
        overlays.append(Overlay(each.name, texts, _commits_of(each, stock, texts)))
    return overlays


def _state_of(overlay: Overlay, stock: files.Texts, head: files.Texts) -> files.Texts:
    """The overlay's texts after the commit of its series at which a fork may have stopped.

    A file has an earlier form there. An edit of that must not take what later commits bring for removed.
    """

    def score(state: files.Texts) -> int:
        expected = {rel: state.get(rel, stock[rel]) for rel in overlay.texts}
        return sum(text == head[rel] for rel, text in expected.items())

    states: list[files.Texts] = []
    so_far: files.Texts = {}
    for brought in overlay.commits:
        so_far = {**so_far, **brought}
        states.append(so_far)
    # Of equal ones the first: the whole overlay, and then the later states.
    return max([overlay.texts, *reversed(states)], key=score)


def _commits_of(
    source: Source, stock: files.Texts, texts: dict[str, bytes]
) -> list[files.Texts]:
    """The texts of each commit of that overlay's series."""
    if "stack.toml" not in source.patches:  # an old one
        return []
    return [dict(brought) for _, brought in patches.commits(source, stock, texts)]


def _texts_of(ancestry: Ancestry, commits: list[str]) -> files.Texts:
    """The texts that these commits brought, oldest first, over the present base."""
    tree = ancestry.tree
    texts: dict[str, bytes | None] = {}
    for commit in commits:
        rels = tree.changed(f"{commit}^", commit)
        was, now = tree.texts(f"{commit}^", rels), tree.texts(commit, rels)
        for rel, stock in ancestry.stock(rels).items():
            old, text = was[rel], now[rel]
            if payload.is_muons(rel):
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
