"""All-to-alls in two levels: with many peers, an element first goes to a rank of the sender's node."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..process_groups import is_dry_run, Ranks
from ..schedule.levels import passed_on
from ..schedule.schedule import Schedule
from .transport import all_to_all, LocalBucket, Transfer


class Levels(NamedTuple):
    """The groups and sizes of an all-to-all in two levels. Accelerators run both on ``stream``. ``passed`` has
    the elements that this rank passes on: a row per rank of the node, a column per rank of the rail.
    """

    node: ProcessGroup | None
    rail: ProcessGroup | None
    passed: Sequence[Sequence[int]]
    stream: torch.Stream | None


class HoldingWork(NamedTuple):
    """A collective in flight, and the memory that must live until it was waited for. The memory is from ``stream``."""

    work: dist.Work
    memory: Sequence[Tensor]
    stream: torch.Stream | None

    def wait(self) -> None:
        self.work.wait()
        if self.stream is not None:
            # Its next exchange may get this memory, whichever stream has waited.
            with self.stream:
                self.work.wait()


def attach_levels(
    buckets: Sequence[LocalBucket],
    schedule: Schedule,
    groups: Mapping[Ranks, ProcessGroup | None],
    rank: int,
    device: torch.device,
) -> None:
    """Lets the exchanges of those ``buckets`` that have too many peers take two levels."""
    in_levels = [local for local in buckets if local.bucket.node_size > 1]
    stream = torch.Stream(device) if in_levels and device.type != "cpu" else None
    for local in in_levels:
        node, rail = (groups[ranks] for ranks in local.bucket.node_and_rail(rank))
        gathered, scattered = passed_on(schedule, local.bucket, rank)
        local.gather = _in_two_levels(
            local.gather, Levels(node, rail, gathered, stream)
        )
        local.scatter = _in_two_levels(
            local.scatter, Levels(node, rail, scattered, stream)
        )


def _in_two_levels(transfer: Transfer | None, levels: Levels) -> Transfer | None:
    if transfer is None:
        return None
    return transfer._replace(start=partial(two_level_all_to_all, levels=levels))


def two_level_all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_sizes: Sequence[int],
    send_sizes: Sequence[int],
    levels: Levels,
) -> HoldingWork | None:
    """Like :func:`all_to_all`, but a rank connects only to the ranks of its node and of its rail. An element first
    goes to the rank of the sender's node that is on the receiver's rail, for which a CPU waits.
    """
    node, rail, passed, stream = levels
    width, nodes = len(passed), len(passed[0])
    if stream is not None:
        # The second level runs while the compute stream goes on. An error may free the memory early, so
        # the allocator must know both streams.
        stream.wait_stream(torch.accelerator.current_stream(recv.device))
        recv.record_stream(stream)
        send.record_stream(stream)
    with stream or nullcontext():
        # One chunk for each rank, node by node; sent rail by rail.
        chunks = _transposed(send.split(list(send_sizes)), width)
        sizes_by_rail = _transposed(send_sizes, width)
        arriving = send.new_empty(sum(sum(row) for row in passed))
        leaving = torch.cat(chunks)
        first = _all_to_all(
            arriving,
            leaving,
            [sum(row) for row in passed],
            _sums(sizes_by_rail, nodes),
            node,
        )
        if first is not None:
            first.wait()
        # One chunk for each rank of the node and rank of the rail; the second all-to-all sends by rail.
        sizes = [size for row in passed for size in row]
        passing = torch.cat(_transposed(arriving.split(sizes), nodes))
        second = _all_to_all(
            recv,
            passing,
            _sums(recv_sizes, width),
            [sum(column) for column in zip(*passed)],
            rail,
        )
        if second is None:
            return None
        return HoldingWork(second, [arriving, leaving, passing], stream)


def _all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_sizes: list[int],
    send_sizes: list[int],
    group: ProcessGroup | None,
) -> dist.Work | None:
    """One level; None for an empty side in a dry run, which the fake backend refuses."""
    if is_dry_run() and not (recv.numel() and send.numel()):
        return None
    return all_to_all(recv, send, recv_sizes, send_sizes, group)


def _transposed(row_major: Sequence, width: int) -> list:
    """The elements of a table with rows of ``width``, column by column."""
    column_major: list = []
    for column in range(width):
        column_major += row_major[column::width]
    return column_major


def _sums(sizes: Sequence[int], width: int) -> list[int]:
    """The sum of each row of a table with rows of ``width``."""
    return [sum(sizes[at : at + width]) for at in range(0, len(sizes), width)]
