# Owner(s): ["oncall: distributed"]
"""The distributed Muon under FullyShardedDataParallel, with flat and with original parameters."""

import copy
import warnings

import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_parameters,
)
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_fsdp1 import (
    Block,
    clean,
    flat_pieces,
    give_flat_gradients,
    Model,
    Run,
    state_dicts,
    Tail,
    whole,
    wrap,
)
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    NewtonSchulzCalls,
    ParityAssertions,
)


FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
NONE, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD


@requires_gloo()
class TestMuonFSDP1(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def check(self, run, steps=2, message="", count=8):
        for step in range(steps):
            shapes = run.step()
            self.assertEqual(sum(everyone(len(shapes))), count, message)
            self.assertEverywhere(run.problems(), f"{message} step {step}")

    # Against one process

    def test_strategies_and_units(self):
        policy = (Block, Tail)
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
            run = Run(orig, strategy=strategy, units=units, by_module=by_module)
            self.check(run, 2, f"{orig=} {strategy} {units} {by_module=}")

    def test_every_matrix_of_a_flat_parameter_has_its_own_owner(self):
        for orig, strategy in ((False, FULL), (True, HYBRID)):
            layers = (torch.nn.Linear(8, 8, bias=False) for _ in range(8))
            model = wrap(torch.nn.Sequential(*layers), orig, strategy, None)
            matrices, _ = partition_parameters(model)
            self.assertEqual(len(matrices), 8 if orig else 1)
            config = create_auto_config(module=model)
            optimizer = Muon(matrices, distributed_config=config)
            model(full(0, (5, 8))).sum().backward()
            with NewtonSchulzCalls() as calls, Collectives() as seen:
                optimizer.step()
            self.assertEqual(everyone(len(calls.shapes)), [2] * 4, f"{orig} {strategy}")
            names = {call.name for call in seen.calls}
            self.assertEqual(names, {"alltoall_base_", "allreduce_"})
            if not orig:
                # The index stands under the owner of the flat parameter's first matrix.
                owned = [i for own in optimizer.assignments.values() for i in own]
                self.assertEqual(owned, [0])

    def test_ranks_that_hold_nothing(self):
        run = Run(True)
        empty = [p for p in run.matrices if not p.numel()]
        self.assertTrue(any(everyone(len(empty))))
        run.backward()
        with self.everywhere():
            self.assertEqual([p.grad for p in empty], [None] * len(empty))
        run.update()
        self.assertEverywhere(run.problems())
        has = ["momentum_buffer" in run.optimizer.state[p] for p in run.matrices]
        self.assertEqual(everyone(has), [[True] * 8] * 4)

    def test_momentum_is_where_fsdp_keeps_the_parameter(self):
        for orig, strategy in ((False, HYBRID), (True, NONE)):
            run = Run(orig, strategy=strategy, by_module=True)
            run.step()
            with self.everywhere(f"{orig=} {strategy}"):
                for param in filter(torch.numel, run.matrices):
                    (buffer,) = run.optimizer.state[param].values()
                    self.assertIs(type(buffer), torch.Tensor)
                    self.assertEqual(buffer.shape, param.shape)
                    self.assertEqual(buffer.dtype, param.dtype)

    def test_mixed_precision(self):
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        run = Run(True, strategy=HYBRID, mixed_precision=policy)
        # On data that differ from rank to rank.
        run.backward(self.rank)
        run.take_gradients()
        run.update()
        self.assertEverywhere(run.problems())
        self.assertEqual(run.matrices[0].dtype, torch.float32)

    def wrapped(self, run):
        """The indices that the run's gather_fn is called with from now on."""
        calls, built = [], run.config.gather_fn

        def gather(piece, rank, state):
            calls.append(state["current_param_idx"])
            return built(piece, rank, state)

        run.config.gather_fn = gather
        return calls

    def test_wrapped_functions_give_the_bits_of_the_engine(self):
        run = Run(True)
        calls = self.wrapped(run)
        self.check(run)
        self.assertEqual(calls, list(range(8)) * 2)

    def test_wrapped_functions_do_not_see_the_matrices_of_a_flat_parameter(self):
        run = Run(False, units=None)
        self.wrapped(run)
        before = [p.detach().clone() for p in run.matrices]
        run.backward()
        with self.everywhere():
            # A rank that is late reads the message of another one.
            errors = ValueError, RuntimeError
            with self.assertRaisesRegex(errors, "parameter 0 holds 8 matrices"):
                run.optimizer.step()
            for param, old in zip(run.matrices, before):
                self.assertTrue(torch.equal(param.detach(), old))

    def test_gather_then_redistribute_is_the_identity(self):
        for orig, strategy in ((False, HYBRID), (True, FULL)):
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
                with Collectives() as seen:
                    mine = config.redistribute_fn(found, 0, config.state)
                self.assertTrue(torch.equal(mine, piece))
                self.assertEqual(seen.calls, [])

    def test_frozen_parameters(self):
        run = Run(True)
        frozen = "blocks.0.b.weight"
        for model in (run.model, run.single):
            for name, param in model.named_parameters():
                if clean(name) == frozen:
                    param.requires_grad_(False)
        run.config = create_auto_config(module=run.model)
        run.build()
        self.check(run, 2, count=7)

    def test_gradient_missing_where_elements_are(self):
        run = Run(True, units=None)
        run.backward()
        holders = everyone([p.numel() > 0 for p in run.matrices])
        # Held by several ranks, of which one lacks the gradient.
        index, lacking = next(
            (i, ranks[-1])
            for i in range(8)
            if len(ranks := [r for r in range(4) if holders[r][i]]) > 1
        )
        if self.rank == lacking:
            run.matrices[index].grad = None
        self.assertRaisesEverywhere(
            run.optimizer.step, RuntimeError, f"parameter {index} "
        )

    def test_gradient_missing_on_all_ranks(self):
        run = Run(True, units=None)
        self.check(run, 1)
        run.backward()
        for model in (run.model, run.single):
            for name, param in model.named_parameters():
                if clean(name) == "blocks.1.b.weight":
                    param.grad = None
        self.assertEqual(sum(everyone(len(run.update()))), 7)
        self.assertEverywhere(run.problems())

    def test_full_names_of_parameters(self):
        """Errors called every matrix of a unit's only layer 'weight'."""
        for orig in (False, True):
            run = Run(orig, by_module=True)
            run.backward()
            if self.rank == 1:
                for param in run.matrices:
                    param.grad = None
            pattern = r"some have none.*'blocks\.\d\.a\.weight'"
            self.assertRaisesEverywhere(run.optimizer.step, RuntimeError, pattern)

    def test_units_of_equal_shapes_in_different_orders(self):
        """Ranks that listed equal units in different orders mixed up their updates."""
        for orig in (False, True):
            model = wrap(Model(), orig)
            matrices, _ = partition_parameters(model)
            if self.rank == 2:
                order = [3, 4, 5, 0, 1, 2, 6, 7] if orig else [0, 2, 1, 3]
                matrices = [matrices[i] for i in order]
            pattern = r"ranks disagree.*name is blocks\.\d\.a\.weight"
            self.assertRefused(pattern, matrices, module=model)

    # Over tensor parallelism

    def tensor_parallel(self, orig):
        grid = grid_of(2, 2)
        torch.manual_seed(5)
        single = Model(bias=False)
        model = copy.deepcopy(single)
        for block in model.blocks:
            plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
            parallelize_module(block, grid["b"], plan)
        return single, wrap(model, orig, units=(Block,), device_mesh=grid["a"])

    def test_tensor_parallel_with_original_parameters(self):
        """No warning: the dimensions are those of the DTensors that FSDP1 flattened."""
        single, model = self.tensor_parallel(True)
        run = Run.__new__(Run)
        run.orig, run.single, run.model, run.lr, run.steps = True, single, model, 0.1, 0
        run.config = create_auto_config(
            module=model,
            tp_process_group=grid_of(2, 2).get_group("b"),
            tp_dim_per_param={0: 0, 1: -1, 3: -2, 4: 1},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            run.build()
        run.single_optimizers = run.optimizers(*partition_parameters(single))
        for step in range(2):
            run.backward()
            run.take_gradients()
            shapes = run.update()
            self.assertEqual(sum(everyone(len(shapes))), 8)
            with FSDP.summon_full_params(model, writeback=False):
                values = {
                    clean(n): whole(p).detach().clone()
                    for n, p in model.named_parameters()
                }
            problems = [
                name
                for name, param in single.named_parameters()
                if not torch.equal(values[name], param.detach())
            ]
            self.assertEverywhere(problems, f"step {step}")

    def test_tensor_parallel_with_flat_parameters(self):
        grid = grid_of(2, 2)
        for by_module in (False, True):
            single, model = self.tensor_parallel(False)
            names = dict(single.named_parameters())
            flats = {
                clean(f"{name}."): unit._handle.flat_param
                for name, unit in model.named_modules()
                if isinstance(unit, FSDP)
            }

            def left_by_tp(prefix, value_of):
                """This rank's part of each matrix of a unit, before FSDP1 cuts it."""
                found = {}
                for fqn in flats[prefix]._fqns:
                    found[fqn] = value_of(names[prefix.lstrip(".") + fqn])
                    dim = {"a": 0, "b": 1}.get(fqn.split(".")[0])
                    if dim is not None:
                        found[fqn] = found[fqn].chunk(2, dim)[grid.get_local_rank("b")]
                return found

            options = (
                dict(module=model)
                if by_module
                else dict(fsdp_process_group=model.process_group)
            )
            # TP's replicas of what is not cut are known from the given group only.
            options.update(tp_process_group=grid.get_group("b"), tp_dim_per_param={})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = create_auto_config(**options)
                optimizer = Muon(flats.values(), lr=0.1, distributed_config=config)
            reference = Muon(single.parameters(), lr=0.1)
            for step in range(2):
                for i, param in enumerate(names.values()):
                    param.grad = full(100 * step + i, param.shape)
                for prefix, flat in flats.items():
                    give_flat_gradients(flat, left_by_tp(prefix, lambda p: p.grad))
                with NewtonSchulzCalls() as calls:
                    optimizer.step()
                reference.step()
                self.assertEqual(sum(everyone(len(calls.shapes))), 8)
                with self.everywhere(f"{by_module=} step {step}"):
                    for prefix, flat in flats.items():
                        (momentum,) = optimizer.state[flat].values()
                        for mine, value_of in (
                            (flat.detach(), torch.Tensor.detach),
                            (momentum, lambda p: reference.state[p]["momentum_buffer"]),
                        ):
                            its = left_by_tp(prefix, value_of)
                            for _, place, elements in flat_pieces(flat, its):
                                self.assertTrue(torch.equal(mine[place], elements))

    # Errors

    def assertRefused(self, pattern, params, **options):
        """Muon for ``params`` under create_auto_config with ``options``."""
        params, config = list(params), create_auto_config(**options)
        self.assertRaisesEverywhere(
            lambda: Muon(params, distributed_config=config), ValueError, pattern
        )

    def test_flat_parameter_that_mixes_matrices_with_biases(self):
        for units in ((Block, Tail), None):
            model = wrap(Model(bias=True), False, units=units)
            pattern = r"weight.*bias.*use_orig_params=True"
            flats = [p for p in model.parameters() if hasattr(p, "_fqns")][-2:]
            group = model.process_group
            self.assertRefused(pattern, flats, fsdp_process_group=group)
            self.assertRefused(pattern, flats, module=model)
            self.assertRaisesEverywhere(
                lambda: partition_parameters(model), ValueError, "weight.*bias"
            )

    def test_original_parameters_without_the_module(self):
        model = wrap(Model(), True)
        matrices, _ = partition_parameters(model)
        for group in (None, model.process_group):
            self.assertRefused("module=model", matrices, fsdp_process_group=group)
        # Another optimizer over the same ranks works.
        self.check(Run(True), 1)

    def test_module_of_another_model(self):
        model, other = wrap(Model(), True), wrap(Model(), True)
        matrices, _ = partition_parameters(model)
        self.assertRefused("another.*module=", matrices, module=other)

    def test_flat_parameters_without_a_group(self):
        model = wrap(Model(), False)
        self.assertRefused("fsdp_process_group=.*module=", model.parameters())

    def test_dtensor_config_for_fsdp1(self):
        for orig in (False, True):
            matrices, _ = partition_parameters(wrap(Model(), orig))
            self.assertRaisesEverywhere(
                lambda: Muon(matrices, distributed_config=create_dtensor_config()),
                ValueError,
                "create_auto_config",
            )

    def test_matrices_that_are_not_contiguous(self):
        for orig in (False, True):
            model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
            model[0].weight = torch.nn.Parameter(torch.randn(8, 6).t())
            model = wrap(model, orig, units=None)
            pattern = "'0.weight'.*not contiguous"
            self.assertRefused(pattern, model.parameters(), module=model)

    def test_biases_of_original_parameters(self):
        model = wrap(Model(bias=True), True)
        pattern = r"only supports 2D parameters.*bias"
        self.assertRefused(pattern, model.parameters(), module=model)

    def test_memory_order_of_parameters_that_are_not_muons(self):
        conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model = FSDP(
            torch.nn.Sequential(conv, torch.nn.Linear(8, 6, bias=False)),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        matrices, others = partition_parameters(model)
        config = create_auto_config(
            fsdp_process_group=model.process_group, module=model
        )
        with self.everywhere():
            self.assertEqual([len(matrices), len(others)], [1, 2])
            Muon(matrices, distributed_config=config)

    def test_direct_calls_for_a_flat_parameter_of_several_matrices(self):
        model = wrap(Model(), False, units=None)
        config = create_auto_config(module=model)
        params = list(model.parameters())
        config.assign_fn(params, config.state)
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "parameter 0 holds 8 matrices"):
                config.gather_fn(params[0].detach(), 0, config.state)

    def test_gradients_that_are_expanded(self):
        # The gradient of a sum is a single 1, expanded.
        run = Run(False)
        for param in run.matrices:
            param.grad = torch.ones(()).expand(param.shape)
        for param in run.single.parameters():
            param.grad = torch.ones(param.shape)
        run.update()
        self.assertEverywhere(run.problems())

    def test_group_that_contradicts_the_unit(self):
        model = wrap(Model(), False)
        config = create_auto_config(
            module=model, fsdp_process_group=grid_of(2, 2).get_group("a")
        )
        pattern = (
            r"fsdp_process_group has ranks \[., .\], but FSDP1 has "
            r"\[0, 1, 2, 3\], which count"
        )
        self.assertWarnsOnce(
            pattern, lambda: Muon(model.parameters(), distributed_config=config)
        )


@requires_gloo()
class TestMuonFSDP1State(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def resumed(self, run, save, load):
        """Goes on with a new model and optimizer that got what ``save`` made of the old ones."""
        saved = save(run)
        with state_dicts(run.model, StateDictType.FULL_STATE_DICT):
            values = copy.deepcopy(run.model.state_dict())
        wrapping = dict(units=run.units, strategy=run.strategy)
        again = Run(run.orig, bias=False, by_module=True, **wrapping)
        with state_dicts(again.model, StateDictType.FULL_STATE_DICT):
            again.model.load_state_dict(values)
        load(again, saved)
        again.single = run.single
        again.single_optimizers = run.single_optimizers
        again.steps = run.steps
        return again

    def check(self, save, load):
        for orig, strategy, units in (
            (False, HYBRID, (Block, Tail)),
            (True, FULL, None),
        ):
            run = Run(orig, bias=False, by_module=True, strategy=strategy, units=units)
            run.strategy, run.units = strategy, units
            run.step()
            again = self.resumed(run, save, load)
            self.assertEverywhere(again.problems(), f"{orig=} as loaded")
            again.step()
            self.assertEverywhere(again.problems(), f"{orig=}")

    def check_kind(self, kind):
        def save(run):
            with state_dicts(run.model, kind):
                return copy.deepcopy(FSDP.optim_state_dict(run.model, run.optimizer))

        def load(run, saved):
            with state_dicts(run.model, kind):
                mine = FSDP.optim_state_dict_to_load(run.model, run.optimizer, saved)
            run.optimizer.load_state_dict(mine)

        self.check(save, load)

    def test_full_state_dict(self):
        self.check_kind(StateDictType.FULL_STATE_DICT)

    def test_sharded_state_dict(self):
        self.check_kind(StateDictType.SHARDED_STATE_DICT)

    def test_own_state_dict(self):
        def save(run):
            return copy.deepcopy(run.optimizer.state_dict())

        self.check(save, lambda run, saved: run.optimizer.load_state_dict(saved))


if __name__ == "__main__":
    run_tests()
