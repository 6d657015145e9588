"""Recipes for the filters of RAGEN-2's ablations (tables 7 and 9)."""

FILTERS = {
    "filter": {"filter.strategy": "top_p", "filter.value": 0.9},
    "no_filter": {"filter.strategy": "none"},
    **{
        f"top_p-{value}": {"filter.strategy": "top_p", "filter.value": value}
        for value in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
    },
    **{
        f"min_p-{value}": {"filter.strategy": "min_p", "filter.value": value}
        for value in (0.05, 0.2)
    },
    **{
        f"top_k-{value}": {"filter.strategy": "top_k", "filter.value": value}
        for value in (0.25, 0.5)
    },
    **{
        f"by_{metric}": {"filter.strategy": "top_p", "filter.value": 0.9, "filter.metric": metric}
        for metric in ("reward_std", "reward_sum", "entropy", "entropy_variance", "length")
    },
    "smallest": {"filter.strategy": "top_p", "filter.value": 0.9, "filter.keep": "smallest"},
    # Control experiment: the same number of groups as with top-p, but drawn at random.
    "random_groups": {
        "filter.strategy": "top_p",
        "filter.value": 0.9,
        "filter.at_random": True,
    },
    # The best quarter and the worst quarter of every group (table 7).
    "members": {
        "filter.strategy": "none",
        "filter.top_members": lambda config: config.rollout.group_size // 4,
        "filter.bottom_members": lambda config: config.rollout.group_size // 4,
    },
}
