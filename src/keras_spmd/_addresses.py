"""Which of a host's addresses the other hosts of a job can reach.

gloo takes the address that the host's own name has. On many hosts that is 127.0.0.1 or 127.0.1.1,
where nobody else can reach it, or belongs to another network. The address from which a process
reaches the job's meeting point is one that the others can reach, too.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

import torch.distributed as dist

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def towards(host: str, port: int) -> str:
    """The address of this host from which packets to another one are sent; empty if none is."""
    with contextlib.suppress(OSError):
        for family, _, _, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
                s.connect(there)  # Nothing is sent.
                return s.getsockname()[0]
    return ""


def choose_interface(store: dist.Store, rank: int, world_size: int) -> None:
    """Let gloo use the network between the hosts, if there are several and nobody chose one."""
    if rank == 0:
        found = [a.decode() for a in store.multi_get([f"here/{r}" for r in range(world_size)])]
        outer = [a for a in found if a and not _is_loopback(a)]
        store.set("outer address", outer[0] if len(set(found)) > 1 and outer else "")
    outer_address = store.get("outer address").decode()
    if not outer_address or os.environ.get(VARIABLE):
        return
    address = store.get(f"here/{rank}").decode()
    if not address or _is_loopback(address):
        # The meeting point is on this host, which knows itself by another name.
        address = towards(outer_address, 1)
    name = interface_of(address)
    if name is not None:
        os.environ[VARIABLE] = name


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None if that can't be told."""
    if sys.platform != "linux" or not address:
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # It has no address.
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    digits = ipaddress.IPv6Address(address.partition("%")[0]).exploded.replace(":", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found, *_, name = line.split()
            if found == digits:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
