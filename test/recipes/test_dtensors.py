"""Recipes for parameters that are DTensors: they say themselves where the pieces are."""

import torch.distributed as dist
from recipes.common import MLP, place_weights, placed_backward, Recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config, partition_named_parameters
from torch.testing._internal.common_utils import run_tests


class Placed(Recipe):
    def check(self, mesh, placements, inputs):
        model = place_weights(MLP(bias=True), mesh, placements)
        matrices, others = partition_named_parameters(model)
        config = create_dtensor_config(async_gpu_parallelism=True, prefetch_count=1)
        muon = Muon(matrices, lr=0.01, distributed_config=config)
        backward = placed_backward(model, mesh, inputs)
        one = MLP(bias=True)
        self.compare(one, model, muon, others=others, backward=backward)


class TestDTensors(Placed):
    def test_automatic(self):
        """EXAMPLES 0a, PROJECT quick start: no groups, no dimensions."""
        model = fully_shard(MLP())
        config = create_dtensor_config()
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(MLP(), model, muon, data=[dist.group.WORLD])

    def test_sharded(self):
        """EXAMPLES 0b: weights cut along dimension 0."""
        self.check(init_device_mesh("cpu", (4,)), [Shard(0)], [Replicate()])

    def test_replicated(self):
        """EXAMPLES 0d: every rank has all weights and a slice of the batch, as under DDP."""
        self.check(init_device_mesh("cpu", (4,)), [Replicate()], [Shard(0)])


class TestDTensorsOnAMesh(Placed):
    world_size = 8

    def test_sharded_twice(self):
        """EXAMPLES 0c: one dimension of the mesh cuts rows, the other columns."""
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp"))
        self.check(mesh, [Shard(0), Shard(1)], [Shard(0), Replicate()])


if __name__ == "__main__":
    run_tests()
