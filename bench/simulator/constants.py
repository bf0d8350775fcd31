"""Every constant of the simulator's physics, with its unit and where it is from. Nothing here is computed at run time.

They were written down before the first table was printed, and none is fitted to a row that the simulator is to
reproduce: what differs from published numbers is reported. What kernels reach of a data sheet, and what a step costs
beyond its work, stand with the devices themselves (`sched.shapes.DeviceShape`, `sched.roofline.DEVICES`), which the
oracle's prior reads too. Sources: [sup], [art] the published supplement and artifact, [fit] a fit to published numbers,
[general] general knowledge that nothing published confirms.
"""

from __future__ import annotations

from typing import Final

from janus_server.sched.oracle_prior import CHUNK_TOKENS
from janus_server.sched.source import Link, Links

FORK_FIXED_S: Final = 0.283
"""What a copy of weights between devices costs before a byte moves. [fit]: the straight line through the two published
forks at the same tensor parallel degree, 8.2 GB a device in 408 ms and 32.8 GB in 783 ms."""

FORK_BYTES_S: Final = 65e9
"""What one device gets of its link (163.6 GB/s measured) while weights are copied. [fit]: the slope of that same line.
It belongs to the fixed part above: another speed would need another fixed part. The third published fork, 42 GB a
device in 742 ms, lies on no line with these two (it asks for 91 GB/s); it comes out too long with this constant."""

HOST_FIXED_S: Final = 0.283
"""The same for a copy from host memory. That of a fork: with it 8.2 GB at 59 GB/s take 0.42 s, published as 0.4."""

HOST_BYTES_S: Final = 59e9
"""From host memory to one device. [art]: measured, of a specified 140 GB/s."""

HOST_SHARED_BYTES_S: Final = 276e9
"""From host memory to all devices of one host together. [fit]: 42 GB to each of 16 devices at once in 2.71 s."""

FAR_FIXED_S: Final = 0.283
"""A copy from a device in another domain begins like one from near. [general]"""

FAR_BYTES_S: Final = 20e9
"""Over the network to one device: 200 Gb/s a die is 25 GB/s, of which copies reach four fifths. [general]"""

FAR_SHARED_BYTES_S: Final = 40e9
"""Over the network into one host. [general]: two adapters' worth."""

DISK_FIXED_S: Final = 0.5
"""Opening a checkpoint, reading its headers, and the fixed part of what follows. [general]"""

DISK_BYTES_S: Final = 3e9
"""From local flash to one device. [general]: one NVMe drive."""

DISK_SHARED_BYTES_S: Final = 6e9
"""From local flash to all devices of one host. [general]: two NVMe drives."""

PROCESS_START_S: Final = 20.0
"""A new server process until it reads weights: interpreter, libraries, device context, communicators, graphs, warm-up.
[general]: published only as "tens of seconds to minutes" for all of a classic scale-out, weights from disk included."""

LINKS: Final = Links(
    near=Link(FORK_FIXED_S, FORK_BYTES_S),
    host=Link(HOST_FIXED_S, HOST_BYTES_S, HOST_SHARED_BYTES_S),
    far=Link(FAR_FIXED_S, FAR_BYTES_S, FAR_SHARED_BYTES_S),
    disk=Link(DISK_FIXED_S, DISK_BYTES_S, DISK_SHARED_BYTES_S),
)
"""The world's truth, written out: what the leader predicts with (`sched.source.Links()`) may be set otherwise."""

KV_MESSAGE_S: Final = 20e-6
"""One message between devices. [2nd-hand], of the published device's interconnect: below 20 µs under 1 MB."""

KV_LINK_REACHED: Final = 0.8
"""Of the link between devices, what KV written layer by layer reaches. [general]"""

STEP_TOKENS: Final = int(CHUNK_TOKENS)
"""Tokens of one step at most: what the oracle's prior expects of a data-centre device too. A CPU server uses 512."""

SEQUENCES: Final = 256
"""Sequences that one model runs at once on a device at most; memory or the promised TPOT ends most batches before."""

LEAST_SPEED: Final = 0.1
"""A device that weights are copied from keeps at least this part of its speed."""
