"""Fixtures of the module tests: the layers are small too."""

from tests.models.conftest import one_thread

__all__ = ["one_thread"]
