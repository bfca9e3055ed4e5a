"""Which parameters a user's pattern means."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatch

from .names import without_numbers


def matching_any(
    patterns: str | Iterable[str], tensor_names: Collection[str]
) -> set[str]:
    """The names that one pattern, or any of several, matches."""
    if isinstance(patterns, str):
        patterns = [patterns]
    matched: set[str] = set()
    for pattern in patterns:
        matched.update(matching(pattern, tensor_names))
    return matched


def matching(pattern: str, tensor_names: Collection[str]) -> set[str]:
    """The names that a pattern matches, with or without what torch.compile puts into them. Raises ValueError if it matches
    no name.
    """
    if pattern in tensor_names:
        return {pattern}
    matched = set()
    for tensor_name in tensor_names:
        for spelling in (tensor_name, _without_compile(tensor_name)):
            if fnmatch(spelling, pattern):
                matched.add(tensor_name)
    if not matched:
        near_names = _near_names(pattern, tensor_names)
        raise ValueError(
            f"no parameter matches {pattern!r}; near names are {near_names}"
        )
    return matched


def _near_names(pattern: str, tensor_names: Collection[str]) -> list[str]:
    """Up to three names that resemble a pattern most, from different layers of a block."""
    # The layers of all blocks have one spelling, of which the first block's name is an example.
    names_by_spelling: dict[str, str] = {}
    for tensor_name in sorted(tensor_names):
        name = _without_compile(tensor_name)
        names_by_spelling.setdefault(without_numbers(name), name)
    spellings = get_close_matches(pattern, sorted(names_by_spelling), cutoff=0.0)
    return [names_by_spelling[spelling] for spelling in spellings]


def _without_compile(tensor_name: str) -> str:
    return tensor_name.replace("_orig_mod.", "")
