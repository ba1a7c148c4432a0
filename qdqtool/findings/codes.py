"""Table of finding codes, from ``qdqtool/findings/codes.toml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qdqtool.evidence import Evidence
from qdqtool.reasons.finding import Severity
from qdqtool.trt.targets import STRONGLY_TYPED, TARGETS, target_before
from qdqtool.util.tables import LazyEntries, make_entry, read_sections

ALL_TARGETS = tuple(TARGETS)
# First target that is always strongly typed. Its codes also apply to strongly typed networks of
# earlier targets.
_TYPED = next(t.name for t in TARGETS.values() if t.strongly_typed and not t.is_rtx)


class CodeScope(NamedTuple):
    """Targets to which a code applies.

    Attributes:
        targets: Targets (``trt8.5`` ...).
        evidence: Evidence for these targets.
        source: Build or document that is the evidence.
        severity: Severity on these targets, if it differs from the severity of the code.
        code_evidence: Evidence of the code without regard to the target's rules, if `evidence` is
            limited by that of these rules as a whole; else None.
    """

    targets: tuple[str, ...]
    evidence: Evidence
    source: str
    severity: Severity | None = None
    code_evidence: Evidence | None = None

    @property
    def evidence_text(self) -> str:
        """The evidence for users. A finding about a layer has the evidence of the layer's rules."""
        if self.code_evidence in (None, self.evidence):
            return self.evidence
        return f"{self.evidence}, or {self.code_evidence} for layers that predict marks as seen"

    def evidence_at(self, rules: Evidence | None) -> Evidence:
        """Return the evidence of a finding at a node.

        Args:
            rules: Evidence of the rules that decide the outcome of the node on the target. It
                replaces the evidence of all rules of the target. None if it is unknown.
        """
        if rules is None:
            return self.evidence
        return (self.code_evidence or self.evidence).choose_weaker(rules)

    def split_by_evidence(self) -> list[CodeScope]:
        """Return one scope for each level of evidence among the targets.

        On a target, the evidence of a code is not stronger than the evidence of the target's rules.
        """
        evidence = {t: self.evidence.choose_weaker(TARGETS[t].evidence) for t in self.targets}
        scopes = []
        for level in dict.fromkeys(evidence.values()):
            targets = tuple(t for t in evidence if evidence[t] == level)
            scopes.append(CodeScope(targets, level, self.source, self.severity, self.evidence))
        return scopes


class FindingCodeEntry(NamedTuple):
    """A finding code and its explanation.

    Attributes:
        code: The code, for instance ``SKIP-FLOAT``.
        title: Title of one line.
        severity: Severity on targets for which ``holds`` has no other severity.
        cause: Cause in the model.
        tensorrt: Effect in TensorRT.
        log: Lines of a build log that show the problem, in the wording of TensorRT if it is known.
        fix: Advice. Empty if no action is needed.
        fix_by_rate: Two texts: advice for GPUs that compute INT8 faster than FP16, and advice for
            other GPUs. Empty if the advice does not depend on the rates.
        holds: Targets to which the code applies, with evidence.
        builds: Whether the build succeeds in spite of the error, with wrong results.
        passes: Whether the finding comes from the simulated passes. If so, its evidence is not
            stronger than that of the target's rules.
        saves_time: Whether the fix can save time, because more convolutions run in INT8 or fewer
            conversions remain.
        error: TensorRT's error text by prefixes of targets (``trt8``, ``trt10 rtx`` ...), the most
            specific first. In `log`, prefixes in braces are placeholders for these texts.
        error_since: First version with the error text, by target. Only for targets whose earlier
            versions have another text.
        other_severities: Further severities, which depend on the model. For example, a warning is a
            note if the fix gains nothing.
    """

    code: str
    title: str
    severity: Severity
    cause: str
    tensorrt: str
    log: str
    holds: tuple[CodeScope, ...]
    fix: str = ""
    fix_by_rate: tuple[str, ...] = ()
    builds: bool = False
    passes: bool = False
    saves_time: bool = True
    error: tuple[tuple[str, str], ...] = ()
    error_since: tuple[tuple[str, str], ...] = ()
    other_severities: tuple[str, ...] = ()

    @property
    def severity_text(self) -> str:
        """The severities for users: ``warning``, or ``warning or note, depending on the case``."""
        by_target = (scope.severity for scope in self.holds if scope.severity is not None)
        severities = (self.severity, *map(Severity, self.other_severities), *by_target)
        words = list(dict.fromkeys(severity.word for severity in severities))
        basis = "case" if self.other_severities else "target"
        return f"{' or '.join(words)}, depending on the {basis}" if len(words) > 1 else words[0]

    def scope_on(self, target: str) -> CodeScope | None:
        """Return the scope that includes a target; None if the code does not apply to it.

        If no code names a new target, the codes of the nearest earlier target apply to it. The
        evidence of these codes is not stronger than that of the new target's rules.
        """
        base = target.removesuffix(STRONGLY_TYPED)
        listed = _listed_target(base)
        names = {listed} if base == target else {listed, _TYPED}
        scope = next((s for s in self.holds if not names.isdisjoint(s.targets)), None)
        if scope is None or listed == base:
            return scope
        return scope._replace(evidence=scope.evidence.choose_weaker(TARGETS[base].evidence))

    def fix_on(self, has_fast_int8: bool | None) -> str:
        """Return the advice for a GPU.

        Args:
            has_fast_int8: Whether the GPU computes INT8 faster than FP16; None if no GPU is given.
        """
        if has_fast_int8 is None or not self.fix_by_rate:
            return self.fix
        faster, slower = self.fix_by_rate
        return faster if has_fast_int8 else slower

    def severity_on(self, target: str) -> Severity:
        """Return the severity on a target."""
        scope = self.scope_on(target)
        return self.severity if scope is None or scope.severity is None else scope.severity

    def error_text(self, target: str) -> str:
        """Return TensorRT's error text on a target; empty if unknown."""
        for prefixes, text in self.error:
            if target.startswith(tuple(prefixes.split(" "))):
                return text
        return ""

    def quote_error(self, target: str) -> str:
        """Return a sentence that quotes TensorRT's error text; empty if the text is unknown."""
        text, scope = self.error_text(target), self.scope_on(target)
        since = dict(self.error_since).get(target.removesuffix(STRONGLY_TYPED))
        speaker = "TensorRT" if since is None else f"TensorRT {since} and later"
        is_assumed = scope is not None and scope.evidence == Evidence.ASSUMED
        verb = "probably says" if is_assumed else "says"
        return f'{speaker} {verb}: "{text}"' if text else ""


def read_code(name: str, fields: dict[str, Any]) -> FindingCodeEntry:
    """Create the entry of a code from the fields in the table.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    scopes = [make_entry(CodeScope, s, f"{name}.holds") for s in fields.get("holds", ())]
    if fields.get("passes"):
        scopes = [part for scope in scopes for part in scope.split_by_evidence()]
    error = tuple(fields.get("error", {}).items())
    since = tuple(fields.get("error_since", {}).items())
    for targets, text in error:
        fields = {**fields, "log": fields["log"].replace(f"{{{targets}}}", text)}
    fields = {**fields, "code": name, "holds": tuple(scopes), "error": error, "error_since": since}
    return make_entry(FindingCodeEntry, fields, name)


CODES: Mapping[str, FindingCodeEntry] = LazyEntries(
    read_sections(Path(__file__).with_name("codes.toml")), read_code
)


@functools.cache
def _listed_target(target: str) -> str:
    """Return the target if a code names it, else the nearest earlier target that a code names."""
    before = target_before(target)
    if before is None or any(target in s.targets for code in CODES.values() for s in code.holds):
        return target
    return _listed_target(before.name)


def get(code: str) -> FindingCodeEntry:
    """Return the entry of a code.

    Raises:
        KeyError: The code does not exist.
    """
    return CODES[code]


def find(text: str) -> FindingCodeEntry | None:
    """Return the entry of a code, also for spellings such as ``skip_float``; None if unknown."""
    return CODES.get(text.strip().upper().replace("_", "-").replace(" ", "-"))


def suggest_code(text: str) -> str:
    """Return advice for an unknown code: similar codes, or how to list all codes."""
    near = find_similar_codes(text)
    return f"did you mean {', '.join(near)}?" if near else "see 'qdqtool explain --list'"


_MAX_WORDS = 2  # maximum number of words in a text that may be a code written with spaces
_MAX_SIMILAR = 3


def find_similar_codes(text: str) -> list[str]:
    """Return up to three codes of similar spelling, nearest first; none for a long text."""
    if len(text.split()) > _MAX_WORDS:
        return []
    name = text.strip().upper().replace("_", "-")
    if not name:
        return []
    import difflib

    close = difflib.get_close_matches(name, CODES, n=_MAX_SIMILAR, cutoff=0.6)
    words = set(name.split("-"))
    parts = [code for code in CODES if name in code or words & set(code.split("-"))]
    return list(dict.fromkeys([*close, *parts]))[:_MAX_SIMILAR]
