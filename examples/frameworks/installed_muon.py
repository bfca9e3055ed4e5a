"""Muon from torch where the patch is applied, and from the package ``distributed_muon`` elsewhere.

Your program knows which one it has, and can import from there.
"""

try:
    from torch.optim.muon import (
        create_auto_config,
        Muon,
        partition_named_parameters,
        split_of,
    )
# An ImportError of another kind says that a patch has to be applied again.
except ModuleNotFoundError:
    from distributed_muon import (
        create_auto_config,
        Muon,
        partition_named_parameters,
        split_of,
    )


__all__ = ["Muon", "create_auto_config", "partition_named_parameters", "split_of"]
