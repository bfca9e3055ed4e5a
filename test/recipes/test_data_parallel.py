"""Recipes for FSDP, DDP, HSDP and context parallelism."""

import torch.distributed as dist
from recipes.common import average, CPU, MLP, Recipe, Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_named_parameters,
)
from torch.testing._internal.common_utils import run_tests


class TestFSDP(Recipe):
    def test_flat(self):
        """EXAMPLES 1, END_TO_END FSDP: all parameters are matrices of one flat parameter."""
        model = FSDP(Transformer(), device_id=CPU)
        group = model.process_group
        config = create_auto_config(fsdp_process_group=group)
        muon = Muon(
            model.parameters(), lr=0.01, momentum=0.95, distributed_config=config
        )
        self.compare(Transformer(), model, muon, fsdp=group, data=[group])

    def test_with_biases(self):
        """EXAMPLES 1: matrices for Muon and biases for AdamW in one unit."""
        model = FSDP(MLP(bias=True), device_id=CPU, use_orig_params=True)
        group = model.process_group
        matrices, others = partition_named_parameters(model)
        config = create_auto_config(fsdp_process_group=group, module=model)
        muon = Muon(matrices, lr=0.01, distributed_config=config)
        one = MLP(bias=True)
        self.compare(one, model, muon, others=others, fsdp=group, data=[group])

    def test_strategies(self):
        """END_TO_END, FSDP with a sharding strategy."""
        group = dist.group.WORLD
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            model = FSDP(MLP(), sharding_strategy=strategy, device_id=CPU)
            config = create_auto_config(fsdp_process_group=group)
            muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
            self.compare(MLP(), model, muon, fsdp=group, data=[group])

    def test_fsdp2(self):
        """EXAMPLES 1, END_TO_END FSDP, with ``fully_shard``."""
        model = Transformer()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        config = create_dtensor_config()
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(Transformer(), model, muon, data=[dist.group.WORLD])

    def test_settings(self):
        """EXAMPLES, settings for debugging, production and many parameters: the same bits."""
        group = dist.group.WORLD
        for parallel, ahead in ((False, 0), (True, 1), (True, 2)):
            model = FSDP(Transformer(), process_group=group, device_id=CPU)
            config = create_auto_config(
                fsdp_process_group=group,
                async_gpu_parallelism=parallel,
                prefetch_count=ahead,
            )
            muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
            self.compare(Transformer(), model, muon, fsdp=group, data=[group])


class TestDDP(Recipe):
    def test_unconfigured(self):
        """END_TO_END, DDP without a config: every rank orthogonalizes every matrix."""
        model = DDP(Transformer())
        muon = Muon(model.parameters(), lr=0.01, momentum=0.95)
        world = dist.group.WORLD
        self.compare(Transformer(), model, muon, data=[world], once=False)

    def test_shared_out(self):
        """EXAMPLES 2: the replicas share the matrices."""
        model = DDP(Transformer())
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(Transformer(), model, muon, data=[dist.group.WORLD])

    def test_by_another_name(self):
        """END_TO_END, DDP with ``cp_process_group``, whose ranks hold replicas too."""
        model = DDP(Transformer())
        config = create_auto_config(cp_process_group=dist.group.WORLD)
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(Transformer(), model, muon, data=[dist.group.WORLD])

    def test_context_parallel(self):
        """END_TO_END, context parallelism: ranks see different parts of each sequence."""
        group = dist.group.WORLD
        model = Transformer()
        for layer in model.layers:
            layer.attention.context = group
        config = create_auto_config(cp_process_group=group)
        muon = Muon(model.parameters(), lr=1e-3, distributed_config=config)

        def backward(*sequences):
            inputs, targets = (
                s.chunk(group.size(), 1)[group.rank()] for s in sequences
            )
            mse_loss(model(inputs), targets).backward()
            average(model.parameters(), group)  # the sum alone would be too large

        self.compare(Transformer(), model, muon, backward=backward)


class TestHSDP(Recipe):
    def check(self, model, config, shard, replicate):
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        data = [shard, replicate]
        self.compare(Transformer(), model, muon, fsdp=shard, data=data)

    def test_two_groups(self):
        """EXAMPLES 6: FSDP within nodes, DDP across nodes."""
        nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        fsdp, ddp = nodes.get_group("fsdp"), nodes.get_group("ddp")
        hybrid = ShardingStrategy.HYBRID_SHARD
        model = FSDP(
            Transformer(), sharding_strategy=hybrid, device_mesh=nodes, device_id=CPU
        )
        config = create_auto_config(fsdp_process_group=fsdp, ddp_process_group=ddp)
        self.check(model, config, fsdp, ddp)

    def test_hybrid_shard(self):
        """END_TO_END, HSDP: the groups go to FSDP and to Muon."""
        nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        replicate, shard = nodes.get_all_groups()
        model = FSDP(
            Transformer(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            process_group=(shard, replicate),
            device_id=CPU,
        )
        config = create_auto_config(
            shard_process_group=shard, replicate_process_group=replicate
        )
        self.check(model, config, shard, replicate)

    def test_fsdp2(self):
        """EXAMPLES 6, END_TO_END HSDP, with ``fully_shard``: the mesh says it all."""
        nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        replicate, shard = nodes.get_all_groups()
        model = fully_shard(Transformer(), mesh=nodes)
        self.check(model, create_dtensor_config(), shard, replicate)


if __name__ == "__main__":
    run_tests()
