"""Ask for known vulnerabilities of everything that locks pin: `python .ci/audit.py LOCK...`, in an environment with pip-audit.

Exit status: 0 when all pins were looked up and nothing is known, 1 for a vulnerability, 3 where pins could not be looked up. pip-audit
itself calls a pin fine that its service does not know, as a mirror without that service answers for all of them.
"""

import json
import subprocess
import sys


def main(locks: list[str]) -> int:
    """Audit each lock, print what was found, and return the worst status."""
    statuses = {lock: audit(lock) for lock in locks}
    return max(statuses.values(), key=(0, 3, 1).index)


def audit(lock: str) -> int:
    """Audit one lock."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--disable-pip",
        "--require-hashes",
        "--progress-spinner",
        "off",
        "--format",
        "json",
    ]
    done = subprocess.run([*command, "--requirement", lock], capture_output=True, text=True)
    try:
        pins = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        print(
            f"{lock}: not audited: expected an answer of the vulnerability service, got {reason:.300}; try again where it is reached"
        )
        return 3
    skipped = [pin["name"] for pin in pins if "skip_reason" in pin]
    known = [(pin, one) for pin in pins for one in pin.get("vulns", ())]
    for pin, one in known:
        mended = ", ".join(one["fix_versions"]) or "no version"
        print(
            f"{lock}: {pin['name']} {pin['version']}: {one['id']}, mended in {mended}; raise the floor and `make lock`"
        )
    if skipped:
        print(
            f"{lock}: {len(skipped)} of {len(pins)} packages not audited: the vulnerability service does not know {', '.join(skipped[:3])}"
            f"{', ...' * (len(skipped) > 3)}; a mirror may lack the service: try again where the package index itself is reached"
        )
    if not known and not skipped:
        print(f"{lock}: {len(pins)} packages, no known vulnerability")
    return 1 if known else 3 if skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
