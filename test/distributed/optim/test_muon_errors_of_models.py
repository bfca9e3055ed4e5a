# Owner(s): ["oncall: distributed"]
"""An optimizer that does not have the parameters that its model trains: warnings, and errors while it is built."""

from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim._muon_reports import hints
from torch.optim.muon import (
    partition_named_parameters,
    partition_parameters,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_errors import (
    MistakesTestCase,
    snapshot,
)
from torch.testing._internal.distributed._muon.common_muon import (
    mesh_of,
    S0,
    Spec,
    specs,
    Twins,
)


class TestMuonUntrained(MistakesTestCase):
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
        with self.assertWarnsOnce("no parameter of this Muon has had a gradient"):
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

    def test_parameters_that_lose_their_gradients(self):
        """``load_state_dict(assign=True)`` in the middle leaves Muon with tensors that the model does not have."""
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 2))

        def steps(count, missing=()):
            for _ in range(count):
                twins.set_gradients(missing)
                twins.optimizer.step()

        with mock.patch.object(hints, "STEPS_WITHOUT_ONE", 5):
            with self.assertWarnsOnce():
                steps(2)
                # A gradient in between starts the count again.
                steps(4, [1])
                steps(1)
                steps(2, [0, 1])
                steps(2, [1])
                steps(1, [0])
            pattern = r"no gradient in 5 steps.*: parameter 1 of shape \(8, 6\)\. .*assign=True"
            with self.assertWarnsOnce(pattern):
                steps(5, [1])
            with self.assertWarnsOnce():
                steps(1)
                steps(6, [1])
        pattern = "no parameter of this Muon has had a gradient in 3 steps"
        with self.assertWarnsOnce():
            steps(1)
            steps(2, [0, 1])
        with self.assertWarnsOnce(pattern):
            steps(1, [0, 1])
        with self.assertWarnsOnce():
            steps(6, [0, 1])


class TestMuonUnsharded(MistakesTestCase):
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

    def test_describe_while_the_root_is_unsharded(self):
        """A Muon that is right was said to have nothing of the model, and one that is wrong was not."""
        model = self.blocks()
        wrong = Muon([*model.parameters()], distributed_config="auto")
        model.reshard()
        right = Muon([*model.parameters()], distributed_config="auto")
        model.unshard()
        now = r"FSDP2 has unsharded 1\.weight\. Before .*, call model\.reshard\(\)$"
        then = r"FSDP2 had unsharded 1\.weight when an optimizer was built"
        with self.everywhere():
            page = right.describe(model)
            self.assertIn("That is 100.0% of the model's 192 elements", page)
            self.assertRegex(page, f"(?m)^{now}")
            self.assertNotRegex(page, "No optimizer|had unsharded")
        for _ in range(2):
            with self.everywhere():
                page = wrong.describe(model)
                self.assertRegex(page, f"(?m)^{then}")
                self.assertIn("No optimizer given here has 1.weight\n", page)
                self.assertIn("That is 66.7% of", page)
            model.reshard()
        with self.everywhere():
            self.assertNotIn("has unsharded", wrong.describe(model))
        with self.assertWarnsOnce(r"this Muon has had a gradient.*call model\.reshard"):
            for _ in range(hints.STEPS_WITHOUT_ANY):
                wrong.step()


if __name__ == "__main__":
    run_tests()
