"""Extract a small model that reproduces a finding or a failing build of a large model."""
