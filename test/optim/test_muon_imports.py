# Owner(s): ["module: optimizer"]
"""The imports within torch/optim/_muon_engine, read from the source: they go one way, types included."""

import ast
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import torch.optim
from torch.testing._internal.common_utils import run_tests, TestCase


FOLDER = Path(torch.optim.__file__).parent / "_muon_engine"
ENGINE = "torch.optim._muon_engine"

# The other parts of the engine that each part may import.
MAY_IMPORT = {
    "config": set(),
    # ``listed``, a helper for messages.
    "agreement": {"layouts", "process_groups"},
    "process_groups": set(),
    "layouts": {"agreement", "process_groups"},
    "schedule": {"layouts"},
    "runtime": {"schedule", "layouts", "process_groups"},
    "hints": {"layouts", "runtime"},
    "callbacks": {"runtime", "schedule", "layouts", "process_groups", "config"},
    "describe": {"layouts", "process_groups", "schedule"},
    "engine": {
        *("callbacks", "describe", "hints", "runtime", "schedule"),
        *("layouts", "process_groups", "agreement", "config"),
    },
}
# Names that only the layouts may know.
OF_FRAMEWORKS = {"DTensor", "FlatParameter", "_fsdp_flattened", "placements"}


def known_modules():
    """Module of the engine -> its file."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        found[".".join([ENGINE, *(p for p in parts if p != "__init__")])] = path
    return found


def imports_of(path, package, known):
    """The modules that a file imports anywhere, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            # A name after "import" may be a module, too.
            for name in (f"{base}.{alias.name}" for alias in node.names):
                found.add(name if name in known else base)
    return found


def graph():
    """Module -> the modules that it imports."""
    known = known_modules()
    return {
        name: imports_of(
            path, name if path.stem == "__init__" else name.rpartition(".")[0], known
        )
        for name, path in known.items()
    }


def part_of(module):
    """The file or folder of the engine that ``module`` is in; "" for the engine's own package."""
    return module[len(ENGINE) + 1 :].partition(".")[0]


def problems(imports):
    """The imports that break the rule; ``imports`` has the modules that each module imports."""
    found = []
    for module, others in imports.items():
        mine = part_of(module)
        for other in sorted(others):
            if other == ENGINE or other.startswith(f"{ENGINE}."):
                its = part_of(other)
                if its != mine and its not in MAY_IMPORT.get(mine, set()):
                    found.append(f"{module} imports {other}")
            elif other.startswith(("torch.optim._muon", "torch.optim.muon")):
                found.append(f"{module} imports {other}, which is above it")
    inside = {
        module: {other for other in others if other in imports and other != module}
        for module, others in imports.items()
    }
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        found.append(f"a circle: {' <- '.join(error.args[1])}")
    return found


class TestMuonImports(TestCase):
    def test_imports_go_one_way(self):
        imports = graph()
        self.assertEqual(problems(imports), [])
        # An empty folder, or a part that the rule does not know, shows nothing.
        parts = {part_of(module) for module in imports} - {""}
        self.assertEqual(parts, set(MAY_IMPORT))

    def test_orthogonalization_stands_alone(self):
        path = FOLDER.parent / "_newton_schulz.py"
        imports = imports_of(path, "torch.optim", known_modules())
        self.assertFalse([name for name in imports if "muon" in name])

    def test_only_layouts_know_frameworks(self):
        for name, path in known_modules().items():
            if part_of(name) == "layouts":
                continue
            used = {
                getattr(node, key, "")
                for node in ast.walk(ast.parse(path.read_text()))
                for key in ("id", "attr", "name")
            }
            self.assertFalse(used & OF_FRAMEWORKS, name)


if __name__ == "__main__":
    run_tests()
