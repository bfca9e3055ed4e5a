# Owner(s): ["module: optimizer"]
"""Which parameters of a model go to Muon, and how its fused weights are split."""

import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import Muon
from torch.optim.muon import (
    partition_named_parameters,
    partition_parameters,
    split_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase


if dist.is_available():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP


def linear(rows=8, columns=8):
    return nn.Linear(columns, rows, bias=False)


def tree(parts):
    """Nested modules: a dict's keys and a list's indices are the parts of names."""
    if isinstance(parts, dict):
        return nn.ModuleDict({name: tree(part) for name, part in parts.items()})
    if isinstance(parts, list):
        return nn.ModuleList(map(tree, parts))
    return parts


def block():
    return {"up": linear(16), "down": linear(8, 16)}


def lora(base):
    """A layer and its adapters, as PEFT names them."""
    parts = {"lora_A": {"default": linear(2)}, "lora_B": {"default": linear(8, 2)}}
    return tree({"base_layer": base, **parts})


def bare(shapes):
    """A module with parameters of its own: name -> shape."""
    return nn.ParameterDict({name: torch.empty(shapes[name]) for name in shapes})


def telling(module, **attributes):
    """A module that says something about itself."""
    module.__dict__.update(attributes)
    return module


class ModelsTestCase(TestCase):
    def destinations(self, model, **options):
        """Name -> what is printed. The lists agree with it."""
        with mock.patch("builtins.print") as printer:
            matrices, others = partition_named_parameters(
                model, verbose=True, **options
            )
        if "split" in options:
            matrices = [pair for group in matrices for pair in group["params"]]
        found = {}
        for call in printer.call_args_list:
            named, _, destination = call.args[0].partition(" -> ")
            found[named.partition(" ")[0]] = destination
        of_muon = {name for name, to in found.items() if to.startswith("Muon")}
        self.assertEqual({name for name, _ in matrices}, of_muon)
        self.assertEqual({name for name, _ in others}, found.keys() - of_muon)
        return found


# A model, and why some of its parameters do not go to Muon. The others do.
HEAD, EMBEDDING, VECTOR = "output head", "embedding", "a dimension of 1"
SHARED = nn.Embedding(20, 8)
TIED = linear(20)
TIED.weight = SHARED.weight
MODELS = {
    "a block and a head whose name says nothing": (
        tree({"layers": [block()], "fc": linear(), "token": nn.EmbeddingBag(20, 8)}),
        {"token.weight": EMBEDDING, "fc.weight": HEAD},
    ),
    "blocks in a Sequential": (
        nn.Sequential(nn.Sequential(linear()), nn.Sequential(linear()), linear()),
        {"2.weight": HEAD},
    ),
    "a backbone and a head in a Sequential": (
        nn.Sequential(tree({"layers": [block()]}), nn.Sequential(linear())),
        {"1.0.weight": HEAD},
    ),
    "one block of a pipeline": (tree({"layers": {"3": block()}}), {}),
    "heads by name": (
        tree({"lm_head": linear(), "classifier": {"up": linear()}, "last": linear()}),
        {"lm_head.weight": HEAD, "classifier.up.weight": HEAD, "last.weight": HEAD},
    ),
    "kinds of layers": (
        tree(
            [
                {"gate": linear(3), "router": {"a": linear()}, "gate_proj": linear()},
                {"one": linear(1), "conv": nn.Conv2d(4, 2, 3), "norm": nn.RMSNorm(8)},
                {"up": parametrizations.weight_norm(linear())},
                {"cell": nn.GRUCell(8, 8, bias=False), "up": linear()},
                # In a block, these are no heads of the model.
                {"head": linear(), "output": {"dense": linear()}},
                # An embedding of another package.
                telling(bare({"weight": (20, 8)}), num_embeddings=20),
            ]
        ),
        {
            "0.gate.weight": "router",
            "0.router.a.weight": "router",
            "1.one.weight": VECTOR,
            "1.conv.weight": "4D",
            "1.conv.bias": "1D",
            "1.norm.weight": "1D",
            "2.up.parametrizations.weight.original0": VECTOR,
            "3.cell.weight_ih": "recurrent",
            "3.cell.weight_hh": "recurrent",
            "5.weight": EMBEDDING,
        },
    ),
    "bare parameters": (
        bare({"w1": (6, 8), "b_bias": (6, 8), "pos_embed": (6, 8), "stack": (2, 6, 8)}),
        {"b_bias": "bias", "pos_embed": EMBEDDING, "stack": "3D"},
    ),
    # A layer that comes first gives the weight its name.
    "a layer that is tied to an embedding": (
        tree({"hidden": TIED, "token": SHARED, "last": linear()}),
        {"hidden.weight": EMBEDDING, "last.weight": HEAD},
    ),
    "adapters": (
        tree(
            {"token": lora(SHARED), "layers": [lora(linear())], "last": lora(linear())}
        ),
        {
            f"{name}.{part}.weight": reason
            for name, reason in (("token", EMBEDDING), ("last", HEAD))
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        },
    ),
}


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestPartition(ModelsTestCase):
    def test_models(self):
        for kind, (model, reasons) in MODELS.items():
            with self.subTest(kind):
                names = [name for name, _ in model.named_parameters()]
                expected = dict.fromkeys(names, "Muon")
                for name, reason in reasons.items():
                    expected[name] = f"rest: {reason}"
                self.assertEqual(self.destinations(model), expected)

    def test_partition_parameters(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4))
        matrices, others = partition_parameters(model)
        self.assertEqual([tuple(m.shape) for m in matrices], [(5, 3), (4, 3)])
        self.assertEqual(others, [model[1].bias])

    def test_stacks(self):
        shapes = {"w": (2, 6, 8), "bias": (2, 6, 8), "token": (1, 6, 8)}
        conv = parametrizations.weight_norm(nn.Conv1d(4, 2, 3, bias=False))
        found = self.destinations(
            tree([bare(shapes), conv]), allow_batched_matrices=True
        )
        reasons = "bias", VECTOR, VECTOR, "convolution"
        rest = [f"rest: {reason}" for reason in reasons]
        self.assertCountEqual(found.values(), ["Muon", *rest])

    def test_exclude(self):
        model = tree({"layers": [block(), block()], "lm_head": linear()})
        model.layers[0] = torch.compile(checkpoint_wrapper(model.layers[0]))
        compiled = torch.compile(model)
        name = "_orig_mod.layers.0._orig_mod.up.weight"
        for pattern in ("layers.0.up.*", [name], ("*0.up.weight",)):
            with self.subTest(pattern):
                found = self.destinations(compiled, exclude=pattern)
                self.assertEqual(found[name], "rest: excluded")
                self.assertEqual([*found.values()].count("Muon"), 3)
        with self.assertRaisesRegex(ValueError, "no parameter matches 'layers.9.up.*'"):
            partition_named_parameters(model, exclude=["*.down.*", "layers.9.up.*"])

    def test_groups_by_split(self):
        layers = {"qkv": linear(24), "up": linear(), "in_proj": lora(linear(24))}
        model = tree([layers, bare({"w": (3, 6, 8)})])
        split = {
            "*.qkv.weight": (20, 4),
            # The last pattern that matches a name decides.
            "0.qkv.*": {"sizes": (4, 2), "repeats": 4},
            "1.w": (3, 3),
        }
        options = {"split": split, "allow_batched_matrices": True}
        of_qkv = repeated((4, 2), 4)
        expected = {
            "0.qkv.weight": f"Muon, split {of_qkv}",
            "0.up.weight": "Muon",
            "0.in_proj.base_layer.weight": "Muon",
            "0.in_proj.lora_A.default.weight": "Muon",
            "0.in_proj.lora_B.default.weight": "Muon",
            "1.w": "Muon, split (3, 3)",
        }
        self.assertEqual(self.destinations(model, **options), expected)
        groups, _ = partition_named_parameters(model, **options)
        found = [(group["params"][0][0], group["split"]) for group in groups]
        expected = [("0.qkv.weight", of_qkv), ("0.up.weight", None), ("1.w", (3, 3))]
        self.assertEqual(found, expected)
        Muon(groups, allow_batched_matrices=True)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestWrappedModels(ModelsTestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def shard(self, module, **options):
        return FSDP(module, device_id=torch.device("cpu"), **options)

    def test_wrapped_layers(self):
        parts = {"token": nn.Embedding(20, 8), "up": linear(), "last": linear()}
        parts["token"] = fully_shard(parts["token"])
        for name in ("up", "last"):
            parts[name] = self.shard(parts[name], use_orig_params=True)
        found = self.destinations(torch.compile(tree(parts)))
        expected = {
            "_orig_mod.token.weight": "rest: embedding",
            "_orig_mod.up.weight": "Muon",
            "_orig_mod.last.weight": f"rest: {HEAD}",
        }
        self.assertEqual(found, expected)

    def test_flat_parameters(self):
        """The other optimizer takes an embedding and a norm in one flat parameter."""
        tables = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
        matrices, others = partition_named_parameters(self.shard(tables))
        self.assertEqual((len(matrices), len(others)), (0, 1))


def repeated(sizes, repeats, dim=0):
    return {"sizes": sizes, "repeats": repeats, "dim": dim}


SIX = {"num_heads": 6, "head_dim": 4}
GROUPS = SIX | {"num_key_value_heads": 2}
MEGATRON = {"num_attention_heads": 6, "kv_channels": 4, "num_query_groups": 2}
LATENT = {"num_heads": 2, "qk_nope_head_dim": 6, "v_head_dim": 4, "qk_head_dim": 8}
GATED = {"is_concatenated": True, "is_transposed": False}
ALTERNATING = {"is_concatenated": False, "is_transposed": True}
THREE = repeated((8, 8, 8), 1, 1)
OF_GROUPS, COLUMNS = repeated((12, 4, 4), 2), repeated((1, 1), 6, 1)
HEADS = (4,) * 10
# The name and the shape of a weight, attributes of its module, its split, and its split with heads.
FUSED = [
    ("qkv_proj", (40, 8), GROUPS, (24, 8, 8), HEADS),
    ("query_key_value", (40, 8), GROUPS, OF_GROUPS, HEADS),
    ("query_key_value", (72, 8), SIX, repeated((4, 4, 4), 6), (4,) * 18),
    ("linear_qkv", (40, 8), {"config": SimpleNamespace(**MEGATRON)}, OF_GROUPS, HEADS),
    # transformers has (in, out), and nanoGPT (out, in).
    ("c_attn", (8, 24), {"num_heads": 2}, THREE, repeated((4,) * 6, 1, 1)),
    ("c_attn", (24, 8), {"n_head": 2, "n_embd": 8}, (8, 8, 8), (4,) * 6),
    ("kv_b_proj", (20, 8), LATENT, repeated((6, 4), 2), (6, 4, 6, 4)),
    ("gate_up_proj", (12, 8), {}, (6, 6), (6, 6)),
    ("gate_up_proj", (3, 12, 8), GATED, (6, 6), (6, 6)),
    ("gate_up_proj", (3, 8, 12), ALTERNATING, COLUMNS, COLUMNS),
    # Other packages have other layouts under these names, or the sizes say another number of rows.
    ("qkv_proj", (72, 8), SIX, None, None),
    ("c_attn", (8, 32), SIX, None, None),
    ("gate_up_proj", (3, 12, 8), {}, None, None),
    ("query_key_value", (56, 8), SIX | {"num_kv_heads": 4}, None, None),
    # To the latents of all heads.
    ("q_a_proj", (16, 8), LATENT, None, None),
]


class RefusingConfig:
    @property
    def num_key_value_heads(self):
        raise ValueError("differs between layers")


REFUSING = SIX | {"config": RefusingConfig()}
WIDE = {"num_heads": 6, "head_size": 24, "attention_head_size": 4}
# A projection, its rows, attributes of its module, and the rows of each head; 0 if they are unknown.
PROJECTIONS = [
    ("q_proj", 24, GROUPS, 4),
    ("k_proj", 8, GROUPS, 4),
    ("v_proj", 24, SIX | {"head_dim": 8, "v_head_dim": 4}, 4),
    ("q_b_proj", 16, LATENT, 8),
    # LXMERT has the size of all heads, too.
    ("query", 24, WIDE, 4),
    # Stable Audio 3 has queries of two kinds. The last attention of CaiT says how many heads there are.
    ("to_q", 24, {"heads": 6, "dim_head": 4}, 4),
    ("to_q", 48, {"heads": 6, "dim_head": 4}, 0),
    ("q", 24, {"num_heads": 6}, 0),
    ("k_proj", 8, REFUSING, 0),
]


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestSplitOf(ModelsTestCase):
    def test_fused_weights(self):
        for name, shape, attributes, split, heads in FUSED:
            module = telling(bare({name: shape}), **attributes)
            with self.subTest(name, shape=shape, attributes=attributes):
                for expected, asked in ((split, False), (heads, True)):
                    found = split_of(tree([module]), heads=asked)
                    self.assertEqual(found.get(f"0.{name}"), expected)

    def test_wrapped_layers(self):
        module = telling(tree({"qkv_proj": linear(40)}), **GROUPS)
        module.qkv_proj = lora(module.qkv_proj)
        (name,) = split_of(torch.compile(tree([checkpoint_wrapper(module)])))
        self.assertEqual(name, "_orig_mod.0.qkv_proj.base_layer.weight")

    def test_projections(self):
        """Those whose heads are unknown were silently left whole."""
        for name, rows, attributes, size in PROJECTIONS:
            model = tree([telling(tree({name: linear(rows)}), **attributes)])
            split, mark = None, "Muon, left whole: head size unknown"
            if size:
                split = (size,) * (rows // size)
                mark = f"Muon, split {split}"
            with self.subTest(name, rows=rows, attributes=attributes):
                self.assertEqual(split_of(model), {})
                splits = split_of(model, heads=True)
                self.assertEqual(splits, {f"0.{name}.weight": split})
                found = self.destinations(model, split=splits)
                self.assertEqual([*found.values()], [mark])

    def test_heads_of_torch(self):
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        for module, expected in (
            (nn.MultiheadAttention(8, 2), {"in_proj_weight": (4,) * 6}),
            (nn.MultiheadAttention(8, 2, kdim=6), dict.fromkeys(names, (4, 4))),
        ):
            self.assertEqual(split_of(module, heads=True), expected)


if __name__ == "__main__":
    run_tests()
