r"""Distributed Muon: one owner rank for each matrix.

Muon orthogonalizes whole momentum matrices, but FSDP, TP and others leave each rank with a piece. With a
:class:`DistributedConfig`, :class:`torch.optim.Muon` gathers each matrix to one owner rank, which
orthogonalizes it and sends every rank its piece of the update.
"""

from __future__ import annotations

import warnings
from itertools import starmap
from typing import Any, TYPE_CHECKING

from torch.optim._muon import Muon  # noqa: F401
from torch.optim._muon_engine.config import DistributedConfig


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn, Tensor
    from torch.distributed import ProcessGroup


__all__ = [
    "CUBIC",
    "DEEPSEEK_V4",
    "DistributedConfig",
    "POLAR_EXPRESS",
    "create_auto_config",
    "create_dtensor_config",
    "detect_tp_dims_from_model",
    "partition_named_parameters",
    "partition_parameters",
    "split_of",
]

# Published coefficients of Newton-Schulz, with the number of steps that belongs to each: Muon(params, **CUBIC).

# The Polar Express, https://arxiv.org/abs/2505.16932: each step is the best odd quintic for the singular values that
# the steps before it leave. All but the last step allow for singular values up to 1.01, because bfloat16 rounds.
_POLAR_EXPRESS_IN_EXACT_ARITHMETIC = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LARGEST_SINGULAR_VALUE = 1.01


def _allowing_for_rounding(a: float, b: float, c: float) -> tuple[float, float, float]:
    """The coefficients of a x + b x**3 + c x**5 for x divided by the largest singular value."""
    return (
        a / _LARGEST_SINGULAR_VALUE,
        b / _LARGEST_SINGULAR_VALUE**3,
        c / _LARGEST_SINGULAR_VALUE**5,
    )


POLAR_EXPRESS: dict[str, Any] = {
    "ns_coefficients": (
        *starmap(_allowing_for_rounding, _POLAR_EXPRESS_IN_EXACT_ARITHMETIC),
        (1.875, -1.25, 0.375),
    ),
    "ns_steps": 8,
}

# "cubic5" of How Much Orthogonalization Does Muon Need?, https://arxiv.org/abs/2606.00371, and of NVIDIA's
# Emerging-Optimizers: ten products with the default number of steps instead of fifteen.
CUBIC: dict[str, Any] = {
    "ns_coefficients": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    "ns_steps": 5,
}

# DeepSeek-V4's technical report: eight steps of Keller Jordan's coefficients, and two that bring singular values
# closer to one.
DEEPSEEK_V4: dict[str, Any] = {
    "ns_coefficients": (
        *((3.4445, -4.7750, 2.0315),) * 8,
        *((2.0, -1.5, 0.5),) * 2,
    ),
    "ns_steps": 10,
}


def create_dtensor_config(
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
) -> DistributedConfig:
    r"""Makes the config for parameters that are DTensors: FSDP2, TP, ``distribute_tensor`` and mixes.

    Each rank takes a plain tensor for a whole matrix and updates it by itself.

    Args:
        async_gpu_parallelism, prefetch_count (optional): see :class:`DistributedConfig` (default: True, 1)

    Returns:
        DistributedConfig: its ``state["is_dtensor"]`` is True. Once the optimizer is built,
        ``state["param_metadata"][i]`` has ``device_mesh`` and ``placements`` of each DTensor.
    """
    # These modules import torch.distributed, as this one must not.
    from torch.optim._muon_engine.factory import factory_config

    return factory_config({}, async_gpu_parallelism, prefetch_count)


def create_auto_config(
    fsdp_process_group: ProcessGroup | None = None,
    tp_process_group: ProcessGroup | None = None,
    ddp_process_group: ProcessGroup | None = None,
    ep_process_group: ProcessGroup | None = None,
    cp_process_group: ProcessGroup | None = None,
    tp_dim_per_param: dict[int, int] | int | None = None,
    expert_assignments: dict[int, int] | None = None,
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    tp_shard_dim: int | None = None,
    shard_process_group: ProcessGroup | None = None,
    replicate_process_group: ProcessGroup | None = None,
    pp_process_group: ProcessGroup | None = None,
    pp_stage_id: int | None = None,
    pp_num_stages: int | None = None,
    module: nn.Module | None = None,
) -> DistributedConfig:
    r"""Makes the config for parameters that process groups share: DDP, FSDP1, tensors cut by hand.

    The groups must form a grid, as the dimensions of a
    :class:`~torch.distributed.device_mesh.DeviceMesh` do: TP cuts a matrix first, FSDP cuts the rows of
    the TP piece, and DDP and CP replicate the result. The ranks exchange the sizes of their pieces.

    DTensors describe themselves, and a group or dimension that contradicts a placement is a warning. DDP
    and CP groups add replicas of their whole mesh.

    Args:
        fsdp_process_group (ProcessGroup, optional): the ranks that shard a matrix; for FSDP1
            ``model.process_group`` (default: None)
        tp_process_group (ProcessGroup, optional): the ranks of tensor parallelism (default: None)
        ddp_process_group (ProcessGroup, optional): the ranks that hold replicas (default: None)
        ep_process_group (ProcessGroup, optional): the ranks that hold different experts. Muon never
            communicates over it (default: None)
        cp_process_group (ProcessGroup, optional): replicas, by context parallelism (default: None)
        tp_dim_per_param (dict[int, int] or int, optional): parameter index -> the dimension that TP cuts,
            without the parameters that it does not cut; or an int for all, but not for plain parameters
            next to DTensors over this group (or what FSDP1 made of these), which are whole. None looks for
            a ``tp_dim`` or ``partition_dim`` attribute of each parameter (default: None)
        expert_assignments (dict[int, int], optional): parameter index -> id of its expert. Along the
            other groups, ranks with the same id share the expert. Ranks of one ``ep_process_group``
            never share one (default: None)
        async_gpu_parallelism, prefetch_count (optional): see :class:`DistributedConfig` (default: True, 1)
        tp_shard_dim (int, optional): alias of an int ``tp_dim_per_param`` (default: None)
        shard_process_group, replicate_process_group (ProcessGroup, optional): aliases of
            ``fsdp_process_group`` and ``ddp_process_group`` (default: None)
        pp_process_group, pp_stage_id, pp_num_stages (optional): kept in ``state``. Stages share no matrix
        module (nn.Module, optional): the FSDP1-wrapped model. It knows the shapes that
            ``use_orig_params=True`` hides, and the groups of ``HYBRID_SHARD`` (default: None)

    Returns:
        DistributedConfig: its ``state`` holds the arguments.

    Raises:
        ValueError: an option is invalid, two spellings of one argument are given, or ``ep_process_group``
            is given without ``expert_assignments``.
    """
    from torch.optim._muon_engine.factory import either, factory_config

    fsdp = either(
        fsdp_process_group=fsdp_process_group, shard_process_group=shard_process_group
    )
    ddp = either(
        ddp_process_group=ddp_process_group,
        replicate_process_group=replicate_process_group,
    )
    tp_dim = either(tp_dim_per_param=tp_dim_per_param, tp_shard_dim=tp_shard_dim)
    if ep_process_group is not None and expert_assignments is None:
        raise ValueError(
            "ep_process_group needs expert_assignments, a dict of parameter index -> expert id; {} if this optimizer has no expert"
        )
    state: dict[str, Any] = {
        "reader": "process_groups",
        "is_dtensor": False,
        "fsdp_process_group": fsdp,
        "tp_process_group": tp_process_group,
        "ddp_process_group": ddp,
        "ep_process_group": ep_process_group,
        "cp_process_group": cp_process_group,
        "expert_assignments": dict(expert_assignments or {}),
        "pp_process_group": pp_process_group,
        "pp_stage_id": pp_stage_id,
        "pp_num_stages": pp_num_stages,
        "module": module,
    }
    if isinstance(tp_dim, int):
        state["tp_dim_default"] = tp_dim
    elif tp_dim is not None:
        state["tp_dim_per_param"] = dict(tp_dim)
    return factory_config(state, async_gpu_parallelism, prefetch_count)


def detect_tp_dims_from_model(
    module_or_params: nn.Module | Iterable[Tensor],
) -> dict[int, int]:
    r"""Finds the dimension along which tensor parallelism cuts each parameter.

    A ``tp_dim`` or ``partition_dim`` attribute comes first (-1 means not cut), then a DTensor's innermost
    shard, or what FSDP1 knows of a DTensor that it flattened. If any parameter is such a DTensor, those
    that say nothing are whole. Otherwise dimension 0 is a guess, with a warning. A flat parameter of FSDP1
    has no dimension: FSDP1 knows how each tensor in it was cut.

    Args:
        module_or_params (nn.Module or iterable of Tensor): the parameters in the optimizer's order, so
            that the indices are the optimizer's.

    Returns:
        dict[int, int]: parameter index -> dimension, without parameters that are not cut.
    """
    from torch.optim._muon_engine.tp_dims import detected_tp_dims

    dims: dict[int, int] = {}
    guessed: list[int] = []
    for index, dim in detected_tp_dims(module_or_params).items():
        if dim is None:
            dims[index] = 0
            guessed.append(index)
        elif dim != -1:
            dims[index] = dim
    if guessed:
        warnings.warn(
            f"nothing says how TP cuts parameters {guessed}; dimension 0 is a guess. Set a tp_dim on each, -1 for not at all",
            stacklevel=2,
        )
    return dims


def partition_parameters(
    module: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    r"""Splits a model's parameters into the matrices, for Muon, and the others.

    It goes by the unsharded shape. Embeddings and output heads are matrices too, but belong to another
    optimizer: see :func:`partition_named_parameters`.

    Args:
        module (nn.Module): plain, or wrapped by DDP, FSDP1, FSDP2 or tensor parallelism.

    Returns:
        tuple of two lists of Parameter: matrices and others, in the order of ``module.parameters()``.

    Raises:
        ValueError: a flat FSDP1 parameter holds matrices together with others, or FSDP2 has unsharded parameters,
            as after a forward without a backward.
    """
    from torch.optim._muon_engine.fsdp import check_resharded, logical_matrices, mixed

    check_resharded(module)
    matrices, others = [], []
    for parameter_name, parameter, tensors in logical_matrices(module):
        # Number of dimensions -> the name of a tensor with that number.
        examples = {len(shape): tensor_name for tensor_name, shape in tensors}
        if 2 not in examples:
            others.append(parameter)
        elif len(examples) == 1:
            matrices.append(parameter)
        else:
            kinds = {f"{count}D": example for count, example in examples.items()}
            raise mixed(parameter_name, kinds)
    return matrices, others


def partition_named_parameters(
    module: nn.Module,
    *,
    exclude: str | Sequence[str] = (),
    verbose: bool = False,
    split: Mapping[str, Any] | None = None,
    allow_batched_matrices: bool = False,
) -> tuple[list[Any], list[tuple[str, nn.Parameter]]]:
    r"""Splits a model's parameters into hidden matrices, for Muon, and the rest, for AdamW.

    To the rest go

    - embeddings, and what is tied to them;
    - the output head: the last linear layer outside of blocks, and layers outside of blocks that are named
      ``classifier``, ``head``, ``lm_head``, ``output``, ``proj_out`` or ``unembed``, with all that is in them;
    - routers: layers that are named ``gate`` or ``router``;
    - everything that is not 2D, matrices of one row or column, and parameters with "bias" or "embed" in their own
      name, which is the last part;
    - the weights of RNN, LSTM and GRU.

    Blocks are the elements of a list that has several of a class. Exclude the heads that no rule finds:
    ``verbose=True`` prints what goes where, and why. Adapters of an embedding, a head or a router go where it goes.

    Args:
        module (nn.Module): plain, or wrapped by DDP, FSDP1, FSDP2 or tensor parallelism.
        exclude (str or sequence of str, optional): patterns of names, as in :mod:`fnmatch`, that go to
            the rest. They match with and without ``_orig_mod.`` (default: ())
        verbose (bool, optional): prints on rank 0 where each parameter goes, and why (default: False)
        split (mapping, optional): names or patterns of fused weights, and the ``split`` of each, as
            :func:`split_of` returns them. The last that matches a name decides (default: None)
        allow_batched_matrices (bool, optional): gives 3D stacks of at least two matrices to Muon, which needs its
            argument of the same name. A convolution is no stack (default: False)

    Returns:
        tuple of two lists: matrices and the rest, as (name, Parameter). With ``split``, the matrices are
        parameter groups, one for each split. Names lack the prefixes of wrappers.

    Raises:
        ValueError: a flat FSDP1 parameter mixes both or different splits, a pattern matches no name, or FSDP2 has
            unsharded parameters, as after a forward without a backward.
    """
    from torch.optim._muon_models.partition import partition

    return partition(module, exclude, verbose, split, allow_batched_matrices)


def split_of(module: nn.Module, *, heads: bool = False) -> dict[str, Any]:
    r"""Finds how fused weights are cut into matrices.

    It knows the layouts of some names, such as ``qkv_proj`` and ``gate_up_proj``, and takes the sizes from attributes
    of the module that has the layer, or from its config. The result lacks weights whose rows are not as many as these
    say.

    With ``heads``, each head of attention is a matrix of its own. Projections of queries, keys and values have a split
    then, too, or None if the module does not say the size of a head. Of latent attention (MLA), the projections
    from the latents to the heads have one, where each head has its queries, its keys without positions and its values.

    Args:
        module (nn.Module): plain, or wrapped by DDP, FSDP1, FSDP2 or tensor parallelism.
        heads (bool, optional): whether to cut queries, keys and values into heads (default: False)

    Returns:
        dict: name of a parameter -> the option ``split`` of its parameter group.
    """
    from torch.optim._muon_models.splits import split_of

    return split_of(module, heads)


DistributedConfig.__module__ = __name__
