"""Reasons of findings: what the simulator, the checks and the GPU table recorded, with codes and messages."""
