# Owner(s): ["oncall: distributed"]
"""DTensor parameters that are Partial: ranks hold contributions, and the matrix is their sum."""

import itertools

import torch
import torch.distributed as dist
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


class PartialTwins:
    """Partial parameters, and a single process that has the sums of their gradients.

    The contribution at the owner's coordinate gets the update. The single process starts from it. The
    other contributions only decay.
    """

    lr, weight_decay = 0.25, 0.5

    def __init__(self, mesh, placements, config=None, **options):
        self.mesh, self.placements = mesh, placements
        self.partial = [dim for dim, p in enumerate(placements) if p.is_partial()]
        self.mine = self.coordinate(dist.get_rank())
        ranks = mesh.mesh.flatten().tolist()
        self.all = sorted({self.coordinate(rank) for rank in ranks})
        self.params = [
            torch.nn.Parameter(self.placed(i, s)) for i, s in enumerate(SHAPES)
        ]
        # Halves of integers stay exact, and so do their sums.
        given = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": 0.5}
        options = given | options
        config = create_dtensor_config() if config is None else config
        self.optimizer = Muon(self.params, distributed_config=config, **options)
        owners = {i: r for r, own in self.optimizer.assignments.items() for i in own}
        self.updated = [self.coordinate(owners[i]) for i in range(len(SHAPES))]
        self.singles = [
            torch.nn.Parameter(contribution(i, shape, self.updated[i]))
            for i, shape in enumerate(SHAPES)
        ]
        self.single = Muon(self.singles, **options)
        self.steps = 0

    def coordinate(self, rank):
        """Which contribution ``rank`` holds."""
        (where,) = (self.mesh.mesh == rank).nonzero().tolist()
        return tuple(where[dim] for dim in self.partial)

    def shard(self, tensor):
        """This rank's part of ``tensor`` if all contributions are equal."""
        alike = tuple(R if p.is_partial() else p for p in self.placements)
        return piece_of(tensor, Spec(tensor.shape, self.mesh, alike))

    def placed(self, seed, shape):
        return DTensor.from_local(
            self.shard(contribution(seed, shape, self.mine)),
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    def set_gradients(self):
        self.steps += 1
        for i, shape in enumerate(SHAPES):
            seed = 1000 * self.steps + i
            self.params[i].grad = self.placed(seed, shape)
            self.singles[i].grad = sum(contribution(seed, shape, c) for c in self.all)

    def step(self):
        self.set_gradients()
        self.optimizer.step()
        self.single.step()

    def problems(self):
        found = []
        for i, (param, single, shape) in enumerate(
            zip(self.params, self.singles, SHAPES)
        ):
            if self.mine != self.updated[i]:
                decay = (1 - self.lr * self.weight_decay) ** self.steps
                expected = contribution(i, shape, self.mine) * decay
            else:
                expected = single.detach()
            if not torch.equal(local(param.detach()), self.shard(expected)):
                found.append(f"parameter {i}")
            momentum = self.optimizer.state[param]["momentum_buffer"]
            if momentum.placements != self.placements:
                found.append(f"momentum {i} is {momentum.placements}")
            total = self.single.state[single]["momentum_buffer"]
            if not torch.equal(momentum.full_tensor(), total):
                found.append(f"momentum {i}")
        return found


@requires_gloo()
class TestMuonPartial(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def layouts(self):
        grid = grid_of(2, 2)
        pairs = [(P, S0), (S1, P), (P, R), (R, P), (P, P)]
        return [(mesh_of(4), (P,)), (mesh_of(2), (P,))] + [(grid, p) for p in pairs]

    def test_partial_parameters(self):
        for i, (mesh, placements) in enumerate(self.layouts()):
            twins = PartialTwins(mesh, placements, nesterov=i % 2 == 0)
            twins.step()
            twins.set_gradients()
            twins.single.step()
            with NewtonSchulzCalls() as calls, Collectives() as seen:
                twins.optimizer.step()
            self.assertEverywhere(twins.problems(), f"{mesh} {placements}")
            # Each matrix once.
            total = sum(everyone(len(calls.shapes)))
            self.assertEqual(total, len(SHAPES) * 4 // mesh.size())
            # Contributions are not rounded before they are added.
            sizes = [c.itemsize for c in seen.calls if c.name == "alltoall_base_"]
            self.assertEqual(sizes.count(4), sizes.count(2))
            self.assertEqual(set(sizes), {2, 4})

    def test_owner_with_two_regions(self):
        """Each region of the owner's own contribution is added to the others once."""
        strided = _StridedShard(0, split_factor=2)
        twins = PartialTwins(grid_of(2, 2), (P, strided))
        for _ in range(2):
            twins.step()
            self.assertEverywhere(twins.problems())

    def test_gradients_that_are_missing_or_need_no_sum(self):
        # Backward may give a Partial parameter a Replicate gradient. The sum counts it once.
        mesh = mesh_of(4)
        twins = PartialTwins(mesh, (P,))
        for i, shape in enumerate(SHAPES):
            gradient = contribution(i, shape, (9,))
            twins.singles[i].grad = gradient.clone()
            twins.params[i].grad = place(gradient, Spec(shape, mesh, (R,)))
        twins.optimizer.step()
        twins.single.step()
        twins.steps = 1
        self.assertEverywhere(twins.problems())
        before = [local(p.detach()).clone() for p in twins.params]
        twins.optimizer.zero_grad()
        twins.optimizer.step()
        for param, old in zip(twins.params, before):
            self.assertTrue(torch.equal(local(param.detach()), old))

    def test_contributions_are_added_in_the_order_of_the_group(self):
        mesh = mesh_of(4)
        twins = PartialTwins(mesh, (P,), momentum=0.0, nesterov=False)
        for i, shape in enumerate(SHAPES):
            # The second and third term cancel out, and absorb most of the first one.
            great = full(50 + i, shape) * 2**24
            terms = [full(i, shape), great, -great, full(100 + i, shape)]
            mine = terms[dist.get_rank()]
            twins.params[i].grad = DTensor.from_local(mine, mesh, (P,), run_check=False)
            twins.singles[i].grad = terms[0] + terms[1] + terms[2] + terms[3]
        twins.optimizer.step()
        twins.single.step()
        twins.steps = 1
        # DTensor adds up the momentum in a different order.
        wrong = [text for text in twins.problems() if text.startswith("parameter")]
        self.assertEverywhere(wrong)


@requires_gloo()
class TestMuonPartialEightRanks(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 8

    def test_each_kind_of_placement_at_once(self):
        for placements in itertools.permutations((P, S0, R)):
            twins = PartialTwins(grid_of(2, 2, 2), placements)
            twins.set_gradients()
            twins.single.step()
            with NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            self.assertEverywhere(twins.problems(), f"{placements}")
            self.assertEqual(sum(everyone(len(calls.shapes))), len(SHAPES))


if __name__ == "__main__":
    run_tests()
