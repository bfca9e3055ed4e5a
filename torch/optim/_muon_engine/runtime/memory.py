"""The memory of a step, which keeps its addresses on CPUs."""

from typing import Any

import torch
from torch import Tensor


class Memory:
    """Bytes for packs and for whole matrices. They take a device's memory in a step only (MPS cannot):
    :meth:`allocate` and :meth:`free` resize their storages, as FSDP2 does. Views stay valid.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Whether it is freed between steps.
        self.frees_between_steps = device.type not in ("cpu", "mps")
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        # Memory of CPUs that one matrix after another uses, by dtype.
        self._scratch: dict[Any, Tensor] = {}

    def zeros(self, nbytes: int) -> Tensor:
        """A 1D tensor of ``nbytes`` bytes. Its storage may be empty between steps."""
        # The ranks connect by sending it, and a debugging backend looks for NaN there.
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self._storages.append((memory.untyped_storage(), nbytes))
        return memory

    def release(self, memory: Tensor) -> None:
        """Forgets a tensor of :meth:`zeros`."""
        pointer = memory.untyped_storage()._cdata
        self._storages = [
            (storage, nbytes)
            for storage, nbytes in self._storages
            if storage._cdata != pointer
        ]

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """Makes room for :meth:`scratch` of ``numel`` elements."""
        if dtype not in self._scratch or numel > len(self._scratch[dtype]):
            self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1D tensor of elements that have any values. All calls return the same memory."""
        self.reserve(numel, dtype)
        return self._scratch[dtype][:numel]

    def allocate(self) -> None:
        """Takes the memory of a step."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """Frees the memory of a step that has ended. After a failure, collectives may still write to it."""
        for storage, _ in self._storages:
            storage.resize_(0)
