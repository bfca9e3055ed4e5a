"""What an all-to-all, or two of them, cost each rank of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .hardware import Hardware

OUT, IN = 0, 1
INTRA, INTER = 0, 1


@dataclass(frozen=True)
class Loads:
    """Bytes and messages of each rank on its links, shape (out or in, intra or inter, ranks).

    Args:
        along: whose communicator it is, the group's, a node's or a rail's.
        senders, receivers: places in the group, pair by pair; or each with all others, if ``complete``.
    """

    along: str
    nbytes: NDArray
    messages: NDArray
    senders: NDArray
    receivers: NDArray
    complete: bool

    def seconds(self, hardware: Hardware) -> NDArray:
        """How long each rank's busiest link takes, shape (ranks,)."""
        return self._busiest(hardware, slice(None))

    def incoming(self, hardware: Hardware) -> NDArray:
        """How long a rank's busiest link takes for what comes in alone."""
        return self._busiest(hardware, slice(IN, None))

    def latest(self, times: NDArray) -> NDArray:
        """Of ``times``, the last among those that each rank receives from; none is at minus infinity."""
        last = np.full_like(times, -np.inf)
        if self.complete:
            last[self.receivers] = times[self.senders].max()
        else:
            np.maximum.at(last, self.receivers, times[self.senders])
        return last

    def _busiest(self, hardware: Hardware, directions: slice) -> NDArray:
        bandwidth = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
        latency = np.array([hardware.intra_latency, hardware.inter_latency])
        of_links = (
            self.nbytes[directions] / bandwidth[:, None]
            + self.messages[directions] * latency[:, None]
        )
        return of_links.max((0, 1))


class Exchange(NamedTuple):
    """A gather or a scatter: its hops, and the bytes that each rank passes on between two of them."""

    hops: tuple[Loads, ...]
    passed: NDArray

    @property
    def nbytes(self) -> NDArray:
        return sum(hop.nbytes for hop in self.hops)

    @property
    def messages(self) -> NDArray:
        return sum(hop.messages for hop in self.hops)


@dataclass(frozen=True)
class Group:
    """Who exchanges: global ranks, the places of owners among them, and the ranks of a physical node."""

    ranks: NDArray
    owners: NDArray
    gpus_per_node: int

    def in_one_level(
        self, sent: NDArray, to_owners: bool, complete: bool = False
    ) -> Exchange:
        """An all-to-all in which everybody sends everybody his part.

        Args:
            sent: bytes that travel with each owner, shape (owners, ranks).
            to_owners: whether they come to owners, or from these.
            complete: whether all ranks exchange something with all owners.
        """
        holders = np.arange(len(self.ranks))
        ends = self.owners[:, None], holders[None]
        hop = self._loads("group", sent, ends, to_owners, complete)
        return Exchange((hop,), np.zeros(len(holders)))

    def in_two_levels(self, sent: NDArray, to_owners: bool, node_size: int) -> Exchange:
        """By way of the rank of the holder's node that stands on the owner's rail."""
        holders = np.arange(len(self.ranks))
        rails = np.arange(node_size)[:, None]
        of_rail = (self.owners % node_size == rails).astype(float) @ sent
        corners = holders - holders % node_size + rails
        node = self._loads("node", of_rail, (corners, holders[None]), to_owners)
        of_node = sent.reshape(len(self.owners), -1, node_size).sum(2)
        owners = self.owners[:, None]
        corners = holders[::node_size] + owners % node_size
        rail = self._loads("rail", of_node, (owners, corners), to_owners)
        passed = np.bincount(corners.ravel(), of_node.ravel(), len(holders))
        return Exchange((node, rail) if to_owners else (rail, node), passed)

    def _loads(
        self,
        along: str,
        sent: NDArray,
        ends: tuple[NDArray, NDArray],
        to_owners: bool,
        complete: bool = False,
    ) -> Loads:
        """Of ``sent`` between two ends, the owner's and the holder's; nothing goes to the sender itself."""
        owner, holder = np.broadcast_arrays(*ends)
        travels = (sent > 0) & (owner != holder)
        pairs = holder[travels], owner[travels]
        senders, receivers = pairs if to_owners else pairs[::-1]
        node = self.ranks // self.gpus_per_node
        count = len(node)
        kind = count * (node[senders] != node[receivers])

        def of_links(weights: NDArray | None) -> NDArray:
            found = [
                np.bincount(kind + end, weights, 2 * count)
                for end in (senders, receivers)
            ]
            return np.reshape(found, (2, 2, count))

        loads = of_links(sent[travels]), of_links(None)
        if complete:
            whole = ends[1].ravel(), ends[0].ravel()
            senders, receivers = whole if to_owners else whole[::-1]
        return Loads(along, *loads, senders, receivers, complete)
