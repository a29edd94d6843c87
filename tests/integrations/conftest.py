"""Fixtures of the tests with transformers' models: these are tiny."""

from tests.models.conftest import one_thread

__all__ = ["one_thread"]
