"""The patches of this repository fit the torch they are for, at one place each."""

import re

import pytest
from tools.overlay import manifest, patches, versions
from tools.overlay.repo import ROOT


VERSIONS = [f"2.{minor}.0" for minor in range(versions.OLDEST[1], 16)]
NAMES = sorted(path.name for path in (ROOT / "patches").glob("*.patch"))


def original(wheel, rel):
    """The text of upstream's file, which the overlay keeps; None where there is none."""
    found = wheel.manifest()
    if found and rel in found.files and found.files[rel].original:
        return manifest.original(rel, wheel.torch_dir).read_bytes()
    path = wheel.root / rel
    return path.read_bytes() if path.is_file() else None


def test_each_file_is_in_the_series():
    assert VERSIONS[-1] == f"{versions.NEWEST[0]}.{versions.NEWEST[1]}.0"
    used = {p.name for version in VERSIONS for p in patches.series(ROOT, version)}
    assert sorted(used) == NAMES


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gets_every_change(version):
    # Two patches of one subject are one change, for versions whose texts differ.
    subjects = [p.message.splitlines()[0] for p in patches.series(ROOT, version)]
    every = {
        patches.Patch(
            name, "", (ROOT / "patches" / name).read_bytes()
        ).message.splitlines()[0]
        for name in NAMES
    }
    assert sorted(subjects) == sorted(every)


@pytest.mark.parametrize("name", NAMES)
def test_fits_the_installed_torch(wheel, name):
    chosen = [p for p in patches.series(ROOT, wheel.version) if p.name == name]
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
    # A tree that has it already is left as it is.
    assert patches.patched(patch, done) == done


@pytest.mark.parametrize("name", NAMES)
def test_has_one_place_to_go(wheel, name):
    """With so little context git could take another place, of the same words, without a word."""
    patch = patches.Patch(name, "", (ROOT / "patches" / name).read_bytes())
    if name not in {p.name for p in patches.series(ROOT, wheel.version)}:
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
