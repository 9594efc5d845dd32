"""The ways of finding a posterior, one folder each; a method may use `map`, the plain network, and no other method."""
