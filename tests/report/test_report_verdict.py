"""The verdict on simulated runs with a known cause; the suggested remedies are quoted from docs."""

import json
import shutil
from pathlib import Path

import pytest
from simulated_runs import write_run

from ragen_jax.configs import mixture
from ragen_jax.report import page, sentences
from ragen_jax.report.causes import CAUSES
from ragen_jax.report.episodes import Truncation
from ragen_jax.report.runs import read_run
from ragen_jax.report.verdict import find_gain, judge, success_lost
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.fast
MI = {
    "collapse/first_turn/own_margin": (30, 0.2, 15),
    "collapse/trajectory/own_margin": (30, 0.2, 15),
}


def verdict(folder, truncated=None):
    return judge(read_run(folder), "", truncated or {})


def named(folder, **settings):
    """(first move, names of the causes) of a simulated run."""
    truncated = settings.pop("truncated", None)
    found = verdict(write_run(folder, **settings), truncated)
    first = found.moves[0].what if found.moves else None
    return first, [cause.name for cause, *_ in found.causes]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_a_gain_and_no_word_of_an_alarm(tmp_path, seed):
    found = verdict(write_run(tmp_path / "run", seed=seed))
    assert not found.trouble and found.alarm == [] and found.moves == [] and found.causes == []
    text = sentences.headline(found)
    assert "rose by" in text and text.endswith("There was no alarm.")
    html = sentences.top([read_run(tmp_path / "run")], [[found]], [[0]])
    assert "template" not in html and "What to do" not in html and 'class="verdict well"' in html


@pytest.mark.medium
def test_rows_of_before_the_margin_are_said_to_be_unwatched(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = read_metrics(folder / "metrics.jsonl")
    watched = [row | {"collapse/first_turn/mi_seq": 1.0} for row in rows]
    before = [{k: x for k, x in row.items() if "own_margin" not in k} for row in watched]
    for kept, unwatched in ((watched, False), (before, True)):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        found = verdict(folder)
        assert found.unwatched == unwatched
        assert ("did not watch information" in sentences.headline(found)) == unwatched


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
def test_information_that_falls_while_replies_stay_valid_is_a_template(tmp_path, seed):
    rising = {"collapse/first_turn/h_cond": (60, 3.0, 20), "reasoning/grounded_rate": (70, 0.4, 9)}
    found = verdict(write_run(tmp_path / "run", changes=MI | rising, success=(0.4, 0.4), seed=seed))
    assert found.moves[0].what == "information" and found.moves[0].direction == "fell"
    assert found.causes[0][0].name == "template"
    assert 30 < found.causes[0][1] < 50 and 30 < found.alarm[0][0] < 50
    assert found.alarm[-1][1] == 100  # until the last step
    assert [move.step for move in found.moves] == sorted(move.step for move in found.moves)
    assert {"entropy of the reasoning", "truth of the reasoning"} <= {m.what for m in found.moves}
    assert "Cause: template" in sentences.headline(found)
    # The few facts in a template are not separate evidence.
    assert [cause.name for cause, *_ in found.causes] == ["template"]


@pytest.mark.medium
def test_information_that_falls_with_entropy_is_low_entropy_collapse(tmp_path):
    changes = MI | {"collapse/first_turn/h_cond": (20, 0.1, 10)}
    _, causes = named(tmp_path / "run", changes=changes)
    assert causes[0] == "low-entropy collapse" and "template" not in causes


def test_truth_that_falls_first_is_untrue_reasoning(tmp_path):
    changes = {"reasoning/grounded_rate": (20, 0.3, 20)} | {
        name: (70, *rest) for name, (_, *rest) in MI.items()
    }
    first, causes = named(tmp_path / "run", changes=changes, success=(0.4, 0.2))
    assert first == "truth of the reasoning" and causes[0] == "false statements in the reasoning"


@pytest.mark.medium
def test_replies_that_are_not_valid_are_format_unless_they_were_cut_off(tmp_path):
    changes = {"rollout/valid_rate": (30, 0.5, 10), "rollout/valid_think_rate": (30, 0.5, 10)}
    roomy = {"rollout.max_new_tokens": 100}
    first, causes = named(tmp_path / "a", changes=changes, fields=roomy)
    assert first in ("valid actions", "valid reasoning") and causes == ["format"]
    cut = {40: Truncation(share=0.4, of_invalid=0.9)}
    assert named(tmp_path / "b", changes=changes, truncated=cut)[1] == ["truncation"]
    few = {40: Truncation(share=0.05, of_invalid=0.2)}
    assert named(tmp_path / "c", changes=changes, truncated=few)[1] == ["format"]


def test_causes_leave_out_what_the_rows_lack(tmp_path):
    """Rollouts of other trainers often have no valid_rate."""
    without = {"rollout/valid_rate": None}
    found = verdict(write_run(tmp_path / "a", changes=MI, levels=without))
    _, _, figures = found.causes[0]
    assert "closed reasoning 0." in figures and "nan" not in sentences.headline(found) + figures
    changes = {"rollout/valid_think_rate": (30, 0.5, 10), "rollout/response_length": (30, 2.0, 10)}
    roomy = {"rollout.max_new_tokens": 100}
    run = write_run(tmp_path / "b", changes=changes, levels=without, fields=roomy)
    cause, _, figures = verdict(run).causes[0]
    assert cause.name == "format"
    assert figures.startswith("closed reasoning 0.") and "nan" not in figures


@pytest.mark.parametrize("steps, mean", [(20, ""), (40, "two"), (60, "three"), (80, "three")])
def test_a_gain_has_the_same_digits_everywhere(tmp_path, steps, mean):
    found = verdict(write_run(tmp_path / "run", steps=steps, success=(0.385, 0.416)))
    ends = f"{found.gain.first:.3f} to {found.gain.last:.3f}"
    assert f"from {ends}, ±" in sentences.headline(found)
    run = read_run(tmp_path / "run")
    html = sentences.top([run], [[found]], [[0]])
    assert f"<span>{ends}{f', mean of the last {mean}' * bool(mean)}</span>" in html
    html = sentences.top([run, run], [[found], [found]], [[0], [1]])
    assert f"<td>{ends}</td>" in html


def test_a_gain_needs_a_problem_with_two_evaluations():
    nan = float("nan")
    assert find_gain([[1.0, nan]]) is None and find_gain([[1.0, nan], [nan, 0.0]]) is None
    assert find_gain([[0.0, nan], [1.0, 0.0]]).change == 1.0


def test_a_mean_of_two_seeds_that_differ_has_no_interval(tmp_path):
    runs = []
    for seed, last in ((0, 0.1), (1, 0.9)):
        folder = write_run(tmp_path / f"seed-{seed}", steps=20, seed=seed, success=(0.5, last))
        runs.append(read_run(folder))
    html = sentences.top(runs, [[judge(run, "", {})] for run in runs], [[0, 1]])
    assert "over 2 seeds (too few seeds for an interval)" in html
    html = sentences.top(runs[:1] * 2, [[judge(runs[0], "", {})]] * 2, [[0, 1]])
    assert "over 2 seeds (95 % CI, Student's t)" in html


@pytest.mark.medium
def test_long_replies_alone_are_no_truncation(tmp_path):
    long = {"rollout.max_new_tokens": 20}  # replies have 19.8 tokens
    assert named(tmp_path / "a", fields=long)[1] == []
    changes = {"rollout/valid_think_rate": (30, 0.5, 10)}
    assert "truncation" in named(tmp_path / "b", fields=long, changes=changes)[1]


def test_groups_without_variance(tmp_path):
    changes = {"filter/zero_groups": (40, 40.0, 5)}
    assert named(tmp_path / "run", changes=changes, success=(0.4, 0.4))[1] == [
        "groups without variance"
    ]


@pytest.mark.medium
def test_a_gap_of_sampler_and_trainer_is_a_mismatch_by_the_dtype(tmp_path):
    changes = {"rollout/logp_gap": (40, 500.0, 1)}  # up to 4e-3
    name = "sampler/trainer mismatch"
    assert named(tmp_path / "a", changes=changes)[1] == [name]
    half = {"model.dtype": "bfloat16"}
    assert named(tmp_path / "b", changes=changes, fields=half)[1] == [name]
    # A gap that is negligible in float32 can be a notable rise in bfloat16.
    some = {"rollout/logp_gap": (40, 50.0, 1)}  # up to 4e-4
    assert named(tmp_path / "e", changes=some)[1] == []
    assert named(tmp_path / "f", changes=some, fields=half)[1] == [name]
    # A sevenfold gap is rounding in both.
    less = {"rollout/logp_gap": (40, 7.0, 1)}
    assert named(tmp_path / "c", changes=less)[1] == []
    assert named(tmp_path / "d", changes=less, fields=half)[1] == []


@pytest.mark.medium
def test_a_sampler_that_was_another_policy_is_no_mismatch(tmp_path):
    changes = {"rollout/logp_gap": (2, 500.0, 1)}
    assert named(tmp_path / "run", changes=changes, fields={"rollout.ahead": 1})[1] == []


@pytest.mark.medium
def test_success_is_lost_below_three_quarters_of_its_highest(tmp_path):
    assert success_lost({0: 0.4, 20: 0.6, 40: 0.5, 60: 0.4, 80: 0.3}) == (
        80,
        pytest.approx(0.35 / 0.55),
    )
    assert success_lost({0: 0.4, 20: 0.5, 40: 0.45, 60: 0.4}) is None
    found = verdict(write_run(tmp_path / "run", success=(0.5, 0.1)))
    assert found.trouble and found.lost and found.moves[0].what == "held-out success"
    assert "None of the named causes holds" in sentences.headline(found)


@pytest.mark.medium
def test_a_rule_that_stopped_the_run_is_said_with_its_reason(tmp_path):
    folder = write_run(tmp_path / "run")
    event = {"step": 100, "rule": "empty", "action": "stop", "reason": "the filter kept no <group>"}
    later = event | {"step": 101}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(later) + "\n")
    run = read_run(folder)
    assert run.events == [event]  # the run has no row of the other event's step
    found = judge(run, "", {})
    assert found.trouble and "step 100: the filter kept no <group>" in sentences.headline(found)
    html = sentences.top([run], [[found]], [[0]])
    assert "&lt;group&gt;" in html and "<group>" not in html


def test_cures_are_quoted_from_the_documentation():
    docs = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text()
    words = " ".join(docs.split())
    for cause in CAUSES:
        assert cause.cure in words, cause.name
        assert f"## `{cause.section}`" in docs, cause.name


@pytest.mark.medium
def test_each_environment_is_judged_by_itself(tmp_path):
    """Two environments trained together; one loses its information."""
    well, ill = write_run(tmp_path / "well"), write_run(tmp_path / "ill", changes=MI, seed=1)
    whole = tmp_path / "whole"
    whole.mkdir()
    parts = {"sokoban": well, "countdown": ill}
    config = mixture.get_config().to_dict()
    config["also"] = {"countdown": config["also"]["countdown"]}
    (whole / "config.json").write_text(json.dumps(config))
    rows = zip(*(read_metrics(folder / "metrics.jsonl") for folder in parts.values()), strict=True)
    lines = []
    for pair in rows:
        row = dict(pair[0])
        for label, figures in zip(parts, pair, strict=True):
            row |= {k.replace("/", f"/{label}/", 1): v for k, v in figures.items() if "/" in k}
        lines.append(json.dumps(row) + "\n")
    (whole / "metrics.jsonl").write_text("".join(lines))
    for label, folder in parts.items():
        shutil.copytree(folder / "eval", whole / "eval" / label)
    run = read_run(whole)
    assert run.labels == ("sokoban", "countdown")
    one, other = (judge(run, label, {}) for label in run.labels)
    assert not one.trouble and other.trouble and other.causes[0][0].name == "template"
    assert (one.alarm, other.alarm) == ([], verdict(ill).alarm)
    html = page.render_page([page.read_contents(whole)])
    assert "<h3>sokoban</h3>" in html and "<h3>countdown</h3>" in html
    data = html.split('id="data">')[1].split("</script>")[0]
    (shown,) = json.loads(data)["runs"]
    assert "collapse/countdown/first_turn/own_margin" in shown["bands"]
    assert shown["alarm"] == {"sokoban": [], "countdown": [list(x) for x in other.alarm]}


def saved_turn(reply, *, valid=False, end="closed"):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    fields = {"actions": [], "valid": valid, "reward": 0.0, "messages": messages, "end": end}
    return fields | {"prompt_ids": [1], "sampled_ids": [2]}


def test_the_card_shows_why_replies_are_invalid_with_an_example(tmp_path):
    hostile = "<think>a</think><answer>Up</answer> and <script>alert(1)</script>"
    replies = [hostile, hostile, "<think>never closed", "<think>b</think>Up"]
    turns = [saved_turn(reply) for reply in replies]
    turns += [saved_turn("<think>c", end="truncated"), saved_turn("fine", valid=True)]
    record = {"seed": 1, "group": 0, "member": 0, "success": False, "kept": True}
    records = [record | {"turns": [turn]} for turn in turns]
    folder = write_run(tmp_path / "a", steps=40, episodes=[(20, records), (40, records)])
    text = page.write_report([folder]).read_text()
    assert (
        "At step 40, 5 of 6 saved replies are not valid: 2 with text after &lt;/answer&gt;, "
        "1 with unclosed reasoning, 1 without an answer, 1 cut off at rollout.max_new_tokens; for "
        "example: &lt;think&gt;a&lt;/think&gt;&lt;answer&gt;Up&lt;/answer&gt; and &lt;script&gt;"
    ) in text
    most = [record | {"turns": [saved_turn("fine", valid=True)]}] * 6 + records
    folder = write_run(tmp_path / "b", steps=40, episodes=[(40, most)])
    assert "saved replies are not valid" not in page.write_report([folder]).read_text()
