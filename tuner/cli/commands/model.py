"""`relax-tune model ...`: train the prior from a database, and judge it on what it was not trained on.

Tests: `tests/tuner/cli/test_cli.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.hashed_zip import tool_version
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.cli.app import COMMANDS, examples
from relax_tune.tuner.cli.commands.db import open_for
from relax_tune.tuner.cli.commands.options import Database, Json, print_json, setting_option
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.learn.prior import GroupKey, Prior, PriorRows, evaluate, recorded_rows
from relax_tune.tuner.report.subject import Section, Subject, table
from relax_tune.tuner.settings import load_settings

app = typer.Typer(
    help="Train a cost model for kernels without measurements.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=examples(*COMMANDS["model"].examples),
)
Target = Annotated[str | None, setting_option("target")]
GROUPS: dict[str, Callable[[GroupKey], str]] = {"workload": lambda key: key[1], "target": lambda key: key[0]}


def _read(db: str | None, target: str | None) -> tuple[PriorRows, HardwareInfo]:
    info = device_info(load_settings({"target": target}).target)
    with open_for(db) as store:
        return recorded_rows(store, info), HardwareInfo.from_limits(info.kind, dict(info.limits))


@app.command(epilog=examples("relax-tune model train --out team.prior"))
def train(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")],
    target: Target = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Train a prior on the records of all processors, or of all GPUs, for `build --prior`."""
    rows, hardware = _read(db, target)
    about = {"tool": tool_version(), "rows": len(rows.log_time), "groups": len(rows.keys)}
    about |= {what + "s": len({part(k) for k in rows.keys}) for what, part in GROUPS.items()}
    prior = Prior.train(rows, hardware, about)
    prior.save(out)
    if json:
        print_json({"file": str(out), "bytes": out.stat().st_size, **about})
        return
    say(
        make_console(),
        f"{out}: {out.stat().st_size:,} bytes, of {', '.join(f'{v} {k}' for k, v in about.items() if k != 'tool')}",
    )


@app.command("evaluate", epilog=examples("relax-tune model evaluate --target c --db sqlite:///records.db"))
@view
def judge(target: Target = None, db: Database = None) -> Subject:
    """Judge priors on workloads and on devices that they were not trained on.

    Each is trained without a fifth of the workloads, or without a device, and orders the candidates of those. Regret is the
    time of the best among the first 1, 4 or 16 candidates of the prior over the best recorded time, minus 1.
    """
    rows, hardware = _read(db, target)
    errors = {}
    for what, part in GROUPS.items():
        if len({part(k) for k in rows.keys}) > 1:
            errors[what] = evaluate(rows, lambda r: Prior.train(r, hardware), part)
    if not errors:
        raise UserError(
            "expected records of two workloads or devices, to leave one out, got records of only one; tune more"
        )
    document = {
        what: {"groups": r.groups, "rank": r.rank, "regret": dict(r.regret), "worst": r.worst}
        for what, r in errors.items()
    }
    rows_shown = [
        [what, str(r.groups), f"{r.rank:.2f}", *(f"{r.regret[k]:.1%}" for k in (1, 4, 16)), f"{r.worst:.0%}"]
        for what, r in errors.items()
    ]
    columns = ("left out", "groups", "rank", "regret@1", "regret@4", "regret@16", "worst@1")
    return Subject("Judged priors", (Section("errors", tables=(table(columns, rows_shown),)),), document)
