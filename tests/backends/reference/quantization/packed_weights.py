"""4-bit weights written as AutoAWQ and AutoGPTQ write them, in loops that follow their `pack` methods and share nothing with ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Codes:
    """A weight of 4-bit codes: q [out, in] and zero [groups, out] of 0..15, scale float16 [groups, out]."""

    q: npt.NDArray[np.int64]
    zero: npt.NDArray[np.int64]
    scale: npt.NDArray[np.float16]

    @property
    def group(self) -> int:
        return self.q.shape[1] // len(self.zero)

    def dense(self) -> Tensor:
        """[out, in] in float32, exactly."""
        zero, scale = (np.repeat(part, self.group, axis=0).T.astype(np.float32) for part in (self.zero, self.scale))
        return torch.from_numpy((self.q.astype(np.float32) - zero) * scale)


def random_codes(rows: int, columns: int, group: int, seed: int, *, short_scales: bool = False) -> Codes:
    """`short_scales`: of 4 significant bits, so that scales and (8 - zero) × scale, with 8, are exact in bf16."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.005, 0.02, (columns // group, rows))
    if short_scales:
        scale = rng.integers(8, 16, scale.shape) * 2.0**-10
    return Codes(rng.integers(0, 16, (rows, columns)), rng.integers(1, 16, scale.shape), scale.astype(np.float16))


def _columns(values: npt.NDArray[np.int64], order: list[int]) -> Words:
    """[a, b] -> [a, b / 8]: eight neighbours of a row in a word, the low end holding the one that `order` names first."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] |= values[:, column * 8 + order[i]].astype(np.uint32) << np.uint32(4 * i)
    return words


def _rows(values: npt.NDArray[np.int64]) -> Words:
    """[a, b] -> [a / 8, b]: eight neighbours of a column in a word, in order."""
    words = np.zeros((values.shape[0] // 8, values.shape[1]), dtype=np.uint32)
    for row in range(words.shape[0]):
        for i in range(8):
            words[row] |= values[row * 8 + i].astype(np.uint32) << np.uint32(4 * i)
    return words


def awq(codes: Codes) -> dict[str, Tensor]:
    """awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`."""
    return _tensors(codes, _columns(codes.q.T, AWQ_ORDER), _columns(codes.zero, AWQ_ORDER))


def gptq(codes: Codes, *, v2: bool = False) -> dict[str, Tensor]:
    """auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack`: zeros are written less 1. `v2`: as they are."""
    made = _tensors(codes, _rows(codes.q.T), _columns(codes.zero - (not v2), list(range(8))))
    return made | {"g_idx": torch.arange(codes.q.shape[1], dtype=torch.int32) // codes.group}


def gptq_v2(codes: Codes) -> dict[str, Tensor]:
    return gptq(codes, v2=True)


def _tensors(codes: Codes, qweight: Words, qzeros: Words) -> dict[str, Tensor]:
    words = {"qweight": torch.from_numpy(qweight.view(np.int32)), "qzeros": torch.from_numpy(qzeros.view(np.int32))}
    return words | {"scales": torch.from_numpy(codes.scale)}
