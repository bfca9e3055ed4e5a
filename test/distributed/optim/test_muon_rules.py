# Owner(s): ["oncall: distributed"]
"""The rules that NCCL and CUDA make for a step, each with programs that break it and are caught.

No rule needs an accelerator, nor other processes: each rank plays its part alone.
"""

import itertools
import math
import re
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers.accelerator import Accelerator
from torch.testing._internal.distributed._muon.checkers.fuzz_settings import (
    fuzz,
    one_of,
    st,
)
from torch.testing._internal.distributed._muon.checkers.order import (
    deadlock,
    disagreements,
)
from torch.testing._internal.distributed._muon.checkers.ranks import (
    PlacedMatrices,
    Program,
    Rank,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import local


LAZY = "lazy:0"
FOUR = (0, 1, 2, 3)
FIVE = (0, 1, 2, 3, 4)
EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
# Matrices are small, and so are the limits that large ones reach.
ROUNDS = (("ROUND_BYTES", 100), ("MAX_BUCKETS", 3))
# A group of five ranks, and one of three of them.
GROUPS = (
    PlacedMatrices(FIVE, shape=(32, 32), count=3),
    PlacedMatrices(FIVE, shape=(4, 4)),
    PlacedMatrices((1, 2, 4), shape=(4, 4), count=6),
)
MIXED = tuple(
    PlacedMatrices((0, 1, 2, 3, 4, 5), placements, (rows, 20), 6, (2, 3))
    for rows in (80, 72, 64, 56, 48, 40, 32, 24)
    for placements in (("R", "R"), (0, "R"))
)
PROGRAMS = {
    "sharded": Program(4, (PlacedMatrices(FOUR, (0,)), PlacedMatrices(FOUR, (1,)))),
    "a sum": Program(4, (PlacedMatrices(FOUR, ("P", 0), sizes=(2, 2)),)),
    "stages": Program(
        8,
        (
            PlacedMatrices((0, 1, 2, 3), ("R", 0), sizes=(2, 2)),
            PlacedMatrices((4, 5, 6, 7), ("R", 0), sizes=(2, 2)),
        ),
    ),
    "groups": Program(5, GROUPS),
    "several rounds": Program(5, (PlacedMatrices(FIVE, count=8),), limits=ROUNDS),
    # The rows of one grid are the columns of another one. Some have all ranks.
    "grids of two kinds": Program(6, MIXED),
    "several rounds, sharded": Program(
        8, (PlacedMatrices(EIGHT, ("R", 0), count=24, sizes=(2, 4)),), limits=ROUNDS
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


@st.composite
def programs(draw):
    """Groups of some ranks of a world, with all that makes more groups, and with small limits."""
    world = draw(one_of(5, 4, 6, 3))
    placed = []
    # One group of all ranks, and others that share some of them.
    for number in range(draw(one_of(2, 1, 3))):
        ranks = tuple(range(world))
        if number > 0:
            some = draw(st.sets(one_of(*ranks), min_size=2))
            ranks = tuple(sorted(some))
        count = len(ranks)
        sizes = draw(one_of((count,), (count,), (2, count // 2)))
        if math.prod(sizes) != count:
            sizes = (count,)
        for is_large in (True, False):
            placements = tuple(draw(one_of("R", "R", "R", 0, 1)) for _ in sizes)
            shape = (24, 20) if is_large else draw(one_of((4, 4), (3, 7), (1, 5)))
            matrices = draw(one_of(3, 0, 1, 6))
            placed.append(PlacedMatrices(ranks, placements, shape, matrices, sizes))
    limits = {
        "MAX_BUCKETS": draw(one_of(4, 1, 2)),
        "BUCKET_BYTES": draw(one_of(2**20, 100, 1000)),
        "ROUND_BYTES": draw(one_of(2**20, 40, 300)),
    }
    return Program(
        world,
        tuple(placed),
        prefetch=draw(one_of(1, 0, 2, 3)),
        parallel=draw(one_of(True, True, True, False)),
        limits=tuple(limits.items()),
    )


def step_of(program, number, recorder, device="cpu"):
    """``recorder``, after a step of rank ``number``."""
    with Rank(program, number, device) as rank, recorder:
        if rank.params:
            rank.build()
            rank.step()
            recorder.begin()
            try:
                rank.step()
            finally:
                # Another tensor takes memory that the step has freed.
                torch.empty(1, device=device)
    return recorder


def play(program, recorder_type=Recorder, device="cpu"):
    """Each rank's record of a step."""
    recorders = {}
    for number in range(program.world):
        recorders[number] = step_of(program, number, recorder_type(), device)
    return recorders


def splits_of(program, build):
    """The different groups that ranks make by splitting the default group, which all ranks must join."""
    found = {}
    original = distributed_c10d._new_process_group_helper

    def made(*args, **kwargs):
        world = dist.group.WORLD
        device = world.bound_device_id
        if device is not None:
            _, _, ranks, *_ = args
            found[dist.get_rank()].append(tuple(ranks))
        world.bound_device_id = None
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


def build_if_it_has_parameters(rank):
    if rank.params:
        rank.build()


class RulesTestCase(TestCase):
    def check(self, recorders):
        """Rules of any device."""
        logs, problems = {}, []
        for number, recorder in recorders.items():
            logs[number] = recorder.log
            problems += recorder.problems
        self.assertEqual(problems, [])
        self.assertEqual(disagreements(logs), [])
        self.assertEqual(deadlock(logs, in_turn=True), [])

    def broken(self, program, recorder_type=Recorder, ranks=(0,), device="cpu"):
        """A recorder of each rank, after a program that somebody wrote badly."""
        found = {}
        for number in ranks:
            with Rank(Program(3, ()), number, device), recorder_type() as recorder:
                groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2), (0, 2))]
                recorder.begin()
                program(number, groups)
            found[number] = recorder
        return found

    def assertFinds(self, *rows, on_device=True):
        """Each row is the text of the first problem, "" for none, and a program that has it."""
        for number, (text, program) in enumerate(rows):
            with self.subTest(row=number, text=text):
                if on_device:
                    recorders = self.broken(program, Accelerator, device=LAZY)
                else:
                    recorders = self.broken(program)
                problems = recorders[0].problems
                if not text:
                    self.assertEqual(problems, [])
                else:
                    self.assertGreater(len(problems), 0)
                    self.assertRegex(problems[0], text)


# The numbers of prefetched buckets with which a program runs on a CPU; one by default.
PREFETCH_COUNTS = {"several rounds": (0, 1, 2, 3), "sharded": (0, 1, 2, 3)}
LETTERS = {"launch": "l", "wait": "w"}


class TestMuonRules(RulesTestCase):
    def test_programs(self):
        """On an accelerator, streams, events and handles order all accesses to memory."""
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                self.check(play(program, Accelerator, LAZY))
            for prefetch in PREFETCH_COUNTS.get(name, (1,)):
                with self.subTest(name, prefetch=prefetch):
                    self.check(play(program._replace(prefetch=prefetch)))

    def test_flags_decide_the_order(self):
        """The launches and waits of gathers and scatters, of 16 matrices in buckets of four."""
        program = Program(4, (PlacedMatrices(FOUR, (0,), count=16),))
        for parallel, prefetch, expected in (
            # Each group is what happens for one bucket: its gather is there, its scatter starts, the scatter
            # before is there, and the next gather starts in the free slot.
            (True, 0, "l wll wlwl wlwl wlw w"),
            (True, 1, "ll wll wlwl wlw wlw w"),
            (True, 2, "lll wll wlw wlw wlw w"),
            (True, 3, "llll wl wlw wlw wlw w"),
            # Debug mode: each matrix is a bucket, which ends before the next one begins.
            (False, 0, "lw" * 32),
            (False, 1, "ll wll" + "wlwl" * 13 + "wlw wlw w"),
        ):
            with self.subTest(parallel=parallel, prefetch=prefetch):
                changed = program._replace(parallel=parallel, prefetch=prefetch)
                for recorder in play(changed).values():
                    events = []
                    for event, call in recorder.log:
                        if call.name != "all_reduce":
                            events.append(LETTERS[event])
                    self.assertEqual("".join(events), expected.replace(" ", ""))

    @fuzz(16, programs())
    def test_drawn_programs(self, program):
        self.check(play(program))
        self.check(play(program, Accelerator, LAZY))

    @fuzz(12, one_of("sharded", "several rounds, sharded", "groups"), st.data())
    def test_a_rank_that_stumbles(self, name, data):
        """It launches nothing more, and frees no memory before those who use it are done."""
        program = PROGRAMS[name]._replace(options=(("foreach", True),))
        before = step_of(program, 1, Accelerator(), LAZY)
        place = data.draw(st.integers(1, before.done))
        after = Accelerator(stumbles=place)
        with self.assertRaisesRegex(ArithmeticError, "stumbled"):
            step_of(program, 1, after, LAZY)
        self.assertEqual(after.problems, [])
        launches = after.launches
        self.assertEqual(before.launches[: len(launches)], launches)

    def test_groups(self):
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                found = splits_of(program, build_if_it_has_parameters)
                self.assertEqual(len(found), 1, f"{found}")

    def test_host_and_first_use(self):
        """Nothing waits, the fourth step launches what the third did, and no communicator is new."""
        for name, lr, number in (
            ("groups", 0.02, 1),
            ("groups", 0.02, 4),
            ("several rounds, sharded", "on the device", 1),
            ("several rounds, sharded", "on the device", 7),
        ):
            program = PROGRAMS[name]._replace(options=(("lr", lr),))
            with self.subTest(name, rank=number):
                with Rank(program, number, LAZY) as rank, Accelerator() as accelerator:
                    rank.build()
                    operations = []
                    for _ in range(4):
                        rank.step()
                        operations.append(accelerator.operations)
                        accelerator.begin()
                _, _, third, fourth = operations
                self.assertEqual(third, fourth)
                self.assertEqual(accelerator.problems, [])

    def test_offloaded(self):
        """Momentum stays with its parameter on the host, and nothing but copies between devices waits."""
        placed = (
            PlacedMatrices(FOUR, (0,), offloaded=True),
            PlacedMatrices(FOUR, (1,), offloaded=True),
            PlacedMatrices(FOUR, (0,)),
        )
        for lr, number in itertools.product((0.02, "on the device"), FOUR):
            program = Program(4, placed, options=(("lr", lr),))
            with self.subTest(lr=lr, rank=number):
                with Rank(program, number, LAZY) as rank, Accelerator() as accelerator:
                    rank.build()
                    rank.step()
                    devices = []
                    for param in rank.params:
                        momentum = rank.muon.state[param]["momentum_buffer"]
                        devices.append(momentum.device)
                    accelerator.begin()
                    rank.step()
                self.assertEqual(devices, [param.device for param in rank.params])
                self.assertGreater(len(accelerator.problems), 0)
                for problem in accelerator.problems:
                    copies = r"^the host waits for aten.(_to_)?copy_?.default$"
                    self.assertRegex(problem, copies)

    def test_one_order_while_an_engine_is_built(self):
        """Ranks agree, make groups and use each communicator alone in an order without deadlocks."""
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                logs = {}
                for number in range(program.world):
                    with Rank(program, number, LAZY) as rank:
                        with Accelerator() as accelerator:
                            build_if_it_has_parameters(rank)
                    self.assertEqual(accelerator.problems, [])
                    logs[number] = accelerator.log
                self.assertEqual(deadlock(logs, in_turn=True), [])

    def launches_of(self, world, number, count):
        """The operations of a step by name, but for the products."""
        ranks = tuple(range(world))
        program = Program(world, (PlacedMatrices(ranks, (0,), (512, 256), count),))
        accelerator = step_of(program, number, Accelerator(), LAZY)
        exchanges = accelerator.names.count("all_to_all_single")
        self.assertEqual(exchanges, 8)
        names = Counter(
            func.__name__.split(".")[0] for func, _ in accelerator.operations
        )
        # One matrix is iterated by mm and addmm, several by bmm and baddbmm.
        products = 0
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            products += names.pop(name, 0)
        # Five iterations of three products in each of four buckets.
        self.assertEqual(products, 60)
        # Views of a batch.
        for name in ("stack", "_unsafe_view"):
            del names[name]
        return names.total()

    def test_launches_do_not_grow_with_matrices_or_ranks(self):
        """A launch took tens of microseconds for each shard of each matrix once."""
        one_for_each_owner = self.launches_of(world=4, number=0, count=16)
        two_for_each_owner = self.launches_of(world=4, number=3, count=32)
        more_ranks = self.launches_of(world=8, number=7, count=64)
        self.assertEqual(two_for_each_owner, more_ranks)
        # In four buckets.
        self.assertLess(max(one_for_each_owner, two_for_each_owner), 280)

    def check_memory(self, program, most):
        """``most``: what describe() may say, compared with what the step has."""
        with Rank(program, 1, LAZY) as rank, Accelerator() as accelerator:
            rank.build()
            rank.step()
            own = 0
            for param in rank.params:
                own += local(rank.muon.state[param]["momentum_buffer"]).nbytes
            # Nothing but tables stays.
            self.assertLess(accelerator.live - own, 2**16)
            accelerator.begin()
            rank.step()
            peak = accelerator.peak - own
            page = rank.muon.describe()
            mebibytes = re.search(r"takes up to ([\d.e+]+) MiB", page)[1]
            ratio = float(mebibytes) * 2**20 / peak
            self.assertGreater(ratio, 0.95)
            self.assertLess(ratio, most)
            # The next step builds the engine again.
            frozen = rank.params.pop(0)
            frozen.requires_grad_(False)
            rank.grads.pop(0)
            accelerator.begin()
            rank.step()
            self.assertLess(accelerator.peak - own, 1.05 * peak)

    def test_memory(self):
        """Nothing but tables stays; a step has what describe() says; a rebuild does not have it twice."""
        replicated = PlacedMatrices(FIVE, shape=(512, 512), count=12)
        sharded = PlacedMatrices(FOUR, (0,), (1024, 512), 8)
        # Regions of this dtype take more than Newton-Schulz.
        wide = PlacedMatrices(FOUR, shape=(256, 512), dtype=torch.float64)
        # To round updates in bfloat16, several tensors of the size of the matrix were made.
        rounded = PlacedMatrices(FOUR, shape=(512, 512), dtype=torch.bfloat16)
        for name, program in (
            ("sharded", Program(4, (sharded,))),
            ("replicated", Program(5, (replicated,))),
            ("wide", Program(4, (wide,))),
            ("rounded", Program(4, (rounded,))),
        ):
            with self.subTest(name):
                self.check_memory(program, most=1.05)


class TestMuonBrokenRules(RulesTestCase):
    """Programs that break a rule. The model finds each of them."""

    def test_broken_order(self):
        """Other sizes; one that a rank leaves out; a ring of waits; one on a device with one queue."""

        def sizes(rank, groups):
            splits = [1, 2, 3] if rank == 1 else [1, 1, 1]
            given = torch.ones(sum(splits))
            dist.all_to_all_single(torch.ones(3), given, [1, 1, 1], splits)

        def left_out(rank, groups):
            dist.broadcast(torch.ones(2), 0)
            if rank != 2:
                dist.broadcast(torch.ones(2), 0)

        def pair_of(rank, groups):
            first, second = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
            return groups[first], groups[second]

        def ring(rank, groups):
            for group in pair_of(rank, groups):
                dist.all_reduce(torch.ones(2), group=group)

        def launches_in_a_ring(rank, groups):
            works = []
            for group in pair_of(rank, groups):
                tensor = torch.ones(2)
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
            for work in works:
                work.wait()

        for program, disagree, are_stuck, are_stuck_in_turn in (
            (sizes, True, False, False),
            (left_out, True, True, True),
            (ring, False, True, True),
            (launches_in_a_ring, False, False, True),
        ):
            with self.subTest(program.__name__):
                recorders = self.broken(program, ranks=range(3))
                logs = {rank: recorder.log for rank, recorder in recorders.items()}
                self.assertEqual(bool(disagreements(logs)), disagree)
                self.assertEqual(bool(deadlock(logs)), are_stuck)
                stuck = deadlock(logs, in_turn=True)
                self.assertEqual(bool(stuck), are_stuck_in_turn)

    def test_broken_in_flight(self):
        memory = torch.zeros(8)
        sent, received = memory[:4], memory[4:]

        def exchange(meanwhile):
            def program(*_):
                work = dist.all_to_all_single(received, sent, async_op=True)
                meanwhile()
                work.wait()
                memory.zero_()

            return program

        def frees(*_):
            mine = torch.zeros(4)
            work = dist.all_reduce(mine, async_op=True)
            mine.untyped_storage().resize_(0)
            work.wait()

        self.assertFinds(
            ("add.Tensor touches", exchange(lambda: received + 1)),
            ("zero_.default touches", exchange(memory.zero_)),
            ("broadcast .* touches", exchange(lambda: dist.broadcast(received, 0))),
            ("nobody waits", lambda *_: dist.all_reduce(memory, async_op=True)),
            ("is freed", frees),
            ("", exchange(lambda: (sent + 1, received.view(2, 2).T))),
            on_device=False,
        )

    def test_broken_groups(self):
        def by_members(rank):
            if rank.number < 2:
                dist.new_group([0, 1], use_local_synchronization=True)

        def by_all(rank):
            dist.new_group([0, 1])

        nothing = Program(4, ())
        self.assertEqual(len(splits_of(nothing, by_members)), 2)
        self.assertEqual(len(splits_of(nothing, by_all)), 1)

    def test_broken_host_and_first_use(self):
        def on_device():
            return torch.ones(4, device=LAZY)

        def pinned():
            return torch.empty(4, pin_memory=True)

        def reads_too_early(*_):
            table = pinned()
            table.copy_(on_device(), non_blocking=True)
            table.tolist()

        def waits_for_this_step(*_):
            on_device()
            torch.accelerator.current_stream().record_event().synchronize()

        def first_uses_together(rank, groups):
            first, _, other = groups
            work = dist.all_reduce(on_device(), group=first, async_op=True)
            its_work = dist.all_reduce(on_device(), group=other, async_op=True)
            work.wait()
            its_work.wait()

        def first_uses_in_turn(rank, groups):
            first, _, other = groups
            dist.all_reduce(on_device(), group=first, async_op=True).wait()
            dist.all_reduce(on_device(), group=other, async_op=True).wait()

        def copies(target, source, **how):
            return lambda *_: target().copy_(source(), **how)

        def pageable():
            return torch.ones(4)

        self.assertFinds(
            ("host waits for aten._local_scalar", lambda *_: float(on_device().sum())),
            ("host waits for aten._to_copy", lambda *_: torch.ones(4).to(LAZY)),
            (
                "host waits for aten.copy_",
                copies(on_device, pageable, non_blocking=True),
            ),
            ("host waits for aten.copy_", copies(pinned, on_device)),
            ("touches the memory of aten.copy_", reads_too_early),
            ("host waits for an event", waits_for_this_step),
            ("is the first, while", first_uses_together),
            ("", first_uses_in_turn),
            ("", copies(pinned, on_device, non_blocking=True)),
        )

    def test_broken_memory(self):
        """The count of bytes sees what is kept, what is emptied, and two sets at once."""
        with Rank(Program(3, ()), 0, LAZY), Accelerator() as accelerator:
            kept = torch.empty(1000, device=LAZY)
            self.assertEqual(accelerator.live, 4000)
            self.assertEqual(accelerator.peak, 4000)
            kept.untyped_storage().resize_(0)
            self.assertEqual(accelerator.live, 0)
            kept.untyped_storage().resize_(4000)
            another = torch.empty(1000, device=LAZY)
            self.assertEqual(accelerator.live, 8000)
            self.assertEqual(accelerator.peak, 8000)
            del another, kept
            self.assertEqual(accelerator.live, 0)

    def test_broken_streams(self):
        def waits_for_no_one(rank, groups):
            side, tensor = torch.Stream(), torch.ones(4, device=LAZY)
            with side:
                tensor.mul_(3)
            tensor.add_(1)

        def frees_too_early(rank, groups, record=False):
            side, tensor = torch.Stream(), torch.ones(4, device=LAZY)
            found = torch.zeros(4, device=LAZY)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                found.add_(tensor)
            if record:
                tensor.record_stream(side)
            del tensor
            torch.zeros(4, device=LAZY)
            torch.accelerator.current_stream().wait_stream(side)

        def reads_before_it_arrives(rank, groups):
            tensor = torch.full((4,), rank, device=LAZY)
            work = dist.all_reduce(tensor, async_op=True)
            tensor + 1
            work.wait()

        def writes_a_table_again(rank, groups, wait=False):
            table = torch.empty(4, pin_memory=True)
            found = torch.empty(2, 4, device=LAZY)
            for at in range(2):
                table.fill_(at)
                found[at].copy_(table, non_blocking=True)
                copied = torch.accelerator.current_stream().record_event()
                if wait:
                    copied.synchronize()

        self.assertFinds(
            ("mul_.* touches the memory of aten.ones", waits_for_no_one),
            ("the memory of aten.add_.* is freed", frees_too_early),
            ("add.* touches the memory of all_reduce", reads_before_it_arrives),
            ("fill_.* touches the memory of aten.copy_", writes_a_table_again),
            ("", partial(frees_too_early, record=True)),
            # The host may not wait in a step, but while the engine is built.
            ("the host waits for an event", partial(writes_a_table_again, wait=True)),
        )


if __name__ == "__main__":
    run_tests()
