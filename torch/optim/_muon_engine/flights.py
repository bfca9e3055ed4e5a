"""Collectives in flight, and their errors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any


from .process_groups import listed, OWN_ERRORS, Ranks


class CollectiveError(RuntimeError):
    """A collective failed."""


@contextmanager
def naming(name: str, ranks: Iterable[int], carried: Iterable[str]) -> Iterator[None]:
    """Names a collective among ``ranks`` in the backend's error, and the matrices or parameters that it ``carried``."""
    try:
        yield
    except OWN_ERRORS:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"the {name}, with {listed([*carried])}, among ranks {[*ranks]} failed. One of these ranks ended, failed before it, did "
            f"not build its Muon or call step() within the timeout, or changed its parameters alone: {error}"
        ) from error


class InFlight:
    """The collectives in flight that carry some ``matrices``."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        self.matrices = matrices
        # For errors, the name and the ranks of each; its handle; and what refers to its memory until it is waited for.
        self.works: list[tuple[str, Ranks, Any, Any]] = []

    def launch(
        self, name: str, ranks: Ranks, start: Callable[..., Any], *tensors: Any
    ) -> None:
        """Calls ``start(*tensors)``. The tensors must not be touched until :meth:`wait`."""
        with self._naming(name, ranks):
            work = start(*tensors)
        if work is not None:
            self.works.append((name, ranks, work, tensors))

    def wait(self) -> None:
        """Waits for all of them. Raises CollectiveError if one failed."""
        while self.works:
            name, ranks, work, _ = self.works.pop(0)
            with self._naming(name, ranks):
                work.wait()

    def _naming(self, name: str, ranks: Ranks) -> AbstractContextManager:
        return naming(name, ranks, (matrix.described for matrix in self.matrices))


def drain(flights: Iterable[InFlight]) -> None:
    """After an error, waits for everything in flight."""
    for flight in flights:
        # A wait forgets a collective even if it failed.
        while flight.works:
            # The error that led here is the one to report.
            with suppress(Exception):
                flight.wait()
