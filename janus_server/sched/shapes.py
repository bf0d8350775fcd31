"""A model and a device in numbers, as frozen records: what the roofline is computed from.

They cross a process and the journal within the oracle's records, and are read where numpy is not loaded: it is not
imported here. `roofline` does the arithmetic. Pure.
"""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model in numbers. Parameters count once each; expert_parameters are those of all routed experts of all layers.

    parameter_bytes is the width of a stored weight; kv_bytes are of one token in all layers; pair_flops are the
    attention's for one token that looks at one other, in all layers.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_bytes: float
    pair_flops: float
    parameter_bytes: float = 2.0
    expert_parameters: float = 0.0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.parameter_bytes

    @property
    def active_parameters(self) -> float:
        """Parameters that one token uses."""
        routed = self.expert_parameters * self.experts_per_token / self.experts if self.experts else 0.0
        return self.parameters - self.expert_parameters + routed


class DeviceShape(msgspec.Struct, frozen=True, kw_only=True):
    """A device's data sheet, and the parts of it that kernels reach: flops and bandwidths are a second's.

    link_bytes_s is to a neighbour, one direction. step_s is what a step costs beyond its work; message_s what an
    exchange between shards does. activation_bytes: activations, the runtime and what the allocator keeps.
    """

    name: str
    flops: float
    memory_bytes: float
    bandwidth_bytes_s: float
    link_bytes_s: float
    flops_reached: float = 0.5
    bandwidth_reached: float = 0.8
    link_reached: float = 0.8
    memory_reached: float = 0.9
    step_s: float = 2e-3
    message_s: float = 10e-6
    activation_bytes: float = 1e9
