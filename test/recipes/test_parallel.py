"""Recipes for FSDP, DDP, HSDP, context and tensor parallelism, weights that become DTensors, experts and pipelines.

TP cuts first, and FSDP cuts the rows of TP's pieces. Muon never communicates over EP or PP groups.
"""

import re
import warnings

import torch
import torch.distributed as dist
from recipes.common import average, Block, CPU, cut_linears, mlp, MoE, parallelize
from recipes.common import Recipe, TP_DIMS, Transformer, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import distribute_tensor, parallel, Replicate, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.optim.muon import detect_tp_dims_from_model, partition_named_parameters
from torch.testing._internal.distributed._muon.common_modules import place_weights


class TestDataParallel(Recipe):
    def test_flat(self):
        """EXAMPLES 1, migrations 2 and 3; END_TO_END FSDP, with a sharding strategy, and to FSDP: all
        parameters are matrices of flat parameters, one for the model or one for each block."""
        group = dist.group.WORLD
        for options in (
            {},
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
            {"auto_wrap_policy": ModuleWrapPolicy({Block})},
        ):
            model = FSDP(Transformer(), device_id=CPU, **options)
            config = create_auto_config(fsdp_process_group=group)
            self.check(Transformer(), model, config, fsdp=group, data=[group])

    def test_with_biases(self):
        """EXAMPLES 1, migration 3: matrices for Muon and biases for AdamW in one unit."""
        one, group = mlp(bias=True), dist.group.WORLD
        model = FSDP(mlp(bias=True), device_id=CPU, use_orig_params=True)
        matrices, others = partition_named_parameters(model)
        config = create_auto_config(fsdp_process_group=group, module=model)
        how = {"others": others, "fsdp": group, "data": [group]}
        self.check(one, model, config, matrices, **how)

    def test_fsdp2(self):
        """EXAMPLES 0a, 1 and migration 4, PROJECT quick start, END_TO_END FSDP, with ``fully_shard``: no
        groups, no dimensions. PROJECT, verify the setup and print the assignments; TESTING, assignments checked."""
        model = Transformer()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        config = create_dtensor_config()
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        owned = sorted(index for some in muon.assignments.values() for index in some)
        self.assertEqual(owned, list(range(8)))
        self.assertEqual(muon.current_rank, dist.get_rank())
        self.compare(Transformer(), model, muon, data=[dist.group.WORLD])

    def test_shared_out(self):
        """EXAMPLES 2, migration 5: the replicas share the matrices. END_TO_END, DDP, calls the group another
        name; without a config, every rank orthogonalizes every matrix."""
        world = dist.group.WORLD
        for kind in ("", "ddp", "cp"):
            groups = {f"{kind}_process_group": world}
            config = create_auto_config(**groups) if kind else None
            how = {"data": [world], "once": config is not None}
            self.check(Transformer(), DDP(Transformer()), config, **how)

    def test_context_parallel(self):
        """END_TO_END, context parallelism: ranks see different parts of each sequence."""
        model, cp = Transformer(), dist.group.WORLD
        for layer in model.layers:
            layer.attention.context = cp
        config = create_auto_config(cp_process_group=cp)

        def backward(*sequences):
            inputs, targets = (s.chunk(cp.size(), 1)[cp.rank()] for s in sequences)
            mse_loss(model(inputs), targets).backward()
            average(model.parameters(), cp)  # the sum alone would be too large

        self.check(Transformer(), model, config, backward=backward)

    def test_hybrid_shard(self):
        """EXAMPLES 6: FSDP within nodes, DDP across nodes. END_TO_END, HSDP, with other names. With ``fully_shard``,
        the mesh says which ranks shard and which are replicas."""
        nodes, ddp, fsdp = self.grid("ddp", "fsdp")
        other_names = {"shard_process_group": fsdp, "replicate_process_group": ddp}
        for where, config in (
            ({"device_mesh": nodes}, create_auto_config(fsdp, ddp_process_group=ddp)),
            ({"process_group": (fsdp, ddp)}, create_auto_config(**other_names)),
        ):
            where["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            model = FSDP(Transformer(), device_id=CPU, **where)
            self.check(Transformer(), model, config, fsdp=fsdp, data=[fsdp, ddp])
        model = fully_shard(Transformer(), mesh=nodes)
        self.check(Transformer(), model, create_dtensor_config(), data=[fsdp, ddp])

    def check_placed(self, mesh, placements, inputs):
        one, model = mlp(bias=True), place_weights(mlp(bias=True), mesh, placements)
        matrices, others = partition_named_parameters(model)
        config = create_dtensor_config(async_gpu_parallelism=True, prefetch_count=1)

        def backward(*whole):
            x, targets = (distribute_tensor(t, mesh, inputs) for t in whole)
            # The backward pass of mse_loss would divide by the elements of this rank's piece only.
            (model(x) - targets).square().mean().backward()

        self.check(one, model, config, matrices, others=others, backward=backward)

    def test_sharded(self):
        """EXAMPLES 0b, migration 1: weights cut along dimension 0."""
        self.check_placed(init_device_mesh("cpu", (4,)), [Shard(0)], [Replicate()])

    def test_sharded_twice(self):
        """EXAMPLES 0c: one dimension of the mesh cuts rows, the other columns."""
        mesh, *_ = self.grid("fsdp", "tp")
        placements = [Shard(0), Shard(1)], [Shard(0), Replicate()]
        self.check_placed(mesh, *placements)

    def test_replicated(self):
        """EXAMPLES 0d, migration 5: every rank has all weights and a slice of the batch, as under DDP."""
        self.check_placed(init_device_mesh("cpu", (4,)), [Replicate()], [Shard(0)])


# layers.0.attention.qkv_proj, layers.0.attention.out_proj, layers.0.ffn.w1, and so on
BY_INDEX = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1}


def fsdp1_of_cut_weights(fsdp, tp, **options):
    """A model and its config. A flat parameter has one dimension that TP cuts, and these have two."""
    model = cut_linears(Transformer(), tp)
    model = FSDP(model, process_group=fsdp, device_id=CPU, use_orig_params=True)
    options |= {"fsdp_process_group": fsdp, "tp_process_group": tp, "module": model}
    return model, create_auto_config(tp_dim_per_param=BY_INDEX, **options)


class TestTensorParallel(Recipe):
    def test_by_parameter(self):
        """EXAMPLES 3: weights cut by hand, some along dimension 0 and some along 1. The marks of
        frameworks say them: EXAMPLES, TP dimensions from the model."""
        tp = dist.group.WORLD
        model = cut_linears(Transformer(), tp)  # which sets ``tp_dim``
        found = detect_tp_dims_from_model(model)
        self.assertEqual(found, BY_INDEX)
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=found)
        self.check(Transformer(), model, config, tp=tp)

    def test_one_dimension(self):
        """EXAMPLES 4: one dimension for all."""
        tp = dist.group.WORLD
        model = Transformer()
        for layer in model.layers:
            cut_linears(layer.ffn, tp, dim=1)
        matrices = [p for layer in model.layers for p in layer.ffn.parameters()]
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=1)
        how = {"tp": tp, "tp_dims": {"w1": 1, "w2": 1}}
        self.check(Transformer(), model, config, matrices, **how)

    def test_two_optimizers(self):
        """END_TO_END, mixed dimensions: one Muon for each. A dict of dimensions needs only one."""
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize(Transformer(), mesh)
        group, muons = mesh.get_group(), []
        for dim in (0, 1):
            params = [p for i, p in enumerate(model.parameters()) if BY_INDEX[i] == dim]
            config = create_auto_config(tp_process_group=group, tp_shard_dim=dim)
            muons.append(Muon(params, lr=1e-3, distributed_config=config))
        self.compare(Transformer(), model, *muons)

    def test_settings(self):
        """EXAMPLES 5, PROJECT process groups: weights cut by hand, under FSDP1, with EXAMPLES' settings
        for debugging, production and many parameters: the same bits."""
        _, fsdp, tp = self.grid("fsdp", "tp")
        for is_async, ahead in ((False, 0), (True, 1), (True, 2)):
            settings = {"async_gpu_parallelism": is_async, "prefetch_count": ahead}
            model, config = fsdp1_of_cut_weights(fsdp, tp, **settings)
            self.check(Transformer(), model, config, fsdp=fsdp, tp=tp, data=[fsdp])


# What the documents' plans cut. They leave the other matrices out.
TP_AND_FSDP = ("attention.qkv_proj", "ffn.w1")
TP_AND_HSDP = ("attention.qkv_proj",)


def cut_dims(names):
    """The ``tp_dims`` of a plan: a name that is missing is whole."""
    return {name.rpartition(".")[2]: 0 for name in names}


class Planned(Recipe):
    """Plans, with the arguments that the documents write. Each rank of TP has a matrix that is left out whole, whatever
    ``tp_shard_dim`` says: FSDP1's extensions and DTensors show the cuts."""

    def check_each(self, build, names, tp, source=lambda model: {}, **how):
        """Trains what ``build`` makes with each way to write the arguments, and compares the bits. The plan cuts
        ``names``, or each matrix by columns or rows."""
        for arguments in (
            lambda model: {"tp_shard_dim": 1},
            lambda model: {"tp_dim_per_param": 0},
            lambda model: {"tp_dim_per_param": {}},
            lambda model: {"tp_dim_per_param": detect_tp_dims_from_model(model)},
        ):
            model = build(names)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                options = {"tp_process_group": tp, **arguments(model), **source(model)}
                config = create_auto_config(**options)
                tp_dims = cut_dims(names) if names else TP_DIMS
                pieces = {"tp": tp, "tp_dims": tp_dims}
                self.check(Transformer(), model, config, **pieces, **how)
            # A warning about the dimension 1 is true. These would be false.
            false = "hold the same values|dimension None|is a guess"
            texts = [str(one.message) for one in warned]
            self.assertEverywhere([text for text in texts if re.search(false, text)])


class TestPlans(Planned):
    def test_by_plan(self):
        """END_TO_END, TP: ``parallelize_module`` makes DTensors, next to plain matrices that a plan leaves out."""
        mesh = init_device_mesh("cpu", (4,))

        def build(names):
            return parallelize(Transformer(), mesh, names)

        for names in (None, TP_AND_FSDP):
            self.check_each(build, names, mesh.get_group())

    def test_fsdp1_over_plan(self):
        """END_TO_END, TP + FSDP, and from FSDP: FSDP1 knows the plan by its mesh, and tells Muon."""
        mesh, fsdp, tp = self.grid("fsdp", "tp")
        for orig in (False, True):

            def build(names):
                model = parallelize(Transformer(), mesh["tp"], names)
                options = {"device_mesh": mesh["fsdp"], "device_id": CPU}
                return FSDP(model, use_orig_params=orig, **options)

            def source(model):
                return {"module": model} if orig else {"fsdp_process_group": fsdp}

            how = {"source": source, "fsdp": fsdp, "data": [fsdp]}
            for names in (None, TP_AND_FSDP):
                self.check_each(build, names, tp, **how)

    def test_fsdp2_over_plan(self):
        """EXAMPLES 5, END_TO_END TP + FSDP, with ``fully_shard``, which makes DTensors of all matrices: without groups,
        and with theirs."""
        mesh, fsdp, tp = self.grid("fsdp", "tp")

        def build(names):
            model = parallelize(Transformer(), mesh["tp"], names)
            return fully_shard(model, mesh=mesh["fsdp"])

        self.check(Transformer(), build(None), create_dtensor_config(), data=[fsdp])
        # A matrix that is left out is on FSDP's mesh, which does not know of TP. Each rank of TP repeats it.
        self.check_each(build, TP_AND_FSDP, tp, data=[fsdp], once=False)

    def test_marks_that_are_missing(self):
        """EXAMPLES, TP dimensions from the model: the block gives 0 to a parameter without a mark. A matrix
        that is left out has none and is whole, and a dict counts as it is written. Muon warns."""
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize(Transformer(), mesh, TP_AND_FSDP)
        params = list(model.parameters())
        options = {"tp_process_group": mesh.get_group()}
        options["tp_dim_per_param"] = dict.fromkeys(range(len(params)), 0)
        with self.assertWarnsOnce("parameter 1 .*hold the same values"):
            Muon(params, distributed_config=create_auto_config(**options))

    def test_left_out_of_an_uneven_plan(self):
        """Ranks of TP have flat parameters of different lengths. FSDP1 cuts their copies of the matrix that
        is left out at different places. So each rank of TP keeps a copy of its own, with or without TP's group."""
        mesh, fsdp, tp = self.grid("fsdp", "tp")

        def build():
            torch.manual_seed(0)
            layers = nn.Linear(WIDTH, 51, bias=False), nn.Linear(51, WIDTH, bias=False)
            return nn.Sequential(*layers)

        def parallelized():
            plan = {"0": parallel.ColwiseParallel(output_layouts=Replicate())}
            return parallel.parallelize_module(build(), mesh["tp"], plan)

        # Each rank of TP repeats the second matrix.
        how = {"data": [fsdp], "once": False}
        pieces = {"fsdp": fsdp, "tp": tp, "tp_dims": {"0": 0}}
        for groups in ({}, {"tp_process_group": tp, "tp_shard_dim": 0}):
            model = FSDP(parallelized(), device_mesh=mesh["fsdp"], device_id=CPU)
            config = create_auto_config(fsdp_process_group=fsdp, **groups)
            self.check(build(), model, config, **pieces, **how)


class TestThreeDimensions(Planned):
    world_size = 8

    def test_tp_hsdp(self):
        """END_TO_END, TP + HSDP."""
        mesh, replicate, shard, tp = self.grid("replicate", "shard", "tp")
        nodes = mesh["replicate", "shard"]

        def build_fsdp1(names):
            model = parallelize(Transformer(), mesh["tp"], names)
            hybrid = ShardingStrategy.HYBRID_SHARD
            options = {"sharding_strategy": hybrid, "device_id": CPU}
            return FSDP(model, device_mesh=nodes, **options)

        def build_fsdp2(names):
            model = parallelize(Transformer(), mesh["tp"], names)
            return fully_shard(model, mesh=nodes)

        groups = {"shard_process_group": shard, "replicate_process_group": replicate}
        how = {"source": lambda model: groups, "data": [shard, replicate]}
        for names in (None, TP_AND_HSDP):
            self.check_each(build_fsdp1, names, tp, fsdp=shard, **how)
        # Each rank of TP repeats a matrix that is left out.
        self.check_each(build_fsdp2, TP_AND_HSDP, tp, once=False, **how)

    def test_three_groups(self):
        """EXAMPLES 8: FSDP, TP and DDP, each with a group of its own."""
        _, ddp, fsdp, tp = self.grid("ddp", "fsdp", "tp")
        options = {"ddp_process_group": ddp, "prefetch_count": 2}
        model, config = fsdp1_of_cut_weights(fsdp, tp, **options)

        def after():  # FSDP averages over its own group. A rank has none of some matrices.
            average([p for p in model.parameters() if p.grad is not None], ddp)

        how = {"fsdp": fsdp, "tp": tp, "data": [fsdp, ddp], "after": after}
        self.check(Transformer(), model, config, **how)


def numbers_of(model, matrices):
    """The id of the expert of each parameter, by its index in ``matrices``."""
    experts = model.experts.items()
    number = {p: int(n) for n, expert in experts for p in expert.parameters()}
    return {i: number[p] for i, p in enumerate(matrices) if p in number}


def averaging(model, group, count):
    """Makes the gradients of the router and of the experts those of the mean over ``count`` ranks' losses."""

    def after():
        average(model.router.parameters(), group)
        for p in model.experts.parameters():
            if p.grad is not None:
                p.grad.div_(count)

    return after


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in it."""

    def __init__(self, model, stage, stages):
        super().__init__()
        each = len(model.layers) // stages
        here = range(stage * each, (stage + 1) * each)
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in here})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def backward_of(model, pp, count, schedule_class=Schedule1F1B):
    """The backward pass of a pipeline schedule with ``count`` micro-batches."""
    part = PipelineStage(model, pp.rank(), pp.size(), device=CPU, group=pp)
    schedule = schedule_class(part, n_microbatches=count, loss_fn=mse_loss)

    def backward(inputs, targets):
        first = (inputs,) if part.is_first else ()
        schedule.step(*first, target=targets if part.is_last else None)

    return backward


class TestExpertsAndStages(Recipe):
    def test_independent(self):
        """END_TO_END, experts: each rank's experts are its own, without a config."""
        ep = dist.group.WORLD
        model = MoE(ep)
        after = averaging(model, ep, ep.size())
        # Without a config, every rank orthogonalizes the router.
        self.check(MoE(), model, None, data=[ep], after=after, once=False)

    def test_with_replicas(self):
        """EXAMPLES 7: two replicas of each expert, and four of the router."""
        mesh, dp, ep = self.grid("dp", "ep")
        model = MoE(ep)
        config = create_auto_config(
            ep_process_group=ep,
            # Ranks that name another expert hold no replica of this one.
            ddp_process_group=dist.group.WORLD,
            expert_assignments=numbers_of(model, list(model.parameters())),
        )

        def after():
            average(model.router.parameters(), dist.group.WORLD)
            average(model.experts.parameters(), dp, mesh.size())

        self.check(MoE(), model, config, data=[dp, ep], after=after)

    def test_sharded_experts(self):
        """EXAMPLES 7b: FSDP shards each expert over the ranks that share it."""
        _, fsdp, ep = self.grid("fsdp", "ep")
        model = MoE(ep)
        for number, expert in model.experts.items():
            model.experts[number] = FSDP(expert, process_group=fsdp, device_id=CPU)
        matrices = list(model.experts.parameters())  # one flat parameter per expert
        config = create_auto_config(
            ep_process_group=ep,
            fsdp_process_group=fsdp,
            expert_assignments=numbers_of(model, matrices),
        )
        # FSDP averages over its own group.
        after = averaging(model, dist.group.WORLD, ep.size())
        how = {"fsdp": fsdp, "data": [fsdp, ep], "after": after}
        how["others"] = list(model.router.parameters())
        self.check(MoE(), model, config, matrices, **how)

    def test_tensor_parallel(self):
        """END_TO_END, experts x TP: a TP pair for each expert, and a config for TP, not for EP."""
        mesh, ep, tp = self.grid("ep", "tp")
        model = MoE(ep)
        for expert in model.experts.values():
            plan = {"w1": parallel.ColwiseParallel(), "w2": parallel.RowwiseParallel()}
            parallel.parallelize_module(expert, mesh["tp"], plan)
        matrices = list(model.experts.parameters())
        tp_dims = detect_tp_dims_from_model(matrices)
        config = create_auto_config(tp_process_group=tp, tp_dim_per_param=tp_dims)
        how = {"others": list(model.router.parameters()), "data": [ep]}
        after = averaging(model, ep, ep.size())
        self.check(MoE(), model, config, matrices, after=after, **how)

    def test_four_stages(self):
        """END_TO_END, pipeline: 1F1B over four stages of one process each."""
        pp = dist.group.WORLD
        stage, stages = pp.rank(), pp.size()
        model = Stage(Transformer(layers=stages), stage, stages)
        config = create_auto_config(
            pp_process_group=pp, pp_stage_id=stage, pp_num_stages=stages
        )
        backward = backward_of(model, pp, 8)
        self.check(Transformer(layers=stages), model, config, backward=backward)


class TestFourDimensions(Recipe):
    world_size = 16

    def test_four_dimensions(self):
        """END_TO_END, PP + TP + HSDP: two stages x two replicas x two shards x TP pairs."""
        mesh, pp, replicate, shard, tp = self.grid("pp", "replicate", "shard", "tp")
        config = create_auto_config(
            pp_process_group=pp,
            pp_stage_id=pp.rank(),
            pp_num_stages=2,
            tp_process_group=tp,
            tp_shard_dim=1,
            shard_process_group=shard,
            replicate_process_group=replicate,
        )
        nodes, how = mesh["replicate", "shard"], {"data": [replicate, shard]}
        model = parallelize(Stage(Transformer(), pp.rank(), 2), mesh["tp"])
        # 1F1B runs a second forward pass before the first backward pass, and FSDP1 fails in that.
        fully_shard(model, mesh=nodes)
        backward = backward_of(model, pp, 4)
        self.check(Transformer(), model, config, backward=backward, **how)
        # The document has FSDP1 and the plan. Each forward pass of one micro-batch has its backward pass before the next.
        model = FSDP(
            parallelize(Stage(Transformer(), pp.rank(), 2), mesh["tp"], TP_AND_HSDP),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=nodes,
            device_id=CPU,
        )
        how |= {"fsdp": shard, "tp": tp, "tp_dims": cut_dims(TP_AND_HSDP)}
        backward = backward_of(model, pp, 1, ScheduleGPipe)
        self.check(Transformer(), model, config, backward=backward, **how)
