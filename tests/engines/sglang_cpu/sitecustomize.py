"""Lets a CPU build of torch run beside the CUDA wheel of torchvision: declares the operators that its C++ half would bring.

On PYTHONPATH of the test server only. torchvision's Python half registers shape rules for them at import and fails if they are
unknown; nothing here ever calls them.
"""

import torch

for schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float t) -> Tensor",
):
    torch.library.define(f"torchvision::{schema.split('(')[0]}", "(" + schema.split("(", 1)[1])
