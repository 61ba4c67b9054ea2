"""The worker on the wire: one Serve stream per gateway. Protobuf ends here."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from octavo.errors import InvalidRequest, OctavoError
from octavo.status import Context
from octavo.v1 import worker_pb2 as v1
from octavo.v1 import worker_pb2_grpc as v1_grpc
from octavo.wire.serve import report_to_wire, submission_from_wire
from worker.engine import Engine
from worker.outbox import Outbox

log = logging.getLogger("octavo.worker")

SERVICE_NAME = v1.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServicer(v1_grpc.WorkerServicer):
    """octavo.v1.Worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Serve(
        self, request_iterator: AsyncIterator[v1.ServeRequest], context: Context
    ) -> AsyncGenerator[v1.ServeReply]:
        """One gateway's stream, one reply a step. Its end, whoever ends it, cancels the gateway's requests."""
        outbox = self._engine.open_outbox()
        gateway = {"gateway": context.peer()}
        log.info("gateway_joined", extra=gateway)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            async with contextlib.aclosing(outbox.reports()) as reports:
                async for report in reports:
                    yield report_to_wire(report)
        except OctavoError as error:
            log.warning("gateway_cut_off", extra=gateway | {"reason": str(error)})
            raise
        finally:
            reader.cancel()
            self._engine.close_outbox(outbox)
            log.info("gateway_left", extra=gateway)

    async def _read(self, requests: AsyncIterator[v1.ServeRequest], outbox: Outbox) -> None:
        """Take the gateway's messages until it ends the stream or breaks its rules."""
        try:
            async for request in requests:
                self._take(request, outbox)
        except Exception as error:
            outbox.close(error)
        else:
            outbox.close()

    def _take(self, request: v1.ServeRequest, outbox: Outbox) -> None:
        match request.WhichOneof("kind"):
            case "submit":
                try:
                    self._engine.submit(outbox, submission_from_wire(request.submit))
                except OctavoError as error:  # concerns this request only
                    self._engine.refuse(outbox, request.submit.request, error)
            case "cancel":
                cancel = request.cancel
                self._engine.cancel(outbox, cancel.request, cancel.sample if cancel.HasField("sample") else None)
            case _:
                raise InvalidRequest("serve: an empty message, wanted submit or cancel")
