"""A thin client for the Triton model `llm`: synchronous and asyncio, over gRPC streaming and over HTTP.

Stream text as it is made, and look at the whole afterwards:

    from paged_client import Client

    with Client("localhost:8001") as client:
        stream = client.stream("Once upon a time", max_tokens=64, temperature=0.8, seed=1)
        for delta in stream:
            print(delta.text, end="", flush=True)
        print(stream.result.finish_reason, stream.result.num_output_tokens)

Or wait for the whole; a prompt may also be token ids, or messages for the checkpoint's chat template:

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    print(client.generate(messages, max_tokens=32).text)

Leaving the loop ends the request on the server, within a `with` block at the block's end at the latest:

    with client.stream("Count to a million:", max_tokens=5000) as stream:
        for delta in stream:
            if "42" in delta.text:
                break

The same with asyncio:

    from paged_client import AsyncClient

    async with AsyncClient("http://localhost:8000") as client:
        async for delta in client.stream("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

One client object serves many threads, or many tasks. With `n` > 1 each delta says which sequence it belongs
to (`delta.sequence_index`), and `result.sequences` has them all. What goes wrong is raised as a subclass of
`PagedClientError`: `InvalidRequest`, `Unavailable`, `Cancelled`, `InternalError` (all `ServerError`, with
`code`, `message` and `status`), `ConnectionFailed`, `TimedOut`. `Client` describes addresses, time limits and
retries, `GenerationOptions` every option. On the command line: `paged-client "What is the capital of
France?"`, with the extra `cli` installed.
"""

from paged_client.aio import AsyncClient, AsyncStream
from paged_client.client import Client, Stream
from paged_client.errors import (
    Cancelled,
    ConnectionFailed,
    InternalError,
    InvalidRequest,
    PagedClientError,
    ServerError,
    TimedOut,
    Unavailable,
)
from paged_client.request import GenerationOptions, Prompt
from paged_client.types import Delta, GeneratedSequence, Generation, Message, TokenLogprob, TokenLogprobs

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "ConnectionFailed",
    "Delta",
    "GeneratedSequence",
    "Generation",
    "GenerationOptions",
    "InternalError",
    "InvalidRequest",
    "Message",
    "PagedClientError",
    "Prompt",
    "ServerError",
    "Stream",
    "TimedOut",
    "TokenLogprob",
    "TokenLogprobs",
    "Unavailable",
]
