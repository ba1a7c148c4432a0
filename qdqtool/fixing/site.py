"""Places where fixes can be applied, and steps that search for these places."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy.typing as npt

from qdqtool.errors import ModelError
from qdqtool.findings.rules import attempted_codes, attempted_reasons
from qdqtool.fixing.common_scale import CommonScale, ScaleHistory
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding, FindingCode, Reason, split_fixable
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target

ATOL = 1e-6  # permitted difference due to rounding in float32
HALF_ROUNDING = 0.01  # permitted difference due to FP16 rounding in a few dozen layers

R = TypeVar("R", bound=Reason)
Place = tuple[str, str]  # code and node of a finding


@dataclass(frozen=True)
class FixSite:
    """Place where a fix can be applied.

    Attributes:
        node: Name of the node that identifies the place. A step changes it to the node of the
            finding.
        description: Description of the change in a few words.
        apply: Function that changes the model.
        names: Nodes and tensors that the fix is about, in addition to `node`.
        code: Code of the finding that the fix removes. A step sets it.
        findings: Code and node of every finding that the fix may remove.
        skip_reason: Reason why the fix is not tried; empty if it is tried.
        common_scale: Scale that the fix sets for several quantizers; None for other fixes.
        is_reported: Whether a finding reports the place.
    """

    node: str
    description: str
    apply: Callable[[Editor], None]
    names: Collection[str] = ()
    code: str = ""
    findings: frozenset[tuple[str, str]] = frozenset()
    skip_reason: str = ""
    common_scale: CommonScale | None = None
    is_reported: bool = True

    @property
    def place(self) -> tuple[str, str]:
        """Code and node of the finding, which identify the site."""
        return self.code, self.node


def select_default_sites(sites: Iterable[FixSite], findings: Iterable[Finding]) -> list[FixSite]:
    """Return the sites that need no request: they can remove a finding that is fixed by default."""
    _, on_request = split_fixable(findings)
    places = {(f.code, f.node) for f in on_request}
    return [site for site in sites if not site.findings <= places]


def count_total_loss(sites: Iterable[FixSite], history: ScaleHistory) -> list[FixSite]:
    """Return the sites with the loss of earlier common scales in their texts and limits."""
    counted = []
    for site in sites:
        if site.common_scale is not None:
            total = history.add_earlier(site.common_scale)
            skip_reason = site.skip_reason or total.find_obstacle()
            site = replace(
                site, description=total.describe(), skip_reason=skip_reason, common_scale=total
            )
        counted.append(site)
    return counted


def collect_names(reasons: Iterable[Reason]) -> set[str]:
    """Return the names of all nodes and tensors in reasons."""
    return {name for reason in reasons for name in reason.names()}


def find_nodes(view: View, names: Iterable[str]) -> list[Node]:
    """Return the nodes with these names, in the order of the file."""
    places = set(names)
    return [n for n in view.model.nodes if n.name in places]


def find_reason_nodes(view: View, reasons: Iterable[Reason]) -> list[Node]:
    """Return the nodes in the field `node` of reasons, in the order of the file."""
    return find_nodes(view, (r.node for r in reasons))


def select_reasons(kind: type[R] | tuple[type[R], ...], reasons: Iterable[Reason]) -> list[R]:
    """Return the reasons of one class or of several classes."""
    return [r for r in reasons if isinstance(r, kind)]


def map_reason_nodes(
    make_site: Callable[[View, Target, Node], FixSite | None],
) -> Callable[[View, Target, Sequence[Reason]], list[FixSite]]:
    """Turn a function that finds the site of one node into one that takes a list of reasons."""

    @functools.wraps(make_site)
    def find(view: View, target: Target, reasons: Sequence[Reason]) -> list[FixSite]:
        return drop_missing_sites(
            make_site(view, target, n) for n in find_reason_nodes(view, reasons)
        )

    return find


def drop_missing_sites(candidates: Iterable[FixSite | None]) -> list[FixSite]:
    """Return the sites in order, without None entries."""
    return [site for site in candidates if site is not None]


@dataclass(frozen=True)
class FixCriteria:
    """Purpose and permitted cost of changes that are kept or refused together.

    Attributes:
        reason_types: Classes of the reasons that the changes can remove.
        noise_factor: Permitted growth factor of the output errors against the float network.
        costs_speed: Whether the changes make the network slower, to make it more accurate.
        changes_types: Whether the changes convert data types (FP16, FP32). More conversions are
            then permitted, because a Cast may split a conversion into two.
        rounding: Permitted growth of the error in addition to `noise_factor`.
        requantizes_weights: Whether the changes quantize weights again. The models before and after
            the changes are then compared with the network that has float weights.
        shares_scales: Whether the changes make tensors share a scale. This costs precision, so it
            must gain more than the removal of the finding.
        requires: What a place must have so that it can be changed, as a noun. Empty: nothing.
    """

    reason_types: tuple[type[Reason], ...]
    noise_factor: float
    costs_speed: bool = False
    changes_types: bool = False
    rounding: float = ATOL
    requantizes_weights: bool = False
    shares_scales: bool = False
    requires: str = ""

    @functools.cached_property
    def codes(self) -> tuple[FindingCode, ...]:
        """Codes of the findings that the changes can remove."""
        return attempted_codes(self.reason_types)

    def select_causes(self, finding: Finding) -> tuple[Reason, ...]:
        """Return the reasons of a finding that the changes can remove."""
        if finding.code not in self.codes:
            return ()
        return tuple(select_reasons(self.reason_types, attempted_reasons(finding)))


# A name in more findings than this, such as weights that all layers share, does not connect a site
# with findings, unless all names of the site are in so many findings.
MAX_REPORTS_OF_NAME = 100


@dataclass(frozen=True)
class _ReasonReport:
    """A finding with its reasons, or a single reason without a finding.

    Attributes:
        code: Code of the finding.
        node: Node of the finding.
        reasons: Reasons of the finding, or the single reason.
        rank: Priority. A change is reported for the finding with the lowest number: 0 if the
            finding has an automatic fix, 1 if it has none, 2 for a reason without a finding.
    """

    code: FindingCode
    node: str
    reasons: tuple[Reason, ...]
    rank: int


@dataclass(frozen=True, kw_only=True)
class FixStep(FixCriteria):
    """Fixes that are tried together.

    Attributes:
        find: Function that returns the sites for a model, a target and the reasons of a prediction.
    """

    find: Callable[[View, Target, Sequence[Reason]], list[FixSite]]

    def find_sites(
        self, view: View, target: Target, prediction: Prediction, codes: Collection[str]
    ) -> list[FixSite]:
        """Return the sites that can remove findings with one of the codes.

        A reason without a finding is treated as a finding with the first code of its class. Its
        finding may be missing because another reason at the node costs more.
        """
        reports = self._collect_reports(prediction)
        # Reasons are compared by identity: the hash of a reason takes as long as it has consumers.
        reasons = list({id(r): r for report in reports for r in report.reasons}.values())
        if not reasons:
            return []
        numbers_by_name: dict[str, list[int]] = defaultdict(list)
        for number, report in enumerate(reports):
            if report.code in codes:
                for name in collect_names(report.reasons):
                    numbers_by_name[name] += [number]
        sites = []
        for site in self.find(view, target, reasons):
            numbers = _find_matching_reports(site, numbers_by_name)
            if numbers:
                sites.append(self._attach_reports(site, [reports[n] for n in sorted(numbers)]))
        return sites

    def _collect_reports(self, prediction: Prediction) -> list[_ReasonReport]:
        reports = []
        for f in prediction.findings:
            reasons = self.select_causes(f)
            if reasons:
                reports.append(_ReasonReport(f.code, f.node, reasons, not f.automatic))
        reported = {id(r) for report in reports for r in report.reasons}
        for r in select_reasons(self.reason_types, prediction.refusals):
            codes = [code for code in self.codes if code in attempted_codes((type(r),))]
            if codes and id(r) not in reported:
                reports.append(_ReasonReport(codes[0], r.node, (r,), 2))
        return reports

    def _attach_reports(self, site: FixSite, reports: Sequence[_ReasonReport]) -> FixSite:
        """Return a copy of a site with the code and node of its most important report.

        The copy also lists the findings of all reports.
        """
        places = {site.node, *site.names}

        def rank(report: _ReasonReport) -> tuple[int, bool, int, bool]:
            position = self.codes.index(report.code)
            return report.rank, report.node not in places, position, report.node != site.node

        first = min(reports, key=rank)
        node = first.node if first.node in places else site.node
        findings = frozenset((report.code, report.node) for report in reports)
        is_reported = first.rank < 2
        return replace(site, code=first.code, node=node, findings=findings, is_reported=is_reported)


def _find_matching_reports(site: FixSite, numbers_by_name: Mapping[str, Sequence[int]]) -> set[int]:
    """Return the indices of the reports that contain a name of the site.

    A name in more than 100 reports is ignored if another name of the site is in fewer reports.
    """
    groups = [numbers_by_name.get(name, ()) for name in {site.node, *site.names}]
    few = {n for group in groups if len(group) <= MAX_REPORTS_OF_NAME for n in group}
    return few or {n for group in groups for n in group}


def broadcast_along(
    values: npt.NDArray[Any], shape: tuple[int, ...], axis: int | None, name: str
) -> npt.NDArray[Any]:
    """Reshape scales or zero points so that they broadcast to a tensor.

    Args:
        values: Scales or zero points, one for each channel or a single one.
        shape: Shape of the tensor.
        axis: Axis of the channels; None for a single value.
        name: Name of the quantizer, for the error message.

    Raises:
        ModelError: The tensor has another number of channels than `values`.
    """
    if values.size == 1:
        return values.reshape(())
    position = 0 if axis is None else axis
    if not -len(shape) <= position < len(shape) or shape[position] != values.size:
        dims = "x".join(map(str, shape)) or "scalar"
        raise ModelError(
            f"{name} has {values.size} scales or zero points along axis {position} of a tensor "
            f"with the shape {dims}; export the model again",
            code="scale-count",
            node=name,
        )
    spread = [1] * len(shape)
    spread[position] = -1
    return values.reshape(spread)
