"""What the page shows is what the other rooms said: held against their results and against a walk over the graph."""

import base64
import dataclasses
import functools
import json
import re
import zlib
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from calibration.cache import load_statistics
from calibration.methods import METHODS, amax_of
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.commands.cli import run
from qdqtool.commands.demo_run import yolov8n
from qdqtool.errors import DataError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.qdq import is_qdq, read_params
from qdqtool.options import Request
from qdqtool.render.reporting import data, nodes
from qdqtool.render.reporting.api import Report, collect
from qdqtool.render.reporting.page import embedded
from qdqtool.render.reporting.page import render as render_page
from qdqtool.render.reporting.sections import tuning_of as read_tuning
from qdqtool.timing.estimate import predict_on
from qdqtool.trt.trace import render
from tests.insertion.nets import Net
from tests.raising import raises
from tests.render.reporting.conftest import Made
from tests.render.reporting.networks import CONVOLUTIONS, yolov8x_qdq
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import DIFFERENT, advised, truth
from tests.trt.evidence import model as published

FIRST = ("yolo-resnet18-orin-trt8502", "resnet18-a100-qat-residual", "resnet18-qat-rtx2000-trt8510")
SOME_FIRST = slow_after(1, [*FIRST, *(case for case in DIFFERENT if case not in FIRST)])


@functools.cache
def page_of(case: str) -> data.Page:
    """What is shown of a recorded build's model; nobody changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "predict", lambda _, on, **__: advised(case, on.name))
        return collect(published(case), target=truth(case)["target"])


def prediction_of(case: str) -> qdqtool.Prediction:
    return advised(case, truth(case)["target"])


@pytest.mark.parametrize("case", SOME_FIRST)
def test_convolutions_and_conversions_are_those_of_the_prediction(case: str) -> None:
    prediction = prediction_of(case)
    model = page_of(case).model
    assert [(c.name, c.precision, c.inputs, c.output, c.evidence) for c in model.convs] == [
        (c.name, c.precision, [str(p) for p in c.inputs], c.output, c.evidence)
        for c in prediction.convolutions
    ]
    assert [c.name for c in model.conversions] == prediction.conversion_nodes
    assert [f.message for f in model.findings] == [f.message for f in prediction.findings]
    for conv in model.convs:
        assert model.nodes[conv.node].name == conv.name
        assert model.layers[conv.layer].name == prediction.convolution(conv.name).layer
        for number in conv.findings:
            assert number in model.nodes[conv.node].findings
    for finding in model.findings:
        for number in finding.nodes:
            assert finding.id in model.nodes[number].findings


@pytest.mark.parametrize("case", SOME_FIRST)
def test_drawings_hold_every_node_and_no_boxes_overlap(case: str) -> None:
    page = page_of(case)
    index = published(case)
    onnx_graph, engine = page.model.onnx, page.model.engine
    assert sorted(n for box in onnx_graph.boxes for n in box.rows) == list(
        range(len(page.model.nodes))
    )
    assert links_drawn(page.model) == links_of(index, {n.name for n in page.model.nodes})
    layers = [i for i, layer in enumerate(page.model.layers) if layer.type != "Conversion"]
    assert [box.layer for box in engine.boxes if box.role == "layer"] == layers
    marks = {m.name for e in engine.edges for m in e.marks if m.stays}
    assert marks == {layer.name for layer in page.model.layers if layer.type == "Conversion"}
    own = {c.name.partition("_clone_")[0] for c in page.model.conversions}
    assert {m.name for e in onnx_graph.edges for m in e.marks if m.stays} == own
    assert all(c.node >= 0 and c.layer >= 0 and c.to for c in page.model.conversions)
    for drawing in (page_of(case).model.onnx, page_of(case).model.engine):
        assert drawing.boxes
        for a, b in combinations(drawing.boxes, 2):
            assert a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
        for box in drawing.boxes:
            assert box.x >= 0 and box.x + box.w <= drawing.width and box.y + box.h <= drawing.height
        for edge in drawing.edges:
            heights = [y for _, y in edge.points]
            assert heights == sorted(heights)
            top, bottom = drawing.boxes[edge.source], drawing.boxes[edge.target]
            assert edge.points[0][1] == pytest.approx(top.y + top.h) and edge.points[-1][
                1
            ] == pytest.approx(bottom.y)
    model = page_of(case).model
    modules = model.modules
    assert sorted(n for box in modules.boxes for n in box.rows) == list(range(len(model.nodes)))
    assert all(e.source < e.target for e in modules.edges)
    home = {n: at for at, box in enumerate(modules.boxes) for n in box.rows}
    between = {
        (home[a], home[b])
        for e in model.onnx.edges
        for a in model.onnx.boxes[e.source].rows[:1]
        for b in model.onnx.boxes[e.target].rows[:1]
    }
    drawn = {
        (a, b)
        for a, b in ((e.source, e.target) for e in modules.edges)
        if modules.boxes[a].rows and modules.boxes[b].rows
    }
    assert drawn == {(a, b) for a, b in between if a != b}
    assert len(modules.boxes) <= 60


def links_of(index: Model, drawn: set[str]) -> set[tuple[str, str]]:
    """Pairs of drawn nodes, the second of which reads the first directly or through Q and DQ."""
    found = set()
    for node in index.nodes:
        if node.name not in drawn:
            continue
        for tensor in node.inputs:
            maker = index.producers.get(tensor)
            while maker is not None and is_qdq(maker):
                maker = index.producers.get(maker.inputs[0])
            if maker is not None and maker.name in drawn:
                found.add((maker.name, node.name))
    return found


def links_drawn(model: data.Model) -> set[tuple[str, str]]:
    """The same as the drawing has them: inside a box, and along its edges by the tensor that they carry."""
    maker = {t: n.name for n in model.nodes for t in n.outputs}
    found = set()
    inner = {n: at for at, box in enumerate(model.onnx.boxes) for n in box.rows}
    index_of = {n.name: i for i, n in enumerate(model.nodes)}
    wanted = {(e.source, e.target, e.tensor) for e in model.onnx.edges}
    for source, target, tensor in wanted:
        if tensor not in maker or model.onnx.boxes[target].role == "output":
            continue
        for reader in model.onnx.boxes[target].rows:
            if reads(model.nodes[reader], tensor):
                assert inner[index_of[maker[tensor]]] == source
                found.add((maker[tensor], model.nodes[reader].name))
    for box in model.onnx.boxes:
        for reader in box.rows:
            for writer in box.rows:
                if any(reads(model.nodes[reader], t) for t in model.nodes[writer].outputs):
                    found.add((model.nodes[writer].name, model.nodes[reader].name))
    return found


def reads(node: data.Node, tensor: str) -> bool:
    """Whether a node reads a tensor, directly or through the quantizers in front of it."""
    return tensor in node.inputs or any(
        s.tensor == tensor and s.where != "output" for s in node.scales
    )


def test_log_lines_belong_to_the_nodes_that_they_name() -> None:
    case = "yolo-resnet18-orin-trt8502"
    prediction = prediction_of(case)
    told = {render(e) for e in prediction.trace} | {
        f"{e.pass_name}: {render(e)}" for e in prediction.trace
    }
    model = page_of(case).model
    for conv in model.convs:
        lines = [model.lines[i] for i in model.nodes[conv.node].lines]
        assert all(line.text in told for line in lines)
        if conv.precision == "INT8":
            assert any(conv.name in line.text for line in lines)
            assert any("QuantizeDoubleInputNodes" in line.text for line in lines)
            assert all(model.cases[line.case].says for line in lines if line.case >= 0)


def test_scales_and_weights(made: Made) -> None:
    index = load(made.model)
    model = collect(made.model).model
    by_name = {n.name: n for n in index.nodes}
    seen = 0
    for node in model.nodes:
        for scale in node.scales:
            params = read_params(index, by_name[scale.quantizer])
            assert params.scale is not None and scale.channels == params.scale.size
            assert scale.scale == pytest.approx(params.scale.min(), rel=1e-5)
            assert scale.highest == pytest.approx(params.scale.max(), rel=1e-5)
            seen += 1
    assert {s.where for n in model.nodes for s in n.scales} == {
        "input",
        "weights",
        "output",
    } and seen >= 8
    float_model = onnx.load(made.float)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in float_model.graph.initializer}
    model = collect(made.model).model
    assert {w.name for w in model.weights} == {"first", "second", "third"}
    for weights in model.weights:
        expected = np.abs(values[f"{weights.name}.weight"]).reshape(16, -1).max(axis=1)
        np.testing.assert_allclose(weights.largest, expected, rtol=1e-3)
        np.testing.assert_allclose(weights.holds, expected, rtol=1e-3)
    page = collect(made.model, calib_cache=made.cache)
    packed = json.loads(zlib.decompress(base64.b64decode(embedded(page))))
    assert packed == json.loads(json.dumps(dataclasses.asdict(page)))
    statistics = load_statistics(made.cache)
    assert page.histograms and "8 images" in page.calibration
    for histogram in page.histograms:
        stats = statistics[histogram.tensor]
        assert sum(histogram.counts) == pytest.approx(stats.count, abs=len(histogram.counts))
        assert histogram.absmax == pytest.approx(stats.absmax, rel=1e-4)
        assert {m.name for m in histogram.methods} == set(METHODS)
        for method in histogram.methods:
            assert method.amax == pytest.approx(amax_of(stats, method.name), rel=1e-4)
    index = load(made.model)
    scale = read_params(index, index.node(page.histograms[0].quantizer)).scale
    assert scale is not None and page.histograms[0].chosen == pytest.approx(
        127 * scale[0], rel=1e-4
    )


def test_groups_and_reports(made: Made) -> None:
    groups = collect(made.model, before=made.float).groups
    tied = next(g for g in groups if len(g.tensors) > 1)
    assert tied.tied == "tied, one scale" and tied.scale is not None
    assert {g.tied for g in groups} == {"tied, one scale", "alone"}
    alone = collect(made.model).groups
    assert {g.tied for g in alone} == {"equal scales", "alone"}
    report = Report(collect(made.model), "<html>" * 1000, "page.html")
    assert len(repr(report)) < 60
    assert report.ok == all(f.severity == "info" for f in report.page.model.findings)


def test_times_and_kernels(made: Made, tmp_path: Path) -> None:
    page = collect(made.model, gpu="T4", before=made.float)
    assert page.model.time is not None and page.before is not None and page.before.time is not None
    layers = sum(layer.ms or 0.0 for layer in page.model.layers)
    others = sum(p.ms or 0.0 for p in page.parts if p.kind in ("region", "edge"))
    assert sum(p.ms or 0.0 for p in page.parts) == pytest.approx(layers + others, rel=1e-3)
    assert page.roof is not None and page.roof.rates["INT8"] == pytest.approx(
        2 * page.roof.rates["FP16"]
    )
    before = {c.name: c.before for c in page.model.convs}
    assert before == dict.fromkeys(("first", "second", "third"), "FLOAT → FLOAT")
    g = Graph(17)
    w, v = (
        g.const(n, np.ones(s), np.float32) for n, s in (("w", (8, 2, 3, 5)), ("v", (4, 8, 1, 1)))
    )
    y = g.op("Conv", [g.input(1, 4, 8, 8), w], "c", strides=[2, 1], group=2, pads=[1, 2, 1, 2])
    model = collect(g.model(g.op("Conv", [g.op("LeakyRelu", y, "l", alpha=0.5), v], "d"))).model
    assert [dict(n.attributes) for n in model.nodes] == [
        {
            "Weights shape": "8x2x3x5",
            "Kernel": "3x5",
            "Stride": "2x1",
            "Groups": "2",
            "Padding": "1, 2, 1, 2",
        },
        {"alpha": "0.5"},
        {"Weights shape": "4x8x1x1", "Kernel": "1x1", "Stride": "1x1", "Groups": "1"},
    ]
    assert {e.tensor: e.shape for e in model.onnx.edges} == {
        "x": "1x4x8x8",
        "l:0": "1x8x4x8",
        "d:0": "1x4x4x8",
    }


def test_a_build_is_measured_first(made: Made, tmp_path: Path) -> None:
    """Names and times of a made-up profile; with a GPU that nobody knows there is no estimate beside them."""
    layers = qdqtool.predict(made.model).layers
    own = {layer.name: 0.25 * (i + 1) for i, layer in enumerate(layers)}
    rows = {
        **own,
        "{ForeignNode[a...b]}": 7.0,
        "Reformatting CopyNode for Input Tensor 0 to a": 2.0,
        "else": 1.0,
    }
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            [
                {"count": 2},
                *(
                    {"name": n, "timeMs": 2 * ms, "averageMs": ms, "percentage": 1}
                    for n, ms in rows.items()
                ),
            ]
        )
    )
    listing = tmp_path / "layers.json"
    listing.write_text(json.dumps({"Layers": list(rows), "Bindings": ["x", "end"]}))
    for gpu in ("T4", None):
        page = collect(made.model, listing, profile, gpu=gpu)
        assert [layer.measured for layer in page.model.layers] == [
            own[layer.name] for layer in layers
        ]
        assert [(r.name, r.ms) for r in page.unlisted] == list(rows.items())[len(layers) :]
        parts = {p.kind: p for p in page.parts}
        assert [parts[k].measured_ms for k in ("region", "layout", "edge")] == [7.0, 2.0, 1.0]
        assert sum(p.measured_ms or 0.0 for p in page.parts) == pytest.approx(sum(rows.values()))
        assert all(p.ms is None for p in page.parts) == (gpu is None)
        assert page.agreement is not None and (page.agreement.predicted_ms is None) == (gpu is None)
        assert page.agreement.measured_ms == pytest.approx(sum(rows.values()), rel=0.1)
        if gpu is not None:  # the time that verify shows, what profiling added taken off
            times = qdqtool.verify(made.model, listing, profile, gpu=gpu).times
            assert times is not None and times["built_ms"] == page.agreement.measured_ms < sum(
                rows.values()
            )
            assert page.model.time is not None and "INT8 as placed" in page.model.time.decision[0]
        shown = re.sub(r"<[^>]+>", " ", render_page(page))
        assert "Time, measured" in shown and "Time, estimated" not in shown
        for table in ("convolution-table", "layer-table"):
            heads = re.findall(
                r"(Measured|Est\.) ms",
                render_page(page).split(f'id="{table}"')[1].split("</thead>")[0],
            )
            assert heads == (["Measured", "Est."] if gpu else ["Measured"])


@pytest.mark.parametrize(
    ("cin", "cout", "count", "fits"),
    [
        (16, 16, 3, True),
        (16, 16, 4, True),
        (16, 16, 5, False),
        (16, 8, 3, False),
        (16, 16, 0, False),
    ],
)
def test_another_network_is_refused_as_the_one_before(
    made: Made, tmp_path: Path, cin: int, cout: int, count: int, fits: bool
) -> None:
    """The three weights of the model are 16x16x3x3 twice and 16x32x3x3 once."""
    net, tensor = Net(cin, 16), "x"
    for i in range(count):
        tensor = net.conv(f"c{i}", tensor, cin=cin if i == 0 else cout, cout=cout)
    net.output(net.op("Relu", "end", tensor))
    onnx.save(net.model(), tmp_path / "other.onnx")
    if fits:
        assert collect(made.model, before=tmp_path / "other.onnx").before is not None
    else:
        with raises(DataError, "_require_same_network other.onnx"):
            collect(made.model, before=tmp_path / "other.onnx")


def relus(names: list[str]) -> onnx.ModelProto:
    """Nodes behind one another."""
    g = Graph(17)
    return g.model(functools.reduce(g.relu, names, g.input(1)))


def test_modules_are_those_of_the_names_and_stretches_without_names() -> None:
    model = collect(yolov8n(64)).model
    titles = [box.title for box in model.modules.boxes]
    assert [f"model.{i}" for i in range(22)] == [
        t for t in titles if t.count("/") == 0 and "22" not in t
    ][1:-1]
    for at, box in enumerate(model.modules.boxes):
        own = {model.nodes[n].name.split("/")[1] for n in box.rows}
        assert own == ({titles[at].split("/")[0].split(" ")[0]} if box.rows else set())
    chain = collect(relus([f"r{i}" for i in range(100)])).model.modules
    assert 5 <= len(chain.boxes) <= 12 and chain.boxes[1].title.startswith("r0 to r")


def test_what_a_report_has_without_layers(made: Made, tmp_path: Path) -> None:
    model = collect(made.model, target="rtx1.7").model
    assert not model.layers and "names no layers" in model.engine.why and model.onnx.boxes
    for names in ([], ["r"]):
        assert "nothing to run in INT8" in qdqtool.report(relus(names)).html
    with pytest.raises(DataError, match="no such file"):
        tuning_of(tmp_path / "none.json")


def test_a_report_is_of_what_a_gpu_has_on_its_target() -> None:
    """TensorRT-RTX has no INT8 on a T4, and classic TensorRT has."""
    g = Graph()
    model = g.model(g.conv(g.conv(g.input(1, 16, 16, 16), "a", 16), "b", 16, scale=0.05))
    for target, gpu, int8 in (("rtx1.7", "T4", 0), ("rtx1.7", "RTX 3060", 2), ("trt10", "T4", 2)):
        made = qdqtool.report(model, target=target, gpu=gpu)
        assert [c.precision for c in made.page.model.convs].count("INT8") == int8


@pytest.mark.slow
def test_yolov8x_fits_in_1_5_mb() -> None:
    made = qdqtool.report(yolov8x_qdq(), gpu="T4", before=yolov8x_qdq())
    assert len(made.page.model.convs) == CONVOLUTIONS
    assert len(made.html.encode()) < 1_500_000


POINT = {
    "name": "p",
    "convolutions": 4,
    "conversions": 1,
    "low": 0.9,
    "high": 0.99,
    "chosen_on": 0.95,
}


def result(**changes: Any) -> dict[str, Any]:
    found = {
        "schema": "qdqtool/tuning/1",
        "gpu": "RTX 3060",
        "goal": {"keep": 0.97, "budget_ms": 5.0, "reached": True},
        "metric": {"name": "agreement-map", "sentence": "AP with the float model.", "float": 1.0},
        "cost": {"unit": "ms", "sentence": "predicted milliseconds"},
        "sites": [
            {
                "site": "/a",
                "kind": "convolution",
                "choice": "float",
                "why": "it costs",
                "loss": 0.1,
                "ms": None,
            }
        ],
        "front": [
            {
                **POINT,
                "index": i,
                "int8": 4 - i,
                "ms": 2.0 + i,
                "cost": 2.0 + i,
                "metric": 0.9 + 0.03 * i,
            }
            for i in range(3)
        ],
        "others": [{**POINT, "index": 9, "int8": 0, "ms": 6.0, "cost": 6.0, "metric": 0.95}],
        "chosen": {**POINT, "index": 1, "int8": 3, "ms": 3.0, "cost": 3.0, "metric": 0.93},
        "notes": ["a note"],
        "warnings": [],
    }
    return {**found, **changes}


def tuning_of(path: Path) -> data.Tuning:
    """Read for a model of two nodes."""
    return read_tuning(path, Model(relus(["/a", "/b"])))


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        (["/a"], True),
        (["/a", "/c"], True),
        (["/c"], False),
        (["/a", "/c", "/d"], False),
        ([], True),
    ],
)
def test_of_another_network_it_is_refused(tmp_path: Path, nodes: list[str], fits: bool) -> None:
    path = write(
        tmp_path,
        result(sites=[{"site": "s", "kind": "convolution", "choice": "float", "nodes": nodes}]),
    )
    if fits:
        assert tuning_of(path).points
    else:
        with raises(DataError, "tuning_of tuning.json"):
            tuning_of(path)


def write(folder: Path, value: Any) -> Path:
    path = folder / "tuning.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_fronts(tmp_path: Path) -> None:
    found = tuning_of(write(tmp_path, result()))
    assert [(p.x, p.metric, p.on_front, p.chosen) for p in found.points] == [
        (2.0, 0.9, True, False),
        (3.0, pytest.approx(0.93), True, True),
        (4.0, pytest.approx(0.96), True, False),
        (6.0, 0.95, False, False),
    ]
    assert found.axis == "estimated milliseconds on RTX 3060" and found.keep == pytest.approx(0.97)
    assert (found.budget, found.reached, found.notes) == (5.0, True, ["a note"])
    assert found.sites == [["/a", "convolution", "float", "0.1", "", "it costs"]]
    front = [{**p, "ms": None} for p in result()["front"]]
    found = tuning_of(write(tmp_path, result(front=front, others=[], gpu=None, goal={})))
    assert [p.x for p in found.points] == [2.0, 3.0, 4.0] and found.axis == "predicted milliseconds"
    assert found.keep is None and found.budget is None
    unjudged = {
        **POINT,
        "int8": 1,
        "ms": 4.0,
        "cost": 4.0,
        "metric": None,
        "low": None,
        "high": None,
    }
    found = tuning_of(write(tmp_path, result(others=[*result()["others"], unjudged])))
    assert [p.metric for p in found.points if not p.on_front] == [0.95]
    assert found.notes[0].startswith("1 more were tried and not judged")


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        {"schema": "qdqtool/tuning/2"},
        result(front=None),
        result(front=[1]),
        result(front=[{**POINT, "index": 0, "ms": 1.0, "cost": 1.0, "int8": 1}]),
        result(front=[{**POINT, "index": 0, "ms": "fast", "cost": 1.0, "int8": 1, "metric": 0.5}]),
        result(
            front=[{**POINT, "index": 0, "ms": 1.0, "cost": 1.0, "int8": 1, "metric": float("nan")}]
        ),
        result(sites=[3]),
        result(metric=[]),
        result(goal={"keep": [1]}),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, broken: Any) -> None:
    path = write(tmp_path, broken)
    with raises(DataError, "tuning_of tuning.json"):
        tuning_of(path)


def test_a_build_of_tensorrt_rtx_is_shown_for_the_gpu_that_it_names() -> None:
    g = Graph()
    model = g.model(g.conv(g.conv(g.input(1, 16, 16, 16), "a", 16), "b", 16, scale=0.05))
    for facts, gpu in (({"Compute Capability": "7.5", "SMs": "40"}, None), ({}, "T4")):
        build = Build(
            tensorrt="1.7.1",
            is_rtx=True,
            layers=[BuiltLayer("a")],
            device="Tesla T4" if facts else None,
            gpu=facts,
        )
        made = qdqtool.report(model, build, gpu=gpu)
        assert made.page.model.counts["int8"] == 0 and made.as_json()["compute_capabilities"] == [
            "7.5"
        ]
        time = predict_on(model, "rtx1.7", Request(gpu="T4"))[1]
        assert time is not None and made.page.model.time is not None
        assert made.page.model.time.total == pytest.approx(
            time.total_ms, rel=0.2
        )  # of the clock that a log tells
        assert any("has no INT8 on" in note for note in made.page.model.time.notes)


def test_a_version_is_called_as_the_user_did() -> None:
    g = Graph()
    model = g.model(g.conv(g.input(1, 16, 16, 16), "a", 16))
    made = qdqtool.report(model, target="10.3", gpu="P100", before=model)
    assert made.as_json()["target"] == "trt10"  # whose rules they are
    pages = [made.page.model, made.page.before]
    assert [p.target for p in pages if p is not None] == ["10.3"] * 2
    said = re.findall(
        r"\w*\b(?:trt10|10\.3)\b",
        re.sub(r"<(script|style).*?</\1>", "", made.html, flags=re.DOTALL),
    )
    assert said.count("trt10") == made.html.count("those of trt10") > 0 and said.count("10.3") > 3


def test_what_tune_itself_writes(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    code = run(
        [
            "tune",
            str(made.float),
            "--calib",
            str(made.folder / "data.npz"),
            "--gpu",
            "T4",
            "--keep",
            "0.999",
            "--front",
            "--no-state",
            "-o",
            str(tmp_path / "tuned.onnx"),
            "--result",
            str(out),
        ]
    )
    assert code in (0, 1)
    written = json.loads(out.read_text())
    found = read_tuning(out, load(made.model))
    assert [p.metric for p in found.points if p.on_front] == [p["metric"] for p in written["front"]]
    assert [p.x for p in found.points if p.on_front] == [p["ms"] for p in written["front"]]
    assert [p.int8 for p in found.points if p.chosen] == [written["chosen"]["int8"]]
    assert (
        len(found.sites) == len(written["sites"])
        and found.axis == "estimated milliseconds on Tesla T4"
    )
