"""What names of parameters and layers say."""

import re

from torch.distributed.fsdp._common_utils import clean_tensor_name


# Names that torch.compile and PEFT put between a model and its layers, and weight_norm before a parameter.
_WRAPPERS = r"\b(_orig_mod|base_layer|original_module|modules_to_save\.\w+)\."
PARAMETRIZED = r"\bparametrizations\.\w+\.(?=original)"
# Names that models give to the layer that computes logits, or to the module around it.
HEAD = r"class_embed|classifier|embed_out|(lm_)?head|output_layer|qa_outputs|score|unembed(ding)?"
# Inside blocks, hidden layers have such names as well, and attention has heads.
HEAD_OUTSIDE = (
    r"(?i)heads|heads?_\w+|\w+_(heads?|classifier|class_embed)|\w*logits(_proj)?"
)
# Layers of a block differ in their numbers only.
NUMBER = re.compile(r"\b\d+\b")
# Of parameters without a linear layer: tables of positions and tokens, biases, gains of heads, Mamba's A_log.
TABLE = r"(^|_)(pos(?!t)|table|tokens?$|latent(s|_quer)|gain|gamma|scale)|norm|embed|bias|_log$"
POSITIONS = r"(^|_)(pos(?!t)|table)"
QUERIES = r"quer(y|ies)"
# Layers that have several matrices in one.
_FUSED = r"kv|key_value|c_attn|att_proj|gate_up|input_linear|mlp1_weight|w1[23]|\bWi\b|\bin_proj"


def unwrapped(name: str) -> str:
    """``name`` without what wrappers of models and layers put into it."""
    return re.sub(_WRAPPERS, "", clean_tensor_name(name))


def is_fused(name: str) -> bool:
    """Whether a weight is named as if it had several matrices in one."""
    return re.search(_FUSED, ".".join(unwrapped(name).split(".")[-3:])) is not None


def is_router(unit: str) -> bool:
    return any("router" in part for part in unit.split(".")[-3:])
