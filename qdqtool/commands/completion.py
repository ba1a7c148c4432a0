"""Shell completion of GPUs, targets, finding codes and build methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def make_completer(list_words: Callable[[], Iterable[str]]) -> Completer:
    """Return a completer that ignores case, and calls `list_words` only to complete a word."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        start = incomplete.lower()
        return [CompletionItem(word) for word in list_words() if word.lower().startswith(start)]

    return complete


def complete_gpus(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a GPU's name from any of its words: ``or`` becomes ``orin-nano-8gb``.

    A name with hyphens instead of spaces is one word for the shell.
    """
    from click.shell_completion import CompletionItem

    from qdqtool.timing.gpus import all_gpus

    names = (_complete_gpu(gpu.name, incomplete.lower().replace(" ", "-")) for gpu in all_gpus())
    return [CompletionItem(name) for name in names if name]


def _complete_gpu(name: str, start: str) -> str:
    """Return the words of a name from the one that begins with `start`; empty if none does.

    If other GPUs have these words too, the result is the whole name.
    """
    from qdqtool.timing.gpus import match_gpus

    words = name.lower().split()
    ends = ["-".join(words[i:]) for i in range(len(words))]
    matches = [end for end in ends if end.startswith(start)]
    unique = (end for end in matches if [gpu.name for gpu in match_gpus(end)] == [name])
    return next(unique, ends[0]) if matches else ""


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


complete_targets = make_completer(_list_targets)
complete_codes = make_completer(_list_codes)
complete_fail_codes = make_completer(_list_fail_codes)
complete_build_methods = make_completer(_list_build_methods)
