"""Trial: cartridges of generated text, and a server of one's own to try them on."""
