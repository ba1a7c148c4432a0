import onnx

from qdqtool.ir.metadata import SMOOTHED, set_metadata


def test_entry_replaces_all_entries_of_its_key() -> None:
    """Tools may write a key twice; other entries keep their order."""
    proto = onnx.ModelProto()
    for key, text in (("names", "a"), (SMOOTHED, "x"), ("stride", "32"), (SMOOTHED, "y")):
        proto.metadata_props.add(key=key, value=text)
    set_metadata(proto, SMOOTHED, "z")
    entries = [(entry.key, entry.value) for entry in proto.metadata_props]
    assert entries == [("names", "a"), ("stride", "32"), (SMOOTHED, "z")]
