"""Checks of what users pass to a Muon: parameters, options of parameter groups, and checkpoints."""

import math
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._muon_engine.config import DistributedConfig
from ._muon_formulas import MuonFormulas
from ._muon_split import Split


def _storage_is_gone(param: Tensor) -> bool:
    """Whether ``param.data = dtensor`` has left a plain Parameter over a null pointer. Reading it is a crash."""
    if type(param) not in (Tensor, torch.nn.Parameter) or param.device.type == "meta":
        return False
    if torch._is_functional_tensor(param) or param.layout != torch.strided:
        return False
    # A storage that FSDP1 or the user freed has no bytes. This one has.
    has_bytes = param.untyped_storage().nbytes() > 0
    return param.numel() > 0 and has_bytes and torch.Tensor.data_ptr(param) == 0


def problem_with(
    param: Tensor,
    described: str,
    form: tuple[Split, bool],
    takes_stacks: bool,
    distributed_config: DistributedConfig | None,
) -> str:
    """Why Muon cannot take ``param``; "" if it can."""
    shape = tuple(param.shape)
    split, flattens = form
    flatten = flattens and param.ndim > 2
    has_config = distributed_config is not None
    # The factories have readers, which know the whole shapes of parameters.
    reader = distributed_config.state.get("reader") if distributed_config else None
    if _storage_is_gone(param):
        return (
            f"{described}, of size {shape}, has no storage, because `param.data = dtensor` destroys a plain Parameter. Write "
            "`module.weight = nn.Parameter(distribute_tensor(...))`, or use distribute_module or fully_shard"
        )
    if flatten and has_config and not param.is_contiguous():
        return (
            f"{described} of shape {shape} is not contiguous, which flatten=True does not take with a "
            "distributed_config; make it contiguous. A convolution takes it with inputs in channels_last"
        )
    is_flat = getattr(param, "_fsdp_flattened", False)
    is_stack = takes_stacks and param.ndim > 2 and not is_flat
    # FSDP1 flattens parameters; only the reader of process groups knows the matrices inside.
    is_known = reader == "process_groups" and (is_flat or param.ndim == 1)
    is_matrix = param.ndim == 2 or flatten or is_stack or is_known
    if not is_matrix:
        hint = ""
        if is_flat:
            hint = ". FSDP1 flattened it: use create_auto_config(fsdp_process_group=model.process_group, module=model)"
        elif param.ndim < 2:
            hint = ". Biases and norms belong to AdamW"
            # It replaces the matrices of a built optimizer by flat partitions.
            if "deepspeed" in sys.modules:
                hint += (
                    ". DeepSpeed's ZeRO flattens parameters; use its stage 0, or FSDP2"
                )
        else:
            hint = ". flatten=True in its group takes it as one matrix, allow_batched_matrices=True as a stack of matrices"
        return f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} ({described}){hint}"
    has_several = is_stack or flatten or bool(split.sizes)
    if has_several and reader is None:
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"{described} is a {type(param).__name__}, which only a factory's distributed_config ('auto') can cut into matrices"
        if split.sizes:
            # Functions of the user's know the whole shape, and gather it in a step.
            text = split.problem
            if not has_config:
                whole = (shape[0], math.prod(shape[1:])) if flatten else shape
                text = split.problem_with(whole[-2:], len(whole) - 2)
            return f"{described} of shape {shape}: {text}" if text else ""
    return ""


def check_muon(muon: Any, first_group: int = 0) -> None:
    """Raises the error for an invalid option, or parameter in ``first_group`` or later."""
    config = muon._distributed_config
    groups = muon.param_groups
    formulas = [MuonFormulas.of_group(group) for group in groups]
    # Groups may have other options than these.
    MuonFormulas.of_group(muon.defaults).check()
    for of_group in formulas[first_group:]:
        of_group.check()
    takes_stacks = muon._allow_batched_matrices
    seen: dict[Tensor, str] = {}
    for index, (group, name, param) in enumerate(named_params(groups)):
        if group < first_group:
            continue
        described = f"parameter {index}" + (f" {name!r}" if name else "")
        if config is not None:
            other = seen.setdefault(param, described)
            if other != described:
                raise ValueError(
                    f"{other} and {described} are the same tensor; pass tied weights to Muon once"
                )
        form = formulas[group].form
        text = problem_with(param, described, form, takes_stacks, config)
        if text:
            raise ValueError(text)


def named_params(
    groups: Sequence[MutableMapping[str, Any]],
) -> Iterator[tuple[int, str | None, Tensor]]:
    """The index of the group, the name if known, and the tensor of each parameter."""
    for at, group in enumerate(groups):
        names, params = group.get("param_names"), group["params"]
        if names is None or len(names) != len(params):
            # The list of parameters changed without the names.
            names = [None] * len(params)
        for name, param in zip(names, params, strict=True):
            yield at, name, param


def check_loaded(groups: list[dict[str, Any]], loaded: dict[str, Any]) -> None:
    """Raises ValueError, before anything changes, if ``loaded`` is from another model."""
    for current, group in zip(groups, loaded["param_groups"], strict=True):
        if not group.keys() - {"params", "param_names"}:
            # torch.distributed.checkpoint saves no options of a group without parameters.
            group.update({k: v for k, v in current.items() if k != "params"})
        options = {*MuonFormulas._fields} - {*MuonFormulas._field_defaults}
        missing = options - group.keys()
        if missing:
            raise ValueError(
                f"this state_dict is not of Muon: a parameter group lacks {sorted(missing)}, and has {sorted(group)}"
            )
        # A checkpoint of stock Muon does not know them, but they say what the parameters are.
        for option in ("split", "flatten"):
            group.setdefault(option, current[option])
    for index, (_, name, param) in enumerate(named_params(groups)):
        state = loaded["state"].get(param)
        buffer = state.get("momentum_buffer") if state else None
        # FSDP1 flattens its parameters, and unflattens them for checkpoints.
        flat = getattr(param, "_fsdp_flattened", False)
        if isinstance(buffer, Tensor) and not flat and buffer.shape != param.shape:
            raise ValueError(
                f"this state_dict is of another model: the momentum buffer of parameter {name or index} of shape "
                f"{tuple(param.shape)} has shape {tuple(buffer.shape)}"
            )


def checked_config(config: DistributedConfig | str | None) -> DistributedConfig | None:
    """The config of the argument ``distributed_config``. Raises TypeError if it is neither a config nor "auto"."""
    if config is None or isinstance(config, DistributedConfig):
        return config
    if config == "auto":
        from torch.optim._muon_engine.factory import factory_config

        return factory_config({})
    actual = repr(config) if isinstance(config, str) else type(config).__name__
    raise TypeError(
        f'distributed_config must be a torch.optim.muon.DistributedConfig or "auto" but is {actual}'
    )
