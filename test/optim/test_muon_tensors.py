# Owner(s): ["module: optimizer"]
"""Muon with tensors of other kinds, on one rank: on the meta device, fake ones, and DTensors."""

import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import Muon
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
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        Shard,
    )
    from torch.distributed.tensor.placement_types import _StridedShard, Placement
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
class TestFakeRanks(MuonTestCase):
    """One process answers for one rank of several."""

    def as_rank(self, rank, world_size):
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group("fake", store=FakeStore(), **ranks)
        self.addCleanup(dist.destroy_process_group)

    def dtensor(self, mesh, *placements, **size):
        ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
        placed = DeviceMesh("cpu", ranks), placements
        return DTensor.from_local(torch.ones(2, 8), *placed, run_check=False, **size)

    def test_errors_outside_of_a_step(self):
        self.as_rank(0, 1)
        vector = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0]))
        for config in (create_dtensor_config(), create_auto_config()):
            with self.assertRaisesRegex(ValueError, "given None outside of step"):
                config.redistribute_fn(None, 0, config.state)
            with self.assertRaisesRegex(ValueError, "only supports 2D"):
                config.assign_fn([vector], config.state)

    def test_detect_tp_dims_of_dtensors(self):
        self.as_rank(0, 1)
        params = []
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Replicate(), Shard(-1)),
            (Shard(1), Replicate()),
            (Replicate(), Replicate()),
        ):
            params.append(self.dtensor((1, 1), *placements))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PyTorch's tensor parallelism left the plain one whole.
            found = detect_tp_dims_from_model([*params, torch.randn(2, 2)])
        self.assertEqual(found, {0: 1, 1: 0, 2: 1, 3: 1})

    def test_any_rank_steps_on_a_cpu(self):
        """This tells what a rank of a large job needs."""
        self.as_rank(0, 1024)
        size = (64, 16), Replicate(), Shard(0)
        params = [nn.Parameter(self.dtensor(*size)) for _ in range(9)]
        optimizer = Muon(params, distributed_config="auto")
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        page = optimizer.describe()
        self.assertIn("busiest", page)
        # A user can read it.
        self.assertLess(len(page.splitlines()), 40)

    def test_uneven_fsdp_over_tp(self):
        """FSDP cuts what TP has left: of 17 rows, the last two are with the last rank."""
        self.as_rank(7, 8)
        size = {"shape": torch.Size((17, 8)), "stride": (8, 1)}
        strided = _StridedShard(0, split_factor=2)
        rows = nn.Parameter(self.dtensor((4, 2), strided, Shard(0), **size))
        Muon([rows], distributed_config="auto")

    def test_refused_dtensors(self):
        class Unknown(Placement):
            __eq__, __hash__ = object.__eq__, object.__hash__

        self.as_rank(1, 4)
        usual, misshapen, elsewhere, unknown = (
            self.dtensor((4,), Shard(0)) for _ in range(4)
        )
        misshapen._local_tensor = torch.ones(3, 3)
        elsewhere.device_mesh._device_type = "xpu"
        unknown._spec.placements = (Unknown(),)
        largest = self.dtensor((2, 2), Partial("max"), Shard(0))
        for words, *dtensors in (
            ("parameter 0 .*Partial", largest),
            ("neither a shard", unknown),
            (r"local tensor has shape \(3, 3\)", misshapen),
            ("device types.*cpu.*xpu", usual, elsewhere),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                Muon(map(nn.Parameter, dtensors), distributed_config="auto")


if __name__ == "__main__":
    run_tests()
