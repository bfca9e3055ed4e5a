# Owner(s): ["oncall: distributed"]
"""Each kind of parallelism with each pair of flags, on two, four and eight processes; meshes of more dimensions."""

import os
from itertools import product
from unittest import mock

from torch.distributed.fsdp import fully_shard
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_dtensor_config
from torch.testing._internal import common_utils
from torch.testing._internal.distributed._muon.common_groups import Strategy
from torch.testing._internal.distributed._muon.common_modules import (
    check_module,
    data_parallel,
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    grid_of,
    OnCPU,
    R,
    S0,
    S1,
    specs,
    Twins,
)
from torch.testing._internal.distributed._muon.common_parallel import SHAPES


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
CELLS = [(kind, *flags) for kind, flags in product(KINDS, FLAGS)]
CELLS_OF_8 = [(kind, *flags) for kind, flags in zip(KINDS, FLAGS, strict=True)]
if os.environ.get("MUON_TEST_WHOLE_MATRIX") == "1":
    CELLS_OF_8 = CELLS


def grids_of(world_size, kinds):
    """The shapes of the grids on which a combination of ``kinds`` trains."""
    if len(kinds) == 1:
        return [(world_size,)]
    # Two processes fill one dimension at a time.
    if world_size == 2:
        return [(2, 1), (1, 2)]
    return [(2, world_size // 2)]


def check_cell(case, parallelism, async_parallel, prefetch):
    """A cell trains pieces that are cut by hand, DTensors in the same buckets, and a module."""
    flags = {"async_gpu_parallelism": async_parallel, "prefetch_count": prefetch}
    kinds = KINDS[parallelism]
    for shape in grids_of(case.world_size, kinds):
        with case.subTest(grid=shape):
            grid = grid_of(*shape)
            if "ep" in kinds:
                train_experts(case, grid, flags)
            else:
                train_pieces(case, grid, kinds, flags)
                train_module(case, grid, kinds, flags)


def train_experts(case, grid, flags):
    """Each row of the grid shards an expert, and dense matrices in the same way."""
    number = grid.get_local_rank("a")
    count = len(half_of_shapes(case))
    experts = {
        "ep_process_group": grid.get_group("a"),
        "expert_assignments": dict.fromkeys(range(count), number),
    }
    train_pieces(case, grid["b"], ("fsdp",), flags, number, **experts)
    rows = grid.size() // grid["b"].size()
    train_module(case, grid["b"], ("fsdp",), flags, number, rows)


def half_of_shapes(case):
    return SHAPES * (case.world_size // 2)


def train_pieces(case, mesh, kinds, flags, expert=0, **given):
    """Plain pieces, of which all ranks or those of an ``expert`` have the same, and DTensors, which all share."""
    shapes = half_of_shapes(case)
    if "tp" in kinds:
        given["tp_dim_per_param"] = dict.fromkeys(range(len(shapes)), 1)
    strategy = Strategy(mesh, *kinds)
    placements = tuple(PLACEMENTS[kind] for kind in kinds)
    placed = [strategy.cut(shape, 1) for shape in shapes]
    placed += specs(mesh, [placements], shapes)
    seeds = list(range(len(placed)))
    for index in range(len(shapes)):
        seeds[index] += 100 * expert
    # Without a limit, an owner that works alone has one bucket.
    with mock.patch.object(buckets, "BUCKET_BYTES", 512):
        twins = Twins(placed, strategy.config(**flags, **given), seeds=seeds)
    own = []
    for bucket in twins.optimizer._engine.schedule.buckets:
        if case.rank in bucket.ranks:
            own.append(bucket)
    # With fewer, there is nothing to prefetch. A rank alone has nothing to exchange.
    is_alone = all(len(bucket.ranks) == 1 for bucket in own)
    case.assertGreaterEqual(len(own), 1 if is_alone else 3)
    case.assertTrainsAlike(twins, 1)


def train_module(case, mesh, kinds, flags, seed=0, copies=1):
    """A module, of which there are ``copies`` with other values."""
    model = make_model(layers=1, seed=seed)
    config = create_dtensor_config(**flags)
    data_rank = case.rank
    if kinds == ("ddp",):
        model = data_parallel(model)
        config = Strategy(mesh, *kinds).config(**flags)
    if kinds == ("tp",):
        model = tensor_parallel(model, mesh)
        data_rank = 0
    elif kinds == ("fsdp", "tp"):
        model = tensor_parallel(model, mesh["b"])
        fully_shard(model, mesh=mesh["a"])
        data_rank = mesh.get_local_rank("a")
    elif "fsdp" in kinds:
        fully_shard(model, mesh=mesh)
    # A model has two matrices.
    check_module(case, model, config, 1, data_rank, count=2 * copies)


@common_utils.instantiate_parametrized_tests
class TestMuonMatrixOf2(OnCPU):
    world_size = 2

    @common_utils.parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        check_cell(self, **cell)


@common_utils.instantiate_parametrized_tests
class TestMuonMatrixOf4(OnCPU):
    world_size = 4

    @common_utils.parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        check_cell(self, **cell)


@common_utils.instantiate_parametrized_tests
class TestMuonMatrixOf8(OnCPU):
    world_size = 8

    @common_utils.parametrize(CELL, CELLS_OF_8)
    def test_matrix(self, **cell):
        check_cell(self, **cell)

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
        matrices, _ = check_module(self, model, config, data_rank=self.rank // 2)
        kinds = [type(placement).__name__ for placement in matrices[0].placements]
        self.assertEqual(kinds, ["Replicate", "_StridedShard", "Shard"])


if __name__ == "__main__":
    common_utils.run_tests()
