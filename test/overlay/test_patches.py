"""The patches of this repository fit the torch they are for, at one place each."""

import re

import pytest
from overlay.conftest import stock_of
from tools.overlay import patches, payload, versions
from tools.overlay.repo import ROOT


VERSIONS = [f"2.{minor}.0" for minor in range(versions.OLDEST[1], 16)]
FILES = payload.read(ROOT).patches
NAMES = sorted(FILES.keys() - {"series"})


def original(wheel, rel):
    """The text of upstream's file; None if this torch does not have it."""
    path = stock_of(wheel)(rel)
    return path.read_bytes() if path.is_file() else None


def test_each_file_is_in_the_series():
    assert VERSIONS[-1] == f"{versions.NEWEST[0]}.{versions.NEWEST[1]}.0"
    used = {p.name for version in VERSIONS for p in patches.series(FILES, version)}
    assert sorted(used) == NAMES


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gets_every_change(version):
    # Two patches of one subject are one change, for versions whose texts differ.
    subjects = [p.message.splitlines()[0] for p in patches.series(FILES, version)]
    every = {patches.Patch(n, FILES[n]).message.splitlines()[0] for n in NAMES}
    assert sorted(subjects) == sorted(every)


@pytest.mark.parametrize("name", NAMES)
def test_fits_the_installed_torch(wheel, name):
    chosen = [p for p in patches.series(FILES, wheel.version) if p.name == name]
    if not chosen:
        pytest.skip(f"not for torch {wheel.version}")
    (patch,) = chosen
    texts = {rel: original(wheel, rel) for rel in patch.paths}
    texts = {rel: text for rel, text in texts.items() if text is not None}
    if not texts:
        pytest.skip(f"an installed torch has none of {', '.join(patch.paths)}")
    done = patches.patched(patch, texts)
    for rel, text in done.items():
        assert text != texts[rel]
        compile(text, rel, "exec")
    # A tree that has it already does not change.
    assert patches.patched(patch, done) == done


@pytest.mark.parametrize("name", NAMES)
def test_has_one_place_to_go(wheel, name):
    """With so little context git could take another place, of the same words, without a word."""
    patch = patches.Patch(name, FILES[name])
    if name not in {p.name for p in patches.series(FILES, wheel.version)}:
        pytest.skip(f"not for torch {wheel.version}")
    (rel,) = patch.paths
    text = original(wheel, rel)
    if text is None:
        pytest.skip(f"an installed torch has no {rel}")
    hunks = re.split(rb"^@@ .*\n", patch.hunks, flags=re.MULTILINE)[1:]
    assert hunks
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = b"".join(line[1:] for line in lines if line[:1] in (b" ", b"-"))
        assert (b"\n" + text).count(b"\n" + before) == 1, hunk.decode()
