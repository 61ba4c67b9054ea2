"""Holds a KV pool and runs a model; asks for blocks, never chooses them."""
