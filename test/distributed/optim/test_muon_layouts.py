# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, and the functions of a config, called and replaced."""

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
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
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
    specs,
    Twins,
)


P = Partial()


# One rank of two owns two of a shape.
TERMS = [(8, 8), (7, 5), (3, 9), (16, 4), (8, 8), (8, 8)]


def contribution(seed, shape, coordinate):
    """Small integers. Their sum is the same in any order."""
    return full(seed + 77 * sum(coordinate), shape).mul_(4).round_()


class TestMuonDTensorLayouts(OnCPU):
    def test_autocast_does_not_reach_the_iteration(self):
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]))
        twins.set_gradients()
        twins.single.step()
        with torch.autocast("cpu", dtype=torch.float16):
            twins.optimizer.step()
        self.assertParity(twins)

    def test_prefetch_and_async_change_nothing(self):
        layout = specs(mesh_of(4), [(S0,), (R,)])
        layout += specs(grid_of(2, 2), [(S0, S1), (R, S0)])
        for flags in ((True, 0), (False, 1), (False, 0), (True, 5)):
            with self.subTest(flags=flags):
                twins = Twins(layout, create_dtensor_config(*flags), nesterov=False)
                self.assertTrainsAlike(twins, 2, f"{flags}")

    def test_plain_tensors_beside_dtensors(self):
        placed = specs(mesh_of(4), [(S0,)], [(8, 8), (3, 4)])
        placed.insert(1, Spec((6, 5), None, None))
        placed.append(Spec((2, 9), None, None, torch.bfloat16))
        twins = Twins(placed)
        self.assertTrainsAlike(twins)
        self.assertLessEqual({1, 3}, set(twins.optimizer.assignments[self.rank]))

    def test_several_meshes_in_one_optimizer(self):
        grid = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (16, 12)]
        lines = [(mesh_of(2), S0), (mesh_of(2), R), (mesh_of(4), S1), (mesh_of(4), R)]
        lines += [(mesh_of(1), S0), (grid["a"], S0), (grid["b"], S1)]
        placed = specs(grid, [(S1, S0)], shapes)
        for mesh, placement in lines:
            placed += specs(mesh, [(placement,)], shapes)
        twins = Twins(placed, create_dtensor_config(prefetch_count=2))
        self.assertTrainsAlike(twins)


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
        total = 0
        for coordinate in coordinates:
            total = total + self.terms(100 + index, TERMS[index], coordinate)
        return total


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

        The contribution at the owner's coordinate gets the update. The others only decay. With ``summed``
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
        with common_config.NewtonSchulzCalls() as calls, Recorder() as seen:
            optimizer.step()
        problems = []
        for index, param in enumerate(params):
            owner = matrices.coordinate_of(optimizer.matrix_owners[index, 0])
            single = nn.Parameter(terms(index, param.shape, owner))
            single.grad = matrices.whole_gradient(index, summed)
            alone = Muon([single], **options)
            alone.step()
            expected = single.detach()
            if mine != owner:
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
        if not wrapped:
            self.check_sizes(seen)

    def has_sum(self, param, momentum, total):
        """Whether a buffer, and what becomes of a whole one, has the sum ``total``."""
        # Some versions cannot bring a strided shard of a sum to full_tensor().
        config = create_dtensor_config()
        for buffer in (momentum, fitting_momentum(param, total)):
            whole = config.gather_fn(buffer, 0, config.state)
            if not torch.equal(whole, total):
                return False
        return True

    def check_sizes(self, seen):
        """Contributions are not rounded before they are added."""
        sizes = []
        for call in seen.calls:
            if call.name == "all_to_all_single":
                sizes.append(call.itemsize)
        self.assertEqual(sizes.count(4), sizes.count(2))
        self.assertEqual(set(sizes), {2, 4})

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

    def test_contributions_are_added_in_the_order_of_the_group(self):
        def terms(seed, shape, coordinate):
            # The second and third term cancel out, and absorb most of the first one.
            great = full(seed + 50, shape) * 2**24
            each = full(seed, shape), great, -great, full(seed + 9, shape)
            return each[coordinate[0]]

        self.check(mesh_of(4), (P,), terms, momentum=0.0, nesterov=False)


if __name__ == "__main__":
    run_tests()
