"""Write rows to metrics.jsonl and trackers: FOLDER FIRST LAST NAMES END.

END is the exit code that the trackers receive, or "killed": the process then sends itself SIGKILL
right after its last row.
"""

import os
import signal
import sys
import time
from pathlib import Path

from ragen_jax.configs import base
from ragen_jax.run.log import MetricsLog
from ragen_jax.storage.trackers import require

folder, first, last, names, end = sys.argv[1:]
folder, names = Path(folder), names.split(",")
require(names)
log = MetricsLog(
    folder / "metrics.jsonl",
    last_step=int(first) - 1,
    trackers=names,
    config=base.get_config().to_dict(),
)
for step in range(int(first), int(last)):
    if end == "killed" and step == int(last) - 1:  # wait until the earlier rows have arrived
        while not all((folder / "trackers" / name).exists() for name in names):
            time.sleep(0.1)
        time.sleep(2.0)
    log.write(step, {"rollout/success": step / 7, "filter/kept_ratio": 1.0, "time/total": step})
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
log.close(int(end))
