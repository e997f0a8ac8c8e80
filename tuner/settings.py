"""Settings of tuning and building, from flags, `RELAX_TUNE_*` variables and `relax-tune.toml`.

Each field of `Settings` carries its declaration. From the declarations come the options of the commands, the keyword arguments of
`rt.tune` and `rt.build`, the keys of `relax-tune.toml`, and the table of the settings page (`describe`).

Until the user allows a settings file (`allowed_files`), its settings marked `reaches_out` are refused.

Tests: `tests/tuner/test_settings.py`, `tests/docs/test_settings.py`.
"""

# ruff: noqa: RUF009  (`option` gives a dataclass field)

from __future__ import annotations

import difflib
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from relax_tune.errors import UserError, warn
from relax_tune.tuner.allowed_files import is_allowed
from relax_tune.tuner.option import (
    BUILD,
    DEVICE,
    FLEET,
    KINDS,
    MODEL,
    PARSERS,
    PROGRAM,
    SEARCH,
    TUNE,
    Command,
    Option,
    check_value,
    flag_of,
    has_password,
    names_arguments,
    option,
    variable_of,
)  # fmt: skip
from relax_tune.tuner.search.registry import strategy_names

F = TypeVar("F", bound=Callable[..., Any])
Effort = Literal["auto", "quick", "normal", "full"]
Policy = Literal["measured", "stored", "predicted", "library", "generic"]
Qkv = Literal["separate", "merged"]
AttentionForm = Literal["fused", "unfused"]
Precision = Literal["f32", "f16", "bf16"]
Activations = Literal["f32", "int8"]
Weights = Literal["stored", "bf16", "f16", "int8", "int4"]
Shapes = Literal["uniform", "profile"]
Caches = Literal["warm", "model"]
Logs = Literal["text", "json"]
KVCache = Literal["contiguous", "paged"]
Memory = Literal["symbolic", "constant", "inplace", "constant-inplace"]

FILE = "relax-tune.toml"
_FILE_BYTES = 1 << 20
_OTHER_VARIABLES = tuple(map(variable_of, ("cache", "dashboard_token", "serve_token")))
"""Variables that are no settings: of the cache of compiled kernels, of `dashboard` and of `serve`."""
_OF_TESTS = tuple(
    map(variable_of, ("needs", "torch_python", "tint", "commit", "test_effort", "test_opencl", "test_processor"))
)
WORTHWHILE, NEGLIGIBLE = 1e-2, 2e-5
"""Shares of the model's time that trials have to be expected to save: with an effort that ends by itself, and a batch with another."""
# Candidates per task and per batch, anchors, and how long each shape is timed.
EFFORTS: Mapping[str, tuple[int, int, int, float]] = {
    "auto": (256, 8, 6, 0.02), "quick": (16, 8, 6, 0.02), "normal": (64, 8, 6, 0.05), "full": (256, 16, 8, 0.1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of tuning and building, one declaration per field."""

    target: str = option(
        "auto",
        "Device: c, opencl, cuda:NUMBER or webgpu. auto is the first of this machine among a CUDA GPU, a GPU of OpenCL, c with gcc, and "
        "another OpenCL device; gpu and cpu are the best one of a kind. opencl:PART and webgpu:PART select "
        "by a part of the device's name. "
        "`relax-tune devices` lists them. A list separated by commas makes `tune` and `build` place one program on several devices. "
        "`build` also accepts processors that are not attached, such as c:aarch64, and webgpu:browser with records of `tune "
        "--browser`. c:threads=N is target c with N threads. With --scheduler, c:PART selects workers by a part of the processor's name.",
        commands=DEVICE,
        suggested=lambda: ("c", "opencl", "cuda", "webgpu", "cpu", "gpu", "auto"),
        metavar="DEVICE",
    )
    threads: int | None = option(
        None,
        "Threads of the kernels of target c; c:threads=N is the same. With --scheduler, select workers with this number.",
        commands=DEVICE,
        kind=int,
        default="the least of the usable processors, the container's quota and $OMP_NUM_THREADS",
        metavar="N",
    )
    trust_model: bool = option(
        False,
        "Load .pt2 files that the built-in reader refuses with torch. torch unpickles parts of them, so the author of the file can run "
        "any program as you.",
        commands=("tune", "build", "plan", "show", "pack", "weights", "work", "report"),
        default="off",
        kind=bool,
        metavar="true|false",
        reaches_out=True,
    )
    db: str | None = option(
        None,
        "Database of records: sqlite:///FILE, a path that ends in .db, or postgresql://USER@HOST/NAME.",
        commands=(*MODEL, "pack", "install", "work", "dashboard", "serve"),
        default="records.db in the user data folder",
        metavar="URL",
        reaches_out=True,
    )
    files: str | None = option(
        None,
        "Storage for models and artifacts of submitted jobs: a folder that all machines share, or an fsspec URL such as "
        "s3://BUCKET/FOLDER. Files are stored by the hash of their content.",
        commands=("submit", "work", "serve"),
        default="FILE.files next to a SQLite database; required for PostgreSQL",
        metavar="FOLDER",
        reaches_out=True,
    )
    effort: Effort = option(
        "auto",
        f"Candidates per task ({', '.join(f'{name}: {numbers[0]}' for name, numbers in EFFORTS.items())}) and the number of shapes at "
        f"which each is timed ({', '.join(str(numbers[2]) for numbers in EFFORTS.values())}). `auto` ends a task when the next 16 "
        f"candidates are expected to save less than {100 * WORTHWHILE:g} % of the model's time.",
        commands=PROGRAM,
        choices=tuple(EFFORTS),
    )
    trials: int | None = option(
        None, "Candidates per task.", commands=TUNE, kind=int, default="given by --effort", metavar="N"
    )
    budget: int | None = option(
        None,
        "Candidates of all tasks together. Generic, library and unfused variants are measured in addition.",
        commands=("tune", "install"),
        kind=int,
        default="--trials for each task; `install`: 200",
        metavar="N",
    )
    max_minutes: float | None = option(
        None,
        "Time limit of measuring; then the program is built from the records so far. New candidates are tried for four fifths of it.",
        commands=TUNE,
        kind=float,
        default="no limit",
        metavar="MINUTES",
    )
    seed: int = option(0, "Seed of all random choices.", commands=BUILD, kind=int, metavar="N")
    strategy: str = option(
        "evolution", "Search strategy that proposes candidates.", commands=SEARCH, suggested=strategy_names
    )
    scheduler: str | None = option(
        None,
        "Dask scheduler whose workers measure (`tune`, `work`) or are shown (`report`, `dashboard`): tls://127.0.0.1:8786 on this machine, "
        "tls://HOST:8786 with certificates on others.",
        commands=FLEET,
        default="measure on this machine",
        metavar="ADDRESS",
        reaches_out=True,
    )
    browser: str | None = option(
        None,
        "Measure target webgpu in a web page. This is the address at which a browser opens it: 127.0.0.1:8790, or with TLS this machine's "
        "address in its network.",
        commands=("tune",),
        default="measure with the installed WebGPU",
        metavar="HOST:PORT",
        reaches_out=True,
    )
    wait_secs: int = option(
        60,
        "Seconds to wait for a database server, scheduler, worker or page that cannot be reached; then the command ends with exit code 4.",
        commands=(*SEARCH, "work", "report", "dashboard"),
        kind=int,
        metavar="SECONDS",
    )
    ca: str | None = option(
        None,
        "Certificate of the authority that all sides of tls:// addresses trust.",
        commands=FLEET,
        default="no TLS",
        metavar="FILE.pem",
        reaches_out=True,
    )
    certificate: str | None = option(
        None, "Certificate of this machine.", commands=FLEET, default="no TLS", metavar="FILE.pem", reaches_out=True
    )
    key: str | None = option(
        None,
        "Private key of the certificate; only its owner may be able to read the file.",
        commands=FLEET,
        default="no TLS",
        metavar="FILE.key",
        reaches_out=True,
    )
    qkv: Qkv = option(
        "separate",
        "Matmuls of one value with several weights, such as query, key and value: separate, or merged into one wide matmul.",
        commands=PROGRAM,
        choices=get_args(Qkv),
    )
    attention: AttentionForm = option(
        "fused",
        "Attention as one fused kernel, or as two matmuls and a softmax (unfused), which libraries can compute.",
        commands=PROGRAM,
        choices=get_args(AttentionForm),
    )
    precision: Precision = option(
        "f32",
        "Storage type of weights and of the inputs of matmuls; arithmetic is in f32.",
        commands=PROGRAM,
        choices=get_args(Precision),
    )
    weights: Weights = option(
        "stored",
        "Storage type of the weights of matmuls: as in the model (stored), 16-bit floats, int8 (scale per column) or int4 (scale per 32 "
        "rows). The loss of accuracy is printed.",
        commands=PROGRAM,
        choices=get_args(Weights),
    )
    activations: Activations = option(
        "f32",
        "Type of the activations in matmuls: f32, or int8 quantized per row at run time. int8 implies --weights int8, unless int4 is "
        "given.",
        commands=PROGRAM,
        choices=get_args(Activations),
    )
    quality: str | None = option(
        None,
        "Accuracy bound against the original model, such as cosine>=0.999; metrics are cosine, rmse, max_abs and top1, joined by `and`. "
        "Each weight is stored as bf16, f16, int8 or int4 if that is faster and the bound holds.",
        commands=("tune", "build"),
        default="weights as in the model",
        metavar="BOUND",
    )
    samples: str | None = option(
        None,
        "Inputs for measuring the loss of accuracy: an .npz file whose arrays have samples as their first dimension, or a folder of .npz "
        "files.",
        commands=("tune", "build"),
        default="required with --quality; random inputs for --activations and --weights",
        metavar="FILE.npz",
        reaches_out=True,
    )
    cache_dtype: Precision = option(
        "f32",
        "Type of the key-value cache of decoders from Hugging Face folders.",
        commands=PROGRAM,
        choices=get_args(Precision),
    )
    kv_cache: KVCache = option(
        "contiguous",
        "Keys and values of decoders from Hugging Face folders: an array for each text, or blocks of pools for many texts at a time.",
        commands=PROGRAM,
        choices=get_args(KVCache),
    )
    adapter: str | None = option(
        None,
        "LoRA adapter, as PEFT saves one, that is merged into the weights of an encoder or decoder from a Hugging Face folder.",
        commands=(*(c for c in PROGRAM if c != "submit"), "weights"),
        default="none",
        metavar="FOLDER",
        reaches_out=True,
    )
    caches: Caches = option(
        "model",
        "State of the caches when kernels are timed. warm: as the previous launch left them. model: without the weights, if the model's "
        "weights exceed half of the last-level cache. A build uses warm times for tasks without times of the requested state.",
        commands=PROGRAM,
        choices=get_args(Caches),
    )
    memory: Memory = option(
        "symbolic",
        "Allocation of intermediate values: symbolic sizes them by the shapes of each call; constant allocates once for the largest "
        "shapes within the declared bounds; inplace also lets a result overwrite an argument that is not read later.",
        commands=BUILD,
        choices=get_args(Memory),
    )
    checks: bool = option(
        False,
        "Also check indices that are computed on the device: a call fails if one is out of range, instead of reading the nearest "
        "element or dropping the update. Fewer operators are fused. Tune and build with the same value.",
        commands=PROGRAM,
        default="off",
        kind=bool,
        metavar="true|false",
    )
    libraries: bool = option(
        True,
        "Call installed libraries for tasks in which they are fastest; false uses only generated kernels, as `export` requires.",
        commands=MODEL,
        default="on",
        kind=bool,
        metavar="true|false",
    )
    self_test: bool = option(
        True,
        "Before an artifact is written, compare every dispatched kernel with the reference at a few sizes, and drop wrong ones.",
        commands=BUILD,
        default="on",
        kind=bool,
        metavar="true|false",
    )
    shapes: Shapes | None = option(
        None,
        "Weights of shapes. uniform: all shapes in the declared bounds, evenly on a log scale. profile: mainly the served shapes in "
        "--profile or in the database, weighted by the time they take.",
        commands=MODEL,
        default="uniform",
        choices=get_args(Shapes),
    )
    profile: str | None = option(
        None,
        "Counts of served shapes, written by `run --record-shapes`; `tune` stores them in the database.",
        commands=MODEL,
        default="with --shapes profile: the counts in the database",
        metavar="FILE.json",
        reaches_out=True,
    )
    logs: Logs = option(
        "text",
        "Format of log messages: text, or json with one object per line.",
        commands=("work", "dashboard", "serve"),
        choices=get_args(Logs),
    )
    prior: str | None = option(
        None,
        "Cost model, written by `model train`, that chooses kernels of tasks without records.",
        commands=("build", "plan", "show"),
        default="the installed model for this family of devices; without one, the defaults of the schedule rules",
        metavar="FILE",
        reaches_out=True,
    )

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            _check(name, declared, getattr(self, name))
        if self.shapes == "uniform" and self.profile is not None:
            raise UserError(
                f"--profile goes with --shapes profile, got {self.profile!r:.80} with uniform; leave one out"
            )
        if self.threads is not None:
            object.__setattr__(self, "target", _with_threads(self.target, self.threads))
        if self.wait_secs < 1:
            raise UserError(f"--wait-secs expects a number of seconds, at least 1; got {self.wait_secs}")
        if self.max_minutes is not None and not 0 < self.max_minutes < 1e6:
            raise UserError(f"--max-minutes expects a number of minutes above 0, got {self.max_minutes:g}")
        for name, of in (("trials", "per task"), ("budget", "of all tasks")):
            if (count := getattr(self, name)) is not None and count < 0:
                raise UserError(f"--{name} expects a number of candidates {of}, at least 0; got {count}")
        if self.weights in ("bf16", "f16") and (other := f"{self.precision}/{self.activations}") != "f32/f32":
            raise UserError(f"--weights {self.weights} expects --precision and --activations f32, got {other}; drop it")

    @property
    def import_options(self) -> dict[str, Any]:
        """The arguments of `load_model`."""
        options = {"cache_dtype": self.cache_dtype, "kv_cache": self.kv_cache}
        return {**options, "trust": self.trust_model, "adapter": self.adapter}

    @property
    def ends_early(self) -> bool:
        """Whether a task ends as soon as it has little to gain."""
        return self.effort == "auto" and self.trials is None

    @property
    def worthwhile(self) -> float:
        """The share of the model's time that further trials of a task have to be expected to save."""
        return WORTHWHILE if self.ends_early else NEGLIGIBLE

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


def _with_threads(target: str, threads: int) -> str:
    """Return a target whose processor has this number of threads. Raises UserError where none of its devices is `c`."""
    own = f"c:threads={threads}"
    names = [own if name.strip() in ("c", "cpu", "auto") else name.strip() for name in target.split(",")]
    if own not in names:
        raise UserError(f"--threads expects --target c, got {target!r:.80}; leave it out")
    return ",".join(names)


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in fields(Settings)}
_OPTIONAL = frozenset(f.name for f in fields(Settings) if f.default is None)


def settings_taken_by(command: Command) -> tuple[str, ...]:
    """Return the names of the settings that a command takes, in declared order."""
    return tuple(name for name, declared in OPTIONS.items() if command in declared.commands)


def shows_settings(command: Command) -> Callable[[F], F]:
    """Make a decorator that adds a function's settings to its signature, for `help` and editors; its errors name arguments, not flags."""

    def decorate(inner: F) -> F:
        @functools.wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            with names_arguments():
                return inner(*arguments, **named)

        function = cast(F, call)
        defaults = {f.name: f.default for f in fields(Settings)}
        signature = inspect.signature(inner)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = [n for n in settings_taken_by(command) if n not in signature.parameters]
        more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=defaults[n]) for n in names]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *more])
        return function

    return decorate


def describe() -> str:
    """Return the table of all settings in Markdown: flag, variable, values, default, commands and help."""
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
    """Return `settings`, or the defaults, with the keyword arguments of a Python function in place of their values.

    Raises:
        UserError: A name that the function does not take, or an invalid value.
    """
    known = settings_taken_by(command)
    for name in overrides:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"rt.{command} takes the settings {', '.join(known)}; got {name}{hint}")
    base = Settings() if settings is None else settings
    if not isinstance(base, Settings):
        raise UserError(f"settings: expected a Settings, got a {type(base).__name__}")
    return replace(base, **overrides)


@dataclass(frozen=True, slots=True)
class SettingSource:
    """The origin of a setting's value.

    Attributes:
        name: Name of the setting in that origin, such as `--seed`.
        path: The settings file; None for flags and variables.
        refused: True if the value may be used only after the user allows the file.
    """

    name: str
    value: Any
    path: Path | None = None
    refused: bool = False


def find_sources(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, SettingSource]:
    """Return the source of each setting without its default: a flag, else a variable, else `relax-tune.toml`.

    Raises:
        UserError: A file or a variable cannot be read.
    """
    if has_password(str(flags.get("db") or "")):
        raise UserError(
            "--db expects a URL without a password, since every user of this machine can read the arguments of programs; put the "
            f"password into ~/.pgpass, or the URL into {variable_of('db')}"
        )
    variables = _read_environment(os.environ if environment is None else environment)
    sources = _read_file((folder or Path.cwd()) / FILE)
    sources |= {name: SettingSource(variable_of(name), value) for name, value in variables.items()}
    return sources | {name: SettingSource(flag_of(name), value) for name, value in flags.items() if value is not None}


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """Return the settings: flags take precedence over variables, `relax-tune.toml` and defaults, in this order.

    Args:
        flags: Values by setting; None for a flag that was not given.

    Raises:
        UserError: A value is invalid (the message names its source), or a file that is not allowed has a setting that reaches out.
    """
    return settings_of(find_sources(flags, environment, folder))


def settings_of(sources: Mapping[str, SettingSource]) -> Settings:
    """Return the defaults with the values of these sources. Raises `UserError` as `load_settings`."""
    refused = [name for name, source in sources.items() if source.refused]
    if refused:
        raise UserError(
            f"{sources[refused[0]].path}: expected no {', '.join(refused)} in a file that you have not allowed: such settings name files, "
            "hosts or databases, or let models run programs; read the file, then run `relax-tune allow`, or give flags or variables"
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
    """Return the content of a settings file; empty if it does not exist. Raises `UserError` if it cannot be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; correct or remove it") from None
    if len(content) > _FILE_BYTES:
        raise UserError(f"{path}: expected settings of at most {_FILE_BYTES} bytes, got more; correct or remove it")
    return content


def parse_settings_file(path: Path, content: bytes) -> dict[str, Any]:
    """Return the values in a settings file. Raises `UserError` for unknown names and values of a wrong type."""
    try:
        data = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: expected TOML, got {error}") from None
    unknown = sorted(set(data) - set(OPTIONS))
    if unknown:
        raise UserError(f"{path.name}: expected settings among {', '.join(sorted(OPTIONS))}; got {', '.join(unknown)}")
    for name, value in data.items():
        if type(value) is not OPTIONS[name].kind and not (OPTIONS[name].kind is float and type(value) is int):
            kind = KINDS[OPTIONS[name].kind]
            raise UserError(f"{path.name}: {name} expects {kind}, got {value!r}")
    return data


def _read_file(path: Path) -> dict[str, SettingSource]:
    """Return the sources in a settings file.

    The file is read once, so that the content that was allowed is the content that is used.
    """
    content = read_settings_file(path)
    data = parse_settings_file(path, content)
    allowed = all(not OPTIONS[name].reaches_out for name in data) or is_allowed(path, content)
    return {
        name: SettingSource(f"{FILE}: {name}", value, path, OPTIONS[name].reaches_out and not allowed)
        for name, value in data.items()
    }


def _read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    known = [*map(variable_of, OPTIONS), *_OTHER_VARIABLES]
    for name in sorted(n for n in variables if n.startswith(variable_of("")) and n not in known + list(_OF_TESTS)):
        near = difflib.get_close_matches(name, known, 1, 0.85)
        hint = f"did you mean {near[0]}?" if near else f"settings are {', '.join(sorted(OPTIONS))}"
        warn(f"the variable {name:.80} is no setting, and is ignored; {hint}")
    given = {name: variables[variable_of(name)] for name in OPTIONS if variable_of(name) in variables}
    return {name: PARSERS[OPTIONS[name].kind](name, text) for name, text in given.items()}


def _check(name: str, declared: Option, value: object) -> None:
    if value is not None or name not in _OPTIONAL:
        check_value(name, declared, value)
