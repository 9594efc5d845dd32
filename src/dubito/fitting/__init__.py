"""The one fit loop and its contracts: a recipe builds an inference, the loop runs it, the result is a posterior."""
