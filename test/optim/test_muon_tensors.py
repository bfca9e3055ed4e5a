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
from torch.testing._internal.common_utils import run_tests
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
    from torch.testing._internal.distributed.fake_pg import FakeStore


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

    def assert_step_keeps_kind(self, param, *configs):
        """The momentum of a parameter without data is of its kind, too."""
        param.grad = torch.empty_like(param)
        for config in (None, local_config(), *configs):
            with self.subTest(config=config):
                optimizer = Muon([param], distributed_config=config)
                optimizer.step()
                (buffer,) = self.buffers_of(optimizer, [param])
                self.assertIs(type(buffer), type(param.data))
                self.assertEqual(buffer.device, param.device)

    def test_parameters_without_data(self):
        on_meta = nn.Parameter(torch.empty(3, 4, device="meta"))
        configs = create_dtensor_config(), create_auto_config()
        self.assert_step_keeps_kind(on_meta, *configs)
        # As torch.export makes them.
        with FakeTensorMode() as mode:
            fake = nn.Parameter(mode.from_tensor(torch.ones(3, 4)))
            self.assert_step_keeps_kind(fake)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDTensorsOnOneRank(MuonTestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = DeviceMesh("cpu", [0])

    def test_errors_outside_of_a_step(self):
        vector = distribute_tensor(torch.ones(3), self.mesh, [Shard(0)])
        for config in (create_dtensor_config(), create_auto_config()):
            with self.assertRaisesRegex(ValueError, "given None outside of step"):
                config.redistribute_fn(None, 0, config.state)
            with self.assertRaisesRegex(ValueError, "only supports 2D"):
                config.assign_fn([vector], config.state)

    def test_gradient_that_is_no_dtensor(self):
        plain = torch.ones(2, 2)
        dtensor = DTensor.from_local(plain, self.mesh)
        options = {**FUNCTIONAL, "distributed_config": create_dtensor_config()}
        for param, grad in ((dtensor, plain), (plain, dtensor)):
            is_one = param is dtensor
            words = f"is a DTensor {is_one}, but its gradient {not is_one}"
            with self.assertRaisesRegex(RuntimeError, words):
                muon([param], [grad], [torch.zeros_like(param)], **options)

    def test_detect_tp_dims_of_dtensors(self):
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
        params = []
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Replicate(), Shard(-1)),
            (Shard(1), Replicate()),
            (Replicate(), Replicate()),
        ):
            params.append(distribute_tensor(torch.randn(4, 6), mesh, placements))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PyTorch's tensor parallelism left the plain one whole.
            found = detect_tp_dims_from_model([*params, torch.randn(2, 2)])
        self.assertEqual(found, {0: 1, 1: 0, 2: 1, 3: 1})

    def test_param_data_assigned_a_dtensor(self):
        """PyTorch lets it pass, and the next kernel that reads the parameter takes the process down."""
        bad = nn.Parameter(torch.randn(6, 4))
        bad.data = distribute_tensor(bad.data, self.mesh, [Shard(0)])
        optimizer = Muon([torch.ones(4, 4)])
        words = r"\(6, 4\).*param\.data = dtensor.*nn\.Parameter\(distribute_tensor\("
        for call in (
            lambda: Muon([("bad", bad)]),
            lambda: optimizer.add_param_group({"params": [bad]}),
        ):
            with self.assertRaisesRegex(ValueError, f"{words}.*distribute_module"):
                call()


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestFakeRanks(MuonTestCase):
    """One process answers for one rank of several."""

    def as_rank(self, rank, world_size):
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group("fake", store=FakeStore(), **ranks)
        self.addCleanup(dist.destroy_process_group)

    def dtensor(self, mesh, *placements):
        ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
        placed = DeviceMesh("cpu", ranks), placements
        return DTensor.from_local(torch.ones(2, 8), *placed, run_check=False)

    def test_any_rank_steps_on_a_cpu(self):
        """This tells what a rank of a large job needs."""
        self.as_rank(1023, 1024)
        params = []
        for _ in range(9):
            dtensor = self.dtensor((64, 16), Replicate(), Shard(0))
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

    def test_refused_dtensors(self):
        self.as_rank(1, 4)
        usual, misshapen, elsewhere = (self.dtensor((4,), Shard(0)) for _ in range(3))
        misshapen._local_tensor = torch.ones(3, 3)
        elsewhere.device_mesh._device_type = "xpu"
        largest = self.dtensor((2, 2), Partial("max"), Shard(0))
        for words, *dtensors in (
            ("parameter 0 .*Partial", largest),
            (r"local tensor has shape \(3, 3\)", misshapen),
            ("device types.*cpu.*xpu", usual, elsewhere),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                Muon(map(nn.Parameter, dtensors), distributed_config="auto")


if __name__ == "__main__":
    run_tests()
