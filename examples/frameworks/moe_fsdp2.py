"""A mixture of experts of transformers under FSDP2: stacks of experts, with gate and up in one weight.

    torchrun --nproc-per-node 2 examples/frameworks/moe_fsdp2.py

Each expert is a matrix of a stack (experts, rows, columns). FSDP2 shards the rows of all experts
instead of whole experts, so that all ranks take part in the exchange and own matrices.
"""

import torch
import torch.distributed as dist
from tiny import moe, train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import AdamW
from torch.optim.muon import Muon, partition_named_parameters, split_of


def rows_of_experts(param: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 3 else None


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    model = moe()
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=rows_of_experts)
    fully_shard(model)

    groups, others = partition_named_parameters(
        model, split=split_of(model), allow_batched_matrices=True
    )
    muon = Muon(
        groups,
        lr=3e-3,
        adjust_lr_fn="match_rms_adamw",
        allow_batched_matrices=True,
        distributed_config="auto",
    )
    adamw = AdamW(others, lr=3e-3)
    train(model, (muon, adamw))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
