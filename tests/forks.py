"""Marker for tests that fork their process."""

import os

import pytest

can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
