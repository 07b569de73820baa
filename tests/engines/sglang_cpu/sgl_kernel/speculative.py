"""The module path under which SGLang imports the n-gram tree operator."""

from sgl_kernel.tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
