"""The fused weights of well-known classes, and the split of each of them.

To add a class, write a function of its module and of the shape of the weight, and give the function a row in one of the
tables. The function reads sizes from attributes of the module. It may fail, or return a split that does not add up:
another package may have a class of the same name.
"""

from collections.abc import Callable
from typing import Any

from .._muon_split import Split
from .parameters import Shape


# A pattern of the module's class, a pattern of the weight's name in the module, and the split of the weight.
Rule = tuple[str, str, Callable[[Any, Shape], Split]]


def _equal_blocks(count: int, lines: int, dim: int = 0) -> Split:
    size = lines // count
    return Split((size,) * count, dim=dim)


def _alternating_lines(lines: int, dim: int = 0) -> Split:
    """A line of the first part, a line of the second part, and so on."""
    return Split((1, 1), lines // 2, dim)


def _groups_of_heads(rows: int, queries: int, head_size: int) -> Split:
    """For each group of heads, its queries, its key and its value."""
    query_rows = queries * head_size
    group_rows = query_rows + 2 * head_size
    return Split((query_rows, head_size, head_size), rows // group_rows)


def _three_row_blocks(_module: Any, shape: Shape) -> Split:
    """All queries, all keys, all values."""
    return _equal_blocks(3, shape[0])


def _two_row_blocks(_module: Any, shape: Shape) -> Split:
    """The gate and the other part."""
    return _equal_blocks(2, shape[0])


def _gpt2_attention(_module: Any, shape: Shape) -> Split:
    """The weight is (in, out). It has keys and values without queries in cross-attention."""
    rows, columns = shape
    part_count = columns // rows
    return Split((rows,) * part_count, dim=1)


def _gpt_bigcode_attention(attention: Any, shape: Shape) -> Split:
    queries = attention.num_heads if attention.multi_query else 1
    return _groups_of_heads(shape[0], queries, attention.head_dim)


def _gpt_neox_attention(attention: Any, shape: Shape) -> Split:
    return _groups_of_heads(shape[0], 1, attention.head_size)


def _bloom_attention(attention: Any, shape: Shape) -> Split:
    return _groups_of_heads(shape[0], 1, attention.head_dim)


def _falcon_attention(attention: Any, shape: Shape) -> Split:
    queries = 1
    if attention.new_decoder_architecture or attention.multi_query:
        queries = attention.num_heads // attention.num_kv_heads
    return _groups_of_heads(shape[0], queries, attention.head_dim)


def _phi3_attention(attention: Any, shape: Shape) -> Split:
    """All queries, all keys, all values, where a key serves several queries."""
    key_rows = attention.num_key_value_heads * attention.head_dim
    return _groups_of_heads(shape[0], attention.num_key_value_groups, key_rows)


def _qwen_attention(attention: Any, shape: Shape) -> Split:
    """For each head, its query and the gate of the query, in the models that have gates."""
    query_rows = attention.o_proj.in_features
    if shape[0] != 2 * query_rows:
        return Split()
    head_size = attention.head_dim
    return Split((head_size, head_size), query_rows // head_size)


def _latent_attention(attention: Any, shape: Shape) -> Split:
    """For each head, its key without positions and its value."""
    sizes = (attention.qk_nope_head_dim, attention.v_head_dim)
    return Split(sizes, shape[0] // sum(sizes))


def _torchtitan_attention(attention: Any, shape: Shape) -> Split:
    return _groups_of_heads(shape[0], attention.heads_per_kv, attention.head_dim)


def _megatron_attention(attention: Any, _shape: Shape) -> Split:
    config = attention.config
    head_size = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups
    query_rows = queries * head_size
    sizes = [query_rows]
    if getattr(config, "attention_output_gate", False):
        # The gate of the attention follows the queries, with as many rows.
        sizes.append(query_rows)
    sizes += [head_size, head_size]
    return Split(tuple(sizes), config.num_query_groups)


def _dbrx_experts(experts: Any, shape: Shape) -> Split:
    """The experts are rows of one matrix."""
    return _equal_blocks(experts.moe_num_experts, shape[0])


def _gpt_oss_experts(_experts: Any, shape: Shape) -> Split:
    _expert_count, _rows, columns = shape
    return _alternating_lines(columns, dim=1)


def _llama4_experts(_experts: Any, shape: Shape) -> Split:
    _expert_count, _rows, columns = shape
    return _equal_blocks(2, columns, dim=1)


def _transformers_experts(experts: Any, shape: Shape) -> Split:
    """Most experts of transformers say by two flags how their weights are stored."""
    dim = 1 if experts.is_transposed else 0
    lines = shape[dim - 2]
    if experts.is_concatenated:
        return _equal_blocks(2, lines, dim)
    return _alternating_lines(lines, dim)


def _torchtitan_swiglu(_module: Any, shape: Shape) -> Split:
    """The weight (out, 2, in) is flattened to (out, 2 x in)."""
    _rows, _parts, columns = shape
    return _equal_blocks(2, 2 * columns, dim=1)


def _torchtitan_gated_layer(_module: Any, shape: Shape) -> Split:
    return _alternating_lines(shape[0])


def _torchtitan_experts(_experts: Any, shape: Shape) -> Split:
    return _alternating_lines(shape[1])


def _megatron_mlp(mlp: Any, shape: Shape) -> Split:
    """Each rank of tensor parallelism has rows of the gate, then rows of the other part."""
    config = mlp.config
    if not config.gated_linear_unit:
        return Split()
    size = half = shape[-2] // 2
    if hasattr(mlp, "num_local_experts"):
        # Experts may alternate between blocks of both parts.
        size = getattr(config, "moe_mlp_glu_interleave_size", None) or half
    tensor_parallel_group = getattr(mlp, "tp_group", None)
    if tensor_parallel_group:
        rank_count = tensor_parallel_group.size()
    else:
        rank_count = getattr(config, "tensor_model_parallel_size", 1)
    return Split((size, size), half // size * rank_count)


# The first rule that fits decides, so a class comes before a wider pattern.
ATTENTION_RULES: tuple[Rule, ...] = (
    ("torch.nn.*.MultiheadAttention", "in_proj_weight", _three_row_blocks),
    ("*.GPTBigCodeAttention", "c_attn.weight", _gpt_bigcode_attention),
    ("*Attention", "c_attn.weight", _gpt2_attention),
    ("*.GPTNeoXAttention", "query_key_value.weight", _gpt_neox_attention),
    ("*.BloomAttention", "query_key_value.weight", _bloom_attention),
    ("*.FalconAttention", "query_key_value.weight", _falcon_attention),
    ("*.Phi3Attention", "qkv_proj.weight", _phi3_attention),
    ("*.MptAttention", "Wqkv.weight", _three_row_blocks),
    ("*.DbrxAttention", "Wqkv.weight", _phi3_attention),
    ("*.Qwen*Attention", "q_proj.weight", _qwen_attention),
    # Classes of many names have latent attention, and its weight has one of few names.
    ("*", "*kv_b*.weight", _latent_attention),
    ("*.FusedQKVLinear", "wqkv.weight", _torchtitan_attention),
    ("*.SelfAttention", "linear_qkv.weight", _megatron_attention),
)
OTHER_RULES: tuple[Rule, ...] = (
    ("*.DbrxExpertGLU", "[vw][12]", _dbrx_experts),
    ("transformers*MLP", "gate_up_proj.weight", _two_row_blocks),
    ("*.GptOssExperts", "gate_up_proj", _gpt_oss_experts),
    ("*.Llama4TextExperts", "gate_up_proj", _llama4_experts),
    ("*Experts", "gate_up_proj", _transformers_experts),
    ("*.FusedSwiGLU", "w13", _torchtitan_swiglu),
    ("torchtitan.*", "w13.weight", _torchtitan_gated_layer),
    ("torchtitan.*", "mlp1_weight*", _torchtitan_experts),
    ("*MLP", "linear_fc1.weight*", _megatron_mlp),
)
