"""Size of what `qdqtool extract` cuts out for each finding of the evidence graphs and of a YOLOv8n full of defects.

usage: python benchmarks/extract.py [--builds N] [--minimize N] [--private N] [--only WORD]

For each finding: does the extract show the same finding (code, node, message and fix) with the convolutions that it
names predicted alike, and with how many nodes? Targets: all do, at most 20 nodes in the median. With TensorRT-RTX
installed, the extracts of N findings of each network (all without --builds) are built: each has to build where its
whole network does. --minimize and --private repeat it for the first N findings of each, shrunk and made private.
Nothing was chosen on these networks but the limit of hops.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import qdqtool
import qdqtool.errors
from qdqtool.builders import build
from qdqtool.builders.child import is_installed
from qdqtool.demo.model import yolov8n
from qdqtool.extraction.shown import key
from qdqtool.graph import Model
from qdqtool.insertion.api import insert
from qdqtool.onnxgraph.editor import Editor
from qdqtool.onnxgraph.view import View

EVIDENCE = Path(__file__).resolve().parents[1] / "tests" / "data" / "evidence"
MEDIAN_NODES = 20


def defective(size: int = 320) -> Model:
    """A quantized YOLOv8n into which defects were put, each at another place."""
    random = np.random.default_rng(0)
    images = [{"images": random.random((1, 3, size, size), dtype=np.float32)} for _ in range(2)]
    model = Model(insert(yolov8n(size), images).model)
    model = Model(_without_pairs(model))
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    _spoil(proto)
    return Model(proto)


def _without_pairs(model: Model) -> onnx.ModelProto:
    """Skip branches, some convolutions' inputs and a MaxPool lose their pairs."""
    view, editor = View(model), Editor(model)
    for number, (q, dqs) in enumerate(view.pairs()):
        readers = {r.op for dq in dqs for r in model.readers(dq.output)}
        if "Add" in readers or number % 11 == 5 or ("MaxPool" in readers and number % 2):
            editor.bypass(q, dqs)
    return editor.finish()


def _spoil(proto: onnx.ModelProto) -> None:
    """Wrong scales, zero points and weights."""
    constants = {t.name: t for t in proto.graph.initializer}
    qs = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in constants]
    dqs: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            dqs.setdefault(node.input[0], []).append(node)

    def own(nodes: list[onnx.NodeProto], place: int, value: np.ndarray, name: str) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
        for node in nodes:
            while len(node.input) <= place:
                node.input.append("")
            node.input[place] = name

    for number, node in enumerate(qs):
        pair = [node, *dqs.get(node.output[0], ())]
        scale = numpy_helper.to_array(constants[node.input[1]])
        if number == 7:
            own(pair, 1, np.float32(-abs(scale)), "bad.negative")
        elif number == 12:
            own(pair, 2, np.int8(3), "bad.zero_point")
        elif number == 16:
            own(pair, 1, np.reshape(scale, (1,)), "bad.vector")
        elif number == 20:
            own(pair, 2, np.uint8(0), "bad.unsigned")
        elif number in (24, 31, 38):
            own(pair, 1, np.float32(scale * 1.7), f"bad.scale{number}")
        elif number == 45:
            own(pair, 1, np.float16(scale), "bad.half")
    weights = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in constants]
    values = numpy_helper.to_array(constants[weights[9].input[0]]).copy()
    values[0] = 0
    constants[weights[9].input[0]].CopyFrom(numpy_helper.from_array(values, weights[9].input[0]))
    scale = numpy_helper.to_array(constants[weights[14].input[1]])
    pair = [weights[14], *dqs.get(weights[14].output[0], ())]
    own(pair, 1, np.float32(scale.max()).reshape(()), "bad.one_for_all")
    for node in pair:
        own([node], 2, np.int8(0), "bad.one_zero")
    final = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("SecretNMS", [final], ["kept"], "nms", domain="plugins"))
    proto.graph.output[0].name = "kept"
    proto.opset_import.append(helper.make_opsetid("plugins", 1))
    unique: dict[str, onnx.TensorProto] = {t.name: t for t in proto.graph.initializer}
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(unique.values())


def networks() -> Iterator[tuple[str, Model]]:
    """Name and model."""
    from qdqtool.modelfile import load

    for path in sorted(EVIDENCE.glob("*/model.onnx.gz")):
        yield path.parent.name, load(path)
    yield "yolov8n with defects", defective()


def builds(proto: onnx.ModelProto) -> bool:
    """Whether TensorRT-RTX builds it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(proto, path)
        return build(path).status == "built"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builds", type=int, default=10**6, help="most extracts to build for each network")
    parser.add_argument("--minimize", type=int, default=0, help="findings of each network to shrink as well")
    parser.add_argument("--private", type=int, default=0, help="findings of each network to make private as well")
    parser.add_argument("--only", default="", help="networks whose name holds this")
    options = parser.parse_args()
    can_build = is_installed("tensorrt_rtx") and options.builds > 0
    sizes: list[int] = []
    small: list[int] = []
    failed: list[str] = []
    built = asked = private = 0
    for name, model in networks():
        if options.only not in name:
            continue
        start = time.process_time()
        prediction = qdqtool.predict(model)
        whole_builds = can_build and builds(model.proto)
        here: list[int] = []
        counts: dict[str, int] = {}
        for number, finding in enumerate(prediction.findings):
            counts[finding.code] = counts.get(finding.code, 0) + 1
            which = f"{finding.code}:{counts[finding.code]}"
            try:
                result = qdqtool.extract(model, finding=which)
            except qdqtool.errors.QdqtoolError as error:
                failed.append(f"{name} {which}: {error}")
                continue
            if key(finding) not in {key(f) for f in result.prediction.findings}:
                failed.append(f"{name} {which}: another finding")
            here.append(result.nodes[0])
            if whole_builds and number < options.builds:
                asked += 1
                if builds(result.proto):
                    built += 1
                else:
                    failed.append(f"{name} {which}: does not build, the whole does")
            if number < options.minimize:
                small.append(qdqtool.extract(model, finding=which, minimize=True).nodes[0])
            if number < options.private:
                try:
                    qdqtool.extract(model, finding=which, private=True)
                    private += 1
                except qdqtool.errors.QdqtoolError as error:
                    failed.append(f"{name} {which}: private: {error}")
        sizes += here
        told = f"median {statistics.median(here):g} nodes, most {max(here)}" if here else "nothing"
        print(f"{name:<44} {len(model.nodes):>4} nodes {len(here):>4} findings: {told}; "
              f"{len(counts)} codes, {'builds' if whole_builds else 'not built'}, "
              f"{time.process_time() - start:.0f} s CPU", flush=True)
    for line in failed:
        print(f"FAILED {line}")
    if not sizes:
        return 1
    median = statistics.median(sizes)
    share = sum(s <= MEDIAN_NODES for s in sizes) / len(sizes)
    print(f"{len(sizes)} findings: median {median:g} nodes (target {MEDIAN_NODES}), {share:.0%} at or below it, "
          f"most {max(sizes)}; {built} of {asked} build; {len(failed)} failed")
    if small:
        print(f"shrunk: {len(small)} findings, median {statistics.median(small):g} nodes")
    if options.private:
        print(f"private: {private} made")
    return int(median > MEDIAN_NODES or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
