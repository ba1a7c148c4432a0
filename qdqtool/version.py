"""Version of qdqtool."""

TOOL_VERSION = "0.2.0"
