# Owner(s): ["oncall: distributed"]
"""The rules that NCCL and CUDA make for a step, each with programs that break it and are caught.

No rule needs an accelerator, nor other processes: each rank plays its part alone.
"""

import math

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_rules import (
    deadlock,
    disagreements,
    Held,
    InFlight,
    Program,
    Rank,
    Recorder,
)
from torch.testing._internal.distributed._muon.fuzz_settings import fuzz


from hypothesis import event, given, strategies as st


FIVE = tuple(range(5))
# Matrices are small, and the limits that large ones reach are smaller.
DIVIDED = (("MIN_DIVIDED", 16),)
RELAYED = (("MAX_REPLICAS", 1), ("RELAY_BYTES", 100), ("MAX_BUCKETS", 3))
IN_LEVELS = (("MAX_PEERS", 1), ("MAX_BUCKETS", 3))
SHARED_RANKS = Program(
    5,
    (
        Held(FIVE, shape=(32, 32), count=3),
        Held(FIVE, shape=(4, 4), count=4),
        Held((1, 2, 4), shape=(4, 4), count=6),
    ),
    owners=3,
    limits=DIVIDED,
)
PROGRAMS = {
    "sharded": Program(4, (Held((0, 1, 2, 3), (0,)), Held((0, 1, 2, 3), (1,)))),
    "a group in a group": SHARED_RANKS._replace(owners=1),
    "divided, relayed, a group in a group": SHARED_RANKS,
    "relayed": Program(6, (Held(tuple(range(6)), count=12),), 2, limits=RELAYED),
    "relayed shards": Program(
        6,
        (Held(tuple(range(6)), ("R", 0), count=12, sizes=(3, 2)),),
        limits=RELAYED,
    ),
    "two levels": Program(
        6, (Held(tuple(range(6)), (0,), (12, 8), 12),), node=3, limits=IN_LEVELS
    ),
    "two levels, relayed": Program(
        8,
        (Held(tuple(range(8)), ("R", 0), count=10, sizes=(2, 4)),),
        3,
        node=4,
        limits=(*RELAYED, ("MAX_PEERS", 1)),
    ),
    "divided": Program(
        4, (Held((0, 1, 2, 3), (0,), (24, 20), 3),), 0, 2, limits=DIVIDED
    ),
    "a sum": Program(4, (Held((0, 1, 2, 3), ("P", 0), sizes=(2, 2)),)),
}


def one_of(*values):
    return st.sampled_from(values)


@st.composite
def programs(draw):
    """Groups of some ranks of a world, with all that makes more groups, and with small limits."""
    world = draw(one_of(5, 4, 6, 3))
    held = []
    # One group of all ranks, and others that share some of them.
    for at in range(draw(one_of(2, 1, 3))):
        ranks = tuple(range(world))
        if at:
            ranks = tuple(sorted(draw(st.sets(one_of(*ranks), min_size=2))))
        count = len(ranks)
        sizes = draw(one_of((count,), (count,), (2, count // 2)))
        sizes = sizes if count == math.prod(sizes) else (count,)
        for large in (True, False):
            placements = tuple(draw(one_of("R", "R", "R", 0, 1)) for _ in sizes)
            shape = (24, 20) if large else draw(one_of((4, 4), (3, 7), (1, 5)))
            held.append(Held(ranks, placements, shape, draw(one_of(3, 0, 1, 6)), sizes))
    limits = {
        "MAX_BUCKETS": draw(one_of(4, 1, 2)),
        "BUCKET_BYTES": draw(one_of(2**20, 100, 1000)),
        "MAX_REPLICAS": draw(one_of(1, 2, 4)),
        "MAX_PEERS": draw(one_of(512, 1)),
        "RELAY_BYTES": draw(one_of(2**20, 40)),
        "MIN_DIVIDED": draw(one_of(16, 1)),
    }
    return Program(
        world,
        tuple(held),
        prefetch=draw(one_of(1, 0, 2, 3)),
        owners=draw(one_of(3, 2, 1)),
        parallel=draw(one_of(True, True, True, False)),
        node=draw(one_of(1, 2, 3)),
        limits=tuple(limits.items()),
    )


def step_of(program, rank, recorder, device="cpu"):
    """What ``recorder`` sees of a step of ``rank``."""
    with Rank(program, rank, device) as one, recorder:
        if one.params:
            one.build()
            one.step()
            recorder.begin()
            one.step()
    return recorder


def play(program):
    """Each rank's launches and waits of a step."""
    return {
        rank: step_of(program, rank, Recorder()).log for rank in range(program.world)
    }


class Stumbles(InFlight):
    """Raises an error at one of the operations."""

    def __init__(self, at):
        super().__init__()
        self.at, self.first = 0, at

    def begin(self):
        super().begin()
        self.at = self.first

    def operated(self, *what):
        super().operated(*what)
        self.at -= 1
        if self.at == 0:
            raise ArithmeticError("stumbled")


class Broken:
    """A rank's part of a program that somebody wrote badly."""

    def __init__(self, rank, world=3, recorder=None):
        self.rank = Rank(Program(world, ()), rank)
        self.recorder = recorder or Recorder()

    def __enter__(self):
        self.rank.__enter__()
        self.recorder.__enter__()
        self.groups = [dist.new_group(of) for of in ((0, 1), (1, 2), (0, 2))]
        return self

    def __exit__(self, *exception):
        self.recorder.__exit__(*exception)
        self.rank.__exit__(*exception)


class TestMuonRuleOrder(TestCase):
    """All ranks of a communicator launch the same collectives, and no ranks wait for each other."""

    def check(self, logs):
        self.assertEqual(disagreements(logs), [])
        self.assertEqual(deadlock(logs), [])
        self.assertEqual(deadlock(logs, in_turn=True), [])

    def test_programs(self):
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                self.check(play(program))

    @fuzz(25)
    @given(programs())
    def test_drawn_programs(self, program):
        self.check(play(program))

    @fuzz(15)
    @given(programs(), st.data())
    def test_a_rank_that_stumbles_launches_nothing_more(self, program, data):
        rank = data.draw(st.integers(0, program.world - 1))
        whole = step_of(program, rank, Stumbles(0))
        if whole.at == 0:
            return
        at = data.draw(st.integers(1, -whole.at))
        stumbles = Stumbles(at)
        with self.assertRaisesRegex(ArithmeticError, "stumbled"):
            step_of(program, rank, stumbles)
        self.assertEqual(stumbles.problems, [])
        before, after = (
            [
                (call.comm, call.number, call.said)
                for what, call in one.log
                if what == "launch"
            ]
            for one in (whole, stumbles)
        )
        self.assertEqual(before[: len(after)], after)

    def test_broken_programs(self):
        """Two collectives in different orders; other sizes; one that a rank leaves out; a ring of waits."""

        def orders(of, rank):
            for group in of.groups if rank else reversed(of.groups):
                if rank in dist.get_process_group_ranks(group):
                    dist.all_reduce(torch.ones(2), group=group)

        def sizes(of, rank):
            splits = [1, 2, 3] if rank == 1 else [1, 1, 1]
            out, given = torch.ones(3), torch.ones(sum(splits))
            dist.all_to_all_single(out, given, [1, 1, 1], splits)

        def leaves_out(of, rank):
            for _ in range(1 + (rank != 2)):
                dist.broadcast(torch.ones(2), 0)

        def ring(of, rank):
            # Rank k waits for the group that it shares with the next rank before it joins the other one.
            mine = (of.groups[0], of.groups[2]), (of.groups[1], of.groups[0])
            first, second = (*mine, (of.groups[2], of.groups[1]))[rank]
            dist.all_reduce(torch.ones(2), group=first)
            dist.all_reduce(torch.ones(2), group=second)

        def overlapping_ring(of, rank):
            mine = (of.groups[0], of.groups[2]), (of.groups[1], of.groups[0])
            pair = (*mine, (of.groups[2], of.groups[1]))[rank]
            works = [
                dist.all_reduce(torch.ones(2), group=g, async_op=True) for g in pair
            ]
            for work in works:
                work.wait()

        found = {}
        for program in (orders, sizes, leaves_out, ring, overlapping_ring):
            logs = {}
            for rank in range(3):
                with Broken(rank) as broken:
                    program(broken, rank)
                logs[rank] = broken.recorder.log
            checks = disagreements(logs), deadlock(logs), deadlock(logs, in_turn=True)
            found[program.__name__] = tuple(map(bool, checks))
        self.assertEqual(
            found,
            {
                "orders": (False, False, False),
                "sizes": (True, False, False),
                "leaves_out": (True, True, True),
                "ring": (False, True, True),
                "overlapping_ring": (False, False, True),
            },
        )


if __name__ == "__main__":
    run_tests()
