"""``check``: whether a real step takes as long as ``scale`` simulates, on four processes over a slow wire.

On one machine, loopback hides transfers and the processes share cores. Therefore Newton-Schulz is a sleep
here, and each transfer occupies the link of its rank: an all-to-all for a latency per message, or by its bytes, and a
relay by its bytes. The real engine runs everything else.
"""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon_formulas, Muon
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from torch.optim._newton_schulz import NS_DTYPE

from .layouts import Laid, lay
from .scale import costs
from .scale.costs import Options
from .scale.hardware import Hardware
from .scale.plan import make_plan
from .scale.timeline import simulate
from .table import render


WORLD, PEERS = 4, 3


class Setting(NamedTuple):
    """A step of sharded matrices to measure and to simulate.

    Args:
        share: the time of an exchange with three peers over that of a bucket's Newton-Schulz.
        is_parallel: whether all owners work at the same time.
        prefetch: prefetch_count.
    """

    share: float
    is_parallel: bool
    prefetch: int

    def __str__(self) -> str:
        owners = "all owners at once" if self.is_parallel else "one owner at a time"
        return f"{self.share:g} x, {owners}, prefetch_count {self.prefetch}"


SETTINGS = [
    Setting(share, is_parallel, prefetch)
    for share in (0.5, 1.0)
    for is_parallel in (False, True)
    for prefetch in (0, 1, 2)
]


class Relayed(NamedTuple):
    """A step under HSDP, in which replicas relay results.

    Args:
        share: the time of a bucket's relays over that of its Newton-Schulz.
        replicas: of each shard.
        batches: of an owner in a bucket.
        is_parallel: whether all owners work at the same time.
        prefetch: prefetch_count.
    """

    share: float
    replicas: int
    batches: int
    is_parallel: bool = True
    prefetch: int = 1

    def __str__(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        mesh = f"HSDP {self.replicas} x {WORLD // self.replicas}"
        if not self.is_parallel:
            batches = "one owner at a time"
        return f"{self.share:g} x, {mesh}, {batches}, prefetch_count {self.prefetch}"


RELAYED = [
    *(
        Relayed(share, replicas, batches)
        for replicas in (2, 4)
        for share in (0.5, 1.0, 2.0)
        for batches in (1, 2)
    ),
    Relayed(1.0, 2, 1, prefetch=0),
    Relayed(1.0, 2, 1, False, 0),
    Relayed(1.0, 4, 1, False, 0),
    Relayed(1.0, 4, 1, False, 1),
]
# Seconds of an owner's Newton-Schulz in a bucket.
SLEEP = 0.02


class SlowWire:
    """The link of this rank: transfers take turns on it. As with NCCL, a rank waits for those alone that it exchanges
    something with; gloo's own all-to-all waits for all of them.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self.link = ThreadPoolExecutor(1)
        self.broadcast = dist.broadcast

    def exchange(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        """In place of ``dist.all_to_all_single``."""
        work = self.link.submit(self._exchange, *args, **kwargs)
        return mock.Mock(wait=work.result) if async_op else work.result()

    def _exchange(
        self,
        received: Tensor,
        sent: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        seconds = 0.0
        for sizes in (output_split_sizes, input_split_sizes):
            delay = self.latency * np.count_nonzero(sizes)
            nbytes = sum(sizes) * sent.itemsize
            seconds = max(seconds, delay + nbytes / self.bandwidth)
        time.sleep(seconds)
        messages = []
        for peer, part in enumerate(sent.split(input_split_sizes)):
            if len(part):
                messages.append(dist.isend(part, group=group, group_dst=peer))
        for peer, part in enumerate(received.split(output_split_sizes)):
            if len(part):
                messages.append(dist.irecv(part, group=group, group_src=peer))
        for message in messages:
            message.wait()

    def relay(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        """In place of ``dist.broadcast``."""
        work = self.link.submit(self._relay, *args, **kwargs)
        return mock.Mock(wait=work.result) if async_op else work.result()

    def _relay(self, tensor: Tensor, src: int, group: dist.ProcessGroup) -> None:
        """A ring begins when the links of all of its ranks are free."""
        # All processes read the clock of one machine.
        begin = torch.tensor(time.monotonic(), dtype=torch.float64)
        dist.all_reduce(begin, dist.ReduceOp.MAX, group)
        self.broadcast(tensor, src, group)
        end = begin.item() + tensor.nbytes / self.bandwidth
        time.sleep(max(0.0, end - time.monotonic()))


class Measured(NamedTuple):
    """The seconds of each repetition on one rank, and the simulated seconds."""

    times: list[float]
    simulated: float


def work(rank: int, world: int, repetitions: int) -> list[Measured]:
    """The measurements of this rank, by setting."""
    laid = lay("shard", "square", world)
    measurements = []
    for setting in SETTINGS:
        latency = setting.share * SLEEP / PEERS
        played = Played(laid, setting, latency, math.inf)
        measurements.append(played.measure(repetitions))
    return measurements


def work_relayed(rank: int, world: int, repetitions: int) -> list[Measured]:
    """The measurements of this rank, by setting with relays."""
    measurements = []
    for setting in RELAYED:
        workload = "square" if setting.batches == 1 else "two"
        laid = lay("hsdp", workload, world, outer=setting.replicas)
        # The results of all owners' matrices of a bucket, one of each shape.
        elements = world * sum(map(math.prod, set(laid.shapes)))
        shards = world // setting.replicas
        nbytes = elements / shards * NS_DTYPE.itemsize
        played = Played(laid, setting, 0.0, nbytes / (setting.share * SLEEP))
        # So few replicas would not need relays.
        with mock.patch.object(buckets, "MAX_REPLICAS", 1):
            measurements.append(played.measure(repetitions))
    return measurements


class Played:
    """Steps of ``laid`` over a wire. An owner has one matrix of each shape in a bucket, or all of its matrices."""

    def __init__(
        self,
        laid: Laid,
        setting: Setting | Relayed,
        latency: float,
        bandwidth: float,
    ) -> None:
        self.laid = laid
        self.setting = setting
        self.wire = SlowWire(latency, bandwidth)
        flops = sum(map(newton_schulz_flops, set(laid.shapes)))
        self.hardware = Hardware(
            peak_flops=flops / SLEEP,
            utilization=1.0,
            memory_bandwidth=math.inf,
            intra_bandwidth=bandwidth,
            inter_bandwidth=bandwidth,
            intra_latency=latency,
            inter_latency=latency,
            gpus_per_node=1,
        )

    def measure(self, repetitions: int) -> Measured:
        """The seconds of each step after the first one, which makes all state; and the simulated ones."""
        prefetch = self.setting.prefetch
        config = self.laid.make_config(prefetch)
        config.async_gpu_parallelism = self.setting.is_parallel
        optimizer = Muon(self.laid.params, distributed_config=config)
        schedule = optimizer._engine.schedule
        plan = make_plan(schedule, WORLD, self.hardware.gpus_per_node)
        # On a CPU, each matrix is a batch.
        options = Options(prefetch=prefetch)
        with mock.patch.object(costs, "batch_size", return_value=1):
            simulated = simulate(plan, self.hardware, options, has_relay_stream=False)
        times = []
        with (
            mock.patch.object(_muon_formulas, "newton_schulz", self._sleep),
            mock.patch.object(dist, "all_to_all_single", self.wire.exchange),
            mock.patch.object(dist, "broadcast", self.wire.relay),
        ):
            for _ in range(repetitions + 1):
                dist.barrier()
                began = time.perf_counter()
                optimizer.step()
                ended = time.perf_counter()
                times.append(ended - began)
        return Measured(times[1:], simulated.seconds)

    def _sleep(self, matrix: Tensor, *how: Any, **options: Any) -> Tensor:
        """In place of Newton-Schulz."""
        flops = newton_schulz_flops(tuple(matrix.shape))
        time.sleep(flops / self.hardware.flops)
        return matrix.clone()


def rows(
    settings: Sequence[Setting | Relayed], results: Sequence[list[Measured]]
) -> list[tuple[str, float, float]]:
    """Setting, measured seconds of the slowest rank, simulated seconds.

    The fastest repetition counts: other programs delay all of them, and nothing makes a sleep shorter.
    """
    found = []
    for setting, ranks in zip(settings, zip(*results, strict=True), strict=True):
        repetitions = zip(*(rank.times for rank in ranks), strict=True)
        measured = min(map(max, repetitions))
        found.append((str(setting), measured, ranks[0].simulated))
    return found


def text(
    what: str,
    settings: Sequence[Setting | Relayed],
    results: Sequence[list[Measured]],
) -> str:
    """A table of ``settings``, which have the time of ``what`` over that of Newton-Schulz."""
    head = [f"{what} x Newton-Schulz", "ms", "simulated", "ms / simulated"]
    cells = []
    for setting, measured, simulated in rows(settings, results):
        ratio = measured / simulated
        times = f"{1e3 * measured:.0f}", f"{1e3 * simulated:.0f}"
        cells.append([setting, *times, f"{ratio:.2f}"])
    table = render(head, cells)
    _, load, _ = os.getloadavg()
    return f"{table}\n\nload average {load:.1f}"
