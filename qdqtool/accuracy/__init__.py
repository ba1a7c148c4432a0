"""Agreement of a quantized network with its float network on images."""
