# Owner(s): ["oncall: distributed"]
"""describe(), the log, the profiler's ranges, and the names of groups."""

import logging
import re
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW, Muon
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_dtensor_config
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    OnCPU,
    mesh_of,
    place,
    R,
    S0,
    Spec,
    specs,
    Twins,
)


# Rank, matrices, TFLOP, times the mean, MiB sent, received and of memory, names.
ROW = re.compile(
    r"^ +(?P<rank>\d+) +(?P<owns>\d+) +\S+ +\S+ +(?P<sends>\S+) +(?P<receives>\S+) +(?P<memory>\S+)",
    re.MULTILINE,
)


def rows(page):
    """The rows of ranks of a page."""
    return [found.groupdict() for found in ROW.finditer(page)]


def mebibytes(count):
    return f"{count / 2**20:.4g}"


class TestMuonDescribe(OnCPU):
    def params(self, shapes, placements=(S0,)):
        placed = [Spec(shape, mesh_of(4), placements) for shape in shapes]
        return [
            (f"layers.{i}", nn.Parameter(place(full(i, spec.shape), spec)))
            for i, spec in enumerate(placed)
        ]

    def test_relays_are_counted(self):
        with mock.patch.object(buckets, "MAX_REPLICAS", 1):
            muon = Muon(self.params([(8, 8)] * 4, (R,)), distributed_config="auto")
            page = muon.describe()
        self.assertIn("relayed along replicas", page)
        # Each owner broadcasts one matrix in bfloat16, and receives three.
        for row in rows(page):
            sizes = row["sends"], row["receives"]
            self.assertEqual(sizes, (mebibytes(128), mebibytes(3 * 128)))

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
            self.assertRegex(page, words)

    def test_share_of_the_model(self):
        shapes = {
            "qkv": (8, 16),
            "experts": (3, 8, 16),
            "conv": (4, 8, 3),
            "head": (4, 8),
        }
        model, placed = nn.Module(), {}
        for name, shape in shapes.items():
            whole = torch.ones(shape)
            part = nn.Parameter(distribute_tensor(whole, mesh_of(4), [S0]))
            model.register_parameter(name, part)
            placed[name] = part
        model.gain, model.bias = (nn.Parameter(torch.ones(8)) for _ in range(2))
        groups = [
            {"params": [placed["qkv"]], "split": (4, 4)},
            {"params": [placed["conv"]], "flatten": True},
            {"params": [placed["experts"]]},
        ]
        muon = Muon(groups, distributed_config="auto", allow_batched_matrices=True)
        counts = "Muon has 3 parameters of 608 elements: 1 split, 1 flattened, 1 stacks"
        share = ". That is 92.7% of the model's 656 elements"
        first, *more = muon.describe().splitlines()
        self.assertEqual(first, counts)
        self.assertIn("Muon on rank", more[0])
        first, *more = muon.describe(model).splitlines()
        self.assertEqual(first, counts + share)
        self.assertEqual(more[0], "No optimizer given here has head")
        adamw = AdamW([model.gain, model.head])
        first, *more = muon.describe(model, adamw).splitlines()
        self.assertEqual(first, counts + share)
        # A vector is no matrix.
        self.assertIn("Muon on rank", more[0])

    def test_one_line_in_the_log_for_each_construction(self):
        params = self.params([(8, 8)] * 4)
        with self.assertLogs("torch.optim.muon", "INFO") as seen:
            logging.getLogger("torch.optim.muon").info("first")
            muon = Muon(params, distributed_config="auto")
            another = params[0][1].detach().requires_grad_()
            muon.add_param_group({"params": [("layers.4", another)]})
        with self.everywhere():
            lines = [record.getMessage() for record in seen.records][1:]
            self.assertEqual(len(lines), 0 if self.rank else 2)
            for line, words in zip(lines, ("4 matrices", "rebuilt")):
                self.assertRegex(line, f"Muon.*{words}")

    def test_functions_of_the_users(self):
        config = create_dtensor_config()
        gather = config.gather_fn
        config.gather_fn = lambda *args: gather(*args)
        page = Muon(self.params([(8, 8)] * 4), distributed_config=config).describe()
        self.assertIn("exchanged by the user's functions", page)
        self.assertIn("parameter 3 'layers.3'", page)

    def test_profiler_shows_buckets_and_phases(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            twins.step()
        found = {e.name for e in profiled.events() if e.name.startswith("Muon ")}
        for phase in ("gather", "orthogonalize", "scatter", "wait for scatter"):
            self.assertIn(f"Muon {phase}, bucket 1 of 4 ranks", found)


if __name__ == "__main__":
    run_tests()
