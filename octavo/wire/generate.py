"""Client <-> gateway, as far as a record of ours is in it."""

from octavo.records.generate import IndexState
from octavo.v1 import gateway_pb2 as gateway_v1

_STATE_TO_WIRE = {
    IndexState.EXACT: gateway_v1.INDEX_STATE_EXACT,
    IndexState.DEGRADED: gateway_v1.INDEX_STATE_DEGRADED,
    IndexState.FALLBACK: gateway_v1.INDEX_STATE_FALLBACK,
}
_STATE_FROM_WIRE = {value: state for state, value in _STATE_TO_WIRE.items()}


def index_state_to_wire(state: IndexState | None) -> "gateway_v1.IndexState.ValueType":
    return gateway_v1.INDEX_STATE_UNSPECIFIED if state is None else _STATE_TO_WIRE[state]


def index_state_from_wire(value: "gateway_v1.IndexState.ValueType") -> IndexState | None:
    """None for a state that is not told, or not known here: it is not worth losing a reply for."""
    return _STATE_FROM_WIRE.get(value)
