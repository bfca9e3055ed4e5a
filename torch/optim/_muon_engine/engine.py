"""The engine of one optimizer: built together with the other ranks, run at every step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim._muon_engine import debugging, report
from torch.optim._muon_engine.agreement import agree, forth_and_back, Signature
from torch.optim._muon_engine.callbacks import CallbackStep, functions_of, SingleMatrix
from torch.optim._muon_engine.hints import Hints
from torch.optim._muon_engine.layouts import (
    Key,
    larger_first,
    listed,
    process_rank,
)
from torch.optim._muon_engine.layouts.dtensor import (
    is_frozen,
    new_momentum_buffer,
    place_like,
    placed_like,
    problem_with_gradient,
    provenance,
)
from torch.optim._muon_engine.process_groups import (
    group_timeout,
    is_dry_run,
    meet,
    ranks_per_node,
    spanning_group,
    tell_failure,
    told_failures,
)
from torch.optim._muon_engine.runtime.buffers import Buffers, ExchangeError
from torch.optim._muon_engine.runtime.grad_status import GradStatuses
from torch.optim._muon_engine.runtime.pipeline import ParamState, Pipeline
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.owners import check_assignments
from torch.optim._muon_engine.schedule.specs import slots_for


if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.layouts import Layout
    from torch.optim._muon_engine.runtime import StepParam
    from torch.optim._muon_engine.schedule.specs import Schedule


log = logging.getLogger("torch.optim.muon")


class Engine:
    """Layouts, owners, schedule and buffers for one list of parameters.

    Args:
        config: whose functions, state and flags are used; they are read again at every step.
        params: all parameters, in the order of their indices.
        error: what is already wrong on this rank. It is raised once the other ranks know.
        former: the engine of the same optimizer before its parameters changed.

    Raises:
        AssertionError: an index is assigned to no rank, or to several.
        ValueError: a rank does not exist or holds no shard, shards do not tile a matrix, or the ranks
            disagree. Raised on every rank that shares a parameter with one that found it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[StepParam],
        error: BaseException | None = None,
        former: Engine | None = None,
    ) -> None:
        self.config = config
        self.params = [param.tensor for param in params]
        self.describe = [
            Key(index, 0, param.name).describe(param.tensor.shape)
            for index, param in enumerate(params)
        ]
        self.functions = functions_of(config)
        self._set_rank()
        self.assignments: dict[int, list[int]] = {}
        self.layouts: list[Layout] = []
        self.owners: list[int] = []
        self.trained = [not is_frozen(tensor) for tensor in self.params]
        # What the layouts are read from, to be compared at every step.
        self._provenance = [provenance(tensor) for tensor in self.params]
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}
        # The framework's own groups among some of those ranks.
        self._known: dict[tuple[int, ...], list[ProcessGroup]] = {}
        # For the flags as they last were.
        self._schedule: Schedule | None = None
        # One at a time, since another's buffers would only hold memory.
        self.pipeline: Pipeline | None = None
        # Those of the schedule, and by group those that its ranks have agreed on.
        self._flags = self._read_flags()
        self._agreed: dict[tuple[int, ...], tuple[bool, int] | None] = {}
        self._singles: dict[int, SingleMatrix] = {}
        self.statuses = GradStatuses()
        self.hints = Hints()
        # What went wrong in an earlier step, of which ranks may have made different parts.
        self.failure = ""
        # What runs the step that is under way.
        self._running: Pipeline | CallbackStep | None = None
        self._steps = 0
        changed: Sequence[Tensor] = self.params
        gone: dict[tuple[int, ...], list[ProcessGroup]] = {}
        if former is not None:
            changed, gone = self._take_over(former)
        # In a dry run with fake tensors, too, indices and loads have values.
        with unset_fake_temporarily():
            self._build(params, changed, gone, error)
        self.device = (
            self.functions.reader.device_of(self.params)
            if self.functions is not None
            else torch.device("cpu")
        )
        if self._schedule is not None and self.device.type != "cpu":
            self._pipeline(params).buffers.connect()
        self._log_construction(former)

    def _take_over(
        self, former: Engine
    ) -> tuple[list[Tensor], dict[tuple[int, ...], list[ProcessGroup]]]:
        """Goes on where ``former`` was.

        Returns the parameters that changed since, and the ranks, with their groups, that shared one which is gone.
        """
        self._steps, self.failure = former._steps, former.failure
        at = {id(tensor): index for index, tensor in enumerate(self.params)}
        for index, sub in former.statuses.compared:
            tensor = id(former.params[index])
            if tensor in at:
                self.statuses.compared.add((at[tensor], sub))
        self.hints = former.hints
        self.hints.parameters_changed()
        self._groups, self._known = dict(former._groups), dict(former._known)
        # Ranks that share no changed parameter are not asked here.
        self._agreed = dict(former._agreed)
        before = former.params, former._provenance
        changed, _ = _changes(*before, self.params, self._provenance)
        return changed, former._gone_groups(self.params, self._provenance)

    def _log_construction(self, former: Engine | None) -> None:
        """One line for each set of ranks that share parameters, such as a pipeline stage."""
        groups = {layout.group for layout in self.layouts}
        shared = [group for group in groups if len(group) > 1] or groups
        if not any(group[0] == self.rank for group in shared):
            return
        if not log.isEnabledFor(logging.INFO):
            return
        what = f"{len(self.params)} parameters, exchanged by functions of the user's"
        if self._schedule is not None:
            slots = slots_for(self.config.prefetch_count)
            what = report.in_one_line(self._schedule, self.rank, slots)
        why = ""
        if former is not None:
            came, _ = _changes(
                former.params, former._provenance, self.params, self._provenance
            )
            described = {id(p): text for p, text in zip(self.params, self.describe)}
            names = [described[id(tensor)] for tensor in came]
            gone = {id(p) for p in former.params} - {id(p) for p in self.params}
            why = (
                f", built anew: new, replaced, placed anew, frozen or unfrozen: {listed(names, 3) or 'none'}; gone: "
                f"{len(gone)}"
            )
        log.info("rank %d: Muon%s: %s", self.rank, why, what)

    def describe_steps(self, params: Sequence[StepParam]) -> str:
        """The page of :meth:`Muon.describe`."""
        self.config.check()
        advice = []
        if not self.matches(params):
            advice.append(
                "parameters changed since, and this is of before: the next step() reads them anew"
            )
        advice += self.hints.untrained(self.layouts)
        frozen = [self.describe[i] for i, on in enumerate(self.trained) if not on]
        if frozen:
            advice.append(f"frozen, and not in the schedule: {listed(frozen)}")
        if self.functions is None or not self.functions.run(self.config):
            owned = "\n".join(
                f"  rank {rank}: {listed([self.describe[i] for i in indices])}"
                for rank, indices in self.assignments.items()
            )
            return (
                f"Muon on rank {self.rank} of {self.world_size}: {len(self.params)} parameters, exchanged one by one by "
                f"functions of the user's. Owners:\n{owned or '  none'}"
                + "".join(f"\n- {line}" for line in advice)
            )
        parallel, ahead = flags = self._read_flags()
        current = self._schedule if flags == self._flags else None
        schedule = current or self._planned(params)
        if not parallel and self.world_size > 1:
            advice.append(
                "async_gpu_parallelism=False, which is for debugging, lets one owner work at a time"
            )
        if not ahead and any(len(group) > 1 for group in self._groups):
            advice.append("prefetch_count=0 leaves every gather to be waited for")
        return report.in_full(
            schedule, self.rank, self.world_size, slots_for(ahead), advice
        )

    def _set_rank(self) -> None:
        state = self.config.state
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = process_rank()
        self.world_size = dist.get_world_size() if initialized else 1
        if self.functions is not None and self.functions.run(self.config):
            # For an assign_fn of the user's.
            state.setdefault("rank", self.rank)
            state.setdefault("world_size", self.world_size)
        self.rank = state.get("rank", self.rank)
        self.world_size = state.get("world_size", self.world_size)

    # Building

    def _build(
        self,
        params: Sequence[StepParam],
        changed: Sequence[Tensor],
        gone: Mapping[tuple[int, ...], list[ProcessGroup]],
        error: BaseException | None,
    ) -> None:
        """Reads and assigns; agrees with those who share one of ``changed``, or shared one that is gone.

        Others are not called upon: they may not know of these parameters at all.
        """
        if self.functions is not None:
            names = [param.name for param in params]
            error = self.functions.read(self.params, names, error)
        try:
            if error is None:
                self.config.check()
                self._assign()
        except Exception as found:
            error = found
        if self.functions is not None:
            shared = {**gone, **self.functions.reader.sharing(changed)}
            agreed = self._agree(shared, params, error)
            groups = {l.group for l in self.layouts if len(l.group) > 1}
            agreed = {**self._agreed, **agreed}
            self._agreed = {group: agreed.get(group, self._flags) for group in groups}
            # Those who share a changed parameter may have replaced others each: they compare all anew.
            self.statuses.compared -= {
                layout.key[:2] for layout in self.layouts if layout.group in shared
            }
            settled = all(flags == self._flags for flags in self._agreed.values())
            if settled and self.functions.run(self.config):
                # Further groups are made here, where all ranks are, or else once all agree on the flags.
                self._make_schedule(params)
        elif error is not None:
            raise error

    def _assign(self) -> None:
        config = self.config
        assignments = config.assign_fn(list(self.params), config.state)
        if self.functions is None:
            # The call may have led, through wrappers, to the functions of a factory's config.
            self.functions = functions_of(config)
        check_assignments(assignments, self.describe, self.world_size)
        self.assignments = {rank: list(owned) for rank, owned in assignments.items()}
        if self.functions is None:
            return
        self.layouts = self.functions.layouts(self.params)
        self._check_stacks()
        if config.assign_fn == self.functions.assign:
            self.owners = self.functions.owners(self.params, self.layouts)
        else:
            owner_of = self._owner_of()
            self.owners = [owner_of[layout.key.index] for layout in self.layouts]
        for layout, owner in zip(self.layouts, self.owners, strict=True):
            if owner not in layout.shards:
                raise ValueError(
                    f"assign_fn gives {layout.describe()} to rank {owner}, which holds no piece of it; the ranks that "
                    f"do are {list(layout.group)}"
                )

    def _check_stacks(self) -> None:
        """Functions of the user's go by parameter, and ranks may hold other matrices of a stack each."""
        config, functions = self.config, self.functions
        if functions is None or (
            config.assign_fn == functions.assign and functions.run(config)
        ):
            return
        held = Counter(layout.key.index for layout in self.layouts)
        for index, tensor in enumerate(self.params):
            if tensor.ndim > 2 and held[index] != math.prod(tensor.shape[:-2]):
                raise ValueError(
                    f"{self.describe[index]} is a stack of matrices of which ranks hold different ones, which functions of "
                    "yours cannot tell apart; leave assign_fn, gather_fn and redistribute_fn as the factory made them"
                )

    def _owner_of(self) -> dict[int, int]:
        return {i: rank for rank, owned in self.assignments.items() for i in owned}

    def _agree(
        self,
        known: Mapping[tuple[int, ...], list[ProcessGroup]],
        params: Sequence[StepParam],
        error: BaseException | None,
    ) -> dict[tuple[int, ...], tuple[bool, int] | None]:
        """Makes the groups of the ranks in ``known``, and compares with them what there is to do.

        Returns the flags that each group has agreed on. None has a group of which a rank, or one linked to
        it, has yet to ask others about them: what these say has to reach it.
        """
        shared, names = [], []
        for ranks in larger_first(known):
            if len(ranks) == 1:
                self._groups[ranks] = None
                continue
            group = self._spanning_group(ranks, known[ranks], error)
            self._groups[ranks] = group
            self._known[ranks] = known[ranks]
            signatures = self._signatures(ranks, params) if error is None else []
            shared.append((group, signatures))
            names.append(ranks)
        unsettled = any(
            flags != self._flags for g, flags in self._agreed.items() if g not in known
        )
        told = agree(shared, error, unsettled)
        flags = (None if ask else self._flags for ask in told)
        return dict(zip(names, flags, strict=True))

    def _spanning_group(
        self,
        ranks: tuple[int, ...],
        known: Sequence[ProcessGroup],
        error: BaseException | None = None,
        what: str = "shards",
    ) -> ProcessGroup:
        try:
            return spanning_group(ranks, known, what)
        except RuntimeError as failed:
            shared = [l.describe() for l in self.layouts if l.group == ranks]
            raise error or RuntimeError(
                f"could not make a process group of ranks {list(ranks)}, which share {listed(shared) or 'parameters'}. One "
                f"of them ended, failed, or did not build its Muon within the timeout: {failed}"
            ) from failed

    def _signatures(
        self, ranks: tuple[int, ...], params: Sequence[StepParam]
    ) -> list[Signature]:
        found = []
        for layout, owner in zip(self.layouts, self.owners, strict=True):
            if layout.group != ranks:
                continue
            key = layout.key
            fields = {
                # No index: ranks with other experts or stages beside these count otherwise.
                "name": f"expert {key.expert}"
                if key.expert is not None
                else str(key.name),
                "shape": str(layout.shape),
                "dtype": str(layout.dtype),
                "placement": layout.source,
                "shards": layout.shards.digest,
                "requires_grad": str(self.trained[key.index]),
                "owner": str(owner),
                **params[key.index].formulas.signature(),
                "prefetch_count": str(self.config.prefetch_count),
                "async_gpu_parallelism": str(self.config.async_gpu_parallelism),
            }
            if len(ranks) > buckets.MAX_PEERS:
                fields["ranks per node"] = str(ranks_per_node())
            found.append(Signature(layout.describe(), tuple(fields.items())))
        return found

    # Parameters that change

    def matches(self, params: Sequence[StepParam]) -> bool:
        """Whether ``params`` are those that this engine was built for, as they were then."""
        return len(params) == len(self.params) and all(
            param.tensor is tensor and provenance(tensor) == before
            for param, tensor, before in zip(
                params, self.params, self._provenance, strict=True
            )
        )

    def rebuilt(
        self,
        params: Sequence[StepParam],
        states: MutableMapping[Tensor, dict[str, Any]],
        error: BaseException | None = None,
    ) -> Engine:
        """The engine for ``params``, which have changed. Ranks that share them all come here, or none.

        Momentum stays with its parameter, or goes to the parameter that took its place, if that has
        the same shape.
        """
        tensors = [param.tensor for param in params]
        if self.functions is not None:
            now = [provenance(tensor) for tensor in tensors]
            changed, _ = _changes(self.params, self._provenance, tensors, now)
            groups = {
                **self._gone_groups(tensors, now),
                **self.functions.reader.meeting(changed),
            }
            for ranks in larger_first(groups):
                if len(ranks) > 1:
                    timeout = group_timeout(groups[ranks])
                    meet(ranks, timeout, "found changed parameters in step()")
        engine = Engine(self.config, params, error, self)
        self.hand_over_momentum(params, states)
        return engine

    def hand_over_momentum(
        self,
        params: Sequence[StepParam],
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> None:
        """Gives the momentum of parameters that are gone to those that took their places."""
        tensors = [param.tensor for param in params]
        for old, new in _successors(self.params, tensors):
            if old in states and new not in states:
                states[new] = states[old]
        present = {id(tensor) for tensor in tensors}
        for old in self.params:
            if id(old) not in present:
                # Of a parameter that the optimizer does not have, state_dict() knows no index.
                states.pop(old, None)
        for tensor in tensors:
            state = states.get(tensor, {})
            buffer = state.get("momentum_buffer")
            if buffer is None:
                continue
            if buffer.shape != tensor.shape:
                log.warning(
                    "a parameter of shape %s took the place of one of shape %s; its momentum begins anew",
                    tuple(tensor.shape),
                    tuple(buffer.shape),
                )
                del state["momentum_buffer"]
            elif buffer.dtype != tensor.dtype or buffer.device != tensor.device:
                state["momentum_buffer"] = buffer.to(
                    device=tensor.device, dtype=tensor.dtype
                )

    def _gone_groups(
        self, tensors: Sequence[Tensor], provenances: Sequence[tuple]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """The ranks, and their group, that shared a parameter which is not among ``tensors`` as it was."""
        _, gone = _changes(self.params, self._provenance, tensors, provenances)
        indices = {id(tensor) for tensor in gone}
        found: dict[tuple[int, ...], list[ProcessGroup]] = {}
        for layout in self.layouts:
            if id(self.params[layout.key.index]) in indices:
                group = self._groups.get(layout.group)
                found[layout.group] = [] if group is None else [group]
        return found

    # Running

    def begin_step(self) -> None:
        """Counts a step, so that one which this rank breaks off is missed by the others."""
        self._steps += 1

    def step(
        self,
        params: Sequence[StepParam],
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> None:
        """Makes one optimizer step over ``params``, whose momentum is in ``states``."""
        if self.failure:
            raise RuntimeError(
                "this Muon cannot be trusted since a step failed: parameters and momentum of the ranks may not belong "
                "together. Rebuild it, and load a checkpoint from before that step. What happened: "
                f"{self.failure}"
            )
        self.raise_new_failure()
        try:
            prepared, problems = self._begin(params, states)
        except Exception as error:
            # Nothing has moved, and this rank may try again. Others may be in the exchange already.
            self._tell(f"{type(error).__name__} before the first exchange: {error}")
            raise
        try:
            if debugging.is_on() and isinstance(self._running, Pipeline):
                debugging.compare_gradients(
                    self.layouts, prepared, self._groups, self.rank
                )
            with _without_autocast(self.device):
                if isinstance(self._running, Pipeline):
                    self._running.run(prepared)
                else:
                    self._step_through_callbacks(prepared)
            _count_versions(params, states)
            if problems:
                raise RuntimeError("; ".join(problems))
            if self.device.type == "cpu":
                self._raise_mismatch()
        except ExchangeError as error:
            self._fail(error)
            found = [str(error), *self._others_say(error.ranks)]
            raise RuntimeError(". ".join(found)) from error
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            # It holds gradients, which are the user's to free.
            self._running = None

    def _begin(
        self,
        params: Sequence[StepParam],
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> tuple[dict[int, ParamState], list[str]]:
        """What comes before anything is sent: checks, momentum, buffers. Returns what :meth:`_prepare` does."""
        self.config.check()
        for formulas in {
            id(param.formulas): param.formulas for param in params
        }.values():
            formulas.check()
        if any(torch.is_complex(param.tensor) for param in params):
            raise RuntimeError("Muon does not support complex parameters")
        prepared, problems = self._prepare(params, states)
        self.hints.look(params, self.layouts, self.rank, self.world_size)
        on_engine = self.functions is not None and self.functions.run(self.config)
        self.statuses.begin(self._steps)
        self._running = self._pipeline(params) if on_engine else None
        return prepared, problems

    def _fail(self, error: BaseException) -> None:
        where = self._running.where if self._running is not None else ""
        text = f": {error}" if str(error) else ""
        failure = f"{type(error).__name__}{text}"
        if where and not isinstance(error, ExchangeError):
            failure = f"{type(error).__name__} in {where}{text}"
            # Its type and text stay: whoever catches it may go by these.
            if hasattr(error, "add_note"):
                error.add_note(f"Muon, rank {self.rank}, step {self._steps}: {where}")
        # What a framework of the user's can go on from is the user's to say.
        if self.functions is None:
            return
        self.failure = self.failure or failure
        self.statuses.forget()
        self._tell("" if isinstance(error, ExchangeError) else failure)

    def _tell(self, reason: str) -> None:
        """Tells peers, who wait for this rank and get an error that says nothing of it."""
        groups = (group for group in self._groups.values() if group is not None)
        tell_failure(groups, f"step {self._steps}", reason)

    def _others_say(self, ranks: tuple[int, ...]) -> list[str]:
        """After an exchange among ``ranks`` failed: what went wrong on the others, as far as they tell."""
        group = self._groups.get(ranks)
        told = told_failures(group, f"step {self._steps}") if group is not None else {}
        found = [f"Rank {rank} reports: {text}" for rank, text in told.items() if text]
        missing = [rank for rank, text in told.items() if text is None]
        if missing:
            found.append(
                f"Ranks {missing} did not come to this step(), or do not run any more. If they run on, and a GradScaler "
                "skipped it on them because of an inf in their own gradients, use ShardedGradScaler of "
                "torch.distributed.fsdp.sharded_grad_scaler, which skips it on all"
            )
        return found

    def raise_new_failure(self) -> None:
        """Raises RuntimeError where the last step, on an accelerator, is only now seen to have failed."""
        if self.failure:
            return
        try:
            self._raise_mismatch()
        except RuntimeError as error:
            self.failure = str(error)
            raise

    def _raise_mismatch(self) -> None:
        if is_dry_run():
            # No other rank says anything, and fake tensors have no values.
            self.statuses.forget()
            return
        mismatch = self.statuses.mismatch()
        if mismatch:
            raise RuntimeError(mismatch)

    def _prepare(
        self,
        params: Sequence[StepParam],
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> tuple[dict[int, ParamState], list[str]]:
        """What the step works on, by index, and what is wrong with this rank's gradients.

        Every momentum buffer is there from the first step on, whatever has a gradient, so that
        checkpoints are alike on all ranks.
        """
        prepared: dict[int, ParamState] = {}
        problems = []
        for index, (param, trained) in enumerate(
            zip(params, self.trained, strict=True)
        ):
            if not trained:
                continue
            state = states[param.tensor]
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = new_momentum_buffer(param.tensor)
            elif not placed_like(param.tensor, buffer):
                # A checkpoint, or a changed parameter, left it in another placement.
                buffer = place_like(param.tensor, buffer, self.describe[index])
            state["momentum_buffer"] = buffer
            problem = ""
            if param.grad is not None:
                problem = problem_with_gradient(param.tensor, param.grad)
            if problem:
                problems.append(f"{self.describe[index]}: {problem}")
            prepared[index] = ParamState(param, buffer, bool(problem))
        return prepared, problems

    def _pipeline(self, params: Sequence[StepParam]) -> Pipeline:
        flags = self._read_flags()
        changed = [ranks for ranks, agreed in self._agreed.items() if agreed != flags]
        if changed:
            self._agree_about_flags(changed, flags)
        if flags != self._flags:
            # Both flags count in the schedule: who works at one time, and how many slots there are.
            self._flags, self._schedule, self.pipeline = flags, None, None
        if self.pipeline is None:
            schedule = self._schedule or self._make_schedule(params)
            _, ahead = flags
            buffers = Buffers(schedule, self.rank, self._groups, self.device, ahead)
            self.pipeline = Pipeline(
                schedule, buffers, self.rank, self.device, self.statuses
            )
        return self.pipeline

    def _read_flags(self) -> tuple[bool, int]:
        return bool(self.config.async_gpu_parallelism), self.config.prefetch_count

    def _agree_about_flags(
        self, groups: Sequence[tuple[int, ...]], flags: tuple[bool, int]
    ) -> None:
        """Waits for the ranks that share matrices to have changed the flags of their configs alike.

        With other flags a rank starts other collectives, or in another order.

        Args:
            groups: those that have not agreed on ``flags``.
        """
        words = "async_gpu_parallelism and prefetch_count have to be changed alike"
        error = ""
        for ranks in forth_and_back(larger_first(groups)):
            group = self._groups.get(ranks)
            timeout = group_timeout([group] if group is not None else [])
            found = meet(
                ranks,
                timeout,
                "found async_gpu_parallelism or prefetch_count of its config changed",
                error or str(flags),
            )
            told = (text for text in found.values() if text.startswith(words))
            error = error or next(told, "")
            if not error and len(set(found.values())) > 1:
                error = f"{words} on all ranks, but are now, by rank: {found}"
        if error:
            raise ValueError(error)
        self._agreed.update(dict.fromkeys(groups, flags))

    def _make_schedule(self, params: Sequence[StepParam]) -> Schedule:
        """The schedule for the flags as they are, and the groups that it has collectives in."""
        schedule = self._schedule = self._planned(params)
        further = schedule.further_groups(self.rank)
        for ranks in larger_first(further):
            if ranks not in self._groups:
                # All that hold something with all members, who know it by new groups alike.
                known = [
                    group
                    for holders, groups in self._known.items()
                    if set(ranks) <= set(holders)
                    for group in groups
                ]
                self._groups[ranks] = self._spanning_group(
                    ranks, known, what=further[ranks]
                )
        return schedule

    def _planned(self, params: Sequence[StepParam]) -> Schedule:
        trained = [
            (layout, owner)
            for layout, owner in zip(self.layouts, self.owners, strict=True)
            if self.trained[layout.key.index]
        ]
        return buckets.make_schedule(
            [layout for layout, _ in trained],
            [owner for _, owner in trained],
            params[0].formulas.dtype if params else torch.float32,
            one_owner_at_a_time=not self.config.async_gpu_parallelism,
            ranks_per_node=ranks_per_node(),
            slots=slots_for(self.config.prefetch_count),
        )

    def _step_through_callbacks(self, params: Mapping[int, ParamState]) -> None:
        owner_of = self._owner_of()
        self._running = CallbackStep(
            self.config,
            self.functions,
            params,
            [owner_of[i] for i in range(len(self.params))],
            self.describe,
            self.layouts,
            self.rank,
            self._single,
            self._steps == 1,
        )
        self._running.run()

    def _single(self, index: int) -> SingleMatrix:
        """The exchange of parameter ``index`` alone, for a factory's function beside a user's."""
        made = self._singles.get(index)
        if made is None:
            at = [i for i, l in enumerate(self.layouts) if l.key.index == index]
            made = self._singles[index] = SingleMatrix(
                [self.layouts[i] for i in at],
                [self.owners[i] for i in at],
                self.rank,
                self._groups,
                self.device,
                self.statuses,
            )
        return made


def _changes(
    before: Sequence[Tensor],
    provenance_before: Sequence[tuple],
    now: Sequence[Tensor],
    provenance_now: Sequence[tuple],
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that are new or other than before, and those that are gone or were other.

    All of both, where the rest stands in another order: owners and buckets depend on the order.
    """
    known = dict(zip(map(id, before), provenance_before, strict=True))
    found = dict(zip(map(id, now), provenance_now, strict=True))
    kept = [key for key, value in known.items() if found.get(key) == value]
    same = set(kept)
    if kept != [key for key in found if key in same]:
        return list(now), list(before)
    changed = [tensor for tensor in now if id(tensor) not in same]
    return changed, [tensor for tensor in before if id(tensor) not in same]


def _successors(
    before: Sequence[Tensor], now: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Which tensor took which one's place: where as many came as went between two that stayed.

    At the end more may have come, as ``add_param_group`` brings them.
    """
    kept = {id(tensor) for tensor in before} & {id(tensor) for tensor in now}

    def gaps(tensors: Sequence[Tensor]) -> tuple[list[int], list[list[Tensor]]]:
        stayed: list[int] = []
        between: list[list[Tensor]] = [[]]
        for tensor in tensors:
            if id(tensor) in kept:
                stayed.append(id(tensor))
                between.append([])
            else:
                between[-1].append(tensor)
        return stayed, between

    (order_before, gone), (order_now, came) = gaps(before), gaps(now)
    if order_before != order_now:
        return []
    came[-1] = came[-1][: len(gone[-1])]
    return [
        pair
        for old, new in zip(gone, came, strict=True)
        if len(old) == len(new)
        for pair in zip(old, new, strict=True)
    ]


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would end the iteration in a dtype of its own, which does not travel."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _count_versions(
    params: Sequence[StepParam], states: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Tells autograd what was written. A DTensor does not see writes to its local tensor."""
    written = [
        tensor
        for param in params
        if param.grad is not None
        for tensor in (
            param.tensor,
            states.get(param.tensor, {}).get("momentum_buffer"),
        )
        if isinstance(tensor, DTensor)
    ]
    if written:
        torch.autograd.graph.increment_version(written)
