"""Adapters for inference engines. Each needs its engine installed: import the one you use."""
