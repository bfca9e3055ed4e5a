# Owner(s): ["oncall: distributed"]
"""Parameters that are not one matrix: stacks, fused and flattened weights, and batches with gaps."""

import itertools
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Partial
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    DistributedConfig,
    partition_named_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_modules import Run, wrap
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    grid_of,
    local,
    mesh_of,
    OnCPU,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


P = Partial()


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

    num_heads, num_key_value_heads = 6, 2
    head_dim, qk_nope_head_dim, v_head_dim = 4, 3, 5

    def __init__(self):
        super().__init__()
        rows = {"q_proj": 24, "k_proj": 8, "v_proj": 10, "kv_b_proj": 48, "o_proj": 12}
        for seed, (name, size) in enumerate(rows.items()):
            setattr(self, name, nn.Linear(9, size, bias=False))
            getattr(self, name).weight.data = full(seed, (size, 9))


# The rows of each head of GroupedAttention: of one head, or of all.
HEADS = {
    "q_proj": 4,
    "k_proj": 4,
    "v_proj": 5,
    "kv_b_proj": [3, 5] * 6,
}


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
            with self.subTest(placement=placement, split=split, scale=scale):
                spec = Spec((sum(split), 24), mesh_of(4), (placement,))
                options = {"foreach": False, "adjust_lr_fn": scale, "lr": 0.1}
                twins = Twins(
                    [spec] * 3, groups=[((0, 1, 2), {"split": split})], **options
                )
                twins.step()
                common_muon.as_on_an_accelerator(twins.optimizer)
                self.assertTrainsAlike(twins, 2, f"{placement} {split} {scale}")

    def test_sums_with_parts_on_an_accelerator(self):
        """A part whose update is received was joined with one that only decays, and lost its update."""
        mesh = grid_of(2, 2)
        for placements in ((R, P), (P, R), (P, S1), (S1, P)):
            with self.subTest(placements=placements):
                sharded = [
                    R if placement.is_partial() else placement
                    for placement in placements
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
                    options = {
                        "lr": 0.1,
                        "foreach": False,
                        "distributed_config": "auto",
                    }
                    muon = Muon([group], **options)
                    # The next optimizer of two matrices has the same owners again.
                    Muon(
                        [{"params": [nn.Parameter(summed)], "split": (4, 4)}], **options
                    )
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
            with self.subTest(placement=placement):
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
                    bound = twins.optimizer._engine._runner.compute.bound.values()
                    entries = copies = 0
                    for of_bucket in bound:
                        work = [*of_bucket.applied]
                        for preparation in of_bucket.preparations:
                            work += preparation.blended
                        for batch in of_bucket.batches:
                            work += [*batch.own, *batch.applied]
                            copies += len(batch.received.targets) + len(
                                batch.results.targets
                            )
                        entries += sum(len(together.entries) for together in work)
                    found.append((entries, copies))
                # Buckets may end at other heads.
                few, many = found
                with self.everywhere(f"{found}"):
                    self.assertLessEqual(sum(many), sum(few) + 24)
                owners = set(twins.optimizer.matrix_owners.values())
                with self.everywhere():
                    self.assertEqual(owners, {0, 1, 2, 3})

    def test_heads_under_fsdp2(self):
        """Shards end in the middle of heads. Each head has the bits of a parameter of its own, with its own scale."""
        for mesh, scale in (
            (mesh_of(2), "match_rms_adamw"),
            (grid_of(2, 2), "spectral_unclamped"),
        ):
            with self.subTest(mesh=mesh, scale=scale):
                layers = nn.Sequential(GroupedAttention(), GroupedAttention())
                names = [n for n, _ in layers.named_parameters() if "o_proj" not in n]
                heads = {name: [] for name in names}
                for name in names:
                    _, projection, _ = name.split(".")
                    whole = layers.get_parameter(name).detach().clone()
                    for head in whole.split(HEADS[projection]):
                        heads[name].append(nn.Parameter(head.clone()))
                fully_shard(layers, mesh=mesh)
                splits = split_of(layers, heads=True)
                groups, _ = partition_named_parameters(layers, split=splits)
                options = {"lr": 0.1, "adjust_lr_fn": scale}
                muon = Muon(groups, distributed_config="auto", **options)
                alone = Muon(
                    [head for own in heads.values() for head in own], **options
                )
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
            with self.subTest(placement=placement):
                spec = Spec((520, 520), mesh_of(4), (placement,))
                alone = nn.Parameter(full(0, spec.shape))
                sharded = nn.Parameter(place(alone.detach(), spec))
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

    def test_groups_whose_ranks_hold_different_matrices(self):
        """Experts that start as copies of one expert: a comparison of values cannot tell them apart."""
        shape, pairs = (4, 6, 10), grid_of(2, 2).get_group(1)
        cut = common_muon.Cut(shape, ((0, (1, 1, 1, 1), self.rank),))
        cases = (Spec(shape, mesh_of(4), (S0,)), None), (cut, dist.group.WORLD)
        for spec, fsdp in cases:
            with self.subTest(spec=spec, fsdp=fsdp):
                config = create_auto_config(fsdp, cp_process_group=pairs)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    twins = self.twins([spec], config)
                with torch.no_grad():
                    whole = full(0, shape[1:]).expand(shape).clone()
                    twins.singles[0].copy_(whole)
                    twins.params[0].copy_(place(whole, spec))
                self.assertTrainsAlike(twins, 1)

    def test_tensor_parallelism_of_a_plain_stack(self):
        """It cuts whole matrices, or rows or columns of each."""
        for dim, sizes in ((0, (1, 1, 1, 1)), (1, (2, 2, 1, 1)), (2, (3, 3, 2, 2))):
            with self.subTest(dim=dim):
                config = create_auto_config(
                    tp_process_group=dist.group.WORLD, tp_dim_per_param=dim
                )
                cut = common_muon.Cut((4, 6, 10), ((dim, sizes, self.rank),))
                self.assertTrainsAlike(self.twins([cut], config), 1)

    def test_errors_of_fsdp1_over_tensor_parallelism(self):
        grid, stacked = grid_of(2, 2), r"'0' of shape .* TP cut"
        # Rank 3 is in no unit with rank 0, whose learning rate is wrong.
        rate = -1.0 if self.rank == 0 else 0.1
        cases = ((4, 6, 10), 0.1, stacked), ((6, 10), rate, "Learning rate should be")
        for orig, (shape, lr, pattern) in itertools.product((False, True), cases):
            with self.subTest(orig=orig, shape=shape, lr=lr):
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
