"""Speaks as envs/verifiers_tasks/worker.py does, without the package `verifiers`.

A task is played as its text says. The file STATE counts the starts.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

STATE = Path(os.environ["STAND_IN_STATE"])
KINDS = ["fine", "late", "fails", "dies", "hangs", "waits"]


def main():
    STATE.write_text(STATE.read_text() + "x")
    asked = json.loads(sys.stdin.readline())
    if asked["taskset"] == "broken":
        print(json.dumps({"error": "ValueError: it is\nbroken"}), flush=True)
        return
    if asked["taskset"] == "silent":
        sys.exit("no luck")
    kinds = [asked["arguments"].get("kind") or kind for kind in KINDS for _ in range(5)]
    if asked["taskset"] == "changing":
        kinds[0] += str(len(STATE.read_text()))
    tasks = [[kind, f"{kind} {number}"] for number, kind in enumerate(kinds)]
    print(json.dumps({"tasks": tasks}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "cancel" in request:
            print(json.dumps({"id": request["cancel"], "error": "given up"}), flush=True)
            continue
        kind = tasks[request["task"]][0]
        answer = {"id": request["id"], "reward": 1, "info": {"key": request["api_key"]}}
        if kind == "dies":
            sys.exit("it died")
        if kind == "hangs":
            time.sleep(60)
        if kind == "fails":
            answer = {"id": request["id"], "error": "RuntimeError: no"}
        if kind == "waits":
            continue
        delay = 0.3 if kind == "late" else 0.0
        threading.Timer(delay, print, [json.dumps(answer)], {"flush": True}).start()


if __name__ == "__main__":
    main()
