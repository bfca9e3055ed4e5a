"""Recipes for parameters that are DTensors: they say themselves where the pieces are."""

from recipes.common import MLP, place_weights, placed_backward, Recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim.muon import create_dtensor_config, partition_named_parameters
from torch.testing._internal.common_utils import run_tests


class Placed(Recipe):
    def place(self, mesh, placements, inputs):
        one, model = MLP(bias=True), place_weights(MLP(bias=True), mesh, placements)
        matrices, others = partition_named_parameters(model)
        config = create_dtensor_config(async_gpu_parallelism=True, prefetch_count=1)
        backward = placed_backward(model, mesh, inputs)
        self.check(one, model, config, matrices, others=others, backward=backward)


class TestDTensors(Placed):
    def test_sharded(self):
        """EXAMPLES 0b: weights cut along dimension 0."""
        self.place(init_device_mesh("cpu", (4,)), [Shard(0)], [Replicate()])

    def test_replicated(self):
        """EXAMPLES 0d: every rank has all weights and a slice of the batch, as under DDP."""
        self.place(init_device_mesh("cpu", (4,)), [Replicate()], [Shard(0)])


class TestDTensorsOnAMesh(Placed):
    world_size = 8

    def test_sharded_twice(self):
        """EXAMPLES 0c: one dimension of the mesh cuts rows, the other columns."""
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp"))
        self.place(mesh, [Shard(0), Shard(1)], [Shard(0), Replicate()])


if __name__ == "__main__":
    run_tests()
