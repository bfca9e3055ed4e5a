"""The overlay on a PyTorch git checkout, which keeps no record of it.

The history of this repository says which texts are the overlay's. Trees are built with an index
of their own, and git brings them into the work tree. So what git refuses to lose is not lost.
"""

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from . import git, payload, versions
from .errors import Refused, WorkFailed, WrongTarget
from .payload import COMMAND, Hunks, MUON, Ours


# The commits that `apply` makes. A file belongs to the first one with a pattern for it.
COMMITS = {
    "c10d: a local group's name holds its ranks\n\nFixes #173608": (
        "torch/distributed/distributed_c10d.py", "test/distributed/test_c10d_common.py",
    ),
    "optim: Newton-Schulz as a module": (
        "torch/optim/_newton_schulz*.py", "test/optim/test_newton_schulz.py",
    ),
    "optim: distributed Muon\n\nEach matrix has one owner, which orthogonalizes it once.": "*",
}  # fmt: skip
UPDATE = "optim: update distributed Muon"
REVERT = 'Revert "optim: distributed Muon"\n\nThe files are as they were without the overlay.'
# Where people add files of Muon.
_PLACES = (
    "torch/optim", "torch/testing/_internal/distributed",
    "test/optim", "test/distributed/optim",
)  # fmt: skip
# A stock _muon.py has none of these words. The overlays of former versions came in many
# commits, whose first forms of the file have the last two.
_OUR_MUON = re.compile(rb"distributed_config|from \._newton_schulz|_muon_formulas")
_NOTHING = "0" * 40
_EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # everybody's text


class Checkout:
    def __init__(self, where: Path, ours: Ours, scratch: Path, *, writes: bool) -> None:
        if not where.is_dir():
            raise WrongTarget(f"{where} is not a folder")
        top = git.git(where, "rev-parse", "--show-toplevel", check=False)
        self.root = Path(top.stdout.decode().removesuffix("\n") or where).resolve()
        for mark in ("version.txt", "torch/__init__.py", ".git"):
            if not (self.root / mark).exists():
                why = top.stderr.decode().strip() or f"it has no {mark}"
                raise WrongTarget(f"{where} is not a PyTorch git checkout: {why}")
        self.ours = ours
        self.version = (self.root / "version.txt").read_text().strip()
        self.words = f"PyTorch {self.version} checkout {self.root}"
        self.quoted = shlex.quote(str(self.root))
        self._scratch = scratch
        self._env = {"GIT_INDEX_FILE": str(scratch / "index")}
        if not writes:  # perhaps this user may not write there
            (scratch / "objects").mkdir()
            objects = git.ask(self.root, "rev-parse", "--git-path", "objects")
            self._env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(self.root / objects)
            self._env["GIT_OBJECT_DIRECTORY"] = str(scratch / "objects")
        self.head = self._ask("rev-parse", "--verify", "HEAD")
        self.tree = self._ask("rev-parse", "HEAD^{tree}")
        self._survey()

    def _ask(self, *words: str, **options) -> str:
        return git.ask(self.root, *words, env=self._env, **options)

    def _command(self, name: str, *more: str) -> str:
        """A line that runs as printed."""
        return (
            f"\n  {COMMAND} {shlex.join([name, '--checkout', str(self.root), *more])}"
        )

    # What HEAD has of the overlay

    def _survey(self) -> None:
        blobs = git.tree(self.root, self.head, "torch", "test", "docs")
        paths = {*self.ours.known, *self.ours.files, *self.ours.hunks}
        self.blobs = {path: blob for path, blob in blobs.items() if path in paths}
        known: list[str] = []
        others: list[str] = []
        for path, blob in self.blobs.items():
            if path in self.ours.hunks or (path == MUON and self._is_stock(blob)):
                continue
            (known if blob in self.ours.known.get(path, ()) else others).append(path)
        self.is_there = any(self.blobs[path] != _EMPTY for path in known)
        # Without the overlay, files of the same names are the fork's own.
        self.edited = others if self.is_there else []
        self.own = [path for path in others if path not in self.edited]
        self.whole = [*known, *self.edited]
        self.misfits: dict[str, str] = {}  # path -> the patch that does not fit

    def _is_stock(self, name: str) -> bool:
        (text,) = git.texts(self.root, [name], env=self._env)
        return text is not None and not _OUR_MUON.search(text)

    def stock_commit(self) -> str:
        """The newest commit that brought a ``_muon.py`` which is not the overlay's."""
        words = ("log", "-m", "--full-history", "--format=%H", self.head, "--", MUON)
        commits = {*self._ask(*words).split()}
        stock = [commit for commit in commits if self._is_stock(f"{commit}:{MUON}")]
        if not stock:
            raise WrongTarget(
                f"no commit of {self.words} has a {MUON} without the overlay. Fetch more:"
                f"\n  git -C {self.quoted} fetch --unshallow"
            )
        newest = self._ask("merge-base", "--independent", *stock).split()
        by_text = {self._ask("rev-parse", f"{c}:{MUON}"): c for c in newest}
        if len(by_text) > 1:
            ways = [f"checkout {commit} -- {MUON}" for commit in by_text.values()]
            lines = "".join(f"\n  git -C {self.quoted} {way}" for way in ways)
            raise Refused(
                f"branches with different stock {MUON} were merged into {self.words}. "
                f"Run one of these, commit, and repeat the command:{lines}"
            )
        return newest[0]

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

    def without_overlay(self, *, has_muon: bool = True) -> str:
        """The tree of HEAD without the overlay and edits of it; ``has_muon``: with the stock one."""
        self._ask("read-tree", self.head)
        blobs = dict.fromkeys(self.whole, _NOTHING)
        if MUON in blobs and has_muon:
            blobs[MUON] = self._ask("rev-parse", f"{self.stock_commit()}:{MUON}")
        self._set(blobs)
        for path, known in self.ours.hunks.items():
            for hunks in known:
                if path in self.blobs and self._apply(hunks, "-R"):
                    break
        return self._ask("write-tree")

    def stages(self) -> list[tuple[str, str]]:
        """Message and tree of each commit of the overlay, after ``without_overlay``."""
        ours = self.ours
        git.lend(ours.root, self.root, {*ours.files.values()}, env=self._env)
        left = {*ours.files, *(hunks.path for hunks in ours.patches)}
        made = []
        for message, patterns in COMMITS.items():
            paths = {path for path in left if any(fnmatch(path, p) for p in patterns)}
            left -= paths
            self._set({path: ours.files[path] for path in paths & ours.files.keys()})
            for hunks in ours.patches:
                if hunks.path in paths and hunks.path in self.blobs:
                    if not self._apply(hunks):
                        self.misfits[hunks.path] = hunks.patch
            made.append((message, self._ask("write-tree")))
        return made

    def with_overlay(self) -> str:
        """The tree of HEAD with this repository's overlay."""
        self.without_overlay(has_muon=False)
        return self.stages()[-1][1]

    def _commit(self, tree: str, parent: str, message: str) -> str:
        signs = git.git(
            self.root, "config", "--type=bool", "commit.gpgsign", check=False
        )
        words = ["-S"] if signs.stdout == b"true\n" else []
        return self._ask(
            "commit-tree", tree, "-p", parent, *words, data=f"{message}\n".encode()
        )

    def _move(self, commits: list[tuple[str, str]]) -> str:
        """Have git bring commits of these messages and trees; their names."""
        tip = self.head
        for message, tree in commits:
            tip = self._commit(tree, tip, message)
        removed = self._remove_remains(tip)
        words = ("merge", "--ff-only", "--no-overwrite-ignore", "-q", tip)
        done = git.git(self.root, *words, check=False)
        if done.returncode:
            for file, text in removed.items():
                file.write_bytes(text)
            message = done.stderr.decode(errors="replace").strip()
            raise Refused(f"git refuses to change {self.words}:\n{message}")
        return self._ask("log", "--reverse", "--format=%h %s", f"{self.head}..{tip}")

    def _remove_remains(self, commit: str) -> dict[Path, bytes]:
        """Remove what a killed git has left: files with the beginning of their new text.

        Only where the index still has HEAD's file. git writes missing files again.
        """
        index = {}
        for line in git.names(self.root, "ls-files", "--stage", "-z"):
            kind, _, path = line.partition("\t")
            index[path] = kind.split()[1]
        removed = {}
        words = ("diff-tree", "-r", self.head, commit)
        for path, before, after in git.changes(self.root, *words):
            file = self.root / path
            if index.get(path, _NOTHING) != before or file.is_symlink():
                continue
            if not file.is_file():
                continue
            text = file.read_bytes()
            (new,) = git.texts(self.root, [after], env=self._env)
            # An empty file that the commit deletes has no beginning of a new text.
            if new and new.startswith(text.replace(b"\r\n", b"\n")):
                removed[file] = text
                file.unlink()
        return removed

    # Commands

    def apply(self, *, force: bool) -> str:
        payload.refuse_conflicts(self.ours.root)
        git.refuse_unfinished(self.root)
        is_new = self.without_overlay(has_muon=False) == self.tree
        stages = self.stages()
        if self.edited:
            raise Refused(
                f"{self.words} has edits of the overlay that this repository lacks:\n  "
                + "\n  ".join(self.edited)
                + f"\n`pull` takes them into this repository:{self._command('pull')}"
                + "\nThese drop them. They stay in the history:"
                + self._command("revert")
                + self._command("apply")
            )
        own = [path for path in self.own if path in self.ours.files]
        if own:
            lines = ""
            for path in map(Path, own):
                words = shlex.join(
                    ["mv", str(path), str(path.with_stem(f"own_{path.stem}"))]
                )
                lines += f"\n  git -C {self.quoted} {words}"
            raise Refused(
                f"{self.words} has files of its own where the overlay adds some. Rename "
                f"them, for instance so, and commit:{lines}"
            )
        if stages[-1][1] == self.tree:
            done = f"{self.words} has the overlay already; nothing to do"
            return "\n".join([*self._problems("apply", force=True), done])
        warnings = self._problems("apply", force=force)
        if is_new:
            (muon,) = git.texts(self.root, [f"{self.head}:{MUON}"], env=self._env)
            warnings += versions.warning(muon)
        else:
            stages = [(UPDATE, stages[-1][1])]
        trailer = f"\n\nMuon-Overlay: {self.ours.commit}"
        made = self._move([(message + trailer, tree) for message, tree in stages])
        return "\n".join([*warnings, f"applied to {self.words}, committed as", made])

    def _problems(self, command: str, *, force: bool, more: tuple = ()) -> list[str]:
        """Warnings; an error unless the user forces the command."""
        names = [f"{self.head}:{path}" for path in versions.STOCK]
        texts = git.texts(self.root, names, env=self._env)
        problems = versions.problems(
            self.version, dict(zip(versions.STOCK, texts)), self.misfits
        )
        if problems and not force:
            again = self._command(command, "--force", *more)
            raise WrongTarget("\n".join([*problems, f"This goes on:{again}"]))
        return problems

    def revert(self) -> str:
        git.refuse_unfinished(self.root)
        tree = self.without_overlay()
        if tree == self.tree:
            lines = [f"{self.words} has no overlay; nothing to do"]
        else:
            made = self._move([(REVERT, tree)])
            lines = [f"reverted {self.words}, committed as", made]
        count = self.give_back()
        if count:
            lines.append(f"removed {count} links to compiled parts")
        if self.edited:
            lines += [
                "warning: this repository lacks edits of these files. They stay in the history:",
                f"  git -C {self.quoted} log -p -- {shlex.join(self.edited)}",
            ]
        return "\n".join(lines)

    def status(self) -> str:
        tree = self.with_overlay()
        lines = [self.words]
        if not self.is_there and self.without_overlay() == self.tree:
            lines.append("holds no overlay")
        elif tree == self.tree and not self.edited:
            lines.append("holds the overlay, as in this repository")
        else:
            lines.append(
                "holds another overlay than this repository. `apply` would change:"
            )
            words = ("diff", "--name-status", "--no-renames", self.head, tree)
            lines.append(self._ask(*words))
        for path in self.edited:
            lines.append(f"edited there, `pull` takes it: {path}")
        for path, patch in self.misfits.items():
            lines.append(f"its lines are edited or do not fit: {path}, {patch}")
        return "\n".join(lines)

    def diff(self) -> bytes:
        """The changes that ``apply`` would make."""
        words = ("diff", "--no-ext-diff", "--no-color", "--no-renames", self.head)
        return git.git(self.root, *words, self.with_overlay(), env=self._env).stdout

    def export(self, out: Path, *, force: bool) -> str:
        """Write mails for ``git am``, one for each commit of the overlay."""
        payload.refuse_conflicts(self.ours.root)
        tree = self.without_overlay()
        base = tip = self._commit(tree, self.head, REVERT)
        stages = self.stages()
        warnings = self._problems("export", force=force, more=("--out", str(out)))
        if any(out.glob("*.patch")):  # `git am` would take them, too
            raise Refused(f"{out} has mails already: name another folder")
        for message, each in stages:
            tip = self._commit(each, tip, message)
        out.mkdir(parents=True, exist_ok=True)
        mails = self._ask(
            "format-patch", "--no-renames", "--full-index", "--binary", "--no-signature",
            "--suffix=.patch", "--subject-prefix=PATCH", "-o", str(out), f"{base}..{tip}",
        )  # fmt: skip
        if self.edited:
            warnings.append("the mails lack edits of this checkout: `pull` takes them")
        trees = self._ask("log", "-n200", "--format=%T %H", self.head).split("\n")
        same = [line.split()[1] for line in trees if line.startswith(tree)]
        where = same[0] if same else "the commit that `revert` makes"
        return "\n".join(
            [*warnings, mails, f"for {where}: git am {shlex.quote(str(out))}/*.patch"]
        )

    # Edits made in the checkout

    def pull(self) -> str:
        """Begin a merge of the checkout's edits in this repository."""
        ours = self.ours.root
        git.refuse_unfinished(self.root)
        git.refuse_unfinished(ours)
        edits = self._edits()
        if not edits:
            return f"nothing to take: {self.words} has no other edits of the overlay's files"
        parent = self.ours.closest(self._given(edits))
        git.lend(self.root, ours, {*edits.values()}, source_env=self._env)
        env = {"GIT_INDEX_FILE": str(self._scratch / "pulled")}
        git.git(ours, "read-tree", parent, env=env)
        lines = "".join(f"100644 {blob}\t{path}\0" for path, blob in edits.items())
        command = ("update-index", "-z", "--index-info")
        git.git(ours, *command, data=lines.encode(), env=env)
        tree = git.ask(ours, "write-tree", env=env)
        message = f"Edits of {self.words}"
        side = git.ask(ours, "commit-tree", tree, "-p", parent, "-m", message)
        command = ("merge", "--no-ff", "--no-commit", "-X", "no-renames", "-m", message)
        done = git.git(ours, *command, side, check=False)
        words = (done.stdout + done.stderr).decode(errors="replace").strip()
        begun = ("rev-parse", "--verify", "-q", "MERGE_HEAD")
        if git.git(ours, *begun, check=False).returncode:
            raise Refused(f"git refuses to merge here:\n{words}")
        undo = f"\n  git -C {shlex.quote(str(ours))} merge --abort"
        if done.returncode:
            raise WorkFailed(
                f"{words}\nResolve the conflicts here and commit, or:{undo}"
            )
        took = [f"took {path}" for path in sorted(edits)]
        return "\n".join([*took, f"Review and commit the merge here, or:{undo}"])

    def _edits(self) -> dict[str, str]:
        """Path -> blob of the files of Muon in the work tree that this repository lacks."""
        if not self.is_there:
            return {}
        # A copy knows which files are unchanged.
        index = self.root / git.ask(self.root, "rev-parse", "--git-path", "index")
        shutil.copyfile(index, self._env["GIT_INDEX_FILE"])
        places = [place for place in _PLACES if (self.root / place).is_dir()]
        git.git(self.root, "add", "--all", "--", *places, env=self._env, check=False)
        blobs = git.tree(self.root, self._ask("write-tree"), *places, env=self._env)
        edits = {}
        for path, blob in blobs.items():
            known = self.ours.known.get(path)
            if known is None:
                is_muons = re.search("muon|newton_schulz", path)
                is_edit = (
                    bool(is_muons) and payload.is_source(path) and self._is_new(path)
                )
            else:
                is_edit = blob not in known and not (
                    path == MUON and self._is_stock(blob)
                )
            if is_edit:
                edits[path] = blob
        return edits

    def _is_new(self, path: str) -> bool:
        """Whether a file came after the overlay."""
        words = ("log", "-1", "--diff-filter=A", "--format=%H", self.head, "--", path)
        commit = self._ask(*words)
        return not commit or bool(git.tree(self.root, commit, "torch/optim/muon.py"))

    def _given(self, edits: dict[str, str]) -> dict[str, str]:
        """The overlay's texts of these files, from which the edits began."""
        given: dict[str, str] = {}
        log = ("log", "-m", "--format=", self.head, "--")
        for path, *blobs in git.changes(self.root, *log, *edits):
            for blob in reversed(blobs):
                if blob in self.ours.known.get(path, ()):
                    given.setdefault(path, blob)
        return given

    # The compiled parts of an installed torch

    def borrow(self, torch: Path) -> None:
        """Link the libraries of that torch, and copy what else the checkout lacks."""
        own = [path for path in (self.root / "torch").glob("_C*.so") if path.is_file()]
        if any(not path.is_symlink() for path in own):
            raise Refused(f"{self.root} has a build of its own: {own[0].name}")
        self.give_back()
        kinds = ("--cached", "--others", "--exclude-standard", "-z")
        theirs = {*git.names(self.root, "ls-files", *kinds, "--", "torch")}
        for source in torch.rglob("*"):
            path = Path("torch", source.relative_to(torch))
            place = self.root / path
            if path.as_posix() in theirs or "__pycache__" in path.parts:
                continue
            if not source.is_file():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            # A build writes in place, and would change the installed torch through a link.
            if re.search(r"\.(so|a)(\.\d+)*$", path.name):
                place.symlink_to(source)
            else:
                shutil.copy(source, place)

    def give_back(self) -> int:
        """Remove the links again; their number."""
        tracked = {*git.names(self.root, "ls-files", "-z", "--", "torch")}
        count = 0
        for path in (self.root / "torch").rglob("*"):
            is_tracked = path.relative_to(self.root).as_posix() in tracked
            if path.is_symlink() and not is_tracked:
                if not path.resolve().is_relative_to(self.root):
                    path.unlink()
                    count += 1
        return count


@contextlib.contextmanager
def opened(
    where: str | Path, root: Path = payload.ROOT, *, writes: bool = False
) -> Iterator[Checkout]:
    with tempfile.TemporaryDirectory(prefix="distributed-muon-") as folder:
        yield Checkout(Path(where), Ours(root), Path(folder), writes=writes)
