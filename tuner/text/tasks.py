"""Tasks on texts by name, as in transformers: classes of texts or tokens, masked words, and text that goes on.

A task is one entry of `TASKS`. Tests: `tests/tuner/text/test_tasks.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.frontend.hf.weights import read_json
from relax_tune.runtime.generate import generate
from relax_tune.runtime.generation.config import GenerationConfig, read_token_ids
from relax_tune.runtime.generation.decoder import DECODE, PREFILL
from relax_tune.tuner.text.encoder import TextModel, listed
from relax_tune.tuner.text.tokens import SizeLimit, encode, limit_of, limited, limited_tokens, shown

if TYPE_CHECKING:
    from tokenizers import Encoding

Row = dict[str, Any]
LOGITS = "logits"
MAX_NEW_TOKENS = 256


class TextTask(TextModel):
    """A task on texts; an instance is called with a text or a list of texts.

    Args and errors as of `TextModel`.
    """

    def __init__(self, folder: str | Path, artifact: str | Path | None = None, **options: Any) -> None:
        super().__init__(folder, artifact, **options)
        try:
            self.check()
        except UserError:
            self.close()
            raise

    def __call__(self, texts: str | Sequence[str], **options: Any) -> list[Any]:
        """Return the result of each text: a list of them, or for a single text its own list.

        Raises:
            UserError: A text that is too long or that the tokenizer cannot read, or an unknown option.
        """
        given = listed(texts)
        results = self.results(given, **options) if given else []
        return self.of_one(results[0]) if isinstance(texts, str) else results

    def of_one(self, result: Any) -> list[Any]:
        """Return the result of a single text as a list."""
        return result if isinstance(result, list) else [result]

    @abstractmethod
    def check(self) -> None:
        """Raise UserError for a model of another task."""

    @abstractmethod
    def results(self, texts: Sequence[str], **options: Any) -> list[Any]:
        """Return the result of each text."""


class _Head(TextTask):
    """A task that reads the logits of an encoder's head.

    Attributes:
        per_token: The head has logits for each token.
    """

    per_token = False

    def check(self) -> None:
        self._limit, self._most_rows = limit_of(self.artifact, 1), limit_of(self.artifact, 0).most
        results = {spec.name: len(getattr(spec, "shape", ())) for spec in self.model.outputs}
        if results != {LOGITS: 2 + self.per_token}:
            raise UserError(
                f"{self.folder}: expected a model with logits of each {'token' if self.per_token else 'text'}, got the results "
                f"{', '.join(results)}; choose the task of its architecture"
            )

    def logits(self, texts: Sequence[str]) -> list[tuple[Encoding, NDArray[np.float64]]]:
        """Return the tokens and the logits of each text: (classes,), or (tokens, classes)."""
        read = limited_tokens(self.tokenizer, texts, self._limit)
        rows = encode(self.model, [e.ids for e in read], self._most_rows)[LOGITS]
        return [(tokens, row.astype(np.float64)) for tokens, row in zip(read, rows, strict=True)]

    def label(self, number: int) -> str:
        """Return the name of a class."""
        names: Mapping[str, Any] = self._config.get("id2label") or {}
        return str(names.get(str(number), f"LABEL_{number}"))

    @property
    def _config(self) -> Mapping[str, Any]:
        return read_json(self.folder / "config.json", "the configuration of a model")


class TextClassification(_Head):
    """The class of each text: `{"label", "score"}`.

    Options of a call:

    * `top_k`: how many classes to return, the likeliest first, as a list for each text; None for all.
    * `function_to_apply`: `softmax`, `sigmoid` or `none`; by default what the configuration says, else softmax over several classes.
    """

    FUNCTIONS = ("softmax", "sigmoid", "none")

    def results(
        self, texts: Sequence[str], *, top_k: int | None = 0, function_to_apply: str | None = None, **unknown: Any
    ) -> list[Any]:
        _refuse(unknown, "top_k, function_to_apply")
        results: list[Any] = []
        for _, logits in self.logits(texts):
            scores = self._scores(logits, function_to_apply)
            order = np.argsort(-scores, kind="stable")
            rows = [{"label": self.label(n), "score": float(scores[n])} for n in map(int, order)]
            results.append(rows[0] if top_k == 0 else rows[:top_k])
        return results

    def _scores(self, logits: NDArray[np.float64], function: str | None) -> NDArray[np.float64]:
        config = self._config
        if function is None:
            several = config.get("problem_type") != "multi_label_classification" and len(logits) > 1
            usual = "none" if config.get("problem_type") == "regression" else "softmax" if several else "sigmoid"
            function = config.get("function_to_apply", usual)
        if function not in self.FUNCTIONS:
            raise UserError(f"function_to_apply: expected one of {', '.join(self.FUNCTIONS)}, got {function!r:.80}")
        if function == "softmax":
            return softmax(logits)
        return 1 / (1 + np.exp(-logits)) if function == "sigmoid" else logits


class TokenClassification(_Head):
    """The tokens of each text with a class other than `O`: `{"entity", "score", "index", "word", "start", "end"}`.

    `ignore_labels` replaces the classes that are left out.
    """

    per_token = True

    def results(self, texts: Sequence[str], *, ignore_labels: Sequence[str] = ("O",), **unknown: Any) -> list[Any]:
        _refuse(unknown, "ignore_labels")
        results: list[list[Row]] = []
        for read, logits in self.logits(texts):
            rows: list[Row] = []
            for index, scores in enumerate(map(softmax, logits)):
                best = int(np.argmax(scores))
                if read.special_tokens_mask[index] or self.label(best) in ignore_labels:
                    continue
                start, end = read.offsets[index]
                word = {"word": read.tokens[index], "start": start, "end": end}
                rows.append({"entity": self.label(best), "score": float(scores[best]), "index": index, **word})
            results.append(rows)
        return results


class FillMask(_Head):
    """The likeliest tokens at the mask of each text: `{"score", "token", "token_str", "sequence"}`, `top_k` of them.

    A text with several masks has a list for each.
    """

    per_token = True

    def results(self, texts: Sequence[str], *, top_k: int = 5, **unknown: Any) -> list[Any]:
        _refuse(unknown, "top_k")
        mask, results = self._mask(), list[Any]()
        for text, (read, logits) in zip(texts, self.logits(texts), strict=True):
            places = [n for n, i in enumerate(read.ids) if i == mask]
            if not places:
                token = self.tokenizer.id_to_token(mask)
                raise UserError(
                    f"text {shown(text)}: expected the mask {token}, got none; write it where a word is missing"
                )
            filled = [
                self._filled(read.ids, place, softmax(logits[place]), top_k, len(places) == 1) for place in places
            ]
            results.append(filled[0] if len(filled) == 1 else filled)
        return results

    def _filled(
        self, tokens: Sequence[int], place: int, scores: NDArray[np.float64], count: int, single: bool
    ) -> list[Row]:
        ids, rows = list(tokens), list[Row]()
        for token in map(int, np.argsort(-scores, kind="stable")[:count]):
            ids[place] = token
            text = self.tokenizer.decode(ids, skip_special_tokens=single)  # the other masks stay in the sequence
            word = self.tokenizer.decode([token], skip_special_tokens=False)
            rows.append({"score": float(scores[token]), "token": token, "token_str": word, "sequence": text})
        return rows

    def _mask(self) -> int:
        names = ["[MASK]", "<mask>"]
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            path = self.settings.tokens / file
            named = read_json(path, "settings of a tokenizer").get("mask_token") if path.is_file() else None
            names.insert(0, str(named.get("content") if isinstance(named, dict) else named))
        known = (self.tokenizer.token_to_id(name) for name in names)
        mask = next((number for number in known if number is not None), None)
        if mask is None:
            raise UserError(f"{self.settings.tokens}: expected a tokenizer with a mask token, got none")
        return mask


class TextGeneration(TextTask):
    """Each text continued: a list of `{"generated_text"}`.

    Options of a call are the settings of `rt.generate`, and `return_full_text=False` leaves the text itself out.
    """

    def check(self) -> None:
        if not {PREFILL, DECODE} <= set(self.model.functions):
            raise UserError(
                f"{self.folder}: expected a decoder, got a model with the functions {', '.join(self.model.functions)}; "
                "choose the task of its architecture"
            )
        reader = self.model.executors[PREFILL].program
        self._limit = SizeLimit.of(reader, 1, reader.buffers[reader.inputs[0]].name)

    def results(self, texts: Sequence[str], *, return_full_text: bool = True, **options: Any) -> list[Any]:
        settings = {"max_new_tokens": MAX_NEW_TOKENS, **read_token_ids(self.folder), **options}
        ends = set(GenerationConfig(**{k: v for k, v in settings.items() if k == "eos_token_id"}).eos_ids)
        prompts = limited(self.tokenizer, texts, self._limit)
        several = settings.get("num_return_sequences", 1)
        rows = generate(self.model, prompts, tokenizer=self.tokenizer, **settings)
        results: list[Any] = [[] for _ in texts]
        for number, row in enumerate(rows):
            prompt = prompts[number // several]
            added = [int(t) for t in row[len(prompt) :]]
            end = next((n for n, token in enumerate(added) if token in ends), len(added))
            text = texts[number // several] if return_full_text else ""
            results[number // several].append({"generated_text": text + self.tokenizer.decode(added[:end])})
        return results


TASKS: Mapping[str, type[TextTask]] = {
    "text-classification": TextClassification,
    "sentiment-analysis": TextClassification,
    "token-classification": TokenClassification,
    "ner": TokenClassification,
    "fill-mask": FillMask,
    "text-generation": TextGeneration,
}
"""Tasks by the names that transformers gives them."""


def pipeline(task: str, folder: str | Path, artifact: str | Path | None = None, **options: Any) -> TextTask:
    """Return a function of texts for a task: an object that is called with a text or a list of texts.

        classify = rt.pipeline("text-classification", "distilbert-sst2", "sst2.rta")
        classify("What a film!")  # [{"label": "POSITIVE", "score": 0.99...}]

    Args:
        task: One of `text-classification`, `token-classification`, `fill-mask`, `text-generation`, or another name of these.
        folder, artifact, options: As of `rt.SentenceEncoder`.

    Raises:
        UserError: An unknown task, or a folder whose model is of another task.
    """
    if task not in TASKS:
        raise UserError(
            f"task: expected one of {', '.join(TASKS)}, got {task!r:.80}; rt.SentenceEncoder computes embeddings"
        )
    return TASKS[task](folder, artifact, **options)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of classes."""
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def _refuse(unknown: Mapping[str, Any], known: str) -> None:
    if unknown:
        raise UserError(f"expected options among {known}, got {next(iter(unknown)):.80}; leave it out")
