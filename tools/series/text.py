"""The bytes of a file, and what is cut out of them."""

import re
from collections.abc import Collection, Sequence
from typing import Any


class Text:
    """The bytes of a file, and what is cut out of them."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        # (start, end, what is there instead).
        self._cuts: list[tuple[int, int, bytes]] = []

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(
            node.end_lineno, node.end_col_offset
        )

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def with_brackets(self, start: int, end: int) -> tuple[int, int]:
        """The span of an expression with the brackets around it, of which a call's may be some."""
        while True:
            before = self.text[:start].rstrip()
            after = len(self.text) - len(self.text[end:].lstrip())
            if not (before.endswith(b"(") and self.text.startswith(b")", after)):
                return start, end
            start, end = len(before) - 1, after + 1

    def replace(self, start: int, end: int, new: bytes = b"") -> None:
        self._cuts.append((start, end, new))

    def made(self) -> bytes:
        """The text with all cuts. One inside of another is a part of it."""
        pieces: list[bytes] = []
        at = 0
        for start, end, new in sorted(self._cuts, key=lambda cut: (cut[0], -cut[1])):
            if start >= at:
                pieces += [self.text[at:start], new]
                at = end
        return b"".join([*pieces, self.text[at:]])

    def part(self, start: int, end: int) -> bytes:
        """A part of :meth:`made`, before the rest is."""
        inner = Text(self.text[start:end])
        for first, last, new in self._cuts:
            if start <= first < end:
                inner.replace(first - start, min(last, end) - start, new)
        return inner.made()

    def remove_lines(self, first: int, last: int) -> None:
        """Removes lines, the comment before them and the empty lines before that."""
        start = first - 1
        indent = re.match(rb" *", self._line(start))
        comment = (indent.group() if indent else b"") + b"#"
        while start and self._line(start - 1).startswith(comment):
            start -= 1
        # Before a line that goes on, the empty lines stay.
        following = self._line(last)
        before = indent.group() if indent else b""
        goes_on = following.strip() != b"" and following.startswith(before)
        while not goes_on and start and self._line(start - 1) == b"\n":
            start -= 1
        while start == 0 and self._line(last) == b"\n":
            last += 1
        self.replace(self._starts[start], self._starts[last])

    def has_own_lines(self, start: int, end: int) -> bool:
        """Whether there is nothing else on these lines, but for a comment."""
        before = self.text.rfind(b"\n", 0, start) + 1
        after = re.compile(rb"[ \t]*(#[^\r\n]*)?(\r?\n|$)").match(self.text, end)
        return not self.text[before:start].strip() and after is not None

    def remove_with_empty_line(self, start: int, end: int) -> None:
        """Removes whole lines, and an empty one after them."""
        first = self.text.rfind(b"\n", 0, start) + 1
        rest = re.compile(rb"[ ]*\n(?:[ ]*\n)?").match(self.text, end)
        self.replace(first, rest.end() if rest else end)

    def _line(self, index: int) -> bytes:
        start = self._starts[index]
        following = self._starts[index + 1 : index + 2]
        # There is nothing after the last line.
        return self.text[start : following[0]] if following else b""

    def remove_items(
        self, spans: Sequence[tuple[int, int]], gone: Collection[int]
    ) -> None:
        """Removes the items with these numbers from a list, of which not all are gone."""
        kept = [at for at in range(len(spans)) if at not in gone]
        for at in gone:
            start, end = spans[at]
            line_start = self.text.rfind(b"\n", 0, start) + 1
            rest = re.compile(rb"[ ]*,?[ ]*(#[^\n]*)?\n").match(self.text, end)
            if not self.text[line_start:start].strip() and rest:
                # It has lines of its own, and may have a comment before them.
                comment = self.text[line_start:start] + b"#"
                while True:
                    earlier = self.text.rfind(b"\n", 0, line_start - 1) + 1
                    if not self.text[earlier:line_start].startswith(comment):
                        break
                    line_start = earlier
                self.replace(line_start, rest.end())
            elif kept and at < kept[-1]:
                comma = re.compile(rb"\s*,\s*").match(self.text, end)
                self.replace(start, comma.end() if comma else end)
            else:
                # With the comma before it.
                self.replace(spans[at - 1][1] if at else start, end)
