"""Sentences to embeddings, from a model's folder.

Tests: `tests/tuner/text/test_encoder.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from relax_tune.errors import UserError, warn
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.source import find_model
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.signature import TensorSpec
from relax_tune.tuner.api import build
from relax_tune.tuner.job.lowered_model import model_key
from relax_tune.tuner.job.replaced_weights import stored_import
from relax_tune.tuner.text.folder import sentence_folder
from relax_tune.tuner.text.tokens import cosine, encode, limit_of, open_tokenizer

Vectors = NDArray[np.float32]


class TextModel:
    """A model that is opened together with the tokenizer of its folder.

    Args:
        folder: Folder of a Hugging Face model, with a tokenizer.json.
        artifact: File of the built model. The model is built, and saved there, if the file does not exist; None builds it each time.
            An existing file has to be of this model, if the folder has its weights.
        options: Arguments of `rt.build` by name, such as `target`, `db` and `bounds`, for a model that is built here.

    Raises:
        UserError: No such folder, no tokenizer, an artifact of another model, or a model that takes no token ids.
    """

    def __init__(self, folder: str | Path, artifact: str | Path | None = None, **options: Any) -> None:
        self.folder = find_model(str(folder))
        self.artifact = self._opened(artifact, options)
        self.settings = sentence_folder(self.folder)
        self.tokenizer = open_tokenizer(self.settings.tokens)
        self.model = self.artifact.open(threads=options.get("threads"))

    def _opened(self, artifact: str | Path | None, options: dict[str, Any]) -> Artifact:
        if artifact is not None and Path(artifact).exists():
            existing = load_artifact(artifact)
            self._check_model(existing, options)
            return existing
        built = build(self.folder, **options)
        if artifact is not None:
            built.save(artifact)
        return built

    def _check_model(self, artifact: Artifact, options: Mapping[str, Any]) -> None:
        """Raise UserError for the artifact of another model, where the folder has weights and the artifact says how it was imported."""
        extra = artifact.manifest["extra"]
        if "lowering" not in extra or not any(self.folder.rglob("*.safetensors")):
            return
        given = {name: options[name] for name in ("adapter", "trust") if name in options}
        try:
            same = model_key(load_model(self.folder, **{**stored_import(artifact), **given})) == extra["model"]
        except UserError:  # it cannot have the artifact's bounds
            same = False
        if not same:
            raise UserError(
                f"{artifact.path}: expected the artifact of {self.folder}, got one of another model; name another file, delete this "
                "one to build it, or give the folder and the adapter that it was built from"
            )

    def close(self) -> None:
        """Free the memory of the model."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listed(texts: str | Sequence[str]) -> list[str]:
    """Return one text or several as a list. Raises UserError for anything else."""
    given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
    for text in given:
        if not isinstance(text, str):
            raise UserError(
                f"texts: expected a string or strings, got a {type(text).__name__}; give each text as a string"
            )
    return given


class SentenceEncoder(TextModel):
    """Embeddings of sentences, as `SentenceTransformer` computes them.

        encoder = rt.SentenceEncoder("all-MiniLM-L6-v2", "minilm.rta")
        vectors = encoder.encode(["A cat sat on a mat.", "A dog slept."])

    Args and errors as of `TextModel`.
    """

    def __init__(self, folder: str | Path, artifact: str | Path | None = None, **options: Any) -> None:
        super().__init__(folder, artifact, **options)
        try:
            self._most_rows, self._limit = limit_of(self.artifact, 0).most, limit_of(self.artifact, 1)
            results = self.model.outputs
            if len(results) != 1 or not isinstance(results[0], TensorSpec) or len(results[0].shape) != 2:
                raise UserError(
                    f"{self.folder}: expected a model with one vector per text, got the results "
                    f"{', '.join(r.name for r in results)}; rt.pipeline computes the tasks of heads"
                )
        except UserError:
            self.close()
            raise

    def encode(self, texts: str | Sequence[str], prompt: str | None = None, *, truncate: bool = True) -> Vectors:
        """Return the embedding of each text: (texts, width), or (width,) for a single one.

        Texts of similar length are computed together, in batches as large as the model takes.

        Args:
            prompt: Name of a prompt of the folder, which is put before each text; None: the folder's default.
            truncate: Cut texts that are longer than the model takes, with a warning for each; False refuses them.

        Raises:
            UserError: A text that is too long or that the tokenizer cannot read, or an unknown prompt.
        """
        given = listed(texts)
        if not given:
            return np.empty((0, self._width), np.float32)
        settings = self.settings.named(prompt)
        tokens = settings.tokenize(self.tokenizer, given, self._limit, warn if truncate else None)
        order = sorted(range(len(tokens)), key=lambda n: len(tokens[n]))
        sorted_tokens = [tokens[n] for n in order]
        (rows,) = encode(self.model, sorted_tokens, self._most_rows, settings.prompt_length(self.tokenizer)).values()
        vectors = np.empty((len(given), rows[0].shape[0]), np.float32)
        vectors[order] = rows
        return vectors[0] if isinstance(texts, str) else vectors

    @property
    def _width(self) -> int:
        """Elements of an embedding."""
        return len(self.encode(" "))

    def similarity(self, first: ArrayLike, second: ArrayLike) -> Vectors:
        """Return the cosine of the angle between every two embeddings: (rows of first, rows of second)."""
        a, b = (np.atleast_2d(np.asarray(x, np.float32)) for x in (first, second))
        if a.shape[1] != b.shape[1]:
            raise UserError(f"similarity: expected embeddings of one width, got {a.shape[1]} and {b.shape[1]}")
        return cosine(np.concatenate([a, b]))[: len(a), len(a) :].astype(np.float32)
