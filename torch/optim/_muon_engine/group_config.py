"""The configs for parameters that process groups share."""

from collections.abc import Mapping
from typing import Any

from .config import DistributedConfig
from .factory import factory_config


def group_config(
    state: dict[str, Any], tp_dim: Mapping[int, int] | int | None, *options: Any
) -> DistributedConfig:
    """A config whose ``state`` has process groups. ``tp_dim`` is the dimension that TP cuts of all parameters, or of each
    by its index. The ``options`` are those of :func:`factory_config`.
    """
    if isinstance(tp_dim, int):
        state["tp_dim_default"] = tp_dim
    elif tp_dim is not None:
        state["tp_dim_per_param"] = dict(tp_dim)
    return factory_config(state, *options)


def either(**spellings: Any) -> Any:
    """The one value that is not None. Raises ValueError if there are two."""
    spelled = {name: value for name, value in spellings.items() if value is not None}
    if len(spelled) > 1:
        raise ValueError(f"{' and '.join(spelled)} are two spellings; pass one of them")
    return next(iter(spelled.values()), None)
