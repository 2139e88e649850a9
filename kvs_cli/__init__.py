"""The kvs command line."""
