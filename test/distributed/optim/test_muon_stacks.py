# Owner(s): ["oncall: distributed"]
"""Stacks of matrices, such as (experts, out, in). Each matrix has its own owner."""

import copy
import warnings
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
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
        return Twins(layout, config, allow_batched_matrices=True, **options)

    def check(self, layout, config=None, **options):
        twins = self.twins(layout, config, **options)
        self.assertTrainsAlike(twins, 2, str({spec.placements for spec in layout}))

    def test_any_placement(self):
        some = R, S0, S1, S2
        layout = specs(grid_of(2, 2), list(product(some, some)), STACKS[1:2])
        # Together with plain matrices.
        layout += specs(mesh_of(4), [(S0,), (S1,)], [(16, 12), (7, 5)])
        for parallel, ahead in ((True, 2), (False, 0)):
            self.check(layout, create_dtensor_config(parallel, ahead))
        layout = specs(mesh_of(4), [(one,) for one in some], STACKS)
        self.check(layout, adjust_lr_fn="match_rms_adamw", nesterov=False)
        # Ranks that hold no matrix used to wait for ranks that compare nothing with them.
        few = specs(mesh_of(4), [(S0,), (S1,)], [(1, 9, 4), (2, 3, 5)])
        self.check(few, create_auto_config(ddp_process_group=dist.group.WORLD))

    def test_owners(self):
        """Each matrix has an owner. Experts that one rank holds as a whole stay there."""
        for placement, names in (
            (S0, set()),
            (S1, {"alltoall_base_", "allreduce_"}),
        ):
            twins = self.twins(specs(mesh_of(4), [(placement,)], [(8, 6, 10)]))
            twins.set_gradients()
            with Collectives() as seen, NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)
            with self.everywhere():
                self.assertEqual({call.name for call in seen.calls}, names)
                self.assertEqual(calls.shapes, [(6, 10)] * 2)
        owners = twins.optimizer.matrix_owners
        self.assertEqual(list(owners), [(0, sub) for sub in range(8)])
        self.assertEqual(sorted(owners.values()), [0, 0, 1, 1, 2, 2, 3, 3])

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
            cuts = []
            for shape in [(4, 6, 10), (3, 9, 5), (1, 8, 8), (6, 10)]:
                if dim is None:
                    cuts.append(Cut(shape))
                    continue
                along = min(dim, len(shape) - 1)
                sizes = sizes_of(shape[along], 2, "balanced")
                cuts.append(Cut(shape, ((along, sizes, at),)))
            self.check(cuts, config)

    def test_fsdp1(self):
        for use_orig_params in (False, True):
            single = nn.ParameterList([full(0, (4, 6, 10)), full(1, (3, 5, 7))])
            wrapped = FullyShardedDataParallel(
                copy.deepcopy(single),
                device_id=torch.device("cpu"),
                use_orig_params=use_orig_params,
            )
            flat, names = wrapped._handle.flat_param, dict(single.named_parameters())
            ours, its = (
                Muon(
                    model.parameters(),
                    distributed_config=config,
                    allow_batched_matrices=True,
                )
                for model, config in (
                    (wrapped, create_auto_config(module=wrapped)),
                    (single, None),
                )
            )
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
            stack = distribute_tensor(full(0, (4, 6, 10)), grid["b"], [S0])
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


if __name__ == "__main__":
    run_tests()
