"""Short runs of random models with layers of other kinds."""

from ragen_jax import train
from ragen_jax.storage.metrics_reader import read_metrics


def short_run(agent, directory):
    """The config of a run of the model in a directory: full history over three turns."""
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(directory)
    config.env.update(max_turns=3, max_actions=6, context="full")
    config.rollout.update(groups=2, group_size=4, save_every=0)
    config.optimizer.update(minibatches=2, micro_batch=4, warmup_updates=0)
    config.filter.strategy = "none"
    config.diagnose.every = config.eval.every = config.report.every = 0
    config.checkpoint.update(every=0, export=False)
    config.log.trackers = ()
    return config


def rows(config, workdir, **changes):
    """The rows of the steps of a run with changed fields, without times."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    assert train.train(config, workdir) == 0
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        for row in read_metrics(workdir / "metrics.jsonl")
        if row["step"] > 0
    ]
