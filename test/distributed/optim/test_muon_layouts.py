# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, and the functions of a config, called and replaced.

Parameters that are not one matrix with one owner: stacks, fused and flattened weights, divided matrices.
"""

import contextlib
import itertools
import math
import os
import warnings
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import fitting_momentum
from torch.optim._muon_engine.runtime import divided
from torch.optim._muon_engine.schedule import buckets, division
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
    partition_named_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.common_config import COEFFICIENTS, exact
from torch.testing._internal.distributed._muon.common_modules import Run, wrap
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
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder


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
        lines = [(mesh_of(2), S0), (mesh_of(2), R), (mesh_of(4), S1), (mesh_of(4), R)]
        lines += [(mesh_of(1), S0), (grid["a"], S0), (grid["b"], S1)]
        placed = specs(grid, [(S1, S0)], shapes)
        for mesh, placement in lines:
            placed += specs(mesh, [(placement,)], shapes)
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
            (where,) = (mesh.mesh == rank).nonzero().tolist()
            return tuple(where[dim] for dim in partial)

        def placed(whole):
            piece = piece_of(whole, Spec(whole.shape, mesh, alike))
            like = {"shape": whole.shape, "stride": whole.stride()}
            return DTensor.from_local(piece, mesh, placements, run_check=False, **like)

        mine = coordinate(self.rank)
        everywhere = sorted({coordinate(r) for r in mesh.mesh.flatten().tolist()})
        values = [placed(terms(i, shape, mine)) for i, shape in enumerate(TERMS)]
        params = list(map(torch.nn.Parameter, values))
        for i, param in enumerate(params, 100):
            param.grad = placed(terms(i, param.shape, mine))
            if not summed:
                whole = Spec(param.shape, mesh, [R] * mesh.ndim)
                param.grad = place(terms(i, param.shape, ()), whole)
        # Contributions are no replicas, whatever the group.
        ddp = None if mesh.size() == 4 else grid_of(2, 2).get_group("a")
        config = create_auto_config(ddp_process_group=ddp)
        if wrapped:
            common_muon.wrap_functions(config, "redistribute_fn")
        optimizer = Muon(params, distributed_config=config, **options)
        with common_config.NewtonSchulzCalls() as calls, Recorder() as seen:
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
            # Some versions cannot bring a strided shard of a sum to full_tensor().
            config = create_dtensor_config()
            for buffer in (momentum, fitting_momentum(param, total)):
                whole = config.gather_fn(buffer, 0, config.state)
                if terms is contribution and not torch.equal(whole, total):
                    problems.append(f"momentum {i}")
        self.assertEverywhere(problems, f"{mesh} {placements}")
        # Each matrix once.
        total = sum(common_muon.everyone(len(calls.shapes)))
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
            each = full(seed, shape), great, -great, full(seed + 9, shape)
            return each[coordinate[0]]

        self.check(mesh_of(4), (P,), terms, momentum=0.0, nesterov=False)


class TestMuonFunctions(OnCPU):
    def placed(self):
        return [
            spec
            for mesh in (grid_of(2, 2), mesh_of(2), mesh_of(1))
            for spec in specs(mesh, common_muon.all_placements(mesh), [(7, 5)])
        ] + [Spec((8, 5), grid_of(2, 2), (_StridedShard(0, split_factor=2), S0))]

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
            for i, (param, spec) in enumerate(zip(twins.params, twins.specs)):
                config.state["current_param_idx"] = i
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
            strategy = common_muon.Strategy(grid_of(2, 2), *kinds)
            twins = strategy.twins(common_muon.SHAPES[1:6:2], how)
            dims = {i: d for i, d in enumerate(strategy.dims) if d is not None}
            self.check_round_trips(twins, strategy.config(tp_dim_per_param=dims))

    def test_gather_of_another_tensor(self):
        """Only some ranks' pieces have another shape than before."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        for rows in (7, 8, 6, 8):
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
            for i, (param, old) in enumerate(zip(twins.params, before)):
                stayed = torch.equal(local(param.detach()), old)
                self.assertEqual(stayed, (self.rank, i) == (2, 1))

    def test_functions_that_return_their_argument(self):
        """Without a broadcast, the update stays with its owner."""

        def sent(update, owner, state):
            dist.broadcast(update, owner)
            return update

        for redistribute in (sent, lambda update, owner, state: update):
            functions = lambda p, s: {0: [0]}, lambda t, owner, s: t, redistribute
            param = nn.Parameter(torch.ones(4, 4))
            param.grad = torch.eye(4)
            muon = Muon([param], distributed_config=DistributedConfig(*functions, {}))
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
        groups = [dist.new_group(p, timeout=timedelta(seconds=2)) for p in pairs]
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


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, 8))

    def forward(self, x):
        return (x @ self.weight).sum(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, bias=False)
        self.experts = Experts()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return self.qkv(self.experts(self.conv(x).relu().mean((2, 3))))


def groups_of(model):
    split = {"split": (12, 7, 5), "lr": 0.2}
    forms = {"conv": {"flatten": True}, "experts": {}, "qkv": split}
    named = [*model.named_parameters()]
    return [
        {"params": [(which, param) for name, param in named if which in name], **form}
        for which, form in forms.items()
    ]


class GroupedAttention(nn.Module):
    """Six heads of queries and two of keys and values, under the names of Llama; and latent attention."""

    head_dim, qk_nope_head_dim, v_head_dim = 4, 3, 5

    def __init__(self):
        super().__init__()
        rows = {"q_proj": 24, "k_proj": 8, "v_proj": 10, "kv_b_proj": 16, "o_proj": 12}
        for seed, (name, size) in enumerate(rows.items()):
            setattr(self, name, nn.Linear(9, size, bias=False))
            getattr(self, name).weight.data = full(seed, (size, 9))


class TestMuonForms(OnCPU):
    def test_batches_with_gaps(self):
        """Matrices without gradients leave gaps, into which the last matrices of a batch move for a while."""
        spec = Spec((8, 6), mesh_of(2), (S0,))
        patterns = (0,), (0, 1, 2), (9,), (1, 3, 5, 7), (), range(1, 10), range(10)
        twins = Twins([spec] * 10, foreach=True)
        twins.step()
        common_muon.as_on_an_accelerator(twins.optimizer)
        # A batch rounds in its own way, so it is taken apart here.
        with common_config.NewtonSchulzCalls() as calls:
            for missing in patterns:
                twins.step(missing)
                self.assertParity(twins, f"missing {[*missing]}")
        with self.everywhere():
            self.assertGreater(len(calls.batches), 0)

    def test_parts_that_follow_each_other_on_an_accelerator(self):
        """Parts of different sizes were joined, and had the learning rate of the first one."""
        for placement, split, scale in itertools.product(
            (R, S0, S1),
            ((128, 32, 32), (128, 64, 32), [16] * 12),
            ("original", "spectral_unclamped"),
        ):
            spec = Spec((sum(split), 24), mesh_of(4), (placement,))
            options = {"foreach": False, "adjust_lr_fn": scale, "lr": 0.1}
            twins = Twins([spec] * 3, groups=[((0, 1, 2), {"split": split})], **options)
            twins.step()
            common_muon.as_on_an_accelerator(twins.optimizer)
            self.assertTrainsAlike(twins, 2, f"{placement} {split} {scale}")

    def test_sums_with_parts_on_an_accelerator(self):
        """A part whose update is received was joined with one that only decays, and lost its update."""
        mesh = grid_of(2, 2)
        for placements in ((R, P), (P, R), (P, S1), (S1, P)):
            sharded = [
                R if placement.is_partial() else placement for placement in placements
            ]
            found = []
            for on_accelerator in (False, True):
                whole = distribute_tensor(
                    full(1, (8, 12)), mesh, sharded, src_data_rank=None
                )
                summed = DTensor.from_local(
                    whole.to_local().clone(),
                    mesh,
                    placements,
                    run_check=False,
                    shape=torch.Size((8, 12)),
                    stride=(12, 1),
                )
                param = nn.Parameter(summed)
                group = {"params": [param], "split": (4, 4)}
                options = {"lr": 0.1, "foreach": False, "distributed_config": "auto"}
                muon = Muon([group], **options)
                # The next optimizer of two matrices has the same owners again.
                Muon([{"params": [nn.Parameter(summed)], "split": (4, 4)}], **options)
                for step in range(3):
                    gradient = full(10 + step, (8, 12))
                    param.grad = distribute_tensor(
                        gradient, mesh, sharded, src_data_rank=None
                    )
                    muon.step()
                    if on_accelerator:
                        common_muon.as_on_an_accelerator(muon)
                found.append(local(param.detach()))
            problems = [] if torch.equal(*found) else [f"{found}"]
            self.assertEverywhere(problems, f"{placements}")

    def test_work_of_the_host_does_not_grow_with_heads(self):
        """Heads that follow each other are copied, blended and applied together."""
        for placement in (S0, S1):
            found = []
            for count in (8, 64):
                split = [128 // count] * count
                twins = Twins(
                    [Spec((128, 16), mesh_of(4), (placement,))] * 3,
                    groups=[((0, 1, 2), {"split": split})],
                    foreach=True,
                )
                common_muon.as_on_an_accelerator(twins.optimizer)
                twins.step()
                bound = twins.optimizer._engine._runner.compute._bound.values()
                entries = copies = 0
                for of_bucket in bound:
                    chunks = [*of_bucket.applied]
                    for preparation in of_bucket.preparations:
                        chunks += preparation.chunks
                    for batch in of_bucket.batches:
                        chunks += [*batch.own, *batch.applied]
                        copies += len(batch.received.targets) + len(
                            batch.results.targets
                        )
                    entries += sum(len(chunk.entries) for chunk in chunks)
                found.append((entries, copies))
            # Buckets may end at other heads.
            few, many = found
            self.assertEverywhere([] if sum(many) <= sum(few) + 24 else [f"{found}"])
            owners = {index: set() for index in range(3)}
            for (index, _), owner in twins.optimizer.matrix_owners.items():
                owners[index].add(owner)
            with self.everywhere(f"{owners}"):
                self.assertEqual({*itertools.chain(*owners.values())}, {0, 1, 2, 3})

    def test_heads_under_fsdp2(self):
        """Shards end in the middle of heads. Each head has the bits of a parameter of its own, with its own scale."""
        for mesh, scale in (
            (mesh_of(2), "match_rms_adamw"),
            (grid_of(2, 2), "spectral_unclamped"),
        ):
            layers = nn.Sequential(GroupedAttention(), GroupedAttention())
            names = [n for n, _ in layers.named_parameters() if "o_proj" not in n]
            heads = {name: [] for name in names}
            for name in names:
                sizes = {"v": [5] * 2, "kv": [3, 5] * 2}
                kind = name.split(".")[1].split("_")[0]
                whole = layers.get_parameter(name).detach().clone()
                for head in whole.split(sizes.get(kind, 4)):
                    heads[name].append(nn.Parameter(head.clone()))
            fully_shard(layers, mesh=mesh)
            splits = split_of(layers, heads=True)
            groups, _ = partition_named_parameters(layers, split=splits)
            options = {"lr": 0.1, "adjust_lr_fn": scale}
            muon = Muon(groups, distributed_config="auto", **options)
            alone = Muon([head for own in heads.values() for head in own], **options)
            for step in range(2):
                for seed, name in enumerate(names):
                    param = layers.get_parameter(name)
                    gradient = full(10 * step + seed, param.shape)
                    at = param.device_mesh, param.placements
                    param.grad = distribute_tensor(gradient, *at)
                    for head, grad in zip(
                        heads[name], gradient.split([len(h) for h in heads[name]])
                    ):
                        head.grad = grad
                muon.step()
                alone.step()
            found = {
                name: layers.get_parameter(name).detach().full_tensor()
                for name in names
            }
            with self.everywhere(scale):
                self.assertEqual(splits.keys(), {*names})
                for name, own in heads.items():
                    expected = torch.cat([head.detach() for head in own])
                    self.assertEqual(found[name], expected, rtol=0, atol=0)

    def twins(self, layout, config=None, **options):
        return Twins(layout, config, allow_batched_matrices=True, **options)

    def test_dtensors_without_a_config_have_plain_products(self):
        for placement in (S0, S1):
            spec = Spec((520, 520), mesh_of(4), (placement,))
            alone, sharded = (
                nn.Parameter(make(full(0, spec.shape)))
                for make in (torch.clone, lambda whole: place(whole, spec))
            )
            alone.grad = full(1, spec.shape)
            sharded.grad = place(alone.grad, spec)
            for param in (alone, sharded):
                Muon([param]).step()
            found = sharded.detach().full_tensor()
            # Sharded products add in another order.
            same = torch.allclose(alone.detach(), found, atol=1e-4)
            self.assertEverywhere([] if same else [f"{placement}"])

    def test_fsdp1(self):
        every = nn.Conv2d, Experts, nn.Linear
        full, none = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
        for orig, units, strategy in (
            (True, None, full),
            (True, every, full),
            (False, every, full),
            # Its parameters keep their shapes.
            (True, every, none),
        ):
            wrapping = {"units": units, "strategy": strategy}
            run = Run(orig, True, Net, groups_of, (4, 4, 6, 6), **wrapping)
            for _ in range(2):
                run.step()
                self.assertEverywhere(run.alone.problems(), f"{orig} {wrapping}")
        conv = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
        model = FullyShardedDataParallel(conv, device_id=torch.device("cpu"))
        group = {"params": model.parameters(), "flatten": True}
        # Without stacks, too.
        Muon([group], distributed_config=create_auto_config(module=model))

    def test_owners_of_a_stack(self):
        """Each matrix has an owner. Experts that one rank holds as a whole stay there."""
        cases = (S0, set()), (S1, {"all_to_all_single", "all_reduce"})
        for placement, names in cases:
            twins = self.twins(specs(mesh_of(4), [(placement,)], [(8, 6, 10)]))
            twins.set_gradients()
            with Recorder() as seen, common_config.NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)
            with self.everywhere():
                self.assertEqual({*seen.names}, names)
                self.assertEqual(calls.shapes, [(6, 10)] * 2)
        owners = twins.optimizer.matrix_owners
        self.assertEqual(list(owners), [(0, sub) for sub in range(8)])
        self.assertEqual(sorted(owners.values()), [0, 0, 1, 1, 2, 2, 3, 3])
        self.assertEqual(twins.optimizer.assignments[owners[0, 0]], [0])
        options = {"distributed_config": "auto", "allow_batched_matrices": True}
        fused = Muon([{"params": twins.params, "split": (2, 4)}], **options)
        self.assertEqual(len(fused.matrix_owners), 2 * 8)

    def test_groups_whose_ranks_hold_different_matrices(self):
        """Experts that start as copies of one expert: a comparison of values cannot tell them apart."""
        shape, pairs = (4, 6, 10), grid_of(2, 2).get_group(1)
        cut = common_muon.Cut(shape, ((0, (1, 1, 1, 1), self.rank),))
        cases = (Spec(shape, mesh_of(4), (S0,)), None), (cut, dist.group.WORLD)
        for spec, fsdp in cases:
            config = create_auto_config(fsdp, cp_process_group=pairs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twins = self.twins([spec], config)
            with torch.no_grad():
                whole = full(0, shape[1:]).expand(shape).clone()
                twins.singles[0].copy_(whole)
                twins.params[0].copy_(place(whole, spec))
            self.assertTrainsAlike(twins, 1)

    def test_errors_of_fsdp1_over_tensor_parallelism(self):
        grid, stacked = grid_of(2, 2), r"'0' of shape .* TP cut"
        # Rank 3 is in no unit with rank 0, whose learning rate is wrong.
        rate = -1.0 if self.rank == 0 else 0.1
        cases = ((4, 6, 10), 0.1, stacked), ((6, 10), rate, "Learning rate should be")
        for orig, (shape, lr, pattern) in itertools.product((False, True), cases):
            weight = place(full(0, shape), Spec(shape, grid["b"], [S0]))
            weights = nn.ParameterList([weight])
            model = wrap(weights, orig, units=None, device_mesh=grid["a"])
            config = create_auto_config(module=model)
            options = {"distributed_config": config, "allow_batched_matrices": True}
            build = partial(Muon, model.parameters(), lr, **options)
            self.assertRaisesEverywhere(build, ValueError, pattern)

    def test_errors(self):
        def sharded(*shape):
            return place(full(0, shape), Spec(shape, mesh_of(4), [S0]))

        fused, conv, cut = sharded(48, 16), sharded(8, 6, 3), full(0, (8, 6, 1, 3))
        columns = {"tp_process_group": dist.group.WORLD, "tp_dim_per_param": 2}
        other = [24 - self.rank, 24 + self.rank]
        sums = r"'w'.*split \(24, 8\) adds up to 32, but dimension 0 has 48"
        for param, config, form, pattern in (
            (fused, "auto", {"split": (24, 8)}, sums),
            (fused, None, {"split": [24, 24]}, "only a factory's distributed_config"),
            (conv, None, {"flatten": True}, "only a factory's distributed_config"),
            # Its matrices were orthogonalized as one.
            (conv, None, {}, "only a factory's distributed_config"),
            (fused, "auto", {"split": other}, "ranks disagree.*: split is"),
            (cut, create_auto_config(**columns), {"flatten": True}, "cuts dimension 2"),
        ):
            group = {"params": [("w", nn.Parameter(param))], **form}
            options = {"distributed_config": config, "allow_batched_matrices": not form}
            build = partial(Muon, [group], **options)
            self.assertRaisesEverywhere(build, ValueError, pattern)


# Wide, tall, square, uneven blocks; one too small to be divided, a fused one and a flattened one.
TO_DIVIDE = [
    ((128, 300), {}),
    ((300, 128), {}),
    ((160, 160), {}),
    ((33, 71), {}),
    ((9, 20), {}),
    ((224, 192), {"split": (160, 64)}),
    ((64, 8, 3, 3), {"flatten": True}),
]


def exact_update(gradient, split=None, flatten=False):
    """The update of a parameter at learning rate 1, with the scale of each of its matrices."""
    whole = gradient.flatten(1) if flatten else gradient
    scaled = []
    for part in whole.bfloat16().split(split or len(whole)):
        scale = max(1, part.size(0) / part.size(1)) ** 0.5
        scaled.append(scale * exact(part, [COEFFICIENTS] * 5))
    return torch.cat(scaled).view_as(gradient)


class TestMuonDivided(OnCPU):
    @contextlib.contextmanager
    def small(self, max_replicas=buckets.MAX_REPLICAS):
        with (
            mock.patch.object(division, "MIN_DIVIDED", 16),
            mock.patch.object(division, "MIN_LOAD", 0.0),
            # "auto" finds it worth the collectives.
            mock.patch.object(division, "FLOPS", 1),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
            mock.patch.object(buckets, "MAX_REPLICAS", max_replicas),
            # The rounding of few products shows in small matrices.
            mock.patch.object(divided, "_PARTS", 16),
        ):
            yield

    def twins(self, layout, config, **options):
        """At zero, where the first step leaves the update."""
        groups = [([i], form) for i, (_, form) in enumerate(TO_DIVIDE)]
        given = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        twins = Twins(layout, config, groups, **given, **options)
        for param in (*twins.params, *twins.singles):
            local(param.detach()).zero_()
        return twins

    def placed(self, mesh, *placements):
        return [Spec(shape, mesh, placements) for shape, _ in TO_DIVIDE]

    def check(self, layout, make_config, message="", **options):
        """Twice the same bits, on all replicas, about as exact as those of one owner."""
        before = None
        for _ in range(2):
            twins = self.twins(layout, make_config(), **options)
            twins.step()
            pieces = [local(param.detach()) for param in twins.params]
            same = before is None or all(map(torch.equal, before, pieces))
            self.assertEverywhere([] if same else ["another run"], message)
            before = pieces
        # By the numbers of the elements in each piece.
        here = {}
        for i, (piece, spec) in enumerate(zip(pieces, layout)):
            numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
            elements = piece_of(numbers, spec)
            here[i, hash(tuple(elements.flatten().tolist()))] = piece
        apart = [
            key
            for other in common_muon.everyone(here)
            for key in other.keys() & here.keys()
            if not torch.equal(other[key], here[key])
        ]
        self.assertEverywhere(apart, f"{message}: replicas differ")
        distances = torch.zeros(2, len(TO_DIVIDE), dtype=torch.float64)
        for i, (spec, single, (_, form)) in enumerate(
            zip(layout, twins.singles, TO_DIVIDE)
        ):
            target = piece_of(-exact_update(single.grad, **form), spec)
            for which, found in enumerate((pieces[i], piece_of(single.detach(), spec))):
                distances[which, i] = (found - target).square().sum()
        dist.all_reduce(distances)
        ratios = (distances[0] / distances[1]).sqrt().tolist()
        self.assertLessEqual(max(ratios), 1.1, f"{message} {ratios}")
        return twins

    def test_placements(self):
        line, grid = mesh_of(4), grid_of(2, 2)
        for (mesh, *placements), owners, replicas, flags, options in (
            ((line, S0), 2, 4, (True, 1), {"ns_algorithm": "gram"}),
            ((line, S1), 3, 4, (False, 0), {}),
            # Eight owners are more than the ranks.
            ((line, R), 8, 4, (True, 1), {}),
            # Relayed.
            ((grid, R, S0), 2, 1, (True, 3), {"ns_coefficients": [COEFFICIENTS] * 5}),
            ((grid, S0, S1), 3, 4, (True, 1), {"ns_algorithm": "symmetric"}),
            ((grid, S0, S1), 2, 4, (True, 1), {"foreach": True}),
            ((line, S1), "auto", 4, (True, 1), {}),
        ):
            message = f"{placements} {owners} {flags} {options}"
            make = partial(create_dtensor_config, *flags, owners)
            layout = self.placed(mesh, *placements)
            with self.small(max_replicas=replicas):
                self.check(layout, make, message, **options)
        strategy = common_muon.Strategy(grid, "fsdp", "tp")
        groups = {"owners_per_matrix": 2, "tp_dim_per_param": 0}
        with self.small():
            layout = [strategy.cut(shape, 0) for shape, _ in TO_DIVIDE]
            self.check(layout, lambda: strategy.config(**groups), str(strategy))

    def test_missing_gradients(self):
        with self.small():
            config = create_dtensor_config(owners_per_matrix=2)
            twins = self.twins(self.placed(mesh_of(4), S0), config)
            twins.step(missing=[0, 2])
            self.assertEverywhere([i for i in (0, 2) if local(twins.params[i]).any()])
            twins.set_gradients()
            if self.rank == min(twins.optimizer.assignments):
                twins.optimizer.zero_grad()
            step = twins.optimizer.step
            self.assertRaisesEverywhere(step, RuntimeError, "some have none")

    def test_one_owner(self):
        """Small matrices, one rank, and functions of the user have the bits of a single process."""
        layout, config = self.placed(mesh_of(4), S0), create_dtensor_config
        self.assertTrainsAlike(self.twins(layout, config(owners_per_matrix=4)), 2)
        with self.small():
            alone = self.placed(mesh_of(1), S0)
            self.assertTrainsAlike(self.twins(alone, config(owners_per_matrix=4)), 2)
            wrapped = config(owners_per_matrix=2)
            common_muon.wrap_functions(wrapped, "gather_fn")
            self.assertTrainsAlike(self.twins(layout, wrapped), 2)

    def test_errors_and_description(self):
        for factory in (create_auto_config, create_dtensor_config):
            for number in (0, -1, 2.0, True, None, "all"):
                pattern = 'owners_per_matrix is .*, not "auto" or an int >= 1'
                with self.assertRaisesRegex(ValueError, pattern):
                    factory(owners_per_matrix=number)
        layout = self.placed(mesh_of(4), S0)
        with self.small():
            twins = self.twins(layout, create_dtensor_config(owners_per_matrix=2))
            self.assertRegex(twins.optimizer.describe(), "parameter 0 1/2")
            first = twins.optimizer._engine.schedule.owners[0]
            self.assertEqual(twins.optimizer.matrix_owners[0, 0], first)
            text = self.twins(layout, create_dtensor_config()).optimizer.describe()
            self.assertRegex(text, r'is 1; "auto" would have \d for \d+ x \d+')
            config = create_dtensor_config(owners_per_matrix="auto")
            text = self.twins(layout, config).optimizer.describe()
            self.assertRegex(text, r"owners_per_matrix has \d for \d+ x \d+")
            config = create_dtensor_config(owners_per_matrix=1 + self.rank % 2)
            build = partial(self.twins, layout, config)
            text = "owners_per_matrix is 1 .1 for this one. on rank 0"
            self.assertRaisesEverywhere(build, ValueError, f"ranks disagree.*{text}")


if __name__ == "__main__":
    run_tests()
