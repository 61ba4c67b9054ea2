"""The nouns: frozen values that one process tells another. `octavo.wire` gives them their protobuf form.

A module for each pair of neighbours, as in `octavo.wire`: `attend` (worker and cache manager), `serve` (gateway and
worker), `fleet` (managers and gateways), `insight` (what a manager is asked), `generate` (client and gateway); and
`scope` and `sampling`, of which several have some.
"""
