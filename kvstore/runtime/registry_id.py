"""The registry id of the GPU, asked of the system: MLX does not tell it.

Only Metal has one. It is the id of the device's entry in the I/O registry, the same for
all processes until the next boot.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

__all__ = ["metal_registry_id"]

_METAL: Final = "/System/Library/Frameworks/Metal.framework/Metal"
_OBJECTIVE_C: Final = "/usr/lib/libobjc.A.dylib"


def metal_registry_id() -> int | None:
    """The default Metal device's ``registryID``, or None where there is no Metal."""
    if platform.system() != "Darwin":
        return None
    try:
        create = ctypes.CDLL(_METAL).MTLCreateSystemDefaultDevice
        objective_c = ctypes.CDLL(_OBJECTIVE_C)
        select, send = objective_c.sel_registerName, objective_c.objc_msgSend
    except (OSError, AttributeError):
        return None
    create.restype, create.argtypes = ctypes.c_void_p, ()
    select.restype, select.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    send.restype, send.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_void_p)
    device = create()
    return int(send(device, select(b"registryID"))) if device else None
