"""The monitor in TRL's own trainer.

TRL_PYTHON names a Python with torch, trl (1.16), transformers and our dependencies jax, flax,
chex, optax, scipy, ml_collections and gymnasium; it need not be this one.
"""

import collections
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import ragen_jax
from ragen_jax.integrations import trl
from ragen_jax.model import hf
from ragen_jax.rollout.chat import ChatFormat, make_chat

SCRIPT = Path(__file__).parent / "trl_script.py"
HERE = sys.executable if importlib.util.find_spec("trl") else None
PYTHON = os.environ.get("TRL_PYTHON", HERE)
needs_trl = pytest.mark.skipif(PYTHON is None, reason="needs the package trl")
MEMBERS = 4


@pytest.fixture(scope="module")
def model(agent, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, agent.model, agent.params, agent.tokenizer)
    return path


@pytest.fixture(scope="module")
def rooms(agent):
    """The texts of rooms, as the tiny agent was taught to read them."""
    shape = dict(context="full", prompt="terse", actions_per_turn=2, max_actions=10)
    chat = make_chat(agent.tokenizer, agent.environment, ChatFormat(**shape))
    renders = [agent.environment.render(agent.environment.reset(seed)) for seed in range(16)]
    return [agent.tokenizer.decode(chat.prompt_ids([], room)) for room in renders]


def train(folder, model, prompts, *, processes=1, **options):
    """Train in the other Python; return the processes' results and the monitor's lines."""
    folder.mkdir()
    options = dict(model=str(model), out=str(folder), prompts=prompts) | options
    (folder / "options.json").write_text(json.dumps(options))
    launch = []
    if processes > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [PYTHON, *launch, str(SCRIPT), str(folder / "options.json")]
    environment = dict(os.environ, PYTHONPATH=str(Path(ragen_jax.__file__).parents[1]))
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads((folder / f"result{i}.json").read_text()) for i in range(processes)]
    return results, [line for line in done.stderr.splitlines() if "ragen_jax" in line]


def score(rollouts, model):
    return ragen_jax.score(rollouts, model, first_turn_samples=32, trajectory_samples=16)[0]


def score_ids(batch, model):
    """The figures of `score` for the token ids of a batch."""
    rows = [row | {"step": 1, "group": i // MEMBERS} for i, row in enumerate(batch)]
    return score(rows, model)


def assert_logged(expected, logged, families=("collapse", "rollout", "anatomy", "action")):
    """All figures of `score` are in a row of TRL's log; without rewards it has fewer."""
    expected = {k: v for k, v in expected.items() if k.split("/")[0] in families}
    assert "collapse/first_turn/retrieval_p" in expected
    for key, value in expected.items():
        assert logged[key] == pytest.approx(value, abs=1e-4), key


@pytest.mark.slow
@needs_trl
def test_training_is_the_same_to_the_bit_and_the_figures_are_those_of_score(model, rooms, tmp_path):
    """With dropout, gradient accumulation, evaluations, and every batch scored."""
    arguments = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    options = dict(args=arguments, dropout=True, eval=True)
    (without,), lines = train(tmp_path / "off", model, rooms, **options)
    assert not lines and not any("collapse/" in key for key in without["log"][0])
    monitor = {"every": 1, "success_reward": 0.5}
    (watched,), _ = train(tmp_path / "on", model, rooms, monitor=monitor, **options)
    for key in ("weights", "random", "batches", "training", "gradients"):
        assert watched[key] == without[key], key
    assert watched["platforms"] == "cpu" and not without["platforms"]
    rows = [row for row in watched["log"] if "loss" in row]
    batches = [batch["rows"] for batch in watched["batches"] if batch["training"]]
    assert [row["step"] for row in rows] == [1, 2] and len(batches[0]) == 16
    assert_logged(score_ids(batches[0], model), rows[0])
    assert rows[0]["rollout/return"] == pytest.approx(rows[0]["reward"], abs=1e-5)
    mixed, failed = rows[0]["anatomy/mixed"], rows[0]["anatomy/failed"]
    assert mixed == 1 - rows[0]["frac_reward_zero_std"] and mixed + failed <= 1
    assert rows[1]["collapse/first_turn/mi"] != rows[0]["collapse/first_turn/mi"]
    assert all(row["regime/alarm"] == 0 and row["time/monitor"] > 0 for row in rows)
    evaluations = [row for row in watched["log"] if "eval_loss" in row]
    assert evaluations and not any("collapse" in key for row in evaluations for key in row)


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("kind", ["text", "messages"])
def test_the_figures_of_a_completions_file(model, rooms, tmp_path, kind):
    """At a low temperature, texts are tokenised as they were sampled."""
    prompts = rooms
    if kind == "messages":
        model = shutil.copytree(model, tmp_path / "model")
        (model / "checksums.json").unlink(missing_ok=True)
        template = (model / "chat_template.jinja").read_text()
        opened = template.replace("assistant\n'", "assistant\n<think>'")
        assert opened != template
        (model / "chat_template.jinja").write_text(opened)
        texts = [room.split("user\n")[1].split("<|im_end|>")[0] for room in rooms]
        prompts = [[{"role": "user", "content": text}] for text in texts]
    (found,), _ = train(
        tmp_path / "run", model, prompts, monitor={}, args={"temperature": 0.2, "max_steps": 1}
    )
    expected = score(tmp_path / "run" / "completions" / "completions_00001.parquet", model)
    row = found["log"][0]
    # A text has no stop token, and TRL's column of a reward without "reward" in its name is none.
    length = {k: v for k, v in expected.items() if "response_length" in k}
    assert row["rollout/response_length"] == pytest.approx(length["rollout/response_length"] + 1)
    assert_logged({k: v for k, v in expected.items() if k not in length}, row)
    assert_logged(score_ids(found["batches"][0]["rows"], model), row)


@pytest.mark.slow
@needs_trl
def test_two_processes_have_the_figures_of_all_rows(model, rooms, tmp_path):
    arguments = {"per_device_train_batch_size": 8, "ddp_backend": "gloo"}
    monitor = {"every": 1, "settings": {"think": ["<think>", "</none>"]}}
    results, _ = train(
        tmp_path / "on", model, rooms, processes=2, monitor={"every": 1}, args=arguments
    )
    assert results[0]["weights"] == results[1]["weights"]
    rows = [row for result in results for row in result["batches"][0]["rows"]]
    assert len(rows) == 16
    assert_logged(score_ids(rows, model), results[0]["log"][0])
    plain, lines = train(
        tmp_path / "other", model, rooms, processes=2, monitor=monitor, args=arguments
    )
    assert plain[0]["weights"] == results[0]["weights"]
    assert sum("none of 16 rollouts holds reasoning" in line for line in lines) == 1


@pytest.mark.slow
@needs_trl
def test_tool_calls_are_turns(model, rooms, tmp_path):
    """TRL runs the tool; its result is read, and not taken for the policy's reasoning."""
    where = [PYTHON, "-c", "import trl; print(trl.__path__[0])"]
    package = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    model = shutil.copytree(model, tmp_path / "model")
    (model / "checksums.json").unlink(missing_ok=True)
    shutil.copy(Path(package) / "chat_templates" / "qwen3.jinja", model / "chat_template.jinja")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 2}}\n</tool_call><|im_end|>'
    replies = [f"<think>player {i}</think>{call % i}" for i in range(3)]
    prompts = [[{"role": "user", "content": room}] for room in rooms]
    (found,), _ = train(
        tmp_path / "run",
        model,
        prompts,
        replies=replies,
        tools=True,
        monitor={},
        args={"max_steps": 1, "max_completion_length": 200, "max_tool_calling_iterations": 1},
    )
    row = found["log"][0]
    assert row["tools/call_frequency"] == 1 and row["rollout/turns"] == 2
    assert "collapse/trajectory/mi" in row and row["rollout/valid_think_rate"] >= 0.5
    episodes = []
    for index, each in enumerate(found["batches"][0]["rows"]):
        prompt, reply, mask = each["prompt"], each["response"], each["mask"]
        start, end = mask.index(0), len(mask) - mask[::-1].index(0)
        turns = [
            {"prompt_ids": prompt, "sampled_ids": reply[:start]},
            {"prompt_ids": prompt + reply[:end], "sampled_ids": reply[end:]},
        ]
        episodes.append({"turns": turns, "step": 1, "group": index // MEMBERS})
    assert_logged(score(episodes, model), row, families=("collapse", "rollout"))


@pytest.mark.slow
@needs_trl
def test_a_resumed_run_continues_the_alarm_and_the_weights(model, rooms, tmp_path):
    saves = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    (whole,), _ = train(tmp_path / "whole", model, rooms, monitor={"every": 1}, args=saves)
    (rest,), _ = train(
        tmp_path / "rest",
        model,
        rooms,
        monitor={"every": 1},
        args={"max_steps": 3},
        resume=str(tmp_path / "whole" / "checkpoint-2"),
    )
    assert rest["weights"] == whole["weights"]
    before, after = (
        {k: v for k, v in run["log"][2].items() if k.split("/")[0] in ("collapse", "regime")}
        for run in (whole, rest)
    )
    assert before == after and "regime/alarm" in before


PADDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class Tensor(list):
    def tolist(self):
        return list(self)


def stand_in(**words):
    """The parts of a trainer that the monitor reads."""
    state = SimpleNamespace(global_step=0, log_history=[])
    accelerator = SimpleNamespace(num_processes=1, is_main_process=True)
    parts = dict(
        _generate_and_score_completions=lambda inputs: inputs,
        _metrics={"train": {}},
        _logs={"rewards": {}},
        accelerator=accelerator,
        args=SimpleNamespace(per_device_train_batch_size=1),
        model=SimpleNamespace(training=True),
        num_generations=MEMBERS,
        processing_class=None,
        reward_func_names=[],
        reward_weights=Tensor(),
        state=state,
    )
    return SimpleNamespace(**parts | words)


@pytest.mark.fast
def test_prompts_with_images_are_left_out_with_a_line(agent, caplog):
    trainer = stand_in(processing_class=SimpleNamespace(tokenizer=agent.tokenizer))
    monitor = trl.monitor_collapse(trainer)
    batch = {"num_images": [1]}
    for _ in range(2):
        assert trainer._generate_and_score_completions(batch) is batch
    (record,) = caplog.records
    assert "prompts with images are not scored" in record.getMessage()
    assert trainer._metrics == {"train": {}} and jax.config.jax_platforms
    assert monitor.settings.samples == 32


@pytest.mark.fast
def test_what_cannot_be_attached_is_refused(agent):
    trainer = stand_in(processing_class=agent.tokenizer)
    for words, message in (
        ({"share": 0.0}, "share is 0.0; it must be a fraction"),
        ({"share": float("nan")}, "share is nan; it must be a fraction"),
        ({"every": -1}, "every is -1; it must be a whole number from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            trl.monitor_collapse(trainer, **words)
    del trainer._logs
    message = "SimpleNamespace has no _logs; expected GRPOTrainer or RLOOTrainer of TRL"
    with pytest.raises(ValueError, match=message):
        trl.monitor_collapse(trainer)


@pytest.mark.fast
@pytest.mark.parametrize(
    "words,unscored,due",
    [
        ({}, 0.0, [1, *range(21, 101, 5)]),
        ({}, 0.053, [1, 33, 41, 48, 56, 64, 72, 79, 87, 95]),
        ({"every": 30}, 0.0, [1, 31, 61, 91]),
    ],
)
def test_the_monitor_keeps_its_share_by_scoring_less_often(
    agent, monkeypatch, words, unscored, due
):
    """Batches of a second; the first scoring takes 2 s, the others 0.5 s."""
    now, batches, scored = 0.0, 0, []
    spent = unscored * (100 - len(due)) + 2.0 + 0.5 * (len(due) - 1)

    def generate(inputs):
        nonlocal now, batches
        now, batches = now + 1.0, batches + 1
        return {name: Tensor() for name in PADDED}

    def update(step, rollouts, logprob):
        nonlocal now
        if logprob is not None:
            now += 0.5 if scored else 2.0
            scored.append(batches)
        else:
            now += unscored
        return {"rollout/replies": 1.0}

    trainer = stand_in(
        processing_class=agent.tokenizer,
        _generate_and_score_completions=generate,
        _metrics={"train": collections.defaultdict(list)},
    )
    monkeypatch.setattr(trl, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(trl, "torch_logprob", lambda *args, **options: "logprob")
    monkeypatch.setattr(trl.monitor_collapse(trainer, **words), "update", update)
    for _ in range(100):
        trainer._generate_and_score_completions(None)
    assert scored == due
    logged = trainer._metrics["train"]
    assert len(logged["rollout/replies"]) == len(logged["time/monitor_share"]) == 100
    assert logged["time/monitor"] == pytest.approx([2.0, *[0.5] * (len(due) - 1)])
    assert logged["time/monitor_share"][-1] == pytest.approx(spent / now)
    assert logged["time/monitor_share"][-1] < 0.1 + 0.5 / now
    trainer.model.training = False
    trainer._generate_and_score_completions(None)  # an evaluation
    assert len(logged["rollout/replies"]) == 100


@pytest.mark.fast
def test_rows_are_read_without_their_padding():
    batch = {
        "prompt_ids": Tensor([[0, 5, 6], [5, 6, 7], [0, 0, 8]]),
        "prompt_mask": Tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": Tensor([[1, 2, 0, 0], [0, 3, 4, 2], [1, 0, 4, 0]]),
        "completion_mask": Tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
    }
    rows = trl._rows(batch, pad=0)
    assert rows == [([5, 6], [1, 2], None), ([5, 6, 7], [0, 3, 4, 2], None), ([8], [1, 0, 4], None)]
    batch["tool_mask"] = Tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]])
    assert [mask for _, _, mask in trl._rows(batch, pad=0)] == [[1, 1], [1, 0, 0, 1], [0, 0, 0]]
