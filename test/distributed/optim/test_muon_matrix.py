# Owner(s): ["oncall: distributed"]
"""Each kind of parallelism with each pair of flags, on two, four and eight ranks: as process groups and as DTensors."""

from itertools import product

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import OnCPU, OnThreads
from torch.testing._internal.distributed._muon.common_parity import Cell, check_cell


# Each kind of parallelism -> layouts of the table of parity.
KINDS = {
    "fsdp": ("fsdp", "rows"),
    "ddp": ("ddp", "replicas"),
    "tp": ("tp", "columns"),
    "fsdp_tp": ("fsdp_tp", "fsdp2_over_tp"),
    "hsdp": ("ddp_fsdp", "hsdp"),
    "ep": ("experts", "part_of_the_mesh"),
}
CELL = "parallelism,async_parallel,prefetch"
CELLS = [*product(KINDS, [True, False], [0, 1, 2])]


def check(case, parallelism, async_parallel, prefetch):
    for layout in KINDS[parallelism]:
        check_cell(case, layout, Cell(flags=(async_parallel, prefetch)))


@instantiate_parametrized_tests
class TestMuonMatrixOf2(OnCPU):
    world_size = 2
    recorder = Recorder

    @parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        check(self, **cell)


@instantiate_parametrized_tests
class TestMuonMatrixOf4(OnCPU):
    world_size = 4
    recorder = Recorder

    @parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        check(self, **cell)


@instantiate_parametrized_tests
class TestMuonMatrixOf8(OnThreads):
    world_size = 8

    @parametrize(CELL, CELLS)
    def test_matrix(self, **cell):
        check(self, **cell)


if __name__ == "__main__":
    run_tests()
