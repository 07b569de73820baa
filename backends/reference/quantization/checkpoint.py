"""Linear layers that a checkpoint holds in 4 bits already, in the layouts of AutoAWQ (GEMM) and of AutoGPTQ and GPTQModel.

Both keep a weight [out, in] transposed, as W = (q - zero) × scale with integers q and zero of 0..15, eight of them in an int32:

|           | AWQ | GPTQ |
|-----------|-----|------|
| `qweight` | [in, out / 8]: a word holds 8 outputs, 0 2 4 6 1 3 5 7 from its low end | [in / 8, out]: 8 inputs in order |
| `qzeros`  | [groups, out / 8], packed likewise | [groups, out / 8]: 8 outputs in order, v1 files one less than meant |
| `scales`  | [groups, out] | [groups, out] |
| `g_idx`   | | [in]: the group of each input |

Sources: awq/modules/linear/gemm.py and awq/utils/packing_utils.py of AutoAWQ; auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py of
AutoGPTQ, whose `(qzeros + 1) & 15` is the rule for v1; gptqmodel/nn_modules/qlinear of GPTQModel for v2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.reference.config import Packing
from backends.types import ConfigError

Take = Callable[[str, tuple[int, ...]], Tensor]
"""The tensor of a name, which must have the shape given."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an AWQ word each of its 8 outputs lies: the inverse of 0 2 4 6 1 3 5 7."""


def read_int4(packing: Packing, take: Take, name: str, rows: int, columns: int, *, ordered: bool) -> tuple[Tensor, Tensor]:
    """The layer `name` with `rows` outputs and `columns` inputs as `Int4` takes it: q uint8 [out, in], and scale and zero float32
    [groups, out, 2]. W = (q - zero) × scale is (q - 8) × scale + (8 - zero) × scale, exactly so in float32. `ordered`: there is
    a `g_idx` beside it.

    Raises:
        ConfigError: tensors of other shapes, sizes that do not fill groups and words, inputs ordered by activation.
    """
    if columns % packing.group or rows % 8:
        raise ConfigError(f"{name}: {columns} inputs do not fill groups of {packing.group}, or {rows} outputs words of 8")
    groups = columns // packing.group
    words = (columns, rows // 8) if packing.method == "awq" else (columns // 8, rows)
    weight, zeros = _halves(take(f"{name}.qweight", words)), _halves(take(f"{name}.qzeros", (groups, rows // 8)))
    scale = take(f"{name}.scales", (groups, rows)).float()
    if ordered and not torch.equal(take(f"{name}.g_idx", (columns,)).long(), torch.arange(columns) // packing.group):
        raise ConfigError(f"{name}: g_idx puts inputs into groups by activation (desc_act), which is not supported")
    if packing.method == "awq":
        q, zero = weight[..., AWQ_PLACES].flatten(1).T, zeros[..., AWQ_PLACES].flatten(1)
    else:
        q, zero = weight.permute(1, 0, 2).flatten(1), (zeros.flatten(1) + packing.zero_offset) & 15
    return q.contiguous(), torch.stack((scale, (8 - zero.float()) * scale), dim=2)


def _halves(words: Tensor) -> Tensor:
    """int32 [a, b] -> uint8 [a, b, 8] of 0..15, from the low end up.

    Raises:
        ConfigError: words of another type.
    """
    if words.dtype != torch.int32:
        raise ConfigError(f"packed 4-bit weights are words of int32, these are {str(words.dtype).removeprefix('torch.')}")
    return ((words[..., None] >> torch.arange(0, 32, 4)) & 15).to(torch.uint8)
