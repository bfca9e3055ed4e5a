"""Faults that are drawn: a line of the engine, a kind of fault there, one way to make it."""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from .faults import edited, Fault, sources, table
from .operators import operators


# Their arguments are texts, or values that only a message shows.
WRITERS = re.compile(r"(.*\.)?(\w+Error|_?warn|listed|TypeVar|cast)")
# So does this, or the code only checks itself less without it.
SKIPPED = "from |import |f['\"]|(self._)?log[.(]|if (log[.]|TYPE_CHECKING)|(strict|stacklevel|group_desc)="
KINDS = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Expr, ast.If, ast.keyword)


def not_code(tree: ast.AST) -> Iterator[ast.AST | None]:
    """Texts of messages and logs, annotations and imports."""
    for node in ast.walk(tree):
        parts = list(ast.iter_child_nodes(node))
        yield getattr(node, "annotation", None)
        yield getattr(node, "returns", None)
        if isinstance(node, ast.Call) and WRITERS.fullmatch(ast.unparse(node.func)):
            yield from parts[1:]
        elif isinstance(node, KINDS) and re.match(SKIPPED, ast.unparse(node)):
            yield node
        elif isinstance(node, (ast.IfExp, ast.BinOp)):
            yield node if any(isinstance(p, ast.JoinedStr) for p in parts) else None


def candidates(source: str) -> dict[int, dict[str, list]]:
    """For each line and kind: operator and occurrence of each fault that begins there."""
    texts = [n for n in not_code(ast.parse(source)) if n is not None]
    begins = [(n.lineno, n.col_offset) for n in texts]
    ends = [(n.end_lineno, n.end_col_offset) for n in texts]
    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(lambda: defaultdict(list))
    for kind, operator in operators():
        positions = (p for node in nodes for p in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(a <= start < b for a, b in zip(begins, ends)):
                found[start[0]][kind].append((operator, occurrence))
    return found


def drawn(optim: Path, seed: int, count: int) -> list[Fault]:
    """The first ``count`` faults of ``seed``, but none of equivalent.txt."""
    texts = {file: (optim / file).read_text() for file in sources(optim)}
    found = {file: candidates(text) for file, text in texts.items()}
    lines = [(file, line) for file in found for line in sorted(found[file])]
    known = {(file, f"{old} => {new}") for file, old, new, _ in table("equivalent.txt")}
    chance, faults = random.Random(seed), {}
    # A small program has fewer.
    for _ in range(50 * count):
        if len(faults) == count:
            break
        file, line = chance.choice(lines)
        kinds = found[file][line]
        operator, occurrence = chance.choice(kinds[chance.choice(sorted(kinds))])
        source = mutate_code(texts[file], operator, occurrence)
        fault = edited(file, texts[file], source)
        with suppress(SyntaxError):
            is_other = ast.dump(ast.parse(source)) != ast.dump(ast.parse(texts[file]))
            if is_other and (file, fault.name) not in known:
                faults[file, fault.name] = fault
    return list(faults.values())
