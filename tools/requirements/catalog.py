"""What the project's documents ask for.

The documents are not in this repository: EXAMPLES.md, EXAMPLES_END_TO_END.md, PROJECT.md,
TESTING.md and the README of the blueprint. ``--documents DIR`` compares this list with them.
"""

from __future__ import annotations

from typing import NamedTuple


class Requirement(NamedTuple):
    id: str
    words: str


class Section(NamedTuple):
    """Requirements of one kind.

    Args:
        document: that they are from.
        title: in docs/requirements.md.
        blocks: whether each requirement is one fenced Python block, in the document's order.
    """

    document: str
    title: str
    blocks: bool
    requirements: tuple[Requirement, ...]


def _section(
    document: str, title: str, prefix: str, rows: dict[str, str], blocks: bool = False
) -> Section:
    required = tuple(Requirement(f"{prefix}/{key}", row) for key, row in rows.items())
    return Section(document, title, blocks, required)


# The tests that the code of TESTING.md names. A test of that name shows them.
NAMED_TESTS = {
    "TestMuonCore": (
        "test_backward_compatibility",
        "test_orthogonalization_correctness",
    ),
    "TestDTensorConfig": (
        "test_dtensor_config_creation",
        "test_dtensor_gather_full_tensor",
        "test_dtensor_redistribute",
        "test_dtensor_replicate_placement",
        "test_dtensor_mixed_regular_params",
    ),
    "TestDistributedConfig": (
        "test_assign_fn_coverage",
        "test_tp_dim_per_param_validation",
    ),
    "TestMuonDTensor": (
        "test_dtensor_shard_correctness",
        "test_dtensor_vs_single_device",
        "test_dtensor_2d_mesh",
    ),
    "TestMuonFSDP": ("test_fsdp_correctness", "test_fsdp_vs_single_device"),
    "TestMuon2DParallelism": ("test_fsdp_plus_tp",),
    "TestMuonExpertParallel": (
        "test_expert_parallel_independence",
        "test_expert_parallel_with_fsdp",
    ),
    "TestMuonPerformance": ("test_prefetch_speedup",),
    "TestMuonErrors": (
        "test_incomplete_assignment_raises",
        "test_overlapping_assignment_raises",
        "test_wrong_tp_dim_raises",
    ),
}

SECTIONS = (
    _section(
        "TESTING.md",
        "P0: before merge",
        "testing/p0",
        {
            "backward-compatibility": "`distributed_config=None` works as before",
            "dtensor-config": "`create_dtensor_config()` makes a valid config",
            "dtensor-correctness": "gather and redistribute of a DTensor with `Shard`",
            "fsdp": "FSDP against one process",
            "ddp": "DDP is right, and nothing is computed twice",
            "assigned-once": "every parameter is assigned exactly once",
            "no-overlap": "no parameter is assigned twice",
            "tp-dims": "`tp_dim_per_param` is checked",
            "dtensor-metadata": "metadata of DTensors is extracted and kept",
            "error-incomplete": "an incomplete assignment is an error",
            "error-overlap": "overlapping assignments are an error",
            "error-tp-dim": "a TP dimension that does not exist is an error",
        },
    ),
    _section(
        "TESTING.md",
        "P1: before production",
        "testing/p1",
        {
            "dtensor-vs-single": "DTensors trained against one process",
            "dtensor-2d": "DTensors on a mesh of two dimensions",
            "dtensor-replicate": "`Replicate`, as under DDP",
            "dtensor-mixed": "DTensors beside plain parameters",
            "tp": "gather and redistribute under tensor parallelism",
            "fsdp-tp": "FSDP x TP",
            "tp-dims-per-parameter": "a TP dimension for each parameter",
            "prefetch-speedup": "prefetching is faster, by 1.2: asserted on four GPUs; on a CPU the bench "
            "measures it ([bench.md](bench.md))",
            "async": "parallel and sequential operation give the same",
            "stress": "ten steps and more, deterministic",
        },
    ),
    _section(
        "TESTING.md",
        "P2: nice to have",
        "testing/p2",
        {
            "dtensor-partial": "`Partial`",
            "dtensor-hybrid": "`Shard`, `Replicate` and `Partial` together",
            "dtensor-nd": "meshes of three dimensions and more",
            "ep": "experts, alone",
            "ep-fsdp": "experts that are sharded",
            "cp": "context parallelism, alone",
            "cp-mixed": "context parallelism with others",
            "3d": "FSDP x TP x DDP, and with experts",
            "large-scale": "eight processes and more",
            "extended-stress": "a hundred steps and more, many sizes",
            "benchmarks": "benchmarks ([bench.md](bench.md) has figures)",
            "dtensor-vs-groups": "DTensors against process groups, how fast: a bench "
            "([bench.md](bench.md) has figures)",
        },
    ),
    _section(
        "TESTING.md",
        "Recommendations for DTensors",
        "testing/dtensor",
        {
            "shard": "`Shard` on each dimension",
            "replicate": "`Replicate` computes nothing twice",
            "partial": "`Partial`",
            "hybrid": "`[Shard(0), Replicate()]` and the like",
            "mesh-1d": "one mesh dimension",
            "mesh-2d": "two",
            "mesh-3d": "three and more",
            "metadata": "the mesh is extracted and kept",
            "placements": "placements are the same after a step",
            "metadata-mixed": "metadata of mixed models",
            "as-fsdp": "`Shard(0)` gives what FSDP gives",
            "as-ddp": "`Replicate` gives what DDP gives",
            "as-fsdp-tp": "`[Shard(0), Shard(1)]` gives what FSDP x TP gives",
            "one-rank": "a mesh of one rank",
            "plain": "parameters that are no DTensors",
            "other-meshes": "meshes that do not fit each other",
        },
    ),
    _section(
        "TESTING.md",
        "The CI matrix, stages and coverage",
        "testing",
        {
            "matrix": "fsdp, ddp, tp, fsdp_tp, hsdp and ep on 2, 4 and 8 processes, "
            "prefetch 0, 1 and 2, async on and off",
            "stages": "stages 1 to 4 can be chosen",
            "coverage-lines": "more than 90 % of the lines",
            "coverage-branches": "more than 80 % of the branches",
            "coverage-errors": "every error path",
        },
    ),
    _section(
        "TESTING.md",
        "Helpers and debugging",
        "testing",
        {
            "helper-model": "a simple model",
            "helper-sync": "parameters made equal on all ranks",
            "helper-compare": "parameters compared",
            "debug-logging": "verbose logging",
            "debug-groups": "process groups checked",
            "debug-assignments": "assignments checked",
        },
    ),
    _section(
        "EXAMPLES.md",
        "EXAMPLES.md",
        "examples",
        {
            "0a": "Example 0a: DTensors",
            "0b": "Example 0b: DTensors, sharded",
            "0c": "Example 0c: DTensors on a 2-D mesh",
            "0d": "Example 0d: DTensors, replicated",
            "1": "Example 1: FSDP",
            "2": "Example 2: DDP",
            "3": "Example 3: TP, a dimension for each layer",
            "4": "Example 4: TP, one dimension",
            "5": "Example 5: FSDP x TP",
            "6": "Example 6: HSDP",
            "7": "Example 7: experts",
            "7b": "Example 7b: experts x FSDP",
            "8": "Example 8: FSDP x TP x DDP",
            "detect-tp-dims": "TP dimensions from the model",
            "tuning-debug": "settings for debugging",
            "tuning-production": "settings for production",
            "tuning-aggressive": "settings for many parameters",
            "custom": "functions of one's own",
            "path-1-before": "migration 1, one process",
            "path-1-after": "migration 1, to DTensors",
            "path-2-before": "migration 2, one process",
            "path-2-after": "migration 2, to FSDP",
            "path-3-before": "migration 3, FSDP with AdamW",
            "path-3-after": "migration 3, to Muon",
            "path-4-before": "migration 4, process groups",
            "path-4-after": "migration 4, to DTensors",
            "path-5-before": "migration 5, DDP",
            "path-5-after": "migration 5, to replicated DTensors",
        },
        blocks=True,
    ),
    _section(
        "EXAMPLES_END_TO_END.md",
        "EXAMPLES_END_TO_END.md",
        "end-to-end",
        {
            "unified": "one implementation for one process and many",
            "single": "one process",
            "ddp": "DDP without a config",
            "ddp-config": "DDP with a config",
            "fsdp": "FSDP",
            "fsdp-strategy": "FSDP with a sharding strategy",
            "tp": "TP",
            "tp-mixed": "TP along both dimensions",
            "hsdp": "HSDP",
            "tp-fsdp": "TP x FSDP",
            "tp-hsdp": "TP x HSDP",
            "ep": "experts",
            "ep-tp": "experts x TP",
            "cp": "context parallelism",
            "pp": "pipeline, 1F1B",
            "4d": "PP x TP x HSDP",
            "custom-framework": "a framework that is not torch.distributed",
            "size-aware": "assignment by size",
            "debug-mode": "debug mode",
            "migrate-fsdp-before": "to FSDP, before",
            "migrate-fsdp-after": "to FSDP, after",
            "migrate-tp-before": "from FSDP to TP x FSDP, before",
            "migrate-tp-after": "from FSDP to TP x FSDP, after",
            "migrate-auto-before": "from one's own functions, before",
            "migrate-auto-after": "from one's own functions, after",
            "tip-process-groups": "check the process groups",
            "tip-round-trip": "gather and redistribute are the identity",
            "tip-compare": "compare with one process",
            "tip-profile": "profile a step",
            "tip-hang": "find out who hangs",
            "tip-logging": "logging of torch.distributed",
        },
        blocks=True,
    ),
    _section(
        "PROJECT.md",
        "PROJECT.md",
        "project",
        {
            "problem": "the step of Muon",
            "quick-start": "quick start",
            "verify-setup": "verify the setup",
            "process-groups": "process groups",
            "print-assignments": "print the assignments",
        },
        blocks=True,
    ),
    _section(
        "README of the blueprint",
        "The blueprint",
        "blueprint",
        {
            "quick-start": "runs on eight processes of a CPU",
            "notebook": "the notebook",
            "grid": "the DP x TP grid",
            "aisles-pallets": "parameter groups and buckets",
            "virtual-buffer": "the schedule and its buffers",
            "data-flow": "DP gather, TP gather, orthogonalize, TP shard, DP shard",
            "buckets": "why the one is bucketed and the other is not",
            "fixes": "the bugs that it had to fix",
        },
    ),
)


def all_ids() -> list[str]:
    return [r.id for section in SECTIONS for r in section.requirements]
