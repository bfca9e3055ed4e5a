"""Expressions, and the lists in them, without what is later."""

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any

from .names import Names, NoForm, Value
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


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_name(node: ast.expr) -> bool:
    """Whether it is a name, or a call of a function."""
    if isinstance(node, ast.Starred):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, (ast.Name, ast.Attribute))


def _arguments(
    positional: Sequence[ast.expr], keywords: Sequence[ast.keyword]
) -> list[tuple[Any, ast.expr]]:
    """Each argument, and its value."""
    arguments: list[tuple[Any, ast.expr]] = [(each, each) for each in positional]
    arguments += [(keyword, keyword.value) for keyword in keywords]
    return arguments


def _needs_all(function: ast.expr) -> bool:
    """Whether a call needs all of its arguments."""
    is_builtin = isinstance(function, ast.Name) and hasattr(builtins, function.id)
    return is_builtin and function.id != "dict"


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
            case ast.Name(name, ast.Store()):
                is_gone = self.names.is_binding_gone(name)
                return Value.GONE if is_gone else Value.KEPT
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
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
        values = [self.is_gone(inner) for inner in expressions_in(node)]
        return Value.GONE if any(values) else Value.KEPT

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in TENSOR_METHODS:
            is_gone = self.is_gone(function.value)
        else:
            is_gone = self.is_gone(function)
        arguments = _arguments(node.args, node.keywords)
        gone = self._cut_items(arguments)
        if gone:
            is_gone |= len(gone) == len(arguments) or _needs_all(function)
            # A key, of which the others are defaults.
            first = arguments[0][1]
            is_gone |= _is_text(first) and self.is_gone(first)
        # The called function has lost a parameter for a name, but none for a value that merely contains one.
        for at, argument in enumerate(node.args):
            is_gone |= at in gone and not _is_name(argument)
        return Value.GONE if is_gone else Value.KEPT

    def head_is_gone(self, node: ast.ClassDef) -> bool:
        """Cuts the arguments of a class. Whether it lacks a base or a decorator then."""
        are_gone = [self.is_gone(each) for each in [*node.decorator_list, *node.bases]]
        if True in are_gone:
            return True
        arguments = _arguments(node.bases, node.keywords)
        gone = self._cut_items(arguments)
        return len(gone) == len(arguments) > 0

    def _cut_items(self, items: Sequence[tuple[Any, ast.expr]]) -> list[int]:
        """Cuts items of which the value is gone, or the keyword, and returns their places."""
        gone = []
        for at, (item, value) in enumerate(items):
            keyword = getattr(item, "arg", None)
            if (keyword and self.names.is_later(keyword)) or self.is_gone(value):
                gone.append(at)
        spans = [self.text.span(item) for item, _ in items]
        if len(items) > 1:
            # Those of the only argument may be the call's.
            spans = [self.text.with_brackets(*span) for span in spans]
        self.text.remove_items(spans, gone)
        return gone

    def _items(self, node: Any, items: Sequence[tuple[Any, ast.expr]]) -> Value:
        if not items:
            return Value.KEPT
        start, end = self.text.span(node)
        left = len(items) - len(self._cut_items(items))
        if left == 0:
            return Value.GONE
        if left == 1 and len(items) > 1 and isinstance(node, ast.Tuple):
            # One item needs its comma. Such a list is written with one item on each line.
            kept = self.text.part(start, end)
            if b"," not in kept:
                # Its brackets may be those of its items.
                first = self.text.with_brackets(*self.text.span(items[0][0]))[0]
                is_open = first > start
                at = end - 1 if is_open else end
                self.text.replace(at, at, b",")
        return Value.KEPT

    def _dict(self, node: ast.Dict) -> Value:
        gone = []
        spans = []
        for at, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            start, end = self.text.with_brackets(*self.text.span(value))
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
        spans = [self.text.with_brackets(*self.text.span(each)) for each in node.values]
        for at, value in enumerate(values):
            if value is Value.KEPT:
                continue
            if at < kept[0]:
                self.text.replace(spans[at][0], spans[at + 1][0])
            else:
                self.text.replace(spans[at - 1][1], spans[at][1])
        return Value.KEPT

    def _comparison(self, node: ast.Compare) -> Value:
        operands = [node.left, *node.comparators]
        are_gone = [self.is_gone(operand) for operand in operands]
        if True not in are_gone:
            return Value.KEPT
        # The option has its default.
        # None is what is compared with, or nothing is in the list.
        is_true = ast.unparse(node).endswith(" is None")
        is_true |= isinstance(node.ops[0], ast.NotIn)
        if isinstance(node.ops[0], ast.NotEq):
            # No other name is that of a later option.
            gone = [operand for operand, is_gone in zip(operands, are_gone) if is_gone]
            is_true = all(map(_is_text, gone))
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
            self.is_gone(loop.target)
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
        """Cuts parameters, and a marker between them that has none on its side any more."""
        spans: list[tuple[int, int]] = []
        gone: list[int] = []
        positional = [*args.posonlyargs, *args.args]
        defaults: list[Any] = [None] * (len(positional) - len(args.defaults))
        defaults += args.defaults
        for at, pair in enumerate(zip(positional, defaults, strict=True), start=1):
            self._parameter(*pair, spans, gone)
            if at == len(args.posonlyargs):
                self._marker(b"/", spans[-1][1], len(gone) == at, spans, gone)
        if args.vararg:
            start, end = self.text.span(args.vararg)
            if self.names.is_later(args.vararg.arg):
                if args.kwonlyargs:
                    raise NoForm(f"line {args.vararg.lineno}: a marker is missing")
                gone.append(len(spans))
            spans.append((start - len("*"), end))
        keywords: list[tuple[int, int]] = []
        gone_keywords: list[int] = []
        for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            self._parameter(*pair, keywords, gone_keywords)
        if keywords and not args.vararg:
            are_gone = len(gone_keywords) == len(keywords)
            start = self.text.text.rindex(b"*", 0, keywords[0][0])
            self._marker(b"*", start, are_gone, spans, gone)
        gone += [len(spans) + at for at in gone_keywords]
        spans += keywords
        if args.kwarg:
            start, end = self.text.span(args.kwarg)
            if self.names.is_later(args.kwarg.arg):
                gone.append(len(spans))
            spans.append((start - len("**"), end))
        self.text.remove_items(spans, gone)

    def _parameter(
        self,
        parameter: ast.arg,
        default: ast.expr | None,
        spans: list[tuple[int, int]],
        gone: list[int],
    ) -> None:
        start, end = self.text.span(parameter)
        if default is not None:
            end = self.text.with_brackets(*self.text.span(default))[1]
        if self.names.is_later(parameter.arg):
            gone.append(len(spans))
        elif default is not None:
            self.value(default)
        spans.append((start, end))

    def _marker(
        self,
        marker: bytes,
        start: int,
        is_gone: bool,
        spans: list[tuple[int, int]],
        gone: list[int],
    ) -> None:
        start = self.text.text.index(marker, start)
        if is_gone:
            gone.append(len(spans))
        spans.append((start, start + len(marker)))
