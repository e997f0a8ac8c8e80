"""A program in place of the process of a job: `fake_child.py LEDGER`; the job's name says what it does.

It writes the id of each job that it ends to LEDGER, one a line. The unit is as fast as in the records if LEDGER.fast exists.
"""

import json
import os
import sys
import threading
import time


def end_with_service() -> None:
    while os.read(0, 4096):
        pass
    os._exit(130)


order = json.loads(sys.stdin.buffer.readline())
threading.Thread(target=end_with_service, daemon=True).start()
kind = order["name"]
print(f"log of {kind}", file=sys.stderr, flush=True)
print(json.dumps({"progress": {"trials": 1, "of": 2}}), flush=True)
if kind == "later":
    print(json.dumps({"error": "the scheduler is away"}), flush=True)
    sys.exit(4)
if kind == "compared" and not os.path.exists(sys.argv[1] + ".fast"):
    print(json.dumps({"target": "0" * 64}), flush=True)
    print(json.dumps({"error": "expected a unit as fast as in the records"}), flush=True)
    sys.exit(5)
if kind == "wrong":
    print(json.dumps({"error": "expected another model"}), flush=True)
    sys.exit(2)
if kind == "broken":
    print(json.dumps({"error": "KeyError: 'workers'"}), flush=True)
    sys.exit(1)
if kind == "crash":
    os.abort()
if kind == "endless":
    time.sleep(600)
if kind == "loud":
    sys.stderr.write("x" * 70_000 + "\n\0" + "y" * 6_000_000)
time.sleep(0.05)
with open(sys.argv[1], "a") as ledger:
    ledger.write(order["id"] + "\n")
print(json.dumps({"result": {"artifact": "0" * 64, "settings": order["given"]}}), flush=True)
