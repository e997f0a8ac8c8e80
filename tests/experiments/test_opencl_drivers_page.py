"""The experiment on OpenCL drivers: its page, without a driver or a peer."""

from __future__ import annotations

from pathlib import Path

from experiments.end_to_end import opencl_drivers as experiment


def test_the_page_names_the_best_driver_and_missing_ones() -> None:
    def record(name: str, ours: float) -> dict[str, object]:
        row = {"onnxruntime": {"median_us": 2e3}, "openvino": {"median_us": 4e3}, "ours": {"median_us": ours}}
        tuning = {
            "version": "3.0",
            "device": "d",
            "trials": 4,
            "candidates": 40,
            "secs": 9,
            "problems": [],
            "notes": [],
        }
        failed = {"openvino": "failed, or gave other numbers than torch-eager, at 16"}
        return {"driver": name, "tuning": tuning, "times": {"16": row}, "failed": failed, "environment": {}}

    lines = experiment.page({"wheel": record("A", 1e3), "intel": record("B", 4e3)}, ["C is not installed: `get c`."])
    assert "| A | 3.0 | d | 4 | 40 | 9 |" in lines
    assert (
        "| A | **best peer / ours** | 2.00 | 2.00 |" in lines and "| B | **best peer / ours** | 0.50 | 0.50 |" in lines
    )
    assert "Best driver: A, 2.00 of the best peer (goal: 1.0)." in lines
    assert "A, openvino: failed, or gave other numbers than torch-eager, at 16" in lines
    assert "C is not installed: `get c`." in lines


def test_driver_of_wheels_is_found_by_the_environment(tmp_path: Path) -> None:
    assert experiment.variables("intel", tmp_path / "w", str(tmp_path)) is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libintelocl.so").write_text("")
    found = experiment.variables("intel", tmp_path / "w", str(tmp_path))
    assert found is not None and found["OCL_ICD_VENDORS"] == f"{tmp_path / 'w' / 'icd'}/"
    assert (tmp_path / "w" / "icd" / "one.icd").read_text() == f"{tmp_path / 'lib' / 'libintelocl.so'}\n"
    assert "pip install" in experiment.missing_line("intel", str(tmp_path / "none"), tmp_path)
