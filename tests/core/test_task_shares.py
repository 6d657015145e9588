"""task_shares.py: the groups and metrics of two environments, and the figures over both."""

import types

import numpy as np
import pytest

from ragen_jax.core.task_shares import (
    Part,
    combine_metrics,
    concatenate_episodes,
    label_metrics,
    measure_each,
    metrics_of_each,
    split_groups,
)
from ragen_jax.core.types import Episode

pytestmark = pytest.mark.fast

ONE = (Part("", 3),)
TWO = (Part("lake", 2), Part("sums", 1))


def test_arrays_are_split_by_groups():
    """Arrays with an entry per group, and arrays with several entries per group."""
    found = list(split_groups(TWO, "abcdef", np.array([1.0, 2.0, 3.0])))
    assert [(part, share) for part, share, _ in found] == [(TWO[0], "abcd"), (TWO[1], "ef")]
    assert [x.tolist() for *_, x in found] == [[1.0, 2.0], [3.0]]
    ((part, share),) = split_groups(ONE, "abcdef")
    assert part == ONE[0] and share == "abcdef"


def test_group_numbers_continue():
    def episodes(*groups):
        return [Episode(seed=g, group=g, member=0, turns=(), success=False) for g in groups]

    found = concatenate_episodes([episodes(0, 0, 1), [], episodes(0, 1), episodes(0)])
    assert [e.group for e in found] == [0, 0, 1, 2, 3, 4]
    assert [e.seed for e in found] == [0, 0, 1, 0, 1, 0]
    assert concatenate_episodes([]) == []


def test_labels_come_after_the_first_word():
    metrics_E = [{"rollout/success": 1.0, "a/b/c": 2.0}, {"rollout/success": 3.0}]
    assert label_metrics(TWO, metrics_E) == {
        **{"rollout/lake/success": 1.0, "a/lake/b/c": 2.0},
        **{"rollout/sums/success": 3.0},
    }
    assert label_metrics(ONE, metrics_E[:1]) == {}


def test_each_part_is_measured_on_its_share():
    def measure(values, scale_G):
        return {"x/sum": sum(values) * scale_G[0], "x/count": len(values)}

    found = measure_each(TWO, measure, [1, 2, 3, 4, 5, 6], [10, 20, 30])
    assert found == {
        **{"x/lake/sum": 100, "x/lake/count": 4},
        **{"x/sums/sum": 330, "x/sums/count": 2},
    }
    assert measure_each(ONE, measure, [1, 2, 3], [10, 20, 30]) == {}


def test_figures_of_both_environments_by_hand():
    lake = {"x/success": 0.2, "x/success_ci95": 0.3, "x/mi_p": 0.01, "x/lake_only": 7.0}
    sums = {"x/success": 0.6, "x/success_ci95": 0.4, "x/mi_p": 0.5}
    found = combine_metrics(TWO, [lake, sums])
    both = {name: value for name, value in found.items() if name.count("/") == 1}
    # The half-width of the mean of two independent figures: sqrt(0.3^2 + 0.4^2) / 2.
    assert both == pytest.approx({"x/success": 0.4, "x/success_ci95": 0.25, "x/lake_only": 7.0})
    assert {k: v for k, v in found.items() if k not in both} == label_metrics(TWO, [lake, sums])


def test_a_mean_over_a_figure_without_an_interval_has_none():
    lake, sums = {"x/mi": 1.0, "x/mi_ci95": 0.1}, {"x/mi": 3.0}
    assert "x/mi_ci95" not in combine_metrics(TWO, [lake, sums])
    # An environment that lacks the figure does not count.
    assert combine_metrics(TWO, [lake, {}])["x/mi_ci95"] == pytest.approx(0.1)


def test_a_single_environment_keeps_its_p_values():
    assert combine_metrics(ONE, [{"x/mi_p": 0.25}]) == {"x/mi_p": 0.25}


def test_labels_are_taken_off_again():
    metrics_E = [{"a/x": 1.0, "b/x/y": 2.0}, {"a/x": 3.0}]
    row = combine_metrics(TWO, metrics_E) | {"step": 4, "a/lakes/x": 5.0}
    assert metrics_of_each(TWO, row) == metrics_E
    assert metrics_of_each(ONE, row) == [row]


def test_a_task_can_take_the_place_of_a_part():
    tasks = [types.SimpleNamespace(label=part.label, groups=part.groups) for part in TWO]
    assert [share for _, share in split_groups(tasks, "abc")] == ["ab", "c"]
