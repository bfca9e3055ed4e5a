"""torchrun starts a job on two nodes, of which one is lost and a new one takes its place.

The nodes are two agents on this machine. Their job is this file.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest


SECONDS = 120


@pytest.fixture
def torchrun(tmp_path):
    pytest.importorskip("torch")
    started = []
    # Without the last one, a new agent waits for an old one forever (torch 2.13).
    given = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **given, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(*words, **more):
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
        with open(tmp_path / f"out{len(started)}", "w") as out:
            options = {"cwd": tmp_path, "stdout": out, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, env={**env, **more}, **options))
        return started[-1]

    yield start
    for agent in started:
        agent.terminate()
        agent.wait(SECONDS)


def test_lost_node(torchrun, tmp_path):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    words = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 3]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    # An agent is lost if its heartbeat is five seconds late, which a busy machine can keep.
    conf = "keep_alive_interval=1,keep_alive_max_attempt=5,is_host"

    def node(is_host, **more):
        where = "--rdzv-conf", f"{conf}={is_host}", __file__, tmp_path
        return torchrun(*words, *where, **more)

    def two(pattern):
        until = time.monotonic() + SECONDS
        while len(found := list(tmp_path.glob(pattern))) < 2:
            assert time.monotonic() < until and first.poll() is None
            time.sleep(0.05)
        return found

    first, second = node(1), node(0, IS_LOST="1")
    workers = two("waits.*")
    second.kill()
    for worker in workers:
        os.kill(int(worker.suffix[1:]), signal.SIGKILL)
    # The other two ranks end before there is a new node.
    for error in two("error.*"):
        named = r"the (gather|all-reduce) of .*, with parameter \d.* failed"
        assert re.search(named, error.read_text())
    assert [agent.wait(SECONDS) for agent in (node(0), first)] == [0, 0]
    assert len(list(tmp_path.glob("resumed.*"))) == 4


def job(folder):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import distributed as dist, nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.optim import Muon

    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS / 4))
    rank, saved = dist.get_rank(), folder / "checkpoint"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def build():
        torch.manual_seed(0)
        layers = [nn.Linear(*shape, bias=False) for shape in ((16, 32), (32, 16))]
        model = fully_shard(nn.Sequential(*layers), mesh=mesh)
        return model, Muon(model.parameters(), lr=0.02, distributed_config="auto")

    def train(model, muon, steps, is_lost=False):
        for step in steps:
            torch.manual_seed(10 * step + rank)
            muon.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            if is_lost:
                (folder / f"waits.{os.getpid()}").touch()
                signal.pause()
            muon.step()
        momentum = [muon.state[p]["momentum_buffer"] for p in model.parameters()]
        return [t.detach().to_local() for t in [*model.parameters(), *momentum]]

    names = "model_state_dict", "optim_state_dict"
    model, muon = build()
    if not saved.exists():
        torch.save(train(model, muon, range(6)), folder / f"undisturbed.{rank}")
        model, muon = build()
        train(model, muon, range(3))
        state = dict(zip(names, get_state_dict(model, muon)))
        dcp.save(state, checkpoint_id=saved)
        try:
            train(model, muon, [3], "IS_LOST" in os.environ)
        except RuntimeError as error:
            (folder / f"error.{rank}").write_text(str(error))
            raise
    state = dict(zip(names, get_state_dict(model, muon)))
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(model, muon, **state)
    undisturbed = torch.load(folder / f"undisturbed.{rank}")
    assert all(map(torch.equal, train(model, muon, range(3, 6)), undisturbed))
    (folder / f"resumed.{rank}").touch()


if __name__ == "__main__":
    job(Path(sys.argv[1]))
