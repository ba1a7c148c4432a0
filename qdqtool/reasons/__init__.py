"""Reasons of findings with their codes and messages, by subject."""

MODEL_CHECK = "model"  # pass name in reasons that checks of the model find
