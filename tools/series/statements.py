"""Statements without what is later."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, NamedTuple

from .docstrings import without_sentences
from .expressions import Expressions, expressions_in, TENSOR_METHODS
from .modules import imported_by
from .names import Names, NoForm, Value
from .text import Text


class _Arm(NamedTuple):
    """An arm of an ``if``, and where it is in the text."""

    test: ast.expr | None
    body: list[ast.stmt]
    keyword: bytes
    # Where its comments and the keyword begin.
    begin: int
    keyword_at: int
    # Where the text after the keyword begins and ends.
    start: int
    end: int


class Statements:
    """Walks through a file of ``package``, and cuts out of its ``text`` what is missing."""

    def __init__(
        self,
        text: Text,
        package: str,
        missing_modules: frozenset[str],
        names: Names,
        is_test: bool,
    ) -> None:
        self._text = text
        self._package = package
        self._missing_modules = missing_modules
        self._names = names
        self._is_test = is_test
        self._expressions = Expressions(text, names)
        self._gone_tests: set[str] = set()
        # Functions that were read, and those that lack a statement.
        self._functions: set[str] = set()
        self._changed: set[str] = set()
        # Functions at the top that are gone, and those that only this file calls.
        self._gone: set[str] = set()
        self.gone_functions: set[tuple[str, str]] = set()

    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Cuts statements. Whether at least one was, and none but a docstring is left."""
        removed = left = 0
        # Only then it is known which functions are gone.
        for node in sorted(body, key=_is_list_of_names):
            if _is_docstring(node, body):
                self._docstring(node, is_alone=len(body) == 1)
            elif self._statement(node):
                self._remove(node)
                self._changed.add(self._names.scope)
                removed += 1
            else:
                left += 1
        return removed > 0 and left == 0

    def _statement(self, node: ast.stmt) -> bool:
        """Cuts what is inside of a statement. Whether the statement itself must go."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return self._function(node)
            case ast.ClassDef():
                return self._class(node)
            case ast.If():
                return self._if(node)
            case ast.For() | ast.AsyncFor():
                return self._for(node)
            case ast.While():
                return self._while(node)
            case ast.With() | ast.AsyncWith():
                return self._with(node)
            case ast.Try():
                return self._try(node)
            case ast.Match():
                return self._match(node)
            case ast.Import() | ast.ImportFrom():
                return self._import(node)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assignment(node)
        return any(map(self._expressions.is_gone, expressions_in(node)))

    def _for(self, node: ast.For | ast.AsyncFor) -> bool:
        if self._expressions.is_gone(node.iter):
            return True
        self._expressions.is_gone(node.target)
        self._names.keep(_names_bound([node.target]))
        is_gone = self.block(node.body)
        self.block(node.orelse)
        return is_gone

    def _while(self, node: ast.While) -> bool:
        value = self._expressions.value(node.test)
        if value is Value.TRUE:
            raise NoForm(f"line {node.lineno}: a loop whose condition is gone")
        is_gone = value is not Value.KEPT or self.block(node.body)
        self.block(node.orelse)
        return is_gone

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        are_gone = [self._expressions.is_gone(each.context_expr) for each in node.items]
        targets = [each.optional_vars for each in node.items if each.optional_vars]
        self._names.keep(_names_bound(targets))
        return self.block(node.body) or True in are_gone

    def _try(self, node: ast.Try) -> bool:
        if self._needs(node.body):
            # Like a hook: whether the module is there.
            bound = [each for block in _blocks(node) for each in block]
            self._names.drop(_names_bound(bound), Value.FALSE)
            return True
        is_gone = self.block(node.body)
        if is_gone and node.finalbody:
            raise NoForm(f"line {node.lineno}: only a `finally`")
        for handler in node.handlers:
            self._names.keep([handler.name] if handler.name else [])
        for block in _blocks(node)[1:]:
            self.block(block)
        return is_gone

    def _match(self, node: ast.Match) -> bool:
        if self._expressions.is_gone(node.subject):
            return True
        for case in node.cases:
            self._names.keep(_names_bound([case.pattern]))
            has_guard = case.guard is not None
            if has_guard and self._expressions.value(case.guard) is not Value.KEPT:
                raise NoForm(f"line {case.guard.lineno}: a guard")
            if self._says_later(case.pattern) or self.block(case.body):
                raise NoForm(f"line {case.body[0].lineno}: a case")
        return False

    def _assignment(self, node: Any) -> bool:
        if _is_list_of_names(node):
            self._names.everywhere |= self._gone
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = _names_bound(targets)
        # A field of a class has a name and perhaps no value.
        value = Value.KEPT
        if node.value:
            value = self._expressions.value(node.value)
        is_call = isinstance(node.value, ast.Call) and _may_do_something(node.value)
        is_unused = self._names.scope in self._functions and self._names.are_unused(
            names
        )
        if is_call and value is Value.KEPT and is_unused:
            # The call may do something.
            start = self._text.span(node)[0]
            self._text.replace(start, self._text.span(node.value)[0])
            return False
        are_gone = [self._expressions.is_gone(target) for target in targets]
        if value is Value.KEPT and True not in are_gone:
            self._names.keep(names)
            return False
        self._names.drop(names, value)
        return True

    def _function(self, node: Any) -> bool:
        says_later = self._names.is_later(node.name) or self._needs(node.body)
        names = self._names
        outer, names.scope = names.scope, f"{names.scope}.{node.name}".strip(".")
        if self._is_test and node.name.startswith("test_"):
            # A test of what is later comes with it.
            says_later = says_later or self._says_later(node)
        self._functions.add(names.scope)
        if not says_later:
            for decorator in node.decorator_list:
                says_later |= self._expressions.is_gone(decorator)
            self._expressions.parameters(node.args)
            arguments = ast.walk(node.args)
            names.keep([each.arg for each in arguments if isinstance(each, ast.arg)])
            says_later |= self.block(node.body)
            # A helper of tests that lacks a statement is another one. What sets up more does no harm.
            is_helper = self._is_test and node.name not in ("__init__", "setUp")
            says_later |= is_helper and names.scope in self._changed
        names.scope = outer
        if says_later and not outer:
            self._gone.add(node.name)
        if says_later and node.name.startswith("test_"):
            self._gone_tests.add(f"{outer}.{node.name}")
        is_private = node.name.startswith("_") and not node.name.endswith("__")
        is_of_tests = self._is_test and not node.name.startswith("test_")
        if says_later and (is_private or is_of_tests):
            self.gone_functions.add((outer, node.name))
        return says_later

    def _class(self, node: ast.ClassDef) -> bool:
        names = self._names
        outer, names.scope = names.scope, f"{names.scope}.{node.name}".strip(".")
        names.bases[names.scope] = [ast.unparse(base) for base in node.bases]
        is_gone = self._expressions.head_is_gone(node)
        is_gone = is_gone or names.is_later(node.name) or self.block(node.body)
        names.scope = outer
        # Without its tests, a class of tests has helpers only.
        return is_gone or (self._is_test and self._has_lost_its_tests(node))

    def _has_lost_its_tests(self, node: ast.ClassDef) -> bool:
        tests = {f"{node.name}.{each}" for each in _tests_in(node)}
        return len(tests) > 0 and tests <= self._gone_tests

    def _if(self, node: ast.If) -> bool:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return self.block(node.body)
        left: list[_Arm] = []
        is_changed = False
        for arm in self._arms(node):
            test, body = arm.test, arm.body
            value = Value.KEPT
            if test is not None:
                value = (
                    Value.FALSE
                    if self._is_hook(body)
                    else self._expressions.value(test)
                )
            if value in (Value.GONE, Value.FALSE) or self.block(body):
                is_changed = True
            elif value is Value.TRUE or test is None:
                is_changed |= value is Value.TRUE
                start = self._line_end(arm.start, body)
                left.append(arm._replace(keyword=b"else:", start=start))
                break
            else:
                left.append(arm)
        if not left or not is_changed:
            return not left
        start, end = self._text.span(node)
        first = left[0]
        # What is before the arms that are left are their comments.
        comments = self._text.text[first.begin : first.keyword_at]
        if first.keyword == b"else:":
            indent = body[0].col_offset - node.col_offset
            # The indent of a long string is a part of it.
            if _has_long_strings(self._text, body):
                raise NoForm(f"line {body[0].lineno}: a long string")
            block = self._text.part(first.start, first.end)
            new = comments + _dedented(block.lstrip(b"\n"), indent).lstrip(b" ")
        else:
            new = comments + b"if" + self._text.part(first.start, first.end)
            for arm in left[1:]:
                new += self._text.text[arm.begin : arm.keyword_at]
                new += arm.keyword + self._text.part(arm.start, arm.end)
        self._text.replace(start, end, new.lstrip(b" ").rstrip())
        return False

    def _arms(self, node: ast.If) -> Iterator[_Arm]:
        text = self._text
        indent = b" " * node.col_offset
        # What follows a body: comments, and the next keyword.
        following = re.compile(
            rb"\n((?:" + indent + rb"#[^\n]*\n|[ ]*\n)*" + indent + rb")(elif|else)\b"
        )
        begin = keyword_at = text.span(node)[0]
        end = text.span(node)[1]
        keyword = b"if"
        while True:
            start = keyword_at + len(keyword)
            arm = _Arm(node.test, node.body, b"elif", begin, keyword_at, start, end)
            if not node.orelse:
                yield arm
                return
            last = text.span(node.body[-1])[1]
            found = following.search(text.text, last)
            if found is None:
                raise NoForm(f"line {node.lineno}: an `else` without its line")
            begin, keyword_at = found.start(1), found.start(2)
            yield arm._replace(end=begin)
            keyword = found[2]
            if keyword != b"elif":
                start = found.end(2)
                yield _Arm(None, node.orelse, keyword, begin, keyword_at, start, end)
                return
            node = cast("ast.If", node.orelse[0])

    def _line_end(self, start: int, body: Sequence[ast.stmt]) -> int:
        """Where the line of an arm's colon ends."""
        first = self._text.at(body[0].lineno, 0)
        lines = self._text.text[start:first].split(b"\n")
        # Comments may be between them.
        length = 0
        for line in lines:
            length += len(line) + 1
            if line.split(b"#")[0].rstrip().endswith(b":"):
                break
        return start + length - 1

    def _import(self, node: ast.Import | ast.ImportFrom) -> bool:
        is_missing = bool(imported_by(node, self._package) & self._missing_modules)
        later = []
        for alias in node.names:
            name = alias.asname or alias.name
            found = is_missing
            if is_missing and isinstance(node, ast.ImportFrom):
                # A module that is here may also give names that are modules.
                one = ast.ImportFrom(node.module, [alias], node.level)
                found = bool(imported_by(one, self._package) & self._missing_modules)
            if found and not self._names.scope:
                self._names.everywhere.add(name)
            if found or self._names.is_later(name):
                later.append(alias)
        if len(later) == len(node.names):
            return True
        spans = [self._text.span(alias) for alias in node.names]
        gone = [at for at, alias in enumerate(node.names) if alias in later]
        self._text.remove_items(spans, gone)
        return False

    def _remove(self, node: ast.stmt) -> None:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        start, end = self._text.span(node)
        if not self._text.has_own_lines(start, end):
            raise NoForm(f"line {first}: two statements")
        self._text.remove_lines(first, node.end_lineno or node.lineno)

    def _is_hook(self, body: Iterable[ast.stmt]) -> bool:
        for first in body:
            found = imported_by(first, self._package)
            if found & self._missing_modules:
                return True
            if not found:
                return False
        return False

    def _needs(self, body: Iterable[ast.stmt]) -> bool:
        """Whether these statements import a missing module outside of hooks."""
        for node in body:
            if imported_by(node, self._package) & self._missing_modules:
                return True
            blocks = _blocks(node)
            if isinstance(node, ast.If) and self._is_hook(node.body):
                blocks = [node.orelse]
            if any(map(self._needs, blocks)):
                return True
        return False

    def _says_later(self, node: ast.AST) -> bool:
        for inner in ast.walk(node):
            match inner:
                case ast.Name(name) | ast.arg(name) | ast.Constant(str(name)):
                    found = self._names.is_later(name)
                case ast.keyword(str(name)):
                    found = self._names.is_later(name)
                case ast.Call(ast.Attribute(_, name)) if name in TENSOR_METHODS:
                    found = False
                case ast.Attribute(ast.Name("self"), name) if (
                    self._names.is_later_method(name)
                ):
                    found = True
                case ast.Attribute(_, name) if name not in TENSOR_METHODS:
                    found = self._names.is_later(name)
                case ast.ImportFrom() | ast.Import():
                    found = bool(
                        imported_by(inner, self._package) & self._missing_modules
                    )
                case _:
                    found = False
            if found:
                return True
        return False

    def _docstring(self, node: ast.stmt, is_alone: bool) -> None:
        start, end = self._text.span(node)
        text = self._text.text[start:end].decode()
        quoted = re.fullmatch(r'(r?""")(.*)(""")', text, re.DOTALL)
        if not quoted:
            return
        new = without_sentences(quoted[2], self._names.everywhere)
        if new == quoted[2]:
            return
        if new.count("\n") <= 1:
            new = new.strip()
        if new or is_alone:
            self._text.replace(start, end, f'{quoted[1]}{new}"""'.encode())
        else:
            self._text.remove_with_empty_line(start, end)


def _is_docstring(node: ast.stmt, body: Sequence[ast.stmt]) -> bool:
    return (
        node is body[0]
        and isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _tests_in(node: ast.ClassDef) -> list[str]:
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return [each.name for each in functions if each.name.startswith("test_")]


def _may_do_something(call: ast.Call) -> bool:
    """Whether a call is more than its result: one of a public method. Functions are pure here, and builtins."""
    function = call.func
    return isinstance(function, ast.Attribute) and not function.attr.startswith("_")


def _names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that get a value there."""
    names: set[str] = set()
    for node in nodes:
        for inner in ast.walk(node):
            match inner:
                case ast.Name(name, ast.Store()):
                    names.add(name)
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    names.add(name)
    return names


def _is_list_of_names(node: ast.stmt) -> bool:
    match node:
        case ast.Assign([ast.Name("__all__")]):
            return True
    return False


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements in a statement."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return blocks + [handler.body for handler in getattr(node, "handlers", [])]


def _dedented(text: bytes, indent: int) -> bytes:
    lines = []
    for line in text.split(b"\n"):
        # An empty line has no indent.
        lines.append(line[indent:] if line.startswith(b" " * indent) else line)
    return b"\n".join(lines)


def _has_long_strings(text: Text, body: Iterable[ast.stmt]) -> bool:
    """Whether a string there has several lines, whose indent is a part of it."""
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Constant, ast.JoinedStr)):
                start, end = text.span(inner)
                source = text.text[start:end]
                marks = (b'"""', b"'''", b"\\\n")
                if b"\n" in source and any(mark in source for mark in marks):
                    return True
    return False
