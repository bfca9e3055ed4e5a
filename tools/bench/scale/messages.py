"""What an all-to-all costs each rank of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .hardware import Hardware

OUT, IN = 0, 1
INTRA, INTER = 0, 1


@dataclass(frozen=True)
class Loads:
    """Bytes and messages of each rank on its links, shape (out or in, intra or inter, ranks)."""

    nbytes: NDArray
    messages: NDArray

    def seconds(self, hardware: Hardware) -> NDArray:
        """How long each rank's busiest link takes, shape (ranks,)."""
        return self._busiest(hardware, slice(None))

    def incoming(self, hardware: Hardware) -> NDArray:
        """How long a rank's busiest link takes for what comes in alone."""
        return self._busiest(hardware, slice(IN, None))

    def _busiest(self, hardware: Hardware, directions: slice) -> NDArray:
        bandwidth = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
        latency = np.array([hardware.intra_latency, hardware.inter_latency])
        of_links = (
            self.nbytes[directions] / bandwidth[:, None]
            + self.messages[directions] * latency[:, None]
        )
        return of_links.max((0, 1))


@dataclass(frozen=True)
class TwoLevel:
    """An exchange inside nodes, then one between nodes; ``starts`` is where each node's ranks begin."""

    first: Loads
    second: Loads
    starts: NDArray

    def seconds(self, hardware: Hardware) -> NDArray:
        """The second exchange passes on what all of a node have sent in the first."""
        first = self.first.seconds(hardware)
        sizes = np.diff(self.starts, append=len(first))
        slowest = np.maximum.reduceat(first, self.starts).repeat(sizes)
        return slowest + self.second.seconds(hardware)

    def incoming(self, hardware: Hardware) -> NDArray:
        return self.second.incoming(hardware)


def direct(
    sent: NDArray, senders: NDArray, receivers: NDArray, world: NDArray, node: int
) -> Loads:
    """An all-to-all in which everybody sends everybody his part.

    Args:
        sent: bytes, shape (senders, receivers); nothing to itself.
        senders, receivers: global ranks.
        world: the ranks of the group, sorted, which the result is about.
        node: ranks of a node.
    """
    same = (senders // node)[:, None] == (receivers // node)[None]
    loads = _nothing(len(world))
    from_, to = np.searchsorted(world, senders), np.searchsorted(world, receivers)
    for kind, where in ((INTRA, same), (INTER, ~same)):
        travels = np.where(where, sent, 0)
        for table, values in ((loads.nbytes, travels), (loads.messages, travels > 0)):
            table[OUT, kind, from_] = values.sum(1)
            table[IN, kind, to] = values.sum(0)
    return loads


def two_level(
    sent: NDArray, senders: NDArray, receivers: NDArray, world: NDArray, node: int
) -> TwoLevel:
    """First inside nodes, to the rank with the receiver's local index; then between nodes.

    Ranks of the sender's node that are not in the group pass on nothing here: a group has whole
    nodes, or ranks of one local index.
    """
    first, second = _nothing(len(world)), _nothing(len(world))
    nodes, at = np.unique(senders // node, return_index=True)
    from_, to = np.searchsorted(world, senders), np.searchsorted(world, receivers)
    # Senders are sorted, so those of a node follow each other.
    of_node = np.add.reduceat(sent, at, axis=0)
    apart = nodes[:, None] != (receivers // node)[None]
    between = np.where(apart, of_node, 0)
    second.nbytes[IN, INTER, to] = between.sum(0)
    second.messages[IN, INTER, to] = (between > 0).sum(0)
    for local in np.unique(receivers % node):
        here = receivers % node == local
        via = np.searchsorted(world, nodes * node + local)
        second.nbytes[OUT, INTER, via] = between[:, here].sum(1)
        second.messages[OUT, INTER, via] = (between[:, here] > 0).sum(1)
        inside = np.where(senders % node != local, sent[:, here].sum(1), 0)
        first.nbytes[OUT, INTRA, from_] += inside
        first.messages[OUT, INTRA, from_] += inside > 0
        first.nbytes[IN, INTRA, via] += np.add.reduceat(inside, at)
        first.messages[IN, INTRA, via] += np.add.reduceat((inside > 0).astype(int), at)
    starts = np.unique(world // node, return_index=True)[1]
    return TwoLevel(first, second, starts)


def _nothing(ranks: int) -> Loads:
    return Loads(np.zeros((2, 2, ranks)), np.zeros((2, 2, ranks)))
