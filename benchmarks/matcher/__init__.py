"""`make bench-matcher`: kvblend's matcher beside both matchers of lmcache, on the same chunks and the same queries."""
