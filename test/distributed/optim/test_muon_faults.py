# Owner(s): ["oncall: distributed"]
"""A rank fails in each phase, is killed or is stopped. The others get an error, and a checkpoint resumes.

Ranks train over groups of their own, two replicas of two shards. The last rank has the fault.
"""

import contextlib
import functools
import os
import shutil
import signal
import tempfile
import time
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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
UNREACHED = rf"could not (reach|make a process group of) ranks .*share {NAMED}"
EXCHANGE = rf"the (gather|scatter|forwarding|all-reduce) of .*, with {NAMED}.* failed"

AGREEMENT = Phase(dist, "all_reduce", UNREACHED)
STATUSES = Phase(dist, "all_reduce", EXCHANGE)
GATHER = Phase(dist, "all_to_all_single", EXCHANGE, after=True)
ORTHOGONALIZE = Phase(_muon_formulas, "newton_schulz", EXCHANGE)
# This message comes from torch.distributed.checkpoint and gloo.
SAVE = Phase(dcp.FileSystemWriter, "write_data", "(Runtime|Checkpoint)E")


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


def exhaust():
    torch.empty(1 << 50)


def signaled(number):
    return lambda: os.kill(os.getpid(), number)


def outcome(call):
    """The error that ``call`` raises, in words."""
    try:
        call()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error} {notes}"
    return "nothing"


class Job:
    def __init__(self, ranks):
        grid = torch.tensor(ranks).view(2 if len(ranks) == 4 else 1, -1)
        (row,) = [row for row in grid.tolist() if dist.get_rank() in row]
        (column,) = [each for each in grid.t().tolist() if dist.get_rank() in each]
        groups = []
        for members in (column, row, ranks):
            options = {"timeout": LONG, "use_local_synchronization": True}
            groups.append(dist.new_group(members, **options))
        *of_mesh, self.all = groups
        # DTensor's caches take equal meshes for one another, and so their groups.
        names = [f"{kind} {self.all.group_name}" for kind in ("ddp", "fsdp")]
        self.mesh = DeviceMesh.from_group(
            of_mesh, "cpu", mesh=grid, mesh_dim_names=names
        )

    def build(self):
        ddp, fsdp = self.mesh.get_all_groups()
        config = create_auto_config(fsdp_process_group=fsdp, ddp_process_group=ddp)
        self.twins = Twins([Spec((8, 8), self.mesh, (R, S0))] * 16, config)

    def state(self):
        module = torch.nn.ParameterList(self.twins.params)
        optimizer = get_optimizer_state_dict(module, self.twins.optimizer)
        return module, {"model": module.state_dict(), "optimizer": optimizer}

    def save(self, path):
        dcp.save(self.state()[1], checkpoint_id=path, process_group=self.all)

    def resume(self, path):
        module, state = self.state()
        dcp.load(state, checkpoint_id=path, process_group=self.all)
        set_optimizer_state_dict(module, self.twins.optimizer, state["optimizer"])
        # The single process makes the step that the checkpoint contains.
        self.twins.set_gradients()
        self.twins.single.step()


class Faults(TestCase):
    def play(self, phase, act, path, own="Error"):
        """Trains, saves at ``path``, and checks the errors of a call in which the last rank acts."""
        job = Job(RANKS)
        call = job.build
        if phase is not AGREEMENT:
            job.build()
            job.twins.step()
            self.assertEqual(job.twins.problems(), [])
            job.save(path)
            job.twins.set_gradients()
            call = job.twins.optimizer.step
        if phase is SAVE:
            call = functools.partial(job.save, f"{path}-again")
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
        if phase is SAVE:
            # The optimizer itself did not fail, and so it does not warn.
            with self.assertNoLogs("torch.optim.muon", "WARNING"):
                job.twins.optimizer.state_dict()
        elif phase is not AGREEMENT:
            again = outcome(job.twins.optimizer.step)
            self.assertRegex(again, "RuntimeError.*Rebuild it", f"after {found}")


class TestMuonRaises(Faults, OnCPU):
    def test_raises(self):
        folder = everyone(tempfile.mkdtemp())[0]
        own = "LookupError: out of luck"
        memory = rf"RuntimeError: .*can't allocate memory.* orthogonalize of {NAMED}"
        interrupted = rf"KeyboardInterrupt: .* orthogonalize of {NAMED}"
        for number, (phase, act, text) in enumerate(
            (
                (AGREEMENT, fail, own),
                (STATUSES, fail, own),
                (GATHER, fail, own),
                (ORTHOGONALIZE, exhaust, memory),
                (ORTHOGONALIZE, interrupt, interrupted),
                (SAVE, fail, own),
            )
        ):
            with self.everywhere(f"{phase.name} {act}"):
                self.play(phase, act, f"{folder}/{number}", text)
            # gloo polls the connections of a broken group until the group is destroyed.
            for group in list(distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        shutil.rmtree(folder, ignore_errors=True)


class LostRanks(Faults, common_distributed.MultiProcessTestCase):
    world_size = len(RANKS)
    # Destroying a group would wait for lost ranks.
    destroy_pg_upon_exit = False

    def setUp(self):
        super().setUp()
        self.folder = f"{self.file_name}-checkpoints"
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
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
        path = f"{self.file_name}-checkpoints/{phase.name}"
        self.play(phase, signaled(number), path)
        if self.rank == CULPRIT:
            store.set("awake", "yes")
            return
        while self.rank == 0 and number == signal.SIGSTOP:
            os.kill(pids[CULPRIT], signal.SIGCONT)
            time.sleep(0.1)
            if store.check(["awake"]):
                break
        job = Job(RANKS[:CULPRIT])
        job.build()
        if phase is not AGREEMENT:
            job.resume(path)
        job.twins.step()
        self.assertEqual(job.twins.problems(), [])


@common_distributed.requires_gloo()
class TestMuonKilled(LostRanks):
    def test_killed(self):
        self.lose(GATHER, signal.SIGKILL)

    def test_killed_while_saving(self):
        self.lose(SAVE, signal.SIGKILL)


@common_distributed.requires_gloo()
class TestMuonStopped(LostRanks):
    def test_stopped(self):
        self.lose(STATUSES, signal.SIGSTOP)

    def test_stopped_in_the_agreement(self):
        self.lose(AGREEMENT, signal.SIGSTOP)


if __name__ == "__main__":
    run_tests()
