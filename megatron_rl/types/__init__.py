"""The nouns that travel between packages, and the Protocols where mechanisms meet."""
