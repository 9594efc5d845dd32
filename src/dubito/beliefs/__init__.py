"""Probability distributions: likelihoods of targets, priors over weights, predictions, and training objectives."""
