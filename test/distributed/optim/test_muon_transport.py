# Owner(s): ["oncall: distributed"]
"""The exchange of a step without an optimizer: each owner gets whole matrices, and each holder its part of the result."""

import itertools
from collections import defaultdict
from contextlib import suppress
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim._muon_engine.agreement import Agreement
from torch.optim._muon_engine.runtime.executor import drain, Executor, Progress
from torch.optim._muon_engine.runtime.memory import Memory
from torch.optim._muon_engine.runtime.matrices import matrices_of
from torch.optim._muon_engine.runtime.params import Param, StepInputs
from torch.optim._muon_engine.runtime.statuses import side_channel
from torch.optim._muon_engine.runtime.transport import CollectiveError, local_buckets
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.order import LocalWork, local_order, step_order
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.optim._muon_engine.schedule.packs import slots_for
from torch.optim._muon_formulas import MuonFormulas
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_layouts import shards_of


# Even and uneven shards, empty ones, one element.
SHAPES = [(8, 8), (7, 5), (16, 4), (3, 9), (1, 8), (1, 1)] * 4


class Doubling:
    """An optimizer that adds twice each matrix to it. Only the owner has the whole matrix."""

    def __init__(self, schedule, locals_by_index, rank, calls):
        self.schedule = schedule
        self.locals = locals_by_index
        self.rank = rank
        self.calls = calls
        self.wholes = {}

    def regions(self, matrix):
        return self.schedule.layouts[matrix].shards.of(self.rank)

    def prepare(self, bucket, inputs):
        self.calls.append(("prepare", bucket.bucket.index))
        for matrix in bucket.bucket.matrices:
            for _, region, view in bucket.gather_send.of(matrix):
                view.copy_(region.of_local(self.locals[matrix]))

    def compute(self, bucket, batch, inputs):
        self.calls.append(("compute", bucket.bucket.index))
        for matrix in batch:
            whole = torch.full(self.schedule.layouts[matrix].shape, torch.nan)
            for _, region, view in bucket.gather_recv.of(matrix):
                region.of_matrix(whole).copy_(view)
            for region in self.regions(matrix):
                own = region.of_local(self.locals[matrix])
                region.of_matrix(whole).copy_(own)
            self.wholes[matrix] = whole
            for _, region, view in bucket.results_of(matrix):
                view.copy_(2 * region.of_matrix(whole))
            for region in self.regions(matrix):
                own = region.of_local(self.locals[matrix])
                own += 2 * region.of_matrix(whole)

    def apply_updates(self, bucket, inputs):
        self.calls.append(("apply", bucket.bucket.index))
        for matrix in bucket.bucket.matrices:
            for _, region, view in bucket.scatter_recv.of(matrix):
                own = region.of_local(self.locals[matrix])
                own += view


def numbered(shape):
    """Whole numbers, which are exact in bfloat16."""
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)


@common_distributed.requires_gloo()
class TestMuonTransport(common_distributed.MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def built(self, layouts, prefetch_count):
        """The executor of this rank, its optimizer, and its buckets."""
        schedule = make_schedule(
            layouts, assign_owners(layouts), slots=slots_for(prefetch_count)
        )
        memory = Memory(torch.device("cpu"))
        matrices, locals_by_index = {}, {}
        for index, layout in enumerate(layouts):
            matrices[index] = SimpleNamespace(described=layout.describe())
            whole = numbered(layout.shape)
            pieces = [r.of_matrix(whole) for r in layout.shards.of(self.rank)]
            # FSDP cuts rows.
            locals_by_index[index] = torch.cat(pieces) if pieces else whole[:0]
        groups = {tuple(range(self.world_size)): dist.group.WORLD}
        slots = slots_for(prefetch_count)
        local = local_buckets(schedule, matrices, self.rank, groups, memory, slots)
        calls, work_of = [], {}
        for index, bucket in local.items():
            own = schedule.owned(bucket.bucket).get(self.rank, [])
            work_of[index] = LocalWork(bucket, [own])
        ranks_of_buckets = [bucket.ranks for bucket in schedule.buckets]
        order = step_order(ranks_of_buckets, prefetch_count)
        operations = local_order(order, ranks_of_buckets, work_of)
        optimizer = Doubling(schedule, locals_by_index, self.rank, calls)
        progress = Progress()
        executor = Executor(operations, optimizer, memory, progress)
        return executor, optimizer, local, progress

    def test_every_owner_gets_whole_matrices(self):
        layouts = shards_of(SHAPES, 4)
        for prefetch_count in (0, 1, 3):
            executor, optimizer, local, _ = self.built(layouts, prefetch_count)
            self.assertGreater(len(local), 1)
            for step in range(2):
                before = {i: piece.clone() for i, piece in optimizer.locals.items()}
                optimizer.calls.clear()
                executor.run(None)
                for matrix, whole in optimizer.wholes.items():
                    expected = numbered(layouts[matrix].shape) * 3**step
                    self.assertEqual(whole, expected, rtol=0, atol=0)
                for matrix, piece in optimizer.locals.items():
                    self.assertEqual(piece, 3 * before[matrix], rtol=0, atol=0)
                # Each phase of each bucket comes once, and gathers start ahead.
                phases = [phase for phase, _ in optimizer.calls]
                for phase in ("prepare", "compute", "apply"):
                    self.assertEqual(phases.count(phase), len(local))
                ahead = phases.index("compute")
                self.assertEqual(ahead, min(1 + prefetch_count, len(local)))
            owned = [None] * self.world_size
            dist.all_gather_object(owned, sorted(optimizer.wholes))
            every = sorted(itertools.chain(*owned))
            self.assertEqual(every, [*range(len(layouts))])

    def test_error_in_a_phase(self):
        """The executor says in which phase, and what was in flight is waited for."""
        layouts = shards_of(SHAPES, 4)
        executor, optimizer, local, progress = self.built(layouts, 1)

        def fails(bucket, batch, inputs):
            raise KeyError("wrong")

        optimizer.compute = fails
        with self.assertRaisesRegex(KeyError, "wrong"):
            executor.run(None)
        self.assertRegex(str(progress), r"^orthogonalize of parameter \d+")
        self.assertTrue(any(bucket.works for bucket in local.values()))
        drain([*local.values()])
        self.assertFalse(any(bucket.works for bucket in local.values()))

    def test_ranks_tell_how_they_differ(self):
        """Before anything moves, and on all ranks, also those that have all gradients."""
        layouts = shards_of([(8, 6), (9, 5), (12, 4)], 4)
        schedule = make_schedule(layouts, assign_owners(layouts))
        tensors = []
        for layout in layouts:
            rows = sum(region.height for region in layout.shards.of(self.rank))
            tensors.append(nn.Parameter(torch.ones(rows, layout.shape[1])))
        muon = Muon(tensors, lr=0.1)
        ranks = tuple(range(self.world_size))
        agreement = Agreement({ranks: dist.group.WORLD}, {ranks: 0})

        def made():
            formulas = [MuonFormulas.of_group(group) for group in muon.param_groups]
            params = []
            for index, tensor in enumerate(tensors):
                params.append(Param(index, tensor, None, 0, formulas[0]))
            return formulas, params

        matrices = list(matrices_of(schedule, made()[1], self.rank).values())
        channel = side_channel(matrices, agreement, torch.device("cpu"))

        def shared(step):
            inputs = StepInputs(*made(), defaultdict(dict))
            text = channel.share(step, inputs)
            if not text:
                channel.finish()
            return text

        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        self.assertEqual(shared(1), "")
        if self.rank == 2:
            tensors[1].grad = None
        self.assertRegex(
            shared(2), r"parameter 1.*some have none|some have none.*parameter 1"
        )
        tensors[1].grad = torch.ones_like(tensors[1])
        self.assertEqual(shared(3), "")
        self.assertIn("not in the same step", shared(5 if self.rank == 0 else 4))
        muon.param_groups[0]["momentum"] = 0.5 if self.rank == 3 else 0.95
        self.assertIn("momentum", shared(6))
        muon.param_groups[0]["momentum"] = 0.95
        self.assertEqual(shared(7), "")


class TestMuonFlight(TestCase):
    def test_error_of_a_backend(self):
        """It names the collective, what it carried, and the ranks."""
        layouts = shards_of([(4, 4)] * 2, 2)
        schedule = make_schedule(layouts, assign_owners(layouts))
        matrices = {
            index: SimpleNamespace(described=layout.describe())
            for index, layout in enumerate(layouts)
        }
        memory = Memory(torch.device("cpu"))
        local = local_buckets(schedule, matrices, 0, {(0, 1): None}, memory, 2)
        bucket = local[0]
        # A rank alone exchanges nothing.
        bucket.start_gather()
        self.assertEqual(bucket.works, [])

        def broken():
            raise RuntimeError("connection closed")

        with self.assertRaisesRegex(
            CollectiveError,
            r"the gather, with parameter 0.*\[0, 1\].*connection closed",
        ) as caught:
            bucket.launch("gather", broken)
        self.assertEqual(caught.exception.ranks, (0, 1))
        with suppress(CollectiveError):
            bucket.launch("gather", broken)
        self.assertEqual(bucket.works, [])

    def test_memory_of_a_step(self):
        """An accelerator's memory is taken in a step only, and its views stay valid."""
        memory = Memory(torch.device("cpu"))
        self.assertFalse(memory.frees_between_steps)
        kept, released = memory.zeros(16), memory.zeros(8)
        memory.release(released)
        view = kept.view(torch.float32)
        memory.free()
        self.assertEqual(kept.untyped_storage().nbytes(), 0)
        self.assertEqual(released.untyped_storage().nbytes(), 8)
        memory.allocate()
        view.fill_(1.0)
        self.assertEqual(kept.view(torch.float32), torch.ones(4))
        scratch = memory.scratch(4, torch.bfloat16)
        self.assertEqual(
            memory.scratch(2, torch.bfloat16).data_ptr(), scratch.data_ptr()
        )


if __name__ == "__main__":
    run_tests()
