"""The configs that factories make, and what reads their parameters."""

from typing import Any

import torch.distributed as dist

from .config import DistributedConfig
from .config_functions import assign, gather, redistribute
from .layouts.reader import Reader
from .layouts.readers import is_read_here, new_reader


_FACTORYS = {"assign": assign, "gather": gather, "redistribute": redistribute}


def reader_of(config: DistributedConfig, takes_stacks: bool = False) -> Reader | None:
    """A new reader; None if the user wrote the config from scratch, or for another framework."""
    is_elsewhere = "rank" in config.state and not dist.is_initialized()
    engine_moves_nothing = len(users_functions(config)) == 2
    if not is_read_here(config.state) or (is_elsewhere and engine_moves_nothing):
        return None
    return new_reader(config.state, takes_stacks)


def factory_config(
    state: dict[str, Any],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
) -> DistributedConfig:
    """A config with the factory's functions."""
    state = {"reader": "dtensor", "is_dtensor": True, "param_metadata": {}, **state}
    return DistributedConfig(
        assign, gather, redistribute, state, async_gpu_parallelism, prefetch_count
    )


def is_from_factory(config: DistributedConfig, name: str) -> bool:
    """Whether the function ``name`` of ``config`` is the one that a factory made."""
    return getattr(config, f"{name}_fn") is _FACTORYS[name]


def users_functions(config: DistributedConfig) -> list[str]:
    """Those of the two functions that move data which are not a factory's."""
    return [n for n in ("gather", "redistribute") if not is_from_factory(config, n)]
