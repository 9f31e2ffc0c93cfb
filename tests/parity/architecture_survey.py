"""Tries every architecture that transformers has on a tiny random model: is it served rightly, or refused and why?

The list is transformers' own mapping of causal language models. What comes out is a table in the README, which
test_architectures.py holds against what is so.

``python tests/parity/architecture_survey.py [README.md]`` prints the table, or writes it into that file.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from hand_built import HandBuilt, load_tiny
from tiny_models import MAX_POSITIONS, make_tiny_model, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paged_engine.errors import ConfigurationError

PAGE_SIZE = 4
CHUNK = 5
PROMPT_LENGTHS = (23, 12)
NUM_GREEDY = 20
TOLERANCE = 1e-4

SERVED = "served"
REFUSED = "refused"
NOT_TRIED = "not tried"

ARCHITECTURES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model_type of everything that transformers can load as a causal language model."""
BEGIN = "<!-- architectures: written by ./build.sh models --write -->"
END = "<!-- end of architectures -->"


@dataclass(frozen=True)
class Finding:
    """What became of one architecture."""

    verdict: str
    """SERVED, REFUSED or NOT_TRIED."""
    reason: str = ""
    """Of all but the served ones: one line that names no class and no file."""


def examine(name: str, folder: Path) -> Finding:
    """Build the tiny model `name` in `folder`, load it as the engine does, and hold it against transformers.

    Raises:
        AssertionError: it is served with other logits than transformers computes, which must never be.
    """
    try:
        config = tiny_config(name)
        as_published = copy.deepcopy(config)  # the classes change what they are given
        if not config.is_encoder_decoder:
            make_tiny_model(config).save_pretrained(folder)
        as_published.save_pretrained(folder)
    except ImportError:  # which one it misses first depends on what happens to be installed
        return Finding(NOT_TRIED, "transformers wants packages for it that are not among the requirements")
    except Exception as error:  # transformers wants other settings for this one
        return Finding(NOT_TRIED, _one_line(f"{type(error).__name__}: {error}"))
    try:
        check_parity(folder)
    except ConfigurationError as error:
        return Finding(REFUSED, _one_line(str(error)))
    return Finding(SERVED)


@torch.inference_mode()
def check_parity(
    folder: Path, prompt_lengths: Sequence[int] = PROMPT_LENGTHS, max_seq_len: int = MAX_POSITIONS
) -> None:
    """Prompts mixed, in chunks over small pages, then greedy tokens: logits as of transformers' plain forward.

    Args:
        folder: a tiny model's checkpoint.
        prompt_lengths: tokens of each sequence's prompt, to which NUM_GREEDY come.
        max_seq_len: what the model is loaded with.

    Raises:
        ConfigurationError: the model is refused.
        AssertionError: a logit differs by more than TOLERANCE.
    """
    model = load_tiny(folder, max_seq_len=max_seq_len)
    paged = HandBuilt(model, PAGE_SIZE, "torch")
    generator = random.Random(model.hf_config.model_type)
    sequences = [paged.sequence([generator.randrange(3, 128) for _ in range(n)]) for n in prompt_lengths]
    logits: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    while working := [sequence for sequence in sequences if sequence.num_uncomputed]:
        step_logits = paged.step(*((each, min(CHUNK, each.num_uncomputed)) for each in working))
        finished = [sequence for sequence in working if not sequence.num_uncomputed]
        assert step_logits.shape == (len(finished), model.vocab_size)
        assert step_logits.dtype == torch.float32
        for row, sequence in enumerate(finished):
            logits[id(sequence)].append(step_logits[row])
            if sequence.num_output_tokens < NUM_GREEDY:
                sequence.token_ids.append(int(step_logits[row].argmax()))
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for sequence in sequences:
        theirs = reference(torch.tensor([list(sequence.token_ids)]), use_cache=False).logits[0]
        # Logits that agree make the greedy tokens agree, but for two best ones that are as close as the tolerance.
        torch.testing.assert_close(
            torch.stack(logits[id(sequence)]),
            theirs[sequence.num_prompt_tokens - 1 :],
            atol=TOLERANCE,
            rtol=0,
        )


def _one_line(message: str) -> str:
    """A message without what is this tiny model's alone: class, numbers of layers, what else it says behind a full stop."""
    message = " ".join(message.split()).split(". ")[0]
    message = re.sub(
        r"^(the model( \(type '[^']*'\))?|\w+) cannot be \w+( over a paged cache)?: ", "", message
    )
    message = re.sub(r"^attention was called .* layers \((.*)\)$", r"\1", message)
    message = re.sub(r"^\w*Attention\w* ", "its attention ", message)
    return message.replace("|", "\\|")


def render(findings: Mapping[str, Finding]) -> str:
    """The part of the README between BEGIN and END, both included."""
    served = [name for name in ARCHITECTURES if findings[name].verdict == SERVED]
    lines = [
        BEGIN,
        f"<details><summary>With transformers {transformers.__version__}, {len(served)} of its {len(ARCHITECTURES)} "
        "causal language models are served, each seen to compute the same logits</summary>",
        "",
        f"Served: {', '.join(served)}.",
        "",
        "| | reason | architectures |",
        "|---|---|---|",
    ]
    names: dict[Finding, list[str]] = {}
    for name in ARCHITECTURES:
        if findings[name].verdict != SERVED:
            names.setdefault(findings[name], []).append(name)
    for finding in sorted(
        names, key=lambda each: (each.verdict == NOT_TRIED, -len(names[each]), each.reason)
    ):
        lines.append(f"| {finding.verdict} | {finding.reason} | {', '.join(names[finding])} |")
    return "\n".join([*lines, "", "</details>", END])


def parse(text: str) -> tuple[str, dict[str, Finding]]:
    """Read a README back: the version of transformers it speaks of, and its findings by architecture.

    Raises:
        ValueError: there is no such table in it.
    """
    start, stop = text.index(BEGIN), text.index(END)
    table = text[start:stop]
    version = re.search(r"transformers (\S+),", table)
    served = re.search(r"^Served: (.*)\.$", table, re.MULTILINE)
    if version is None or served is None:
        raise ValueError("the table of architectures in the README is not as the command writes it")
    findings = {name: Finding(SERVED) for name in served[1].split(", ")}
    for verdict, reason, names in re.findall(r"^\| (\w[\w ]*) \| (.*) \| (.*) \|$", table, re.MULTILINE):
        findings |= {name: Finding(verdict, reason) for name in names.split(", ")}
    return version[1], findings


def main(arguments: list[str]) -> int:
    """``[README.md]``: print the table, or put it into that file in the place of the one that is there."""
    torch.set_num_threads(1)  # more only get in each other's way with tensors this small
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    findings = {}
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            findings[name] = examine(name, Path(folder))
        print(f"{name}: {findings[name].verdict} {findings[name].reason}", file=sys.stderr)
    table = render(findings)
    if not arguments:
        print(table)
        return 0
    file = Path(arguments[0])
    text = file.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    file.write_text(text[:start] + table + text[stop:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
