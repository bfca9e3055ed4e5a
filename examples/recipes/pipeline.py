"""Pipeline parallelism: each stage has its own layers, and a Muon of its own for them."""

import torch.distributed as dist
from models import batches, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from tensor_parallel import parallelize_layer
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import create_auto_config, detect_tp_dims_from_model


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in it."""

    def __init__(self, model: Transformer, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.layers) // stages
        here = range(stage * each, (stage + 1) * each)
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in here})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@recipe(processes=4)
def four_stages() -> OneProcess:
    """The 1F1B schedule over four stages of one process each."""
    pp_pg = dist.group.WORLD
    stage, stages = pp_pg.rank(), pp_pg.size()
    model = Stage(Transformer(layers=stages).to(device()), stage, stages)

    # Stages share no matrix. Their group is noted, and nothing is sent over it.
    config = create_auto_config(
        pp_process_group=pp_pg, pp_stage_id=stage, pp_num_stages=stages
    )
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    part = PipelineStage(model, stage, stages, device=device(), group=pp_pg)
    schedule = Schedule1F1B(part, n_microbatches=8, loss_fn=F.mse_loss)
    one = Transformer(layers=stages).to(device())
    alone = OneProcess(one, model, optimizer)
    for inputs, targets in batches():
        optimizer.zero_grad()
        first = (inputs,) if part.is_first else ()
        schedule.step(*first, target=targets if part.is_last else None)
        optimizer.step()
    return alone


@recipe(processes=16)
def four_dimensions() -> OneProcess:
    """Pipeline stages x replicas x shards x tensor parallelism, two of each."""
    mesh = init_device_mesh(
        device().type, (2, 2, 2, 2), mesh_dim_names=("pp", "replicate", "shard", "tp")
    )
    pp_pg, replicate_pg, shard_pg, tp_pg = mesh.get_all_groups()
    stage, stages = pp_pg.rank(), pp_pg.size()
    model = Stage(Transformer().to(device()), stage, stages)
    for layer in model.layers.values():
        parallelize_layer(layer, mesh["tp"])
    # With Schedule1F1B the backward of FSDP1's first stage failed; fully_shard works.
    fully_shard(model, mesh=mesh["replicate", "shard"])

    # The parameters are DTensors: what is said here has to agree with them.
    matrices = list(model.parameters())
    config = create_auto_config(
        pp_process_group=pp_pg,
        pp_stage_id=stage,
        pp_num_stages=stages,
        tp_process_group=tp_pg,
        tp_dim_per_param=detect_tp_dims_from_model(matrices),
        shard_process_group=shard_pg,
        replicate_process_group=replicate_pg,
    )
    optimizer = Muon(matrices, lr=1e-3, distributed_config=config)

    part = PipelineStage(model, stage, stages, device=device(), group=pp_pg)
    schedule = Schedule1F1B(part, n_microbatches=4, loss_fn=F.mse_loss)
    alone = OneProcess(Transformer().to(device()), model, optimizer)
    for inputs, targets in batches(replicate_pg, shard_pg):
        optimizer.zero_grad()
        first = (inputs,) if part.is_first else ()
        schedule.step(*first, target=targets if part.is_last else None)
        optimizer.step()
    return alone
