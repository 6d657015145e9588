"""The pre-flight report as a table and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from ragen_jax.preflight.compile import CompileResult
from ragen_jax.programs.roofline import Chip


def report(results: Sequence[CompileResult], chip: Chip, devices: int) -> dict[str, Any]:
    """Return the object that --json prints."""
    seconds = [r.program.calls * r.roofline_s for r in results]
    diagnosis = [s for s, r in zip(seconds, results, strict=True) if r.program.diagnosis]
    return {
        "programs": [
            {
                "name": r.program.name,
                "compile_s": round(r.compile_s, 2),
                "peak_hbm_gib": round(r.peak_gib, 3),
                "hbm_gib": chip.hbm_gib,
                "fits": r.fits,
                "flops": r.program.cost.flops * devices,
                "bytes": r.program.cost.bytes,
                "roofline_s": r.roofline_s,
                **_per_token(r),
            }
            for r in results
        ],
        "step_s": sum(seconds),
        "diagnosis_share": sum(diagnosis) / sum(seconds),
        "fits": all(r.fits for r in results),
    }


def _per_token(result: CompileResult) -> dict[str, float]:
    """Return the bytes of a sampled token, for a program that samples."""
    program = result.program
    return {"bytes_per_token": program.cost.bytes / program.tokens} if program.tokens else {}


HEADER = "program        calls  compile s  peak GiB  of it held  fits  TFLOP/call  GB/chip  least s"


def table(results: Sequence[CompileResult], chip: Chip, summary: dict[str, Any]) -> str:
    """Return the report as a table.

    Args:
      summary: the value of `report`.
    """
    lines = [HEADER]
    for r, shown in zip(results, summary["programs"], strict=True):
        lines.append(
            f"{r.program.name:<14} {r.program.calls:>5.3g} {r.compile_s:>10.1f} {r.peak_gib:>9.2f} "
            f"{r.held_gib:>11.2f}  {'yes' if r.fits else 'NO':<4} {shown['flops'] / 1e12:>11.1f} "
            f"{shown['bytes'] / 1e9:>8.1f} {r.roofline_s:>8.3f}"
        )
    lines += [
        f"{one['name']} moves at least {one['bytes_per_token'] / 1e6:.1f} MB a token and chip."
        for one in summary["programs"]
        if "bytes_per_token" in one
    ]
    lines.append(
        f"HBM of a chip: {chip.hbm_gib} GiB. A step takes at least {summary['step_s']:.1f} s, "
        f"{summary['diagnosis_share']:.0%} of it for the diagnosis."
    )
    return "\n".join(lines)


def complaints(results: Sequence[CompileResult], chip: Chip) -> Iterator[str]:
    """Yield a line for each program that does not fit."""
    for r in results:
        if not r.fits:
            yield (
                f"{r.program.name} does not fit: {r.peak_gib:.2f} GiB, "
                f"{r.peak_gib - chip.hbm_gib:.2f} GiB more than the chip's {chip.hbm_gib}; try "
                f"{', '.join(r.program.helps)}"
            )
