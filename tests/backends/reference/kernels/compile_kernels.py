"""Compile the kernels for GPUs that need not be here; print the shared memory of each in bytes. Not to be run by the interpreter."""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backends.reference.kernels import choose, int4_linear, tree_attention

RTX_4090, H100 = 89, 90


def shared_bytes(kernel: Any, types: str, constants: dict[str, Any], capability: int) -> int:
    """`types` of the arguments that are no constants, in order. Pointers are aligned to 16 bytes, as torch's are."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature.get(name, "")[:1] == "*"}
    source = ASTSource(kernel, {name: signature.get(name, "constexpr") for name in kernel.arg_names}, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


def main() -> None:
    sizes: dict[str, int] = {}
    for capability in (RTX_4090, H100):
        for dtype, kv, dim, share, window in (
            ("bf16", "bf16", 64, 3, 0),
            ("fp16", "fp16", 128, 8, 4096),
            ("fp32", "fp32", 128, 4, 0),
            ("bf16", "i8", 128, 4, 0),
            ("bf16", "fp8e4nv", 128, 4, 0),
        ):
            for width in (1, 31):
                blocks = tree_attention.blocks(dim, 4 if dtype == "fp32" else 2, width * share)
                constants = {"HEADS": 8 * share, "SHARE": share, "DIM": dim, "CHUNK": 512, "WINDOW": window, **blocks}
                scales = "*fp32" if kv != dtype else ""
                if not scales:
                    constants["scales"] = None
                types = f"*{dtype} *{kv} {scales} *i64 *i32 *i64 *fp32 *fp32 i32 i32 i64 i64 i32 fp32"
                name = f"attend sm_{capability} {dtype} over {kv} dim {dim} share {share} window {window} width {width}"
                sizes[name] = shared_bytes(tree_attention._attend_chunk, types, constants, capability)
        constants = {"HEADS": 32, "DIM": 128, "CHUNK": 512, "BLOCK_D": 128}
        types = "*fp32 *fp32 *i64 *bf16 i64 i64"
        sizes[f"join sm_{capability}"] = shared_bytes(tree_attention._join_chunks, types, constants, capability)
        types = "*fp32 *fp32 *i32 *i64 i64 i32"
        sizes[f"choose sm_{capability}"] = shared_bytes(choose._choose_row, types, {"BLOCK": choose.BLOCK}, capability)
        for dtype in ("bf16", "fp32"):
            types = f"*{dtype} *u8 *bf16 *{dtype} i32 i32 i32"
            constants = {"BLOCK_M": 64, "BLOCK_N": int4_linear.BLOCK_N, "HALF": 32}
            sizes[f"int4 sm_{capability} {dtype}"] = shared_bytes(int4_linear._int4_rows, types, constants, capability)
            types, constants = types.replace("*u8 *bf16", "*u8 *fp32"), {**constants, "HALF": 64}  # of a checkpoint
            sizes[f"int4 sm_{capability} {dtype} groups of 128"] = shared_bytes(
                int4_linear._int4_rows, types, constants, capability
            )
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
