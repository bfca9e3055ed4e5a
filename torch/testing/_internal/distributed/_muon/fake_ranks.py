"""One process that answers for one rank of several."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class FakeRanks:
    """To be put before TestCase."""

    def as_rank(self, rank, world_size):
        """A process group that answers for ``rank`` without any other process."""
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group("fake", store=FakeStore(), **ranks)
        self.addCleanup(dist.destroy_process_group)

    def dtensor(self, mesh, *placements, shape=(4, 3)):
        """A DTensor of ones with a local part of ``shape``."""
        if isinstance(mesh, tuple):
            ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
            mesh = DeviceMesh("cpu", ranks)
        return DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)
