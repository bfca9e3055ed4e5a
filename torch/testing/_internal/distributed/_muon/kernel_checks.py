"""Checks of Muon's Triton kernels without a GPU, in a process of their own: ``python -m`` this module.

``interpret`` runs the kernels in Triton's interpreter, which must be chosen before they are imported. ``compile`` compiles
them for GPUs, and prints what ptxas used as JSON.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock


if sys.argv[-1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch.optim import _muon_kernels as kernels, _newton_schulz_kernels as forms
from torch.optim._newton_schulz import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS


SMALL = kernels.Tiles(side=16, inner=16, stages=1, warps=1, by_descriptor=True)
COEFFICIENTS = [(DEFAULT_A, DEFAULT_B, DEFAULT_C)] * 5


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, whose columns follow each other in memory."""
    return x.mT.contiguous().mT


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def require(condition: Any, *about: Any) -> None:
    if not condition:
        raise AssertionError(about)


def on_gpu(multiprocessors: int, many_loads: int = 1) -> Any:
    """As on a GPU with so many multiprocessors, whose products are cut into parts from ``many_loads`` on."""
    return mock.patch.multiple(
        kernels,
        _multiprocessors=lambda device: multiprocessors,
        _capability=lambda device: 9,
        _MANY_LOADS=many_loads,
        TILES=dict.fromkeys(kernels.TILES, SMALL),
    )


def check_products_of_a_matrix_with_itself() -> None:
    for multiprocessors in (1, 3, 7, 132):
        for shape in ((40, 24), (16, 160), (136, 64), (1, 8), (2, 56, 24), (3, 16, 16)):
            for by_descriptor in (True, False):
                tiles = SMALL._replace(by_descriptor=by_descriptor)
                x = drawn(*shape)
                expected = x.double() @ x.double().mT
                for factor in (x, by_columns(x)):
                    about = multiprocessors, shape, by_descriptor, factor.stride()
                    if by_descriptor and not kernels.takes(factor):
                        continue
                    with on_gpu(multiprocessors):
                        found = kernels.symmetric_product(factor, factor, tiles=tiles)
                        again = kernels.symmetric_product(factor, factor, tiles=tiles)
                    # The rounding of the result to float16.
                    require(distance(found, expected) < 2**-11, *about)
                    require(torch.equal(found, again), *about)


def check_products_with_a_base() -> None:
    for shape in ((40, 40), (2, 24, 24)):
        x = drawn(*shape) / 8
        symmetric = (x + x.mT).contiguous()
        square = kernels.symmetric_product
        for multiprocessors in (1, 7):
            with on_gpu(multiprocessors):
                found = square(
                    symmetric,
                    symmetric,
                    symmetric,
                    beta=-1.5,
                    alpha=0.25,
                    diagonal=3,
                    dtype=torch.float32,
                    tiles=SMALL,
                )
            exact = symmetric.double()
            expected = -1.5 * exact + 0.25 * exact @ exact
            expected += 3 * torch.eye(shape[-1], dtype=torch.float64)
            # Sums are in float32.
            require(distance(found, expected) < 1e-6, shape, multiprocessors)


def check_products_of_two_matrices() -> None:
    """A polynomial of a symmetric matrix commutes with it."""
    x = drawn(40, 40) / 20
    symmetric = (x + x.mT).contiguous()
    with on_gpu(3):
        cube_root = kernels.symmetric_product(symmetric, symmetric, diagonal=1)
        found = kernels.symmetric_product(cube_root, symmetric)
    exact = symmetric.double()
    expected = (exact @ exact + torch.eye(40)) @ exact
    # Two roundings to float16.
    require(distance(found, expected) < 2**-10)


def check_which_factors_products_take() -> None:
    x = drawn(16, 24)
    for taken, factor in (
        (True, x),
        (True, x.mT),
        (True, drawn(2, 16, 24)),
        (True, drawn(2, 16, 24).mT),
        (False, x.float()),
        (False, drawn(16, 20)),
        (False, drawn(17, 24)[:, 1:17]),
        (False, drawn(16, 48)[:, ::2]),
    ):
        require(kernels.takes(factor) == taken, taken, factor.shape, factor.stride())


def check_waves() -> None:
    """Programs for full waves, and parts of the tiles that remain."""
    for expected, tiles, loads, multiprocessors in (
        ((528, 1), 528, 64, 132),
        ((132, 4), 136, 128, 132),
        ((264, 4), 272, 128, 132),
        ((0, 3), 36, 64, 132),
        # Short sums are not cut.
        ((136, 1), 136, 32, 132),
        # More than half of a wave remains.
        ((200, 1), 200, 128, 132),
    ):
        found = kernels._waves(tiles, loads, multiprocessors)
        require(found == expected, expected, found)


def check_gradients_come_into_momentum() -> None:
    for momentum in (0.95, 0.5, 0.3, 0.0):
        for nesterov in (True, False):
            for accumulate in (True, False):
                for sizes in ((100, 7, 70000, 1), (64, 65536, 131072)):
                    _check_pass_before(momentum, nesterov, accumulate, sizes)


def _check_pass_before(
    momentum: float, nesterov: bool, accumulate: bool, sizes: tuple[int, ...]
) -> None:
    momenta = [drawn(size, dtype=torch.float32) for size in sizes]
    gradients: list[Any] = [drawn(size, dtype=torch.float32) for size in sizes]
    gradients[1] = None
    targets = [torch.empty(size, dtype=torch.float16) for size in sizes]
    expected = [each.clone() for each in momenta]
    versions = [each._version for each in (*momenta, *targets)]
    kernels.accumulate_and_blend(
        momenta, gradients, targets, momentum, nesterov=nesterov, accumulate=accumulate
    )
    for own, gradient, found, target in zip(expected, gradients, momenta, targets):
        about = momentum, nesterov, accumulate, len(own)
        blended = own
        if gradient is not None:
            if accumulate:
                own.lerp_(gradient, 1 - momentum)
            if nesterov:
                blended = gradient.lerp(own, momentum)
        # A GPU fuses a multiplication and an addition, as torch does there; the interpreter does not.
        torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6, msg=f"{about}")
        torch.testing.assert_close(target, blended.half(), rtol=2**-10, atol=1e-6)
    written = [*momenta, *targets] if accumulate else targets
    later = [each._version for each in (*momenta, *targets)]
    for tensor, before, after in zip((*momenta, *targets), versions, later):
        if any(tensor is each for each in written):
            require(after > before, "version")


def check_updates() -> None:
    for sizes in ((100, 7, 70001), (64, 65536)):
        for as_tensor in (False, True):
            params = [drawn(size, dtype=torch.float32) for size in sizes]
            updates = [drawn(size) for size in sizes]
            expected = [p.double() * 0.99 - 0.5 * u for p, u in zip(params, updates)]
            versions = [param._version for param in params]
            decay, alpha = 0.99, -0.5
            if as_tensor:
                kernels.apply_updates(
                    params, updates, torch.tensor(decay), torch.tensor(alpha)
                )
            else:
                kernels.apply_updates(params, updates, decay, alpha)
            for param, exact, before in zip(params, expected, versions):
                # Two roundings in float32.
                torch.testing.assert_close(param.double(), exact, rtol=3e-7, atol=3e-7)
                require(param._version > before)


def check_scales() -> None:
    factors = torch.tensor([2.0, 3.0])
    x = drawn(2, 30, 7)
    for each in (x, x.mT):
        found = kernels.scaled(each, factors, torch.float32)
        require(torch.equal(found, each.float() * factors[:, None, None]))
        require(found.stride() == each.stride())


def exact_polynomial(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-2] > x.shape[-1]:
        return exact_polynomial(x.mT).mT
    x = x.double()
    x = x / torch.linalg.matrix_norm(x)[..., None, None].clamp(min=EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def check_orthogonalization() -> None:
    row = torch.ones(48, 1, dtype=torch.float64)
    row[7] = 1000
    low_rank = drawn(48, 4).double() @ drawn(4, 96).double()
    cases = {
        "wide": drawn(48, 96),
        "tall": drawn(96, 48),
        "square": drawn(40, 40),
        "batch": drawn(3, 32, 64),
        "tall batch": drawn(3, 64, 32),
        "huge": drawn(48, 96).double() * 1e4,
        "tiny": drawn(48, 96).double() * 1e-4,
        "one large row": drawn(48, 96).double() * row,
        "nearly low rank": low_rank + 1e-3 * drawn(48, 96).double(),
    }
    for name, values in cases.items():
        for form in ("symmetric", "gram"):
            x = values.float()
            expected = exact_polynomial(x)
            out = x.clone()
            with on_gpu(4, many_loads=3):
                alone = forms.orthogonalized(x, COEFFICIENTS, EPS, form)
                found = forms.orthogonalized(out, COEFFICIENTS, EPS, form, out)
            require(found is out and torch.equal(found, alone), name, form)
            # Float16 has 11 bits. It loses the smallest singular values of nearly low-rank matrices.
            most = 0.3 if name == "nearly low rank" else 0.005
            require(distance(found, expected) < most, name, form)
    zeros = torch.zeros(48, 96)
    with on_gpu(4):
        found = forms.orthogonalized(zeros, COEFFICIENTS, EPS, "gram")
    require(torch.equal(found, zeros))


def interpret() -> dict[str, str]:
    """The traceback of each check that failed, and "" for those that passed."""
    found: dict[str, str] = {}
    for name, check in globals().copy().items():
        if name.startswith("check_"):
            torch.manual_seed(0)
            found[name] = ""
            try:
                check()
            except Exception:
                found[name] = traceback.format_exc()
    return found


def compiled() -> dict[str, dict[str, Any]]:
    """What each kernel uses on each GPU, by a name that says for what it was compiled."""
    found: dict[str, dict[str, Any]] = {}
    for (capability, is_large), tiles in kernels.TILES.items():
        for has_parts in (False, True):
            for in_columns in (False, True):
                order = "columns" if in_columns else "rows"
                name = f"product {capability}0 {tiles} parts={has_parts} by {order}"
                if name not in found:
                    found[name] = _product(capability, tiles, has_parts, in_columns)
    for capability in (9, 8):
        found[f"pass before {capability}0"] = _usage(
            kernels.accumulate_and_blend_kernel,
            capability,
            {"jobs": "*i64", "count": "i32"}
            | dict.fromkeys(("gradient_weight", "momentum_weight"), "fp32"),
            {
                "ACCUMULATE": True,
                "NESTEROV": True,
                "IS_MOSTLY_MOMENTUM": True,
                "IS_MOSTLY_GRADIENT": False,
                "MOMENTUM": tl.float32,
                "GRADIENT": tl.float32,
                "TARGET": tl.bfloat16,
                "IS_ALIGNED": True,
                "CHUNK": kernels._CHUNK,
                "AT_ONCE": kernels._AT_ONCE,
            },
            num_warps=kernels._WARPS,
        )
        found[f"pass after {capability}0"] = _usage(
            kernels.apply_updates_kernel,
            capability,
            {"jobs": "*i64", "count": "i32", "decay": "fp32", "alpha": "fp32"},
            {
                "ON_DEVICE": False,
                "PARAM": tl.float32,
                "UPDATE": tl.bfloat16,
                "IS_ALIGNED": True,
                "CHUNK": kernels._CHUNK,
                "AT_ONCE": kernels._AT_ONCE,
            },
            num_warps=kernels._WARPS,
        )
    return found


def _product(
    capability: int, tiles: kernels.Tiles, has_parts: bool, in_columns: bool
) -> dict[str, Any]:
    block = [1, tiles.side, tiles.inner]
    if in_columns:
        block = [1, tiles.inner, tiles.side]
    factor = f"tensordesc<bf16{block}>" if tiles.by_descriptor else "*bf16"
    types = dict.fromkeys(kernels.symmetric_product_kernel.arg_names, "i32")
    types |= {"left": factor, "right": factor, "base": "*bf16", "out": "*bf16"}
    types |= {"partial": "*fp32", "arrivals": "*i32"}
    types |= dict.fromkeys(("alpha", "beta", "diagonal"), "fp32")
    along = "row" if in_columns else "column"
    constants = {
        "HAS_BASE": True,
        "HAS_PARTS": has_parts,
        "BY_DESCRIPTOR": tiles.by_descriptor,
        "LEFT_BY_COLUMNS": in_columns,
        "RIGHT_BY_COLUMNS": in_columns,
        "SIDE": tiles.side,
        "INNER": tiles.inner,
        f"left_of_{along}": 1,
        f"right_of_{along}": 1,
    }
    return _usage(
        kernels.symmetric_product_kernel,
        capability,
        types,
        constants,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )


def _usage(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    **options: int,
) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types[name]
        is_size = name in ("side", "inner") or "_of_" in name
        if signature[name].startswith("*") or (is_size and name not in constants):
            if name != "tiles_of_matrix":
                aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability * 10, 32)
    result = triton.compile(source, target=target, options=options)
    ptx = result.asm["ptx"]
    return {
        "shared": result.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "bulk copies": ptx.count("cp.async.bulk"),
        "vectors of four": len(re.findall(r"global\.v4", ptx)),
        **_of_ptxas(result.asm["cubin"]),
    }


def _of_ptxas(cubin: bytes) -> dict[str, int]:
    """The registers of a thread, and the bytes that spills take; {} where Triton has no program to ask."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / "cuobjdump"
    if not program.exists():
        return {}
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(program), "-res-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        return {}
    return {"registers": int(found[1]), "stack": int(found[2])}


if __name__ == "__main__":
    outcome: Any = interpret() if sys.argv[-1] == "interpret" else compiled()
    print(json.dumps(outcome))
