"""The page docs/results/accelerator.md, from the stored lines."""

from benchmarks.accelerator.pieces import PIECES
from benchmarks.pages import read_introduction
from ragen_jax.programs.roofline import CHIPS

# Published peaks: bfloat16 FLOPs and bytes a second (nvidia.com, data sheets of H100 SXM, H200 SXM
# and A100 80GB SXM, dense; TPUs: roofline.py).
PEAKS = {
    "NVIDIA H100 80GB HBM3": (989.4e12, 3.35e12),
    "NVIDIA H200": (989.4e12, 4.8e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    **{
        name: (CHIPS[kind].peak_flops, CHIPS[kind].bandwidth)
        for name, kind in {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.items()
    },
}
PRIME_RL = "prime-rl's trainer on one H100"
# (shape, trained, tokens of a row) -> a published figure.
UPDATES = {
    ("qwen3-0.6b", "full", 16_384): f"{PRIME_RL}: 11.9k tokens/s, MFU 11.1 %",
    ("qwen3-4b", "lora", 16_384): f"{PRIME_RL}: 6.23k tokens/s, MFU 21.7 %",
}
STEPS = {"speedrun": "public run on 8 H100: 33 s a step, 265 GPU-seconds"}
EMPTY = """
Nothing has been measured on an accelerator yet: run the first command on a machine that has one.
Figures elsewhere in this documentation are of CPUs, unless a page says otherwise.
"""


def write(lines):
    """Return the page of stored lines, of which the last of each device and piece counts."""
    latest = {(line["device"], line["piece"]): line for line in lines}
    devices = dict.fromkeys(line["device"] for line in latest.values())
    parts = [read_introduction("accelerator/introduction.md")] + [EMPTY] * (not devices)
    for name in devices:
        parts.append(_section(name, [line for (of, _), line in latest.items() if of == name]))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _section(name, lines):
    dates = sorted(line["date"] for line in lines)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = ", ".join(sorted({line["jax"] for line in lines}))
    (limits,) = [x for x in _rows(lines, "device") if "copy" in x][:1] or [{}]
    parts = [f"## {name}\n\n{when}, jax {versions}.{_limits(name, limits)}"]
    for table in (_decode, _update, _step, _learning):
        found = table(lines, name, limits)
        if found:
            parts.append("\n".join(found))
    failures = [f"- {line['piece']}: {line['failure']}" for line in lines if line["failure"]]
    if failures:
        parts.append("\n".join(["Failed:", "", *failures]))
    finished = {line["piece"] for line in lines if not line["failure"]}
    missing = [piece.name for piece in PIECES if piece.name not in finished]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _rows(lines, kind):
    return [row for line in lines if line["kind"] == kind for row in line["rows"]]


def _limits(name, limits):
    text = ""
    if limits:
        text = f" Copying moves {limits['copy'] / 1e9:,.0f} GB/s, read plus written; a "
        text += f"{limits['dtype']} matrix product runs at {limits['product'] / 1e12:,.0f} TFLOP/s."
    if name in PEAKS:
        flops, bandwidth = PEAKS[name]
        text += f" Published: {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.0f} TFLOP/s."
    return text


def _table(title, header, rows):
    if not rows:
        return []
    lines = [f"### {title}", "", _cells(header), _cells(["---"] * len(header))]
    return [*lines, *(_cells(row) for row in rows)]


def _cells(cells):
    return f"| {' | '.join(cells)} |"


def _share(rate, limit):
    return f"{rate / limit:.0%}" if limit else "-"


def _decode(lines, name, limits):
    header = ("model", "rows", "tokens/s", "ms a token of every row", "of bandwidth")
    found = []
    for row in _rows(lines, "decode"):
        sizes = row["shape"] + ", int8 cache" * (row["cache_dtype"] == "int8"), str(row["rows"])
        if "refused" in row:
            found.append((*sizes, row["refused"], "", ""))
            continue
        rate, each = row["rows"] * row["steps"] / row["seconds"], row["seconds"] / row["steps"]
        share = _share(row["bytes"] / row["seconds"], limits.get("copy"))
        found.append((*sizes, f"{rate:,.0f}", f"{1e3 * each:.2f}", share))
    return _table("Decode", header, found)


def _update(lines, name, limits):
    header = ("model", "trained", "rows", "tokens/s", "s", "MFU", "of the product", "published")
    found = []
    for row in _rows(lines, "update"):
        trained = "lora" if row["rank"] else "full"
        sizes = row["shape"], trained, f"{row['rows']} x {row['length']:,}"
        anchor = UPDATES.get((row["shape"], trained, row["length"]), "-")
        if "refused" in row:
            found.append((*sizes, row["refused"], "", "", "", anchor))
            continue
        rate = row["flops"] / row["seconds"]
        peak, _ = PEAKS.get(name, (None, None))
        tokens = row["rows"] * row["length"] / row["seconds"]
        shares = _share(rate, peak), _share(rate, limits.get("product"))
        found.append((*sizes, f"{tokens:,.0f}", f"{row['seconds']:.3g}", *shares, anchor))
    return _table("Update", header, found)


def _step(lines, name, limits):
    header = ("setting", "sampling", "step, s", "rollout", "update", "diagnosis", "share")
    header += ("GPU-seconds", "replies", "tokens a reply", "published")
    found = []
    for line in lines:
        if line["kind"] != "step":
            continue
        setting = line["piece"].removeprefix("step ")
        anchor = STEPS.get(setting.split()[0], "-")
        lock_step = {
            row["shape"]: row["rollout"]
            for row in line["rows"]
            if not row["slots"] and "step" in row
        }
        for row in line["rows"]:
            label = f"{setting}{', LoRA' * bool(row['rank'])}"
            how = f"{row['slots']} slots" if row["slots"] else "lock step"
            how += ", kernel for pages" * (row["cache_kernel"] == "pages")
            if "refused" in row:
                found.append((label, how, row["refused"], *[""] * 7, anchor))
                continue
            total = row["step"] - row["compile"]
            times = (f"{row[part]:.1f}" for part in ("rollout", "update", "diagnose"))
            if row["slots"] and row["shape"] in lock_step:
                how += f", {lock_step[row['shape']] / row['rollout']:.2f} x lock step's rollout"
            share, seconds = _share(row["diagnose"], total), f"{total * row['devices']:.0f}"
            sizes = f"{row['replies']:,.0f}", f"{row['reply']:.0f}"
            found.append((label, how, f"{total:.1f}", *times, share, seconds, *sizes, anchor))
    return _table("A step of RL", header, found)


def _learning(lines, name, limits):
    header = ("", "this device", "CPU", "difference")
    found = []
    for row in _rows(lines, "learning"):
        for moment, label in (
            ("before", "held-out success after the warm start"),
            ("after", f"held-out success after {row['steps']} steps"),
        ):
            difference, half = row[f"{moment}_difference"], row[f"{moment}_ci95"]
            verdict = "equal" if abs(difference) <= half else "**different**"
            found.append(
                (
                    label,
                    *(f"{x:.3f}" for x in row[moment]),
                    f"{difference:+.3f} ± {half:.3f}: {verdict}",
                )
            )
        for key, label in (
            ("rollout/success", "success in training"),
            ("rollout/response_length", "tokens of a reply"),
        ):
            found.append((label, *(f"{x:.3f}" for x in row[key]), ""))
    return _table("Learning", header, found)
