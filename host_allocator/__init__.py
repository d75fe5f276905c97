"""Host bookkeeping of a KV cache: every decision about ownership, in integers.

Importing this package imports the standard library and NumPy, never JAX.
"""
