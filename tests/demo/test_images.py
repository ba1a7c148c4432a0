import numpy as np
import pytest

from qdqtool.demo.images import make_image, write_images
from qdqtool.errors import DataError
from tests.errors import has


def test_make_image_depends_on_its_index_alone() -> None:
    first, again, other = (np.asarray(make_image(48, i)) for i in (1, 1, 2))
    assert first.shape == (48, 48, 3) and (first == again).all() and (first != other).any()


def test_write_images_into_missing_folder() -> None:
    with pytest.raises(DataError, check=has("not-written", path="/no/such/folder/demo-000.png")):
        write_images("/no/such/folder", 1, 32)
