"""Faults that are drawn: a line of the engine, a kind of fault there, one way to make it."""

import ast
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from .faults import edited, Fault, sources, table
from .operators import operators


# Their arguments are texts, or values that only a message shows.
WRITERS = re.compile(r"(.*\.)?(\w+Error|_?warn|listed|TypeVar|cast)")
# So does this, or the code only checks itself less without it.
SKIPPED = "from |import |f['\"]|(self._)?log[.(]|if (log[.]|TYPE_CHECKING)|(strict|stacklevel|group_desc)="
KINDS = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Expr, ast.If, ast.keyword)


def not_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Texts of messages and logs, annotations and imports."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            if annotation is not None:
                yield annotation
        if isinstance(node, ast.Call) and WRITERS.fullmatch(ast.unparse(node.func)):
            _, *arguments = ast.iter_child_nodes(node)
            yield from arguments
        elif isinstance(node, KINDS) and re.match(SKIPPED, ast.unparse(node)):
            yield node
        elif isinstance(node, (ast.IfExp, ast.BinOp)):
            for operand in ast.iter_child_nodes(node):
                if isinstance(operand, ast.JoinedStr):
                    yield node
                    break


class Way(NamedTuple):
    """One way to make a fault: an operator of cosmic-ray, and which of its positions in the file."""

    operator: Any
    occurrence: int


def candidates(source: str) -> dict[int, dict[str, list[Way]]]:
    """For each line and kind: the ways to make a fault that begins there."""
    spans = []
    for node in not_code(ast.parse(source)):
        begin = node.lineno, node.col_offset
        end = node.end_lineno, node.end_col_offset
        spans.append((begin, end))
    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(lambda: defaultdict(list))
    for kind, operator in operators():
        occurrences = itertools.count()
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                way = Way(operator, next(occurrences))
                is_code = not any(begin <= start < end for begin, end in spans)
                if is_code:
                    line, _ = start
                    found[line][kind].append(way)
    return found


def drawn(optim: Path, seed: int, count: int) -> list[Fault]:
    """The first ``count`` faults of ``seed``, but none of equivalent.txt."""
    texts, by_file, lines = {}, {}, []
    for file in sources(optim):
        texts[file] = (optim / file).read_text()
        by_file[file] = candidates(texts[file])
        for line in sorted(by_file[file]):
            lines.append((file, line))
    equivalent = set()
    for file, old, new, _ in table("equivalent.txt"):
        equivalent.add((file, f"{old} => {new}"))
    chance = random.Random(seed)
    faults: dict[tuple[str, str], Fault] = {}
    # A small program has fewer.
    for _ in range(50 * count):
        if len(faults) == count:
            break
        file, line = chance.choice(lines)
        ways_by_kind = by_file[file][line]
        kind = chance.choice(sorted(ways_by_kind))
        operator, occurrence = chance.choice(ways_by_kind[kind])
        text = texts[file]
        source = mutate_code(text, operator, occurrence)
        fault = edited(file, text, source)
        key = file, fault.name
        if key not in equivalent and _is_another_program(source, text):
            faults[key] = fault
    return list(faults.values())


def _is_another_program(source: str, original: str) -> bool:
    """Whether ``source`` is a program at all, and differs in more than its layout."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(original))
