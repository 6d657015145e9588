"""Our rollouts as the files and folders that other trainers' and agents' writers produce."""

import gzip
import json

import trainer_formats
from trainer_formats import conversation, write


def whole(record):
    """(token ids of an episode, for each of them whether it was sampled)."""
    ids, mask = [], []
    for turn in record["turns"]:
        before = turn["prompt_ids"][len(ids) :]
        ids += before + turn["sampled_ids"]
        mask += [0] * len(before) + [1] * len(turn["sampled_ids"])
    return ids, mask


def total(record):
    return sum(turn["reward"] for turn in record["turns"])


def atif(record, tokenizer, *, with_ids):
    """A trajectory of ATIF 1.7, with one step of the agent for each turn."""
    steps = []
    for message in conversation(record, tokenizer):
        step = {"step_id": len(steps) + 1, "timestamp": "2026-11-27T12:00:00Z"}
        if message["role"] == "user":
            steps.append(step | {"source": "user", "message": message["content"]})
            continue
        turn = record["turns"][len(steps) // 2]
        metrics = {"prompt_tokens": len(turn["prompt_ids"]), "cost_usd": 0.0}
        if with_ids:
            metrics["prompt_token_ids"] = turn["prompt_ids"]
            metrics["completion_token_ids"] = turn["sampled_ids"]
            metrics["logprobs"] = [-0.1] * len(turn["sampled_ids"])
        step |= {"source": "agent", "message": message["content"], "llm_call_count": 1}
        steps.append(step | {"model_name": "tiny", "metrics": metrics})
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "s",
        "trajectory_id": "t",
        "agent": {"name": "terminus", "version": "2", "model_name": "tiny"},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
    }


def harbor(folder, records, tokenizer, *, with_ids=True):
    """A job: a folder for each trial, with its result, or only the reward of its tests."""
    for index, record in enumerate(records):
        trial = folder / "job" / f"room-{record['group']}__{index:03}"
        (trial / "agent").mkdir(parents=True)
        (trial / "verifier").mkdir()
        trajectory = atif(record, tokenizer, with_ids=with_ids)
        (trial / "agent/trajectory.json").write_text(json.dumps(trajectory, indent=2))
        (trial / "verifier/reward.txt").write_text(f"{total(record)}\n")
        result = {
            "task_name": f"room-{record['group']}",
            "trial_name": trial.name,
            "agent_result": {"n_input_tokens": 1, "rollout_details": None},
            "verifier_result": {"rewards": {"reward": total(record)}},
            "exception_info": None,
        }
        if record["group"] % 2:  # all rows of these groups have only the tests' file
            (trial / "result.json").write_text(json.dumps(result))
    (folder / "job/result.json").write_text("{}")
    return folder / "job"


def nemo_gym(folder, records, tokenizer, *, with_ids=True):
    rows = []
    for index, record in enumerate(records):
        first, *others = conversation(record, tokenizer)
        output = []
        for place, message in enumerate(others):
            if message["role"] == "user":
                output.append(message | {"type": "message"})
                continue
            turn = record["turns"][place // 2]
            text = {"annotations": [], "text": message["content"], "type": "output_text"}
            item = {"id": "msg", "content": [text], "role": "assistant", "type": "message"}
            if with_ids:
                item["prompt_token_ids"] = turn["prompt_ids"]
                item["generation_token_ids"] = turn["sampled_ids"]
                item["generation_log_probs"] = [-0.1] * len(turn["sampled_ids"])
            output.append(item | {"status": "completed"})
        rows.append(
            {
                "responses_create_params": {"input": [first | {"type": "message"}], "tools": []},
                "response": {"id": "resp", "model": "tiny", "object": "response", "output": output},
                "reward": total(record),
                "_ng_task_index": record["group"],
                "_ng_rollout_index": index,
                "agent_ref": {"type": "responses_api_agents", "name": "simple"},
            }
        )
    return write(folder / "rollouts.jsonl", rows)


def nemo_rl(folder, records, tokenizer):
    """Right-padded to the longest row; each value is a list of one."""
    found = [whole(record) for record in records]
    most = max(len(ids) for ids, _ in found)
    rows = [
        {
            "content": [tokenizer.decode(ids)],
            "rewards": [total(record)],
            "input_lengths": [len(ids)],
            "token_ids": [ids + [0] * (most - len(ids))],
            "token_loss_mask": [mask + [0] * (most - len(ids))],
            "sample_loss_mask": [1.0],
            "advantages": [[0.5] * most],
            "generation_logprobs": [[-0.1] * most],
            "prev_logprobs": [[-0.1] * most],
            "idx": index,
        }
        for index, (record, (ids, mask)) in enumerate(zip(records, found, strict=True))
    ]
    return write(folder / "train_data_step1.jsonl", rows)


def token_exports(folder, records, tokenizer):
    """Two processes; the rows of the first half are of the first."""
    for rank in range(2):
        rows = []
        half = len(records) // 2
        for index, record in enumerate(records[rank * half : (rank + 1) * half]):
            ids, mask = whole(record)
            rows.append(
                {
                    "schema_version": 1,
                    "step": 1,
                    "export_step": 1,
                    "rank": rank,
                    "micro_sequence_idx": index,
                    "token_ids": ids,
                    "position_ids": list(range(len(ids))),
                    "loss_mask": [bool(each) for each in mask],
                    "rewards": [total(record)] * len(ids),
                    "inference_logprobs": [-0.1] * len(ids),
                }
            )
        path = folder / f"run/token_exports/step_1/rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, rows)
        (path.parent / "STABLE").touch()
    return folder / "run/token_exports"


def skyrl(folder, records, tokenizer):
    rows = []
    for record in records:
        ids, _ = whole(record)
        start = len(record["turns"][0]["prompt_ids"])
        rewards = [0.0] * (len(ids) - start)
        rewards[-1] = total(record)
        rows.append(
            {
                "input_prompt": tokenizer.decode(ids[:start]),
                "output_response": tokenizer.decode(ids[start:]),
                "score": rewards,
                "stop_reason": "stop",
                "env_class": "sokoban",
                "env_extras": {"extra_info": {"index": 1}},
                "data_source": "rooms",
            }
        )
    path = folder / "dumped_evals/global_step_1_evals/rooms.jsonl"
    path.parent.mkdir(parents=True)
    write(path, rows)
    write(path.with_name("aggregated_results.jsonl"), [{"eval/all/avg_score": 0.5}])
    return folder / "dumped_evals"


def rllm(folder, records, tokenizer):
    for index, record in enumerate(records):
        messages, steps = conversation(record, tokenizer), []
        for place, turn in enumerate(record["turns"]):
            said = messages[2 * place + 1]
            steps.append(
                {
                    "observation": messages[2 * place]["content"],
                    "thought": "",
                    "action": None,
                    "reward": turn["reward"],
                    "done": place == len(record["turns"]) - 1,
                    "model_response": said["content"],
                    "chat_completions": messages[: 2 * place + 2],
                    "timing": {},
                }
            )
        trajectory = {"name": "solver", "uid": "u", "reward": total(record), "steps": steps}
        episode = {
            "training_step": 1,
            "epoch": 0,
            "episode_id": f"{record['group']}:{index}",
            "task": {"room": record["group"]},
            "task_hash": f"{record['group']:08x}",
            "is_correct": record["success"],
            "termination_reason": "env_done",
            "metrics": {},
            "trajectories": [trajectory],
        }
        for mode in ("train", "val") if index == 0 else ("train",):
            path = folder / f"episodes/{mode}_step_1_epoch_0/episode_hash{index:03}_id{index}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(episode, indent=2) + "\n")
    (folder / "episodes/train_step_1_epoch_0/batch_summary.json").write_text("{}")
    return folder / "episodes"


def slime_samples(records):
    """The samples of slime's pickle, as dicts."""
    for record in records:
        ids, mask = whole(record)
        start = len(record["turns"][0]["prompt_ids"])
        yield {
            "group_index": record["group"],
            "prompt": "?",
            "tokens": ids,
            "response": "?",
            "response_length": len(ids) - start,
            "reward": total(record),
            "loss_mask": mask[start:],
            "status": "completed",
            "rollout_log_probs": [-0.1] * (len(ids) - start),
            "metadata": {},
        }


def slime(folder, records, tokenizer):
    kept = ("group_index", "tokens", "response_length", "loss_mask", "reward", "status")
    rows = [
        {"step": 1} | {name: sample[name] for name in kept} for sample in slime_samples(records)
    ]
    path = write(folder / "P1.jsonl", rows)
    packed = folder / "P1.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def openenv(folder, records, tokenizer):
    """A document for each session; the harness's own calls are auxiliary."""
    rows = []
    for record in records:
        ids, mask = whole(record)
        agent = {"role": "agent", "input_ids": ids, "loss_mask": mask, "trainable": True}
        title = {"role": "auxiliary", "input_ids": [5, 6], "loss_mask": [0, 1]}
        rows.append(
            {
                "session_id": "s",
                "metadata": {},
                "turns": [{"node_id": "n", "index": 0, "n_sampled": 3}],
                "sequences": [title, agent | {"n_turns": len(record["turns"])}],
                "trainable": True,
            }
        )
    return write(folder / "captures.jsonl", rows)


def atif_text(folder, records, tokenizer):
    return harbor(folder, records, tokenizer, with_ids=False)


def nemo_gym_text(folder, records, tokenizer):
    return nemo_gym(folder, records, tokenizer, with_ids=False)


def chat_log(records, tokenizer):
    for record in records:
        messages = conversation(record, tokenizer)
        yield {"messages": messages, "reward": total(record), "success": record["success"]}


def lines(writer):
    """A writer of one file of lines."""

    def write_lines(folder, records, tokenizer):
        return write(folder / "1.jsonl", writer(records, tokenizer))

    return write_lines


# {name: (writer, the format's name, whether it keeps token ids, what no row records)}
WRITERS = {
    "atif": (harbor, "ATIF", True, "success"),
    "atif_text": (atif_text, "ATIF", False, "success"),
    "nemo_gym": (nemo_gym, "NeMo-Gym", True, "success"),
    "nemo_gym_text": (nemo_gym_text, "NeMo-Gym", False, "success"),
    "nemo_rl": (nemo_rl, "NeMo-RL", True, "success or group"),
    "token_exports": (token_exports, "token-export", True, "success or group"),
    "skyrl": (skyrl, "SkyRL", False, "success or group"),
    "rllm": (rllm, "rLLM", False, ""),
    "slime": (slime, "slime", True, "success"),
    "openenv": (openenv, "OpenEnv", True, "reward, success or group"),
    "verl": (lines(trainer_formats.verl), "verl", False, "group"),
    "trl": (lines(trainer_formats.trl), "TRL", False, "group"),
    "chat_log": (lines(chat_log), "chat-log", False, "group"),
    "plain": (lines(trainer_formats.plain), "plain", False, "group"),
    "verifiers": (lines(trainer_formats.verifiers), "verifiers", False, ""),
    "prime_rl": (lines(trainer_formats.prime_rl), "prime-rl", True, ""),
    "ragen": (lines(trainer_formats.ragen), "RAGEN", False, ""),
}
