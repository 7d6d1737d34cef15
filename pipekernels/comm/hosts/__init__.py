"""Collectives over several hosts: what ranks agree on, the links between hosts, and the steps of
each collective. Called by ``Communicator`` and by ``join``."""
