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
        # The layers of all blocks have one pattern.
        known_patterns = set()
        for tensor_name in tensor_names:
            known_patterns.add(without_numbers(_without_compile(tensor_name)))
        near_patterns = get_close_matches(pattern, sorted(known_patterns), cutoff=0.0)
        raise ValueError(
            f"no parameter matches {pattern!r}; near names are {near_patterns}"
        )
    return matched


def _without_compile(tensor_name: str) -> str:
    return tensor_name.replace("_orig_mod.", "")
