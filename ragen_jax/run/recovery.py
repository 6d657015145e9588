"""What a start does about damage in a run's folder."""

from pathlib import Path

from ragen_jax.run import rows
from ragen_jax.run.checkpoint import newest, set_damaged_aside
from ragen_jax.whole import retried


def find_damage(workdir: Path, repair: bool) -> list[str]:
    """What is damaged in a run's folder and can be gone on without, a sentence each.

    Raises:
      ValueError: what cannot, or not without --repair.
    """
    told = set_damaged_aside(workdir / "checkpoints")
    path = workdir / "metrics.jsonl"
    if repair:
        told += rows.repair(path)
    lost = rows.lost_steps(rows.read_metrics(path), newest(workdir / "checkpoints"))
    if lost:
        listed = f"{path} lacks the rows of {len(lost)} steps ({', '.join(map(str, lost[:8]))}"
        listed += ", ...)" if len(lost) > 8 else ")"
        if not repair and not path.with_name(rows.SET_ASIDE).exists():
            raise ValueError(f"{listed}, which its checkpoint is behind; --repair goes on without")
        aside = path.with_name(rows.SET_ASIDE)
        retried(aside.touch, aside)  # the next start need not be told again
        told.append(listed)
    return told
