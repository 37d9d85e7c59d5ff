"""Shared by all tests. Its being here puts this folder on the import path: `import pair`."""

from __future__ import annotations

import os

# One thread a test process: several, each with as many threads as there are cores, would spin
# against each other and make seconds of minutes. Tests of threads ask for them (tiny.threads).
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# The same examples in every run and no time limit an example: a red test stays red on rerun,
# and a busy machine turns none red.
settings.register_profile(
    "outrider",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("outrider")
