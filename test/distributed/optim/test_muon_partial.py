# Owner(s): ["oncall: distributed"]
"""DTensor parameters that are Partial: ranks hold contributions, and the matrix is their sum."""

import itertools

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config
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
    local,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    piece_of,
    place,
    R,
    S0,
    S1,
    Spec,
)


P = Partial()
SHAPES = [(8, 8), (7, 5), (3, 9), (16, 4)]


def contribution(seed, shape, coordinate):
    """Small integers. Their sum is the same in any order."""
    return full(seed + 77 * sum(coordinate), shape).mul_(4).round_()


class PartialParity(ParityAssertions):
    """To be put before a TestCase whose methods run on every rank."""

    def check(
        self,
        mesh,
        placements,
        terms=contribution,
        summed=True,
        wrapped=False,
        **options,
    ):
        """One step against one process that has the sums of the gradients.

        The contribution at the owner's coordinate gets the update. The others only decay. With ``summed``
        False, the gradients are no contributions, but whole. With ``wrapped``, a function of the user calls
        the factory's.
        """
        # Halves of integers stay exact, and so do their sums.
        options = {"lr": 0.25, "weight_decay": 0.5, "momentum": 0.5, **options}
        partial = [dim for dim, p in enumerate(placements) if p.is_partial()]
        alike = tuple(R if p.is_partial() else p for p in placements)

        def coordinate(rank):
            """Which contribution ``rank`` holds."""
            (where,) = (mesh.mesh == rank).nonzero().tolist()
            return tuple(where[dim] for dim in partial)

        def placed(whole):
            return DTensor.from_local(
                piece_of(whole, Spec(whole.shape, mesh, alike)),
                mesh,
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )

        mine = coordinate(self.rank)
        everywhere = sorted({coordinate(r) for r in mesh.mesh.flatten().tolist()})
        params = [
            torch.nn.Parameter(placed(terms(i, shape, mine)))
            for i, shape in enumerate(SHAPES)
        ]
        for i, param in enumerate(params, 100):
            param.grad = placed(terms(i, param.shape, mine))
            if not summed:
                param.grad = place(
                    terms(i, param.shape, ()), Spec(param.shape, mesh, [R])
                )
        config = create_dtensor_config()
        given = config.redistribute_fn
        if wrapped:
            config.redistribute_fn = lambda *args: given(*args)
        optimizer = Muon(params, distributed_config=config, **options)
        with NewtonSchulzCalls() as calls, Collectives() as seen:
            optimizer.step()
        problems = []
        for i, param in enumerate(params):
            owner = coordinate(optimizer.matrix_owners[i, 0])
            single = torch.nn.Parameter(terms(i, param.shape, owner))
            places = everywhere if summed else [()]
            single.grad = sum(terms(100 + i, param.shape, each) for each in places)
            its = Muon([single], **options)
            its.step()
            expected = single.detach()
            if mine != owner:
                expected = terms(i, param.shape, mine) * (1 - 0.25 * 0.5)
            expected = piece_of(expected, Spec(param.shape, mesh, alike))
            if not torch.equal(local(param.detach()), expected):
                problems.append(f"parameter {i}")
            momentum = optimizer.state[param]["momentum_buffer"]
            total = its.state[single]["momentum_buffer"]
            if momentum.placements != placements:
                problems.append(f"momentum {i} is {momentum.placements}")
            # DTensor adds up in an order of its own.
            if terms is contribution and not torch.equal(momentum.full_tensor(), total):
                problems.append(f"momentum {i}")
        self.assertEverywhere(problems, f"{mesh} {placements}")
        # Each matrix once.
        total = sum(everyone(len(calls.shapes)))
        self.assertEqual(total, len(SHAPES) * self.world_size // mesh.size())
        if wrapped:
            return
        # Contributions are not rounded before they are added.
        sizes = [c.itemsize for c in seen.calls if c.name == "alltoall_base_"]
        self.assertEqual(sizes.count(4), sizes.count(2))
        self.assertEqual(set(sizes), {2, 4})


@requires_gloo()
class TestMuonPartial(GlooOnCPU, PartialParity, MultiProcContinuousTest):
    world_size = 4

    def test_partial_parameters(self):
        grid = grid_of(2, 2)
        for mesh, placements in [
            (mesh_of(4), (P,)),
            (mesh_of(2), (P,)),
            *((grid, pair) for pair in [(P, S0), (S1, P), (P, R), (R, P), (P, P)]),
        ]:
            for nesterov in (True, False):
                self.check(mesh, placements, nesterov=nesterov)

    def test_owner_with_two_regions(self):
        """Each region of the owner's own contribution is added to the others once."""
        self.check(grid_of(2, 2), (P, _StridedShard(0, split_factor=2)))

    def test_gradients_that_need_no_sum(self):
        # Backward may give a Partial parameter a Replicate gradient. The sum counts it once.
        self.check(mesh_of(4), (P,), summed=False)

    def test_wrapped_functions(self):
        self.check(grid_of(2, 2), (P, S0), wrapped=True)

    def test_contributions_are_added_in_the_order_of_the_group(self):
        def terms(seed, shape, coordinate):
            # The second and third term cancel out, and absorb most of the first one.
            great = full(seed + 50, shape) * 2**24
            return [full(seed, shape), great, -great, full(seed + 9, shape)][
                coordinate[0]
            ]

        self.check(mesh_of(4), (P,), terms, momentum=0.0, nesterov=False)


@requires_gloo()
class TestMuonPartialEightRanks(GlooOnCPU, PartialParity, MultiProcContinuousTest):
    world_size = 8

    def test_each_kind_of_placement_at_once(self):
        for placements in itertools.permutations((P, S0, R)):
            self.check(grid_of(2, 2, 2), placements)


if __name__ == "__main__":
    run_tests()
