"""A PyTorch git work tree: its base, its refs, and how git lays texts into it."""

import functools
import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from . import files, git
from .errors import Refused, WorkFailed, WrongTarget


# The overlay that was applied last, with a reflog of the ones before (a reverted one
# is followed by its base); and a step that a command has begun. Its tree is the index
# after the step. Its parents are the overlay that is applied then, the index and HEAD
# before the step, and, if the step commits, HEAD after it. An ended step is replaced by
# its second parent: a deletion locks all packed refs, and a killed git leaves the lock.
LAID, NEXT = "refs/worktree/muon/laid", "refs/worktree/muon/next"
# The files that `pull` took, from which the next one begins.
PULLED = "refs/worktree/muon/pulled"
# The overlay adds some files, of which a fork may have its own, and replaces one.
ADDED = tuple(
    f"torch/optim/{name}"
    for name in ("_newton_schulz.py", "muon.py", "_muon_engine/__init__.py")
)
REPLACED = "torch/optim/_muon.py"
# Each commit of this tool has it; that of a revert says "none". A merge that squashes
# them indents their messages.
TRAILER = "Muon-Overlay"
_OURS = rf"^ *{TRAILER}: "
# git's own unfinished work, by the file that says so.
UNDER_WAY = {
    "MERGE_HEAD": "merge",
    "rebase-merge": "rebase",
    "rebase-apply/rebasing": "rebase",
    "rebase-apply/applying": "am",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}
# The author of a record. A commit on a branch has the user's name and signature.
_NAMES = {"NAME": "Distributed Muon", "EMAIL": "distributed-muon@example.invalid"}
_NOBODY = {
    f"GIT_{who}_{key}": value
    for who in ("AUTHOR", "COMMITTER")
    for key, value in _NAMES.items()
}
_LOCK = b"distributed muon\n"  # git's own index.lock begins otherwise


class Worktree:
    def __init__(self, where: str | Path) -> None:
        self.root = root = Path(where).expanduser().resolve()
        self.quoted = shlex.quote(str(root))
        lacks = f"{root} is not a PyTorch checkout"
        for rel in ("version.txt", "torch/__init__.py"):
            if not (root / rel).is_file():
                raise WrongTarget(f"{lacks}: it has no {rel}")
        names = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "HEAD")
        done = git.git(root, "rev-parse", *names, check=False)
        answers = os.fsdecode(done.stdout).splitlines()
        if done.returncode or Path(answers[0]).resolve() != root:
            # git's own words may name a setting, such as safe.directory.
            words = done.stderr.decode(errors="replace")
            words = f"not the top of a git work tree\n{words}".rstrip()
            raise WrongTarget(f"{lacks}: {words}")
        # In the work tree it is missing if git was killed while it wrote.
        if not self.resolve(f"HEAD:{REPLACED}"):
            raise WrongTarget(f"{lacks}: it has no {REPLACED}")
        self.git_dir = Path(answers[1])  # of this work tree alone
        # It is relative to the folder that was asked.
        self.common = (root / answers[2]).resolve()
        self._index = files.scratch(self.git_dir / "index")
        self._env = {"GIT_INDEX_FILE": str(self._index)}
        self._history = functools.cache(self._read_history)
        # Files whose changes by a merged branch are unclear, and that branch.
        self.conflicts: dict[str, str] = {}

    def ask(self, *args: str, **options: Any) -> str:
        return git.text(self.root, *args, **options)

    def resolve(self, name: str) -> str:
        """The object of that name; empty if the name is unknown."""
        return self.ask("rev-parse", "--verify", "--quiet", name)

    def texts(self, commit: str, rels: list[str]) -> dict[str, bytes | None]:
        return git.texts(self.root, commit, rels)

    def work(self, rels: list[str]) -> dict[str, bytes | None]:
        """The texts of the work tree, as git would store them."""
        for folder in {self.root / f for r in rels for f in PurePosixPath(r).parents}:
            if folder.is_symlink():
                raise Refused(
                    f"{folder} is a symbolic link, where the overlay has a folder"
                )
        with git.scratch() as scratch:
            index = shutil.copy2(self.git_dir / "index", scratch)
            objects = self.borrow(scratch / "objects")
            env = {"GIT_INDEX_FILE": index, "GIT_OBJECT_DIRECTORY": str(objects)}
            self._take(rels, env)
            return git.texts(self.root, "", rels, env=env)

    def _take(self, rels: Iterable[str], env: dict[str, str]) -> None:
        """Put what the work tree has into the index that ``env`` names."""
        names = "".join(f"{rel}\0" for rel in rels).encode()
        # Not the entries of a sparse checkout, which are in the index alone.
        kinds = ("--add", "--remove", "--ignore-skip-worktree-entries")
        update = ("update-index", "-z", *kinds, "--stdin")
        git.git(self.root, *update, data=names, env=env)

    def borrow(self, folder: Path) -> Path:
        """An object directory that has this repository's objects, too."""
        (folder / "info").mkdir(parents=True, exist_ok=True)
        (folder / "info/alternates").write_bytes(
            os.fsencode(self.common / "objects") + b"\n"
        )
        return folder

    def refuse_if_busy(self) -> None:
        """git's own unfinished work comes first."""
        for name, command in UNDER_WAY.items():
            if (self.git_dir / name).exists():
                way = f"  git -C {self.quoted} {command} --"
                ways = f"finish or drop it:\n{way}continue\n{way}abort"
                raise Refused(f"git {command} is in progress in {self.root}: {ways}")
        unmerged = {ln.split("\t")[1] for ln in git.lines(self.root, "ls-files", "-uz")}
        if unmerged:
            add = f"git -C {self.quoted} add -- {shlex.join(sorted(unmerged))}"
            raise Refused(f"{self.root} has unmerged files. Resolve them:\n  {add}")

    # The history: which commits have the overlay, and what was there before.

    def base(self, commit: str = "HEAD") -> str:
        """The newest commit in that history without the overlay."""
        return self._history(self.resolve(f"{commit}^{{commit}}"))[0]

    def _read_history(self, tip: str) -> tuple[str, list[tuple[str, str]]]:
        """The base, and (merge, branch) of other branches without the overlay."""
        base, others = self._before(tip), []
        merges = ("rev-list", "--first-parent", "--merges", "--reverse")
        for merge in self.ask(*merges, f"{base}..{tip}").split():
            for other in self.ask("rev-parse", f"{merge}^@").split()[1:]:
                # Upstream that was merged since, or what a topic's overlay is on. The
                # base never moves backward.
                other = self.base(other)
                base = other if self._is_ancestor(base, other) else base
                others.append((merge, other))
        return base, others

    def _is_ancestor(self, old: str, new: str) -> bool:
        return git.works(self.root, "merge-base", "--is-ancestor", old, new)

    def _before(self, tip: str) -> str:
        """The parent of the first commit of the overlay on this branch, or ``tip``."""
        newest = ("log", "-1", "--first-parent", "-m", "--no-renames", "--format=%H")
        parent, adding = tip, ""
        for mark in filter(lambda rel: self.resolve(f"{tip}:{rel}"), ADDED):
            added = (*newest, "--diff-filter=A", tip, "--", mark)
            first = self.ask(*added, check=True)
            before = self.resolve(f"{first}^")
            since = [first, *[f"^{before}"] * bool(before)]
            if self.named(*since) or self.resolve(f"{first}:{mark}") in self._by_hand:
                parent, adding = before, first
                break
            if not before:
                self._refuse_shallow()
        # An earlier commit of the stack, or `git commit` of a replaced file alone.
        while parent and (
            (adding and self.named("--no-walk", parent))
            or self.resolve(f"{parent}:{REPLACED}") in self._by_hand
        ):
            parent = self.resolve(f"{parent}^")
        if not parent:
            self._refuse_shallow()
            raise WrongTarget(
                f"{self.root} has the overlay since its first commit: nothing says "
                "what was there before"
            )
        return parent

    def _refuse_shallow(self) -> None:
        if git.is_shallow(self.root):
            raise WrongTarget(
                f"the history of {self.root} does not reach back to the commit before the "
                f"overlay. Fetch it:\n  git -C {self.quoted} fetch --unshallow"
            )

    def named(self, *which: str) -> dict[str, str | None]:
        """The commits among these that bring an overlay, newest first, with its name."""
        asked = ("log", "--format=%x01%H%n%B", "-E", f"--grep={_OURS}", *which)
        out = self.ask(*asked, check=True)
        entries = (entry.partition("\n") for entry in out.split("\1")[1:])
        names = {c: re.findall(f"(?m){_OURS}(\\S+)", text) for c, _, text in entries}
        last = {c: each[-1] for c, each in names.items() if each[-1] != "none"}
        return {c: None if name == "unknown" else name for c, name in last.items()}

    @functools.cached_property
    def _by_hand(self) -> set[str]:
        """The texts that were applied here: a commit by hand has these, and no trailer."""
        # After a revert, a base is a record, too. Its files are nobody's overlay.
        raw = ("diff-tree", "-r", "--no-renames", "--no-abbrev", "--diff-filter=AM")
        out = (
            self.ask(*raw, f"{c}^", c, "--", *ADDED, REPLACED) for c in self.records()
        )
        return {line.split()[3] for text in out for line in text.splitlines()}

    def stock(self, rels: list[str]) -> dict[str, bytes | None]:
        """The texts without the overlay: of the base, with what other branches brought."""
        base, others = self._history(self.resolve("HEAD"))
        texts = self.texts(base, rels)
        for merge, other in others:
            if self._is_ancestor(other, base):
                continue
            was = self.texts(self.ask("merge-base", f"{merge}^1", other), rels)
            for rel, theirs in self.texts(other, rels).items():
                ours, old = texts[rel], was[rel]
                if theirs and not (ours or old):
                    texts[rel] = theirs
                elif ours and old and theirs and theirs not in (old, ours):
                    text, clean = git.merged(ours, old, theirs)
                    texts[rel] = text if clean else ours
                    self.conflicts |= {} if clean else {rel: other}
        return texts

    def laid(self) -> list[str]:
        """The commits that were applied to this work tree, newest first."""
        log = self.ask("log", "--walk-reflogs", "--format=%H", "-n30", LAID, "--")
        names = [*self.begun()[1:2], self.resolve(LAID), *log.split()]
        return list(dict.fromkeys(filter(None, names)))

    def records(self) -> dict[str, str | None]:
        """The overlays that were applied here, newest first, with their names."""
        laid = self.laid()
        return self.named("--no-walk=unsorted", *laid) if laid else {}

    def changed(self, base: str, commit: str) -> list[str]:
        names = ("diff-tree", "-r", "--name-only", "--no-renames", "-z")
        return git.lines(self.root, *names, base, commit)

    # Writing: git's own two-tree merge brings texts into the work tree.

    def build(
        self,
        parent: str,
        commits: list[tuple[str, files.Texts]],
        name: str | None,
        *,
        record: bool = False,
    ) -> str:
        """The newest of those commits (message, texts); only objects are written."""
        for words, texts in commits:
            words = f"{words.strip()}\n\n{TRAILER}: {name or 'unknown'}\n"
            tree = self._tree(parent, self.texts(parent, [*texts]), texts)
            parent = self._commit(tree, [parent], words, record=record)
        return parent

    def _tree(self, tree: str, before: files.Texts, texts: files.Texts) -> str:
        """That tree, which has the texts ``before``, with these texts."""
        patch = git.difference(before, texts, "--binary", "--full-index")
        with git.scratch() as scratch:
            env = {"GIT_INDEX_FILE": str(scratch / "index")}
            git.git(self.root, "read-tree", tree, env=env)
            if patch:
                apply = ("apply", "--cached", "--whitespace=nowarn")
                git.git(self.root, *apply, data=patch, env=env)
            return self._write_tree(env)

    def _write_tree(self, env: dict[str, str]) -> str:
        # The objects of a partial clone are elsewhere.
        return self.ask("write-tree", "--missing-ok", env=env, check=True)

    def _commit(
        self, tree: str, parents: list[str], words: str, *, record: bool
    ) -> str:
        named = [word for parent in parents for word in ("-p", parent)]
        signs = self.ask("config", "--type=bool", "commit.gpgsign") == "true"
        command = ("commit-tree", tree, *named, *["-S"] * (signs and not record))
        env = _NOBODY if record else {}
        return self.ask(*command, data=words.encode(), env=env, check=True)

    def forget_scrap(self) -> None:
        """Remove what a killed command left in the git directory."""
        lock = self.git_dir / "index.lock"
        if lock.is_file() and lock.read_bytes() == _LOCK:
            lock.unlink()
        locks = [Path(f"{name}.lock") for name in (self._index, LAID, NEXT, PULLED)]
        for path in (self._index, *locks):
            (self.git_dir / path).unlink(missing_ok=True)

    def lay(
        self, texts: files.Texts, now: files.Texts, laid: str, head: str = ""
    ) -> None:
        """Bring the texts there, and HEAD to that commit; ``laid`` is applied then.

        ``now`` is what the caller found at these paths. git refuses changes from here on.
        It works on a copy of the user's index, which replaces that at the end, under the
        lock that git would take.
        """
        was, env = self.resolve("HEAD"), self._env
        index, lock = self.git_dir / "index", self.git_dir / "index.lock"
        self._index.write_bytes(_LOCK)
        try:
            os.link(self._index, lock)
        except FileExistsError:
            raise WorkFailed(
                f"another git command works in {self.root}, or one was killed and left "
                f"{lock}. Try again when it has ended"
            ) from None
        try:
            self._index.unlink()
            shutil.copy2(index, self._index)
            self._take(texts, env)
            old = self._write_tree(env)
            found = self.texts(old, [*texts])
            if found != {rel: now[rel] for rel in texts}:
                raise WorkFailed(f"files in {self.root} changed meanwhile; try again")
            if head and not self._is_ancestor(was, head):
                raise WorkFailed(f"{self.root} has a new commit; try again")
            new = self._tree(old, found, texts)
            before = self._commit(old, [was], "before", record=True)
            parents = [laid, before, *[head] * bool(head)]
            step = self._commit(new, parents, "after", record=True)
            moves = f"update HEAD {head} {was}\n" * bool(head)
            self.update_refs(f"update {NEXT} {step}\n{moves}")
            git.git(self.root, "read-tree", "-m", "-u", old, new, env=env)
            os.replace(self._index, index)
        finally:
            self._index.unlink(missing_ok=True)
            lock.unlink()
            self.settle()

    def update_refs(self, lines: str) -> None:
        words = ("update-ref", "-m", "distributed muon", "--create-reflog", "--stdin")
        git.git(self.root, *words, data=lines.encode())

    def record(self, laid: str) -> None:
        """That overlay, or base, is applied."""
        if laid != self.resolve(LAID):
            self.update_refs(f"update {LAID} {laid}\n")

    def begun(self) -> list[str]:
        """The step that was begun, and its parents; empty if it has ended."""
        commits = self.ask("rev-list", "--parents", "-n1", NEXT, "--").split()
        return commits if len(commits) > 2 else []

    def settle(self) -> bool:
        """Record the step that was begun, or take it back if the index lacks it.

        Returns whether there was one. A file or a branch that was changed since is left.
        """
        if not (commits := self.begun()):
            return False
        step, laid, before, *head = commits
        rels, end = self.changed(before, step), f"update {NEXT} {before}\n"
        was, want, staged = (self.texts(c, rels) for c in (before, step, ""))
        if staged == want:
            self.update_refs(f"{end}update {LAID} {laid}\n")
            return True
        work, kept = self.work(rels), b""
        for rel in rels:
            # git was killed while it wrote: that is a beginning of the text.
            text, new = work[rel] or b"", want[rel] or b""
            is_beginning = new.startswith(text.replace(b"\r", b""))
            if not is_beginning or work[rel] == was[rel] or staged[rel] == want[rel]:
                continue
            if was[rel] is not None:
                kept += f"{rel}\0".encode()
            elif work[rel] is not None:  # first: it makes room on a full disk
                (self.root / rel).unlink()
                files.tidy(self.root / rel, self.root)
        if kept:
            paths = ("--pathspec-from-file=-", "--pathspec-file-nul")
            restore = ("restore", f"--source={before}", "--worktree", *paths)
            shutil.copy2(self.git_dir / "index", self._index)  # git locks that name
            git.git(self.root, *restore, data=kept, env=self._env)
            self._index.unlink()
        if [self.resolve("HEAD")] == head:
            end += f"update HEAD {self.resolve(f'{before}^')} {head[0]}\n"
        self.update_refs(end)
        return True
