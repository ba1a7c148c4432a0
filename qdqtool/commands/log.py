"""``qdqtool log``: summary of the files of a TensorRT build."""

import click

from qdqtool.commands import options


@click.command("log", cls=options.HelpCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("--pass", "pass_name", metavar="NAME", help="Print the lines of one optimizer pass.")
@options.all_option("List every conversion, reformat and merge.")
@click.option(
    "--to-onnx",
    type=click.Path(),
    metavar="FILE",
    help="Write the ONNX graph that the log of the parser describes, without weights.",
)
@options.output_options
def command(
    files: tuple[str, ...],
    pass_name: str | None,
    everything: bool,
    to_onnx: str | None,
    answer: options.AnswerWriter,
) -> int:
    """Summarize a TensorRT build from its log, layer JSON or profile JSON.

    FILES are one of these, or several of one build. A log may be compressed (gzip, xz), incomplete,
    or come from standard input (-).

    Exit codes: 0 done, 2 bad input.
    """
    from qdqtool.buildlog.read import read_build
    from qdqtool.buildlog.summary import find_pass_lines, summarize
    from qdqtool.errors import BuildLogError
    from qdqtool.findings.errors import explain_messages
    from qdqtool.formats.log_text import render, render_pass_lines
    from qdqtool.formats.output import Style, TextPage
    from qdqtool.util.files import reserve_output

    reserve_output(to_onnx, "--to-onnx")
    build = read_build(*files)
    if to_onnx:
        from qdqtool.buildlog.reconstruct import graph_from_log
        from qdqtool.ir.modelfile import save
        from qdqtool.util.text import format_count

        model, unknown = graph_from_log(build)
        save(model, to_onnx)
        graph = {
            "schema": "qdqtool/log-graph/1",
            "output": to_onnx,
            "nodes": len(model.graph.node),
            "unknown": unknown,
        }

        def render_graph(width: int) -> TextPage:
            page = TextPage(width)
            page.fill(
                f"Wrote {to_onnx}: {format_count(len(model.graph.node), 'node')}", style=Style.BOLD
            )
            page.fill("Values that the log does not contain:")
            for line in unknown:
                page.fill(line, 4, "  - ")
            return page

        answer.write(lambda: graph, render_graph)
        return 0
    if pass_name is not None:
        try:
            pass_rows = find_pass_lines(build, pass_name)
        except BuildLogError as error:
            raise BuildLogError(f"--pass {error}", code=error.code, parameter="pass_name") from None
        listed = [{"line": line, "text": line_text} for line, line_text in pass_rows]
        answer.write(lambda: listed, lambda width: render_pass_lines(pass_rows))
        return 0
    facts = explain_messages(summarize(build))
    answer.write(lambda: facts, lambda width: render(facts, width, everything=everything))
    return 0
