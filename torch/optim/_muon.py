# mypy: allow-untyped-defs
# mypy: disable-error-code=arg-type
r"""Implementation of the Muon optimizer.

The phases of a step are methods of :class:`_MuonFormulas`. One process runs them one after the other;
with a ``distributed_config`` the engine in ``torch.optim._muon_engine`` runs the same ones between its
collectives.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections import defaultdict
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor

from . import optimizer as _optimizer_module
from .optimizer import (
    _disable_dynamo_if_unsupported,
    _params_doc,
    _to_scalar,
    Optimizer,
    ParamsT,
)


if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.engine import Engine
    from torch.optim._muon_engine.layouts import Reader
    from torch.optim._muon_engine.runtime import StepParam


__all__ = ["Muon", "muon"]

log = logging.getLogger("torch.optim.muon")

# Keller Jordan's coefficients and number of steps: https://kellerjordan.github.io/posts/muon/,
# https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16
EPS = 1e-7
DEFAULT_A = 3.4445
DEFAULT_B = -4.7750
DEFAULT_C = 2.0315
DEFAULT_NS_STEPS = 5

# Newton-Schulz reads and writes this dtype, so it is also what travels between ranks: an element that
# is only moved has the same bits, whether it is rounded before the trip or after it.
_NS_DTYPE = torch.bfloat16
# One batched Newton-Schulz holds at most so many bytes of matrices; its workspace is four times that.
_BATCH_BYTES = 64 * 1024**2

_ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped")

_NS_ALGORITHMS = ("quintic", "gram")
# Options that checkpoints of the first Muon do not have.
_LATER_OPTIONS = {"foreach": None, "ns_algorithm": "quintic"}
# From such a quotient of its sides on, a matrix is iterated by its small Gram matrix.
_GRAM_RATIO = 1.5
# The Gram matrix is computed anew before small singular values have grown by more than this. In bfloat16
# it knows nothing of those below its rounding, and more growth tears nearly low-rank matrices apart.
_GRAM_GROWTH = 50

_Triple = tuple[float, float, float]


def _given_by_step(ns_coefficients: Sequence[Any]) -> bool:
    """Whether each step has a polynomial of its own."""
    return bool(ns_coefficients) and not isinstance(ns_coefficients[0], (float, int))


def _check_ns(
    ns_coefficients: Sequence[Any], ns_steps: int, ns_algorithm: str = "quintic"
) -> None:
    if ns_steps >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency"
        )
    by_step = _given_by_step(ns_coefficients)
    if any(len(c) != 3 for c in (ns_coefficients if by_step else [ns_coefficients])):
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    if by_step and len(ns_coefficients) != ns_steps:
        raise ValueError(
            f"ns_coefficients has {len(ns_coefficients)} tuples and ns_steps is {ns_steps}; give one tuple for each step, "
            "or one for all"
        )
    _check_ns_algorithm(ns_algorithm)


def _check_ns_algorithm(ns_algorithm: str) -> None:
    if ns_algorithm not in _NS_ALGORITHMS:
        raise ValueError(
            f"ns_algorithm has to be one of {_NS_ALGORITHMS}, but is {ns_algorithm!r}"
        )


def _newtonschulz(
    x: Tensor,
    ns_coefficients: Sequence[Any],
    ns_steps: int,
    eps: float,
    ns_algorithm: str = "quintic",
) -> Tensor:
    """Orthogonalizes ``x``, of shape (rows, columns) or (matrices, rows, columns), in its own dtype.

    ``x`` is not written to.
    """
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # The iteration converges for singular values in [0, 1]; the Frobenius norm bounds them.
    x = x / _frobenius_norm(x).clamp(min=eps)
    triples: Sequence[Any] = [ns_coefficients] * ns_steps
    if _given_by_step(ns_coefficients):
        triples = ns_coefficients
    if ns_algorithm == "gram" and x.size(-1) >= _GRAM_RATIO * x.size(-2):
        for together in _gram_parts(triples):
            x = _gram_steps(x, together) @ x
    else:
        for a, b, c in triples:
            gram = x @ x.mT
            poly = addmm(gram, gram, gram, beta=b, alpha=c)
            x = addmm(x, poly, x, beta=a)
    return x.mT if tall else x


def _gram_parts(triples: Sequence[_Triple]) -> list[list[_Triple]]:
    """The steps that follow one Gram matrix: three and two of the default's five."""
    parts: list[list[_Triple]] = []
    growth = math.inf
    for a, b, c in triples:
        growth *= abs(a)
        if growth > _GRAM_GROWTH:
            parts.append([])
            growth = abs(a)
        parts[-1].append((a, b, c))
    return parts


def _gram_steps(x: Tensor, triples: Sequence[_Triple]) -> Tensor:
    """The factor, of shape (..., rows, rows), by which these steps multiply ``x``.

    A step multiplies by a polynomial of the Gram matrix, which then follows from the one before. So the
    long side takes part in two products for all of these steps, instead of in two for each.
    """
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = x @ x.mT
    product = torch.empty(0)
    for step, (a, b, c) in enumerate(triples, 1):
        poly = addmm(gram, gram, gram, beta=b, alpha=c)
        if step == 1:
            product = poly.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = addmm(product, poly, product, beta=a)
        if step < len(triples):
            # The polynomial stands without its diagonal, which would cost the rest its last bits.
            half = addmm(gram, poly, gram, beta=a)
            gram = addmm(half, half, poly, beta=a)
    return product


def _frobenius_norm(x: Tensor) -> Tensor:
    if x.ndim == 2:
        return x.norm()
    # One by one: a reduction over a batch may add up in another order.
    return torch.stack([matrix.norm() for matrix in x])[:, None, None]


def _zeropower_via_newtonschulz(
    grad: Tensor,
    ns_coefficients: _Triple | Sequence[_Triple],
    ns_steps: int,
    eps: float,
    ns_algorithm: str = "quintic",
) -> Tensor:
    r"""Approximates the orthogonal factor :math:`UV^T` of ``grad`` :math:`= USV^T`.

    The quintic's coefficients maximize its slope at zero, so few steps suffice. The singular values
    end up between about 0.3 and 1.2 instead of at 1, which does not hurt training. The method is Keller
    Jordan's (https://github.com/KellerJordan/Muon/blob/master/muon.py), with suggestions by @jxbz,
    @leloykun and @YouJiacheng.

    Args:
        grad (Tensor): the matrix, of shape (rows, columns). It is not written to.
        ns_coefficients (tuple of three floats, or one for each step): coefficients of the odd quintic.
        ns_steps (int): number of iterations, less than 100.
        eps (float): smallest divisor of the normalization.
        ns_algorithm (str): "quintic", or "gram" for the same polynomials by the Gram matrix.

    Returns:
        Tensor of the shape of ``grad``, in bfloat16.
    """
    _check_ns(ns_coefficients, ns_steps, ns_algorithm)
    if len(grad.shape) != 2:
        raise ValueError("Input tensor gradient must be a 2D matrix")
    x = grad.to(dtype=_NS_DTYPE)
    return _newtonschulz(x, ns_coefficients, ns_steps, eps, ns_algorithm)


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


class _MuonFormulas(NamedTuple):
    """One parameter group's hyperparameters in one step, and the phases that they define."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: _Triple | Sequence[_Triple]
    ns_steps: int
    eps: float
    adjust_lr_fn: str | None
    foreach: bool | None = None
    ns_algorithm: str = "quintic"

    @classmethod
    def of_group(cls, group: MutableMapping[str, Any]) -> _MuonFormulas:
        hyper = {name: group[name] for name in cls._fields}
        # Checkpoints that went through JSON or YAML bring lists.
        hyper["ns_coefficients"] = _as_tuples(hyper["ns_coefficients"])
        return cls(**{**hyper, "lr": _to_scalar(hyper["lr"])})

    @property
    def dtype(self) -> torch.dtype:
        """What :meth:`orthogonalize` reads and writes."""
        return _NS_DTYPE

    @property
    def compute_key(self) -> tuple:
        """What :meth:`orthogonalize` depends on: matrices of equal keys may share a batch."""
        # The functional form may be given lists.
        coefficients = _as_tuples(self.ns_coefficients)
        how = self.ns_steps, self.eps, self.ns_algorithm
        return (coefficients, *how, self.foreach)

    @property
    def _readable_lr(self) -> float | None:
        """None for a Tensor that would cost a synchronization."""
        if not isinstance(self.lr, Tensor):
            return float(self.lr)
        return float(self.lr) if type(self.lr) is Tensor and self.lr.is_cpu else None

    @property
    def moves(self) -> bool:
        return self._readable_lr != 0

    @property
    def digest(self) -> int:
        """Of the values that hold in this step, whatever their types."""
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

    def check(self) -> None:
        _check_ns(self.ns_coefficients, self.ns_steps, self.ns_algorithm)

    def signature(self) -> dict[str, str]:
        """What the ranks compare. A Tensor may change between their reading it; its kind may not."""
        return {
            name: "a Tensor" if isinstance(value, Tensor) else str(value)
            for name, value in self._asdict().items()
        }

    def accumulate(self, momentum_bufs: list[Tensor], grads: list[Tensor]) -> None:
        """Takes gradients into momentum; all of them pieces or all of them wholes."""
        if len(grads) == 1:
            momentum_bufs[0].lerp_(grads[0], 1 - self.momentum)
        else:
            torch._foreach_lerp_(momentum_bufs, grads, 1 - self.momentum)

    def prepare(
        self, momentum_buf: Tensor, grad: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """What is to be orthogonalized: the momentum, looked ahead through ``grad`` if nesterov."""
        if not self.nesterov:
            return momentum_buf
        return torch.lerp(grad, momentum_buf, self.momentum, out=out)

    def prepare_together(
        self, momentum_bufs: list[Tensor], grads: list[Tensor]
    ) -> Sequence[Tensor]:
        """Like :meth:`prepare`, for many in few launches."""
        if not self.nesterov:
            return momentum_bufs
        return torch._foreach_lerp(grads, momentum_bufs, self.momentum)

    def orthogonalize(self, prepared: Tensor) -> Tensor:
        """The update of one matrix, or of the (matrices, rows, columns) of one batch."""
        how = self.ns_coefficients, self.ns_steps, self.eps, self.ns_algorithm
        if prepared.ndim == 2:
            return _zeropower_via_newtonschulz(prepared, *how)
        stack = prepared.to(_NS_DTYPE).flatten(0, -3)
        return _newtonschulz(stack, *how).reshape(prepared.shape)

    def batch_size(self, shape: Sequence[int], device: torch.device) -> int:
        """How many matrices of ``shape`` the distributed step orthogonalizes together."""
        if self.foreach is False or (self.foreach is None and device.type == "cpu"):
            return 1
        return max(1, _BATCH_BYTES // max(1, math.prod(shape) * _NS_DTYPE.itemsize))

    def apply(
        self, params: list[Tensor], updates: list[Tensor] | None, shape: Sequence[int]
    ) -> None:
        """Decays ``params`` and moves them: matrices, or pieces of matrices, of the global ``shape``."""
        decay = 1 - self.lr * self.weight_decay
        # A Tensor of one element is as good as a number, though the stubs do not say so.
        alpha: Any = -_adjust_lr(self.lr, self.adjust_lr_fn, shape)
        if len(params) > 1 and not isinstance(self.lr, Tensor):
            torch._foreach_mul_(params, decay)
            if updates is not None:
                torch._foreach_add_(params, updates, alpha=alpha)
            return
        for i, param in enumerate(params):
            param.mul_(decay)
            if updates is not None:
                param.add_(updates[i], alpha=alpha)


def _floats(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_floats(value) for value in values]
    return float(values)


def _as_tuples(ns_coefficients: Any) -> tuple:
    return tuple(tuple(c) if isinstance(c, list) else c for c in ns_coefficients)


def _storage_is_gone(param: Tensor) -> bool:
    """Whether ``param`` is what ``param.data = dtensor`` leaves behind.

    PyTorch accepts that assignment to a plain Parameter and ends with a tensor of the global shape
    over a null pointer. The next kernel that touches the tensor takes the process down.
    """
    if type(param) not in (Tensor, torch.nn.Parameter) or param.device.type == "meta":
        return False
    if torch._is_functional_tensor(param) or param.layout != torch.strided:
        return False
    # A storage that FSDP1 or the user freed has no bytes; the one of that assignment has.
    has_bytes = param.untyped_storage().nbytes() > 0
    return param.numel() > 0 and has_bytes and torch.Tensor.data_ptr(param) == 0


def _named_parameter(index: int, name: str | None) -> str:
    return f"parameter {index}" + (f" {name!r}" if name else "")


class Muon(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: _Triple | Sequence[_Triple] = (
            DEFAULT_A,
            DEFAULT_B,
            DEFAULT_C,
        ),
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
                f"Adjust learning rate function {adjust_lr_fn} is not supported"
            )
        _check_ns_algorithm(ns_algorithm)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "foreach": foreach,
            "ns_algorithm": ns_algorithm,
        }
        self._allow_batched_matrices = allow_batched_matrices
        self._distributed_config = _checked_config(distributed_config)
        self._engine: Engine | None = None
        self._needs_config = False
        super().__init__(params, defaults)
        if self._distributed_config is not None:
            self._build_engine(self._distributed_config)

    def _build_engine(self, config: DistributedConfig) -> None:
        """Builds the engine for the parameters as they are now, together with the other ranks."""
        from torch.optim._muon_engine.engine import Engine

        self._prepare_reader()
        # A problem travels along instead of being raised here: the other ranks are waiting.
        params, former = self._step_params(), self._engine
        self._engine = Engine(config, params, self._find_problem(), former)
        if former is not None:
            former.hand_over_momentum(params, self.state)

    def _prepare_reader(self) -> None:
        """Several optimizers may share a config, and so its reader."""
        reader = self._reader()
        if reader is not None:
            reader.takes_stacks = self._allow_batched_matrices

    def _step_params(self) -> list[StepParam]:
        from torch.optim._muon_engine.runtime import StepParam

        found = []
        for group in self.param_groups:
            formulas = _MuonFormulas.of_group(group)
            for name, p in self._named(group):
                found.append(StepParam(p, name, p.grad, formulas))
        return found

    @staticmethod
    def _named(group: MutableMapping[str, Any]) -> list[tuple[str | None, Tensor]]:
        names, params = group.get("param_names"), group["params"]
        if names is None or len(names) != len(params):
            # Somebody changed the list of parameters, and nobody knows whose the names are.
            names = [None] * len(params)
        return list(zip(names, params, strict=True))

    def _find_problem(self, first_group: int = 0) -> ValueError | None:
        """What is wrong with the parameters of ``first_group`` and later groups."""
        index = sum(len(g["params"]) for g in self.param_groups[:first_group])
        seen: dict[Tensor, int] = {}
        for group in self.param_groups[first_group:]:
            for name, param in self._named(group):
                which = _named_parameter(index, name)
                problem = self._problem_with(param, which)
                if problem is not None:
                    return problem
                other = seen.setdefault(param, index)
                if other != index and self._distributed_config is not None:
                    return ValueError(
                        f"parameters {other} and {index} are the same tensor; give tied weights to Muon once"
                    )
                index += 1
        return None

    def _problem_with(self, param: Tensor, which: str) -> ValueError | None:
        if _storage_is_gone(param):
            return ValueError(
                f"{which}, of size {tuple(param.shape)}, has no storage. This is what "
                "`param.data = dtensor` leaves of a plain Parameter. Write "
                "`module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, placements))` instead, or "
                "use distribute_module, parallelize_module or fully_shard"
            )
        # FSDP1 flattens parameters; only its reader knows the matrices inside.
        reader = self._reader()
        is_flat = param.ndim == 1 and reader is not None and reader.takes_flat_params
        is_stack = param.ndim > 2 and self._allow_batched_matrices
        if param.ndim == 2 or is_flat or is_stack:
            return None
        hint = ""
        if getattr(param, "_fsdp_flattened", False):
            hint = (
                ". FSDP1 flattened it: use distributed_config=create_auto_config(fsdp_process_group="
                "model.process_group, module=model)"
            )
        elif param.ndim > 2:
            hint = ". allow_batched_matrices=True takes it as a stack of matrices of its last two dimensions"
        return ValueError(
            f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
            f"({which}){hint}"
        )

    def _reader(self) -> Reader | None:
        """What reads the layouts of this optimizer's parameters, if a factory's config does."""
        if self._distributed_config is None:
            return None
        from torch.optim._muon_engine.callbacks import functions_of

        functions = functions_of(self._distributed_config)
        return None if functions is None else functions.reader

    @property
    def assignments(self) -> dict[int, list[int]]:
        """Global rank -> indices of the parameters it orthogonalizes; {} without a config.

        A parameter of several matrices, a flat one of FSDP1 or a stack, stands under the owner of its
        first matrix; :attr:`matrix_owners` has all of them.
        """
        if self._engine is None:
            return {}
        return {rank: list(owned) for rank, owned in self._engine.assignments.items()}

    @property
    def matrix_owners(self) -> dict[tuple[int, int], int]:
        """(Parameter index, matrix in it) -> the global rank that orthogonalizes it; {} without a config.

        A flat FSDP1 parameter and a stack have several matrices, each with an owner of its own.
        """
        if self._engine is None:
            return {}
        layouts, owners = self._engine.layouts, self._engine.owners
        return {
            (layout.key.index, layout.key.sub): owner
            for layout, owner in zip(layouts, owners, strict=True)
        }

    @property
    def current_rank(self) -> int:
        """This process's global rank; 0 where there is no process group."""
        if self._engine is not None:
            return self._engine.rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return 0

    @torch._disable_dynamo
    def describe(self) -> str:
        """Says what a step with a ``distributed_config`` does and costs, for a person to read.

        For each group of ranks that share matrices: how many buckets there are, and by rank the matrices
        that it owns, FLOPs of Newton-Schulz, bytes that it sends and receives, and bytes of buffers; then
        what would make a step shorter. Of many ranks it shows the busiest, the idlest and this one.
        It asks no other rank, so it may be called on one rank only.

        Returns:
            str: several lines, of at most 200 characters each for most names.
        """
        if self._needs_config and self._distributed_config is None:
            return (
                "Muon, a copy that lost its distributed_config: step() refuses. Build a new one, and give it this one's "
                "state_dict()"
            )
        if self._engine is None:
            count = sum(len(group["params"]) for group in self.param_groups)
            return f"Muon without distributed_config: this process alone orthogonalizes its parameters, {count} of them"
        return self._engine.describe_steps(self._step_params())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # A process group can be neither copied nor pickled, so the config stays behind. The copy
        # must not go on alone with shards as if they were matrices: it refuses to step.
        state["_needs_config"] = (
            self._needs_config or self._distributed_config is not None
        )
        state["_allow_batched_matrices"] = self._allow_batched_matrices
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy brings its defaults along, load_state_dict() does not.
        if "defaults" not in state:
            self._check_loaded(state)
        super().__setstate__(state)
        self.__dict__.setdefault("_distributed_config", None)
        self.__dict__.setdefault("_engine", None)
        self.__dict__.setdefault("_needs_config", False)
        self.__dict__.setdefault("_allow_batched_matrices", False)
        for group in (self.defaults, *self.param_groups):
            for name, value in _LATER_OPTIONS.items():
                group.setdefault(name, value)

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises ValueError, before anything changes, where another optimizer or model wrote ``loaded``."""
        needed = [name for name in _MuonFormulas._fields if name not in _LATER_OPTIONS]
        index = 0
        for number, (mine, group) in enumerate(
            zip(self.param_groups, loaded["param_groups"], strict=True)
        ):
            if not group.keys() - {"params", "param_names"}:
                # torch.distributed.checkpoint has nothing of a group without parameters.
                group.update({k: v for k, v in mine.items() if k != "params"})
            lacking = [name for name in needed if name not in group]
            if lacking:
                raise ValueError(
                    f"this state_dict is not of a Muon: its param_groups[{number}] lacks {lacking} and has "
                    f"{sorted(group.keys() - {'params', 'param_names'})}"
                )
            names, saved = mine.get("param_names"), group.get("param_names")
            if names and saved and names != saved and sorted(names) == sorted(saved):
                raise ValueError(
                    f"this state_dict has the parameters of param_groups[{number}] in another order: {saved} and not "
                    f"{names}. State goes by the order; torch.distributed.checkpoint.state_dict goes by names"
                )
            for name, param in self._named(mine):
                state = loaded["state"].get(param)
                buffer = (
                    state.get("momentum_buffer") if isinstance(state, dict) else None
                )
                # FSDP1 flattens its parameters, and shows them whole at times.
                flat = getattr(param, "_fsdp_flattened", False)
                known = isinstance(buffer, Tensor) and not flat
                if known and buffer.shape != param.shape:
                    which = _named_parameter(index, name)
                    raise ValueError(
                        f"this state_dict is of another model: the momentum buffer of {which} of shape "
                        f"{tuple(param.shape)} has shape {tuple(buffer.shape)}"
                    )
                index += 1

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        r"""Adds a group of matrices.

        With a ``distributed_config`` every rank that holds a piece of them has to make this call, and
        with process groups every rank of the groups: owners are assigned anew.

        Args:
            param_group (dict): the parameters and the options that are special to them.

        Raises:
            AssertionError: the config's ``assign_fn`` leaves an index out, or gives it to several ranks.
            ValueError: a parameter is not a matrix, its storage was destroyed, it is given twice, or the
                ranks disagree about it.
            RuntimeError: a rank that has to make this call did not within the timeout of its group.
        """
        super().add_param_group(param_group)
        try:
            if self._distributed_config is None:
                problem = self._find_problem(len(self.param_groups) - 1)
                if problem is not None:
                    raise problem
            elif self._engine is not None:
                self._build_engine(self._distributed_config)
        except BaseException:
            self.param_groups.pop()
            raise

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
                state["momentum_buffer"] = torch.zeros_like(
                    p.grad, memory_format=torch.preserve_format
                )
            muon_momentum_bufs.append(state["momentum_buffer"])
        return False  # has_complex

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Optimizer.state_dict`; holds nothing of the ``distributed_config``.

        Raises:
            RuntimeError: the last step is only now found to have had a gradient on some holders of a
                parameter only. A failure that was raised already is a warning in the log, so that a
                crash handler can save what there is.
        """
        if self._engine is not None:
            if self._engine.failure:
                log.warning("%s", self._engine.failure)
            self._engine.raise_new_failure()
            params = self._step_params()
            if not self._engine.matches(params):
                return self._state_dict_of_changed(self._engine, params)
        return super().state_dict()

    def _state_dict_of_changed(
        self, engine: Engine, params: list[StepParam]
    ) -> dict[str, Any]:
        """Of a parameter that was replaced since, Optimizer.state_dict would know no index.

        The next step may find the former one again, so the state itself stays.
        """
        own = self.state
        self.state = defaultdict(dict, {p: dict(state) for p, state in own.items()})
        try:
            engine.hand_over_momentum(params, self.state)
            return super().state_dict()
        finally:
            self.state = own

    @torch.no_grad()
    def step(self, closure=None):
        """Performs a single optimization step.

        With a ``distributed_config``, every rank that holds a piece of a parameter has to make this
        call, whether or not it has a gradient for it.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.

        Raises:
            ValueError: a hyperparameter or a flag of the config makes no sense, or ranks changed these flags
                differently.
            RuntimeError: the optimizer is a copy that lost its ``distributed_config``, a parameter
                has a gradient on some of its holders only, or one that is complex, sparse or of another
                shape; parameters or flags changed on some ranks only; a rank did not make this call; or an
                earlier step failed, after which parameters of the ranks may not belong together.
        """
        if self._engine is not None:
            self._engine.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._needs_config and self._distributed_config is None:
            raise RuntimeError(
                "This Muon is a copy of one with a distributed_config, which cannot be copied or pickled. "
                "Build a new Muon with distributed_config=... and give it this one's state_dict()"
            )
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
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                ns_coefficients=group["ns_coefficients"],
                eps=group["eps"],
                ns_steps=group["ns_steps"],
                ns_algorithm=group["ns_algorithm"],
                adjust_lr_fn=group["adjust_lr_fn"],
                foreach=group["foreach"],
                has_complex=has_complex,
                allow_batched_matrices=self._allow_batched_matrices,
            )
        return loss

    @torch._disable_dynamo
    def _distributed_step(self, engine: Engine) -> None:
        for group in self.param_groups:
            # Of groups without a parameter on this rank, too: other ranks refuse the step then.
            _MuonFormulas.of_group(group).check()
        params = self._step_params()
        if not engine.matches(params):
            # Frameworks replace parameters, or what stands behind them, after construction.
            self._prepare_reader()
            engine = engine.rebuilt(params, self.state, self._find_problem())
            self._engine = engine
        engine.step(params, self.state)


def _checked_config(
    config: DistributedConfig | str | None,
) -> DistributedConfig | None:
    if config is None:
        return None
    from torch.optim.muon import create_dtensor_config, DistributedConfig

    if config == "auto":
        return create_dtensor_config()
    if not isinstance(config, DistributedConfig):
        raise TypeError(
            'distributed_config has to be a torch.optim.muon.DistributedConfig or "auto" but is '
            + (repr(config) if isinstance(config, str) else type(config).__name__)
        )
    return config


Muon.__doc__ = (
    r"""Implements Muon algorithm.

    .. math::
       \begin{aligned}
            &\rule{110mm}{0.4pt}                                                                \\
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
            &\rule{110mm}{0.4pt}                                                                \\
            &\textbf{return} \: \theta_t                                                 \\[-1.ex]
            &\rule{110mm}{0.4pt}                                                         \\[-1.ex]
       \end{aligned}

    The update of a matrix is its momentum with all singular values brought close to one, by
    :math:`k` Newton-Schulz iterations in bfloat16. For a matrix of shape :math:`(A, B)`, ``AdjustLR``
    multiplies the learning rate by

    - "original": :math:`\sqrt{\max(1, A / B)}`, as in `Muon: An optimizer for hidden layers`_;
    - "match_rms_adamw": :math:`0.2 \sqrt{\max(A, B)}`, as in `Muon is Scalable for LLM Training`_, so
      that a learning rate and weight decay tuned for AdamW can be kept;
    - "spectral_unclamped": :math:`\sqrt{A / B}`, as in `Deriving Muon`_.

    Where FSDP, TP and the like leave ranks with pieces, pass a ``distributed_config`` from
    :func:`torch.optim.muon.create_dtensor_config` or :func:`torch.optim.muon.create_auto_config`: each
    matrix is then gathered to one owner rank, orthogonalized there once as a whole, and its update
    sent back to every shard and replica. All ranks that share matrices then construct it at the same
    place of the program: they compare what they mean to do, make process groups where the framework
    has none, and on accelerators connect to their peers by a first tiny exchange.
    """
    + rf"""
    Args:
        {_params_doc}. Every parameter is a matrix; give embeddings, biases, norms and output heads
            to another optimizer such as :class:`AdamW`.
        lr (float, Tensor, optional): learning rate (default: 1e-3).
        weight_decay (float, optional): decoupled weight decay (default: 0.1)
        momentum (float, optional): momentum factor (default: 0.95)
        nesterov (bool, optional): enables Nesterov momentum (default: True)
        ns_coefficients (tuple of three floats, optional): coefficients of the Newton-Schulz
            polynomial, or a sequence of such tuples, one for each step, as
            `The Polar Express`_ gives them (default: ({DEFAULT_A}, {DEFAULT_B}, {DEFAULT_C}))
        eps (float, optional): smallest divisor when the momentum is normalized (default: {EPS})
        ns_steps (int, optional): number of Newton-Schulz iterations, less than 100
            (default: {DEFAULT_NS_STEPS})
        adjust_lr_fn (str, optional): one of "original", "match_rms_adamw" and "spectral_unclamped";
            None means "original" (default: None)
        distributed_config (DistributedConfig or "auto", optional): how the pieces of each matrix meet;
            "auto" means :func:`torch.optim.muon.create_dtensor_config` (default: None)
        foreach (bool, optional): whether to orthogonalize matrices of equal shape with one batched
            product. An update may differ from the for-loop's in rounding, by about 1 % of its
            Frobenius norm in what was measured. None means False, but True for accelerators with a
            ``distributed_config`` (default: None)
        allow_batched_matrices (bool, optional): whether a parameter of three or more dimensions is
            taken as a stack of matrices of its last two, such as the (experts, out, in) of a mixture of
            experts. Each matrix of a stack is orthogonalized by itself, with a learning rate scaled by
            its own shape, and with a ``distributed_config`` each has its own owner. Accelerators
            iterate a stack at once, unless ``foreach`` is False (default: False)
        ns_algorithm (str, optional): "quintic" iterates on the matrix. "gram" iterates on its small
            Gram matrix where one side is at least {_GRAM_RATIO} times the other: four products of the
            long side in five steps instead of ten, and another rounding (default: "quintic")

    Example:
        >>> # xdoctest: +SKIP
        >>> hidden = [p for p in model.layers.parameters() if p.ndim == 2]
        >>> chosen = {{id(p) for p in hidden}}
        >>> others = [p for p in model.parameters() if id(p) not in chosen]
        >>> optimizers = [
        ...     torch.optim.Muon(hidden, lr=0.02),
        ...     torch.optim.AdamW(others, lr=3e-4),
        ... ]
        >>> loss_fn(model(input), target).backward()
        >>> for optimizer in optimizers:
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    .. _Muon\: An optimizer for hidden layers:
        https://kellerjordan.github.io/posts/muon/
    .. _Muon is Scalable for LLM Training:
        https://arxiv.org/abs/2502.16982
    .. _Deriving Muon:
        https://jeremybernste.in/writing/deriving-muon
    .. _The Polar Express:
        https://arxiv.org/abs/2505.16932

    """
)


def _single_tensor_muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: _Triple | Sequence[_Triple],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    ns_algorithm: str = "quintic",
    foreach: bool | None = False,
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
) -> None:
    if has_complex:
        raise ValueError("Complex parameters are not supported")
    formulas = _MuonFormulas(
        _to_scalar(lr),
        weight_decay,
        momentum,
        nesterov,
        ns_coefficients,
        ns_steps,
        eps,
        adjust_lr_fn,
        foreach,
        ns_algorithm,
    )
    if distributed_config is not None:
        if not allow_batched_matrices and any(param.ndim > 2 for param in params):
            raise ValueError("Param gradient must be a 2D matrix")
        _distributed_muon(
            params, grads, muon_momentum_bufs, formulas, distributed_config
        )
        return
    for param, grad, buf in zip(params, grads, muon_momentum_bufs, strict=True):
        _check_is_matrix(grad, allow_batched_matrices)
        formulas.accumulate([buf], [grad])
        update = formulas.orthogonalize(formulas.prepare(buf, grad))
        formulas.apply([param], [update], param.shape[-2:])


def _multi_tensor_muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: _Triple | Sequence[_Triple],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    ns_algorithm: str = "quintic",
    allow_batched_matrices: bool = False,
) -> None:
    """As :func:`_single_tensor_muon`, with one batched Newton-Schulz for matrices of one shape."""
    if has_complex:
        raise ValueError("Complex parameters are not supported")
    formulas = _MuonFormulas(
        _to_scalar(lr),
        weight_decay,
        momentum,
        nesterov,
        ns_coefficients,
        ns_steps,
        eps,
        adjust_lr_fn,
        True,
        ns_algorithm,
    )
    formulas.check()
    for grad, buf in zip(grads, muon_momentum_bufs, strict=True):
        _check_is_matrix(grad, allow_batched_matrices)
        formulas.accumulate([buf], [grad])
    for batch in _batches(grads, muon_momentum_bufs, formulas):
        first = grads[batch[0]]
        if len(batch) == 1:
            prepared = formulas.prepare(muon_momentum_bufs[batch[0]], first)
            updates = [formulas.orthogonalize(prepared)]
        else:
            shape = (len(batch), *first.shape)
            stacked = torch.empty(shape, dtype=_NS_DTYPE, device=first.device)
            for i, out in zip(batch, stacked, strict=True):
                out.copy_(formulas.prepare(muon_momentum_bufs[i], grads[i]))
            updates = list(formulas.orthogonalize(stacked).unbind())
        formulas.apply([params[i] for i in batch], updates, first.shape[-2:])


def _unstacked(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The matrices of stacks as views; a DTensor stays whole, since its views may be copies."""
    found: list[Tensor] = []
    for tensor in tensors:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if tensor.ndim > 2 and is_plain:
            found += _unstacked(tensor.detach().unbind())
        else:
            found.append(tensor)
    return found


def _check_is_matrix(grad: Tensor, allow_batched_matrices: bool) -> None:
    if grad.ndim != 2 and not (allow_batched_matrices and grad.ndim > 2):
        raise ValueError("Param gradient must be a 2D matrix")


def _batches(
    grads: Sequence[Tensor], bufs: Sequence[Tensor], formulas: _MuonFormulas
) -> list[list[int]]:
    """The indices of matrices that are orthogonalized together."""
    alike: dict[tuple, list[list[int]]] = {}
    for i, (grad, buf) in enumerate(zip(grads, bufs, strict=True)):
        room = formulas.batch_size(grad.shape, grad.device)
        key: tuple = (grad.shape, grad.dtype, grad.device)
        # Wrapper types orthogonalize in ways of their own, and stacking would change strides.
        if any(type(t) is not Tensor or not t.is_contiguous() for t in (grad, buf)):
            key = (i,)
        batches = alike.setdefault(key, [[]])
        if len(batches[-1]) == room:
            batches.append([])
        batches[-1].append(i)
    return [batch for batches in alike.values() for batch in batches]


def _distributed_muon(
    params: list[Tensor],
    grads: Sequence[Tensor | None],
    muon_momentum_bufs: list[Tensor],
    formulas: _MuonFormulas,
    config: DistributedConfig,
) -> None:
    """One step of the functional form. Its engine is kept in ``config.state`` for the next call."""
    from torch.optim._muon_engine.engine import Engine
    from torch.optim._muon_engine.runtime import StepParam

    given = zip(params, grads, muon_momentum_bufs, strict=True)
    step_params, states = [], {}
    for param, grad, buf in given:
        step_params.append(StepParam(param, None, grad, formulas))
        states[param] = {"momentum_buffer": buf}
    engine = config.state.get("_muon_engine")
    if engine is None:
        engine = Engine(config, step_params)
    elif not engine.matches(step_params):
        engine = engine.rebuilt(step_params, states)
    config.state["_muon_engine"] = engine
    engine.begin_step()
    engine.step(step_params, states)


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
    ns_coefficients: _Triple | Sequence[_Triple],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    ns_algorithm: str = "quintic",
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
) -> None:
    if foreach is None and allow_batched_matrices and not torch.compiler.is_compiling():
        # Accelerators iterate a stack at once.
        foreach = any(p.ndim > 2 and p.device.type != "cpu" for p in params)
    if allow_batched_matrices and distributed_config is None:
        params, grads, muon_momentum_bufs = map(
            _unstacked, (params, grads, muon_momentum_bufs)
        )
    # A compiler fuses the loop better than it does a batch.
    batched = foreach and distributed_config is None
    if batched and not torch.compiler.is_compiling():
        func = _multi_tensor_muon
    else:
        func = functools.partial(
            _single_tensor_muon, foreach=foreach, distributed_config=distributed_config
        )
    func(
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
        allow_batched_matrices=allow_batched_matrices,
    )


# The shared text for functional forms came with torch.optim.functional, after 2.13.
muon.__doc__ = getattr(
    _optimizer_module,
    "_functional_api_doc",
    "Functional API that performs {optimizer} algorithm computation.\n\n"
    "See :class:`~torch.optim.{optimizer}` for details.",
).format(optimizer="Muon")
