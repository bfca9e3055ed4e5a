# Owner(s): ["module: optimizer"]
"""Muon with tensors of other kinds, on one rank: on the meta device, fake ones, and DTensors."""

import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import placed_like, problem_with
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    local_config,
    MuonTestCase,
)


if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


class TestTensors(MuonTestCase):
    def test_detect_tp_dims(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
        model[0].weight.tp_dim = 1
        model[1].weight.partition_dim = 1
        # Without a mark, dimension 0 is a guess, and a warning says so.
        with self.assertWarnsRegex(UserWarning, r"parameters \[1\];.*0 is a guess"):
            self.assertEqual(detect_tp_dims_from_model(model), {0: 1, 1: 0, 2: 1})
        params = [model[1].weight, model[0].weight]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(detect_tp_dims_from_model(iter(params)), {0: 1, 1: 1})
            # Megatron's mark of a weight that it does not cut.
            model[1].weight.partition_dim = -1
            self.assertEqual(detect_tp_dims_from_model(params), {1: 1})

    def assert_step_keeps_kind(self, param, config):
        """The momentum of a parameter without data is of its kind, too."""
        param.grad = torch.empty_like(param)
        optimizer = Muon([param], distributed_config=config)
        optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        self.assertIs(type(buffer), type(param.data))
        self.assertEqual(buffer.device, param.device)

    def test_parameters_on_the_meta_device(self):
        param = nn.Parameter(torch.empty(3, 4, device="meta"))
        for config in (
            None,
            create_dtensor_config(),
            create_auto_config(),
            local_config(),
        ):
            with self.subTest(config=config):
                self.assert_step_keeps_kind(param, config)

    def test_fake_parameters(self):
        """As torch.export makes them."""
        mode = FakeTensorMode()
        param = nn.Parameter(mode.from_tensor(torch.ones(3, 4)))
        for config in (None, local_config()):
            with self.subTest(config=config), mode:
                self.assert_step_keeps_kind(param, config)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDTensorsOnOneRank(MuonTestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = DeviceMesh("cpu", [0])

    def test_round_trip(self):
        params = [
            distribute_tensor(torch.randn(5, 3), self.mesh, [placement])
            for placement in (Shard(0), Shard(1), Replicate())
        ]
        vector = distribute_tensor(torch.ones(3), self.mesh, [Shard(0)])
        for factory in (create_dtensor_config, create_auto_config):
            config = factory()
            config.assign_fn(params, config.state)
            for index, param in enumerate(params):
                with self.subTest(factory=factory, placements=param.placements):
                    config.state["current_param_idx"] = index
                    full = config.gather_fn(param, 0, config.state)
                    self.assertNotIsInstance(full, DTensor)
                    piece = config.redistribute_fn(full, 0, config.state)
                    self.assertEqual(piece.placements, param.placements)
                    self.assertEqual(piece.shape, param.shape)
                    self.assert_same_bits([piece.to_local()], [param.to_local()])
            with self.subTest(factory=factory):
                with self.assertRaisesRegex(ValueError, "given None outside of step"):
                    config.redistribute_fn(None, 0, config.state)
                with self.assertRaisesRegex(ValueError, "only supports 2D"):
                    config.assign_fn([vector], config.state)

    def test_momentum_on_another_mesh(self):
        tensors = []
        for dimension_name in ("a", "b"):
            mesh = DeviceMesh("cpu", [0], mesh_dim_names=(dimension_name,))
            tensors.append(DTensor.from_local(torch.ones(2, 2), mesh))
        self.assertFalse(placed_like(*tensors))

    def test_gradient_that_is_no_dtensor(self):
        plain = torch.ones(2, 2)
        dtensor = DTensor.from_local(plain, self.mesh)
        for param, grad in ((dtensor, plain), (plain, dtensor)):
            with self.subTest(param=type(param)):
                expected = f"the parameter is a DTensor {param is dtensor}, but its gradient {grad is dtensor}"
                self.assertEqual(problem_with(param, grad), expected)

    def test_detect_tp_dims_of_dtensors(self):
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
        params = [
            distribute_tensor(torch.randn(4, 6), mesh, placements)
            for placements in (
                (Shard(0), Shard(1)),
                (Shard(1), Shard(0)),
                (Replicate(), Shard(-1)),
                (Shard(1), Replicate()),
                (Replicate(), Replicate()),
            )
        ]
        plain = torch.randn(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PyTorch's tensor parallelism left the plain one whole.
            found = detect_tp_dims_from_model([*params, plain])
        self.assertEqual(found, {0: 1, 1: 0, 2: 1, 3: 1})
        with self.assertWarnsRegex(UserWarning, r"parameters \[0\];"):
            found = detect_tp_dims_from_model([plain])
        self.assertEqual(found, {0: 0})

    def test_param_data_assigned_a_dtensor(self):
        # PyTorch lets it pass, and the next kernel that reads the parameter takes the process down.
        pattern = (
            r"\(6, 4\).*param\.data = dtensor.*nn\.Parameter\(distribute_tensor\("
            ".*distribute_module"
        )
        for config in (None, create_dtensor_config(), create_auto_config()):
            with self.subTest(config=config):
                good, bad = (nn.Linear(4, rows, bias=False) for rows in (4, 6))
                bad.weight.data = distribute_tensor(
                    bad.weight.data, self.mesh, [Shard(0)]
                )
                model = nn.Sequential(good, bad)
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(model.parameters(), distributed_config=config)
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(model.named_parameters(), distributed_config=config)
                optimizer = Muon(good.parameters(), distributed_config=config)
                with self.assertRaisesRegex(ValueError, pattern):
                    optimizer.add_param_group({"params": [bad.weight]})


if __name__ == "__main__":
    run_tests()
