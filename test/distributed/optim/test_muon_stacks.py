# Owner(s): ["oncall: distributed"]
"""Stacks of matrices, such as (experts, out, in). Each matrix has its own owner."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.tensor import (
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    S0,
    S1,
    specs,
    Twins,
)


R, S2 = Replicate(), Shard(2)
# Uneven and empty shards, one expert, four dimensions.
STACKS = [(8, 6, 10), (5, 7, 3), (1, 9, 4), (3, 2, 5), (2, 3, 4, 6)]


@requires_gloo()
class TestMuonStacks(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def twins(self, layout, config=None, **options):
        options.setdefault("allow_batched_matrices", True)
        return Twins(layout, config, **options)

    def check(self, layout, config=None, **options):
        twins = self.twins(layout, config, **options)
        self.assertTrainsAlike(twins, 2, str({spec.placements for spec in layout}))
        return twins

    def test_any_placement_on_one_dimension(self):
        self.check(specs(mesh_of(4), [(R,), (S0,), (S1,), (S2,)], STACKS))

    def test_any_placement_on_two_dimensions(self):
        some = (R, S0, S1, S2)
        placements = [(a, b) for a in some for b in some]
        self.check(specs(grid_of(2, 2), placements, STACKS[:3]))

    def test_settings_change_nothing(self):
        layout = specs(grid_of(2, 2), [(S0, S1), (R, S2)], STACKS)
        # Together with plain matrices.
        layout += specs(mesh_of(4), [(S0,), (S1,)], [(16, 12), (7, 5)])
        for parallel, ahead in ((True, 2), (False, 0)):
            self.check(layout, create_dtensor_config(parallel, ahead))
        self.check(layout, adjust_lr_fn="match_rms_adamw", nesterov=False)

    def test_experts_on_their_ranks_send_nothing(self):
        twins = self.twins(specs(mesh_of(4), [(S0,)], [(8, 6, 10)]))
        twins.set_gradients()
        with Collectives() as seen, NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        twins.single.step()
        self.assertEverywhere([call.name for call in seen.calls])
        self.assertEverywhere([] if calls.shapes == [(6, 10)] * 2 else [calls.shapes])
        self.assertParity(twins)

    def test_each_matrix_has_an_owner(self):
        twins = self.twins(specs(mesh_of(4), [(S1,)], [(8, 6, 10)]))
        owners = twins.optimizer.matrix_owners
        self.assertEqual(list(owners), [(0, sub) for sub in range(8)])
        self.assertEqual(sorted(owners.values()), [0, 0, 1, 1, 2, 2, 3, 3])
        twins.set_gradients()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        self.assertEverywhere([] if calls.shapes == [(6, 10)] * 2 else [calls.shapes])

    def test_ranks_that_hold_no_matrix(self):
        """They used to wait for ranks that had no reason to compare anything with them."""
        for placement in (S0, S1):
            config = create_auto_config(ddp_process_group=dist.group.WORLD)
            self.check(
                specs(mesh_of(4), [(placement,)], [(1, 9, 4), (2, 3, 5)]), config
            )

    def test_gradient_that_one_rank_lacks(self):
        twins = self.twins(specs(mesh_of(4), [(S1,)], [(2, 8, 6)]))
        twins.set_gradients()
        if self.rank == 3:
            twins.params[0].grad = None
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "some have none"):
                twins.optimizer.step()

    def test_gradients_of_another_placement(self):
        """Ranks hold the matrices of several stacks in different orders, but place gradients in one order."""
        mesh = mesh_of(4)
        shapes = [(5, 6, 10), (9, 6, 10), (4, 12, 10), (7, 20, 20), (2, 9, 9)]
        twins = self.twins(specs(mesh, [(S0,)], shapes))
        for step in range(2):
            for i, (param, single) in enumerate(zip(twins.params, twins.singles)):
                whole = full(100 * step + i, param.shape)
                param.grad = DTensor.from_local(whole / 4, mesh, [Partial()])
                single.grad = whole
            twins.optimizer.step()
            twins.single.step()
            twins.steps += 1
            self.assertParity(twins)

    def test_functions_of_the_user_go_by_parameter(self):
        """They cannot tell apart matrices of a stack that different ranks hold."""
        layout = specs(mesh_of(4), [(S0,)], [(5, 6, 10), (1, 4, 4)])
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            config = create_dtensor_config()
            given = getattr(config, name)
            setattr(config, name, lambda *args, given=given: given(*args))
            if name == "assign_fn":
                self.check(layout, config)
                continue
            with self.everywhere(name):
                with self.assertRaisesRegex(ValueError, "stack"):
                    self.twins(layout, config)

    def test_groups_whose_ranks_hold_different_matrices(self):
        """Experts that start as copies of one expert: a comparison of values cannot tell them apart."""
        grid = grid_of(2, 2)
        one = full(0, (6, 10))
        for placed in (True, False):
            whole = one.expand(4, 6, 10).clone()
            if placed:
                param = nn.Parameter(distribute_tensor(whole, mesh_of(4), [S0]))
                options = {"cp_process_group": grid.get_group(1)}
            else:
                param = nn.Parameter(whole.tensor_split(4)[self.rank].clone())
                options = {
                    "fsdp_process_group": dist.group.WORLD,
                    "cp_process_group": grid.get_group(1),
                }
            gradient = full(5, (4, 6, 10))
            param.grad = (
                distribute_tensor(gradient, mesh_of(4), [S0])
                if placed
                else gradient.tensor_split(4)[self.rank].clone()
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                muon = Muon(
                    [param],
                    lr=0.1,
                    distributed_config=create_auto_config(**options),
                    allow_batched_matrices=True,
                )
            muon.step()
            single = nn.Parameter(whole)
            single.grad = gradient
            Muon([single], lr=0.1, allow_batched_matrices=True).step()
            mine = param.to_local() if placed else param
            expected = single.detach()[self.rank : self.rank + 1]
            self.assertEverywhere([] if torch.equal(mine, expected) else [placed])

    # Modules and process groups, against one process

    def expected(self, shapes, steps=2):
        params = [nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)]
        muon = Muon(params, lr=0.1, allow_batched_matrices=True)
        for step in range(steps):
            for i, param in enumerate(params):
                param.grad = self.gradient(step, i, param.shape)
            muon.step()
        return [param.detach() for param in params]

    def gradient(self, step, index, shape):
        return full(100 * step + index + 50, tuple(shape))

    def test_fully_shard_along_rows_of_experts(self):
        shapes = [(4, 6, 10), (4, 10, 6)]
        mesh = grid_of(2, 2)
        model = nn.Module()
        model.stacks = nn.ParameterList(
            nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)
        )
        fully_shard(model, mesh=mesh["b"], shard_placement_fn=lambda param: Shard(1))
        params = list(model.parameters())
        muon = Muon(
            params, lr=0.1, distributed_config="auto", allow_batched_matrices=True
        )
        for step in range(2):
            for i, param in enumerate(params):
                whole = self.gradient(step, i, param.shape)
                param.grad = distribute_tensor(
                    whole, param.device_mesh, param.placements
                )
            muon.step()
        found = [param.full_tensor().detach() for param in params]
        problems = [
            i
            for i, (a, b) in enumerate(zip(found, self.expected(shapes)))
            if not torch.equal(a, b)
        ]
        self.assertEverywhere(problems)

    def check_groups(self, config, pieces, shapes):
        """``pieces`` cuts a stack to this rank's part."""
        params = [
            nn.Parameter(pieces(full(i, shape)).clone())
            for i, shape in enumerate(shapes)
        ]
        muon = Muon(
            params, lr=0.1, distributed_config=config, allow_batched_matrices=True
        )
        for step in range(2):
            for i, (param, shape) in enumerate(zip(params, shapes)):
                param.grad = pieces(self.gradient(step, i, shape)).clone()
            muon.step()
        self.assertEverywhere(
            [
                i
                for i, (param, whole) in enumerate(zip(params, self.expected(shapes)))
                if not torch.equal(param, pieces(whole))
                or muon.state[param]["momentum_buffer"].shape != param.shape
            ]
        )

    def test_process_groups(self):
        shapes = [(4, 6, 10), (3, 9, 5), (1, 8, 8)]
        grid = grid_of(2, 2)
        outer, inner = grid.get_group(0), grid.get_group(1)
        at = grid.get_local_rank(1)

        def experts(whole):
            parts = whole.tensor_split(2)
            return parts[at]

        def rows(whole):
            return whole.tensor_split(2, dim=1)[at]

        def columns(whole):
            return whole.tensor_split(2, dim=2)[at]

        for pieces, options in (
            (lambda whole: whole, {"ddp_process_group": dist.group.WORLD}),
            (experts, {"fsdp_process_group": inner, "ddp_process_group": outer}),
            (rows, {"tp_process_group": inner, "tp_dim_per_param": 1}),
            (columns, {"tp_process_group": inner, "tp_dim_per_param": -1}),
            (experts, {"tp_process_group": inner, "tp_dim_per_param": 0}),
        ):
            options.setdefault("ddp_process_group", outer)
            self.check_groups(create_auto_config(**options), pieces, shapes)

    def test_fsdp1(self):
        shapes = [(4, 6, 10), (3, 5, 7)]
        for use_orig_params in (False, True):
            model = nn.Module()
            model.stacks = nn.ParameterList(
                nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)
            )
            wrapped = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
            )
            config = create_auto_config(
                fsdp_process_group=wrapped.process_group, module=wrapped
            )
            params = list(wrapped.parameters())
            muon = Muon(
                params, lr=0.1, distributed_config=config, allow_batched_matrices=True
            )
            for step in range(2):
                whole = [self.gradient(step, i, s) for i, s in enumerate(shapes)]
                flat = torch.cat([gradient.flatten() for gradient in whole])
                self.give_flat_gradient(wrapped, params, flat, use_orig_params)
                muon.step()
            expected = torch.cat([w.flatten() for w in self.expected(shapes)])
            handle = wrapped._handle.flat_param
            size = handle.numel()
            padded = torch.zeros(size * 4)
            padded[: len(expected)] = expected
            mine = padded[size * self.rank : size * (self.rank + 1)]
            used = max(0, min(size, len(expected) - size * self.rank))
            self.assertEverywhere(
                []
                if torch.equal(handle.data[:used], mine[:used])
                else [use_orig_params]
            )

    def give_flat_gradient(self, wrapped, params, flat, use_orig_params):
        handle = wrapped._handle.flat_param
        size = handle.numel()
        padded = torch.zeros(size * 4)
        padded[: len(flat)] = flat
        mine = padded[size * self.rank : size * (self.rank + 1)].clone()
        if not use_orig_params:
            params[0].grad = mine
            return
        infos = handle._shard_param_infos
        for param, info in zip(params, infos):
            if info.in_shard:
                start = info.offset_in_shard
                param.grad = mine[start : start + info.numel_in_shard].view(param.shape)

    def test_fsdp1_over_tensor_parallelism_is_an_error(self):
        grid = grid_of(2, 2)
        for use_orig_params in (False, True):
            model = nn.Module()
            model.stack = nn.Parameter(
                distribute_tensor(full(0, (4, 6, 10)), grid["b"], [S0])
            )
            wrapped = FullyShardedDataParallel(
                model,
                device_mesh=grid["a"],
                device_id=torch.device("cpu"),
                use_orig_params=use_orig_params,
            )
            with self.everywhere():
                with self.assertRaisesRegex(
                    ValueError, "'stack' of shape .* tensor parallelism has cut"
                ):
                    Muon(
                        list(wrapped.parameters()),
                        distributed_config=create_auto_config(module=wrapped),
                        allow_batched_matrices=True,
                    )

    def test_placement_that_cannot_be_read_is_an_error(self):
        averaged = DTensor.from_local(
            full(0, (4, 6, 5)), mesh_of(4), [Partial("avg")], run_check=False
        )
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, r"only Partial\('sum'\)"):
                Muon(
                    [nn.Parameter(averaged)],
                    distributed_config="auto",
                    allow_batched_matrices=True,
                )

    def test_without_the_option_it_is_an_error(self):
        layout = specs(mesh_of(4), [(S0,)], [(4, 6, 5)])
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "allow_batched_matrices=True"):
                self.twins(layout, allow_batched_matrices=False)


if __name__ == "__main__":
    run_tests()
