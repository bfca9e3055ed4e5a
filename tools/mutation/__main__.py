"""Has cosmic-ray try faults that are drawn, each with the tests that execute its line."""

import argparse
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db, WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkItem

from tools.coverage import WORKERS
from tools.overlay.errors import WrongTarget
from tools.overlay.payload import ROOT

from .record import record, sources, tests_of


HERE = Path(__file__).parent
PLACE = ROOT / "build" / "mutation"
# cosmic-ray writes each fault into its file. These files are a copy that only the tests import.
COPY = PLACE / "copy"
# Operators of cosmic-ray that make faults which somebody could make.
OPERATORS = (
    "core/(ReplaceComparisonOperator_(Lt_(LtE|GtE)|LtE_(Lt|Gt)|Gt_(GtE|LtE)|GtE_(Gt|Lt)"
    "|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|Mul_Add|FloorDiv_Mul|Div_Mul"
    "|Mod_FloorDiv|Pow_Mul)|ReplaceUnaryOperator_Delete_.*"
    "|AddNot|Replace(AndWithOr|OrWithAnd|TrueWithFalse|FalseWithTrue)|NumberReplacer"
    "|Replace(BreakWithContinue|ContinueWithBreak)|ZeroIterationForLoop"
    "|RemoveDecorator|ExceptionReplacer)"
)
# Lines of messages, and arguments by which code only checks itself.
SKIPPED = r"f\"|raise |warn|log\.|strict=|stacklevel="
# A test hangs after these seconds, and all tests of a fault after an hour.
LIMIT, ALL = 150, 3600
PYTEST = "-m pytest -xq -rfE -pno:cacheprovider -ofaulthandler_exit_on_timeout=true"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.mutation", description=__doc__)
    add = result.add_argument
    add("--record", action="store_true", help="first: note what the tests execute")
    add("--seed", type=int, default=0, help="which faults are drawn")
    add("--count", type=int, default=100, help="how many")
    add("--resume", action="store_true", help="keep what the last run found out")
    # cosmic-ray runs this for each fault.
    add("--test", action="store_true", help=argparse.SUPPRESS)
    return result


def main(argv: list[str]) -> int:
    """Returns 0; 1 if no test noticed a fault; 2 if faults cannot be tried."""
    args = parser().parse_args(argv)
    try:
        if args.record:
            copy_optimizer()
            return record(PLACE, COPY)
        if args.test:
            return test_fault()
        return try_faults(args)
    except WrongTarget as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2


def copy_optimizer() -> None:
    """Makes a new copy. A former run may have ended in the middle of a fault."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torch" / "optim", COPY / "optim", ignore=ignored)
    shutil.copyfile(HERE / "redirect.py", COPY / "sitecustomize.py")


def try_faults(args: argparse.Namespace) -> int:
    copy_optimizer()
    if sources(PLACE / "recorded") != sources(COPY):
        raise WrongTarget(
            "no record of these files: `python -m tools.mutation --record`"
        )
    os.environ["PYTHONPATH"] = str(COPY)
    command = f"{sys.executable} -m tools.mutation --test"
    with use_db(PLACE / f"{args.seed}.sqlite") as database:
        if not args.resume:
            draw(database, sorted((COPY / "optim").rglob("*.py")), args)
        for item in database.pending_work_items:
            (mutation,) = item.mutations
            (first, _), (last, _) = mutation.start_pos, mutation.end_pos
            file = mutation.module_path.relative_to(COPY)
            os.environ["MUON_FAULT"] = f"{first} {last} {file}"
            result = mutate_and_test(item.mutations, command, ALL)
            database.set_result(item.job_id, result)
            print(
                f"{name_of(*item.mutations)} | {result.test_outcome.value}", flush=True
            )
        survivors = []
        for item, result in database.completed_work_items:
            if result.test_outcome != TestOutcome.KILLED:
                survivors.append(f"survived: {name_of(*item.mutations)}")
        total = database.num_results
    print(f"\n{total - len(survivors)} of {total} faults noticed", *survivors, sep="\n")
    return 1 if survivors else 0


def draw(database: WorkDB, files: list[Path], args: argparse.Namespace) -> None:
    """Leaves ``count`` faults in the database. Each line is as likely, however many faults it can have."""
    init(files, database, {})
    by_line: dict[tuple[Path, int], list[WorkItem]] = defaultdict(list)
    for item in database.work_items:
        (mutation,) = item.mutations
        if re.fullmatch(OPERATORS, mutation.operator_name):
            line, _ = mutation.start_pos
            by_line[mutation.module_path, line].append(item)
    equivalent = (HERE / "equivalent.txt").read_text()
    chance = random.Random(args.seed)
    lines = sorted(by_line)
    chance.shuffle(lines)
    drawn = []
    for line in lines:
        item = chance.choice(
            sorted(by_line[line], key=lambda item: str(item.mutations))
        )
        name = name_of(*item.mutations)
        if f"{name} # " in equivalent or re.search(SKIPPED, name):
            continue
        drawn.append(item)
        if len(drawn) == args.count:
            break
    database.clear()
    database.add_work_items(drawn)


def name_of(mutation: MutationSpec) -> str:
    """File, old and new text of the lines that a fault changes."""
    text = mutation.module_path.read_text()
    operator = get_operator(mutation.operator_name)()
    faulty = mutate_code(text, operator, mutation.occurrence)
    _, _, *lines = difflib.unified_diff(text.split("\n"), faulty.split("\n"), n=0)
    old, new = (
        " ".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
    )
    file = mutation.module_path.relative_to(COPY / "optim")
    return " ".join(f"{file}: {old} => {new}".split())


def test_fault() -> int:
    """Runs the tests that execute the faulty lines. Returns 1 if one fails that passes without the fault."""
    first, last, file = os.environ["MUON_FAULT"].split()
    lines = set(range(int(first), int(last) + 1))
    tests = tests_of(PLACE, Path(file), lines)
    code, failed = run_tests(tests, dict(os.environ))
    if failed and set(failed) <= set(tests):
        # They may fail without the fault, too.
        whole = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return int(any(run_tests([test], whole)[0] == 0 for test in failed))
    # 4 and 5: pytest has found no test.
    return int(bool(failed) or code not in (0, 4, 5))


def run_tests(tests: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Exit code, and the tests that failed before the workers ended."""
    limit = f"-ofaulthandler_timeout={LIMIT}"
    command = [sys.executable, *PYTEST.split(), *WORKERS, limit, *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    print(done.stdout)
    failed: list[str] = []
    for line in re.findall(r"^(?:FAILED|ERROR) (.+)", done.stdout, re.MULTILINE):
        # Names of tests may have spaces.
        begun = [test for test in tests if line.startswith(test)]
        failed.append(max(begun, key=len, default=line))
    return done.returncode, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
