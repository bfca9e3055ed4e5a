"""Which parameters of a model Muon gets, and in which parameter groups."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import matrix_shape
from .._muon_engine.process_groups import listed, process_rank
from .._muon_split import Split
from .model import Model
from .names import is_fused
from .parameters import Shape
from .patterns import matching, matching_any


NamedParameter = tuple[str, nn.Parameter]


def partition(
    module: nn.Module,
    exclude: str | Sequence[str],
    verbose: bool,
    split: Mapping[str, Any] | None,
    takes_stacks: bool,
) -> tuple[list[Any], list[NamedParameter]]:
    """The parameters for Muon and the rest: :func:`torch.optim.muon.partition_named_parameters`."""
    fsdp2.check_resharded(module)
    parameters = list(fsdp1.logical_matrices(module))
    shapes: dict[str, Shape] = {}
    for _, _, tensors in parameters:
        shapes.update(tensors)
    excluded = matching_any(exclude, shapes)
    options = _options_by_name(split or {}, shapes, excluded)
    model = Model(module, shapes, takes_stacks)
    partition_of_model = _Partition(model, options, excluded)
    is_first_rank = process_rank() == 0
    for parameter_name, parameter, tensors in parameters:
        partition_of_model.add(parameter_name, parameter, tensors)
        if verbose and is_first_rank:
            frozen = "" if parameter.requires_grad else ", frozen"
            for tensor_name, shape in tensors:
                destination = partition_of_model.destination(tensor_name)
                print(f"{tensor_name} {shape} -> {destination}{frozen}")
    unused_splits = partition_of_model.unused_splits()
    if unused_splits and is_first_rank:
        warnings.warn(
            f"not for Muon, so not split: {listed(unused_splits)}", stacklevel=3
        )
    kernels = [tensor_name for tensor_name in shapes if model.is_kernel(tensor_name)]
    if kernels and not partition_of_model.groups and is_first_rank:
        warnings.warn(
            f"this model has no hidden matrix, but kernels: {listed(kernels)}. For Muon, put kernels into a parameter group with "
            "flatten=True, which makes each one matrix",
            stacklevel=3,
        )
    if split is None:
        return partition_of_model.matrices(), partition_of_model.others
    return partition_of_model.parameter_groups(), partition_of_model.others


class _Options(NamedTuple):
    """The options of a parameter group that say which matrices are in a parameter."""

    split: Split = Split()
    flatten: bool = False


class _Partition:
    """Sorts the parameters of a model, one by one, into those for Muon and the rest."""

    def __init__(
        self, model: Model, options: Mapping[str, _Options], excluded: set[str]
    ) -> None:
        self.groups: dict[_Options, list[NamedParameter]] = {}
        self.others: list[NamedParameter] = []
        self._model = model
        self._options = options
        self._excluded = excluded
        # Name of a tensor -> why it is not for Muon; "" if it is.
        self._reasons: dict[str, str] = {}

    def add(
        self,
        parameter_name: str,
        parameter: nn.Parameter,
        tensors: Sequence[tuple[str, Shape]],
    ) -> None:
        """Sorts a parameter. ``tensors``: itself, or those that a flat parameter has."""
        is_tied = self._model.is_tied_to_embedding(parameter)
        # None for the rest.
        destinations: set[_Options | None] = set()
        # Destination in words -> a tensor that has it.
        examples: dict[str, str] = {}
        for tensor_name, _ in tensors:
            reason = "embedding" if is_tied else self._reason(tensor_name)
            self._reasons[tensor_name] = reason
            destinations.add(None if reason else self._options[tensor_name])
            examples[reason or self._described(tensor_name)] = tensor_name
        if len(destinations) > 1:
            raise fsdp1.mixed(parameter_name, examples)
        (options,) = destinations
        if options is None:
            self.others.append((parameter_name, parameter))
        else:
            group = self.groups.setdefault(options, [])
            group.append((parameter_name, parameter))

    def destination(self, tensor_name: str) -> str:
        """Where a tensor goes, and why."""
        reason = self._reasons[tensor_name]
        if reason:
            return f"rest: {reason}"
        described = self._described(tensor_name)
        if self._model.has_few_rows(tensor_name):
            # A head that its size does not give away. The user knows.
            return f"{described}, few rows"
        return described

    def unused_splits(self) -> list[str]:
        """The tensors with a split that are not for Muon."""
        return [
            tensor_name
            for tensor_name, reason in self._reasons.items()
            if reason and self._options[tensor_name].split.sizes
        ]

    def matrices(self) -> list[NamedParameter]:
        """The parameters for Muon."""
        return list(chain.from_iterable(self.groups.values()))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters for Muon, with their options."""
        return [
            {
                "params": parameters,
                "split": options.split.option,
                "flatten": options.flatten,
            }
            for options, parameters in self.groups.items()
        ]

    def _reason(self, tensor_name: str) -> str:
        if tensor_name in self._excluded:
            return "excluded"
        return self._model.why_not(tensor_name, self._options[tensor_name].flatten)

    def _described(self, tensor_name: str) -> str:
        """What Muon does with a tensor."""
        options = self._options[tensor_name]
        words = "Muon"
        if options.split.sizes:
            words += f", split {options.split.option}"
        elif is_fused(tensor_name):
            words += ", left whole: named like a fused weight"
        if options.flatten:
            words += ", flattened"
        return words


def _options_by_name(
    splits: Mapping[str, Any], shapes: Mapping[str, Shape], excluded: set[str]
) -> dict[str, _Options]:
    """Name of a tensor -> its options. The last pattern that matches a name decides."""
    options = dict.fromkeys(shapes, _Options())
    for pattern, split_option in splits.items():
        split = Split.of(split_option)
        for tensor_name in matching(pattern, shapes) - excluded:
            options[tensor_name] = _options_of_split(split, shapes[tensor_name])
    return options


def _options_of_split(split: Split, shape: Shape) -> _Options:
    """A split that fits the matrices of a stack is for these. One that fits the flattened parameter is for this."""
    if len(shape) < 2:
        return _Options()
    if split.problem_with(shape[-2:]):
        flattened_shape = matrix_shape(shape, flatten=True)
        if not split.problem_with(flattened_shape):
            return _Options(split, flatten=True)
    return _Options(split)
