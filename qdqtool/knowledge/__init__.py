"""What is known, as data: finding codes, error texts, meanings of passes, ways to build. One loader with a schema.

Each ``<name>.toml`` is a table whose fields are those of a record; a text over several lines is one paragraph.
"""

from qdqtool.knowledge.tables import Made, entry, paragraph, table

__all__ = ["Made", "entry", "paragraph", "table"]
