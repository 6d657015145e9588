"""Fine-tuning: the loss, gradients, stopping, exact resume, LoRA, the cache, and messages."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.load import load_config
from ragen_jax.configs import countdown, sokoban, sudoku
from ragen_jax.envs.countdown import Countdown
from ragen_jax.model import hf, qwen
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run import fine_tune as stage
from ragen_jax.run import fine_tune_updates as updates
from ragen_jax.run.fine_tune import fine_tune, fine_tuned_model
from ragen_jax.run.fine_tune_updates import Interrupted, batch_rows
from ragen_jax.run.load import load_policy, load_reference
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.medium

SHAPE = dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
WORDS = (
    *("The", " numbers", " are", " and", " the", " target", " is", ".", ",", " =", " +", " -"),
    *(f" {number}" for number in range(100)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a small language model, which knows nothing."""
    tokenizer = build_tokenizer(WORDS)
    config = qwen.ModelConfig(vocab_size=len(tokenizer), max_positions=512, **SHAPE)
    params = qwen.init_params(config, jax.random.key(0))
    path = tmp_path_factory.mktemp("model") / "base"
    hf.save(path, qwen.Qwen(config), params, tokenizer)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config_of(model, **fields):
    config = countdown.get_config("llm")
    config.model.path = str(model)
    config.env.prompt = "brief"
    config.env.options.update(count=(2, 2), largest=30, targets=(10, 58))
    config.rollout.update(groups=2, group_size=2, max_new_tokens=8)
    config.warmstart.update(fine_tune=True, rooms=24, batch=6, learning_rate=2e-2)
    config.warmstart.update(warmup_updates=2, check_every=3, check_episodes=2)
    config.warmstart.update(max_updates=6, success=1.0)
    config.update_from_flattened_dict(fields)
    return load_config(config)


def weights_of(policy):
    return load_file(policy / "model.safetensors")


def rows_of(workdir):
    """The rows of metrics.jsonl without what differs between equal runs."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def tuned(model, cache, tmp_path_factory):
    """(config, workdir, policy directory) of a fine-tuning."""
    workdir = tmp_path_factory.mktemp("tuned")
    config = config_of(model)
    return config, workdir, fine_tune(config, workdir, cache)


def test_it_learns_and_writes_rows_and_a_model(tuned, model):
    _, workdir, policy = tuned
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == list(range(7))
    assert rows[-1]["sft/loss"] < 0.7 * rows[1]["sft/loss"]
    assert rows[-1]["sft/heldout_loss"] < 0.7 * rows[0]["sft/heldout_loss"]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 3, 6]
    # linear warm-up over two updates, then constant
    rates = [row["sft/learning_rate"] for row in rows[1:]]
    np.testing.assert_allclose(rates, [1e-2, *[2e-2] * 5], rtol=1e-6)
    assert not (workdir / "checkpoints").exists()
    loaded, _, tokenizer = hf.load(policy)
    assert loaded.config.width == 32 and tokenizer.chat_template
    assert hf.stop_ids(policy) == hf.stop_ids(model)


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_replies(tuned, model, cache):
    """The first row's loss, from the library's log-probs of rows that transformers' template
    renders."""
    config, workdir, _ = tuned
    loaded, params, tokenizer = hf.load(model)
    batch, *_ = stage._examples(
        stage.imitation_config(config), tokenizer, model, cache, loaded.config.max_positions
    )
    total = tokens = 0.0
    for row in batch_rows(24, 6, config.warmstart.seed, 0):
        length = int(np.flatnonzero(batch.mask_BT[row])[-1]) + 1
        ids = batch.tokens_BT[row, :length]
        logp = np.asarray(token_logps(loaded, params, ids[None]))[0]
        inside = batch.mask_BT[row, :length] > 0
        total -= logp[inside].sum()
        tokens += inside.sum()
        # The row is the conversation as transformers renders it.
        text = tokenizer.decode(ids)
        begin, _, reply = text.rpartition("<think>")
        system, user = (
            part.split("<|im_end|>")[0] for part in begin.split("\n", 1)[1].split("user\n")
        )
        rendered = tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": user}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == rendered + "<think>" + reply
        assert reply.endswith("</answer><|im_end|>") and reply.startswith("The numbers are")
        assert tokenizer.decode(ids[inside]) == reply
    assert rows_of(workdir)[1]["sft/loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_resumed_run_is_bit_identical(tuned, cache, tmp_path):
    config, workdir, policy = tuned

    class Signals:
        """A preemption that arrives during update 4."""

        saves, signal = False, 0

    signals, seen = Signals(), []

    def on_row(row):
        seen.append(row["step"])
        signals.signal = 15 * (row["step"] == 4)

    with pytest.raises(Interrupted) as stopped:
        fine_tune(config, tmp_path, cache, preemption=signals, on_row=on_row)
    assert stopped.value.exit_code == 143 and seen == [0, 1, 2, 3, 4]
    resumed = fine_tune(config, tmp_path, cache)
    assert rows_of(tmp_path) == rows_of(workdir)
    ours, theirs = weights_of(resumed), weights_of(policy)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_it_stops_when_success_is_reached(model, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(updates, "_play", lambda *_: {"eval/success": 0.5, "eval/valid_rate": 0.75})
    config = config_of(model, **{"warmstart.success": 0.5})
    fine_tune(config, tmp_path, cache)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3]
    assert "success 0.50, valid 0.75" in capsys.readouterr().out
    config = config_of(model, **{"warmstart.success": 0.6, "warmstart.seed": 1})
    fine_tune(config, tmp_path / "other", cache)
    assert "success 0.50 after 6 updates is below warmstart.success=0.6" in capsys.readouterr().out


def test_the_learning_rate_follows_its_schedule(model, cache, tmp_path):
    fields = {"warmstart.schedule": "linear", "warmstart.warmup_updates": 1}
    fine_tune(config_of(model, **fields), tmp_path, cache)
    rates = [row["sft/learning_rate"] for row in rows_of(tmp_path)[1:]]
    # One update of warm-up, then down to 0 in the five that are left.
    np.testing.assert_allclose(rates, 2e-2 * np.array([1, 1, 0.8, 0.6, 0.4, 0.2]), rtol=1e-5)


def test_training_starts_from_the_fine_tuned_model(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = config_of(model, **{"warmstart.max_updates": 1, "warmstart.check_every": 1})
    policy = load_policy(config, tmp_path)
    made = fine_tuned_model(config)
    ours, theirs = weights_of(tmp_path / "model"), weights_of(made)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    np.testing.assert_array_equal(policy.params["embed"], theirs["model.embed_tokens.weight"])
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(stage, "fine_tune", None)  # a resumed run has its own copy
    load_policy(config, tmp_path)
    untouched = load_policy(config_of(model, **{"warmstart.fine_tune": False}), None)
    assert not np.array_equal(untouched.params["embed"], policy.params["embed"])


def test_a_teacher_is_fine_tuned_as_the_policy_is(model, tmp_path, monkeypatch):
    """Without teacher styles it is the initial policy; with them, it is another model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    styles = dict(grounded=0.5, template=0.5)
    config = config_of(
        model,
        **{"warmstart.styles": styles, "warmstart.max_updates": 3},
        **{"algorithm.kl_coef": 1.0, "algorithm.kl_reference": "warmstart"},
    )
    policy = load_policy(config, None)
    for teacher_styles, equal in (({}, True), (dict(grounded=1.0), False)):
        lab = dataclasses.replace(config.lab, teacher_styles=teacher_styles)
        _, params = load_reference(dataclasses.replace(config, lab=lab), policy)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params, policy.params)
        assert all(jax.tree.leaves(same)) == equal
    assert len(list((tmp_path / "cache/ragen_jax/models").glob("sft_*/policy"))) == 2


def test_lora_trains_adapters_and_merges_them(model, cache, tmp_path):
    fields = {"model.lora.rank": 2, "model.lora.targets": ("q", "v")}
    policy = fine_tune(config_of(model, **fields), tmp_path, cache)
    before, after = weights_of(model), weights_of(policy)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        name for name in before if "q_proj.weight" in name or "v_proj.weight" in name
    }


def test_the_result_is_cached_by_settings_and_model(model, tmp_path, monkeypatch):
    config = config_of(model, **{"warmstart.max_updates": 1, "warmstart.check_every": 1})
    first = fine_tuned_model(config, tmp_path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    other = config_of(model, **{"warmstart.max_updates": 1, "warmstart.check_every": 1, "seed": 9})
    assert fine_tuned_model(other, tmp_path) == first  # of the run, not of the fine-tuning
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp

    names = {first.parent.name}
    monkeypatch.setattr(stage, "fine_tune", lambda config, folder, cache: None)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    names.add(
        fine_tuned_model(
            dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(copy))),
            tmp_path,
        ).parent.name
    )
    assert len(names) == 1  # the same model elsewhere
    card = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(card | {"temperature": 0.5}))
    for fields in (
        {"model.path": str(copy)},
        {"warmstart.learning_rate": 1e-4},
        {"env.prompt": "full"},
    ):
        changed = {"warmstart.max_updates": 1, "warmstart.check_every": 1} | fields
        names.add(fine_tuned_model(config_of(model, **changed), tmp_path).parent.name)
    assert len(names) == 4


def test_the_day_counts_only_if_the_template_writes_it(model, tmp_path):
    days = [{"model.date": "2026-11-27"}, {"model.date": "2026-11-28"}]
    first, second = (stage.settings_of(config_of(model, **day)) for day in days)
    assert first == second
    dated = tmp_path / "dated"
    shutil.copytree(model, dated)
    (dated / "checksums.json").unlink()
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    first, second = (stage.settings_of(config_of(dated, **day)) for day in days)
    assert first != second


def test_a_folder_holds_one_fine_tuning(tuned, model, cache):
    _, workdir, policy = tuned
    assert fine_tune(config_of(model), workdir, cache) == policy  # it is done
    with pytest.raises(ValueError, match=r"other settings: warmstart.batch was 6 and is 4; use an"):
        fine_tune(config_of(model, **{"warmstart.batch": 4}), workdir, cache)


def test_an_environment_needs_an_expert(model):
    config = sudoku.get_config("llm")
    config.model.path, config.warmstart.fine_tune = str(model), True
    with pytest.raises(
        ValueError, match=r"'sudoku' has no narrate .*set warmstart.fine_tune=False"
    ):
        stage.settings_of(load_config(config))


def test_styles_must_exist(model):
    config = config_of(model, **{"warmstart.styles": {"grounded": 0.5, "poetic": 0.5}})
    with pytest.raises(
        ValueError, match=r"warmstart.styles has poetic, but environment 'countdown"
    ):
        stage.settings_of(config)


def test_demonstrations_that_do_not_fit_are_counted(model, cache, tmp_path, monkeypatch, capsys):
    short = Countdown.render
    monkeypatch.setattr(
        Countdown, "render", lambda self, state: short(self, state) + "#" * 600 * (state.target % 2)
    )
    config = config_of(model, **{"warmstart.max_updates": 1, "warmstart.rooms": 30})
    fine_tune(config, tmp_path, cache)
    assert " of 30 demonstration replies are left out, because" in capsys.readouterr().out


def test_answers_with_a_hidden_prompt_are_further_rows(model, cache, tmp_path):
    config = config_of(model, **{"lab.hidden_prompts": 0.5})
    loaded, _, tokenizer = hf.load(model)
    batch, *_ = stage._examples(
        stage.imitation_config(config), tokenizer, model, cache, loaded.config.max_positions
    )
    assert len(batch.tokens_BT) == 36
    shortest = np.argsort(batch.mask_BT.argmax(1))[:12]  # their prompts are reasonings
    for row in shortest:
        text = tokenizer.decode(batch.tokens_BT[row][: batch.mask_BT[row].argmax()])
        assert text.startswith("The numbers are") and "user" not in text
    fine_tune(config, tmp_path, cache)
    assert "hidden_prompts" not in stage.settings_of(config_of(model))
    assert stage.settings_of(config)["hidden_prompts"] == 0.5


def test_every_epoch_shows_every_row_once():
    shown = [batch_rows(20, 6, 3, update) for update in range(6)]
    for epoch in (shown[:3], shown[3:]):
        rows = np.concatenate(epoch)
        assert len(rows) == len(set(rows.tolist())) == 18
    assert not np.array_equal(shown[0], shown[3])
    np.testing.assert_array_equal(batch_rows(20, 6, 3, 4), shown[4])
    assert not np.array_equal(batch_rows(20, 6, 4, 4), shown[4])


def test_several_turns_in_one_row_are_trained_together(model, cache, tmp_path):
    """Full history: the rows hold whole episodes, and all their replies are imitated."""
    config = sokoban.get_config("llm")
    config.model.path, config.env.context = str(model), "full"
    config.update_from_flattened_dict({"env.prompt": "terse", "rollout.max_new_tokens": 8})
    config.update_from_flattened_dict({"warmstart.fine_tune": True, "warmstart.rooms": 6})
    config.update_from_flattened_dict({"warmstart.batch": 2, "warmstart.check_episodes": 1})
    loaded = load_config(config)
    _, _, tokenizer = hf.load(model)
    batch, heldout, tasks = stage._examples(
        stage.imitation_config(loaded), tokenizer, model, cache, 4096
    )
    assert len(batch.tokens_BT) == 6 and batch.turn_end_BT.sum(1).max() > 1
    assert len(heldout.tokens_BT) == 1 and list(tasks) == ["sokoban"]


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_the_gradients_of_an_update_match_torch(model, cache, tmp_path, family):
    """Of the mean cross-entropy of the replies' tokens, through the whole update."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    tokenizer = hf.load_tokenizer(model)
    fields = {"qwen2": {}, "llama": {"qkv_bias": False, "tied": False}}
    shape = qwen.ModelConfig(
        vocab_size=len(tokenizer),
        max_positions=512,
        family=family,
        **SHAPE,
        **fields.get(family, {"qkv_bias": False, "qk_norm": True}),
    )
    params = qwen.init_params(shape, jax.random.key(1))
    hf.save(tmp_path / "base", qwen.Qwen(shape), params, tokenizer)
    config = config_of(tmp_path / "base", **{"optimizer.max_grad_norm": 1e9})
    loaded, params, _ = hf.load(tmp_path / "base")
    batch, *_ = stage._examples(stage.imitation_config(config), tokenizer, model, cache, 512)
    learner, state = build_learner(
        stage.stage_config(config), loaded, params, *build_meshes(config)
    )
    rows = batch_rows(24, 6, 0, 0)
    state, metrics = updates._update(learner, state, updates._take(batch, rows), 1)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    ids_BT = torch.tensor(batch.tokens_BT[rows]).long()
    replies_BT = torch.tensor(batch.mask_BT[rows] > 0)
    logits_BTV = theirs(ids_BT).logits  # padding follows the replies: nothing attends to it
    loss = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1][replies_BT[:, 1:]], ids_BT[:, 1:][replies_BT[:, 1:]]
    )
    loss.backward()
    assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    # After its first update, Adam's first moment is (1 - b1) times the gradient.
    (moments,) = (
        x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=_has_moments) if _has_moments(x)
    )
    gradients = jax.tree.map(lambda x: x / (1 - config.optimizer.b1), moments)
    hf.save(tmp_path / "gradients", loaded, gradients, tokenizer)
    ours = weights_of(tmp_path / "gradients")
    wanted = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    assert ours.keys() == wanted.keys()
    whole = np.sqrt(sum(float((x**2).sum()) for x in wanted.values()))
    assert metrics["sft/grad_norm"] == pytest.approx(whole, rel=1e-5)
    for name, want in wanted.items():
        error = np.linalg.norm(ours[name] - want)
        # A key's bias has no effect on the softmax: its gradient is rounding.
        assert error <= 1e-5 * max(np.linalg.norm(want), 1e-3 * whole), name


def _has_moments(x):
    return hasattr(x, "mu")
