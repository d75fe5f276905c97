"""Writing and copying rows of pages, in place."""

from pallas_kernels.kv_update.api import copy_rows
from pallas_kernels.kv_update.api import write_kv

__all__ = ["copy_rows", "write_kv"]
