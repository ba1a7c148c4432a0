"""Extraction of small models that reproduce a finding or a failing build of a large model."""
