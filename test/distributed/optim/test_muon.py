# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon with a distributed_config: each kind of parallelism against one process.

Each check runs on a CPU over gloo. The classes ``...OnGPUs`` run the same checks over NCCL. On a single GPU, NCCL has
one rank, and four ranks that share the GPU test over gloo what Muon sends.
"""

import itertools
import time
import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
)
from torch.testing._internal.distributed._muon import common_muon, common_parallel
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    full,
    mesh_of,
    OnCPU,
    OnGPUs,
    place,
    R,
    S0,
    S1,
    specs,
    with_process_group,
)


try:
    from torch.optim import functional
except ImportError:
    functional = None


class TestDTensorConfig(common_utils.TestCase):
    """The config's three functions called directly, in a process group of one."""

    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.addCleanup(dist.destroy_process_group)
        self.mesh, self.config = DeviceMesh("cpu", [0]), create_dtensor_config()

    def placed(self, placement, size=10):
        return distribute_tensor(torch.randn(size, size), self.mesh, [placement])

    def test_dtensor_config_creation(self):
        config = self.config
        functions = config.assign_fn, config.gather_fn, config.redistribute_fn
        self.assertTrue(all(map(callable, functions)))
        self.assertIs(config.state["is_dtensor"], True)
        self.assertIs(config.async_gpu_parallelism, True)
        self.assertEqual(config.prefetch_count, 1)

    def check_gather(self, placement):
        dtensor = self.placed(placement)
        gathered = self.config.gather_fn(dtensor, 0, self.config.state)
        self.assertNotIsInstance(gathered, DTensor)
        self.assertTrue(torch.equal(gathered, dtensor.to_local()))

    def test_dtensor_gather_full_tensor(self):
        self.check_gather(Shard(0))

    def test_dtensor_replicate_placement(self):
        self.check_gather(Replicate())

    def test_dtensor_redistribute(self):
        config, update = self.config, torch.randn(10, 10)
        config.assign_fn([self.placed(Shard(0)) for _ in range(2)], config.state)
        config.state["current_param_idx"] = 0
        redistributed = config.redistribute_fn(update, 0, config.state)
        self.assertIsInstance(redistributed, DTensor)
        self.assertEqual(redistributed.device_mesh, self.mesh)
        self.assertEqual(redistributed.placements, (Shard(0),))
        self.assertTrue(torch.equal(redistributed.to_local(), update))

    def test_dtensor_mixed_regular_params(self):
        config = self.config
        params = [self.placed(Shard(0)), torch.randn(5, 5), self.placed(Replicate(), 8)]
        assignments = config.assign_fn(params, config.state)
        owned = sorted(index for owned in assignments.values() for index in owned)
        self.assertEqual(owned, [0, 1, 2])
        metadata = config.state["param_metadata"]
        self.assertEqual(set(metadata), {0, 2})
        self.assertEqual(metadata[0]["device_mesh"], self.mesh)
        self.assertEqual(metadata[0]["placements"], (Shard(0),))
        self.assertEqual(metadata[2]["placements"], (Replicate(),))


def tests_of(*names, prepare=lambda test: test):
    """A test of a class for each check of :mod:`common_parallel`."""

    def add_to(cls):
        for name in names:
            check = getattr(common_parallel, f"check_{name}")

            def test(case, check=check):
                check(case)

            test.__name__ = f"test_{name}"
            setattr(cls, test.__name__, prepare(test))
        return cls

    return add_to


OF_ONE_RANK = (
    "every_placement",
    "process_group",
    "dtensor_shard_correctness",
    "dtensor_vs_single_device",
    "fully_shard_vs_single_device",
)


@tests_of(*OF_ONE_RANK)
class TestMuonOneRank(OnCPU):
    world_size = 1


class TestMuonDTensor(OnCPU):
    def test_dtensor_shard_correctness(self):
        common_parallel.check_dtensor_shard_correctness(self)

    def test_dtensor_vs_single_device(self):
        common_parallel.check_dtensor_vs_single_device(self)

    def test_dtensor_placements(self):
        common_parallel.check_dtensor_placements(self)

    def test_twelve_steps_twice(self):
        common_parallel.check_twelve_steps_twice(self)

    def test_dtensor_2d_mesh(self):
        common_parallel.check_dtensor_2d_mesh(self)


class TestMuonFSDP(OnCPU):
    def test_fsdp_correctness(self):
        common_parallel.check_fsdp_correctness(self)

    def test_fsdp_vs_single_device(self):
        common_parallel.check_fsdp_vs_single_device(self)

    def test_fully_shard_vs_single_device(self):
        common_parallel.check_fully_shard_vs_single_device(self)


class TestMuonPieces(OnCPU):
    def test_process_groups(self):
        common_parallel.check_process_groups(self)

    def test_flat_parameters(self):
        common_parallel.check_flat_parameters(self)


class TestMuonDDP(OnCPU):
    def test_ddp_vs_single_device(self):
        common_parallel.check_ddp_vs_single_device(self)


class TestMuon2DParallelism(OnCPU):
    def test_per_parameter_tp_dims(self):
        common_parallel.check_per_parameter_tp_dims(self)

    def test_fsdp_plus_tp(self):
        common_parallel.check_fsdp_plus_tp(self)


class TestMuonExpertParallel(OnCPU):
    def test_expert_parallel_independence(self):
        common_parallel.check_expert_parallel_independence(self)

    def test_expert_parallel_with_fsdp(self):
        common_parallel.check_expert_parallel_with_fsdp(self)


@tests_of(
    "dtensor_shard_correctness",
    "dtensor_vs_single_device",
    "dtensor_placements",
    "twelve_steps_twice",
    "fsdp_correctness",
    "fsdp_vs_single_device",
    "fully_shard_vs_single_device",
    "ddp_vs_single_device",
    prepare=with_process_group,
)
class TestMuon1DOnGPUs(OnGPUs, MultiProcessTestCase):
    world_size = gpus = 2


@tests_of(
    "dtensor_2d_mesh",
    "per_parameter_tp_dims",
    "fsdp_plus_tp",
    "expert_parallel_independence",
    "expert_parallel_with_fsdp",
    prepare=with_process_group,
)
class TestMuon2DOnGPUs(OnGPUs, MultiProcessTestCase):
    world_size = gpus = 4


@tests_of(*OF_ONE_RANK, prepare=with_process_group)
class TestMuonOnOneGPU(OnGPUs, MultiProcessTestCase):
    """With NCCL, whose collectives the frameworks ask for."""

    world_size = gpus = 1


@tests_of(
    "dtensor_placements",
    "dtensor_2d_mesh",
    "process_groups",
    "flat_parameters",
    prepare=with_process_group,
)
class TestMuonOnSharedGPU(OnGPUs, MultiProcessTestCase):
    """Over gloo, which lacks collectives of the frameworks for the tensors of a GPU."""

    backend = "gloo"
    world_size, gpus = 4, 1


class TestMuonFunctional(OnCPU):
    """``torch.optim.functional.muon``, which torch 2.15 made public, is the overlay's."""

    world_size = 2

    @unittest.skipUnless(hasattr(functional, "muon"), "this torch has none")
    def test_public_function(self):
        placed = specs(mesh_of(self.world_size), [(S0,), (S1,), (R,)])
        wholes, lists = {}, {}
        for number, kind in enumerate(("parameters", "gradients", "momenta")):
            seeds = itertools.count(number, 10)
            wholes[kind] = [full(next(seeds), spec.shape) for spec in placed]
            lists[kind] = [place(w, spec) for w, spec in zip(wholes[kind], placed)]
        starts = [whole.clone() for whole in wholes["parameters"]]
        config = create_dtensor_config()
        for _ in range(2):
            functional.muon(*lists.values(), distributed_config=config, **FUNCTIONAL)
            functional.muon(*wholes.values(), **FUNCTIONAL)
        with self.everywhere():
            for kind in wholes:
                for found, whole, spec in zip(lists[kind], wholes[kind], placed):
                    piece = common_muon.piece_of(whole, spec)
                    self.assertTrue(torch.equal(common_muon.local(found), piece), kind)
            for start, whole in zip(starts, wholes["parameters"]):
                self.assertFalse(torch.equal(start, whole))


class TestMuonPerformance(OnGPUs, MultiProcessTestCase):
    """Prefetching pays if transfers take time."""

    world_size = gpus = 4
    # Weights of 1.5 GB are made twice.
    seconds = 180

    @with_process_group
    def test_prefetch_speedup(self):
        # Without biases, FSDP1 flattens 48 matrices into one parameter.
        shapes = [(128, 2048), *[(2048, 4096), (4096, 2048)] * 23, (2048, 4096)]
        seconds, results = {}, {}
        for prefetch in (0, 2):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(*shape, bias=False) for shape in shapes]
            model = FSDP(torch.nn.Sequential(*layers).to(device()))
            starts = [param.detach().clone() for param in model.parameters()]
            config = create_auto_config(
                fsdp_process_group=model.process_group, prefetch_count=prefetch
            )
            optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)
            for step in range(13):
                if step == 3:
                    torch.cuda.synchronize()
                    dist.barrier()
                    began = time.perf_counter()
                model(full(step, (8, 128))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds[prefetch] = time.perf_counter() - began
            results[prefetch] = [param.detach().clone() for param in model.parameters()]
        speedup = seconds[0] / seconds[2]
        if self.rank == 0:
            print(f"prefetch speed-up: {speedup:.2f}")
        with self.everywhere():
            for first, second, start in zip(*results.values(), starts):
                self.assertTrue(common_muon.moved_alike(first, second, 13, start))
            self.assertGreater(speedup, 1.2)


if __name__ == "__main__":
    common_utils.run_tests()
