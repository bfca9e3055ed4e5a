"""The engine that serves one optimizer: built once, run at every step."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon import _check_ns, _Hyper, _NS_DTYPE, _Work
from torch.optim._muon_engine.agreement import agree, Fact
from torch.optim._muon_engine.runtime.buffers import Exchange
from torch.optim._muon_engine.functions import (
    is_frozen,
    process_count,
    process_rank,
)
from torch.optim._muon_engine.process_groups import group_timeout, spanning_group
from torch.optim._muon_engine.layouts import Key, Layout
from torch.optim._muon_engine.local import (
    new_momentum_buffer,
    place_like,
    placed_like,
    problem_with_gradient,
    provenance,
)
from torch.optim._muon_engine.meeting import meet
from torch.optim._muon_engine.schedule.owners import check_assignments
from torch.optim._muon_engine.runtime.pipeline import (
    OUT_OF_STEP,
    Pipeline,
    SOME_LACK,
    SOME_WRONG,
)
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.single import SingleExchange
from torch.optim._muon_engine.callbacks import FunctionStep


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.local import GradientPlacing


_OUT_OF_STEP = (
    "the ranks are not in the same step: one of them left a step() that the others made, or made one more. Found in "
    "the exchange of "
)
_WRONG_GRADIENT = (
    "a rank that holds these has a gradient that it cannot use, and says so itself: "
)
_SPLIT_GRADIENT = (
    "some of the ranks that hold these have a gradient for them and some have none. All holders need one, zeros if "
    "need be (an unused expert, a branch that one rank skips), or none of them: "
)


def _without_autocast(kind: str) -> AbstractContextManager:
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


class Engine:
    """Owners, schedule and buffers for one list of parameters.

    Args:
        config: whose functions, state and flags are used; they are read again at every step.
        params: all parameters, in the order of their indices.
        names: their names, None where not known.
        hypers: the hyperparameters of each one's group.
        error: what is already wrong on this rank. It is raised once the other ranks know.
        former: the engine of the same optimizer before parameters were added.

    Raises:
        AssertionError: an index is assigned to no rank, or to several.
        ValueError: a rank does not exist or holds no piece, pieces do not tile a matrix, or the ranks
            disagree. Raised on every rank that shares a parameter with one that found it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        hypers: Sequence[_Hyper],
        error: BaseException | None = None,
        former: Engine | None = None,
    ) -> None:
        self.config = config
        self.params = list(params)
        self.names = list(names)
        self.built = config._built()
        self.rank, self.world_size = process_rank(), process_count()
        if config._runs_on_engine():
            # For an assign_fn of the user's. What an earlier life of the config left is replaced.
            told = self.built.told
            found = {"rank": self.rank, "world_size": self.world_size}
            for name, value in found.items():
                if config.state.get(name) == told.get(name):
                    config.state[name] = told[name] = value
        self.rank = config.state.get("rank", self.rank)
        self.world_size = config.state.get("world_size", self.world_size)
        self.describe = [
            Key(index, 0, name).describe(param.shape)
            for index, (param, name) in enumerate(zip(params, names, strict=True))
        ]
        self.assignments: dict[int, list[int]] = {}
        self.layouts: list[Layout] = []
        self.owners: list[int] = []
        self.planned: list[bool] = []
        self.distrusted = ""
        self.calls = 0
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}
        self._pipelines: dict[tuple[bool, int], Pipeline] = {}
        self._singles: dict[int, SingleExchange] = {}
        self._placings: dict[int, GradientPlacing | None] = {}
        # Whether a rank that is linked to this one has several groups.
        self._linked = False
        self._has_grad: list[bool] = []
        self._split: list[int] = []
        self._received: list[int] = []
        fresh = self.params
        if former is not None:
            self.calls = former.calls
            self._groups = dict(former._groups)
            self._placings = former._placings
            self._linked = former._linked
            fresh = self._changed_since(former)
        self._read_from = [provenance(param) for param in self.params]
        if self.built is not None:
            error = self.built.prepare(self.params, self.names, error)
        self._build(hypers, error, fresh)

    def serves(self, params: Sequence[Tensor]) -> bool:
        """Whether this engine was built for just these parameters."""
        return len(params) == len(self.params) and all(
            a is b for a, b in zip(params, self.params, strict=True)
        )

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Whether ``params`` are those that this engine was built for, as they were then."""
        return self.serves(params) and all(
            provenance(param) == read_from
            for param, read_from in zip(params, self._read_from, strict=True)
        )

    def _changed_since(self, former: Engine) -> list[Tensor]:
        """The parameters whose groups have to agree anew, because ``former`` was built for others."""
        known = dict(zip(map(id, former.params), former._read_from, strict=True))
        kept = [p for p in self.params if known.get(id(p)) == provenance(p)]
        order = [id(param) for param in kept]
        if [id(p) for p in former.params if id(p) in set(order)] != order:
            return list(self.params)
        if len(kept) < len(former.params):
            return list(self.params)
        return [param for param in self.params if id(param) not in set(order)]

    def meet_to_rebuild(self, params: Sequence[Tensor]) -> None:
        """Waits for all ranks that share a parameter with this one, before any collective.

        Only those that found that their parameters have changed come here.
        """
        if self.built is None:
            return
        groups = {**self.built.sharing(self.params), **self.built.meeting(params)}
        for ranks in sorted(groups, key=lambda ranks: (-len(ranks), ranks)):
            if len(ranks) > 1:
                meet(ranks, group_timeout(groups[ranks]), "found changed parameters")

    def begin_step(self) -> None:
        """Counts a step, so that one which this rank breaks off is missed by the others."""
        self.calls += 1

    # Building

    def _build(
        self,
        hypers: Sequence[_Hyper],
        error: BaseException | None,
        fresh: Sequence[Tensor],
    ) -> None:
        """Assigns owners; agrees on them with those who share one of ``fresh``, and no others.

        Others are not called upon: they may not know of these parameters at all.
        """
        try:
            if error is None:
                self._assign()
        except Exception as found:
            error = found
        if self.built is None:
            if error is not None:
                raise error
            return
        self._agree(hypers, error, fresh)
        self._pipelines.clear()
        self._singles.clear()
        self.built.engine = self

    def _assign(self) -> None:
        config, built = self.config, self.built
        assignments = config.assign_fn(list(self.params), config.state)
        if built is None:
            # The call may have led, through wrappers, to the functions of a factory's config.
            built = self.built = config._built()
        if built is not None:
            self.layouts = built.layouts(self.params)
        check_assignments(assignments, self.describe, self.world_size)
        self.assignments = {rank: list(owned) for rank, owned in assignments.items()}
        self.planned = [not is_frozen(param) for param in self.params]
        owner_of = {i: rank for rank, owned in assignments.items() for i in owned}
        if built is None:
            self.owners = [owner_of[i] for i in range(len(self.params))]
        elif config.assign_fn == built.assign:
            self.owners = built.owners(self.params, self.layouts)
        else:
            self.owners = [owner_of[layout.key.index] for layout in self.layouts]
        for layout, owner in zip(
            self.layouts, self.owners if built is not None else [], strict=True
        ):
            if owner not in layout.ranks:
                raise ValueError(
                    f"assign_fn gives {layout.describe()} to rank {owner}, which holds no piece of it; the ranks that "
                    f"do are {list(layout.group)}"
                )

    def _agree(
        self,
        hypers: Sequence[_Hyper],
        error: BaseException | None,
        fresh: Sequence[Tensor],
    ) -> None:
        """Makes the groups and compares, with all who share one of ``fresh``, what there is to do."""
        known = self.built.sharing(fresh)
        shared = []
        # Larger groups first, then by rank: members of several groups meet in one global order.
        for ranks in sorted(known, key=lambda ranks: (-len(ranks), ranks)):
            if len(ranks) == 1:
                self._groups[ranks] = None
                continue
            group = spanning_group(ranks, known[ranks])
            self._groups[ranks] = group
            shared.append((group, self._facts(ranks, hypers) if error is None else []))
        several = len({layout.group for layout in self.layouts}) > 1
        self._linked = agree(shared, error, self._linked or several)

    def _facts(self, ranks: tuple[int, ...], hypers: Sequence[_Hyper]) -> list[Fact]:
        return [
            Fact(
                layout.describe(),
                (
                    # No index: ranks with other experts or stages beside these count otherwise.
                    (
                        "name",
                        str(layout.key.name)
                        if layout.key.expert is None
                        else f"expert {layout.key.expert}",
                    ),
                    ("shape", str(layout.shape)),
                    ("dtype", str(layout.dtype)),
                    ("placement", layout.source),
                    (
                        "pieces",
                        hashlib.sha256(
                            repr(
                                (layout.ranks, layout.shards, layout.contributions)
                            ).encode()
                        ).hexdigest()[:12],
                    ),
                    ("requires_grad", str(self.planned[layout.key.index])),
                    ("owner", str(owner)),
                    *(
                        # A tensor's value may change between the ranks' reading it; its kind may not.
                        (name, "a Tensor" if isinstance(value, Tensor) else str(value))
                        for name, value in hypers[layout.key.index]._asdict().items()
                    ),
                    ("prefetch_count", str(self.config.prefetch_count)),
                    ("async_gpu_parallelism", str(self.config.async_gpu_parallelism)),
                ),
            )
            for layout, owner in zip(self.layouts, self.owners, strict=True)
            if layout.group == ranks
        ]

    @property
    def device(self) -> torch.device:
        """Where the buffers of the exchanges are: with the parameters."""
        return self.built.device_of(self.params)

    # Running

    @torch._disable_dynamo
    def step(self, work: list[_Work], keep: Callable[[int, Tensor], None]) -> None:
        """Makes one optimizer step over ``work``, one entry a parameter.

        Args:
            work: the parameters of construction, in that order, with what they have now.
            keep: called with index and buffer where a momentum buffer is made.

        Raises:
            RuntimeError: holders of a matrix are at odds: some have a gradient and some have none, one
                has a wrong one, or one is in another step. Their parameters and momentum may not
                belong together from then on, so later steps raise as well.
        """
        self.raise_if_distrusted(work, keep)
        self.config._check_flags()
        for param, _, _, hyper in work:
            _check_ns((0, 0), hyper.ns_coefficients, hyper.ns_steps)
            if torch.is_complex(param):
                raise RuntimeError("Muon does not support complex parameters")
        try:
            # Autocast would end the iteration in a dtype of its own, which does not travel.
            kind = self.device.type if self.built is not None else "cpu"
            with _without_autocast(kind):
                self._step(work, keep)
        except BaseException as error:
            # What a framework of the user's can go on from is the user's to say.
            if self.built is not None:
                self.distrusted = self.distrusted or f"{type(error).__name__}: {error}"
            raise

    def _step(self, work: list[_Work], keep: Callable[[int, Tensor], None]) -> None:
        kept: set[int] = set()

        def keep_and_note(index: int, momentum_buffer: Tensor) -> None:
            kept.add(index)
            keep(index, momentum_buffer)

        self._run(work, keep_and_note)
        if self.built is None or not self._linked or self.calls > 1:
            return
        # Where ranks are linked through several groups, all parameters have momentum after the first
        # step. torch.distributed.checkpoint makes a step of its own where an optimizer's state is
        # empty, and cannot save one that some parameters lack. Of two ranks that share a parameter,
        # one may have state for another, which the other rank does not hold, and not step along.
        for index, one in enumerate(work):
            missing = one.momentum_buffer is None and index not in kept
            if missing and self.planned[index]:
                keep(index, new_momentum_buffer(one.param))

    def _run(self, work: list[_Work], keep: Callable[[int, Tensor], None]) -> None:
        work = self._with_placed_momentum(work, keep)
        problems = {
            index: problem
            for index, one in enumerate(work)
            if one.grad is not None
            and (problem := problem_with_gradient(one.param, one.grad))
        }
        own = "; ".join(f"{self.describe[i]}: {text}" for i, text in problems.items())
        if not self.config._runs_on_engine():
            if own:
                raise RuntimeError(own)
            self._step_through_functions(work, keep)
            return
        self._follow_unfreezing(work)
        # What is wrong here is told to the other holders first: they are waiting.
        at_odds = self._pipeline().run(work, keep, self.calls, problems)
        if own:
            raise RuntimeError(own)
        self._raise_if_at_odds(at_odds)

    def check_trust(
        self, work: Sequence[_Work], keep: Callable[[int, Tensor], None]
    ) -> str:
        """Why this engine cannot be trusted any more, with what the last step left to be seen."""
        for pipeline in self._pipelines.values():
            try:
                self._raise_if_at_odds(pipeline.disagreements(work, keep))
            except RuntimeError as error:
                self.distrusted = self.distrusted or str(error)
        return self.distrusted

    def raise_if_distrusted(
        self, work: Sequence[_Work], keep: Callable[[int, Tensor], None]
    ) -> None:
        """Raises RuntimeError where an earlier step failed."""
        if self.check_trust(work, keep):
            raise RuntimeError(
                "this Muon cannot be trusted since a step failed: parameters and momentum of the ranks may not belong "
                "together. Rebuild it, and load a checkpoint from before that step. What happened: "
                f"{self.distrusted}"
            )

    def _step_through_functions(
        self, work: list[_Work], keep: Callable[[int, Tensor], None]
    ) -> None:
        owner_of = {i: rank for rank, owned in self.assignments.items() for i in owned}
        owners = [owner_of[i] for i in range(len(work))]
        held = {
            layout.key.index: (layout.shape, layout.shard_of(self.rank))
            for layout in self.layouts
        }
        self._has_grad = [one.grad is not None for one in work]
        self._split, self._received = [], []
        groups = {layout.key.index: layout.group for layout in self.layouts}
        FunctionStep(
            self.config,
            work,
            owners,
            self.describe,
            held,
            groups,
            list(groups) or range(len(work)),
            self.rank,
            keep,
            self._split,
        ).run()
        for index in self._received:
            # An empty piece: its holders keep a buffer all the same, as all the others do.
            if work[index].momentum_buffer is None:
                keep(index, new_momentum_buffer(work[index].param))
        if self._split:
            named = ", ".join(self.describe[index] for index in self._split)
            raise RuntimeError(_SPLIT_GRADIENT + named)

    def _with_placed_momentum(
        self, work: list[_Work], keep: Callable[[int, Tensor], None]
    ) -> list[_Work]:
        """``work`` with buffers that a checkpoint brought in another placement put right."""
        placed = []
        for index, one in enumerate(work):
            buffer = one.momentum_buffer
            if buffer is not None and not placed_like(one.param, buffer):
                buffer = place_like(one.param, buffer, self.describe[index])
                keep(index, buffer)
                one = one._replace(momentum_buffer=buffer)
            placed.append(one)
        return placed

    def _follow_unfreezing(self, work: Sequence[_Work]) -> None:
        """A parameter that was frozen when the schedule was made, and is no more, needs a new schedule."""
        unfrozen = [
            one.param
            for planned, one in zip(self.planned, work, strict=True)
            if not planned and not is_frozen(one.param)
        ]
        if unfrozen:
            self._build([one.hyper for one in work], None, unfrozen)

    def _pipeline(self) -> Pipeline:
        parallel = bool(self.config.async_gpu_parallelism)
        ahead = max(0, self.config.prefetch_count)
        made = self._pipelines.get((parallel, ahead))
        if made is None:
            chosen = [
                (layout, owner)
                for layout, owner in zip(self.layouts, self.owners, strict=True)
                if self.planned[layout.key.index]
            ]
            schedule = make_schedule(
                [layout for layout, _ in chosen],
                [owner for _, owner in chosen],
                _NS_DTYPE,
                one_owner_at_a_time=not parallel,
            )
            exchange = Exchange(schedule, self.rank, self._groups, self.device, ahead)
            made = Pipeline(
                schedule,
                exchange,
                self.rank,
                self._placings,
                deferred=self.device.type != "cpu",
            )
            # One set of buffers at a time: another setting's would only hold memory.
            self._pipelines = {(parallel, ahead): made}
        return made

    def _raise_if_at_odds(self, verdicts: Mapping[int, int]) -> None:
        if not verdicts:
            return
        layouts = next(iter(self._pipelines.values())).schedule.layouts
        for bit, text in (
            (OUT_OF_STEP, _OUT_OF_STEP),
            (SOME_WRONG, _WRONG_GRADIENT),
            (SOME_LACK, _SPLIT_GRADIENT),
        ):
            named = [
                layouts[m].describe() for m in sorted(verdicts) if verdicts[m] & bit
            ]
            if named:
                raise RuntimeError(text + ", ".join(named))

    # One parameter at a time, for a config of which the other function was replaced

    def gather_one(self, index: int, piece: Tensor) -> Tensor | None:
        """Brings ``piece`` to the owner of parameter ``index``; the whole there, None elsewhere."""
        return self._single(index).gather(piece, self._has_grad[index], self.calls)

    def redistribute_one(self, index: int, update: Tensor | None) -> Tensor:
        """Sends ``update`` from the owner of parameter ``index``; returns this rank's piece."""
        single = self._single(index)
        piece = single.redistribute(update, self.params[index])
        if single.is_split:
            self._split.append(index)
        elif single.is_updated:
            self._received.append(index)
        return piece

    def _single(self, index: int) -> SingleExchange:
        made = self._singles.get(index)
        if made is None:
            at = [
                i for i, layout in enumerate(self.layouts) if layout.key.index == index
            ]
            made = SingleExchange(
                [self.layouts[i] for i in at],
                [self.owners[i] for i in at],
                self.rank,
                self._groups,
                self.device,
            )
            self._singles[index] = made
        return made
