# Owner(s): ["oncall: distributed"]
"""The bits of one process, for each layout with some of all options; the table is in ``common_parity``.

Cells are pairwise: any two options are together in one of them.
"""

import itertools

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import OnCPU, OnThreads
from torch.testing._internal.distributed._muon.common_parity import (
    Cell,
    cells_of,
    check_cell,
    COLUMNS,
    LAYOUTS,
)


class ParityOfProcesses(OnCPU):
    recorder = Recorder

    def check(self, layout):
        for cell in cells_of(layout):
            if cell.world == self.world_size:
                check_cell(self, layout, cell)


class ParityOfThreads(OnThreads):
    check = ParityOfProcesses.check


class TestMuonParityTable(TestCase):
    def test_any_two_options_are_together_in_a_cell(self):
        cells = []
        for layout in LAYOUTS:
            cells += cells_of(layout)
        columns = dict(zip(COLUMNS._fields, COLUMNS))
        for first, second in itertools.combinations(columns, 2):
            found = [(getattr(cell, first), getattr(cell, second)) for cell in cells]
            for pair in itertools.product(columns[first], columns[second]):
                self.assertTrue(pair in found, f"no cell has {pair}")


@instantiate_parametrized_tests
class TestMuonParityOf1(ParityOfProcesses):
    world_size = 1

    @parametrize("layout", LAYOUTS)
    def test_parity(self, layout):
        self.check(layout)


@instantiate_parametrized_tests
class TestMuonParityOf2(ParityOfProcesses):
    world_size = 2

    @parametrize("layout", LAYOUTS)
    def test_parity(self, layout):
        self.check(layout)


@instantiate_parametrized_tests
class TestMuonParityOf4(ParityOfProcesses):
    world_size = 4

    @parametrize("layout", LAYOUTS)
    def test_parity(self, layout):
        self.check(layout)


@instantiate_parametrized_tests
class TestMuonParityOf8(ParityOfThreads):
    world_size = 8

    @parametrize("layout", LAYOUTS)
    def test_parity(self, layout):
        self.check(layout)


# Each cell takes seconds there.
LAYOUTS_OF_32 = (
    "hsdp",
    "fsdp2_over_tp",
    "three_dimensions",
    "fsdp_tp",
    "dense_and_experts",
)


@instantiate_parametrized_tests
class TestMuonParityOf32(OnThreads):
    world_size = 32

    @parametrize("layout", LAYOUTS_OF_32)
    def test_parity(self, layout):
        check_cell(self, layout, Cell(world=32))


if __name__ == "__main__":
    run_tests()
