"""How ranks connect when they build an optimizer on accelerators."""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..agreement import Agreement, raise_everywhere
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
    # A list, which is emptied before the error is raised. A local name would keep the error with this frame, and the
    # error keeps all frames of its traceback with their memory.
    errors: list[Exception] = []
    try:
        make_runner()
    except Exception as raised:
        errors.append(raised)
    groups = [agreement.groups[ranks] for ranks in larger_first(agreement.serials)]
    # A dry run's tensors are fake, but this exchange is real.
    with unset_fake_temporarily(), torch.accelerator.device_index(device_index):
        raise_everywhere(errors.pop() if errors else None, groups)
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
        if statuses.overlaps:
            starts.append((statuses, statuses.reduce_flag))
    for bucket in runner.buckets:
        starts += [(bucket, bucket.start_gather), (bucket, bucket.start_scatter)]
        starts += [(relay, relay.start) for relay in bucket.relays]
    return starts
