"""The long way of ``blueprint.py``: its chapter 5 says what the steps are for."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from blueprint_tables import size
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim._newton_schulz import orthogonalize


class LongWay:
    """Muon by the blueprint's route; ``params`` and ``momentum`` are a rank's runs.

    Args:
        whole: the matrices to begin with.
        entries: the master schedule.
        buckets: the elements of each bucket.
        run_of: from where to where a member of the DP group stores an entry's slice.
        lrs: the learning rate of each aisle.
    """

    def __init__(
        self,
        whole: dict[str, Tensor],
        entries: Sequence[Any],
        buckets: dict[tuple[int, int], int],
        run_of: Callable[[Any, int], tuple[int, int]],
        lrs: Sequence[float],
        mesh: DeviceMesh,
    ) -> None:
        self.entries, self.buckets = entries, buckets
        self.run_of, self.lrs = run_of, lrs
        self.dp, self.tp = mesh.shape
        self.row, self.column = mesh.get_coordinate()
        self.dp_group, self.tp_group = mesh.get_group("dp"), mesh.get_group("tp")
        self.params = {s.name: self.shard(whole[s.name], s).clone() for s in entries}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.journey: list[tuple[str, str]] = []

    def shard(self, matrix: Tensor, entry: Any) -> Tensor:
        """TP shard, then DP shard: what this rank stores of ``matrix``."""
        tp_slice = matrix.chunk(self.tp, dim=entry.tp_dim)[self.column]
        first, last = self.run(entry)
        return tp_slice.reshape(-1)[first:last]

    def run(self, entry: Any) -> tuple[int, int]:
        return self.run_of(entry, self.row)

    def step(self, grads: dict[str, Tensor], hyper: dict[str, Any]) -> None:
        mu = hyper["momentum"]
        stored: dict[str, Tensor] = {}
        for entry in self.entries:
            grad = self.shard(grads[entry.name], entry)
            momentum = self.momentum[entry.name].lerp_(grad, 1 - mu)
            # Nesterov: look ahead through the gradient. What travels is bfloat16.
            stored[entry.name] = torch.lerp(grad, momentum, mu).bfloat16()
        slices: dict[str, Tensor] = {}
        for bucket in self.buckets:
            slices |= self.dp_gather(bucket, stored)
        for entry in self.entries:
            if stored[entry.name].numel():
                self.update(entry, stored[entry.name], slices[entry.name], hyper)

    def dp_gather(
        self, key: tuple[int, int], stored: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Step 1, for one bucket. Returns its TP slices."""
        inside = [entry for entry in self.entries if (entry.aisle, entry.bucket) == key]
        packed = torch.cat([stored[entry.name] for entry in inside])
        mine = torch.zeros(self.buckets[key] // self.dp, dtype=torch.bfloat16)
        mine[: packed.numel()] = packed
        bucket = torch.empty(self.buckets[key], dtype=torch.bfloat16)
        dist.all_gather(list(bucket.chunk(self.dp)), mine, group=self.dp_group)
        self.count("DP gather", mine, self.dp)
        return {s.name: bucket[s.start : s.stop].view(s.shape) for s in inside}

    def update(
        self, entry: Any, run: Tensor, tp_slice: Tensor, hyper: dict[str, Any]
    ) -> None:
        """Steps 2 to 5, for one matrix. Then applies the update."""
        # 2. TP gather
        slices = [torch.empty_like(tp_slice) for _ in range(self.tp)]
        dist.all_gather(slices, tp_slice, group=self.tp_group)
        self.count("TP gather", tp_slice, self.tp)
        matrix = torch.cat(slices, dim=entry.tp_dim)
        # 3. Run the math
        update = orthogonalize(
            matrix, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"]
        )
        self.calls["Newton-Schulz"] += 1
        # 4. TP shard
        update_slice = update.chunk(self.tp, dim=entry.tp_dim)[self.column]
        # 5. DP shard
        first, last = self.run(entry)
        update_run = update_slice.reshape(-1)[first:last]

        lr = self.lrs[entry.aisle]
        param = self.params[entry.name]
        param.mul_(1 - lr * hyper["weight_decay"])
        # The scale is that of the whole matrix, not of the run.
        rows, columns = matrix.shape
        param.add_(update_run, alpha=-lr * math.sqrt(max(1, rows / columns)))
        if not self.journey:
            self.journey = [
                (f"this rank's run of {entry.name}", size(run.shape)),
                ("DP gather  -> its TP slice", size(tp_slice.shape)),
                ("TP gather  -> the matrix", size(matrix.shape)),
                ("run math   -> orthogonalized", size(update.shape)),
                ("TP shard   -> its TP slice", size(update_slice.shape)),
                ("DP shard   -> its run", size(update_run.shape)),
            ]

    def count(self, what: str, tensor: Tensor, members: int) -> None:
        """Every member's tensor has to reach all the others."""
        self.calls[what] += 1
        self.sent[what] += tensor.nbytes * (members - 1)
