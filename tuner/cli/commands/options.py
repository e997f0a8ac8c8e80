"""Options that several commands share, and the model argument."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_args

import typer

from relax_tune.tuner.settings import EFFORTS, AttentionForm, Caches, Memory, Qkv, Settings, load_settings
from relax_tune.tuner.settings import Precision as PrecisionName
from relax_tune.tuner.settings import Shapes as ShapesName

SETTINGS = frozenset(f.name for f in fields(Settings))


def among(*values: str) -> Callable[[str], list[str]]:
    """For `autocompletion=`: those of a known set of values that go on as what was typed."""

    def complete(incomplete: str) -> list[str]:
        return [v for v in values if v.startswith(incomplete)]

    return complete


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a Hugging Face model, an .onnx or .pt2 file, a .relax file of program text, or package:NAME/FOLDER for "
        "a folder inside an installed package.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="DEVICE",
        autocompletion=among("c", "opencl", "cuda"),
        help="c, opencl, opencl:PART of a device's name, or cuda:NUMBER; `relax-tune devices` lists them. [default: opencl]",
    ),
]
Function = Annotated[
    str | None,
    typer.Option(
        "--function",
        metavar="NAME",
        help="Which of the artifact's functions, such as prefill or decode. [default: main, or the only one]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        autocompletion=among("c", "opencl", "cuda"),
        help="Run on c, opencl, opencl:PART of a device's name, or cuda:NUMBER. [default: the kind the artifact was built for]",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="sqlite:///FILE (or a path that ends in .db) or postgresql://USER@HOST/NAME. "
        "[default: records.db in the user data folder]",
    ),
]
Ca = Annotated[
    str | None,
    typer.Option(
        "--ca", metavar="FILE.pem", help="The authority that all sides trust, for tls:// addresses. [default: no TLS]"
    ),
]
Certificate = Annotated[
    str | None, typer.Option("--certificate", metavar="FILE.pem", help="Our certificate. [default: no TLS]")
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="FILE.key", help="The certificate's key, readable by its owner only. [default: no TLS]"
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        "--bound",
        metavar="NAME=LOW:HIGH",
        help="Bounds of a symbol, such as n=1:512. May be repeated. [default: what the model declares]",
    ),
]
Effort = Annotated[
    str | None,
    typer.Option(
        "--effort",
        metavar="|".join(EFFORTS),
        autocompletion=among(*EFFORTS),
        help=f"{', '.join(f'{name} {numbers[0]}' for name, numbers in EFFORTS.items())} candidates per task, timed at "
        f"{', '.join(str(numbers[2]) for numbers in EFFORTS.values())} shapes. [default: normal]",
    ),
]
PlannedMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="|".join(get_args(Memory)),
        autocompletion=among(*get_args(Memory)),
        help="Memory of intermediate values: sized by each call's shapes, or constant, taken once for the largest the declared bounds "
        "allow; inplace writes results over arguments that nobody reads later. [default: symbolic]",
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shapes",
        metavar="|".join(get_args(ShapesName)),
        autocompletion=among(*get_args(ShapesName)),
        help="Which shapes count: all of the declared ranges, evenly on a log scale; or above all those that were served, as --profile "
        "or the database says, each for the time it takes. [default: uniform]",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE.json",
        help="Shapes served, as `run --record-shapes` counts them; `tune` keeps them in the database. [default: with --shapes "
        "profile, those the database has]",
    ),
]
QkvForm = Annotated[
    str | None,
    typer.Option(
        "--qkv",
        metavar="|".join(get_args(Qkv)),
        autocompletion=among(*get_args(Qkv)),
        help="Matmuls of one value with several weights (query, key, value): separate, or merged into one wide matmul, "
        "which makes fewer calls of other tasks. [default: separate]",
    ),
]
TimedCaches = Annotated[
    str | None,
    typer.Option(
        "--caches",
        metavar="|".join(get_args(Caches)),
        autocompletion=among(*get_args(Caches)),
        help="What kernels find in the caches when they are timed: warm, all that their last launch left; model, nothing where a kernel "
        "reads many weights, since the rest of the model has run in between. Build with what was tuned. [default: warm]",
    ),
]
FormOfAttention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        metavar="|".join(get_args(AttentionForm)),
        autocompletion=among(*get_args(AttentionForm)),
        help="Attention as one fused kernel, or unfused: two matmuls and a softmax, which libraries can take. [default: fused]",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="|".join(get_args(PrecisionName)),
        autocompletion=among(*get_args(PrecisionName)),
        help="Store weights and what matrix products read in this type; everything is computed in f32. [default: f32]",
    ),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        "--cache-dtype",
        metavar="|".join(get_args(PrecisionName)),
        autocompletion=among(*get_args(PrecisionName)),
        help="What a decoder from a Hugging Face folder stores keys and values in between its calls: parameters and results of this "
        "type. [default: f32]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]


def settings_of(context: typer.Context) -> Settings:
    """The settings of a command: its options of their names, over the other sources."""
    return load_settings({name: value for name, value in context.params.items() if name in SETTINGS})


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    print(json.dumps(value, indent=2, allow_nan=False))
