# Owner(s): ["oncall: distributed"]
"""Parameters that are not one matrix: stacks, fused and flattened weights, and batches with gaps."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_config
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_modules import Run
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    mesh_of,
    OnCPU,
    place,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


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
            with self.subTest(orig=orig, units=units, strategy=strategy):
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
            with self.subTest(placement=placement, names=names):
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
            with self.subTest(form=form):
                group = {"params": [("w", nn.Parameter(param))], **form}
                options = {
                    "distributed_config": config,
                    "allow_batched_matrices": not form,
                }
                build = partial(Muon, [group], **options)
                self.assertRaisesEverywhere(build, ValueError, pattern)


class TestSplitWithFunctionsOfTheUsers(OnCPU):
    """The sizes of a split are those of the whole weight. Those of the shard passed, and failed in the first step."""

    def sharded_config(self):
        """Each rank holds as many rows as the others."""

        def gather(piece, owner, state):
            pieces = [torch.empty_like(piece) for _ in range(self.world_size)]
            dist.all_gather(pieces, piece.contiguous())
            return torch.cat(pieces)

        def redistribute(full, owner, state):
            dist.broadcast(full, owner)
            return full.chunk(self.world_size)[self.rank]

        def assign(params, state):
            return {1: list(range(len(params)))}

        return DistributedConfig(assign, gather, redistribute, {})

    def test_training(self):
        for split, options, is_exact in (
            ((8, 8, 8), {}, True),
            ((16, 4, 4), {"adjust_lr_fn": "match_rms_adamw"}, False),
            ((16, 4, 4), {}, False),
            ({"sizes": (4, 1, 1), "repeats": 4}, {}, False),
            ({"sizes": (2, 4, 2), "dim": 1}, {}, False),
        ):
            with self.subTest(split=split, options=options):
                whole = nn.Parameter(full(0, (24, 8)))
                shard = nn.Parameter(
                    whole.detach().chunk(self.world_size)[self.rank].clone()
                )
                config = self.sharded_config()
                group = {"split": split, "lr": 0.1, **options}
                single = Muon([{"params": [whole], **group}])
                muon = Muon([{"params": [shard], **group}], distributed_config=config)
                for step in (1, 2):
                    whole.grad = full(step, (24, 8))
                    shard.grad = whole.grad.chunk(self.world_size)[self.rank].clone()
                    single.step()
                    muon.step()
                expected = whole.detach().chunk(self.world_size)[self.rank]
                with self.everywhere():
                    # The update of other parts than the first one is rounded once more, to bfloat16.
                    most = 0 if is_exact else 2 * 0.1 * 1.5 * 2**-8
                    self.assertEqual(shard.detach(), expected, rtol=0, atol=most)

    def test_sizes_of_the_shard(self):
        shard = nn.Parameter(torch.ones(6, 8))
        shard.grad = torch.ones(6, 8)
        group = {"params": [shard], "split": (2, 2, 2)}
        muon = Muon([group], distributed_config=self.sharded_config())
        words = "parameter 0.*adds up to 6, but dimension 0 has 24"
        self.assertRaisesEverywhere(muon.step, ValueError, words)
        with self.everywhere():
            self.assertEqual(shard.detach(), torch.ones(6, 8), rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
