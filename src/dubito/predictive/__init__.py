"""From a posterior over weights to a distribution over outputs, and from there to a prediction."""
