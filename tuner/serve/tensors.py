"""Tensors of the Open Inference Protocol, version 2: as JSON, and as bytes behind the JSON (the binary tensor data extension).

Source: https://github.com/kserve/open-inference-protocol, the binary extension as Triton publishes it.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.signature import Spec, TensorSpec

DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{sign}INT{bits}": np.dtype(f"{sign.lower()}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
HEADER = "inference-header-content-length"
_LIMIT = 1 << 53


class RequestError(Exception):
    """A request that cannot be answered, with the status of HTTP that says so."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the protocol's name of an element type; None if it has none."""
    return _NAMES.get(dtype)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request to infer.

    Attributes:
        arrays: Inputs by name.
        outputs: Names of the outputs to return, with whether each is returned as bytes; None: all.
        binary: Whether outputs are returned as bytes if they do not say.
        id: Id of the client.
        timeout_secs: Longest time that the client waits; None: it does not say.
    """

    arrays: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, bool] | None = None
    binary: bool = False
    id: str = ""
    timeout_secs: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def read_request(body: bytes, header_length: str | None, specs: Sequence[Spec]) -> InferRequest:
    """Read the body of a request.

    Args:
        body: The body.
        header_length: Value of the header `Inference-Header-Content-Length`; None: all of the body is JSON.
        specs: The inputs of the model, which names, types and ranks are compared with.

    Raises:
        RequestError: The body is not a request to infer, or does not fit the inputs.
    """
    document, rest = _split(body, header_length)
    parameters = _object(document.get("parameters", {}), "parameters")
    inputs = document.get("inputs")
    if not isinstance(inputs, list):
        raise RequestError("inputs: expected a list of tensors")
    known = {spec.name: spec for spec in specs}
    arrays: dict[str, NDArray[Any]] = {}
    for number, given in enumerate(inputs):
        where = f"inputs[{number}]"
        name = _object(given, where).get("name")
        if not isinstance(name, str) or name not in known:
            raise RequestError(f"{where}.name: expected one of {', '.join(known)}, got {name!r:.80}")
        if name in arrays:
            raise RequestError(f"{where}.name: expected {name} once, got it twice")
        arrays[name], rest = _tensor(given, f"input {name}", known[name], rest)
    if rest:
        raise RequestError(f"body: expected no bytes behind the tensors, got {len(rest)}")
    missing = [name for name in known if name not in arrays]
    if missing:
        raise RequestError(f"inputs: expected {', '.join(known)}, got no {', '.join(missing)}")
    binary = _truth(parameters, "binary_data_output", "parameters")
    given_id = document.get("id", "")
    if not isinstance(given_id, str):
        raise RequestError(f"id: expected a string, got {given_id!r:.80}")
    outputs = _outputs(document.get("outputs"), binary)
    return InferRequest(arrays, outputs, binary, given_id, _timeout(parameters), parameters)


def _split(body: bytes, header_length: str | None) -> tuple[Mapping[str, Any], memoryview]:
    end = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or int(header_length[:20]) > len(body):
            raise RequestError(
                f"Inference-Header-Content-Length: expected a number up to {len(body)}, the size of the body, got {header_length!r:.40}"
            )
        end = int(header_length)
    try:
        document = json.loads(body[:end], parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: expected JSON, got: {error!s:.200}") from None
    return _object(document, "body"), memoryview(body)[end:]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON; send the tensor as bytes")


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where}: expected an object, got a {type(value).__name__}")
    return value


def _truth(parameters: Mapping[str, Any], name: str, where: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{where}.{name}: expected true or false, got {value!r:.80}")
    return value


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    """Return the parameter `timeout`, microseconds as in Triton, in seconds."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LIMIT:
        raise RequestError(f"parameters.timeout: expected microseconds, a whole number above 0, got {value!r:.80}")
    return value * 1e-6


def _outputs(given: object, binary: bool) -> dict[str, bool] | None:
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise RequestError("outputs: expected a list of tensors")
    outputs: dict[str, bool] = {}
    for number, output in enumerate(given):
        where = f"outputs[{number}]"
        name = _object(output, where).get("name")
        parameters = _object(output.get("parameters", {}), f"{where}.parameters")
        _refuse(parameters, where, "classification", "shared_memory_region")
        if not isinstance(name, str) or name in outputs:
            raise RequestError(f"{where}.name: expected each name once, got {name!r:.80}")
        chosen = _truth(parameters, "binary_data", where) if "binary_data" in parameters else binary
        outputs[name] = chosen
    return outputs


def _refuse(parameters: Mapping[str, Any], where: str, *names: str) -> None:
    for name in names:
        if name in parameters:
            raise RequestError(f"{where}: {name} is an extension that this server does not have")


def _tensor(given: Mapping[str, Any], where: str, spec: Spec, rest: memoryview) -> tuple[NDArray[Any], memoryview]:
    """Return an input and the bytes behind it."""
    assert isinstance(spec, TensorSpec)
    expected, datatype, shape = datatype_of(spec.dtype), given.get("datatype"), given.get("shape")
    if datatype != expected:
        raise RequestError(f"{where}: expected datatype {expected}, got {datatype!r:.80}")
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n < _LIMIT for n in shape):
        raise RequestError(f"{where}: expected a shape of whole numbers, got {shape!r:.80}")
    if len(shape) != len(spec.shape):
        raise RequestError(f"{where}: expected {len(spec.shape)} dims, {spec}, got {shape!r:.80}")
    parameters = _object(given.get("parameters", {}), f"{where}.parameters")
    _refuse(parameters, where, "shared_memory_region")
    size = parameters.get("binary_data_size")
    if size is None:
        return _from_json(given.get("data"), where, spec.dtype, shape), rest
    if "data" in given:
        raise RequestError(f"{where}: expected data or binary_data_size, got both")
    bytes_ = math.prod(shape) * spec.dtype.itemsize
    if type(size) is not int or size != bytes_:
        raise RequestError(f"{where}: expected binary_data_size {bytes_} for {datatype} {shape}, got {size!r:.80}")
    if size > len(rest):
        raise RequestError(f"{where}: expected {size} bytes behind the JSON, got {len(rest)}")
    array = np.frombuffer(rest[:size], spec.dtype).reshape(shape)
    if spec.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise RequestError(f"{where}: expected a byte of 0 or 1 for each element of BOOL")
    return array, rest[size:]


def _from_json(data: object, where: str, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Return a tensor whose elements are nested lists, or one flat list in row-major order."""
    count = math.prod(shape)
    if not isinstance(data, list):
        raise RequestError(f"{where}: expected data, a list of {count} elements, or binary_data_size")
    try:
        array = np.array(data)
    except (ValueError, OverflowError, RecursionError):
        raise RequestError(f"{where}: expected data of shape {list(shape)}, got lists of unequal length") from None
    if array.size != count or (array.ndim != 1 and array.shape != tuple(shape)):
        raise RequestError(f"{where}: expected data of shape {list(shape)}, got {list(array.shape)!s:.80}")
    if not count:
        return np.zeros(shape, dtype)
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(dtype.kind, "iuf")
    if array.dtype.kind not in kinds:
        raise RequestError(f"{where}: expected elements of {_NAMES[dtype]}, got {_first(data)!r:.80}")
    if dtype.kind in "iu":
        limits, least, most = np.iinfo(dtype), int(array.min()), int(array.max())
        if least < limits.min or most > limits.max:
            wrong = least if least < limits.min else most
            raise RequestError(f"{where}: expected elements from {limits.min} to {limits.max}, got {wrong}")
    with np.errstate(over="ignore"):
        result = array.astype(dtype).reshape(shape)
    if dtype.kind not in "biu" and not np.isfinite(result).all():
        raise RequestError(f"{where}: expected finite elements of {_NAMES[dtype]}")
    return result


def _first(data: object) -> object:
    while isinstance(data, list) and data:
        data = data[0]
    return data


def write_response(
    model: str, version: str, request: InferRequest, results: Mapping[str, NDArray[Any]]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the size of its JSON if bytes follow.

    Raises:
        RequestError: A requested output does not exist, or has elements that JSON cannot express.
    """
    chosen = dict.fromkeys(results, request.binary) if request.outputs is None else request.outputs
    unknown = [name for name in chosen if name not in results]
    if unknown:
        raise RequestError(f"outputs: expected among {', '.join(results)}, got {unknown[0]!r:.80}")
    outputs, parts = [], list[bytes]()
    for name, binary in chosen.items():
        array = np.ascontiguousarray(results[name]).reshape(results[name].shape)
        output: dict[str, Any] = {"name": name, "datatype": _NAMES[array.dtype], "shape": list(array.shape)}
        if binary:
            parts.append(array.tobytes())
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            if array.dtype.kind not in "biu" and not np.isfinite(array).all():
                raise RequestError(
                    f"output {name}: it has elements that are not finite; ask for it as bytes (binary_data)"
                )
            wide = array if array.dtype.kind in "biuf" else array.astype(np.float32)
            output["data"] = wide.reshape(-1).tolist()
        outputs.append(output)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if request.id:
        document["id"] = request.id
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"".join([text, *parts]), len(text) if parts else None
