r"""Distributed Muon: one owner rank for each matrix.

Muon orthogonalizes whole momentum matrices, while FSDP, TP and the like leave every rank with a
piece. Given a :class:`DistributedConfig`, :class:`torch.optim.Muon` brings the pieces of each matrix
to exactly one owner, orthogonalizes it there once, and sends every rank its piece of the update.

Importing this module does not import ``torch.distributed``: each function imports what it needs.
"""

from __future__ import annotations

import warnings
from typing import Any, TYPE_CHECKING

from torch import nn, Tensor
from torch.optim._muon import Muon  # noqa: F401
from torch.optim._muon_engine.config import DistributedConfig


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Reader


__all__ = [
    "DistributedConfig",
    "create_auto_config",
    "create_dtensor_config",
    "detect_tp_dims_from_model",
    "partition_parameters",
]


def create_dtensor_config(
    async_gpu_parallelism: bool = True, prefetch_count: int = 1
) -> DistributedConfig:
    r"""Makes the config for parameters that are DTensors: FSDP2, TP, ``distribute_tensor`` and mixes.

    The DTensors themselves say where the pieces are. A plain tensor among the parameters is taken to
    be whole on every rank, and each rank updates its own.

    Args:
        async_gpu_parallelism (bool, optional): lets all owners work at the same time; False goes one
            owner after the other, for debugging (default: True)
        prefetch_count (int, optional): number of later exchanges in flight while one is
            orthogonalized (default: 1)

    Returns:
        DistributedConfig: its ``state["is_dtensor"]`` is True, and after
        construction of the optimizer ``state["param_metadata"][i]`` holds ``device_mesh`` and
        ``placements`` of each DTensor.

    Raises:
        ValueError: ``prefetch_count`` is not an int of at least 0.

    Example:
        >>> # xdoctest: +SKIP
        >>> fully_shard(model)
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> optimizer = Muon(
        ...     matrices, lr=0.02, distributed_config=create_dtensor_config()
        ... )
    """
    from torch.optim._muon_engine.layouts.dtensor import DTensorReader

    state = {"is_dtensor": True, "param_metadata": {}}
    return _config(DTensorReader(), state, async_gpu_parallelism, prefetch_count)


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

    Groups say who shares a matrix; how large each rank's piece is, the ranks tell each other when the
    optimizer is built, over these groups only. Together they have to form a grid, as the dimensions of
    a :class:`~torch.distributed.device_mesh.DeviceMesh` do: TP cuts a matrix first, FSDP cuts the rows
    of the TP piece, DDP and CP replicate what is then there.

    Parameters that are DTensors speak for themselves, as under :func:`create_dtensor_config`: a group
    or dimension that says otherwise is a warning. ``ddp_process_group`` and ``cp_process_group`` add
    replicas to what their mesh knows. For FSDP1 over DTensors of tensor parallelism the placements
    that FSDP1 found count.

    Args:
        fsdp_process_group (ProcessGroup, optional): the ranks that shard a matrix; of FSDP1
            ``model.process_group`` (default: None)
        tp_process_group (ProcessGroup, optional): the ranks that tensor parallelism cuts a matrix
            over, before FSDP cuts the piece's rows (default: None)
        ddp_process_group (ProcessGroup, optional): the ranks that hold replicas (default: None)
        ep_process_group (ProcessGroup, optional): the ranks that hold different experts; nothing is
            ever sent over it (default: None)
        cp_process_group (ProcessGroup, optional): the ranks of context parallelism, which hold
            replicas (default: None)
        tp_dim_per_param (dict[int, int] or int, optional): the dimension that TP cuts, by parameter
            index; a parameter that is not in the dict is not cut, but whole on each of the TP group's
            ranks. An int holds for all of them. None looks for a ``tp_dim`` or ``partition_dim``
            attribute of each parameter (default: None)
        expert_assignments (dict[int, int], optional): parameter index -> id of the expert it belongs
            to. Along the other groups, ranks with the same id share the expert; ranks of one
            ``ep_process_group`` never do (default: None)
        async_gpu_parallelism (bool, optional): see :class:`DistributedConfig` (default: True)
        prefetch_count (int, optional): see :class:`DistributedConfig` (default: 1)
        tp_shard_dim (int, optional): another name of an int ``tp_dim_per_param`` (default: None)
        shard_process_group (ProcessGroup, optional): another name of ``fsdp_process_group``
            (default: None)
        replicate_process_group (ProcessGroup, optional): another name of ``ddp_process_group``
            (default: None)
        pp_process_group (ProcessGroup, optional): the ranks of the pipeline; kept in ``state`` only,
            since stages share no matrix (default: None)
        pp_stage_id (int, optional): kept in ``state`` (default: None)
        pp_num_stages (int, optional): kept in ``state`` (default: None)
        module (nn.Module, optional): the FSDP1-wrapped model, which knows the shapes that
            ``use_orig_params=True`` hides, and its groups, those of ``HYBRID_SHARD`` included. A
            parameter that FSDP1 was told to ignore is each rank's own (default: None)

    Returns:
        DistributedConfig: its ``state`` holds the groups and what is said of them.

    Raises:
        ValueError: two names of one thing are given, or ``ep_process_group`` without
            ``expert_assignments``. At construction of the optimizer, on all ranks: the groups
            contradict each other, the pieces do not tile a matrix, ranks disagree, or nothing says how
            TP or FSDP1 cut a parameter.

    Example:
        >>> # xdoctest: +SKIP
        >>> model = FullyShardedDataParallel(model, use_orig_params=True)
        >>> matrices, others = partition_parameters(model)
        >>> config = create_auto_config(
        ...     fsdp_process_group=model.process_group, module=model
        ... )
        >>> optimizer = Muon(matrices, lr=0.02, distributed_config=config)
    """
    fsdp = _either(
        fsdp_process_group=fsdp_process_group, shard_process_group=shard_process_group
    )
    ddp = _either(
        ddp_process_group=ddp_process_group,
        replicate_process_group=replicate_process_group,
    )
    tp_dim = _either(tp_dim_per_param=tp_dim_per_param, tp_shard_dim=tp_shard_dim)
    if ep_process_group is not None and expert_assignments is None:
        raise ValueError(
            "ep_process_group needs expert_assignments, a dict of parameter index -> expert id ({} if this optimizer "
            "holds no expert): without it, experts would be taken for replicas of each other"
        )
    state: dict[str, Any] = {
        "is_dtensor": False,
        "param_metadata": {},
        "fsdp_process_group": fsdp,
        "tp_process_group": tp_process_group,
        "ddp_process_group": ddp,
        "ep_process_group": ep_process_group,
        "cp_process_group": cp_process_group,
        "expert_assignments": dict(expert_assignments or {}),
        "pp_process_group": pp_process_group,
        "pp_stage_id": pp_stage_id,
        "pp_num_stages": pp_num_stages,
    }
    if isinstance(tp_dim, int):
        state["tp_dim_default"] = tp_dim
    elif tp_dim is not None:
        state["tp_dim_per_param"] = dict(tp_dim)
    from torch.optim._muon_engine.layouts.groups import GroupReader, ParallelGroups

    groups = ParallelGroups(
        fsdp=fsdp,
        tp=tp_process_group,
        ddp=ddp,
        ep=ep_process_group,
        cp=cp_process_group,
        tp_dims=state.get("tp_dim_per_param"),
        tp_dim_default=state.get("tp_dim_default"),
        experts=state["expert_assignments"],
        module=module,
    )
    return _config(GroupReader(groups), state, async_gpu_parallelism, prefetch_count)


def _config(
    reader: Reader,
    state: dict[str, Any],
    async_gpu_parallelism: bool,
    prefetch_count: int,
) -> DistributedConfig:
    # Here, and in the factories, because the engine imports torch.distributed.
    from torch.optim._muon_engine.callbacks import ConfigFunctions, STATE_KEY

    functions = state[STATE_KEY] = ConfigFunctions(reader)
    return DistributedConfig(
        assign_fn=functions.assign,
        gather_fn=functions.gather,
        redistribute_fn=functions.redistribute,
        state=state,
        async_gpu_parallelism=async_gpu_parallelism,
        prefetch_count=prefetch_count,
    )


def _either(**spellings: Any) -> Any:
    given = {name: value for name, value in spellings.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are names of one thing; give one")
    return next(iter(given.values()), None)


def detect_tp_dims_from_model(
    module_or_params: nn.Module | Iterable[Tensor],
) -> dict[int, int]:
    r"""Finds the dimension that tensor parallelism cuts each parameter along.

    Looks at a ``tp_dim`` or ``partition_dim`` attribute (-1 says that the parameter is not cut, and
    leaves it out), then at a DTensor's innermost shard; what shows neither is taken to be cut along
    dimension 0, with a warning.

    Args:
        module_or_params (nn.Module or iterable of Tensor): what the optimizer is built from, in that
            order, so that the indices are the optimizer's. For a model with biases that is the list
            of its matrices, not the model.

    Returns:
        dict[int, int]: parameter index -> dimension, as ``tp_dim_per_param`` takes it.
    """
    from torch.optim._muon_engine.layouts.groups import tp_dim_of

    if isinstance(module_or_params, nn.Module):
        module_or_params = module_or_params.parameters()
    found = {index: tp_dim_of(param) for index, param in enumerate(module_or_params)}
    guessed = [index for index, dim in found.items() if dim is None]
    if guessed:
        warnings.warn(
            f"nothing says how tensor parallelism cuts parameters {guessed}; dimension 0 is a guess. Mark them with a "
            "tp_dim attribute, -1 for those that it does not cut",
            stacklevel=2,
        )
    return {i: 0 if dim is None else dim for i, dim in found.items() if dim != -1}


def partition_parameters(
    module: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    r"""Splits a model's parameters into the matrices, for Muon, and the others.

    What counts is the logical, unsharded shape, which FSDP1 hides from the parameters themselves.

    Args:
        module (nn.Module): plain, or wrapped by DDP, FSDP1, FSDP2 or tensor parallelism.

    Returns:
        tuple of two lists of Parameter: matrices and others, each in the order of
        ``module.parameters()``.

    Raises:
        ValueError: a flat FSDP1 parameter holds matrices together with others.

    Example:
        >>> # xdoctest: +SKIP
        >>> # Embeddings and output head are matrices too, but not Muon's.
        >>> matrices, _ = partition_parameters(model.blocks)
        >>> optimizer = Muon(
        ...     matrices, lr=0.02, distributed_config=create_dtensor_config()
        ... )
    """
    from torch.optim._muon_engine.layouts.fsdp1 import split_by_shape

    return split_by_shape(module)


DistributedConfig.__module__ = __name__
