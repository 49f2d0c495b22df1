"""How the shipped recall model was made: its documents, its training, its figures."""
