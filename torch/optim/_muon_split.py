"""How a fused weight is cut into matrices: the option ``split`` of a parameter group."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """How a fused weight is cut into matrices; without ``sizes`` not at all. Along ``dim``, the lines of the parts
    repeat: ``sizes[0]`` lines of the first part, ``sizes[1]`` of the second and so on, ``repeats`` times. A
    part is all of its lines, joined in order.
    """

    sizes: tuple[int, ...] = ()
    repeats: int = 1
    dim: int = 0

    @classmethod
    def of(cls, option: Any) -> "Split":
        """From an option: None, a sequence of rows, or a dict of "sizes", "repeats" and "dim"."""
        if option is None:
            return cls()
        if not isinstance(option, Mapping):
            return cls(_sizes_of(option))
        if not option.keys() <= set(cls._fields) or option.get("sizes") is None:
            return cls(_malformed(option))
        sizes = _sizes_of(option["sizes"])
        return cls(sizes, option.get("repeats", 1), option.get("dim", 0))

    @property
    def option(self) -> tuple[int, ...] | dict[str, Any] | None:
        """What :meth:`of` takes, in one spelling for equal splits: a tuple where that says it all."""
        if not self.sizes:
            return None
        return self.sizes if self[1:] == (1, 0) else self._asdict()

    @property
    def lines(self) -> int:
        return sum(self.sizes) * self.repeats

    @property
    def problem(self) -> str:
        """Why no matrix can be cut; "" if one of the right size can."""
        numbers = *self.sizes, self.repeats
        are_counts = all(type(n) is int and n > 0 for n in numbers)
        if are_counts and type(self.dim) is int and self.dim in (0, 1):
            return ""
        is_malformed = isinstance(self.sizes[0], str)
        found = self.sizes[0] if is_malformed else self.option
        return f"split must be positive ints, or a dict of 'sizes', 'repeats' and 'dim' (0 or 1), but is {found}"

    def problem_with(self, shape: Sequence[int], stacked: int = 0) -> str:
        """Why a matrix of ``shape`` cannot be cut; "" if it can. ``stacked`` dimensions come before its own."""
        if self.problem:
            return self.problem
        length = shape[self.dim]
        if self.lines == length:
            return ""
        times = f" x {self.repeats}" if self.repeats > 1 else ""
        return f"split {self.sizes}{times} adds up to {self.lines}, but dimension {self.dim + stacked} has {length}"

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        """The parts of a weight that is split, as views; with repeats, ``dim`` is two dimensions (repeats, size)."""
        if self.repeats == 1:
            return matrix.split(self.sizes, self.dim)
        repeats = matrix.unflatten(self.dim, (self.repeats, -1))
        return repeats.split(self.sizes, self.dim + 1)

    def joined(self, part: Tensor) -> Tensor:
        """A part as a matrix; a copy if its lines are apart."""
        return part.flatten(self.dim, self.dim + 1) if part.ndim > 2 else part

    def shapes_of_parts(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """The shapes of the parts of a matrix of ``shape``; its own if it is not split."""
        if not self.sizes:
            return [shape]
        rows, columns = shape
        shapes: list[tuple[int, int]] = []
        for size in self.sizes:
            lines = size * self.repeats
            shapes.append((rows, lines) if self.dim else (lines, columns))
        return shapes


def _sizes_of(option: Any) -> tuple[Any, ...]:
    """The sizes in a sequence."""
    # An iterator would be empty the next time, and a set has no order.
    sizes = tuple(option) if hasattr(option, "__getitem__") else (option,)
    return sizes or _malformed(option)


def _malformed(option: Any) -> tuple[Any, ...]:
    """Sizes that :meth:`Split.problem_with` refuses. An error here would leave other ranks waiting for this one."""
    return (repr(option),)
