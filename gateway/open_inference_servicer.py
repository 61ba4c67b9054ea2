"""KServe's open inference protocol, as far as it tells of the server and its models: for those who watch many kinds."""

from collections.abc import Callable
from importlib.metadata import version

from gateway.dispatcher import Dispatcher
from gateway.tenancy import Tenancy
from octavo.errors import UnknownModel
from octavo.status import Context
from octavo.v1 import open_inference_pb2 as v2
from octavo.v1 import open_inference_pb2_grpc as v2_grpc

SERVICE_NAME = v2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

NAME = "octavo"


class OpenInferenceServicer(v2_grpc.GRPCInferenceServiceServicer):
    """inference.GRPCInferenceService. Anybody may ask after the server; of models those are told who may use them."""

    def __init__(self, dispatcher: Dispatcher, tenancy: Tenancy, is_ready: Callable[[], bool]) -> None:
        """Answer with what `dispatcher` serves; `is_ready` says whether new requests are welcome."""
        self._dispatcher = dispatcher
        self._tenancy = tenancy
        self._is_ready = is_ready

    async def ServerLive(self, request: v2.ServerLiveRequest, context: Context) -> v2.ServerLiveResponse:
        """The process answers."""
        return v2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: v2.ServerReadyRequest, context: Context) -> v2.ServerReadyResponse:
        """As the health service says."""
        return v2.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(self, request: v2.ModelReadyRequest, context: Context) -> v2.ModelReadyResponse:
        """Whether some worker serves the model. One that nobody knows is not ready."""
        self._tenancy.account(context.invocation_metadata())
        return v2.ModelReadyResponse(ready=self._serves(request.name, request.version))

    async def ServerMetadata(self, request: v2.ServerMetadataRequest, context: Context) -> v2.ServerMetadataResponse:
        """Name and version."""
        return v2.ServerMetadataResponse(name=NAME, version=version("octavo"))

    async def ModelMetadata(self, request: v2.ModelMetadataRequest, context: Context) -> v2.ModelMetadataResponse:
        """A model that some worker serves. It takes and gives no tensors."""
        self._tenancy.account(context.invocation_metadata())
        if not self._serves(request.name, request.version):
            of_version = f" of version {request.version!r}" if request.version else ""
            raise UnknownModel(f"name: no worker serves {request.name!r}{of_version}")
        return v2.ModelMetadataResponse(name=request.name, platform=NAME)

    def _serves(self, name: str, version: str) -> bool:
        return not version and any(model.name == name for model in self._dispatcher.models())
