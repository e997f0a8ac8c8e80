"""A program in place of the process that tunes: `fake_child.py RESULT CANDIDATE`, a JSON text and a file to offer, or `-`.

With the result `null` it fails as without a database; with `"dies"` it ends by a signal.
"""

import json
import os
import shutil
import signal
import sys

order = json.loads(sys.stdin.buffer.readline())
result = json.loads(sys.argv[1])
with open(order["profile"]) as file:
    assert json.load(file)["format"] == "relax-tune shapes"
assert order["sizes"] and os.path.exists(order["artifact"])
if result == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if result is None:
    print(json.dumps({"error": "the database is away"}), flush=True)
    sys.exit(4)
if sys.argv[2] != "-":
    shutil.copy(sys.argv[2], order["out"])
print(json.dumps({"result": result}), flush=True)
