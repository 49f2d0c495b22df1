"""The validation ladder: does a server, with its own model, answer from cartridges as from the documents themselves?"""
