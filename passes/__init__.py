"""Graph -> Graph and Program -> Program passes, one file a pass."""
