# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon with a distributed_config: each kind of parallelism against one process.

The classes before those of tests have the checks. ``...OnGPUs`` run them over NCCL, and the others on a CPU over gloo. On a
single GPU, NCCL has one rank, and four ranks that share the GPU test over gloo what Muon sends.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_modules import (
    check_fsdp1,
    check_module,
    make_model,
    place_weights,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    full,
    grid_of,
    local,
    mesh_of,
    OnCPU,
    OnGPUs,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)
from torch.testing._internal.distributed._muon.common_parity import Cell, check_cell


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


# The dimensions that tensor_parallel() cuts.
TP_DIMS = {0: 0, 1: 1, 2: 0, 3: 1}
LAYOUTS = (
    "rows",
    "columns",
    "replicas",
    "rows_and_columns",
    "hsdp",
    "fsdp",
    "tp",
    "ddp",
    "fsdp_tp",
    "ddp_fsdp",
)


def grid_of_columns(case):
    """The mesh of all ranks with two columns, if there are as many ranks."""
    rows = max(1, case.world_size // 2)
    return grid_of(rows, case.world_size // rows)


class Layouts:
    """Some rows of the table of parity, which has its own classes on a CPU."""

    def test_layouts(self):
        for layout in LAYOUTS:
            check_cell(self, layout, Cell())


class GivenGradients:
    """No framework has a collective here."""

    def test_twelve_steps_twice(self):
        placed = specs(mesh_of(self.world_size), [(S0,), (S1,), (R,)])
        placed += specs(grid_of_columns(self), [(R, S0), (S0, S1)])
        first, second = Twins(placed), Twins(placed)
        for twins in (first, second):
            for _ in range(12):
                twins.step()
            self.assertParity(twins)
        with self.everywhere():
            for one, other in zip(first.params, second.params):
                self.assertTrue(torch.equal(local(one), local(other)))

    def test_dtensor_2d_mesh(self):
        mesh = grid_of_columns(self)
        twins = Twins([Spec((128, 128), mesh, (Shard(0), Shard(1)))], lr=0.01)
        self.assertTrainsAlike(twins)
        rows, columns = 128 // mesh.size(0), 128 // mesh.size(1)
        self.assertEqual(twins.params[0].to_local().shape, (rows, columns))


class TrainedDTensors:
    """A weight by rows, a replicated bias, and inputs that are DTensors."""

    def check(self, size, batch, steps):
        mesh = mesh_of(self.world_size)
        torch.manual_seed(42)
        model = torch.nn.Linear(size, size, device=device())
        place_weights(model, mesh, [Shard(0)])

        def inputs(step):
            return distribute_tensor(full(step, (batch, size)), mesh, [Replicate()])

        check_module(self, model, create_dtensor_config(), steps=steps, inputs=inputs)
        self.assertIsInstance(model.weight, DTensor)
        self.assertEqual(model.weight.placements, (Shard(0),))

    def test_dtensor_shard_correctness(self):
        self.check(size=64, batch=8, steps=1)

    def test_dtensor_vs_single_device(self):
        self.check(size=32, batch=4, steps=5)


class FSDP2s:
    def test_fully_shard_vs_single_device(self):
        line = mesh_of(self.world_size)
        rows = min(2, self.world_size)
        grid = grid_of(rows, self.world_size // rows)
        bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for name, mesh, options in (
            ("bfloat16", line, {"mp_policy": bfloat16}),
            ("kept whole", line, {"reshard_after_forward": False}),
            ("columns", line, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
            ("hsdp", grid, {}),
        ):
            with self.subTest(name):
                model = fully_shard(make_model(), mesh=mesh, **options)
                check_module(self, model, create_dtensor_config(), data_rank=self.rank)


class FSDP1s:
    def test_fsdp_correctness(self):
        check_fsdp1(self, orig=False, by_module=False, steps=1)

    def test_fsdp_vs_single_device(self):
        for orig in (False, True):
            with self.subTest(use_orig_params=orig):
                check_fsdp1(self, orig, by_module=orig, steps=10)


class DDPs:
    def test_ddp_vs_single_device(self):
        gpus = None if device().type == "cpu" else [device()]
        # Without a config, each rank orthogonalizes all matrices, as before.
        for config, count in (
            (create_auto_config(ddp_process_group=dist.group.WORLD), 4),
            (None, 4 * self.world_size),
        ):
            with self.subTest(has_config=config is not None):
                model = DDP(make_model(), gpus, gradient_as_bucket_view=True)
                check_module(self, model, config, data_rank=self.rank, count=count)


class TwoDimensions:
    def test_per_parameter_tp_dims(self):
        group = dist.group.WORLD
        config = create_auto_config(tp_process_group=group, tp_dim_per_param=TP_DIMS)
        model = tensor_parallel(make_model(), mesh_of(self.world_size))
        matrices = [param for param in model.parameters() if param.ndim == 2]
        self.assertEqual(detect_tp_dims_from_model(matrices), TP_DIMS)
        check_module(self, model, config)
        placements = [param.placements for param in matrices]
        self.assertEqual(placements, [(S0,), (S1,), (S0,), (S1,)])

    def test_fsdp_plus_tp(self):
        grid = grid_of_columns(self)
        model = tensor_parallel(make_model(), grid["b"])
        fully_shard(model, mesh=grid["a"])
        config = create_auto_config(
            fsdp_process_group=grid.get_group("a"),
            tp_process_group=grid.get_group("b"),
            tp_dim_per_param=TP_DIMS,
        )
        check_module(self, model, config, data_rank=grid.get_local_rank("a"))


def make_expert(number):
    """Two matrices."""
    return make_model(layers=1, bias=False, seed=50 + number)


class Experts:
    def test_expert_parallel_independence(self):
        """Each rank has an expert of its own."""
        config = create_auto_config(
            ep_process_group=dist.group.WORLD,
            expert_assignments={0: self.rank, 1: self.rank},
        )
        model, count = make_expert(self.rank), 2 * self.world_size
        muon = check_module(self, model, config, data_rank=self.rank, count=count)
        # No other rank holds them.
        self.assertEqual(muon.assignments, {self.rank: [0, 1]})

    def test_expert_parallel_with_fsdp(self):
        """Ranks 0 and 1 of each four hold one expert, ranks 2 and 3 another."""
        number = self.rank // 2
        group = grid_of_columns(self)["b"].get_group()
        model = FSDP(
            make_expert(number), group, use_orig_params=True, device_id=device()
        )
        config = create_auto_config(
            ep_process_group=dist.group.WORLD,
            fsdp_process_group=group,
            expert_assignments={0: number, 1: number},
            module=model,
        )
        pieces = {"one": make_expert(number), "fsdp": group}
        muon = check_module(
            self, model, config, data_rank=number, count=self.world_size, **pieces
        )
        owned = []
        for indices in muon.assignments.values():
            owned += indices
        self.assertEqual(sorted(owned), [0, 1])
        ranks = dist.get_process_group_ranks(group)
        self.assertLessEqual(set(muon.assignments), set(ranks))


class TestMuonDTensor(GivenGradients, TrainedDTensors, OnCPU):
    pass


class TestMuonFSDP(FSDP1s, FSDP2s, OnCPU):
    pass


class TestMuonDDP(DDPs, OnCPU):
    pass


class TestMuon2DParallelism(TwoDimensions, OnCPU):
    pass


class TestMuonExpertParallel(Experts, OnCPU):
    pass


class TestMuon1DOnGPUs(
    Layouts,
    GivenGradients,
    TrainedDTensors,
    FSDP1s,
    FSDP2s,
    DDPs,
    OnGPUs,
    MultiProcessTestCase,
):
    world_size = gpus = 2


class TestMuon2DOnGPUs(Layouts, TwoDimensions, Experts, OnGPUs, MultiProcessTestCase):
    world_size = gpus = 4


class TestMuonOnOneGPU(Layouts, TrainedDTensors, FSDP2s, OnGPUs, MultiProcessTestCase):
    """With NCCL, whose collectives the frameworks ask for."""

    world_size = gpus = 1


class TestMuonOnSharedGPU(Layouts, GivenGradients, OnGPUs, MultiProcessTestCase):
    """Over gloo, which lacks collectives of the frameworks for the tensors of a GPU."""

    backend = "gloo"
    world_size, gpus = 4, 1


class TestMuonPerformance(OnGPUs, MultiProcessTestCase):
    """Prefetching pays if transfers take time."""

    world_size = gpus = 4

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
