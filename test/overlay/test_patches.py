"""The patches of this repository fit the torch they are for, at one place each."""

import re

import pytest
from overlay.conftest import stock_of
from tools.overlay import env, patches, payload, versions
from tools.overlay.errors import WrongTarget
from tools.overlay.payload import ROOT


VERSIONS = [f"2.{minor}" for minor in range(versions.OLDEST[1], versions.NEWEST[1] + 1)]
SERIES = patches.series(payload.read(ROOT))


def test_every_version_and_every_patch_is_named():
    assert versions.SUPPORTED == f"{VERSIONS[0]} to {VERSIONS[-1]}"
    for names in versions.STOCK.values():
        assert ", ".join(names.values()).split(", ") == VERSIONS
    names = [patch.name for patch in SERIES.values()]
    assert names == sorted(path.name for path in (ROOT / "patches").glob("*.patch"))


@pytest.mark.parametrize("rel", SERIES)
def test_fits_the_installed_torch_at_one_place(wheel, rel):
    """With so little context git could take another place, of the same words, unnoticed."""
    patch, path = SERIES[rel], stock_of(wheel, rel)
    if not path.is_file():
        pytest.skip("an installed torch has neither docs nor tests")
    text = path.read_bytes()
    done = patch.applied(rel, text)
    assert done != text
    compile(done, rel, "exec")
    # A tree that has it already does not change.
    assert patch.applied(rel, done) == done
    hunks = re.split(rb"^@@ .*\n", patch.hunks, flags=re.MULTILINE)[1:]
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before = b"".join(line[1:] for line in lines if line[:1] in (b" ", b"-"))
        assert (b"\n" + text).count(b"\n" + before) == 1, hunk.decode()


def test_supported_versions():
    supported = "2.11.0 2.13.0+cpu 2.14.0a0+git1234 2.12 2.13.0.post1+corp.7"
    for text in supported.split():
        assert versions.supported(text)
    for text in ("2.15.0.dev20260101", "2.10.9+cu128", "2.16.0a0", "v2", "main", "2.x"):
        with pytest.raises(WrongTarget, match=f"{re.escape(text)}.*2.11 to 2.15"):
            env.full(text)
    assert env.full("2.14") == "2.14.0"
