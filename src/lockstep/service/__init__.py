"""Rollouts as a versioned service: replicas that serve one policy each, and the protocol by which it is replaced.

requests   what is asked for and what comes back; the interfaces between the parts
protocol   who serves what, which request goes where: decisions only, no threads, clocks or arrays
worker     one engine in a thread; process: one in a process of its own
service    carries out what the protocol decides
journal    what was admitted and how it ended, across a crash
http       the service for others; client: the same interface over HTTP
"""
