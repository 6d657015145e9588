"""The experiment on tasks of reasoning-gym: in which does reasoning lose the question?"""

from ragen_jax.configs.experiments.experiment import FEWER_FILES, NONE, WARN_ONLY, Experiment

# Task -> level of its curriculum (0: the task's defaults). In tokens of the tiny agent, questions
# have at most 140 and demonstrations at most 60; each task has enough different held-out questions.
TASKS = {
    **dict.fromkeys(
        (
            *("base_conversion", "binary_alternation", "chain_sum", "color_cube_rotation"),
            *("complex_arithmetic", "count_bits", "lcm", "leg_counting", "number_sequence"),
            *("products", "simple_equations"),
        ),
        0,
    ),
    **dict.fromkeys(
        (
            *("aiw", "basic_arithmetic", "bitwise_arithmetic", "calendar_arithmetic"),
            *("count_primes", "decimal_chain_sum", "family_relationships", "gcd"),
            "letter_counting",
        ),
        1,
    ),
}

TASK_EXPERIMENTS = {
    "tasks": Experiment(
        question="In which tasks of reasoning-gym does an agent's reasoning become independent of "
        "the question, with and without an entropy bonus? What kinds of groups do the tasks have?",
        config="reasoning_gym:tiny",
        settings={
            task: {
                **{"env.options.task": task, "env.options.level": level},
                "env.options.settings": {},
            }
            for task, level in sorted(TASKS.items())
        },
        treatments={"bonus 0.05": NONE | {"algorithm.entropy_coef": 0.05}, "no bonus": NONE},
        seeds=(60,),
        common_fields={
            **{"steps": 40, "eval.every": 20, "eval.episodes": 256},
            **{"rollout.groups": 16, "rollout.max_new_tokens": 64},
            **{"optimizer.learning_rate": 2e-4, "optimizer.schedule": "constant"},
            **{"diagnose.every": 5, "diagnose.flow_every": 0, "diagnose.probe_every": 5},
            # The same number of imitation steps for all tasks, at any success.
            **{"warmstart.rooms": 4096, "warmstart.success": 0.0, "warmstart.check_every": 300},
            **FEWER_FILES,
            **WARN_ONLY,
        },
        doubt="These runs have one seed and an agent of 0.2 M parameters, which imitated reasoning "
        "that repeats the end of the question and the answer. More seeds, a reasoning style that "
        "leads to the answer, or a language model, if a task that keeps its information here then "
        "lost it.",
        minutes=2.0,
    ),
}
