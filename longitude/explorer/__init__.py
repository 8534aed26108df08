"""The interactive page of `longitude explore`, and its static form."""
