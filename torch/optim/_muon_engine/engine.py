"""The engine of one optimizer: the ranks build it together, and run it at every step."""

import copy
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .._muon_split import Split
from .agreement import agree, Meeting, Signature
from .config import DistributedConfig
from .dtensors import Reader
from .factory import (
    choose_owners,
    describe_state,
    is_from_factory,
    reader_of,
    users_functions,
)
from .inputs import StepInputs
from .params import (
    device_of,
    drop_misshapen_momentum,
    inherit_momentum,
    Matrix,
    Param,
    Replacement,
    States,
    take_places,
    traits_of,
)
from .plan import make_plan, Owners, Plan
from .process_groups import (
    CollectiveError,
    grid_groups,
    GridGroups,
    listed,
    matrix_counts,
    process_rank,
)
from .statuses import ELSEWHERE, Statuses
from .step import PackedStep, Progress


class Engine:
    """The matrices, owners, plan, groups and statuses of one list of parameters. It takes a copy of ``config``, whose functions and flags
    may not change. ``former`` is the optimizer's engine before its parameters changed. If ``check`` raises an error, or the
    last step of ``former`` has an unread one, all ranks that share matrices raise it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Param],
        states: States,
        takes_stacks: bool,
        check: Callable[[], None] = lambda: None,
        former: "Engine | None" = None,
    ) -> None:
        # Users may change theirs, which a step refuses.
        self.config = copy.copy(config)
        self._config_of_user = config
        self.params = params
        # Those that a step or a checkpoint saw last, and the indices of all in the config's dicts.
        self.seen = params
        self.config_indices = {param.tensor: param.config_index for param in params}
        self.steps = 0
        # Why a step failed half way. After that, the ranks' parameters may not belong together.
        self.failure = ""
        self.plan = Plan()
        # Global rank -> the indices of the parameters whose first matrix it owns.
        self.assignments: Mapping[int, Sequence[int]] = {}
        # By grid: the groups of this rank's row and column.
        self.groups: dict[Any, GridGroups] = {}
        self.progress = Progress()
        replaced: list[Replacement] = []
        if former is None:
            self.reader = reader_of(config, takes_stacks)
        else:
            self.reader = copy.copy(former.reader)
            self.steps, self.failure = former.steps, former.failure
            self.config_indices = dict(former.config_indices)
            # The parameters that took the places of others.
            replaced = take_places(former.seen, params, self.config_indices)
        before = {param.tensor for param in (former or self).params}

        def check_all() -> None:
            if former is not None:
                former.synchronize()
            check()

        # Parameters on meta will be materialized, which builds another engine.
        is_meta = any(param.tensor.is_meta for param in params)
        # Ranks exchange objects on the current device, which DDP does not ask its users to set.
        with torch.accelerator.device_index(self._device_index()):
            # The assignment computes with tensors, which must be real even if the parameters are fake.
            with unset_fake_temporarily():
                meetings = self._build(before, check_all)
            if self.is_packed and self.device.type != "cpu" and not is_meta:
                self._connect(meetings)
        # In the order of all ranks.
        self.ordered = params
        if self.reader is not None:
            self.ordered = [*self.reader.params.values()]
        self._refusal = self._why_no_step()
        if former is not None:
            restarted = inherit_momentum(replaced, states)
            self._warn_about_restarted(
                restarted + drop_misshapen_momentum(params, states)
            )

    def _build(
        self, before: set[Tensor], check: Callable[[], None]
    ) -> Sequence[Meeting]:
        """Makes the plan together with the other ranks. They compare which parameters are not among those ``before`` a
        change, so that all replace the same ones. All of them raise an error of ``check``. Returns the meetings.
        """
        config, reader = self.config, self.reader
        if reader is None:
            check()
            config.check()
            _, self.assignments = self._assigned([])
            return []
        owners: Owners = {}
        device_type = ""
        own_error = None
        try:
            matrices = reader.read(self.params, check)
            config.check()
            owners, self.assignments = self._assigned(matrices)
            if self.is_packed:
                device_type = self.device.type
        except Exception as error:
            own_error = error
        meetings = self._meetings(reader, before, device_type)
        agree(meetings, own_error)
        self.plan = make_plan(
            owners,
            self.rank,
            config.prefetch_count,
            one_at_a_time=not config.async_gpu_parallelism,
        )
        counts = matrix_counts()
        for grid, members in self.plan.members.items():
            serial = counts.get(grid, 0)
            if self.is_packed:
                self.groups[grid] = grid_groups(grid, reader.candidates, serial)
            counts[grid] = serial + len(members)
        return meetings

    def _assigned(
        self, matrices: Sequence[Matrix]
    ) -> tuple[Owners, Mapping[int, Sequence[int]]]:
        """The owner of each matrix, and the parameters of each owner."""
        if self.reader is not None:
            describe_state(self.reader, self.config.state)
            if not self.is_packed:
                from .functions import check_stacks

                check_stacks(self.params, matrices)
            if is_from_factory(self.config, "assign"):
                return choose_owners(len(self.params), matrices)
        from .functions import call_assign_fn

        return call_assign_fn(self, matrices)

    def _meetings(
        self, reader: Reader, before: set[Tensor], device_type: str
    ) -> list[Meeting]:
        """The ranks that share parameters with this one, and what they compare of each."""
        config = self.config
        of_config = {
            # Before the device, which follows from it.
            "functions of your own": str(users_functions(config)),
            "device": device_type,
            "prefetch_count": str(config.prefetch_count),
            "async_gpu_parallelism": str(bool(config.async_gpu_parallelism)),
        }
        owner_of = self.owner_of
        signatures: dict[Any, list[Signature]] = {r: [] for r in reader.groups_of}
        for fact in reader.facts:
            param = fact.param
            fields = {
                **fact.fields,
                "dtype": str(param.tensor.dtype),
                "grad_dtype": str(param.traits.momentum_dtype),
                "requires_grad": str(not param.frozen),
                "replaced": str(param.tensor not in before),
                **param.formulas.option_texts(),
                **of_config,
            }
            if param.tensor.ndim <= 2 or param.flatten:
                # Ranks may hold different matrices of a stack.
                fields["owner"] = str(owner_of.get(param.index))
            signatures[fact.ranks].append((fact.described, fields))
        # Fewer ranks first, so that a problem reaches the meetings of more ranks that contain them.
        meetings: list[Meeting] = []
        for ranks in sorted(signatures, key=lambda ranks: (len(ranks), ranks)):
            if groups := reader.groups_of[ranks]:
                meetings.append(Meeting(groups, signatures[ranks]))
        return meetings

    def _connect(self, meetings: Sequence[Meeting]) -> None:
        """Takes the memory of a step once. If one rank has too little, all raise its error. After that, it uses every communicator
        once while no other one is in use. Accelerator backends connect two ranks when they first exchange something.
        With other collectives in flight, ranks may wait for each other.
        """
        channels: Sequence[Statuses] = ()
        own_error = None
        try:
            channels = self.statuses
            self.runner.reserve()
        except Exception as error:
            own_error = error
        agree(meetings, own_error)
        try:
            for statuses in channels:
                statuses.reduce()
                self.runner.wait_for(statuses)
            self.runner.connect()
        except BaseException:
            self._drain()
            raise

    def _drain(self) -> None:
        """After an error, waits for everything in flight."""
        for statuses in self.statuses:
            statuses.drain()
        if self.is_packed:
            self.runner.drain()

    @property
    def matrix_owners(self) -> dict[tuple[int, int], int]:
        """(Parameter index, matrix in it) -> the global rank that owns it. The parts of a fused weight are matrices."""
        owners: dict[tuple[int, int], int] = {}
        for matrix, owner in self.plan.owners.items():
            parts = max(1, len(matrix.split.sizes))
            for part in range(parts):
                owners[matrix.index, matrix.sub * parts + part] = owner
        return owners

    @property
    def owner_of(self) -> dict[int, int]:
        """The owner of each parameter's first matrix, by the index of the parameter."""
        return {i: rank for rank, owned in self.assignments.items() for i in owned}

    @property
    def rank(self) -> int:
        """This process's global rank, unless the config's state replaces it."""
        return self.config.state.get("rank", process_rank())

    @property
    def world_size(self) -> int:
        """The number of all ranks, unless the config's state replaces it."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return self.config.state.get("world_size", world_size)

    @property
    def device(self) -> torch.device:
        """The device of the communication buffers."""
        groups = () if self.reader is None else self.reader.candidates
        return device_of([param.tensor for param in self.params], groups)

    def _device_index(self) -> int | None:
        """The index of the accelerator that has the parameters; None for parameters on no accelerator."""
        if torch.accelerator.is_available():
            for param in self.params:
                if param.tensor.device.index is not None:
                    return param.tensor.device.index
        return None

    @property
    def is_packed(self) -> bool:
        """Whether both functions that move data are the factory's."""
        return self.reader is not None and not users_functions(self.config)

    # Both are made when they are first used, because they may take memory.
    @cached_property
    def statuses(self) -> Sequence[Statuses]:
        """The channels of statuses, smaller grids first: these pass a difference on to the larger ones that contain them."""
        channels: list[Statuses] = []
        for grid, groups in reversed(self.groups.items()):
            if groups.several:
                members = self.plan.members[grid]
                channels.append(Statuses(members, groups, self.device))
        return channels

    @cached_property
    def runner(self) -> Any:
        """Runs the steps."""
        if self.is_packed:
            return PackedStep(self.plan, self.groups, self.device, self.progress)
        from .functions import FunctionStep

        return FunctionStep(self)

    def matches(self, param_groups: Sequence[MutableMapping[str, Any]]) -> bool:
        """Whether this engine was built for the parameters of these groups, and they and their ``split`` and ``flatten`` are
        unchanged.
        """
        params = iter(self.params)
        for param_group, options in enumerate(param_groups):
            form = param_group, Split.of(options["split"]), bool(options["flatten"])
            for tensor in options["params"]:
                param = next(params, None)
                if param is None or param.tensor is not tensor:
                    return False
                if param.traits != traits_of(tensor):
                    return False
                if (param.param_group, param.split, param.flatten) != form:
                    return False
        return next(params, None) is None

    def announce_change(self) -> None:
        """Tells the ranks that share matrices in ``step()`` that parameters have changed since this engine was built. Raises
        RuntimeError unless they have changed on all of these ranks.
        """
        self.synchronize()
        difference = self._share_statuses(None, has_changed=True)
        if difference:
            raise RuntimeError(difference)

    def _share_statuses(
        self, inputs: StepInputs | None, has_changed: bool = False
    ) -> str:
        """Tells the other ranks of this rank's step. Returns how ranks differ, if it waits for that. Without ``inputs``, this
        rank's parameters have changed, or this rank raises an error and tells the others so.
        """
        # A rank that cannot use a gradient tells all of its grids, because each of them must end the step here. The
        # gradient may be of a matrix that no other rank has.
        has_problem = bool(inputs.problems) if inputs is not None else not has_changed
        text = ""
        for statuses in self.statuses:
            knows_of_problem = has_problem or bool(text)
            statuses.start(self.steps, inputs, knows_of_problem, has_changed)
            if statuses.awaits or has_changed:
                reason = statuses.difference(inputs)
                # A larger grid's own reason says more.
                if reason and text in ("", ELSEWHERE):
                    text = reason
        return text

    def hand_over(self, params: Sequence[Param], states: States) -> None:
        """Gives momentum to ``params`` that replaced others, for a checkpoint before the next step."""
        replaced = take_places(self.seen, params, self.config_indices)
        self.seen = params
        self._warn_about_restarted(inherit_momentum(replaced, states))

    def _warn_about_restarted(self, described: Sequence[str]) -> None:
        first = min((m.layout.ranks[0] for m in self.plan.owners), default=0)
        # One of the ranks that share matrices speaks for them.
        if described and self.rank == first:
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
        self.synchronize()
        # Whether, after an error here, the other ranks may move parameters in this step: once the statuses are on their
        # way, unless all ranks wait for them and hear of the problem.
        others_may_go_on = False
        try:
            try:
                self._check_options(formulas)
                inputs = StepInputs(self.rank, formulas, self.ordered, states, grads)
            except Exception:
                self._share_statuses(None)
                raise
            others_may_go_on = True
            # Whether all ranks know of a problem before anything moves. With functions of the user, ranks do not tell each other.
            awaits = self.is_packed and all(each.awaits for each in self.statuses)
            difference = self._share_statuses(inputs)
            problem = "; ".join(inputs.problems) or difference
            if difference or (problem and awaits):
                others_may_go_on = False
                raise RuntimeError(problem)
            # Autocast would end the iteration in a dtype that the packs do not have.
            with torch._C._DisableAutocast():
                # DTensor's collectives for gradients come first.
                inputs.place(self.progress)
                self.runner.run(inputs)
            for statuses in self.statuses:
                statuses.finish()
            self.progress.now = "", ()
            _increment_versions(inputs)
            if problem:
                raise RuntimeError(problem)
        except BaseException as error:
            self._drain()
            if others_may_go_on:
                self._fail(error)
            raise
        return inputs.without_gradient

    def _check_options(self, formulas: Sequence[Any]) -> None:
        """Raises an error if the config, an option or a parameter does not allow a step."""
        config = self._config_of_user
        before, now = vars(self.config), vars(config)
        changed = [name for name in before if before[name] != now[name]]
        if changed:
            raise ValueError(
                f"{listed(changed)} of the config changed after this Muon was built. Set them before you build Muon"
            )
        for group in formulas:
            group.check()
        if self._refusal:
            raise RuntimeError(self._refusal)

    def _why_no_step(self) -> str:
        """Why the parameters cannot make a step; "" if they can."""
        if any(torch.is_complex(param.tensor) for param in self.params):
            return "Muon does not support complex parameters"
        on_meta = [param.described for param in self.params if param.tensor.is_meta]
        # A rank that shares no matrix may step them.
        if on_meta and any(groups.several for groups in self.groups.values()):
            return (
                f"these have no data, because they are on the meta device: {listed(on_meta)}. The model was materialized "
                "after Muon was built, and has other parameters now. Build Muon after model.to_empty(device=...)"
            )
        return ""

    def _fail(self, error: BaseException) -> None:
        """Records the failure. Parameters may have moved on some ranks only, so this optimizer does not go on."""
        where = str(self.progress)
        failure = f"{type(error).__name__}: {error}"
        is_own = not isinstance(error, CollectiveError)
        if where and is_own:
            failure = f"{type(error).__name__} in {where}: {error}"
            # The type and text stay the same, because the user's code may catch them.
            if hasattr(error, "add_note"):
                error.add_note(f"Muon, rank {self.rank}, step {self.steps}: {where}")
        # A framework of the user's may be able to go on.
        if self.reader is not None:
            self.failure = failure

    def synchronize(self) -> None:
        """On accelerators: raises the error of the last step, if it is new. The first call waits for the step's end."""
        if self.failure:
            return
        texts = [each.difference() for each in self.statuses]
        if any(texts):
            error = RuntimeError("; ".join(filter(None, texts)))
            self._fail(error)
            raise error


def _increment_versions(inputs: StepInputs) -> None:
    """Tells autograd what a step has written: writes to a local tensor do not raise the version of its DTensor."""
    written: list[Tensor] = []
    for of_param in inputs.params:
        if of_param is None or of_param.user_gradient is None or of_param.problem:
            continue
        if of_param.param.is_dtensor:
            written += [of_param.param.tensor, of_param.state["momentum_buffer"]]
    torch.autograd.graph.increment_version(written)


def step_once(
    config: DistributedConfig,
    formulas: Any,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    bufs: Sequence[Tensor],
) -> None:
    """One step of the functional form, with an engine for this call."""
    live = [Param(i, p, None, 0, formulas) for i, p in enumerate(params)]
    for i, (param, buf) in enumerate(zip(live, bufs, strict=True)):
        # A step would replace a buffer that does not fit, and the caller would not see its new values.
        if param.part_of_momentum(buf, param.traits.grad_dtype) is None:
            raise ValueError(
                f"muon_momentum_bufs[{i}] must have the type, placement, device and grad_dtype of its parameter, and be contiguous "
                "for flatten"
            )
    new = ({"momentum_buffer": buf} for buf in bufs)
    states: dict[Tensor, Any] = dict(zip(params, new, strict=True))
    takes_stacks = any(p.ndim > 2 for p in params)
    engine = Engine(config, live, states, takes_stacks)
    engine.step([formulas], states, grads)
    engine.synchronize()
