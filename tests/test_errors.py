"""Errors say of which file they are, apart from what is wrong with it."""

import pickle

from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, ModelError
from qdqtool.options import Request
from qdqtool.timing.estimate import predict_on
from tests.trt.builder import Graph


def test_path_and_reason_are_apart_and_the_message_is_both() -> None:
    path, wrong = "a: b.onnx", "is damaged"
    error, plain = ModelError(wrong, path), DataError(wrong)
    assert (str(error), error.path, error.reason) == (f"{path}: {wrong}", path, wrong)
    assert (str(plain), plain.path, plain.reason) == (wrong, "", wrong)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.path, again.reason) == (
        ModelError,
        str(error),
        error.path,
        error.reason,
    )


def test_error_attributes_name_the_cause_and_the_place() -> None:
    error = ModelError("has no weights", "m.onnx", code="no-weights", node="/c/Conv")
    assert (error.code, error.path, error.node, error.parameter) == (
        "no-weights",
        "m.onnx",
        "/c/Conv",
        "",
    )
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.node) == ("no-weights", "/c/Conv")


def test_whatever_is_in_a_name_the_message_is_one_line_that_can_be_printed() -> None:
    error = ModelError("tensor '\x1b[31m\u2028\r' is damaged", "a\n\udcff é.onnx")
    assert str(error) == r"a\n\udcff é.onnx: tensor '\x1b[31m\u2028\r' is damaged"
    assert error.path == "a\n\udcff é.onnx"


def test_why_a_gain_is_not_known_is_said_without_the_path() -> None:
    g = Graph()
    _, time = predict_on(
        g.model(g.relu(g.input(1, 16, 8, 8), "r")), "trt8.5", Request(gpu="RTX 3060")
    )
    assert time is not None
    (note,) = (n for n in time.notes if n.remark is Remark.GAIN_UNKNOWN)
    assert note.values["why"] and not note.values["why"].startswith("model")
