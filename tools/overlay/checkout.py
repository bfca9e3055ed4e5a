"""The overlay on a PyTorch git checkout, which keeps no record of it.

The history of this repository says which texts are the overlay's. Trees are built with an index
and objects of their own, and git brings them into the work tree. So what git refuses to lose is
not lost.
"""

import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from . import git, versions
from .errors import OverlayError, Refused, WrongTarget
from .payload import FOLDERS, Hunks, MUON, Ours, ROOT


# The commits that `apply` makes. A file belongs to the first one whose pattern is in its path.
COMMITS = {
    "c10d: a local group's name holds its ranks\n\nFixes #173608": "_c10d",
    "optim: Newton-Schulz as a module": "/(test)?_newton_schulz",
    "optim: distributed Muon\n\nEach matrix has one owner, which orthogonalizes it once.": "",
}
UPDATE = "optim: update distributed Muon"
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as they were without the overlay.'
# A stock _muon.py has none of these words. The overlays of former versions came in many
# commits, whose first forms of the file have the last two.
_OUR_MUON = re.compile(rb"distributed_config|from \._newton_schulz|_muon_formulas")
_NOTHING = "0" * 40


class Checkout:
    def __init__(self, where: str | Path, root: Path = ROOT) -> None:
        top = git.git(Path(where), "rev-parse", "--show-toplevel", check=False)
        self.root = Path(git.said(top.stdout))
        if top.returncode or not (self.root / "torch/__init__.py").exists():
            why = git.said(top.stderr) or "it has no torch/__init__.py"
            raise WrongTarget(
                f"{where} is not a PyTorch git checkout: {why}. "
                "Name a target: --checkout DIR or --python EXE"
            )
        self.ours = Ours(root)
        self.version = (self.root / "version.txt").read_text().strip()
        self.words = f"PyTorch {self.version} checkout {self.root}"
        self._git = f"\n  git -C {shlex.quote(str(self.root))} "
        # Nothing is written there before git moves the branch. New objects are in a scratch
        # folder, which goes when this process ends.
        self._scratch = tempfile.TemporaryDirectory(prefix="distributed-muon-")
        folders = []
        for each in self.root, root:
            folder = git.ask(each, "rev-parse", "--git-path", "objects")
            # This variable is a list, in which quotes keep a path with ":" whole.
            folders.append(json.dumps(str(each / folder), ensure_ascii=False))
        self._env = {
            "GIT_INDEX_FILE": f"{self._scratch.name}/index",
            "GIT_OBJECT_DIRECTORY": self._scratch.name,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.pathsep.join(folders),
        }
        self.head = self._ask("rev-parse", "--verify", "HEAD")
        self.tree = self._ask("rev-parse", "HEAD^{tree}")
        # Where `rebuild` makes a torch of these files and of an installed torch's compiled parts.
        place = git.ask(self.root, "rev-parse", "--git-path", "distributed-muon")
        self.importable = self.root / place
        self._survey()

    def _ask(self, *words: str, **options) -> str:
        return git.ask(self.root, *words, env=self._env, **options)

    def _text(self, blob: str) -> bytes:
        return git.text(self.root, blob, env=self._env)

    # What HEAD has of the overlay

    def _survey(self) -> None:
        blobs = git.tree(self.root, self.head, "torch", "test", "docs", env=self._env)
        self.files: dict[str, str] = {}  # the overlay's, and others of the same paths
        self.unknown: list[str] = []
        self.is_there = False
        for path, blob in blobs.items():
            if path not in self.ours.known or (path == MUON and self._is_stock(blob)):
                continue
            self.files[path] = blob
            if blob not in self.ours.known[path]:
                self.unknown.append(path)
            else:
                self.is_there = True
        self.patched = self.ours.hunks.keys() & blobs.keys()
        self.misfits: dict[str, str] = {}  # path -> the patch that does not fit

    def _is_stock(self, blob: str) -> bool:
        text = self._text(blob)
        return bool(text) and not _OUR_MUON.search(text)

    def stock_muon(self) -> str:
        """The blob of the newest ``_muon.py`` that is not the overlay's."""
        words = ("log", "-m", "--full-history", "--format=%H", self.head, "--", MUON)
        commits = {*self._ask(*words).split()}
        stock = [commit for commit in commits if self._is_stock(f"{commit}:{MUON}")]
        if not stock:
            raise WrongTarget(
                f"no commit of {self.words} has a {MUON} without the overlay. Fetch more:"
                f"{self._git}fetch --unshallow"
            )
        newest = self._ask("merge-base", "--independent", *stock).split()
        blobs = {self._ask("rev-parse", f"{each}:{MUON}") for each in newest}
        if len(blobs) > 1:
            ways = [f"{self._git}checkout {each} -- {MUON}" for each in newest]
            raise Refused(
                f"branches with different stock {MUON} were merged into {self.words}. Run "
                f"one of these, commit, and repeat the command:{''.join(ways)}"
            )
        return blobs.pop()

    # Trees

    def _set(self, blobs: dict[str, str]) -> None:
        """Put blobs into the scratch index."""
        lines = ""
        for path, blob in blobs.items():
            mode = 0 if blob == _NOTHING else 100644
            lines += f"{mode} {blob}\t{path}\0"
        self._ask("update-index", "-z", "--index-info", data=lines.encode())

    def _apply(self, hunks: Hunks, *words: str) -> bool:
        words = ("apply", "--cached", "--recount", "--whitespace=nowarn", *words)
        done = git.git(self.root, *words, data=hunks.text, env=self._env, check=False)
        return done.returncode == 0

    def _take_out(self, path: str) -> bool:
        """Take the hunks of the overlay, in whichever text, out of a file of the scratch index."""
        return any(self._apply(hunks, "-R") for hunks in self.ours.hunks[path])

    def without_overlay(self, *, has_muon: bool) -> str:
        """The tree of HEAD without the overlay and edits of it; ``has_muon``: with the stock one."""
        self._ask("read-tree", self.head)
        if self.is_there:
            blobs = dict.fromkeys(self.files, _NOTHING)
            if MUON in blobs and has_muon:
                blobs[MUON] = self.stock_muon()
            self._set(blobs)
        for path in self.patched:
            self._take_out(path)
        return self._ask("write-tree")

    def stages(self, *, has_muon: bool = False) -> list[tuple[str, str]]:
        """Message and tree of each commit of the overlay; ``has_muon``: after the stock one."""
        self.without_overlay(has_muon=has_muon)
        left = {*self.ours.files, *self.patched}
        made = []
        for message, pattern in COMMITS.items():
            paths = {path for path in left if re.search(pattern, path)}
            left -= paths
            files = self.ours.files
            self._set({path: files[path] for path in paths & files.keys()})
            for hunks in self.ours.patches:
                if hunks.path in paths and not self._apply(hunks):
                    self.misfits[hunks.path] = hunks.patch
            made.append((message, self._ask("write-tree")))
        return made

    # Commits

    def _commit(self, commits: list[tuple[str, str]], parent: str) -> str:
        """Make commits of these messages and trees after ``parent``; the last one."""
        for message, tree in commits:
            parent = self._ask("commit-tree", tree, "-p", parent, "-m", message)
        return parent

    def _give(self, place: Path, tip: str, base: str) -> None:
        """Copy the commits after ``base`` into a repository."""
        words = ("pack-objects", "--quiet", "--stdout", "--revs")
        data = f"{tip}\n^{base}\n".encode()
        pack = git.git(self.root, *words, data=data, env=self._env).stdout
        git.git(place, "unpack-objects", "-q", data=pack)

    def _move(self, commits: list[tuple[str, str]]) -> str:
        """Have git bring commits of these messages and trees; their names."""
        tip = self._commit(commits, self.head)
        self._give(self.root, tip, self.head)
        removed = self._remove_remains(tip)
        words = ("merge", "--ff-only", "--no-overwrite-ignore", "-q", tip)
        done = git.git(self.root, *words, check=False)
        why = git.said(done.stderr)
        if done.returncode == 1:  # git has moved nothing
            for file, text in removed.items():
                file.write_bytes(text)
            raise Refused(f"git refuses to change {self.words}:\n{why}")
        if done.returncode:
            raise OverlayError(
                f"git failed while it changed {self.words}:\n{why}\nRepeat the command"
            )
        return self._ask("log", "--reverse", "--format=%h %s", f"{self.head}..{tip}")

    def _remove_remains(self, commit: str) -> dict[Path, bytes]:
        """Remove what a killed git has left: files with the beginning of their new text.

        Only where the index still has HEAD's file. git writes missing files again.
        """
        listed = ("diff-index", "--cached", "--name-only", "-z", self.head)
        staged = {*git.names(self.root, *listed)}
        removed = {}
        words = ("diff-tree", "-r", self.head, commit)
        for path, blob in git.changes(self.root, *words):
            file = self.root / path
            if path in staged or file.is_symlink() or not file.is_file():
                continue
            text = file.read_bytes()
            # A file that the commit deletes has no new text.
            new = self._text(blob)
            if new and new.startswith(text.replace(b"\r\n", b"\n")):
                removed[file] = text
                file.unlink()
        return removed

    # Commands

    def apply(self, force: bool) -> str:
        """Apply the overlay to a checkout or an installed torch.

        A checkout gets commits, as from `git am`. An installed torch gets a folder next to it,
        which Python finds first. Neither loses changes of yours.
        """
        self.ours.refuse_changes()
        git.refuse_unfinished(self.root)
        if self.unknown and self.is_there:
            raise Refused(
                f"{self.words} has edits of the overlay that this repository lacks:\n  "
                + "\n  ".join(self.unknown)
                + "\n`pull` takes them into this repository. `revert`, then `apply`, drops them: "
                "they stay in the history"
            )
        own = [path for path in self.unknown if path in self.ours.files]
        if own:
            raise Refused(
                f"{self.words} has files of its own where the overlay adds some. Rename "
                "them with `git mv` and commit:\n  " + "\n  ".join(own)
            )
        stages = self.stages()
        _, whole = stages[-1]
        lines = self._warnings(force or whole == self.tree)
        if whole == self.tree:
            return "\n".join([*lines, f"{self.words} has the overlay; nothing to do"])
        if self.is_there:
            stages = [(UPDATE, whole)]
        trailer = f"\n\nMuon-Overlay: {self.ours.name}"
        made = self._move([(message + trailer, tree) for message, tree in stages])
        return "\n".join([*lines, f"applied to {self.words}, committed as", made])

    def _warnings(self, force: bool = True) -> list[str]:
        muon = b"" if self.is_there else self._text(f"{self.head}:{MUON}")
        return versions.warnings(self.version, self.misfits, muon, force)

    def revert(self) -> str:
        """Take the overlay out again.

        In a checkout, this is a commit. Also removes the folder of `rebuild --mode wheel`.
        """
        git.refuse_unfinished(self.root)
        tree = self.without_overlay(has_muon=True)
        if tree == self.tree:
            lines = [f"{self.words} has no overlay; nothing to do"]
        else:
            made = self._move([(REVERT, tree)])
            lines = [f"reverted {self.words}, committed as", made]
        shutil.rmtree(self.importable, ignore_errors=True)
        if self.unknown and self.is_there:
            paths = shlex.join(self.unknown)
            lines.append(
                "warning: this repository lacks edits of these files. They stay in the "
                f"history:{self._git}log -p -- {paths}"
            )
        return "\n".join(lines)

    def status(self) -> str:
        """Say which overlay a checkout or an installed torch has, and what differs."""
        _, tree = self.stages()[-1]
        lines = [self.words]
        if not self.is_there:
            lines.append("holds no overlay")
        elif tree == self.tree:
            lines.append("holds the overlay, as in this repository")
        else:
            lines.append(
                "holds another overlay than this repository. `apply` would change:"
            )
            words = ("diff", "--name-status", "--no-renames", self.head, tree)
            lines.append(self._ask(*words))
            for path in self.unknown:
                lines.append(f"edited there, `pull` takes it: {path}")
        for path, patch in self.misfits.items():
            lines.append(f"its lines are edited or do not fit: {path}, {patch}")
        return "\n".join(lines)

    def diff(self) -> str:
        """Show what `apply` would change in a checkout, as a patch."""
        _, tree = self.stages()[-1]
        words = ("diff", "--no-ext-diff", "--no-color", "--no-renames")
        return self._ask(*words, self.head, tree)

    def export(self, out: Path) -> str:
        """Write the overlay as mails for `git am`, one for each of its commits."""
        self.ours.refuse_changes()
        base = self._commit([(REVERT, self.without_overlay(has_muon=True))], self.head)
        tip = self._commit(self.stages(has_muon=True), base)
        out.mkdir(parents=True, exist_ok=True)
        mails = self._ask(
            "format-patch", "--no-cover-letter", "--no-renames", "--full-index",
            "-o", str(out), f"{base}..{tip}",
        )  # fmt: skip
        lines = self._warnings()
        if self.is_there and self.unknown:
            lines.append("the mails lack edits of this checkout: `pull` takes them")
        use = f"git am {shlex.join(mails.splitlines())}"
        return "\n".join([*lines, "on a branch without the overlay:", use])

    # Edits made in the checkout

    def pull(self) -> str:
        """Merge edits of the overlay that were made in a checkout into this repository.

        Committed edits and others. git merges them, and leaves the commit to you.
        """
        ours = self.ours.root
        git.refuse_unfinished(self.root)
        git.refuse_unfinished(ours)
        if not self.is_there:
            return f"{self.words} holds no overlay"
        edits = self._edits()
        by_hand = self._edited_hunks()
        if not edits:
            lacks = f"{self.words} has no other edits of the overlay's files"
            return "\n".join([f"nothing to take: {lacks}", *by_hand])
        parent = self.ours.closest(self._given(edits))
        self._ask("read-tree", parent)
        self._set(edits)
        message = f"Edits of {self.words}"
        side = self._commit([(message, self._ask("write-tree"))], parent)
        self._give(ours, side, parent)
        command = ("merge", "--no-ff", "--no-commit", "-X", "no-renames", "-m", message)
        done = git.git(ours, *command, side, check=False)
        words = git.said(done.stdout + done.stderr)
        if git.git(ours, "rev-parse", "--verify", "MERGE_HEAD", check=False).returncode:
            raise Refused(f"git refuses to merge here:\n{words}")
        undo = f"\n  git -C {shlex.quote(str(ours))} merge --abort"
        took = "\n".join([f"took {path}" for path in sorted(edits)] + by_hand)
        if done.returncode:
            raise OverlayError(
                f"{words}\n{took}\nResolve the conflicts here and commit, or:{undo}"
            )
        return f"{took}\nReview and commit the merge here, or:{undo}"

    def _edits(self) -> dict[str, str]:
        """Path -> blob of the files of Muon in the work tree that this repository lacks.

        The scratch index then has the work tree.
        """
        self._ask("read-tree", self.head)
        places = [folder for folder in FOLDERS if (self.root / folder).is_dir()]
        self._ask("add", "--all", "--", *self.patched, *places, check=False)
        blobs = git.tree(self.root, self._ask("write-tree"), *places, env=self._env)
        edits = {}
        for path, blob in blobs.items():
            known = self.ours.known.get(path, ())
            if blob in known or not (known or self._is_muons(path)):
                continue
            if path != MUON or not self._is_stock(blob):
                edits[path] = blob
        return edits

    def _is_muons(self, path: str) -> bool:
        """Whether a new file is of Muon, and came after the overlay."""
        if not re.search(r"(muon|newton_schulz).*\.py$", path):
            return False
        words = ("log", "-1", "--diff-filter=A", "--format=%H", self.head, "--", path)
        commit = self._ask(*words)
        return not commit or bool(git.tree(self.root, commit, "torch/optim/muon.py"))

    def _edited_hunks(self) -> list[str]:
        """How to see edits of lines that a patch has brought, after ``_edits``."""
        return [
            f"lines of a patch were edited in {path}, or never fit. Make the edit in this "
            f"repository's patch, too:{self._git}log -p -- {path}"
            for path in sorted(self.patched)
            if not self._take_out(path)
        ]

    def _given(self, edits: dict[str, str]) -> dict[str, str]:
        """The overlay's texts of these files, from which the edits began."""
        given: dict[str, str] = {}
        log = ("log", "-m", "--format=", self.head, "--")
        for path, blob in git.changes(self.root, *log, *edits):
            if blob in self.ours.known.get(path, ()):
                given.setdefault(path, blob)
        return given
