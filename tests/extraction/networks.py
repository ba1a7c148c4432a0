import numpy as np
import onnx

from tests.trt.builder import Graph

SECRET = "Acme7"


def residual(depth: int = 2) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 16, 16), "stem", scale=0.05), "stem.r")
    for block in range(depth):
        a = g.relu(g.conv(x, f"b{block}.c0", scale=0.05), f"b{block}.r0")
        c = g.conv(a, f"b{block}.c1", scale=0.06)
        skip = x if block == 1 else g.pair(x, f"b{block}.skip", 0.05)
        x = g.relu(g.add(c, skip, f"b{block}.sum"), f"b{block}.r1")
    model = g.model(g.conv(x, "last", scale=0.05))
    model.producer_name, model.doc_string = "maker", "about it"
    model.metadata_props.add(key="stride", value="32")
    model.graph.node[0].doc_string = "first"
    return model


def secretive() -> onnx.ModelProto:
    model = residual()
    graph = model.graph

    def named(text: str) -> str:
        return f"{SECRET}/{text}" if text else ""

    for node in graph.node:
        node.name, node.doc_string = named(node.name), f"{SECRET} doc"
        node.input[:] = [named(t) for t in node.input]
        node.output[:] = [named(t) for t in node.output]
        node.metadata_props.add(key=f"{SECRET}.key", value=f"{SECRET}.value")
    for field in (graph.input, graph.output, graph.initializer, graph.value_info):
        for item in field:
            item.name, item.doc_string = named(item.name), f"{SECRET} doc"
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = f"{SECRET}_batch"
    graph.name, graph.doc_string = f"{SECRET}Net", f"{SECRET} net"
    model.producer_name, model.producer_version = f"{SECRET} exporter", f"{SECRET} 1"
    model.domain, model.doc_string = f"com.{SECRET}", f"{SECRET} doc"
    model.metadata_props.add(key=f"{SECRET}.owner", value=f"{SECRET} GmbH")
    graph.node.append(
        onnx.helper.make_node(
            f"{SECRET}Head",
            [graph.output[0].name],
            [f"{SECRET}/done"],
            f"{SECRET}/head",
            domain=f"ai.{SECRET}",
            **{
                f"{SECRET}_mode": f"{SECRET} words",
                f"{SECRET}_table": onnx.numpy_helper.from_array(np.ones(3, np.float32), SECRET),
            },
        )
    )
    graph.output[0].name = f"{SECRET}/done"
    model.opset_import.append(onnx.helper.make_opsetid(f"ai.{SECRET}", 1))
    return model
