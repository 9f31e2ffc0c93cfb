from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving_harness import ServedModel


@pytest.fixture
def serve() -> Iterator[Callable[..., ServedModel]]:
    """Starts services, and ends them after the test."""
    started: list[ServedModel] = []

    def start(**parameters: Any) -> ServedModel:
        started.append(ServedModel(**parameters))
        return started[-1]

    yield start
    for served in started:
        served.model.go_on()
        served.service.close()
