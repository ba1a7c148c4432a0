import base64
import dataclasses
import functools
import gzip
import json
import re
import zlib
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from calibration import METHODS, amax_of, load_statistics
from qdqtool.buildlog.agreement import Difference, Mismatch, MismatchKind
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.commands.cli import run
from qdqtool.demo.network import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.qdq import is_qdq, read_params
from qdqtool.reporting import api, data
from qdqtool.reporting.nodes import ModelCollector, ReportSubject
from qdqtool.reporting.options import ReportInputs
from qdqtool.reporting.page import encode_contents, render_page
from qdqtool.reporting.sections import MAX_MISMATCHES, collect_agreement, read_tuning
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import render
from qdqtool.verification.api import verify
from tests.buildlog.evidence import build_file
from tests.comparison.networks import float_network, network, with_dynamic_size
from tests.errors import has
from tests.insertion.nets import Net
from tests.reporting.conftest import NetworkFiles
from tests.reporting.networks import CONVOLUTIONS, narrow_yolov8x_qdq
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import DIFFERENT, advised, model as published, truth
from tests.trt.test_network import casts_at_both_ends

FIRST = ("yolo-resnet18-orin-trt8502", "resnet18-a100-qat-residual", "resnet18-qat-rtx2000-trt8510")
SOME_FIRST = slow_after(1, [*FIRST, *(case for case in DIFFERENT if case not in FIRST)])


def collect(model: Any, *builds: Path, gpu: str | None = None, **inputs: Any) -> data.PageContents:
    return api.collect(model, *builds, inputs=ReportInputs(gpu=GpuOptions(gpu), **inputs))


@functools.cache
def page_of(case: str) -> data.PageContents:
    """Return the page of a recorded build's model. Callers must not change the page."""
    return collect(published(case), target=truth(case)["target"])


def prediction_of(case: str) -> qdqtool.Prediction:
    return advised(case, truth(case)["target"])


@pytest.fixture
def model(case: str) -> data.ModelContents:
    return page_of(case).model


@pytest.mark.parametrize("case", SOME_FIRST)
def test_page_lists_convolutions_conversions_and_findings(
    case: str, model: data.ModelContents
) -> None:
    prediction = prediction_of(case)
    assert [(c.name, c.precision, c.inputs, c.output, c.evidence) for c in model.convs] == [
        (c.name, c.precision, [str(p) for p in c.inputs], c.output, c.evidence)
        for c in prediction.convolutions
    ]
    assert [c.name for c in model.conversions] == prediction.conversion_nodes
    float_type = find_float_type(prediction)
    assert [f.message for f in model.findings] == [
        name_floats(f.message, f.code, float_type) for f in prediction.findings
    ]
    for conv in model.convs:
        assert model.nodes[conv.node].name == conv.name
        assert model.layers[conv.layer].name == prediction.convolution(conv.name).layer
        assert set(conv.findings) <= set(model.nodes[conv.node].findings)
    for finding in model.findings:
        assert all(finding.id in model.nodes[number].findings for number in finding.nodes)


def test_page_links_findings_to_nodes_after_computed_constants(g: Graph) -> None:
    """A constant that TensorRT computes while building is a node of the file."""
    root = g.op(
        "Sqrt", g.op("Cast", g.const("size", np.array([4], np.int64)), "cast", to=1), "root"
    )
    x = g.conv(g.op("Div", [g.input(1, 4, 16, 16), root], "scaled"), "first")
    model = collect(g.model(g.conv(g.relu(x, "relu"), "last"))).model
    assert [model.nodes[conv.node].name for conv in model.convs] == ["first", "last"]
    (finding,) = (f for f in model.findings if f.code == "OUT-FLOAT")
    assert finding.at == "last"
    assert [model.nodes[number].name for number in finding.nodes] == ["last"]


@pytest.mark.parametrize("case", SOME_FIRST)
def test_onnx_graph_draws_every_node_and_link(case: str, model: data.ModelContents) -> None:
    assert sorted(n for box in model.onnx.boxes for n in box.rows) == list(range(len(model.nodes)))
    assert drawn_links(model) == links_between(published(case), {n.name for n in model.nodes})
    conversions = {c.name.partition("_clone_")[0] for c in model.conversions}
    assert {m.name for e in model.onnx.edges for m in e.marks if m.stays} == conversions
    assert all(c.node >= 0 and c.layer >= 0 and c.to for c in model.conversions)


@pytest.mark.parametrize("case", SOME_FIRST)
def test_engine_graph_draws_every_layer(model: data.ModelContents) -> None:
    layers = [i for i, layer in enumerate(model.layers) if layer.type != "Conversion"]
    assert [box.layer for box in model.engine.boxes if box.role == "layer"] == layers
    marks = {m.name for e in model.engine.edges for m in e.marks if m.stays}
    assert marks == {layer.name for layer in model.layers if layer.type == "Conversion"}


@pytest.mark.parametrize("view", ["onnx", "engine"])
@pytest.mark.parametrize("case", SOME_FIRST)
def test_boxes_do_not_overlap_and_edges_go_down(case: str, view: str) -> None:
    drawing = getattr(page_of(case).model, view)
    assert drawing.boxes
    for a, b in combinations(drawing.boxes, 2):
        assert a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
    for box in drawing.boxes:
        assert box.x >= 0 and box.x + box.w <= drawing.width and box.y + box.h <= drawing.height
    for edge in drawing.edges:
        heights = [y for _, y in edge.points]
        top, bottom = drawing.boxes[edge.source], drawing.boxes[edge.target]
        assert heights == sorted(heights) and heights[0] == pytest.approx(top.y + top.h)
        assert heights[-1] == pytest.approx(bottom.y)


@pytest.mark.parametrize("case", SOME_FIRST)
def test_modules_hold_every_node_and_link(model: data.ModelContents) -> None:
    boxes, edges = model.modules.boxes, model.modules.edges
    rows = sorted(n for box in boxes for n in box.rows)
    assert rows == list(range(len(model.nodes))) and len(boxes) <= 60
    assert all(edge.source < edge.target for edge in edges)
    module = {node: number for number, box in enumerate(boxes) for node in box.rows}
    assert {
        (module[a], module[b])
        for edge in model.onnx.edges
        for a in model.onnx.boxes[edge.source].rows[:1]
        for b in model.onnx.boxes[edge.target].rows[:1]
        if module[a] != module[b]
    } == {(e.source, e.target) for e in edges if boxes[e.source].rows and boxes[e.target].rows}


def links_between(index: Model, names: set[str]) -> set[tuple[str, str]]:
    links = set()
    for node in index.nodes:
        for tensor in node.inputs if node.name in names else ():
            producer = index.producers.get(tensor)
            while producer is not None and is_qdq(producer):
                producer = index.producers.get(producer.inputs[0])
            if producer is not None and producer.name in names:
                links.add((producer.name, node.name))
    return links


def drawn_links(model: data.ModelContents) -> set[tuple[str, str]]:
    producers = {tensor: number for number, n in enumerate(model.nodes) for tensor in n.outputs}
    boxes, links = model.onnx.boxes, set()
    for edge in model.onnx.edges:
        if edge.tensor in producers and boxes[edge.target].role != "output":
            assert producers[edge.tensor] in boxes[edge.source].rows
            for consumer in boxes[edge.target].rows:
                if reads(model.nodes[consumer], edge.tensor):
                    links.add((producers[edge.tensor], consumer))
    for box in boxes:
        for producer, consumer in product(box.rows, repeat=2):
            if any(reads(model.nodes[consumer], t) for t in model.nodes[producer].outputs):
                links.add((producer, consumer))
    return {(model.nodes[a].name, model.nodes[b].name) for a, b in links}


def reads(node: data.NodeEntry, tensor: str) -> bool:
    return tensor in node.inputs or any(
        s.tensor == tensor and s.where != "output" for s in node.scales
    )


def test_log_lines_name_their_nodes() -> None:
    case = "yolo-resnet18-orin-trt8502"
    trace = prediction_of(case).trace
    texts = {render(e) for e in trace} | {f"{e.pass_name}: {render(e)}" for e in trace}
    model = page_of(case).model
    for conv in model.convs:
        lines = [model.lines[i] for i in model.nodes[conv.node].lines]
        assert texts.issuperset(line.text for line in lines)
        if conv.precision == "INT8":
            assert any(conv.name in line.text for line in lines)
            assert any("QuantizeDoubleInputNodes" in line.text for line in lines)
            assert all(model.cases[line.case].says for line in lines if line.case >= 0)


def test_scales_are_those_of_the_quantizers(files: NetworkFiles) -> None:
    index = load(files.model)
    nodes = {n.name: n for n in index.nodes}
    scales = [scale for node in collect(files.model).model.nodes for scale in node.scales]
    for scale in scales:
        values = read_params(index, nodes[scale.quantizer]).scale
        assert values is not None and scale.channels == values.size
        assert scale.scale == pytest.approx(values.min(), rel=1e-5)
        assert scale.highest == pytest.approx(values.max(), rel=1e-5)
    assert {s.where for s in scales} == {"input", "weights", "output"} and len(scales) >= 8


def test_weights_show_largest_values_per_channel(files: NetworkFiles) -> None:
    initializers = onnx.load(files.float).graph.initializer
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in initializers}
    shown = collect(files.model).model.weights
    assert {weights.name for weights in shown} == {"first", "second", "third"}
    for weights in shown:
        expected = np.abs(values[f"{weights.name}.weight"]).reshape(16, -1).max(axis=1)
        np.testing.assert_allclose([weights.largest, weights.holds], [expected] * 2, rtol=1e-3)


def test_histograms_are_those_of_the_cache(files: NetworkFiles) -> None:
    page = collect(files.model, calib_cache=files.cache)
    statistics = load_statistics(files.cache)
    assert page.histograms and "8 images" in page.calibration
    for histogram in page.histograms:
        expected = statistics[histogram.tensor]
        assert sum(histogram.counts) == pytest.approx(expected.count, abs=len(histogram.counts))
        assert histogram.absmax == pytest.approx(expected.absmax, rel=1e-4)
        assert {m.name for m in histogram.methods} == set(METHODS)
        for method in histogram.methods:
            assert method.amax == pytest.approx(amax_of(expected, method.name), rel=1e-4)
    index = load(files.model)
    scale = read_params(index, index.node(page.histograms[0].quantizer)).scale
    assert page.histograms[0].chosen == pytest.approx(127 * scale[0], rel=1e-4)


def test_cache_of_other_model_and_cache_of_float_model_are_errors(
    files: NetworkFiles, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError,
        check=has("not-quantized", path=str(files.cache), parameter="calib_cache"),
    ):
        collect(files.float, calib_cache=files.cache)
    other = tmp_path / "other.onnx"
    onnx.save(yolov8n(size=64), other)
    with pytest.raises(
        DataError,
        check=has("different-models", path=str(files.cache), parameter="calib_cache"),
    ):
        collect(other, calib_cache=files.cache)


def test_embedded_data_is_the_page(files: NetworkFiles) -> None:
    page = collect(files.model, calib_cache=files.cache)
    assert json.loads(zlib.decompress(base64.b64decode(encode_contents(page)))) == json.loads(
        json.dumps(dataclasses.asdict(page))
    )


def test_groups_are_tied_if_the_float_model_is_there(files: NetworkFiles) -> None:
    groups = collect(files.model, before=files.float).groups
    tied = next(g for g in groups if len(g.tensors) > 1)
    assert tied.tied == "tied, one scale" and tied.scale is not None
    assert {g.tied for g in groups} == {"tied, one scale", "alone"}
    assert {g.tied for g in collect(files.model).groups} == {"equal scales", "alone"}


def test_report_repr_is_short_and_ok_needs_info_only(files: NetworkFiles) -> None:
    report = qdqtool.Report(collect(files.model), "<html>" * 1000, "page.html")
    assert len(repr(report)) < 60
    assert report.ok == all(f.severity == "info" for f in report.page.model.findings)


def test_activation_after_a_convolution_is_an_unlisted_layer(g: Graph) -> None:
    x = g.input(1, 64, 80, 80)
    y, z = (g.silu(g.conv(x, name, 64), f"{name}.r") for name in ("c", "d"))
    page = qdqtool.report(g.model(g.op("Flatten", y, "f"), z), gpu="T4").page
    parts = {part.kind: part.layers for part in page.parts}
    assert parts["region"] == 2 and "edge" not in parts
    engine = len(page.model.layers)
    assert (
        sum(parts.values()) == engine + 1
        and (f"have {engine + 1} layers, but the prediction has {engine} engine layers (1 without")
        in page.parts_note
    )


def test_times_of_parts_add_up(files: NetworkFiles) -> None:
    page = collect(files.model, gpu="T4", before=files.float)
    assert page.model.time is not None and page.before is not None and page.before.time is not None
    layers = sum(layer.ms or 0.0 for layer in page.model.layers)
    others = sum(p.ms or 0.0 for p in page.parts if p.kind in ("region", "edge"))
    assert sum(p.ms or 0.0 for p in page.parts) == pytest.approx(layers + others, rel=1e-3)
    assert page.roof.rates["INT8"] == pytest.approx(2 * page.roof.rates["FP16"])
    before = {c.name: c.before for c in page.model.convs}
    assert before == dict.fromkeys(("first", "second", "third"), "FLOAT → FLOAT")


def test_nodes_show_attributes_and_edges_shapes() -> None:
    g = Graph(17)
    w, v = g.const("w", np.ones((8, 2, 3, 5), "f")), g.const("v", np.ones((4, 8, 1, 1), "f"))
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


@pytest.mark.parametrize("gpu", ["T4", None])
def test_build_times_come_before_estimates(
    files: NetworkFiles, tmp_path: Path, gpu: str | None
) -> None:
    """Without the name of the GPU, the measured times have no estimate next to them."""
    own = {la.name: 0.25 * (i + 1) for i, la in enumerate(qdqtool.predict(files.model).layers)}
    others = {
        "{ForeignNode[a...b]}": 7.0,
        "Reformatting CopyNode for Input Tensor 0 to a": 2.0,
        "else": 1.0,
    }
    measured = own | others
    rows = [
        {"name": name, "timeMs": 2 * ms, "averageMs": ms, "percentage": 1}
        for name, ms in measured.items()
    ]
    profile, layers = tmp_path / "profile.json", tmp_path / "layers.json"
    profile.write_text(json.dumps([{"count": 2}, *rows]))
    layers.write_text(json.dumps({"Layers": list(measured), "Bindings": ["x", "end"]}))
    page = collect(files.model, layers, profile, gpu=gpu)
    assert [layer.measured for layer in page.model.layers] == list(own.values())
    assert {row.name: row.ms for row in page.unlisted} == others
    parts = {p.kind: p for p in page.parts}
    assert [parts[k].measured_ms for k in ("region", "layout", "edge")] == [7.0, 2.0, 1.0]
    total = sum(measured.values())
    assert sum(p.measured_ms or 0.0 for p in page.parts) == pytest.approx(total)
    assert all(p.ms is None for p in page.parts) == (gpu is None)
    assert page.agreement is not None and (page.agreement.predicted_ms is None) == (gpu is None)
    assert page.agreement.measured_ms == pytest.approx(total, rel=0.1)
    if gpu is not None:  # verify and report subtract what profiling adds
        times = qdqtool.verify(files.model, layers, profile, gpu=gpu).times
        assert times is not None and times["built_ms"] == page.agreement.measured_ms < total
        assert page.model.time is not None and "FP16" in page.model.headline
    html = render_page(page)
    text = re.sub(r"<[^>]+>", " ", html)
    assert "Time, measured" in text and "Time, estimated" not in text
    for table in ("convolution-table", "layer-table"):
        head = html.split(f'id="{table}"')[1].split("</thead>")[0]
        columns = ["Measured", "Est."] if gpu else ["Measured"]
        assert re.findall(r"(Measured|Est\.) ms", head) == columns


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("names", ["c", "renamed"])
def test_before_is_refused_if_compare_refuses_it(
    files: NetworkFiles, tmp_path: Path, width: int, names: str
) -> None:
    """Networks are compared by their layers, not by names."""
    other, model = tmp_path / "other.onnx", tmp_path / "chain_qdq.onnx"
    onnx.save(chain(width, names), other)
    data = np.random.default_rng(0).normal(0, 1, (2, 16, 16, 16)).astype(np.float32)
    qdqtool.insert(chain(16, "c"), data, predict=False).save(model)
    if width == 16:
        assert qdqtool.compare(other, model) and collect(model, before=other).before is not None
        return
    with pytest.raises(QdqtoolError, check=has("different-models")):
        qdqtool.compare(other, model)
    with pytest.raises(
        DataError, check=has("different-models", path=str(other), parameter="before")
    ):
        collect(model, before=other)


def chain(width: int, names: str) -> onnx.ModelProto:
    net, tensor = Net(width, 16), "x"
    for i in range(4):
        tensor = net.conv(f"{names}{i}", tensor, cin=width, cout=width)
    return net.output(net.op("Relu", "end", tensor)).model()


def relus(names: list[str]) -> onnx.ModelProto:
    g = Graph(17)
    return g.model(functools.reduce(g.relu, names, g.input(1)))


def test_modules_follow_node_names() -> None:
    model = collect(yolov8n(64)).model
    titles = [box.title for box in model.modules.boxes]
    whole = [title for title in titles if "/" not in title and "22" not in title]
    assert whole[1:-1] == [f"model.{i}" for i in range(22)]
    for box in model.modules.boxes:
        names = {model.nodes[n].name.split("/")[1] for n in box.rows}
        assert names == ({re.split("[/ ]", box.title)[0]} if box.rows else set())


def test_modules_divide_long_chains() -> None:
    boxes = collect(relus([f"r{i}" for i in range(100)])).model.modules.boxes
    assert 5 <= len(boxes) <= 12 and boxes[1].title.startswith("r0 to r")


def test_cast_before_a_quantizer_has_a_remark(g: Graph) -> None:
    model = collect(casts_at_both_ends(g)).model
    remarks = [layer.remark for layer in model.layers if layer.remark]
    assert [box.title for box in model.onnx.boxes if box.note in remarks] == ["to_half"]
    assert [box.note for box in model.engine.boxes if box.role != "layer"] == ["FP32", "FP32"]


def test_report_for_tensorrt_rtx_has_no_layers(files: NetworkFiles) -> None:
    model = collect(files.model, target="rtx1.7").model
    assert not model.layers and "layers of" in model.engine.why and model.onnx.boxes


@pytest.mark.parametrize("names", [[], ["r"]], ids=["empty", "relu"])
def test_report_without_convolutions_says_so(names: list[str]) -> None:
    assert "no convolution or matrix product" in qdqtool.report(relus(names)).html


@pytest.mark.parametrize(("target", "int8"), [("rtx1.7", 0), ("trt10", 2)])
def test_report_counts_int8_of_the_gpu(target: str, int8: int) -> None:
    """TensorRT has INT8 on a T4, TensorRT-RTX does not."""
    report = qdqtool.report(two_convolutions(), target=target, gpu="T4")
    assert [c.precision for c in report.page.model.convs].count("INT8") == int8


def two_convolutions() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.conv(g.conv(g.input(1, 16, 16, 16), "a", 16), "b", 16, scale=0.05))


@pytest.mark.slow
def test_report_of_large_network_fits_in_1_5_mb() -> None:
    model = narrow_yolov8x_qdq()
    report = qdqtool.report(model, gpu="T4", before=model)
    assert len(report.page.model.convs) == CONVOLUTIONS and len(report.html.encode()) < 1_500_000


POINT = {
    "name": "p",
    "convolutions": 4,
    "conversions": 1,
    "low": 0.9,
    "high": 0.99,
    "chosen_on": 0.95,
}
SITE = {"site": "s", "kind": "convolution", "choice": "float"}


def result(**changes: Any) -> dict[str, Any]:
    front = [
        {**POINT, "index": i, "int8": 4 - i, "ms": 2.0 + i, "cost": 2.0 + i, "metric": metric}
        for i, metric in enumerate((0.9, 0.93, 0.96))
    ]
    site = {"site": "/a", "kind": "convolution", "choice": "float", "why": "it costs"}
    values = {
        "schema": "qdqtool/tuning/1",
        "gpu": "RTX 3060",
        "goal": {"keep": 0.97, "budget_ms": 5.0, "reached": True},
        "metric": {"name": "agreement-map", "sentence": "AP with the float model.", "float": 1.0},
        "cost": {"unit": "ms", "sentence": "predicted milliseconds"},
        "sites": [{**site, "error_alone": 0.1, "loss": 0.01, "ms": None}],
        "front": front,
        "others": [{**POINT, "index": 9, "int8": 0, "ms": 6.0, "cost": 6.0, "metric": 0.95}],
        "chosen": front[1],
        "notes": ["a note"],
        "warnings": [],
    }
    return {**values, **changes}


def write(folder: Path, value: Any) -> Path:
    path = folder / "tuning.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def read(folder: Path, value: Any) -> data.TuningPlot:
    return read_tuning(write(folder, value), Model(relus(["/a", "/b"])))


@pytest.mark.parametrize("nodes", [["/a"], ["/a", "/c"], []])
def test_tuning_of_the_network_is_read(tmp_path: Path, nodes: list[str]) -> None:
    assert read(tmp_path, result(sites=[{**SITE, "nodes": nodes}])).points


def test_milliseconds_of_a_site_are_those_in_float(tmp_path: Path) -> None:
    sites = [{**SITE, "ms": 0.5, "int8": -1}, {**SITE, "ms": -0.25, "int8": 1}]  # the second: INT8
    assert [row[4] for row in read(tmp_path, result(sites=sites)).sites] == ["0.5", "0.25"]


def test_tuning_points_goal_and_sites_are_shown(tmp_path: Path) -> None:
    tuning = read(tmp_path, result())
    assert [(p.x, p.metric, p.on_front, p.chosen) for p in tuning.points] == [
        (2.0, 0.9, True, False),
        (3.0, 0.93, True, True),
        (4.0, 0.96, True, False),
        (6.0, 0.95, False, False),
    ]
    assert tuning.axis == "estimated milliseconds on RTX 3060" and tuning.keep == 0.97
    assert (tuning.budget, tuning.reached, tuning.notes) == (5.0, True, ["a note"])
    assert tuning.sites == [["/a", "convolution", "float", "0.1", "", "it costs"]]


def test_report_of_a_gpu_that_the_target_does_not_support_has_no_times() -> None:
    page = qdqtool.report(two_convolutions(), gpu="GTX 1080").page
    assert page.model.rejected and page.model.time is None and not page.parts
    assert page.model.findings and all(f.saves_ms is None for f in page.model.findings)
    assert qdqtool.report(two_convolutions(), gpu="GTX 1080", target="8.6").page.parts


def test_tuning_without_gpu_shows_costs(tmp_path: Path) -> None:
    front = [{**point, "ms": None} for point in result()["front"]]
    tuning = read(tmp_path, result(front=front, others=[], gpu=None, goal={}))
    assert [p.x for p in tuning.points] == [2.0, 3.0, 4.0]
    assert (tuning.axis, tuning.keep, tuning.budget) == ("predicted milliseconds", None, None)


def test_tuning_that_a_time_limit_ended_is_read(tmp_path: Path) -> None:
    """Placements of the front that were not measured in time have null values."""
    front = result()["front"]
    for i in (0, 2):
        front[i].update(metric=None, low=None, high=None)
    tuning = read(tmp_path, result(front=front, others=[], chosen={**front[1], "index": 1}))
    assert [(p.x, p.metric, p.chosen) for p in tuning.points] == [(3.0, 0.93, True)]
    assert tuning.notes[0].startswith("2 choices not drawn")


def test_tuning_that_chose_the_float_model_is_marked(tmp_path: Path) -> None:
    front = result()["front"]
    assert not read(tmp_path, result()).is_float
    assert read(tmp_path, result(front=front, chosen={**front[1], "index": 1, "int8": 0})).is_float


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, None, "no such file"),
        (gzip.compress(b"{}"), "wrong-format", "measurements of tune"),
    ],
    ids=["missing", "measurements"],
)
def test_file_that_tune_did_not_write_as_its_result_is_refused(
    tmp_path: Path, content: bytes | None, code: str | None, message: str
) -> None:
    path = tmp_path / "model.onnx.tuning"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message, check=has(code, path=str(path))):
        read_tuning(path, Model(relus(["/a"])))


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("different-models", result(sites=[{**SITE, "nodes": ["/c"]}])),
        ("different-models", result(sites=[{**SITE, "nodes": ["/a", "/c", "/d"]}])),
        ("wrong-format", ""),
        ("wrong-format", "[]"),
        ("wrong-format", "{"),
        pytest.param("wrong-format", "[" * 100_000, id="nested-deeply"),
        ("wrong-format", '{"schema": "qdqtool/tuning/2"}'),
        ("file-damaged", result(front=None)),
        ("file-damaged", result(front=[1])),
        ("file-damaged", result(front=[{**POINT, "index": 0, "ms": 1.0, "cost": 1.0, "int8": 1}])),
        ("file-damaged", result(front=[{**result()["front"][0], "ms": "fast"}])),
        ("file-damaged", result(front=[{**result()["front"][0], "metric": float("nan")}])),
        ("file-damaged", result(sites=[3])),
        ("file-damaged", result(metric=[])),
        ("file-damaged", result(goal={"keep": [1]})),
    ],
)
def test_other_and_damaged_tuning_files_are_refused(
    tmp_path: Path, code: str, content: str | dict[str, Any]
) -> None:
    with pytest.raises(
        DataError, check=has(code, path=str(tmp_path / "tuning.json"), parameter="tuning")
    ):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("device", "facts", "gpu"),
    [
        pytest.param("Tesla T4", {"Compute Capability": "7.5", "SMs": "40"}, None, id="log"),
        pytest.param(None, {}, "T4", id="option"),
    ],
)
def test_build_of_tensorrt_rtx_is_shown_for_its_gpu(
    device: str | None, facts: dict[str, str], gpu: str | None
) -> None:
    model = two_convolutions()
    build = Build(tensorrt="1.7.1", is_rtx=True, layers=[BuiltLayer("a")], device=device, gpu=facts)
    report = qdqtool.report(model, build, gpu=gpu)
    assert report.page.model.counts["int8"] == 0
    assert report.as_json()["compute_capabilities"] == ["7.5"]
    expected = qdqtool.predict(model, "rtx1.7", gpu="T4").time["total_ms"]
    time = report.page.model.time
    assert time.total == pytest.approx(expected, rel=0.2)  # the log has another clock
    assert any("has no INT8 on" in note for note in time.notes)


def test_target_is_named_as_in_the_argument() -> None:
    model = two_convolutions()
    report = qdqtool.report(model, target="10.3", gpu="P100", before=model)
    assert report.as_json()["target"] == "trt10"
    pages = [report.page.model, report.page.before]
    assert [(p.target, "no rules of its own" in p.remarks[-1]) for p in pages if p is not None] == [
        ("TensorRT 10.3", True)
    ] * 2
    text = re.sub(r"<(script|style).*?</\1>", "", report.html, flags=re.DOTALL)
    names = re.findall(r"\w*\b(?:trt10|10\.3)\b", text)
    assert names.count("trt10") == report.html.count("those of trt10") > 0
    assert names.count("10.3") > 3


def test_tuning_of_tune_command_is_read(files: NetworkFiles, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    options = ["--gpu", "Jetson Orin Nano 4GB", "--keep", "0.999", "--front", "--no-state"]
    paths = ["--calib", files.data, "-o", tmp_path / "tuned.onnx", "--result", out]
    assert run(["tune", str(files.float), *options, *map(str, paths)]) in (0, 1)
    written, tuning = json.loads(out.read_text()), read_tuning(out, load(files.model))
    assert [(p.metric, p.x) for p in tuning.points if p.on_front] == [
        (p["metric"], p["ms"]) for p in written["front"]
    ]
    assert [p.int8 for p in tuning.points if p.chosen] == [written["chosen"]["int8"]]
    assert len(tuning.sites) == len(written["sites"])
    assert tuning.axis == "estimated milliseconds on Jetson Orin Nano 4GB"


@pytest.mark.parametrize(("flags", "float_type"), [({"int8"}, "FP32"), ({"int8", "fp16"}, "FP16")])
def test_float_type_is_that_of_the_build(
    files: NetworkFiles, flags: set[str], float_type: str
) -> None:
    model, target = load(files.model), target_named("trt8.6")
    build = Build(precision_flags=frozenset(flags))
    subject = ReportSubject(model, qdqtool.predict(files.model, target), target, build=build)
    assert f"with {float_type} output" in ModelCollector(subject, "model").model.verdict


@pytest.mark.parametrize(
    ("omitted", "text"), [(1, "1 more mismatch ("), (2, "2 more mismatches (")]
)
def test_report_counts_mismatches_that_it_does_not_list(omitted: int, text: str) -> None:
    model, target = published(FIRST[0]), target_named("trt8.6")
    mismatch = Mismatch(MismatchKind.TRACE, "line", {}, {}, Difference.LOGGED)
    mismatches, build = [mismatch] * (MAX_MISMATCHES + omitted), read_build(build_file(FIRST[0]))
    verification = dataclasses.replace(verify(model, build), mismatches=mismatches)
    subject = ReportSubject(
        model, qdqtool.predict(model, target), target, verification=verification, build=build
    )
    agreement = collect_agreement(ModelCollector(subject, "model"))
    assert agreement is not None and len(agreement.mismatches) == MAX_MISMATCHES
    assert [n for n in agreement.notes if n.startswith(text)]


def test_both_models_have_one_image_size() -> None:
    """The float model is estimated for the size that the Q/DQ model records."""
    float_model, quantized = float_network(), network()
    expected = collect(quantized, before=float_model, gpu="RTX 3060")
    pages = [
        collect(
            with_dynamic_size(quantized, recorded),
            before=with_dynamic_size(float_model),
            gpu="RTX 3060",
            size=size,
        )
        for recorded, size in (("[16, 16]", None), ("", (16, 16)))
    ]
    times = [
        [layer.ms for layer in page.before.layers] for page in (expected, *pages) if page.before
    ]
    assert None not in times[0] and times[1:] == [times[0]] * 2
