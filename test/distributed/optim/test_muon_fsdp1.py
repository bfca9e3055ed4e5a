# Owner(s): ["oncall: distributed"]
"""Muon under FSDP1: flat and original parameters, strategies and units, beside tensor parallelism; its errors."""

import copy
from functools import partial

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_parameters,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_modules, common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_modules import Model, Run, wrap
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    grid_of,
    place,
    S0,
    Spec,
)


FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


NONE, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD


class TestMuonFSDP1(common_muon.OnCPU):
    def check(self, run, steps=2, message=""):
        for step in range(steps):
            shapes = run.step()
            self.assertEqual(sum(everyone(len(shapes))), 8, message)
            self.assertEverywhere(run.alone.problems(), f"{message} step {step}")

    def test_strategies_and_units(self):
        policy = (common_modules.Block, common_modules.Tail)
        for orig, strategy, units, by_module in (
            (False, FULL, policy, False),
            (False, GRAD_OP, None, False),
            (False, NONE, policy, True),
            (False, HYBRID, None, True),
            (True, FULL, None, True),
            (True, GRAD_OP, policy, True),
            (True, NONE, None, True),
            (True, HYBRID, policy, True),
        ):
            with self.subTest(
                orig=orig, strategy=strategy, units=units, by_module=by_module
            ):
                run = Run(orig, strategy=strategy, units=units, by_module=by_module)
                self.check(run, 2, f"{orig=} {strategy} {units} {by_module=}")

    def test_every_matrix_of_a_flat_parameter_has_its_own_owner(self):
        for orig, strategy in ((False, FULL), (True, HYBRID)):
            with self.subTest(orig=orig, strategy=strategy):
                layers = (torch.nn.Linear(8, 8, bias=False) for _ in range(8))
                model = wrap(torch.nn.Sequential(*layers), orig, strategy, None)
                config = create_auto_config(module=model)
                optimizer = Muon(model.parameters(), distributed_config=config)
                model(full(0, (5, 8))).sum().backward()
                with NewtonSchulzCalls() as calls, Recorder() as seen:
                    optimizer.step()
                self.assertEqual(
                    everyone(len(calls.shapes)), [2] * 4, f"{orig} {strategy}"
                )
                exchanges = {"all_to_all_single", "all_reduce", "broadcast"}
                self.assertLessEqual({*seen.names}, exchanges)
                # A flat parameter's index stands under the owner of its first matrix.
                owned = [
                    index for own in optimizer.assignments.values() for index in own
                ]
                self.assertEqual(sorted(owned), list(range(8)) if orig else [0])

    def test_gather_then_redistribute_is_the_identity(self):
        for orig, strategy in ((False, HYBRID), (True, FULL)):
            with self.subTest(orig=orig, strategy=strategy):
                torch.manual_seed(5)
                single = torch.nn.Linear(5, 7, bias=False)
                model = wrap(copy.deepcopy(single), orig, strategy, None)
                (param,) = model.parameters()
                config = create_auto_config(module=model)
                # A piece of a flat parameter does not know its matrix.
                config.assign_fn([param], config.state)
                piece = param.detach().clone()
                with self.everywhere(f"{orig=} {strategy}"):
                    found = config.gather_fn(piece, 0, config.state)
                    self.assertTrue(torch.equal(found, single.weight.detach()))
                    with Recorder() as seen:
                        mine = config.redistribute_fn(found, 0, config.state)
                    self.assertTrue(torch.equal(mine, piece))
                    self.assertEqual(seen.names, [])

    def test_units_of_equal_shapes_in_different_orders(self):
        """Ranks that listed equal units in different orders mixed up their updates.

        Their names are whole. The name within the unit is "weight" for every layer that is one.
        """
        for orig in (False, True):
            with self.subTest(orig=orig):
                model = wrap(Model(), orig)
                matrices, _ = partition_parameters(model)
                if self.rank == 2:
                    order = [3, 4, 5, 0, 1, 2, 6, 7] if orig else [0, 2, 1, 3]
                    matrices = [matrices[index] for index in order]
                pattern = r"ranks disagree.*name is blocks\.\d\.a\.weight"
                self.assertRefused(pattern, matrices, module=model)

    def test_replicas_that_fsdp1_cuts_at_different_places(self):
        """TP cuts 51 rows into 26 and 25. So the replicas behind them start at different places of the flat parameters."""
        grid = grid_of(2, 2)
        model = torch.nn.Sequential()
        for name, rows, columns in (("cut", 51, 12), ("left", 7, 10)):
            model.add_module(name, torch.nn.Linear(columns, rows, bias=False))
        parallelize_module(model, grid["b"], {"cut": ColwiseParallel()})
        model = wrap(model, False, units=None, device_mesh=grid["a"])
        options = {"tp_process_group": grid.get_group("b"), "tp_dim_per_param": 0}
        config = create_auto_config(module=model, **options)
        muon = Muon(model.parameters(), lr=0.1, distributed_config=config)
        (flat,) = model.parameters()
        flat.grad = torch.ones_like(flat)
        with NewtonSchulzCalls() as calls:
            muon.step()
        # Each rank of TP has its own copy of the one that is left.
        self.assertEqual(sum(everyone(len(calls.shapes))), 3)

    def assertRefused(self, pattern, params, **options):
        """Muon for ``params`` under create_auto_config with ``options``."""
        config = create_auto_config(**options)
        build = partial(Muon, list(params), distributed_config=config)
        self.assertRaisesEverywhere(build, ValueError, pattern)

    def test_stack_that_tensor_parallelism_cuts(self):
        grid = grid_of(2, 2)
        weight = place(full(0, (4, 6, 10)), Spec((4, 6, 10), grid["b"], (S0,)))
        model = wrap(
            torch.nn.ParameterList([weight]), units=None, device_mesh=grid["a"]
        )
        options = {"distributed_config": create_auto_config(module=model)}
        params = model.parameters()
        build = partial(Muon, params, allow_batched_matrices=True, **options)
        pattern = r"'0' of shape .* TP cut"
        self.assertRaisesEverywhere(build, ValueError, pattern)

    def test_flat_parameter_that_mixes_matrices_with_biases(self):
        model = wrap(Model(bias=True), False)
        pattern = r"weight.*bias.*use_orig_params=True"
        flats = [param for param in model.parameters() if hasattr(param, "_fqns")][-2:]
        for options in ({"fsdp_process_group": model.process_group}, {"module": model}):
            with self.subTest(options=options):
                self.assertRefused(pattern, flats, **options)
        partition = partial(partition_parameters, model)
        self.assertRaisesEverywhere(partition, ValueError, "weight.*bias")

    def test_parameters_that_a_config_cannot_take(self):
        orig, flat = wrap(Model(), True), wrap(Model(), False)
        biased = wrap(Model(bias=True), True)
        matrices, _ = partition_parameters(orig)
        group = {"fsdp_process_group": orig.process_group}
        for params, options, pattern in (
            (matrices, {}, "module=model"),
            (matrices, group, "module=model"),
            (matrices, {"module": biased}, "another.*module="),
            (flat.parameters(), {}, "fsdp_process_group=.*module="),
            (biased.parameters(), {"module": biased}, "only supports 2D.*bias"),
        ):
            with self.subTest(params=params):
                self.assertRefused(pattern, params, **options)
        for params in (matrices, list(flat.parameters())):
            with self.subTest(params=params):
                build = partial(
                    Muon, params, distributed_config=create_dtensor_config()
                )
                self.assertRaisesEverywhere(build, ValueError, "create_auto_config")
        # Only the units know the groups in which a rank reports its error.
        config = create_auto_config(module=orig)
        lr = -1.0 if self.rank == 1 else 1.0
        build = partial(Muon, matrices, lr=lr, distributed_config=config)
        self.assertRaisesEverywhere(build, ValueError, "Learning rate should be")
        # Another optimizer over the same ranks works.
        self.check(Run(True), 1)

    def test_matrices_that_are_not_contiguous(self):
        for orig in (False, True):
            with self.subTest(orig=orig):
                model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
                model[0].weight = torch.nn.Parameter(torch.randn(8, 6).t())
                model = wrap(model, orig, units=None)
                pattern = "'0.weight'.*not contiguous"
                self.assertRefused(pattern, model.parameters(), module=model)
        # The memory order of parameters that are not Muon's does not matter.
        conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        layers = torch.nn.Sequential(conv, torch.nn.Linear(8, 6, bias=False))
        model = wrap(layers, True, units=None)
        matrices, _ = partition_parameters(model)
        with self.everywhere():
            Muon(matrices, distributed_config=create_auto_config(module=model))

    def test_group_that_contradicts_the_unit(self):
        model, group = wrap(Model(), False), grid_of(2, 2).get_group("a")
        config = create_auto_config(module=model, fsdp_process_group=group)
        pattern = r"fsdp_process_group has ranks \[., .\], but FSDP1 has \[0, 1, 2, 3\], which count"
        with self.assertWarnsOnce(pattern):
            Muon(model.parameters(), distributed_config=config)


if __name__ == "__main__":
    run_tests()
