from tools import readme

TEXT = readme.README.read_text("utf-8")


def test_figures_are_those_of_the_pages() -> None:
    """`python -m tools.readme --figures` renews the figures."""
    assert readme.with_figures(TEXT) == TEXT


def test_table_has_the_unseen_pairs_first() -> None:
    rows = readme.write_table().splitlines()
    assert "23 of 23" in rows[2].split("|")[2] and all(row.count("|") == 4 for row in rows)


def test_readme_has_one_sample() -> None:
    assert TEXT.count(f"$ {readme.SAMPLE}\n") == 1
