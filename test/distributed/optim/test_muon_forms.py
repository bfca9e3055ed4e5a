# Owner(s): ["oncall: distributed"]
"""Parameters that are not one matrix with one owner: stacks, fused and flattened weights, divided matrices."""

import contextlib
import math
import os
import warnings
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Muon
from torch.optim._muon_engine.runtime import shared
from torch.optim._muon_engine.schedule import buckets, owners as schedule_owners
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_fsdp1 import Run
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    exact,
    NewtonSchulzCalls,
)
from torch.testing._internal.distributed._muon.common_muon import (
    Cut,
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
    Strategy,
    Twins,
    wrap_functions,
)
from torch.testing._internal.distributed._muon.common_rules import Recorder


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


class TestMuonForms(OnCPU):
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

    def test_owners_of_a_stack(self):
        """Each matrix has an owner. Experts that one rank holds as a whole stay there."""
        for placement, names in (
            (S0, set()),
            (S1, {"all_to_all_single", "all_reduce"}),
        ):
            twins = self.twins(specs(mesh_of(4), [(placement,)], [(8, 6, 10)]))
            twins.set_gradients()
            with Recorder() as seen, NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)
            with self.everywhere():
                self.assertEqual({*seen.names}, names)
                self.assertEqual(calls.shapes, [(6, 10)] * 2)
        owners = twins.optimizer.matrix_owners
        self.assertEqual(list(owners), [(0, sub) for sub in range(8)])
        self.assertEqual(sorted(owners.values()), [0, 0, 1, 1, 2, 2, 3, 3])

    def test_groups_whose_ranks_hold_different_matrices(self):
        """Experts that start as copies of one expert: a comparison of values cannot tell them apart."""
        shape, pairs = (4, 6, 10), grid_of(2, 2).get_group(1)
        cut = Cut(shape, ((0, (1, 1, 1, 1), self.rank),))
        for spec, fsdp in (
            (Spec(shape, mesh_of(4), (S0,)), None),
            (cut, dist.group.WORLD),
        ):
            config = create_auto_config(fsdp, cp_process_group=pairs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twins = self.twins([spec], config)
            with torch.no_grad():
                whole = full(0, shape[1:]).expand(shape).clone()
                twins.singles[0].copy_(whole)
                twins.params[0].copy_(place(whole, spec))
            self.assertTrainsAlike(twins, 1)

    def test_fsdp1_over_tensor_parallelism_is_an_error(self):
        grid = grid_of(2, 2)
        for use_orig_params in (False, True):
            stack = place(full(0, (4, 6, 10)), Spec((4, 6, 10), grid["b"], [S0]))
            model = FullyShardedDataParallel(
                nn.ParameterList([stack]),
                device_mesh=grid["a"],
                device_id=torch.device("cpu"),
                use_orig_params=use_orig_params,
            )
            config = create_auto_config(module=model)
            options = {"distributed_config": config, "allow_batched_matrices": True}
            pattern = "'0' of shape .* tensor parallelism has cut"
            with self.everywhere():
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(model.parameters(), **options)

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
            (fused, "auto", {"split": other}, "ranks disagree"),
            (cut, create_auto_config(**columns), {"flatten": True}, "cuts dimension 2"),
        ):
            group = {"params": [("w", nn.Parameter(param))], **form}
            options = {"distributed_config": config, "allow_batched_matrices": not form}
            self.assertRaisesEverywhere(
                lambda: Muon([group], **options), ValueError, pattern
            )


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
            mock.patch.object(schedule_owners, "MIN_DIVIDED", 16),
            mock.patch.object(schedule_owners, "MIN_LOAD", 0.0),
            # "auto" finds it worth the collectives.
            mock.patch.object(schedule_owners, "FLOPS", 1),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
            mock.patch.object(buckets, "MAX_REPLICAS", max_replicas),
            # The rounding of few products shows in small matrices.
            mock.patch.object(shared, "_PARTS", 16),
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
            for other in everyone(here)
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
        strategy = Strategy(grid, "fsdp", "tp")
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
            wrap_functions(wrapped, "gather_fn")
            self.assertTrainsAlike(self.twins(layout, wrapped), 2)

    def test_errors_and_description(self):
        for factory in (create_auto_config, create_dtensor_config):
            for number in (0, -1, 2.0, True, None, "all"):
                pattern = 'owners_per_matrix must be an int >= 1 or "auto"'
                with self.assertRaisesRegex(ValueError, pattern):
                    factory(owners_per_matrix=number)
        layout = self.placed(mesh_of(4), S0)
        with self.small():
            twins = self.twins(layout, create_dtensor_config(owners_per_matrix=2))
            self.assertRegex(twins.optimizer.describe(), "parameter 0 1/2")
            text = self.twins(layout, create_dtensor_config()).optimizer.describe()
            self.assertRegex(text, r'is 1; "auto" would have \d for \d+ x \d+')
            config = create_dtensor_config(owners_per_matrix="auto")
            text = self.twins(layout, config).optimizer.describe()
            self.assertRegex(text, r"owners_per_matrix has \d for \d+ x \d+")
            config = create_dtensor_config(owners_per_matrix=1 + self.rank % 2)
            build = partial(self.twins, layout, config)
            self.assertRaisesEverywhere(build, ValueError, "ranks disagree")


if __name__ == "__main__":
    run_tests()
