"""Recipes for mixtures of experts and for pipelines. Muon never communicates over EP or PP groups."""

import torch.distributed as dist
from recipes.common import average, CPU, MoE, parallelize, Recipe, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.functional import mse_loss
from torch.optim.muon import create_auto_config, detect_tp_dims_from_model
from torch.testing._internal.common_utils import run_tests


def numbers_of(model, matrices):
    """The id of the expert of each parameter, by its index in ``matrices``."""
    experts = model.experts.items()
    number = {p: int(n) for n, expert in experts for p in expert.parameters()}
    return {i: number[p] for i, p in enumerate(matrices) if p in number}


def divide(model, count):
    """Makes the gradients of the experts those of the mean over ``count`` ranks' losses."""
    for p in model.experts.parameters():
        if p.grad is not None:
            p.grad.div_(count)


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in it."""

    def __init__(self, model, stage, stages):
        super().__init__()
        each = len(model.layers) // stages
        here = range(stage * each, (stage + 1) * each)
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in here})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def backward_of(model, pp, count):
    """The backward pass of the 1F1B schedule."""
    part = PipelineStage(model, pp.rank(), pp.size(), device=CPU, group=pp)
    schedule = Schedule1F1B(part, n_microbatches=count, loss_fn=mse_loss)

    def backward(inputs, targets):
        first = (inputs,) if part.is_first else ()
        schedule.step(*first, target=targets if part.is_last else None)

    return backward


class TestExpertsAndStages(Recipe):
    def test_independent(self):
        """END_TO_END, experts: each rank's experts are its own, without a config."""
        ep = dist.group.WORLD
        model = MoE(ep)

        def after():
            average(model.router.parameters(), ep)
            divide(model, ep.size())

        # Without a config, every rank orthogonalizes the router.
        self.check(MoE(), model, None, data=[ep], after=after, once=False)

    def test_with_replicas(self):
        """EXAMPLES 7: two replicas of each expert, and four of the router."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        dp, ep = mesh.get_all_groups()
        model = MoE(ep)
        config = create_auto_config(
            ep_process_group=ep,
            # Ranks that name another expert hold no replica of this one.
            ddp_process_group=dist.group.WORLD,
            expert_assignments=numbers_of(model, list(model.parameters())),
        )

        def after():
            average(model.router.parameters(), dist.group.WORLD)
            average(model.experts.parameters(), dp, mesh.size())

        self.check(MoE(), model, config, data=[dp, ep], after=after)

    def test_sharded_experts(self):
        """EXAMPLES 7b: FSDP shards each expert over the ranks that share it."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
        fsdp, ep = mesh.get_all_groups()
        model = MoE(ep)
        for number, expert in model.experts.items():
            model.experts[number] = FSDP(expert, process_group=fsdp, device_id=CPU)
        matrices = list(model.experts.parameters())  # one flat parameter per expert
        config = create_auto_config(
            ep_process_group=ep,
            fsdp_process_group=fsdp,
            expert_assignments=numbers_of(model, matrices),
        )

        def after():
            average(model.router.parameters(), dist.group.WORLD)
            divide(model, ep.size())  # FSDP averages over its own group

        how = {"fsdp": fsdp, "data": [fsdp, ep], "after": after}
        how["others"] = list(model.router.parameters())
        self.check(MoE(), model, config, matrices, **how)

    def test_tensor_parallel(self):
        """END_TO_END, experts x TP: a TP pair for each expert, and a config for TP, not for EP."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        ep, tp = mesh.get_all_groups()
        model = MoE(ep)
        for expert in model.experts.values():
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
            parallelize_module(expert, mesh["tp"], plan)
        matrices = list(model.experts.parameters())
        tp_dims = detect_tp_dims_from_model(matrices)
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=tp_dims)

        def after():
            average(model.router.parameters(), ep)
            divide(model, ep.size())

        how = {"others": list(model.router.parameters()), "after": after}
        self.check(MoE(), model, config, matrices, data=[ep], **how)

    def test_four_stages(self):
        """END_TO_END, pipeline: 1F1B over four stages of one process each."""
        pp = dist.group.WORLD
        stage, stages = pp.rank(), pp.size()
        model = Stage(Transformer(layers=stages), stage, stages)
        config = create_auto_config(
            pp_process_group=pp, pp_stage_id=stage, pp_num_stages=stages
        )
        backward = backward_of(model, pp, 8)
        self.check(Transformer(layers=stages), model, config, backward=backward)


class TestFourDimensions(Recipe):
    world_size = 16

    def test_four_dimensions(self):
        """END_TO_END, PP + TP + HSDP: two stages x two replicas x two shards x TP pairs."""
        names = ("pp", "replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names)
        pp, replicate, shard, tp = mesh.get_all_groups()
        model = parallelize(Stage(Transformer(), pp.rank(), 2), mesh["tp"])
        # With Schedule1F1B, the backward pass of FSDP1's first stage failed.
        fully_shard(model, mesh=mesh["replicate", "shard"])
        config = create_auto_config(
            pp_process_group=pp,
            pp_stage_id=pp.rank(),
            pp_num_stages=2,
            tp_process_group=tp,
            tp_dim_per_param=detect_tp_dims_from_model(model),
            shard_process_group=shard,
            replicate_process_group=replicate,
        )
        data, backward = [replicate, shard], backward_of(model, pp, 4)
        self.check(Transformer(), model, config, data=data, backward=backward)


if __name__ == "__main__":
    run_tests()
