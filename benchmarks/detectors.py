"""Running YOLOv8-style detectors on samples; what their detections are worth: :mod:`qdqtool.tuning.detection`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qdqtool.tuning.detection import Detections, decode


def run_model(
    model: bytes | str, samples: Iterable[npt.NDArray[np.float32]], threads: int = 0
) -> list[Detections]:
    """Detections of a model on inputs [1, 3, height, width], onnxruntime on the CPU, Q/DQ computed in float."""
    from qdqtool.runtime import open_session

    session = open_session(model, threads, optimize="extended", fold_qdq=False)
    name = session.get_inputs()[0].name
    return [decode(session.run(None, {name: np.ascontiguousarray(x)})[0]) for x in samples]


def load_samples(model: str | Path, data: str | Path) -> npt.NDArray[np.float32]:
    """The images of a folder as the model takes them (letterbox, RGB, 0 to 1), or an npy file of them: [n, 3, h, w]."""
    from calibration.images import open_data
    from calibration.session import input_specs, metadata_size
    from qdqtool.modelfile import load

    if Path(data).suffix == ".npy":
        array: npt.NDArray[np.float32] = np.load(data, mmap_mode="r", allow_pickle=False)
        return array
    loaded = load(model)
    specs = input_specs(loaded)
    found = open_data(str(data), specs, max_images=10_000, size=metadata_size(loaded))
    return np.concatenate([sample[specs[0].name] for sample in found])
