import pytest

from qdqtool.util.limits import format_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (816, "816 bytes"),
        (1024, "1 KB"),
        (1013 * 1024, "1013 KB"),
        (999.7 * 1024, "1000 KB"),
        (1.5 * 1024**2, "1.5 MB"),
        (12.34 * 1024**3, "12.3 GB"),
    ],
)
def test_size_has_its_largest_unit_and_no_exponent(size: float, text: str) -> None:
    assert format_bytes(size) == text
