"""Reasons of findings, from the simulator, the checks and the GPU table, with codes and messages."""
