# Owner(s): ["module: optimizer"]
"""DTensors and models under Muon's distributed_config, on one rank, and which parameters go to Muon.

These models are built and named as those of well-known packages.
"""

import contextlib
import itertools
import unittest
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.optim import Muon
from torch.optim._muon_engine.layouts.fitting import placed_like
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
    NewtonSchulzCalls,
)


if dist.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
    from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


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

    def test_batches_are_of_one_device(self):
        """Without ``foreach``, accelerators batch the matrices of a stack, and CPUs do not."""
        devices = {"cpu": 4, "meta": 5}
        matrices = [nn.Parameter(torch.ones(3, 4, device=at)) for at in devices]
        stacks = [
            nn.Parameter(torch.ones(2, 3, n, device=at)) for at, n in devices.items()
        ]
        for param in matrices + stacks:
            param.grad = torch.empty_like(param)
        with NewtonSchulzCalls() as calls:
            Muon(matrices, foreach=True).step()
            for stack in stacks:
                Muon([stack], allow_batched_matrices=True).step()
        self.assertEqual(calls.batches, [(2, 3, 5)])


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

    def test_momentum_on_another_mesh(self):
        meshes = (DeviceMesh("cpu", [0], mesh_dim_names=(name,)) for name in "ab")
        tensors = [DTensor.from_local(torch.ones(2, 2), mesh) for mesh in meshes]
        self.assertFalse(placed_like(*tensors))

    def test_detect_tp_dims_of_dtensors(self):
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "tp"))
        rows, columns, whole = Shard(0), Shard(1), Replicate()
        placed = (rows, columns), (columns, rows), (whole, Shard(-1)), (columns, whole)
        params = [
            distribute_tensor(torch.randn(4, 6), mesh, placements)
            for placements in (*placed, (whole, whole))
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
        lines, (matrices, others) = printed(model, exclude=["rout*"])
        self.assertEqual([name for name, _ in matrices], ["hidden.weight"])
        rest = ["embedding", "positions", "hidden.bias", "router", "conv", "lm_head"]
        for start, (name, _) in zip(rest, others, strict=True):
            self.assertTrue(name.startswith(start), name)
        self.assertEqual({p for _, p in matrices + others}, {*model.parameters()})
        first, last = ["embedding"] * 2, ["1D", "excluded", "3D", "output head"]
        words = [line.rpartition("> ")[2].removeprefix("rest: ") for line in lines]
        self.assertEqual(words, [*first, "Muon", *last])

    def test_flat_parameter_of_an_embedding_and_a_matrix(self):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        model = FSDP(model, device_id=torch.device("cpu"))
        with self.assertRaisesRegex(ValueError, "mixes matrices for Muon with others"):
            partition_named_parameters(model)
        # The other optimizer takes a table and a norm in one flat parameter.
        tables = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
        matrices, others = partition_named_parameters(
            FSDP(tables, device_id=torch.device("cpu"))
        )
        self.assertEqual((len(matrices), len(others)), (0, 1))

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
                pattern = r"with other splits.*Muon, split \(4, 4, 4\)"
                with self.assertRaisesRegex(ValueError, pattern):
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


WIDTH, VOCABULARY = 8, 20


def linear(rows, columns=WIDTH):
    return nn.Linear(columns, rows, bias=False)


def tree(parts):
    """Nested modules: a dict's keys and a list's indices are the parts of names."""
    if isinstance(parts, dict):
        return nn.ModuleDict({name: tree(part) for name, part in parts.items()})
    return nn.ModuleList(map(tree, parts)) if isinstance(parts, list) else parts


def lora(base):
    """The structure of PEFT's LoRA around a layer."""
    down, up = linear(2, base.in_features), linear(base.out_features, 2)
    adapters = {"lora_A": {"default": down}, "lora_B": {"default": up}}
    return {"base_layer": base, **adapters}


def modules_to_save(base, copy):
    """The structure of PEFT's modules_to_save."""
    return {"original_module": base, "modules_to_save": {"default": copy}}


def printed(model, **options):
    """The lines that are printed, and the result."""
    with mock.patch("builtins.print") as said:
        found = partition_named_parameters(model, verbose=True, **options)
    return [call.args[0] for call in said.call_args_list], found


class Bare(nn.Module):
    """Parameters of this module itself."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


# The config of Megatron's attention.
HEADS = {"num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 4}


def known(kind, weight, shape, **attributes):
    """A module of a class of this name and package."""
    package, _, name = kind.rpartition(".")
    made = type(name, (Bare,), {"__module__": package or "models"})()
    layer, _, leaf = weight.rpartition(".")
    made.__dict__.update(attributes)
    if layer:
        setattr(made, layer, Bare(**{leaf: shape}))
    else:
        made.register_parameter(leaf, nn.Parameter(torch.empty(shape)))
    return made


def flags(is_transposed, is_concatenated):
    return {"is_transposed": is_transposed, "is_concatenated": is_concatenated}


def new(architecture, multi_query):
    return {"new_decoder_architecture": architecture, "multi_query": multi_query}


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestPartition(TestCase):
    def reasons(self, parts, **options):
        """Name -> why it does not go to Muon; "" if it does. The lists agree with what is printed."""
        lines, (matrices, others) = printed(tree(parts), **options)
        lines = [line.partition(" -> ") for line in lines]
        found = {line.partition(" ")[0]: why for line, _, why in lines}
        hidden = [n for n, why in found.items() if why.startswith("Muon")]
        self.assertEqual(hidden, [*dict(matrices)])
        self.assertEqual([n for n in found if n not in hidden], [*dict(others)])
        return {
            name: "" if name in hidden else why.removeprefix("rest: ")
            for name, why in found.items()
        }

    def expect(self, parts):
        """Each part is a pair: a module, and why its weights do not go to Muon, by name if there are several."""
        expected = {}

        def plain(part, name):
            if isinstance(part, (dict, list)):
                pairs = part.items() if isinstance(part, dict) else enumerate(part)
                made = {key: plain(value, f"{name}{key}.") for key, value in pairs}
                return made if isinstance(part, dict) else [*made.values()]
            layer, why = part
            for key, _ in tree(layer).named_parameters():
                reason = why if isinstance(why, str) else why[key]
                expected[f"{name}{key}"] = reason
            return layer

        model = plain(parts, "")
        self.assertEqual(self.reasons(model), expected)

    def test_exclude_takes_one_pattern(self):
        model = {"router": linear(3), "up": linear(16), "out": linear(8, 16)}
        for exclude in ("up.*", ("up.weight",), ["u?.*"]):
            found = self.reasons(model, exclude=exclude)
            self.assertEqual(found["up.weight"], "excluded")
            self.assertEqual(found["out.weight"], "")

    def test_exclude_that_matches_nothing(self):
        block = {"mlp": {"gate_router": linear(3), "up": linear(16)}}
        model = tree({"layers": [block, block]})
        # All names of a stack are equally near, so one pattern stands for them.
        near = r"'gate_ruoter.weight'.*near names.*'layers\.\*\.mlp\.gate_router\.w"
        for exclude in ("gate_ruoter.weight", ["*.up.*", "gate_ruoter.weight"]):
            with self.assertRaisesRegex(ValueError, near):
                partition_named_parameters(model, exclude=exclude)

    def test_exclude_matches_through_wrappers(self):
        model = tree({"layers": [{"up": linear(16)}, {"up": linear(16)}]})
        model.layers[0] = torch.compile(checkpoint_wrapper(model.layers[0]))
        compiled = torch.compile(model)
        name = "_orig_mod.layers.0._orig_mod.up.weight"
        for pattern in ("layers.0.up.weight", name):
            matrices, others = partition_named_parameters(compiled, exclude=pattern)
            self.assertEqual([n for n, _ in others], [name])
            self.assertEqual([n for n, _ in matrices], ["_orig_mod.layers.1.up.weight"])

    def test_vocabulary_is_an_output_head(self):
        head = "output head: as many rows as an embedding"
        for last in (linear(VOCABULARY), lora(linear(VOCABULARY))):
            model = {
                "token": (nn.Embedding(VOCABULARY, WIDTH), "embedding"),
                # A table of as many positions as layers are wide does not make them heads.
                "position": (nn.Embedding(WIDTH, WIDTH), "embedding"),
                "block": ({"up": linear(16), "down": linear(WIDTH, 16)}, ""),
                # The next token, and those after it.
                "more": ([linear(VOCABULARY), linear(VOCABULARY)], head),
                "to_words": (last, head),
            }
            self.expect(model)

    def test_vocabulary_that_is_a_width_too(self):
        token = nn.Embedding(VOCABULARY, WIDTH)
        fused = [{"w12": linear(VOCABULARY), "net": [linear(VOCABULARY)]} for _ in "ab"]
        mlp = {"up": linear(VOCABULARY), "down": linear(WIDTH, VOCABULARY)}
        for hidden in ({"blocks": fused}, {"block": mlp}):
            model = {"token": token, **hidden, "fc": linear(VOCABULARY)}
            rest = [name for name, why in self.reasons(model).items() if why]
            self.assertEqual(rest, ["token.weight", "fc.weight"])

    def test_few_rows_at_the_end_are_an_output_head(self):
        few = "output head: few rows"
        block = {"up": linear(16), "down": linear(WIDTH, 16)}
        # A layer takes eight outputs, and three are too many for 16 columns.
        for rows, columns, why in (2, 16, few), (8, 64, ""), (3, 16, ""):
            for end in linear(rows, columns), lora(linear(rows, columns)):
                self.expect({"block": (block, ""), "summary": (end, why)})
        self.expect({"kv": [(linear(2, 16), ""), (linear(2, 16), "")]})

    def test_heads_in_any_order(self):
        """Only the last matrix was looked at, so that the order of registration decided."""
        few = "output head: few rows"
        parts = {
            "actor": (linear(6, 64), few),
            "critic_values": (linear(3, 64), few),
            # An MLP for boxes. Its last layer alone gives an output.
            "box": ([linear(64, 64), linear(64, 64)], ""),
            "to_box": (
                [linear(64, 64), linear(4, 64)],
                {"0.weight": "", "1.weight": few},
            ),
            "blocks": (
                [{"up": linear(128, 64), "down": linear(64, 128)} for _ in "ab"],
                "",
            ),
            # A bottleneck.
            "small": ({"down": linear(2, 64), "up": linear(64, 2)}, ""),
        }
        for order in itertools.permutations(parts):
            self.expect({name: parts[name] for name in order})

    def test_heads_that_give_what_the_first_layer_takes(self):
        """Diffusion: the size of the patches, or of what the first layer takes, made the head a hidden layer."""
        few = "output head: few rows"
        blocks = [{"down": linear(8, 64), "up": linear(64, 8)} for _ in "ab"]
        parts = {
            "time": ([linear(64, 16), linear(64, 64)], ""),
            "embedder": (linear(64, 4), ""),
            "blocks": (blocks, ""),
            "proj_out": (nn.Linear(64, 4), {"weight": few, "bias": "1D"}),
            "ada_norm": (linear(192, 64), ""),
            # Layers in blocks take its rows.
            "bottleneck": (linear(8, 64), ""),
        }
        self.expect(parts)
        # Convolutions take and give channels. The size of a kernel is no number of features.
        patches = nn.Conv2d(4, 64, 3, bias=False), "4D"
        self.expect({**parts, "embedder": patches})
        more = {
            "classes": (linear(3, 64), few),
            "last": (nn.Conv2d(64, 64, 3, bias=False), "4D"),
        }
        self.expect({**parts, "embedder": patches, **more})
        # An autoencoder: a hidden layer takes the latents, which come before it.
        inner = {"first": (linear(64, 32), ""), "latents": (linear(4, 64), "")}
        self.expect(
            {**inner, "second": (linear(64, 4), ""), "last": (linear(32, 64), "")}
        )
        # An embedding gives features too, so a layer that takes as many is no first layer.
        token = nn.Embedding(30, 8), "embedding"
        wide = {"widen": (linear(64, 8), ""), "narrow": (linear(8, 64), "")}
        self.expect({"token": token, **wide})

    def test_few_rows_inside_blocks(self):
        """Blocks of two kinds have a single layer each, and some have lists of one block."""
        parts = {
            "layers": [
                {"gate": (linear(2, 16), ""), "up": (linear(16, 16), "")},
                {"other": (linear(3, 24), ""), "up": (linear(24, 16), "")},
            ],
            "end": (linear(16, 24), ""),
        }
        self.expect(parts)
        # The last matrix: a list of MLPs, which may all be the same.
        boxes = [(linear(16, 16), ""), (linear(2, 16), "output head: few rows")]
        self.expect({**parts, "box_embed": [boxes]})

    def test_last_matrix_of_a_convolutional_model(self):
        """timm's last_linear and classif, which have many rows."""

        def convolutions():
            channels = (3, 8), (8, 16), (16, 64)
            return [(nn.Conv2d(n, m, 3, bias=False), "4D") for n, m in channels]

        why = "output head: no convolution takes its rows"
        gate = {"down": (linear(8, 16), ""), "up": (linear(16, 8), "")}
        features = {
            "features": convolutions(),
            "gate": gate,
            "qkv": (linear(48, 64), ""),
        }
        features["last"] = linear(40, 64), why
        with self.subTest("few matrices"):
            self.expect({"more": convolutions(), **features})
        features["last"] = linear(40, 64), ""
        with self.subTest("many matrices"):
            self.expect(features)

    def test_few_rows_in_muon_are_marked(self):
        parts = {
            "kv": [linear(2, 16), linear(2, 16)],
            "qkv": [linear(2, 32), linear(2, 32)],
        }
        parts |= {"adapted": lora(linear(16, 16))}
        lines, _ = printed(tree(parts), split={"qkv.*": (1, 1)})
        marked = [
            line.partition(" ")[0] for line in lines if line.endswith(", few rows")
        ]
        self.assertEqual(
            marked, ["kv.0.weight", "kv.1.weight", "qkv.0.weight", "qkv.1.weight"]
        )

    def test_hidden_layers_in_a_module_named_like_a_head(self):
        """RT-DETR's query_pos_head embeds boxes. It takes four features, which no hidden layer gives."""
        parts = {
            "query_pos_head": ([linear(64, 4), linear(32, 64)], ""),
            "reward_head": ([linear(32, 32), linear(32, 32)], "output head: in reward_head"),
            "lm_heads": ([linear(320, 32), linear(320, 32)], "output head: in lm_heads"),
            "enc_class_embed": ([linear(2, 32), linear(2, 32)], "output head: in enc_class_embed"),
            "boxes": ([linear(32, 32), linear(4, 32)], {"0.weight": "", "1.weight": "output head: few rows"}),
        }  # fmt: skip
        boxes = {"boxes": parts.pop("boxes")}
        for order in itertools.permutations(parts):
            self.expect({name: parts[name] for name in order} | boxes)

    def test_kernels_without_matrices(self):
        """torch said "optimizer got an empty parameter list"."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten())
        model.append(nn.Linear(8, 5))
        pattern = (
            r"no hidden matrix, but kernels: 0\.weight, 1\.weight\. .*flatten=True"
        )
        for split in (None, {}):
            with self.assertWarnsRegex(UserWarning, pattern):
                matrices, _ = partition_named_parameters(model, split=split)
            self.assertEqual(matrices, [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            partition_named_parameters(nn.Linear(8, 1))
            model.append(nn.Linear(5, 5))
            partition_named_parameters(model)

    def test_layers_in_a_module_named_like_a_head(self):
        def two():
            return {"dense": linear(8), "out_proj": linear(2)}

        within, is_one = "output head: in classifier", "output head"
        model = {
            # BERT's layers, several heads of attention, and Perceiver's attention outside of blocks.
            "layer": [({"output": {"dense": linear(8)}, "heads": [linear(8)]}, "")],
            "pool": ({"output": {"dense": linear(8)}}, ""),
            "fc": (linear(8), ""),
            "classifier": (modules_to_save(two(), two()), within),
            "score": (modules_to_save(linear(2), linear(2)), is_one),
            "lm_head": (lora(linear(30)), is_one),
            "output": (linear(30), is_one),
            "qa_outputs": (linear(2), is_one),
            "head_dist": (linear(30), is_one),
            "heads_dist": ([linear(30), linear(30)], "output head: in heads_dist"),
            # DETR has one for each layer of its decoder.
            "class_embed": ([linear(2), linear(2)], "output head: in class_embed"),
            "lm_heads": ([linear(30), linear(30)], "output head: in lm_heads"),
        }
        self.expect(model)
        # RWKV's and others' attention in a block; torchtitan's head is outside of blocks.
        model = {
            "blocks": [({"output": linear(8)}, "")],
            "output": (linear(30), is_one),
            "fc": (linear(5), is_one),
        }
        self.expect(model)

    def test_adapters_of_embeddings(self):
        adapters = {
            "base_layer": nn.Embedding(20, 8),
            "lora_embedding_A": Bare(default=(2, 20)),
        }
        model = {"token": (adapters, "embedding"), "query": (lora(linear(8)), "")}
        self.expect(model)

    def test_gains_and_gates(self):
        hidden = parametrizations.weight_norm(nn.Linear(8, 6, bias=False))
        norm, one_row = "parametrizations.weight.original", "one row or column"
        gates = dict.fromkeys(("weight_ih_l0", "weight_hh_l0"), "gates of LSTM")
        model = {
            "gain": (hidden, {f"{norm}0": one_row, f"{norm}1": ""}),
            "value_of": (linear(1), one_row),
            "lstm": (
                nn.LSTM(8, 4, bias=False, proj_size=2),
                gates | {"weight_hr_l0": ""},
            ),
            "cell": (nn.GRUCell(8, 4, bias=False), "gates of GRUCell"),
            # It has no gates, so each weight is one matrix.
            "rnn": (nn.RNN(8, 4, bias=False), ""),
        }
        self.expect(model)

    def test_routers(self):
        stacks = Bare(gate_up_proj=(4, 16, 8), gate_up_proj_bias=(4, 16))
        # The experts are parameters of the module that has the router's, too.
        own = Bare(gating=(4, 8), w1=(4, 16, 8))
        model = {
            "listed": {"gate": linear(4), "experts": [linear(16) for _ in range(4)]},
            "stacked": {"gate": lora(linear(4)), "experts": stacks},
            "own": own,
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
        found = self.reasons(model)
        routers = [name for name, why in found.items() if why == "router"]
        parts = "base_layer", "lora_A.default", "lora_B.default"
        adapted = [f"stacked.gate.{part}.weight" for part in parts]
        expected = ["listed.gate.weight", *adapted, "own.gating"]
        expected += ["named.router.layer.weight", "shared.gate.weight"]
        self.assertEqual(routers, expected)
        found = self.reasons(model, allow_batched_matrices=True)
        self.assertEqual(found["shared.experts.up"], "")
        self.assertEqual(found["mlp.gate.weight"], "")
        self.assertEqual(found["listed.experts.0.weight"], "")
        biases = found["stacked.experts.gate_up_proj_bias"]
        self.assertEqual(biases, "table, bias or scale")

    def test_parameters_without_a_layer(self):
        names = (
            *("pos_embed", "relative_position_bias_table", "rel_pos_h", "latents"),
            *("attention_biases", "register_tokens", "A_log", "latent_query"),
            *("layer_scale", "gamma"),
        )
        matrices = "in_proj_weight", "w1", "post_proj", "latent_proj"
        bare = Bare(**dict.fromkeys((*names, *matrices), (6, 8)))
        table = "table, bias or scale"
        why = dict.fromkeys(names, table) | dict.fromkeys(matrices, "")
        # A table in a class of its own, and a linear layer for relative positions.
        own = (Bare(weight=(6, 8)), table)
        # A gain for each head, whatever the name of the layer.
        norms = nn.LayerNorm((6, 8), bias=False), nn.RMSNorm((6, 8))
        model = {"block": (bare, why), "position_embeddings": own}
        model |= {"ln": (norms[0], table), "q": (norms[1], table)}
        # A table of a module that is named like one, and learned queries.
        model["pos_embed"] = Bare(height_rel=(6, 8)), table
        model["projector"] = (
            Bare(query=(6, 8), query_proj=(8, 8)),
            {"query": table, "query_proj": ""},
        )
        self.expect({**model, "linear_pos": (linear(6), ""), "query": (linear(8), "")})


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestSplits(TestCase):
    def test_splits_of_known_classes(self):
        config = SimpleNamespace(**HEADS)
        wrapped = known("SelfAttention", "linear_qkv.weight", (40, 8), config=config)
        # FSDP2 gives a module a class of its own.
        wrapped.__class__ = type("FSDPSelfAttention", (type(wrapped),), {})
        parts = {
            "attention": wrapped,
            "torch": nn.MultiheadAttention(8, 2),
            "no": {"kv_b_proj": linear(8)},
        }
        expected = {
            "attention.linear_qkv.weight": ((12, 4, 4), 2, 0),
            "torch.in_proj_weight": (8, 8, 8),
        }
        qkv = "query_key_value.weight"
        falcon = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
        heads = {"num_key_value_heads": 2, "head_dim": 4, "num_key_value_groups": 3}
        gate = {"head_dim": 4, "o_proj": SimpleNamespace(in_features=12)}
        many = {"num_heads": 8, "head_dim": 4}
        latent = {"qk_nope_head_dim": 6, "v_head_dim": 4}
        # Each of two ranks of tensor parallelism has 12 rows, or of three that a group has.
        gated = {"gated_linear_unit": True, "tensor_model_parallel_size": 2}
        mlp = {"config": SimpleNamespace(**gated)}
        heads_and_gates = SimpleNamespace(**HEADS, attention_output_gate=True)
        experts = {"num_local_experts": 2, "tp_group": SimpleNamespace(size=lambda: 3)}
        gated["moe_mlp_glu_interleave_size"] = 2
        blocks = experts | {"config": SimpleNamespace(**gated)}
        # Class, weight, its shape, its split, and the attributes that the rule reads.
        for at, (kind, weight, shape, split, attributes) in enumerate((
            ("GptOssExperts", "gate_up_proj", (2, 8, 6), ((1, 1), 3, 1), {}),
            ("Experts", "gate_up_proj", (2, 6, 8), ((1, 1), 3, 0), flags(0, 0)),
            ("Experts", "gate_up_proj", (2, 6, 8), (3, 3), flags(0, 1)),
            ("Experts", "gate_up_proj", (2, 8, 6), ((3, 3), 1, 1), flags(1, 1)),
            ("Llama4TextExperts", "gate_up_proj", (2, 8, 6), ((3, 3), 1, 1), {}),
            ("GPT2Attention", "c_attn.weight", (8, 24), ((8, 8, 8), 1, 1), {}),
            ("GPT2Attention", "c_attn.weight", (8, 16), ((8, 8), 1, 1), {}),
            ("GPTNeoXAttention", qkv, (24, 8), ((4, 4, 4), 2, 0), {"head_size": 4}),
            ("BloomAttention", qkv, (24, 8), ((4, 4, 4), 2, 0), {"head_dim": 4}),
            ("FalconAttention", qkv, (24, 8), ((4, 4, 4), 2, 0), falcon | new(0, 0)),
            ("FalconAttention", qkv, (40, 8), ((12, 4, 4), 2, 0), falcon | new(0, 1)),
            ("FalconAttention", qkv, (40, 8), ((12, 4, 4), 2, 0), falcon | new(1, 0)),
            ("Phi3Attention", "qkv_proj.weight", (40, 8), (24, 8, 8), heads),
            ("DbrxAttention", "Wqkv.weight", (40, 8), (24, 8, 8), heads),
            ("DbrxExpertGLU", "w2", (12, 8), (4, 4, 4), {"moe_num_experts": 3}),
            ("MptAttention", "Wqkv.weight", (24, 8), (8, 8, 8), {}),
            ("GPTBigCodeAttention", "c_attn.weight", (40, 8), (32, 4, 4), many | {"multi_query": True}),
            ("GPTBigCodeAttention", "c_attn.weight", (24, 8), ((4, 4, 4), 2, 0), many | {"multi_query": False}),
            ("QwenAttention", "q_proj.weight", (24, 8), ((4, 4), 3, 0), gate),
            ("transformers.QuickMLP", "gate_up_proj.weight", (10, 8), (5, 5), {}),
            ("OtherAttention", "kv_b_proj.weight", (20, 8), ((6, 4), 2, 0), latent),
            ("FusedQKVLinear", "wqkv.weight", (40, 8), ((12, 4, 4), 2, 0), {"heads_per_kv": 3, "head_dim": 4}),
            ("torchtitan.Attention", "wkv_b.weight", (20, 8), ((6, 4), 2, 0), latent),
            ("torchtitan.Experts", "mlp1_weight_EGD", (3, 10, 8), ((1, 1), 5, 0), {}),
            ("FusedSwiGLU", "w13", (8, 2, 5), ((5, 5), 1, 1), {}),
            ("torchtitan.FeedForward", "w13.weight", (10, 8), ((1, 1), 5, 0), {}),
            ("SelfAttention", "linear_qkv.weight", (64, 8), ((12, 12, 4, 4), 2, 0), {"config": heads_and_gates}),
            ("MLP", "linear_fc1.weight", (12, 8), (6, 6), {"config": SimpleNamespace(gated_linear_unit=True)}),
            ("MLP", "linear_fc1.weight", (12, 8), ((6, 6), 2, 0), mlp),
            ("TEGroupedMLP", "linear_fc1.weight0", (12, 8), ((6, 6), 3, 0), experts | mlp),
            ("TEGroupedMLP", "linear_fc1.weight1", (12, 8), ((2, 2), 9, 0), blocks),
        )):  # fmt: skip
            parts[f"n{at}"] = known(kind, weight, shape, **attributes)
            expected[f"n{at}.{weight}"] = split
        for name, found in split_of(tree(parts)).items():
            sizes = tuple(found.values()) if isinstance(found, dict) else found
            self.assertEqual(sizes, expected.pop(name), name)
        self.assertEqual(expected, {})
        (found,) = split_of(wrapped)
        self.assertEqual(found, "linear_qkv.weight")
        wrapped.linear_qkv = tree(lora(linear(40)))
        (found,) = split_of(torch.compile(tree({"attention": wrapped})))
        self.assertEqual(found, "_orig_mod.attention.linear_qkv.base_layer.weight")

    def test_heads(self):
        """Each head is a part. Latent attention has its queries, keys without positions, and values apart."""
        latent = {"qk_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 4}
        # DeepSeek-V2 has the size of the positions by this name.
        latent["head_dim"] = 2
        falcon = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4} | new(1, 0)
        phi = {"num_key_value_heads": 2, "head_dim": 4, "num_key_value_groups": 3}
        gate = {"head_dim": 4, "o_proj": SimpleNamespace(in_features=12)}
        config = {"config": SimpleNamespace(**HEADS)}
        columns = {"sizes": (4,) * 6, "repeats": 1, "dim": 1}
        qkv, q = "query_key_value.weight", "q_proj.weight"
        cases = (
            ("LlamaAttention", q, (24, 8), (4,) * 6, {"head_dim": 4}),
            ("LlamaAttention", "k_proj.weight", (8, 8), (4, 4), {"head_dim": 4}),
            ("BertSelfAttention", "value.weight", (8, 8), (4, 4), {"attention_head_size": 4}),
            ("T5Attention", "q.weight", (8, 8), (4, 4), {"key_value_proj_dim": 4}),
            ("torchtitan.Attention", "wv.weight", (8, 8), (4, 4), {"head_dim": 4}),
            ("diffusers.Attention", "to_k.weight", (8, 9), (4, 4), {"inner_dim": 8, "heads": 2}),
            ("Qwen3NextAttention", q, (24, 8), (4,) * 6, gate),
            ("DeepseekV2Attention", "q_b_proj.weight", (16, 5), (8, 8), latent),
            ("MLA", "wq_b.weight", (16, 5), (8, 8), latent),
            ("MiMoAttention", "v_proj.weight", (8, 8), (4, 4), {"head_dim": 8, "v_head_dim": 4}),
            ("DeepseekV2Attention", "kv_b_proj.weight", (20, 5), (6, 4) * 2, latent),
            ("FalconAttention", qkv, (40, 8), (4,) * 10, falcon),
            ("Phi3Attention", "qkv_proj.weight", (40, 8), (4,) * 10, phi),
            ("GPT2Attention", "c_attn.weight", (8, 24), columns, {"head_dim": 4}),
            ("OpenAIAttention", "c_attn.weight", (8, 24), columns, {"split_size": 8, "n_head": 2}),
            ("SelfAttention", "linear_qkv.weight", (40, 8), (4,) * 10, config),
        )  # fmt: skip
        parts = {
            f"n{at}": known(kind, weight, shape, **attributes)
            for at, (kind, weight, shape, _, attributes) in enumerate(cases)
        }
        expected = {f"n{at}.{case[1]}": case[3] for at, case in enumerate(cases)}
        parts["torch"] = nn.MultiheadAttention(8, 2, kdim=6)
        torchs = [f"torch.{kind}_proj_weight" for kind in "qkv"]
        parts["fused"] = nn.MultiheadAttention(8, 2)
        expected |= dict.fromkeys(torchs, (4, 4)) | {"fused.in_proj_weight": (4,) * 6}
        # Other fused weights keep their split.
        parts["mlp"] = known("transformers.QuickMLP", "gate_up_proj.weight", (10, 8))
        expected["mlp.gate_up_proj.weight"] = (5, 5)
        # Sizes that are unknown or do not fit, a single head, other layers, a table.
        bloom = {"head_dim": 4}
        whole = (
            ("LlamaAttention", q, (24, 8), {}),
            ("LlamaAttention", q, (24, 8), {"head_dim": 5}),
            ("LlamaAttention", q, (24, 8), {"head_dim": 24}),
            ("LlamaAttention", "o_proj.weight", (24, 8), bloom),
            ("LlamaMLP", q, (24, 8), bloom),
            ("Attention", "q_proj.weight", (24, 2, 8), bloom),
        )
        for at, (kind, weight, shape, attributes) in enumerate(whole):
            parts[f"w{at}"] = known(kind, weight, shape, **attributes)
        for name, attributes in ("mpt", {}), ("unfit", {"head_dim": 5}):
            parts[name] = known("MptAttention", "Wqkv.weight", (24, 8), **attributes)
            expected[f"{name}.Wqkv.weight"] = (8, 8, 8)
        self.assertEqual(split_of(tree(parts), heads=True), expected)
        self.assertNotIn("n0.q_proj.weight", split_of(tree(parts)))

    def test_heads_are_parameters_of_their_own(self):
        """Each has its own Newton-Schulz and the scale of its own shape, bit for bit."""
        sizes = {"q_proj": [4] * 6, "k_proj": [4] * 2, "c_attn": [4] * 6}
        attention = {"head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5}
        sizes |= {"kv_b_proj": [3, 5] * 2, "v_proj": [5] * 3}
        for scale in ("original", "match_rms_adamw", "spectral_unclamped"):
            parts, alone = {}, {}
            for name, own in sizes.items():
                dim = int(name == "c_attn")
                shape = (8, sum(own)) if dim else (sum(own), 9)
                kind = "LlamaAttention"
                attributes = {"head_dim": 4} if dim else attention
                parts[name] = known(kind, f"{name}.weight", shape, **attributes)
                (weight,) = parts[name].parameters()
                nn.init.normal_(weight)
                alone[name] = [
                    nn.Parameter(head.clone())
                    for head in weight.detach().split(own, dim)
                ]
            model = tree(parts)
            splits = split_of(model, heads=True)
            options = {"lr": 0.1, "adjust_lr_fn": scale}
            groups, _ = partition_named_parameters(model, split=splits)
            muons = (
                Muon(groups, **options),
                Muon(itertools.chain(*alone.values()), **options),
            )
            for _ in range(2):
                for name, heads in alone.items():
                    (weight,) = model[name].parameters()
                    dim = int(name == "c_attn")
                    weight.grad = torch.randn(weight.shape)
                    for head, grad in zip(heads, weight.grad.split(sizes[name], dim)):
                        head.grad = grad
                for muon in muons:
                    muon.step()
            for name, heads in alone.items():
                (weight,) = model[name].parameters()
                whole = torch.cat(heads, int(name == "c_attn"))
                self.assertEqual(weight, whole, rtol=0, atol=0, msg=f"{scale} {name}")

    def test_class_of_the_same_name(self):
        for wrong in ({"num_attention_heads": 9}, {"kv_channels": None}):
            config = SimpleNamespace(**HEADS | wrong)
            module = known("SelfAttention", "linear_qkv.weight", (40, 8), config=config)
            self.assertEqual(split_of(module), {})
        del config.kv_channels
        self.assertEqual(split_of(module), {})
        # A linear layer (out, in), columns that are no third, fewer rows than a group of heads has,
        # queries without a gate, an MLP without one, and one of a user, who may alternate rows.
        for kind, weight, shape in (
            ("SelfAttention", "c_attn.weight", (24, 8)),
            ("SelfAttention", "c_attn.weight", (8, 20)),
            ("BloomAttention", "query_key_value.weight", (8, 8)),
            ("QwenAttention", "q_proj.weight", (24, 8)),
            ("MLP", "linear_fc1.weight", (12, 8)),
            ("MLP", "gate_up_proj.weight", (12, 8)),
        ):
            sizes = {"head_dim": 4, "o_proj": SimpleNamespace(in_features=24)}
            sizes["config"] = SimpleNamespace(gated_linear_unit=False)
            self.assertEqual(split_of(known(kind, weight, shape, **sizes)), {})

    def groups(self, parts, split, **options):
        groups, others = partition_named_parameters(tree(parts), split=split, **options)
        found = []
        for group in groups:
            names = [name for name, _ in group.pop("params")]
            found.append((names, {k: v for k, v in group.items() if v}))
        return found, [name for name, _ in others]

    def test_groups_by_split(self):
        def block():
            return {"qkv": linear(24), "up": linear(16), "norm": nn.LayerNorm(8)}

        conv = nn.Conv2d(4, 6, 3, bias=False)
        parts = {
            "layers": [block(), block()],
            "conv": conv,
            "other": nn.Conv1d(4, 6, 3, bias=False),
            "experts": Bare(up=(3, 12, 8), down=(3, 8, 6)),
            # Two ranks of expert parallelism share the experts.
            "router": linear(6),
            # Query heads, as XLNet stores them.
            "heads_of": Bare(q=(8, 2, 4)),
            "lm_head": linear(20),
        }
        split = {
            "*.qkv.weight": (8, 8, 8),
            # The last that matches decides, and heads stay heads.
            "layers.1.qkv.weight": {"sizes": [4, 2, 2], "repeats": 3},
            "conv.*": (2, 4),
            "experts.up": [6, 6],
            "lm_head.*": (10, 10),
        }
        rows, repeated = {"split": (8, 8, 8)}, {"sizes": (4, 2, 2), "repeats": 3}
        ups = ["layers.0.up.weight", "layers.1.up.weight"]
        expected = [
            (["layers.0.qkv.weight"], rows),
            (ups, {}),
            (["layers.1.qkv.weight"], {"split": {**repeated, "dim": 0}}),
            (["conv.weight"], {"split": (2, 4), "flatten": True}),
        ]
        with self.assertWarnsRegex(UserWarning, "not split: .*up, lm_head.weight$"):
            found, others = self.groups(parts, split)
        self.assertEqual(found, expected)
        self.assertIn("experts.up", others)
        found, others = self.groups(parts, split, allow_batched_matrices=True)
        ups.append("experts.down")
        self.assertEqual(found, [*expected, (["experts.up"], {"split": (6, 6)})])
        self.assertNotIn("experts.up", others)
        kinds = itertools.product((0, 1), ("weight", "bias"))
        norms = [f"layers.{i}.norm.{kind}" for i, kind in kinds]
        rest = ["other.weight", "router.weight", "heads_of.q", "lm_head.weight"]
        self.assertEqual(others, [*norms, *rest])
        stacks = {"allow_batched_matrices": True}
        groups, _ = partition_named_parameters(tree(parts), split=split, **stacks)
        self.assertEqual(len(Muon(groups, **stacks).param_groups), 5)

    def test_split_that_does_not_fit(self):
        """Biases that a pattern matches, and shards of a weight whose whole shape is not known."""
        columns = {"sizes": (4, 4), "repeats": 1, "dim": 1}
        found = self.groups({"c_attn": nn.Linear(8, 24)}, {"*c_attn*": columns})
        expected = [(["c_attn.weight"], {"split": columns})], ["c_attn.bias"]
        # A kernel whose split does not fit the flattened one, either.
        kernel = self.groups({"conv": nn.Conv1d(4, 6, 3, bias=False)}, {"*": (5, 4)})
        self.assertEqual(kernel, ([], ["conv.weight"]))
        self.assertEqual(found, expected)
        shard = known("GPT2Attention", "c_attn.weight", (16, 12))
        self.assertEqual(split_of(shard), {})

    def test_split_that_matches_nothing(self):
        with self.assertRaisesRegex(ValueError, "'qvk.*'.*near names.*qkv.weight"):
            self.groups({"qkv": linear(24)}, {"qvk.*": (8, 16)})
        found = self.groups({"up": linear(16)}, {})
        self.assertEqual(found, ([(["up.weight"], {})], []))

    def test_fused_weights_that_stay_whole(self):
        unknown = {"Wqkv": linear(24), "lora": lora(linear(8)), "qkv": [linear(24)]}
        parts = {
            "known": {"qkv": linear(24), "up": linear(16)},
            "unknown": unknown | {"c_attn": lora(linear(24))},
            "bare": Bare(in_proj_weight=(24, 8)),
        }
        split = {"known.qkv.*": {"sizes": (2, 6), "dim": 1}}
        lines, _ = printed(tree(parts), split=split)
        how = "Muon, left whole: named like a fused weight"
        for line in (
            "known.qkv.weight (24, 8) -> Muon, split {'sizes': (2, 6), 'repeats': 1, 'dim': 1}",
            "known.up.weight (16, 8) -> Muon",
            f"unknown.Wqkv.weight (24, 8) -> {how}",
            f"unknown.c_attn.base_layer.weight (24, 8) -> {how}",
            f"unknown.qkv.0.weight (24, 8) -> {how}",
            "unknown.c_attn.lora_A.default.weight (2, 8) -> Muon",
            f"bare.in_proj_weight (24, 8) -> {how}",
        ):
            self.assertIn(line, lines)


if __name__ == "__main__":
    run_tests()
