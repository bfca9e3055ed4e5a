# Owner(s): ["oncall: distributed"]
"""Muon and the models whose parameters it has: FSDP1, weights that are several matrices, and parameters that it lacks."""

from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import _muon_reports, Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
    partition_named_parameters,
    partition_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_modules import (
    check_fsdp1,
    check_module,
    make_model,
    make_units,
    tensor_parallel,
    UNITS,
    wrap,
)
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    grid_of,
    mesh_of,
    OnCPU,
    place,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NONE, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, 8))

    def forward(self, x):
        return (x @ self.weight).sum(0)


class Net(nn.Module):
    """A convolution to flatten, a stack of experts, and a fused weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 8, 3, bias=False)
        self.experts = Experts()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return self.qkv(self.experts(self.conv(x).relu().mean((2, 3))))


def groups_of(net):
    split = {"split": (12, 7, 5), "lr": 0.2}
    forms = {"conv": {"flatten": True}, "experts": {}, "qkv": split}
    groups = []
    for which, form in forms.items():
        params = [pair for pair in net.named_parameters() if which in pair[0]]
        groups.append({"params": params, **form})
    return groups


class RefusalsTestCase(OnCPU):
    def assertRefused(self, pattern, params, config=None, **options):
        """Muon for ``params``, with ``options`` under ``config``."""
        build = partial(Muon, list(params), distributed_config=config, **options)
        self.assertRaisesEverywhere(build, ValueError, pattern)


class TestMuonFSDP1(RefusalsTestCase):
    def test_strategies_and_units(self):
        for orig, strategy, units, by_module in (
            (False, GRAD_OP, None, False),
            (False, NONE, UNITS, True),
            (False, HYBRID, None, True),
            (True, FULL, None, True),
            (True, GRAD_OP, UNITS, True),
            (True, NONE, None, True),
            (True, HYBRID, UNITS, True),
        ):
            with self.subTest(orig=orig, strategy=strategy, units=units):
                wrapping = {"strategy": strategy, "units": units}
                check_fsdp1(self, orig, by_module, **wrapping)

    def test_forms(self):
        every = nn.Conv2d, Experts, nn.Linear
        for orig, units, strategy in (
            (True, None, FULL),
            (False, every, FULL),
            # Its parameters keep their shapes.
            (True, every, NONE),
        ):
            with self.subTest(orig=orig, units=units, strategy=strategy):
                model = wrap(Net(), orig, strategy, units)
                check_module(
                    self,
                    model,
                    create_auto_config(module=model),
                    groups_of(model),
                    inputs=partial(full, shape=(4, 4, 6, 6)),
                    count=1 + 5 + 3,
                    one=Net(),
                    fsdp=model.process_group,
                )

    def test_every_matrix_of_a_flat_parameter_has_its_own_owner(self):
        layers = (nn.Linear(8, 8, bias=False) for _ in range(8))
        model = wrap(nn.Sequential(*layers), units=None)
        config = create_auto_config(module=model)
        optimizer = Muon(model.parameters(), distributed_config=config)
        model(full(0, (5, 8))).sum().backward()
        with NewtonSchulzCalls() as calls:
            optimizer.step()
        self.assertEqual(everyone(len(calls.shapes)), [2] * 4)
        # A flat parameter's index stands under the owner of its first matrix.
        self.assertEqual([i for i in optimizer.assignments.values() if i], [[0]])

    def test_units_of_equal_shapes_in_different_orders(self):
        """Ranks that listed equal units in different orders mixed up their updates.

        Their names are whole. The name within the unit is "weight" for every layer that is one.
        """
        for orig in (False, True):
            with self.subTest(orig=orig):
                model = wrap(make_units(), orig)
                matrices, _ = partition_parameters(model)
                if self.rank == 2:
                    order = [2, 3, 0, 1, 4, 5] if orig else [0, 2, 1, 3]
                    matrices = [matrices[index] for index in order]
                config = create_auto_config(module=model)
                self.assertRefused(
                    r"ranks disagree.*name is \d\.0\.weight", matrices, config
                )

    def test_refusals(self):
        orig, flat = wrap(make_units(), True), wrap(make_units(), False)
        biased, mixed = wrap(make_units(True), True), wrap(make_units(True), False)
        weight = nn.Linear(8, 6, bias=False)
        weight.weight = nn.Parameter(torch.randn(8, 6).t())
        transposed = wrap(nn.Sequential(weight), units=None)
        for model, module, pattern in (
            (orig, None, "module=model"),
            (orig, biased, "another.*module="),
            (flat, None, "fsdp_process_group=.*module="),
            (biased, biased, "only supports 2D.*bias"),
            (mixed, mixed, "weight.*bias.*use_orig_params=True"),
            (transposed, transposed, "'0.weight'.*not contiguous"),
        ):
            with self.subTest(pattern=pattern):
                # Slices are no flat parameters, whose shapes a group is enough for.
                group = model.process_group if model is orig else None
                config = create_auto_config(group, module=module)
                self.assertRefused(pattern, model.parameters(), config)
        config = create_dtensor_config()
        self.assertRefused("create_auto_config", orig.parameters(), config)
        for function in (partition_parameters, partition_named_parameters):
            partition = partial(function, mixed)
            self.assertRaisesEverywhere(partition, ValueError, "weight.*bias")
        # Only the units know the groups in which a rank reports its error.
        config, lr = create_auto_config(module=orig), -1.0 if self.rank == 1 else 1.0
        self.assertRefused("Learning rate should be", orig.parameters(), config, lr=lr)
        # Another optimizer over the same ranks works.
        check_fsdp1(self, True, steps=1)

    def test_stack_of_tensor_parallelism_in_fsdp1(self):
        grid = grid_of(2, 2)
        dtensor = place(full(0, (4, 6, 10)), Spec((4, 6, 10), grid["b"], (S0,)))
        params = nn.ParameterList([dtensor])
        model = wrap(params, units=None, device_mesh=grid["a"])
        given = model.parameters(), create_auto_config(module=model)
        self.assertRefused(
            r"'0' of shape .* TP cut", *given, allow_batched_matrices=True
        )

    def test_tp_dims_of_a_flat_parameter(self):
        """It has none of its own."""
        mesh = grid_of(2, 2)
        model = tensor_parallel(make_model(bias=False), mesh["b"])
        model = wrap(model, units=None, device_mesh=mesh["a"])
        with self.everywhere():
            self.assertEqual(detect_tp_dims_from_model(model), {})

    def test_fused_weights_in_a_flat_parameter(self):
        layers = [nn.ModuleDict({"gate_up_proj": nn.Linear(4, 6)}) for _ in range(2)]
        splits = split_of(wrap(nn.ModuleList(layers), units=None))
        names = [f"{number}.gate_up_proj.weight" for number in range(2)]
        with self.everywhere():
            self.assertEqual(splits, dict.fromkeys(names, (3, 3)))

    def test_ignored_by_fsdp1(self):
        """Each rank has such a parameter alone, in spite of the groups, unless TP cuts it."""
        mesh = grid_of(2, 2)
        fsdp, tp = mesh.get_all_groups()
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        ignored = [model[1].weight]
        wrapping = {"process_group": fsdp, "ignored_states": ignored}
        model = wrap(model, True, units=None, **wrapping)
        groups = {"tp_process_group": tp, "tp_dim_per_param": {}}
        config = create_auto_config(fsdp, module=model, **groups)
        owned = Muon(model.parameters(), distributed_config=config).assignments
        with self.everywhere():
            self.assertIn(1, owned[self.rank])

    def test_parameters_of_others(self):
        """The memory order of parameters that are not Muon's does not matter. A group does not count."""
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        layers = nn.Sequential(conv, nn.Linear(8, 6, bias=False))
        model = wrap(layers, True, units=None)
        group = grid_of(2, 2).get_group("a")
        config = create_auto_config(module=model, fsdp_process_group=group)
        pattern = r"fsdp_process_group has ranks \[., .\], but FSDP1 has \[0, 1, 2, 3\], which count"
        with self.assertWarnsOnce(pattern):
            Muon(partition_parameters(model)[0], distributed_config=config)


class TestMuonForms(RefusalsTestCase):
    def test_owners_of_a_stack(self):
        """Each matrix has an owner. Experts that one rank holds as a whole stay there."""
        options = {"allow_batched_matrices": True}
        for placement, is_exchanged in ((S0, False), (S1, True)):
            with self.subTest(placement=placement):
                placed = specs(mesh_of(4), [(placement,)], [(8, 6, 10)])
                twins = Twins(placed, **options)
                twins.set_gradients()
                with Recorder() as seen, NewtonSchulzCalls() as calls:
                    twins.optimizer.step()
                self.assertEqual(bool(seen.names), is_exchanged)
                self.assertEqual(calls.shapes, [(6, 10)] * 2)
        owners = twins.optimizer.matrix_owners
        self.assertEqual(list(owners), [(0, sub) for sub in range(8)])
        self.assertEqual(sorted(owners.values()), [0, 0, 1, 1, 2, 2, 3, 3])

    def test_shards_without_a_config(self):
        """The matrices of a stack were orthogonalized as one."""
        shape = (8, 6, 3)
        stack = place(full(0, shape), Spec(shape, mesh_of(4), (S0,)))
        pattern = "only a factory's distributed_config"
        params = [nn.Parameter(stack)]
        self.assertRefused(pattern, params, allow_batched_matrices=True)

    def test_an_error_in_a_chain_of_groups(self):
        """Rank 2 shares nothing with rank 1: neither the mesh nor the group of the config."""
        grid = grid_of(2, 2)
        shards = place(full(0, (8, 8)), Spec((8, 8), grid["b"], (S0,)))
        config = create_auto_config(ddp_process_group=grid.get_group("a"))
        params, lr = [nn.Parameter(shards)], -1.0 if self.rank == 1 else 1.0
        self.assertRefused("Learning rate should be", params, config, lr=lr)


class TestMuonUntrained(OnCPU):
    """Parameters without gradients, step after step."""

    @mock.patch.object(_muon_reports, "STEPS_WITHOUT", 3)
    def test_built_before_fully_shard(self):
        # Nothing is distributed, which is no mistake by itself: frameworks may shard the model later.
        model = nn.Linear(8, 12, bias=False)
        with self.assertWarnsOnce():
            muon = Muon(model.parameters(), distributed_config="auto")
        fully_shard(model, mesh=mesh_of(4))
        with self.assertWarnsOnce("have had no gradient in 3 steps.*: parameter 0"):
            for _ in range(5):
                model(torch.ones(2, 8)).sum().backward()
                muon.step()

    @mock.patch.object(_muon_reports, "STEPS_WITHOUT", 5)
    def test_parameter_that_is_never_trained(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 4))
        pattern = (
            r"have had no gradient in .*: parameter 2 of shape \(8, 6\)\. The model"
        )
        twins.params[3].requires_grad_(False)
        with self.assertWarnsOnce(pattern):
            for step in range(8):
                twins.set_gradients(missing=range(4) if step == 4 else [2, 3])
                twins.optimizer.step()


class TestMuonUnsharded(OnCPU):
    """FSDP2 has plain tensors in the place of its parameters between a forward and a backward pass."""

    def test_built_while_the_root_is_unsharded(self):
        """Muon took plain tensors, which never get a gradient."""
        layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
        fully_shard(model[0], mesh=mesh_of(4))
        fully_shard(model, mesh=mesh_of(4))
        with torch.no_grad():
            model(torch.ones(2, 8))
        build = partial(partition_parameters, model)
        pattern = r"FSDP2 has unsharded \[''\] .*call reshard\(\)"
        self.assertRaisesEverywhere(build, pattern=pattern)
        model[0].unshard()
        pattern = r"FSDP2 has unsharded \['', '0'\]"
        self.assertRaisesEverywhere(build, pattern=pattern)
        model[0].reshard()
        model.reshard()
        matrices, _ = partition_parameters(model)
        self.assertEqual({type(matrix.data) for matrix in matrices}, {DTensor})


class TestMuonDescribe(OnCPU):
    def test_owners(self):
        """Each noun has the right number."""
        twins = Twins(specs(mesh_of(4), [(S0,)], [(64, 32)]), is_named=True)
        (owner,) = twins.optimizer.matrix_owners.values()
        line = f"1 matrix on 4 ranks. The busiest owner is rank {owner}, with 4.00 times the mean work"
        owned = "v0" if self.rank == owner else "nothing"
        _, here, memory = twins.optimizer.describe().splitlines()
        with self.everywhere():
            begin = f"Rank {self.rank} of 4 owns {owned}. It shares"
            self.assertEqual(here, f"{begin} {line}.")
            self.assertRegex(memory, r"takes up to [\d.e-]+ MiB$")


if __name__ == "__main__":
    run_tests()
