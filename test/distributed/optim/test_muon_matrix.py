# Owner(s): ["oncall: distributed"]
"""Every kind of parallelism on 2, 4 and 8 processes, with the settings that may not change a bit."""

import os
import re
from itertools import product

from torch.distributed.fsdp import fully_shard
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_modules import (
    data_parallel,
    make_model,
    ModuleParity,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    GlooOnCPU,
    grid_of,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


# Even for eight, uneven, fewer rows than ranks; and so many that they go in several buckets.
SHAPES = [(16, 8), (9, 13), (3, 20)] * 11


KINDS = ["fsdp", "ddp", "tp", "fsdp_tp", "hsdp", "ep"]
ASYNC, PREFETCH = [True, False], [0, 1, 2]


class Kinds(ModuleParity):
    """Each case trains matrices cut by hand, the same as DTensors, and a module of the framework."""

    def check_kind(self, kind, async_parallel, prefetch):
        self.flags = {
            "async_gpu_parallelism": async_parallel,
            "prefetch_count": prefetch,
        }
        getattr(self, f"check_{kind}")()

    def check_both(self, strategy, placements, dims=None):
        """Pieces of process groups and DTensors, each against one process."""
        by_groups = strategy.twins(SHAPES, dims=dims, flags=self.flags)
        self.check_buckets(by_groups)
        specs = [Spec(shape, strategy.mesh, placements) for shape in SHAPES]
        self.check_buckets(Twins(specs, self.dtensors()))

    def check_buckets(self, twins):
        self.assertTrainsAlike(twins, 2)
        buckets = sum(
            map(int, re.findall(r"in (\d+) buckets?", twins.optimizer.describe()))
        )
        # Fewer would leave nothing to prefetch. One after the other, each owner has a bucket.
        least = 3 if self.flags["async_gpu_parallelism"] else 2
        self.assertGreaterEqual(buckets, least)

    def dtensors(self):
        return create_dtensor_config(**self.flags)

    def check_fsdp(self):
        mesh = grid_of(self.world_size)
        self.check_both(Strategy(mesh, "fsdp"), (S0,))
        model = fully_shard(make_model(layers=1), mesh=mesh)
        self.check(model, self.dtensors(), 2, data_rank=self.rank)

    def check_ddp(self):
        strategy = Strategy(grid_of(self.world_size), "ddp")
        self.check_both(strategy, (R,))
        model = data_parallel(make_model(layers=1))
        self.check(model, strategy.config(**self.flags), 2, data_rank=self.rank)

    def check_tp(self):
        mesh = grid_of(self.world_size)
        for dim, placement in ((0, S0), (1, S1)):
            self.check_both(Strategy(mesh, "tp"), (placement,), dim)
        self.check(tensor_parallel(make_model(layers=1), mesh), self.dtensors(), 2)

    def grids(self):
        """Two dimensions for all processes; of two processes, either dimension alone."""
        if self.world_size == 2:
            return [grid_of(2, 1), grid_of(1, 2)]
        return [grid_of(2, self.world_size // 2)]

    def check_fsdp_tp(self):
        for grid in self.grids():
            self.check_both(Strategy(grid, "fsdp", "tp"), (S0, S1), 1)
            model = tensor_parallel(make_model(layers=1), grid["b"])
            fully_shard(model, mesh=grid["a"])
            self.check(model, self.dtensors(), 2, data_rank=grid.get_local_rank("a"))

    def check_hsdp(self):
        for grid in self.grids():
            self.check_both(Strategy(grid, "ddp", "fsdp"), (R, S0))
            model = fully_shard(make_model(layers=1), mesh=grid)
            self.check(model, self.dtensors(), 2, data_rank=self.rank)

    def check_ep(self):
        for grid in self.grids():
            self.check_experts(grid)

    def check_experts(self, grid):
        """An expert for each row of ``grid``, sharded, beside matrices that are sharded alike."""
        number, shards = grid.get_local_rank("a"), grid["b"]
        cuts = [Strategy(shards, "fsdp").cut(shape) for shape in SHAPES]
        seeds = [100 * (number + 1) + i for i in range(len(SHAPES))]

        def config(count):
            return create_auto_config(
                ep_process_group=grid.get_group("a"),
                fsdp_process_group=shards.get_group(),
                expert_assignments=dict.fromkeys(range(count), number),
                **self.flags,
            )

        both = [*seeds, *range(len(SHAPES))]
        twins = Twins(cuts * 2, config(len(SHAPES)), seeds=both)
        if shards.size() > 1:
            self.check_buckets(twins)
        else:
            # Each rank has an expert of its own, and nobody to share it with.
            self.assertTrainsAlike(twins, 2)
        specs = [Spec(shape, shards, (S0,)) for shape in SHAPES]
        self.assertTrainsAlike(Twins(specs, self.dtensors(), seeds=seeds), 2)
        expert = fully_shard(make_model(layers=1, seed=number), mesh=shards)
        count = 2 * grid.size(0)
        self.check(expert, config(2), 2, data_rank=self.rank, count=count)


def each_cell(cells):
    return parametrize("parallelism,async_parallel,prefetch", cells)


@instantiate_parametrized_tests
class Matrix(Kinds):
    """Every kind with every setting."""

    @each_cell(list(product(KINDS, ASYNC, PREFETCH)))
    def test_matrix(self, parallelism, async_parallel, prefetch):
        self.check_kind(parallelism, async_parallel, prefetch)


@instantiate_parametrized_tests
class PartOfMatrix(Kinds):
    """Every kind and every setting, but not all of their pairs."""

    @each_cell([(kind, *flags) for kind, flags in zip(KINDS, product(ASYNC, PREFETCH))])
    def test_matrix(self, parallelism, async_parallel, prefetch):
        self.check_kind(parallelism, async_parallel, prefetch)


# Eight processes are dear.
WHOLE = os.environ.get("MUON_TEST_WHOLE_MATRIX") == "1"


@requires_gloo()
class TestMuonMatrixOf2(GlooOnCPU, Matrix, MultiProcContinuousTest):
    world_size = 2


@requires_gloo()
class TestMuonMatrixOf4(GlooOnCPU, Matrix, MultiProcContinuousTest):
    world_size = 4


@requires_gloo()
class TestMuonMatrixOf8(
    GlooOnCPU, Matrix if WHOLE else PartOfMatrix, MultiProcContinuousTest
):
    world_size = 8


if __name__ == "__main__":
    run_tests()
