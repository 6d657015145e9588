"""The benchmark commands: metrics, tables, missing peer libraries, equal work, one tiny real
run."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    alarm,
    alarm_bound,
    caching,
    chaos,
    continuous,
    corpus,
    gain,
    generation,
    layer_kinds,
    lengths,
    llm,
    measure,
    odd,
    peers,
    prefixes,
    reading,
    saving,
    scoring,
    searching,
    slots,
)
from benchmarks.chaos import clocks, environments, servers
from benchmarks.chaos.kinds import KINDS, SETUPS
from benchmarks.chaos.trial import Failure, Trial
from benchmarks.episodes import tiny_setting
from benchmarks.measure import Limits, Row
from benchmarks.slots import TEN_MILLION
from ragen_jax.envs.search_qa.remote import RemoteRetriever
from ragen_jax.envs.search_qa.retrievers import open_bm25

pytestmark = pytest.mark.long

BEFORE, AFTER = Limits(20e9, 200e9, "float32"), Limits(10e9, 250e9, "float32")


def test_ratio_is_the_median_over_pairs():
    # Pairs measured under equal load: the ratio of medians would be 3 / 2 = 1.5.
    found = measure.summarise([(1.0, 2.0), (2.0, 3.0), (4.0, 8.0)])
    assert found == {"ours": 2.0, "other": 3.0, "ratio": 2.0}
    assert measure.summarise([(3.0,), (1.0,), (2.0,)]) == {"ours": 2.0}


def test_compare_runs_in_turn_and_drops_the_warm_up():
    order = []
    measure.compare(lambda: order.append("a"), lambda: order.append("b"), repeats=2, warmup=1)
    assert order == ["a", "b"] * 3
    assert set(measure.compare(lambda: None, repeats=1)) == {"ours"}


def test_table_and_json():
    rows = [
        Row("fast", 0.5, "torch", 2.0, 4.0, target=3.0, work=100, flops=50e9, bytes=2e9),
        Row("slow", 0.002, "torch", 0.001, 0.5, target=1.0),
        Row("alone", 1.0, skipped="skipped: no torch; pip install torch"),
    ]
    found = measure.report("a-case", rows, BEFORE, AFTER, repeats=3)
    fast, slow, alone = found["rows"]
    assert fast["met"] and not slow["met"] and "met" not in alone
    assert fast["rate"] == 200
    assert fast["product_share"] == pytest.approx(0.4)  # 100 of 250 GFLOP/s
    assert fast["copy_share"] == pytest.approx(0.2)  # 4 of 20 GB/s
    assert "other" not in alone and "copy_share" not in slow
    assert found["product_gflop_s"] == [200, 250] and found["repeats"] == 3

    assert json.loads(measure.as_json(found)) == found
    assert "\n" not in measure.as_json(found)
    head, *lines = measure.as_table(found).splitlines()
    assert head.split() == "ours other ratio target rate of copy of product".split()
    assert lines[0].split() == "fast 0.5 s 2 s torch 4.00 x 3 met 200 tokens/s 20% 40%".split()
    assert lines[1].split() == "slow 2 ms 1 ms torch 0.50 x 1 missed".split()
    assert lines[-1] == "skipped: no torch; pip install torch"


@pytest.mark.parametrize("name", peers.COMMANDS)
def test_an_absent_peer_is_named_with_its_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    with pytest.raises(peers.PeerMissing, match=peers.COMMANDS[name]):
        peers.need(name)


@pytest.mark.slow
def test_without_a_peer_ours_is_still_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (row,) = generation.rollout_full(1, turns=(1,), members=2)
    assert row.other is None and row.ours > 0 and row.ratio is None
    assert "pip install torch" in row.skipped


SMALL = dataclasses.replace(TEN_MILLION, width=48, layers=2, heads=4, head_dim=12, mlp_width=64)


@pytest.mark.slow
@pytest.mark.parametrize("case, tokens", [("slots", None), ("slots_equal", 6 * 2 * 8)])
def test_slots_against_the_lock_step(case, tokens):
    sizes = dict(turns=(2, 2), members=3, limit=8, shape=SMALL)
    (row,) = getattr(slots, case)(1, slots_and_chunk=(4, 5), **sizes)
    assert row.ours > 0 and row.other > 0 and "4 slots, chunk 5" in row.name
    assert row.work == tokens or tokens is None and row.work < 6 * 2 * 8


@pytest.mark.slow
def test_steps_with_slots_on(agent, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    few = {"rollout.groups": 2, "rollout.group_size": 4, "optimizer.minibatches": 1}
    (row,) = slots.tiny_step(1, steps=4, **{"model.path": str(agent.directory), **few})
    assert row.ours > 0 and row.other > 0 and row.ratio > 0


@pytest.mark.slow
def test_continuous_batching_of_transformers():
    pytest.importorskip("torch")
    rows = continuous.generate_batch(1, groups=2, members=3, turns=2, shape=SMALL)
    assert [row.name for row in rows] == [
        *("full history, tiny agent: 6 episodes", "heavy-tailed replies: 6 episodes")
    ]
    assert all(row.other > 0 and row.target == 4 for row in rows)
    assert rows[0].work == 6 * 2 * 24
    (row,) = continuous.generate_batch_135m(1, groups=2, members=3, shape=SMALL)
    assert row.other > 0 and row.target == 2 and "6 episodes" in row.name


@pytest.mark.slow
def test_another_shape_plays(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(generation, "shape", lambda name, dtype: llm.TINY)
    alone, again = generation.rollout_05b(1, turns=(1, 2), members=2, new_tokens=4)
    assert alone.other is None and "pip install torch" in alone.skipped
    assert again.other > 0 and again.work == 6 * 4


@pytest.mark.slow
@pytest.mark.parametrize("context", ["full", "single_turn"])
def test_both_sides_play_the_same_episodes(context):
    with tiny_setting(context=context, turns=(1, 3), members=2, new_tokens=4) as (setting, _):
        episodes = setting.play()
        rng = np.random.default_rng(1)
        shown, _ = setting.play_with(lambda prompts, new: rng.integers(0, 280, (len(prompts), new)))
        again = setting.play(read_again=True)
    assert [len(e.turns) for e in episodes] == [1, 1, 3, 3]
    assert [len(prompts) for prompts in shown] == [4, 2, 2]
    for turn, prompts in enumerate(shown):
        live = [e for e in episodes if len(e.turns) > turn]
        assert [len(p) for p in prompts] == [len(e.turns[turn].prompt) for e in live]
        if context == "single_turn":  # a prompt does not include the sampled tokens
            for prompt, episode in zip(prompts, live, strict=True):
                assert np.array_equal(prompt, episode.turns[turn].prompt)
    assert all(len(t.sampled) == 4 for e in episodes for t in e.turns)
    assert [len(t.prompt) for e in again for t in e.turns] == [
        len(t.prompt) for e in episodes for t in e.turns
    ]


@pytest.mark.parametrize("names", [("",), ("lake", "room")])
def test_gains_of_runs(tmp_path, capsys, names):
    """Four problems: one is solved at first; in the last three evaluations 2, 3, 4 or 2, 2, 2."""
    for run, solved in {"one": (1, 0, 2, 3, 4), "other": (1, 0, 2, 2, 2)}.items():
        for name in names:
            folder = tmp_path / run / "eval" / name
            (folder / "episodes").mkdir(parents=True)  # a run also keeps episodes there
            for step, count in enumerate(solved):
                outcomes = [[seed, int(seed < count)] for seed in range(4)]
                (folder / f"step_{10 * step:06d}.json").write_text(json.dumps(outcomes))
    gain.main([str(tmp_path / run) for run in ("one", "other")])
    lines = [line.replace(f"{tmp_path}/", "") for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.endswith(":")] == [f"{name}:" for name in names if name]
    for index in range(len(names)):
        one, other, mean, over_runs = [x for x in lines if not x.endswith(":")][4 * index :][:4]
        assert one.startswith("one: 0.250 -> 0.750, +50.0 points, 95 % ")
        assert other.startswith("other: 0.250 -> 0.500, +25.0 points, 95 % ")
        assert mean.startswith("mean: +37.5 points, 95 % ") and mean.endswith(" over problems")
        # 37.5 ± 12.706 * 25 / root 2 / root 2: Student's t for two runs.
        assert over_runs.strip() == "95 % -121.3 to 196.3 over runs"


@pytest.mark.parametrize("steps", [(), (0,)])
def test_gains_need_two_evaluations(tmp_path, capsys, steps):
    (tmp_path / "eval").mkdir()
    for step in steps:
        (tmp_path / "eval" / f"step_{step:06d}.json").write_text("[[0, 1]]")
    with pytest.raises(SystemExit):
        gain.main([str(tmp_path)])
    assert f"{tmp_path}/eval has no two evaluations" in capsys.readouterr().err


def test_left_padding():
    ids, mask = peers.pad_left([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_counts_of_work():
    config = llm.TINY
    params = llm.random_params(config)
    matrices = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key not in ("scale", "bias")
    ]
    assert llm.weights(config) == sum(matrices)
    # Two steps of one row over three positions: the second step reads one more position.
    half = dataclasses.replace(config, dtype="bfloat16")
    assert llm.decode_bytes(half, rows=1, cached=3, steps=2) == 2 * (
        2 * llm.weights(config) + (3 + 5) * 6 * 2 * 32 * 2
    )


@pytest.mark.medium
def test_an_int8_cache_against_the_models():
    (row,) = caching.int8_cache(1, name="tiny", rows=2, cached=8, steps=4)
    assert row.ours > 0 and row.other > 0 and row.work == 8


@pytest.mark.medium
def test_trees_against_plain_rows(monkeypatch):
    monkeypatch.setattr(prefixes, "MODEL", TEN_MILLION)
    monkeypatch.setattr(prefixes, "CASES", {"a group": (prefixes.groups, (1, 4, 96, 16))})
    monkeypatch.setattr(prefixes, "TARGETS", {})
    (row,) = prefixes.shared_prefixes(1, layers=1)
    assert row.ours > 0 and row.other > 0
    assert float(re.search(r"difference (\S+)$", row.name)[1]) < 1e-4


def test_a_case_runs():
    (row,) = caching.group_prefill(2, turns=(1, 1), members=3)
    assert row.ours > 0 and row.other > 0 and row.ratio > 0 and row.work == 6


def test_kinds_of_layers_against_transformers():
    pytest.importorskip("torch")
    sizes = layer_kinds.Sizes(rows=1, length=8, cached=4, steps=2)
    decode, update = layer_kinds.layer_kinds(1, sizes, kinds=["mixture"])
    assert (decode.work, update.work) == (2, 8) and min(decode.ratio, update.ratio) > 0
    assert "torch, attention" in update.other_name and "experts" in update.other_name


@pytest.mark.parametrize("kind", layer_kinds.KINDS)
def test_models_of_transformers_have_the_same_parameters(kind):
    pytest.importorskip("torch")
    config = layer_kinds.shape_of(kind)
    ours = sum(x.size for x in jax.tree.leaves(llm.random_params(config)))
    for model in layer_kinds.torch_models(config).values():
        assert sum(x.numel() for x in model.parameters()) == ours


def test_replies_are_read_as_one_by_one():
    (row,) = reading.reading(1, replies=3, tokens=40)
    assert row.work == 120 and row.ours > 0 and row.ratio > 0


def test_saves_with_and_without_checksums(monkeypatch):
    written = []
    real = saving.checkpoint.write_checksums

    def write(folder):
        written.append(folder)
        real(folder)

    monkeypatch.setattr(saving.checkpoint, "write_checksums", write)
    rows = saving.saving(1, side=8, products=1)
    assert len(rows) == 3 and all(row.ours > 0 and row.ratio > 0 for row in rows)
    assert len(written) == 5  # one per pair: 3 pairs of full saves, 2 others


def test_searches_in_process():
    pytest.importorskip("bm25s")
    (row,) = searching.bm25(1, passages=200)
    assert row.work == 100 and row.ours > 0 and "200 passages" in row.name


def test_flat_search(monkeypatch):
    few = dict(rows=300, width=8, queries=(1, 33))
    one, many = searching.flat_search(1, **few)
    assert one.ours > 0 and many.work == 33 and many.flops == 2 * 33 * 300 * 8
    monkeypatch.setitem(sys.modules, "faiss", None)
    one, _ = searching.flat_search(1, **few)
    assert one.ours > 0 and one.other is None and "pip install faiss-cpu" in one.skipped


@pytest.mark.slow
def test_a_corpus_is_indexed_and_searched(capsys):
    pytest.importorskip("bm25s")
    corpus.main(["--passages=60"])
    assert re.match(r"60 passages, .* peak memory \d.*\nopened in ", capsys.readouterr().out)


@pytest.mark.slow
def test_shared_prompts_against_pairs():
    (row,) = scoring.scoring(1, sizes=((2, 3, 40, 8, 4),))
    assert row.ours > 0 and row.other > 0 and row.target == 4 and "MB a call" in row.name


def test_scoring_memory_stops_growing_with_prompts_and_reasonings():
    sizes = dict(N=8, M=16, P=64, Z=16)
    least = scoring.call_memory(**sizes)
    assert scoring.call_memory(**sizes | {"N": 64, "M": 256}) == least


def test_growth_is_fitted_by_tokens_and_pairs():
    rates = np.array([2e-6, 3e-9])
    sizes = [dict(N=8, M=16, P=p, Z=z) for p in (32, 512) for z in (16, 128)]
    points = [("P", one, rates @ scoring.counts(**one), 0) for one in sizes]
    np.testing.assert_allclose(scoring.fit_rates(points), rates, rtol=1e-9)
    assert scoring.counts(N=2, M=3, P=5, Z=4) == (10 + 24, 50 + 24 * 9)


@pytest.mark.slow
def test_growth_is_drawn(tmp_path):
    varied = {"M": (16, 32), "N": (8,), "P": (32,), "Z": (16,)}
    points = scoring.growth(1, base={"M": 16, "N": 8, "P": 32, "Z": 16}, varied_sizes=varied)
    assert [(name, sizes[name]) for name, sizes, _, _ in points] == [
        *(("M", 16), ("M", 32), ("N", 8), ("P", 32), ("Z", 16))
    ]
    pytest.importorskip("matplotlib")
    scoring.draw(points, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(measure, "limits", lambda dtype: dataclasses.replace(BEFORE, dtype=dtype))
    monkeypatch.setattr(command, "keep_freed_memory", lambda one_arena: None)

    command.main([])
    listing = capsys.readouterr().out
    assert all(name in listing for name in command.CASES)

    for words in (["nothing"], ["saving", "--repeats=0"]):
        with pytest.raises(SystemExit) as error:
            command.main(words)
        assert error.value.code == 2
    assert "--repeats must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_an_update_at_length_counts_the_models_own_operations(monkeypatch, capsys):
    monkeypatch.setattr(measure, "limits", lambda dtype: dataclasses.replace(BEFORE, dtype=dtype))
    monkeypatch.setattr(lengths, "LENGTHS", {"tiny": (32, 64)})
    monkeypatch.setattr(lengths, "keep_freed_memory", lambda one_arena: None)
    command.main(["train-length", "--tokens=64", "--repeats=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == [
        "tiny update: 2 x 32 tokens",
        "tiny update: 1 x 64 tokens",
    ]
    for row, T in zip(found["rows"], (32, 64), strict=True):
        assert row["flops"] == 6 * 64 * (llm.weights(llm.TINY) + 6 * 4 * 32 * T)
        assert row["product_share"] == pytest.approx(row["flops"] / row["ours"] / BEFORE.product)


@pytest.mark.parametrize("words", [["--tokens=0"], ["--shape=huge"], ["--topology=v9:1"]])
def test_what_cannot_be_planned_is_refused_in_a_line(words, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["train-length", *words])
    assert error.value.code == 2
    assert words[0].partition("=")[2] in capsys.readouterr().err.splitlines()[-1]


# ---- the alarm's error rates --------------------------------------------------------------------


@pytest.mark.parametrize("scene", alarm.SCENES[:2])
def test_simulated_steps_have_the_figures_of_a_run_in_both_scopes(scene):
    row = alarm.draw_step(np.random.default_rng(0), scene, 8.0)
    weak = alarm.draw_step(np.random.default_rng(0), scene, 0.5)
    for scope, prompts in zip(
        alarm.SCOPES, (scene.rooms, scene.rooms * scene.members), strict=True
    ):
        assert row[f"{scope}/mi_upper_bound"] == pytest.approx(np.log(prompts))
        assert row[f"{scope}/own_margin"] > 5 * weak[f"{scope}/own_margin"] > 0
        assert row[f"{scope}/own_margin_log_ci95"] > 0 and row[f"{scope}/retrieval_acc"] > 0.3


def test_neutral_tokens_are_as_likely_under_every_prompt(monkeypatch):
    scene, found = alarm.SCENES[0], []
    for neutral in (0.0, 4.0):
        monkeypatch.setattr(alarm, "NEUTRAL", neutral)
        rng = np.random.default_rng(0)
        logits_NV = np.random.default_rng(1).normal(size=(scene.rooms, alarm.VOCABULARY))
        score_MN, length_M = alarm._scores(rng, logits_NV, np.arange(scene.rooms))
        found.append((score_MN - score_MN[:, :1], length_M))
    assert np.allclose(found[0][0], found[1][0])
    assert found[1][1].mean() == pytest.approx(5 * found[0][1].mean(), rel=0.2)


@pytest.mark.slow
def test_a_bank_has_the_scenes_information_at_multiples_of_it(monkeypatch):
    monkeypatch.setattr(alarm, "CALIBRATION", 200)
    scene = alarm.SCENES[0]
    strength = alarm.find_strength(scene, 0.55)
    bank = alarm.make_bank(scene, strength, 40)
    assert bank.retrieval == pytest.approx(0.55, abs=0.02)
    margin_L = [steps[f"{alarm.SCOPES[0]}/own_margin"].mean() for steps in bank.steps_L]
    here = np.interp(0.0, np.log(alarm.GRID_L), margin_L)
    assert np.array(margin_L[2:]) == pytest.approx(alarm.GRID_L[2:] * here, rel=0.3)
    # Where the information is half, so is mi_seq, at less than half the margin: it saturates near
    # its ceiling.
    assert 0.25 < bank.half_mi < 0.5


def test_wandering_and_heavy_tails_are_of_the_size_that_is_said():
    rng = np.random.default_rng(0)
    wander_RT = np.log(alarm.wander(rng, 400, 0.15))
    assert wander_RT.std() == pytest.approx(0.15, rel=0.05)
    neighbours = np.corrcoef(wander_RT[:, :-1].ravel(), wander_RT[:, 1:].ravel())[0, 1]
    assert neighbours == pytest.approx(0.9, abs=0.02)
    assert np.median(alarm.heavy_tails(rng, 400)) == pytest.approx(1, abs=0.01)


def steady_bank(scale=1.0):
    """Return a `Bank` with one step per level, whose margins are the levels."""
    steps_L = []
    for level in alarm.GRID_L:
        row = {}
        for scope in alarm.SCOPES:
            row |= {f"{scope}/own_margin": scale * level, f"{scope}/own_margin_ci95": 0.01 * scale}
            row |= {f"{scope}/mi_upper_bound": np.log(8)}
        steps_L.append({name: np.array([x]) for name, x in row.items()})
    return alarm.Bank(1.0, steps_L, 0.3, 0.9)


@pytest.mark.slow
def test_runs_are_watched_separately_and_rates_are_of_them(monkeypatch):
    bank, rng = steady_bank(20.0), np.random.default_rng(0)
    multiple_RT = np.ones((3, 60))
    multiple_RT[1, 40:] = 0.25
    on_RT = alarm.alarms(rng, lambda t: bank, multiple_RT, np.ones((3, 60)))
    assert not on_RT[[0, 2]].any() and not on_RT[1, :40].any() and on_RT[1, 59]
    seen = alarm.seen_rates(3, bank, lengths=(1.0, 0.25))
    assert set(seen.values()) == {1.0} and len(seen) == 6
    monkeypatch.setattr(alarm, "STEPS", 60)
    quiet = alarm.healthy_rates(
        3, bank, {"steady": alarm.Process(), "5 times": alarm.Process(length=5.0)}
    )
    assert quiet == {"steady": 0.0, "5 times": 0.0}
    halved = alarm.Process(lambda rng, runs: np.repeat([[1.0] * 30 + [0.3] * 30], runs, axis=0))
    assert alarm.healthy_rates(3, bank, {"falls": halved}) == {"falls": 1.0}


@pytest.mark.slow
def test_the_alarm_command(monkeypatch, capsys):
    small = dict(CALIBRATION=10, BANK=10, SCENES=alarm.SCENES[:1], RETRIEVALS=(0.55,))
    small |= dict(STEPS=30, FALL_STEP=20, GRID_L=alarm.GRID_L[::5])
    for name, value in small.items():
        monkeypatch.setattr(alarm, name, value)
    command.main(["alarm", "--repeats=3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["case"] == "alarm" and found["runs"] == 3
    first, *changes = found["rows"]
    sparse = {f"{name}, every 5" for name in alarm.HEALTHY}
    assert set(first["false"]) == set(alarm.HEALTHY) | sparse and len(changes) == 3
    assert all(0 <= x <= 1 for row in found["rows"] for x in row["false"].values())
    text = alarm.as_table(found)
    assert "half of mi_seq, every 5" in text and "24 prompts, then 8" in text


# ---- the largest fraction of falls that an alarm can detect -------------------------------------


@pytest.mark.slow
def test_the_power_of_likelihood_ratios_is_the_closed_form_of_normal_looks(monkeypatch):
    """Looks are N(0, 1) before and N(-shift, 1) after a fall; densities are estimated or known."""
    rng, shift, looks = np.random.default_rng(0), 1.2, alarm_bound.LOOKS
    before, after = rng.normal(size=40_000), rng.normal(size=40_000) - shift
    densities = [alarm_bound.log_density(x[:3000, None]) for x in (before, after)]
    for level in (0.05, alarm_bound.LEVEL):
        expected = alarm_bound.gaussian_power(shift * np.sqrt(looks), level)
        # Phi(2.939 - 1.645) and Phi(2.939 - 2.648).
        assert expected == pytest.approx(0.902 if level == 0.05 else 0.614, abs=0.003)
        for known, tolerance in ((True, 0.02), (False, 0.03)):
            sums = []
            for x in (before[3000:], after[3000:]):
                log_0, log_1 = -(x**2) / 2, -((x + shift) ** 2) / 2
                if not known:
                    log_0, log_1 = (density(x[:5000, None]) for density in densities)
                sums.append(alarm_bound.sum_looks(rng, log_1 - log_0, looks))
            found = alarm_bound.likelihood_ratio_power(*sums, level)
            assert found == pytest.approx(expected, abs=tolerance)


def test_the_levels_of_the_bound():
    assert (alarm_bound.LOOKS, alarm_bound.WINDOWS, alarm_bound.LOOKS_BEFORE) == (6, 13, 20)
    assert alarm_bound.LEVEL == pytest.approx(0.05 / 13 / 0.95)
    assert alarm_bound.SINGLE_LEVEL == pytest.approx(0.05 / 0.95)


@pytest.mark.slow
def test_margins_drawn_at_once_are_those_of_simulated_steps():
    scene = alarm.Scene(4, 3, 0.7)
    x_BG2 = alarm_bound.draw_margins(np.random.default_rng(0), scene, 0.8, 1150)
    assert x_BG2.shape == (1150, 4, 2)
    steps = alarm.draw_steps(1, scene, 0.8, 400)
    quantile = alarm_bound.t_quantile(4) / 2
    for i, scope in enumerate(alarm.SCOPES):
        expected = steps[f"{scope}/own_margin_log"]
        found = x_BG2[..., i].mean(axis=1)
        assert found.mean() == pytest.approx(expected.mean(), abs=0.08)
        assert found.std() == pytest.approx(expected.std(), rel=0.15)
        half = quantile * x_BG2[..., i].std(axis=1, ddof=1).mean()
        assert half == pytest.approx(steps[f"{scope}/own_margin_log_ci95"].mean(), rel=0.1)


def test_the_bound_command(monkeypatch, capsys):
    small = dict(DENSITY=60, SAMPLES=60, SUMS=500)
    small |= dict(CASES=((alarm.Scene(4, 2, 0.7), (0.6,)),))
    for name, value in small.items():
        monkeypatch.setattr(alarm_bound, name, value)
    monkeypatch.setattr(alarm, "CALIBRATION", 10)
    command.main(["alarm-bound", "--repeats=20", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["case"] == "alarm-bound" and found["runs"] == 20
    assert [row["half of"] for row in found["rows"]] == ["mi_seq", "own_margin"]
    for row in found["rows"]:
        assert all(0 <= row[name] <= 1 for name in alarm_bound.BOUNDS)
        assert row["figure"] <= row["once"]
    assert found["rows"][0]["strengths"] > found["rows"][1]["strengths"]  # the larger fall
    assert "13 windows" in alarm_bound.as_table(found)


def test_faults_are_tried_in_turn_each_kind_before_one_comes_again(monkeypatch, tmp_path):
    clock, kinds = itertools.count(), list(KINDS)[:3]
    monkeypatch.setattr(chaos.loop.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(chaos.loop, "attempt", lambda kind, *_: "lost" if kind == kinds[1] else "")
    trials = list(chaos.loop.run_trials(kinds, 0, 40, 1, tmp_path))
    assert len(trials) >= 6 and [one["number"] for one in trials] == list(range(len(trials)))
    for start in (0, 3):
        assert {trial["kind"] for trial in trials[start : start + 3]} == set(kinds)
    assert all(bool(trial["wrong"]) == (trial["kind"] == kinds[1]) for trial in trials)
    lost = sum(trial["kind"] == kinds[1] for trial in trials)
    assert f"| {kinds[1]} | {lost} | 0 |" in chaos.loop.as_table(trials)


def test_kinds_can_be_named_on_the_command_line(capsys):
    assert len(KINDS) > 90 and not any("," in name for name in KINDS)
    assert {kind.setup for kind in KINDS.values()} == set(SETUPS) and list(SETUPS)[0] == "plain"
    with pytest.raises(SystemExit) as left:
        command.main(["chaos", "--kinds=SIGTERM,no such fault"])
    assert left.value.code == 2 and "no such kind: no such fault;" in capsys.readouterr().err


def test_a_twin_that_fails_costs_the_kinds_of_its_setup_alone(monkeypatch, tmp_path, capsys):
    def run_twin(name, root):
        if name == "searching":
            raise Failure("exit code 1")

    monkeypatch.setattr(chaos.loop, "run_twin", run_twin)
    monkeypatch.setattr(chaos.loop, "attempt", lambda *_: "")
    words = [
        "chaos",
        "--minutes=0",
        "--at-a-time=1",
        "--kinds=a retriever fails now and then,SIGTERM",
    ]
    with pytest.raises(SystemExit) as left:
        command.main(words)
    printed = capsys.readouterr().out
    assert left.value.code == 1 and "| all 1 kinds | 1 | 1 |" in printed
    assert "the twin of the setup searching: WRONG: exit code 1" in printed


@pytest.fixture
def trial(tmp_path):
    """Return a trial whose run and twin have the same rows, evaluations and model."""
    for folder in (tmp_path / "run", tmp_path / "twin"):
        (folder / "eval").mkdir(parents=True)
        (folder / "policy").mkdir()
        (folder / "policy/model.safetensors").touch()
        rows = [{"step": step, "loss": 0.5, "time/step": hash(folder)} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval/step_000000.json").write_text("[[7, 1], [8, 0]]")
    return Trial(tmp_path, tmp_path / "twin", np.random.default_rng(0))


@pytest.mark.parametrize(
    "path, old, new, wrong",
    [
        (
            "metrics.jsonl",
            '"step": 1, "loss": 0.5',
            '"step": 1, "loss": 0.25',
            r"\(1, \['loss'\]\)",
        ),
        ("metrics.jsonl", '{"step": 2', '{"step": 3', r"\(3, \['step'\]\)"),
        ("eval/step_000000.json", "[8, 0]", "[8, 1]", "evaluations differ"),
        ("policy/model.safetensors", None, None, "was not exported"),
    ],
)
def test_a_trial_is_compared_with_its_twin(trial, path, old, new, wrong):
    trial.compare()
    file = trial.run / path
    if old is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace(old, new))
    with pytest.raises(Failure, match=wrong):
        trial.compare()


@pytest.mark.parametrize(
    "printed, code, wrong",
    [
        ("error: x cannot be written", 4, ""),
        ("error: x cannot be written", 1, "exit code 1, not"),
        ("error: y", 4, "did not print 'x'"),
        ("Traceback (most recent call last): x", 4, "a traceback"),
    ],
)
def test_how_a_process_may_end(trial, printed, code, wrong):
    (trial.folder / "output0").write_text(printed)
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    if not wrong:
        assert trial.expect_end(process, 0, 4, says="x") == 4
        return
    with pytest.raises(Failure, match=wrong):
        trial.expect_end(process, 0, 4, says="x")


@pytest.mark.parametrize("wrong", ["", *servers.QUICK_FAILURES, "drips", "hangs"])
def test_a_spoiled_answer_is_none(tmp_path, wrong):
    trial = Trial(tmp_path, tmp_path, np.random.default_rng(0), servers.SETUP)
    query = ["Where does Berta 17 live?"]
    with servers.serve(trial, lambda body, before: wrong if before == 0 else "") as server:
        url = str(trial.fields["env.options.url"])
        found = [
            RemoteRetriever(url, protocol="ragen", time_limit=1.0, tries=tries, seed=0)
            for tries in (1, 2)
        ]
        if wrong:
            with pytest.raises(ConnectionError, match="no usable answer in 1 tries"):
                found[0].search(query, 2)
        expected = open_bm25(str(trial.code / "corpus.json")).search(query, 2)
        assert found[1].search(query, 2) == expected and expected[0][0].text.startswith("Berta 17")
    assert server.answers[wrong] >= 1 and "env.options.corpus" not in trial.setup.fields


def test_errors_of_environments_are_what_they_are_called():
    names = environments.TEXT_ERRORS + environments.ODD_ERRORS + environments.TEXTLESS_ERRORS
    space = {}
    exec(environments.ERRORS, space)
    assert set(space["MAKE"]) == {*names, "plain", "chinese"}
    for name, make in space["MAKE"].items():
        error = make()
        assert isinstance(error, BaseException), name
        assert isinstance(error, Exception) == (name not in environments.ODD_ERRORS), name
    for text in (
        environments.BREAKING_CODE,
        environments.GRADING_CODE,
        environments.HOSTILE,
        clocks.SITE,
    ):
        compile(text, "text", "exec")


@pytest.mark.parametrize(
    "found, expected",
    [
        ({"code": 2, "output": "error: no such thing\n"}, ""),
        ({"code": None, "output": "step 1/1\n"}, ""),  # still running
        ({"code": 2, "output": ""}, "exit code 2 without a message"),
        ({"code": 1, "output": "oh"}, "exit code 1"),
        ({"code": -11, "output": "oh"}, "exit code -11"),
        ({"code": 0, "output": "Traceback (most recent call last):\n"}, "a traceback"),
        ({"code": 0, "output": "done", "gap": 15.0}, "15 s of silence"),
    ],
)
def test_what_an_odd_input_may_not_lead_to(found, expected):
    assert odd.find_error({"gap": 1.0} | found) == expected


@pytest.mark.slow
def test_odd_inputs_are_of_every_field_and_of_files_that_are_read(tmp_path):
    rng = np.random.default_rng(0)
    fields = odd.settings(rng)
    named = {word.split("=")[0] for line in fields for word in line if word.startswith("--config.")}
    assert {"--config.seed", "--config.optimizer.b1", "--config.stopping.variance.action"} <= named
    assert {line[0] for line in odd.words(rng)} == set(odd.PATHS) | set(odd.NUMBERS)
    run, model, rollouts = tmp_path / "run", tmp_path / "model", tmp_path / "rollouts"
    for folder, name in ((run, "metrics.jsonl"), (model, "config.json")):
        folder.mkdir()
        (folder / name).write_text('{"step": 0}\n')
    damaged = odd.damages(rng, run, model, rollouts)
    assert {path.name for _, path, *_ in damaged} == {"metrics.jsonl", "config.json", "rollouts"}
    cut = next(content for _, path, how, content in damaged if how == "cut")
    assert cut(b"12345678") == b"1234"
