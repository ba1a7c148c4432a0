from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from qdqtool.trt import trace
from qdqtool.trt.trace import Event
from tests.tables import rows


def read(lines: Iterable[str]) -> list[Event | None]:
    return list(map(trace.TraceReader().read, lines))


# Lines of real logs (8.2 to 8.5), with the event of each when it is the first line.
@pytest.mark.parametrize("row", rows("logs/trace.tsv"), ids=lambda row: row[0])
def test_line_parses_to_event_and_renders_back(row: list[str]) -> None:
    line, event = row[0], Event(*row[1:])
    assert (trace.parse(line), trace.render(event)) == (event, line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Running: ",
        "Running: two words on x",
        "Removing ",
        "Swapping A",
        "Original: 730 layers",
        "Retargeting A",
        "Eliminating A",
        "ConvReluFusion: Fusing A",
        "Tactic: 0x12 Time: 0.1",
        "Fusing A with B",
        "Swap the layer type of A from B",
        "Generating copy for a to b",
        "&&&& RUNNING TensorRT.trtexec",
    ],
)
def test_other_lines_are_not_events(line: str) -> None:
    assert trace.parse(line) is None


def test_line_without_pass_belongs_to_running_pass() -> None:
    lines = [
        "Running: QuantizeConvWithResidualAdd on Conv_34",
        "QuantizeDoubleInputNodes: fusing QuantizeLinear_46 into Conv_34",
        "Removing QuantizeLinear_46",
        "Merging layers: A || B",
    ]
    assert [(e.pass_name, e.kind) for e in read(lines) if e] == [
        ("QuantizeConvWithResidualAdd", "Running"),
        ("QuantizeDoubleInputNodes", "fusing"),
        ("QuantizeConvWithResidualAdd", "Removing"),
        ("", "Merging layers"),
    ]


def test_reset_forgets_running_pass() -> None:
    reader = trace.TraceReader()
    reader.read("Running: QDQToCopy on Q")
    reader.reset()
    assert reader.read("Removing A") == Event("", "Removing", "A")


_PIECES = st.sampled_from(
    [
        "/model.0/conv/Conv",
        "a",
        " + ",
        " with ",
        " into ",
        " to ",
        " on ",
        " from ",
        " --> ",
        "PWN(x, y)",
        "(Unnamed Layer* 3) [Shuffle]",
        " by retargeting ",
        " which duplicates (Q) ",
        "QuantizeLinear_7_clone_1",
        "[0]",
        " || ",
        " because of stomping hazard.",
        "é",
        "::",
    ]
)
_NAMES = st.lists(_PIECES, min_size=1, max_size=4).map("".join).map(str.strip).filter(bool)
_PASSES = st.sampled_from(
    ["ConvReluFusion", "QuantizeDoubleInputNodes", "VanillaSwapWithFollowingQ"]
)


@st.composite
def _steps(draw: st.DrawFn) -> list[Event]:
    """Draw the lines of one pass about one layer, which is part of every line with two names."""
    owner, layer = draw(_PASSES), draw(_NAMES)
    events = [Event(owner, trace.RUNNING, layer)]
    for kind in draw(
        st.lists(st.sampled_from(sorted(set(trace.FORMATS) - {trace.RUNNING})), max_size=5)
    ):
        wording = trace.FORMATS[kind]
        scope = {"printed": draw(_PASSES), "running": owner, "none": ""}[wording.scope]
        if not wording.between:
            events.append(Event(scope, kind, draw(_NAMES)))
        elif kind in (trace.SWAP_TYPE, trace.CONVERT_TYPE):
            events.append(Event(scope, kind, draw(_NAMES), "QUANTIZE to kQDQ"))
        else:
            events.append(Event(scope, kind, draw(_NAMES), layer))
    return events


@given(st.lists(_steps(), max_size=6))
def test_rendered_trace_parses_back(steps: list[list[Event]]) -> None:
    events = [event for step in steps for event in step]
    assert read(map(trace.render, events)) == events


def by_counting(text: str, joint: str) -> tuple[str, str]:
    """Split at the first joint at which the brackets of both sides close, else at the first."""

    def closed(name: str) -> bool:
        return name.count("(") == name.count(")") and name.count("[") == name.count("]")

    places = [i for i in range(len(text)) if text.startswith(joint, i)]
    at = next((i for i in places if closed(text[:i]) and closed(text[i + len(joint) :])), places[0])
    return text[:at], text[at + len(joint) :]


@given(
    st.lists(st.sampled_from(["a", "(", ")", "[", "]", " with "]), min_size=1, max_size=14).map(
        "".join
    )
)
def test_two_names_are_split_where_brackets_close(text: str) -> None:
    event = trace.parse(f"Swapping {text}")
    if " with " not in text:
        assert event is None
    else:
        assert (event.subject, event.object) == by_counting(text, " with ")
