"""Sections of ``--help``: the main options are first, rarely used options are last."""

from __future__ import annotations

from collections.abc import Sequence

import click

_MIN_OPTIONS = 10  # a command with fewer options has no sections
MAIN = "Options"
# Options by section. Options that are in no section are main options.
SECTIONS = {
    "TensorRT and GPU": ("target", "strongly_typed", "precision", "gpu", "clock", "power"),
    "Calibration": ("method", "percentile", "max_images", "calib_cache", "calib_table"),
    "Preprocessing": ("preprocess", "resize", "bgr", "scale", "mean", "std", "size"),
    "Layers to quantize": (
        "head",
        "residual",
        "attention",
        "exclude",
        "include",
        "exclude_op",
        "high_precision",
        "smooth",
    ),
    "Search": ("whole_front", "chosen_on", "judged_on", "swept_on", "check_timeout"),
    "Checks": ("required", "require_gain", "fail_on", "min_agreement"),
    "Output": ("everything", "layers", "trace", "result", "page", "issue", "form"),
    "Rarely needed": (
        "method_for",
        "overwrite_cache",
        "write_table",
        "losses",
        "unify",
        "weights",
        "tuned",
        "input_type",
        "predict",
        "state",
        "no_state",
        "workers",
        "cluster",
        "mixed_cpus",
        "sm",
        "batch",
        "no_fp16",
        "calibrate",
        "save_calibration",
        "assume",
        "way",
        "effort",
        "dla_cache",
        "inputs",
        "outputs",
        "limit",
        "verification",
        "more_a",
        "more_b",
    ),
}


def group_options(options: Sequence[click.Option]) -> dict[str, list[click.Option]]:
    """Return the options of each section, in the order of ``--help``.

    All options of a command with few options are in one section.
    """
    if len(options) < _MIN_OPTIONS:
        return {MAIN: list(options)}
    section_of = {name: section for section, names in SECTIONS.items() for name in names}
    groups: dict[str, list[click.Option]] = {name: [] for name in (MAIN, *SECTIONS)}
    for option in options:
        groups[section_of.get(str(option.name), MAIN)].append(option)
    return {section: listed for section, listed in groups.items() if listed}
