"""Files of the series before the modules of their hooks are there."""

import ast

import pytest
from tools.overlay import hooks, payload
from tools.overlay.payload import ROOT


MISSING = frozenset({"torch.optim.later", "torch.optim.later.part"})
REL = "torch/optim/file.py"


def without(text, missing=MISSING):
    return hooks.without(REL, text.encode(), missing).decode()


# The file, and what it is before the module that it imports.
FORMS = {
    "an if": (
        """def f(x):
    y = x
    # For large ones.
    if x > 1:
        from .later import g

        return g(x)
    return y
""",
        """def f(x):
    y = x
    return y
""",
    ),
    "an if after an empty line, by its whole name": (
        """def f(x):
    y = x

    if x > 1:
        import torch.optim.later

        y = 2

    return y
""",
        """def f(x):
    y = x

    return y
""",
    ),
    "the last arm of a chain": (
        """def f(x):
    if x > 1:
        y = 1
    elif x:
        from . import later

        y = later.g(x)
    return y
""",
        """def f(x):
    if x > 1:
        y = 1
    return y
""",
    ),
    "an arm in the middle": (
        """def f(x):
    if x > 1:
        y = 1
    elif x:
        from . import later

        y = later.g(x)
    else:
        y = 2
    return y
""",
        """def f(x):
    if x > 1:
        y = 1
    else:
        y = 2
    return y
""",
    ),
    "an if with an else": (
        """def f(x):
    for y in x:
        if y:
            from .later.part import g

            g(y)
        else:
            # As ever.
            if y is None:
                y = 0

            print(y)
""",
        """def f(x):
    for y in x:
        # As ever.
        if y is None:
            y = 0

        print(y)
""",
    ),
    "what a hook leaves empty": (
        """def f(x):
    for y in x:
        if y:
            if y > 1:
                from .later import g

                g(y)
    try:
        y = x
        if y:
            from .later import g

            g(y)
    finally:
        x.close()
""",
        """def f(x):
    try:
        y = x
    finally:
        x.close()
""",
    ),
    "functions and their names": (
        """__all__ = [
    "f",
    "g",
]


def f(x):
    return x


# What later files do.
@cached
@other
def g(x):
    with x:
        from .later import h

        return h(x)


class C:
    \"\"\"A class.\"\"\"

    def f(self):
        return 1

    @property
    def h(self):
        if self.x:
            return 2
        from .later import h

        return h(self)


class D:
    def f(self):
        from .later import h

        return h(self)


Z = 1
""",
        """__all__ = [
    "f",
]


def f(x):
    return x


class C:
    \"\"\"A class.\"\"\"

    def f(self):
        return 1


Z = 1
""",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    text, expected = FORMS[name]
    assert without(text) == expected
    assert without(text, frozenset({"torch.optim.other"})) == text


@pytest.mark.parametrize(
    "text",
    [
        # Names at the top, which the rest of the file needs.
        "from .later import g\n\n\ndef f():\n    import other\n",
        # The import is not what the body begins with, and the function has no name of its own.
        "if x:\n    y = 1\n    from .later import g\n",
        # The body of the `else` would have another string.
        'def f(x):\n    if x:\n        from .later import g\n    else:\n        x = """a\n        b"""\n',
        # Two arms, and nothing that could be in the place of the first.
        "def f(x):\n    if x:\n        from .later import g\n    elif x:\n        y = 1\n",
        # An `else` would stand alone.
        "def f(x):\n    if x:\n        if x:\n            from .later import g\n    else:\n        y = 1\n",
        # Conflict markers, or a newer Python.
        "def f(x):\n    from .later import g\n<<<<<<< ours\n",
    ],
)
def test_what_is_no_hook_stays(text):
    """The test of the stack finds the import then."""
    assert without(text) == text


def test_every_file_without_any_of_the_others():
    """What is left is Python, whose lines the file has in the same order."""
    texts = payload.read(ROOT).whole
    every = frozenset(map(hooks.module_of, texts))
    cut = 0
    for rel, text in texts.items():
        if not rel.endswith(".py"):
            continue
        form = hooks.without(rel, text, every - {hooks.module_of(rel)})
        ast.parse(form)
        lines = iter(text.decode().split())
        assert all(word in lines for word in form.decode().split()), rel
        cut += form != text
    assert cut > 10
