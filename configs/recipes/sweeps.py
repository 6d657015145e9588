"""Recipes for RAGEN-2's sweeps of three settings.

They are the regularisers (section 4), the numbers of groups and members (table 5) and the slip
rates (figure 9).
"""

SWEEPS = {
    **{
        f"entropy-{value}": {"algorithm.entropy_coef": value}
        for value in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
    },
    **{
        f"kl-{value}": {"algorithm.kl_coef": value}
        for value in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
    },
    **{
        f"groups-{groups}x{members}": {"rollout.groups": groups, "rollout.group_size": members}
        for groups, members in ((128, 1), (64, 2), (32, 4), (16, 8), (8, 16))
    },
    **{
        f"slip-{value}": {"env.options.slip": value}
        for value in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
    },
}
