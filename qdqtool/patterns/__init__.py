"""Recognition of structures in a graph, such as heads and attention, and rewrites of graphs."""
