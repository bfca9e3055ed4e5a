# Owner(s): ["module: optimizer"]
"""Muon with tensors of other kinds, on one rank: on the meta device, fake ones, and DTensors."""

import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import Muon
from torch.optim._muon import muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import (
    FUNCTIONAL,
    local_config,
    MuonTestCase,
)


if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import (
        distribute_tensor,
        DTensor,
        Partial,
        Replicate,
        Shard,
    )
    from torch.testing._internal.distributed._muon.fake_ranks import FakeRanks
else:
    FakeRanks = object


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

    def test_gradient_that_is_no_dtensor(self):
        plain = torch.ones(2, 2)
        dtensor = DTensor.from_local(plain, self.mesh)
        for param, grad in ((dtensor, plain), (plain, dtensor)):
            with self.subTest(param=type(param)):
                expected = f"the parameter is a DTensor {param is dtensor}, but its gradient {grad is dtensor}"
                options = {**FUNCTIONAL, "distributed_config": create_dtensor_config()}
                with self.assertRaisesRegex(RuntimeError, expected):
                    muon([param], [grad], [torch.zeros_like(param)], **options)

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


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestFakeRanks(FakeRanks, TestCase):
    def assertRefused(self, pattern, *dtensors):
        with self.assertRaisesRegex(ValueError, pattern):
            Muon(
                [nn.Parameter(dtensor) for dtensor in dtensors],
                distributed_config="auto",
            )

    def test_any_rank_steps_on_a_cpu(self):
        """One process tells what a rank of a large job needs."""
        self.as_rank(1023, 1024)
        mesh = DeviceMesh("cpu", torch.arange(1024).view(64, 16))
        params = []
        for _ in range(9):
            local = torch.ones(2, 8)
            dtensor = DTensor.from_local(
                local, mesh, (Replicate(), Shard(0)), run_check=False
            )
            params.append(nn.Parameter(dtensor))
        optimizer = Muon(params, distributed_config="auto")
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        page = optimizer.describe()
        self.assertIn("busiest", page)
        # A user can read it.
        self.assertLess(len(page.splitlines()), 40)

    def test_partial_that_is_no_sum(self):
        self.as_rank(1, 4)
        dtensor = self.dtensor((2, 2), Partial("max"), Shard(0))
        self.assertRefused("parameter 0 .*Partial", dtensor)

    def test_local_tensor_of_another_size(self):
        self.as_rank(0, 2)
        dtensor = self.dtensor((2,), Shard(0))
        dtensor._local_tensor = torch.ones(3, 3)
        self.assertRefused(r"local tensor has shape \(3, 3\)", dtensor)

    def test_meshes_of_different_device_types(self):
        self.as_rank(0, 2)
        dtensors = [self.dtensor((2,), Shard(0)) for _ in range(2)]
        dtensors[1].device_mesh._device_type = "xpu"
        self.assertRefused("device types.*cpu.*xpu", *dtensors)


if __name__ == "__main__":
    run_tests()
