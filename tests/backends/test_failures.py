"""Why a start failed, read from real messages of vLLM 0.32, SGLang 0.5 and the reference engine."""

from __future__ import annotations

import signal

import pytest

from backends.failures import classify

ENDING = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}\n"
WORKER = "(Worker pid=31739) ERROR 11-29 17:48:32 [multiproc_executor.py:953] "

CASES = {
    "vllm, KV cache on a CPU": (
        1,
        WORKER
        + "ValueError: Available memory on node 0 (11.26/13.84 GiB) on kv cache allocation is less than requested memory\n"
        + ENDING,
        "out_of_memory",
        "ValueError: Available memory on node 0 (11.26/13.84 GiB) on kv cache allocation is less than requested memory",
    ),
    "vllm, no room for the cache": (
        1,
        WORKER + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\n" + ENDING,
        "out_of_memory",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ),
    "torch, on a GPU": (
        1,
        WORKER
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 79 GiB\n",
        "out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 79 GiB",
    ),
    "sglang, memory": (
        1,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n",
        "out_of_memory",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ),
    "sglang, a note about a fallback before the error": (
        1,
        "The current platform does not support Intel AMX, will fallback to torch_native backend.\n"
        "RuntimeError: The expanded size of the tensor (1) must match the existing size (4)\n",
        "crash",
        "RuntimeError: The expanded size of the tensor (1) must match the existing size (4)",
    ),
    "vllm, unknown flag": (
        2,
        "usage: api_server.py [-h]\n                     [model_tag]\napi_server.py: error: unrecognized arguments: --no-such-flag\n",
        "bad_flag",
        "api_server.py: error: unrecognized arguments: --no-such-flag",
    ),
    "vllm, value of a flag": (
        2,
        "usage: api_server.py\napi_server.py: error: argument --max-num-seqs: invalid int value: 'many'\n",
        "bad_flag",
        "api_server.py: error: argument --max-num-seqs: invalid int value: 'many'",
    ),
    "vllm, key of the speculative config": (
        1,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nngram_prompt_lookup_max\n"
        "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=3, input_type=int]\n",
        "bad_flag",
        "ngram_prompt_lookup_max: Unexpected keyword argument [type=unexpected_keyword_argument, input_value=3, input_type=int]",
    ),
    "vllm, flags that contradict each other": (
        1,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, --per-request-spec-decode-metrics requires speculative decoding to be enabled (via --speculative-config).\n",
        "bad_flag",
        "Value error, --per-request-spec-decode-metrics requires speculative decoding to be enabled (via --speculative-config).",
    ),
    "reference engine, flag": (2, "unknown option --speed (see --help)\n", "bad_flag", "unknown option --speed (see --help)"),
    "vllm, no weights in the directory": (
        1,
        WORKER + "RuntimeError: Cannot find any model weights with `/models/m`\n" + ENDING,
        "missing_weights",
        "RuntimeError: Cannot find any model weights with `/models/m`",
    ),
    "vllm, no such directory": (
        1,
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/m'.\n",
        "missing_weights",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/m'.",
    ),
    "reference engine, weights": (
        2,
        "/models/m has no weights: expected model.safetensors or model.safetensors.index.json\n",
        "missing_weights",
        "/models/m has no weights: expected model.safetensors or model.safetensors.index.json",
    ),
    "vllm, a package that a variant needs": (
        1,
        "ImportError: Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference==0.1.1`.\n",
        "unsupported",
        "ImportError: Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference==0.1.1`.",
    ),
    "vllm, needs a GPU": (
        1,
        WORKER + "RuntimeError: pin_memory=True requires a CUDA or other accelerator backend\n" + ENDING,
        "unsupported",
        "RuntimeError: pin_memory=True requires a CUDA or other accelerator backend",
    ),
    "sglang, variant": (
        1,
        "ValueError: DFLASH speculative decoding is not supported on 'cpu'\n",
        "unsupported",
        "ValueError: DFLASH speculative decoding is not supported on 'cpu'",
    ),
    "vllm, port": (
        1,
        "OSError: [Errno 98] Address already in use\n",
        "port_in_use",
        "OSError: [Errno 98] Address already in use",
    ),
    "uvicorn, port": (
        1,
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use\n",
        "port_in_use",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
    ),
    "vllm, a kernel that does not fit": (
        1,
        WORKER + "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4\n" + ENDING,
        "crash",
        "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4",
    ),
    "killed by the kernel": (
        -signal.SIGKILL,
        "loading\n",
        "out_of_memory",
        "killed by SIGKILL, as the kernel does when memory runs out",
    ),
    "wrong CPU": (
        -signal.SIGILL,
        "INFO starting\n",
        "unsupported",
        "illegal instruction: this build needs CPU features that this machine lacks",
    ),
    "segmentation fault": (-signal.SIGSEGV, "loading\n", "crash", "ended by SIGSEGV"),
    "nothing said": (3, "", "crash", "exit code 3 without a word in the log"),
}


@pytest.mark.parametrize(("exit_code", "log", "kind", "line"), CASES.values(), ids=CASES)
def test_a_failed_start_is_told_by_its_cause(exit_code: int, log: str, kind: str, line: str) -> None:
    assert classify(exit_code, log) == (kind, line)


def test_warnings_of_a_start_that_failed_for_another_reason_are_not_its_cause() -> None:
    log = (
        "(APIServer pid=1) WARNING 11-29 17:41:33 [arg_utils.py:3005] This model does not officially support chunked prefill.\n"
        "(Worker pid=2) WARNING [__init__.py:211] min_p and logit_bias are not supported with speculative decoding.\n"
        "UserWarning: torch.distributed is unsupported here\n"
        "ValueError: shape mismatch\n"
    )
    assert classify(1, log) == ("crash", "ValueError: shape mismatch")
