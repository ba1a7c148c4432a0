"""Recognition of structures in graphs (heads, attention ...), and rewrites of graphs."""
