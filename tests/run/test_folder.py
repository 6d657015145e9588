"""folder.py: a run whose folder is renamed ends in one line, and nothing is written at the old
path."""

import re
import shutil

import pytest
from cli_commands import call

from ragen_jax.run.folder import FolderGone, open_folder
from ragen_jax.run.log import MetricsLog
from ragen_jax.storage.metrics_reader import read_metrics


@pytest.mark.fast
def test_a_folder_that_is_renamed_or_removed_is_noticed(tmp_path):
    path = tmp_path / "run"
    with open_folder(path) as folder:
        assert folder.require_path() == path and folder.explain_absence() is None
        path.rename(tmp_path / "other")
        with pytest.raises(FolderGone, match=re.escape(f"{path} was renamed to {tmp_path}/other")):
            folder.require_path()
        path.mkdir()  # another one
        assert folder.whereabouts() == tmp_path / "other"
        path.rmdir()
        path.symlink_to("other")  # as who moves a run to another disk does
        assert folder.require_path() == path
        path.unlink()
        (tmp_path / "other").rmdir()
        with pytest.raises(FolderGone, match="was removed or renamed while its run was active"):
            folder.require_path()


@pytest.mark.fast
def test_only_what_a_save_left_at_the_old_path_is_removed(tmp_path):
    path = tmp_path / "run"
    with open_folder(path) as folder:
        (path / "checkpoints").mkdir()
        folder.remove_stray_checkpoint()
        assert (path / "checkpoints").exists()  # the folder of the run itself
        path.rename(tmp_path / "other")
        folder.remove_stray_checkpoint()
        (path / "checkpoints" / "6").mkdir(parents=True)
        (path / "notes.txt").touch()  # somebody's
        folder.remove_stray_checkpoint()
        assert (path / "checkpoints" / "6").exists()
        (path / "notes.txt").unlink()
        folder.remove_stray_checkpoint()
        assert not path.exists() and (tmp_path / "other" / "checkpoints").exists()


WORDS = [
    *("--config.steps=4", "--config.eval.every=0", "--config.checkpoint.every=1"),
    *("--config.rollout.groups=2", "--config.rollout.group_size=2", "--config.report.every=0"),
    *("--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=4"),
    *(
        "--config.diagnose.every=1",
        "--config.rollout.save_every=1",
        "--config.diagnose.flow_every=0",
    ),
    *("--config.rollout.compact=False", "--config.checkpoint.export=False"),
]


@pytest.mark.long
@pytest.mark.parametrize("what", ["renamed", "removed"])
def test_a_run_whose_folder_goes_away_ends_in_one_line(agent, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    write = MetricsLog.write

    def interfere(self, step, metrics):
        row = write(self, step, metrics)
        if step == 3:
            (tmp_path / "run").rename("moved")
        if step == 3 and what == "removed":
            shutil.rmtree("moved")
        return row

    monkeypatch.setattr(MetricsLog, "write", interfere)
    words = [f"--config.model.path={agent.directory}", *WORDS]
    code, out, err = call("ragen_jax.train", "--workdir=run", *words)
    assert code == 4 and err.count("error: ") == 1 and "Traceback" not in err, err
    assert not (tmp_path / "run").exists()
    if what == "removed":
        assert "run was removed" in err and "no step is saved" in err
        return
    saved = re.search(
        r"run was renamed to (\S+) while .*; step (\d) is saved; resume with --workdir=\1$",
        err,
        re.M,
    )
    assert saved and saved[2] in "23" and saved[1] == str(tmp_path / "moved"), err
    monkeypatch.setattr(MetricsLog, "write", write)
    code, out, err = call("ragen_jax.train", "--workdir=moved")
    assert code == 0 and f"resuming moved after step {saved[2]}" in out, err
    assert [row["step"] for row in read_metrics(tmp_path / "moved/metrics.jsonl")] == [1, 2, 3, 4]
