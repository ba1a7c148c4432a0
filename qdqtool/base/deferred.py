"""Onnx is loaded only when something asks for it, and of protobuf what its classes need; onnxruntime without leaving a
file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_NAME = "onnx"
_TEXTS = "google.protobuf.text_format"
#: What onnxruntime is to have in its environment when it is loaded, else it leaves a file `.ses` in TMPDIR.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
NO_MEMORY = "bfc_arena"  # stands in what onnxruntime says where it got no memory


class _Deferred(ModuleType):
    """Stands for the package until something is asked for that is no message class and no module of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name[0].isupper():
            defer_text_format()
        value = (
            getattr(importlib.import_module("onnx.onnx_ml_pb2"), name, None)
            if name[0].isupper()
            else None
        )
        if value is None and importlib.util.find_spec(f"onnx.{name}") is not None:
            value = importlib.import_module(f"onnx.{name}")
        if value is None:
            self._load()
            return getattr(self, name)
        setattr(self, name, value)
        return value

    def _load(self) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]  # an ordinary module from here on, also for what its own files import
        try:
            assert self.__spec__ is not None and self.__spec__.loader is not None
            self.__spec__.loader.exec_module(self)
        except BaseException:
            sys.modules.pop(_NAME, None)  # as a failed import does
            raise


def defer() -> None:
    """Puts a stand-in in the place of onnx, unless it is loaded, or not installed."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[_NAME] = module


def load_onnxruntime() -> Any:
    """onnxruntime, loaded with :data:`NO_TELEMETRY` in its environment, unless that says otherwise."""
    added = (
        {}
        if "onnxruntime" in sys.modules
        else {k: v for k, v in NO_TELEMETRY.items() if k not in os.environ}
    )
    os.environ.update(added)
    try:
        import onnxruntime
    finally:
        for name in added:
            os.environ.pop(name, None)
    return onnxruntime


def defer_text_format() -> None:
    """Lets protobuf's module of texts, which onnx's classes load and messages do without, wait until somebody asks."""
    spec = None if _TEXTS in sys.modules else importlib.util.find_spec(_TEXTS)
    if spec is not None and spec.loader is not None:
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = sys.modules[_TEXTS] = importlib.util.module_from_spec(spec)
        package: Any = sys.modules[_TEXTS.rpartition(".")[0]]
        package.text_format = module
        spec.loader.exec_module(module)
