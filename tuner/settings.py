"""Settings: flags over `RELAX_TUNE_*` over `relax-tune.toml` over defaults, read once at the edge (STYLE 18)."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from relax_tune.errors import UserError

Effort = Literal["quick", "normal", "full"]
Policy = Literal["measured", "stored", "library", "generic"]
Qkv = Literal["separate", "merged"]
AttentionForm = Literal["fused", "unfused"]
Precision = Literal["f32", "f16", "bf16"]
Shapes = Literal["uniform", "profile"]
Caches = Literal["warm", "model"]
Memory = Literal["symbolic", "constant", "inplace", "constant-inplace"]

# Candidates per task and per batch, anchors, and how long each shape is timed.
EFFORTS: Mapping[str, tuple[int, int, int, float]] = {
    "quick": (16, 8, 6, 0.02),
    "normal": (64, 8, 6, 0.05),
    "full": (256, 16, 8, 0.1),
}
NUMBERS = ("trials", "seed")
# Words of older versions, and what replaces them.
RENAMED_SETTINGS: Mapping[str, str] = {"products": "qkv"}
RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("products", "apart"): "separate",
    ("products", "joined"): "merged",
    ("attention", "whole"): "fused",
    ("attention", "apart"): "unfused",
}
OPTIONAL_TEXTS = ("db", "profile", "scheduler", "ca", "certificate", "key")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a job tunes and builds. `trials` None takes the effort's number of candidates per task. qkv: matmuls of one value with
    several weights, separate or merged. precision: what a float32 model stores weights and the arguments of its products in.
    attention: one fused kernel, or its matmuls and softmax. cache_dtype: what a decoder's folder stores keys and values in.
    memory: of intermediate values, sized by each call's shapes or once for the largest that the declared bounds allow; inplace:
    results written over arguments that nobody reads later. shapes: which count for how much, evenly on a log scale or as a profile
    of those served says: of the file `profile`, which asks for it by itself, or of the database. caches: what tasks find in them
    when they are timed, all that their last launch left, or, as in a model, nothing where they have many weights. ca, certificate,
    key: PEM files for a scheduler beyond loopback."""

    target: str = "opencl"
    db: str | None = None
    effort: Effort = "normal"
    trials: int | None = None
    seed: int = 0
    strategy: str = "evolution"
    scheduler: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    qkv: Qkv = "separate"
    precision: Precision = "f32"
    attention: AttentionForm = "fused"
    memory: Memory = "symbolic"
    shapes: Shapes | None = None
    profile: str | None = None
    caches: Caches = "warm"
    cache_dtype: Precision = "f32"

    def __post_init__(self) -> None:
        for name in ("target", "strategy", *(n for n in OPTIONAL_TEXTS if getattr(self, n) is not None)):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"--{name} wants text, found {getattr(self, name)!r:.80}")
        for name in ("seed", *(n for n in ("trials",) if getattr(self, n) is not None)):
            if type(getattr(self, name)) is not int:
                raise UserError(f"--{name} wants a whole number, found {getattr(self, name)!r:.80}")
        if not isinstance(self.effort, str) or self.effort not in EFFORTS:
            raise UserError(f"--effort wants one of {', '.join(EFFORTS)}; found {self.effort!r}")
        if self.qkv not in get_args(Qkv):
            raise UserError(f"--qkv wants one of {', '.join(get_args(Qkv))}; found {self.qkv!r}")
        if self.attention not in get_args(AttentionForm):
            raise UserError(
                f"--attention wants one of {', '.join(get_args(AttentionForm))}; "
                f"found {self.attention!r}{_successor('attention', self.attention)}"
            )
        if not isinstance(self.precision, str) or self.precision not in get_args(Precision):
            raise UserError(f"--precision wants one of {', '.join(get_args(Precision))}; found {self.precision!r:.80}")
        if self.cache_dtype not in get_args(Precision):
            raise UserError(
                f"--cache-dtype wants one of {', '.join(get_args(Precision))}; found {self.cache_dtype!r:.80}"
            )
        if not isinstance(self.memory, str) or self.memory not in get_args(Memory):
            raise UserError(f"--memory wants one of {', '.join(get_args(Memory))}; found {self.memory!r:.80}")
        if self.caches not in get_args(Caches):
            raise UserError(f"--caches wants one of {', '.join(get_args(Caches))}; found {self.caches!r:.80}")
        if self.shapes is not None and self.shapes not in get_args(Shapes):
            raise UserError(f"--shapes wants one of {', '.join(get_args(Shapes))}; found {self.shapes!r:.80}")
        if self.shapes == "uniform" and self.profile is not None:
            raise UserError(
                f"--profile goes with --shapes profile, found {self.profile!r:.80} with uniform; leave one out"
            )
        if self.trials is not None and self.trials < 0:
            raise UserError(f"--trials wants a number of candidates per task, at least 0; found {self.trials}")

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


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Settings:
    """Settings from the three sources; flags that are None are not given. Raises UserError naming the source that is wrong."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = (folder or Path.cwd()) / "relax-tune.toml"
    known = {f.name for f in fields(Settings)}
    if path.is_file():
        try:
            data = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path.name}: wanted TOML, found {error}") from None
        except OSError as error:
            raise UserError(
                f"{path}: wanted a file that can be read, found: {error.strerror}; correct or remove it"
            ) from None
        for name in sorted(set(data) & set(RENAMED_SETTINGS)):
            raise UserError(f"{path.name}: {_renamed(name, name, RENAMED_SETTINGS[name], data[name])}")
        unknown = sorted(set(data) - known)
        if unknown:
            raise UserError(
                f"{path.name}: wanted settings among {', '.join(sorted(known))}; found {', '.join(unknown)}"
            )
        for name, value in data.items():
            wanted: type = int if name in NUMBERS else str
            if type(value) is not wanted:
                kind = "a whole number" if wanted is int else "text"
                raise UserError(f"{path.name}: {name} wants {kind}, found {value!r}")
        merged |= data
        sources |= {name: f"{path.name}: {name}" for name in data}
    variables = os.environ if environment is None else environment
    for old, new in RENAMED_SETTINGS.items():
        variable = f"RELAX_TUNE_{old.upper()}"
        if variable in variables:
            raise UserError(_renamed(old, variable, f"RELAX_TUNE_{new.upper()}", variables[variable]))
    for name in sorted(known):
        value = variables.get(f"RELAX_TUNE_{name.upper()}")
        if value is not None:
            merged[name] = _number(name, value) if name in NUMBERS else value
            sources[name] = f"RELAX_TUNE_{name.upper()}"
    given = {k: v for k, v in flags.items() if v is not None}
    try:
        return replace(Settings(), **merged | given)
    except UserError as error:
        flag, _, rest = str(error).partition(" ")
        name = flag.removeprefix("--")
        if name in given or name not in sources:
            raise
        raise UserError(f"{sources[name]} {rest}") from None


def _successor(name: str, value: object) -> str:
    """Return the end of an error message that names the successor of a renamed value, or an empty text."""
    new = RENAMED_VALUES.get((name, value)) if isinstance(value, str) else None
    return "" if new is None else f", which is now called {new!r}"


def _renamed(name: str, shown: str, new: str, value: object) -> str:
    """Return the message for a setting that has another name now."""
    return f"{shown} is called {new} now; found {value!r:.80}{_successor(name, value)}"


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"RELAX_TUNE_{name.upper()} wants a whole number, found {value!r}") from None
