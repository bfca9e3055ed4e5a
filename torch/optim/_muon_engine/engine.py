"""The engine of one optimizer: the ranks build it together, and run it at every step."""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import factory, process_groups
from .agreement import Agreement
from .building import build, Plan, Setting
from .config import DistributedConfig
from .layouts.local import traits_of
from .process_groups import listed, Ranks
from .runtime.matrices import matrices_of
from .runtime.packed import PackedStep
from .runtime.params import Lineage, Param, States, StepInputs
from .runtime.statuses import side_channel
from .runtime.transport import CollectiveError
from .schedule.schedule import Schedule


log = logging.getLogger("torch.optim.muon")


class StepRunner(Protocol):
    """The steps of an engine: a PackedStep, or a FunctionStep through the user's functions."""

    # Whether nobody has asked how ranks differed in the last step.
    is_unread: bool

    @property
    def awaits_statuses(self) -> bool:
        """Whether ranks know how they differ before anything moves."""

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""

    def share_statuses(self, step: int, inputs: StepInputs | None) -> str:
        """Begins a step. Returns how ranks differ, if it waits for that. Without ``inputs``, this rank raises an error."""

    def bind(self, formulas: Mapping[int, Any]) -> None:
        """Prepares what stays the same between steps, for these options of each parameter group."""

    def run(self, inputs: StepInputs) -> None:
        """Makes the rest of the step."""

    def drain(self) -> None:
        """After an error, waits for everything in flight."""

    def mismatch(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""


class Engine:
    """The layouts, owners, schedule and memory for one list of parameters. It takes a copy of ``config``, whose
    functions and flags may not change. ``former`` is the optimizer's engine before its parameters changed. If ``check``
    raises an error, or the last step of ``former`` has an unread one, all ranks that share matrices raise it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Param],
        states: States,
        takes_stacks: bool = False,
        check: Callable[[], None] = lambda: None,
        former: "Engine | None" = None,
        is_lasting: bool = True,
    ) -> None:
        # Users may change theirs, which a step refuses.
        self.config = copy.copy(config)
        self._config_of_user = config
        self.params = params
        self.steps = 0
        # Why a step failed half way. After that, the ranks' parameters may not belong together.
        self.failure = ""
        self.agreement = Agreement()
        self.plan = Plan()
        # None until a step, or the constructor, needs its memory.
        self._runner: StepRunner | None = None
        # The options of each parameter group that the last step was bound to; None before the first step.
        self._bound_options: list[tuple] | None = None
        replaced = []
        if former is None:
            self.reader = factory.reader_of(config, takes_stacks)
            self._lineage = Lineage(params, {})
        else:
            replaced = self._continue(former)
        for param in params:
            index = param.config_index if former is None else -1
            indices = self._lineage.config_indices
            param.config_index = indices.setdefault(param.tensor, index)
        before = {param.tensor for param in (former or self).params}
        # Ranks exchange objects on the current device, which DDP does not ask its users to set.
        device_index = _device_index(params)

        def check_all() -> None:
            if former is not None:
                former.synchronize()
            check()

        # The assignment computes with tensors, which must be real in a dry run, too.
        with unset_fake_temporarily(), torch.accelerator.device_index(device_index):
            self.plan = build(
                self._setting, before, check_all, is_lasting, self.agreement
            )
        self.ordered = self._in_common_order()
        if former is not None:
            # A device may not have room for the memory of both.
            former._runner = None
            self._inherit(replaced, states)
        # Parameters on meta will be materialized, which builds another engine.
        is_meta = any(param.tensor.is_meta for param in params)
        if self.is_packed and self.device.type != "cpu" and not is_meta:
            from .runtime.connecting import take_memory_and_connect

            take_memory_and_connect(self._make_runner, self.agreement, device_index)

    def _continue(self, former: "Engine") -> list[Any]:
        """Takes what ``former`` knew. Returns the parameters that took the places of others."""
        from .changes import take_places

        self.reader = copy.copy(former.reader)
        self.steps = former.steps
        self.failure = former.failure
        seen, indices = former._lineage.seen, former._lineage.config_indices
        self._lineage = Lineage(seen, dict(indices))
        return take_places(self._lineage, self.params)

    def _inherit(self, replaced: Sequence[Any], states: States) -> None:
        """Gives the momentum of ``replaced`` parameters to those that took their places."""
        from .changes import fit_momentum, inherit_momentum

        restarted = inherit_momentum(replaced, states)
        restarted += fit_momentum(self.params, states)
        self._warn_about_restarted(restarted)

    def _in_common_order(self) -> list[Param]:
        """The parameters in the order of all ranks: experts last, by their ids."""
        experts = {} if self.reader is None else self.reader.experts
        if not experts:
            return list(self.params)
        by_expert = [(experts.get(p.config_index, -1), p) for p in self.params]
        return [param for _, param in sorted(by_expert, key=lambda pair: pair[0])]

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def assignments(self) -> Mapping[int, Sequence[int]]:
        return self.plan.assignments

    @property
    def matrix_owners(self) -> dict[tuple[int, int], int]:
        """(Parameter index, matrix in it) -> the global rank that owns it, or its first block."""
        owners: dict[tuple[int, int], int] = {}
        for layout, owner in zip(self.schedule.layouts, self.schedule.owners):
            key = layout.key
            owners.setdefault((key.index, key.sub), owner)
        return owners

    @property
    def groups(self) -> Mapping[Ranks, dist.ProcessGroup | None]:
        """The process group of each set of ranks that this rank exchanges with; None for this rank alone."""
        return self.agreement.groups

    @property
    def rank(self) -> int:
        """This process's global rank, unless the config's state replaces it."""
        return self.config.state.get("rank", process_groups.process_rank())

    @property
    def world_size(self) -> int:
        """The number of all ranks, unless the config's state replaces it."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return self.config.state.get("world_size", world_size)

    @property
    def _setting(self) -> Setting:
        return Setting(
            self.config, self.params, self.reader, self.rank, self.world_size
        )

    @property
    def device(self) -> torch.device:
        """The device of the communication buffers."""
        return self._setting.device

    @property
    def is_packed(self) -> bool:
        """Whether both functions that move data are the factory's."""
        return self._setting.is_packed

    @property
    def speaks(self) -> bool:
        """Whether this rank logs and warns for those that share matrices with it."""
        layouts = self.schedule.layouts
        return self.rank == min((l.holders[0] for l in layouts), default=0)

    def _make_runner(self) -> Any:
        """The step of this engine. The first call makes it, and takes its memory."""
        if self._runner is None and self.is_packed:
            self._runner = PackedStep(
                self.schedule,
                self.params,
                self.agreement,
                rank=self.rank,
                device=self.device,
                prefetch_count=self.config.prefetch_count,
            )
        elif self._runner is None:
            from .functions import FunctionStep

            self._runner = FunctionStep(self)
        return self._runner

    def matches(self, param_groups: Sequence[MutableMapping[str, Any]]) -> bool:
        """Whether this engine was built for the parameters of these groups, and they are unchanged."""
        at = 0
        for param_group, options in enumerate(param_groups):
            for tensor in options["params"]:
                if at == len(self.params):
                    return False
                param = self.params[at]
                if param.tensor is not tensor or param.param_group != param_group:
                    return False
                if param.traits != traits_of(tensor):
                    return False
                at += 1
        return at == len(self.params)

    def announce_change(self) -> None:
        """Tells the ranks that share matrices in ``step()`` that parameters have changed since this engine was built. Raises
        RuntimeError unless they have changed on all of these ranks.
        """
        if not self.is_packed:
            return
        self.synchronize()
        if isinstance(self._runner, PackedStep):
            channel = self._runner.side_channel
        else:
            matrices = matrices_of(self.schedule, self.params, self.rank)
            channel = side_channel([*matrices.values()], self.agreement, self.device)
        difference = channel.share(self.steps, None, has_changed=True)
        if difference:
            raise RuntimeError(difference)

    def hand_over(self, params: Sequence[Param], states: States) -> None:
        """Gives momentum to ``params`` that replaced others, for a checkpoint before the next step."""
        from .changes import inherit_momentum, take_places

        replaced = take_places(self._lineage, params)
        self._warn_about_restarted(inherit_momentum(replaced, states))

    def _warn_about_restarted(self, described: Sequence[str]) -> None:
        if described and self.speaks:
            warnings.warn(
                f"the momentum of these starts at zero, because they took the place of other parameters: {listed(described)}",
                stacklevel=3,
            )

    # A compiled step that saw the counter would be compiled again.
    @torch._disable_dynamo
    def count_step(self) -> None:
        """Counts a step, even one that this rank breaks off."""
        self.steps += 1

    def step(
        self,
        formulas: Sequence[Any],
        states: States,
        grads: Sequence[Tensor | None] | None = None,
    ) -> Sequence[Param]:
        """Makes one optimizer step. Raises what :meth:`Muon.step` does. ``formulas`` has the hyperparameters of each
        parameter group, and ``grads`` the gradient of each parameter (default: its ``grad``). Missing momentum buffers
        are made. Returns the parameters without gradients.
        """
        if self.failure:
            raise RuntimeError(
                "this Muon cannot be trusted since a step failed: parameters and momentum of the ranks may not belong "
                f"together. Rebuild it, and load a checkpoint from before that step. What happened: {self.failure}"
            )
        if self._runner is not None and self._runner.is_unread:
            self.synchronize()
        # Whether, after an error here, the other ranks may move parameters in this step: once the statuses are on their
        # way, unless all ranks wait for them and hear of the problem.
        others_may_go_on = False
        try:
            runner = self._runner or self._make_runner()
            try:
                options = self._checked_options(formulas)
            except Exception:
                runner.share_statuses(self.steps, None)
                raise
            inputs = StepInputs(formulas, self.ordered, states, grads)
            others_may_go_on = True
            difference = runner.share_statuses(self.steps, inputs)
            problem = "; ".join(inputs.problems) or difference
            if difference or (problem and runner.awaits_statuses):
                others_may_go_on = False
                raise RuntimeError(problem)
            if options != self._bound_options:
                runner.bind(dict(enumerate(formulas)))
                self._bound_options = options
            # Autocast would end the iteration in a dtype that the packs do not have.
            with torch._C._DisableAutocast():
                runner.run(inputs)
            _increment_versions(inputs, states)
            if problem:
                raise RuntimeError(problem)
        except BaseException as error:
            if self._runner is not None:
                self._runner.drain()
            self._fail(error, others_may_go_on)
            raise
        return inputs.without_gradient

    def _checked_options(self, formulas: Sequence[Any]) -> list[tuple]:
        """The options of each parameter group that decide how matrices are made and batched. Raises an error if the
        config, an option or a parameter does not allow a step.
        """
        config = self._config_of_user
        before, now = vars(self.config), vars(config)
        changed = [name for name in before if before[name] != now[name]]
        if changed:
            config.check()
            raise ValueError(
                f"{listed(changed)} of the config changed after this Muon was built. Set them before you build Muon"
            )
        for group in formulas:
            group.check()
        options = [(group.form, group.compute_key) for group in formulas]
        if options == self._bound_options:
            return options
        _check_forms(self.params, formulas)
        refusal = _refusal(self.params, bool(self.agreement.serials))
        if refusal:
            raise RuntimeError(refusal)
        return options

    def _fail(self, error: BaseException, others_may_go_on: bool) -> None:
        """Records the failure. If parameters may have moved on some ranks only, this optimizer does not go on."""
        where = self._runner.where if self._runner is not None else ""
        failure = f"{type(error).__name__}: {error}"
        is_own = not isinstance(error, CollectiveError)
        if others_may_go_on and where and is_own:
            failure = f"{type(error).__name__} in {where}: {error}"
            # The type and text stay the same, because the user's code may catch them.
            if hasattr(error, "add_note"):
                error.add_note(f"Muon, rank {self.rank}, step {self.steps}: {where}")
        # A framework of the user's may be able to go on, and so may ranks of which none has moved.
        if self.reader is not None and others_may_go_on:
            self.failure = self.failure or failure

    def synchronize(self) -> None:
        """On accelerators: raises the error of the last step, if it is new. The first call waits for the step's end."""
        if self.failure or self._runner is None:
            return
        text = self._runner.mismatch()
        if text:
            error = RuntimeError(text)
            self._fail(error, others_may_go_on=True)
            raise error


def _device_index(params: Sequence[Param]) -> int | None:
    """The index of the accelerator that has the parameters; None if there is none."""
    if not torch.accelerator.is_available():
        return None
    for param in params:
        if param.tensor.device.index is not None:
            return param.tensor.device.index
    return None


def _increment_versions(inputs: StepInputs, states: States) -> None:
    """Tells autograd what a step has written: a DTensor does not see writes to its local tensor."""
    written: list[Tensor] = []
    for of_param in inputs.params:
        if of_param is None or of_param.user_gradient is None:
            continue
        param = of_param.param
        if param.is_dtensor:
            written += [param.tensor, states[param.tensor]["momentum_buffer"]]
    torch.autograd.graph.increment_version(written)


def _refusal(params: Sequence[Param], has_others: bool) -> str:
    """Why the parameters cannot make a step; "" if they can. Whether this rank shares them: ``has_others``."""
    if any(torch.is_complex(param.tensor) for param in params):
        return "Muon does not support complex parameters"
    on_meta = [param.described for param in params if param.tensor.is_meta]
    if on_meta and has_others and not process_groups.is_dry_run():
        return (
            f"these have no data, because they are on the meta device: {listed(on_meta)}. The model was materialized "
            "after Muon was built, and has other parameters now. Build Muon after model.to_empty(device=...)"
        )
    return ""


def _check_forms(params: Sequence[Param], formulas: Sequence[Any]) -> None:
    """Raises ValueError if ``split`` or ``flatten`` of a group has changed."""
    for param in params:
        form = formulas[param.param_group].form
        if param.form != form:
            raise ValueError(
                f"split or flatten of {param.described} was {param.form}, and is now {form}: set it back, or build a new Muon"
            )
