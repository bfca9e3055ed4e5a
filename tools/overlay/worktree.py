"""A PyTorch git work tree: its texts, its refs, and how git moves it to a new commit."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from . import files, git
from .errors import Refused, WorkFailed, WrongTarget


# A step that a command has begun. Its parents are a commit of the index before the step,
# whose parent is HEAD before it, and HEAD after it. An ended step is replaced by its first
# parent: a deletion locks all packed refs, and a killed git leaves the lock.
STEP = "refs/worktree/muon/step"
# Each commit of this tool on a branch has this trailer, with the name of the overlay. Mails are
# for others, to whom it says nothing.
TRAILER = "Muon-Overlay"
REPLACED = "torch/optim/_muon.py"
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

    def ask(self, *args: str, **options: Any) -> str:
        return git.text(self.root, *args, **options)

    def resolve(self, name: str) -> str:
        """The object of that name; empty if the name is unknown."""
        return self.ask("rev-parse", "--verify", "--quiet", name)

    def is_ancestor(self, old: str, new: str) -> bool:
        return git.works(self.root, "merge-base", "--is-ancestor", old, new)

    def changed(self, base: str, commit: str) -> list[str]:
        names = ("diff-tree", "-r", "--name-only", "--no-renames", "-z")
        return git.lines(self.root, *names, base, commit)

    def texts(self, commit: str, rels: list[str]) -> dict[str, bytes | None]:
        return git.texts(self.root, commit, rels)

    def work(self, rels: list[str]) -> dict[str, bytes | None]:
        """The texts of the work tree, as git would store them."""
        for folder in {self.root / f for r in rels for f in PurePosixPath(r).parents}:
            if folder.is_symlink():
                raise Refused(
                    f"{folder} is a symbolic link, where the overlay has a folder"
                )
        with self.scratch_objects() as env:
            folder = Path(env["GIT_OBJECT_DIRECTORY"]).parent
            env["GIT_INDEX_FILE"] = shutil.copy2(self.git_dir / "index", folder)
            # A flag would have git take the index's text for that of the work tree.
            for rel, flag in self.hidden(rels).items():
                show = ("update-index", f"--no-{flag}", "--", rel)
                git.git(self.root, *show, env=env)
            self._take(rels, env)
            return git.texts(self.root, "", rels, env=env)

    def hidden(self, rels: list[str]) -> dict[str, str]:
        """The files whose changes git does not see, and the flag that hides them."""
        hidden = {}
        for line in git.lines(self.root, "ls-files", "-v", "-z", "--", *rels):
            tag, rel = line[0], line[2:]
            if tag.islower():
                hidden[rel] = "assume-unchanged"
            elif tag == "S" and os.path.lexists(self.root / rel):
                # Those of a sparse checkout are in the index alone.
                hidden[rel] = "skip-worktree"
        return hidden

    def _take(self, rels: Iterable[str], env: dict[str, str]) -> None:
        """Put what the work tree has into the index that ``env`` names."""
        names = "".join(f"{rel}\0" for rel in rels).encode()
        # Not the entries of a sparse checkout, which are in the index alone.
        kinds = ("--add", "--remove", "--ignore-skip-worktree-entries")
        update = ("update-index", "-z", *kinds, "--stdin")
        git.git(self.root, *update, data=names, env=env)

    @contextlib.contextmanager
    def scratch_objects(self) -> Iterator[dict[str, str]]:
        """Variables with which git writes its objects elsewhere, and reads those here, too."""
        with git.scratch() as folder:
            objects = folder / "objects"
            (objects / "info").mkdir(parents=True)
            ours = os.fsencode(self.common / "objects")
            (objects / "info/alternates").write_bytes(ours + b"\n")
            yield {"GIT_OBJECT_DIRECTORY": str(objects)}

    def refuse_if_busy(self) -> None:
        """git's own unfinished work comes first."""
        for name, command in UNDER_WAY.items():
            if (self.git_dir / name).exists():
                way = f"  git -C {self.quoted} {command} --"
                ways = f"finish or drop it:\n{way}continue\n{way}abort"
                raise Refused(f"git {command} is in progress in {self.root}: {ways}")
        entries = git.lines(self.root, "ls-files", "-uz")
        unmerged = {entry.split("\t")[1] for entry in entries}
        if unmerged:
            add = f"git -C {self.quoted} add -- {shlex.join(sorted(unmerged))}"
            raise Refused(f"{self.root} has unmerged files. Resolve them:\n  {add}")

    def refuse_if_shallow(self) -> None:
        if git.is_shallow(self.root):
            raise WrongTarget(
                f"the history of {self.root} does not reach back to the commit before the "
                f"overlay. Fetch it:\n  git -C {self.quoted} fetch --unshallow"
            )

    # Objects: a user sees no change.

    def build(
        self,
        parent: str,
        commits: list[tuple[str, files.Texts]],
        trailer: str | None,
        *,
        env: dict[str, str] | None = None,
    ) -> str:
        """The newest of those commits (message, texts); only objects are written."""
        env = env or {}
        for words, texts in commits:
            words = f"{words.strip()}\n"
            if trailer is not None:
                words += f"\n{TRAILER}: {trailer}\n"
            tree = self._tree(parent, texts, env)
            parent = self._commit(tree, [parent], words, env=env)
        return parent

    def _tree(self, parent: str, texts: files.Texts, env: dict[str, str]) -> str:
        """The tree of that commit with these texts."""
        before = git.texts(self.root, parent, [*texts], env=env)
        patch = git.difference(before, texts, "--binary", "--full-index")
        with git.scratch() as scratch:
            env = env | {"GIT_INDEX_FILE": str(scratch / "index")}
            git.git(self.root, "read-tree", parent, env=env)
            if patch:
                apply = ("apply", "--cached", "--whitespace=nowarn")
                git.git(self.root, *apply, data=patch, env=env)
            return self._write_tree(env)

    def _write_tree(self, env: dict[str, str]) -> str:
        # The objects of a partial clone are elsewhere.
        return self.ask("write-tree", "--missing-ok", env=env, check=True)

    def _commit(
        self,
        tree: str,
        parents: list[str],
        words: str,
        *,
        env: dict[str, str],
        record: bool = False,
    ) -> str:
        """A record is a commit of this tool, without the user's name and signature."""
        command = ["commit-tree", tree]
        for parent in parents:
            command += ["-p", parent]
        # Not in mails, which have no place for a signature.
        if not record and not env:
            if self.ask("config", "--type=bool", "commit.gpgsign") == "true":
                command.append("-S")
        env = env | _NOBODY if record else env
        return self.ask(*command, data=words.encode(), env=env, check=True)

    # Writing: git's own two-tree merge brings a commit into the work tree.

    def forget_scrap(self) -> None:
        """Remove what a killed command left in the git directory."""
        lock = self.git_dir / "index.lock"
        if lock.is_file() and lock.read_bytes() == _LOCK:
            lock.unlink()
        locks = [Path(f"{name}.lock") for name in (self._index, STEP)]
        for path in (self._index, *locks):
            (self.git_dir / path).unlink(missing_ok=True)

    def move(self, head: str, was: str, texts: files.Texts, now: files.Texts) -> None:
        """Bring HEAD, the index and the work tree from ``was`` to that commit.

        ``now`` is what the caller found at the paths of ``texts``. git refuses other changes
        from here on. It works on a copy of the user's index, which replaces that at the
        end, under the lock that git would take.
        """
        env = self._env
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
            # A file may have its new text already: an edit that `pull` took.
            self._take(texts, env)
            before = self._write_tree(env)
            found = self.texts(before, [*texts])
            if found != {rel: now[rel] for rel in texts}:
                raise WorkFailed(f"files in {self.root} changed meanwhile; try again")
            before = self._commit(before, [was], "before", record=True, env={})
            after = self.resolve(f"{head}^{{tree}}")
            parents = [before, head]
            step = self._commit(after, parents, "after", record=True, env={})
            # git moves HEAD only if it still is that commit.
            self.update_refs(f"update {STEP} {step}\nupdate HEAD {head} {was}\n")
            git.git(self.root, "read-tree", "-m", "-u", was, head, env=env)
            os.replace(self._index, index)
        finally:
            self._index.unlink(missing_ok=True)
            lock.unlink()
            self.settle()

    def update_refs(self, lines: str) -> None:
        words = ("update-ref", "-m", "distributed muon", "--create-reflog", "--stdin")
        git.git(self.root, *words, data=lines.encode())

    def begun(self) -> list[str]:
        """The step that was begun, and its parents; empty if it has ended."""
        commits = self.ask("rev-list", "--parents", "-n1", STEP, "--").split()
        return commits if len(commits) > 2 else []

    def settle(self) -> bool:
        """End the step that was begun, or take it back if the index lacks it.

        Returns whether there was one. A file or a branch that was changed since is left.
        """
        if not (commits := self.begun()):
            return False
        _, before, head = commits
        was = self.resolve(f"{before}^")
        rels, end = self.changed(was, head), f"update {STEP} {before}\n"
        want = self.texts(head, rels)
        staged = self.texts("", rels)
        if staged == want:
            self.update_refs(end)
            return True
        self._restore(before, rels, want, staged)
        if self.resolve("HEAD") == head:
            end += f"update HEAD {was} {head}\n"
        self.update_refs(end)
        return True

    def _restore(
        self, before: str, rels: list[str], want: files.Texts, staged: files.Texts
    ) -> None:
        """Give back the files that git has written, or begun to write."""
        old, work, kept = self.texts(before, rels), self.work(rels), b""
        for rel in rels:
            # git was killed while it wrote: that is a beginning of the text.
            text, new = work[rel] or b"", want[rel] or b""
            is_beginning = new.startswith(text.replace(b"\r", b""))
            if not is_beginning or work[rel] == old[rel] or staged[rel] == want[rel]:
                continue
            if old[rel] is not None:
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
