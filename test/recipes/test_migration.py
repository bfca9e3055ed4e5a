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
from torch.optim import AdamW, Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests


def train(model, optimizer, *groups):
    losses = []
    for inputs, targets in batches(*groups):
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def loss_of_first_batch(model):
    inputs, targets = batch(0)
    return mse_loss(model(inputs), targets).item()


class TestMigration(Recipe):
    def muon(self, model, config=None, lr=0.01):
        return Muon(model.parameters(), lr=lr, distributed_config=config)

    def assertSameLosses(self, before, after):
        # Gradients round otherwise, and so the losses are not equal to the last bit.
        self.assertEqual(before, after, rtol=1e-3, atol=0)

    def test_one_process_to_dtensor(self):
        """EXAMPLES, migration 1."""
        model = MLP()
        before = train(model, self.muon(model))

        # Parameters and inputs become DTensors, and the optimizer gets a config.
        mesh = init_device_mesh("cpu", (4,))
        model = place_weights(MLP(), mesh, [Shard(0)])
        muon = self.muon(model, create_dtensor_config())
        backward = placed_backward(model, mesh, [Replicate()])
        after = self.compare(MLP(), model, muon, backward=backward)
        self.assertSameLosses(before, after)

    def test_one_process_to_fsdp(self):
        """EXAMPLES, migration 2."""
        model = Transformer()
        before = train(model, self.muon(model))

        model = FSDP(Transformer(), device_id=CPU)
        group = model.process_group
        muon = self.muon(model, create_auto_config(fsdp_process_group=group))
        after = self.compare(Transformer(), model, muon, fsdp=group, data=[group])
        self.assertSameLosses(before, after)

    def test_one_process_to_fsdp_units(self):
        """END_TO_END, to FSDP, with a unit for each block."""
        model = Transformer()
        before = train(model, self.muon(model, lr=1e-3))

        group, units = dist.group.WORLD, ModuleWrapPolicy({Block})
        model = FSDP(Transformer(), auto_wrap_policy=units, device_id=CPU)
        config = create_auto_config(fsdp_process_group=group)
        muon = self.muon(model, config, lr=1e-3)
        after = self.compare(Transformer(), model, muon, fsdp=group, data=[group])
        self.assertSameLosses(before, after)

    def test_adamw_to_muon(self):
        """EXAMPLES, migration 3, under FSDP: the loop stays; the learning rate does not."""
        model = FSDP(MLP(), device_id=CPU)
        group = model.process_group
        first = loss_of_first_batch(model)
        train(model, AdamW(model.parameters(), lr=0.001), group)
        self.assertLess(loss_of_first_batch(model), first)

        model = FSDP(MLP(), device_id=CPU)
        muon = self.muon(model, create_auto_config(fsdp_process_group=group))
        self.compare(MLP(), model, muon, fsdp=group, data=[group])
        self.assertLess(loss_of_first_batch(model), first)

    def test_groups_to_dtensor(self):
        """EXAMPLES, migration 4: from FSDP1 with its group to ``fully_shard`` without one."""
        model = FSDP(MLP(), device_id=CPU)
        group = model.process_group
        muon = self.muon(model, create_auto_config(fsdp_process_group=group))
        before = self.compare(MLP(), model, muon, fsdp=group, data=[group])

        model = fully_shard(MLP())
        muon = self.muon(model, create_dtensor_config())
        after = self.compare(MLP(), model, muon, data=[dist.group.WORLD])
        self.assertSameLosses(before, after)

    def test_ddp_to_dtensor(self):
        """EXAMPLES, migration 5: from DDP to replicated DTensors."""
        model, world = DDP(MLP()), dist.group.WORLD
        muon = self.muon(model, create_auto_config(ddp_process_group=world))
        before = self.compare(MLP(), model, muon, data=[world])

        # The batch is a DTensor too: each rank has a slice of it.
        mesh = init_device_mesh("cpu", (4,))
        model = place_weights(MLP(), mesh, [Replicate()])
        muon = self.muon(model, create_dtensor_config())
        backward = placed_backward(model, mesh, [Shard(0)])
        after = self.compare(MLP(), model, muon, backward=backward)
        self.assertSameLosses(before, after)

    def test_fsdp_to_tp_and_fsdp(self):
        """END_TO_END, from FSDP to TP x FSDP."""
        fsdp = dist.group.WORLD
        model = FSDP(Transformer(), process_group=fsdp, device_id=CPU)
        muon = self.muon(model, create_auto_config(fsdp_process_group=fsdp))
        before = self.compare(Transformer(), model, muon, fsdp=fsdp, data=[fsdp])

        # The plan says which dimension of which weight TP cuts.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = mesh.get_all_groups()
        model = parallelize(Transformer(), mesh["tp"])
        model = FSDP(model, device_mesh=mesh["fsdp"], device_id=CPU)
        config = create_auto_config(fsdp_process_group=fsdp, tp_process_group=tp)
        muon = self.muon(model, config)
        after = self.compare(Transformer(), model, muon, fsdp=fsdp, tp=tp, data=[fsdp])
        self.assertSameLosses(before, after)

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

        losses = []
        for config in (
            DistributedConfig(my_assign, my_gather, my_redistribute, state={}),
            create_auto_config(
                fsdp_process_group=fsdp, tp_process_group=tp, tp_dim_per_param=tp_dims
            ),
        ):
            model = cut_linears(Transformer(), tp, fsdp=fsdp)
            muon, one = self.muon(model, config), Transformer()
            losses.append(self.compare(one, model, muon, fsdp=fsdp, tp=tp, data=[fsdp]))
        self.assertSameLosses(*losses)


if __name__ == "__main__":
    run_tests()
