"""What bfloat16 and int8 cost: perplexity over a fixed text, and the distance from float32 over it and over questions.

The distance is the mean Kullback-Leibler divergence of the next token's distribution from the one that transformers computes
in float32, in nats per token. transformers' own bfloat16 stands beside ours, int8 weights beside pages in int8. Questions are
put in the model's chat template.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from questions import QUESTIONS
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from paged_engine.attention.cpu_native import load_cpu_attention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.config import EngineConfig
from paged_engine.kernels.self_check import trial_batch
from paged_engine.models.graft import graft_model
from paged_engine.models.load import load_model, resolve_checkpoint
from paged_engine.text.tokenizer import Tokenizer
from paged_engine.tools.default_model import default_model

TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she \
had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a \
book," thought Alice, "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether \
the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White \
Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to \
itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have \
wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she \
had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she \
ran across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had not a \
moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her and to \
wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but it was too dark \
to see anything; then she looked at the sides of the well, and noticed that they were filled with cupboards and book-shelves; \
here and there she saw maps and pictures hung upon pegs. She took down a jar from one of the shelves as she passed; it was \
labelled "ORANGE MARMALADE", but to her great disappointment it was empty: she did not like to drop the jar for fear of \
killing somebody underneath, so managed to put it into one of the cupboards as she fell past it.

"Well!" thought Alice to herself, "after such a fall as this, I shall think nothing of tumbling down stairs! How brave they'll \
all think me at home! Why, I wouldn't say anything about it, even if I fell off the top of the house!" (Which was very likely \
true.)

It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the \
epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the \
spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were all going \
direct to Heaven, we were all going direct the other way - in short, the period was so far like the present period, that \
some of its noisiest authorities insisted on its being received, for good or for evil, in the superlative degree of \
comparison only.

Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated \
to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or \
any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that war. We have come to \
dedicate a portion of that field, as a final resting place for those who here gave their lives that that nation might live. \
It is altogether fitting and proper that we should do this.
"""
"""Lewis Carroll (1865), Charles Dickens (1859) and Abraham Lincoln (1863)."""
PAGE_SIZE = 16

Forward = Callable[[torch.Tensor], torch.Tensor]
"""From token ids [num_tokens] to float32 logits [num_tokens, vocab_size]."""


def native_forward(
    model: str, max_num_tokens: int, *, int8: bool = False, cache_dtype: torch.dtype = torch.bfloat16
) -> Forward:
    """The engine's CPU path in bfloat16, or with weights in int8, which computes all tokens in one step."""
    config = EngineConfig(model=model, dtype="bfloat16", device="cpu")
    loaded = load_model(config, torch.device("cpu"))
    specs = tuple(layer.spec for layer in loaded.layers)
    setup = AttentionSetup(specs, PAGE_SIZE, loaded.device, loaded.dtype, cache_dtype)
    backend = load_cpu_attention(setup)
    forward = graft_model(loaded, backend, max_num_tokens=max_num_tokens, int8=int8)
    if forward is None:
        raise SystemExit(f"{type(loaded.module).__name__} does not run in the native kernels")
    num_pages = -(-max_num_tokens // PAGE_SIZE)
    for layer in range(len(specs)):
        backend.bind(layer, torch.zeros(num_pages, *backend.page_shape(layer), dtype=cache_dtype))

    def logits(token_ids: torch.Tensor) -> torch.Tensor:
        batch = trial_batch((len(token_ids),), (len(token_ids),), PAGE_SIZE)
        backend.plan(batch)
        return forward(token_ids, batch.positions, torch.arange(len(token_ids))).float()

    return logits


def transformers_forward(model: str, dtype: torch.dtype) -> Forward:
    """transformers' own model in `dtype`."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return lambda token_ids: reference(token_ids[None], use_cache=False).logits[0].float()


def forwards(model: str, max_num_tokens: int) -> Iterator[tuple[str, Forward]]:
    """By name, what computes logits; the exact one first."""
    yield "transformers, float32", transformers_forward(model, torch.float32)
    yield "transformers, bfloat16", transformers_forward(model, torch.bfloat16)
    yield "ours, bfloat16", native_forward(model, max_num_tokens)
    yield "ours, int8 pages", native_forward(model, max_num_tokens, cache_dtype=torch.int8)
    yield "ours, int8 weights", native_forward(model, max_num_tokens, int8=True)
    yield "ours, both in int8", native_forward(model, max_num_tokens, int8=True, cache_dtype=torch.int8)


def divergences(exact: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each row, [num_tokens], of log-probabilities [num_tokens, vocab_size]."""
    return (exact.exp() * (exact - log_probs)).sum(-1)


@torch.inference_mode()
def compare(model: str, text: torch.Tensor, questions: list[torch.Tensor]) -> Iterator[list[str]]:
    """Rows of the table, one for each way to compute the logits of the text's and the questions' tokens."""
    exact: list[torch.Tensor] = []
    for name, forward in forwards(model, max(map(len, [text, *questions]))):
        log_probs = [forward(token_ids).log_softmax(-1) for token_ids in [text, *questions]]
        exact = exact or log_probs
        perplexity = (-log_probs[0][:-1].gather(1, text[1:, None])).mean().exp()
        of_text, *of_questions = map(divergences, exact, log_probs)
        same = (exact[0].argmax(-1) == log_probs[0].argmax(-1)).float().mean()
        row = [name, f"{perplexity:.3f}", f"{100 * same:.1f} %", f"{of_text.mean():.5f}"]
        if of_questions:
            answers = torch.stack([rows[-1] for rows in of_questions])
            row += [f"{torch.cat(of_questions).mean():.5f}", f"{answers.mean():.5f}"]
        yield row
        del forward
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--text", type=Path, help="a text file to use instead")
    parser.add_argument(
        "--max-tokens", type=int, default=2048, help="of the text; the logits of all are kept"
    )
    options = parser.parse_args()
    cache = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")
    model = resolve_checkpoint(options.model or str(default_model(cache / "models")))
    tokenizer = Tokenizer.load(model, False).hf_tokenizer
    text = options.text.read_text(encoding="utf-8") if options.text else TEXT
    text_ids = torch.tensor(tokenizer(text).input_ids[: options.max_tokens])
    questions = []
    if tokenizer.chat_template:
        for question in QUESTIONS:
            message = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            questions.append(torch.tensor(ids))
    table = Table(title=f"{Path(model).name}: {len(text_ids)} tokens of text, {len(questions)} questions")
    table.add_column("")
    for name in ("perplexity", "same best", "nats from float32: text", "questions", "their answers' start"):
        table.add_column(name, justify="right")
    for row in compare(model, text_ids, questions):
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
