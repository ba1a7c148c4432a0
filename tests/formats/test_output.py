import pytest

from qdqtool.formats.output import fixed_model_path


@pytest.mark.parametrize(
    ("path", "fixed"),
    [
        ("dir/a.onnx", "dir/a_fixed.onnx"),
        ("a86.onnx", "a86_fixed.onnx"),
        ("dir/a_fixed.onnx", "dir/a_fixed_2.onnx"),
        ("a_fixed_9.onnx", "a_fixed_10.onnx"),
        ("a_fixed86.onnx", "a_fixed86_2.onnx"),
        ("a_fixed86_2.onnx", "a_fixed86_3.onnx"),
    ],
)
def test_path_of_a_fixed_model_counts_fixes_but_no_other_digits(path: str, fixed: str) -> None:
    assert fixed_model_path(path) == fixed
