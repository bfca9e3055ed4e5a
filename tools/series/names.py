"""What an earlier form of a file does not know."""

import enum
from collections.abc import Collection
from typing import NamedTuple


class Missing(NamedTuple):
    """What the later commits bring."""

    modules: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class NoForm(Exception):
    """There is no earlier form of a file, because of something that no rule is for."""


class Value(enum.Enum):
    """What an expression is in the earlier form. An option that is not there is false, as its default is."""

    KEPT = 0
    # It says a later name.
    GONE = 1
    # It asks for a later option.
    FALSE = 2
    TRUE = 3


class Names:
    """The names that are missing in one file. ``unused`` has names that nothing uses any more, and functions that are
    gone, as (function or class or "", name).
    """

    def __init__(self, missing: Missing, unused: Collection[tuple[str, str]]) -> None:
        self.everywhere = set(missing.names)
        self.unused = {*unused}
        # The function or class around what is read now.
        self.scope = ""
        # Class -> the names of its bases.
        self.bases: dict[str, list[str]] = {}
        # (Function, local name) of what is not there, and of what is.
        self._values: dict[tuple[str, str], Value] = {}
        self._kept: set[tuple[str, str]] = set()

    def is_later(self, name: str) -> bool:
        here = (self.scope, name)
        if here in self._values or name in self.everywhere:
            return True
        return here in self.unused or ("", name) in self.unused

    def is_later_method(self, name: str) -> bool:
        """Whether ``self`` lacks that method of this class or of its bases."""
        classes = [self.scope.rpartition(".")[0]]
        while classes:
            one = classes.pop()
            if one and (one, name) in self.unused:
                return True
            classes += self.bases.get(one, [])
        return False

    def value_of(self, name: str) -> Value:
        """The value of a name that is read."""
        value = self._values.get((self.scope, name))
        if value is not None:
            return value
        return Value.GONE if self.is_later(name) else Value.KEPT

    def keep(self, names: Collection[str]) -> None:
        """Notes that these local names have a value, be it after others that are gone."""
        for name in names:
            self._kept.add((self.scope, name))
            self._values.pop((self.scope, name), None)

    def is_binding_gone(self, name: str) -> bool:
        """Whether a name that gets a value is later. A local name may have lost only its values before."""
        here = (self.scope, name)
        return name in self.everywhere or {here, ("", name)} & self.unused != set()

    def drop(self, names: Collection[str], value: Value) -> None:
        """Notes that these lost the statement that gives them a value."""
        if not self.scope:
            self.everywhere |= {*names}
            return
        if self.scope in self.bases:
            # Attributes of a class.
            self.unused |= {(self.scope, name) for name in names}
        for name in names:
            if (self.scope, name) not in self._kept:
                self._values[self.scope, name] = (
                    Value.GONE if value is Value.KEPT else value
                )

    def are_unused(self, names: Collection[str]) -> bool:
        """Whether nothing reads these local names."""
        scoped = {(self.scope, name) for name in names}
        return len(scoped) > 0 and scoped <= self.unused
