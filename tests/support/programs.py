"""Programs as text, run by the interpreter and by compiled C."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import DeduceError, RelaxTuneError, UserError, VerifyError
from relax_tune.ir.check.structural import first_difference
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, Var, expr
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device
from relax_tune.tuner.emit.build import Policy
from relax_tune.tuner.job.device_job import device_job

CARET = re.compile(r"\n +\d+ \| .*\n +\| +\^+")


def tensor(*dims: Any, dtype: Any = f32) -> TensorInfo:
    return TensorInfo(tuple(expr(d) for d in dims), dtype)


def ones(*dims: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(1, 1 + int(np.prod(dims, dtype=int)), dtype=dtype).reshape(dims)


def read(text: str) -> IRModule:
    """The module in `text`, in whose header names declare what they stand for; it obeys every rule and prints back to itself."""
    module = parse_module("module(version=1)\n" + textwrap.dedent(text), OPERATORS)
    return checked(module)


def checked(module: IRModule) -> IRModule:
    verify(module)
    text = print_text(module)
    back = parse_module(text, OPERATORS, module.constants)
    assert first_difference(module, back) is None, text
    assert print_text(back) == text
    return module


def info(module: IRModule, name: str, function: str = "main") -> StructInfo:
    """The annotation of a value."""
    f = module.functions[function]
    assert isinstance(f, Function)
    return next(b.var.info for b in f.bindings if b.var.name == name)


def result(module: IRModule, function: str = "main") -> StructInfo:
    f = module.functions[function]
    assert isinstance(f, Function)
    return f.ret_info


def run(module: IRModule, *args: Any, function: str = "main") -> Any:
    return run_function(module, function, args)


@contextmanager
def compiled(
    module: IRModule, device: Device, hosts: Mapping[str, Any] | None = None, policy: Policy = "generic"
) -> Iterator[Callable[..., Any]]:
    """The module as a program on a device, called with arrays; one result comes by itself."""
    job = device_job(module, device.info, MemoryStore(), QUICK)
    with job.artifact(job.build(policy)).open(device, host=hosts) as model:

        def call(*args: Any) -> Any:
            result = model.run(list(args))
            return result[0] if len(result) == 1 else tuple(result)

        yield call


def agree(module: IRModule, device: Device, *calls: Sequence[Any], hosts: Mapping[str, Any] | None = None) -> list[Any]:
    """What the interpreter gives for each call, which every stage of lowering and the compiled program give as well."""
    actual = [run_function(module, "main", args, hosts=hosts) for args in calls]
    for name, stage in lower(module).stages:
        verify(stage)
        for args, expected in zip(calls, actual, strict=True):
            same(run_function(stage, "main", args, hosts=hosts), expected, name)
    main = module.functions["main"]
    assert isinstance(main, Function)
    with compiled(module, device, hosts) as program:
        for args, expected in zip(calls, actual, strict=True):
            flat = tuple(fields(expected, main.ret_info))
            same(program(*args), flat[0] if len(flat) == 1 else flat, "compiled")
    return actual


def fields(value: Any, info: StructInfo) -> Iterator[Any]:
    """What a built program gives for `value`: tuples field by field."""
    if isinstance(info, TupleInfo):
        for v, i in zip(value, info.fields, strict=True):
            yield from fields(v, i)
    else:
        yield value


def same(actual: Any, expected: Any, where: str, tolerance: float = 1e-5) -> None:
    """The same values, shapes and dtypes; functions by name."""
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(actual) == len(expected), where
        for a, b in zip(actual, expected, strict=True):
            same(a, b, where, tolerance)
        return
    if not isinstance(expected, np.ndarray):
        assert getattr(actual, "name", actual) == getattr(expected, "name", expected), where
        return
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, where
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=where)


def refuse(module: IRModule, device: Device, args: Sequence[Any], *words: str) -> None:
    """Both the interpreter and the compiled program refuse the call, naming `words`."""
    interpreted_refuses(module, args, *words)
    with compiled(module, device) as program:
        with pytest.raises(UserError) as caught:
            program(*args)
        for word in words:
            assert word in str(caught.value), f"{word} in {caught.value}"


def interpreted_refuses(module: IRModule, args: Sequence[Any], *words: str) -> str:
    with pytest.raises(UserError) as caught:
        run(module, *args)
    for word in words:
        assert word in str(caught.value), f"{word} in {caught.value}"
    return str(caught.value)


def never(make: Callable[[], object], *words: str) -> None:
    """`make` is refused before anything runs, at a line of the program, naming `words`."""
    with pytest.raises((DeduceError, VerifyError)) as caught:
        make()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word} in {text}"
    assert CARET.search(text), f"expected an excerpt with a caret: {text}"


def text_refused(text: str, *words: str) -> None:
    """A program as text is refused by the verifier and by lowering alike."""
    module = parse_module("module(version=1)\n" + textwrap.dedent(text), OPERATORS)
    never(lambda: verify(module), *words)
    with pytest.raises(RelaxTuneError):
        lower(module)


__all__ = [
    "Expr", "Var", "agree", "checked", "compiled", "info", "interpreted_refuses", "never", "ones", "opened", "read", "refuse",
    "result", "run", "same", "tensor", "text_refused",
]  # fmt: skip
