# mypy: allow-untyped-defs
# mypy: disable-error-code=arg-type
r"""Implementation of the Muon optimizer: hyperparameters, state, step and checkpoints.

The phases of a step are methods of :class:`MuonFormulas`. A single process runs them in order. With a
``distributed_config``, the engine in ``torch.optim._muon_engine`` runs the same phases between its
collectives.
"""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor

from . import optimizer as _optimizer_module
from ._muon_split import Split
from ._newton_schulz import (
    _zeropower_via_newtonschulz,  # noqa: F401
    as_tuples,
    check_newton_schulz,
    check_ns_algorithm,
    Coefficients,
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    newton_schulz,
    NS_DTYPE,
)
from .optimizer import _disable_dynamo_if_unsupported, _to_scalar, Optimizer, ParamsT


if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.engine import Engine
    from torch.optim._muon_engine.runtime import Param


__all__ = ["Muon", "muon"]

log = logging.getLogger("torch.optim.muon")

# Keller Jordan's Muon: https://kellerjordan.github.io/posts/muon/,
# https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16

# Maximum bytes of matrices in one batched Newton-Schulz. Its workspace is four times as large.
_BATCH_BYTES = 64 * 1024**2

_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
_ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped")

_LOST_CONFIG = (
    "This Muon is a copy of one with a distributed_config, which cannot be copied or pickled. "
    "Build a new Muon with distributed_config=... and load this one's state_dict() into it"
)

_KERNELS = (
    "with allow_batched_matrices=True, a convolution is a stack of small matrices to Muon. flatten=True in its "
    "parameter group makes it one matrix"
)


def _adjust_lr(
    lr: float | Tensor, adjust_lr_fn: str | None, param_shape: Sequence[int]
) -> float | Tensor:
    """Scales ``lr`` for a matrix of the *global* shape ``param_shape``.

    ``None`` and "original" follow Jordan, "match_rms_adamw" Liu et al.
    (https://arxiv.org/abs/2502.16982), "spectral_unclamped" Bernstein
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


class MuonFormulas(NamedTuple):
    """The hyperparameters of one parameter group in one step, and the phases that they define."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: Coefficients | Sequence[Coefficients]
    ns_steps: int
    eps: float
    adjust_lr_fn: str | None
    # Checkpoints of the first Muon do not have the options with defaults.
    foreach: bool | None = None
    ns_algorithm: str = "quintic"
    split: Sequence[int] | dict[str, Any] | None = None
    flatten: bool = False

    @classmethod
    def of_group(cls, group: MutableMapping[str, Any]) -> MuonFormulas:
        values = {name: group[name] for name in cls._fields}
        values["ns_coefficients"] = as_tuples(values["ns_coefficients"])
        return cls(**{**values, "lr": _to_scalar(values["lr"])})

    @property
    def compute_key(self) -> tuple:
        """Matrices with equal keys may share a batch."""
        # The functional form may be given lists.
        coefficients = as_tuples(self.ns_coefficients)
        how = self.ns_steps, self.eps, self.ns_algorithm
        return (coefficients, *how, self.foreach)

    @property
    def _readable_lr(self) -> float | None:
        """The learning rate; None for a Tensor whose value would cost a synchronization."""
        if not isinstance(self.lr, Tensor):
            return float(self.lr)
        return float(self.lr) if type(self.lr) is Tensor and self.lr.is_cpu else None

    @property
    def moves(self) -> bool:
        """Whether a step moves parameters. Checkpoints make a step that does not."""
        return self._readable_lr != 0

    @property
    def digest(self) -> int:
        """32 bits of the values in this step, whatever their types."""
        values = (
            self._readable_lr,
            float(self.weight_decay),
            float(self.momentum),
            bool(self.nesterov),
            _floats(self.ns_coefficients),
            int(self.ns_steps),
            float(self.eps),
            self.adjust_lr_fn or "original",
            self.ns_algorithm,
        )
        return zlib.crc32(repr(values).encode())

    @property
    def form(self) -> tuple[Split, bool]:
        """How a parameter becomes matrices: ``split``, ``flatten``."""
        return Split.of(self.split), bool(self.flatten)

    def matrices(self, tensor: Tensor) -> Sequence[Tensor]:
        """The matrices in a parameter, as views; of three dimensions if ``split`` has repeats.

        A DTensor stays whole, because its views may be copies.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return [tensor]
        split, flatten = self.form
        if flatten and tensor.ndim > 2 and not tensor.is_contiguous():
            raise ValueError(
                f"flatten=True takes contiguous parameters and momentum, not one of shape {tuple(tensor.shape)} and "
                f"strides {tensor.stride()}; make it contiguous"
            )
        # Detached: autograd forbids writes to the views that split and unbind return.
        stack = [tensor.detach() if tensor.ndim > 2 or split.sizes else tensor]
        if flatten and tensor.ndim > 2:
            stack = [stack[0].flatten(1)]
        while stack[0].ndim > 2:
            stack = [matrix for one in stack for matrix in one.unbind()]
        return [part for matrix in stack for part in split.parts(matrix)]

    def check(self) -> None:
        """Raises ValueError if the hyperparameters are invalid."""
        check_newton_schulz(self.ns_coefficients, self.ns_steps, self.ns_algorithm)

    def signature(self) -> dict[str, str]:
        """The values that ranks compare at construction. The value of a Tensor may change meanwhile."""
        split, flatten = self.form
        values = self._replace(split=split, flatten=flatten)._asdict()
        return {
            name: "a Tensor" if isinstance(value, Tensor) else str(value)
            for name, value in values.items()
        }

    def accumulate(self, bufs: list[Tensor], grads: list[Tensor]) -> None:
        """Takes gradients into momentum, for whole matrices or for pieces of them."""
        if len(grads) == 1:
            bufs[0].lerp_(grads[0], 1 - self.momentum)
        else:
            torch._foreach_lerp_(bufs, grads, 1 - self.momentum)

    def prepare(
        self, bufs: list[Tensor], grads: list[Tensor], out: Tensor | None = None
    ) -> Sequence[Tensor]:
        """Returns the tensors to orthogonalize: momentum, blended with ``grads`` if nesterov.

        ``out`` gets the result if there is one tensor.
        """
        if not self.nesterov:
            return bufs
        if len(grads) == 1:
            return [torch.lerp(grads[0], bufs[0], self.momentum, out=out)]
        return torch._foreach_lerp(grads, bufs, self.momentum)

    def orthogonalize(self, prepared: Tensor, products: Any = None) -> Tensor:
        """Returns the update of one matrix, or of a batch (matrices, rows, columns).

        ``products`` computes with the other owners of a divided matrix.
        """
        x, algorithm = prepared.to(NS_DTYPE), self.ns_algorithm
        return newton_schulz(
            x, self.ns_coefficients, self.ns_steps, self.eps, algorithm, products
        )

    def update_of(self, prepared: Tensor) -> Tensor:
        """Like :meth:`orthogonalize`, for one of :meth:`matrices` and in its shape."""
        update = self.orthogonalize(self.form[0].joined(prepared))
        return update if prepared.ndim == 2 else update.reshape(prepared.shape)

    def batch_size(self, shape: Sequence[int], device: torch.device) -> int:
        """How many matrices of ``shape`` a distributed step orthogonalizes in one batch."""
        if self.foreach is False or (self.foreach is None and device.type == "cpu"):
            return 1
        return max(1, _BATCH_BYTES // max(1, math.prod(shape) * NS_DTYPE.itemsize))

    def apply(
        self, params: list[Tensor], updates: list[Tensor] | None, shape: Sequence[int]
    ) -> None:
        """Decays and updates matrices, or pieces of matrices, of the global ``shape``."""
        decay = 1 - self.lr * self.weight_decay
        # ``alpha`` may be a Tensor of one element, which the stubs do not know.
        alpha: Any = -_adjust_lr(self.lr, self.adjust_lr_fn, shape)
        # Reading a Tensor on the host would wait for its device.
        is_on_device = isinstance(self.lr, Tensor) and not self.lr.is_cpu
        if len(params) == 1 and not is_on_device:
            params[0].mul_(decay)
            if updates is not None:
                params[0].add_(updates[0], alpha=alpha)
            return
        torch._foreach_mul_(params, decay)
        if updates is not None and is_on_device:
            updates = [update.to(p.dtype) for update, p in zip(updates, params)]
            torch._foreach_add_(params, torch._foreach_mul(updates, alpha))
        elif updates is not None:
            alpha = float(alpha)
            torch._foreach_add_(params, _of_one_dtype(params, updates), alpha=alpha)


def _of_one_dtype(params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """``updates`` in the dtype of ``params``. Accelerators add mixed dtypes in one launch per tensor."""
    if params[0].is_cpu or params[0].dtype == updates[0].dtype:
        return updates
    flat = params[0].new_empty(sum(update.numel() for update in updates))
    parts = flat.split([update.numel() for update in updates])
    cast = [part.view(update.shape) for part, update in zip(parts, updates)]
    torch._foreach_copy_(cast, updates)
    return cast


def _floats(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_floats(value) for value in values]
    return float(values)


def _storage_is_gone(param: Tensor) -> bool:
    """Whether ``param.data = dtensor`` has destroyed ``param``.

    PyTorch accepts that assignment to a plain Parameter and leaves a tensor of the global shape over a
    null pointer. The next kernel that reads the tensor crashes the process.
    """
    if type(param) not in (Tensor, torch.nn.Parameter) or param.device.type == "meta":
        return False
    if torch._is_functional_tensor(param) or param.layout != torch.strided:
        return False
    # A storage that FSDP1 or the user freed has no bytes. This one has.
    has_bytes = param.untyped_storage().nbytes() > 0
    return param.numel() > 0 and has_bytes and torch.Tensor.data_ptr(param) == 0


def _problem_with(
    param: Tensor, which: str, form: tuple, reader: str | None, takes_stacks: bool
) -> str:
    """Why Muon cannot take ``param``; "" if it can. ``reader`` is the config's, if it has one."""
    shape, (split, flatten) = tuple(param.shape), form
    flatten = flatten and param.ndim > 2
    if _storage_is_gone(param):
        return (
            f"{which}, of size {shape}, has no storage, because `param.data = dtensor` destroys a plain "
            "Parameter. Write `module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, placements))` "
            "instead, or use distribute_module, parallelize_module or fully_shard"
        )
    if flatten and not param.is_contiguous():
        return f"{which} of shape {shape} is not contiguous, so flatten=True would copy it; make it contiguous"
    is_flat = getattr(param, "_fsdp_flattened", False)
    is_stack = takes_stacks and param.ndim > 2 and not is_flat
    # FSDP1 flattens parameters; only the reader of process groups knows the matrices inside.
    is_known = param.ndim == 1 and reader == "process_groups"
    if not (param.ndim == 2 or flatten or is_stack or is_known):
        hint = ""
        if is_flat:
            hint = ". FSDP1 flattened it: use distributed_config=create_auto_config(fsdp_process_group=model.process_group, module=model)"
        elif param.ndim > 2:
            hint = (
                ". flatten=True in its parameter group takes it as one matrix, dimension 0 by all others; "
                "allow_batched_matrices=True as a stack of matrices of its last two dimensions"
            )
        return f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} ({which}){hint}"
    if reader is not None or not (split.sizes or flatten):
        return ""
    if type(param) not in (Tensor, torch.nn.Parameter):
        return f"{which} is a {type(param).__name__}, which only a distributed_config can split or flatten"
    if not split.sizes:
        return ""
    whole = param.flatten(1) if flatten else param
    text = split.problem_with(whole.shape[-2:], split.dim + whole.ndim - 2)
    return f"{which} of shape {shape}: {text}" if text else ""


def _find_problem(muon: Muon, first_group: int = 0) -> ValueError | None:
    """The error for an invalid parameter in ``first_group`` or later, if there is one."""
    config, groups = muon._distributed_config, muon.param_groups
    reader = None if config is None else config.state.get("reader")
    stacks = muon._allow_batched_matrices
    forms = [MuonFormulas.of_group(group).form for group in groups]
    seen: dict[Tensor, str] = {}
    for index, (number, name, param) in enumerate(_named(groups)):
        if number < first_group:
            continue
        which = f"parameter {index}" + (f" {name!r}" if name else "")
        other = seen.setdefault(param, which)
        if other != which and config is not None:
            text = f"{other} and {which} are the same tensor; pass tied weights to Muon once"
        else:
            text = _problem_with(param, which, forms[number], reader, stacks)
        if text:
            return ValueError(text)
    return None


def _params_of(groups: list[dict[str, Any]]) -> list[Param]:
    """The engine's view of all parameters."""
    from torch.optim._muon_engine.runtime import Param

    formulas = [MuonFormulas.of_group(group) for group in groups]
    return [
        Param(index, param, name, number, formulas[number])
        for index, (number, name, param) in enumerate(_named(groups))
    ]


def _named(groups: Sequence[dict]) -> Iterator[tuple[int, str | None, Tensor]]:
    """The group, the name if known, and the tensor of each parameter."""
    for number, group in enumerate(groups):
        names, params = group.get("param_names"), group["params"]
        if names is None or len(names) != len(params):
            # The list of parameters changed without the names.
            names = [None] * len(params)
        for name, param in zip(names, params, strict=True):
            yield number, name, param


def _has_kernels(group: dict[str, Any]) -> bool:
    """Whether a group has stacks of matrices with fewer columns than those of any expert."""
    small = [p for p in group["params"] if p.ndim > 2 and p.shape[-1] <= 16]
    return bool(small) and not group["flatten"]


def _check_loaded(groups: list[dict[str, Any]], loaded: dict[str, Any]) -> None:
    """Raises ValueError, before anything changes, if ``loaded`` is from another model."""
    for mine, group in zip(groups, loaded["param_groups"], strict=True):
        if not group.keys() - {"params", "param_names"}:
            # torch.distributed.checkpoint saves no options of a group without parameters.
            group.update({k: v for k, v in mine.items() if k != "params"})
        # A checkpoint of stock Muon does not know them, but they say what the parameters are.
        for option in ("split", "flatten"):
            group.setdefault(option, mine[option])
    for index, (_, name, param) in enumerate(_named(groups)):
        state = loaded["state"].get(param)
        buffer = state.get("momentum_buffer") if state else None
        # FSDP1 flattens its parameters, and unflattens them for checkpoints.
        flat = getattr(param, "_fsdp_flattened", False)
        if isinstance(buffer, Tensor) and not flat and buffer.shape != param.shape:
            raise ValueError(
                f"this state_dict is of another model: the momentum buffer of parameter {name or index} of shape "
                f"{tuple(param.shape)} has shape {tuple(buffer.shape)}"
            )


class Muon(Optimizer):
    r"""Implements Muon algorithm.

    .. math::
       \begin{aligned}
            &\textbf{input} : \gamma \text{ (lr)},\ \theta_0 \text{ (params)},\
                f(\theta) \text{ (objective)},\ \lambda \text{ (weight decay)},                 \\
            &\hspace{13mm} \mu \text{ (momentum)},\ \textit{nesterov},\
                (a, b, c) \text{ (NS coefficients)},\ k \text{ (NS steps)},\
                \varepsilon \text{ (epsilon)}                                                   \\
            &\textbf{initialize} : B_0 \leftarrow 0 \text{ (momentum buffer)}            \\[-1.ex]
            &\rule{110mm}{0.4pt}                                                                \\
            &\textbf{for} \: t=1 \: \textbf{to} \: \ldots \: \textbf{do}                        \\
            &\hspace{5mm} G_t \leftarrow \nabla_{\theta} f_t(\theta_{t-1})                      \\
            &\hspace{5mm} B_t \leftarrow \mu B_{t-1} + (1 - \mu) G_t                            \\
            &\hspace{5mm} M_t \leftarrow \mu B_t + (1 - \mu) G_t
                \text{ if } \textit{nesterov} \text{ else } B_t                                 \\
            &\hspace{5mm} X_0 \leftarrow M_t / \max(\lVert M_t \rVert_F, \varepsilon)           \\
            &\hspace{5mm} X_i \leftarrow a X_{i-1} + b X_{i-1} X_{i-1}^\top X_{i-1}
                + c (X_{i-1} X_{i-1}^\top)^2 X_{i-1},\quad i = 1, \ldots, k                     \\
            &\hspace{5mm} \theta_t \leftarrow (1 - \gamma \lambda)\, \theta_{t-1}
                - \mathrm{AdjustLR}(\gamma, \mathrm{shape}(\theta_t))\, X_k              \\[-1.ex]
            &\textbf{return} \: \theta_t
       \end{aligned}

    The update of a matrix is its momentum with all singular values brought close to one, by
    :math:`k` Newton-Schulz iterations in bfloat16. For a matrix of shape :math:`(A, B)`, ``AdjustLR``
    multiplies the learning rate by

    - "original": :math:`\sqrt{\max(1, A / B)}`, as in `Muon: An optimizer for hidden layers`_;
    - "match_rms_adamw": :math:`0.2 \sqrt{\max(A, B)}`, as in `Muon is Scalable for LLM Training`_, so
      that you can keep a learning rate and weight decay tuned for AdamW;
    - "spectral_unclamped": :math:`\sqrt{A / B}`, as in `Deriving Muon`_.

    If FSDP, TP and others leave each rank with only a piece of a matrix, pass a ``distributed_config``
    from :mod:`torch.optim.muon`. Each matrix is then gathered to one owner rank, which orthogonalizes it
    once and sends the update back to every shard and replica. All ranks that share matrices must
    construct this optimizer at the same place of the program, because they compare their parameters.

    Args:
        params (iterable): matrices, as parameters, as ``named_parameters()`` or as dicts that define
            parameter groups. With names, ranks that list their parameters in different orders get an
            error. Without names, matrices of equal shape would be mixed up. Embeddings, biases, norms
            and output heads belong to another optimizer such as :class:`AdamW`.
        lr (float, Tensor, optional): learning rate (default: 1e-3).
        weight_decay (float, optional): decoupled weight decay (default: 0.1)
        momentum (float, optional): momentum factor (default: 0.95)
        nesterov (bool, optional): enables Nesterov momentum (default: True)
        ns_coefficients (tuple of three floats, optional): coefficients of the polynomial, or one such
            tuple per step, as in `The Polar Express`_ (default: (3.4445, -4.775, 2.0315))
        eps (float, optional): lower bound of the norm that divides the momentum (default: 1e-07)
        ns_steps (int, optional): number of Newton-Schulz steps, less than 100 (default: 5)
        adjust_lr_fn (str, optional): one of "original", "match_rms_adamw" and "spectral_unclamped";
            None means "original" (default: None)
        distributed_config (DistributedConfig or "auto", optional): how each matrix gets to its owner
            rank; "auto" means :func:`torch.optim.muon.create_dtensor_config` (default: None)
        foreach (bool, optional): whether to orthogonalize matrices of equal shape in one batch. The
            rounding of an update may differ from the for-loop's, by about 1 % of its Frobenius norm.
            None means False, but True for accelerators with a ``distributed_config`` (default: None)
        allow_batched_matrices (bool, optional): whether a parameter of three or more dimensions is a
            stack of matrices of its last two, such as the (experts, out, in) of a mixture of experts.
            Each matrix of a stack has its own Newton-Schulz, learning rate and owner. Accelerators
            batch a stack, unless ``foreach`` is False (default: False)
        ns_algorithm (str, optional): "quintic" iterates on the matrix. "gram" iterates on its small
            Gram matrix if one side is at least 1.5 times the other, and rounds differently: five steps
            have four products with the long side instead of ten. "symmetric" computes only the upper
            blocks of the symmetric products. On CPUs where this has the same bits, "quintic" does so,
            too (default: "quintic")

    A parameter group may also have

    - ``split`` (sequence of int, or dict): the rows of each part of a fused weight, such as ``(q, k, v)``.
      Each part is a matrix with its own Newton-Schulz, learning rate and owner. If the rows of the parts
      alternate, or the parts are columns, pass a dict: ``{"sizes": (q, k, v), "repeats": groups}`` has q, k
      and v rows for each group of heads, and ``{"sizes": (n, n, n), "dim": 1}`` three parts of n columns.
      A part is all of its lines, joined in order. (default: None)
    - ``flatten`` (bool): whether a parameter of three or more dimensions, such as a convolution, is one
      matrix, dimension 0 by all others. (default: False)

    Example:
        >>> # xdoctest: +SKIP
        >>> hidden, _ = torch.optim.muon.partition_parameters(model.layers)
        >>> muon = torch.optim.Muon(hidden, lr=0.02)
        >>> loss_fn(model(input), target).backward()
        >>> muon.step()

    .. _Muon\: An optimizer for hidden layers:
        https://kellerjordan.github.io/posts/muon/
    .. _Muon is Scalable for LLM Training:
        https://arxiv.org/abs/2502.16982
    .. _Deriving Muon:
        https://jeremybernste.in/writing/deriving-muon
    .. _The Polar Express:
        https://arxiv.org/abs/2505.16932
    """

    # Attributes of a copy or an old pickle.
    _distributed_config: DistributedConfig | None = None
    _engine: Engine | None = None
    _needs_config = False
    _allow_batched_matrices = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | Sequence[Coefficients] = _COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        distributed_config: DistributedConfig | Literal["auto"] | None = None,
        foreach: bool | None = None,
        allow_batched_matrices: bool = False,
        ns_algorithm: str = "quintic",
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not 0.0 <= lr:
            raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
        if not 0.0 <= momentum:
            raise ValueError(f"momentum should be >= 0 but is: {momentum}")
        if not 0.0 <= weight_decay:
            raise ValueError(f"weight decay should be >= 0 but is: {weight_decay}")
        if adjust_lr_fn is not None and adjust_lr_fn not in _ADJUST_LR_FNS:
            raise ValueError(
                f"Adjust learning rate function {adjust_lr_fn} is not supported; use one of {_ADJUST_LR_FNS}"
            )
        check_ns_algorithm(ns_algorithm)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            **MuonFormulas._field_defaults,
            "foreach": foreach,
            "ns_algorithm": ns_algorithm,
        }
        self._allow_batched_matrices = allow_batched_matrices
        self._distributed_config = _checked_config(distributed_config)
        super().__init__(params, defaults)
        if self._distributed_config is not None:
            self._build_engine()

    def _build_engine(self) -> Engine:
        """Builds the engine together with the other ranks. Parameters may have changed since the last time."""
        from torch.optim._muon_engine.engine import Engine

        config: Any = self._distributed_config
        self._engine = Engine(
            config,
            _params_of(self.param_groups),
            self.state,
            self._allow_batched_matrices,
            # The other ranks wait for this one, so they learn of a problem before it is raised.
            _find_problem(self),
            self._engine,
        )
        return self._engine

    @property
    def assignments(self) -> dict[int, list[int]]:
        """Global rank -> indices of the parameters that it orthogonalizes; {} without a config."""
        if self._engine is None:
            return {}
        return {rank: list(owned) for rank, owned in self._engine.assignments.items()}

    @property
    def matrix_owners(self) -> dict[tuple[int, int], int]:
        """(Parameter index, matrix in it) -> the global rank that orthogonalizes it, or its first block."""
        if self._engine is None:
            return {}
        found: dict[tuple[int, int], int] = {}
        schedule = self._engine.schedule
        for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
            found.setdefault((layout.key.index, layout.key.sub), owner)
        return found

    @property
    def current_rank(self) -> int:
        """This process's global rank; 0 without process groups."""
        if self._engine is not None:
            return self._engine.rank
        dist = torch.distributed
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @torch._disable_dynamo
    def describe(self) -> str:
        """Returns a text that says who owns what and what a step costs each rank.

        A group of more than 16 ranks shows the busiest ones and this one. It asks no other rank.
        """
        if self._engine is None:
            why = f"{'lost its' if self._needs_config else 'has no'} distributed_config"
            return f"Muon with {len(self._tensors())} parameters, which {why}"
        from torch.optim._muon_engine.describe import in_full

        changed = not self._engine.matches(self._tensors())
        note = "\nParameters have changed since. The next step() rebuilds this."
        return in_full(self._engine) + (note if changed else "")

    @torch._disable_dynamo
    def synchronize(self) -> None:
        """Waits until all ranks have told each other about the last :meth:`step`.

        On accelerators, a step does not wait for the device, so it cannot know whether the ranks differ
        in their gradients or options. The next :meth:`step`, :meth:`state_dict`, :meth:`add_param_group`
        or this method raises the error. Call this method after the last step. Without a
        ``distributed_config`` and on CPUs, it has nothing to do.

        Raises:
            RuntimeError: ranks differed in the last step. Their parameters may have diverged.
        """
        if self._engine is not None:
            self._engine.raise_new_failure()

    def _tensors(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # A process group can be neither copied nor pickled, so the copy has no config. It must not go on
        # alone and take shards for matrices, so it refuses to step.
        needs = self._needs_config or self._distributed_config is not None
        state["_needs_config"] = needs
        state["_allow_batched_matrices"] = self._allow_batched_matrices
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has defaults, load_state_dict() does not.
        if "defaults" not in state:
            _check_loaded(self.param_groups, state)
        super().__setstate__(state)
        for group in (self.defaults, *self.param_groups):
            for name, value in MuonFormulas._field_defaults.items():
                group.setdefault(name, value)

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        r"""Adds a group of matrices.

        With a ``distributed_config``, every rank that shares a matrix of this optimizer must make this
        call, because the ranks assign owners again. It raises the errors of the constructor.
        """
        super().add_param_group(param_group)
        try:
            if self._distributed_config is None:
                problem = _find_problem(self, len(self.param_groups) - 1)
                if problem is not None:
                    raise problem
            elif self._engine is not None:
                self._build_engine()
        except BaseException:
            self.param_groups.pop()
            raise
        if self.current_rank != 0:
            return
        *earlier, group = self.param_groups
        if self._allow_batched_matrices and _has_kernels(group):
            if not any(map(_has_kernels, earlier)):
                warnings.warn(_KERNELS, stacklevel=2)
        # Users and schedulers add keys of their own, which resemble none of these.
        known = {*self.defaults, "params", "param_names"}
        for key in group.keys() - known:
            for near in get_close_matches(str(key), sorted(known), 1):
                text = f"Muon ignores {key!r} of a parameter group. Is it {near!r}?"
                warnings.warn(text, stacklevel=2)

    def _init_group(
        self,
        group: MutableMapping,
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        for p in group["params"]:
            if p.grad is None:
                continue
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if p.grad.is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
            params_with_grad.append(p)
            grads.append(p.grad)
            state = self.state[p]
            if "momentum_buffer" not in state:
                like = p if group["flatten"] else p.grad
                state["momentum_buffer"] = torch.zeros_like(like)
            muon_momentum_bufs.append(state["momentum_buffer"])
        return False  # has_complex

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as :meth:`Optimizer.state_dict` does, without the ``distributed_config``.

        On accelerators, it raises RuntimeError if the last step turns out to have failed. It only logs a
        failure that was raised before.
        """
        if self._engine is None:
            return super().state_dict()
        if self._engine.failure:
            log.warning("%s", self._engine.failure)
        self._engine.raise_new_failure()
        # Optimizer.state_dict knows no index for a parameter that left the groups.
        state, present = self.state, set(map(id, self._tensors()))
        self.state = type(state)(
            state.default_factory, {p: s for p, s in state.items() if id(p) in present}
        )
        try:
            return super().state_dict()
        finally:
            self.state = state

    @torch.no_grad()
    def step(self, closure=None):
        """Performs a single optimization step.

        With a ``distributed_config``, every rank that holds a piece of a parameter must make this call,
        whether or not it has a gradient for it.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.

        Raises:
            ValueError: a hyperparameter is invalid, or a flag of the config has changed.
            RuntimeError: ranks differ in gradients, hyperparameters, parameters or their number of steps;
                a gradient cannot be used; this is a copy without its config; or an earlier step failed.
        """
        if self._engine is not None:
            self._engine.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._needs_config and self._distributed_config is None:
            raise RuntimeError(_LOST_CONFIG)
        if self._engine is not None:
            self._distributed_step(self._engine)
            return loss

        for group in self.param_groups:
            params_with_grad: list[Tensor] = []
            grads: list[Tensor] = []
            muon_momentum_bufs: list[Tensor] = []
            has_complex = self._init_group(
                group, params_with_grad, grads, muon_momentum_bufs
            )
            muon(
                params_with_grad,
                grads,
                muon_momentum_bufs,
                **{name: group[name] for name in MuonFormulas._fields},
                has_complex=has_complex,
                allow_batched_matrices=self._allow_batched_matrices,
            )
        return loss

    @torch._disable_dynamo
    def _distributed_step(self, engine: Engine) -> None:
        formulas, tensors = [], self._tensors()
        for group in self.param_groups:
            formulas += [MuonFormulas.of_group(group)] * len(group["params"])
        if not engine.matches(tensors):
            # Frameworks replace parameters, or the tensors behind them, after construction.
            engine.meet(tensors)
            engine = self._build_engine()
        engine.step(formulas, [p.grad for p in tensors], self.state)


def _checked_config(config: DistributedConfig | str | None) -> DistributedConfig | None:
    if config is None:
        return None
    from torch.optim.muon import create_dtensor_config, DistributedConfig

    if config == "auto":
        return create_dtensor_config()
    if not isinstance(config, DistributedConfig):
        found = repr(config) if isinstance(config, str) else type(config).__name__
        raise TypeError(
            f'distributed_config must be a torch.optim.muon.DistributedConfig or "auto" but is {found}'
        )
    return config


def _single_tensor_muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    lr: float | Tensor,
    has_complex: bool,
    foreach: bool | None = False,
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
    **options: Any,
) -> None:
    if has_complex:
        raise ValueError("Complex parameters are not supported")
    formulas = MuonFormulas(lr=_to_scalar(lr), foreach=foreach, **options)
    takes_more = allow_batched_matrices or formulas.flatten
    if distributed_config is not None:
        if not takes_more and any(param.ndim > 2 for param in params):
            raise ValueError("Param gradient must be a 2D matrix")
        _distributed_muon(
            params, grads, muon_momentum_bufs, formulas, distributed_config
        )
        return
    formulas.check()
    if any(grad.ndim != 2 and not (takes_more and grad.ndim > 2) for grad in grads):
        raise ValueError("Param gradient must be a 2D matrix")
    split = formulas.form[0]
    if takes_more or split.sizes:
        if formulas.flatten:
            grads = [grad.contiguous() for grad in grads]
        params, grads, muon_momentum_bufs = (
            [matrix for tensor in tensors for matrix in formulas.matrices(tensor)]
            for tensors in (params, grads, muon_momentum_bufs)
        )
    for grad, buf in zip(grads, muon_momentum_bufs, strict=True):
        formulas.accumulate([buf], [grad])
    for batch in _batches(grads, muon_momentum_bufs, formulas):
        first = grads[batch[0]]
        if len(batch) == 1:
            (prepared,) = formulas.prepare([muon_momentum_bufs[batch[0]]], [first])
            updates = [formulas.update_of(prepared)]
        else:
            shape = (len(batch), *first.shape)
            stacked = torch.empty(shape, dtype=NS_DTYPE, device=first.device)
            for i, out in zip(batch, stacked, strict=True):
                out.copy_(*formulas.prepare([muon_momentum_bufs[i]], [grads[i]]))
            updates = list(formulas.orthogonalize(stacked).unbind())
        shape = split.joined_shape(first.shape)
        formulas.apply([params[i] for i in batch], updates, shape)


def _batches(
    grads: Sequence[Tensor], bufs: Sequence[Tensor], formulas: MuonFormulas
) -> list[list[int]]:
    """The indices of the matrices in each batch, or of each alone unless ``foreach``."""
    if not formulas.foreach:
        return [[i] for i in range(len(grads))]
    alike: dict[tuple, list[int]] = {}
    for i, (grad, buf) in enumerate(zip(grads, bufs, strict=True)):
        key: tuple = (grad.shape, grad.dtype, grad.device)
        # Wrapper types have their own kernels, and stacking would change strides.
        if any(type(t) is not Tensor or not t.is_contiguous() for t in (grad, buf)):
            key = (i,)
        alike.setdefault(key, []).append(i)
    batches = []
    for found in alike.values():
        first = grads[found[0]]
        room = formulas.batch_size(first.shape, first.device)
        batches += [found[at : at + room] for at in range(0, len(found), room)]
    return batches


def _distributed_muon(
    params: list[Tensor],
    grads: Sequence[Tensor | None],
    muon_momentum_bufs: list[Tensor],
    formulas: MuonFormulas,
    config: DistributedConfig,
) -> None:
    """One step of the functional form, with an engine for this call."""
    from torch.optim._muon_engine.engine import Engine
    from torch.optim._muon_engine.runtime import Param

    from torch.optim._muon_engine.layouts.dtensor import placed_like

    if not all(map(placed_like, params, muon_momentum_bufs)):
        raise ValueError(
            "muon_momentum_bufs must have the types and placements of params"
        )
    bufs = [{"momentum_buffer": buf} for buf in muon_momentum_bufs]
    states: dict[Tensor, Any] = dict(zip(params, bufs, strict=True))
    given = [Param(i, p, None, 0, formulas) for i, p in enumerate(params)]
    takes_stacks = any(p.ndim > 2 for p in params)
    engine = Engine(config, given, states, takes_stacks, is_lasting=False)
    engine.begin_step()
    engine.step([formulas] * len(params), grads, states)


@_disable_dynamo_if_unsupported(single_tensor_fn=_single_tensor_muon)
def muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    foreach: bool | None = None,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Coefficients | Sequence[Coefficients],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    ns_algorithm: str = "quintic",
    split: Sequence[int] | dict[str, Any] | None = None,
    flatten: bool = False,
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
) -> None:
    if foreach is None and allow_batched_matrices and distributed_config is None:
        # Accelerators iterate a stack at once.
        foreach = any(p.ndim > 2 and p.device.type != "cpu" for p in params)
    # A compiler fuses the loop better than a batch.
    if torch.compiler.is_compiling():
        foreach = False
    _single_tensor_muon(
        params,
        grads,
        muon_momentum_bufs,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        eps=eps,
        adjust_lr_fn=adjust_lr_fn,
        has_complex=has_complex,
        ns_algorithm=ns_algorithm,
        split=split,
        flatten=flatten,
        foreach=foreach,
        allow_batched_matrices=allow_batched_matrices,
        distributed_config=distributed_config,
    )


# The shared text for functional forms came with torch.optim.functional, after 2.13.
muon.__doc__ = getattr(
    _optimizer_module,
    "_functional_api_doc",
    "Functional API that performs {optimizer} algorithm computation.\n\n"
    "See :class:`~torch.optim.{optimizer}` for details.",
).format(optimizer="Muon")
