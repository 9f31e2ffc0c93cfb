"""Every architecture of transformers: served with its logits, or refused for the reason that the README gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from architecture_survey import (
    ARCHITECTURES,
    BEGIN,
    END,
    NOT_TRIED,
    SERVED,
    Finding,
    check_parity,
    examine,
    parse,
    render,
)
from tiny_models import TINY_MODELS, save_tiny_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
VERSION, FINDINGS = parse(README)
other_version = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"the README's table is of transformers {VERSION}, here is {transformers.__version__}",
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_served_rightly_or_refused(tmp_path: Path, name: str) -> None:
    finding = examine(name, tmp_path)
    if transformers.__version__ == VERSION:
        assert finding == FINDINGS.get(name), "bring the README up to date: ./build.sh models --write"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_variants_are_served_rightly(tmp_path: Path, name: str) -> None:
    check_parity(save_tiny_model(name, tmp_path))


@other_version
def test_the_readme_lists_each_architecture_as_the_command_would() -> None:
    assert sorted(FINDINGS) == sorted(ARCHITECTURES)
    assert README[README.index(BEGIN) : README.index(END) + len(END)] == render(FINDINGS)


def test_most_are_served() -> None:
    verdicts = [finding.verdict for finding in FINDINGS.values()]
    assert verdicts.count(SERVED) >= 100
    assert verdicts.count(NOT_TRIED) <= 5


def test_a_wrong_logit_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the survey relies on: a model that is served with other logits fails it, instead of being listed."""
    assert examine("llama", tmp_path / "right") == Finding(SERVED)
    monkeypatch.setattr("architecture_survey.TOLERANCE", 0.0)
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        examine("llama", tmp_path / "wrong")
