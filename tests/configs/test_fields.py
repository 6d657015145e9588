"""Every field of configs/base.py has a test that changes it and checks its documented effect."""

from pathlib import Path

import pytest
import test_fields_learn
import test_fields_run
import test_fields_start
import test_fields_watch
from field_entries import Entry, check_entry

from ragen_jax.config.fields import FIELDS, leaves
from ragen_jax.configs import base

pytestmark = pytest.mark.fast

ENTRIES = (
    test_fields_learn.ENTRIES,
    *(test_fields_run.RUNS, test_fields_run.DRAWS, test_fields_run.VISITS),
    *(test_fields_start.MESHES, test_fields_start.MODEL, test_fields_start.ATTENTION),
    test_fields_start.WARMSTART,
    *(test_fields_watch.STOPPING, test_fields_watch.REGIMES),
)
# Fields that other tests change.
ELSEWHERE = {
    "algorithm.kl_reference": "run/test_distill.py: test_a_student_comes_closer_to_its_teacher",
    "log.trackers": "test_train.py: test_resuming_gives_the_numbers_of_an_uninterrupted_run",
    "also": "run/test_tasks.py: test_two_environments_train_resume_and_evaluate",
    "env.time_limit": "envs/test_contract.py: test_what_hangs_costs_its_episodes_alone",
    "env.workers": "envs/test_contract.py: test_as_many_wait_at_a_time_as_there_are_workers",
    "env.max_error_share": "envs/test_contract.py: test_a_run_stops_where_too_much_breaks",
    "rollout.cache_kernel": "preflight/test_preflight.py: "
    "test_the_kernel_for_pages_compiles_without_copies_of_them",
    "rollout.replay_experts": "rollout/test_routes.py: "
    "test_every_token_that_is_read_has_its_experts",
    "env.strict_format": "rollout/test_chat.py: test_text_after_an_answer",
    "model.date": "configs/test_fields_start.py: test_model_date",
    "model.path": "configs/test_fields_start.py: test_model_path",
    "warmstart.options": "run/test_imitate.py: "
    "test_an_agent_may_be_taught_in_another_world_than_it_is_trained_in",
    "warmstart.fine_tune": "run/test_fine_tune.py: test_training_starts_from_the_fine_tuned_model",
    "warmstart.demonstrations": "run/test_chat_files.py: test_a_model_imitates_a_file",
    "warmstart.schedule": "run/test_fine_tune.py: test_the_learning_rate_follows_its_schedule",
    "warmstart.warmup_updates": "run/test_fine_tune.py: "
    "test_the_learning_rate_follows_its_schedule",
    "model.lora.tower": "test_train_seeing.py: "
    "test_a_tower_learns_by_adapters_resumes_and_is_exported",
    "optimizer.micro_batch": "configs/test_fields_learn.py: test_micro_batch",
    "diagnose.probe_faithfulness": "diagnostics/test_faithfulness.py: "
    "test_a_probe_measures_faithfulness_if_asked",
    "lab.teacher_styles": "run/test_distill.py: "
    "test_a_teacher_of_the_warm_start_imitates_its_own_styles",
    "lab.hidden_prompts": "run/test_demonstrations.py: "
    "test_an_agent_learns_to_answer_from_its_reasoning_alone",
    "algorithm.imitate_every": "run/test_interleave.py: "
    "test_every_second_step_imitates_and_a_resumed_run_gives_the_same_numbers",
    "lab.sampler_weights": "run/test_stages.py: "
    "test_episodes_are_sampled_with_rounded_weights_if_asked",
}


def test_every_field_is_changed_somewhere():
    for place in ELSEWHERE.values():
        path, test = place.split(": ")
        assert f"def {test}(" in (Path(__file__).parents[1] / path).read_text()
    changed = {name for entries in ENTRIES for name in entries} | set(ELSEWHERE)
    assert changed == set(leaves(base.get_config())) == set(FIELDS)


def test_an_entry_is_red_where_the_field_is_not_read():
    """An entry fails as well if its claim holds for any outcome."""
    entry = Entry(7, lambda before, after: (before, after) == (0, 7))
    check_entry("seed", entry, lambda config, given: config.seed)
    with pytest.raises(AssertionError):
        check_entry("seed", entry, lambda config, given: 0)
    with pytest.raises(AssertionError):
        check_entry("seed", Entry(7, lambda *_: True), lambda config, given: config.seed)
    with pytest.raises(AssertionError):  # the changed value equals the default
        check_entry("seed", Entry(0, lambda *_: True), lambda config, given: config.seed)
    unread = Entry(0.5, lambda a, b: a != b)  # this run has no critic
    with pytest.raises(AssertionError):
        check_entry("algorithm.lam", unread, lambda config, given: config.algorithm.lam)
