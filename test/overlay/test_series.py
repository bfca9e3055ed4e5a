"""Files of the series before the modules and names that they say are there."""

import ast
import re

import pytest
from tools.overlay import payload
from tools.overlay.payload import ROOT
from tools.series.earlier import form_before, made_form
from tools.series.modules import module_of
from tools.series.names import Missing, NoForm


MISSING = frozenset({"torch.optim.later", "torch.optim.later.part"})
REL = "torch/optim/file.py"


def without(text, missing=MISSING):
    return form_before(REL, text.encode(), Missing(missing)).decode()


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
        x.open()
        if x:
            from .later import g

            g(y)
    finally:
        x.close()
""",
        """def f(x):
    try:
        x.open()
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


# The file, and what it is before the names "later", "option", "split" and "flatten".
NAMES = {
    "arguments and keys": (
        """def f(x, later=None, *, y=1, **option):
    g(
        x,
        # Of a later commit.
        later=later,
        y=y,
        **option,
    )
    return {"x": x, "later": later, **option}
""",
        """def f(x, *, y=1):
    g(
        x,
        y=y,
    )
    return {"x": x}
""",
    ),
    "positional arguments": (
        "a = f(later, x)\nb = f(x, later)\nc = f(x, later, y, option)\n",
        "a = f(x)\nb = f(x)\nc = f(x, y)\n",
    ),
    "calls that need all arguments": (
        "a = max(1, later)\nb = f(later)\nc = f()\n",
        "c = f()\n",
    ),
    "tuples": (
        "a = x, later\nb = (x, later)\nc = later, option\nd = [later, x]\n",
        "a = x,\nb = (x,)\nd = [x]\n",
    ),
    "conditions": (
        """def f(self, x):
    if self.later:
        x = 1
    if x or self.later:
        x = 2
    if self.later and x:
        x = 3
    if (x > 1) or (self.later is not None):
        x = 4
    if x and not self.later:
        x = 5
    if self.later is None:
        # As before.
        x = 6
    if self.later != "default":
        x = 7
    y = 8 if self.later else x
    return [y for z in x if z not in self.later]
""",
        """def f(self, x):
    if x:
        x = 2
    if (x > 1):
        x = 4
    if x:
        x = 5
    # As before.
    x = 6
    y = x
    return [y for z in x]
""",
    ),
    "local names that get no value": (
        """def f(x):
    is_later = x.later and x > 1
    has_none = x.later is None
    shape = x.shape
    if x.later:
        shape = x.later.shape
    size = x.later.size()
    if size > 1 or is_later:
        return shape
    if has_none:
        return x
    return shape
""",
        """def f(x):
    shape = x.shape
    return x
    return shape
""",
    ),
    "what nothing uses any more": (
        """import used
import unused
from somewhere import later, option

LIMIT = 1
_LIMIT = unused.limit()


class C:
    _state = None
    state = None

    def f(self):
        result = used.start()
        value = self.state
        if self.later:
            self._help(result, value, self._state, _LIMIT)

    def _help(self, *args):
        return args
""",
        """import used

LIMIT = 1


class C:
    state = None

    def f(self):
        used.start()
""",
    ),
    "fields and constants": (
        """_LATER = later(1)


class C:
    x: int = 1
    # How much.
    later: int = 0

    def later_size(self):
        return self.later * _LATER
""",
        """class C:
    x: int = 1
""",
    ),
    "methods of tensors": (
        "def f(x, split):\n    y = x.split(2)\n    return x.flatten(), x.flatten, y\n",
        "def f(x):\n    y = x.split(2)\n    return x.flatten(), y\n",
    ),
    "docstrings": (
        '''def f(x):
    """Does it. With ``later``, does more. That is all.

    Args:
        x (int): a number; for ``option``, another one.
        later (bool): whether to do more, which
            takes longer.
        y (int): the last one.
    """
''',
        '''def f(x):
    """Does it. That is all.

    Args:
        x (int): a number.
        y (int): the last one.
    """
''',
    ),
}


# As above, of what a form got wrong without a word.
OTHERS = {
    "a local name that another statement gives a value": (
        """def f(x, grads):
    if x > 1:
        y = later(x)
    else:
        y = 1
    for grad in grads:
        if grad.is_sparse:
            grad = later(grad)
        use(grad)
    return y
""",
        """def f(x, grads):
    y = 1
    for grad in grads:
        use(grad)
    return y
""",
    ),
    "a name that is not that of an option": (
        """def f(x, name):
    if name == "later":
        return 1
    if name != "later":
        check(name)
    return [y for y in x if y != "later"]
""",
        """def f(x, name):
    check(name)
    return [y for y in x]
""",
    ),
    "keys of calls": (
        """def f(x, state, later=None):
    y = state.get("later", x)
    state.setdefault("later", y)
    return dict(x=x, later=later)
""",
        """def f(x, state):
    return dict(x=x)
""",
    ),
    "brackets around items": (
        """def f(x, later=(1), y=2):
    return {
        "x": g((later), x),
        "later": (
            1 if x else 2
        ),
        "y": ((x), (later)),
    }


a = (1), (later)
""",
        """def f(x, y=2):
    return {
        "x": g(x),
        "y": ((x),),
    }


a = (1),
""",
    ),
    "markers between parameters": (
        """def f(later, /, x, *, option=1):
    return x


def g(x, /, *, later, y, **more):
    return x


def h(x, *, later, **more):
    return x
""",
        """def f(x):
    return x


def g(x, /, *, y, **more):
    return x


def h(x, **more):
    return x
""",
    ),
    "the head of a class": (
        """class C(Base, x=1, later=2):
    y = 1


class D(later.Base):
    y = 1


@cached(option)
class E:
    y = 1
""",
        """class C(Base, x=1):
    y = 1
""",
    ),
    "comments of arms": (
        """def f(x):
    if x > 2:
        y = 1
    # With it.
    elif x.later:
        y = 2
    # Without it.
    else:
        y = 3
    if x.later:
        y = 4
    # Else.
    elif x:
        # Both.
        y = (
            "of "
            "two"
        )
    return y
""",
        """def f(x):
    if x > 2:
        y = 1
    # Without it.
    else:
        y = 3
    # Else.
    if x:
        # Both.
        y = (
            "of "
            "two"
        )
    return y
""",
    ),
    "a message of two lines after an if": (
        """def f(x):
    if x.later:
        x = 1
    else:
        raise ValueError(
            "a long "
            "message"
        )
""",
        """def f(x):
    raise ValueError(
        "a long "
        "message"
    )
""",
    ),
    "an import that is tried": (
        """try:
    from . import later
    HAS = True
except ImportError:
    HAS = False


def f(x):
    if HAS:
        return 1
    return 2
""",
        """def f(x):
    return 2
""",
    ),
    "docstrings that say nothing else, lists of names and errors": (
        '''class C:
    """``later``."""

    x = 1


def f(x):
    """``option``."""
    return x


def g(x):
    """Does it.

    Args:
        x (int): a number, which is
            small.
        later, option (int): two more.
        y, later (int): others.

    Raises:
        ValueError: it is wrong; or ``later`` is.
        TypeError: it is no number,
            as ever.
    """
''',
        '''class C:
    x = 1


def f(x):
    return x


def g(x):
    """Does it.

    Args:
        x (int): a number, which is
            small.
        y, later (int): others.

    Raises:
        ValueError: it is wrong.
        TypeError: it is no number,
            as ever.
    """
''',
    ),
    "targets of loops": (
        """def f(x):
    for y, later in x:
        g(y, later)
    return [y for y, later in x]
""",
        """def f(x):
    for y, in x:
        g(y)
    return [y for y, in x]
""",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_names(name):
    text, expected = OTHERS[name]
    missing = Missing(MISSING, frozenset({"later", "option"}))
    assert form_before(REL, text.encode(), missing).decode() == expected


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    a = x.pop(); b = later\n    return a\n",
        "def f(x):\n    if x: a = later\n    return x\n",
        "def f(x):\n\tif later:\n\t\treturn 1\n\telse:\n\t\treturn x\n",
        "def f(x):\n    while not x.later:\n        g(x)\n",
        "def f(x):\n    try:\n        later(x)\n    finally:\n        g(x)\n",
        "def f(x):\n    match x:\n        case 1:\n            g(later)\n        case _:\n            g(x)\n",
        "def f(x, *later, y=1):\n    g(x, y)\n",
    ],
)
def test_what_has_no_form(text):
    """The test of the stack says so."""
    missing = Missing(names=frozenset({"later"}))
    assert form_before(REL, text.encode(), missing) == text.encode()
    with pytest.raises(NoForm):
        made_form(REL, text.encode(), missing)


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    text, expected = NAMES[name]
    missing = Missing(names=frozenset({"later", "option", "split", "flatten"}))
    assert form_before(REL, text.encode(), missing).decode() == expected
    other = Missing(names=frozenset({"another"}))
    assert form_before(REL, text.encode(), other).decode() == text


def test_tests_come_with_what_they_say():
    text = """class TestC:
    def helper(self, later=None, x=1):
        return x

    def other_helper(self):
        y = later()
        return y

    def test_x(self):
        self.helper(x=2)

    def test_later(self):
        self.helper(later=3)

    def test_by_a_helper(self):
        self.other_helper()
"""
    expected = """class TestC:
    def helper(self, x=1):
        return x

    def test_x(self):
        self.helper(x=2)
"""
    missing = Missing(names=frozenset({"later"}))
    rel = "test/optim/test_file.py"
    assert form_before(rel, text.encode(), missing).decode() == expected


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    text, expected = FORMS[name]
    assert without(text) == expected
    assert without(text, frozenset({"torch.optim.other"})) == text


@pytest.mark.parametrize(
    "text",
    [
        # The body of the `else` would have another string.
        'def f(x):\n    if x:\n        from .later import g\n    else:\n        x = """a\n        b"""\n',
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
    every = frozenset(map(module_of, texts))
    cut = 0
    for rel, text in texts.items():
        if not rel.endswith(".py"):
            continue
        form = form_before(rel, text, Missing(every - {module_of(rel)}))
        ast.parse(form)
        words = iter(re.findall(r"\w+", text.decode()))
        assert all(word in words for word in re.findall(r"\w+", form.decode())), rel
        cut += form != text
    assert cut > 10
