"""Where the Muon is that the overlay replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def stock_path() -> Path:
    """The kept file.

    Raises:
        FileNotFoundError: the overlay did not replace a Muon here, or kept none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("this interpreter has no torch")
    kept = Path(spec.origin).parent / ".muon_overlay/original/optim/_muon.py"
    if not kept.is_file():
        raise FileNotFoundError(
            f"{kept} is not there, so stock Muon cannot be measured: apply the overlay with setup_overlay.py, or pass "
            "--no-stock"
        )
    return kept
