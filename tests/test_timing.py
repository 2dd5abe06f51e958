"""The estimated time of a step, on cases that are small enough to be computed by hand."""

import dataclasses

import keras
import pytest
import torch
import torch.distributed as dist
from keras import layers
from torch.fx import Graph

import keras_spmd
from keras_spmd.plan._figures import Device, Link, Network
from keras_spmd.plan._kernels import kernels_of
from keras_spmd.plan._timing import seconds_of, timing_of
from keras_spmd.plan._world import imagined_world

_c10d = torch.ops._c10d_functional
# A product of n x n has 2 n**3 operations; these take a second. Its memory costs nothing.
N = 100
SLOW = Link("string", 1000.0, 0.25)
BARE = Device(
    "abacus",
    2**30,
    flops_16=4e6,
    flops_32=2e6,
    bandwidth=1e30,
    network=Network(SLOW, dataclasses.replace(SLOW, name="letters", bandwidth=100.0), 4),
    reserved=0,
    product_efficiency=1.0,
    memory_efficiency=1.0,
    launch=0.0,
)


@dataclasses.dataclass
class Collective:
    kind: str
    nbytes: int


def test_rings():
    """A sum goes around twice, what is gathered or scattered once, less what is there already."""
    link = Link("wire", bandwidth=1000.0, latency=0.01)
    assert seconds_of(Collective("all_reduce", 8000), link, 4) == pytest.approx(
        2 * (3 / 4 * 8.0 + 2 * 0.01)
    )
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert seconds_of(Collective(kind, 8000), link, 4) == pytest.approx(6.0 + 2 * 0.01)
    assert seconds_of(Collective("all_reduce", 8000), link, 1) == 0.0


def test_links_of_a_host_and_between_hosts():
    network = Network(Link("in", 400.0, 1e-6), Link("out", 50.0, 1e-5), devices_per_host=4)
    assert network.link_of((0, 1, 2, 3)) == network.within
    alone = network.link_of((0, 4, 8))
    assert (alone.bandwidth, alone.latency) == (50.0, 1e-5)
    assert network.link_of((0, 1, 4, 5)).bandwidth == 100.0, "two cards of each host"
    assert network.link_of(tuple(range(8))).bandwidth == 200.0
    fast = dataclasses.replace(network, across=Link("out", 300.0, 1e-5))
    assert fast.link_of(tuple(range(8))).bandwidth == 400.0, "not faster than inside of a host"


def step(products):
    """A sum over the ranks with some products beside it, and one that waits for the sum."""
    graph = Graph()

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(N, N, device="meta")
        return node

    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(N, N, device="meta")
    summed = call(_c10d.all_reduce.default, x, "sum", dist.group.WORLD.group_name)
    y = x
    for _ in range(products):
        y = call(torch.ops.aten.mm.default, y, x)
    done = call(_c10d.wait_tensor.default, summed)
    graph.output(call(torch.ops.aten.mm.default, y, done))
    return graph


# 40,000 bytes twice around half a ring of two, and twice the latency.
NETWORK = 2 * (1 / 2 * 4 * N * N / 1000.0 + 0.25)


@pytest.mark.parametrize("products", [0, 10, 60])
def test_what_is_not_done_when_it_is_waited_for_is_exposed(products):
    with imagined_world(2):
        graph = step(products)
        timing = timing_of(graph, kernels_of(graph, for_gpu=True), BARE, None)
    exposed = max(0.0, NETWORK - products)
    assert timing.network == pytest.approx(NETWORK) == pytest.approx(40.5)
    assert timing.compute == pytest.approx(products + 1)
    assert timing.exposed == pytest.approx(exposed)
    assert timing.seconds == pytest.approx(products + exposed + 1)
    assert timing.flops == (products + 1) * 2 * N**3
    lanes = [(span.lane, span.start, span.seconds) for span in timing.spans]
    assert lanes[0] == ("network", 0.0, pytest.approx(NETWORK))
    last = ("compute", pytest.approx(max(NETWORK, products)), pytest.approx(1.0))
    joined = ("compute", 0.0, pytest.approx(products + 1.0))
    assert lanes[-1] == (last if exposed else joined), "what follows at once is one piece"


def one_layer():
    model = keras.Sequential([keras.Input((N,)), layers.Dense(N, use_bias=False)])
    model.compile("sgd", "mse")
    return model


def planned(device):
    return keras_spmd.plan(one_layer, (2,), ("batch",), None, ((200, N), (200, N)), device=device)


def test_a_layer_on_two_devices():
    """100 rows for each: a product forward, one backward, a sum of gradients and of the loss."""
    plan = planned(BARE)
    assert plan.flops == 2 * 2 * N**3
    assert plan.compute_seconds == pytest.approx(2.0)
    gradients, loss = 4 * N * N, 4
    assert sorted(t.nbytes for t in plan.transfers) == [loss, gradients]
    sums = 2 * (1 / 2 * (gradients + loss) / 1000.0) + 2 * 2 * 0.25
    assert plan.network_seconds == pytest.approx(sums)
    assert plan.seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)
    assert plan.exposed_seconds <= plan.network_seconds
    assert plan.mfu == pytest.approx(plan.compute_seconds / plan.seconds)


def test_figures_of_ones_own_win():
    """A device is its figures: each that is changed changes what it says, and nothing else."""
    plan = planned(BARE)
    twice = planned(dataclasses.replace(BARE, flops_32=4e6))
    assert twice.compute_seconds == pytest.approx(plan.compute_seconds / 2)
    assert twice.network_seconds == plan.network_seconds
    half = planned(dataclasses.replace(BARE, product_efficiency=0.5))
    assert half.compute_seconds == pytest.approx(2 * plan.compute_seconds)
    letters = planned(dataclasses.replace(BARE, network=Network(SLOW, BARE.network.across, 1)))
    latency = 2 * 2 * 0.25
    assert letters.network_seconds - latency == pytest.approx(
        10 * (plan.network_seconds - latency)
    ), "with one device on each host, all goes by letter"
    faster = dataclasses.replace(
        keras_spmd.plan.H100, network=Network(Link("own", 1e15, 0.0), Link("own", 1e15, 0.0))
    )
    preset, own = planned("H100"), planned(faster)
    assert own.network_seconds < preset.network_seconds / 1000
    assert own.compute_seconds == pytest.approx(preset.compute_seconds)
    assert own.memory_limit == preset.memory_limit
