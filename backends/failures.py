"""Why an engine did not start, read from its exit code and its log."""

from __future__ import annotations

import re
import signal

LINE_LIMIT = 300
_PYDANTIC = ("Unexpected keyword argument", "Extra inputs are not permitted")  # these name their field one line above

# Searched in this order, since a log holds consequences beside the cause: an engine that runs out of memory also "failed to
# initialize", and argparse prints its usage for a bad flag only.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("port_in_use", r"address already in use|Errno 98\b|EADDRINUSE|port \d+ is (already )?(in use|taken|not available)"),
    (
        "out_of_memory",
        r"out of memory|OutOfMemoryError|std::bad_alloc|Cannot allocate memory|\bMemoryError\b"
        r"|DefaultCPUAllocator: can't allocate|No available memory for the cache blocks"
        r"|larger than the maximum number of tokens that can be stored in KV cache"
        r"|KV cache is needed, which is larger than the available KV cache memory|Not enough memory\."
        r"|is less than desired (GPU|CPU) memory utilization|available memory .* is less than",
    ),
    (
        "bad_flag",
        r"error: (unrecognized arguments|argument |the following arguments are required|ambiguous option|invalid choice)"
        r"|No such option|Invalid value for '|unexpected keyword argument|Unexpected keyword argument"
        r"|Extra inputs are not permitted|\(see --help\)",
    ),
    (
        "missing_weights",
        r"Cannot find any model weights|No (model )?weights? (files? )?(were )?found|has no weights|Repo id must be in the form"
        r"|no file named .*(safetensors|pytorch_model)"
        r"|is not a local folder and is not a valid model identifier|is not the path to a directory containing a"
        r"|does not appear to have a file named|Can't load the configuration of|Invalid repository ID or local directory"
        r"|Repository Not Found|FileNotFoundError: .*(safetensors|config\.json)|model directory .* does not exist"
        r"|outgoing traffic has been disabled",
    ),
    (
        "unsupported",
        r"NotImplementedError|not supported|is unsupported|Unsupported|does not support|not compatible|incompatible"
        r"|are not currently supported|unknown speculative method|Illegal instruction|cannot be used with|only supports?\b"
        r"|is not supported for (the )?current|requires a CUDA|is required for|no kernel image is available",
    ),
    ("bad_flag", r"^\s*Value error, "),  # pydantic: settings that contradict each other
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_WARNING = re.compile(r"\b(WARNING|INFO|DEBUG)\b|Warning:|\bfall(s|ing)? ?back\b")
_PREFIX = re.compile(r"^(\([^()]*pid=\d+\) )?(ERROR [\d:. -]+)?(\[[\w.]+:\d+\] )?")  # of vLLM's log lines
_ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: \S")


def classify(exit_code: int | None, log: str) -> tuple[str, str]:
    """Kind of a failed start and the log line that shows it (or what the exit code says, where no line does).

    `exit_code` is negative for a signal, None for a process that still runs. Kinds are those of `BackendError`, except
    `hang`, which only the caller's clock can tell.
    """
    lines = [_PREFIX.sub("", line.strip()) for line in log.splitlines() if line.strip() and not _WARNING.search(line)]
    if exit_code == -signal.SIGILL:
        return "unsupported", "illegal instruction: this build needs CPU features that this machine lacks"
    for kind, pattern in _COMPILED:
        for number, line in enumerate(lines):
            if pattern.search(line):
                key = f"{lines[number - 1].strip()}: " if number and line.lstrip().startswith(_PYDANTIC) else ""
                return kind, (key + line.strip())[:LINE_LIMIT]
    if exit_code == -signal.SIGKILL:
        return "out_of_memory", "killed by SIGKILL, as the kernel does when memory runs out"
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    if errors:
        return "crash", errors[0][:LINE_LIMIT]
    if exit_code is not None and exit_code < 0:
        return "crash", f"ended by {signal.Signals(-exit_code).name}"
    return "crash", (lines[-1][:LINE_LIMIT] if lines else f"exit code {exit_code} without a word in the log")
