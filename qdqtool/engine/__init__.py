"""What a built engine costs: per-layer memory, operations and time; comparison of two engines; drawing."""
