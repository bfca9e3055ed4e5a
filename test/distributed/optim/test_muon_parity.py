# Owner(s): ["oncall: distributed"]
"""The bits of one process, for each layout with some of all options; the table is in ``common_parity``.

The matrix of CI is each kind of parallelism with each pair of flags, on two, four and eight ranks: as process groups and as
DTensors.
"""

import itertools

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_muon import OnCPU, OnThreads
from torch.testing._internal.distributed._muon.common_parity import (
    Cell,
    cells_of,
    check_cell,
    LAYOUTS,
)


# Each kind of parallelism -> layouts of the table of parity.
KINDS = {
    "fsdp": ("fsdp", "rows"),
    "ddp": ("ddp", "replicas"),
    "tp": ("tp", "columns"),
    "fsdp_tp": ("fsdp_tp", "fsdp2_over_tp"),
    "hsdp": ("ddp_fsdp", "hsdp"),
    "ep": ("experts", "part_of_the_mesh"),
}
CELLS = [*itertools.product(KINDS, [True, False], [0, 1, 2])]
# On 32 ranks, where each cell takes seconds.
LARGE = (
    "hsdp",
    "fsdp2_over_tp",
    "three_dimensions",
    "fsdp_tp",
)


@instantiate_parametrized_tests
class Parity:
    @parametrize("layout", LAYOUTS)
    def test_parity(self, layout):
        for cell in cells_of(layout):
            if cell.world == self.world_size:
                check_cell(self, layout, cell)


@instantiate_parametrized_tests
class Matrix:
    @parametrize("parallelism,async_parallel,prefetch", CELLS)
    def test_matrix(self, parallelism, async_parallel, prefetch):
        for layout in KINDS[parallelism]:
            check_cell(self, layout, Cell(flags=(async_parallel, prefetch)))


class TestMuonParityOf1(Parity, OnCPU):
    world_size = 1


class TestMuonParityOf2(Parity, OnCPU):
    world_size = 2


class TestMuonParityOf4(Parity, OnCPU):
    world_size = 4


class TestMuonParityOf8(Parity, OnThreads):
    world_size = 8


@instantiate_parametrized_tests
class TestMuonParityOf32(OnThreads):
    world_size = 32

    @parametrize("layout", LARGE)
    def test_parity(self, layout):
        check_cell(self, layout, Cell(world=32))


class TestMuonMatrixOf2(Matrix, OnCPU):
    world_size = 2


class TestMuonMatrixOf4(Matrix, OnCPU):
    world_size = 4


class TestMuonMatrixOf8(Matrix, OnThreads):
    world_size = 8


if __name__ == "__main__":
    run_tests()
