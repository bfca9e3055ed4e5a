# Owner(s): ["oncall: distributed"]
"""An optimizer that does not have the parameters that its model trains: warnings, and errors while it is built."""

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim import _muon_reports as hints
from torch.optim.muon import (
    partition_named_parameters,
    partition_parameters,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    local,
    mesh_of,
    OnCPU,
    S0,
    Spec,
    specs,
    Twins,
)


def snapshot(params):
    return [local(param.detach()).clone() for param in params]


class TestMuonUntrained(OnCPU):
    """Parameters without gradients, step after step."""

    def test_nothing_is_distributed(self):
        """A warning came in a pipeline, and where frameworks shard the model later."""
        for mesh, placements in ((None, None), (mesh_of(4), (S0,))):
            with self.assertWarnsOnce():
                twins = Twins([Spec((8, 6), mesh, placements)] * 2)
                self.assertTrainsAlike(twins, 3)

    def test_built_before_fully_shard(self):
        model = nn.Linear(8, 12, bias=False)
        muon = Muon(model.parameters(), distributed_config="auto")
        fully_shard(model, mesh=mesh_of(4))
        with self.assertWarnsOnce("have had no gradient in 3 steps.*: parameter 0"):
            for _ in range(hints.STEPS_WITHOUT_ANY + 2):
                model(torch.ones(2, 8)).sum().backward()
                muon.step()

    @mock.patch.object(hints, "STEPS_WITHOUT_ONE", 5)
    def test_parameter_that_is_never_trained(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 4))
        pattern = (
            r"have had no gradient in .*: parameter 2 of shape \(8, 6\)\. The model"
        )
        twins.params[3].requires_grad_(False)
        with self.assertWarnsOnce(pattern):
            for step in range(8):
                twins.set_gradients(missing=range(4) if step == 4 else [2, 3])
                twins.optimizer.step()


class TestMuonUnsharded(OnCPU):
    """FSDP2 has plain tensors in the place of its parameters between a forward and a backward pass."""

    def blocks(self):
        """A model whose root, sharded by FSDP2, has a matrix too, after a forward without a backward."""
        layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
        fully_shard(model[0], mesh=mesh_of(4))
        fully_shard(model, mesh=mesh_of(4))
        with torch.no_grad():
            model(torch.ones(2, 8))
        return model

    def test_built_while_the_root_is_unsharded(self):
        """Muon took plain tensors, which never get a gradient."""
        model = self.blocks()
        nested = nn.Sequential(model)
        for partition in (partition_parameters, partition_named_parameters):
            for where, prefix, way in (
                (model, "", r"call model\.reshard\(\) first"),
                (nested, "0.", r"\(name\)\.reshard\(\) for each name in \['0'\] first"),
            ):
                pattern = f"FSDP2 has unsharded {prefix}1.weight, as .*: .*{way}"
                self.assertRaisesEverywhere(lambda: partition(where), pattern=pattern)
        model[0].unshard()
        pattern = (
            r"unsharded 0\.0\.weight, 0\.1\.weight, 1.weight.*each name in \['', '0'\]"
        )
        self.assertRaisesEverywhere(
            lambda: partition_parameters(model), pattern=pattern
        )
        model[0].reshard()
        model.reshard()
        matrices, _ = partition_parameters(model)
        muon = Muon(matrices, distributed_config="auto")
        with self.everywhere():
            self.assertNotIn("FSDP2", muon.describe(model))
        before = snapshot(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        muon.step()
        with self.everywhere():
            for param, old in zip(snapshot(model.parameters()), before):
                self.assertNotEqual(param, old)

    def test_built_from_other_tensors_than_the_shards(self):
        """FSDP2 cuts them for a smaller mesh, or has other shards than it knows."""
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        mesh = DeviceMesh("cpu", torch.arange(4))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8))
        pattern = r"unsharded 0\.weight, 1\.weight.*\['', '0'\]"
        self.assertRaisesEverywhere(
            lambda: partition_parameters(model), pattern=pattern
        )
        for unit in (model, model[0]):
            unit.reshard()
        model.to_empty(device="cpu")
        with self.everywhere():
            matrices, _ = partition_parameters(model)
            self.assertEqual({type(matrix.data) for matrix in matrices}, {DTensor})


if __name__ == "__main__":
    run_tests()
