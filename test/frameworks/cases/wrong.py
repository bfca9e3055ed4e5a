"""One process moves one element of a matrix otherwise, under FSDP1 or FSDP2: ``wrong.py 1|2 BY``."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.optim import Muon
from torch.optim.muon import create_auto_config


class Wrong(Muon):
    by = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        if dist.get_rank() == 1:
            param = self.param_groups[0]["params"][0]
            getattr(param, "_local_tensor", param).view(-1)[0] += self.by


def main(version, by):
    dist.init_process_group("gloo")
    Wrong.by = by
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5, bias=False)
    if version == "1":
        model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
        group = model.process_group
        config = create_auto_config(fsdp_process_group=group, module=model)
    else:
        fully_shard(model)
        config = "auto"
    muon = Wrong(model.parameters(), distributed_config=config)
    for inputs in torch.randn(2, 3, 6):
        model(inputs).square().sum().backward()
        muon.step()
        muon.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
