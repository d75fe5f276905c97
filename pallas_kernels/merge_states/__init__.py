"""Merging attention over disjoint sets of keys."""

from pallas_kernels.merge_states.api import merge_states

__all__ = ["merge_states"]
