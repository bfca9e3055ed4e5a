"""Recipes for migration: before, after, and that both train the same model."""

import torch
import torch.distributed as dist
from recipes.common import (
    batch,
    batches,
    Block,
    CPU,
    cut_linears,
    MLP,
    parallelize,
    place_weights,
    placed_backward,
    Recipe,
    Transformer,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests


@torch.no_grad()
def loss_of_first_batch(model):
    inputs, targets = batch(0)
    return mse_loss(model(inputs), targets).item()


class TestMigration(Recipe):
    def single(self, make):
        """One process, without a config. Returns the losses of a training, as all of these do."""
        return self.check(make(), make(), None, once=False)

    def fsdp(self, make, **options):
        model, group = FSDP(make(), device_id=CPU, **options), dist.group.WORLD
        config = create_auto_config(fsdp_process_group=group)
        return self.check(make(), model, config, fsdp=group, data=[group])

    def dtensors(self, placement, inputs):
        """Parameters and inputs become DTensors."""
        mesh = init_device_mesh("cpu", (4,))
        model = place_weights(MLP(), mesh, [placement])
        backward = placed_backward(model, mesh, [inputs])
        return self.check(MLP(), model, create_dtensor_config(), backward=backward)

    def assertSameLosses(self, before, after):
        # Gradients round otherwise, and so the losses are not equal to the last bit.
        self.assertEqual(before, after, rtol=1e-3, atol=0)

    def test_one_process_to_dtensor(self):
        """EXAMPLES, migration 1."""
        after = self.dtensors(Shard(0), Replicate())
        self.assertSameLosses(self.single(MLP), after)

    def test_one_process_to_fsdp(self):
        """EXAMPLES, migration 2. END_TO_END, to FSDP, has a unit for each block."""
        units = ModuleWrapPolicy({Block})
        for options in ({}, {"auto_wrap_policy": units}):
            after = self.fsdp(Transformer, **options)
            self.assertSameLosses(self.single(Transformer), after)

    def test_adamw_to_muon(self):
        """EXAMPLES, migration 3, under FSDP: the loop stays; the learning rate does not."""
        model, group = FSDP(MLP(), device_id=CPU), dist.group.WORLD
        first = loss_of_first_batch(model)
        adamw = AdamW(model.parameters(), lr=0.001)
        for inputs, targets in batches(group):
            mse_loss(model(inputs), targets).backward()
            adamw.step()
            adamw.zero_grad()
        self.assertLess(loss_of_first_batch(model), first)

        model = FSDP(MLP(), device_id=CPU)
        config = create_auto_config(fsdp_process_group=group)
        self.check(MLP(), model, config, fsdp=group, data=[group])
        self.assertLess(loss_of_first_batch(model), first)

    def test_groups_to_dtensor(self):
        """EXAMPLES, migration 4: from FSDP1 with its group to ``fully_shard`` without one."""
        model, data = fully_shard(MLP()), [dist.group.WORLD]
        after = self.check(MLP(), model, create_dtensor_config(), data=data)
        self.assertSameLosses(self.fsdp(MLP), after)

    def test_ddp_to_dtensor(self):
        """EXAMPLES, migration 5: from DDP to replicated DTensors."""
        world = dist.group.WORLD
        config = create_auto_config(ddp_process_group=world)
        before = self.check(MLP(), DDP(MLP()), config, data=[world])
        # The batch is a DTensor too: each rank has a slice of it.
        self.assertSameLosses(before, self.dtensors(Replicate(), Shard(0)))

    def test_fsdp_to_tp_and_fsdp(self):
        """END_TO_END, from FSDP to TP x FSDP."""
        # The plan says which dimension of which weight TP cuts.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = mesh.get_all_groups()
        model = parallelize(Transformer(), mesh["tp"])
        model = FSDP(model, device_mesh=mesh["fsdp"], device_id=CPU)
        config = create_auto_config(fsdp_process_group=fsdp, tp_process_group=tp)
        how = {"fsdp": fsdp, "tp": tp, "data": [fsdp]}
        after = self.check(Transformer(), model, config, **how)
        self.assertSameLosses(self.fsdp(Transformer), after)

    def test_own_functions_to_auto_config(self):
        """END_TO_END, from a user's own functions to two groups."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = mesh.get_all_groups()
        tp_dims = dict(enumerate([0, 1, 0, 1] * 2))

        def my_assign(params, state):
            return {rank: list(range(rank, len(params), 4)) for rank in range(4)}

        def my_gather(piece, rank, state):
            # FSDP cut the pieces of TP, so its pieces are joined first.
            whole, dim = piece, tp_dims[state["current_param_idx"]]
            for group, along in ((fsdp, 0), (tp, dim)):
                parts = [torch.empty_like(whole) for _ in range(group.size())]
                dist.all_gather(parts, whole.contiguous(), group=group)
                whole = torch.cat(parts, along)
            return whole

        def my_redistribute(update, rank, state):
            dist.broadcast(update, src=rank)  # more than every rank needs
            dim = tp_dims[state["current_param_idx"]]
            piece = update.chunk(tp.size(), dim)[tp.rank()]
            return piece.chunk(fsdp.size())[fsdp.rank()]

        groups = {"fsdp_process_group": fsdp, "tp_process_group": tp}
        how = {"fsdp": fsdp, "tp": tp, "data": [fsdp]}
        before, after = (
            self.check(
                Transformer(), cut_linears(Transformer(), tp, fsdp=fsdp), config, **how
            )
            for config in (
                DistributedConfig(my_assign, my_gather, my_redistribute, state={}),
                create_auto_config(tp_dim_per_param=tp_dims, **groups),
            )
        )
        self.assertSameLosses(before, after)


if __name__ == "__main__":
    run_tests()
