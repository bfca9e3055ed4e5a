"""The hyperparameters of a Muon, and the phases of a step that they define. A single process runs them in order. With
a ``distributed_config``, the engine runs them between its collectives.
"""

import math
from collections.abc import MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._muon_split import Split
from ._newton_schulz import (
    as_tuples,
    check_newton_schulz,
    newton_schulz,
    NS_DTYPE,
    stored_ns_algorithm,
)
from .optimizer import _to_scalar


# Maximum bytes of matrices in one batched Newton-Schulz. Its workspace is four times as large.
_BATCH_BYTES = 64 * 1024**2
# On accelerators, symmetric products are launched more often, which takes the host longer for small batches.
_SYMMETRIC_BATCH_BYTES = 128 * 1024**2
# A cache of a CPU holds the matrices or regions of this many bytes that it works on at once.
CACHE_BYTES = 256 * 1024
ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped")


def _adjust_lr(
    lr: float | Tensor, adjust_lr_fn: str | None, param_shape: Sequence[int]
) -> float | Tensor:
    """Scales ``lr`` for a matrix of the *global* shape ``param_shape``. ``None`` and "original" follow Jordan,
    "match_rms_adamw" Liu et al. (https://arxiv.org/abs/2502.16982), "spectral_unclamped" Bernstein
    (https://jeremybernste.in/writing/deriving-muon).
    """
    rows, columns = param_shape[:2]
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        ratio = math.sqrt(max(1, rows / columns))
    elif adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    elif adjust_lr_fn == "spectral_unclamped":
        ratio = math.sqrt(rows / columns)
    else:
        ratio = 1.0
    return lr * ratio


class StepSize(NamedTuple):
    """By how much a step changes the matrices of one shape."""

    # The factor of a parameter, by weight decay.
    decay: float | Tensor
    # The factor of its update.
    alpha: Any
    # Whether the two are Tensors on an accelerator.
    is_on_device: bool


class MuonFormulas(NamedTuple):
    """The hyperparameters of one parameter group in one step, and the phases that they define."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: Sequence[Any]
    ns_steps: int
    eps: float
    adjust_lr_fn: str | None
    # Checkpoints of the first Muon do not have the options with defaults.
    foreach: bool | None = None
    ns_algorithm: str = "quintic"
    # A Split; None only as the default of a parameter group.
    split: Any = None
    flatten: bool = False
    fused: bool | None = None

    @classmethod
    def of_group(cls, group: MutableMapping[str, Any]) -> "MuonFormulas":
        """The options of a parameter group. Raises KeyError if it lacks one."""
        values = {name: group[name] for name in cls._fields}
        values["ns_coefficients"] = as_tuples(values["ns_coefficients"])
        # A list may change in place, which every step must notice.
        values["split"] = Split.of(values["split"])
        values["ns_algorithm"] = stored_ns_algorithm(values["ns_algorithm"])
        values["lr"] = _to_scalar(values["lr"])
        return cls(**values)

    @staticmethod
    def normalize(group: MutableMapping[str, Any]) -> None:
        """Gives each option of a parameter group, or of the defaults, the one spelling that checkpoints have."""
        # A dict may be the user's, and checkpoints write into it.
        if group["split"] is not None:
            group["split"] = Split.of(group["split"]).option
        group["ns_algorithm"] = stored_ns_algorithm(group["ns_algorithm"])

    @property
    def compute_key(self) -> tuple:
        """Matrices with equal keys may share a batch."""
        return (
            self.ns_coefficients,
            self.ns_steps,
            self.eps,
            self.ns_algorithm,
            self.foreach,
            self.fused,
        )

    @property
    def _readable_lr(self) -> float | None:
        """The learning rate; None for a Tensor whose value would cost a synchronization."""
        if not isinstance(self.lr, Tensor):
            return float(self.lr)
        is_readable = type(self.lr) is Tensor and self.lr.is_cpu
        return float(self.lr) if is_readable and self.lr.numel() == 1 else None

    @property
    def moves_parameters(self) -> bool:
        """Whether a step moves parameters. Checkpoints make a step that does not."""
        return self._readable_lr != 0

    @property
    def form(self) -> tuple[Split, bool]:
        """How a parameter becomes matrices: ``split``, ``flatten``."""
        return self.split, bool(self.flatten)

    def matrices_in(self, tensor: Tensor) -> Sequence[Tensor]:
        """The matrices in a parameter, as views; contiguous for ``flatten``. DTensors stay whole. They are of three
        dimensions if ``split`` has repeats.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return [tensor]
        if tensor.ndim == 2 and not self.split.sizes:
            return [tensor]
        # Detached: autograd forbids writes to the views that split and unbind return.
        matrices = [tensor.detach()]
        if self.flatten and tensor.ndim > 2:
            matrices = [matrices[0].flatten(1)]
        while matrices[0].ndim > 2:
            matrices = [matrix for stack in matrices for matrix in stack.unbind()]
        if self.split.sizes:
            whole = matrices
            matrices = [part for matrix in whole for part in self.split.parts(matrix)]
        return matrices

    def check(self) -> None:
        """Raises TypeError or ValueError for an invalid option. It reads no value from an accelerator."""
        for name in ("lr", "momentum", "weight_decay", "eps"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(f"Tensor {name} must be 1-element")
                if type(value) is not Tensor or not value.is_cpu:
                    continue
            elif not isinstance(value, Real):
                raise TypeError(f"{name} must be a number but is {value!r}")
            if not 0.0 <= value:
                title = "Learning rate" if name == "lr" else name.replace("_", " ")
                raise ValueError(f"{title} should be >= 0 but is: {value}")
        if self.adjust_lr_fn not in (None, *ADJUST_LR_FNS):
            raise ValueError(
                f"Adjust learning rate function {self.adjust_lr_fn} is not supported; use one of {ADJUST_LR_FNS}"
            )
        if self.fused and self.foreach:
            raise ValueError("fused=True and foreach=True exclude each other; pass one")
        if not isinstance(self.ns_steps, Integral):
            raise TypeError(f"ns_steps must be an int but is {self.ns_steps!r}")
        check_newton_schulz(self.ns_coefficients, self.ns_steps, self.ns_algorithm)

    def option_texts(self) -> dict[str, str]:
        """The values that ranks compare, in words. The value of a Tensor on an accelerator stays there."""
        values = self._asdict()
        if isinstance(self.lr, Tensor):
            lr = self._readable_lr
            values["lr"] = "a Tensor" if lr is None else f"a Tensor of {lr}"
        return {name: str(value) for name, value in values.items()}

    def accumulate(self, bufs: list[Tensor], grads: list[Tensor]) -> None:
        """Takes gradients into momentum, for whole matrices or for pieces of them."""
        if len(grads) == 1:
            bufs[0].lerp_(grads[0], 1 - self.momentum)
        else:
            torch._foreach_lerp_(bufs, grads, 1 - self.momentum)

    def accumulate_and_blend(
        self,
        bufs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        targets: Sequence[Tensor] = (),
    ) -> None:
        """Both :meth:`accumulate` and :meth:`blend`, with what is to be orthogonalized in ``targets``, if there are any. A matrix
        without a gradient keeps its momentum, which goes there. In one pass if ``fused``.
        """
        present = [grad for grad in grads if grad is not None]
        # Torch has an error for gradients of another dtype.
        is_alike = len(present) == 0 or present[0].dtype == bufs[0].dtype
        if targets and is_alike and self.takes_kernels(bufs, present, targets):
            from ._muon_kernels import accumulate_and_blend

            accumulate_and_blend(
                bufs, grads, targets, self.momentum, nesterov=self.nesterov
            )
            return
        with_grad = [buf for buf, grad in zip(bufs, grads) if grad is not None]
        if with_grad:
            self.accumulate(with_grad, present)
        if targets:
            blended = [buf if grad is None else grad for buf, grad in zip(bufs, grads)]
            torch._foreach_copy_(list(targets), list(self.blend(list(bufs), blended)))

    def has_kernels(self, device: torch.device) -> bool:
        """Whether ``fused`` is set, and ``device`` is a GPU that has the kernels."""
        if self.fused and device.type == "cuda":
            from ._newton_schulz_kernels import has_kernels

            return has_kernels(device)
        return False

    def takes_kernels(self, *lists: Sequence[Tensor]) -> bool:
        """Whether the kernels of ``fused`` take these lists of tensors."""
        is_eager = not torch.compiler.is_compiling()
        if self.fused and is_eager and self.has_kernels(lists[0][0].device):
            from ._newton_schulz_kernels import pass_takes

            return pass_takes(*lists)
        return False

    def blend(self, bufs: list[Tensor], grads: list[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors to orthogonalize: momentum, blended with ``grads`` if nesterov."""
        if not self.nesterov:
            return bufs
        if len(grads) == 1:
            return [torch.lerp(grads[0], bufs[0], self.momentum)]
        return torch._foreach_lerp(grads, bufs, self.momentum)

    def orthogonalize(self, blended: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the update of a matrix, or of a batch (matrices, rows, columns), which is written to ``out``, if
        given. ``out`` may be ``blended`` itself.
        """
        update = newton_schulz(
            blended.to(NS_DTYPE),
            self.ns_coefficients,
            self.ns_steps,
            self.eps,
            ns_algorithm=self.ns_algorithm,
            out=out,
        )
        # Copying a transposed update once is faster than copying each region of it.
        return update if out is None or update is out else out.copy_(update)

    def update_of(self, blended: Tensor) -> Tensor:
        """Like :meth:`orthogonalize`, for one matrix and in its shape."""
        if self.split.sizes:
            joined = self.split.joined(blended)
            return self.orthogonalize(joined).reshape(blended.shape)
        return self.orthogonalize(blended)

    def orthogonalize_all(self, matrices: Tensor) -> None:
        """Replaces matrices, of shape (matrices, rows, columns), by their updates. Parts of one shape share batches."""
        if not self.split.sizes:
            self._replace_by_updates(matrices)
            return
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices.unbind():
            for part in self.split.parts(matrix):
                alike.setdefault(part.shape, []).append(part)
        for parts in alike.values():
            size = self.batch_size(parts[0].shape, matrices.device)
            for start in range(0, len(parts), size):
                batch = parts[start : start + size]
                joined = torch.stack([self.split.joined(part) for part in batch])
                self._replace_by_updates(joined)
                for part, update in zip(batch, joined):
                    part.copy_(update.view(part.shape))

    def _replace_by_updates(self, matrices: Tensor) -> None:
        if self._takes_batches(matrices.device) and len(matrices) > 1:
            self.orthogonalize(matrices, out=matrices)
            return
        # One by one, matrices have the bits of the default.
        for matrix in matrices.unbind():
            self.orthogonalize(matrix, out=matrix)

    def _takes_batches(self, device: torch.device) -> bool:
        return device.type != "cpu" if self.foreach is None else self.foreach

    def batch_size(self, shape: Sequence[int], device: torch.device) -> int:
        """How many matrices of ``shape`` go into memory together."""
        most_bytes = _BATCH_BYTES
        if not self._takes_batches(device):
            # A GPU may round a product by the address of its factors.
            most_bytes = CACHE_BYTES if device.type == "cpu" else 0
        elif device.type != "cpu" and self.ns_algorithm != "quintic":
            most_bytes = _SYMMETRIC_BATCH_BYTES
        return max(1, most_bytes // max(1, math.prod(shape) * NS_DTYPE.itemsize))

    def step_size(self, shape: Sequence[int], device: torch.device) -> StepSize:
        """The step size of matrices of the global ``shape`` on ``device``."""
        lr: Any = self.lr
        # Reading a Tensor on the host would wait for its device. Offloaded parameters wait anyway.
        is_on_device = isinstance(lr, Tensor) and not lr.is_cpu
        if is_on_device:
            lr = lr.to(device)
        alpha = -_adjust_lr(lr, self.adjust_lr_fn, shape)
        return StepSize(1 - lr * self.weight_decay, alpha, is_on_device)

    def apply(
        self, params: list[Tensor], updates: list[Tensor], step_size: StepSize
    ) -> None:
        """Decays and updates matrices, or pieces of matrices, of one step size. In one pass if ``fused``."""
        decay, alpha, is_on_device = step_size
        if self.takes_kernels(params, updates):
            from ._muon_kernels import apply_updates

            if not is_on_device:
                # A Tensor on a CPU, which a GPU cannot read.
                decay, alpha = float(decay), float(alpha)
            return apply_updates(params, updates, decay, alpha)
        if (len(params) == 1 or params[0].is_cpu) and not is_on_device:
            # Foreach functions of a CPU would round the numbers to a parameter's dtype.
            for param, update in zip(params, updates):
                param.mul_(decay).add_(update, alpha=alpha)
            return
        torch._foreach_mul_(params, decay)
        if is_on_device:
            # In float32, alpha is not rounded, and the sum only once, as by add_ with the value of alpha.
            for param, update in zip(params, updates):
                param.addcmul_(update.float(), alpha)
            return
        dtype = params[0].dtype
        if updates[0].dtype != dtype:
            # Accelerators add mixed dtypes in one launch per tensor.
            cast = [torch.empty_like(update, dtype=dtype) for update in updates]
            torch._foreach_copy_(cast, updates)
            updates = cast
        torch._foreach_add_(params, updates, alpha=float(alpha))
