"""``python -m tools.bench promises``: what all owners at once and prefetch are worth over a slow wire."""
