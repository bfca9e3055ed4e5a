"""Docstrings without what they say of later names."""

import re
import textwrap
from collections.abc import Collection, Sequence


def without_sentences(text: str, names: Collection[str]) -> str:
    """A docstring without the entries and the sentences about later names."""
    paragraphs: list[str] = []
    skipped = -1  # the indent of the entry that is left out
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        indent = len(line) - len(line.lstrip())
        if skipped >= 0 and (not line.strip() or indent > skipped):
            # An empty line belongs to what follows.
            if line.strip():
                at += 1
                continue
        if line.strip():
            skipped = -1
        entry = re.match(r" *(?:- ``|)(\w+(?:, \w+)*)(?:``)? (?:\(|:)", line)
        if entry and set(entry[1].split(", ")) <= {*names}:
            skipped = indent
            at += 1
            continue
        paragraph = [line]
        at += 1
        while at < len(lines) and _continues(paragraph, lines[at]):
            paragraph.append(lines[at])
            at += 1
        paragraphs.append(_without_said(paragraph, names))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(paragraphs))


def _continues(paragraph: Sequence[str], line: str) -> bool:
    """Whether a line goes on with a paragraph: it has its indent, or that of an entry's text."""
    if not paragraph[-1].strip() or not line.strip():
        return False
    if re.fullmatch(r" *\w+:", paragraph[-1]):  # a heading, such as "Raises:"
        return False
    indent = len(line) - len(line.lstrip())
    previous = len(paragraph[-1]) - len(paragraph[-1].lstrip())
    is_entry = re.match(
        r" *(?:- |\w+(?:, \w+)* \(|[\w, ]+:$|\w+(?:Error|Warning): |>>> |\.\.)", line
    )
    return not is_entry and (indent >= previous or len(paragraph) > 1)


def _without_said(paragraph: Sequence[str], names: Collection[str]) -> str:
    text = "\n".join(paragraph)
    said = [name for name in names if re.search(rf"[`\".]{name}[`\"=]", text)]
    if not said:
        return text
    first = re.match(r"\s*", text)
    indents = [re.match(r" *", line) for line in paragraph[1:]]
    hanging = indents[0].group() if indents and indents[0] else ""
    words = " ".join(text.split())
    sentences = re.split(r"(?<=[.:]) (?=[A-Z\"`(:])|(?<=;) ", words)
    kept = []
    for sentence in sentences:
        if not any(re.search(rf"[`\".]{name}[`\"=]", sentence) for name in said):
            kept.append(sentence)
    if len(kept) == len(sentences):
        return text
    left = re.sub(r"; (?=[A-Z`])", ". ", " ".join(kept))
    if left.endswith(";"):
        left = left[:-1] + "."
    wrapped = textwrap.fill(
        left,
        width=max(map(len, paragraph)),
        initial_indent=first.group() if first else "",
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped
