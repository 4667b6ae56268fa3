"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# No deadlines: machines differ, and no test may depend on time. The same examples on every run, so that CI never
# fails by chance; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# A shell that starts the tests in the background has SIGINT ignored, which children inherit; Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
