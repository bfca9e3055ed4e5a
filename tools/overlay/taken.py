"""The record of `pull`: it takes no edit twice."""

import dataclasses

from . import files, payload
from .history import History
from .worktree import TAKEN, Worktree


@dataclasses.dataclass
class Taken:
    theirs: files.Texts  # the checkout's texts
    here: files.Texts  # this repository's before, where a conflict was shown
    written: files.Texts  # this repository's after, files and patches

    def is_kept(self, rel: str, place: str, here: bytes, history: History) -> bool:
        """Whether this repository has dealt with that edit, whatever it has changed since.

        ``place`` is the file of this repository that has the text of ``rel``, or its hunks.
        """
        if payload.has_markers(here):
            return False
        if history.has_text(place, self.written.get(place)):
            return True
        # Somebody has resolved the conflict since.
        shown = self.here.get(rel)
        return shown is not None and here != shown


def read(tree: Worktree) -> Taken:
    taken = tree.resolve(TAKEN)
    if not taken:
        return Taken({}, {}, {})
    # Each of these commits adds one kind of texts.
    written, here, base = (f"{taken}~{back}" for back in (1, 2, 3))
    return Taken(
        theirs=tree.texts(taken, tree.changed(base, taken)),
        here=tree.texts(here, tree.changed(base, here)),
        written=tree.texts(written, tree.changed(here, written)),
    )


def record(tree: Worktree, base: str, taken: Taken) -> None:
    commits = [
        ("here", taken.here),
        ("written", taken.written),
        ("theirs", taken.theirs),
    ]
    made = tree.build(base, commits, None, record=True)
    tree.update_refs(f"update {TAKEN} {made}\n")
