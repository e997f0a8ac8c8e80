"""The settings of generation."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from relax_tune.errors import UserError

# Name -> (least value, None is allowed).
_WHOLE = {
    "max_new_tokens": (0, False), "min_new_tokens": (0, False), "top_k": (0, False), "no_repeat_ngram_size": (0, False),
    "num_beams": (1, False), "num_return_sequences": (1, False), "seed": (0, True), "pad_token_id": (None, True),
    "min_length": (0, False), "decoder_start_token_id": (0, True), "forced_bos_token_id": (0, True),
}  # fmt: skip
# Name -> (least value, whether the value itself is allowed, greatest value, None is allowed).
_REAL = {
    "temperature": (0.0, False, math.inf, False), "top_p": (0.0, True, 1.0, False), "min_p": (0.0, True, 1.0, True),
    "repetition_penalty": (0.0, False, math.inf, False), "length_penalty": (-math.inf, False, math.inf, False),
}  # fmt: skip
# Settings of a folder that would change the tokens and are not implemented, by the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (), "bad_words_ids": (), "sequence_bias": (),
    "exponential_decay_length_penalty": (), "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,), "diversity_penalty": (0.0,), "penalty_alpha": (0.0,), "guidance_scale": (1.0,), "constraints": (),
    "force_words_ids": (), "watermarking_config": (), "remove_invalid_values": (False,),
    "dola_layers": (),
}  # fmt: skip
_IDS = ("eos_token_id", "pad_token_id")
_RULED = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of generation, with the names, meanings and defaults that transformers gives them.

    Attributes:
        max_new_tokens: Most tokens to add to a prompt.
        min_new_tokens: Tokens to add before `eos_token_id` may come.
        min_length: Tokens before it, including the prompt.
        do_sample: Whether a token is drawn, instead of the likeliest one taken.
        temperature: Divisor of the logits, above 0.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Probability that the likeliest tokens to draw from have together.
        min_p: Least probability of a token, relative to the likeliest one.
        repetition_penalty: Factor against tokens of the prompt and the text so far.
        no_repeat_ngram_size: Length of the sequences of tokens that occur once at most; 0 for any.
        num_beams: Beams of beam search; 1 for none.
        num_return_sequences: Results for each prompt.
        length_penalty: Exponent of the length that a beam's score is divided by.
        early_stopping: End of a beam search: True as soon as there are `num_beams` results; False by a heuristic; "never" when none
            can become better.
        eos_token_id: Token, or tokens, that end a text.
        stop_sequences: Sequences of tokens that end a text.
        stop_strings: Words that end a text, by a tokenizer.
        pad_token_id: Filler after the end of a text; by default the first of `eos_token_id`, or 0.
        renormalize_logits: Whether processed scores are normalised to log-probabilities again, which beam search then adds.
        seed: Seed of the drawing; None for another one at each call.
        decoder_start_token_id: Token that the text of an encoder-decoder begins with, without `decoder_input_ids`; not among the results.
        forced_bos_token_id: Second token of a text of one token.
        forced_eos_token_id: Token, or tokens, to choose the last token of `max_new_tokens` from.
        suppress_tokens: Tokens that never come.
        begin_suppress_tokens: Tokens that do not come first, or behind a forced first one

    Raises:
        UserError: A setting has a wrong value; the message names the setting.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    eos_token_id: int | tuple[int, ...] | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    pad_token_id: int | None = None
    seed: int | None = None
    min_length: int = 0
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    renormalize_logits: bool = False

    def __post_init__(self) -> None:
        for name, (least, optional) in _WHOLE.items():
            object.__setattr__(self, name, _whole(name, getattr(self, name), least, optional))
        for name, (low, closed, high, optional) in _REAL.items():
            object.__setattr__(self, name, _real(name, getattr(self, name), low, closed, high, optional))
        for name in ("do_sample", "renormalize_logits"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"{name}: expected True or False, got {value!r:.80}; give one of the two")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise UserError(
                f'early_stopping: expected True, False or "never", got {self.early_stopping!r:.80}; give one of these'
            )
        for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        sequences = _many("stop_sequences", self.stop_sequences, "sequences of token ids")
        object.__setattr__(self, "stop_sequences", tuple(_ids("stop_sequences", s, least=1) for s in sequences))
        words = (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings
        object.__setattr__(self, "stop_strings", _many("stop_strings", words, "words"))
        for word in self.stop_strings:
            if not isinstance(word, str) or not word:
                raise UserError(
                    f"stop_strings: expected words of at least one character, got {word!r:.80}; leave it out"
                )
        # Greedy generation gives one text, drawing any number, and beam search at most one for each beam.
        most = self.num_beams if self.num_beams > 1 else self.num_return_sequences if self.do_sample else 1
        if self.num_return_sequences > most:
            raise UserError(
                f"num_return_sequences: expected at most {most} with {'num_beams' if most > 1 else 'greedy generation'}, got "
                f"{self.num_return_sequences}; give more num_beams, or do_sample=True"
            )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        assert isinstance(self.eos_token_id, tuple)
        return self.eos_token_id

    @property
    def forced_eos_ids(self) -> tuple[int, ...]:
        """The tokens to choose the last one from; empty: all."""
        assert isinstance(self.forced_eos_token_id, tuple)
        return self.forced_eos_token_id

    @property
    def may_stop(self) -> bool:
        """True if tokens or words may end a text."""
        return bool(self.eos_ids or self.stop_sequences or self.stop_strings)

    @property
    def filler(self) -> int:
        """The token that fills a row after its end."""
        return self.pad_token_id if self.pad_token_id is not None else (*self.eos_ids, 0)[0]

    @classmethod
    def from_folder(cls, folder: str | Path, **changes: Any) -> GenerationConfig:
        """Read the settings of a model's folder, with `changes` to them.

        Every field of this class is read from `generation_config.json`; `eos_token_id`, `pad_token_id` and, of an encoder-decoder,
        `decoder_start_token_id` from `config.json` where the former has none. Without the former file, tokens to force or to
        suppress come from `config.json`. `bad_words_ids` of a token each are tokens to suppress. A field of null has its
        default. `max_length`, which counts the prompt, is not read. A setting there that is not implemented is refused, unless
        `changes` has it as None.

        Raises: UserError for a file that is no JSON object, a wrong value, or a setting that is not implemented.
        """
        declared = dict(_read(Path(folder) / "generation_config.json"))
        declared |= read_token_ids(folder, banned="bad_words_ids" not in changes)
        if _banned(declared) is not None:
            # Words of one token have become suppressed tokens, so that the setting need not be refused below.
            del declared["bad_words_ids"]
        known = {f.name for f in fields(cls)}
        unknown = [n for n, v in changes.items() if n not in known and (n not in _NEUTRAL or v is not None)]
        if unknown:
            raise UserError(
                f"from_folder: expected settings among {', '.join(sorted(known))}; got {unknown[0]:.80}; leave it out"
            )
        for name, neutral in _NEUTRAL.items():
            value = declared.get(name)
            if value is not None and name not in changes and all(value != n for n in neutral):
                raise UserError(
                    f"{folder}: generation_config.json: {name}: expected a setting of GenerationConfig, got one that is not "
                    f"implemented, {value!r:.80}; give {name}=None to do without"
                )
        settings = {**{n: v for n, v in declared.items() if v is not None}, **changes}
        try:
            return cls(**{n: v for n, v in settings.items() if n in known})
        except UserError as error:
            raise UserError(f"{folder}: generation_config.json, config.json and what was given: {error}") from None


def read_token_ids(folder: str | Path, banned: bool = True) -> dict[str, Any]:
    """Read the token ids of special use that a model's folder declares: starts, ends, padding, tokens to force or suppress.

    banned: `bad_words_ids` of a token each are tokens to suppress

    Raises: UserError for a file that is no JSON object.
    """
    generation, model = (_read(Path(folder) / name) for name in ("generation_config.json", "config.json"))

    def first(name: str) -> Any:
        return next((f[name] for f in (generation, model) if f.get(name) is not None), None)

    ids = {name: first(name) for name in _IDS}
    if model.get("is_encoder_decoder") is True:
        start = first("decoder_start_token_id")
        ids["decoder_start_token_id"] = first("bos_token_id") if start is None else start
    # Older folders declare generation in config.json; a generation_config.json replaces all of it.
    rules = generation or model
    ids |= {name: rules.get(name) for name in _RULED}
    words = _banned(rules) if banned else None
    if words and isinstance(ids["suppress_tokens"], (list, type(None))):
        ids["suppress_tokens"] = [*(ids["suppress_tokens"] or ()), *words]
    return {name: value for name, value in ids.items() if value is not None}


def _banned(rules: Mapping[str, Any]) -> list[int] | None:
    """Return the words of `bad_words_ids` but the end, None unless each is one token."""
    words, ends = rules.get("bad_words_ids"), rules.get("eos_token_id")
    words = words if isinstance(words, list) else None
    single = (isinstance(word, list) and len(word) == 1 and type(word[0]) is int for word in words or ())
    if words is None or not all(single):
        return None
    return [word[0] for word in words if word[0] not in (ends if isinstance(ends, list) else [ends])]


def _read(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; an empty one without such a file. Raises UserError for a file of another kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a JSON file, got: {error!s:.200}; download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got a {type(content).__name__}; download it again")
    return content


def _whole(name: str, value: object, least: int | None, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    expected = "a whole number" + ("" if least is None else f", {least} or more")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise UserError(f"{name}: expected {expected}, got {value!r:.80}; give such a number")
    return number


def _real(name: str, value: object, low: float, closed: bool, high: float, optional: bool) -> float | None:
    if value is None and optional:
        return None
    try:
        # `float` would take True and "1" as numbers.
        number = math.nan if isinstance(value, (bool, str)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or not (low <= number <= high) or (number == low and not closed):
        range_ = f"{low:g} to {high:g}" if math.isfinite(high) else f"above {low:g}" if math.isfinite(low) else "finite"
        sampling = (
            "; without it and do_sample, the likeliest token is taken"
            if name == "temperature"
            else "; give such a number"
        )
        raise UserError(f"{name}: expected a number, {range_}, got {value!r:.80}{sampling}")
    return number


def _many(name: str, value: object, kind: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"{name}: expected a list of {kind}, got {value!r:.80}; put it into a list")
    return tuple(value)


def _ids(name: str, value: object, least: int = 0) -> tuple[int, ...]:
    values = (value,) if value is not None and not isinstance(value, Iterable) else _many(name, value, "token ids")
    ids = [_whole(name, i, 0) for i in values]
    if len(ids) < least:
        raise UserError(f"{name}: expected at least {least} token id in each, got {value!r:.80}; leave it out")
    return tuple(i for i in ids if i is not None)
