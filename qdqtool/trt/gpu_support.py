"""Range of TensorRT versions that can build engines for each compute capability.

Sources: release notes of TensorRT 8.5 (Ada, Hopper), 10.5 (Volta removed) and 10.8 (Blackwell);
NVIDIA/TensorRT issues 3589 (Maxwell removed in 8.6) and 3826 (10.0.1 rejects Pascal). JetPack 5,
with TensorRT 8.5, is the last JetPack for Xavier (compute capability 7.2).
"""

from enum import StrEnum
from typing import NamedTuple

from qdqtool.errors import QdqtoolError
from qdqtool.trt.targets import LAST_MINOR, Target, version_numbers

Version = tuple[int, int]


class GpuSupport(StrEnum):
    """Whether a TensorRT target can build engines for a GPU."""

    FULL = "supported"
    PARTIAL = "supported by some versions of the target"
    TOO_NEW = "newer than the target"
    DROPPED = "no longer supported by the target"


class _SupportedRange(NamedTuple):
    """Range of compute capabilities, and the TensorRT versions that support it.

    ``since`` is the first version that supports the range, ``dropped`` the first that no longer
    does.
    """

    lowest: float
    highest: float
    since: Version = (0, 0)
    dropped: Version = (99, 0)


_SUPPORT = (
    _SupportedRange(0.0, 5.3, dropped=(8, 6)),
    _SupportedRange(6.0, 6.2, dropped=(10, 0)),
    _SupportedRange(7.0, 7.0, dropped=(10, 5)),
    _SupportedRange(7.2, 7.2, dropped=(8, 6)),
    _SupportedRange(8.9, 9.0, since=(8, 5)),
    _SupportedRange(10.0, 99.0, since=(10, 8)),
)


def find_gpu_support(capability: str, target: Target) -> tuple[GpuSupport, str]:
    """Return whether a target can build engines for a GPU, and which TensorRT versions can.

    A target without a minor version (``trt10``) stands for all its minor versions. For
    TensorRT-RTX, :meth:`Target.with_capability` checks the GPU, and the result is full support.

    Returns:
        The support, and the versions that can build for the compute capability, such as "8.5 or
        later". The versions are empty for full support.
    """
    number = float(capability)
    gpus = next((s for s in _SUPPORT if s.lowest <= number <= s.highest), None)
    if gpus is None or target.is_rtx:
        return GpuSupport.FULL, ""
    first, last = _find_version_range(target)
    since, dropped = (".".join(map(str, version)) for version in (gpus.since, gpus.dropped))
    if last < gpus.since:
        return GpuSupport.TOO_NEW, f"{since} or later"
    if last < gpus.dropped:
        return GpuSupport.FULL, ""
    support = GpuSupport.DROPPED if gpus.dropped <= first else GpuSupport.PARTIAL
    return support, f"earlier than {dropped}"


def require_gpu_support(target: Target, capability: str, name: str) -> None:
    """Check that a target can build engines for a GPU.

    Raises:
        QdqtoolError: No version of the target can build for this compute capability.
    """
    support, versions = find_gpu_support(capability, target)
    if support in (GpuSupport.TOO_NEW, GpuSupport.DROPPED):
        raise QdqtoolError(
            f"`gpu` {name}: {target.title} does not support compute capability {capability}. "
            f"Choose TensorRT {versions} (`target`)",
            code="unsupported",
            parameter="gpu",
        )


def _find_version_range(target: Target) -> tuple[Version, Version]:
    requested = version_numbers(target.requested_version)
    if requested is not None:
        return requested, requested
    has_minor = "." in target.name
    return target.version, target.version if has_minor else (target.version[0], LAST_MINOR)
