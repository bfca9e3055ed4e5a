"""How ranks connect when they build an optimizer on accelerators."""

from collections.abc import Callable

import torch

from ..agreement import Agreement, raising_everywhere
from ..process_groups import larger_first
from .packed import PackedStep
from .transport import InFlight


def take_memory_and_connect(
    make_runner: Callable[[], PackedStep],
    agreement: Agreement,
    device_index: int | None,
) -> None:
    """Takes the memory of a step, and connects the ranks. If one of them has too little, all raise its error, which
    they exchange on the device with this index.
    """
    ordered = (agreement.groups[ranks] for ranks in larger_first(agreement.serials))
    groups = [group for group in ordered if group is not None]
    with torch.accelerator.device_index(device_index), raising_everywhere(groups):
        make_runner()
    connect(make_runner())


def connect(runner: PackedStep) -> None:
    """Uses every communicator once while no other one is in use. Accelerator backends connect two ranks when
    they first exchange something. With other collectives in flight, ranks may wait for each other.
    """
    memory = runner.memory
    try:
        memory.allocate()
        for flight, start in _starts(runner):
            start()
            flight.wait()
            if memory.device.type != "cpu" and torch.accelerator.is_available():
                torch.accelerator.synchronize(memory.device)
        if memory.frees_between_steps:
            memory.free()
    except BaseException:
        runner.drain()
        raise


def _starts(runner: PackedStep) -> list[tuple[InFlight, Callable[[], None]]]:
    """What starts each collective of a step, and what waits for it."""
    starts: list[tuple[InFlight, Callable[[], None]]] = []
    for statuses in runner.side_channel.statuses:
        starts.append((statuses, statuses.reduce))
    for bucket in runner.buckets:
        starts += [(bucket, bucket.start_gather), (bucket, bucket.start_scatter)]
        starts += [(relay, relay.start) for relay in bucket.relays]
    return starts
