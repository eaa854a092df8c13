"""What the gateway's properties are tried with: how often, and values of JSON."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

OFTEN = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
