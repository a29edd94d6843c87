"""Fixtures of the quantizers' tests."""

from tests.models.conftest import one_thread  # noqa: F401
