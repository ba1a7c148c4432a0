"""What a model shows without simulation, on every target: faults of a build, heads, shapes that INT8 dislikes."""
