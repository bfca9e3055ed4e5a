"""Each kind of parallelism against one process: checks that run on CPUs and on GPUs.

Each function is the body of a test of several classes. ``case`` is the test on this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
)
from torch.testing._internal.distributed._muon import common_modules
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_groups import Strategy
from torch.testing._internal.distributed._muon.common_modules import (
    check_module,
    data_parallel,
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    device,
    everyone,
    full,
    grid_of,
    local,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


# Even for eight processes, uneven, and fewer rows than processes.
SHAPES = [(16, 8), (9, 13), (3, 20), (13, 9)]
# The dimensions that tensor_parallel() cuts.
TP_DIMS = {0: 0, 1: 1, 2: 0, 3: 1}


def grid_of_columns(case):
    """The mesh of all ranks with two columns."""
    return grid_of(case.world_size // 2, 2)


def check_linear(case, size, batch, steps):
    """A weight by rows, a replicated bias, and inputs that are DTensors."""
    mesh = mesh_of(case.world_size)
    torch.manual_seed(42)
    model = torch.nn.Linear(size, size, device=device())
    common_modules.place_weights(model, mesh, [Shard(0)])

    def inputs(step):
        return distribute_tensor(full(step, (batch, size)), mesh, [Replicate()])

    check_module(case, model, create_dtensor_config(), steps, inputs=inputs)
    case.assertIsInstance(model.weight, DTensor)
    case.assertEqual(model.weight.placements, (Shard(0),))


def check_dtensor_shard_correctness(case):
    check_linear(case, size=64, batch=8, steps=1)


def check_dtensor_vs_single_device(case):
    check_linear(case, size=32, batch=4, steps=5)


def check_dtensor_placements(case):
    """No framework has a collective here."""
    for mesh in (mesh_of(case.world_size), grid_of_columns(case)):
        with case.subTest(mesh=mesh):
            twins = Twins(specs(mesh, all_placements(mesh)))
            twins.set_gradients()
            with NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            twins.single.step()
            case.assertParity(twins)
            # Each matrix once, replicas included.
            counts = everyone(len(calls.shapes))
            case.assertEqual(sum(counts), len(twins.params))


def check_twelve_steps_twice(case):
    mesh, grid = mesh_of(case.world_size), grid_of_columns(case)
    placed = specs(mesh, all_placements(mesh), SHAPES[:3])
    placed += specs(grid, [(R, S0), (S0, S1)], SHAPES[:3])
    runs = []
    for _ in range(2):
        twins = Twins(placed)
        for _ in range(12):
            twins.step()
        case.assertParity(twins)
        runs.append([local(param.detach()).clone() for param in twins.params])
    first_run, second_run = runs
    with case.everywhere():
        for first, second in zip(first_run, second_run, strict=True):
            case.assertTrue(torch.equal(first, second))


def check_dtensor_2d_mesh(case):
    mesh = grid_of_columns(case)
    twins = Twins([Spec((128, 128), mesh, (Shard(0), Shard(1)))], lr=0.01)
    case.assertTrainsAlike(twins)
    rows = 128 // mesh.size(0)
    case.assertEqual(twins.params[0].to_local().shape, (rows, 64))


def check_fsdp_correctness(case):
    run = common_modules.Run(orig=False)
    counts = everyone(len(run.step()))
    case.assertEverywhere(run.alone.problems())
    matrices = [param for param in run.one.parameters() if param.ndim == 2]
    case.assertEqual(sum(counts), len(matrices))


def check_fsdp_vs_single_device(case):
    for orig in (False, True):
        with case.subTest(use_orig_params=orig):
            run = common_modules.Run(orig=orig)
            for _ in range(10):
                run.step()
            case.assertEverywhere(run.alone.problems())


def check_fully_shard_vs_single_device(case):
    line = mesh_of(case.world_size)
    rows = min(2, case.world_size)
    grid = grid_of(rows, case.world_size // rows)
    bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, mesh, options in (
        ("bfloat16", line, {"mp_policy": bfloat16}),
        ("kept whole", line, {"reshard_after_forward": False}),
        ("last dimension", line, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
        ("hsdp", grid, {}),
    ):
        with case.subTest(name):
            model = fully_shard(make_model(), mesh=mesh, **options)
            config = create_dtensor_config()
            check_module(case, model, config, data_rank=case.rank)


def check_process_groups(case):
    """Pieces that are cut by hand, with gradients that are given. No framework has a collective here."""
    line, grid = grid_of(case.world_size), grid_of_columns(case)
    for strategy in (
        Strategy(line, "fsdp"),
        Strategy(line, "tp"),
        Strategy(line, "ddp"),
        Strategy(grid, "fsdp", "tp"),
        Strategy(grid, "ddp", "fsdp"),
    ):
        with case.subTest(strategy=strategy):
            case.assertTrainsAlike(strategy.twins())


def check_flat_parameters(case):
    """FSDP1 without its backward pass."""
    run = common_modules.Run(orig=False)
    for step in range(2):
        for number, unit in enumerate(FSDP.fsdp_modules(run.model)):
            flat = unit._handle.flat_param
            seed = 1000 * step + 100 * number
            wholes = {}
            for name, shape in zip(flat._fqns, flat._shapes, strict=True):
                wholes[name] = full(seed, shape)
                seed += 1
            common_modules.give_flat_gradients(flat, wholes)
        run.alone.step()
        run.optimizer.step()
        case.assertEverywhere(run.alone.problems(), f"step {step}")


def check_ddp_vs_single_device(case):
    # Without a config, each rank orthogonalizes all matrices, as before.
    for config, count in (
        (create_auto_config(ddp_process_group=dist.group.WORLD), 4),
        (None, 4 * case.world_size),
    ):
        with case.subTest(has_config=config is not None):
            model = data_parallel(make_model(), gradient_as_bucket_view=True)
            check_module(case, model, config, data_rank=case.rank, count=count)


def check_per_parameter_tp_dims(case):
    group = dist.group.WORLD
    config = create_auto_config(tp_process_group=group, tp_dim_per_param=TP_DIMS)
    model = tensor_parallel(make_model(), mesh_of(case.world_size))
    matrices, _ = check_module(case, model, config)
    case.assertEqual(detect_tp_dims_from_model(matrices), TP_DIMS)
    placements = [param.placements for param in matrices]
    case.assertEqual(placements, [(S0,), (S1,), (S0,), (S1,)])


def check_fsdp_plus_tp(case):
    grid = grid_of_columns(case)
    model = tensor_parallel(make_model(), grid["b"])
    fully_shard(model, mesh=grid["a"])
    config = create_auto_config(
        fsdp_process_group=grid.get_group("a"),
        tp_process_group=grid.get_group("b"),
        tp_dim_per_param=TP_DIMS,
    )
    check_module(case, model, config, data_rank=grid.get_local_rank("a"))


def make_expert(number):
    """Two matrices."""
    return make_model(layers=1, bias=False, seed=50 + number)


def check_expert_parallel_independence(case):
    """Each rank has an expert of its own."""
    config = create_auto_config(
        ep_process_group=dist.group.WORLD,
        expert_assignments={0: case.rank, 1: case.rank},
    )
    _, optimizer = check_module(
        case,
        make_expert(case.rank),
        config,
        data_rank=case.rank,
        count=2 * case.world_size,
    )
    # No other rank holds them.
    case.assertEqual(optimizer.assignments, {case.rank: [0, 1]})


def check_expert_parallel_with_fsdp(case):
    """Ranks 0 and 1 of each four hold one expert, ranks 2 and 3 another."""
    number = case.rank // 2
    group = grid_of_columns(case)["b"].get_group()
    model = FSDP(
        make_expert(number),
        use_orig_params=True,
        process_group=group,
        device_id=device(),
    )
    config = create_auto_config(
        ep_process_group=dist.group.WORLD,
        fsdp_process_group=model.process_group,
        expert_assignments={0: number, 1: number},
        module=model,
    )
    _, optimizer = check_module(
        case,
        model,
        config,
        data_rank=number,
        count=case.world_size,
        one=make_expert(number),
        fsdp=group,
    )
    owned = []
    for indices in optimizer.assignments.values():
        owned += indices
    case.assertEqual(sorted(owned), [0, 1])
    ranks = dist.get_process_group_ranks(group)
    case.assertLessEqual(set(optimizer.assignments), set(ranks))


def check_every_placement(case):
    """A world of one rank."""
    for mesh in (mesh_of(1), grid_of(1, 1)):
        with case.subTest(mesh=mesh):
            case.assertTrainsAlike(Twins(specs(mesh, all_placements(mesh))))


def check_process_group(case):
    config = create_auto_config(ddp_process_group=dist.group.WORLD)
    check_module(case, make_model(), config)
