"""split_of() against the forwards of transformers: which lines become which tensor."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim._muon_split import Split
from torch.overrides import TorchFunctionMode


how = "run `setup_overlay.py test --frameworks`"
transformers = pytest.importorskip("transformers", reason=how)
pytest.importorskip("torch.optim.muon")
from torch.optim.muon import Muon, partition_named_parameters, split_of


# One layer. No two sizes are equal, so that no wrong split has the right lines.
SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "vocab_size": 50, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 10, "moe_intermediate_size": 10}
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 3)
SIZES |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SIZES |= {"first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": 8}
SIZES |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4}
QKV, GATE = ("query", "key", "value"), ("gate",)
C_ATTN, ATTENTION = {"attn.c_attn.weight": QKV}, {"query_key_value.weight": QKV}
LATENT, EXPERTS = {"kv_b_proj.weight": QKV[1:]}, {"gate_up_proj": GATE}
FALCON = "FalconForCausalLM"
DEEPSEEK = {"num_key_value_heads": 6}
# A model, its options, and its fused weights with the tensors that are computed from their parts. With one
# tensor, the other part is the rest.
MODELS = [
    ("GPT2LMHeadModel", {}, C_ATTN),
    ("MptForCausalLM", {}, {"Wqkv.weight": QKV}),
    ("GPTNeoXForCausalLM", {}, ATTENTION),
    (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 2}, ATTENTION),
    (FALCON, {"multi_query": True}, ATTENTION),
    (FALCON, {"multi_query": False}, ATTENTION),
    ("Phi3ForCausalLM", {}, {"qkv_proj.weight": QKV, "gate_up_proj.weight": GATE}),
    ("GptOssForCausalLM", {"head_dim": 4}, EXPERTS),
    ("Qwen3MoeForCausalLM", {"head_dim": 4}, EXPERTS),
    ("DeepseekV3ForCausalLM", DEEPSEEK | {"head_dim": 2}, LATENT | EXPERTS),
]


class Spy(TorchFunctionMode):
    """Records the operands of attention, and what goes into the function of a gate."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def keep(self, *tensors):
        self.calls.append(dict(zip(QKV if len(tensors) > 1 else ["gate"], tensors)))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.keep(*args[:3], *(kwargs[n] for n in QKV[len(args) :]))
        elif function in (F.silu, torch.sigmoid):
            self.keep(args[0])
        result = function(*args, **kwargs)
        # Some models multiply by themselves.
        if function in (torch.Tensor.chunk, torch.Tensor.split) and len(result) == 3:
            self.keep(*result)
        return result


def tiny(name, options):
    cls = getattr(transformers, name)
    default = cls.config_class()
    sizes = {k: v for k, v in SIZES.items() if hasattr(default, k)}
    torch.manual_seed(0)
    config = cls.config_class(**{**sizes, **options})
    # The kernel of grouped products needs sizes that are multiples of 16 bytes.
    config._experts_implementation = "eager"
    model = cls(config).eval()
    for param in model.parameters():
        # Some are zeros at first, which would hide what depends on them.
        torch.nn.init.normal_(param, std=0.3)
    return model


def spied(model):
    with Spy() as spy:
        model(torch.arange(12).view(2, 6), use_cache=False)
    return spy.calls


def used(tensor, weight):
    """The elements of ``weight``, in any matrix of a stack, that ``tensor`` is computed from."""
    options = {"retain_graph": True, "allow_unused": True}
    (grad,) = torch.autograd.grad(tensor.square().sum(), weight, **options)
    if grad is None:
        return torch.zeros(weight.shape[-2:], dtype=torch.bool)
    return grad.ne(0).view(-1, *weight.shape[-2:]).any(0)


def elements(split, weight):
    """The elements of each part of a split."""
    marks = torch.full(weight.shape[-2:], -1)
    parts = Split.of(split).parts(marks)
    for number, part in enumerate(parts):
        part.fill_(number)
    return [marks == number for number in range(len(parts))]


@pytest.mark.parametrize(("name", "options", "weights"), MODELS)
def test_parts_are_what_the_forward_slices(name, options, weights):
    model = tiny(name, options)
    params, splits = dict(model.named_parameters()), split_of(model)
    groups, _ = partition_named_parameters(
        model, split=splits, allow_batched_matrices=True
    )
    Muon(groups, allow_batched_matrices=True)
    calls, found = spied(model), set()
    for full, split in splits.items():
        (kind,) = (kind for kind in weights if full.endswith(f".{kind}"))
        found.add(kind)
        tried = (
            [used(operands[name], params[full]) for name in weights[kind]]
            for operands in calls
            if operands.keys() >= set(weights[kind])
        )
        # Later ones depend on the weight through the result of the layer.
        masks = next(each for each in tried if each[0].any())
        if weights[kind] == GATE:
            masks.append(~masks[0])
        parts = elements(split, params[full])
        # Groups of queries share a key and a value.
        assert all(any(torch.equal(part, mask) for mask in masks) for part in parts)
        assert all(any(torch.equal(part, mask) for part in parts) for mask in masks)
    assert found == weights.keys()
