import pytest

from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.util.checks import check_choice, check_not_text, compile_pattern
from tests.errors import has


def test_check_choice_names_parameter_and_choices() -> None:
    check_choice("head", "box", ("box", "none"))
    with pytest.raises(QdqtoolError, check=has("unknown-choice", parameter="head")) as caught:
        check_choice("head", "all", ("box", "none"))
    assert str(caught.value) == "`head='all'`: choose one of box, none"


def test_check_choice_raises_given_class() -> None:
    with pytest.raises(BuilderError, check=has("unknown-choice", parameter="builder")):
        check_choice("builder", "make", ("trtexec",), BuilderError)


def test_single_text_is_not_a_list() -> None:
    check_not_text("exclude", ["conv"])
    with pytest.raises(QdqtoolError, check=has("wrong-type", parameter="exclude")):
        check_not_text("exclude", "conv")


def test_compile_pattern_names_argument() -> None:
    assert compile_pattern("c[01]", "--require 'c[01]'").search("xc1")
    with pytest.raises(QdqtoolError, check=has("invalid-pattern", parameter="require")) as caught:
        compile_pattern("[", "--require '['", parameter="require")
    assert str(caught.value).startswith("--require '[': not a regular expression")
