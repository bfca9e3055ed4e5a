"""Recipes for tensor parallelism, alone and under FSDP, HSDP and DDP.

TP cuts first, and FSDP cuts the rows of TP's pieces.
"""

import torch.distributed as dist
from recipes.common import average, CPU, cut_linears, parallelize, Recipe, Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal.common_utils import run_tests


# layers.0.attention.qkv_proj, layers.0.attention.out_proj, layers.0.ffn.w1, and so on
BY_INDEX = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1}


class TestTensorParallel(Recipe):
    def test_by_parameter(self):
        """EXAMPLES 3: weights cut by hand, some along dimension 0 and some along 1. The marks of
        frameworks say them: EXAMPLES, TP dimensions from the model."""
        tp = dist.group.WORLD
        model = cut_linears(Transformer(), tp)  # which sets ``tp_dim``
        found = detect_tp_dims_from_model(model)
        self.assertEqual(found, BY_INDEX)
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=found)
        self.check(Transformer(), model, config, tp=tp)

    def test_one_dimension(self):
        """EXAMPLES 4: one dimension for all."""
        tp = dist.group.WORLD
        model = Transformer()
        for layer in model.layers:
            cut_linears(layer.ffn, tp, dim=1)
        matrices = [p for layer in model.layers for p in layer.ffn.parameters()]
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=1)
        how = {"tp": tp, "tp_dims": {"w1": 1, "w2": 1}}
        self.check(Transformer(), model, config, matrices, **how)

    def test_by_plan(self):
        """END_TO_END, TP: ``parallelize_module`` makes DTensors."""
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize(Transformer(), mesh)
        config = create_auto_config(
            tp_process_group=mesh.get_group(),
            tp_dim_per_param=detect_tp_dims_from_model(model),
        )
        self.check(Transformer(), model, config)

    def test_two_optimizers(self):
        """END_TO_END, mixed dimensions: one Muon for each. A dict of dimensions needs only one."""
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize(Transformer(), mesh)
        group, muons = mesh.get_group(), []
        for dim in (0, 1):
            params = [p for i, p in enumerate(model.parameters()) if BY_INDEX[i] == dim]
            config = create_auto_config(tp_process_group=group, tp_shard_dim=dim)
            muons.append(Muon(params, lr=1e-3, distributed_config=config))
        self.compare(Transformer(), model, *muons)

    def grid(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        return mesh, *mesh.get_all_groups()

    def test_fsdp1_over_plan(self):
        """END_TO_END, TP + FSDP, and from FSDP: FSDP1 knows the plan by its mesh, and tells Muon."""
        mesh, fsdp, tp = self.grid()
        for orig in (False, True):
            model = parallelize(Transformer(), mesh["tp"])
            options = {"device_mesh": mesh["fsdp"], "device_id": CPU}
            model = FSDP(model, use_orig_params=orig, **options)
            source = {"module": model} if orig else {"fsdp_process_group": fsdp}
            config = create_auto_config(tp_process_group=tp, **source)
            self.check(Transformer(), model, config, fsdp=fsdp, tp=tp, data=[fsdp])

    def test_fsdp2_over_plan(self):
        """EXAMPLES 5, END_TO_END TP + FSDP, with ``fully_shard`` and without groups."""
        mesh, fsdp, _ = self.grid()
        model = parallelize(Transformer(), mesh["tp"])
        model = fully_shard(model, mesh=mesh["fsdp"])
        self.check(Transformer(), model, create_dtensor_config(), data=[fsdp])

    def test_settings(self):
        """EXAMPLES 5, PROJECT process groups: weights cut by hand, under FSDP1, with EXAMPLES' settings
        for debugging, production and many parameters: the same bits."""
        _, fsdp, tp = self.grid()
        for parallel, ahead in ((False, 0), (True, 1), (True, 2)):
            model = cut_linears(Transformer(), tp)
            # A flat parameter has one dimension that TP cuts, and these have two.
            model = FSDP(model, process_group=fsdp, device_id=CPU, use_orig_params=True)
            config = create_auto_config(
                fsdp_process_group=fsdp,
                tp_process_group=tp,
                tp_dim_per_param=BY_INDEX,
                async_gpu_parallelism=parallel,
                prefetch_count=ahead,
                module=model,
            )
            self.check(Transformer(), model, config, fsdp=fsdp, tp=tp, data=[fsdp])


class TestThreeDimensions(Recipe):
    world_size = 8

    def test_tp_hsdp(self):
        """END_TO_END, TP + HSDP."""
        names = ("replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        replicate, shard, tp = mesh.get_all_groups()
        model = FSDP(
            parallelize(Transformer(), mesh["tp"]),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh["replicate", "shard"],
            device_id=CPU,
        )
        config = create_auto_config(
            tp_process_group=tp,
            shard_process_group=shard,
            replicate_process_group=replicate,
        )
        how = {"fsdp": shard, "tp": tp, "data": [shard, replicate]}
        self.check(Transformer(), model, config, **how)

    def test_three_groups(self):
        """EXAMPLES 8: FSDP, TP and DDP, each with a group of its own."""
        names = ("ddp", "fsdp", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        ddp, fsdp, tp = mesh.get_all_groups()
        model = cut_linears(Transformer(), tp)
        model = FSDP(model, process_group=fsdp, device_id=CPU, use_orig_params=True)
        config = create_auto_config(
            fsdp_process_group=fsdp,
            tp_process_group=tp,
            ddp_process_group=ddp,
            tp_dim_per_param=BY_INDEX,
            prefetch_count=2,
            module=model,
        )

        def after():  # FSDP averages over its own group. A rank has none of some matrices.
            average([p for p in model.parameters() if p.grad is not None], ddp)

        how = {"fsdp": fsdp, "tp": tp, "data": [fsdp, ddp], "after": after}
        self.check(Transformer(), model, config, **how)


if __name__ == "__main__":
    run_tests()
