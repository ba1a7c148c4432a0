from __future__ import annotations

import pytest

from qdqtool.render.parameters import all_as_options, as_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave it float with `exclude`", "leave it float with --exclude"),
        ("(`head='none'` quantizes it)", "(--head none quantizes it)"),
        ("use one method, or `unify=False`", "use one method, or --no-unify"),
        ("`exclude_op` Conv: no such", "--exclude-op Conv: no such"),
        ("give images (`data`)", "give images (--calib)"),
        ("`head='a thing'` stays", "`head='a thing'` stays"),
        ("run `pip install qdqtool`", "run `pip install qdqtool`"),
        ("`Model` is a class", "`Model` is a class"),
        ("nothing to say", "nothing to say"),
    ],
)
def test_parameters_become_options(text: str, expected: str) -> None:
    assert as_options(text) == expected


def test_texts_in_lists_and_dicts() -> None:
    given = {"a": ["`exclude`", 1, None], "b": {"c": "`unify=False`"}}
    assert all_as_options(given) == {"a": ["--exclude", 1, None], "b": {"c": "--no-unify"}}
