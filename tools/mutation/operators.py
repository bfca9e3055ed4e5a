"""The operators: cosmic-ray's that make plausible faults, and those that it lacks."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Name
from parso.tree import NodeOrLeaf


# On a line, each kind is as likely as another one, however many ways there are to make it.
THEIRS = {
    "comparison": "ReplaceComparison.*_(Lt_(LtE|GtE)|LtE_(Lt|Gt)|Gt_(GtE|LtE)|GtE_(Gt|Lt)"
    "|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)",
    "arithmetic": "ReplaceBinary.*_(Add_Sub|Sub_Add|Mul_FloorDiv|Mul_Add|FloorDiv_Mul|Div_Mul"
    "|Mod_FloorDiv|Pow_Mul|BitOr_BitAnd|BitAnd_BitOr)|ReplaceUnary.*_Delete_.*",
    "condition": "AddNot|Replace(AndWithOr|OrWithAnd)",
    "constant": "NumberReplacer|Replace(TrueWithFalse|FalseWithTrue)",
    "loop": "Replace(BreakWithContinue|ContinueWithBreak)|ZeroIterationForLoop",
    "around": "RemoveDecorator|ExceptionReplacer",
}
# Pairs of what is easily taken for each other.
PAIRS = """min max any all argmin argmax MIN MAX amin amax floor ceil startswith endswith
    float32 bfloat16 int64 int32 union intersection issubset issuperset sorted list
    clone detach numel dim setdefault get extend append += -= *= //= |= &= in not_in"""
ALIKE = {}
for one, other in re.findall(r"(\S+)\s+(\S+)", PAIRS):
    ALIKE[one] = other
    ALIKE[other] = one


# Parts of a node, and the text of the node with a fault in each of them.
Found = Iterator[tuple[NodeOrLeaf, str]]


def bare(node: NodeOrLeaf) -> str:
    return node.get_code(include_prefix=False)


def prefix(node: NodeOrLeaf) -> str:
    first = node.get_first_leaf()
    return first.prefix


def rewritten(node: NodeOrLeaf, texts: dict[int, str]) -> str:
    """The text of ``node`` with other texts for some of its children."""
    parts = []
    for index, child in enumerate(node.children):
        text = texts.get(index, bare(child))
        parts.append(prefix(child) + text)
    whole = "".join(parts)
    return whole[len(prefix(node)) :]


def is_keyword(node: NodeOrLeaf) -> bool:
    return node.type == "argument" and node.children[1] == "="


def deletion(node: NodeOrLeaf) -> Found:
    """A statement is missing; an assignment, only if the name has a value without it."""
    if node.type != "simple_stmt":
        return
    statement = node.children[0]
    kinds = "atom_expr", "return_stmt", "raise_stmt", "yield_expr"
    if statement.type in kinds or _assigns_again(statement):
        yield statement, rewritten(node, {0: "pass"})


def _assigns_again(statement: NodeOrLeaf) -> bool:
    """Whether it is an assignment whose target has a value without it."""
    if statement.type != "expr_stmt":
        return False
    target, sign = statement.children[:2]
    if sign.type == "annassign":
        return False
    if sign != "=":
        return True
    if target.type == "name":
        name = re.escape(bare(target))
        value = bare(statement.children[-1])
        # The name itself: no attribute, part of a text, or keyword of this name.
        return re.search(rf"(?<![.\"\w]){name}\b(?! *=)", value) is not None
    if target.type == "atom_expr":
        function = statement.search_ancestor("funcdef")
        return function is not None and function.name.value != "__init__"
    return False


def omission(node: NodeOrLeaf) -> Found:
    """An argument takes its default; an operand or an element of a literal is missing."""
    for span in _omissible(node):
        first = node.children[span[0]]
        missing = dict.fromkeys(span, "")
        yield first, rewritten(node, missing)


def _omissible(node: NodeOrLeaf) -> list[range]:
    """The children of each argument, operand or element that ``node`` can do without."""
    if node.type in ("and_test", "or_test"):
        *spans, _ = _separated(node)
        end = len(node.children)
        # The last operand, with the operator in front of it.
        return [*spans, range(end - 2, end)]
    if node.type == "trailer" and is_keyword(node.children[1]):
        return [range(1, 2)]
    if node.type == "arglist":
        spans = []
        for span in _separated(node):
            if is_keyword(node.children[span[0]]):
                spans.append(span)
        return spans
    if node.type in ("testlist_comp", "dictorsetmaker"):
        spans = _separated(node)
        if len(spans) >= 3:
            return spans
    return []


def _separated(node: NodeOrLeaf) -> list[range]:
    """The children of each part, with the comma or operator behind it."""
    spans, begin = [], 0
    for index, child in enumerate(node.children):
        if child in (",", "and", "or"):
            spans.append(range(begin, index + 1))
            begin = index + 1
    end = len(node.children)
    if begin < end:
        spans.append(range(begin, end))
    return spans


def swap(node: NodeOrLeaf) -> Found:
    """Swaps two arguments of one kind."""
    if node.type != "arglist":
        return
    arguments = node.children[::2]
    for number, (left, right) in enumerate(pairwise(arguments)):
        if left.type != right.type or left.type not in ("name", "atom_expr"):
            continue
        called = node.parent.get_previous_sibling()
        if bare(called) not in ("min", "max"):
            swapped = {2 * number: bare(right), 2 * number + 2: bare(left)}
            yield left, rewritten(node, swapped)


def confusion(node: NodeOrLeaf) -> Found:
    """A function, a dtype or an operator is one that is easily taken for it."""
    if node.type == "file_input":
        return
    if node.type == "comp_if":
        condition = node.children[1]
        yield condition, f"if not ({bare(condition)})"
        return
    words = bare(node).split()
    alike = ALIKE.get("_".join(words))
    is_new = node.type == "name" and node.is_definition()
    if alike and not is_new and node.get_next_sibling() != "=":
        yield node, alike.replace("_", " ")


class Operator:
    """For cosmic-ray, of what finds parts of a node and the texts of the node with a fault."""

    def __init__(self, find: Callable[[NodeOrLeaf], Found]) -> None:
        self.find = find

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple]:
        for part, _ in self.find(node):
            yield part.start_pos, part.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> Name:
        found = list(self.find(node))
        _, text = found[index]
        return Name(text, node.start_pos, prefix(node))


def operators() -> Iterator[tuple[str, Any]]:
    theirs = OperatorProvider()
    for kind, pattern in THEIRS.items():
        for name in theirs:
            if re.fullmatch(pattern, name):
                yield kind, theirs[name]()
    for find in (deletion, omission, swap, confusion):
        yield find.__name__, Operator(find)
