# Owner(s): ["oncall: distributed"]
"""Any rank of a large job on one CPU, with fake process groups."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import place, R, S0, specs
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMuonDryRun(TestCase):
    def test_any_rank_steps_on_a_cpu(self):
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())
        # DTensor confuses meshes of equal shape, so each world has a shape of its own.
        for shape, rank in (((4,), 0), ((1024,), 5), ((64, 16), 1023)):
            with self.subTest(shape=shape, rank=rank):
                world, store = math.prod(shape), FakeStore()
                dist.init_process_group(
                    "fake", store=store, rank=rank, world_size=world
                )
                mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
                # Replicas along the first dimension of a grid.
                placements = [(S0,) if mesh.ndim == 1 else (R, S0)]
                placed = specs(mesh, placements, [(32, 8), (16, 48), (7, 5)] * 3)
                params = []
                for spec in placed:
                    value = place(common_muon.full(0, spec.shape), spec)
                    params.append(nn.Parameter(value))
                muon = Muon(params, distributed_config="auto")
                for step in (1, 2):
                    for param, spec in zip(params, placed, strict=True):
                        param.grad = place(common_muon.full(step, spec.shape), spec)
                    muon.step()
                lines = muon.describe().splitlines()
                self.assertIn("busiest", "".join(lines))
                # A user can read it.
                self.assertLess(len(lines), 40)
                self.assertLess(max(map(len, lines)), 250)
                if world > 4:
                    self.assertIn("other ranks are not shown", "".join(lines))
                dist.destroy_process_group()


if __name__ == "__main__":
    run_tests()
