"""Distributed Muon in short examples that prove themselves.

    python examples/recipes                      all of them
    python examples/recipes fsdp hsdp            those of two files
    python examples/recipes fsdp.flat            one
    python examples/recipes --list               what there is

Processes are started as needed; under torchrun those that there are run what is made for
as many. Each recipe prints a line. The exit code is 1 if one of them does not hold, and 2
if none could be run.
"""

import argparse
import os
import sys
from pathlib import Path


sys.path.insert(1, str(Path(__file__).resolve().parent.parent))


from processes import leave_on_signals


if __name__ == "__main__":
    leave_on_signals()

try:
    import torch.optim.muon  # noqa: F401
except ImportError as error:
    print(
        f"recipes: {error}; this needs the overlay: `python3 setup_overlay.py env`, then "
        "`.venv/bin/python examples/recipes`.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from runner import counted, Recipe, recipes, run_all, run_as_one_of


def choose(wanted: list[str]) -> list[Recipe]:
    found = []
    for name in wanted:
        these = [
            recipe
            for recipe in recipes().values()
            if name in (recipe.name, recipe.name.partition(".")[0])
        ]
        if not these:
            raise SystemExit(f"recipes: there is no {name}; see --list")
        found += these
    return list(dict.fromkeys(found)) if wanted else list(recipes().values())


def print_list(chosen: list[Recipe]) -> None:
    for recipe in chosen:
        summary = (recipe.function.__doc__ or "").partition("\n")[0]
        print(f"{recipe.name}, {counted(recipe)}: {summary}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only print what there is")
    args = parser.parse_args()
    chosen = choose(args.names)
    if args.list:
        print_list(chosen)
        return 0
    run = run_as_one_of if "RANK" in os.environ else run_all
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
