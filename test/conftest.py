"""Marks each test with its stage, so that `-m stage1` to `-m stage4` choose.

Not for PyTorch, which has a conftest.py of its own: `apply` leaves this one here.
"""

import pytest


# What a single GPU could run as well: one process is as it always was.
STAGE_2 = {"TestStockParity", "TestMuonCore", "TestCompile", "TestOptimizerDatabase"}
# Processes from which on a test is of a large scale.
LARGE = 8


def stage_of(folder, case):
    """The marker of a test.

    Args:
        folder: under test/, with its parents.
        case: the class; None for a function.
    """
    if folder == "overlay":
        return "overlay"
    world_size = getattr(case, "world_size", 1)
    if isinstance(world_size, property):
        world_size = world_size.fget(None)
    name = getattr(case, "__name__", "")
    if world_size >= LARGE or "Stress" in name or "Performance" in name:
        return "stage4"
    if world_size > 1 or "GPU" in name:
        return "stage3"
    return "stage2" if name in STAGE_2 else "stage1"


def pytest_collection_modifyitems(items):
    for item in items:
        folders = item.path.relative_to(item.config.rootpath / "test").parts
        stage = stage_of(folders[0], item.cls)
        item.add_marker(getattr(pytest.mark, stage))
