"""Marks each test with its stage, so that `-m stage1` to `-m stage4` choose, and lets
ranks start fast.

Not for PyTorch, which has a conftest.py of its own: `apply` leaves this one here.
"""

import itertools
import multiprocessing
import os
import sys
from multiprocessing import forkserver, util

import pytest


# Processes from which on a test is of a large scale.
LARGE = 8


def stage_of(folder, case):
    """The marker of a test in that folder under test/; ``case`` is its class, None for a function."""
    if folder in ("overlay", "frameworks"):
        return "overlay"
    world_size = getattr(case, "world_size", 1)
    name = getattr(case, "__name__", "")
    if world_size >= LARGE or "Performance" in name:
        return "stage4"
    if world_size > 1:
        return "stage3"
    return "stage2" if "GPU" in name else "stage1"


# Before pytest-xdist, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        folders = item.path.relative_to(item.config.rootpath / "test").parts
        stage = stage_of(folders[0], item.cls)
        item.add_marker(getattr(pytest.mark, stage))
        # Otherwise each worker of pytest-xdist starts the processes that a class shares, and repeats
        # the preparation of a file of the overlay's tests.
        if hasattr(item.cls, "world_size"):
            item.add_marker(pytest.mark.xdist_group(item.cls.__qualname__))
        elif stage == "overlay":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if hasattr(config, "workerinput"):
        # The files that take longest come first: none is left for one worker at the end.
        items.sort(key=lambda item: item.get_closest_marker("overlay") is None)


# Without this, each rank imports these: seconds, and more than most tests take.
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.common_distributed",
    "torch.optim._muon_engine.engine",
    "torch.testing._internal.distributed._muon.common_muon",
    "frozen_imports",
]
# The forks of one server share the seed of string hashes. The ranks of a real job differ in it. Code that
# iterates over a set of names in another order on each rank must fail here, too.
SERVERS = 2

# The tracer of coverage.py takes half as long again. In a run of all tests, only test files of the optimizer
# are traced. Without these, they execute together what the limits of tools/coverage.py ask for.
UNTRACED_FILES = {"test_muon_fuzz", "test_muon_rules"}
# Classes of other files that repeat what others execute.
UNTRACED = {
    "TestKernelsAtLength",
    "TestMuonCheckpoints",
    "TestMuonLongRuns",
    "TestMuonLostRanks",
    "TestMuonMatrixOf8",
    "TestMuonParityOf8",
    "TestMuonParityOf32",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    name, case = item.path.stem, getattr(item.cls, "__name__", "")
    is_traced = name.startswith(("test_muon", "test_newton_schulz"))
    is_traced = is_traced and name not in UNTRACED_FILES and case not in UNTRACED
    # In a run of some tests, all of them are measured.
    if os.environ.get("MUON_MEASURE") != "once" or is_traced:
        return (yield)
    # Nor are processes that are started meanwhile.
    tracer = sys.gettrace()
    config = os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        if config is not None:
            os.environ["COVERAGE_PROCESS_CONFIG"] = config


def pytest_sessionfinish(session):
    """Saves what a worker measured, because pytest-xdist kills one that takes ten seconds to end."""
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage else None
    if measured is not None and hasattr(session.config, "workerinput"):
        measured.save()


def pytest_collection_finish():
    """Has tests run on one thread, and ranks forked from servers that have imported torch.

    A test file that is started as a script spawns its ranks, as upstream does.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # The matrices are small: threads would cost more than they give, above all on a busy machine.
    torch.set_num_threads(1)
    if sys.platform != "linux":
        return
    # Imports ask for the devices. A server that has asked CUDA, and not NVML, bars its forks from them.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    turns = {}

    def started():
        for _ in range(SERVERS):
            server = forkserver.ForkServer()
            server.set_forkserver_preload(PRELOADED)
            # After the ranks have ended. It writes down its coverage, which is put together next.
            util.Finalize(None, server._stop, exitpriority=-1)
            yield server

    def connect(fds):
        # Whether a server is measured, and with it all that it forks, is known when it starts.
        measured = os.environ.get("COVERAGE_PROCESS_CONFIG")
        if measured not in turns:
            turns[measured] = itertools.cycle(list(started()))
        return next(turns[measured]).connect_to_new_process(fds)

    forkserver.connect_to_new_process = connect
    multiprocessing.set_start_method("forkserver", force=True)
    common = sys.modules.get("torch.testing._internal.common_distributed")
    if common is not None:
        # It asks for "spawn" by name, whatever is set.
        process = multiprocessing.get_context("forkserver").Process
        common.MultiProcessTestCase._spawn_processes = lambda case: (
            case._start_processes(process)
        )
