"""Shell completion of GPUs, targets, finding codes and build methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _make_completer(list_words: Callable[[], Iterable[str]]) -> Completer:
    """Return a completer that ignores case, and calls `list_words` only to complete a word."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        start = incomplete.lower()
        return [CompletionItem(word) for word in list_words() if word.lower().startswith(start)]

    return complete


def _list_gpus() -> Iterable[str]:
    from qdqtool.timing.gpus import all_gpus

    # A name with hyphens instead of spaces is one word for the shell.
    return [gpu.name.lower().replace(" ", "-") for gpu in all_gpus()]


def _list_targets() -> Iterable[str]:
    from qdqtool.trt.targets import TARGETS

    return TARGETS


def _list_codes() -> Iterable[str]:
    from qdqtool.findings.codes import CODES

    return CODES


def _list_fail_codes() -> Iterable[str]:
    return ["error", "warning", *_list_codes()]


def _list_build_methods() -> Iterable[str]:
    from qdqtool.findings.build_methods import BUILD_METHODS

    return BUILD_METHODS


complete_gpus = _make_completer(_list_gpus)
complete_targets = _make_completer(_list_targets)
complete_codes = _make_completer(_list_codes)
complete_fail_codes = _make_completer(_list_fail_codes)
complete_build_methods = _make_completer(_list_build_methods)
