"""A carrier's day: random histories of a fork, compared with what its carrier expects.

MUON_TEST_DAYS is the number of histories.
"""

import os
import random
import shutil

import pytest
from overlay.conftest import C10D, commit_all, copy_tools, everything, git, git_status
from overlay.conftest import MUON, OWN, run
from tools.overlay import patches, payload


DAYS = int(os.environ.get("MUON_TEST_DAYS", "2"))
OPERATIONS = 16
SGD, ADAM, DOC = "torch/optim/sgd.py", "torch/optim/adam.py", "docs/source/optim.md"
PART = "torch/optim/_muon_engine/part_{}.py"
FILES = (MUON, OWN, "torch/optim/_newton_schulz.py", PART.format(0), PART.format(1))
NOTES = {"notes.txt": b"mine", "torch/optim/notes_of_mine.py": b"mine"}


class Text:
    """A file of the overlay: the checkout edits its top, and this repository its end."""

    def __init__(self, rel, tops=(), ends=(), middle="# the middle"):
        self.rel, self.tops, self.ends, self.middle = rel, tops, ends, middle

    @property
    def data(self):
        body = [f"# {self.rel}, line {number}" for number in range(9)]
        body[4] = self.middle
        return "".join(f"{line}\n" for line in [*self.tops, *body, *self.ends]).encode()

    def edited(self, line):
        return Text(self.rel, (line, *self.tops), self.ends, self.middle)

    def newer(self, line):
        return Text(self.rel, self.tops, (*self.ends, line), self.middle)

    def joined(self, edited):
        """This repository's file with the edits of the checkout's."""
        return Text(self.rel, edited.tops, self.ends, self.middle)

    def with_middle(self, line):
        return Text(self.rel, self.tops, self.ends, line)


class Day:
    """A fork, this repository, and what each of them must have."""

    def __init__(self, seed, fork, ours, face, tmp_path):
        self.rng = random.Random(seed)
        self.fork, self.ours, self.face, self.tmp_path = fork, ours, face, tmp_path
        self.done = []  # for a failure's message
        self.here = {rel: Text(rel) for rel in FILES}
        self.write_here()
        commit_all(ours, "the overlay")
        # The fork's files without the overlay, and the overlay's files there.
        self.stock = self.texts()
        self.there = {}
        self.patches = {}
        git(fork, "branch", "upstream")
        for rel, text in NOTES.items():
            (fork / rel).write_bytes(text)

    # The state of the fork, and the expected one.

    def texts(self, commit="HEAD"):
        names = git(self.fork, "ls-tree", "-r", "--name-only", commit).splitlines()
        return payload.git.texts(self.fork, commit, names)

    def expected(self):
        texts = dict(self.stock)
        if self.there:
            source = payload.Source({}, self.patches, None)
            texts |= patches.overlay(source, self.stock)[0]
            texts |= {rel: text.data for rel, text in self.there.items()}
        return texts

    def check(self):
        texts, expected = self.texts(), self.expected()
        differs = {r for r in texts | expected if texts.get(r) != expected.get(r)}
        assert not differs, self.done
        lines = {f"?? {rel}" for rel in NOTES}
        assert {*git_status(self.fork).splitlines()} == lines, self.done
        for rel, text in NOTES.items():
            assert (self.fork / rel).read_bytes() == text
        shown = self.command("status").out
        word = "no overlay"
        if self.there:
            is_current = self.there.keys() == self.here.keys() and all(
                text.data == self.here[rel].data for rel, text in self.there.items()
            )
            word = "as in this repository" if is_current else "overlay"
        assert (
            f"holds {word}" in shown
            or f"overlay, {word}" in shown
            or (word == "overlay" and "no overlay" not in shown)
        ), (shown, self.done)

    def command(self, *words, code=0):
        done = self.face(words[0], "--checkout", self.fork, *words[1:], root=self.ours)
        assert done.code == code, (done, self.done)
        return done

    def write_here(self):
        for rel, text in self.here.items():
            (self.ours / rel).parent.mkdir(parents=True, exist_ok=True)
            (self.ours / rel).write_bytes(text.data)

    def commit_here(self):
        if git_status(self.ours):
            commit_all(self.ours, "work")

    def commit_there(self, message):
        git(self.fork, "commit", "-q", "-a", "-m", message)

    @property
    def lacks_edits(self):
        return any(
            {*text.tops} - {*(self.here[rel].tops if rel in self.here else ())}
            for rel, text in self.there.items()
        )

    # The operations.

    def apply(self):
        if self.lacks_edits:
            before = everything(self.fork)
            self.command("apply", code=3)
            assert everything(self.fork) == before
            return
        self.command("apply")
        self.there, self.patches = dict(self.here), payload.read(self.ours).patches

    def revert(self):
        self.command("revert")
        self.there = {}

    def newer(self):
        """This repository has a newer overlay; it may not be committed."""
        self.commit_here()
        rel = self.rng.choice([*self.here])
        self.here[rel] = self.here[rel].newer(f"# newer {len(self.done)}")
        if self.rng.random() < 0.3:
            new = PART.format(f"of_{len(self.done)}")
            self.here[new] = Text(new)
        removed = [rel for rel in self.here if "part_of" in rel]
        if removed and self.rng.random() < 0.3:
            gone = self.rng.choice(removed)
            if not (gone in self.there and self.there[gone].tops):
                del self.here[gone]
                (self.ours / gone).unlink(missing_ok=True)
        self.write_here()
        if self.rng.random() < 0.7:
            self.commit_here()

    def edit(self):
        """Somebody edits the overlay in the fork."""
        rels = [rel for rel in self.there if rel in self.here]
        if rels:
            rel = self.rng.choice(rels)
            self.there[rel] = self.there[rel].edited(f"# there {len(self.done)}")
            (self.fork / rel).write_bytes(self.there[rel].data)
            self.commit_there("an edit")

    def pull(self):
        self.command("pull")
        for rel, text in self.there.items():
            if rel in self.here and {*text.tops} - {*self.here[rel].tops}:
                self.here[rel] = self.here[rel].joined(text)
        for rel, text in self.here.items():
            assert (self.ours / rel).read_bytes() == text.data, (rel, self.done)
        self.commit_here()

    def conflict(self):
        """Both sides edit one line. Somebody resolves that here, in one of three ways."""
        rels = [rel for rel in self.there if rel in self.here]
        if self.lacks_edits or not rels:
            return
        rel, number = self.rng.choice(rels), len(self.done)
        here, there = f"# here {number}", f"# there {number}"
        self.here[rel] = self.here[rel].with_middle(here)
        self.write_here()
        commit_all(self.ours, "here")
        self.there[rel] = self.there[rel].with_middle(there)
        (self.fork / rel).write_bytes(self.there[rel].data)
        self.commit_there("there")
        assert f"  {rel}\n" in self.command("pull", code=1).out
        self.command("apply", code=3)
        middle = self.rng.choice([there, f"{here}\n{there}", "# neither"])
        self.here[rel] = self.here[rel].with_middle(middle)
        self.write_here()
        commit_all(self.ours, "resolved")
        assert "nothing to take" in self.command("pull").out
        self.apply()
        assert self.there == self.here

    def own_commit(self):
        """The fork's own work, in its files and in those that the overlay patches."""
        rel = self.rng.choice([SGD, C10D, DOC])
        line = f"# the fork's {len(self.done)}\n".encode()
        self.stock[rel] = line + self.stock[rel]
        path = self.fork / rel
        path.write_bytes(line + path.read_bytes())
        self.commit_there("the fork's")

    def unsaved(self):
        """Edits that are not committed are never lost."""
        rel = self.rng.choice([*(self.there or [MUON])])
        with open(self.fork / rel, "ab") as file:
            file.write(b"# not committed\n")
        before = everything(self.fork)
        for command in ("apply", "revert"):
            words = (command, "--checkout", self.fork)
            code = self.face(*words, root=self.ours).code
            assert code in (0, 3), self.done
            if everything(self.fork) != before:
                # Other files have changed. This one has its edit, and a way back.
                assert (self.fork / rel).read_bytes().endswith(b"# not committed\n")
                git(self.fork, "restore", rel)
                self.there = dict(self.here) if command == "apply" else {}
                self.patches = payload.read(self.ours).patches
                return
        git(self.fork, "restore", rel)

    def squash(self):
        """All commits become one, with words of the fork's own."""
        self.commit_here()
        start = git(self.fork, "merge-base", "upstream", "HEAD")
        git(self.fork, "reset", "-q", "--soft", start)
        if git(self.fork, "diff", "--cached", "--name-only"):
            git(self.fork, "commit", "-q", "-m", "everything (#12)")

    def reword(self):
        if not git(self.fork, "rev-list", "upstream..HEAD"):
            return
        git(self.fork, "commit", "-q", "--amend", "--allow-empty", "-m", "other words")

    def topic(self):
        """A topic branch with work of each kind is merged, in one of three ways."""
        self.commit_here()
        git(self.fork, "switch", "-q", "-c", f"topic{len(self.done)}")
        for name in self.rng.choices(["apply", "own_commit", "edit"], k=2):
            getattr(self, name)()
        topic = git(self.fork, "branch", "--show-current")
        git(self.fork, "switch", "-q", "main")
        how = self.rng.choice(["--ff", "--no-ff", "--squash"])
        run("git", "merge", "-q", how, "-m", "merged", topic, cwd=self.fork)
        if how == "--squash" and git(self.fork, "diff", "--cached", "--name-only"):
            git(self.fork, "commit", "-q", "-m", "squashed (#13)")

    def upstream(self):
        """Upstream moves on, and the fork rebases, or merges it."""
        git(self.fork, "switch", "-q", "upstream")
        rel = self.rng.choice([ADAM, "version.txt.orig"])
        line = f"# upstream's {len(self.done)}\n".encode()
        text = line + (self.stock.get(rel) or b"")
        (self.fork / rel).write_bytes(text)
        git(self.fork, "add", rel)
        self.commit_there("upstream's")
        git(self.fork, "switch", "-q", "main")
        words = self.rng.choice([("rebase", "-q"), ("merge", "-q", "-m", "merged")])
        done = run("git", *words, "upstream", cwd=self.fork, check=False)
        if done.code:  # a history that git itself cannot replay
            assert words[0] == "rebase", (done, self.done)
            run("git", "rebase", "--abort", cwd=self.fork)
            run("git", "merge", "-q", "-m", "merged", "upstream", cwd=self.fork)
        self.stock[rel] = text

    def clone(self):
        """A colleague goes on, who has no records of this tool."""
        self.commit_here()
        place = self.tmp_path / f"clone{len(self.done)}"
        git(self.tmp_path, "clone", "-q", self.fork, place)
        git(place, "branch", "-q", "upstream", "origin/upstream")
        self.fork = place
        for rel, text in NOTES.items():
            (place / rel).write_bytes(text)

    def collect(self):
        git(self.fork, "reflog", "expire", "--expire=now", "--all")
        git(self.fork, "gc", "-q", "--prune=now")

    def export(self):
        """Mails give the overlay over the base, in a clone without it."""
        out = self.tmp_path / f"mails{len(self.done)}"
        stack = ["--stack"] * self.rng.choice([0, 1])
        shown = self.command("export", "--out", out, *stack).out
        base = shown.split(f" checkout {self.fork} at ")[1].split(":")[0]
        place = self.tmp_path / f"am{len(self.done)}"
        git(self.tmp_path, "clone", "-q", "--no-checkout", self.fork, place)
        git(place, "checkout", "-q", "--detach", base)
        git(place, "am", "-q", *sorted(out.iterdir()))
        stock = self.texts(base)
        whole = {rel: text.data for rel, text in self.here.items()}
        source = payload.Source(whole, payload.read(self.ours).patches, None)
        names = git(place, "ls-files").splitlines()
        found = payload.git.texts(place, "HEAD", names)
        assert found == stock | patches.overlay(source, stock)[0], self.done


STEPS = [
    "apply", "apply", "apply", "revert", "newer", "newer", "edit", "edit", "pull", "pull",
    "own_commit", "unsaved", "squash", "reword", "topic", "topic", "upstream", "clone",
    "collect", "export", "conflict", "conflict",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAYS))
def test_random_histories(checkout, face, tmp_path, seed):
    ours = tmp_path / "overlay"
    copy_tools(ours)
    day = Day(seed, checkout, ours, face, tmp_path)
    for _ in range(OPERATIONS):
        name = day.rng.choice(STEPS)
        day.done.append(name)
        getattr(day, name)()
        day.check()
    day.done.append("the end")
    day.revert()
    day.check()
    shutil.rmtree(tmp_path, ignore_errors=True)
