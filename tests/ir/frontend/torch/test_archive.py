"""Files of torch.export read by the project's own reader: the same programs as torch reads, and nothing that runs."""

from __future__ import annotations

import copy
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.torch.test_importer import DATA, torch_python

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.torch.archive import FIXED, data_archive
from relax_tune.ir.frontend.torch.archive_graph import expression, spec

CPU = {"type": "cpu", "index": None}
SYMBOL = "Symbol('s0', positive=True, integer=True)"
TUPLE = '[1, {"type": "builtins.tuple", "context": "null", "children_spec": []}]'


def meta(*sizes: Any) -> dict[str, Any]:
    """Tensor of floats without gaps."""
    strides = [{"as_int": 3}, {"as_int": 1}][2 - len(sizes) :]
    return {
        "dtype": 7, "sizes": list(sizes), "requires_grad": True, "device": {"type": "cuda", "index": 0}, "strides": strides,
        "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


ROWS = {"as_expr": {"expr_str": SYMBOL, "hint": {"as_int": 4}}}
PROGRAM: dict[str, Any] = {
    "graph_module": {
        "graph": {
            "inputs": [tensor("p_w"), tensor("x")],
            "outputs": [tensor("y")],
            "nodes": [
                {
                    "target": "torch.ops.aten.mul.Tensor",
                    "inputs": [
                        {"name": "self", "arg": tensor("x"), "kind": 1}, {"name": "other", "arg": tensor("p_w"), "kind": 1}
                    ],
                    "outputs": [tensor("y")],
                    "metadata": {
                        "stack_trace": '  File "/home/me/model.py", line 7, in forward\n    return x * self.w',
                        "source_fn_stack": "evil,torch.hub.load",
                        "from_node": "[]",
                    },
                    "name": "y",
                }
            ],
            "tensor_values": {"p_w": meta({"as_int": 3}), "x": meta(ROWS, {"as_int": 3}), "y": meta(ROWS, {"as_int": 3})},
            "sym_int_values": {},
            "sym_bool_values": {},
            "is_single_tensor_return": False,
            "custom_obj_values": {},
            "sym_float_values": {},
        },
        "signature": {
            "input_specs": [
                {"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}}, {"user_input": {"arg": tensor("x")}}
            ],
            "output_specs": [{"user_output": {"arg": tensor("y")}}],
        },
        "module_call_graph": [
            {
                "fqn": "",
                "signature": {"inputs": [], "outputs": [], "in_spec": TUPLE, "out_spec": TUPLE, "forward_arg_names": ["x"]},
            },
            {"fqn": "inner", "signature": None},
        ],
        "metadata": {"custom": "{}"},
        "treespec_namedtuple_fields": {},
    },
    "opset_version": {"aten": 10},
    "range_constraints": {"s0": {"min_val": 1, "max_val": None}},
    "schema_version": {"major": 8, "minor": 20},
    "verifiers": ["TRAINING"],
    "torch_version": "2.13.0+cpu",
    "guards_code": ["__import__('os').system('true')"],
}  # fmt: skip
WEIGHTS = {"w": {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta({"as_int": 3})}}


def archive(at: Path, program: Any = None, weights: Any = None, compression: int = 0, **more: bytes) -> Path:
    """A file as torch saves one, of a program that multiplies x (s0, 3) with a parameter (3,)."""
    with zipfile.ZipFile(at, "w", compression) as z:
        for name, content in {
            **FIXED,
            "data/sample_inputs/model.pt": b"a pickle",
            "data/weights/weight_0": bytes(12),
        }.items():
            z.writestr(f"m/{name}", content)
        z.writestr("m/models/model.json", json.dumps(program or PROGRAM))
        z.writestr(
            "m/data/weights/model_weights_config.json", json.dumps({"config": WEIGHTS if weights is None else weights})
        )
        z.writestr("m/data/constants/model_constants_config.json", json.dumps({"config": {}}))
        for name, content in more.items():
            z.writestr(f"m/{name}", content)
    return at


def known(target: str) -> bool:
    return target.startswith("torch.ops.aten.")


def written(path: Path) -> tuple[dict[str, bytes], Any]:
    """Members of the archive that torch gets, and its program."""
    with data_archive(path, known, "dims.json")[0] as data, zipfile.ZipFile(data) as z:
        members = {n.removeprefix("archive/"): z.read(n) for n in z.namelist()}
    return members, json.loads(members["models/model.json"])


def test_archive_for_torch_has_neither_pickles_nor_code(tmp_path: Path) -> None:
    members, program = written(
        archive(tmp_path / "m.pt2", **{"data/aotinductor/model/run.so": b"ELF", "extra/more": b"x"})
    )
    assert sorted(members) == sorted((
        *FIXED, "models/model.json", "data/weights/weight_0", "data/weights/model_weights_config.json",
        "data/constants/model_constants_config.json",
    ))  # fmt: skip
    assert members["data/sample_inputs/model.pt"] == b"" and members["data/weights/weight_0"] == bytes(12)
    graph = program["graph_module"]["graph"]
    assert program["guards_code"] == [] and program["graph_module"]["metadata"] == {}
    assert graph["nodes"][0]["metadata"] == {
        "stack_trace": '  File "/home/me/model.py", line 7, in forward\n    return x * self.w'
    }
    assert (
        graph["tensor_values"]["x"]["device"] == CPU
        and graph["nodes"][0]["inputs"] == PROGRAM["graph_module"]["graph"]["nodes"][0]["inputs"]
    )
    assert [c["fqn"] for c in program["graph_module"]["module_call_graph"]] == [""]


def changed(path: str, value: Any) -> Any:
    """The program with another value at `graph_module.graph.nodes.0.name` and the like."""
    program = copy.deepcopy(PROGRAM)
    *parts, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    held: Any = program
    for part in parts:
        held = held[part]
    held[last] = value
    return program


NODE = "graph_module.graph.nodes.0"
CALLS = "graph_module.module_call_graph.0.signature"
EVIL = "x):\n    import os; os.system('true')\ndef f(y"
CALLED = '[1, {"type": "collections.defaultdict", "context": "{\\"default_factory_module\\": \\"os\\"}", "children_spec": []}]'


@pytest.mark.parametrize(
    "path, value, wanted",
    [
        (f"{NODE}.target", "torch.hub.load", "an operator of aten"),
        (f"{NODE}.name", EVIL, "an identifier"),
        (f"{NODE}.name", "import", "an identifier"),
        (f"{NODE}.outputs.0.as_tensor.name", EVIL, "an identifier"),
        (f"{NODE}.inputs.0.name", "self', evil='", "letters, digits"),
        (f"{NODE}.inputs.0.arg", {"as_operator": "torch.load"}, "one of as_none"),
        (f"{NODE}.inputs.0.arg", {"as_custom_obj": {"name": "x", "class_fqn": "y"}}, "one of as_none"),
        (f"{NODE}.inputs.0.arg", {"as_int": "evil"}, "a whole number of 64 bits"),
        (f"{NODE}.inputs.0.arg", {"as_int": 1 << 63}, "a whole number of 64 bits"),
        (f"{NODE}.inputs.0.arg", {"as_float": "__import__"}, "a number"),
        (f"{NODE}.inputs.0.arg", {"as_graph": {"name": EVIL, "graph": {}}}, "an identifier"),
        ("graph_module.graph.inputs.1.as_tensor.name", EVIL, "an identifier"),
        ("graph_module.graph.custom_obj_values", {"x": {}}, "no objects of Python classes"),
        ("graph_module.graph.tensor_values.x.sizes.0.as_expr.expr_str", "__import__('os').system('true')", "an expression of dims"),
        ("graph_module.graph.tensor_values.x.layout", 1, "tensors with strides"),
        ("graph_module.graph.tensor_values.x.dtype", 99, "the number of an element type"),
        ("graph_module.signature.input_specs.0.parameter.parameter_name", 'w"); evil("', "letters, digits"),
        ("graph_module.signature.input_specs.1", {"custom_obj": {}}, "one of user_input"),
        (f"{CALLS}.forward_arg_names", [EVIL], "an identifier"),
        (f"{CALLS}.out_spec", CALLED, "lists, tuples, dicts, and containers that name their fields"),
        (f"{CALLS}.in_spec", "[2, {}]", "protocol 1"),
        ("range_constraints", {"u999999999999": {"min_val": 0, "max_val": 1}}, "an expression of dims"),
        ("verifiers", ["EVIL"], "one of ATEN"),
        ("graph_module.graph.nodes", {"a": 1}, "a list"),
    ],
)  # fmt: skip
def test_archive_of_hostile_program_is_refused(tmp_path: Path, path: str, value: Any, wanted: str) -> None:
    at = archive(tmp_path / "m.pt2", changed(path, value))
    with pytest.raises(ParseError, match=f"expected (?:no )?{wanted}"):
        data_archive(at, known, "dims.json")


@pytest.mark.parametrize(
    "change, wanted",
    [
        ({"use_pickle": True}, "member of the archive, got 'a pickle'"),
        ({"path_name": "../../etc/passwd"}, "numbers, in a member"),
        ({"path_name": "custom_obj_0"}, "numbers, in a member"),
        ({"tensor_meta": None}, "sizes that are numbers"),
        ({"tensor_meta": meta({"as_int": 4})}, "a tensor within the 3 elements of its member"),
        ({"tensor_meta": {**meta({"as_int": 3}), "storage_offset": {"as_int": 1}}}, "a tensor within the 3 elements"),
        ({"tensor_meta": {**meta({"as_int": 3}), "strides": [{"as_int": -1}]}}, "none below 0"),
        ({"tensor_meta": meta({"as_expr": {"expr_str": SYMBOL}})}, "sizes that are numbers"),
    ],
)  # fmt: skip
def test_archive_of_hostile_weights_is_refused(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    at = archive(tmp_path / "m.pt2", weights={"w": {**WEIGHTS["w"], **change}})
    with pytest.raises(ParseError, match=wanted):
        data_archive(at, known, "dims.json")


def test_archive_compressed_or_of_old_kind_needs_trust(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unpickles and evaluates .*--trust-model"):
        load_model(archive(tmp_path / "m.pt2", compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as z:
        z.writestr("serialized_state_dict.pt", b"a pickle")
    with pytest.raises(UserError, match=r"JSON and raw numbers, .*newer versions"):
        load_model(tmp_path / "old.pt2")


@pytest.mark.parametrize(
    "text", [SYMBOL, "s0*2 + 1", "FloorDiv(Add(Integer(1), Symbol('u3', integer=True)), Integer(2))", "Pow(Symbol('s1'), Integer(2))"]
)  # fmt: skip
def test_expression_of_dims_is_kept(text: str) -> None:
    assert expression(text).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    "text",
    [
        "s0.__class__", "s0[0]", "[s0]", "lambda: s0", "S('x')", "sympify('x')", "Symbol('x y')", "Symbol(s0)", "Integer('9')",
        "Float('9'*99)", "f'{s0}'", "s0 if s0 else s1", "Add(*s0)", "Add(**s0)", "2**9999999", "Pow(Integer(9), Integer(999))",
        "Pow(Pow(s0, Integer(64)), Integer(64))", "LShift(Integer(1), s0)", "(s0 := 1)", "Symbol('s0', positive=print())", "os",
        "9" * 40, "s0 +", "(" * 5000,
    ],
)  # fmt: skip
def test_expression_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        expression(text)


def test_spec_of_another_package_becomes_a_dict() -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    given = [
        1,
        {"type": "transformers.modeling_outputs.BaseModelOutput", "context": '["logits"]', "children_spec": [leaf]},
    ]
    kind = {"type": "builtins.dict", "context": '["logits"]', "children_spec": [leaf]}
    assert json.loads(spec(json.dumps(given), "out_spec")) == [1, kind]


SAVED = """
import io, json, os, sys, zipfile, torch
sys.path.insert(0, sys.argv[1])
from make_torch_programs import exported
from relax_tune.errors import UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.text.printer import print_text
folder = sys.argv[2]
path = os.path.join(folder, "model.pt2")
def same(program):
    torch.export.save(program, path, extra_files={"dims.json": "{}"})
    own, trusted = load_model(path), load_model(path, trust=True)
    assert list(own.constants) == list(trusted.constants)
    assert all(a.tobytes() == trusted.constants[n].tobytes() for n, a in own.constants.items())
    return print_text(own) == print_text(trusted)
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.randn(3, 2).bfloat16())
        self.register_buffer("turned", torch.randn(2, 3).t())
        self.register_buffer("part", torch.arange(12.0)[4:7])
        self.register_buffer("pairs", torch.randn(3, dtype=torch.complex64))
        self.tied = self.turned
    def forward(self, x, flag):
        with torch.no_grad():
            y = x + self.part + self.small.float().sum() + self.turned.sum(1) + self.tied.sum()
        y = torch.cond(flag, lambda a: a * 2, lambda a: a + 1, (y,))
        return {"y": y.nan_to_num_(0.5), "z": [torch.view_as_real(self.pairs), y.new_full((2,), float("inf"))]}
n = torch.export.Dim("n", min=2, max=9)
program = torch.export.export(Odd(), (torch.randn(4, 3), torch.tensor(True)), dynamic_shapes=({0: n}, None))
print(same(exported("bert")[0]), same(program))
class Evil:
    def __reduce__(self):
        return open, (os.path.join(folder, "ran"), "w")
pickled = io.BytesIO()
torch.save({"x": Evil()}, pickled)
hostile = os.path.join(folder, "hostile.pt2")
with zipfile.ZipFile(path) as old, zipfile.ZipFile(hostile, "w") as new:
    for name in old.namelist():
        data = old.read(name)
        if "sample_inputs" in name:
            data = pickled.getvalue()
        if name.endswith("models/model.json"):
            got = json.loads(data)
            got["guards_code"] = ["open(%r, 'w')" % os.path.join(folder, "ran")]
            got["graph_module"]["graph"]["nodes"][0]["metadata"]["source_fn_stack"] = "x,torch.hub.load"
            data = json.dumps(got).encode()
        new.writestr(name, data)
load_model(hostile)
print(os.path.exists(os.path.join(folder, "ran")))
for target in ("torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "torch.ops.aten._print.default", "torch.save"):
    got["graph_module"]["graph"]["nodes"][0]["target"] = target
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            new.writestr(name, json.dumps(got) if name.endswith("models/model.json") else old.read(name))
    try:
        load_model(hostile)
    except UserError as error:
        print("expected an operator of aten" in str(error) and repr(target) in str(error))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_pt2_read_by_own_reader_is_the_same_and_runs_nothing(tmp_path: Path) -> None:
    python, environment = torch_python()
    command = [python, "-W", "ignore", "-c", SAVED, str(DATA), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["True True", "False", "True", "True", "True", "True"]


def mutate(program: Any, random: np.random.Generator, values: list[Any]) -> Any:
    """The program with one value replaced by another one of it, or by one that no program has."""
    places: list[Callable[[Any], None]] = []

    def walk(held: Any) -> None:
        for at in list(held) if isinstance(held, dict) else range(len(held)):
            places.append(lambda v, held=held, at=at: held.__setitem__(at, v))
            values.append(held[at])
            if isinstance(held[at], (dict, list)):
                walk(held[at])

    changed = copy.deepcopy(program)
    walk(changed)
    places[random.integers(len(places))](copy.deepcopy(values[random.integers(len(values))]))
    return changed


def test_archive_with_any_value_moved_is_read_or_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        given = mutate(PROGRAM, random, [None, -1, 1 << 70, "", [], {}, True, "torch.load", EVIL, [[]], float("nan")])
        try:
            _, read = written(archive(tmp_path / "m.pt2", given))
        except ParseError:
            continue
        assert written(archive(tmp_path / "m.pt2", read))[1] == read
