"""What all trees have in common that the overlay can be laid over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from . import lock, manifest, parts, transaction


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Target:
    """A tree that has a ``torch`` package at ``torch_dir``."""

    kind: str
    words: str  # how messages call it
    keep: Path  # where the record lies
    lock: Path  # the folder that one command at a time may hold

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work on it alone, after what a killed command left half done is undone."""
        with lock.held(self.lock):
            # One after the other: a record may be half written, its files half there.
            if transaction.recover(self) | parts.recover(self):
                print("an earlier command was cut off half way: undone")
            yield

    def read(self, rel: str) -> bytes | None:
        path = self.root / rel
        return path.read_bytes() if path.is_file() else None

    def takes(self, rel: str) -> bool:
        """Whether the overlay brings this file to it; an installed torch has no tests."""
        return self.kind == "checkout" or rel.startswith("torch/")

    def manifest(self) -> manifest.Manifest | None:
        return manifest.load(self.keep)

    def originals(
        self, found: manifest.Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        """What this tree has at those paths without the overlay (None: no such file).

        A path is left out if nobody knows. What merely is there does not count, nor what
        stood there when the tree was of another version.
        """
        raise NotImplementedError

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        """How somebody gets rid of their changes to those files, in words."""
        raise NotImplementedError
