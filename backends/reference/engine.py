"""The engine: add requests, call `step` until there is no work."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from itertools import count

import psutil
import torch
from torch import Tensor

from backends.reference import kernels
from backends.reference.batch import Batch, Piece, build_batch, upload
from backends.reference.config import read_config
from backends.reference.drafters import build_drafter
from backends.reference.kv_cache import KVCache, token_bytes
from backends.reference.loader import load_model
from backends.reference.options import EngineOptions
from backends.reference.quantization import weight_notes
from backends.reference.sampling import ACCEPT, FORCED, RESIDUAL, Sampling, choose, probabilities, race, uniform
from backends.reference.scheduler import Limits, Plan, Scheduler
from backends.reference.sequence import Sequence, StepOutput
from backends.reference.step_clock import StepClock
from backends.reference.tokenizer import TextStream, Tokenizer
from backends.reference.verify import Draft, Verdict, block, forced, reject, walk
from backends.serving import GenerationRequest, RequestError, TokenLogprob
from backends.types import ConfigError

KV_SHARE_OF_MEMORY = 0.25
"""Part of the memory that keys and values may fill where the user sets no capacity."""

LEAST_PREFIX = 16
"""Common tokens below which copying them costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a step's run of the target gave: final hidden states and captured streams are [n, hidden] for the batch's n rows."""

    batch: Batch
    hidden: Tensor
    captured: list[Tensor]


@dataclass(slots=True)
class Counters:
    """Cumulative. A decode step is one sequence in one step past its first token, drafted or not, so that
    tau = (generated - first) ÷ decode steps exactly; a draft token counts as accepted only if it was emitted."""

    generated_tokens: int = 0
    first_tokens: int = 0
    decode_steps: int = 0
    drafted_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    engine_steps: int = 0  # steps in which a sequence decoded
    prompt_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Engine:
    """One model, one drafter, many sequences. Not thread-safe: one thread adds, steps and cancels."""

    def __init__(self, options: EngineOptions) -> None:
        """Loads everything.

        Raises:
            ConfigError: a checkpoint or a setting that cannot work.
        """
        self.options = options
        config = read_config(options.model)
        self.max_model_len = options.max_model_len or config.context_tokens
        if self.max_model_len > config.context_tokens:
            raise ConfigError(f"--max-model-len {self.max_model_len} exceeds the model's context of {config.context_tokens}")
        if options.kv_cache_dtype == "fp8" and not kernels.reads_fp8(torch.device(options.device)):
            raise ConfigError("--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or higher: use int8")
        self.tokenizer = Tokenizer(options.model)
        rows = self.max_model_len + options.draft_tokens
        self.model = load_model(
            options.model, dtype=options.dtype, quantization=options.quantization, device=options.device, max_positions=rows
        )
        built = build_drafter(options, self.model, self.tokenizer, self.max_model_len)
        self.drafter, self.draft_notes = built.drafter, built.notes
        self.weight_notes = weight_notes(options.quantization, config.packing, self.model.device, self.model.dtype)
        slots = options.max_num_seqs
        dtype, stored = self.model.dtype, options.kv_cache_dtype
        self.capacity_tokens = _capacity(options, rows, token_bytes(config, dtype, stored) + built.token_bytes)
        self.cache = KVCache(config, slots=slots, rows=rows, dtype=dtype, device=self.model.device, stored=stored)
        limits = Limits(
            slots,
            options.max_num_batched_tokens,
            self.capacity_tokens,
            options.chunked_prefill,
            options.k,
            options.draft_tokens,
            options.k_schedule,
        )
        self.scheduler = Scheduler(limits, self._take_over)
        self.counters = Counters(accepted_per_position=[0] * options.k)
        self.clock = StepClock(self.model.device, options.step_log)
        self._ids = count()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def kv_use_ratio(self) -> float:
        return sum(sequence.computed for sequence in list(self.scheduler.running)) / self.capacity_tokens

    def resolved(self) -> dict[str, object]:
        """Settings in effect, defaults filled in."""
        settings = {
            **asdict(self.options),
            "model": str(self.options.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }
        settings |= {
            "weight_notes": "; ".join(self.weight_notes),
            "draft_notes": "; ".join(self.draft_notes),
            "max_model_len": self.max_model_len,
            "kv_cache_tokens": self.capacity_tokens,
        }
        return settings | {"threads": torch.get_num_threads(), "version": f"torch {torch.__version__}"}

    def warm_up(self) -> None:
        """Run two short requests, so that the first real one finds caches filled and buffers allocated; counts nothing."""
        size = min(64, self.max_model_len // 2)
        self.clock.recording = False
        for _ in range(2):
            self.add(GenerationRequest(prompt_ids=(0,) * size, max_tokens=min(8, size), ignore_eos=True))
        while self.has_work:
            self.step()
        self.counters = Counters(accepted_per_position=[0] * self.options.k)
        self.clock.recording = True

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError where this engine cannot serve the request."""
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", field="prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}: at least 1", field="max_tokens")
        total = len(request.prompt_ids) + request.max_tokens
        if total > self.max_model_len:
            raise RequestError(
                f"prompt of {len(request.prompt_ids)} tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{self.max_model_len} tokens",
                field="max_tokens",
            )
        bad = next((token for token in request.prompt_ids if not 0 <= token < self.model.config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the vocabulary of {self.model.config.vocab_size}", field="prompt")

    def add(self, request: GenerationRequest) -> Sequence:
        """Queue a request. A request without a seed gets a random one."""
        self.check(request)
        seed = random.getrandbits(63) if request.seed is None else request.seed
        sequence = Sequence(
            id=next(self._ids),
            tokens=list(request.prompt_ids),
            prompt_tokens=len(request.prompt_ids),
            max_tokens=request.max_tokens,
            sampling=Sampling(request.temperature, request.top_k, request.top_p, seed),
            end_ids=frozenset() if request.ignore_eos else self.model.config.eos_ids,
            text=TextStream(self.tokenizer, request.stop),
            logprobs=request.logprobs,
        )
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self._finish(sequence, "cancelled")

    def reset_prefix_cache(self) -> None:
        """Prompts from now on share nothing with requests that have finished."""
        self.scheduler.forget_prefixes()

    def step(self) -> list[StepOutput]:
        """Draft, run the target once over prompts and drafts together, verify, and emit."""
        clock, accepted = self.clock, self.counters.accepted_tokens
        clock.start()
        plan, preempted = self.scheduler.schedule()
        for sequence in preempted:
            self.drafter.forget(sequence)
        self.counters.preemptions += len(preempted)
        clock.lap("host")
        drafts = self.drafter.propose(plan.decodes)
        if self.options.forced_acceptance:
            drafts = [_filled(draft, s, limit) for draft, (s, limit) in zip(drafts, plan.decodes, strict=True)]
        clock.lap("draft")
        result = self._forward(plan, drafts)
        verdicts = self._verify(plan, drafts, result)
        clock.lap("sample")
        outputs = self._commit(plan, drafts, verdicts, result)
        clock.lap("host")
        clock.finish(
            batch=len(plan.decodes),
            drafted=sum(len(draft.tokens) for draft in drafts),
            accepted=self.counters.accepted_tokens - accepted,
            emitted=sum(len(output.token_ids) for output in outputs),
            prompt=sum(n for _, n in plan.prefills),
        )
        return outputs

    def _take_over(self, sequence: Sequence, slot: int, common: int) -> int:
        """Copy what a slot has of the sequence's first `common` tokens, as far as it is worth it and the drafter can follow."""
        if common < LEAST_PREFIX or not self.options.prefix_caching:
            common = 0
        rows = self.drafter.adopt(sequence, slot, common)
        self.cache.copy_rows(slot, sequence.slot, rows)
        if sequence.reused is None:
            sequence.reused = rows
            self.counters.prompt_tokens += rows
            self.counters.prefix_hit_tokens += rows
            self.counters.prefix_query_tokens += sequence.prompt_tokens
        return rows

    def _forward(self, plan: Plan, drafts: list[Draft]) -> Pass:
        pieces = [Piece(s.slot, s.computed, s.tokens[s.computed : s.computed + n]) for s, n in plan.prefills]
        pieces += [
            Piece(s.slot, s.computed, [s.tokens[-1], *draft.tokens], draft.parents)
            for (s, _), draft in zip(plan.decodes, drafts, strict=True)
        ]
        model = self.model
        batch = build_batch(
            pieces, slot_rows=self.cache.rows, dtype=model.dtype, device=model.device, window=model.config.sliding_window
        )
        return Pass(batch, *model.forward(batch, self.cache, self.drafter.capture))

    def _verify(self, plan: Plan, drafts: list[Draft], result: Pass) -> dict[int, Verdict]:
        """The verdict of each sequence that emits in this step, by its id. A prompt's last token is a root without a draft."""
        starts, hidden = result.batch.starts, result.hidden
        roots = [(s, starts[s.slot] + n - 1, Draft()) for s, n in plan.prefills if n == s.pending]
        roots += [(s, starts[s.slot], draft) for (s, _), draft in zip(plan.decodes, drafts, strict=True)]
        rows: list[int] = []
        where: list[tuple[Sampling, int]] = []
        spans: list[int] = []
        for sequence, first, draft in roots:
            spans.append(len(rows))
            rows += range(first, first + len(draft.tokens) + 1)
            where += [(sequence.sampling, len(sequence.tokens) + depth) for depth in draft.depths()]
        if not rows:
            return {}
        logits = self.model.logits(hidden[upload(rows, hidden.device)])
        self.clock.lap("verify")
        chosen = choose(logits, where)
        verdicts = {}
        for (sequence, _, draft), at in zip(roots, spans, strict=True):
            end = at + len(draft.tokens) + 1
            if self.options.forced_acceptance:
                verdicts[sequence.id] = forced(draft, self._forced_length(sequence), chosen[at:end])
            elif self.options.sampling != "coupled" and draft.tokens and not sequence.sampling.greedy:
                verdicts[sequence.id] = self._reject(sequence, draft, logits[at:end])
            else:
                verdicts[sequence.id] = walk(draft, chosen[at:end])
            if sequence.logprobs is not None:
                verdicts[sequence.id] = _with_logprobs(verdicts[sequence.id], draft, logits[at:end], sequence.logprobs)
        return verdicts

    def _forced_length(self, sequence: Sequence) -> int:
        """How many draft tokens to accept: one coin for all positions, so that position i is accepted at its marginal rate."""
        coin = uniform(sequence.sampling.seed, len(sequence.tokens), FORCED)
        return sum(coin < rate for rate in self.options.forced_acceptance)

    def _reject(self, sequence: Sequence, draft: Draft, logits: Tensor) -> Verdict:
        """By rejection, or as a block; coins and the last draw are keyed by the request's seed and the position."""
        sampling, position = sequence.sampling, len(sequence.tokens)

        def target(node: int) -> Tensor:
            return probabilities(logits[node], sampling)

        if self.options.sampling == "block" and draft.parents is None:  # which coins are thrown says something of later tokens
            path, law = block(draft, target, lambda length: uniform(sampling.seed, position, ACCEPT + 4 * length))
        else:
            path, law = reject(draft, target, lambda n, rank: uniform(sampling.seed, position + n, ACCEPT + 4 * rank))
        return Verdict(path, int(race(law.log(), sampling.seed, position + len(path), RESIDUAL)))

    def _commit(self, plan: Plan, drafts: list[Draft], verdicts: dict[int, Verdict], result: Pass) -> list[StepOutput]:
        """Advance every sequence of the step, and count."""
        outputs = []
        starts, counters = result.batch.starts, self.counters
        counters.engine_steps += bool(plan.decodes)
        kept: list[tuple[int, int, tuple[int, ...]]] = []
        for sequence, n in plan.prefills:
            start = starts[sequence.slot]
            if sequence.output_tokens == 0:
                counters.prompt_tokens += n
            sequence.computed += n
            if (verdict := verdicts.get(sequence.id)) is not None:
                outputs.append(self._emit(sequence, Draft(), verdict))
            self.drafter.observe(sequence, list(range(start, start + n)), result.hidden, result.captured)
        for (sequence, _), draft in zip(plan.decodes, drafts, strict=True):
            verdict = verdicts[sequence.id]
            start = starts[sequence.slot]
            kept.append((sequence.slot, sequence.computed, verdict.path))
            sequence.computed += 1 + len(verdict.path)
            outputs.append(self._emit(sequence, draft, verdict))
            self.drafter.observe(sequence, [start, *(start + node for node in verdict.path)], result.hidden, result.captured)
        self.cache.keep_paths(kept)
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output.sequence, output.finish_reason)
        return outputs

    def _emit(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> StepOutput:
        """Append what was accepted and the target's own token, cut where the sequence ends; then count what was kept."""
        tokens = [*(draft.tokens[node - 1] for node in verdict.path), verdict.token]
        decoding = sequence.output_tokens > 0
        tokens = tokens[: sequence.max_tokens - sequence.output_tokens]
        end = next((i for i, token in enumerate(tokens, 1) if token in sequence.end_ids), None)
        text, used = sequence.text.push(tokens[:end])
        tokens = tokens[:used]
        sequence.tokens += tokens
        reason = None
        if sequence.text.stopped or tokens[-1] in sequence.end_ids:
            reason = "stop"
        elif sequence.output_tokens == sequence.max_tokens:
            reason = "length"
        if reason is not None:
            text += sequence.text.finish()
        self._count(draft, min(len(verdict.path), len(tokens)), len(tokens), decoding)
        return StepOutput(sequence, tuple(tokens), text, reason, verdict.logprobs[: len(tokens)])

    def _count(self, draft: Draft, accepted: int, emitted: int, decoding: bool) -> None:
        counters = self.counters
        counters.generated_tokens += emitted
        counters.first_tokens += not decoding
        counters.decode_steps += decoding
        counters.drafted_steps += bool(draft.tokens)
        counters.draft_tokens += len(draft.tokens)
        counters.accepted_tokens += accepted
        for position in range(accepted):
            counters.accepted_per_position[position] += 1

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.release(sequence)
        self.drafter.forget(sequence)


def _filled(draft: Draft, sequence: Sequence, limit: int) -> Draft:
    """The draft, or a chain of `limit` tokens where the drafter found nothing: under forced acceptance every step costs the same."""
    return draft if draft.parents or len(draft.tokens) >= limit else Draft((sequence.tokens[-1],) * limit)


def _capacity(options: EngineOptions, rows: int, bytes_per_token: int) -> int:
    """KV tokens of all running sequences together. A draft model's rows count too: what it takes is not there for requests."""
    least, most = rows, rows * options.max_num_seqs
    if options.kv_cache_tokens is not None:
        if options.kv_cache_tokens < least:
            raise ConfigError(
                f"--kv-cache-tokens {options.kv_cache_tokens} cannot hold one sequence of {least} tokens "
                "(--max-model-len + K): raise it or lower --max-model-len"
            )
        return min(options.kv_cache_tokens, most)
    if options.device == "cpu":
        memory = psutil.virtual_memory().total
    else:
        memory = torch.cuda.get_device_properties(options.device).total_memory
    return max(least, min(most, int(memory * KV_SHARE_OF_MEMORY / bytes_per_token)))


def _with_logprobs(verdict: Verdict, draft: Draft, logits: Tensor, count: int) -> Verdict:
    """The verdict with log-probabilities of its tokens, each from the logits [nodes, vocab] of the node before it."""
    tokens = [*(draft.tokens[node - 1] for node in verdict.path), verdict.token]
    rows = logits[[0, *verdict.path]].float().log_softmax(-1)
    top = rows.topk(max(count, 1), dim=-1)
    told = tuple(
        TokenLogprob(float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))[:count])
        for row, token, ids, values in zip(rows, tokens, top.indices, top.values, strict=True)
    )
    return replace(verdict, logprobs=told)
