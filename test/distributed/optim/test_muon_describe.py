# Owner(s): ["oncall: distributed"]
"""What describe() and the log say."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW, Muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    mesh_of,
    OnCPU,
    place,
    S0,
    specs,
    Twins,
)


class TestMuonDescribe(OnCPU):
    def params(self, shapes, placements=(S0,)):
        placed = [common_muon.Spec(shape, mesh_of(4), placements) for shape in shapes]
        named = []
        for index, spec in enumerate(placed):
            value = place(common_muon.full(index, spec.shape), spec)
            named.append((f"layers.{index}", nn.Parameter(value)))
        return named

    def test_owners(self):
        """What matters most, with the right number of each noun."""
        muon = Muon(self.params([(64, 32)]), distributed_config="auto")
        owner = next(rank for rank, owned in muon.assignments.items() if owned)
        line = f"1 matrix on 4 ranks. The busiest owner is rank {owner}, with 4.00 times the mean work"
        owned = "layers.0" if self.rank == owner else "nothing"
        _, here, memory = muon.describe().splitlines()
        with self.everywhere():
            self.assertEqual(here, f"Rank {self.rank} of 4 owns {owned}. {line}.")
            self.assertRegex(memory, r"takes up to [\d.e-]+ MiB$")

    def test_matrices_that_no_optimizer_has(self):
        shapes = {"qkv": (8, 16), "experts": (3, 8, 16), "head": (4, 8)}
        placed = {
            name: distribute_tensor(torch.ones(shape), mesh_of(4), [S0])
            for name, shape in shapes.items()
        }
        vectors = {"gain": torch.ones(8), "bias": torch.ones(8)}
        model = nn.ParameterDict(placed | vectors)
        params = [model["qkv"], model["experts"]]
        muon = Muon(params, distributed_config="auto", allow_batched_matrices=True)
        share = "Muon has 2 parameters"
        first, second, *_ = muon.describe(model).splitlines()
        self.assertEqual(first, share)
        self.assertEqual(second, "No optimizer given here has head")
        adamw = AdamW([model["gain"], model["head"]])
        first, second, *_ = muon.describe(model, adamw).splitlines()
        # A vector is no matrix.
        self.assertEqual(first, share)
        self.assertIn(f"Rank {self.rank} of 4", second)

    def test_lines_in_the_log_for_each_step(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 4))
        with self.assertLogs("torch.optim.muon", "DEBUG") as seen:
            twins.step()
        with self.everywhere():
            phases = Counter(record.args[1] for record in seen.records)
            self.assertEqual(phases, {"gather": 4, "orthogonalize": 1, "apply": 4})

    def test_functions_of_the_users(self):
        config = create_dtensor_config()
        gather = config.gather_fn
        config.gather_fn = lambda *args: gather(*args)
        page = Muon(self.params([(8, 8)] * 4), distributed_config=config).describe()
        self.assertIn("The user's functions exchange matrices", page)


if __name__ == "__main__":
    run_tests()
