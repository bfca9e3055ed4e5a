# Owner(s): ["oncall: distributed"]
"""A rank fails in each phase, is killed or is stopped. The others get an error, and can train on without it.

Ranks train over groups of their own, two replicas of two shards. The last rank has the fault.
"""

import contextlib
import functools
import itertools
import os
import signal
import time
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import _muon_formulas
from torch.optim.muon import create_auto_config
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    OnCPU,
    R,
    S0,
    Spec,
    Twins,
)


# The timeout while all ranks meet on a busy machine, and the timeout during a fault.
LONG, SHORT = timedelta(seconds=90), timedelta(seconds=3)
RANKS, CULPRIT = [0, 1, 2, 3], 3


class Phase(NamedTuple):
    """A fault happens in the first call of a function, before it or ``after`` it.

    ``says`` matches the message of the other ranks.
    """

    where: Any
    name: str
    says: str
    after: bool = False


NAMED = r"parameter \d+ of shape \(8, 8\)"
UNREACHED = rf"the comparison, with {NAMED}.* failed"
EXCHANGE = rf"the (gather|scatter|forwarding|all-reduce) of .*, with {NAMED}.* failed"

AGREEMENT = Phase(dist, "all_reduce", UNREACHED)
STATUSES = Phase(dist, "all_reduce", EXCHANGE)
GATHER = Phase(dist, "all_to_all_single", EXCHANGE, after=True)
ORTHOGONALIZE = Phase(_muon_formulas, "newton_schulz", EXCHANGE)


@contextlib.contextmanager
def faulty(phase, act):
    """This rank calls ``act`` in ``phase``, once."""
    original, acts = getattr(phase.where, phase.name), [act]

    def function(*args, **kwargs):
        if acts and not phase.after:
            acts.pop()()
        result = original(*args, **kwargs)
        if acts:
            acts.pop()()
        return result

    with mock.patch.object(phase.where, phase.name, function):
        yield


def fail():
    raise LookupError("out of luck")


def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a loaded machine a single signal was lost twice.
    while True:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)


def outcome(call):
    """The error that ``call`` raises, in words."""
    try:
        call()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error} {notes}"
    return "nothing"


# DTensor's caches take equal meshes for one another, and so their groups.
mesh_numbers = itertools.count()


def make_mesh(ranks):
    grid = torch.tensor(ranks).view(2 if len(ranks) == 4 else 1, -1)
    (row,) = [row for row in grid.tolist() if dist.get_rank() in row]
    (column,) = [each for each in grid.t().tolist() if dist.get_rank() in each]
    groups = []
    for members in (column, row):
        options = {"timeout": LONG, "use_local_synchronization": True}
        groups.append(dist.new_group(members, **options))
    number = next(mesh_numbers)
    names = f"ddp {number}", f"fsdp {number}"
    return DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=names)


def make_twins(mesh):
    ddp, fsdp = mesh.get_all_groups()
    config = create_auto_config(fsdp_process_group=fsdp, ddp_process_group=ddp)
    return Twins([Spec((8, 8), mesh, (R, S0))] * 16, config)


class Faults(TestCase):
    def play(self, phase, act, own="Error"):
        """Trains, and checks the errors of a call in which the last rank acts."""
        call = functools.partial(make_twins, make_mesh(RANKS))
        if phase is not AGREEMENT:
            twins = call()
            twins.step()
            self.assertEqual(twins.problems(), [])
            twins.set_gradients()
            call = twins.optimizer.step
        dist.barrier()
        groups = [
            g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD
        ]
        for group in groups:
            _set_pg_timeout(SHORT, group)
        with contextlib.ExitStack() as stack:
            if self.rank == CULPRIT:
                stack.enter_context(faulty(phase, act))
            found = outcome(call)
        self.assertRegex(found, own if self.rank == CULPRIT else phase.says)
        if phase is not AGREEMENT:
            again = outcome(twins.optimizer.step)
            self.assertRegex(again, "RuntimeError.*Rebuild it", f"after {found}")


class TestMuonRaises(Faults, OnCPU):
    def test_raises(self):
        own = "LookupError: out of luck"
        memory = rf"RuntimeError: .*can't allocate memory.* orthogonalize of {NAMED}"
        interrupted = rf"KeyboardInterrupt: .* orthogonalize of {NAMED}"
        for phase, act, text in (
            (AGREEMENT, fail, own),
            (STATUSES, fail, own),
            (GATHER, fail, own),
            (ORTHOGONALIZE, lambda: torch.empty(1 << 50), memory),
            (ORTHOGONALIZE, interrupt, interrupted),
        ):
            with self.everywhere(f"{phase.name} {act}"):
                self.play(phase, act, text)
            # gloo polls the connections of a broken group until the group is destroyed.
            for group in list(distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)


@common_distributed.requires_gloo()
class TestMuonLostRanks(Faults, common_distributed.MultiProcessTestCase):
    world_size = len(RANKS)
    # Destroying a group would wait for lost ranks.
    destroy_pg_upon_exit = False

    def setUp(self):
        super().setUp()
        # A killed rank has another one.
        test = getattr(self, self._testMethodName)
        self.skip_return_code_checks.append(test.__wrapped__)
        self._spawn_processes()

    def tearDown(self):
        for process in self.processes:
            # A stopped process takes no other signal.
            process.kill()
        super().tearDown()

    def lose(self, phase, number):
        """The last rank takes signal ``number`` in ``phase``. Three ranks go on where four were."""
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, self.world_size)
        ranks = {"rank": self.rank, "world_size": self.world_size}
        dist.init_process_group("gloo", store=store, timeout=LONG, **ranks)
        pids = everyone(os.getpid())
        self.play(phase, lambda: os.kill(os.getpid(), number))
        if self.rank == CULPRIT:
            store.set("awake", "yes")
            return
        while self.rank == 0 and number == signal.SIGSTOP:
            os.kill(pids[CULPRIT], signal.SIGCONT)
            time.sleep(0.1)
            if store.check(["awake"]):
                break
        twins = make_twins(make_mesh(RANKS[:CULPRIT]))
        twins.step()
        self.assertEqual(twins.problems(), [])

    def test_killed(self):
        self.lose(GATHER, signal.SIGKILL)

    def test_stopped(self):
        self.lose(STATUSES, signal.SIGSTOP)


if __name__ == "__main__":
    run_tests()
