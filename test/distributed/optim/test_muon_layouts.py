# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, dtype, group and hyperparameter."""

import itertools

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    OnCPU,
    grid_of,
    local,
    mesh_of,
    piece_of,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
    wrap_functions,
)
from torch.testing._internal.distributed._muon.common_rules import Recorder


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
        placed = [
            spec
            for mesh, *placements in (
                (mesh_of(2), (S0,), (R,)),
                (mesh_of(4), (S1,), (R,)),
                (grid, (S1, S0)),
                (grid["a"], (S0,)),
                (grid["b"], (S1,)),
                (mesh_of(1), (S0,)),
            )
            for spec in specs(mesh, placements, shapes)
        ]
        twins = Twins(placed, create_dtensor_config(prefetch_count=2))
        self.assertTrainsAlike(twins)


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
            for i, shape in enumerate(TERMS)
        ]
        for i, param in enumerate(params, 100):
            param.grad = placed(terms(i, param.shape, mine))
            if not summed:
                whole = Spec(param.shape, mesh, [R] * mesh.ndim)
                param.grad = place(terms(i, param.shape, ()), whole)
        config = create_dtensor_config()
        if wrapped:
            wrap_functions(config, "redistribute_fn")
        optimizer = Muon(params, distributed_config=config, **options)
        with NewtonSchulzCalls() as calls, Recorder() as seen:
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
        self.assertEqual(total, len(TERMS) * self.world_size // mesh.size())
        if wrapped:
            return
        # Contributions are not rounded before they are added.
        sizes = [c.itemsize for c in seen.calls if c.name == "all_to_all_single"]
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
            self.check(mesh, placements, **options)

    def test_each_kind_of_placement_at_once(self):
        for single, placements in itertools.product(
            (S0, R), itertools.permutations((P, S0, R))
        ):
            sizes = [1 if placement is single else 2 for placement in placements]
            self.check(grid_of(*sizes), placements)

    def test_contributions_are_added_in_the_order_of_the_group(self):
        def terms(seed, shape, coordinate):
            # The second and third term cancel out, and absorb most of the first one.
            great = full(seed + 50, shape) * 2**24
            return [full(seed, shape), great, -great, full(seed + 9, shape)][
                coordinate[0]
            ]

        self.check(mesh_of(4), (P,), terms, momentum=0.0, nesterov=False)


if __name__ == "__main__":
    run_tests()
