# Owner(s): ["oncall: distributed"]
"""Large worlds in one process: the fake backend, and fake tensors on the device "lazy".

"lazy" takes the path of accelerators. It has no kernels and needs none. An operation that reads a value on
the host raises an error.
"""

import pickle
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Muon
from torch.optim._muon_engine.layouts import (
    Cut,
    exchange,
    Key,
    Layout,
    Shards,
    whole_regions,
)
from torch.optim._muon_engine.runtime.compute import PREPARED_BYTES
from torch.optim._muon_engine.schedule.buckets import BUCKET_BYTES
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_muon import LiveBytes
from torch.testing._internal.distributed._muon.model_shapes import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


SHARDS = 64


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel or a collective, by name."""

    # Their results are made on the host, or are memory without content.
    QUIET = ("device", "empty", "empty_like", "_record_function")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if not func.is_view and not name.startswith(self.QUIET):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class TestMuonDryRun(TestCase):
    """One rank alone."""

    device = "lazy:0"

    def tearDown(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()

    @contextmanager
    def fake_world(self, rank, *sizes):
        """As ``rank`` of a mesh of ``sizes``, with fake tensors."""
        world = torch.Size(sizes).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        self.mesh = DeviceMesh("lazy", torch.arange(world).view(sizes))
        # The stand-in records no events; what would wait for them reads values.
        with FakeTensorMode(), mock.patch("torch.Event"):
            yield
        dist.destroy_process_group()

    def dtensor(self, shape, placements):
        with unset_fake_temporarily():
            local, _ = compute_local_shape_and_global_offset(
                shape, self.mesh, placements
            )
        return DTensor.from_local(
            torch.ones(local, device=self.device),
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    def test_any_rank_steps_on_a_cpu(self):
        self.device = "cpu"
        # DTensor confuses meshes of equal shape, so each world has a shape of its own.
        for shape, rank in (((4,), 0), ((1024,), 5), ((64, 16), 1023)):
            world = torch.Size(shape).numel()
            store = FakeStore()
            dist.init_process_group("fake", store=store, rank=rank, world_size=world)
            self.mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
            placements = (*[Replicate()] * (len(shape) - 1), Shard(0))
            params = self.params([(32, 8), (16, 48), (7, 5)] * 3, placements)
            muon = Muon(params, distributed_config="auto")
            for _ in range(2):
                self.give_gradients(params)
                muon.step()
            lines = muon.describe().splitlines()
            self.assertIn("busiest", "".join(lines))
            # A user can read it.
            self.assertLess(len(lines), 40)
            self.assertLess(max(map(len, lines)), 250)
            if world > 4:
                self.assertIn("other ranks are not shown", "".join(lines))
            dist.destroy_process_group()

    def params(self, shapes, placements):
        return [nn.Parameter(self.dtensor(shape, placements)) for shape in shapes]

    def give_gradients(self, params):
        for param in params:
            param.grad = self.dtensor(param.shape, param.placements)

    def test_launches_do_not_grow_with_matrices_or_ranks(self):
        """A launch took tens of microseconds for each shard of each matrix once."""
        found = []
        for sizes, rank, count in (((4,), 0, 16), ((4,), 3, 32), ((8,), 7, 64)):
            with self.fake_world(rank, *sizes):
                params = self.params([(512, 256)] * count, [Shard(0)])
                muon = Muon(params, distributed_config="auto")
                for _ in range(2):
                    self.give_gradients(params)
                    with Launches() as launches:
                        muon.step()
                self.assertIn("4 buckets", muon.describe())
                self.assertEqual(launches.count["alltoall_base_"], 8)
                found.append(launches.count)
        # One matrix is iterated by mm and addmm, several by bmm and baddbmm.
        products = ("mm", "addmm", "bmm", "baddbmm", "_unsafe_view", "stack")
        for count in found:
            self.assertEqual(sum(count[name] for name in products[:4]), 4 * 15)
            for name in products:
                del count[name]
        totals = [sum(count.values()) for count in found]
        self.assertEqual(len(set(totals[1:])), 1, f"{found}")
        self.assertLess(max(totals), 4 * 70, f"{found}")

    def test_memory_at_real_sizes(self):
        shapes = MODELS["Llama 3 8B"].shapes
        largest = max(2 * rows * columns for rows, columns in shapes)
        for prefetch, sizes, placements in (
            (0, (8, 8), [Replicate(), Shard(0)]),
            (2, (64,), [Replicate()]),
        ):
            with self.fake_world(5, *sizes):
                params = self.params(shapes, placements)
                config = create_dtensor_config(prefetch_count=prefetch)
                with LiveBytes() as alive:
                    muon = Muon(params, distributed_config=config)
                    self.give_gradients(params)
                    muon.step()
            given = 2 * sum(param.to_local().nbytes for param in params)
            # Each slot has a part to gather and a part to send back. Relays have one part more.
            bound = 2 * (prefetch + 3) * (BUCKET_BYTES + largest)
            # Newton-Schulz has the matrix, two iterates and two squares. Nesterov has some regions in
            # the dtype of momentum.
            bound += 5 * largest + PREPARED_BYTES
            self.assertLess(alive.peak, given + bound, f"{sizes} {prefetch}")


class TestMuonReports(TestCase):
    """The data that ranks of process groups exchange: one process plays all ranks."""

    def matrices(self, rank):
        """The matrices as ``rank`` knows them by itself: its rows of each."""
        cuts, shards = (Cut("fsdp", tuple(range(SHARDS)), 0),), {}
        for i, (rows, columns) in enumerate(MODELS["Llama 3 8B"].shapes):
            shape = rows // SHARDS, columns
            held = Shards((rank,), (whole_regions(*shape),))
            held = shards.setdefault(shape, held)
            yield Layout(Key(i), shape, torch.float32, held, cuts=cuts)

    def test_each_kind_of_matrix_is_told_and_put_together_once(self):
        """224 matrices on 64 ranks. The reader checks that the shards tile each of them."""
        dist.init_process_group("fake", rank=0, world_size=SHARDS, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)
        sizes = []

        def exchanged(group, told, error, described):
            self.assertIsNone(error)
            sizes.append(len(pickle.dumps(told)))
            every = [exchange._by_name([*self.matrices(r)]) for r in range(SHARDS)]
            zeros = dict.fromkeys(every[0], 0)
            return [(parts, zeros, (rank,)) for rank, parts in enumerate(every)], None

        mine = list(self.matrices(0))
        groups = {("fsdp", tuple(range(SHARDS))): None}
        with mock.patch.object(exchange, "exchange", exchanged):
            layouts, equal = exchange.completed(mine, groups, (0,), {}, None)
        self.assertEqual(equal, {})
        self.assertEqual([l.shape for l in layouts], MODELS["Llama 3 8B"].shapes)
        self.assertTrue(all(len(layout.group) == SHARDS for layout in layouts))
        kinds = len(set(MODELS["Llama 3 8B"].shapes))
        self.assertEqual(len({id(layout.shards) for layout in layouts}), kinds)
        # A few bytes per matrix, and some per kind. Names of modules alone would be 6,000.
        self.assertLess(sizes[0], 4000)


if __name__ == "__main__":
    run_tests()
