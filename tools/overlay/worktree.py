"""A PyTorch git work tree: its base, its refs, and commits made without touching it."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from . import files, git
from .errors import Refused, WorkFailed, WrongTarget


# The overlay that was applied last, with a reflog of the ones before (a reverted one
# is followed by its base); and the one that a command is about to apply.
LAID, NEXT = "refs/worktree/muon/laid", "refs/worktree/muon/next"
# The overlay adds them, the first one in the first commit of its stack.
ADDED = ("torch/optim/_newton_schulz.py", "torch/optim/muon.py")
REPLACED, OURS = "torch/optim/_muon.py", b"._newton_schulz"  # what only ours imports
TRAILER = "Muon-Overlay"
# git's own unfinished work, by the file that says so.
UNDER_WAY = {
    "MERGE_HEAD": "merge",
    "rebase-merge": "rebase",
    "rebase-apply/rebasing": "rebase",
    "rebase-apply/applying": "am",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}
_NAME = ("-c", "user.name=Distributed Muon")
_IDENTITY = (*_NAME, "-c", "user.email=distributed-muon@example.invalid")


class Worktree:
    def __init__(self, where: str | Path) -> None:
        self.root = root = Path(where).expanduser().resolve()
        self.quoted = shlex.quote(str(root))
        lacks = f"{root} is not a PyTorch checkout"
        for rel in ("version.txt", "torch/__init__.py", REPLACED):
            if not (root / rel).is_file():
                raise WrongTarget(f"{lacks}: it has no {rel}")
        names = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "HEAD")
        done = git.git(root, "rev-parse", *names, check=False)
        found = done.stdout.decode().splitlines()
        if done.returncode or Path(found[0]).resolve() != root:
            # git's own words may name a setting, such as safe.directory.
            said = done.stderr.decode(errors="replace")
            raise WrongTarget(
                f"{lacks}: not the top of a git work tree\n{said}".rstrip()
            )
        self.git_dir = Path(found[1])  # of this work tree alone
        # It is relative to the folder that was asked.
        self.common = (root / found[2]).resolve()
        self.keep = self.git_dir / "muon_overlay"
        self._index = files.scratch(self.git_dir / "index")
        self._bases: dict[str, str] = {}
        self._overlays: dict[str, dict[str, bytes | None]] = {}

    def ask(self, *args: str, **how: Any) -> str:
        return git.text(self.root, *args, **how)

    def resolve(self, name: str) -> str:
        """The commit of that name; empty if the name is unknown."""
        return self.ask("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")

    def texts(self, commit: str, rels: list[str]) -> dict[str, bytes | None]:
        return git.texts(self.root, commit, rels)

    def refuse_if_busy(self) -> None:
        """git's own unfinished work comes first."""
        for name, what in UNDER_WAY.items():
            if (self.git_dir / name).exists():
                way = f"`git -C {self.quoted} {what} --abort` or --continue"
                raise Refused(f"a {what} is in progress in {self.root}: {way}")
        unmerged = {ln.split("\t")[1] for ln in git.lines(self.root, "ls-files", "-uz")}
        if unmerged:
            few = ", ".join(sorted(unmerged)[:3])
            raise Refused(f"{self.root} has unmerged files ({few}): `git add` them")

    def base(self, commit: str = "HEAD") -> str:
        """The newest commit in that history without the overlay."""
        found = self.resolve(commit)
        if found not in self._bases:
            self._bases[found] = self._find_base(found)
        return self._bases[found]

    def _find_base(self, found: str) -> str:
        parent = found
        if self._mark(found):
            adding = self.adding(found)
            parent = self.resolve(f"{adding}^") if adding else ""
            while parent and self.trailer(parent):  # an earlier commit of the stack
                parent = self.resolve(f"{parent}^")
        # `git commit -a` takes the files that the overlay replaces, and no added one.
        while parent and OURS in (self.texts(parent, [REPLACED])[REPLACED] or b""):
            parent = self.resolve(f"{parent}^")
        if not parent:
            raise WrongTarget(
                f"the history of {self.root} does not reach back to the commit before the "
                f"overlay. Fetch it:\n  git -C {self.quoted} fetch --unshallow"
            )
        # Upstream that was merged since is a newer base.
        merges = ("rev-list", "--first-parent", "--merges", f"{parent}..{found}")
        for merge in self.ask(*merges).split():
            other = self.resolve(f"{merge}^2")
            newer = self.ask("merge-base", parent, other) == parent
            if newer and not self._mark(other):
                return other
        return parent

    def _mark(self, commit: str) -> str:
        """The added file by which a commit shows that it has the overlay, if it has it."""
        found = self.texts(commit, ADDED)
        return next((rel for rel in ADDED if found[rel] is not None), "")

    def adding(self, commit: str) -> str:
        """The last commit that added the overlay."""
        newest = ("log", "-1", "--first-parent", "-m", "--no-renames", "--format=%H")
        return self.ask(*newest, "--diff-filter=A", commit, "--", self._mark(commit))

    def laid(self) -> list[str]:
        """The commits that were applied to this work tree, newest first."""
        log = self.ask("log", "--walk-reflogs", "--format=%H", "-n30", LAID, "--")
        names = [self.resolve(NEXT), self.resolve(LAID), *log.split()]
        return list(dict.fromkeys(filter(None, names)))

    def overlay(self, commit: str) -> dict[str, bytes | None]:
        """The texts that the commit changes on its base; empty for a base."""
        if commit not in self._overlays:
            rels = self.changed(self.base(commit), commit)
            self._overlays[commit] = self.texts(commit, rels)
        return self._overlays[commit]

    def trailer(self, commit: str) -> str | None:
        value = f"--format=%(trailers:key={TRAILER},valueonly)"
        words = self.ask("log", "-1", value, commit).split()
        return words[-1] if words and words[-1] != "unknown" else None

    def changed(self, base: str, commit: str) -> list[str]:
        names = ("diff", "--name-only", "--no-renames", "-z")
        return git.lines(self.root, *names, base, commit)

    def build(
        self, parent: str, commits: list[tuple[str, files.Texts]], name: str | None
    ) -> str:
        """The newest of those commits (message, texts); only objects are written."""
        named = git.works(self.root, "var", "GIT_COMMITTER_IDENT")
        command = () if named else _IDENTITY
        with files.scratch_folder() as scratch:
            env = {"GIT_INDEX_FILE": str(scratch / "index")}
            git.git(self.root, "read-tree", parent, env=env)
            for words, texts in commits:
                self._update(texts, parent, env)
                text = f"{words.strip()}\n\n{TRAILER}: {name or 'unknown'}\n".encode()
                made = ("commit-tree", self.ask("write-tree", env=env), "-p", parent)
                parent = self.ask(*command, *made, data=text, env=env, check=True)
        return parent

    def _update(self, texts: files.Texts, modes: str, env: dict[str, str]) -> None:
        """Put the texts into the index that ``env`` names."""
        listed = git.lines(self.root, "ls-tree", "-rz", modes, "--", *texts)
        mode = {ln.split("\t")[1]: ln.split()[0] for ln in listed}
        there = [rel for rel, text in texts.items() if text is not None]
        with files.scratch_folder() as scratch:
            git.put(scratch, texts)
            names = "".join(f"{scratch / rel}\n" for rel in there).encode()
            command = ("hash-object", "-w", "--no-filters", "--stdin-paths")
            blobs = self.ask(*command, data=names, check=True).split()
        entries = "".join(f"0 {'0' * 40}\t{rel}\0" for rel in texts.keys() - set(there))
        for rel, blob in zip(there, blobs, strict=True):
            entries += f"{mode.get(rel, '100644')} {blob}\t{rel}\0"
        update = ("update-index", "-z", "--index-info")
        git.git(self.root, *update, data=entries.encode(), env=env)

    def stage(self, texts: files.Texts) -> None:
        """Put the texts into the user's index: a new index replaces the old one whole.

        git's own lock would stay after a kill.
        """
        if not texts:
            return
        index, lock = self.git_dir / "index", self.git_dir / "index.lock"
        before = index.stat().st_mtime_ns
        shutil.copy2(index, self._index)
        env = {"GIT_INDEX_FILE": str(self._index)}
        self._update(texts, "HEAD", env)
        git.git(self.root, "update-index", "-q", "--refresh", check=False, env=env)
        if lock.exists() or before != index.stat().st_mtime_ns:
            self.forget_scrap()
            raise WorkFailed(
                f"another git command works in {self.root}, or one was killed and left "
                f"{lock}. Try again when it has ended"
            )
        os.replace(self._index, index)
        self.forget_scrap()

    def set_next(self, commit: str) -> None:
        git.git(self.root, "update-ref", NEXT, commit)

    def set_laid(self, commit: str) -> None:
        """The next overlay is applied."""
        if self.resolve(LAID) != commit:
            update = ("update-ref", "--create-reflog", "-m", "laid")
            git.git(self.root, *update, LAID, commit)
        self.forget_next()

    def forget_next(self) -> None:
        git.git(self.root, "update-ref", "-d", NEXT)

    def forget_scrap(self) -> None:
        """Remove what a killed command left in the git directory."""
        exclude = files.scratch(self.common / "info" / "exclude")
        locks = [Path(f"{name}.lock") for name in (self._index, LAID, NEXT)]
        halves = self.keep.glob("*.muon-new")
        for path in (exclude, self._index, *locks, *halves):
            (self.git_dir / path).unlink(missing_ok=True)


def write_series(tree: Worktree, base: str, tip: str, out: Path) -> list[Path]:
    """``git format-patch``, away from every setting of the user."""
    out.mkdir(parents=True, exist_ok=True)
    # Numbers may have moved since an earlier export: `git am out/*` takes all of them.
    for old in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        if old.is_file() and old.read_bytes().rstrip().endswith(b"-- \noverlay"):
            old.unlink()
    with files.scratch_folder() as scratch:
        git.git(scratch, "init", "-q", "--bare", env=git.ALONE)
        alternates = scratch / "objects" / "info" / "alternates"
        alternates.write_text(f"{tree.common / 'objects'}\n")
        command = ("format-patch", "--no-renames", "--full-index", "--binary")
        more = ("--signature=overlay", "-o", str(out), f"{base}..{tip}")
        mails = git.text(scratch, *command, *more, env=git.ALONE, check=True)
        return [Path(mail) for mail in mails.splitlines()]
