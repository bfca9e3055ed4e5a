# Owner(s): ["oncall: distributed"]
"""Owners and buckets of arbitrary matrices, against the best ones or a greedy choice by hand."""

import itertools
from collections import Counter

import torch
from torch.optim._muon_engine.layouts import Key, Layout, Shards
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, flops_of
from torch.optim._newton_schulz import NS_DTYPE
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.fuzz_settings import fuzz


from hypothesis import given, strategies as st


# Of matrices that differ in their work.
sizes = st.sampled_from((1, 3, 8, 17, 64, 100))
shapes = st.tuples(sizes, sizes)
# Groups within each other, and beside each other.
GROUPS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (4, 5), (0, 1), (2, 3), (1, 2)]


def layout(number, shape, group):
    return Layout(Key(number), shape, torch.float32, Shards(group, ((),) * len(group)))


def busiest(matrices, flops, owners):
    loads = Counter()
    for matrix in matrices:
        loads[owners[matrix]] += flops[matrix]
    return max(loads.values(), default=0)


class TestMuonScheduleFuzz(TestCase):
    @fuzz(100)
    @given(
        st.lists(st.tuples(shapes, st.sampled_from(GROUPS)), min_size=1, max_size=12)
    )
    def test_owners_are_the_least_busy(self, drawn):
        """The heaviest matrix first, to a rank that has least work of this group and of those around it."""
        layouts = [layout(i, *each) for i, each in enumerate(drawn)]
        flops, owners = list(map(flops_of, layouts)), assign_owners(layouts)
        given_to = Counter()
        for group in sorted({g for _, g in drawn}, key=lambda g: (-len(g), g)):
            mine = [i for i, one in enumerate(layouts) if one.group == group]
            mine.sort(key=flops.__getitem__, reverse=True)
            for work_of_each in dict.fromkeys(flops[i] for i in mine):
                left = Counter(owners[i] for i in mine if flops[i] == work_of_each)
                for _ in range(left.total()):
                    load = {
                        rank: sum(
                            work
                            for (wide, owner), work in given_to.items()
                            if owner == rank and {*group} <= {*wide}
                        )
                        for rank in group
                    }
                    free = min(left.elements(), key=load.__getitem__)
                    self.assertEqual(load[free], min(load.values()))
                    left[free] -= 1
                    given_to[group, free] += work_of_each
        # At most a third busier than the best, in a single group.
        if len({g for _, g in drawn}) == 1 and len(layouts) < 6:
            group, every = layouts[0].group, range(len(layouts))
            choices = itertools.product(group, repeat=len(layouts))
            best = min(busiest(every, flops, choice) for choice in choices)
            self.assertLessEqual(busiest(every, flops, owners), best * 4 / 3)

    @fuzz(60)
    @given(st.lists(st.tuples(st.integers(0, 2), shapes), min_size=1, max_size=6))
    def test_buckets_are_nearly_the_best(self, drawn):
        """As many are as quick as any distribution of the matrices over them, or hardly slower."""
        owners = [owner for owner, _ in drawn]
        layouts = [layout(i, shape, (0, 1, 2)) for i, (_, shape) in enumerate(drawn)]
        flops = list(map(flops_of, layouts))

        def stretched(parts):
            """How long buckets take, run sequentially: each as long as its busiest owner."""
            return sum(busiest(part, flops, owners) for part in parts)

        parts = [b.matrices for b in make_schedule(layouts, owners, NS_DTYPE).buckets]
        self.assertEqual(sorted(sum(parts, ())), [*range(len(layouts))])
        self.assertLessEqual(len(parts), max(Counter(owners).values()))
        places = itertools.product(range(len(parts)), repeat=len(layouts))
        best = min(
            stretched([[m for m, at in enumerate(p) if at == k] for k in {*p}])
            for p in places
            if len({*p}) == len(parts)
        )
        self.assertLessEqual(stretched(parts), buckets.MAX_STRETCH * best)


if __name__ == "__main__":
    run_tests()
