# Owner(s): ["module: optimizer"]
"""DTensors and models under Muon's distributed_config, on one rank."""

import contextlib
import unittest
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
    partition_named_parameters,
    partition_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    MuonTestCase,
    local_config,
)


if dist.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
    from torch.distributed.tensor import (
        DeviceMesh,
        distribute_tensor,
        DTensor,
        Replicate,
        Shard,
    )


class TestModels(MuonTestCase):
    def test_partition_parameters(self):
        model = nn.Sequential(
            nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3)
        )
        tied = nn.Sequential(*model, nn.Linear(3, 5, bias=False))
        tied[-1].weight = tied[0].weight
        for one in (model, tied):
            matrices, others = partition_parameters(one)
            self.assertEqual([tuple(p.shape) for p in matrices], [(5, 3), (4, 3)])
            self.assertEqual([p.ndim for p in others], [1, 1, 1, 3, 1])
            self.assertEqual({*matrices, *others}, {*model.parameters()})
            Muon(matrices)

    def test_detect_tp_dims(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
        model[0].weight.tp_dim = 1
        model[1].weight.partition_dim = 1
        # Without a mark, dimension 0 is a guess, and a warning says so.
        with self.assertWarnsRegex(UserWarning, r"parameters \[1\];.*0 is a guess"):
            self.assertEqual(detect_tp_dims_from_model(model), {0: 1, 1: 0, 2: 1})
        params = [model[1].weight, model[0].weight]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(detect_tp_dims_from_model(iter(params)), {0: 1, 1: 1})
            # Megatron's mark of a weight that it does not cut.
            model[1].weight.partition_dim = -1
            self.assertEqual(detect_tp_dims_from_model(params), {1: 1})

    def test_parameters_without_data(self):
        """Parameters on the meta device, and fake ones, as torch.export makes them."""
        mode = FakeTensorMode()
        meta = nn.Parameter(torch.empty(3, 4, device="meta"))
        fake = nn.Parameter(mode.from_tensor(torch.ones(3, 4)))
        configs = (None, create_dtensor_config(), create_auto_config(), local_config())
        for param in (meta, fake):
            for config in configs if param is meta else (None, local_config()):
                with mode if param is fake else contextlib.nullcontext():
                    param.grad = torch.empty_like(param)
                    optimizer = Muon([param], distributed_config=config)
                    optimizer.step()
                buffer = optimizer.state[param]["momentum_buffer"]
                self.assertIs(type(buffer), type(param.data))
                self.assertEqual(buffer.device, param.device)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDTensorsOnOneRank(MuonTestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = DeviceMesh("cpu", [0])

    def test_round_trip(self):
        params = [
            distribute_tensor(torch.randn(5, 3), self.mesh, [placement])
            for placement in (Shard(0), Shard(1), Replicate())
        ]
        for make in (create_dtensor_config, create_auto_config):
            config = make()
            config.assign_fn(params, config.state)
            for index, param in enumerate(params):
                config.state["current_param_idx"] = index
                full = config.gather_fn(param, 0, config.state)
                self.assertNotIsInstance(full, DTensor)
                piece = config.redistribute_fn(full, 0, config.state)
                self.assertEqual(piece.placements, param.placements)
                self.assertEqual(piece.shape, param.shape)
                self.assert_same_bits([piece.to_local()], [param.to_local()])
            with self.assertRaisesRegex(ValueError, "given None outside of step"):
                config.redistribute_fn(None, 0, config.state)
            vector = distribute_tensor(torch.ones(3), self.mesh, [Shard(0)])
            with self.assertRaisesRegex(ValueError, "only supports 2D"):
                config.assign_fn([vector], config.state)

    def test_detect_tp_dims_of_dtensors(self):
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
        rows, columns, whole = Shard(0), Shard(1), Replicate()
        placed = (rows, columns), (columns, rows), (whole, Shard(-1)), (columns, whole)
        params = [
            distribute_tensor(torch.randn(4, 6), mesh, placements)
            for placements in (*placed, (whole, whole))
        ]
        with self.assertWarnsRegex(UserWarning, r"parameters \[5\];"):
            found = detect_tp_dims_from_model([*params, torch.randn(2, 2)])
        self.assertEqual(found, {0: 1, 1: 0, 2: 1, 3: 1, 5: 0})

    def test_partition_named_parameters(self):
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(5, 3),
                "tied": nn.Linear(3, 5, bias=False),
                "positions": nn.Embedding(6, 3),
                "hidden": nn.Linear(3, 4),
                "router": nn.Linear(3, 2, bias=False),
                "conv": nn.Conv1d(4, 2, 3, bias=False),
                "lm_head": nn.Linear(3, 5, bias=False),
            }
        )
        model["tied"].weight = model["embedding"].weight
        # FSDP2 changes the types of modules, and FSDP1 their names.
        fully_shard(model["positions"])
        device = torch.device("cpu")
        model["hidden"] = FSDP(model["hidden"], device_id=device, use_orig_params=True)
        options = {"exclude": ["rout*"], "verbose": True}
        with mock.patch("builtins.print") as said:
            matrices, others = partition_named_parameters(model, **options)
        self.assertEqual([name for name, _ in matrices], ["hidden.weight"])
        rest = ["embedding", "positions", "hidden.bias", "router", "conv", "lm_head"]
        for start, (name, _) in zip(rest, others, strict=True):
            self.assertTrue(name.startswith(start), name)
        self.assertEqual({p for _, p in matrices + others}, {*model.parameters()})
        lines = [call.args[0].rpartition("> ")[2] for call in said.call_args_list]
        first, last = ["embedding"] * 2, ["1D", "excluded", "3D", "output head"]
        words = [line.removeprefix("rest: ") for line in lines]
        self.assertEqual(words, [*first, "Muon", *last])

    def test_flat_parameter_of_an_embedding_and_a_matrix(self):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        with self.assertRaisesRegex(ValueError, "mixes matrices for Muon with others"):
            partition_named_parameters(FSDP(model, device_id=torch.device("cpu")))

    def test_flat_parameters_with_splits(self):
        def layers():
            return (nn.MultiheadAttention(4, 2, bias=False) for _ in range(2))

        device, kinds = torch.device("cpu"), ("in_proj_weight", "out_proj.weight")
        names = [f"{i}.{kind}" for i in (0, 1) for kind in kinds]
        for use_orig_params in (False, True):
            options = {"device_id": device, "use_orig_params": use_orig_params}
            model = FSDP(nn.Sequential(*layers()), **options)
            splits = split_of(model)
            self.assertEqual(splits, dict.fromkeys(names[::2], (4, 4, 4)))
            if not use_orig_params:
                with self.assertRaisesRegex(ValueError, "or such of different splits"):
                    partition_named_parameters(model, split=splits)
                same = {"*in_proj_weight": (8, 4), "*out_proj.weight": [8, 4]}
                ((group,), _) = partition_named_parameters(model, split=same)
                self.assertEqual(group["split"], (8, 4))
                continue
            fused, whole = partition_named_parameters(model, split=splits)[0]
            self.assertEqual([name for name, _ in fused["params"]], names[::2])
            self.assertEqual([name for name, _ in whole["params"]], names[1::2])

    def test_splits_of_wrapped_layers(self):
        model = nn.Sequential(*(nn.MultiheadAttention(4, 2) for _ in range(2)))
        model[0] = checkpoint_wrapper(model[0])
        for layer in model:
            fully_shard(layer, mesh=self.mesh)
        names = [f"{i}.in_proj_weight" for i in (0, 1)]
        self.assertEqual(split_of(model), dict.fromkeys(names, (4, 4, 4)))
        groups, _ = partition_named_parameters(model, split=split_of(model))
        Muon(groups, distributed_config="auto")

    def test_param_data_assigned_a_dtensor(self):
        # PyTorch lets it pass, and the next kernel that reads the parameter takes the process down.
        pattern = (
            r"\(6, 4\).*param\.data = dtensor.*nn\.Parameter\(distribute_tensor\("
            ".*distribute_module"
        )
        for config in (None, create_dtensor_config(), create_auto_config()):
            layers = [nn.Linear(4, rows, bias=False) for rows in (4, 6)]
            model, weight = nn.Sequential(*layers), layers[1].weight
            weight.data = distribute_tensor(weight.data, self.mesh, [Shard(0)])
            for params in (model.parameters(), model.named_parameters()):
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(params, distributed_config=config)
            optimizer = Muon(model[0].parameters(), distributed_config=config)
            with self.assertRaisesRegex(ValueError, pattern):
                optimizer.add_param_group({"params": [weight]})


if __name__ == "__main__":
    run_tests()
