"""The processor in words. Ratios of times differ between those with and without AMX."""

from __future__ import annotations

from pathlib import Path


_CPU = Path("/proc/cpuinfo")
_FEATURES = {
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
}


def words() -> str:
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        return "a processor that is not named"
    told = dict(map(str.strip, line.partition(":")[::2]) for line in lines)
    found = set(told.get("flags", "").split())
    features = [name for flag, name in _FEATURES.items() if flag in found]
    return f"{told.get('model name', '')}, {', '.join(features) or 'no AVX-512'}"
