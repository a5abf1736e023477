"""The whole way of a lookup, as an engine sees it, over real services."""
