"""What ``blueprint.py`` prints: drawings, tables, and the two lists at its end."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch.optim._muon_engine.layouts import Layout
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from torch.optim._muon_engine.schedule.packs import Bucket, Schedule


# Of a rank's engine: what happened, in which bucket, and to which matrix.
Event = tuple[str, int, str]
Reports = list[dict[str, Any]]


def print_grid(grid: Any) -> None:
    show(f"{len(grid.ranks)} ranks, {grid.dp} x {grid.tp} (dp x tp)")
    show()
    show(f"{'':6}" + "".join(f"    tp {column}" for column in range(grid.tp)))
    for row in range(grid.dp):
        ranks = grid.tp_group(row * grid.tp)
        show(f"dp {row}  " + "".join(f"  rank {rank}" for rank in ranks))
    show()
    show(f"{'rank':6}{'(dp, tp)':12}{'its DP group':20}its TP group")
    for rank in grid.ranks:
        dp_group, tp_group = (
            " ".join(map(str, group))
            for group in (grid.dp_group(rank), grid.tp_group(rank))
        )
        show(f"{rank:4}  {grid.place(rank)!s:12}{dp_group:20}{tp_group}")


def show(line: str = "") -> None:
    print(f"    {line}".rstrip())


def size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def print_shards(layouts: list[Layout]) -> None:
    named = {layout.key.name: layout for layout in layouts}
    left, right = picture(named["0.qkv"]), picture(named["0.out"])
    for i in range(max(len(left), len(right))):
        both = (lines[i] if i < len(lines) else "" for lines in (left, right))
        show("".join(f"{line:38}" for line in both))
    show()
    for name in ("0.qkv", "0.out", "0.up", "0.down"):
        show(f"{name:8}{named[name].source}")


def picture(layout: Layout) -> list[str]:
    """The matrix as a map: which rank holds which rows and columns."""
    held = {
        (region.row, region.column): (rank, region)
        for rank, shard in zip(layout.shards.ranks, layout.shards.regions)
        for region in shard
    }
    _, first = held[0, 0]
    shard = size((first.height, first.width))
    columns = sorted({column for _, column in held})
    lines = [
        f"{layout.key.name} is {size(layout.shape)}, a shard {shard}",
        "columns from    " + "".join(f"{column:<9}" for column in columns),
    ]
    for row in sorted({row for row, _ in held}):
        cells = "|".join(f" rank {held[row, column][0]} " for column in columns)
        last = row + held[row, 0][1].height - 1
        lines.append(f"rows {row:2} to {last:2} |{cells}|")
    return lines


def print_owners(layouts: list[Layout], owners: list[int]) -> None:
    owner_of = {layout.key.name: owner for layout, owner in zip(layouts, owners)}
    kinds = list(dict.fromkeys(name.split(".")[1] for name in owner_of))
    show(f"{'owner of':12}" + "".join(f"{kind:>8}" for kind in kinds))
    for i in range(len(owner_of) // len(kinds)):
        ranks = "".join(f"{owner_of[f'{i}.{kind}']:8}" for kind in kinds)
        show(f"{f'block {i}':12}{ranks}")
    show()
    work: Counter[int] = Counter(dict.fromkeys(layouts[0].group, 0))
    for layout, owner in zip(layouts, owners):
        work[owner] += newton_schulz_flops(layout.shape)
    mean = sum(work.values()) / len(work)
    for rank, flops in work.items():
        bar = "#" * round(30 * flops / mean)
        show(f"rank {rank}  {owners.count(rank)} matrices  {flops / mean:.2f}  {bar}")
    show("(1.00 is an equal share of the FLOPs)")
    show(f"{len(owners)} matrices, each with exactly one owner")


def print_buckets(schedule: Schedule) -> None:
    show(f"what each owner orthogonalizes, in {len(schedule.buckets)} buckets")
    show(f"{'':8}" + "".join(f"bucket {b.index:<8}" for b in schedule.buckets))
    for rank in schedule.buckets[0].group:
        cells = (
            ", ".join(
                schedule.layouts[m].key.name
                for m in bucket.matrices
                if schedule.owners[m] == rank
            )
            for bucket in schedule.buckets
        )
        show(f"rank {rank}  " + "".join(f"{names or '-':15}" for names in cells))


def print_bytes(
    schedule: Schedule,
    sent_by: Callable[[Schedule, Bucket, int], dict[str, list[int]]],
    lower_bound: Callable[[Schedule, int], int],
) -> None:
    ranks = schedule.buckets[0].group
    show()
    show("bytes in the gather of bucket 1, from (down) to (across)")
    show(f"{'':8}" + "".join(f"{f'to {rank}':>7}" for rank in ranks))
    for rank in ranks:
        packets = sent_by(schedule, schedule.buckets[1], rank)["gather"]
        show(f"from {rank}  " + "".join(f"{packet or '-':>7}" for packet in packets))
    heads = ("gathers", "scatters", "sum", "least", "more")
    show()
    show(f"{'bytes':8}" + "".join(f"{head:>10}" for head in heads))
    totals: Counter[str] = Counter()
    for rank in ranks:
        sent: Counter[str] = Counter()
        for bucket in schedule.buckets:
            for what, packets in sent_by(schedule, bucket, rank).items():
                sent[f"{what}s"] += sum(packets)
        sent["sum"] = sent["gathers"] + sent["scatters"]
        sent["least"] = lower_bound(schedule, rank)
        sent["more"] = sent["sum"] - sent["least"]
        totals += sent
        show(f"rank {rank}  " + "".join(f"{sent[head]:10}" for head in heads))
    show(f"{'all':8}" + "".join(f"{totals[head]:10}" for head in heads))


def print_virtual_buffer(
    entries: Sequence[Any],
    buckets: dict[tuple[int, int], int],
    aisles: Sequence[str],
    members: int,
    run_of: Callable[[Any, int], tuple[int, int]],
) -> None:
    """``members`` are in a DP group; ``run_of`` is given an entry and one of them."""
    show("the virtual buffer of a rank's TP slices")
    for (aisle, bucket), elements in buckets.items():
        inside = [s.name for s in entries if (s.aisle, s.bucket) == (aisle, bucket)]
        runs = f"{members} runs of {elements // members}"
        what = f"{aisles[aisle]}, bucket {bucket}:"
        show(f"{what:21}{elements:6} elements, {runs}, {inside[0]} to {inside[-1]}")
    show()
    show("the entries that come first, and which member of the DP group stores what")
    for entry in entries[:4]:
        runs = ((row, *run_of(entry, row)) for row in range(members))
        stored = (f"dp {row}: {a} to {b - 1}" for row, a, b in runs if a < b)
        show(f"{entry.name}  slice {size(entry.shape):9} {'; '.join(stored)}")


class Way(NamedTuple):
    """What one way to make a step costs."""

    name: str
    calls: list[float]  # of Newton-Schulz, by rank
    sent: float  # bytes, all ranks
    collectives: float  # that the busiest rank takes part in


def print_ways(journey: list[tuple[str, str]], ways: list[Way], least: int) -> None:
    for what, shape in journey:
        show(f"{what:36}{shape}")
    show()
    show(f"{'':28}Newton-Schulz calls                         collectives of")
    show(
        f"{'a step':28}{'all ranks':>9}{'busiest':>9}{'bytes sent':>12}{'x least':>9}"
        f"{'the busiest':>15}"
    )
    for name, calls, sent, collectives in ways:
        show(
            f"{name:28}{sum(calls):9.0f}{max(calls):9.0f}{sent:12.0f}"
            f"{sent / least:9.2f}{collectives:15.0f}"
        )


def print_events(reports: Reports, rank: int = 0) -> None:
    logs = {
        f"prefetch_count={ahead}": story(engine["events"])
        for ahead, engine in reports[rank]["engine"].items()
    }
    show(f"rank {rank}, one step, from top to bottom")
    show()
    show("".join(f"{head:46}" for head in logs))
    for i in range(max(map(len, logs.values()))):
        cells = (log[i] if i < len(log) else "" for log in logs.values())
        show("".join(f"{cell:46}" for cell in cells))
    show()
    show(f"all ranks, {list(logs)[-1]}")
    show("(G1 S1: gather, scatter 1 starts; g1 s1: is here; <..>: Newton-Schulz)")
    for number, report in enumerate(reports):
        *_, engine = report["engine"].values()
        show(f"rank {number}  {in_short(engine['events'])}")
    show(
        "all ranks start the same collectives in the same order: "
        + ("yes" if same_launches(reports) else "NO")
    )


def story(events: list[Event]) -> list[str]:
    """One line an event; at its end, what is on its way then."""
    lines = []
    on_its_way: list[str] = []
    for what, number, which in events:
        thing, _, verb = what.partition(" ")
        sign = f"{thing[0].upper()}{number}"
        text = f"{what} {which}"
        if verb == "starts":
            on_its_way.append(sign)
            text = f"{thing} {number} starts"
        elif verb == "is here":
            on_its_way.remove(sign)
            text = f"{thing} {number} is here"
        lines.append(f"{text:32}[{' '.join(on_its_way)}]")
    return lines


def in_short(events: list[Event]) -> str:
    words = []
    for what, number, which in events:
        if what.endswith("starts"):
            words.append(f"{what[0].upper()}{number}")
        elif what.endswith("is here"):
            words.append(f"{what[0]}{number}")
        elif what == "Newton-Schulz":
            words.append(f"<{which}>")
    return " ".join(words)


def same_launches(reports: Reports) -> bool:
    launches = {
        tuple(
            (ahead, what, number)
            for ahead, engine in report["engine"].items()
            for what, number, _ in engine["events"]
            if what.endswith("starts")
        )
        for report in reports
    }
    return len(launches) == 1


def print_proof(
    reports: Reports, matrices: int, steps: int, problems: list[str]
) -> None:
    show(f"{steps} steps, {matrices} matrices, on {len(reports)} ranks,")
    show("parameters and momentum against one process:")
    show()
    for way in reports[0]["differs"]:
        equal = not any(report["differs"][way] for report in reports)
        show(f"{way:28}bitwise equal: {'yes' if equal else 'NO'}")
    show()
    show(f"what was foreseen has come about: {'NO' if problems else 'yes'}")
    show(
        "(groups, owners, schedule, Newton-Schulz calls, bytes, order of the collectives)"
    )
    for problem in problems:
        show(f"- {problem}")


class Term(NamedTuple):
    theirs: str
    ours: str
    where: str  # file: a name in it
    differs: str


TERMS = (
    Term(
        "dist_group, tp_group",
        "the mesh's dimensions; one of a matrix's holders",
        "process_groups.py: spanning_group",
        "There, pieces cross two groups, one after the other. Here they cross one, "
        "which spans the grid, so that a shard goes straight to its owner.",
    ),
    Term(
        "param_groups, buffer_idx (aisles)",
        "the matrices that the same ranks hold",
        "schedule/buckets.py: families",
        "There, each parameter group has a buffer. Here a parameter group has options "
        "and nothing else: a bucket takes matrices of several.",
    ),
    Term(
        "buckets, bucket_idx (pallets)",
        "buckets",
        "schedule/packs.py: Bucket",
        "There, a bucket is filled in the order of the parameters. Here, each owner has "
        "work in it. There are about four, more where one would be too large.",
    ),
    Term(
        "dist_meta (master schedule)",
        "a Layout: who holds what; a Schedule: who sends what",
        "layouts/__init__.py: Layout",
        "dist_meta has this rank's ranges. A layout has every rank's regions. The "
        "ranks compare theirs when the optimizer is built (agreement.py: agree).",
    ),
    Term(
        "global_buffer_size (virtual buffer)",
        "none; what one bucket sends and receives is in a slot",
        "runtime/transport.py: slot",
        "There, a step makes room for all TP slices, padded to a multiple of the DP "
        "group's size. Slots are kept, have room for one bucket, and are not padded.",
    ),
    Term(
        "DP gather, TP gather",
        "the gather of a bucket",
        "runtime/transport.py: start_gather",
        "There, all get everything. Here the owner gets the shards that it lacks, and "
        "nobody else gets anything.",
    ),
    Term(
        "run math",
        "Newton-Schulz on the owner",
        "runtime/pipeline.py: orthogonalize_batch",
        "There, each rank that stores a part of a matrix orthogonalizes all of it. "
        "Here one rank does, once.",
    ),
    Term(
        "TP shard, DP shard",
        "the scatter of a bucket",
        "runtime/transport.py: start_scatter",
        "There, it is slicing: each has the whole result already. Here the owner cuts "
        "it and sends the regions. That is the price of computing it once.",
    ),
    Term(
        "bucket the slow DP gather, not the fast TP gather",
        "both are in one bucket",
        "schedule/buckets.py: BUCKET_BYTES",
        "Slow links ask for few calls, memory asks for small ones. Buckets settle that "
        "for both at once, and one bucket travels while another is computed.",
    ),
    Term(
        "ZeRO-1",
        "no goal: momentum lies as its parameter",
        "layouts/dtensor.py: new_momentum_buffer",
        "There, momentum and the optimizer's copy of the weights are cut over DP; the "
        "model's own weights are not. Here FSDP2 cuts both, and DDP cuts neither.",
    ),
)


def print_terms() -> None:
    for term in TERMS:
        show(term.theirs)
        show(f"    here: {term.ours} ({term.where})")
        print(textwrap.indent(textwrap.fill(term.differs, 88), " " * 8))


class Fix(NamedTuple):
    bug: str
    here: str
    tests: tuple[str, ...]  # that show it


FIXES = (
    Fix(
        'Logic 1: the line `params = group["params"]` was missing',
        "A step has one list of all matrices, each with the options of its own group.",
        ("test_indices_follow_the_groups",),
    ),
    Fix(
        "Logic 2: the gathered matrix was still flat",
        "Shards are regions with a place in their matrix, and have to tile it.",
        (
            "test_tilings",
            "test_pieces_that_do_not_fit_together",
            "test_no_tilings",
        ),
    ),
    Fix(
        "Env 1: the backend was always nccl",
        "Groups are the user's; the engine asks them for the backend. Here: gloo.",
        ("test_script",),
    ),
    Fix(
        "Env 2: the device was always cuda",
        "Buffers are where the parameters are: here on the CPU.",
        ("test_script",),
    ),
    Fix(
        "Env 3: processes spawned by a notebook crash",
        "They import what they run from a file: the script beside the notebook.",
        ("test_script", "test_notebook_is_up_to_date"),
    ),
)


def print_fixes() -> None:
    for fix in FIXES:
        show(f"{fix.bug}\n        {fix.here}\n        shown by {', '.join(fix.tests)}")
