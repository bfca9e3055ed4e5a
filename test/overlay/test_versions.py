"""Which torch versions are taken, and how `series` conditions compare."""

import pytest
from tools.overlay import stock, versions
from tools.overlay.errors import WrongTarget


@pytest.mark.parametrize(
    "text", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "2.15.1", "2.12"]
)
def test_supported(text):
    versions.check_supported(text)
    assert versions.release(text)[:2] >= (2, 11)


@pytest.mark.parametrize("text", ["2.10.9+cu128", "2.16.0a0", "1.13.0", "3.0.0"])
def test_unsupported_names_both(text):
    with pytest.raises(WrongTarget, match="2.11 to 2.15") as caught:
        versions.check_supported(text)
    assert text in str(caught.value)
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["", "main", "2", "2.x", "v2.13.0"])
def test_not_a_version(text):
    with pytest.raises(WrongTarget, match="not a torch version"):
        versions.check_supported(text)


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("2.13.0", "", True),
        ("2.13.0", ">=2.13,<2.15", True),
        ("2.12.1", ">=2.13,<2.15", False),
        ("2.15.0a0", ">=2.13,<2.15", False),
        ("2.13.1", "==2.13", True),
        ("2.13.1", "==2.13.0", False),
        ("2.13.1", ">2.13.0", True),
        ("2.13.1", "!=2.13", False),
        ("2.13.1", "<=2.13", True),
    ],
)
def test_conditions(version, spec, expected):
    assert versions.matches(version, spec) is expected


def test_condition_that_is_none():
    with pytest.raises(WrongTarget, match="~=2.13"):
        versions.matches("2.13.0", "~=2.13")


@pytest.mark.parametrize("rel", stock.KNOWN)
def test_each_supported_release_is_known(rel):
    named = {word for words in stock.KNOWN[rel].values() for word in words.split(", ")}
    oldest, newest = versions.OLDEST[1], versions.NEWEST[1]
    assert named == {f"2.{minor}" for minor in range(oldest, newest + 1)}
