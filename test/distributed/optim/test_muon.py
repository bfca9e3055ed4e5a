# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon with a distributed_config: each kind of parallelism against one process.

Each class runs on a CPU over gloo. Its ``...OnGPUs`` class runs the same tests over NCCL. On a single GPU, NCCL has one
rank, and four ranks that share the GPU test over gloo what Muon sends.
"""

import os
import subprocess
import sys
import time
import unittest
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.optim import Muon
from torch.optim._muon import MuonFormulas
from torch.optim._muon_engine.runtime.compute import MuonCompute
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.distributed._muon import common_modules, common_muon
from torch.testing._internal.distributed._muon.common_config import (
    FUNCTIONAL,
    NewtonSchulzCalls,
)
from torch.testing._internal.distributed._muon.common_modules import (
    data_parallel,
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    device,
    everyone,
    full,
    grid_of,
    mesh_of,
    OnCPU,
    OnGPUs,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Strategy,
    Twins,
    with_process_group,
)


try:
    from torch.optim import functional
except ImportError:
    functional = None


# Even for eight processes, uneven, and fewer rows than processes.
SHAPES = [(16, 8), (9, 13), (3, 20), (13, 9)]


class Tests(common_modules.ModuleParity):
    """The base of the tests on both kinds of devices."""

    world_size = 4

    def check_linear(self, size, batch, steps):
        """A weight by rows, a replicated bias, and inputs that are DTensors."""
        mesh = mesh_of(self.world_size)
        torch.manual_seed(42)
        model = torch.nn.Linear(size, size, device=device())
        common_modules.place_weights(model, mesh, [Shard(0)])

        def inputs(step):
            return distribute_tensor(full(step, (batch, size)), mesh, [Replicate()])

        self.check(model, create_dtensor_config(), steps, inputs=inputs)
        self.assertIsInstance(model.weight, DTensor)
        self.assertEqual(model.weight.placements, (Shard(0),))


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

    def test_dtensor_gather_full_tensor(self, placement=Shard(0)):
        dtensor = self.placed(placement)
        gathered = self.config.gather_fn(dtensor, 0, self.config.state)
        self.assertNotIsInstance(gathered, DTensor)
        self.assertTrue(torch.equal(gathered, dtensor.to_local()))

    def test_dtensor_replicate_placement(self):
        self.test_dtensor_gather_full_tensor(Replicate())

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
        owned = sorted(i for owned in assignments.values() for i in owned)
        self.assertEqual(owned, [0, 1, 2])
        metadata = config.state["param_metadata"]
        self.assertEqual(set(metadata), {0, 2})
        self.assertEqual(metadata[0]["device_mesh"], self.mesh)
        self.assertEqual(metadata[0]["placements"], (Shard(0),))
        self.assertEqual(metadata[2]["placements"], (Replicate(),))


class DTensorTests(Tests):
    def test_dtensor_shard_correctness(self):
        self.check_linear(64, 8, 1)

    def test_dtensor_vs_single_device(self):
        self.check_linear(32, 4, 5)


class PlacementTests(Tests):
    """No framework has a collective here."""

    def test_dtensor_placements(self):
        for mesh in (mesh_of(self.world_size), grid_of(self.world_size // 2, 2)):
            twins = Twins(specs(mesh, all_placements(mesh)))
            twins.set_gradients()
            with NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)
            # Each matrix once, replicas included.
            self.assertEqual(sum(everyone(len(calls.shapes))), len(twins.params))


class RepeatedTests(Tests):
    def test_twelve_steps_twice(self):
        mesh, grid = mesh_of(self.world_size), grid_of(self.world_size // 2, 2)
        placed = specs(mesh, all_placements(mesh), SHAPES[:3])
        placed += specs(grid, [(R, S0), (S0, S1)], SHAPES[:3])
        values = []
        for _ in range(2):
            twins = Twins(placed)
            for _ in range(12):
                twins.step()
            self.assertParity(twins)
            values.append([common_muon.local(p.detach()).clone() for p in twins.params])
        with self.everywhere():
            for first, second in zip(*values):
                self.assertTrue(torch.equal(first, second))


class MeshTests(Tests):
    def test_dtensor_2d_mesh(self):
        mesh = grid_of(self.world_size // 2, 2)
        twins = Twins([Spec((128, 128), mesh, (Shard(0), Shard(1)))], lr=0.01)
        self.assertTrainsAlike(twins)
        rows = 128 // mesh.size(0)
        self.assertEqual(twins.params[0].to_local().shape, (rows, 64))


class FSDPTests(Tests):
    def test_fsdp_correctness(self):
        run = common_modules.Run(orig=False)
        count = sum(everyone(len(run.step())))
        self.assertEverywhere(run.alone.problems())
        self.assertEqual(count, sum(p.ndim == 2 for p in run.one.parameters()))

    def test_fsdp_vs_single_device(self):
        for orig in (False, True):
            run = common_modules.Run(orig=orig)
            for _ in range(10):
                run.step()
            self.assertEverywhere(run.alone.problems(), f"use_orig_params={orig}")


class FullyShardTests(Tests):
    def test_fully_shard_vs_single_device(self):
        bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        line, rows = mesh_of(self.world_size), min(2, self.world_size)
        for mesh, options in (
            (line, {"mp_policy": bfloat16}),
            (line, {"reshard_after_forward": False}),
            (line, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
            (grid_of(rows, self.world_size // rows), {}),
        ):
            model = fully_shard(make_model(), mesh=mesh, **options)
            self.check(model, create_dtensor_config(), data_rank=self.rank)


class PieceTests(Tests):
    """Pieces that are cut by hand, with gradients that are given. No framework has a collective here."""

    def test_process_groups(self):
        line, grid = grid_of(self.world_size), grid_of(self.world_size // 2, 2)
        for strategy in (
            Strategy(line, "fsdp"),
            Strategy(line, "tp"),
            Strategy(line, "ddp"),
            Strategy(grid, "fsdp", "tp"),
            Strategy(grid, "ddp", "fsdp"),
        ):
            self.assertTrainsAlike(strategy.twins(), message=f"{strategy}")

    def test_flat_parameters(self):
        """FSDP1 without its backward pass."""
        run = common_modules.Run(orig=False)
        for step in range(2):
            for number, unit in enumerate(FSDP.fsdp_modules(run.model)):
                flat = unit._handle.flat_param
                rows = enumerate(zip(flat._fqns, flat._shapes, strict=True))
                seed = 1000 * step + 100 * number
                wholes = {name: full(seed + i, shape) for i, (name, shape) in rows}
                common_modules.give_flat_gradients(flat, wholes)
            run.alone.step()
            run.optimizer.step()
            self.assertEverywhere(run.alone.problems(), f"step {step}")


class DDPTests(Tests):
    def test_ddp_vs_single_device(self):
        given = create_auto_config(ddp_process_group=dist.group.WORLD)
        # Without a config, each rank orthogonalizes all matrices, as before.
        for config, count in ((given, None), (None, 4 * self.world_size)):
            model = data_parallel(make_model(), gradient_as_bucket_view=True)
            self.check(model, config, data_rank=self.rank, count=count)


# The dimensions that tensor_parallel() cuts.
TP_DIMS = {0: 0, 1: 1, 2: 0, 3: 1}


class TPTests(Tests):
    def test_per_parameter_tp_dims(self):
        tp = dist.group.WORLD
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=TP_DIMS)
        model = tensor_parallel(make_model(), mesh_of(self.world_size))
        matrices, _ = self.check(model, config)
        self.assertEqual(detect_tp_dims_from_model(matrices), TP_DIMS)
        self.assertEqual([p.placements for p in matrices], [(S0,), (S1,)] * 2)

    def test_fsdp_plus_tp(self):
        grid = grid_of(self.world_size // 2, 2)
        model = tensor_parallel(make_model(), grid["b"])
        fully_shard(model, mesh=grid["a"])
        config = create_auto_config(
            fsdp_process_group=grid.get_group("a"),
            tp_process_group=grid.get_group("b"),
            tp_dim_per_param=TP_DIMS,
        )
        self.check(model, config, data_rank=grid.get_local_rank("a"))


def make_expert(number):
    return make_model(layers=1, bias=False, seed=50 + number)


class ExpertTests(Tests):
    """Ranks 0 and 1 of each four hold one expert, ranks 2 and 3 another."""

    def test_expert_parallel_independence(self):
        config = create_auto_config(
            ep_process_group=dist.group.WORLD,
            expert_assignments={0: self.rank, 1: self.rank},
        )
        model, count = make_expert(self.rank), 2 * self.world_size
        _, optimizer = self.check(model, config, data_rank=self.rank, count=count)
        # No other rank holds them.
        self.assertEqual(optimizer.assignments, {self.rank: [0, 1]})

    def test_expert_parallel_with_fsdp(self):
        shards = grid_of(self.world_size // 2, 2)["b"]
        number = self.rank // 2
        options = {"process_group": shards.get_group(), "device_id": device()}
        model = FSDP(make_expert(number), use_orig_params=True, **options)
        config = create_auto_config(
            ep_process_group=dist.group.WORLD,
            fsdp_process_group=model.process_group,
            expert_assignments={0: number, 1: number},
            module=model,
        )
        one, group = make_expert(number), shards.get_group()
        count = self.world_size
        _, muon = self.check(model, config, 2, number, count=count, one=one, fsdp=group)
        owned = sorted(i for own in muon.assignments.values() for i in own)
        self.assertEqual(owned, [0, 1])
        ranks = dist.get_process_group_ranks(group)
        self.assertLessEqual({*muon.assignments}, {*ranks})


LAST = {}


def swapped(update):
    """The last update of this shape, which is that of another matrix."""
    before, LAST[update.shape] = LAST.get(update.shape, update), update
    return before


def rounded(update):
    noise = torch.randn_like(update)
    return update + 0.02 * update.norm() / noise.norm() * noise


CHANGES = {"zero": torch.zeros_like, "negated": torch.neg, "rounded": rounded}
CHANGES |= {"swapped": swapped}
CHANGES |= {"transposed": lambda u: u.mT if u.size(0) == u.size(1) else u}
KINDS_OF_TESTS = (
    DTensorTests,
    PlacementTests,
    MeshTests,
    FSDPTests,
    FullyShardTests,
    PieceTests,
    DDPTests,
    TPTests,
    ExpertTests,
)
COMPARING = [
    (tests, name)
    for tests in KINDS_OF_TESTS
    for name in vars(tests)
    if name.startswith("test_")
]


@common_utils.instantiate_parametrized_tests
class TestMuonComparison(Tests, OnCPU):
    """The tests on GPUs fail with a wrong update, and pass with one that is rounded differently."""

    world_size = 2

    @common_utils.parametrize("change", CHANGES)
    def test_update(self, change):
        formulas, run, changed = MuonFormulas.orthogonalize, MuonCompute.compute, []

        def update(*args, out):
            right = formulas(*args)
            made = CHANGES[change](right)
            changed.append(not torch.equal(made, right))
            return out.copy_(made)

        def compute(*args):
            with mock.patch.object(MuonFormulas, "orthogonalize", update):
                run(*args)

        inexact = mock.patch.object(common_muon, "is_exact", return_value=False)
        of_engine = mock.patch.object(MuonCompute, "compute", compute)
        for tests, name in COMPARING:
            changed.clear()
            with inexact, of_engine:
                kind, _ = self.outcome(lambda: getattr(tests, name)(self)) or ("", "")
            is_wrong = any(everyone(any(changed))) and change != "rounded"
            with self.everywhere(name):
                self.assertEqual(kind, "AssertionError" if is_wrong else "")


class OneRankTests(Tests):
    world_size = 1

    def test_every_placement(self):
        for mesh in (mesh_of(1), grid_of(1, 1)):
            self.assertTrainsAlike(Twins(specs(mesh, all_placements(mesh))))

    def test_process_group(self):
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.check(make_model(), config)


class TestMuonOneRank(OneRankTests, DTensorTests, FullyShardTests, OnCPU):
    pass


class TestMuonDTensor(DTensorTests, PlacementTests, RepeatedTests, MeshTests, OnCPU):
    pass


class TestMuonFSDP(FSDPTests, FullyShardTests, OnCPU):
    pass


class TestMuonPieces(PieceTests, OnCPU):
    pass


class TestMuonDDP(DDPTests, OnCPU):
    pass


class TestMuon2DParallelism(TPTests, OnCPU):
    pass


class TestMuonExpertParallel(ExpertTests, OnCPU):
    pass


class TestMuon1DOnGPUs(
    OnGPUs,
    DTensorTests,
    PlacementTests,
    RepeatedTests,
    FSDPTests,
    FullyShardTests,
    DDPTests,
    MultiProcessTestCase,
):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_dtensor_shard_correctness(self):
        super().test_dtensor_shard_correctness()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_dtensor_vs_single_device(self):
        super().test_dtensor_vs_single_device()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_dtensor_placements(self):
        super().test_dtensor_placements()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_twelve_steps_twice(self):
        super().test_twelve_steps_twice()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_fsdp_correctness(self):
        super().test_fsdp_correctness()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_fsdp_vs_single_device(self):
        super().test_fsdp_vs_single_device()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_fully_shard_vs_single_device(self):
        super().test_fully_shard_vs_single_device()

    @skip_if_lt_x_gpu(2)
    @with_process_group
    def test_ddp_vs_single_device(self):
        super().test_ddp_vs_single_device()


class TestMuon2DOnGPUs(OnGPUs, MeshTests, TPTests, ExpertTests, MultiProcessTestCase):
    @skip_if_lt_x_gpu(4)
    @with_process_group
    def test_dtensor_2d_mesh(self):
        super().test_dtensor_2d_mesh()

    @skip_if_lt_x_gpu(4)
    @with_process_group
    def test_per_parameter_tp_dims(self):
        super().test_per_parameter_tp_dims()

    @skip_if_lt_x_gpu(4)
    @with_process_group
    def test_fsdp_plus_tp(self):
        super().test_fsdp_plus_tp()

    @skip_if_lt_x_gpu(4)
    @with_process_group
    def test_expert_parallel_independence(self):
        super().test_expert_parallel_independence()

    @skip_if_lt_x_gpu(4)
    @with_process_group
    def test_expert_parallel_with_fsdp(self):
        super().test_expert_parallel_with_fsdp()


class TestMuonOnOneGPU(
    OnGPUs, OneRankTests, DTensorTests, FullyShardTests, MultiProcessTestCase
):
    """With NCCL, whose collectives the frameworks ask for."""

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_every_placement(self):
        super().test_every_placement()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_process_group(self):
        super().test_process_group()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_dtensor_shard_correctness(self):
        super().test_dtensor_shard_correctness()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_dtensor_vs_single_device(self):
        super().test_dtensor_vs_single_device()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_fully_shard_vs_single_device(self):
        super().test_fully_shard_vs_single_device()


class TestMuonOnSharedGPU(
    OnGPUs, PlacementTests, MeshTests, PieceTests, MultiProcessTestCase
):
    """Over gloo, which lacks collectives of the frameworks for the tensors of a GPU."""

    backend = "gloo"

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_dtensor_placements(self):
        super().test_dtensor_placements()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_dtensor_2d_mesh(self):
        super().test_dtensor_2d_mesh()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_process_groups(self):
        super().test_process_groups()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_flat_parameters(self):
        super().test_flat_parameters()


class Stuck(OnGPUs, MultiProcessTestCase):
    __test__ = False
    world_size = 2
    seconds = 1

    def test_sleep(self):
        time.sleep(600 * self.rank)


# As in a process with one GPU and NVML.
ONE_GPU = """
import sys
import torch

def count():
    sys.exit("CUDA was asked for its devices")

torch.cuda._is_compiled = lambda: True
# A torch for CPUs lacks them.
for name in "getDeviceCount", "init", "getCurrentRawStream":
    setattr(torch._C, f"_cuda_{name}", count)
torch.cuda._device_count_nvml = lambda: 1
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.common_utils import TEST_CUDA
print(TEST_CUDA)
"""


class TestMuonFunctional(Tests, OnCPU):
    """``torch.optim.functional.muon``, which torch 2.15 made public, is the overlay's."""

    world_size = 2

    @unittest.skipUnless(hasattr(functional, "muon"), "this torch has none")
    def test_public_function(self):
        placed = specs(mesh_of(self.world_size), [(S0,), (S1,), (R,)])
        wholes, lists = {}, {}
        for number, kind in enumerate(("parameters", "gradients", "momenta")):
            wholes[kind] = [
                full(10 * i + number, spec.shape) for i, spec in enumerate(placed)
            ]
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


class TestMuonProcesses(common_utils.TestCase):
    """How the ranks of OnGPUs start and end."""

    def run_python(self, code, **variables):
        command = [sys.executable, "-c", code]
        how = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, env={**os.environ, **variables}, **how)

    def test_imports_ask_no_device(self):
        """A test of four ranks took 10 s, because a server that asks for GPUs cannot be forked."""
        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        done = self.run_python(ONE_GPU, **{name: "1"})
        self.assertEqual(done.stdout, "True\n", done.stderr)
        done = self.run_python(ONE_GPU, **{name: "0"})
        self.assertIn("CUDA was asked", done.stderr)

    def test_start(self):
        decide, gpus = common_muon.process_type.__wrapped__, torch.cuda.is_available()
        for may, has_gpus, name in (
            (True, True, "ForkServerProcess"),
            (False, True, "SpawnProcess"),
            (False, False, "ForkServerProcess"),
        ):
            forks = mock.patch.object(common_muon, "forks_may_use_gpus", lambda: may)
            found = mock.patch.object(torch.cuda, "is_available", lambda: has_gpus)
            with forks, found:
                self.assertEqual(decide().__name__, name)
        self.assertTrue(common_muon.forks_may_use_gpus() or not gpus)

    def test_a_test_is_bounded(self):
        result = unittest.TestResult()
        with self.assertLogs("torch.testing._internal.common_distributed") as logged:
            Stuck("test_sleep").run(result)
        ((_, error),) = result.errors
        self.assertIn("Process 1 terminated or timed out after", error)
        self.assertIn("in test_sleep", "\n".join(logged.output))


class TestMuonPerformance(OnGPUs, Tests, MultiProcessTestCase):
    """Prefetching pays if transfers take time. On a CPU, the bench measures it over a delayed wire."""

    # Weights of 1.5 GB are made twice.
    seconds = 180

    @skip_if_lt_x_gpu(4)
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


# Each kind of parallelism with each pair of flags. On 8 processes, each kind has one pair of flags without
# MUON_TEST_WHOLE_MATRIX=1.
KINDS = {
    "fsdp": ("fsdp",),
    "ddp": ("ddp",),
    "tp": ("tp",),
    "fsdp_tp": ("fsdp", "tp"),
    "hsdp": ("ddp", "fsdp"),
    "ep": ("ep", "fsdp"),
}
PLACEMENTS = {"fsdp": S0, "ddp": R, "tp": S1}


CELL = "parallelism,async_parallel,prefetch"
FLAGS = [*product([True, False], [0, 1, 2])]
CELLS = CELLS_OF_8 = [(kind, *flags) for kind, flags in product(KINDS, FLAGS)]
if os.environ.get("MUON_TEST_WHOLE_MATRIX") != "1":
    CELLS_OF_8 = [(kind, *flags) for kind, flags in zip(KINDS, FLAGS, strict=True)]


class Matrix(common_modules.ModuleParity):
    """Each cell trains pieces that are cut by hand, DTensors in the same buckets, and a module."""

    def check_cell(self, parallelism, async_parallel, prefetch):
        flags = dict(async_gpu_parallelism=async_parallel, prefetch_count=prefetch)
        kinds, size = KINDS[parallelism], self.world_size
        # Two processes fill one dimension at a time.
        shapes = [(2, 1), (1, 2)] if size == 2 else [(2, size // 2)]
        for shape in [(size,)] if len(kinds) == 1 else shapes:
            self.train(grid_of(*shape), kinds, flags)

    def train(self, grid, kinds, flags):
        mesh, number, given = grid, 0, dict(flags)
        half = SHAPES * (self.world_size // 2)
        if "ep" in kinds:
            # Each row of the grid shards an expert, and dense matrices in the same way.
            mesh, kinds, number = grid["b"], kinds[1:], grid.get_local_rank("a")
            given["ep_process_group"] = grid.get_group("a")
            given["expert_assignments"] = dict.fromkeys(range(len(half)), number)
        if "tp" in kinds:
            given["tp_dim_per_param"] = dict.fromkeys(range(len(half)), 1)
        strategy, config = Strategy(mesh, *kinds), create_dtensor_config(**flags)
        placed = [strategy.cut(shape, 1) for shape in half]
        placed += specs(mesh, [tuple(PLACEMENTS[kind] for kind in kinds)], half)
        seeds = [i + 100 * number * (i < len(half)) for i in range(len(placed))]
        # Without a limit, an owner that works alone has one bucket.
        with mock.patch.object(buckets, "BUCKET_BYTES", 512):
            twins = Twins(placed, strategy.config(**given), seeds=seeds)
        found = twins.optimizer._engine.schedule.buckets
        # With fewer, there is nothing to prefetch.
        self.assertGreaterEqual(sum(self.rank in b.ranks for b in found), 3)
        self.assertTrainsAlike(twins, 1, f"{strategy}")
        model, data_rank = make_model(layers=1, seed=number), self.rank
        if kinds == ("ddp",):
            model, config = data_parallel(model), strategy.config(**flags)
        if "tp" in kinds:
            model = tensor_parallel(model, mesh["b"] if mesh.ndim == 2 else mesh)
            data_rank = mesh.get_coordinate()[0] * (mesh.ndim - 1)
        if "fsdp" in kinds:
            fully_shard(model, mesh=mesh["a"] if "tp" in kinds else mesh)
        self.check(model, config, 1, data_rank, count=2 * grid.size() // mesh.size())


@common_utils.instantiate_parametrized_tests
class WholeMatrix(Matrix):
    @common_utils.parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        self.check_cell(**cell)


class TestMuonMatrixOf2(WholeMatrix, OnCPU):
    world_size = 2


class TestMuonMatrixOf4(WholeMatrix, OnCPU):
    pass


@common_utils.instantiate_parametrized_tests
class TestMuonMatrixOf8(Matrix, OnCPU):
    world_size = 8

    @common_utils.parametrize(CELL, CELLS_OF_8)
    def test_matrix(self, **cell):
        self.check_cell(**cell)

    def test_3d_mesh(self):
        mesh = grid_of(2, 2, 2)
        self.assertTrainsAlike(Twins(specs(mesh, all_placements(mesh), [(7, 13)])))

    def test_4d_mesh(self):
        mesh = grid_of(1, 2, 2, 2)
        placements = [(R, S0, S1, R), (S1, S0, S0, S1), (S0, R, R, S0), (R, R, R, R)]
        self.assertTrainsAlike(Twins(specs(mesh, placements, [(8, 8), (7, 13)])))

    def test_hsdp_over_tensor_parallel(self):
        mesh = grid_of(2, 2, 2)
        model = tensor_parallel(make_model(), mesh["c"])
        fully_shard(model, mesh=mesh["a", "b"])
        config = create_dtensor_config()
        matrices, _ = self.check(model, config, data_rank=self.rank // 2)
        kinds = [type(placement).__name__ for placement in matrices[0].placements]
        self.assertEqual(kinds, ["Replicate", "_StridedShard", "Shard"])


if __name__ == "__main__":
    common_utils.run_tests()
