# Owner(s): ["oncall: distributed"]
"""Fused and flattened weights, whose matrices have owners of their own, in every layout."""

import copy
from itertools import chain, product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
    StateDictOptions,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_fsdp1 import wrap
from torch.testing._internal.distributed._muon.common_modules import data_parallel
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


# Uneven shards, empty ones, and parts that no rank's piece contains.
FORMS = [
    ((48, 16), {"split": (16, 20, 12)}),
    ((7, 9), {"split": [3, 1, 3]}),
    ((8, 6, 3, 5), {"flatten": True}),
    ((3, 5, 2), {"flatten": True}),
    ((12, 4, 3), {"flatten": True, "split": [4] * 3}),
    ((4, 6, 8), {"split": (2, 4)}),
    ((12, 8), {}),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, bias=False)
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return self.qkv(self.conv(x).relu().mean((2, 3)))


def groups_of(model):
    """Parameter groups, whatever wraps the modules."""
    conv, qkv = (
        next(p for name, p in model.named_parameters() if which in name)
        for which in ("conv", "qkv")
    )
    fused = {"params": [("qkv", qkv)], "split": (12, 7, 5), "lr": 0.2}
    return [{"params": [("conv", conv)], "flatten": True}, fused]


@requires_gloo()
class TestMuonForms(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def twins(self, layout, config=None, **options):
        groups = [([i], form) for i, (_, form) in enumerate(FORMS)]
        return Twins(layout, config, groups, allow_batched_matrices=True, **options)

    def placed(self, mesh, *placements):
        # Dimension 1 instead of one that the shape lacks.
        fitting = [
            [S1 if getattr(p, "dim", 0) >= len(shape) else p for p in placements]
            for shape, _ in FORMS
        ]
        return [Spec(shape, mesh, p) for (shape, _), p in zip(FORMS, fitting)]

    def check(self, layout, config=None, message="", **options):
        self.assertTrainsAlike(self.twins(layout, config, **options), 2, message)

    # Layouts

    def test_any_placement(self):
        for placement in (R, S0, S1, Shard(2), Shard(3)):
            self.check(self.placed(mesh_of(4), placement), message=str(placement))
        for pair in product((R, S0, S1), repeat=2):
            self.check(self.placed(grid_of(2, 2), *pair), message=str(pair))

    def test_process_groups(self):
        for kinds in ("fsdp", "ddp", "tp", "ddp fsdp", "ddp tp", "fsdp tp"):
            mesh = grid_of(2, 2) if " " in kinds else mesh_of(4)
            strategy = Strategy(mesh, *kinds.split())
            for dim in (0, 1) if "tp" in kinds else (None,):
                layout = [strategy.cut(shape, dim) for shape, _ in FORMS]
                config = strategy.config(tp_dim_per_param=dim)
                self.check(layout, config, f"{strategy} {dim}")

    def test_options(self):
        layout = self.placed(grid_of(2, 2), R, S0)
        for flags in ((False, 0), (True, 2)):
            self.check(layout, create_dtensor_config(*flags))
        self.check(layout, lr=torch.tensor(0.05))
        self.check(layout, ns_algorithm="gram", adjust_lr_fn="match_rms_adamw")
        self.check(layout, ns_algorithm="symmetric", nesterov=False)
        twins = self.twins(layout)
        self.assertTrainsAlike(twins, 3, missing=lambda step: (step, step + 2))

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

    # Functions of the user

    def test_wrapped_functions(self):
        layout = self.placed(grid_of(2, 2), R, S1)
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            config = create_dtensor_config()
            given = getattr(config, name)
            setattr(config, name, lambda *args, given=given: given(*args))
            self.check(layout, config, name)

    # Modules

    def train(self, model, muon, single, alone, steps=2):
        for step in range(steps):
            for one in (model, single):
                one(full(step, (4, 4, 6, 6))).pow(2).sum().backward()
            muon.step()
            alone.step()
            model.zero_grad()
            single.zero_grad()

    def assertSame(self, model, muon, single, alone):
        whole = StateDictOptions(full_state_dict=True)
        params, mine = get_state_dict(model, muon, options=whole)
        expected, its = get_state_dict(single, alone)
        found = [k for k, v in expected.items() if not v.equal(params[k])]
        for name, state in its["state"].items():
            momentum = mine["state"][name]["momentum_buffer"]
            if not state["momentum_buffer"].equal(momentum):
                found.append(f"momentum of {name}")
        self.assertEverywhere(found)

    def check_module(self, wrapped, config=lambda model: "auto"):
        torch.manual_seed(1)
        single = Net()
        model = wrapped(copy.deepcopy(single))
        muon = Muon(groups_of(model), lr=0.1, distributed_config=config(model))
        alone = Muon(groups_of(single), lr=0.1)
        self.train(model, muon, single, alone)
        self.assertSame(model, muon, single, alone)
        return model, muon, single, alone

    def test_modules(self):
        replicas = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.check_module(data_parallel, lambda model: replicas)
        columns = {"shard_placement_fn": lambda param: S1}
        for mesh, options in ((mesh_of(4), columns), (grid_of(2, 2), {})):
            self.check_module(lambda model: fully_shard(model, mesh=mesh, **options))

    def test_fsdp1(self):
        units = nn.Conv2d, nn.Linear
        for orig, policy in ((True, None), (True, units), (False, units)):
            self.check_module(
                lambda model: wrap(model, orig, units=policy),
                lambda model: create_auto_config(module=model),
            )

    def test_checkpoint_on_another_placement(self):
        trained, muon, *twins = self.check_module(
            lambda model: fully_shard(model, mesh=mesh_of(4))
        )
        whole = StateDictOptions(full_state_dict=True)
        values, state = get_state_dict(trained, muon, options=whole)
        model = fully_shard(Net(), mesh=grid_of(2, 2))
        muon = Muon(groups_of(model), distributed_config="auto")
        saved = {"model_state_dict": values, "optim_state_dict": state}
        set_state_dict(model, muon, **saved, options=whole)
        self.assertEqual(tuple(muon.param_groups[1]["split"]), (12, 7, 5))
        self.train(model, muon, *twins)
        self.assertSame(model, muon, *twins)

    # Owners and errors

    def test_each_part_has_an_owner(self):
        twins = self.twins(self.placed(mesh_of(4), S0))
        fused = [o for (i, _), o in twins.optimizer.matrix_owners.items() if i == 0]
        self.assertEqual(len(set(fused)), 3)
        self.assertRegex(twins.optimizer.describe(), r"parameter 0\[2\]")
        twins.set_gradients()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        shapes = list(chain.from_iterable(everyone(calls.shapes)))
        self.assertEqual(len(shapes), 3 + 3 + 1 + 1 + 3 + 8 + 1)
        self.assertLessEqual({(20, 16), (1, 9), (8, 90), (4, 12), (4, 8)}, set(shapes))

    def test_errors(self):
        def sharded(*shape):
            return place(full(0, shape), Spec(shape, mesh_of(4), [S0]))

        fused, conv, cut = sharded(48, 16), sharded(8, 6, 3), full(0, (8, 6, 1, 3))
        columns = {"tp_process_group": dist.group.WORLD, "tp_dim_per_param": 2}
        other = [24 - self.rank, 24 + self.rank]
        sums = r"'w'.*split \(24, 8\) adds up to 32, but dimension 0 has 48"
        for param, config, form, pattern in (
            (fused, "auto", {"split": (24, 8)}, sums),
            (fused, None, {"split": [24, 24]}, "only a distributed_config"),
            (conv, None, {"flatten": True}, "only a distributed_config"),
            (fused, "auto", {"split": other}, "ranks disagree"),
            (cut, create_auto_config(**columns), {"flatten": True}, "cuts dimension 2"),
        ):
            group = {"params": [("w", nn.Parameter(param))], **form}
            self.assertRaisesEverywhere(
                lambda: Muon([group], distributed_config=config), ValueError, pattern
            )


if __name__ == "__main__":
    run_tests()
