"""Recipes for the algorithms of RAGEN-2's main table (table 4) and for newer algorithms.

Fields that a recipe does not set keep the paper's values (configs/base.py): clip 0.2 / 0.28,
token-mean, entropy 0.001, KL 0.001, filter top-p 0.9.
"""

_PPO = {"algorithm.name": "ppo", "algorithm.gamma": 1.0, "algorithm.lam": 1.0}

ALGORITHMS = {
    "ppo": _PPO,
    "bi_level_ppo": {**_PPO, "algorithm.bi_level": True},
    "grpo": {"algorithm.name": "grpo"},
    # Liu et al., arXiv 2503.20783: no division by the group's std or by the row's length. The loss
    # is a sum over the kept rows, so it is already linear in the keep rate (filter.loss_scales).
    "dr_grpo": {"algorithm.name": "dr_grpo", "algorithm.aggregation": "seq-mean-token-sum-norm"},
    "rloo": {"algorithm.name": "rloo"},
    # Hu, arXiv 2501.03262: KL in the reward.
    "reinforce_plus_plus": {
        "algorithm.name": "reinforce_plus_plus",
        "algorithm.kl_in": "reward",
        "algorithm.kl_kind": "k1",
    },
    "reinforce_plus_plus_baseline": {"algorithm.name": "reinforce_plus_plus_baseline"},
    # Yu et al., arXiv 2503.14476: clip-higher and token-mean (both in base.py), no KL, and groups
    # without variance are sampled anew. A quarter is added to the reply's token budget, and replies
    # that use this last fifth of the new budget are penalised.
    "dapo": {
        "algorithm.name": "grpo",
        "algorithm.kl_coef": 0.0,
        "collect.max_rounds": 3,
        "filter.strategy": "top_p",
        "filter.value": 1.0,
        "filter.loss_scale": "none",
        "reward.overlong_buffer": lambda config: max(config.rollout.max_new_tokens // 4, 1),
        "rollout.max_new_tokens": lambda config: (
            config.rollout.max_new_tokens + config.reward.overlong_buffer
        ),
    },
    # PPO (and, nearly, DAPO) as in the released code's script for the main table: softmax over
    # stds, which cannot reject a batch; no loss scale, no KL.
    "ppo_released": {
        **_PPO,
        "algorithm.kl_coef": 0.0,
        "filter.metric": "reward_std",
        "filter.mode": "softmax",
        "filter.include_zero": True,
        "filter.loss_scale": "none",
    },
    # Zheng et al., arXiv 2507.18071, section 5.1.
    "gspo": {
        "algorithm.objective": "gspo",
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.clip_c": 0.0,
    },
    # MiniMax-M1, arXiv 2506.13585: no lower bound.
    "cispo": {"algorithm.objective": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_c": 0.0},
    # On-policy distillation (Agarwal et al., arXiv 2306.13649): the exact reverse KL to a teacher,
    # algorithm.kl_reference, on the student's own rollouts, without any reward. A group of one is
    # enough.
    "distill": {
        "algorithm.name": "distill",
        "algorithm.kl_coef": 1.0,
        "algorithm.kl_kind": "exact",
        "algorithm.entropy_coef": 0.0,
        "filter.strategy": "none",
    },
    # Sheng et al., arXiv 2602.03452: a hard and an easy prompt, of which only the rare outcomes
    # count (algorithm/pairs.py). The paper trains on a single pair.
    "weighted_grpo": {
        "algorithm.name": "weighted_grpo",
        "filter.strategy": "pairs",
        "filter.value": 1.0,
        "filter.metric": "reward_mean",
        "filter.include_zero": True,
    },
    # Rejection sampling, Dong et al., arXiv 2304.06767: fine-tuning on the best members of each
    # group. With objective=ppo it is the RAFT++ of Xiong et al., arXiv 2504.11343.
    "raft": {
        "algorithm.name": "raft",
        "algorithm.objective": "reinforce",
        "algorithm.clip_c": 0.0,
        "algorithm.kl_coef": 0.0,
        "algorithm.entropy_coef": 0.0,
    },
}
