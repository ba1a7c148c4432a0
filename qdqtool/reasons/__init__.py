"""Reasons of findings with their codes and messages."""
