# Owner(s): ["oncall: distributed"]
"""A rank fails in each phase, is killed or is stopped. The others get an error, and a checkpoint resumes.

Teams of four ranks train over groups of their own, two replicas of two shards. In each case the last
rank of a team has a fault. After a killed rank, the next case starts from the checkpoint that precedes the
first case. In the end, the other three ranks of each team resume from that checkpoint.
"""

import contextlib
import faulthandler
import functools
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
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
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import R, S0, Spec, Twins


# The timeout while all ranks meet on a busy machine, and the timeout during a fault.
LONG, SHORT = timedelta(seconds=90), timedelta(seconds=3)
# The numbers of ranks in a team, and of those without a fault.
TEAM, SPARED = 4, 3


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
PHASES = {
    "statuses": Phase(dist, "all_reduce", EXCHANGE),
    "gather": Phase(dist, "all_to_all_single", EXCHANGE, after=True),
    "orthogonalize": Phase(_muon_formulas, "newton_schulz", EXCHANGE),
    # This message comes from torch.distributed.checkpoint and gloo.
    "save": Phase(dcp.FileSystemWriter, "write_data", "(Runtime|Checkpoint)E"),
    "agreement": AGREEMENT,
}


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


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


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


class Case(NamedTuple):
    phase: Phase
    act: Callable
    own: str = ""
    told: str = ""


class Job:
    def __init__(self, name, ranks, rank):
        self.rank, self.ranks = rank, ranks
        shape = (2, 2) if len(ranks) == TEAM else (1, len(ranks))
        grid = torch.tensor(ranks).view(shape)
        (row,) = [row for row in grid.tolist() if rank in row]
        (column,) = [column for column in grid.t().tolist() if rank in column]
        ddp = dist.new_group(column, timeout=LONG, use_local_synchronization=True)
        fsdp = dist.new_group(row, timeout=LONG, use_local_synchronization=True)
        self.all = dist.new_group(ranks, timeout=LONG, use_local_synchronization=True)
        self.groups = ddp, fsdp
        self.twins = None
        # DTensor's caches take equal meshes for one another, and so their groups.
        names = (f"ddp, {name}", f"fsdp, {name}")
        self.mesh = DeviceMesh.from_group(
            [ddp, fsdp], "cpu", mesh=grid, mesh_dim_names=names
        )

    def build(self):
        ddp, fsdp = self.groups
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

    def close(self):
        """gloo polls the connections of a broken group until the group is destroyed."""
        self.twins = None
        for group in self.all_groups():
            dist.destroy_process_group(group)

    def all_groups(self):
        """The job's groups and those that Muon has made."""
        made = distributed_c10d._world.pg_map
        return [group for group in made if group is not dist.group.WORLD]


class Faults(common_distributed.MultiProcessTestCase):
    # The cases of each team, which plays them sequentially.
    cases: list[dict[str, Case]]
    # Whether each case ends a rank.
    deadly = False
    # Destroying a group would wait for lost ranks.
    destroy_pg_upon_exit = False

    def setUp(self):
        super().setUp()
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.addCleanup(os.remove, self.file_name)
        # The parent has the store, as torchrun does, so it outlives every rank.
        options = {"is_master": True, "wait_for_workers": False}
        self.server = dist.TCPStore("127.0.0.1", 0, **options)
        with open(self.file_name, "w") as file:
            file.write(f"{self.server.port} {folder}")
        self._spawn_processes()

    def tearDown(self):
        for process in self.processes:
            # A stopped process takes no other signal.
            process.kill()
        super().tearDown()

    def _check_return_codes(self, fn, elapsed_time):
        super()._check_return_codes(fn, elapsed_time)
        codes = [process.exitcode for process in self.processes]
        lost = len(codes) - SPARED if self.deadly else 0
        spared = [0] * (len(codes) - lost)
        self.assertEqual(codes, spared + [-signal.SIGKILL] * lost)

    def exchange(self, what, ranks, value):
        """``value`` of each of ``ranks``, over the store, because no group lasts."""
        self.store.set(f"{what}/{self.rank}", pickle.dumps(value))
        return {r: pickle.loads(self.store.get(f"{what}/{r}")) for r in ranks}

    def outcome(self, call):
        try:
            call()
        except BaseException as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            return type(error).__name__, f"{error} {notes}"
        return "", "nothing"

    def run_case(self, name, case, job):
        ranks, phase, culprit = job.ranks, case.phase, job.ranks[-1]
        if phase is AGREEMENT:
            call = job.build
        else:
            job.build()
            if self.deadly:
                job.resume(self.path)
            job.twins.step()
            self.assertEqual(job.twins.problems(), [])
            job.twins.set_gradients()
            call = job.twins.optimizer.step
        if phase is PHASES["save"]:
            call = functools.partial(job.save, f"{self.path}-{name}")
        self.exchange(f"{name} begins", ranks, None)
        for group in job.all_groups():
            _set_pg_timeout(SHORT, group)
        with contextlib.ExitStack() as stack:
            if self.rank == culprit:
                stack.enter_context(faulty(phase, case.act))
            found = self.outcome(call)
        if phase is PHASES["save"]:
            # The optimizer itself did not fail, and so it does not warn.
            with self.assertNoLogs("torch.optim.muon", "WARNING"):
                job.twins.optimizer.state_dict()
        elif phase is not AGREEMENT:
            again, text = self.outcome(job.twins.optimizer.step)
            message = f"{name}, the step after {found}"
            self.assertRegex(f"{again}: {text}", "RuntimeError.*Rebuild it", message)
            found = (*found, text)
        return found

    def check_case(self, name, case, found, culprit):
        for rank, (kind, text, *_) in found.items():
            says = case.told or case.phase.says
            message = f"{name}, rank {rank}: {found}"
            expected = case.own or "Error" if rank == culprit else says
            self.assertRegex(f"{kind}: {text}", expected, message)

    def awaken(self, name, culprit):
        """Continues a stopped rank until it has stored its outcome."""
        while not self.store.check([f"{name} ends/{culprit}"]):
            os.kill(pickle.loads(self.store.get(f"process/{culprit}")), signal.SIGCONT)
            time.sleep(0.1)

    def run_cases(self):
        faulthandler.dump_traceback_later(150, exit=True)
        torch.set_num_threads(1)
        with open(self.file_name) as file:
            port, folder = file.read().split()
        self.store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        ranks = {"rank": self.rank, "world_size": self.world_size}
        dist.init_process_group("gloo", store=self.store, timeout=LONG, **ranks)
        self.store.set(f"process/{self.rank}", pickle.dumps(os.getpid()))
        # The survivors wait this long for the reason of another rank.
        team = 0 if self.deadly else self.rank // TEAM
        self.path = os.path.join(folder, str(team))
        self.run_team(team * TEAM, self.cases[team])
        faulthandler.cancel_dump_traceback_later()

    def run_team(self, first, cases):
        spared = list(range(first, first + SPARED))
        # A killed rank does not come again.
        culprits = []
        for number in range(len(cases)):
            culprits.append(first + SPARED + (number if self.deadly else 0))
        if self.rank in (*spared, culprits[0]):
            job = Job("before", [*spared, culprits[0]], self.rank)
            job.build()
            job.twins.step()
            job.save(self.path)
        for culprit, (name, case) in zip(culprits, cases.items(), strict=True):
            if self.rank not in (*spared, culprit):
                continue
            job = Job(name, [*spared, culprit], self.rank)
            found = self.run_case(name, case, job)
            name = f"team {first}, {name}"
            if self.rank == culprit:
                self.exchange(f"{name} ends", [culprit], found)
            outcomes = self.exchange(f"{name} ends", spared, found)
            if case.act is stop and self.rank == first:
                self.awaken(name, culprit)
            if not self.deadly:
                outcomes = self.exchange(f"{name} ends", [*spared, culprit], found)
            self.check_case(name, case, outcomes, culprit)
            job.close()
        if self.rank in spared:
            # Three ranks go on where four were.
            job = Job("after", spared, self.rank)
            job.build()
            job.resume(self.path)
            job.twins.step()
            self.assertEqual(job.twins.problems(), [])


def in_phases(act, *names):
    return {name: Case(PHASES[name], act) for name in names}


@common_distributed.requires_gloo()
class TestMuonKilled(Faults):
    cases = [in_phases(kill, "gather", "save")]
    deadly = True
    world_size = SPARED + len(cases[0])

    def test_killed(self):
        self.run_cases()


@common_distributed.requires_gloo()
class TestMuonStopped(Faults):
    # Two teams, since the default group would otherwise be one of theirs.
    cases = [in_phases(stop, "statuses"), in_phases(stop, "agreement")]
    world_size = 2 * TEAM

    def test_stopped(self):
        self.run_cases()


OWN = "LookupError: out of luck"
RAISING = {
    "memory": Case(
        PHASES["orthogonalize"],
        exhaust,
        rf"RuntimeError: .*can't allocate memory.* orthogonalize of {NAMED}",
    ),
    "interrupt": Case(
        PHASES["orthogonalize"],
        interrupt,
        rf"KeyboardInterrupt: .* orthogonalize of {NAMED}",
    ),
    **{
        name: Case(phase, fail, OWN)
        for name, phase in PHASES.items()
        if name != "orthogonalize"
    },
}


def dealt(cases):
    """The cases of each of two teams, which play at the same time."""
    teams = {}, {}
    for number, (name, case) in enumerate(cases.items()):
        teams[number % 2][name] = case
    return list(teams)


@common_distributed.requires_gloo()
class TestMuonRaises(Faults):
    cases = dealt(RAISING)
    world_size = 2 * TEAM

    def test_raises(self):
        self.run_cases()


if __name__ == "__main__":
    run_tests()
