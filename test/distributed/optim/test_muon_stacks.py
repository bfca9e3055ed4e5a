# Owner(s): ["oncall: distributed"]
"""Stacks of matrices, such as (experts, out, in). Each matrix has its own owner."""

import copy
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
from torch.testing._internal.distributed._muon.common_fsdp1 import (
    flat_pieces,
    give_flat_gradients,
)
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    Cut,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    S0,
    S1,
    sizes_of,
    Spec,
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
        self.check(specs(grid_of(2, 2), placements, STACKS[1:2]))

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

    def test_gradients_of_another_placement(self):
        """Ranks hold the matrices of several stacks in different orders, but place gradients in one order."""
        mesh = mesh_of(4)
        shapes = [(5, 6, 10), (9, 6, 10), (4, 12, 10), (7, 20, 20), (2, 9, 9)]
        twins = self.twins(specs(mesh, [(S0,)], shapes))
        twins.set_gradients()
        for param, single in zip(twins.params, twins.singles):
            param.grad = DTensor.from_local(single.grad / 4, mesh, [Partial()])
        twins.optimizer.step()
        twins.single.step()
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
        shape, pairs = (4, 6, 10), grid_of(2, 2).get_group(1)
        for spec, options in (
            (Spec(shape, mesh_of(4), (S0,)), {}),
            (
                Cut(shape, ((0, (1, 1, 1, 1), self.rank),)),
                {"fsdp_process_group": dist.group.WORLD},
            ),
        ):
            config = create_auto_config(cp_process_group=pairs, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twins = self.twins([spec], config)
            with torch.no_grad():
                whole = full(0, shape[1:]).expand(shape).clone()
                twins.singles[0].copy_(whole)
                twins.params[0].copy_(place(whole, spec))
            self.assertTrainsAlike(twins, 1)

    # Modules and process groups, against one process

    def test_fully_shard_along_rows_of_experts(self):
        model = nn.Module()
        model.stacks = nn.ParameterList([full(0, (4, 6, 10)), full(1, (4, 10, 6))])
        mesh = grid_of(2, 2)["b"]
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1))
        layout = [
            Spec(p.shape, p.device_mesh, p.placements) for p in model.parameters()
        ]
        twins = self.twins(layout)
        twins.params = list(model.parameters())
        twins.optimizer = Muon(
            twins.params, distributed_config="auto", allow_batched_matrices=True
        )
        self.assertTrainsAlike(twins, 2)

    def test_process_groups(self):
        grid = grid_of(2, 2)
        outer, inner = grid.get_group(0), grid.get_group(1)
        at = grid.get_local_rank(1)
        for dim, options in (
            (None, {"ddp_process_group": dist.group.WORLD}),
            (0, {"fsdp_process_group": inner}),
            (1, {"tp_process_group": inner, "tp_dim_per_param": 1}),
            (2, {"tp_process_group": inner, "tp_dim_per_param": -1}),
            (0, {"tp_process_group": inner, "tp_dim_per_param": 0}),
        ):
            config = create_auto_config(**{"ddp_process_group": outer, **options})
            cuts = [
                Cut(shape, ((dim, sizes_of(shape[dim], 2, "balanced"), at),))
                if dim is not None
                else Cut(shape)
                for shape in [(4, 6, 10), (3, 9, 5), (1, 8, 8)]
            ]
            self.check(cuts, config)

    def test_fsdp1(self):
        shapes = [(4, 6, 10), (3, 5, 7)]
        for use_orig_params in (False, True):
            single = nn.Module()
            single.stacks = nn.ParameterList(
                nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)
            )
            wrapped = FullyShardedDataParallel(
                copy.deepcopy(single),
                device_id=torch.device("cpu"),
                use_orig_params=use_orig_params,
            )
            flat = wrapped._handle.flat_param
            ours, its = (
                Muon(
                    model.parameters(),
                    lr=0.1,
                    distributed_config=config,
                    allow_batched_matrices=True,
                )
                for model, config in (
                    (wrapped, create_auto_config(module=wrapped)),
                    (single, None),
                )
            )
            names = dict(single.named_parameters())
            for step in range(2):
                for i, param in enumerate(names.values()):
                    param.grad = full(100 * step + i + 50, param.shape)
                give_flat_gradients(flat, {n: p.grad for n, p in names.items()})
                ours.step()
                its.step()
            values = {name: param.detach() for name, param in names.items()}
            with self.everywhere(f"{use_orig_params=}"):
                for _, place, elements in flat_pieces(flat, values):
                    self.assertTrue(torch.equal(flat.data[place], elements))

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
