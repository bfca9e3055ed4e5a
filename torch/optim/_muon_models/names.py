"""The words in names of parameters and layers.

The words are those of transformers, torchtitan, Megatron, diffusers, timm and torchvision. Add a word here if a model
of yours has another one, and if hidden layers of other models do not have it.
"""

import re

from torch.distributed.fsdp._common_utils import clean_tensor_name


# torch.compile and PEFT put these between a model and its layers.
_WRAPPER = re.compile(
    r"\b(_orig_mod|base_layer|original_module|modules_to_save\.\w+)\."
)
# weight_norm puts this between a layer and its parameter.
_PARAMETRIZATION = re.compile(r"\bparametrizations\.\w+\.(?=original)")
# The layers of different blocks differ in their numbers only.
_NUMBER = re.compile(r"\b\d+\b")

# The layer that computes logits, or the module around it.
_OUTPUT_HEAD = re.compile(
    r"""
    class_embed
    | classifier
    | embed_out
    | (lm_)?head
    | output_layer
    | qa_outputs
    | score
    | unembed(ding)?
    """,
    re.VERBOSE,
)
# Inside blocks, hidden layers have such names as well, and attention has heads.
_OUTPUT_HEAD_OUTSIDE_OF_BLOCKS = re.compile(
    r"""
    heads
    | heads?_\w+
    | \w+_(heads?|classifier|class_embed)
    | \w*logits(_proj)?
    """,
    re.VERBOSE | re.IGNORECASE,
)

# No layer multiplies by these parameters.
_TABLE = re.compile(
    r"""
    (^|_) pos(?!t)           # positions, but not "post"
    | (^|_) table
    | (^|_) tokens?$         # register_tokens
    | (^|_) latent(s|_quer)  # latents and latent_query, but not latent_proj
    | (^|_) gain
    | (^|_) gamma
    | (^|_) scale
    | norm
    | embed
    | bias
    | _log$                  # Mamba's A_log
    """,
    re.VERBOSE,
)
_TABLE_OF_POSITIONS = re.compile(r"(^|_)(pos(?!t)|table)")
_QUERIES = re.compile(r"quer(y|ies)")

# One weight has several matrices.
_FUSED = re.compile(
    r"""
    kv
    | key_value
    | c_attn
    | att_proj
    | gate_up
    | input_linear
    | mlp1_weight
    | w1[23]
    | \bWi\b
    | \bin_proj
    """,
    re.VERBOSE,
)
# The last parts of a name: a layer, the module around it, and a parameter.
_NEAREST_PARTS = 3


def unwrapped(parameter_name: str) -> str:
    """The name of a parameter without what wrappers of models and layers put into it."""
    return _WRAPPER.sub("", clean_tensor_name(parameter_name))


def unwrapped_module(module_name: str) -> str:
    """The name of a module without what wrappers put into it. A wrapped module gets the name of its wrapper."""
    # A wrapper's name ends in a dot.
    return unwrapped(f"{module_name}.")[:-1]


def layer_of(parameter_name: str) -> str:
    """The name of the layer that has a parameter, whose name is unwrapped."""
    plain_name = _PARAMETRIZATION.sub("", parameter_name)
    layer_name, _, _ = plain_name.rpartition(".")
    return layer_name


def without_numbers(name: str) -> str:
    """``name`` with a ``*`` for each number: equal for the layers of different blocks."""
    return _NUMBER.sub("*", name)


def is_fused(name: str) -> bool:
    """Whether a weight is named as if it had several matrices."""
    name_parts = unwrapped(name).split(".")
    nearest_parts = ".".join(name_parts[-_NEAREST_PARTS:])
    return _FUSED.search(nearest_parts) is not None


def is_router(name: str) -> bool:
    """Whether a parameter or its layer is named as a router."""
    name_parts = name.split(".")
    return any("router" in name_part for name_part in name_parts[-_NEAREST_PARTS:])


def is_output_head(name_part: str) -> bool:
    """Whether a part of a layer's name says, anywhere in the model, that this is an output head."""
    return _OUTPUT_HEAD.fullmatch(name_part) is not None


def is_output_head_outside_of_blocks(name_part: str) -> bool:
    """Whether a part of a layer's name says that this is an output head, if the part comes before any block."""
    return _OUTPUT_HEAD_OUTSIDE_OF_BLOCKS.fullmatch(name_part) is not None


def is_table(name: str) -> bool:
    """Whether a parameter without a linear layer is named as a table, a bias, a gain or a scale."""
    return _TABLE.search(name) is not None


def is_table_of_positions(name: str) -> bool:
    """Whether a module is named as a table of positions."""
    return _TABLE_OF_POSITIONS.search(name) is not None


def is_queries(name: str) -> bool:
    """Whether a bare parameter is named as learned queries."""
    return _QUERIES.fullmatch(name) is not None
