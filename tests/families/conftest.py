"""What tests with live models share."""

from tests.runtime.conftest import models, own_cache, plain_kernels, store

__all__ = ["models", "own_cache", "plain_kernels", "store"]
