# mypy: allow-untyped-defs
# mypy: disable-error-code=arg-type
r"""Muon: momentum, orthogonalized by a Newton-Schulz iteration.

The pieces of one step exist once: :func:`_update_momentum`, :func:`_blend`, :func:`_newtonschulz`,
:func:`_adjust_lr` and :func:`_apply_update`. The single process strings them together in
:func:`_single_tensor_muon`; with a ``distributed_config`` the engine in ``torch.optim._muon_engine``
strings the same ones together around its exchanges.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple, TYPE_CHECKING

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
    from collections.abc import Callable, MutableMapping, Sequence

    from torch.optim._muon_engine.config import DistributedConfig


__all__ = ["Muon", "muon"]

log = logging.getLogger("torch.optim.muon")

# Keller Jordan's choice of the quintic's coefficients and of the step count, made to maximize the
# slope at zero: https://kellerjordan.github.io/posts/muon/
EPS = 1e-7
DEFAULT_A = 3.4445
DEFAULT_B = -4.7750
DEFAULT_C = 2.0315
DEFAULT_NS_STEPS = 5

# The iteration reads and writes this dtype, and so it is also what travels between ranks: for an
# element that is only moved, rounding before the trip gives the same bits as rounding after it.
_NS_DTYPE = torch.bfloat16

# Unasked, matrices of one shape are orthogonalized together up to this short side (above it a CPU is
# busy with one), with sides of whole tiles (the remainders of batched products may round otherwise).
_BATCH_SHORT_SIDE = 256
_BATCH_TILE = 32
_BATCH_BYTES = 64 * 1024**2

_ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped")


class _Hyper(NamedTuple):
    """The hyperparameters of one parameter group, as one step reads them."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float
    adjust_lr_fn: str | None
    foreach: bool | None = None


class _Work(NamedTuple):
    """One parameter of one step; ``grad`` is None where this rank has none."""

    param: Tensor
    grad: Tensor | None
    momentum_buffer: Tensor | None
    hyper: _Hyper


def _check_ns(
    shape: Sequence[int], ns_coefficients: tuple[float, float, float], ns_steps: int
) -> None:
    if ns_steps >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency"
        )
    if len(shape) != 2:
        raise ValueError("Input tensor gradient must be a 2D matrix")
    if len(ns_coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")


def _newtonschulz(
    x: Tensor,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
) -> Tensor:
    """Orthogonalizes ``x`` without writing to it.

    Two products serve each power: with :math:`G = XX^T` on the short side, a step is
    :math:`aX + (bG + cG^2)X`.

    Args:
        x: one matrix, of shape (rows, columns), or several, of shape (matrices, rows, columns), of
            dtype ``_NS_DTYPE``.
    """
    a, b, c = ns_coefficients
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # Frobenius bounds spectral: the iteration converges only from singular values in [0, 1].
    x = x / _frobenius_norm(x).clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        poly = addmm(gram, gram, gram, beta=b, alpha=c)
        x = addmm(x, poly, x, beta=a)
    return x.mT if tall else x


def _frobenius_norm(x: Tensor) -> Tensor:
    if x.ndim == 2:
        return x.norm()
    # One by one, since a reduction over a batch may add up in another order.
    return torch.stack([matrix.norm() for matrix in x])[:, None, None]


def _zeropower_via_newtonschulz(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    r"""Approximates the orthogonal factor :math:`UV^T` of ``grad`` :math:`= USV^T`.

    The quintic is tuned for speed, not for convergence: after five steps the singular values lie in
    about [0.3, 1.2] rather than at 1, which was found not to hurt training.

    Args:
        grad (Tensor): the matrix, of shape (rows, columns). It is not written to.
        ns_coefficients (tuple of three floats): coefficients of the odd quintic.
        ns_steps (int): number of iterations, less than 100.
        eps (float): smallest divisor of the normalization.

    Returns:
        Tensor of the shape of ``grad``, in bfloat16.
    """
    _check_ns(grad.shape, ns_coefficients, ns_steps)
    return _newtonschulz(grad.to(dtype=_NS_DTYPE), ns_coefficients, ns_steps, eps)


def _batches(
    shapes: Sequence[Sequence[int]], foreach: bool | None, device: torch.device
) -> list[list[int]]:
    """Splits the indices of ``shapes`` into lists that are orthogonalized together.

    Without ``foreach`` being set, matrices share a batch only where that is faster and its bits are
    those of one by one: small ones on one thread of a CPU. (Several threads, or a GPU, cut batched
    products in other places, and so round otherwise.)
    """
    together: dict[tuple[int, ...], list[list[int]]] = {}
    threads = torch.get_num_threads()
    for index, shape in enumerate(shapes):
        pays = device.type == "cpu" and min(shape) <= _BATCH_SHORT_SIDE
        exact = threads == 1 and all(side % _BATCH_TILE == 0 for side in shape)
        room = 1
        if foreach or (foreach is None and pays and exact):
            size = math.prod(shape) * _NS_DTYPE.itemsize
            room = max(1, _BATCH_BYTES // max(1, size))
        batches = together.setdefault(tuple(shape), [[]])
        if len(batches[-1]) == room:
            batches.append([])
        batches[-1].append(index)
    return [batch for batches in together.values() for batch in batches]


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


def _update_momentum(momentum_buffer: Tensor, grad: Tensor, momentum: float) -> None:
    momentum_buffer.lerp_(grad, 1 - momentum)


def _blend(
    momentum_buffer: Tensor, grad: Tensor, hyper: _Hyper, out: Tensor | None = None
) -> Tensor:
    """What is to be orthogonalized: the momentum, looked ahead through ``grad`` if nesterov."""
    if not hyper.nesterov:
        return momentum_buffer
    return torch.lerp(grad, momentum_buffer, hyper.momentum, out=out)


def _apply_update(
    param: Tensor, update: Tensor | None, hyper: _Hyper, shape: Sequence[int]
) -> None:
    """Decays ``param`` and moves it; both may be pieces of a matrix of the global ``shape``."""
    param.mul_(1 - hyper.lr * hyper.weight_decay)
    if update is not None:
        param.add_(update, alpha=-_adjust_lr(hyper.lr, hyper.adjust_lr_fn, shape))


def _storage_is_gone(param: Tensor) -> bool:
    """Whether ``param`` is what ``param.data = dtensor`` leaves behind.

    PyTorch accepts that assignment to a plain Parameter and ends with a tensor of the global shape
    over a null pointer; the next kernel that touches it takes the process down.
    """
    if type(param) not in (Tensor, torch.nn.Parameter) or param.device.type == "meta":
        return False
    if torch._is_functional_tensor(param) or param.layout != torch.strided:
        return False
    return param.numel() > 0 and param.data_ptr() == 0


class Muon(Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        foreach: bool | None = None,
        distributed_config: DistributedConfig | None = None,
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
        if distributed_config is not None and not hasattr(distributed_config, "_claim"):
            raise TypeError(
                "distributed_config has to be a torch.optim.muon.DistributedConfig but is of type "
                f"{type(distributed_config).__name__}"
            )
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
        }
        # While the first groups arrive, a config is only announced: it is bound to all of them.
        self._distributed_config: DistributedConfig | None = None
        self._announced = distributed_config
        self._needs_config = False
        super().__init__(params, defaults)
        self._announced = None
        if distributed_config is not None:
            error = distributed_config._claim(self)
            try:
                self._bind(distributed_config, error)
            except BaseException:
                if error is None:
                    distributed_config._release()
                raise
            self._distributed_config = distributed_config

    def _bind(self, config: DistributedConfig, error: ValueError | None = None) -> None:
        """Makes ``config`` ready for this optimizer's parameters, together with the other ranks."""
        from torch.optim._muon_engine.engine import Engine

        takes_flat = config._takes_flat_params()
        start = 0
        for group in self.param_groups:
            error = error or self._problem_with(group, start, takes_flat)
            start += len(group["params"])
        params, names, hypers = self._engine_arguments()
        first: dict[Tensor, int] = {}
        for index, param in enumerate(params):
            if first.setdefault(param, index) != index:
                error = error or ValueError(
                    f"parameters {first[param]} and {index} are the same tensor; give tied weights to Muon once"
                )
        former = config._engine if self._distributed_config is not None else None
        # The error travels along instead of being raised here: the other ranks are waiting.
        engine = Engine(config, params, names, hypers, error, former)
        if former is not None:
            engine.distrusted = former.check_trust(*self._distributed_work())
        config._engine = engine

    def _engine_arguments(
        self,
    ) -> tuple[list[Tensor], list[str | None], list[_Hyper]]:
        params: list[Tensor] = []
        names: list[str | None] = []
        hypers: list[_Hyper] = []
        for group in self.param_groups:
            params.extend(group["params"])
            names.extend(group.get("param_names", [None] * len(group["params"])))
            hypers.extend([self._hyper(group)] * len(group["params"]))
        return params, names, hypers

    @staticmethod
    def _hyper(group: MutableMapping[str, Any]) -> _Hyper:
        hyper = _Hyper(*(group[field] for field in _Hyper._fields))
        # Checkpoints that went through JSON or YAML bring a list.
        return hyper._replace(ns_coefficients=tuple(hyper.ns_coefficients))

    @property
    def assignments(self) -> dict[int, list[int]]:
        """Global rank -> indices of the parameters it orthogonalizes; {} without a config."""
        if self._distributed_config is None:
            return {}
        return {
            rank: list(owned)
            for rank, owned in self._distributed_config._engine.assignments.items()
        }

    @property
    def current_rank(self) -> int:
        """This process's global rank; 0 where there is no process group."""
        if self._distributed_config is not None:
            return self._distributed_config._engine.rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return 0

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # A process group can be neither copied nor pickled, so the config stays behind. The copy
        # must not go on alone with shards as if they were matrices: it refuses to step.
        state["_needs_config"] = (
            self._needs_config or self._distributed_config is not None
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_distributed_config", None)
        self.__dict__.setdefault("_needs_config", False)
        self.__dict__.setdefault("_announced", None)
        self.defaults.setdefault("foreach", None)
        for group in self.param_groups:
            group.setdefault("foreach", None)

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        r"""Adds a group of matrices.

        With a ``distributed_config`` every rank that holds a piece of them has to make this call, and
        with process groups every rank of the groups: owners are assigned anew.

        Args:
            param_group (dict): the parameters and the options that are special to them.

        Raises:
            ValueError: a parameter is not a matrix, or its storage was destroyed.
        """
        super().add_param_group(param_group)
        if self._announced is not None:
            return
        try:
            if self._distributed_config is not None:
                self._bind(self._distributed_config)
            else:
                start = sum(len(group["params"]) for group in self.param_groups[:-1])
                error = self._problem_with(param_group, start)
                if error is not None:
                    raise error
        except BaseException:
            self.param_groups.pop()
            raise

    @staticmethod
    def _problem_with(
        group: MutableMapping[str, Any], start: int, takes_flat: bool = False
    ) -> ValueError | None:
        names = group.get("param_names", [None] * len(group["params"]))
        for index, (param, name) in enumerate(
            zip(group["params"], names, strict=True), start
        ):
            which = f"parameter {index}" + (f" {name!r}" if name is not None else "")
            if _storage_is_gone(param):
                return ValueError(
                    f"{which}, of size {tuple(param.shape)}, has no storage. This is what "
                    "`param.data = dtensor` leaves of a plain Parameter. Write "
                    "`module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, placements))` instead, or "
                    "use distribute_module, parallelize_module or fully_shard"
                )
            # FSDP1 flattens parameters; only its reader knows the matrices inside.
            if param.ndim != 2 and not (takes_flat and param.ndim == 1):
                hint = ""
                if getattr(param, "_fsdp_flattened", False):
                    hint = (
                        ". FSDP1 flattened it: use distributed_config=create_auto_config(fsdp_process_group="
                        "model.process_group, module=model)"
                    )
                return ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
                    f"({which}){hint}"
                )
        return None

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
            _check_grad(p, p.grad)
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
            RuntimeError: an earlier step failed, or is only now found to have had a gradient on some
                holders of a parameter only, so that the ranks' states do not belong together.
        """
        if self._distributed_config is not None:
            self._distributed_config._engine.raise_if_distrusted(
                *self._distributed_work()
            )
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs a single optimization step.

        With a ``distributed_config``, every rank that holds a piece of a parameter has to make this
        call, whether or not it has a gradient for it.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.

        Raises:
            RuntimeError: the optimizer is a copy that lost its ``distributed_config``, or a parameter
                has a gradient on some of its holders only.
        """
        if self._distributed_config is not None:
            self._distributed_config._engine.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._needs_config and self._distributed_config is None:
            raise RuntimeError(
                "This Muon is a copy of one with a distributed_config, which cannot be copied or pickled. "
                "Build a new Muon with distributed_config=... and give it this one's state_dict()"
            )
        if self._distributed_config is not None:
            self._follow_changed_params()
            self._distributed_config._engine.step(*self._distributed_work())
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
                has_complex=has_complex,
                **self._hyper(group)._asdict(),
            )
        return loss

    def _follow_changed_params(self) -> None:
        """Builds the engine anew where the parameters are not those that it was built for.

        Frameworks replace ``param_group["params"]`` or what stands behind a parameter after the
        optimizer was built. Momentum is kept where the parameter still has its shape.
        """
        former = self._distributed_config._engine
        params, _, _ = self._engine_arguments()
        if former.matches(params):
            return
        former.meet_to_rebuild(params)
        present = set(map(id, params))
        at_same_place = dict(zip(map(id, params), former.params, strict=False))
        for param in params:
            old = at_same_place.get(id(param), param)
            if param not in self.state and id(old) not in present and old in self.state:
                self.state[param] = self.state.pop(old)
            buffer = self.state.get(param, {}).get("momentum_buffer")
            if buffer is None:
                continue
            if buffer.shape != param.shape:
                del self.state[param]["momentum_buffer"]
            elif buffer.dtype != param.dtype or buffer.device != param.device:
                self.state[param]["momentum_buffer"] = buffer.to(
                    device=param.device, dtype=param.dtype
                )
        for old in former.params:
            if id(old) not in present:
                self.state.pop(old, None)
        self._bind(self._distributed_config)
        log.info(
            "parameters of this Muon were changed after it was built; their owners are assigned anew"
        )

    def _distributed_work(self) -> tuple[list[_Work], Callable[[int, Tensor], None]]:
        """Every parameter with its gradient, if any, and where a new momentum buffer is kept."""
        params: list[Tensor] = []
        work: list[_Work] = []
        for group in self.param_groups:
            hyper = self._hyper(group)
            hyper = hyper._replace(lr=_to_scalar(hyper.lr))
            for p in group["params"]:
                state = self.state.get(p, {})
                params.append(p)
                work.append(_Work(p, p.grad, state.get("momentum_buffer"), hyper))

        def keep(index: int, momentum_buffer: Tensor) -> None:
            self.state[params[index]]["momentum_buffer"] = momentum_buffer

        return work, keep


def _check_grad(param: Tensor, grad: Tensor) -> None:
    if torch.is_complex(param):
        raise RuntimeError("Muon does not support complex parameters")
    if grad.is_sparse:
        raise RuntimeError("Muon does not support sparse gradients")


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
    sent back to every shard and replica.
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
            polynomial (default: ({DEFAULT_A}, {DEFAULT_B}, {DEFAULT_C}))
        eps (float, optional): smallest divisor when the momentum is normalized (default: {EPS})
        ns_steps (int, optional): number of Newton-Schulz iterations, less than 100
            (default: {DEFAULT_NS_STEPS})
        adjust_lr_fn (str, optional): one of "original", "match_rms_adamw" and "spectral_unclamped";
            None means "original" (default: None)
        foreach (bool, optional): orthogonalizes matrices of one shape together, which small matrices
            gain from. None does so where it is faster and gives the same bits, False never, True
            always: an update may then differ by what batched products round otherwise, about 1 % of
            its Frobenius norm at most in what was measured (default: None)
        distributed_config (DistributedConfig, optional): how the pieces of each matrix meet. One
            config serves one optimizer. (default: None)

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
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    distributed_config: DistributedConfig | None = None,
) -> None:
    _multi_tensor_muon(
        params,
        grads,
        muon_momentum_bufs,
        foreach=False,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        eps=eps,
        adjust_lr_fn=adjust_lr_fn,
        has_complex=has_complex,
        distributed_config=distributed_config,
    )


def _multi_tensor_muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    foreach: bool | None,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    distributed_config: DistributedConfig | None = None,
) -> None:
    if has_complex:
        raise ValueError("Complex parameters are not supported")
    hyper = _Hyper(
        _to_scalar(lr),
        weight_decay,
        momentum,
        nesterov,
        tuple(ns_coefficients),
        ns_steps,
        eps,
        adjust_lr_fn,
        foreach,
    )
    if distributed_config is not None:
        _distributed_muon(params, grads, muon_momentum_bufs, hyper, distributed_config)
        return
    for grad, buf in zip(grads, muon_momentum_bufs, strict=True):
        if grad.ndim != 2:
            raise ValueError("Param gradient must be a 2D matrix")
        _update_momentum(buf, grad, momentum)
    for batch in _batches_of(grads, muon_momentum_bufs, foreach):
        blends = [_blend(muon_momentum_bufs[i], grads[i], hyper) for i in batch]
        stacked = (
            blends[0][None]
            if len(batch) == 1
            else torch.stack([blend.to(dtype=_NS_DTYPE) for blend in blends])
        )
        for i, update in zip(batch, _orthogonalize(stacked, hyper), strict=True):
            _apply_update(params[i], update, hyper, params[i].shape)


def _batches_of(
    grads: Sequence[Tensor], bufs: Sequence[Tensor], foreach: bool | None
) -> list[list[int]]:
    # Wrapper types orthogonalize in ways of their own, a compiler fuses better than a batch does, and
    # stacking would change the strides, and so the products, of what is not contiguous.
    if foreach is False or torch.compiler.is_compiling():
        return [[i] for i in range(len(grads))]
    plain = all(
        type(t) in (Tensor, torch.nn.Parameter) and t.is_contiguous()
        for t in (*grads, *bufs)
    )
    if not plain or len({grad.device for grad in grads}) != 1:
        return [[i] for i in range(len(grads))]
    return _batches([grad.shape for grad in grads], foreach, grads[0].device)


def _orthogonalize(matrices: Tensor, hyper: _Hyper) -> Sequence[Tensor]:
    """The updates of ``matrices``, of shape (matrices, rows, columns)."""
    if len(matrices) == 1:
        return [
            _zeropower_via_newtonschulz(
                matrices[0], hyper.ns_coefficients, hyper.ns_steps, hyper.eps
            )
        ]
    _check_ns(matrices.shape[1:], hyper.ns_coefficients, hyper.ns_steps)
    return _newtonschulz(
        matrices, hyper.ns_coefficients, hyper.ns_steps, hyper.eps
    ).unbind()


def _distributed_muon(
    params: list[Tensor],
    grads: list[Tensor | None],
    muon_momentum_bufs: list[Tensor],
    hyper: _Hyper,
    config: DistributedConfig,
) -> None:
    from torch.optim._muon_engine.engine import Engine

    hypers = [hyper] * len(params)
    former = config._engine
    if former is None or not former.matches(params):
        if config._serves_an_optimizer():
            raise ValueError(
                "this distributed_config serves a live Muon, with other parameters than these; make one for each"
            )
        if former is not None:
            former.meet_to_rebuild(params)
        config._engine = Engine(config, params, [None] * len(params), hypers)
    config._engine.begin_step()
    # A caller of the functional form brings its own buffers, so none is ever made here.
    config._engine.step(
        [
            _Work(*one)
            for one in zip(params, grads, muon_momentum_bufs, hypers, strict=True)
        ],
        lambda index, momentum_buffer: None,
    )


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
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
    distributed_config: DistributedConfig | None = None,
) -> None:
    _multi_tensor_muon(
        params,
        grads,
        muon_momentum_bufs,
        foreach=foreach,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        eps=eps,
        adjust_lr_fn=adjust_lr_fn,
        has_complex=has_complex,
        distributed_config=distributed_config,
    )


# The shared text for functional forms came with torch.optim.functional, after 2.13.
muon.__doc__ = getattr(
    _optimizer_module,
    "_functional_api_doc",
    "Functional API that performs {optimizer} algorithm computation.\n\n"
    "See :class:`~torch.optim.{optimizer}` for details.",
).format(optimizer="Muon")
