"""Puts torch with distributed Muon before the stock torch. setup_overlay.py made this folder."""

import os
import sys


HERE = os.path.dirname(os.path.realpath(__file__))


def _text(*names):
    with open(os.path.join(HERE, *names), "rb") as file:
        return file.read()


def start():
    stock = _text("stock.txt").decode()
    try:
        is_same = _text("version.py") == _text(stock, "torch", "version.py")
    except OSError:
        return  # torch was uninstalled
    if not is_same:
        sys.stderr.write(
            "distributed Muon: torch has changed since the overlay was applied, so this is "
            "the stock torch. Apply or revert the overlay again with setup_overlay.py.\n"
        )
        return
    folders = [os.path.realpath(folder) for folder in sys.path]
    # PYTHONPATH comes before, and keeps its rank.
    place = folders.index(stock) if stock in folders else len(folders)
    sys.path.insert(place, HERE)


start()
