"""Shared by all tests. Its being here puts this folder on the import path: `import pair`."""

from __future__ import annotations

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
