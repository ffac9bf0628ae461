"""Models: what they are, their weights and tokenizers, and where to get them."""

from lockstep.models.catalog import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
