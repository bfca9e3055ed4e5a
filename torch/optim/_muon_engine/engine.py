"""The engine of one optimizer: the ranks build it together, and run it at every step."""

import copy
import logging
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import factory, process_groups
from .agreement import agree, raise_everywhere, Signature
from .config import DistributedConfig
from .factory import is_from_factory, own_functions
from .hints import Hints
from .layouts.layout import Layout
from .layouts.dtensor import device_of
from .layouts.fitting import fits
from .layouts.local import gradient_dtype, traits_of
from .layouts.reader import describe_state, ParamInfo
from .process_groups import (
    FailureNotes,
    larger_first,
    listed,
    overlapping_groups,
    Ranks,
    spanning_group,
)
from .runtime import transport
from .runtime.packed import PackedStep
from .runtime.params import Param, ParamInputs, StepInputs
from .schedule import buckets
from .schedule.owners import divided, owners_of
from .schedule.packs import Schedule, slots_for


States = MutableMapping[Tensor, MutableMapping[str, Any]]
# A parameter, the one that took its place, and whether this one inherits the momentum.
Replacement = tuple[Param, Param, bool]

log = logging.getLogger("torch.optim.muon")

_FAILED_BEFORE = "another rank failed before this step. "


class Engine:
    """The layouts, owners, schedule and memory for one list of parameters. It reads the functions and flags of
    ``config`` once. ``former`` is the optimizer's engine before its parameters changed. This rank raises ``error``,
    or an unread one of ``former``'s last step, after the other ranks have learned of it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Param],
        states: States,
        takes_stacks: bool = False,
        error: BaseException | None = None,
        former: "Engine | None" = None,
        is_lasting: bool = True,
    ) -> None:
        self.config, self.params = copy.copy(config), params
        self.reader = factory.reader_of(config, takes_stacks)
        self.steps = 0
        # Why a step failed half way. After that, the ranks' parameters may not belong together.
        self.failure = ""
        # Has all layouts. Its buckets lack the matrices of frozen parameters.
        self.schedule = Schedule((), (), ())
        self.assignments: dict[int, list[int]] = {}
        self.groups: dict[Ranks, dist.ProcessGroup | None] = {}
        # Ranks that share matrices -> the serial number of this optimizer among those over these ranks.
        self.serials: dict[Ranks, int] = {}
        # Those keys that overlap others, on this rank or on another one of them, without containing these.
        self.overlapping: set[Ranks] = set()
        # A PackedStep, or a FunctionStep through the user's functions.
        self._runner: Any = None
        # Parameter -> its index in the config's dicts, -1 for a later one. It may leave, and come back.
        self._config_indices: dict[Tensor, int] = {}
        # As they were seen last, by a step or a checkpoint: whose momentum those have that take their places.
        self._seen = params
        replaced: list[Replacement] = []
        if former is not None:
            error = former.new_failure() or error
            replaced = self._take_over(former)
        for param in params:
            index = param.config_index if former is None else -1
            param.config_index = self._config_indices.setdefault(param.tensor, index)
        # Ranks exchange objects on the current device, which DDP does not ask its users to set.
        indices = [i for p in params if (i := p.tensor.device.index) is not None]
        index = indices[0] if indices and torch.accelerator.is_available() else None
        try:
            # The assignment computes with tensors, which must be real in a dry run, too.
            with unset_fake_temporarily(), torch.accelerator.device_index(index):
                self._build(error, former, is_lasting)
            layouts = self.schedule.layouts
            self.ordered = self._in_common_order()
            self._first_params = [*{p.group: p for p in reversed(params)}.values()]
            self._refusal = _refusal(self)
            if former is not None:
                restarted = _inherit_momentum(replaced, states)
                restarted += _fit_momentum(params, states)
                self._warn_about_restarted(restarted)
            self._hints = Hints(layouts, self.rank)
            # Parameters on meta will be materialized, which builds another engine.
            is_meta = any(param.tensor.is_meta for param in params)
            if self.is_packed and self.device.type != "cpu" and not is_meta:
                _connect(self, index)
        except Exception as raised:
            for step in (self.steps, self.steps + 1):
                self._notes(step).leave(f"{type(raised).__name__}: {raised}")
            raise
        if layouts and self._speaks:
            why = "rebuilt for changed parameters" if former else "built"
            n_buckets = len(self.schedule.buckets)
            log.info("Muon %s: %d matrices, %d buckets", why, len(layouts), n_buckets)

    def _take_over(self, former: "Engine") -> list[Replacement]:
        """Continues ``former``, whose memory it frees. Returns the parameters that took the places of others."""
        self.reader, self.steps = copy.copy(former.reader), former.steps
        self.failure = former.failure
        # A device may not have room for the memory of both.
        former._runner = None
        replaced = _replaced(former._seen, self.params)
        self._config_indices = dict(former._config_indices)
        for old, new, _ in replaced:
            index = self._config_indices.pop(old.tensor)
            self._config_indices[new.tensor] = index
        return replaced

    def _in_common_order(self) -> list[Param]:
        """The parameters in the order of all ranks: experts last, by their ids."""
        experts = {} if self.reader is None else self.reader.experts
        by_expert = [(experts.get(p.config_index, -1), p) for p in self.params]
        return [param for _, param in sorted(by_expert, key=lambda pair: pair[0])]

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
    def _speaks(self) -> bool:
        """Whether this rank logs and warns for those that share matrices with it."""
        layouts = self.schedule.layouts
        return self.rank == min((l.holders[0] for l in layouts), default=0)

    @property
    def device(self) -> torch.device:
        reader: Any = self.reader  # Only an engine with a reader is asked.
        params = [param.tensor for param in self.params]
        return device_of(params, chain.from_iterable(reader.sharing.values()))

    @property
    def is_packed(self) -> bool:
        """Whether both functions that move data are the factory's."""
        return self.reader is not None and not own_functions(self.config)

    def _build(
        self, error: BaseException | None, former: "Engine | None", is_lasting: bool
    ) -> None:
        """Reads, assigns, agrees with the other ranks, and makes the schedule."""
        params, tensors = self.params, [param.tensor for param in self.params]
        per_node = process_groups.ranks_per_node()
        layouts, owners, signed = [], [], []
        # Ranks compare which parameters are new, so that all replace the same ones.
        before = {param.tensor for param in (former or self).params}
        try:
            if self.reader is not None:
                infos = [ParamInfo(p.config_index, p.key.name, p.form) for p in params]
                layouts = self.reader.read(tensors, infos, error)
            if error is None:
                self.config.check()
                if self.is_packed and is_from_factory(self.config, "assign"):
                    each = self.config.state.get("owners_per_matrix", 1)
                    of_layouts = [self.params[layout.key.index] for layout in layouts]
                    algorithms = [param.formulas.ns_algorithm for param in of_layouts]
                    layouts = divided(layouts, each, per_node, algorithms)
                owners = _assign(self, layouts)
                signed = [*_signatures(self, layouts, owners, before)]
        except Exception as raised:
            error = error or raised
        if self.reader is None:
            if error is not None:
                raise error
            return
        sharing = self.reader.sharing
        signatures: dict[Ranks, list[Signature]] = {ranks: [] for ranks in sharing}
        for ranks, signature in signed:
            signatures[ranks].append(signature)
        trained = {layout.holders for layout in layouts if not layout.frozen}
        self.overlapping = overlapping_groups(trained)
        agree(
            sharing,
            signatures,
            error,
            is_lasting,
            self.groups,
            self.serials,
            self.overlapping,
        )
        self.schedule = buckets.make_schedule(
            layouts,
            owners,
            one_owner_at_a_time=not self.config.async_gpu_parallelism,
            ranks_per_node=per_node,
            slots=slots_for(self.config.prefetch_count),
        )
        if self.is_packed:
            further = self.schedule.further_groups(self.rank)
            for ranks in larger_first(further.keys() - self.groups.keys()):
                wider = [sharing[every] for every in sharing if {*ranks} <= {*every}]
                candidates = chain.from_iterable(wider)
                self.groups[ranks] = spanning_group(ranks, candidates, further[ranks])

    def _make_runner(self) -> Any:
        """The step of this engine. The first call makes it, and takes its memory."""
        if self._runner is None and self.is_packed:
            self._runner = self._packed_step()
        elif self._runner is None:
            from .functions import FunctionStep

            self._runner = FunctionStep(self)
        return self._runner

    def _packed_step(self) -> PackedStep:
        return PackedStep(
            self.schedule,
            self.params,
            self.ordered,
            self.groups,
            self.serials,
            self.overlapping,
            rank=self.rank,
            device=self.device,
            prefetch_count=self.config.prefetch_count,
            keeps_buffers=self.config.state.get("keep_buffers", False),
        )

    def matches(self, param_groups: Sequence[MutableMapping[str, Any]]) -> bool:
        """Whether this engine was built for the parameters of these groups, and they are unchanged."""
        at = 0
        for group, options in enumerate(param_groups):
            for tensor in options["params"]:
                if at == len(self.params):
                    return False
                param = self.params[at]
                if param.tensor is not tensor or param.group != group:
                    return False
                if param.traits != traits_of(tensor):
                    return False
                at += 1
        return at == len(self.params)

    def rendezvous(self, tensors: Sequence[Tensor]) -> None:
        """Waits in ``step()`` until all ranks that share matrices have found that parameters changed."""
        if self.reader is None:
            return
        groups: dict[Any, Any] = {ranks: [self.groups[ranks]] for ranks in self.serials}
        groups |= self.reader.rendezvous_groups(tensors)
        # Ranks that are in the step already find this note after their collective failed.
        self._notes().leave(
            "it found changed parameters in step(), and waits for the other ranks to change them too"
        )
        for ranks in larger_first(groups):
            timeout = process_groups.group_timeout(groups[ranks])
            process_groups.rendezvous(ranks, timeout, str(self.serials.get(ranks)))
        self._notes().take_back()

    def hand_over(self, params: Sequence[Param], states: States) -> None:
        """Gives momentum to ``params`` that replaced others, for a checkpoint before the next step."""
        replaced = _replaced(self._seen, params)
        self._seen = params
        for old, new, _ in replaced:
            if old.tensor in self._config_indices:
                index = self._config_indices.pop(old.tensor)
                self._config_indices[new.tensor] = index
        self._warn_about_restarted(_inherit_momentum(replaced, states))

    def _warn_about_restarted(self, described: Sequence[str]) -> None:
        if described and self._speaks:
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
        config: DistributedConfig,
        formulas: Sequence[Any],
        states: States,
        grads: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Makes one optimizer step. Raises what :meth:`Muon.step` does. ``config`` must be that of the build.
        ``formulas`` has the hyperparameters of each parameter group, and ``grads`` the gradient of each
        parameter (default: its ``grad``). Missing momentum buffers are made.
        """
        if self.failure:
            raise RuntimeError(
                "this Muon cannot be trusted since a step failed: parameters and momentum of the ranks may not belong "
                f"together. Rebuild it, and load a checkpoint from before that step. What happened: {self.failure}"
            )
        self.synchronize()
        # Whether other ranks may go on without this one: after the statuses, unless all ranks wait for them.
        may_have_moved = False
        try:
            inputs = self._inputs(config, formulas, states, grads)
            runner = self._make_runner()
            may_have_moved = True
            difference = runner.share_statuses(self.steps, inputs)
            problem = "; ".join(inputs.problems) or difference
            if problem and runner.awaits_statuses:
                may_have_moved = False
                raise RuntimeError(problem)
            # Autocast would end the iteration in a dtype that the packs do not have.
            with torch._C._DisableAutocast():
                runner.run(inputs)
            _increment_versions(inputs, states)
            if problem:
                raise RuntimeError(problem)
        except BaseException as error:
            self._fail(error, may_have_moved)
            if not isinstance(error, transport.CollectiveError):
                raise
            # A launcher may end this process while it asks the others.
            log.error("%s", error)
            reasons = str(error), self._notes().wait_for_reason(error.ranks)
            raise RuntimeError(". ".join(filter(None, reasons))) from error

    def _inputs(
        self,
        config: DistributedConfig,
        formulas: Sequence[Any],
        states: States,
        grads: Sequence[Tensor | None] | None,
    ) -> StepInputs:
        """Checks, and collects momentum and gradients. The first step makes every momentum buffer, so that
        checkpoints are the same on all ranks.
        """
        before, now = vars(self.config), vars(config)
        changed = [name for name in before if before[name] != now[name]]
        if changed:
            config.check()
            raise ValueError(
                f"{listed(changed)} of the config changed after this Muon was built. Set them before you build Muon"
            )
        for of_group in formulas:
            of_group.check()
        _check_forms(self._first_params, formulas)
        if self._refusal:
            raise RuntimeError(self._refusal)
        params: list[ParamInputs | None] = [None] * len(self.params)
        # A buffer of another placement takes a collective, so all ranks go through parameters in one order.
        for param in self.ordered:
            if not param.frozen:
                index = param.key.index
                grad = param.tensor.grad if grads is None else grads[index]
                params[index] = ParamInputs(param, grad, states[param.tensor])
        self._hints.look(params)
        if self._hints.steps == 1:
            # After it agreed with this rank, another one may have failed in a group that this one is not in.
            if reason := self._notes().read():
                # Through ranks between, a reason may come with this text already.
                raise RuntimeError(
                    _FAILED_BEFORE + reason.rpartition(_FAILED_BEFORE)[2]
                )
        return StepInputs(formulas, params)

    def _fail(self, error: BaseException, may_have_moved: bool) -> None:
        """Records the failure, and leaves a note for the ranks that wait for this one. If parameters may have moved on
        some ranks only, this optimizer does not go on.
        """
        where = self._runner.where if self._runner is not None else ""
        failure = f"{type(error).__name__}: {error}"
        is_own = not isinstance(error, transport.CollectiveError)
        if may_have_moved and where and is_own:
            failure = f"{type(error).__name__} in {where}: {error}"
            # The type and text stay the same, because the user's code may catch them.
            if hasattr(error, "add_note"):
                error.add_note(f"Muon, rank {self.rank}, step {self.steps}: {where}")
        if is_own:
            # The ranks that wait for this one are in this step or come to the next one.
            for step in (
                (self.steps, self.steps + 1) if may_have_moved else (self.steps,)
            ):
                self._notes(step).leave(failure)
        # A framework of the user's may be able to go on, and so may ranks of which none has moved.
        if self.reader is not None and may_have_moved:
            self.failure = self.failure or failure

    def _notes(self, step: int | None = None) -> FailureNotes:
        return FailureNotes(self.serials, self.steps if step is None else step)

    def new_failure(self) -> RuntimeError | None:
        """On accelerators: the error of the last step, if it is new. The first call waits for the step's end."""
        if self.failure or self._runner is None:
            return None
        text = self._runner.mismatch()
        if not text:
            return None
        error = RuntimeError(text)
        self._fail(error, may_have_moved=True)
        return error

    def synchronize(self) -> None:
        """Raises the error of the last step, if it is new."""
        if error := self.new_failure():
            raise error


def _increment_versions(inputs: StepInputs, states: States) -> None:
    """Tells autograd what a step has written: a DTensor does not see writes to its local tensor."""
    written: list[Tensor] = []
    for of_param in inputs.trained:
        if of_param.user_gradient is not None and of_param.param.is_dtensor:
            tensor = of_param.param.tensor
            written += [tensor, states[tensor]["momentum_buffer"]]
    torch.autograd.graph.increment_version(written)


def _connect(engine: Engine, index: int | None) -> None:
    """Takes the memory of a step, and connects the ranks. If one of them has too little, all raise its error."""
    # No frame keeps the error, which refers to the frames and their memory.
    errors: list[Exception] = []
    try:
        engine._make_runner()
    except Exception as raised:
        errors.append(raised)
    groups = map(engine.groups.get, larger_first(engine.serials))
    with unset_fake_temporarily(), torch.accelerator.device_index(index):
        raise_everywhere(errors.pop() if errors else None, groups)
    runner: Any = engine._make_runner()
    runner.connect()


def step_once(
    config: DistributedConfig,
    formulas: Any,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    bufs: Sequence[Tensor],
) -> None:
    """One step of the functional form, with an engine for this call."""
    for i, (param, buf) in enumerate(zip(params, bufs, strict=True)):
        # A step would replace a buffer that does not fit, and the caller would not see its new values.
        if not fits(param, buf, gradient_dtype(param)):
            raise ValueError(
                f"muon_momentum_bufs[{i}] must have the type, placement, device and grad_dtype of its parameter"
            )
    new = ({"momentum_buffer": buf} for buf in bufs)
    states: dict[Tensor, Any] = dict(zip(params, new, strict=True))
    live = [Param(i, p, None, 0, formulas) for i, p in enumerate(params)]
    takes_stacks = any(p.ndim > 2 for p in params)
    engine = Engine(config, live, states, takes_stacks, is_lasting=False)
    engine.step(config, [formulas], states, grads)
    engine.synchronize()


def _refusal(engine: Engine) -> str:
    """Why the parameters cannot make a step; "" if they can."""
    if any(torch.is_complex(param.tensor) for param in engine.params):
        return "Muon does not support complex parameters"
    on_meta = [param.described for param in engine.params if param.tensor.is_meta]
    if on_meta and engine.serials and not process_groups.is_dry_run():
        return (
            f"these have no data, because they are on the meta device: {listed(on_meta)}. The model was materialized "
            "after Muon was built, and has other parameters now. Build Muon after model.to_empty(device=...)"
        )
    return ""


def _check_forms(params: Sequence[Param], formulas: Sequence[Any]) -> None:
    """Raises ValueError if ``split`` or ``flatten`` of a group has changed. ``params`` has one of each group."""
    for param in params:
        form = formulas[param.group].form
        if param.form != form:
            raise ValueError(
                f"split or flatten of {param.described} was {param.form}, and is now {form}: set it back, or build a new Muon"
            )


def _assign(engine: Engine, layouts: Sequence[Layout]) -> list[int]:
    """Fills ``engine.assignments``. Returns the owner of each layout."""
    config, tensors = engine.config, [param.tensor for param in engine.params]
    entries: dict[str, Any] = {factory.LAYOUTS: layouts}
    if engine.reader is not None:
        describe_state(engine.reader, config.state)
        if not engine.is_packed:
            from .functions import check_stacks

            check_stacks(engine.params, layouts)
        if is_from_factory(config, "assign"):
            owners, engine.assignments = factory.choose_owners(tensors, layouts)
            return owners
        entries |= {"rank": engine.rank, "world_size": engine.world_size}
    with factory.lent(config.state, entries):
        assignments = config.assign_fn(tensors, config.state)
    described = [param.described for param in engine.params]
    owners = owners_of(assignments, layouts, described, engine.world_size)
    engine.assignments = {rank: list(owned) for rank, owned in assignments.items()}
    return owners


def _signatures(
    engine: Engine, layouts: Sequence[Layout], owners: Sequence[int], before: set
) -> Iterator[tuple[Ranks, Signature]]:
    """The holders of each matrix, and the values that they compare. ``before`` are the parameters before a change."""
    config, per_node = engine.config, process_groups.ranks_per_node()
    of_config = {
        "device": engine.device.type if engine.is_packed else "",
        "prefetch_count": str(config.prefetch_count),
        "async_gpu_parallelism": str(bool(config.async_gpu_parallelism)),
        "functions of your own": str(own_functions(config)),
    }
    formulas_of = {param.group: param.formulas for param in engine.params}
    options = {g: f.signature() | of_config for g, f in formulas_of.items()}
    each = config.state.get("owners_per_matrix", 1)
    for layout, owner in zip(layouts, owners):
        key, param = layout.key, engine.params[layout.key.index]
        counts_nodes = each != 1 or len(layout.holders) > buckets.MAX_PEERS
        fields = {
            # No index: ranks that also hold other experts or stages count differently.
            "name": str(key.name) if key.expert is None else f"expert {key.expert}",
            "owners_per_matrix": f"{each} ({key.block[1]} for this one)",
            "LOCAL_WORLD_SIZE": str(per_node if counts_nodes else ""),
            # Before the shape, which follows from it.
            "split": options[param.group]["split"],
            "shape": str(layout.shape),
            "dtype": str(param.tensor.dtype),
            "grad_dtype": str(layout.dtype),
            "placement": layout.placement,
            "shards": layout.shards.digest,
            "requires_grad": str(not param.frozen),
            "replaced": str(param.tensor not in before),
            "owner": str(owner),
        }
        fields |= options[param.group]
        yield layout.holders, Signature(layout.describe(), tuple(fields.items()))


def _inherit_momentum(replaced: list[Replacement], states: States) -> list[str]:
    """Gives momentum to parameters that replace others. Returns those that get none. The momentum of a parameter
    that left the groups stays with that parameter, too.
    """
    restarted = []
    for old, new, inherits in replaced:
        if "momentum_buffer" in states.get(old.tensor, {}) and new.tensor not in states:
            if inherits:
                states[new.tensor] = dict(states[old.tensor])
            else:
                restarted.append(new.described)
    return restarted


def _fit_momentum(params: Sequence[Param], states: States) -> list[str]:
    """Deletes momentum of another shape. Returns the parameters that had it."""
    restarted = []
    for param in params:
        state = states.get(param.tensor, {})
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != param.tensor.shape:
            restarted.append(param.described)
            del state["momentum_buffer"]
    return restarted


def _replaced(former: Sequence[Param], now: Sequence[Param]) -> list[Replacement]:
    """Each parameter that took another one's place. It inherits the momentum if the shape and the name are the
    same and nothing else in its group moved. Without names, the type, placement, dtype or device must differ as
    well: a framework has sharded the parameter. Otherwise it is another layer of equal shape, whose momentum
    starts at zero as in stock Muon.
    """
    stayed = {param.tensor for param in former} & {param.tensor for param in now}
    replaced = []
    for group in dict.fromkeys(param.group for param in now):
        old, new = ([p for p in ps if p.group == group] for ps in (former, now))
        moved = [(a, b) for a, b in zip(old, new) if a.tensor is not b.tensor]
        pairs = [(a, b) for a, b in moved if not {a.tensor, b.tensor} & stayed]
        for a, b in pairs:
            # Freezing a parameter does not make it another kind of tensor.
            old_name, name = a.key.name, b.key.name
            same = old_name == name and (name or a.traits[1:] != b.traits[1:])
            fits = bool(same) and a.tensor.shape == b.tensor.shape
            replaced.append((a, b, fits and len(pairs) == len(moved)))
    return replaced
