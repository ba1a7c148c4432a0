"""The signatures that functions have at run time; ``python -m tests.tools.make_stub`` writes them."""

import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from qdqtool.base.options import Preprocess
from qdqtool.buildlog.types import Build
from qdqtool.extraction.result import Extraction as Extraction
from qdqtool.fixing.api import Fixed as Fixed
from qdqtool.insertion.result import Insertion as Insertion
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource
from qdqtool.render.reporting.api import Report as Report
from qdqtool.tuning.measure import Mapper
from qdqtool.tuning.result import Tuning as Tuning
from qdqtool.types import ConvOutcome as ConvOutcome
from qdqtool.types import Finding as Finding
from qdqtool.types import Precision as Precision
from qdqtool.types import Prediction as Prediction
from qdqtool.verification.api import Source
from qdqtool.verification.comparing.api import Side
from qdqtool.verification.comparing.result import Comparison as Comparison
from qdqtool.verification.lines import Verification as Verification
from typing import Any

__all__ = [
    "Comparison",
    "ConvOutcome",
    "Extraction",
    "Finding",
    "Fixed",
    "Insertion",
    "Precision",
    "Prediction",
    "Report",
    "Tuning",
    "Verification",
    "__version__",
    "compare",
    "extract",
    "fix",
    "insert",
    "predict",
    "report",
    "tune",
    "verify",
]

__version__: str

def compare(a: Side, b: Side, *, target: Any = None, gpu: str | None = None) -> Comparison: ...
def extract(
    model: ModelSource | Model,
    *,
    keep_interrupted: bool = False,
    finding: str | Sequence[str] | None = (),
    node: str | None = None,
    hops: int | None = None,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: Any = 'trt10',
    minimize: bool = False,
    builder: str | None = None,
    check: str | None = None,
    says: str | None = None,
    check_timeout: float | None = None,
    limit: int | None = None,
    private: bool = False,
) -> Extraction: ...
def fix(
    source: ModelSource | Model,
    target: Any = 'trt10',
    only: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
    effort: float = 1.0,
    *,
    data: object = None,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
) -> Fixed: ...
def insert(
    model: ModelSource | Model,
    data: object = None,
    *,
    progress: bool = False,
    method: str = 'focus',
    method_for: Sequence[tuple[str, str]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
    calib_cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    target: Any = 'trt10',
    head: str = 'box',
    residual: str = 'auto',
    attention: str = 'float',
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: str = 'float',
    high_precision: str | None = None,
    smooth: float | None = None,
    input_type: str = 'float',
    cluster: object = None,
    mixed_cpus: bool = False,
    calib_table: str | os.PathLike[str] | None = None,
    losses: int | None = 0,
    predict: bool = True,
) -> Insertion: ...
def predict(
    model: ModelSource | Model,
    target: Any = 'trt10',
    *,
    advice: bool = True,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
) -> Prediction: ...
def report(
    model: ModelSource | Model,
    *builds: str | os.PathLike[str] | Build,
    before: Any = None,
    calib_cache: str | os.PathLike[str] | None = None,
    tuning: str | os.PathLike[str] | None = None,
    target: Any = None,
    gpu: str | None = None,
    clock: float | None = None,
    assume: Mapping[str, str] | None = None,
) -> Report: ...
def tune(
    model: ModelSource | Model,
    data: object,
    *,
    mapper: Mapper | None = None,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
    evaluation: object = None,
    keep: float | None = None,
    budget_ms: float | None = None,
    metric: Any = None,
    gpu: str | None = None,
    clock: float | None = None,
    power: str | None = None,
    target: Any = 'trt10',
    method: str = 'focus',
    method_for: Sequence[tuple[str, str]] = (),
    percentile: float = 99.99,
    max_images: int = 512,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
    head: str = 'box',
    residual: str = 'auto',
    attention: str = 'float',
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_op: Sequence[str] = (),
    weights: str = 'float',
    high_precision: str | None = None,
    smooth: float | None = None,
    cluster: object = None,
    mixed_cpus: bool = False,
    state: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    check_timeout: float | None = None,
    whole_front: bool = False,
    chosen_on: int = 32,
    judged_on: int = 64,
    swept_on: int | None = None,
    workers: int | None = None,
) -> Tuning: ...
def verify(
    model: ModelSource | Model,
    *builds: Source | Build | Sequence[Source],
    target: Any = None,
    gpu: str | None = None,
    clock: float | None = None,
) -> Verification: ...
