"""Draws docs/pictures/*.svg, which docs/pictures.md explains.

    python docs/site/pictures.py

What is computed in a picture is computed here by the code that training runs; what was measured is
read from docs/lab and docs/results.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from svg import Picture

from ragen_jax.algorithm.filter import group_scores, select_groups
from ragen_jax.diagnostics.information import information_metrics

DOCS = Path(__file__).parents[1]
PICTURES = DOCS / "pictures"


def step() -> Picture:
    """The stages of ragen_jax/train.py."""
    p = Picture("One step of training", 760, 200)
    stages = (
        ("play", "G prompts x|K episodes"),
        ("make_batch", "rows of tokens|[B, T]"),
        ("diagnose", "does reasoning|see its prompt?"),
        ("select", "groups whose|rewards vary"),
        ("assign_credit", "rewards to|advantages"),
        ("update", "minibatches of|the kept rows"),
    )
    for i, (name, what) in enumerate(stages):
        x = 14 + 124 * i
        p.box(x, 30, 108, 74, "amber" if name == "diagnose" else "blue", f"{name}|{what}")
        if i:
            p.arrow((x - 16, 67), (x - 1, 67))
    p.arrow((688, 104), (688, 140), (68, 140), (68, 106))
    p.text(378, 132, "the policy that was updated plays the next step", middle=True, colour="pale")
    p.text(
        14,
        178,
        "Beside it: evaluate (held-out problems), watch (alarm, stopping rules), write (one row).",
        colour="pale",
    )
    return p


def episode() -> Picture:
    """Turns, and which tokens are trained on."""
    p = Picture("One episode of two turns", 760, 190)
    x = 14.0
    parts = (
        ("line", 150, "prompt|rules, the room"),
        ("blue", 120, "reasoning|<think> ..."),
        ("green", 92, "answer|Up Left"),
        ("line", 136, "observation|the room now"),
        ("blue", 120, "reasoning|<think> ..."),
        ("green", 92, "answer|Right"),
    )
    for fill, width, label in parts:
        p.box(x, 44, width, 50, fill, label)
        x += width + 4
    p.text(14, 30, "turn 1", bold=True)
    p.text(388, 30, "turn 2", bold=True)
    p.text(14, 122, "Coloured tokens were sampled: loss, KL and entropy are on them, with the")
    p.text(14, 139, "log-probabilities noted when they were sampled. Nothing is tokenised anew.")
    p.text(
        14,
        170,
        "Blue is Z of the diagnosis, the prompt before it X, green A.",
        colour="pale",
    )
    return p


def groups() -> Picture:
    """Returns of members, and the variance that the filter ranks by."""
    return_GK = np.array(
        [[1.0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]
    )
    score_G = np.asarray(group_scores(return_GK))
    p = Picture("Groups: episodes of one prompt, told apart by their rewards", 760, 240)
    p.text(130, 26, "6 episodes of each, and what they earned", colour="pale")
    p.text(478, 26, "sample variance", colour="pale")
    says = (
        "teaches: some ways work",
        "solved by all: nothing to learn",
        "teaches a little",
        "failed by all: nothing to learn",
    )
    for g, returns in enumerate(return_GK):
        y = 40 + 48 * g
        p.text(14, y + 24, f"prompt {g + 1}", bold=True)
        for k, value in enumerate(returns):
            p.box(130 + 54 * k, y, 48, 38, "green" if value else "red", f"{value:.0f}")
        p.text(478, y + 24, f"{score_G[g]:.2f}", bold=True)
        p.text(540, y + 24, says[g], colour="pale")
    return p


def cross_scoring() -> Picture:
    """Two matrices of log p(z_m | x_n) and the figures that follow from them."""
    p = Picture("Cross-scoring: every reasoning under every prompt", 760, 340)
    rng = np.random.default_rng(0)
    noise_MN = rng.normal(0, 0.4, (5, 5))
    depends = -14 + noise_MN + 9 * np.eye(5)
    template = -7 + noise_MN
    length_M, own_M = np.full(5, 10), np.arange(5)
    cases = (
        ("Depends on its prompt", depends, 60),
        ("A template: any prompt will do", template, 430),
    )
    for title, score_MN, left in cases:
        p.text(left, 26, title, bold=True)
        p.text(left, 46, "prompts x 1 to 5", colour="pale")
        for m, n in np.ndindex(5, 5):
            own = m == n
            fill = "blue" if score_MN[m, n] > -9 else "card"
            label = f"{score_MN[m, n]:.1f}"
            p.box(left + 52 * n, 56 + 38 * m, 48, 34, fill, "" if own else "")
            p.text(
                left + 52 * n + 24, 56 + 38 * m + 22, label, middle=True, bold=own, small=not own
            )
        figures = information_metrics(score_MN.astype(np.float32), length_M, own_M)
        p.text(
            left,
            272,
            f"mi_seq {figures['mi_seq']:.2f} of at most log 5 = {math.log(5):.2f} nats",
        )
        p.text(
            left,
            291,
            f"retrieval_acc {figures['retrieval_acc']:.1f}, by chance "
            f"{figures['retrieval_chance']:.1f};  H(Z|X) {figures['h_cond_seq']:.1f}",
        )
    for m in range(5):
        p.text(20, 78 + 38 * m, f"z {m + 1}", colour="pale")
    p.text(
        14,
        326,
        "log p(z|x) in nats, made up; the figures are computed from them.",
        colour="pale",
    )
    return p


def top_p() -> Picture:
    """Which of eight groups are kept."""
    score_G = np.array([9.1, 4.2, 2.0, 0.9, 0.5, 0.2, 0.05, 0.0], np.float32)
    keep_G = np.asarray(select_groups(score_G, strategy="top_p", value=0.9))
    share_G = np.cumsum(score_G) / score_G.sum()
    p = Picture("Top-p 0.9 of the reward variance", 760, 260)
    p.text(14, 26, "Groups by reward variance", bold=True)
    for g, score in enumerate(score_G):
        x, high = 30 + 90 * g, 130 * score / score_G.max()
        p.box(x, 190 - max(high, 1.5), 60, max(high, 1.5), "green" if keep_G[g] else "line")
        p.text(x + 30, 182 - max(high, 1.5), f"{score:g}", middle=True)
        p.text(x + 30, 208, f"{share_G[g]:.1%}", middle=True, colour="pale", small=True)
    p.text(
        14,
        240,
        f"Below: variance so far. The first {keep_G.sum()} reach 90 % of the total: they are "
        "kept, the others are not learnt from.",
    )
    return p


def snr() -> Picture:
    """Norms of gradients by reward variance, as measured."""
    page = (DOCS / "results" / "gradient_buckets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \|(.*)\|$", page, re.M)
    cells = [[float(cell) for cell in row.split("|")] for _, row in rows if row.count("|") == 8]
    p = Picture("Signal and noise by reward variance", 760, 300)
    p.text(14, 26, "Norm of the gradient of a bucket of 63 or 64 groups (logarithmic)", bold=True)

    def y(norm: float) -> float:
        return 222 - 54 * (math.log10(norm) + 3.3)

    for power in (-3, -2, -1, 0):
        p.curve([(60, y(10.0**power)), (740, y(10.0**power))], "line")
        p.text(14, y(10.0**power) + 4, f"{10.0**power:g}", colour="pale", small=True)
    for b, (_, variance, task, _, _, regulariser, _, ratio, _) in enumerate(cells):
        x = 84 + 110 * b
        p.box(x, y(task) - 4, 34, 8, "green")
        p.box(x + 38, y(regulariser) - 4, 34, 8, "red")
        p.text(x + 36, 250, f"variance {variance:g}", middle=True, small=True)
        p.text(x + 36, 268, f"SNR {ratio:g}", middle=True, small=True, colour="pale")
    p.text(
        14,
        290,
        "Green: the task. Red: KL and entropy. Tiny Sokoban agent, seed 0, step 100 "
        "(docs/results/gradient_buckets.md).",
        colour="pale",
        small=True,
    )
    return p


def flow() -> Picture:
    """From prompt to reasoning to action."""
    p = Picture("Three links, each with its figure", 760, 230)
    p.box(30, 70, 130, 60, "line", "X|the prompt")
    p.box(310, 70, 130, 60, "blue", "Z|the reasoning")
    p.box(590, 70, 130, 60, "green", "A|the action")
    p.arrow((162, 100), (308, 100), colour="strong")
    p.arrow((442, 100), (588, 100), colour="strong")
    p.arrow((95, 132), (95, 178), (655, 178), (655, 132), colour="strong")
    p.text(235, 90, "collapse/ mi", middle=True, bold=True)
    p.text(515, 90, "flow/ za_swap", middle=True, bold=True)
    p.text(375, 170, "flow/ xa_swap", middle=True, bold=True)
    p.text(235, 118, "near 0: a template", middle=True, small=True, colour="pale")
    p.text(515, 118, "near 0: decoration", middle=True, small=True, colour="pale")
    p.text(
        375,
        196,
        "high while za_swap is near 0: the action reads the prompt past the reasoning",
        middle=True,
        small=True,
        colour="pale",
    )
    p.text(
        14,
        30,
        "Swap one for another prompt's: how much less likely is what follows?",
        bold=True,
    )
    return p


def regimes() -> Picture:
    """H(Z|X) and MI, each against the run's own level."""
    p = Picture("Where a run stands", 760, 280)
    p.box(170, 30, 270, 90, "green", "0  diverse reasoning|varied, and about its prompt")
    p.box(170, 128, 270, 90, "red", "2  template collapse|varied, and the same for all prompts")
    p.box(448, 30, 270, 90, "blue", "1  compressed|almost certain, still about its prompt")
    p.box(448, 128, 270, 90, "red", "3  low-entropy collapse|one text for everything")
    p.text(30, 78, "MI high", bold=True)
    p.text(30, 176, "MI low", bold=True)
    p.text(305, 240, "H(Z|X) high", bold=True, middle=True)
    p.text(583, 240, "H(Z|X) low", bold=True, middle=True)
    p.text(
        30,
        268,
        "Low: below half of the run's level. Entropy alone sees columns, no rows.",
        colour="pale",
        small=True,
    )
    return p


def alarm() -> Picture:
    """A run of the laboratory in which information went first."""
    lines = (DOCS / "lab" / "organism.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    (run,) = [r for r in rows if r["treatment"] == "no filter" and r["seed"] == 10]
    p = Picture("An alarm before success shows anything", 760, 290)
    p.text(14, 26, "Organism, no filter, seed 10 (docs/lab/organism.md)", bold=True)

    def x(at: float) -> float:
        return 60 + 4.2 * at

    def y(share: float) -> float:
        return 230 - 130 * share

    curves = (
        ("probe/mi_seq", "strong", "information (probe/mi_seq)"),
        ("eval/success", "pale", "held-out success"),
    )
    for share in (0, 0.5, 1):
        p.curve([(60, y(share)), (x(160), y(share))], "line")
        p.text(20, y(share) + 4, f"{share:.0%}", colour="pale", small=True)
    for i, (name, colour, label) in enumerate(curves):
        at = [
            (step, value)
            for step, value in zip(run["step"], run["figures"][name], strict=True)
            if value is not None
        ]
        p.curve([(x(step), y(value / at[0][1])) for step, value in at], colour)
        p.curve([(430, 44 + 18 * i), (460, 44 + 18 * i)], colour)
        p.text(468, 48 + 18 * i, label)
    on = [
        step
        for step, value in zip(run["step"], run["figures"]["regime/alarm"], strict=True)
        if value
    ]
    p.curve([(x(on[0]), 52), (x(on[0]), 230)], "alarm")
    p.text(x(on[0]) + 6, 60, f"alarm: step {on[0]}", colour="alarm", bold=True)
    for at in (0, 40, 80, 120, 160):
        p.text(x(at), 250, f"{at}", middle=True, colour="pale", small=True)
    p.text(
        14,
        278,
        "Of each figure's first value. The alarm watched the step's own prompts, not the probe.",
        colour="pale",
        small=True,
    )
    return p


def mesh() -> Picture:
    """Eight devices as data x fsdp x tensor."""
    p = Picture("Eight devices: mesh.data=2, mesh.fsdp=2, mesh.tensor=2", 760, 280)
    for d in range(2):
        left = 14 + 372 * d
        p.box(left, 44, 360, 176, "card")
        p.text(left + 10, 64, f"data {d}: a whole copy of the parameters", colour="pale")
        for f in range(2):
            for t in range(2):
                p.box(
                    left + 12 + 172 * t,
                    76 + 70 * f,
                    164,
                    62,
                    ("blue", "green")[f],
                    f"device {4 * d + 2 * f + t}|rows {2 * d + f + 1} of 4|fsdp {f}, tensor {t}",
                )
    p.text(14, 30, "Eight devices: mesh.data=2, mesh.fsdp=2, mesh.tensor=2", bold=True)
    p.text(
        14,
        244,
        "Rows are split over data and fsdp; parameters and optimizer over fsdp and tensor; heads, "
        "MLP and vocabulary",
        small=True,
    )
    p.text(
        14,
        262,
        "over tensor. sampling_mesh may lay the same devices out otherwise while sampling.",
        small=True,
    )
    return p


DRAWN: dict[str, Callable[[], Picture]] = {
    "step": step,
    "episode": episode,
    "groups": groups,
    "cross_scoring": cross_scoring,
    "top_p": top_p,
    "snr": snr,
    "flow": flow,
    "regimes": regimes,
    "alarm": alarm,
    "mesh": mesh,
}

if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
