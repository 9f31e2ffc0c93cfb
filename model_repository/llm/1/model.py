"""The Triton model: hands requests to the service of the installed package `paged_engine`, and nothing else."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_engine.errors import ConfigurationError
from paged_engine.serving import faults, triton
from paged_engine.serving.service import Service
from paged_engine.serving.ticket import ServedEngine

logger = logging.getLogger("paged_engine")


class TritonPythonModel:
    """One instance of the model; Triton calls the methods below, one at a time except `is_ready`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and start serving. A failure fails the load, with its cause as the message."""
        self._log_handler = triton.TritonLogHandler()
        logger.addHandler(self._log_handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            config = triton.read_config(args)
            # Slow to import: only now, and not when Triton loads this file merely to look at it.
            from paged_engine.loading import load_engine

            engine = load_engine(config)
        except ConfigurationError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        # load_engine has logged the pool's size in pages, tokens and bytes.
        values = ", ".join(f"{key}={value}" for key, value in engine.config.model_dump().items())
        logger.info("effective configuration: %s", values)
        served: ServedEngine = engine
        if faults.are_enabled():
            logger.warning("faults on demand are enabled (PAGED_ENGINE_FAULTS): not for production")
            served = faults.FaultyEngine(engine)
        self._service = Service(served, engine.config, triton.open_metrics(args))
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in and return at once; the answers go through the response senders."""
        for request in requests:
            responder = triton.TritonResponder(request.get_response_sender())
            self._service.submit(partial(triton.read_request, request), responder)

    def is_ready(self) -> bool:
        """Whether requests are taken in and being worked on; Tritons that do not know of it never ask."""
        return self._service.is_ready()

    def finalize(self) -> None:
        """End the threads and let go of everything that belongs to Triton; a response sender left over blocks unloading."""
        self._service.close()
        del self._service
        logger.removeHandler(self._log_handler)
        gc.collect()
