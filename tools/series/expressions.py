"""Expressions, and the lists in them, without what is later."""

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from .names import Names, Value
from .text import Text


# A call of an attribute with one of these names is a call of a Tensor's method.
TENSOR_METHODS = frozenset({"flatten", "split"})


def expressions_in(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions right inside of a statement or an expression."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.expr):
            yield inner
        elif isinstance(inner, (ast.keyword, ast.FormattedValue, ast.withitem)):
            yield from expressions_in(inner)


class Expressions:
    """Cuts expressions of one file."""

    def __init__(self, text: Text, names: Names) -> None:
        self.text = text
        self.names = names

    def is_gone(self, node: ast.expr) -> bool:
        return self.value(node) is not Value.KEPT

    def value(self, node: ast.expr) -> Value:
        """Cuts what is inside of an expression, and says what is left of it."""
        match node:
            case ast.Name(name):
                return self.names.value_of(name)
            case ast.Constant(str(name)):
                return Value.GONE if self.names.is_later(name) else Value.KEPT
            case ast.Attribute(inner, name):
                is_later = self.names.is_later(name) or self.is_gone(inner)
                if isinstance(inner, ast.Name) and inner.id == "self":
                    is_later |= self.names.is_later_method(name)
                return Value.GONE if is_later else Value.KEPT
            case ast.Call():
                return self._call(node)
            case ast.BoolOp():
                return self._operands(node)
            case ast.UnaryOp(ast.Not(), operand):
                value = self.value(operand)
                if value is Value.KEPT:
                    return value
                return Value.FALSE if value is Value.TRUE else Value.TRUE
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp():
                return self._conditional(node)
            case ast.Tuple(items) | ast.List(items) | ast.Set(items):
                return self._items(node, [(item, item) for item in items])
            case ast.Dict():
                return self._dict(node)
            case ast.Lambda():
                self.parameters(node.args)
                return self._as_gone(node.body)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
        values = [self.is_gone(inner) for inner in expressions_in(node)]
        return Value.GONE if any(values) else Value.KEPT

    def _as_gone(self, node: ast.expr) -> Value:
        return Value.GONE if self.is_gone(node) else Value.KEPT

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in TENSOR_METHODS:
            is_gone = self.is_gone(function.value)
        else:
            is_gone = self.is_gone(function)
        arguments: list[tuple[Any, ast.expr]] = [(arg, arg) for arg in node.args]
        arguments += [(keyword, keyword.value) for keyword in node.keywords]
        left = self._cut_items(arguments)
        is_builtin = isinstance(function, ast.Name) and hasattr(builtins, function.id)
        if left < len(arguments) and (is_builtin or left == 0):
            is_gone = True
        # The called function has lost a parameter for a name, but none for a value that merely contains one.
        for argument in node.args:
            is_gone |= self.is_gone(argument) and not self._is_name(argument)
        return Value.GONE if is_gone else Value.KEPT

    def _is_name(self, node: ast.expr) -> bool:
        """Whether it is a name, or a call of a later function."""
        if isinstance(node, ast.Starred):
            node = node.value
        if isinstance(node, ast.Call):
            node = node.func
        return isinstance(node, (ast.Name, ast.Attribute))

    def _cut_items(self, items: Sequence[tuple[Any, ast.expr]]) -> int:
        """Cuts items of which the value is gone, or the keyword. How many are left."""
        gone = []
        for at, (item, value) in enumerate(items):
            keyword = getattr(item, "arg", None)
            if (keyword and self.names.is_later(keyword)) or self.is_gone(value):
                gone.append(at)
        self.text.remove_items([self.text.span(item) for item, _ in items], gone)
        return len(items) - len(gone)

    def _items(self, node: Any, items: Sequence[tuple[Any, ast.expr]]) -> Value:
        if not items:
            return Value.KEPT
        start, end = self.text.span(node)
        left = self._cut_items(items)
        if left == 0:
            return Value.GONE
        if left == 1 and len(items) > 1 and isinstance(node, ast.Tuple):
            # One item needs its comma. Such a list is written with one item on each line.
            kept = self.text.part(start, end)
            if b"," not in kept:
                is_open = kept.endswith(b")")
                at = end - 1 if is_open else end
                self.text.replace(at, at, b",")
        return Value.KEPT

    def _dict(self, node: ast.Dict) -> Value:
        gone = []
        spans = []
        for at, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            start, end = self.text.span(value)
            first = start - len("**") if key is None else self.text.span(key)[0]
            spans.append((first, end))
            if (key is not None and self.is_gone(key)) or self.is_gone(value):
                gone.append(at)
        self.text.remove_items(spans, gone)
        is_empty = len(node.keys) > 0 and len(gone) == len(node.keys)
        return Value.GONE if is_empty else Value.KEPT

    def _operands(self, node: ast.BoolOp) -> Value:
        is_or = isinstance(node.op, ast.Or)
        values = [self.value(each) for each in node.values]
        kept = [at for at, value in enumerate(values) if value is Value.KEPT]
        deciding = Value.TRUE if is_or else Value.FALSE
        for value in values:
            if value is deciding or (value is Value.GONE and not is_or):
                return deciding
        if not kept:
            return Value.FALSE if is_or else Value.TRUE
        spans = [self._span_with_brackets(each, node) for each in node.values]
        for at, value in enumerate(values):
            if value is Value.KEPT:
                continue
            if at < kept[0]:
                self.text.replace(spans[at][0], spans[at + 1][0])
            else:
                self.text.replace(spans[at - 1][1], spans[at][1])
        return Value.KEPT

    def _span_with_brackets(self, node: ast.expr, outer: ast.expr) -> tuple[int, int]:
        start, end = self.text.span(node)
        first, last = self.text.span(outer)
        text = self.text.text
        while start > first and end < last:
            before = text[first:start].rstrip()
            after = text[end:last]
            if not (before.endswith(b"(") and after.lstrip().startswith(b")")):
                break
            start = first + len(before) - 1
            end += len(after) - len(after.lstrip()) + 1
        return start, end

    def _comparison(self, node: ast.Compare) -> Value:
        operands = [node.left, *node.comparators]
        are_gone = [self.is_gone(operand) for operand in operands]
        if True not in are_gone:
            return Value.KEPT
        # The option has its default.
        # None is what is compared with, or nothing is in the list.
        is_true = ast.unparse(node).endswith(" is None")
        is_true |= isinstance(node.ops[0], ast.NotIn)
        return Value.TRUE if is_true else Value.FALSE

    def _conditional(self, node: ast.IfExp) -> Value:
        value = self.value(node.test)
        if value is Value.KEPT:
            parts = [self.is_gone(node.body), self.is_gone(node.orelse)]
            return Value.GONE if any(parts) else Value.KEPT
        taken = node.body if value is Value.TRUE else node.orelse
        result = self.value(taken)
        if result is Value.KEPT:
            start, end = self.text.span(node)
            first, last = self.text.span(taken)
            self.text.replace(start, end, self.text.part(first, last))
        return result

    def _comprehension(self, node: Any) -> Value:
        for loop in node.generators:
            if self.is_gone(loop.iter):
                return Value.GONE
            for condition in loop.ifs:
                value = self.value(condition)
                if value is Value.TRUE:
                    start, end = self.text.span(condition)
                    before = self.text.text.rindex(b"if", 0, start)
                    start = len(self.text.text[:before].rstrip())
                    self.text.replace(start, end)
                elif value is not Value.KEPT:
                    return Value.GONE
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return Value.GONE if any(map(self.is_gone, parts)) else Value.KEPT

    def parameters(self, args: ast.arguments) -> None:
        positional = [*args.posonlyargs, *args.args]
        defaults: list[Any] = [None] * (len(positional) - len(args.defaults))
        defaults += args.defaults
        pairs = [*zip(positional, defaults, strict=True)]
        pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
        spans = []
        gone = []
        for parameter, default in pairs:
            start, end = self.text.span(parameter)
            if default is not None:
                end = self.text.span(default)[1]
            if self.names.is_later(parameter.arg):
                gone.append(len(spans))
            elif default is not None:
                self.value(default)
            spans.append((start, end))
        if args.kwarg:
            start, end = self.text.span(args.kwarg)
            if self.names.is_later(args.kwarg.arg):
                gone.append(len(spans))
            spans.append((start - len("**"), end))
        self.text.remove_items(spans, gone)
