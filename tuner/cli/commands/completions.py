"""Text that a decoder continues.

Tests: `tests/tuner/emit/test_generate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from relax_tune.errors import UserError
from relax_tune.printable import printable
from relax_tune.runtime.generate import generate, generate_steps
from relax_tune.runtime.generation.config import GenerationConfig, read_token_ids
from relax_tune.runtime.generation.decoder import ENCODE, PREFILL
from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer
from relax_tune.runtime.model import Model
from relax_tune.tuner.cli.report.console import say
from relax_tune.tuner.text.tokens import IDS, SizeLimit, tokenize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 32

MaxNewTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help=f"With --text, of a decoder: most tokens to add. [default: {MAX_NEW_TOKENS}]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="X.Y", help="Sample tokens, with logits divided by this. [default: the most likely token]"),
]
TopK = Annotated[int | None, typer.Option(metavar="N", help="Sample from the N most likely tokens. [default: all]")]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="X.Y",
        help="Sample from the most likely tokens that reach this total probability (nucleus sampling). [default: all]",
    ),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="X.Y", help="Factor against tokens of the text so far. [default: 1.0, none]")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of the sampling. [default: another at each run]")]
Beams = Annotated[int | None, typer.Option(metavar="N", help="Beams of beam search. [default: 1, no search]")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop at this text, which is not printed. May be repeated. [default: none]"),
]
Stream = Annotated[bool, typer.Option("--stream", help="Print tokens as they are generated, one text after the other.")]


@dataclass(frozen=True)
class DecodingOptions:
    """Options about the tokens to add; None where the command line has none.

    Fields bear the names of the options.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    beams: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The options that the command line has."""
        return tuple(
            f"--{n.replace('_', '-')}" for n, v in vars(self).items() if v is not None and v != () and v is not False
        )

    def config(self, folder: Path) -> GenerationConfig:
        """Return the settings; the ids of end and padding tokens come from the model's folder."""
        if self.stream and self.beams not in (None, 1):
            raise UserError(
                f"--stream expects --beams 1, got {self.beams}: beam search knows its tokens at its end only"
            )
        drawn = any(v is not None for v in (self.temperature, self.top_k, self.top_p, self.seed))
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
            "repetition_penalty": self.repetition_penalty, "num_beams": self.beams,
        }  # fmt: skip
        chosen = {"max_new_tokens": MAX_NEW_TOKENS} | {n: v for n, v in options.items() if v is not None}
        ends = {"stop_strings": self.stop, **read_token_ids(folder)}
        return GenerationConfig(do_sample=drawn, top_k=self.top_k or 0, **chosen, **ends)


@dataclass(frozen=True)
class Completion:
    """A completed text.

    ids: token ids of the prompt and of the added text, for an encoder-decoder only of the added text, (1, length) i64
    added: the added text
    """

    ids: NDArray[np.int64]
    added: str


def complete(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    config: GenerationConfig,
    console: Console,
    stream: bool,
    cut: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Complete each text and print it, while it is generated or when all are complete.

    A warning says which texts end since the model has no more positions. cut: as of `tokenize`

    Raises: UserError for a text without tokens, or one that the model does not take.
    """
    if cut is not None and ENCODE not in model.functions:
        raise UserError(
            "--truncate expects an encoder, got a decoder, which goes on from the end of a text; leave it out"
        )
    reader = model.executors[ENCODE if ENCODE in model.functions else PREFILL].program
    name = IDS if ENCODE in model.functions else reader.buffers[reader.inputs[0]].name
    prompts = tokenize(tokenizer, texts, SizeLimit.of(reader, 1, name), cut)
    for text, ids in zip(texts, prompts):
        if not ids:
            raise UserError(f"--text expects at least one token, got none in {text!r:.80}; give some text")
    if stream:
        return [_stream(model, tokenizer, t, ids, config, console) for t, ids in zip(texts, prompts)]
    completions, encodes = list[Completion](), ENCODE in model.functions
    results = generate(model, _given(model, prompts), config=config, tokenizer=tokenizer)
    starts = [("", list[int]()) for _ in texts] if encodes else zip(texts, prompts)
    for (text, ids), whole in zip(starts, results, strict=True):
        decoder = IncrementalDetokenizer(tokenizer, ids, config.stop_strings)
        tokens = [int(t) for t in whole[len(ids) :]]
        added = "".join([*(decoder.put(t) for t in tokens if t not in config.eos_ids), decoder.end()])
        completions.append(Completion(whole[None], added))
        say(console, f"{text}{added}")
    return completions


def _given(model: Model, prompts: list[list[int]]) -> Any:
    """Return the prompts as `generate` expects them; for an encoder-decoder under the name of the encoder input."""
    return {IDS: prompts} if ENCODE in model.functions else prompts


def _stream(
    model: Model, tokenizer: Tokenizer, text: str, ids: Sequence[int], config: GenerationConfig, console: Console
) -> Completion:
    """Complete one text, and print what is certain after each token."""
    given = _given(model, [list(ids)])
    if ENCODE in model.functions:
        text, ids = "", []
    decoder = IncrementalDetokenizer(tokenizer, ids, config.stop_strings)
    tokens, added = list(ids), []
    console.out(printable(text), end="", highlight=False)
    for step in generate_steps(model, given, config=config, tokenizer=tokenizer):
        tokens.append(int(step.tokens[0]))
        added.append("" if tokens[-1] in config.eos_ids else decoder.put(tokens[-1]))
        console.out(printable(added[-1]), end="", highlight=False)
        console.file.flush()
    added.append(decoder.end())
    say(console, added[-1])
    return Completion(np.array([tokens], np.int64), "".join(added))
