"""The kvdev command line."""
