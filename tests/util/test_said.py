"""Sentences keep their values, so that parameters and names in them can be replaced."""

import pickle

import pytest

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.fixing.sandbox import RunLimitError
from qdqtool.formats.output import as_options
from qdqtool.types import Precision
from qdqtool.util.said import Parameter, Said, of_error, said, told


def in_brackets(name: str, value: str) -> str:
    return f"<{name}|{value}>"


def test_parameter_is_named_for_its_reader() -> None:
    sentence = said(
        "{`smooth`:{alpha:g}} or {other}: see {`gpu`:sm=8.6,sms=28} of {name}",
        alpha=0.5,
        other=Parameter("time_limit"),
        name="`smooth` {`gpu`}",
    )
    assert sentence == "`smooth=0.5` or `time_limit`: see `gpu=sm=8.6,sms=28` of `smooth` {`gpu`}"
    assert (
        told(sentence, in_brackets)
        == "<smooth|0.5> or <time_limit|>: see <gpu|sm=8.6,sms=28> of `smooth` {`gpu`}"
    )
    option = said("{option:{value!r}}: no", option=Parameter("method"), value="{x}:")
    assert (option, told(option, in_brackets)) == ("`method='{x}:'`: no", "<method|'{x}:'>: no")
    for words in ("`smooth` as somebody else has it", Said("{`smooth`}")):
        assert told(words, in_brackets) == words


def test_nested_sentences_are_named_for_their_reader() -> None:
    inner = said("give {`size`}")
    outer = said(
        "{first}; {all:joined , }; {pairs:first 1 %s is %s}; {word:>4}",
        first=inner,
        all=(inner, "`size`"),
        pairs=[("a", inner), ("b", inner)],
        word="x",
    )
    assert outer == "give `size`; give `size`, `size`; a is give `size` and 1 more;    x"
    assert (
        told(outer, in_brackets)
        == "give <size|>; give <size|>, `size`; a is give <size|> and 1 more;    x"
    )


def test_message_of_error_is_a_sentence() -> None:
    error = ModelError(said("leave it float with {`exclude`}"), "m.onnx")
    assert str(error) == of_error(error) == "m.onnx: leave it float with `exclude`"
    for other, words in (
        (RunLimitError(said("raise it with {`effort`}")), "raise it with <effort|>"),
        (KeyError("a `size`"), "'a `size`'"),
        (ValueError(), ""),
        (QdqtoolError("x"), "x"),
    ):
        assert told(of_error(other), in_brackets) == words
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path) == (str(error), "m.onnx")
    assert told(again.reason, in_brackets) == "leave it float with <exclude|>"


def test_renamed_replaces_names_in_containers() -> None:
    class Name(str):
        pass

    inner = "old", [said("{d}", d="old")]
    sentence = said("{a}, {b:joined , } and {c}", a=Name("old"), b=frozenset({"old"}), c=inner)
    assert "old" in sentence and "old" not in sentence.renamed(
        lambda name: name.replace("old", "new")
    )
    assert said("{kind}", kind=Precision.INT8).renamed(lambda name: "new") == str(Precision.INT8)


LONG_SENTENCE = said(
    "{`clock`} {name}: {why}", name="n" * 10_000, why=said("{what} is wrong", what="w" * 10_000)
)


@pytest.mark.parametrize(
    ("reason", "path"),
    [(LONG_SENTENCE, ""), (LONG_SENTENCE, "p" * 10_000), ("r" * 10_000, "p")],
    ids=["sentence", "sentence and path", "text and path"],
)
def test_long_message_is_shortened(reason: str, path: str) -> None:
    error = QdqtoolError(reason, path)
    assert len(str(error)) < 500 and len(as_options(of_error(error))) < 700
    assert str(error)[0] == (path or "`")[0] and error.path == path


def test_shortened_message_keeps_beginning_and_end() -> None:
    error = QdqtoolError(LONG_SENTENCE)
    assert as_options(of_error(error)).startswith("--clock nnn")
    assert str(error).endswith("www is wrong")


FOLDER = "/".join(["folder"] * 30)


@pytest.mark.parametrize(
    "error",
    [
        QdqtoolError(
            f"{FOLDER}/log.txt, {FOLDER}/layers.json: names 0 of 21 convolutions of {FOLDER}/model"
        ),
        QdqtoolError("names 0 of 21 convolutions " + FOLDER * 3, FOLDER),
        QdqtoolError(
            said(
                "{names:joined , }: names 0 of 21 convolutions",
                names=[f"{FOLDER}/{n}" for n in range(5)],
            )
        ),
    ],
    ids=["text", "path", "sentence"],
)
def test_shortened_message_keeps_text_between_long_paths(error: QdqtoolError) -> None:
    for text in (str(error), of_error(error)):
        assert "names 0 of 21 convolutions" in text and len(text) < 1000 < len(FOLDER) * 6
