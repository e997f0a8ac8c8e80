"""Files of `exporters.py` that do not come from torch: forests and pipelines, TensorFlow, Paddle, JAX, and ONNX Runtime GenAI."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.families.exporter_torch import Exporter, store_cases

Array = np.ndarray[Any, Any]
ROWS = (2, 1, 7, 33)
FEATURES = 6
STEP = 0.25
"""Features are multiples of it, so that some are equal to the thresholds of trees."""


# Tables


def table(rows: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return (np.rint(rng.normal(0, 2, (rows, FEATURES)) / STEP) * STEP).astype(np.float32)


def targets(x: Array) -> tuple[Array, Array]:
    """Return a number and a class of 0, 1, 2 per row."""
    y = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.3 * x[:, 3]
    return y.astype(np.float32), np.digitize(y, [-0.5, 0.5])


def table_cases(folder: Path, name: str, nan: bool = False) -> None:
    cases = []
    for seed, rows in enumerate(ROWS):
        x = table(rows, 50 + seed)
        if nan and seed:
            x[np.random.default_rng(seed).random(x.shape) < 0.2] = np.nan
        cases.append({"input": x})
    store_cases(folder, name, cases)


def scikit_models() -> Mapping[str, Callable[[], Any]]:
    """Return makers of estimators; names that end in `_regressor` take the number, others the class."""
    from sklearn import (
        cluster,
        compose,
        decomposition,
        ensemble,
        gaussian_process,
        impute,
        linear_model,
        naive_bayes,
        neighbors,
        neural_network,
        pipeline,
        preprocessing,
        svm,
        tree,
    )

    scaled = lambda *steps: pipeline.make_pipeline(preprocessing.StandardScaler(), *steps)
    columns = lambda: compose.ColumnTransformer([
        ("numbers", scaled(), [0, 1, 2]), ("bins", preprocessing.KBinsDiscretizer(4, encode="ordinal"), [3]),
        ("classes", pipeline.make_pipeline(preprocessing.KBinsDiscretizer(5, encode="onehot-dense")), [4]), ("rest", "passthrough", [5]),
    ])  # fmt: skip
    return {
        "forest": lambda: ensemble.RandomForestClassifier(8, max_depth=6, random_state=0),
        "forest_regressor": lambda: ensemble.RandomForestRegressor(8, max_depth=6, random_state=0),
        "extra_trees": lambda: ensemble.ExtraTreesClassifier(8, max_depth=5, random_state=0),
        "boosting": lambda: ensemble.GradientBoostingClassifier(n_estimators=8, random_state=0),
        "histogram": lambda: ensemble.HistGradientBoostingClassifier(max_iter=8, random_state=0),
        "histogram_regressor": lambda: ensemble.HistGradientBoostingRegressor(max_iter=8, random_state=0),
        "isolation": lambda: ensemble.IsolationForest(n_estimators=8, random_state=0),
        "tree_regressor": lambda: tree.DecisionTreeRegressor(max_depth=6, random_state=0),
        "ada": lambda: ensemble.AdaBoostClassifier(n_estimators=5, random_state=0),
        "bagging": lambda: ensemble.BaggingClassifier(n_estimators=4, random_state=0),
        "voting": lambda: ensemble.VotingClassifier(
            [("a", linear_model.LogisticRegression()), ("b", naive_bayes.GaussianNB())], voting="soft", flatten_transform=False),
        "stacking": lambda: ensemble.StackingClassifier(
            [("a", tree.DecisionTreeClassifier(max_depth=3)), ("b", naive_bayes.GaussianNB())]),
        "svc": lambda: scaled(svm.SVC(probability=True, random_state=0)),
        "svc_plain": lambda: svm.SVC(kernel="poly", degree=2),
        "linear_svc": lambda: scaled(svm.LinearSVC()),
        "svr_regressor": lambda: scaled(svm.SVR()),
        "one_class": lambda: svm.OneClassSVM(),
        "logistic": lambda: scaled(preprocessing.PolynomialFeatures(2), linear_model.LogisticRegression(max_iter=200)),
        "ridge_regressor": lambda: pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.MinMaxScaler(), linear_model.Ridge()),
        "mlp_classifier": lambda: scaled(neural_network.MLPClassifier((16,), max_iter=20, random_state=0)),
        "mlp_regressor": lambda: neural_network.MLPRegressor(hidden_layer_sizes=(16,), activation="tanh", max_iter=20, random_state=0),
        "columns": lambda: pipeline.make_pipeline(columns(), linear_model.LogisticRegression(max_iter=200)),
        "neighbours": lambda: neighbors.KNeighborsClassifier(5),
        "neighbours_regressor": lambda: neighbors.KNeighborsRegressor(5, weights="distance"),
        "kmeans": lambda: cluster.KMeans(4, n_init=2, random_state=0),
        "pca": lambda: scaled(decomposition.PCA(3)),
        "bayes": lambda: naive_bayes.GaussianNB(),
        "process_regressor": lambda: gaussian_process.GaussianProcessRegressor(gaussian_process.kernels.RBF(), alpha=1e-2),
        "quantiles": lambda: preprocessing.QuantileTransformer(n_quantiles=20),
        "power": lambda: preprocessing.PowerTransformer(),
        "normalizer": lambda: preprocessing.Normalizer("l1"),
        "binarizer": lambda: preprocessing.Binarizer(threshold=0.5),
    }  # fmt: skip


SCIKIT = (
    "forest", "forest_regressor", "extra_trees", "boosting", "histogram", "histogram_regressor", "isolation", "tree_regressor",
    "ada", "bagging", "voting", "stacking", "svc", "svc_plain", "linear_svc", "svr_regressor", "one_class", "logistic",
    "ridge_regressor", "mlp_classifier", "mlp_regressor", "columns", "neighbours", "neighbours_regressor", "kmeans", "pca", "bayes",
    "process_regressor", "quantiles", "power", "normalizer", "binarizer",
)  # fmt: skip


def scikit(folder: Path, name: str, path: Path, dictionaries: bool = False) -> None:
    """Convert by skl2onnx.

    Args:
        dictionaries: leave the result of probabilities as skl2onnx writes it by default, as a ZipMap.
    """
    from skl2onnx import to_onnx

    x = table(300, 0)
    number, label = targets(x)
    model = scikit_models()[name]().fit(x, number if name.endswith("regressor") else label)
    table_cases(folder, name, nan=name.startswith("histogram"))
    probable = hasattr(model, "predict_proba") and name != "linear_svc"
    options = {id(model): {"zipmap": False}} if probable and not dictionaries else None
    proto = to_onnx(model, x[:1], options=options, target_opset={"": 18, "ai.onnx.ml": 3})
    path.write_bytes(proto.SerializeToString())


def boosted(name: str, x: Array, number: Array, label: Array) -> Any:
    """Train a model of a boosting package; `name` is PACKAGE_KIND."""
    package, _, kind = name.partition("_")
    y = {"regressor": number, "binary": (label > 0).astype(int)}.get(kind, label)
    if package == "lightgbm":
        import lightgbm

        make = lightgbm.LGBMRegressor if kind == "regressor" else lightgbm.LGBMClassifier
        x = x.copy()
        x[::7, 0] = np.nan
        return make(n_estimators=8, num_leaves=15, min_child_samples=5, verbose=-1).fit(x, y)
    if package == "xgboost":
        import xgboost

        options: Any = {"booster": "dart", "rate_drop": 0.2} if kind == "dart" else {}
        make = xgboost.XGBRegressor if kind in ("regressor", "dart") else xgboost.XGBClassifier
        return make(n_estimators=8, max_depth=4, **options).fit(x, number if kind == "dart" else y)
    import catboost

    make = catboost.CatBoostRegressor if kind == "regressor" else catboost.CatBoostClassifier
    return make(iterations=8, depth=4, verbose=False, allow_writing_files=False).fit(x, y)


def boosting(folder: Path, name: str, path: Path) -> None:
    """Convert by onnxmltools, or by CatBoost itself."""
    x = table(300, 0)
    model = boosted(name, x, *targets(x))
    table_cases(folder, name, nan=not name.startswith("catboost"))
    if name.startswith("catboost"):
        model.save_model(str(path), format="onnx")
        return
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    convert = getattr(onnxmltools, f"convert_{name.partition('_')[0]}")
    options = {"zipmap": False} if name.startswith("lightgbm") and not name.endswith("regressor") else {}
    proto = convert(model, initial_types=[("input", FloatTensorType([None, FEATURES]))], target_opset=15, **options)
    path.write_bytes(proto.SerializeToString())


BOOSTED = {
    p: [f"{p}_{k}" for k in ("regressor", "binary", "classes", *(("dart",) if p == "xgboost" else ()))]
    for p in ("lightgbm", "xgboost", "catboost")
}


# TensorFlow


def keras_models() -> Mapping[str, Callable[[], Any]]:
    from tensorflow import keras

    k = keras.layers
    drawn = lambda *layers: keras.Sequential([*layers])
    image = lambda: k.Input((None, None, 3))

    def residual() -> Any:
        given = k.Input((32, 32, 3))
        x = k.SeparableConv2D(16, 3, strides=2, padding="same")(given)
        x = k.PReLU(shared_axes=[1, 2])(k.BatchNormalization()(x))
        y = k.DepthwiseConv2D(3, padding="same", dilation_rate=2)(x)
        s = k.Dense(16, "sigmoid")(k.Dense(4, "relu")(k.GlobalAveragePooling2D(keepdims=True)(y)))
        return keras.Model(given, k.Dense(7)(k.Flatten()(x + y * s)))

    def grown() -> Any:
        given = k.Input((24, 32, 3))
        x = k.Conv2D(8, 3, padding="same", activation="swish")(given)
        x = k.UpSampling2D(2, interpolation="bilinear")(k.MaxPooling2D(2)(x))
        return keras.Model(given, k.Conv2DTranspose(2, 3, strides=2, padding="same")(x))

    def attention() -> Any:
        given = k.Input((None,), dtype="int32")
        x = k.Embedding(100, 16)(given)
        x = k.LayerNormalization()(x + k.MultiHeadAttention(4, 4)(x, x))
        return keras.Model(given, k.Dense(5, "softmax")(k.GlobalMaxPooling1D()(k.Dense(32, "swish")(x))))

    return {
        "tf_mlp": lambda: drawn(k.Input((20,)), k.Dense(32, "relu"), k.BatchNormalization(), k.Dense(5, "softmax")),
        "tf_convnet": lambda: drawn(image(), k.Conv2D(8, 3, strides=2, padding="same"), k.BatchNormalization(), k.ReLU(6.0),
                                    k.Conv2D(16, 3), k.AveragePooling2D(3, 2, "same"), k.GlobalAveragePooling2D(), k.Dense(7)),
        "tf_residual": residual,
        "tf_grown": grown,
        "tf_lstm": lambda: drawn(k.Input((None, 8)), k.LSTM(16, return_sequences=True), k.LSTM(8), k.Dense(3)),
        "tf_bidirectional": lambda: drawn(k.Input((None, 8)), k.Masking(0.0), k.Bidirectional(k.GRU(8, return_sequences=True)),
                                          k.Conv1D(6, 3, padding="causal"), k.Dense(3)),
        "tf_unrolled": lambda: drawn(k.Input((7, 8)), k.SimpleRNN(8, return_sequences=True), k.GRU(8, reset_after=False)),
        "tf_attention": attention,
    }  # fmt: skip


TENSORFLOW = (
    "tf_mlp", "tf_convnet", "tf_residual", "tf_grown", "tf_lstm", "tf_bidirectional", "tf_unrolled", "tf_attention", "tf_function",
)  # fmt: skip
TF_SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "tf_mlp": [(n, 20) for n in ROWS],
    "tf_convnet": [(2, 32, 48, 3), (1, 31, 33, 3), (3, 64, 40, 3), (1, 57, 91, 3)],
    "tf_residual": [(n, 32, 32, 3) for n in (2, 1, 3, 5)],
    "tf_grown": [(n, 24, 32, 3) for n in (2, 1, 3, 5)],
    "tf_lstm": [(2, 9, 8), (1, 1, 8), (3, 7, 8), (5, 20, 8)],
    "tf_bidirectional": [(2, 9, 8), (1, 1, 8), (3, 7, 8), (5, 20, 8)],
    "tf_unrolled": [(n, 7, 8) for n in (2, 1, 3, 5)],
    "tf_attention": [(2, 9), (1, 1), (3, 7), (5, 20)],
    "tf_function": [(2, 9, 8), (1, 4, 8), (3, 7, 8), (5, 20, 8)],
}


def tensorflow_function() -> Any:
    """A function of operators that converters meet outside of layers."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 4)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec((None, None, 8), tf.float32, name="input")])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        y = tf.einsum("bnk,kd->bnd", x, w)
        best, at = tf.math.top_k(tf.reduce_max(y, -1), k=3)
        rows = tf.gather(y, at, batch_dims=1)
        total = tf.cumsum(tf.nn.softmax(y, 1), axis=1, exclusive=True)
        padded = tf.pad(total, [[0, 0], [1, 2], [0, 0]], mode="REFLECT")
        hot = tf.one_hot(tf.argmax(y, -1), 4)
        size = tf.shape(x)
        flat = tf.reshape(hot, [size[0] * size[1], 4])
        boxes = tf.concat([x[0, :, :2], x[0, :, :2] + tf.abs(x[0, :, 2:4])], -1)
        selected = tf.image.non_max_suppression(boxes, x[0, :, 4], 5, iou_threshold=0.3)
        product, curve = tf.linalg.matmul(flat, flat, transpose_a=True), tf.where(y > 0, y, tf.exp(y) - 1)
        return best, rows, padded[:, ::2], product, curve, tf.gather(boxes, selected)

    return function


def tensorflow(folder: Path, name: str, path: Path, lite: bool) -> None:
    """Convert by tf2onnx, of a model or of its TensorFlow Lite file."""
    import tensorflow as tf
    import tf2onnx

    tf.random.set_seed(0)
    rng = np.random.default_rng(0)
    shapes = TF_SHAPES[name]
    words = name == "tf_attention"
    draw = lambda s: rng.integers(0, 100, s).astype(np.int32) if words else rng.normal(size=s).astype(np.float32)
    store_cases(folder, name, [{"input": draw(s)} for s in shapes])
    if name == "tf_function":
        function = tensorflow_function()
    else:
        model = keras_models()[name]()
        for variable in model.weights:
            if not any(part in variable.path for part in ("gamma", "variance", "seed")):
                variable.assign(rng.normal(size=variable.shape) * 0.3)
        spec = tf.TensorSpec((None, *model.inputs[0].shape[1:]), model.inputs[0].dtype, name="input")
        function = tf.function(lambda x: model(x, training=False), input_signature=[spec])
    if not lite:
        tf2onnx.convert.from_function(function, function.input_signature, opset=18, output_path=str(path))
        return
    file = path.with_suffix(".tflite")
    file.write_bytes(tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()]).convert())
    call = [sys.executable, "-m", "tf2onnx.convert", "--tflite", str(file), "--output", str(path), "--opset", "18"]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode or not path.exists():
        raise RuntimeError(done.stderr.strip()[-300:])


# Paddle


def paddle_models() -> Mapping[str, tuple[Callable[[], Any], Sequence[Any], Sequence[tuple[int, ...]]]]:
    """Return makers of layers, the shape of the input (None where it is free), and the sizes to try."""
    import paddle
    from paddle import nn

    class Detector(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2D(3, 16, 3, 4, 1), nn.BatchNorm2D(16), nn.Hardswish(), nn.Conv2D(16, 5, 3, 2, 1)
            )
            self.up = nn.Upsample(scale_factor=[2.0, 2.0], mode="bilinear")

        def forward(self, x: Any) -> Any:
            y = self.body(x)
            best, at = paddle.topk(paddle.flatten(y, 2), 3, axis=-1)
            return self.up(y), best, at, paddle.argmax(y, axis=1)

    class Recurrent(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(8, 16, direction="bidirect")
            self.more, self.out = nn.GRU(32, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return nn.functional.softmax(self.out(self.more(self.body(x)[0])[0]))

    class Encoder(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 16)
            self.body = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation="gelu")

        def forward(self, x: Any) -> Any:
            return self.body(self.table(x)).mean(axis=1)

    images = [(2, 3, 64, 96), (1, 3, 32, 32), (3, 3, 64, 32), (1, 3, 96, 160)]
    text = [(2, 9), (1, 1), (3, 7), (5, 20)]
    return {
        "paddle_mlp": (lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5), nn.Softmax()),
                       [None, 20], [(n, 20) for n in ROWS]),
        "paddle_convnet": (lambda: nn.Sequential(nn.Conv2D(3, 8, 3, 2, 1), nn.BatchNorm2D(8), nn.ReLU6(), nn.MaxPool2D(2),
                                                 nn.Conv2D(8, 8, 3, 1, 1, groups=8), nn.Hardsigmoid(), nn.AdaptiveAvgPool2D(1),
                                                 nn.Flatten(), nn.Linear(8, 4)), [None, 3, None, None], images),
        "paddle_detector": (Detector, [None, 3, None, None], images),
        "paddle_recurrent": (Recurrent, [None, None, 8], [(*s, 8) for s in text]),
        "paddle_encoder": (Encoder, [None, None], text),
    }  # fmt: skip


PADDLE = ("paddle_mlp", "paddle_convnet", "paddle_detector", "paddle_recurrent", "paddle_encoder")


def paddle_file(folder: Path, name: str, path: Path) -> None:
    """Convert by Paddle2ONNX from a saved program."""
    import paddle
    import paddle2onnx

    paddle.seed(0)
    make, shape, sizes = paddle_models()[name]
    layer = make()
    layer.eval()
    rng = np.random.default_rng(0)
    words = name == "paddle_encoder"
    draw = lambda s: rng.integers(0, 100, s) if words else rng.normal(size=s).astype(np.float32)
    store_cases(folder, name, [{"input": draw(s)} for s in sizes])
    with tempfile.TemporaryDirectory() as saved:
        spec = paddle.static.InputSpec(shape, "int64" if words else "float32", "input")
        paddle.jit.save(paddle.jit.to_static(layer, input_spec=[spec]), f"{saved}/model")
        program = next(p for p in (Path(saved) / "model.json", Path(saved) / "model.pdmodel") if p.exists())
        paddle2onnx.export(str(program), f"{saved}/model.pdiparams", str(path), opset_version=17)


# JAX

JAX = ("jax_mlp", "jax_convnet", "jax_attention", "jax_scan")


def jax_file(folder: Path, name: str, path: Path) -> None:
    """Convert by jax2onnx."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax2onnx import to_onnx

    rngs = nnx.Rngs(0)
    rng = np.random.default_rng(0)
    if name == "jax_mlp":
        first, last = nnx.Linear(20, 32, rngs=rngs), nnx.Linear(32, 5, rngs=rngs)
        norm = nnx.LayerNorm(32, rngs=rngs)
        function, shape = (lambda x: jax.nn.softmax(last(norm(jax.nn.gelu(first(x)))))), (20,)
    elif name == "jax_convnet":
        conv, out = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        function, shape = (
            (lambda x: out(jnp.mean(nnx.max_pool(jax.nn.silu(conv(x)), (2, 2), (2, 2)), (1, 2)))),
            (32, 32, 3),
        )
    elif name == "jax_attention":
        attend = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        function, shape = (lambda x: x + attend(x)), (9, 16)
    else:
        w = jnp.asarray(rng.normal(size=(8, 8)) * 0.3)
        step = lambda h, x: ((n := jnp.tanh(h @ w + x)), n)
        function, shape = (lambda x: jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1]), (7, 8)
    store_cases(folder, name, [{"input": rng.normal(size=(n, *shape)).astype(np.float32)} for n in (2, 1, 3, 5)])
    import onnx

    onnx.save(to_onnx(function, [("B", *shape)], model_name=name), str(path))


# ONNX Runtime GenAI

DECODER: Mapping[str, Any] = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=199,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
"""Heads of 16, the least that ONNX Runtime's attention takes."""
DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "genai_llama": ("LlamaForCausalLM", {}),
    "genai_llama3": ("LlamaForCausalLM", {"rope_parameters": dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)}),
    "genai_qwen2": ("Qwen2ForCausalLM", {}),
    "genai_qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "genai_mistral": ("MistralForCausalLM", {"sliding_window": 8, "head_dim": 16}),
    "genai_phi": ("PhiForCausalLM", {"num_key_value_heads": 4, "hidden_size": 128}),
    "genai_gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "genai_gpt_oss": ("GptOssForCausalLM", {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "genai_olmo": ("OlmoForCausalLM", {}),
    "genai_nemotron": ("NemotronForCausalLM", {"hidden_size": 128}),
    "genai_granite": ("GraniteForCausalLM", {}),
    "genai_smollm3": ("SmolLM3ForCausalLM", {}),
}  # fmt: skip


def generator(folder: Path, name: str, path: Path, precision: str, **options: str) -> None:
    """Build by ONNX Runtime GenAI's model builder from a folder of a tiny decoder."""
    import onnx
    import tokenizers
    import torch
    import transformers

    from experiments.families.models import draw

    torch.manual_seed(0)
    kind, changes = DECODERS[name.removesuffix("_full")]
    architecture = getattr(transformers, kind)
    model: Any = draw(architecture(architecture.config_class(**{**DECODER, **changes})))
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(f"{saved}/model")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(k): k for k in range(199)}, unk_token="0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(f"{saved}/model")
        set_options = [f"{k}={v}" for k, v in options.items()]
        # a process of its own per file: the module reads its options there
        sys.argv = ["builder", "-i", f"{saved}/model", "-o", f"{saved}/out", "-p", precision, "-e", "cpu", "-c", saved,
                    "--extra_options", "hf_remote=false", *set_options]  # fmt: skip
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
        proto = onnx.load(f"{saved}/out/model.onnx")
    onnx.save(proto, str(path))
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rng = np.random.default_rng(0)
    cases = []
    for b, n, past in ((2, 9, 0), (1, 1, 9), (3, 1, 13), (1, 20, 0)):
        case: dict[str, Array] = {
            "input_ids": rng.integers(3, 199, (b, n)),
            "attention_mask": np.ones((b, past + n), np.int64),
        }
        case["position_ids"] = np.broadcast_to(np.arange(past, past + n), (b, n)).copy()
        for i in proto.graph.input:
            if i.name.startswith("past_key_values"):
                sliding = "sliding" in i.type.tensor_type.shape.dim[2].dim_param
                rows = config.sliding_window if sliding else past
                case[i.name] = rng.normal(size=(b, heads, rows, size)).astype(np.float32)
        cases.append({i.name: case[i.name] for i in proto.graph.input})
    store_cases(folder, name, cases)


FULL = ("genai_gpt_oss_full", "genai_gemma2_full", "genai_mistral_full")
"""Decoders with sliding windows, whose caches hold all positions."""
LIGHT = ("onnx", "onnxruntime")
BUILDER = (*LIGHT, "onnxruntime_genai", "torch", "transformers", "experiments.families.models")
OTHERS: Mapping[str, Exporter] = {
    "skl2onnx": Exporter(scikit, SCIKIT, ("sklearn", "skl2onnx")),
    "skl2onnx_zipmap": Exporter(partial(scikit, dictionaries=True), ("forest", "logistic"), ("sklearn", "skl2onnx")),
    **{f"onnxmltools_{p}" if p != "catboost" else p: Exporter(boosting, names, (p, *(("onnxmltools",) if p != "catboost" else ())))
       for p, names in BOOSTED.items()},
    "tf2onnx": Exporter(partial(tensorflow, lite=False), TENSORFLOW, ("tensorflow", "tf2onnx")),
    "tf2onnx_tflite": Exporter(partial(tensorflow, lite=True), TENSORFLOW, ("tensorflow", "tf2onnx")),
    "paddle2onnx": Exporter(paddle_file, PADDLE, ("paddle", "paddle2onnx")),
    "jax2onnx": Exporter(jax_file, JAX, ("jax", "flax", "jax2onnx", "onnx")),
    "genai_fp32": Exporter(partial(generator, precision="fp32"), [*DECODERS], BUILDER),
    "genai_int4": Exporter(partial(generator, precision="int4"), [*DECODERS], BUILDER),
    "genai_full_cache": Exporter(
        partial(generator, precision="fp32", windowed_kv_cache="false"), FULL, BUILDER),
    "genai_int4_qdq": Exporter(partial(generator, precision="int4", use_qdq="true"), ["genai_llama", "genai_qwen3"], BUILDER),
    "genai_int8": Exporter(partial(generator, precision="int8"), ["genai_llama", "genai_qwen3"], BUILDER),
}  # fmt: skip
