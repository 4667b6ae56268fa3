"""Tests of what is otherwise in mlx-lm before 0.32; `make test-mlx-lm-0.31` runs them in their own environment."""

from tests.releases import OLDER
from tests.runtime.conftest import models, own_cache, plain_kernels, store

__all__ = ["models", "own_cache", "plain_kernels", "store"]

collect_ignore_glob = [] if OLDER else ["test_*"]
