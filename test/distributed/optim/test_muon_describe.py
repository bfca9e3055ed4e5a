# Owner(s): ["oncall: distributed"]
"""What describe() and the log say."""

import logging
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

    def test_who_is_busy_and_what_is_left_out(self):
        params = self.params([(256, 256), (8, 8), (8, 8)])
        params[1][1].requires_grad_(False)
        config = create_dtensor_config(async_gpu_parallelism=False, prefetch_count=0)
        muon = Muon(params, distributed_config=config)
        page = muon.describe()
        for words in (
            r"Rank \d is the busiest, with 4\.00 times the mean",
            r"largest matrix is 4\.00 times the mean",
            r"layers\.0",
            r"[Ff]rozen, and not in the schedule: parameter 1 'layers\.1'",
            "one owner at a time",
        ):
            with self.subTest(words=words):
                self.assertRegex(page, words)

    def test_first_line_and_log(self):
        """What matters most, with the right number of each noun."""
        with self.assertLogs("torch.optim.muon", "INFO") as logs:
            if self.rank:
                # The first rank speaks for all.
                logging.getLogger("torch.optim.muon").info("silent")
            muon = Muon(self.params([(64, 32)]), distributed_config="auto")
        owner = next(rank for rank, owned in muon.assignments.items() if owned)
        expected = f"built: 1 matrix on 4 ranks, in 1 bucket. The busiest owner is rank {owner}, with 4.00 times the mean work"
        _, first, *_ = muon.describe().splitlines()
        count, share = (1, "100.0%") if self.rank == owner else (0, "0.0%")
        with self.everywhere():
            if self.rank == 0:
                self.assertIn(expected, logs.output[-1])
            self.assertEqual(
                first,
                f"Muon on rank {self.rank} of 4 owns {count} of 1 matrix, {share} of the work. "
                f"The busiest owner is rank {owner}, with 4.00 times the mean work.",
            )

    def test_share_of_the_model(self):
        shapes = {"qkv": (8, 16), "experts": (3, 8, 16), "conv": (4, 8, 3)}
        shapes["head"] = (4, 8)
        placed = {
            name: distribute_tensor(torch.ones(shape), mesh_of(4), [S0])
            for name, shape in shapes.items()
        }
        vectors = {"gain": torch.ones(8), "bias": torch.ones(8)}
        model = nn.ParameterDict(placed | vectors)
        groups = [
            {"params": [model["qkv"]], "split": (4, 4)},
            {"params": [model["conv"]], "flatten": True},
            {"params": [model["experts"]]},
        ]
        muon = Muon(groups, distributed_config="auto", allow_batched_matrices=True)
        counts = "Muon has 3 parameters of 608 elements: 1 split, 1 flattened, 1 stack"
        share = ". That is 92.7% of the model's 656 elements"
        first, *more = muon.describe().splitlines()
        self.assertEqual(first, counts)
        self.assertIn("Muon on rank", more[0])
        first, *more = muon.describe(model).splitlines()
        self.assertEqual(first, counts + share)
        self.assertEqual(more[0], "No optimizer given here has head")
        adamw = AdamW([model["gain"], model["head"]])
        first, *more = muon.describe(model, adamw).splitlines()
        self.assertEqual(first, counts + share)
        # A vector is no matrix.
        self.assertIn("Muon on rank", more[0])
        # The rows are those of ranks, and an earlier optimizer decides which one comes first.
        for name in ("parameter 0[0]", "parameter 0[1]"):
            self.assertIn(name, "".join(more))

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
        self.assertIn("exchanged by the user's functions", page)
        self.assertIn("parameter 3 'layers.3'", page)


if __name__ == "__main__":
    run_tests()
