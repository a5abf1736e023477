"""`kvblend bench`: questions about a workload that need no running service."""
