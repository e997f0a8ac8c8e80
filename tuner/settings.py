"""Settings of a tuning job: declared once, read from flags, `RELAX_TUNE_*` variables and `relax-tune.toml`.

The file counts in full once the user allowed it (`allowed_files`). Before, its settings that `reaches_out` marks are refused.

The fields of `Settings` carry their declarations. The options of the commands, the keyword arguments of `rt.tune` and `rt.build`,
the keys of `relax-tune.toml` and the table of the settings page (`describe`) are made from them.
"""

# ruff: noqa: RUF009  (`option` gives a dataclass field)

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from relax_tune.errors import UserError
from relax_tune.tuner.allowed_files import is_allowed
from relax_tune.tuner.option import (
    BUILD,
    DEVICE,
    FLEET,
    MODEL,
    PROGRAM,
    SEARCH,
    TUNE,
    Command,
    Option,
    flag_of,
    option,
    variable_of,
)  # fmt: skip
from relax_tune.tuner.setting_values import (
    KINDS,
    PARSED,
    RENAMED_SETTINGS,
    check_value,
    has_password,
    renamed,
    text_of,
)

Effort = Literal["quick", "normal", "full"]
Policy = Literal["measured", "stored", "predicted", "library", "generic"]
Qkv = Literal["separate", "merged"]
AttentionForm = Literal["fused", "unfused"]
Precision = Literal["f32", "f16", "bf16"]
Activations = Literal["f32", "int8"]
Weights = Literal["stored", "bf16", "f16", "int8", "int4"]
Shapes = Literal["uniform", "profile"]
Caches = Literal["warm", "model"]
Logs = Literal["text", "json"]
Memory = Literal["symbolic", "constant", "inplace", "constant-inplace"]

FILE = "relax-tune.toml"
_FILE_BYTES = 1 << 20
# Candidates per task and per batch, anchors, and how long each shape is timed.
EFFORTS: Mapping[str, tuple[int, int, int, float]] = {
    "quick": (16, 8, 6, 0.02), "normal": (64, 8, 6, 0.05), "full": (256, 16, 8, 0.1),
}  # fmt: skip
STRATEGY_NAMES = ("evolution", "random", "grid", "optuna", "optuna-cmaes", "optuna-gp")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of tuning and building, one declaration per field."""

    target: str = option(
        "opencl",
        "c, opencl, cuda:NUMBER or webgpu, opencl: and webgpu: also with a PART of a device's name; `relax-tune devices` lists them. "
        "`tune` and `build` take several, separated by commas, for one program over all. `build` also takes c:aarch64 and "
        "other processors that are not at hand, and webgpu:browser by records of `tune --browser`; `tune` with a scheduler takes "
        "c:PART of a worker's processor.",
        commands=DEVICE,
        suggestions=("c", "opencl", "cuda", "webgpu"),
        metavar="DEVICE",
    )
    trust_model: bool = option(
        False,
        "Let torch read a .pt2 file that our reader refuses. It unpickles parts, so whoever wrote the file can run any program as you.",
        commands=("tune", "build", "plan", "show", "pack", "work", "report"),
        default="off",
        kind=bool,
        metavar="true|false",
        reaches_out=True,
    )
    db: str | None = option(
        None,
        "sqlite:///FILE (or a path that ends in .db) or postgresql://USER@HOST/NAME.",
        commands=(*MODEL, "pack", "install", "work", "dashboard"),
        default="records.db in the user data folder",
        metavar="URL",
        reaches_out=True,
    )
    files: str | None = option(
        None,
        "Where models and artifacts of submitted jobs are kept, by content: a folder that all machines share, or a URL of fsspec "
        "such as s3://BUCKET/FOLDER.",
        commands=("submit", "work"),
        default="beside a SQLite database, FILE.files; none for PostgreSQL",
        metavar="FOLDER",
        reaches_out=True,
    )
    effort: Effort = option(
        "normal",
        f"{', '.join(f'{name} {numbers[0]}' for name, numbers in EFFORTS.items())} candidates per task, timed at "
        f"{', '.join(str(numbers[2]) for numbers in EFFORTS.values())} shapes.",
        commands=PROGRAM,
        choices=tuple(EFFORTS),
    )
    trials: int | None = option(
        None, "Candidates per task.", commands=TUNE, kind=int, default="the effort's number", metavar="N"
    )
    budget: int | None = option(
        None,
        "Candidates of all tasks together, besides the generic, library and unfused forms.",
        commands=("tune", "install"),
        kind=int,
        default="what --trials gives; `install`: 200",
        metavar="N",
    )
    max_minutes: float | None = option(
        None,
        "Stop measuring after so long, and build from what is on record by then.",
        commands=TUNE,
        kind=float,
        default="no limit",
        metavar="MINUTES",
    )
    seed: int = option(0, "Seed of every random choice.", commands=BUILD, kind=int, metavar="N")
    strategy: str = option(
        "evolution", "Search strategy that proposes candidates.", commands=SEARCH, suggestions=STRATEGY_NAMES
    )
    scheduler: str | None = option(
        None,
        "Measure on the workers of this Dask scheduler, or show them: tls://127.0.0.1:8786 on this machine, tls://HOST:8786 with "
        "certificates elsewhere.",
        commands=FLEET,
        default="measure here",
        metavar="ADDRESS",
        reaches_out=True,
    )
    browser: str | None = option(
        None,
        "Measure target webgpu in a page that a browser opens here: 127.0.0.1:8790, or this machine's address in its network, with TLS.",
        commands=("tune",),
        default="measure here",
        metavar="HOST:PORT",
        reaches_out=True,
    )
    wait_secs: int = option(
        60,
        "How long to wait for a database server, a scheduler, a worker or a page that is away, at the start and later; then exit code 4.",
        commands=(*SEARCH, "work", "report", "dashboard"),
        kind=int,
        metavar="SECONDS",
    )
    ca: str | None = option(
        None,
        "The authority that all sides trust, for tls:// addresses.",
        commands=FLEET,
        default="no TLS",
        metavar="FILE.pem",
        reaches_out=True,
    )
    certificate: str | None = option(
        None, "Our certificate.", commands=FLEET, default="no TLS", metavar="FILE.pem", reaches_out=True
    )
    key: str | None = option(
        None,
        "The certificate's key, readable by its owner only.",
        commands=FLEET,
        default="no TLS",
        metavar="FILE.key",
        reaches_out=True,
    )
    qkv: Qkv = option(
        "separate",
        "Matmuls of one value with several weights (query, key, value): separate, or merged into one wide matmul.",
        commands=PROGRAM,
        choices=get_args(Qkv),
    )
    attention: AttentionForm = option(
        "fused",
        "Attention as one fused kernel, or unfused: two matmuls and a softmax, which libraries can take.",
        commands=PROGRAM,
        choices=get_args(AttentionForm),
    )
    precision: Precision = option(
        "f32",
        "Store weights and what matrix products read in this type; everything is computed in f32.",
        commands=PROGRAM,
        choices=get_args(Precision),
    )
    weights: Weights = option(
        "stored",
        "Weights of products: as stored, in 16 bits, int8 with a scale a column, int4 with one for 32 rows; the loss is printed.",
        commands=PROGRAM,
        choices=get_args(Weights),
    )
    activations: Activations = option(
        "f32",
        "What products of weights multiply: f32, or int8 with scales of rows in the call, and --weights int8 unless int4.",
        commands=PROGRAM,
        choices=get_args(Activations),
    )
    quality: str | None = option(
        None,
        "A bound on how near results stay to those of the model as it is, such as cosine>=0.999 (or rmse, max_abs, top1; several "
        "joined by `and`). Weights are stored as bf16, f16, int8 or int4 where that is faster and the bound holds.",
        commands=("tune", "build"),
        default="every weight as it is",
        metavar="BOUND",
    )
    samples: str | None = option(
        None,
        "Inputs that measure the loss: an .npz file whose arrays have a leading dim of samples, or a folder of .npz files.",
        commands=("tune", "build"),
        default="none, without --quality; drawn inputs for --activations and --weights",
        metavar="FILE.npz",
        reaches_out=True,
    )
    cache_dtype: Precision = option(
        "f32",
        "Type in which a decoder from a Hugging Face folder stores keys and values between its calls.",
        commands=PROGRAM,
        choices=get_args(Precision),
    )
    caches: Caches = option(
        "model",
        "Contents of the caches when kernels are timed: model, no weights where a model has more than half of the last cache holds; "
        "warm, all that their last launch left. A build takes warm times where there are no others.",
        commands=PROGRAM,
        choices=get_args(Caches),
    )
    memory: Memory = option(
        "symbolic",
        "Memory of intermediate values: sized by each call's shapes, or constant, taken once for the largest the "
        "declared bounds allow; inplace writes results over arguments that nobody reads later.",
        commands=BUILD,
        choices=get_args(Memory),
    )
    checks: bool = option(
        False,
        "Check computed indices too: a call fails where one is outside its dim, instead of reading the nearest element or "
        "dropping the update. It fuses less. Build with what was tuned.",
        commands=PROGRAM,
        default="off",
        kind=bool,
        metavar="true|false",
    )
    libraries: bool = option(
        True,
        "Dispatch calls of installed libraries where they are fastest; without, kernels alone, as `export` needs.",
        commands=MODEL,
        default="on",
        kind=bool,
        metavar="true|false",
    )
    self_test: bool = option(
        True,
        "Run every dispatched kernel at a few sizes against the reference before an artifact is written, and leave out those "
        "that are wrong.",
        commands=BUILD,
        default="on",
        kind=bool,
        metavar="true|false",
    )
    shapes: Shapes | None = option(
        None,
        "Shapes that count: all of the declared ranges, evenly on a log scale; or above all the served shapes, as "
        "--profile or the database says, each for the time it takes.",
        commands=MODEL,
        default="uniform",
        choices=get_args(Shapes),
    )
    profile: str | None = option(
        None,
        "Shapes served, as `run --record-shapes` counts them; `tune` keeps them in the database.",
        commands=MODEL,
        default="with --shapes profile, those the database has",
        metavar="FILE.json",
        reaches_out=True,
    )
    logs: Logs = option(
        "text",
        "Form of what services, workers, schedulers and dashboards say: text for people, or json, one object a line.",
        commands=("work", "dashboard"),
        choices=get_args(Logs),
    )
    prior: str | None = option(
        None,
        "A cost model, as `model train` writes it, that chooses kernels for functions without records.",
        commands=("build", "plan", "show"),
        default="the package's for this family of devices, if it has one; else the rules guess",
        metavar="FILE",
        reaches_out=True,
    )

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            _check(name, declared, getattr(self, name))
        if self.shapes == "uniform" and self.profile is not None:
            raise UserError(
                f"--profile goes with --shapes profile, found {self.profile!r:.80} with uniform; leave one out"
            )
        if self.wait_secs < 1:
            raise UserError(f"--wait-secs wants a number of seconds, at least 1; found {self.wait_secs}")
        if self.max_minutes is not None and not 0 < self.max_minutes < 1e6:
            raise UserError(f"--max-minutes wants a number of minutes above 0, found {self.max_minutes:g}")
        for name, of in (("trials", "per task"), ("budget", "of all tasks")):
            if (count := getattr(self, name)) is not None and count < 0:
                raise UserError(f"--{name} wants a number of candidates {of}, at least 0; found {count}")
        if self.weights in ("bf16", "f16") and (other := f"{self.precision}/{self.activations}") != "f32/f32":
            raise UserError(f"--weights {self.weights} wants --precision and --activations f32, found {other}; drop it")

    @property
    def candidates(self) -> int:
        return EFFORTS[self.effort][0] if self.trials is None else self.trials

    @property
    def batch(self) -> int:
        return EFFORTS[self.effort][1]

    @property
    def anchors(self) -> int:
        return EFFORTS[self.effort][2]

    @property
    def timing_secs(self) -> float:
        return EFFORTS[self.effort][3]


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in fields(Settings)}
_OPTIONAL = frozenset(f.name for f in fields(Settings) if f.default is None)


def settings_taken_by(command: Command) -> tuple[str, ...]:
    """Return the names of the settings that a command takes, in declared order."""
    return tuple(name for name, declared in OPTIONS.items() if command in declared.commands)


def describe() -> str:
    """Return a Markdown table of all settings: flag, variable, values, default, commands and meaning."""
    rows = [
        ("Setting", "Flag", "Variable", "Values", "Default", "Commands", "Meaning"),
        ("---",) * 7,
        *(
            (
                f"`{name}`",
                f"`{flag_of(name)}`",
                f"`{variable_of(name)}`",
                ", ".join(f"`{v}`" for v in declared.choices) or f"`{declared.metavar}`",
                declared.default,
                ", ".join(declared.commands),
                declared.help,
            )
            for name, declared in OPTIONS.items()
        ),
    ]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def merge_settings(command: Command, settings: Settings | None, overrides: Mapping[str, Any]) -> Settings:
    """Return `settings`, or the defaults, with the keyword arguments of a Python function over them.

    Raises UserError for a name that the function does not take and for a wrong value."""
    known = settings_taken_by(command)
    for name, value in overrides.items():
        if name in known:
            continue
        if name in RENAMED_SETTINGS:
            raise UserError(f"rt.{command}: {renamed(name, name, RENAMED_SETTINGS[name], value)}")
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"rt.{command} takes the settings {', '.join(known)}; found {name}{hint}")
    base = Settings() if settings is None else settings
    if not isinstance(base, Settings):
        raise UserError(f"settings: wanted a Settings, found a {type(base).__name__}")
    return replace(base, **overrides)


@dataclass(frozen=True, slots=True)
class SettingSource:
    """The place that a setting's value comes from.

    name: its name there, such as `--seed`
    value: the value, of the setting's type
    path: the settings file; None for flags and variables
    refused: True for a value that counts only once its file is allowed
    """

    name: str
    value: Any
    path: Path | None = None
    refused: bool = False


def find_sources(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, SettingSource]:
    """Return the source of each setting that is not a default: a flag, else a variable, else `relax-tune.toml`.

    Raises UserError for a file or a variable that cannot be read."""
    if has_password(str(flags.get("db") or "")):
        raise UserError(
            "--db wants a URL without a password, since everybody on this machine can read the arguments of programs, found one with "
            f"a password; put it into ~/.pgpass, or the URL into {variable_of('db')}"
        )
    variables = _read_environment(os.environ if environment is None else environment)
    found = _read_file((folder or Path.cwd()) / FILE)
    found |= {name: SettingSource(variable_of(name), value) for name, value in variables.items()}
    return found | {name: SettingSource(flag_of(name), value) for name, value in flags.items() if value is not None}


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """Merge flags over variables over `relax-tune.toml` over defaults. A flag that is None was not given.

    Raises UserError that names the wrong source, and for settings that reach out in a file that is not allowed."""
    return settings_of(find_sources(flags, environment, folder))


def settings_of(sources: Mapping[str, SettingSource]) -> Settings:
    """Return the defaults with these values over them. Raises UserError as `load_settings` does."""
    refused = [name for name, source in sources.items() if source.refused]
    if refused:
        raise UserError(
            f"{sources[refused[0]].path}: wanted no {', '.join(refused)} here until you allow the file, since they reach files, "
            "hosts, databases or programs; read it, then run `relax-tune allow`, or give them as flags or variables"
        )
    try:
        return replace(Settings(), **{name: source.value for name, source in sources.items()})
    except UserError as error:
        flag, _, rest = str(error).partition(" ")
        name = flag.removeprefix("--").replace("-", "_")
        if name not in sources or sources[name].name == flag:
            raise
        raise UserError(f"{sources[name].name} {rest}") from None


def read_settings_file(path: Path) -> bytes:
    """Return the content of a settings file; empty if there is none. Raises UserError for one that cannot be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: wanted a readable file, found: {error.strerror}; correct or remove it") from None
    if len(content) > _FILE_BYTES:
        raise UserError(f"{path}: wanted settings of at most {_FILE_BYTES} bytes, found more; correct or remove it")
    return content


def parse_settings_file(path: Path, content: bytes) -> dict[str, Any]:
    """Return the values of a settings file. Raises UserError for unknown names and values of a wrong type."""
    try:
        data = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: wanted TOML, found {error}") from None
    for name in sorted(set(data) & set(RENAMED_SETTINGS)):
        raise UserError(f"{path.name}: {renamed(name, name, RENAMED_SETTINGS[name], data[name])}")
    unknown = sorted(set(data) - set(OPTIONS))
    if unknown:
        raise UserError(f"{path.name}: wanted settings among {', '.join(sorted(OPTIONS))}; found {', '.join(unknown)}")
    for name, value in data.items():
        if type(value) is not OPTIONS[name].kind and not (OPTIONS[name].kind is float and type(value) is int):
            kind = KINDS[OPTIONS[name].kind]
            raise UserError(f"{path.name}: {name} wants {kind}, found {value!r}")
    return data


def _read_file(path: Path) -> dict[str, SettingSource]:
    """Return the sources that a settings file gives. The content that is judged is the content that counts."""
    content = read_settings_file(path)
    data = parse_settings_file(path, content)
    allowed = all(not OPTIONS[name].reaches_out for name in data) or is_allowed(path, content)
    return {
        name: SettingSource(f"{FILE}: {name}", value, path, OPTIONS[name].reaches_out and not allowed)
        for name, value in data.items()
    }


def _read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    for old, new in RENAMED_SETTINGS.items():
        if (variable := variable_of(old)) in variables:
            raise UserError(renamed(old, variable, variable_of(new), variables[variable]))
    given = {name: variables[variable_of(name)] for name in OPTIONS if variable_of(name) in variables}
    return {name: PARSED.get(OPTIONS[name].kind, text_of)(name, text) for name, text in given.items()}


def _check(name: str, declared: Option, value: object) -> None:
    if value is not None or name not in _OPTIONAL:
        check_value(name, declared, value)
