"""The C library's heap: freed memory is kept."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MMAP_BYTES = 32 * 2**20
"""glibc's highest threshold: smaller blocks come from the heap and stay there when freed, larger
ones (grams) are mapped and go back at once."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the system after every batch.

    Large activations are mapped and unmapped for each operation otherwise, and page faults take
    more time than the arithmetic on CPU.  Returns whether the C library took the setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, MMAP_BYTES),
        (M_TRIM_THRESHOLD, 4 * MMAP_BYTES),
        (M_TOP_PAD, MMAP_BYTES // 2),
        (M_ARENA_MAX, 1),
    )
    return all([libc.mallopt(*setting) for setting in settings])
