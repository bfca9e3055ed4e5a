# Owner(s): ["oncall: distributed"]
"""DTensors whose ranks hold contributions to a sum (Partial)."""

import itertools

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import fitting_momentum
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    grid_of,
    local,
    mesh_of,
    OnCPU,
    piece_of,
    place,
    R,
    S0,
    S1,
    Spec,
)


P = Partial()


# One rank of two owns two of a shape.
TERMS = [(8, 8), (7, 5), (3, 9), (16, 4), (8, 8), (8, 8)]


def contribution(seed, shape, coordinate):
    """Small integers. Their sum is the same in any order."""
    return full(seed + 77 * sum(coordinate), shape).mul_(4).round_()


class SummedMatrices:
    """Matrices of which each rank holds a contribution, on a mesh with some Partial placements."""

    def __init__(self, mesh, placements, terms):
        self.mesh, self.placements, self.terms = mesh, placements, terms
        self.partial_dims = []
        # As ``placements``, but each rank holds the values themselves.
        self.alike = []
        for dim, placement in enumerate(placements):
            if placement.is_partial():
                self.partial_dims.append(dim)
                self.alike.append(R)
            else:
                self.alike.append(placement)

    def coordinate_of(self, rank):
        """Which of the contributions a rank has a part of."""
        (where,) = (self.mesh.mesh == rank).nonzero().tolist()
        return tuple(where[dim] for dim in self.partial_dims)

    def coordinates(self):
        ranks = self.mesh.mesh.flatten().tolist()
        return sorted({self.coordinate_of(rank) for rank in ranks})

    def piece(self, whole):
        """This rank's part of a contribution."""
        return piece_of(whole, Spec(whole.shape, self.mesh, tuple(self.alike)))

    def place(self, whole):
        """A DTensor to which this rank contributes ``whole``."""
        return DTensor.from_local(
            self.piece(whole),
            self.mesh,
            self.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def gradient(self, index, coordinate, summed=True):
        """That of a rank at ``coordinate``: a contribution, or without ``summed`` all of it."""
        shape = TERMS[index]
        if summed:
            return self.place(self.terms(100 + index, shape, coordinate))
        everywhere = Spec(shape, self.mesh, [R] * self.mesh.ndim)
        return place(self.terms(100 + index, shape, ()), everywhere)

    def whole_gradient(self, index, summed=True):
        coordinates = self.coordinates() if summed else [()]
        total = torch.zeros(TERMS[index], dtype=torch.float64)
        for coordinate in coordinates:
            total += self.terms(100 + index, TERMS[index], coordinate)
        return total.float()


class TestMuonPartial(OnCPU):
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

        The first contribution gets the update. The others only decay. With ``summed``
        False, the gradients are no contributions, but whole. With ``wrapped``, a function of the user calls
        the factory's.
        """
        # Halves of integers stay exact, and so do their sums.
        options = {"lr": 0.25, "weight_decay": 0.5, "momentum": 0.5, **options}
        matrices = SummedMatrices(mesh, placements, terms)
        mine = matrices.coordinate_of(self.rank)
        params = []
        for index, shape in enumerate(TERMS):
            param = nn.Parameter(matrices.place(terms(index, shape, mine)))
            param.grad = matrices.gradient(index, mine, summed)
            params.append(param)
        # Contributions are no replicas, whatever the group.
        ddp = None if mesh.size() == 4 else grid_of(2, 2).get_group("a")
        config = create_auto_config(ddp_process_group=ddp)
        if wrapped:
            common_muon.wrap_functions(config, "redistribute_fn")
        optimizer = Muon(params, distributed_config=config, **options)
        with common_config.NewtonSchulzCalls() as calls:
            optimizer.step()
        problems = []
        for index, param in enumerate(params):
            first, *_ = matrices.coordinates()
            single = nn.Parameter(terms(index, param.shape, first))
            single.grad = matrices.whole_gradient(index, summed)
            alone = Muon([single], **options)
            alone.step()
            expected = single.detach()
            if mine != first:
                expected = terms(index, param.shape, mine) * (1 - 0.25 * 0.5)
            if not torch.equal(local(param.detach()), matrices.piece(expected)):
                problems.append(f"parameter {index}")
            momentum = optimizer.state[param]["momentum_buffer"]
            total = alone.state[single]["momentum_buffer"]
            if momentum.placements != placements:
                problems.append(f"momentum {index} is {momentum.placements}")
            # Sums of other terms depend on the order.
            if terms is contribution and not self.has_sum(param, momentum, total):
                problems.append(f"momentum {index}")
        self.assertEverywhere(problems, f"{mesh} {placements}")
        # Each matrix once.
        counts = common_muon.everyone(len(calls.shapes))
        meshes = self.world_size // mesh.size()
        self.assertEqual(sum(counts), len(TERMS) * meshes)

    def has_sum(self, param, momentum, total):
        """Whether a buffer, and what becomes of a whole one, has the sum ``total``."""
        # Some versions cannot bring a strided shard of a sum to full_tensor().
        config = create_dtensor_config()
        for buffer in (momentum, fitting_momentum(param, total)):
            whole = config.gather_fn(buffer, 0, config.state)
            if not torch.equal(whole, total):
                return False
        return True

    def test_partial_parameters(self):
        grid = grid_of(2, 2)
        for mesh, placements, options in (
            (mesh_of(4), (P,), {}),
            (mesh_of(2), (P,), {"nesterov": False}),
            (mesh_of(2), (P,), {"foreach": True}),
            (grid, (P, S0), {"wrapped": True}),
            (grid, (S1, P), {"nesterov": False}),
            (grid, (P, R), {}),
            (grid, (R, P), {"nesterov": False}),
            (grid, (P, P), {}),
            # The owner has two regions. Each is added to those of the others once.
            (grid, (P, _StridedShard(0, split_factor=2)), {}),
            # Backward may give a Partial parameter a Replicate gradient. The sum counts it once.
            (mesh_of(4), (P,), {"summed": False}),
            (grid, (S1, P), {"summed": False}),
        ):
            with self.subTest(mesh=mesh, placements=placements):
                self.check(mesh, placements, **options)

    def test_each_kind_of_placement_at_once(self):
        for single, placements in itertools.product(
            (S0, R), itertools.permutations((P, S0, R))
        ):
            with self.subTest(placements=placements):
                sizes = [1 if placement is single else 2 for placement in placements]
                self.check(grid_of(*sizes), placements)

    def test_the_order_of_contributions_does_not_count(self):
        def terms(seed, shape, coordinate):
            # The second and third term cancel out, and absorb most of the first one.
            great = full(seed + 50, shape) * 2**24
            each = full(seed, shape), great, -great, full(seed + 9, shape)
            return each[coordinate[0]]

        self.check(mesh_of(4), (P,), terms, momentum=0.0, nesterov=False)


if __name__ == "__main__":
    run_tests()
