"""Faults on demand: each does what it says, to the request that asked for it."""

from __future__ import annotations

from typing import Any

import pytest
from serving_harness import Serve, wait_until

from paged_engine.serving import faults


def test_faults_are_off_unless_asked_for(serve: Serve) -> None:
    assert not faults.are_enabled({})
    assert not faults.are_enabled({"PAGED_ENGINE_FAULTS": "0"})
    assert faults.are_enabled({"PAGED_ENGINE_FAULTS": "1"})
    assert serve().ask("[[fault:prepare]]", max_tokens=1).wait().text == "a"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("prepare", "INTERNAL: Fault: prepare"),
        ("detokenize", "INTERNAL: Fault: detokenize"),
        ("respond", "INTERNAL: the response failed: UnicodeEncodeError"),
    ],
)
def test_a_fault_of_one_request_leaves_its_neighbours_alone(serve: Serve, fault: str, message: str) -> None:
    served = serve(faults=True)
    good = [served.ask(stream=True) for _ in range(3)]
    bad = served.ask(f"please [[fault:{fault}]] now", stream=True)
    assert bad.wait().error.startswith(message)
    assert all(len(answer.wait().text) == 26 for answer in good)
    served.assert_clean()


def test_a_fault_of_a_step_is_survived(serve: Serve) -> None:
    served = serve(faults=True)
    assert served.ask("[[fault:step]]").wait().error == "INTERNAL: the step failed: Fault: step"
    assert served.ask().wait().error == ""
    assert served.service.is_ready()


def test_a_fatal_fault_is_not(serve: Serve) -> None:
    served = serve(faults=True)
    assert served.ask("[[fault:fatal]]").wait().error.startswith("INTERNAL")
    wait_until(lambda: not served.service.is_ready())
    assert served.ask().wait().error.startswith("UNAVAILABLE: the engine is down")


def test_a_token_that_does_not_exist_reaches_the_model(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(faults=True)
    seen: list[int] = []
    execute = served.model.execute

    def watch(batch: Any) -> Any:
        seen.extend(batch.token_ids.tolist())
        return execute(batch)

    monkeypatch.setattr(served.model, "execute", watch)
    served.ask("[[fault:model]]", max_tokens=1).wait()
    assert max(seen) == 2**31 - 1
