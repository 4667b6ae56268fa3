"""What is known of the device that caches live on, and whether a layout fits on it.

MLX tells more on some backends than on others. A receipt states what was observed; a
limit that the backend does not tell is null there, and its check ``not observable``.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvstore import __version__
from kvstore.errors import fail
from kvstore.format.json import Json
from kvstore.format.layout import Layout

__all__ = ["check_device_limits", "device_facts", "library_versions", "memory_budget"]

_LIBRARIES: Final = ("mlx", "mlx-lm", "numpy", "zstandard")
_CGROUP: Final = Path("/sys/fs/cgroup")


def device_facts() -> dict[str, Json]:
    """The default device, for receipts: ``backend`` (``cpu``, ``metal``, ``cuda``), ``name``, and limits or null.

    ``max_buffer_bytes`` is the largest single buffer, ``memory_bytes`` the memory that the
    device has, ``working_set_bytes`` what Metal recommends to use; all in bytes.
    """
    info = _info()
    return {
        "architecture": _text(info.get("architecture")),
        "backend": _backend(),
        "max_buffer_bytes": _buffer_limit(info),
        "memory_bytes": _size(info.get("memory_size", info.get("total_memory"))),
        "name": _text(info.get("device_name")) or platform.machine(),
        "platform": f"{platform.system()} {platform.machine()}",
        "working_set_bytes": _size(info.get("max_recommended_working_set_size")),
    }


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that state is made and moved with, for receipts."""
    found = {"kvstore": __version__, "python": platform.python_version()}
    installed = ((name, _installed(name)) for name in _LIBRARIES)
    return {**found, **{name: version for name, version in installed if version is not None}}


@cache
def _installed(name: str) -> str | None:
    """A distribution's version; it takes a millisecond to find out, and every receipt asks."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def memory_budget() -> int | None:
    """Bytes that can be allocated now on the default device, or None where nobody tells.

    On Metal the recommended working set and on CUDA the device's free memory; on the CPU
    what the system calls available, at most what the control group leaves. Buffers that
    MLX keeps for reuse count as free.
    """
    import mlx.core as mx

    info, backend = _info(), _backend()
    if backend == "metal":
        total = _size(info.get("max_recommended_working_set_size"))
        return None if total is None else max(0, total - mx.get_active_memory())
    sources = [info.get("free_memory")] if backend == "cuda" else [_system_available(), _group_available()]
    known = [int(size) for size in sources if size is not None]
    return min(known) + mx.get_cache_memory() if known else None


def check_device_limits(layout: Layout, *, budget: int | None = None) -> dict[str, str]:
    """Prove that the buffers of ``layout`` can be allocated, before any is.

    Args:
        budget: Bytes that all buffers together may take; by default :func:`memory_budget`.

    Returns:
        Results for a receipt's ``checks``: ``device_buffer`` and ``device_memory``.

    Raises:
        SpaceError: DEVICE_BUFFER_TOO_LARGE or DEVICE_MEMORY_SHORT.
    """
    limit = _buffer_limit(_info())
    if limit is not None:
        _check_buffers(layout, limit)
    allowed = memory_budget() if budget is None else budget
    if allowed is not None and layout.total_bytes > allowed:
        raise fail(
            "DEVICE_MEMORY_SHORT", f"the cache of {layout.token_count} tokens does not fit into memory",
            expected=f"at most {allowed} bytes", found=f"{layout.total_bytes} bytes",
            fix="Free memory, restore fewer tokens, or quantize the cache.",
            allowed=allowed, needed=layout.total_bytes,
        )  # fmt: skip
    return {
        "device_buffer": "not observable" if limit is None else "verified",
        "device_memory": "not observable" if allowed is None else "verified",
    }


def _check_buffers(layout: Layout, limit: int) -> None:
    for buffer in layout.buffers:
        if buffer.byte_len > limit:
            raise fail(
                "DEVICE_BUFFER_TOO_LARGE", f"buffer {buffer.role} is larger than the device allows",
                expected=f"at most {limit} bytes", found=f"{buffer.byte_len} bytes",
                fix="Restore fewer tokens, or quantize the cache.", role=buffer.role,
            )  # fmt: skip


def _backend() -> str:
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _info() -> dict[str, Any]:
    import mlx.core as mx

    try:
        return dict(mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info())
    except (RuntimeError, ValueError):
        return {}


def _buffer_limit(info: dict[str, Any]) -> int | None:
    """The key as MLX gives it, or as its documentation names it."""
    return _size(info.get("max_buffer_length", info.get("max_buffer_size")))


def _size(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _system_available() -> int | None:
    """Linux only; macOS, where the CPU is not the default device, tells no such number cheaply."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_available() -> int | None:
    """What the control group of a container leaves, file pages that it can drop counted as free; None without limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split(maxsplit=1) for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", "0")))
    except (OSError, ValueError):
        return None
