"""What devices and the links between them can do: makers' figures, and what is reached of them."""

from dataclasses import dataclass, field

GB, TB, TFLOPS = 10**9, 10**12, 10**12
_GIB = 2**30


@dataclass(frozen=True)
class Link:
    """What connects devices: bytes per second in one direction, and seconds to begin."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Network:
    """The links of a job: inside of a host, and between hosts (for each device)."""

    within: Link
    across: Link
    devices_per_host: int = 8

    def link_of(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link of a ring over these ranks; a host's cards work together."""
        hosts = {rank // self.devices_per_host for rank in ranks}
        if len(hosts) == 1:
            return self.within
        cards = max(1, len(ranks) // len(hosts))
        bandwidth = min(self.within.bandwidth, cards * self.across.bandwidth)
        return Link(self.across.name, bandwidth, self.across.latency)


NVLINK3 = Link("NVLink 3", 300 * GB, 5e-6)
NVLINK4 = Link("NVLink 4", 450 * GB, 5e-6)
NVLINK5 = Link("NVLink 5", 900 * GB, 5e-6)
INFINIBAND_HDR = Link("InfiniBand HDR", 25 * GB, 15e-6)
INFINIBAND_NDR = Link("InfiniBand NDR", 50 * GB, 15e-6)
LOOPBACK = Link("loopback", 2 * GB, 50e-6)


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: For people.
        memory: In bytes.
        reserved: What the driver, the libraries and the allocator's gaps take of it.
        flops_16: Operations per second of bfloat16 and float16 products, without sparsity.
        flops_32: The same of float32.
        bandwidth: Bytes per second of its memory.
        network: What connects it with others.
        product_efficiency: The share of the operations that large products reach.
        memory_efficiency: The share of the bandwidth that elementwise kernels reach.
        launch: Seconds that a kernel takes at least.
        is_gpu: Whether steps are captured as for a GPU: communication overlaps with compute, and
            cheap activations are computed again.
    """

    name: str
    memory: int
    flops_16: float
    flops_32: float
    bandwidth: float
    network: Network = field(repr=False)
    reserved: int = 2 * _GIB
    product_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    launch: float = 3e-6
    is_gpu: bool = True


A100 = Device(
    "A100", 80 * _GIB, 312 * TFLOPS, 19.5 * TFLOPS, 2.039 * TB, Network(NVLINK3, INFINIBAND_HDR)
)
H100 = Device(
    "H100", 80 * _GIB, 989 * TFLOPS, 67 * TFLOPS, 3.35 * TB, Network(NVLINK4, INFINIBAND_NDR)
)
H200 = Device(
    "H200", 141 * GB, 989 * TFLOPS, 67 * TFLOPS, 4.8 * TB, Network(NVLINK4, INFINIBAND_NDR)
)
B200 = Device(
    "B200", 180 * GB, 2250 * TFLOPS, 80 * TFLOPS, 8 * TB, Network(NVLINK5, INFINIBAND_NDR)
)
CPU = Device(
    "CPU",
    64 * _GIB,
    0.1 * TFLOPS,
    0.1 * TFLOPS,
    20 * GB,
    Network(LOOPBACK, LOOPBACK),
    reserved=0,
    is_gpu=False,
)
DEVICES = {device.name: device for device in (A100, H100, H200, B200, CPU)}


def device_of(device: "Device | str") -> Device:
    """A preset by its name, or a device as it is."""
    if isinstance(device, Device):
        return device
    found = DEVICES.get(str(device).upper())
    if found is None:
        raise ValueError(
            f"There are figures for {', '.join(DEVICES)}, not for {device!r}. Pass a "
            "keras_spmd.plan.Device with figures of your own."
        )
    return found
