"""Which reader knows where the parameters of a config are."""

from collections.abc import Mapping
from typing import Any

from .reader import DTensorReader, Reader


def is_read_here(state: Mapping[str, Any]) -> bool:
    """Whether a config's ``state`` is a factory's, so that a reader knows where its parameters are."""
    return state.get("reader") in ("dtensor", "process_groups")


def new_reader(state: Mapping[str, Any], takes_stacks: bool = False) -> Reader:
    """The reader that a factory's ``state`` asks for."""
    if state["reader"] == "process_groups":
        from .groups import GroupsReader

        return GroupsReader(state, takes_stacks)
    return DTensorReader()
