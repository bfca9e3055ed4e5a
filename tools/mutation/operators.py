"""The operators: cosmic-ray's that make plausible faults, and those that it lacks."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
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
ALIKE = """min max any all argmin argmax MIN MAX amin amax floor ceil startswith endswith
    float32 bfloat16 int64 int32 union intersection issubset issuperset sorted list
    clone detach numel dim setdefault get extend append += -= *= //= |= &= in not_in"""
ALIKE = dict(re.findall(r"(\S+)\s+(\S+)", ALIKE))
ALIKE |= {b: a for a, b in ALIKE.items()}


def bare(node: NodeOrLeaf) -> str:
    return node.get_code(include_prefix=False)


def prefix(node: NodeOrLeaf) -> str:
    return node.get_first_leaf().prefix


def rewritten(node: NodeOrLeaf, parts: dict[int, str]) -> str:
    """The text of ``node`` with other children."""
    kids = enumerate(node.children)
    texts = [prefix(kid) + parts.get(i, bare(kid)) for i, kid in kids]
    return "".join(texts)[len(prefix(node)) :]


def is_keyword(node: NodeOrLeaf) -> bool:
    return node.type == "argument" and node.children[1] == "="


def deletion(node: NodeOrLeaf) -> Iterator:
    """A statement is missing; an assignment, only if the name has a value without it."""
    what = node.children[0] if node.type == "simple_stmt" else node
    missing = what.type in ("atom_expr", "return_stmt", "raise_stmt", "yield_expr")
    if what.type == "expr_stmt" and what.children[1].type != "annassign":
        target, value = what.children[0], bare(what.children[-1])
        again = re.search(rf"(?<![.\"\w]){re.escape(bare(target))}\b(?! *=)", value)
        function = what.search_ancestor("funcdef")
        later = function is not None and function.name.value != "__init__"
        has_value = {"name": again, "atom_expr": later}.get(target.type)
        missing = has_value or what.children[1] != "="
    if missing and what is not node:
        yield what, rewritten(node, {0: "pass"})


def omission(node: NodeOrLeaf) -> Iterator:
    """An argument takes its default; an operand or an element of a literal is missing."""
    kids = getattr(node, "children", ())
    marks = [i for i, kid in enumerate(kids) if kid in (",", "and", "or")]
    spans = [range(a + 1, b + 1) for a, b in pairwise([-1, *marks, len(kids)])]
    spans = [span for span in spans if span and span[0] < len(kids)]
    if node.type in ("and_test", "or_test"):
        spans[-1] = range(len(kids) - 2, len(kids))
    elif node.type == "arglist":
        spans = [span for span in spans if is_keyword(kids[span[0]])]
    elif node.type == "trailer" and is_keyword(kids[1]):
        spans = [range(1, 2)]
    elif node.type not in ("testlist_comp", "dictorsetmaker") or len(spans) < 3:
        return
    for span in spans:
        yield kids[span[0]], rewritten(node, dict.fromkeys(span, ""))


def swap(node: NodeOrLeaf) -> Iterator:
    """Swaps two arguments of one kind."""
    kids = node.children if node.type == "arglist" else ()
    for i, (a, b) in enumerate(zip(kids[::2], kids[2::2])):
        if a.type == b.type and a.type in ("name", "atom_expr"):
            if bare(node.parent.get_previous_sibling()) not in ("min", "max"):
                yield a, rewritten(node, {2 * i: bare(b), 2 * i + 2: bare(a)})


def confusion(node: NodeOrLeaf) -> Iterator:
    """A function, a dtype or an operator is one that is easily taken for it."""
    text = "_".join(bare(node).split()) if node.type != "file_input" else ""
    is_new = node.type == "name" and node.is_definition()
    if text in ALIKE and not is_new and node.get_next_sibling() != "=":
        yield node, ALIKE[text].replace("_", " ")
    elif node.type == "comp_if":
        yield node.children[1], f"if not ({bare(node.children[1])})"


def operator(find: Callable) -> SimpleNamespace:
    """For cosmic-ray, of what finds parts of a node and the texts of the node with a fault."""
    return SimpleNamespace(
        mutation_positions=lambda at: [(p.start_pos, p.end_pos) for p, _ in find(at)],
        mutate=lambda at, i: Name(list(find(at))[i][1], at.start_pos, prefix(at)),
    )


def operators() -> Iterator[tuple[str, Any]]:
    theirs = OperatorProvider()
    for kind, words in THEIRS.items():
        yield from ((kind, theirs[n]()) for n in theirs if re.fullmatch(words, n))
    for find in (deletion, omission, swap, confusion):
        yield find.__name__, operator(find)
