"""The edge that authors touch: building cartridges."""
