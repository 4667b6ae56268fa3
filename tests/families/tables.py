"""All families that are proved, and those that cannot be, with the reason."""

from __future__ import annotations

from types import MappingProxyType

from tests.families.attention import PLAIN, SEVERAL, WINDOWED
from tests.families.recurrent import HYBRID, RECURRENT
from tests.families.same import ALIKE
from tests.families.shapes import SHAPED

FAMILIES = MappingProxyType({
    family.title: family for family in (*PLAIN, *WINDOWED, *SEVERAL, *RECURRENT, *HYBRID, *ALIKE, *SHAPED)
})  # fmt: skip

NOT_RUN = MappingProxyType({
    "bitnet": "its ternary weights have a Metal kernel only",
    "muse_spark": "its rotary embedding is a Metal kernel",
    "olmo": "its module asks for the package `ai2-olmo` on import",
})
"""Families of the installed mlx_lm that no CPU can run: name to reason."""
