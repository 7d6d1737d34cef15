"""Which ranks are on which host."""

from __future__ import annotations


class HostMap:
    """The ranks of a communicator over several hosts, from the view of one rank.

    Args:
        hosts: the ranks on each host.
        rank: this rank.

    Attributes:
        host: the index of this rank's host.
        position: the index of this rank on its host.
        members: the ranks of this host.
        links: the smallest number of ranks on a host; each of these positions has a link.
        most: the largest number of ranks on a host.
        world_size: the number of ranks.
        places: each rank's index in a flattened table ``[hosts, most]``.
    """

    def __init__(self, hosts: list[list[int]], rank: int) -> None:
        self.hosts = hosts
        self.rank = rank
        self.links = min(map(len, hosts))
        self.most = max(map(len, hosts))
        self.world_size = sum(map(len, hosts))
        self.places = [0] * self.world_size
        for host, members in enumerate(hosts):
            for position, member in enumerate(members):
                self.places[member] = host * self.most + position
        self.host = self.host_of(rank)
        self.members = hosts[self.host]
        self.position = self.members.index(rank)

    def host_of(self, rank: int) -> int:
        """The index of the host of ``rank``."""
        return self.places[rank] // self.most
