# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, and the functions of a config, called and replaced."""

import itertools
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import fitting_momentum
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_groups import Strategy
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


class TestMuonFunctions(OnCPU):
    def placed(self):
        placed = []
        for mesh in (grid_of(2, 2), mesh_of(2), mesh_of(1)):
            placed += specs(mesh, common_muon.all_placements(mesh), [(7, 5)])
        strided = _StridedShard(0, split_factor=2)
        placed.append(Spec((8, 5), grid_of(2, 2), (strided, S0)))
        return placed

    def check_round_trip(self, config, tensor, spec):
        whole = config.gather_fn(tensor, 3, config.state)
        self.assertNotIsInstance(whole, DTensor)
        self.assertEqual(tuple(whole.shape), spec.shape)
        self.assertTrue(torch.equal(local(place(whole, spec)), local(tensor)))
        # Each rank cuts its own tensor, whatever the other ranks have.
        given = whole + self.rank
        with Recorder() as seen:
            mine = config.redistribute_fn(given, 0, config.state)
            again = config.redistribute_fn(whole, 3, config.state)
        self.assertEqual(seen.names, [])
        self.assertTrue(torch.equal(local(mine), piece_of(given, spec)))
        self.assertEqual(common_muon.placed(again), common_muon.placed(tensor))
        self.assertTrue(torch.equal(local(again), local(tensor)))

    def check_round_trips(self, twins, unused):
        """An unused config, and one before and after a step."""
        for config in (unused, twins.config, twins.config):
            with self.subTest(config=config):
                for index, (param, spec) in enumerate(zip(twins.params, twins.specs)):
                    config.state["current_param_idx"] = index
                    with self.everywhere(f"{spec}"):
                        self.check_round_trip(config, param.detach(), spec)
                del config.state["current_param_idx"]
                twins.step()
                self.assertParity(twins)

    def test_gather_then_redistribute_is_the_identity(self):
        dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
        placed = [spec._replace(dtype=next(dtypes)) for spec in self.placed()]
        self.check_round_trips(Twins(placed), create_dtensor_config())

    def test_gather_then_redistribute_over_process_groups(self):
        for *kinds, how in (
            ("fsdp", "tp", "chunk"),
            ("ddp", "fsdp", "balanced"),
            ("tp", "cp", "last"),
        ):
            with self.subTest(how=how, kinds=kinds):
                strategy = Strategy(grid_of(2, 2), *kinds)
                twins = strategy.twins(common_muon.SHAPES[1:6:2], how)
                dims = {
                    index: d for index, d in enumerate(strategy.dims) if d is not None
                }
                self.check_round_trips(twins, strategy.config(tp_dim_per_param=dims))

    def test_gather_of_another_tensor(self):
        """Only some ranks' pieces have another shape than before."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        for rows in (7, 8, 6, 8):
            with self.subTest(rows=rows):
                full = torch.arange(3.0 * rows).view(rows, 3).neg()
                piece = full.tensor_split(4)[self.rank]
                if rows == 6:
                    config.assign_fn([piece], config.state)
                whole = config.gather_fn(piece, 0, config.state)
                with self.everywhere(f"{rows} rows"):
                    self.assertTrue(torch.equal(whole, full))
                    # The first zero is negative.
                    self.assertTrue(torch.equal(whole.signbit(), full.signbit()))
        # The first reader needs this rank's matrices of a stack only.
        stack, other = torch.arange(60.0).view(5, 4, 3), create_dtensor_config()
        piece = place(stack, Spec((5, 4, 3), mesh_of(4), (S0,)))
        other.assign_fn([piece], other.state)
        whole = other.gather_fn(piece, 0, other.state)
        with self.everywhere():
            self.assertTrue(torch.equal(whole, stack))
        # These were silently cut to this rank's shape, and to this rank's matrices.
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, r"of shape \(8, 3\), not \(3, 8\)"):
                config.redistribute_fn(full.T, 0, config.state)
            with self.assertRaisesRegex(ValueError, "other matrices of a stack"):
                config.gather_fn(torch.ones(2, 3, 4), 0, config.state)

    def test_each_rank_goes_by_its_own_gradient(self):
        """Muon makes no collective of its own here, so it cannot compare the ranks."""
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        config = create_dtensor_config()
        common_muon.wrap_functions(config, "gather_fn", "redistribute_fn")
        twins = Twins(placed, config)
        twins.set_gradients()
        if self.rank == 2:
            twins.params[1].grad = None
        before = [local(p.detach()).clone() for p in twins.params]
        with Recorder() as seen:
            twins.optimizer.step()
        with self.everywhere():
            self.assertNotIn("all_reduce", seen.names)
            for index, (param, old) in enumerate(zip(twins.params, before)):
                stayed = torch.equal(local(param.detach()), old)
                self.assertEqual(stayed, (self.rank, index) == (2, 1))

    def test_functions_that_return_their_argument(self):
        """Without a broadcast, the update stays with its owner."""

        def sent(update, owner, state):
            dist.broadcast(update, owner)
            return update

        for redistribute in (sent, lambda update, owner, state: update):
            with self.subTest(redistribute=redistribute):
                functions = lambda p, s: {0: [0]}, lambda t, owner, s: t, redistribute
                param = nn.Parameter(torch.ones(4, 4))
                param.grad = torch.eye(4)
                muon = Muon(
                    [param], distributed_config=DistributedConfig(*functions, {})
                )
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    muon.step()
                warned = any("diverge" in str(w.message) for w in caught)
                with self.everywhere():
                    self.assertEqual(warned, redistribute is not sent and self.rank > 0)

    def test_wrapper_that_changes_the_dtype(self):
        """The other ranks read the owner's bits as bfloat16."""
        config = create_dtensor_config()
        inner = config.redistribute_fn

        def redistribute(update, owner, state):
            return inner(update.float() if owner == self.rank else update, owner, state)

        config.redistribute_fn = redistribute
        twins = Twins(specs(mesh_of(4), [(S0,)]), config)
        twins.step()
        self.assertParity(twins)

    def test_owner_that_hands_on_something_else(self):
        """The other rank of each pair waits for the owner until the timeout of their group."""
        pairs = [(0, 1), (2, 3)]
        groups = [dist.new_group(pair, timeout=timedelta(seconds=2)) for pair in pairs]
        mesh = DeviceMesh.from_group(groups[self.rank // 2], "cpu")
        config = create_dtensor_config()
        built = config.redistribute_fn

        def redistribute(full, rank, state):
            if rank == self.rank:
                full = None if rank < 2 else full[:4]
            return built(full, rank, state)

        config.redistribute_fn = redistribute
        twins = Twins([Spec((8, 8), mesh, (S0,))], config)
        twins.set_gradients()
        outcome = self.outcome(twins.optimizer.step)
        (owner,) = [r for r, own in twins.optimizer.assignments.items() if own]
        outcomes = common_muon.everyone(outcome)
        with self.everywhere(f"{outcomes}"):
            self.assertEqual([kind for kind, _ in outcomes], ["RuntimeError"] * 4)
            given = "None" if owner < 2 else r"\(4, 8\)"
            self.assertRegex(outcomes[owner][1], f"redistribute_fn was given {given}")


if __name__ == "__main__":
    run_tests()
