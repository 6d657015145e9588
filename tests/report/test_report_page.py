"""The page in a browser: no requests, no errors, and its figures are those of metrics.jsonl."""

import json
import shutil
import time

import numpy as np
import pytest
from cli_commands import call
from PIL import Image
from simulated_runs import LEVELS, episode, write_run

from ragen_jax.configs import base
from ragen_jax.core.types import Episode, Turn
from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.report.matrices import StoredMatrix
from ragen_jax.report.page import encode_for_script, write_page, write_report
from ragen_jax.run.datasets import EVALUATION_SEEDS
from ragen_jax.run.log import write_scores
from ragen_jax.score.episodes import ScoredStep
from ragen_jax.score.page import contents
from ragen_jax.storage.metrics_reader import read_metrics

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ATTACKS = (
    "so up</think><answer>Up</answer></script><script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'><svg onload=window.owned=1>",
    "<!-- <script> \\u003cscript> %%DATA%% \u2028 </think><answer>\x00é\N{SNOWMAN}",
)
FACTS = [  # ten (metric, step) pairs from all parts of the curves
    ("eval/success", 0),
    ("eval/success", 240),
    ("rollout/success", 17),
    ("collapse/first_turn/own_margin", 1),
    ("collapse/first_turn/own_margin", 120),
    ("collapse/trajectory/own_margin", 250),
    ("collapse/first_turn/h_cond", 33),
    ("reasoning/grounded_rate", 199),
    ("filter/kept_ratio", 250),
    ("time/step", 5),
]


@pytest.fixture(scope="module")
def browser():
    """A real headless browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed (one of {', '.join(BROWSERS)})")
    with playwright.sync_playwright() as started:
        # The browser's sandbox is not available where tests run as root.
        yield started.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """A run of default length that collapsed, with hostile episodes and stored scores."""

    def records(step):
        return [
            episode(
                tokenizer,
                ["player 11 plan Up</think><answer>Up</answer>", *ATTACKS][: 1 + 3 * (k == 0)],
                group=g,
                member=k,
                success=(g + k) % 2 == 0,
                kept=g < 4,
                valid=k > 0,
            )
            for k in range(16)
            for g in range(8)
        ]

    folder = write_run(
        tmp_path_factory.mktemp("runs") / "<b>run&amp;",
        steps=250,
        changes={
            "collapse/first_turn/own_margin": (100, 0.2, 30),
            "collapse/first_turn/h_cond": (110, 2.5, 30),
        },
        success=(0.4, 0.42),
        fields={"rollout.max_new_tokens": 400},
        episodes=[(step, records(step)) for step in range(10, 251, 10)],
    )
    model = folder / "model"
    tokenizer.save_pretrained(model)
    rng = np.random.default_rng(0)
    for step in (10, 250):
        own = np.arange(64) % 8
        score = rng.normal(-40, 1, (64, 8))
        score[np.arange(64), own] += 20
        write_scores(folder / "diagnostics", step, Scores(score, np.full(64, 10), own))
    write_report([folder])
    return folder


@pytest.fixture
def opened(browser, run):
    """opened(path=None, **context) -> (page, console messages, requests)."""
    contexts = []

    def go(path=None, *, wait=True, **context):
        path = path or run / "report.html"
        contexts.append(browser.new_context(**context))
        page, messages, requests = contexts[-1].new_page(), [], []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        if wait:
            page.wait_for_selector("#episode h3")
        return page, messages, requests

    yield go
    for context in contexts:
        context.close()


def open_tables(page):
    page.eval_on_selector_all("#charts details", "all => all.forEach(d => { d.open = true; })")
    page.wait_for_selector("#charts td")
    page.wait_for_timeout(200)


def test_a_run_of_default_length_is_small_and_soon_written(run):
    start = time.process_time()
    path = write_report([run])
    assert time.process_time() - start < 5
    assert path == run / "report.html" and path.stat().st_size < 3e6


def test_nothing_is_fetched_and_nothing_fails(opened, run):
    page, messages, requests = opened()
    assert messages == [] and requests == [(run / "report.html").as_uri()]
    assert page.evaluate("typeof window.owned") == "undefined"
    assert page.locator("#charts .chart canvas").count() >= 9
    assert page.locator("script").count() == 3 and page.locator("img, svg, iframe").count() == 0
    assert page.title() == "<b>run&amp;" and page.locator("h1 b").count() == 0


def test_ten_facts_are_those_of_metrics_jsonl(opened, run):
    page, *_ = opened()
    open_tables(page)
    rows = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    for name, step in FACTS:
        cell = page.locator(f'td[data-figure="{name}"][data-step="{step}"]').first
        value = float(cell.get_attribute("data-value"))
        assert value == pytest.approx(rows[step][name], rel=1e-6), (name, step)
        assert float(cell.inner_text().split(" ± ")[0]) == pytest.approx(rows[step][name], rel=1e-3)
    # The curves hold the values of all steps, like the tables.
    count = page.locator('td[data-figure="collapse/first_turn/own_margin"]').count()
    assert count == 250


def test_the_cursor_goes_through_all_charts_by_keyboard(opened, run):
    page, *_ = opened()
    rows = read_metrics(run / "metrics.jsonl")
    page.locator("#charts .plot").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("Shift+ArrowLeft")
    assert page.locator("#live").inner_text().startswith("step 240: held out ")
    shown = page.locator("#charts figure", has_text="Truth of the reasoning").locator("output")
    expected = rows[240]["reasoning/grounded_rate"]
    assert float(shown.inner_text()) == pytest.approx(expected, rel=1e-3)
    page.keyboard.press("Enter")  # shows the episodes of that step
    assert page.locator("#filter-step").input_value() == "240"
    assert "step 250" in page.locator("#matrix-body select option:checked").inner_text()


def test_what_happened_is_on_top(opened):
    page, *_ = opened()
    text = page.locator("#what").inner_text()
    assert "Cause: template" in text and "go back to a checkpoint from before" in text
    alarm = page.evaluate("JSON.parse(document.getElementById('data').textContent).runs[0].alarm")
    assert f"The alarm started at step {alarm[''][0][0]}" in text


def test_filters_filter(opened):
    page, *_ = opened()
    listed = page.locator("#episode-list button")
    everything = listed.count()
    assert 100 < everything < 25 * 128
    assert f"sample of the {25 * 128} in rollouts/" in page.locator("#episode-count").inner_text()
    page.select_option("#filter-success", "true")
    solved = listed.count()
    assert 0 < solved < everything
    assert all("not solved" not in text for text in listed.all_inner_texts())
    page.select_option("#filter-kept", "false")
    texts = listed.all_inner_texts()
    assert 0 < len(texts) < solved and all("dropped" in text for text in texts)
    page.select_option("#filter-alarm", "before")
    before = [int(text.split("step ")[1].split()[0]) for text in listed.all_inner_texts()]
    assert before and max(before) < 250
    page.select_option("#filter-step", "250")
    assert listed.count() == 0 and "No episode" in page.locator("#episode").inner_text()


def test_charts_have_units_and_training_is_smoothed(opened, run):
    page, *_ = opened()
    chart = page.locator("#charts figure").first
    legend = chart.locator(".legend").inner_text()
    assert "held out" in legend and "training, mean of 9 steps" in legend
    drawn = page.evaluate(
        """() => {
          const data = JSON.parse(document.getElementById("data").textContent);
          return data.charts.map((chart) => chart.unit);
        }"""
    )
    assert all(drawn) and drawn[0] == "fraction of episodes" and "nats per token" in drawn
    rows = read_metrics(run / "metrics.jsonl")
    chart.locator(".plot").focus()
    page.keyboard.press("End")
    for _ in range(4):
        page.keyboard.press("Shift+ArrowLeft")
    mean = np.mean([row["rollout/success"] for row in rows if 206 <= row["step"] <= 214])
    live = page.locator("#live").inner_text()
    assert live.startswith("step 210: ")
    smoothed = float(live.split("training, mean of 9 steps ")[1].split(",")[0])
    assert smoothed == pytest.approx(mean, rel=1e-3)
    assert "nats per token" in page.locator("#matrix-body .ends").inner_text()


def test_axes_are_drawn_with_their_names_and_whole_steps(opened, tmp_path):
    page, messages, _ = opened(write_report([write_run(tmp_path / "run", steps=2)]), wait=False)
    page.add_init_script(
        """window.drawn = [];
        const fill = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
          window.drawn.push(text);
          return fill.call(this, text, ...rest);
        };"""
    )
    page.reload()
    page.wait_for_selector("#charts canvas")
    page.wait_for_timeout(300)
    drawn = page.evaluate("window.drawn")
    assert messages == [] and {"step", "fraction of episodes", "seconds per step"} <= set(drawn)
    chart = drawn[: drawn.index("fraction of episodes")]  # the first chart's horizontal axis
    steps = [text for text in chart if text != "step"]
    assert steps and all(text.isdigit() for text in steps), steps


def test_the_newest_episodes_come_first_and_a_problem_is_compared(opened, tmp_path, tokenizer):
    """Held-out problems are the same at each evaluation; training problems are not."""
    made = write_run(tmp_path / "run", steps=20)
    tokenizer.save_pretrained(made / "model")

    def held(step, group):
        text = f"at {step}</think><answer>Up</answer>"
        record = episode(tokenizer, [text], group=group, member=0, success=step > 0, kept=None)
        return record | {"seed": EVALUATION_SEEDS + group}

    folder = made / "eval" / "episodes"
    folder.mkdir(parents=True, exist_ok=True)
    for step in (0, 10, 20):
        lines = [json.dumps(held(step, group)) + "\n" for group in range(3)]
        (folder / f"step_{step:06d}.jsonl").write_text("".join(lines))
    page, messages, _ = opened(write_report([made]))
    assert messages == []
    texts = page.locator("#episode-list button").all_inner_texts()
    assert [int(t.split("step ")[1].split()[0]) for t in texts] == [20] * 3 + [10] * 3 + [0] * 3
    assert all("held out" in text for text in texts)
    button = page.locator("#compare")
    assert button.inner_text() == "Compare this problem at steps 0 and 20"
    button.click()
    heads = page.locator("#episode h3").all_inner_texts()
    assert [head.split(",")[0] for head in heads] == ["step 0", "step 20"]
    seeds = [head.split(", seed ")[1].split(",")[0] for head in heads]
    assert seeds == [str(EVALUATION_SEEDS)] * 2
    shown = page.locator("#episode").inner_text()
    assert "at 0" in shown and "at 20" in shown and "not learnt from" in shown
    page.locator("#compare").click()
    assert page.locator("#episode h3").count() == 1


def test_hostile_replies_are_shown_as_they_are(opened, run):
    page, messages, _ = opened()
    page.select_option("#filter-step", "10")
    page.locator("#episode-list button").first.click()
    shown = page.locator("#episode pre").all_text_contents()
    replies = "".join(text for text in shown if "<|im_start|>" not in text)
    for attack in ATTACKS:
        assert attack in replies
    assert page.evaluate("typeof window.owned") == "undefined" and messages == []
    assert page.locator("#episode pre span.p3").count() > 0  # shaded by log-probability
    title = page.locator("#episode pre span[title]").nth(2).get_attribute("title")
    assert "log-probability -0.2" in title


def test_images_are_shown_beside_the_prompt(opened, run, tmp_path, tokenizer):
    record = episode(tokenizer, ["so up</think><answer>Up</answer>"])
    names = [f"step_000010_images/{digit * 16}.png" for digit in "01"]
    record["turns"][0]["images"] = names
    folder = write_run(tmp_path / "sees", steps=20, episodes=[(10, [record])])
    tokenizer.save_pretrained(folder / "model")
    (folder / "rollouts" / "step_000010_images").mkdir()
    Image.new("RGB", (56, 28), "red").save(folder / "rollouts" / names[0])
    page, messages, requests = opened(write_report([folder]))
    assert messages == [] and all(url.startswith(("file:", "data:")) for url in requests)
    (image,) = page.locator("#episode img").all()
    assert image.evaluate("x => [x.naturalWidth, x.naturalHeight, x.alt]") == [
        *(56, 28, "image 1 of the prompt")
    ]
    assert "image 2 of the prompt cannot be read" in page.locator("#episode").inner_text()


def test_an_injected_script_would_not_run(opened):
    page, messages, _ = opened()
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.owned = 1';"
        " document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        ' \'<img src="https://example.org/x.png" onerror="window.owned = 2">\'); }'
    )
    page.wait_for_timeout(200)
    assert page.evaluate("typeof window.owned") == "undefined"
    assert any("Content Security Policy" in message for message in messages)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_screen_and_the_dark(opened, scheme):
    page, *_ = opened(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") == (scheme == "dark")
    # Each field has a label for screen readers, and each chart a summary.
    assert page.eval_on_selector_all(
        "select, input, button",
        "all => all.every(e => e.labels?.length || e.ariaLabel || e.textContent)",
    )
    for label in page.locator("#charts .plot").evaluate_all("all => all.map(e => e.ariaLabel)"):
        assert "initially" in label


@pytest.mark.parametrize("width", [320, 400])
def test_no_menu_entry_is_cut_off(opened, width):
    page, *_ = opened(viewport={"width": width, "height": 740})
    ends = "all => all.map(a => a.getBoundingClientRect()).map(r => [r.left, r.right])"
    entries = page.eval_on_selector_all("nav a", ends)
    assert len(entries) == 5
    assert all(0 <= left and right <= width for left, right in entries)


def test_an_interval_that_holds_every_value_is_said_in_words(opened, tmp_path):
    name = "collapse/first_turn/retrieval_acc"
    levels = {name: (0.5, 0.0, 1.69), "rollout/return": (0.5, 0.0, 1.69)}
    page, *_ = opened(
        write_report([write_run(tmp_path / "run", steps=3, levels=levels)]), wait=False
    )
    open_tables(page)
    assert page.locator(f'td[data-figure="{name}"]').first.inner_text() == "0.5 (interval 0 to 1)"


def test_runs_that_differ_in_seed_are_averaged(opened, tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "collapse/first_turn/retrieval_p", (0.01, 0.0, 0.0))
    paths = [write_run(tmp_path / f"seed-{seed}", steps=40, seed=seed) for seed in range(3)]
    kl = {"algorithm.kl_coef": 0.1}
    paths += [
        write_run(tmp_path / f"kl-{seed}", steps=40, seed=seed, fields=kl) for seed in range(2)
    ]
    records = [episode_of_one_turn()]
    (paths[0] / "rollouts").mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (paths[0] / "rollouts" / "step_000010.jsonl").write_text(text)
    page, messages, _ = opened(write_report(paths, tmp_path / "all.html"))
    assert messages == []
    open_tables(page)
    name = "collapse/first_turn/own_margin"
    cell = page.locator(f'td[data-figure="{name}"][data-step="7"]').first
    values = [read_metrics(path / "metrics.jsonl")[7][name] for path in paths[:3]]
    half = 4.302653 * np.std(values, ddof=1) / np.sqrt(3)  # t(0.975) with 2 degrees of freedom
    mean, plus_minus = map(float, cell.inner_text().split(" ± "))
    assert mean == pytest.approx(np.mean(values), rel=1e-3)
    assert plus_minus == pytest.approx(half, rel=1e-3)
    assert "algorithm.kl_coef" in page.locator("#settings .scroll").first.inner_text()
    assert "average over 3 seeds" in page.locator("#what").inner_text()
    last = read_metrics(paths[0] / "metrics.jsonl")[-1]
    row = page.locator("#what tbody tr").first.inner_text()
    retrieval, chance = (last[f"collapse/first_turn/retrieval_{x}"] for x in ("acc", "chance"))
    assert f"{last[name]:.2f} nats\t{retrieval:.0%} (chance {chance:.0%})" in row


@pytest.mark.parametrize("count", [1, 12])
def test_scored_rollouts_of_others(opened, tokenizer, tmp_path, count):
    """The page invents no missing values, and a dump of one step has a page as well."""
    rng = np.random.default_rng(0)
    figures = {name: (level, deviation) for name, (level, deviation, _) in LEVELS.items()}
    first = "collapse/first_turn"
    figures |= {f"{first}/{n}": (0.5, 0.0) for n in ("retrieval_p", "own_margin")}
    names = [name for name in figures if name.startswith(("collapse/", "rollout/re"))]
    rows = [{n: rng.normal(*figures[n]) for n in names} for _ in range(count)]
    prompt, reply = (np.array(tokenizer.encode(text)) for text in ("#P#", "so[/T]Up"))
    turn = Turn(prompt, "", reply, np.zeros(len(reply)), (0, 1), (0, 0), (), False, 0.0, {})
    episodes = [Episode(g, g, k, (turn,), False) for g in range(3) for k in range(2)]
    steps = [ScoredStep(10 * i, episodes, np.full(6, np.nan), False, False) for i in range(count)]
    scores = Scores(rng.normal(size=(6, 3)), np.ones(6), np.arange(6) // 2)
    found = contents(
        steps,
        rows,
        [StoredMatrix("", step.number, scores) for step in steps],
        tokenizer.backend_tokenizer,
        name="dump.jsonl",
        about="dump",
        settings={"model": "DIR"},
        config=base.get_config().to_dict(),
    )
    write_page([found], tmp_path / "scored.html")
    page, messages, requests = opened(tmp_path / "scored.html")
    assert messages == [] and len(requests) == 1
    text = page.locator("#what").inner_text()
    assert "It is open whether the reasoning depends on its prompt" in text and "0.50 nats" in text
    assert "(interval unknown)" in text and "nan" not in text
    # Step 0 is a step: nothing was evaluated before it.
    assert ("1 step is too few to judge a change over time." in text) == (count == 1)
    assert ("There was no alarm." in text) == (count == 12)
    # A single step is shown as tables.
    assert (page.locator("#charts .chart canvas").count() > 3) == (count > 1)
    if count == 1:
        cell = page.locator('#charts td[data-figure="collapse/first_turn/own_margin"]').first
        assert cell.is_visible() and float(cell.inner_text()) == 0.5
    assert page.locator("#episode-list button").count() == 6 * count
    listed = page.locator("#episode-list button").first.inner_text()
    assert "success not said" in listed and "return not said" in listed
    shown = page.locator("#episode").inner_text()
    assert "seed" not in shown and "Turn 1\n" in shown and "no answer" in shown
    assert "did" not in shown and "never closed" not in shown
    assert "which are all in the rows scored" in page.locator("#episode-count").inner_text()


def episode_of_one_turn():
    """An episode's record without log-probs or `kept`, of a run whose tokenizer is missing."""
    turn = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x</b>"}],
        "prompt_ids": [1],
        "sampled_ids": [2, 3],
        "actions": [],
        "valid": False,
        "reward": -0.1,
    }
    return {"seed": 1, "group": 0, "member": 0, "success": False, "turns": [turn]}


def test_no_tag_can_begin_in_the_data():
    text = encode_for_script(["</script><!--<script>", "&", "\u2028", "\ud800", "\x00"])
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == ["</script><!--<script>", "&", "\u2028", "\ud800", "\x00"]


def test_bad_folders_are_one_line_and_exit_code_2(tmp_path, run):
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.json", begun)
    for words, expected in (
        ([], "name a run folder"),
        ([str(tmp_path / "empty")], "it has no config.json"),
        ([str(begun)], "no finished step yet"),
        ([str(run), f"--out={tmp_path / 'no' / 'x.html'}"], "does not exist"),
        ([str(run), "--nothing=1"], "nothing"),
    ):
        code, out, err = call("ragen_jax.report", *words)
        assert (code, out) == (2, "") and expected in err and err.count("\n") == 1, err
    code, out, _ = call("ragen_jax.report", str(run), f"--out={tmp_path / 'x.html'}")
    assert code == 0 and out.startswith(f"{tmp_path / 'x.html'}  ")
