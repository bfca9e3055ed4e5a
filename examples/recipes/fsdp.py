"""FullyShardedDataParallel (FSDP1), and fully_shard (FSDP2)."""

import torch.distributed as dist
from models import batches, MLP, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.nn import functional as F
from torch.optim import AdamW, Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_parameters,
)


@recipe(processes=4)
def flat() -> OneProcess:
    """All parameters are matrices: one flat parameter may hold them all."""
    model = FSDP(Transformer(), device_id=device())

    config = create_auto_config(fsdp_process_group=model.process_group)
    optimizer = Muon(
        model.parameters(), lr=0.01, momentum=0.95, distributed_config=config
    )

    alone = OneProcess(
        Transformer().to(device()), model, optimizer, fsdp=model.process_group
    )
    for inputs, targets in batches(model.process_group):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return alone


@recipe(processes=4)
def with_biases() -> OneProcess:
    """Matrices are Muon's and biases AdamW's, so they must not be one flat parameter."""
    model = FSDP(MLP(bias=True), device_id=device(), use_orig_params=True)

    matrices, others = partition_parameters(model)
    # Only the model knows which slices of the flat parameter these are.
    config = create_auto_config(fsdp_process_group=model.process_group, module=model)
    muon = Muon(matrices, lr=0.01, distributed_config=config)
    adamw = AdamW(others, lr=1e-3)

    alone = OneProcess(
        MLP(bias=True).to(device()), model, muon, fsdp=model.process_group
    )
    for inputs, targets in batches(model.process_group):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return alone


@recipe(processes=4)
def strategies() -> tuple[OneProcess, ...]:
    """What FSDP frees between forward and backward is nothing to Muon."""
    proofs = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FSDP(MLP(), sharding_strategy=strategy, device_id=device())

        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

        one = MLP().to(device())
        proofs.append(OneProcess(one, model, optimizer, fsdp=model.process_group))
        for inputs, targets in batches(dist.group.WORLD):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return tuple(proofs)


@recipe(processes=4)
def fsdp2() -> OneProcess:
    """The same with ``fully_shard``, a unit for each block."""
    model = Transformer().to(device())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    optimizer = Muon(
        model.parameters(), lr=0.01, distributed_config=create_dtensor_config()
    )

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    for inputs, targets in batches(dist.group.WORLD):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return alone
