# Owner(s): ["oncall: distributed"]
"""The rules that NCCL and CUDA make for a step, each with a program that breaks it and is caught.

No rule needs an accelerator, nor other processes: each rank plays its part alone.
"""

import itertools
import re
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers.accelerator import Accelerator
from torch.testing._internal.distributed._muon.checkers.order import disorder
from torch.testing._internal.distributed._muon.checkers.ranks import (
    PlacedMatrices,
    Program,
    Rank,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import local, R, S0, S1


LAZY = "lazy:0"
FOUR = (0, 1, 2, 3)
FIVE = (0, 1, 2, 3, 4)
TWO_BY_THREE = ((0, 1, 2), (3, 4, 5))
# Matrices are small, and so are the limits that large ones reach.
ROUNDS = (("ROUND_BYTES", 100), ("MAX_BUCKETS", 3))
# The rows of one grid are the columns of another one. Some have all ranks.
TWO_KINDS = tuple(
    PlacedMatrices(TWO_BY_THREE, placements, (rows, 20), 6)
    for rows in (80, 56, 24)
    for placements in ((R, R), (S0, R))
)
PROGRAMS = {
    "a rank alone": Program(2, (PlacedMatrices((0,)), PlacedMatrices((0, 1), (S0,)))),
    "sharded": Program(4, (PlacedMatrices(FOUR, (S0,)), PlacedMatrices(FOUR, (S1,)))),
    # A group of five ranks, and one of three of them, which are in no order.
    "groups": Program(
        5,
        (
            PlacedMatrices(FIVE, shape=(32, 32), count=3),
            PlacedMatrices(FIVE, shape=(4, 4)),
            PlacedMatrices((2, 4, 1), shape=(4, 4), count=6),
        ),
    ),
    # Each has one rank in common with the next one.
    "ring": Program(
        4,
        tuple(
            PlacedMatrices(ranks, placements, count=6)
            for ranks in ((0, 1), (2, 1), (2, 3), (0, 3))
            for placements in ((S0,), (R,))
        ),
        prefetch=3,
        limits=(("BUCKET_BYTES", 300), *ROUNDS),
    ),
    "grids of two kinds": Program(6, TWO_KINDS),
    "several rounds": Program(
        6, (PlacedMatrices(TWO_BY_THREE, (R, S0), count=24),), limits=ROUNDS
    ),
    "several rounds, one owner at a time": Program(
        5,
        (PlacedMatrices(FIVE, count=8),),
        prefetch=0,
        parallel=False,
        limits=ROUNDS,
        options=(("lr", "on the device"),),
    ),
}


def second_step(program, number, recorder, device="cpu"):
    """``recorder``, after rank ``number`` has built an optimizer and made two steps, of which the second one counts."""
    with Rank(program, number, device) as rank, recorder:
        rank.build()
        rank.step()
        recorder.begin()
        rank.step()
    return recorder


def bound_splits(program, build):
    """The different lists of groups that ranks make by splitting the default group, which all ranks must join."""
    found = {}
    original = distributed_c10d._new_process_group_helper

    def made(*args, **kwargs):
        world = dist.group.WORLD
        device, world.bound_device_id = world.bound_device_id, None
        _, _, ranks, *_ = args
        found[dist.get_rank()].append(tuple(ranks))
        group = original(*args, **kwargs)
        world.bound_device_id = device
        return group

    patched = mock.patch.object(distributed_c10d, "_new_process_group_helper", made)
    for number in range(program.world):
        found[number] = []
        with Rank(program, number) as rank, Recorder(), patched:
            # A stand-in for init_process_group(device_id=...), after which NCCL splits groups.
            dist.group.WORLD.bound_device_id = torch.device(LAZY)
            build(rank)
    return {tuple(groups) for groups in found.values()}


class TestMuonRules(TestCase):
    def test_programs(self):
        """Memory, the host, first uses and order, while an engine is built and in steps."""
        devices = (Recorder, "cpu"), (Accelerator, LAZY)
        for name, (recorder_type, device) in itertools.product(PROGRAMS, devices):
            with self.subTest(name, device=device):
                program, calls, problems = PROGRAMS[name], {}, []
                for number in range(program.world):
                    recorder = second_step(program, number, recorder_type(), device)
                    calls[number] = recorder.calls
                    problems += recorder.problems
                self.assertEqual(problems, [])
                self.assertEqual(disorder(calls), [])

    def test_flags_decide_the_order(self):
        """The launches and waits of gathers and scatters, of 16 matrices in buckets of four."""
        program = Program(4, (PlacedMatrices(FOUR, (S0,), count=16),))
        for parallel, prefetch, expected in (
            # Each group is what happens for one bucket: its gather is there, its scatter starts, the scatter
            # before is there, and the next gather starts in the free slot.
            (True, 0, "l wll wlwl wlwl wlw w"),
            (True, 2, "lll wll wlw wlw wlw w"),
            # Debug mode: each matrix is a bucket, which ends before the next one begins.
            (False, 0, "lw" * 32),
        ):
            with self.subTest(parallel=parallel, prefetch=prefetch):
                changed = program._replace(parallel=parallel, prefetch=prefetch)
                recorder = second_step(changed, 1, Recorder())
                events = [
                    event[0]
                    for event, call in recorder.log[recorder.began :]
                    if call.name != "all_reduce"
                ]
                self.assertEqual("".join(events), expected.replace(" ", ""))

    def test_groups(self):
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                found = bound_splits(program, Rank.build)
                self.assertEqual(len(found), 1, f"{found}")

    def test_steady_state(self):
        """The fourth step launches what the third one did. Nothing waits but copies of offloaded parameters."""
        replicas = PlacedMatrices(((0, 1), (2, 3)), (R, S0))
        offloaded = Program(4, (replicas._replace(offloaded=True), replicas))
        copies = r"^the host waits for aten.(_to_)?copy_?.default$"
        for program, lr, waits in (
            (PROGRAMS["groups"], 0.02, None),
            (PROGRAMS["several rounds"], "on the device", None),
            (offloaded, 0.02, copies),
        ):
            changed = program._replace(options=(("lr", lr),))
            with self.subTest(program=program, lr=lr):
                with Rank(changed, 1, LAZY) as rank, Accelerator() as accelerator:
                    rank.build()
                    operations = []
                    for _ in range(4):
                        rank.step()
                        operations.append(accelerator.operations)
                        accelerator.begin()
                    for param in rank.params:
                        momentum = rank.muon.state[param]["momentum_buffer"]
                        self.assertEqual(momentum.device, param.device)
                self.assertEqual(operations[2], operations[3])
                self.assertEqual(bool(accelerator.problems), waits is not None)
                for problem in accelerator.problems:
                    self.assertRegex(problem, waits)

    def test_launches_do_not_grow_with_ranks(self):
        """A launch took tens of microseconds for each shard of each matrix once."""
        counts = []
        for world in (4, 8):
            placed = PlacedMatrices(tuple(range(world)), (S0,), (512, 256), 8 * world)
            program = Program(world, (placed,))
            accelerator = second_step(program, world - 1, Accelerator(), LAZY)
            counts.append(len(accelerator.operations))
        self.assertEqual(*counts)
        # In four buckets, of which each has fifteen products.
        self.assertLess(counts[0], 340)

    def test_memory(self):
        """Nothing but tables stays; a step has what describe() says; a rebuild does not have it twice."""
        for program in (
            Program(4, (PlacedMatrices(FOUR, (S0,), (1024, 512), 8),)),
            # Regions of this dtype take more than Newton-Schulz.
            Program(4, (PlacedMatrices(FOUR, shape=(256, 512), dtype=torch.float64),)),
            # Each matrix is a bucket.
            Program(4, (PlacedMatrices(FOUR, (S0,), (256, 256), 16),), 0, False),
            # To round updates in bfloat16, several tensors of the size of the matrix were made.
            Program(4, (PlacedMatrices(FOUR, shape=(512, 512), dtype=torch.bfloat16),)),
        ):
            with (
                self.subTest(program=program),
                Rank(program, 1, LAZY) as rank,
                Accelerator() as accelerator,
            ):
                rank.build()
                at_build = accelerator.peak
                rank.step()
                own = 0
                for param in rank.params:
                    own += local(rank.muon.state[param]["momentum_buffer"]).nbytes
                self.assertLess(accelerator.live - own, 2**16)
                accelerator.begin()
                rank.step()
                peak = accelerator.peak - own
                page = rank.muon.describe()
                mebibytes = re.search(r"takes up to ([\d.e+]+) MiB", page)[1]
                described = float(mebibytes) * 2**20
                self.assertTrue(0.95 * peak < described < 1.05 * peak)
                self.assertLess(at_build, 1.05 * peak)
                # The next step builds the engine again.
                rank.params.pop(0).requires_grad_(False)
                rank.grads.pop(0)
                accelerator.begin()
                rank.step()
                self.assertLess(accelerator.peak - own, 1.05 * peak)


def on_device():
    return torch.ones(4, device=LAZY)


def reduce_over(first, second):
    """Has both in flight together."""
    tensor, another = on_device(), on_device()
    work = dist.all_reduce(tensor, group=first, async_op=True)
    dist.all_reduce(another, group=second)
    work.wait()


class TestMuonBrokenRules(TestCase):
    """Programs that break a rule. The model finds each of them."""

    def recorders(self, program, ranks=(0,)):
        """A recorder for each rank, after a program that somebody wrote badly."""
        found = {}
        for number in ranks:
            with Rank(Program(3), number, LAZY), Accelerator() as found[number]:
                groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2), (0, 2))]
                found[number].begin()
                program(number, groups)
        return found

    def test_order(self):
        """Other sizes, and a ring on a device with one queue."""

        def sizes(rank, groups):
            splits = [1, 2, 3] if rank == 1 else [1, 1, 1]
            given = torch.ones(sum(splits))
            dist.all_to_all_single(torch.ones(3), given, [1, 1, 1], splits)

        def ring(rank, groups):
            first, second = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
            reduce_over(groups[first], groups[second])

        for program, problem in (
            (sizes, "all_to_all_single.* and "),
            (ring, "rank 0 is stuck at all_reduce 0"),
        ):
            with self.subTest(program.__name__):
                recorders = self.recorders(program, range(3))
                calls = {rank: recorder.calls for rank, recorder in recorders.items()}
                self.assertRegex(" ".join(disorder(calls)), problem)

    def test_one_rank(self):
        def exchange(meanwhile, *_):
            memory = torch.zeros(8, device=LAZY)
            sent, received = memory[:4], memory[4:]
            work = dist.all_to_all_single(received, sent, async_op=True)
            meanwhile(sent, received)
            work.wait()
            memory.zero_()

        def forgets_memory(*_):
            work = dist.all_reduce(on_device(), async_op=True)
            work.wait()

        def forgets_handle(*_):
            tensor = on_device()
            dist.all_reduce(tensor, async_op=True)
            return tensor

        def fills_a_table_again(event, *_):
            table = torch.empty(4, pin_memory=True)
            for number in range(2):
                table.fill_(number)
                on_device().copy_(table, non_blocking=True)
                if event:
                    torch.accelerator.current_stream().record_event().synchronize()

        def copies_from_pageable_memory(*_):
            on_device().copy_(torch.ones(4), non_blocking=True)

        for problem, program in (
            ("add.Tensor touches", partial(exchange, lambda sent, received: received + 1)),
            ("zero_.default touches", partial(exchange, lambda sent, _: sent.zero_())),
            ("is freed", forgets_memory),
            ("nobody waits", forgets_handle),
            ("is the first, while", lambda rank, groups: reduce_over(*groups[::2])),
            ("fill_.* touches the memory of a copy", partial(fills_a_table_again, False)),
            ("host waits for an event", partial(fills_a_table_again, True)),
            ("host waits for aten._local_scalar", lambda *_: float(on_device().sum())),
            ("host waits for aten.copy_", copies_from_pageable_memory),
        ):  # fmt: skip
            with self.subTest(problem=problem, program=program):
                problems = self.recorders(program)[0].problems
                self.assertRegex(" ".join(problems), problem)

    def test_groups(self):
        def by_members(rank):
            if rank.number < 2:
                dist.new_group([0, 1], use_local_synchronization=True)

        self.assertEqual(len(bound_splits(Program(4), by_members)), 2)


if __name__ == "__main__":
    run_tests()
