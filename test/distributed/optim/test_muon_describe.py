# Owner(s): ["oncall: distributed"]
"""What the distributed Muon says of itself: describe(), the log, the profiler's ranges, groups' names."""

import json
import logging
import os
import re
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_dtensor_config, DistributedConfig
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    S1,
    specs,
    Twins,
)


ROW = re.compile(
    r"^ +(?P<rank>\d+) +(?P<owns>\d+) +(?P<works>\S+ \w+) +(?P<of_mean>[\d.]+) +(?P<sends>[\d,]+) B"
    r" +(?P<receives>[\d,]+) B +(?P<buffers>[\d,]+) B",
    re.MULTILINE,
)


def rows(page):
    """The lines of ranks of a page, whose bytes are few enough to stand there exactly."""
    return [
        {
            name: value if name in ("works", "of_mean") else int(value.replace(",", ""))
            for name, value in found.groupdict().items()
        }
        for found in ROW.finditer(page)
    ]


@requires_gloo()
class TestMuonDescribe(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
        super()._init_pg(rank, world_size, rdvz_file)

    def params(self, shapes, placements=(S0,), mesh=None):
        mesh = mesh or mesh_of(self.world_size)
        return [
            (
                f"layers.{i}",
                nn.Parameter(distribute_tensor(full(i, shape), mesh, placements)),
            )
            for i, shape in enumerate(shapes)
        ]

    def check_page(self, twins):
        """The page of one rank says what every rank sends, receives and owns."""
        twins.set_gradients()
        page = twins.optimizer.describe()
        with Collectives() as seen:
            twins.optimizer.step()
        sent = received = 0
        for call in seen.calls:
            others = [at for at, rank in enumerate(call.ranks) if rank != self.rank]
            sent += sum(call.sent[at] for at in others) * call.itemsize
            received += sum(call.received[at] for at in others) * call.itemsize
        found, all_sent, all_received = rows(page), everyone(sent), everyone(received)
        with self.everywhere(page):
            self.assertEqual([row["rank"] for row in found], list(range(4)))
            self.assertEqual([row["sends"] for row in found], all_sent)
            self.assertEqual([row["receives"] for row in found], all_received)
            owned = twins.optimizer.assignments
            self.assertEqual(
                [row["owns"] for row in found],
                [len(owned.get(rank, ())) for rank in range(4)],
            )

    def test_pages_say_what_travels(self):
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24)]
        self.check_page(Twins(specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes)))
        self.check_page(Twins(specs(grid_of(2, 2), [(R, S0), (S0, S1)], shapes)))

    def test_pages_say_what_travels_through_nodes(self):
        with (
            mock.patch.object(buckets, "MAX_PEERS", 1),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        ):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
            self.assertIn("in two levels by nodes of 2", twins.optimizer.describe())
            self.check_page(twins)

    def test_buffers_are_those_that_a_step_makes(self):
        for placements in ((S0,), (R,)):
            muon = Muon(
                self.params([(8, 8)] * 8, placements), distributed_config="auto"
            )
            (row,) = [r for r in rows(muon.describe()) if r["rank"] == self.rank]
            for param in muon.param_groups[0]["params"]:
                param.grad = torch.zeros_like(param)
            muon.step()
            slots = {
                buffer.flat.untyped_storage().data_ptr(): buffer.flat.untyped_storage()
                for bucket in muon._engine.pipeline.buffers.buckets
                for buffer in (bucket.gather_send, bucket.gather_recv)
            }
            with self.everywhere():
                held = sum(storage.nbytes() for storage in slots.values())
                self.assertEqual(row["buffers"], held)

    def test_relays_are_counted(self):
        with mock.patch.object(buckets, "MAX_REPLICAS", 1):
            muon = Muon(self.params([(8, 8)] * 4, (R,)), distributed_config="auto")
            page = muon.describe()
        self.assertIn("relayed along replicas", page)
        # A matrix and its flag, in bfloat16: each owner broadcasts one and is sent three.
        for row in rows(page):
            self.assertEqual((row["sends"], row["receives"]), (2 * 65, 3 * 2 * 65))

    def test_advice(self):
        params = self.params([(256, 256), (8, 8), (8, 8)])
        params[1][1].requires_grad_(False)
        config = create_dtensor_config(async_gpu_parallelism=False, prefetch_count=0)
        muon = Muon(params, distributed_config=config)
        page = muon.describe()
        for words in (
            r"layers\.0 \(256, 256\) alone takes 4\.0 times the mean work of ranks 0-3",
            r"2 of 4 ranks own nothing \(2-3\): this group has 2 matrices",
            r"frozen, and not in the schedule: parameter 1 'layers\.1'",
            "async_gpu_parallelism=False, which is for debugging",
            "prefetch_count=0 leaves every gather to be waited for",
        ):
            self.assertRegex(page, words)
        self.assertNotIn("no gradient", page)
        params[0][1].grad = torch.zeros_like(params[0][1])
        for _ in range(2):
            muon.step()
        said = everyone("no gradient here in 2 steps: parameter 2" in muon.describe())
        self.assertEqual(said, [True, False, False, False])

    def test_one_line_in_the_log_for_each_construction(self):
        params = self.params([(8, 8)] * 4)
        with self.assertLogs("torch.optim.muon", "INFO") as seen:
            logging.getLogger("torch.optim.muon").info("first")
            muon = Muon(params, distributed_config="auto")
            another = params[0][1].detach().requires_grad_()
            muon.add_param_group({"params": [("layers.4", another)]})
        with self.everywhere():
            if self.rank:
                self.assertEqual(len(seen.records), 1)
                return
            _, built, anew = (record.getMessage() for record in seen.records)
            self.assertRegex(
                built,
                r"rank 0: Muon: 4 matrices, owned by 4 of 4 ranks; 1 bucket in 1 group of ranks; a step sends "
                r"[\d,]+ B and receives [\d,]+ B here, through [\d,]+ B of buffers; busiest owner 1\.00 of the mean",
            )
            self.assertIn(
                "unfrozen: parameter 4 'layers.4' of shape (8, 8); gone: 0", anew
            )

    def test_functions_of_the_users(self):
        config = create_dtensor_config()
        own = DistributedConfig(
            config.assign_fn,
            lambda tensor, owner, state: config.gather_fn(tensor, owner, state),
            config.redistribute_fn,
            config.state,
        )
        page = Muon(self.params([(8, 8)] * 4), distributed_config=own).describe()
        self.assertIn("exchanged one by one by functions of the user's", page)
        self.assertIn("rank 3: parameter 3 'layers.3'", page)

    def test_profiler_shows_buckets_and_phases(self):
        muon = Muon(self.params([(8, 8)] * 8), distributed_config="auto")
        for param in muon.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            muon.step()
        found = {e.name for e in profiled.events() if e.name.startswith("Muon ")}
        phases = (
            *("gather", "wait for gather", "orthogonalize", "scatter"),
            *("wait for scatter", "apply"),
        )
        self.assertEqual(
            found,
            {
                f"Muon {phase}, bucket {i} of 4 ranks"
                for phase in phases
                for i in (0, 1)
            },
        )

    def test_groups_say_what_they_are_for(self):
        with (
            mock.patch.object(buckets, "MAX_PEERS", 1),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        ):
            muon = Muon(self.params([(8, 8)] * 4), distributed_config="auto")
            muon.step()
        found = {
            ranks: group.group_desc
            for ranks, group in muon._engine._groups.items()
            if group.group_desc.startswith("muon")
        }
        node = self.rank // 2 * 2
        rail = self.rank % 2
        expected = {(node, node + 1): "muon node", (rail, rail + 2): "muon rail"}
        with self.everywhere():
            self.assertEqual(found, expected)
        # So does what a flight recorder keeps.
        recorded = json.loads(_distributed_c10d._dump_fr_trace_json())["entries"]
        named = {entry["process_group"][1] for entry in recorded}
        with self.everywhere():
            self.assertLessEqual({"muon node", "muon rail"}, named)


@requires_gloo()
class TestMuonDebugDetail(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    """Every collective is compared among ranks before it starts."""

    world_size = 4

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        super()._init_pg(rank, world_size, rdvz_file)

    def test_trains_alike(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        placed = specs(mesh, [(S0,), (S1,), (R,)]) + specs(grid, [(R, S0), (S1, S0)])
        self.assertTrainsAlike(Twins(placed, create_dtensor_config(prefetch_count=2)))

    def test_relays_nodes_and_rails_train_alike(self):
        with (
            mock.patch.multiple(buckets, MAX_PEERS=1, MAX_REPLICAS=1),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        ):
            placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8)] * 8)
            self.assertTrainsAlike(Twins(placed))

    def test_gradients_that_one_rank_lacks(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 4))
        missing = [1] if self.rank == 2 else []
        twins.set_gradients(missing)
        with self.assertRaisesRegex(RuntimeError, "gradient"):
            twins.optimizer.step()


if __name__ == "__main__":
    run_tests()
