"""Sentences keep their values, so that parameters and names in them can be replaced."""

import pickle

from qdqtool.base.notes import Note, Remark
from qdqtool.base.said import Parameter, Said, of_error, said, told
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.fixing.sandbox import TooMuch
from qdqtool.types import Precision


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
    note = Remark.NOT_PREDICTED(error=of_error(error))
    assert told(note, in_brackets) == "not predicted: m.onnx: leave it float with <exclude|>"
    for other, words in (
        (TooMuch(said("raise it with {`effort`}")), "raise it with <effort|>"),
        (KeyError("a `size`"), "'a `size`'"),
        (ValueError(), ""),
        (QdqtoolError("x"), "x"),
    ):
        assert told(of_error(other), in_brackets) == words
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path) == (str(error), "m.onnx")
    assert told(again.reason, in_brackets) == "leave it float with <exclude|>"


def test_renamed_replaces_values_but_not_words() -> None:
    missing = [
        said("{code} at {node}", code="SKIP-FLOAT", node="part"),
        said("the outcome of {name}", name="show"),
    ]
    note = Remark.NOT_SHOWN(missing=missing)
    names = {"part": "n_b", "show": "n_c", "these": "n_d"}
    hidden = pickle.loads(pickle.dumps(note)).renamed(lambda text: names.get(text, text))
    assert hidden == (
        "with these hops the part does not show SKIP-FLOAT at n_b, the outcome of n_c; give more, or no "
        "`hops`"
    )
    assert (type(hidden), hidden.remark) == (Note, Remark.NOT_SHOWN) and hidden.values["missing"][
        1
    ] == ("the outcome of n_c")
    changed = Remark.PREDICTED_OTHERWISE(convolutions=[("show", "INT8", "INT8", "INT8", "FLOAT")])
    assert "n_c (INT8 to INT8" in changed.renamed(lambda text: names.get(text, text))
    assert Note("show").renamed(names.__getitem__) == "n_c", "a text is one name"


def test_renamed_replaces_names_in_containers() -> None:
    class Name(str):
        pass

    inner = "old", [said("{d}", d="old")]
    sentence = said("{a}, {b:joined , } and {c}", a=Name("old"), b=frozenset({"old"}), c=inner)
    assert "old" in sentence and "old" not in sentence.renamed(
        lambda name: name.replace("old", "new")
    )
    assert said("{kind}", kind=Precision.INT8).renamed(lambda name: "new") == str(Precision.INT8)
