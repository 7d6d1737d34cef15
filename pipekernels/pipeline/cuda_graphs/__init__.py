"""Stages on CUDA devices run as CUDA graphs: what can be captured, when, and in whose memory.
Experimental: no GPU has run it yet. Called by the engine alone."""
