"""Collectives over several hosts: agreement on each call, links between hosts, and the steps of
each collective."""
