# Owner(s): ["module: optimizer"]
"""DTensors and models under Muon's distributed_config, on one rank, and which parameters go to Muon.

These models are built and named as those of well-known packages.
"""

import itertools
import unittest
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import placed_like, problem_with
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
    partition_named_parameters,
    partition_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import (
    local_config,
    MuonTestCase,
)


if dist.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
    from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


WIDTH, VOCABULARY = 8, 20
# The splits of two layers of attention with four features.
TWO_FUSED = {"0.in_proj_weight": (4, 4, 4), "1.in_proj_weight": (4, 4, 4)}

FEW_ROWS = "output head: few rows"
OUTPUT_HEAD = "output head"
TABLE = "table, bias or scale"
VOCABULARY_HEAD = "output head: as many rows as an embedding"


def linear(rows, columns=WIDTH):
    return nn.Linear(columns, rows, bias=False)


def tree(parts):
    """Nested modules: a dict's keys and a list's indices are the parts of names."""
    if isinstance(parts, dict):
        return nn.ModuleDict({name: tree(part) for name, part in parts.items()})
    if isinstance(parts, list):
        return nn.ModuleList(map(tree, parts))
    return parts


def lora(base):
    """The structure of PEFT's LoRA around a layer."""
    return {
        "base_layer": base,
        "lora_A": {"default": linear(2, base.in_features)},
        "lora_B": {"default": linear(base.out_features, 2)},
    }


def modules_to_save(base, copy):
    """The structure of PEFT's modules_to_save."""
    return {"original_module": base, "modules_to_save": {"default": copy}}


def printed(model, **options):
    """The lines that are printed, and the result."""
    with mock.patch("builtins.print") as printer:
        result = partition_named_parameters(model, verbose=True, **options)
    return [call.args[0] for call in printer.call_args_list], result


class Bare(nn.Module):
    """Parameters of this module itself."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def known(class_name, weight, shape, **attributes):
    """A module of a class of this name and package."""
    package, _, name = class_name.rpartition(".")
    known_class = type(name, (Bare,), {"__module__": package or "models"})
    layer, _, parameter = weight.rpartition(".")
    if layer:
        module = known_class()
        setattr(module, layer, Bare(**{parameter: shape}))
    else:
        module = known_class(**{parameter: shape})
    module.__dict__.update(attributes)
    return module


class Layer(NamedTuple):
    """A layer, and why its parameters do not go to Muon: one reason, or one for each name. "" if they do."""

    modules: Any
    reason: str | dict[str, str]


def hidden(modules):
    return Layer(modules, "")


def rest(modules, reason):
    return Layer(modules, reason)


def without_reasons(part, prefix, expected):
    """The modules in nested dicts and lists of layers. Adds the reason of each parameter to ``expected``."""
    if isinstance(part, dict):
        return {
            name: without_reasons(inner, f"{prefix}{name}.", expected)
            for name, inner in part.items()
        }
    if isinstance(part, list):
        return [
            without_reasons(inner, f"{prefix}{index}.", expected)
            for index, inner in enumerate(part)
        ]
    for name, _ in tree(part.modules).named_parameters():
        reason = part.reason
        if isinstance(reason, dict):
            reason = reason[name]
        expected[f"{prefix}{name}"] = reason
    return part.modules


class TestModels(MuonTestCase):
    def test_partition_parameters(self):
        untied = nn.Sequential(
            nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3)
        )
        tied = nn.Sequential(*untied, nn.Linear(3, 5, bias=False))
        tied[-1].weight = tied[0].weight
        for kind, model in (("untied", untied), ("tied", tied)):
            with self.subTest(kind):
                matrices, others = partition_parameters(model)
                shapes = [tuple(matrix.shape) for matrix in matrices]
                self.assertEqual(shapes, [(5, 3), (4, 3)])
                dimensions = [parameter.ndim for parameter in others]
                self.assertEqual(dimensions, [1, 1, 1, 3, 1])
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

    def assert_step_keeps_kind(self, param, config):
        """The momentum of a parameter without data is of its kind, too."""
        param.grad = torch.empty_like(param)
        optimizer = Muon([param], distributed_config=config)
        optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        self.assertIs(type(buffer), type(param.data))
        self.assertEqual(buffer.device, param.device)

    def test_parameters_on_the_meta_device(self):
        param = nn.Parameter(torch.empty(3, 4, device="meta"))
        for config in (
            None,
            create_dtensor_config(),
            create_auto_config(),
            local_config(),
        ):
            with self.subTest(config=config):
                self.assert_step_keeps_kind(param, config)

    def test_fake_parameters(self):
        """As torch.export makes them."""
        mode = FakeTensorMode()
        param = nn.Parameter(mode.from_tensor(torch.ones(3, 4)))
        for config in (None, local_config()):
            with self.subTest(config=config), mode:
                self.assert_step_keeps_kind(param, config)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDTensorsOnOneRank(MuonTestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = DeviceMesh("cpu", [0])
        self.cpu = torch.device("cpu")

    def test_round_trip(self):
        params = [
            distribute_tensor(torch.randn(5, 3), self.mesh, [placement])
            for placement in (Shard(0), Shard(1), Replicate())
        ]
        vector = distribute_tensor(torch.ones(3), self.mesh, [Shard(0)])
        for factory in (create_dtensor_config, create_auto_config):
            config = factory()
            config.assign_fn(params, config.state)
            for index, param in enumerate(params):
                with self.subTest(factory=factory, placements=param.placements):
                    config.state["current_param_idx"] = index
                    full = config.gather_fn(param, 0, config.state)
                    self.assertNotIsInstance(full, DTensor)
                    piece = config.redistribute_fn(full, 0, config.state)
                    self.assertEqual(piece.placements, param.placements)
                    self.assertEqual(piece.shape, param.shape)
                    self.assert_same_bits([piece.to_local()], [param.to_local()])
            with self.subTest(factory=factory):
                with self.assertRaisesRegex(ValueError, "given None outside of step"):
                    config.redistribute_fn(None, 0, config.state)
                with self.assertRaisesRegex(ValueError, "only supports 2D"):
                    config.assign_fn([vector], config.state)

    def test_momentum_on_another_mesh(self):
        tensors = []
        for dimension_name in ("a", "b"):
            mesh = DeviceMesh("cpu", [0], mesh_dim_names=(dimension_name,))
            tensors.append(DTensor.from_local(torch.ones(2, 2), mesh))
        self.assertFalse(placed_like(*tensors))

    def test_gradient_that_is_no_dtensor(self):
        plain = torch.ones(2, 2)
        dtensor = DTensor.from_local(plain, self.mesh)
        for param, grad in ((dtensor, plain), (plain, dtensor)):
            with self.subTest(param=type(param)):
                expected = f"the parameter is a DTensor {param is dtensor}, but its gradient {grad is dtensor}"
                self.assertEqual(problem_with(param, grad), expected)

    def test_detect_tp_dims_of_dtensors(self):
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
        params = [
            distribute_tensor(torch.randn(4, 6), mesh, placements)
            for placements in (
                (Shard(0), Shard(1)),
                (Shard(1), Shard(0)),
                (Replicate(), Shard(-1)),
                (Shard(1), Replicate()),
                (Replicate(), Replicate()),
            )
        ]
        plain = torch.randn(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PyTorch's tensor parallelism left the plain one whole.
            found = detect_tp_dims_from_model([*params, plain])
        self.assertEqual(found, {0: 1, 1: 0, 2: 1, 3: 1})
        with self.assertWarnsRegex(UserWarning, r"parameters \[0\];"):
            found = detect_tp_dims_from_model([plain])
        self.assertEqual(found, {0: 0})

    def test_verbose_marks_frozen_parameters(self):
        """As those below adapters, which get no gradients."""
        model = nn.ModuleDict({"base": nn.Linear(3, 4), "adapter": nn.Linear(4, 5)})
        model["base"].requires_grad_(False)
        lines, _ = printed(model)
        frozen = [line for line in lines if line.endswith(", frozen")]
        self.assertEqual(lines[:2], frozen)
        for line in frozen:
            self.assertTrue(line.startswith("base."), line)

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
        model["hidden"] = FSDP(
            model["hidden"], device_id=self.cpu, use_orig_params=True
        )
        lines, (matrices, others) = printed(model, exclude=["rout*"])
        self.assertEqual([name for name, _ in matrices], ["hidden.weight"])
        self.assertEqual(
            [name for name, _ in others],
            [
                "embedding.weight",
                "positions.weight",
                "hidden.bias",
                "router.weight",
                "conv.weight",
                "lm_head.weight",
            ],
        )
        parameters = {parameter for _, parameter in matrices + others}
        self.assertEqual(parameters, {*model.parameters()})
        self.assertEqual(
            lines,
            [
                "embedding.weight (5, 3) -> rest: embedding",
                "positions.weight (6, 3) -> rest: embedding",
                "hidden.weight (4, 3) -> Muon",
                "hidden.bias (4,) -> rest: 1D",
                "router.weight (2, 3) -> rest: excluded",
                "conv.weight (2, 4, 3) -> rest: 3D",
                "lm_head.weight (5, 3) -> rest: output head",
            ],
        )

    def test_flat_parameter_of_an_embedding_and_a_matrix(self):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        model = FSDP(model, device_id=self.cpu)
        with self.assertRaisesRegex(ValueError, "mixes matrices for Muon with others"):
            partition_named_parameters(model)

    def test_flat_parameter_of_tables(self):
        """The other optimizer takes a table and a norm in one flat parameter."""
        tables = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
        matrices, others = partition_named_parameters(FSDP(tables, device_id=self.cpu))
        self.assertEqual(matrices, [])
        self.assertEqual(len(others), 1)

    def two_attentions(self, use_orig_params):
        layers = [nn.MultiheadAttention(4, 2, bias=False) for _ in range(2)]
        return FSDP(
            nn.Sequential(*layers),
            device_id=self.cpu,
            use_orig_params=use_orig_params,
        )

    def test_flat_parameter_with_splits(self):
        model = self.two_attentions(use_orig_params=False)
        splits = split_of(model)
        self.assertEqual(splits, TWO_FUSED)
        pattern = r"with other splits.*Muon, split \(4, 4, 4\)"
        with self.assertRaisesRegex(ValueError, pattern):
            partition_named_parameters(model, split=splits)
        same = {"*in_proj_weight": (8, 4), "*out_proj.weight": [8, 4]}
        (group,), _ = partition_named_parameters(model, split=same)
        self.assertEqual(group["split"], (8, 4))

    def test_original_parameters_with_splits(self):
        model = self.two_attentions(use_orig_params=True)
        splits = split_of(model)
        self.assertEqual(splits, TWO_FUSED)
        (fused, whole), _ = partition_named_parameters(model, split=splits)
        names = [name for name, _ in fused["params"]]
        self.assertEqual(names, ["0.in_proj_weight", "1.in_proj_weight"])
        names = [name for name, _ in whole["params"]]
        self.assertEqual(names, ["0.out_proj.weight", "1.out_proj.weight"])

    def test_splits_of_wrapped_layers(self):
        model = nn.Sequential(*(nn.MultiheadAttention(4, 2) for _ in range(2)))
        model[0] = checkpoint_wrapper(model[0])
        for layer in model:
            fully_shard(layer, mesh=self.mesh)
        self.assertEqual(split_of(model), TWO_FUSED)
        groups, _ = partition_named_parameters(model, split=split_of(model))
        Muon(groups, distributed_config="auto")

    def test_param_data_assigned_a_dtensor(self):
        # PyTorch lets it pass, and the next kernel that reads the parameter takes the process down.
        pattern = (
            r"\(6, 4\).*param\.data = dtensor.*nn\.Parameter\(distribute_tensor\("
            ".*distribute_module"
        )
        for config in (None, create_dtensor_config(), create_auto_config()):
            with self.subTest(config=config):
                good, bad = linear(4, 4), linear(6, 4)
                bad.weight.data = distribute_tensor(
                    bad.weight.data, self.mesh, [Shard(0)]
                )
                model = nn.Sequential(good, bad)
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(model.parameters(), distributed_config=config)
                with self.assertRaisesRegex(ValueError, pattern):
                    Muon(model.named_parameters(), distributed_config=config)
                optimizer = Muon(good.parameters(), distributed_config=config)
                with self.assertRaisesRegex(ValueError, pattern):
                    optimizer.add_param_group({"params": [bad.weight]})


class PartitionTestCase(TestCase):
    def reasons(self, parts, **options):
        """Name -> why it does not go to Muon; "" if it does. The lists agree with what is printed."""
        lines, (matrices, others) = printed(tree(parts), **options)
        reasons, hidden_names, other_names = {}, [], []
        for line in lines:
            named, _, destination = line.partition(" -> ")
            name, _, _ = named.partition(" ")
            if destination.startswith("Muon"):
                reasons[name] = ""
                hidden_names.append(name)
            else:
                reasons[name] = destination.removeprefix("rest: ")
                other_names.append(name)
        self.assertEqual([name for name, _ in matrices], hidden_names)
        self.assertEqual([name for name, _ in others], other_names)
        return reasons

    def expect(self, layers):
        """Each parameter goes where its layer says."""
        expected = {}
        parts = without_reasons(layers, "", expected)
        self.assertEqual(self.reasons(parts), expected)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestPartition(PartitionTestCase):
    def test_exclude_takes_one_pattern(self):
        model = {"router": linear(3), "up": linear(16), "out": linear(8, 16)}
        for exclude in ("up.*", ("up.weight",), ["u?.*"]):
            with self.subTest(exclude=exclude):
                reasons = self.reasons(model, exclude=exclude)
                self.assertEqual(reasons["up.weight"], "excluded")
                self.assertEqual(reasons["out.weight"], "")

    def test_exclude_that_matches_nothing(self):
        block = {"mlp": {"gate_router": linear(3), "up": linear(16)}}
        model = tree({"layers": [block, block]})
        # The names of all blocks are equally near, so the error lists the first one's.
        near = (
            r"'gate_ruoter.weight'; near names are \['layers\.0\.mlp\.gate_router\.weight', "
            r"'layers\.0\.mlp\.up\.weight'\]$"
        )
        for exclude in ("gate_ruoter.weight", ["*.up.*", "gate_ruoter.weight"]):
            with self.subTest(exclude=exclude):
                with self.assertRaisesRegex(ValueError, near):
                    partition_named_parameters(model, exclude=exclude)

    def test_exclude_matches_through_wrappers(self):
        model = tree({"layers": [{"up": linear(16)}, {"up": linear(16)}]})
        model.layers[0] = torch.compile(checkpoint_wrapper(model.layers[0]))
        compiled = torch.compile(model)
        for pattern in (
            "layers.0.up.weight",
            "_orig_mod.layers.0._orig_mod.up.weight",
        ):
            with self.subTest(pattern):
                matrices, others = partition_named_parameters(compiled, exclude=pattern)
                ((name, _),) = others
                self.assertEqual(name, "_orig_mod.layers.0._orig_mod.up.weight")
                ((name, _),) = matrices
                self.assertEqual(name, "_orig_mod.layers.1.up.weight")

    def test_few_rows_in_muon_are_marked(self):
        parts = {
            "kv": [linear(2, 16), linear(2, 16)],
            "qkv": [linear(2, 32), linear(2, 32)],
            "adapted": lora(linear(16, 16)),
        }
        lines, _ = printed(tree(parts), split={"qkv.*": (1, 1)})
        self.assertEqual(
            lines,
            [
                "kv.0.weight (2, 16) -> Muon, left whole: named like a fused weight, few rows",
                "kv.1.weight (2, 16) -> Muon, left whole: named like a fused weight, few rows",
                "qkv.0.weight (2, 32) -> Muon, split (1, 1), few rows",
                "qkv.1.weight (2, 32) -> Muon, split (1, 1), few rows",
                "adapted.base_layer.weight (16, 16) -> Muon",
                "adapted.lora_A.default.weight (2, 16) -> Muon",
                "adapted.lora_B.default.weight (16, 2) -> Muon",
            ],
        )

    def test_tied_layer_before_the_embedding(self):
        """Then the weight has the name of the layer."""
        model = tree({"first": linear(VOCABULARY), "token": nn.Embedding(20, 8)})
        model["first"].weight = model["token"].weight
        lines, _ = printed(model)
        self.assertEqual(lines, ["first.weight (20, 8) -> rest: embedding"])

    def test_kernels_without_matrices(self):
        """torch said "optimizer got an empty parameter list"."""
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 5)
        )
        pattern = (
            r"no hidden matrix, but kernels: 0\.weight, 1\.weight\. .*flatten=True"
        )
        for split in (None, {}):
            with self.subTest(split=split):
                with self.assertWarnsRegex(UserWarning, pattern):
                    matrices, _ = partition_named_parameters(model, split=split)
                self.assertEqual(matrices, [])

    def test_no_warning_about_kernels(self):
        convolutional = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 5)
        )
        convolutional.append(nn.Linear(5, 5))
        for kind, model in (
            ("neither a matrix nor a kernel", nn.Linear(8, 1)),
            ("a matrix and kernels", convolutional),
        ):
            with self.subTest(kind), warnings.catch_warnings():
                warnings.simplefilter("error")
                partition_named_parameters(model)

    def test_adapters_of_embeddings(self):
        adapted = {
            "base_layer": nn.Embedding(20, 8),
            "lora_embedding_A": Bare(default=(2, 20)),
        }
        self.expect(
            {"token": rest(adapted, "embedding"), "query": hidden(lora(linear(8)))}
        )

    def test_gains_and_gates(self):
        self.expect(
            {
                "gain": rest(
                    parametrizations.weight_norm(nn.Linear(8, 6, bias=False)),
                    {
                        "parametrizations.weight.original0": "one row or column",
                        "parametrizations.weight.original1": "",
                    },
                ),
                "value_of": rest(linear(1), "one row or column"),
                "lstm": rest(
                    nn.LSTM(8, 4, bias=False, proj_size=2),
                    {
                        "weight_ih_l0": "gates of LSTM",
                        "weight_hh_l0": "gates of LSTM",
                        "weight_hr_l0": "",
                    },
                ),
                "cell": rest(nn.GRUCell(8, 4, bias=False), "gates of GRUCell"),
                # It has no gates, so each weight is one matrix.
                "rnn": hidden(nn.RNN(8, 4, bias=False)),
            }
        )

    def models_with_experts(self):
        return {
            "listed": {"gate": linear(4), "experts": [linear(16) for _ in range(4)]},
            "stacked": {
                "gate": lora(linear(4)),
                "experts": Bare(gate_up_proj=(4, 16, 8), gate_up_proj_bias=(4, 16)),
            },
            # The experts are parameters of the module that has the router's, too.
            "own": Bare(gating=(4, 8), w1=(4, 16, 8)),
            "named": {"router": {"layer": linear(3)}},
            # It has rows for two shared experts, too.
            "shared": {
                "gate": known("Router", "weight", (6, 8)),
                "experts": Bare(up=(4, 12, 8)),
            },
            # Adapters of rank 2 next to two layers.
            "two": {"layers": [linear(16), linear(16)], "hidden": lora(linear(8))},
            # The gate of a gated MLP, next to a convolution with as many channels.
            "mlp": {"gate": linear(4), "conv": nn.Conv1d(8, 4, 3, bias=False)},
        }

    def test_routers(self):
        reasons = self.reasons(self.models_with_experts())
        self.assertEqual(
            [name for name, reason in reasons.items() if reason == "router"],
            [
                "listed.gate.weight",
                "stacked.gate.base_layer.weight",
                "stacked.gate.lora_A.default.weight",
                "stacked.gate.lora_B.default.weight",
                "own.gating",
                "named.router.layer.weight",
                "shared.gate.weight",
            ],
        )

    def test_experts(self):
        reasons = self.reasons(self.models_with_experts(), allow_batched_matrices=True)
        self.assertEqual(reasons["stacked.experts.gate_up_proj"], "")
        self.assertEqual(reasons["stacked.experts.gate_up_proj_bias"], TABLE)
        self.assertEqual(reasons["own.w1"], "")
        self.assertEqual(reasons["shared.experts.up"], "")
        self.assertEqual(reasons["mlp.gate.weight"], "")
        self.assertEqual(reasons["listed.experts.0.weight"], "")

    def test_router_in_the_module_around_the_experts(self):
        class Experts(Bare):
            def __init__(self):
                super().__init__(gating=(4, 8))
                self.experts = Bare(w1=(4, 16, 8))

        reasons = self.reasons({"layers": [Experts(), Experts()]})
        self.assertEqual(reasons["layers.0.gating"], "router")
        self.assertEqual(reasons["layers.1.gating"], "router")

    def test_routers_have_fewer_rows_than_columns(self):
        model = {"gate": linear(8), "experts": [linear(16) for _ in range(8)]}
        self.assertEqual(self.reasons(model)["gate.weight"], "")

    def test_part_of_the_experts(self):
        """With expert parallelism, a rank has the experts of its part, and the rows of the router for all."""
        model = {"router": linear(6), "mlp": Bare(w1=(3, 12, 8), others=(4, 12, 8))}
        reasons = self.reasons(model, allow_batched_matrices=True)
        self.assertEqual(reasons["mlp.w1"], "")
        self.assertEqual(reasons["mlp.others"], "3D")

    def test_experts_by_name(self):
        """The router has rows for shared experts, too."""
        model = {"router": linear(6), "experts": Bare(up=(4, 12, 8))}
        reasons = self.reasons(model, allow_batched_matrices=True)
        self.assertEqual(reasons["experts.up"], "")

    def test_scalar_in_a_model_with_experts(self):
        """It raised IndexError: experts were looked for in a stack of no dimensions."""
        model = {"router": linear(4), "experts": Bare(up=(4, 12, 8), temperature=())}
        reasons = self.reasons(model, allow_batched_matrices=True)
        self.assertEqual(reasons["experts.up"], "")
        self.assertEqual(reasons["experts.temperature"], "0D")

    def test_parameters_without_a_layer(self):
        tables = (
            "pos_embed",
            "relative_position_bias_table",
            "rel_pos_h",
            "latents",
            "attention_biases",
            "register_tokens",
            "A_log",
            "latent_query",
            "layer_scale",
            "gamma",
        )
        for name in tables:
            with self.subTest(name):
                self.expect({"block": rest(Bare(**{name: (6, 8)}), TABLE)})
        for name in ("in_proj_weight", "w1", "post_proj", "latent_proj"):
            with self.subTest(name):
                self.expect({"block": hidden(Bare(**{name: (6, 8)}))})

    def test_tables_by_the_names_of_modules(self):
        self.expect(
            {
                # A table in a class of its own.
                "position_embeddings": rest(Bare(weight=(6, 8)), TABLE),
                # A gain for each head, whatever the name of the layer.
                "ln": rest(nn.LayerNorm((6, 8), bias=False), TABLE),
                "q": rest(nn.RMSNorm((6, 8)), TABLE),
                # A table of a module that is named like one.
                "pos_embed": rest(Bare(height_rel=(6, 8)), TABLE),
                # Learned queries.
                "projector": rest(
                    Bare(query=(6, 8), query_proj=(8, 8)),
                    {"query": TABLE, "query_proj": ""},
                ),
                # Linear layers, of which two are for relative positions.
                "linear_pos": hidden(linear(6)),
                "pos_proj": rest(
                    parametrizations.weight_norm(linear(6)),
                    {
                        "parametrizations.weight.original0": "one row or column",
                        "parametrizations.weight.original1": "",
                    },
                ),
                "query": hidden(linear(8)),
            }
        )


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestOutputHeads(PartitionTestCase):
    def test_vocabulary_is_an_output_head(self):
        for kind, last in (
            ("plain", linear(VOCABULARY)),
            ("adapted", lora(linear(VOCABULARY))),
        ):
            with self.subTest(kind):
                self.expect(
                    {
                        "token": rest(nn.Embedding(VOCABULARY, WIDTH), "embedding"),
                        # A table of as many positions as layers are wide does not make them heads.
                        "position": rest(nn.Embedding(WIDTH, WIDTH), "embedding"),
                        "block": hidden({"up": linear(16), "down": linear(WIDTH, 16)}),
                        # The next token, and those after it.
                        "more": rest(
                            [linear(VOCABULARY), linear(VOCABULARY)], VOCABULARY_HEAD
                        ),
                        "to_words": rest(last, VOCABULARY_HEAD),
                    }
                )

    def test_vocabulary_that_is_the_width_of_layers_in_blocks(self):
        def block():
            return {"w12": linear(VOCABULARY), "net": [linear(VOCABULARY)]}

        self.expect(
            {
                "token": rest(nn.Embedding(VOCABULARY, WIDTH), "embedding"),
                "blocks": hidden([block(), block()]),
                "fc": rest(linear(VOCABULARY), OUTPUT_HEAD),
            }
        )

    def test_vocabulary_that_is_the_width_of_an_mlp(self):
        self.expect(
            {
                "token": rest(nn.Embedding(VOCABULARY, WIDTH), "embedding"),
                "block": hidden(
                    {"up": linear(VOCABULARY), "down": linear(WIDTH, VOCABULARY)}
                ),
                "fc": rest(linear(VOCABULARY), OUTPUT_HEAD),
            }
        )

    def test_few_rows_at_the_end_are_an_output_head(self):
        for rows, columns, reason in (
            (2, 16, FEW_ROWS),
            # A layer takes eight features.
            (8, 64, ""),
            # Eight columns for each row are needed.
            (2, 15, ""),
            (3, 16, ""),
        ):
            for kind, last in (
                ("plain", linear(rows, columns)),
                ("adapted", lora(linear(rows, columns))),
            ):
                with self.subTest(kind, rows=rows, columns=columns):
                    self.expect(
                        {
                            "block": hidden({"up": linear(16), "down": linear(8, 16)}),
                            "summary": Layer(last, reason),
                        }
                    )

    def test_few_rows_in_a_list(self):
        self.expect({"kv": hidden([linear(2, 16), linear(2, 16)])})

    def test_heads_in_any_order(self):
        """Only the last matrix was looked at, so that the order of registration decided."""
        layers = {
            "actor": rest(linear(6, 64), FEW_ROWS),
            "critic_values": rest(linear(3, 64), FEW_ROWS),
            # An MLP for boxes. Its last layer alone gives an output.
            "box": hidden([linear(64, 64), linear(64, 64)]),
            "to_box": [hidden(linear(64, 64)), rest(linear(4, 64), FEW_ROWS)],
            "blocks": hidden(
                [
                    {"up": linear(128, 64), "down": linear(64, 128)},
                    {"up": linear(128, 64), "down": linear(64, 128)},
                ]
            ),
            # A bottleneck.
            "small": hidden({"down": linear(2, 64), "up": linear(64, 2)}),
        }
        for order in itertools.permutations(layers):
            with self.subTest(order=order):
                self.expect({name: layers[name] for name in order})

    def diffusion(self):
        """The layers of a model that gives what its first layer takes."""
        return {
            "time": hidden([linear(64, 16), linear(64, 64)]),
            "embedder": hidden(linear(64, 4)),
            "blocks": hidden(
                [
                    {"down": linear(8, 64), "up": linear(64, 8)},
                    {"down": linear(8, 64), "up": linear(64, 8)},
                ]
            ),
            "proj_out": rest(nn.Linear(64, 4), {"weight": FEW_ROWS, "bias": "1D"}),
            "ada_norm": hidden(linear(192, 64)),
            # Layers in blocks take its rows.
            "bottleneck": hidden(linear(8, 64)),
        }

    def test_head_that_gives_what_the_first_layer_takes(self):
        """Diffusion: the size of the patches, or of what the first layer takes, made the head a hidden layer."""
        self.expect(self.diffusion())

    def test_head_that_gives_what_a_convolution_takes(self):
        """Convolutions take and give channels. The size of a kernel is no number of features."""
        layers = self.diffusion()
        layers["embedder"] = rest(nn.Conv2d(4, 64, 3, bias=False), "4D")
        with self.subTest("a convolution at the start"):
            self.expect(layers)
        layers["classes"] = rest(linear(3, 64), FEW_ROWS)
        layers["last"] = rest(nn.Conv2d(64, 64, 3, bias=False), "4D")
        with self.subTest("a convolution at the end"):
            self.expect(layers)

    def test_latents_of_an_autoencoder(self):
        """A hidden layer takes the latents, which come before it."""
        self.expect(
            {
                "first": hidden(linear(64, 32)),
                "latents": hidden(linear(4, 64)),
                "second": hidden(linear(64, 4)),
                "last": hidden(linear(32, 64)),
            }
        )

    def test_layer_that_takes_what_an_embedding_gives(self):
        """It is no first layer, so the layer that gives as many features is no head."""
        self.expect(
            {
                "token": rest(nn.Embedding(30, 8), "embedding"),
                "widen": hidden(linear(64, 8)),
                "narrow": hidden(linear(8, 64)),
            }
        )

    def blocks_of_two_kinds(self):
        return {
            "layers": hidden(
                [
                    {"gate": linear(2, 16), "up": linear(16, 16)},
                    {"other": linear(3, 24), "up": linear(24, 16)},
                ]
            ),
            "end": hidden(linear(16, 24)),
        }

    def test_few_rows_inside_blocks(self):
        """Blocks of two kinds have a single layer each."""
        self.expect(self.blocks_of_two_kinds())

    def test_few_rows_at_the_end_of_a_list(self):
        """The last matrix is in a list of MLPs, which may all be the same."""
        layers = self.blocks_of_two_kinds()
        layers["box_embed"] = [[hidden(linear(16, 16)), rest(linear(2, 16), FEW_ROWS)]]
        self.expect(layers)

    def convolutions(self):
        return rest(
            [
                nn.Conv2d(3, 8, 3, bias=False),
                nn.Conv2d(8, 16, 3, bias=False),
                nn.Conv2d(16, 64, 3, bias=False),
            ],
            "4D",
        )

    def convolutional_model(self):
        return {
            "features": self.convolutions(),
            "gate": hidden({"down": linear(8, 16), "up": linear(16, 8)}),
            "qkv": hidden(linear(48, 64)),
        }

    def test_last_matrix_of_a_convolutional_model(self):
        """timm's last_linear and classif, which have many rows."""
        self.expect(
            {
                "more": self.convolutions(),
                **self.convolutional_model(),
                "last": rest(
                    linear(40, 64), "output head: no convolution takes its rows"
                ),
            }
        )

    def test_as_many_matrices_as_convolutions(self):
        self.expect(
            {
                "features": self.convolutions(),
                "block": hidden({"down": linear(8, 16), "up": linear(16, 8)}),
                "last": hidden(linear(40, 64)),
            }
        )

    def test_one_convolution_more_than_matrices(self):
        self.expect(
            {
                "features": self.convolutions(),
                "gate": hidden(linear(16, 16)),
                "last": rest(
                    linear(40, 64), "output head: no convolution takes its rows"
                ),
            }
        )

    def test_last_matrix_of_a_model_with_many_matrices(self):
        self.expect({**self.convolutional_model(), "last": hidden(linear(40, 64))})

    def test_hidden_layers_in_a_module_named_like_a_head(self):
        """RT-DETR's query_pos_head embeds boxes. It takes four features, which no hidden layer gives."""
        layers = {
            "query_pos_head": hidden([linear(64, 4), linear(32, 64)]),
            # It takes 20 features, which no hidden layer gives. These are too many for positions.
            "reward_head": rest(
                [linear(32, 32), linear(32, 20)], "output head: in reward_head"
            ),
            "lm_heads": rest(
                [linear(320, 32), linear(320, 32)], "output head: in lm_heads"
            ),
            "enc_class_embed": rest(
                [linear(2, 32), linear(2, 32)], "output head: in enc_class_embed"
            ),
        }
        for order in itertools.permutations(layers):
            with self.subTest(order=order):
                model = {name: layers[name] for name in order}
                model["boxes"] = [hidden(linear(32, 32)), rest(linear(4, 32), FEW_ROWS)]
                self.expect(model)

    def test_layers_in_a_module_named_like_a_head(self):
        def two_layers():
            return {"dense": linear(8), "out_proj": linear(2)}

        self.expect(
            {
                # BERT's layers, several heads of attention, and Perceiver's attention outside of blocks.
                "layer": hidden(
                    [{"output": {"dense": linear(8)}, "heads": [linear(8)]}]
                ),
                "pool": hidden({"output": {"dense": linear(8)}}),
                "fc": hidden(linear(8)),
                "classifier": rest(
                    modules_to_save(two_layers(), two_layers()),
                    "output head: in classifier",
                ),
                "score": rest(modules_to_save(linear(2), linear(2)), OUTPUT_HEAD),
                "lm_head": rest(lora(linear(30)), OUTPUT_HEAD),
                "output": rest(linear(30), OUTPUT_HEAD),
                "qa_outputs": rest(linear(2), OUTPUT_HEAD),
                "head_dist": rest(linear(30), OUTPUT_HEAD),
                "heads_dist": rest(
                    [linear(30), linear(30)], "output head: in heads_dist"
                ),
                # DETR has one for each layer of its decoder.
                "class_embed": rest(
                    [linear(2), linear(2)], "output head: in class_embed"
                ),
                "lm_heads": rest([linear(30), linear(30)], "output head: in lm_heads"),
            }
        )

    def test_names_of_output_heads(self):
        for name in (
            "class_embed",
            "classifier",
            "embed_out",
            "head",
            "lm_head",
            "output_layer",
            "qa_outputs",
            "score",
            "unembed",
            "unembedding",
        ):
            with self.subTest(name):
                head = rest(linear(30), OUTPUT_HEAD)
                self.expect({"layers": [{name: head, "up": hidden(linear(16))}]})

    def test_names_of_output_heads_outside_of_blocks(self):
        for name in (
            "heads",
            "head_dist",
            "Head_2",
            "cls_head",
            "bbox_heads",
            "own_classifier",
            "enc_class_embed",
            "logits",
            "token_logits",
            "logits_proj",
        ):
            with self.subTest(name):
                self.expect({name: rest(linear(30), OUTPUT_HEAD)})
                self.expect({"layers": [{name: hidden(linear(30))}]})

    def test_output_inside_and_outside_of_blocks(self):
        """Attention of RWKV and others in a block; torchtitan's head is outside of blocks."""
        self.expect(
            {
                "blocks": hidden([{"output": linear(8)}]),
                "output": rest(linear(30), OUTPUT_HEAD),
                "fc": rest(linear(5), OUTPUT_HEAD),
            }
        )


class FusedWeight(NamedTuple):
    """A weight of a module of a known class, the attributes that its rule reads, and its split."""

    class_name: str
    weight: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]
    split: Any

    def module(self):
        return known(self.class_name, self.weight, self.shape, **self.attributes)

    def splits(self, heads=False):
        """The splits of a model that has the module as its layer."""
        return split_of(tree({"layer": self.module()}), heads=heads)


def repeated(sizes, repeats):
    return {"sizes": sizes, "repeats": repeats, "dim": 0}


def columns(sizes, repeats=1):
    return {"sizes": sizes, "repeats": repeats, "dim": 1}


FALCON = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
OLD_FALCON = {
    **FALCON,
    "new_decoder_architecture": False,
    "multi_query": False,
}
MULTI_QUERY_FALCON = {**OLD_FALCON, "multi_query": True}
NEW_FALCON = {**OLD_FALCON, "new_decoder_architecture": True}
GROUPED = {"num_key_value_heads": 2, "num_key_value_groups": 3, "head_dim": 4}
BIGCODE = {"num_heads": 8, "head_dim": 4, "multi_query": False}
GATED_QUERIES = {"head_dim": 4, "o_proj": SimpleNamespace(in_features=12)}
# DeepSeek-V2's head_dim is the size of the positions.
LATENT = {
    "qk_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 4,
    "head_dim": 2,
}
# The configs of Megatron.
MEGATRON_HEADS = {"num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 4}
MEGATRON_ATTENTION = {"config": SimpleNamespace(**MEGATRON_HEADS)}
MEGATRON_GATED_ATTENTION = {
    "config": SimpleNamespace(**MEGATRON_HEADS, attention_output_gate=True)
}
MEGATRON_MLP = {"config": SimpleNamespace(gated_linear_unit=True)}
MEGATRON_PLAIN_MLP = {"config": SimpleNamespace(gated_linear_unit=False)}
MEGATRON_TWO_RANKS = SimpleNamespace(
    gated_linear_unit=True, tensor_model_parallel_size=2
)
MEGATRON_BLOCKS_OF_TWO = SimpleNamespace(
    gated_linear_unit=True,
    tensor_model_parallel_size=2,
    moe_mlp_glu_interleave_size=2,
)
# Their group of tensor parallelism has three ranks, whatever the config says.
MEGATRON_EXPERTS = {
    "num_local_experts": 2,
    "tp_group": SimpleNamespace(size=lambda: 3),
}
KNOWN_CLASSES = [
    FusedWeight(
        "GptOssExperts", "gate_up_proj", (2, 8, 6), {}, columns((1, 1), repeats=3)
    ),
    FusedWeight(
        "Experts",
        "gate_up_proj",
        (2, 6, 8),
        {"is_transposed": False, "is_concatenated": False},
        repeated((1, 1), 3),
    ),
    FusedWeight(
        "Experts",
        "gate_up_proj",
        (2, 6, 8),
        {"is_transposed": False, "is_concatenated": True},
        (3, 3),
    ),
    FusedWeight(
        "Experts",
        "gate_up_proj",
        (2, 8, 6),
        {"is_transposed": True, "is_concatenated": True},
        columns((3, 3)),
    ),
    FusedWeight("Llama4TextExperts", "gate_up_proj", (2, 8, 6), {}, columns((3, 3))),
    FusedWeight("GPT2Attention", "c_attn.weight", (8, 24), {}, columns((8, 8, 8))),
    FusedWeight("GPT2Attention", "c_attn.weight", (8, 16), {}, columns((8, 8))),
    FusedWeight(
        "GPTNeoXAttention",
        "query_key_value.weight",
        (24, 8),
        {"head_size": 4},
        repeated((4, 4, 4), 2),
    ),
    FusedWeight(
        "BloomAttention",
        "query_key_value.weight",
        (24, 8),
        {"head_dim": 4},
        repeated((4, 4, 4), 2),
    ),
    FusedWeight(
        "FalconAttention",
        "query_key_value.weight",
        (24, 8),
        OLD_FALCON,
        repeated((4, 4, 4), 2),
    ),
    FusedWeight(
        "FalconAttention",
        "query_key_value.weight",
        (40, 8),
        MULTI_QUERY_FALCON,
        repeated((12, 4, 4), 2),
    ),
    FusedWeight(
        "FalconAttention",
        "query_key_value.weight",
        (40, 8),
        NEW_FALCON,
        repeated((12, 4, 4), 2),
    ),
    FusedWeight("Phi3Attention", "qkv_proj.weight", (40, 8), GROUPED, (24, 8, 8)),
    FusedWeight("DbrxAttention", "Wqkv.weight", (40, 8), GROUPED, (24, 8, 8)),
    FusedWeight("DbrxExpertGLU", "w2", (12, 8), {"moe_num_experts": 3}, (4, 4, 4)),
    FusedWeight("MptAttention", "Wqkv.weight", (24, 8), {}, (8, 8, 8)),
    FusedWeight(
        "GPTBigCodeAttention",
        "c_attn.weight",
        (40, 8),
        {**BIGCODE, "multi_query": True},
        (32, 4, 4),
    ),
    FusedWeight(
        "GPTBigCodeAttention",
        "c_attn.weight",
        (24, 8),
        BIGCODE,
        repeated((4, 4, 4), 2),
    ),
    FusedWeight(
        "QwenAttention",
        "q_proj.weight",
        (24, 8),
        GATED_QUERIES,
        repeated((4, 4), 3),
    ),
    FusedWeight("transformers.QuickMLP", "gate_up_proj.weight", (10, 8), {}, (5, 5)),
    FusedWeight(
        "OtherAttention", "kv_b_proj.weight", (20, 8), LATENT, repeated((6, 4), 2)
    ),
    FusedWeight(
        "torchtitan.Attention", "wkv_b.weight", (20, 8), LATENT, repeated((6, 4), 2)
    ),
    FusedWeight(
        "FusedQKVLinear",
        "wqkv.weight",
        (40, 8),
        {"heads_per_kv": 3, "head_dim": 4},
        repeated((12, 4, 4), 2),
    ),
    FusedWeight(
        "torchtitan.Experts", "mlp1_weight_EGD", (3, 10, 8), {}, repeated((1, 1), 5)
    ),
    FusedWeight("FusedSwiGLU", "w13", (8, 2, 5), {}, columns((5, 5))),
    FusedWeight(
        "torchtitan.FeedForward", "w13.weight", (10, 8), {}, repeated((1, 1), 5)
    ),
    FusedWeight(
        "SelfAttention",
        "linear_qkv.weight",
        (40, 8),
        MEGATRON_ATTENTION,
        repeated((12, 4, 4), 2),
    ),
    FusedWeight(
        "SelfAttention",
        "linear_qkv.weight",
        (64, 8),
        MEGATRON_GATED_ATTENTION,
        repeated((12, 12, 4, 4), 2),
    ),
    FusedWeight("MLP", "linear_fc1.weight", (12, 8), MEGATRON_MLP, (6, 6)),
    # Each of two ranks of tensor parallelism has 12 rows, or of three that a group has.
    FusedWeight(
        "MLP",
        "linear_fc1.weight",
        (12, 8),
        {"config": MEGATRON_TWO_RANKS},
        repeated((6, 6), 2),
    ),
    # Only experts alternate between blocks.
    FusedWeight(
        "MLP",
        "linear_fc1.weight",
        (12, 8),
        {"config": MEGATRON_BLOCKS_OF_TWO},
        repeated((6, 6), 2),
    ),
    FusedWeight(
        "TEGroupedMLP",
        "linear_fc1.weight0",
        (12, 8),
        {**MEGATRON_EXPERTS, "config": MEGATRON_TWO_RANKS},
        repeated((6, 6), 3),
    ),
    FusedWeight(
        "TEGroupedMLP",
        "linear_fc1.weight1",
        (12, 8),
        {**MEGATRON_EXPERTS, "config": MEGATRON_BLOCKS_OF_TWO},
        repeated((2, 2), 9),
    ),
]
# Weights that have the names of known ones, but another form.
UNKNOWN_FORMS = [
    # A linear layer (out, in).
    FusedWeight("SelfAttention", "c_attn.weight", (24, 8), {}, None),
    # Columns that are no third, and columns of a shard.
    FusedWeight("SelfAttention", "c_attn.weight", (8, 20), {}, None),
    FusedWeight("GPT2Attention", "c_attn.weight", (16, 12), {}, None),
    # Fewer rows than a group of heads has.
    FusedWeight(
        "BloomAttention", "query_key_value.weight", (8, 8), {"head_dim": 4}, None
    ),
    # Queries without a gate.
    FusedWeight(
        "QwenAttention",
        "q_proj.weight",
        (24, 8),
        {"head_dim": 4, "o_proj": SimpleNamespace(in_features=24)},
        None,
    ),
    # An MLP without a gate.
    FusedWeight("MLP", "linear_fc1.weight", (12, 8), MEGATRON_PLAIN_MLP, None),
    # The MLP of a user, who may alternate rows.
    FusedWeight("MLP", "gate_up_proj.weight", (12, 8), {}, None),
    # Megatron's attention with a number of heads that does not fit, and with missing attributes.
    FusedWeight(
        "SelfAttention",
        "linear_qkv.weight",
        (40, 8),
        {"config": SimpleNamespace(**{**MEGATRON_HEADS, "num_attention_heads": 9})},
        None,
    ),
    FusedWeight(
        "SelfAttention",
        "linear_qkv.weight",
        (40, 8),
        {"config": SimpleNamespace(**{**MEGATRON_HEADS, "kv_channels": None})},
        None,
    ),
    FusedWeight(
        "SelfAttention",
        "linear_qkv.weight",
        (40, 8),
        {"config": SimpleNamespace(num_attention_heads=6, num_query_groups=2)},
        None,
    ),
    # No experts, one expert as a matrix, and a vector.
    FusedWeight("DbrxExpertGLU", "w2", (12, 8), {"moe_num_experts": 0}, None),
    FusedWeight("Llama4TextExperts", "gate_up_proj", (8, 6), {}, None),
    FusedWeight("torchtitan.Experts", "mlp1_weight_EGD", (8,), {}, None),
    # A projection without the sizes of latent attention.
    FusedWeight("Attention", "kv_b_proj.weight", (8, 8), {}, None),
]
# With ``heads=True``, each head is a part.
SIX_HEADS = (4, 4, 4, 4, 4, 4)
TEN_HEADS = (4, 4, 4, 4, 4, 4, 4, 4, 4, 4)
HEADS = [
    FusedWeight("LlamaAttention", "q_proj.weight", (24, 8), {"head_dim": 4}, SIX_HEADS),
    FusedWeight("LlamaAttention", "k_proj.weight", (8, 8), {"head_dim": 4}, (4, 4)),
    FusedWeight(
        "BertSelfAttention",
        "value.weight",
        (8, 8),
        {"attention_head_size": 4},
        (4, 4),
    ),
    FusedWeight("T5Attention", "q.weight", (8, 8), {"key_value_proj_dim": 4}, (4, 4)),
    FusedWeight("torchtitan.Attention", "wv.weight", (8, 8), {"head_dim": 4}, (4, 4)),
    FusedWeight(
        "diffusers.Attention",
        "to_k.weight",
        (8, 9),
        {"inner_dim": 8, "heads": 2},
        (4, 4),
    ),
    FusedWeight(
        "Qwen3NextAttention", "q_proj.weight", (24, 8), GATED_QUERIES, SIX_HEADS
    ),
    FusedWeight("DeepseekV2Attention", "q_b_proj.weight", (16, 5), LATENT, (8, 8)),
    FusedWeight("MLA", "wq_b.weight", (16, 5), LATENT, (8, 8)),
    FusedWeight(
        "MiMoAttention",
        "v_proj.weight",
        (8, 8),
        {"head_dim": 8, "v_head_dim": 4},
        (4, 4),
    ),
    FusedWeight(
        "DeepseekV2Attention", "kv_b_proj.weight", (20, 5), LATENT, (6, 4, 6, 4)
    ),
    FusedWeight(
        "FalconAttention", "query_key_value.weight", (40, 8), NEW_FALCON, TEN_HEADS
    ),
    FusedWeight("Phi3Attention", "qkv_proj.weight", (40, 8), GROUPED, TEN_HEADS),
    FusedWeight(
        "GPT2Attention",
        "c_attn.weight",
        (8, 24),
        {"head_dim": 4},
        columns(SIX_HEADS),
    ),
    FusedWeight(
        "OpenAIAttention",
        "c_attn.weight",
        (8, 24),
        {"split_size": 8, "n_head": 2},
        columns(SIX_HEADS),
    ),
    FusedWeight(
        "SelfAttention", "linear_qkv.weight", (40, 8), MEGATRON_ATTENTION, TEN_HEADS
    ),
    # Other fused weights keep their split, as do those of attention whose heads are unknown or do not fit.
    FusedWeight("transformers.QuickMLP", "gate_up_proj.weight", (10, 8), {}, (5, 5)),
    FusedWeight("MptAttention", "Wqkv.weight", (24, 8), {}, (8, 8, 8)),
    FusedWeight("MptAttention", "Wqkv.weight", (24, 8), {"head_dim": 5}, (8, 8, 8)),
]
WHOLE_WITH_HEADS = [
    # The size is unknown, does not fit, or is that of a single head.
    FusedWeight("LlamaAttention", "q_proj.weight", (24, 8), {}, None),
    FusedWeight("LlamaAttention", "q_proj.weight", (24, 8), {"head_dim": 5}, None),
    FusedWeight("LlamaAttention", "q_proj.weight", (24, 8), {"head_dim": 24}, None),
    # Other layers, and a table.
    FusedWeight("LlamaAttention", "o_proj.weight", (24, 8), {"head_dim": 4}, None),
    FusedWeight("LlamaMLP", "q_proj.weight", (24, 8), {"head_dim": 4}, None),
    FusedWeight("Attention", "q_proj.weight", (24, 2, 8), {"head_dim": 4}, None),
]


PROJECTIONS = (
    "q.weight",
    "q_proj.weight",
    "q_lin.weight",
    "q_b.weight",
    "wq_b.weight",
    "q_b_proj.weight",
    "to_q.weight",
    "add_q_proj.weight",
    "linear_q.weight",
    "wq.weight",
    "query.weight",
    "query_proj.weight",
    "query_layer.weight",
    "q_proj_weight",
)
HEAD_SIZES = (
    "qk_head_dim",
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "dim_head",
)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestSplitsOfKnownClasses(TestCase):
    def test_splits_of_known_classes(self):
        for case in KNOWN_CLASSES:
            with self.subTest(case.class_name, weight=case.weight, shape=case.shape):
                self.assertEqual(case.splits(), {f"layer.{case.weight}": case.split})

    def test_class_of_the_same_name(self):
        for case in UNKNOWN_FORMS:
            with self.subTest(case.class_name, weight=case.weight, shape=case.shape):
                self.assertEqual(case.splits(), {})

    def test_torch(self):
        model = nn.ModuleList([nn.MultiheadAttention(8, 2)])
        self.assertEqual(split_of(model), {"0.in_proj_weight": (8, 8, 8)})

    def test_model_that_is_one_layer(self):
        module = known(
            "SelfAttention", "linear_qkv.weight", (40, 8), **MEGATRON_ATTENTION
        )
        expected = {"linear_qkv.weight": repeated((12, 4, 4), 2)}
        self.assertEqual(split_of(module), expected)

    def test_class_that_fsdp2_made(self):
        module = known(
            "SelfAttention", "linear_qkv.weight", (40, 8), **MEGATRON_ATTENTION
        )
        module.__class__ = type("FSDPSelfAttention", (type(module),), {})
        expected = {"linear_qkv.weight": repeated((12, 4, 4), 2)}
        self.assertEqual(split_of(module), expected)

    def test_fused_weight_with_adapters(self):
        attention = known(
            "SelfAttention", "linear_qkv.weight", (40, 8), **MEGATRON_ATTENTION
        )
        attention.linear_qkv = tree(lora(linear(40)))
        (name,) = split_of(torch.compile(tree({"attention": attention})))
        self.assertEqual(name, "_orig_mod.attention.linear_qkv.base_layer.weight")

    def test_heads(self):
        for case in HEADS:
            with self.subTest(case.class_name, weight=case.weight, shape=case.shape):
                found = case.splits(heads=True)
                self.assertEqual(found, {f"layer.{case.weight}": case.split})

    def test_names_of_projections(self):
        for weight in PROJECTIONS:
            with self.subTest(weight):
                attention = known("Attention", weight, (8, 8), head_dim=4)
                self.assertEqual(split_of(attention, heads=True), {weight: (4, 4)})

    def test_names_of_head_sizes(self):
        for attribute in HEAD_SIZES:
            with self.subTest(attribute):
                attention = known("Attention", "q.weight", (8, 8), **{attribute: 4})
                self.assertEqual(split_of(attention, heads=True), {"q.weight": (4, 4)})

    def test_weights_without_heads(self):
        for case in WHOLE_WITH_HEADS:
            with self.subTest(case.class_name, weight=case.weight, shape=case.shape):
                self.assertEqual(case.splits(heads=True), {})

    def test_heads_of_torch(self):
        fused = nn.ModuleList([nn.MultiheadAttention(8, 2)])
        found = split_of(fused, heads=True)
        self.assertEqual(found, {"0.in_proj_weight": SIX_HEADS})
        apart = nn.ModuleList([nn.MultiheadAttention(8, 2, kdim=6)])
        expected = {
            "0.q_proj_weight": (4, 4),
            "0.k_proj_weight": (4, 4),
            "0.v_proj_weight": (4, 4),
        }
        self.assertEqual(split_of(apart, heads=True), expected)

    def test_projections_are_whole_without_heads(self):
        attention = known("LlamaAttention", "q_proj.weight", (24, 8), head_dim=4)
        self.assertEqual(split_of(attention), {})


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestSplits(TestCase):
    def assert_heads_step_as_parameters(self, weights, adjust_lr_fn):
        """``weights``: name -> (module, sizes of its heads, the dimension that they cut)."""
        model = tree({name: module for name, (module, _, _) in weights.items()})
        alone = {}
        for name, (module, sizes, dim) in weights.items():
            (weight,) = module.parameters()
            nn.init.normal_(weight)
            alone[name] = [
                nn.Parameter(head.clone()) for head in weight.detach().split(sizes, dim)
            ]
        splits = split_of(model, heads=True)
        groups, _ = partition_named_parameters(model, split=splits)
        muon = Muon(groups, lr=0.1, adjust_lr_fn=adjust_lr_fn)
        heads = itertools.chain.from_iterable(alone.values())
        muon_alone = Muon(heads, lr=0.1, adjust_lr_fn=adjust_lr_fn)
        for _ in range(2):
            for name, (module, sizes, dim) in weights.items():
                (weight,) = module.parameters()
                weight.grad = torch.randn(weight.shape)
                grads = weight.grad.split(sizes, dim)
                for head, grad in zip(alone[name], grads, strict=True):
                    head.grad = grad
            muon.step()
            muon_alone.step()
        for name, (module, _, dim) in weights.items():
            (weight,) = module.parameters()
            joined = torch.cat(alone[name], dim)
            self.assertEqual(weight, joined, rtol=0, atol=0, msg=name)

    def test_heads_are_parameters_of_their_own(self):
        """Each has its own Newton-Schulz and the scale of its own shape, bit for bit."""
        attention = {"head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5}
        for adjust_lr_fn in ("original", "match_rms_adamw", "spectral_unclamped"):
            queries = known("LlamaAttention", "q_proj.weight", (24, 9), **attention)
            keys = known("LlamaAttention", "k_proj.weight", (8, 9), **attention)
            values = known("LlamaAttention", "v_proj.weight", (15, 9), **attention)
            latent = known("LlamaAttention", "kv_b_proj.weight", (16, 9), **attention)
            columns = known("LlamaAttention", "c_attn.weight", (8, 24), head_dim=4)
            weights = {
                "query_weight": (queries, [4, 4, 4, 4, 4, 4], 0),
                "key_weight": (keys, [4, 4], 0),
                "value_weight": (values, [5, 5, 5], 0),
                "latent_weight": (latent, [3, 5, 3, 5], 0),
                "column_weight": (columns, [4, 4, 4, 4, 4, 4], 1),
            }
            with self.subTest(adjust_lr_fn=adjust_lr_fn):
                self.assert_heads_step_as_parameters(weights, adjust_lr_fn)

    def groups(self, parts, split, **options):
        """The names and the other options of each group, and the names of the rest."""
        groups, others = partition_named_parameters(tree(parts), split=split, **options)
        found = []
        for group in groups:
            names = [name for name, _ in group.pop("params")]
            given = {option: value for option, value in group.items() if value}
            found.append((names, given))
        return found, [name for name, _ in others]

    def model_with_all_kinds(self):
        def block():
            return {"qkv": linear(24), "up": linear(16), "norm": nn.LayerNorm(8)}

        return {
            "layers": [block(), block()],
            "conv": nn.Conv2d(4, 6, 3, bias=False),
            "other": nn.Conv1d(4, 6, 3, bias=False),
            "experts": Bare(up=(3, 12, 8), down=(3, 8, 6)),
            # Two ranks of expert parallelism share the experts.
            "router": linear(6),
            # Query heads, as XLNet stores them.
            "heads_of": Bare(q=(8, 2, 4)),
            "lm_head": linear(20),
        }

    SPLIT_OF_ALL_KINDS = {
        "*.qkv.weight": (8, 8, 8),
        # The last that matches decides, and heads stay heads.
        "layers.1.qkv.weight": {"sizes": [4, 2, 2], "repeats": 3},
        "conv.*": (2, 4),
        "experts.up": [6, 6],
        "lm_head.*": (10, 10),
    }

    def test_groups_by_split(self):
        with self.assertWarnsRegex(UserWarning, "not split: .*up, lm_head.weight$"):
            found, others = self.groups(
                self.model_with_all_kinds(), self.SPLIT_OF_ALL_KINDS
            )
        self.assertEqual(
            found,
            [
                (["layers.0.qkv.weight"], {"split": (8, 8, 8)}),
                (["layers.0.up.weight", "layers.1.up.weight"], {}),
                (["layers.1.qkv.weight"], {"split": repeated((4, 2, 2), 3)}),
                (["conv.weight"], {"split": (2, 4), "flatten": True}),
            ],
        )
        self.assertEqual(
            others,
            [
                "layers.0.norm.weight",
                "layers.0.norm.bias",
                "layers.1.norm.weight",
                "layers.1.norm.bias",
                "other.weight",
                "experts.up",
                "experts.down",
                "router.weight",
                "heads_of.q",
                "lm_head.weight",
            ],
        )

    def test_groups_by_split_with_stacks(self):
        with self.assertWarnsRegex(UserWarning, "not split: lm_head.weight$"):
            found, others = self.groups(
                self.model_with_all_kinds(),
                self.SPLIT_OF_ALL_KINDS,
                allow_batched_matrices=True,
            )
        self.assertEqual(
            found,
            [
                (["layers.0.qkv.weight"], {"split": (8, 8, 8)}),
                (["layers.0.up.weight", "layers.1.up.weight", "experts.down"], {}),
                (["layers.1.qkv.weight"], {"split": repeated((4, 2, 2), 3)}),
                (["conv.weight"], {"split": (2, 4), "flatten": True}),
                (["experts.up"], {"split": (6, 6)}),
            ],
        )
        self.assertEqual(
            others,
            [
                "layers.0.norm.weight",
                "layers.0.norm.bias",
                "layers.1.norm.weight",
                "layers.1.norm.bias",
                "other.weight",
                "router.weight",
                "heads_of.q",
                "lm_head.weight",
            ],
        )

    def test_muon_takes_groups_by_split(self):
        with self.assertWarnsRegex(UserWarning, "not split"):
            groups, _ = partition_named_parameters(
                tree(self.model_with_all_kinds()),
                split=self.SPLIT_OF_ALL_KINDS,
                allow_batched_matrices=True,
            )
        muon = Muon(groups, allow_batched_matrices=True)
        self.assertEqual(len(muon.param_groups), 5)

    def test_pattern_that_matches_a_bias(self):
        split = columns((4, 4))
        found = self.groups({"c_attn": nn.Linear(8, 24)}, {"*c_attn*": split})
        expected = [(["c_attn.weight"], {"split": split})], ["c_attn.bias"]
        self.assertEqual(found, expected)

    def test_split_that_does_not_fit_a_kernel(self):
        """Neither the kernel nor the flattened one."""
        with self.assertWarnsRegex(UserWarning, "not split: conv.weight"):
            found = self.groups({"conv": nn.Conv1d(4, 6, 3, bias=False)}, {"*": (5, 4)})
        self.assertEqual(found, ([], ["conv.weight"]))

    def test_split_that_matches_nothing(self):
        with self.assertRaisesRegex(ValueError, "'qvk.*'.*near names.*qkv.weight"):
            self.groups({"qkv": linear(24)}, {"qvk.*": (8, 16)})

    def test_excluded_weight_with_a_split(self):
        """No warning says that it is not split."""
        parts = {"qkv": linear(24), "up": linear(16)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = self.groups(parts, {"qkv.*": (8, 8, 8)}, exclude="qkv.*")
        self.assertEqual(found, ([(["up.weight"], {})], ["qkv.weight"]))

    def test_no_split(self):
        found = self.groups({"up": linear(16)}, {})
        self.assertEqual(found, ([(["up.weight"], {})], []))

    def test_names_of_fused_weights(self):
        for name in (
            "qkv",
            "key_value",
            "c_attn",
            "att_proj",
            "gate_up_proj",
            "input_linear",
            "mlp1_weight",
            "w12",
            "w13",
            "Wi",
            "in_proj",
        ):
            with self.subTest(name):
                lines, _ = printed(tree({name: linear(24)}))
                self.assertEqual(
                    lines,
                    [
                        f"{name}.weight (24, 8) -> Muon, left whole: named like a fused weight"
                    ],
                )

    def test_fused_weights_that_stay_whole(self):
        parts = {
            "known": {"qkv": linear(24), "up": linear(16)},
            "unknown": {
                "Wqkv": linear(24),
                "lora": lora(linear(8)),
                "qkv": [linear(24)],
                "c_attn": lora(linear(24)),
            },
            "bare": Bare(in_proj_weight=(24, 8)),
        }
        split = {"known.qkv.*": {"sizes": (2, 6), "dim": 1}}
        lines, _ = printed(tree(parts), split=split)
        self.assertEqual(
            lines,
            [
                "known.qkv.weight (24, 8) -> Muon, split {'sizes': (2, 6), 'repeats': 1, 'dim': 1}",
                "known.up.weight (16, 8) -> Muon",
                "unknown.Wqkv.weight (24, 8) -> Muon, left whole: named like a fused weight",
                "unknown.lora.base_layer.weight (8, 8) -> Muon",
                "unknown.lora.lora_A.default.weight (2, 8) -> Muon",
                "unknown.lora.lora_B.default.weight (8, 2) -> Muon",
                "unknown.qkv.0.weight (24, 8) -> Muon, left whole: named like a fused weight",
                "unknown.c_attn.base_layer.weight (24, 8) -> Muon, left whole: named like a fused weight",
                "unknown.c_attn.lora_A.default.weight (2, 8) -> Muon",
                "unknown.c_attn.lora_B.default.weight (24, 2) -> Muon",
                "bare.in_proj_weight (24, 8) -> Muon, left whole: named like a fused weight",
            ],
        )


if __name__ == "__main__":
    run_tests()
