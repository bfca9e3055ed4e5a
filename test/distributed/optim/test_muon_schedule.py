# Owner(s): ["oncall: distributed"]
"""The schedule of the distributed Muon as the pure function that it is: all ranks played in one process."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.optim._muon_engine.layouts.layout import Key, Layout, Region, Shards
from torch.optim._muon_engine.layouts.divide import divide
from torch.optim._muon_engine.schedule.order import (
    Action,
    local_order,
    LocalWork,
    Phase,
    step_order,
)
from torch.optim._muon_engine.schedule import buckets, division, owners
from torch.optim._muon_engine.schedule.buckets import BUCKET_BYTES, make_schedule
from torch.optim._muon_engine.schedule.division import Class, divided
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import place, R, S0, specs
from torch.testing._internal.distributed.fake_pg import FakeStore


def cut(length, parts):
    """Start and end of each part, as FSDP cuts rows."""
    step = -(-length // parts)
    return [(min(length, i * step), min(length, i * step + step)) for i in range(parts)]


def shards_of(shapes, fsdp, tp=1, replicas=1):
    """Matrices whose columns TP cuts, and whose rows FSDP."""
    shards = {}
    for rows, columns in set(shapes):
        of_one = tuple(
            (Region(a, c, b - a, d - c, 0, d - c),) if b > a and d > c else ()
            for a, b in cut(rows, fsdp)
            for c, d in cut(columns, tp)
        )
        ranks = tuple(range(fsdp * tp * replicas))
        shards[rows, columns] = Shards(ranks, of_one * replicas)
    return [
        Layout(Key(i), shape, torch.float32, shards[shape])
        for i, shape in enumerate(shapes)
    ]


# Of Llama 3 70B; of DeepSeek-V3, whose experts are an eighth.
LLAMA = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]
ATTENTION = (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)
LARGE, EXPERT = ([(rows, 7168), (rows, 7168), (7168, rows)] for rows in (18432, 2048))
DEEPSEEK = [*ATTENTION] * 61 + LARGE * 3 + [*EXPERT, (256, 7168)] * 58
DEEPSEEK += EXPERT * 58 * 32


def busiest(taken, members, ranks):
    """Seconds of the busiest rank, one matrix after another, each to the owners that are free first."""
    busy = [0.0] * ranks
    for of in sorted(taken, key=lambda of: -taken[of][0]):
        seconds, count = taken[of]
        teams = [range(at, at + count) for at in range(0, ranks - count + 1, count)]
        for _ in range(members[of]):
            team = min(teams, key=lambda team: max(busy[rank] for rank in team))
            end = max(busy[rank] for rank in team) + seconds
            for rank in team:
                busy[rank] = end
    return max(busy)


def scheduled(layouts, **options):
    return make_schedule(layouts, owners.assign_owners(layouts), **options)


class TestOrder(TestCase):
    """The order of a step, and each rank's part of it."""

    def test_order_of_all_ranks(self):
        for groups, prefetch_count, one_at_a_time, expected in (
            ("aaaa", 1, False, "G0 G1 C0 S0 G2 C1 S1 A0 G3 C2 S2 A1 C3 S3 A2 R2 A3 R3"),
            ("aaa", 0, False, "G0 C0 S0 G1 C1 S1 A0 G2 C2 S2 A1 R1 A2 R2"),
            ("aa", 0, True, "G0 C0 S0 A0 R0 G1 C1 S1 A1 R1"),
            ("a", 3, False, "G0 C0 S0 A0 R0"),
            ("", 1, False, ""),
            # Groups take turns in the order of buckets, and end in the order of their last ones.
            (
                "abab",
                0,
                False,
                "G0 G1 C0 S0 G2 C1 S1 G3 C2 S2 A0 C3 S3 A1 R0 A2 R2 R1 A3 R3",
            ),
            ("aba", 1, False, "G0 G2 G1 C0 S0 C1 S1 C2 S2 A0 A1 R1 R0 A2 R2"),
        ):
            with self.subTest(groups=groups, prefetch_count=prefetch_count):
                order = step_order(groups, prefetch_count, one_at_a_time)
                self.assertEqual(" ".join(map(str, order)), expected)

    def drawn(self, seed):
        draw = random.Random(seed)
        letters = "abc"[: draw.randint(1, 3)]
        groups = [draw.choice(letters) for _ in range(draw.randint(1, 9))]
        prefetch_count = draw.randint(0, 4)
        one_at_a_time = prefetch_count == 0 and draw.random() < 0.5
        work_of = {}
        for index in range(len(groups)):
            batches = draw.randint(0, 4)
            divided, relays = draw.randint(0, batches), draw.randint(0, 5)
            work_of[index] = LocalWork(index, range(batches), divided, range(relays))
        return groups, prefetch_count, one_at_a_time, work_of

    def test_order_of_each_rank(self):
        """What the memory and the collectives of a bucket need, for random plans."""
        for seed in range(500):
            groups, prefetch_count, one_at_a_time, work_of = self.drawn(seed)
            order = step_order(groups, prefetch_count, one_at_a_time)
            operations = local_order(order, groups, work_of)
            place_of = {operation: at for at, operation in enumerate(operations)}
            with self.subTest(seed=seed):
                self.assertEqual(len(place_of), len(operations))
                for index, work in work_of.items():
                    mine = [o for o in operations if o.bucket == index]
                    found = [o.action for o in mine]
                    batches = [Action.ORTHOGONALIZE] * len(work.batches)
                    each = [Action.RELAY, Action.AWAIT_RELAY, Action.APPLY_RELAYED]
                    once = [Action.GATHER, Action.AWAIT_GATHER, *batches]
                    once += [Action.SCATTER, Action.AWAIT_SCATTER, Action.APPLY]
                    self.assertEqual(found[: len(once)], once)
                    self.assertEqual(
                        Counter(found[len(once) :]),
                        Counter(each * len(work.relays)),
                    )
                    for relay in work.relays:
                        started, awaited, applied = (
                            place_of[action, index, relay] for action in each
                        )
                        self.assertTrue(started < awaited < applied)
                        if relay >= 2:
                            # It takes the memory of the relay before the last one.
                            before = place_of[Action.APPLY_RELAYED, index, relay - 2]
                            self.assertLess(before, started)
                self.check_slots(groups, prefetch_count, place_of)

    def check_slots(self, groups, prefetch_count, place_of):
        """A gather takes the memory of a bucket of its group whose results were applied."""
        of_group = {}
        for index, group in enumerate(groups):
            of_group.setdefault(group, []).append(index)
        for indices in of_group.values():
            for earlier, later in zip(indices, indices[prefetch_count + 2 :]):
                applied = place_of[Action.APPLY, earlier, None]
                self.assertLess(applied, place_of[Action.GATHER, later, None])

    def test_ranks_do_not_wait_in_a_circle(self):
        """Ranks of two groups come to the collectives that they share in one order."""
        for seed in range(200):
            groups, prefetch_count, one_at_a_time, work_of = self.drawn(seed)
            order = step_order(groups, prefetch_count, one_at_a_time)
            members = {"a": {"a"}, "b": {"b"}, "both": {"a", "b"}}
            found = {}
            for rank, its_groups in members.items():
                own = {i: w for i, w in work_of.items() if groups[i] in its_groups}
                operations = local_order(order, groups, own)
                found[rank] = [
                    o for o in operations if o.action is not Action.ORTHOGONALIZE
                ]
            for rank in ("a", "b"):
                shared = [o for o in found["both"] if groups[o.bucket] == rank]
                self.assertEqual(shared, found[rank], f"{seed}")

    def test_relays_take_turns_with_batches(self):
        order = step_order("aaa", 1)
        work_of = {
            0: LocalWork(0, relays=("x", "y", "z")),
            1: LocalWork(1),
            2: LocalWork(2, batches=("divided", 0, 1, 2), divided=1),
        }
        operations = local_order(order, "aaa", work_of)
        begin = operations.index((Action.AWAIT_GATHER, 2, None))
        end = operations.index((Action.SCATTER, 2, None))
        found = [f"{o.action.name} {o.item}" for o in operations[begin + 1 : end]]
        expected = (
            "ORTHOGONALIZE divided, RELAY x, RELAY y, ORTHOGONALIZE 0, AWAIT_RELAY x, APPLY_RELAYED x, "
            "RELAY z, ORTHOGONALIZE 1, AWAIT_RELAY y, APPLY_RELAYED y, ORTHOGONALIZE 2, AWAIT_RELAY z, "
            "APPLY_RELAYED z"
        )
        self.assertEqual(", ".join(found), expected)
        phases = {operation.phase for operation in order}
        self.assertEqual(phases, {*Phase})


class TestMuonDivision(TestCase):
    """``owners_per_matrix="auto"``."""

    def drawn(self, draw):
        """Matrices, the ranks of a group on nodes that it fills or not, and the numbers of owners to choose from."""
        per_node, nodes = draw.choice((1, 2, 8, 8)), draw.randint(1, 8)
        each = range(min(per_node, draw.choice((1, 2, 4, 7, 8))))
        group = [node * per_node + i for node in range(nodes) for i in each]
        if len(each) > 1 and draw.random() < 0.3:
            group.pop()
        near = min(Counter(rank // per_node for rank in group).values())
        members, numbers = {}, {}
        for _ in range(draw.randint(1, 3)):
            shape = tuple(draw.choice((2047, 2048, 16384, 32768)) for _ in "ab")
            shards = draw.choice((1, 1, 2, 3, 16, 32))
            of = Class(shape, draw.choice(("quintic", "gram")), shards)
            members[of] = draw.choice((1, 1, 2, 9))
            more = {2, 4, 8, 16, 32, 64}
            if shards > 1:
                # With other numbers, the replicas of some shards relay more than others.
                more = {n for n in more if n % near == 0 == shards % n} | {shards}
            more = more if min(shape) > 2047 else ()
            # Owners are ranks of one node, or whole nodes.
            whole = range(near, len(group) + 1, near) if near > 1 else ()
            numbers[of] = [1, *sorted({*range(1, near + 1), *whole} & {*more})]
        return members, numbers, group, per_node, near

    def cost(self, counts, members, ranks, near):
        """The seconds of H100s for Newton-Schulz, and with all that a division makes slower."""
        taken = {}
        for of, n in counts.items():
            work = newton_schulz_flops(of.shape, algorithm=of.algorithm) / 494.5e12
            wire = min(450e9, 50e9 * near) if n > near else 450e9
            moved = (n - 1) / n * 10 * min(of.shape) ** 2 / wire
            taken[of] = work / n + 5 * (moved + 3 * (n - 1) * 0.47e-6), n
        busy = busiest(taken, members, ranks)
        largest = max(math.prod(of.shape) / n for of, n in counts.items())
        alone = 4 * largest / (450e9 if ranks == near else 50e9)
        return busy, (busy + alone) * (1 + 0.02 * (max(counts.values()) - 1))

    def test_best_division(self):
        """It is hardly slower than the fastest of all, and saves more than 2 % where it differs from one owner."""
        draw, found = random.Random(3), Counter()
        for _ in range(300):
            members, numbers, group, per_node, near = self.drawn(draw)
            best, seconds = division.best_division(members, group, per_node)
            where = members, len(group), near
            choices = itertools.product(*numbers.values())
            every = [dict(zip(members, choice)) for choice in choices]
            self.assertIn(best, every)
            busy, total = self.cost(best, *where)
            self.assertEqual(seconds, busy, atol=0, rtol=1e-6)
            self.assertLess(total, 1.03 * min(self.cost(c, *where)[1] for c in every))
            if best != every[0]:
                self.assertLess(total, 0.98 * self.cost(every[0], *where)[1])
            found.update(best.values())
        self.assertGreater(len(found), 4, found)

    def test_classes_have_their_own_numbers(self):
        shapes = (32768, 8192), (2048, 32768), (2047, 32768)
        # Ranks of a smaller group have many.
        others = shards_of([shapes[0]] * 64, 32)
        # Two owners for each matrix of more work than a rank has on average.
        for counts, number, expected in (
            ((2, 4, 4), "auto", (16, 1, 1)),
            ((2, 4, 4), 2, (2, 2, 1)),
            ((9, 4, 4), 2, (2, 1, 1)),
            ((64, 0, 0), 2, (1,)),
        ):
            every = [s for s, n in zip(shapes, counts) for _ in range(n)]
            blocks = divided(shards_of(every, 64) + others, number, 8)
            found = Counter(
                (layout.full_shape, len(layout.holders)) for layout in blocks
            )
            totals = [n * k for n, k in zip(counts, expected)]
            self.assertEqual([found[s, 64] for s in shapes[: len(totals)]], totals)
            self.assertEqual(found[shapes[0], 32], 64)
        # A frozen matrix takes no time, and no rank.
        one, other = shards_of([shapes[0]] * 2, 2)
        with mock.patch.object(division, "FLOPS", 1):
            found = divided([one, replace(other, frozen=True)], "auto", 2)
            found = [layout.key.block[1] for layout in found]
        self.assertEqual(found, [2, 2, 1])

    def test_blocks_of_a_matrix_share_a_bucket(self):
        """Classes have different numbers of owners, so blocks stood at different places of the queues."""
        draw = random.Random(5)
        for _ in range(150):
            sides = [(draw.randint(1, 6), draw.randint(1, 2)) for _ in range(30)]
            shapes = [(8 * a, 8 * b) for a, b in sides[: draw.randint(2, 30)]]
            layouts, blocks = shards_of(shapes, 4), []
            counts = {shape: draw.choice((1, 2, 3, 4)) for shape in shapes}
            for layout in layouts:
                blocks += divide(layout, counts[layout.shape])
            options = {"one_owner_at_a_time": draw.choice((False, True))}
            options["slots"] = draw.choice((2, 3, 4))
            with mock.patch.object(buckets, "BUCKET_BYTES", draw.choice((64, 256))):
                found = scheduled(blocks, **options)
            for bucket in found.buckets:
                for m in bucket.matrices:
                    number, count = blocks[m].key.block
                    team = range(m - number, m - number + count)
                    self.assertLessEqual({*team}, {*bucket.matrices})
            every = sorted(m for bucket in found.buckets for m in bucket.matrices)
            self.assertEqual(every, [*range(len(blocks))])

    def test_replicas(self):
        layouts = shards_of([(32768, 8192)], 4, replicas=16)
        self.assertEqual(len(divided(layouts, "auto", 8)), 4)

    def test_algorithms(self):
        """Newton-Schulz that takes less time is worth fewer owners."""
        shape, names = (16384, 4096), ("quintic", "symmetric", "gram")
        units = [newton_schulz_flops(shape, algorithm=n) / 2 / 4096**3 for n in names]
        # On accelerators, "symmetric" has the default's products.
        self.assertEqual(units, [5 * (2 * 4 + 1), 5 * (2 * 4 + 1), 4 * 4 + 14])
        for other in ((8192, 4096), (1024, 8192)):
            default, gram = (newton_schulz_flops(other, n) for n in ("quintic", "gram"))
            self.assertEqual(gram, default, f"{other}")
        (layout,) = shards_of([shape], 8)
        self.assertEqual(Class.of(layout, "gram").algorithm, "gram")

    def test_matrices_without_elements(self):
        """They were a division by zero."""
        best = division.best_division({Class((8, 0)): 3, Class((8, 8)): 1}, range(2), 2)
        self.assertEqual(best[0], {Class((8, 0)): 1, Class((8, 8)): 1})

    def test_tiny_matrices_beside_a_large_one(self):
        """The large one takes as long as a million billion of them, whose ends took as much memory."""
        large, tiny = Class((65536, 65536)), Class((1, 1))
        best, seconds = division.best_division({large: 1, tiny: 2}, range(2), 1)
        self.assertEqual(best, {large: 1, tiny: 1})
        flops = newton_schulz_flops(large.shape)
        self.assertEqual(seconds, flops / division.FLOPS, atol=0, rtol=1e-6)


class TestMuonSchedule(TestCase):
    def test_no_rank_has_thousands_of_peers(self):
        for world, node in ((512, 1), (1024, 8), (4096, 16), (16384, 64)):
            layouts = shards_of([(world, 8)] * 64, world)
            for bucket in scheduled(layouts, ranks_per_node=8).buckets:
                self.assertEqual(bucket.node_size, node)
                if node > 1:
                    ranks, rail = bucket.node_and_rail(world - 1)
                    self.assertEqual(ranks, tuple(range(world - node, world)))
                    self.assertEqual(rail, tuple(range(node - 1, world, node)))
                    self.assertLessEqual(len(ranks) + len(rail), 514)

    def test_contributions_are_larger(self):
        """They are summed before they are rounded. Few replicas relay what is much for a bucket."""
        layouts = shards_of([(8, 8)] * 64, 1, replicas=2)
        terms = replace(layouts[0].shards, contributions=(0, 1))
        summed = [replace(layout, shards=terms) for layout in layouts]
        with mock.patch.object(buckets, "BUCKET_BYTES", 256):
            once, more = (scheduled(some).buckets for some in (layouts, summed))
        self.assertGreater(len(more), len(once))
        self.assertEqual({bucket.relayed for bucket in once}, {True})

    def test_nodes_of_several_kinds(self):
        """A group has nodes where equally many of its ranks stand together."""
        for ranks, peers, size in (
            (range(12), 11, 4),
            # One rank of each node: as many together as leaves the fewest peers.
            (range(0, 36, 4), 8, 3),
            # Four of one node, two of another.
            (range(6), 5, 2),
            (range(7), 6, 1),
            (range(12), 3, 1),
        ):
            with mock.patch.object(buckets, "MAX_PEERS", 4):
                found = buckets._node_size(tuple(ranks), peers, 4)
            self.assertEqual(found, size, f"{ranks}")

    def test_every_owner_works_in_every_bucket(self):
        """Buckets, run sequentially, take hardly longer than the busiest owner's own work.

        A matrix of 28672 x 8192 is above the bound of a bucket. When it had a bucket of its own, the
        buckets of Llama 3 70B took 51 times as long on 64 ranks. One of 18432 x 7168 takes as long as 33
        experts, of which 13 fitted next to it: DeepSeek-V3's took 1.45 times as long on 1,024.
        """
        self.assertShort(shards_of(LLAMA * 80, 64), 1.1)
        self.assertShort(shards_of(LLAMA * 80, 256, 64), 1.1)
        # One pass over the owners does not pack DeepSeek-V3's experts next to its large matrices quite
        # as tightly (1.107 on 1,024 ranks). An eighth of the experts, over an eighth of 1,024 ranks.
        self.assertShort(shards_of(DEEPSEEK, 128), 1.2)

    def assertShort(self, layouts, most):
        schedule, largest = scheduled(layouts), max(layout.numel for layout in layouts)
        one_by_one, busy, slots = 0, Counter(), [0, 0, 0]
        for at, bucket in enumerate(schedule.buckets):
            work, gathered = Counter(), Counter()
            for m in bucket.matrices:
                layout, owner = layouts[m], schedule.owners[m]
                work[owner] += newton_schulz_flops(layout.shape)
                gathered[owner] += layout.numel
            one_by_one += max(work.values())
            busy.update(work)
            slots[at % 3] = max(slots[at % 3], *gathered.values())
        self.assertLessEqual(one_by_one, most * max(busy.values()))
        # No more than the bounds of three slots, plus a largest matrix for each.
        self.assertLessEqual(sum(slots), 3 * (BUCKET_BYTES // 2 + largest))


class TestMuonDryRun(TestCase):
    def test_any_rank_steps_on_a_cpu(self):
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())
        # DTensor confuses meshes of equal shape, so each world has a shape of its own.
        for shape, rank in (((4,), 0), ((1024,), 5), ((64, 16), 1023)):
            world, store = math.prod(shape), FakeStore()
            dist.init_process_group("fake", store=store, rank=rank, world_size=world)
            mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
            placements = [(*[R] * (len(shape) - 1), S0)]
            placed = specs(mesh, placements, [(32, 8), (16, 48), (7, 5)] * 3)
            values = [
                [place(common_muon.full(i, s.shape), s) for s in placed]
                for i in range(3)
            ]
            params, *grads = [*map(nn.Parameter, values[0])], *values[1:]
            muon = Muon(params, distributed_config="auto")
            for given in grads:
                for param, grad in zip(params, given):
                    param.grad = grad
                muon.step()
            lines = muon.describe().splitlines()
            self.assertIn("busiest", "".join(lines))
            # A user can read it.
            self.assertLess(len(lines), 40)
            self.assertLess(max(map(len, lines)), 250)
            if world > 4:
                self.assertIn("other ranks are not shown", "".join(lines))
            dist.destroy_process_group()


if __name__ == "__main__":
    run_tests()
