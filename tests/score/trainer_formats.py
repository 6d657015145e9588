"""Our rollouts in the formats that other trainers' writers produce."""

import json


def read(path):
    return [json.loads(line) for line in open(path)]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def verl(records, tokenizer, step=1):
    """verl, _dump_generations: decoded without special tokens."""

    def text(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    for record in records:
        (turn,) = record["turns"]
        yield {
            "input": text(turn["prompt_ids"]),
            "output": text(turn["sampled_ids"]),
            "gts": None,
            "score": turn["reward"],
            "step": step,
            "acc": record["success"],
        }


def trl(records, tokenizer, step=1):
    """TRL: a row of its Parquet table, with a column for each reward function."""
    for row in verl(records, tokenizer, step):
        half = row["score"] / 2
        yield {
            "step": step,
            "prompt": row["input"],
            "completion": row["output"],
            "reward_task": half,
            "format_reward": half,
            "success": row["acc"],
            "advantage": 0.1,
        }


def conversation(record, tokenizer):
    """The messages of an episode; replies omit the text that the prompt opens."""
    messages = []
    for turn in record["turns"]:
        shown = tokenizer.decode(turn["prompt_ids"]).split("<|im_start|>user\n")[-1]
        said = tokenizer.decode(turn["sampled_ids"]).removesuffix("<|im_end|>")
        messages.append({"role": "user", "content": shown.split("<|im_end|>")[0]})
        messages.append({"role": "assistant", "content": said})
    return messages


def verifiers(records, tokenizer):
    """verifiers, results.jsonl: the first message is the prompt, the others are the completion."""
    for record in records:
        first, *others = conversation(record, tokenizer)
        yield {
            "example_id": record["group"],
            "prompt": [first],
            "completion": others,
            "reward": sum(turn["reward"] for turn in record["turns"]),
            "success": record["success"],
            "timing": {"total_ms": 1.0},
            "metrics": {},
        }


def prime_rl(records, tokenizer):
    """prime-rl, traces.jsonl: an episode of verifiers as a graph of messages with token ids."""
    for record in records:
        nodes, length = [], 0
        for turn in record["turns"]:
            ids, before = turn["prompt_ids"] + turn["sampled_ids"], turn["prompt_ids"][length:]
            parent = len(nodes) - 1 if nodes else None
            nodes.append(
                {
                    "parent": parent,
                    "message": {"role": "user", "content": "-"},
                    "token_ids": before[:-1],
                    "mask": [False] * len(before[:-1]),
                }
            )
            nodes.append(
                {
                    "parent": len(nodes) - 1,
                    "message": {"role": "assistant", "content": "-"},
                    "sampled": True,
                    "token_ids": before[-1:] + turn["sampled_ids"],
                    "mask": [False] + [True] * len(turn["sampled_ids"]),
                }
            )
            length = len(ids)
        reward = sum(turn["reward"] for turn in record["turns"])
        yield {
            "id": "7f",
            "task": {"type": "Task", "data": {}},
            "group": {"id": f"g{record['group']}"},
            "run": {"step": 1},
            "ok": True,
            "success": record["success"],
            "traces": [{"nodes": nodes, "rewards": {"task": {"score": reward * 2, "weight": 0.5}}}],
        }


def ragen(records, tokenizer):
    """RAGEN, _save_as_jsonl."""
    for index, record in enumerate(records):
        yield {
            "custom_id": f"traj_{index}",
            "messages": conversation(record, tokenizer),
            "metadata": {
                "env_id": index,
                "group_id": record["group"],
                "num_turns": len(record["turns"]),
                "total_reward": sum(turn["reward"] for turn in record["turns"]),
                "success": record["success"],
            },
        }


def plain(records, tokenizer):
    """{"prompt", "response"} as text with control tokens."""
    for record in records:
        (turn,) = record["turns"]
        yield {
            "prompt": tokenizer.decode(turn["prompt_ids"]),
            "response": tokenizer.decode(turn["sampled_ids"]),
            "reward": turn["reward"],
            "success": record["success"],
        }


SINGLE = {"verl": verl, "trl": trl, "plain": plain}  # formats that hold a single reply
SEVERAL = {"verifiers": verifiers, "prime_rl": prime_rl, "ragen": ragen}
