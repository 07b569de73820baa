"""What a simulated server knows of requests that its engine does not have yet."""

import asyncio
import io
import json
import time

from backends.serving import GenerationRequest
from backends.simulated.dialects import DIALECTS
from backends.simulated.engine import SimulatedEngine
from backends.simulated.presets import PRESETS
from backends.simulated.truth import CURRENT, TruthLog


def test_a_request_is_on_its_way_from_its_receipt_until_the_engine_has_it() -> None:
    log = TruthLog(io.BytesIO())
    truth = log.begin("a", ())
    assert not log.on_their_way(truth.received_s - 1)  # it came later
    assert log.on_their_way(truth.received_s)
    truth.queued = True
    assert not log.on_their_way(truth.received_s)
    refused = log.begin("b", ())  # never reaches the engine
    log.end(refused)
    assert not log.on_their_way(time.monotonic())


def test_the_model_s_clock_starts_at_the_receipt_however_long_the_body_took_to_read() -> None:
    """A prompt of 1,000 tokens takes one step of 8 ms and 50 ms of prefill; reading takes 20 ms of those."""
    file = io.BytesIO()
    log = TruthLog(file)
    engine = SimulatedEngine(PRESETS["small"](), dialect=DIALECTS["spectune"], log=log)

    async def serve() -> None:
        truth = log.begin("a", ())
        CURRENT.set(truth)
        await asyncio.sleep(0.02)
        async for _ in engine.generate(GenerationRequest(prompt_ids=(1,) * 1000, max_tokens=1)):
            truth.sending(1)
        log.end(truth)

    asyncio.run(serve())
    row = json.loads(file.getvalue())
    assert abs(row["model_first_s"] - row["received_s"] - 0.058) < 0.001
    assert row["first_token_s"] >= row["model_first_s"]
