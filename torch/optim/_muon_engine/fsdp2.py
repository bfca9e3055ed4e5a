"""The tensors that FSDP2 shows for its shards, from a forward or ``unshard()`` to the next reshard."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn, Tensor
from torch.distributed.fsdp import FSDPModule

from .process_groups import listed


class Gathered(NamedTuple):
    """A tensor that FSDP2 computes with. It is made of a shard, which gets its gradient."""

    # The name of the module that FSDP2 unshards and reshards.
    unit: str
    shard: nn.Parameter
    # Whether the model has it in the place of the shard at the moment.
    is_shown: bool


def gathered(module: nn.Module) -> dict[Tensor, Gathered]:
    """The tensors that FSDP2 has made of the shards of ``module``."""
    found = {}
    for name, unit in module.named_modules():
        for managed in _managed(unit):
            place = managed._module_info
            shown = getattr(place.module, place.param_name)
            # FSDP2 keeps the first one while the model has the shard. The second one is cut for a smaller mesh.
            for kind in ("_unsharded_param", "_sharded_post_forward_param"):
                tensor = getattr(managed, kind, None)
                if tensor is not None:
                    is_shown = shown is tensor
                    found[tensor] = Gathered(name, managed.sharded_param, is_shown)
    return found


def _managed(unit: nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each parameter of one of its modules."""
    if not isinstance(unit, FSDPModule):
        return
    state = unit._get_fsdp_state()
    # In torch 2.11, a module has one group of parameters.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params


def check_resharded(module: nn.Module) -> None:
    """Raises ValueError if ``module`` shows other tensors than its shards."""
    tensors = gathered(module)
    names = [n for n, p in module.named_parameters() if is_shown(tensors, p)]
    if names:
        raise ValueError(
            f"FSDP2 has unsharded {listed(names)}, as a forward without a backward leaves it. No optimizer can train these "
            f"tensors: {how_to_reshard(tensors.values())} first"
        )


def is_shown(tensors: Mapping[Tensor, Gathered], param: Tensor) -> bool:
    return param in tensors and tensors[param].is_shown


def how_to_reshard(tensors: Iterable[Gathered]) -> str:
    """The call that gives the model its shards again."""
    units = list(dict.fromkeys(tensor.unit for tensor in tensors if tensor.is_shown))
    if units == [""]:
        return "call model.reshard()"
    return f"call model.get_submodule(name).reshard() for each name in {units}"
