# mypy: allow-untyped-defs
# mypy: disable-error-code=arg-type
r"""Implementation of the Muon optimizer: hyperparameters, state, step and checkpoints."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal, TYPE_CHECKING

import torch
from torch import Tensor

from . import _muon_checks as checks
from ._muon_formulas import _adjust_lr, MuonFormulas  # noqa: F401
from ._newton_schulz import (
    _zeropower_via_newtonschulz,  # noqa: F401
    check_newton_schulz,
    Coefficients,
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    NS_DTYPE,
)
from .optimizer import _disable_dynamo_if_unsupported, Optimizer, ParamsT


if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.engine import Engine
    from torch.optim._muon_engine.params import Param


__all__ = ["Muon", "muon"]

log = logging.getLogger("torch.optim.muon")

# Keller Jordan's Muon: https://kellerjordan.github.io/posts/muon/,
# https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16
_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)

_NOT_2D = "Param gradient must be a 2D matrix"


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

    - "original": :math:`\sqrt{\max(1, A / B)}`, as in `Muon: An optimizer for hidden layers
      <https://kellerjordan.github.io/posts/muon/>`_;
    - "match_rms_adamw": :math:`0.2 \sqrt{\max(A, B)}`, as in `Muon is Scalable for LLM Training
      <https://arxiv.org/abs/2502.16982>`_, to keep a learning rate and weight decay tuned for AdamW;
    - "spectral_unclamped": :math:`\sqrt{A / B}`, as in `Deriving Muon
      <https://jeremybernste.in/writing/deriving-muon>`_.

    If FSDP, TP and others leave each rank with only a piece of a matrix, pass a ``distributed_config``
    from :mod:`torch.optim.muon`: each matrix is gathered to one owner rank, which orthogonalizes it once
    and sends the update back to every shard and replica. All ranks that share matrices must construct the
    optimizer at the same place of the program, because they compare their parameters.

    Args:
        params (iterable): matrices, as parameters, as ``named_parameters()`` or as dicts that define
            parameter groups. With names, ranks that list their parameters in different orders get an
            error. Embeddings, biases, norms and output heads belong to another optimizer such as
            :class:`AdamW`; :func:`torch.optim.muon.partition_named_parameters` tells them apart.
        lr (float, Tensor, optional): learning rate (default: 1e-3).
        weight_decay (float, optional): decoupled weight decay (default: 0.1)
        momentum (float, optional): momentum factor (default: 0.95)
        nesterov (bool, optional): enables Nesterov momentum (default: True)
        ns_coefficients (tuple of three floats, optional): coefficients of the polynomial, or one such
            tuple per step, as in `The Polar Express <https://arxiv.org/abs/2505.16932>`_
            (default: (3.4445, -4.775, 2.0315))
        eps (float, optional): lower bound of the norm that divides the momentum (default: 1e-07)
        ns_steps (int, optional): number of Newton-Schulz steps, less than 100 (default: 5)
        adjust_lr_fn (str, optional): one of "original", "match_rms_adamw" and "spectral_unclamped";
            None means "original" (default: None)
        distributed_config (DistributedConfig or "auto", optional): how each matrix gets to its owner
            rank; "auto" means :func:`torch.optim.muon.create_dtensor_config` (default: None)
        foreach (bool, optional): whether to orthogonalize matrices of equal shape in one batch. The
            rounding of an update may differ from the for-loop's, by about 1 % of its Frobenius norm.
            None means True on accelerators with a ``distributed_config``, with ``fused``, and for groups
            with stacks, and otherwise False (default: None)
        allow_batched_matrices (bool, optional): whether a parameter of three or more dimensions is a
            stack of matrices of its last two, such as the (experts, out, in) of a mixture of experts.
            Each matrix of a stack has its own Newton-Schulz, learning rate and owner (default: False)
        ns_algorithm (str, optional): "quintic" iterates on the matrix. "gram" iterates on its small
            Gram matrix if one side is at least 1.5 times the other, and rounds differently. "symmetric"
            computes only the upper blocks of the symmetric products. On CUDA, the products of both are
            kernels in Triton, in float16. "standard" is another name of "quintic" (default: "quintic")
        fused (bool, optional): whether kernels in Triton make one pass before the orthogonalization, and
            one after. Not with ``foreach=True``. Without CUDA or Triton, and for parameters in float64 or
            on a CPU, torch's operations do the same. Parameters in bfloat16 are rounded once, not twice.
            None means False (default: None)

    A parameter group may also have ``split`` and ``flatten``:

    - ``split`` (sequence of int, or dict): the rows of each part of a fused weight, such as ``(q, k, v)``.
      Each part is a matrix with its own Newton-Schulz and learning rate. A dict is for rows that
      alternate, ``{"sizes": (q, k, v), "repeats": groups}``, and for columns,
      ``{"sizes": (n, n, n), "dim": 1}``. A part is all of its lines, joined in order. (default: None)
    - ``flatten`` (bool): whether a parameter of three or more dimensions, such as a convolution, is one
      matrix, dimension 0 by all others. Without a ``distributed_config``, it may be in channels_last.
      (default: False)

    Example:
        >>> # xdoctest: +SKIP
        >>> hidden = [p for p in model.layers.parameters() if p.ndim == 2]
        >>> muon = torch.optim.Muon(hidden, lr=0.02)
        >>> loss_fn(model(input), target).backward()
        >>> muon.step()
    """

    # Attributes of a copy or an old pickle.
    _distributed_config: Any = None
    _engine: Engine | None = None
    _hints: Any = None
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
        fused: bool | None = None,
    ) -> None:
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
            "fused": fused,
        }
        MuonFormulas.normalize(defaults)
        self._allow_batched_matrices = allow_batched_matrices
        self._distributed_config = checks.checked_config(distributed_config)
        if self._distributed_config is None:
            # Before the parameters, as upstream does.
            MuonFormulas.of_group(defaults).check()
        super().__init__(params, defaults)
        if self._distributed_config is not None:
            self._engine = self._new_engine()

    @property
    def assignments(self) -> dict[int, list[int]]:
        """Global rank -> indices of the parameters whose first matrix it orthogonalizes; {} without a ``distributed_config``."""
        assignments = {} if self._engine is None else self._engine.assignments
        return {rank: list(owned) for rank, owned in assignments.items()}

    @property
    def matrix_owners(self) -> dict[tuple[int, int], int]:
        """(Parameter index, matrix in it) -> the global rank that orthogonalizes it."""
        return {} if self._engine is None else self._engine.matrix_owners

    @property
    def current_rank(self) -> int:
        """This process's global rank; 0 without process groups."""
        if self._engine is not None:
            return self._engine.rank
        dist = torch.distributed
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @torch._disable_dynamo
    def describe(self, model: Any = None, *others: Optimizer) -> str:
        """Returns a text that says what this rank owns, who is the busiest owner, and the memory of a step.

        It asks no other rank.

        Args:
            model (nn.Module, optional): of which the text names the matrices that neither Muon nor
                ``others`` have (default: None)
            others (Optimizer): the model's other optimizers.
        """
        page = f"It {'lost its' if self._needs_config else 'has no'} distributed_config"
        if not torch.distributed.is_available():
            return page
        from torch.optim._muon_reports import coverage, in_full

        if self._engine is not None:
            page = in_full(self._engine)
            if not self._engine.matches(self.param_groups):
                page += "\nParameters have changed since; the next step() rebuilds this"
        return f"{coverage(self, model, others)}\n{page}"

    @torch._disable_dynamo
    def synchronize(self) -> None:
        """Waits until all ranks have told each other about the last :meth:`step`.

        On accelerators, only the first steps wait for the device. A later one cannot know whether the
        ranks differ in their gradients or options, so the next :meth:`step`, :meth:`state_dict` or
        :meth:`add_param_group`, or this method, raises the error. Call this method after the last step.
        Without a ``distributed_config`` and on CPUs, it has nothing to do.

        Raises:
            RuntimeError: ranks differed in the last step. Their parameters may have diverged.
        """
        if self._engine is not None:
            self._engine.synchronize()

    def _tensors(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _live_params(self) -> list[Param]:
        """The parameters of all groups, as an engine takes them."""
        from ._muon_engine.params import Param

        formulas = [MuonFormulas.of_group(group) for group in self.param_groups]
        params: list[Param] = []
        for at, name, tensor in checks.named_params(self.param_groups):
            params.append(Param(len(params), tensor, name, at, formulas[at]))
        return params

    def _new_engine(self) -> Engine:
        """Builds an engine together with the other ranks, for parameters that may have changed since the last time."""
        from ._muon_engine.engine import Engine

        # They are about the parameters of the former engine.
        self._hints = None
        return Engine(
            self._distributed_config,
            self._live_params(),
            self.state,
            self._allow_batched_matrices,
            # The other ranks wait for this one, so they learn of an error before it is raised.
            partial(checks.check_muon, self),
            self._engine,
        )

    def _hand_over(self, engine: Engine) -> None:
        """Gives replaced parameters their momentum before the next step does, for a checkpoint."""
        if not engine.matches(self.param_groups):
            engine.hand_over(self._live_params(), self.state)

    def __getstate__(self) -> dict[str, Any]:
        # A process group can be neither copied nor pickled, so the copy has no config. It must not go on
        # alone and take shards for matrices, so it refuses to step.
        return super().__getstate__() | {
            "_needs_config": self._needs_config or self._distributed_config is not None,
            "_allow_batched_matrices": self._allow_batched_matrices,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has defaults, load_state_dict() does not.
        if "defaults" not in state:
            checks.check_loaded(self.param_groups, state)
        super().__setstate__(state)
        for group in (self.defaults, *self.param_groups):
            for name, value in MuonFormulas._field_defaults.items():
                group.setdefault(name, value)
            MuonFormulas.normalize(group)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state as :meth:`Optimizer.load_state_dict` does, but momentum keeps the dtype of gradients."""
        if self._engine is not None:
            self._hand_over(self._engine)
        loaded: list[dict[str, Any]] = []

        def restore(_: Optimizer) -> None:
            (saved,) = loaded
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            for key, param in zip(keys, self._tensors(), strict=True):
                buffer = saved["state"].get(key, {}).get("momentum_buffer")
                if not isinstance(buffer, Tensor):
                    continue
                # Optimizer casts it to the parameter's dtype. Gradients of any dtype may have given it the one that was saved.
                dtype = param.grad_dtype or buffer.dtype
                if dtype != param.dtype:
                    buffer = buffer.to(param.device, dtype)
                    self.state[param]["momentum_buffer"] = buffer

        # The last hook before gets what the others return, and those after have the last word.
        before = self.register_load_state_dict_pre_hook(
            lambda _, state_dict: loaded.append(state_dict)
        )
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        r"""Adds a group of matrices.

        With a ``distributed_config``, every rank that shares a matrix of this optimizer must make this
        call, because the ranks assign owners again. It raises the errors of the constructor.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        MuonFormulas.normalize(group)
        try:
            if self._distributed_config is None:
                checks.check_muon(self, len(self.param_groups) - 1)
            elif self._engine is not None:
                self._engine = self._new_engine()
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
        """Lists the parameters that have gradients, with these and their momentum. Makes missing buffers."""
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
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffer = state["momentum_buffer"]
            if buffer.dtype != p.grad.dtype:
                # load_state_dict() has cast it to the parameter's dtype, or the model was cast in training.
                buffer = state["momentum_buffer"] = buffer.to(p.grad.dtype)
            muon_momentum_bufs.append(buffer)
        return False  # has_complex

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as :meth:`Optimizer.state_dict` does. It lacks the ``distributed_config``.

        On accelerators, it raises RuntimeError if the last step failed. It only logs an earlier failure.
        """
        if self._engine is None:
            return super().state_dict()
        if self._engine.failure:
            log.warning("%s", self._engine.failure)
        self._engine.synchronize()
        self._hand_over(self._engine)
        # Optimizer.state_dict knows no index for a parameter that left the groups.
        state, present = self.state, set(self._tensors())
        kept = {p: s for p, s in state.items() if p in present}
        self.state = type(state)(state.default_factory, kept)
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
            TypeError: with a ``distributed_config``, an option of a parameter group has a wrong type.
            ValueError: with a ``distributed_config``, such an option is out of range, or a flag has changed.
            RuntimeError: a gradient cannot be used; with a ``distributed_config``, ranks differ in gradients,
                hyperparameters, parameters or their number of steps; this is a copy without its
                ``distributed_config``; or an earlier step with a ``distributed_config`` failed.
        """
        if self._needs_config:
            raise RuntimeError(
                "This Muon is a copy of one with a distributed_config, which cannot be copied or pickled. "
                "Build a new Muon with distributed_config=... and load this one's state_dict() into it"
            )
        if self._engine is not None:
            self._engine.count_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._engine is not None:
            self._step_engine(self._engine)
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
    def _step_engine(self, engine: Engine) -> None:
        """Lets the engine make the step, between its collectives, by the formulas of each group."""
        if not engine.matches(self.param_groups):
            # Frameworks replace parameters, or the tensors behind them, after construction.
            engine.announce_change()
            engine = self._engine = self._new_engine()
        formulas = [MuonFormulas.of_group(group) for group in self.param_groups]
        without_gradient = engine.step(formulas, self.state)
        if without_gradient:
            from torch.optim._muon_reports import Hints

            if self._hints is None:
                self._hints = Hints(engine)
            self._hints.look(engine.steps, without_gradient)


def _single_tensor_muon(
    params: list[Tensor],
    grads: list[Tensor],
    muon_momentum_bufs: list[Tensor],
    *,
    has_complex: bool,
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
    **options: Any,
) -> None:
    """Steps the parameters of one group: a matrix at a time; with ``foreach``, in batches; with a
    ``distributed_config``, by an engine for this call. The ``options`` are the fields of MuonFormulas.
    """
    if has_complex:
        raise ValueError("Complex parameters are not supported")
    formulas = MuonFormulas.of_group(MuonFormulas(**options)._asdict())
    takes_more = allow_batched_matrices or formulas.flatten
    if distributed_config is not None:
        from torch.optim._muon_engine.engine import step_once

        # FSDP1 flattens parameters, and the engine knows the matrices inside.
        if any(p.ndim > 2 and not takes_more for p in params):
            raise ValueError(_NOT_2D)
        return step_once(
            distributed_config, formulas, params, grads, muon_momentum_bufs
        )
    if any(g.ndim != 2 and not (takes_more and g.ndim > 2) for g in grads):
        raise ValueError(_NOT_2D)
    check_newton_schulz(
        formulas.ns_coefficients, formulas.ns_steps, formulas.ns_algorithm
    )
    if torch.compiler.is_compiling():
        # A compiler fuses the loop better than a batch.
        formulas = formulas._replace(foreach=False)
    elif formulas.foreach is None and len(grads) > 0:
        # A batch may round differently from stock Muon, which has neither stacks nor kernels.
        has_stacks = allow_batched_matrices and any(g.ndim > 2 for g in grads)
        is_ours = has_stacks or formulas.fused
        formulas = formulas._replace(foreach=is_ours and not grads[0].is_cpu)
    matrices: list[list[Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for tensors in (params, grads, muon_momentum_bufs):
        of_tensors: list[Tensor] = []
        for tensor in tensors:
            contiguous = tensor
            if formulas.flatten and not tensor.is_contiguous():
                # A matrix is a view. Kernels in channels_last are copied, and copied back.
                contiguous = tensor.detach().contiguous()
                if tensors is not grads:
                    copies.append((tensor, contiguous))
            of_tensors += formulas.matrices_in(contiguous)
        matrices.append(of_tensors)
    params_of, grads_of, bufs_of = matrices
    for batch in _batches(grads_of, bufs_of, formulas):
        _step_batch(
            [params_of[i] for i in batch],
            [grads_of[i] for i in batch],
            [bufs_of[i] for i in batch],
            formulas,
        )
    for tensor, contiguous in copies:
        tensor.copy_(contiguous)


def _step_batch(
    params: list[Tensor],
    grads: list[Tensor],
    bufs: list[Tensor],
    formulas: MuonFormulas,
) -> None:
    """Steps one matrix, or matrices of equal shape."""
    shape = grads[0].shape
    takes_kernels = len(shape) == 2 and formulas.takes_kernels(bufs, grads)
    if len(grads) > 1 or takes_kernels:
        stacked = torch.empty(
            (len(grads), *shape), dtype=NS_DTYPE, device=grads[0].device
        )
        # prepare
        formulas.accumulate_and_blend(bufs, grads, list(stacked))
        # compute
        formulas.orthogonalize(stacked, out=stacked)
        updates = list(stacked.unbind())
    else:
        # prepare
        formulas.accumulate(bufs, grads)
        (blended,) = formulas.blend(bufs, grads)
        # compute
        updates = [formulas.update_of(blended)]
        shape = formulas.split.joined(blended).shape
    # apply_updates
    formulas.apply(params, updates, formulas.step_size(shape, grads[0].device))


def _batches(
    grads: Sequence[Tensor], bufs: Sequence[Tensor], formulas: MuonFormulas
) -> list[list[int]]:
    """The indices of the matrices in each batch."""
    if not formulas.foreach:
        return [[i] for i in range(len(grads))]
    alike: dict[Any, list[int]] = {}
    for i, (grad, buf) in enumerate(zip(grads, bufs, strict=True)):
        key: Any = grad.shape, grad.dtype, grad.device
        # Wrapper types have their own kernels, and stacking would change strides.
        is_plain = type(grad) is type(buf) is Tensor
        if grad.ndim > 2 or not (
            is_plain and grad.is_contiguous() and buf.is_contiguous()
        ):
            key = i
        alike.setdefault(key, []).append(i)
    batches: list[list[int]] = []
    for indices in alike.values():
        first = grads[indices[0]]
        size = formulas.batch_size(first.shape, first.device)
        for start in range(0, len(indices), size):
            batches.append(indices[start : start + size])
    return batches


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
    allow_batched_matrices: bool = False,
    distributed_config: DistributedConfig | None = None,
    **more_options: Any,
) -> None:
    r"""Functional API that performs Muon algorithm computation.

    See :class:`~torch.optim.Muon` for details. ``more_options`` are ``ns_algorithm``, ``fused``, ``split`` and
    ``flatten``.
    """
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
        foreach=foreach,
        allow_batched_matrices=allow_batched_matrices,
        distributed_config=distributed_config,
        **more_options,
    )
