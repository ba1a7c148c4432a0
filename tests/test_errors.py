import pickle

import pytest

import qdqtool
from qdqtool.errors import DataError, ModelError, QdqtoolError
from tests.trt.builder import Graph


def test_error_text_is_path_and_reason() -> None:
    path, reason = "a: b.onnx", "is damaged"
    error, plain = ModelError(reason, path), DataError(reason)
    assert (str(error), error.path, error.reason) == (f"{path}: {reason}", path, reason)
    assert (str(plain), plain.path, plain.reason) == (reason, "", reason)


def test_error_is_pickled_with_its_attributes() -> None:
    error = ModelError("is damaged", "a: b.onnx")
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


def test_error_text_is_one_printable_line() -> None:
    error = ModelError("tensor '\x1b[31m\u2028\r' is damaged", "a\n\udcff é.onnx")
    assert str(error) == r"a\n\udcff é.onnx: tensor '\x1b[31m\u2028\r' is damaged"
    assert error.path == "a\n\udcff é.onnx"


def test_unknown_gain_note_has_a_reason_without_path(g: Graph) -> None:
    time = qdqtool.predict(
        g.model(g.relu(g.input(1, 16, 8, 8), "r")), "trt8.5", gpu="RTX 3060"
    ).time
    (note,) = (n for n in time["notes"] if n.code == "gain-unknown")
    assert note.values["why"] and not note.values["why"].startswith("model")


LONG_REASON = f"{'n' * 10_000}: {'w' * 10_000} is wrong"
FOLDER = "/".join(["folder"] * 30)


@pytest.mark.parametrize(
    ("reason", "path"),
    [(LONG_REASON, ""), (LONG_REASON, "p" * 10_000), ("r" * 10_000, "p")],
    ids=["words", "words and path", "text and path"],
)
def test_long_message_is_shortened(reason: str, path: str) -> None:
    error = QdqtoolError(reason, path)
    assert len(str(error)) < 500 and error.path == path and str(error)[0] == (path or "n")[0]
    assert str(error).endswith("www is wrong") or reason[0] == "r"


@pytest.mark.parametrize(
    "error",
    [
        QdqtoolError(
            f"{FOLDER}/log.txt, {FOLDER}/layers.json: names 0 of 21 convolutions of {FOLDER}/model"
        ),
        QdqtoolError("names 0 of 21 convolutions " + FOLDER * 3, FOLDER),
        QdqtoolError(", ".join(f"{FOLDER}/{n}" for n in range(5)) + ": names 0 of 21 convolutions"),
    ],
    ids=["text", "path", "names"],
)
def test_shortened_message_keeps_text_between_long_paths(error: QdqtoolError) -> None:
    assert "names 0 of 21 convolutions" in str(error) and len(str(error)) < len(FOLDER) * 6
