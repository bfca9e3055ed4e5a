"""How the ranks build an engine together: they read their parameters, assign owners, agree, and make the schedule."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .agreement import agreeing, Agreement, Signature
from .config import DistributedConfig
from .factory import is_from_factory, users_functions
from .layouts.dtensor import device_of
from .layouts.layout import Layout
from .layouts.reader import describe_state, ParamInfo, Reader
from .process_groups import (
    larger_first,
    Ranks,
    spanning_group,
)
from .runtime.params import Param
from .schedule import buckets
from .schedule.owners import choose_owners
from .schedule.packs import slots_for
from .schedule.schedule import Schedule


class Plan(NamedTuple):
    """The owners and the schedule, which are the same on all ranks that share matrices."""

    # Has all layouts. Its buckets lack the matrices of frozen parameters.
    schedule: Schedule = Schedule((), (), ())
    # Global rank -> the indices of the parameters whose first matrix it owns.
    assignments: Mapping[int, Sequence[int]] = {}


class Setting(NamedTuple):
    """What an engine is built from, on this rank. Without a ``reader``, the user's functions know the layouts."""

    config: DistributedConfig
    params: Sequence[Param]
    reader: Reader | None
    rank: int
    world_size: int

    @property
    def is_packed(self) -> bool:
        """Whether both functions that move data are the factory's."""
        return self.reader is not None and not users_functions(self.config)

    @property
    def tensors(self) -> list[Tensor]:
        return [param.tensor for param in self.params]

    @property
    def device(self) -> torch.device:
        """The device of the communication buffers."""
        groups = self.reader.sharing.values() if self.reader is not None else ()
        return device_of(self.tensors, chain.from_iterable(groups))


def build(
    setting: Setting,
    before: Collection[Tensor],
    check: Callable[[], None],
    is_lasting: bool,
    agreement: Agreement,
) -> Plan:
    """Makes the plan together with the other ranks, and fills ``agreement``. The ranks compare which parameters are not
    among those ``before`` a change, so that all replace the same ones. All of them raise an error of ``check``.
    """
    config, reader = setting.config, setting.reader
    if reader is None:
        check()
        config.check()
        _, assignments = _assigned(setting, [])
        return Plan(assignments=assignments)
    infos: list[ParamInfo] = []
    for param in setting.params:
        infos.append(ParamInfo(param.config_index, param.key.name, param.form))
    with agreeing(reader, agreement, is_lasting) as signatures:
        layouts = reader.read(setting.tensors, infos, check)
        config.check()
        owners, assignments = _assigned(setting, layouts)
        for ranks, signature in _signatures(setting, layouts, owners, before):
            signatures.setdefault(ranks, []).append(signature)
    schedule = buckets.make_schedule(
        layouts,
        owners,
        one_owner_at_a_time=not config.async_gpu_parallelism,
        slots=slots_for(config.prefetch_count),
    )
    if setting.is_packed:
        _make_further_groups(schedule, setting.rank, reader, agreement)
    return Plan(schedule, assignments)


def _assigned(
    setting: Setting, layouts: Sequence[Layout]
) -> tuple[list[int], Mapping[int, Sequence[int]]]:
    """The owner of each layout, and the parameters of each owner."""
    reader, config = setting.reader, setting.config
    if reader is not None:
        describe_state(reader, config.state)
        if not setting.is_packed:
            from .functions import check_stacks

            check_stacks(setting.params, layouts)
    if reader is None or not is_from_factory(config, "assign"):
        from .functions import call_assign_fn

        ranks = {}
        if reader is not None:
            ranks = {"rank": setting.rank, "world_size": setting.world_size}
        return call_assign_fn(
            config, setting.params, layouts, ranks, setting.world_size
        )
    return choose_owners(setting.tensors, layouts)


def _signatures(
    setting: Setting,
    layouts: Sequence[Layout],
    owners: Sequence[int],
    before: Collection[Tensor],
) -> Iterator[tuple[Ranks, Signature]]:
    """The holders of each matrix, and the values that they compare."""
    config = setting.config
    of_config = {
        # Before the device, which follows from it.
        "functions of your own": str(users_functions(config)),
        "device": setting.device.type if setting.is_packed else "",
        "prefetch_count": str(config.prefetch_count),
        "async_gpu_parallelism": str(bool(config.async_gpu_parallelism)),
    }
    options: dict[int, dict[str, str]] = {}
    for param in setting.params:
        if param.param_group not in options:
            options[param.param_group] = param.formulas.option_texts() | of_config
    for layout, owner in zip(layouts, owners):
        key, param = layout.key, setting.params[layout.key.index]
        fields = {
            # No index: ranks that also hold other experts or stages count differently.
            "name": str(key.name) if key.expert is None else f"expert {key.expert}",
            # Before the shape, which follows from it.
            "split": options[param.param_group]["split"],
            "shape": str(layout.shape),
            "dtype": str(param.tensor.dtype),
            "grad_dtype": str(layout.dtype),
            "placement": layout.placement,
            "shards": layout.shards.digest,
            "requires_grad": str(not param.frozen),
            "replaced": str(param.tensor not in before),
            "owner": str(owner),
        }
        fields |= options[param.param_group]
        yield layout.holders, Signature(layout.describe(), tuple(fields.items()))


def _make_further_groups(
    schedule: Schedule, rank: int, reader: Reader, agreement: Agreement
) -> None:
    """Makes the groups of relays."""
    further = schedule.further_groups(rank)
    for ranks in larger_first(further.keys() - agreement.groups.keys()):
        candidates = []
        for sharing_ranks, groups in reader.sharing.items():
            if {*ranks} <= {*sharing_ranks}:
                candidates += groups
        group = spanning_group(ranks, candidates, further[ranks])
        agreement.groups[ranks] = group
