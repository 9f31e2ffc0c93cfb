"""Fixtures: a fake server for each protocol, and a client of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_drivers import AsyncDriver, Driver, MakeDriver, SyncDriver
from fake_triton import FakeTriton, start

from paged_client import Client


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(protocol: str) -> Iterator[FakeTriton]:
    server = start(protocol)
    yield server
    server.stop()


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def make_driver(request: pytest.FixtureRequest) -> Iterator[MakeDriver]:
    make = MakeDriver(request.param)
    yield make
    make.close()


@pytest.fixture
def driver(server: FakeTriton, make_driver: MakeDriver) -> Driver:
    return make_driver(server.url)


@pytest.fixture
def client(server: FakeTriton) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
